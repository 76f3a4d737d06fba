"""outcome: what is wanted."""

from __future__ import annotations

from typing import Annotated

import typer

from sovereign_agent.commands.options import HERE, By, Json, OutcomeId, Root, opened
from sovereign_agent.commands.printing import answer, entry

app = typer.Typer(help="Write down what is wanted, and let work begin.")


@app.command("new")
def new_outcome(
    title: Annotated[str, typer.Argument(metavar="TITLE", help="A few words.")],
    *,
    desired: Annotated[str, typer.Option("--desired", metavar="TEXT", help="The state of the world that is wanted.")],
    owner: Annotated[str, typer.Option("--owner", metavar="ACTOR", help="The actor who wants it.")],
    check: Annotated[
        list[str] | None,
        typer.Option("--check", metavar="NAME", help="A name below [checks] that must hold at the end. Repeatable."),
    ] = None,
    subject: Annotated[str, typer.Option("--subject", metavar="TEXT", help="What it is about, for your checks.")] = "",
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Write down an outcome. It is a DRAFT until it is activated."""
    with opened(root) as org:
        outcome = org.create_outcome(title, desired, check or [], owner, subject)
    facts = [("next", f"sovereign-agent outcome activate {outcome.id} --by {owner}")]
    answer(outcome, entry(f"Outcome {outcome.id} is {outcome.state}.", facts), as_json=json)


@app.command()
def activate(outcome: OutcomeId, *, by: By, root: Root = HERE, json: Json = False) -> None:
    """Let work towards an outcome begin."""
    with opened(root) as org:
        activated = org.activate(outcome, by)
    facts = [("next", f"sovereign-agent plan {activated.id} --scope TEXT --by ACTOR")]
    answer(activated, entry(f"Outcome {activated.id} is {activated.state}.", facts), as_json=json)
