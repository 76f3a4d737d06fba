"""Workspaces: the folder of one run, below `<root>/.sovereign/runs`.

An outside program worked here, so nothing found here is believed: no link is followed, nothing but a plain
file with a single name is read, every read has a limit, and a name that leads out is refused before a file
is touched. A folder belongs to one run and is never used again. Reclaiming is housekeeping: it can fail in
part and says so, and it never decides anything. Whether a run is over is the ledger's to know.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sovereign_agent.configuration import replace_file
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
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Workspace:
    """One run's folder: `raw` holds what its program printed, `out` what it hands over."""

    id: str
    path: Path
    raw: Path
    out: Path


@dataclass(frozen=True, slots=True)
class Deliverable:
    """A file that was handed over, as it was when it was looked at. `size` is in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Reclaim:
    """What became of a run's folder. `leftovers` names what would not go, or the first of it."""

    status: Literal["reclaimed", "kept", "partial", "absent"]
    leftovers: tuple[str, ...] = ()


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
    """Make the folder of a new run, with its two inner folders, for this user only.

    Raises PolicyRefusal: ``workspace_exists`` when the path is taken (a folder is never used twice),
    ``symlinked_workspace_root``, or ``path_traversal`` for an id that is no plain name. Raises OSError when
    the disk refuses.
    """
    workspace = locate(root, workspace_id)
    with _runs(root, create=True) as runs:
        try:
            os.mkdir(workspace_id, 0o700, dir_fd=runs)
        except FileExistsError:
            raise PolicyRefusal(
                f"The folder of run {workspace_id} was not made.",
                category="workspace_exists",
                why="Something stands at that path already, and a run's folder is never used twice.",
                inspect=str(workspace.path),
                next_command="assign the work again: each attempt gets a folder of its own",
            ) from None
        with _entered(workspace_id, runs) as folder:
            os.mkdir(RAW_NAME, 0o700, dir_fd=folder)
            os.mkdir(OUT_NAME, 0o700, dir_fd=folder)
    return workspace


def locate(root: Path | str, workspace_id: str) -> Workspace:
    """The folder of a run, whether or not it is there. Raises PolicyRefusal for an id that is no plain name."""
    _check_id(workspace_id)
    path = Path(root).resolve() / ".sovereign" / "runs" / workspace_id
    return Workspace(workspace_id, path, path / RAW_NAME, path / OUT_NAME)


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
    ``boundary_violated`` for whatever is not a readable regular file with this one name: a link, a file that
    is linked from elsewhere too, a pipe, a socket, a device.
    """
    chunks: list[bytes] = []
    size = _pour(workspace, name, limit, chunks.append)
    return None if size is None else b"".join(chunks)


def collect_deliverables(workspace: Workspace, names: Sequence[str]) -> tuple[Deliverable, ...]:
    """Look at every declared deliverable, `names` relative to `.sovereign-out`, and sum it.

    Raises PolicyRefusal: ``deliverable_missing`` when one is absent or empty, else as `read_bounded`.
    """
    return tuple(_deliverable(workspace, name) for name in names)


def write_receipt(root: Path | str, workspace_id: str, text: str) -> None:
    """Lay a copy of a receipt beside its run, with its sum in the form that ``sha256sum -c`` reads.

    The sum is durable first: a receipt beside a sum that differs was cut or altered. The folder is made if it
    is gone. Raises OSError when the disk refuses; the ledger's own receipt stands all the same.
    """
    _check_id(workspace_id)
    content = text.encode()
    with _runs(root, create=True) as runs:
        with suppress(FileExistsError):
            os.mkdir(workspace_id, 0o700, dir_fd=runs)
        with _entered(workspace_id, runs) as folder:
            total = f"{hashlib.sha256(content).hexdigest()}  receipt.json\n"
            replace_file(folder, "receipt.json.sha256", total.encode())
            replace_file(folder, "receipt.json", content)
        os.fsync(runs)


def reclaim_workspace(root: Path | str, workspace_id: str, policy: str) -> Reclaim:
    """Apply `policy` to the folder of a run that is over.

    ``persistent`` removes nothing. ``temporary_directory`` removes all but the receipt, the report and
    `.sovereign-out`; links go, what they point to stays. Trouble with a file is no exception but status
    ``partial``: call again later. Raises PolicyRefusal only for an unknown policy or an id that is no name.
    """
    check_policy(policy)
    _check_id(workspace_id)
    leftovers: list[str] = []
    try:
        with _runs(root, create=False) as runs:
            mode = os.lstat(workspace_id, dir_fd=runs).st_mode
            if policy == "persistent":
                return Reclaim("kept")
            if stat.S_ISDIR(mode):
                with _entered(workspace_id, runs) as folder:
                    leftovers = _sweep(folder)
            else:
                os.unlink(workspace_id, dir_fd=runs)
    except FileNotFoundError:
        return Reclaim("absent")
    except (OSError, PolicyRefusal) as error:
        leftovers = [f"{workspace_id}: {error}"]
    return Reclaim("partial" if leftovers else "reclaimed", tuple(leftovers))


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
            leftovers.append(f"{_printable(place)}: {error.strerror}")
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
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


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
        raise PolicyRefusal(
            f"The deliverable {name!r} is missing.",
            category="deliverable_missing",
            why=f"The report declares it, but {OUT_NAME} holds no such file, or an empty one.",
            inspect=f"ls -l {workspace.out}",
        )
    return Deliverable(name, size, total.hexdigest())


def _pour(workspace: Workspace, name: str, limit: int, into: Callable[[bytes], object]) -> int | None:
    """Hand a plain file's bytes to `into`, piece by piece; answer how many there were, None without a file.

    Each step of the way is looked at before it is taken. The bytes are counted as they come, for a file may grow.
    """
    *folders, last = _parts(name)
    with ExitStack() as opened:

        def enter(part: str | Path, flags: int, folder: int | None = None) -> int:
            descriptor = os.open(part, flags, dir_fd=folder)
            opened.callback(os.close, descriptor)
            return descriptor

        try:
            folder = opened.enter_context(_runs(workspace.path.parents[2], create=False))
            for part in (workspace.id, *folders):
                _demand(stat.S_ISDIR, part, folder, name)
                folder = enter(part, _FOLDER, folder)
            _demand(stat.S_ISREG, last, folder, name)
            file = enter(last, _PLAIN_FILE, folder)
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
                raise _not_plain(name, "it has another name elsewhere")
            size = 0
            while chunk := os.read(file, CHUNK_BYTES):
                size += len(chunk)
                if size > limit:
                    raise _too_large(name, limit)
                into(chunk)
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


def _printable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace").replace("\0", "")[-200:]


def _leads_out(name: str, reason: str) -> PolicyRefusal:
    return PolicyRefusal(f"The name {name[:80]!r} was refused.", category="path_traversal", why=f"{reason}.")


def _not_plain(name: str, reason: str) -> PolicyRefusal:
    return PolicyRefusal(
        f"The file {name[:80]!r} was not read.",
        category="boundary_violated",
        why=f"Only a plain file of the run itself counts: {reason}.",
    )


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
