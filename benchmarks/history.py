"""What a finished history costs: `tick`, `claim` and `inbox` on an empty ledger and on a full one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from sovereign_agent import outcomes, relay, supervisor
from sovereign_agent.organization import Organization

CHUNK = 20_000
REPEATS = 200
FILL = {
    "sows": """
        INSERT INTO sows (id, outcome_id, scope, role, created_by, state, created_at)
        WITH RECURSIVE n (i) AS (SELECT CAST(? AS BIGINT) UNION ALL SELECT i + 1 FROM n WHERE i < ?)
        SELECT 'sow_' || i, ?, 'past', 'operator', 'master-course', 'APPROVED', 1 FROM n
    """,
    "assignments": """
        INSERT INTO assignments (id, sow_id, actor_id, planner_id, workspace_policy, state, created_at, finished_at)
        WITH RECURSIVE n (i) AS (SELECT CAST(? AS BIGINT) UNION ALL SELECT i + 1 FROM n WHERE i < ?)
        SELECT 'asg_' || i, 'sow_' || i, 'operator-course', 'master-course', 'persistent', 'COMPLETED', 1, 2 FROM n
    """,
    "attempts": """
        INSERT INTO execution_attempts (id, assignment_id, actor_id, process_identity, fencing_token,
               actor_lease_fencing_token, status, acquired_at, expires_at, deadline, workspace_open)
        WITH RECURSIVE n (i) AS (SELECT CAST(? AS BIGINT) UNION ALL SELECT i + 1 FROM n WHERE i < ?)
        SELECT 'att_' || i, 'asg_' || i, 'operator-course', 'proc_past', -i, -i, 'DONE', 1, 2, 2, 0 FROM n
    """,
    "messages": """
        INSERT INTO messages (id, sender, recipient, subject, body, state, claim_owner, fencing_token,
               claim_expires_at, deliveries, ready_at, created_at)
        WITH RECURSIVE n (i) AS (SELECT CAST(? AS BIGINT) UNION ALL SELECT i + 1 FROM n WHERE i < ?)
        SELECT 'msg_' || i, 'master-course', 'operator-course', 's', 'b', 'DONE', 'operator-course', -i, 2, 1, 1, 1
          FROM n
    """,
}


def fill(org: Organization, count: int) -> None:
    """Write `count` finished assignments, attempts and messages, by hand: only their number matters here."""
    outcome = org.create_outcome("the past", "over", [], "principal-human")
    for start in range(1, count + 1, CHUNK):
        end = min(start + CHUNK - 1, count)
        with org.db.immediate() as connection:
            for table, sql in FILL.items():
                connection.execute(sql, (start, end, outcome.id) if table == "sows" else (start, end))
    # What a server does in its own time is done now: else its clean-up after the filling would be measured.
    org.db.connection.execute("VACUUM ANALYZE" if org.db.engine == "postgresql" else "ANALYZE")


def milliseconds(act: Callable[[], object]) -> float:
    """The median wall time of one call."""
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1000, 3)


def costs(org: Organization) -> dict[str, float]:
    """One tick, one inbox of ten messages, one claim."""
    waiting = [relay.send(org.db, "master-course", "operator-course", "s", "b").id for _ in range(REPEATS + 10)]
    claims = iter(waiting)
    return {
        "tick": milliseconds(lambda: supervisor.tick(org)),
        "inbox": milliseconds(lambda: relay.inbox(org.db, "operator-course", limit=10)),
        "claim": milliseconds(lambda: relay.claim(org.db, next(claims), "operator-course")),
        "open outcomes": milliseconds(lambda: outcomes.open_outcomes(org.db.connection)),
    }


def growth(org: Organization, finished: int) -> dict[str, Any]:
    """The same acts before and after `finished` assignments of history, and how many times dearer they got."""
    before = costs(org)
    fill(org, finished)
    after = costs(org)
    return {
        name: {"empty_ms": before[name], "full_ms": after[name], "times": round(after[name] / before[name], 2)}
        for name in before
    }
