"""Agent programs: bytes in, a receipt out. A real process, under each product's name, plays what each one prints."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_streams import GOOD, KINDS, RATE_LIMIT, failed, good, lines
from support import configure, eventually, governed_work

from sovereign_agent.commands.checkup import check_up
from sovereign_agent.configuration import AgentSettings, default_text, load
from sovereign_agent.errors import ConfigurationFault, ProviderFault
from sovereign_agent.organization import Organization
from sovereign_agent.providers import DIALECTS, agent, base, build, claude, codex, cursor, process, stream
from sovereign_agent.providers.agent import Capabilities, arguments
from sovereign_agent.providers.base import (
    PRECEDENCE,
    PROMPT_LIMIT_BYTES,
    Envelope,
    OutcomeBrief,
    Proposal,
    SowBrief,
    prompt,
)
from sovereign_agent.providers.process import Leash
from sovereign_agent.workspace import Workspace, allocate

FAKE = Path(__file__).with_name("fixtures") / "fake_cli.py"
DOCS = Path(__file__).parents[1] / "docs" / "reference" / "providers.md"
NAMES = {"claude": "claude", "codex": "codex", "cursor": "cursor-agent"}
COMPLETED = ("completed", "")

Step = dict[str, Any]

REPORT: Step = {
    "write": ".sovereign-out/report.json",
    "text": json.dumps({"status": "completed", "summary": "The shelves are full.", "deliverables": ["tea.txt"]}),
}
DELIVERABLE: Step = {"write": ".sovereign-out/tea.txt", "text": "tea"}
WORK = (DELIVERABLE, REPORT)

each_kind = pytest.mark.parametrize("kind", KINDS)


def out(content: bytes) -> Step:
    return {"out_b64": base64.b64encode(content).decode()}


class Fakes:
    """The folder that holds the programs: the only one on PATH that has any of them."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        folder.mkdir()

    def install(self, kind: str, *run: Step, **plan: list[Step]) -> Path:
        """Put the program of that kind in its place, with a plan."""
        program = self.folder / NAMES[kind]
        program.write_text(f"#!{self.python} -IS\n" + FAKE.read_text())
        program.chmod(0o755)
        (self.folder / f"{NAMES[kind]}.json").write_text(json.dumps({"run": run, **plan}))
        return program

    def calls(self, kind: str) -> list[list[str]]:
        """The arguments of each call so far."""
        path = self.folder / f"{NAMES[kind]}.calls"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def runs(self, kind: str) -> list[list[str]]:
        """The arguments of each call that was no question."""
        return [call for call in self.calls(kind) if not {"--version", "--help"} & {*call}]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Workspace:
    return allocate(tmp_path, "run-1")


def envelope(**changes: Any) -> Envelope:
    told: dict[str, Any] = {
        "assignment_id": "asg_1",
        "attempt_id": "att_1",
        "actor_id": "operator-course",
        "outcome": OutcomeBrief(id="out_1", title="Tea", desired_state="There is tea."),
        "sow": SowBrief(id="sow_1", scope="Order tea"),
    }
    return Envelope.model_validate(told | changes)


def perform(kind: str, folder: Workspace, *, rulings: tuple[str, ...] = (), **options: Any) -> Proposal:
    settings = AgentSettings.model_validate({"kind": kind, "timeout_seconds": 30, "grace_seconds": 1} | options)
    return build(settings).run(envelope(rulings=rulings), folder, Leash())


@pytest.fixture
def played(fakes: Fakes, folder: Workspace) -> Callable[..., Proposal]:
    """Install a plan for a kind and run it."""

    def play(kind: str, *run: Step, plan: dict[str, list[Step]] | None = None, **options: Any) -> Proposal:
        fakes.install(kind, *run, **plan or {})
        return perform(kind, folder, **options)

    return play


def verdict(proposal: Proposal) -> tuple[str, str]:
    return proposal.status.value, proposal.failure_category


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# a good run


@each_kind
def test_a_good_run_completes_with_its_report_and_its_testimony(kind, played):
    proposal = played(kind, *WORK, out(good(kind)))
    assert verdict(proposal) == COMPLETED
    assert proposal.summary == "The shelves are full."
    assert [each.name for each in proposal.deliverables] == ["tea.txt"]
    assert (proposal.detail["seen"], proposal.detail["exit_code"], proposal.detail["ended_by"]) == ([], 0, "itself")
    assert proposal.detail["session"]
    assert proposal.detail["events"] == len(GOOD[kind])
    assert proposal.detail["version"] in {"2.1.229", "0.147.0", "2025.09.18-7ae6800"}
    json.dumps(proposal.detail)


@each_kind
def test_its_bytes_end_as_a_receipt_in_the_ledger(kind, fakes, org: Organization):
    fakes.install(kind, *WORK, out(good(kind)))
    fakes.install("claude" if kind == "cursor" else "cursor", {"exit": 1})
    configure(org, lambda document: _bind(document, kind))
    _, _, assignment = governed_work(org)
    receipt = org.run_assignment(assignment.id)
    assert (receipt.status.value, receipt.failure_category, receipt.summary) == (*COMPLETED, "The shelves are full.")
    assert receipt.detail["deliverables"][0]["sha256"] == hashlib.sha256(b"tea").hexdigest()
    fakes.install(kind, *WORK, out(lines(*GOOD[kind][:-1], failed(kind))))
    _, _, assignment = governed_work(org)
    receipt = org.run_assignment(assignment.id)
    assert (receipt.status.value, receipt.failure_category) == ("failed", "provider_error")
    assert "usage limit reached" in receipt.summary


def _bind(document: Any, kind: str) -> None:
    document["providers"]["agent"] = {"kind": kind, "timeout_seconds": 30}
    document["actors"]["operator-course"]["provider"] = "agent"


@each_kind
def test_a_blocked_run_carries_its_question(kind, played):
    report = {"status": "blocked", "summary": "s", "question": "Green or black?"}
    proposal = played(kind, {"write": ".sovereign-out/report.json", "text": json.dumps(report)}, out(good(kind)))
    assert verdict(proposal) == ("blocked", "")


# the stream


@each_kind
def test_hazard_01_output_that_stops_in_the_middle_of_an_event_is_failed(kind, played, folder):
    proposal = played(kind, *WORK, out(good(kind)[:-9]), {"exit": 0})
    assert verdict(proposal) == ("failed", "malformed_stream")
    assert (folder.raw / "stdout.log").read_bytes() == good(kind)[:-9]


@each_kind
def test_hazard_01_its_twin_that_says_its_last_word_completes(kind, played):
    assert verdict(played(kind, *WORK, out(good(kind)[:-9]), out(good(kind)[-9:]))) == COMPLETED


@each_kind
def test_hazard_02_noise_on_its_output_changes_nothing(kind, played):
    noisy = b"npm warn old lockfile\n\n\x1b[2K{}\n" + good(kind).replace(b"\n", b"\r\n[]\n")
    proposal = played(kind, *WORK, out(noisy))
    assert verdict(proposal) == COMPLETED
    assert proposal.detail["noise"] == 3 + len(GOOD[kind])
    assert proposal.detail["noise_sample"][0] == "npm warn old lockfile"


@each_kind
@pytest.mark.parametrize("size", [65_535, 65_537, 2**20])
def test_hazard_03_a_long_line_is_one_event(kind, size, played):
    long = lines(GOOD[kind][1] | {"padding": "x" * size})
    assert verdict(played(kind, *WORK, out(long + good(kind)))) == COMPLETED


@each_kind
def test_hazard_03_a_line_without_end_ends_the_run(kind, played):
    proposal = played(kind, *WORK, out(good(kind)), {"out_text": "x" * 2**20, "times": 50}, {"sleep": 60})
    assert verdict(proposal) == ("failed", "line_too_long")
    assert proposal.detail["duration_seconds"] < 20


@each_kind
def test_hazard_04_a_line_break_of_unicode_cuts_no_event(kind, played):
    odd = lines(GOOD[kind][1] | {"text": "a\u2028b\x85c\fd"})
    proposal = played(kind, *WORK, out(lines(GOOD[kind][0]) + odd + lines(*GOOD[kind][1:])))
    assert (verdict(proposal), proposal.detail["noise"]) == (COMPLETED, 0)


def test_hazard_04_nothing_that_reads_a_protocol_cuts_lines_where_unicode_does():
    for room in (agent, stream, claude, codex, cursor, base, process):
        assert not re.search(r"splitlines|iter_lines|STDOUT", Path(room.__file__).read_text())


@each_kind
@pytest.mark.parametrize(
    ("work", "events", "expected"),
    [
        (WORK, 0, ("failed", "missing_terminal")),
        (WORK, 1, ("failed", "missing_terminal")),
        (WORK, -1, ("failed", "missing_terminal")),
        ((), None, ("failed", "missing_report")),
        (WORK, None, COMPLETED),
    ],
    ids=["no output", "a beginning", "all but the end", "no report", "all"],
)
def test_hazard_06_silence_completes_nothing(kind, work, events, expected, played):
    assert verdict(played(kind, *work, out(lines(*GOOD[kind][:events])), {"exit": 0})) == expected


@pytest.mark.parametrize("kind", ["claude", "cursor"])
def test_hazard_06_a_result_without_words_is_judged_by_its_report(kind, played):
    silent = lines(*GOOD[kind][:-1], GOOD[kind][-1] | {"result": ""})
    assert verdict(played(kind, *WORK, out(silent))) == COMPLETED


@pytest.mark.parametrize("kind", ["claude", "cursor"])
@pytest.mark.parametrize("subtype", ["success", "error_during_execution"])
@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize("code", [0, 1])
def test_hazard_07_of_eight_endings_one_completes(kind, subtype, is_error, code, played):
    closing = GOOD[kind][-1] | {"subtype": subtype, "is_error": is_error, "result": "the words"}
    proposal = played(kind, *WORK, out(lines(*GOOD[kind][:-1], closing)), {"exit": code})
    expected = "nonzero_exit" if code else "" if subtype == "success" and not is_error else "provider_error"
    assert proposal.failure_category == expected
    assert ("the words" in proposal.summary) == bool(expected)
    assert proposal.summary.startswith("The shelves are full.") == (not expected)


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("ok", [True, False])
def test_hazard_07_of_four_endings_of_a_turn_one_completes(code, ok, played):
    closing = GOOD["codex"][-1] if ok else failed("codex", "the words")
    proposal = played("codex", *WORK, out(lines(*GOOD["codex"][:-1], closing)), {"exit": code})
    assert proposal.failure_category == ("nonzero_exit" if code else "" if ok else "provider_error")
    assert ok or "the words" in proposal.summary


@pytest.mark.parametrize(("then", "expected"), [(GOOD["codex"][1:2], "missing_terminal"), (GOOD["codex"][1:], "")])
def test_hazard_07_a_turn_that_begins_after_one_that_ended_has_to_end_too(then, expected, played):
    assert played("codex", *WORK, out(good("codex") + lines(*then))).failure_category == expected


@each_kind
@pytest.mark.parametrize(
    "made", [[], [{"write": ".sovereign-out/tea.txt", "text": ""}], [{"write": "tea.txt", "text": "tea"}]], ids=range(3)
)
def test_hazard_08_a_success_without_its_deliverable_is_failed(kind, made, played):
    proposal = played(kind, *made, REPORT, out(good(kind)))
    assert verdict(proposal) == ("failed", "deliverable_missing")


@each_kind
def test_hazard_09_a_good_result_and_a_nonzero_exit_is_failed_with_the_words_of_the_result(kind, played):
    proposal = played(kind, *WORK, out(good(kind)), {"exit": 1})
    assert verdict(proposal) == ("failed", "nonzero_exit")
    assert proposal.summary == "It ended with exit code 1. The shelves are full. all done"


@each_kind
def test_hazard_09_a_failure_that_only_stderr_explains_has_its_last_words(kind, played):
    proposal = played(kind, {"err_text": "no credit left\n"}, {"exit": 1})
    assert verdict(proposal) == ("failed", "nonzero_exit")
    assert proposal.summary == "It ended with exit code 1. no credit left"


@each_kind
@pytest.mark.parametrize("ok", [True, False])
def test_hazard_10_a_program_that_hangs_after_its_result_is_judged_by_the_result(kind, ok, played, monkeypatch):
    monkeypatch.setattr(process, "AFTER_RESULT_SECONDS", 0.5)
    told = good(kind) if ok else lines(*GOOD[kind][:-1], failed(kind))
    proposal = played(kind, *WORK, out(told + b'{"type":"half'), {"ignore": "SIGTERM"}, {"sleep": 60})
    assert verdict(proposal) == (COMPLETED if ok else ("failed", "provider_error"))
    assert (proposal.detail["ended_by"], proposal.detail["signal"]) == ("after_result", signal.SIGKILL)
    assert proposal.detail["duration_seconds"] < 5


@each_kind
def test_hazard_10_a_program_that_takes_a_while_to_close_is_left_to_it(kind, played):
    proposal = played(kind, *WORK, out(good(kind)), {"sleep": 1})
    assert (verdict(proposal), proposal.detail["ended_by"]) == (COMPLETED, "itself")


@each_kind
def test_hazard_11_a_stream_that_falls_silent_is_ended_for_that(kind, played):
    proposal = played(kind, *WORK, out(lines(*GOOD[kind][:2])), {"sleep": 60}, idle_seconds=1.0)
    assert verdict(proposal) == ("failed", "idle_timeout")


@each_kind
def test_hazard_11_a_stream_that_goes_on_forever_is_ended_at_its_deadline(kind, played):
    steps = [out(lines(GOOD[kind][1])), {"sleep": 0.2}] * 100
    assert verdict(played(kind, *WORK, *steps, timeout_seconds=1.0)) == ("failed", "timeout")


@each_kind
def test_hazard_11_its_twin_that_is_silent_for_less_completes(kind, played):
    first, *rest = GOOD[kind]
    steps = (out(lines(first)), {"sleep": 1}, out(lines(*rest)))
    assert verdict(played(kind, *WORK, *steps, idle_seconds=20.0)) == COMPLETED


@each_kind
@pytest.mark.parametrize("size", [65_537, 10_000_000])
def test_hazard_14_a_flood_on_stderr_hangs_nothing(kind, size, played):
    proposal = played(kind, *WORK, {"err_bytes": size}, out(good(kind)))
    assert (verdict(proposal), proposal.detail["stderr_bytes"]) == (COMPLETED, size)


@each_kind
def test_hazard_15_its_input_ends_even_where_nothing_is_written_to_it(kind, played):
    assert verdict(played(kind, {"digest_stdin": "digest"}, *WORK, out(good(kind)))) == COMPLETED


@each_kind
def test_hazard_15_a_program_that_does_not_read_its_task_is_no_trouble(kind, played):
    assert verdict(played(kind, *WORK, out(good(kind)), rulings=("x" * 1_000_000,))) == COMPLETED


@each_kind
@pytest.mark.parametrize("code", [0, 1])
def test_hazard_16_what_looks_like_a_result_but_stands_elsewhere_counts_for_nothing(kind, code, played):
    result = lines(GOOD[kind][-1]).decode()
    quoted = {"type": "user", "message": {"content": [{"type": "tool_result", "content": result}]}}
    told = lines(*GOOD[kind][:-1], quoted, {"type": "wrapped", "event": GOOD[kind][-1]})
    proposal = played(kind, *WORK, {"err_text": result}, out(told), {"exit": code})
    assert verdict(proposal) == ("failed", "nonzero_exit" if code else "missing_terminal")


@each_kind
def test_hazard_16_a_failure_on_stderr_alone_fails_nothing(kind, played):
    assert verdict(played(kind, *WORK, {"err_text": lines(failed(kind)).decode()}, out(good(kind)))) == COMPLETED


@each_kind
def test_hazard_18_unknown_events_are_passed_over_and_stand_on_the_receipt(kind, played):
    told = lines(GOOD[kind][0], {"type": "brand_new", "x": 1}, RATE_LIMIT, *GOOD[kind][1:])
    proposal = played(kind, *WORK, out(told))
    assert verdict(proposal) == COMPLETED
    assert proposal.detail["unknown_events"] == {"brand_new": 1, "rate_limit_event": 1}


@each_kind
def test_hazard_18_a_result_that_lacks_its_fields_is_malformed(kind, played):
    proposal = played(kind, *WORK, out(lines(*GOOD[kind][:-1], {"type": GOOD[kind][-1]["type"]})))
    assert verdict(proposal) == ("failed", "malformed_stream")


@each_kind
def test_a_stream_that_names_no_session_is_failed(kind, played):
    told = good(kind).replace(b"session_id", b"_").replace(b"thread_id", b"_")
    assert verdict(played(kind, *WORK, out(told))) == ("failed", "missing_session")


@each_kind
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"signal": "SIGTERM"}, ("killed", None, signal.SIGTERM)),
        ({"signal": "SIGKILL"}, ("killed", None, signal.SIGKILL)),
        ({"exit": 143}, ("nonzero_exit", 143, None)),
        ({"exit": 137}, ("nonzero_exit", 137, None)),
        ({"exit": 124}, ("nonzero_exit", 124, None)),
    ],
    ids=range(5),
)
def test_hazard_24_a_good_result_does_not_hide_how_it_ended(kind, step, expected, played):
    proposal = played(kind, *WORK, out(good(kind)), step)
    assert (proposal.failure_category, proposal.detail["exit_code"], proposal.detail["signal"]) == expected


# what it is told


@each_kind
@pytest.mark.parametrize("text", ["x" * 200_000, "--help", "-p x", "a\0b", "caf\u00e9 \u2028 '$(id)'"], ids=range(5))
def test_hazard_21_the_task_arrives_whole_and_never_in_the_arguments(kind, text, fakes, folder, played):
    told: Step = {"digest_stdin": "digest"}
    if kind == "cursor":
        told = {"digest": ".sovereign-task.md", "into": "digest"}
    assert verdict(played(kind, told, *WORK, out(good(kind)), rulings=(text,))) == COMPLETED
    assert (folder.path / "digest").read_text() == hashlib.sha256(prompt(envelope(rulings=(text,)))).hexdigest()
    (call,) = fakes.runs(kind)
    assert not [argument for argument in call if text in argument and text != "--help"]
    assert len(json.dumps(call)) < 500


def test_hazard_21_a_task_in_a_file_is_for_this_user_only(played, folder):
    played("cursor", *WORK, out(good("cursor")))
    assert (folder.path / ".sovereign-task.md").stat().st_mode & 0o777 == 0o600


@each_kind
def test_hazard_21_a_task_without_end_is_refused_before_anything_is_started(kind, fakes, played):
    proposal = played(kind, *WORK, out(good(kind)), rulings=("x" * PROMPT_LIMIT_BYTES,))
    assert verdict(proposal) == ("failed", "capability_refusal")
    assert fakes.runs(kind) == []


def test_the_prompt_tells_the_task_and_the_whole_contract():
    text = prompt(envelope(rulings=("Only green tea.", "a\0b"))).decode()
    for part in ("Order tea", "There is tea.", "Only green tea.", ".sovereign-out/report.json"):
        assert part in text
    for key in ("status", "summary", "deliverables", "question", "proposal"):
        assert re.search(rf"^  {key} ", text, re.MULTILINE)
    assert "\0" not in text
    assert json.loads(text[text.index("\n{") :])["rulings"][1] == "a\0b"


@each_kind
def test_hazard_22_only_a_handful_of_variables_is_passed_on(kind, played, folder, monkeypatch):
    for name in ("CLAUDECODE", "NODE_OPTIONS", "PYTHONPATH", "PGPASSWORD", "MY_SECRET", "MY_KEY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("HOME", raising=False)
    steps = ({"dump_env": "seen"}, *WORK, out(good(kind)))
    assert verdict(played(kind, *steps, environment=["MY_KEY", "NOT_SET"])) == COMPLETED
    seen = {name for name in json.loads((folder.path / "seen").read_text()) if not name.startswith("LC_")}
    told = {"SOVEREIGN_ASSIGNMENT", "SOVEREIGN_ATTEMPT", "SOVEREIGN_OUT"}
    assert seen - {"LANG", "TZ", "TMPDIR"} == {"PATH", "MY_KEY", *told}


OPEN_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or ""


@pytest.mark.skipif(os.geteuid() != 0 or not OPEN_PYTHON, reason="takes root, and a Python that everybody can run")
@each_kind
def test_a_program_of_another_user_can_read_its_task_and_hand_in(kind, monkeypatch):
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        fakes = Fakes(Path(place) / "bin", OPEN_PYTHON)
        monkeypatch.setenv("PATH", f"{fakes.folder}:/usr/bin:/bin")
        told = {"digest": ".sovereign-task.md", "into": "digest"} if kind == "cursor" else {"digest_stdin": "digest"}
        fakes.install(kind, told, {"dump_env": "seen"}, *WORK, out(good(kind)))
        (fakes.folder / f"{NAMES[kind]}.calls").touch()
        (fakes.folder / f"{NAMES[kind]}.calls").chmod(0o666)
        run = allocate(place, "run-1")
        assert verdict(perform(kind, run, run_as="nobody")) == COMPLETED
        assert (run.path / "digest").read_text() == hashlib.sha256(prompt(envelope())).hexdigest()
        assert (run.path / "digest").owner() == "nobody"


@pytest.mark.skipif(os.geteuid() != 0 or not OPEN_PYTHON, reason="takes root, and a Python that everybody can run")
def test_hazard_81_a_program_of_another_user_cannot_send_what_its_worker_writes_elsewhere(monkeypatch):
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        fakes = Fakes(Path(place) / "bin", OPEN_PYTHON)
        monkeypatch.setenv("PATH", f"{fakes.folder}:/usr/bin:/bin")
        closed = Path(place) / "closed"
        closed.mkdir(0o700)
        swap = {"replace": "provider-raw", "by_link_to": str(closed)}
        fakes.install("claude", *WORK, out(good("claude")), help=[swap, {"out_text": _help("claude")}])
        (fakes.folder / "claude.calls").touch()
        (fakes.folder / "claude.calls").chmod(0o666)
        run = allocate(place, "run-1")
        assert verdict(perform("claude", run, run_as="nobody")) == ("failed", "boundary_violated")
        assert run.raw.is_symlink()
        assert list(closed.iterdir()) == []


# what it can do


FLAGS = {
    "claude": ["-p", "--output-format", "stream-json", "--verbose", "--permission-mode", "acceptEdits"],
    "codex": ["exec", "--json", "--skip-git-repo-check", "--sandbox", "workspace-write"],
    "cursor": ["-p", "--output-format", "stream-json", "--force"],
}
LAST = {
    "claude": [],
    "codex": ["-"],
    "cursor": ["Read the file .sovereign-task.md in this folder and do what it says."],
}


@each_kind
def test_a_program_is_given_what_its_help_proves(kind, fakes, played):
    options = {"model": "large", "arguments": ["--add-dir", "/data"]}
    assert verdict(played(kind, *WORK, out(good(kind)), **options)) == COMPLETED
    assert fakes.runs(kind) == [[*FLAGS[kind], "--model", "large", "--add-dir", "/data", *LAST[kind]]]


WISHES = {"claude": "--permission-mode", "codex": "--sandbox", "cursor": "--force"}


@each_kind
def test_an_option_that_is_only_wished_for_is_left_out_where_the_help_does_not_prove_it(kind, fakes, played):
    text = _help(kind).replace(WISHES[kind], "--other")
    assert verdict(played(kind, *WORK, out(good(kind)), plan={"help": [{"out_text": text}]})) == COMPLETED
    assert WISHES[kind] not in fakes.runs(kind)[0]


@each_kind
def test_an_option_of_the_settings_stands_in_for_ours(kind, fakes, played):
    played(kind, *WORK, out(good(kind)), arguments=[f"{WISHES[kind]}=plan"])
    assert WISHES[kind] not in fakes.runs(kind)[0]
    assert f"{WISHES[kind]}=plan" in fakes.runs(kind)[0]


def _help(kind: str) -> str:
    import runpy  # noqa: PLC0415

    return str(runpy.run_path(str(FAKE))["HELPS"][NAMES[kind]])


@pytest.mark.parametrize(
    ("kind", "shown", "instead"),
    [
        ("claude", "-p, --print", "    --print"),
        ("claude", '"json", "stream-json")\n  --in', '"json")\n  --in'),
        ("claude", "--output-format", "--output"),
        ("claude", "--verbose", "--no-verbose"),
        ("claude", "--model", "--model-family"),
        ("codex", "--json", "--jsonl"),
        ("codex", "stdin", "the terminal"),
        ("codex", "--model", "--mode"),
        ("cursor", "-p, --print", "    --print"),
        ("cursor", "stream-json", "stream"),
        ("cursor", "--model", "--models"),
    ],
)
def test_hazard_20_without_a_required_option_nothing_is_started(kind, shown, instead, fakes, played):
    text = _help(kind)
    assert shown in text
    plan = {"help": [{"out_text": text.replace(shown, instead)}]}
    proposal = played(kind, *WORK, out(good(kind)), plan=plan, model="large")
    assert verdict(proposal) == ("failed", "capability_refusal")
    assert "its help does not show" in proposal.summary
    assert fakes.runs(kind) == []


def test_a_model_that_nobody_asked_for_needs_no_proof():
    proved = Capabilities("", (frozenset({"-p"}), frozenset({"--output-format", "stream-json"})))
    assert arguments(DIALECTS["cursor"], AgentSettings(kind="cursor"), proved)[1:4] == FLAGS["cursor"][:3]
    with pytest.raises(ProviderFault, match="--model"):
        arguments(DIALECTS["cursor"], AgentSettings(kind="cursor", model="large"), proved)


@pytest.mark.parametrize(
    ("kind", "steps", "version"),
    [
        ("claude", [{"out_text": "2.1.229 (Claude Code)\n"}], "2.1.229"),
        ("claude", [{"out_text": "wrapper 1.0.0\n2.1.232 (Claude Code)\n"}], "2.1.232"),
        ("claude", [{"out_text": "\x1b[1m2.1.229\x1b[0m \x1b[2m(Claude Code)\x1b[0m"}], "2.1.229"),
        ("claude", [{"err_text": "2.1.229 (Claude Code)"}], "2.1.229"),
        ("claude", [{"out_text": "2026.4.24 macos-arm64 (2026-04-27)"}], ""),
        ("claude", [{"out_text": "2.1.229 (Claude Code)"}, {"exit": 1}], "2.1.229"),
        ("claude", [], ""),
        ("claude", [out(b"\xff\0\xfe")], ""),
        ("claude", [{"signal": "SIGKILL"}], ""),
        ("codex", [{"out_text": "codex-cli 0.147.0\n"}], "0.147.0"),
        ("codex", [{"out_text": "codex 9\r\ncodex-cli 0.147.0-alpha.1\r\n"}], "0.147.0-alpha.1"),
        ("codex", [{"exit": 1}], ""),
        ("cursor", [{"out_text": "2026.4.24 macos-arm64 (2026-04-27)"}], "2026.4.24"),
        ("cursor", [{"out_text": "wrapper 1.0.0\n2025.09.18-7ae6800\n"}], "2025.09.18-7ae6800"),
        ("cursor", [{"out_text": "unknown"}], ""),
    ],
    ids=range(15),
)
def test_hazard_20_a_version_is_found_by_its_product_or_is_unknown(kind, steps, version, played):
    proposal = played(kind, *WORK, out(good(kind)), plan={"version": steps})
    assert verdict(proposal) == COMPLETED
    assert proposal.detail["version"] == version


@each_kind
def test_hazard_20_a_version_that_never_comes_is_unknown(kind, played, monkeypatch):
    monkeypatch.setattr(agent, "PROBE_SECONDS", 1.0)
    proposal = played(kind, *WORK, out(good(kind)), plan={"version": [{"ignore": "SIGTERM"}, {"sleep": 60}]})
    assert (verdict(proposal), proposal.detail["version"]) == (COMPLETED, "")


HELPLESS: dict[str, list[Step]] = {
    "limit was 1 seconds": [{"sleep": 60}],
    "its help does not show": [{"exit": 0}],
    "ended from outside": [{"signal": "SIGKILL"}],
    "exit code 7. no licence": [{"err_text": "no licence"}, {"exit": 7}],
}


@each_kind
@pytest.mark.parametrize("cause", HELPLESS)
def test_hazard_20_a_help_that_does_not_come_proves_nothing_and_is_told_why(cause, kind, fakes, played, monkeypatch):
    monkeypatch.setattr(agent, "PROBE_SECONDS", 1.0)
    started = time.monotonic()
    proposal = played(kind, *WORK, out(good(kind)), plan={"help": HELPLESS[cause]})
    assert verdict(proposal) == ("failed", "capability_refusal")
    assert cause in proposal.summary
    assert time.monotonic() - started < 5
    assert fakes.runs(kind) == []


def test_hazard_20_a_help_that_ends_badly_proves_nothing(played):
    plan = {"help": [{"out_text": _help("claude")}, {"exit": 1}]}
    assert verdict(played("claude", *WORK, out(good("claude")), plan=plan)) == ("failed", "capability_refusal")


@each_kind
def test_a_program_is_asked_once_for_each_build_of_it(kind, fakes, tmp_path):
    program = fakes.install(kind, *WORK, out(good(kind)))
    for number, (asked, change) in enumerate([(2, False), (2, False), (4, True), (4, False)]):
        if change:
            os.utime(program, ns=(1, 1))
        assert verdict(perform(kind, allocate(tmp_path, f"run-{number}"))) == COMPLETED
        assert len(fakes.calls(kind)) - len(fakes.runs(kind)) == asked
    assert (tmp_path / ".sovereign" / "probes.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"x": 1}', b'{"x": {"version": 1}}', b"\xff", b"[" * 100_000], ids=range(7)
)
def test_a_cache_that_is_not_as_we_left_it_is_made_again(content, fakes, tmp_path):
    fakes.install("claude", *WORK, out(good("claude")))
    cache = allocate(tmp_path, "run-0").path.parents[1] / "probes.json"
    cache.write_bytes(content)
    for number in (1, 2):
        assert verdict(perform("claude", allocate(tmp_path, f"run-{number}"))) == COMPLETED
    assert len(fakes.calls("claude")) == 2 + 2


@pytest.mark.parametrize("plant", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=range(3))
def test_hazard_83_a_cache_that_is_no_plain_file_holds_nobody_up(plant, fakes, tmp_path):
    fakes.install("claude", *WORK, out(good("claude")))
    plant(allocate(tmp_path, "run-0").path.parents[1] / "probes.json")
    ended: list[Proposal] = []
    run = allocate(tmp_path, "run-1")
    thread = threading.Thread(target=lambda: ended.append(perform("claude", run)), daemon=True)
    thread.start()
    thread.join(20)
    assert [verdict(each) for each in ended] == [COMPLETED]


def test_what_was_asked_is_kept_for_the_program_that_was_asked(fakes, tmp_path, monkeypatch):
    fakes.install("claude", *WORK, out(good("claude")))
    (tmp_path / "claude").write_text("#!/bin/sh\n")  # found from the worker's folder, not from the run's
    (tmp_path / "claude").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    assert verdict(perform("claude", allocate(tmp_path, "run-1"))) == COMPLETED
    fakes.install("claude", *WORK, out(good("claude")), help=[{"out_text": "Usage: claude, without options"}])
    os.utime(fakes.folder / "claude", ns=(1, 1))
    assert verdict(perform("claude", allocate(tmp_path, "run-2"))) == ("failed", "capability_refusal")


def test_a_cache_that_cannot_be_written_costs_only_the_asking(fakes, tmp_path):
    fakes.install("claude", *WORK, out(good("claude")))
    (allocate(tmp_path, "run-0").path.parents[1] / "probes.json").mkdir()
    assert verdict(perform("claude", allocate(tmp_path, "run-1"))) == COMPLETED


def test_what_a_program_proved_is_not_believed_of_another(fakes, tmp_path):
    fakes.install("claude", *WORK, out(good("claude")))
    assert verdict(perform("claude", allocate(tmp_path, "run-1"))) == COMPLETED
    fakes.install("claude", *WORK, out(good("claude")), help=[{"out_text": "Usage: claude, without options"}])
    os.utime(fakes.folder / "claude", ns=(1, 1))
    assert verdict(perform("claude", allocate(tmp_path, "run-2"))) == ("failed", "capability_refusal")


@pytest.mark.usefixtures("fakes")
@each_kind
def test_hazard_19_an_absent_program_is_named(kind, folder):
    proposal = perform(kind, folder)
    assert verdict(proposal) == ("failed", "provider_unavailable")
    assert repr(NAMES[kind]) in proposal.summary
    assert "on the PATH" in proposal.summary


@each_kind
def test_hazard_19_a_program_that_vanishes_after_it_was_asked_is_named(kind, played):
    plan = {"version": [{"remove_itself": True}]}
    proposal = played(kind, *WORK, out(good(kind)), plan=plan)
    assert verdict(proposal) == ("failed", "provider_unavailable")
    assert NAMES[kind] in proposal.summary


@each_kind
def test_a_program_may_be_named_by_its_path(kind, fakes, folder, monkeypatch):
    program = fakes.install(kind, *WORK, out(good(kind)))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert verdict(perform(kind, folder, program=str(program))) == COMPLETED


@each_kind
def test_hazard_12_a_child_that_left_the_group_does_not_outlive_the_run(kind, played, folder):
    assert verdict(played(kind, {"linger": 50}, *WORK, out(good(kind)))) == COMPLETED
    eventually(lambda: gone(int((folder.path / "child.pid").read_text())), within=10)


# the settings


AGENT = """
[providers.agent]
kind = "codex"
model = "large"
arguments = ["--profile", "shop"]
idle_seconds = 60
"""


def test_an_agent_is_configured_with_its_options(tmp_path):
    (tmp_path / "sovereign.toml").write_text(default_text() + AGENT)
    settings = load(tmp_path).providers["agent"]
    assert isinstance(settings, AgentSettings)
    assert (settings.executable, settings.model, settings.arguments) == ("codex", "large", ("--profile", "shop"))
    assert (settings.timeout_seconds, settings.idle_seconds, settings.quiet_seconds) == (3600, 60, 300)


@pytest.mark.parametrize(
    ("right", "wrong", "key"),
    [
        ("idle_seconds = 60", "idle_seconds = 0", "idle_seconds"),
        ("idle_seconds = 60", "idle_seconds = -1", "idle_seconds"),
        ("idle_seconds = 60", "idle_seconds = nan", "idle_seconds"),
        ("idle_seconds = 60", 'run_as = "no one"', "run_as"),
        ("idle_seconds = 60", 'run_as = "0"', "run_as"),
        ('model = "large"', 'model = ""', "model"),
        ('model = "large"', "model = 5", "model"),
        ('model = "large"', 'modle = "large"', "modle"),
        ('model = "large"', 'model = "a\\u0000b"', "model"),
        ('"--profile"', "7", "arguments.0"),
    ],
    ids=range(10),
)
def test_an_agent_that_cannot_be_meant_is_refused_with_its_line(right, wrong, key, tmp_path):
    text = default_text() + AGENT.replace(right, wrong)
    (tmp_path / "sovereign.toml").write_text(text)
    with pytest.raises(ConfigurationFault) as refused:
        load(tmp_path)
    assert f"providers.agent.{key}" in str(refused.value)
    line = max(n for n, each in enumerate(text.split("\n"), 1) if wrong in each)
    assert f"line {line}" in refused.value.inspect
    assert refused.value.next_command


@pytest.mark.parametrize("kind", ["model", "Claude", "openai"])
def test_a_kind_that_is_not_known_is_answered_with_those_that_are(kind, tmp_path):
    (tmp_path / "sovereign.toml").write_text(default_text() + AGENT.replace("codex", kind))
    with pytest.raises(ConfigurationFault, match="no such kind of provider") as refused:
        load(tmp_path)
    for known in (*KINDS, "command", "scripted"):
        assert known in refused.value.next_command


@each_kind
def test_the_doctor_looks_for_an_agent_s_program(kind, fakes, tmp_path):
    Organization.init(tmp_path / "org").close()
    toml = tmp_path / "org" / "sovereign.toml"
    toml.write_text(toml.read_text() + AGENT.replace("codex", kind))
    found = {f.found: f.verdict for f in check_up(tmp_path / "org") if f.found.startswith("agent:")}
    assert found == {f"agent: no program {NAMES[kind]} can be run": "warn"}
    program = fakes.install(kind)
    found = {f.found: f.verdict for f in check_up(tmp_path / "org") if f.found.startswith("agent:")}
    assert found == {f"agent: {program}": "ok"}


# the document


def test_the_document_shows_each_category_with_its_trigger_in_the_order_of_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    table = [row for row in rows if row[0] in PRECEDENCE]
    assert [category for category, _ in table] == list(PRECEDENCE)
    assert all(len(trigger) > 10 for _, trigger in table)
