"""The models: recorded turns that play alike each time, and a live one against a server that misbehaves on purpose."""

from __future__ import annotations

import gzip
import json
import sys
import time
import types
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_endpoint import KEY, Endpoint, cut, endless, hang_up, reply

from reference_organizations.store.agent import NoArguments, seed_lucy, shop_dispatcher
from sovereign_agent import llm_lab
from sovereign_agent.agent_loop import Limits, LoopResult, run_loop
from sovereign_agent.errors import AuthorityLost, ConfigurationFault, ProviderFault
from sovereign_agent.llm_lab import (
    DEFAULT_MODEL,
    LiveModel,
    ScriptedModel,
    asked_seconds,
    build_model,
    describe,
    read_reply,
    resolve_api_key,
    scripted_turn,
    tool_trace,
)
from sovereign_agent.tool_dispatch import Dispatcher, ExecutableTool

LIMITS = Limits(model_calls=4, tool_calls=8, seconds=60, output_tokens=77)
ASK = [{"role": "user", "content": "Look."}]


# --- the endpoint -------------------------------------------------------------------------------------------


@pytest.fixture
def naps() -> list[float]:
    return []


def live(endpoint: Endpoint, naps: list[float], **options: Any) -> LiveModel:
    return LiveModel("some-model", KEY, endpoint.url, **({"sleep": naps.append} | options))


def run(endpoint: Endpoint, naps: list[float], *answers: Any, limits: Limits = LIMITS, **options: Any) -> LoopResult:
    endpoint.answers[:] = answers
    tool = ExecutableTool("look", "Look.", NoArguments, lambda _: "fine")
    model = live(endpoint, naps, **options)
    try:
        result = run_loop(model, Dispatcher([tool], allowed={"look"}), ASK, limits=limits)
    finally:
        model._client.close()
    assert KEY not in repr((result, model))
    return result


LOOK = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def test_a_live_model_is_asked_with_the_conversation_the_tools_and_the_bound(endpoint, naps):
    result = run(endpoint, naps, reply(content=None, tool_calls=LOOK, reason="tool_calls"), reply(content="Fine."))
    assert (result.status, result.answer, result.model_calls, naps) == ("COMPLETED", "Fine.", 2, [])
    assert (result.input_tokens, result.output_tokens, result.cost_micros) == (22, 14, None)
    assert endpoint.keys == [f"Bearer {KEY}"] * 2
    first, second = endpoint.asked
    assert (first["model"], first["max_tokens"], first["messages"]) == ("some-model", 77, ASK)
    assert first["tools"][0]["function"]["name"] == "look"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]


def test_what_a_reply_costs_is_told_when_the_prices_are_known(endpoint, naps):
    assert run(endpoint, naps, reply(content="Fine."), prices=(1.25, 10)).cost_micros == 84


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b"", "empty_body"),
        (b" \n", "empty_body"),
        (b"<html><body>Bad gateway</body></html>", "not_json"),
        (b'{"choices": [', "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"[]", "malformed_reply"),
        (b"null", "malformed_reply"),
        (b"3", "malformed_reply"),
        (b'{"choices": []}', "no_choices"),
        (b'{"choices": null}', "no_choices"),
        (b"{}", "no_choices"),
        (b'{"choices": {"a": 1}}', "malformed_reply"),
        (b'{"choices": ["x"]}', "malformed_reply"),
        (b'{"choices": [null]}', "malformed_reply"),
        (b'{"error": {"message": "x"}}', "error_reply"),
        (b'{"choices": [{"message": null, "finish_reason": "stop"}]}', "no_message"),
        (b'{"choices": [{"message": {"tool_calls": [3]}, "finish_reason": "stop"}]}', "malformed_reply"),
        (b'{"choices": [{"message": {"tool_calls": 3}, "finish_reason": "stop"}]}', "malformed_reply"),
        (b'{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}', "malformed_reply"),
        (b'{"choices": [{"message": {"content": "x"}}]}', "no_finish_reason"),
        (reply(content="x", reason="content_filter"), "content_filter"),
        (reply(content="x", reason="something_new"), "something_new"),
    ],
    ids=range(22),
)
def test_hazard_32_a_200_that_is_no_answer_is_a_failure_with_a_name_and_is_asked_once(endpoint, naps, body, failure):
    result = run(endpoint, naps, body)
    assert (result.status, result.failure) == ("MODEL_FAILED", failure)
    assert (len(endpoint.asked), naps) == (1, [])


@pytest.mark.parametrize(
    ("message", "status", "answer"),
    [
        ({"content": [{"type": "text", "text": "Fi"}, {"type": "text", "text": "ne."}]}, "COMPLETED", "Fine."),
        ({"content": "Fine.", "tool_calls": []}, "COMPLETED", "Fine."),
        ({"content": "Fine.", "tool_calls": None}, "COMPLETED", "Fine."),
        ({"content": None, "refusal": "I may not."}, "COMPLETED", "I may not."),
        ({"content": None}, "EMPTY_REPLY", ""),
    ],
)
def test_hazard_32_an_odd_answer_that_can_be_understood_is_understood(endpoint, naps, message, status, answer):
    result = run(endpoint, naps, reply(**message))
    assert (result.status, result.answer) == (status, answer)


@given(
    st.binary()
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(["choices", "message", "content", "tool_calls", "function", "usage", "error"]), x
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_hazard_32_no_body_whatever_is_anything_but_a_turn_or_a_named_failure(body):
    try:
        read_reply(body, (1, 1))
    except ProviderFault as fault:
        assert fault.category  # noqa: PT017 - a turn is right as well


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": -1, "completion_tokens": 1}, {"prompt_tokens": "x"}, 3])
def test_books_that_make_no_sense_are_no_books(usage):
    body = json.loads(reply(content="x")) | {"usage": usage}
    assert read_reply(json.dumps(body).encode()).usage is None
    assert read_reply(reply(content="x")).usage is not None


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ((503, b"busy"), "server_error"),
        ((502, b"<html>"), "server_error"),
        ((429, b'{"error": {"message": "slow down"}}'), "rate_limited"),
        ((408, b"late"), "timeout"),
        (cut, "cut_stream"),
        (hang_up, "connection_failed"),
    ],
    ids=["503", "502", "429", "408", "cut", "hang up"],
)
def test_what_may_pass_is_asked_again_and_not_for_ever(endpoint, naps, answer, failure):
    result = run(endpoint, naps, answer)
    assert (result.status, result.failure, result.model_calls) == ("MODEL_FAILED", failure, 1)
    assert (len(endpoint.asked), naps) == (llm_lab.ATTEMPTS, [1, 2, 4])
    assert run(endpoint, naps, answer, answer, reply(content="Fine.")).status == "COMPLETED"


@pytest.mark.parametrize(
    ("status", "failure"),
    [(400, "request_refused"), (404, "request_refused"), (401, "unauthorized"), (403, "unauthorized")],
)
def test_what_will_not_pass_is_asked_once_and_the_key_is_not_in_the_record(endpoint, naps, status, failure):
    result = run(endpoint, naps, (status, f"the key {KEY} is not good".encode()))
    assert (result.status, result.failure, len(endpoint.asked), naps) == ("MODEL_FAILED", failure, 1, [])
    assert "the key [key] is not good" in result.detail


def test_a_reply_without_end_is_given_up(endpoint, naps):
    result = run(endpoint, naps, endless)
    assert (result.failure, len(endpoint.asked)) == ("reply_too_large", 1)


# --- hazard 39 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "naps_taken"),
    [
        ("5", [5]), ("0", [1]), ("-1", [1]), ("2abc", [1]), ("", [1]), ("nan", [1]), ("inf", [1]), ("1e400", [1]),
        ("999999999999", [60]), ("Sun, 06 Nov 1994 08:49:37 GMT", [1]), ("Fri, 31 Dec 9999 23:59:59 GMT", [60]),
        ("Fri, 99 Dec 9999 23:59:59 GMT", [1]),
    ],
    ids=range(12),
)  # fmt: skip
def test_hazard_39_a_hostile_wait_is_bounded(endpoint, naps, header, naps_taken):
    busy = (429, b"slow down", [("Retry-After", header)])
    result = run(endpoint, naps, busy, reply(content="Fine."), limits=replace(LIMITS, seconds=600))
    assert (result.status, naps) == ("COMPLETED", naps_taken)


def test_hazard_39_two_waits_at_once_are_none(endpoint, naps):
    busy = (429, b"slow down", [("Retry-After", "5"), ("Retry-After", "7")])
    assert (run(endpoint, naps, busy, reply(content="Fine.")).status, naps) == ("COMPLETED", [1])


def test_hazard_39_a_date_asks_for_the_time_until_then():
    soon = datetime.now(UTC) + timedelta(seconds=30)
    assert 25 < asked_seconds(format_datetime(soon, usegmt=True)) <= 30
    assert asked_seconds("Sun, 06 Nov 1994 08:49:37") == 0


def test_hazard_39_the_time_of_the_run_wins_over_the_wait_and_the_last_word_is_kept(endpoint, naps):
    busy = (429, b"come back tomorrow", [("Retry-After", "50")])
    result = run(endpoint, naps, busy, limits=replace(LIMITS, seconds=20))
    assert (result.status, result.failure, naps) == ("MODEL_FAILED", "rate_limited", [])
    assert "come back tomorrow" in result.detail


def test_hazard_39_a_claim_that_is_lost_while_waiting_ends_the_run_as_that(endpoint, naps):
    def renewing(_: float) -> None:
        raise AuthorityLost("worker claim expired or superseded")

    result = run(endpoint, naps, (429, b""), sleep=renewing)
    assert (result.status, len(endpoint.asked)) == ("AUTHORITY_LOST", 1)


def test_hazard_39_who_is_to_stop_while_it_waits_does_not_ask_again(endpoint, naps):
    result = run(endpoint, naps, (429, b"", [("Retry-After", "30")]), sleep=lambda _: True)
    assert (result.status, result.failure, len(endpoint.asked)) == ("MODEL_FAILED", "rate_limited", 1)


def test_a_server_that_does_not_answer_is_left_at_the_time_of_the_run(endpoint, naps):
    def late(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(3)
        hang_up(handler)

    started = time.monotonic()
    result = run(endpoint, naps, late, limits=replace(LIMITS, seconds=0.5))
    assert (result.status, result.failure) == ("MODEL_FAILED", "timeout")
    assert time.monotonic() - started < 2.5


def test_hazard_39_headers_that_come_in_drops_do_not_outlast_the_time_of_the_run(endpoint, naps):
    def drops(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drops: ")
        try:
            for _ in range(100):
                handler.wfile.write(b".")
                time.sleep(0.03)
        except OSError:
            pass

    started = time.monotonic()
    result = run(endpoint, naps, drops, limits=replace(LIMITS, seconds=0.5))
    assert (result.status, result.failure) == ("MODEL_FAILED", "timeout")
    assert time.monotonic() - started < 1.5


def test_a_refusal_without_end_is_read_to_its_beginning_only(endpoint, naps):
    def refusal(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(400)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"no " * 2**14)
        except OSError:
            pass

    result = run(endpoint, naps, refusal, limits=replace(LIMITS, seconds=5))
    assert (result.failure, result.detail[-600:].count("no ") > 100) == ("request_refused", True)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_the_key_goes_nowhere_else(endpoint, naps, status):
    elsewhere = Endpoint()
    try:
        elsewhere.answers[:] = [reply(content="Caught it.")]
        away = (status, b"", [("Location", f"{elsewhere.url}/chat/completions")])
        result = run(endpoint, naps, away)
        assert (result.status, result.failure, elsewhere.keys) == ("MODEL_FAILED", "request_refused", [])
    finally:
        elsewhere.close()


def test_a_packed_reply_is_not_unpacked_whatever_it_would_become(endpoint, naps):
    bomb = gzip.compress(bytes(2**26))
    result = run(endpoint, naps, (200, bomb, [("Content-Encoding", "gzip")]))
    assert (result.status, result.failure) == ("MODEL_FAILED", "not_json")


def test_a_key_in_a_reply_is_taken_out_before_anybody_reads_it(endpoint, naps):
    assert run(endpoint, naps, reply(content=f"Yours is {KEY}.")).answer == "Yours is [key]."


@pytest.mark.parametrize("key", ["k\u00e9y", "one\ntwo", "\0"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(key):
    with pytest.raises(ConfigurationFault) as refused:
        LiveModel("some-model", key)
    assert refused.value.category == "invalid_key"
    assert key not in repr(refused.value.document())


# --- which model --------------------------------------------------------------------------------------------


def test_without_a_key_the_model_is_the_scripted_one_and_says_so(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert resolve_api_key() is None
    assert build_model([scripted_turn("Hello.")], model=DEFAULT_MODEL).source == "scripted"
    monkeypatch.setenv("OPENAI_API_KEY", "  ")
    assert resolve_api_key() is None


def test_with_a_key_the_model_is_the_live_one(monkeypatch, endpoint):
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    model = build_model([scripted_turn("Hello.")])
    assert (model.source, model.model, model.base_url) == ("live", "gpt-5.1", endpoint.url)
    assert KEY not in repr(model)
    model._client.close()


def test_model_and_endpoint_come_from_where_the_key_does_and_what_is_given_comes_first(monkeypatch, endpoint):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_MODEL", "another-model")
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    found, given_first = build_model([]), build_model([], model="mine", base_url="http://127.0.0.1:1/v1")
    assert (found.model, found.base_url) == ("another-model", endpoint.url)
    assert (given_first.model, given_first.base_url) == ("mine", "http://127.0.0.1:1/v1")
    for model in (found, given_first):
        model._client.close()


def test_a_failing_live_model_is_never_replaced_by_the_recording(monkeypatch, endpoint):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    endpoint.answers[:] = [(401, b"no")]
    model = build_model([scripted_turn("Hello.")], base_url=endpoint.url)
    result = run_loop(model, Dispatcher([], allowed=()), ASK, limits=LIMITS)
    assert (result.status, result.answer) == ("MODEL_FAILED", "")
    assert "tools" not in endpoint.asked[0]
    model._client.close()


def test_colabs_secret_comes_before_the_environment_and_its_refusal_is_no_key(monkeypatch):
    userdata = types.ModuleType("google.colab.userdata")
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setitem(sys.modules, "google.colab.userdata", userdata)
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    userdata.get = lambda name: f"secret {name}"
    assert resolve_api_key() == "secret OPENAI_API_KEY"
    model = build_model([])
    assert (model.model, model.base_url) == ("secret OPENAI_MODEL", "secret OPENAI_BASE_URL")
    model._client.close()
    userdata.get = lambda _: 1 / 0
    assert resolve_api_key() == "from the environment"


def test_a_key_without_the_package_is_said_and_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ConfigurationFault) as refused:
        build_model([scripted_turn("Hello.")])
    assert refused.value.category == "openai_missing"


# --- recorded turns and Lucy's shop ---------------------------------------------------------------------------

TURNS = [scripted_turn(calls=[{"name": "list_stock", "arguments": {}}]), scripted_turn("Vanilla is low.")]


def test_a_recording_plays_alike_each_time_and_goes_on_where_another_life_stopped(db):
    seed_lucy(db)
    model = ScriptedModel(TURNS)
    first = run_loop(model, shop_dispatcher(db), ASK, limits=LIMITS)
    assert run_loop(model, shop_dispatcher(db), ASK, limits=LIMITS) == first
    assert (
        run_loop(ScriptedModel(TURNS), shop_dispatcher(db), first.messages[:3], limits=LIMITS).messages
        == first.messages
    )
    again = run_loop(model, shop_dispatcher(db), [*first.messages, *ASK], limits=LIMITS)
    assert (again.status, len(tool_trace(again))) == ("COMPLETED", 2)


def test_a_recording_that_has_ended_is_a_failure_with_a_name():
    result = run_loop(ScriptedModel([]), Dispatcher([], allowed=()), ASK, limits=LIMITS)
    assert (result.status, result.failure) == ("MODEL_FAILED", "script_ended")


def test_lucys_stock_is_read_as_it_stands_and_seeding_again_changes_nothing(db):
    seed_lucy(db)
    seed_lucy(db)
    result = run_loop(ScriptedModel(TURNS), shop_dispatcher(db), ASK, limits=LIMITS)
    stock = {each["name"].split()[0]: (each["available"], each["needed"]) for each in tool_trace(result)[0]["result"]}
    assert (stock["Vanilla"], stock["Strawberry"]) == ((2, 6), (1, 4))
    assert stock["Chocolate"][0] >= stock["Chocolate"][1]
    assert "urgent" not in describe(result, "scripted")


class Finding(NoArguments):
    text: str


def test_the_same_recording_tells_the_same_story_under_a_lost_authority_and_writes_nothing(db):
    seed_lucy(db)
    current, written, gate = [True], [], []

    def before_write(call: Any) -> None:
        gate.append(call.name)
        if not current[0]:
            raise PermissionError("runtime paused or replaced by restore")

    tools = [
        shop_dispatcher(db).tools["list_stock"],
        ExecutableTool("status", "", NoArguments, lambda _: {"current": current[0]}),
        ExecutableTool("record", "", Finding, lambda finding: written.append(finding.text), consequential=True),
    ]
    names = [("list_stock", {}), ("record", {"text": "a"}), ("record", {"text": "b", "urgent": True})]
    names += [("record", {"text": "b"}), ("status", {})]
    turns = [scripted_turn(calls=[{"name": name, "arguments": given}]) for name, given in names]
    dispatcher = Dispatcher(tools, before_write=before_write, allowed={each.name for each in tools})
    runs: list[LoopResult] = []
    for now in (True, False):
        current[0] = now
        runs.append(run_loop(ScriptedModel([*turns, TURNS[1]]), dispatcher, ASK, limits=replace(LIMITS, model_calls=8)))
    good, stale = (tool_trace(each) for each in runs)
    assert [each.status for each in runs] == ["COMPLETED", "COMPLETED"]
    assert [step["ok"] for step in good] == [True, True, False, True, True]
    assert [step["ok"] for step in stale] == [True, False, False, False, True]
    assert [step["result"] for step in stale[1:4]] == ["tool_failed", "invalid_arguments", "tool_failed"]
    assert (stale[4]["result"], written, len(gate)) == ({"current": False}, ["a", "b"], 4)
    assert runs[0].answer == runs[1].answer


def test_a_run_is_described_with_its_status_its_calls_and_its_answer(db):
    seed_lucy(db)
    turns = [scripted_turn(calls=[{"name": "list_stock", "arguments": {"urgent": True}}]), TURNS[1]]
    told = describe(run_loop(ScriptedModel(turns), shop_dispatcher(db), ASK, limits=LIMITS), "scripted")
    assert told.splitlines() == [
        "[scripted] COMPLETED: 2 model calls, 1 tool calls",
        '  refused list_stock {"urgent": true} -> invalid_arguments',
        "  answer  Vanilla is low.",
    ]
