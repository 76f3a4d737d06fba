"""The dispatcher: every call is answered by a code, and nothing runs before its arguments and its gate."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator
from support import BUMP, bump, child, counter, in_a_session, until_blocked

from sovereign_agent.errors import AuthorityLost, PolicyRefusal
from sovereign_agent.tool_dispatch import (
    BEGUN_BEFORE,
    MOST_ARGUMENT_BYTES,
    Dispatcher,
    Effect,
    ExecutableTool,
    Fence,
    Occasion,
    ToolCall,
)

GOOD = '{"sku": "TEA", "amount": 3}'


def short(value: object) -> str:
    """A value as a test's id: one that every terminal takes."""
    return ascii(value)[:40]


class Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Order(Nothing):
    sku: str = Field(min_length=1, max_length=40)
    amount: int
    price: float = 1.0

    @field_validator("sku")
    @classmethod
    def _no_bomb(cls, sku: str) -> str:
        return {"bomb": {}}["bomb"][sku] if sku == "bomb" else sku  # a validator with a bug of its own


class Counter:
    """Steps in the order in which they came, and a dispatcher whose steps they are."""

    def __init__(self, gate: Any = None, handler: Any = None, **options: Any) -> None:
        self.steps: list[Any] = []
        self._gate, self._handler = gate, handler
        tools = [
            ExecutableTool("order", "Order goods.", Order, self.handler, consequential=True),
            ExecutableTool("look", "Look.", Nothing, lambda _: {"seen": 1}),
            ExecutableTool("hidden", "Not for this one.", Nothing, self.handler),
        ]
        self.dispatcher = Dispatcher(tools, allowed={"order", "look"}, before_write=self.gate, **options)

    def gate(self, call: ToolCall) -> None:
        self.steps.append("gate")
        if self._gate:
            self._gate(call)

    def handler(self, arguments: Any) -> Any:
        self.steps.append("handler")
        return self._handler(arguments) if self._handler else {"ordered": arguments.amount}

    def invoke(self, arguments: Any, name: str = "order", **options: Any) -> Any:
        return self.dispatcher.invoke(ToolCall("c1", name, arguments), **options)


def refuse(*_: object) -> None:
    raise AuthorityLost("runtime paused or replaced by restore", category="epoch_replaced")


# --- the order ----------------------------------------------------------------------------------------------


def test_a_good_call_passes_the_gate_first_and_then_runs_once():
    shop = Counter()
    answer = shop.invoke(GOOD)
    assert (answer.ok, answer.code, answer.result) == (True, "", {"ordered": 3})
    assert json.loads(answer.content) == {"ok": True, "result": {"ordered": 3}}
    assert shop.steps == ["gate", "handler"]


def test_bad_arguments_never_reach_the_gate():
    shop = Counter()
    answer = shop.invoke('{"sku": "TEA", "amount": 3, "urgent": true}')
    assert (answer.code, answer.effect, shop.steps) == ("invalid_arguments", Effect.NONE, [])


def test_a_gate_that_refuses_keeps_the_handler_from_running():
    shop = Counter(gate=refuse)
    answer = shop.invoke(GOOD)
    assert (answer.code, answer.effect, answer.authority_lost) == ("tool_failed", Effect.NONE, True)
    assert shop.steps == ["gate"]
    assert "restore" in answer.detail
    assert "restore" not in answer.content


def test_a_tool_that_changes_nothing_asks_no_gate():
    shop = Counter(gate=refuse)
    assert shop.invoke("{}", "look").ok
    assert shop.steps == []


def test_without_a_gate_nothing_is_written_and_reading_goes_on():
    written: list[Any] = []
    tools = [
        ExecutableTool("write", "", Nothing, written.append, consequential=True),
        ExecutableTool("fenced", "", Nothing, written.append, consequential=True, fenced=True),
        ExecutableTool("look", "", Nothing, lambda _: 1),
    ]
    dispatcher = Dispatcher(tools, allowed={"write", "fenced", "look"})
    codes = [dispatcher.invoke(ToolCall("c", name, "{}")).code for name in ("write", "fenced", "look")]
    assert codes == ["write_authority_required", "write_authority_required", ""]
    assert written == []


@pytest.mark.parametrize(
    "name",
    ["order ", "ORDER", "functions.order", "../order", "", "x" * 10_000, "hidden", "ord\x00er", "\ud83d"],
    ids=short,
)
def test_hazard_29_no_name_but_the_very_one_runs_anything(name):
    shop = Counter()
    answer = shop.invoke(GOOD, name)
    assert (answer.code, shop.steps) == ("tool_not_allowed", [])
    assert json.loads(answer.content)["allowed"] == ["look", "order"]
    assert len(answer.detail) < 1000


def test_hazard_29_the_very_name_runs():
    assert Counter().invoke(GOOD, "order").ok


# --- arguments ----------------------------------------------------------------------------------------------

SHAPES = ["[]", "3", "true", '"x"', json.dumps(GOOD), '{"sku": "TEA", "sku": "MILK", "amount": 3}', [], 3, True, b"{}"]


@pytest.mark.parametrize("arguments", SHAPES, ids=short)
def test_hazard_28_valid_json_of_the_wrong_shape_is_refused(arguments):
    shop = Counter()
    assert (shop.invoke(arguments).code, shop.steps) == ("invalid_arguments", [])


@pytest.mark.parametrize("nothing", ["", " ", None, "null", "{}", {}], ids=short)
def test_hazard_28_nothing_is_enough_for_a_tool_that_asks_for_nothing_and_for_no_other(nothing):
    shop = Counter()
    assert shop.invoke(nothing, "look").ok
    assert shop.invoke(nothing, "order").code == "invalid_arguments"


def test_hazard_28_arguments_that_were_decoded_already_are_taken():
    assert Counter().invoke(json.loads(GOOD)).result == {"ordered": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"sku": "TEA", "amount": 3',
        '{"sku": listt"}',
        GOOD + "x",
        "<html>",
        "{'sku': 1}",
        '{"sku": "TEA\n", "amount": 3}',
    ],
    ids=short,
)
def test_hazard_27_malformed_arguments_are_refused(arguments):
    shop = Counter()
    assert (shop.invoke(arguments).code, shop.steps) == ("invalid_arguments", [])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_hazard_35_a_number_that_no_ledger_takes_is_refused(number):
    shop = Counter()
    answer = shop.invoke(f'{{"sku": "TEA", "amount": 3, "price": {number}}}')
    assert (answer.code, shop.steps) == ("invalid_arguments", [])
    assert shop.invoke({"sku": "TEA", "amount": 3, "price": float(number)}).code == "invalid_arguments"


@pytest.mark.parametrize("number", ["1.5", "-2", "1e300", "1e-999"])
def test_hazard_35_a_finite_number_is_taken(number):
    assert Counter().invoke(f'{{"sku": "TEA", "amount": 3, "price": {number}}}').ok


@pytest.mark.parametrize(
    "amount",
    [
        "9" * 5000,
        "8" * 4000,
        "9223372036854775808",
        "-9223372036854775808",
        "true",
        "4.0",
        '"4"',
        "[" * 100_000,
        "null",
    ],
    ids=short,
)
def test_hazard_36_odd_numbers_and_bombs_are_refused(amount):
    shop = Counter()
    assert (shop.invoke(f'{{"sku": "TEA", "amount": {amount}}}').code, shop.steps) == ("invalid_arguments", [])


def test_hazard_36_the_greatest_number_that_a_ledger_takes_is_taken():
    assert Counter().invoke('{"sku": "TEA", "amount": 9223372036854775807}').result == {"ordered": 2**63 - 1}


def test_hazard_36_an_object_nested_without_end_is_refused():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert Counter().invoke({"sku": deep}).code == "invalid_arguments"
    assert Counter().invoke("[" * 100_000).code == "invalid_arguments"
    assert Counter().invoke('{"sku":"' + "x" * MOST_ARGUMENT_BYTES + '"}').code == "invalid_arguments"


@pytest.mark.parametrize("text", ["a\\u0000b", "\\\\\\u0000", "\\ud83d", "\\udc00x", "\ud83d", "a\x00b"], ids=short)
def test_hazard_34_text_that_no_ledger_takes_is_refused(text):
    shop = Counter()
    assert (shop.invoke(f'{{"sku": "{text}", "amount": 3}}').code, shop.steps) == ("invalid_arguments", [])


@pytest.mark.parametrize("text", ["a\\\\u0000b", "\\ud83d\\ude00", "\u2028", "\\u00e9"], ids=short)
def test_hazard_34_text_that_only_looks_like_it_is_taken(text):
    assert Counter().invoke(f'{{"sku": "{text}", "amount": 3}}').ok


def test_a_validator_with_a_bug_refuses_instead_of_breaking_out():
    assert Counter().invoke('{"sku": "bomb", "amount": 3}').code == "invalid_arguments"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
raw_text = st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape"))
cut_text = st.tuples(json_like, st.integers(0, 60)).map(lambda pair: json.dumps(pair[0])[: pair[1]])


@given(st.one_of(json_like, raw_text, cut_text, st.binary(), st.text(st.characters(codec=None))))
def test_no_arguments_whatever_let_an_exception_out(arguments):
    for name in ("order", "look", "hidden"):
        answer = Counter().invoke(arguments, name)
        assert answer.code in {"", "invalid_arguments", "tool_not_allowed"}
        json.loads(answer.content.encode())


# --- handlers and results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [float("nan"), object(), {1, 2}, b"x"])
def test_a_result_that_is_no_json_is_a_failure_whose_effect_nobody_knows(result):
    answer = Counter(handler=lambda _: result).invoke(GOOD)
    assert (answer.code, answer.effect) == ("tool_failed", Effect.UNKNOWN)


def test_a_handler_that_fails_after_the_gate_may_have_acted():
    answer = Counter(handler=lambda _: 1 / 0).invoke(GOOD)
    assert (answer.code, answer.effect, answer.authority_lost) == ("tool_failed", Effect.UNKNOWN, False)
    assert "ZeroDivisionError" in answer.detail
    assert "Zero" not in answer.content


def leave(_: object) -> None:
    raise SystemExit(3)


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_a_tool_that_exits_has_failed_and_an_interrupt_is_none_of_its_answers():
    told = []
    with suppress(SystemExit):
        answer = Counter(handler=leave).invoke(GOOD)
        told.append((answer.code, answer.effect, answer.detail))
    assert told == [("tool_failed", Effect.UNKNOWN, "SystemExit: 3")]
    with pytest.raises(KeyboardInterrupt):
        Counter(handler=interrupt).invoke(GOOD)


def test_a_file_that_may_not_be_opened_is_no_loss_of_authority():
    answer = Counter(handler=lambda _: refuse_by_the_system()).invoke(GOOD)
    assert (answer.code, answer.authority_lost) == ("tool_failed", False)
    assert Counter(handler=refuse).invoke(GOOD).authority_lost


def refuse_by_the_system() -> None:
    raise PermissionError(13, "Permission denied")


def test_hazard_41_a_result_that_is_too_large_says_whether_the_tool_has_acted():
    shop = Counter(handler=lambda _: "\N{SNOWMAN}" * 100_000)
    told = json.loads(shop.invoke(GOOD, result_bytes=1000).content)
    assert (told["ok"], told["error"], told["effect"]) == (False, "result_too_large", "done")
    assert "300002" in told["notice"]
    assert told["excerpt"] == '"' + "\N{SNOWMAN}" * 333
    assert len(shop.invoke(GOOD, result_bytes=1000).detail) == 100_002
    assert shop.steps.count("handler") == 2


def test_hazard_41_a_result_of_exactly_the_allowed_size_is_given_whole():
    shop = Counter(handler=lambda _: "x" * 998)
    assert shop.invoke(GOOD, result_bytes=1000).ok
    assert shop.invoke(GOOD, result_bytes=999).code == "result_too_large"


def test_half_a_character_in_a_result_can_still_be_stored():
    answer = Counter(handler=lambda _: "\ud83d").invoke(GOOD)
    answer.content.encode()
    assert json.loads(answer.content)["result"] == "\ud83d"


def test_an_informed_handler_learns_its_operation_and_its_deadline():
    heard: list[Occasion] = []
    tool = ExecutableTool("wait", "", Nothing, lambda _, now: heard.append(now), informed=True)
    now = Occasion("op_1", 12.5)
    assert Dispatcher([tool], allowed={"wait"}).invoke(ToolCall("c", "wait", "{}"), now).ok
    assert heard == [now]


# --- what is offered ----------------------------------------------------------------------------------------


def test_a_model_is_told_of_the_allowed_tools_only():
    schemas = Counter().dispatcher.schemas()
    assert [each["function"]["name"] for each in schemas] == ["order", "look"]
    assert schemas[0]["function"]["parameters"]["required"] == ["sku", "amount"]
    assert schemas[0]["function"]["parameters"]["additionalProperties"] is False


def test_two_tools_of_one_name_and_loose_arguments_are_refused_at_once():
    tool = ExecutableTool("look", "", Nothing, lambda _: 1)
    with pytest.raises(ValueError, match="one name"):
        Dispatcher([tool, tool], allowed={"look"})
    with pytest.raises(ValueError, match="extra"):
        ExecutableTool("look", "", BaseModel, lambda _: 1)
    with pytest.raises(ValueError, match="consequential"):
        ExecutableTool("look", "", Nothing, lambda _: 1, fenced=True)


class Flavour(StrEnum):
    VANILLA = "vanilla"


class Scoop(Nothing):
    flavour: Flavour


def test_an_enumeration_is_read_from_json_although_the_schema_is_strict():
    tool = ExecutableTool("scoop", "", Scoop, lambda scoop: scoop.flavour)
    dispatcher = Dispatcher([tool], allowed={"scoop"})
    assert dispatcher.invoke(ToolCall("c", "scoop", '{"flavour": "vanilla"}')).result == "vanilla"
    assert dispatcher.invoke(ToolCall("c", "scoop", '{"flavour": "tea"}')).code == "invalid_arguments"


# --- fenced tools -------------------------------------------------------------------------------------------


def fenced(db: Any, token: int, handler: Any, *, fenced: bool = True, **options: Any) -> Dispatcher:
    """One fenced tool whose authority is the token counter's value: whoever bumps it takes the authority over."""

    def check(connection: Any, _: ToolCall) -> int:
        if connection.execute("SELECT value FROM lease_tokens <for update>").rows[0][0] != token:
            refuse()
        return token

    gate = {"before_write": options.pop("before_write", None)}
    tool = ExecutableTool("write", "", Nothing, handler, consequential=True, fenced=fenced, informed=True)
    return Dispatcher([tool], allowed={"write"}, fence=Fence(db.immediate, check, **options), **gate)


def write(_: Nothing, now: Occasion) -> list[Any]:
    now.connection.execute(BUMP)
    return [now.token, now.operation_id]


WRITE = ToolCall("c1", "write", "{}")


def test_a_fenced_tool_writes_in_the_transaction_in_which_its_check_has_passed(db):
    token = counter(db)
    answer = fenced(db, token, write).invoke(WRITE, Occasion("op_1"))
    assert (answer.ok, answer.result, counter(db)) == (True, [token, "op_1"], token + 1)


def test_a_fenced_tool_without_authority_writes_nothing(db):
    token = counter(db)
    bump(db)
    answer = fenced(db, token, write).invoke(WRITE)
    assert (answer.code, answer.effect, answer.authority_lost) == ("tool_failed", Effect.NONE, True)
    assert counter(db) == token + 1


@pytest.mark.parametrize("spoil", [lambda: 1 / 0, object, refuse], ids=["bug", "no JSON", "refusal"])
def test_a_fenced_tool_that_fails_after_its_write_has_written_nothing(db, spoil):
    token = counter(db)

    def handler(arguments: Nothing, now: Occasion) -> Any:
        write(arguments, now)
        return spoil()

    answer = fenced(db, token, handler).invoke(WRITE)
    assert (answer.code, answer.effect, counter(db)) == ("tool_failed", Effect.NONE, token)


def test_a_fenced_tool_whose_transaction_does_not_end_well_may_have_written(db):
    token = counter(db)

    class Cut:
        def __enter__(self) -> Any:
            self.held = db.immediate()
            return self.held.__enter__()

        def __exit__(self, *error: object) -> None:
            self.held.__exit__(*error)
            raise ConnectionError("the server went away, and its answer with it")

    dispatcher = fenced(db, token, write)
    dispatcher._fence = Fence(Cut, dispatcher._fence.check)
    answer = dispatcher.invoke(WRITE)
    assert (answer.code, answer.effect, counter(db)) == ("tool_failed", Effect.UNKNOWN, token + 1)


def test_no_takeover_fits_between_the_check_and_the_write_of_a_fenced_tool(db, location):
    token = counter(db)
    with ThreadPoolExecutor(1) as pool:

        def handler(arguments: Nothing, now: Occasion) -> Any:
            waiting.append(pool.submit(in_a_session, location, bump))
            until_blocked(db, *waiting)
            return write(arguments, now)

        waiting: list[Any] = []
        answer = fenced(db, token, handler).invoke(WRITE)
        waiting[0].result(timeout=30)
    assert answer.ok
    assert counter(db) == token + 2
    assert fenced(db, token + 1, write).invoke(WRITE).authority_lost


def killed_while_it_writes(pipe: Any, location: Any, token: int) -> None:
    db = location.open()

    def handler(arguments: Nothing, now: Occasion) -> Any:
        write(arguments, now)
        pipe.send("written")
        pipe.recv()

    fenced(db, token, handler).invoke(WRITE)


def test_a_worker_killed_inside_a_fenced_tool_has_written_nothing(db, location):
    token = counter(db)
    with child(killed_while_it_writes, location, token) as (process, pipe):
        assert pipe.recv() == "written"
        process.kill()
        process.join()
    assert counter(db) == token
    assert fenced(db, token, write).invoke(WRITE).ok


# --- what a fence records -----------------------------------------------------------------------------------


def note(connection: Any, call: ToolCall, now: Occasion, answer: Any) -> None:
    """A record of the call in the ledger itself: it is there when, and only when, its transaction committed."""
    beat = f"{call.id} {now.operation_id} {now.token} {answer and answer.content}"
    connection.execute("INSERT INTO heartbeats (at, source, process_identity, host) VALUES (1, ?, '', '')", (beat,))


def notes(db: Any) -> list[str]:
    return [row["source"] for row in db.connection.execute("SELECT source FROM heartbeats ORDER BY seq").rows]


def test_the_answer_of_a_fenced_tool_is_recorded_with_its_write(db):
    token = counter(db)
    answer = fenced(db, token, write, record=note).invoke(WRITE, Occasion("op_1"))
    assert (counter(db), notes(db)) == (token + 1, [f"c1 op_1 {token} {answer.content}"])


def test_a_result_too_large_of_a_fenced_tool_is_recorded_too_and_says_that_it_has_acted(db):
    token = counter(db)
    fenced(db, token, write, record=note).invoke(WRITE, Occasion("op_1"), result_bytes=1)
    assert counter(db) == token + 1
    assert '"effect": "done"' in notes(db)[0]


def test_what_cannot_be_recorded_is_not_written(db):
    token = counter(db)

    def record(*told: Any) -> None:
        note(*told)
        raise RuntimeError("no room in the record")

    answer = fenced(db, token, write, record=record).invoke(WRITE)
    assert (answer.code, answer.effect, counter(db), notes(db)) == ("tool_failed", Effect.NONE, token, [])


@pytest.mark.parametrize("spoil", [lambda: 1 / 0, refuse], ids=["bug", "refusal"])
def test_a_fenced_tool_that_fails_leaves_no_record(db, spoil):
    answer = fenced(db, counter(db), lambda *_: spoil(), record=note).invoke(WRITE)
    assert (answer.code, answer.effect, notes(db)) == ("tool_failed", Effect.NONE, [])


def test_a_recorded_answer_stands_although_the_end_of_its_commit_was_not_heard(db):
    token = counter(db)

    @contextmanager
    def cut() -> Any:
        with db.immediate() as connection:
            yield connection
        raise ConnectionError("the server went away, and its answer with it")

    dispatcher = fenced(db, token, write, record=note)
    dispatcher._fence = replace(dispatcher._fence, transaction=cut)
    answer = dispatcher.invoke(WRITE)
    assert (answer.code, answer.effect, counter(db)) == ("tool_failed", Effect.UNKNOWN, token + 1)
    assert '"ok": true' in notes(db)[0]


def test_the_intent_is_committed_before_what_is_not_fenced_leaves_the_house(db, location):
    token = counter(db)
    seen: list[Any] = []

    def handler(_: Nothing, now: Occasion) -> str:
        with db.immediate():  # nobody's transaction is open: this would be refused as nested
            seen.append((in_a_session(location, notes), now.connection, now.token))
        return "sent"

    answer = fenced(db, token, handler, fenced=False, record=note).invoke(WRITE, Occasion("op_1"))
    assert (answer.ok, answer.result) == (True, "sent")
    assert seen == [([f"c1 op_1 {token} None"], None, token)]
    assert len(notes(db)) == 1


def test_nothing_leaves_the_house_without_authority_or_without_its_intent(db):
    sent: list[Any] = []
    token = counter(db)

    def handler(*_: Any) -> None:
        sent.append(1)

    def record(*told: Any) -> None:
        note(*told)
        raise RuntimeError("no room in the record")

    stale = fenced(db, token + 1, handler, fenced=False, record=note).invoke(WRITE)
    unrecorded = fenced(db, token, handler, fenced=False, record=record).invoke(WRITE)
    assert [(each.code, each.effect, each.authority_lost) for each in (stale, unrecorded)] == [
        ("tool_failed", Effect.NONE, True),
        ("tool_failed", Effect.NONE, False),
    ]
    assert (sent, notes(db)) == ([], [])


def test_a_gate_that_refuses_keeps_the_intent_from_being_recorded(db):
    sent: list[Any] = []
    dispatcher = fenced(db, counter(db), lambda *_: sent.append(1), fenced=False, record=note, before_write=refuse)
    answer = dispatcher.invoke(WRITE)
    assert (answer.effect, answer.authority_lost, sent, notes(db)) == (Effect.NONE, True, [], [])


def test_a_tool_that_fails_after_its_intent_may_have_acted(db):
    answer = fenced(db, counter(db), lambda *_: 1 / 0, fenced=False, record=note).invoke(WRITE)
    assert (answer.code, answer.effect, len(notes(db))) == ("tool_failed", Effect.UNKNOWN, 1)


def test_an_operation_that_was_let_out_before_is_not_told_to_have_changed_nothing(db):
    sent: list[Any] = []

    def record(*_: Any) -> None:
        raise PolicyRefusal("It was begun before.", category=BEGUN_BEFORE)

    answer = fenced(db, counter(db), lambda *_: sent.append(1), fenced=False, record=record).invoke(WRITE)
    assert (answer.code, answer.effect, sent) == ("tool_failed", Effect.UNKNOWN, [])


def killed_after_its_write(pipe: Any, location: Any, token: int) -> None:
    db = location.open()

    def record(*told: Any) -> None:
        note(*told)
        pipe.send("recorded")
        pipe.recv()

    fenced(db, token, write, record=record).invoke(WRITE)


def test_of_a_worker_killed_between_record_and_commit_neither_write_nor_record_is_there(db, location):
    token = counter(db)
    with child(killed_after_its_write, location, token) as (process, pipe):
        assert pipe.recv() == "recorded"
        process.kill()
        process.join()
    assert (counter(db), notes(db)) == (token, [])
    assert fenced(db, token, write, record=note).invoke(WRITE).ok
    assert (counter(db), len(notes(db))) == (token + 1, 1)
