"""`sovereign-agent demo restore`: what a restored ledger does to those who worked on it, with nothing simulated.

Real processes of this program throughout: a worker that holds a work item and a message for an hour, a governed run
whose program is at its work, an operator who types the verbs. While the three go on, the ledger goes back:

    1. the worker records two findings, and a backup is made
    2. the ledger is restored under them (on PostgreSQL: a new epoch is begun, as after a restore by its own tools)
    3. each of them reads on, and each of their writes is refused, though name, token and time still match
    4. nothing resumes by itself; a tick writes down the run that was cut off; the operator resumes
    5. the old worker is refused as before, and a fresh one does the work under the next generation

What is printed was read from the ledger or said by those processes. This room decides nothing, and is no test: it
shows what happened, and exits 1 if that is not what it promises.
"""

from __future__ import annotations

import json as json_text
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from sovereign_agent import assistant_service, assistant_work, journal, outcomes, relay, workspace
from sovereign_agent.commands import demo_worker
from sovereign_agent.commands.demo_worker import Worker
from sovereign_agent.commands.stage import DEADLINE_SECONDS, Story, eventually, perform, start
from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.database import Database
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization

BY = "principal-human"
REPORT = {"status": "completed", "summary": "The till agrees with the book."}
PROGRAM_CODE = """
import os, sys, time
from pathlib import Path
Path("at-work").touch()
while not Path("go-on").exists():
    time.sleep(0.02)
Path(os.environ["SOVEREIGN_OUT"], "report.json").write_text(sys.argv[1])
"""
PROGRAM = [sys.executable, "-c", PROGRAM_CODE, json_text.dumps(REPORT)]
PROVIDERS: dict[str, dict[str, Any]] = {
    "takes-its-time": {"kind": "command", "argv": PROGRAM, "timeout_seconds": 2 * DEADLINE_SECONDS},
    "works": {"kind": "scripted", "steps": [{"report": REPORT}]},
}
REPLACED = {"category": "epoch_replaced", "sentence": assistant_work.REPLACED}
PAUSED = {"category": "paused", "sentence": assistant_work.REPLACED}


def main(*, json: bool, ledger: str, root: Path | None) -> int:
    """Play it, in `root` or a folder of its own, on PostgreSQL if `ledger` is a URL. Returns 0 or 1: see `perform`."""
    return perform(lambda folder, story: RestoreDemo(folder, ledger, story).play(), as_promised, json=json, root=root)


def as_promised(seen: dict[str, Any]) -> bool:
    """Whether everything is as the demo is to show it."""
    epochs, old, paused, fresh = seen["epochs"], seen["old_worker"], seen["while_paused"], seen["fresh"]
    return (
        epochs["before"] != epochs["after"] == epochs["marker"]
        and old["seconds_left"] > 0
        and old["reads"]
        == {
            "rows_written": 2,
            "held_generation": 1,
            "work": {"status": "READY", "generation": 2, "owner": None},
            "epoch_is_current": False,
            "paused": True,
        }
        and old["writes"] == [PAUSED, PAUSED]
        and old["writes_after_resume"] == [REPLACED, REPLACED]
        and bool(old["message"])
        and old["message"]["category"] == "fencing_token_stale"
        and seen["old_run"] == {"exit_code": 1, "refusal": "actor_lease_lost", "state": "RUNNING", "receipts": 0}
        and paused == {"claim": "paused", "run": "FAILED", "failure_category": "worker_lost"}
        and fresh == {"generation": 3, "writes": [None, None], "work": "DONE", "message": "DONE", "run": "completed"}
        and seen["rows_by_generation"] == [1, 1, 3, 3]
    )


@dataclass
class RestoreDemo:
    """The cast: one organization, its operator, a worker and a run from before the restore, and fresh ones after it."""

    folder: Path
    ledger: str
    story: Story
    processes: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def play(self) -> dict[str, Any]:
        """All scenes, in order; what was seen, as the JSON that `--json` prints."""
        Organization.init(self.folder, ledger_url=self.ledger).close()
        _configure(self.folder)
        try:
            with closing(Organization(self.folder)) as org:
                return self.play_on(org)
        finally:
            for process in self.processes:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()

    def play_on(self, org: Organization) -> dict[str, Any]:
        """The scenes."""
        db = org.db
        before = assistant_service.health(db).epoch
        self.story.say(f"An organization on {db.engine}, in {before}.")
        work = assistant_work.enqueue(db, "demo:1", "the morning", "Look through the freezer, and say what is needed.")
        message = relay.send(db, "master-course", "operator-course", "Freezer", "Which flavours are low?").id
        old = self.worker("the old worker")
        old.tell("record")
        self.story.say(f"A worker holds {work} for an hour, generation 1, and {message}. It has recorded two findings.")
        run = self.begin_run(org)
        self.story.say(f"Another process runs {run.assignment_id}; its program is at work.")
        self.replace_epoch(db)
        after = assistant_service.health(db)
        self.story.say(f"All authority is revoked. The ledger is in {after.epoch}, and paused.")
        seen: dict[str, Any] = {
            "ledger": db.engine,
            "epochs": {"before": before, "after": after.epoch, "marker": after.marker},
            "old_worker": self.watch(old),
            "old_run": self.let_end(org, run),
            "while_paused": self.recover(org, run.assignment_id),
        }
        self.typed("resume", "--by", BY, "--reason", "looked around")
        self.story.scene("The operator resumes.")
        again = seen["old_worker"]["writes_after_resume"] = old.tell("record")
        self.story.say(f"The old worker tries again. {_told(*again)}")
        seen["fresh"] = self.begin_anew(org, run.sow_id, work, message)
        seen["rows_by_generation"] = [row["generation"] for row in assistant_work.transcript(db.connection, work)]
        self.story.say(f"Findings in the ledger, by generation: {seen['rows_by_generation']}.")
        return seen

    def replace_epoch(self, db: Database) -> None:
        """The ledger goes back under everybody: a backup and a restore, or PostgreSQL's half of it."""
        if db.engine == "sqlite":
            copy = str(self.folder / "backup.db")
            self.typed("backup", copy)
            self.story.scene("The operator backs the ledger up, and restores it while all of them go on.")
            self.typed("restore", copy, "--by", BY, "--reason", "the demo")
        else:
            self.story.scene("PostgreSQL's own tools would bring the ledger back. The operator begins a new epoch.")
            self.typed("authority", "new-epoch", "--by", BY, "--reason", "the demo")

    def watch(self, old: Worker) -> dict[str, Any]:
        """The old worker reads on, and writes nothing more."""
        reads, writes, message = old.tell("look"), old.tell("record"), old.tell("settle")["message"]
        left = reads.pop("seconds_left")
        self.story.scene(f"The old worker's claim has {left:.0f} s to run. It reads on: {reads['work']}.")
        self.story.say(f"It records two findings more. {_told(*writes)}")
        self.story.say(f"It settles its message. {_told(message)}")
        return {"seconds_left": left, "reads": reads, "writes": writes, "message": message}

    def begin_run(self, org: Organization) -> Run:
        """A governed run whose program is at its work."""
        outcome = org.create_outcome("Close the shop", "The till is counted.", [], BY)
        org.activate(outcome.id, BY)
        sow = org.create_sow(outcome.id, "Count the till", "operator", "master-course")
        org.ready_sow(sow.id)
        process, assignment = self.run(org, sow.id, "takes-its-time")
        attempt = eventually(
            lambda: outcomes.get_assignment(org.db.connection, assignment).current_execution_attempt or "", "RUNNING"
        )
        folder = workspace.locate(self.folder, attempt).path
        eventually((folder / "at-work").exists, "the run's program")
        return Run(sow.id, assignment, folder, process)

    def run(self, org: Organization, sow_id: str, provider: str) -> tuple[subprocess.Popen[str], str]:
        """Assign the work to the operator, whom `provider` works for, and start a process that runs it."""
        org.rebind_actor("operator-course", provider, BY)
        assignment = org.assign(sow_id, "operator-course", "master-course").id
        process = start(self.folder, "run", assignment, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process, assignment

    def let_end(self, org: Organization, run: Run) -> dict[str, Any]:
        """The old run's program reports that it is done, and its process writes that down: or would."""
        (run.folder / "go-on").touch()
        _, stderr = run.process.communicate(timeout=DEADLINE_SECONDS)
        refusal, connection = _category(stderr), org.db.connection
        self.story.say(f"The old run's program hands in: completed. Its process is told: {refusal or 'done'}.")
        return {
            "exit_code": run.process.returncode,
            "refusal": refusal,
            "state": outcomes.get_assignment(connection, run.assignment_id).state.value,
            "receipts": len(journal.receipts_of(connection, run.assignment_id)),
        }

    def recover(self, org: Organization, assignment_id: str) -> dict[str, Any]:
        """While the ledger is paused nobody gets a claim, and a tick recovers all the same."""
        claim = _category(self.typed("assistant", "claim", "early bird", may_be_refused=True))
        self.story.scene(
            f"Nothing resumes by itself: a fresh worker who claims the item now is told: {claim or 'done'}."
        )
        self.typed("supervisor", "--once")
        why = ", ".join(each.failure_category for each in journal.receipts_of(org.db.connection, assignment_id))
        state = outcomes.get_assignment(org.db.connection, assignment_id).state
        self.story.say(f"A supervisor's tick writes down what became of the old run: {why}.")
        return {"claim": claim, "run": state.value, "failure_category": why}

    def begin_anew(self, org: Organization, sow_id: str, work: str, message: str) -> dict[str, Any]:
        """Fresh authority of each kind, and what was refused goes through."""
        fresh = self.worker("the fresh worker")
        generation, writes, _ = fresh.tell("look")["held_generation"], fresh.tell("record"), fresh.tell("settle")
        process, _ = self.run(org, sow_id, "works")
        stdout, _ = process.communicate(timeout=DEADLINE_SECONDS)
        status = json_text.loads(stdout)["status"]
        self.story.say(f"A fresh one claims it, generation {generation}, and records; the run is repeated: {status}.")
        return {
            "generation": generation,
            "writes": writes,
            "work": assistant_work.get_work(org.db.connection, work)["status"],
            "message": relay.get_message(org.db, message).state.value,
            "run": status,
        }

    def worker(self, owner: str) -> Worker:
        """Start a worker process; it has its claims when this returns."""
        process = start(self.folder, owner, module=demo_worker.__name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        worker = Worker(process)
        worker.hear()
        return worker

    def typed(self, *arguments: str, may_be_refused: bool = False) -> str:
        """Type a verb, and return what it says of a refusal. Raises SovereignError when one was not to be refused."""
        process = start(self.folder, *arguments, "--json", stderr=subprocess.PIPE)
        self.processes.append(process)
        _, stderr = process.communicate(timeout=DEADLINE_SECONDS)
        if process.returncode and not may_be_refused:
            ended = f"{' '.join(arguments)} ended with {process.returncode}."
            raise SovereignError(ended, category="demo_verb_ended", why=stderr)
        return stderr


@dataclass(frozen=True)
class Run:
    """A governed run and the process that holds it."""

    sow_id: str
    assignment_id: str
    folder: Path
    process: subprocess.Popen[str]


def _category(stderr: str) -> str:
    """What a verb was refused for; empty when it was not."""
    return str(json_text.loads(stderr)["error"]["category"]) if stderr else ""


def _told(*refusals: dict[str, str] | None) -> str:
    return " / ".join(f"{each['sentence']} ({each['category']})" if each else "done" for each in refusals)


def _configure(folder: Path) -> None:
    """Add the two programs to the demo's own `sovereign.toml`."""
    path = folder / FILE_NAME
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    for name, settings in PROVIDERS.items():
        document["providers"][name] = settings
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
