"""The raw baseline: the same durable facts, written by hand against the driver.

One assignment is four commits: lease; attempt + RUNNING; terminal state + receipt + events; release. One
mailbox cycle is three: send, claim, complete. The rows, the engine, the schema and the durability are those of
the product; what is left out is every check, every clock reading and every layer.

This file is fixed: changing what a cycle consists of changes every ratio, so it needs a decision record.
"""

from __future__ import annotations

import itertools
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

FAR = 4_000_000_000_000_000
"""An expiry that no benchmark lives to see, in microseconds."""

Execute = Callable[[str, Sequence[Any]], Any]


def sqlite_session(path: str) -> sqlite3.Connection:
    """A bare connection with the product's durability: WAL, synchronous=FULL, foreign keys."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "recursive_triggers = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def postgres_session(url: str) -> Any:
    """A bare psycopg connection, in autocommit mode with explicit BEGIN."""
    connection = psycopg.connect(url, autocommit=True)
    connection.execute("SET synchronous_commit = on")
    return connection


class Raw:
    """Hand-written SQL on one session. `begin` is the engine's word for opening a write transaction."""

    def __init__(self, connection: Any, *, postgres: bool) -> None:
        self._connection = connection
        self._begin = "BEGIN" if postgres else "BEGIN IMMEDIATE"
        self._mark = "%s" if postgres else "?"
        self._texts: dict[str, str] = {}
        self._moments = itertools.count(1_900_000_000_000_000)

    def execute(self, sql: str, params: Sequence[Any] = ()) -> Any:
        """One statement; `?` is turned into the driver's own mark once and remembered."""
        text = self._texts.setdefault(sql, sql.replace("?", self._mark))
        return self._connection.execute(text, params)

    def token(self) -> int:
        """The next fencing token, in the caller's transaction."""
        return int(self.execute("UPDATE lease_tokens SET value = value + 1 WHERE id = 1 RETURNING value").fetchone()[0])

    def event(self, kind: str, subject: str) -> None:
        """One line of history."""
        self.execute(
            "INSERT INTO events (at, kind, subject, actor, detail) VALUES (?, ?, ?, ?, ?)",
            (next(self._moments), kind, subject, "operator-course", '{"attempt_id":"att"}'),
        )

    def assignment(self, assignment_id: str, sow_id: str, actor: str = "operator-course") -> None:
        """Lease, attempt + RUNNING, terminal + receipt + events, release: four commits."""
        process, attempt = f"proc_{uuid.uuid4().hex}", f"att_{uuid.uuid4().hex}"
        self.execute(self._begin)
        lease = self.token()
        self.execute(
            "INSERT INTO actor_leases (actor_id, process_identity, fencing_token, acquired_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?) ON CONFLICT (actor_id) DO UPDATE SET process_identity = excluded.process_identity,"
            " fencing_token = excluded.fencing_token, expires_at = excluded.expires_at"
            " WHERE actor_leases.expires_at <= ?",
            (actor, process, lease, 1, FAR, 1),
        )
        self.execute("COMMIT")

        self.execute(self._begin)
        token = self.token()
        self.execute("SELECT fencing_token, expires_at FROM actor_leases WHERE actor_id = ?", (actor,)).fetchone()
        self.execute(
            "INSERT INTO execution_attempts (id, assignment_id, actor_id, process_identity, fencing_token,"
            " actor_lease_fencing_token, status, acquired_at, expires_at, deadline)"
            " VALUES (?, ?, ?, ?, ?, ?, 'ACTIVE', ?, ?, ?)",
            (attempt, assignment_id, actor, process, token, lease, 1, FAR, FAR),
        )
        self.execute(
            "UPDATE assignments SET state = 'RUNNING', current_execution_attempt = ?"
            " WHERE id = ? AND state = 'CREATED'",
            (attempt, assignment_id),
        )
        self.execute("UPDATE sows SET state = 'RUNNING' WHERE id = ? AND state = 'ASSIGNED'", (sow_id,))
        self.event("sow.running", sow_id)
        self.event("assignment.running", assignment_id)
        self.execute("COMMIT")

        self.execute(self._begin)
        self.execute(
            "UPDATE assignments SET state = 'COMPLETED', current_execution_attempt = NULL, finished_at = ?"
            " WHERE id = ? AND current_execution_attempt = ?",
            (2, assignment_id, attempt),
        )
        self.execute("UPDATE execution_attempts SET status = 'DONE' WHERE id = ? AND status = 'ACTIVE'", (attempt,))
        self.execute(
            "INSERT INTO receipts (id, assignment_id, attempt_id, actor_id, status, failure_category, summary, detail,"
            " created_at) VALUES (?, ?, ?, ?, 'completed', '', 'done', '{}', ?)",
            (f"rcp_{uuid.uuid4().hex}", assignment_id, attempt, actor, 2),
        )
        self.execute("UPDATE sows SET state = 'COMPLETED' WHERE id = ? AND state = 'RUNNING'", (sow_id,))
        self.event("assignment.finished", assignment_id)
        self.event("sow.completed", sow_id)
        self.execute("COMMIT")

        self.execute(self._begin)
        self.execute("UPDATE execution_attempts SET workspace_open = 0 WHERE id = ?", (attempt,))
        self.execute("DELETE FROM actor_leases WHERE actor_id = ? AND fencing_token = ?", (actor, lease))
        self.execute("COMMIT")

    def message(self, recipient: str = "operator-course") -> None:
        """Send, claim, complete: three commits."""
        message = f"msg_{uuid.uuid4().hex}"
        self.execute(self._begin)
        self.execute(
            "INSERT INTO messages (id, sender, recipient, subject, body, state, ready_at, created_at)"
            " VALUES (?, 'master-course', ?, 'subject', 'body', 'NEW', ?, ?)",
            (message, recipient, 1, 1),
        )
        self.event("message.sent", message)
        self.execute("COMMIT")

        self.execute(self._begin)
        token = self.token()
        self.execute(
            "UPDATE messages SET state = 'CLAIMED', claim_owner = ?, fencing_token = ?, claim_expires_at = ?,"
            " deliveries = deliveries + 1 WHERE id = ? AND state = 'NEW'",
            (recipient, token, FAR, message),
        )
        self.event("message.claimed", message)
        self.execute("COMMIT")

        self.execute(self._begin)
        self.execute(
            "UPDATE messages SET state = 'DONE' WHERE id = ? AND state = 'CLAIMED' AND fencing_token = ?",
            (message, token),
        )
        self.event("message.done", message)
        self.execute("COMMIT")
