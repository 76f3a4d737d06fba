"""plan, assign, run, cancel: an outcome's work, from its statement to its receipt."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from sovereign_agent.commands.options import HERE, ActorId, AssignmentId, By, Json, OutcomeId, Root, SowId, opened
from sovereign_agent.commands.printing import answer, entry
from sovereign_agent.errors import SovereignError

if TYPE_CHECKING:
    from sovereign_agent.organization import Organization


class Interrupted(SovereignError, KeyboardInterrupt):
    """A run was interrupted, and this is what is recorded of it."""


def plan(
    outcome: OutcomeId,
    *,
    scope: Annotated[str, typer.Option("--scope", metavar="TEXT", help="What has to be done.")],
    by: By,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="The role that it needs.")] = "operator",
    effect: Annotated[
        str | None,
        typer.Option("--effect", metavar="KIND", help="Evidence of this kind must exist before it can be verified."),
    ] = None,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Write a statement of work, ready to be assigned."""
    with opened(root) as org:
        sow = org.create_sow(outcome, scope, role, by, effect, ready=True)
    facts = [("next", f"sovereign-agent assign {sow.id} ACTOR --by {by}")]
    answer(sow, entry(f"Statement of work {sow.id} is {sow.state}.", facts), as_json=json)


def assign(
    sow: SowId,
    actor: ActorId,
    *,
    by: By,
    workspace: Annotated[
        str,
        typer.Option(
            "--workspace",
            metavar="POLICY",
            help="What becomes of the run's folder: temporary_directory (what it hands over stays) or persistent.",
        ),
    ] = "temporary_directory",
    maximum: Annotated[
        int | None,
        typer.Option(
            "--maximum", metavar="SECONDS", min=1, max=31_536_000, help="The longest that a run of it may last."
        ),
    ] = None,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Give a statement of work to an actor. Again, too, after it failed, blocked or was rejected."""
    with opened(root) as org:
        longest = None if maximum is None else timedelta(seconds=maximum)
        assignment = org.assign(sow, actor, by, workspace_policy=workspace, maximum=longest)
    facts = [("for", assignment.actor_id), ("next", f"sovereign-agent run {assignment.id}")]
    answer(assignment, entry(f"Assignment {assignment.id} is {assignment.state}.", facts), as_json=json)


def run(assignment: AssignmentId, *, root: Root = HERE, json: Json = False) -> None:
    """Run an assignment's program to its end and print the receipt.

    Ends with 0 if the work is completed, with 1 if it is blocked or failed. SIGINT and SIGTERM are recorded.
    """
    from sovereign_agent import outcomes
    from sovereign_agent.commands.waiting import waiting
    from sovereign_agent.records import AFTER_RECEIPT, ReceiptStatus
    from sovereign_agent.supervisor import first_signal_interrupts

    with first_signal_interrupts(), opened(root) as org:
        try:
            with waiting(org, assignment):
                receipt = org.run_assignment(assignment)
        except KeyboardInterrupt as interrupt:
            told = interrupt
            with suppress(SovereignError):  # a ledger that cannot be asked makes it no less an interruption
                told = _interrupted(org, assignment)
            raise told from None
        sow = outcomes.get_assignment(org.db.connection, assignment).sow_id
    failure = f" ({receipt.failure_category})" if receipt.failure_category else ""
    facts = [
        ("said", receipt.summary),
        ("asks", receipt.detail.get("question")),
        ("attempt", receipt.attempt_id),
        ("receipt", receipt.id),
        ("files", ", ".join(str(file["name"]) for file in receipt.detail.get("deliverables", []))),
        ("look", f"sovereign-agent inspect {assignment}"),
        ("next", outcomes.next_command(sow, AFTER_RECEIPT[receipt.status][1])),
    ]
    answer(receipt, entry(f"Assignment {assignment} is {receipt.status}{failure}.", facts), as_json=json)
    raise typer.Exit(0 if receipt.status is ReceiptStatus.COMPLETED else 1)


def _interrupted(org: Organization, assignment_id: str) -> Interrupted:
    """What the ledger says of a run whose process was interrupted, whenever that was. Raises as reading does."""
    from sovereign_agent import journal, outcomes

    connection = org.db.connection
    assignment = outcomes.get_assignment(connection, assignment_id)
    receipts = [] if assignment.current_execution_attempt else journal.receipts_of(connection, assignment_id)
    category = f" ({receipts[-1].failure_category})" if receipts and receipts[-1].failure_category else ""
    return Interrupted(
        f"Interrupted. Assignment {assignment_id} is {assignment.state}{category}.",
        category="interrupted",
        why=f"Receipt {receipts[-1].id}: {receipts[-1].summary}" if receipts else "No end of a run is recorded.",
        inspect=f"sovereign-agent inspect {assignment_id}",
        next_command=outcomes.next_command(assignment.sow_id, assignment.state),
    )


def cancel(
    subject: Annotated[str, typer.Argument(metavar="ID", help="An assignment, a statement of work or an outcome.")],
    *,
    by: By,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Call an assignment off, or work nobody is at, or an outcome.

    Nothing that a running program does is recorded any more, and its worker ends it at the next renewal.
    """
    with opened(root) as org:
        acts = {"sow": org.cancel_sow, "out": org.cancel_outcome}
        canceled = acts.get(subject.partition("_")[0], org.cancel)(subject, by)
    sow = getattr(canceled, "sow_id", "")
    facts = [
        ("look", f"sovereign-agent inspect {subject}"),
        ("next", f"sovereign-agent assign {sow} ACTOR --by ACTOR" if sow else ""),
    ]
    answer(canceled, entry(f"{subject} is {canceled.state}.", facts), as_json=json)
