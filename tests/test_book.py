"""Chapter 6: its program shows what the chapter says, wherever it is started and however it ended before.

Its figures are what their data says, and its graded exercise tells wrong answers from right ones.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import eventually, processes_of

from sovereign_agent import liveness, records
from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.organization import Organization

TESTS = Path(__file__).parent
CHAPTER = TESTS.parent / "book" / "ch06_the_organization_recovers"
SOLUTION = CHAPTER / "solution.py"
WORKER = TESTS / "fixtures" / "hard_kill_worker.py"

EXPECTED = """\
{
  "worker_reached_running_before_sigkill": true,
  "worker_died_abnormally": true,
  "first_tick": {
    "recovered_count": 1
  },
  "second_tick_is_idempotent": {
    "recovered_count": 0
  },
  "before_recovery": {
    "assignment_state": "RUNNING",
    "execution_attempt_still_referenced": true
  },
  "after_recovery": {
    "assignment_state": "FAILED",
    "receipt_status": "failed",
    "receipt_failure_category": "worker_lost"
  }
}
"""


def load(name, monkeypatch):
    """A program of the chapter as a module, as the chapter imports it; afterwards it is forgotten again."""
    monkeypatch.syspath_prepend(CHAPTER)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


@pytest.fixture
def solution(monkeypatch):
    return load("solution", monkeypatch)


@pytest.fixture
def practice(monkeypatch):
    return load("practice", monkeypatch)


@pytest.fixture
def figures(monkeypatch):
    return load("draw_figures", monkeypatch)


def solve(root, **options):
    command = [sys.executable, str(SOLUTION), "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, **options)


def files(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


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


def test_its_help_says_how_it_is_used():
    helped = subprocess.run([sys.executable, str(SOLUTION), "--help"], capture_output=True, text=True, check=True)
    assert "--root" in helped.stdout


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


# --- the graded exercise ----------------------------------------------------------------------------------


def the_teachers_answer():
    (code,) = re.findall(
        r"^```python answer\n(.*?)^```", (CHAPTER / "for_the_teacher.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return code


def close_overdue(part="COMMIT", becomes="COMMIT"):
    """The teacher's answer, or what becomes of it when a part is replaced: a learner's mistake."""
    code = the_teachers_answer()
    assert code.count(part) == 1
    place = {}
    exec(code.replace(part, becomes), place)  # noqa: S102 - it is our own page
    return place["close_overdue"]


def believes_the_note(db, trip, _ticket, folder, _now):
    if json.loads((folder / "note.json").read_text())["status"] == "completed":
        db.execute("UPDATE trips SET state = 'DONE' WHERE trip = ?", (trip,))
    return True


def asks_the_note_first(db, trip, ticket, folder, now):
    if (folder / "note.json").exists():
        return believes_the_note(db, trip, ticket, folder, now)
    return close_overdue()(db, trip, ticket, folder, now)


def throws_the_note_away(db, trip, ticket, folder, now):
    (folder / "note.json").unlink(missing_ok=True)
    return close_overdue()(db, trip, ticket, folder, now)


def calls_everything_lost(db, trip, ticket, _folder, _now):
    db.execute("UPDATE trips SET state = 'FAILED', ticket = NULL, back_by = NULL WHERE trip = ?", (trip,))
    db.execute(
        "INSERT INTO slips (trip, ticket, verdict, reason) VALUES (?, ?, 'failed', 'worker_lost')", (trip, ticket)
    )
    return True


def looks_before_it_writes(db, trip, ticket, folder, now):
    row = db.execute("SELECT state, ticket, back_by <= ? FROM trips WHERE trip = ?", (now, trip)).fetchone()
    condition = "AND state = 'OUT' AND ticket = ? AND back_by <= ?"
    trusting = close_overdue(condition, "AND ? IS NOT NULL AND ? IS NOT NULL")
    return row == ("OUT", ticket, 1) and trusting(db, trip, ticket, folder, now)


def test_the_teachers_answer_passes(practice, capsys):
    report = practice.grade(close_overdue())
    assert (report["status"], report["passed"], report["needs_work"]) == ("PASS", 10, {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last.removeprefix("EXERCISE_REPORT=")) == {
        "exercise": "ch06-close-overdue",
        "status": "PASS",
        "passed": 10,
        "of": 10,
    }


MISTAKES = {
    "asks the note first": (asks_the_note_first, "the note is kept and not believed"),
    "throws the note away": (throws_the_note_away, "the note is kept and not believed"),
    "calls everything lost": (calls_everything_lost, "a trip with time left is left alone"),
    "no look at the time": (close_overdue(" AND back_by <= ?", " AND ? > 0"), "a trip with time left is left alone"),
    "one minute late": (close_overdue("back_by <= ?", "back_by < ?"), "the last minute is over when it comes"),
    "no look at the state": (close_overdue("state = 'OUT' AND ", ""), "a finished trip is left alone"),
    "no look at the ticket": (close_overdue("ticket = ? AND", "? > 0 AND"), "a newer ticket is left alone"),
    "a slip whatever changed": (close_overdue("if ended == 1:", "if True:"), "a second call writes nothing"),
    "no commit": (close_overdue('db.execute("COMMIT")', "pass"), "a lost trip is failed"),
    "no transaction": (
        close_overdue('db.execute("BEGIN IMMEDIATE")', "pass"),
        "state and slip come together or not at all",
    ),
    "no rollback": (close_overdue('db.execute("ROLLBACK")', "pass"), "state and slip come together or not at all"),
    "another word for it": (close_overdue("'worker_lost'", "'gone'"), "a lost trip is failed"),
    "the fence is left": (close_overdue(", ticket = NULL, back_by = NULL", ""), "a lost trip is failed"),
    "looks before it writes": (looks_before_it_writes, "of two at once one closes it"),
    "answers nothing": (lambda *_: None, "a lost trip is failed"),
    "raises": (lambda *_: 1 / 0, "a lost trip is failed"),
}


@pytest.mark.parametrize(("mistake", "noticed"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_noticed_by_the_check_that_is_about_it(practice, capsys, mistake, noticed):
    report = practice.grade(mistake)
    assert report["status"] == "NEEDS_WORK"
    assert noticed in report["needs_work"]
    assert capsys.readouterr().out.count("hint:") == 1, "a learner is told one thing at a time"


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (close_overdue("return ended == 1", "pass"), "without `return` answers None"),
        (close_overdue("if ended == 1:", "if endde == 1:"), "NameError: name 'endde' is not defined (line 11 of your"),
        (close_overdue("UPDATE trips SET", "UPDATE trip SET"), "the tables trips and slips are in `db`"),
        (lambda _db: True, "takes 1 positional argument but 5 were given"),
    ],
    ids=["no return", "a wrong name", "a table that is not there", "too few parameters"],
)
def test_a_slip_of_the_pen_is_told_in_words_of_its_own(practice, capsys, mistake, told):
    practice.grade(mistake)
    assert told in capsys.readouterr().out


def test_a_look_before_the_write_fails_for_that_alone_and_a_look_inside_the_transaction_is_right(practice):
    assert list(practice.grade(looks_before_it_writes)["needs_work"]) == ["of two at once one closes it"]

    def looks_inside(db, trip, ticket, folder, now):
        db.execute("BEGIN IMMEDIATE")
        still = db.execute(
            "SELECT 1 FROM trips WHERE trip = ? AND state = 'OUT' AND ticket = ? AND back_by <= ?", (trip, ticket, now)
        ).fetchone()
        try:
            if still:
                calls_everything_lost(db, trip, ticket, folder, now)
            db.execute("COMMIT")
        except sqlite3.Error:
            db.execute("ROLLBACK")
            raise
        return bool(still)

    assert practice.grade(looks_inside)["status"] == "PASS"


def test_a_function_that_is_not_written_yet_needs_work_and_is_told_so_in_one_line(practice, capsys):
    def unfinished(*_):
        raise NotImplementedError

    report = practice.grade(unfinished)
    assert (report["status"], report["passed"]) == ("NEEDS_WORK", 0)
    assert len(capsys.readouterr().out.splitlines()) == 2


# --- the page and its figures -----------------------------------------------------------------------------


def test_the_chapter_promises_what_the_program_is_held_to():
    assert f"```text expected\n{EXPECTED}```" in (CHAPTER / "chapter.md").read_text()


def test_the_chapter_has_each_decision_in_the_order_in_which_they_are_tried():
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|$", (CHAPTER / "chapter.md").read_text(), re.MULTILINE)
    assert rows == re.findall(r"^ {4}\S.* {2,}(\w+)$", liveness.__doc__ or "", re.MULTILINE)


def test_the_figures_are_what_their_data_says(figures, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["draw_figures.py", "--check"])
    assert figures.main() == 0, capsys.readouterr().out
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    story = json.loads((CHAPTER / "figures" / "race.json").read_text())
    story[-1][0] += 1
    (tmp_path / "race.json").write_text(json.dumps(story))
    for name in ("race.svg", "state_machine.svg"):
        (tmp_path / name).write_bytes((CHAPTER / "figures" / name).read_bytes())
    assert figures.main() == 1
    assert re.findall(r"\w+\.svg", capsys.readouterr().out) == ["race.svg"]


def test_the_state_machine_has_the_moves_of_the_package_and_no_others(figures, monkeypatch):
    states = {state.value for state in records.AssignmentState}
    assert {state for move in figures.moves("assignment") for state in move} == states
    monkeypatch.setattr(records, "__doc__", (records.__doc__ or "").replace("| BLOCKED", "| BLOCKED | LOST"))
    with pytest.raises(SystemExit, match=r"'RUNNING', 'LOST'"):
        figures.state_machine()


def test_the_race_that_is_drawn_was_one():
    """Both had read RUNNING before either wrote, and the one that had to wait was let in when the other had left."""
    story = json.loads((CHAPTER / "figures" / "race.json").read_text())
    at = {(what.split()[0], who): moment for moment, who, what in story}
    who_changed = {what: who for _, who, what in story if what.startswith("changed")}
    winner, loser = who_changed["changed 1"], who_changed["changed 0"]
    assert max(at["read", winner], at["read", loser]) < at["entered", winner]
    assert at["asked", loser] < at["left", winner] < at["entered", loser]
