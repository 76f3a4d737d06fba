"""The assistant's queue and its fence: one field at a time, with the rows counted before and after."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import answer

from sovereign_agent import assistant_service, journal
from sovereign_agent import assistant_work as work
from sovereign_agent.assistant_work import Claim
from sovereign_agent.database import Database
from sovereign_agent.errors import AuthorityLost, ConstraintBroken, IllegalMove, LedgerFault, PolicyRefusal, Refusal

NOW = 1_800_000_000
TTL = 90
OWNER = "worker-1"
ERA = f"epoch_{0:032x}"
PROMPT = "Check the shop this morning"
FINDING = {"role": "finding", "content": "Vanilla is at 2 tubs."}


def queued(db: Database, origin: str = "mail:1", session: str = "lucy", **extras: Any) -> str:
    return work.enqueue(db, origin, session, PROMPT, **({"now": NOW} | extras))


def claimed(db: Database, owner: str = OWNER, **options: Any) -> Claim:
    claim = work.claim(db, owner, **({"now": NOW, "ttl": TTL} | options))
    assert claim
    return claim


def held(db: Database, **extras: Any) -> Claim:
    """A claim on a new item."""
    queued(db, **extras)
    return claimed(db)


def row(db: Database, work_id: str) -> dict[str, Any]:
    return dict(work.get_work(db.connection, work_id))


def state(db: Database, work_id: str) -> tuple[str, int, str | None]:
    item = row(db, work_id)
    return item["status"], item["generation"], item["owner"]


def facts(db: Database) -> list[Any]:
    """Everything that a refused write could have changed."""
    tables = ("assistant_work", "assistant_transcript", "assistant_delegations", "assistant_control")
    counted = [tuple(r) for r in db.connection.execute("SELECT count(*), max(seq) FROM events")]
    return counted + [[tuple(r) for r in db.connection.execute(f"SELECT * FROM {table}")] for table in tables]


def events(db: Database, work_id: str) -> list[str]:
    return [event.kind for event in journal.events_of(db.connection, work_id)]


def control(db: Database, assignment: str, *values: Any) -> None:
    """Do to the control row what an operator, or a restore, does."""
    db.connection.execute(f"UPDATE assistant_control SET {assignment} WHERE id = 1", values)


def new_epoch(db: Database) -> None:
    """Another era, in ledger and marker alike; the claims are left as they are."""
    control(db, "epoch = ?", ERA)
    db.connection.authority.write_text(f"{ERA}\n")


# --- the queue --------------------------------------------------------------------------------------------


def test_the_same_origin_with_the_same_content_is_the_same_item(db: Database) -> None:
    first = queued(db)
    assert queued(db) == first
    assert queued(db, "mail:2") != first
    assert db.connection.execute("SELECT count(*) FROM assistant_work").rows[0][0] == 2


@pytest.mark.parametrize(
    "other",
    [{"session": "bob"}, {"role": "research"}, {"subject": "tea"}, {"control": True}, {"prompt": "Something else"}],
    ids=lambda other: next(iter(other)),
)
def test_the_same_origin_with_other_content_is_refused(db: Database, other: dict[str, Any]) -> None:
    content = {"session": "lucy", "prompt": PROMPT}
    first = work.enqueue(db, "mail:1", **content)
    before = facts(db)
    with pytest.raises(IllegalMove) as refused:
        work.enqueue(db, "mail:1", **(content | other))
    assert refused.value.category == "origin_taken"
    assert facts(db) == before
    assert work.enqueue(db, "mail:1", **content) == first


def test_a_misspelt_wish_for_an_item_is_refused_and_not_dropped(db: Database) -> None:
    misspelt: Any = {"availble_after": 60}
    assert answer(work.enqueue, db, "origin", "session", "prompt", **misspelt) == "out_of_bounds"
    assert work.open_work(db.connection) == []
    assert answer(work.enqueue, db, "origin", "session", "prompt", available_after=60) == "done"


def test_a_batch_is_queued_whole_in_its_order_and_again_changes_nothing(db: Database) -> None:
    batch = [(f"mail:{n}", f"session {n}", PROMPT) for n in range(100)]
    ids = work.enqueue_many(db, batch, role="night", now=NOW)
    assert work.enqueue_many(db, batch, role="night", now=NOW) == ids
    taken = work.claim_many(db, OWNER, 100, role="night", now=NOW)
    assert {claim.id for claim in taken} == set(ids)
    before = facts(db)
    assert answer(work.enqueue_many, db, [("mail:new", "s", PROMPT), ("mail:1", "s", "other")]) == "origin_taken"
    assert answer(work.enqueue_many, db, batch * 11) == "out_of_bounds"
    assert work.enqueue_many(db, []) == []
    assert facts(db) == before


BEYOND = "x" * (work.MAX_TEXT_CHARACTERS + 1)
LONG_NAME = "x" * (work.MAX_NAME_CHARACTERS + 1)
END_OF_TIME = 253_402_300_800  # the first second of the year 10,000


@pytest.mark.parametrize(
    ("change", "category"),
    [
        ({"origin": ""}, "out_of_bounds"),
        ({"origin": LONG_NAME}, "out_of_bounds"),
        ({"session": ""}, "out_of_bounds"),
        ({"session": LONG_NAME}, "out_of_bounds"),
        ({"prompt": ""}, "out_of_bounds"),
        ({"prompt": BEYOND}, "out_of_bounds"),
        ({"prompt": "a\0b"}, "invalid_text"),
        ({"prompt": "half \ud800"}, "invalid_text"),
        ({"role": ""}, "out_of_bounds"),
        ({"subject": LONG_NAME}, "out_of_bounds"),
        ({"retries": -1}, "out_of_bounds"),
        ({"available_after": -1}, "out_of_bounds"),
        ({"available_after": float("nan")}, "out_of_bounds"),
        ({"available_after": float("inf")}, "out_of_bounds"),
        ({"now": -1}, "out_of_bounds"),
        ({"now": float("nan")}, "out_of_bounds"),
        ({"now": END_OF_TIME}, "out_of_bounds"),
        ({"now": END_OF_TIME + 1}, "out_of_bounds"),
        ({"now": 1e18}, "out_of_bounds"),
    ],
    ids=str,
)
def test_what_is_outside_the_bounds_is_refused_before_anything_is_written(
    db: Database, change: dict[str, Any], category: str
) -> None:
    good = {"origin": "mail:1", "session": "lucy", "prompt": "x" * work.MAX_TEXT_CHARACTERS}
    before = facts(db)
    assert answer(work.enqueue, db, **(good | change)) == category
    assert facts(db) == before
    assert answer(work.enqueue, db, **good) == "done"


@pytest.mark.parametrize(
    "change",
    [
        {"origin": LONG_NAME[1:], "session": LONG_NAME[1:], "subject": LONG_NAME[1:]},
        {"now": 0},
        {"now": END_OF_TIME - 1},
        {"available_after": END_OF_TIME - 1},
    ],
    ids=str,
)
def test_what_just_fits_is_queued(db: Database, change: dict[str, Any]) -> None:
    good = {"origin": "mail:1", "session": "lucy", "prompt": PROMPT, "now": NOW}
    assert answer(work.enqueue, db, **(good | change)) == "done"


def test_control_items_go_first_and_then_the_oldest(db: Database) -> None:
    ids = [queued(db, f"mail:{n}", f"session {n}", control=n == 2) for n in range(4)]
    assert [claimed(db).id for _ in ids] == [ids[2], ids[0], ids[1], ids[3]]
    assert work.claim(db, OWNER, now=NOW) is None


def test_an_item_that_is_delayed_comes_at_its_time_in_its_old_place(db: Database) -> None:
    late = queued(db, "mail:1", "one", available_after=10)
    early = queued(db, "mail:2", "two")
    assert claimed(db, now=NOW + 9.999_999).id == early
    queued(db, "mail:3", "three")
    assert claimed(db, now=NOW + 10).id == late


def test_hazard_57_an_item_that_waits_for_its_time_does_not_stand_in_front_of_its_session(db: Database) -> None:
    queued(db, "mail:1", available_after=3600)
    behind = queued(db, "mail:2")
    assert claimed(db).id == behind


def test_a_claim_takes_only_items_of_its_role(db: Database) -> None:
    item = queued(db, role="research")
    assert work.claim(db, OWNER, now=NOW) is None
    assert claimed(db, role="research").id == item


# --- claims -----------------------------------------------------------------------------------------------


def test_a_claim_is_a_generation_an_epoch_and_a_time(db: Database) -> None:
    item = queued(db, subject="tea")
    claim = claimed(db)
    epoch = db.connection.authority.read_text().strip()
    assert claim == Claim(item, "lucy", PROMPT, 1, OWNER, epoch, "tea", "shop")
    assert row(db, item)["expires_at"] == (NOW + TTL) * 1_000_000
    assert state(db, item) == ("RUNNING", 1, OWNER)
    assert events(db, item) == ["work.claimed"]


def test_of_a_session_one_item_runs_at_a_time(db: Database) -> None:
    first, second, other = queued(db, "1"), queued(db, "2"), queued(db, "3", "bob")
    claim = claimed(db)
    assert (claim.id, claimed(db).id, work.claim(db, OWNER, now=NOW)) == (first, other, None)
    work.finish(db, claim, "DONE", now=NOW)
    assert claimed(db).id == second


def test_two_running_items_of_one_session_cannot_be_stored(db: Database) -> None:
    held(db, origin="1")
    second = queued(db, "2")
    run = "UPDATE assistant_work SET status = 'RUNNING', owner = 'o', epoch = 'e', expires_at = 1 WHERE id = ?"
    with pytest.raises(ConstraintBroken):
        db.connection.execute(run, (second,))
    assert db.connection.execute(run, (queued(db, "3", "bob"),)).rowcount == 1


def test_hazard_42_an_item_whose_worker_is_lost_is_claimed_again_at_exactly_its_time_and_not_before(
    db: Database,
) -> None:
    dead = held(db)
    assert work.claim(db, "worker-2", now=NOW + TTL - 0.000_001) is None
    fresh = claimed(db, "worker-2", now=NOW + TTL)
    assert (fresh.id, fresh.generation) == (dead.id, 2)
    assert row(db, dead.id)["losses"] == 1
    assert events(db, dead.id) == ["work.claimed", "work.lost", "work.claimed"]


@pytest.mark.parametrize("due", ["lost", "delayed"])
def test_what_is_due_goes_before_a_younger_item_at_exactly_its_time(db: Database, due: str) -> None:
    older = held(db).id if due == "lost" else queued(db, available_after=TTL)
    for number in (2, 3):
        queued(db, f"mail:{number}", f"session {number}")
    assert claimed(db, "worker-2", now=NOW + TTL - 0.000_001).id != older
    assert claimed(db, "worker-3", now=NOW + TTL).id == older


WRITES: dict[str, Callable[[Database, Claim, float], Any]] = {
    "assert": lambda db, claim, now: work.assert_current(db.connection, claim, now),
    "observe": lambda db, claim, now: work.observe(db, claim, FINDING, now=now),
    "renew": lambda db, claim, now: work.renew(db, claim, TTL, now=now),
    "finish": lambda db, claim, now: work.finish(db, claim, "DONE", "done", now=now),
    "finish and claim": lambda db, claim, now: work.finish_and_claim(db, claim, "DONE", now=now),
    "release": lambda db, claim, now: work.release(db, claim, now=now),
    "retry": lambda db, claim, now: work.retry(db, claim, "it failed", now=now),
    "delegate": lambda db, claim, now: work.delegate(db, claim, "Look", deadline=now + 60, budget=1, now=now),
}


@pytest.mark.parametrize("write", WRITES)
def test_hazard_43_a_former_claim_under_the_same_name_writes_nothing_and_the_fresh_one_does(
    db: Database, write: str
) -> None:
    old = held(db)
    fresh = claimed(db, now=NOW + TTL)
    assert fresh == replace(old, generation=2)
    before = facts(db)
    assert answer(WRITES[write], db, old, NOW + TTL) == "claim_lost"
    assert facts(db) == before
    assert row(db, old.id)["expires_at"] == (NOW + 2 * TTL) * 1_000_000
    assert answer(WRITES[write], db, fresh, NOW + TTL) == "done"


# --- the fence: one field at a time -----------------------------------------------------------------------


def pause(db: Database, _: Claim) -> None:
    control(db, "paused = 1")


def forget_the_control_row(db: Database, _: Claim) -> None:
    db.connection.execute("DELETE FROM assistant_control")


def restore_the_ledger_only(db: Database, _: Claim) -> None:
    control(db, "epoch = ?", ERA)


def replace_the_marker_only(db: Database, _: Claim) -> None:
    db.connection.authority.write_text(f"{ERA}\n")


def begin_another_era(db: Database, _: Claim) -> None:
    new_epoch(db)


def remove_the_marker(db: Database, _: Claim) -> None:
    db.connection.authority.unlink()


def empty_the_marker(db: Database, _: Claim) -> None:
    db.connection.authority.write_text("")


UNAVAILABLE = "authority marker is unavailable"
REPLACED = "runtime paused or replaced by restore"
SUPERSEDED = "worker claim expired or superseded"
WORLD = [
    (pause, REPLACED, "paused"),
    (forget_the_control_row, UNAVAILABLE, "control_missing"),
    (restore_the_ledger_only, REPLACED, "epoch_replaced"),
    (replace_the_marker_only, REPLACED, "epoch_replaced"),
    (begin_another_era, REPLACED, "epoch_replaced"),
    (remove_the_marker, UNAVAILABLE, "marker_missing"),
    (empty_the_marker, UNAVAILABLE, "marker_empty"),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("change", "sentence", "category"), WORLD, ids=[change.__name__ for change, _, _ in WORLD])
def test_hazard_91_a_world_that_changed_refuses_each_write_and_changes_no_row(
    db: Database, write: str, change: Callable[[Database, Claim], None], sentence: str, category: str
) -> None:
    claim = held(db)
    change(db, claim)
    before = facts(db)
    with pytest.raises(PermissionError) as refused:
        WRITES[write](db, claim, NOW)
    assert isinstance(refused.value, AuthorityLost)
    assert (str(refused.value), refused.value.category) == (sentence, category)
    assert facts(db) == before


@pytest.mark.parametrize("write", WRITES)
def test_a_current_claim_may_do_everything(db: Database, write: str) -> None:
    claim = held(db)
    before = facts(db)
    WRITES[write](db, claim, NOW + TTL - 0.000_001)
    assert (facts(db) == before) == (write == "assert")


FIELDS = {
    "id": "work_of_another",
    "session": "bob",
    "generation": 2,
    "owner": "worker-2",
    "epoch": ERA,
    "subject": "coffee",
    "role": "research",
}


@pytest.mark.parametrize("field", FIELDS)
def test_hazard_91_a_claim_with_one_field_changed_is_nobodys(db: Database, field: str) -> None:
    claim = held(db)
    forged = replace(claim, **{field: FIELDS[field]})
    before = facts(db)
    for write in WRITES.values():
        with pytest.raises(Refusal) as refused:
            write(db, forged, NOW)
        assert refused.value.category in ("epoch_replaced", "delegation_depth", "claim_lost")
    with pytest.raises(AuthorityLost) as lost:
        work.observe(db, forged, FINDING, now=NOW)
    expected = (REPLACED, "epoch_replaced") if field == "epoch" else (SUPERSEDED, "claim_lost")
    assert (str(lost.value), lost.value.category) == expected
    assert facts(db) == before
    assert answer(work.observe, db, claim, FINDING, now=NOW) == "done"


def test_a_claim_from_another_era_cannot_borrow_the_current_epoch(db: Database) -> None:
    claim = held(db)
    new_epoch(db)
    forged = replace(claim, epoch=ERA)
    assert answer(work.observe, db, forged, FINDING, now=NOW) == "claim_lost"


@pytest.mark.parametrize("status", ["DONE", "BLOCKED", "CANCELED"])
def test_a_finished_item_is_fenced_for_its_own_worker_too(db: Database, status: str) -> None:
    claim = held(db)
    work.finish(db, claim, status, "That is that.", now=NOW)
    assert state(db, claim.id) == (status, 1, None)
    assert (row(db, claim.id)["result"], row(db, claim.id)["finished_at"]) == ("That is that.", NOW * 1_000_000)
    before = facts(db)
    for write in WRITES.values():
        assert answer(write, db, claim, NOW) == "claim_lost"
    assert facts(db) == before


def test_at_exactly_its_time_a_claim_is_over(db: Database) -> None:
    claim = held(db)
    assert answer(work.observe, db, claim, FINDING, now=NOW + TTL - 0.000_001) == "done"
    with pytest.raises(AuthorityLost) as refused:
        work.observe(db, claim, FINDING, now=NOW + TTL)
    assert (str(refused.value), refused.value.category) == (SUPERSEDED, "claim_lost")
    assert len(work.transcript(db.connection, claim.id)) == 1


def test_while_the_runtime_is_paused_nothing_is_claimed(db: Database) -> None:
    item = queued(db)
    control(db, "paused = 1")
    before = facts(db)
    assert answer(work.claim, db, OWNER, now=NOW) == "paused"
    assert facts(db) == before
    control(db, "paused = 0")
    assert claimed(db).id == item


def test_what_the_seed_prints_of_a_restore(db: Database) -> None:
    """The story of the course, with the operator's steps by hand: two rows of generation 1, two of generation 3."""
    claim = held(db)
    for _ in range(2):
        work.observe(db, claim, FINDING, now=NOW)
    with db.immediate() as connection:
        assert work.revoke_all(connection, NOW) == {"work_revoked": 1, "work_open": 1}
    new_epoch(db)
    control(db, "paused = 1")
    assert state(db, claim.id) == ("READY", 2, None)
    assert answer(work.observe, db, claim, FINDING, now=NOW) == "paused"
    control(db, "paused = 0")
    fresh = claimed(db, "replacement-worker", ttl=3600)
    assert fresh.generation == 3
    for _ in range(2):
        work.observe(db, fresh, FINDING, now=NOW)
    attempts = {
        "stale_epoch": lambda: work.assert_current(db.connection, claim),
        "expired_lease": lambda: work.assert_current(db.connection, fresh, now=NOW + 3601),
        "changed_role": lambda: work.assert_current(db.connection, replace(fresh, role="research"), now=NOW),
    }
    said = {}
    for name, attempt in attempts.items():
        with pytest.raises(PermissionError) as refused:
            attempt()
        said[name] = str(refused.value)
    assert said == {"stale_epoch": REPLACED, "expired_lease": SUPERSEDED, "changed_role": SUPERSEDED}
    assert [line["generation"] for line in work.transcript(db.connection, claim.id)] == [1, 1, 3, 3]
    assert events(db, claim.id) == ["work.claimed", "work.revoked", "work.claimed"]


def test_a_restore_takes_every_claim_and_moves_every_open_item_a_generation_on(db: Database) -> None:
    running, done = held(db, origin="1", session="1"), held(db, origin="2", session="2")
    work.finish(db, done, "DONE", now=NOW)
    ready = queued(db, "3", "3")
    with db.immediate() as connection:
        assert work.revoke_all(connection, NOW) == {"work_revoked": 1, "work_open": 2}
    assert state(db, running.id) == ("READY", 2, None)
    assert state(db, ready) == ("READY", 1, None)
    assert state(db, done.id) == ("DONE", 1, None)
    assert answer(work.observe, db, running, FINDING, now=NOW) == "claim_lost"
    assert [claim.generation for claim in work.claim_many(db, OWNER, 9, now=NOW)] == [3, 2]


# --- giving back, failing, poison -------------------------------------------------------------------------


def test_hazard_50_an_item_that_nobody_survives_is_parked_with_its_evidence_after_exactly_its_limit(
    db: Database,
) -> None:
    poison, healthy = queued(db, "1"), queued(db, "2")
    at = NOW
    for _ in range(work.CRASH_LIMIT):
        assert claimed(db, now=at).id == poison
        at += TTL
    assert claimed(db, now=at).id == healthy
    item = row(db, poison)
    assert (item["status"], item["losses"], item["owner"]) == ("PARKED", work.CRASH_LIMIT, None)
    assert OWNER in item["result"]
    assert events(db, poison).count("work.claimed") == work.CRASH_LIMIT
    assert events(db, poison)[-1] == "work.parked"
    assert work.claim(db, OWNER, now=at + TTL / 2) is None


def test_hazard_50_an_item_interrupted_in_good_order_again_and_again_is_no_poison(db: Database) -> None:
    item = queued(db)
    for _ in range(work.CRASH_LIMIT + 2):
        work.release(db, claimed(db), now=NOW)
    claim = claimed(db)
    assert (claim.id, claim.generation, row(db, item)["losses"]) == (item, work.CRASH_LIMIT + 3, 0)
    work.finish(db, claim, "DONE", now=NOW)
    assert state(db, item) == ("DONE", work.CRASH_LIMIT + 3, None)


def test_hazard_50_a_parked_item_can_be_called_off(db: Database) -> None:
    item = queued(db)
    for n in range(work.CRASH_LIMIT):
        claimed(db, now=NOW + n * TTL)
    work.claim(db, OWNER, now=NOW + work.CRASH_LIMIT * TTL)
    assert state(db, item)[0] == "PARKED"
    work.cancel(db, item, actor="lucy", now=NOW)
    assert state(db, item)[0] == "CANCELED"


def test_retries_are_counted_apart_from_losses_and_end_as_blocked(db: Database) -> None:
    claim = held(db, retries=1)
    assert work.retry(db, claim, "the supplier was away", available_after=5, now=NOW) is True
    assert state(db, claim.id) == ("READY", 1, None)
    assert work.claim(db, OWNER, now=NOW + 4) is None
    again = claimed(db, now=NOW + 5)
    assert work.retry(db, again, "still away", now=NOW + 5) is False
    item = row(db, claim.id)
    assert (item["status"], item["result"], item["losses"]) == ("BLOCKED", "still away", 0)
    assert events(db, claim.id) == ["work.claimed", "work.retried", "work.claimed", "work.blocked"]


def test_a_retry_that_is_told_of_no_delay_is_ready_at_once(db: Database) -> None:
    claim = held(db, retries=1)
    assert work.retry(db, claim, "the supplier was away", now=NOW) is True
    counts = work.count_open(db.connection)
    assert (counts["ready"], counts["delayed"]) == (1, 0)
    assert claimed(db).id == claim.id


def test_a_released_item_keeps_its_place_and_may_be_told_to_wait(db: Database) -> None:
    claim = held(db)
    queued(db, "mail:2")
    work.release(db, claim, available_after=60, now=NOW)
    assert claimed(db).id != claim.id
    queued(db, "mail:3", "bob")
    assert claimed(db).session == "bob"


def test_finishing_and_claiming_is_one_commit(db: Database) -> None:
    first = held(db)
    second, third = queued(db, "mail:2"), queued(db, "mail:3", "bob")
    following = work.finish_and_claim(db, first, "DONE", "done", now=NOW)
    assert following
    assert (following.id, following.owner, state(db, first.id)[0]) == (second, OWNER, "DONE")
    assert state(db, third) == ("READY", 0, None)
    work.cancel(db, third, now=NOW)
    assert work.finish_and_claim(db, following, "DONE", now=NOW) is None


def test_hazard_49_a_renewal_extends_the_same_claim_and_a_silent_owner_can_be_called_off(db: Database) -> None:
    claim = held(db)
    assert work.renew(db, claim, 60, now=NOW + 80) == NOW + 140
    assert answer(work.observe, db, claim, FINDING, now=NOW + 139) == "done"
    work.cancel(db, claim.id, now=NOW + 139)
    assert answer(work.renew, db, claim, 60, now=NOW + 139) == "claim_lost"
    assert answer(work.observe, db, claim, FINDING, now=NOW + 139) == "claim_lost"
    assert state(db, claim.id) == ("CANCELED", 1, None)


def test_hazard_52_a_renewal_that_comes_too_late_is_refused_and_revives_nothing(db: Database) -> None:
    claim = held(db)
    assert answer(work.renew, db, claim, TTL, now=NOW + TTL) == "claim_lost"
    assert row(db, claim.id)["expires_at"] == (NOW + TTL) * 1_000_000


@pytest.mark.parametrize("ttl", [0, -1, work.MAX_TTL_SECONDS + 1, float("nan"), float("inf")], ids=str)
def test_a_claim_is_for_a_time_that_can_be_meant(db: Database, ttl: float) -> None:
    queued(db)
    assert answer(work.claim, db, OWNER, ttl=ttl, now=NOW) == "out_of_bounds"
    claim = claimed(db)
    assert answer(work.renew, db, claim, ttl, now=NOW) == "out_of_bounds"


@pytest.mark.parametrize("limit", [0, -1, work.MAX_BATCH + 1])
def test_a_claim_of_many_has_a_limit(db: Database, limit: int) -> None:
    assert answer(work.claim_many, db, OWNER, limit) == "out_of_bounds"


def test_a_finished_item_cannot_be_called_off_and_an_unknown_one_is_missing(db: Database) -> None:
    claim = held(db)
    assert answer(work.finish, db, claim, "READY", now=NOW) == "out_of_bounds"
    work.finish(db, claim, "DONE", now=NOW)
    assert answer(work.cancel, db, claim.id) == "illegal_move"
    assert answer(work.cancel, db, "work_of_nobody") == "work_missing"


# --- delegation -------------------------------------------------------------------------------------------


def child_of(db: Database, parent: Claim, **options: Any) -> Claim:
    work.delegate(
        db, parent, "Look up the price of vanilla", **({"deadline": NOW + 60, "budget": 5, "now": NOW} | options)
    )
    return claimed(db, "researcher", role="research", ttl=600)


def test_a_child_works_in_a_session_of_its_own_until_its_deadline(db: Database) -> None:
    parent = held(db)
    child = child_of(db, parent)
    assert child.session.startswith(parent.id)
    assert row(db, child.id)["expires_at"] == (NOW + 60) * 1_000_000
    assert work.renew(db, child, 600, now=NOW + 30) == NOW + 60
    assert answer(work.observe, db, child, FINDING, now=NOW + 59.999_999) == "done"
    assert answer(work.observe, db, child, FINDING, now=NOW + 60) == "claim_lost"
    assert events(db, child.id) == ["work.delegated", "work.claimed"]


def test_a_child_beyond_its_deadline_is_refused_even_where_its_row_says_otherwise(db: Database) -> None:
    child = child_of(db, held(db))
    longer = (NOW + 600) * 1_000_000
    db.connection.execute("UPDATE assistant_work SET expires_at = ? WHERE id = ?", (longer, child.id))
    assert answer(work.observe, db, child, FINDING, now=NOW + 59) == "done"
    with pytest.raises(AuthorityLost) as refused:
        work.observe(db, child, FINDING, now=NOW + 60)
    assert (str(refused.value), refused.value.category) == (SUPERSEDED, "delegation_ended")


@pytest.mark.parametrize("write", [name for name in WRITES if name != "delegate"])
def test_hazard_91_a_childs_authority_ends_when_its_parent_is_canceled(db: Database, write: str) -> None:
    parent = held(db)
    child, brother = child_of(db, parent), child_of(db, held(db, origin="mail:2", session="bob"))
    work.cancel(db, parent.id, now=NOW)
    before = facts(db)
    with pytest.raises(AuthorityLost) as refused:
        WRITES[write](db, child, NOW)
    assert (str(refused.value), refused.value.category) == (SUPERSEDED, "claim_lost")
    assert facts(db) == before
    assert answer(WRITES[write], db, brother, NOW) == "done"


def test_a_child_of_a_canceled_parent_is_refused_even_where_its_own_row_says_otherwise(db: Database) -> None:
    parent = held(db)
    child = child_of(db, parent)
    assert answer(work.observe, db, child, FINDING, now=NOW) == "done"
    db.connection.execute(
        "UPDATE assistant_work SET status = 'CANCELED', owner = NULL, epoch = NULL, expires_at = NULL, finished_at = 1"
        " WHERE id = ?",
        (parent.id,),
    )
    assert state(db, child.id) == ("RUNNING", 1, "researcher")
    before = facts(db)
    with pytest.raises(AuthorityLost) as refused:
        work.observe(db, child, FINDING, now=NOW)
    assert (str(refused.value), refused.value.category) == (SUPERSEDED, "delegation_ended")
    assert facts(db) == before


ENDS: dict[str, Callable[[Database, Claim], Any]] = {
    "done": lambda db, parent: work.finish(db, parent, "DONE", now=NOW),
    "blocked": lambda db, parent: work.finish(db, parent, "BLOCKED", now=NOW),
    "canceled by its worker": lambda db, parent: work.finish(db, parent, "CANCELED", now=NOW),
    "done, and on to the next": lambda db, parent: work.finish_and_claim(db, parent, "DONE", now=NOW),
    "out of retries": lambda db, parent: work.retry(db, parent, "it failed", now=NOW),
    "canceled over its head": lambda db, parent: work.cancel(db, parent.id, now=NOW),
}


@pytest.mark.parametrize("end", ENDS)
def test_hazard_91_with_its_parent_each_child_that_is_not_finished_ends_and_no_other(db: Database, end: str) -> None:
    parent, other = held(db), held(db, origin="mail:2", session="bob")
    done, running, anothers = child_of(db, parent), child_of(db, parent), child_of(db, other)
    work.finish(db, done, "DONE", "41 cents", now=NOW)
    ready = work.delegate(db, parent, "Look", deadline=NOW + 60, budget=1, now=NOW)
    ENDS[end](db, parent)
    assert state(db, running.id) == ("CANCELED", 1, None)
    assert state(db, ready) == ("CANCELED", 0, None)
    assert row(db, ready)["result"] == work.DELEGATION_OVER
    assert (state(db, done.id), row(db, done.id)["result"]) == (("DONE", 1, None), "41 cents")
    assert events(db, running.id) == ["work.delegated", "work.claimed", "work.canceled"]
    assert answer(work.observe, db, running, FINDING, now=NOW) == "claim_lost"
    assert answer(work.observe, db, anothers, FINDING, now=NOW) == "done"
    assert work.claim(db, "researcher", role="research", now=NOW) is None


NO_ENDS: dict[str, Callable[[Database, Claim], Any]] = {
    "released": lambda db, parent: work.release(db, parent, now=NOW),
    "retried": lambda db, parent: work.retry(db, parent, "it failed", now=NOW),
    "lost": lambda db, _: claimed(db, "worker-2", now=NOW + TTL),
}


@pytest.mark.parametrize("event", NO_ENDS)
def test_a_parent_whose_worker_is_gone_is_not_over_and_its_next_one_finds_the_child_at_work(
    db: Database, event: str
) -> None:
    parent = held(db, retries=1)
    child = child_of(db, parent, deadline=NOW + 600, origin="call:1")
    NO_ENDS[event](db, parent)
    assert answer(work.observe, db, child, FINDING, now=NOW + TTL) == "done"
    following = work.claim(db, OWNER, now=NOW + TTL) or replace(parent, generation=2, owner="worker-2")
    ask = {"deadline": NOW + 600, "budget": 5, "origin": "call:1", "now": NOW + TTL}
    assert work.delegate(db, following, "Look up the price of vanilla", **ask) == child.id


@pytest.mark.parametrize("over", ["parent canceled", "deadline"])
def test_a_child_whose_delegation_is_over_is_called_off_and_not_claimed(db: Database, over: str) -> None:
    parent = held(db)
    child = work.delegate(db, parent, "Look", deadline=NOW + 60, budget=1, now=NOW)
    own = queued(db, "mail:own", "own", role="research")
    if over == "deadline":
        assert claimed(db, role="research", now=NOW + 60).id == own
    else:
        work.cancel(db, parent.id, now=NOW)
        assert claimed(db, role="research").id == own
    assert state(db, child) == ("CANCELED", 0, None)


def test_the_same_origin_of_one_parent_is_the_same_child(db: Database) -> None:
    parent, other = held(db), held(db, origin="mail:2", session="bob")
    ask = {"deadline": NOW + 60, "budget": 1, "now": NOW}
    child = work.delegate(db, parent, "Look", origin="call:1", **ask)
    assert work.delegate(db, parent, "Look", origin="call:1", **ask) == child
    assert answer(work.delegate, db, other, "Look", origin="call:1", **ask) == "origin_taken"
    assert events(db, child) == ["work.delegated"]


def test_a_delegation_has_a_future_a_budget_and_no_grandchildren(db: Database) -> None:
    parent = held(db)
    before = facts(db)
    for wrong in ({"deadline": NOW, "budget": 1}, {"deadline": NOW + 1, "budget": 0}):
        assert answer(work.delegate, db, parent, "Look", now=NOW, **wrong) == "out_of_bounds"
    assert facts(db) == before
    child = child_of(db, parent)
    with pytest.raises(PolicyRefusal):
        work.delegate(db, child, "Look", deadline=NOW + 60, budget=1, now=NOW)


@pytest.mark.parametrize("role", ["buyer", "shop"])  # before and behind research
def test_a_claim_of_any_role_but_research_may_delegate(db: Database, role: str) -> None:
    queued(db, role=role)
    claim = claimed(db, role=role)
    assert answer(work.delegate, db, claim, "Look", deadline=NOW + 60, budget=1, now=NOW) == "done"


# --- looking ----------------------------------------------------------------------------------------------


def test_what_is_open_is_counted_by_kind_and_no_further_than_asked(db: Database) -> None:
    running, done = held(db, origin="1", session="1"), held(db, origin="2", session="2")
    work.finish(db, done, "DONE", now=NOW)
    for n in range(3, 6):
        queued(db, str(n), str(n))
    queued(db, "6", "6", available_after=60)
    db.connection.execute("UPDATE assistant_work SET status = 'PARKED' WHERE origin = '3'")
    counts = {"running": 1, "ready": 2, "delayed": 1, "parked": 1}
    assert work.count_open(db.connection) == assistant_service.health(db).work == counts
    assert work.count_open(db.connection, limit=1) == dict.fromkeys(counts, 1)
    work.cancel(db, running.id, now=NOW)
    assert work.count_open(db.connection)["running"] == 0


# --- the transcript ---------------------------------------------------------------------------------------


def test_the_transcript_gives_back_what_was_observed(db: Database) -> None:
    claim = held(db)
    said = [{"role": "user", "content": 'Grüße, "Lucy" \\ \\u0000 🍦\n'}, {"n": 2**70, "deep": [None, True, 0.5]}]
    for message in said:
        work.observe(db, claim, message, now=NOW)
    lines = work.transcript(db.connection, claim.id)
    assert [json.loads(line["message"]) for line in lines] == said
    (second,) = work.transcript(db.connection, claim.id, after=lines[0]["seq"])
    assert tuple(second) == tuple(lines[1])


DEEP: dict[str, Any] = {}
for _ in range(5_000):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("message", "category"),
    [
        ({"x": float("nan")}, "invalid_value"),
        ({"x": float("-inf")}, "invalid_value"),
        ({"x": object()}, "invalid_value"),
        ({"x": "a\0b"}, "invalid_text"),
        ({"x": "\\\0"}, "invalid_text"),
        ({"\0": 1}, "invalid_text"),
        ({"x": "half \udc00"}, "invalid_text"),
        ({"x": "y" * work.MAX_TEXT_CHARACTERS}, "out_of_bounds"),
        (DEEP, "invalid_value"),
        *[(other, "invalid_value") for other in (None, [FINDING], "a finding", 1, True, ())],
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else None,
)
def test_a_message_that_is_no_object_or_that_one_engine_could_not_hold_is_refused_on_both(
    db: Database, message: Any, category: str
) -> None:
    claim = held(db)
    before = facts(db)
    assert answer(work.observe, db, claim, message, now=NOW) == category
    assert facts(db) == before
    assert answer(work.observe, db, claim, {}, now=NOW) == "done"


@pytest.mark.parametrize("table", ["assistant_transcript", "assistant_delegations"])
def test_transcript_and_delegations_only_grow(db: Database, table: str) -> None:
    work.observe(db, child_of(db, held(db)), FINDING, now=NOW)
    for change in (f"DELETE FROM {table}", f"UPDATE {table} SET {'budget' if 'del' in table else 'generation'} = 9"):
        with pytest.raises(LedgerFault):
            db.connection.execute(change)
    assert db.connection.execute(f"SELECT count(*) FROM {table}").rows[0][0] == 1


# --- time -------------------------------------------------------------------------------------------------


def test_hazard_46_a_clock_that_goes_back_reorders_nothing_and_its_generations_still_rule(db: Database) -> None:
    first = queued(db, "1", now=NOW + 3600)
    queued(db, "2", now=NOW)
    old = claimed(db, now=NOW + 3600)
    assert old.id == first
    assert work.claim(db, "worker-2", now=NOW) is None  # held an hour longer than was meant; `cancel` would end it
    fresh = claimed(db, "worker-2", now=NOW + 3600 + TTL)
    assert answer(work.observe, db, old, FINDING, now=NOW) == "claim_lost"
    assert answer(work.observe, db, fresh, FINDING, now=NOW) == "done"


@pytest.mark.parametrize("year", [0, 4_294_967_296], ids=["1970", "2106"])
def test_hazard_46_claims_hold_at_the_ends_of_other_calendars(db: Database, year: int) -> None:
    queued(db, now=year)
    claim = claimed(db, now=year)
    assert answer(work.observe, db, claim, FINDING, now=year + TTL - 1) == "done"
    assert answer(work.observe, db, claim, FINDING, now=year + TTL) == "claim_lost"


@pytest.mark.parametrize("value", ["'garbage'", "''", "NULL", "-1", "253402300800000000"])
def test_hazard_47_an_expiry_that_is_no_time_cannot_be_stored(db: Database, value: str) -> None:
    claim = held(db)
    with pytest.raises(LedgerFault):
        db.connection.execute(f"UPDATE assistant_work SET expires_at = {value} WHERE id = ?", (claim.id,))
    assert answer(work.observe, db, claim, FINDING, now=NOW) == "done"


def test_hazard_55_an_owner_is_a_name_and_never_a_process_to_signal(db: Database) -> None:
    queued(db)
    claim = claimed(db, owner="1")
    assert claimed(db, owner="2", now=NOW + TTL).generation == claim.generation + 1


def test_without_a_time_of_its_own_an_act_goes_by_the_ledgers_clock(db: Database) -> None:
    work.enqueue(db, "mail:1", "lucy", PROMPT)
    claim = work.claim(db, OWNER, ttl=3600)
    assert claim
    work.observe(db, claim, FINDING)
    with pytest.raises(AuthorityLost):
        work.assert_current(db.connection, claim, now=time.time() + 3601)
    assert time.time() + 3500 < work.renew(db, claim, 3600) < time.time() + 3700


# --- beside each other ------------------------------------------------------------------------------------

ACTS: dict[str, Callable[[Database, Claim], Any]] = {
    "observe": lambda db, claim: work.observe(db, claim, FINDING, now=NOW + 1),
    "renew": lambda db, claim: work.renew(db, claim, now=NOW + 1),
    "release": lambda db, claim: work.release(db, claim, now=NOW + 1),
    "retry": lambda db, claim: work.retry(db, claim, "again", now=NOW + 1),
    "finish": lambda db, claim: work.finish(db, claim, "DONE", now=NOW + 1),
    "cancel": lambda db, claim: work.cancel(db, claim.id, now=NOW + 1),
}


@pytest.mark.parametrize("act", ACTS)
def test_what_is_done_to_one_item_changes_no_row_of_another(db: Database, act: str) -> None:
    claim = held(db, retries=1)
    others = [
        held(db, origin="mail:2", session="rick", retries=1).id,
        queued(db, origin="mail:3", session="lucy"),
        queued(db, origin="mail:4", session="jack"),
    ]
    before = [row(db, other) for other in others]
    assert answer(ACTS[act], db, claim) == "done"
    assert [row(db, other) for other in others] == before


def test_a_claim_of_one_item_changes_no_row_of_another(db: Database) -> None:
    taken, other = queued(db), queued(db, origin="mail:2", session="rick")
    before = row(db, other)
    assert claimed(db).id == taken
    assert row(db, other) == before


def test_an_item_that_ended_while_it_was_told_to_wait_stays_as_it_ended(db: Database) -> None:
    claim = held(db)
    assert not work.retry(db, claim, "no more", available_after=10, now=NOW)
    ended = row(db, claim.id)
    assert work.claim(db, OWNER, now=NOW + 20) is None
    assert row(db, claim.id) == ended


def test_however_many_are_ready_an_item_whose_time_has_come_is_found(db: Database) -> None:
    work.enqueue_many(db, [(f"mail:{n}", "rick", PROMPT) for n in range(work.MAX_GIVEN_BACK + 2)], now=NOW)
    claimed(db, ttl=work.MAX_TTL_SECONDS)
    delayed = queued(db, origin="later", available_after=10)
    assert work.claim(db, OWNER, now=NOW + 9) is None
    assert claimed(db, now=NOW + 10).id == delayed


def test_an_older_item_of_another_role_does_not_stand_in_front_of_its_session(db: Database) -> None:
    queued(db, role="research")
    item = queued(db, origin="mail:2")
    assert claimed(db).id == item


@pytest.mark.parametrize("digit", ["0", "f"])
def test_a_marker_of_any_other_epoch_refuses_a_write(db: Database, digit: str) -> None:
    claim = held(db)
    db.connection.authority.write_text(f"epoch_{digit * 32}\n")
    assert answer(work.observe, db, claim, FINDING, now=NOW) == "epoch_replaced"


def test_a_batch_may_be_as_large_as_its_limit_and_say_all_that_can_be_said(db: Database) -> None:
    extras = {"role": "shop", "subject": "tea", "control": True, "available_after": 1.0, "retries": 2, "now": NOW}
    assert extras.keys() == work.Extras.__annotations__.keys()
    batch = [(f"mail:{n}", "lucy", PROMPT) for n in range(work.MAX_BATCH)]
    assert answer(work.enqueue_many, db, batch, **extras) == "done"


def test_a_claim_may_last_as_long_and_be_of_as_many_as_the_limit_says(db: Database) -> None:
    claim = held(db)
    assert answer(work.renew, db, claim, work.MAX_TTL_SECONDS, now=NOW) == "done"
    assert answer(work.claim_many, db, OWNER, work.MAX_BATCH, ttl=work.MAX_TTL_SECONDS, now=NOW) == "done"
    assert answer(work.finish_and_claim, db, claim, "DONE", ttl=0, now=NOW) == "out_of_bounds"
    assert answer(work.finish_and_claim, db, claim, "DONE", ttl=work.MAX_TTL_SECONDS, now=NOW) == "done"


def test_a_claim_may_be_shorter_than_a_second(db: Database) -> None:
    queued(db)
    claim, following = claimed(db, ttl=0.5), queued(db, "mail:2")
    assert work.renew(db, claim, 0.5, now=NOW + 0.25) == NOW + 0.75
    assert answer(work.finish_and_claim, db, claim, "DONE", ttl=0.5, now=NOW + 0.5) == "done"
    assert row(db, following)["expires_at"] == (NOW + 1) * 1_000_000
