"""The agent loop: bounded in every direction, each call answered exactly once, and nothing run that was cut off."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from support import BUMP, bump, child, counter

from sovereign_agent.agent_loop import Limits, LoopResult, Message, Turn, Usage, paired, run_loop
from sovereign_agent.errors import AuthorityLost, Contention, ProviderFault
from sovereign_agent.llm_lab import ScriptedModel, scripted_turn, tool_trace
from sovereign_agent.tool_dispatch import Dispatcher, ExecutableTool, Fence, Occasion, ToolCall

LIMITS = Limits(model_calls=12, tool_calls=12, seconds=60, output_tokens=100)
ASK: list[Message] = [{"role": "system", "content": "Help Lucy."}, {"role": "user", "content": "Order tea."}]
DONE = scripted_turn("Done.")


class Amount(BaseModel):
    model_config = ConfigDict(extra="forbid")
    amount: int = 1


class Shop:
    """A tool that orders, one that looks, and what they were asked; the gate does what it is told."""

    def __init__(self, gate: Callable[..., Any] = lambda _: None, look: Callable[..., Any] = lambda _: "fine") -> None:
        self.orders: list[int] = []
        self.operations: list[str] = []
        tools = [
            ExecutableTool("order", "Order.", Amount, self.order, consequential=True, informed=True),
            ExecutableTool("look", "Look.", Amount, look),
            ExecutableTool("wait", "Wait.", Amount, look, polling=True),
        ]
        self.dispatcher = Dispatcher(tools, allowed={tool.name for tool in tools}, before_write=gate)

    def order(self, arguments: Amount, now: Occasion) -> str:
        self.orders.append(arguments.amount)
        self.operations.append(now.operation_id)
        return f"ordered {arguments.amount}"


class Strict:
    """A model that plays turns and is as strict about what it is sent as endpoints are."""

    def __init__(self, turns: Sequence[Turn | Exception]) -> None:
        self.turns = list(turns)
        self.asked: list[dict[str, Any]] = []

    def complete(self, messages: Sequence[Message], tools: Any, *, output_tokens: int, deadline: float) -> Turn:
        follows_the_rules(messages)
        self.asked.append({"messages": messages, "tools": tools, "output_tokens": output_tokens, "deadline": deadline})
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn


def follows_the_rules(messages: Sequence[Message]) -> None:
    """Fail unless every call has exactly one answer, right behind it and in its order, and all of it is sound JSON."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert waiting, "an answer to nothing"
            assert message["tool_call_id"] == waiting.pop(0)
            continue
        assert not waiting, f"{waiting} were left unanswered"
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            assert call["function"]["name"].replace("_", "").replace("-", "").isalnum()
            waiting.append(call["id"])
    assert not waiting, f"{waiting} were left unanswered"
    json.dumps(list(messages), ensure_ascii=False).encode()


def calls(*asked: tuple[str, Any], reason: str = "tool_calls") -> Turn:
    return replace(
        scripted_turn(calls=[{"name": name, "arguments": given} for name, given in asked]), finish_reason=reason
    )


def order(amount: int) -> Turn:
    return calls(("order", {"amount": amount}))


def run(turns: Sequence[Any], shop: Shop | None = None, limits: Limits = LIMITS, **options: Any) -> LoopResult:
    result = run_loop(Strict(turns), (shop or Shop()).dispatcher, ASK, limits=limits, **options)
    follows_the_rules(result.messages)
    return result


def codes(result: LoopResult) -> list[str]:
    return ["ok" if step["ok"] else step["result"] for step in tool_trace(result)]


# --- the good way -------------------------------------------------------------------------------------------


def test_a_loop_ends_with_the_first_reply_that_calls_nothing():
    shop = Shop()
    result = run([order(3), calls(("look", {}), ("order", {"amount": 4})), DONE], shop)
    assert (result.status, result.answer, result.failure) == ("COMPLETED", "Done.", "")
    assert (result.model_calls, result.tool_calls, shop.orders) == (3, 3, [3, 4])
    assert codes(result) == ["ok", "ok", "ok"]


def test_what_it_was_given_stays_as_it_was():
    before = json.dumps(ASK)
    result = run([order(3), DONE])
    assert json.dumps(ASK) == before
    assert result.messages[: len(ASK)] == ASK


def test_each_message_is_observed_as_it_comes_and_a_reply_before_its_calls_run():
    shop, seen = Shop(), []
    result = run([order(3), DONE], shop, observe=lambda message: seen.append((message["role"], len(shop.orders))))
    assert seen == [("assistant", 0), ("tool", 1), ("assistant", 1)]
    assert len(result.messages) == len(ASK) + 3


def test_the_reason_of_a_failure_goes_to_the_record_and_never_to_the_model():
    kept: list[tuple[str, str]] = []
    shop = Shop(look=lambda _: open("/nowhere/secret-place"))  # noqa: PTH123, SIM115
    result = run([calls(("look", {})), DONE], shop, evidence=lambda call, answer: kept.append((call.id, answer.detail)))
    assert "secret-place" in kept[0][1]
    assert "secret-place" not in json.dumps(result.messages)


# --- limits -------------------------------------------------------------------------------------------------


def test_the_model_is_asked_as_often_as_allowed_and_not_once_more():
    turns = [order(amount) for amount in range(5)]
    stopped = run(turns, limits=replace(LIMITS, model_calls=3))
    assert (stopped.status, stopped.model_calls) == ("MODEL_CALL_LIMIT", 3)
    model = Strict([*turns[:3], DONE])
    result = run_loop(model, Shop().dispatcher, ASK, limits=replace(LIMITS, model_calls=4))
    assert (result.status, result.model_calls, len(model.asked)) == ("COMPLETED", 4, 4)


def test_as_many_calls_run_as_allowed_and_the_next_is_answered_as_not_run():
    shop = Shop()
    three = calls(*(("order", {"amount": amount}) for amount in range(3)))
    result = run([three], shop, replace(LIMITS, tool_calls=2))
    assert (result.status, result.tool_calls, shop.orders) == ("TOOL_LIMIT", 2, [0, 1])
    assert codes(result) == ["ok", "ok", "not_run"]
    assert run([three, DONE], limits=replace(LIMITS, tool_calls=3)).status == "COMPLETED"


@pytest.mark.parametrize(("seconds", "status"), [(10, "TIME_LIMIT"), (11, "COMPLETED")])
def test_at_its_time_no_further_call_begins(seconds, status):
    now = [100.0]
    shop = Shop(look=lambda _: now.__setitem__(0, now[0] + 10) or "slow")
    turns = [calls(("look", {}), ("order", {"amount": 7})), DONE]
    result = run(turns, shop, replace(LIMITS, seconds=seconds), monotonic=lambda: now[0])
    assert (result.status, shop.orders) == (status, [7] if status == "COMPLETED" else [])


def test_tokens_are_counted_exactly_and_the_model_is_told_what_is_left():
    model = Strict([replace(order(1), usage=Usage(50, 30, 7)), replace(order(2), usage=Usage(70, 20, 8)), DONE])
    result = run_loop(model, Shop().dispatcher, ASK, limits=replace(LIMITS, total_tokens=170, cost_micros=100))
    assert (result.status, result.model_calls) == ("TOKEN_LIMIT", 2)
    assert (result.input_tokens, result.output_tokens, result.cost_micros) == (120, 50, 15)
    assert [asked["output_tokens"] for asked in model.asked] == [100, 90]


def test_a_model_that_does_not_count_is_charged_the_most_it_can_have_used():
    result = run([order(1), DONE], limits=replace(LIMITS, total_tokens=100))
    assert (result.status, result.output_tokens) == ("TOKEN_LIMIT", 100)
    assert result.input_tokens >= len(json.dumps(ASK)) - 10


def test_money_ends_the_run_and_so_does_a_price_that_nobody_tells():
    paid = [replace(order(amount), usage=Usage(1, 1, 40)) for amount in range(4)]
    result = run(paid, limits=replace(LIMITS, cost_micros=80))
    assert (result.status, result.failure, result.model_calls) == ("TOKEN_LIMIT", "cost_limit", 2)
    result = run([replace(order(1), usage=Usage(1, 1)), DONE], limits=replace(LIMITS, cost_micros=80))
    assert (result.status, result.failure, result.cost_micros) == ("MODEL_FAILED", "cost_unknown", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1])
def test_hazard_35_a_limit_that_limits_nothing_is_refused(value):
    with pytest.raises(ValueError, match="limit"):
        replace(LIMITS, seconds=value)
    with pytest.raises(ValueError, match="limit"):
        replace(LIMITS, cost_micros=value)


def test_hazard_35_a_model_cannot_give_tokens_back():
    class Generous:
        def complete(self, *_: Any, **__: Any) -> Turn:
            return Turn("Done.", usage=Usage(-1000, 1))

    assert run_loop(Generous(), Shop().dispatcher, ASK, limits=LIMITS).failure == "ValueError"


def test_a_conversation_that_is_too_long_is_not_sent():
    model = Strict([DONE])
    size = sum(len(json.dumps(message)) for message in ASK)
    assert (
        run_loop(model, Shop().dispatcher, ASK, limits=replace(LIMITS, context_bytes=size - 1)).status
        == "CONTEXT_LIMIT"
    )
    assert model.asked == []
    assert run_loop(model, Shop().dispatcher, ASK, limits=replace(LIMITS, context_bytes=size)).status == "COMPLETED"


def test_hazard_41_giant_results_are_cut_for_the_whole_turn_and_the_loop_goes_on():
    kept: list[str] = []
    model = Strict([calls(("look", {"amount": 1}), ("look", {"amount": 2})), DONE])
    shop = Shop(look=lambda _: "\N{SNOWMAN}" * 1_000_000)
    limits = replace(LIMITS, context_bytes=20_000, result_bytes=5_000)
    result = run_loop(model, shop.dispatcher, ASK, limits=limits, evidence=lambda _, answer: kept.append(answer.detail))
    assert (result.status, codes(result)) == ("COMPLETED", ["result_too_large", "result_too_large"])
    assert [len(text) for text in kept] == [1_000_002, 1_000_002]
    assert len(json.dumps(model.asked[1]["messages"], ensure_ascii=False).encode()) < 6_000


def test_hazard_41_two_results_that_fit_one_by_one_share_what_one_turn_may_have():
    shop = Shop(look=lambda _: "x" * 600)
    turn = calls(("look", {"amount": 1}), ("look", {"amount": 2}))
    assert codes(run([turn, DONE], shop, replace(LIMITS, result_bytes=1000))) == ["ok", "result_too_large"]
    assert codes(run([turn, DONE], shop, replace(LIMITS, result_bytes=1400))) == ["ok", "ok"]


def test_the_account_of_the_context_looks_at_each_message_once(monkeypatch):
    measured: Counter[int] = Counter()
    from sovereign_agent import agent_loop  # noqa: PLC0415

    size = agent_loop._size
    monkeypatch.setattr(agent_loop, "_size", lambda message: measured.update([id(message)]) or size(message))
    result = run([*(order(amount) for amount in range(10)), DONE])
    assert {measured[id(message)] for message in result.messages} == {1}


# --- endings that the model brings about ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_reply_without_text_and_calls_is_no_completion(text):
    assert run([scripted_turn(text)]).status == "EMPTY_REPLY"


@pytest.mark.parametrize("arguments", ['{"amount": 12}', '{"amount": 12'])
def test_hazard_26_what_the_token_limit_cut_is_never_run_even_where_it_can_be_read(arguments):
    shop = Shop()
    result = run([calls(("order", arguments), reason="length"), order(1250), DONE], shop)
    assert (result.status, shop.orders) == ("COMPLETED", [1250])
    assert codes(result) == ["truncated", "ok"]


def test_hazard_26_arguments_cut_under_a_reason_that_lies_are_refused_and_replayed_as_sound_json():
    shop = Shop()
    result = run([calls(("order", '{"amount": 1')), order(2), DONE], shop)
    assert (codes(result), shop.orders) == (["invalid_arguments", "ok"], [2])
    assert tool_trace(result)[0]["arguments"] == {"unreadable": '{"amount": 1'}


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_hazard_26_whole_arguments_run(reason):
    shop = Shop()
    assert run([calls(("order", '{"amount": 12}'), reason=reason), DONE], shop).status == "COMPLETED"
    assert shop.orders == [12]


def test_a_text_that_the_token_limit_cut_is_no_completion():
    result = run([replace(scripted_turn("Half a sen"), finish_reason="length")])
    assert (result.status, result.answer) == ("TOKEN_LIMIT", "Half a sen")


@pytest.mark.parametrize("reason", ["content_filter", "error", "", "x" * 5000])
def test_hazard_32_any_other_reason_to_stop_is_a_failure_and_nothing_runs(reason):
    shop = Shop()
    result = run([calls(("order", {"amount": 1}), reason=reason)], shop)
    assert (result.status, shop.orders) == ("MODEL_FAILED", [])
    assert 0 < len(result.failure) <= 60


def test_hazard_27_the_same_malformed_call_ends_the_run_after_three():
    shop = Shop()
    result = run([calls(("order", '{"amount": listt"}'))] * 5, shop)
    assert (result.status, result.model_calls, shop.orders) == ("LOOP_DETECTED", 3, [])
    assert codes(result) == ["invalid_arguments"] * 3


def test_hazard_28_every_wrong_shape_is_answered_and_the_loop_lives():
    shapes: list[Any] = ["[]", "3", "true", '"\\"x\\""', '{"amount": 1, "amount": 2}', [1], 3, "NaN", "[" * 9000]
    shop = Shop()
    result = run([*(calls(("order", shape)) for shape in shapes), order(5), DONE], shop)
    assert (result.status, shop.orders) == ("COMPLETED", [5])
    assert codes(result) == ["invalid_arguments"] * len(shapes) + ["ok"]


def test_hazard_28_arguments_nested_without_end_are_answered_too():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    turn = Turn(calls=(ToolCall("c1", "order", deep),), finish_reason="tool_calls")
    assert codes(run([turn, DONE])) == ["invalid_arguments"]


@pytest.mark.parametrize(
    "name", ["order ", "ORDER", "functions.order", "../x", "", "x" * 10_000, "a\x00b"], ids=range(7)
)
def test_hazard_29_a_tool_that_does_not_exist_counts_and_its_name_is_kept_short(name):
    shop = Shop()
    result = run([calls((name, {"amount": 1}))] * 5, shop)
    assert (result.status, result.tool_calls, shop.orders) == ("LOOP_DETECTED", 3, [])
    assert len(json.dumps(result.messages)) < 2500


@pytest.mark.parametrize("look", [lambda _: "fine", lambda _: 1 / 0], ids=["success", "failure"])
def test_hazard_38_the_same_call_with_the_same_answer_ends_the_run(look):
    turns = [calls(("look", '{"amount": 1}')), calls(("look", '{ "amount":1 }')), calls(("look", {"amount": 1}))]
    result = run([*turns, DONE], Shop(look=look))
    assert (result.status, result.tool_calls) == ("LOOP_DETECTED", 3)
    assert len(tool_trace(result)) == 3


def test_hazard_38_going_to_and_fro_is_going_round():
    result = run([calls(("look", {"amount": turn % 2})) for turn in range(10)])
    assert (result.status, result.tool_calls) == ("LOOP_DETECTED", 5)


def test_hazard_38_a_nonce_each_time_runs_into_the_hard_limits():
    result = run([calls(("look", {"amount": turn})) for turn in range(100)], limits=replace(LIMITS, tool_calls=6))
    assert (result.status, result.tool_calls) == ("TOOL_LIMIT", 6)


def test_hazard_38_a_declared_poll_and_a_call_with_new_answers_are_no_loop():
    numbers = iter(range(100))
    shop = Shop(look=lambda _: next(numbers))
    assert run([*[calls(("look", {}))] * 6, DONE], shop).status == "COMPLETED"
    assert run([*[calls(("wait", {}))] * 6, DONE]).status == "COMPLETED"


@pytest.mark.parametrize(
    "turns",
    [
        [Turn(calls=(ToolCall("c", "order", {}), ToolCall("c", "order", {})), finish_reason="tool_calls")],
        [Turn(calls=(ToolCall("c", "look", {}),)), Turn(calls=(ToolCall("c", "order", {}),))],
    ],
    ids=["in one reply", "in two"],
)
def test_a_call_id_that_comes_twice_ends_the_run_before_anything_of_that_reply_runs(turns):
    shop = Shop()
    assert (run(turns, shop).status, shop.orders) == ("REPEATED_CALL_ID", [])


def test_a_call_without_an_id_gets_one_of_ours():
    turn = Turn(calls=(ToolCall("", "order", {}), ToolCall("", "order", {"amount": 2})))
    result = run([turn, replace(turn, calls=(ToolCall("", "order", {"amount": 3}),)), DONE])
    assert (result.status, codes(result)) == ("COMPLETED", ["ok"] * 3)


def test_hazard_34_text_that_no_ledger_takes_is_kept_as_a_mark():
    shop, kept = Shop(look=lambda _: {}["a\x00b\ud83d"]), []
    turns = [replace(calls(("look", {})), text="a\x00b\ud83d"), replace(DONE, finish_reason="\x00\ud83d")]
    result = run(turns, shop, evidence=lambda _, answer: kept.append(answer.detail))
    assert (result.messages[2]["content"], result.failure) == ("a\ufffdb?", "\ufffd?")
    fault = run([ProviderFault("no", category="server_error", why="a\x00b")])
    assert "\x00" not in fault.detail + kept[0]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        (ProviderFault("no", category="rate_limited"), "rate_limited"),
        (KeyError("sk-secret"), "KeyError"),
        (PermissionError(13, "sk-secret"), "PermissionError"),
    ],
)
def test_a_model_that_fails_is_a_status_and_what_was_done_stays_in_the_account(fault, failure):
    result = run([order(1), fault])
    assert (result.status, result.failure, result.model_calls, result.tool_calls) == ("MODEL_FAILED", failure, 2, 1)
    assert "sk-secret" not in repr(result)


NO_TURNS = [
    None,
    "Good morning.",
    Turn(text=None),  # type: ignore[arg-type]
    Turn("hi", finish_reason=None),  # type: ignore[arg-type]
    Turn("hi", usage="much"),  # type: ignore[arg-type]
    Turn("hi", calls=None),  # type: ignore[arg-type]
    Turn(calls=({"id": "c1", "name": "order"},)),  # type: ignore[arg-type]
    Turn(calls=(ToolCall("c1", None, {}),)),  # type: ignore[arg-type]
    Turn(calls=(ToolCall("c1", ["order"], {}),)),  # type: ignore[arg-type]
    Turn(calls=(ToolCall(7, "order", {}),)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("said", NO_TURNS, ids=repr)
def test_hazard_32_what_a_model_returns_and_is_no_turn_is_a_failure_with_a_name(said):
    class Careless:
        def complete(self, *_: Any, **__: Any) -> Any:
            return said

    try:
        result = run_loop(Careless(), Shop().dispatcher, ASK, limits=LIMITS)
    except (AttributeError, TypeError) as error:
        raise AssertionError("it left the loop") from error
    assert (result.status, result.failure, result.tool_calls) == ("MODEL_FAILED", "malformed_turn", 0)


@pytest.mark.parametrize("tokens", [float("nan"), float("inf")])
def test_hazard_35_what_counts_nothing_is_no_usage(tokens):
    with pytest.raises(ValueError, match="used"):
        Usage(1, tokens)


def test_a_name_that_no_ledger_takes_stands_as_a_mark_in_the_account_of_a_loop():
    result = run([calls(("a\x00b\ud83d", {})) for _ in range(3)])
    assert (result.status, result.detail) == ("LOOP_DETECTED", "a\ufffdb?: tool_not_allowed")


def test_a_busy_ledger_met_by_the_model_is_the_callers_to_hear():
    with pytest.raises(Contention):
        run([Contention("busy")])


# --- authority ----------------------------------------------------------------------------------------------


def lost(*_: object) -> None:
    raise AuthorityLost("worker claim expired or superseded", category="claim_lost")


def lost_from(number: int, then: Callable[..., Any] = lost) -> Callable[..., None]:
    """Good for so many times, then lost."""
    times = iter(range(number))
    return lambda *_: None if next(times, None) is not None else then()


@pytest.mark.parametrize("kind", [AuthorityLost, PermissionError])
def test_who_lost_authority_before_the_start_asks_nothing(kind):
    model = Strict([DONE])

    def check() -> None:
        raise kind("gone")

    result = run_loop(model, Shop().dispatcher, ASK, limits=LIMITS, check_current=check)
    assert (result.status, result.detail, model.asked) == ("AUTHORITY_LOST", "gone", [])


def test_a_reply_that_comes_after_the_loss_is_not_taken_up():
    shop = Shop()
    result = run([order(1)], shop, check_current=lost_from(1))
    assert (result.status, shop.orders, result.messages) == ("AUTHORITY_LOST", [], ASK)
    assert run([DONE], check_current=lost_from(1)).answer == ""


def test_authority_is_asked_before_each_call_of_a_reply():
    shop = Shop()
    two = calls(("order", {"amount": 1}), ("order", {"amount": 2}))
    result = run([two], shop, check_current=lost_from(3))
    assert (result.status, shop.orders, codes(result)) == ("AUTHORITY_LOST", [1], ["ok", "not_run"])
    assert run([two, DONE], shop, check_current=lambda: None).status == "COMPLETED"


@pytest.mark.parametrize(
    ("number", "ran"), [(0, ["not_run", "not_run"]), (1, ["ok", "not_run"]), (2, ["ok", "ok"]), (3, ["ok", "ok"])]
)
def test_a_loss_met_while_observing_ends_the_run_with_every_call_answered(number, ran):
    shop = Shop()
    result = run([calls(("order", {"amount": 1}), ("look", {})), DONE], shop, observe=lost_from(number))
    assert (result.status, codes(result), len(shop.orders)) == ("AUTHORITY_LOST", ran, min(number, 1))


@pytest.mark.parametrize("where", ["gate", "handler", "model"])
def test_a_loss_met_by_gate_handler_or_model_ends_a_run_that_has_an_authority(where):
    shop = {"gate": Shop(gate=lost), "handler": Shop(look=lost), "model": Shop()}[where]
    turns = {"gate": [order(1), DONE], "handler": [calls(("look", {})), DONE], "model": [AuthorityLost("gone")]}[where]
    for authority in ({"check_current": lambda: None}, {"observe": lambda _: None}):
        result = run(list(turns), shop, **authority)
        assert (result.status, result.answer, shop.orders) == ("AUTHORITY_LOST", "", [])
        assert result.model_calls == 1


def test_a_refused_write_is_a_failed_tool_to_a_run_that_has_no_authority_of_its_own():
    shop = Shop(gate=lost)
    result = run([order(1), calls(("look", {})), DONE], shop)
    assert (result.status, codes(result), shop.orders) == ("COMPLETED", ["tool_failed", "ok"], [])


def test_a_file_that_may_not_be_opened_ends_nothing():
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    result = run([calls(("look", {})), DONE], Shop(look=denied), check_current=lambda: None)
    assert (result.status, codes(result)) == ("COMPLETED", ["tool_failed"])
    with pytest.raises(PermissionError):
        run([DONE], observe=denied)


def test_a_wish_to_stop_is_heard_between_two_calls():
    shop = Shop()
    two = calls(("order", {"amount": 1}), ("order", {"amount": 2}))
    result = run([two], shop, stop=lambda: len(shop.orders) == 1)
    assert (result.status, shop.orders, codes(result)) == ("STOP_REQUESTED", [1], ["ok", "not_run"])


def test_the_calls_that_a_limit_kept_from_running_are_observed_as_not_run():
    seen: list[Message] = []
    three = calls(*(("order", {"amount": amount}) for amount in range(3)))
    result = run([three], limits=replace(LIMITS, tool_calls=1), observe=seen.append)
    assert seen == result.messages[len(ASK) :]


# --- after an interruption ----------------------------------------------------------------------------------


def interrupted(answered: int) -> list[Message]:
    three = [
        {"id": f"c{number}", "type": "function", "function": {"name": "order", "arguments": "{}"}}
        for number in range(3)
    ]
    answers = [
        {"role": "tool", "tool_call_id": f"c{number}", "content": '{"ok": true, "result": "real"}'}
        for number in range(answered)
    ]
    return [*ASK, {"role": "assistant", "content": "", "tool_calls": three}, *answers]


@pytest.mark.parametrize("answered", range(4))
def test_hazard_30_each_call_of_a_dead_worker_is_answered_once_really_or_as_unknown(answered):
    seen: list[Message] = []
    model, shop = Strict([DONE]), Shop()
    result = run_loop(model, shop.dispatcher, interrupted(answered), limits=LIMITS, observe=seen.append)
    told = [step["result"] for step in tool_trace(result)]
    assert (result.status, shop.orders) == ("COMPLETED", [])
    assert told == ["real"] * answered + ["outcome_unknown"] * (3 - answered)
    assert [message["role"] for message in seen] == ["tool"] * (3 - answered) + ["assistant"]


def test_hazard_30_a_call_that_fails_in_the_middle_leaves_the_others_their_answers():
    shop = Shop(look=lambda _: 1 / 0)
    result = run([calls(("order", {"amount": 1}), ("look", {}), ("order", {"amount": 2})), DONE], shop)
    assert (codes(result), shop.orders) == (["ok", "tool_failed", "ok"], [1, 2])


ids = st.sampled_from(["a", "b", "c", "d"])
answers = st.builds(lambda name: {"role": "tool", "tool_call_id": name, "content": '{"ok": true, "result": 1}'}, ids)
replies = st.lists(ids, unique=True, min_size=1).map(
    lambda names: {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in names
        ],
    }
)


@given(st.lists(answers | replies | st.just({"role": "user", "content": "?"})))
def test_whatever_a_transcript_holds_the_next_request_pairs_every_call_with_one_answer(transcript):
    whole, added = paired(transcript)
    follows_the_rules(whole)
    assert [message for message in whole if message["role"] != "tool"] == [m for m in transcript if m["role"] != "tool"]
    assert paired(whole)[1] == [] or len({call["id"] for m in transcript for call in m.get("tool_calls", ())}) < sum(
        len(m.get("tool_calls", ())) for m in transcript
    )
    assert all("outcome_unknown" in message["content"] for message in added)


hostile = st.builds(
    Turn,
    text=st.text(st.characters(codec=None), max_size=5),
    calls=st.lists(
        st.builds(
            ToolCall,
            id=st.text(st.characters(codec=None), max_size=3),
            name=st.sampled_from(["order", "look", "nothing", "\x00"]),
            arguments=st.none() | st.text(st.characters(codec=None), max_size=20) | st.just('{"amount": 2}'),
        ),
        max_size=4,
    ).map(tuple),
    finish_reason=st.sampled_from(["stop", "tool_calls", "length", "content_filter"]),
)


@given(st.lists(hostile, max_size=5))
def test_whatever_a_model_says_each_call_id_is_answered_exactly_once(turns):
    seen: list[Message] = []
    result = run([*turns, DONE], observe=seen.append)
    assert result.messages == [*ASK, *seen]


def test_the_operation_id_of_a_call_is_the_same_in_each_life_of_the_work_and_another_for_each_call():
    first, second, other = Shop(), Shop(), Shop()
    whole = run([order(1), order(2), DONE], first, key="work_1")
    taken_over = run_loop(Strict([order(2), DONE]), second.dispatcher, whole.messages[:4], limits=LIMITS, key="work_1")
    run([order(1), order(2), DONE], other, key="work_2")
    assert taken_over.status == "COMPLETED"
    assert second.operations == first.operations[1:]
    assert len({*first.operations, *other.operations}) == 4


# --- hazard 40: a crash after the side effect, for real -------------------------------------------------------

STORY = [order(1), order(2), scripted_turn("Both were ordered.")]


def recorded(file: Any) -> list[Message]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def life(pipe: Any, location: Any, file: Any, die_after: int) -> None:
    """One life of a worker: fenced orders in the ledger, each message on disk before the next step."""
    db = location.open()

    def write(_: Amount, now: Occasion) -> int:
        now.connection.execute(BUMP)
        return now.token

    def keep(message: Message) -> None:
        with file.open("a") as transcript:
            transcript.write(json.dumps(message) + "\n")
        pipe.send(message["role"])
        if len(recorded(file)) == die_after:
            pipe.recv()

    tool = ExecutableTool("order", "", Amount, write, consequential=True, fenced=True)
    dispatcher = Dispatcher([tool], allowed={"order"}, fence=Fence(db.immediate, lambda *_: 1))
    result = run_loop(ScriptedModel(STORY), dispatcher, [*ASK, *recorded(file)], limits=LIMITS, observe=keep)
    pipe.send(result.status)
    pipe.recv()


@pytest.mark.parametrize("die_after", range(1, 5))
def test_hazard_40_a_worker_killed_at_any_message_is_taken_over_and_no_write_is_repeated(location, tmp_path, die_after):
    file = tmp_path / "transcript"
    db = location.open()
    before = counter(db)
    with child(life, location, file, die_after) as (process, pipe):
        while len(recorded(file)) < die_after:
            assert pipe.poll(30)
            pipe.recv()
        process.kill()
        process.join()
    with child(life, location, file, -1) as (_, pipe):
        while (said := pipe.recv()) in {"tool", "assistant"}:
            pass
    follows_the_rules([*ASK, *recorded(file)])
    sure = sum('"result"' in message["content"] for message in recorded(file) if message["role"] == "tool")
    assert said == "COMPLETED"
    assert counter(db) - before == sure == (1 if die_after in {1, 3} else 2)
    bump(db)
    db.close()
