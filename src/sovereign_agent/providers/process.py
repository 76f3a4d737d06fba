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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended, with what was seen on the way.

    `exit_code` is None when a signal ended it, or when its end could not be learned (then `signal` is None too).
    `ended_by` says who sent that signal, if one was sent by this worker.
    """

    exit_code: int | None
    signal: int | None
    ended_by: Literal["itself", "timeout"]
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


def environment(names: Iterable[str] = (), extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables a program gets: a fixed few, all of ``LC_*``, those `names` that are set, and `extra`.

    PATH is always there. Nothing else is inherited, so no secret and no marker of an outer session is.
    """
    wanted = {*PASSED_ON, *names}
    passed = {name: value for name, value in os.environ.items() if name in wanted or name.startswith("LC_")}
    return {"PATH": os.defpath, **passed, **(extra or {})}


def run(
    argv: Sequence[str],
    workspace: Workspace,
    *,
    stdin: bytes,
    variables: Mapping[str, str],
    timeout_seconds: float,
    grace_seconds: float,
) -> Ending:
    """Run a program in a run's folder to its end, or to its deadline.

    Its outputs go to `stdout.log` and `stderr.log` in `provider-raw`. Raises ProviderFault when it cannot be
    started, with the cause that the operating system hides behind one number; and whatever interrupted the
    waiting, once the program is dead.
    """
    captures = Capture(workspace.raw / "stdout.log"), Capture(workspace.raw / "stderr.log")
    started = monotonic()
    ended_by: Literal["itself", "timeout"] = "itself"
    child = _start(argv, workspace.path, variables)
    watch = _Watch(child, stdin, captures)
    try:
        watch.start()
        if not watch.ended.wait(timeout_seconds):
            ended_by = "timeout"
            watch.signal_group(signal.SIGTERM)
            watch.ended.wait(grace_seconds)
    finally:
        watch.signal_group(signal.SIGKILL)  # after a good end too: for members of the group that it left behind
        code = watch.reap()
    return Ending(
        exit_code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        ended_by=ended_by,
        duration_seconds=monotonic() - started,
        stdout=captures[0],
        stderr=captures[1],
    )


class _Watch:
    """The threads around one child, and the only hand that may signal its group."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, captures: tuple[Capture, Capture]) -> None:
        assert child.stdin and child.stdout and child.stderr
        self.ended = threading.Event()
        self._child = child
        self._held = True
        self._stop_read, self._stop_write = os.pipe()
        self._streams = child.stdin, child.stdout, child.stderr
        self._threads = [
            threading.Thread(target=self._await_end, daemon=True),
            threading.Thread(target=_feed, args=(child.stdin.fileno(), self._stop_read, stdin, child.stdin.close)),
            threading.Thread(target=_drain, args=(child.stdout.fileno(), self._stop_read, captures[0])),
            threading.Thread(target=_drain, args=(child.stderr.fileno(), self._stop_read, captures[1])),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def signal_group(self, number: signal.Signals) -> None:
        if self._held:
            with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM when only a zombie is left
                os.killpg(self._child.pid, number)

    def reap(self) -> int | None:
        """Wait for the end, let the threads empty the pipes, and answer the code; None if it was lost."""
        code = self._child.wait()
        os.close(self._stop_write)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        os.close(self._stop_read)
        for stream in self._streams:
            stream.close()
        return code if self._held else None

    def _await_end(self) -> None:
        """Learn of the end and leave the child unreaped: so long, its group's number is nobody else's."""
        try:
            if sys.platform == "darwin":
                wanted = select.kevent(self._child.pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
                with suppress(ProcessLookupError):
                    select.kqueue().control([wanted], 1)
            else:
                os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            self._held = False  # SIGCHLD is ignored in this process, or somebody else reaped it
        self.ended.set()
