"""`sovereign-agent demo crash`: the product in twenty seconds, with nothing simulated.

Real worker processes of this program, real signals, a real supervisor process, a real clock, and leases that
are short because the demo's own `sovereign.toml` says so. The scenes share one statement of work:

    1. a worker is killed with SIGKILL after its program has left a report that says "completed"
    2. a worker is stopped with SIGSTOP until it has been recovered, then continued
    3. an explicit retry is completed, verified, reviewed and accepted

What is printed was read from the ledger. This room decides nothing, and is no test: it shows what happened,
and exits 1 if that is not what it promises.
"""

from __future__ import annotations

import json as json_text
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

import tomlkit
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sovereign_agent import fencing, journal, outcomes, supervisor, workspace
from sovereign_agent.clock import monotonic
from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.records import Assignment, AssignmentState
from sovereign_agent.workspace import Workspace

T = TypeVar("T")

ACTOR_LEASE_SECONDS = 2.0
EXECUTION_ATTEMPT_SECONDS = 3.0
DEADLINE_SECONDS = 60.0
"""No scene may take longer: a demo that hangs shows nothing."""

PLANTED_REPORT = {"status": "completed", "summary": "All done, says a program whose worker never came back."}
HONEST_REPORT = {"status": "completed", "summary": "The till agrees with the book.", "deliverables": ["till.txt"]}
PROVIDERS: dict[str, list[dict[str, Any]]] = {
    "dies-in-the-middle": [{"report": PLANTED_REPORT}, {"touch": "report-is-there"}, {"sleep": DEADLINE_SECONDS}],
    "oversleeps": [{"wait_for": "go-on", "seconds": DEADLINE_SECONDS}, {"report": PLANTED_REPORT}],
    "works": [{"write": "till.txt", "text": "counted: 412.50\n"}, {"report": HONEST_REPORT}],
}
CANONICAL_TABLES = {
    "events": "SELECT * FROM events",
    "receipts": "SELECT * FROM receipts",
    "evidence": "SELECT * FROM evidence",
    "outcomes": "SELECT * FROM outcomes",
    "sows": "SELECT * FROM sows",
    "assignments": "SELECT * FROM assignments",
    "execution_attempts": "SELECT * FROM execution_attempts",
}


def main(*, json: bool, ledger: str, root: Path | None) -> int:
    """Run the demo and print it. Returns 0 when everything promised was seen, else 1.

    Args:
        json: print one JSON document at the end instead of the story.
        ledger: a ``postgresql://`` URL, or empty for SQLite.
        root: where the demo's organization is made, and kept; a temporary folder, removed, when None.
    """
    console = Console(quiet=json, highlight=False)
    folder = root or Path(tempfile.mkdtemp(prefix="sovereign-demo-"))
    try:
        report = CrashDemo(folder, ledger, console).play()
    finally:
        if root is None:
            shutil.rmtree(folder, ignore_errors=True)
    if json:
        sys.stdout.write(json_text.dumps(report, indent=2) + "\n")
    return 0 if _as_promised(report) else 1


def _as_promised(report: dict[str, Any]) -> bool:
    return (
        report["worker_reached_running"]
        and report["state_after_kill"] == "RUNNING"
        and report["recovered"]["failure_category"] == supervisor.WORKER_LOST
        and report["planted_report_kept"]
        and report["zombie"]["refusal"] == "execution_attempt_lost"
        and report["zombie"]["rows_written"] == 0
        and report["second_tick_recovered"] == 0
        and report["retry"]["outcome_state"] == "ACCEPTED"
    )


@dataclass
class CrashDemo:
    """The cast: one organization, one supervisor process, three workers one after another."""

    folder: Path
    ledger: str
    console: Console
    started: float = field(default_factory=monotonic)
    workers: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def play(self) -> dict[str, Any]:
        """All scenes, in order; what was seen, as the JSON that `--json` prints."""
        org = Organization.init(self.folder, ledger_url=self.ledger)
        _configure(self.folder)
        org.close()
        org = Organization(self.folder)
        self.say(f"An organization on {org.db.engine}, and its supervisor, a process of its own.")
        self.say(f"A lease lasts {ACTOR_LEASE_SECONDS:g} s here, an attempt {EXECUTION_ATTEMPT_SECONDS:g} s.")
        outcome = org.create_outcome("Close the shop", "The till is counted.", [], "principal-human")
        org.activate(outcome.id, "principal-human")
        sow = org.create_sow(outcome.id, "Count the till", "operator", "master-course")
        org.ready_sow(sow.id)
        try:
            with _supervisor(self.folder):
                report = self.kill_a_worker(org, sow.id)
                report["zombie"] = self.wake_a_zombie(org, sow.id)
            report["second_tick_recovered"] = len(supervisor.tick(org).recovered_assignments)
            self.scene(f"Another tick finds nothing left to recover: {report['second_tick_recovered']}.")
            report["retry"] = self.retry(org, outcome.id, sow.id)
            return report
        finally:
            org.close()
            for worker in self.workers:
                with suppress(ProcessLookupError):
                    worker.kill()
                worker.wait()

    def kill_a_worker(self, org: Organization, sow_id: str) -> dict[str, Any]:
        """Scene 1: SIGKILL in the middle, a planted report, and the recovery."""
        assignment, worker = self.start_worker(org, sow_id, "dies-in-the-middle")
        run = self.await_running(org, assignment.id)
        _eventually((run.path / "report-is-there").exists, "the program's report")
        self.scene(f"A worker runs {assignment.id}. Its program has just left a report that says: completed.")
        killed_at = monotonic()
        worker.kill()
        worker.wait()
        after_kill = outcomes.get_assignment(org.db.connection, assignment.id)
        held = after_kill.current_execution_attempt
        self.say(f"SIGKILL. The worker is gone; the ledger still says {after_kill.state}, attempt {held}.")
        self.await_end(org, assignment.id)
        seconds = round(monotonic() - killed_at, 2)
        ended = outcomes.get_assignment(org.db.connection, assignment.id)
        receipt = journal.receipts_of(org.db.connection, assignment.id)[-1]
        kept = json_text.loads((run.out / "report.json").read_text())["status"] == "completed"
        self.say(f"{seconds} s later the supervisor made it {ended.state}: {receipt.failure_category}, {receipt.id}.")
        self.say("The report is kept beside it, and not believed.")
        return {
            "ledger": org.db.engine,
            "worker_reached_running": held is not None,
            "state_after_kill": after_kill.state.value,
            "recovered": {
                "state": ended.state.value,
                "failure_category": receipt.failure_category,
                "receipt_id": receipt.id,
                "seconds_from_kill": seconds,
            },
            "planted_report_kept": kept,
        }

    def wake_a_zombie(self, org: Organization, sow_id: str) -> dict[str, Any]:
        """Scene 2: a worker sleeps through the end of its attempt, and wakes up believing that it holds it."""
        assignment, worker = self.start_worker(org, sow_id, "oversleeps")
        run = self.await_running(org, assignment.id)
        worker.send_signal(signal.SIGSTOP)
        self.scene(f"The work is assigned again. This worker runs {assignment.id} and is stopped with SIGSTOP.")
        self.await_end(org, assignment.id)
        self.say("Its attempt has run out and was recovered: FAILED. Now its program finishes, and SIGCONT wakes it.")
        before = _canonical_rows(org)
        (run.path / "go-on").touch()
        worker.send_signal(signal.SIGCONT)
        _, stderr = worker.communicate(timeout=DEADLINE_SECONDS)
        written = len(before ^ _canonical_rows(org))
        refusal = json_text.loads(stderr)["error"]["category"]
        self.say(f"It tries to record its result and is refused: {refusal}. Rows it wrote: {written}.")
        return {"refusal": refusal, "rows_written": written, "exit_code": worker.returncode}

    def retry(self, org: Organization, outcome_id: str, sow_id: str) -> dict[str, Any]:
        """Scene 3: retrying is an explicit act, and its result is judged by others than its worker."""
        assignment, worker = self.start_worker(org, sow_id, "works")
        worker.communicate(timeout=DEADLINE_SECONDS)
        state = outcomes.get_assignment(org.db.connection, assignment.id).state
        self.scene(f"The work is assigned once more, as {assignment.id}, and it ends {state}.")
        verdict = org.verify_sow(sow_id, "verifier-course")
        reviewed = org.review(sow_id, "sparring-course").state
        accepted = org.accept(outcome_id, "principal-human").state
        self.say(f"Verified ({verdict.reason}), reviewed ({reviewed}), accepted: the outcome is {accepted}.")
        return {
            "assignment_state": state.value,
            "verified": verdict.passed,
            "sow_state": reviewed.value,
            "outcome_state": accepted.value,
        }

    def start_worker(self, org: Organization, sow_id: str, provider: str) -> tuple[Assignment, subprocess.Popen[str]]:
        """Assign the work, let `provider` do it, and start a worker process on it."""
        org.rebind_actor("operator-course", provider, "principal-human")
        _eventually(lambda: _is_free(org), "the actor's lease to run out")
        assignment = org.assign(sow_id, "operator-course", "master-course")
        self.workers.append(_start(self.folder, "run", assignment.id, "--json", stderr=subprocess.PIPE))
        return assignment, self.workers[-1]

    def await_running(self, org: Organization, assignment_id: str) -> Workspace:
        """Wait until the ledger says RUNNING; the run's folder."""
        attempt = _eventually(
            lambda: outcomes.get_assignment(org.db.connection, assignment_id).current_execution_attempt or "", "RUNNING"
        )
        return workspace.locate(self.folder, attempt)

    def await_end(self, org: Organization, assignment_id: str) -> None:
        """Wait until the assignment has ended and the supervisor is done with its folder."""

        def ended() -> bool:
            connection = org.db.connection
            state = outcomes.get_assignment(connection, assignment_id).state
            return state is not AssignmentState.RUNNING and not fencing.attempts_to_reclaim(
                connection, after="", limit=1
            )

        _eventually(ended, "its recovery")

    def scene(self, text: str) -> None:
        """Begin a scene of the story."""
        self.console.print()
        self.say(text)

    def say(self, text: str) -> None:
        """One line of the story, with the seconds since its beginning."""
        line = Table.grid(padding=(0, 2))
        line.add_row(f"[dim]{monotonic() - self.started:5.1f} s[/dim]", escape(text))
        self.console.print(line)


def _configure(folder: Path) -> None:
    """Shorten the leases and add the three programs to the demo's own `sovereign.toml`."""
    path = folder / FILE_NAME
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    document["authority"]["actor_lease_seconds"] = ACTOR_LEASE_SECONDS
    document["authority"]["execution_attempt_seconds"] = EXECUTION_ATTEMPT_SECONDS
    for name, steps in PROVIDERS.items():
        document["providers"][name] = {"kind": "scripted", "steps": steps, "timeout_seconds": 2 * DEADLINE_SECONDS}
    path.write_text(tomlkit.dumps(document), encoding="utf-8")


def _start(folder: Path, *arguments: str, stderr: int | TextIO = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start this program as another process, the way a person would."""
    return subprocess.Popen(  # noqa: S603 - this interpreter, and arguments of our own
        [sys.executable, "-m", "sovereign_agent", *arguments, "--root", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        env={**os.environ, "SOVEREIGN_ROOT": str(folder)},
    )


@contextmanager
def _supervisor(folder: Path) -> Generator[None]:
    """A supervisor process, ended with SIGTERM when the scenes are over."""
    process = _start(folder, "supervisor")
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_SECONDS)


def _is_free(org: Organization) -> bool:
    lease = fencing.current_actor_lease(org.db, "operator-course")
    return lease is None or lease.expires_at <= org.db.now()


def _canonical_rows(org: Organization) -> set[tuple[Any, ...]]:
    """Every canonical row as it stands: a row that is added or changed makes this set another."""
    connection = org.db.connection
    return {(table, *row) for table, query in CANONICAL_TABLES.items() for row in connection.execute(query)}


def _eventually(condition: Callable[[], T], what: str) -> T:
    deadline = monotonic() + DEADLINE_SECONDS
    while not (answer := condition()):
        if monotonic() > deadline:
            raise SovereignError(f"The demo waited {DEADLINE_SECONDS:g} s for {what}.", category="demo_deadline")
        time.sleep(0.02)
    return answer
