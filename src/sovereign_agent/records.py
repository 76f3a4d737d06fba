"""Frozen records, their states, and the moves each state allows.

A record is a photograph of a row: it never changes and it holds no authority by itself. The homes enforce the
moves with a compare-and-set, never by trusting a photograph.

    assignment   CREATED -> RUNNING -> COMPLETED | BLOCKED | FAILED          CREATED, RUNNING -> CANCELED
    sow          DRAFT -> READY -> ASSIGNED -> RUNNING -> COMPLETED -> VERIFIED -> APPROVED
                 a failed, blocked or rejected one goes on by an explicit new assignment, never by itself
                 whatever is not assigned, running or approved can be CANCELED
    outcome      DRAFT -> ACTIVE <-> AT_RISK <-> READY -> ACCEPTED           (AT_RISK and READY are projections)
                 open, and none of its work assigned: -> CANCELED
    message      NEW -> CLAIMED -> DONE | DEAD, and CLAIMED -> NEW when a claim runs out
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any, Protocol, TypeVar, cast, get_type_hints

from sovereign_agent.clock import moment

T = TypeVar("T")


class Named(Protocol):
    """Whatever answers by column name: a row of either engine."""

    def __getitem__(self, key: str, /) -> Any: ...


def new_id(prefix: str) -> str:
    """A fresh random id, ``<prefix>_<32 hex>``: never a PID, never reused."""
    return f"{prefix}_{os.urandom(16).hex()}"


def from_row(kind: type[T], row: Named) -> T:
    """The record that a row of its table holds: times as moments, states as enumerations, JSON as what it says."""
    return kind(**{name: read(row[name]) if read else row[name] for name, read in _readers(kind).items()})


@cache
def _readers(kind: type) -> Mapping[str, Callable[[Any], Any] | None]:
    return {name: _reader(hint) for name, hint in get_type_hints(kind).items()}


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    if hint is datetime:
        return moment
    if hint == datetime | None:
        return lambda stored: None if stored is None else moment(stored)
    if hint == dict[str, Any]:
        return _object
    if hint == tuple[str, ...]:
        return _names
    return hint if isinstance(hint, type) and issubclass(hint, (StrEnum, bool)) else None


def _object(stored: str) -> dict[str, Any]:
    """What a JSON column holds. One that a hand has spoiled is told as it stands, and stops nobody."""
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(stored), dict):
            return cast("dict[str, Any]", value)
    return {"unreadable": stored}


def _names(stored: str) -> tuple[str, ...]:
    """What a JSON list of names holds. One that a hand has spoiled becomes a name that nothing has."""
    try:
        return tuple(str(name) for name in json.loads(stored))
    except (TypeError, ValueError, RecursionError):
        return ("unreadable",)


class Role(StrEnum):
    """What an actor is in the organization. The seeds fix these five."""

    PRINCIPAL = "principal"
    MASTER = "master"
    OPERATOR = "operator"
    SPARRING = "sparring"
    VERIFIER = "verifier"


class OutcomeState(StrEnum):
    """Where an outcome stands. ACCEPTED and CANCELED are final."""

    DRAFT = "DRAFT"
    ACTIVE = "ACTIVE"
    AT_RISK = "AT_RISK"
    READY = "READY"
    ACCEPTED = "ACCEPTED"
    CANCELED = "CANCELED"


class SowState(StrEnum):
    """Where a statement of work stands. APPROVED and CANCELED are final."""

    DRAFT = "DRAFT"
    READY = "READY"
    ASSIGNED = "ASSIGNED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    VERIFIED = "VERIFIED"
    APPROVED = "APPROVED"
    REJECTED = "REJECTED"
    BLOCKED = "BLOCKED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"


class AssignmentState(StrEnum):
    """Where an assignment stands. A recovered one is FAILED: there is no state that means "probably done"."""

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    BLOCKED = "BLOCKED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"


class AttemptStatus(StrEnum):
    """ACTIVE while it may write; DONE when its own process ended it; RECOVERED when another did."""

    ACTIVE = "ACTIVE"
    DONE = "DONE"
    RECOVERED = "RECOVERED"


class MessageState(StrEnum):
    """Where a mailbox message stands. DONE and DEAD are final."""

    NEW = "NEW"
    CLAIMED = "CLAIMED"
    DONE = "DONE"
    DEAD = "DEAD"


class ReceiptStatus(StrEnum):
    """How one attempt ended, in one word."""

    COMPLETED = "completed"
    BLOCKED = "blocked"
    FAILED = "failed"


ASSIGNABLE_SOW_STATES = (SowState.READY, SowState.FAILED, SowState.BLOCKED, SowState.REJECTED)
"""The states from which an explicit `assign` may start (or start again)."""

STUCK_SOW_STATES = (SowState.BLOCKED, SowState.FAILED, SowState.REJECTED)
"""The states that a ruling can decide."""

IDLE_SOW_STATES = (SowState.DRAFT, SowState.READY, SowState.COMPLETED, SowState.VERIFIED, *STUCK_SOW_STATES)
"""The states in which nobody is at work and nothing is settled, so that the work can be called off."""

TURNING_SOW_STATES = (SowState.APPROVED, SowState.REJECTED, SowState.BLOCKED, SowState.FAILED, SowState.CANCELED)
"""The states whose coming or going can change an outcome's projection; between all others it stays ACTIVE."""

AFTER_RECEIPT: dict[ReceiptStatus, tuple[AssignmentState, SowState]] = {
    ReceiptStatus.COMPLETED: (AssignmentState.COMPLETED, SowState.COMPLETED),
    ReceiptStatus.BLOCKED: (AssignmentState.BLOCKED, SowState.BLOCKED),
    ReceiptStatus.FAILED: (AssignmentState.FAILED, SowState.FAILED),
}
"""What a receipt's status makes of its assignment and its statement of work."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A desired state of the world, its checks, and the actor who owns it."""

    id: str
    title: str
    desired_state: str
    checks: tuple[str, ...]
    owner: str
    subject: str
    state: OutcomeState
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Sow:
    """A statement of work: what has to be done, by which role, towards one outcome."""

    id: str
    outcome_id: str
    scope: str
    role: Role
    created_by: str
    required_effect_kind: str | None
    state: SowState
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Assignment:
    """One explicit order to one actor to do one statement of work. A retry is another assignment."""

    id: str
    sow_id: str
    actor_id: str
    planner_id: str
    workspace_policy: str
    maximum_seconds: int
    state: AssignmentState
    current_execution_attempt: str | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class ActorLease:
    """The right of one process to host one actor until `expires_at`, under a token that only grows."""

    actor_id: str
    process_identity: str
    fencing_token: int
    acquired_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class ExecutionAttempt:
    """The right of one process to run one assignment, bound to the actor lease it was taken under.

    `deadline` is the moment beyond which no renewal reaches, however alive the process looks. `host` and `process`
    say where it was taken (evidence, never authority). Each renewal notes when the program last gave a sign
    (`progress_at`), the `step` it is in, and for how long that step may be silent (`tolerance_seconds`).
    """

    id: str
    assignment_id: str
    actor_id: str
    process_identity: str
    fencing_token: int
    actor_lease_fencing_token: int
    status: AttemptStatus
    acquired_at: datetime
    expires_at: datetime
    deadline: datetime
    host: str
    process: dict[str, Any]
    progress_at: datetime
    step: str = ""
    tolerance_seconds: int = 0
    workspace_open: int = 1


@dataclass(frozen=True, slots=True)
class Message:
    """One mailbox message. `fencing_token` is the current claim's, and None while nobody holds it."""

    id: str
    sender: str
    recipient: str
    subject: str
    body: str
    state: MessageState
    claim_owner: str | None
    fencing_token: int | None
    claim_expires_at: datetime | None
    deliveries: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Receipt:
    """The durable result of one attempt. `failure_category` is empty unless `status` is failed."""

    id: str
    assignment_id: str
    attempt_id: str
    actor_id: str
    status: ReceiptStatus
    failure_category: str
    summary: str
    detail: dict[str, Any] = field(default_factory=dict[str, Any])
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One line of history. `seq` orders it; `at` only dates it."""

    seq: int
    at: datetime
    kind: str
    subject: str
    actor: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ruling:
    """A principal's answer to a question that work could not decide for itself."""

    id: str
    sow_id: str
    decision: str
    principal_id: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: whether it holds, and the figures it looked at."""

    passed: bool
    reason: str
    detail: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on one item until its time runs out. It proves nothing by itself: `assert_current` does."""

    id: str
    session: str
    prompt: str
    generation: int
    owner: str
    epoch: str
    subject: str
    role: str
