"""Scenarios: the protocols of a ledger, each played by the few actors who can get into each other's way.

An actor does what its kind does, with the functions that its kind calls, and keeps every answer. The answers are
judged by a model of authority (`answers`), and against the rows: whoever was told that it has done something is right
about it, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta

from sovereign_agent import assistant_service, assistant_work, fencing, relay, runs, supervisor
from sovereign_agent.clock import ManualClock, moment
from sovereign_agent.database import Connection, Database
from sovereign_agent.errors import IllegalMove, LedgerFault
from sovereign_agent.journal import lost_receipt
from sovereign_agent.organization import Organization
from sovereign_agent.records import (
    ActorLease,
    AttemptStatus,
    ExecutionAttempt,
    Message,
    Receipt,
    ReceiptStatus,
    Role,
    new_id,
)
from sovereign_agent.testing.answers import Fact, contradictions, unknown_to
from sovereign_agent.testing.schedules import Player, Scenario

TTL = timedelta(minutes=5)
"""How long each authority lasts here, and how far the clock jumps: a jump ends at the very end of what was granted."""

OWNER = "worker"
OPERATOR, MASTER, PRINCIPAL = "operator-course", "master-course", "principal-human"


# --- the actor's lease --------------------------------------------------------------------------------------


def nothing(_org: Organization, _clock: ManualClock) -> None:
    """An empty ledger."""


def lease(me: Player) -> ActorLease | None:
    """Take the operator's lease, or hold on to it."""
    got = me.ask(fencing.acquire_or_renew_actor_lease, me.db, OPERATOR, f"proc_{me.name}", ttl=TTL)
    if got:
        me.tell("granted", OPERATOR, got.fencing_token, until=got.expires_at)
    return got


def renew_lease(me: Player, held: ActorLease) -> None:
    """Hold on to a lease."""
    kept = me.ask(fencing.renew_actor_lease, me.db, OPERATOR, held.process_identity, held.fencing_token, ttl=TTL)
    if kept:
        me.tell("kept", OPERATOR, kept.fencing_token, until=kept.expires_at)


def release_lease(me: Player, held: ActorLease) -> None:
    """Give a lease back."""
    if me.ask(fencing.release_actor_lease, me.db, OPERATOR, held.process_identity, held.fencing_token):
        me.tell("released", OPERATOR, held.fencing_token)


def host(me: Player) -> None:
    """Host the operator for a while."""
    if held := lease(me):
        renew_lease(me, held)
        release_lease(me, held)


def guest(me: Player) -> None:
    """Host the operator, and never give it back."""
    if held := lease(me):
        renew_lease(me, held)


def judge_lease(db: Database, facts: Sequence[Fact]) -> Iterator[str]:
    """The lease is nobody's who gave it back, and is no older than the last one that was granted."""
    yield from contradictions(facts)
    granted = [fact for fact in facts if fact.what == "granted"]
    held = fencing.current_actor_lease(db, OPERATOR)
    if held and granted and held.fencing_token < granted[-1].token:
        yield f"The lease has token {held.fencing_token}, though {granted[-1].token} was granted."
    if held and any(fact.what == "released" and fact.token == held.fencing_token for fact in facts):
        yield f"The lease under {held.fencing_token} was given back, and is still there."


# --- runs ---------------------------------------------------------------------------------------------------


def assigned(org: Organization, _clock: ManualClock) -> str:
    """An assignment for the operator that nobody has begun."""
    outcome = org.create_outcome("It is done", "All of it is done.", [], PRINCIPAL)
    org.activate(outcome.id, PRINCIPAL)
    sow = org.create_sow(outcome.id, "Do it.", Role.OPERATOR, MASTER, ready=True)
    return org.assign(sow.id, OPERATOR, MASTER).id


def running(org: Organization, clock: ManualClock) -> ExecutionAttempt:
    """An assignment that a worker runs, since this very moment."""
    assignment_id = assigned(org, clock)
    return _attempt(org.db, assignment_id, fencing.acquire_actor_lease(org.db, OPERATOR, "proc_worker", ttl=TTL))


def abandoned(org: Organization, clock: ManualClock) -> ExecutionAttempt:
    """The same, and it has run out at this very moment."""
    attempt = running(org, clock)
    clock.advance(TTL)
    return attempt


def _attempt(db: Database, assignment_id: str, held: ActorLease) -> ExecutionAttempt:
    process, token = held.process_identity, held.fencing_token
    return fencing.acquire_execution_attempt(db, assignment_id, OPERATOR, process, token, ttl=TTL)


def _granted(me: Player, attempt: ExecutionAttempt) -> None:
    me.tell("granted", attempt.assignment_id, attempt.fencing_token, until=attempt.expires_at)


def begin(me: Player) -> None:
    """Take the lease and the attempt, and finish."""
    attempted = me.given.assignment_id if isinstance(me.given, ExecutionAttempt) else me.given
    if (held := lease(me)) and (attempt := me.ask(_attempt, me.db, attempted, held)):
        me.tell("wrote", OPERATOR, held.fencing_token)
        _granted(me, attempt)
        complete(me, attempt)


def go_on(me: Player) -> None:
    """Renew a run, and finish it whatever the renewal said: whoever was frozen does not know of it."""
    attempt: ExecutionAttempt = me.given
    _granted(me, attempt)
    lasts = me.ask(
        fencing.renew_run,
        me.db,
        attempt,
        attempt_ttl=TTL,
        lease_ttl=TTL,
        silent=timedelta(),
        step="",
        tolerance=timedelta(),
    )
    if lasts:
        me.tell("kept", attempt.assignment_id, attempt.fencing_token, until=me.clock() + lasts)
    complete(me, attempt)


def come_late(me: Player) -> None:
    """Finish a run that was frozen for long."""
    _granted(me, me.given)
    complete(me, me.given)


def complete(me: Player, attempt: ExecutionAttempt) -> None:
    """The terminal write of a run."""
    receipt = Receipt(
        new_id("rcp"), attempt.assignment_id, attempt.id, OPERATOR, ReceiptStatus.COMPLETED, "", "It is done."
    )
    if me.ask(runs.finish, me.db, attempt, receipt, patience_seconds=0):
        me.tell("settled", attempt.assignment_id, attempt.fencing_token, detail=receipt.id)


def recover(me: Player) -> None:
    """Look for what has run out, and end it."""
    for attempt in fencing.expired_execution_attempts(me.db):
        receipt = lost_receipt(attempt)
        with me.db.immediate() as connection:
            now = fencing.lock_expired_attempt(connection, attempt.id, me.clock)
            ended = now and fencing.end_attempt(connection, attempt, AttemptStatus.RECOVERED, receipt, now=now)
        if ended:
            me.tell("ended", attempt.assignment_id, attempt.fencing_token, detail=receipt.id)


def tick(me: Player) -> None:
    """A whole tick of a supervisor."""
    report = supervisor.tick(me.org)
    for assignment_id in report.recovered_assignments:
        me.tell("reported", assignment_id)
    for problem in report.problems:
        me.tell("problem", detail=problem)


def cancel(me: Player) -> None:
    """Call the assignment off, whether it runs or not."""
    for key in (me.given, OPERATOR):
        me.tell("asked", key)
    if me.ask(me.org.cancel, me.given, MASTER):
        me.tell("revoked", me.given)
        me.tell("revoked", OPERATOR)


def judge_runs(db: Database, facts: Sequence[Fact]) -> Iterator[str]:
    """Each end that somebody was told of has its receipt, under the attempt that was his."""
    receipt = """
        SELECT 1 FROM receipts r JOIN execution_attempts e ON e.id = r.attempt_id
         WHERE e.assignment_id = ? AND e.fencing_token = ? AND r.id = ? AND e.status =
        """
    yield from contradictions(facts)
    yield from unknown_to(db.connection, facts, "settled", f"{receipt} 'DONE'")
    yield from unknown_to(db.connection, [fact for fact in facts if fact.detail], "ended", f"{receipt} 'RECOVERED'")
    yield from (f"A tick could not do its work: {fact.detail}" for fact in facts if fact.what == "problem")


# --- the mailbox --------------------------------------------------------------------------------------------


def sent(org: Organization, _clock: ManualClock) -> str:
    """A message that nobody has claimed yet."""
    return org.send(MASTER, OPERATOR, "Work for you", "").id


def almost_dead(org: Organization, clock: ManualClock) -> str:
    """A message whose next delivery is its last."""
    message_id = sent(org, clock)
    for _ in range(relay.MAX_DELIVERIES - 1):
        relay.claim(org.db, message_id, OPERATOR, ttl=TTL)
        clock.advance(TTL)
        relay.sweep_expired_claims(org.db)
        clock.advance(TTL)
    return message_id


def claim_message(me: Player) -> Message | None:
    """Claim the message; within its own claim an actor gets the same one again."""
    message = me.ask(relay.claim, me.db, me.given, OPERATOR, ttl=TTL)
    if message:
        token = message.fencing_token or 0
        known = me.knows("granted", message.id, token)
        me.tell("kept" if known else "granted", message.id, token, until=message.claim_expires_at)
    return message


def read_message(me: Player) -> None:
    """Claim the message and complete it."""
    if message := claim_message(me):
        complete_message(me, message)


def complete_message(me: Player, message: Message) -> None:
    """Complete a message under the token that was granted."""
    token = message.fencing_token or 0
    if done := me.ask(relay.complete, me.db, message.id, OPERATOR, fencing_token=token):
        me.tell("settled", message.id, token, detail=done.state)


def drop_message(me: Player) -> None:
    """Claim the message and give it up for dead."""
    message = claim_message(me)
    if message and (dead := me.ask(relay.dead_letter, me.db, message)):
        me.tell("settled", message.id, message.fencing_token or 0, detail=dead.state)


def sweep(me: Player) -> None:
    """Put claims back that have run out."""
    for message_id in me.ask(relay.sweep_expired_claims, me.db) or ():
        me.tell("ended", message_id)


def judge_mail(db: Database, facts: Sequence[Fact]) -> Iterator[str]:
    """Whoever was told that a message is settled finds it so, under his own token."""
    yield from contradictions(facts)
    settled = "SELECT 1 FROM messages WHERE id = ? AND fencing_token = ? AND state = ?"
    yield from unknown_to(db.connection, facts, "settled", settled)
    limit = relay.MAX_DELIVERIES
    over = db.connection.execute("SELECT id, deliveries FROM messages WHERE deliveries > ?", (limit,))
    yield from (f"Message {row[0]} was delivered {row[1]} times, of {limit} at most." for row in over)


# --- the assistant's work -----------------------------------------------------------------------------------


def queued(org: Organization, _clock: ManualClock) -> str:
    """An item that nobody has claimed yet."""
    return assistant_work.enqueue(org.db, "origin", "session", "Do it.")


def claim_work(me: Player) -> assistant_work.Claim | None:
    """Claim the next item, in a name that every worker uses: after a restart it is the same one."""
    claim = me.ask(assistant_work.claim, me.db, OWNER, ttl=TTL.total_seconds())
    if claim:
        me.tell("granted", claim.id, claim.generation, until=me.clock() + TTL)
    return claim


def observe(me: Player, claim: assistant_work.Claim) -> None:
    """Write a line into the transcript."""
    seq = me.ask(assistant_work.observe, me.db, claim, {"role": "assistant", "content": me.name})
    if seq:
        me.tell("wrote", claim.id, claim.generation, detail=str(seq))


def finish_work(me: Player, claim: assistant_work.Claim) -> None:
    """End the item."""

    def done() -> bool:
        assistant_work.finish(me.db, claim, "DONE", me.name)
        return True

    if me.ask(done):
        me.tell("settled", claim.id, claim.generation, detail="DONE")


def answer(me: Player) -> None:
    """Claim the item, write, finish it."""
    if claim := claim_work(me):
        observe(me, claim)
        finish_work(me, claim)


def ponder(me: Player) -> None:
    """Claim the item, hold on to it, and write."""
    if claim := claim_work(me):
        until = me.ask(assistant_work.renew, me.db, claim, TTL.total_seconds())
        if until:
            me.tell("kept", claim.id, claim.generation, until=moment(round(until * 1_000_000)))
        observe(me, claim)


def call_off(me: Player) -> None:
    """Cancel the item."""

    def canceled() -> bool:
        assistant_work.cancel(me.db, me.given)
        return True

    if me.ask(canceled):
        me.tell("revoked", me.given)


def judge_work(db: Database, facts: Sequence[Fact]) -> Iterator[str]:
    """Whoever was told that it wrote or finished has done it, and nobody writes behind a later generation."""
    yield from contradictions(facts)
    yield from _judge_transcripts(db.connection)
    yield from unknown_to(db.connection, facts, "wrote", WRITTEN)
    finished = "SELECT 1 FROM assistant_work WHERE id = ? AND generation = ? AND status = ?"
    yield from unknown_to(db.connection, facts, "settled", finished)


WRITTEN = "SELECT 1 FROM assistant_transcript WHERE work_id = ? AND generation = ? AND seq = CAST(? AS INTEGER)"


def _judge_transcripts(connection: Connection) -> Iterator[str]:
    late = connection.execute(
        """
        SELECT late.seq FROM assistant_transcript late JOIN assistant_transcript earlier
            ON earlier.work_id = late.work_id AND earlier.seq < late.seq AND earlier.generation > late.generation
        """
    )
    yield from (f"Line {row[0]} of the transcript was written under a claim that was over." for row in late)
    stray = connection.execute(
        """
        SELECT w.id FROM assistant_work w JOIN assistant_control c ON c.id = 1
         WHERE w.status = 'RUNNING' AND w.epoch <> c.epoch
        """
    )
    yield from (f"Item {row[0]} is claimed in an epoch that is over." for row in stray)


# --- a new epoch --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holdings:
    """What is held when an epoch ends, each by one who goes on as if nothing had happened."""

    attempt: ExecutionAttempt
    message: Message
    claim: assistant_work.Claim


def everything_held(org: Organization, clock: ManualClock) -> Holdings:
    """A run, a message and an item, all held since this very moment."""
    message_id, _ = sent(org, clock), queued(org, clock)
    message = relay.claim(org.db, message_id, OPERATOR, ttl=TTL)
    claim = assistant_work.claim(org.db, OWNER, ttl=TTL.total_seconds(), now=clock().timestamp())
    assert claim
    return Holdings(running(org, clock), message, claim)


def replace_epoch(me: Player) -> None:
    """Begin a new epoch, and let work begin again."""
    if me.ask(assistant_service.new_epoch, me.db, OPERATOR, "a test"):
        held: Holdings = me.given
        for key in (held.attempt.assignment_id, held.message.id, held.claim.id):
            me.tell("revoked", key)
        resume(me)


def resume(me: Player) -> None:
    """Let work begin again."""
    with suppress(LedgerFault):  # half-way through somebody's new epoch nobody may
        me.ask(assistant_service.resume, me.db, OPERATOR, "a test")


def settle(me: Player) -> None:
    """Complete the message, then the run."""
    held: Holdings = me.given
    me.tell("granted", held.message.id, held.message.fencing_token or 0, until=held.message.claim_expires_at)
    _granted(me, held.attempt)
    complete_message(me, held.message)
    complete(me, held.attempt)


def watch(me: Player) -> None:
    """Write, finish, and claim what there is then: as if there were no epochs."""
    claim: assistant_work.Claim = me.given.claim if isinstance(me.given, Holdings) else me.given
    me.tell("granted", claim.id, claim.generation, until=me.clock() + TTL)
    observe(me, claim)
    if isinstance(me.given, Holdings):
        finish_work(me, claim)
    claim_work(me)


def judge_epoch(db: Database, facts: Sequence[Fact]) -> Iterator[str]:
    """As each of the three is judged."""
    yield from contradictions(facts)
    yield from _judge_transcripts(db.connection)
    yield from unknown_to(db.connection, facts, "wrote", WRITTEN)


# --- a restore ----------------------------------------------------------------------------------------------

BACKUP = "backup.db"


def backed_up(org: Organization, clock: ManualClock) -> assistant_work.Claim:
    """A backup of a ledger with an item that was claimed only afterwards."""
    queued(org, clock)
    assistant_service.backup(org.db, org.db.path.with_name(BACKUP))
    claim = assistant_work.claim(org.db, OWNER, ttl=TTL.total_seconds(), now=clock().timestamp())
    assert claim
    return claim


def restore(me: Player) -> None:
    """Restore the backup, and let work begin again."""
    if me.ask(assistant_service.restore, me.db, me.db.path.with_name(BACKUP)):
        me.tell("restored")
        resume(me)


def judge_restore(db: Database, facts: Sequence[Fact]) -> Iterator[str]:
    """What was written before stands in the ledger, or in the copy of what the restore has replaced.

    A restore that was killed half-way is finished first: it must always be possible.
    """
    with suppress(IllegalMove):
        assistant_service.finish_restore(db)
    yield from contradictions(facts)
    yield from _judge_transcripts(db.connection)
    lost = list(unknown_to(db.connection, facts, "wrote", WRITTEN))
    if lost and (copies := [*db.path.parent.glob("*.before")]):
        with closing(Database(copies[0], read_only=True)) as copy:
            lost = list(unknown_to(copy.connection, facts, "wrote", WRITTEN))
    yield from lost


SCENARIOS = (
    Scenario(
        "lease",
        "two processes and a third want to host one actor: acquire, renew, release, take over",
        TTL,
        nothing,
        {"host": host, "rival": guest, "third": guest},
        judge_lease,
        faults=1,
    ),
    Scenario(
        "start",
        "two processes begin the same assignment, and somebody cancels it",
        TTL,
        assigned,
        {"worker": begin, "rival": begin, "canceler": cancel},
        judge_runs,
        faults=1,
    ),
    Scenario(
        "recovery",
        "a worker goes on over time, and two supervisors find it",
        TTL,
        running,
        {"worker": go_on, "supervisor": recover, "second": recover},
        judge_runs,
    ),
    Scenario(
        "takeover",
        "a worker goes on over time, another process takes over, and a supervisor looks",
        TTL,
        running,
        {"worker": go_on, "successor": begin, "supervisor": recover},
        judge_runs,
        faults=1,
    ),
    Scenario(
        "tick",
        "whole ticks of a supervisor around a worker whose run has run out",
        TTL,
        abandoned,
        {"worker": come_late, "supervisor": tick},
        judge_runs,
        faults=1,
    ),
    Scenario(
        "mailbox",
        "one reader completes a message, another gives it up, and two sweep",
        TTL,
        sent,
        {"reader": read_message, "dropper": drop_message, "sweeper": sweep, "second": sweep},
        judge_mail,
        faults=1,
    ),
    Scenario(
        "last delivery",
        "the same with a message that may be delivered only once more",
        TTL,
        almost_dead,
        {"reader": read_message, "dropper": drop_message, "sweeper": sweep},
        judge_mail,
        faults=1,
    ),
    Scenario(
        "assistant",
        "two workers claim, write to, hold and finish one item, and somebody cancels it",
        TTL,
        queued,
        {"worker": answer, "rival": ponder, "canceler": call_off},
        judge_work,
        faults=1,
    ),
    Scenario(
        "epoch over runs",
        "a new epoch begins under a worker that has a message and a run",
        TTL,
        everything_held,
        {"operator": replace_epoch, "worker": settle},
        judge_epoch,
        beside=frozenset({"operator"}),
    ),
    Scenario(
        "epoch over work",
        "a new epoch begins under a worker that writes to an item",
        TTL,
        everything_held,
        {"operator": replace_epoch, "observer": watch},
        judge_epoch,
        beside=frozenset({"operator"}),
    ),
    Scenario(
        "restore",
        "a ledger goes back to its backup under a worker that writes",
        TTL,
        backed_up,
        {"restorer": restore, "observer": watch},
        judge_restore,
        faults=1,
        beside=frozenset({"restorer"}),
    ),
)
