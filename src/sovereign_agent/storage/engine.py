"""What every engine must do, and what is the same on all of them.

One SQL text serves every engine. Statements use ``?`` and a closed list of engine words in angle brackets,
which a dialect turns into its own:

    <for update> <for share> <skip locked>     row locks; empty where the whole ledger is locked anyway
    <now>                                      the server's time in microseconds; NULL where the machine's clock rules.
                                               A SELECT that locks asks before it has waited: ask around it
    <identity> <integer> <strict>              schema only
    <append only TABLE: KEY, ...>              schema only: the triggers that make a table append-only

This room never commits for anybody. Inside a transaction the first error is the last statement: whatever
follows it, a commit too, is refused, because an engine may have ended the transaction behind our back
(SQLite does on a full disk, PostgreSQL on any failed statement) and would then commit half of it.
"""

from __future__ import annotations

import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from sovereign_agent.errors import (
    ConfigurationFault,
    ConstraintBroken,
    Contention,
    IllegalMove,
    LedgerFault,
    LedgerUnavailable,
)

Value = str | int | float | bytes | None
SMALLEST, GREATEST = -(2**63), 2**63 - 1

_NO_CODE = re.compile(r"""'[^']*'|"[^"]*"|--[^\n]*|/\*.*?\*/""", re.DOTALL)
_BOUND_OF_A_TRANSACTION = re.compile(
    r"^END\b|(?:^|;)\s*(?:BEGIN|START|COMMIT|ROLLBACK|ABORT|SAVEPOINT|RELEASE|PREPARE)\b"
)


class Row(Protocol):
    """One row: by index, by name, as a tuple, as ``dict(row)``."""

    def __getitem__(self, key: int | str, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def keys(self) -> list[str]: ...


class Result:
    """What one statement answered, read to its end: no cursor stays open to hold a snapshot.

    `rowcount` is the number of rows changed, or returned where rows were asked for.
    """

    __slots__ = ("_rest", "rowcount", "rows")

    def __init__(self, rows: list[Row], rowcount: int) -> None:
        self.rows = rows
        self.rowcount = rowcount
        self._rest = iter(rows)

    def fetchone(self) -> Row | None:
        """The next row, or None after the last."""
        return next(self._rest, None)

    def fetchall(self) -> list[Row]:
        """The rows not yet fetched."""
        return list(self._rest)

    def __iter__(self) -> Iterator[Row]:
        return self._rest


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step of a component's schema.

    `min_writer` is the oldest schema number whose programs may go on writing after this step.
    """

    number: int
    name: str
    sql: str
    min_writer: int


class Transaction:
    """One transaction as a context manager: commits at a clean end, rolls back on anything else."""

    __slots__ = ("__weakref__", "_connection", "_ledger_lock")

    def __init__(self, connection: Connection, *, ledger_lock: bool) -> None:
        self._connection = connection
        self._ledger_lock = ledger_lock

    def __enter__(self) -> Connection:
        self._connection.begin(self, ledger_lock=self._ledger_lock)
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._connection.commit(self)
        else:
            self._connection.rollback(self)


class Connection(ABC):
    """One session of one thread on one ledger. Not for sharing between threads or across a fork."""

    closed = True
    authority: Path
    """Where this host's authority marker of the ledger lies; `Database` says it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._owner: weakref.ref[Transaction] | None = None
        self._first_error: BaseException | None = None
        self.closed = False

    def __del__(self) -> None:
        self.close()  # a thread that ends gives its session back

    def execute(self, sql: str, params: Sequence[Value] = ()) -> Result:
        """Run one statement. Outside a transaction it commits by itself.

        Raises IllegalMove for a parameter no engine can hold and for words that begin or end a transaction,
        ConstraintBroken, Contention, LedgerUnavailable; LedgerFault when the transaction it belongs to is no longer
        open.
        """
        if self._owner is None or self._owner() is None:
            self._require_usable()
            _refuse_bounds(sql)
            return self._run(sql, bind(params))
        self._require_open()
        try:
            _refuse_bounds(sql)
            return self._run(sql, bind(params))
        except BaseException as error:
            self._first_error = error
            raise

    def lock(self, sql: str, params: Sequence[Value] = ()) -> None:
        """Keep the rows that this SELECT finds from changing until the transaction ends.

        Where the whole ledger is locked anyway, nothing is asked of it.
        """
        self.execute(sql, params)

    def executemany(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """Run one statement for each row of parameters, in the caller's transaction; return how many rows changed.

        Every row is checked before the first one is sent. Raises as `execute` does; LedgerFault outside a transaction.
        """
        self._require_open()
        try:
            return self._run_many(sql, [bind(params) for params in rows])
        except BaseException as error:
            self._first_error = error
            raise

    def begin(self, owner: Transaction, *, ledger_lock: bool) -> None:
        """Open `owner`'s transaction; with `ledger_lock`, alone on this ledger. Refuses to nest."""
        self._require_usable()
        if self._owner is not None or self.in_transaction:
            raise IllegalMove(
                "A transaction was opened inside another one.",
                category="transaction_nested",
                why="The inner one could neither commit nor roll back on its own.",
                next_command="pass the open connection to a function that takes one",
            )
        try:
            self._owner = weakref.ref(owner, self._vanished)
            self._begin(ledger_lock=ledger_lock)
        except BaseException:
            self._undo()
            raise

    def commit(self, owner: Transaction) -> None:
        """Make `owner`'s transaction durable, or raise: it never answers for a commit that did not happen."""
        if self._owner is not None and self._owner() is not owner:
            raise _not_yours()
        try:
            self._require_open()
            self._commit()
            self._owner = None
        except BaseException:
            self._undo()
            raise

    def rollback(self, owner: Transaction) -> None:
        """Undo `owner`'s transaction, if it is the open one. Never raises: the first error is the one to see."""
        if self._owner is not None and self._owner() is owner:
            self._undo()

    def close(self) -> None:
        """End the session. Idempotent. In a forked child it does nothing: the session is the parent's."""
        if not self.closed and self._pid == os.getpid():
            self.closed = True
            self._close()

    def _vanished(self, _: object) -> None:
        # A KeyboardInterrupt can land between __enter__ and the body, or at the door of __exit__; then nobody else
        # gives the lock back. Not Transaction.__del__: that would run each time, and swallow an interrupt.
        self._undo()

    def _undo(self) -> None:
        if self._pid == os.getpid():
            self._abandon()
            self._first_error = None
            self._owner = None

    def _require_usable(self) -> None:
        refuse_fork(self._pid)
        if self.closed:
            raise LedgerUnavailable("This session of the ledger is closed.", category="ledger_closed")
        if self._owner is not None and self._owner() is None:
            self._undo()  # a second interrupt kept `_vanished` from it

    def _require_open(self) -> None:
        sound = self._pid == os.getpid() and not self.closed and self._owner is not None and self._first_error is None
        if sound and self.in_transaction:
            return
        self._require_usable()
        raise LedgerFault(
            "The transaction had already ended, so nothing of it was committed.",
            category="transaction_ended",
            why=f"An earlier statement failed: {self._first_error}" if self._first_error else "The engine ended it.",
            next_command="sovereign-agent doctor",
        ) from self._first_error

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether the engine itself says that a transaction is open and sound."""

    @abstractmethod
    def now(self) -> datetime:
        """The ledger's own time: the database server's where there is one, the machine's UTC elsewhere."""

    @abstractmethod
    def schema_statements(self, sql: str) -> list[str]:
        """Turn a schema template into this engine's statements."""

    @abstractmethod
    def tables(self) -> set[str]:
        """The names of the tables that exist."""

    @abstractmethod
    def make_durable(self) -> None:
        """Prepare a ledger that may be new: whatever its engine needs so that a commit survives a power cut."""

    @abstractmethod
    def _run(self, sql: str, params: tuple[Value, ...]) -> Result: ...

    @abstractmethod
    def _run_many(self, sql: str, rows: list[tuple[Value, ...]]) -> int: ...

    @abstractmethod
    def _begin(self, *, ledger_lock: bool) -> None: ...

    @abstractmethod
    def _commit(self) -> None: ...

    @abstractmethod
    def _abandon(self) -> None:
        """Roll back whatever the engine has open; where that fails, close the session, which does it too."""

    @abstractmethod
    def _close(self) -> None: ...


def refuse_fork(pid: int) -> None:
    """Raise LedgerFault in any process but `pid`."""
    if pid != os.getpid():
        raise LedgerFault(
            "This ledger was opened before a fork.",
            category="forked",
            why="A child that used its parent's connection would tear the ledger.",
            next_command="open a new Database in the child",
        )


@lru_cache(maxsize=1024)
def _refuse_bounds(sql: str) -> None:
    """Raise IllegalMove for a statement that begins or ends a transaction: whoever opened it could not undo it then."""
    code = _NO_CODE.sub("", sql).strip().upper()
    if _BOUND_OF_A_TRANSACTION.search(code) and not code.startswith(("CREATE", "DO ")):  # those hold words of their own
        raise _not_yours()


def _not_yours() -> IllegalMove:
    return IllegalMove(
        "A transaction is not begun or ended in this way.",
        category="transaction_nested",
        why="What was written so far would be committed, or gone, without whoever opened the transaction.",
        next_command="use the one that is open, or Database.transaction()",
    )


def bind(params: Sequence[Value]) -> tuple[Value, ...]:
    """Check parameters at the border, so that both engines take and refuse the same values.

    Raises IllegalMove (categories ``invalid_text``, ``invalid_number``, ``invalid_value``) for NUL, lone
    surrogates, integers beyond 64 bits, and numbers that are not whole: PostgreSQL would round them unasked.
    """
    for value in params:  # nearly all of them are such as these, and go as they are
        if type(value) is str:
            if "\0" in value or not value.isascii():
                break
        elif type(value) is not int or not SMALLEST <= value <= GREATEST:
            break
    else:
        return tuple(params)
    return tuple([_bound(value) for value in params])


def _bound(value: Value) -> Value:
    if type(value) is str:
        return _text(value)
    kind = type(value)
    if value is None or kind is bytes:
        return value
    if kind is int or kind is bool or (isinstance(value, float) and value.is_integer()):
        return _integer(int(value))
    if isinstance(value, StrEnum):
        return _text(str(value))
    category = "invalid_number" if kind is float else "invalid_value"
    why = "The ledger takes text, whole numbers, bytes and nothing else."
    raise _unholdable(kind.__name__, category, why, "store a fraction as a whole number of a smaller unit")


def _text(value: str) -> str:
    if "\0" not in value and (value.isascii() or _encodes(value)):
        return value
    why = "It contains U+0000 or half of a surrogate pair, which PostgreSQL cannot store."
    raise _unholdable("text", "invalid_text", why, "remove that character and repeat the call")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer(value: int) -> int:
    if SMALLEST <= value <= GREATEST:
        return value
    raise _unholdable("number", "invalid_number", "Stored integers have 64 bits.")


def _unholdable(what: str, category: str, why: str, mend: str = "") -> IllegalMove:
    happened = f"A {what} was offered to the ledger that it cannot hold."
    return IllegalMove(happened, category=category, why=why, next_command=mend)


def split_statements(sql: str) -> list[str]:
    """Cut a schema template at each line that ends a statement. Comments stay with what they stand over."""
    statements: list[str] = []
    lines: list[str] = []
    for line in sql.splitlines():
        lines.append(line)
        if line.rstrip().endswith(";") or line.startswith("<append only "):
            statements.append("\n".join(lines).strip().removesuffix(";"))
            lines = []
    if any(line.strip() and not line.lstrip().startswith("--") for line in lines):
        raise ConfigurationFault(
            "A migration has a statement without an end.",
            category="migration_unended",
            why=f"Behind its last semicolon stands {lines[-1].strip()!r}.",
            next_command="end each statement with a semicolon, at the end of a line",
        )
    return statements


def schema_statements(
    template: str, words: Mapping[str, str], append_only: Callable[[str, list[str]], list[str]]
) -> list[str]:
    """The statements of a schema template, with an engine's own `words` and its triggers for an append-only table."""
    statements: list[str] = []
    for statement in split_statements(template):
        word = statement.splitlines()[-1]
        if word.startswith("<append only "):
            table, _, keys = word.removeprefix("<append only ").removesuffix(">").partition(":")
            statements += append_only(table.strip(), [key.strip() for key in keys.split(",")])
        else:
            statements.append(spelled(statement, words))
    return statements


def spelled(text: str, words: Mapping[str, str]) -> str:
    """A text with each engine word replaced by what it means to an engine."""
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


def busy(happened: str, why: str = "") -> Contention:
    """What a call ends in that waited for others for as long as it may."""
    return Contention(
        happened,
        category="ledger_busy",
        why=why,
        inspect="sovereign-agent doctor",
        next_command="repeat the command",
    )


def unusable(happened: str, why: str) -> LedgerUnavailable:
    """What a call ends in that cannot reach the ledger, or not write it."""
    return LedgerUnavailable(
        happened,
        category="ledger_unavailable",
        why=why,
        inspect="sovereign-agent doctor",
        next_command="mend the cause, then repeat the command",
    )


def broken(why: str) -> ConstraintBroken:
    """What a call ends in that offered what the ledger's constraints refuse."""
    happened = "The ledger refused a row."
    return ConstraintBroken(happened, category="constraint_broken", why=why, inspect="sovereign-agent doctor")
