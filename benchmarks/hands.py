"""What the hands cost: starting a program under its guardian, reading its stream, looking at a run's boundary."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Literal

from sovereign_agent import workspace
from sovereign_agent.boundary import Boundary
from sovereign_agent.providers import process
from sovereign_agent.providers.claude import read
from sovereign_agent.providers.process import Leash, Reader
from sovereign_agent.providers.stream import Stream

STARTS = 30
EVENTS = 333_000
SAYS_HELLO = ("sh", "-c", "echo hello")
SPEAKS = """
import json, sys
event = {"type": "assistant", "message": {"id": "m", "content": [{"type": "text", "text": "x" * 200}]}}
line = json.dumps(event) + "\\n"
result = {"type": "result", "subtype": "success", "is_error": False, "result": "done", "session_id": "s"}
sys.stdout.write('{"type": "system", "subtype": "init", "session_id": "s"}\\n')
for _ in range(int(sys.argv[1])):
    sys.stdout.write(line)
sys.stdout.write(json.dumps(result) + "\\n")
"""


def seconds(act: Callable[[], object]) -> float:
    """How long one call takes, on the wall."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def hands(root: Path) -> dict[str, dict[str, float]]:
    """Every figure, in folders of runs below `root`."""
    root.mkdir()
    fresh = (workspace.allocate(root, f"run-{number}") for number in count())
    return {"first_byte": first_byte(fresh), "stream": stream(fresh), "boundary": boundary_check(root / "boundary")}


class _FirstByte:
    """A `Reader` that notes when the first byte came."""

    state: Literal["reading"] = "reading"

    def __init__(self) -> None:
        self.at = 0.0

    def take(self, _: bytes) -> None:
        self.at = self.at or time.perf_counter()


def first_byte(fresh: Iterator[workspace.Workspace]) -> dict[str, float]:
    """From the call to the program's first byte: a guarded run, and a bare Popen, in turns."""
    ours, bare = [], []
    for _ in range(STARTS):
        run, reader = next(fresh), _FirstByte()
        start = time.perf_counter()
        _run(SAYS_HELLO, run, reader)
        ours.append(reader.at - start)
        start = time.perf_counter()
        with subprocess.Popen(SAYS_HELLO, stdout=subprocess.PIPE, bufsize=0, start_new_session=True) as child:
            assert child.stdout
            child.stdout.read(1)
            bare.append(time.perf_counter() - start)
    guarded, alone = statistics.median(ours) * 1000, statistics.median(bare) * 1000
    return {"guarded_ms": round(guarded, 1), "bare_ms": round(alone, 1), "more_ms": round(guarded - alone, 1)}


def stream(fresh: Iterator[workspace.Workspace], rounds: int = 3) -> dict[str, float]:
    """A hundred megabytes of events through a guarded run, against ``for line in stdout: json.loads(line)``."""
    argv = (sys.executable, "-c", SPEAKS, str(EVENTS))

    def bare() -> None:
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
            assert child.stdout
            for line in child.stdout:
                json.loads(line)

    pairs = [(seconds(bare), seconds(lambda: _run(argv, next(fresh), Stream(read, Leash())))) for _ in range(rounds)]
    return {"ratio": round(statistics.median(alone / guarded for alone, guarded in pairs), 2)}


def boundary_check(root: Path, files: int = 20_000) -> dict[str, float]:
    """What a run pays to have its surroundings looked at, before and after, in an empty root and in a full one."""

    def milliseconds(name: str) -> float:
        run = workspace.allocate(root, name)
        looks = [seconds(lambda: Boundary(root, run.path).violations()) for _ in range(200)]
        return statistics.median(looks) * 1000

    (root / ".sovereign").mkdir(parents=True)
    empty = milliseconds("empty")
    for number in range(files):
        (root / f"file-{number}").touch()
    full = milliseconds("full")
    return {"empty_ms": round(empty, 3), "full_ms": round(full, 3), "times": round(full / empty, 2)}


def _run(argv: tuple[str, ...], run: workspace.Workspace, reader: Reader) -> None:
    process.run(
        argv,
        run,
        stdin=b"",
        variables=process.variables(),
        timeout_seconds=600,
        grace_seconds=1,
        leash=Leash(),
        reader=reader,
    )
