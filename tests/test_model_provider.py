"""A model as an actor's program: its loop in a guarded process, its tools gated by the attempt, its key nowhere."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import pytest
import tomlkit
from model_endpoint import KEY, Endpoint, calls, hang_up, reply, send
from support import (
    _processes,
    answer,
    attempt_on,
    configure,
    eventually,
    governed_work,
    judge_and_accept,
    ledger_facts,
    rows,
    until_blocked,
)

from sovereign_agent import assistant_service, configuration, fencing, outcomes, runs
from sovereign_agent.agent_loop import LoopStatus
from sovereign_agent.commands.checkup import check_up
from sovereign_agent.configuration import LimitSettings, ModelSettings
from sovereign_agent.database import Migration
from sovereign_agent.database import authority as epochs
from sovereign_agent.errors import AuthorityLost, ConfigurationFault
from sovereign_agent.model_program import ENDINGS, Authority, Nothing, dispatcher_for, limits_of, own_tools
from sovereign_agent.organization import Organization
from sovereign_agent.providers import model
from sovereign_agent.providers.base import PRECEDENCE, Envelope, OutcomeBrief, SowBrief
from sovereign_agent.records import Assignment, ExecutionAttempt, OutcomeState, Receipt, ReceiptStatus
from sovereign_agent.supervisor import tick
from sovereign_agent.tool_dispatch import Dispatcher, ExecutableTool, ToolCall
from sovereign_agent.workspace import allocate, locate

pytestmark = pytest.mark.timeout(90)

one_engine = pytest.mark.parametrize("engine", ["sqlite"])
"""For what does not touch the ledger."""

OPERATOR = "operator-course"
PRINCIPAL = "principal-human"
NOTES = (
    Migration(number=1, name="notes", min_writer=1, sql="-- home: notes\nCREATE TABLE notes (text TEXT NOT NULL);"),
)
NOTEBOOK = """
from pydantic import BaseModel, ConfigDict
from sovereign_agent.tool_dispatch import ExecutableTool

class Note(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: str

def tools(db):
    def note(asked, now):
        now.connection.execute("INSERT INTO notes (text) VALUES (?)", (f"{asked.text} under {now.token}",))
        print("noted")
        return "noted"
    return [ExecutableTool("note", "Note something.", Note, note, consequential=True, fenced=True)]
"""
REPORT = {"status": "completed", "summary": "The till is counted.", "deliverables": ["till.txt"]}
TILL = {"name": "till.txt", "text": "412.50\n"}
WORK = (
    calls(("list_files", {}), ("write_deliverable", TILL)),
    calls(("read_file", {"name": ".sovereign-out/till.txt"}), ("note", {"text": "counted"})),
    calls(("report", REPORT)),
    reply(content="It is done."),
)


@pytest.fixture
def shop(org: Organization, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Organization:
    """An organization whose operator is a model at the endpoint, and that has a notebook of its own."""
    monkeypatch.setenv("SHOP_KEY", KEY)
    (org.root / "notebook.py").write_text(NOTEBOOK)
    org.db.extend("notes", NOTES)
    asked = {"kind": "model", "model": "some-model", "base_url": endpoint.url, "key_env": "SHOP_KEY"}
    bind(org, asked | {"tools": "notebook:tools", "prices": [1.25, 10], "environment": ["NO_PROXY"]})
    return org


def bind(org: Organization, provider: dict[str, Any]) -> None:
    """Let another provider work for the operator."""

    def change(document: Any) -> None:
        document["providers"]["thinker"] = provider
        document["actors"][OPERATOR]["provider"] = "thinker"

    configure(org, change)


def run(org: Organization, endpoint: Endpoint, *answers: Any, **limits: Any) -> Receipt:
    """One run of new work, with these answers; it raises what the run raises."""
    endpoint.answers[:] = answers
    if limits:
        configure(org, lambda document: document["providers"]["thinker"].update(limits=limits))
    return org.run_assignment(governed_work(org, policy="persistent")[2].id)


def verdict(receipt: Receipt) -> tuple[str, str]:
    return receipt.status.value, receipt.failure_category


def notes(org: Organization) -> list[str]:
    return [str(row["text"]) for row in rows(org.db, "notes")]


class Thinking:
    """An answer that is on its way until it is told to come."""

    def __init__(self, body: bytes) -> None:
        self.begun, self.over = threading.Event(), threading.Event()
        self._body = body

    def __call__(self, handler: Any) -> None:
        self.begun.set()
        self.over.wait(60)
        with suppress(OSError):  # whoever asked may be gone
            send(handler, 200, self._body)


@contextmanager
def thinking(org: Organization, endpoint: Endpoint, then: bytes) -> Iterator[tuple[Assignment, Thinking, Future[Any]]]:
    """A run whose model thinks, until the caller lets it answer with `then`."""
    thought = Thinking(then)
    endpoint.answers[:] = [thought, reply(content="Done.")]
    assignment = governed_work(org)[2]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(org.run_assignment, assignment.id)
        try:
            assert thought.begun.wait(60)
            yield assignment, thought, running
        finally:
            thought.over.set()


# --- a governed run -------------------------------------------------------------------------------------------


def test_a_model_and_a_scripted_actor_bring_one_outcome_to_acceptance(shop, endpoint):
    endpoint.answers[:] = WORK
    outcome, counted, assignment = governed_work(shop)
    swept = shop.create_sow(outcome.id, "Sweep the floor", "operator", "master-course", ready=True)
    receipt = shop.run_assignment(assignment.id)
    assert (verdict(receipt), receipt.summary) == (("completed", ""), REPORT["summary"])
    assert notes(shop) == [f"counted under {receipt.detail['fencing_token']}"]
    assert [each["name"] for each in receipt.detail["deliverables"]] == ["till.txt"]
    figures = receipt.detail["figures"]
    assert (figures["model_calls"], figures["tool_calls"], figures["input_tokens"]) == (4, 5, 44)
    assert (figures["cost_micros"], receipt.detail["noise"]) == (4 * 84, 0)  # what a tool prints is no event
    told = endpoint.asked[1]["messages"]
    assert json.loads(told[1]["content"])["sow"]["scope"] == "Count the till"
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool", "tool"]
    assert "412.50" in endpoint.asked[2]["messages"][-2]["content"]

    configure(shop, lambda document: document["actors"][OPERATOR].update(provider="scripted"))
    assert shop.run_assignment(shop.assign(swept.id, OPERATOR, "master-course").id).status is ReceiptStatus.COMPLETED
    assert shop.verify_sow(swept.id, "verifier-course").passed
    shop.review(swept.id, "sparring-course")
    assert judge_and_accept(shop, outcome.id, counted.id) is OutcomeState.ACCEPTED


def test_a_model_that_asks_is_blocked_with_its_question(shop, endpoint):
    asks = {"status": "blocked", "summary": "There are two tills.", "question": "Which one?"}
    receipt = run(shop, endpoint, calls(("report", asks)), reply(content="I asked."))
    assert (verdict(receipt), receipt.detail["question"]) == (("blocked", ""), "Which one?")


def test_a_good_answer_without_a_report_completes_nothing(shop, endpoint):
    receipt = run(shop, endpoint, reply(content="All done, believe me."))
    assert verdict(receipt) == ("failed", "missing_report")
    assert "believe me" in receipt.summary


# --- the key --------------------------------------------------------------------------------------------------


def test_the_key_is_in_no_file_and_no_record(shop, endpoint, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    said = run(shop, endpoint, reply(content=f"Your key is {KEY}."))
    refused = run(shop, endpoint, (401, f"the key {KEY} is not good".encode()))
    assert "[key]" in said.summary
    assert "[key]" in refused.summary
    assert endpoint.keys == [f"Bearer {KEY}"] * 2
    tables = ("receipts", "events", "assignments", "execution_attempts", "messages")
    assert KEY not in repr([rows(shop.db, table) for table in tables])
    files = [each for each in shop.root.rglob("*") if each.is_file()]
    assert any("provider-raw" in each.parts for each in files)
    assert [each for each in files if KEY.encode() in each.read_bytes()] == []
    assert KEY not in repr((caplog.text, capfd.readouterr()))


def test_no_tool_finds_the_key_in_its_environment(shop, endpoint):
    looking = NOTEBOOK.replace("{asked.text}", "{__import__('os').environ.get('SHOP_KEY')}")
    (shop.root / "notebook.py").write_text(looking)
    run(shop, endpoint, *WORK)
    assert notes(shop)[0].startswith("None under ")


def test_without_its_key_or_its_package_nothing_is_started(shop, endpoint, monkeypatch):
    monkeypatch.setenv("SHOP_KEY", " ")
    receipt = run(shop, endpoint, reply(content="Done."))
    assert verdict(receipt) == ("failed", "provider_unavailable")
    assert "SHOP_KEY" in receipt.summary
    monkeypatch.setenv("SHOP_KEY", KEY)
    monkeypatch.setattr(model, "is_installed", lambda: False)
    assert "sovereign-agent[live]" in run(shop, endpoint, reply(content="Done.")).summary
    assert endpoint.asked == []


# --- failures with a name -------------------------------------------------------------------------------------


def test_each_ending_of_the_loop_has_its_category_and_none_but_the_good_one_has_none():
    assert {*ENDINGS} == {*LoopStatus}
    assert [status for status, (category, _) in ENDINGS.items() if not category] == [LoopStatus.COMPLETED]
    assert {category for category, _ in ENDINGS.values()} - {""} <= {*PRECEDENCE}
    assert ENDINGS[LoopStatus.AUTHORITY_LOST][0] == runs.LEASE_LOST  # of which nothing is recorded


LIST = calls(("list_files", {}))


@one_engine
@pytest.mark.parametrize(
    ("answers", "limits", "told"),
    [
        ((LIST, reply(content="")), {}, ("provider_error", "answered nothing")),
        ((b"<html>",), {}, ("provider_error", "not_json")),
        (((401, b"no"),), {}, ("provider_error", "unauthorized")),
        ((hang_up,), {"seconds": 0.7}, ("provider_error", "connection_failed")),
        ((LIST, LIST), {}, ("provider_error", "one id")),
        ((LIST,), {"model_calls": 1}, ("actor_reported_failure", "model calls")),
        ((LIST,), {"tool_calls": 0}, ("actor_reported_failure", "tool calls")),
        ((LIST,), {"money": 0.000001}, ("actor_reported_failure", "money")),
        ((reply(content="x", reason="length"),), {}, ("actor_reported_failure", "tokens")),
        ((LIST, lambda _: threading.Event().wait(3)), {"seconds": 1.2}, ("provider_error", "timeout")),
    ],
    ids=range(10),
)
def test_hazard_32_what_a_model_does_wrong_is_a_failure_with_a_name(shop, endpoint, answers, limits, told):
    category, words = told
    receipt = run(shop, endpoint, *answers, **limits)
    assert verdict(receipt) == ("failed", category)
    assert words in receipt.summary


def test_hazard_40_a_server_that_breaks_after_a_tool_has_acted_does_not_make_it_act_again(shop, endpoint):
    note, broken = calls(("note", {"text": "ordered"})), (502, b"")
    receipt = run(
        shop, endpoint, note, broken, calls(("report", REPORT | {"deliverables": []})), reply(content="Done.")
    )
    assert (verdict(receipt), len(notes(shop))) == (("completed", ""), 1)
    receipt = run(shop, endpoint, note, broken, seconds=1.0)  # too short to ask again
    assert (verdict(receipt), len(notes(shop))) == (("failed", "provider_error"), 2)
    assert "server_error" in receipt.summary


def test_a_report_that_claims_success_does_not_outweigh_how_the_loop_ended(shop, endpoint):
    receipt = run(shop, endpoint, calls(("report", REPORT | {"deliverables": []})), (401, b"no"))
    assert verdict(receipt) == ("failed", "provider_error")


@one_engine
@pytest.mark.parametrize(
    ("tools", "category", "words"),
    [
        ("nobody:tools", "provider_unavailable", "leads nowhere"),
        ("double:tools", "nonzero_exit", "two tools have one name"),
    ],
)
def test_tools_that_cannot_be_used_are_a_failure_in_words(shop, endpoint, tools, category, words):
    (shop.root / "double.py").write_text("import notebook\ntools = lambda db: notebook.tools(db) * 2\n")
    configure(shop, lambda document: document["providers"]["thinker"].update(tools=tools))
    receipt = run(shop, endpoint, reply(content="Done."))
    assert verdict(receipt) == ("failed", category)
    assert words in receipt.summary
    assert endpoint.asked == []


# --- the fence ------------------------------------------------------------------------------------------------

NOTE = calls(("note", {"text": "too late"}), ("write_deliverable", TILL))


LOSSES = {
    "it ran out": "UPDATE execution_attempts SET expires_at = 1, deadline = 1",
    "its lease ran out": "UPDATE actor_leases SET expires_at = 1",
    "its lease was passed on": "UPDATE actor_leases SET fencing_token = fencing_token + 1, process_identity = 'proc_x'",
    "its lease was given back": "DELETE FROM actor_leases",
}


def lose(org: Organization, how: str, assignment_id: str) -> None:
    """What becomes of an attempt without its worker's knowledge."""
    match how:
        case "it was canceled":
            org.cancel(assignment_id, PRINCIPAL)
        case "it was recovered":
            lose(org, "it ran out", assignment_id)
            assert tick(org).recovered_assignments
        case "it was taken over":
            lose(org, "it ran out", assignment_id)
            lose(org, "its lease ran out", assignment_id)
            lease = fencing.acquire_actor_lease(org.db, OPERATOR, fencing.new_process_identity())
            attempt_on(org.db, assignment_id, lease, None)
        case "another epoch began":
            epochs.write_marker(org.db.authority, epochs.new_epoch())
        case "everything was paused":
            assistant_service.pause(org.db, PRINCIPAL, "the till is locked")
        case _:
            with org.db.transaction() as connection:
                connection.execute(LOSSES[how])


@pytest.mark.parametrize("how", ["it was canceled", "it was recovered", "its lease was passed on"])
def test_what_a_model_wants_after_its_authority_was_lost_is_refused_and_nothing_is_recorded(shop, endpoint, how):
    with thinking(shop, endpoint, NOTE) as (assignment, thought, running):
        lose(shop, how, assignment.id)
        before = {table: rows(shop.db, table) for table in ("receipts", "events", "assignments")}
        thought.over.set()
        with pytest.raises(AuthorityLost) as lost:
            running.result(60)
    assert "no longer" in f"{lost.value} {lost.value.why}"
    assert notes(shop) == []
    assert {table: rows(shop.db, table) for table in before} == before
    assert len(endpoint.asked) == 1


@one_engine
def test_hazard_39_a_run_that_loses_its_authority_between_two_requests_asks_no_more(shop, endpoint):
    assignment = governed_work(shop)[2]

    def breaks(handler: Any) -> None:
        lose(shop, "it was canceled", assignment.id)
        send(handler, 503, b"")

    endpoint.answers[:] = [breaks, reply(content="Done.")]
    with pytest.raises(AuthorityLost):
        shop.run_assignment(assignment.id)
    assert len(endpoint.asked) == 1


def test_what_a_model_wants_while_its_authority_lasts_is_done(shop, endpoint):
    with thinking(shop, endpoint, NOTE) as (_, thought, running):
        thought.over.set()
        assert running.result(60).failure_category == "missing_report"
    assert [text.split(" under ")[0] for text in notes(shop)] == ["too late"]


def test_a_pause_ends_the_run_before_its_next_tool(shop, endpoint):
    with thinking(shop, endpoint, NOTE) as (_, thought, running):
        lose(shop, PAUSED, "")
        thought.over.set()
        receipt = running.result(60)
    assert (verdict(receipt), notes(shop), receipt.detail["deliverables"]) == (("failed", "interrupted"), [], [])
    assert "paused" in receipt.summary
    assert receipt.detail["figures"]["model_calls"] == 1


@contextmanager
def held(org: Organization) -> Iterator[tuple[Authority, ExecutionAttempt]]:
    """An attempt that this process holds, as the program knows it."""
    outcome, sow, assignment = governed_work(org)
    lease = fencing.acquire_actor_lease(org.db, OPERATOR, org.process_identity)
    attempt = attempt_on(org.db, assignment.id, lease, None)
    told = Envelope(
        assignment_id=assignment.id,
        attempt_id=attempt.id,
        actor_id=OPERATOR,
        outcome=OutcomeBrief(id=outcome.id, title=outcome.title, desired_state=outcome.desired_state),
        sow=SowBrief(id=sow.id, scope=sow.scope),
    )
    yield Authority(org.db, told), attempt


def tools_of(org: Organization, authority: Authority, attempt: ExecutionAttempt) -> Dispatcher:
    folder = allocate(org.root, attempt.id)
    theirs = configuration.resolve_reference("notebook:tools", org.root)(org.db)
    return dispatcher_for(authority, [*own_tools(folder), *theirs])


def asked(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall("c1", tool, arguments)


WRITES = (asked("note", text="n"), asked("write_deliverable", **TILL), asked("report", status="failed", summary="s"))


PAUSED = "everything was paused"


GONE = ("it was canceled", "it was recovered", "it was taken over", "another epoch began")


@pytest.mark.parametrize("how", [*LOSSES, *GONE, PAUSED])
def test_no_consequential_tool_acts_without_the_attempt(shop, how):
    with held(shop) as (authority, attempt):
        tools = tools_of(shop, authority, attempt)
        lose(shop, how, attempt.assignment_id)
        answers = [tools.invoke(call) for call in WRITES]
        assert [(each.ok, each.effect, each.authority_lost) for each in answers] == [(False, "none", how != PAUSED)] * 3
        assert notes(shop) == []
        assert [*locate(shop.root, attempt.id).out.iterdir()] == []
        assert tools.invoke(asked("list_files")).ok  # to look is nobody's harm
        if how == PAUSED:
            assert authority.stop()
        else:
            assert answer(authority.stop) in {"execution_attempt_lost", "actor_lease_lost", "epoch_replaced"}


def test_each_consequential_tool_acts_under_the_attempt_and_is_told_its_token(shop):
    with held(shop) as (authority, attempt):
        tools = tools_of(shop, authority, attempt)
        assert not authority.stop()
        assert [tools.invoke(call).ok for call in WRITES] == [True] * 3
        assert notes(shop) == [f"n under {attempt.fencing_token}"]


def test_who_cancels_waits_for_a_fenced_write_that_has_passed_its_check(shop):
    with held(shop) as (authority, attempt), ThreadPoolExecutor(1) as pool:
        canceling: list[Future[Any]] = []

        def note(_: Any, now: Any) -> str:
            canceling.append(pool.submit(shop.cancel, attempt.assignment_id, PRINCIPAL))
            until_blocked(shop.db, canceling[0])
            now.connection.execute("INSERT INTO notes (text) VALUES ('in time')")
            return "noted"

        tool = ExecutableTool("note", "Note.", Nothing, note, consequential=True, fenced=True)
        tools = dispatcher_for(authority, [tool])
        assert tools.invoke(asked("note")).ok
        canceling[0].result(60)
        assert notes(shop) == ["in time"]
        assert tools.invoke(asked("note")).authority_lost


def test_a_fenced_write_waits_for_who_cancels_and_is_refused(shop):
    with held(shop) as (authority, attempt), ThreadPoolExecutor(1) as pool:
        tools = tools_of(shop, authority, attempt)
        with shop.db.immediate() as connection:
            assignment = outcomes.get_assignment(connection, attempt.assignment_id)
            runs.revoke(connection, assignment, PRINCIPAL, now=shop.db.now())
            noting = pool.submit(tools.invoke, WRITES[0])
            until_blocked(shop.db, noting)
        assert noting.result(60).authority_lost
        assert notes(shop) == []


def test_a_busy_ledger_is_asked_again_before_a_run_goes_on(shop, location):
    hasty = location.open(patience=timedelta(milliseconds=50))
    with held(shop) as (authority, _), ThreadPoolExecutor(1) as pool:
        with shop.db.transaction() as connection:
            fencing.lock_lease(connection, OPERATOR)
            checking = pool.submit(replace(authority, db=hasty).stop)
            time.sleep(0.5)  # its patience, several times
            assert checking.done() == (location.engine == "sqlite")  # where who reads waits for nobody
        assert not checking.result(60)
    hasty.close()


@one_engine
@pytest.mark.parametrize("name", ["../../../sovereign.toml", "/etc/hostname", "~/x", "way/x", "", "a\0b"])
def test_a_model_reaches_nothing_outside_of_its_run(shop, tmp_path, name):
    with held(shop) as (authority, attempt):
        tools = tools_of(shop, authority, attempt)
        folder = locate(shop.root, attempt.id)
        (tmp_path / "x").write_text("of somebody else")
        for way in (folder.path / "way", folder.out / "way"):
            way.symlink_to(tmp_path)
        assert not tools.invoke(asked("read_file", name=name)).ok
        assert not tools.invoke(asked("write_deliverable", name=name, text="mine")).ok
        assert (tmp_path / "x").read_text() == "of somebody else"
        assert tools.invoke(asked("write_deliverable", name="deep/x", text="mine")).ok
        assert tools.invoke(asked("list_files")).result == [".sovereign-out/deep/x"]
        assert tools.invoke(asked("read_file", name=".sovereign-out/deep/x")).result == "mine"
        assert tools.invoke(asked("read_file", name="nothing")).result is None


# --- crashes --------------------------------------------------------------------------------------------------


def test_a_program_that_dies_over_a_fenced_write_leaves_nothing_of_it(shop, endpoint):
    dying = NOTEBOOK.replace('return "noted"', "__import__('os').kill(__import__('os').getpid(), 9)")
    (shop.root / "notebook.py").write_text(dying)
    assert verdict(run(shop, endpoint, *WORK)) == ("failed", "killed")
    assert notes(shop) == []


def worker(root: str, assignment_id: str) -> None:
    os.environ["SHOP_KEY"] = KEY
    Organization(root).run_assignment(assignment_id)


def programs_below(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children(recursive=True) if "model_program" in str(each.cmdline())]


def test_a_worker_that_is_killed_while_its_model_thinks_leaves_no_program_and_no_result(shop, endpoint):
    thought = Thinking(calls(("note", {"text": "from beyond"})))
    endpoint.answers[:] = [thought]
    assignment = governed_work(shop)[2]
    process = _processes.Process(target=worker, args=(str(shop.root), assignment.id))
    process.start()
    try:
        assert thought.begun.wait(60)
        [program] = programs_below(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)
    finally:
        process.kill()
        process.join()
        thought.over.set()
    assert ledger_facts(shop.db, assignment.id)["assignment"] == "RUNNING"  # the last that anybody knew
    lose(shop, "it was recovered", assignment.id)
    assert ledger_facts(shop.db, assignment.id)["receipts"] == [("failed", "worker_lost")]
    assert notes(shop) == []


# --- settings -------------------------------------------------------------------------------------------------

THINKER = {"kind": "model", "model": "m"}


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"run_as": "nobody"}, "run_as", "could not open the ledger"),
        ({"base_url": "https://user:hunter2@host/v1"}, "base_url", "key_env"),
        ({"base_url": "https://host/v1?key=hunter2"}, "base_url", "key_env"),
        ({"base_url": "file:///etc/passwd"}, "base_url", "https://"),
        ({"base_url": "http://"}, "base_url", "https://"),
        ({"key_env": "sk-hunter2"}, "key_env", "form"),
        ({"limits": {"money": 1.0}}, "", "without prices"),
        ({"limits": {"seconds": 0}}, "limits.seconds", "greater than 0"),
        ({"limits": {"model_calls": 0}}, "limits.model_calls", "greater than or equal to 1"),
        ({"prices": [-1, 2]}, "prices.0", "greater than or equal to 0"),
        ({"tools": "no reference"}, "tools", "form"),
        ({"api_key": "hunter2"}, "api_key", "no such key"),
    ],
    ids=range(12),
)
def test_a_model_that_cannot_be_meant_is_refused_with_its_key_and_no_secret_is_repeated(tmp_path, change, key, words):
    path = tmp_path / configuration.FILE_NAME
    configuration.write_default(tmp_path)
    document = tomlkit.parse(path.read_text())
    document["providers"]["thinker"] = THINKER | change
    path.write_text(tomlkit.dumps(document))
    with pytest.raises(ConfigurationFault) as refused:
        configuration.load(tmp_path)
    place = f"providers.thinker.{key}" if key else "providers.thinker"
    assert f": {place}: " in str(refused.value)
    assert words in str(refused.value)
    assert "hunter2" not in repr(refused.value.document())


def test_the_settings_of_a_model_have_limits_that_nobody_has_to_write():
    limits = limits_of(ModelSettings.model_validate(THINKER).limits)
    assert (limits.model_calls, limits.tool_calls, limits.output_tokens, limits.cost_micros) == (50, 200, 8192, None)
    assert limits_of(LimitSettings(money=2.5)).cost_micros == 2_500_000


@one_engine
@pytest.mark.parametrize(("key", "installed", "verdict"), [(KEY, True, "ok"), ("", True, "warn"), (KEY, False, "warn")])
def test_doctor_says_whether_a_model_could_be_asked_and_shows_no_key(shop, monkeypatch, key, installed, verdict):
    monkeypatch.setenv("SHOP_KEY", key)
    monkeypatch.setattr(model, "is_installed", lambda: installed)
    path = shop.root / "sovereign.toml"
    path.write_text(f'{path.read_text()}\n[assistant]\nmodel = "gpt-5.1"\nkey_env = "SHOP_KEY"\n')
    findings = check_up(shop.root)
    words = {True: "yes", False: "no"}
    told = f"openai package installed: {words[installed]}, SHOP_KEY set: {words[bool(key)]}"
    found = [each for each in findings if each.found.endswith(told)]
    assert [(each.subject, each.found) for each in found] == [("provider", f"thinker: {told}"), ("assistant", told)]
    assert {(each.verdict, bool(each.mend)) for each in found} == {(verdict, verdict == "warn")}
    assert KEY not in repr(findings)
