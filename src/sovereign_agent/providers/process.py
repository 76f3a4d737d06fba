"""Processes: the only room that starts a program.

It is started without a shell, in a session of its own, in its run's folder, with a handful of variables. Both
its outputs are drained at once, whatever it does, and kept as head and tail. It has until a deadline; then
its group is asked to end, and a grace later it is ended. However the waiting ends, the group is dead and the
child is reaped when `run` returns or raises. A signal goes only to a group whose leader is our own child and
not yet reaped: no number is ever reused under us. A member that left the group is not found here.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from sovereign_agent.clock import monotonic
from sovereign_agent.errors import ProviderFault
from sovereign_agent.workspace import Workspace

HEAD_BYTES = 2**20
TAIL_BYTES = 2**18
LAST_WORDS_BYTES = 2000
CHUNK_BYTES = 2**16
PIPE_BYTES = 2**20
"""The most that a pipe holds: what the dead wrote is within it, and what comes beyond is somebody else's."""

PASSED_ON = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")


AFTER_RESULT_SECONDS = 5.0

EndedBy = Literal["itself", "timeout", "idle_timeout", "after_result", "line_too_long", "lease_lost", "interrupted"]


class Reader(Protocol):
    """Hears stdout as it comes."""

    @property
    def state(self) -> Literal["reading", "finished", "line_too_long"]: ...

    def take(self, chunk: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended, with what was seen on the way.

    `exit_code` is None when a signal ended it, or when its end could not be learned (then `signal` is None too).
    `ended_by` says who sent that signal, if one was sent by this worker.
    """

    exit_code: int | None
    signal: int | None
    ended_by: EndedBy
    duration_seconds: float
    stdout: Capture
    stderr: Capture

    def detail(self) -> dict[str, Any]:
        """The figures, as JSON."""
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "ended_by": self.ended_by,
            "duration_seconds": round(self.duration_seconds, 3),
            "stdout_bytes": self.stdout.total,
            "stderr_bytes": self.stderr.total,
            "evidence_truncated": self.stdout.lost or self.stderr.lost,
            "capture_fault": self.stdout.fault or self.stderr.fault,
            "stderr_tail": self.stderr.last_words(),
        }


class Leash:
    """What ties a program to the authority of its worker.

    One hand holds it: the keeper, which extends it each time the ledger has confirmed the authority, and cuts it when
    the authority is lost. The other end is `run`, which ends the program when the leash is cut or has run out, and
    notes on it each sign of progress.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._lock = threading.Lock()
        self.until = None if seconds is None else monotonic() + seconds
        self.cut_for = ""
        self.progress_at = monotonic()
        self.step = ""
        self.tolerance_seconds = 0.0

    def extend(self, seconds: float) -> None:
        """The authority was confirmed: the program may run for so long from now."""
        self.until = monotonic() + seconds

    def cut(self, category: str) -> None:
        """End the program. `category` is the failure category: ``lease_lost`` or ``interrupted``. The first counts."""
        self.cut_for = self.cut_for or category


class Capture:
    """One output of a program, kept as its head and its tail. Memory stays flat whatever it writes."""

    def __init__(self, path: Path) -> None:
        self.total = 0
        self.fault = ""
        self.lost = False
        self._room = HEAD_BYTES
        self._tail = bytearray()
        self._recent = b""
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._give_up(error)

    def take(self, chunk: bytes) -> None:
        """Keep a piece of the stream, or as much of it as there is room for. A full disk only sets `fault`."""
        self.total += len(chunk)
        self._recent = (self._recent + chunk)[-LAST_WORDS_BYTES:]
        self._write(chunk[: self._room])
        self._tail += chunk[self._room :]
        self._room -= min(self._room, len(chunk))
        del self._tail[:-TAIL_BYTES]

    def close(self) -> None:
        """Write the tail behind the head, with the number of bytes between them that were not kept."""
        between = self.total - (HEAD_BYTES - self._room) - len(self._tail)
        if between:
            self.lost = True
            self._write(b"\n[... %d bytes not kept ...]\n" % between)
        self._write(bytes(self._tail))
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def last_words(self) -> str:
        """The end of the stream as text that any ledger can keep."""
        return self._recent.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}").strip()

    def _write(self, data: bytes) -> None:
        try:
            while data and self._file is not None:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.fault, self.lost = str(error.strerror), True
        if self._file is not None:
            os.close(self._file)
            self._file = None


def variables(names: Iterable[str] = ()) -> dict[str, str]:
    """What a program inherits: a fixed few variables, all of ``LC_*``, and those of `names` that are set.

    PATH is always there. Nothing else is passed on, so no secret and no marker of an outer session is.
    """
    wanted = {*PASSED_ON, *names}
    passed = {name: value for name, value in os.environ.items() if name in wanted or name.startswith("LC_")}
    return {"PATH": os.defpath} | passed


def run(
    argv: Sequence[str],
    workspace: Workspace,
    *,
    stdin: bytes,
    variables: Mapping[str, str],
    timeout_seconds: float,
    grace_seconds: float,
    leash: Leash | None = None,
    reader: Reader | None = None,
    idle_seconds: float | None = None,
    run_as: str = "",  # noqa: ARG001
) -> Ending:
    """Run a program in a run's folder to its end, or to its deadline.

    Its outputs go to `stdout.log` and `stderr.log` in `provider-raw`. Raises ProviderFault when it cannot be
    started, with the cause that the operating system hides behind one number; and whatever interrupted the
    waiting, once the program is dead.
    """
    started = monotonic()
    ended_by: EndedBy = "itself"
    leash = leash or Leash()
    watch = _Watch(workspace.raw, reader, leash)
    try:
        watch.start(argv, workspace.path, variables, stdin)
        result_at = None
        while not watch.ended.wait(0.02):
            now = monotonic()
            if reader and reader.state == "finished":
                result_at = result_at or now
            if reader and reader.state == "line_too_long":
                ended_by = "line_too_long"
            elif result_at and now > result_at + AFTER_RESULT_SECONDS:
                ended_by = "after_result"
            elif now > started + timeout_seconds:
                ended_by = "timeout"
            elif idle_seconds and not result_at and now > max(started, leash.progress_at) + idle_seconds:
                ended_by = "idle_timeout"
            else:
                continue
            watch.signal_group(signal.SIGTERM)
            watch.ended.wait(grace_seconds)
            break
    finally:
        watch.signal_group(signal.SIGKILL)  # after a good end too: for members of the group that it left behind
        code = watch.reap()
    return Ending(
        exit_code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        ended_by=ended_by,
        duration_seconds=monotonic() - started,
        stdout=watch.stdout,
        stderr=watch.stderr,
    )


def seen(ending: Ending) -> dict[str, str]:
    """The failure categories in how a program ended, each in a sentence."""
    if ending.ended_by == "timeout":
        return {"timeout": f"It was still running after {ending.duration_seconds:.1f} seconds and was ended."}
    if ending.ended_by == "after_result":
        return {}
    if ending.ended_by != "itself":
        return {ending.ended_by: f"It was ended: {ending.ended_by}."}
    if ending.signal is not None:
        return {"killed": f"It was ended from outside, by {signal.Signals(ending.signal).name}."}
    if ending.exit_code is None:
        return {"internal_error": "It ended, but how could not be learned: is SIGCHLD ignored in this process?"}
    return {"nonzero_exit": f"It ended with exit code {ending.exit_code}."} if ending.exit_code else {}


class _Watch:
    """The threads around one child, and the only hand that may signal its group."""

    def __init__(self, raw: Path, reader: Reader | None, leash: Leash) -> None:
        self._reader, self._leash = reader, leash
        self._stop_read, self._stop_write = os.pipe()
        self.stdout = Capture(raw / "stdout.log")
        self.stderr = Capture(raw / "stderr.log")
        self.ended = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._held = False
        self._threads: list[threading.Thread] = []

    def start(self, argv: Sequence[str], folder: Path, variables: Mapping[str, str], stdin: bytes) -> None:
        self._child = child = _start(argv, folder, variables)
        self._held = True
        self._spawn(self._await_end, child.pid)
        self._spawn(_feed, child.stdin, self._stop_read, stdin)
        self._spawn(_drain, child.stdout, self._stop_read, self.stdout, self._reader, self._leash)
        self._spawn(_drain, child.stderr, self._stop_read, self.stderr)

    def signal_group(self, number: signal.Signals) -> None:
        if self._child and self._held:
            with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM when only a zombie is left
                os.killpg(self._child.pid, number)

    def reap(self) -> int | None:
        """Wait for the end, let the threads empty the pipes, and answer the code; None if it was lost."""
        code = None
        for thread in self._threads[:1]:
            thread.join()  # it must see the end before the child is reaped
        if self._child:
            with suppress(ChildProcessError):  # of a lost child Popen.wait would say that it ended well
                code = os.waitstatus_to_exitcode(os.waitpid(self._child.pid, 0)[1])
            self._child.returncode = code or 0
        os.close(self._stop_write)
        for thread in self._threads:
            thread.join()
        os.close(self._stop_read)
        self.stdout.close()
        self.stderr.close()
        return code

    def _spawn(self, act: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=act, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _await_end(self, pid: int) -> None:
        """Learn of the end and leave the child unreaped: so long, its group's number is nobody else's."""
        try:
            if sys.platform == "darwin":
                wanted = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
                with closing(select.kqueue()) as queue, suppress(ProcessLookupError):
                    queue.control([wanted], 1)
            else:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            self._held = False  # SIGCHLD is ignored in this process, or somebody else reaped it
        self.ended.set()


def _feed(stdin: IO[bytes], stop: int, data: bytes) -> None:
    """Write the program's input and close it. A program that does not read it is no trouble of ours."""
    poller, left = select.poll(), memoryview(data)
    poller.register(stdin, select.POLLOUT)
    poller.register(stop, select.POLLIN)
    os.set_blocking(stdin.fileno(), False)
    with suppress(BrokenPipeError), stdin:
        while left and not any(ready == stop for ready, _ in poller.poll()):
            with suppress(BlockingIOError):
                left = left[os.write(stdin.fileno(), left) :]


def _drain(
    source: IO[bytes], stop: int, capture: Capture, reader: Reader | None = None, leash: Leash | None = None
) -> None:
    """Take in one output until its end, or until `stop` and then what a pipe can still hold."""
    poller, allowance = select.poll(), PIPE_BYTES
    poller.register(source, select.POLLIN)
    poller.register(stop, select.POLLIN)
    with source:
        while allowance > 0:
            ready = [descriptor for descriptor, _ in poller.poll()]
            chunk = os.read(source.fileno(), CHUNK_BYTES) if source.fileno() in ready else b""
            if not chunk:
                return
            capture.take(chunk)
            if leash:
                leash.progress_at = monotonic()
            if reader:
                reader.take(chunk)
            if stop in ready:
                allowance -= len(chunk)


def _start(argv: Sequence[str], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - argv is the organization's own, and no shell reads it
            argv,
            bufsize=0,
            cwd=folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            umask=0o077,
        )
    except ValueError:
        raise _fault(argv[0], "a NUL character stands in its arguments or variables") from None
    except OSError as error:
        raise _fault(argv[0], _cause(error, argv[0], folder, variables["PATH"])) from error


def _cause(error: OSError, program: str, folder: Path, search: str) -> str:
    """What really is missing: one ENOENT stands for the folder, the program, a link's target and an interpreter."""
    if not os.access(folder, os.F_OK):
        return f"the folder it should run in is not there ({folder})"
    places = [folder] if "/" in program else [Path(place) for place in search.split(os.pathsep) if place]
    found = next((place / program for place in places if os.path.lexists(place / program)), None)
    if error.errno == errno.ENOENT:
        if found is None:
            return "there is no such file" if "/" in program else f"no such program is on the PATH ({search})"
        if not os.access(found, os.F_OK):
            return f"{found} is a link to nothing"
        return f"{found} is there, but the interpreter or loader that it names is not"
    causes = {
        errno.EACCES: f"{found or program} is not executable for this user",
        errno.ENOEXEC: f"{found or program} is no program: its format is unknown, and it has no #! line",
        errno.ETXTBSY: f"{found or program} is open for writing at this moment",
        errno.E2BIG: "its arguments and variables are longer than the system takes",
    }
    return causes.get(error.errno or 0, error.strerror or str(error))


def _fault(program: str, cause: str) -> ProviderFault:
    return ProviderFault(
        f"The program {program!r} was not started: {cause}.",
        category="provider_unavailable",
        why="An actor's provider could not be run, so nothing was done.",
        inspect="sovereign.toml, [providers]",
        next_command="mend the program or its argv, then assign the work again",
    )
