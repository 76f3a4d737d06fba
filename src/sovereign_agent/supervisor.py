"""Supervisor: a process cannot record its own death, so another one does.

One `tick` does four things, in this order, and nothing else:

    1. report the actor leases that have run out       it reads only: running out is no fault
    2. put mailbox claims that have run out back
    3. recover abandoned assignments                   FAILED, worker_lost, one receipt
    4. apply the workspace policy to what has ended    after the ledger is true, never before, and on its own host

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
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

from sovereign_agent import fencing, heartbeat, journal, liveness, relay, runs
from sovereign_agent.clock import Clock
from sovereign_agent.errors import Contention, LedgerUnavailable, SovereignError
from sovereign_agent.journal import WORKER_LOST
from sovereign_agent.liveness import Sight
from sovereign_agent.organization import Organization
from sovereign_agent.records import ActorLease, AttemptStatus, ExecutionAttempt, MessageState, Receipt

__all__ = ["TICK_INTERVAL_SECONDS", "WORKER_LOST", "SupervisorReport", "recover_abandoned_assignments", "run", "tick"]

T = TypeVar("T")
Batch = list[tuple[ExecutionAttempt, dict[str, Any]]]

TICK_INTERVAL_SECONDS = 2.0
FINALIZERS = ("__del__", "_vanished")
"""Functions that Python calls while it collects: what is raised in one is printed and lost."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CAUSES = {Sight.REBOOTED: "host_rebooted", Sight.ALIVE: "lease_starved", Sight.STOPPED: "lease_starved"}
"""What the sight of a worker's process says about its loss. One that is gone needs more than a look."""

RECOVERY_BATCH = 50
"""How many recoveries share one transaction: few enough that work can be claimed in between."""

PENDING_SHOWN = 100
"""How many folders of other hosts a report names."""


@dataclass(frozen=True, slots=True)
class SupervisorReport:
    """What one tick saw and did. `problems` are sentences about rows and folders it could not deal with.

    `swept_mailbox_claims` are the messages that can be claimed again, `dead_messages` those delivered too often;
    `reclaim_pending` are the first ended attempts whose folder lies on another host, for a supervisor there;
    `folders_dealt_with` counts those of this host that no later tick needs to look at.
    """

    expired_actor_leases: tuple[ActorLease, ...]
    swept_mailbox_claims: tuple[str, ...]
    recovered_assignments: tuple[str, ...]
    problems: tuple[str, ...] = ()
    reclaim_pending: tuple[str, ...] = ()
    folders_dealt_with: int = 0
    dead_messages: tuple[str, ...] = ()


def tick(org: Organization, clock: Clock | None = None) -> SupervisorReport:
    """Reconcile once. Raises Contention, LedgerFault; whatever was committed before stands."""
    problems: list[str] = []
    leases = _unless_broken(lambda: fencing.expired_actor_leases(org.db, clock), "leases", problems)
    swept = _unless_broken(lambda: [*relay.sweep_expired_claims(org.db, clock).items()], "mailbox claims", problems)
    ended = tuple(receipt.assignment_id for receipt in _recover(org, clock, problems))
    pending, folders = _apply_workspace_policies(org, problems)
    problems += [
        f"Assignment {one} is RUNNING without an ACTIVE attempt." for one in fencing.orphans(org.db.connection)
    ]
    org.db.note_progress()
    back = tuple(one for one, state in swept if state is MessageState.NEW)
    dead = tuple(one for one, state in swept if state is MessageState.DEAD)
    return SupervisorReport(tuple(leases), back, ended, tuple(problems), tuple(pending[:PENDING_SHOWN]), folders, dead)


def recover_abandoned_assignments(org: Organization, clock: Clock | None = None) -> tuple[Receipt, ...]:
    """End every RUNNING assignment whose attempt has run out, and return the receipts this call wrote.

    What it has to leave alone, `tick` reports. (Unit 8, Property 4; Chapter 6)
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
    on_tick: Callable[[SupervisorReport], object] = bool,
) -> int:
    """Tick in the foreground every `interval` seconds until SIGINT or SIGTERM, or only `once`. Returns 0.

    A ledger that is busy or out of reach costs a tick, not the loop. Any other LedgerFault ends it: that is for a
    human. A signal ends the loop at once, even in the middle of a tick, which a later one continues; from then on
    the process ignores both signals.
    """
    if once:
        on_tick(tick(org))
        return 0
    presence = heartbeat.Presence(org.db, "supervisor", org.process_identity)
    with suppress(KeyboardInterrupt), first_signal_interrupts() as asked_to_stop:
        while not asked_to_stop():
            try:
                presence.beat()
                on_tick(tick(org))
            except Contention:
                pass
            except LedgerUnavailable as error:
                on_tick(SupervisorReport((), (), (), (f"{error} {error.why}",)))
            if not asked_to_stop():
                time.sleep(interval)
    presence.leave()
    return 0


def _unless_broken(step: Callable[[], list[T]], what: str, problems: list[str]) -> list[T]:
    """A step of the tick that a broken row may end, but not what comes after it."""
    try:
        return step()
    except (Contention, LedgerUnavailable):
        raise
    except SovereignError as error:
        problems.append(f"The {what} cannot be read: {error} {error.why}")
        return []


def _recover(org: Organization, clock: Clock | None, problems: list[str]) -> list[Receipt]:
    recovered: list[Receipt] = []
    passed_over: set[str] = set()
    while True:
        batch = fencing.expired_attempts(
            org.db.connection, org.db.now(clock), limit=RECOVERY_BATCH, skipping=frozenset(passed_over)
        )
        if not batch:
            return recovered
        won = _recover_batch(org, [(attempt, _evidence(org, attempt)) for attempt in batch], clock, problems)
        recovered += won
        passed_over |= {attempt.id for attempt in batch} - {receipt.attempt_id for receipt in won}


def _evidence(org: Organization, attempt: ExecutionAttempt) -> dict[str, Any]:
    """What may have become of a lost worker, as far as it can be seen from here. It changes no verdict."""
    try:
        evidence = liveness.look(attempt.process)
        stop_requested = runs.was_asked_to_stop(org.db.connection, attempt)
    except (Contention, LedgerUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - no want of evidence keeps a recovery waiting
        return {"cause": "unknown", "fault": type(error).__name__}
    cause = CAUSES.get(evidence.seen, "unknown")
    if evidence.seen is Sight.GONE:
        cause = "out_of_memory" if evidence.oom_kills else "killed_by_operator" if stop_requested else "unknown"
    seen = {"process": evidence.seen.value, "oom_kills": evidence.oom_kills, "stop_requested": stop_requested}
    return {"cause": cause, "host": attempt.host, **seen}


def _recover_batch(org: Organization, batch: Batch, clock: Clock | None, problems: list[str]) -> list[Receipt]:
    """One transaction for all; if that fails, one for each, so that a bad row stands alone."""
    try:
        return _recover_together(org, batch, clock)
    except (Contention, LedgerUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - a row that cannot be fails in ways that nobody listed
        if len(batch) == 1:
            ((attempt, _),) = batch
            problems.append(f"Attempt {attempt.id} of {attempt.assignment_id} cannot be recovered: {error}")
            return []
    return [receipt for each in batch for receipt in _recover_batch(org, [each], clock, problems)]


def _recover_together(org: Organization, batch: Batch, clock: Clock | None) -> list[Receipt]:
    won: list[Receipt] = []
    with org.db.immediate() as connection:
        for attempt, evidence in batch:
            now = fencing.lock_expired_attempt(connection, attempt.id, clock or org.db.clock)
            receipt = journal.lost_receipt(attempt, evidence)
            if now and fencing.end_attempt(connection, attempt, AttemptStatus.RECOVERED, receipt, now=now):
                runs.park(connection, attempt, org.settings.authority, now=now)
                won.append(replace(receipt, created_at=now))
    return won


def _apply_workspace_policies(org: Organization, problems: list[str]) -> tuple[list[str], int]:
    """Deal with every ended run's folder on this host, and count those; name those on other hosts.

    After a recovery, a cancellation, or a worker's death between its terminal write and its clean-up.
    """
    last, here, pending, folders = "", ("", socket.gethostname()), list[str](), 0
    while page := fencing.attempts_to_reclaim(org.db.connection, after=last, limit=RECOVERY_BATCH):
        pending += [attempt_id for attempt_id, _, host in page if host not in here]
        dealt_with = [
            attempt_id
            for attempt_id, policy, host in page
            if host in here and _deal_with_folder(org, attempt_id, policy, problems)
        ]
        with org.db.transaction() as connection:
            for attempt_id in dealt_with:
                fencing.close_workspace(connection, attempt_id)
        last, folders = page[-1][0], folders + len(dealt_with)
    return pending, folders


def _deal_with_folder(org: Organization, attempt_id: str, policy: str, problems: list[str]) -> bool:
    try:
        receipt = journal.receipt_of_attempt(org.db.connection, attempt_id)
        if receipt is None:
            problems.append(f"Attempt {attempt_id} has ended without a receipt.")
            return False
        reclaim = runs.apply_workspace_policy(org.root, attempt_id, policy, receipt)
    except (Contention, LedgerUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - as above; the other folders are dealt with all the same
        problems.append(f"The folder of attempt {attempt_id} cannot be dealt with: {error}")
        return False
    if reclaim.status == "partial":
        problems += [f"In the folder of attempt {attempt_id} is left: {what}" for what in reclaim.leftovers]
    return reclaim.is_done


@contextmanager
def first_signal_interrupts() -> Generator[Callable[[], bool]]:
    """Let the first SIGINT or SIGTERM raise KeyboardInterrupt, and any further one do nothing.

    Yields the answer to whether one came. Inside a finalizer nothing is raised, because it would be swallowed there,
    with a trace. Only the main thread may set handlers; elsewhere nothing is set.
    """
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        first = not came  # asked before anything else: a second signal may land inside this very function
        came.append(number)
        while frame and frame.f_code.co_name not in FINALIZERS:
            frame = frame.f_back
        if first and not frame:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield lambda: bool(came)
    finally:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Python complains of one that lands in between
        for number, handler in before.items():  # whoever asked twice must not be answered while we tidy up
            signal.signal(number, signal.SIG_IGN if came else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
