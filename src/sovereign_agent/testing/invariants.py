"""Invariants: whether a ledger keeps every promise that it makes.

`violations` only reads, and believes nothing but rows: it calls no room that it judges. It asks for what `promises`
says in one statement each, and replays what has an order: tokens, and the moves of each message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from sovereign_agent.database import Connection, Row
from sovereign_agent.testing.promises import PROMISES, told


def violations(connection: Connection) -> list[str]:
    """Name every broken promise in a sentence; an empty list means that the ledger told no lie."""
    broken = [told(promise, row) for promise in PROMISES for row in connection.execute(promise.broken)]
    return [*broken, *_tokens_out_of_order(connection), *_message_histories(connection)]


def _tokens_out_of_order(connection: Connection) -> Iterator[str]:
    """Attempts and claims in the order of their events: each has a greater token than all before it."""
    greatest = 0
    for row in connection.execute(
        """
        SELECT v.seq, v.kind, v.subject, v.detail, e.fencing_token
          FROM events v LEFT JOIN execution_attempts e
            ON e.assignment_id = v.subject AND v.detail LIKE '%"attempt_id":"' || e.id || '"%'
         WHERE v.kind IN ('assignment.running', 'message.claimed') ORDER BY v.seq
        """
    ):
        token = int(row["fencing_token"] or json.loads(row["detail"]).get("token", 0))
        if token <= greatest:
            yield f"Event {row['seq']}, {row['kind']} of {row['subject']}, has token {token} after {greatest}."
        greatest = max(greatest, token)


MESSAGE_MOVES = {
    ("", "message.sent"): "NEW",
    ("NEW", "message.claimed"): "CLAIMED",
    ("CLAIMED", "message.claimed"): "CLAIMED",
    ("CLAIMED", "message.swept"): "NEW",
    ("CLAIMED", "message.revoked"): "NEW",
    ("CLAIMED", "message.done"): "DONE",
    ("CLAIMED", "message.dead"): "DEAD",
}


def _message_histories(connection: Connection) -> Iterator[str]:
    """Each message, replayed from its events: it is settled once, and is what its history makes it."""
    rows = connection.execute(
        """
        SELECT m.id, m.state, m.fencing_token, m.deliveries, v.kind, v.detail
          FROM messages m LEFT JOIN events v ON v.subject = m.id AND v.kind LIKE 'message.%' ORDER BY m.seq, v.seq
        """
    )
    for message_id, history in groupby(rows, key=lambda row: str(row["id"])):
        yield from _message_history(message_id, list(history))


def _message_history(message_id: str, history: list[Row]) -> Iterator[str]:
    state, tokens = "", [0]
    for row in history:
        move = (state, row["kind"])
        if move not in MESSAGE_MOVES:
            yield f"Message {message_id} was {state or 'unsent'} when {row['kind']} happened to it."
        state = MESSAGE_MOVES.get(move, state)
        if row["kind"] == "message.claimed":
            tokens.append(json.loads(row["detail"])["token"])
    if tokens != sorted(set(tokens)):
        yield f"Message {message_id} was claimed under the tokens {tokens[1:]}, which do not only grow."
    row = history[-1]
    expected = (state, None if state == "NEW" else tokens[-1], len(tokens) - 1)
    found = (row["state"], row["fencing_token"], row["deliveries"])
    if found != expected:
        yield f"Message {message_id} is {found} (state, token, deliveries), but its history makes it {expected}."
