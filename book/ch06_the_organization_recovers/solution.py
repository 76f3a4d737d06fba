"""Chapter 6: kill a worker, and let the organization recover.

    python book/ch06_the_organization_recovers/solution.py --root DIR

Nothing here is pretended: a child process runs an assignment until the ledger says RUNNING, SIGKILL ends it, and two
ticks of the supervisor, years ahead on their clock, find what it left. Prints what was observed as JSON; exits 1 if
that is not what the chapter promises. DIR may be the folder of an earlier run, also of one that was itself killed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import tomlkit

from sovereign_agent import configuration, fencing, journal, outcomes, supervisor, workspace
from sovereign_agent.clock import Clock
from sovereign_agent.errors import Refusal, SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.records import Assignment, AssignmentState

T = TypeVar("T")

WORKER = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "hard_kill_worker.py"
ACTOR = "operator-course"
COLLAPSING = "collapses-mid-count"
DEADLINE_SECONDS = 60.0
ORPHAN_SECONDS = 10.0
FAR = timedelta(days=3650)
"""How far the supervisor's clock runs ahead: beyond every lease and attempt, so that nobody has to wait for them."""

PROVIDER = {
    "kind": "scripted",
    "steps": [
        {"stdout": "half a str"},
        {"report": {"status": "completed", "summary": "All done, says a file."}},  # no recovery may believe it
        {"sleep": 2 * DEADLINE_SECONDS},
    ],
}
EXPECTED = {
    "worker_reached_running_before_sigkill": True,
    "worker_died_abnormally": True,
    "first_tick": {"recovered_count": 1},
    "second_tick_is_idempotent": {"recovered_count": 0},
    "before_recovery": {"assignment_state": "RUNNING", "execution_attempt_still_referenced": True},
    "after_recovery": {
        "assignment_state": "FAILED",
        "receipt_status": "failed",
        "receipt_failure_category": "worker_lost",
    },
}


def main() -> int:
    """Run the exercise and print what it observed."""
    parser = argparse.ArgumentParser(description="Kill a worker, and let the organization recover.")
    parser.add_argument("--root", type=folder, required=True, help="the organization's folder; made if it is not there")
    root = parser.parse_args().root
    try:
        organization = open_organization(root)
        try:
            observed = observe(organization)
        finally:
            organization.close()
    except (SovereignError, OSError) as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    print(json.dumps(observed, indent=2))
    if observed != EXPECTED:
        print("That is not what the chapter promises.", file=sys.stderr)
    return int(observed != EXPECTED)


def folder(text: str) -> Path:
    """A path that is, or can become, a folder."""
    path = Path(text).resolve()
    blocked = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), None)
    if blocked:
        raise argparse.ArgumentTypeError(f"{blocked} is a file, and the organization needs a folder")
    return path


def observe(organization: Organization) -> dict[str, Any]:
    """The whole exercise, in the order of the chapter."""
    connection = organization.db.connection

    def far_future() -> datetime:
        return organization.db.now() + FAR

    clear_the_stage(organization, far_future)
    assignment = assign(organization)
    with worker_on(organization.root, assignment.id) as worker:
        attempt_id = eventually("the worker to run", worker, lambda: running_attempt(organization, assignment.id))
        eventually("its program", worker, (workspace.locate(organization.root, attempt_id).out / "report.json").exists)
        program = psutil.Process(worker.pid).children()
        reached = worker.poll() is None and running_attempt(organization, assignment.id) == attempt_id
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        await_end(program)
    before = outcomes.get_assignment(connection, assignment.id)
    first = supervisor.tick(organization, far_future)
    second = supervisor.tick(organization, far_future)
    after = outcomes.get_assignment(connection, assignment.id)
    receipt = journal.receipts_of(connection, assignment.id)[-1]
    return {
        "worker_reached_running_before_sigkill": reached,
        "worker_died_abnormally": worker.returncode == -signal.SIGKILL,
        "first_tick": {"recovered_count": len(first.recovered_assignments)},
        "second_tick_is_idempotent": {"recovered_count": len(second.recovered_assignments)},
        "before_recovery": {
            "assignment_state": before.state.value,
            "execution_attempt_still_referenced": before.current_execution_attempt == attempt_id,
        },
        "after_recovery": {
            "assignment_state": after.state.value,
            "receipt_status": receipt.status.value,
            "receipt_failure_category": receipt.failure_category,
        },
    }


def open_organization(root: Path) -> Organization:
    """Make the exercise's own organization in `root`, or open the one that an earlier run made there.

    Nobody else's will do: its work would be declared lost by a tick that is years ahead.
    """
    path = root / configuration.FILE_NAME
    if path.exists() and path.read_bytes() != configuration.default_text().encode():
        if configuration.load(root).actor(ACTOR).provider != COLLAPSING:
            raise Refusal(
                f"{root} holds another organization.",
                category="not_the_exercise",
                why="The exercise moves its supervisor's clock years ahead, which would end the work of others there.",
                next_command="choose a --root of its own",
            )
        return Organization.init(root)
    Organization.init(root).close()
    document: Any = tomlkit.parse(configuration.default_text())
    document["providers"][COLLAPSING] = PROVIDER
    document["actors"][ACTOR]["provider"] = COLLAPSING
    draft = path.with_suffix(".draft")
    draft.write_text(tomlkit.dumps(document), encoding="utf-8")
    draft.replace(path)
    return Organization(root)


def clear_the_stage(organization: Organization, far_future: Clock) -> None:
    """End and recover what an earlier run left, and free the actor that its worker still hosts."""
    worker = [str(WORKER), str(organization.root)]
    left = [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[1:3] == worker]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await_end(left)
    supervisor.tick(organization, far_future)
    me = organization.process_identity
    lease = fencing.acquire_actor_lease(organization.db, ACTOR, me, ttl=timedelta(0), clock=far_future)
    fencing.release_actor_lease(organization.db, ACTOR, me, lease.fencing_token)


def assign(organization: Organization) -> Assignment:
    """Give the shop's closing to the operator."""
    outcome = organization.create_outcome("Close the shop", "The till is counted.", [], "principal-human")
    organization.activate(outcome.id, "principal-human")
    sow = organization.create_sow(outcome.id, "Count the till", "operator", "master-course")
    organization.ready_sow(sow.id)
    return organization.assign(sow.id, ACTOR, "master-course")


@contextmanager
def worker_on(root: Path, assignment_id: str) -> Generator[subprocess.Popen[str]]:
    """A real worker process, which does not outlive this block."""
    command = [sys.executable, str(WORKER), str(root), assignment_id]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as worker:  # noqa: S603
        try:
            yield worker
        finally:
            worker.kill()


def running_attempt(organization: Organization, assignment_id: str) -> str | None:
    """The attempt that runs an assignment, as the ledger has it."""
    assignment = outcomes.get_assignment(organization.db.connection, assignment_id)
    return assignment.current_execution_attempt if assignment.state is AssignmentState.RUNNING else None


def await_end(processes: list[psutil.Process]) -> None:
    """Wait until these processes have ended. A dead worker's program notices that it is alone; if not, it is ended."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while any(is_running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for orphan in filter(is_running, processes):
        orphan.kill()


def is_running(process: psutil.Process) -> bool:
    """Whether a process still does anything; one that only waits for its parent to take note of its end does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(what: str, worker: subprocess.Popen[str], condition: Callable[[], T | None]) -> T:
    """Poll until `condition` is true; Refusal when the worker ends before, or the deadline passes."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (answer := condition()):
        if worker.poll() is not None:
            _, _, root, assignment_id = worker.args
            raise Refusal(
                f"The worker ended too early, with exit code {worker.returncode}. {worker.communicate()[1]}".rstrip(),
                category="worker_ended",
                why="The ledger has what it recorded, if it came that far.",
                inspect=f"sovereign-agent inspect {assignment_id} --root {root}",
            )
        if time.monotonic() > deadline:
            raise Refusal(f"{DEADLINE_SECONDS:g} seconds were not enough for {what}.", category="deadline")
        time.sleep(0.02)
    return answer


if __name__ == "__main__":
    sys.exit(main())
