"""Effects: what left the house through tools that no rollback reaches. Home of effects and their ends.

An order that was placed stays placed, whatever becomes of the worker, its claim or the ledger. So each is written
down before it leaves, under the operation id that the supplier sees as well, and no operation id is let out twice:

    intent --its worker saw the end--> done | none | unknown
    intent --nobody saw the end------> that is unknown, too
    unknown, and whatever is of an older epoch --a person's word--> reconciled: done | none

Nothing is sent again by itself. After a restore or a new epoch this room lets nothing out until a person has spoken of
each effect from before: the work that caused them may run again, and does not know of them. What a backup lacks is
carried over from the ledger that it replaces; where there is no such ledger (PostgreSQL's own restore, a lost disk),
what left after the backup is not known here, and only the supplier can tell.

Arguments are kept as a digest of the whole and the first ARGUMENT_CHARACTERS of the text: enough to know the order
again when its transcript is gone. They are what a model wrote and the transcript holds anyway. A tool takes its
credentials from elsewhere, never as an argument, so nothing is blotted out here.

This room calls nobody. Functions that take `connection` live in the caller's transaction, `at` is its time in
microseconds, and whether the caller may write at all has been checked there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime

from sovereign_agent import journal
from sovereign_agent.clock import micros
from sovereign_agent.database import Connection, Database, Row, authority
from sovereign_agent.errors import AlreadyHeld, IllegalMove, PolicyRefusal
from sovereign_agent.records import Claim, from_row

UNKNOWN = "unknown"
ARGUMENT_CHARACTERS = 500
LIST = "sovereign-agent assistant effects"
RECONCILE = "sovereign-agent assistant reconcile OPERATION --outcome done|none --by ACTOR --reason TEXT"


@dataclass(frozen=True, slots=True)
class Effect:
    """One act that left the house, or was about to.

    Attributes:
        seq: its place in the order of intents, on this ledger.
        created_at: when it was meant to leave.
        outcome: done, none or unknown; empty while no end is recorded, which is unknown as well.
        of_older_epoch: it left before a restore or a new epoch, and holds all others back until it is reconciled.
        held_until: until then its worker has the claim under which it acts, and may see its end; None if it is gone.
    """

    seq: int
    operation_id: str
    work_id: str
    generation: int
    epoch: str
    tool: str
    arguments: str
    arguments_sha256: str
    created_at: datetime
    outcome: str
    of_older_epoch: bool
    held_until: datetime | None


# --- while the work goes on -------------------------------------------------------------------------------


def intend(connection: Connection, operation_id: str, claim: Claim, *, tool: str, arguments: str, at: int) -> None:
    """Write down what is about to leave the house under a claim; once this is committed, and not before, it may.

    Raises PolicyRefusal: ``effect_repeated`` for an operation id that was let out before, however that ended;
    ``effects_unreconciled`` while a person has not spoken of every effect of an older epoch.
    """
    if known := _find(connection, operation_id):
        raise _not_yet(
            "effect_repeated",
            f"{operation_id} was let out before. It ended {known['outcome'] or 'unseen, so what it did is unknown'}"
            f"{known['actor'] and ', says ' + known['actor']}.",
        )
    if connection.execute("SELECT 1 FROM unsettled_effects WHERE of_older_epoch = 1 LIMIT 1").fetchone():
        raise _not_yet("effects_unreconciled", "Acts of an older epoch may stand outside; no person has said which.")
    digest, under = hashlib.sha256(arguments.encode()).hexdigest(), (claim.id, claim.generation, claim.epoch)
    seq = connection.execute(
        """
        INSERT INTO effects (operation_id, work_id, generation, epoch, tool, arguments, arguments_sha256, created_at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING seq
        """,
        (operation_id, *under, tool, arguments[:ARGUMENT_CHARACTERS], digest, at),
    ).rows[0][0]
    connection.execute("INSERT INTO unsettled_effects (effect_seq, of_older_epoch) VALUES (?, 0)", (seq,))


def settle(connection: Connection, operation_id: str, outcome: str, *, at: int) -> None:
    """Write down how the worker saw its own act end: done, none or unknown.

    Raises IllegalMove: ``effect_missing``, ``effect_settled`` (one act ends once), ``effect_outcome``.
    """
    known = _found(connection, operation_id)
    if known["outcome"]:
        raise _unsettled(operation_id, "effect_settled", f"It ended {known['outcome']} already.")
    _end(connection, operation_id, outcome, at=at)
    if outcome != UNKNOWN:
        connection.execute("DELETE FROM unsettled_effects WHERE effect_seq = ? AND of_older_epoch = 0", (known["seq"],))


# --- a person's word --------------------------------------------------------------------------------------


def unsettled(connection: Connection, *, after: int = 0, limit: int = 100) -> list[Effect]:
    """What a person must look into, in the order of the intents, from behind the `seq` `after` on.

    It has no end, an unknown end, or is of an older epoch. An act whose worker is still at it stands here, too.
    """
    found = connection.execute(
        """
        SELECT e.*, u.of_older_epoch, w.expires_at AS held_until, COALESCE(
                 (SELECT outcome FROM effect_ends n WHERE n.operation_id = e.operation_id ORDER BY seq DESC LIMIT 1), ''
               ) AS outcome
          FROM unsettled_effects u JOIN effects e ON e.seq = u.effect_seq
          LEFT JOIN assistant_work w ON w.id = e.work_id AND w.generation = e.generation AND w.epoch = e.epoch
         WHERE u.effect_seq > ? ORDER BY u.effect_seq LIMIT ?
        """,
        (after, limit),
    )
    return [from_row(Effect, row) for row in found]


def reconcile(db: Database, operation_id: str, outcome: str, *, actor: str, reason: str) -> None:
    """Record what a person found out where the act arrived, or did not. It is final, and nothing is sent by it.

    Raises IllegalMove (``effect_missing``, ``effect_settled``, ``effect_outcome``, ``reason_missing``), and
    AlreadyHeld (``effect_in_flight``) while its worker holds the claim under which it acts; LedgerUnavailable
    (``restore_unfinished``) while a restore stands between its steps, which would not carry the word over.
    """
    if not actor.strip() or not reason.strip():
        raise _unsettled(operation_id, "reason_missing", "It needs an actor and a reason.")
    if outcome == UNKNOWN:
        raise _unsettled(operation_id, "effect_outcome", "That it is unknown was known before.")
    with db.immediate() as connection:
        authority.require_finished(authority.control(connection))
        known = _found(connection, operation_id)
        at = micros(connection.now())
        if not known["outcome"] and known["owner"] and known["expires_at"] > at:
            raise AlreadyHeld(
                f"{operation_id} was not settled.",
                category="effect_in_flight",
                why=f"{known['owner']} holds the claim under which it acts, and may still see its end.",
                inspect="sovereign-agent assistant status",
                next_command="wait until that claim has ended",
            )
        if connection.execute("DELETE FROM unsettled_effects WHERE effect_seq = ?", (known["seq"],)).rowcount != 1:
            raise _unsettled(operation_id, "effect_settled", "Its end is known, or a person has spoken already.")
        _end(connection, operation_id, outcome, at=at, actor=actor, reason=reason)
        detail = {"outcome": outcome, "reason": reason}
        journal.record(connection, "effect.reconciled", operation_id, actor=actor, at=at, detail=detail)


# --- a new epoch, a restored ledger -----------------------------------------------------------------------


def doubt_all(connection: Connection) -> None:
    """Put on the worklist, as of an older epoch, whatever left the house and no person has spoken of."""
    connection.execute("DELETE FROM unsettled_effects")
    connection.execute(
        """
        INSERT INTO unsettled_effects (effect_seq, of_older_epoch)
        SELECT e.seq, 1 FROM effects e
         WHERE NOT EXISTS (SELECT 1 FROM effect_ends n WHERE n.operation_id = e.operation_id
                            AND (n.actor <> '' OR n.outcome = 'none'))
        """
    )


def carry_over(live: Connection, image: Connection) -> None:
    """Bring into a restored image what the live ledger knows and it lacks; then doubt all.

    Every row is compared: since an earlier restore the two may have gone ways of their own.
    """
    image.executemany(
        """
        INSERT INTO effects (operation_id, work_id, generation, epoch, tool, arguments, arguments_sha256, created_at)
        SELECT ?, ?, ?, ?, ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM effects WHERE operation_id = ?)
        """,
        [(*tuple(row)[1:], row["operation_id"]) for row in live.execute("SELECT * FROM effects ORDER BY seq")],
    )
    image.executemany(
        """
        INSERT INTO effect_ends (operation_id, outcome, actor, reason, created_at)
        SELECT ?, ?, ?, ?, ? WHERE NOT EXISTS (
            SELECT 1 FROM effect_ends
             WHERE operation_id = ? AND outcome = ? AND actor = ? AND reason = ? AND created_at = ?)
        """,
        [tuple(row)[1:] * 2 for row in live.execute("SELECT * FROM effect_ends ORDER BY seq")],
    )
    doubt_all(image)


# --- helpers ----------------------------------------------------------------------------------------------


def _find(connection: Connection, operation_id: str) -> Row | None:
    """An operation's last word, empty where none was said, and who holds the claim under which it acts, until when."""
    return connection.execute(
        """
        SELECT e.seq, COALESCE(n.outcome, '') AS outcome, COALESCE(n.actor, '') AS actor, w.owner, w.expires_at
          FROM effects e LEFT JOIN effect_ends n ON n.operation_id = e.operation_id
          LEFT JOIN assistant_work w ON w.id = e.work_id AND w.generation = e.generation AND w.epoch = e.epoch
         WHERE e.operation_id = ? ORDER BY n.seq DESC LIMIT 1
        """,
        (operation_id,),
    ).fetchone()


def _found(connection: Connection, operation_id: str) -> Row:
    if known := _find(connection, operation_id):
        return known
    raise _unsettled(operation_id, "effect_missing", "No such operation was ever let out.")


def _end(
    connection: Connection, operation_id: str, outcome: str, *, at: int, actor: str = "", reason: str = ""
) -> None:
    if outcome not in {"done", "none", UNKNOWN}:
        raise _unsettled(operation_id, "effect_outcome", "An act is done, none or unknown.")
    connection.execute(
        "INSERT INTO effect_ends (operation_id, outcome, actor, reason, created_at) VALUES (?, ?, ?, ?, ?)",
        (operation_id, outcome, actor, reason, at),
    )


def _not_yet(category: str, why: str) -> PolicyRefusal:
    return PolicyRefusal("Nothing left the house.", category=category, why=why, inspect=LIST, next_command=RECONCILE)


def _unsettled(operation_id: str, category: str, why: str) -> IllegalMove:
    return IllegalMove(f"{operation_id} was not settled.", category=category, why=why, inspect=LIST)
