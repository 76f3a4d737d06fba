"""Journal: what happened, and how each attempt ended. Home of events and receipts.

Both tables only grow; the database itself refuses to change or remove a line. An event is written in the
transaction of the change it tells about, so there is never one without the other. This room decides nothing:
the `UNIQUE (attempt_id)` of receipts is what makes a second receipt for one attempt impossible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from types import MappingProxyType
from typing import Any

from sovereign_agent import records
from sovereign_agent.clock import micros
from sovereign_agent.database import Connection
from sovereign_agent.errors import IllegalMove
from sovereign_agent.records import Event, ExecutionAttempt, Receipt, ReceiptStatus, from_row, new_id

WORKER_LOST = "worker_lost"
"""The one category of a receipt that another process had to write."""

_encode = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":")).encode

Record = records.Outcome | records.Sow | records.Assignment | ExecutionAttempt | Receipt | records.Message
"""Whatever has an id that a person can type."""

_FOUND_BY: dict[str, tuple[type[Record], str]] = {
    "out_": (records.Outcome, "SELECT * FROM outcomes WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"),
    "sow_": (records.Sow, "SELECT * FROM sows WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"),
    "asg_": (records.Assignment, "SELECT * FROM assignments WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"),
    "att_": (ExecutionAttempt, "SELECT * FROM execution_attempts WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"),
    "rcp_": (Receipt, "SELECT * FROM receipts WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"),
    "msg_": (records.Message, "SELECT * FROM messages WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"),
}

NO_EVIDENCE = MappingProxyType({"cause": "unknown"})


def to_json(value: Any) -> str:
    """JSON text that both engines hold alike: ASCII, sorted keys. Raises IllegalMove for NaN and infinities."""
    try:
        return _encode(value)
    except (TypeError, ValueError) as error:
        raise IllegalMove(
            "A value was offered to the journal that JSON cannot hold.", category="invalid_number", why=str(error)
        ) from error


def record(
    connection: Connection,
    kind: str,
    subject: str,
    *,
    actor: str,
    at: datetime | int,
    detail: dict[str, Any] | None = None,
) -> None:
    """Append one event about `subject` (an id), `at` a moment or a stored time."""
    connection.execute(
        "INSERT INTO events (at, kind, subject, actor, detail) VALUES (?, ?, ?, ?, ?)",
        (at if isinstance(at, int) else micros(at), kind, subject, actor, to_json(detail or {})),
    )


def write_receipt(connection: Connection, receipt: Receipt, *, at: datetime) -> None:
    """Append the one receipt of an attempt. Raises ConstraintBroken when it already has one."""
    ids = (receipt.id, receipt.assignment_id, receipt.attempt_id, receipt.actor_id)
    connection.execute(
        """
        INSERT INTO receipts (id, assignment_id, attempt_id, actor_id, status, failure_category,
                              summary, detail, created_at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (*ids, receipt.status, receipt.failure_category, receipt.summary, to_json(receipt.detail), micros(at)),
    )


def record_end(
    connection: Connection, attempt: ExecutionAttempt, receipt: Receipt, at: datetime, *kinds: str, by: str = ""
) -> None:
    """Append an attempt's receipt, and the events of each of `kinds` that name it. `by` is the actor who ended it."""
    write_receipt(connection, receipt, at=at)
    detail = {
        "attempt_id": attempt.id,
        "receipt_id": receipt.id,
        "status": receipt.status.value,
        "failure_category": receipt.failure_category,
    }
    for kind in kinds:
        record(connection, kind, attempt.assignment_id, actor=by, at=at, detail=detail)


def new_receipt(
    attempt: ExecutionAttempt, status: ReceiptStatus, failure_category: str, summary: str, detail: dict[str, Any]
) -> Receipt:
    """A receipt for an attempt, under an id of its own; `write_receipt` makes it durable."""
    ids = (new_id("rcp"), attempt.assignment_id, attempt.id, attempt.actor_id)
    return Receipt(*ids, status, failure_category, summary, detail)


def lost_receipt(attempt: ExecutionAttempt, evidence: Mapping[str, Any] = NO_EVIDENCE) -> Receipt:
    """The receipt of an attempt whose process never came back. It is always failed: unknown is not success.

    `evidence` says what may have become of the process, and changes nothing.
    """
    summary = (
        f"The worker never ended attempt {attempt.id} (fencing token {attempt.fencing_token}), which ran out"
        f" at {attempt.expires_at.isoformat()}. What it finished is unknown."
    )
    detail = {"attempt_id": attempt.id, "fencing_token": attempt.fencing_token, "evidence": dict(evidence)}
    return new_receipt(attempt, ReceiptStatus.FAILED, WORKER_LOST, summary, detail)


def losses_since_ruling(connection: Connection, sow_id: str) -> list[str]:
    """The ids of a statement of work's ``worker_lost`` receipts since its last ruling, in the order of their attempts.

    A ruling ends every assignment before it, so only later assignments count; later by the events' order, no clock's.
    """
    rows = connection.execute(
        """
        SELECT r.id FROM assignments a JOIN receipts r ON r.assignment_id = a.id
          JOIN execution_attempts e ON e.id = r.attempt_id
         WHERE a.sow_id = ? AND r.failure_category = 'worker_lost'
           AND (SELECT min(seq) FROM events WHERE subject = a.id) >
               (SELECT coalesce(max(seq), 0) FROM events WHERE subject = ? AND kind = 'ruling.decided')
         ORDER BY e.fencing_token
        """,
        (sow_id, sow_id),
    )
    return [row[0] for row in rows]


def receipts_of(connection: Connection, assignment_id: str) -> list[Receipt]:
    """The receipts of an assignment's attempts, oldest first."""
    rows = connection.execute(
        "SELECT * FROM receipts WHERE assignment_id = ? ORDER BY created_at, id", (assignment_id,)
    )
    return [from_row(Receipt, row) for row in rows]


def receipt_of_attempt(connection: Connection, attempt_id: str) -> Receipt | None:
    """The receipt that ended an attempt, or None while it is ACTIVE."""
    row = connection.execute("SELECT * FROM receipts WHERE attempt_id = ?", (attempt_id,)).fetchone()
    return from_row(Receipt, row) if row else None


def find(connection: Connection, beginning: str, *, limit: int) -> list[Record]:
    """Up to `limit` records, by id, whose id begins like that; none for what begins like no id.

    Ids are hexadecimal, so no collation of either engine puts one after a "g".
    """
    if beginning[:4] not in _FOUND_BY:
        return []
    kind, by_id = _FOUND_BY[beginning[:4]]
    return [from_row(kind, row) for row in connection.execute(by_id, (beginning, beginning + "g", limit))]


def events_of(connection: Connection, subject: str, *, limit: int = 200) -> list[Event]:
    """The newest `limit` events about `subject`, oldest first."""
    rows = connection.execute("SELECT * FROM events WHERE subject = ? ORDER BY seq DESC LIMIT ?", (subject, limit))
    return [from_row(Event, row) for row in reversed(rows.fetchall())]


def latest_events(connection: Connection, *, limit: int = 20) -> list[Event]:
    """The newest `limit` events about anything, oldest first."""
    rows = connection.execute("SELECT * FROM events ORDER BY seq DESC LIMIT ?", (limit,))
    return [from_row(Event, row) for row in reversed(rows.fetchall())]


def receipt_json(receipt: Receipt) -> str:
    """The receipt as it stands on disk beside a run: a copy for people, never read back as truth."""
    return json.dumps(asdict(receipt), indent=2, default=datetime.isoformat)
