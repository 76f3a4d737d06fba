"""What the reading verbs show: a document for programs, and the same document as text for people.

Everything is read, nothing is judged: what a state means is its home's to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from sovereign_agent import assistant_work, fencing, heartbeat, journal, liveness, outcomes, runs
from sovereign_agent.commands import effects
from sovereign_agent.commands.authority import EFFECTS, RESUME, pause_facts, paused_by
from sovereign_agent.commands.printing import entry, tally, to_json
from sovereign_agent.database import Connection, authority
from sovereign_agent.errors import Refusal
from sovereign_agent.heartbeat import Service
from sovereign_agent.journal import Record
from sovereign_agent.liveness import Assessment
from sovereign_agent.organization import Organization
from sovereign_agent.records import Assignment, Event, ExecutionAttempt, Message, Outcome, Receipt, Sow, SowState

CANDIDATES_SHOWN = 5
OUTCOMES_SHOWN = 100
STUCK = (SowState.FAILED, SowState.BLOCKED)
ITEM = re.compile(r"work_[0-9a-f]{32}")
ID = re.compile(r"[a-z]{3}_[0-9a-f]{0,32}")

Document = dict[str, Any]

# --- actors -----------------------------------------------------------------------------------------------


def actors(org: Organization) -> list[Document]:
    """Every declared actor with its lease, which may have run out."""
    now = org.db.now()
    found: list[Document] = []
    for actor_id, actor in org.settings.actors.items():
        lease = fencing.current_actor_lease(org.db, actor_id)
        held = lease and {
            "process_identity": lease.process_identity,
            "fencing_token": lease.fencing_token,
            "expires_at": lease.expires_at,
            "run_out": lease.expires_at <= now,
        }
        found.append(
            {
                "id": actor_id,
                "role": actor.role,
                "provider": actor.provider,
                "authority": list(actor.authority),
                "lease": held,
            }
        )
    return found


def actor_text(actor: Document) -> str:
    """One actor of `actors`."""
    lease: Document | None = actor["lease"]
    told = ""
    if lease:
        until = "run out at" if lease["run_out"] else "until"
        told = f"{lease['process_identity']}, token {lease['fencing_token']}, {until} {lease['expires_at']:%F %T} UTC"
    facts = [("through", actor["provider"]), ("may", ", ".join(actor["authority"])), ("hosted by", told)]
    return entry(f"{actor['id']} ({actor['role']})", facts)


# --- status -----------------------------------------------------------------------------------------------


def status(org: Organization) -> Document:
    """The oldest open outcomes with their statements of work and assignments; `more` if there are others."""
    connection, control = org.db.connection, authority.find_control(org.db.connection)
    open_outcomes = outcomes.open_outcomes(connection, limit=OUTCOMES_SHOWN + 1)
    work = [
        {
            "outcome": outcome,
            "sows": [
                {
                    "sow": sow,
                    "assignments": [_with_liveness(org, each) for each in tries],
                    "stuck": _stuck(org, sow, tries),
                }
                for sow in outcomes.sows_of(connection, outcome.id)
                for tries in [outcomes.assignments_of(connection, sow.id)]
            ],
        }
        for outcome in open_outcomes[:OUTCOMES_SHOWN]
    ]
    more = len(open_outcomes) > OUTCOMES_SHOWN
    return {
        "organization": org.settings.organization.name,
        "paused": control is not None and control.paused,
        "paused_by": paused_by(connection),
        "outcomes": work,
        "more": more,
        "assistant": assistant_work.count_open(connection),
        "effects": effects.waiting(connection),
        "services": heartbeat.services(connection),
    }


def status_text(document: Document) -> str:
    """`status` as a line for each record, indented under what it belongs to."""
    lines: list[str] = []
    for work in document["outcomes"]:
        lines.append(_line(work["outcome"]))
        for part in work["sows"]:
            lines.append(_line(part["sow"], indent=2))
            for assignment in part["assignments"]:
                lines.append(entry("{state:<9} {id}  {actor_id}".format_map(assignment), indent=4))
                if told := assignment["liveness"]:
                    lines.append(liveness_text(told, indent=6))
            if stuck := part["stuck"]:
                lines.append(_stuck_text(stuck, indent=6))
    if document["more"]:
        lines.append(entry(f"and more: these are the {OUTCOMES_SHOWN} oldest."))
    if any(document["assistant"].values()):
        told = tally(document["assistant"], assistant_work.MAX_COUNTED)
        lines.append(entry(f"assistant work: {told}", [("look", "sovereign-agent assistant status")]))
    if told := effects.waiting_text(document["effects"]):
        lines.append(entry(f"acts outside: {told}", [EFFECTS]))
    if not lines:
        lines.append(entry(f"{document['organization']} has no open outcome."))
    why = [*pause_facts(document["paused_by"]), RESUME]
    paused = [entry("The ledger is paused: nothing new begins.", why)] if document["paused"] else []
    return "\n".join([*paused, *lines, *map(service_text, document["services"])])


def service_text(service: Service) -> str:
    """One service, and how long ago it was heard of."""
    claimed = service.last_claim and f"{service.last_claim:%F %T} UTC"
    facts = [
        ("on", f"{service.host}, process {service.pid}, since {service.started_at:%F %T} UTC"),
        ("polled", f"{service.last_poll:%F %T} UTC"),
        ("claimed", claimed),
        ("works on", service.work_id),
    ]
    return entry(f"{service.verdict} {service.kind} {service.process_identity}", facts)


def _stuck(org: Organization, sow: Sow, tries: Sequence[Assignment]) -> Document | None:
    """How the newest assignment of failed or blocked work ended, and what the work waits for; None for other work."""
    connection = org.db.connection
    receipts = journal.receipts_of(connection, tries[-1].id) if tries and sow.state in STUCK else []
    if not receipts:
        return None
    receipt = receipts[-1]
    lost = runs.losses_that_park(connection, sow.id, org.settings.authority)
    return {
        "status": receipt.status,
        "failure_category": receipt.failure_category,
        "question": receipt.detail.get("question"),
        "parked": lost,
        "next": outcomes.next_command(sow.id, SowState.BLOCKED if lost else sow.state),
    }


def _stuck_text(stuck: Document, *, indent: int) -> str:
    lost = stuck["parked"]
    waits = f"for a ruling; workers lost over it: {len(lost)}" if lost else ""
    facts = [("asks", stuck["question"]), ("waits", waits), ("next", stuck["next"])]
    category = f" ({stuck['failure_category']})" if stuck["failure_category"] else ""
    return entry(f"{'parked: ' if lost else ''}{stuck['status']}{category}", facts, indent=indent)


def _line(record: Outcome | Sow, *, indent: int = 0) -> str:
    said = record.title if isinstance(record, Outcome) else record.scope
    return entry(f"{record.state:<9} {record.id}  {said}", indent=indent)


# --- liveness ---------------------------------------------------------------------------------------------


def liveness_text(told: Assessment, *, indent: int = 0) -> str:
    """Whether a worker works, why we think so, who owns it, until when, and what happens next."""
    facts = [("owner", told.owner), ("until", told.until), ("then", told.then), ("next", told.next)]
    reasons = [("why", reason) for reason in told.reasons]
    return entry(told.decision.replace("_", " "), [*reasons, *facts], indent=indent)


def _with_liveness(org: Organization, assignment: Assignment) -> Document:
    return {**_fields(assignment), "liveness": _liveness(org, assignment.current_execution_attempt)}


def _liveness(org: Organization, attempt_id: str | None) -> Assessment | None:
    """What can be said about the worker of a current attempt; None where there is none."""
    match journal.find(org.db.connection, attempt_id or "", limit=1):
        case [ExecutionAttempt() as attempt]:
            return liveness.assess(liveness.observe(org, attempt), org.db.now())
        case _:
            return None


# --- inspect ----------------------------------------------------------------------------------------------


def inspect(org: Organization, beginning: str) -> Document:
    """Everything about the one record whose id begins like that.

    Raises Refusal: ``unknown_id`` if there is none, ``ambiguous_id`` if there are several.
    """
    connection = org.db.connection
    record = _find(connection, beginning)
    found: Document = {"id": record.id, "record": record}
    subject = record.id
    match record:
        case Outcome():
            found["sows"] = outcomes.sows_of(connection, record.id)
        case Sow():
            found["assignments"] = outcomes.assignments_of(connection, record.id)
            found |= _runs(connection, found["assignments"])
            found["reviews"] = outcomes.reviews_of(connection, record.id)
            found["rulings"] = outcomes.rulings_of(connection, record.id)
        case Assignment(current_execution_attempt=attempt_id):
            found["liveness"] = _liveness(org, attempt_id)
            found |= _runs(connection, [record])
        case ExecutionAttempt(assignment_id=subject):
            receipt = journal.receipt_of_attempt(connection, record.id)
            found["receipts"] = [receipt] if receipt else []
            found["evidence"] = outcomes.evidence_of(connection, subject)
        case Receipt(assignment_id=subject):
            found["attempts"] = journal.find(connection, record.attempt_id, limit=1)
            found["evidence"] = outcomes.evidence_of(connection, subject)
        case Message():
            pass
    found["events"] = journal.events_of(connection, subject)
    return found


def inspect_text(document: Document) -> str:
    """`inspect` as the record, and below it a part for each list that is not empty."""
    parts = [_record_text(document["record"])]
    if told := document.get("liveness"):
        parts.append(liveness_text(told))
    for name, found in document.items():
        if isinstance(found, list) and found:
            items = cast("list[Any]", found)
            parts.append("\n".join([name, *(_item_text(item) for item in items)]))
    return "\n\n".join(parts)


def _find(connection: Connection, beginning: str) -> Record:
    found = journal.find(connection, beginning, limit=CANDIDATES_SHOWN) if ID.fullmatch(beginning) else []
    if len(found) == 1:
        return found[0]
    if found:
        raise Refusal(
            f"More than one id begins with {beginning}.",
            category="ambiguous_id",
            why=f"There are {', '.join(record.id for record in found)}{' ...' * (len(found) == CANDIDATES_SHOWN)}.",
            next_command="repeat the command with more of the id",
        )
    item = f"sovereign-agent assistant status {beginning}" if ITEM.fullmatch(beginning) else ""
    raise Refusal(
        f"There is nothing with the id {beginning}.",
        category="unknown_id",
        why="No out_, sow_, asg_, att_, rcp_ or msg_ id of this ledger begins like that.",
        inspect="sovereign-agent status",
        next_command=item or "repeat the command with an id that stands there",
    )


def _runs(connection: Connection, assignments: Sequence[Assignment]) -> Document:
    """The attempts, receipts and evidence of assignments. An attempt is either the current one or has a receipt."""
    receipts = [receipt for each in assignments for receipt in journal.receipts_of(connection, each.id)]
    ids = [receipt.attempt_id for receipt in receipts]
    ids += [each.current_execution_attempt for each in assignments if each.current_execution_attempt]
    return {
        "attempts": [attempt for each in ids for attempt in journal.find(connection, each, limit=1)],
        "receipts": receipts,
        "evidence": [item for each in assignments for item in outcomes.evidence_of(connection, each.id)],
    }


def _fields(record: Any) -> Document:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _record_text(record: Any, *, indent: int = 0) -> str:
    told = _fields(record)
    return entry(str(told.pop("id")), [(name, _value_text(value)) for name, value in told.items()], indent=indent)


def _item_text(item: Any) -> str:
    match item:
        case Event():
            by = f"by {item.actor}" if item.actor else ""
            return entry(f"{item.at:%F %T} UTC  {item.kind}  {by}  {_value_text(item.detail)}".rstrip(), indent=2)
        case dict():
            return entry(_value_text(item), indent=2)
        case _:
            return _record_text(item, indent=2)


def _value_text(value: Any) -> Any:
    """Lists and objects as JSON on one line, empty ones as nothing."""
    if isinstance(value, dict | tuple | list):
        return to_json(value, indent=None) if value else ""
    return value
