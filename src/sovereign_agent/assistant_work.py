"""Assistant work: a durable queue of turns, and the fence around whoever works on one.

An item belongs to a session, and of a session one item runs at a time. Working on it needs a claim: owner,
generation, epoch, expiry. Each claim of an item raises its generation, each restore of the ledger begins another
epoch, and `assert_current` compares all of it inside every transaction that writes:

    READY --claim--> RUNNING --finish--> DONE | BLOCKED | CANCELED
                     RUNNING --release, retry, or its time ran out--> READY
                     RUNNING --the CRASH_LIMIT-th worker lost--> PARKED
    whatever is not finished --cancel--> CANCELED

Control items go first, then the oldest. What a lost worker did is unknown: its item goes back into the queue at its
old place, and an item that nobody survives is parked with its evidence. This room runs no model, and it stops
nobody: whoever lost its claim can go on, but nothing that it does is written here.

A function whose first argument is `db` commits its own transaction; one with `connection` lives in the caller's.
`now` is in seconds since 1970, by default the ledger's own time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from sovereign_agent import journal
from sovereign_agent.clock import LAST_MICROS, micros
from sovereign_agent.database import Connection, Database, Row, admit, read_marker
from sovereign_agent.errors import AuthorityLost, ConstraintBroken, Contention, IllegalMove, PolicyRefusal, Refusal
from sovereign_agent.records import Claim, new_id

T = TypeVar("T")
Now = float | None

SHOP, RESEARCH = "shop", "research"
TTL_SECONDS = 90
MAX_TTL_SECONDS = 86_400
CRASH_LIMIT = 3
"""So many workers may be lost over one item; then it is parked."""

MAX_NAME_CHARACTERS = 200
MAX_TEXT_CHARACTERS = 100_000
"""The longest prompt, result, or message as JSON."""

MAX_BATCH = 1_000
MAX_GIVEN_BACK = 100
"""How many items one claim puts back into the queue, of each kind."""

MAX_COUNTED = 10_000
"""How far `count_open` counts."""

MAX_LOST_RACES = 5
FINAL = ("DONE", "BLOCKED", "CANCELED")

UNAVAILABLE = "authority marker is unavailable"
REPLACED = "runtime paused or replaced by restore"
SUPERSEDED = "worker claim expired or superseded"
DELEGATION_OVER = "Its delegation is over."

_ONE_PER_SESSION = re.compile("assistant_work_one_running_per_session|assistant_work.session")
_NUL_IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


# --- the fence --------------------------------------------------------------------------------------------


def assert_current(connection: Connection, claim: Claim, now: Now = None) -> int:
    """Raise AuthorityLost unless this claim may write, now; return the time it was judged by, in microseconds.

    Inside a transaction everything it rests on stays locked until the end. The categories: ``marker_*`` and
    ``control_missing``; ``paused`` and ``epoch_replaced``; ``claim_lost`` and ``delegation_ended``.
    """
    delegation = _delegation(connection, claim.id) if claim.role == RESEARCH else None
    control = connection.execute(
        """
        SELECT control.epoch, control.paused, held.expires_at, <now> AS now
          FROM (SELECT epoch, paused FROM assistant_control WHERE id = 1 <for share>) AS control LEFT JOIN
              (SELECT expires_at FROM assistant_work
                WHERE id = ? AND generation = ? AND owner = ? AND epoch = ? AND session = ? AND subject = ? AND role = ?
                  AND status = 'RUNNING' <for update>) AS held ON 1 = 1
        """,
        (claim.id, claim.generation, claim.owner, claim.epoch, claim.session, claim.subject, claim.role),
    ).fetchone()
    marker = read_marker(connection.authority)
    if control is None:
        raise _lost(UNAVAILABLE, "control_missing", "The ledger has no row that names its epoch.")
    if control["paused"] or control["epoch"] != marker or claim.epoch != control["epoch"]:
        raise _lost(REPLACED, "paused" if control["paused"] else "epoch_replaced", f"The claim is of {claim.epoch}.")
    # After the rows are ours: a wait must not make us judge by an old time.
    at = _at(connection, now, control["now"])
    if control["expires_at"] is None or control["expires_at"] <= at:
        raise _lost(SUPERSEDED, "claim_lost", f"Generation {claim.generation} of {claim.id} is not held any more.")
    if delegation and (delegation["deadline"] <= at or delegation["parent_status"] == "CANCELED"):
        raise _lost(SUPERSEDED, "delegation_ended", f"What {claim.id} was delegated for is over.")
    return at


def _delegation(connection: Connection, child_id: str) -> Row | None:
    """What a child stands on, its parent's row locked after the control row; None for an item that nobody delegated."""
    connection.lock("SELECT 1 FROM assistant_control <for share>")
    return connection.execute(
        """
        SELECT d.deadline, parent.status AS parent_status
          FROM assistant_delegations d JOIN assistant_work parent ON parent.id = d.parent_id
         WHERE d.child_id = ? <for share>
        """,
        (child_id,),
    ).fetchone()


def _lost(sentence: str, category: str, why: str) -> AuthorityLost:
    return AuthorityLost(
        sentence,
        category=category,
        why=f"{why} Nothing was written.",
        inspect="sovereign-agent assistant status",
        next_command="stop; whoever claims it next goes on from the transcript",
    )


# --- the queue --------------------------------------------------------------------------------------------


class Extras(TypedDict, total=False):
    """What can be said of new items: `subject` is what they are about, `control` lets them go first.

    Nobody gets them for the next `available_after` seconds, and `retry` may put each back `retries` times.
    """

    role: str
    subject: str
    control: bool
    available_after: float
    retries: int
    now: float | None


_EXTRAS = Extras.__annotations__.keys()
_SAID = f"What can be said of an item besides is {sorted(_EXTRAS)}."


def enqueue(db: Database, origin: str, session: str, prompt: str, **extras: Unpack[Extras]) -> str:
    """Put one turn into the queue and return its id. The same origin with the same content is the same item.

    `origin` names whatever caused it: a message's id, say. Raises IllegalMove: ``origin_taken`` for the same origin
    with other content, ``out_of_bounds``, ``invalid_text``.
    """
    return enqueue_many(db, [(origin, session, prompt)], **extras)[0]


def enqueue_many(db: Database, batch: Sequence[tuple[str, str, str]], **extras: Unpack[Extras]) -> list[str]:
    """`enqueue` a batch of (origin, session, prompt): all of it, or nothing."""
    with db.transaction() as connection:
        return enqueue_work(connection, batch, **extras)


def enqueue_work(connection: Connection, batch: Sequence[tuple[str, str, str]], **extras: Unpack[Extras]) -> list[str]:
    """`enqueue_many` inside the caller's transaction."""
    at = _at(connection, extras.get("now"))
    delay, retries = extras.get("available_after", 0), extras.get("retries", 0)
    common = (extras.get("role", SHOP), extras.get("subject", ""), extras.get("control", False))
    _require(len(batch) <= MAX_BATCH, "A batch has at most {} items.", MAX_BATCH)
    _require(extras.keys() <= _EXTRAS, _SAID)
    sound = retries >= 0 and all(prompt for _, _, prompt in batch)
    _require(sound, "An item has a prompt, and no fewer than 0 retries.")
    _require_names(common[0], common[1] or SHOP, *[name for origin, session, _ in batch for name in (origin, session)])
    _require_texts(*[prompt for _, _, prompt in batch])
    ends = (_later(at, delay) if delay else 0, retries, at)
    ids = [new_id("work") for _ in batch]
    added = connection.executemany(
        """
        INSERT INTO assistant_work (id, origin, session, prompt, role, subject, control, available_at, retries_left,
                                    created_at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (origin) DO NOTHING
        """,
        [(work_id, *item, *common, *ends) for work_id, item in zip(ids, batch, strict=True)],
    )
    return ids if added == len(batch) else [_known(connection, (*item, *common)) for item in batch]


def _known(connection: Connection, content: tuple[str, str, str, str, str, bool]) -> str:
    """The id of the item that has this origin and all of this content."""
    row = connection.execute(
        """
        SELECT id FROM assistant_work
         WHERE origin = ? AND session = ? AND prompt = ? AND role = ? AND subject = ? AND control = ?
        """,
        content,
    ).fetchone()
    if row is None:
        why = "An item of this origin is there already, with other content."
        raise IllegalMove(f"{content[0]} was not queued.", category="origin_taken", why=why)
    return str(row["id"])


# --- claims -----------------------------------------------------------------------------------------------


def is_waiting(connection: Connection, role: str = SHOP, *, now: Now = None) -> bool:
    """Whether a claim may find something: a look that locks nothing, so that it may be taken often."""
    found = connection.execute(
        """
        SELECT EXISTS (SELECT 1 FROM assistant_work w WHERE w.role = ? AND w.status = 'READY' AND w.available_at = 0)
               OR EXISTS (SELECT 1 FROM assistant_work l WHERE l.status = 'RUNNING' AND l.expires_at <= ?)
            OR EXISTS (SELECT 1 FROM assistant_work WHERE status = 'READY' AND available_at > 0 AND available_at <= ?)
        """,
        (role, *[_at(connection, now)] * 2),
    )
    return bool(found.rows[0][0])


def claim(db: Database, owner: str, *, ttl: float = TTL_SECONDS, now: Now = None, role: str = SHOP) -> Claim | None:
    """Take the right to work on the next item for `ttl` seconds; None when there is nothing to take.

    Raises PolicyRefusal (``paused``), AuthorityLost when marker and ledger disagree.
    """
    return next(iter(claim_many(db, owner, 1, ttl=ttl, now=now, role=role)), None)


def claim_many(
    db: Database, owner: str, limit: int, *, ttl: float = TTL_SECONDS, now: Now = None, role: str = SHOP
) -> list[Claim]:
    """`claim` up to `limit` items, each of another session."""
    _require_names(owner)
    _require(0 < ttl <= MAX_TTL_SECONDS, "A claim is for at most {} seconds.", MAX_TTL_SECONDS)
    _require(0 < limit <= MAX_BATCH, "One may claim 1 to {} items at once.", MAX_BATCH)

    def act(connection: Connection) -> list[Claim]:
        epoch, told = admit(connection)
        return _claim_admitted(connection, owner, limit, role, epoch, _at(connection, now, told), ttl)

    return _racing(db, act)


def _claim_admitted(  # noqa: PLR0917
    connection: Connection, owner: str, limit: int, role: str, epoch: str, at: int, ttl: float
) -> list[Claim]:
    """Claim where this epoch has been admitted, at this time, in this transaction.

    Raises ConstraintBroken when another claimant was first in a session.
    """
    heads = _heads(connection, role, limit, at)
    if not heads or heads[0]["due"]:
        _give_back(connection, at)
        heads = _heads(connection, role, limit, at)
    claims: list[Claim] = []
    while heads:
        # In the order of their sessions: two claimants of many must not wait for each other.
        for head in sorted(heads, key=lambda row: row["session"]):
            if head["deadline"] <= at or head["parent_status"] == "CANCELED":
                _settle(connection, head["id"], "canceled", at, "", result=DELEGATION_OVER)
            else:
                claims.append(_take(connection, head, owner, epoch, at, min(_later(at, ttl), head["deadline"])))
        heads = _heads(connection, role, limit - len(claims), at) if len(claims) < limit else []
    return claims


def _racing(db: Database, act: Callable[[Connection], T]) -> T:
    """Run `act` in a transaction, and anew when the index says that another claimant was first in a session."""
    for _ in range(MAX_LOST_RACES):
        try:
            with db.transaction() as connection:
                return act(connection)
        except ConstraintBroken as error:
            if not _ONE_PER_SESSION.search(error.why):
                raise
    raise Contention("Others were first in each session.", category="ledger_busy", next_command="repeat the call")


def _give_back(connection: Connection, at: int) -> None:
    """Put what is due back into the queue: items whose worker is lost, and items whose delay is over."""
    lost = connection.execute(
        """
        SELECT id, owner, losses FROM assistant_work WHERE status = 'RUNNING' AND expires_at <= ?
         ORDER BY expires_at LIMIT ? <for update> <skip locked>
        """,
        (at, MAX_GIVEN_BACK),
    )
    for row in lost:
        event = "lost" if row["losses"] + 1 < CRASH_LIMIT else "parked"
        evidence = f"Worker number {row['losses'] + 1} was lost over it: {row['owner']}."
        _settle(connection, row["id"], event, at, row["owner"], result=evidence)
    connection.execute(
        """
        UPDATE assistant_work SET available_at = 0
         WHERE seq IN (SELECT seq FROM assistant_work WHERE status = 'READY' AND available_at > 0 AND available_at <= ?
                        ORDER BY available_at LIMIT ? <for update> <skip locked>)
        """,
        (at, MAX_GIVEN_BACK),
    )


def _heads(connection: Connection, role: str, limit: int, at: int) -> list[Row]:
    """The next item of each session in which nothing runs, locked; what another claimant has locked is passed over.

    An item behind its session's head is nobody's candidate, so claimants spread over the sessions. `due` says whether
    there is anything to give back.
    """
    return connection.execute(
        """
        SELECT w.id, w.session, w.prompt, w.subject, w.role, w.generation,
               COALESCE((SELECT d.deadline FROM assistant_delegations d WHERE d.child_id = w.id), ?) AS deadline,
               (SELECT p.status FROM assistant_delegations d JOIN assistant_work p ON p.id = d.parent_id
                 WHERE d.child_id = w.id) AS parent_status,
               EXISTS (SELECT 1 FROM assistant_work WHERE status = 'RUNNING' AND expires_at <= ?)
               OR EXISTS (SELECT 1 FROM assistant_work
                           WHERE status = 'READY' AND available_at > 0 AND available_at <= ?) AS due
          FROM assistant_work w
         WHERE w.role = ? AND w.status = 'READY' AND w.available_at = 0
           AND NOT EXISTS (SELECT 1 FROM assistant_work r WHERE r.session = w.session AND r.status = 'RUNNING')
           AND w.seq = (SELECT h.seq FROM assistant_work h
                         WHERE h.session = w.session AND h.role = w.role AND h.status = 'READY' AND h.available_at = 0
                         ORDER BY h.control DESC, h.seq LIMIT 1)
         ORDER BY w.control DESC, w.seq LIMIT ? <for update> <skip locked>
        """,
        (LAST_MICROS, at, at, role, limit),
    ).fetchall()


def _take(connection: Connection, head: Row, owner: str, epoch: str, at: int, until: int) -> Claim:  # noqa: PLR0917
    connection.execute(
        """
        UPDATE assistant_work SET status = 'RUNNING', generation = generation + 1, owner = ?, epoch = ?, expires_at = ?
         WHERE id = ? AND status = 'READY'
        """,
        (owner, epoch, until, head["id"]),
    )
    generation = head["generation"] + 1  # the row has been locked since it was read
    detail = {"generation": generation, "session": head["session"], "epoch": epoch}
    journal.record(connection, "work.claimed", head["id"], actor=owner, at=at, detail=detail)
    return Claim(head["id"], head["session"], head["prompt"], generation, owner, epoch, head["subject"], head["role"])


# --- under a claim ----------------------------------------------------------------------------------------


def observe(db: Database, claim: Claim, message: dict[str, Any], *, now: Now = None) -> int:
    """Append one message to the item's transcript and return its number. Raises AuthorityLost, IllegalMove."""
    with db.transaction() as connection:
        return observe_work(connection, claim, message, now=now)


def observe_work(connection: Connection, claim: Claim, message: dict[str, Any], *, now: Now = None) -> int:
    """`observe` inside the caller's transaction."""
    return append_line(connection, claim, message, at=assert_current(connection, claim, now))


def append_line(connection: Connection, claim: Claim, message: dict[str, Any], *, at: int) -> int:
    """`observe_work` where `assert_current` has answered `at` in this very transaction."""
    added = connection.execute(
        "INSERT INTO assistant_transcript (work_id, generation, message, created_at) VALUES (?, ?, ?, ?) RETURNING seq",
        (claim.id, claim.generation, _message(message), at),
    )
    return int(added.rows[0]["seq"])


def renew(db: Database, claim: Claim, ttl: float = TTL_SECONDS, *, now: Now = None) -> float:
    """Hold on for `ttl` seconds from now, a child never beyond its deadline; return until when, since 1970.

    Raises AuthorityLost. A worker that cannot renew in time must take its claim for lost.
    """
    _require(0 < ttl <= MAX_TTL_SECONDS, "A claim is for at most {} seconds.", MAX_TTL_SECONDS)
    with db.transaction() as connection:
        at = assert_current(connection, claim, now)
        delegation = _delegation(connection, claim.id) if claim.role == RESEARCH else None
        until = min(_later(at, ttl), delegation["deadline"] if delegation else LAST_MICROS)
        connection.execute("UPDATE assistant_work SET expires_at = ? WHERE id = ?", (until, claim.id))
    return until / 1_000_000


def finish(db: Database, claim: Claim, status: str, result: str = "", *, now: Now = None) -> None:
    """End the item as DONE, BLOCKED or CANCELED. Raises AuthorityLost, IllegalMove."""
    with db.transaction() as connection:
        finish_work(connection, claim, status, result, now=now)


def finish_work(connection: Connection, claim: Claim, status: str, result: str = "", *, now: Now = None) -> int:
    """`finish` inside the caller's transaction; returns the time it was judged by, in microseconds."""
    _require(status in FINAL, "An item ends as one of {}.", FINAL)
    _require_texts(result)
    at = assert_current(connection, claim, now)
    _settle(connection, claim.id, status.lower(), at, claim.owner, result=result)
    return at


def finish_and_claim(
    db: Database, claim: Claim, status: str, result: str = "", *, ttl: float = TTL_SECONDS, now: Now = None
) -> Claim | None:
    """`finish`, and `claim` the next item for the same owner and role, in one commit."""
    _require(0 < ttl <= MAX_TTL_SECONDS, "A claim is for at most {} seconds.", MAX_TTL_SECONDS)

    def act(connection: Connection) -> list[Claim]:
        at = finish_work(connection, claim, status, result, now=now)  # by which the epoch was admitted as well
        return _claim_admitted(connection, claim.owner, 1, claim.role, claim.epoch, at, ttl)

    return next(iter(_racing(db, act)), None)


def release(db: Database, claim: Claim, *, available_after: float = 0, now: Now = None) -> None:
    """Give the item back unfinished: a worker that stops in good order is no loss. Raises AuthorityLost."""
    with db.transaction() as connection:
        at = assert_current(connection, claim, now)
        _settle(connection, claim.id, "released", at, claim.owner, available_after=available_after)


def retry(db: Database, claim: Claim, reason: str, *, available_after: float = 0, now: Now = None) -> bool:
    """Put an item that failed back into the queue; False, and it ends as BLOCKED, when it has no retry left.

    Raises AuthorityLost.
    """
    _require_texts(reason)
    with db.transaction() as connection:
        at = assert_current(connection, claim, now)
        again = get_work(connection, claim.id)["retries_left"] > 0
        event = "retried" if again else "blocked"
        _settle(connection, claim.id, event, at, claim.owner, result=reason, available_after=available_after)
    return again


def delegate(
    db: Database, claim: Claim, prompt: str, *, deadline: float, budget: int, origin: str = "", now: Now = None
) -> str:
    """Queue a child item of role research, in a session of its own, and return its id.

    Nobody works on it under a claim beyond `deadline` (seconds since 1970). It ends with its parent: whoever finishes
    or cancels that, cancels in the same transaction each child that is not finished. A parent whose worker is lost, or
    gives it back, is not at its end: whoever claims it next finds the children at work. `budget` is what a child may
    spend, in the units of whoever runs it. The same `origin` is the same child.

    Raises AuthorityLost; PolicyRefusal (``delegation_depth``) for a child's claim; IllegalMove.
    """
    if claim.role == RESEARCH:
        raise PolicyRefusal("What was delegated is not delegated further.", category="delegation_depth")
    origin = origin or new_id("delegation")
    with db.transaction() as connection:
        at, until = assert_current(connection, claim, now), _micros(deadline)
        _require(until > at and budget > 0, "A delegation has a deadline that is still to come, and a budget.")
        (child,) = enqueue_work(connection, [(origin, f"{claim.id}/{origin}", prompt)], role=RESEARCH, now=now)
        if _delegation(connection, child) is None:
            connection.execute(
                "INSERT INTO assistant_delegations (child_id, parent_id, deadline, budget, created_at)"
                " VALUES (?, ?, ?, ?, ?)",
                (child, claim.id, until, budget, at),
            )
            detail = {"parent": claim.id, "generation": claim.generation, "budget": budget}
            journal.record(connection, "work.delegated", child, actor=claim.owner, at=at, detail=detail)
    return child


# --- over the claims' heads -------------------------------------------------------------------------------


def cancel(db: Database, work_id: str, *, actor: str = "", now: Now = None) -> None:
    """Call an item off, a running one too, and each child with it: their owners' claims are lost.

    Raises Refusal (``work_missing``), IllegalMove when it is finished.
    """
    with db.transaction() as connection:
        connection.lock("SELECT 1 FROM assistant_work WHERE id = ? <for update>", (work_id,))
        item = get_work(connection, work_id)
        if item["status"] in FINAL:
            raise IllegalMove(f"{work_id} was not canceled.", category="illegal_move", why=f"It is {item['status']}.")
        _settle(connection, work_id, "canceled", _at(connection, now), actor, result=item["result"])


def revoke_all(connection: Connection, now: Now = None) -> dict[str, int]:
    """Take every claim away, as a restore must: what was RUNNING is READY, and each open item is a generation on."""
    at = _at(connection, now)
    running = connection.execute("SELECT id, owner FROM assistant_work WHERE status = 'RUNNING' <for update>").rows
    for row in running:
        _settle(connection, row["id"], "revoked", at, row["owner"])
    moved = connection.execute(
        "UPDATE assistant_work SET generation = generation + 1 WHERE status IN ('READY', 'PARKED')"
    )
    return {"work_revoked": len(running), "work_open": moved.rowcount}


def _settle(
    connection: Connection,
    work_id: str,
    event: str,
    at: int,
    actor: str,
    *,
    result: str = "",
    available_after: float = 0,
) -> None:
    """End whatever claim there is on an item, and say so: the one way out of RUNNING. The event says where to.

    The children of an item that ends are called off with it.
    """
    status = event.upper() if event.upper() in (*FINAL, "PARKED") else "READY"
    left = connection.execute(
        """
        UPDATE assistant_work
           SET status = ?, owner = NULL, epoch = NULL, expires_at = NULL, available_at = ?, losses = losses + ?,
               retries_left = retries_left - ?, result = ?, finished_at = ?
         WHERE id = ?
        RETURNING generation, session,
                  EXISTS (SELECT 1 FROM assistant_delegations d WHERE d.parent_id = assistant_work.id) AS delegated
        """,
        (
            status,
            _later(at, available_after) if available_after else 0,
            int(event in ("lost", "parked")),
            int(event == "retried"),
            result,
            at if status in FINAL else None,
            work_id,
        ),
    ).rows[0]
    detail = {"generation": left["generation"], "session": left["session"]}
    journal.record(connection, f"work.{event}", work_id, actor=actor, at=at, detail=detail)
    if left["delegated"] and status in FINAL:
        children = connection.execute(
            """
            SELECT id FROM assistant_work
             WHERE id IN (SELECT child_id FROM assistant_delegations WHERE parent_id = ?)
               AND status IN ('READY', 'RUNNING', 'PARKED') ORDER BY seq <for update>
            """,
            (work_id,),
        )
        for child in children:
            _settle(connection, child["id"], "canceled", at, actor, result=DELEGATION_OVER)


# --- looking ----------------------------------------------------------------------------------------------


def get_work(connection: Connection, work_id: str) -> Row:
    """One item as the ledger has it. Raises Refusal (``work_missing``)."""
    row = connection.execute("SELECT * FROM assistant_work WHERE id = ?", (work_id,)).fetchone()
    if row is None:
        raise Refusal(f"There is no item {work_id}.", category="work_missing", why="No row of this ledger has that id.")
    return row


def count_open(connection: Connection, *, limit: int = MAX_COUNTED) -> dict[str, int]:
    """How many items are not finished, by kind, each counted up to `limit`; `delayed` ones are ready later."""
    found = connection.execute(
        """
        SELECT (SELECT count(*) FROM (SELECT 1 FROM assistant_work WHERE status = 'RUNNING' LIMIT ?) a) running,
   (SELECT count(*) FROM (SELECT 1 FROM assistant_work WHERE status = 'READY' AND available_at = 0 LIMIT ?) b) ready,
   (SELECT count(*) FROM (SELECT 1 FROM assistant_work WHERE status = 'READY' AND available_at > 0 LIMIT ?) c) delayed,
               (SELECT count(*) FROM (SELECT 1 FROM assistant_work WHERE status = 'PARKED' LIMIT ?) d) parked
        """,
        (limit,) * 4,
    )
    return dict(found.rows[0])


def open_work(connection: Connection, *, limit: int = 100) -> list[Row]:
    """What is not finished, up to `limit` of each kind: RUNNING, PARKED, READY now, READY later."""
    return connection.execute(
        """
        SELECT * FROM (SELECT * FROM assistant_work WHERE status = 'RUNNING' LIMIT ?) AS a UNION ALL
        SELECT * FROM (SELECT * FROM assistant_work WHERE status = 'PARKED' LIMIT ?) AS b UNION ALL
        SELECT * FROM (SELECT * FROM assistant_work WHERE status = 'READY' AND available_at = 0 LIMIT ?) AS c UNION ALL
        SELECT * FROM (SELECT * FROM assistant_work WHERE status = 'READY' AND available_at > 0 LIMIT ?) AS d
        """,
        (limit,) * 4,
    ).rows


def transcript(connection: Connection, work_id: str, *, after: int = 0, limit: int = 1_000) -> list[Row]:
    """Up to `limit` lines of the item behind number `after`: seq, generation, the message as JSON, created_at."""
    sql = "SELECT * FROM assistant_transcript WHERE work_id = ? AND seq > ? ORDER BY seq LIMIT ?"
    return connection.execute(sql, (work_id, after, limit)).rows


# --- what is taken and what is not ------------------------------------------------------------------------


def _message(message: dict[str, Any]) -> str:
    """The message as JSON text that both engines hold alike."""
    if not isinstance(message, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - a model's own words come here
        raise IllegalMove("The message was not written.", category="invalid_value", why="A message is a JSON object.")
    try:
        text = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise IllegalMove("The message was not written.", category="invalid_value", why=str(error)) from error
    if "\\u0000" in text and _NUL_IN_JSON.search(text):
        raise IllegalMove("The message was not written.", category="invalid_text", why="It contains U+0000.")
    _require_texts(text)
    return text


def _require_names(*names: str) -> None:
    good = all(0 < len(name) <= MAX_NAME_CHARACTERS for name in names)
    _require(good, "A name has 1 to {} characters.", MAX_NAME_CHARACTERS)


def _require_texts(*texts: str) -> None:
    good = all(len(text) <= MAX_TEXT_CHARACTERS for text in texts)
    _require(good, "At most {} characters.", MAX_TEXT_CHARACTERS)


def _require(holds: bool, why: str, bound: object = None) -> None:  # noqa: FBT001
    if not holds:
        raise IllegalMove("That is outside the bounds of the queue.", category="out_of_bounds", why=why.format(bound))


def _at(connection: Connection, now: Now, told: int | None = None) -> int:
    """The time to judge by: the caller's, else what the server has told, else the ledger's own."""
    if now is not None:
        return _micros(now)
    return micros(connection.now()) if told is None else told


def _later(at: int, seconds: float) -> int:
    return min(at + _micros(seconds), LAST_MICROS)


def _micros(seconds: float) -> int:
    _require(0 <= seconds < LAST_MICROS / 1_000_000, "A time is in seconds since 1970, and a delay is not negative.")
    return round(seconds * 1_000_000)  # NaN did not pass
