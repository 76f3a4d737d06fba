"""Claims of real processes: at one barrier, killed at random, killed at each statement; and what must be locked."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from conftest import Location
from support import answer, at_one_barrier, child, heard, holding, hook_after, in_a_session, killed_after_statement
from test_assistant_work import FINDING, NOW, OWNER, TTL, claimed, control, events, held, queued, row, state
from test_concurrency import with_a_rival

from sovereign_agent import assistant_work as work
from sovereign_agent.assistant_work import Claim
from sovereign_agent.database import Database
from sovereign_agent.errors import ConstraintBroken

PROCESSES = 8

# --- one barrier, real processes --------------------------------------------------------------------------


def take_one(number: int, location: Location, now: float) -> tuple[str, int] | None:
    def act(db: Database) -> tuple[str, int] | None:
        claim = work.claim(db, f"worker-{number}", now=now)
        return (claim.id, claim.generation) if claim else None

    return in_a_session(location, act)


@pytest.mark.parametrize("sessions", [1, 3, PROCESSES])
def test_eight_processes_get_one_item_of_each_session_and_never_the_same(
    db: Database, location: Location, sessions: int
) -> None:
    items = [queued(db, f"mail:{n}", f"session {n % sessions}") for n in range(2 * PROCESSES)]
    taken = [each for each in at_one_barrier(PROCESSES, take_one, location, NOW) if each]
    assert len({item for item, _ in taken}) == len(taken) <= sessions
    assert {item for item, _ in taken} <= set(items[:sessions])
    assert taken
    rest = work.claim_many(db, "the last one", PROCESSES, now=NOW)
    assert len(taken) + len(rest) == sessions


def test_hazard_58_of_eight_successors_of_a_lost_worker_one_gets_its_item(db: Database, location: Location) -> None:
    dead = held(db)
    taken = at_one_barrier(PROCESSES, take_one, location, NOW + TTL)
    assert [each for each in taken if each] == [(dead.id, 2)]
    assert events(db, dead.id) == ["work.claimed", "work.lost", "work.claimed"]


def end_or_succeed(number: int, location: Location, claims: list[Claim]) -> list[str]:
    """Process 0 finishes in the last moment of each claim; the others succeed it in the first moment after."""

    def act(db: Database) -> list[str]:
        if number == 0:
            return [answer(work.finish, db, claim, "DONE", "late", now=NOW + TTL - 1) for claim in claims]
        taken = [work.claim(db, f"worker-{number}", now=NOW + TTL) for _ in claims]
        return [claim.id for claim in taken if claim]

    return in_a_session(location, act)


def test_hazard_58_of_two_successors_and_a_late_worker_exactly_one_has_the_item(
    db: Database, location: Location
) -> None:
    claims = [held(db, origin=f"mail:{n}", session=f"session {n}") for n in range(30)]
    late, *successors = at_one_barrier(3, end_or_succeed, location, claims)
    for claim, said in zip(claims, late, strict=True):
        succeeded = sum(taken.count(claim.id) for taken in successors)
        item = row(db, claim.id)
        assert (said, item["status"]) in {("done", "DONE"), ("claim_lost", "RUNNING"), ("claim_lost", "READY")}
        assert succeeded == (item["status"] == "RUNNING")
        assert item["generation"] == 1 + succeeded


def queue_the_same(_: int, location: Location) -> str:
    return in_a_session(location, lambda db: work.enqueue(db, "mail:1", "lucy", "hello"))


def test_hazard_61_eight_processes_that_queue_the_same_origin_queue_one_item(db: Database, location: Location) -> None:
    ids = at_one_barrier(PROCESSES, queue_the_same, location)
    assert [item["id"] for item in work.open_work(db.connection)] == ids[:1]
    assert len(set(ids)) == 1


# --- drained under fire -----------------------------------------------------------------------------------

FIRE_TTL_SECONDS = 1.0
STEPS = 2


def drain(location: Location, owner: str) -> None:
    """Work until nothing is open: claim, say something in steps, finish. Whatever is lost is lost."""
    work.CRASH_LIMIT = 10**6  # a random executioner is no poison
    with closing(location.open(patience=timedelta(seconds=30))) as db:
        claim = None
        while claim or work.open_work(db.connection, limit=1):
            claim = claim or work.claim(db, owner, ttl=FIRE_TTL_SECONDS)
            if claim is None:
                time.sleep(0.02)
                continue
            try:
                for step in range(STEPS):
                    work.observe(db, claim, {"step": step, "generation": claim.generation})
                claim = work.finish_and_claim(db, claim, "DONE", owner, ttl=FIRE_TTL_SECONDS)
            except PermissionError:
                claim = None


def drained_under_fire(location: Location, seconds: float, seed: int) -> int:
    """Eight processes drain the queue while one after the other is killed and replaced; return how many were."""
    fate = random.Random(seed)  # noqa: S311 - an executioner, not a secret
    context = multiprocessing.get_context("forkserver")

    def start(number: int) -> Any:
        process = context.Process(target=drain, args=(location, f"worker-{number}"))
        process.start()
        return process

    alive, killed, deadline = [start(number) for number in range(PROCESSES)], 0, time.monotonic() + seconds
    try:
        while any(process.exitcode is None for process in alive):
            assert time.monotonic() < deadline, f"not drained after {seconds} s and {killed} kills"
            time.sleep(fate.uniform(0.02, 0.3))
            place = fate.randrange(PROCESSES)
            if alive[place].exitcode is None:
                os.kill(alive[place].pid, signal.SIGKILL)
                alive[place].join()
                killed += 1
                alive[place] = start(PROCESSES + killed)
        assert [process.exitcode for process in alive] == [0] * PROCESSES
    finally:
        for process in alive:
            process.kill()
            process.join()
    return killed


def assert_no_two_owners(db: Database) -> Counter[str]:
    """Read from the events, in their order, that no item and no session ever had two owners; count the kinds."""
    kinds: Counter[str] = Counter()
    running: dict[str, tuple[str, int]] = {}
    generations: dict[str, int] = {}
    for event in db.connection.execute(
        "SELECT kind, subject, detail FROM events WHERE kind LIKE 'work.%' ORDER BY seq"
    ):
        kind, item = event["kind"], event["subject"]
        detail = json.loads(event["detail"])
        kinds[kind] += 1
        if kind == "work.claimed":
            assert detail["session"] not in running, (item, running[detail["session"]])
            assert detail["generation"] > generations.get(item, 0)
            running[detail["session"]] = (item, detail["generation"])
            generations[item] = detail["generation"]
        else:
            assert running.pop(detail["session"]) == (item, detail["generation"])
    assert running == {}
    return kinds


def assert_no_dead_generation_wrote(db: Database) -> None:
    """Of each item the transcript's generations only grow, each was a claim's, and the last one's is whole."""
    last: dict[str, list[int]] = {}
    for line in db.connection.execute("SELECT work_id, generation FROM assistant_transcript ORDER BY seq"):
        written = last.setdefault(line["work_id"], [])
        assert not written or line["generation"] >= written[-1]
        written.append(line["generation"])
    items = db.connection.execute("SELECT id, generation FROM assistant_work").rows
    assert len(items) == len(last)
    assert all(last[item["id"]][-STEPS:] == [item["generation"]] * STEPS for item in items)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.torture)])
def test_hazard_42_eight_processes_under_random_kills_finish_each_item_once_and_never_two_at_a_time(
    db: Database, location: Location, count: int
) -> None:
    batch = [(f"mail:{n}", f"session {n % 40}", "hello") for n in range(count)]
    for first in range(0, count, work.MAX_BATCH):
        work.enqueue_many(db, batch[first : first + work.MAX_BATCH])
    killed = drained_under_fire(location, count / 4, seed=count)
    kinds = assert_no_two_owners(db)
    assert_no_dead_generation_wrote(db)
    assert kinds["work.done"] == count
    assert kinds["work.claimed"] == count + kinds["work.lost"]
    assert 0 < kinds["work.lost"] <= killed + kinds["work.claimed"] - count
    statuses = db.connection.execute("SELECT status, count(*) FROM assistant_work GROUP BY status").rows
    assert [tuple(each) for each in statuses] == [("DONE", count)]


# --- a SIGKILL after each statement: both or neither ------------------------------------------------------


def claim_it(location: Location) -> None:
    in_a_session(location, work.claim, OWNER, now=NOW + TTL)


def finish_and_go_on(location: Location, claim: Claim) -> None:
    in_a_session(location, work.finish_and_claim, claim, "DONE", "done", now=NOW)


def everything(db: Database) -> list[Any]:
    """States and events, without what differs from try to try."""
    items = [tuple(each) for each in db.connection.execute("SELECT status, generation, losses FROM assistant_work")]
    return [items, [each[0] for each in db.connection.execute("SELECT kind FROM events ORDER BY seq")]]


@pytest.mark.parametrize("act", ["supersede", "finish and claim"])
def test_hazard_42_a_worker_killed_inside_a_move_has_made_all_of_it_or_nothing(
    make_location: Callable[..., Location], act: str
) -> None:
    seen: list[Any] = []
    killed = True
    while killed:
        location = make_location(f"try {len(seen)}")
        with closing(location.open()) as db:
            claim = held(db)
            queued(db, "mail:2")
            before = everything(db)
        doing, given = (claim_it, ()) if act == "supersede" else (finish_and_go_on, (claim,))
        killed = killed_after_statement(len(seen) + 1, doing, location, *given)
        with closing(location.open()) as db:
            seen.append(everything(db))
    *killed_before_its_commit, killed_after_it, survived = seen
    assert killed_before_its_commit == [before] * len(killed_before_its_commit)
    assert killed_after_it == survived != before
    assert len(seen) > 6


# --- what must be locked so that a decision still holds when it is written --------------------------------


def observe_before(
    db: Database, location: Location, claim: Claim, *, after: str, rival: Callable[[Database], Any]
) -> None:
    """Write a finding under a claim, while a rival waits from that statement on for what the claim rests on."""
    written, _ = with_a_rival(
        db, location, lambda session: work.observe(session, claim, FINDING, now=NOW), after=after, rival=rival
    )
    assert written


def test_a_pause_cannot_come_between_the_check_of_a_claim_and_its_write(db: Database, location: Location) -> None:
    claim = held(db)
    observe_before(
        db, location, claim, after="FROM assistant_control", rival=lambda session: control(session, "paused = 1")
    )
    assert answer(work.observe, db, claim, FINDING, now=NOW) == "paused"


def test_a_cancellation_cannot_come_between_the_check_of_a_claim_and_its_write(
    db: Database, location: Location
) -> None:
    claim = held(db)
    observe_before(
        db, location, claim, after="SELECT expires_at", rival=lambda session: work.cancel(session, claim.id, now=NOW)
    )
    assert state(db, claim.id) == ("CANCELED", 1, None)


def test_a_parents_cancellation_cannot_come_between_the_check_of_a_child_and_its_write(
    db: Database, location: Location
) -> None:
    parent = held(db)
    work.delegate(db, parent, "Look", deadline=NOW + 60, budget=1, now=NOW)
    young = claimed(db, role="research")
    observe_before(
        db,
        location,
        young,
        after="JOIN assistant_work parent",
        rival=lambda session: work.cancel(session, parent.id, now=NOW),
    )
    assert answer(work.observe, db, young, FINDING, now=NOW) == "claim_lost"


@pytest.mark.parametrize("engine", ["postgresql"])  # SQLite has one writer at a time
def test_a_child_claimed_while_its_parent_is_finished_ends_with_it(db: Database, location: Location) -> None:
    parent = held(db)
    child = work.delegate(db, parent, "Look", deadline=NOW + 60, budget=1, now=NOW)
    taken: list[Claim] = []
    claims = lambda: taken.append(in_a_session(location, claimed, role="research"))  # noqa: E731
    with hook_after(db.connection, "AS delegated", claims):
        work.finish(db, parent, "DONE", now=NOW)
    assert [claim.id for claim in taken] == [child]
    assert state(db, child) == ("CANCELED", 1, None)
    assert answer(work.observe, db, taken[0], FINDING, now=NOW) == "claim_lost"


@pytest.mark.parametrize("engine", ["postgresql"])
def test_a_child_whose_parent_is_just_being_finished_is_nobodys_to_claim(db: Database, location: Location) -> None:
    parent = held(db)
    work.delegate(db, parent, "Look", deadline=NOW + 60, budget=1, now=NOW)
    taken: list[Claim | None] = []
    claims = lambda: taken.append(in_a_session(location, work.claim, OWNER, role="research", now=NOW))  # noqa: E731
    with hook_after(db.connection, "'PARKED') ORDER BY", claims):
        work.finish(db, parent, "DONE", now=NOW)
    assert taken == [None]


def test_a_pause_cannot_come_between_the_admission_of_a_claim_and_the_claim(db: Database, location: Location) -> None:
    queued(db)
    taken, _ = with_a_rival(
        db,
        location,
        lambda session: work.claim(session, OWNER, now=NOW),
        after="FROM assistant_control",
        rival=lambda session: control(session, "paused = 1"),
    )
    assert taken
    assert answer(work.finish, db, taken, "DONE", now=NOW) == "paused"


def test_a_claimant_who_comes_second_in_a_session_takes_another(db: Database, location: Location) -> None:
    first = queued(db, "mail:1", "lucy")
    other = queued(db, "mail:2", "bob")

    def takes_the_urgent_one(session: Database) -> str:
        if db.engine == "postgresql":
            queued(session, "mail:urgent", "lucy", control=True)  # a head that the first claimant has not seen
        try:
            second = work.claim(session, "worker-2", now=NOW)
        except ConstraintBroken as error:
            return error.why
        return second.id if second else "nothing"

    taken, second = with_a_rival(
        db,
        location,
        lambda session: work.claim(session, OWNER, now=NOW),
        after="SET status = 'RUNNING'",
        rival=takes_the_urgent_one,
    )
    assert (taken.id, second) == (first, other)


@pytest.mark.parametrize("engine", ["sqlite"])
def test_hazard_48_a_renewal_that_meets_a_busy_ledger_says_so_and_may_be_repeated(
    db: Database, location: Location
) -> None:
    claim = held(db)
    with child(holding, location) as (_, pipe):
        assert heard(pipe) == "holding"
        with closing(location.open(patience=timedelta(milliseconds=100))) as impatient:
            assert answer(work.renew, impatient, claim, TTL, now=NOW + 1) == "ledger_busy"
        pipe.send("go on")
        assert heard(pipe) == "committed"
    assert work.renew(db, claim, TTL, now=NOW + 2) == NOW + 2 + TTL
    assert answer(work.renew, db, claim, TTL, now=NOW + 2 + TTL) == "claim_lost"


def hang(pipe: Any, location: Location) -> None:
    """For `child`: a worker that never comes to its first act on the ledger."""
    with closing(location.open()):
        pipe.send("ready")
        pipe.recv()


def test_hazard_59_a_worker_that_exists_holds_nothing_until_it_has_claimed(db: Database, location: Location) -> None:
    item = queued(db)
    with child(hang, location) as (_, pipe):
        assert heard(pipe) == "ready"
        assert claimed(db).id == item
