"""plan, assign, run, cancel: an outcome's work, from its statement to its receipt."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from sovereign_agent.clock import monotonic
from sovereign_agent.commands.options import HERE, ActorId, AssignmentId, By, Json, OutcomeId, Root, SowId, opened
from sovereign_agent.commands.printing import answer, entry
from sovereign_agent.errors import IllegalMove, SovereignError
from sovereign_agent.records import OutcomeState, ReceiptStatus

if TYPE_CHECKING:
    from rich.text import Text

    from sovereign_agent.organization import Organization


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
    """Write a statement of work towards an outcome, ready to be assigned."""
    from sovereign_agent import outcomes

    with opened(root) as org:
        if outcomes.get_outcome(org.db.connection, outcome).state is OutcomeState.DRAFT:
            raise IllegalMove(
                f"No work was planned for {outcome}.",
                category="illegal_move",
                why="It is a DRAFT: nobody has let work towards it begin.",
                inspect=f"sovereign-agent inspect {outcome}",
                next_command=f"sovereign-agent outcome activate {outcome} --by ACTOR",
            )
        sow = org.ready_sow(org.create_sow(outcome, scope, role, by, effect).id)
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
            help="What becomes of the run's folder: temporary_directory (only the handed-over files stay) or persistent.",
        ),
    ] = "temporary_directory",
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Give a statement of work to an actor; again, after it failed, blocked or was rejected."""
    with opened(root) as org:
        assignment = org.assign(sow, actor, by, workspace_policy=workspace)
    facts = [("for", assignment.actor_id), ("next", f"sovereign-agent run {assignment.id}")]
    answer(assignment, entry(f"Assignment {assignment.id} is {assignment.state}.", facts), as_json=json)


def run(assignment: AssignmentId, *, root: Root = HERE, json: Json = False) -> None:
    """Run an assignment's program to its end and print the receipt.

    Ends with 0 if the work is completed, with 1 if it is blocked or failed. SIGINT and SIGTERM are recorded.
    """
    from sovereign_agent import outcomes

    with _sigterm_interrupts(), opened(root) as org:
        with _waiting(org, assignment):
            receipt = org.run_assignment(assignment)
        sow = outcomes.get_assignment(org.db.connection, assignment).sow_id
    done = receipt.status is ReceiptStatus.COMPLETED
    failure = f" ({receipt.failure_category})" if receipt.failure_category else ""
    facts = [
        ("said", receipt.summary),
        ("asks", receipt.detail.get("question")),
        ("attempt", receipt.attempt_id),
        ("receipt", receipt.id),
        ("files", ", ".join(str(file["name"]) for file in receipt.detail.get("deliverables", []))),
        ("look", f"sovereign-agent inspect {assignment}"),
        ("next", f"sovereign-agent verify {sow} --by ACTOR" if done else f"sovereign-agent assign {sow} ACTOR --by ACTOR"),
    ]
    answer(receipt, entry(f"Assignment {assignment} is {receipt.status}{failure}.", facts), as_json=json)
    raise typer.Exit(0 if done else 1)


def cancel(assignment: AssignmentId, *, by: By, root: Root = HERE, json: Json = False) -> None:
    """Call an assignment off. A running program may run on; nothing that it does is recorded any more."""
    with opened(root) as org:
        canceled = org.cancel(assignment, by)
    facts = [("look", f"sovereign-agent inspect {canceled.sow_id}")]
    answer(canceled, entry(f"Assignment {canceled.id} is {canceled.state}.", facts), as_json=json)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _waiting(org: Organization, assignment_id: str) -> Iterator[None]:
    """Show on a terminal that a run goes on, on stderr; anywhere else show nothing."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    spinner = Spinner("dots", text=_Elapsed(org, assignment_id))
    with Live(spinner, console=console, transient=True, refresh_per_second=8):
        yield


@dataclass
class _Elapsed:
    """How long a run has taken, and its attempt as soon as the ledger knows it; read anew whenever it is shown."""

    org: Organization
    assignment_id: str
    attempt: str | None = None
    started: float = field(default_factory=monotonic)

    def __rich__(self) -> Text:
        from rich.text import Text

        self.attempt = self.attempt or self._current_attempt()
        elapsed = timedelta(seconds=int(monotonic() - self.started))
        return Text(f"{elapsed}  {self.attempt or 'starting'}")

    def _current_attempt(self) -> str | None:
        from sovereign_agent import outcomes

        try:
            return outcomes.get_assignment(self.org.db.connection, self.assignment_id).current_execution_attempt
        except SovereignError:
            return None
