"""The supervisor: what a killed worker left is ended honestly, once, by whoever comes first.

Workers here are real processes and die of real signals. Nothing waits out a real lease: the tick is given a clock.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import (
    _processes,
    answer,
    at_one_barrier,
    child,
    configure,
    eventually,
    governed_work,
    heard,
    in_a_fresh_process,
    judge_and_accept,
    killed_after_statement,
    ledger_facts,
    lock_is_free,
    rows,
    works,
)

from sovereign_agent import fencing, journal, liveness, organization, outcomes, relay, runs, supervisor, workspace
from sovereign_agent.clock import ManualClock, micros
from sovereign_agent.errors import ConfigurationFault, Contention, LedgerUnavailable, SchemaMismatch, SovereignError
from sovereign_agent.fencing import ACTOR_LEASE_TTL, EXECUTION_ATTEMPT_TTL
from sovereign_agent.organization import Organization
from sovereign_agent.records import Assignment, ExecutionAttempt
from sovereign_agent.supervisor import tick

WORKER = Path(__file__).parent / "fixtures" / "hard_kill_worker.py"
FAR = ManualClock(datetime(2100, 1, 1, tzinfo=UTC))
"""A moment at which every lease, attempt and claim of these tests has long run out."""

OPERATOR = "operator-course"
NOBODY = 65534
TABLES = (
    "events",
    "outcomes",
    "sows",
    "assignments",
    "lease_tokens",
    "actor_leases",
    "execution_attempts",
    "receipts",
    "evidence",
    "verifications",
    "reviews",
    "acceptances",
    "rulings",
    "messages",
    "heartbeats",
)


def everything(org: Organization) -> dict[str, Any]:
    """Every row of the ledger and every file below the runs, to show that nothing changed."""
    return {table: rows(org.db, table) for table in TABLES} | {"disk": files(org.root)}


def files(root: Path) -> dict[str, bytes]:
    runs_folder = root / ".sovereign" / "runs"
    return {str(p.relative_to(runs_folder)): p.read_bytes() for p in sorted(runs_folder.rglob("*")) if p.is_file()}


def run_folder(org: Organization, attempt_id: str) -> Path:
    return workspace.locate(org.root, attempt_id).path


def assert_disk_follows_the_ledger(org: Organization) -> None:
    """Every ended attempt has its own receipt on disk and no scratch; no other folder has a receipt."""
    ended = org.db.connection.execute("SELECT id FROM execution_attempts WHERE status <> 'ACTIVE'")
    folders = {path.name: path for path in (org.root / ".sovereign" / "runs").glob("*")}
    for row in ended:
        folder = folders.pop(row[0])
        receipt = journal.receipt_of_attempt(org.db.connection, row[0])
        assert receipt
        text = (folder / "receipt.json").read_bytes()
        assert text.decode() == journal.receipt_json(receipt)
        assert (folder / "receipt.json.sha256").read_text().split()[0] == hashlib.sha256(text).hexdigest()
        assert not (folder / "provider-raw").exists()
    assert not [path for path in folders.values() if (path / "receipt.json").exists()]


def attempt_of(org: Organization, assignment_id: str) -> str:
    """The id of an assignment's only attempt."""
    (row,) = org.db.connection.execute("SELECT id FROM execution_attempts WHERE assignment_id = ?", (assignment_id,))
    return str(row[0])


def facts_for_a_stranger(root: Path, assignment_id: str) -> dict[str, Any]:
    org = Organization(root)
    try:
        return ledger_facts(org.db, assignment_id)
    finally:
        org.close()


def fresh_facts(org: Organization, assignment: Assignment) -> dict[str, Any]:
    """State, fence, receipts and events together, as a process reads them that was never here before."""
    return in_a_fresh_process(facts_for_a_stranger, org.root, assignment.id)


CREATED = {
    "assignment": "CREATED",
    "sow": "ASSIGNED",
    "pointer": None,
    "attempts": [],
    "receipts": [],
    "events": ["assignment.created"],
    "sow_events": ["sow.created", "sow.ready", "sow.assigned"],
}
RUNNING = {
    "assignment": "RUNNING",
    "sow": "RUNNING",
    "pointer": "ACTIVE",
    "attempts": ["ACTIVE"],
    "receipts": [None],
    "events": [*CREATED["events"], "assignment.running"],
    "sow_events": [*CREATED["sow_events"], "sow.running"],
}
RECOVERED = {
    "assignment": "FAILED",
    "sow": "FAILED",
    "pointer": None,
    "attempts": ["RECOVERED"],
    "receipts": [("failed", "worker_lost")],
    "events": [*RUNNING["events"], "assignment.finished", "assignment.recovered"],
    "sow_events": [*RUNNING["sow_events"], "sow.failed"],
}
COMPLETED = {
    "assignment": "COMPLETED",
    "sow": "COMPLETED",
    "pointer": None,
    "attempts": ["DONE"],
    "receipts": [("completed", "")],
    "events": [*RUNNING["events"], "assignment.finished"],
    "sow_events": [*RUNNING["sow_events"], "sow.completed"],
}


def abandoned(org: Organization, **options: Any) -> tuple[Assignment, ExecutionAttempt]:
    """An assignment that is RUNNING under a live attempt of a process that will not come back."""
    _, _, assignment = governed_work(org, **options)
    process = fencing.new_process_identity()
    org.db.connection.execute("DELETE FROM actor_leases")
    lease = fencing.acquire_actor_lease(org.db, OPERATOR, process)
    return assignment, fencing.acquire_execution_attempt(org.db, assignment.id, OPERATOR, process, lease.fencing_token)


# --- the boundary of a tick -------------------------------------------------------------------------------


def test_tick_never_creates_a_new_outcome_sow_or_assignment(org: Organization) -> None:
    before = everything(org)
    report = tick(org, FAR)
    assert everything(org) == before
    assert report == supervisor.SupervisorReport((), (), ())


def test_tick_leaves_work_that_waits_and_work_that_runs_as_it_is(org: Organization) -> None:
    governed_work(org)
    abandoned(org)
    relay.claim(org.db, org.send("master-course", OPERATOR, "s", "b").id, OPERATOR)
    org.send("master-course", OPERATOR, "s", "b")
    before = everything(org)
    assert tick(org) == supervisor.SupervisorReport((), (), ())
    assert everything(org) == before


def test_tick_reports_expired_actor_leases_and_changes_nothing(org: Organization) -> None:
    now = org.db.now()
    over = fencing.acquire_actor_lease(org.db, OPERATOR, "proc_gone", clock=lambda: now - ACTOR_LEASE_TTL)
    fencing.acquire_actor_lease(org.db, "sparring-course", "proc_here")
    before = everything(org)
    assert tick(org).expired_actor_leases == (over,)
    assert everything(org) == before


def test_tick_sweeps_expired_claims_of_every_recipient(org: Organization) -> None:
    now = org.db.now()
    lost = [org.send("master-course", recipient, "s", "b").id for recipient in (OPERATOR, "sparring-course")]
    for message_id, recipient in zip(lost, (OPERATOR, "sparring-course"), strict=True):
        relay.claim(org.db, message_id, recipient, clock=lambda: now - relay.CLAIM_TTL)
    held = relay.claim(org.db, org.send("master-course", OPERATOR, "s", "b").id, OPERATOR)
    assert set(tick(org).swept_mailbox_claims) == {*lost}
    assert {relay.get_message(org.db, message_id).state for message_id in lost} == {"NEW"}
    assert relay.get_message(org.db, held.id) == held
    assert tick(org).swept_mailbox_claims == ()


def test_tick_tells_a_message_that_can_be_claimed_again_from_one_that_is_dead(org: Organization) -> None:
    clock = ManualClock(org.db.now())
    back, dead = [relay.send(org.db, "master-course", OPERATOR, "s", "b", clock=clock).id for _ in range(2)]
    for message_id in (back, *[dead] * relay.MAX_DELIVERIES):
        relay.claim(org.db, message_id, OPERATOR, clock=clock)
        clock.advance(relay.CLAIM_TTL)
    report = tick(org, clock)
    assert (report.swept_mailbox_claims, report.dead_messages) == ((back,), (dead,))
    assert [message.id for message in relay.dead_letters(org.db.connection, OPERATOR)] == [dead]
    assert relay.dead_letters(org.db.connection, "master-course") == []


def test_tick_reports_sweeps_recovers_and_tidies_up_in_this_order(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(module: Any, name: str) -> None:
        act = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **options: (done.append(name), act(*args, **options))[1])

    abandoned(org)
    noting(fencing, "expired_actor_leases")
    noting(relay, "sweep_expired_claims")
    noting(fencing, "end_attempt")
    noting(workspace, "reclaim_workspace")
    assert len(tick(org, FAR).recovered_assignments) == 1
    assert done == ["expired_actor_leases", "sweep_expired_claims", "end_attempt", "reclaim_workspace"]


# --- killed workers (hazard 42) ---------------------------------------------------------------------------


def start_worker(org: Organization, assignment: Assignment, dies_at: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(org.root), assignment.id, *([dies_at] if dies_at else [])]
    )


def plant_a_report_and_hang(org: Organization) -> None:
    """Let the provider leave scratch and a report that says completed, and then be silent."""
    steps = [
        {"stdout": "...half a stream..."},
        {"report": {"status": "completed", "summary": "all done, says nobody"}},
        {"touch": "report-is-there"},
        {"sleep": 60.0},
    ]
    configure(org, lambda document: document["providers"]["scripted"].update(steps=steps))


def killed_while_running(org: Organization, assignment: Assignment) -> None:
    """A real worker reaches RUNNING, its program leaves a finished report, and it is SIGKILLed; its guardian ends."""
    plant_a_report_and_hang(org)
    worker = start_worker(org, assignment)
    try:
        eventually(lambda: ledger_facts(org.db, assignment.id)["assignment"] == "RUNNING")
        marker = run_folder(org, attempt_of(org, assignment.id)) / "report-is-there"
        eventually(marker.exists)
    finally:
        worker.kill()
    assert worker.wait(10) == -signal.SIGKILL
    eventually(lambda: lock_is_free(workspace.locate(org.root, attempt_of(org, assignment.id))))


def test_a_sigkilled_worker_leaves_an_honest_ledger(org: Organization) -> None:
    _, _, assignment = governed_work(org)
    killed_while_running(org, assignment)
    assert fresh_facts(org, assignment) == RUNNING
    assert tick(org).recovered_assignments == ()  # its time is not over, and nobody guesses
    assert fresh_facts(org, assignment) == RUNNING


def test_hazard_42_the_first_tick_after_expiry_recovers_a_real_sigkilled_worker(org: Organization) -> None:
    _, _, assignment = governed_work(org)
    killed_while_running(org, assignment)
    attempt = fencing.expired_execution_attempts(org.db, FAR)[0]
    assert tick(org, FAR).recovered_assignments == (assignment.id,)
    assert fresh_facts(org, assignment) == RECOVERED
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    assert attempt.id in receipt.summary
    assert str(attempt.fencing_token) in receipt.summary
    assert receipt.detail["fencing_token"] == attempt.fencing_token


def test_recovery_of_a_sigkilled_worker_is_idempotent(org: Organization) -> None:
    _, _, assignment = governed_work(org)
    killed_while_running(org, assignment)
    tick(org, FAR)
    before = everything(org)
    assert tick(org, FAR).recovered_assignments == ()
    assert supervisor.recover_abandoned_assignments(org, FAR) == ()
    assert everything(org) == before


def test_hazard_42_recovery_never_guesses_success_from_a_report_on_disk_and_keeps_it(org: Organization) -> None:
    _, _, assignment = governed_work(org)
    killed_while_running(org, assignment)
    folder = run_folder(org, attempt_of(org, assignment.id))
    planted = (folder / ".sovereign-out" / "report.json").read_bytes()
    (folder / "report.json").write_bytes(planted)
    (receipt,) = supervisor.recover_abandoned_assignments(org, FAR)
    assert (receipt.status, receipt.failure_category) == ("failed", "worker_lost")
    (recorded,) = journal.receipts_of(org.db.connection, assignment.id)
    assert (recorded.status, recorded.failure_category) == ("failed", "worker_lost")
    assert json.loads(planted)["status"] == "completed"
    assert (folder / ".sovereign-out" / "report.json").read_bytes() == planted
    assert (folder / "report.json").read_bytes() == planted
    assert json.loads((folder / "receipt.json").read_bytes())["status"] == "failed"


def test_workspace_reclaim_comes_after_the_recovery_is_durable(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, assignment = governed_work(org)
    killed_while_running(org, assignment)
    folder = run_folder(org, attempt_of(org, assignment.id))
    seen: list[tuple[dict[str, Any], bool]] = []
    reclaim = workspace.reclaim_workspace

    def reclaim_seen_by_a_stranger(*args: Any) -> workspace.Reclaim:
        seen.append((fresh_facts(org, assignment), (folder / "provider-raw").exists()))
        return reclaim(*args)

    monkeypatch.setattr(workspace, "reclaim_workspace", reclaim_seen_by_a_stranger)
    tick(org, FAR)
    assert seen == [(RECOVERED, True)]
    assert not (folder / "provider-raw").exists()
    assert not (folder / "report-is-there").exists()


@pytest.mark.parametrize(
    ("dies_at", "left", "first_tick", "recovered"),
    [
        pytest.param("fencing:acquire_execution_attempt", CREATED, CREATED, False, id="between lease and RUNNING"),
        pytest.param("workspace:allocate", RUNNING, RECOVERED, True, id="before its program starts"),
        pytest.param("runs:finish", RUNNING, RECOVERED, True, id="before the terminal write"),
        pytest.param("journal:write_receipt", RUNNING, RECOVERED, True, id="inside the terminal write"),
        pytest.param("workspace:write_receipt", COMPLETED, COMPLETED, False, id="after the terminal commit"),
        pytest.param("workspace:replace_file", COMPLETED, COMPLETED, False, id="while it writes the receipt"),
        pytest.param("workspace:reclaim_workspace", COMPLETED, COMPLETED, False, id="before it tidies up"),
        pytest.param("workspace:_sweep", COMPLETED, COMPLETED, False, id="while it tidies up"),
        pytest.param("fencing:close_workspace", COMPLETED, COMPLETED, False, id="after it has tidied up"),
        pytest.param("fencing:release_lease", COMPLETED, COMPLETED, False, id="before the lease goes back"),
    ],
)
def test_hazard_42_a_worker_sigkilled_anywhere_is_recovered_or_was_already_done(
    org: Organization, dies_at: str, left: dict[str, Any], first_tick: dict[str, Any], *, recovered: bool
) -> None:
    _, _, assignment = governed_work(org)
    worker = start_worker(org, assignment, dies_at)
    assert worker.wait(30) == -signal.SIGKILL
    assert fresh_facts(org, assignment) == left
    assert bool(tick(org, FAR).recovered_assignments) is recovered
    assert fresh_facts(org, assignment) == first_tick
    assert_disk_follows_the_ledger(org)
    before = everything(org)
    tick(org, FAR)
    assert everything(org) == before


def run_one(root: Path, assignment_id: str, now: datetime) -> None:
    organization.invoke_actor = works
    Organization(root, clock=ManualClock(now)).run_assignment(assignment_id)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_worker_killed_by_sigkill_after_any_ledger_statement_can_be_recovered_and_its_work_accepted(
    org: Organization, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    mender = Organization(org.root, clock=clock)
    ends: set[str] = set()
    for statement in itertools.count(1):
        clock.advance(timedelta(days=1))  # every lease of the round before has run out
        outcome, sow, assignment = governed_work(mender)
        if not killed_after_statement(statement, run_one, org.root, assignment.id, clock()):
            break
        left = ledger_facts(mender.db, assignment.id)
        assert left in (CREATED, RUNNING, COMPLETED), statement
        clock.advance(timedelta(hours=1))
        assert tick(mender).recovered_assignments == ((assignment.id,) if left == RUNNING else ())
        recovered = ledger_facts(mender.db, assignment.id)
        assert recovered == (RECOVERED if left == RUNNING else left), statement
        assert_disk_follows_the_ledger(mender)
        before = everything(mender)
        tick(mender)
        assert everything(mender) == before
        if recovered == RECOVERED:
            assignment = mender.assign(sow.id, OPERATOR, "master-course")
        if recovered != COMPLETED:
            assert mender.run_assignment(assignment.id).status == "completed"
        assert judge_and_accept(mender, outcome.id, sow.id) == "ACCEPTED"
        ends.add(left["assignment"])
    mender.close()
    assert statement > 30
    assert ends == {"CREATED", "RUNNING", "COMPLETED"}


def tick_once(root: Path, now: datetime) -> None:
    tick(Organization(root, clock=ManualClock(now)))


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_supervisor_killed_by_sigkill_after_any_ledger_statement_is_continued_by_the_next_one(
    org: Organization, clock: ManualClock
) -> None:
    with closing(Organization(org.root, clock=clock)) as heir:
        ends: list[str] = []
        for statement in itertools.count(1):
            assignment, _ = abandoned(heir)
            message = heir.send("master-course", OPERATOR, "s", "b")
            relay.claim(heir.db, message.id, OPERATOR)
            clock.advance(timedelta(days=1))
            if not killed_after_statement(statement, tick_once, org.root, clock()):
                break
            left = ledger_facts(heir.db, assignment.id)
            assert left in (RUNNING, RECOVERED), statement
            report = tick(heir)
            assert report.recovered_assignments == ((assignment.id,) if left == RUNNING else ())
            assert ledger_facts(heir.db, assignment.id) == RECOVERED
            assert relay.get_message(heir.db, message.id).state == "NEW"
            assert_disk_follows_the_ledger(heir)
            before = everything(heir)
            assert tick(heir).problems == ()
            assert everything(heir) == before
            ends.append(left["assignment"])
    assert len(ends) > 15
    assert ends == sorted(ends, reverse=True), "once it is recovered, no later death undoes it"
    assert {*ends} == {"RUNNING", "FAILED"}


# --- supervisors and late workers (hazard 58) -------------------------------------------------------------


LEADS_SECONDS = (0.0, 0.02, -0.02, 0.001, -0.001, 0.004, -0.004)
"""What the supervisors have on the worker, round by round: so that now the one comes first, and now the other."""


def race(number: int, root: Path, barrier: Any, rounds: int) -> Any:
    org = Organization(root)
    try:
        return late_worker(org, barrier, rounds) if number == 0 else rival_supervisor(org, barrier, rounds)
    except BaseException:
        barrier.abort()
        raise
    finally:
        org.close()


def late_worker(org: Organization, barrier: Any, rounds: int) -> dict[str, str]:
    said: dict[str, str] = {}

    def late(*args: Any) -> Any:
        proposal = works(*args)
        eventually(lambda: fencing.expired_execution_attempts(org.db), every=0.0)
        barrier.wait(60)
        time.sleep(max(0.0, LEADS_SECONDS[len(said) % len(LEADS_SECONDS)]))
        return proposal

    organization.invoke_actor = late
    runs.Keeper._keep = lambda keeper: keeper._over.wait()  # a worker is late because its keeper was
    for _ in range(rounds):
        _, _, assignment = governed_work(org)
        said[assignment.id] = answer(org.run_assignment, assignment.id)
        barrier.wait(60)
    return said


def rival_supervisor(org: Organization, barrier: Any, rounds: int) -> list[str]:
    recovered: list[str] = []
    for number in range(rounds):
        barrier.wait(60)
        time.sleep(max(0.0, -LEADS_SECONDS[number % len(LEADS_SECONDS)]))
        recovered += tick(org).recovered_assignments
        barrier.wait(60)
    return recovered


def test_of_two_supervisors_and_a_late_worker_exactly_one_writes_the_end(org: Organization) -> None:
    rounds = 60 if org.db.engine == "sqlite" else 30
    configure(org, lambda document: document["authority"].update(execution_attempt_seconds=0.001))
    said, by_one, by_other = at_one_barrier(3, race, org.root, _processes.Barrier(3), rounds)
    lost = {assignment_id for assignment_id, end in said.items() if end == "execution_attempt_lost"}
    won = {assignment_id for assignment_id, end in said.items() if end == "done"}
    assert len(won) + len(lost) == rounds
    assert sorted(by_one + by_other) == sorted(lost)
    for assignment_id in won:
        assert ledger_facts(org.db, assignment_id) == COMPLETED
    for assignment_id in lost:
        assert ledger_facts(org.db, assignment_id) == RECOVERED
    assert len(rows(org.db, "receipts")) == rounds
    assert rows(org.db, "actor_leases") == []
    assert_disk_follows_the_ledger(org)
    assert won, "the worker never came first"
    assert lost, "no supervisor ever came first"


def test_a_supervisor_that_comes_too_late_writes_nothing_anywhere(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    _, _, assignment = governed_work(org)
    scan, seen, before = fencing.expired_attempts, [], {}

    def scan_and_be_overtaken(*args: Any, **options: Any) -> list[ExecutionAttempt]:
        found = scan(*args, **options)
        if found and not seen:
            seen.extend(found)
            go_on.set()
            worker.join()
            before.update(everything(org))
        return found

    go_on, worker = threading.Event(), threading.Thread(target=org.run_assignment, args=(assignment.id,))
    monkeypatch.setattr(organization, "invoke_actor", lambda *args: (go_on.wait(30), works(*args))[1])
    worker.start()
    eventually(lambda: ledger_facts(org.db, assignment.id)["assignment"] == "RUNNING")
    monkeypatch.setattr(fencing, "expired_attempts", scan_and_be_overtaken)
    report = tick(org, FAR)
    assert [attempt.assignment_id for attempt in seen] == [assignment.id]
    assert (report.recovered_assignments, report.problems) == ((), ())
    assert everything(org) == before
    assert ledger_facts(org.db, assignment.id) == COMPLETED
    assert_disk_follows_the_ledger(org)


def test_a_worker_that_comes_too_late_writes_nothing_anywhere(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[str, Any] = {}

    def is_recovered_meanwhile(*args: Any) -> Any:
        proposal = works(*args)
        assert len(tick(org, FAR).recovered_assignments) == 1
        before.update(everything(org))
        return proposal

    monkeypatch.setattr(organization, "invoke_actor", is_recovered_meanwhile)
    _, _, assignment = governed_work(org)
    assert answer(org.run_assignment, assignment.id) == "execution_attempt_lost"
    assert everything(org) == before | {"actor_leases": []}
    assert ledger_facts(org.db, assignment.id) == RECOVERED
    assert_disk_follows_the_ledger(org)


@pytest.mark.parametrize("late_by", [timedelta(0), timedelta(hours=23)], ids=["at the boundary", "long after"])
def test_expiry_alone_refuses_nothing_and_whoever_acts_first_is_the_only_one(
    org: Organization, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, late_by: timedelta
) -> None:
    late = Organization(org.root, clock=clock)

    def lasts_too_long(*args: Any) -> Any:
        clock.advance(late.settings.authority.attempt_ttl - timedelta(microseconds=1))
        assert tick(late).recovered_assignments == ()
        clock.advance(timedelta(microseconds=1) + late_by)
        return works(*args)

    monkeypatch.setattr(organization, "invoke_actor", lasts_too_long)
    _, _, assignment = governed_work(late)
    assert late.run_assignment(assignment.id).status == "completed"
    assert tick(late).recovered_assignments == ()
    assert fresh_facts(org, assignment) == COMPLETED
    late.close()


# --- rows and folders that cannot be dealt with -----------------------------------------------------------


def spoil_sow(org: Organization, attempt: ExecutionAttempt) -> None:
    sow_id = outcomes.get_assignment(org.db.connection, attempt.assignment_id).sow_id
    org.db.connection.execute("UPDATE sows SET state = 'APPROVED' WHERE id = ?", (sow_id,))


def write_a_receipt_too_early(org: Organization, attempt: ExecutionAttempt) -> None:
    with org.db.transaction() as connection:
        journal.write_receipt(connection, journal.lost_receipt(attempt), at=org.db.now())


IMPOSSIBLE = pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(spoil_sow, id="its sow is in another state"),
        pytest.param(write_a_receipt_too_early, id="its receipt is already there"),
    ],
)


@IMPOSSIBLE
def test_an_impossible_row_is_reported_left_alone_and_stops_nobody_else(
    org: Organization, spoil: Callable[[Organization, ExecutionAttempt], None]
) -> None:
    first, _ = abandoned(org)
    spoiled, attempt = abandoned(org)
    last, _ = abandoned(org)
    spoil(org, attempt)
    before = ledger_facts(org.db, spoiled.id)
    report = tick(org, FAR)
    assert set(report.recovered_assignments) == {first.id, last.id}
    assert [ledger_facts(org.db, each.id) for each in (first, spoiled, last)] == [RECOVERED, before, RECOVERED]
    (problem,) = report.problems
    assert attempt.id in problem
    assert spoiled.id in problem
    unchanged = everything(org)
    assert tick(org, FAR).problems == (problem,)
    assert everything(org) == unchanged


@pytest.mark.parametrize(("expires_at", "recovered"), [(0, True), (253_402_300_799_999_999, False)])
def test_an_attempt_with_an_absurd_expiry_is_judged_by_it_like_any_other(
    org: Organization, expires_at: int, *, recovered: bool
) -> None:
    assignment, attempt = abandoned(org)
    other, _ = abandoned(org)
    org.db.connection.execute(
        "UPDATE execution_attempts SET expires_at = ?, deadline = ? WHERE id = ?", (expires_at, expires_at, attempt.id)
    )
    report = tick(org, FAR)
    assert set(report.recovered_assignments) == {other.id, *([assignment.id] if recovered else [])}
    assert report.problems == ()


def test_more_impossible_rows_than_a_batch_holds_do_not_stand_in_front_of_the_others(org: Organization) -> None:
    mass(org, supervisor.RECOVERY_BATCH + 5, prefix="bad")
    org.db.connection.execute("UPDATE sows SET state = 'DRAFT' WHERE id LIKE 'sow_bad%'")
    last, _ = abandoned(org)
    report = tick(org, FAR)
    assert report.recovered_assignments == (last.id,)
    assert len(report.problems) == supervisor.RECOVERY_BATCH + 5


def test_every_page_of_folders_is_dealt_with_and_counted(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RECOVERY_BATCH", 2)
    mass(org, 5)
    assert tick(org, FAR).folders_dealt_with == 5
    assert tick(org, FAR).folders_dealt_with == 0
    assert_disk_follows_the_ledger(org)


def test_an_attempt_that_ended_without_a_receipt_is_named_by_each_tick(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, attempt = abandoned(org)
    monkeypatch.setattr(journal, "receipt_of_attempt", lambda *_: None)
    for _ in range(2):
        report = tick(org, FAR)
        assert report.problems == (f"Attempt {attempt.id} has ended without a receipt.",)
        assert report.folders_dealt_with == 0


def test_a_folder_that_somebody_else_is_at_is_no_problem_and_left_to_a_later_tick(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(org)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(runs, "apply_workspace_policy", lambda *_: workspace.Reclaim("busy", ("at work",)))
        report = tick(org, FAR)
        assert (report.problems, report.folders_dealt_with) == ((), 0)
    assert tick(org, FAR).folders_dealt_with == 1


def test_an_unknown_workspace_policy_in_a_row_is_reported_and_stops_nobody_else(org: Organization) -> None:
    spoiled, attempt = abandoned(org)
    other, _ = abandoned(org)
    org.db.connection.execute("UPDATE assignments SET workspace_policy = 'burn' WHERE id = ?", (spoiled.id,))
    report = tick(org, FAR)
    assert set(report.recovered_assignments) == {spoiled.id, other.id}
    assert [attempt.id in problem and "burn" in problem for problem in report.problems] == [True]
    assert ledger_facts(org.db, spoiled.id) == RECOVERED
    assert files(org.root).keys() == {
        f"{attempt_of(org, other.id)}/{name}" for name in ("receipt.json", "receipt.json.sha256")
    }


def test_a_folder_that_cannot_be_written_is_a_problem_and_a_later_tick_finishes_the_job(org: Organization) -> None:
    assignment, attempt = abandoned(org)
    (org.root / ".sovereign").mkdir(exist_ok=True)
    (org.root / ".sovereign" / "runs").write_text("not a folder")
    report = tick(org, FAR)
    assert report.recovered_assignments == (assignment.id,)
    assert [attempt.id in problem for problem in report.problems] == [True]
    before = {table: rows(org.db, table) for table in TABLES}
    assert tick(org, FAR).problems == report.problems
    assert {table: rows(org.db, table) for table in TABLES} == before
    (org.root / ".sovereign" / "runs").unlink()
    assert tick(org, FAR).problems == ()
    assert_disk_follows_the_ledger(org)


def two_ticks_as_nobody(root: str) -> tuple[Any, ...]:
    with closing(Organization(root)) as org:  # opened while this user can still read the interpreter's own files
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        reports = [tick(org, FAR) for _ in range(2)]
    return tuple(
        (list(report.recovered_assignments), sorted({problem.partition(":")[0] for problem in report.problems}))
        for report in reports
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that another user cannot remove")
def test_a_folder_that_can_only_be_reclaimed_in_part_stays_partial_until_it_can() -> None:
    with tempfile.TemporaryDirectory() as root, closing(Organization.init(root)) as org:
        assignment, attempt = abandoned(org)
        foreign = workspace.allocate(root, attempt.id).raw / "foreign"
        foreign.mkdir()
        scratch = foreign / "scratch"
        scratch.write_text("of another user")
        for path in [org.root, *org.root.rglob("*")]:
            if path not in (foreign, scratch):
                os.chown(path, NOBODY, NOBODY)
        left = [f"In the folder of attempt {attempt.id} is left"]
        assert in_a_fresh_process(two_ticks_as_nobody, root) == (([assignment.id], left), ([], left))
        assert ledger_facts(org.db, assignment.id) == RECOVERED
        (scratch,) = run_folder(org, attempt.id).rglob("scratch")
        os.chown(scratch.parent, NOBODY, NOBODY)
        assert in_a_fresh_process(two_ticks_as_nobody, root) == (([], []), ([], []))
        assert_disk_follows_the_ledger(org)


@pytest.mark.parametrize("replacement", ["a file", "a link", "a dangling link"])
def test_a_program_that_replaced_its_own_folder_costs_one_more_tick_and_nothing_outside(
    org: Organization, tmp_path: Path, replacement: str
) -> None:
    _, attempt = abandoned(org)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    folder = run_folder(org, attempt.id)
    folder.parent.mkdir(parents=True)
    if replacement == "a file":
        folder.write_text("no folder")
    else:
        folder.symlink_to(outside if replacement == "a link" else tmp_path / "nowhere")
    assert len(tick(org, FAR).problems) == 1
    assert tick(org, FAR).problems == ()
    assert_disk_follows_the_ledger(org)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"precious": "mine"}


# --- very many at once ------------------------------------------------------------------------------------


def mass(org: Organization, count: int, *, prefix: str = "mass") -> None:
    """`count` assignments, RUNNING under attempts that ran out long ago; each with an outcome of its own."""
    now = micros(org.db.now())
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
    with org.db.immediate() as connection:
        connection.execute(
            numbers + "INSERT INTO outcomes SELECT 'out_' || ? || i, 't', 'd', '[]', 'o', '', 'ACTIVE', ? FROM n",
            (count, prefix, now),
        )
        connection.execute(
            numbers
            + """INSERT INTO sows SELECT 'sow_' || ? || i, 'out_' || ? || i, 's', 'operator', 'm', NULL,
                                         'RUNNING', ? FROM n""",
            (count, prefix, prefix, now),
        )
        connection.execute(
            numbers
            + """INSERT INTO assignments SELECT 'asg_' || ? || i, 'sow_' || ? || i, 'a', 'm', 'temporary_directory',
                                                'RUNNING', 'att_' || ? || i, ?, NULL, 60 FROM n""",
            (count, prefix, prefix, prefix, now),
        )
        connection.execute(
            numbers
            + """INSERT INTO execution_attempts SELECT 'att_' || ? || i, 'asg_' || ? || i, 'a', 'proc_gone',
                                                       1000000 + i, 1, 'ACTIVE', 0, i, i, 1,
                                                       '', '{}', i, '', 0 FROM n""",
            (count, prefix, prefix),
        )


def tick_until_quiet(org: Organization) -> list[str]:
    recovered: list[str] = []
    while True:
        with suppress(Contention):
            report = tick(org)
            assert report.problems == ()
            if not report.recovered_assignments:
                return recovered
            recovered += report.recovered_assignments


def at_work_under_a_mass_recovery(number: int, root: Path, quiet: Any) -> Any:
    """Three supervisors; and, as number 3, a worker that goes on as if nothing were the matter."""
    org = Organization(root)
    try:
        return longest_round_of_work(org, quiet) if number == 3 else tick_until_quiet(org)
    finally:
        quiet.release()
        org.close()


def longest_round_of_work(org: Organization, quiet: Any) -> float:
    organization.invoke_actor = works
    longest, supervisors = 0.0, 3
    while supervisors:
        begun = time.monotonic()
        _, _, assignment = governed_work(org)
        assert org.run_assignment(assignment.id).status == "completed"
        message = org.send("master-course", OPERATOR, "s", "b")
        claim = relay.claim(org.db, message.id, OPERATOR)
        relay.complete(org.db, message.id, OPERATOR, fencing_token=claim.fencing_token or 0)
        longest = max(longest, time.monotonic() - begun)
        supervisors -= quiet.acquire(block=False)
    return longest


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=[pytest.mark.torture, pytest.mark.timeout(600)])])
def test_very_many_lost_workers_are_recovered_once_each_while_work_goes_on(org: Organization, count: int) -> None:
    mass(org, count)
    quiet = _processes.Semaphore(0)
    *recovered, longest = at_one_barrier(4, at_work_under_a_mass_recovery, org.root, quiet, within=500)
    assert sorted(itertools.chain(*recovered)) == sorted(f"asg_mass{i}" for i in range(1, count + 1))
    (receipts,) = org.db.connection.execute(
        "SELECT count(*), count(DISTINCT attempt_id) FROM receipts WHERE failure_category = 'worker_lost'"
    )
    assert tuple(receipts) == (count, count)
    (events,) = org.db.connection.execute("SELECT count(*) FROM events WHERE kind = 'assignment.recovered'")
    assert events[0] == count
    assert_disk_follows_the_ledger(org)
    assert longest < 5.0


# --- clocks that jump (hazard 46) -------------------------------------------------------------------------


@pytest.mark.parametrize("year", [1970, 2106])
def test_recovery_works_the_same_in(org: Organization, year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(datetime(year, 6, 1, tzinfo=UTC))
    there = Organization(org.root, clock=clock)

    def is_recovered_meanwhile(*args: Any) -> Any:
        clock.advance(EXECUTION_ATTEMPT_TTL)
        assert len(tick(there).recovered_assignments) == 1
        return works(*args)

    monkeypatch.setattr(organization, "invoke_actor", is_recovered_meanwhile)
    _, _, assignment = governed_work(there)
    assert answer(there.run_assignment, assignment.id) == "execution_attempt_lost"
    assert ledger_facts(org.db, assignment.id) == RECOVERED
    there.close()


def test_a_clock_set_back_delays_recovery_by_the_jump_and_a_clock_set_ahead_only_hastens_it(
    org: Organization,
) -> None:
    assignment, attempt = abandoned(org)
    other, _ = abandoned(org)
    back = ManualClock(attempt.acquired_at - timedelta(hours=1))
    assert tick(org, back).recovered_assignments == ()
    back.advance(timedelta(hours=1) + EXECUTION_ATTEMPT_TTL)
    assert tick(org, back).recovered_assignments == (assignment.id,)
    assert set(tick(org, FAR).recovered_assignments) == {other.id}
    assert [ledger_facts(org.db, each.id) for each in (assignment, other)] == [RECOVERED, RECOVERED]


def test_work_done_again_after_the_clock_was_set_back_is_judged_by_its_last_run(
    org: Organization, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    late = Organization(org.root, clock=clock)
    outcome, sow, assignment = governed_work(late)
    late.run_assignment(assignment.id)
    (run_folder(late, attempt_of(late, assignment.id)) / ".sovereign-out" / "till.txt").unlink()
    assert not late.verify_sow(sow.id, "verifier-course").passed
    clock.advance(-timedelta(hours=1))
    late.run_assignment(late.assign(sow.id, OPERATOR, "master-course").id)
    assert judge_and_accept(late, outcome.id, sow.id) == "ACCEPTED"
    late.close()


def test_of_two_supervisors_whose_clocks_are_90_seconds_apart_one_recovers_and_neither_twice(
    org: Organization,
) -> None:
    assignment, attempt = abandoned(org)
    ahead = ManualClock(attempt.expires_at)
    behind = ManualClock(attempt.expires_at - timedelta(seconds=90))
    assert tick(org, behind).recovered_assignments == ()
    assert tick(org, ahead).recovered_assignments == (assignment.id,)
    behind.advance(timedelta(seconds=90))
    assert tick(org, behind).recovered_assignments == ()
    assert ledger_facts(org.db, assignment.id) == RECOVERED


# --- revoking and signalling (hazards 49 and 55) ----------------------------------------------------------


def hang_until_told(pipe: Any, root: Path, assignment_id: str) -> None:
    """For `child`: a worker whose program ends when we say so, and who then says how its run ended."""
    organization.invoke_actor = lambda *args: (pipe.recv(), works(*args))[1]
    with closing(Organization(root)) as org:
        pipe.send(answer(org.run_assignment, assignment_id))


def test_a_stopped_worker_is_revoked_without_being_asked_and_its_actor_is_free(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    outcome, sow, assignment = governed_work(org)
    with child(hang_until_told, org.root, assignment.id) as (worker, pipe):
        eventually(lambda: ledger_facts(org.db, assignment.id)["assignment"] == "RUNNING")
        eventually(lambda: [*org.root.glob(".sovereign/runs/*/.sovereign-out")])  # its folder is made, whole
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            assert org.cancel(assignment.id, "principal-human").state == "CANCELED"
            assert fencing.current_actor_lease(org.db, OPERATOR) is None
            again = org.assign(sow.id, OPERATOR, "master-course")
            assert org.run_assignment(again.id).status == "completed"
            before = everything(org)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        pipe.send("go on")
        assert heard(pipe) == "execution_attempt_lost"
    assert ledger_facts(org.db, assignment.id)["receipts"] == [("failed", "interrupted")]
    after = everything(org)
    assert after.pop("disk").items() >= before.pop("disk").items()
    assert after == before
    assert judge_and_accept(org, outcome.id, sow.id) == "ACCEPTED"
    assert tick(org).problems == ()
    assert_disk_follows_the_ledger(org)


def test_no_room_but_the_providers_can_signal_a_process() -> None:
    package = Path(supervisor.__file__).parent
    words = {"kill", "killpg", "pidfd_send_signal", "pthread_kill", "raise_signal", "send_signal", "terminate"}
    found = {
        (path.relative_to(package).as_posix(), node.attr)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in words
    }
    rooms = {path for path, _ in found if path.split("/")[0] not in ("providers", "commands", "testing")}
    assert found, "the words are wrong: at least the providers must be found"
    assert rooms == set()


# --- the loop ---------------------------------------------------------------------------------------------

LOOP = """
import sys
from sovereign_agent import supervisor
from sovereign_agent.organization import Organization
sys.exit(supervisor.run(Organization(sys.argv[1]), interval=float(sys.argv[2])))
"""


@contextmanager
def a_supervisor(org: Organization, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A real supervisor process that has ticked at least once."""
    now = org.db.now()
    message = org.send("master-course", OPERATOR, "s", "b")
    relay.claim(org.db, message.id, OPERATOR, clock=lambda: now - relay.CLAIM_TTL)
    child = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: relay.get_message(org.db, message.id).state == "NEW" or child.poll() is not None)
        yield child
    finally:
        child.kill()
        child.communicate()


def test_once_runs_one_tick_and_exits_zero(org: Organization) -> None:
    assignment, _ = abandoned(org)
    org.db.connection.execute("UPDATE execution_attempts SET expires_at = 1")
    command = [sys.executable, "-m", "sovereign_agent", "supervisor", "--root", str(org.root), "--once"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert fresh_facts(org, assignment) == RECOVERED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sigint_or_sigterm_ends_the_loop_at_once_cleanly(org: Organization, number: signal.Signals) -> None:
    with a_supervisor(org, "-c", LOOP, str(org.root), "3600") as child:
        child.send_signal(number)
        _, errors = child.communicate(timeout=10)
        assert (child.returncode, errors) == (0, "")


def test_the_command_ends_on_sigint_as_the_loop_does(org: Organization) -> None:
    with a_supervisor(org, "-m", "sovereign_agent", "supervisor", "--root", str(org.root)) as child:
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=10)
        assert (child.returncode, errors) == (0, "")


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("gap", [0.0, 0.001, 0.005, 0.02, 0.08])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_double_sigint_ends_the_loop_as_cleanly_as_one(org: Organization, gap: float, second: signal.Signals) -> None:
    with a_supervisor(org, "-c", LOOP, str(org.root), "3600") as child:
        child.send_signal(signal.SIGINT)
        time.sleep(gap)
        child.send_signal(second)
        _, errors = child.communicate(timeout=10)
        assert (child.returncode, errors) == (0, "")


STUCK = """
import sys, time
from pathlib import Path
from sovereign_agent import fencing, supervisor
from sovereign_agent.organization import Organization
org, recorded = Organization(sys.argv[1]), fencing.end_attempt

def stuck(*args, **options):
    recorded(*args, **options)
    Path(sys.argv[2]).touch()
    time.sleep(3600)

fencing.end_attempt = stuck
sys.exit(supervisor.run(org, interval=3600.0))
"""


def test_sigint_in_the_middle_of_a_recovery_undoes_it_and_frees_the_ledger(org: Organization, tmp_path: Path) -> None:
    assignment, _ = abandoned(org)
    org.db.connection.execute("UPDATE execution_attempts SET expires_at = 1")
    with a_supervisor(org, "-c", STUCK, str(org.root), str(tmp_path / "stuck")) as child:
        eventually((tmp_path / "stuck").exists)
        assert ledger_facts(org.db, assignment.id) == RUNNING
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=10)
        assert (child.returncode, errors) == (0, "")
    assert fresh_facts(org, assignment) == RUNNING
    assert tick(org).recovered_assignments == (assignment.id,)
    assert fresh_facts(org, assignment) == RECOVERED


IN_A_FINALIZER = """
import os, signal, sys
from sovereign_agent import supervisor
from sovereign_agent.organization import Organization

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

sys.exit(supervisor.run(Organization(sys.argv[1]), interval=3600.0, on_tick=lambda report: Finalized() and None))
"""


def test_sigint_inside_a_finalizer_is_not_lost(org: Organization) -> None:
    command = [sys.executable, "-c", IN_A_FINALIZER, str(org.root)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_busy_ledger_costs_the_loop_a_tick_and_a_broken_one_ends_it(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Contention("busy"), LedgerUnavailable("gone"), tick(org), SchemaMismatch("another version's")]
    shown: list[supervisor.SupervisorReport] = []

    def one_after_another(_org: Organization) -> supervisor.SupervisorReport:
        said = answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(supervisor, "tick", one_after_another)
    assert answer(supervisor.run, org, interval=0.0, on_tick=shown.append) == "SchemaMismatch"
    assert [report.problems for report in shown] == [("gone ",), ()]


def test_once_a_busy_ledger_is_said_to_be_busy(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_org: Organization) -> supervisor.SupervisorReport:
        raise Contention("busy")

    monkeypatch.setattr(supervisor, "tick", busy)
    with pytest.raises(Contention):
        supervisor.run(org, once=True)


@pytest.mark.parametrize("trouble", [Contention, LedgerUnavailable])
@pytest.mark.parametrize(
    ("room", "step"),
    [
        (relay, "sweep_expired_claims"),
        (runs, "was_asked_to_stop"),
        (fencing, "end_attempt"),
        (journal, "receipt_of_attempt"),
    ],
    ids=["sweep", "evidence", "recovery", "folder"],
)
def test_a_ledger_that_is_busy_or_gone_ends_a_tick_and_is_no_problem_of_a_row(
    org: Organization, monkeypatch: pytest.MonkeyPatch, room: Any, step: str, trouble: type[SovereignError]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise trouble("The ledger does not answer.")

    assignment, _ = abandoned(org)
    with monkeypatch.context() as while_it_lasts, pytest.raises(trouble):
        while_it_lasts.setattr(room, step, fails)
        tick(org, FAR)
    tick(org, FAR)
    assert ledger_facts(org.db, assignment.id)["attempts"] == ["RECOVERED"]
    assert_disk_follows_the_ledger(org)


def test_no_want_of_evidence_keeps_a_recovery_waiting(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise ConfigurationFault("Nobody can say.")

    assignment, _ = abandoned(org)
    monkeypatch.setattr(liveness, "look", fails)
    assert answer(tick, org, FAR) == "done"
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    assert receipt.detail["evidence"] == {"cause": "unknown", "fault": "ConfigurationFault"}


def test_a_keyboard_interrupt_that_no_signal_brought_ends_the_loop_and_leaves_the_handlers_as_they_were(
    org: Organization,
) -> None:
    def stop(_report: supervisor.SupervisorReport) -> None:
        raise KeyboardInterrupt

    before = [signal.getsignal(number) for number in supervisor.STOP_SIGNALS]
    assert supervisor.run(org, on_tick=stop) == 0
    assert [signal.getsignal(number) for number in supervisor.STOP_SIGNALS] == before


def test_the_loop_runs_in_a_thread_that_may_not_set_handlers(org: Organization) -> None:
    def stop(report: supervisor.SupervisorReport) -> None:
        told.append(report)
        raise KeyboardInterrupt

    told: list[supervisor.SupervisorReport] = []
    ends: list[int] = []
    thread = threading.Thread(target=lambda: ends.append(supervisor.run(org, on_tick=stop)))
    thread.start()
    thread.join(30)
    assert (ends, len(told)) == ([0], 1)


def interrupted_by(number: signal.Signals) -> bool:
    """Send a signal to this very process. Whether KeyboardInterrupt came of it, here and now."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", supervisor.STOP_SIGNALS)
@pytest.mark.parametrize("second", supervisor.STOP_SIGNALS)
def test_the_first_signal_interrupts_and_any_further_one_does_nothing(
    first: signal.Signals, second: signal.Signals
) -> None:
    with supervisor.first_signal_interrupts() as one_came:
        seen = [one_came(), interrupted_by(first), one_came(), interrupted_by(second), one_came()]
    assert seen == [False, True, True, False, True]
    assert [signal.getsignal(number) for number in supervisor.STOP_SIGNALS] == [signal.SIG_IGN] * 2


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("came", [True, False])
def test_no_signal_is_heard_while_the_handlers_change_back(monkeypatch: pytest.MonkeyPatch, *, came: bool) -> None:
    """Python prints a trace of a signal that it noted for a handler and finds ignored: "due to race condition"."""

    def noting(*change: Any) -> Any:
        held.append(blocked())
        return sets(*change)

    def blocked() -> list[signal.Signals]:
        return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*supervisor.STOP_SIGNALS})

    held: list[list[signal.Signals]] = []
    sets = signal.signal
    with monkeypatch.context() as while_it_lasts, supervisor.first_signal_interrupts():
        while_it_lasts.setattr(signal, "signal", noting)
        assert interrupted_by(signal.SIGINT) if came else not blocked()
    assert (held, blocked()) == ([sorted(supervisor.STOP_SIGNALS)] * 2, [])


@pytest.mark.usefixtures("handlers")
def test_the_loop_waits_its_interval_after_each_tick_but_not_after_a_signal(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Collected:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)  # it cannot interrupt here: the loop has to ask

    def wait(seconds: float) -> None:
        done.append(seconds)
        if len(done) > 5:
            raise KeyboardInterrupt

    def ticked(_report: supervisor.SupervisorReport) -> None:
        done.append("tick")
        if len(done) == 5:
            Collected()

    done: list[str | float] = []
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(sleep=wait))
    assert supervisor.run(org, interval=7.0, on_tick=ticked) == 0
    assert done == ["tick", 7.0, "tick", 7.0, "tick"]


def test_once_ticks_once_and_anything_else_is_a_loop(org: Organization) -> None:
    def ticked(report: supervisor.SupervisorReport) -> None:
        told.append(report)
        if len(told) > 2:
            raise KeyboardInterrupt

    told: list[supervisor.SupervisorReport] = []
    assert (supervisor.run(org, once=True, on_tick=ticked), len(told)) == (0, 1)
    assert (supervisor.run(org, interval=0.0, on_tick=ticked), len(told)) == (0, 3)
