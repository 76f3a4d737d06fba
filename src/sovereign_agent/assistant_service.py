"""The assistant's service, and the operator's acts on a whole ledger: back up, restore, pause, resume, new epoch.

`serve` claims what is queued and has it worked through, one item at a time, until it is asked to stop. It decides
nothing and may be killed at any line: whatever it was at is claimed anew, and gone on with from the transcript.

A restore begins a new era of authority. Whoever held a lease, an attempt, a message or a work item before it may run
on and read on, but holds nothing: its row is gone or is nobody's, its token is behind the counter, its epoch is not
the ledger's. Nothing resumes by itself: a restored ledger is paused until a person says otherwise.

    verified staging image, with the new epoch and every revocation in it      the ledger is not touched
      -> what left the house goes into the image, too     (commit)             nobody else writes the ledger now
      -> pause, and the restore's id on the control row   (commit)             from here on nothing can be opened
      -> new marker                                       (rename)
      -> write lock -> safety copy -> the image's content (commit)
      -> the control row closed                           (commit)             the ledger is open again, and paused

A death between two of these is found at the next open. `finish_restore` goes on from wherever it stood;
`roll_back_restore` brings back what was there. Both may die, and be repeated.

On PostgreSQL its own tools make and restore backups, and `new_epoch` does the rest.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import FrameType

from sovereign_agent import assistant_work, conversation, effects, fencing, heartbeat, journal, relay
from sovereign_agent.agent_loop import Limits, Model
from sovereign_agent.assistant_work import Claim
from sovereign_agent.clock import LAST_MICROS, micros, moment
from sovereign_agent.database import Connection, Control, Database, authority, sqlite_backup
from sovereign_agent.errors import (
    AlreadyHeld,
    AuthorityLost,
    Contention,
    IllegalMove,
    LedgerUnavailable,
    PolicyRefusal,
    Refusal,
    SchemaMismatch,
    SovereignError,
)
from sovereign_agent.records import new_id
from sovereign_agent.tool_dispatch import ExecutableTool

OPERATOR = "operator"
POLL_SECONDS = 0.1
MOST_PAUSE_SECONDS = 2.0
"""How long a service waits, at most, before it asks a ledger again that refused it or was out of reach."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

log = logging.getLogger(__name__)
MAX_HELD = 1_000
"""How far `health` counts what is held, of each kind."""


@dataclass(frozen=True, slots=True)
class Health:
    """What an operator asks first. `marker` is the epoch that it names, or the category of what is wrong with it.

    What is held is counted up to `MAX_HELD` of each kind, open work up to `assistant_work.MAX_COUNTED`.
    """

    epoch: str
    marker: str
    paused: bool
    restoring: str
    held: dict[str, int]
    work: dict[str, int]
    services: list[heartbeat.Service]

    @property
    def agrees(self) -> bool:
        """Whether ledger and marker are of one epoch, and no restore stands between its steps."""
        return self.epoch == self.marker and not self.restoring


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore, or its rollback, left: the ledger is in `epoch`, and paused. `safety_copy` is what it held."""

    restore_id: str
    epoch: str
    safety_copy: Path | None


def health(db: Database) -> Health:
    """The epoch on both sides, whether it is paused or restoring, what is held and open, and which services run."""
    now = authority.control(db.connection)
    held = {
        "leases": len(fencing.expired_actor_leases(db, end_of_time, limit=MAX_HELD)),  # by then every one has run out
        "attempts": len(fencing.expired_execution_attempts(db, end_of_time, limit=MAX_HELD)),
        "claims": len(relay.current_claims(db.connection, limit=MAX_HELD)),
    }
    work, services = assistant_work.count_open(db.connection), heartbeat.services(db.connection)
    return Health(now.epoch, marker_state(db), now.paused, now.restoring, held, work, services)


def end_of_time() -> datetime:
    """The last moment of the calendar."""
    return moment(LAST_MICROS)


def marker_state(db: Database) -> str:
    """The epoch that this host's marker names, or the category of what is wrong with it."""
    try:
        marked = authority.read_marker(db.authority)
        if db.marker_elsewhere:
            authority.require_progress(db.connection)
    except (AuthorityLost, LedgerUnavailable) as error:
        return error.category
    return marked


# --- serving ----------------------------------------------------------------------------------------------


def serve(
    db: Database,
    model: Model,
    tools: Callable[[Claim], Iterable[ExecutableTool]],
    *,
    owner: str,
    role: str = assistant_work.SHOP,
    limits: Limits = conversation.LIMITS,
    ttl: float = assistant_work.TTL_SECONDS,
    system: str = "",
    watch: conversation.Watch | None = None,
    until: Callable[[], object] = bool,
    tell: Callable[[str], object] = log.info,
) -> None:
    """Work on what is queued for a role, one item at a time, until it is asked to stop, or `until` answers so.

    The first SIGINT or SIGTERM stops it when the reply that its model is at has come: the item is given back, or
    finished if that was its last reply. The second one ends the process at once. A ledger that is busy, out of reach,
    paused or of another epoch is waited for; what the service was at is given back or runs out, and is claimed anew.

    Args:
        db: the ledger.
        model: is asked; what it waits by should be ``watch.sleep``.
        tools: gives the tools for a claim. Those that write are let through by the claim.
        owner: the name that claims are made under.
        role: whose items it takes.
        limits: the most that one life of an item may use.
        ttl: how long a claim lasts that is not renewed any more: a killed service's item waits for so long. In seconds.
        system: what the model is told first.
        watch: how whoever called stops the service, and how a model notices that.
        until: asked before each claim and at each turn.
        tell: is handed a line for each item and for each kind of trouble.

    Raises LedgerFault, and ConfigurationFault from a model: those are for a human.
    """
    watch = watch or conversation.Watch()
    presence = heartbeat.Presence(db, "assistant", fencing.new_process_identity())
    held: list[Claim] = []

    def give_back() -> None:
        while held:
            try:
                assistant_work.release(db, held[0])
            except AuthorityLost as lost:
                if lost.category == "paused":  # it is still held, and is given back when the pause is over
                    raise
            held.pop()

    def work_on(claim: Claim) -> None:
        held.append(claim)
        presence.beat(claimed=claim.id)
        given = chain.from_iterable(map(tools, [claim]))  # asked for where its failure is the item's
        with conversation.kept(db, claim, ttl, watch, beat=presence.beat, seconds=limits.seconds):
            ended = conversation.converse(
                db, claim, model, given, limits=limits, system=system, watch=watch, stop=until
            )
        held.pop()
        presence.beat(claimed="")
        tell(f"{claim.id}, generation {claim.generation}: {ended}")

    def look() -> bool:
        """Work on one item, if there is one."""
        give_back()
        presence.beat()
        found = assistant_work.is_waiting(db.connection, role)
        claim = assistant_work.claim(db, owner, ttl=ttl, role=role) if found else None
        if claim:
            work_on(claim)
        return claim is not None

    with _stopping_on_signals(watch):
        try:
            _repeat(look, watch, until, tell)
            with suppress(SovereignError):
                give_back()
        finally:  # whatever else ends a service is a worker lost: what it was at is parked when it ends too many
            presence.leave()


def _repeat(
    look: Callable[[], bool], watch: conversation.Watch, until: Callable[[], object], tell: Callable[[str], object]
) -> None:
    """Look again and again until it is over: at once after work, soon after none, and later and later in trouble."""
    trouble, pause = "", POLL_SECONDS
    while not watch.stopping:
        try:
            if until():
                return
            pause = 0 if look() else POLL_SECONDS
            trouble = ""
        except (Contention, LedgerUnavailable, AuthorityLost, PolicyRefusal) as error:
            if error.category != trouble:
                tell(f"waiting: {error} {error.why}".strip())
            trouble, pause = error.category, min(max(2 * pause, POLL_SECONDS), MOST_PAUSE_SECONDS)
        watch.sleep(pause)


@contextmanager
def _stopping_on_signals(watch: conversation.Watch) -> Generator[None]:
    """Let the first SIGINT or SIGTERM ask for the end, and the second one bring it. Only the main thread can."""

    def ask(_number: int, _frame: FrameType | None) -> None:
        watch.stopping = True
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, ask) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# --- pause and resume -------------------------------------------------------------------------------------


def pause(db: Database, actor: str, reason: str) -> None:
    """Let nothing new begin: no lease, run or claim. What runs may end, and a supervisor's tick recovers."""
    _change(db, "authority.paused", actor, reason, paused=True)


def resume(db: Database, actor: str, reason: str) -> None:
    """Let work begin again.

    Raises LedgerUnavailable (``restore_unfinished``, ``epoch_replaced`` or the marker's category) while ledger and
    marker do not agree.
    """
    _change(db, "authority.resumed", actor, reason, paused=False)


def _change(db: Database, kind: str, actor: str, reason: str, *, paused: bool) -> None:
    _require_reason(actor, reason)
    with db.immediate() as connection:
        db.require_authority()
        seen = authority.control(connection)
        if not authority.change_control(connection, seen, paused=paused):
            raise _overtaken()
        _record(db, kind, seen, actor, {"reason": reason})


# --- a new epoch ------------------------------------------------------------------------------------------


def new_epoch(db: Database, actor: str, reason: str) -> str:
    """Take all authority from everybody, begin an epoch, write this host's marker; the ledger is then paused.

    For a ledger that came back in another way than by `restore`: by PostgreSQL's tools, with its whole disk, by hand.
    An unfinished restore ends with it, and what the ledger holds now is what stays.
    """
    _require_reason(actor, reason)
    epoch = authority.new_epoch()
    with db.immediate() as connection:
        before = authority.find_control(connection)
        _begin_epoch(connection, epoch, db.now(), above=0)
        detail = {"reason": reason, "before": before.epoch if before else "", "epoch": epoch}
        _record(db, "authority.new_epoch", authority.control(connection), actor, detail)
        # Under the lock: of two at once, the one that commits last has the marker too. Should this commit fail,
        # ledger and marker disagree, and nobody is admitted.
        authority.write_marker(db.authority, epoch)
    return epoch


def adopt(db: Database) -> tuple[str, str]:
    """Write this host's marker from the ledger's epoch, after another host began it; return both, the old one first.

    Raises Refusal (``adopt_needs_hosts``) on SQLite, where there is no other host and the ledger alone proves nothing.
    """
    if db.engine == "sqlite":
        raise Refusal(
            "The ledger's epoch was not adopted.",
            category="adopt_needs_hosts",
            why="A SQLite ledger has one host. Its marker went its own way, so nobody vouches for the ledger's epoch.",
            next_command=authority.NEW_EPOCH,
        )
    with db.immediate() as connection:
        before, epoch = marker_state(db), authority.control(connection).epoch
        authority.write_marker(db.authority, epoch)
    return before, epoch


def _begin_epoch(
    connection: Connection, epoch: str, now: datetime, *, above: int, restoring: str = "", ledger_id: str = ""
) -> None:
    """Revoke every live authority in this ledger and let it be in `epoch`, paused."""
    # The counter and the control row first: whoever was admitted has committed by now, and is seen and revoked.
    fencing.advance_tokens(connection, above=max(above, micros(now)))
    authority.begin_epoch(connection, epoch, paused=True, restoring=restoring, ledger_id=ledger_id)
    fencing.revoke_all(connection, now)
    relay.revoke_all(connection, now)
    assistant_work.revoke_all(connection, now.timestamp())
    effects.doubt_all(connection)


# --- backup and restore -----------------------------------------------------------------------------------


def backup(db: Database, destination: Path | str) -> sqlite_backup.Image:
    """Copy the ledger, while it is being written, to a new file that `restore` takes.

    Raises IllegalMove (``backup_exists``, ``backup_folder``, ``backup_lineage``), Refusal (``postgresql_tools``),
    LedgerUnavailable (``copy_unwritten``).
    """
    _require_sqlite(db, "backed up", "pg_dump --format=custom --file=FILE DATABASE")
    return sqlite_backup.back_up(db.path, Path(destination).absolute())


def restore(db: Database, source: Path | str, *, actor: str = OPERATOR, reason: str = "") -> Restored:
    """Bring the ledger back to a backup of it, under a new epoch, with all authority revoked, and paused.

    Everything that can be wrong with `source` is refused before the ledger is touched: Refusal, the categories of
    `sqlite_backup.take_in` and ``backup_foreign``; SchemaMismatch (``schema_newer``); LedgerUnavailable
    (``copy_unwritten``) where it cannot be copied aside. AlreadyHeld (``control_overtaken``) when another restore
    came first, LedgerUnavailable (``restore_unfinished``) when one was ended half-way; Contention, and nothing
    changed, when a process keeps the write lock.
    """
    _require_sqlite(
        db, "restored", "pg_restore --clean --dbname=DATABASE FILE, then sovereign-agent authority new-epoch"
    )
    restore_id = new_id("restore")
    seen = authority.control(db.connection)
    authority.require_finished(seen)
    staging = _staging(db, restore_id)
    try:
        sqlite_backup.take_in(Path(source).absolute(), db.path, staging)
        last_token = _prepare(db, seen, restore_id, actor, {"reason": reason, "source": str(source)})
        _mark(db, seen, restore_id, last_token)
    except BaseException:
        if authority.control(db.connection).restoring != restore_id:  # else an interrupt came just after the commit
            sqlite_backup.remove(staging)
        raise
    return finish_restore(db)


def finish_restore(db: Database) -> Restored:
    """Carry an unfinished restore to its end from wherever it stood. Raises IllegalMove (``restore_none``)."""
    now = _unfinished(db)
    staging = _staging(db, now.restoring)
    with _told_how_to_go_on():
        epoch = _epoch_of(staging)
        _point_marker(db, now, epoch)
        if now.epoch != epoch:
            _put(db, now, staging, safety_copy=_safety_copy(db, now.restoring))
        sqlite_backup.require_intact(db.path)
        return _close(db, now.restoring, epoch)


def roll_back_restore(db: Database, *, actor: str = OPERATOR) -> Restored:
    """Undo an unfinished restore from wherever it stood; the ledger stays paused.

    Raises IllegalMove (``restore_none``), Refusal (``safety_copy_missing``).
    """
    now = _unfinished(db)
    # Nobody else's name: another who rolls back at this moment must not change the copy that goes into the ledger.
    back = _beside(db, now.restoring, f"{secrets.token_hex(8)}.back")
    with _told_how_to_go_on():
        before = now.epoch
        if _safety_copy(db, now.restoring).exists():
            sqlite_backup.take_in(_safety_copy(db, now.restoring), db.path, back)
            before = _epoch_of(back)
            if before != now.epoch:  # the image's content is in the ledger already
                _put(db, now, back, safety_copy=_undone(db, now.restoring))
        elif _staging(db, now.restoring).exists() and _epoch_of(_staging(db, now.restoring)) == now.epoch:
            raise Refusal(
                "The restore was not rolled back: what the ledger held before it is not there.",
                category="safety_copy_missing",
                why=f"The backup's content is in the ledger already, and {_safety_copy(db, now.restoring)} is gone.",
                next_command="put that file back, or sovereign-agent restore --by ACTOR --resume",
            )
        return _close(db, now.restoring, before, rolled_back_by=actor)


def _point_marker(db: Database, seen: Control, epoch: str) -> None:
    """Write this host's marker, unless another has finished or rolled back in the meantime."""
    with db.immediate() as connection:
        if authority.control(connection) != seen:
            raise _overtaken()
        authority.write_marker(db.authority, epoch)


def _prepare(db: Database, live: Control, restore_id: str, actor: str, detail: dict[str, str]) -> int:
    """Put into the staging image all that the ledger will be; return its token counter."""
    staging = _staging(db, restore_id)
    with closing(Database(staging, create=False, authority_required=False, clock=db.clock)) as image:
        schema = db.schema()
        newer = [name for name, number in image.schema().items() if number > schema.get(name, number)]
        if newer:
            raise SchemaMismatch(
                f"The backup's schema of {', '.join(newer)} is newer than the ledger's.", category="schema_newer"
            )
        theirs = authority.find_control(image.connection)  # None in a backup from before ledgers had a name
        if theirs and theirs.ledger_id != live.ledger_id:
            raise Refusal(
                "The ledger was not restored: the backup is another ledger's.",
                category="backup_foreign",
                why=f"It is of {theirs.ledger_id}, and this is {live.ledger_id}.",
            )
        with image.immediate() as connection:
            epoch, above = authority.new_epoch(), fencing.last_token(db.connection)
            _begin_epoch(connection, epoch, db.now(), above=above, restoring=restore_id, ledger_id=live.ledger_id)
            detail |= {"restore": restore_id, "before": live.epoch, "epoch": epoch}
            _record(image, "authority.restored", live, actor, detail)
            return fencing.last_token(connection)


def _put(db: Database, seen: Control, image: Path, *, safety_copy: Path) -> None:
    """The image's content into the ledger, unless another has finished or rolled back in the meantime."""

    def locked() -> None:
        if authority.control(db.connection) != seen:
            raise _overtaken()
        sqlite_backup.back_up(db.path, safety_copy, replacing=True)

    sqlite_backup.replace_content(db.path, image, patience=db.patience, locked=locked)


def _close(db: Database, restore_id: str, epoch: str, rolled_back_by: str = "") -> Restored:
    """The last step, if the ledger holds what it should: it, the marker and the answer are of one epoch."""
    with db.immediate() as connection:
        seen = authority.control(connection)
        if (seen.restoring, seen.epoch) != (restore_id, epoch):
            raise _overtaken()
        authority.write_marker(db.authority, epoch)
        authority.change_control(connection, seen, paused=True)
        if rolled_back_by:
            _record(db, "authority.rolled_back", seen, rolled_back_by, {"restore": restore_id})
    safety_copy, undone = _safety_copy(db, restore_id), _undone(db, restore_id)
    for left in db.path.parent.iterdir():
        if left.name.startswith(f"{db.path.name}.{restore_id}.") and left not in (safety_copy, undone):
            with suppress(OSError):  # the restore is over, and what stays harms nobody
                left.unlink()
    return Restored(restore_id, epoch, safety_copy if safety_copy.exists() else None)


def _mark(db: Database, seen: Control, restore_id: str, last_token: int) -> None:
    """Pause, and let no other restore begin.

    From here on no token is minted and no effect leaves the house that the image does not know.
    """
    with db.immediate() as connection:
        behind = fencing.last_token(connection) >= last_token
        if behind or not authority.change_control(connection, seen, paused=True, restoring=restore_id):
            raise _overtaken()
        image = Database(_staging(db, restore_id), create=False, authority_required=False)
        with closing(image), image.immediate() as carried:
            effects.carry_over(connection, carried)


@contextmanager
def _told_how_to_go_on() -> Generator[None]:
    """Between the first step and the last a failure says what finishes the restore and what undoes it."""
    try:
        yield
    except Refusal:
        raise
    except (Contention, LedgerUnavailable, OSError) as error:
        kind = Contention if isinstance(error, Contention) else LedgerUnavailable
        raise kind(
            "The restore stopped between two of its steps.",
            category="restore_unfinished",
            why=f"{error} {getattr(error, 'why', '')}".strip(),
            inspect=authority.SHOW,
            next_command=f"mend that, then {authority.UNFINISHED}",
        ) from error


def _unfinished(db: Database) -> Control:
    now = authority.control(db.connection)
    if not now.restoring:
        raise IllegalMove("No restore of this ledger is unfinished.", category="restore_none")
    return now


def _epoch_of(image: Path) -> str:
    with closing(Database(image, create=False, authority_required=False)) as opened:
        return authority.control(opened.connection).epoch


def _beside(db: Database, restore_id: str, what: str) -> Path:
    return db.path.with_name(f"{db.path.name}.{restore_id}.{what}")


def _staging(db: Database, restore_id: str) -> Path:
    return _beside(db, restore_id, "staging")


def _safety_copy(db: Database, restore_id: str) -> Path:
    return _beside(db, restore_id, "before")


def _undone(db: Database, restore_id: str) -> Path:
    """What a rollback has replaced: the backup's content, and whatever was queued or sent on top of it."""
    return _beside(db, restore_id, "undone")


def _require_sqlite(db: Database, done: str, instead: str) -> None:
    if db.engine != "sqlite":
        raise Refusal(
            f"The ledger was not {done}.",
            category="postgresql_tools",
            why="It is on PostgreSQL, whose own tools do that.",
            next_command=instead,
        )


def _require_reason(actor: str, reason: str) -> None:
    if not actor.strip() or not reason.strip():
        raise IllegalMove("Nothing was changed.", category="reason_missing", why="It needs an actor and a reason.")


def _overtaken() -> AlreadyHeld:
    return AlreadyHeld(
        "Nothing was changed: somebody else was first.",
        category="control_overtaken",
        why="Another pause, resume, restore or new epoch came in between.",
        inspect=authority.SHOW,
        next_command="look, then repeat the command",
    )


def _record(db: Database, kind: str, control: Control, actor: str, detail: dict[str, str]) -> None:
    journal.record(db.connection, kind, control.ledger_id, actor=actor, at=db.now(), detail=detail)
