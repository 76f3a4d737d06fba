"""The command line: what is printed where, what it ends with, and what it leaves alone.

Where the promise is a process's (exit codes, signals, pipes, locales, what stays on disk) a real one is started; all
else goes through `main`, which is the same without the start.
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import typer.main
from conftest import Location
from support import eventually, shown_on

import sovereign_agent
from sovereign_agent import assistant_work, cli, effects, fencing, journal, outcomes, relay, workspace
from sovereign_agent.clock import ManualClock
from sovereign_agent.commands import checkup, crash, demo_restore, views
from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.database import LEDGER_NAME, Database
from sovereign_agent.errors import (
    AlreadyHeld,
    AuthorityLost,
    ConfigurationFault,
    ConstraintBroken,
    Contention,
    LedgerUnavailable,
    PolicyRefusal,
    ProviderFault,
    Refusal,
    SchemaMismatch,
)
from sovereign_agent.liveness import this_process
from sovereign_agent.organization import Organization
from sovereign_agent.records import AssignmentState, Claim, ReceiptStatus

COMMAND = [sys.executable, "-m", "sovereign_agent"]
WITHIN_SECONDS = 30
REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
READERS = (["status"], ["inspect", "out_"], ["inbox", "operator-course"], ["actor", "list"], ["heartbeat", "--status"])

OK = [{"report": {"status": "completed", "summary": "Done."}}]
HANDS_OVER = [
    {"write": "till.txt", "text": "412.50"},
    {"report": {"status": "completed", "summary": "Counted.", "deliverables": ["till.txt"]}},
]
BLOCKED = [{"report": {"status": "blocked", "summary": "Stuck.", "question": "Which till?"}}]
FAILS = [{"exit": 3}]
SLEEPS = [{"touch": "asleep"}, {"sleep": 60}]
TAKES_A_MOMENT = [{"sleep": 0.8}, *OK]


@dataclass(frozen=True)
class Ended:
    """How a verb ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout: anything beside it fails here."""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The one JSON document on stderr, where nothing is on stdout."""
        assert self.out == ""
        return json.loads(self.err)["error"]


Call = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _no_outer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOVEREIGN_ROOT", "SOVEREIGN_DEBUG", "FORCE_COLOR", "NO_COLOR", "GITHUB_ACTIONS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a verb in this process."""

    def run(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return Ended(code, *capsys.readouterr())

    return run


def spawned(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start a verb as a process."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **(given | options))


def ended(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=WITHIN_SECONDS)
    finally:
        process.kill()
    return Ended(process.returncode, out or "", err or "")


def ledger_option(location: Location) -> list[str]:
    return ["--ledger", location.ledger] if location.engine == "postgresql" else []


@pytest.fixture
def root(location: Location) -> Path:
    """An organization, on each engine."""
    url = location.ledger if location.engine == "postgresql" else ""
    Organization.init(location.root, ledger_url=url).close()
    return location.root


@pytest.fixture
def local_root(tmp_path: Path) -> Path:
    """An organization with a ledger in a file."""
    Organization.init(tmp_path / "org").close()
    return tmp_path / "org"


@pytest.fixture
def org(root: Path) -> Iterator[Organization]:
    """The same organization, as this test sees it."""
    opened = Organization(root)
    yield opened
    opened.close()


def let_operator_do(root: Path, steps: list[dict[str, Any]]) -> None:
    """Give the operator's scripted provider other steps."""
    path = root / FILE_NAME
    document: Any = tomlkit.parse(path.read_text())
    document["providers"]["scripted"]["steps"] = steps
    path.write_text(tomlkit.dumps(document))


def park_after(root: Path, losses: int) -> None:
    """Let work be parked after so many lost workers."""
    path = root / FILE_NAME
    document: Any = tomlkit.parse(path.read_text())
    document["authority"]["losses_before_parking"] = losses
    path.write_text(tomlkit.dumps(document))


def planned(org: Organization, title: str = "Close the shop") -> tuple[str, str]:
    """An active outcome and a ready statement of work."""
    outcome = org.create_outcome(title, "The till is counted.", [], "principal-human").id
    org.activate(outcome, "principal-human")
    return outcome, org.ready_sow(org.create_sow(outcome, "Count the till", "operator", "master-course").id).id


def assigned(org: Organization) -> str:
    """An assignment that nobody runs yet."""
    return org.assign(planned(org)[1], "operator-course", "master-course").id


def abandoned(root: Path) -> str:
    """A RUNNING assignment whose worker died long ago."""
    with closing(Organization(root, clock=ManualClock(LONG_AGO))) as org:
        assignment, me = assigned(org), org.process_identity
        lease = fencing.acquire_actor_lease(org.db, "operator-course", me)
        fencing.acquire_execution_attempt(org.db, assignment, "operator-course", me, lease.fencing_token)
    return assignment


def running(org: Organization, process: dict[str, Any]) -> str:
    """A RUNNING assignment, held by the process described."""
    assignment, me = assigned(org), org.process_identity
    lease = fencing.acquire_or_renew_actor_lease(org.db, "operator-course", me)
    fencing.acquire_execution_attempt(
        org.db,
        assignment,
        "operator-course",
        me,
        lease.fencing_token,
        ttl=org.settings.authority.attempt_ttl,
        host=process["host"],
        process=process,
    )
    return assignment


def gone() -> dict[str, Any]:
    """What a process said of itself that has ended since."""
    told = "import json; from sovereign_agent.liveness import this_process as me; print(json.dumps(me()))"
    return json.loads(subprocess.run([sys.executable, "-c", told], capture_output=True, check=True).stdout)


def everything_below(folder: Path) -> dict[str, str]:
    """Each path and, for a file, the hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


# --- help, and what it costs ------------------------------------------------------------------------------


def verbs(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb with its command, groups left out."""
    for name, command in (group or typer.main.get_command(cli.application())).commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path}{name} ")
        else:
            yield path + name, command


VERBS = dict(verbs())


def test_the_verbs_are_those_that_were_promised():
    top = "init doctor status inspect inbox send run cancel plan assign verify review accept heartbeat supervisor"
    top += " pause resume backup restore simulate torture"
    inner = [
        "actor list",
        "actor rebind",
        "actor free",
        "authority show",
        "authority new-epoch",
        "authority adopt",
        "outcome new",
        "outcome activate",
        "ruling decide",
        "assistant enqueue",
        "assistant claim",
        "assistant status",
        "assistant cancel",
        "assistant delegate",
        "assistant transcript",
        "assistant evidence",
        "assistant serve",
        "assistant ask",
        "assistant effects",
        "assistant reconcile",
        "demo store",
        "demo crash",
        "demo restore",
        "demo assistant",
    ]
    assert sorted(VERBS) == sorted([*top.split(), *inner])


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_and_option_has_help_and_stands_in_the_reference(verb, call):
    page = REFERENCE.read_text()
    command = VERBS[verb]
    assert command.help
    arguments = [parameter.metavar for parameter in command.params if parameter.param_type_name == "argument"]
    assert f"### `{' '.join([verb, *arguments])}`" in page
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
        assert all(f"`{option} " in page or f"`{option}`" in page for option in parameter.opts if option[0] == "-")
    shown = call(*verb.split(), "--help")
    assert (shown.code, shown.err) == (0, "")
    assert verb in shown.out


def test_every_verb_takes_root_and_json():
    for verb, command in VERBS.items():
        assert {"--root", "--json"} <= {option for parameter in command.params for option in parameter.opts}, verb


def test_the_supervisor_is_told_apart_from_hosting(call):
    told = " ".join(call("supervisor", "--help").out.split())
    assert "This is the supervisor loop itself" in told
    assert "hosting a service, and that is the operating system's" in told
    assert "An actor's id is a name, not a credential" in " ".join(call().out.split())


def test_help_fits_eighty_columns_and_is_bare_in_a_pipe():
    shown = ended(spawned("supervisor", "--help", env=os.environ | {"NO_COLOR": "1"}))
    assert (shown.code, shown.err) == (0, "")
    assert "\x1b" not in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


# --- exit codes -------------------------------------------------------------------------------------------

ENDS = [
    (Refusal("no"), 1),
    (AuthorityLost("no"), 1),
    (AlreadyHeld("no"), 1),
    (PolicyRefusal("no"), 1),
    (cli.Misuse("no"), 2),
    (ConfigurationFault("no"), 2),
    (Contention("no"), 3),
    (LedgerUnavailable("no"), 4),
    (SchemaMismatch("no"), 4),
    (ConstraintBroken("no"), 4),
    (OSError("no"), 4),
    (ProviderFault("no"), 5),
    (ZeroDivisionError("no"), 70),
    (KeyboardInterrupt(), 130),
]


@pytest.mark.parametrize(("error", "code"), ENDS, ids=[type(error).__name__ for error, _ in ENDS])
def test_each_end_of_a_verb_has_one_exit_code_and_no_traceback(error, code, call, monkeypatch):
    def raises(_given: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_invoke", raises)
    told = call("status")
    assert (told.code, told.out) == (code, "")
    assert "Traceback" not in told.err
    assert call("status", "--json").error["exit_code"] == code


def test_a_bug_is_one_line_that_says_where_and_a_traceback_only_for_who_asks(call, monkeypatch, root):
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("by zero\x1b[31m")

    monkeypatch.setattr(Organization, "inbox", breaks)
    told = call("inbox", "operator-course", "--root", root)
    assert (told.code, told.out) == (70, "")
    assert re.fullmatch(
        r"This is a bug of sovereign-agent, in sovereign_agent\.commands\.mail, line \d+: .*\n", told.err
    )
    assert "ZeroDivisionError: by zero\\x1b[31m" in told.err
    monkeypatch.setenv("SOVEREIGN_DEBUG", "1")
    assert "Traceback" in call("inbox", "operator-course", "--root", root).err


def test_a_refusal_answers_four_questions(call, root, org):
    outcome = org.create_outcome("Close", "Closed.", [], "principal-human").id
    told = call("plan", outcome, "--scope", "Count", "--by", "master-course", "--root", root)
    assert (told.code, told.out) == (1, "")
    assert told.err.splitlines() == [
        f"Outcome {outcome} takes no work now.",
        "  why    It is DRAFT.",
        f"  look   sovereign-agent inspect {outcome} --root {root}",
        f"  next   sovereign-agent outcome activate {outcome} --by ACTOR --root {root}",
    ]
    assert outcomes.sows_of(org.db.connection, outcome) == []
    org.activate(outcome, "principal-human")
    assert call("plan", outcome, "--scope", "Count", "--by", "master-course", "--root", root).code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["frobnicate"], "No such command 'frobnicate'."),
        (["run"], "Missing argument 'ASSIGNMENT'."),
        (["status", "--jsn"], "No such option: --jsn"),
        (["accept", "out_1"], "Missing option '--by'."),
        (["heartbeat", "--stale-after", "soon"], "Invalid value for '--stale-after'"),
        (["outcome"], "Missing command."),
    ],
)
def test_what_cannot_be_understood_ends_with_two_and_says_where_help_is(arguments, sentence, call):
    told = call(*arguments)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(sentence)
    assert re.search(r"^  next   sovereign-agent .*--help$", told.err, re.MULTILINE)
    if arguments != ["status", "--jsn"]:
        assert call(*arguments, "--json").error["category"] == "usage"


def test_json_behind_a_double_dash_is_text(call, local_root):
    sent = call("send", "principal-human", "nobody", "s", "--root", local_root, "--", "--json")
    assert sent.code == 2
    assert sent.err.startswith("No actor 'nobody' is declared.")


# --- backup, restore, authority ---------------------------------------------------------------------------


def test_an_operator_backs_up_restores_looks_and_resumes(call, local_root, tmp_path):
    by = ("--by", "operator-course", "--reason", "a bad day", "--root", local_root)
    backup = tmp_path / "backup.db"
    assert call("backup", backup, "--root", local_root, "--json").document["path"] == str(backup)
    assert call("backup", backup, "--root", local_root).code == 1
    restored = call("restore", backup, *by, "--json").document
    shown = call("authority", "show", "--root", local_root, "--json").document
    assert (shown["agrees"], shown["health"]["paused"]) == (True, True)
    assert shown["health"]["epoch"] == shown["health"]["marker"] == restored["epoch"]
    assert call("status", "--root", local_root, "--json").document["paused"] is True
    told = call("status", "--root", local_root).out.splitlines()
    assert told[0] == "The ledger is paused: nothing new begins."
    assert [line.split()[0] for line in told[1:5]] == ["by", "since", "why", "next"]
    assert (told[3], told[4].split()[2]) == ("  why    restored: a bad day", "resume")
    assert finding(call, local_root)["verdict"] == "warn"
    assert call("resume", *by).code == 0
    assert finding(call, local_root)["verdict"] == "ok"
    assert "paused" not in call("status", "--root", local_root).out
    for words in ([], ["--resume", "--rollback"], [backup, "--resume"]):
        refused = call("restore", *words, *by, "--json")
        assert (refused.code, refused.error["category"]) == (2, "usage")
    assert call("restore", "--resume", *by, "--json").error["category"] == "restore_none"
    assert call("pause", "--by", "nobody", "--reason", "r", "--root", local_root).code == 2


def test_doctor_names_the_command_that_mends_a_lost_marker_and_it_does(call, local_root):
    (local_root / LEDGER_NAME).with_suffix(".authority").unlink()
    found = finding(call, local_root)
    assert (found["verdict"], "marker_missing" in found["found"]) == ("fail", True)
    assert found["mend"] == "sovereign-agent authority new-epoch --by ACTOR --reason TEXT"
    refused = call("send", "principal-human", "operator-course", "s", "b", "--root", local_root, "--json")
    assert (refused.code, refused.error["category"]) == (4, "marker_missing")
    assert call("authority", "adopt", "--yes", "--root", local_root, "--json").error["category"] == "adopt_needs_hosts"
    by = ("--by", "operator-course", "--reason", "lost", "--root", local_root)
    assert call("authority", "new-epoch", *by).code == 0
    assert finding(call, local_root)["verdict"] == "warn"
    assert call("resume", *by).code == 0


def test_a_folder_in_the_markers_place_is_told_with_what_to_type(call, local_root):
    marker = (local_root / LEDGER_NAME).with_suffix(".authority")
    marker.unlink()
    marker.mkdir()
    by = ("--by", "operator-course", "--reason", "lost", "--root", local_root)
    told = call("authority", "new-epoch", *by)
    assert (told.code, "Traceback" in told.err) == (4, False)
    assert f"next   move {marker} away, then repeat the command" in told.err
    marker.rmdir()
    assert call("authority", "new-epoch", *by).code == 0


def test_a_control_row_that_is_gone_is_told_with_what_to_type(call, local_root):
    with closing(Database(local_root / LEDGER_NAME)) as db:
        db.connection.execute("DELETE FROM assistant_control")
    for words in (["authority", "show"], ["send", "principal-human", "operator-course", "s", "b"]):
        told = call(*words, "--root", local_root, "--json")
        assert (told.code, told.error["category"]) == (4, "control_missing")
        assert told.error["next_command"].startswith("sovereign-agent authority new-epoch")
    assert call("status", "--root", local_root).code == 0  # it only reads
    assert call("doctor", "--root", local_root).code == 4
    by = ("--by", "operator-course", "--reason", "the row is gone", "--root", local_root)
    assert call("authority", "new-epoch", *by).code == 0
    assert call("resume", *by).code == 0


def test_open_assistant_work_shows_in_status_and_beside_the_epoch(call, local_root):
    assert "assistant" not in call("status", "--root", local_root).out
    for session in ("lucy", "bob"):
        assert call("assistant", "enqueue", session, "hello", "--root", local_root).code == 0
    with closing(Organization(local_root)) as org:
        assert assistant_work.claim(org.db, "worker-1")
    counts = {"running": 1, "ready": 1, "delayed": 0, "parked": 0}
    assert call("status", "--root", local_root, "--json").document["assistant"] == counts
    assert "assistant work: 1 running, 1 ready, 0 delayed, 0 parked" in call("status", "--root", local_root).out
    assert call("authority", "show", "--root", local_root, "--json").document["health"]["work"] == counts
    assert "1 running, 1 ready, 0 delayed, 0 parked" in call("authority", "show", "--root", local_root).out


def test_a_paused_ledger_says_who_paused_it_since_when_and_why(root, call):
    by = ("--by", "operator-course", "--root", root)

    def seen() -> list[str]:
        shown = call("authority", "show", "--root", root, "--json").document["paused_by"]
        assert call("status", "--root", root, "--json").document["paused_by"] == shown
        if shown is None:
            return []
        since = f"{datetime.fromisoformat(shown['at']):%F %T} UTC"
        for verb in (["status"], ["authority", "show"]):
            told = call(*verb, "--root", root).out
            assert re.search(rf"by +{shown['actor']}\n  since +{since}\n  why +(.*)\n", told), told
        assert f"by {shown['actor']}; since {since}; why " in finding(call, root)["found"]
        return [shown["actor"], *re.findall(r"why +(.*)\n", told)]

    assert seen() == []
    assert call("pause", "--reason", "stocktaking", *by).code == 0
    assert seen() == ["operator-course", "paused: stocktaking"]
    assert call("resume", "--reason", "counted", *by).code == 0
    assert seen() == []
    assert call("authority", "new-epoch", "--reason", "a bad disk", *by).code == 0
    assert seen() == ["operator-course", "new epoch: a bad disk"]


def test_a_new_epoch_tells_only_the_hosts_that_there_can_be_what_to_type(root, location, call):
    told = call("authority", "new-epoch", "--by", "operator-course", "--reason", "r", "--root", root).out
    assert ("sovereign-agent authority adopt" in told) == (location.engine == "postgresql")
    assert call("authority", "adopt", "--yes", "--root", root).code == int(location.engine == "sqlite")


def test_init_where_this_host_has_no_marker_says_what_to_type_and_that_works(root, location, call):
    (root / LEDGER_NAME).with_suffix(".authority").unlink()
    told = call("init", "--root", root, "--json")
    assert (told.code, told.error["category"]) == (4, "marker_missing")
    adopt = "sovereign-agent authority adopt"
    assert told.error["next_command"].startswith(adopt) == (location.engine == "postgresql")
    mend = ["adopt", "--yes"] if location.engine == "postgresql" else ["new-epoch", "--by", "operator-course"]
    assert call("authority", *mend, *["--reason", "r"] * ("--by" in mend), "--root", root).code == 0
    assert call("init", "--root", root, "--json").document["changed"] is False


def test_doctor_says_of_a_file_alone_that_its_disk_may_go_back(root, location, call):
    assert ("a rollback of the whole disk" in finding(call, root)["found"]) == (location.engine == "sqlite")


def test_doctor_says_once_what_a_marker_beside_its_ledger_cannot_see(call, local_root, tmp_path):
    assert "a rollback of the whole disk cannot be seen" in finding(call, local_root)["found"]
    outside = tmp_path / "outside" / "shop.authority"
    outside.parent.mkdir()
    (local_root / LEDGER_NAME).with_suffix(".authority").rename(outside)
    settings = local_root / "sovereign.toml"
    settings.write_text(settings.read_text().replace("[authority]\n", f'[authority]\nmarker = "{outside}"\n', 1))
    assert "rollback" not in finding(call, local_root)["found"]
    assert call("send", "principal-human", "operator-course", "s", "b", "--root", local_root).code == 0
    (outside.with_suffix(".seen")).write_text(f"{outside.read_text().strip()} 999999\n")
    found = finding(call, local_root)
    assert (found["verdict"], "ledger_rolled_back" in found["found"]) == ("fail", True)
    assert found["mend"] == "sovereign-agent authority new-epoch --by ACTOR --reason TEXT"
    settings.write_text(settings.read_text().replace(str(outside), "shop.authority"))
    assert call("status", "--root", local_root).code == 2


def finding(call, root):
    found = call("doctor", "--root", root, "--json").document["findings"]
    return next(one for one in found if one["subject"] == "authority")


# --- where the organization is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb",
    sorted(
        verb for verb in VERBS if verb not in {"init", "doctor", "simulate", "torture"} and not verb.startswith("demo ")
    ),
)
def test_a_mistyped_root_creates_nothing_and_is_refused_with_the_reason(verb, call, tmp_path):
    typed = tmp_path / "mistyped" / "org"
    values = {"--scope": "s", "--desired": "d", "--decision": "d", "--by": "a", "--owner": "a", "--reason": "r"}
    values |= {"--claim": "c", "--for": "1", "--budget": "1", "--outcome": "done"}
    command = VERBS[verb]
    needed = ["x" for parameter in command.params if parameter.param_type_name == "argument"]
    for parameter in command.params:
        if parameter.required and parameter.opts[0] in values:
            needed += [parameter.opts[0], values[parameter.opts[0]]]
    told = call(*verb.split(), *needed, "--root", typed)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("sovereign.toml cannot be used: there is no such file.")
    assert str(typed) in told.err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_ledger_is_not_made_by_looking(call, local_root):
    (local_root / LEDGER_NAME).unlink()
    before = everything_below(local_root)
    assert [call(*reader, "--root", local_root).code for reader in READERS] == [4] * len(READERS)
    assert everything_below(local_root) == before


def test_the_root_after_the_verb_wins_over_the_one_before_it_and_that_over_the_environment(call, tmp_path, monkeypatch):
    for name in ("after", "before", "environment", "here"):
        Organization.init(tmp_path / name).close()
        toml = tmp_path / name / FILE_NAME
        toml.write_text(toml.read_text().replace("My organization", name))
    monkeypatch.chdir(tmp_path / "here")

    def found(*arguments: str | Path) -> str:
        return call(*arguments, "--json").document["organization"]

    assert found("status") == "here"
    monkeypatch.setenv("SOVEREIGN_ROOT", str(tmp_path / "environment"))
    assert found("status") == "environment"
    assert found("--root", tmp_path / "before", "status") == "before"
    assert found("--root", tmp_path / "before", "status", "--root", tmp_path / "after") == "after"
    assert found("status", "--root", ".") == "here"


@pytest.mark.parametrize("reader", [*READERS, ["doctor"]], ids=" ".join)
def test_reading_leaves_no_file_behind(reader, local_root):
    with closing(Organization(local_root)) as org:
        planned(org)
    before = everything_below(local_root)
    told = ended(spawned(*reader, "--root", local_root))
    assert (told.code, told.err) == (0, "")
    assert everything_below(local_root) == before


@pytest.mark.parametrize(("verb", "read_only"), [*((reader, True) for reader in READERS), (["heartbeat"], False)])
def test_whoever_only_reads_opens_for_reading_only(verb, read_only, local_root, call, monkeypatch):
    opened = []
    original = Organization.__init__

    def noting(self: Organization, root: Path, **options: Any) -> None:
        opened.append(options.get("read_only", False))
        original(self, root, **options)

    with closing(Organization(local_root)) as org:
        planned(org)
    monkeypatch.setattr(Organization, "__init__", noting)
    assert call(*verb, "--root", local_root).code == 0
    assert opened == [read_only]


def test_reading_beside_a_writer_sees_what_was_committed_and_leaves_its_files(local_root):
    with closing(Organization(local_root)) as org:
        outcome, _ = planned(org)
        before = everything_below(local_root)
        assert outcome in ended(spawned("status", "--root", local_root)).out
        assert {*everything_below(local_root)} == {*before}
        assert org.create_outcome("Another", "It can still write.", [], "principal-human")


# --- init -------------------------------------------------------------------------------------------------


def test_init_makes_an_organization_and_a_second_one_changes_nothing_and_says_so(location, call):
    first = call("init", "--root", location.root, *ledger_option(location))
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith(f"An organization is ready at {location.root}.")
    assert call("status", "--root", location.root).out == "My organization has no open outcome.\n"
    before = everything_below(location.root)
    second = ended(spawned("init", "--root", location.root, *ledger_option(location)))
    assert (second.code, second.err) == (0, "")
    assert second.out.startswith(f"Nothing was changed: there is an organization at {location.root}.")
    assert everything_below(location.root) == before
    assert call("init", "--root", location.root, "--json").document == {
        "root": str(location.root),
        "changed": False,
        "engine": location.engine,
        "ledger": location.ledger,
    }


def test_init_does_not_move_an_organization_to_another_ledger(local_root, call):
    before = everything_below(local_root)
    told = call("init", "--root", local_root, "--ledger", "postgresql://elsewhere/ledger", "--json")
    assert (told.code, told.error["category"]) == (1, "ledger_differs")
    assert everything_below(local_root) == before


def test_init_refuses_a_password_and_makes_no_settings(tmp_path, call):
    told = call("init", "--root", tmp_path / "org", "--ledger", "postgresql://user:secret@host/db")
    assert told.code == 2
    assert "secret" not in told.err
    assert not (tmp_path / "org" / FILE_NAME).exists()


def test_init_completes_what_was_begun(local_root, call):
    (local_root / LEDGER_NAME).unlink()
    lost = call("init", "--root", local_root, "--json")  # its marker is there, so it was not only begun
    assert (lost.code, lost.error["category"]) == (4, "marker_without_ledger")
    (local_root / LEDGER_NAME).with_suffix(".authority").unlink()
    assert call("init", "--root", local_root, "--json").document["changed"] is True
    assert call("status", "--root", local_root).code == 0


def test_of_eight_inits_at_once_all_are_done(make_location, call):
    location = make_location(migrated=False)
    starting = [spawned("init", "--root", location.root, *ledger_option(location)) for _ in range(8)]
    told = [ended(process) for process in starting]
    assert [(one.code, one.err) for one in told] == [(0, "")] * 8
    checked = call("doctor", "--root", location.root, "--json")
    assert (checked.code, checked.document["usable"]) == (0, True)


# --- the life of work -------------------------------------------------------------------------------------


def test_work_goes_from_wish_to_acceptance_and_each_answer_is_one_document(root, call):
    def done(*arguments: str) -> Any:
        told = call(*arguments, "--root", root, "--json")
        assert (told.code, told.err) == (0, "")
        return told.document

    wish = ["--desired", "The till is counted.", "--owner", "principal-human", "--subject", "till 1"]
    outcome = done("outcome", "new", "Close the shop", *wish)
    assert (outcome["state"], outcome["subject"]) == ("DRAFT", "till 1")
    assert done("outcome", "activate", outcome["id"], "--by", "principal-human")["state"] == "ACTIVE"
    sow = done("plan", outcome["id"], "--scope", "Count the till", "--by", "master-course")
    assert (sow["state"], sow["role"]) == ("READY", "operator")
    assignment = done("assign", sow["id"], "operator-course", "--by", "master-course", "--workspace", "persistent")
    assert (assignment["state"], assignment["workspace_policy"]) == ("CREATED", "persistent")
    receipt = done("run", assignment["id"])
    assert (receipt["status"], receipt["assignment_id"]) == ("completed", assignment["id"])
    assert done("verify", sow["id"], "--by", "verifier-course")["passed"] is True
    assert done("review", sow["id"], "--by", "sparring-course", "--note", "fine")["state"] == "APPROVED"
    assert done("verify", outcome["id"], "--by", "verifier-course")["passed"] is True
    shown = done("status")["outcomes"][0]
    assert (shown["outcome"]["state"], shown["sows"][0]["assignments"][0]["state"]) == ("READY", "COMPLETED")
    assert done("accept", outcome["id"], "--by", "principal-human")["state"] == "ACCEPTED"
    assert done("status")["outcomes"] == []
    told = done("inspect", sow["id"])
    assert [review["note"] for review in told["reviews"]] == ["fine"]
    assert [attempt["id"] for attempt in told["attempts"]] == [receipt["attempt_id"]]


def test_each_answer_says_what_to_type_next_and_that_works(root, call):
    """Follow the `next` line of each answer, with its words in capitals filled in, from the wish to the acceptance."""
    who = {"plan": "master-course", "verify": "verifier-course", "review": "sparring-course"}
    told = call("outcome", "new", "Close", "--desired", "Closed.", "--owner", "principal-human", "--root", root)
    typed = ["outcome new"]
    while following := re.search(r"^  next +sovereign-agent (.+)$", told.out, re.MULTILINE):
        line = following[1].replace("TEXT", "text").replace(" ACTOR --by", " operator-course --by")
        verb = line.split()[0]
        told = call(*line.replace("--by ACTOR", f"--by {who.get(verb, 'principal-human')}").split(), "--root", root)
        assert told.code == 0, told
        typed.append(verb)
    assert typed == ["outcome new", "outcome", "plan", "assign", "run", "verify", "review", "accept"]
    assert re.fullmatch(r"Outcome out_\w+ is ACCEPTED\.\n", told.out)


@pytest.mark.parametrize(
    ("steps", "told"), [(FAILS, "is failed (nonzero_exit)."), (BLOCKED, "is blocked.")], ids=["failed", "blocked"]
)
def test_a_run_that_does_not_complete_ends_with_one_and_says_so(steps, told, root, call):
    let_operator_do(root, steps)
    with closing(Organization(root)) as org:
        assignment = assigned(org)
    ran = call("run", assignment, "--root", root)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith(f"Assignment {assignment} {told}")
    assert ("asks    Which till?" in ran.out) == (steps is BLOCKED)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (FAILS, ["failed (nonzero_exit)", "next   sovereign-agent assign SOW ACTOR --by ACTOR --root ROOT"]),
        (
            BLOCKED,
            [
                "blocked",
                "asks   Which till?",
                "next   sovereign-agent ruling decide SOW --decision TEXT --by ACTOR --root ROOT",
            ],
        ),
        (OK, []),
    ],
    ids=["failed", "blocked", "completed"],
)
def test_status_tells_why_work_is_stuck_and_what_it_asks_for(steps, told, root, org, call):
    let_operator_do(root, steps)
    _, sow = planned(org)
    assignment = org.assign(sow, "operator-course", "master-course").id
    call("run", assignment, "--root", root)
    shown = call("status", "--root", root).out.partition(f"{assignment}  operator-course\n")[2]
    shown = shown.replace(sow, "SOW").replace(str(root), "ROOT")
    assert [line.strip() for line in shown.splitlines()] == told
    [part] = call("status", "--root", root, "--json").document["outcomes"][0]["sows"]
    assert (part["stuck"] is None) is (not told)


@pytest.mark.parametrize("losses", [1, 2], ids=["as many as it may lose", "fewer"])
def test_parked_work_is_seen_to_wait_for_a_ruling_until_there_is_one(losses, root, call):
    park_after(root, losses)
    assignment = abandoned(root)
    assert call("supervisor", "--once", "--root", root).code == 0
    sow = call("inspect", assignment, "--root", root, "--json").document["record"]["sow_id"]
    ruling = f"sovereign-agent ruling decide {sow} --decision TEXT --by ACTOR"

    def seen() -> tuple[bool, bool, bool]:
        told = call("status", "--root", root, "--json").document["outcomes"][0]["sows"][0]["stuck"] or {"parked": []}
        found = findings(call("doctor", "--root", root, "--json")).get("parked", {"mend": "", "found": ""})
        assert (found["mend"] == ruling) == (sow in found["found"])
        text = call("status", "--root", root).out
        return (
            bool(told["parked"]) and told["next"] == ruling,
            found["mend"] == ruling,
            "parked: failed (worker_lost)" in text and "workers lost over it: 1\n" in text,
        )

    assert seen() == ((losses == 1,) * 3)
    typed = ruling.replace("TEXT", "retry").replace("ACTOR", "principal-human").split()[1:]
    assert call(*typed, "--root", root).code == 0
    assert seen() == ((False,) * 3)


def test_a_ruling_lets_blocked_work_go_on(root, call):
    let_operator_do(root, BLOCKED)
    with closing(Organization(root)) as org:
        assignment = assigned(org)
        sow = outcomes.get_assignment(org.db.connection, assignment).sow_id
    assert call("run", assignment, "--root", root, "--json").document["status"] == "blocked"
    ruled = call("ruling", "decide", sow, "--decision", "The left one.", "--by", "principal-human", "--root", root)
    assert ruled.code == 0
    assert "The left one." in call("inspect", sow, "--root", root).out


def test_a_canceled_assignment_does_not_run(root, org, call):
    assignment = assigned(org)
    canceled = call("cancel", assignment, "--by", "master-course", "--root", root, "--json")
    assert canceled.document["state"] == "CANCELED"
    assert call("run", assignment, "--root", root, "--json").error["category"] == "illegal_move"


def test_a_state_that_refuses_says_in_the_words_of_the_house_what_it_asks_for(root, org, call):
    _, sow = planned(org)
    early = call("review", sow, "--by", "sparring-course", "--root", root, "--json").error
    assert early["happened"] == f"Statement of work {sow} cannot become APPROVED."
    assert early["next_command"] == f"sovereign-agent assign {sow} ACTOR --by ACTOR"
    assignment = org.assign(sow, "operator-course", "master-course").id
    assert call("run", assignment, "--root", root).code == 0
    again = call("run", assignment, "--root", root, "--json").error
    assert again["happened"] == f"Assignment {assignment} cannot become RUNNING."
    assert again["next_command"] == f"sovereign-agent verify {sow} --by ACTOR"


def test_an_id_that_names_nothing_is_told_from_one_of_another_kind(root, org, call):
    _, sow = planned(org)
    nothing, other = (call("run", one, "--root", root, "--json").error for one in ("asg_nope", sow))
    assert nothing["why"] == "No assignment of this ledger has that id."
    assert other["why"] == (
        "No assignment of this ledger has that id: it has the form of another kind, statement of work."
    )
    back = call("verify", "asg_nope", "--by", "verifier-course", "--root", root, "--json").error
    assert back["happened"] == "There is no statement of work asg_nope."
    assert (
        back["why"] == "No statement of work of this ledger has that id: it has the form of another kind, assignment."
    )


def test_status_says_when_it_does_not_show_everything(root, org, call, monkeypatch):
    monkeypatch.setattr(views, "OUTCOMES_SHOWN", 2)
    for title in ("first", "second"):
        org.create_outcome(title, "Done.", [], "principal-human")
    assert "and more" not in call("status", "--root", root).out
    org.create_outcome("third", "Done.", [], "principal-human")
    told = call("status", "--root", root).out
    assert "and more" in told
    assert "third" not in told


def test_work_and_outcomes_are_called_off_by_their_ids(root, org, call):
    assignment = assigned(org)
    sow = outcomes.get_assignment(org.db.connection, assignment).sow_id
    outcome = outcomes.get_sow(org.db.connection, sow).outcome_id
    assert call("cancel", sow, "--by", "master-course", "--root", root, "--json").error["category"] == "illegal_move"
    assert call("cancel", outcome, "--by", "master-course", "--root", root, "--json").code == 1
    for subject in (assignment, sow, outcome):
        canceled = call("cancel", subject, "--by", "master-course", "--root", root, "--json")
        assert canceled.document["state"] == "CANCELED"


def test_an_actor_is_freed_from_a_process_that_is_gone(root, org, call):
    fencing.acquire_actor_lease(org.db, "operator-course", "proc_gone")
    held = call("run", assigned(org), "--root", root, "--json")
    assert held.error["category"] == "actor_lease_held"
    assert call("actor", "free", "operator-course", "--by", "master-course", "--root", root, "--json").document["freed"]
    again = call("actor", "free", "operator-course", "--by", "master-course", "--root", root, "--json")
    assert (again.code, again.error["category"]) == (1, "actor_not_freed")
    assert "Nobody holds" in again.error["why"]


@pytest.mark.parametrize("same", [True, False], ids=["the same", "another"])
def test_who_meets_a_run_that_goes_on_is_told_which_and_how_to_cancel_it(same, root, org, call):
    """Whatever is refused, its `next` line leads on: the run is canceled, and the actor takes other work."""
    works, other = running(org, this_process()), assigned(org)
    refused = call("run", works if same else other, "--root", root, "--json").error
    kept = call("actor", "free", "operator-course", "--by", "master-course", "--root", root, "--json").error
    assert (refused["category"], kept["category"]) == ("actor_lease_held", "actor_not_freed")
    assert works in refused["why"]
    assert works in kept["why"]
    assert refused["inspect"] == "sovereign-agent status"
    assert refused["next_command"] == kept["next_command"] == f"sovereign-agent cancel {works} --by ACTOR"
    typed = refused["next_command"].replace("ACTOR", "master-course").split()[1:]
    assert call(*typed, "--root", root).code == 0
    assert call("run", other, "--root", root).code == 0


def test_work_whose_files_changed_does_not_hold(root, call):
    let_operator_do(root, HANDS_OVER)
    with closing(Organization(root)) as org:
        assignment = assigned(org)
        sow = outcomes.get_assignment(org.db.connection, assignment).sow_id
    ran = call("run", assignment, "--root", root, "--json").document
    (workspace.locate(root, ran["attempt_id"]).out / "till.txt").write_text("999.99")
    told = call("verify", sow, "--by", "verifier-course", "--root", root)
    assert told.code == 1
    assert told.out.startswith(f"{sow} does not hold.")
    assert "till.txt" in told.out


def test_rejected_work_says_how_it_goes_on(root, org, call):
    assignment = assigned(org)
    sow = outcomes.get_assignment(org.db.connection, assignment).sow_id
    assert call("run", assignment, "--root", root).code == 0
    assert call("verify", sow, "--by", "verifier-course", "--root", root).code == 0
    told = call("review", sow, "--by", "sparring-course", "--reject", "--root", root)
    assert (told.code, told.out.splitlines()[0]) == (0, f"Statement of work {sow} is REJECTED.")
    assert f"sovereign-agent assign {sow} ACTOR" in told.out


def test_the_default_workspace_policy_is_the_houses():
    assert VERBS["assign"].params[3].default == workspace.POLICIES[0]


def test_a_message_arrives(root, call):
    sent = call("send", "principal-human", "operator-course", "Hello", "two\nlines", "--root", root, "--json").document
    [found] = call("inbox", "operator-course", "--root", root, "--json").document["messages"]
    assert found == sent
    assert "body   two\\nlines" in call("inbox", "operator-course", "--root", root).out
    assert call("inbox", "master-course", "--root", root).out == "master-course has no message to claim.\n"


def test_a_message_that_was_delivered_too_often_is_told_apart_and_stands_in_a_list(root, call):
    clock = ManualClock(datetime(2020, 1, 1, tzinfo=UTC))
    sent = dict[str, str]()
    with closing(Organization(root)) as org:
        for subject, deliveries in (("once", 1), ("too often", relay.MAX_DELIVERIES)):
            message = relay.send(org.db, "principal-human", "operator-course", subject, "b", clock=clock)
            sent[subject] = message.id
            for _ in range(deliveries):
                relay.claim(org.db, message.id, "operator-course", clock=clock)
                clock.advance(relay.CLAIM_TTL)
    inbox = ["inbox", "operator-course", "--root", root]
    assert call(*inbox, "--dead").out == "operator-course has no dead message.\n"
    told = call("supervisor", "--once", "--root", root).out
    assert told == f"claims given back: {sent['once']}; messages dead: {sent['too often']}\n"
    for option, message in ([], sent["once"]), (["--dead"], sent["too often"]):
        assert [each["id"] for each in call(*inbox, *option, "--json").document["messages"]] == [message]
        assert call(*inbox, *option).out.startswith(f"{message}  ")
    assert call("inbox", "master-course", "--dead", "--root", root, "--json").document == {"messages": []}
    assert call("inbox", "nobody", "--dead", "--root", root).code == 2


def test_actors_are_listed_with_the_lease_that_each_is_under(root, org, call):
    def lease() -> Any:
        listed = call("actor", "list", "--root", root, "--json").document["actors"]
        return next(actor["lease"] for actor in listed if actor["id"] == "operator-course")

    assert lease() is None
    held = fencing.acquire_actor_lease(org.db, "operator-course", org.process_identity)
    assert lease() == {
        "process_identity": org.process_identity,
        "fencing_token": held.fencing_token,
        "expires_at": held.expires_at.isoformat(),
        "run_out": False,
    }
    assert (
        f"hosted by {org.process_identity}, token {held.fencing_token}, until"
        in call("actor", "list", "--root", root).out
    )
    fencing.renew_actor_lease(
        org.db, "operator-course", org.process_identity, held.fencing_token, ttl=timedelta(microseconds=1)
    )
    assert lease()["run_out"] is True
    assert "run out at" in call("actor", "list", "--root", root).out


def test_an_actor_is_bound_to_another_provider_and_comments_stay(root, call):
    before = (root / FILE_NAME).read_text()
    rebound = call("actor", "rebind", "master-course", "scripted", "--by", "principal-human", "--root", root)
    assert rebound.code == 0
    after = (root / FILE_NAME).read_text()
    changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed == [('provider = "none"', 'provider = "scripted"')]
    refused = call("actor", "rebind", "master-course", "none", "--by", "operator-course", "--root", root, "--json")
    assert (refused.code, refused.error["category"]) == (1, "authority_refusal")
    assert (root / FILE_NAME).read_text() == after


def test_a_beat_is_written_and_judged(root, call):
    assert call("heartbeat", "--status", "--root", root).out == "NO_BEATS\n"
    assert call("heartbeat", "--source", "hook", "--root", root).code == 0
    judged = call("heartbeat", "--status", "--root", root, "--json").document
    assert (judged["verdict"], judged["source"]) == ("ALIVE", "hook")
    stale = call("heartbeat", "--status", "--stale-after", "0", "--root", root, "--json")
    assert (stale.code, stale.document["verdict"]) == (0, "STALE")


# --- inspect ----------------------------------------------------------------------------------------------


def test_any_record_is_found_by_the_beginning_of_its_id(root, org, call):
    assignment = assigned(org)
    ran = call("run", assignment, "--root", root, "--json").document
    message = org.send("principal-human", "operator-course", "Hello", "there").id
    sow = outcomes.get_assignment(org.db.connection, assignment).sow_id
    outcome = outcomes.get_sow(org.db.connection, sow).outcome_id
    for record in (outcome, sow, assignment, ran["attempt_id"], ran["id"], message):
        for beginning in (record, record[:12], record[:4]):
            told = call("inspect", beginning, "--root", root, "--json").document
            assert (told["id"], told["record"]["id"]) == (record, record)
            assert told["events"]
        assert call("inspect", record, "--root", root).out.startswith(record)
    told = call("inspect", assignment, "--root", root, "--json").document
    assert [event["kind"] for event in told["events"]][-1] == "assignment.finished"
    assert [receipt["id"] for receipt in told["receipts"]] == [ran["id"]]


def test_a_beginning_of_several_ids_names_them_and_picks_none(root, org, call):
    first, second = sorted(org.create_outcome("t", "d", [], "principal-human").id for _ in range(2))
    told = call("inspect", "out_", "--root", root, "--json")
    assert (told.code, told.error["category"]) == (1, "ambiguous_id")
    assert told.error["why"] == f"There are {first}, {second}."
    assert call("inspect", first, "--root", root).code == 0


@pytest.mark.parametrize("unknown", ["out_0", "att_", "xyz", "", "out_%", "OUT_", "out_' OR 1=1 --", "rul_1"])
def test_an_id_of_nothing_is_refused(unknown, root, org, call):
    org.create_outcome("t", "d", [], "principal-human")
    told = call("inspect", unknown if unknown != "out_0" else "out_" + "0" * 31, "--root", root, "--json")
    assert (told.code, told.error["category"]) == (1, "unknown_id")


def test_a_running_assignment_shows_the_attempt_that_holds_it(root, call):
    assignment = abandoned(root)
    told = call("inspect", assignment, "--root", root, "--json").document
    assert [attempt["status"] for attempt in told["attempts"]] == ["ACTIVE"]
    assert told["receipts"] == []


# --- is it alive? -----------------------------------------------------------------------------------------


def shown_running(told: Ended) -> dict[str, Any]:
    return {
        assignment["id"]: assignment["liveness"]
        for work in told.document["outcomes"]
        for sow in work["sows"]
        for assignment in sow["assignments"]
    }


def test_status_tells_a_worker_that_works_from_one_that_is_gone_and_from_work_nobody_runs(root, org, call):
    works, dead, waits = running(org, this_process()), running(org, gone()), assigned(org)
    told = shown_running(call("status", "--root", root, "--json"))
    decided = {each: liveness and liveness["decision"] for each, liveness in told.items()}
    assert decided == {works: "working", dead: "suspected_dead", waits: None}
    assert told[dead]["reasons"][0] == "Its process is gone."
    assert told[dead]["owner"].startswith(f"{org.process_identity}, pid ")
    assert told[dead]["until"] > org.db.now().isoformat()
    seen = [call("inspect", each, "--root", root, "--json").document["liveness"] for each in (dead, waits)]
    assert [liveness and liveness["decision"] for liveness in seen] == ["suspected_dead", None]


@pytest.mark.parametrize("verb", ["status", "inspect"])
def test_a_person_reads_why_it_is_stuck_who_owns_it_until_when_and_what_happens_next(verb, root, org, call):
    dead = running(org, gone())
    told = call(*{"status": ["status"], "inspect": ["inspect", dead]}[verb], "--root", root).out
    lines = [line.strip() for line in told.splitlines()]
    about = lines[lines.index("suspected dead") :]
    labels = ["why", "why", "why", "owner", "until", "then", "next"]
    assert [line.split()[0] for line in about[1:8]] == labels
    assert about[1] == "why    Its process is gone."
    assert about[7] == f"next   sovereign-agent cancel {dead} --by ACTOR --root {root}"
    typed = about[7].split()[2:]
    assert call(*[word.replace("ACTOR", "master-course") for word in typed]).code == 0
    assert "suspected dead" not in call("status", "--root", root).out


def test_doctor_names_each_worker_that_is_odd_and_no_other(root, org, call):
    lost, works, dead = abandoned(root), running(org, this_process()), running(org, gone())
    told = call("doctor", "--root", root, "--json")
    odd = {one["found"].split()[0]: one for one in told.document["findings"] if one["subject"] == "worker"}
    assert {*odd} == {dead, lost}
    assert works not in str(odd)
    assert odd[dead]["found"].startswith(f"{dead} is suspected_dead: Its process is gone.")
    assert odd[dead]["mend"] == f"sovereign-agent cancel {dead} --by ACTOR"
    assert odd[lost]["found"].startswith(f"{lost} is lost: Its attempt ran out ")
    assert odd[lost]["mend"] == "sovereign-agent supervisor --once"


def test_to_judge_a_running_worker_leaves_no_trace(local_root):
    with closing(Organization(local_root)) as org:
        running(org, gone())
    before = everything_below(local_root)
    assert "suspected dead" in ended(spawned("status", "--root", local_root)).out
    assert "suspected_dead" in ended(spawned("doctor", "--root", local_root)).out
    assert everything_below(local_root) == before


# --- text from outside ------------------------------------------------------------------------------------

HOSTILE = "[red]x[/red] \x1b[31m\x1b]0;title\x07 \u202e\r\nACCEPTED \x9b2J :smile: \\ caf\u00e9"
SHOWN = "[red]x[/red] \\x1b[31m\\x1b]0;title\\x07 \\u202e\\r\\nACCEPTED \\x9b2J :smile: \\ caf\u00e9"


def test_text_from_outside_is_shown_and_never_obeyed(root, org, call):
    outcome, sow = planned(org, HOSTILE)
    org.send("principal-human", "operator-course", HOSTILE, HOSTILE)
    for verb in (["status"], ["inspect", outcome], ["inbox", "operator-course"]):
        told = call(*verb, "--root", root)
        assert SHOWN in told.out
        assert all(character.isprintable() for character in told.out.replace("\n", ""))
    assert call("status", "--root", root, "--json").document["outcomes"][0]["outcome"]["title"] == HOSTILE
    assert call("review", sow + "\x1b[31m", "--by", "sparring-course", "--root", root).err.isascii()


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C"}, {"LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}],
    ids=["C", "C without UTF-8", "ascii"],
)
def test_any_locale_can_carry_the_answer(locale, local_root):
    with closing(Organization(local_root)) as org:
        planned(org, "caf\u00e9 \U0001f600 \x1b")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    told = subprocess.run(
        [*COMMAND, "status", "--root", local_root],
        env=bare | locale,
        capture_output=True,
        check=True,
        timeout=WITHIN_SECONDS,
    )
    assert told.stderr == b""
    assert b"\x1b" not in told.stdout
    assert "caf\u00e9" in told.stdout.decode() or b"caf\\xe9 \\U0001f600" in told.stdout
    helped = ended(spawned("--help", env=bare | locale, encoding="utf-8"))
    assert (helped.code, helped.err) == (0, "")


def test_a_reader_who_has_gone_is_no_error(local_root):
    reading, writing = os.pipe()
    process = spawned("status", "--root", local_root, stdout=writing)
    os.close(reading)
    os.close(writing)
    told = ended(process)
    assert (told.code, told.err) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_answer_that_cannot_be_written_is_not_called_done(local_root):
    with Path("/dev/full").open("w") as full:
        told = ended(spawned("status", "--root", local_root, stdout=full))
    assert told.code == 4
    assert told.err == "The operating system refused: [Errno 28] No space left on device.\n"


# --- signals ----------------------------------------------------------------------------------------------


def catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal in place, as Linux tells it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to see a handler being set")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_recorded_and_ends_without_a_traceback(number, root, call):
    let_operator_do(root, SLEEPS)
    with closing(Organization(root)) as org:
        assignment = assigned(org)
        process = spawned("run", assignment, "--root", root, "--json")
        eventually(lambda: [*root.glob(".sovereign/runs/*/asleep")])
        process.send_signal(number)
        told = ended(process)
        [receipt] = journal.receipts_of(org.db.connection, assignment)
        assert outcomes.get_assignment(org.db.connection, assignment).state is AssignmentState.FAILED
    assert told.code == 130
    sow = call("inspect", assignment, "--root", root, "--json").document["record"]["sow_id"]
    assert told.error["category"] == "interrupted"
    assert told.error["happened"] == f"Interrupted. Assignment {assignment} is FAILED (interrupted)."
    assert receipt.id in told.error["why"]
    assert told.error["next_command"] == f"sovereign-agent assign {sow} ACTOR --by ACTOR"
    assert (receipt.status, receipt.failure_category) == (ReceiptStatus.FAILED, "interrupted")
    let_operator_do(root, OK)
    again = call("assign", sow, "operator-course", "--by", "master-course", "--root", root, "--json").document
    assert call("run", again["id"], "--root", root).code == 0


def test_a_run_that_is_interrupted_before_it_begins_claims_no_end(root, org, call, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    assignment = assigned(org)
    monkeypatch.setattr(Organization, "run_assignment", interrupted)
    told = call("run", assignment, "--root", root, "--json")
    assert (told.code, told.error["happened"]) == (130, f"Interrupted. Assignment {assignment} is CREATED.")
    assert told.error["why"] == "No end of a run is recorded."


@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("later_seconds", [0.0, 0.05, 0.15, 0.3, 1.0])
def test_a_signal_ends_the_supervisor_at_once_from_its_first_moments_on(number, later_seconds, local_root):
    process = spawned("supervisor", "--root", local_root)
    eventually(lambda: catches(process, signal.SIGTERM), every=0.001)
    time.sleep(later_seconds)
    sent = time.monotonic()
    process.send_signal(number)
    told = ended(process)
    assert (told.code, told.out, told.err) == (0, "", "")
    assert time.monotonic() - sent < 2


@pytest.mark.parametrize(("verb", "expected"), [("supervisor", "True False"), ("status", "False False")])
def test_the_supervisors_handlers_stand_before_anything_is_imported(verb, expected):
    look = f"""
import signal, sys
from sovereign_agent import cli
def attempt(given):
    ours = {{signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}} == {{cli._end_at_once}}
    print(ours, "typer" in sys.modules)
    return 0
cli._attempt = attempt
sys.argv = ["sovereign-agent", "{verb}"]
cli.main()
"""
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert (told.stdout.strip(), told.stderr) == (expected, "")


def test_a_word_like_supervisor_elsewhere_gets_no_such_handler():
    assert cli._verb(["--root", "supervisor", "send", "a"]) == "send"
    assert cli._verb(["send", "a", "b", "supervisor"]) == "send"
    assert cli._verb(["--root", "x", "supervisor", "--once"]) == "supervisor"
    assert cli._verb(["--root=x", "supervisor"]) == "supervisor"
    assert cli._verb(["--version"]) == ""


# --- the supervisor's lines -------------------------------------------------------------------------------


def test_one_tick_tells_what_it_recovered_and_the_next_has_nothing_to_do(root, call):
    assignment = abandoned(root)
    first = call("supervisor", "--once", "--root", root)
    assert (first.code, first.err) == (0, "")
    assert first.out == f"recovered: {assignment}; leases run out: operator-course; folders dealt with: 1\n"
    second = call("supervisor", "--once", "--root", root, "--json")
    assert second.document["recovered_assignments"] == []
    assert call("inspect", assignment, "--root", root, "--json").document["record"]["state"] == "FAILED"


def test_a_tick_that_only_tidies_up_says_so(root, call, monkeypatch):
    monkeypatch.setattr(workspace, "reclaim_workspace", lambda *_: workspace.Reclaim("partial", ("stuck",)))
    with closing(Organization(root)) as org:
        assert call("run", assigned(org), "--root", root).code == 0
    monkeypatch.undo()
    said = [call("supervisor", "--once", "--root", root).out for _ in range(2)]
    assert said == ["folders dealt with: 1\n", "Nothing to recover.\n"]


def test_the_loop_prints_an_object_for_each_tick_and_a_line_only_for_news(local_root):
    objects, lines = (spawned("supervisor", "--root", local_root, *form) for form in (["--json"], []))
    assert json.loads(objects.stdout.readline())["recovered_assignments"] == []
    assert json.loads(objects.stdout.readline())["recovered_assignments"] == []
    objects.terminate()
    assert ended(objects).code == 0
    assignment = abandoned(local_root)
    recovered, _, more = lines.stdout.readline().partition("; ")
    assert recovered == f"recovered: {assignment}"
    assert (
        more.removeprefix("leases run out: operator-course; ") == "folders dealt with: 1\n"
    )  # or at the next tick, if both came apart
    time.sleep(2.5)
    lines.terminate()
    assert ended(lines).out in ("", "leases run out: operator-course\n")


@pytest.mark.parametrize("verb", ["status", "doctor", "init", "run asg_1"])
def test_a_pipe_in_place_of_the_settings_is_refused_at_once(verb, local_root):
    (local_root / FILE_NAME).unlink()
    os.mkfifo(local_root / FILE_NAME)
    process = spawned(*verb.split(), "--root", local_root)
    try:
        eventually(lambda: process.poll() is not None)
    finally:
        process.kill()
        told = ended(process)
    assert told.code == 2
    assert f"{FILE_NAME} cannot be used: it is a pipe." in told.out + told.err


# --- what a person sees while waiting ---------------------------------------------------------------------


def test_a_terminal_shows_the_attempt_and_the_time_on_stderr_and_a_pipe_nothing(local_root):
    let_operator_do(local_root, TAKES_A_MOMENT)
    ours, theirs = pty.openpty()
    with closing(Organization(local_root)) as org:
        seen, unseen = assigned(org), assigned(org)
    process = spawned("run", seen, "--root", local_root, "--json", stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    out, _ = process.communicate(timeout=WITHIN_SECONDS)
    shown = shown_on(ours)
    receipt = json.loads(out)
    assert (process.returncode, receipt["status"]) == (0, "completed")
    assert receipt["attempt_id"].encode() in shown
    assert b"0:00:00" in shown
    assert ended(spawned("run", unseen, "--root", local_root)).err == ""


# --- doctor -----------------------------------------------------------------------------------------------


def findings(told: Ended) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in told.document["findings"]}


def test_all_is_well(root, location, call):
    told = call("doctor", "--root", root)
    assert (told.code, told.err) == (0, "")
    assert {line.split()[0] for line in told.out.splitlines()} == {"ok"}
    found = findings(call("doctor", "--root", root, "--json"))
    assert {"python", "sqlite", "settings", "provider", "ledger", "leases", "attempts", "workspaces", "clock"} <= {
        *found
    }
    assert location.engine in found["ledger"]["found"]
    assert location.ledger in found["ledger"]["found"]
    assert ("wal" in found, "file system" in found) == ((location.engine == "sqlite"),) * 2


def test_settings_that_cannot_be_used_end_with_two_and_the_mend(local_root, call):
    toml = local_root / FILE_NAME
    toml.write_text(toml.read_text().replace("actor_lease_seconds", "actor_leese_seconds"))
    told = call("doctor", "--root", local_root, "--json")
    assert (told.code, told.document["usable"]) == (2, False)
    assert findings(told)["settings"]["verdict"] == "fail"
    assert findings(told)["settings"]["mend"] == "remove it, or correct its spelling"
    assert call("doctor", "--root", local_root / "nowhere").code == 2


def _without_ledger(path: Path) -> None:
    path.unlink()


def _with_garbage(path: Path) -> None:
    path.write_bytes(b"not a ledger " * 1000)


def _with_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [_without_ledger, _with_garbage, _with_a_folder, _emptied])
def test_a_ledger_that_cannot_be_used_ends_with_four_and_is_reported(harm, local_root, call):
    harm(local_root / LEDGER_NAME)
    before = everything_below(local_root)
    told = call("doctor", "--root", local_root, "--json")
    assert told.code == 4
    assert findings(told)["ledger"]["verdict"] == "fail"
    assert findings(told)["settings"]["verdict"] == "ok"
    assert everything_below(local_root) == before


def test_a_server_that_cannot_be_reached_ends_with_four(local_root, call):
    toml = local_root / FILE_NAME
    toml.write_text(toml.read_text().replace('url = ""', 'url = "postgresql://nobody@127.0.0.1:1/none"'))
    told = call("doctor", "--root", local_root, "--json")
    assert (told.code, findings(told)["ledger"]["verdict"]) == (4, "fail")


def test_what_waits_for_recovery_is_a_warning_until_it_is_recovered(root, call):
    abandoned(root)
    before = call("doctor", "--root", root, "--json")
    assert (before.code, findings(before)["attempts"]["verdict"]) == (0, "warn")
    assert findings(before)["attempts"]["mend"] == "sovereign-agent supervisor --once"
    assert findings(before)["leases"]["found"] == "1, 1 of them run out"
    assert call("supervisor", "--once", "--root", root).code == 0
    assert findings(call("doctor", "--root", root, "--json"))["attempts"]["verdict"] == "ok"


def test_a_folder_that_nobody_has_dealt_with_is_a_warning(root, call, monkeypatch):
    monkeypatch.setattr(workspace, "reclaim_workspace", lambda *_: workspace.Reclaim("partial", ("stuck",)))
    with closing(Organization(root)) as org:
        assert call("run", assigned(org), "--root", root).code == 0
    assert findings(call("doctor", "--root", root, "--json"))["workspaces"]["verdict"] == "warn"
    monkeypatch.undo()
    assert call("supervisor", "--once", "--root", root).code == 0
    assert findings(call("doctor", "--root", root, "--json"))["workspaces"]["verdict"] == "ok"


def test_a_folder_on_another_host_is_a_fact_and_no_warning(root, call):
    with closing(Organization(root, clock=ManualClock(LONG_AGO))) as there:
        running(there, {"host": "till-2"})
    assert call("supervisor", "--once", "--root", root).code == 0
    told = call("doctor", "--root", root, "--json").document["findings"]
    assert [(one["verdict"], one["found"]) for one in told if one["subject"] == "workspaces"] == [
        ("ok", "0 still to be dealt with"),
        ("ok", "1 left to a supervisor on till-2"),
    ]


def test_authority_that_lasts_too_long_gives_a_clock_away_that_went_back(root, org, call):
    message = org.send("principal-human", "operator-course", "Hello", "there").id
    relay.claim(org.db, message, "operator-course")
    ttl = org.settings.authority.lease_ttl
    fencing.acquire_actor_lease(org.db, "operator-course", org.process_identity, ttl=ttl)
    assert findings(call("doctor", "--root", root, "--json"))["clock"]["verdict"] == "ok"
    ahead = ManualClock(org.db.now() + timedelta(hours=3))
    lease = fencing.acquire_actor_lease(org.db, "master-course", org.process_identity, clock=ahead)
    second = org.send("principal-human", "operator-course", "Hello", "again").id
    relay.claim(org.db, second, "operator-course", clock=ahead)
    told = call("doctor", "--root", root, "--json")
    assert (told.code, findings(told)["clock"]["verdict"]) == (0, "warn")
    assert "2 held implausibly far ahead" in findings(told)["clock"]["found"]
    assert f"master-course until {lease.expires_at:%F %T} UTC" in findings(told)["clock"]["found"]
    assert second in findings(told)["clock"]["found"]


def test_a_large_wal_is_a_warning(local_root, call, monkeypatch):
    with closing(Organization(local_root)) as org:
        planned(org)
        assert findings(call("doctor", "--root", local_root, "--json"))["wal"]["verdict"] == "ok"
        monkeypatch.setattr(checkup, "WAL_WARNING_BYTES", 1000)
        assert findings(call("doctor", "--root", local_root, "--json"))["wal"]["verdict"] == "warn"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [("python3", "ok"), ("../../../worker.sh", "ok"), ("no-such-program", "warn"), ("./worker.sh", "warn")],
)
def test_a_providers_program_is_looked_for_where_a_run_would(program, verdict, local_root, call):
    (local_root / "worker.sh").write_text("#!/bin/sh\n")
    (local_root / "worker.sh").chmod(0o755)
    toml = local_root / FILE_NAME
    told = f'\n[providers.mine]\nkind = "command"\nargv = ["{program}"]\n\n[checks]'
    toml.write_text(toml.read_text().replace("\n[checks]", told))
    checked = call("doctor", "--root", local_root, "--json")
    found = [one for one in checked.document["findings"] if one["found"].startswith("mine:")]
    assert (checked.code, [one["verdict"] for one in found]) == (0, [verdict])


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [(("root", 0), "ok"), (("root", 1000), "warn"), (("nobody-of-that-name", 0), "warn")],
    ids=["known, to root", "known, to somebody else", "unknown"],
)
def test_a_provider_that_nobody_could_run_as_its_user_is_a_warning(asked, verdict, local_root, call, monkeypatch):
    user, euid = asked
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    toml = local_root / FILE_NAME
    told = f'\n[providers.mine]\nkind = "command"\nargv = ["python3"]\nrun_as = "{user}"\n\n[checks]'
    toml.write_text(toml.read_text().replace("\n[checks]", told))
    checked = call("doctor", "--root", local_root, "--json").document["findings"]
    [found] = [one for one in checked if one["found"].startswith("mine:")]
    assert (found["verdict"], "run_as" in found["mend"]) == (verdict, verdict == "warn")


# --- demo -------------------------------------------------------------------------------------------------


def test_the_store_is_whichever_an_installed_package_offers(call, tmp_path, monkeypatch):
    asked: list[Any] = []

    class Offered:
        @staticmethod
        def load() -> Callable[..., int]:
            def main(root: Path, mode: str, json: bool) -> int:  # noqa: FBT001 - as the entry point is called
                asked.append((root, mode, json))
                return 7

            return main

    offers: dict[tuple[str, str], list[Any]] = {("sovereign_agent.demos", "store"): [Offered]}
    monkeypatch.setattr(metadata, "entry_points", lambda *, group, name: offers.get((group, name), []))
    assert call("demo", "store", "--mode", "simulated", "--root", tmp_path, "--json").code == 7
    assert asked == [(tmp_path, "simulated", True)]
    offers.clear()
    refused = call("demo", "store", "--root", tmp_path, "--json")
    assert (refused.code, refused.error["category"]) == (1, "demo_missing")


@pytest.mark.parametrize(("which", "played"), [("crash", crash), ("restore", demo_restore)])
def test_a_demo_gets_its_own_root_and_never_the_users(which, played, call, tmp_path, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(played, "main", lambda **given: asked.append(given) or 0)
    monkeypatch.setenv("SOVEREIGN_ROOT", str(tmp_path))
    assert call("demo", which, "--json").code == 0
    assert call("demo", which, "--ledger", "postgresql://h/d", "--root", tmp_path / "kept").code == 0
    assert asked == [
        {"json": True, "ledger": "", "root": None},
        {"json": False, "ledger": "postgresql://h/d", "root": tmp_path / "kept"},
    ]


# --- the front door ---------------------------------------------------------------------------------------


def test_importing_the_package_costs_nothing_and_each_name_is_there_when_asked_for():
    look = (
        "import sys, sovereign_agent; print([m for m in sys.modules if m.startswith(('pydantic', 'sovereign_agent.'))])"
    )
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert len(sovereign_agent.__all__) <= 30
    assert all(getattr(sovereign_agent, name) for name in sovereign_agent.__all__)
    assert sovereign_agent.Organization is Organization
    with pytest.raises(AttributeError, match="no attribute 'fencing_token'"):
        sovereign_agent.fencing_token  # noqa: B018


def test_the_version_is_the_one_that_is_built(call):
    project = tomllib.loads((REFERENCE.parent.parent.parent / "pyproject.toml").read_text())
    assert sovereign_agent.__version__ == project["project"]["version"]
    assert call("--version").out == f"sovereign-agent {sovereign_agent.__version__}\n"


# --- the assistant's queue --------------------------------------------------------------------------------


def test_an_item_is_queued_claimed_delegated_from_shown_and_called_off(root, call, tmp_path):
    place = ["--root", root, "--json"]
    queued = call("assistant", "enqueue", "lucy", "Check the shop", "--origin", "mail:1", "--subject", "tea", *place)
    item = queued.document["id"]
    assert (
        call("assistant", "enqueue", "lucy", "Other", "--origin", "mail:1", *place).error["category"] == "origin_taken"
    )
    (tmp_path / "claim.json").write_text(call("assistant", "claim", "lucy's laptop", *place).out)
    assert call("assistant", "claim", "another", *place).document is None
    below = [
        "assistant",
        "delegate",
        "Look up the price",
        "--claim",
        tmp_path / "claim.json",
        "--for",
        60,
        "--budget",
        3,
    ]
    child = call(*below, *place).document
    assert child["role"] == "research"
    shown = call("assistant", "status", *place).document["open"]
    assert [(each["id"], each["status"]) for each in shown] == [(item, "RUNNING"), (child["id"], "READY")]
    assert call("assistant", "status", item, *place).document["owner"] == "lucy's laptop"
    assert call("assistant", "transcript", item, *place).document == {"lines": []}
    canceled = call("assistant", "cancel", item, "--by", "principal-human", *place)
    assert canceled.document["status"] == "CANCELED"
    assert call(*below, *place).error["category"] == "claim_lost"


def test_the_assistant_speaks_to_people_too(root, call):
    place = ["--root", root]
    assert call("assistant", "status", *place).out == "Nothing is open.\n"
    assert call("assistant", "claim", "me", *place).out == "There is nothing to claim.\n"
    assert "is READY." in call("assistant", "enqueue", "lucy", "Check \x1b[31m the shop", *place).out
    assert "\\x1b[31m" in call("assistant", "claim", "me", *place).out
    with closing(Organization(root)) as org:
        (row,) = assistant_work.open_work(org.db.connection)
        item = row["id"]
        claim = assistant_work.Claim(
            **{
                name: row[name]
                for name in ("id", "session", "prompt", "generation", "owner", "epoch", "subject", "role")
            }
        )
        assistant_work.observe(org.db, claim, {"role": "assistant", "content": "Two tubs left."})
    assert "RUNNING" in call("assistant", "status", *place).out
    assert "Two tubs left." in call("assistant", "transcript", item, *place).out
    assert call("assistant", "cancel", item, "--by", "nobody", *place).code == 2
    assert call("assistant", "transcript", "work_0", *place).code == 1
    assert call("inspect", item, *place, "--json").error["next_command"] == f"sovereign-agent assistant status {item}"


def test_what_left_the_house_is_shown_and_a_person_speaks_of_it(root, call):
    place = ["--root", root]
    assert call("assistant", "effects", *place).out == "Nothing needs a person's word.\n"
    with closing(Organization(root)) as org:
        for name in ("op_1", "op_2"):
            claim = Claim("work_1", "session", "prompt", 1, "owner", "e", "", "shop")
            with org.db.transaction() as connection:
                effects.intend(connection, name, claim, tool="order", arguments='{"sku": "\x1b[31mTEA"}', at=7)
    told = call("assistant", "effects", *place).out
    assert "op_1  order" in told
    assert "nobody saw it" in told
    assert (
        "next   sovereign-agent assistant reconcile op_1 --outcome DONE-OR-NONE --by ACTOR --reason TEXT --root" in told
    )
    assert "\\x1b[31mTEA" in told
    (second,) = call("assistant", "effects", "--after", 1, *place, "--json").document["effects"]
    assert (second["operation_id"], second["outcome"], second["of_older_epoch"]) == ("op_2", "", False)
    word = ["--outcome", "done", "--by", "principal-human", "--reason", "asked the supplier", *place]
    assert call("assistant", "reconcile", "op_1", "op_2", *word, "--json").document["reconciled"] == ["op_1", "op_2"]
    assert call("assistant", "effects", *place, "--json").document == {"effects": []}
    refused = call("assistant", "reconcile", "op_1", *word, "--json")
    assert (refused.code, refused.error["category"]) == (1, "effect_settled")
    word[3] = "nobody"
    assert call("assistant", "reconcile", "op_1", *word).code == 2


def test_an_act_that_waits_for_a_person_shows_in_status_and_doctor_and_one_of_a_worker_does_not(root, call):
    place, by = ["--root", root], ["--by", "principal-human", "--reason", "r", "--root", root]

    def seen() -> str:
        text = call("status", *place).out
        found = findings(call("doctor", *place, "--json")).get("effects", {"found": ""})["found"]
        assert (f"acts outside: {found}\n  look   sovereign-agent assistant effects" in text) == bool(found)
        return found

    with closing(Organization(root)) as org:
        item = assistant_work.enqueue(org.db, "mail:1", "lucy", "Order tea.")
        claim = assistant_work.claim(org.db, "worker-1")
        assert claim
        with org.db.transaction() as connection:
            effects.intend(connection, "op_1", claim, tool="order", arguments="{}", at=7)
        assert seen() == ""
        assert re.search(r"claimed +until .* UTC", call("assistant", "effects", *place).out)
        assistant_work.cancel(org.db, item)
    assert seen() == "1 waiting for a person's word"
    assert call("authority", "new-epoch", *by).code == 0
    older = {"waiting": 1, "of_older_epoch": 1}
    assert call("status", *place, "--json").document["effects"] == older
    assert seen() == "1 waiting for a person's word, 1 of an older epoch, before which nothing else leaves"
    assert call("assistant", "reconcile", "op_1", "--outcome", "done", *by).code == 0
    assert seen() == ""


@pytest.mark.parametrize("content", ["no such file", "", "null", "[]", "{}", '{"id": "work_1"}', "\udcff"])
def test_what_is_no_claim_delegates_nothing(local_root, call, tmp_path, content):
    presented = tmp_path / "claim.json"
    if content != "no such file":
        presented.write_bytes(content.encode("utf-8", "surrogateescape"))
    asked = ["assistant", "delegate", "Look", "--claim", presented, "--for", 60, "--budget", 1]
    said = call(*asked, "--root", local_root, "--json")
    assert (said.code, said.error["category"]) == (1, "claim_unreadable")
