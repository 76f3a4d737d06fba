"""The journal: every line of history is there for good, in the order in which it was written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support import answer, finish, ledger_facts, receipt_for, rows, run_of

from sovereign_agent import journal
from sovereign_agent.clock import ManualClock
from sovereign_agent.database import Database
from sovereign_agent.records import new_id


def record(db: Database, clock: ManualClock, kind: str, **detail: Any) -> None:
    with db.transaction() as connection:
        journal.record(connection, kind, "subject", actor="a", at=clock(), detail=detail)


def test_the_newest_events_come_oldest_first(db: Database, clock: ManualClock) -> None:
    for kind in "abcd":
        record(db, clock, kind, text="\N{SNOWMAN}", half="\ud800")
        clock.advance(-timedelta(hours=1))
    assert [event.kind for event in journal.events_of(db.connection, "subject", limit=3)] == ["b", "c", "d"]
    assert [event.kind for event in journal.latest_events(db.connection, limit=2)] == ["c", "d"]
    assert journal.events_of(db.connection, "another") == []
    assert journal.latest_events(db.connection)[0].detail == {"text": "\N{SNOWMAN}", "half": "\ud800"}


@pytest.mark.parametrize(
    ("value", "said"),
    [(1.5, "done"), (float("nan"), "invalid_number"), (float("inf"), "invalid_number")],
    ids=str,
)
def test_a_number_that_json_cannot_hold_is_refused(db: Database, clock: ManualClock, value: float, said: str) -> None:
    assert answer(record, db, clock, "a", value=value) == said
    assert len(rows(db, "events")) == (said == "done")


def test_an_attempt_has_one_receipt_and_a_second_one_undoes_what_came_with_it(db: Database, clock: ManualClock) -> None:
    attempt, other = run_of(db, clock), run_of(db, clock)
    finish(db, attempt, clock)
    receipt = journal.receipt_of_attempt(db.connection, attempt.id)
    assert receipt
    assert journal.receipts_of(db.connection, attempt.assignment_id) == [receipt]
    assert journal.receipt_of_attempt(db.connection, other.id) is None
    before = ledger_facts(db, attempt.assignment_id), rows(db, "events")

    def write(*, again: bool) -> None:
        with db.transaction() as connection:
            journal.record(connection, "a", "subject", actor="a", at=clock())
            forged = replace(receipt_for(attempt if again else other), id=new_id("rcp"))
            journal.write_receipt(connection, forged, at=clock())

    assert answer(write, again=True) == "constraint_broken"
    assert (ledger_facts(db, attempt.assignment_id), rows(db, "events")) == before
    assert answer(write, again=False) == "done"
