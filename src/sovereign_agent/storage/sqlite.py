"""SQLite: the embedded engine.

WAL, ``synchronous=FULL``, foreign keys and recursive triggers, in autocommit mode with explicit
``BEGIN IMMEDIATE``: a reader never becomes a writer half-way. The file is opened by SQLite alone; this room
never opens it with plain I/O, because closing any descriptor of it would drop this process's locks.
It refuses what cannot be durable: network file systems, hard-linked files, a journal that is not WAL.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from operator import methodcaller
from pathlib import Path
from urllib.parse import quote

from sovereign_agent.clock import SystemClock, monotonic
from sovereign_agent.configuration import make_folder
from sovereign_agent.errors import LedgerFault, LedgerUnavailable, SchemaMismatch, SovereignError
from sovereign_agent.storage import engine
from sovereign_agent.storage.engine import Connection, Result, Value

OLDEST_SQLITE = (3, 37, 0)
WAL_LIMIT_BYTES = 64 * 1024 * 1024
NETWORK_FILE_SYSTEMS = re.compile("nfs|cifs|smb|9p|afs|ceph|fuse|glusterfs|lustre|gfs|ocfs|drvfs")
WRITE_LOCK_BYTE = 120
"""Where the WAL write lock lies in the ``-shm`` file (sqlite.org/walformat.html)."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BROKEN = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG)
_UNAVAILABLE = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_NOMEM,
)
_SESSION = (
    "foreign_keys = ON",
    "recursive_triggers = ON",
    "trusted_schema = OFF",
    "synchronous = FULL",
    "fullfsync = ON",  # on macOS a plain one stops at the drive's cache; elsewhere it means nothing
    f"journal_size_limit = {WAL_LIMIT_BYTES}",
    "schema_version",  # the first look into the file: whatever is wrong with it shows here
)
_READABLE = methodcaller("decode", "utf-8", "replace")
"""Text as it can be shown: bytes that somebody else wrote must not keep a reader from every other row."""

_OCTAL = re.compile(r"\\([0-7]{3})")
_WITH = re.compile(r"(?:\s|--[^\n]*\n)*WITH\b", re.IGNORECASE)
_WORDS = {"<for update>": "", "<for share>": "", "<skip locked>": "", "<now>": "NULL"}
_SCHEMA_WORDS = {"<identity>": "INTEGER PRIMARY KEY AUTOINCREMENT", "<integer>": "INTEGER", "<strict>": "STRICT"}
_creating = threading.Lock()
"""Held while this process makes a ledger file: closing the new file drops the locks of a thread that has opened it."""


@lru_cache(maxsize=1024)
def render(sql: str) -> str:
    """Replace the engine words of a statement."""
    return engine.spelled(sql, _WORDS)


class SQLiteConnection(Connection):
    """One SQLite connection that may write.

    Args:
        path: the ledger file, resolved; it exists.
        patience: how long a call waits for another writer before it ends in Contention.
    """

    def __init__(self, path: Path, *, patience: timedelta) -> None:
        self.path = path
        self._clock = SystemClock()
        self._patience = patience
        self._opened = _identity(path)
        self._in_use = threading.RLock()  # closed by another thread while it runs, a statement ends the interpreter
        self._raw = self._connect()
        super().__init__()

    @property
    def in_transaction(self) -> bool:
        return self._raw.in_transaction

    def now(self) -> datetime:
        return self._clock()

    def lock(self, sql: str, params: Sequence[Value] = ()) -> None:
        """Nothing to do: a transaction has the whole ledger."""

    def make_durable(self) -> None:
        """Switch the file to WAL, waiting for others who do the same, and believe only what SQLite answers."""
        deadline = monotonic() + self._patience.total_seconds()
        while True:
            try:
                mode = str(self._raw.execute("PRAGMA journal_mode = WAL").fetchone()[0])
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY or monotonic() > deadline:
                    raise translated(error, self.path, self._holder) from error
                time.sleep(0.01)
        if mode != "wal":
            raise LedgerUnavailable(
                f"{self.path} cannot keep a durable ledger.",
                category="journal_mode",
                why=f"SQLite answered journal mode {mode!r} where WAL was asked for.",
                next_command="put the root on a local disk",
            )

    def tables(self) -> set[str]:
        rows = self._run("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'", ())
        return {str(row[0]) for row in rows}

    def schema_statements(self, sql: str) -> list[str]:
        return engine.schema_statements(sql, _SCHEMA_WORDS, _append_only)

    def _connect(self) -> sqlite3.Connection:
        return self._connect_as("mode=rw")

    def _connect_as(self, mode: str) -> sqlite3.Connection:
        name = f"file:{quote(os.fsencode(self.path))}?{mode}"
        wait = self._patience.total_seconds()
        raw = None
        try:
            raw = sqlite3.connect(name, uri=True, timeout=wait, isolation_level=None, check_same_thread=False)
            raw.row_factory = sqlite3.Row
            raw.text_factory = _READABLE
            for pragma in _SESSION:
                raw.execute(f"PRAGMA {pragma}").fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            if raw:
                raw.close()
            raise translated(error, self.path, self._holder) from error
        return raw

    def _close(self) -> None:
        with self._in_use:
            self._raw.close()

    def _run(self, sql: str, params: tuple[Value, ...]) -> Result:
        try:
            with self._in_use:
                cursor = self._raw.execute(render(sql), params)
                if cursor.description:
                    rows = cursor.fetchall()
                    return Result(rows, len(rows))
                if cursor.rowcount < 0 and _WITH.match(sql):  # the driver does not count what starts with WITH
                    return Result([], int(self._raw.execute("SELECT changes()").fetchone()[0]))
                return Result([], cursor.rowcount)
        except sqlite3.Error as error:
            raise translated(error, self.path, self._holder) from error

    def _run_many(self, sql: str, rows: list[tuple[Value, ...]]) -> int:
        try:
            with self._in_use:
                return self._raw.executemany(render(sql), rows).rowcount
        except sqlite3.Error as error:
            raise translated(error, self.path, self._holder) from error

    def _begin(self, *, ledger_lock: bool) -> None:
        self._command("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        # SQLite itself would answer that it has committed, to a file that nobody will open again.
        there = _identity(self.path)
        if there is None or there != self._opened:
            raise LedgerUnavailable(
                f"The ledger {self.path} was replaced while it was open.",
                category="ledger_replaced",
                why="Another file has its name, so nothing of this transaction was committed.",
                inspect=f"ls -li {self.path}*",
                next_command="end every process that has it open, then sovereign-agent doctor",
            )
        self._command("COMMIT")

    def _command(self, words: str) -> None:
        try:
            with self._in_use:
                self._raw.execute(words)
        except sqlite3.Error as error:
            raise translated(error, self.path, self._holder) from error

    def _abandon(self) -> None:
        try:
            with self._in_use:
                if self._raw.in_transaction:
                    self._raw.execute("ROLLBACK")
        except sqlite3.Error:
            self.close()

    def _holder(self) -> str:
        """Who holds the write lock, as far as the operating system tells."""
        return writer_of(Path(f"{self.path}-shm"))


def _append_only(table: str, keys: list[str]) -> list[str]:
    refusal = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
    taken = " OR ".join(f"{key} = NEW.{key}" for key in keys)
    replacing = f"WHEN EXISTS (SELECT 1 FROM {table} WHERE {taken})"  # REPLACE deletes without asking a trigger
    return [
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refusal}",
        f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {refusal}",
        f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} {replacing} {refusal}",
    ]


def translated(error: sqlite3.Error | UnicodeError, path: Path, holder: Callable[[], str]) -> SovereignError:
    """Say what a driver's error means for the caller."""
    # The driver cannot decode SQLite's complaint about a schema when the name in it is the damaged part.
    other = sqlite3.SQLITE_CORRUPT if isinstance(error, UnicodeError) else sqlite3.SQLITE_ERROR
    code = getattr(error, "sqlite_errorcode", other)
    primary = code & 0xFF
    if primary in _BUSY:
        return engine.busy(f"The ledger {path} is busy.", f"The write lock is held{holder() or ' by another process'}.")
    if primary in _BROKEN:
        return engine.broken(str(error))
    if primary in _UNAVAILABLE:
        return engine.unusable(f"The ledger {path} cannot be used: {error}.", _unavailable_because(code, path))
    return LedgerFault(f"SQLite refused a statement: {error}.", category="ledger_fault", inspect=str(path))


def _unavailable_because(code: int, path: Path) -> str:
    primary = code & 0xFF
    if code == getattr(sqlite3, "SQLITE_READONLY_DBMOVED", 1032):
        return "the file was moved or replaced while it was open"
    if code == sqlite3.SQLITE_READONLY_ROLLBACK:
        return "its first start was interrupted, and `sovereign-agent init` finishes it"
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return (
            "this session only reads, or "
            f"uid {os.geteuid()} may not read and write {path.name}, its -wal and -shm and the folder {path.parent}"
        )
    if primary == sqlite3.SQLITE_FULL:
        return "no space is left for it"
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return "the file is damaged, or is no SQLite file"
    return "the operating system reported an I/O error"


def resolve(path: Path, *, mounts: Iterable[str] | None = None) -> Path:
    """Resolve a ledger's path once, so that every process locks the same file under the same name.

    Raises LedgerUnavailable for a file with a second hard link (its -wal would stand beside one name only), a
    path that is not a regular file, and a network file system (`mounts`: lines as in ``/proc/mounts``).
    """
    resolved = Path(os.path.realpath(path))
    status = status_of(resolved)
    if status and not stat.S_ISREG(status.st_mode):
        raise LedgerUnavailable(f"{resolved} is not a file.", category="ledger_not_a_file")
    if status and status.st_nlink > 1:
        raise LedgerUnavailable(
            f"{resolved} has more than one name.",
            category="ledger_hard_linked",
            why="Two names of one file have two -wal files, and the ledger would tear.",
            next_command="remove the other hard link",
        )
    kind = file_system_of(resolved, _mounts() if mounts is None else mounts)
    if NETWORK_FILE_SYSTEMS.match(kind):
        raise LedgerUnavailable(
            f"{resolved} is on a network file system ({kind}).",
            category="network_file_system",
            why="SQLite's WAL needs memory that all its processes share, which this file system does not give.",
            next_command="put the root on a local disk, or use PostgreSQL ([ledger] url in sovereign.toml)",
        )
    return resolved


def status_of(path: Path) -> os.stat_result | None:
    """What the operating system tells of a file; None when there is none."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _out_of_reach(path, str(error)) from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file it is, under whatever name; None when there is none."""
    status = status_of(path)
    return (status.st_dev, status.st_ino) if status else None


def exists(path: Path, *, create: bool) -> bool:
    """Whether the ledger file is there; with `create` it is afterwards: empty, for its owner alone."""
    with _creating:
        if status_of(path) or not create:
            return status_of(path) is not None
        try:
            make_folder(path.parent, mode=0o700)
            path.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            pass  # another process was first
        except OSError as error:
            raise _out_of_reach(path, str(error)) from error
    return True


def require_writable(path: Path) -> None:
    """Raise LedgerUnavailable when this user may only read the file.

    SQLite would open it all the same, and leave a -wal and a -shm that its owner cannot write.
    """
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise _out_of_reach(path, "it may not write the file")


def _out_of_reach(path: Path, reason: str) -> LedgerUnavailable:
    return LedgerUnavailable(
        f"The ledger {path} cannot be reached.",
        category="ledger_unavailable",
        why=f"uid {os.geteuid()}: {reason}",
        inspect=f"ls -la {path.parent}",
        next_command="give this user access to the folder and the file, or run as their owner",
    )


def file_system_of(path: Path, mounts: Iterable[str]) -> str:
    """The type of the file system that `path` is on, by the longest mount point; "unknown" when none tells."""
    best, kind = "", "unknown"
    for line in mounts:
        _, _, rest = line.partition(" ")
        point, _, rest = rest.partition(" ")
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), point)
        if len(point) >= len(best) and path.is_relative_to(point):
            best, kind = point, rest.partition(" ")[0]
    return kind


def _mounts() -> list[str]:
    try:
        return os.fsdecode(Path("/proc/mounts").read_bytes()).split("\n")
    except OSError:
        return []


def writer_of(shm: Path) -> str:
    """Name the process with the write lock on this ``-shm``, from ``/proc/locks``; "" where that cannot be known."""
    try:
        status = shm.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" in fields or fields[3] != "WRITE" or fields[5] != device:
                continue
            if int(fields[6]) <= WRITE_LOCK_BYTE and (fields[7] == "EOF" or int(fields[7]) >= WRITE_LOCK_BYTE):
                return f" by process {fields[4]} {_state_of(fields[4])}".rstrip()
    except (OSError, ValueError, IndexError):
        return ""
    return ""


def _state_of(pid: str) -> str:
    """``(name, stopped)`` or ``(name)``, a hint for a human; a PID is never an identity."""
    head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    name = head.partition("(")[2]
    return f"({name}, stopped)" if tail.split()[0] in ("T", "t") else f"({name})"


def check_version() -> None:
    """Raise SchemaMismatch when the linked SQLite cannot do what the schema needs (STRICT, RETURNING)."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise SchemaMismatch(
            f"SQLite {sqlite3.sqlite_version} is too old.",
            category="engine_too_old",
            why="The ledger needs 3.37 or newer.",
            next_command="use a newer Python, or PostgreSQL",
        )
