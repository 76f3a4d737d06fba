"""Exploration: every schedule of a scenario with at most so many faults, depth first.

A pause needs no choice of its own: an actor that is not chosen until all others have ended was paused, and every such
order is among those that are played.

Two choices whose order cannot matter are played in one order only (sleep sets): a look beside a look; a death without
a commit beside another actor's step; a jump beside a step that reads no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sovereign_agent.clock import monotonic
from sovereign_agent.errors import ConfigurationFault
from sovereign_agent.testing.schedules import CLOCK, FAULTS, Choice, Run, Scenario, Stage


@dataclass
class Exploration:
    """What came of all schedules of a scenario with at most `faults` faults each.

    `schedules` were played to their end; `equal` were left where it showed that another order of the same was among
    those. `failure` is the first schedule in which something was found, without the choices that it did not need.
    """

    scenario: str
    faults: int
    schedules: int = 0
    equal: int = 0
    longest: int = 0
    seconds: float = 0.0
    fired: Counter[str] = field(default_factory=Counter[str])
    failure: Run | None = None

    @property
    def never_fired(self) -> list[str]:
        """The kinds of fault that were allowed and yet never happened."""
        return [kind for kind in FAULTS if not self.fired[kind]] if self.faults and not self.failure else []


class _Equal(Exception):
    """Everything that can happen now was explored in another order."""


class _Branch:
    """A point of the search: what can be chosen there, and what need not be, because another order covers it."""

    def __init__(self, choices: list[Choice], covered: list[Choice]) -> None:
        self.left = [choice for choice in reversed(choices) if choice not in covered]
        self.covered = covered
        self.timeless: list[Choice] = []

    @property
    def choice(self) -> Choice:
        return self.left[-1]

    def turn(self) -> bool:
        """Go on to the next choice; False when there is none."""
        self.covered = [*self.covered, self.left.pop()]
        return bool(self.left)

    def covered_behind(self) -> list[Choice]:
        """What need not be chosen right after the current choice."""
        jumps = self.choice.actor == CLOCK
        return [one for one in self.covered if one.commutes(self.choice) or (jumps and one in self.timeless)]


class _Search:
    """Depth first, over prefixes of choices."""

    def __init__(self, stage: Stage, faults: int) -> None:
        self.faults = faults
        self.path: list[_Branch] = []
        self._clock = stage.clock
        self._depth = 0

    def begin(self) -> None:
        """Go through the current prefix again."""
        self._depth = 0

    def choose(self, enabled: list[Choice]) -> Choice:
        """The next choice of the current prefix; behind its end, the first that no other order covers."""
        if self._depth and not self._clock.reads:
            self.path[self._depth - 1].timeless.append(self.path[self._depth - 1].choice)
        if self._depth == len(self.path):
            covered = self.path[-1].covered_behind() if self.path else []
            branch = _Branch(self._within_bounds(enabled), covered)
            if not branch.left:
                raise _Equal
            self.path.append(branch)
        self._depth += 1
        return self.path[self._depth - 1].choice

    def advance(self) -> bool:
        """Turn to the next prefix; False when all are explored."""
        while self.path and not self.path[-1].turn():
            self.path.pop()
        return bool(self.path)

    def _within_bounds(self, enabled: list[Choice]) -> list[Choice]:
        """So many faults, and no two jumps of the clock in a row: they would be one, or none."""
        spent = sum(1 for branch in self.path if branch.choice.how)
        jumped = bool(self.path) and self.path[-1].choice.actor == CLOCK
        return [
            choice
            for choice in enabled
            if not choice.how or (spent < self.faults and not (jumped and choice.actor == CLOCK))
        ]


def explore(scenario: Scenario, *, faults: int | None = None, within: Path | None = None) -> Exploration:
    """Play every schedule with at most `faults` faults (by default the scenario's own bound), until one fails."""
    found = Exploration(scenario.name, scenario.faults if faults is None else faults)
    begun = monotonic()
    with closing(Stage(scenario, within)) as stage:
        search = _Search(stage, found.faults)
        while not found.failure:
            search.begin()
            try:
                run = stage.play(search.choose)
            except _Equal:
                found.equal += 1
            else:
                found.schedules += 1
                found.longest = max(found.longest, len(run.trail))
                found.fired += run.fired
                found.failure = shortened(stage, run) if run.findings else None
            if not search.advance():
                break
    found.seconds = round(monotonic() - begun, 2)
    return found


def shortened(stage: Stage, failure: Run) -> Run:
    """The same failing run without the choices that it does not need to fail."""
    for trail in _shorter(failure.trail):
        with suppress(ConfigurationFault):
            shorter = stage.replay(trail)
            if shorter.findings:
                return shortened(stage, shorter)
    return failure


def _shorter(trail: list[Choice]) -> Iterator[list[Choice]]:
    """A trail without each of its actors, then without each of its choices, the last one first."""
    for actor in {choice.actor: None for choice in trail}:
        yield [choice for choice in trail if choice.actor != actor]
    for number in reversed(range(len(trail))):
        yield trail[:number] + trail[number + 1 :]
