"""A model as an actor's program: its loop in a guarded process, its tools gated by the attempt, its key nowhere."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomlkit
from conftest import Location
from model_endpoint import KEY, Endpoint, calls, cut, hang_up, reply, send
from support import (
    _processes,
    answer,
    configure,
    eventually,
    governed_work,
    in_a_session,
    judge_and_accept,
    ledger_facts,
    rows,
    until_blocked,
)

from sovereign_agent import assistant_service, configuration, fencing, journal, runs
from sovereign_agent.agent_loop import LoopStatus
from sovereign_agent.clock import micros
from sovereign_agent.configuration import ModelSettings
from sovereign_agent.database import Database, Migration
from sovereign_agent.errors import AuthorityLost, ConfigurationFault, PolicyRefusal
from sovereign_agent.model_program import ENDINGS, Authority, dispatcher_for, own_tools
from sovereign_agent.organization import Organization
from sovereign_agent.providers import build, model
from sovereign_agent.providers.base import PRECEDENCE, Envelope, OutcomeBrief, SowBrief
from sovereign_agent.records import Assignment, ExecutionAttempt, OutcomeState, Receipt, ReceiptStatus
from sovereign_agent.supervisor import tick
from sovereign_agent.tool_dispatch import ExecutableTool, ToolCall
from sovereign_agent.workspace import allocate

pytestmark = pytest.mark.timeout(90)

one_engine = pytest.mark.parametrize("engine", ["sqlite"])
"""For what does not touch the ledger."""

OPERATOR = "operator-course"
PRINCIPAL = "principal-human"
NOTES = (
    Migration(number=1, name="notes", min_writer=1, sql="-- home: notes\nCREATE TABLE notes (text TEXT NOT NULL);"),
)
NOTEBOOK = '''
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
'''
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
        try:
            send(handler, 200, self._body)
        except OSError:
            pass  # whoever asked is gone


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
    ("answers", "limits", "category", "words"),
    [
        ((LIST, reply(content="")), {}, "provider_error", "answered nothing"),
        ((b"<html>",), {}, "provider_error", "not_json"),
        ((b'{"choices": []}',), {}, "provider_error", "no_choices"),
        ((reply(content="x", reason="content_filter"),), {}, "provider_error", "content_filter"),
        (((401, b"no"),), {}, "provider_error", "unauthorized"),
        ((cut,), {"seconds": 0.7}, "provider_error", "cut_stream"),
        ((hang_up,), {"seconds": 0.7}, "provider_error", "connection_failed"),
        ((LIST, LIST), {}, "provider_error", "one id"),
        ((LIST,), {"model_calls": 1}, "actor_reported_failure", "model calls"),
        ((LIST,), {"tool_calls": 0}, "actor_reported_failure", "tool calls"),
        ((LIST,), {"money": 0.000001}, "actor_reported_failure", "money"),
        ((reply(content="x", reason="length"),), {}, "actor_reported_failure", "tokens"),
        ((LIST, lambda _: threading.Event().wait(3)), {"seconds": 1.2}, "provider_error", "timeout"),
    ],
    ids=range(13),
)
def test_hazard_32_what_a_model_does_wrong_is_a_failure_with_a_name(
    shop, endpoint, answers, limits, category, words
):
    receipt = run(shop, endpoint, *answers, **limits)
    assert verdict(receipt) == ("failed", category)
    assert words in receipt.summary


def test_hazard_40_a_server_that_breaks_after_a_tool_has_acted_does_not_make_it_act_again(shop, endpoint):
    note, broken = calls(("note", {"text": "ordered"})), (502, b"")
    receipt = run(shop, endpoint, note, broken, calls(("report", REPORT | {"deliverables": []})), reply(content="Done."))
    assert (verdict(receipt), len(notes(shop))) == (("completed", ""), 1)
    receipt = run(shop, endpoint, note, broken, seconds=3.0)
    assert (verdict(receipt), len(notes(shop))) == (("failed", "provider_error"), 2)
    assert "server_error" in receipt.summary


def test_a_report_that_claims_success_does_not_outweigh_how_the_loop_ended(shop, endpoint):
    receipt = run(shop, endpoint, calls(("report", REPORT | {"deliverables": []})), (401, b"no"))
    assert verdict(receipt) == ("failed", "provider_error")


@one_engine
@pytest.mark.parametrize(
    ("tools", "words"),
    [("nobody:tools", "leads nowhere"), ("double:tools", "two tools have one name")],
)
def test_tools_that_cannot_be_used_are_a_failure_in_words(shop, endpoint, tools, words):
    (shop.root / "double.py").write_text("import notebook\ntools = lambda db: notebook.tools(db) * 2\n")
    configure(shop, lambda document: document["providers"]["thinker"].update(tools=tools))
    receipt = run(shop, endpoint, reply(content="Done."))
    assert verdict(receipt) == ("failed", "provider_unavailable")
    assert words in receipt.summary
    assert endpoint.asked == []


# --- the fence ------------------------------------------------------------------------------------------------

NOTE = calls(("note", {"text": "too late"}), ("write_deliverable", TILL))


def cancel(org: Organization, location: Location, assignment_id: str) -> None:
    org.cancel(assignment_id, PRINCIPAL)


def recover(org: Organization, location: Location, assignment_id: str) -> None:
    """What is left after the worker has been silent for too long, and a supervisor has looked."""
    with org.db.transaction() as connection:
        connection.execute("UPDATE execution_attempts SET expires_at = 1, deadline = 1 WHERE status = 'ACTIVE'")
    assert tick(org).recovered_assignments


def lose_the_lease(org: Organization, location: Location, assignment_id: str) -> None:
    with org.db.transaction() as connection:
        token = fencing.next_token(connection)
        connection.execute("UPDATE actor_leases SET fencing_token = ?, process_identity = 'proc_else'", (token,))


@pytest.mark.parametrize("lose", [cancel, recover, lose_the_lease])
def test_what_a_model_wants_after_its_authority_was_lost_is_refused_and_nothing_is_recorded(
    shop, endpoint, location, lose
):
    with thinking(shop, endpoint, NOTE) as (assignment, thought, running):
        in_a_session(location, lambda db: None)
        lose(shop, location, assignment.id)
        before = {table: rows(shop.db, table) for table in ("receipts", "events", "assignments")}
        thought.over.set()
        with pytest.raises(AuthorityLost):
            running.result(60)
    assert notes(shop) == []
    assert {table: rows(shop.db, table) for table in before} == before
    assert len(endpoint.asked) == 1


def test_what_a_model_wants_while_its_authority_lasts_is_done(shop, endpoint):
    with thinking(shop, endpoint, NOTE) as (_, thought, running):
        thought.over.set()
        assert running.result(60).failure_category == "missing_report"
    assert [text.split(" under ")[0] for text in notes(shop)] == ["too late"]


def test_a_pause_ends_the_run_before_its_next_tool(shop, endpoint):
    with thinking(shop, endpoint, NOTE) as (_, thought, running):
        assistant_service.pause(shop.db, PRINCIPAL, "the till is locked")
        thought.over.set()
        receipt = running.result(60)
    assert (verdict(receipt), notes(shop), receipt.detail["deliverables"]) == (("failed", "interrupted"), [], [])
    assert "paused" in receipt.summary
