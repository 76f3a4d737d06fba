"""Containment: no program, and nothing that came from it, outlives its run, its worker or its worker's authority."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import pwd
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import at_one_barrier, child, eventually, heard, lock_is_free
from test_providers import COMPLETED, GOOD, envelope, verdict

from sovereign_agent.configuration import CommandSettings
from sovereign_agent.errors import ProviderFault
from sovereign_agent.providers import account, guardian, process
from sovereign_agent.providers.base import Proposal
from sovereign_agent.providers.command import CommandProvider
from sovereign_agent.providers.process import Ending, Leash
from sovereign_agent.workspace import Workspace, allocate, locate

pytestmark = pytest.mark.timeout(60)

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program another user")

TREE = """
import os, signal, sys, time

def fork(act):
    pid = os.fork()
    if not pid:
        act()
        os._exit(0)
    return pid

def rest():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(120)

def leave():
    os.setsid()
    rest()

def leave_for_good():
    os.setsid()
    fork(rest)

if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
fork(rest)
fork(leave)
os.waitpid(fork(leave_for_good), 0)
if "briefly" not in sys.argv:
    rest()
"""
"""A program with a child in its group, a child in a session of its own, and a daemon that was forked twice."""


@pytest.fixture
def run(tmp_path: Path) -> Workspace:
    return allocate(tmp_path, "run-1")


def start(run: Workspace, *argv: str, **options: Any) -> Ending:
    chosen: dict[str, Any] = {"timeout_seconds": 30, "grace_seconds": 0.3, "leash": Leash()} | options
    return process.run(argv, run, stdin=b"", variables=process.variables(), **chosen)


def plant(run: Workspace, *manner: str, **options: Any) -> Ending:
    return start(run, sys.executable, "-c", TREE, str(run.path / "pids"), *manner, **options)


def grown(run: Workspace, count: int = 4) -> list[psutil.Process]:
    """The whole tree, by number and start time."""
    path = run.path / "pids"
    pids = eventually(lambda: path.exists() and (lines := path.read_text().split()) and lines[count - 1 :] and lines)
    return [psutil.Process(int(pid)) for pid in pids]


def dead(processes: list[psutil.Process]) -> bool:
    def is_dead(each: psutil.Process) -> bool:
        try:
            return not each.is_running() or each.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(is_dead(each) for each in processes)


def at_last(act: Callable[..., Ending], *args: Any, **options: Any) -> Ending:
    """What it answers, in a thread that is left behind if it never does."""
    answers: list[Ending] = []
    thread = threading.Thread(target=lambda: answers.append(act(*args, **options)), daemon=True)
    thread.start()
    thread.join(20)
    assert answers, "it hangs"
    return answers[0]


@contextmanager
def in_a_thread(act: Callable[..., Ending], *args: Any, **options: Any) -> Iterator[Future[Ending]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(act, *args, **options)


def guard_of(run: Workspace) -> psutil.Process:
    """The guardian that works in a run's folder: the parent of the program there."""
    parent = grown(run, 1)[0].parent()
    assert parent
    assert guardian.__file__ in parent.cmdline()
    return parent


# the worker dies, or loses what it worked under


def _plant(pipe: Any, root: str, manner: tuple[str, ...], seconds: float | None) -> None:
    plant(allocate(root, "run-1"), *manner, leash=Leash(seconds))
    pipe.send("ended")


def located(tmp_path: Path) -> Workspace:
    return locate(tmp_path, "run-1")


@linux
@pytest.mark.parametrize("manner", [(), ("stubborn",)], ids=["obedient", "stubborn"])
def test_hazard_12_a_killed_worker_leaves_nothing_of_its_program_behind(
    tmp_path: Path, manner: tuple[str, ...]
) -> None:
    with child(_plant, str(tmp_path), manner, None) as (worker, _):
        tree = grown(located(tmp_path))
        worker.kill()
        eventually(lambda: dead(tree), within=10)
    eventually(lambda: lock_is_free(located(tmp_path)), within=5)


def _plant_after_a_word(pipe: Any, root: str) -> None:
    run = allocate(root, "run-1")
    pipe.send("starting")
    plant(run)


@linux
@pytest.mark.parametrize("milliseconds", [0, 5, 10, 15, 20, 30, 40, 60])
def test_a_worker_that_is_killed_while_it_starts_a_program_leaves_nothing_behind(
    tmp_path: Path, milliseconds: int
) -> None:
    with child(_plant_after_a_word, str(tmp_path)) as (worker, said):
        heard(said)
        time.sleep(milliseconds / 1000)
        begun = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        worker.join()
    eventually(lambda: dead(begun), within=10)
    pids = str(located(tmp_path).path / "pids")
    assert not [each for each in psutil.process_iter(["cmdline"]) if pids in (each.info["cmdline"] or [])]


@linux
def test_a_frozen_worker_s_program_ends_with_its_leash(tmp_path: Path) -> None:
    with child(_plant, str(tmp_path), (), 1.5) as (worker, said):
        tree = grown(located(tmp_path))
        os.kill(worker.pid, signal.SIGSTOP)
        assert not dead(tree)
        eventually(lambda: dead(tree), within=10)
        assert not said.poll()


def _plant_beside_a_copy(pipe: Any, root: str) -> None:
    thread = threading.Thread(target=plant, args=(allocate(root, "run-1"),), daemon=True)
    thread.start()
    grown(located(Path(root)))
    copy = os.fork()
    if not copy:
        time.sleep(60)
        os._exit(0)
    pipe.send(copy)
    thread.join()


@linux
def test_a_killed_worker_is_missed_though_a_copy_of_it_holds_its_socket(tmp_path: Path) -> None:
    with child(_plant_beside_a_copy, str(tmp_path)) as (worker, said):
        copy = psutil.Process(heard(said))
        tree = grown(located(tmp_path))
        worker.kill()
        eventually(lambda: dead(tree), within=10)
        assert not dead([copy])
        copy.kill()


@linux
@pytest.mark.parametrize("manner", [(), ("stubborn",)], ids=["obedient", "stubborn"])
@pytest.mark.parametrize("category", ["lease_lost", "interrupted"])
def test_a_cut_leash_ends_all_at_once(run: Workspace, category: str, manner: tuple[str, ...]) -> None:
    leash = Leash(60)
    with in_a_thread(plant, run, *manner, leash=leash) as ended:
        tree = grown(run)
        started = time.monotonic()
        leash.cut(category)
        leash.cut("timeout")
        ending = ended.result(20)
    assert time.monotonic() - started < 5
    assert dead(tree)
    assert ending.ended_by == category
    assert ending.signal == (signal.SIGKILL if manner else signal.SIGTERM)
    assert [*process.seen(ending)] == [category]


def test_a_leash_that_was_cut_before_ends_the_program_at_its_start(run: Workspace) -> None:
    leash = Leash()
    leash.cut("lease_lost")
    assert start(run, "sleep", "60", leash=leash).ended_by == "lease_lost"


def test_a_leash_that_runs_out_ends_the_program(run: Workspace) -> None:
    ending = start(run, "sleep", "60", leash=Leash(0.3))
    assert (ending.ended_by, ending.signal) == ("lease_lost", signal.SIGTERM)


def test_a_leash_that_is_extended_lets_the_program_live_on(run: Workspace) -> None:
    leash = Leash(0.8)
    with in_a_thread(start, run, "sleep", "2", leash=leash) as ended:
        while not ended.done():
            leash.extend(0.8)
            time.sleep(0.1)
    assert (ended.result().ended_by, ended.result().exit_code) == ("itself", 0)


@linux
@pytest.mark.parametrize("manner", [("briefly",), ("briefly", "stubborn")], ids=["obedient", "stubborn"])
def test_hazard_12_a_good_end_leaves_no_descendant(run: Workspace, manner: tuple[str, ...]) -> None:
    with in_a_thread(plant, run, *manner, grace_seconds=1) as ended:
        tree = grown(run, 3)
        ending = ended.result(20)
    assert dead(tree)
    assert (ending.ended_by, ending.exit_code, ending.survivors) == ("itself", 0, ())


@linux
def test_hazard_12_a_deadline_leaves_no_descendant(run: Workspace) -> None:
    with in_a_thread(plant, run, "stubborn", timeout_seconds=1.5) as ended:
        tree = grown(run)
        ending = ended.result(20)
    assert dead(tree)
    assert (ending.ended_by, ending.signal, ending.survivors) == ("timeout", signal.SIGKILL, ())


@linux
def test_a_stopped_program_is_woken_to_hear_that_it_has_to_end(run: Workspace) -> None:
    ending = start(run, "sh", "-c", "trap 'exit 7' TERM; kill -STOP $$; sleep 60", timeout_seconds=1, grace_seconds=10)
    assert (ending.ended_by, ending.exit_code) == ("timeout", 7)


class Lines:
    """A reader for these tests: a word is the result, and a line has at most 1,000 bytes."""

    def __init__(self, result: str = "done") -> None:
        self.state: Any = "reading"
        self._result = result.encode()
        self._line = b""

    def take(self, chunk: bytes) -> None:
        self._line = (self._line + chunk).rpartition(b"\n")[2]
        if self._result in chunk:
            self.state = "finished"
        elif len(self._line) > 1000:
            self.state = "line_too_long"


BOMB = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def burst(depth):
    for _ in range(3):
        if depth and not os.fork():
            os.setsid()
            burst(depth - 1)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not os.fork():
            os.setsid()
            time.sleep(0.05)
            os._exit(0)
        time.sleep(0.2)
burst(3)
"""


@linux
def test_hazard_12_a_small_fork_bomb_is_brought_down(run: Workspace) -> None:
    with in_a_thread(start, run, sys.executable, "-c", BOMB, timeout_seconds=2) as ended:
        ending = ended.result(30)
    assert (ending.ended_by, ending.survivors) == ("timeout", ())
    assert ending.duration_seconds < 2 + 0.3 + guardian.KILL_SECONDS
    assert not [each for each in psutil.process_iter(["cmdline"]) if BOMB in (each.info["cmdline"] or [])]


SWARM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(int(sys.argv[1])):
    if not os.fork():
        os.setsid()
        time.sleep(120)
print("swarming", flush=True)
time.sleep(120)
"""


@linux
def test_hazard_12_more_descendants_than_the_guardian_can_hold_are_brought_down(
    run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "AFTER_RESULT_SECONDS", 0.0)
    count = guardian.HANDLES + 50
    ending = start(run, sys.executable, "-c", SWARM, str(count), reader=Lines("swarming"), grace_seconds=0.1)
    assert (ending.ended_by, ending.survivors) == ("after_result", ())
    assert not [each for each in psutil.process_iter(["cmdline"]) if SWARM in (each.info["cmdline"] or [])]


def _swarm(pipe: Any, root: str, files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    below = (
        "sh",
        "-c",
        'setsid "$@" & wait',
        "sh",
        sys.executable,
        "-c",
        SWARM,
        "100",
        root,
    )  # none a child of the guardian
    ending = start(allocate(root, "run-1"), *below, reader=Lines("swarming"))
    pipe.send((ending.ended_by, ending.survivors))


@linux
def test_hazard_12_a_swarm_is_brought_down_with_few_files_at_hand(tmp_path: Path) -> None:
    with child(_swarm, str(tmp_path), 64) as (_, said):
        assert heard(said) == ("after_result", ())
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or [])]


@linux
def test_who_cannot_look_sees_nobody_and_does_not_break(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> list[str]:
        raise OSError(errno.ENFILE, "no file to spare")

    with subprocess.Popen(("sleep", "60")) as sleeper:
        assert sleeper.pid in guardian.descendants()
        monkeypatch.setattr(os, "listdir", fails)
        assert guardian.descendants() == {}
        sleeper.kill()


def _start_without_standard_files(pipe: Any, root: str) -> None:
    for standard in (0, 1, 2):
        os.close(standard)
    ending = start(allocate(root, "run-1"), "sh", "-c", "cat; echo out; echo err >&2")
    pipe.send((ending.exit_code, ending.stdout.total, ending.stderr.total))


def test_hazard_15_a_worker_without_standard_files_runs_programs_all_the_same(tmp_path: Path) -> None:
    with child(_start_without_standard_files, str(tmp_path)) as (_, said):
        assert heard(said) == (0, 4, 4)


@linux
def test_orphans_that_died_are_buried_while_the_program_goes_on(run: Workspace) -> None:
    script = "for i in 1 2 3 4 5; do (setsid true &); done; echo $$ > pids; exec sleep 60"
    leash = Leash()
    with in_a_thread(start, run, "sh", "-c", script, leash=leash) as ended:
        guard = guard_of(run)
        eventually(lambda: [each.pid for each in guard.children()] == [int((run.path / "pids").read_text())])
        leash.cut("interrupted")
        assert ended.result(20).ended_by == "interrupted"


# the guardian itself


def test_a_run_s_lock_is_held_from_its_start_to_its_end(run: Workspace) -> None:
    leash = Leash()
    with in_a_thread(plant, run, leash=leash) as ended:
        tree = grown(run)
        assert not lock_is_free(run)
        held = run.path.with_name(f"{run.id}.lock")
        assert not any(Path(file.path) == held for each in tree for file in each.open_files())
        leash.cut("interrupted")
        ended.result(20)
    assert lock_is_free(run)


def test_no_program_is_started_in_a_folder_where_another_guardian_is_at_work(run: Workspace) -> None:
    with run.path.with_name(f"{run.id}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ProviderFault, match="still at work") as fault:
            start(run, "touch", "started")
    assert fault.value.category == "provider_unavailable"
    assert not (run.path / "started").exists()


@pytest.mark.parametrize("tidied_up", [True, False])
def test_no_program_is_started_in_a_folder_that_was_tidied_up_in_the_meantime(
    run: Workspace, *, tidied_up: bool
) -> None:
    order = {"argv": ["touch", "started"], "folder": str(run.path), "environment": {"PATH": os.defpath}, "user": []}
    ours, theirs = socket.socketpair()
    with ours, theirs, run.lock.open() as lock:
        if tidied_up:
            run.lock.unlink()
        argv = (sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno()), str(lock.fileno()))
        ours.sendall(json.dumps(order | {"worker": os.getpid(), "grace": 1, "leash": 60}).encode() + b"\n")
        subprocess.run(argv, pass_fds=(theirs.fileno(), lock.fileno()), check=False, timeout=30)
        answer = json.loads(ours.recv(2**16))
    assert ("fault" in answer, (run.path / "started").exists()) == (tidied_up, not tidied_up)


@linux
def test_the_end_of_a_program_whose_guardian_was_killed_is_never_taken_for_a_good_one(run: Workspace) -> None:
    with in_a_thread(start, run, "sh", "-c", "echo $$ > pids; exec sleep 60") as ended:
        program = grown(run, 1)
        guard_of(run).kill()
        ending = ended.result(20)
    eventually(lambda: dead(program), within=5)
    assert (ending.exit_code, ending.signal, ending.ended_by) == (None, None, "itself")
    assert process.seen(ending) == {"killed": "How it ended is unknown."}
    assert ending.detail()["survivors"] == ["unknown, because its guardian was lost"]  # said here, and only here


@linux
def test_a_result_does_not_count_when_the_guardian_was_lost_over_the_end(
    run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "AFTER_RESULT_SECONDS", 0.3)
    ending = start(run, "sh", "-c", "trap 'kill -9 $PPID' TERM; echo done; sleep 60", reader=Lines(), grace_seconds=5)
    assert (ending.ended_by, ending.verdict_code) == ("itself", None)
    assert "unknown" in process.seen(ending).get("killed", "")
    assert "unknown" in ending.survivors[0]


@linux
@pytest.mark.parametrize("gone", [True, False])
def test_a_program_whose_guardian_is_gone_before_it_has_begun_never_begins(run: Workspace, *, gone: bool) -> None:
    told = f"['touch', 'started'], {str(run.path)!r}, {{'PATH': {os.defpath!r}}}, []"
    script = f"import guardian, os; guardian.become({told}, guardian=os.getppid() + {gone:d})"  # another took it over
    subprocess.run((sys.executable, "-c", script), cwd=Path(guardian.__file__).parent, check=False, timeout=30)
    assert (run.path / "started").exists() is not gone


def test_a_guardian_that_does_not_take_its_first_order_holds_nobody_up(
    run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.5)
    begin = process._start_guardian

    def begin_deaf(*arguments: Any) -> subprocess.Popen[bytes]:
        guard = begin(*arguments)
        guard.send_signal(signal.SIGSTOP)
        return guard

    monkeypatch.setattr(process, "_start_guardian", begin_deaf)
    assert at_last(start, run, "true", *["x" * 100_000] * 10).exit_code is None


def test_what_was_ended_for_want_of_its_worker_did_not_end_well_whatever_its_exit_code(run: Workspace) -> None:
    ending = start(run, "true")
    assert process.seen(ending) == {}
    assert [*process.seen(replace(ending, ended_by="worker_lost"))] == ["worker_lost"]


@linux
def test_a_guardian_that_does_not_obey_is_killed_and_takes_its_program_along(
    run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(guardian, "KILL_SECONDS", 0.2)
    with in_a_thread(start, run, "sh", "-c", "echo $$ > pids; exec sleep 60", timeout_seconds=1.5) as ended:
        program = grown(run, 1)
        guard_of(run).suspend()
        ending = ended.result(20)
    eventually(lambda: dead(program), within=5)
    assert (ending.exit_code, ending.signal, ending.ended_by) == (None, None, "timeout")


def test_a_guardian_that_is_asked_to_end_ends_its_program(run: Workspace) -> None:
    with in_a_thread(start, run, "sh", "-c", "echo $$ > pids; exec sleep 60") as ended:
        grown(run, 1)
        guard_of(run).terminate()
        ending = ended.result(20)
    assert (ending.ended_by, ending.signal) == ("interrupted", signal.SIGTERM)


def _start_without_the_right_to_kill(pipe: Any, root: str) -> None:
    ctypes.CDLL(None).prctl(24, 5, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_KILL: what this process starts has not got it
    settings = CommandSettings(
        kind="command", argv=("sleep", "120"), run_as="nobody", timeout_seconds=0.5, grace_seconds=0.1
    )
    proposal = CommandProvider(settings).run(envelope(), allocate(root, "run-1"), Leash())
    pipe.send((verdict(proposal), proposal.summary, proposal.detail["survivors"]))
    pipe.recv()


@linux
@root
def test_hazard_12_survivors_are_named_and_the_guardian_stays_for_them(open_root: Path) -> None:
    with child(_start_without_the_right_to_kill, str(open_root)) as (worker, said):
        outcome, summary, survivors = heard(said)
        assert len(survivors) == 1
        survivor = psutil.Process(int(survivors[0].split()[0]))
        try:
            assert outcome == ("failed", "timeout")
            assert survivors == [f"{survivor.pid} sleep"]
            assert survivors[0] in summary
            worker.kill()
            assert not dead([survivor])
            assert not lock_is_free(located(open_root))
        finally:
            survivor.kill()
    eventually(lambda: lock_is_free(located(open_root)), within=guardian.HUNT_SECONDS + 5)


# what a reader and silence say


@pytest.mark.parametrize("last", ["sleep 60", "trap 'exit 3' TERM; sleep 60"], ids=["killed", "gives up"])
def test_hazard_10_a_program_that_hangs_after_its_result_is_ended_and_its_result_counts(
    run: Workspace, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr(process, "AFTER_RESULT_SECONDS", 0.5)
    ending = start(run, "sh", "-c", f"echo done; {last}", reader=Lines(), grace_seconds=5)
    assert ending.ended_by == "after_result"
    assert ending.detail()["killed_after_result"] is True
    assert ending.verdict_code == 0
    assert process.seen(ending) == {}
    assert 0.5 <= ending.duration_seconds < 3


@pytest.mark.parametrize("limit", [{"idle_seconds": 1.0}, {"timeout_seconds": 1.0}], ids=["silence", "deadline"])
def test_hazard_10_no_limit_that_is_reached_after_the_result_takes_it_back(
    run: Workspace, limit: dict[str, float]
) -> None:
    ending = start(run, "sh", "-c", "echo done; sleep 60", reader=Lines(), **limit)
    assert (ending.ended_by, process.seen(ending)) == ("after_result", {})
    assert ending.duration_seconds < 3
    taken = start(run, "sh", "-c", "echo done; sleep 60", reader=Lines(), leash=Leash(1.0), name="again-")
    assert [*process.seen(taken)] == ["lease_lost"]


@pytest.mark.parametrize("code", [0, 137])
def test_hazard_24_a_program_that_ends_by_itself_after_its_result_is_judged_by_its_exit_code(
    run: Workspace, code: int
) -> None:
    ending = start(run, "sh", "-c", f"echo done; sleep 0.3; exit {code}", reader=Lines())
    assert (ending.ended_by, ending.exit_code, ending.verdict_code) == ("itself", code, code)
    assert ending.detail()["killed_after_result"] is False
    assert [*process.seen(ending)] == (["nonzero_exit"] if code else [])


def test_hazard_11_a_stream_that_stalls_is_ended_before_its_deadline(run: Workspace) -> None:
    ending = start(run, "sh", "-c", "echo working; sleep 60", idle_seconds=0.5)
    assert ending.ended_by == "idle_timeout"
    assert [*process.seen(ending)] == ["idle_timeout"]
    assert ending.duration_seconds < 5


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("sleep 1.5", {}),
        ("for i in 1 2 3 4 5; do sleep 0.4; echo working; done", {"idle_seconds": 1.2}),
    ],
    ids=["it need not stream", "it streams"],
)
def test_hazard_11_its_twin_a_program_that_may_be_quiet_or_is_not_goes_on(
    run: Workspace, script: str, options: dict[str, Any]
) -> None:
    ending = start(run, "sh", "-c", script, **options)
    assert (ending.ended_by, ending.exit_code) == ("itself", 0)


def test_a_line_without_end_ends_the_program_at_once(run: Workspace) -> None:
    ending = start(run, "sh", "-c", "head -c 5000 /dev/zero; sleep 60", reader=Lines())
    assert ending.ended_by == "line_too_long"
    assert [*process.seen(ending)] == ["line_too_long"]
    assert ending.duration_seconds < 5


def test_a_reader_that_breaks_takes_nobody_with_it_but_its_own_program(run: Workspace) -> None:
    class Broken(Lines):
        def take(self, chunk: bytes) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(run, "sh", "-c", "echo $$ > pids; echo x; sleep 60", reader=Broken())
    assert not psutil.pid_exists(int((run.path / "pids").read_text()))


def test_each_output_is_a_sign_of_progress(run: Workspace) -> None:
    leash = Leash()
    before = leash.progress_at
    start(run, "true", leash=leash)
    assert leash.progress_at == before
    start(run, "sh", "-c", "echo x >&2", leash=leash)
    assert leash.progress_at > before


# what it prints


@linux
def test_hazard_12_somebody_else_who_holds_an_output_and_writes_on_holds_nobody_up(run: Workspace) -> None:
    stop = threading.Event()

    def write_on(pid: int) -> None:
        with suppress(BrokenPipeError), Path(f"/proc/{pid}/fd/1").open("wb", buffering=0) as output:
            ready.set()
            while not stop.is_set():
                output.write(b"x" * 4096)

    ready = threading.Event()
    script = "echo $$ > pids; while [ ! -e go ]; do sleep 0.05; done"
    with in_a_thread(start, run, "sh", "-c", script) as ended:
        program = grown(run, 1)[0].pid
        writer = threading.Thread(target=write_on, args=(program,))
        writer.start()
        assert ready.wait(10)
        (run.path / "go").touch()
        ending = ended.result(10)
        stop.set()
        writer.join(10)
    assert (ending.ended_by, ending.exit_code) == ("itself", 0)


def _flood(_: int, root: str) -> tuple[int, int]:
    start(allocate(root, "run-1"), "true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ending = start(allocate(root, "run-2"), "head", "-c", str(2**30), "/dev/zero")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return ending.stdout.total, (after - before) // (1024 if sys.platform != "darwin" else 2**20)


def test_a_gigabyte_of_output_costs_the_worker_next_to_no_memory(tmp_path: Path) -> None:
    ((size, grown_megabytes),) = at_one_barrier(1, _flood, str(tmp_path))
    assert size == 2**30
    assert grown_megabytes < 20


# another user


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A root that other users may pass through: pytest's own folders are for this user alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def as_user(run_as: str, run: Workspace, script: str) -> Proposal:
    settings = CommandSettings(kind="command", argv=("sh", "-c", script), run_as=run_as)
    return CommandProvider(settings).run(envelope(), run, Leash())


@linux
@root
def test_a_program_under_another_user_hands_over_its_work_and_cannot_read_the_ledger(open_root: Path) -> None:
    ledger = open_root / ".sovereign" / "organization.db"
    ledger.parent.mkdir(0o700)
    ledger.write_text("the ledger")
    ledger.chmod(0o600)
    run = allocate(open_root, "run-1")
    report = json.dumps({"status": "completed", "summary": "done", "deliverables": ["tea.txt"]})
    script = f"""
        cd .sovereign-out && echo tea > tea.txt && echo '{report}' > report.json
        echo "$(id -un) $(id -G) $HOME $USER $LOGNAME"
        cat {ledger} || ls {ledger.parent} || ls {run.path.parent} || ls {run.raw} || echo x > {run.path}.lock
    """
    proposal = as_user("nobody", run, script.strip() + "; true")
    entry = pwd.getpwnam("nobody")
    groups = " ".join(map(str, os.getgrouplist("nobody", entry.pw_gid)))
    assert verdict(proposal) == COMPLETED
    assert [each.name for each in proposal.deliverables] == ["tea.txt"]
    assert (run.raw / "stdout.log").read_text() == f"nobody {groups} {entry.pw_dir} nobody nobody\n"
    assert (run.raw / "stderr.log").read_text().lower().count("permission denied") == 5
    assert stat.S_IMODE(ledger.parent.stat().st_mode) == 0o711


@root
def test_a_program_under_another_user_gets_that_group(open_root: Path) -> None:
    run = allocate(open_root, "run-1")
    as_user("nobody:daemon", run, "id -gn")
    assert (run.raw / "stdout.log").read_text() == "daemon\n"


def _with_a_group_of_its_own(_: int, root: str) -> str:
    run = allocate(root, "run-1")
    os.setgroups([12345])
    as_user("nobody", run, "id -G")
    return (run.raw / "stdout.log").read_text()


@root
def test_a_program_under_another_user_keeps_no_group_of_its_worker(open_root: Path) -> None:
    (groups,) = at_one_barrier(1, _with_a_group_of_its_own, str(open_root))
    assert groups.split() == [str(pwd.getpwnam("nobody").pw_gid)]


@root
def test_without_another_user_the_folders_stay_closed(open_root: Path) -> None:
    run = allocate(open_root, "run-1")
    as_user("", run, "true")
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    assert run.path.stat().st_uid == 0


@pytest.mark.parametrize("run_as", ["no-such-user", "root:no-such-group"])
def test_a_user_that_is_not_known_here_is_a_refusal_and_nothing_starts(run: Workspace, run_as: str) -> None:
    proposal = as_user(run_as, run, "touch started;" + GOOD)
    assert verdict(proposal) == ("failed", "capability_refusal")
    assert run_as in proposal.summary
    assert not (run.path / "started").exists()


def _as_nobody(_: int, root: str) -> tuple[str, str]:
    run = allocate(root, "run-1")
    os.setuid(pwd.getpwnam("nobody").pw_uid)
    return verdict(as_user("daemon", run, "true"))


@root
def test_a_worker_without_privilege_refuses_to_run_a_program_as_somebody_else(open_root: Path) -> None:
    assert at_one_barrier(1, _as_nobody, str(open_root)) == [("failed", "capability_refusal")]


@root
def test_a_link_in_place_of_the_output_is_not_handed_over(open_root: Path, tmp_path: Path) -> None:
    run = allocate(open_root, "run-1")
    run.out.rmdir()
    run.out.symlink_to(tmp_path)
    assert verdict(as_user("nobody", run, "true")) == ("failed", "boundary_violated")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        account.hand_over(run, account.find("nobody"))  # should it be put there after the look
    assert tmp_path.stat().st_uid == 0
