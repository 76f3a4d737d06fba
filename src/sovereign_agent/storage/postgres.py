"""PostgreSQL: the engine for many hosts on one ledger.

READ COMMITTED, explicit ``BEGIN``. `begin` with the ledger lock takes an advisory lock keyed by this ledger's
schema, so that read-then-write means what it means on SQLite. Sessions carry timeouts and TCP keepalive: a
host that freezes inside a transaction is cut off by the server and its rows are free again.
This room never shows a password: errors name the server, not the URL.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, LiteralString, cast

import psycopg
from psycopg import errors
from psycopg.adapt import AdaptersMap, Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from sovereign_agent.clock import moment
from sovereign_agent.errors import LedgerFault, LedgerUnavailable, SovereignError
from sovereign_agent.storage import engine
from sovereign_agent.storage.engine import Connection, Result, Value

_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_WORDS = {"<for update>": "FOR UPDATE", "<for share>": "FOR SHARE", "<skip locked>": "SKIP LOCKED", "<now>": _NOW}
_SCHEMA_WORDS = {
    "<identity>": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "<integer>": "BIGINT",
    "<strict>": "",
}
_LEDGER_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('sovereign-agent ledger ' || current_schema(), 0))"
_HOLDER = """
SELECT a.pid, a.application_name, a.state FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE l.locktype = 'advisory' AND l.granted
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (l.classid::bigint << 32) + l.objid::bigint
       = hashtextextended('sovereign-agent ledger ' || current_schema(), 0)
"""
_REFUSE_CHANGE = """
CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation'; END $$
"""
_QUOTED_OR_PLACEHOLDER = re.compile(r"""'[^']*'|"[^"]*"|--[^\n]*|\?""")
_OLD_PLAN = "RevalidateCachedQuery"
"""Where in the server the complaint comes from: its words depend on a language, its code says only "unsupported"."""
_BUSY = (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected, errors.SerializationFailure)
_UNAVAILABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.IdleInTransactionSessionTimeout,
    errors.ReadOnlySqlTransaction,
)


@lru_cache(maxsize=1024)
def render(text: str) -> str:
    """Replace the engine words, double every ``%``, and turn each ``?`` outside quotes and comments into ``%s``."""
    text = engine.spelled(text, _WORDS).replace("%", "%%")
    return _QUOTED_OR_PLACEHOLDER.sub(lambda found: "%s" if found[0] == "?" else found[0], text)


class _Numeric(Loader):
    """What `sum` and `avg` answer: the same kinds of number that SQLite answers with."""

    def load(self, data: bytes | bytearray | memoryview) -> int | float:
        text = bytes(data).decode()
        return float(text) if "." in text else int(text)


_ADAPTERS = AdaptersMap(psycopg.adapters)
_ADAPTERS.register_loader("numeric", _Numeric)


class NamedRow(tuple[Any, ...]):
    """A tuple that also answers by column name, as SQLite's rows do: of two columns with one name, the first."""

    __slots__ = ()
    _names: tuple[str, ...]
    _index: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._index[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        return list(self._names)


@lru_cache(maxsize=1024)
def _row_type(columns: tuple[bytes | None, ...]) -> type[NamedRow]:
    names = tuple([name.decode() for name in columns if name])
    index = {name: position for position, name in reversed([*enumerate(names)])}
    return type("Row", (NamedRow,), {"__slots__": (), "_names": names, "_index": index})


def _named_rows(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], NamedRow]:
    answer = cursor.pgresult
    return _row_type(tuple([answer.fname(column) for column in range(answer.nfields)]) if answer else ())


class PostgresConnection(Connection):
    """One PostgreSQL session.

    Args:
        url: ``postgresql://...`` or a conninfo string; its own ``options`` (a ``search_path``) are kept.
        patience: how long a call waits for a lock before it ends in Contention. A transaction idle for
            twice as long is ended by the server, and so is a statement that runs for twelve times as long.
        read_only: every transaction is READ ONLY, and sees one state from its first statement on.
    """

    def __init__(self, url: str, *, patience: timedelta, read_only: bool) -> None:
        self._conninfo = _conninfo(url, patience, read_only=read_only)
        self._raw = self._connect()
        super().__init__()

    @property
    def in_transaction(self) -> bool:
        return self._raw.pgconn.transaction_status == TransactionStatus.INTRANS

    def now(self) -> datetime:
        row = self._run("SELECT <now>", ()).fetchone()
        return moment(row[0] if row else 0)

    def tables(self) -> set[str]:
        rows = self._run("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()", ())
        return {str(row[0]) for row in rows}

    def schema_statements(self, sql: str) -> list[str]:
        return engine.schema_statements(sql, _SCHEMA_WORDS, _append_only)

    def _close(self) -> None:
        self._raw.close()

    def _connect(self) -> psycopg.Connection[NamedRow]:
        try:
            raw = psycopg.Connection[NamedRow].connect(
                **self._conninfo, autocommit=True, row_factory=_named_rows, context=_ADAPTERS
            )
        except psycopg.Error as error:
            raise self._translated(error) from error
        self._cursor = raw.cursor()  # one for all statements, because each answer is read to its end
        return raw

    def _run(self, sql: str, params: tuple[Value, ...]) -> Result:
        if self._raw.closed and self._owner is None:
            self._require_usable()
            self._raw = self._connect()
        try:
            cursor = self._cursor.execute(cast("LiteralString", render(sql)), params)
            answer = cursor.pgresult  # whose columns can be counted; the cursor's description is made anew each time
            rows = cursor.fetchall() if answer and answer.nfields else []
            return Result(cast("list[Any]", rows), cursor.rowcount)
        except psycopg.Error as error:
            if error.diag.source_function != _OLD_PLAN:
                raise self._translated(error) from error
            self._raw.close()  # the session keeps plans; one of them is older than the schema
            happened = "The ledger was migrated by another process in this moment."
            raise engine.busy(happened, _first_line(error)) from error

    def _run_many(self, sql: str, rows: list[tuple[Value, ...]]) -> int:
        try:
            cursor = self._raw.cursor()
            cursor.executemany(cast("LiteralString", render(sql)), rows)
        except psycopg.Error as error:
            raise self._translated(error) from error
        return cursor.rowcount

    def make_durable(self) -> None:
        """Nothing to do: every session asks for ``synchronous_commit``."""

    def _begin(self, *, ledger_lock: bool) -> None:
        # One simple-protocol message, one round trip. After it the lock is ours or an error is.
        begin = cast("LiteralString", f"BEGIN; {_LEDGER_LOCK}" if ledger_lock else "BEGIN")
        try:
            try:
                self._cursor.execute(begin, prepare=False)
            except psycopg.Error:
                if not self._raw.closed:
                    raise
                self._raw = self._connect()  # the old session had been cut while it was idle
                self._cursor.execute(begin, prepare=False)
        except psycopg.Error as error:
            self._abandon()
            raise self._translated(error) from error

    def _commit(self) -> None:
        try:
            tag = self._cursor.execute("COMMIT").statusmessage
        except psycopg.Error as error:
            raise self._translated(error) from error
        if tag != "COMMIT":
            raise LedgerFault(
                "The transaction was not committed.",
                category="transaction_ended",
                why=f"PostgreSQL answered COMMIT with {tag}.",
            )

    def _abandon(self) -> None:
        try:
            if self._raw.info.transaction_status != TransactionStatus.IDLE:
                self._raw.execute("ROLLBACK")
        except psycopg.Error:
            self._raw.close()  # the next transaction opens another session

    def _translated(self, error: psycopg.Error) -> SovereignError:
        server = f"{self._conninfo.get('host', 'localhost')}/{self._conninfo.get('dbname', '')}"
        if isinstance(error, _BUSY):
            return engine.busy(f"The ledger on {server} is busy.", f"{_first_line(error)}{self._holder()}")
        if isinstance(error, psycopg.IntegrityError | psycopg.DataError | errors.ProgramLimitExceeded):
            return engine.broken(_first_line(error))
        if isinstance(error, _UNAVAILABLE):
            return engine.unusable(f"The ledger on {server} cannot be used.", _first_line(error))
        return LedgerFault(f"PostgreSQL refused a statement: {_first_line(error)}.", category="ledger_fault")

    def _holder(self) -> str:
        """Who holds the ledger lock, asked on a session of its own, because ours has just failed."""
        try:
            with psycopg.connect(**self._conninfo, autocommit=True) as other:
                row = other.execute(_HOLDER).fetchone()
        except psycopg.Error:
            return ""
        return f"; the ledger lock is held by backend {row[0]} ({row[1]}, {row[2]})" if row else ""


def _parsed(url: str) -> dict[str, Any]:
    """Take a URL apart, or refuse it without repeating it, in a cause either: it may hold a password."""
    user_and_password = url.partition("://")[2].partition("?")[0].rpartition("@")[0]
    try:
        if not re.search("[/@]", user_and_password):  # else a part of the password would be taken for a host
            return dict(conninfo_to_dict(url))
    except psycopg.Error:
        pass
    raise LedgerUnavailable(
        "The PostgreSQL URL cannot be read.",
        category="ledger_url",
        why="It is no valid connection string; it is not repeated here because it may hold a password.",
        next_command="write it as postgresql://user@host/database, with / as %2F and @ as %40 before the host",
    )


def _conninfo(url: str, patience: timedelta, *, read_only: bool) -> dict[str, Any]:
    given = _parsed(url)
    wait = int(patience.total_seconds() * 1000)
    session = {
        "lock_timeout": wait,
        "statement_timeout": 12 * wait,
        "idle_in_transaction_session_timeout": 2 * wait,
        "default_transaction_isolation": r"repeatable\ read" if read_only else r"read\ committed",
        "default_transaction_read_only": "on" if read_only else "off",
        "synchronous_commit": "on",
        "client_min_messages": "warning",
    }
    ours = " ".join(f"-c {name}={value}" for name, value in session.items())
    defaults = {
        "application_name": f"sovereign-agent {os.getpid()}@{socket.gethostname()}",
        "connect_timeout": "10",
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "30000",  # what was sent and not answered for so long (ms) means that nobody is there
    }
    return defaults | given | {"options": f"{given.get('options') or ''} {ours}".strip()}


def _first_line(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def _append_only(table: str, _keys: list[str]) -> list[str]:
    change = f"UPDATE OR DELETE OR TRUNCATE ON {table}"
    refuse = "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
    return [_REFUSE_CHANGE, f"CREATE TRIGGER {table}_append_only BEFORE {change} {refuse}"]
