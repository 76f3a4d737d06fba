"""`sovereign-agent demo store`: one replenishment, from the sale that makes it needed to its acceptance.

    sale -> outcome -> statement of work -> assignment -> run -> restock -> verification -> review -> acceptance

The program that proposes the restock is a real process without a model; everything else is what any
organization does. Each act follows from what the ledger says and from nothing that this process remembers, so
a run on the folder of one that was killed first finishes what that one began.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from reference_organizations.store import stock
from reference_organizations.store.organization import (
    CHECKS,
    OPERATOR,
    PLANNER,
    PRINCIPAL,
    REVIEWER,
    VERIFIER,
    make_store,
)
from reference_organizations.store.stock import RESTOCKED, SKU_TEA, Stock
from sovereign_agent import outcomes, supervisor
from sovereign_agent.clock import monotonic
from sovereign_agent.errors import AlreadyHeld, Refusal
from sovereign_agent.organization import Organization
from sovereign_agent.records import Outcome, OutcomeState, Receipt, ReceiptStatus, Sow, SowState

SIMULATED = "simulated"
TITLE = "Tea does not run out"
MOST_ACTS = 30
"""One outcome takes nine acts, and a few more after an interruption; whatever takes more than this is stuck."""

PATIENCE_SECONDS = 30.0
"""How long to wait, beyond an earlier worker's time, for the right to run."""

POLL_SECONDS = 0.05


def main(root: Path, mode: str, json: bool) -> int:  # noqa: FBT001 - the command line hands it over as it is
    """Play the demo in `root`, as a story or as one JSON document. Returns 0; everything else is raised.

    Raises Refusal (``unknown_mode``) for any mode but ``simulated``, before anything is made, and what the acts raise.
    """
    if mode != SIMULATED:
        raise Refusal(
            f"The shop has no mode {mode!r}.",
            category="unknown_mode",
            why=f"There is one: {SIMULATED}, in which a scripted program stands in for a model.",
            next_command=f"sovereign-agent demo store --mode {SIMULATED}",
        )
    organization = make_store(root)
    try:
        story = Story(organization, Console(quiet=json, highlight=False, soft_wrap=True))
        document = story.play()
    finally:
        organization.close()
    if json:
        sys.stdout.write(dumps(document, indent=2) + "\n")
    return 0


@dataclass
class Story:
    """One run of the demo: the organization, and what has been told of it."""

    organization: Organization
    console: Console
    told: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def play(self) -> dict[str, Any]:
        """Finish what earlier runs left, then sell, restock and accept; the document that ``--json`` prints."""
        self.recover()
        before = self.shelf()
        for left in self.unfinished():
            self.tell("resume", f"An earlier run stopped in the middle. Its outcome {left.id} is finished first.")
            self.pursue(left.id)
        self.sell()
        outcome = self.organization.create_outcome(
            TITLE, "The shelf holds enough tea, and the till is right.", CHECKS, PRINCIPAL, SKU_TEA
        )
        self.tell("outcome", f"{PRINCIPAL} wants: {outcome.desired_state} ({outcome.id})")
        accepted = self.pursue(outcome.id)
        after = self.shelf()
        self.tell("end", f"{after.available} of {SKU_TEA} on the shelf, {_money(after.till_cents)} in the till.")
        return {
            "mode": SIMULATED,
            "root": str(self.organization.root),
            "outcome": {"id": accepted.id, "state": accepted.state.value, "checks": list(accepted.checks)},
            "restock": asdict(self.restock(accepted)),
            "before": asdict(before),
            "after": asdict(after),
            "story": self.told,
        }

    def unfinished(self) -> list[Outcome]:
        """The outcomes of earlier runs that nobody has accepted."""
        found = outcomes.open_outcomes(self.organization.db.connection)
        return [outcome for outcome in found if (outcome.title, outcome.subject) == (TITLE, SKU_TEA)]

    def sell(self) -> None:
        """Sell so much that a restock is due, unless one is due already."""
        shelf = self.shelf()
        surplus = shelf.available - shelf.reorder_point + 1
        if surplus <= 0:
            self.tell("sale", f"Nothing needs to be sold: {shelf.available} of {SKU_TEA} are few enough.")
            return
        while surplus > 0:
            sale = stock.record_sale(self.organization.db, SKU_TEA, min(surplus, stock.MOST_UNITS))
            surplus -= sale.quantity
            self.tell("sale", f"{sale.quantity} x {shelf.name} are sold for {_money(sale.amount_cents)}.")
        self.tell("stock", f"{self.shelf().available} are left; the reorder point is {shelf.reorder_point}.")

    def pursue(self, outcome_id: str) -> Outcome:
        """Do one act after another until the outcome is accepted."""
        connection = self.organization.db.connection
        for _ in range(MOST_ACTS):
            outcome = outcomes.get_outcome(connection, outcome_id)
            if outcome.state is OutcomeState.ACCEPTED:
                return outcome
            works = outcomes.sows_of(connection, outcome_id)
            pending = [work for work in works if work.state is not SowState.APPROVED]
            self.next_act(outcome, pending[0] if pending else None)
        raise Refusal(
            f"Outcome {outcome_id} was not accepted.",
            category="demo_stuck",
            why=f"{MOST_ACTS} acts did not lead there; another process may be at work on it.",
            inspect=f"sovereign-agent inspect {outcome_id}",
        )

    def next_act(self, outcome: Outcome, work: Sow | None) -> None:
        """The one act that follows from what the ledger says."""
        match outcome.state, work:
            case OutcomeState.DRAFT, _:
                self.organization.activate(outcome.id, PRINCIPAL)
                self.tell("active", f"{PRINCIPAL} lets the work begin.")
            case OutcomeState.READY, _:
                self.accept(outcome)
            case _, None:
                self.plan(outcome)
            case _, Sow(state=SowState.DRAFT):
                self.organization.ready_sow(work.id)
                self.tell("ready", f"{work.id} is ready to be given out.")
            case _, Sow(state=SowState.ASSIGNED):
                self.run(work)
            case _, Sow(state=SowState.RUNNING):
                self.await_recovery(work)
            case _, Sow(state=SowState.COMPLETED):
                self.buy(work)
                self.verify(work)
            case _, Sow(state=SowState.VERIFIED):
                self.organization.review(work.id, REVIEWER)
                self.tell("review", f"{REVIEWER}, who had no hand in it, approves {work.id}.")
            case _, Sow():
                assignment = self.organization.assign(work.id, OPERATOR, PLANNER)
                self.tell("assign", f"{PLANNER} gives {work.id} to {OPERATOR} ({assignment.id}).")

    def plan(self, outcome: Outcome) -> None:
        """Write the statement of work, which asks for the effect that has to be seen."""
        work = self.organization.create_sow(outcome.id, "Restock the tea", "operator", PLANNER, RESTOCKED)
        self.tell("work", f"{PLANNER} writes a statement of work that must end in {RESTOCKED} ({work.id}).")

    def run(self, work: Sow) -> None:
        """Run the assignment; the worker of a run that was killed may still hold the actor, for a few seconds."""
        assignment = outcomes.assignments_of(self.organization.db.connection, work.id)[-1]
        deadline = monotonic() + self.organization.settings.authority.actor_lease_seconds + PATIENCE_SECONDS
        while True:
            try:
                receipt = self.organization.run_assignment(assignment.id)
                break
            except AlreadyHeld as held:
                if monotonic() > deadline:
                    raise
                self.tell_once("wait", held.why)
                time.sleep(POLL_SECONDS)
        if receipt.status is not ReceiptStatus.COMPLETED:
            raise _run_failed(receipt)
        self.tell("run", f"{OPERATOR}'s program proposes: {receipt.summary} (receipt {receipt.id})")

    def await_recovery(self, work: Sow) -> None:
        """Wait until a worker that was killed has lost its attempt."""
        connection = self.organization.db.connection
        deadline = monotonic() + self.organization.settings.authority.execution_attempt_seconds + PATIENCE_SECONDS
        self.tell("wait", f"{work.id} is RUNNING, says the ledger, until its attempt runs out.")
        while outcomes.get_sow(connection, work.id).state is SowState.RUNNING:
            if monotonic() > deadline:
                raise _still_running(work)
            self.recover()
            time.sleep(POLL_SECONDS)

    def recover(self) -> None:
        """Do what a supervisor does, once."""
        for assignment_id in supervisor.tick(self.organization).recovered_assignments:
            self.tell("recover", f"{assignment_id} had lost its worker. It is FAILED: unknown is not success.")

    def buy(self, work: Sow) -> None:
        """Apply the proposal: goods, money, event and evidence in one transaction.

        After a refusal it is the verifier who decides: work whose effect is there goes on, other work is rejected.
        """
        assignment = outcomes.assignments_of(self.organization.db.connection, work.id)[-1]
        try:
            with self.organization.db.immediate() as connection:
                bought = stock.apply_restock(connection, self.organization, assignment.id)
        except Refusal as refused:
            self.tell("refused", f"{refused} {refused.why}")
        else:
            self.tell("restock", f"{bought.quantity} x {bought.sku} come in for {_money(bought.cost_cents)}.")

    def verify(self, work: Sow) -> None:
        """Let the verifier compare the work with its receipt and its effect."""
        verdict = self.organization.verify_sow(work.id, VERIFIER)
        if not verdict.passed:
            raise _not_verified(work, verdict.reason)
        self.tell("verify", f"{VERIFIER}: {verdict.reason}")

    def accept(self, outcome: Outcome) -> None:
        """Accept the outcome if its checks hold; if the shelf has emptied since, more work is needed."""
        verdicts = self.organization.verify_outcome(outcome.id, VERIFIER)
        for name, verdict in verdicts:
            self.tell("check", f"{name}: {verdict.reason}")
        if not all(verdict.passed for _, verdict in verdicts):
            self.plan(outcome)
            return
        accepted = self.organization.accept(outcome.id, PRINCIPAL)
        self.tell("accept", f"{PRINCIPAL} accepts: the outcome is {accepted.state}.")

    def restock(self, outcome: Outcome) -> stock.Replenishment:
        """What was bought for an accepted outcome: its last restock."""
        connection = self.organization.db.connection
        work = outcomes.sows_of(connection, outcome.id)[-1]
        bought = stock.replenishment_of(connection, outcomes.assignments_of(connection, work.id)[-1].id)
        assert bought is not None, "a check of the outcome is that it exists"
        return bought

    def shelf(self) -> Stock:
        """The shop's tea and till, now."""
        shelf = stock.stock_of(self.organization.db.connection, SKU_TEA)
        assert shelf is not None, "the shop was seeded"
        return shelf

    def tell(self, step: str, text: str) -> None:
        """Print a line of the story and keep it for the document."""
        self.told.append({"step": step, "text": text})
        self.console.print(Text.assemble((f"{step:<9}", "bold cyan"), text))

    def tell_once(self, step: str, text: str) -> None:
        """Tell what is still so only the first time."""
        if not self.told or self.told[-1]["step"] != step:
            self.tell(step, text)


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def _run_failed(receipt: Receipt) -> Refusal:
    return Refusal(
        f"The run of {receipt.assignment_id} is {receipt.status}.",
        category=receipt.failure_category,
        why=receipt.summary,
        inspect=f"sovereign-agent inspect {receipt.assignment_id}",
        next_command="mend the cause and run the demo again: it goes on from here",
    )


def _not_verified(work: Sow, reason: str) -> Refusal:
    return Refusal(
        f"{work.id} was not verified.",
        category="not_verified",
        why=reason,
        inspect=f"sovereign-agent inspect {work.id}",
        next_command="run the demo again: it assigns the work anew",
    )


def _still_running(work: Sow) -> Refusal:
    return Refusal(
        f"{work.id} is still RUNNING.",
        category="execution_attempt_held",
        why="Its worker lives, or its attempt lasts longer than this demo waits.",
        inspect=f"sovereign-agent inspect {work.id}",
    )
