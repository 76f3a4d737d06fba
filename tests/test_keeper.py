"""The keeper: authority lasts as long as the work, and not a moment longer than the ledger has confirmed it.

Ledgers are real, and so is whoever keeps them busy; leases are short, so that nothing is waited out for long. A program
that stands in for `organization.invoke_actor` obeys its leash as a real one's guardian makes it: it works until the
leash is cut or has run out.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing import Process
from pathlib import Path
from typing import Any

import pytest
from conftest import Location
from support import (
    ACTOR,
    BUMP,
    _processes,
    answer,
    at_one_barrier,
    attempt_on,
    child,
    configure,
    eventually,
    governed_work,
    heard,
    hook_after,
    ledger_facts,
    rows,
    run_of,
    until_blocked,
    works,
)

from sovereign_agent import (
    assistant_service,
    configuration,
    fencing,
    journal,
    liveness,
    organization,
    outcomes,
    runs,
    supervisor,
)
from sovereign_agent.clock import ManualClock, micros, monotonic
from sovereign_agent.configuration import load
from sovereign_agent.database import Database
from sovereign_agent.errors import AuthorityLost, ConfigurationFault, Contention, SovereignError
from sovereign_agent.liveness import Evidence, Sight
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Envelope, Proposal
from sovereign_agent.providers.process import Leash
from sovereign_agent.records import Assignment, ExecutionAttempt, ReceiptStatus
from sovereign_agent.supervisor import tick
from sovereign_agent.workspace import Workspace

OPERATOR = "operator-course"
PRINCIPAL = "principal-human"
MASTER = "master-course"
CANONICAL = ("assignments", "sows", "outcomes", "receipts", "events")


def lasting(org: Organization, seconds: float, **more: Any) -> None:
    """Let lease and attempt last for `seconds` without renewal."""
    terms = {"actor_lease_seconds": seconds, "execution_attempt_seconds": seconds, **more}
    configure(org, lambda document: document["authority"].update(terms))


def obeys(leash: Leash, seconds: float) -> bool:
    """Work for `seconds`, or until the leash ends it: then False."""
    end = monotonic() + seconds
    while monotonic() < end:
        if leash.cut_for or (leash.until is not None and monotonic() > leash.until):
            return False
        time.sleep(0.01)
    return True


def working(seconds: float, ended: list[float] | None = None) -> Callable[..., Proposal]:
    """A program that works for `seconds`; when its leash ends it, that is noted in `ended` (monotonic)."""

    def program(settings: Any, envelope: Envelope, folder: Workspace, leash: Leash) -> Proposal:
        proposal = works(settings, envelope, folder)
        if obeys(leash, seconds):
            return proposal
        if ended is not None:
            ended.append(monotonic())
        return Proposal(ReceiptStatus.FAILED, "lease_lost", "It was stopped.", None)

    return program


def canonical(org: Organization) -> dict[str, Any]:
    return {table: rows(org.db, table) for table in CANONICAL}


def the_attempt(db: Database, assignment_id: str) -> ExecutionAttempt:
    with db.transaction() as connection:
        return eventually(lambda: fencing.active_attempt(connection, assignment_id))


def on_disk(org: Organization) -> list[str]:
    return sorted(path.name for path in (org.root / ".sovereign" / "runs").rglob("receipt.json*"))


# --- renewal: one transaction -----------------------------------------------------------------------------


def renewed(db: Database, attempt: ExecutionAttempt, **options: Any) -> timedelta:
    terms = {
        "attempt_ttl": timedelta(seconds=90),
        "lease_ttl": timedelta(seconds=60),
        "silent": timedelta(0),
        "step": "",
        "tolerance": timedelta(0),
    }
    return fencing.renew_run(db, attempt, **terms | options)


@pytest.fixture
def timed(location: Location, clock: ManualClock) -> Iterator[Database]:
    """A ledger that judges by the test's own clock."""
    database = location.open(clock=clock)
    yield database
    database.close()


def test_a_renewal_extends_attempt_and_lease_together_and_says_how_long_both_last(
    timed: Database, clock: ManualClock
) -> None:
    attempt = run_of(timed, clock)
    clock.advance(timedelta(minutes=1))
    assert renewed(timed, attempt) == timedelta(seconds=60)
    (lease,), (run,) = rows(timed, "actor_leases"), rows(timed, "execution_attempts")
    assert lease["expires_at"] == micros(clock() + timedelta(seconds=60))
    assert run["expires_at"] == micros(clock() + timedelta(seconds=90))
    assert lease["fencing_token"] == attempt.actor_lease_fencing_token


@pytest.mark.parametrize("lost", ["the attempt", "the lease"])
def test_a_renewal_that_cannot_have_both_takes_neither(timed: Database, clock: ManualClock, lost: str) -> None:
    attempt = run_of(timed, clock)
    if lost == "the attempt":
        clock.advance(fencing.ACTOR_LEASE_TTL - timedelta(seconds=1))
        timed.connection.execute("UPDATE execution_attempts SET expires_at = ?", (micros(clock()),))
    else:
        clock.advance(fencing.ACTOR_LEASE_TTL)
        fencing.acquire_actor_lease(timed, ACTOR, "proc_heir", clock=clock)
    before = rows(timed, "actor_leases"), rows(timed, "execution_attempts")
    said = "execution_attempt_lost" if lost == "the attempt" else "actor_lease_lost"
    assert answer(renewed, timed, attempt) == said
    assert (rows(timed, "actor_leases"), rows(timed, "execution_attempts")) == before


def test_a_renewal_reaches_to_the_attempts_deadline_and_no_further(timed: Database, clock: ManualClock) -> None:
    attempt = run_of(timed, clock, ttl=timedelta(minutes=2), maximum=timedelta(minutes=3))
    clock.advance(timedelta(minutes=1))
    assert renewed(timed, attempt, attempt_ttl=timedelta(hours=1)) == timedelta(seconds=60)
    clock.advance(timedelta(seconds=50))
    assert renewed(timed, attempt, attempt_ttl=timedelta(hours=1)) == timedelta(seconds=60)
    clock.advance(timedelta(seconds=50))
    assert renewed(timed, attempt, attempt_ttl=timedelta(hours=1)) == timedelta(seconds=20)
    clock.advance(timedelta(seconds=20))
    assert answer(renewed, timed, attempt) == "execution_attempt_lost"


def test_a_renewal_notes_what_the_program_shows_of_itself(timed: Database, clock: ManualClock) -> None:
    attempt = run_of(timed, clock)
    clock.advance(timedelta(minutes=1))
    renewed(timed, attempt, silent=timedelta(seconds=7), step="reads", tolerance=timedelta(seconds=30.9))
    (run,) = rows(timed, "execution_attempts")
    assert (run["step"], run["tolerance_seconds"]) == ("reads", 30)
    assert run["progress_at"] == micros(clock() - timedelta(seconds=7))


def take_or_renew(number: int, location: Location, attempt: ExecutionAttempt) -> str:
    """For `at_one_barrier`: number 0 renews, as the others take over what has just run out."""
    db = location.open()
    try:
        if number == 0:
            renewed(db, attempt)
            return "renewed"
        lease = fencing.acquire_actor_lease(db, ACTOR, f"proc_{number}")
        attempt_on(db, attempt.assignment_id, lease, None)
        return "taken"
    finally:
        db.close()


@pytest.mark.parametrize("left", [timedelta(milliseconds=milliseconds) for milliseconds in (-1, 40, 80, 120)])
def test_of_a_renewal_and_takeovers_one_wins_both_rows(db: Database, location: Location, left: timedelta) -> None:
    attempt = run_of(db, db.now)  # type: ignore[arg-type]
    soon = (micros(db.now() + left),)
    db.connection.execute("UPDATE execution_attempts SET expires_at = ?", soon)
    db.connection.execute("UPDATE actor_leases SET expires_at = ?", soon)
    said = at_one_barrier(3, take_or_renew, location, attempt)
    (lease,) = rows(db, "actor_leases")
    (active,) = [row for row in rows(db, "execution_attempts") if row["status"] == "ACTIVE"]
    assert active["actor_lease_fencing_token"] == lease["fencing_token"]
    assert active["process_identity"] == lease["process_identity"]
    assert (said.count("renewed") + said.count("taken")) == 1, said
    if said[0] == "renewed":
        assert (active["id"], lease["process_identity"]) == (attempt.id, attempt.process_identity)


def test_a_renewal_that_waited_for_a_takeover_is_refused_by_what_it_finds(
    timed: Database, location: Location, clock: ManualClock
) -> None:
    attempt = run_of(timed, clock)
    clock.advance(fencing.EXECUTION_ATTEMPT_TTL)
    with ThreadPoolExecutor(1) as pool:
        with timed.immediate() as connection:
            connection.execute("UPDATE actor_leases SET process_identity = 'proc_heir', expires_at = expires_at * 2")
            late = location.open(clock=clock)
            renewal = pool.submit(answer, renewed, late, attempt)
            until_blocked(timed, renewal)
        assert renewal.result(30) == "execution_attempt_lost"
        pool.submit(late.release).result(30)
    late.close()


def test_a_renewal_judges_by_a_clock_that_it_read_after_it_had_waited(timed: Database, clock: ManualClock) -> None:
    attempt = run_of(timed, clock)
    with hook_after(timed.connection, "FROM execution_attempts WHERE id", lambda: clock.advance(timedelta(hours=1))):
        assert answer(renewed, timed, attempt) == "execution_attempt_lost"


def test_a_cancellation_and_a_renewal_lock_in_the_same_order(org: Organization, location: Location) -> None:
    """One that took the attempt first would wait for the lease for ever, or be shot by the server."""
    _, _, assignment = governed_work(org)
    process = fencing.new_process_identity()
    lease = fencing.acquire_actor_lease(org.db, OPERATOR, process)
    attempt = fencing.acquire_execution_attempt(org.db, assignment.id, OPERATOR, process, lease.fencing_token)
    other = location.open()
    with ThreadPoolExecutor(1) as pool:

        def cancel() -> str:
            canceling = Organization(org.root)
            try:
                return answer(canceling.cancel, assignment.id, PRINCIPAL)
            finally:
                canceling.close()

        canceled = []

        def begin_to_cancel() -> None:
            canceled.append(pool.submit(cancel))
            if org.db.engine == "postgresql":
                until_blocked(other, canceled[0])

        with hook_after(org.db.connection, "FROM actor_leases", begin_to_cancel):
            assert answer(renewed, org.db, attempt) == "done"
        assert canceled[0].result(30) == "done"
    other.close()
    assert answer(renewed, org.db, attempt) == "execution_attempt_lost"


# --- a run that keeps its authority -----------------------------------------------------------------------


def test_a_healthy_run_of_three_times_its_ttl_completes_while_a_supervisor_watches(org: Organization) -> None:
    steps = [{"sleep": 4.5}, {"report": {"status": "completed", "summary": "it took its time"}}]
    configure(org, lambda document: document["providers"]["scripted"].update(steps=steps))
    lasting(org, 1.5)
    _, _, assignment = governed_work(org)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(org.run_assignment, assignment.id)
        while not run.done():
            assert tick(org).recovered_assignments == ()
            time.sleep(0.05)
    assert answer(run.result) == "done"
    assert ledger_facts(org.db, assignment.id)["receipts"] == [("completed", "")]
    assert rows(org.db, "actor_leases") == []


def locked_for(pipe: Any, location: Location, seconds: float, hogs: int) -> None:
    """For `child`: take every lock that a renewal needs for `seconds`, beside so many loops that want the processor."""
    spinning = [_processes.Process(target=spin, args=(os.getpid(),), daemon=True) for _ in range(hogs)]
    for each in spinning:
        each.start()
    db = location.open()
    with db.immediate() as connection:
        connection.execute(BUMP)
        connection.execute("SELECT 1 FROM actor_leases <for update>")
        pipe.send("locked")
        time.sleep(seconds)
    pipe.send("free")
    for each in spinning:
        each.kill()
        each.join()
    db.close()


def spin(parent: int) -> None:
    while os.getppid() == parent:
        pass


def busy(
    location: Location, seconds: float, program: Callable[..., Proposal], *, hogs: int = 0
) -> Callable[..., Proposal]:
    """A program under a ledger that another process locks for `seconds` from its beginning on."""

    def program_under_a_busy_ledger(*args: Any) -> Proposal:
        with child(locked_for, location, seconds, hogs) as (_, pipe):
            assert heard(pipe) == "locked"
            proposal = program(*args)
            assert heard(pipe) == "free"
            return proposal

    return program_under_a_busy_ledger


def test_hazard_48_a_run_keeps_its_lease_under_a_ledger_locked_for_5_s_and_a_cpu_hog(
    org: Organization, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(org, 9)
    hogs = (os.cpu_count() or 1) + 1
    monkeypatch.setattr(organization, "invoke_actor", busy(location, 5, working(10), hogs=hogs))
    _, _, assignment = governed_work(org)
    assert answer(org.run_assignment, assignment.id) == "done"
    assert ledger_facts(org.db, assignment.id)["receipts"] == [("completed", "")]


def test_hazard_52_a_run_whose_keeper_is_blocked_for_longer_than_the_ttl_is_fenced(
    org: Organization, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(org, 1.5)
    ended: list[float] = []
    monkeypatch.setattr(organization, "invoke_actor", busy(location, 3, working(8, ended)))
    _, _, assignment = governed_work(org)
    begun = monotonic()
    refusal = answer(org.run_assignment, assignment.id)
    assert refusal in ("lease_lost", "execution_attempt_lost")
    assert ended
    assert ended[0] - begun < 1.5 + 1.0, "the program must be stopped before the authority runs out"
    facts = ledger_facts(org.db, assignment.id)
    assert (facts["assignment"], facts["pointer"], facts["receipts"]) == ("RUNNING", "ACTIVE", [None])
    assert facts["events"] == ["assignment.created", "assignment.running"]
    assert on_disk(org) == []
    assert tick(org).recovered_assignments == (assignment.id,)
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    assert receipt.failure_category == "worker_lost"
    assert receipt.detail["evidence"]["cause"] == "lease_starved"


def test_a_keeper_without_an_answer_until_the_margin_cuts_the_leash_itself(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(org, 0.6)
    cut: list[str] = []

    def is_out_of_reach(*_: Any, **__: Any) -> None:
        raise Contention("The ledger is busy.", why="A test says so.")

    def never_ends(*args: Any) -> Proposal:
        proposal = works(*args)
        cut.append(eventually(lambda: args[-1].cut_for, within=5))
        return proposal

    monkeypatch.setattr(fencing, "renew_run", is_out_of_reach)
    monkeypatch.setattr(organization, "invoke_actor", never_ends)
    _, _, assignment = governed_work(org)
    with pytest.raises(AuthorityLost) as lost:
        org.run_assignment(assignment.id)
    assert (lost.value.category, cut) == ("lease_lost", ["lease_lost"])
    assert "A test says so." in lost.value.why
    assert ledger_facts(org.db, assignment.id)["receipts"] == [None]


def test_a_keeper_that_dies_of_whatever_it_is_counts_as_loss_and_never_as_silence(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(org, 0.6)

    def breaks(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for a thought")

    monkeypatch.setattr(fencing, "renew_run", breaks)
    monkeypatch.setattr(
        organization, "invoke_actor", lambda *args: (eventually(lambda: args[-1].cut_for), works(*args))[1]
    )
    _, _, assignment = governed_work(org)
    with pytest.raises(AuthorityLost, match="could not be confirmed") as lost:
        org.run_assignment(assignment.id)
    assert "MemoryError" in lost.value.why
    assert ledger_facts(org.db, assignment.id)["pointer"] == "ACTIVE"


def test_a_short_fault_of_the_ledger_is_tried_again_before_the_time_is_over(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(org, 1.5)
    renew, faults = fencing.renew_run, ["busy", "busy"]

    def stumbles(*args: Any, **options: Any) -> timedelta:
        if faults:
            faults.pop()
            raise Contention("The ledger is busy.")
        return renew(*args, **options)

    monkeypatch.setattr(fencing, "renew_run", stumbles)
    monkeypatch.setattr(organization, "invoke_actor", working(2.5))
    _, _, assignment = governed_work(org)
    assert answer(org.run_assignment, assignment.id) == "done"
    assert faults == []


def test_a_taken_over_run_stops_its_program_and_writes_nothing(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(org, 1.5)
    _, _, assignment = governed_work(org)
    heir, before = Organization(org.root), {}

    def is_taken_over(settings: Any, envelope: Envelope, folder: Workspace, leash: Leash) -> Proposal:
        over = micros(heir.db.now())
        with heir.db.immediate() as connection:
            connection.execute("UPDATE execution_attempts SET expires_at = ?", (over,))
            connection.execute("UPDATE actor_leases SET expires_at = ?", (over,))
        lease = fencing.acquire_actor_lease(heir.db, OPERATOR, heir.process_identity)
        attempt_on(heir.db, assignment.id, lease, None)
        before.update(canonical(heir))
        heir.db.connection.close()
        return working(8)(settings, envelope, folder, leash)

    monkeypatch.setattr(organization, "invoke_actor", is_taken_over)
    begun = monotonic()
    assert answer(org.run_assignment, assignment.id) == "execution_attempt_lost"
    assert monotonic() - begun < 5
    assert canonical(org) == before
    assert on_disk(org) == []
    heir.close()


def stopped_by(org: Organization, monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object]) -> tuple[str, str]:
    """The assignment of a run in whose middle `act` takes its authority, and what the run answers, soon after."""
    lasting(org, 12, renew_seconds=0.2)
    ended: list[float] = []
    monkeypatch.setattr(organization, "invoke_actor", working(20, ended))
    _, _, assignment = governed_work(org)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(answer, org.run_assignment, assignment.id)
        eventually(lambda: ledger_facts(org.db, assignment.id)["assignment"] == "RUNNING")
        act(assignment.id)
        taken_at, before = monotonic(), canonical(org)
        said = run.result(60)
    assert ended[0] - taken_at < 5, "long before the leash runs out by itself"
    assert canonical(org) == before
    return assignment.id, said


def test_hazard_49_a_canceled_run_is_stopped_at_its_next_renewal(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = stopped_by(org, monkeypatch, lambda assignment_id: org.cancel(assignment_id, PRINCIPAL))
    assert said == "execution_attempt_lost"


def test_hazard_91_a_new_epoch_stops_a_program_at_its_next_renewal(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_anew = partial(assistant_service.new_epoch, org.db, PRINCIPAL, "the disk was put back")
    assignment_id, said = stopped_by(org, monkeypatch, lambda _: begin_anew())
    assert said in {"execution_attempt_lost", "actor_lease_lost"}
    assert tick(org).recovered_assignments == (assignment_id,)


def test_a_run_renews_and_ends_while_the_ledger_is_paused(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting(org, 1.5)
    monkeypatch.setattr(organization, "invoke_actor", working(4))
    _, _, assignment = governed_work(org)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(answer, org.run_assignment, assignment.id)
        eventually(lambda: ledger_facts(org.db, assignment.id)["assignment"] == "RUNNING")
        assistant_service.pause(org.db, PRINCIPAL, "closing early")
        assert run.result(60) == "done"
    assert ledger_facts(org.db, assignment.id)["assignment"] == "COMPLETED"


def test_a_program_that_ended_before_the_loss_was_seen_is_judged_by_the_terminal_write(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leash that ran out is no verdict: nobody else took over, so what was finished counts."""
    lasting(org, 0.3)
    monkeypatch.setattr(runs.Keeper, "_keep", lambda keeper: keeper._over.wait())
    monkeypatch.setattr(organization, "invoke_actor", lambda *args: (time.sleep(0.4), works(*args))[1])
    _, _, assignment = governed_work(org)
    assert org.run_assignment(assignment.id).status == "completed"


@pytest.mark.parametrize("recovered", [True, False])
def test_a_program_whose_leash_ran_out_before_the_keeper_had_an_answer_is_refused_in_the_ledgers_words(
    org: Organization, monkeypatch: pytest.MonkeyPatch, *, recovered: bool
) -> None:
    """So it is when a stopped worker is continued: its program is gone, and its keeper has not spoken yet."""
    before: dict[str, Any] = {}

    def is_ended_by_its_guardian(*_: Any) -> Proposal:
        if recovered:
            over = org.db.now() + timedelta(hours=1)
            assert tick(org, lambda: over).recovered_assignments
        before.update(canonical(org))
        return Proposal(ReceiptStatus.FAILED, "lease_lost", "It was stopped.", None)

    monkeypatch.setattr(organization, "invoke_actor", is_ended_by_its_guardian)
    _, _, assignment = governed_work(org)
    said = answer(org.run_assignment, assignment.id)
    assert said == ("execution_attempt_lost" if recovered else "lease_lost")
    assert canonical(org) == before


def test_a_leash_is_lengthened_from_before_the_renewal_was_asked_for(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = fencing.renew_run

    def answers_late(*args: Any, **options: Any) -> timedelta:
        lasts = renew(*args, **options)
        time.sleep(0.3)
        return lasts

    def looks(settings: Any, envelope: Envelope, folder: Workspace, leash: Leash) -> Proposal:
        keeper = runs.Keeper(org.db, the_attempt(org.db, envelope.assignment_id), org.settings.authority)
        asked_at = monotonic()
        keeper._renew()
        assert monotonic() - asked_at > 0.3
        assert keeper.leash.until == pytest.approx(asked_at + 60 - 6, abs=0.2)
        return works(settings, envelope, folder, leash)

    monkeypatch.setattr(fencing, "renew_run", answers_late)
    monkeypatch.setattr(organization, "invoke_actor", looks)
    _, _, assignment = governed_work(org)
    assert org.run_assignment(assignment.id).status == "completed"


def test_the_keeper_renews_until_the_terminal_write_is_done(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting(org, 1.0)
    finish, since = fencing.finish_own_attempt, monotonic()

    def is_busy_for_long(*args: Any, **options: Any) -> None:
        if monotonic() - since < 3:
            raise Contention("The ledger is busy.")
        finish(*args, **options)

    monkeypatch.setattr(fencing, "finish_own_attempt", is_busy_for_long)
    monkeypatch.setattr(organization, "invoke_actor", works)
    _, _, assignment = governed_work(org)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(org.run_assignment, assignment.id)
        while not run.done():
            assert tick(org).recovered_assignments == ()
            time.sleep(0.05)
        assert run.result().status == "completed"


def run_in_a_process(pipe: Any, root: Path, assignment_id: str) -> None:
    """For `child`: a worker whose program ends when it is told to."""
    organization.invoke_actor = lambda *args: (pipe.send("running"), pipe.recv(), works(*args))[-1]
    org = Organization(root)
    pipe.send(answer(org.run_assignment, assignment_id))


@pytest.mark.parametrize("taken", [True, False], ids=["taken over meanwhile", "nobody came"])
def test_hazard_58_a_worker_that_was_stopped_renews_first_and_is_refused_only_if_somebody_took_over(
    org: Organization, *, taken: bool
) -> None:
    lasting(org, 1.0 if taken else 30.0)
    _, _, assignment = governed_work(org)
    with child(run_in_a_process, org.root, assignment.id) as (worker, pipe):
        assert heard(pipe) == "running"
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            if taken:
                eventually(lambda: tick(org).recovered_assignments)
            before = canonical(org)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        pipe.send("go on")
        assert heard(pipe) == ("execution_attempt_lost" if taken else "done")
    assert (canonical(org) == before) is taken


def test_a_keeper_leaves_no_session_and_no_thread_behind_over_fifty_runs(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(org, 0.3, renew_seconds=0.001)
    renew, renewals = fencing.renew_run, list[int]()

    def counting(*args: Any, **options: Any) -> timedelta:
        renewals.append(1)
        return renew(*args, **options)

    def until_renewed(*args: Any) -> Proposal:
        before = len(renewals)
        eventually(lambda: len(renewals) > before)
        return works(*args)

    monkeypatch.setattr(fencing, "renew_run", counting)
    monkeypatch.setattr(organization, "invoke_actor", until_renewed)
    open_sessions = []
    for _ in range(50):
        _, _, assignment = governed_work(org)
        answer(org.run_assignment, assignment.id)
        open_sessions.append(sum(not connection.closed for connection in org.db._all))
    assert {*open_sessions} == {1}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("keeper")]


def test_an_ordinary_run_is_four_commits(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    session = type(org.db.connection)
    commit, commits = session.commit, []
    _, _, assignment = governed_work(org)
    monkeypatch.setattr(organization, "invoke_actor", works)
    monkeypatch.setattr(session, "commit", lambda *of: (commits.append(1), commit(*of))[1])
    org.run_assignment(assignment.id)
    assert len(commits) == 4


# --- the declared maximum ---------------------------------------------------------------------------------


def test_a_run_is_given_its_declared_maximum_and_its_attempt_some_room_to_end_it(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def looks(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        seen.append((settings.timeout_seconds, the_attempt(org.db, envelope.assignment_id)))
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", looks)
    mine = {"kind": "command", "argv": ["true"], "timeout_seconds": 100.0, "grace_seconds": 7.0}
    configure(org, lambda document: document["providers"].update(mine=mine))
    configure(org, lambda document: document["actors"][OPERATOR].update(provider="mine"))
    for maximum in (30, 600):
        _, sow, assignment = governed_work(org)
        org.cancel(assignment.id, PRINCIPAL)
        again = org.assign(sow.id, OPERATOR, MASTER, maximum=timedelta(seconds=maximum))
        org.run_assignment(again.id)
        timeout, attempt = seen.pop()
        assert timeout == min(maximum, 100)
        assert attempt.deadline - attempt.acquired_at == timedelta(seconds=maximum + 7 + 60)


def test_a_program_that_outlasts_the_declared_maximum_fails_by_timeout(org: Organization) -> None:
    configure(org, lambda document: document["providers"]["scripted"].update(steps=[{"sleep": 60.0}]))
    _, sow, first = governed_work(org)
    org.cancel(first.id, PRINCIPAL)
    assignment = org.assign(sow.id, OPERATOR, MASTER, maximum=timedelta(seconds=1))
    receipt = org.run_assignment(assignment.id)
    assert receipt.failure_category == "timeout"
    assert "timeout_seconds of its provider, or the maximum of its assignment" in receipt.summary


@pytest.mark.parametrize(
    ("maximum", "taken"),
    [
        (timedelta(seconds=1), True),
        (timedelta(days=365), True),
        (timedelta(0), False),
        (timedelta(seconds=0.5), False),
        (timedelta(seconds=-5), False),
        (timedelta.max, False),
    ],
)
def test_a_maximum_that_no_run_can_have_is_refused(org: Organization, maximum: timedelta, *, taken: bool) -> None:
    _, sow, first = governed_work(org)
    org.cancel(first.id, PRINCIPAL)
    expected = "done" if taken else "invalid_number"
    assert answer(org.assign, sow.id, OPERATOR, MASTER, maximum=maximum) == expected


@pytest.mark.parametrize(("renew", "taken"), [(20.0, True), (20.1, False)])
def test_an_interval_of_more_than_a_third_of_the_ttl_is_refused_when_the_file_is_read(
    tmp_path: Path, renew: float, *, taken: bool
) -> None:
    text = configuration.default_text().replace("# renew_seconds = 20 ", f"renew_seconds = {renew} ")
    (tmp_path / "sovereign.toml").write_text(text)
    if taken:
        assert load(tmp_path).authority.renewal_seconds == renew
        return
    with pytest.raises(ConfigurationFault) as refused:
        load(tmp_path)
    line = next(number for number, each in enumerate(text.split("\n"), 1) if each.startswith("renew_seconds"))
    assert refused.value.inspect.endswith(f", line {line}")
    assert "at most 20" in refused.value.next_command


# --- what became of a lost worker -------------------------------------------------------------------------


def lose(org: Organization, assignment: Assignment, **evidence: Any) -> ExecutionAttempt:
    """Let a worker take an assignment, and let its time be over."""
    process = fencing.new_process_identity()
    lease = fencing.acquire_actor_lease(org.db, OPERATOR, process)
    token, here = lease.fencing_token, liveness.this_process() | evidence
    attempt = fencing.acquire_execution_attempt(
        org.db, assignment.id, OPERATOR, process, token, host=str(here["host"]), process=here
    )
    over = (micros(org.db.now()),)
    org.db.connection.execute("UPDATE execution_attempts SET expires_at = ? WHERE status = 'ACTIVE'", over)
    org.db.connection.execute("DELETE FROM actor_leases")
    return attempt


def dead() -> dict[str, Any]:
    """The pid and start time of a process that was there and is gone."""
    process = Process(target=time.sleep, args=(0,))
    process.start()
    facts = {"pid": process.pid, "started": time.time()}
    process.join()
    return facts


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        pytest.param({}, "lease_starved", id="it is still there"),
        pytest.param(dead, "unknown", id="it is gone"),
        pytest.param({"boot_id": "another-boot"}, "host_rebooted", id="its host was restarted"),
        pytest.param({"host": "elsewhere", "boot_id": "another-boot"}, "unknown", id="another host's"),
        pytest.param({"pid": "what"}, "unknown", id="what cannot be read"),
    ],
)
def test_the_cause_of_a_loss_is_told_from_evidence_and_changes_no_verdict(
    org: Organization, evidence: Any, cause: str
) -> None:
    _, _, assignment = governed_work(org)
    lose(org, assignment, **(evidence() if callable(evidence) else evidence))
    assert tick(org).recovered_assignments == (assignment.id,)
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    assert (receipt.status, receipt.failure_category) == ("failed", "worker_lost")
    assert receipt.detail["evidence"]["cause"] == cause
    assert ledger_facts(org.db, assignment.id)["assignment"] == "FAILED"


@pytest.mark.parametrize(("kills", "cause"), [(0, "unknown"), (2, "out_of_memory")])
def test_a_worker_that_is_gone_from_a_cgroup_with_new_oom_kills_ran_out_of_memory(
    org: Organization, monkeypatch: pytest.MonkeyPatch, kills: int, cause: str
) -> None:
    monkeypatch.setattr(liveness, "look", lambda _: Evidence(Sight.GONE, kills))
    _, _, assignment = governed_work(org)
    lose(org, assignment)
    tick(org)
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    assert (receipt.detail["evidence"]["cause"], receipt.detail["evidence"]["oom_kills"]) == (cause, kills)


def test_evidence_that_cannot_be_gathered_keeps_no_recovery_waiting(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise RecursionError

    monkeypatch.setattr(liveness, "look", fails)
    _, _, assignment = governed_work(org)
    lose(org, assignment)
    assert tick(org).recovered_assignments == (assignment.id,)
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    assert receipt.detail["evidence"] == {"cause": "unknown", "fault": "RecursionError"}


def asked_and_killed(root: str, assignment_id: str) -> None:
    """A worker that hears a signal, and is killed before it has written its end."""

    def asked(*_: Any) -> Proposal:
        raise KeyboardInterrupt

    organization.invoke_actor = asked
    runs.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    Organization(root).run_assignment(assignment_id)


def test_a_worker_that_was_asked_to_stop_and_then_died_was_killed_by_its_operator(org: Organization) -> None:
    _, _, assignment = governed_work(org)
    process = _processes.Process(target=asked_and_killed, args=(str(org.root), assignment.id))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert ledger_facts(org.db, assignment.id)["events"][-1] == "assignment.stop_requested"
    over = org.db.now() + timedelta(hours=1)
    assert tick(org, lambda: over).recovered_assignments == (assignment.id,)
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    assert receipt.failure_category == "worker_lost"
    assert receipt.detail["evidence"]["cause"] == "killed_by_operator"


# --- poison -----------------------------------------------------------------------------------------------


def test_hazard_50_work_that_loses_its_workers_is_parked_until_a_ruling_with_the_evidence_kept(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(org, lambda document: document["authority"].update(losses_before_parking=2))
    _, sow, assignment = governed_work(org)
    lost: list[str] = []

    def lose_and_assign_again(each: Assignment) -> Assignment:
        lose(org, each)
        tick(org)
        lost.append(journal.receipts_of(org.db.connection, each.id)[-1].id)
        return org.assign(sow.id, OPERATOR, MASTER)

    second = lose_and_assign_again(assignment)
    assert "sow.parked" not in ledger_facts(org.db, second.id)["sow_events"]
    assert answer(lose_and_assign_again, second) == "parked"
    (parked,) = [event for event in journal.events_of(org.db.connection, sow.id) if event.kind == "sow.parked"]
    assert parked.detail == {"receipts": lost}
    with pytest.raises(SovereignError) as refused:
        org.assign(sow.id, OPERATOR, MASTER)
    assert all(receipt in refused.value.why for receipt in lost)
    assert "ruling decide" in refused.value.next_command
    org.rule(sow.id, "It may have more memory.", PRINCIPAL)
    assert answer(org.assign, sow.id, OPERATOR, MASTER) == "done"
    third = lose_and_assign_again(outcomes.assignments_of(org.db.connection, sow.id)[-1])
    monkeypatch.setattr(organization, "invoke_actor", works)
    assert org.run_assignment(third.id).status == "completed"


def test_hazard_50_work_that_loses_every_worker_that_takes_it_over_is_parked_too(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(org, lambda document: document["authority"].update(losses_before_parking=2))
    _, sow, assignment = governed_work(org)
    lose(org, assignment)
    lose(org, assignment)  # this one took the run over
    monkeypatch.setattr(organization, "invoke_actor", works)
    assert answer(org.run_assignment, assignment.id) == "parked"
    assert tick(org).recovered_assignments == (assignment.id,)
    assert [event.kind for event in journal.events_of(org.db.connection, sow.id)].count("sow.parked") == 1
    configure(org, lambda document: document["authority"].update(losses_before_parking=3))
    again = org.assign(sow.id, OPERATOR, MASTER)
    assert org.run_assignment(again.id).status == "completed"


def test_failures_of_other_kinds_and_the_losses_of_other_work_park_nothing(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(org, lambda document: document["authority"].update(losses_before_parking=1))
    _, sow, assignment = governed_work(org)
    _, _, other = governed_work(org)
    failed = Proposal(ReceiptStatus.FAILED, "nonzero_exit", "no", None)
    monkeypatch.setattr(organization, "invoke_actor", lambda *_: failed)
    org.run_assignment(assignment.id)
    lose(org, other)
    tick(org)
    assert answer(org.assign, sow.id, OPERATOR, MASTER) == "done"
    assert answer(org.assign, other.sow_id, OPERATOR, MASTER) == "parked"


# --- folders of other hosts -------------------------------------------------------------------------------


def test_a_folder_on_another_host_is_left_to_a_supervisor_there(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [governed_work(org)[2] for _ in range(3)]
    attempts = [
        lose(org, each, host=host) for each, host in zip(work, ("elsewhere", socket.gethostname(), ""), strict=True)
    ]
    report = tick(org)
    assert set(report.recovered_assignments) == {each.id for each in work}
    assert (report.reclaim_pending, report.problems) == ((attempts[0].id,), ())
    assert [path.name for path in (org.root / ".sovereign" / "runs").glob("*")].count(attempts[0].id) == 0
    assert tick(org).reclaim_pending == (attempts[0].id,)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert tick(org).reclaim_pending == ()
    assert (org.root / ".sovereign" / "runs" / attempts[0].id / "receipt.json").exists()


def test_a_report_names_the_first_folders_on_other_hosts_and_no_more_than_a_page(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [lose(org, governed_work(org)[2], host="elsewhere") for _ in range(3)]
    monkeypatch.setattr(supervisor, "PENDING_SHOWN", 2)
    assert tick(org).reclaim_pending == tuple(sorted(each.id for each in attempts)[:2])


def test_a_run_says_where_it_runs(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    _, _, assignment = governed_work(org)
    org.run_assignment(assignment.id)
    (row,) = rows(org.db, "execution_attempts")
    assert row["host"] == socket.gethostname()
    assert f'"pid":{os.getpid()}' in row["process"]
