"""What the verbs share: where the organization lies, who acts, and in which form the answer is wanted."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sovereign_agent import __version__
from sovereign_agent.commands import printing

if TYPE_CHECKING:
    from sovereign_agent.organization import Organization

HERE = Path()
ROOT_HELP = "The organization's folder: the one with sovereign.toml."


def _root(context: typer.Context, root: Path) -> Path:
    """The --root after the verb; without one the --root before it, which knows SOVEREIGN_ROOT too."""
    after = _typed(context.get_parameter_source("root"))
    chosen = root if after else context.find_root().params["root"]
    before = _typed(context.find_root().get_parameter_source("root"))
    printing.asked_root = str(chosen) if after or before else ""
    return chosen


def _typed(source: Any) -> bool:
    return source is not None and source.name == "COMMANDLINE"


Root = Annotated[Path, typer.Option("--root", callback=_root, metavar="FOLDER", help=ROOT_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Answer with JSON on stdout, and with JSON on stderr if refused.")]
By = Annotated[str, typer.Option("--by", metavar="ACTOR", help="The actor who does this.")]
OutcomeId = Annotated[str, typer.Argument(metavar="OUTCOME", help="An out_ id.")]
SowId = Annotated[str, typer.Argument(metavar="SOW", help="A sow_ id.")]
AssignmentId = Annotated[str, typer.Argument(metavar="ASSIGNMENT", help="An asg_ id.")]
ActorId = Annotated[str, typer.Argument(metavar="ACTOR", help="An actor of sovereign.toml.")]


def _version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"sovereign-agent {__version__}")
        raise typer.Exit


def before_the_verb(
    *,
    root: Annotated[
        Path,
        typer.Option("--root", metavar="FOLDER", envvar="SOVEREIGN_ROOT", help=f"{ROOT_HELP} A verb takes it too."),
    ] = HERE,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and nothing else.")
    ] = False,
) -> None:
    """Only the options: `Root` reads --root, and --version has answered already."""


def opened(root: Path, *, read_only: bool = False) -> closing[Organization]:
    """The organization at `root`, closed at the end of the ``with``.

    What the house logs is silenced, unless SOVEREIGN_DEBUG=1: stderr belongs to the verb's own answer, and whatever a
    log could tell stands in a receipt, or is told by `doctor`.
    """
    import logging

    from sovereign_agent.organization import Organization

    log = logging.getLogger("sovereign_agent")
    if not log.hasHandlers() and os.environ.get("SOVEREIGN_DEBUG") != "1":
        log.addHandler(logging.NullHandler())
    return closing(Organization(root, read_only=read_only))
