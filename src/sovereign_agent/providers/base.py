"""What an outside program is given, what it hands back, and the one table that judges it.

A program proposes: its report is read from its folder with every suspicion, and an exit code alone never
completes work. Completed takes exit code 0, a valid report that says so, and every deliverable that the
report declares. Whatever else was seen makes the run failed. This room never believes half a report, and it
never guesses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from sovereign_agent.errors import PolicyRefusal, ProviderFault
from sovereign_agent.providers.process import Leash
from sovereign_agent.records import ReceiptStatus
from sovereign_agent.workspace import (
    OUT_NAME,
    Deliverable,
    Workspace,
    check_output,
    collect_deliverables,
    read_bounded,
)

REPORT_NAME = f"{OUT_NAME}/report.json"
REPORT_LIMIT_BYTES = 2**20
SUMMARY_LIMIT = 4000

PROMPT_LIMIT_BYTES = 4 * 2**20

PROMPT = f"""\
You work for an organization. The JSON object at the end is your task: `sow.scope` is what has to be done now,
`outcome` is what it is for, and `rulings` are decisions that bind you, the oldest first.

Work in the current folder. Put each file that you hand over below {OUT_NAME}. When you are done, and as the last
thing you do, write {REPORT_NAME}: one JSON object with these keys and no others.

  status        "completed", "blocked" or "failed"
  summary       what you did, in 1 to {SUMMARY_LIMIT} characters
  deliverables  the names of the files that you hand over, relative to {OUT_NAME}; [] if there are none
  question      what has to be decided before you can go on; only when you are blocked, and then always
  proposal      only where `sow.required_effect_kind` is not null: a JSON object that proposes that effect

Without that file nothing that you did counts. Nobody answers you while you work: if you cannot go on without a
decision, report that you are blocked, and ask.

"""
"""What an agent is told; its task follows as JSON."""

PRECEDENCE = (
    # the run was taken from its program: what the program did afterwards says nothing
    "worker_lost",
    "lease_lost",
    "interrupted",
    "timeout",
    "idle_timeout",
    "line_too_long",
    # it never ran, or it went where it may not: nothing of its own account counts
    "provider_unavailable",
    "capability_refusal",
    "boundary_violated",
    # how it ended
    "killed",
    "nonzero_exit",
    # what it said, from the stream to the last file
    "malformed_stream",
    "missing_terminal",
    "provider_error",
    "missing_session",
    "missing_report",
    "invalid_report",
    "actor_reported_failure",
    "deliverable_missing",
    # our own fault; last, for it explains nothing that stands above
    "internal_error",
)
"""The failure categories of a receipt. When several were seen at once, the first of them here is the one."""


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character stands in it") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OutcomeBrief(_Message):
    """What is wanted in the end."""

    id: Text
    title: Text
    desired_state: Text


class SowBrief(_Message):
    """What has to be done now."""

    id: Text
    scope: Text
    required_effect_kind: Text | None = None


class Envelope(_Message):
    """All that a program is told, as one JSON object on its stdin. Names are relative to the run's folder."""

    assignment_id: Text
    attempt_id: Text
    actor_id: Text
    outcome: OutcomeBrief
    sow: SowBrief
    rulings: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    report_name: str = REPORT_NAME
    output_name: str = OUT_NAME

    def as_json(self) -> bytes:
        """The envelope in ASCII, so that no NUL reaches the program."""
        return json.dumps(self.model_dump()).encode("ascii")


def told(envelope: Envelope, workspace: Workspace) -> dict[str, str]:
    """The variables that every program finds, besides those that it inherits."""
    return {
        "SOVEREIGN_ASSIGNMENT": envelope.assignment_id,
        "SOVEREIGN_ATTEMPT": envelope.attempt_id,
        "SOVEREIGN_OUT": str(workspace.out),
    }


def prompt(envelope: Envelope) -> bytes:
    """What an agent is told, in UTF-8 and without NUL: the envelope, and how to hand in.

    Raises ProviderFault (``capability_refusal``) when it is longer than any of them will read.
    """
    text = PROMPT + json.dumps(envelope.model_dump(), ensure_ascii=False, indent=1) + "\n"
    if len(text.encode()) > PROMPT_LIMIT_BYTES:
        raise ProviderFault(
            f"The program was not started: its task is longer than {PROMPT_LIMIT_BYTES} bytes.",
            category="capability_refusal",
            why="A task is handed over whole or not at all.",
            inspect=f"sovereign-agent inspect {envelope.assignment_id}",
            next_command="plan the work again in smaller parts",
        )
    return text.encode()


class Report(_Message):
    """What a program says of its work. `deliverables` are names inside `.sovereign-out`."""

    status: Literal["completed", "blocked", "failed"]
    summary: Annotated[str, Field(min_length=1, max_length=SUMMARY_LIMIT)]
    deliverables: Annotated[tuple[str, ...], Field(strict=False, max_length=100)] = ()
    proposal: dict[str, JsonValue] | None = None
    question: str = ""

    @model_validator(mode="after")
    def _asks_only_when_blocked(self) -> Report:
        if (self.status == "blocked") != bool(self.question.strip()):
            raise ValueError("a blocked report has a question, and no other has one")
        return self


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the hands hand back. It becomes a receipt only if the fence still stands.

    `failure_category` is empty unless `status` is failed. `detail` is JSON: the figures of the run.
    """

    status: ReceiptStatus
    failure_category: str
    summary: str
    report: Report | None
    deliverables: tuple[Deliverable, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict[str, Any])


class Provider(Protocol):
    """Whatever can run one envelope in one folder."""

    def run(self, envelope: Envelope, workspace: Workspace, leash: Leash) -> Proposal:
        """Run to the end, or until `leash` is cut, and propose.

        A failure of the program is a Proposal, not an exception.

        Raises only what interrupted the waiting itself (KeyboardInterrupt), after the program is dead.
        """
        ...


def judge(seen: Iterable[str], *, exit_code: int | None, report: Report | None) -> tuple[ReceiptStatus, str]:
    """The status of a run and its failure category, from everything that was seen of it.

    Args:
        seen: failure categories that were observed.
        exit_code: None when the program did not come to an exit of its own.
        report: the valid report, if there is one.

    Raises ValueError for a category that is not in `PRECEDENCE`: better no verdict than a guessed one.
    """
    against = {*seen}
    if exit_code is None and not against:
        against.add("killed")
    elif exit_code:
        against.add("nonzero_exit")
    if report is None:
        against.add("missing_report" if "invalid_report" not in against else "invalid_report")
    elif report.status == "failed":
        against.add("actor_reported_failure")
    if against or report is None:
        return ReceiptStatus.FAILED, min(against, key=PRECEDENCE.index)
    return ReceiptStatus(report.status), ""


def conclude(
    workspace: Workspace, *, exit_code: int | None, seen: Mapping[str, str], said: str = "", detail: Mapping[str, Any]
) -> Proposal:
    """Read what a run left, judge it, and put it in words. The program must have ended.

    Args:
        workspace: where it ran.
        exit_code: None when it did not come to an exit of its own.
        seen: each failure category observed so far, with a sentence for it.
        said: its last words, for a failure.
        detail: the figures of the run; the categories that were seen are added to them.
    """
    reasons = dict(seen)
    report = _report(workspace, reasons)
    deliverables = _deliverables(workspace, report, reasons)
    if outside := workspace.boundary.violations() if workspace.boundary else ():
        reasons["boundary_violated"] = f"While it ran, what is not its own was changed: {', '.join(outside)}."
    status, category = judge(reasons, exit_code=exit_code, report=report)
    survivors = ", ".join(detail.get("survivors", ()))
    words = [
        reasons.get(category, ""),
        f"Still there afterwards: {survivors}." if survivors else "",
        report.summary if report else "",
        said if category else "",
    ]
    return Proposal(
        status,
        category,
        " ".join(filter(None, words))[:SUMMARY_LIMIT],
        report,
        deliverables,
        {**detail, "seen": sorted(reasons)},
    )


def parse_report(content: bytes) -> Report:
    """A report from the bytes of its file.

    Raises ValueError for anything that is not one, and for what a ledger could not keep: NaN, Infinity, NUL,
    half a character, or nesting without end.
    """
    try:
        value = json.loads(content.decode().removeprefix("\ufeff"), object_pairs_hook=without_duplicates)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if re.search(r"(?<!\\)(?:\\\\)*\\u0000", text):
        raise ValueError("a NUL character stands in it")
    try:
        text.encode()
        return Report.model_validate(value)
    except UnicodeEncodeError:
        raise ValueError("half a character stands in it") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the report"
        raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object, unless it contradicts itself. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice, and which of the two is meant nobody knows")
    return found


def _report(workspace: Workspace, reasons: dict[str, str]) -> Report | None:
    try:
        check_output(workspace)
        content = read_bounded(workspace, REPORT_NAME, REPORT_LIMIT_BYTES)
        if content is None:
            reasons["missing_report"] = f"It left no {REPORT_NAME}."
            return None
        return parse_report(content)
    except PolicyRefusal as refused:
        categories = {"file_too_large": "invalid_report", "deliverable_missing": "missing_report"}
        reasons[categories.get(refused.category, "boundary_violated")] = f"{refused} {refused.why}"
    except ValueError as error:
        reasons["invalid_report"] = f"Its report is not valid ({str(error)[:500]})."
    return None


def _deliverables(workspace: Workspace, report: Report | None, reasons: dict[str, str]) -> tuple[Deliverable, ...]:
    try:
        return collect_deliverables(workspace, report.deliverables if report else ())
    except PolicyRefusal as refused:
        categories = {"deliverable_missing": "deliverable_missing", "ambiguous_name": "invalid_report"}
        reasons[categories.get(refused.category, "boundary_violated")] = f"{refused} {refused.why}"
    return ()
