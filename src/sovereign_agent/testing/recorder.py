"""Recorder: every write, truncation, sync and change of a name below one folder, in their order.

SQLite is watched at its own border with the operating system: the very library that this process has loaded gets a
VFS which is its usual one, with the calls for opening, writing, truncating, syncing and deleting passed on and
written down. What Python itself does to files is written down at the functions of `os`. Nothing is imitated: each
call is carried out, and only one that succeeded is written down. A file that Python writes through a stream is looked
at before the next call that is written down, since a stream does not pass through `os.write`.

Whether anything escaped is for the caller to see: what was written down, applied in full, must be what lies in the
folder (`Recorder.applied`). A sync that escaped could only make a disk look worse than it is.
The ``-shm`` file is left out: it is memory that SQLite shares, never synced, and rebuilt after a power loss.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Rows = frozenset[str]

FOLDER = 0
"""What a name stands for that is no file's."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at a place in a file, whose number is its own for good, whatever its name becomes."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    """A file got this size."""

    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    """All that was done to the content of a file until now is on the disk."""

    file: int


@dataclass(frozen=True, slots=True)
class Name:
    """A name for a file, new or in place of another's; `old` is the name that it had, when it was renamed."""

    path: str
    file: int
    old: str = ""


@dataclass(frozen=True, slots=True)
class Unname:
    """A name is gone."""

    path: str


@dataclass(frozen=True, slots=True)
class SyncFolder:
    """All that was done to the names in a folder until now is on the disk."""

    path: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What was in the ledger when a commit had returned, or `act` began: nothing of it may be lost from here on."""

    rows: Rows
    act: str = ""


Change = Write | Truncate | Name | Unname
Operation = Change | Sync | SyncFolder | Mark


@dataclass(frozen=True, slots=True)
class Disk:
    """Names and contents below a folder."""

    names: dict[str, int] = field(default_factory=dict[str, int])
    contents: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def copy(self) -> Disk:
        """A disk that changes on its own."""
        return Disk(dict(self.names), dict(self.contents))

    def apply(self, change: Change) -> None:
        """Let one change happen."""
        match change:
            case Write(file, offset, data):
                before = self.contents.get(file, b"")
                self.contents[file] = before[:offset].ljust(offset, b"\0") + data + before[offset + len(data) :]
            case Truncate(file, size):
                self.contents[file] = self.contents.get(file, b"")[:size].ljust(size, b"\0")
            case Name(path, file, old):
                self.names.pop(old, None)
                self.names[path] = file
            case Unname(path):
                self.names.pop(path, None)

    def after(self, changes: Iterable[Change]) -> Disk:
        """This disk once so many changes have happened; it stays as it is."""
        changed = self.copy()
        for change in changes:
            changed.apply(change)
        return changed

    def files(self) -> dict[str, bytes]:
        """Each file that can be reached, by its path: a file in a folder that is lost is lost."""
        return {
            path: self.contents.get(file, b"")
            for path, file in self.names.items()
            if file != FOLDER and all(str(up) in self.names for up in Path(path).parents if str(up) != ".")
        }

    @classmethod
    def of(cls, root: Path) -> Disk:
        """What lies in a folder, the ``-shm`` files aside. Only while nobody has a ledger in it open."""
        disk = cls()
        for number, path in enumerate(sorted(root.rglob("*")), 1):
            if not path.name.endswith("-shm"):
                disk.names[str(path.relative_to(root))] = FOLDER if path.is_dir() else number
                disk.contents[number] = b"" if path.is_dir() else path.read_bytes()
        return disk


class Recorder:
    """What happens below `root` from now on. One at a time in a process, and for one thread."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.start = Disk.of(self.root)
        self.applied = self.start.copy()
        self.operations: list[Operation] = []
        self._next_file = max(self.start.contents, default=FOLDER) + 1
        self._streamed: set[int] = set()
        self._descriptors: dict[int, tuple[str, int]] = {}

    def note(self, *operations: Operation) -> None:
        """Write down what was done, after what streams have written until now."""
        for file in self._streamed:
            self._catch_up(file)
        for operation in operations:
            self._note(operation)

    def _note(self, operation: Operation) -> None:
        self.operations.append(operation)
        if isinstance(operation, Change):
            self.applied.apply(operation)

    def _catch_up(self, file: int) -> None:
        """Only for a file that SQLite does not have open: closing it would drop SQLite's locks."""
        for path, named in self.applied.names.items():
            if named == file:
                content = (self.root / path).read_bytes()
                break
        else:
            return
        known = self.applied.contents.get(file, b"")
        if len(content) < len(known):
            self._note(Truncate(file, len(content)))
        if content != known[: len(content)] or len(content) > len(known):
            self._note(Write(file, 0, content))

    def below(self, path: str | bytes | os.PathLike[Any], folder: int | None = None) -> str:
        """The path below the root, "" for whatever lies elsewhere or is not to be watched."""
        inside = "" if folder is None else self._descriptors.get(folder, ("/", FOLDER))[0]
        full = Path("" if folder is None else self.root / inside, os.fsdecode(path)).absolute()
        if not full.is_relative_to(self.root) or full.name.endswith("-shm"):
            return ""
        return str(full.relative_to(self.root))

    def number(self, path: str, *, by_sqlite: bool = False) -> int:
        """The number of the file that is under a path; a new one for a name that was not there before."""
        if (self.root / path).is_dir():
            return FOLDER
        if path not in self.applied.names:
            self.note(Name(path, self._next_file))
            self._streamed.add(self._next_file)
            self._next_file += 1
        file = self.applied.names[path]
        if by_sqlite:
            self._streamed.discard(file)
        return file

    @contextmanager
    def watching(self) -> Generator[Recorder]:
        """Write down what happens in here."""
        with _SQLite(self), _python_watched(self):
            yield self

    # --- what Python does ---------------------------------------------------------------------------------

    def open_(self, real: Callable[..., int], path: Any, flags: int, *rest: Any, **options: Any) -> int:
        """`os.open`."""
        descriptor = real(path, flags, *rest, **options)
        self._descriptors.pop(descriptor, None)
        if below := self.below(path, options.get("dir_fd")):
            self._descriptors[descriptor] = (below, self.number(below))
        return descriptor

    def fsync(self, real: Callable[[int], None], descriptor: int) -> None:
        """`os.fsync` and `os.fdatasync`."""
        real(descriptor)
        if descriptor in self._descriptors:
            path, file = self._descriptors[descriptor]
            self.note(SyncFolder(path) if file == FOLDER else Sync(file))

    def rename(self, real: Callable[..., None], old: Any, new: Any, **options: Any) -> None:
        """`os.rename` and `os.replace`."""
        before, after = self.below(old, options.get("src_dir_fd")), self.below(new, options.get("dst_dir_fd"))
        file = self.number(before) if before else FOLDER
        self.note()
        real(old, new, **options)
        if before and after:
            self._note(Name(after, file, old=before))

    def link(self, real: Callable[..., None], old: Any, new: Any, **options: Any) -> None:
        """`os.link`."""
        before, after = self.below(old), self.below(new)
        file = self.number(before) if before else FOLDER
        real(old, new, **options)
        if after:
            self.note(Name(after, file))

    def unlink(self, real: Callable[..., None], path: Any, **options: Any) -> None:
        """`os.unlink` and `os.remove`."""
        self.note()
        real(path, **options)
        if below := self.below(path, options.get("dir_fd")):
            self._note(Unname(below))

    def mkdir(self, real: Callable[..., None], path: Any, *rest: Any, **options: Any) -> None:
        """`os.mkdir`."""
        real(path, *rest, **options)
        if below := self.below(path, options.get("dir_fd")):
            self.note(Name(below, FOLDER))


@contextmanager
def _python_watched(recorder: Recorder) -> Generator[None]:
    watched = {
        "open": recorder.open_,
        "fsync": recorder.fsync,
        "fdatasync": recorder.fsync,
        "rename": recorder.rename,
        "replace": recorder.rename,
        "link": recorder.link,
        "unlink": recorder.unlink,
        "remove": recorder.unlink,
        "mkdir": recorder.mkdir,
    }
    real = {name: getattr(os, name) for name in watched}

    def passed_on(name: str) -> Callable[..., Any]:
        return lambda *args, **options: watched[name](real[name], *args, **options)

    for name in watched:
        setattr(os, name, passed_on(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


# --- what SQLite does ---------------------------------------------------------------------------------------

_OK = 0
_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
_DELETE = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)
_SET_CALL = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p)
_GET_CALL = CFUNCTYPE(c_void_p, c_void_p, c_char_p)
_OPEN_FOLDER = CFUNCTYPE(c_int, c_char_p, POINTER(c_int))


class _Vfs(ctypes.Structure):
    """``struct sqlite3_vfs``, version 3 (sqlite.org/c3ref/vfs.html)."""

    _fields_ = (
        ("version", c_int),
        ("file_bytes", c_int),
        ("longest_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", _OPEN),
        ("delete", _DELETE),
        ("between", c_void_p * 11),
        ("set_call", _SET_CALL),
        ("get_call", _GET_CALL),
        ("next_call", c_void_p),
    )


class _Methods(ctypes.Structure):
    """``struct sqlite3_io_methods``, version 3 (sqlite.org/c3ref/io_methods.html)."""

    _fields_ = (
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", _WRITE),
        ("truncate", _TRUNCATE),
        ("sync", _SYNC),
        ("rest", c_void_p * 13),
    )


class _File(ctypes.Structure):
    """The head of ``struct sqlite3_file``."""

    _fields_ = (("methods", POINTER(_Methods)),)


_kept: list[object] = []
"""What SQLite may still point at when we have let go of it."""


class _SQLite:
    """The SQLite of this process, whose default VFS for the connections that are opened in here is one of ours."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))  # what it is linked with is found through it
        self._library.sqlite3_vfs_find.restype = POINTER(_Vfs)
        self._usual = self._library.sqlite3_vfs_find(None)
        self._vfs: _Vfs = self._usual.contents
        self._open_folder = _OPEN_FOLDER(self._vfs.get_call(self._usual, b"openDirectory"))
        self._files: dict[int, int] = {}
        self._methods: dict[int, tuple[_Methods, _Methods]] = {}
        self._folders: list[str] = []

    def __enter__(self) -> None:
        self._ours, open_folder = _Vfs.from_buffer_copy(self._vfs), _OPEN_FOLDER(self.open_folder)
        self._ours.name, self._ours.open, self._ours.delete = b"watched", _OPEN(self.open), _DELETE(self.delete)
        _kept.append((self, open_folder))
        self._library.sqlite3_vfs_register(ctypes.byref(self._ours), 1)
        self._vfs.set_call(self._usual, b"openDirectory", ctypes.cast(open_folder, c_void_p))

    def __exit__(self, *_: object) -> None:
        self._vfs.set_call(self._usual, b"openDirectory", None)
        self._library.sqlite3_vfs_unregister(ctypes.byref(self._ours))
        self._library.sqlite3_vfs_register(self._usual, 1)

    def open(self, vfs: int, name: int | None, handle: int, flags: int, granted: Any) -> int:
        """``xOpen``: the file is from now on written through our methods."""
        answer = int(self._vfs.open(vfs, name, handle, flags, granted))
        if answer == _OK and name and (path := self._recorder.below(ctypes.string_at(name))):
            self._files[handle] = self._recorder.number(path, by_sqlite=True)
            opened = ctypes.cast(handle, POINTER(_File)).contents
            address = ctypes.addressof(opened.methods.contents)
            if address not in self._methods:
                self._methods[address] = (opened.methods.contents, self._watched(opened.methods.contents))
            opened.methods = ctypes.pointer(self._methods[address][1])
        return answer

    def delete(self, vfs: int, name: bytes, durable: int) -> int:
        """``xDelete``."""
        answer = int(self._vfs.delete(vfs, name, durable))
        path = self._recorder.below(name)
        return self._done(answer, Unname(path)) if path else answer

    def open_folder(self, name: bytes, descriptor: Any) -> int:
        """``openDirectory``, which SQLite calls for nothing but to sync the folder of a file."""
        self._folders.append(self._recorder.below(Path(os.fsdecode(name)).parent))
        return int(self._open_folder(name, descriptor))

    def _watched(self, real: _Methods) -> _Methods:
        def write(handle: int, data: int, length: int, offset: int) -> int:
            answer = real.write(handle, data, length, offset)
            return self._done(answer, Write(self._files[handle], offset, ctypes.string_at(data, length)))

        def truncate(handle: int, size: int) -> int:
            return self._done(real.truncate(handle, size), Truncate(self._files[handle], size))

        def sync(handle: int, flags: int) -> int:
            return self._done(real.sync(handle, flags), Sync(self._files[handle]))

        watched = _Methods.from_buffer_copy(real)
        watched.write, watched.truncate, watched.sync = _WRITE(write), _TRUNCATE(truncate), _SYNC(sync)
        return watched

    def _done(self, answer: int, operation: Operation) -> int:
        if answer == _OK:
            self._recorder.note(operation, *[SyncFolder(path) for path in self._folders if path])
        self._folders.clear()
        return answer
