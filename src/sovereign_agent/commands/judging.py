"""verify, review, accept, ruling: what others than its worker say about work."""

from __future__ import annotations

from typing import Annotated

import typer

from sovereign_agent.commands.options import HERE, By, Json, OutcomeId, Root, SowId, opened
from sovereign_agent.commands.printing import answer, entry

ruling = typer.Typer(help="Answer what work could not decide for itself.")


def verify(
    subject: Annotated[str, typer.Argument(metavar="ID", help="A sow_ id: its last run; an out_ id: its checks.")],
    *,
    by: By,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Check work by its receipt, or an outcome by its checks. Ends with 1 if something does not hold."""
    with opened(root) as org:
        whole = subject.startswith("out_")
        verdicts = org.verify_outcome(subject, by) if whole else [("receipt", org.verify_sow(subject, by))]
    holds = all(verdict.passed for _, verdict in verdicts)
    following = "" if whole or not holds else f"sovereign-agent review {subject} --by ACTOR"
    told = [(name, f"{'holds' if verdict.passed else 'fails'}: {verdict.reason}") for name, verdict in verdicts]
    checks = [{"name": name, "verdict": verdict} for name, verdict in verdicts]
    text = entry(f"{subject} {'holds' if holds else 'does not hold'}.", [*told, ("next", following)])
    answer({"subject": subject, "passed": holds, "checks": checks}, text, as_json=json)
    raise typer.Exit(0 if holds else 1)


def review(
    sow: SowId,
    *,
    by: By,
    reject: Annotated[bool, typer.Option("--reject", help="Reject it instead of approving it.")] = False,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="Why, for those who come after.")] = "",
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Approve verified work, or reject it. Nobody reviews what they planned, assigned or did."""
    with opened(root) as org:
        reviewed = org.review(sow, by, approve=not reject, note=note)
    following = f"assign {sow} ACTOR --by ACTOR" if reject else f"accept {reviewed.outcome_id} --by ACTOR"
    facts = [("next", f"sovereign-agent {following}")]
    answer(reviewed, entry(f"Statement of work {sow} is {reviewed.state}.", facts), as_json=json)


def accept(outcome: OutcomeId, *, by: By, root: Root = HERE, json: Json = False) -> None:
    """Accept an outcome whose work is all approved. Its checks run once more."""
    with opened(root) as org:
        accepted = org.accept(outcome, by)
    answer(accepted, entry(f"Outcome {accepted.id} is {accepted.state}."), as_json=json)


@ruling.command()
def decide(
    sow: SowId,
    *,
    decision: Annotated[str, typer.Option("--decision", metavar="TEXT", help="The answer, for every later run.")],
    by: By,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Answer what blocked, failed or rejected work could not. It becomes READY, and every later run is told."""
    with opened(root) as org:
        decided = org.rule(sow, decision, by)
    facts = [("next", f"sovereign-agent assign {sow} ACTOR --by ACTOR")]
    answer(decided, entry(f"Ruling {decided.id} is recorded, and {sow} is READY.", facts), as_json=json)
