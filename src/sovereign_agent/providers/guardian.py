"""The guardian: a small process between a worker and its program, so that no program outlives its worker.

    python -I -S guardian.py CONTROL_FD LOCK_FD

`process.run` starts one for each run. It starts the program, and ends it: after the program's own exit, on the
worker's order or death, on SIGTERM, or when the leash has run out on a clock that goes on while the host sleeps. To
end means TERM, a grace, KILL, until no descendant is left. Who cannot be killed is named, and hunted on. Its stdin,
stdout and stderr are the program's, and it touches none of them. While it lives, it holds the lock.

Both sides speak JSON, a line each. The first line says what to start; then come ``{"leash": seconds}``, counted from
now, and ``{"end": reason}``. It answers ``{"fault": [errno, text, file]}`` when the program could not be started, and
at the end ``{"ended_by": reason, "status": exit code or -signal or null, "survivors": [text, ...]}``.

It imports nothing of ours, and never signals a bare number: a direct child that is not buried is a handle, and a
deeper descendant is signalled through a pidfd. Where the system has no subreapers (that is: not Linux) it ends its
own process group, itself included; it does not know of a process that left it, nor how one ended that it had to kill.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
import warnings  # pyright: ignore[reportUnusedImport]  # noqa: F401 - by execvpe, whose user may not read it

LINUX = sys.platform == "linux"
LOOK_SECONDS = 1.0
"""How often it looks whether its worker still is its parent: a forked copy may hold the control socket open."""
SWEEP_SECONDS = 0.05
KILL_SECONDS = 5.0
"""How long it tries to kill before it names the survivors."""
HUNT_SECONDS = 5.0
"""How long it rests between its attempts on survivors."""

HANDLES = min(200, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""How many pidfds it holds at once; a swarm needs several sweeps. It has to look at the swarm meanwhile."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
RESET = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)


def now() -> float:
    """Seconds on a clock that goes on while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; does nothing where there is no such call. Raises OSError."""
    if LINUX and ctypes.CDLL(None, use_errno=True).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "prctl was refused")


class Program:
    """The program, and all that came from it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def has_ended(self) -> bool:
        """Whether it came to its end. It is not buried yet, so its number stays its own; orphans left to us are."""
        if not LINUX:
            return self.bury()
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == self.pid:
                return True
            os.waitpid(found.si_pid, 0)
        return False

    def bury(self) -> bool:
        """Bury all that is dead; answer whether nobody is left. The kernel knows: no child, no descendant."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.pid:
                    self.status = os.waitstatus_to_exitcode(found[1])
            return False
        return True


def stat(pid: int) -> tuple[str, str, int]:
    """The name, state and parent of a process; the parent is 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib is slow
            head, _, rest = file.read().rpartition(")")
        state, parent, *_ = rest.split()
    except (OSError, ValueError):
        return "", "Z", 0
    return head.partition("(")[2], state, int(parent)


def descendants() -> dict[int, tuple[str, str, int]]:
    """All that descend from this process, parents first, each with its `stat`; nobody while no file can be opened."""
    stats: dict[int, tuple[str, str, int]] = {}
    with contextlib.suppress(OSError):
        stats = {int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
    children: dict[int, list[int]] = {}
    for pid, (_, _, parent) in stats.items():
        children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return {pid: stats[pid] for pid in found[1:]}


def alive() -> list[str]:
    """The number and the name of each descendant that is not dead."""
    return [f"{pid} {name}" for pid, (name, state, _) in descendants().items() if state not in "ZX"]


def signal_all(*numbers: int) -> None:
    """Send signals, each to all descendants before the next.

    A pidfd that was opened between two looks, each of which found that number among the descendants, is either
    that descendant or dead: a number is not given again while its process lives.
    """
    with contextlib.ExitStack() as held:
        handles: dict[int, int] = {}
        for pid, (_, _, parent) in descendants().items():
            if parent != os.getpid() and len(handles) < HANDLES:
                with contextlib.suppress(OSError, AttributeError):  # not every Python was built with pidfd_open
                    handles[pid] = os.pidfd_open(pid)
                    held.callback(os.close, handles[pid])
        still = descendants()
        for number in numbers:
            for pid, (_, _, parent) in still.items():
                with contextlib.suppress(OSError):
                    if parent == os.getpid():
                        os.kill(pid, number)
                    elif pid in handles:
                        signal.pidfd_send_signal(handles[pid], number)


def listen() -> int:
    """Be deaf to a terminal, and answer a descriptor that tells of SIGTERM and of the end of children."""
    wake, write = os.pipe()
    os.set_blocking(write, False)
    for deaf in (signal.SIGINT, signal.SIGHUP):
        signal.signal(deaf, signal.SIG_IGN)
    for heard in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(heard, lambda _number, _frame: None)  # the descriptor tells
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def hold(lock: int) -> None:
    """Take the run's lock for as long as this process lives. Raises OSError."""
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.fstat(lock).st_nlink:
        raise OSError(errno.ESTALE, "the run was over before it began, and its folder is tidied up")


def say(control: int, **answer: object) -> None:
    """Tell the worker, if there still is one."""
    with contextlib.suppress(BrokenPipeError):
        os.write(control, json.dumps(answer).encode() + b"\n")


def hear(control: int) -> bytes:
    """Wait for whole lines from the worker; nothing at all when it is gone."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while not heard.endswith(b"\n") and (more := os.read(control, 2**20)):
            heard += more
    return heard


def become(argv: list[str], folder: str, environment: dict[str, str], user: list[int], *, guardian: int) -> None:
    """Turn this child, forked by `guardian`, into the program, as `user` (group, user, all groups). Raises OSError."""
    signal.set_wakeup_fd(-1)
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if LINUX:
        os.setsid()
    if user:
        group, owner, *groups = user
        os.setgroups(groups)
        os.setgid(group)
        os.setuid(owner)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after setuid, which would undo it
    if os.getppid() != guardian:
        os._exit(1)
    os.chdir(folder)
    os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell is wanted


def watch(program: Program, control: int, wake: int, worker: int, *, until: float, heard: bytes) -> str:
    """Wait until the program has ended, or has to; answer what for. `heard` is what was said already."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake, select.POLLIN)
    reason = ""
    while True:
        for order in map(json.loads, heard.splitlines()):
            reason = reason or order.get("end", "")
            until = now() + order["leash"] if "leash" in order else until
        if program.has_ended():
            return "itself"
        if reason or now() >= until or os.getppid() != worker:
            return reason or ("lease_lost" if now() >= until else "worker_lost")
        heard = b""
        for ready, _ in poller.poll(1000 * max(0, min(LOOK_SECONDS, until - now()))):
            if ready == control:
                heard = hear(control)
                reason = reason or ("" if heard else "worker_lost")
            elif signal.SIGTERM in os.read(wake, 2**16):
                reason = "interrupted"


def end(program: Program, grace_seconds: float) -> list[str]:
    """End the program and all its descendants; answer who survived."""
    until = now() + grace_seconds
    if alive():
        signal_all(signal.SIGTERM, signal.SIGCONT)  # who is stopped cannot hear
        while alive() and now() < until:
            time.sleep(SWEEP_SECONDS)
    with contextlib.suppress(OSError):
        os.killpg(program.pid, signal.SIGKILL)  # at one blow, so that none forks away; its leader is not buried yet
    until = now() + KILL_SECONDS
    while not program.bury():
        if now() >= until:
            return alive() or ["a process that could not be found"]
        signal_all(signal.SIGSTOP, signal.SIGKILL)  # who is stopped does not fork while the others are killed
        time.sleep(SWEEP_SECONDS)
    return []


def ask_group(program: Program, grace_seconds: float) -> list[str]:
    """What there is instead of `end` without subreapers; the last blow is `main`'s, because it takes us along."""
    until = now() + grace_seconds
    os.killpg(0, signal.SIGTERM)
    while not program.bury() and now() < until:
        time.sleep(SWEEP_SECONDS)
    return []


def main(control: int, lock: int) -> None:
    """Guard one program, from before its start until nobody of it is left."""
    for descriptor in (control, lock):
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no name
    wake = listen()
    heard = hear(control)
    if not heard:
        return
    first, _, heard = heard.partition(b"\n")
    told = json.loads(first)
    try:
        hold(lock)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        guardian = os.getpid()  # asked before the fork: a child whose guardian is gone already has another parent
        program = Program(os.fork())
        if not program.pid:
            become(told["argv"], told["folder"], told["environment"], told["user"], guardian=guardian)
    except OSError as error:  # in either process
        say(control, fault=[error.errno, error.strerror, str(error.filename or "")])
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    reason = watch(program, control, wake, told["worker"], until=now() + told["leash"], heard=heard)
    survivors = (end if LINUX else ask_group)(program, told["grace"])
    say(control, ended_by=reason, status=program.status, survivors=survivors)
    if not LINUX:
        os.killpg(0, signal.SIGKILL)
    while not program.bury():
        signal_all(signal.SIGSTOP, signal.SIGKILL)
        time.sleep(HUNT_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
