"""Aftermath: what is asked once everybody is dead.

Whoever asks has done none of the work. What an operator has left half-way is ended; authority runs out, a
supervisor's ticks come to an end, and then the ledger is compared with itself, with the disk, with what the workers
were told, and with the processes of this machine. A restore takes back what somebody was told before it: that must
then stand in the copy of what it has replaced.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil

from sovereign_agent import assistant_work, configuration, journal, supervisor, workspace
from sovereign_agent.clock import micros, monotonic
from sovereign_agent.database import LEDGER_NAME, Connection, Database
from sovereign_agent.organization import Organization
from sovereign_agent.testing import operations
from sovereign_agent.testing.checker import breaches
from sovereign_agent.testing.workload import Witness

PATIENCE_SECONDS = 15.0
PAUSE_SECONDS = 0.1
COPIES = (".before", ".undone")
"""How the copies are called that a restore and a rollback keep of what they replace."""


def mended(root: Path) -> Organization:
    """The organization, once what its operator has left half-way is ended."""
    url = configuration.load(root).ledger.url
    with closing(Database(url or root / LEDGER_NAME, root=root, create=False, authority_required=False)) as db:
        operations.bring_to_order(db)
    return Organization(root)


def findings(org: Organization, witness: Witness) -> list[str]:
    """Every lie that was found, a sentence each."""
    held = _still_held(org)
    with ExitStack() as opened:
        replaced = [
            opened.enter_context(closing(Database(copy, create=False, read_only=True))).connection
            for copy in (org.root / LEDGER_NAME).parent.glob("*.restore_*.*")
            if copy.suffix in COPIES
        ]
        known = [org.db.connection, *replaced]
        return [
            *held,
            *breaches(org.db.connection, at_rest=True),
            *_faults_of_our_own(org),
            *_lies_on_disk(org, known),
            *_broken_answers(known, witness),
            *_deeds_not_done_once(org),
            *_programs_left(org.root),
        ]


def _still_held(org: Organization) -> list[str]:
    """Tick until nobody holds anything and there is nothing left to recover, or patience ends."""
    deadline = monotonic() + PATIENCE_SECONDS
    while True:
        report = supervisor.tick(org)
        for claim in assistant_work.claim_many(org.db, "aftermath", 100):  # which gives back what nobody works on
            assistant_work.release(org.db, claim)
        held = org.db.connection.execute(
            """
            SELECT id FROM execution_attempts WHERE status = 'ACTIVE' OR workspace_open = 1
             UNION ALL SELECT id FROM messages WHERE state = 'CLAIMED'
             UNION ALL SELECT id FROM assistant_work WHERE status = 'RUNNING'
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


def _lies_on_disk(org: Organization, ledgers: list[Connection]) -> Iterator[str]:
    """Receipts on disk that no ledger has, ended attempts without one, and folders that are no run's.

    After a restore a folder may hold what was true before it: a restore changes the ledger, and no folder.
    """
    attempts = org.db.connection.execute("SELECT id, status FROM execution_attempts").fetchall()
    for attempt_id, status in attempts:
        folder = workspace.locate(org.root, attempt_id).path
        receipts = [journal.receipt_of_attempt(each, attempt_id) for each in ledgers]
        known = [json.loads(journal.receipt_json(receipt)) for receipt in receipts if receipt]
        written = folder / "receipt.json"
        if not written.exists():
            if status != "ACTIVE":
                yield f"Attempt {attempt_id} has ended, and there is no {written}."
        elif json.loads(written.read_bytes()) not in known:
            yield f"{written} is not what the ledger has."
        elif hashlib.sha256(written.read_bytes()).hexdigest() not in (folder / "receipt.json.sha256").read_text():
            yield f"{written} has not the sum that stands beside it."
    known_ids = {str(row[0]) for each in ledgers for row in each.execute("SELECT id FROM execution_attempts")}
    for folder in (org.root / ".sovereign" / "runs").glob("*"):
        if folder.name.removesuffix(".lock") not in known_ids:
            yield f"{folder} belongs to no attempt."


def _broken_answers(ledgers: list[Connection], witness: Witness) -> Iterator[str]:
    """What somebody was told, and no ledger knows."""

    def known(query: str, *facts: str | int) -> bool:
        return any(each.execute(query, facts).rows for each in ledgers)

    run = """
        SELECT 1 FROM receipts r JOIN execution_attempts e ON e.id = r.attempt_id
         WHERE r.id = ? AND e.id = ? AND e.process_identity = ? AND e.status = 'DONE'
        """
    for fact in witness.told("receipt"):
        if not known(run, fact["id"], fact["attempt"], fact["process"]):
            yield f"Process {fact['process']} was given receipt {fact['id']}, which is not that of a run of its own."
    settled = "SELECT 1 FROM messages WHERE id = ? AND fencing_token = ? AND state = ?"
    for fact in witness.told("settled"):
        if not known(settled, fact["id"], fact["token"], fact["state"]):
            yield f"Message {fact['id']} became {fact['state']} under token {fact['token']}, but not in the ledger."
    for fact in witness.told("accepted"):
        if not known("SELECT 1 FROM acceptances WHERE outcome_id = ?", fact["id"]):
            yield f"Outcome {fact['id']} was accepted, but not in the ledger."
    for fact in witness.told("asked"):
        if not known("SELECT 1 FROM assistant_work WHERE id = ?", fact["id"]):
            yield f"Item {fact['id']} was queued, but not in the ledger."


def _deeds_not_done_once(org: Organization) -> Iterator[str]:
    """Items of the assistant of which a step was taken twice, or of which one is missing at the end."""
    found = org.db.connection.execute(
        """
        SELECT w.id, count(d.step) AS taken, count(DISTINCT d.step) AS different
          FROM assistant_work w LEFT JOIN torture_deeds d ON d.work_id = w.id
         GROUP BY w.id, w.status
        HAVING count(d.step) <> count(DISTINCT d.step) OR (w.status = 'DONE' AND count(d.step) <> ?)
        """,
        (operations.STEPS,),
    )
    for row in found:
        yield f"Of item {row['id']} {row['taken']} steps were taken, {row['different']} of them different."


def _programs_left(root: Path) -> list[str]:
    """Programs that still stand in the folder of a run: each should have ended with its worker."""
    deadline, runs = monotonic() + PATIENCE_SECONDS, root / ".sovereign" / "runs"
    while True:
        left: list[str] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # the second: a process may stand deeper than a path is long
                if Path(process.cwd()).is_relative_to(runs):
                    left.append(f"Process {process.pid} ({process.name()}) is still running in {process.cwd()}.")
        if not left or monotonic() > deadline:
            return left
        time.sleep(PAUSE_SECONDS)
