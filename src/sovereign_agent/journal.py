"""Journal: what happened, and how each attempt ended. Home of events and receipts.

Both tables only grow; the database itself refuses to change or remove a line. An event is written in the
transaction of the change it tells about, so there is never one without the other. This room decides nothing:
the `UNIQUE (attempt_id)` of receipts is what makes a second receipt for one attempt impossible.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from sovereign_agent.clock import micros
from sovereign_agent.database import Connection
from sovereign_agent.errors import IllegalMove
from sovereign_agent.records import Event, Receipt, from_row


def to_json(value: Any) -> str:
    """JSON text that both engines hold alike: ASCII, sorted keys. Raises IllegalMove for NaN and infinities."""
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise IllegalMove(
            "A value was offered to the journal that JSON cannot hold.", category="invalid_number", why=str(error)
        ) from error


def record(
    connection: Connection, kind: str, subject: str, *, actor: str, at: datetime, detail: dict[str, Any] | None = None
) -> None:
    """Append one event about `subject` (an id)."""
    connection.execute(
        "INSERT INTO events (at, kind, subject, actor, detail) VALUES (?, ?, ?, ?, ?)",
        (micros(at), kind, subject, actor, to_json(detail or {})),
    )


def write_receipt(connection: Connection, receipt: Receipt, *, at: datetime) -> None:
    """Append the one receipt of an attempt. Raises ConstraintBroken when it already has one."""
    connection.execute(
        """
        INSERT INTO receipts (id, assignment_id, attempt_id, actor_id, status, failure_category,
                              summary, detail, created_at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (
            receipt.id,
            receipt.assignment_id,
            receipt.attempt_id,
            receipt.actor_id,
            receipt.status,
            receipt.failure_category,
            receipt.summary,
            to_json(receipt.detail),
            micros(at),
        ),
    )


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


def receipts_between(connection: Connection, first: str, beyond: str, *, limit: int) -> list[Receipt]:
    """Up to `limit` receipts with ids from `first` on, before `beyond`."""
    rows = connection.execute(
        "SELECT * FROM receipts WHERE id >= ? AND id < ? ORDER BY id LIMIT ?", (first, beyond, limit)
    )
    return [from_row(Receipt, row) for row in rows]


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
    created = receipt.created_at.isoformat() if receipt.created_at else None
    return json.dumps(
        {
            "id": receipt.id,
            "assignment_id": receipt.assignment_id,
            "attempt_id": receipt.attempt_id,
            "actor_id": receipt.actor_id,
            "status": receipt.status.value,
            "failure_category": receipt.failure_category,
            "summary": receipt.summary,
            "detail": receipt.detail,
            "created_at": created,
        },
        indent=2,
    )
