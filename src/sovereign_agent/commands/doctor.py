"""doctor: whether everything is in place, and how to mend what is not."""

from __future__ import annotations

import typer

from sovereign_agent.commands.options import HERE, Json, Root
from sovereign_agent.commands.printing import answer, entry


def doctor(*, root: Root = HERE, json: Json = False) -> None:
    """Tell what is in place, and how to mend what is not.

    Settings, providers, ledger, and whatever waits for recovery. It mends nothing itself.

    Ends with 2 if the settings cannot be used and with 4 if the ledger cannot; what only warns ends with 0.
    """
    from sovereign_agent.commands import checkup

    findings = checkup.check_up(root)
    code = checkup.exit_code(findings)
    lines = [entry(f"{one.verdict:<5} {one.subject:<12} {one.found}", [("mend", one.mend)]) for one in findings]
    answer({"usable": code == 0, "findings": findings}, "\n".join(lines), as_json=json)
    raise typer.Exit(code)
