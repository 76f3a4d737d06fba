"""torture: real processes killed at real moments, on a ledger of their own."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from sovereign_agent.commands.options import Json
from sovereign_agent.commands.printing import answer, entry

Within = Annotated[
    Path | None,
    typer.Option("--root", metavar="FOLDER", help="Make all in this folder, and keep it. It must be empty or new."),
]


def torture(
    *,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=0, help="How long the killing goes on.")
    ] = 60.0,
    workers: Annotated[
        int, typer.Option("--workers", metavar="COUNT", min=1, help="How many workers there are at a time.")
    ] = 4,
    ledger: Annotated[
        str, typer.Option("--ledger", metavar="URL", help="An empty PostgreSQL database. Else a SQLite file is made.")
    ] = "",
    seed: Annotated[int | None, typer.Option("--seed", metavar="NUMBER", help="Fixes what is done to whom.")] = None,
    root: Within = None,
    json: Json = False,
) -> None:
    """Kill real workers, supervisors, assistants and operators, and look for lies in what they leave.

    They share a ledger that is made for it, with leases of half a second; they are killed, stopped and interrupted at
    random and at every crash point of a list, and find the ledger full, read-only or locked. In the end all of it is
    held against the promises of the ledger, and against what everybody was told. Your own ledger is not touched.

    Ends with 1 if a promise was broken, or if a crash point of the list was never reached. Then all is kept.
    """
    from sovereign_agent.testing.torture import Options
    from sovereign_agent.testing.torture import torture as play

    folder = (root or Path(tempfile.mkdtemp(prefix="sovereign-torture-"))).resolve()
    chosen = secrets.randbelow(2**32) if seed is None else seed
    try:
        report = play(Options(folder, seconds, workers, chosen, ledger))
    finally:
        if root is None:
            with suppress(OSError):  # what holds something is kept
                folder.rmdir()
    answer(report, story(report), as_json=json)
    if root is None and report["good"]:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(0 if report["good"] else 1)


def story(report: dict[str, Any]) -> str:
    """A report of a torture, for a person."""
    points, wait, false = report["crash_points"], report["kill_to_failed"], report["false_losses"]
    counted = ("killed", "signals", "hardships", "receipts", "attempts", "messages", "outcomes", "assistant")
    waited = f"p50 {wait['p50']} s, p99 {wait['p99']} s, of {wait['count']}"
    facts = [
        ("runs", f"{report['runs']}, {report['runs_per_second']} a second; read {report['audits']} times meanwhile"),
        *((name, _tally(report[name])) for name in (*counted, "authority", "refusals")),
        ("points", f"{sum(map(bool, points.values()))} of {len(points)} reached, by {sum(points.values())} deaths"),
        ("NEVER", ", ".join(report["never_met"])),
        ("to FAILED", f"{waited} killed in a run; without renewal an attempt lasts {report['attempt_seconds']} s"),
        ("false losses", f"{false['count']} of {false['attempts']} attempts, held for {false['hours_held']} hours"),
    ]
    told = entry(
        f"{report['seconds']} s on {report['ledger']} under seed {report['seed']}, {report['lives']} lives", facts
    )
    if report["good"]:
        return f"{told}\nNo promise was broken."
    broken = [f"Promises broken: {len(report['violations'])}; all is kept in {report['root']}."]
    return "\n".join([told, *broken, *(entry(f"  {sentence}") for sentence in report["violations"])])


def _tally(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
