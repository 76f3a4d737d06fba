"""Three protocols against small pure models that know no SQL: who may do what, what is answered, what the rows become.

Hypothesis plays the house's own functions on a real ledger, in any order, from processes whose clocks differ and jump
both ways, with claims that are current, former or another's. After each act the answer, or the category of the refusal,
is the model's, and so is every row. The short form runs on both engines; the long one is marked ``torture``. That a
broken clause is found is shown below, one for each protocol and more.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support import attempt_on, finish, new_assignment, recover, renew_attempt, rows

from sovereign_agent import assistant_work, fencing, journal, relay
from sovereign_agent.clock import ManualClock, micros, moment
from sovereign_agent.database import Database, authority
from sovereign_agent.errors import SovereignError
from sovereign_agent.records import ActorLease, AttemptStatus, Claim, ExecutionAttempt, Message
from sovereign_agent.storage import sqlite

TTL = timedelta(seconds=60)
HALF_TTL = TTL / 2
PROCESSES = ["proc_red", "proc_blue", "proc_old"]
processes = st.sampled_from(PROCESSES)
steps = st.sampled_from([1, 1, 2, 2, 3, -1]).map(lambda halves: halves * HALF_TTL)
"""Half a time to live, forward or back, and its multiples: so that boundaries are met exactly."""

Fresh = Callable[[], Database]


class Protocol(RuleBasedStateMachine):
    """A fresh ledger, a clock for each process, and the control row that all of them share."""

    def __init__(self, fresh: Fresh) -> None:
        super().__init__()
        self.db = fresh()
        self.clocks = {name: ManualClock() for name in PROCESSES}
        self.paused = False
        self.epoch = authority.control(self.db.connection).epoch

    def teardown(self) -> None:
        self.db.close()

    @rule(by=steps)
    def time_passes(self, by: timedelta) -> None:
        for clock in self.clocks.values():
            clock.advance(by)

    @rule(process=processes, by=steps)
    def a_clock_jumps(self, process: str, by: timedelta) -> None:
        self.clocks[process].advance(by)

    def pause(self, *, paused: bool) -> None:
        with self.db.transaction() as connection:
            assert authority.change_control(connection, authority.control(connection), paused=paused)
        self.paused = paused

    def now(self, process: str) -> int:
        return micros(self.clocks[process]())

    def same(self, expected: str, act: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Act, and be answered as the model says; the answer is None where it was refused."""
        try:
            answer, said = act(*args, **options), ""
        except SovereignError as refused:
            answer, said = None, refused.category
        assert said == expected, f"{said or 'done'} instead of {expected or 'done'}"
        return answer


# --- actor leases and execution attempts ------------------------------------------------------------------

ACTORS = ["operator", "other"]
actors = st.sampled_from([*ACTORS, "operator"])


@dataclass
class Run:
    """An attempt as the model has it."""

    attempt: ExecutionAttempt
    expires: int
    deadline: int
    status: str = "ACTIVE"


class Authority(Protocol):
    """One process hosts an actor, and one attempt runs an assignment, until a time."""

    def __init__(self, fresh: Fresh) -> None:
        super().__init__(fresh)
        self.token = 0
        self.leases: dict[str, ActorLease] = {}
        self.shown: list[ActorLease] = [ActorLease("operator", "proc_red", 999, *[self.clocks["proc_red"]()] * 2)]
        self.assignments: dict[str, tuple[str, str, str | None]] = {}
        self.runs: dict[str, Run] = {}
        self.receipts: dict[str, str] = {}

    @rule(process=processes, actor=actors)
    def acquire_a_lease(self, process: str, actor: str) -> None:
        held, clock = self.leases.get(actor), self.clocks[process]
        free = held is None or held.expires_at <= clock()
        lease = self.same(
            "" if free else "actor_lease_held",
            fencing.acquire_actor_lease,
            self.db,
            actor,
            process,
            ttl=TTL,
            clock=clock,
        )
        if free:
            self.token += 1
            assert lease == ActorLease(actor, process, self.token, clock(), clock() + TTL)
            self.leases[actor] = lease
            self.shown.append(lease)

    @rule(data=st.data())
    def renew_a_lease(self, data: st.DataObject) -> None:
        shown, process = self._any_lease(data)
        clock = self.clocks[process]
        good = self._is_current(shown.actor_id, process, shown.fencing_token, clock())
        renewed = self.same(
            "" if good else "actor_lease_lost",
            *(fencing.renew_actor_lease, self.db, shown.actor_id, process, shown.fencing_token),
            ttl=TTL,
            clock=clock,
        )
        if good:
            self.leases[shown.actor_id] = replace(self.leases[shown.actor_id], expires_at=clock() + TTL)
            assert renewed == self.leases[shown.actor_id]

    @rule(data=st.data())
    def release_a_lease(self, data: st.DataObject) -> None:
        shown, process = self._any_lease(data)
        held = self.leases.get(shown.actor_id)
        own = held and (held.process_identity, held.fencing_token) == (process, shown.fencing_token)
        busy = any(
            run.status == "ACTIVE" and run.attempt.actor_lease_fencing_token == shown.fencing_token
            for run in self.runs.values()
        )
        released = fencing.release_actor_lease(self.db, shown.actor_id, process, shown.fencing_token)
        assert released == bool(own and not busy)
        if released:
            del self.leases[shown.actor_id]

    @precondition(lambda self: len(self.assignments) < 3)
    @rule(actor=actors)
    def assign(self, actor: str) -> None:
        self.assignments[new_assignment(self.db, actor, clock=self.clocks["proc_red"]).id] = (actor, "CREATED", None)

    @precondition(lambda self: self.assignments)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self._start(data.draw(st.sampled_from([*self.assignments])), *self._any_lease(data))

    @precondition(lambda self: len(self.assignments) < 4)
    @rule(process=processes)
    def begin_a_run(self, process: str) -> None:
        """All that a run takes, in good order."""
        self.acquire_a_lease(process=process, actor="operator")
        self.assign(actor="operator")
        self._start([*self.assignments][-1], self.shown[-1], process)

    def _start(self, assignment: str, shown: ActorLease, process: str) -> None:
        clock = self.clocks[process]
        actor, state, pointer = self.assignments[assignment]
        held = self.runs.get(pointer or "")
        if not self._is_current(shown.actor_id, process, shown.fencing_token, clock()):
            expected = "actor_lease_lost"
        elif held and held.expires > micros(clock()):
            expected = "execution_attempt_held"
        elif actor != shown.actor_id or state not in ("CREATED", "RUNNING"):
            expected = "illegal_move"
        else:
            expected = ""
        presented = replace(shown, process_identity=process)
        run = self.same(expected, attempt_on, self.db, assignment, presented, clock, ttl=TTL, maximum=3 * TTL)
        if run:
            self.token += 1
            assert run.fencing_token == self.token
            if held:
                held.status = "RECOVERED"
                self.receipts[held.attempt.id] = "worker_lost"
            self.runs[run.id] = Run(run, micros(clock() + TTL), micros(clock() + 3 * TTL))
            self.assignments[assignment] = (actor, "RUNNING", run.id)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def renew_a_run(self, data: st.DataObject) -> None:
        run = self._any_run(data)
        self._renew(run, data.draw(st.sampled_from([run.attempt.process_identity] * 3 + PROCESSES)))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def renew_a_run_as_its_time_is_over(self, data: st.DataObject) -> None:
        run = self._any_run(data)
        self.clocks[run.attempt.process_identity].set(moment(run.expires))
        self._renew(run, run.attempt.process_identity)

    def _renew(self, run: Run, process: str) -> None:
        clock = self.clocks[process]
        good = run.status == "ACTIVE" and run.expires > micros(clock()) and process == run.attempt.process_identity
        presented = replace(run.attempt, process_identity=process)
        self.same("" if good else "execution_attempt_lost", renew_attempt, self.db, presented, clock, ttl=TTL)
        if good:
            run.expires = min(micros(clock() + TTL), run.deadline)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def finish_a_run(self, data: st.DataObject) -> None:
        run = self._any_run(data)
        lease = self.leases.get(run.attempt.actor_id)
        stands = lease and lease.fencing_token == run.attempt.actor_lease_fencing_token
        expected = "execution_attempt_lost" if run.status != "ACTIVE" else "" if stands else "actor_lease_lost"
        self.same(expected, finish, self.db, run.attempt, self.clocks[run.attempt.process_identity])
        if not expected:
            self._end(run, "DONE", "COMPLETED", "")

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), process=processes)
    def recover_a_run(self, data: st.DataObject, process: str) -> None:
        run, clock = self._any_run(data), self.clocks[process]
        due = run.status == "ACTIVE" and run.expires <= micros(clock())
        assert recover(self.db, run.attempt, clock) == due
        if due:
            self._end(run, "RECOVERED", "FAILED", "worker_lost")

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), process=processes)
    def call_a_run_off(self, data: st.DataObject, process: str) -> None:
        run, clock = self._any_run(data), self.clocks[process]
        with self.db.transaction() as connection:
            receipt = journal.lost_receipt(run.attempt)
            ended = fencing.end_attempt(connection, run.attempt, AttemptStatus.RECOVERED, receipt, now=clock())
        assert ended == (run.status == "ACTIVE")
        if ended:
            self._end(run, "RECOVERED", "FAILED", "worker_lost")

    @invariant()
    def every_row_is_the_models(self) -> None:
        leases = {row["actor_id"]: row for row in rows(self.db, "actor_leases")}
        assert {
            actor: (row["process_identity"], row["fencing_token"], row["expires_at"]) for actor, row in leases.items()
        } == {
            actor: (held.process_identity, held.fencing_token, micros(held.expires_at))
            for actor, held in self.leases.items()
        }
        assert {row["id"]: (row["status"], row["expires_at"]) for row in rows(self.db, "execution_attempts")} == {
            name: (run.status, run.expires) for name, run in self.runs.items()
        }
        assert {
            row["id"]: (row["actor_id"], row["state"], row["current_execution_attempt"])
            for row in rows(self.db, "assignments")
        } == self.assignments
        receipts = rows(self.db, "receipts")
        assert {row["attempt_id"]: row["failure_category"] for row in receipts} == self.receipts
        assert len(receipts) == len(self.receipts)

    def _is_current(self, actor: str, process: str, token: int, now: datetime) -> bool:
        held = self.leases.get(actor)
        return bool(held and (held.process_identity, held.fencing_token) == (process, token) and held.expires_at > now)

    def _any_lease(self, data: st.DataObject) -> tuple[ActorLease, str]:
        """One that was given, of late or long ago, and who shows it: mostly its own process."""
        shown = data.draw(st.sampled_from([*self.shown, *self.shown[-2:] * 3]))
        return shown, data.draw(st.sampled_from([shown.process_identity] * 3 + PROCESSES))

    def _any_run(self, data: st.DataObject) -> Run:
        return self.runs[data.draw(st.sampled_from([*self.runs]))]

    def _end(self, run: Run, status: str, becomes: str, category: str) -> None:
        actor, _, _ = self.assignments[run.attempt.assignment_id]
        run.status = status
        self.assignments[run.attempt.assignment_id] = (actor, becomes, None)
        self.receipts[run.attempt.id] = category


# --- the mailbox ------------------------------------------------------------------------------------------


@dataclass
class Letter:
    """A message as the model has it."""

    recipient: str
    ready_at: int
    state: str = "NEW"
    claim_owner: str | None = None
    fencing_token: int | None = None
    claim_expires_at: int | None = None
    deliveries: int = 0


class Mailbox(Protocol):
    """Who is sent a message works on it under a claim; what nobody survives is dead after so many deliveries."""

    def __init__(self, fresh: Fresh) -> None:
        super().__init__(fresh)
        self.token = 0
        self.letters: dict[str, Letter] = {}
        self.shown: list[Message] = []

    @precondition(lambda self: len(self.letters) < 3)
    @rule(to=actors, subject=st.sampled_from(["s", "s" * relay.MAX_SUBJECT_CHARACTERS, ""]), process=processes)
    def send(self, to: str, subject: str, process: str) -> None:
        expected = "" if subject else "message_size"
        sent = self.same(expected, relay.send, self.db, "master", to, subject, "b", clock=self.clocks[process])
        if sent:
            self.letters[sent.id] = Letter(to, self.now(process))

    @rule(subject=st.just("s" * (relay.MAX_SUBJECT_CHARACTERS + 1)))
    def send_too_much(self, subject: str) -> None:
        self.same("message_size", relay.send, self.db, "master", "operator", subject, "b")

    @precondition(lambda self: self.letters)
    @rule(data=st.data(), actor=actors, process=processes)
    def claim_while_all_is_paused(self, data: st.DataObject, actor: str, process: str) -> None:
        self.pause(paused=True)
        self._claim(data.draw(st.sampled_from([*self.letters])), actor, process)
        self.pause(paused=False)

    @precondition(lambda self: self.letters)
    @rule(data=st.data(), actor=actors, process=processes)
    def claim(self, data: st.DataObject, actor: str, process: str) -> None:
        self._claim(data.draw(st.sampled_from([*self.letters])), actor, process)

    @precondition(lambda self: self.letters)
    @rule(data=st.data(), process=processes)
    def claim_again_when_it_has_run_out(self, data: st.DataObject, process: str) -> None:
        """Deliveries add up to their limit only where somebody insists."""
        name = data.draw(st.sampled_from([*self.letters]))
        for _ in range(2):
            self._claim(name, self.letters[name].recipient, process)
            self.clocks[process].advance(TTL)

    def _claim(self, name: str, actor: str, process: str) -> None:
        letter, now = self.letters[name], self.now(process)
        held = letter.state == "CLAIMED" and (letter.claim_expires_at or 0) > now
        spent = letter.deliveries >= relay.MAX_DELIVERIES
        again = held and letter.claim_owner == actor
        if actor != letter.recipient:
            expected = "authority_refusal"
        elif again:
            expected = ""
        elif self.paused:
            expected = "paused"
        elif letter.state in ("DONE", "DEAD") or spent:
            expected = "illegal_move"
        else:
            expected = "claim_held" if held else ""
        given = self.same(expected, relay.claim, self.db, name, actor, ttl=TTL, clock=self.clocks[process])
        if given and not again:
            self.token += 1
            letter.state, letter.claim_owner, letter.fencing_token = "CLAIMED", actor, self.token
            letter.claim_expires_at, letter.deliveries = now + TTL // timedelta(microseconds=1), letter.deliveries + 1
        if given:
            assert (given.fencing_token, given.deliveries) == (letter.fencing_token, letter.deliveries)
            self.shown.append(given)

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), actor=actors, dead=st.booleans(), process=processes)
    def settle(self, data: st.DataObject, actor: str, dead: bool, process: str) -> None:  # noqa: FBT001
        shown, clock = data.draw(st.sampled_from(self.shown)), self.clocks[process]
        letter = self.letters[shown.id]
        current = (letter.state, letter.claim_owner, letter.fencing_token)
        expected = "" if current == ("CLAIMED", actor, shown.fencing_token) else "fencing_token_stale"
        if dead:
            self.same(expected, relay.dead_letter, self.db, replace(shown, claim_owner=actor), clock=clock)
        else:
            token = shown.fencing_token
            self.same(expected, relay.complete, self.db, shown.id, actor, fencing_token=token, clock=clock)
        if not expected:
            letter.state = "DEAD" if dead else "DONE"

    @rule(process=processes, batch=st.integers(1, 2))
    def sweep(self, process: str, batch: int) -> None:
        now, due = self.now(process), []
        for name, letter in self.letters.items():
            if letter.state == "CLAIMED" and (letter.claim_expires_at or 0) <= now:
                due.append(name)
                if letter.deliveries >= relay.MAX_DELIVERIES:
                    letter.state = "DEAD"
                    continue
                rest = 0 if letter.deliveries == 1 else 2 ** (letter.deliveries - 1)
                letter.state, letter.claim_owner, letter.fencing_token = "NEW", None, None
                letter.claim_expires_at, letter.ready_at = None, now + rest * 1_000_000
        assert [*relay.sweep_expired_claims(self.db, self.clocks[process], batch=batch)] == due

    @rule(actor=actors, process=processes)
    def look(self, actor: str, process: str) -> None:
        now = self.now(process)

        def may_be_claimed(letter: Letter) -> bool:
            lapsed = letter.state == "CLAIMED" and (letter.claim_expires_at or 0) <= now
            fresh = letter.state == "NEW" and letter.ready_at <= now
            return letter.recipient == actor and (fresh or (lapsed and letter.deliveries < relay.MAX_DELIVERIES))

        expected = [name for name, letter in self.letters.items() if may_be_claimed(letter)]
        expected.sort(key=lambda name: self.letters[name].ready_at)  # stable: the order in which they were sent
        assert [message.id for message in relay.inbox(self.db, actor, clock=self.clocks[process])] == expected

    @invariant()
    def every_row_is_the_models(self) -> None:
        found = {row["id"]: {name: row[name] for name in Letter.__annotations__} for row in rows(self.db, "messages")}
        assert found == {name: asdict(letter) for name, letter in self.letters.items()}


# --- the assistant's queue --------------------------------------------------------------------------------

SESSIONS = ["mon", "tue"]
ROLES = [assistant_work.SHOP] * 3 + ["night"]
MICRO = 1_000_000
SECONDS = TTL.total_seconds()
DELAYS = [0, 0, 0, SECONDS / 2, SECONDS]
FOR_EVER = 2**62


@dataclass
class Item:
    """An item of the queue as the model has it; the order of the items is that of their creation."""

    origin: str
    session: str
    prompt: str
    role: str
    control: int
    available_at: int
    retries_left: int
    status: str = "READY"
    generation: int = 0
    owner: str | None = None
    epoch: str | None = None
    expires_at: int | None = None
    losses: int = 0
    finished_at: int | None = None
    parent: str = field(default="", metadata={"row": False})
    deadline: int = field(default=FOR_EVER, metadata={"row": False})


ROW = [name for name in Item.__annotations__ if name not in ("parent", "deadline")]


class Queue(Protocol):
    """One item of a session runs at a time, under a claim of owner, generation, epoch and time."""

    def __init__(self, fresh: Fresh) -> None:
        super().__init__(fresh)
        self.items: dict[str, Item] = {}
        self.shown: list[Claim] = []
        self.said: list[tuple[str, int]] = []
        self.epochs = 1

    def seconds(self, process: str) -> float:
        return self.now(process) / MICRO

    @precondition(lambda self: len(self.items) < 10)
    @rule(
        batch=st.lists(
            st.tuples(st.sampled_from("abcdefghijklmn"), st.sampled_from(SESSIONS), st.sampled_from("ppq")), max_size=3
        ),
        role=st.sampled_from(ROLES),
        control=st.booleans(),
        delay=st.sampled_from(DELAYS),
        retries=st.sampled_from([0, 0, 1, 1, -1]),
        process=processes,
    )
    def enqueue(
        self,
        *,
        batch: list[tuple[str, str, str]],
        role: str,
        control: bool,
        delay: float,
        retries: int,
        process: str,
    ) -> None:
        now, expected = self.now(process), "" if retries >= 0 else "out_of_bounds"
        known = {item.origin: name for name, item in self.items.items()}
        added: dict[str, Item] = {}
        for origin, session, prompt in batch:
            item = self.items.get(known.get(origin, "")) or added.get(origin)
            content = (session, prompt, role, int(control))
            if item and (item.session, item.prompt, item.role, item.control) != content:
                expected = expected or "origin_taken"
            if not item:
                at = now + round(delay * MICRO) if delay else 0
                added[origin] = Item(origin, session, prompt, role, int(control), at, retries)
        options = {"role": role, "control": control, "available_after": delay, "retries": retries}
        ids = self.same(expected, assistant_work.enqueue_many, self.db, batch, **options, now=self.seconds(process))
        for name, (origin, _, _) in zip(ids or (), batch, strict=not expected):
            assert known.get(origin, name) == name
            known[origin] = name
            if origin in added:
                self.items[name] = added.pop(origin)

    @rule(process=processes, role=st.sampled_from([*ROLES, assistant_work.RESEARCH]), limit=st.integers(1, 3))
    def claim(self, process: str, role: str, limit: int) -> None:
        now, options = self.now(process), {"ttl": SECONDS, "now": self.seconds(process), "role": role}
        expected = set() if self.paused else self._take(role, limit, now, process)
        claims = self.same("paused" * self.paused, assistant_work.claim_many, self.db, process, limit, **options)
        self._compare(claims or [], expected, process)

    @rule(process=processes, times=st.integers(1, assistant_work.CRASH_LIMIT + 1))
    def lose_worker_after_worker(self, process: str, times: int) -> None:
        """Losses add up to their limit only where somebody insists."""
        for _ in range(times):
            self.claim(process=process, role=assistant_work.SHOP, limit=1)
            self.clocks[process].advance(TTL)

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), process=processes, to=st.sampled_from(assistant_work.FINAL), next_too=st.booleans())
    def finish(self, data: st.DataObject, process: str, to: str, next_too: bool) -> None:  # noqa: FBT001
        claim, now, at = self._any_claim(data), self.now(process), self.seconds(process)
        expected = self._refusal(claim, now)
        if not expected:
            self._settle(claim.id, to, now)
        if not next_too:
            self.same(expected, assistant_work.finish, self.db, claim, to, now=at)
            return
        taken = set() if expected else self._take(claim.role, 1, now, claim.owner)
        given = self.same(expected, assistant_work.finish_and_claim, self.db, claim, to, ttl=SECONDS, now=at)
        self._compare([given] if given else [], taken, claim.owner)

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), process=processes)
    def observe(self, data: st.DataObject, process: str) -> None:
        claim, now = self._any_claim(data), self.now(process)
        expected = self._refusal(claim, now)
        self.same(expected, assistant_work.observe, self.db, claim, {"role": "user"}, now=self.seconds(process))
        if not expected:
            self.said.append((claim.id, claim.generation))

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), process=processes)
    def renew(self, data: st.DataObject, process: str) -> None:
        claim, now = self._any_claim(data), self.now(process)
        expected = self._refusal(claim, now)
        until = self.same(expected, assistant_work.renew, self.db, claim, SECONDS, now=self.seconds(process))
        if not expected:
            item = self.items[claim.id]
            item.expires_at = min(now + round(SECONDS * MICRO), item.deadline)
            assert until == item.expires_at / MICRO

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), process=processes, delay=st.sampled_from(DELAYS), failed=st.booleans())
    def give_back(self, data: st.DataObject, process: str, delay: float, failed: bool) -> None:  # noqa: FBT001
        claim, now = self._any_claim(data), self.now(process)
        expected, item = self._refusal(claim, now), self.items[claim.id]
        options = {"available_after": delay, "now": self.seconds(process)}
        if not failed:
            self.same(expected, assistant_work.release, self.db, claim, **options)
        else:
            again = self.same(expected, assistant_work.retry, self.db, claim, "why", **options)
            assert expected or again == (item.retries_left > 0)
        if not expected:
            blocked = failed and item.retries_left == 0
            item.retries_left -= int(failed and not blocked)
            self._settle(claim.id, "BLOCKED" if blocked else "READY", now, delay)

    @precondition(lambda self: self.shown and len(self.items) < 12)
    @rule(
        data=st.data(),
        process=processes,
        origin=st.sampled_from(["child", "twin"]),
        within=st.sampled_from([0, SECONDS / 2, 2 * SECONDS]),
        budget=st.integers(0, 1),
    )
    def delegate(self, data: st.DataObject, process: str, origin: str, within: float, budget: int) -> None:
        claim, now = self._any_claim(data), self.now(process)
        session = f"{claim.id}/{origin}"
        known = next((name for name, item in self.items.items() if item.origin == origin), "")
        if claim.role == assistant_work.RESEARCH:
            expected = "delegation_depth"
        elif refused := self._refusal(claim, now):
            expected = refused
        elif within == 0 or budget == 0:
            expected = "out_of_bounds"
        else:
            expected = "origin_taken" if known and self.items[known].session != session else ""
        at = self.seconds(process)
        child = self.same(
            expected,
            *(assistant_work.delegate, self.db, claim, "look"),
            deadline=at + within,
            budget=budget,
            origin=origin,
            now=at,
        )
        if child and not known:
            self.items[child] = Item(origin, session, "look", assistant_work.RESEARCH, 0, 0, 0, parent=claim.id)
            self.items[child].deadline = now + round(within * MICRO)
        assert not known or child in (known, None)

    @precondition(lambda self: self.items)
    @rule(data=st.data(), process=processes)
    def cancel(self, data: st.DataObject, process: str) -> None:
        name = data.draw(st.sampled_from([*self.items]))
        over = self.items[name].status in assistant_work.FINAL
        self.same("illegal_move" * over, assistant_work.cancel, self.db, name, now=self.seconds(process))
        if not over:
            self._settle(name, "CANCELED", self.now(process))

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), process=processes)
    def nothing_goes_on_while_all_is_paused(self, data: st.DataObject, process: str) -> None:
        self.pause(paused=True)
        self.claim(process=process, role=assistant_work.SHOP, limit=1)
        self.observe(data=data, process=process)
        self.pause(paused=False)

    @precondition(lambda self: self.epochs < 4 and len(self.items) > 1)
    @rule(process=processes)
    def a_new_epoch_begins(self, process: str) -> None:
        self.epoch, self.epochs = authority.new_epoch(), self.epochs + 1
        with self.db.immediate() as connection:
            assistant_work.revoke_all(connection, now=self.seconds(process))
            authority.begin_epoch(connection, self.epoch, paused=self.paused)
        authority.write_marker(self.db.authority, self.epoch)
        for name, item in self.items.items():
            if item.status == "RUNNING":
                self._settle(name, "READY", self.now(process))
            item.generation += int(item.status in ("READY", "PARKED"))

    @invariant()
    def every_row_is_the_models(self) -> None:
        found = {row["id"]: {name: row[name] for name in ROW} for row in rows(self.db, "assistant_work")}
        assert found == {
            name: {key: value for key, value in asdict(item).items() if key in ROW} for name, item in self.items.items()
        }
        written = [(row["work_id"], row["generation"]) for row in rows(self.db, "assistant_transcript")]
        assert sorted(written) == sorted(self.said)

    def _any_claim(self, data: st.DataObject) -> Claim:
        return data.draw(st.sampled_from([*self.shown, *self.shown[-2:] * 3]))

    def _refusal(self, claim: Claim, now: int) -> str:
        """Why a claim may not write, now; empty when it may."""
        if self.paused:
            return "paused"
        if claim.epoch != self.epoch:
            return "epoch_replaced"
        item = self.items[claim.id]
        held = (item.status, item.generation, item.owner) == ("RUNNING", claim.generation, claim.owner)
        if not held or (item.expires_at or 0) <= now:
            return "claim_lost"
        return "delegation_ended" if item.deadline <= now else ""

    def _settle(self, name: str, to: str, now: int, delay: float = 0) -> None:
        item = self.items[name]
        item.status, item.owner, item.epoch, item.expires_at = to, None, None, None
        item.available_at = now + round(delay * MICRO) if delay else 0
        item.finished_at = now if to in assistant_work.FINAL else None
        for child, other in self.items.items():
            if other.parent == name and to in assistant_work.FINAL and other.status not in assistant_work.FINAL:
                self._settle(child, "CANCELED", now)

    def _take(self, role: str, limit: int, now: int, owner: str) -> set[tuple[str, int]]:
        """What a claim takes: (id, generation). First all that is due goes back into the queue."""
        for name, item in self.items.items():
            if item.status == "RUNNING" and (item.expires_at or 0) <= now:
                item.losses += 1
                self._settle(name, "READY" if item.losses < assistant_work.CRASH_LIMIT else "PARKED", now)
            if item.status == "READY" and item.available_at <= now:
                item.available_at = 0
        taken: set[tuple[str, int]] = set()
        while len(taken) < limit and (heads := self._heads(role)):
            for name in heads[: limit - len(taken)]:
                item = self.items[name]
                if item.deadline <= now:
                    self._settle(name, "CANCELED", now)
                    continue
                item.status, item.owner, item.epoch = "RUNNING", owner, self.epoch
                item.generation, item.expires_at = item.generation + 1, min(now + round(SECONDS * MICRO), item.deadline)
                taken.add((name, item.generation))
        return taken

    def _heads(self, role: str) -> list[str]:
        """The first item of each session in which nothing runs: control items, then the oldest."""
        busy = {item.session for item in self.items.values() if item.status == "RUNNING"}
        waiting = [
            name
            for name, item in self.items.items()
            if (item.status, item.available_at, item.role) == ("READY", 0, role) and item.session not in busy
        ]
        heads: dict[str, str] = {}
        for name in sorted(waiting, key=lambda name: -self.items[name].control):
            heads.setdefault(self.items[name].session, name)
        return sorted(heads.values(), key=lambda name: -self.items[name].control)

    def _compare(self, claims: list[Claim], taken: set[tuple[str, int]], owner: str) -> None:
        assert {(claim.id, claim.generation) for claim in claims} == taken
        assert {(claim.owner, claim.epoch) for claim in claims} <= {(owner, self.epoch)}
        self.shown.extend(claims)


# --- playing ----------------------------------------------------------------------------------------------

MACHINES: dict[str, type[Protocol]] = {"authority": Authority, "mailbox": Mailbox, "queue": Queue}
each_machine = pytest.mark.parametrize("machine", MACHINES)


def play(machine: str, fresh: Fresh, examples: int, acts: int, **options: Any) -> None:
    quick = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(
        lambda: MACHINES[machine](fresh),
        settings=settings(max_examples=examples, stateful_step_count=acts, **quick, **options),
    )


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Fresh]:
    """SQLite ledgers, each a copy of one that was made once."""
    with copies(tmp_path) as make:
        yield make


@contextmanager
def copies(folder: Path) -> Iterator[Fresh]:
    template, place = folder / "template", folder / "copy"
    template.mkdir()
    Database(template / "ledger.db").close()

    def make() -> Database:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template, place)
        return Database(place / "ledger.db")

    yield make


@each_machine
def test_any_order_of_acts_goes_as_the_model_says(machine: str, fresh: Fresh) -> None:
    play(machine, fresh, 25, 30)


@each_machine
def test_any_order_of_acts_goes_as_the_model_says_on_postgresql(
    machine: str, fresh_url: Callable[..., str], tmp_path: Path
) -> None:
    def fresh() -> Database:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        (tmp_path / "root").mkdir()
        return Database(fresh_url(), root=tmp_path / "root")

    play(machine, fresh, 3, 30, phases=[Phase.generate])


@pytest.mark.torture
@pytest.mark.timeout(3600)
@each_machine
def test_any_order_of_acts_at_length(machine: str, fresh: Fresh) -> None:
    play(machine, fresh, 500, 60)


PLANTED = [
    ("authority", "actor_leases.expires_at <= ? AND", "actor_leases.expires_at < ? AND"),
    ("authority", "AND process_identity = ? AND fencing_token = ? AND expires_at > ?", "AND ? = ? AND ? > 0"),
    ("authority", "AND status = 'ACTIVE' AND expires_at > ?", "AND status = 'ACTIVE' AND expires_at >= ?"),
    ("authority", "AND state = 'RUNNING' AND current_execution_attempt = ?", "AND ? <> ''"),
    ("mailbox", "deliveries = deliveries + 1", "deliveries = deliveries + 0"),
    ("mailbox", "AND claim_owner = ? AND fencing_token = ?", "AND claim_owner = ? AND ? > 0"),
    ("mailbox", "AND claim_expires_at <= ? AND seq > ?", "AND claim_expires_at < ? AND seq > ?"),
    ("queue", "AND generation = ? AND owner = ?", "AND ? > 0 AND owner = ?"),
    ("queue", "ORDER BY h.control DESC, h.seq", "ORDER BY h.seq"),
    ("queue", "losses = losses + ?", "losses = losses * ?"),
]


@pytest.mark.parametrize(("machine", "clause", "becomes"), PLANTED, ids=range(len(PLANTED)))
def test_a_broken_clause_is_found(
    machine: str, clause: str, becomes: str, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, met = sqlite.render, []

    def broken(text: str) -> str:
        met.append(clause in render(text))
        return render(text).replace(clause, becomes)

    monkeypatch.setattr(sqlite, "render", broken)
    with pytest.raises((AssertionError, SovereignError)):
        play(machine, fresh, 600, 40, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True)
    assert any(met)
