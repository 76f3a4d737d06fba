"""Chapter 6: the exercise shows what the chapter says it shows, wherever it is started and however it ended before."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import eventually

from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.organization import Organization

TESTS = Path(__file__).parent
SOLUTION = TESTS.parent / "book" / "ch06_the_organization_recovers" / "solution.py"
WORKER = TESTS / "fixtures" / "hard_kill_worker.py"

EXPECTED = """\
{
  "worker_reached_running_before_sigkill": true,
  "worker_died_abnormally": true,
  "before_recovery": {
    "assignment_state": "RUNNING",
    "execution_attempt_still_referenced": true
  },
  "first_tick": {
    "recovered_count": 1
  },
  "second_tick_is_idempotent": {
    "recovered_count": 0
  },
  "after_recovery": {
    "assignment_state": "FAILED",
    "receipt_status": "failed",
    "receipt_failure_category": "worker_lost"
  }
}
"""


@pytest.fixture
def solution():
    spec = importlib.util.spec_from_file_location("ch06_solution", SOLUTION)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def solve(root, **options):
    command = [sys.executable, str(SOLUTION), "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, **options)


def files(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def processes_of(root):
    """The processes that were started for an organization, wherever they hang in the tree by now."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline", "status"]):
        places = [process.info["cwd"] or "", *(process.info["cmdline"] or [])]
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(root) in place for place in places):
            found.append(process)
    return found


def test_the_exercise_prints_what_the_chapter_expects_again_and_again(tmp_path):
    root = tmp_path / "not" / "there" / "yet"
    for _ in range(2):
        ended = solve(root)
        assert (ended.stdout, ended.stderr, ended.returncode) == (EXPECTED, "", 0)
        assert processes_of(root) == []
    kept = [json.loads(report.read_text()) for report in root.glob(".sovereign/runs/*/.sovereign-out/report.json")]
    assert [report["status"] for report in kept] == ["completed"] * 2, "the trap is kept, and not believed"


def test_the_root_may_be_relative_and_the_working_directory_any(tmp_path):
    source = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    ended = solve("shop", cwd=tmp_path, env={**os.environ, "PYTHONPATH": source})
    assert (ended.stdout, ended.returncode) == (EXPECTED, 0)
    assert (tmp_path / "shop" / "sovereign.toml").exists()


def test_a_root_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("mine")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        ended = solve(root)
        assert (ended.stdout, ended.returncode) == ("", 2)
        assert ended.stderr.endswith(f"{tmp_path / 'file'} is a file, and the organization needs a folder\n")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_that_was_killed_itself_does_not_disturb_the_next(tmp_path):
    with subprocess.Popen([sys.executable, str(SOLUTION), "--root", str(tmp_path)], stdout=subprocess.DEVNULL) as run:
        eventually(lambda: any(str(WORKER) in process.cmdline() for process in psutil.Process(run.pid).children()))
        run.send_signal(signal.SIGKILL)
    ended = solve(tmp_path)
    assert (ended.stdout, ended.stderr, ended.returncode) == (EXPECTED, "", 0)
    eventually(lambda: processes_of(tmp_path) == [])


def test_another_organization_is_left_alone_and_an_untouched_one_is_used(tmp_path):
    Organization.init(tmp_path).close()
    settings = tmp_path / FILE_NAME
    untouched = settings.read_text()
    settings.write_text(untouched.replace("My organization", "Ours"))
    before = files(tmp_path)
    refused = solve(tmp_path)
    assert (refused.stdout, refused.returncode) == ("", 1)
    assert "holds another organization" in refused.stderr
    assert files(tmp_path) == before
    settings.write_text(untouched)
    assert solve(tmp_path).stdout == EXPECTED


def test_an_observation_that_is_not_as_promised_is_printed_and_fails(solution, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["solution.py", "--root", str(tmp_path)])
    monkeypatch.setattr(solution, "observe", lambda _organization: solution.EXPECTED)
    assert solution.main() == 0
    assert capsys.readouterr().out == EXPECTED
    guessed = solution.EXPECTED | {"first_tick": {"recovered_count": 0}}
    monkeypatch.setattr(solution, "observe", lambda _organization: guessed)
    assert solution.main() == 1
    assert json.loads(capsys.readouterr().out) == guessed


def test_a_worker_that_cannot_start_is_an_error_in_words(solution, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["solution.py", "--root", str(tmp_path)])
    monkeypatch.setattr(solution, "WORKER", tmp_path / "no_such_worker.py")
    assert solution.main() == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "The worker ended too early" in printed.err
    assert "no_such_worker.py" in printed.err
