"""Torture: real processes, real signals, and afterwards every promise is asked for.

    sovereign-agent torture --seconds 60 --workers 4

Workers, supervisors, an assistant and an operator share one organization with leases of half a second, and an auditor
reads over their shoulders. An executioner kills them all, stops them until they have lost everything, interrupts
them, and starts others in their place; some die by themselves, at a crash point that has a name or right after any
ledger statement, and some find the ledger full, read-only or locked. When the time is up:

    the ledger    keeps every promise of `invariants`, and `checker` finds no lie in its history
    the disk      has the ledger's own receipt beside each run
    the workers   were told nothing that the ledger does not know, under their own name
    the machine   has no process of ours left
    the list      of crash points and hardships has none that nobody met

The seed fixes what is done to whom; when it lands, the machine decides. This room mends nothing. It signals only
children of its own that it has not reaped, so a number is never another's.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from sovereign_agent.clock import monotonic
from sovereign_agent.database import Database
from sovereign_agent.errors import Refusal, SchemaMismatch
from sovereign_agent.organization import Organization
from sovereign_agent.testing import aftermath, crash_points, figures, operations, workload
from sovereign_agent.testing.checker import DIARY
from sovereign_agent.testing.crash_points import Doom, Hardship, Point
from sovereign_agent.testing.figures import Lifetime
from sovereign_agent.testing.workload import Life, Witness

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
STRIKES = {signal.SIGKILL: 2, signal.SIGSTOP: 1, signal.SIGTERM: 1}
"""What the executioner does, and how often."""

ROLES = {
    "worker": (workload.work, 4),
    "supervisor": (workload.supervise, 2),
    "assistant": (operations.assist, 2),
    "operator": (operations.operate, 1),
    "auditor": (workload.audit, 1),
}
"""What each of them does, and how often the executioner comes for one."""

SUPERVISORS, ASSISTANTS = 2, 2
CRASHES = "crashes.txt"
"""Where a process that ends by a fault of its interpreter leaves its traces, below the root."""

LONGEST_REST_SECONDS = 0.25
LONGEST_STOP_SECONDS = 2.5 * workload.EXECUTION_ATTEMPT_SECONDS
DOOMED, DOOMED_AGAIN = 0.85, 0.35
"""How many of the living are to die at a crash point of their role: while it has one that nobody died at, and later."""

SELF_KILLERS = 0.1
"""How many of the living kill themselves after any statement."""

LATEST_STATEMENT = 150
"""The last ledger statement after which they do."""

HARDLY_TRIED = 0.4
"""How many of the workers that are not to die at a point find their ledger full or read-only for a while."""

OVERTIME_SECONDS = 60.0
"""How much longer it may go on while there is a crash point or a hardship that nobody has met."""

LONGEST_WAY = 4_000_000
"""How long, in microseconds, one that is doomed is waited for in overtime."""

PATIENCE_SECONDS = 15.0
"""How long the living get to end when the time is up."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for. `root` is a folder that is empty, or not there yet; without a `ledger` URL it holds that."""

    root: Path
    seconds: float
    workers: int
    seed: int
    ledger: str = ""


def torture(options: Options) -> dict[str, Any]:
    """Torture, and answer what was seen; ``good`` says whether every promise was kept and nothing left out.

    Raises Refusal (``ledger_not_empty``) for a folder or a ledger that holds anything: it would be ruined.
    """
    _require_nothing(options)
    return Torture(options).play()


def _require_nothing(options: Options) -> None:
    """Refuse to torture what somebody may want to keep."""
    holds = "The folder is not empty." if options.root.exists() and any(options.root.iterdir()) else ""
    if options.ledger and not holds:
        try:
            Database(options.ledger, root=options.root, create=False, read_only=True).close()
        except SchemaMismatch as mismatch:
            holds = "" if mismatch.category == "schema_older" else mismatch.happened
        else:
            holds = "There is a ledger in that database."
    if holds:
        raise Refusal(
            "Nothing was tortured.",
            category="ledger_not_empty",
            why=f"{holds} Whatever is tortured is ruined.",
            next_command="name an empty folder and, on PostgreSQL, an empty database",
        )


@dataclass(eq=False)
class Place:
    """One place in the cast: whoever dies in it is followed by another life."""

    name: str
    role: str
    process: BaseProcess | None = None
    lives: int = 0
    killed: bool = False
    wakes_at: float = math.inf
    doom: Doom = field(default_factory=Doom)
    lifetime: Lifetime | None = None

    def start(self, life: Life) -> Lifetime:
        """Begin a life. Signals wait until the child can answer them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
        self.process = multiprocessing.get_context("fork").Process(target=_live, args=(ROLES[self.role][0], life))
        self.lives, self.killed, self.wakes_at, self.doom = self.lives + 1, False, math.inf, life.doom
        began_at = _now()
        self.process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
        touched_at = began_at if life.doom.hardship else math.inf
        self.lifetime = Lifetime(self.process.pid or 0, began_at, touched_at)
        return self.lifetime

    def lives_on(self) -> bool:
        """Whether somebody is alive here; a stopped process is."""
        return self.process is not None and self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Signal whoever is alive here."""
        if self.process and self.process.is_alive() and self.process.pid and self.lifetime:
            self.killed |= number is signal.SIGKILL
            self.lifetime.touched_at = min(self.lifetime.touched_at, _now())
            if number is signal.SIGKILL:
                self.lifetime.killed_at = _now()
            os.kill(self.process.pid, number)

    def bury(self, seconds: float | None = None) -> int | None:
        """Wait for the end of a life, and answer how it ended; None if there was none, or it has not ended."""
        if self.process is None:
            return None
        self.process.join(seconds)
        code = self.process.exitcode
        if code is not None:
            self.process.close()
            self.process = None
        return code


class Torture:
    """The executioner. It keeps no ledger open while children are made: what is open must not be forked."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.root = options.root.resolve()
        self.engine = "postgresql" if options.ledger else "sqlite"
        self.dice = random.Random(options.seed)  # noqa: S311 - nothing is kept secret here
        self.witness = Witness(self.root / "witness.jsonl")
        self.signals: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.reached: Counter[Point] = Counter(dict.fromkeys(crash_points.points(self.engine), 0))
        of_one = [one for one in crash_points.hardships(self.engine) if one is not Hardship.LOCKED]
        self.hardships: Counter[Hardship] = Counter(dict.fromkeys(of_one, 0))
        self.lifetimes: list[Lifetime] = []
        self.felt: Counter[str] = Counter()
        self.findings: list[str] = []
        self.stopped = False
        self.cast = [
            *(Place(f"worker {number}", "worker") for number in range(options.workers)),
            *(Place(f"supervisor {number}", "supervisor") for number in range(SUPERVISORS)),
            *(Place(f"assistant {number}", "assistant") for number in range(ASSISTANTS)),
            Place("operator", "operator"),
            Place("auditor", "auditor"),
        ]

    def play(self) -> dict[str, Any]:
        """Torture for the time that is given, or until ^C, and answer what was seen."""
        begun = monotonic()
        handlers = {number: signal.signal(number, self._stop) for number in INTERRUPTS}
        try:
            self._prepare()
            self._storm(begun + self.options.seconds)
            seconds = monotonic() - begun
        finally:
            self._end_everybody()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        with closing(aftermath.mended(self.root)) as org:
            self.findings += aftermath.findings(org, self.witness)
            return self._report(org, seconds)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Handle ^C. Nothing is raised, so nobody can swallow it, and a second one leaves nobody behind."""
        self.stopped = True

    def _prepare(self) -> None:
        workload.prepare(self.root, self.options.ledger, self.dice)
        with closing(Organization(self.root)) as org:
            org.db.extend("torture", operations.DEEDS)
            if self.engine == "sqlite":
                org.db.extend("diary", DIARY)

    def _storm(self, ends_at: float) -> None:
        """The operator comes when the others have been through their points, or in the second half."""
        operator_comes_at = (monotonic() + ends_at) / 2
        latest = ends_at + OVERTIME_SECONDS
        while not self.stopped and (monotonic() < ends_at or (monotonic() < latest and self._never_met())):
            for place in self.cast:
                if place.lives_on():
                    if place.wakes_at < monotonic():
                        place.wakes_at = math.inf
                        place.send(signal.SIGCONT)
                    continue
                self._bury(place)
                if place.role != "operator" or monotonic() > operator_comes_at or self._others_are_through():
                    self.lifetimes.append(place.start(self._life(place, latest + PATIENCE_SECONDS)))
            if monotonic() < ends_at:
                self._strike(*self.dice.choices(self.cast, [ROLES[place.role][1] for place in self.cast]))
            else:
                self._make_room()
            time.sleep(self.dice.uniform(0.0, LONGEST_REST_SECONDS))

    def _others_are_through(self) -> bool:
        return all(count for point, count in self.reached.items() if point.step.who != "operator")

    def _met(self) -> dict[str, int]:
        """How often somebody died at each crash point, and felt each hardship."""
        self.felt = Counter(str(fact["name"]) for fact in self.witness.told("hardship"))
        points = {str(point): count for point, count in self.reached.items()}
        return points | {str(one): self.felt[one] for one in crash_points.hardships(self.engine)}

    def _never_met(self) -> list[str]:
        return [name for name, count in self._met().items() if not count]

    def _make_room(self) -> None:
        """In overtime: end whoever is not on the way to what nobody has met, where its role is doomed to it."""
        never = self._never_met()
        wanted = {point.step.who for point, count in self.reached.items() if not count}
        wanted |= {"worker" for one in self.hardships if not self.felt[one]}  # whoever is to wait for a lock must live
        for place in self.cast:
            began_at = place.lifetime.began_at if place.lifetime else 0
            on_its_way = str(place.doom.point or place.doom.hardship) in never and _now() < began_at + LONGEST_WAY
            if place.role in wanted and not on_its_way:
                place.send(signal.SIGKILL)

    def _strike(self, place: Place) -> None:
        """Do something to whoever is there, unless it is stopped: it shall wake, and find out what it has lost."""
        if place.wakes_at < math.inf or not place.lives_on():
            return
        [number] = self.dice.choices([*STRIKES], weights=[*STRIKES.values()])
        self.signals[number.name] += 1
        place.send(number)
        if number is signal.SIGSTOP:
            place.wakes_at = monotonic() + self.dice.uniform(0.0, LONGEST_STOP_SECONDS)

    def _life(self, place: Place, ends_at: float) -> Life:
        return Life(
            root=self.root,
            witness=self.witness,
            parent=os.getpid(),
            ends_at=ends_at,
            seed=f"{self.options.seed} {place.name} {place.lives}",
            dies_after=self.dice.randint(1, LATEST_STATEMENT) * (self.dice.random() < SELF_KILLERS),
            doom=self._doom(place.role),
        )

    def _doom(self, role: str) -> Doom:
        """What is to become of the next one in this role: those points come first that the fewest have died at."""
        points = [point for point in self.reached if point.step.who == role]
        urgent = not all(self.reached[point] for point in points)
        if points and self.dice.random() < (DOOMED if urgent else DOOMED_AGAIN):
            self.dice.shuffle(points)
            return Doom(min(points, key=self.reached.__getitem__), times=1 if urgent else self.dice.randint(1, 3))
        if role == "worker" and self.dice.random() < HARDLY_TRIED:
            hardship = min(self.hardships, key=lambda one: (self.felt[one] > 0, self.hardships[one]))
            self.hardships[hardship] += 1
            return Doom(hardship=hardship, lasts=self.dice.randint(10, 60))
        return Doom()

    def _bury(self, place: Place, seconds: float | None = None) -> None:
        code = place.bury(seconds)
        if code == -signal.SIGKILL:
            self.deaths[place.role] += 1
            if not place.killed and place.doom.point:
                self.reached[place.doom.point] += 1
            elif not place.killed:
                self.signals["after a statement"] += 1
        elif code not in (None, 0) and not (place.role == "assistant" and code == -signal.SIGTERM):
            self.findings.append(f"A {place.name} ended with {code}.")  # a service ends at a second SIGTERM

    def _end_everybody(self) -> None:
        deadline = monotonic() + PATIENCE_SECONDS
        for place in self.cast:
            place.send(signal.SIGCONT)
            place.send(signal.SIGTERM)
        for place in self.cast:
            self._bury(place, max(0.0, deadline - monotonic()))
            if place.lives_on():
                self.findings.append(f"A {place.name} had not ended {PATIENCE_SECONDS:g} s after SIGTERM.")
                place.send(signal.SIGKILL)
                self._bury(place)

    def _report(self, org: Organization, seconds: float) -> dict[str, Any]:
        receipts = _counted(org, "SELECT trim(status || ' ' || failure_category), count(*) FROM receipts GROUP BY 1")
        faults = [f"Somebody met what may never be: {fault['text']}" for fault in self.witness.told("fault")]
        violations = [*dict.fromkeys([*faults, *self.findings])]
        met = self._met()
        never = [name for name, count in met.items() if not count]
        return {
            "good": not violations and not never,
            "ledger": org.db.engine,
            "root": str(self.root),
            "seed": self.options.seed,
            "seconds": round(seconds, 1),
            "lives": sum(place.lives for place in self.cast),
            "killed": dict(self.deaths),
            "runs": sum(receipts.values()),
            "runs_per_second": round(sum(receipts.values()) / seconds, 1),
            "signals": dict(self.signals),
            "crash_points": {str(point): count for point, count in self.reached.items()},
            "hardships": {str(one): met[one] for one in crash_points.hardships(self.engine)},
            "never_met": never,
            "receipts": receipts,
            "attempts": _counted(org, "SELECT status, count(*) FROM execution_attempts GROUP BY 1"),
            "messages": _counted(org, "SELECT state, count(*) FROM messages GROUP BY 1"),
            "outcomes": _counted(org, "SELECT state, count(*) FROM outcomes GROUP BY 1"),
            "assistant": _counted(org, "SELECT status, count(*) FROM assistant_work GROUP BY 1"),
            "authority": _counted(org, "SELECT kind, count(*) FROM events WHERE kind LIKE 'authority.%' GROUP BY 1"),
            "refusals": dict(Counter(str(fact["category"]) for fact in self.witness.told("refusal"))),
            "audits": len(self.witness.told("audit")),
            "problems": len(self.witness.told("problem")),
            "attempt_seconds": workload.EXECUTION_ATTEMPT_SECONDS,
            **figures.measured(org.db.connection, self._lifetimes(), self._withheld()),
            "violations": violations,
        }

    def _lifetimes(self) -> list[Lifetime]:
        """Every life, with the deaths that only the dying knew of."""
        dying = {int(fact["pid"]): int(fact["at"]) for fact in self.witness.told("dying")}
        return [
            replace(life, killed_at=dying[life.pid])
            if life.killed_at == math.inf and life.began_at <= dying.get(life.pid, 0)
            else life
            for life in self.lifetimes
        ]

    def _withheld(self) -> list[tuple[float, float]]:
        told = self.witness.told("withheld")
        return [(fact["at"], fact["at"] + fact["seconds"] * figures.MICROSECONDS) for fact in told]


def _now() -> int:
    """Microseconds since 1970, by this machine's clock."""
    return time.time_ns() // 1000


def _live(act: Callable[[Life], None], life: Life) -> None:
    """One life. Whatever ends it, but a signal or the end of its time, is told as a fault."""
    try:
        faulthandler.enable((life.root / CRASHES).open("a"))
        logging.disable()  # zombies complain of what they have lost; what counts of it stands in the ledger
        for number in INTERRUPTS:
            signal.signal(number, life.interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
        if life.dies_after:
            workload.die_after_statement(life.dies_after, life.witness)
        act(life)
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001 - the parent reports it
        life.witness.tell("fault", text=traceback.format_exc())
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)


def _counted(org: Organization, query: str) -> dict[str, int]:
    return {str(row[0]): int(row[1]) for row in org.db.connection.execute(query)}
