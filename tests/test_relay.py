"""The mailbox: one claim at a time, fenced; what runs out comes back, later each time, and not for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from conftest import Location
from support import (
    ACTOR,
    answer,
    hook_after,
    in_a_session,
    killed_after_statement,
    killed_in_a_process,
    rows,
    without_checks,
)

from sovereign_agent import assistant_service, journal, relay
from sovereign_agent.clock import LAST_MICROS, ManualClock
from sovereign_agent.database import Connection, Database
from sovereign_agent.errors import AuthorityLost
from sovereign_agent.records import Message, MessageState
from sovereign_agent.relay import CLAIM_TTL, MAX_BODY_CHARACTERS, MAX_DELIVERIES, MAX_SUBJECT_CHARACTERS
from sovereign_agent.testing.invariants import violations

TICK = timedelta(microseconds=1)
LONG = timedelta(hours=1)


def sent(db: Database, clock: ManualClock, subject: str = "s") -> Message:
    return relay.send(db, "master", ACTOR, subject, "b", clock=clock)


def claimed(db: Database, clock: ManualClock, message: Message | None = None) -> Message:
    return relay.claim(db, (message or sent(db, clock)).id, ACTOR, clock=clock)


def complete(db: Database, message: Message, clock: ManualClock) -> Message:
    assert message.fencing_token
    return relay.complete(db, message.id, ACTOR, fencing_token=message.fencing_token, clock=clock)


def history(db: Database, message: Message) -> list[str]:
    return [event.kind for event in journal.events_of(db.connection, message.id)]


# --- sending ----------------------------------------------------------------------------------------------


def test_what_is_sent_lies_in_the_recipients_inbox_and_in_nobody_elses(db: Database, clock: ManualClock) -> None:
    message = sent(db, clock)
    assert (message.state, message.fencing_token, message.deliveries) == (MessageState.NEW, None, 0)
    assert relay.inbox(db, ACTOR, clock=clock) == [message] == [relay.get_message(db, message.id)]
    assert relay.inbox(db, "another", clock=clock) == []
    assert history(db, message) == ["message.sent"]


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("subject", "", "message_size"),
        ("subject", "s" * MAX_SUBJECT_CHARACTERS, "done"),
        ("subject", "s" * (MAX_SUBJECT_CHARACTERS + 1), "message_size"),
        ("subject", "a\0b", "invalid_text"),
        ("body", "", "done"),
        ("body", "\N{SNOWMAN}" * MAX_BODY_CHARACTERS, "done"),
        ("body", "b" * (MAX_BODY_CHARACTERS + 1), "message_size"),
        ("body", "a\0b", "invalid_text"),
        ("body", "\ud800", "invalid_text"),
        ("recipient", "", "constraint_broken"),
        ("recipient", "a\0b", "invalid_text"),
        ("sender", "", "constraint_broken"),
    ],
    ids=lambda value: repr(value[:9]),
)
def test_a_message_that_is_too_large_empty_or_no_text_is_not_sent(
    db: Database, clock: ManualClock, field: str, text: str, said: str
) -> None:
    parts = {"sender": "master", "recipient": ACTOR, "subject": "s", "body": "b"} | {field: text}
    assert answer(relay.send, db, *parts.values(), clock=clock) == said
    assert [row[field] for row in rows(db, "messages")] == ([text] if said == "done" else [])
    assert len(rows(db, "events")) == (said == "done")


# --- claiming ---------------------------------------------------------------------------------------------


def test_a_claim_is_fenced_counted_and_kept_within_its_time(db: Database, clock: ManualClock) -> None:
    first = claimed(db, clock)
    assert first.fencing_token
    assert (first.state, first.claim_owner, first.deliveries) == (MessageState.CLAIMED, ACTOR, 1)
    assert first.claim_expires_at == clock() + CLAIM_TTL
    clock.advance(CLAIM_TTL - TICK)
    before = rows(db, "messages"), rows(db, "lease_tokens"), rows(db, "events")
    assert claimed(db, clock, first) == first
    assert (rows(db, "messages"), rows(db, "lease_tokens"), rows(db, "events")) == before
    assert relay.inbox(db, ACTOR, clock=clock) == []


@pytest.mark.parametrize(("offset", "over"), [(-TICK, False), (timedelta(0), True), (TICK, True)], ids=str)
def test_at_the_boundary_a_claim_is_either_kept_or_free_to_sweep_and_to_take(
    db: Database, clock: ManualClock, offset: timedelta, *, over: bool
) -> None:
    kept, swept = claimed(db, clock), claimed(db, clock)
    clock.advance(CLAIM_TTL + offset)
    assert {message.id for message in relay.inbox(db, ACTOR, clock=clock)} == ({kept.id, swept.id} if over else set())
    assert answer(claimed, db, clock, kept) == "done"
    assert (relay.get_message(db, kept.id).fencing_token != kept.fencing_token) == over
    assert [*relay.sweep_expired_claims(db, clock)] == ([swept.id] if over else [])


def test_an_unaddressed_actor_may_not_claim_and_cannot_settle(db: Database, clock: ManualClock) -> None:
    message = sent(db, clock)
    assert answer(relay.claim, db, message.id, "another", clock=clock) == "authority_refusal"
    assert relay.get_message(db, message.id) == message
    mine = claimed(db, clock, message)
    assert mine.fencing_token
    stolen = answer(relay.complete, db, mine.id, "another", fencing_token=mine.fencing_token, clock=clock)
    assert stolen == "fencing_token_stale"
    assert answer(relay.dead_letter, db, replace(mine, claim_owner="another"), clock=clock) == "fencing_token_stale"
    assert relay.get_message(db, message.id) == mine
    clock.advance(CLAIM_TTL)
    assert answer(relay.claim, db, message.id, "another", clock=clock) == "authority_refusal"


def test_a_message_is_given_to_nobody_whose_name_comes_before_or_behind_its_recipients(
    db: Database, clock: ManualClock
) -> None:
    message = sent(db, clock)
    for actor in ("", "a", ACTOR.upper(), f"{ACTOR}-2", "zed"):
        assert answer(relay.claim, db, message.id, actor, clock=clock) == "authority_refusal"
    assert relay.get_message(db, message.id) == message


@pytest.mark.parametrize("end", ["complete", "dead_letter"])
def test_what_is_settled_is_never_claimed_again(db: Database, clock: ManualClock, end: str) -> None:
    message = claimed(db, clock)
    if end == "complete":
        complete(db, message, clock)
    else:
        relay.dead_letter(db, message, clock=clock)
    clock.advance(LONG)
    assert answer(claimed, db, clock, message) == "illegal_move"
    assert [*relay.sweep_expired_claims(db, clock)] == []
    assert relay.inbox(db, ACTOR, clock=clock) == []
    assert answer(relay.claim, db, "msg_none", ACTOR, clock=clock) == "message_missing"


# --- settling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stale", "said"),
    [
        ({}, "done"),
        ({"token": -1}, "fencing_token_stale"),
        ({"token": +1}, "fencing_token_stale"),
        ({"actor_id": "another"}, "fencing_token_stale"),
        ({"actor_id": ""}, "fencing_token_stale"),
        ({"message_id": "msg_none"}, "message_missing"),
    ],
    ids=str,
)
@pytest.mark.parametrize("end", ["complete", "dead_letter"])
def test_settling_a_message_needs_every_field_of_its_claim(
    db: Database, clock: ManualClock, end: str, stale: dict[str, Any], said: str
) -> None:
    message = claimed(db, clock)
    presented = replace(
        message,
        id=stale.get("message_id", message.id),
        claim_owner=stale.get("actor_id", ACTOR),
        fencing_token=(message.fencing_token or 0) + stale.get("token", 0),
    )
    before = rows(db, "messages"), rows(db, "events")
    settle: dict[str, Callable[[], Message]] = {
        "complete": lambda: relay.complete(
            db,
            presented.id,
            presented.claim_owner or "",
            fencing_token=presented.fencing_token or 0,
            clock=clock,
        ),
        "dead_letter": lambda: relay.dead_letter(db, presented, clock=clock),
    }
    assert answer(settle[end]) == said
    assert ((rows(db, "messages"), rows(db, "events")) == before) == (said != "done")


def test_a_message_object_without_a_claim_settles_nothing(db: Database, clock: ManualClock) -> None:
    unclaimed = sent(db, clock)
    assert answer(relay.dead_letter, db, unclaimed, clock=clock) == "fencing_token_stale"
    claim = claimed(db, clock, unclaimed)
    assert answer(relay.dead_letter, db, unclaimed, clock=clock) == "fencing_token_stale"
    assert relay.dead_letter(db, claim, clock=clock).state is MessageState.DEAD


def test_expiry_alone_does_not_keep_the_owner_from_settling(db: Database, clock: ManualClock) -> None:
    message = claimed(db, clock)
    clock.advance(CLAIM_TTL + LONG)
    assert complete(db, message, clock).state is MessageState.DONE
    assert history(db, message) == ["message.sent", "message.claimed", "message.done"]


def test_a_settled_message_is_not_settled_twice(db: Database, clock: ManualClock) -> None:
    message = claimed(db, clock)
    complete(db, message, clock)
    with pytest.raises(AuthorityLost) as refused:
        complete(db, message, clock)
    assert refused.value.category == "fencing_token_stale"
    assert "DONE" in refused.value.why


# --- sweeping ---------------------------------------------------------------------------------------------


def test_a_sweep_puts_what_ran_out_back_for_every_recipient_and_its_old_token_settles_nothing(
    db: Database, clock: ManualClock
) -> None:
    lapsed = claimed(db, clock)
    other = relay.send(db, "master", "another", "s", "b", clock=clock)
    relay.claim(db, other.id, "another", clock=clock)
    held = relay.claim(db, sent(db, clock).id, ACTOR, ttl=LONG, clock=clock)
    clock.advance(CLAIM_TTL)
    assert sorted(relay.sweep_expired_claims(db, clock)) == sorted([lapsed.id, other.id])
    swept = relay.get_message(db, lapsed.id)
    assert (swept.state, swept.claim_owner, swept.fencing_token) == (MessageState.NEW, None, None)
    assert swept.deliveries == 1
    assert relay.get_message(db, held.id) == held
    assert answer(complete, db, lapsed, clock) == "fencing_token_stale"
    assert history(db, lapsed) == ["message.sent", "message.claimed", "message.swept"]
    assert [*relay.sweep_expired_claims(db, clock)] == []


def test_a_new_epoch_says_in_the_history_of_each_claimed_message_that_it_took_the_claim_away(
    db: Database, clock: ManualClock
) -> None:
    held, new = claimed(db, clock), sent(db, clock)
    assistant_service.new_epoch(db, "operator", "why")
    assert history(db, held) == ["message.sent", "message.claimed", "message.revoked"]
    assert journal.events_of(db.connection, held.id)[-1].detail == {"token": held.fencing_token}
    assert history(db, new) == ["message.sent"]
    assert violations(db.connection) == []


def test_a_new_epoch_brings_no_settled_message_back(db: Database, clock: ManualClock) -> None:
    done, dead, held = claimed(db, clock), claimed(db, clock), claimed(db, clock)
    complete(db, done, clock)
    relay.dead_letter(db, dead, clock=clock)
    settled = [row for row in rows(db, "messages") if row["id"] != held.id]
    assistant_service.new_epoch(db, "operator", "why")
    assert [row for row in rows(db, "messages") if row["id"] != held.id] == settled
    assert relay.get_message(db, held.id).state is MessageState.NEW


def test_a_sweep_of_many_small_batches_gets_them_all(db: Database, clock: ManualClock) -> None:
    messages = {claimed(db, clock).id for _ in range(7)}
    clock.advance(CLAIM_TTL)
    assert set(relay.sweep_expired_claims(db, clock, batch=3)) == messages


CHANGES_IN_BETWEEN = {
    "completed": "UPDATE messages SET state = 'DONE' WHERE id = ?",
    "claimed again": "UPDATE messages SET fencing_token = fencing_token + 1000 WHERE id = ?",
    "running again": "UPDATE messages SET claim_expires_at = claim_expires_at + 3600000000 WHERE id = ?",
    "swept by another": "UPDATE messages SET state = 'NEW', claim_owner = NULL, fencing_token = NULL,"
    " claim_expires_at = NULL WHERE id = ?",
}


@pytest.mark.parametrize("change", CHANGES_IN_BETWEEN)
@pytest.mark.parametrize("deliveries", [1, MAX_DELIVERIES], ids=["to NEW", "to DEAD"])
def test_a_message_that_changed_between_the_sweeps_look_and_its_write_is_left_alone(
    db: Database, location: Location, clock: ManualClock, change: str, deliveries: int
) -> None:
    changed, untouched = claimed(db, clock), claimed(db, clock)
    db.connection.execute("UPDATE messages SET deliveries = ?", (deliveries,))
    clock.advance(CLAIM_TTL)
    between: list[Any] = []

    def meanwhile() -> None:
        # SQLite lets nobody else in between, so there the sweep's own session stands in for the rival.
        def rival(connection: Connection) -> None:
            connection.execute(CHANGES_IN_BETWEEN[change], (changed.id,))

        if db.engine == "sqlite":
            rival(db.connection)
        else:
            in_a_session(location, lambda other: rival(other.connection))
        between.extend(dict(row) for row in rows(db, "messages") if row["id"] == changed.id)

    with hook_after(db.connection, "FROM messages", meanwhile):
        assert [*relay.sweep_expired_claims(db, clock)] == [untouched.id]
    assert [row for row in rows(db, "messages") if row["id"] == changed.id] == between
    assert history(db, changed) == ["message.sent", "message.claimed"]


# --- deliveries -------------------------------------------------------------------------------------------


def claim_and_die(location: Location, message_id: str, clock: ManualClock) -> None:
    relay.claim(location.open(), message_id, ACTOR, clock=clock)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("swept", [True, False], ids=["with sweeps", "without sweeps"])
def test_a_message_that_nobody_survives_is_claimed_exactly_so_often_and_then_dead(
    db: Database, location: Location, clock: ManualClock, *, swept: bool
) -> None:
    poison = sent(db, clock)
    for delivery in range(1, MAX_DELIVERIES + 1):
        assert [message.id for message in relay.inbox(db, ACTOR, clock=clock)] == [poison.id]
        assert killed_in_a_process(claim_and_die, location, poison.id, clock)
        assert relay.get_message(db, poison.id).deliveries == delivery
        clock.advance(CLAIM_TTL)
        if swept:
            assert [*relay.sweep_expired_claims(db, clock)] == [poison.id]
            clock.advance(LONG)
    assert relay.inbox(db, ACTOR, clock=clock) == []
    assert answer(claimed, db, clock, poison) == "illegal_move"
    assert [*relay.sweep_expired_claims(db, clock)] == ([] if swept else [poison.id])
    dead = relay.get_message(db, poison.id)
    assert (dead.state, dead.deliveries) == (MessageState.DEAD, MAX_DELIVERIES)
    assert history(db, poison).count("message.claimed") == MAX_DELIVERIES
    assert history(db, poison)[-1] == "message.dead"


def test_a_message_that_was_interrupted_a_few_times_can_still_be_completed(db: Database, clock: ManualClock) -> None:
    message = sent(db, clock)
    for _ in range(3):
        claimed(db, clock, message)
        clock.advance(LONG)
        relay.sweep_expired_claims(db, clock)
        clock.advance(LONG)
    assert complete(db, claimed(db, clock, message), clock).state is MessageState.DONE


def test_a_delivery_is_counted_even_if_the_handler_dies_right_after_the_claim_commits_and_not_before(
    db: Database, location: Location, clock: ManualClock
) -> None:
    counts: list[int] = []
    killed = True
    while killed:
        message = sent(db, clock)
        killed = killed_after_statement(len(counts) + 1, take, location, message.id, clock)
        counts.append(relay.get_message(db, message.id).deliveries)
        assert history(db, message).count("message.claimed") == counts[-1]
    assert counts == [0] * (len(counts) - 2) + [1, 1]
    assert len(counts) > 5


def take(location: Location, message_id: str, clock: ManualClock) -> None:
    in_a_session(location, relay.claim, message_id, ACTOR, clock=clock)


def test_reading_an_inbox_changes_nothing(db: Database, clock: ManualClock) -> None:
    sent(db, clock)
    claimed(db, clock)
    clock.advance(CLAIM_TTL)
    tables = ("messages", "events", "lease_tokens")
    before = [rows(db, table) for table in tables]
    assert len(relay.inbox(db, ACTOR, clock=clock)) == 2
    assert [rows(db, table) for table in tables] == before


# --- fairness (hazard 57) ---------------------------------------------------------------------------------


def test_an_inbox_is_first_in_first_out_and_ties_go_by_sequence(db: Database, clock: ManualClock) -> None:
    subjects = [f"s{number}" for number in range(12)]
    for number, subject in enumerate(subjects):
        sent(db, clock, subject)
        if number % 3 == 0:
            clock.advance(TICK)
    assert [message.subject for message in relay.inbox(db, ACTOR, clock=clock)] == subjects
    assert [message.subject for message in relay.inbox(db, ACTOR, limit=5, clock=clock)] == subjects[:5]


def test_each_lapse_lets_a_message_rest_longer_behind_the_others(db: Database, clock: ManualClock) -> None:
    message = sent(db, clock)
    rests: list[float] = []
    for _ in range(MAX_DELIVERIES - 1):
        claimed(db, clock, message)
        clock.advance(CLAIM_TTL)
        relay.sweep_expired_claims(db, clock)
        start = clock()
        while not relay.inbox(db, ACTOR, clock=clock):
            clock.advance(timedelta(seconds=1))
        rests.append((clock() - start).total_seconds())
    assert rests == [0, 2, 4, 8]


@pytest.mark.parametrize("swept", [True, False], ids=["with sweeps", "without sweeps"])
def test_hazard_57_eight_messages_that_always_lapse_do_not_keep_a_thousand_from_being_claimed(
    db: Database, clock: ManualClock, *, swept: bool
) -> None:
    poison = {sent(db, clock).id for _ in range(8)}
    db.connection.execute(
        """
        WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)
        INSERT INTO messages (id, sender, recipient, subject, body, state, ready_at, created_at)
        SELECT 'msg_' || i, 'master', ?, 's', 'b', 'NEW', ready_at, ready_at
          FROM n, (SELECT ready_at FROM messages LIMIT 1) AS first
        """,
        (ACTOR,),
    )
    seen: set[str] = set()
    rounds = 0
    while len(seen) < 1008:
        batch = relay.inbox(db, ACTOR, limit=50, clock=clock)
        for message in batch:
            claim = claimed(db, clock, message)
            if message.id not in poison:
                complete(db, claim, clock)
        seen |= {message.id for message in batch}
        clock.advance(CLAIM_TTL)
        if swept:
            relay.sweep_expired_claims(db, clock)
        rounds += 1
        assert rounds <= 1008 // (50 - 8) + MAX_DELIVERIES


# --- rows that nobody should have written (hazard 47) -----------------------------------------------------


@pytest.mark.parametrize("value", [-1, -(10**17), LAST_MICROS + 1, 2**62, None])
def test_a_corrupt_claim_is_granted_to_nobody_and_its_readers_survive(
    db: Database, clock: ManualClock, value: int | None
) -> None:
    corrupt, sound = claimed(db, clock), claimed(db, clock)
    clock.advance(CLAIM_TTL)
    without_checks(db, "messages")
    db.connection.execute("UPDATE messages SET claim_expires_at = ? WHERE id = ?", (value, corrupt.id))
    assert answer(claimed, db, clock, corrupt) == ("done" if _far(value) else "claim_held")
    assert [message.id for message in relay.inbox(db, ACTOR, clock=clock)] == [sound.id]
    assert answer(claimed, db, clock, sound) == "done"
    assert relay.get_message(db, corrupt.id).fencing_token == corrupt.fencing_token
    assert [*relay.sweep_expired_claims(db, clock)] == ([corrupt.id] if value is not None and value < 0 else [])


def _far(value: int | None) -> bool:
    """A claim that seems to last for thousands of years is still its owner's: it gets the same one again."""
    return value is not None and value > 0
