"""Aftermath: what is asked once everybody is dead.

Whoever asks has done none of the work. Authority runs out, a supervisor's ticks come to an end, and then the ledger
is compared with itself, with the disk, with what the workers were told, and with the processes of this machine.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from sovereign_agent import journal, supervisor, workspace
from sovereign_agent.clock import micros, monotonic
from sovereign_agent.organization import Organization
from sovereign_agent.testing.invariants import violations
from sovereign_agent.testing.workload import Witness

PATIENCE_SECONDS = 15.0
PAUSE_SECONDS = 0.1


def findings(org: Organization, witness: Witness) -> list[str]:
    """Every lie that was found, a sentence each."""
    return [
        *_still_held(org),
        *violations(org.db.connection),
        *_faults_of_our_own(org),
        *_lies_on_disk(org),
        *_broken_answers(org, witness),
        *_programs_left(org.root),
    ]


def _still_held(org: Organization) -> list[str]:
    """Tick until nobody holds anything and there is nothing left to recover, or patience ends."""
    deadline = monotonic() + PATIENCE_SECONDS
    while True:
        report = supervisor.tick(org)
        held = org.db.connection.execute(
            """
            SELECT id FROM execution_attempts WHERE status = 'ACTIVE' OR workspace_open = 1
             UNION ALL SELECT id FROM messages WHERE state = 'CLAIMED'
             UNION ALL SELECT actor_id FROM actor_leases WHERE expires_at > ?
            """,
            (micros(org.db.now()),),
        ).fetchall()
        if not held and not report.recovered_assignments:
            return []
        if monotonic() > deadline:
            return [*(f"{row[0]} is still held, or still to be dealt with." for row in held), *report.problems]
        time.sleep(PAUSE_SECONDS)


def _faults_of_our_own(org: Organization) -> list[str]:
    """Runs that failed neither by their program nor by a signal, but inside this package."""
    receipts = org.db.connection.execute("SELECT id, summary FROM receipts WHERE failure_category = 'internal_error'")
    return [f"Receipt {row[0]} tells of a fault of our own: {row[1]}" for row in receipts]


def _lies_on_disk(org: Organization) -> Iterator[str]:
    """Receipts on disk that are not the ledger's, ended attempts without one, and folders that are no run's."""
    attempts = org.db.connection.execute("SELECT id, status FROM execution_attempts").fetchall()
    for attempt_id, status in attempts:
        folder = workspace.locate(org.root, attempt_id).path
        receipt = journal.receipt_of_attempt(org.db.connection, attempt_id)
        written = folder / "receipt.json"
        if not written.exists():
            if status != "ACTIVE":
                yield f"Attempt {attempt_id} has ended, and there is no {written}."
        elif receipt is None or json.loads(written.read_bytes()) != json.loads(journal.receipt_json(receipt)):
            yield f"{written} is not what the ledger has."
        elif hashlib.sha256(written.read_bytes()).hexdigest() not in (folder / "receipt.json.sha256").read_text():
            yield f"{written} has not the sum that stands beside it."
    known = {str(attempt_id) for attempt_id, _ in attempts}
    for folder in (org.root / ".sovereign" / "runs").glob("*"):
        if folder.name.removesuffix(".lock") not in known:
            yield f"{folder} belongs to no attempt."


def _broken_answers(org: Organization, witness: Witness) -> Iterator[str]:
    """What a worker was told, and the ledger does not know."""
    connection = org.db.connection
    for fact in witness.told("receipt"):
        found = connection.execute(
            """
            SELECT 1 FROM receipts r JOIN execution_attempts e ON e.id = r.attempt_id
             WHERE r.id = ? AND e.id = ? AND e.process_identity = ? AND e.status = 'DONE'
            """,
            (fact["id"], fact["attempt"], fact["process"]),
        )
        if not found.rows:
            yield f"Process {fact['process']} was given receipt {fact['id']}, which is not that of a run of its own."
    for fact in witness.told("settled"):
        found = connection.execute(
            "SELECT 1 FROM messages WHERE id = ? AND fencing_token = ? AND state = ?",
            (fact["id"], fact["token"], fact["state"]),
        )
        if not found.rows:
            yield f"Message {fact['id']} became {fact['state']} under token {fact['token']}, but not in the ledger."
    for fact in witness.told("accepted"):
        if not connection.execute("SELECT 1 FROM acceptances WHERE outcome_id = ?", (fact["id"],)).rows:
            yield f"Outcome {fact['id']} was accepted, but not in the ledger."


def _programs_left(root: Path) -> list[str]:
    """Programs that still stand in the folder of a run: each should have ended with its worker."""
    deadline, runs = monotonic() + PATIENCE_SECONDS, root / ".sovereign" / "runs"
    while True:
        left: list[str] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if Path(process.cwd()).is_relative_to(runs):
                    left.append(f"Process {process.pid} ({process.name()}) is still running in {process.cwd()}.")
        if not left or monotonic() > deadline:
            return left
        time.sleep(PAUSE_SECONDS)
