"""actor: who there is, and who works for whom."""

from __future__ import annotations

from typing import Annotated

import typer

from sovereign_agent.commands.options import HERE, ActorId, By, Json, Root, opened
from sovereign_agent.commands.printing import answer, entry
from sovereign_agent.errors import Refusal

app = typer.Typer(help="See who there is, and who works for whom.")


@app.command("list")
def list_actors(*, root: Root = HERE, json: Json = False) -> None:
    """Show each actor: role, provider, authority, and the process that hosts it, if one does."""
    from sovereign_agent.commands import views

    with opened(root, read_only=True) as org:
        actors = views.actors(org)
    answer({"actors": actors}, "\n".join(views.actor_text(actor) for actor in actors), as_json=json)


@app.command()
def rebind(
    actor: ActorId,
    provider: Annotated[str, typer.Argument(metavar="PROVIDER", help="A name below [providers], or none.")],
    *,
    by: By,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Let another provider work for an actor. It is written into sovereign.toml, whose comments stay."""
    with opened(root) as org:
        org.rebind_actor(actor, provider, by)
    answer(
        {"actor": actor, "provider": provider, "by": by},
        entry(f"{actor} now works through {provider}.", [("look", "sovereign.toml")]),
        as_json=json,
    )


@app.command()
def free(actor: ActorId, *, by: By, root: Root = HERE, json: Json = False) -> None:
    """Take an actor from a process that is gone, without waiting for its lease to run out."""
    with opened(root) as org:
        freed = org.free_actor(actor, by)
    if not freed:
        raise Refusal(
            f"{actor} was left as it is.",
            category="actor_not_freed",
            why="Nobody holds a lease on it.",
            inspect="sovereign-agent actor list",
        )
    answer({"actor": actor, "freed": freed, "by": by}, entry(f"{actor} is free."), as_json=json)
