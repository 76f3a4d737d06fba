"""supervisor: the loop that ends what a dead worker left behind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from sovereign_agent.commands.options import HERE, Json, Root, opened
from sovereign_agent.commands.printing import plain, to_json

if TYPE_CHECKING:
    from sovereign_agent.supervisor import SupervisorReport


def supervisor(
    *,
    once: Annotated[bool, typer.Option("--once", help="One tick, and done.")] = False,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Recover what dead workers left behind, until interrupted.

    This is the supervisor loop itself, in the foreground: it ends attempts that have run out and gives claims back,
    and it begins no work. Starting it with the machine, restarting it and keeping its output is hosting a service,
    and that is the operating system's (systemd, launchd, a container), not this program's.
    """
    from sovereign_agent.supervisor import TICK_INTERVAL_SECONDS, run

    with opened(root) as org:
        if not (once or json) and sys.stderr.isatty():
            typer.echo(
                plain(f"Watching {org.root}, a tick every {TICK_INTERVAL_SECONDS:g} s. Ctrl-C ends it."), err=True
            )
        run(org, once=once, on_tick=_show_json if json else _Lines(always=once))


def _show_json(report: SupervisorReport) -> None:
    typer.echo(to_json(report, indent=None))


class _Lines:
    """A line for each tick with something to tell that the tick before has not told. `always`: for any tick."""

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self._told = ""

    def __call__(self, report: SupervisorReport) -> None:
        line = _line(report)
        if self._always or (line and line != self._told):
            typer.echo(line or "Nothing to recover.")
        self._told = line


def _line(report: SupervisorReport) -> str:
    told = {
        "recovered": report.recovered_assignments,
        "claims given back": report.swept_mailbox_claims,
        "messages dead": report.dead_messages,
        "leases run out": [lease.actor_id for lease in report.expired_actor_leases],
        "folders dealt with": [str(report.folders_dealt_with)] * bool(report.folders_dealt_with),
        "folders left to other hosts": report.reclaim_pending,
        "problems": report.problems,
    }
    return plain("; ".join(f"{what}: {', '.join(found)}" for what, found in told.items() if found))
