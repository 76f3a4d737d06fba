"""Reading a SQLite ledger without a trace: no file is made, none is changed, no writer is kept waiting.

SQLite's own ``mode=ro`` makes a -wal and a -shm where there are none, and leaves them behind. So a ledger that
somebody has open is read through the -shm that is there, and a quiet one as an immutable file. SQLite neither
locks an immutable file nor looks at it again; this room looks, before and after each statement, and starts over
when anything has changed.
"""

from __future__ import annotations

import sqlite3
import time
from datetime import timedelta
from pathlib import Path

from sovereign_agent.clock import moment, monotonic
from sovereign_agent.errors import SovereignError
from sovereign_agent.storage import engine
from sovereign_agent.storage.engine import Result, Value
from sovereign_agent.storage.sqlite import SQLiteConnection, status_of

CLOCK_TICK = timedelta(milliseconds=20)
"""Longer than a file system's clock stands still: two changes that far apart have different times."""

WAL_HEADER_BYTES = 32
"""The size of a -wal that has no page yet. Cut off there, and beside a -shm, SQLite finds no way to read it."""

_HALF_MADE = (sqlite3.SQLITE_READONLY_RECOVERY, sqlite3.SQLITE_READONLY_CANTINIT, sqlite3.SQLITE_READONLY_CANTLOCK)

Look = tuple[tuple[int, int, int] | None, ...]


class SQLiteReader(SQLiteConnection):
    """One SQLite connection that only reads. Inside a transaction it sees one state, or ends in Contention."""

    _quiet: Look | None
    """What the files looked like, while only looking tells that nobody writes; None while SQLite's locks do."""

    def _connect(self) -> sqlite3.Connection:
        deadline = monotonic() + self._patience.total_seconds()
        while True:
            self._quiet, mode = None, "mode=ro"
            ledger, wal, shm, journal = seen = look(self.path)
            if shm and (wal is None or wal[1] != WAL_HEADER_BYTES):
                mode += "&readonly_shm=1"
            elif ledger and (wal is None or wal[1] <= WAL_HEADER_BYTES) and not journal:
                mode += "&immutable=1"
                self._quiet = seen
                if timedelta(0) <= self._clock() - moment(ledger[2] // 1000) < CLOCK_TICK:
                    time.sleep(CLOCK_TICK.total_seconds())
            try:
                return self._connect_as(mode)
            except SovereignError as error:
                if look(self.path) == seen and not _passing(error, deadline):
                    raise

    def _run(self, sql: str, params: tuple[Value, ...]) -> Result:
        deadline = monotonic() + self._patience.total_seconds()
        while True:
            try:
                result = super()._run(sql, params)
            except SovereignError as error:
                if self._undisturbed() and not _passing(error, deadline):
                    raise
            else:
                if self._undisturbed():
                    return result
            if self._owner is not None:
                raise engine.busy(f"The ledger {self.path} was written while it was being read.")
            self._renew()

    def _begin(self, *, ledger_lock: bool) -> None:
        if not self._undisturbed():
            self._renew()
        self._run("BEGIN", ())

    def _renew(self) -> None:
        self._raw.close()
        self._raw = self._connect()

    def _undisturbed(self) -> bool:
        return self._quiet is None or self._quiet == look(self.path)


def _passing(error: SovereignError, deadline: float) -> bool:
    """Whether a writer is just setting up the -shm; SQLite does not wait for that, so we do."""
    passing = getattr(error.__cause__, "sqlite_errorcode", 0) in _HALF_MADE and monotonic() < deadline
    if passing:
        time.sleep(0.001)
    return passing


def look(path: Path) -> Look:
    """Identity, size and time of the ledger, its -wal, its -shm and its -journal."""
    found = [status_of(Path(f"{path}{suffix}")) for suffix in ("", "-wal", "-shm", "-journal")]
    return tuple([(one.st_ino, one.st_size, one.st_mtime_ns) if one else None for one in found])
