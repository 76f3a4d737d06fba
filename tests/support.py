"""What several test files need: real processes at one barrier, and waiting with a deadline."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

from sovereign_agent.errors import SovereignError

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["psycopg", "sovereign_agent.database", "sovereign_agent.relay"])


def eventually(condition: Callable[[], Any], *, within: float = 20.0, every: float = 0.01) -> Any:
    """Poll until `condition` is true and return what it answered; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} was still {answer!r} after {within} s")
        time.sleep(every)


def at_one_barrier(count: int, act: Callable[..., Any], *args: Any, within: float = 60.0) -> list[Any]:
    """Run ``act(n, *args)`` in `count` real processes that start together; return what each one answered.

    A refusal answers with its category. Anything else that is raised fails the test.
    """
    barrier = _processes.Barrier(count)
    answers = _processes.Queue()
    children = [
        _processes.Process(target=_behind_the_barrier, args=(barrier, answers, act, number, args))
        for number in range(count)
    ]
    for child in children:
        child.start()
    try:
        results = [answers.get(timeout=within) for _ in children]
    finally:
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()
                child.join()
    broken = [text for kind, text in results if kind == "broken"]
    assert not broken, "\n".join(broken)
    return [answer for _, answer in results]


def _behind_the_barrier(barrier: Any, answers: Any, act: Callable[..., Any], number: int, args: tuple[Any, ...]) -> None:
    try:
        barrier.wait(60)
        answers.put(("done", act(number, *args)))
    except SovereignError as error:
        answers.put(("done", error.category or type(error).__name__))
    except BaseException:
        answers.put(("broken", traceback.format_exc()))
