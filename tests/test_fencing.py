"""Fencing: one process hosts an actor, one process runs an assignment, and whoever lost that right changes nothing.

Each promise is tried on both engines. `test_concurrency` holds the races between real processes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from conftest import Location
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support import (
    ACTOR,
    answer,
    attempt_on,
    configure,
    finish,
    governed_work,
    in_a_fresh_process,
    in_a_session,
    ledger_facts,
    new_assignment,
    recover,
    renew_attempt,
    rows,
    run_of,
    until_blocked,
    without_checks,
    works,
)

from sovereign_agent import cli, fencing, journal, organization, outcomes, relay, workspace
from sovereign_agent.clock import LAST_MICROS, ManualClock, micros
from sovereign_agent.database import LEDGER_NAME, Database
from sovereign_agent.errors import AlreadyHeld, AuthorityLost, ConstraintBroken, LedgerUnavailable, Refusal
from sovereign_agent.fencing import ACTOR_LEASE_TTL, EXECUTION_ATTEMPT_TTL
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Envelope, Proposal
from sovereign_agent.records import (
    ActorLease,
    AssignmentState,
    AttemptStatus,
    ExecutionAttempt,
    Message,
    Role,
    SowState,
)
from sovereign_agent.workspace import Workspace

RED, BLUE = "proc_red", "proc_blue"
TICK = timedelta(microseconds=1)
HOUR = timedelta(hours=1)
AROUND_THE_BOUNDARY = pytest.mark.parametrize(
    ("offset", "over"), [(-TICK, False), (timedelta(0), True), (TICK, True)], ids=["before", "at", "after"]
)


def counter(db: Database) -> int:
    return int(db.connection.execute("SELECT value FROM lease_tokens").rows[0][0])


# --- process identity and tokens --------------------------------------------------------------------------


def test_a_process_identity_is_random_and_never_a_pid() -> None:
    identities = {fencing.new_process_identity() for _ in range(100)}
    assert len(identities) == 100
    assert all(re.fullmatch(r"proc_[0-9a-f]{32}", identity) for identity in identities)


def test_tokens_of_leases_attempts_and_claims_come_from_one_counter_that_only_grows(
    db: Database, clock: ManualClock
) -> None:
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    attempt = attempt_on(db, new_assignment(db, ACTOR, clock=clock).id, lease, clock)
    message = relay.send(db, "master", ACTOR, "s", "b", clock=clock)
    claimed = relay.claim(db, message.id, ACTOR, clock=clock)
    other = fencing.acquire_actor_lease(db, "another", RED, clock=clock)
    assert claimed.fencing_token is not None
    assert 0 < lease.fencing_token < attempt.fencing_token < claimed.fencing_token < other.fencing_token


def test_a_failed_actor_lease_acquisition_leaves_no_row_and_takes_no_token(db: Database, clock: ManualClock) -> None:
    fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    before = rows(db, "actor_leases"), counter(db)
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=clock) == "actor_lease_held"
    assert (rows(db, "actor_leases"), counter(db)) == before
    fencing.acquire_actor_lease(db, "another", BLUE, clock=clock)
    assert counter(db) > before[1]


def test_a_waiter_becomes_the_later_holder_with_the_greater_token_and_judges_by_the_time_it_got_in(
    db: Database, location: Location, clock: ManualClock
) -> None:
    fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    with ThreadPoolExecutor() as pool:
        with db.transaction() as connection:
            token = fencing.admitted_token(connection)[0]
            waiter = pool.submit(in_a_session, location, fencing.acquire_actor_lease, ACTOR, BLUE, clock=clock)
            until_blocked(db, waiter)
            connection.execute("UPDATE actor_leases SET fencing_token = ?", (token,))
            clock.advance(ACTOR_LEASE_TTL)
        assert waiter.result(20).fencing_token > token


# --- actor leases -----------------------------------------------------------------------------------------


def test_a_current_actor_lease_keeps_every_process_out_its_own_too(db: Database, clock: ManualClock) -> None:
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    for process in (BLUE, RED):
        with pytest.raises(AlreadyHeld) as refused:
            fencing.acquire_actor_lease(db, ACTOR, process, clock=clock)
        assert refused.value.category == "actor_lease_held"
        assert RED in refused.value.why
    assert fencing.current_actor_lease(db, ACTOR) == lease


def test_an_actor_lease_on_one_actor_keeps_nobody_from_another(db: Database, clock: ManualClock) -> None:
    fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    assert fencing.acquire_actor_lease(db, "another", BLUE, clock=clock).process_identity == BLUE


def test_a_takeover_after_expiry_mints_a_strictly_greater_token(db: Database, clock: ManualClock) -> None:
    first = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    clock.advance(ACTOR_LEASE_TTL)
    second = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    assert second.fencing_token > first.fencing_token
    assert (second.process_identity, second.expires_at) == (BLUE, clock() + ACTOR_LEASE_TTL)
    assert fencing.current_actor_lease(db, ACTOR) == second


def test_after_a_takeover_the_old_process_can_never_renew_even_when_the_new_lease_has_run_out(
    db: Database, clock: ManualClock
) -> None:
    first = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    clock.advance(ACTOR_LEASE_TTL)
    second = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    assert answer(renewed, db, first, clock) == "actor_lease_lost"
    assert answer(renewed, db, second, clock) == "done"
    clock.advance(ACTOR_LEASE_TTL)
    assert answer(renewed, db, first, clock) == "actor_lease_lost"


@AROUND_THE_BOUNDARY
def test_at_the_actor_lease_boundary_exactly_one_of_renewal_and_takeover_is_allowed(
    db: Database, clock: ManualClock, offset: timedelta, *, over: bool
) -> None:
    leases = [fencing.acquire_actor_lease(db, actor, RED, clock=clock) for actor in ("a", "b")]
    clock.advance(ACTOR_LEASE_TTL + offset)
    reported = [lease.actor_id for lease in fencing.expired_actor_leases(db, clock)]
    renewal = answer(renewed, db, leases[0], clock)
    takeover = answer(fencing.acquire_actor_lease, db, "b", BLUE, clock=clock)
    expected = ("actor_lease_lost", "done", ["a", "b"]) if over else ("done", "actor_lease_held", [])
    assert (renewal, takeover, sorted(reported)) == expected


def test_renewal_extends_the_actor_lease_under_the_same_token_and_mints_none(db: Database, clock: ManualClock) -> None:
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    minted = counter(db)
    clock.advance(ACTOR_LEASE_TTL - TICK)
    again = renewed(db, lease, clock)
    assert (again.fencing_token, again.process_identity) == (lease.fencing_token, RED)
    assert (again.acquired_at, again.expires_at) == (lease.acquired_at, clock() + ACTOR_LEASE_TTL)
    assert counter(db) == minted


@pytest.mark.parametrize(
    ("stale", "said"),
    [
        ({}, "done"),
        ({"actor_id": "another"}, "actor_lease_lost"),
        ({"process_identity": BLUE}, "actor_lease_lost"),
        ({"process_identity": ""}, "actor_lease_lost"),
        ({"fencing_token": -1}, "actor_lease_lost"),
        ({"fencing_token": +1}, "actor_lease_lost"),
    ],
    ids=str,
)
def test_renewal_and_release_of_an_actor_lease_need_every_field(
    db: Database, clock: ManualClock, stale: dict[str, Any], said: str
) -> None:
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    before = rows(db, "actor_leases")
    presented = (
        stale.get("actor_id", ACTOR),
        stale.get("process_identity", RED),
        lease.fencing_token + stale.get("fencing_token", 0),
    )
    clock.advance(TICK)
    assert answer(fencing.renew_actor_lease, db, *presented, clock=clock) == said
    assert (rows(db, "actor_leases") == before) == (said != "done")
    assert fencing.release_actor_lease(db, *presented) == (said == "done")
    assert (fencing.current_actor_lease(db, ACTOR) is None) == (said == "done")


def test_acquire_or_renew_actor_lease_keeps_its_own_and_takes_only_what_has_run_out(
    db: Database, clock: ManualClock
) -> None:
    def host(process: str) -> ActorLease:
        return fencing.acquire_or_renew_actor_lease(db, ACTOR, process, clock=clock)

    first = host(RED)
    clock.advance(ACTOR_LEASE_TTL - TICK)
    assert host(RED).fencing_token == first.fencing_token
    assert answer(host, BLUE) == "actor_lease_held"
    clock.advance(ACTOR_LEASE_TTL)
    own_again = host(RED)
    assert own_again.fencing_token > first.fencing_token
    clock.advance(ACTOR_LEASE_TTL)
    assert host(BLUE).fencing_token > own_again.fencing_token
    assert answer(host, RED) == "actor_lease_held"


def test_expired_actor_leases_are_reported_the_longest_over_first_and_nothing_is_changed(
    db: Database, clock: ManualClock
) -> None:
    for minutes, actor in enumerate(("c", "a", "b"), start=1):
        fencing.acquire_actor_lease(db, actor, RED, ttl=timedelta(minutes=minutes), clock=clock)
    clock.advance(timedelta(minutes=2))
    before = rows(db, "actor_leases"), counter(db)
    assert [lease.actor_id for lease in fencing.expired_actor_leases(db, clock)] == ["c", "a"]
    assert [lease.actor_id for lease in fencing.expired_actor_leases(db, clock, limit=1)] == ["c"]
    assert (rows(db, "actor_leases"), counter(db)) == before


def test_release_actor_lease_succeeds_when_the_token_still_matches(db: Database, clock: ManualClock) -> None:
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    assert fencing.release_actor_lease(db, ACTOR, RED, lease.fencing_token) is True
    assert fencing.current_actor_lease(db, ACTOR) is None
    assert fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock).fencing_token > lease.fencing_token


def test_release_actor_lease_is_a_no_op_after_a_takeover(db: Database, clock: ManualClock) -> None:
    old = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    clock.advance(ACTOR_LEASE_TTL)
    fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    before = rows(db, "actor_leases")
    assert fencing.release_actor_lease(db, ACTOR, RED, old.fencing_token) is False
    assert rows(db, "actor_leases") == before


def test_release_actor_lease_waits_for_the_end_of_the_attempt_that_stands_on_it(
    db: Database, clock: ManualClock
) -> None:
    attempt = run_of(db, clock)
    token = attempt.actor_lease_fencing_token
    before = rows(db, "actor_leases")
    assert fencing.release_actor_lease(db, ACTOR, RED, token) is False
    assert rows(db, "actor_leases") == before
    finish(db, attempt, clock)
    assert fencing.release_actor_lease(db, ACTOR, RED, token) is True


def test_release_actor_lease_of_one_actor_does_not_wait_for_an_attempt_of_another(
    db: Database, clock: ManualClock
) -> None:
    run_of(db, clock)
    other = fencing.acquire_actor_lease(db, "another", RED, clock=clock)
    assert fencing.release_actor_lease(db, "another", RED, other.fencing_token) is True


def test_an_actor_lease_that_the_ledger_cannot_take_is_not_reported_as_held(db: Database, clock: ManualClock) -> None:
    for actor_id, process in (("", RED), (ACTOR, "")):
        with pytest.raises(ConstraintBroken):
            fencing.acquire_actor_lease(db, actor_id, process, clock=clock)
    assert rows(db, "actor_leases") == []
    assert counter(db) == 0
    assert answer(fencing.acquire_actor_lease, db, ACTOR, RED, clock=clock) == "done"


@pytest.mark.parametrize("engine", ["sqlite"])
def test_an_actor_lease_that_finds_no_room_on_the_disk_is_not_reported_as_held(
    db: Database, clock: ManualClock
) -> None:
    long_name = "a" * 100_000
    pages = db.connection.execute("PRAGMA page_count").rows[0][0]
    db.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerUnavailable):
        fencing.acquire_actor_lease(db, long_name, RED, clock=clock)
    assert (rows(db, "actor_leases"), counter(db)) == ([], 0)
    db.connection.execute("PRAGMA max_page_count = 100000")
    assert answer(fencing.acquire_actor_lease, db, long_name, RED, clock=clock) == "done"


def renewed(db: Database, lease: ActorLease, clock: ManualClock) -> ActorLease:
    return fencing.renew_actor_lease(db, lease.actor_id, lease.process_identity, lease.fencing_token, clock=clock)


# --- execution attempts -----------------------------------------------------------------------------------


def test_acquiring_an_execution_attempt_moves_the_assignment_to_running_under_the_lease_token(
    db: Database, clock: ManualClock
) -> None:
    assignment = new_assignment(db, ACTOR, clock=clock)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    attempt = attempt_on(db, assignment.id, lease, clock)
    assert attempt.actor_lease_fencing_token == lease.fencing_token
    assert (attempt.expires_at, attempt.status) == (clock() + EXECUTION_ATTEMPT_TTL, AttemptStatus.ACTIVE)
    assert fencing.verify_execution_attempt(db, assignment.id, attempt.id)
    assert not fencing.verify_execution_attempt(db, assignment.id, "att_other")
    assert ledger_facts(db, assignment.id) == {
        "assignment": "RUNNING",
        "sow": "RUNNING",
        "pointer": "ACTIVE",
        "attempts": ["ACTIVE"],
        "receipts": [None],
        "events": ["assignment.created", "assignment.running"],
        "sow_events": ["sow.created", "sow.ready", "sow.assigned", "sow.running"],
    }


def test_a_live_execution_attempt_keeps_every_process_out_its_own_too(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock, lease_ttl=HOUR)
    before = rows(db, "execution_attempts"), ledger_facts(db, attempt.assignment_id), counter(db)
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    with pytest.raises(AlreadyHeld) as refused:
        attempt_on(db, attempt.assignment_id, lease, clock)
    assert refused.value.category == "execution_attempt_held"
    assert attempt.id in refused.value.why
    assert (rows(db, "execution_attempts"), ledger_facts(db, attempt.assignment_id), counter(db)) == before
    assert answer(attempt_on, db, new_assignment(db, ACTOR, clock=clock).id, lease, clock) == "done"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "done"),
        ({"actor_id": "another"}, "actor_lease_lost"),
        ({"process_identity": BLUE}, "actor_lease_lost"),
        ({"fencing_token": -1}, "actor_lease_lost"),
        ({"fencing_token": +1}, "actor_lease_lost"),
        ({"assignment_id": "asg_none"}, "assignment_missing"),
        ({"late": ACTOR_LEASE_TTL - TICK}, "done"),
        ({"late": ACTOR_LEASE_TTL}, "actor_lease_lost"),
    ],
    ids=str,
)
def test_an_execution_attempt_needs_every_field_of_a_current_actor_lease(
    db: Database, clock: ManualClock, wrong: dict[str, Any], said: str
) -> None:
    assignment = new_assignment(db, ACTOR, clock=clock)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    before = ledger_facts(db, assignment.id), counter(db)
    clock.advance(wrong.get("late", timedelta(0)))
    presented = (
        wrong.get("assignment_id", assignment.id),
        wrong.get("actor_id", ACTOR),
        wrong.get("process_identity", RED),
        lease.fencing_token + wrong.get("fencing_token", 0),
    )
    assert answer(fencing.acquire_execution_attempt, db, *presented, clock=clock) == said
    assert ((ledger_facts(db, assignment.id), counter(db)) == before) == (said != "done")


def test_an_execution_attempt_under_a_lease_on_another_actor_is_refused(db: Database, clock: ManualClock) -> None:
    assignment = new_assignment(db, ACTOR, clock=clock)
    before = ledger_facts(db, assignment.id)
    for actor_id, said in (("another", "illegal_move"), (ACTOR, "done")):
        lease = fencing.acquire_actor_lease(db, actor_id, RED, clock=clock)
        assert answer(attempt_on, db, assignment.id, lease, clock) == said
        assert (ledger_facts(db, assignment.id) == before) == (said != "done")


def test_an_execution_attempt_on_an_assignment_that_has_ended_is_refused(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    finish(db, attempt, clock)
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    before = ledger_facts(db, attempt.assignment_id)
    assert answer(attempt_on, db, attempt.assignment_id, lease, clock) == "illegal_move"
    assert ledger_facts(db, attempt.assignment_id) == before


def test_acquire_execution_attempt_reverifies_the_lease_even_if_the_caller_lost_it_since(
    db: Database, clock: ManualClock
) -> None:
    assignment = new_assignment(db, ACTOR, clock=clock)
    lost = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    clock.advance(ACTOR_LEASE_TTL)
    current = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    before = ledger_facts(db, assignment.id)
    assert answer(attempt_on, db, assignment.id, lost, clock) == "actor_lease_lost"
    assert ledger_facts(db, assignment.id) == before
    assert answer(attempt_on, db, assignment.id, current, clock) == "done"


@AROUND_THE_BOUNDARY
def test_at_the_execution_attempt_boundary_exactly_one_of_renewal_takeover_and_recovery_side_is_allowed(
    db: Database, clock: ManualClock, offset: timedelta, *, over: bool
) -> None:
    kept, taken, dead = (run_of(db, clock, lease_ttl=HOUR) for _ in range(3))
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    clock.advance(EXECUTION_ATTEMPT_TTL + offset)
    expired = {attempt.id for attempt in fencing.expired_execution_attempts(db, clock)}
    renewal = answer(renew_attempt, db, kept, clock)
    takeover = answer(attempt_on, db, taken.assignment_id, lease, clock)
    recovery = recover(db, dead, clock)
    if over:
        assert (renewal, takeover, recovery) == ("execution_attempt_lost", "done", True)
        assert expired == {kept.id, taken.id, dead.id}
    else:
        assert (renewal, takeover, recovery) == ("done", "execution_attempt_held", False)
        assert expired == set()


def test_renewal_of_an_execution_attempt_keeps_its_token_and_mints_none(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    minted = counter(db)
    clock.advance(EXECUTION_ATTEMPT_TTL - TICK)
    again = renew_attempt(db, attempt, clock)
    assert (again.id, again.fencing_token) == (attempt.id, attempt.fencing_token)
    assert (again.expires_at, again.deadline) == (clock() + EXECUTION_ATTEMPT_TTL, attempt.deadline)
    assert counter(db) == minted


@pytest.mark.parametrize(
    ("stale", "said"),
    [
        ({}, "done"),
        ({"assignment_id": "asg_other"}, "execution_attempt_lost"),
        ({"id": "att_other"}, "execution_attempt_lost"),
        ({"process_identity": BLUE}, "execution_attempt_lost"),
        ({"fencing_token": -1}, "execution_attempt_lost"),
        ({"fencing_token": +1}, "execution_attempt_lost"),
    ],
    ids=str,
)
def test_renewal_of_an_execution_attempt_needs_every_field(
    db: Database, clock: ManualClock, stale: dict[str, Any], said: str
) -> None:
    attempt = run_of(db, clock)
    before = rows(db, "execution_attempts")
    clock.advance(TICK)
    presented = (
        stale.get("assignment_id", attempt.assignment_id),
        stale.get("id", attempt.id),
        stale.get("process_identity", RED),
        attempt.fencing_token + stale.get("fencing_token", 0),
    )
    assert answer(fencing.renew_execution_attempt, db, *presented, clock=clock) == said
    assert (rows(db, "execution_attempts") == before) == (said != "done")


def test_an_execution_attempt_ends_at_its_maximum_however_faithfully_it_is_renewed(
    db: Database, clock: ManualClock
) -> None:
    start = clock()
    maximum = timedelta(minutes=25)
    attempt = run_of(db, clock, lease_ttl=HOUR, ttl=timedelta(minutes=10), maximum=maximum)
    for since_start, minutes in ((9, 19), (18, 25), (24, 25)):
        clock.set(start + timedelta(minutes=since_start))
        assert answer(renew_attempt, db, attempt, clock, ttl=timedelta(minutes=10)) == "done"
        assert rows(db, "execution_attempts")[0]["expires_at"] == micros(start + timedelta(minutes=minutes))
    clock.set(start + maximum)
    assert answer(renew_attempt, db, attempt, clock) == "execution_attempt_lost"
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    assert answer(attempt_on, db, attempt.assignment_id, lease, clock) == "done"


def test_an_execution_attempt_is_not_given_longer_than_its_maximum_in_the_first_place(
    db: Database, clock: ManualClock
) -> None:
    attempt = run_of(db, clock, ttl=HOUR, maximum=timedelta(minutes=5))
    assert attempt.expires_at == attempt.deadline == clock() + timedelta(minutes=5)


def test_release_execution_attempt_clears_the_fence(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    with db.transaction() as connection:
        assert fencing.release_execution_attempt(
            connection, attempt.assignment_id, attempt.id, AttemptStatus.RECOVERED, now=clock()
        )
    assert outcomes.get_assignment(db.connection, attempt.assignment_id).current_execution_attempt is None
    facts = ledger_facts(db, attempt.assignment_id)
    assert (facts["assignment"], facts["pointer"], facts["attempts"]) == ("FAILED", None, ["RECOVERED"])
    assert fencing.expired_execution_attempts(db, lambda: clock() + HOUR) == []


def test_release_execution_attempt_of_another_attempt_changes_nothing(db: Database, clock: ManualClock) -> None:
    attempt, other = run_of(db, clock), run_of(db, clock)
    before = rows(db, "execution_attempts"), rows(db, "assignments")
    for assignment_id, attempt_id in (
        (attempt.assignment_id, other.id),
        (other.assignment_id, attempt.id),
        (attempt.assignment_id, "att_none"),
        ("asg_none", attempt.id),
    ):
        with db.transaction() as connection:
            assert not fencing.release_execution_attempt(
                connection, assignment_id, attempt_id, AttemptStatus.DONE, becomes=AssignmentState.COMPLETED
            )
    assert (rows(db, "execution_attempts"), rows(db, "assignments")) == before


def test_a_takeover_closes_the_lost_execution_attempt_with_its_own_receipt_in_one_transaction(
    db: Database, clock: ManualClock
) -> None:
    lost = run_of(db, clock)
    clock.advance(EXECUTION_ATTEMPT_TTL)
    lease = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    attempt = attempt_on(db, lost.assignment_id, lease, clock)
    assert attempt.fencing_token > lost.fencing_token
    facts = ledger_facts(db, lost.assignment_id)
    assert facts["attempts"] == ["RECOVERED", "ACTIVE"]
    assert facts["receipts"] == [("failed", "worker_lost"), None]
    assert (facts["assignment"], facts["sow"], facts["pointer"]) == ("RUNNING", "RUNNING", "ACTIVE")
    assert facts["events"][1:] == ["assignment.running", "assignment.recovered", "assignment.running"]
    receipt = journal.receipt_of_attempt(db.connection, lost.id)
    assert receipt
    evidence = {"cause": "unknown"}
    assert receipt.detail == {"attempt_id": lost.id, "fencing_token": lost.fencing_token, "evidence": evidence}
    assert lost.id in receipt.summary
    assert str(lost.fencing_token) in receipt.summary
    finish(db, attempt, clock)
    assert ledger_facts(db, lost.assignment_id)["receipts"] == [("failed", "worker_lost"), ("completed", "")]


# --- the terminal write -----------------------------------------------------------------------------------


def test_the_terminal_write_of_an_execution_attempt_ends_everything_together(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    finish(db, attempt, clock)
    facts = ledger_facts(db, attempt.assignment_id)
    assert (facts["assignment"], facts["sow"], facts["pointer"]) == ("COMPLETED", "COMPLETED", None)
    assert (facts["attempts"], facts["receipts"]) == (["DONE"], [("completed", "")])
    assert facts["events"] == ["assignment.created", "assignment.running", "assignment.finished"]


def test_expiry_of_lease_and_execution_attempt_alone_does_not_refuse_the_terminal_write(
    db: Database, clock: ManualClock
) -> None:
    attempt = run_of(db, clock)
    clock.advance(EXECUTION_ATTEMPT_TTL + HOUR)
    assert answer(finish, db, attempt, clock) == "done"
    assert recover(db, attempt, clock) is False


def test_an_execution_attempt_whose_pointer_was_moved_may_not_finish(db: Database, clock: ManualClock) -> None:
    attempt, other = run_of(db, clock), run_of(db, clock)
    db.connection.execute(
        "UPDATE assignments SET current_execution_attempt = ? WHERE id = ?", ("att_thief", attempt.assignment_id)
    )
    before = ledger_facts(db, attempt.assignment_id), rows(db, "receipts")
    assert answer(finish, db, attempt, clock) == "execution_attempt_lost"
    assert (ledger_facts(db, attempt.assignment_id), rows(db, "receipts")) == before
    assert answer(finish, db, other, clock) == "done"


@pytest.mark.parametrize("successor_left", [False, True], ids=["still hosting", "released since"])
def test_an_execution_attempt_whose_actor_lease_passed_on_may_not_finish(
    db: Database, clock: ManualClock, *, successor_left: bool
) -> None:
    attempt = run_of(db, clock)
    clock.advance(ACTOR_LEASE_TTL)
    successor = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    if successor_left:
        assert fencing.release_actor_lease(db, ACTOR, BLUE, successor.fencing_token)
    before = ledger_facts(db, attempt.assignment_id), rows(db, "receipts"), rows(db, "events")
    with pytest.raises(AuthorityLost) as refused:
        finish(db, attempt, clock)
    assert refused.value.category == "actor_lease_lost"
    assert (ledger_facts(db, attempt.assignment_id), rows(db, "receipts"), rows(db, "events")) == before


def test_a_lost_execution_attempt_is_reported_before_a_lost_lease(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    clock.advance(EXECUTION_ATTEMPT_TTL)
    lease = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    attempt_on(db, attempt.assignment_id, lease, clock)
    assert answer(finish, db, attempt, clock) == "execution_attempt_lost"


def test_of_a_recovery_and_a_late_terminal_write_whoever_comes_first_writes_the_only_receipt(
    db: Database, clock: ManualClock
) -> None:
    recovered, finished = run_of(db, clock), run_of(db, clock)
    clock.advance(EXECUTION_ATTEMPT_TTL)
    assert recover(db, recovered, clock)
    assert answer(finish, db, recovered, clock) == "execution_attempt_lost"
    assert not recover(db, recovered, clock)
    facts = ledger_facts(db, recovered.assignment_id)
    assert (facts["assignment"], facts["receipts"]) == ("FAILED", [("failed", "worker_lost")])
    assert facts["events"][2:] == ["assignment.finished", "assignment.recovered"]
    finish(db, finished, clock)
    assert not recover(db, finished, clock)
    assert ledger_facts(db, finished.assignment_id)["receipts"] == [("completed", "")]


# --- mailbox claims (Unit 8, Property 3; the rest is in test_relay) --------------------------------------


def claims(db: Database, clock: ManualClock) -> tuple[Message, Message]:
    """A claim that ran out, and the one by which the same owner took the message again."""
    message = relay.send(db, "master", ACTOR, "s", "b", clock=clock)
    first = relay.claim(db, message.id, ACTOR, clock=clock)
    clock.advance(relay.CLAIM_TTL)
    return first, relay.claim(db, message.id, ACTOR, clock=clock)


def complete(db: Database, message: Message, clock: ManualClock) -> Message:
    assert message.fencing_token
    return relay.complete(db, message.id, ACTOR, fencing_token=message.fencing_token, clock=clock)


def test_same_owner_expired_claim_mints_a_fresh_token_fu4_1(db: Database, clock: ManualClock) -> None:
    stale, current = claims(db, clock)
    assert stale.fencing_token
    assert current.fencing_token
    assert current.fencing_token > stale.fencing_token
    assert current.claim_expires_at == clock() + relay.CLAIM_TTL
    assert current.deliveries == 2


def test_same_owner_unexpired_claim_gets_the_same_token_again_fu4_1(db: Database, clock: ManualClock) -> None:
    _, current = claims(db, clock)
    clock.advance(relay.CLAIM_TTL - TICK)
    before = rows(db, "messages"), counter(db)
    assert relay.claim(db, current.id, ACTOR, clock=clock) == current
    assert (rows(db, "messages"), counter(db)) == before


def test_complete_with_a_stale_token_is_refused(db: Database, clock: ManualClock) -> None:
    stale, current = claims(db, clock)
    before = rows(db, "messages"), rows(db, "events")
    assert answer(complete, db, stale, clock) == "fencing_token_stale"
    assert (rows(db, "messages"), rows(db, "events")) == before
    assert answer(complete, db, current, clock) == "done"


def test_dead_letter_with_a_stale_message_object_is_refused(db: Database, clock: ManualClock) -> None:
    stale, current = claims(db, clock)
    before = rows(db, "messages"), rows(db, "events")
    assert answer(relay.dead_letter, db, stale, clock=clock) == "fencing_token_stale"
    assert (rows(db, "messages"), rows(db, "events")) == before
    assert answer(relay.dead_letter, db, current, clock=clock) == "done"


def test_a_claim_by_an_unaddressed_actor_is_refused_and_a_token_does_not_help_it(
    db: Database, clock: ManualClock
) -> None:
    _, current = claims(db, clock)
    clock.advance(relay.CLAIM_TTL)
    before = rows(db, "messages"), rows(db, "events"), counter(db)
    assert answer(relay.claim, db, current.id, "another", clock=clock) == "authority_refusal"
    taken = answer(relay.complete, db, current.id, "another", fencing_token=current.fencing_token or 0, clock=clock)
    assert taken == "fencing_token_stale"
    assert (rows(db, "messages"), rows(db, "events"), counter(db)) == before
    assert answer(relay.claim, db, current.id, ACTOR, clock=clock) == "done"


# --- the same worker name, two attempts (hazard 43) ------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What one life of a worker holds."""

    lease: ActorLease
    attempt: ExecutionAttempt
    message: Message


ACTS: dict[str, tuple[str, Callable[[Database, Life, ManualClock], Any]]] = {
    "renews its actor lease": ("actor_lease_lost", lambda db, life, clock: renewed(db, life.lease, clock)),
    "renews its execution attempt": (
        "execution_attempt_lost",
        lambda db, life, clock: renew_attempt(db, life.attempt, clock),
    ),
    "finishes": ("execution_attempt_lost", lambda db, life, clock: finish(db, life.attempt, clock)),
    "completes its message": (
        "fencing_token_stale",
        lambda db, life, clock: complete(db, life.message, clock),
    ),
    "buries its message": (
        "fencing_token_stale",
        lambda db, life, clock: relay.dead_letter(db, life.message, clock=clock),
    ),
    "releases its actor lease": ("False", lambda db, life, _: release(db, life.lease)),
}


def release(db: Database, lease: ActorLease) -> None:
    if not fencing.release_actor_lease(db, lease.actor_id, lease.process_identity, lease.fencing_token):
        raise Refusal("nothing was released", category="False")


@pytest.mark.parametrize("act", ACTS)
def test_hazard_43_a_former_life_of_the_same_worker_changes_nothing_after_the_takeover(
    db: Database, clock: ManualClock, act: str
) -> None:
    assignment = new_assignment(db, ACTOR, clock=clock)
    message = relay.send(db, "master", ACTOR, "s", "b", clock=clock)

    def live() -> Life:
        lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
        attempt = attempt_on(db, assignment.id, lease, clock)
        return Life(lease, attempt, relay.claim(db, message.id, ACTOR, clock=clock))

    former = live()
    clock.advance(EXECUTION_ATTEMPT_TTL)
    current = live()
    clock.advance(TICK)
    tables = ("actor_leases", "execution_attempts", "assignments", "messages", "receipts", "events")
    before = [rows(db, table) for table in tables]
    said, does = ACTS[act]
    assert answer(does, db, former, clock) == said
    assert [rows(db, table) for table in tables] == before
    if act == "releases its actor lease":
        finish(db, current.attempt, clock)
    assert answer(does, db, current, clock) == "done"
    assert [rows(db, table) for table in tables] != before


@pytest.mark.parametrize("field", ["id", "fencing_token"])
def test_a_renewal_that_mixes_the_fields_of_two_execution_attempts_is_refused(
    db: Database, clock: ManualClock, field: str
) -> None:
    former = run_of(db, clock)
    clock.advance(EXECUTION_ATTEMPT_TTL)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    current = attempt_on(db, former.assignment_id, lease, clock)
    clock.advance(TICK)
    mixed = replace(current, **{field: getattr(former, field)})
    assert answer(renew_attempt, db, mixed, clock) == "execution_attempt_lost"
    assert answer(renew_attempt, db, current, clock) == "done"


# --- rows that nobody should have written (hazard 47) ----------------------------------------------------

MALFORMED = ["''", "'garbage'", "NULL", "'2026-01-01T00:00:05Z'", "'1767225605.5'", "-1", str(LAST_MICROS + 1), "1e300"]
IMPOSSIBLE = [-1, -(10**17), LAST_MICROS + 1, 2**62]


def spoil(db: Database, table: str, column: str, literal: object) -> None:
    db.connection.execute(f"UPDATE {table} SET {column} = {literal}")


@pytest.mark.parametrize("literal", MALFORMED)
@pytest.mark.parametrize("table", ["actor_leases", "execution_attempts", "messages"])
def test_the_ledger_refuses_a_malformed_expiry_of_a_corrupt_lease_attempt_or_claim(
    db: Database, clock: ManualClock, table: str, literal: str
) -> None:
    run_of(db, clock)
    relay.claim(db, relay.send(db, "master", ACTOR, "s", "b", clock=clock).id, ACTOR, clock=clock)
    before = rows(db, table)
    column = "claim_expires_at" if table == "messages" else "expires_at"
    with pytest.raises(ConstraintBroken):
        spoil(db, table, column, literal)
    assert rows(db, table) == before
    spoil(db, table, column, 1)
    assert rows(db, table) != before


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_corrupt_lease_is_granted_to_nobody_and_its_readers_survive(
    db: Database, clock: ManualClock, value: int
) -> None:
    for actor_id in (ACTOR, "another"):
        fencing.acquire_actor_lease(db, actor_id, RED, clock=clock)
    clock.advance(ACTOR_LEASE_TTL)
    assert answer(fencing.acquire_actor_lease, db, "another", BLUE, clock=clock) == "done"
    without_checks(db, "actor_leases")
    spoil(db, "actor_leases", "expires_at", value)
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=clock) == "actor_lease_held"
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    assert lease.process_identity == RED
    assert len(fencing.expired_actor_leases(db, clock)) == (2 if value < 0 else 0)
    assert fencing.release_actor_lease(db, ACTOR, RED, lease.fencing_token)
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=clock) == "done"


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_corrupt_execution_attempt_is_taken_over_by_nobody_and_its_readers_survive(
    db: Database, clock: ManualClock, value: int
) -> None:
    attempt, other = run_of(db, clock, lease_ttl=HOUR), run_of(db, clock, lease_ttl=HOUR)
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    clock.advance(EXECUTION_ATTEMPT_TTL)
    without_checks(db, "execution_attempts")
    spoil(db, "execution_attempts", "expires_at", f"CASE WHEN id = '{attempt.id}' THEN {value} ELSE expires_at END")
    assert answer(attempt_on, db, attempt.assignment_id, lease, clock) == "execution_attempt_held"
    assert answer(attempt_on, db, other.assignment_id, lease, clock) == "done"
    expired = [found.id for found in fencing.expired_execution_attempts(db, clock)]
    assert expired == ([attempt.id] if value < 0 else [])
    assert recover(db, attempt, clock) == (value < 0)
    assert ledger_facts(db, attempt.assignment_id)["assignment"] == ("FAILED" if value < 0 else "RUNNING")


# --- clocks that jump (hazard 46) ------------------------------------------------------------------------


def test_a_clock_set_back_an_hour_makes_no_actor_lease_immortal(db: Database, clock: ManualClock) -> None:
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    clock.advance(-HOUR)
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=clock) == "actor_lease_held"
    assert renewed(db, lease, clock).expires_at == clock() + ACTOR_LEASE_TTL
    clock.advance(ACTOR_LEASE_TTL)
    assert fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock).fencing_token > lease.fencing_token


def test_a_clock_set_ahead_an_hour_ends_every_authority_and_the_tokens_decide(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    clock.advance(HOUR)
    current = run_of(db, clock, BLUE)
    clock.advance(-HOUR)
    before = ledger_facts(db, attempt.assignment_id)
    assert answer(finish, db, attempt, clock) == "actor_lease_lost"
    assert ledger_facts(db, attempt.assignment_id) == before
    assert answer(finish, db, current, clock) == "done"


def test_two_processes_whose_clocks_are_90_seconds_apart_still_obey_the_tokens(
    db: Database, clock: ManualClock
) -> None:
    ahead = ManualClock(clock() + timedelta(seconds=90))
    attempt = run_of(db, clock)
    for each in (clock, ahead):
        each.advance(ACTOR_LEASE_TTL - timedelta(seconds=60))
    successor = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=ahead)
    lease = replace(successor, process_identity=RED, fencing_token=attempt.actor_lease_fencing_token)
    assert answer(renewed, db, lease, clock) == "actor_lease_lost"
    assert answer(finish, db, attempt, clock) == "actor_lease_lost"
    assert answer(renewed, db, successor, ahead) == "done"


@pytest.mark.parametrize("year", [1970, 2106])
def test_an_actor_lease_works_the_same_in(db: Database, year: int) -> None:
    clock = ManualClock(datetime(year, 1, 1, tzinfo=UTC))
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    assert fencing.current_actor_lease(db, ACTOR) == lease
    assert (lease.acquired_at, lease.expires_at) == (clock(), clock() + ACTOR_LEASE_TTL)
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=clock) == "actor_lease_held"
    clock.advance(ACTOR_LEASE_TTL)
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=clock) == "done"


def test_an_actor_lease_lasts_as_long_through_the_hour_that_comes_twice(db: Database) -> None:
    new_york = ZoneInfo("America/New_York")
    before_the_fold = datetime(2026, 11, 1, 1, 30, tzinfo=new_york)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, ttl=HOUR, clock=lambda: before_the_fold)
    assert lease.expires_at == datetime(2026, 11, 1, 6, 30, tzinfo=UTC)
    again = before_the_fold.replace(fold=1)
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=lambda: again - TICK) == "actor_lease_held"
    assert answer(fencing.acquire_actor_lease, db, ACTOR, BLUE, clock=lambda: again) == "done"


def test_history_is_ordered_by_sequence_when_the_clock_goes_backwards(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    clock.advance(-HOUR)
    finish(db, attempt, clock)
    history = journal.events_of(db.connection, attempt.assignment_id)
    assert [event.kind for event in history] == ["assignment.created", "assignment.running", "assignment.finished"]
    assert history[-1].at < history[0].at
    assert [event.seq for event in history] == sorted(event.seq for event in history)
    assert [event.kind for event in journal.latest_events(db.connection, limit=2)] == [
        "assignment.finished",
        "sow.completed",
    ]


# --- any order of acts, against a model ------------------------------------------------------------------


class Leases(RuleBasedStateMachine):
    """One actor, three processes, a clock; the model is a holder, a token and a time."""

    ledger: Database

    def __init__(self) -> None:
        super().__init__()
        self.ledger.connection.execute("DELETE FROM actor_leases")
        self.clock = ManualClock()
        self.greatest = counter(self.ledger)
        self.held: tuple[str, int, datetime] | None = None
        self.known: dict[str, int] = {}

    def current(self) -> bool:
        return self.held is not None and self.held[2] > self.clock()

    @rule(process=st.sampled_from([RED, BLUE, "proc_green"]))
    def acquire(self, process: str) -> None:
        free = not self.current()
        assert (answer(fencing.acquire_actor_lease, self.ledger, ACTOR, process, clock=self.clock) == "done") == free
        if free:
            lease = fencing.current_actor_lease(self.ledger, ACTOR)
            assert lease
            assert lease.fencing_token > self.greatest
            self.greatest = self.known[process] = lease.fencing_token
            self.held = (process, lease.fencing_token, self.clock() + ACTOR_LEASE_TTL)

    @rule(process=st.sampled_from([RED, BLUE, "proc_green"]))
    def renew(self, process: str) -> None:
        token = self.known.get(process, 0)
        owns = self.held is not None and self.held[:2] == (process, token) and self.current()
        said = answer(fencing.renew_actor_lease, self.ledger, ACTOR, process, token, clock=self.clock)
        assert (said == "done") == owns
        if owns:
            self.held = (process, token, self.clock() + ACTOR_LEASE_TTL)

    @rule(process=st.sampled_from([RED, BLUE, "proc_green"]))
    def release(self, process: str) -> None:
        token = self.known.get(process, 0)
        owns = self.held is not None and self.held[:2] == (process, token)
        assert fencing.release_actor_lease(self.ledger, ACTOR, process, token) == owns
        if owns:
            self.held = None

    @rule(by=st.sampled_from([TICK, ACTOR_LEASE_TTL - TICK, ACTOR_LEASE_TTL, -timedelta(minutes=1)]))
    def let_time_pass(self, by: timedelta) -> None:
        self.clock.advance(by)

    @invariant()
    def ledger_and_model_agree(self) -> None:
        lease = fencing.current_actor_lease(self.ledger, ACTOR)
        assert (lease and (lease.process_identity, lease.fencing_token, lease.expires_at)) == self.held


def test_any_order_of_acquisition_renewal_release_and_time_keeps_one_holder_of_an_actor_lease(tmp_path: Path) -> None:
    Leases.ledger = Database(tmp_path / LEDGER_NAME)
    Leases.ledger.connection.execute("PRAGMA synchronous = OFF")
    try:
        run_state_machine_as_test(
            Leases, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
        )
    finally:
        Leases.ledger.close()


# === organization level ===================================================================================
# Below this line the same promises are shown through `Organization.run_assignment`.


def folders(org: Organization) -> list[str]:
    return sorted(path.name for path in (org.root / ".sovereign" / "runs").glob("*") if path.is_dir())


def another(org: Organization) -> Organization:
    """A second process's view of the same organization: its own identity, its own sessions."""
    return Organization(org.root)


def test_a_completed_run_releases_the_actor_lease_for_a_fresh_process(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    fresh = another(org)
    (_, _, first), (_, _, second) = governed_work(org), governed_work(org)
    assert org.run_assignment(first.id).status == "completed"
    assert fencing.current_actor_lease(org.db, first.actor_id) is None
    assert fresh.run_assignment(second.id).status == "completed"
    assert fresh.process_identity != org.process_identity
    fresh.close()


@pytest.mark.parametrize("refusal", ["unknown_workspace_policy", "symlinked_workspace_root", "authority_refusal"])
def test_a_refused_run_also_releases_the_actor_lease_fu_r2_1(
    org: Organization, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal: str
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    fresh = another(org)
    (_, _, first), (_, _, second) = governed_work(org), governed_work(org)
    runs_folder = org.root / ".sovereign" / "runs"
    if refusal == "unknown_workspace_policy":
        org.db.connection.execute("UPDATE assignments SET workspace_policy = 'burn' WHERE id = ?", (first.id,))
    elif refusal == "symlinked_workspace_root":
        runs_folder.parent.mkdir(exist_ok=True)
        runs_folder.symlink_to(tmp_path)
    else:
        configure(org, lambda document: document["actors"]["operator-course"].update(authority=["review"]))
    before = ledger_facts(org.db, first.id), rows(org.db, "events"), sorted(tmp_path.iterdir())
    assert answer(org.run_assignment, first.id) == refusal
    assert (ledger_facts(org.db, first.id), rows(org.db, "events"), sorted(tmp_path.iterdir())) == before
    assert rows(org.db, "actor_leases") == []
    if refusal == "symlinked_workspace_root":
        runs_folder.unlink()
    assert fresh.run_assignment(second.id).status == "completed"
    fresh.close()


def test_actor_lease_blocks_a_second_assignment_for_the_same_actor_before_invocation(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, _, first), (_, _, second) = governed_work(org), governed_work(org)
    process_b = another(org)
    running, go_on, invoked = threading.Event(), threading.Event(), list[str]()

    def spied(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        invoked.append(envelope.assignment_id)
        if envelope.assignment_id == first.id:
            running.set()
            assert go_on.wait(60)
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", spied)
    with ThreadPoolExecutor(1) as pool:
        process_a = pool.submit(org.run_assignment, first.id)
        try:
            assert running.wait(30), process_a.exception(1)
            lease = fencing.current_actor_lease(org.db, first.actor_id)
            before = ledger_facts(org.db, second.id), folders(org)
            refused = answer(process_b.run_assignment, second.id)
            assert (refused, invoked) == ("actor_lease_held", [first.id])
            assert (ledger_facts(org.db, second.id), folders(org)) == before
            assert fencing.current_actor_lease(org.db, first.actor_id) == lease
        finally:
            go_on.set()
        assert process_a.result(30).status == "completed"
    assert process_b.run_assignment(second.id).status == "completed"
    assert invoked == [first.id, second.id]
    process_b.close()


def run_as_people_do(root: Path, assignment_id: str) -> tuple[int, int]:
    """``sovereign-agent run`` in this process: its exit code, and how often a program was invoked."""
    invoked: list[Any] = []
    organization.invoke_actor = lambda *args: (invoked.append(args), works(*args))[1]
    return cli.main(["run", assignment_id, "--root", str(root)]), len(invoked)


def test_the_ordinary_run_assignment_path_cannot_bypass_the_actor_lease(org: Organization) -> None:
    _, _, assignment = governed_work(org)
    before = ledger_facts(org.db, assignment.id)
    lease = fencing.acquire_actor_lease(org.db, assignment.actor_id, RED)
    assert in_a_fresh_process(run_as_people_do, org.root, assignment.id) == (1, 0)
    assert (ledger_facts(org.db, assignment.id), folders(org)) == (before, [])
    assert fencing.current_actor_lease(org.db, assignment.actor_id) == lease
    assert fencing.release_actor_lease(org.db, assignment.actor_id, RED, lease.fencing_token)
    assert in_a_fresh_process(run_as_people_do, org.root, assignment.id) == (0, 1)


def test_a_stolen_fence_mid_invocation_refuses_the_terminal_write(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, assignment = governed_work(org)
    tables = ("assignments", "sows", "execution_attempts", "receipts", "events")
    seen: dict[str, Any] = {}

    def loses_its_fence_meanwhile(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        proposal = works(settings, envelope, folder)
        org.db.connection.execute(
            "UPDATE assignments SET current_execution_attempt = 'att_thief' WHERE id = ?", (assignment.id,)
        )
        seen["ledger"] = [rows(org.db, table) for table in tables]
        seen["folder"] = folder.path
        return proposal

    monkeypatch.setattr(organization, "invoke_actor", loses_its_fence_meanwhile)
    assert answer(org.run_assignment, assignment.id) == "execution_attempt_lost"
    assert [rows(org.db, table) for table in tables] == seen["ledger"]
    assert rows(org.db, "receipts") == []
    assert ledger_facts(org.db, assignment.id)["events"] == ["assignment.created", "assignment.running"]
    assert sorted(path.name for path in seen["folder"].iterdir()) == [".sovereign-out", "provider-raw"]
    assert (seen["folder"] / "provider-raw" / "stream.log").exists()


def test_an_actor_lease_taken_over_mid_invocation_refuses_the_terminal_write_and_the_heir_keeps_it(
    org: Organization, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_a = Organization(org.root, clock=clock)
    _, _, assignment = governed_work(process_a)
    heirs: list[ActorLease] = []

    def outlives_its_lease(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        clock.advance(EXECUTION_ATTEMPT_TTL)
        heirs.append(fencing.acquire_actor_lease(org.db, assignment.actor_id, BLUE, clock=clock))
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", outlives_its_lease)
    assert answer(process_a.run_assignment, assignment.id) == "actor_lease_lost"
    assert fencing.current_actor_lease(org.db, assignment.actor_id) == heirs[0]
    assert ledger_facts(org.db, assignment.id)["receipts"] == [None]
    (folder,) = folders(org)
    assert not (workspace.locate(org.root, folder).path / "receipt.json").exists()
    process_a.close()


def test_a_run_takes_the_actor_lease_for_the_time_that_its_settings_give_it(
    org: Organization, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_a, process_b = Organization(org.root, clock=clock), Organization(org.root, clock=clock)
    (_, _, first), (_, _, second) = governed_work(process_a), governed_work(process_a)
    said: list[str] = []
    ttl = timedelta(seconds=org.settings.authority.actor_lease_seconds)

    def almost_outlasts_it(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        if envelope.assignment_id == first.id:
            clock.advance(ttl - TICK)
            said.append(answer(process_b.run_assignment, second.id))
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", almost_outlasts_it)
    assert answer(process_a.run_assignment, first.id) == "done"
    assert said == ["actor_lease_held"]
    assert answer(process_b.run_assignment, second.id) == "done"
    process_a.close()
    process_b.close()


def test_a_completed_assignment_run_via_the_real_path_clears_its_fence_and_tidies_up(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    _, _, assignment = governed_work(org)
    receipt = org.run_assignment(assignment.id)
    assert journal.receipts_of(org.db.connection, assignment.id) == [receipt]
    facts = ledger_facts(org.db, assignment.id)
    assert (facts["assignment"], facts["pointer"], facts["attempts"]) == ("COMPLETED", None, ["DONE"])
    folder = workspace.locate(org.root, receipt.attempt_id)
    assert sorted(path.name for path in folder.path.iterdir()) == [
        ".sovereign-out",
        "receipt.json",
        "receipt.json.sha256",
    ]
    assert (folder.path / "receipt.json").read_text() == journal.receipt_json(receipt)
    assert fencing.attempts_to_reclaim(org.db.connection, after="", limit=10) == []


def test_only_one_process_runs_an_assignment_and_the_other_leaves_it_alone(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, assignment = governed_work(org)
    said: list[str] = []
    tokens: list[int] = []

    def runs_it_again(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        said.append(answer(org.run_assignment, assignment.id))
        tokens.extend(row["fencing_token"] for row in rows(org.db, "actor_leases"))
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", runs_it_again)
    assert org.run_assignment(assignment.id).status == "completed"
    assert said == ["execution_attempt_held"]
    assert tokens == [row["actor_lease_fencing_token"] for row in rows(org.db, "execution_attempts")]
    assert rows(org.db, "actor_leases") == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the first ends first", "the second ends first"])
def test_two_runs_of_one_actor_in_one_process_share_its_lease_until_the_last_has_ended(
    org: Organization, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    work = [governed_work(org)[2] for _ in range(2)]
    running = {assignment.id: threading.Event() for assignment in work}
    go_on = {assignment.id: threading.Event() for assignment in work}

    def waits(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        running[envelope.assignment_id].set()
        assert go_on[envelope.assignment_id].wait(60)
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", waits)
    with ThreadPoolExecutor(2) as pool:
        runs = []
        for assignment in work:
            runs.append(pool.submit(org.run_assignment, assignment.id))
            assert running[assignment.id].wait(30)
        (lease,) = rows(org.db, "actor_leases")
        for left, which in enumerate(order):
            tokens = [row["fencing_token"] for row in rows(org.db, "actor_leases")]
            assert tokens == [lease["fencing_token"]], left
            go_on[work[which].id].set()
            assert runs[which].result(30).status == "completed"
    assert rows(org.db, "actor_leases") == []


def test_a_second_run_in_one_process_does_not_undercut_the_first_when_their_lease_has_run_out(
    org: Organization, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Organization(org.root, clock=clock)
    (_, _, first), (_, _, second) = governed_work(process), governed_work(process)
    said: list[str] = []

    def outlives_its_lease(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        if envelope.assignment_id == first.id:
            clock.advance(EXECUTION_ATTEMPT_TTL)
            said.append(answer(process.run_assignment, second.id))
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", outlives_its_lease)
    assert answer(process.run_assignment, first.id) == "done"
    assert said == ["actor_lease_held"]
    assert ledger_facts(org.db, second.id)["assignment"] == "CREATED"
    assert answer(process.run_assignment, second.id) == "done"
    process.close()


# --- beside each other ------------------------------------------------------------------------------------


def life(db: Database, name: str) -> Iterator[None]:
    """All that a piece of work can go through, a step at a time, by a clock of its own."""
    clock = ManualClock()

    def act(step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with db.transaction() as connection:
            return step(connection, *args, now=clock(), **options)

    def assigned(sow_id: str) -> str:
        options = {"workspace_policy": "temporary_directory", "maximum_seconds": 86_400}
        return act(outcomes.create_assignment, sow_id=sow_id, actor_id=name, planner_id=name, **options).id

    work = {"title": name, "desired_state": "d", "checks": [], "owner": name, "subject": ""}
    outcome = act(outcomes.create_outcome, **work)
    yield
    act(outcomes.activate_outcome, outcome.id, actor=name)
    asked = {"scope": name, "role": Role.OPERATOR, "created_by": name, "required_effect_kind": None}
    sow = act(outcomes.create_sow, outcome_id=outcome.id, **asked)
    yield
    act(outcomes.move_sow, sow.id, (SowState.DRAFT,), SowState.READY, actor=name)
    called_off = assigned(sow.id)
    yield
    act(outcomes.cancel_created_assignment, called_off, actor=name)
    assignment_id = assigned(sow.id)
    yield
    lease = fencing.acquire_actor_lease(db, name, RED, clock=clock)
    yield
    lost = attempt_on(db, assignment_id, lease, clock)
    yield
    clock.advance(TICK)
    fencing.renew_actor_lease(db, name, RED, lease.fencing_token, clock=clock)
    renew_attempt(db, lost, clock)
    yield
    clock.advance(HOUR)
    lease = fencing.acquire_actor_lease(db, name, RED, clock=clock)
    yield
    attempt = attempt_on(db, assignment_id, lease, clock)
    yield
    finish(db, attempt, clock)
    yield
    with db.transaction() as connection:
        fencing.close_workspace(connection, attempt.id)
    yield
    fencing.release_actor_lease(db, name, RED, lease.fencing_token)
    for before, to in pairwise((SowState.COMPLETED, SowState.VERIFIED, SowState.APPROVED)):
        yield
        act(outcomes.move_sow, sow.id, (before,), to, actor=name)
    yield
    act(outcomes.accept_outcome, outcome.id, accepter=name, detail={})


def rows_of(db: Database, name: str) -> list[dict[str, Any]]:
    tables = ("outcomes", "sows", "assignments", "actor_leases", "execution_attempts")
    return [row for table in tables for row in rows(db, table) if name in row.values()]


def test_no_step_of_a_piece_of_work_changes_a_row_of_another_that_stands_where_it_stood(db: Database) -> None:
    red, blue = life(db, "red"), life(db, "blue")
    for _ in range(20):
        for mover, other in ((red, "blue"), (blue, "red")):
            before = rows_of(db, other)
            assert answer(next, mover, None) == "done"
            assert rows_of(db, other) == before
    assert [row["state"] for row in rows(db, "outcomes")] == ["ACCEPTED", "ACCEPTED"]


def test_what_a_run_shows_of_itself_is_noted_of_no_other(location: Location, clock: ManualClock) -> None:
    db = location.open(clock=clock)
    shown, other = run_of(db, clock), run_of(db, clock)
    before = [row for row in rows(db, "execution_attempts") if row["id"] == other.id]
    terms = {"attempt_ttl": HOUR, "lease_ttl": HOUR, "silent": TICK, "step": "counting", "tolerance": HOUR}
    fencing.renew_run(db, shown, **terms)
    after = {row["id"]: row for row in rows(db, "execution_attempts")}
    assert [after[other.id]] == before
    assert after[shown.id]["step"] == "counting"
    db.close()


def test_a_run_that_has_run_out_is_taken_over_by_no_other_actor_than_its_own(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    clock.advance(HOUR)
    before = rows(db, "assignments"), rows(db, "execution_attempts")
    foreign = fencing.acquire_actor_lease(db, "another", BLUE, clock=clock)
    assert answer(attempt_on, db, attempt.assignment_id, foreign, clock) == "illegal_move"
    assert (rows(db, "assignments"), rows(db, "execution_attempts")) == before
    own = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    assert answer(attempt_on, db, attempt.assignment_id, own, clock) == "done"


def test_a_run_whose_pointer_was_moved_is_not_taken_over(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    clock.advance(HOUR)
    lease = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
    db.connection.execute("UPDATE assignments SET current_execution_attempt = 'att_other'")
    before = rows(db, "assignments"), rows(db, "execution_attempts")
    assert answer(attempt_on, db, attempt.assignment_id, lease, clock) == "illegal_move"
    assert (rows(db, "assignments"), rows(db, "execution_attempts")) == before


def test_an_attempt_that_a_hand_has_ended_is_not_ended_again(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    db.connection.execute("UPDATE execution_attempts SET status = 'RECOVERED'")
    before = rows(db, "assignments"), rows(db, "execution_attempts")
    assert answer(finish, db, attempt, clock) == "attempt_not_active"
    assert (rows(db, "assignments"), rows(db, "execution_attempts")) == before


def test_an_attempt_has_run_out_when_it_has_and_not_when_another_has_or_it_has_ended(
    db: Database, clock: ManualClock
) -> None:
    over = run_of(db, clock, ttl=timedelta(minutes=1))
    goes_on = run_of(db, clock, ttl=HOUR)
    ended = run_of(db, clock, ttl=timedelta(minutes=1))
    finish(db, ended, clock)
    clock.advance(timedelta(minutes=1))
    with db.transaction() as connection:
        seen = [fencing.lock_expired_attempt(connection, each.id, clock) for each in (over, goes_on, ended)]
    assert seen == [clock(), None, None]


def test_the_folder_of_an_attempt_is_dealt_with_only_once_it_has_ended(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock)
    for ended in (False, True):
        with db.transaction() as connection:
            fencing.close_workspace(connection, attempt.id)
        assert [row["workspace_open"] for row in rows(db, "execution_attempts")] == [int(not ended)]
        if not ended:
            finish(db, attempt, clock)


def test_a_move_that_a_state_does_not_allow_is_refused_and_changes_nothing(db: Database, clock: ManualClock) -> None:
    def said(move: Callable[..., Any], *args: Any, **options: Any) -> str:
        def act() -> None:
            with db.transaction() as connection:
                move(connection, *args, now=clock(), **options)

        return answer(act)

    running, other, called_off = run_of(db, clock), run_of(db, clock), new_assignment(db, ACTOR, clock=clock)
    sow = outcomes.get_sow(db.connection, called_off.sow_id)
    terms = {"actor_id": ACTOR, "planner_id": "master", "workspace_policy": "persistent", "maximum_seconds": 1}
    assert said(outcomes.cancel_created_assignment, called_off.id, actor="master") == "done"
    assert said(outcomes.create_assignment, sow_id=sow.id, **terms) == "done"
    (waiting,) = [a for a in outcomes.assignments_of(db.connection, sow.id) if a.state is AssignmentState.CREATED]
    before = [rows(db, table) for table in ("outcomes", "sows", "assignments", "acceptances")]
    for move, *args in (
        (outcomes.activate_outcome, sow.outcome_id),
        (outcomes.cancel_outcome, sow.outcome_id),
        (outcomes.move_sow, sow.id, (SowState.DRAFT,), SowState.READY),
    ):
        assert said(move, *args, actor="owner") == "illegal_move"
    assert said(outcomes.accept_outcome, sow.outcome_id, accepter="owner", detail={}) == "illegal_move"
    assert said(outcomes.start_assignment, called_off.id, ACTOR, "att_1") == "illegal_move"
    assert said(outcomes.start_assignment, waiting.id, "another", "att_1") == "illegal_move"
    assert said(outcomes.hand_over_assignment, other.assignment_id, ACTOR, running.id, "att_1") == "illegal_move"
    assert said(outcomes.cancel_created_assignment, running.assignment_id, actor="master") == "done"  # to no avail
    assert [rows(db, table) for table in ("outcomes", "sows", "assignments", "acceptances")] == before


def test_an_outcome_is_given_up_whatever_goes_on_for_another_and_never_twice(db: Database, clock: ManualClock) -> None:
    run_of(db, clock)
    waiting = new_assignment(db, ACTOR, clock=clock)
    outcome_id = outcomes.get_sow(db.connection, waiting.sow_id).outcome_id
    with db.transaction() as connection:
        outcomes.cancel_created_assignment(connection, waiting.id, actor="master", now=clock())
        said = [answer(outcomes.cancel_outcome, connection, outcome_id, actor="owner", now=clock()) for _ in "ab"]
    assert said == ["done", "illegal_move"]
    assert sorted(row["state"] for row in rows(db, "outcomes")) == ["ACTIVE", "CANCELED"]


def test_an_attempt_that_has_ended_is_not_renewed_and_is_not_the_one_that_runs(
    db: Database, clock: ManualClock
) -> None:
    lost = run_of(db, clock, ttl=TICK)
    clock.advance(TICK)
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    running = attempt_on(db, lost.assignment_id, lease, clock)
    with db.transaction() as connection:
        assert fencing.active_attempt(connection, lost.assignment_id) == running
    clock.advance(-TICK)
    before = rows(db, "execution_attempts")
    assert answer(renew_attempt, db, lost, clock) == "execution_attempt_lost"
    assert rows(db, "execution_attempts") == before
    assert answer(renew_attempt, db, running, clock) == "done"
