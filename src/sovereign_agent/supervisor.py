"""Supervisor: a process cannot record its own death, so another one does.

One `tick` does four things, in this order, and nothing else:

    1. report the actor leases that have run out       it reads only: running out is no fault
    2. put mailbox claims that have run out back
    3. recover abandoned assignments                   FAILED, worker_lost, one receipt
    4. apply the workspace policy to what has ended    after the ledger is true, never before

It creates no work, reads no signal, kills no process, installs itself nowhere, and never guesses: a report on
disk that says "completed" was left by somebody who did not finish, so it is kept and not believed. Any number
of supervisors may run, and any of them may be killed at any line: each recovery is one compare-and-set, and
whoever loses it writes nothing.

    dies before the commit      nothing happened; the next tick finds the same attempt
    dies after the commit       the ledger is true; the next tick finds the folder still to be dealt with
    row that cannot be          left alone and named in `SupervisorReport.problems`; the others are recovered
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from sovereign_agent import fencing, journal, relay
from sovereign_agent.clock import Clock
from sovereign_agent.database import Database
from sovereign_agent.errors import Contention, LedgerUnavailable, SovereignError
from sovereign_agent.fencing import WORKER_LOST
from sovereign_agent.organization import Organization
from sovereign_agent.records import ActorLease, AttemptStatus, ExecutionAttempt, Receipt

__all__ = ["TICK_INTERVAL_SECONDS", "WORKER_LOST", "SupervisorReport", "recover_abandoned_assignments", "run", "tick"]

TICK_INTERVAL_SECONDS = 2.0
RECOVERY_BATCH = 50
"""How many recoveries share one transaction: few enough that work can be claimed in between."""


@dataclass(frozen=True, slots=True)
class SupervisorReport:
    """What one tick saw and did. `problems` are sentences about rows and folders it could not deal with."""

    expired_actor_leases: tuple[ActorLease, ...]
    swept_mailbox_claims: tuple[str, ...]
    recovered_assignments: tuple[str, ...]
    problems: tuple[str, ...] = ()


def tick(org: Organization, clock: Clock | None = None) -> SupervisorReport:
    """Reconcile once. Raises Contention, LedgerFault; whatever was committed before stands."""
    problems: list[str] = []
    leases = fencing.expired_actor_leases(org.db, clock)
    swept = relay.sweep_expired_claims(org.db, clock)
    recovered = _recover(org, clock, problems)
    _apply_workspace_policies(org, problems)
    return SupervisorReport(
        tuple(leases), tuple(swept), tuple(receipt.assignment_id for receipt in recovered), tuple(problems)
    )


def recover_abandoned_assignments(org: Organization, clock: Clock | None = None) -> tuple[Receipt, ...]:
    """End every RUNNING assignment whose attempt has run out, and return the receipts this call wrote.

    (Unit 8, Property 4; Chapter 6)
    """
    problems: list[str] = []
    recovered = _recover(org, clock, problems)
    _apply_workspace_policies(org, problems)
    return tuple(recovered)


def run(
    org: Organization,
    *,
    once: bool = False,
    interval: float = TICK_INTERVAL_SECONDS,
    on_tick: Callable[[SupervisorReport], None] | None = None,
) -> int:
    """Tick in the foreground every `interval` seconds until SIGINT or SIGTERM, or only `once`. Returns 0.

    A busy ledger costs a tick, not the loop. LedgerFault ends it: that is for a human.
    """
    show = on_tick or (lambda report: None)
    try:
        with _sigterm_interrupts():
            while True:
                try:
                    show(tick(org))
                except Contention:
                    if once:
                        raise
                if once:
                    return 0
                time.sleep(interval)
    except KeyboardInterrupt:
        return 0


def _recover(org: Organization, clock: Clock | None, problems: list[str]) -> list[Receipt]:
    recovered: list[Receipt] = []
    passed_over: set[str] = set()
    while True:
        batch = fencing.expired_attempts(
            org.db.connection, org.db.now(clock), limit=RECOVERY_BATCH, skipping=frozenset(passed_over)
        )
        if not batch:
            return recovered
        won = _recover_batch(org.db, batch, clock, problems)
        recovered += won
        passed_over |= {attempt.id for attempt in batch} - {receipt.attempt_id for receipt in won}


def _recover_batch(
    db: Database, batch: list[ExecutionAttempt], clock: Clock | None, problems: list[str]
) -> list[Receipt]:
    """One transaction for all; if that fails, one for each, so that a bad row stands alone."""
    try:
        return _recover_together(db, batch, clock)
    except (Contention, LedgerUnavailable):
        raise
    except SovereignError as error:
        if len(batch) == 1:
            problems.append(f"Attempt {batch[0].id} of {batch[0].assignment_id} cannot be recovered: {error}")
            return []
    return [receipt for attempt in batch for receipt in _recover_batch(db, [attempt], clock, problems)]


def _recover_together(db: Database, batch: list[ExecutionAttempt], clock: Clock | None) -> list[Receipt]:
    won: list[Receipt] = []
    with db.immediate() as connection:
        for attempt in batch:
            now = fencing.lock_expired_attempt(connection, attempt.id, clock or db.clock)
            receipt = fencing.lost_receipt(attempt)
            if now and fencing.end_attempt(connection, attempt, AttemptStatus.RECOVERED, receipt, now=now):
                won.append(replace(receipt, created_at=now))
    return won


def _apply_workspace_policies(org: Organization, problems: list[str]) -> None:
    """Deal with every ended run's folder that nobody has dealt with: after a recovery, or a worker's death
    between its terminal write and its clean-up."""
    last = ""
    while page := fencing.attempts_to_reclaim(org.db.connection, after=last, limit=RECOVERY_BATCH):
        for last, policy in page:
            receipt = journal.receipt_of_attempt(org.db.connection, last)
            if receipt is None:
                problems.append(f"Attempt {last} has ended without a receipt.")
                continue
            try:
                reclaim = org.apply_workspace_policy(last, policy, receipt)
            except (Contention, LedgerUnavailable):
                raise
            except (SovereignError, OSError) as error:
                problems.append(f"The folder of attempt {last} cannot be dealt with: {error}")
                continue
            if reclaim.status == "partial":
                problems.append(f"The folder of attempt {last} is reclaimed in part: {', '.join(reclaim.leftovers)}")


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the loop the way Ctrl-C does; only the main thread may set signal handlers."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
