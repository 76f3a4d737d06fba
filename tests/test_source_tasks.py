"""The course's harness: what a learner's function does is what is judged, and nothing that it says."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import runpy
import shutil
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import eventually, processes_of

ROOT = Path(__file__).parent.parent
HARNESS = "book/always_on/exercises/source_tasks_v1.py"
BOUNDARY = 'or claim.epoch != control["epoch"]'
REPLACED = "runtime paused or replaced by restore"
BEFORE = {"before": {"answer": "appended", "rows": 1}}
BASELINE = BEFORE | {"after": {"answer": REPLACED, "rows": 1}, "lines": ["Vanilla: 2 tubs."]}
BROKEN = BEFORE | {
    "after": {"answer": "appended", "rows": 2},
    "lines": ["Vanilla: 2 tubs.", "Strawberry: 1 tub."],
}
HEAD = "def assert_current(connection, claim, now=None):\n"


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where the tasks' scratch copies are made: empty again after each test, and nothing runs there any more."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = originals()
    yield folder
    assert list(folder.iterdir()) == []
    eventually(lambda: processes_of(folder) == [])
    assert originals() == before


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("source_tasks_v1", ROOT / HARNESS)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def task(harness):
    with harness.SourceTask(ROOT, 10) as task:
        yield task


@pytest.fixture
def reference(task):
    task.install(textwrap.dedent(task.fragment))
    return task


@pytest.fixture(scope="module")
def handoff(harness, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "handoff.json"
    with harness.SourceTask(ROOT, 10) as task:
        task.install(task.fragment)
        task.save(path, task.visible("A"))
    return path


@pytest.fixture
def saved(handoff, tmp_path):
    return Path(shutil.copy(handoff, tmp_path / "ch13-unit-a-handoff-v1.json"))


def originals():
    return {path: path.read_bytes() for path in (ROOT / "src").rglob("*.py")}


def judged(task, source):
    task.install(source)
    return task.visible("TRY")


# --- the experiment ---------------------------------------------------------------------------------------


def test_the_reference_passes_and_is_handed_over(harness, reference, tmp_path):
    result = reference.visible("UNIT_A")
    assert (result["label"], result["status"], result["reason"]) == ("UNIT_A", "PASS", "")
    assert (result["observation"], result["exit_status"]) == (BASELINE, 0)
    assert (result["stdout"], result["stderr"]) == ("", "")
    path = tmp_path / "handoff.json"
    reference.save(path, result)
    with harness.SourceTask(ROOT, 10) as unit_b:
        handoff = unit_b.load(path)
        assert handoff == json.loads(path.read_text())
        assert handoff["source"] == reference.source == reference.fragment
        assert handoff["implementation_sha256"] == unit_b.implementation_sha256 == reference.implementation_sha256
        assert (handoff["runtime_sha256"], handoff["chapter"]) == (unit_b.runtime_sha256, 10)
        assert unit_b.visible("BASELINE")["observation"] == handoff["observation"] == BASELINE


def test_without_its_boundary_the_old_worker_writes_and_a_repair_of_it_is_judged_by_what_it_does(reference):
    assert reference.spec["boundary"] == BOUNDARY
    reference.inject_failure()
    assert "or False" in reference.source
    broken = reference.run("INJECTED", expected=reference.spec["expected_broken"])
    assert (broken["status"], broken["observation"]) == ("PASS", BROKEN)
    needs_work = reference.visible("BROKEN")
    assert needs_work["status"] == "NEEDS_WORK"
    assert needs_work["reason"].startswith('after: {"answer": "appended", "rows": 2} was observed')
    assert reference.transfer("BROKEN")["reason"].startswith("stale_epoch: ")

    reference.repair('or control["epoch"] != claim.epoch')
    assert reference.visible("REPAIRED")["status"] == "PASS"
    transfer = reference.transfer("REPAIRED")
    assert (transfer["status"], transfer["observation"]) == ("PASS", reference.spec["transfer_expected"])


@pytest.mark.parametrize(
    ("fragment", "reason"),
    [
        ("or False", "after: "),
        ("or True", "before: "),
        ("and", "The source is not Python: "),
        (":\n        return 0\nimport os\nif True", "The source is not Python: "),
        (None, "The source must be text, and is NoneType."),
    ],
)
def test_a_fragment_that_repairs_nothing_needs_work(reference, fragment, reason):
    reference.inject_failure()
    reference.repair(fragment)
    result = reference.visible("REPAIR")
    assert (result["status"], result["reason"][: len(reason)]) == ("NEEDS_WORK", reason)


def test_the_lab_alone_breaks_and_repairs_the_runtime_as_it_is(harness):
    with harness.RuntimeLab(ROOT, 10) as lab:
        assert lab.run("BEFORE")["observation"] == BASELINE
        lab.inject_failure()
        assert lab.run("BROKEN", expected=BROKEN)["status"] == "PASS"
        lab.repair(lab.spec["boundary"])
        assert lab.run("AFTER")["status"] == "PASS"


@pytest.mark.parametrize(
    "found",
    [
        "or claim.epoch != control['epoch']",
        "or claim.epoch  !=\n        control[ 'epoch' ]",
        'or (  # claim.epoch\n        claim.epoch != control["epoch"])',
    ],
)
def test_the_boundary_is_found_however_it_is_laid_out(task, found):
    task.install(f"{HEAD}    # {BOUNDARY}\n    if (control is None {found}):\n        raise PermissionError\n")
    if "(  #" in found:
        with pytest.raises(ValueError, match="0 times"):
            task.inject_failure()
    else:
        task.inject_failure()
        assert task.source.count("or False)") == 1
        assert f"# {BOUNDARY}" in task.source


@pytest.mark.parametrize("times", [0, 2])
def test_a_boundary_that_is_not_there_once_is_refused_with_what_to_do(task, times):
    task.install(f"{HEAD}    return False {BOUNDARY * times}\n")
    before = task.source
    with pytest.raises(ValueError, match=f"{times} times, and needs it exactly once. Write this one check as a clause"):
        task.inject_failure()
    assert task.source == before


def test_steps_out_of_order_are_refused(harness, task):
    with pytest.raises(ValueError, match="No function is installed yet"):
        task.inject_failure()
    task.install(task.fragment)
    with pytest.raises(ValueError, match="nothing to repair"):
        task.repair(BOUNDARY)
    task.inject_failure()
    with pytest.raises(ValueError, match="injected already"):
        task.inject_failure()
    with pytest.raises(ValueError, match="A probe is given as the text of its source, and this is dict"):
        task.transfer("X", {}, {})
    task.close()
    task.close()
    for act in (lambda: task.visible("X"), lambda: task.install(HEAD), lambda: task.load("x")):
        with pytest.raises(ValueError, match="This task is closed"):
            act()
    with pytest.raises(ValueError, match="There is no exercise 11; there is 10"):
        harness.SourceTask(ROOT, 11)


def test_nothing_passes_before_a_function_is_installed(task):
    result = task.visible("TOO_EARLY")
    assert (result["status"], result["observation"]) == ("NEEDS_WORK", None)
    assert result["reason"].startswith("No function is installed yet.")


# --- functions that are not right -------------------------------------------------------------------------

CLAUSES = {
    "paused": ('control["paused"] or ', "", "paused"),
    "the marker": ('or control["epoch"] != marker ', "", "foreign_marker"),
    "the epoch": (BOUNDARY, "or False", "stale_epoch"),
    "the item": ("id = ? AND generation", "(id = ? OR 1 = 1) AND generation", "changed_work"),
    "the generation": ("generation = ?", "(generation = ? OR 1 = 1)", "superseded_generation"),
    "the owner": ("owner = ?", "(owner = ? OR 1 = 1)", "changed_owner"),
    "the session": ("session = ?", "(session = ? OR 1 = 1)", "changed_session"),
    "the subject": ("subject = ?", "(subject = ? OR 1 = 1)", "changed_subject"),
    "the role": ("AND role = ?", "AND (role = ? OR 1 = 1)", "changed_role"),
    "the end of the lease": ('control["expires_at"] <= at', 'control["expires_at"] < at', "expired_lease"),
    "the deadline": ('delegation["deadline"] <= at or ', "", "ended_delegation"),
    "the parent": (' or delegation["parent_status"] == "CANCELED"', "", "canceled_parent"),
}


@pytest.mark.parametrize(("clause", "becomes", "case"), CLAUSES.values(), ids=CLAUSES)
def test_the_transfer_misses_each_clause_by_its_name(task, clause, becomes, case):
    assert task.fragment.count(clause) == 1
    task.install(task.fragment.replace(clause, becomes))
    result = task.transfer("ONE_CLAUSE_LESS")
    assert result["status"] == "NEEDS_WORK"
    assert result["observation"][case] != task.spec["transfer_expected"][case]


ONLY_THE_VISIBLE_CASE = f"""{HEAD}    control = connection.execute("SELECT epoch FROM assistant_control").fetchone()
    if claim.epoch != control["epoch"]:
        raise PermissionError("{REPLACED}")
    return _at(connection, now)
"""


def test_a_function_that_knows_only_the_visible_case_fails_the_transfer(task):
    assert judged(task, ONLY_THE_VISIBLE_CASE)["status"] == "PASS"
    result = task.transfer("CHANGED")
    assert result["status"] == "NEEDS_WORK"
    assert result["observation"]["expired_lease"] == {"answer": "appended", "rows": 3}


def test_a_blanket_refusal_fails_both(task):
    assert judged(task, f'{HEAD}    raise PermissionError("{REPLACED}")\n')["status"] == "NEEDS_WORK"
    assert task.transfer("CHANGED")["reason"].startswith("first_claimant: ")


FORGED = json.dumps({"nonce": "", "observation": BASELINE, "trouble": "", "exit_status": 0})
CAUGHT_FORK = """
    import os
    try:
        os.fork()
    except RuntimeError:
        return _at(connection, now)
"""
REPORT_TO_WHOEVER_LISTENS = f"""
    import os
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b'{FORGED}\\n')
        except OSError:
            pass
"""
SAID_AND_NOT_DONE = f"""
    import json, sys, time
    frame = sys._getframe()
    while frame.f_code.co_name != "work":
        frame = frame.f_back
    if "Strawberry" in frame.f_locals["request"]:
        frame.f_locals["line"].write(json.dumps({{"answer": "{REPLACED}", "wrong": ""}}) + chr(10))
        frame.f_locals["line"].flush()
        time.sleep(0.5)
    return _at(connection, now)
"""
UNFINISHED = {
    "not implemented": ('raise NotImplementedError("Bind the identity")', "is not finished: NotImplementedError: Bind"),
    "an exception": ("return 1 / 0", "did not do its work: ZeroDivisionError: division by zero (line 2 of assert"),
    "nothing returned": ("pass", "ConstraintBroken: The ledger refused a row. NOT NULL"),
    "a time of its own": ("return 1", "The line is dated 1: the function must return the time it judged by"),
    "an exit": ("import sys; sys.exit(0)", "did not do its work: SystemExit: 0"),
    "an end": (
        "import os; os._exit(0)",
        "The worker's process ended by itself, with exit status 0, before it answered.",
    ),
    "a signal": ("import signal; signal.raise_signal(9)", "The worker's process was ended by SIGKILL before it"),
    "a bomb": ("return len(bytearray(2**33))", "did not do its work: MemoryError"),
    "a flood": ("while True: print('x' * 999)", "It printed or reported more than 65536 bytes."),
    "a flood of complaints": ("import sys\n    while True: sys.stderr.write('x' * 999)", "It printed or reported more"),
    "a fork unlocked": (
        "import os; sys = __import__('sys'); sys.modules['__main__'].STARTING = ('',); os.fork()",
        "may not start or end processes, and it tried os.fork",
    ),
    "a caught fork": (CAUGHT_FORK, "may not start or end processes, and it tried os.fork"),
    "a program": ("import subprocess; subprocess.run(['true'])", "and it tried subprocess.Popen"),
    "a shot at its driver": ("import os; os.kill(os.getppid(), 9)", "and it tried os.kill"),
    "a printed report": (f"print({FORGED!r}, flush=True)", "did not do its work: "),
    "a report to whoever listens": (REPORT_TO_WHOEVER_LISTENS, "The worker's process ended by itself, with exit "),
    "a tower for an answer": (
        "import os, sys; os.write(int(sys.argv[4]), b'[' * 9_999 + b'\\n')",
        "The worker's process ended by itself, with exit ",  # which: its own answer arrives, or meets a closed door
    ),
    "a long refusal": ("raise PermissionError('\\N{SNOWMAN}' * 99_999)", "before: "),
    "a refusal said and not done": (SAID_AND_NOT_DONE, "The worker wrote to the transcript after its last answer."),
}


@pytest.mark.parametrize(("body", "reason"), UNFINISHED.values(), ids=UNFINISHED)
def test_whatever_a_function_does_instead_needs_work_in_words(task, body, reason):
    result = judged(task, f"{HEAD}    {body}\n")
    assert result["status"] == "NEEDS_WORK"
    assert reason in result["reason"]
    assert "Traceback" not in result["reason"]
    assert len(result["stdout"]) <= 65_536
    assert len(result["stderr"]) <= 65_536


AWAY = """
    import os, signal, time
    signal.alarm(0)
    for leave in (os.setsid, lambda: os.setpgid(0, 0), lambda: os.setpgid(0, os.getpgid(os.getppid()))):
        try:
            leave()
        except PermissionError:
            pass
    time.sleep(60)
"""


@pytest.mark.parametrize("body", ["while True: pass", AWAY], ids=["busy", "in a session of its own"])
def test_a_function_that_does_not_end_is_ended(harness, task, monkeypatch, body):
    monkeypatch.setattr(harness, "SECONDS", 2)
    begun = time.monotonic()
    result = judged(task, f"{HEAD}    {body}\n")
    assert time.monotonic() - begun < 9, "it was ended, and not waited for until its own limits"
    assert (result["status"], result["reason"]) == ("NEEDS_WORK", "It did not end within 2 seconds.")


SOURCES = {
    "no Python": ("def assert_current(:\n    pass\n", "The source is not Python: "),
    "indented": ("    def assert_current():\n        pass\n", "The source is not Python: unexpected indent (line 1)."),
    "another name": ("def assert_curent():\n    pass\n", "The source must define the function assert_current, and"),
    "more": (f"import os\n{HEAD}    pass\n", "and nothing else at its top level."),
    "a call behind it": (f"{HEAD}    pass\nprint('PASS')\n", "and nothing else at its top level."),
    "twice": (f"{HEAD}    pass\n" * 2, "and nothing else at its top level."),
    "asynchronous": (f"async {HEAD}    pass\n", "The source must define the function assert_current, and"),
    "nothing": ("", "The source must define the function assert_current, and"),
    "no text": (None, "The source must be text, and is NoneType."),
    "too long": (f"{HEAD}    pass\n" + "#" * 100_000, "The source is longer than 100000 characters."),
    "a NUL": (f"{HEAD}    '\0'\n", "The source is not Python"),
    "half a character": (f"{HEAD}    '\ud800'\n", "The source is not Python"),
    "a tower": (f"{HEAD}    return {'(' * 5_000}\n", "The source is not Python"),
    "not compiled": (f"{HEAD}    nonlocal claim\n", "did not do its work: SyntaxError: "),
}


@pytest.mark.parametrize(("source", "reason"), SOURCES.values(), ids=SOURCES)
def test_a_source_that_is_not_the_one_function_needs_work_in_words(task, source, reason):
    result = judged(task, source)
    assert result["status"] == "NEEDS_WORK"
    assert reason in result["reason"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_how_an_editor_marks_a_file_and_ends_its_lines_does_not_matter(task, end):
    task.install(f"\ufeff{task.fragment}\n".replace("\n", end))
    assert task.source == task.fragment


def with_a_line(line):
    """A function that passes the visible probe, and does something else besides."""
    return ONLY_THE_VISIBLE_CASE.replace(
        HEAD, f"{HEAD}    import atexit, os, pathlib, shutil, sys, tempfile\n    {line}\n"
    )


def test_a_worker_that_ends_badly_after_its_last_answer_needs_work(task):
    result = judged(task, with_a_line("atexit.register(os._exit, 3)"))
    assert (result["status"], result["observation"], result["exit_status"]) == ("NEEDS_WORK", BASELINE, 3)
    assert result["reason"] == "The worker's process ended by itself, with exit status 3, after its last answer."


SPOILED = {
    "deep": "os.chdir(tempfile.mkdtemp(dir=sys.argv[3])); [(os.mkdir('d'), os.chdir('d')) for _ in range(2_500)]",
    "closed": "[os.chmod(folder, 0) for folder in (sys.argv[3] + '/shop', sys.argv[3])]",
    "gone": "shutil.rmtree(pathlib.Path(sys.argv[3]).parent, ignore_errors=True)",
    "a link": "at = pathlib.Path(sys.argv[3]).parent; shutil.rmtree(at); at.symlink_to(os.environ['HOME'])",
}


@pytest.mark.parametrize("line", SPOILED.values(), ids=SPOILED)
def test_a_scratch_folder_goes_whatever_becomes_of_it(task, scratch, tmp_path, monkeypatch, line):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").touch(mode=0o400)
    monkeypatch.setenv("HOME", str(victim))
    assert judged(task, with_a_line(line))["status"] in {"PASS", "NEEDS_WORK"}
    assert list(scratch.iterdir()) == []
    assert (victim / "kept").stat().st_mode & 0o777 == 0o400


PLANTING = """for side in ('original', 'learner'):
        src = pathlib.Path(sys.argv[3], side, 'src')
        for file in [*src.rglob('*.py'), src / 'colorsys.py']:
            file.write_text('print("TAKEN", flush=True)')"""
IMPORTING_LATE = """
def probe(lab):
    first(lab)
    import colorsys
    from sovereign_agent import tool_dispatch
    return [colorsys.rgb_to_hsv(0, 0, 0)[0], tool_dispatch.__name__]
"""


def test_what_a_function_writes_into_the_copy_is_nothing_that_its_judge_imports(task):
    task.install(with_a_line(PLANTING))
    probe = task.spec["probe"].replace("def probe(", "def first(") + IMPORTING_LATE
    result = task.transfer("LATE", probe, {})
    assert (result["status"], result["stdout"]) == ("NEEDS_WORK", "")
    assert result["reason"].startswith("The probe itself failed: ImportError: cannot import name 'tool_dispatch'")
    early = task.transfer("EARLY", f"from sovereign_agent import tool_dispatch\n{probe}", {})
    assert early["observation"] == [0.0, "sovereign_agent.tool_dispatch"]


def test_packages_are_found_where_pythonpath_says_and_stand_in_for_nothing(reference, tmp_path, monkeypatch):
    (tmp_path / "another/sovereign_agent").mkdir(parents=True)
    (tmp_path / "packages").mkdir()
    for name in ("another/needed", "packages/resource", "packages/colorsys"):
        (tmp_path / f"{name}.py").write_text("print('TAKEN', flush=True)\n")
    (tmp_path / "packages/needed.py").write_text("there = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"another{os.pathsep}packages{os.pathsep}")
    result = reference.transfer("PACKAGES", "import colorsys, needed\ndef probe(lab):\n    return needed.there\n", {})
    assert (result["observation"], result["stdout"], result["stderr"]) == (1, "", "")


def test_two_tasks_at_once_do_not_know_of_one_another(harness):
    def run(source):
        with harness.SourceTask(ROOT, 10) as task:
            return judged(task, source)["status"]

    sources = [ONLY_THE_VISIBLE_CASE, f"{HEAD}    return _at(connection, now)\n"]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, sources)) == ["PASS", "NEEDS_WORK"]


def test_a_machine_that_has_no_room_is_named(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"Nothing was run: .*No such file or directory: .*TMPDIR says where"):
        reference.visible("NOWHERE")


def test_what_a_function_prints_is_kept_and_changes_nothing(task, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-the-learner")
    body = task.fragment.partition('"""\n    delegation')
    assert body[1]
    result = judged(task, f'{body[0]}"""\n    import os\n    print(dict(os.environ))\n    delegation{body[2]}')
    assert result["status"] == "PASS"
    assert "PYTHONPATH" in result["stdout"]
    assert "a-key-of-the-learner" not in result["stdout"]


# --- other probes -----------------------------------------------------------------------------------------

FORGING_PROBE = f"""
import os, sys
def probe(lab):
    os.write(int(sys.argv[4]), b'{FORGED.replace(json.dumps(BASELINE), '{"rows": 0}')}\\n')
    os._exit(0)
"""
PROBES = {
    "a changed one": ("def probe(lab):\n    return {'rows': lab.rows()}\n", "PASS", ""),
    "another outcome": (
        "def probe(lab):\n    return {'rows': False}\n",
        "NEEDS_WORK",
        "rows: false was observed, and 0",
    ),
    "none": ("", "NEEDS_WORK", "The probe itself failed: KeyError: 'probe'."),
    "no Python": ("def probe(", "NEEDS_WORK", "The probe itself failed: SyntaxError: "),
    "an exception": (
        "def probe(lab):\n    assert lab is None, 'no'\n",
        "NEEDS_WORK",
        "AssertionError: no (line 2 of pr",
    ),
    "an exit": ("def probe(lab):\n    raise SystemExit\n", "NEEDS_WORK", "The probe itself failed: SystemExit (line 2"),
    "no JSON": ("def probe(lab):\n    return {'rows': {1}}\n", "NEEDS_WORK", "The probe itself failed: TypeError: "),
    "too much": ("def probe(lab):\n    return 'x' * 99_999\n", "NEEDS_WORK", "It printed or reported more than"),
    "a report of its own": (FORGING_PROBE, "NEEDS_WORK", "It ended without a report."),
    "a tower for a report": (
        "import os, sys\ndef probe(lab):\n    os.write(int(sys.argv[4]), b'[' * 60_000)\n    os._exit(0)\n",
        "NEEDS_WORK",
        "It ended without a report.",
    ),
    "an end": ("import os\ndef probe(lab):\n    os._exit(3)\n", "NEEDS_WORK", "It ended without a report."),
}


@pytest.mark.parametrize(("probe", "status", "reason"), PROBES.values(), ids=PROBES)
def test_a_changed_probe_is_run_and_one_that_fails_says_how(reference, probe, status, reason):
    result = reference.transfer("MINE", probe, {"rows": 0})
    assert result["status"] == status
    assert reason in result["reason"]


def test_originals_that_were_changed_are_noticed(harness, tmp_path):
    root = scratch_copy(harness, tmp_path)
    victim = root / "src/sovereign_agent/clock.py"
    with harness.SourceTask(root, 10) as task:
        task.install(task.fragment)
        for damage in (f"open({str(victim)!r}, 'a').write('#')", f"__import__('os').unlink({str(victim)!r})"):
            result = task.transfer("DAMAGE", f"def probe(lab):\n    {damage}\n    return {{}}\n", {})
            assert result["status"] == "NEEDS_WORK"
            assert result["reason"] == f"The original files in {root} have changed. Run the set-up cell again."
    with pytest.raises(ValueError, match=r"clock\.py cannot be read: No such file or directory\. Run the set-up"):
        harness.SourceTask(root, 10)


def test_an_interrupt_ends_the_run_and_what_it_started(harness, reference, scratch, monkeypatch):
    def interrupt(_files):
        eventually(lambda: len(processes_of(scratch)) == 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "_read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reference.transfer("INTERRUPTED", "import time\ndef probe(lab):\n    time.sleep(60)\n", {})


# --- the handoff ------------------------------------------------------------------------------------------


def altered(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replaced(make):
    def change(path):
        path.unlink()
        make(path)

    return change


def linked(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


SPOILT = {
    "no file": (Path.unlink, "cannot be read: No such file"),
    "a link": (linked, "cannot be read: it is a link"),
    "a pipe": (replaced(os.mkfifo), "is not a regular file"),
    "a folder": (replaced(Path.mkdir), "cannot be read: Is a directory"),
    "empty": (lambda path: path.write_text(""), "is not whole, or not JSON"),
    "truncated": (lambda path: path.write_text(path.read_text()[:-3]), "is not whole, or not JSON"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe\xfd"), "is not whole, or not JSON"),
    "a tower": (lambda path: path.write_text("[" * 100_000), "is not whole, or not JSON"),
    "too large": (lambda path: path.write_text(path.read_text() + " " * 1_000_000), "is larger than 1000000 bytes"),
    "a list": (lambda path: path.write_text("[]"), "must be an object with chapter, "),
    "a field more": (altered(verdict="PASS"), "must be an object with chapter, "),
    "a name twice": (lambda path: path.write_text('{"schema": 0,' + path.read_text()[1:]), "a name is there twice"),
    "another schema": (altered(schema="v0"), 'is of another edition: its schema is "v0"'),
    "another chapter": (altered(chapter=11), "is of another edition: its chapter is 11"),
    "another runtime": (altered(runtime_sha256="0" * 64), "is of another edition: its runtime_sha256 is"),
    "another source": (altered(source=ONLY_THE_VISIBLE_CASE), "was altered: its source is not the one"),
    "no source": (altered(source=None), "was altered: The source must be text"),
    "another hash": (altered(implementation_sha256="0" * 64), "was altered: its source is not the one"),
    "another observation": (altered(observation=BROKEN), "is of no PASS. after: "),
}


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT.values(), ids=SPOILT)
def test_a_handoff_that_is_not_what_was_saved_is_refused(harness, saved, spoil, sentence):
    with harness.SourceTask(ROOT, 10) as task:
        task.load(saved)
        installed = task.source
        spoil(saved)
        with pytest.raises(ValueError, match=r"The handoff .* Save it again|with this edition") as refused:
            task.load(saved)
        assert sentence in str(refused.value)
        assert task.source == installed


def test_only_what_passed_and_stands_is_saved(reference, tmp_path):
    path = tmp_path / "handoff.json"
    passed = reference.visible("A")
    forged = passed | {"observation": {}}
    reference.inject_failure()
    as_predicted = reference.run("B", expected=BROKEN)
    failed = reference.visible("C")
    assert as_predicted["status"] == "PASS"
    for result in (passed, forged, as_predicted, failed, {"status": "PASS"}):
        with pytest.raises(ValueError, match="Nothing was saved"):
            reference.save(path, result)
    assert not path.exists()
    reference.repair(BOUNDARY)
    reference.save(path, passed)
    passed["observation"]["after"]["rows"] = 7
    with pytest.raises(ValueError, match="Nothing was saved"):
        reference.save(path, passed)
    assert reference.load(path)["observation"] == BASELINE


def test_a_save_that_fails_leaves_what_was_there(reference, saved, monkeypatch):
    before = saved.read_bytes()
    result = reference.visible("A")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="was not written: No space left on device"):
        reference.save(saved, result)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir() if path.is_file()] == [saved.name]
    monkeypatch.undo()
    os.mkfifo(saved.parent / "pipe")
    (saved.parent / "link").symlink_to(saved)
    places = {"no/folder": "No such file", f"{saved.name}/x": "Not a directory", "x" * 300: "File name too long"}
    for place, why in (places | dict.fromkeys(["", "pipe", "link"], "no regular file is there")).items():
        with pytest.raises(ValueError, match=f"was not written: {why}"):
            reference.save(saved.parent / place, result)
    assert saved.read_bytes() == before


def test_a_handoff_that_somebody_made_is_taken_and_passes_nothing(task, saved):
    source = f"{HEAD}    return _at(connection, now)\n"
    altered(source=source, implementation_sha256=hashlib.sha256(source.encode()).hexdigest())(saved)
    assert task.load(saved)["source"] == source
    assert task.visible("MADE")["status"] == "NEEDS_WORK"


# --- the scratch copy of a notebook -----------------------------------------------------------------------


def scratch_copy(harness, tmp_path):
    root = tmp_path / "course"
    for name in harness.runtime_files(ROOT):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    return root


def test_a_copy_of_the_named_files_is_enough_and_gives_the_same_hashes(harness, saved, tmp_path, monkeypatch):
    root = scratch_copy(harness, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(root / "src"))
    task_of_the_copy = runpy.run_path(str(root / HARNESS))["SourceTask"]
    with task_of_the_copy(root, 10) as task:
        task.load(saved)
        assert task.visible("THERE")["status"] == "PASS"
        assert task.transfer("THERE")["status"] == "PASS"


def test_no_named_file_is_there_for_nothing(harness, reference):
    probe = (
        reference.spec["transfer_probe"].replace("def probe(", "def first(")
        + "\ndef probe(lab):\n    import sys\n    first(lab)\n"
        "    return sorted(m.__file__ for n, m in sys.modules.items() if n.startswith('sovereign_agent'))\n"
    )
    used = reference.transfer("FILES", probe, {})["observation"]
    named = [name for name in harness.runtime_files(ROOT) if name.endswith(".py") and name.startswith("src/")]
    assert sorted("src/" + name.partition("/src/")[2] for name in used) == named
