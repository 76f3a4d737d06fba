"""Each hot statement walks live work, never history (hazard 56): the plans of the very statements that are run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from support import ACTOR, attempt_on, finish, new_assignment, recover, renew_attempt, run_of

from sovereign_agent import assistant_work, conversation, effects, fencing, journal, relay
from sovereign_agent.clock import ManualClock
from sovereign_agent.database import Database, Result, Value
from sovereign_agent.heartbeat import heartbeat_status
from sovereign_agent.records import Claim

HOUR = timedelta(hours=1)
FEW = 50
FINISHED = 5_000
HISTORY = (
    "INSERT INTO outcomes SELECT 'out_' || i, 't', 'd', '[]', 'o', '', 'ACCEPTED', i FROM n",
    "INSERT INTO sows SELECT 'sow_' || i, 'out_' || i, 's', 'operator', 'm', NULL, 'APPROVED', i FROM n",
    "INSERT INTO assignments SELECT 'asg_' || i, 'sow_' || i, ?, 'm', 'persistent', 'COMPLETED', NULL, i, i, 60 FROM n",
    (
        "INSERT INTO execution_attempts"
        " SELECT 'att_' || i, 'asg_' || i, ?, 'p', -i, -i, 'DONE', i, i, i, 0, '', '{}', i, '', 0 FROM n"
    ),
    "INSERT INTO receipts SELECT 'rcp_' || i, 'asg_' || i, 'att_' || i, ?, 'completed', '', 's', '{}', i FROM n",
    "INSERT INTO actor_leases SELECT 'actor_' || i, 'p', -i, i, 253402300799999999 FROM n",
    """INSERT INTO messages (id, sender, recipient, subject, body, state, claim_owner, fencing_token, claim_expires_at,
    deliveries, ready_at, created_at) SELECT 'msg_' || i, 'm', ?, 's', 'b', 'DONE', 'o', -i, i, 1, i, i FROM n""",
    "INSERT INTO events (at, kind, subject, actor, detail) SELECT i, 'k', 'asg_' || i, 'a', '{}' FROM n",
    """INSERT INTO assistant_work (id, origin, session, prompt, subject, role, control, status, generation, created_at,
    finished_at) SELECT 'work_' || i, 'o_' || i, 'lucy', 'p', '', 'shop', 0, 'DONE', 1, i, i FROM n""",
    """INSERT INTO assistant_transcript (work_id, generation, message, created_at)
    SELECT 'work_' || i, 1, '{}', i FROM n""",
    "INSERT INTO assistant_delegations SELECT 'work_' || (i + 1), 'work_' || i, i, 1, i FROM n WHERE i < 5000",
    """INSERT INTO effects (operation_id, work_id, generation, epoch, tool, arguments, arguments_sha256, created_at)
    SELECT 'op_' || i, 'work_' || i, 1, 'e', 't', '{}', '', i FROM n""",
    """INSERT INTO effect_ends (operation_id, outcome, actor, reason, created_at)
    SELECT 'op_' || i, 'done', '', '', i FROM n""",
    "INSERT INTO heartbeats (at, source, process_identity, host) SELECT i, 's', 'p', 'h' FROM n",
)
TABLES = [statement.split()[2] for statement in HISTORY]


@pytest.fixture
def old_ledger(db: Database) -> Database:
    """A ledger with much history and little work."""
    numbers = f"WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {FINISHED}) "
    with db.transaction() as connection:
        for statement in HISTORY:
            connection.execute(numbers + statement, (ACTOR,) * statement.count("?"))
    db.connection.execute("ANALYZE")
    return db


class Undo(Exception):
    """What was done inside the transaction is not meant to last."""


@dataclass
class Process:
    """As much of an organization as a heartbeat asks for."""

    db: Database
    process_identity: str = "proc_red"


def statements_of(db: Database, act: Callable[[], Any]) -> list[tuple[str, tuple[Value, ...]]]:
    """The statements by which an act looks for rows, with their parameters."""
    connection = db.connection
    execute = connection.execute
    seen: list[tuple[str, tuple[Value, ...]]] = []

    def noting(sql: str, params: Sequence[Value] = ()) -> Result:
        seen.append((sql, tuple(params)))
        return execute(sql, params)

    connection.execute = noting  # type: ignore[method-assign]
    try:
        act()
    finally:
        del connection.execute
    return [(sql, params) for sql, params in seen if "SELECT" in sql or "WHERE" in sql]


def walks_through_history(db: Database, sql: str, params: tuple[Value, ...]) -> list[str]:
    """The lines of a statement's plan that read a table with history from one end to the other."""
    if db.engine == "sqlite":
        plan = [str(row[3]) for row in db.connection.execute(f"EXPLAIN QUERY PLAN {sql}", params)]
        live = {str(row[0]) for row in db.connection.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%WHERE%'")}
        plan = [line for line in plan if line.split()[-1] not in live]  # a partial index holds nothing else
        newest_first = sql.endswith("ORDER BY seq DESC LIMIT 1") and len(plan) == 1  # no sort: it stops at once
        return [line for line in plan if line.split()[0] == "SCAN" and line.split()[1] in TABLES and not newest_first]
    plan = []
    with suppress(Undo), db.transaction() as connection:  # ANALYZE really runs it, to tell how many rows it looked at
        for row in connection.execute(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {sql}", params):
            plan.append(str(row[0]).strip())
        raise Undo
    return [
        line
        for line in plan
        if any(f"Seq Scan on {table}" in line for table in TABLES)
        or int((re.findall(r"Rows Removed by Filter: (\d+)", line) or ["0"])[0]) > FEW
    ]


def walking(db: Database, acts: dict[str, Callable[[], Any]]) -> dict[str, list[str]]:
    """The statements of these acts that walk through history, and how."""
    return {
        f"{name}: {sql}": walks
        for name, act in acts.items()
        for sql, params in statements_of(db, act)
        if (walks := walks_through_history(db, sql, params))
    }


def test_hazard_56_no_hot_statement_walks_through_history(old_ledger: Database, clock: ManualClock) -> None:
    db = old_ledger
    attempt, doomed = run_of(db, clock), run_of(db, clock)
    lease = fencing.current_actor_lease(db, ACTOR)
    message = relay.send(db, "master", ACTOR, "s", "b", clock=clock)
    assert lease
    acts: dict[str, Callable[[], Any]] = {
        "expired leases": lambda: fencing.expired_actor_leases(db, clock),
        "expired attempts": lambda: fencing.expired_execution_attempts(db, clock),
        "workspaces to reclaim": lambda: fencing.attempts_to_reclaim(db.connection, after="", limit=50),
        "active attempt": lambda: fencing.active_attempt(db.connection, attempt.assignment_id),
        "inbox": lambda: relay.inbox(db, ACTOR, clock=clock),
        "claim": lambda: relay.claim(db, message.id, ACTOR, clock=clock),
        "dead letters": lambda: relay.dead_letters(db.connection, ACTOR),
        "sweep": lambda: relay.sweep_expired_claims(db, clock),
        "newest heartbeat": lambda: heartbeat_status(Process(db), clock=clock),
        "renewal of a lease": lambda: fencing.acquire_or_renew_actor_lease(db, ACTOR, "proc_red", clock=clock),
        "renewal of an attempt": lambda: renew_attempt(db, attempt, clock),
        "acquisition of an attempt": lambda: attempt_on(db, new_assignment(db, clock=clock).id, lease, clock),
        "terminal write": lambda: finish(db, attempt, clock),
        "recovery": lambda: (clock.advance(HOUR), recover(db, doomed, clock)),
        "release": lambda: fencing.release_actor_lease(db, ACTOR, "proc_red", lease.fencing_token),
        "receipts": lambda: journal.receipts_of(db.connection, attempt.assignment_id),
        "receipt": lambda: journal.receipt_of_attempt(db.connection, attempt.id),
        "events": lambda: journal.events_of(db.connection, attempt.assignment_id),
    }
    assert walking(db, acts) == {}


def test_no_hot_statement_of_the_assistant_walks_through_history(old_ledger: Database) -> None:
    db = old_ledger
    for n in range(6):
        assistant_work.enqueue(db, f"mail:{n}", f"session {n % 2}" if n < 4 else f"other {n}", "p")
    claims = assistant_work.claim_many(db, ACTOR, 3)
    later = time.time() + 60
    assistant_work.delegate(db, claims[0], "p", deadline=later, budget=1, origin="call")
    child = assistant_work.claim(db, ACTOR, role="research")
    assert child
    acts: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: assistant_work.enqueue(db, "mail:0", "session 0", "p"),
        "claim": lambda: assistant_work.claim(db, ACTOR),
        "fence": lambda: assistant_work.assert_current(db.connection, claims[0]),
        "fence of a child": lambda: assistant_work.assert_current(db.connection, child),
        "observe": lambda: assistant_work.observe(db, child, {}),
        "renew": lambda: assistant_work.renew(db, child),
        "delegate": lambda: assistant_work.delegate(db, claims[0], "p", deadline=later, budget=1),
        "cancel": lambda: assistant_work.cancel(db, child.id),
        "finish and claim": lambda: assistant_work.finish_and_claim(db, claims[0], "DONE"),
        "release": lambda: assistant_work.release(db, claims[1]),
        "retry": lambda: assistant_work.retry(db, claims[2], "r"),
        "count": lambda: assistant_work.count_open(db.connection),
        "open work": lambda: assistant_work.open_work(db.connection),
        "unanswered": lambda: conversation.unanswered(db.connection),
        "transcript": lambda: assistant_work.transcript(db.connection, child.id),
    }
    assert walking(db, acts) == {}


def test_no_hot_statement_about_effects_walks_through_history(old_ledger: Database) -> None:
    db = old_ledger

    def intend(operation_id: str) -> None:
        claim = Claim("work_1", "session", "prompt", 1, "owner", "e", "", "shop")
        with db.transaction() as connection:
            effects.intend(connection, operation_id, claim, tool="order", arguments="{}", at=1)

    def settle(operation_id: str, outcome: str) -> None:
        with db.transaction() as connection:
            effects.settle(connection, operation_id, outcome, at=1)

    intend("op_a")
    db.connection.execute("ANALYZE")  # of a table that was never filled PostgreSQL expects thousands of rows
    acts: dict[str, Callable[[], Any]] = {
        "intend": lambda: intend("op_b"),
        "settle": lambda: settle("op_a", "done"),
        "settle unknown": lambda: settle("op_b", "unknown"),
        "unsettled": lambda: effects.unsettled(db.connection),
        "reconcile": lambda: effects.reconcile(db, "op_b", "done", actor="a", reason="r"),
    }
    assert walking(db, acts) == {}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM messages WHERE body = ?",
        "SELECT id FROM execution_attempts WHERE process_identity = ? AND status = 'DONE'",
        "SELECT id FROM assistant_work WHERE session = ?",
        "SELECT seq FROM effects WHERE work_id = ?",
        "SELECT at FROM heartbeats WHERE host = ? ORDER BY at DESC LIMIT 1",
    ],
)
def test_a_statement_that_walks_through_history_is_noticed(old_ledger: Database, sql: str) -> None:
    assert walks_through_history(old_ledger, sql, ("x",))
