"""Figures: how soon a death is in the ledger, and how often a living worker loses what it holds.

    from SIGKILL to FAILED    of each worker that was killed with an attempt in its hands: from the kill, by this
                              machine's clock, to the time of the ``worker_lost`` receipt that ends the attempt, by
                              the ledger's. It includes what was left of the attempt's time to live.
    false losses              attempts that ended as ``worker_lost`` although their worker lived and had not been
                              signalled, and nobody had taken the ledger or its epoch away meanwhile. Counted against
                              all attempts, and against the hours for which attempts were held.

Both are of a ledger under torture, where supervisors are killed and the ledger is withheld, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sovereign_agent.database import Connection
from sovereign_agent.journal import WORKER_LOST

MICROSECONDS = 1_000_000


@dataclass(slots=True)
class Lifetime:
    """One process, as the executioner knows it. Times are microseconds since 1970.

    `touched_at` is when it was first signalled in any way; one with a hardship is touched from its beginning on.
    """

    pid: int
    began_at: int
    touched_at: float = math.inf
    killed_at: float = math.inf


def measured(
    connection: Connection, lifetimes: Iterable[Lifetime], withheld: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Both figures. `withheld` are the spans in which the ledger, or its epoch, was taken from everybody."""
    of_pid: dict[int, list[Lifetime]] = {}
    for lifetime in lifetimes:
        of_pid.setdefault(lifetime.pid, []).append(lifetime)
    waits: list[float] = []
    attempts, held, false = 0, 0, 0
    for row in connection.execute(
        """
        SELECT e.process, e.acquired_at, r.created_at, r.failure_category
          FROM execution_attempts e JOIN receipts r ON r.attempt_id = e.id
        """
    ):
        begun, ended = row["acquired_at"], row["created_at"]
        earlier = [life for life in of_pid.get(json.loads(row["process"])["pid"], []) if life.began_at <= begun]
        if not earlier:
            continue
        worker = max(earlier, key=lambda life: life.began_at)
        attempts, held = attempts + 1, held + ended - begun
        if row["failure_category"] != WORKER_LOST:
            continue
        if begun <= worker.killed_at <= ended:
            waits.append((ended - worker.killed_at) / MICROSECONDS)
        elif worker.touched_at > ended and not any(since <= ended and begun <= until for since, until in withheld):
            false += 1
    hours = held / MICROSECONDS / 3600
    return {
        "kill_to_failed": {"count": len(waits), "p50": _quantile(waits, 0.5), "p99": _quantile(waits, 0.99)},
        "false_losses": {"count": false, "attempts": attempts, "hours_held": round(hours, 4)},
    }


def _quantile(values: list[float], share: float) -> float | None:
    """The smallest value that so large a share of the values does not exceed."""
    ordered = sorted(values)
    return round(ordered[math.ceil(share * len(ordered)) - 1], 3) if ordered else None
