"""Schedules: one order in which the transactions of a few actors follow one another, chosen and repeatable.

A scenario names two to four actors and what each of them does, with the functions that a worker, a supervisor or an
operator calls. Each actor has a thread and a `Database` of its own on one SQLite ledger. Such a handle waits before
each transaction, and before each look into the ledger outside of one, until it is the actor's turn; so exactly one
goes on at any moment, and a run is the list of the choices that were made:

    worker                           it takes its next step
    worker dies before its step      a step is a transaction, or a look into the ledger
    worker dies before its commit    what the transaction did is undone
    worker dies after its commit     and never learns of it
    clock jumps forward              by the scenario's time to live, to the microsecond; or `jumps back`

Each run begins with the template ledger, and is judged by the ledger's promises, by what the actors were told, and by
the scenario itself. The clock is one for all, nothing waits for a lock (whoever would is told that the ledger is busy),
and a commit is durable: skew is for the simulation, waits are for the torture.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sovereign_agent.clock import ManualClock
from sovereign_agent.database import LEDGER_NAME, Connection, Database, Transaction
from sovereign_agent.errors import ConfigurationFault, Contention, Refusal
from sovereign_agent.organization import Organization
from sovereign_agent.testing.answers import Fact
from sovereign_agent.testing.faults import is_of_the_disk
from sovereign_agent.testing.invariants import violations

T = TypeVar("T")

MEMORY = Path("/dev/shm")  # noqa: S108 - only a folder of its own is made in it, as in any temporary folder
CLOCK = "clock"
PAUSE = "is paused"
HEADER = "scenario "
PATIENCE_SECONDS = 180.0
"""How long a step may take before the run is given up: nothing in a step waits for anybody."""


class How(StrEnum):
    """How a choice goes: all but the first are faults."""

    STEP = ""
    DIES = "dies before its step"
    UNDONE = "dies before its commit"
    UNHEARD = "dies after its commit"
    FORWARD = "jumps forward"
    BACK = "jumps back"


FAULTS = (*[how.value for how in How if how], PAUSE)
"""Every kind of fault; where one never fired, nothing was shown about it."""


class Effect(IntEnum):
    """What a choice can mean for the other actors."""

    NOTHING = 0
    READS = 1
    WRITES = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a schedule. Its effect is known before it is made, and no script needs to say it."""

    actor: str
    how: How = How.STEP
    effect: Effect = field(default=Effect.WRITES, compare=False)

    def __str__(self) -> str:
        return f"{self.actor} {self.how}".rstrip()

    def commutes(self, other: Choice) -> bool:
        """Whether the two lead to the same end in either order, neither of them hindering the other."""
        if self.actor == other.actor:
            return False
        return Effect.NOTHING in (self.effect, other.effect) or self.effect == other.effect == Effect.READS


@dataclass(frozen=True)
class Scenario:
    """Who does what on which ledger, and what must hold in the end.

    `prepare` makes the ledger, once, and returns what its actors know from the beginning. `judge` yields a sentence for
    each lie that it finds; it may repair a restore that was left half-way. `faults` is how many a schedule has at most.
    Actors of the same function are interchangeable. Those in `beside` also write files, in the course of any step.
    """

    name: str
    about: str
    ttl: timedelta
    prepare: Callable[[Organization, ManualClock], Any]
    actors: Mapping[str, Callable[[Player], None]]
    judge: Callable[[Database, Sequence[Fact]], Iterator[str]]
    faults: int = 2
    beside: frozenset[str] = frozenset()


class Killed(BaseException):
    """Ends an actor where it stands."""


# --- actors -----------------------------------------------------------------------------------------------


class Player:
    """One actor of one run. Its act uses `db`, `clock`, `org`, `given`, `ask` and `tell`."""

    def __init__(self, name: str, stage: Stage) -> None:
        self.name = name
        self.db = stage.handles[name]
        self.org = stage.organizations[name]
        self.clock = stage.clock
        self.given = stage.given
        self.how = How.STEP
        self.looks = False
        self.begun = False
        self.over = False
        self.fault = ""
        self.of_the_disk: BaseException | None = None
        self.act = stage.scenario.actors[name]
        self._facts = stage.facts
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._dead = False

    def ask(self, act: Callable[..., T], *args: Any, **options: Any) -> T | None:
        """What an act answers; None when it is refused or the ledger is busy, which is told as well."""
        try:
            return act(*args, **options)
        except (Refusal, Contention) as refusal:
            self.tell("refused", detail=refusal.category)
            return None

    def tell(
        self, what: str, key: str = "", token: int = 0, *, until: datetime | None = None, detail: str = ""
    ) -> None:
        """Keep what this actor has just been told."""
        self._facts.append(Fact(self.name, what, key, token, self.clock(), until, detail))

    def knows(self, what: str, key: str, token: int) -> bool:
        """Whether anybody was told this."""
        return any((fact.what, fact.key, fact.token) == (what, key, token) for fact in self._facts)

    def wait(self, *, looks: bool) -> None:
        """Stand still before a step until it is this actor's turn."""
        if self._dead:
            raise Killed
        self.looks = looks
        self._back.release()
        self._go.acquire()
        if self.how is How.DIES:
            self.die()

    def die(self) -> None:
        """End here: from now on the ledger answers nothing any more."""
        self._dead = True
        raise Killed

    def start(self) -> None:
        """Let it go on to where its first step begins."""
        self.db.player = self
        self._thread.start()
        self._return()

    def step(self, how: How) -> None:
        """Let it take its next step, or die in it."""
        self.how, self.begun = how, True
        self._go.release()
        self._return()
        if how:
            self.tell("died")

    def close(self) -> None:
        """End it, wherever it stands."""
        if not self.over:
            self.how = How.DIES
            self._go.release()
        self._thread.join()

    def _return(self) -> None:
        if not self._back.acquire(timeout=PATIENCE_SECONDS):
            raise RuntimeError(f"{self.name} has not come back from its step")
        if self.of_the_disk:
            raise self.of_the_disk

    def _live(self) -> None:
        try:
            self.act(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run is judged by it
            self.of_the_disk = error if is_of_the_disk(error) else None
            self.fault = traceback.format_exc(limit=-3)
        finally:
            self.db.player = None
            self.db.release()
            self.over = True
            self._back.release()


class SteppedDatabase(Database):
    """A ledger's handle that waits for its player's turn; while it has no player it is like any other."""

    player: Player | None = None

    @property
    def connection(self) -> Connection:
        connection = super().connection
        if self.player and not connection.in_transaction:
            self.player.wait(looks=True)
        return connection

    def immediate(self) -> Transaction:
        return self._stepped(ledger_lock=True)

    def transaction(self) -> Transaction:
        return self._stepped(ledger_lock=False)

    def _stepped(self, *, ledger_lock: bool) -> Transaction:
        connection = super().connection
        if self.player is None or connection.in_transaction:
            return Transaction(connection, ledger_lock=ledger_lock)
        self.player.wait(looks=False)
        return SteppedTransaction(connection, self.player, ledger_lock=ledger_lock)

    def _open(self, *, read_only: bool) -> Connection:
        connection = super()._open(read_only=read_only)
        connection.now = self.clock
        connection.execute("PRAGMA synchronous = OFF")
        return connection


class SteppedTransaction(Transaction):
    """A transaction whose player may die right before its commit, or right after."""

    __slots__ = ("_player",)

    def __init__(self, connection: Connection, player: Player, *, ledger_lock: bool) -> None:
        super().__init__(connection, ledger_lock=ledger_lock)
        self._player = player

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        how = self._player.how
        if how is How.UNDONE and kind is None:
            super().__exit__(Killed, None, None)
        else:
            super().__exit__(kind, error, trace)
        if how:
            self._player.die()


# --- one run ----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What came of one schedule. `trail` is the choices that were made."""

    trail: list[Choice]
    findings: list[str]

    @property
    def fired(self) -> Counter[str]:
        """How often each kind of fault happened."""
        fired = Counter(choice.how.value for choice in self.trail if choice.how)
        steps = [choice.actor for choice in self.trail if choice.actor != CLOCK]
        while len(steps) > 1 and steps[-1] == steps[-2]:
            steps.pop()
        fired[PAUSE] += bool(steps and steps[-1] in steps[:-1])
        return fired


class ReadClock(ManualClock):
    """A manual clock that counts how often it was read."""

    reads = 0

    def __call__(self) -> datetime:
        self.reads += 1
        return super().__call__()


class Stage:
    """A scenario's template ledger, and where it is played again and again: in memory, or `within` a folder."""

    def __init__(self, scenario: Scenario, within: Path | None = None) -> None:
        self.scenario = scenario
        self.clock = ReadClock()
        self.facts: list[Fact] = []
        folder = within or (MEMORY if MEMORY.is_dir() else None)
        self.root = Path(tempfile.mkdtemp(prefix="sovereign-simulate-", dir=folder))
        self.ledger = self.root / LEDGER_NAME
        try:
            self.organizations: dict[str, Organization] = {}
            with closing(Organization.init(self.root, clock=self.clock)) as org:
                self.given = scenario.prepare(org, self.clock)
            self.handles = {name: self._handle(name) for name in scenario.actors}
            self.judge = SteppedDatabase(self.ledger, create=False, clock=self.clock)
            self.judge.release()
            self._begin = self.clock()
            self._template = {path.name: path.read_bytes() for path in self.ledger.parent.iterdir() if path.is_file()}
        except BaseException:
            self.close()
            raise

    def _handle(self, name: str) -> SteppedDatabase:
        handle = SteppedDatabase(self.ledger, create=False, clock=self.clock, patience=timedelta())
        handle.release()
        self.organizations[name] = organization = Organization(self.root, clock=self.clock)
        organization.close()
        organization.db = handle
        return handle

    def close(self) -> None:
        """Remove it all."""
        shutil.rmtree(self.root, ignore_errors=True)

    def play(self, choose: Callable[[list[Choice]], Choice | None]) -> Run:
        """Play one run and judge it. `choose` gets what can happen next; None from it leaves all where they stand."""
        self._reset()
        players = {name: Player(name, self) for name in self.scenario.actors}
        trail: list[Choice] = []
        try:
            for player in players.values():
                player.start()
            while (enabled := self._enabled(players)) and (choice := choose(enabled)):
                trail.append(choice)
                self._take(choice, players)
            return Run(trail, self._findings(players))
        finally:
            for player in players.values():
                player.close()

    def replay(self, choices: Sequence[Choice]) -> Run:
        """Play these choices; whoever is not named any more stands still for ever. Raises ConfigurationFault."""
        made = itertools.count()

        def given(enabled: list[Choice]) -> Choice | None:
            number = next(made)
            if number >= len(choices):
                return None
            return _fitting(choices[number], number, enabled)

        run = self.play(given)
        if len(run.trail) < len(choices):
            _fitting(choices[len(run.trail)], len(run.trail), [])
        return run

    def _reset(self) -> None:
        folder = self.ledger.parent
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for name, content in self._template.items():
            (folder / name).write_bytes(content)
        self.clock.set(self._begin)
        self.facts.clear()

    def _enabled(self, players: Mapping[str, Player]) -> list[Choice]:
        """What can happen next, the faults last. Of actors who do the same, the one that is named first begins."""
        steps: list[Choice] = []
        deaths: list[Choice] = []
        to_begin: set[Callable[[Player], None]] = set()
        for player in players.values():
            if player.over or player.act in to_begin:
                continue
            if not player.begun:
                to_begin.add(player.act)
            beside = player.name in self.scenario.beside
            steps.append(Choice(player.name, effect=Effect.READS if player.looks and not beside else Effect.WRITES))
            deaths.append(Choice(player.name, How.DIES, Effect.NOTHING))
            if not player.looks:
                undone = Effect.WRITES if beside else Effect.NOTHING
                deaths += [Choice(player.name, How.UNDONE, undone), Choice(player.name, How.UNHEARD)]
        jumps = [Choice(CLOCK, How.FORWARD), Choice(CLOCK, How.BACK)] if steps else []
        return [*steps, *jumps, *deaths]

    def _take(self, choice: Choice, players: Mapping[str, Player]) -> None:
        self.clock.reads = 0
        if choice.actor == CLOCK:
            self.clock.advance(self.scenario.ttl if choice.how is How.FORWARD else -self.scenario.ttl)
        else:
            players[choice.actor].step(choice.how)

    def _findings(self, players: Mapping[str, Player]) -> list[str]:
        faults = [f"{player.name} ended in {player.fault}" for player in players.values() if player.fault]
        lies = list(self.scenario.judge(self.judge, self.facts))
        try:
            return [*faults, *lies, *violations(self.judge.connection)]
        finally:
            self.judge.release()


def _fitting(choice: Choice, number: int, enabled: list[Choice]) -> Choice:
    if choice in enabled:
        return choice
    raise ConfigurationFault(
        f"The script does not fit its scenario: {str(choice)!r}, choice {number + 1}, cannot happen there.",
        category="script",
        why=f"What can: {', '.join(str(one) for one in enabled) or 'nothing, for all have ended'}.",
    )


# --- scripts ----------------------------------------------------------------------------------------------


def script(scenario: str, run: Run) -> str:
    """A run as text that `from_script` reads: the scenario, then a choice a line. What was found stands in comments."""
    found = [f"# {line}" for sentence in run.findings for line in sentence.splitlines()]
    return "\n".join([f"{HEADER}{scenario}", *map(str, run.trail), *found, ""])


def from_script(text: str) -> tuple[str, list[Choice]]:
    """The scenario's name and the choices. Raises ConfigurationFault (``script``)."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines or not lines[0].startswith(HEADER):
        raise ConfigurationFault(
            "That is no script of a schedule.", category="script", why=f"It does not begin with {HEADER.strip()!r}."
        )
    return lines[0].removeprefix(HEADER).strip(), [_choice(line) for line in lines[1:]]


def _choice(line: str) -> Choice:
    actor, _, how = line.partition(" ")
    try:
        return Choice(actor, How(how))
    except ValueError:
        known = ", ".join(repr(how.value) for how in How if how)
        raise ConfigurationFault(
            f"{line!r} is no choice.", category="script", why=f"Behind an actor's name stands nothing, or {known}."
        ) from None
