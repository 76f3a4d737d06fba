"""Races between real processes, deaths at every statement, and what PostgreSQL must lock so that neither can lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from threading import Event
from typing import Any

import pytest
from conftest import Location
from support import (
    ACTOR,
    answer,
    at_one_barrier,
    attempt_on,
    finish,
    hook_after,
    in_a_session,
    killed_after_statement,
    ledger_facts,
    new_assignment,
    recover,
    renew_attempt,
    run_of,
    until_blocked,
)

from sovereign_agent import assistant_work, fencing, relay
from sovereign_agent.assistant_work import Claim
from sovereign_agent.clock import ManualClock, moment
from sovereign_agent.database import Database, Migration, admit
from sovereign_agent.fencing import ACTOR_LEASE_TTL, EXECUTION_ATTEMPT_TTL
from sovereign_agent.records import ActorLease, Assignment, ExecutionAttempt

RED, BLUE = "proc_red", "proc_blue"
NO_TIME = timedelta(0)
DAY = timedelta(days=1)


# --- one barrier, real processes --------------------------------------------------------------------------


def take_the_lease(number: int, location: Location) -> str:
    return in_a_session(location, lambda db: answer(fencing.acquire_actor_lease, db, ACTOR, f"proc_{number}"))


@pytest.mark.parametrize("run_out", [False, True], ids=["free", "run out"])
def test_only_one_contender_wins_a_contested_lease(db: Database, location: Location, *, run_out: bool) -> None:
    before = fencing.acquire_actor_lease(db, ACTOR, "proc_dead", ttl=NO_TIME) if run_out else None
    said = at_one_barrier(8, take_the_lease, location)
    assert sorted(said) == ["actor_lease_held"] * 7 + ["done"]
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    assert lease.process_identity == f"proc_{said.index('done')}"
    assert lease.fencing_token > (before.fencing_token if before else 0)


def claim_the_message(number: int, location: Location, message_id: str, owners: list[str]) -> Any:
    return in_a_session(location, lambda db: relay.claim(db, message_id, owners[number]).fencing_token)


def test_only_the_addressed_one_of_several_contenders_wins_a_contested_lease_on_a_message(
    db: Database, location: Location
) -> None:
    message = relay.send(db, "master", ACTOR, "s", "b")
    said = at_one_barrier(4, claim_the_message, location, message.id, ["a", ACTOR, "b", "c"])
    claimed = relay.get_message(db, message.id)
    assert (claimed.claim_owner, claimed.deliveries) == (ACTOR, 1)
    assert sorted(map(str, said)) == sorted([str(claimed.fencing_token)] + ["authority_refusal"] * 3)


@pytest.mark.parametrize("run_out", [False, True], ids=["new", "run out"])
def test_two_processes_of_one_actor_get_the_same_claim_and_count_one_delivery(
    db: Database, location: Location, *, run_out: bool
) -> None:
    for _ in range(5):
        message = relay.send(db, "master", ACTOR, "s", "b")
        stale = relay.claim(db, message.id, ACTOR, ttl=NO_TIME).fencing_token if run_out else 0
        tokens = set(at_one_barrier(2, claim_the_message, location, message.id, [ACTOR, ACTOR]))
        claimed = relay.get_message(db, message.id)
        assert tokens == {claimed.fencing_token}
        assert claimed.fencing_token != stale
        assert claimed.deliveries == 1 + run_out


TOKEN_LOG = {
    "sqlite": """
CREATE TABLE token_log (seq INTEGER PRIMARY KEY AUTOINCREMENT, token INTEGER NOT NULL);
CREATE TRIGGER log_insert AFTER INSERT ON actor_leases
 BEGIN INSERT INTO token_log (token) VALUES (NEW.fencing_token); END;
CREATE TRIGGER log_update AFTER UPDATE ON actor_leases
 BEGIN INSERT INTO token_log (token) VALUES (NEW.fencing_token); END;
""",
    "postgresql": """
CREATE TABLE token_log (seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, token BIGINT NOT NULL);
CREATE FUNCTION log_token() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO token_log (token) VALUES (NEW.fencing_token); RETURN NEW; END $$;
CREATE TRIGGER log_tokens AFTER INSERT OR UPDATE ON actor_leases FOR EACH ROW EXECUTE FUNCTION log_token();
""",
}


def take_it_again_and_again(number: int, location: Location, times: int) -> int:
    def takes(db: Database) -> int:
        said = [answer(fencing.acquire_actor_lease, db, ACTOR, f"proc_{number}", ttl=NO_TIME) for _ in range(times)]
        return said.count("done")

    return in_a_session(location, takes)


def test_tokens_only_grow_in_the_order_of_the_holders_under_eight_racing_processes(
    db: Database, location: Location
) -> None:
    db.extend("witness", [Migration(1, "token_log", TOKEN_LOG[location.engine], 1)])
    won = at_one_barrier(8, take_it_again_and_again, location, 15)
    tokens = [row[0] for row in db.connection.execute("SELECT token FROM token_log ORDER BY seq")]
    assert len(tokens) == sum(won) >= 100
    assert tokens == sorted(set(tokens))


def take_the_attempt(_number: int, location: Location, assignment_id: str, lease: ActorLease) -> str:
    return in_a_session(location, lambda db: answer(attempt_on, db, assignment_id, lease, None))


@pytest.mark.parametrize("run_out", [False, True], ids=["first", "takeover"])
def test_only_one_of_eight_processes_gets_an_execution_attempt(
    db: Database, location: Location, *, run_out: bool
) -> None:
    assignment = new_assignment(db)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED)
    if run_out:
        attempt_on(db, assignment.id, lease, None, ttl=NO_TIME)
    said = at_one_barrier(8, take_the_attempt, location, assignment.id, lease)
    assert sorted(said) == ["done"] + ["execution_attempt_held"] * 7
    facts = ledger_facts(db, assignment.id)
    assert facts["attempts"] == ["RECOVERED"] * run_out + ["ACTIVE"]
    assert facts["receipts"] == [("failed", "worker_lost")] * run_out + [None]


def release_or_start(number: int, location: Location, rounds: list[tuple[str, ActorLease]]) -> list[str]:
    def take_part(db: Database) -> list[str]:
        if number:
            return [answer(attempt_on, db, assignment_id, lease, None) for assignment_id, lease in rounds]
        return [
            str(fencing.release_actor_lease(db, lease.actor_id, lease.process_identity, lease.fencing_token))
            for _, lease in rounds
        ]

    return in_a_session(location, take_part)


def test_a_release_and_a_new_attempt_never_leave_an_attempt_without_its_lease(db: Database, location: Location) -> None:
    rounds = [
        (new_assignment(db, f"actor-{n}").id, fencing.acquire_actor_lease(db, f"actor-{n}", RED)) for n in range(30)
    ]
    released, started = at_one_barrier(2, release_or_start, location, rounds)
    for (assignment_id, lease), gone, start in zip(rounds, released, started, strict=True):
        assert (gone, start) in {("True", "actor_lease_lost"), ("False", "done")}
        running = ledger_facts(db, assignment_id)["pointer"] == "ACTIVE"
        assert running == (start == "done") == (fencing.current_actor_lease(db, lease.actor_id) is not None)


def end_them_all(number: int, location: Location, attempts: list[ExecutionAttempt], clock: ManualClock) -> list[bool]:
    """Process 0 is the worker that comes late; the others are supervisors."""

    def take_part(db: Database) -> list[bool]:
        if number:
            return [recover(db, attempt, clock) for attempt in attempts]
        return [answer(finish, db, attempt, clock) == "done" for attempt in attempts]

    return in_a_session(location, take_part)


def test_of_two_supervisors_and_a_late_worker_exactly_one_writes_the_end(
    db: Database, location: Location, clock: ManualClock
) -> None:
    attempts = [run_of(db, clock, lease_ttl=DAY) for _ in range(40)]
    clock.advance(EXECUTION_ATTEMPT_TTL)
    said = at_one_barrier(3, end_them_all, location, attempts, clock)
    for attempt, *won in zip(attempts, *said, strict=True):
        assert sorted(won) == [False, False, True]
        facts = ledger_facts(db, attempt.assignment_id)
        ends = Counter(facts["events"])
        assert (facts["pointer"], len(facts["receipts"]), ends["assignment.finished"]) == (None, 1, 1)
        recovered = facts["attempts"] == ["RECOVERED"]
        assert facts["receipts"] == [("failed", "worker_lost") if recovered else ("completed", "")]
        assert (facts["assignment"], ends["assignment.recovered"]) == (("FAILED", 1) if recovered else ("COMPLETED", 0))


# --- a SIGKILL after each statement: both or neither ------------------------------------------------------


def start(location: Location, assignment_id: str, lease: ActorLease, clock: ManualClock) -> None:
    in_a_session(location, attempt_on, assignment_id, lease, clock)


def end(location: Location, attempt: ExecutionAttempt, clock: ManualClock) -> None:
    in_a_session(location, finish, attempt, clock)


def both_or_neither(location: Location, prepare: Callable[[Database], Any], act: Callable[..., None]) -> None:
    """Kill `act` after each of its statements in turn: before its commit nothing is there, after it everything is."""
    seen: list[dict[str, Any]] = []
    killed = True
    while killed:
        assignment_id, *arguments = in_a_session(location, prepare)
        before = in_a_session(location, ledger_facts, assignment_id)
        killed = killed_after_statement(len(seen) + 1, act, location, *arguments)
        seen.append(in_a_session(location, ledger_facts, assignment_id))
    *killed_before_its_commit, killed_after_it, survived = seen
    assert killed_before_its_commit == [before] * len(killed_before_its_commit)
    assert killed_after_it == survived != before
    assert len(seen) > 9


@pytest.mark.parametrize("run_out", [False, True], ids=["first", "takeover"])
def test_a_worker_killed_inside_the_acquisition_of_its_attempt_has_all_of_it_or_nothing(
    location: Location, clock: ManualClock, *, run_out: bool
) -> None:
    def prepare(db: Database) -> Any:
        assignment = new_assignment(db, clock=clock)
        lease = fencing.acquire_or_renew_actor_lease(db, ACTOR, RED, clock=clock)
        if run_out:
            attempt_on(db, assignment.id, lease, clock, ttl=NO_TIME)
        return assignment.id, assignment.id, lease, clock

    both_or_neither(location, prepare, start)


def test_a_worker_killed_inside_its_terminal_write_has_written_all_of_it_or_nothing(
    location: Location, clock: ManualClock
) -> None:
    def prepare(db: Database) -> Any:
        attempt = run_of(db, clock)
        return attempt.assignment_id, attempt, clock

    both_or_neither(location, prepare, end)


# --- what must be locked so that a decision still holds when it is written ---------------------------------


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_takeover_that_happens_while_an_attempt_waits_for_the_ledger_leaves_it_without_authority(
    db: Database, location: Location, clock: ManualClock
) -> None:
    assignment = new_assignment(db, clock=clock)
    old = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    before = ledger_facts(db, assignment.id)
    holder = location.open()
    with ThreadPoolExecutor() as pool:
        with holder.immediate():
            waiter = pool.submit(answer, in_a_session, location, attempt_on, assignment.id, old, clock)
            until_blocked(db, waiter)
            clock.advance(ACTOR_LEASE_TTL)
            current = fencing.acquire_actor_lease(db, ACTOR, BLUE, clock=clock)
        assert waiter.result(20) == "actor_lease_lost"
    holder.close()
    assert ledger_facts(db, assignment.id) == before
    assert answer(attempt_on, db, assignment.id, current, clock) == "done"


def with_a_rival(
    db: Database,
    location: Location,
    act: Callable[[Database], Any],
    *,
    after: str,
    rival: Callable[[Database], Any],
) -> tuple[Any, Any]:
    """Stop `act` right after a statement, start `rival`, see it wait, let both go on; return what each one said."""
    reached, go_on = Event(), Event()

    def stop() -> None:
        reached.set()
        assert go_on.wait(9)

    def stopped(session: Database) -> Any:
        with hook_after(session.connection, after, stop):
            return act(session)

    with ThreadPoolExecutor() as pool:
        actor = pool.submit(in_a_session, location, stopped)
        try:
            assert reached.wait(20)
            waiter = pool.submit(in_a_session, location, rival)
            until_blocked(db, waiter)
        finally:
            go_on.set()
        return actor.result(20), waiter.result(20)


def test_a_takeover_cannot_come_between_the_check_of_the_lease_and_the_insert_of_the_attempt(
    db: Database, location: Location, clock: ManualClock
) -> None:
    assignment = new_assignment(db, clock=clock)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)

    def takeover(session: Database) -> ActorLease:
        clock.advance(ACTOR_LEASE_TTL)
        return fencing.acquire_actor_lease(session, ACTOR, BLUE, clock=clock)

    attempt, successor = with_a_rival(
        db,
        location,
        lambda session: attempt_on(session, assignment.id, lease, clock),
        after="UPDATE assignments",
        rival=takeover,
    )
    assert successor.fencing_token > attempt.actor_lease_fencing_token == lease.fencing_token
    assert answer(finish, db, attempt, clock) == "actor_lease_lost"


def test_a_release_that_meets_an_attempt_being_inserted_waits_and_leaves_the_lease_under_it(
    db: Database, location: Location, clock: ManualClock
) -> None:
    assignment = new_assignment(db, clock=clock)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    attempt, released = with_a_rival(
        db,
        location,
        lambda session: attempt_on(session, assignment.id, lease, clock),
        after="UPDATE assignments",
        rival=lambda session: fencing.release_actor_lease(session, ACTOR, RED, lease.fencing_token),
    )
    assert released is False
    assert fencing.current_actor_lease(db, ACTOR) == lease
    assert answer(finish, db, attempt, clock) == "done"


def test_an_attempt_that_meets_a_release_of_its_lease_waits_and_is_refused(
    db: Database, location: Location, clock: ManualClock
) -> None:
    assignment = new_assignment(db, clock=clock)
    lease = fencing.acquire_actor_lease(db, ACTOR, RED, clock=clock)
    before = ledger_facts(db, assignment.id)
    released, said = with_a_rival(
        db,
        location,
        lambda session: fencing.release_actor_lease(session, ACTOR, RED, lease.fencing_token),
        after="DELETE FROM actor_leases",
        rival=lambda session: answer(attempt_on, session, assignment.id, lease, clock),
    )
    assert (released, said) == (True, "actor_lease_lost")
    assert ledger_facts(db, assignment.id) == before


def test_a_takeover_cannot_come_between_the_check_of_the_lease_and_the_terminal_write(
    db: Database, location: Location, clock: ManualClock
) -> None:
    attempt = run_of(db, clock)
    clock.advance(ACTOR_LEASE_TTL)
    _, successor = with_a_rival(
        db,
        location,
        lambda session: finish(session, attempt, clock),
        after="FROM actor_leases",
        rival=lambda session: fencing.acquire_actor_lease(session, ACTOR, BLUE, clock=clock),
    )
    assert successor.fencing_token > attempt.fencing_token
    assert ledger_facts(db, attempt.assignment_id)["receipts"] == [("completed", "")]


def test_a_renewal_that_meets_the_recovery_of_its_attempt_waits_and_is_refused(
    db: Database, location: Location, clock: ManualClock
) -> None:
    attempt = run_of(db, clock)
    behind = ManualClock(clock())
    clock.advance(EXECUTION_ATTEMPT_TTL)
    recovered, said = with_a_rival(
        db,
        location,
        lambda session: recover(session, attempt, clock),
        after="FROM execution_attempts",
        rival=lambda session: answer(renew_attempt, session, attempt, behind),
    )
    assert (recovered, said) == (True, "execution_attempt_lost")


def test_a_takeover_that_meets_the_renewal_of_the_attempt_waits_and_is_refused(
    db: Database, location: Location, clock: ManualClock
) -> None:
    attempt = run_of(db, clock, lease_ttl=DAY)
    lease = fencing.current_actor_lease(db, ACTOR)
    assert lease
    behind = ManualClock(clock())
    clock.advance(EXECUTION_ATTEMPT_TTL - timedelta(seconds=1))
    behind.set(clock())

    def takeover(session: Database) -> str:
        return answer(attempt_on, session, attempt.assignment_id, lease, clock)

    clock.advance(timedelta(seconds=1))
    renewed, said = with_a_rival(
        db,
        location,
        lambda session: renew_attempt(session, attempt, behind),
        after="UPDATE execution_attempts",
        rival=takeover,
    )
    assert renewed.expires_at > clock()
    assert said == "execution_attempt_held"
    assert ledger_facts(db, attempt.assignment_id)["attempts"] == ["ACTIVE"]


def test_a_recovery_that_meets_a_late_terminal_write_waits_for_it_and_the_two_do_not_deadlock(
    db: Database, location: Location, clock: ManualClock
) -> None:
    attempt = run_of(db, clock)
    clock.advance(EXECUTION_ATTEMPT_TTL)
    said = with_a_rival(
        db,
        location,
        lambda session: answer(finish, session, attempt, clock),
        after="UPDATE assignments",
        rival=lambda session: answer(recover, session, attempt, clock),
    )
    assert said == ("done", "done")
    facts = ledger_facts(db, attempt.assignment_id)
    assert (facts["attempts"], facts["receipts"]) == (["DONE"], [("completed", "")])


def leased(db: Database, *_: object) -> datetime:
    return fencing.acquire_actor_lease(db, "another", BLUE).acquired_at


def begun(db: Database, lease: ActorLease, assignment: Assignment, _: Claim) -> datetime:
    return attempt_on(db, assignment.id, lease, None).acquired_at


def admitted(db: Database, *_: object) -> datetime:
    with db.transaction() as connection:
        return db.now(told=admit(connection)[1])


def found_current(db: Database, _: ActorLease, __: Assignment, claim: Claim) -> datetime:
    with db.transaction() as connection:
        return moment(assistant_work.assert_current(connection, claim))


@pytest.mark.parametrize(
    ("locked", "judged"),
    [
        ("lease_tokens", leased),
        ("actor_leases", begun),
        ("assistant_control", admitted),
        ("assistant_control", found_current),
        ("assistant_work", found_current),
    ],
    ids=["token", "lease", "admission", "epoch", "claim"],
)
def test_hazard_46_without_a_clock_of_its_own_a_waiter_is_judged_by_the_time_it_got_in(
    location: Location, locked: str, judged: Callable[..., datetime]
) -> None:
    db = location.open()
    lease, assignment = fencing.acquire_actor_lease(db, ACTOR, RED), new_assignment(db)
    assistant_work.enqueue(db, "origin", "session", "prompt")
    claim = assistant_work.claim(db, "owner")
    with ThreadPoolExecutor() as pool:
        with db.transaction() as connection:
            connection.execute(f"SELECT 1 FROM {locked} <for update>")  # and changes nothing: nothing is read again
            waiter = pool.submit(in_a_session, location, judged, lease, assignment, claim)
            until_blocked(db, waiter)
            got_in = db.now()
        assert waiter.result(20) >= got_in
    db.close()
