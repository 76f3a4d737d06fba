"""Crash points: the closed list of places at which a tortured process dies, each under its name.

A point is a step of a protocol and a moment: before the commit of the transaction that takes the step, or right after
it. A step is known by what passes through the Database that its process was given, and taken when a statement of it
changed a row. The code under test is the shipped one and knows nothing of it.

The same Database can be made hard to work with for a while: its disk is full, or it may only be read.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from sovereign_agent.database import Connection, Database, Result, Transaction, Value
from sovereign_agent.errors import Contention, LedgerUnavailable

Params = Sequence[Value]


def _whatever(_: Params) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a protocol, and who takes it. It is told by how a statement begins, and by its parameters."""

    name: str
    who: str
    verb: str
    what: str
    told_by: Callable[[Params], bool] = _whatever
    alone: bool = False
    """Whether that statement is the whole transaction."""

    def is_taken(self, statements: list[tuple[str, Params]]) -> bool:
        """Whether a transaction of these statements takes it."""
        beginning = f"{self.verb} {self.what}"
        taken = any(sql.startswith(beginning) and self.told_by(params) for sql, params in statements)
        return taken and not (self.alone and len(statements) > 1)


CONTROL = ("UPDATE", "assistant_control SET paused = ?, restoring = ?")
STEPS = (
    Step("lease.acquire", "worker", "INSERT INTO", "actor_leases"),
    Step("lease.release", "worker", "DELETE FROM", "actor_leases"),
    Step("attempt.acquire", "worker", "INSERT INTO", "execution_attempts"),
    Step("run.renew", "worker", "UPDATE", "execution_attempts SET progress_at"),
    Step("terminal.own", "worker", "UPDATE", "execution_attempts SET status", lambda told: told[0] == "DONE"),
    Step("terminal.recovery", "supervisor", "UPDATE", "execution_attempts SET status", lambda told: told[0] != "DONE"),
    Step("workspace.close", "supervisor", "UPDATE", "execution_attempts SET workspace_open"),
    Step("mailbox.send", "worker", "INSERT INTO", "messages"),
    Step("mailbox.claim", "worker", "UPDATE", "messages SET state = 'CLAIMED'"),
    Step("mailbox.complete", "worker", "UPDATE", "messages SET state = ?"),
    Step("mailbox.sweep", "supervisor", "UPDATE", "messages SET state = 'NEW'"),
    Step("work.enqueue", "worker", "INSERT INTO", "assistant_work"),
    Step("work.claim", "assistant", "UPDATE", "assistant_work SET status = 'RUNNING'"),
    Step("work.observe", "assistant", "INSERT INTO", "assistant_transcript"),
    Step("work.act", "assistant", "INSERT INTO", "torture_deeds"),
    Step("work.renew", "assistant", "UPDATE", "assistant_work SET expires_at"),
    Step("work.finish", "assistant", "UPDATE", "assistant_work SET status = ?", lambda told: told[0] == "DONE"),
    Step("work.give_back", "assistant", "UPDATE", "assistant_work SET status = ?", lambda told: told[0] == "READY"),
    Step("authority.pause", "operator", *CONTROL, lambda told: bool(told[0]) and not told[1] and not told[4]),
    Step("authority.resume", "operator", *CONTROL, lambda told: not told[0]),
    Step("authority.new_epoch", "operator", "INSERT INTO", "assistant_control"),
    Step("restore.mark", "operator", *CONTROL, lambda told: bool(told[1])),
    Step("restore.point_marker", "operator", "SELECT", "* FROM assistant_control", alone=True),
    Step("restore.close", "operator", *CONTROL, lambda told: bool(told[4]) and not told[1]),
)


class Moment(StrEnum):
    """When in a step."""

    BEFORE_COMMIT = "before_commit"
    AFTER_COMMIT = "after_commit"


@dataclass(frozen=True, slots=True)
class Point:
    """One place to die at."""

    step: Step
    moment: Moment

    def __str__(self) -> str:
        return f"{self.step.name}.{self.moment}"


def points(engine: str) -> tuple[Point, ...]:
    """Every point that a ledger on this engine has: PostgreSQL's restores are its own tools'."""
    steps = [step for step in STEPS if engine == "sqlite" or not step.name.startswith("restore.")]
    return tuple(Point(step, moment) for step in steps for moment in Moment)


class Hardship(StrEnum):
    """What may be wrong with a ledger. The first two are wrong for one process alone, which is doomed to them."""

    DISK_FULL = "disk full"
    READ_ONLY = "read only"
    LOCKED = "locked for longer than anybody waits"


HARDSHIPS: dict[tuple[str, Hardship], tuple[Callable[[Connection], object], Callable[[Connection], object]]] = {
    ("sqlite", Hardship.DISK_FULL): (
        lambda ledger: ledger.execute("PRAGMA max_page_count = 1"),  # which means as many as there are
        lambda ledger: ledger.execute("PRAGMA max_page_count = 4294967294"),
    ),
    ("sqlite", Hardship.READ_ONLY): (
        lambda ledger: ledger.execute("PRAGMA query_only = ON"),
        lambda ledger: ledger.execute("PRAGMA query_only = OFF"),
    ),
    ("postgresql", Hardship.READ_ONLY): (
        lambda ledger: ledger.execute("SET default_transaction_read_only = on"),
        lambda ledger: ledger.execute("SET default_transaction_read_only = off"),
    ),
}
"""How each hardship begins, and how it ends."""


def hardships(engine: str) -> tuple[Hardship, ...]:
    """Every hardship that there is on this engine: the disk of a PostgreSQL server is not ours to fill."""
    return tuple(one for one in Hardship if one is Hardship.LOCKED or (engine, one) in HARDSHIPS)


@dataclass(frozen=True, slots=True)
class Doom:
    """What is to become of one process: a point at which it dies the `times`-th time, or a hardship.

    A hardship lasts from its `times`-th transaction on for `lasts` others. An empty doom is a life like any other.
    """

    point: Point | None = None
    hardship: Hardship | None = None
    times: int = 1
    lasts: int = 0


class DoomedDatabase(Database):
    """The Database of a process with a doom. `tell` hears of each hardship that was felt, and of a death to come."""

    def __init__(
        self,
        location: str | Path,
        root: Path,
        doom: Doom,
        tell: Callable[..., None],
        *,
        patience: timedelta,
        authority_required: bool = True,
    ) -> None:
        self.doom = doom
        self.tell = tell
        self._reached = 0
        self._begun = 0
        super().__init__(location, root=root, create=False, patience=patience, authority_required=authority_required)

    def immediate(self) -> Transaction:
        """As the Database's own, under its doom."""
        return _DoomedTransaction(self, ledger_lock=True)

    def transaction(self) -> Transaction:
        """As the Database's own, under its doom."""
        return _DoomedTransaction(self, ledger_lock=False)

    def _open(self, *, read_only: bool) -> Connection:
        return _Overheard(super()._open(read_only=read_only)).connection

    def begin(self, connection: Connection) -> Hardship | None:
        """Count a transaction, and let the hardship begin or end with it; answer what is hard in this one."""
        hardship = self.doom.hardship
        self._begun += 1
        if hardship is None:
            return None
        begin, end = HARDSHIPS[self.engine, hardship]
        if 0 <= self._begun - self.doom.times < self.doom.lasts:
            begin(connection)
            return hardship
        end(connection)
        return None

    def reach(self, moment: Moment, statements: list[tuple[str, Params]]) -> None:
        """Die here, if this is the place."""
        point = self.doom.point
        if point is None or point.moment is not moment or not point.step.is_taken(statements):
            return
        self._reached += 1
        if self._reached == self.doom.times:
            die(self.tell)


def die(tell: Callable[..., None]) -> None:
    """Kill this process, by SIGKILL, as anybody might."""
    tell("dying", pid=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


class _Overheard:
    """A connection whose statements are noted, those that changed or answered nothing left out."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.statements: list[tuple[str, Params]] = []
        self._execute, self._executemany = connection.execute, connection.executemany
        for name in ("execute", "executemany"):
            setattr(connection, name, getattr(self, f"_{name}_and_note"))
        connection.overheard = self.statements  # pyright: ignore[reportAttributeAccessIssue]

    def _execute_and_note(self, sql: str, params: Params = ()) -> Result:
        result = self._execute(sql, params)
        if result.rowcount:
            self._note(sql, params)
        return result

    def _executemany_and_note(self, sql: str, rows: Sequence[Params]) -> int:
        changed = self._executemany(sql, rows)
        if changed:
            self._note(sql, rows[0])
        return changed

    def _note(self, sql: str, params: Params) -> None:
        if self.connection.in_transaction:
            self.statements.append((" ".join(sql.split()), params))


class _DoomedTransaction(Transaction):
    __slots__ = ("_db", "_hardship", "_statements")

    def __init__(self, db: DoomedDatabase, *, ledger_lock: bool) -> None:
        connection: Any = db.connection
        self._db = db
        self._statements: list[tuple[str, Params]] = connection.overheard
        self._hardship: Hardship | None = None
        super().__init__(connection, ledger_lock=ledger_lock)

    def __enter__(self) -> Connection:
        self._hardship = self._db.begin(self._connection)
        try:
            connection = super().__enter__()
        except Contention:
            self._db.tell("hardship", name=Hardship.LOCKED)
            raise
        except LedgerUnavailable as error:
            self._feel(error)
            raise
        self._statements.clear()
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._db.reach(Moment.BEFORE_COMMIT, self._statements)
        try:
            super().__exit__(kind, error, trace)
        except LedgerUnavailable as refused:
            error = refused
            raise
        finally:
            self._feel(error)
        if kind is None:
            self._db.reach(Moment.AFTER_COMMIT, self._statements)

    def _feel(self, error: BaseException | None) -> None:
        if self._hardship and isinstance(error, LedgerUnavailable):
            self._db.tell("hardship", name=self._hardship)
