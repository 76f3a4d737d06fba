"""Runs: what a process holds while it runs assignments, and how each run ends.

While a program works, a keeper renews what it stands on, and stops it when that is lost.

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
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from sovereign_agent import fencing, journal, outcomes, workspace
from sovereign_agent.clock import monotonic
from sovereign_agent.configuration import AuthoritySettings
from sovereign_agent.database import Connection, Database, admit
from sovereign_agent.errors import (
    AlreadyHeld,
    AuthorityLost,
    Contention,
    LedgerUnavailable,
    PolicyRefusal,
    SovereignError,
    actor_lease_lost,
    execution_attempt_lost,
    lease_unconfirmed,
)
from sovereign_agent.providers.base import SUMMARY_LIMIT, Proposal
from sovereign_agent.providers.process import Leash
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

T = TypeVar("T")

ENDED_RUN_PATIENCE_SECONDS = 60.0
"""How long a finished run waits for a busy or unreachable ledger before it gives its result up for lost."""

PAUSE_SECONDS = 0.1
LEASE_LOST = "lease_lost"
MARGIN = 0.1
"""The last part of an authority's time, in which its program must already be stopped."""

STEP_LIMIT = 200
STOP_REQUESTED = "assignment.stop_requested"

log = logging.getLogger(__name__)


class Keeper:
    """Keeps the authority of one run alive while its program works, from a thread and a session of its own.

    It renews attempt and lease together, and each confirmation lengthens the program's leash, counted from before it
    was asked for. A refusal, or none in time, or its own unexpected end, is the loss: the leash is cut.
    """

    def __init__(self, db: Database, attempt: ExecutionAttempt, authority: AuthoritySettings) -> None:
        self.attempt = attempt
        self.leash = Leash()
        self.lost: AuthorityLost | None = None
        self.trouble = ""
        self._db = db
        self._authority = authority
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"keeper of {attempt.id}", daemon=True)

    def start(self, asked_at: float, lasts: timedelta) -> Leash:
        """Begin to renew what was asked for at `asked_at` (monotonic); give the leash for the program."""
        self._confirmed(asked_at, lasts)
        self._thread.start()
        return self.leash

    def close(self) -> None:
        """Leave the authority to itself, and wait for the thread and its session to end."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep(self) -> None:
        try:
            while not self._over.wait(self._next_at - monotonic()):
                self._renew()
        except AuthorityLost as refusal:
            self._lose(refusal)
        except BaseException as error:  # noqa: BLE001 - whatever ends a keeper, its silence must not pass for authority
            self._lose(lease_unconfirmed(self.attempt.assignment_id, f"{type(error).__name__}: {error}."))
        finally:
            self._db.release()

    def _renew(self) -> None:
        asked_at = monotonic()
        try:
            lasts = fencing.renew_run(
                self._db,
                self.attempt,
                attempt_ttl=self._authority.attempt_ttl,
                lease_ttl=self._authority.lease_ttl,
                silent=timedelta(seconds=asked_at - self.leash.progress_at),
                step=_storable(self.leash.step, STEP_LIMIT),
                tolerance=timedelta(seconds=self.leash.tolerance_seconds),
            )
        except (Contention, LedgerUnavailable) as error:
            self.trouble = f"{error} {error.why}"
            if monotonic() >= self._until:
                raise lease_unconfirmed(self.attempt.assignment_id, self.trouble) from error
            self._next_at = monotonic() + PAUSE_SECONDS
        else:
            self._confirmed(asked_at, lasts)

    def _confirmed(self, asked_at: float, lasts: timedelta) -> None:
        margin = MARGIN * min(self._authority.actor_lease_seconds, self._authority.execution_attempt_seconds)
        self._until = asked_at + lasts.total_seconds() - margin
        self._next_at = asked_at + self._authority.renewal_seconds
        self.leash.extend(self._until - monotonic())

    def _lose(self, lost: AuthorityLost) -> None:
        self.lost = lost
        self.leash.cut(LEASE_LOST)


class Host:
    """The actors that one process hosts. Runs of one actor share its lease; the last one gives it back."""

    def __init__(self, db: Database, process_identity: str) -> None:
        self._db = db
        self._process_identity = process_identity
        self._lock = threading.Lock()
        self._runs: Counter[int] = Counter()  # by the token of the lease that they stand on
        self._tidy: list[str] = []  # attempts whose folder is dealt with; noted when the lease is given back

    @contextmanager
    def hosting(self, actor_id: str, ttl: timedelta) -> Generator[ActorLease]:
        """Hold an actor's lease. Raises AlreadyHeld (``actor_lease_held``)."""
        with self._lock:
            lease = self._take(actor_id, ttl)
            self._runs[lease.fencing_token] += 1
        try:
            yield lease
        finally:
            with self._lock:
                self._leave(lease)

    def _take(self, actor_id: str, ttl: timedelta) -> ActorLease:
        held = fencing.current_actor_lease(self._db, actor_id)
        if held is None or not self._runs[held.fencing_token]:
            return fencing.acquire_or_renew_actor_lease(self._db, actor_id, self._process_identity, ttl=ttl)
        try:
            return fencing.renew_actor_lease(self._db, actor_id, self._process_identity, held.fencing_token, ttl=ttl)
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

    def run(
        self,
        root: Path,
        assignment: Assignment,
        lease: ActorLease,
        propose: Callable[[ExecutionAttempt, Leash], Proposal],
        *,
        authority: AuthoritySettings,
        room: timedelta,
        process: Mapping[str, Any],
    ) -> Receipt:
        """Take the attempt, let `propose` run the program under it, and write down how that ended.

        No renewal reaches beyond the assignment's maximum and `room` to end the program in. `process` is the evidence
        that stays of this one. Raises as `fencing.acquire_execution_attempt` and `finish` do, and AuthorityLost
        (``lease_lost``) when no renewal was confirmed in time; an interruption is recorded, then raised.
        """
        asked_at, call = monotonic(), new_id("call")
        try:
            attempt = fencing.acquire_execution_attempt(
                self._db,
                assignment.id,
                assignment.actor_id,
                self._process_identity,
                lease.fencing_token,
                ttl=authority.attempt_ttl,
                maximum=timedelta(seconds=assignment.maximum_seconds) + room + authority.attempt_ttl,
                host=str(process["host"]),
                process={**process, "call": call},
            )
        except LedgerUnavailable:
            found = self._taken_by(call, assignment.id, until=asked_at + authority.attempt_ttl.total_seconds())
            if found is None:
                raise
            attempt = found
        lasts = min(attempt.expires_at, lease.expires_at) - attempt.acquired_at
        with closing(Keeper(self._db, attempt, authority)) as keeper:
            try:
                receipt = receipt_for(attempt, propose(attempt, keeper.start(asked_at, lasts)))
            except Exception as error:
                log.exception("run of %s failed inside this program", assignment.id)
                receipt = failure(attempt, "internal_error", f"{type(error).__name__}: {error}")
            except BaseException as error:
                why = f"The worker was interrupted ({type(error).__name__})."
                with suppress(SovereignError):  # lost or not: whoever interrupts must not be answered with a refusal
                    note_stop_request(self._db, attempt, why)
                with suppress(SovereignError):
                    self._end(root, assignment, keeper, failure(attempt, "interrupted", why))
                raise
            return self._end(root, assignment, keeper, receipt)

    def _taken_by(self, call: str, assignment_id: str, *, until: float) -> ExecutionAttempt | None:
        """The attempt that a call of ours took, though no answer came. Waits for the ledger, but not beyond `until`."""

        def look() -> ExecutionAttempt | None:
            with self._db.immediate() as connection:  # alone: a commit that is still under way is waited for
                return fencing.active_attempt(connection, assignment_id)

        held = patiently(look, until)
        return held if held and held.process.get("call") == call else None

    def _end(self, root: Path, assignment: Assignment, keeper: Keeper, receipt: Receipt) -> Receipt:
        """End one's own run: the terminal write, and only then what follows on disk. Raises as `finish` does.

        Interrupted while it waits for the ledger, it tries once more before it gives way: the work is done.
        """
        attempt = keeper.attempt
        if keeper.lost or receipt.failure_category == LEASE_LOST:
            raise keeper.lost or self._refusal(keeper, receipt.summary)
        try:
            written = finish(self._db, attempt, receipt)
        except (KeyboardInterrupt, SystemExit):
            with suppress(SovereignError):
                finish(self._db, attempt, receipt, patience_seconds=0)
            raise
        try:
            if apply_workspace_policy(root, attempt.id, assignment.workspace_policy, written).is_done:
                self._tidy.append(attempt.id)
        except (SovereignError, OSError) as error:  # the result is durable: what is left is a later tick's
            log.warning("the folder of %s is left to the supervisor: %s", attempt.id, error)
        return written

    def _refusal(self, keeper: Keeper, summary: str) -> AuthorityLost:
        """Why a run is over before its keeper had an answer: in the ledger's words, if any, else in its `summary`."""
        assignment_id, attempt_id = keeper.attempt.assignment_id, keeper.attempt.id
        with suppress(SovereignError):
            if not fencing.verify_execution_attempt(self._db, assignment_id, attempt_id):
                return execution_attempt_lost(assignment_id, attempt_id)
        return lease_unconfirmed(assignment_id, keeper.trouble or summary)


def receipt_for(attempt: ExecutionAttempt, proposal: Proposal) -> Receipt:
    """What a proposal becomes if the fence still stands. Raises ValueError, TypeError for what no ledger can hold."""
    detail = dict(proposal.detail)
    detail["fencing_token"] = attempt.fencing_token
    detail["deliverables"] = [{"name": d.name, "size": d.size, "sha256": d.sha256} for d in proposal.deliverables]
    if proposal.report and proposal.report.proposal is not None:
        detail["proposal"] = proposal.report.proposal
    if proposal.report and proposal.report.question:
        detail["question"] = proposal.report.question
    summary, kept = _storable(proposal.summary), json.loads(journal.to_json(detail))
    return journal.new_receipt(attempt, proposal.status, proposal.failure_category, summary, kept)


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
    return patiently(lambda: _finish_once(db, attempt, receipt), monotonic() + patience_seconds)


def patiently(act: Callable[[], T], until: float) -> T:
    """Repeat `act` while the ledger is busy or out of reach, but not beyond `until` (monotonic).

    Raises Contention, LedgerUnavailable then.
    """
    while True:
        try:
            return act()
        except (Contention, LedgerUnavailable) as error:
            if monotonic() > until or error.category == "ledger_closed":
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


def require_current(connection: Connection, assignment_id: str, attempt_id: str, actor_id: str) -> int:
    """The token of an attempt under which something may still be done, until the caller's transaction ends.

    Stricter than the terminal write: what has run out begins nothing new. Raises PolicyRefusal (``paused``) and
    AuthorityLost (``epoch_replaced``, ``execution_attempt_lost``, ``actor_lease_lost``).
    """
    admit(connection)
    fencing.lock_lease(connection, actor_id)
    attempt, lease = fencing.active_attempt(connection, assignment_id), fencing.lease_on(connection, actor_id)
    now = connection.now()
    if attempt is None or attempt.id != attempt_id or attempt.expires_at <= now:
        raise execution_attempt_lost(assignment_id, attempt_id)
    token = attempt.actor_lease_fencing_token
    if lease is None or lease.fencing_token != token or lease.expires_at <= now:
        raise actor_lease_lost(actor_id, token)
    return attempt.fencing_token


def losses_that_park(connection: Connection, sow_id: str, authority: AuthoritySettings) -> list[str]:
    """The receipts of a statement of work that has lost too many workers since its last ruling, else none."""
    lost = journal.losses_since_ruling(connection, sow_id)
    return lost if len(lost) >= authority.losses_before_parking else []


def park(connection: Connection, attempt: ExecutionAttempt, authority: AuthoritySettings, *, now: datetime) -> None:
    """After the loss of a worker: note that its statement of work waits for a ruling, if it has lost too many."""
    sow_id = outcomes.get_assignment(connection, attempt.assignment_id).sow_id
    if lost := losses_that_park(connection, sow_id, authority):
        detail = {"receipts": lost}
        journal.record(connection, "sow.parked", sow_id, actor="", at=now, detail=detail)


def require_unparked(connection: Connection, sow_id: str, authority: AuthoritySettings) -> None:
    """Refuse to give out work that kills its workers. Raises PolicyRefusal (``parked``)."""
    if lost := losses_that_park(connection, sow_id, authority):
        raise PolicyRefusal(
            f"{sow_id} was not assigned.",
            category="parked",
            why=f"Workers lost over it: {len(lost)} ({', '.join(lost[-3:])}). The next may be, too.",
            inspect=f"sovereign-agent inspect {sow_id}",
            next_command=f"sovereign-agent ruling decide {sow_id} --decision TEXT --by ACTOR",
        )


def require_unparked_takeover(
    connection: Connection, assignment: Assignment, authority: AuthoritySettings, *, now: datetime
) -> None:
    """Refuse to take a run over whose loss is the last that its work may cost. Raises PolicyRefusal (``parked``).

    It stays as it is, so that a supervisor ends it, and parks the work.
    """
    held = fencing.active_attempt(connection, assignment.id)
    losses = len(journal.losses_since_ruling(connection, assignment.sow_id)) + 1
    if held and held.expires_at <= now and losses >= authority.losses_before_parking:
        raise PolicyRefusal(
            f"{assignment.id} was not taken over.",
            category="parked",
            why=f"With attempt {held.id}, workers lost over {assignment.sow_id}: {losses}. Another would be, too.",
            inspect=f"sovereign-agent inspect {assignment.id}",
            next_command="sovereign-agent supervisor --once, which ends it and parks the work until a ruling",
        )


def note_stop_request(db: Database, attempt: ExecutionAttempt, why: str) -> None:
    """Leave a trace that somebody asked this worker to stop, should it be killed before it can end its run."""
    with db.immediate() as connection:
        current = fencing.active_attempt(connection, attempt.assignment_id)
        if current and current.id == attempt.id:
            detail = {"attempt_id": attempt.id, "why": why}
            subject, actor = attempt.assignment_id, attempt.actor_id
            journal.record(connection, STOP_REQUESTED, subject, actor=actor, at=db.now(), detail=detail)


def was_asked_to_stop(connection: Connection, attempt: ExecutionAttempt) -> bool:
    """Whether the worker of a lost attempt has left the trace of `note_stop_request`."""
    events = journal.events_of(connection, attempt.assignment_id)
    return any(event.kind == STOP_REQUESTED and event.detail["attempt_id"] == attempt.id for event in events)


def revoke(connection: Connection, assignment: Assignment, actor_id: str, *, now: datetime) -> None:
    """Take a run from its process, asking it nothing: CANCELED, a receipt ``interrupted``, the actor freed.

    Its next renewal is refused, and so its program is stopped. Raises IllegalMove when it does not run.
    """
    fencing.lock_lease(connection, assignment.actor_id)
    attempt = fencing.active_attempt(connection, assignment.id)
    to, why = AssignmentState.CANCELED, f"Canceled by {actor_id} while it ran. What it finished is unknown."
    if attempt is None or not fencing.end_attempt(
        connection,
        attempt,
        AttemptStatus.RECOVERED,
        failure(attempt, "interrupted", why),
        becomes=to,
        by=actor_id,
        now=now,
    ):
        raise outcomes.illegal_move(assignment, to)
    fencing.release_lease(connection, attempt.actor_id, attempt.process_identity, attempt.actor_lease_fencing_token)


def free(connection: Connection, actor_id: str, authority_id: str, *, now: datetime) -> bool:
    """Take an actor's lease from whoever holds it. False when nobody does.

    Raises AlreadyHeld (``actor_not_freed``) while it carries a run.
    """
    fencing.lock_lease(connection, actor_id)  # nobody begins a run under it from now on
    held = fencing.lease_on(connection, actor_id)
    if held is None:
        return False
    if running := fencing.run_under(connection, held.fencing_token):
        raise AlreadyHeld(
            f"{actor_id} was left as it is.",
            category="actor_not_freed",
            why=f"It carries a run of {running}, which has to be canceled first.",
            inspect=f"sovereign-agent inspect {running}",
            next_command=f"sovereign-agent cancel {running} --by ACTOR",
        )
    fencing.release_lease(connection, actor_id, held.process_identity, held.fencing_token)
    detail = {"process_identity": held.process_identity, "fencing_token": held.fencing_token}
    journal.record(connection, "actor.freed", actor_id, actor=authority_id, at=now, detail=detail)
    return True


def apply_workspace_policy(root: Path, attempt_id: str, policy: str, receipt: Receipt) -> workspace.Reclaim:
    """Copy a durable receipt to disk and reclaim the run's folder. Changes nothing in the ledger.

    Only for an attempt that has ended there. ``partial`` and ``busy`` leave the rest to a later tick. Raises
    PolicyRefusal (``unknown_workspace_policy``, ``symlinked_workspace_root``) and touches nothing.
    """
    workspace.check_policy(policy)
    unwritten: tuple[str, ...] = ()
    try:
        workspace.write_receipt(root, attempt_id, journal.receipt_json(receipt))
    except FileNotFoundError:  # somebody else, who has written it, is tidying up here and swept our half-made copy
        return workspace.Reclaim("busy")
    except OSError as error:
        unwritten = (f"receipt.json: {error.strerror}",)
    reclaim = workspace.reclaim_workspace(root, attempt_id, policy)
    if unwritten or reclaim.status == "partial":
        return workspace.Reclaim("partial", unwritten + reclaim.leftovers)
    return reclaim


def _storable(text: str, limit: int = SUMMARY_LIMIT) -> str:
    """Text that any ledger can keep: without NUL, whole characters only, not without end."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:limit]
