"""Heartbeats: that a process reached the ledger, and when. Home of heartbeats and services.

A beat is appended, never updated. ALIVE says that one was written lately; it does not say that anything makes
progress. STALE says that none was; it does not say that anything died: a process may be paused, cut off or
idle. Nothing in this package recovers or refuses work because of a beat.

A service beats too often for that: it has one row while it runs, which it writes anew. What is left of one that was
killed is STALE, and goes after a day.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from sovereign_agent.clock import Clock, micros, moment, monotonic
from sovereign_agent.database import Connection, Database
from sovereign_agent.errors import SovereignError, wrong_length
from sovereign_agent.records import from_row

MAX_SOURCE_CHARACTERS = 100
BEAT_SECONDS = 5.0
"""How often a service that has nothing else to tell writes its row."""

SERVICE_STALE = 4 * timedelta(seconds=BEAT_SECONDS)
SERVICE_FORGOTTEN = timedelta(days=1)
SERVICES_SHOWN = 100


class Organization(Protocol):
    """What a beat needs to know of an organization."""

    process_identity: str

    @property
    def db(self) -> Database: ...


class Verdict(StrEnum):
    """What the newest beat tells."""

    ALIVE = "ALIVE"
    STALE = "STALE"
    NO_BEATS = "NO_BEATS"


@dataclass(frozen=True, slots=True)
class HeartbeatStatus:
    """The newest beat, judged by the window that was asked for. `age_seconds` is None without any beat."""

    verdict: Verdict
    last_beat: datetime | None
    age_seconds: float | None
    source: str
    process_identity: str


def record_heartbeat(org: Organization, source: str = "cli", *, clock: Clock | None = None) -> None:
    """Append one beat of this process. `source` names what beat: ``cli``, a hook, a timer."""
    if not source or len(source) > MAX_SOURCE_CHARACTERS:
        raise wrong_length("No beat was recorded: its source does not fit.", MAX_SOURCE_CHARACTERS)
    org.db.connection.execute(
        "INSERT INTO heartbeats (at, source, process_identity, host) VALUES (?, ?, ?, ?)",
        (micros(org.db.now(clock)), source, org.process_identity, socket.gethostname()),
    )


def heartbeat_status(
    org: Organization, stale_after_seconds: float = 900, *, clock: Clock | None = None
) -> HeartbeatStatus:
    """Judge the newest beat: ALIVE while it lies less than `stale_after_seconds` from now.

    In either direction: after the clock was set back, a beat from far ahead says nothing about now.
    """
    row = org.db.connection.execute("SELECT * FROM heartbeats ORDER BY seq DESC LIMIT 1").fetchone()
    if row is None:
        return HeartbeatStatus(Verdict.NO_BEATS, None, None, "", "")
    age = (org.db.now(clock) - moment(row["at"])).total_seconds()
    verdict = Verdict.ALIVE if abs(age) < stale_after_seconds else Verdict.STALE
    return HeartbeatStatus(verdict, moment(row["at"]), age, row["source"], row["process_identity"])


@dataclass(frozen=True, slots=True)
class Service:
    """What the ledger has of one service. STALE: it was killed, or has not reached the ledger for `SERVICE_STALE`."""

    process_identity: str
    kind: str
    host: str
    pid: int
    work_id: str
    started_at: datetime
    last_poll: datetime
    last_claim: datetime | None
    verdict: Verdict


def services(connection: Connection) -> list[Service]:
    """The services that say that they run, and what killed ones have left; the latest first, 100 at most."""
    now, found = connection.now(), list[Service]()
    for row in connection.execute("SELECT * FROM services ORDER BY last_poll DESC LIMIT ?", (SERVICES_SHOWN,)):
        fresh = abs(now - moment(row["last_poll"])) < SERVICE_STALE
        found.append(from_row(Service, {**dict(row), "verdict": Verdict.ALIVE if fresh else Verdict.STALE}))
    return found


class Presence:
    """The row of one running service: for people to see. Whatever keeps it from being written stops no work."""

    def __init__(self, db: Database, kind: str, process_identity: str) -> None:
        self._db = db
        self._who = (process_identity, kind, socket.gethostname(), os.getpid())
        self._started_at: int | None = None
        self._work_id = ""
        self._next_at = 0.0

    def beat(self, *, claimed: str | None = None) -> None:
        """Write the row, if it is time to. At once, when an item was `claimed`; "" says that its work has ended."""
        if claimed is None and monotonic() < self._next_at:
            return
        self._next_at = monotonic() + BEAT_SECONDS
        with suppress(SovereignError), self._db.transaction() as connection:
            now = connection.now()
            if self._started_at is None:
                connection.execute("DELETE FROM services WHERE last_poll < ?", (micros(now - SERVICE_FORGOTTEN),))
                self._started_at = micros(now)
            self._work_id = self._work_id if claimed is None else claimed
            connection.execute(
                """
                INSERT INTO services (process_identity, kind, host, pid, started_at, last_poll, last_claim, work_id)
                VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (process_identity)
                DO UPDATE SET last_poll = excluded.last_poll, work_id = excluded.work_id,
                              last_claim = COALESCE(excluded.last_claim, services.last_claim)
                """,
                (*self._who, self._started_at, micros(now), micros(now) if claimed else None, self._work_id),
            )

    def leave(self) -> None:
        """Take the row away: the service ends in good order."""
        self._db.release()  # a signal may have struck in the middle of a statement: that session is not asked again
        with suppress(SovereignError), self._db.transaction() as connection:
            connection.execute("DELETE FROM services WHERE process_identity = ?", (self._who[0],))
