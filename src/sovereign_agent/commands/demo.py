"""demo: the product at work, in an organization of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sovereign_agent.commands.options import HERE, Json, Root
from sovereign_agent.errors import Refusal

app = typer.Typer(help="Watch it work.")

Mode = Annotated[str, typer.Option("--mode", help="Who plays the agents. simulated: nobody outside this program.")]
Ledger = Annotated[str, typer.Option("--ledger", metavar="URL", help="postgresql://... instead of a SQLite file.")]
DemoRoot = Annotated[
    Path | None, typer.Option("--root", metavar="FOLDER", help="Keep the demo's organization here; else it is removed.")
]


@app.command()
def store(*, mode: Mode = "simulated", root: Root = HERE, json: Json = False) -> None:
    """Run the reference shop in the folder --root: stock runs low, an agent proposes, people decide."""
    raise typer.Exit(_installed("store")(root, mode, json))


@app.command()
def crash(*, ledger: Ledger = "", root: DemoRoot = None, json: Json = False) -> None:
    """Kill a worker, stop another, and see what the ledger says: real processes, signals and clocks."""
    from sovereign_agent.commands import crash

    raise typer.Exit(crash.main(json=json, ledger=ledger, root=root))


@app.command()
def restore(*, ledger: Ledger = "", root: DemoRoot = None, json: Json = False) -> None:
    """Restore a ledger under those who work on it, and see what each of them may still do."""
    from sovereign_agent.commands import demo_restore

    raise typer.Exit(demo_restore.main(json=json, ledger=ledger, root=root))


@app.command()
def assistant(*, ledger: Ledger = "", root: DemoRoot = None, json: Json = False) -> None:
    """Kill the service that answers Lucy while its model thinks, and see another one go on.

    The model is a recorded one; a live one when OPENAI_API_KEY is set.
    """
    raise typer.Exit(_installed("assistant")(json=json, ledger=ledger, root=root))


def _installed(name: str) -> Callable[..., int]:
    """A demo that another package of this distribution provides. Raises Refusal (``demo_missing``)."""
    from importlib.metadata import entry_points

    demos = entry_points(group="sovereign_agent.demos", name=name)
    if not demos:
        raise Refusal(
            f"The demo {name} was not started.",
            category="demo_missing",
            why="No installed package provides it.",
            next_command="pip install sovereign-agent",
        )
    return next(iter(demos)).load()  # pyright: ignore[reportAny]
