"""Cast: the simulated processes, and what each can do next.

    worker       hosts actors, runs assignments, answers messages, works on assistant items, acts outside the house
    supervisor   ticks and sweeps
    planner      wants, plans, judges and calls off; fills the mailbox and the queue
    operator     pauses, resumes, backs up, restores, begins epochs, says what became of acts outside

An act is chosen by the dice and by what its process remembers, which may long be history: nobody is told that it has
lost something before it is refused. Choosing only looks at the ledger; what is chosen can be done twice, with the same
arguments.
A program's work is not simulated, only what is asked of the ledger before, during and after it. Outside is a count of
what arrived there: nobody rolls it back, and only a person looks at it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sovereign_agent import assistant_service, assistant_work, effects, fencing, relay, runs, supervisor
from sovereign_agent.clock import ManualClock
from sovereign_agent.configuration import Settings
from sovereign_agent.errors import AuthorityLost
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Proposal
from sovereign_agent.records import ActorLease, ExecutionAttempt, Message, Receipt, ReceiptStatus, Role
from sovereign_agent.testing.faults import FaultyDatabase
from sovereign_agent.workspace import POLICIES

T = TypeVar("T")
Deed = Callable[[], object]
"""What was chosen: a call of the real functions, and what the process makes of the answer."""

OPERATORS = tuple(f"operator-{number}" for number in range(4))
PRINCIPAL, MASTER, VERIFIER, SPARRING = "principal-human", "master-course", "verifier-course", "sparring-course"
SESSIONS = tuple(f"session-{number}" for number in range(5))
TTL = timedelta(seconds=90)
TTL_SECONDS = TTL.total_seconds()
ELSEWHERE = "simulated-host"
"""Where runs have their folders: on no host that is here, so that nothing of them is done on disk."""

FORGETTING_ODDS = 0.7
"""How often a process forgets what it has given up or lost. Otherwise it tries again, as if it had not heard."""

MOST_OPEN = 6
"""How many outcomes, messages and items are wanted before some are finished."""

MOST_BACKUPS = 3
ACTS_OF_AN_ITEM = 3
"""Each life of an item may try any of them, under the same operation ids."""

FATES = ((True, "done"), (True, "done"), (True, effects.UNKNOWN), (False, effects.UNKNOWN), (False, "none"))
"""Whether an act arrives, and what its worker sees of it."""

PROPOSALS = (
    Proposal(ReceiptStatus.COMPLETED, "", "done", None),
    Proposal(ReceiptStatus.COMPLETED, "", "done", None),
    Proposal(ReceiptStatus.BLOCKED, "", "a question", None),
    Proposal(ReceiptStatus.FAILED, "missing_report", "nothing", None),
)


@dataclass
class ProcessClock:
    """The clock of one process: the world's, and how far this one is off."""

    world: ManualClock
    skew: timedelta = timedelta(0)

    def __call__(self) -> datetime:
        return self.world() + self.skew


class SimulatedOrganization(Organization):
    """An Organization over a ledger that it is given."""

    def __init__(self, root: Path, settings: Settings, db: FaultyDatabase) -> None:
        self.root = root
        self.settings = settings
        self.db = db
        self.process_identity = fencing.new_process_identity()


@dataclass
class Act:
    """What was let out of the house under a claim, and how its worker saw it end: not at all, before it has left."""

    operation_id: str
    claim: assistant_work.Claim
    seen: str = "none"


@dataclass
class Memory:
    """What a process believes that it holds. Its end is the end of it."""

    leases: list[ActorLease] = field(default_factory=list[ActorLease])
    attempts: list[ExecutionAttempt] = field(default_factory=list[ExecutionAttempt])
    receipts: dict[str, Receipt] = field(default_factory=dict[str, Receipt])
    messages: list[Message] = field(default_factory=list[Message])
    claims: list[assistant_work.Claim] = field(default_factory=list[assistant_work.Claim])
    acts: list[Act] = field(default_factory=list[Act])


class Process:
    """One simulated process. `life` counts who has been it; `wakes_at` is the step at which a stopped one goes on."""

    acts: Sequence[tuple[str, int]] = ()
    """The names of its methods that choose a deed, and how often each is asked."""

    fault_odds = 0.1
    """How often an act of it meets a fault."""

    def __init__(
        self, root: Path, settings: Settings, db: FaultyDatabase, clock: ProcessClock, outside: Counter[str]
    ) -> None:
        self.root, self.settings, self.db, self.clock, self.outside = root, settings, db, clock, outside
        self.life, self.wakes_at = 0, 0
        self.begin_life()

    def begin_life(self) -> None:
        """Be another process in the same place: under another identity, remembering nothing."""
        self.life += 1
        self.db.begin_life()
        self.memory = Memory()
        self.org = SimulatedOrganization(self.root, self.settings, self.db)
        self.identity = self.org.process_identity

    def now(self) -> float:
        """The time in seconds, for the functions that are told it."""
        return self.clock().timestamp()

    def choose(self, dice: random.Random) -> tuple[str, Deed] | None:
        """One act that there is something to do for; None when the first choices found nothing."""
        names, weights = zip(*self.acts, strict=True)
        for name in dice.choices(names, weights, k=4):
            deed = getattr(self, name)(dice)
            if deed:
                return name, deed
        return None

    def rows(self, sql: str, *params: str) -> list[Any]:
        """What a look at the ledger shows."""
        return [row[0] if len(row) == 1 else tuple(row) for row in self.db.connection.execute(sql, params)]


def one(dice: random.Random, things: Sequence[T]) -> T | None:
    """One of them; None if there is none."""
    return dice.choice(things) if things else None


def about(dice: random.Random, held: list[T], thing: T, deed: Deed, *, gives_up: bool = False) -> Deed:
    """A deed on something that is held. Whoever gives it up by that, or is told that it is lost, mostly forgets it."""
    forgets = dice.random() < FORGETTING_ODDS

    def forget() -> None:
        if forgets and thing in held:
            held.remove(thing)

    def done() -> object:
        try:
            answer = deed()
        except AuthorityLost:
            forget()
            raise
        if gives_up:
            forget()
        return answer

    return done


class Worker(Process):
    """Whoever holds authority, and writes under it."""

    acts = (
        ("take_lease", 5),
        ("renew_lease", 1),
        ("release_lease", 1),
        ("begin_run", 15),
        ("renew_run", 5),
        ("end_run", 9),
        ("claim_message", 3),
        ("complete_message", 3),
        ("bury_message", 1),
        ("claim_item", 4),
        ("claim_child", 5),
        ("observe", 8),
        ("renew_claim", 3),
        ("finish_item", 3),
        ("finish_and_claim", 1),
        ("release_item", 1),
        ("retry_item", 1),
        ("delegate", 2),
        ("act_outside", 4),
        ("settle_act", 5),
    )

    def take_lease(self, dice: random.Random) -> Deed | None:
        wanted = self.rows("SELECT actor_id FROM assignments WHERE state IN ('CREATED', 'RUNNING') ORDER BY rowid")
        actor = dice.choice(wanted or OPERATORS)

        def deed() -> None:
            lease = fencing.acquire_or_renew_actor_lease(self.db, actor, self.identity, ttl=TTL)
            self.memory.leases = [*(each for each in self.memory.leases if each.actor_id != actor), lease]

        return deed

    def renew_lease(self, dice: random.Random) -> Deed | None:
        return self._with_lease(dice, partial(fencing.renew_actor_lease, ttl=TTL))

    def release_lease(self, dice: random.Random) -> Deed | None:
        return self._with_lease(dice, fencing.release_actor_lease, gives_up=True)

    def _with_lease(self, dice: random.Random, act: Callable[..., object], *, gives_up: bool = False) -> Deed | None:
        lease = one(dice, self.memory.leases)
        if lease is None:
            return None
        deed = partial(act, self.db, lease.actor_id, self.identity, lease.fencing_token)
        return about(dice, self.memory.leases, lease, deed, gives_up=gives_up)

    def begin_run(self, dice: random.Random) -> Deed | None:
        found = self.rows("SELECT id, actor_id FROM assignments WHERE state IN ('CREATED', 'RUNNING') ORDER BY rowid")
        chosen = one(
            dice, [(work, lease) for work, actor in found for lease in self.memory.leases if lease.actor_id == actor]
        )
        if chosen is None:
            return None
        assignment_id, lease = chosen

        def deed() -> None:
            attempt = fencing.acquire_execution_attempt(
                self.db, assignment_id, lease.actor_id, self.identity, lease.fencing_token, ttl=TTL, host=ELSEWHERE
            )
            self.memory.attempts.append(attempt)

        return about(dice, self.memory.leases, lease, deed)

    def renew_run(self, dice: random.Random) -> Deed | None:
        attempt = one(dice, self.memory.attempts)
        if attempt is None:
            return None
        shown: Any = {"silent": timedelta(seconds=1), "step": "at work", "tolerance": TTL}
        deed = partial(fencing.renew_run, self.db, attempt, attempt_ttl=TTL, lease_ttl=TTL, **shown)
        return about(dice, self.memory.attempts, attempt, deed)

    def end_run(self, dice: random.Random) -> Deed | None:
        attempt = one(dice, self.memory.attempts)
        if attempt is None:
            return None
        proposed = runs.receipt_for(attempt, dice.choice(PROPOSALS))
        receipt = self.memory.receipts.setdefault(attempt.id, proposed)  # a result does not change when it is repeated
        deed = partial(runs.finish, self.db, attempt, receipt, patience_seconds=0)
        return about(dice, self.memory.attempts, attempt, deed, gives_up=True)

    def claim_message(self, dice: random.Random) -> Deed | None:
        found = self.rows("SELECT id, recipient FROM messages WHERE state IN ('NEW', 'CLAIMED') ORDER BY seq")
        chosen, meddler = one(dice, found), dice.choice((*[""] * 9, dice.choice(OPERATORS)))
        if chosen is None:
            return None
        message_id, recipient = chosen
        return lambda: self.memory.messages.append(relay.claim(self.db, message_id, meddler or recipient, ttl=TTL))

    def complete_message(self, dice: random.Random) -> Deed | None:
        message = one(dice, self.memory.messages)
        if message is None:
            return None
        token = message.fencing_token or 0
        deed = partial(relay.complete, self.db, message.id, message.recipient, fencing_token=token)
        return about(dice, self.memory.messages, message, deed, gives_up=True)

    def bury_message(self, dice: random.Random) -> Deed | None:
        message = one(dice, self.memory.messages)
        if message is None:
            return None
        return about(dice, self.memory.messages, message, partial(relay.dead_letter, self.db, message), gives_up=True)

    def claim_item(self, dice: random.Random) -> Deed | None:
        return self._claim(assistant_work.SHOP, dice.choice((1, 1, 3)))

    def claim_child(self, _dice: random.Random) -> Deed | None:
        return self._claim(assistant_work.RESEARCH, 1)

    def _claim(self, role: str, limit: int) -> Deed | None:
        waiting = self.rows("SELECT id FROM assistant_work WHERE role = ? AND status IN ('READY', 'RUNNING')", role)

        def deed() -> None:
            self.memory.claims += assistant_work.claim_many(
                self.db, self.identity, limit, ttl=TTL_SECONDS, now=self.now(), role=role
            )

        return deed if waiting else None

    def observe(self, dice: random.Random) -> Deed | None:
        return self._under_a_claim(dice, assistant_work.observe, {"text": "done so far"})

    def renew_claim(self, dice: random.Random) -> Deed | None:
        return self._under_a_claim(dice, assistant_work.renew, TTL_SECONDS)

    def finish_item(self, dice: random.Random) -> Deed | None:
        status = dice.choice(("DONE", "DONE", "DONE", "BLOCKED", "CANCELED"))
        return self._under_a_claim(dice, assistant_work.finish, status, "so", gives_up=True)

    def finish_and_claim(self, dice: random.Random) -> Deed | None:
        def act(db: FaultyDatabase, claim: assistant_work.Claim, *, now: float) -> None:
            following = assistant_work.finish_and_claim(db, claim, "DONE", ttl=TTL_SECONDS, now=now)
            self.memory.claims += [following] if following else []

        return self._under_a_claim(dice, act, gives_up=True)

    def release_item(self, dice: random.Random) -> Deed | None:
        act = partial(assistant_work.release, available_after=dice.choice((0, 5)))
        return self._under_a_claim(dice, act, gives_up=True)

    def retry_item(self, dice: random.Random) -> Deed | None:
        act = partial(assistant_work.retry, available_after=dice.choice((0, 5)))
        return self._under_a_claim(dice, act, "it failed", gives_up=True)

    def delegate(self, dice: random.Random) -> Deed | None:
        deadline, origin = self.now() + dice.choice((20, 200, 2000)), f"child {dice.getrandbits(64):x}"
        act = partial(assistant_work.delegate, deadline=deadline, budget=1, origin=origin)
        return self._under_a_claim(dice, act, "Look into it.")

    def act_outside(self, dice: random.Random) -> Deed | None:
        """Its intent first; once that is committed it leaves, and arrives or does not."""
        claim = one(dice, self.memory.claims)
        if claim is None:
            return None
        act, (arrives, seen) = Act(f"op_{claim.id}_{dice.randrange(ACTS_OF_AN_ITEM)}", claim), dice.choice(FATES)

        def deed() -> None:
            with self.db.transaction() as connection:
                at = assistant_work.assert_current(connection, claim, self.now())
                effects.intend(connection, act.operation_id, claim, tool="order", arguments="{}", at=at)
                self.memory.acts.append(act)
            act.seen = seen
            self.outside[act.operation_id] += arrives

        return about(dice, self.memory.claims, claim, deed)

    def settle_act(self, dice: random.Random) -> Deed | None:
        act = one(dice, self.memory.acts)
        if act is None:
            return None

        def deed() -> None:
            with self.db.transaction() as connection:
                at = assistant_work.assert_current(connection, act.claim, self.now())
                effects.settle(connection, act.operation_id, act.seen, at=at)

        return about(dice, self.memory.acts, act, deed, gives_up=True)

    def _under_a_claim(
        self, dice: random.Random, act: Callable[..., object], *arguments: object, gives_up: bool = False
    ) -> Deed | None:
        claim = one(dice, self.memory.claims)
        if claim is None:
            return None
        return about(
            dice,
            self.memory.claims,
            claim,
            lambda: act(self.db, claim, *arguments, now=self.now()),
            gives_up=gives_up,
        )


class Supervisor(Process):
    """Whoever finds what the dead have left."""

    acts = (("tick", 3), ("sweep", 1))

    def tick(self, _dice: random.Random) -> Deed | None:
        return lambda: supervisor.tick(self.org)

    def sweep(self, _dice: random.Random) -> Deed | None:
        return lambda: relay.sweep_expired_claims(self.db)


class Planner(Process):
    """Whoever wants something, gives it out, and judges it."""

    acts = (
        ("want", 4),
        ("assign", 14),
        ("judge", 14),
        ("cancel_run", 1),
        ("free_actor", 1),
        ("send", 6),
        ("enqueue", 8),
        ("cancel_item", 1),
    )

    def want(self, dice: random.Random) -> Deed | None:
        if len(self.rows("SELECT id FROM outcomes WHERE state <> 'ACCEPTED'")) >= MOST_OPEN:
            return None
        pieces = dice.randint(1, 3)

        def deed() -> None:
            outcome = self.org.create_outcome("It is done", "All of it is done.", [], PRINCIPAL)
            self.org.activate(outcome.id, PRINCIPAL)
            for _ in range(pieces):
                self.org.ready_sow(self.org.create_sow(outcome.id, "Do it.", Role.OPERATOR, MASTER).id)

        return deed

    def assign(self, dice: random.Random) -> Deed | None:
        assignable = self.rows("SELECT id FROM sows WHERE state IN ('READY', 'FAILED', 'REJECTED') ORDER BY rowid")
        sow_id, actor, policy = one(dice, assignable), dice.choice(OPERATORS), dice.choice(POLICIES)
        return sow_id and (lambda: self.org.assign(sow_id, actor, MASTER, workspace_policy=policy))

    def judge(self, dice: random.Random) -> Deed | None:
        waiting = self.rows(
            "SELECT id, state FROM sows WHERE state IN ('COMPLETED', 'VERIFIED', 'BLOCKED', 'FAILED') ORDER BY rowid"
        )
        waiting += self.rows("SELECT id, state FROM outcomes WHERE state = 'READY' ORDER BY rowid")
        chosen, approve = one(dice, waiting), dice.choice((True, True, False))
        if chosen is None:
            return None
        found, state = chosen
        match state:
            case "COMPLETED":
                return lambda: self.org.verify_sow(found, VERIFIER)
            case "VERIFIED":
                return lambda: self.org.review(found, SPARRING, approve=approve)
            case "READY":
                return lambda: self.org.accept(found, PRINCIPAL)
            case _:
                return lambda: self.org.rule(found, "The other one.", PRINCIPAL)

    def cancel_run(self, dice: random.Random) -> Deed | None:
        found = one(dice, self.rows("SELECT id FROM assignments WHERE state IN ('CREATED', 'RUNNING') ORDER BY rowid"))
        return found and (lambda: self.org.cancel(found, MASTER))

    def free_actor(self, dice: random.Random) -> Deed | None:
        actor = dice.choice(OPERATORS)
        return lambda: self.org.free_actor(actor, MASTER)

    def send(self, dice: random.Random) -> Deed | None:
        recipient = dice.choice(OPERATORS)
        return lambda: self.org.send(MASTER, recipient, "Work for you", "")

    def enqueue(self, dice: random.Random) -> Deed | None:
        origin, session, control = (
            f"turn {dice.getrandbits(64):x}",
            dice.choice(SESSIONS),
            dice.choice((True, *[False] * 9)),
        )
        delay, retries = dice.choice((0, 0, 0, 20)), dice.choice((0, 2))
        return lambda: assistant_work.enqueue(
            self.db,
            origin,
            session,
            "Do it.",
            control=control,
            available_after=delay,
            retries=retries,
            now=self.now(),
        )

    def cancel_item(self, dice: random.Random) -> Deed | None:
        found = one(dice, self.rows("SELECT id FROM assistant_work WHERE status <> 'DONE' ORDER BY seq"))
        return found and (lambda: assistant_work.cancel(self.db, found, actor=MASTER, now=self.now()))


class Operator(Process):
    """Whoever has a whole ledger in hand. What it may do next depends on how the ledger stands."""

    fault_odds = 0.4  # its acts are few, and have many places to die in
    acts = (
        ("pause", 2),
        ("resume", 60),
        ("back_up", 4),
        ("restore", 5),
        ("new_epoch", 1),
        ("mend", 60),
        ("reconcile", 20),
    )

    def pause(self, _dice: random.Random) -> Deed | None:
        paused = self.rows("SELECT paused FROM assistant_control")[0]
        return None if paused else (lambda: assistant_service.pause(self.db, PRINCIPAL, "a look"))

    def resume(self, _dice: random.Random) -> Deed | None:
        health = assistant_service.health(self.db)
        return (lambda: assistant_service.resume(self.db, PRINCIPAL, "looked")) if health.paused else None

    def back_up(self, _dice: random.Random) -> Deed | None:
        taken = [*self.root.glob("backup-*")]
        destination = self.root / f"backup-{len(taken)}"
        return None if len(taken) == MOST_BACKUPS else (lambda: assistant_service.backup(self.db, destination))

    def restore(self, dice: random.Random) -> Deed | None:
        backup = one(dice, sorted(self.root.glob("backup-*"))[-2:])
        return backup and (lambda: assistant_service.restore(self.db, backup, actor=PRINCIPAL, reason="a test"))

    def new_epoch(self, _dice: random.Random) -> Deed | None:
        return lambda: assistant_service.new_epoch(self.db, PRINCIPAL, "a test")

    def mend(self, dice: random.Random) -> Deed | None:
        """After a restore that ended half-way, or a new epoch that ended between the marker and the ledger."""
        health = assistant_service.health(self.db)
        if health.restoring:
            back = partial(assistant_service.roll_back_restore, self.db, actor=PRINCIPAL)
            return dice.choice((partial(assistant_service.finish_restore, self.db), back))
        return None if health.agrees else self.new_epoch(dice)

    def reconcile(self, dice: random.Random) -> Deed | None:
        """Look outside whether an act has arrived, and say so."""
        effect = one(dice, effects.unsettled(self.db.connection))
        if effect is None:
            return None
        found = "done" if self.outside[effect.operation_id] else "none"
        return lambda: effects.reconcile(self.db, effect.operation_id, found, actor=PRINCIPAL, reason="a look outside")
