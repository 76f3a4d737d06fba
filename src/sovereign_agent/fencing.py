"""Fencing: who may host an actor, and who may run an assignment, right now.

Two authorities, each a row, a token and a compare-and-set:

    actor lease          one process hosts one actor until a time        actor_leases
    execution attempt    one process runs one assignment until a time    execution_attempts
                         bound to the lease's token, and to CREATED -> RUNNING

A process is a random identity, never a PID. Tokens come from one counter that only grows; a takeover's token
is strictly greater, so a process that lost its lease can never present a winning one again. At exactly
``expires_at`` the old holder may no longer renew and another may take over: one operator, everywhere.

What this room does not do: it stops no program and deletes no file. Whoever lost its authority can run on;
what it does is refused here and never becomes canonical. Expiry alone is no verdict either: it makes recovery
eligible, and the compare-and-set on the assignment's pointer picks the one writer.

    attempt:  ACTIVE --end_attempt by its own process--> DONE
              ACTIVE --end_attempt by a supervisor, a canceler or a successor--> RECOVERED

Each attempt ends with exactly one receipt, in the transaction that ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from sovereign_agent import journal, outcomes
from sovereign_agent.clock import EPOCH, Clock, micros
from sovereign_agent.database import Connection, Database, Row, require_admission
from sovereign_agent.errors import (
    AlreadyHeld,
    AuthorityLost,
    ConstraintBroken,
    actor_lease_lost,
    execution_attempt_lost,
)
from sovereign_agent.records import (
    AFTER_RECEIPT,
    ActorLease,
    AssignmentState,
    AttemptStatus,
    ExecutionAttempt,
    Receipt,
    SowState,
    from_row,
    new_id,
)

ACTOR_LEASE_TTL = timedelta(minutes=5)
EXECUTION_ATTEMPT_TTL = timedelta(minutes=15)
EXECUTION_ATTEMPT_MAXIMUM = timedelta(hours=24)
"""Beyond this no renewal reaches, however alive the process looks."""


def new_process_identity() -> str:
    """A fresh ``proc_<uuid4 hex>``. PIDs are reused by the operating system; these are not."""
    return f"proc_{uuid4().hex}"


def admitted_token(connection: Connection) -> tuple[int, int | None]:
    """Mint the next fencing token, if new authority may be granted here; with the server's time, if it has one.

    It holds the counter's row until the caller's transaction ends: whoever comes later gets the greater token.
    Raises PolicyRefusal (``paused``) and AuthorityLost (``epoch_replaced``, ``marker_...``).
    """
    row = connection.execute(
        """
        UPDATE lease_tokens SET value = value + 1 WHERE id = 1
        RETURNING value, (SELECT epoch FROM assistant_control WHERE id = 1 <for share>) AS epoch,
                  (SELECT paused FROM assistant_control WHERE id = 1 <for share>) AS paused, <now> AS now
        """
    ).fetchone()
    if row is None:
        raise ConstraintBroken("The token counter is gone.", category="counter_missing", inspect="table lease_tokens")
    require_admission(connection, row)
    return row["value"], row["now"]


# --- actor leases -----------------------------------------------------------------------------------------


def acquire_actor_lease(
    db: Database, actor_id: str, process_identity: str, *, ttl: timedelta = ACTOR_LEASE_TTL, clock: Clock | None = None
) -> ActorLease:
    """Take the right to host an actor, free or run out, for `ttl`.

    Raises AlreadyHeld (``actor_lease_held``) while another lease is current, this process's too: holding on
    is `renew_actor_lease`. Raises PolicyRefusal (``paused``) and AuthorityLost (``epoch_replaced``): a lease alone
    runs nothing, but it is the first thing that a run takes, and a refused run leaves nothing behind. (Unit 8,
    Property 1)
    """
    with db.transaction() as connection:
        token, told = admitted_token(connection)
        now = db.now(clock, told)  # after the counter's row is ours: a wait must not make us judge by an old time
        taken = connection.execute(
            """
            INSERT INTO actor_leases (actor_id, process_identity, fencing_token, acquired_at, expires_at)
            VALUES (?, ?, ?, ?, ?)
            ON CONFLICT (actor_id) DO UPDATE
               SET process_identity = excluded.process_identity, fencing_token = excluded.fencing_token,
                   acquired_at = excluded.acquired_at, expires_at = excluded.expires_at
             WHERE actor_leases.expires_at <= ? AND actor_leases.expires_at >= 0
            """,
            (actor_id, process_identity, token, micros(now), micros(now + ttl), micros(now)),
        )
        if taken.rowcount != 1:
            raise _lease_held(connection, actor_id)
        return ActorLease(actor_id, process_identity, token, now, now + ttl)


def renew_actor_lease(
    db: Database,
    actor_id: str,
    process_identity: str,
    fencing_token: int,
    *,
    ttl: timedelta = ACTOR_LEASE_TTL,
    clock: Clock | None = None,
) -> ActorLease:
    """Hold on for `ttl` from now, under the same token.

    Raises AuthorityLost (``actor_lease_lost``) unless token and identity match an unexpired lease.
    """
    with db.transaction() as connection:
        lock_lease(connection, actor_id)
        return renew_lease(connection, actor_id, process_identity, fencing_token, ttl=ttl, now=db.now(clock))


def lock_lease(connection: Connection, actor_id: str) -> None:
    """Keep an actor's lease from changing until the caller's transaction ends. It comes before any attempt's row."""
    connection.lock("SELECT 1 FROM actor_leases WHERE actor_id = ? <for update>", (actor_id,))


def renew_lease(
    connection: Connection, actor_id: str, process_identity: str, fencing_token: int, *, ttl: timedelta, now: datetime
) -> ActorLease:
    """`renew_actor_lease` inside the caller's transaction, which has locked the lease before it read the clock."""
    renewed = connection.execute(
        """
        UPDATE actor_leases SET expires_at = ?
         WHERE actor_id = ? AND process_identity = ? AND fencing_token = ? AND expires_at > ?
        RETURNING *
        """,
        (micros(now + ttl), actor_id, process_identity, fencing_token, micros(now)),
    ).fetchone()
    if renewed is None:
        raise actor_lease_lost(actor_id, fencing_token)
    return from_row(ActorLease, renewed)


def acquire_or_renew_actor_lease(
    db: Database, actor_id: str, process_identity: str, *, ttl: timedelta = ACTOR_LEASE_TTL, clock: Clock | None = None
) -> ActorLease:
    """Extend this process's own lease where it holds one, else take it. Raises AlreadyHeld."""
    try:
        return acquire_actor_lease(db, actor_id, process_identity, ttl=ttl, clock=clock)
    except AlreadyHeld:
        held = current_actor_lease(db, actor_id)
        if held is None or held.process_identity != process_identity:
            raise
    try:
        return renew_actor_lease(db, actor_id, process_identity, held.fencing_token, ttl=ttl, clock=clock)
    except AuthorityLost:  # it ran out just now, so it is taken like anybody's: under a new token
        return acquire_actor_lease(db, actor_id, process_identity, ttl=ttl, clock=clock)


def release_actor_lease(db: Database, actor_id: str, process_identity: str, fencing_token: int) -> bool:
    """Give an actor back.

    False, and nothing changed, when the lease is not this one any more, or an ACTIVE attempt still stands on it.
    """
    with db.transaction() as connection:
        return release_lease(connection, actor_id, process_identity, fencing_token)


def release_lease(connection: Connection, actor_id: str, process_identity: str, fencing_token: int) -> bool:
    """`release_actor_lease` inside the caller's transaction."""
    lock_lease(connection, actor_id)  # an attempt that is being inserted under this token must be seen by the DELETE
    released = connection.execute(
        """
        DELETE FROM actor_leases
         WHERE actor_id = ? AND process_identity = ? AND fencing_token = ?
           AND NOT EXISTS (SELECT 1 FROM execution_attempts
                            WHERE actor_lease_fencing_token = ? AND status = 'ACTIVE')
        """,
        (actor_id, process_identity, fencing_token, fencing_token),
    )
    return released.rowcount == 1


def current_actor_lease(db: Database, actor_id: str) -> ActorLease | None:
    """The lease on an actor as the ledger has it, run out or not; None when nobody holds one."""
    return lease_on(db.connection, actor_id)


def lease_on(connection: Connection, actor_id: str) -> ActorLease | None:
    """`current_actor_lease` inside the caller's transaction."""
    row = connection.execute("SELECT * FROM actor_leases WHERE actor_id = ?", (actor_id,)).fetchone()
    return from_row(ActorLease, row) if row else None


def run_under(connection: Connection, fencing_token: int) -> str | None:
    """An assignment that runs under a lease's token, the first that was begun; None when no run stands on it."""
    row = connection.execute(
        """
        SELECT assignment_id FROM execution_attempts
         WHERE actor_lease_fencing_token = ? AND status = 'ACTIVE' ORDER BY fencing_token LIMIT 1
        """,
        (fencing_token,),
    ).fetchone()
    return str(row[0]) if row else None


def expired_actor_leases(db: Database, clock: Clock | None = None, *, limit: int = 1000) -> list[ActorLease]:
    """The leases that have run out and that nobody has taken, the longest over first.

    Changes nothing: running out is no fault, it only makes the actor free to take.
    """
    rows = db.connection.execute(
        "SELECT * FROM actor_leases WHERE expires_at <= ? ORDER BY expires_at LIMIT ?", (micros(db.now(clock)), limit)
    )
    return [from_row(ActorLease, row) for row in rows]


# --- execution attempts -----------------------------------------------------------------------------------


def acquire_execution_attempt(
    db: Database,
    assignment_id: str,
    actor_id: str,
    process_identity: str,
    actor_lease_fencing_token: int,
    *,
    ttl: timedelta = EXECUTION_ATTEMPT_TTL,
    maximum: timedelta = EXECUTION_ATTEMPT_MAXIMUM,
    host: str = "",
    process: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> ExecutionAttempt:
    """Take the right to run an assignment and move it to RUNNING, in one transaction.

    The lease is verified again here, with its row locked: the caller's own acquisition may be history by now.
    An attempt that has run out is taken over; it is closed with its own ``worker_lost`` receipt in the same
    transaction. No renewal holds it beyond `maximum` from now. `host` and `process` are evidence of where it runs.
    (Unit 8, Property 2)

    Raises AuthorityLost (``actor_lease_lost``), AlreadyHeld (``execution_attempt_held``), IllegalMove,
    Refusal (``assignment_missing``), PolicyRefusal (``paused``).
    """
    with db.immediate() as connection:
        token, _ = admitted_token(connection)
        lease = connection.execute(
            """
            SELECT lease.process_identity, lease.fencing_token, lease.expires_at, held.id AS held, <now> AS now
              FROM (SELECT * FROM actor_leases WHERE actor_id = ? <for share>) AS lease
              LEFT JOIN (SELECT id FROM execution_attempts WHERE assignment_id = ? AND status = 'ACTIVE' <for update>)
                   AS held ON 1 = 1
            """,
            (actor_id, assignment_id),
        ).fetchone()
        now = db.now(clock, lease["now"] if lease else None)
        held = active_attempt(connection, assignment_id) if lease and lease["held"] else None
        if not _is_current(lease, process_identity, actor_lease_fencing_token, now):
            raise actor_lease_lost(actor_id, actor_lease_fencing_token)
        if held and not EPOCH <= held.expires_at <= now:
            raise _attempt_held(held)
        attempt_id = new_id("att")
        if held:
            _close_attempt(connection, held.id, AttemptStatus.RECOVERED)
            journal.record_end(connection, held, journal.lost_receipt(held), now, "assignment.recovered")
            outcomes.hand_over_assignment(connection, assignment_id, actor_id, held.id, attempt_id, now=now)
        else:
            outcomes.start_assignment(connection, assignment_id, actor_id, attempt_id, now=now)
        ids = (attempt_id, assignment_id, actor_id, process_identity, token, actor_lease_fencing_token)
        until, deadline, evidence = now + min(ttl, maximum), now + maximum, dict(process or {})
        times = (micros(now), micros(until), micros(deadline))
        where = (host, journal.to_json(evidence), micros(now))
        connection.execute(
            """
            INSERT INTO execution_attempts (id, assignment_id, actor_id, process_identity, fencing_token,
                                            actor_lease_fencing_token, status, acquired_at, expires_at, deadline,
                                            host, process, progress_at)
            VALUES (?, ?, ?, ?, ?, ?, 'ACTIVE', ?, ?, ?, ?, ?, ?)
            """,
            (*ids, *times, *where),
        )
        return ExecutionAttempt(*ids, AttemptStatus.ACTIVE, now, until, deadline, host, evidence, now)


def active_attempt(connection: Connection, assignment_id: str) -> ExecutionAttempt | None:
    """The ACTIVE attempt on an assignment, its row locked; None when nobody runs it."""
    row = connection.execute(
        "SELECT * FROM execution_attempts WHERE assignment_id = ? AND status = 'ACTIVE' <for update>", (assignment_id,)
    ).fetchone()
    return from_row(ExecutionAttempt, row) if row else None


def renew_execution_attempt(
    db: Database,
    assignment_id: str,
    attempt_id: str,
    process_identity: str,
    fencing_token: int,
    *,
    ttl: timedelta = EXECUTION_ATTEMPT_TTL,
    clock: Clock | None = None,
) -> ExecutionAttempt:
    """Hold on for `ttl` from now, but never beyond the attempt's deadline.

    Raises AuthorityLost (``execution_attempt_lost``) unless token and identity match an unexpired attempt.
    """
    key = (attempt_id, assignment_id, process_identity, fencing_token)
    with db.transaction() as connection:
        _lock_attempt(connection, attempt_id)
        return _renew_attempt(connection, key, ttl=ttl, now=db.now(clock))


def renew_run(
    db: Database,
    attempt: ExecutionAttempt,
    *,
    attempt_ttl: timedelta,
    lease_ttl: timedelta,
    silent: timedelta,
    step: str,
    tolerance: timedelta,
) -> timedelta:
    """Hold on to an attempt and to the actor lease that it stands on: both or neither.

    It also notes what the run's program shows of itself: for how long it has been silent, the step it is in, and how
    much silence that step may take. Returns for how long both last, from the moment by which the ledger judged.
    Raises AuthorityLost (``execution_attempt_lost``, ``actor_lease_lost``).
    """
    actor_id, process = attempt.actor_id, attempt.process_identity
    key = (attempt.id, attempt.assignment_id, process, attempt.fencing_token)
    with db.transaction() as connection:
        lock_lease(connection, actor_id)
        _lock_attempt(connection, attempt.id)
        now = db.now()
        run = _renew_attempt(connection, key, ttl=attempt_ttl, now=now)
        lease = renew_lease(connection, actor_id, process, attempt.actor_lease_fencing_token, ttl=lease_ttl, now=now)
        connection.execute(
            "UPDATE execution_attempts SET progress_at = ?, step = ?, tolerance_seconds = ? WHERE id = ?",
            (micros(now - silent), step, tolerance // timedelta(seconds=1), attempt.id),
        )
    return min(run.expires_at, lease.expires_at) - now


def _lock_attempt(connection: Connection, attempt_id: str) -> None:
    connection.lock("SELECT 1 FROM execution_attempts WHERE id = ? <for update>", (attempt_id,))


def _renew_attempt(
    connection: Connection, key: tuple[str, str, str, int], *, ttl: timedelta, now: datetime
) -> ExecutionAttempt:
    """Renew the attempt whose id, assignment, process identity and token are `key`. Its row is locked."""
    attempt_id, assignment_id, _, _ = key
    until = micros(now + ttl)
    renewed = connection.execute(
        """
        UPDATE execution_attempts SET expires_at = CASE WHEN deadline < ? THEN deadline ELSE ? END
         WHERE id = ? AND assignment_id = ? AND process_identity = ? AND fencing_token = ?
           AND status = 'ACTIVE' AND expires_at > ?
        RETURNING *
        """,
        (until, until, *key, micros(now)),
    ).fetchone()
    if renewed is None:
        raise execution_attempt_lost(assignment_id, attempt_id)
    return from_row(ExecutionAttempt, renewed)


def verify_execution_attempt(db: Database, assignment_id: str, attempt_id: str) -> bool:
    """Whether this attempt is the current one, now. An answer for people: a write checks for itself."""
    row = db.connection.execute(
        "SELECT 1 FROM assignments WHERE id = ? AND current_execution_attempt = ?", (assignment_id, attempt_id)
    ).fetchone()
    return row is not None


def release_execution_attempt(
    connection: Connection,
    assignment_id: str,
    attempt_id: str,
    status: AttemptStatus,
    *,
    becomes: AssignmentState = AssignmentState.FAILED,
    now: datetime | None = None,
) -> str | None:
    """Clear the fence: the assignment leaves RUNNING for `becomes` and the attempt leaves ACTIVE for `status`.

    Returns the id of the statement of work; None, and nothing changed, when `attempt_id` is not the assignment's
    current attempt.
    """
    # The attempt's row before its assignment's, as everywhere: two enders must wait, not deadlock.
    _lock_attempt(connection, attempt_id)
    at = now or connection.now()
    sow_id = outcomes.stop_assignment(connection, assignment_id, attempt_id, becomes, now=at)
    if sow_id:
        _close_attempt(connection, attempt_id, status)
    return sow_id


def end_attempt(
    connection: Connection,
    attempt: ExecutionAttempt,
    status: AttemptStatus,
    receipt: Receipt,
    *,
    becomes: AssignmentState | None = None,
    by: str = "",
    now: datetime,
) -> bool:
    """End an attempt and write all that follows: fence, states, receipt and events, together.

    False, and nothing changed, when the attempt is no longer the current one: somebody else ended it first.
    `becomes` overrides the state that the receipt's status stands for (a canceled run's). `by` is the actor who ended
    it; nobody, when its time did.
    """
    assignment_state, sow_state = AFTER_RECEIPT[receipt.status]
    sow_id = release_execution_attempt(
        connection, attempt.assignment_id, attempt.id, status, becomes=becomes or assignment_state, now=now
    )
    if not sow_id:
        return False
    recovered = ["assignment.recovered"] * (status is AttemptStatus.RECOVERED)
    journal.record_end(connection, attempt, receipt, now, "assignment.finished", *recovered, by=by)
    outcomes.move_sow(connection, sow_id, (SowState.RUNNING,), sow_state, actor=by, now=now)
    return True


def finish_own_attempt(connection: Connection, attempt: ExecutionAttempt, receipt: Receipt, *, now: datetime) -> None:
    """The terminal write of the process that ran the assignment.

    Raises AuthorityLost: ``execution_attempt_lost`` when another attempt, or none, is current;
    ``actor_lease_lost`` when the actor's lease has passed to a greater token, and also when there is none: it is
    never released under an ACTIVE attempt, so somebody took it over and gave it back. Expiry alone refuses nothing.
    """
    lease = connection.execute(
        "SELECT fencing_token FROM actor_leases WHERE actor_id = ? <for share>", (attempt.actor_id,)
    ).fetchone()
    if not end_attempt(connection, attempt, AttemptStatus.DONE, receipt, by=attempt.actor_id, now=now):
        raise execution_attempt_lost(attempt.assignment_id, attempt.id)
    if lease is None or lease["fencing_token"] != attempt.actor_lease_fencing_token:
        raise actor_lease_lost(attempt.actor_id, attempt.actor_lease_fencing_token)


def expired_execution_attempts(
    db: Database, clock: Clock | None = None, *, limit: int = 1000
) -> list[ExecutionAttempt]:
    """The ACTIVE attempts that have run out and that their assignment still points at, the longest over first."""
    return expired_attempts(db.connection, db.now(clock), limit=limit)


def expired_attempts(
    connection: Connection, now: datetime, *, limit: int, skipping: frozenset[str] = frozenset()
) -> list[ExecutionAttempt]:
    """`expired_execution_attempts` inside the caller's transaction, without the ids in `skipping`."""
    rows = connection.execute(
        """
        SELECT e.* FROM execution_attempts e
          JOIN assignments a ON a.id = e.assignment_id AND a.current_execution_attempt = e.id
         WHERE e.status = 'ACTIVE' AND e.expires_at <= ? ORDER BY e.expires_at LIMIT ?
        """,
        (micros(now), limit + len(skipping)),
    )
    return [from_row(ExecutionAttempt, row) for row in rows if row["id"] not in skipping][:limit]


def orphans(connection: Connection, *, limit: int = 100) -> list[str]:
    """Assignments that are RUNNING under an attempt that is not ACTIVE, or not there: only a hand can make one."""
    rows = connection.execute(
        """
        SELECT a.id FROM assignments a
         WHERE a.state = 'RUNNING' AND NOT EXISTS
               (SELECT 1 FROM execution_attempts e WHERE e.id = a.current_execution_attempt AND e.status = 'ACTIVE')
         ORDER BY a.id LIMIT ?
        """,
        (limit,),
    )
    return [row[0] for row in rows]


def lock_expired_attempt(connection: Connection, attempt_id: str, clock: Clock | None) -> datetime | None:
    """Lock an attempt's row, then read the clock: the time by which it has still run out, or None."""
    row = connection.execute(
        "SELECT expires_at FROM execution_attempts WHERE id = ? AND status = 'ACTIVE' <for update>", (attempt_id,)
    ).fetchone()
    now = clock() if clock else connection.now()
    return now if row and row[0] <= micros(now) else None


# --- workspaces still to be reclaimed ---------------------------------------------------------------------


def attempts_to_reclaim(connection: Connection, *, after: str, limit: int) -> list[tuple[str, str, str]]:
    """(attempt id, workspace policy, host) of ended attempts whose workspace nobody has dealt with yet, by id.

    A page at a time: `after` is the last id of the page before, or empty.
    """
    rows = connection.execute(
        """
        SELECT e.id, a.workspace_policy, e.host FROM execution_attempts e JOIN assignments a ON a.id = e.assignment_id
         WHERE e.workspace_open = 1 AND e.status <> 'ACTIVE' AND e.id > ? ORDER BY e.id LIMIT ?
        """,
        (after, limit),
    )
    return [(row[0], row[1], row[2]) for row in rows]


def close_workspace(connection: Connection, attempt_id: str) -> None:
    """Note that an ended attempt's workspace policy has been applied, so that no tick looks at it again."""
    connection.execute(
        "UPDATE execution_attempts SET workspace_open = 0 WHERE id = ? AND status <> 'ACTIVE'", (attempt_id,)
    )


# --- a new epoch ------------------------------------------------------------------------------------------


def advance_tokens(connection: Connection, *, above: int) -> None:
    """From now on mint tokens greater than `above`, and than any that this ledger has seen."""
    connection.execute(
        "UPDATE lease_tokens SET value = CASE WHEN value < ? THEN ? ELSE value END + 1 WHERE id = 1", (above, above)
    )


def revoke_all(connection: Connection, now: datetime) -> None:
    """Take every lease and every attempt from whoever holds it, as a restore must.

    An attempt runs out at `now`, and the next tick ends it as ``worker_lost``. Its own terminal write is refused,
    because the lease under it is gone.
    """
    connection.execute("DELETE FROM actor_leases")
    connection.execute(
        "UPDATE execution_attempts SET expires_at = ? WHERE status = 'ACTIVE' AND expires_at > ?",
        (micros(now), micros(now)),
    )
    # A clock that is set back must not let it be renewed beyond that.
    connection.execute("UPDATE execution_attempts SET deadline = expires_at WHERE status = 'ACTIVE'")


def last_token(connection: Connection) -> int:
    """The greatest fencing token that was ever minted here."""
    return int(connection.execute("SELECT value FROM lease_tokens WHERE id = 1").rows[0][0])


# --- helpers ----------------------------------------------------------------------------------------------


def _close_attempt(connection: Connection, attempt_id: str, status: AttemptStatus) -> None:
    closed = connection.execute(
        "UPDATE execution_attempts SET status = ? WHERE id = ? AND status = 'ACTIVE'", (status, attempt_id)
    )
    if closed.rowcount != 1:
        raise ConstraintBroken(
            f"Attempt {attempt_id} is the current one of its assignment and yet not ACTIVE.",
            category="attempt_not_active",
            inspect="sovereign-agent doctor",
        )


def _is_current(lease: Row | None, process_identity: str, fencing_token: int, now: datetime) -> bool:
    return (
        lease is not None
        and lease["process_identity"] == process_identity
        and lease["fencing_token"] == fencing_token
        and lease["expires_at"] > micros(now)
    )


def _lease_held(connection: Connection, actor_id: str) -> AlreadyHeld:
    held = lease_on(connection, actor_id)
    assert held  # the statement that was refused has locked it
    running = run_under(connection, held.fencing_token)
    act, command = ("cancel that run", f"cancel {running}") if running else ("free it", f"actor free {actor_id}")
    return AlreadyHeld(
        f"Actor {actor_id} was not leased.",
        category="actor_lease_held",
        why=f"Process {held.process_identity} hosts it{f' and runs {running}' if running else ''},"
        f" until {held.expires_at:%F %T} UTC at least. Wait, or {act} if that one is gone.",
        inspect="sovereign-agent status" if running else "sovereign-agent actor list",
        next_command=f"sovereign-agent {command} --by ACTOR",
    )


def _attempt_held(held: ExecutionAttempt) -> AlreadyHeld:
    return AlreadyHeld(
        f"Assignment {held.assignment_id} was not started.",
        category="execution_attempt_held",
        why=f"Attempt {held.id} runs it until {held.expires_at:%F %T} UTC at least."
        " Wait, or revoke it if its process is gone.",
        inspect=f"sovereign-agent inspect {held.assignment_id}",
        next_command=f"sovereign-agent cancel {held.assignment_id} --by ACTOR",
    )
