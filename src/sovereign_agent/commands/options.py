"""What the verbs share: where the organization lies, who acts, and in which form the answer is wanted."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sovereign_agent.organization import Organization

HERE = Path()
ROOT_HELP = "The organization's folder: the one with sovereign.toml."


def _root(context: typer.Context, root: Path) -> Path:
    """The --root after the verb; without one the --root before it, which knows SOVEREIGN_ROOT too."""
    source = context.get_parameter_source("root")
    return root if source and source.name == "COMMANDLINE" else context.find_root().params["root"]


Root = Annotated[Path, typer.Option("--root", callback=_root, metavar="FOLDER", help=ROOT_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Answer with JSON on stdout, and with JSON on stderr if refused.")]
By = Annotated[str, typer.Option("--by", metavar="ACTOR", help="The actor who does this.")]
OutcomeId = Annotated[str, typer.Argument(metavar="OUTCOME", help="An out_ id.")]
SowId = Annotated[str, typer.Argument(metavar="SOW", help="A sow_ id.")]
AssignmentId = Annotated[str, typer.Argument(metavar="ASSIGNMENT", help="An asg_ id.")]
ActorId = Annotated[str, typer.Argument(metavar="ACTOR", help="An actor of sovereign.toml.")]


def opened(root: Path, *, read_only: bool = False) -> closing[Organization]:
    """The organization at `root`, closed at the end of the ``with``."""
    from sovereign_agent.organization import Organization

    return closing(Organization(root, read_only=read_only))
