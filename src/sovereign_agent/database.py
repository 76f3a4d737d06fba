"""Database: the one door to a ledger.

It hands out a connection per thread and two kinds of transaction:

    immediate()     alone on the ledger: read, decide, write
    transaction()   a short compare-and-set whose WHERE clause is the whole argument

On SQLite both are ``BEGIN IMMEDIATE``. On PostgreSQL only `immediate` takes the ledger lock, so it does not
keep a `transaction` out: whatever a decision rests on is read ``<for share>`` or ``<for update>``.
It never opens what is not there unless told to create, never falls back to anything less durable, and never
works in a forked child with its parent's connection.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from datetime import datetime, timedelta
from pathlib import Path

from sovereign_agent.clock import Clock, micros, moment
from sovereign_agent.errors import ConfigurationFault, LedgerUnavailable, SovereignError
from sovereign_agent.storage import authority, migrate, sqlite_backup
from sovereign_agent.storage.authority import Control, admit, read_marker, require_admission
from sovereign_agent.storage.engine import Connection, Migration, Result, Row, Transaction, Value, refuse_fork

__all__ = [
    "LEDGER_NAME",
    "Connection",
    "Control",
    "Database",
    "Migration",
    "Result",
    "Row",
    "Transaction",
    "Value",
    "admit",
    "authority",
    "read_marker",
    "require_admission",
    "sqlite_backup",
]

LEDGER_NAME = Path(".sovereign") / "organization.db"
"""Where an organization's ledger lies below its root."""

PATIENCE = timedelta(seconds=5)
"""How long a call waits for another writer before it ends in Contention."""


class Database:
    """A ledger, on SQLite or PostgreSQL.

    Args:
        location: a path for SQLite, or ``postgresql://...``.
        root: the organization's folder; needed on PostgreSQL, where it holds what is not in the ledger.
        create: make and migrate the ledger when it is absent. Without it an absent one is an error.
        read_only: never write, not even a migration.
        clock: what `now` answers; by default the engine's own time. Tests inject a ManualClock.
        patience: how long a call waits for another writer before Contention.
        authority_required: refuse a ledger that is not of its marker's epoch, or whose restore is not finished.
            False is for the commands that look at that, or mend it. Reading is never refused.
        marker: where this host's authority marker lies, if not beside the ledger: on another disk it does not go back
            with this one.

    Raises LedgerUnavailable, SchemaMismatch, Contention.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        root: Path | None = None,
        create: bool = True,
        read_only: bool = False,
        clock: Clock | None = None,
        patience: timedelta = PATIENCE,
        authority_required: bool = True,
        marker: Path | None = None,
    ) -> None:
        self.location = str(location)
        self._url = self.location if str(location).startswith(("postgresql://", "postgres://")) else ""
        self.patience = patience
        self._clock = clock
        self.read_only = read_only
        self._pid = os.getpid()
        self._local = threading.local()
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._all_lock = threading.Lock()
        self._closed = False
        self.path = self._resolved(location, root)
        self.authority = marker or self.path.with_suffix(authority.SUFFIX)
        self.marker_elsewhere = marker is not None
        self._watched = False
        self._first_open(create=create, authority_required=authority_required and not read_only)

    def _resolved(self, location: str | Path, root: Path | None) -> Path:
        if self._url:
            if root is None:
                raise ConfigurationFault("A PostgreSQL ledger needs root=: the organization's folder.")
            return root.resolve() / LEDGER_NAME
        from sovereign_agent.storage import sqlite

        sqlite.check_version()
        if str(location) == ":memory:":
            raise LedgerUnavailable(
                "A ledger in memory is none.", category="journal_mode", why="It would not be durable."
            )
        return sqlite.resolve(Path(location))

    def _first_open(self, *, create: bool, authority_required: bool) -> None:
        """Look first: whatever is refused here is refused before a byte of it is changed."""
        marked = os.path.lexists(self.authority)  # before the ledger: whoever makes both writes the marker last
        if not self._url:
            self._require_file(create=create and not self.read_only and not marked)
        migrations = migrate.core_migrations()
        try:
            as_is = self._url or self.read_only or os.path.lexists(f"{self.path}-journal")  # only a writer rolls back
            with nullcontext(self.connection) if as_is else closing(self._open(read_only=True)) as look:
                tables = look.tables()
                interrupted = not tables
                if authority_required and marked:
                    self._require_named(tables)
                if self.read_only or (interrupted and not create):
                    migrate.check(look, migrate.CORE, migrations)
                else:
                    migrate.missing(look, migrate.CORE, migrations)
            if not self.read_only:
                self.connection.make_durable()
                migrate.migrate(self.connection, migrate.CORE, migrations)
            if authority_required:
                authority.establish(self.connection)
                self.require_authority()
                self._watched = self.marker_elsewhere
                self.note_progress()
        except BaseException:
            self.close()
            raise

    def require_authority(self) -> None:
        """Raise LedgerUnavailable unless ledger and marker are of one epoch and no restore stands between its steps."""
        authority.require_agreement(self.connection, self.authority_mend)
        if self.marker_elsewhere:
            authority.require_progress(self.connection)

    def note_progress(self) -> None:
        """Remember, where the marker lies elsewhere, how far the ledger has come: one that has gone back is refused.

        Done at opening, at closing and at each tick of a supervisor.
        """
        if self._watched:
            authority.note_progress(self.connection)

    @property
    def authority_mend(self) -> str:
        """The command for a ledger that is not of its marker's epoch."""
        adopt = "sovereign-agent authority adopt, if another host began the epoch; else " if self._url else ""
        return adopt + authority.NEW_EPOCH

    def _require_named(self, tables: set[str]) -> None:
        if authority.TABLE not in tables:
            raise self._lost(f"{self.location} was emptied, or is older than that marker.")

    def _lost(self, why: str) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"The ledger of {self.authority} is gone.",
            category="marker_without_ledger",
            why=why,
            inspect=f"ls -la {self.authority.parent}",
            next_command="put the ledger or a backup of it back; to begin anew, remove the marker and init",
        )

    def _require_file(self, *, create: bool) -> None:
        from sovereign_agent.storage import sqlite

        if not sqlite.exists(self.path, create=create):
            if os.path.lexists(self.authority):
                raise self._lost(f"There is no ledger at {self.path}.")
            raise LedgerUnavailable(
                f"There is no ledger at {self.path}.",
                category="ledger_missing",
                why="Nothing is created by looking.",
                next_command="sovereign-agent init --root FOLDER, or correct --root",
            )
        if not self.read_only:
            sqlite.require_writable(self.path)

    @property
    def connection(self) -> Connection:
        """This thread's connection, opened at its first use."""
        refuse_fork(self._pid)
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is not None and not connection.closed:
            return connection
        if self._closed:
            raise LedgerUnavailable("This Database is closed.", category="ledger_closed")
        self._local.connection = connection = self._open(read_only=self.read_only)
        with self._all_lock:
            self._all.add(connection)
        return connection

    def _open(self, *, read_only: bool) -> Connection:
        connection = self._session(read_only=read_only)
        connection.authority = self.authority
        return connection

    def _session(self, *, read_only: bool) -> Connection:
        if self._url:
            return _postgres(self._url, self.patience, read_only=read_only)
        if read_only:
            from sovereign_agent.storage.sqlite_reader import SQLiteReader

            return SQLiteReader(self.path, patience=self.patience)
        from sovereign_agent.storage.sqlite import SQLiteConnection

        return SQLiteConnection(self.path, patience=self.patience)

    @property
    def engine(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return "postgresql" if self._url else "sqlite"

    def now(self, clock: Clock | None = None, told: int | None = None) -> datetime:
        """The time to judge by, in UTC: `clock`'s, else the injected one, else the engine's own.

        `told` is what a statement has just answered for ``<now>``: it spares the server a question.
        """
        chosen = clock or self._clock
        # In UTC, because adding a TTL in a zone of its own counts the hands of the clock, not the time that passes.
        if chosen is None:
            return self.connection.now() if told is None else moment(told)
        return moment(micros(chosen()))

    def clock(self) -> datetime:
        """The ledger's clock, as a `Clock`."""
        return self.now()

    def immediate(self) -> Transaction:
        """A transaction that has this ledger to itself among all that use `immediate`."""
        return Transaction(self.connection, ledger_lock=True)

    def transaction(self) -> Transaction:
        """A short compare-and-set transaction, without the ledger lock where row locks suffice."""
        return Transaction(self.connection, ledger_lock=False)

    def extend(self, component: str, migrations: Sequence[Migration]) -> None:
        """Bring an application's own tables into this ledger: the same rules, the same transactions."""
        if self.read_only:
            migrate.check(self.connection, component, migrations)
        else:
            migrate.migrate(self.connection, component, migrations)

    def release(self) -> None:
        """Close this thread's connection, because the thread ends before the Database does."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()

    def schema(self) -> dict[str, int]:
        """The number of the newest migration in this ledger, by component."""
        return migrate.newest(self.connection)

    def close(self) -> None:
        """Close every thread's connection. Idempotent."""
        if not self._closed:
            with suppress(SovereignError):  # a transaction is still open, say, or the ledger is out of reach
                self.note_progress()
        self._closed = True
        with self._all_lock:
            connections = list(self._all)
        for connection in connections:
            connection.close()
        self._local = threading.local()


def _postgres(url: str, patience: timedelta, *, read_only: bool) -> Connection:
    try:
        from sovereign_agent.storage.postgres import PostgresConnection
    except ImportError as error:
        raise LedgerUnavailable(
            "The PostgreSQL driver is not installed.",
            category="driver_missing",
            why=str(error),
            next_command="pip install 'psycopg[binary]'",
        ) from error
    return PostgresConnection(url, patience=patience, read_only=read_only)


def driver_versions() -> dict[str, str]:
    """The versions of what opens ledgers here: SQLite's library, and PostgreSQL's driver if it is installed."""
    from importlib import metadata

    from sovereign_agent.storage import sqlite

    versions = {"sqlite": sqlite.sqlite3.sqlite_version}
    with suppress(metadata.PackageNotFoundError):
        versions["psycopg"] = metadata.version("psycopg")
    return versions
