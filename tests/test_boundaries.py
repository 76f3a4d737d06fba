"""The boundary of a run: what its program changed and must not have fails it, and nothing else does."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import at_one_barrier, configure, eventually, governed_work

from sovereign_agent import journal, organization, workspace
from sovereign_agent.boundary import SHOWN, Boundary
from sovereign_agent.configuration import CommandSettings, default_text
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Envelope, OutcomeBrief, Proposal, SowBrief, conclude
from sovereign_agent.providers.command import CommandProvider
from sovereign_agent.providers.process import Leash
from sovereign_agent.supervisor import tick
from sovereign_agent.workspace import Workspace, allocate

pytestmark = pytest.mark.timeout(60)

ENVELOPE = Envelope(
    assignment_id="asg_1",
    attempt_id="att_1",
    actor_id="operator-course",
    outcome=OutcomeBrief(id="out_1", title="Tea", desired_state="There is tea."),
    sow=SowBrief(id="sow_1", scope="Order tea"),
)
REPORT = 'echo \'{"status": "completed", "summary": "done"}\' > .sovereign-out/report.json'
COMPLETED = ("completed", "")
VIOLATED = ("failed", "boundary_violated")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An organization's root as it looks from outside: the ledger is any file here, for nobody may open it."""
    (tmp_path / "root" / ".sovereign").mkdir(parents=True)
    root = tmp_path / "root"
    (root / "sovereign.toml").write_text(default_text())
    (root / "README").write_text("ours")
    for name in ("organization.db", "organization.db-wal", "organization.authority"):
        (root / ".sovereign" / name).write_text(name)
    return root


@pytest.fixture
def run(root: Path) -> Workspace:
    return allocate(root, "run-1")


def shell(run: Workspace, script: str) -> Proposal:
    """Run a real program that leaves a good report, and besides does what `script` says. It stands in the root."""
    settings = CommandSettings(kind="command", argv=("/bin/sh", "-c", f"{REPORT}; cd ../../..; {script}"))
    return CommandProvider(settings).run(ENVELOPE, run, Leash())


def verdict(proposal: Proposal) -> tuple[str, str]:
    return proposal.status.value, proposal.failure_category


CROSSINGS = {
    "settings, edited": ("echo '# mine' >> sovereign.toml", "sovereign.toml"),
    "settings, replaced by a copy": ("cp -p sovereign.toml x && mv x sovereign.toml", "sovereign.toml"),
    "settings, removed": ("rm sovereign.toml", "sovereign.toml"),
    "settings, another time alone": ("touch -r README sovereign.toml", "sovereign.toml"),
    "settings, another mode alone": ("chmod 0666 sovereign.toml", "sovereign.toml"),
    "a new file": ("echo x > stray", "stray"),
    "a new folder": ("mkdir stray", "stray"),
    "a new link": ("ln -s /etc/hostname stray", "stray"),
    "a file put over another": ("echo x > x && mv x README", "README"),
    "the authority marker": ("echo mine > .sovereign/organization.authority", ".sovereign/organization.authority"),
    "the ledger, replaced": (
        "cp .sovereign/organization.db x && mv x .sovereign/organization.db",
        ".sovereign/organization.db",
    ),
    "the ledger, removed": ("rm .sovereign/organization.db", ".sovereign/organization.db"),
    "a file beside the ledger": ("echo x > .sovereign/organization.db-copy", ".sovereign/organization.db-copy"),
    "the runs, replaced": ("mv .sovereign/runs x && mkdir -p .sovereign/runs && mv x/* .sovereign/runs", "runs"),
    "the house, moved": ("mv .sovereign elsewhere", ".sovereign"),
    "a receipt of its own": ("echo x > .sovereign/runs/run-1/receipt.json", ".sovereign/runs/run-1/receipt.json"),
    "a sum for it": ("echo x > .sovereign/runs/run-1/receipt.json.sha256", "run-1/receipt.json.sha256"),
    "its lock": ("rm .sovereign/runs/run-1.lock", ".sovereign/runs/run-1.lock"),
    "the record in its lock": ("echo 1 2 > .sovereign/runs/run-1.lock", ".sovereign/runs/run-1.lock"),
    "its folder, replaced": (
        "cp -r .sovereign/runs/run-1 x && rm -r .sovereign/runs/run-1 && mv x .sovereign/runs/run-1",
        "run-1",
    ),
}


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_a_write_outside_its_folder_fails_the_run_and_is_named(run: Workspace, crossing: str) -> None:
    script, named = CROSSINGS[crossing]
    proposal = shell(run, script)
    assert verdict(proposal) == VIOLATED
    assert named in proposal.summary


WITHIN = {
    "nothing": "true",
    "its own folder": "mkdir .sovereign/runs/run-1/mine && echo x > .sovereign/runs/run-1/mine/x",
    "its own folder's mode": "chmod 0755 .sovereign/runs/run-1",
    "another run's start": "mkdir .sovereign/runs/run-2 && echo x > .sovereign/runs/run-2.lock",
    "another run's work": "mkdir .sovereign/runs/run-2 && touch .sovereign/runs/run-2/x && rm -r .sovereign/runs/run-2",
    "the ledger at work": "echo more >> .sovereign/organization.db && echo more >> .sovereign/organization.db-wal",
    "the ledger's files, come and gone": "rm .sovereign/organization.db-wal && touch .sovereign/organization.db-shm",
    "a backup that is looked at": f"touch .sovereign/organization.db.restore_{'0' * 32}.staging",
    "what is known of agents": "echo x > .sovereign/probes.json",
    "that, half written": "touch .sovereign/.probes.json.0123456789abcdef",
    "a module of the root, compiled": "mkdir __pycache__",
    "outside of the root": "touch ../elsewhere",
}


@pytest.mark.parametrize("scene", WITHIN)
def test_what_may_change_while_a_program_runs_fails_nobody(run: Workspace, scene: str) -> None:
    assert verdict(shell(run, WITHIN[scene])) == COMPLETED


def test_what_was_there_before_is_no_violation(root: Path, run: Workspace) -> None:
    (root / ".sovereign" / "stray").touch()
    while not (root / "stray").exists() or (root / "stray").stat().st_ctime_ns <= run.path.stat().st_ctime_ns:
        (root / "stray").touch()
    run = replace(run, boundary=Boundary(root, run.path))
    assert verdict(shell(run, "mkdir __pycache__")) == COMPLETED  # so that the root is looked through


def test_a_report_that_stood_there_before_is_missing(root: Path, run: Workspace) -> None:
    (run.out / "report.json").write_text('{"status": "completed", "summary": "an older one"}')
    before = replace(run, boundary=Boundary(root, run.path))
    proposal = conclude(before, exit_code=0, seen={}, detail={})
    assert verdict(proposal) == ("failed", "missing_report")
    assert "stale" in proposal.summary
    assert verdict(conclude(run, exit_code=0, seen={}, detail={})) == COMPLETED


def test_a_deliverable_that_stood_there_before_is_missing(root: Path, run: Workspace) -> None:
    (run.out / "list.txt").write_text("tea")
    before = replace(run, boundary=Boundary(root, run.path))
    (run.out / "report.json").write_text('{"status": "completed", "summary": "s", "deliverables": ["list.txt"]}')
    proposal = conclude(before, exit_code=0, seen={}, detail={})
    assert verdict(proposal) == ("failed", "deliverable_missing")
    assert "stale" in proposal.summary
    assert verdict(conclude(run, exit_code=0, seen={}, detail={})) == COMPLETED


def test_hazard_84_deliverables_that_are_one_on_another_disk_make_no_valid_report(run: Workspace) -> None:
    report = '{"status": "completed", "summary": "s", "deliverables": ["NOTE", "note"]}'
    for name, content in {"NOTE": "1", "note": "2", "report.json": report}.items():
        (run.out / name).write_text(content)
    assert verdict(conclude(run, exit_code=0, seen={}, detail={})) == ("failed", "invalid_report")
    (run.out / "report.json").write_text(report.replace('"note"', '"other"'))
    (run.out / "note").rename(run.out / "other")
    assert verdict(conclude(run, exit_code=0, seen={}, detail={})) == COMPLETED


def test_hazard_84_violations_are_bounded_and_can_be_stored_whatever_their_names(root: Path, run: Workspace) -> None:
    def file_system_is_later() -> bool:
        (run.path / "now").touch()
        return (run.path / "now").stat().st_mtime_ns > root.stat().st_mtime_ns

    eventually(file_system_is_later)  # its clock ticks some hundred times a second, and no program starts that fast
    for number in range(50):
        (root / os.fsdecode(b"\xff\n%d" % number)).touch()
    assert run.boundary
    named = run.boundary.violations()
    assert (len(named), named[-1]) == (SHOWN + 1, "and more")
    "".join(named).encode()
    assert "\\xff" in named[1]
    proposal = conclude(run, exit_code=0, seen={}, detail={})
    assert proposal.failure_category == "boundary_violated"


WRITE_AT_ONCE = """
import sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0).execute("CREATE TABLE other (id)")
except sqlite3.OperationalError as error:
    print(error)
"""


def test_hazard_68_looking_drops_no_lock_of_the_ledger(root: Path) -> None:
    ledger = root / ".sovereign" / "organization.db"
    ledger.unlink()
    session = sqlite3.connect(ledger, isolation_level=None)
    session.execute("PRAGMA journal_mode = DELETE")
    session.execute("BEGIN EXCLUSIVE")
    run = allocate(root, "run-1")
    assert run.boundary
    assert run.boundary.violations() == ()
    heard = subprocess.run([sys.executable, "-c", WRITE_AT_ONCE, ledger], capture_output=True, text=True, check=True)
    assert heard.stdout == "database is locked\n"
    session.execute("ROLLBACK")
    session.close()


# --- through the organization -----------------------------------------------------------------------------


@pytest.fixture
def hired(org: Organization) -> Organization:
    """An organization whose operator runs a shell script of the test's choosing."""

    def hire(document: Any) -> None:
        document["providers"]["shell"] = {"kind": "command", "argv": ["/bin/sh", "-c", f"{REPORT}; . ../../../script"]}
        document["actors"]["operator-course"]["provider"] = "shell"

    configure(org, hire)
    return org


def script(org: Organization, text: str) -> None:
    (org.root / "script").write_text(f"cd ../../..; {text}\n")


def run_on(org: Organization, **options: Any) -> tuple[str, str]:
    _, _, assignment = governed_work(org, **options)
    receipt = org.run_assignment(assignment.id)
    return receipt.status.value, receipt.failure_category


def test_a_run_that_wrote_into_the_root_is_failed_in_the_ledger_and_the_next_one_is_not(hired: Organization) -> None:
    script(hired, "echo x > stray")
    assert run_on(hired) == VIOLATED
    script(hired, "true")
    assert run_on(hired) == COMPLETED
    assert tick(hired).problems == ()


def test_whoever_edits_the_settings_while_a_program_runs_fails_its_run(
    hired: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke = organization.invoke_actor

    def rebind_first(*args: Any) -> Proposal:
        hired.rebind_actor("sparring-course", "shell", "principal-human")
        return invoke(*args)

    script(hired, "true")
    monkeypatch.setattr(organization, "invoke_actor", rebind_first)
    assert run_on(hired) == VIOLATED
    monkeypatch.setattr(organization, "invoke_actor", invoke)
    assert run_on(hired) == COMPLETED


def _runs_its_own(number: int, root: str, work: list[list[str]]) -> list[tuple[str, str]]:
    org = Organization(root)
    try:
        receipts = [org.run_assignment(assignment_id) for assignment_id in work[number]]
        return [(receipt.status.value, receipt.failure_category) for receipt in receipts]
    finally:
        org.close()


@pytest.mark.parametrize("policy", workspace.POLICIES)
def test_runs_that_go_on_side_by_side_do_not_violate_one_another(hired: Organization, policy: str) -> None:
    crew = [f"operator-{number}" for number in range(3)]

    def hire(document: Any) -> None:
        for actor_id in crew:
            document["actors"][actor_id] = dict(document["actors"]["operator-course"])

    configure(hired, hire)
    script(hired, "sleep 0.05; mkdir -p $SOVEREIGN_OUT/deep; echo x > $SOVEREIGN_OUT/deep/x")
    work = [[governed_work(hired, worker=actor_id, policy=policy)[2].id for _ in range(3)] for actor_id in crew]
    assert at_one_barrier(3, _runs_its_own, str(hired.root), work) == [[COMPLETED] * 3] * 3


def test_hazard_84_names_that_no_ledger_can_hold_break_neither_a_run_nor_a_tick(hired: Organization) -> None:
    script(
        hired, "cd $SOVEREIGN_OUT/..; printf x > \"$(printf 'odd\\377\\nname')\"; mkdir \"$(printf 'odd\\377')\"; true"
    )
    assert run_on(hired) == COMPLETED
    assert tick(hired).problems == ()
    script(hired, "printf x > \"$(printf 'stray\\377')\"")
    assert run_on(hired, policy="persistent") == VIOLATED
    (receipt,) = [
        journal.receipts_of(hired.db.connection, row[0])[-1]
        for row in hired.db.connection.execute("SELECT id FROM assignments WHERE state = 'FAILED'")
    ]
    assert "stray\\xff" in receipt.summary
    assert tick(hired).problems == ()
