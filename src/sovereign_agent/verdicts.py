"""Verdicts: what the house finds when it looks for itself.

A report is a proposal and a receipt is history; neither says how things stand now. This room looks again: are
the deliverables still what the receipt says, do the outcome's checks hold in the ledger. It moves nothing, and
what it cannot see it calls failed, never passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sovereign_agent import journal, outcomes, workspace
from sovereign_agent.configuration import resolve_reference
from sovereign_agent.database import Connection
from sovereign_agent.errors import IllegalMove, PolicyRefusal, wrong_state
from sovereign_agent.records import Outcome, Receipt, ReceiptStatus, Verdict


def completing_receipt(connection: Connection, sow_id: str) -> Receipt:
    """The receipt of the run that completed a statement of work, the last such run if it was done again.

    Last by token: a clock may have jumped. Raises IllegalMove when none has, Refusal (``sow_missing``).
    """
    outcomes.get_sow(connection, sow_id)
    receipts = [
        receipt
        for assignment in outcomes.assignments_of(connection, sow_id)
        for receipt in journal.receipts_of(connection, assignment.id)
        if receipt.status is ReceiptStatus.COMPLETED
    ]
    if not receipts:
        raise wrong_state(f"{sow_id} cannot be judged.", "No run has completed it.", sow_id)
    return max(receipts, key=lambda receipt: int(receipt.detail["fencing_token"]))


def inspect_work(root: Path, receipt: Receipt) -> Verdict:
    """Whether every deliverable of a completed run still is what its receipt says."""
    declared = {str(item["name"]): str(item["sha256"]) for item in receipt.detail["deliverables"]}
    folder = workspace.locate(root, receipt.attempt_id)
    try:
        found = {item.name: item.sha256 for item in workspace.collect_deliverables(folder, sorted(declared))}
    except (PolicyRefusal, OSError) as error:
        return failed(f"A deliverable cannot be read: {error}")
    if changed := sorted(name for name, digest in declared.items() if found[name] != digest):
        return failed(f"Changed since the receipt: {', '.join(changed)}.")
    reason = f"{len(declared)} deliverable(s) are what the receipt says."
    return Verdict(passed=True, reason=reason, detail={"deliverables": declared})


def require_check(references: Mapping[str, str], name: str) -> str:
    """Where a check leads, by its name in ``[checks]``. Raises IllegalMove (``unknown_check``)."""
    if name not in references:
        raise IllegalMove(
            f"There is no check {name!r}.",
            category="unknown_check",
            why=f"[checks] in sovereign.toml has: {', '.join(references) or 'none'}.",
            next_command=f'add {name} = "package.module:function" under [checks]',
        )
    return references[name]


def run_checks(
    connection: Connection, outcome: Outcome, references: Mapping[str, str], root: Path
) -> dict[str, Verdict]:
    """Every check of an outcome in turn, up to the first that breaks: it may have taken the transaction with it.

    Raises IllegalMove (``unknown_check``), ConfigurationFault when a check leads nowhere.
    """
    verdicts: dict[str, Verdict] = {}
    for name in outcome.checks:
        check = resolve_reference(require_check(references, name), root)
        try:
            answer: Any = check(connection, outcome)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a check is anybody's code, and one that breaks does not hold
            verdicts[name] = failed(f"the check itself failed: {type(error).__name__}: {error}")
            break
        verdicts[name] = answer if isinstance(answer, Verdict) else failed(f"it answered {answer!r}, no Verdict")
    return verdicts


def failed(reason: str) -> Verdict:
    """A verdict that something does not hold."""
    return Verdict(passed=False, reason=reason)


def together(found: Mapping[str, Verdict]) -> Verdict:
    """One verdict on all checks: it holds if each does, and its reason names those that do not."""
    failures = [f"{name}: {verdict.reason}" for name, verdict in found.items() if not verdict.passed]
    return Verdict(
        passed=not failures,
        reason="; ".join(failures) or "every check holds",
        detail={name: verdict.detail for name, verdict in found.items()},
    )
