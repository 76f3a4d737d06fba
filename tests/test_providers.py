"""Providers: real programs, real signals. What they leave is judged, and an exit code alone completes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import at_one_barrier, eventually

from sovereign_agent.configuration import CommandSettings, ScriptedSettings, Step
from sovereign_agent.errors import ProviderFault
from sovereign_agent.providers import build, process
from sovereign_agent.providers.base import (
    PRECEDENCE,
    REPORT_LIMIT_BYTES,
    Envelope,
    OutcomeBrief,
    Proposal,
    Report,
    SowBrief,
    judge,
    parse_report,
)
from sovereign_agent.providers.command import CommandProvider
from sovereign_agent.providers.process import Leash
from sovereign_agent.providers.scripted import PROGRAM
from sovereign_agent.records import ReceiptStatus
from sovereign_agent.workspace import Deliverable, Workspace, allocate

pytestmark = pytest.mark.timeout(60)

REPORT = {"status": "completed", "summary": "The shelves are full."}
GOOD = f"import os, json; json.dump({REPORT}, open(os.environ['SOVEREIGN_OUT'] + '/report.json', 'w'));"


def envelope(**changes: Any) -> Envelope:
    told: dict[str, Any] = {
        "assignment_id": "asg_1",
        "attempt_id": "att_1",
        "actor_id": "operator-course",
        "outcome": OutcomeBrief(id="out_1", title="Tea", desired_state="There is tea."),
        "sow": SowBrief(id="sow_1", scope="Order tea", required_effect_kind="restock"),
    }
    return Envelope.model_validate(told | changes)


@pytest.fixture
def run(tmp_path: Path) -> Workspace:
    (tmp_path / "root").mkdir()  # beside it a program may leave what it likes
    return allocate(tmp_path / "root", "run-1")


def command(*argv: str, timeout: float = 30, grace: float = 1, names: tuple[str, ...] = ()) -> CommandProvider:
    return CommandProvider(
        CommandSettings(kind="command", argv=argv, environment=names, timeout_seconds=timeout, grace_seconds=grace)
    )


def python(run: Workspace, code: str, *, timeout: float = 30, grace: float = 1, **changes: Any) -> Proposal:
    return command(sys.executable, "-c", code, timeout=timeout, grace=grace).run(envelope(**changes), run, Leash())


def scripted(run: Workspace, *steps: dict[str, Any], timeout: float = 30) -> Proposal:
    settings = ScriptedSettings(
        kind="scripted", steps=tuple(Step.model_validate(step) for step in steps), timeout_seconds=timeout
    )
    return build(settings).run(envelope(), run, Leash())


def verdict(proposal: Proposal) -> tuple[str, str]:
    return proposal.status.value, proposal.failure_category


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


COMPLETED = ("completed", "")


# what comes back


def test_a_good_run_completes_with_its_report_and_deliverables(run: Workspace) -> None:
    proposal = scripted(
        run,
        {"stdout": "working\n"},
        {"write": "sub/list.txt", "text": "tea"},
        {"report": REPORT | {"deliverables": ["sub/list.txt"], "proposal": {"kind": "restock", "quantity": 3}}},
    )
    assert verdict(proposal) == COMPLETED
    assert proposal.summary == "The shelves are full."
    assert proposal.deliverables == (Deliverable("sub/list.txt", 3, hashlib.sha256(b"tea").hexdigest()),)
    assert proposal.report
    assert proposal.report.proposal == {"kind": "restock", "quantity": 3}
    assert proposal.detail["exit_code"] == 0
    assert proposal.detail["stdout_bytes"] == 8
    assert (run.raw / "stdout.log").read_text() == "working\n"
    json.dumps(proposal.detail)


def test_a_blocked_run_carries_its_question(run: Workspace) -> None:
    proposal = scripted(run, {"report": {"status": "blocked", "summary": "s", "question": "Green or black?"}})
    assert verdict(proposal) == ("blocked", "")
    assert proposal.report
    assert proposal.report.question == "Green or black?"


def test_hazard_06_an_exit_code_alone_completes_nothing(run: Workspace) -> None:
    proposal = scripted(run, {"stdout": json.dumps(REPORT)}, {"exit": 0})
    assert verdict(proposal) == ("failed", "missing_report")
    assert ".sovereign-out/report.json" in proposal.summary


def test_hazard_09_a_good_report_and_a_nonzero_exit_is_failed_and_keeps_the_report_s_words(run: Workspace) -> None:
    proposal = scripted(run, {"report": REPORT}, {"exit": 1})
    assert verdict(proposal) == ("failed", "nonzero_exit")
    assert "exit code 1" in proposal.summary
    assert "The shelves are full." in proposal.summary


def test_hazard_09_a_failure_without_a_report_has_the_last_words(run: Workspace) -> None:
    proposal = scripted(run, {"stdout": "out of tea\n"}, {"exit": 7})
    assert verdict(proposal) == ("failed", "nonzero_exit")
    assert proposal.summary == "It ended with exit code 7. out of tea"


def test_a_report_of_failure_is_failed(run: Workspace) -> None:
    proposal = scripted(run, {"report": {"status": "failed", "summary": "No tea is to be had."}})
    assert verdict(proposal) == ("failed", "actor_reported_failure")
    assert "No tea is to be had." in proposal.summary


def test_hazard_16_only_the_file_is_a_report(run: Workspace) -> None:
    proposal = scripted(run, {"stderr": json.dumps(REPORT)}, {"write": "sub/report.json", "text": json.dumps(REPORT)})
    assert verdict(proposal) == ("failed", "missing_report")


@pytest.mark.parametrize(
    ("declared", "category"),
    [
        ("absent.txt", "deliverable_missing"),
        ("empty.txt", "deliverable_missing"),
        ("link.txt", "boundary_violated"),
        ("/etc/hostname", "boundary_violated"),
        ("../report.json", "boundary_violated"),
        ("good.txt", ""),
    ],
)
def test_hazard_08_a_declared_deliverable_must_be_a_real_file_inside(
    run: Workspace, declared: str, category: str
) -> None:
    code = GOOD.replace(str(REPORT), str(REPORT | {"deliverables": [declared]}))
    code += "os.chdir('.sovereign-out'); open('good.txt', 'w').write('x'); open('empty.txt', 'w');"
    code += "os.symlink('good.txt', 'link.txt')"
    proposal = python(run, code)
    assert proposal.failure_category == category
    assert proposal.status == (ReceiptStatus.FAILED if category else ReceiptStatus.COMPLETED)
    assert len(proposal.deliverables) == (0 if category else 1)


@pytest.mark.parametrize("folder", [".sovereign-out", "provider-raw"])
def test_a_folder_of_the_run_that_became_a_link_violates_the_boundary(
    run: Workspace, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    code = GOOD + f"os.rename({folder!r}, 'away'); os.symlink({str(tmp_path)!r}, {folder!r})"
    proposal = python(run, code)
    assert verdict(proposal) == ("failed", "boundary_violated")
    assert proposal.report is None


# reports


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b'{"status": "completed", "summary": "par', "Unterminated"),
        (b"[]", "report"),
        (b'{"status": "done", "summary": "s"}', "status"),
        (b'{"status": "completed"}', "summary"),
        (b'{"status": "completed", "summary": ""}', "summary"),
        (b'{"status": "completed", "summary": 7}', "summary"),
        (json.dumps({"status": "completed", "summary": "s" * 4001}).encode(), "summary"),
        (b'{"status": "completed", "summary": "s", "extra": 1}', "extra"),
        (b'{"status": "completed", "summary": "s", "deliverables": "a"}', "deliverables"),
        (b'{"status": "completed", "summary": "s", "deliverables": [1]}', "deliverables.0"),
        (b'{"status": "completed", "summary": "s", "proposal": []}', "proposal"),
        (b'{"status": "completed", "summary": "s", "proposal": {"n": NaN}}', "JSON"),
        (b'{"status": "completed", "summary": "s", "proposal": {"n": 1e999}}', "JSON"),
        (b'{"status": "completed", "summary": "a\\u0000b"}', "NUL"),
        (b'{"status": "completed", "summary": "s", "proposal": {"\\u0000": 1}}', "NUL"),
        (b'{"status": "completed", "summary": "s", "proposal": {"k": "\\ud800"}}', "half a character"),
        (b'{"status": "completed", "summary": "s", "proposal": {"k": ' + b"[" * 50_000, "deep"),
        (b'{"status": "completed", "summary": "s", "proposal": {"k": ' + b"9" * 5000 + b"}}", "digits"),
        (b'{"status": "blocked", "summary": "s"}', "question"),
        (b'{"status": "blocked", "summary": "s", "question": " "}', "question"),
        (b'{"status": "completed", "summary": "s", "question": "why?"}', "question"),
        (b'{"status": "completed", "summary": "\xff"}', "utf-8"),
    ],
    ids=range(23),
)
def test_what_is_no_report_is_refused_with_its_reason(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_report(content)


@pytest.mark.parametrize(
    "content",
    [
        b'{"status": "completed", "summary": "s"}',
        b'\xef\xbb\xbf{"status": "failed", "summary": "s", "deliverables": [], "proposal": null, "question": ""}\r\n',
        b'{"status": "completed", "summary": "the escape \\\\u0000 as text"}',
        b'{"status": "blocked", "summary": "s", "question": "why?"}',
        json.dumps({"status": "completed", "summary": "s" * 4000, "proposal": {"\u2028": [1.5, None]}}).encode(),
    ],
    ids=range(5),
)
def test_what_is_a_report_is_taken(content: bytes) -> None:
    assert parse_report(content).summary


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"status": "completed", "summ', ("failed", "invalid_report")),
        (json.dumps(REPORT) + " " * REPORT_LIMIT_BYTES, ("failed", "invalid_report")),
        (json.dumps(REPORT), COMPLETED),
    ],
    ids=["half", "too large", "whole"],
)
def test_a_report_is_judged_as_it_lies_in_its_file(run: Workspace, text: str, expected: tuple[str, str]) -> None:
    assert verdict(scripted(run, {"write": "report.json", "text": text})) == expected


# the table


def test_the_table_holds_every_failure_category_once() -> None:
    design = [
        "worker_lost",
        "timeout",
        "idle_timeout",
        "interrupted",
        "nonzero_exit",
        "killed",
        "malformed_stream",
        "missing_terminal",
        "provider_error",
        "missing_session",
        "missing_report",
        "invalid_report",
        "actor_reported_failure",
        "deliverable_missing",
        "boundary_violated",
        "provider_unavailable",
        "capability_refusal",
        "lease_lost",
        "line_too_long",
        "internal_error",
    ]
    assert sorted(PRECEDENCE) == sorted(design)


DONE = Report(status="completed", summary="s")


@pytest.mark.parametrize(
    ("seen", "exit_code", "report", "expected"),
    [
        ([], 0, DONE, COMPLETED),
        ([], 0, Report(status="blocked", summary="s", question="q"), ("blocked", "")),
        ([], 0, Report(status="failed", summary="s"), ("failed", "actor_reported_failure")),
        ([], 0, None, ("failed", "missing_report")),
        ([], 1, DONE, ("failed", "nonzero_exit")),
        ([], 1, None, ("failed", "nonzero_exit")),
        ([], 1, Report(status="blocked", summary="s", question="q"), ("failed", "nonzero_exit")),
        ([], None, DONE, ("failed", "killed")),
        (["timeout"], 0, DONE, ("failed", "timeout")),
        (["timeout"], None, None, ("failed", "timeout")),
        (["timeout", "interrupted", "lease_lost"], None, None, ("failed", "lease_lost")),
        (["provider_unavailable"], None, None, ("failed", "provider_unavailable")),
        (["boundary_violated"], 1, DONE, ("failed", "boundary_violated")),
        (["deliverable_missing"], 0, DONE, ("failed", "deliverable_missing")),
        (["invalid_report"], 0, None, ("failed", "invalid_report")),
        (["internal_error"], None, DONE, ("failed", "internal_error")),
        (["internal_error"], 1, DONE, ("failed", "nonzero_exit")),
    ],
    ids=range(17),
)
def test_the_table_judges(
    seen: list[str], exit_code: int | None, report: Report | None, expected: tuple[str, str]
) -> None:
    assert judge(seen, exit_code=exit_code, report=report) == expected


@pytest.mark.parametrize("category", PRECEDENCE)
def test_whatever_was_seen_keeps_a_good_report_from_completing(category: str) -> None:
    assert judge([category], exit_code=0, report=DONE) == ("failed", category)


def test_an_unknown_category_gets_no_verdict_at_all() -> None:
    with pytest.raises(ValueError, match="tuple"):
        judge(["timed_out"], exit_code=0, report=DONE)


# starting


def _script(folder: Path, text: str, mode: int = 0o755) -> str:
    path = folder / "program"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


CAUSES = {
    "absent from the path": "on the PATH",
    "absent": "no such file",
    "link to nothing": "link to nothing",
    "bad interpreter": "interpreter",
    "no shebang": "format is unknown",
    "not executable": "not executable",
    "folder": "not executable",
}


def unstartable(case: str, folder: Path) -> str:
    match case:
        case "absent from the path":
            return "no-such-program-anywhere"
        case "link to nothing":
            (folder / "link").symlink_to(folder / "nothing")
            return str(folder / "link")
        case "bad interpreter":
            return _script(folder, "#!/no/such/interpreter\n")
        case "no shebang":
            return _script(folder, "echo hello\n")
        case "not executable":
            return _script(folder, "#!/bin/sh\n", 0o644)
        case _:
            return str(folder / ("nothing" if case == "absent" else ""))


@pytest.mark.parametrize("case", CAUSES)
def test_hazard_19_a_program_that_cannot_be_started_is_failed_with_the_real_cause(
    run: Workspace, tmp_path: Path, case: str
) -> None:
    proposal = command(unstartable(case, tmp_path)).run(envelope(), run, Leash())
    assert verdict(proposal) == ("failed", "provider_unavailable")
    assert CAUSES[case] in proposal.summary


def start(run: Workspace, *argv: str) -> process.Ending:
    return process.run(
        argv, run, stdin=b"", variables=process.variables(), timeout_seconds=30, grace_seconds=1, leash=Leash()
    )


def test_hazard_19_a_program_open_for_writing_is_busy(run: Workspace, tmp_path: Path) -> None:
    path = Path(_script(tmp_path, ""))
    path.write_bytes(Path("/bin/true").read_bytes())
    with path.open("ab"), pytest.raises(ProviderFault, match="open for writing"):
        start(run, str(path))


def test_hazard_19_a_missing_folder_is_not_blamed_on_the_program(run: Workspace, tmp_path: Path) -> None:
    run.path.rename(tmp_path / "moved")
    with pytest.raises(ProviderFault, match="folder it should run in") as fault:
        start(run, "/bin/true")
    assert fault.value.category == "provider_unavailable"


def test_hazard_21_arguments_that_cannot_be_passed_are_refused(run: Workspace) -> None:
    with pytest.raises(ProviderFault, match="NUL"):
        start(run, "/bin/echo", "a\0b")


def test_hazard_21_arguments_that_are_too_long_are_refused(run: Workspace) -> None:
    with pytest.raises(ProviderFault, match="longer than the system takes"):
        start(run, "/bin/echo", "x" * 10_000_000)


def test_hazard_19_its_twin_a_script_with_an_interpreter_runs(run: Workspace, tmp_path: Path) -> None:
    script = _script(tmp_path, f"#!/bin/sh\necho '{json.dumps(REPORT)}' > .sovereign-out/report.json\n")
    assert verdict(command(script).run(envelope(), run, Leash())) == COMPLETED


def test_a_program_is_found_on_the_path_of_the_worker(
    run: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _script(tmp_path, "#!/bin/sh\nexit 5\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert command("program").run(envelope(), run, Leash()).detail["exit_code"] == 5


# what it is told


def test_hazard_21_the_envelope_comes_whole_on_stdin_however_long(run: Workspace) -> None:
    rulings = ["x" * 200_000, "--help", "-p x", "a\0b", "caf\u00e9 \u2028"]
    code = GOOD + "import sys; open('got', 'wb').write(sys.stdin.buffer.read())"
    assert verdict(python(run, code, rulings=rulings)) == COMPLETED
    got = (run.path / "got").read_bytes()
    assert b"\0" not in got
    assert json.loads(got) == json.loads(envelope(rulings=rulings).model_dump_json())
    assert json.loads(got)["report_name"] == ".sovereign-out/report.json"


def test_hazard_21_half_a_character_never_enters_an_envelope() -> None:
    with pytest.raises(ValueError, match="half a character"):
        envelope(rulings=["\ud800"])


def test_hazard_15_a_program_that_does_not_read_its_input_is_no_trouble(run: Workspace) -> None:
    assert verdict(python(run, GOOD, rulings=["x" * 1_000_000])) == COMPLETED


def test_hazard_15_input_ends(run: Workspace) -> None:
    assert verdict(python(run, "import sys; sys.stdin.read(); sys.stdin.read();" + GOOD)) == COMPLETED


def test_hazard_22_only_a_handful_of_variables_is_passed_on(run: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLAUDECODE", "NODE_OPTIONS", "PYTHONPATH", "PGPASSWORD", "MY_SECRET", "MY_KEY"):
        monkeypatch.setenv(name, "1")
    for name in ("HOME", "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR"):
        monkeypatch.setenv(name, os.environ.get(name, "C"))
    code = GOOD + "open('seen', 'w').write(json.dumps(dict(os.environ)))"
    provider = command(sys.executable, "-I", "-c", code, names=("MY_KEY", "NOT_SET"))
    assert verdict(provider.run(envelope(), run, Leash())) == COMPLETED
    seen = json.loads((run.path / "seen").read_text())
    others = {name for name in os.environ if name.startswith("LC_")}
    told = {"SOVEREIGN_ASSIGNMENT": "asg_1", "SOVEREIGN_ATTEMPT": "att_1", "SOVEREIGN_OUT": str(run.out)}
    assert set(seen) - others == {"HOME", "PATH", "LANG", "TZ", "TMPDIR", "MY_KEY", *told}
    assert {name: seen[name] for name in told} == told


def test_hazard_22_a_missing_path_and_home_are_no_trouble(run: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("PATH")
    assert command("sh", "-c", "exit 6").run(envelope(), run, Leash()).detail["exit_code"] == 6


def test_it_runs_in_its_folder_in_a_session_of_its_own_and_writes_for_this_user_only(run: Workspace) -> None:
    code = GOOD + "open('seen', 'w').write(f'{os.getcwd()} {os.getsid(0) == os.getpid() == os.getpgid(0)}')"
    assert verdict(python(run, code)) == COMPLETED
    assert (run.path / "seen").read_text() == f"{run.path} True"
    for path in (run.path / "seen", run.raw / "stdout.log", run.raw / "stderr.log", run.out / "report.json"):
        assert path.stat().st_mode & 0o777 == 0o600


# what it prints


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 10_000_000])
def test_hazard_14_a_flood_on_stderr_before_anything_else_hangs_nothing(run: Workspace, size: int) -> None:
    proposal = python(run, f"import sys; sys.stderr.write('x' * {size}); print('after');" + GOOD)
    assert verdict(proposal) == COMPLETED
    assert proposal.detail["stderr_bytes"] == size
    assert (run.raw / "stdout.log").read_text() == "after\n"


def test_a_long_output_is_kept_as_head_and_tail_with_the_gap_counted(run: Workspace) -> None:
    code = "import sys; w = sys.stdout.write; w('first'); [w('x' * 1000) for _ in range(5000)]; w('last');" + GOOD
    proposal = python(run, code)
    kept = (run.raw / "stdout.log").read_bytes()
    assert (kept[:5], kept[-4:]) == (b"first", b"last")
    gap = proposal.detail["stdout_bytes"] - process.HEAD_BYTES - process.TAIL_BYTES
    assert proposal.detail["stdout_bytes"] == 5_000_009
    assert b"\n[... %d bytes not kept ...]\n" % gap in kept
    assert len(kept) < process.HEAD_BYTES + process.TAIL_BYTES + 100
    assert proposal.detail["evidence_truncated"] is True


def test_an_output_as_long_as_head_and_tail_is_kept_whole(run: Workspace) -> None:
    size = process.HEAD_BYTES + process.TAIL_BYTES
    proposal = python(run, f"import sys; sys.stdout.write('x' * {size});" + GOOD)
    assert (run.raw / "stdout.log").read_bytes() == b"x" * size
    assert proposal.detail["evidence_truncated"] is False


def test_the_last_words_can_be_kept_by_any_ledger(run: Workspace) -> None:
    proposal = python(run, "import os; os.write(2, b'x' * 5000 + b'\\xff\\0 the end'); os._exit(1)")
    assert proposal.detail["stderr_tail"].endswith("\ufffd\ufffd the end")
    assert len(proposal.detail["stderr_tail"]) <= process.LAST_WORDS_BYTES
    assert proposal.summary.endswith("the end")


def _capture_with_a_full_disk(_: int, root: str) -> tuple[tuple[str, str], dict[str, Any]]:
    run = allocate(root, "run-1")
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
    proposal = python(run, "import sys; sys.stdout.write('x' * 1_000_000);" + GOOD)
    return verdict(proposal), proposal.detail


def test_hazard_25_no_space_for_the_capture_is_recorded_and_hangs_nothing(tmp_path: Path) -> None:
    ((outcome, detail),) = at_one_barrier(1, _capture_with_a_full_disk, str(tmp_path))
    assert outcome == COMPLETED
    assert detail["stdout_bytes"] == 1_000_000
    assert detail["evidence_truncated"] is True
    assert detail["capture_fault"] == "File too large"


def test_hazard_25_a_log_is_not_written_through_a_planted_link(run: Workspace, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("intact")
    (run.raw / "stdout.log").symlink_to(tmp_path / "victim")
    proposal = scripted(run, {"stdout": "overwritten?"}, {"report": REPORT})
    assert (tmp_path / "victim").read_text() == "intact"
    assert proposal.detail["capture_fault"]


# how it ends


def test_a_run_beyond_its_deadline_is_asked_to_end(run: Workspace, tmp_path: Path) -> None:
    code = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / "asked")!r}, "w"), sys.exit(0)))
{GOOD}
time.sleep(60)
"""
    proposal = python(run, code, timeout=1, grace=10)
    assert verdict(proposal) == ("failed", "timeout")
    assert (tmp_path / "asked").exists()
    assert (proposal.detail["ended_by"], proposal.detail["exit_code"]) == ("timeout", 0)
    assert proposal.detail["duration_seconds"] < 9


def test_hazard_12_a_group_that_will_not_end_is_ended(run: Workspace, tmp_path: Path) -> None:
    code = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
member = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{member.pid}}")
time.sleep(60)
"""
    proposal = python(run, code, timeout=1, grace=0.2)
    assert verdict(proposal) == ("failed", "timeout")
    assert (proposal.detail["signal"], proposal.detail["exit_code"]) == (signal.SIGKILL, None)
    leader, member = map(int, (tmp_path / "pids").read_text().split())
    assert gone(leader)
    assert gone(member)


def test_hazard_12_a_member_left_behind_by_a_good_end_is_ended(run: Workspace, tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
member = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(member.pid))
{GOOD}
"""
    assert verdict(python(run, code)) == COMPLETED
    assert gone(int((tmp_path / "pid").read_text()))


def test_hazard_12_a_process_that_left_the_group_and_floods_the_pipes_holds_nobody_up(
    run: Workspace, tmp_path: Path
) -> None:
    code = f"""
import subprocess, sys
away = subprocess.Popen(["sh", "-c", "yes"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(away.pid))
{GOOD}
"""
    proposal = python(run, code, rulings=["x" * 1_000_000])
    assert verdict(proposal) == COMPLETED
    assert proposal.detail["duration_seconds"] < 10
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("argv", "expected", "code", "number"),
    [
        (("sh", "-c", "kill -TERM $$"), "killed", None, signal.SIGTERM),
        (("sh", "-c", "kill -KILL $$"), "killed", None, signal.SIGKILL),
        (("sh", "-c", "sh -c 'kill -TERM $$'; exit $?"), "nonzero_exit", 143, None),
        (("sh", "-c", "exit 137"), "nonzero_exit", 137, None),
        (("sh", "-c", "exit 124"), "nonzero_exit", 124, None),
        (("sh", "-c", "sleep 60"), "timeout", None, signal.SIGTERM),
    ],
    ids=range(6),
)
def test_hazard_24_who_ended_it_and_how_stay_apart(
    run: Workspace, argv: tuple[str, ...], expected: str, code: int | None, number: int | None
) -> None:
    proposal = command(*argv, timeout=1 if expected == "timeout" else 30).run(envelope(), run, Leash())
    assert verdict(proposal) == ("failed", expected)
    assert (proposal.detail["exit_code"], proposal.detail["signal"]) == (code, number)
    assert proposal.detail["ended_by"] == ("timeout" if expected == "timeout" else "itself")


def test_runs_leave_no_thread_and_no_descriptor_behind(tmp_path: Path) -> None:
    def measure() -> tuple[int, int]:
        return threading.active_count(), psutil.Process().num_fds()

    python(allocate(tmp_path, "run-0"), GOOD)
    before = measure()
    for number in range(1, 6):
        python(allocate(tmp_path, f"run-{number}"), GOOD)
        command("no-such-program").run(envelope(), allocate(tmp_path, f"absent-{number}"), Leash())
    assert measure() == before


def _with_sigchld_ignored(_: int, root: str) -> tuple[tuple[str, str], Any]:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    proposal = python(allocate(root, "run-1"), GOOD + "os._exit(5)")
    return verdict(proposal), proposal.detail["exit_code"]


def test_a_worker_that_ignores_the_end_of_its_children_learns_of_it_all_the_same(tmp_path: Path) -> None:
    assert at_one_barrier(1, _with_sigchld_ignored, str(tmp_path)) == [(("failed", "nonzero_exit"), 5)]


WORKER = """
import json, sys
root, steps, *sys.path[:0] = sys.argv[1:]
from test_providers import scripted
from sovereign_agent.workspace import allocate
try:
    scripted(allocate(root, "run-1"), *json.loads(steps))
except KeyboardInterrupt:
    print("interrupted")
"""


def worker(tmp_path: Path, step: dict[str, Any]) -> tuple[subprocess.Popen[bytes], int]:
    """A real worker, and the process id of the scripted program below it that has begun its second step."""
    barrier = tmp_path / "reached"
    steps = json.dumps([{"touch": str(barrier)}, step])
    argv = [sys.executable, "-c", WORKER, str(tmp_path), steps, *sys.path]
    started = subprocess.Popen(argv, stdout=subprocess.PIPE)
    return started, int(eventually(lambda: barrier.exists() and barrier.read_text()))


def test_an_interrupted_worker_ends_its_program_first(tmp_path: Path) -> None:
    started, program = worker(tmp_path, {"sleep": 50.0})
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=10)
    assert out == b"interrupted\n"
    assert gone(program)


@pytest.mark.parametrize("step", [{"sleep": 50.0}, {"wait_for": "never", "seconds": 50.0}], ids=["sleep", "wait"])
def test_a_killed_worker_leaves_no_program_of_ours_behind(tmp_path: Path, step: dict[str, Any]) -> None:
    started, program = worker(tmp_path, step)
    started.kill()
    started.communicate(timeout=10)
    eventually(lambda: gone(program), within=5)


# the scripted provider


def test_steps_are_performed_in_order_until_an_exit(run: Workspace) -> None:
    proposal = scripted(
        run,
        {"stdout": "one "},
        {"sleep": 0.01},
        {"stderr": "loud"},
        {"stdout": "two"},
        {"report": REPORT},
        {"exit": 0},
        {"stdout": "never"},
    )
    assert verdict(proposal) == COMPLETED
    assert (run.raw / "stdout.log").read_text() == "one two"
    assert (run.raw / "stderr.log").read_text() == "loud"


def test_a_program_waits_at_a_barrier(run: Workspace, tmp_path: Path) -> None:
    reached, free = tmp_path / "reached", tmp_path / "free"
    answers: list[Proposal] = []
    steps = ({"touch": str(reached)}, {"wait_for": str(free), "seconds": 30.0}, {"report": REPORT})
    thread = threading.Thread(target=lambda: answers.append(scripted(run, *steps)))
    thread.start()
    eventually(reached.exists)
    assert not answers
    free.touch()
    thread.join(20)
    assert verdict(answers[0]) == COMPLETED


def test_waiting_in_vain_ends_the_program(run: Workspace) -> None:
    proposal = scripted(run, {"wait_for": "never", "seconds": 0.05}, {"report": REPORT})
    assert verdict(proposal) == ("failed", "nonzero_exit")
    assert "waited in vain for never" in proposal.summary


def test_a_program_may_ignore_the_request_to_end(run: Workspace) -> None:
    proposal = scripted(run, {"ignore_term": True}, {"sleep": 50.0}, timeout=0.5)
    assert (proposal.failure_category, proposal.detail["signal"]) == ("timeout", signal.SIGKILL)


def test_long_steps_do_not_pass_through_the_arguments(run: Workspace) -> None:
    proposal = scripted(run, {"stderr": "x" * 500_000}, {"report": REPORT})
    assert (verdict(proposal), proposal.detail["stderr_bytes"]) == (COMPLETED, 500_000)


def test_a_scripted_program_starts_fast(run: Workspace) -> None:
    started = time.monotonic()
    scripted(run, {"report": REPORT})
    assert time.monotonic() - started < 2


# building


def test_a_provider_is_built_from_its_settings() -> None:
    assert isinstance(build(CommandSettings(kind="command", argv=("true",))), CommandProvider)
    scripted = build(ScriptedSettings(kind="scripted", steps=()))
    assert isinstance(scripted, CommandProvider)
    assert scripted.settings.argv[-1] == str(PROGRAM)


def test_nothing_of_the_ledger_is_imported() -> None:
    code = """
import sys
import sovereign_agent.providers
print(sorted(name for name in sys.modules if name.startswith("sovereign_agent.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    rooms = {name.split(".")[1] for name in eval(done.stdout)}  # noqa: S307
    assert rooms == {"boundary", "clock", "configuration", "errors", "providers", "records", "workspace"}
