"""Heartbeats say that the ledger was reached, and when; nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
from support import answer, rows

from sovereign_agent.clock import ManualClock
from sovereign_agent.database import Database
from sovereign_agent.heartbeat import Verdict, heartbeat_status, record_heartbeat

WINDOW = timedelta(seconds=900)
TICK = timedelta(microseconds=1)


@dataclass
class Process:
    """As much of an organization as a heartbeat asks for."""

    db: Database
    process_identity: str = "proc_red"


@pytest.fixture
def org(db: Database) -> Process:
    return Process(db)


def test_without_any_beat_the_verdict_is_no_beats(org: Process, clock: ManualClock) -> None:
    status = heartbeat_status(org, clock=clock)
    assert (status.verdict, status.last_beat, status.age_seconds) == (Verdict.NO_BEATS, None, None)
    assert [verdict.value for verdict in Verdict] == ["ALIVE", "STALE", "NO_BEATS"]


@pytest.mark.parametrize(
    ("age", "verdict"),
    [
        (timedelta(0), Verdict.ALIVE),
        (WINDOW - TICK, Verdict.ALIVE),
        (WINDOW, Verdict.STALE),
        (WINDOW + TICK, Verdict.STALE),
        (-WINDOW + TICK, Verdict.ALIVE),
        (-WINDOW, Verdict.STALE),
    ],
    ids=str,
)
def test_a_beat_is_alive_within_the_window_and_stale_from_its_edge_on_whichever_way_the_clock_went(
    org: Process, clock: ManualClock, age: timedelta, verdict: Verdict
) -> None:
    record_heartbeat(org, "supervisor", clock=clock)
    beat = clock()
    clock.advance(age)
    status = heartbeat_status(org, WINDOW.total_seconds(), clock=clock)
    assert (status.verdict, status.last_beat, status.age_seconds) == (verdict, beat, age.total_seconds())
    assert (status.source, status.process_identity) == ("supervisor", "proc_red")


def test_the_window_is_a_quarter_of_an_hour_unless_said_otherwise(org: Process, clock: ManualClock) -> None:
    record_heartbeat(org, clock=clock)
    clock.advance(WINDOW - TICK)
    assert heartbeat_status(org, clock=clock).verdict is Verdict.ALIVE
    clock.advance(TICK)
    assert heartbeat_status(org, clock=clock).verdict is Verdict.STALE
    assert heartbeat_status(org, 901, clock=clock).verdict is Verdict.ALIVE
    assert heartbeat_status(org, clock=clock).source == "cli"


def test_beats_are_appended_and_the_newest_by_sequence_counts_even_when_the_clock_went_back(
    org: Process, clock: ManualClock
) -> None:
    record_heartbeat(org, "first", clock=clock)
    clock.advance(-timedelta(hours=1))
    record_heartbeat(org, "second", clock=clock)
    assert [row["source"] for row in sorted(rows(org.db, "heartbeats"), key=lambda row: row["seq"])] == [
        "first",
        "second",
    ]
    status = heartbeat_status(org, clock=clock)
    assert (status.source, status.verdict, status.age_seconds) == ("second", Verdict.ALIVE, 0)


@pytest.mark.parametrize("statement", ["UPDATE heartbeats SET at = 0", "DELETE FROM heartbeats"])
def test_a_beat_is_never_changed(org: Process, clock: ManualClock, statement: str) -> None:
    record_heartbeat(org, clock=clock)
    before = rows(org.db, "heartbeats")
    assert answer(org.db.connection.execute, statement) == "constraint_broken"
    assert rows(org.db, "heartbeats") == before


def test_a_beat_needs_a_source(org: Process, clock: ManualClock) -> None:
    assert answer(record_heartbeat, org, "", clock=clock) == "invalid_text"
    assert heartbeat_status(org, clock=clock).verdict is Verdict.NO_BEATS
    assert answer(record_heartbeat, org, "hook", clock=clock) == "done"
