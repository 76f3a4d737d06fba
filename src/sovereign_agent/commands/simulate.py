"""simulate: the ledger's own proofs, played here: every order of a few transactions, and thousands of histories."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sovereign_agent.commands.options import Json
from sovereign_agent.commands.printing import answer, counted, entry
from sovereign_agent.errors import ConfigurationFault

if TYPE_CHECKING:
    from sovereign_agent.testing.exploration import Exploration
    from sovereign_agent.testing.schedules import Scenario

SEEDS = 2000
"""So many histories are played, unless somebody says otherwise."""

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
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            metavar="COUNT",
            min=0,
            help="Only so many histories, and no orders without --scenario; 0 is only the orders.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="NUMBER", min=0, help="Play only this history, step by step.")
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="STEPS", help="Of that history, only these steps: 3,17,40.")
    ] = "",
    root: Within = None,
    json: Json = False,
) -> None:
    """Play every order in which the protocols' transactions can follow one another, and look for lies.

    Workers, supervisors, an operator and a restore act on a SQLite ledger, one transaction at a time, in every order;
    at every point one of them may die, or the clock may jump forward or back. After each order the ledger is held
    against its promises and against what everybody was told. The first order that breaks one is printed as a script
    for --replay.

    Then histories of many transactions are played, each fixed by its seed, with faults of sixteen kinds at random
    places, and what is left of each is judged. A seed that fails is printed with what plays it again. Your own ledger
    is not touched.

    Without options it plays every order and 2,000 histories. Ends with 1 if a promise was broken, or if something that
    is to be tried never happened. With fewer histories than that, what never happened in them is only named.
    """
    from sovereign_agent.supervisor import first_signal_interrupts
    from sovereign_agent.testing.simulation import scratch

    if only and seed is None:
        raise typer.BadParameter("--only chooses steps of the history that --seed names.")
    if bool(replay) + (seed is not None) + bool(scenario or (seeds, faults) != (None, None)) > 1:
        raise typer.BadParameter("--replay and --seed play one thing alone: nothing else is chosen beside them.")
    with first_signal_interrupts(), scratch(root) as folder:
        if replay:
            _replay(replay, folder, as_json=json)
        if seed is not None:
            _replay_seed(seed, only, folder, as_json=json)
        orders = _chosen(scenario or []) if scenario or not seeds else []
        found = _interleavings(orders, faults, folder, as_json=json) if orders else []
        count = seeds if seeds is not None else 0 if scenario else SEEDS
        histories = _histories(count, folder, as_json=json) if count else None
    total, good = sum(one["schedules"] for one in found), all(one["good"] for one in found)
    good = good and not (histories and (histories["failures"] or (histories["never"] and count >= SEEDS)))
    told = [counted(total, "schedule", "schedules")] if found else []
    told += [counted(count, "history", "histories")] if histories else []
    verdict = "No promise was broken." if good else "It does not hold."
    seen = {"interleavings": found, "schedules": total, "histories": histories, "good": good}
    answer(seen, f"{' and '.join(told)}. {verdict}", as_json=json)
    raise typer.Exit(0 if good else 1)


def _interleavings(scenarios: list[Scenario], faults: int | None, root: Path, *, as_json: bool) -> list[dict[str, Any]]:
    """Explore each scenario, on all processors, and tell of it at once unless all is told as JSON in the end."""
    from sovereign_agent.testing.exploration import explore
    from sovereign_agent.testing.simulation import crew

    if len(scenarios) == 1:
        return [_told(scenarios[0], explore(scenarios[0], faults=faults, within=root), as_json=as_json)]
    with crew() as pool:
        longest_first = reversed(scenarios)
        begun = {each.name: pool.submit(_explored, each.name, faults, root) for each in longest_first}
        return [_told(each, begun[each.name].result(), as_json=as_json) for each in scenarios]


def _explored(name: str, faults: int | None, root: Path) -> Exploration:
    from sovereign_agent.testing.exploration import explore

    (scenario,) = _chosen([name])
    return explore(scenario, faults=faults, within=root)


def _told(scenario: Scenario, found: Exploration, *, as_json: bool) -> dict[str, Any]:
    if not as_json:
        typer.echo(_story(scenario, found))
    return _document(scenario, found)


def _histories(count: int, root: Path, *, as_json: bool) -> dict[str, Any]:
    """Play so many seeds; tell what was seen, and of the first that fail what plays them again."""
    from sovereign_agent.testing import simulation

    report = simulation.run(range(count), within=root)
    replays = [simulation.shortest_replay(each, within=root) for each in [*report.failures][: simulation.SHRUNK_SEEDS]]
    if not as_json:
        typer.echo("\n".join([report.story(), *replays]))
    return report.document() | {"replays": replays}


def _replay_seed(seed: int, only: str, root: Path, *, as_json: bool) -> NoReturn:
    from sovereign_agent.testing import simulation

    try:
        steps = [int(each) for each in only.split(",")] if only else range(simulation.STEPS)
    except ValueError:
        raise typer.BadParameter(f"--only takes numbers of steps: 3,17,40. Not {only!r}.") from None
    trace, failures = simulation.replayed(seed, steps, within=root)
    found = failures or ["No promise was broken."]
    answer({"seed": seed, "trace": trace, "failures": failures}, "\n".join([*trace, *found]), as_json=as_json)
    raise typer.Exit(1 if failures else 0)


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
        (
            "bound",
            f"{counted(found.faults, 'fault', 'faults')} in a schedule at most, the longest of {found.longest} choices",
        ),
        ("fired", ", ".join(f"{kind} {found.fired[kind]}" for kind in FAULTS if found.fired[kind])),
        ("NEVER", ", ".join(found.never_fired)),
        ("time", f"{found.seconds:.1f} s; {found.equal} left as equal to others"),
    ]
    told = entry(f"{found.scenario}: {counted(found.schedules, 'schedule', 'schedules')}, {scenario.about}", facts)
    if found.failure is None:
        return told
    return f"{told}\nIt does not hold. `sovereign-agent simulate --replay FILE` plays this again:\n\n" + script(
        found.scenario, found.failure
    )


def _replay(source: str, root: Path, *, as_json: bool) -> NoReturn:
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
