"""Faults: a ledger that fails where a real one may, at the boundaries of its transactions.

`FaultyDatabase` is the Database that simulated processes are given. The code under test is the shipped one, and
knows nothing of it. One fault is planned at a time; it strikes the transaction that it was planned for, if that one
is opened (and, for the faults of a commit, if it commits), and is then counted.

A kill is `Killed`, which nothing catches on purpose. From then on this process writes nothing: whoever tidies up on
an exception, as a killed process never would, finds no ledger until the next life begins.
"""

from __future__ import annotations

import errno
from collections import Counter
from enum import StrEnum
from pathlib import Path
from types import TracebackType

from sovereign_agent.clock import Clock
from sovereign_agent.database import Connection, Database, Transaction
from sovereign_agent.errors import Contention, LedgerUnavailable


class Fault(StrEnum):
    """Everything that may go wrong in a simulation. The first six strike a transaction, the others the world."""

    KILLED_BEFORE = "killed before a transaction"
    KILLED_INSIDE = "killed before the commit"
    KILLED_AFTER = "killed after the commit"
    BUSY = "ledger busy"
    CONNECTION_LOST = "connection lost"
    REPLY_LOST = "reply to a commit lost"
    DELIVERED_TWICE = "delivered twice"
    STOPPED = "stopped"
    CONTINUED = "continued"
    SKEWED = "clock skewed"
    JUMPED_AHEAD = "clock jumped ahead"
    JUMPED_BACK = "clock jumped back"
    RESTORED = "restored"
    ARRIVED = "killed after an act arrived"
    NOT_ARRIVED = "killed before an act arrived"
    CARRIED_OVER = "act outlived a restore"


AT_A_TRANSACTION = tuple(Fault)[:6]
KILLS = tuple(Fault)[:3]
OF_A_COMMIT = (Fault.KILLED_INSIDE, Fault.KILLED_AFTER, Fault.REPLY_LOST)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
DISK_CODES = (10, 13)
"""SQLITE_IOERR and SQLITE_FULL."""


class Killed(BaseException):
    """The end of a simulated process. No handler of Exception sees it, as none sees SIGKILL."""


def is_of_the_disk(error: BaseException) -> bool:
    """Whether this came of a disk that is full or fails, and so says nothing about a promise of the ledger."""
    if isinstance(error, LedgerUnavailable):
        return getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF in DISK_CODES
    return isinstance(error, OSError) and error.errno in DISK_ERRORS


class FaultyDatabase(Database):
    """A ledger on SQLite for one simulated process, with the clock of that process.

    It is not durable against a power cut, which is proved elsewhere.
    """

    def __init__(self, path: Path, clock: Clock, struck: Counter[Fault]) -> None:
        super().__init__(path, create=False, clock=clock)
        self.dead = False
        self.struck = struck
        self._planned: Fault | None = None
        self._in = 0

    def _first_open(self, *, create: bool, authority_required: bool) -> None:
        """Nothing: whoever made the ledger has looked at it, and to look seven times is a fifth of a short history."""

    def _session(self, *, read_only: bool) -> Connection:
        session = super()._session(read_only=read_only)
        session.execute("PRAGMA synchronous = OFF")
        return session

    def plan(self, fault: Fault | None, transactions: int = 0) -> None:
        """Let `fault` strike once `transactions` others have been opened. None calls off what was planned."""
        self._planned, self._in = fault, transactions

    def begin_life(self) -> None:
        """Let another process take this one's place."""
        self.dead = False
        self.plan(None)

    def immediate(self) -> Transaction:
        """As the Database's own, if nothing strikes."""
        return _FaultyTransaction(self, ledger_lock=True)

    def transaction(self) -> Transaction:
        """As the Database's own, if nothing strikes."""
        return _FaultyTransaction(self, ledger_lock=False)

    def due(self) -> Fault | None:
        """Count one transaction, and say what is to strike it."""
        if self.dead:
            raise Killed
        self._in -= 1
        return self._planned if self._in < 0 else None

    def strike(self, fault: Fault) -> None:
        """Count a fault that strikes now, and end this process if it is a kill."""
        self.struck[fault] += 1
        self.plan(None)
        if fault in KILLS:
            self.dead = True
            raise Killed


class _FaultyTransaction(Transaction):
    __slots__ = ("_db", "_fault")

    def __init__(self, db: FaultyDatabase, *, ledger_lock: bool) -> None:
        self._db = db
        self._fault = db.due()
        if self._fault is Fault.CONNECTION_LOST:
            db.release()
        super().__init__(db.connection, ledger_lock=ledger_lock)

    def __enter__(self) -> Connection:
        if self._fault and self._fault not in OF_A_COMMIT:
            self._db.strike(self._fault)
            if self._fault is Fault.BUSY:
                raise Contention("The simulated ledger is busy.", category="ledger_busy")
            raise LedgerUnavailable("The simulated connection was lost.", category="ledger_unavailable")
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        struck = self._fault if kind is None and self._fault in OF_A_COMMIT else None
        if struck is Fault.KILLED_INSIDE:
            super().__exit__(Killed, Killed(), None)
            self._db.strike(struck)
        super().__exit__(kind, error, trace)
        if struck:
            self._db.strike(struck)
            raise LedgerUnavailable("The reply to a simulated commit was lost.", category="ledger_unavailable")
