"""Processes: the only room that starts a program.

It is started without a shell, in a session of its own, in its run's folder, with a handful of variables, under a
guardian that ends it when this worker dies. One loop in the calling thread feeds it, drains both its outputs whatever
it does, keeps their head and tail, and tells the guardian when it has to end: at a deadline, in silence, some seconds
after its result, or with the authority that it works under. When `run` returns or raises, the program is dead and so
is all that came from it, or the survivors are named. This room itself signals nobody but its guardian, its own child.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import strsignal
from typing import IO, Any, Literal, Protocol

from sovereign_agent.clock import monotonic
from sovereign_agent.errors import PolicyRefusal, ProviderFault
from sovereign_agent.providers import account, guardian
from sovereign_agent.workspace import Workspace, check_output

HEAD_BYTES = 2**20
TAIL_BYTES = 2**18
LAST_WORDS_BYTES = 2000
CHUNK_BYTES = 2**16
PIPE_BYTES = 2**20
"""The most that a pipe holds: what the dead wrote is within it, and what comes beyond is somebody else's."""

NEVER = float("inf")
AFTER_RESULT_SECONDS = 5.0
"""How long a program may go on after its result before it is ended."""

PATIENCE_SECONDS = 10.0
"""How long beyond the grace a guardian has to do what it was told, before it is taken for lost."""

RUN_LIMIT = "the timeout_seconds of its provider, or the maximum of its assignment if that is shorter"
PASSED_ON = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")


_guardians: set[subprocess.Popen[bytes]] = set()
"""Those not known to have ended: one that hunts survivors outlives its run."""


class Reader(Protocol):
    """Whoever understands a program's stdout as it comes. Its state decides when the program is ended."""

    @property
    def state(self) -> Literal["reading", "finished", "line_too_long"]:
        """``finished`` once the program has told its result."""
        ...

    def take(self, chunk: bytes) -> None:
        """Read the next piece, cut anywhere."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended, with what was seen on the way.

    `exit_code` is None when a signal ended it, or when its end could not be learned (then `signal` is None too).
    `ended_by` says what it was ended for: ``timeout``, ``idle_timeout``, ``after_result``, ``line_too_long``,
    ``lease_lost``, ``interrupted``, ``worker_lost``; or ``itself``, and then that signal was not ours. `survivors` are
    the processes that could not be ended, each with its number and name.
    """

    exit_code: int | None
    signal: int | None
    ended_by: str
    survivors: tuple[str, ...]
    duration_seconds: float
    stdout: Capture
    stderr: Capture

    @property
    def verdict_code(self) -> int | None:
        """The exit code to judge it by: how we ended it after its result is no failure of its own."""
        return 0 if self.ended_by == "after_result" else self.exit_code

    def detail(self) -> dict[str, Any]:
        """The figures, as JSON."""
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "ended_by": self.ended_by,
            "killed_after_result": self.ended_by == "after_result",
            "survivors": list(self.survivors),
            "duration_seconds": round(self.duration_seconds, 3),
            "stdout_bytes": self.stdout.total,
            "stderr_bytes": self.stderr.total,
            "evidence_truncated": self.stdout.lost or self.stderr.lost,
            "capture_fault": self.stdout.fault or self.stderr.fault,
            "stderr_tail": self.stderr.last_words(),
        }


def seen(ending: Ending, *, limit: str = RUN_LIMIT) -> dict[str, str]:
    """The failure category in how a program ended, in a sentence; none for a good end. `limit` names its time."""
    after = f"after {ending.duration_seconds:.1f} seconds"
    reasons = {
        "timeout": f"It was still running {after} and was ended: its limit was {limit}.",
        "idle_timeout": f"It had fallen silent and was ended {after}.",
        "line_too_long": f"It wrote a line without end and was ended {after}.",
        "lease_lost": f"The authority that it worked under was lost {after}, so it was ended.",
        "interrupted": f"It was interrupted {after}.",
        "worker_lost": f"Its guardian saw its worker no more {after}, so it was ended.",
    }
    if ending.ended_by in reasons:
        return {ending.ended_by: reasons[ending.ended_by]}
    if ending.verdict_code == 0:
        return {}
    if ending.exit_code is not None:
        return {"nonzero_exit": f"It ended with exit code {ending.exit_code}."}
    if ending.signal is not None:
        return {"killed": f"It was ended from outside, by signal {ending.signal} ({strsignal(ending.signal)})."}
    return {"killed": "How it ended is unknown."}


class Leash:
    """What ties a program to the authority of its worker.

    One hand holds it: the keeper, which extends it each time the ledger has confirmed the authority, and cuts it when
    the authority is lost. The other end is `run`, which ends the program when the leash is cut or has run out, and
    notes on it each sign of progress. Without `seconds` it never runs out.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._lock = threading.Lock()
        self._wake: int | None = None
        self.until = NEVER if seconds is None else monotonic() + seconds
        self.cut_for = ""
        self.progress_at = monotonic()
        self.step = ""
        self.tolerance_seconds = 0.0

    def extend(self, seconds: float) -> None:
        """The authority was confirmed: the program may run for so long from now."""
        with self._lock:
            self.until = monotonic() + seconds
            self._tell()

    def cut(self, category: str) -> None:
        """End the program. `category` is the failure category: ``lease_lost`` or ``interrupted``. The first counts."""
        with self._lock:
            self.cut_for = self.cut_for or category
            self._tell()

    def left(self) -> float:
        """Seconds until it runs out."""
        return self.until - monotonic()

    @contextmanager
    def felt(self) -> Generator[int]:
        """For `run`: a descriptor that becomes readable whenever the other hand has moved."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        with self._lock:
            self._wake = write
            self._tell()
        try:
            yield read
        finally:
            with self._lock:
                self._wake = None
            os.close(write)
            os.close(read)

    def _tell(self) -> None:
        if self._wake is not None:
            with suppress(BlockingIOError):
                os.write(self._wake, b".")


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
    leash: Leash,
    reader: Reader | None = None,
    idle_seconds: float = NEVER,
    run_as: str = "",
    name: str = "",
) -> Ending:
    """Run a program in a run's folder until it ends, or has to.

    Args:
        argv: the program, looked for on the PATH of `variables`, and its arguments.
        workspace: its folder. The outputs go to `stdout.log` and `stderr.log` in `provider-raw`.
        stdin: what it may read.
        variables: all that it finds in its environment.
        timeout_seconds: how long it may run in all.
        grace_seconds: how long it has between being asked to end and being killed.
        leash: cut or run out, the program is ended.
        reader: is given stdout as it comes, and says when the result is there.
        idle_seconds: how long stdout may be silent.
        run_as: ``user`` or ``user:group``, for a privileged worker.
        name: stands before the names of the outputs, where more than one program runs in the folder.

    Raises ProviderFault when it cannot be started: ``provider_unavailable`` with the cause that the operating system
    hides behind one number, ``capability_refusal`` when it cannot run as that user, ``boundary_violated`` when the
    run's folders were replaced by an earlier program, of perhaps another user: what this one prints would go wherever
    they lead. Raises whatever interrupted the waiting, once the program is dead.
    """
    if "\0" in "".join([*argv, *variables, *variables.values()]):
        raise _fault(argv[0], "a NUL character stands in its arguments or variables")
    try:
        check_output(workspace)
    except PolicyRefusal as refused:
        raise ProviderFault(f"{refused} {refused.why}", category="boundary_violated") from refused
    user = account.find(run_as) if run_as else None
    if user:
        account.hand_over(workspace, user)
        variables = {**variables, "HOME": user.home, "USER": user.name, "LOGNAME": user.name}
    ours, theirs = socket.socketpair()
    with ours, leash.felt() as moved:
        try:
            with theirs:
                guard = _start_guardian(workspace, theirs)
        except OSError as error:
            raise _fault(argv[0], f"its guardian could not be started ({error.strerror})") from error
        captures = [Capture(workspace.raw / f"{name}{output}.log") for output in ("stdout", "stderr")]
        watch = _Watch(guard, ours, captures, leash, reader)
        try:
            watch.tell(
                argv=argv,
                folder=str(workspace.path),
                environment={**variables},
                user=[user.group, user.user, *user.groups] if user else [],
                worker=os.getpid(),
                grace=grace_seconds,
                leash=leash.left(),
            )
            watch.begin(moved, stdin)
            watch.until_ended(timeout_seconds, idle_seconds, grace_seconds)
        finally:
            watch.close(grace_seconds)
    if "fault" in watch.answer:
        error = OSError(*watch.answer["fault"])
        raise _fault(argv[0], _cause(error, argv[0], workspace.path, variables["PATH"])) from error
    return watch.ending()


def _start_guardian(workspace: Workspace, control: socket.socket) -> subprocess.Popen[bytes]:
    """Start a guardian that has nothing to do yet. Raises OSError."""
    handed: list[int] = []
    lock = os.open(workspace.lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Beyond the first three, which its own pipes will take: a worker may have had them closed.
        handed += [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in (control.fileno(), lock)]
        return subprocess.Popen(  # noqa: S603 - the program is our own, and no shell reads this
            (sys.executable, "-I", "-S", guardian.__file__, *map(str, handed)),
            bufsize=0,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=handed,
            start_new_session=True,
            umask=0o077,
        )
    finally:
        for each in (lock, *handed):
            os.close(each)


class _Watch:
    """One program and its guardian, watched from the calling thread alone."""

    def __init__(
        self,
        guard: subprocess.Popen[bytes],
        control: socket.socket,
        captures: Sequence[Capture],
        leash: Leash,
        reader: Reader | None,
    ) -> None:
        assert guard.stdin
        assert guard.stdout
        assert guard.stderr
        self.answer: dict[str, Any] = {}
        self._guard, self._control, self._leash, self._reader = guard, control, leash, reader
        control.settimeout(PATIENCE_SECONDS)
        self._stdin, self._stdout, self._stderr = guard.stdin, guard.stdout, guard.stderr
        self._captures = dict(zip((self._stdout, self._stderr), captures, strict=True))
        self._heard, self._over, self._ordered = b"", False, ""
        self._started = self._spoke_at = self._ended = monotonic()
        self._ordered_at = self._result_at = NEVER
        self._selector = selectors.PollSelector()
        _guardians.difference_update({each for each in {*_guardians} if each.poll() is not None})
        _guardians.add(guard)

    def begin(self, moved: int, stdin: bytes) -> None:
        """Listen to everybody, and have `stdin` written; `moved` tells of the leash."""
        self._selector.register(self._control, selectors.EVENT_READ, self._hear)
        self._selector.register(moved, selectors.EVENT_READ, partial(self._feel, moved))
        self._selector.register(self._stdin, selectors.EVENT_WRITE, partial(self._feed, bytearray(stdin)))
        for source in self._captures:
            self._selector.register(source, selectors.EVENT_READ, partial(self._take, source))
        for pipe in (self._stdin, *self._captures):
            os.set_blocking(pipe.fileno(), False)

    def tell(self, **order: Any) -> None:
        """Send the guardian a line. One that does not listen is killed, and `_hear` learns that it is gone."""
        try:
            self._control.sendall(json.dumps(order).encode("ascii") + b"\n")
        except OSError:
            self._guard.kill()

    def until_ended(self, timeout_seconds: float, idle_seconds: float, grace_seconds: float) -> None:
        """Watch until the guardian says that all is over, or is gone. One that does not obey in time is killed."""
        patience = grace_seconds + guardian.KILL_SECONDS + PATIENCE_SECONDS
        while not self._over:
            due, reason = min(
                (self._started + timeout_seconds, "timeout"),
                (self._spoke_at + idle_seconds, "idle_timeout"),
                (self._result_at + AFTER_RESULT_SECONDS, "after_result"),
                (self._leash.until, "lease_lost"),
            )
            due = self._ordered_at + patience if self._ordered else due
            if monotonic() >= due and self._ordered:
                self._guard.kill()
            elif monotonic() >= due:
                self._end("after_result" if self._result_at < NEVER and reason != "lease_lost" else reason)
            for key, _ in self._selector.select(min(max(due - monotonic(), 0), guardian.LOOK_SECONDS)):
                key.data()
        for source in self._captures:  # what the dead left in the pipes, and no more: a survivor may go on writing
            for _ in range(0, PIPE_BYTES, CHUNK_BYTES):
                if not source.closed:
                    self._take(source)
        self._ended = monotonic()

    def close(self, grace_seconds: float) -> None:
        """Let go of everything, so that the guardian ends what is left, and wait until it did; not for survivors."""
        for file in (self._control, self._stdin, *self._captures, *self._captures.values()):
            file.close()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(0 if self.answer.get("survivors") else grace_seconds + 2 * guardian.KILL_SECONDS)

    def ending(self) -> Ending:
        """What came of it."""
        status = self.answer.get("status")
        unseen = "itself" if self._ordered in ("", "after_result") else self._ordered  # no good end without a witness
        return Ending(
            exit_code=status if status is not None and status >= 0 else None,
            signal=-status if status is not None and status < 0 else None,
            ended_by=self.answer.get("ended_by", unseen),
            survivors=tuple(self.answer.get("survivors", ["unknown, because its guardian was lost"])),
            duration_seconds=self._ended - self._started,
            stdout=self._captures[self._stdout],
            stderr=self._captures[self._stderr],
        )

    def _end(self, reason: str) -> None:
        if not self._ordered:
            self._ordered, self._ordered_at = reason, monotonic()
            self.tell(end=reason)

    def _hear(self) -> None:
        """Take in the one line that the guardian says, or that it is gone."""
        said = b""
        with suppress(OSError):
            said = self._control.recv(CHUNK_BYTES)
        self._heard += said
        if b"\n" in self._heard:
            self.answer = json.loads(self._heard.partition(b"\n")[0])
        self._over = not said or bool(self.answer)

    def _feel(self, moved: int) -> None:
        """The leash was moved: hand it on."""
        os.read(moved, CHUNK_BYTES)
        if self._leash.cut_for:
            self._end(self._leash.cut_for)
        else:
            self.tell(leash=self._leash.left())

    def _feed(self, unread: bytearray) -> None:
        """Write on the program's input, and close it at the end. A program that does not read it is no trouble."""
        try:
            del unread[: os.write(self._stdin.fileno(), unread)]
        except BrokenPipeError:
            unread.clear()
        if not unread:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _take(self, source: IO[bytes]) -> None:
        """Take in a piece of one output, if there is one, or its end."""
        try:
            chunk = os.read(source.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(source)
            source.close()
            return
        self._captures[source].take(chunk)
        self._leash.progress_at = monotonic()
        if source is self._stdout:
            self._spoke_at = self._leash.progress_at
            if self._reader:
                self._reader.take(chunk)
                if self._reader.state == "line_too_long":
                    self._end("line_too_long")
                elif self._reader.state == "finished":
                    self._result_at = min(self._result_at, monotonic())


def _cause(error: OSError, program: str, folder: Path, search: str) -> str:
    """What really is missing: one ENOENT stands for the folder, the program, a link's target and an interpreter."""
    if not os.access(folder, os.F_OK):
        return f"the folder it should run in is not there ({folder})"
    if error.filename == str(folder):
        return f"the folder it should run in cannot be entered by its user ({folder})"
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
        errno.EAGAIN: "another guardian is still at work in its folder, or the system has no process to spare",
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
