"""Outcomes: the governed life of work.

Home of outcomes, sows, assignments, evidence, verifications, reviews, acceptances and rulings. Every move is one
compare-and-set: the WHERE clause names the states it may start from, and the rows it changed are the answer. This
room does not ask who may do a thing (`organization` does) and does not hold authority over a run (`fencing` does,
and calls this room to move the pointer in `assignments`). All functions take the caller's open connection and
never commit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sovereign_agent import journal
from sovereign_agent.clock import micros
from sovereign_agent.database import Connection, Row
from sovereign_agent.errors import IllegalMove, Refusal, wrong_state
from sovereign_agent.records import (
    ASSIGNABLE_SOW_STATES,
    TURNING_SOW_STATES,
    Assignment,
    AssignmentState,
    Outcome,
    OutcomeState,
    Role,
    Ruling,
    Sow,
    SowState,
    Verdict,
    from_row,
    new_id,
)

# --- outcomes ---------------------------------------------------------------------------------------------


def create_outcome(
    connection: Connection,
    *,
    title: str,
    desired_state: str,
    checks: Sequence[str],
    owner: str,
    subject: str,
    now: datetime,
) -> Outcome:
    """Insert a DRAFT outcome."""
    inserted = connection.execute(
        """
        INSERT INTO outcomes (id, title, desired_state, checks, owner, subject, state, created_at)
        VALUES (?, ?, ?, ?, ?, ?, 'DRAFT', ?) RETURNING *
        """,
        (new_id("out"), title, desired_state, journal.to_json(list(checks)), owner, subject, micros(now)),
    )
    outcome = from_row(Outcome, inserted.rows[0])
    journal.record(connection, "outcome.created", outcome.id, actor=owner, at=now, detail={"title": title})
    return outcome


def get_outcome(connection: Connection, outcome_id: str) -> Outcome:
    """Read one outcome. Raises Refusal (``outcome_missing``)."""
    row = connection.execute("SELECT * FROM outcomes WHERE id = ?", (outcome_id,)).fetchone()
    return from_row(Outcome, there(row, "outcome", outcome_id))


def open_outcomes(connection: Connection, *, limit: int = 100) -> list[Outcome]:
    """The oldest `limit` outcomes that are neither accepted nor canceled."""
    rows = connection.execute(
        "SELECT * FROM outcomes WHERE state NOT IN ('ACCEPTED', 'CANCELED') ORDER BY created_at, id LIMIT ?", (limit,)
    )
    return [from_row(Outcome, row) for row in rows]


def activate_outcome(connection: Connection, outcome_id: str, *, actor: str, now: datetime) -> None:
    """DRAFT -> ACTIVE. Raises IllegalMove from any other state."""
    moved = connection.execute("UPDATE outcomes SET state = 'ACTIVE' WHERE id = ? AND state = 'DRAFT'", (outcome_id,))
    if moved.rowcount != 1:
        raise illegal_move(get_outcome(connection, outcome_id), OutcomeState.ACTIVE)
    journal.record(connection, "outcome.activated", outcome_id, actor=actor, at=now)


def lock_outcome(connection: Connection, outcome_id: str) -> Outcome:
    """Read one outcome and keep it from changing until the caller's transaction ends."""
    row = connection.execute("SELECT * FROM outcomes WHERE id = ? <for update>", (outcome_id,)).fetchone()
    return from_row(Outcome, there(row, "outcome", outcome_id))


def reproject_outcome(connection: Connection, outcome_id: str, *, now: datetime) -> OutcomeState:
    """Derive an open outcome's state from its statements of work: READY, AT_RISK or ACTIVE."""
    row = connection.execute("SELECT state FROM outcomes WHERE id = ? <for update>", (outcome_id,)).fetchone()
    before = OutcomeState(row["state"]) if row else OutcomeState.CANCELED
    if before not in (OutcomeState.ACTIVE, OutcomeState.AT_RISK, OutcomeState.READY):
        return before
    after = _projection(connection, outcome_id)
    if after is not before:
        connection.execute("UPDATE outcomes SET state = ? WHERE id = ? AND state = ?", (after, outcome_id, before))
        journal.record(connection, "outcome.reprojected", outcome_id, actor="", at=now, detail={"state": after.value})
    return after


def _projection(connection: Connection, outcome_id: str) -> OutcomeState:
    """Three probes of an index, so that an outcome with a thousand statements of work costs no more than one."""
    row = connection.execute(
        """
        SELECT EXISTS (SELECT 1 FROM sows WHERE outcome_id = ? AND state IN ('FAILED', 'BLOCKED', 'REJECTED')),
               EXISTS (SELECT 1 FROM sows WHERE outcome_id = ? AND state IN
                           ('DRAFT', 'READY', 'ASSIGNED', 'RUNNING', 'COMPLETED', 'VERIFIED')),
               EXISTS (SELECT 1 FROM sows WHERE outcome_id = ? AND state = 'APPROVED')
        """,
        (outcome_id, outcome_id, outcome_id),
    ).fetchone()
    stuck, unfinished, approved = row or (False, False, False)
    if stuck:
        return OutcomeState.AT_RISK
    return OutcomeState.READY if approved and not unfinished else OutcomeState.ACTIVE


def accept_outcome(
    connection: Connection, outcome_id: str, *, accepter: str, detail: dict[str, Any], now: datetime
) -> None:
    """READY -> ACCEPTED, with its acceptance. Raises IllegalMove from any other state."""
    moved = connection.execute("UPDATE outcomes SET state = 'ACCEPTED' WHERE id = ? AND state = 'READY'", (outcome_id,))
    if moved.rowcount != 1:
        raise illegal_move(get_outcome(connection, outcome_id), OutcomeState.ACCEPTED)
    connection.execute(
        "INSERT INTO acceptances (outcome_id, accepter_id, detail, created_at) VALUES (?, ?, ?, ?)",
        (outcome_id, accepter, journal.to_json(detail), micros(now)),
    )
    journal.record(connection, "outcome.accepted", outcome_id, actor=accepter, at=now, detail=detail)


def cancel_outcome(connection: Connection, outcome_id: str, *, actor: str, now: datetime) -> None:
    """Give an open outcome up. Raises IllegalMove while any of its work is assigned, and when it has ended."""
    canceled = connection.execute(
        """
        UPDATE outcomes SET state = 'CANCELED'
         WHERE id = ? AND state NOT IN ('ACCEPTED', 'CANCELED')
           AND NOT EXISTS (SELECT 1 FROM sows WHERE outcome_id = ? AND state IN ('ASSIGNED', 'RUNNING'))
        """,
        (outcome_id, outcome_id),
    )
    if canceled.rowcount != 1:
        raise illegal_move(get_outcome(connection, outcome_id), OutcomeState.CANCELED)
    journal.record(connection, "outcome.canceled", outcome_id, actor=actor, at=now)


# --- statements of work -----------------------------------------------------------------------------------


def create_sow(
    connection: Connection,
    *,
    outcome_id: str,
    scope: str,
    role: Role,
    created_by: str,
    required_effect_kind: str | None,
    now: datetime,
) -> Sow:
    """Insert a DRAFT statement of work."""
    inserted = connection.execute(
        """
        INSERT INTO sows (id, outcome_id, scope, role, created_by, required_effect_kind, state, created_at)
        VALUES (?, ?, ?, ?, ?, ?, 'DRAFT', ?) RETURNING *
        """,
        (new_id("sow"), outcome_id, scope, role, created_by, required_effect_kind, micros(now)),
    )
    sow = from_row(Sow, inserted.rows[0])
    journal.record(connection, "sow.created", sow.id, actor=created_by, at=now, detail={"outcome_id": outcome_id})
    return sow


def get_sow(connection: Connection, sow_id: str) -> Sow:
    """Read one statement of work. Raises Refusal (``sow_missing``)."""
    row = connection.execute("SELECT * FROM sows WHERE id = ?", (sow_id,)).fetchone()
    return from_row(Sow, there(row, "sow", sow_id))


def sows_of(connection: Connection, outcome_id: str) -> list[Sow]:
    """An outcome's statements of work, oldest first."""
    rows = connection.execute("SELECT * FROM sows WHERE outcome_id = ? ORDER BY created_at, id", (outcome_id,))
    return [from_row(Sow, row) for row in rows]


def move_sow(
    connection: Connection,
    sow_id: str,
    allowed: Sequence[SowState],
    to: SowState,
    *,
    actor: str,
    now: datetime,
) -> None:
    """Move a statement of work, from one of the `allowed` states only, and reproject its outcome.

    Raises IllegalMove when it is in another state, or was moved by somebody else in between.
    """
    before = allowed[0] if len(allowed) == 1 else get_sow(connection, sow_id).state
    moved = (
        before in allowed
        and connection.execute(
            "UPDATE sows SET state = ? WHERE id = ? AND state = ? RETURNING outcome_id", (to, sow_id, before)
        ).fetchone()
    )
    if not moved:
        raise illegal_move(get_sow(connection, sow_id), to)
    detail = {"from": before.value, "to": to.value}
    journal.record(connection, f"sow.{to.value.lower()}", sow_id, actor=actor, at=now, detail=detail)
    if before in TURNING_SOW_STATES or to in TURNING_SOW_STATES:
        reproject_outcome(connection, moved["outcome_id"], now=now)


# --- assignments ------------------------------------------------------------------------------------------


def create_assignment(
    connection: Connection,
    *,
    sow_id: str,
    actor_id: str,
    planner_id: str,
    workspace_policy: str,
    maximum_seconds: int,
    now: datetime,
) -> Assignment:
    """Give a statement of work to an actor: a first time, or again after it failed, blocked or was rejected."""
    move_sow(connection, sow_id, ASSIGNABLE_SOW_STATES, SowState.ASSIGNED, actor=planner_id, now=now)
    inserted = connection.execute(
        """
        INSERT INTO assignments (id, sow_id, actor_id, planner_id, workspace_policy, maximum_seconds, state, created_at)
        VALUES (?, ?, ?, ?, ?, ?, 'CREATED', ?) RETURNING *
        """,
        (new_id("asg"), sow_id, actor_id, planner_id, workspace_policy, maximum_seconds, micros(now)),
    )
    assignment = from_row(Assignment, inserted.rows[0])
    journal.record(connection, "assignment.created", assignment.id, actor=planner_id, at=now, detail={"to": actor_id})
    return assignment


def get_assignment(connection: Connection, assignment_id: str) -> Assignment:
    """Read one assignment. Raises Refusal (``assignment_missing``)."""
    row = connection.execute("SELECT * FROM assignments WHERE id = ?", (assignment_id,)).fetchone()
    return from_row(Assignment, there(row, "assignment", assignment_id))


def assignments_of(connection: Connection, sow_id: str) -> list[Assignment]:
    """A statement of work's assignments, oldest first: more than one means that it was tried again."""
    rows = connection.execute("SELECT * FROM assignments WHERE sow_id = ? ORDER BY created_at, id", (sow_id,))
    return [from_row(Assignment, row) for row in rows]


def start_assignment(
    connection: Connection, assignment_id: str, actor_id: str, attempt_id: str, *, now: datetime
) -> None:
    """CREATED -> RUNNING under `attempt_id`. Only `fencing.acquire_execution_attempt` calls this.

    Raises Refusal (``assignment_missing``), IllegalMove when it is not this actor's to start.
    """
    started = connection.execute(
        """
        UPDATE assignments SET state = 'RUNNING', current_execution_attempt = ?
         WHERE id = ? AND actor_id = ? AND state = 'CREATED' AND current_execution_attempt IS NULL
        RETURNING sow_id
        """,
        (attempt_id, assignment_id, actor_id),
    ).fetchone()
    if started is None:
        raise illegal_move(get_assignment(connection, assignment_id), AssignmentState.RUNNING)
    move_sow(connection, started["sow_id"], (SowState.ASSIGNED,), SowState.RUNNING, actor=actor_id, now=now)
    _record_running(connection, assignment_id, actor_id, attempt_id, now)


def hand_over_assignment(
    connection: Connection, assignment_id: str, actor_id: str, lost_attempt: str, attempt_id: str, *, now: datetime
) -> None:
    """Point a RUNNING assignment from a lost attempt to the one that takes over. Raises IllegalMove."""
    moved = connection.execute(
        """
        UPDATE assignments SET current_execution_attempt = ?
         WHERE id = ? AND actor_id = ? AND state = 'RUNNING' AND current_execution_attempt = ?
        """,
        (attempt_id, assignment_id, actor_id, lost_attempt),
    )
    if moved.rowcount != 1:
        raise illegal_move(get_assignment(connection, assignment_id), AssignmentState.RUNNING)
    _record_running(connection, assignment_id, actor_id, attempt_id, now)


def _record_running(connection: Connection, assignment_id: str, actor_id: str, attempt_id: str, now: datetime) -> None:
    detail = {"attempt_id": attempt_id}
    journal.record(connection, "assignment.running", assignment_id, actor=actor_id, at=now, detail=detail)


def stop_assignment(
    connection: Connection, assignment_id: str, attempt_id: str, to: AssignmentState, *, now: datetime
) -> str | None:
    """RUNNING -> `to`, and the pointer cleared, if and only if `attempt_id` is still the current attempt.

    Returns the id of its statement of work; None, and nothing changed, when it is not. The one statement is both
    the terminal write and the fence check. Only `fencing` calls this.
    """
    stopped = connection.execute(
        """
        UPDATE assignments SET state = ?, current_execution_attempt = NULL, finished_at = ?
         WHERE id = ? AND state = 'RUNNING' AND current_execution_attempt = ?
        RETURNING sow_id
        """,
        (to, micros(now), assignment_id, attempt_id),
    ).fetchone()
    return str(stopped["sow_id"]) if stopped else None


def cancel_created_assignment(connection: Connection, assignment_id: str, *, actor: str, now: datetime) -> bool:
    """CREATED -> CANCELED, and its statement of work back to READY. False when it is not CREATED."""
    canceled = connection.execute(
        "UPDATE assignments SET state = 'CANCELED', finished_at = ? WHERE id = ? AND state = 'CREATED'",
        (micros(now), assignment_id),
    )
    if canceled.rowcount != 1:
        return False
    sow_id = get_assignment(connection, assignment_id).sow_id
    move_sow(connection, sow_id, (SowState.ASSIGNED,), SowState.READY, actor=actor, now=now)
    journal.record(connection, "assignment.canceled", assignment_id, actor=actor, at=now)
    return True


# --- what people and checks say about work ----------------------------------------------------------------


def record_evidence(
    connection: Connection, assignment_id: str, kind: str, detail: dict[str, Any], recorded_by: str, *, now: datetime
) -> None:
    """Keep one piece of evidence of an assignment's effect. Raises IllegalMove unless it is COMPLETED."""
    assignment = get_assignment(connection, assignment_id)
    if assignment.state is not AssignmentState.COMPLETED:
        why = f"It is {assignment.state.value}: only completed work has effects."
        raise wrong_state(f"No effect of {assignment_id} was recorded.", why, assignment_id)
    connection.execute(
        "INSERT INTO evidence (sow_id, assignment_id, kind, detail, recorded_by, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        (assignment.sow_id, assignment_id, kind, journal.to_json(detail), recorded_by, micros(now)),
    )


def evidence_of(connection: Connection, assignment_id: str) -> list[dict[str, Any]]:
    """The evidence of one assignment, oldest first: kind, detail, recorded_by."""
    rows = connection.execute(
        "SELECT kind, detail, recorded_by FROM evidence WHERE assignment_id = ? ORDER BY seq", (assignment_id,)
    )
    return [{"kind": row[0], "detail": json.loads(row[1]), "recorded_by": row[2]} for row in rows]


def record_verification(
    connection: Connection, *, subject: str, assignment_id: str, verifier: str, verdict: Verdict, now: datetime
) -> None:
    """Keep what a verification found about a statement of work, or (with no `assignment_id`) about an outcome."""
    found = (int(verdict.passed), verdict.reason, journal.to_json(verdict.detail))
    connection.execute(
        "INSERT INTO verifications (subject, assignment_id, verifier_id, passed, reason, detail, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (subject, assignment_id, verifier, *found, micros(now)),
    )
    kind = "verification.passed" if verdict.passed else "verification.failed"
    journal.record(connection, kind, subject, actor=verifier, at=now, detail={"reason": verdict.reason})


def record_review(
    connection: Connection,
    *,
    sow_id: str,
    assignment_id: str,
    reviewer: str,
    approved: bool,
    note: str,
    now: datetime,
) -> None:
    """Keep one review of an assignment's work."""
    connection.execute(
        "INSERT INTO reviews (sow_id, assignment_id, reviewer_id, approved, note, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (sow_id, assignment_id, reviewer, int(approved), note, micros(now)),
    )


def reviews_of(connection: Connection, sow_id: str) -> list[dict[str, Any]]:
    """The reviews of a statement of work, oldest first: assignment_id, reviewer_id, approved, note."""
    rows = connection.execute(
        "SELECT assignment_id, reviewer_id, approved, note FROM reviews WHERE sow_id = ? ORDER BY seq", (sow_id,)
    )
    return [{**dict(row), "approved": bool(row["approved"])} for row in rows]


def record_ruling(connection: Connection, *, sow_id: str, decision: str, principal: str, now: datetime) -> Ruling:
    """Keep a principal's decision about a statement of work."""
    inserted = connection.execute(
        "INSERT INTO rulings (id, sow_id, decision, principal_id, created_at) VALUES (?, ?, ?, ?, ?) RETURNING *",
        (new_id("rul"), sow_id, decision, principal, micros(now)),
    )
    journal.record(connection, "ruling.decided", sow_id, actor=principal, at=now, detail={"decision": decision})
    return from_row(Ruling, inserted.rows[0])


def rulings_of(connection: Connection, sow_id: str) -> list[Ruling]:
    """The rulings on a statement of work, oldest first."""
    rows = connection.execute("SELECT * FROM rulings WHERE sow_id = ? ORDER BY created_at, id", (sow_id,))
    return [from_row(Ruling, row) for row in rows]


def workers_on(connection: Connection, outcome_id: str) -> set[str]:
    """Who was ever given any of an outcome's work: the ledger's own answer for separation of duties."""
    rows = connection.execute(
        "SELECT DISTINCT a.actor_id FROM assignments a JOIN sows s ON s.id = a.sow_id WHERE s.outcome_id = ?",
        (outcome_id,),
    )
    return {row[0] for row in rows}


def reviewers_on(connection: Connection, outcome_id: str) -> set[str]:
    """Who ever reviewed any of an outcome's work."""
    rows = connection.execute(
        "SELECT DISTINCT r.reviewer_id FROM reviews r JOIN sows s ON s.id = r.sow_id WHERE s.outcome_id = ?",
        (outcome_id,),
    )
    return {row[0] for row in rows}


# --- refusals ---------------------------------------------------------------------------------------------


NOUNS = {"out": "outcome", "sow": "statement of work", "asg": "assignment", "att": "attempt", "msg": "message"}
"""What the records are called, by the beginnings of their ids."""

NEXT: dict[str, str] = {
    SowState.READY: "assign {} ACTOR",
    SowState.COMPLETED: "verify {}",
    SowState.VERIFIED: "review {}",
    SowState.BLOCKED: "ruling decide {} --decision TEXT",
    SowState.FAILED: "assign {} ACTOR",
    SowState.REJECTED: "assign {} ACTOR",
}
"""What a statement of work in each state asks for, where that is one thing."""


def next_command(sow_id: str, state: str) -> str:
    """What to type next about a statement of work in that state, or whose assignment is; empty if that is open."""
    return f"sovereign-agent {NEXT[state].format(sow_id)} --by ACTOR" if state in NEXT else ""


def there(row: Row | None, kind: str, record_id: str) -> Row:
    """The row that was looked for. Raises Refusal for an id that names nothing, or nothing of that kind."""
    if row is not None:
        return row
    noun = NOUNS["sow"] if kind == "sow" else kind
    other = NOUNS.get(record_id.partition("_")[0], noun)
    raise Refusal(
        f"There is no {noun} {record_id}.",
        category=f"{kind}_missing",
        why=f"No {noun} of this ledger has that id{f': it has the form of another kind, {other}' * (other != noun)}.",
        inspect="sovereign-agent status",
    )


def illegal_move(record: Outcome | Sow | Assignment, to: str) -> IllegalMove:
    """The refusal for a move that a record's state does not allow."""
    why = f"It is {record.state}, or another process moved it in this moment."
    match record:
        case Outcome():
            noun, following = "Outcome", ""
        case Sow():
            noun, following = "Statement of work", next_command(record.id, record.state)
        case Assignment():
            noun, following = "Assignment", next_command(record.sow_id, record.state)
    return wrong_state(f"{noun} {record.id} cannot become {to}.", why, record.id, following)
