"""Rows, folders and moments that only a hostile hand makes: they are named or refused, and stop nobody else."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Location
from support import eventually, governed_work, without_checks, works

from sovereign_agent import fencing, journal, organization, outcomes, relay, verdicts, workspace
from sovereign_agent.clock import ManualClock
from sovereign_agent.configuration import CommandSettings
from sovereign_agent.organization import Organization
from sovereign_agent.providers import build
from sovereign_agent.providers.base import Envelope, OutcomeBrief, Proposal, SowBrief, parse_report
from sovereign_agent.providers.process import Leash
from sovereign_agent.supervisor import tick

OPERATOR = "operator-course"


@pytest.fixture
def org(location: Location) -> Iterator[Organization]:
    with closing(location.init()) as made:
        yield made


def abandoned(org: Organization) -> str:
    """An assignment whose worker is gone; a clock a day ahead finds it run out."""
    _, _, assignment = governed_work(org)
    lease = fencing.acquire_or_renew_actor_lease(org.db, OPERATOR, "proc_gone")
    fencing.acquire_execution_attempt(org.db, assignment.id, OPERATOR, "proc_gone", lease.fencing_token)
    return assignment.id


def tomorrow(org: Organization) -> ManualClock:
    clock = ManualClock(org.db.now())
    clock.advance(2 * fencing.EXECUTION_ATTEMPT_MAXIMUM)
    return clock


def run(folder: workspace.Workspace, script: str) -> Proposal:
    envelope = Envelope(
        assignment_id="asg_1",
        attempt_id="att_1",
        actor_id=OPERATOR,
        outcome=OutcomeBrief(id="out_1", title="t", desired_state="d"),
        sow=SowBrief(id="sow_1", scope="s"),
    )
    return build(CommandSettings(kind="command", argv=("sh", "-c", script))).run(envelope, folder, Leash())


# --- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sqlite"])  # PostgreSQL takes no such bytes
def test_bytes_that_are_no_text_stop_neither_the_tick_nor_a_look(org: Organization, location: Location) -> None:
    lost = abandoned(org)
    with closing(sqlite3.connect(location.ledger)) as raw, raw:
        raw.execute("INSERT INTO actor_leases VALUES ('zz', CAST(x'80ff' AS TEXT), 999999, 1, 1)")
    report = tick(org, tomorrow(org))
    assert report.recovered_assignments == (lost,)
    assert "zz" in {lease.actor_id for lease in report.expired_actor_leases}


def test_an_unreadable_step_of_the_tick_does_not_keep_it_from_recovering(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = abandoned(org)

    def breaks(*_: Any) -> list[str]:
        with org.db.immediate() as connection:
            connection.execute("INSERT INTO lease_tokens (id, value) VALUES (2, 2)")
        return []

    monkeypatch.setattr(relay, "sweep_expired_claims", breaks)
    report = tick(org, tomorrow(org))
    assert report.recovered_assignments == (lost,)
    assert any("mailbox claims" in problem for problem in report.problems)


def test_a_hundred_impossible_claims_do_not_hide_the_good_ones_behind_them(org: Organization) -> None:
    clock = ManualClock(org.db.now())
    without_checks(org.db, "messages")
    for number in range(120):
        org.db.connection.execute(
            "INSERT INTO messages (id, sender, recipient, subject, body, state, claim_owner, claim_expires_at,"
            " ready_at, created_at) VALUES (?, 'a', 'b', 's', '', 'CLAIMED', 'b', 1, 1, 1)",
            (f"msg_{number}",),
        )
    good = relay.send(org.db, "master-course", OPERATOR, "subject", "body", clock=clock)
    relay.claim(org.db, good.id, OPERATOR, clock=clock)
    clock.advance(relay.CLAIM_TTL)
    assert [*relay.sweep_expired_claims(org.db, clock)] == [good.id]


@pytest.mark.parametrize(
    "process", ["{", "[1]", '{"pid": "x"}', '{"host": 7, "pid": -1, "started": null}', "[" * 100_000], ids=range(5)
)
def test_a_lost_worker_whose_evidence_cannot_be_read_is_recovered_like_any_other(
    org: Organization, process: str
) -> None:
    stuck = abandoned(org)
    org.db.connection.execute("UPDATE execution_attempts SET process = ?, expires_at = 0", (process,))
    report = tick(org)
    assert (report.recovered_assignments, report.problems) == ((stuck,), ())
    (receipt,) = journal.receipts_of(org.db.connection, stuck)
    assert (receipt.failure_category, receipt.detail["evidence"]["cause"]) == ("worker_lost", "unknown")


def test_a_running_assignment_without_its_attempt_is_named(org: Organization) -> None:
    stuck = abandoned(org)
    assert tick(org).problems == ()
    org.db.connection.execute("UPDATE assignments SET current_execution_attempt = 'att_nowhere' WHERE id = ?", (stuck,))
    report = tick(org)
    assert report.recovered_assignments == ()
    assert any(stuck in problem for problem in report.problems)


@pytest.mark.parametrize("checks", ["{", "[" * 100_000], ids=range(2))
def test_an_outcome_whose_checks_cannot_be_read_stops_neither_a_look_nor_its_work_but_is_not_accepted(
    org: Organization, monkeypatch: pytest.MonkeyPatch, checks: str
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    outcome, sow, assignment = governed_work(org)
    org.db.connection.execute("UPDATE outcomes SET checks = ? WHERE id = ?", (checks, outcome.id))
    assert outcome.title in org.status_text()
    assert org.run_assignment(assignment.id).status == "completed"
    org.verify_sow(sow.id, "verifier-course")
    org.review(sow.id, "sparring-course")
    with pytest.raises(Exception, match="no check"):
        org.accept(outcome.id, "principal-human")
    assert outcomes.get_outcome(org.db.connection, outcome.id).state == "READY"


def test_what_a_check_answers_must_fit_a_journal(org: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
    def exits(*_: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(verdicts, "resolve_reference", lambda *_: exits)
    outcome = outcomes.get_outcome(org.db.connection, governed_work(org)[0].id)
    asks = type("Asks", (), {"checks": ("leaves",), "id": outcome.id})()
    found = verdicts.run_checks(org.db.connection, asks, {"leaves": "a:b"}, org.root)
    assert not verdicts.together(found).passed


# --- folders and reports ----------------------------------------------------------------------------------


def test_a_runs_folder_that_was_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    folder, elsewhere = workspace.allocate(tmp_path / "root", "att_1"), tmp_path / "elsewhere"
    swap = f"""
        cat > /dev/null
        mkdir -p {elsewhere}/att_1/provider-raw {elsewhere}/att_1/.sovereign-out
        echo '{{"status": "completed", "summary": "not from here"}}' > {elsewhere}/att_1/.sovereign-out/report.json
        cd / && mv {folder.path.parent} {folder.path.parent}.real && ln -s {elsewhere} {folder.path.parent}
    """
    proposal = run(folder, swap)
    assert (proposal.status, proposal.failure_category) == ("failed", "boundary_violated")
    assert proposal.report is None


def test_hazard_07_a_report_that_contradicts_itself_is_no_report() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_report(b'{"status": "failed", "summary": "x", "status": "completed"}')
    assert parse_report(b'{"status": "completed", "summary": "x"}').status == "completed"


def test_hazard_24_a_signal_without_a_name_is_a_death_like_any_other(tmp_path: Path) -> None:
    proposal = run(workspace.allocate(tmp_path, "att_1"), "kill -40 $$")
    assert (proposal.status, proposal.failure_category) == ("failed", "killed")


# --- moments ----------------------------------------------------------------------------------------------


def test_an_interruption_while_the_ledger_is_busy_does_not_lose_finished_work(
    org: Organization, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, assignment = governed_work(org)
    done, busy = threading.Event(), threading.Event()

    def holds() -> None:
        done.wait(30)
        with closing(location.open()) as other, other.immediate():
            busy.set()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    def finishes(*arguments: Any) -> Proposal:
        proposal = works(*arguments)
        done.set()
        busy.wait(30)
        return proposal

    monkeypatch.setattr(organization, "invoke_actor", finishes)
    holder = threading.Thread(target=holds)
    holder.start()
    with pytest.raises(KeyboardInterrupt):
        org.run_assignment(assignment.id)
        eventually(lambda: False, within=5)  # the signal is on its way
    holder.join()
    assert [receipt.status for receipt in journal.receipts_of(org.db.connection, assignment.id)] == ["completed"]
