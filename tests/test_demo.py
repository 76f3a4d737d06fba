"""`sovereign-agent demo crash`, run as a person runs it: real processes, real signals, a real clock."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest
from conftest import Location


def demo(location: Location, *arguments: str) -> subprocess.CompletedProcess[str]:
    ledger = ["--ledger", location.ledger] if location.engine == "postgresql" else []
    command = [sys.executable, "-m", "sovereign_agent", "demo", "crash", "--root", str(location.root / "demo")]
    return subprocess.run([*command, *ledger, *arguments], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(110)
def test_the_crash_demo_shows_what_it_promises_on_each_engine(location: Location) -> None:
    shown = demo(location, "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert report["ledger"] == location.engine
    assert report["worker_reached_running"] is True
    assert report["state_after_kill"] == "RUNNING"
    assert (report["killed"]["program_gone"], report["killed"]["grandchild_gone"]) == (True, True)
    assert report["killed"]["before_reclaim"] is True
    assert 0 < report["killed"]["seconds_until_gone"] < 20
    assert report["recovered"]["failure_category"] == "worker_lost"
    assert report["recovered"]["receipt_id"].startswith("rcp_")
    assert 0 < report["recovered"]["seconds_from_kill"] < 30
    assert report["planted_report_kept"] is True
    assert report["zombie"]["refusal"] == "execution_attempt_lost"
    assert report["zombie"]["rows_written"] == 0
    assert report["zombie"]["program_gone"] is True
    assert report["second_tick_recovered"] == 0
    healthy = report["healthy_long_run"]
    assert healthy["status"] == "completed"
    assert healthy["seconds"] >= 3 * healthy["attempt_ttl_seconds"] > 0
    assert report["retry"]["outcome_state"] == "ACCEPTED"
    assert _processes_of(location) == []


@pytest.mark.timeout(110)
def test_the_crash_demo_tells_its_story_to_a_reader(tmp_path) -> None:
    shown = demo(Location("sqlite", "", tmp_path))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for word in (
        "SIGKILL",
        "worker_lost",
        "not believed",
        "deaf to SIGTERM",
        "execution_attempt_lost",
        "renewed",
        "ACCEPTED",
    ):
        assert word in " ".join(shown.stdout.split())


def _processes_of(location: Location) -> list[str]:
    """Whatever still runs on this demo's folder: workers, supervisors, programs."""
    found: list[str] = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command, folder = process.info["cmdline"] or [], process.info["cwd"] or ""
        if str(location.root) in " ".join(command) or folder.startswith(str(location.root)):
            found.append(" ".join(command))
    return found
