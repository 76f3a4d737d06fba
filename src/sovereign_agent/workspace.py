"""Workspaces: the folder of one run, below `<root>/.sovereign/runs`.

An outside program worked here, so nothing found here is believed: no link is followed, nothing but a plain
file with a single name is read, every read has a limit, and a name that leads out is refused before a file
is touched. A folder belongs to one run and is never used again. Reclaiming is housekeeping: it can fail in
part and says so, and it never decides anything. Whether a run is over is the ledger's to know.

Beside a folder lies its lock, `<id>.lock`. It records which folder was made, so that no other is taken for it, and it
is held (flock) by whoever guards the run's program until nothing of that is left. Only `allocate` makes a lock, and it
goes with the last act of reclaiming. So a guardian that finds none, or has waited for one that is no longer linked,
comes too late and must start nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
import unicodedata
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sovereign_agent.boundary import Boundary, mark, printable
from sovereign_agent.configuration import held_open, replace_file
from sovereign_agent.errors import PolicyRefusal

POLICIES = ("temporary_directory", "persistent")
RAW_NAME = "provider-raw"
OUT_NAME = ".sovereign-out"
KEPT_FILES = frozenset({"receipt.json", "receipt.json.sha256", "report.json"})
"""What outlives reclaiming, besides `.sovereign-out`: evidence a person may want, though nobody believes it."""

LEFTOVERS_SHOWN = 20
NAME_LIMIT_BYTES = 1000
PART_LIMIT_BYTES = 255
DELIVERABLE_LIMIT_BYTES = 256 * 2**20
CHUNK_BYTES = 2**20
_HALF_WRITTEN = re.compile(r"\.receipt\.json(\.sha256)?\.[0-9a-f]{16}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Workspace:
    """One run's folder: `raw` holds what its program printed, `out` what it hands over; `lock` lies beside it.

    `boundary` is how things stood before its program started. Without one no file is stale.
    """

    id: str
    path: Path
    raw: Path
    out: Path
    lock: Path
    boundary: Boundary | None = None


@dataclass(frozen=True, slots=True)
class Deliverable:
    """A file that was handed over, as it was when it was looked at. `size` is in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Reclaim:
    """What became of a run's folder. `leftovers` names what would not go, or the first of it.

    ``busy`` is no trouble, only too early: its program is still being ended, or somebody else is tidying up.
    """

    status: Literal["reclaimed", "kept", "partial", "absent", "busy"]
    leftovers: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left for a later tick."""
        return self.status not in ("partial", "busy")


def check_policy(policy: str) -> None:
    """Raise PolicyRefusal (category ``unknown_workspace_policy``) unless `policy` is one of `POLICIES`."""
    if policy not in POLICIES:
        raise PolicyRefusal(
            f"The workspace policy {policy!r} is not known.",
            category="unknown_workspace_policy",
            why=f"What happens to a run's folder afterwards must be one of: {', '.join(POLICIES)}.",
            next_command="assign the work again under one of them",
        )


def check_root(root: Path | str) -> None:
    """Refuse a root whose `.sovereign` or `.sovereign/runs` is a link; touches nothing.

    The root itself may be reached through a link. Raises PolicyRefusal (category ``symlinked_workspace_root``).
    """
    path = Path(root).resolve()
    for part in (".sovereign", "runs"):
        path /= part
        if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
            raise _not_our_folder(path)


def allocate(root: Path | str, workspace_id: str) -> Workspace:
    """Make the folder of a new run, with its lock and its two inner folders, for this user only.

    Raises PolicyRefusal: ``workspace_exists`` when the path is taken (a folder is never used twice),
    ``symlinked_workspace_root``, or ``path_traversal`` for an id that is no plain name. Raises OSError when
    the disk refuses.
    """
    workspace = locate(root, workspace_id)
    with _runs(root, create=True) as runs:
        try:
            os.mkdir(workspace_id, 0o700, dir_fd=runs)
            lock = os.open(workspace.lock.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=runs)
        except FileExistsError:
            raise PolicyRefusal(
                f"The folder of run {workspace_id} was not made.",
                category="workspace_exists",
                why="Something stands at that path already, and a run's folder is never used twice.",
                inspect=str(workspace.path),
                next_command="assign the work again: each attempt gets a folder of its own",
            ) from None
        with open(lock, "wb", buffering=0) as record, _entered(workspace_id, runs) as folder:
            info = os.fstat(folder)
            record.write(f"{info.st_dev} {info.st_ino}\n".encode())
            os.fsync(lock)  # a folder that is not empty has a durable record: only then may anything be put into it
            os.mkdir(RAW_NAME, 0o700, dir_fd=folder)
            os.mkdir(OUT_NAME, 0o700, dir_fd=folder)
        return replace(workspace, boundary=Boundary(workspace.path.parents[2], workspace.path))


def locate(root: Path | str, workspace_id: str) -> Workspace:
    """The folder of a run, whether or not it is there. Raises PolicyRefusal for an id that is no plain name."""
    _check_id(workspace_id)
    path = Path(root).resolve() / ".sovereign" / "runs" / workspace_id
    return Workspace(workspace_id, path, path / RAW_NAME, path / OUT_NAME, path.with_name(_lock_name(workspace_id)))


def check_output(workspace: Workspace) -> None:
    """Raise PolicyRefusal (``symlinked_output_directory``) if a run's folders were replaced by anything else.

    An absent one is no crossing: then there is simply nothing to read.
    """
    for path in (workspace.path, workspace.raw, workspace.out):
        if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
            raise PolicyRefusal(
                f"The output of run {workspace.id} was not read.",
                category="symlinked_output_directory",
                why=f"{path.name} is no longer the folder that was made for it.",
                inspect=f"ls -ld {path}",
                next_command="read what the provider did there before you let it run again",
            )


def safe_join(base: Path | str, name: str) -> Path:
    """The path of `name` inside `base`.

    Raises PolicyRefusal (``path_traversal``) for a name that is empty, absolute, too long, starts with ``~``,
    holds NUL or an empty, ``.`` or ``..`` part, or passes through a link below `base`.
    """
    path = Path(base)
    for part in _parts(name):
        path /= part
        if path.is_symlink():
            raise _leads_out(name, "it passes through a link")
    return path


def read_bounded(workspace: Workspace, name: str, limit: int) -> bytes | None:
    """The content of a plain file of this run, `name` relative to its folder; None when there is none.

    Raises PolicyRefusal: ``file_too_large`` beyond `limit` bytes, ``path_traversal`` for the name, and
    ``boundary_violated`` for whatever is not a readable regular file with this one name that stays as it is: a link,
    a file that is linked from elsewhere too, a pipe, a socket, a device, a file that somebody still changes;
    ``deliverable_missing`` for a stale file, which stands there as it did before the program started.
    """
    chunks: list[bytes] = []
    size = _pour(workspace, name, limit, chunks.append)
    return None if size is None else b"".join(chunks)


def collect_deliverables(workspace: Workspace, names: Sequence[str]) -> tuple[Deliverable, ...]:
    """Look at every declared deliverable, `names` relative to `.sovereign-out`, and sum it.

    Raises PolicyRefusal: ``deliverable_missing`` when one is absent, empty or stale; ``ambiguous_name`` when two
    of the names are one on a disk that knows no case, or composes characters; else as `read_bounded`.
    """
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()), name)
        if other != name:
            raise PolicyRefusal(
                f"The deliverables {printable(other)!r} and {printable(name)!r} were not read.",
                category="ambiguous_name",
                why="On some disks the two names are one, and which file is meant nobody knows.",
            )
    return tuple(_deliverable(workspace, name) for name in names)


def write_receipt(root: Path | str, workspace_id: str, text: str) -> None:
    """Lay a copy of a receipt beside its run, with its sum in the form that ``sha256sum -c`` reads.

    The sum is durable first: a receipt beside a sum that differs was cut or altered. The folder is made if it
    is gone. Raises OSError when the disk refuses, PolicyRefusal (``workspace_replaced``) when another folder stands
    there; the ledger's own receipt stands all the same.
    """
    _check_id(workspace_id)
    content = text.encode()
    total = f"{hashlib.sha256(content).hexdigest()}  receipt.json\n".encode()
    with _runs(root, create=True) as runs:
        with suppress(FileExistsError):
            os.mkdir(workspace_id, 0o700, dir_fd=runs)
        with _lock(workspace_id, runs, hold=False) as record, _own_folder(workspace_id, runs, record) as folder:
            replace_file(folder, "receipt.json.sha256", total)
            replace_file(folder, "receipt.json", content)
        os.fsync(runs)


def reclaim_workspace(root: Path | str, workspace_id: str, policy: str) -> Reclaim:
    """Apply `policy` to the folder of a run that is over.

    ``persistent`` removes nothing. ``temporary_directory`` removes all but the receipt, the report and
    `.sovereign-out`; links go, what they point to stays. Nothing is touched while the run's lock is held, or when
    the folder is not known to be the run's own. Trouble is no exception but status ``partial`` or ``busy``: call again
    later. Raises PolicyRefusal only for an unknown policy or an id that is no name.
    """
    check_policy(policy)
    _check_id(workspace_id)
    try:
        with _runs(root, create=False) as runs, _lock(workspace_id, runs, hold=True) as record:
            reclaim = _reclaim(workspace_id, runs, policy, record)
            if reclaim.is_done:
                # No lock of this name is ever made again, so what goes here is the one that is held, or, if another
                # was faster, nothing. Who had opened it before finds the same folder, and nothing to do in it.
                with suppress(FileNotFoundError):
                    os.unlink(_lock_name(workspace_id), dir_fd=runs)
            return reclaim
    except FileNotFoundError:
        return Reclaim("absent")
    except BlockingIOError:
        return Reclaim("busy", (f"{workspace_id}: its program is still being ended, or somebody else is tidying up",))
    except (OSError, PolicyRefusal) as error:
        return Reclaim("partial", (f"{workspace_id}: {error} {getattr(error, 'why', '')}".strip(),))


def _reclaim(workspace_id: str, runs: int, policy: str, record: str | None) -> Reclaim:
    try:
        mode = os.lstat(workspace_id, dir_fd=runs).st_mode
    except FileNotFoundError:
        return Reclaim("absent")
    if policy == "persistent":
        return Reclaim("kept")
    if not stat.S_ISDIR(mode):
        os.unlink(workspace_id, dir_fd=runs)
        return Reclaim("reclaimed")
    with _own_folder(workspace_id, runs, record or "") as folder:
        leftovers = _sweep(folder)
    return Reclaim("partial" if leftovers else "reclaimed", tuple(leftovers))


@contextmanager
def _lock(workspace_id: str, runs: int, *, hold: bool) -> Generator[str | None]:
    """Give the identity of a run's folder as its lock records it, None without a lock; `hold` it meanwhile.

    Raises BlockingIOError while another holds it: a guardian, or somebody else who tidies up and, if he dies over it,
    lets go.
    """
    with ExitStack() as opened:
        record = None
        with suppress(FileNotFoundError):
            lock = opened.enter_context(held_open(_lock_name(workspace_id), _PLAIN_FILE, runs))
            if hold:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record = os.read(lock, 100).decode("ascii", "replace")
        yield record


@contextmanager
def _own_folder(workspace_id: str, runs: int, record: str | None) -> Generator[int]:
    """A descriptor of the folder that stands in a run's place, which must be the recorded one if `record` is not None.

    One that holds nothing but what is kept is as good: there is nothing to lose in it. Raises PolicyRefusal
    (``workspace_replaced``) for any other, before anything is touched.
    """

    def is_recorded(info: os.stat_result) -> bool:
        # The device is compared with that of `runs`: its number may be another after the host has started again.
        same_disk = info.st_dev == os.fstat(runs).st_dev
        return record is None or (same_disk and record.split()[1:] == [str(info.st_ino)])

    if is_recorded(os.lstat(workspace_id, dir_fd=runs)):
        _unlock(workspace_id, runs)
    with held_open(workspace_id, _FOLDER, runs) as folder:
        if not is_recorded(os.fstat(folder)):
            _demand_only_kept(folder, workspace_id, was_recorded=bool(record))
        yield folder


def _demand_only_kept(folder: int, workspace_id: str, *, was_recorded: bool) -> None:
    """Refuse a folder with anything in it that reclaiming would remove, but for a receipt that is being written."""
    others = [name for name in os.listdir(folder) if not _HALF_WRITTEN.fullmatch(name)]
    if not all(_is_kept(name, os.lstat(name, dir_fd=folder).st_mode) for name in others):
        replaced = "It is not the folder that was made for this run: move it away, and the run's own back in its place."
        unknown = "Its lock is gone, so nobody knows whose folder it is: look into it, and remove it by hand."
        raise PolicyRefusal(
            f"Nothing in runs/{workspace_id} was touched.",
            category="workspace_replaced",
            why=replaced if was_recorded else unknown,
            inspect=f"ls -la .sovereign/runs/{workspace_id}",
        )


def _sweep(top: int) -> list[str]:
    """Empty a run's folder but for what is kept; answer what would not go.

    Each inner folder is first renamed into `top` and only then entered. So any depth takes two descriptors and
    no recursion, and a mount point is never entered: it cannot be renamed, and what it shows is not ours.
    """
    leftovers: list[str] = []
    moved: list[tuple[str, str]] = []

    def remove(name: str, parent: int, origin: str, where: str = "") -> None:
        with _reporting(origin + where, leftovers):
            mode = os.lstat(name, dir_fd=parent).st_mode
            if parent == top and _is_kept(name, mode):
                return
            if stat.S_ISDIR(mode):
                moved.append((_set_apart(name, parent, top), origin))
            else:
                os.unlink(name, dir_fd=parent)

    for name in os.listdir(top):
        remove(name, top, name)
    while moved:
        name, origin = moved.pop()
        with _reporting(f"{origin} (now {name})", leftovers):
            with _entered(name, top) as folder:
                for inner in os.listdir(folder):
                    remove(inner, folder, f"{origin}/{inner}", f" (now in {name})")
            os.rmdir(name, dir_fd=top)
    return leftovers


def _set_apart(name: str, parent: int, top: int) -> str:
    """Rename a folder into `top` and answer its name there. Where it is renamed, its mode may be mended too."""
    apart = f"reclaiming-{secrets.token_hex(8)}"
    os.rename(name, apart, src_dir_fd=parent, dst_dir_fd=parent)
    _unlock(apart, parent)
    try:
        os.rename(apart, apart, src_dir_fd=parent, dst_dir_fd=top)
    except OSError:
        os.rename(apart, name, src_dir_fd=parent, dst_dir_fd=parent)
        raise
    return apart


@contextmanager
def _reporting(place: str, leftovers: list[str]) -> Generator[None]:
    """Turn trouble with one file into one line, as long as there is room for it."""
    try:
        yield
    except FileNotFoundError:
        pass  # gone already, which is what was wanted
    except OSError as error:
        if len(leftovers) < LEFTOVERS_SHOWN:
            leftovers.append(f"{printable(place)}: {error.strerror}")
        elif len(leftovers) == LEFTOVERS_SHOWN:
            leftovers.append("and more")


def _is_kept(name: str, mode: int) -> bool:
    return (name in KEPT_FILES and stat.S_ISREG(mode)) or (name == OUT_NAME and stat.S_ISDIR(mode))


def _unlock(name: str, parent: int) -> None:
    """Give a folder's owner its rights back; a C library that cannot do so without following links does nothing."""
    with suppress(OSError, NotImplementedError, ValueError):
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)


@contextmanager
def _entered(name: str, parent: int) -> Generator[int]:
    """A descriptor of a folder that a program may have locked, opened without following a link."""
    _unlock(name, parent)
    with held_open(name, _FOLDER, parent) as folder:
        yield folder


@contextmanager
def _runs(root: Path | str, *, create: bool) -> Generator[int]:
    """A descriptor of `.sovereign/runs`, reached without following a link below the root."""
    path = Path(root).resolve()
    folder = os.open(path, _FOLDER)
    try:
        for part in (".sovereign", "runs"):
            path /= part
            if create:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
            try:
                inner = os.open(part, _FOLDER, dir_fd=folder)
            except OSError:
                if not stat.S_ISDIR(os.lstat(part, dir_fd=folder).st_mode):
                    raise _not_our_folder(path) from None
                raise
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _deliverable(workspace: Workspace, name: str) -> Deliverable:
    _parts(name)
    total = hashlib.sha256()
    size = _pour(workspace, f"{OUT_NAME}/{name}", DELIVERABLE_LIMIT_BYTES, total.update)
    if not size:
        raise _missing(name, f"The report declares it, but {OUT_NAME} holds no such file, or an empty one.")
    return Deliverable(name, size, total.hexdigest())


def _pour(workspace: Workspace, name: str, limit: int, into: Callable[[bytes], object]) -> int | None:
    """Hand a plain file's bytes to `into`, piece by piece; answer how many there were, None without a file.

    Each step of the way is looked at before it is taken. The bytes are counted as they come, for a file may grow.
    """
    *folders, last = _parts(name)
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(_runs(workspace.path.parents[2], create=False))
            for part in (workspace.id, *folders):
                _demand(stat.S_ISDIR, part, folder, name)
                folder = opened.enter_context(held_open(part, _FOLDER, folder))
            _demand(stat.S_ISREG, last, folder, name)
            file = opened.enter_context(held_open(last, _PLAIN_FILE, folder))
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
                raise _not_plain(name, "it has another name elsewhere")
            if workspace.boundary and workspace.boundary.is_stale(info):
                raise _missing(name, "It is stale: it stands there as it did before the program started.")
            size = 0
            while chunk := os.read(file, CHUNK_BYTES):
                size += len(chunk)
                if size > limit:
                    raise _too_large(name, limit)
                into(chunk)
            if mark(os.fstat(file)) != mark(info):
                raise _not_plain(name, "somebody changed it while it was read")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _not_plain(name, error.strerror or "it cannot be read") from error
    return size


def _demand(kind: Callable[[int], bool], part: str, folder: int, name: str) -> None:
    if not kind(os.lstat(part, dir_fd=folder).st_mode):
        raise _not_plain(name, f"{part} is a link, or something else than it should be")


def _parts(name: str) -> list[str]:
    """The parts of a relative name that can only lead down."""
    if not name or name.startswith(("/", "~")) or "\0" in name:
        raise _leads_out(name, "it must be a relative name")
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise _leads_out(name, "it has an empty, a . or a .. part")
    try:
        if len(name.encode()) > NAME_LIMIT_BYTES or any(len(part.encode()) > PART_LIMIT_BYTES for part in parts):
            raise _leads_out(name, "it is too long")
    except UnicodeEncodeError:
        raise _leads_out(name, "it is not valid text") from None
    return parts


def _check_id(workspace_id: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", workspace_id):
        raise _leads_out(workspace_id, "the id of a run is letters, digits, _, . and -")


def _lock_name(workspace_id: str) -> str:
    return f"{workspace_id}.lock"


def _leads_out(name: str, reason: str) -> PolicyRefusal:
    return PolicyRefusal(f"The name {name[:80]!r} was refused.", category="path_traversal", why=f"{reason}.")


def _not_plain(name: str, reason: str) -> PolicyRefusal:
    return PolicyRefusal(
        f"The file {name[:80]!r} was not read.",
        category="boundary_violated",
        why=f"Only a plain file of the run itself counts: {reason}.",
    )


def _missing(name: str, reason: str) -> PolicyRefusal:
    return PolicyRefusal(f"The file {name[:80]!r} is missing.", category="deliverable_missing", why=reason)


def _too_large(name: str, limit: int) -> PolicyRefusal:
    why = f"It is larger than {limit:,} bytes."
    return PolicyRefusal(f"The file {name[:80]!r} was not read.", category="file_too_large", why=why)


def _not_our_folder(path: Path) -> PolicyRefusal:
    return PolicyRefusal(
        f"No run's folder was touched below {path}.",
        category="symlinked_workspace_root",
        why="It is a link, or no folder: what is written there would land somewhere else.",
        inspect=f"ls -ld {path}",
        next_command=f"put a real folder at {path}",
    )
