"""Heartbeats: that a process reached the ledger, and when. Home of heartbeats.

A beat is appended, never updated. ALIVE says that one was written lately; it does not say that anything makes
progress. STALE says that none was; it does not say that anything died: a process may be paused, cut off or
idle. Nothing in this package recovers or refuses work because of a beat.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from sovereign_agent.clock import Clock, micros, moment
from sovereign_agent.database import Database
from sovereign_agent.errors import wrong_length

MAX_SOURCE_CHARACTERS = 100


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
