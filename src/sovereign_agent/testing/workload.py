"""Workload: what the processes of a torture do until they are killed.

A worker takes the mail it finds, runs the assignment that it names and settles the message. Where there is no mail
it plans: it wants outcomes, assigns their work, verifies, reviews, accepts, asks the assistant for something, and now
and then calls something off. Several workers want the same, so most acts may be refused, and a refusal is only
counted. What was answered as done is told to a `Witness`, who outlives the worker: the ledger must still know it in
the end.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import tomlkit

from sovereign_agent import assistant_work, configuration, fencing, outcomes, providers, relay, runs, supervisor
from sovereign_agent.clock import monotonic
from sovereign_agent.database import LEDGER_NAME, Connection, Database, authority
from sovereign_agent.errors import AuthorityLost, Contention, IllegalMove, LedgerUnavailable, Refusal
from sovereign_agent.organization import Organization
from sovereign_agent.records import OutcomeState, Role, Sow, SowState
from sovereign_agent.testing.crash_points import Doom, DoomedDatabase, die
from sovereign_agent.testing.invariants import violations
from sovereign_agent.workspace import POLICIES

ACTOR_LEASE_SECONDS = 0.5
EXECUTION_ATTEMPT_SECONDS = 0.7
LOSSES_BEFORE_PARKING = 2
CLAIM_TTL = timedelta(seconds=0.7)
TICK_SECONDS = 0.2
AUDIT_SECONDS = 0.3
PATIENCE = timedelta(seconds=0.8)
"""How long a call waits for another writer: not so long as an operator may withhold the ledger."""

PAUSE_SECONDS = 0.02
OPEN_OUTCOMES = 8
"""How many outcomes are wanted at a time: few enough that workers meet, enough that they do not only wait."""

OPEN_TURNS = 12
SESSIONS = ("lucy", "lou", "lea")

DONE = {"report": {"status": "completed", "summary": "It is done.", "deliverables": ["work.txt"]}}
ENDINGS: tuple[list[dict[str, Any]], ...] = (
    *[[DONE]] * 6,
    [{"report": {"status": "blocked", "summary": "It is not clear.", "question": "Which one?"}}],
    [DONE, {"sleep": ACTOR_LEASE_SECONDS}],  # outlasts its lease, if nobody renews it, but hardly its attempt
    [DONE, {"sleep": 1.5 * EXECUTION_ATTEMPT_SECONDS}],  # outlasts both; its report says completed all the while
    [DONE, {"exit": 1}],
    [],
)
OPERATORS = {f"operator-{number}": ending for number, ending in enumerate(ENDINGS)}
"""Who works, and how the program of each ends."""


class Witness:
    """A file of statements that outlives whoever made them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tell(self, kind: str, **facts: str | float) -> None:
        """Add one statement and when it was made, in a single write: whoever is killed made it whole or not at all."""
        line = json.dumps({"kind": kind, "at": time.time_ns() // 1000, **facts}) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def told(self, kind: str) -> list[dict[str, Any]]:
        """All statements of one kind."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [fact for fact in map(json.loads, lines) if fact["kind"] == kind]


@dataclass(slots=True)
class Life:
    """What a process knows when it starts. Its time is over at `ends_at`, or when process `parent` is gone.

    After `dies_after` ledger statements it kills itself; 0 lets it live. Its `doom` is carried out by its Database.
    """

    root: Path
    witness: Witness
    parent: int
    ends_at: float
    seed: str
    dies_after: int
    doom: Doom
    interrupted: bool = False

    def goes_on(self) -> bool:
        """Whether there is time left and somebody to live for. An interrupt that somebody swallowed ends it, too."""
        return monotonic() < self.ends_at and os.getppid() == self.parent and not self.interrupted

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal. A second one changes nothing: it would land in what the first has begun to tidy up."""
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt

    def dice(self) -> random.Random:
        """The dice of this life: the same seed, the same throws."""
        return random.Random(self.seed)  # noqa: S311 - nothing is kept secret here


def prepare(root: Path, ledger: str, dice: random.Random) -> None:
    """Make the organization: short leases, and operators of whom each has a program of its own.

    It also loads what a life would load, so that lives are spent on other things.
    """
    Organization.init(root, ledger_url=ledger).close()
    path = root / configuration.FILE_NAME
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    document["authority"]["actor_lease_seconds"] = ACTOR_LEASE_SECONDS
    document["authority"]["execution_attempt_seconds"] = EXECUTION_ATTEMPT_SECONDS
    document["authority"]["losses_before_parking"] = LOSSES_BEFORE_PARKING
    for operator, ending in OPERATORS.items():
        document["actors"][operator] = {"role": "operator", "provider": operator, "authority": ["execute"]}
        document["providers"][operator] = {"kind": "scripted", "steps": [*_beginning(dice), *ending]}
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    for provider in configuration.load(root).providers.values():
        providers.build(provider)


def _beginning(dice: random.Random) -> list[dict[str, Any]]:
    return [
        {"sleep": dice.uniform(0.001, 0.04)},
        {"write": "work.txt", "text": "x" * dice.randint(1, 5000)},
        {"stdout": "Something was written.\n"},
        {"sleep": dice.uniform(0.001, 0.04)},
    ]


class GivenOrganization(Organization):
    """An Organization over a ledger that it is given."""

    def __init__(self, root: Path, db: Database) -> None:
        self.root = root
        self.settings = configuration.load(root)
        self.process_identity = fencing.new_process_identity()
        self.db = db
        self._host = runs.Host(db, self.process_identity)


def opened(life: Life, *, authority_required: bool = True) -> closing[GivenOrganization]:
    """The organization over a doomed ledger, as soon as it opens: a restore may stand between its steps."""
    url = configuration.load(life.root).ledger.url
    while True:
        try:
            db = DoomedDatabase(
                url or life.root / LEDGER_NAME,
                life.root,
                life.doom,
                life.witness.tell,
                patience=PATIENCE,
                authority_required=authority_required,
            )
            return closing(GivenOrganization(life.root, db))
        except (Contention, LedgerUnavailable) as trouble:
            life.witness.tell("refusal", category=trouble.category)
            if not life.goes_on():
                raise KeyboardInterrupt from trouble
            time.sleep(TICK_SECONDS)


def supervise(life: Life) -> None:
    """Reconcile until the life is over."""

    def heed(report: supervisor.SupervisorReport) -> None:
        for problem in report.problems:
            life.witness.tell("problem", text=problem)
        if not life.goes_on():
            raise KeyboardInterrupt

    with opened(life) as org:
        supervisor.run(org, interval=TICK_SECONDS, on_tick=heed)


def audit(life: Life) -> None:
    """Ask for every promise again and again, while the others work: none may be broken for a moment."""
    with opened(life) as org:
        while life.goes_on():
            with suppress(Contention, LedgerUnavailable):
                for breach in violations(org.db.connection):
                    life.witness.tell("fault", text=f"For a moment: {breach}")
                life.witness.tell("audit")
            time.sleep(AUDIT_SECONDS)


def work(life: Life) -> None:
    """Take turns at work and at planning until the life is over."""
    with opened(life) as org:
        worker = Worker(org, life)
        while life.goes_on():
            try:
                worker.turn()
            except (Refusal, Contention, LedgerUnavailable) as refusal:
                life.witness.tell("refusal", category=refusal.category)
                time.sleep(PAUSE_SECONDS)


class Worker:
    """Somebody who does one thing at a time, for whichever actor has something to do."""

    def __init__(self, org: Organization, life: Life) -> None:
        self.org = org
        self.witness = life.witness
        self.dice = life.dice()
        self._origins = (f"{life.seed} {number}" for number in itertools.count())

    def turn(self) -> None:
        """Do one thing."""
        operator = self.dice.choice([*OPERATORS])
        mail = self.org.inbox(operator)
        if mail and self.happens(0.7):
            self.answer(operator, mail[0].id)
        elif self.happens(0.3):
            self.ask()
        else:
            self.plan()

    def answer(self, operator: str, message_id: str) -> None:
        """Run the assignment that a message names, and settle the message, even if the run was lost meanwhile."""
        message = relay.claim(self.org.db, message_id, operator, ttl=CLAIM_TTL)
        self.run(message.body)
        token = message.fencing_token or 0
        if self.happens(0.1):
            settled = relay.dead_letter(self.org.db, message)
        else:
            settled = relay.complete(self.org.db, message.id, operator, fencing_token=token)
        self.witness.tell("settled", id=settled.id, token=token, state=settled.state)

    def run(self, assignment_id: str) -> None:
        """Run an assignment, unless it is over."""
        begun, epoch = monotonic(), authority.control(self.org.db.connection).epoch
        try:
            receipt = self.org.run_assignment(assignment_id)
        except (IllegalMove, AuthorityLost) as refusal:
            self.witness.tell("refusal", category=refusal.category)
            early = refusal.category == "actor_lease_lost" and monotonic() - begun < ACTOR_LEASE_SECONDS
            if early and authority.control(self.org.db.connection).epoch == epoch:
                self.witness.tell("fault", text=f"Somebody took a lease that had not run out: {refusal}")
        else:
            self.witness.tell("receipt", id=receipt.id, attempt=receipt.attempt_id, process=self.org.process_identity)

    def ask(self) -> None:
        """Give the assistant something to do, and now and then ask for the same once more: it is the same."""
        if sum(assistant_work.count_open(self.org.db.connection).values()) >= OPEN_TURNS:
            return
        origin, session = next(self._origins), self.dice.choice(SESSIONS)
        ids = {assistant_work.enqueue(self.org.db, origin, session, "All of it.") for _ in range(1 + self.happens(0.2))}
        for work_id in ids:
            self.witness.tell("asked", id=work_id)
        if len(ids) > 1:
            self.witness.tell("fault", text=f"{origin} became two items: {ids}")

    def plan(self) -> None:
        """Take the next step of some outcome, or want another one."""
        wanted = outcomes.open_outcomes(self.org.db.connection)
        if len(wanted) < OPEN_OUTCOMES:
            self.want()
            return
        outcome = self.dice.choice(wanted)
        sows = outcomes.sows_of(self.org.db.connection, outcome.id)
        match outcome.state:
            case OutcomeState.DRAFT:
                self.org.activate(outcome.id, "principal-human")
            case OutcomeState.READY:
                self.org.accept(outcome.id, "principal-human")
                self.witness.tell("accepted", id=outcome.id)
            case _ if sows:
                self.advance(self.dice.choice(sows))
            case _:
                self.org.create_sow(outcome.id, "Do it.", Role.OPERATOR, "master-course")

    def want(self) -> None:
        """Want an outcome, with some work towards it."""
        outcome = self.org.create_outcome("It is done", "All of it is done.", [], "principal-human")
        self.org.activate(outcome.id, "principal-human")
        for _ in range(self.dice.randint(1, 3)):
            self.org.create_sow(outcome.id, "Do it.", Role.OPERATOR, "master-course")

    def advance(self, sow: Sow) -> None:
        """Take the next step of a statement of work."""
        match sow.state:
            case SowState.DRAFT:
                self.org.ready_sow(sow.id)
            case SowState.BLOCKED | SowState.FAILED if self.happens(0.5):
                self.org.rule(sow.id, "The other one.", "principal-human")
            case SowState.READY | SowState.FAILED | SowState.BLOCKED | SowState.REJECTED:
                policy = self.dice.choice(POLICIES)
                assigned = self.org.assign(
                    sow.id, self.dice.choice([*OPERATORS]), "master-course", workspace_policy=policy
                )
                self.org.send("master-course", assigned.actor_id, "Work for you", assigned.id)
            case SowState.ASSIGNED | SowState.RUNNING:
                self.disturb(sow)
            case SowState.COMPLETED:
                verdict = self.org.verify_sow(sow.id, "verifier-course")
                if not verdict.passed:
                    self.witness.tell("fault", text=f"{sow.id} was done, and is rejected: {verdict.reason}")
            case SowState.VERIFIED:
                self.org.review(sow.id, "sparring-course", approve=self.happens(0.8))
            case _:
                time.sleep(PAUSE_SECONDS)

    def disturb(self, sow: Sow) -> None:
        """Call open work off, take it over, or send the message about it again: the first may be dead."""
        assignment = outcomes.assignments_of(self.org.db.connection, sow.id)[-1]
        if self.happens(0.05):
            self.org.cancel(assignment.id, "master-course")
        elif sow.state is SowState.RUNNING and self.happens(0.5):
            self.run(assignment.id)
        elif self.happens(0.1):
            self.org.send("master-course", assignment.actor_id, "Work for you, still", assignment.id)
        else:
            time.sleep(PAUSE_SECONDS)

    def happens(self, odds: float) -> bool:
        """Throw the dice: yes, as often as `odds` says."""
        return self.dice.random() < odds


def die_after_statement(number: int, witness: Witness) -> None:
    """Let this process kill itself right after its `number`-th ledger statement; opening and committing count."""
    seen = itertools.count(1)

    def counted(statement: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            result = statement(*arguments, **options)
            if next(seen) == number:
                die(witness.tell)
            return result

        return run

    for name in ("begin", "execute", "commit"):
        setattr(Connection, name, counted(getattr(Connection, name)))
