"""Runs: what a process holds while it runs assignments, and how each run ends.

The terminal write is the fence's own: whoever lost the attempt writes no receipt, no event and no file. What
is done on disk follows a durable receipt, never leads it, and changes nothing about the work: it can fail in
part, or not happen at all, and a supervisor's later tick finishes it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from sovereign_agent import fencing, journal, workspace
from sovereign_agent.clock import monotonic
from sovereign_agent.database import Connection, Database
from sovereign_agent.errors import AlreadyHeld, AuthorityLost, Contention, LedgerUnavailable, SovereignError
from sovereign_agent.providers.base import SUMMARY_LIMIT, Proposal
from sovereign_agent.records import (
    ActorLease,
    Assignment,
    AssignmentState,
    AttemptStatus,
    ExecutionAttempt,
    Receipt,
    ReceiptStatus,
    new_id,
)

ENDED_RUN_PATIENCE_SECONDS = 60.0
"""How long a finished run waits for a busy or unreachable ledger before it gives its result up for lost."""

PAUSE_SECONDS = 0.1

log = logging.getLogger(__name__)


class Host:
    """The actors that one process hosts. Runs of one actor share its lease; the last one gives it back."""

    def __init__(self, db: Database, process_identity: str, ttl: timedelta) -> None:
        self._db = db
        self._process_identity = process_identity
        self._ttl = ttl
        self._lock = threading.Lock()
        self._runs: Counter[int] = Counter()  # by the token of the lease that they stand on
        self._tidy: list[str] = []  # attempts whose folder is dealt with; noted when the lease is given back

    @contextmanager
    def hosting(self, actor_id: str) -> Generator[ActorLease]:
        """Hold an actor's lease. Raises AlreadyHeld (``actor_lease_held``)."""
        with self._lock:
            lease = self._take(actor_id)
            self._runs[lease.fencing_token] += 1
        try:
            yield lease
        finally:
            with self._lock:
                self._leave(lease)

    def _take(self, actor_id: str) -> ActorLease:
        held = fencing.current_actor_lease(self._db, actor_id)
        if held is None or not self._runs[held.fencing_token]:
            return fencing.acquire_or_renew_actor_lease(self._db, actor_id, self._process_identity, ttl=self._ttl)
        try:
            return fencing.renew_actor_lease(
                self._db, actor_id, self._process_identity, held.fencing_token, ttl=self._ttl
            )
        except AuthorityLost as error:  # a new token would undercut the runs that stand on the old one
            raise AlreadyHeld(
                f"Actor {actor_id} was not leased.",
                category="actor_lease_held",
                why="Earlier runs of this process still stand on a lease of it that has run out.",
                inspect="sovereign-agent actor list",
                next_command="repeat the command when they have ended",
            ) from error

    def _leave(self, lease: ActorLease) -> None:
        self._runs[lease.fencing_token] -= 1
        if self._runs[lease.fencing_token]:
            return
        del self._runs[lease.fencing_token]
        tidy, self._tidy = self._tidy, []
        try:
            with self._db.transaction() as connection:
                for attempt_id in tidy:
                    fencing.close_workspace(connection, attempt_id)
                fencing.release_lease(connection, lease.actor_id, self._process_identity, lease.fencing_token)
        except SovereignError as error:  # it runs out by itself; how the run ended is already settled
            log.warning("lease on %s was not released: %s", lease.actor_id, error)

    def end(self, root: Path, assignment: Assignment, attempt: ExecutionAttempt, receipt: Receipt) -> Receipt:
        """End one's own run: the terminal write, and only then what follows on disk. Raises as `finish` does.

        Interrupted while it waits for the ledger, it tries once more before it gives way: the work is done.
        """
        try:
            written = finish(self._db, attempt, receipt)
        except (KeyboardInterrupt, SystemExit):
            with suppress(SovereignError):
                finish(self._db, attempt, receipt, patience_seconds=0)
            raise
        try:
            if apply_workspace_policy(root, attempt.id, assignment.workspace_policy, written).status != "partial":
                self._tidy.append(attempt.id)
        except (SovereignError, OSError) as error:  # the result is durable: what is left is a later tick's
            log.warning("the folder of %s is left to the supervisor: %s", attempt.id, error)
        return written


def receipt_for(attempt: ExecutionAttempt, proposal: Proposal) -> Receipt:
    """What a proposal becomes if the fence still stands. Raises ValueError, TypeError for what no ledger can hold."""
    detail = dict(proposal.detail)
    detail["fencing_token"] = attempt.fencing_token
    detail["deliverables"] = [{"name": d.name, "size": d.size, "sha256": d.sha256} for d in proposal.deliverables]
    if proposal.report and proposal.report.proposal is not None:
        detail["proposal"] = proposal.report.proposal
    if proposal.report and proposal.report.question:
        detail["question"] = proposal.report.question
    return Receipt(
        id=new_id("rcp"),
        assignment_id=attempt.assignment_id,
        attempt_id=attempt.id,
        actor_id=attempt.actor_id,
        status=proposal.status,
        failure_category=proposal.failure_category,
        summary=_storable(proposal.summary),
        detail=json.loads(journal.to_json(detail)),
    )


def failure(attempt: ExecutionAttempt, category: str, summary: str) -> Receipt:
    """The receipt of a run that came to no proposal."""
    return receipt_for(attempt, Proposal(ReceiptStatus.FAILED, category, summary, None))


def finish(
    db: Database, attempt: ExecutionAttempt, receipt: Receipt, *, patience_seconds: float = ENDED_RUN_PATIENCE_SECONDS
) -> Receipt:
    """The terminal write of the process that ran the assignment; returns the receipt as it was written.

    Repeated while the ledger is busy or out of reach, because hours of work may hang on it. Raises AuthorityLost
    (``execution_attempt_lost``, ``actor_lease_lost``), and Contention or LedgerUnavailable at the end of patience.
    """
    deadline = monotonic() + patience_seconds
    while True:
        try:
            return _finish_once(db, attempt, receipt)
        except (Contention, LedgerUnavailable) as error:
            if monotonic() > deadline or error.category == "ledger_closed":
                raise
            time.sleep(PAUSE_SECONDS)


def _finish_once(db: Database, attempt: ExecutionAttempt, receipt: Receipt) -> Receipt:
    try:
        with db.immediate() as connection:
            now = db.now()
            fencing.finish_own_attempt(connection, attempt, receipt, now=now)
        return replace(receipt, created_at=now)
    except AuthorityLost:
        written = journal.receipt_of_attempt(db.connection, attempt.id)
        if written and written.id == receipt.id:  # only the answer to an earlier commit was lost
            return written
        raise


def revoke(connection: Connection, attempt: ExecutionAttempt, actor_id: str, *, now: datetime) -> bool:
    """Take a run from its process, asking it nothing: CANCELED, a receipt ``interrupted``, the actor freed.

    False, and nothing changed, when the attempt had already ended.
    """
    receipt = failure(attempt, "interrupted", f"Canceled by {actor_id} while it ran. What it finished is unknown.")
    if not fencing.end_attempt(
        connection, attempt, AttemptStatus.RECOVERED, receipt, becomes=AssignmentState.CANCELED, now=now
    ):
        return False
    fencing.release_lease(connection, attempt.actor_id, attempt.process_identity, attempt.actor_lease_fencing_token)
    return True


def free(connection: Connection, actor_id: str, authority_id: str, *, now: datetime) -> bool:
    """Take an actor's lease from whoever holds it. False, and nothing changed, while it carries a run."""
    held = fencing.lease_on(connection, actor_id)
    if not held or not fencing.release_lease(connection, actor_id, held.process_identity, held.fencing_token):
        return False
    detail = {"process_identity": held.process_identity, "fencing_token": held.fencing_token}
    journal.record(connection, "actor.freed", actor_id, actor=authority_id, at=now, detail=detail)
    return True


def apply_workspace_policy(root: Path, attempt_id: str, policy: str, receipt: Receipt) -> workspace.Reclaim:
    """Copy a durable receipt to disk and reclaim the run's folder. Changes nothing in the ledger.

    Only for an attempt that has ended there. ``partial`` leaves the rest to a later tick. Raises PolicyRefusal
    (``unknown_workspace_policy``, ``symlinked_workspace_root``) and touches nothing.
    """
    workspace.check_policy(policy)
    unwritten: tuple[str, ...] = ()
    try:
        workspace.write_receipt(root, attempt_id, journal.receipt_json(receipt))
    except FileNotFoundError:  # somebody else, who has written it, is tidying up here and swept our half-made copy
        return workspace.Reclaim("partial")
    except OSError as error:
        unwritten = (f"receipt.json: {error.strerror}",)
    reclaim = workspace.reclaim_workspace(root, attempt_id, policy)
    if unwritten or reclaim.status == "partial":
        return workspace.Reclaim("partial", unwritten + reclaim.leftovers)
    return reclaim


def _storable(text: str) -> str:
    """Text that any ledger can keep: without NUL, whole characters only, not without end."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:SUMMARY_LIMIT]
