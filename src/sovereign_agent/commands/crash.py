"""`sovereign-agent demo crash`: the product in half a minute, with nothing simulated.

Real worker processes of this program, real signals, a real supervisor process, a real clock, and leases that
are short because the demo's own `sovereign.toml` says so. The scenes share one statement of work:

    1. a worker is killed with SIGKILL after its program has left a report that says "completed"; the program and a
       helper of it, in a session of its own and deaf to SIGTERM, are ended with it
    2. a worker is stopped with SIGSTOP until it has been recovered, then continued
    3. an explicit retry runs for three times as long as an attempt lasts, beside a supervisor; it is completed,
       verified, reviewed and accepted

What is printed was read from the ledger. This room decides nothing, and is no test: it shows what happened,
and exits 1 if that is not what it promises.
"""

from __future__ import annotations

import json as json_text
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomlkit

from sovereign_agent import fencing, journal, outcomes, supervisor, workspace
from sovereign_agent.clock import monotonic
from sovereign_agent.commands.stage import DEADLINE_SECONDS, Story, eventually, perform, start
from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.organization import Organization
from sovereign_agent.records import Assignment, AssignmentState
from sovereign_agent.workspace import Workspace

AUTHORITY_SECONDS = 4.0
"""How long a lease and an attempt last here without renewal."""

LONG_RUN_SECONDS = 3 * AUTHORITY_SECONDS
PLANTED_REPORT = {"status": "completed", "summary": "All done, says a program whose worker never came back."}
HONEST_REPORT = {"status": "completed", "summary": "The till agrees with the book.", "deliverables": ["till.txt"]}
PROGRAM, HELPER = "the-program", "its-helper"
"""The last words of the command lines by which we find the two."""

PARENT_CODE = """
import os, subprocess, sys, time
from pathlib import Path
Path(os.environ["SOVEREIGN_OUT"], "report.json").write_text(sys.argv[3])
subprocess.Popen([sys.executable, "-c", *sys.argv[1:3]], start_new_session=True)
time.sleep(120)
"""
HELPER_CODE = """
import signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("helper-is-deaf").touch()
time.sleep(120)
"""
SLEEPER_CODE = "import time; time.sleep(120)"
PARENT = [sys.executable, "-c", PARENT_CODE, HELPER_CODE, HELPER, json_text.dumps(PLANTED_REPORT), PROGRAM]
WORK = [{"sleep": LONG_RUN_SECONDS}, {"write": "till.txt", "text": "counted: 412.50\n"}, {"report": HONEST_REPORT}]
PROVIDERS: dict[str, dict[str, Any]] = {
    "dies-in-the-middle": {"kind": "command", "argv": PARENT, "grace_seconds": 1.0},
    "oversleeps": {"kind": "command", "argv": [sys.executable, "-c", SLEEPER_CODE, PROGRAM]},
    "works": {"kind": "scripted", "steps": WORK},
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
    """Play it, in `root` or a folder of its own, on PostgreSQL if `ledger` is a URL. Returns 0 or 1: see `perform`."""
    return perform(lambda folder, story: CrashDemo(folder, ledger, story).play(), _as_promised, json=json, root=root)


def _as_promised(report: dict[str, Any]) -> bool:
    return (
        report["worker_reached_running"]
        and report["state_after_kill"] == "RUNNING"
        and report["killed"]["program_gone"]
        and report["killed"]["grandchild_gone"]
        and report["killed"]["before_reclaim"]
        and report["recovered"]["failure_category"] == supervisor.WORKER_LOST
        and report["planted_report_kept"]
        and report["zombie"]["refusal"] == "execution_attempt_lost"
        and report["zombie"]["program_gone"]
        and report["zombie"]["rows_written"] == 0
        and report["second_tick_recovered"] == 0
        and report["healthy_long_run"]["status"] == "completed"
        and report["healthy_long_run"]["seconds"] >= LONG_RUN_SECONDS
        and report["retry"]["outcome_state"] == "ACCEPTED"
    )


@dataclass
class CrashDemo:
    """The cast: one organization, one supervisor process, three workers one after another."""

    folder: Path
    ledger: str
    story: Story
    workers: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def play(self) -> dict[str, Any]:
        """All scenes, in order; what was seen, as the JSON that `--json` prints."""
        org = Organization.init(self.folder, ledger_url=self.ledger)
        _configure(self.folder)
        org.close()
        org = Organization(self.folder)
        self.story.say(f"An organization on {org.db.engine}, and its supervisor, a process of its own.")
        self.story.say(f"A lease and an attempt last {AUTHORITY_SECONDS:g} s here, unless their worker renews them.")
        outcome = org.create_outcome("Close the shop", "The till is counted.", [], "principal-human")
        org.activate(outcome.id, "principal-human")
        sow = org.create_sow(outcome.id, "Count the till", "operator", "master-course")
        org.ready_sow(sow.id)
        try:
            with _supervisor(self.folder):
                report = self.kill_a_worker(org, sow.id)
                report["zombie"] = self.wake_a_zombie(org, sow.id)
                report["second_tick_recovered"] = len(supervisor.tick(org).recovered_assignments)
                self.story.scene(f"Another tick finds nothing left to recover: {report['second_tick_recovered']}.")
                report["healthy_long_run"] = self.run_for_long(org, sow.id)
            report["retry"] = self.judge(org, outcome.id, sow.id)
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
        eventually((run.path / "helper-is-deaf").exists, "the program's report and its helper")
        program, helper = _descendant(worker, PROGRAM), _descendant(worker, HELPER)
        self.story.scene(f"A worker runs {assignment.id}. Its program has just left a report that says: completed.")
        self.story.say(
            f"The program is process {program.pid}, and {helper.pid} a helper of it in a session of its own."
        )
        killed_at = monotonic()
        worker.kill()
        worker.wait()
        after_kill = outcomes.get_assignment(org.db.connection, assignment.id)
        held = after_kill.current_execution_attempt
        self.story.say(f"SIGKILL. The worker is gone; the ledger still says {after_kill.state}, attempt {held}.")
        before_reclaim = _outlived(run, program, helper)
        gone = round(monotonic() - killed_at, 2)
        self.story.say(f"{gone} s later both processes are gone too, though the helper is deaf to SIGTERM.")
        self.await_end(org, assignment.id)
        seconds = round(monotonic() - killed_at, 2)
        ended = outcomes.get_assignment(org.db.connection, assignment.id)
        receipt = journal.receipts_of(org.db.connection, assignment.id)[-1]
        kept = json_text.loads((run.out / "report.json").read_text())["status"] == "completed"
        self.story.say(
            f"{seconds} s later the supervisor made it {ended.state}: {receipt.failure_category}, {receipt.id}."
        )
        self.story.say("The report is kept beside it, and not believed.")
        return {
            "ledger": org.db.engine,
            "worker_reached_running": held is not None,
            "state_after_kill": after_kill.state.value,
            "killed": {
                "program_gone": not _lives(program),
                "grandchild_gone": not _lives(helper),
                "seconds_until_gone": gone,
                "before_reclaim": before_reclaim,
            },
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
        self.await_running(org, assignment.id)
        program = _descendant(worker, PROGRAM)
        worker.send_signal(signal.SIGSTOP)
        self.story.scene(f"The work is assigned again. This worker runs {assignment.id} and is stopped with SIGSTOP.")
        self.await_end(org, assignment.id)
        gone = not _lives(program)
        program_is = "gone" if gone else "still there"
        self.story.say(
            f"Its attempt has run out and was recovered: FAILED. Its program is {program_is}. SIGCONT wakes it."
        )
        before = _canonical_rows(org)
        worker.send_signal(signal.SIGCONT)
        _, stderr = worker.communicate(timeout=DEADLINE_SECONDS)
        written = len(before ^ _canonical_rows(org))
        refusal = json_text.loads(stderr)["error"]["category"]
        self.story.say(f"It goes on as if it still held its work, and is refused: {refusal}. Rows it wrote: {written}.")
        return {
            "refusal": refusal,
            "rows_written": written,
            "exit_code": worker.returncode,
            "program_gone": gone,
        }

    def run_for_long(self, org: Organization, sow_id: str) -> dict[str, Any]:
        """Scene 3: retrying is an explicit act, and a healthy worker keeps its authority for as long as it works."""
        assignment, worker = self.start_worker(org, sow_id, "works")
        self.story.scene(f"The work is assigned once more, as {assignment.id}. This run takes {LONG_RUN_SECONDS:g} s.")
        worker.communicate(timeout=DEADLINE_SECONDS)
        receipt = journal.receipts_of(org.db.connection, assignment.id)[-1]
        self.story.say(f"Its worker renewed its authority all the while, and it ends {receipt.status}.")
        return {
            "status": receipt.status.value,
            "seconds": receipt.detail.get("duration_seconds", 0.0),
            "attempt_ttl_seconds": AUTHORITY_SECONDS,
        }

    def judge(self, org: Organization, outcome_id: str, sow_id: str) -> dict[str, Any]:
        """The result is judged by others than its worker."""
        assignment = outcomes.assignments_of(org.db.connection, sow_id)[-1]
        verdict = org.verify_sow(sow_id, "verifier-course")
        reviewed = org.review(sow_id, "sparring-course").state
        accepted = org.accept(outcome_id, "principal-human").state
        self.story.say(f"Verified ({verdict.reason}), reviewed ({reviewed}), accepted: the outcome is {accepted}.")
        return {
            "assignment_state": assignment.state.value,
            "verified": verdict.passed,
            "sow_state": reviewed.value,
            "outcome_state": accepted.value,
        }

    def start_worker(self, org: Organization, sow_id: str, provider: str) -> tuple[Assignment, subprocess.Popen[str]]:
        """Assign the work, let `provider` do it, and start a worker process on it."""
        org.rebind_actor("operator-course", provider, "principal-human")
        eventually(lambda: _is_free(org), "the actor's lease to run out")
        assignment = org.assign(sow_id, "operator-course", "master-course")
        self.workers.append(start(self.folder, "run", assignment.id, "--json", stderr=subprocess.PIPE))
        return assignment, self.workers[-1]

    def await_running(self, org: Organization, assignment_id: str) -> Workspace:
        """Wait until the ledger says RUNNING; the run's folder."""
        attempt = eventually(
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

        eventually(ended, "its recovery")


def _configure(folder: Path) -> None:
    """Shorten the authority and add the three programs to the demo's own `sovereign.toml`."""
    path = folder / FILE_NAME
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    for name in ("actor_lease_seconds", "execution_attempt_seconds"):
        document["authority"][name] = AUTHORITY_SECONDS
    for name, settings in PROVIDERS.items():
        document["providers"][name] = settings | {"timeout_seconds": 2 * DEADLINE_SECONDS}
    path.write_text(tomlkit.dumps(document), encoding="utf-8")


@contextmanager
def _supervisor(folder: Path) -> Generator[None]:
    """A supervisor process, ended with SIGTERM when the scenes are over."""
    process = start(folder, "supervisor")
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_SECONDS)


def _descendant(worker: subprocess.Popen[str], word: str) -> psutil.Process:
    """The living process below a worker whose command line ends with that word: its PID and its start time."""

    def found() -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [each for each in psutil.Process(worker.pid).children(recursive=True) if _last_word(each) == word]
        return []

    return eventually(found, f"the process {word}")[0]


def _last_word(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[-1:])
    return ""


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _outlived(run: Workspace, *processes: psutil.Process) -> bool:
    """Wait until the processes are gone; whether their run's folder was left alone for so long."""
    reclaimed_under_them = False

    def gone() -> bool:
        nonlocal reclaimed_under_them
        reclaimed = not run.raw.exists()  # looked at first: what lives after that, lives in a reclaimed folder
        living = any(_lives(process) for process in processes)
        reclaimed_under_them |= reclaimed and living
        return not living

    eventually(gone, "the end of a killed worker's program")
    return not reclaimed_under_them


def _is_free(org: Organization) -> bool:
    lease = fencing.current_actor_lease(org.db, "operator-course")
    return lease is None or lease.expires_at <= org.db.now()


def _canonical_rows(org: Organization) -> set[tuple[Any, ...]]:
    """Every canonical row as it stands: a row that is added or changed makes this set another."""
    connection = org.db.connection
    return {(table, *row) for table, query in CANONICAL_TABLES.items() for row in connection.execute(query)}
