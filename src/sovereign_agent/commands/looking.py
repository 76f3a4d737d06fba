"""status, inspect: what the ledger says, without changing it."""

from __future__ import annotations

from typing import Annotated

import typer

from sovereign_agent.commands.options import HERE, Json, Root, opened
from sovereign_agent.commands.printing import answer


def status(*, root: Root = HERE, json: Json = False) -> None:
    """Show every open outcome, its work, and who does it."""
    from sovereign_agent.commands import views

    with opened(root, read_only=True) as org, org.db.transaction():
        document = views.status(org)
    answer(document, views.status_text(document), as_json=json)


def inspect(
    record: Annotated[
        str, typer.Argument(metavar="ID", help="An out_, sow_, asg_, att_, rcp_ or msg_ id, or its unique beginning.")
    ],
    *,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Show everything about one record. Its attempts, receipts, evidence and events follow it."""
    from sovereign_agent.commands import views

    with opened(root, read_only=True) as org, org.db.transaction():
        document = views.inspect(org, record)
    answer(document, views.inspect_text(document), as_json=json)
