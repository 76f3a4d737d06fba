"""Simulation: many short histories of one organization, each fixed by its seed, and a checker over what is left.

    sovereign-agent simulate --seeds 2000
    sovereign-agent simulate --seed 17          one of them, again

Workers, supervisors, a planner and an operator take turns on one ledger in one process: the shipped functions on a
real SQLite file, a clock that moves only when told to, and faults at the boundaries of transactions. Each step's dice
are thrown by the seed and the step's number, so a seed can be played again without some of its steps; that is how the
history of a lie is made short. When the last step is done everybody dies, all time runs out, a supervisor ticks, and
`checker` reads the ledger, and what arrived outside of the house. Whoever played is not asked.

A fault that never struck, or an act that never succeeded, fails a whole run: what did not happen was not tested.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import tomlkit

from sovereign_agent import assistant_service, assistant_work, configuration, supervisor
from sovereign_agent.clock import ManualClock, monotonic
from sovereign_agent.database import LEDGER_NAME
from sovereign_agent.errors import Contention, LedgerUnavailable, Refusal
from sovereign_agent.organization import Organization
from sovereign_agent.testing.cast import OPERATORS, Operator, Planner, Process, ProcessClock, Supervisor, Worker
from sovereign_agent.testing.checker import DIARY, breaches
from sovereign_agent.testing.faults import AT_A_TRANSACTION, Fault, FaultyDatabase, Killed, is_of_the_disk

STEPS = 120
CAST = (Worker, Worker, Worker, Supervisor, Supervisor, Planner, Operator)
TURNS = (6, 6, 6, 1, 1, 6, 2)
"""Who plays, and how often each has a turn."""

TWICE_ODDS = 0.05
STOP_ODDS = 0.02
LONGEST_STOP_STEPS = 40
CLOCK_ODDS = 0.02
LONGEST_SKEW_SECONDS = 60
LONGEST_JUMP_SECONDS = 3600
PAUSES_SECONDS = (*[(0, 1)] * 20, *[(1, 10)] * 4, (30, 90))
"""From and to how long the world waits between two steps: mostly a moment, at times until authority runs out.
All times are whole seconds, so that boundaries are met exactly."""

THE_END = timedelta(days=30)
SHRINKINGS = 400
"""How often a history that holds a lie is played again to make it shorter."""

SHRUNK_SEEDS = 3
SEEDS_AT_ONCE = 20


@dataclass
class Report:
    """What a simulation saw. `failures` are the lies, by seed."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    acts: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[Fault] = field(default_factory=Counter[Fault])
    failures: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def add(self, other: Report) -> None:
        """Take in what another report saw."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.acts.update(other.acts)
        self.refused.update(other.refused)
        self.faults.update(other.faults)
        self.failures |= other.failures

    def never(self) -> list[str]:
        """The acts that never succeeded, and the faults that never struck."""
        acts = [name for player in dict.fromkeys(CAST) for name, _ in player.acts]
        return [name for name in acts if not self.acts[name]] + [fault for fault in Fault if not self.faults[fault]]

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "seeds": self.seeds,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "acts": {name: {"done": self.acts[name], "refused": self.refused[name]} for name in self._names()},
            "faults": {fault.value: self.faults[fault] for fault in Fault},
            "never": self.never(),
            "failures": {str(seed): found for seed, found in self.failures.items()},
        }

    def _names(self) -> list[str]:
        return sorted({*self.acts, *self.refused})

    def story(self) -> str:
        """What a person reads."""
        rate = 60 * self.seeds / self.seconds if self.seconds else 0
        lines = [f"{self.seeds} seeds, {self.steps} steps in {self.seconds:.1f} s ({rate:.0f} seeds a minute)"]
        lines += [f"  {name:<18} {self.acts[name]:>8} done {self.refused[name]:>8} refused" for name in self._names()]
        lines += [f"  {fault.value:<28} {self.faults[fault]:>8} times" for fault in Fault]
        lines += [f"NEVER HAPPENED: {name}" for name in self.never()]
        for seed, found in self.failures.items():
            lines += [f"SEED {seed}: {found[0]}{f' And {len(found) - 1} more.' * (len(found) > 1)}"]
        return "\n".join(lines)


# --- one history ------------------------------------------------------------------------------------------


class World:
    """One organization on one ledger below `root`, and everybody in it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.clock = ManualClock()
        self.report = Report(seeds=1)
        self.trace: list[str] = []
        settings = configuration.load(root)
        self.outside = Counter[str]()
        self.players: list[Process] = []
        for player in CAST:
            clock = ProcessClock(self.clock)
            db = FaultyDatabase(root / LEDGER_NAME, clock, self.report.faults)
            self.players.append(player(root, settings, db, clock, self.outside))

    def close(self) -> None:
        """Close every session."""
        for player in self.players:
            player.db.close()

    def step(self, number: int) -> None:
        """Play one step: time passes, something may happen to somebody, and one process acts."""
        dice = random.Random(self.seed * 1_000_003 + number)  # noqa: S311 - nothing is kept secret here
        self.report.steps += 1
        self.clock.advance(timedelta(seconds=dice.randint(*dice.choice(PAUSES_SECONDS))))
        self._befall(dice, number)
        awake = [player.wakes_at <= number for player in self.players]
        weights = [turns * here for turns, here in zip(TURNS, awake, strict=True)]
        (player,) = dice.choices(self.players, weights) if any(weights) else (None,)
        if player is None:
            return
        if 0 < player.wakes_at <= number:
            player.wakes_at = 0
            self._count(Fault.CONTINUED)
        fault, later = dice.choice(AT_A_TRANSACTION), dice.choice((0, 0, 0, 1, 2))
        player.db.plan(fault if dice.random() < player.fault_odds else None, later)
        twice = dice.random() < TWICE_ODDS
        chosen = player.choose(dice)
        if chosen:
            name, deed = chosen
            answers = [self._answer(player, name, deed)]
            if twice and not player.db.dead:
                self._count(Fault.DELIVERED_TWICE)
                answers.append(self._answer(player, name, deed))
            self.trace.append(f"{number} {self.players.index(player)} {name} {' '.join(answers)}")
        if player.db.dead:
            for act in player.memory.acts:
                self._count(Fault.ARRIVED if self.outside[act.operation_id] else Fault.NOT_ARRIVED)
            player.begin_life()
        player.db.plan(None)

    def _befall(self, dice: random.Random, number: int) -> None:
        """Stop a process, or set a clock."""
        player = dice.choice(self.players)
        if dice.random() < STOP_ODDS and player.wakes_at == 0:
            player.wakes_at = number + dice.randint(1, LONGEST_STOP_STEPS)
            self._count(Fault.STOPPED)
        if dice.random() < CLOCK_ODDS:
            player.clock.skew = timedelta(seconds=dice.randint(-LONGEST_SKEW_SECONDS, LONGEST_SKEW_SECONDS))
            self._count(Fault.SKEWED)
        if dice.random() < CLOCK_ODDS / 4:
            seconds = dice.randint(-LONGEST_JUMP_SECONDS, LONGEST_JUMP_SECONDS)
            self.clock.advance(timedelta(seconds=seconds))
            self._count(Fault.JUMPED_AHEAD if seconds >= 0 else Fault.JUMPED_BACK)

    def _answer(self, player: Process, name: str, deed: Any) -> str:
        """Do it, and say how the ledger answered. Whatever is no answer of the house is a failure of the seed."""
        try:
            deed()
        except Refusal as refusal:
            self.report.refused[name] += 1
            return refusal.category
        except (Contention, LedgerUnavailable) as trouble:
            return trouble.category
        except Killed:
            return "killed"
        except Exception as error:  # a fault of our own, of any kind, is what is looked for
            if is_of_the_disk(error):
                raise
            self._fail(f"{name} ended in {type(error).__name__}: {error} {getattr(error, 'why', '')}")
            return "fault"
        self.report.acts[name] += 1
        if name == "restore":
            self._count(Fault.RESTORED)
        return "done"

    def _count(self, fault: Fault) -> None:
        self.report.faults[fault] += 1

    def _fail(self, sentence: str) -> None:
        self.report.failures.setdefault(self.seed, []).append(sentence)

    def end(self) -> None:
        """Let everybody die and all time run out, tick until there is nothing left to recover, and judge."""
        self.clock.advance(THE_END)
        player = self.players[CAST.index(Supervisor)]
        player.begin_life()
        player.clock.skew = timedelta(0)
        if assistant_service.health(player.db).restoring:
            assistant_service.finish_restore(player.db)
        if not assistant_service.health(player.db).agrees:
            assistant_service.new_epoch(player.db, "principal-human", "the end")
        if assistant_service.health(player.db).paused:
            assistant_service.resume(player.db, "principal-human", "the end")
        while supervisor.tick(player.org).recovered_assignments:
            pass
        for role in (assistant_work.SHOP, assistant_work.RESEARCH):
            while claims := assistant_work.claim_many(player.db, player.identity, 100, now=player.now(), role=role):
                for claim in claims:
                    assistant_work.finish(player.db, claim, "DONE", now=player.now())
        for sentence in breaches(player.db.connection, at_rest=True, outside=self.outside):
            self._fail(sentence)
        carried = player.db.connection.execute("SELECT count(*) FROM authority_diary WHERE kind = 'carried'")
        self.report.faults[Fault.CARRIED_OVER] += carried.rows[0][0]


def play(template: Path, seed: int, steps: Iterable[int]) -> tuple[Report, list[str]]:
    """One history, on a copy of `template`: what was seen, and each step with its answers."""
    root = Path(tempfile.mkdtemp(prefix="seed-", dir=template.parent))
    try:
        shutil.copytree(template, root, dirs_exist_ok=True)
        world = World(root, seed)
        try:
            for number in steps:
                world.step(number)
            world.end()
        except Exception as error:
            if is_of_the_disk(error):
                raise
            world.report.failures.setdefault(seed, []).append(f"It ended in {type(error).__name__}: {error}")
        finally:
            world.close()
        return world.report, world.trace
    finally:
        shutil.rmtree(root, ignore_errors=True)


def shrunk(template: Path, seed: int, steps: Sequence[int]) -> list[int]:
    """The steps of a failing history without those it fails without, as far as `SHRINKINGS` plays can tell."""
    kept, left, size = [*steps], SHRINKINGS, len(steps) // 2
    while size and left:
        start = 0
        while start < len(kept) and left:
            shorter = kept[:start] + kept[start + size :]
            left -= 1
            if shorter and play(template, seed, shorter)[0].failures:
                kept = shorter
            else:
                start += size
        size //= 2
    return kept


def replay_line(seed: int, steps: Sequence[int]) -> str:
    """What to type to see one history again."""
    which = "" if len(steps) == STEPS else f" --only {','.join(map(str, steps))}"
    return f"sovereign-agent simulate --seed {seed}{which}"


def shortest_replay(seed: int, *, within: Path | None = None) -> str:
    """What to type to see as little of a failing history as still fails."""
    with scratch(within) as folder:
        return replay_line(seed, shrunk(make_template(folder), seed, range(STEPS)))


def replayed(seed: int, steps: Sequence[int], *, within: Path | None = None) -> tuple[list[str], list[str]]:
    """One history again, or only these steps of it: what happened at each step, and the lies."""
    with scratch(within) as folder:
        report, trace = play(make_template(folder), seed, steps)
    return trace, report.failures.get(seed, [])


# --- many histories ---------------------------------------------------------------------------------------


def make_template(folder: Path) -> Path:
    """An organization with its cast and a diary, at rest, to be copied for each seed."""
    root = folder / "template"
    Organization.init(root).close()
    path = root / configuration.FILE_NAME
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    for operator in OPERATORS:
        document["actors"][operator] = {"role": "operator", "provider": "scripted", "authority": ["execute"]}
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    org = Organization(root)
    org.db.extend("diary", DIARY)
    org.close()
    return root


def run(
    seeds: Collection[int], *, steps: int = STEPS, processes: int | None = None, within: Path | None = None
) -> Report:
    """Play every seed, on as many processes as there are processors, and report what was seen."""
    begun = monotonic()
    report = Report()
    with scratch(within) as folder:
        template = make_template(folder)
        ordered = [*seeds]
        portions = [ordered[start : start + SEEDS_AT_ONCE] for start in range(0, len(ordered), SEEDS_AT_ONCE)]
        with crew(processes) as pool:
            for each in pool.map(partial(_play_all, template, steps), portions):
                report.add(each)
    report.seconds = monotonic() - begun
    return report


def _play_all(template: Path, steps: int, seeds: Sequence[int]) -> Report:
    report = Report()
    for seed in seeds:
        report.add(play(template, seed, range(steps))[0])
    return report


@contextmanager
def crew(processes: int | None = None) -> Generator[ProcessPoolExecutor]:
    """So many processes to play in, else one a processor. Whatever ends the play early ends them at once."""
    others = active_children()
    deaf = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started them
    with ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn"), deaf) as pool:
        try:
            yield pool
        except BaseException:
            for each in active_children():
                if each not in others:
                    each.kill()
            raise


@contextmanager
def scratch(within: Path | None = None) -> Generator[Path]:
    """A folder for ledgers that need not outlive the run: in memory where the system offers that."""
    memory = Path("/dev/shm")  # noqa: S108 - the folder made in it is for its owner alone
    where = within or (memory if os.access(memory, os.W_OK) else None)
    with tempfile.TemporaryDirectory(prefix="sovereign-simulation-", dir=where) as folder:
        yield Path(folder)
