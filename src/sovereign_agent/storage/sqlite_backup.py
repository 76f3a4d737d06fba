"""Whole copies of a SQLite ledger: out as a sealed file, and back into the ledger that stays open.

A backup is one file, at rest (no -wal beside it), and carries its own seal: the SHA-256 of everything in it, as
statements. SQLite's integrity check finds a torn page but not a changed letter; the seal finds both. Coming back,
nothing is believed: the file is copied aside, checked and unsealed there, and the ledger is not touched before that.

A folder keeps the backups of one lineage. Of two copies of a ledger that both go on, the second is refused in the
folder of the first: to a restore one's backup would be as good as the other's.

The way back never swaps a file under those who have it open. It is one SQLite transaction into the open ledger:
whoever dies in it leaves the ledger as it was.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import stat
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import quote

from sovereign_agent.clock import monotonic
from sovereign_agent.configuration import sync
from sovereign_agent.errors import AuthorityLost, IllegalMove, LedgerUnavailable, Refusal, SovereignError
from sovereign_agent.storage.sqlite import status_of, translated, writer_of

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SEAL = ('INSERT INTO "backup_seal"', "CREATE TABLE backup_seal")
_EXACTLY = partial(str, encoding="utf-8", errors="surrogateescape")

# home: storage.sqlite_backup
_CREATE_SEAL = "CREATE TABLE backup_seal (digest TEXT NOT NULL, ledger TEXT NOT NULL)"


@dataclass(frozen=True, slots=True)
class Image:
    """A whole copy of a ledger: its rows by table, and the SHA-256 of all that is in it."""

    path: Path
    size_bytes: int
    rows: dict[str, int]
    digest: str


def back_up(ledger: Path, destination: Path, *, replacing: bool = False) -> Image:
    """Copy a ledger, which may be written meanwhile, to a new file of mode 0600; verify it, then give it its name.

    A backup belongs to whoever makes it; `replacing` makes a part of the ledger, which belongs to the ledger's owner.
    Raises IllegalMove (``backup_exists``, ``backup_folder``, ``backup_lineage``) and LedgerUnavailable
    (``copy_unwritten``); nothing then stands under the name that did not stand there before.
    """
    with _named(destination):
        if not replacing and os.path.lexists(destination):
            raise _unwritten(destination, "backup_exists", "That name is taken.")
        if not destination.parent.is_dir():
            raise _unwritten(destination, "backup_folder", f"There is no folder {destination.parent}.")
        if not replacing:
            _require_one_lineage(ledger, destination)
        temporary = destination.with_name(f".backup.{secrets.token_hex(16)}")
        try:
            _make_empty(temporary, ledger if replacing else None)
            with _opened(ledger) as source, _opened(temporary) as copy:
                source.execute("BEGIN")
                digest = content_digest(source)
                source.backup(copy)
                source.execute("ROLLBACK")
                copy.execute("PRAGMA journal_mode = DELETE").fetchall()
                copy.execute("DROP TABLE IF EXISTS backup_seal")
                copy.execute(_CREATE_SEAL)
                copy.execute("INSERT INTO backup_seal (digest, ledger) VALUES (?, ?)", (digest, _quoted(ledger)))
            with _opened(temporary, "mode=ro") as copy:
                _require_sound(copy, destination, digest)
                image = Image(destination, temporary.stat().st_size, _row_counts(copy), digest)
            sync(temporary)
            _give_name(temporary, destination, replacing=replacing)
        finally:
            remove(temporary)
    return image


def take_in(source: Path, ledger: Path, staging: Path) -> None:
    """Copy a backup to `staging`, verified and unsealed. `source` and `ledger` are not touched.

    Raises Refusal: ``backup_missing``, ``backup_link``, ``backup_not_a_file``, ``backup_is_live``,
    ``backup_empty``, ``backup_damaged``, ``backup_unsealed``; LedgerUnavailable (``copy_unwritten``).
    """
    _require_file(source, ledger)
    with _named(staging):
        _make_empty(staging, ledger)
        try:
            with _opened(source, "mode=ro&immutable=1") as backup, _opened(staging) as copy:
                backup.backup(copy)
                _require_sound(copy, source, _seal_of(copy, source))
                copy.execute("DROP TABLE backup_seal")
            sync(staging.parent)
        except BaseException:
            remove(staging)
            raise


def replace_content(ledger: Path, image: Path, *, patience: timedelta, locked: Callable[[], None]) -> None:
    """Put the content of `image` into the open `ledger`, in one transaction.

    `locked` is called once, when the write lock is held and nothing is changed yet: it may read the ledger, copy it,
    and raise to leave it as it is. Raises Contention when the lock does not come free within `patience`.
    """
    deadline = monotonic() + patience.total_seconds()
    waiting = [locked]

    def after_a_page(status: int, _remaining: int, _total: int) -> None:
        # The driver itself would wait for a lock for ever.
        if status in _BUSY and monotonic() > deadline:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = status
            raise translated(error, ledger, lambda: writer_of(Path(f"{ledger}-shm")))
        if status not in _BUSY and waiting:
            waiting.pop()()

    with _opened(image) as source, _opened(ledger) as target:
        source.backup(target, pages=1, progress=after_a_page, sleep=0.01)


def remove(image: Path) -> None:
    """Remove a copy, with what SQLite may have left beside it, if the disk lets us: no error here hides another."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(OSError):
            Path(f"{image}{suffix}").unlink()


def require_intact(ledger: Path) -> None:
    """Raise Refusal (``backup_damaged``) unless SQLite finds nothing wrong in a file."""
    with _opened(ledger) as raw:
        _require_sound(raw, ledger, None)


def content_digest(raw: sqlite3.Connection) -> str:
    """The SHA-256 of schema, rows and counters, the seal aside."""
    digest = hashlib.sha256()
    for statement in raw.iterdump():
        if not statement.startswith(_SEAL):
            digest.update(statement.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def content(ledger: Path) -> list[str]:
    """Everything in a ledger, as statements: schema, rows and counters."""
    with _opened(ledger) as raw:
        return list(raw.iterdump())


@contextmanager
def _opened(path: Path, mode: str = "mode=rw") -> Generator[sqlite3.Connection]:
    """A session of plain rows, whose errors are told in the house's words."""
    try:
        with closing(sqlite3.connect(f"file:{_quoted(path)}?{mode}", uri=True, isolation_level=None)) as raw:
            raw.text_factory = _EXACTLY
            raw.execute("PRAGMA synchronous = FULL")
            raw.execute("PRAGMA fullfsync = ON")
            yield raw
    except UnicodeError as error:
        raise _refused(path, "backup_damaged", "A name in its schema is no text.") from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGED:
            raise _refused(path, "backup_damaged", f"SQLite says: {error}.") from error
        raise translated(error, path, lambda: "") from error


def _quoted(path: Path) -> str:
    return quote(os.fsencode(path.resolve()))


def _require_one_lineage(ledger: Path, destination: Path) -> None:
    """Refuse a folder with a backup of the same ledger from another place: a copy of it went on from there."""
    mine = _row_of(ledger, "mode=ro", "SELECT max(ledger_id) FROM assistant_control")
    for neighbour in filter(Path.is_file, destination.parent.iterdir()):
        whose = "SELECT max(ledger_id), max(ledger) FROM assistant_control, backup_seal"
        theirs = _row_of(neighbour, "mode=ro&immutable=1", whose)
        if theirs and theirs[:1] == mine and theirs[1] != _quoted(ledger):
            why = f"{neighbour.name} is of the same ledger at {theirs[1]}. Each goes on by itself: keep them apart."
            raise _unwritten(destination, "backup_lineage", why)


def _row_of(path: Path, mode: str, sql: str) -> tuple[str | None, ...]:
    """The row that a file answers with, or an empty one: any file may lie in that folder."""
    with suppress(SovereignError), _opened(path, mode) as raw:
        return tuple(raw.execute(sql).fetchone())
    return ()


def _seal_of(raw: sqlite3.Connection, path: Path) -> str:
    if not raw.execute("SELECT 1 FROM sqlite_master WHERE name = 'backup_seal'").fetchone():
        raise _refused(path, "backup_unsealed", "It was not made by `sovereign-agent backup`.")
    return str(raw.execute("SELECT max(digest) FROM backup_seal").fetchone()[0])


def _require_sound(raw: sqlite3.Connection, path: Path, digest: str | None) -> None:
    complaint = raw.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if complaint != "ok":
        raise _refused(path, "backup_damaged", f"SQLite says: {complaint}.")
    orphan = raw.execute("PRAGMA foreign_key_check").fetchone()
    if orphan:
        raise _refused(path, "backup_damaged", f"A row of {orphan[0]} belongs to one of {orphan[2]} that is not there.")
    if digest is not None and content_digest(raw) != digest:
        raise _refused(path, "backup_damaged", "Its content is not what was sealed.")


def _require_file(source: Path, ledger: Path) -> None:
    if source.is_symlink():
        raise _refused(source, "backup_link", "It is a symbolic link; name the file itself.")
    status = status_of(source)
    if status is None:
        raise _refused(source, "backup_missing", "There is no such file.")
    if not stat.S_ISREG(status.st_mode):
        raise _refused(source, "backup_not_a_file", "It is no regular file.")
    if os.path.samestat(status, ledger.stat()):
        raise _refused(source, "backup_is_live", "It is the live ledger itself.")
    if status.st_size == 0:
        raise _refused(source, "backup_empty", "It has no byte.")


def _refused(path: Path, category: str, why: str) -> Refusal:
    return Refusal(f"{path} is not used: it is no sound backup.", category=category, why=why, inspect=f"ls -l {path}")


def _unwritten(path: Path, category: str, why: str) -> IllegalMove:
    return IllegalMove(
        f"{path} was not written.",
        category=category,
        why=why,
        inspect=f"ls -l {path.parent}",
        next_command="sovereign-agent backup FILE, a new one in a folder that is there",
    )


def _row_counts(raw: sqlite3.Connection) -> dict[str, int]:
    names = raw.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY 1")
    tables = [name for (name,) in names if name != "backup_seal"]
    return {table: raw.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0] for table in tables}


@contextmanager
def _named(copy: Path) -> Generator[None]:
    """Say of what the operating system refused which file it was, and what helps."""
    try:
        yield
    except AuthorityLost:
        raise
    except OSError as error:
        raise LedgerUnavailable(
            f"{copy} was not written.",
            category="copy_unwritten",
            why=f"uid {os.geteuid()}: {error}.",
            inspect=f"ls -ld {copy.parent}; df -h {copy.parent}",
            next_command="make room there, or access, or name another place; then repeat the command",
        ) from error


def _make_empty(path: Path, like: Path | None = None) -> None:
    """Make an empty file of mode 0600; made by root, it belongs to whom `like` belongs to."""
    path.touch(mode=0o600, exist_ok=False)
    path.chmod(0o600)
    if like and os.geteuid() == 0:
        os.chown(path, like.stat().st_uid, like.stat().st_gid)


def _give_name(temporary: Path, destination: Path, *, replacing: bool) -> None:
    if replacing:
        temporary.replace(destination)
    else:
        try:
            _take_name(temporary, destination)
        except FileExistsError:
            raise _unwritten(destination, "backup_exists", "That name is taken.") from None
    try:
        sync(destination.parent)
    except OSError:
        if not replacing:
            destination.unlink()
        raise


def _take_name(temporary: Path, destination: Path) -> None:
    """Give a file its name, and never another's: where there are no hard links, over an empty file made for that."""
    try:
        destination.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError:
        _make_empty(destination)
        try:
            temporary.replace(destination)
        except BaseException:
            destination.unlink()
            raise
