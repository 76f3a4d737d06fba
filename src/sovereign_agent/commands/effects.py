"""effects and reconcile: what left the house, and a person's word on it. What may leave is decided by the ledger."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from sovereign_agent.commands.options import HERE, By, Json, Root, opened
from sovereign_agent.commands.printing import answer, entry, tally

if TYPE_CHECKING:
    from sovereign_agent.database import Connection
    from sovereign_agent.effects import Effect

MOST_WAITING = 100
"""How many acts `waiting` looks at, those that were let out first."""


class Word(StrEnum):
    """What a person can find out."""

    DONE = "done"
    NONE = "none"


def waiting(connection: Connection) -> dict[str, int]:
    """How many acts wait for a person's word. One whose worker is still at it does not."""
    from sovereign_agent import effects as home

    now = connection.now()
    found = [
        each
        for each in home.unsettled(connection, limit=MOST_WAITING)
        if each.outcome or each.held_until is None or each.held_until <= now
    ]
    return {"waiting": len(found), "of_older_epoch": sum(each.of_older_epoch for each in found)}


def waiting_text(found: dict[str, int]) -> str:
    """What `waiting` has found; nothing if none waits."""
    older = {"of an older epoch, before which nothing else leaves": found["of_older_epoch"]}
    told = {"waiting for a person's word": found["waiting"]} | (older if found["of_older_epoch"] else {})
    return tally(told, MOST_WAITING) if found["waiting"] else ""


def effects(
    *,
    after: Annotated[int, typer.Option("--after", metavar="N", help="Only what stands behind number N.")] = 0,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Show what left the house and needs a person's word: no end is known, or it is of an older epoch. 100 at most."""
    from sovereign_agent import effects as home

    with opened(root, read_only=True) as org:
        found = home.unsettled(org.db.connection, after=after)
    text = "\n".join(entry(f"{each.operation_id}  {each.tool}", _facts(each)) for each in found)
    answer({"effects": found}, text or "Nothing needs a person's word.", as_json=json)


def reconcile(
    operations: Annotated[list[str], typer.Argument(metavar="OPERATION...", help="op_ ids, as `effects` shows them.")],
    *,
    outcome: Annotated[Word, typer.Option("--outcome", help="Whether it arrived: done, or none of it.")],
    by: By,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="How you know.")],
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Say what became of acts that left the house. It is final, and nothing is sent by it."""
    from sovereign_agent import effects as home

    with opened(root) as org:
        org.settings.actor(by)
        for operation in operations:
            home.reconcile(org.db, operation, outcome.value, actor=by, reason=reason)
    text = entry(f"Reconciled, {outcome.value}: {', '.join(operations)}.", [("look", home.LIST)])
    answer({"reconciled": operations, "outcome": outcome.value}, text, as_json=json)


def _facts(effect: Effect) -> list[tuple[str, object]]:
    words = "--outcome DONE-OR-NONE --by ACTOR --reason TEXT"
    return [
        ("number", effect.seq),
        ("asked", effect.arguments),
        ("ended", effect.outcome or "nobody saw it"),
        ("left", effect.created_at),
        ("claimed", "" if effect.outcome or not effect.held_until else f"until {effect.held_until:%F %T} UTC"),
        ("by", f"item {effect.work_id}, generation {effect.generation}"),
        ("epoch", f"{effect.epoch}, which is over" if effect.of_older_epoch else effect.epoch),
        ("next", f"sovereign-agent assistant reconcile {effect.operation_id} {words}"),
    ]
