"""Checker: a whole history, replayed in its order, and every place in it where the ledger lied.

`breaches` reads rows and believes nothing else. It asks `invariants` for what can be asked of a ledger at rest or at
work; then it replays the events; and where a diary was kept, it replays that, and so knows every instant.

The diary is a table of the ledger, written by triggers: each change of a lease, an attempt, a message, an item, each
line of a transcript, each receipt, and each act outside the house with the word that ends all doubt of it, in one
order, in the transaction that made the change. The code that is judged neither writes it nor knows of it. `DIARY`
brings it to a ledger on SQLite (``db.extend("diary", DIARY)``).

A time is compared only with a time that the same statement judged by: clocks may be wrong, and wrong differently.
When a renewal happened is told by how long it lasts, as long as what it renews did when it was given.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sovereign_agent.database import Connection, Migration, Row
from sovereign_agent.testing.invariants import violations
from sovereign_agent.testing.promises import Promise, told

DIARY = (
    Migration(
        1,
        "diary_of_authority",
        """
-- home: testing.checker
CREATE TABLE authority_diary (
    seq <identity>,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    holder TEXT,
    token <integer>,
    until <integer>,
    at <integer>,
    after_event <integer> NOT NULL
) <strict>;
CREATE TRIGGER diary_of_a_lease_taken AFTER INSERT ON actor_leases BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, until, at, after_event) VALUES ('lease', NEW.actor_id,
        NEW.process_identity, NEW.fencing_token, NEW.expires_at, NEW.acquired_at,
        (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_a_lease_changed AFTER UPDATE ON actor_leases BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, until, at, after_event) VALUES ('lease', NEW.actor_id,
        NEW.process_identity, NEW.fencing_token, NEW.expires_at, NEW.acquired_at,
        (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_a_lease_left AFTER DELETE ON actor_leases BEGIN
    INSERT INTO authority_diary (kind, key, after_event) VALUES ('lease', OLD.actor_id,
        (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_an_attempt_begun AFTER INSERT ON execution_attempts BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, until, at, after_event) VALUES ('attempt',
        NEW.assignment_id, NEW.process_identity, NEW.fencing_token, NEW.expires_at, NEW.acquired_at,
        (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_an_attempt_changed AFTER UPDATE ON execution_attempts WHEN OLD.status = 'ACTIVE' BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, until, at, after_event) VALUES ('attempt',
        NEW.assignment_id, CASE NEW.status WHEN 'ACTIVE' THEN NEW.process_identity END, NEW.fencing_token,
        NEW.expires_at, NEW.acquired_at, (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_a_message AFTER UPDATE ON messages BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, until, after_event) VALUES ('message', NEW.id,
        CASE NEW.state WHEN 'CLAIMED' THEN NEW.claim_owner END, NEW.fencing_token, NEW.claim_expires_at,
        (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_an_item AFTER UPDATE ON assistant_work BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, until, after_event) VALUES ('item', NEW.id, NEW.owner,
        NEW.generation, NEW.expires_at, (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_a_line AFTER INSERT ON assistant_transcript BEGIN
    INSERT INTO authority_diary (kind, key, token, at, after_event) VALUES ('line', NEW.work_id, NEW.generation,
        NEW.created_at, (SELECT coalesce(max(seq), 0) FROM events)); END;
CREATE TRIGGER diary_of_a_receipt AFTER INSERT ON receipts BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, at, after_event) SELECT 'receipt', NEW.attempt_id,
        max(process_identity), max(fencing_token), NEW.created_at, (SELECT coalesce(max(seq), 0) FROM events)
        FROM actor_leases WHERE actor_id = NEW.actor_id; END;
CREATE TRIGGER diary_of_an_act AFTER INSERT ON effects BEGIN
    INSERT INTO authority_diary (kind, key, holder, token, at, after_event)
        SELECT CASE epoch WHEN NEW.epoch THEN 'act' ELSE 'carried' END, NEW.work_id, NEW.operation_id,
        NEW.generation, NEW.created_at, (SELECT coalesce(max(seq), 0) FROM events) FROM assistant_control; END;
CREATE TRIGGER diary_of_a_word AFTER INSERT ON effect_ends WHEN NEW.actor <> '' OR NEW.outcome = 'none' BEGIN
    INSERT INTO authority_diary (kind, key, after_event) VALUES ('word', NEW.operation_id,
        (SELECT coalesce(max(seq), 0) FROM events)); END;
""",
        1,
    ),
)


def breaches(connection: Connection, *, at_rest: bool = False, outside: Mapping[str, int] | None = None) -> list[str]:
    """Name every lie in a sentence; an empty list means that the history holds none.

    With `at_rest` everybody is dead, all time has run out and the supervisors have ticked: nobody may hold anything.
    `outside` is how often each act has arrived where it was sent, by its operation id, where somebody knows that.
    """
    events = connection.execute("SELECT * FROM events ORDER BY seq").rows
    promises = [*PROMISES, *AT_REST] if at_rest else PROMISES
    return [
        *violations(connection),
        *(told(promise, row) for promise in promises for row in connection.execute(promise.broken)),
        *_grants_under_a_pause(events),
        *_items(connection, events),
        *(_acts(connection, outside) if outside is not None else []),
        *(_Diary(connection, events).lies() if _has_diary(connection) else []),
    ]


PROMISES = (
    Promise(
        "nothing is created by nobody",
        "{id} was created by {events} named actors: whatever is wanted, planned, given out or sent has one.",
        """
        SELECT o.id, count(e.seq) AS events
          FROM (SELECT id, 'outcome.created' AS kind FROM outcomes UNION ALL SELECT id, 'sow.created' FROM sows
                UNION ALL SELECT id, 'assignment.created' FROM assignments
                UNION ALL SELECT id, 'message.sent' FROM messages) o
          LEFT JOIN events e ON e.subject = o.id AND e.kind = o.kind AND e.actor <> ''
         GROUP BY o.id HAVING count(e.seq) <> 1
        """,
    ),
    Promise(
        "a supervisor, who has no name, only ends and puts back",
        "Event {seq} says {kind} of {subject}, by nobody.",
        """
        SELECT seq, kind, subject FROM events
         WHERE actor = '' AND kind NOT IN ('assignment.recovered', 'assignment.finished', 'message.swept',
               'message.dead', 'sow.failed', 'sow.parked', 'outcome.reprojected', 'work.canceled')
        """,
    ),
    Promise(
        "a message is claimed by the actor it is addressed to",
        "Event {seq} says that {actor} claimed {id}, which is addressed to {recipient}.",
        """
        SELECT e.seq, e.actor, m.id, m.recipient FROM events e JOIN messages m ON m.id = e.subject
         WHERE e.kind = 'message.claimed' AND e.actor <> m.recipient
        """,
    ),
    Promise(
        "a transcript's lines are in the order of their generations",
        "Line {seq} of {work_id} is of generation {generation}, after one of generation {later}.",
        """
        SELECT * FROM (SELECT seq, work_id, generation,
                              max(generation) OVER (PARTITION BY work_id ORDER BY seq) AS later
                         FROM assistant_transcript) AS lines
         WHERE generation < later
        """,
    ),
    Promise(
        "a transcript's line is of a generation that was claimed",
        "Line {seq} of {work_id} is of generation {generation}, which nobody has claimed.",
        """
        SELECT t.seq, t.work_id, t.generation FROM assistant_transcript t
         WHERE NOT EXISTS (SELECT 1 FROM events e WHERE e.subject = t.work_id AND e.kind = 'work.claimed'
                              AND e.detail LIKE '%"generation":' || t.generation || ',%')
        """,
    ),
    Promise(
        "nobody works on what was delegated beyond its deadline",
        "Line {seq} of {work_id} was written at {created_at}, and its delegation ended at {deadline}.",
        """
        SELECT t.seq, t.work_id, t.created_at, d.deadline
          FROM assistant_transcript t JOIN assistant_delegations d ON d.child_id = t.work_id
         WHERE t.created_at >= d.deadline
        """,
    ),
)

AT_REST = (
    Promise(
        "at rest nobody holds anything",
        "{id} is still held, or still to be ended.",
        """
        SELECT id FROM execution_attempts WHERE status = 'ACTIVE'
         UNION ALL SELECT id FROM assignments WHERE state = 'RUNNING'
         UNION ALL SELECT id FROM messages WHERE state = 'CLAIMED'
         UNION ALL SELECT id FROM assistant_work WHERE status = 'RUNNING'
        """,
    ),
)

GRANTS = ("assignment.running", "message.claimed", "work.claimed")
PAUSES = {
    "authority.paused": True,
    "authority.new_epoch": True,
    "authority.restored": True,
    "authority.rolled_back": True,
    "authority.resumed": False,
}
EPOCHS = ("authority.new_epoch", "authority.restored")
ITEM_MOVES = {
    ("READY", "work.claimed"): "RUNNING",
    ("RUNNING", "work.done"): "DONE",
    ("RUNNING", "work.blocked"): "BLOCKED",
    ("RUNNING", "work.released"): "READY",
    ("RUNNING", "work.retried"): "READY",
    ("RUNNING", "work.lost"): "READY",
    ("RUNNING", "work.parked"): "PARKED",
    ("RUNNING", "work.revoked"): "READY",
    ("RUNNING", "work.canceled"): "CANCELED",
    ("READY", "work.canceled"): "CANCELED",
    ("PARKED", "work.canceled"): "CANCELED",
}
BY_ITS_HOLDER = ("message.done", "work.done", "work.blocked", "work.released", "work.retried")
BY_TIME = ("message.swept", "work.lost", "work.parked")
ENDS = ("work.done", "work.blocked", "work.canceled")


def _has_diary(connection: Connection) -> bool:
    return "authority_diary" in connection.tables()


def _detail(event: Row) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event["detail"])
    return found


def _grants_under_a_pause(events: list[Row]) -> Iterator[str]:
    """Authority that was given while the ledger was paused, or in an epoch that was over."""
    paused, epoch = False, ""
    for event in events:
        paused = PAUSES.get(event["kind"], paused)
        if event["kind"] in EPOCHS:
            epoch = _detail(event)["epoch"]
        if event["kind"] in GRANTS and paused:
            yield f"Event {event['seq']}, {event['kind']} of {event['subject']}, happened under a pause."
        if event["kind"] == "work.claimed" and _detail(event)["epoch"] != (epoch or _detail(event)["epoch"]):
            yield f"Event {event['seq']} claims {event['subject']} in an epoch that is not the ledger's, {epoch}."


def _items(connection: Connection, events: list[Row]) -> Iterator[str]:
    """Each assistant item, replayed from its events: ended once, one at a time in its session, and as its row says."""
    states: dict[str, str] = defaultdict(lambda: "READY")
    generations: dict[str, int] = defaultdict(int)
    running: dict[str, str] = {}
    for event in events:
        item, kind = event["subject"], event["kind"]
        if not kind.startswith("work.") or kind == "work.delegated":
            continue
        before, detail = states[item], _detail(event)
        if (before, kind) not in ITEM_MOVES:
            yield f"Item {item} was {before} when {kind} happened to it."
        states[item] = ITEM_MOVES.get((before, kind), before)
        session = detail["session"]
        if kind == "work.claimed":
            if detail["generation"] <= generations[item]:
                yield f"Item {item} was claimed in generation {detail['generation']} after {generations[item]}."
            if session in running:
                yield f"Item {item} was claimed while {running[session]} ran in its session."
            generations[item], running[session] = detail["generation"], item
        elif running.get(session) == item:
            del running[session]
    for row in connection.execute("SELECT id, status, generation FROM assistant_work ORDER BY seq"):
        if row["status"] != states[row["id"]] or row["generation"] < generations[row["id"]]:
            made = f"{states[row['id']]} in generation {generations[row['id']]}"
            yield f"Item {row['id']} is {row['status']} in generation {row['generation']}, but its history is {made}."


def _acts(connection: Connection, outside: Mapping[str, int]) -> Iterator[str]:
    """What the ledger says of acts outside the house, beside what has arrived there."""
    known = connection.execute(
        "SELECT e.operation_id, n.outcome FROM effects e LEFT JOIN effect_ends n ON n.operation_id = e.operation_id"
    ).rows
    for act in outside.keys() - {row["operation_id"] for row in known}:
        yield f"Act {act} was done, and the ledger does not know of it."
    for act, times in outside.items():
        if times > 1:
            yield f"Act {act} was done {times} times."
    for row in known:
        if row["outcome"] in ("done", "none") and (row["outcome"] == "done") != bool(outside.get(row["operation_id"])):
            yield f"Act {row['operation_id']} ended {row['outcome']}, says the ledger, and outside it did not."


@dataclass
class _Held:
    """How one key stands: who holds it under which token until when, given for how long. No holder: nobody does."""

    holder: str | None = None
    token: int = 0
    until: int = 0
    lasts: int = 0
    greatest: int = 0


@dataclass
class _Diary:
    """The diary, replayed: at each instant at most one holder of each key, and nothing written by anybody else."""

    connection: Connection
    events: list[Row]
    held: dict[tuple[str, str], _Held] = field(default_factory=lambda: defaultdict(_Held))
    newest: int = 0
    era: int = 0
    turn: str = ""
    in_doubt: dict[str, int] = field(default_factory=dict[str, int])
    """Each act that nobody has spoken of, and the era in which it left."""

    def __post_init__(self) -> None:
        self.of_subject: dict[str, list[Row]] = defaultdict(list)
        for event in self.events:
            self.of_subject[event["subject"]].append(event)
        attempts = self.connection.execute(
            """
            SELECT id, actor_id, status, process_identity, fencing_token, actor_lease_fencing_token AS lease
              FROM execution_attempts
            """
        ).rows
        self.attempts = {row["id"]: row for row in attempts}
        self.begun = {row["fencing_token"]: row for row in attempts}
        self.parents = {
            row["child_id"]: row["parent_id"]
            for row in self.connection.execute("SELECT child_id, parent_id FROM assistant_delegations")
        }

    def lies(self) -> Iterator[str]:
        """Every lie that the diary shows."""
        turns = [event for event in self.events if event["kind"] in PAUSES]
        paused = False
        for row in self.connection.execute("SELECT * FROM authority_diary ORDER BY seq"):
            while turns and turns[0]["seq"] <= row["after_event"]:
                turn = turns.pop(0)
                paused = PAUSES[turn["kind"]]
                yield from self._revoked(turn)
            if row["kind"] == "line":
                line = f"A line of generation {row['token']} of {row['key']} was written at {row['at']}"
                yield from self._under_its_claim(row, line)
            elif row["kind"] in ("act", "carried"):
                yield from self._act(row, paused=paused)
            elif row["kind"] == "word":
                self.in_doubt.pop(row["key"], None)
            elif row["kind"] == "receipt":
                yield from self._receipt(row)
            else:
                yield from self._change(row, paused=paused)
        for turn in turns:
            yield from self._revoked(turn)

    def _revoked(self, turn: Row) -> Iterator[str]:
        """What is still held when another epoch begins. An attempt is only made to run out, for a supervisor."""
        self.turn = turn["kind"]
        if turn["kind"] not in EPOCHS:
            return
        self.era += 1
        for (kind, key), held in self.held.items():
            if held.holder and (kind != "attempt" or held.until > turn["at"]):
                yield f"The {kind} {key} was still {held.holder}'s when event {turn['seq']} began another epoch."

    def _change(self, row: Row, *, paused: bool) -> Iterator[str]:
        kind, key = row["kind"], row["key"]
        held, event = self.held[kind, key], self._event_of(row)
        what = f"The {kind} {key}"
        if row["holder"] and (row["holder"], row["token"]) != (held.holder, held.token):
            at = row["at"] if row["at"] is not None else event["at"] if event else 0
            greatest = held.greatest if kind == "item" else self.newest
            if held.holder and at < held.until:
                yield f"{what} went to {row['holder']} at {at}, while it was {held.holder}'s until {held.until}."
            if row["token"] <= greatest:
                yield f"{what} was given under token {row['token']}, after {greatest}."
            if paused:
                yield f"{what} was given to {row['holder']} under a pause."
            if kind == "attempt":
                yield from self._begun(row, self.begun[row["token"]])
            self.newest = self.newest if kind == "item" else max(self.newest, row["token"])
            held.lasts = row["until"] - at
        elif not row["holder"]:
            yield from self._left(what, held, event)
        elif kind in ("lease", "attempt") and row["until"] - held.lasts >= held.until:
            yield f"{what} was renewed by {held.holder} until {row['until']}, though it ran out at {held.until}."
        held.holder, held.token, held.until = row["holder"], row["token"] or 0, row["until"] or 0
        held.greatest = max(held.greatest, held.token)

    def _begun(self, row: Row, attempt: Row) -> Iterator[str]:
        lease = self.held["lease", attempt["actor_id"]]
        if (lease.holder, lease.token) != (row["holder"], attempt["lease"]) or row["at"] >= lease.until:
            of = f"{lease.holder}'s under token {lease.token} until {lease.until}"
            yield f"Attempt {attempt['id']} was begun on lease token {attempt['lease']}, when its actor was {of}."

    def _left(self, what: str, held: _Held, event: Row | None) -> Iterator[str]:
        if event is None or held.holder is None:
            return
        if event["kind"] in BY_ITS_HOLDER and event["actor"] != held.holder:
            yield f"{what} was {held.holder}'s when {event['actor']} settled it, event {event['seq']}."
        if event["kind"] in BY_TIME and event["at"] < held.until:
            yield f"{what} was put back at {event['at']}, while it was {held.holder}'s until {held.until}."

    def _event_of(self, row: Row) -> Row | None:
        """The event that tells of a change: the next one of its subject, in the same transaction."""
        later = (event for event in self.of_subject[row["key"]] if event["seq"] > row["after_event"])
        return next(later, None) if row["kind"] in ("message", "item") else None

    def _act(self, row: Row, *, paused: bool) -> Iterator[str]:
        """One that is about to leave; or one that a restore has carried over, which nobody else may."""
        act = f"Act {row['holder']} left the house at {row['at']}"
        older = [other for other, era in self.in_doubt.items() if era < self.era]
        self.in_doubt[row["holder"]] = self.era - (row["kind"] == "carried")
        if row["kind"] == "carried":
            if self.turn != "authority.restored":
                yield f"{act}, in an epoch that was over."
            return
        yield from self._under_its_claim(row, act)
        if paused:
            yield f"{act}, under a pause."
        if older:
            yield f"{act}, when nobody had spoken of {older[0]}, of an older epoch."

    def _under_its_claim(self, row: Row, what: str) -> Iterator[str]:
        held, parent = self.held["item", row["key"]], self.parents.get(row["key"], "")
        if not held.holder or held.token != row["token"]:
            yield f"{what}, when its holder was {held.holder} in generation {held.token}."
        elif row["at"] >= held.until:
            yield f"{what}, and its claim lasted until {held.until}."
        if any(e["kind"] in ENDS and e["seq"] <= row["after_event"] for e in self.of_subject[parent]):
            yield f"{what}, after its parent {parent} had ended."

    def _receipt(self, row: Row) -> Iterator[str]:
        attempt = self.attempts[row["key"]]
        fence = (attempt["process_identity"], attempt["lease"])
        if attempt["status"] == "DONE" and fence != (row["holder"], row["token"]):
            found = f"{row['holder']}, {row['token']}" if row["holder"] else "nobody's"
            yield f"Attempt {row['key']} was ended by its process {fence}, when the lease of its actor was {found}."
