"""simulate: the ledger's own proofs, played on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sovereign_agent.commands.options import Json
from sovereign_agent.commands.printing import answer, entry
from sovereign_agent.errors import ConfigurationFault

if TYPE_CHECKING:
    from sovereign_agent.testing.exploration import Exploration
    from sovereign_agent.testing.schedules import Scenario

Within = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="Make the ledgers below this folder. Else in memory, where there is.",
    ),
]


def simulate(
    *,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", metavar="NAME", help="Only this one; may be given again.")
    ] = None,
    faults: Annotated[
        int | None,
        typer.Option("--faults", metavar="COUNT", min=0, help="So many faults in a schedule, at most. Else 1 or 2."),
    ] = None,
    replay: Annotated[
        str, typer.Option("--replay", metavar="FILE", help="Play only the schedule of this script. - is stdin.")
    ] = "",
    root: Within = None,
    json: Json = False,
) -> None:
    """Play every order in which the protocols' transactions can follow one another, and look for lies.

    Workers, supervisors, an operator and a restore act on a SQLite ledger, one transaction at a time, in every order;
    at every point one of them may die, or the clock may jump forward or back. After each order the ledger is held
    against its promises and against what everybody was told. The first order that breaks one is printed as a script
    for --replay. Your own ledger is not touched.

    Ends with 1 if a promise was broken, or if some kind of fault never happened.
    """
    if replay:
        _replay(replay, root, as_json=json)
    found = _interleavings(_chosen(scenario or []), faults, root, as_json=json)
    total, good = sum(one["schedules"] for one in found), all(one["good"] for one in found)
    told = f"{total} schedules. {'No promise was broken.' if good else 'It does not hold.'}"
    answer({"interleavings": found, "schedules": total, "good": good}, told, as_json=json)
    raise typer.Exit(0 if good else 1)


def _interleavings(
    scenarios: list[Scenario], faults: int | None, root: Path | None, *, as_json: bool
) -> list[dict[str, Any]]:
    """Explore each scenario, and tell of it at once unless all is told as JSON in the end."""
    from sovereign_agent.testing.exploration import explore

    documents: list[dict[str, Any]] = []
    for scenario in scenarios:
        found = explore(scenario, faults=faults, within=root)
        documents.append(_document(scenario, found))
        if not as_json:
            typer.echo(_story(scenario, found))
    return documents


def _document(scenario: Scenario, found: Exploration) -> dict[str, Any]:
    from sovereign_agent.testing.schedules import script

    return {
        "scenario": found.scenario,
        "about": scenario.about,
        "good": not found.failure and not found.never_fired,
        "faults": found.faults,
        "schedules": found.schedules,
        "equal": found.equal,
        "longest": found.longest,
        "seconds": found.seconds,
        "fired": found.fired,
        "never_fired": found.never_fired,
        "findings": found.failure.findings if found.failure else [],
        "script": script(found.scenario, found.failure) if found.failure else "",
    }


def _story(scenario: Scenario, found: Exploration) -> str:
    from sovereign_agent.testing.schedules import FAULTS, script

    facts = [
        ("bound", f"at most {found.faults} faults in a schedule, the longest of {found.longest} choices"),
        ("fired", ", ".join(f"{kind} {found.fired[kind]}" for kind in FAULTS if found.fired[kind])),
        ("NEVER", ", ".join(found.never_fired)),
        ("time", f"{found.seconds:.1f} s; {found.equal} left as equal to others"),
    ]
    told = entry(f"{found.scenario}: {found.schedules} schedules, {scenario.about}", facts)
    if found.failure is None:
        return told
    return f"{told}\nIt does not hold. `sovereign-agent simulate --replay FILE` plays this again:\n\n" + script(
        found.scenario, found.failure
    )


def _replay(source: str, root: Path | None, *, as_json: bool) -> NoReturn:
    from contextlib import closing

    from sovereign_agent.testing.schedules import Stage, from_script

    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except ValueError as error:
        raise ConfigurationFault(f"{source} is no script of a schedule.", category="script", why=str(error)) from None
    name, choices = from_script(text)
    (scenario,) = _chosen([name])
    with closing(Stage(scenario, root)) as stage:
        run = stage.replay(choices)
    document = {"scenario": name, "choices": [str(choice) for choice in run.trail], "findings": run.findings}
    told = "\n".join(run.findings) or "No promise was broken."
    answer(document, told, as_json=as_json)
    raise typer.Exit(1 if run.findings else 0)


def _chosen(names: list[str]) -> list[Scenario]:
    from sovereign_agent.testing.scenarios import SCENARIOS

    known = {scenario.name: scenario for scenario in SCENARIOS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"There is no scenario {unknown[0]!r}. There are: {', '.join(known)}.")
    return [known[name] for name in names] or list(known.values())
