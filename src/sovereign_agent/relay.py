"""Relay: the actors' mailbox. Home of messages.

A message is addressed to one actor. Working on it needs a claim: owner, fencing token, expiry. Whoever settles
it presents the token, and the token is compared in the very statement that settles: it is never read back
from the row, which would always match itself. A claim that has run out goes back to NEW, later and later each
time, so that a message nobody survives does not stand in front of the others; after `MAX_DELIVERIES` claims it
is dead, with its history kept.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sovereign_agent import journal
from sovereign_agent.clock import Clock, micros
from sovereign_agent.database import Connection, Database, Row
from sovereign_agent.errors import AlreadyHeld, AuthorityLost, IllegalMove, PolicyRefusal, Refusal, wrong_state
from sovereign_agent.fencing import admitted_token
from sovereign_agent.outcomes import there
from sovereign_agent.records import Message, MessageState, from_row, new_id

CLAIM_TTL = timedelta(minutes=5)
MAX_DELIVERIES = 5
MAX_SUBJECT_CHARACTERS = 500
MAX_BODY_CHARACTERS = 100_000


def send(db: Database, sender: str, recipient: str, subject: str, body: str, *, clock: Clock | None = None) -> Message:
    """Put a message into an actor's mailbox. Raises IllegalMove for an empty or oversized one."""
    if not subject or len(subject) > MAX_SUBJECT_CHARACTERS or len(body) > MAX_BODY_CHARACTERS:
        raise IllegalMove(
            "The message was not sent.",
            category="message_size",
            why=f"A subject has 1 to {MAX_SUBJECT_CHARACTERS} characters, a body at most {MAX_BODY_CHARACTERS}.",
        )
    message_id = new_id("msg")
    with db.transaction() as connection:
        now = db.now(clock)
        connection.execute(
            """
            INSERT INTO messages (id, sender, recipient, subject, body, state, ready_at, created_at)
            VALUES (?, ?, ?, ?, ?, 'NEW', ?, ?)
            """,
            (message_id, sender, recipient, subject, body, micros(now), micros(now)),
        )
        journal.record(connection, "message.sent", message_id, actor=sender, at=now, detail={"to": recipient})
    return Message(message_id, sender, recipient, subject, body, MessageState.NEW, None, None, None, 0, now)


def inbox(db: Database, actor_id: str, *, limit: int = 100, clock: Clock | None = None) -> list[Message]:
    """What an actor may claim now, in the order it became ready: NEW messages, and claims that have run out.

    Reading changes nothing: no claim is swept, no delivery counted.
    """
    now = micros(db.now(clock))
    rows = db.connection.execute(
        """
        SELECT * FROM (
            SELECT * FROM (SELECT * FROM messages WHERE recipient = ? AND state = 'NEW' AND ready_at <= ?
                            ORDER BY ready_at, seq LIMIT ?) AS fresh
            UNION ALL
            SELECT * FROM (SELECT * FROM messages WHERE recipient = ? AND state = 'CLAIMED'
                              AND claim_expires_at BETWEEN 0 AND ? AND deliveries < ?
                            ORDER BY claim_expires_at LIMIT ?) AS lapsed
        ) AS both_kinds ORDER BY ready_at, seq LIMIT ?
        """,
        (actor_id, now, limit, actor_id, now, MAX_DELIVERIES, limit, limit),
    )
    return [from_row(Message, row) for row in rows]


def get_message(db: Database, message_id: str) -> Message:
    """Read one message. Raises Refusal (``message_missing``)."""
    return _get(db.connection, message_id)


def current_claims(connection: Connection, *, limit: int = 1000) -> list[Message]:
    """The messages that somebody holds a claim on, run out or not, the longest claim last."""
    rows = connection.execute(
        "SELECT * FROM messages WHERE state = 'CLAIMED' ORDER BY claim_expires_at LIMIT ?", (limit,)
    )
    return [from_row(Message, row) for row in rows]


def dead_letters(connection: Connection, actor_id: str, *, limit: int = 100) -> list[Message]:
    """The newest messages to an actor that are DEAD: nobody can claim them any more."""
    sql = "SELECT * FROM messages WHERE recipient = ? AND state = 'DEAD' ORDER BY seq DESC LIMIT ?"
    return [from_row(Message, row) for row in connection.execute(sql, (actor_id, limit))]


def claim(
    db: Database, message_id: str, actor_id: str, *, ttl: timedelta = CLAIM_TTL, clock: Clock | None = None
) -> Message:
    """Take the right to work on a message for `ttl`.

    Within its own unexpired claim the owner gets the same claim again, token and all. A claim that has run
    out is taken afresh, under a greater token, by its former owner just as by anybody. (Unit 8, Property 3)

    Raises Refusal (``message_missing``), PolicyRefusal when it is addressed to another actor, AlreadyHeld
    (``claim_held``), IllegalMove when it is DONE, DEAD or was delivered `MAX_DELIVERIES` times, PolicyRefusal
    (``paused``), AuthorityLost (``epoch_replaced``).
    """
    with db.transaction() as connection:
        if _addressed(connection, message_id, actor_id)["claim_owner"] == actor_id:
            message = _get(connection, message_id)
            if _is_own_claim(message, actor_id, db.now(clock)):
                return message
        token, told = admitted_token(connection)
        now = db.now(clock, told)
        taken = connection.execute(
            """
            UPDATE messages
               SET state = 'CLAIMED', claim_owner = ?, fencing_token = ?, claim_expires_at = ?,
                   deliveries = deliveries + 1
             WHERE id = ? AND recipient = ? AND deliveries < ?
               AND (state = 'NEW' OR (state = 'CLAIMED' AND claim_expires_at <= ? AND claim_expires_at >= 0))
            RETURNING *
            """,
            (actor_id, token, micros(now + ttl), message_id, actor_id, MAX_DELIVERIES, micros(now)),
        ).fetchone()
        if taken:
            journal.record(connection, "message.claimed", message_id, actor=actor_id, at=now, detail={"token": token})
            return from_row(Message, taken)
        message = _get(connection, message_id)
        if not _is_own_claim(message, actor_id, now):
            raise _not_claimable(message)
        return message


def complete(
    db: Database, message_id: str, actor_id: str, *, fencing_token: int, clock: Clock | None = None
) -> Message:
    """Settle a message as DONE, under the token that `claim` gave.

    Raises AuthorityLost (``fencing_token_stale``) when that claim is not the current one.
    """
    return _settle(db, message_id, actor_id, fencing_token, to=MessageState.DONE, clock=clock)


def dead_letter(db: Database, message: Message, *, clock: Clock | None = None) -> Message:
    """Settle a claimed message as DEAD, under the token that the `message` in hand carries.

    Raises AuthorityLost (``fencing_token_stale``) when that claim is not the current one.
    """
    owner, token = message.claim_owner or "", message.fencing_token or 0
    return _settle(db, message.id, owner, token, to=MessageState.DEAD, clock=clock)


def _settle(
    db: Database, message_id: str, actor_id: str, fencing_token: int, *, to: MessageState, clock: Clock | None
) -> Message:
    with db.transaction() as connection:
        settled = connection.execute(
            """
            UPDATE messages SET state = ?
             WHERE id = ? AND state = 'CLAIMED' AND claim_owner = ? AND fencing_token = ?
            RETURNING *, <now> AS now
            """,
            (to.value, message_id, actor_id, fencing_token),
        ).fetchone()
        if settled is None:
            raise _stale(_get(connection, message_id), fencing_token)
        at = db.now(clock, settled["now"])
        journal.record(connection, f"message.{to.value.lower()}", message_id, actor=actor_id, at=at)
        return from_row(Message, settled)


def sweep_expired_claims(db: Database, clock: Clock | None = None, *, batch: int = 100) -> dict[str, MessageState]:
    """Put every claim that has run out back to NEW, or to DEAD at its last delivery; return which became of each id.

    One transaction a batch. A message that was settled or claimed again in between is left alone.
    """
    swept: dict[str, MessageState] = {}
    last = 0
    while True:
        with db.transaction() as connection:
            now = db.now(clock)
            rows = connection.execute(
                """
                SELECT seq, id, fencing_token, deliveries FROM messages
                 WHERE state = 'CLAIMED' AND claim_expires_at <= ? AND seq > ? ORDER BY seq LIMIT ?
                """,
                (micros(now), last, batch),
            ).fetchall()
            swept |= {row["id"]: state for row in rows if (state := _sweep(connection, row, now))}
        if len(rows) < batch:
            return swept
        last = rows[-1]["seq"]


def _sweep(connection: Connection, row: Row, now: datetime) -> MessageState | None:
    """What became of one message, unless somebody else was first."""
    dead = row["deliveries"] >= MAX_DELIVERIES
    if dead:
        changed = connection.execute(
            """
            UPDATE messages SET state = 'DEAD'
             WHERE id = ? AND state = 'CLAIMED' AND fencing_token = ? AND claim_expires_at <= ?
            """,
            (row["id"], row["fencing_token"], micros(now)),
        )
    else:
        changed = connection.execute(
            """
            UPDATE messages SET state = 'NEW', claim_owner = NULL, fencing_token = NULL, claim_expires_at = NULL,
                                ready_at = ?
             WHERE id = ? AND state = 'CLAIMED' AND fencing_token = ? AND claim_expires_at <= ?
            """,
            (micros(now + _back_off(row["deliveries"])), row["id"], row["fencing_token"], micros(now)),
        )
    if changed.rowcount != 1:
        return None
    kind, state = ("message.dead", MessageState.DEAD) if dead else ("message.swept", MessageState.NEW)
    detail = {"deliveries": row["deliveries"], "token": row["fencing_token"]}
    journal.record(connection, kind, row["id"], actor="", at=now, detail=detail)
    return state


def revoke_all(connection: Connection, now: datetime) -> None:
    """Put every claimed message back to NEW, as a restore must. The delivery stays counted."""
    claimed = connection.execute("SELECT * FROM messages WHERE state = 'CLAIMED' <for update>").rows
    for row in claimed:
        detail = {"token": row["fencing_token"]}
        journal.record(connection, "message.revoked", row["id"], actor=row["claim_owner"], at=now, detail=detail)
    connection.execute(
        """
        UPDATE messages SET state = 'NEW', claim_owner = NULL, fencing_token = NULL, claim_expires_at = NULL
         WHERE state = 'CLAIMED'
        """
    )


def _back_off(deliveries: int) -> timedelta:
    """How long a message rests after its claim has run out: nothing the first time, then 2, 4, 8 ... seconds."""
    return timedelta(seconds=0 if deliveries <= 1 else 2 ** min(deliveries - 1, 8))


def _addressed(connection: Connection, message_id: str, actor_id: str) -> Row:
    row = connection.execute("SELECT recipient, claim_owner FROM messages WHERE id = ?", (message_id,)).fetchone()
    message = there(row, "message", message_id)
    if message["recipient"] != actor_id:
        raise PolicyRefusal(
            f"Message {message_id} was not given to {actor_id}.",
            category="authority_refusal",
            why=f"It is addressed to {message['recipient']}.",
            next_command=f"sovereign-agent inbox {actor_id}",
        )
    return message


def _is_own_claim(message: Message, actor_id: str, now: datetime) -> bool:
    return (
        message.state is MessageState.CLAIMED
        and message.claim_owner == actor_id
        and message.claim_expires_at is not None
        and message.claim_expires_at > now
    )


def _not_claimable(message: Message) -> Refusal:
    if message.state is MessageState.CLAIMED and message.deliveries < MAX_DELIVERIES:
        return AlreadyHeld(
            f"Message {message.id} was not claimed.",
            category="claim_held",
            why=f"{message.claim_owner} holds it until {message.claim_expires_at}.",
            inspect=f"sovereign-agent inspect {message.id}",
        )
    why = f"It is {message.state.value} after {message.deliveries} of {MAX_DELIVERIES} deliveries."
    return wrong_state(f"Message {message.id} was not claimed.", why, message.id)


def _stale(message: Message, fencing_token: int) -> AuthorityLost:
    return AuthorityLost(
        f"Message {message.id} was not settled under token {fencing_token}.",
        category="fencing_token_stale",
        why=f"It is {message.state.value}, and its current token is {message.fencing_token}.",
        inspect=f"sovereign-agent inspect {message.id}",
        next_command="claim it again, if it can still be claimed",
    )


def _get(connection: Connection, message_id: str) -> Message:
    row = connection.execute("SELECT * FROM messages WHERE id = ?", (message_id,)).fetchone()
    return from_row(Message, there(row, "message", message_id))
