"""Answers: what actors were told, and whether all of it can be true.

The model of authority that answers are held against knows no SQL and calls no room that it judges. It only knows
what was said to whom, in which order and at what time: whoever is told that something is his must not be told
afterwards that it is somebody else's, unless he gave it back, ran out of time, or somebody had the right to take it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sovereign_agent.clock import EPOCH
from sovereign_agent.database import Connection


@dataclass(frozen=True, slots=True)
class Fact:
    """What an actor was told, at `at` by the clock. `key` and `token` name an authority.

    granted    it is yours until `until`, under this token
    kept       it has not run out, and is still yours, until then
    wrote      it has not run out, and something was written under it
    released   you gave it back
    settled    what it was for has come to its end, by you
    ended      by you, who does not hold it: whoever did has run out
    reported   somebody has ended it in your name, some time since you asked
    asked      nothing yet: you are about to revoke it
    revoked    by you, who may: whoever held it has lost it
    restored   by you: all have lost everything, and what was settled since the backup is not
    died       nothing more
    refused    nothing was changed
    """

    actor: str
    what: str
    key: str
    token: int
    at: datetime
    until: datetime | None = None
    detail: str = ""


@dataclass(slots=True)
class Authority:
    """What is known of one key: who has it under which token, until when, and whether it is settled for good."""

    actor: str = "nobody"
    token: int = 0
    until: datetime = EPOCH
    held: bool = False
    settled: bool = False

    def __str__(self) -> str:
        return f"{self.actor} {'has' if self.held else 'had'} it under {self.token} until {self.until:%F %T}"


def contradictions(facts: Sequence[Fact]) -> list[str]:
    """A sentence for each answer that cannot be true beside those that were given before it."""
    answers = _Answers()
    for fact in facts:
        answers.hear(fact)
    return answers.lies


class _Answers:
    def __init__(self) -> None:
        self.lies: list[str] = []
        self._known: dict[str, Authority] = {}
        self._dead: set[str] = set()
        self._asked: list[tuple[str, Authority]] = []

    def hear(self, fact: Fact) -> None:
        authority = self._known.setdefault(fact.key, Authority())
        match fact.what:
            case "granted":
                self._taken(fact, authority)
            case "kept" | "wrote" | "released" | "settled":
                self._used(fact, authority)
            case "ended" | "reported":
                self._ended(fact, authority)
            case "asked":
                self._asked.append((fact.actor, authority))
            case "revoked":
                authority.held = False
            case "restored":
                for each in self._known.values():
                    each.held = each.settled = False
            case "died":
                self._died(fact.actor)
            case _:
                pass

    def _taken(self, fact: Fact, authority: Authority) -> None:
        self._require(fact.token > authority.token, fact, authority)
        self._require(not authority.settled and not self._believed(authority, fact.at), fact, authority)
        authority.actor, authority.token, authority.held = fact.actor, fact.token, True
        authority.until = fact.until or EPOCH

    def _used(self, fact: Fact, authority: Authority) -> None:
        timely = fact.what not in {"kept", "wrote"} or authority.until > fact.at
        self._require(authority.held and fact.token == authority.token and timely, fact, authority)
        authority.until = fact.until or authority.until
        authority.held = fact.what in {"kept", "wrote"}
        authority.settled |= fact.what == "settled"

    def _ended(self, fact: Fact, authority: Authority) -> None:
        timely = fact.what == "reported" or not self._believed(authority, fact.at)
        self._require(timely and not authority.settled, fact, authority)
        authority.held = False

    def _died(self, actor: str) -> None:
        self._dead.add(actor)
        for who, authority in self._asked:
            if who == actor:
                authority.until = EPOCH  # revoked or not: nobody will ever say

    def _believed(self, authority: Authority, at: datetime) -> bool:
        """Whether somebody alive has every reason to think that it is his."""
        return authority.held and authority.until > at and authority.actor not in self._dead

    def _require(self, holds: bool, fact: Fact, authority: Authority) -> None:  # noqa: FBT001
        if not holds:
            told = f"{fact.actor} was told at {fact.at:%F %T}: {fact.what} {fact.key} under {fact.token}"
            self.lies.append(f"{told}; but {authority}{', and settled it' * authority.settled}.")


def unknown_to(connection: Connection, facts: Sequence[Fact], what: str, query: str) -> Iterator[str]:
    """A sentence for each fact of one kind that the ledger does not know; `query` takes key, token and detail."""
    for fact in facts:
        if fact.what == what and not connection.execute(query, (fact.key, fact.token, fact.detail)).rows:
            told = f"{fact.actor} was told: {what} {fact.key} under {fact.token}"
            yield f"{told}{f' ({fact.detail})' * bool(fact.detail)}; but the ledger does not know it."
