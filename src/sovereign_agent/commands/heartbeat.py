"""heartbeat: that somebody reached the ledger, and when."""

from __future__ import annotations

from typing import Annotated

import typer

from sovereign_agent.commands.options import HERE, Json, Root, opened
from sovereign_agent.commands.printing import answer, entry


def heartbeat(
    *,
    status: Annotated[bool, typer.Option("--status", help="Judge the newest beat instead of writing one.")] = False,
    source: Annotated[str, typer.Option("--source", metavar="NAME", help="What beats.")] = "cli",
    stale_after: Annotated[
        float, typer.Option("--stale-after", metavar="SECONDS", min=0, help="The age at which --status says STALE.")
    ] = 900,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Write one beat, or judge the newest. It tells that a process reached the ledger, not that work goes on."""
    from sovereign_agent import heartbeat as beats

    with opened(root, read_only=status) as org:
        if not status:
            beats.record_heartbeat(org, source)
        judged = beats.heartbeat_status(org, stale_after)
    facts = [("beat", judged.last_beat), ("source", judged.source), ("by", judged.process_identity)]
    answer(judged, entry(f"{judged.verdict}", facts), as_json=json)
