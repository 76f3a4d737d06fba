"""Streams: bytes in, an testimony out. Nothing that is no event counts, and one bad sign outweighs all good ones."""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from typing import Any

import pytest
from agent_streams import GOOD, KINDS, RATE_LIMIT, Event, failed, good, lines
from hypothesis import given
from hypothesis import strategies as st
from support import at_one_barrier

from sovereign_agent.providers import DIALECTS
from sovereign_agent.providers.process import Leash
from sovereign_agent.providers.stream import KEPT, LINE_LIMIT_BYTES, WORDS_LIMIT, Stream

pytestmark = pytest.mark.timeout(60)

each_kind = pytest.mark.parametrize("kind", KINDS)


def heard(kind: str, content: bytes, *, chunk: int = 65_536, leash: Leash | None = None) -> Stream:
    stream = Stream(DIALECTS[kind].read, leash or Leash())
    for start in range(0, len(content), chunk):
        stream.take(content[start : start + chunk])
    stream.close()
    return stream


def seen(kind: str, content: bytes) -> list[str]:
    return sorted(heard(kind, content).seen())


def padded(kind: str, size: int) -> bytes:
    """An event of the middle of a stream, on a line of `size` bytes without its newline."""
    middle = GOOD[kind][1] | {"padding": ""}
    room = size - len(lines(middle)) + 1
    line = lines(middle | {"padding": "x" * room})
    assert len(line) == size + 1
    return line


# a good stream


@each_kind
@pytest.mark.parametrize("chunk", [1, 7, 65_536])
def test_a_good_stream_has_nothing_against_it_however_it_is_cut_into_chunks(kind, chunk):
    stream = heard(kind, good(kind), chunk=chunk)
    assert stream.seen() == {}
    assert stream.state == "finished"
    assert stream.testimony.events == len(GOOD[kind])
    assert (stream.testimony.text, stream.testimony.errors) == ("all done", [])
    assert stream.testimony.session == {"claude": "s-1", "codex": "t-1", "cursor": "c-1"}[kind]
    assert (stream.testimony.noise, stream.testimony.unknown) == (0, {})


def test_the_figures_are_kept():
    assert heard("claude", good("claude")).testimony.figures == {
        "num_turns": 1,
        "total_cost_usd": 0.01,
        "duration_ms": 10,
        "input_tokens": 3,
        "output_tokens": 4,
    }
    assert heard("codex", good("codex")).testimony.figures == {
        "input_tokens": 3,
        "cached_input_tokens": 0,
        "output_tokens": 4,
    }
    assert heard("cursor", good("cursor")).testimony.figures == {"duration_ms": 9}


# lines


@each_kind
def test_hazard_01_a_stream_that_ends_in_the_middle_of_an_event_is_malformed(kind):
    whole = good(kind)
    for cut in (whole[:-5], whole[:-2], lines(*GOOD[kind][:-1]) + b'{"ty', whole + b'{"type":"assistant","mess'):
        assert "malformed_stream" in seen(kind, cut)
    assert heard(kind, whole[:-5]).testimony.text != "all done" or kind == "codex"  # nothing is repaired


@each_kind
def test_hazard_01_its_twin_a_last_event_without_a_newline_is_whole(kind):
    assert seen(kind, good(kind)[:-1]) == []


def test_hazard_01_a_long_result_cut_at_the_size_of_a_pipe_is_malformed():
    result = lines(GOOD["claude"][-1] | {"result": "x" * 90_000})
    start = lines(*GOOD["claude"][:-1])
    assert seen("claude", start + result[:65_536]) == ["malformed_stream", "missing_terminal"]
    assert seen("claude", start + result) == []


@each_kind
def test_hazard_01_an_event_that_is_broken_in_the_middle_is_malformed(kind):
    first, *rest = GOOD[kind]
    assert seen(kind, lines(first) + b'{"type":"assistant","mes\n' + lines(*rest)) == ["malformed_stream"]


NOISE = [
    b"",
    b"npm warn old lockfile",
    b"\x1b[2K\x1b[1GThinking",
    b"[]",
    b'"str"',
    b"null",
    b"{}",
    b'{"type":7}',
    b"{ some: 'object' }",
    b"\xff\xfe\x00",
    b"7" * 5000,
    b"[" * 100_000,
]


@each_kind
def test_hazard_02_noise_is_counted_and_changes_nothing(kind):
    clean = good(kind).split(b"\n")[:-1]
    noisy = b"\xef\xbb\xbf" + b"\r\n".join(itertools.chain(*zip(clean, NOISE, strict=False), NOISE[len(clean) :]))
    stream = heard(kind, noisy + b"\r\n")
    assert stream.seen() == {}
    assert stream.testimony.events == len(clean)
    assert stream.testimony.noise == len(NOISE)
    assert stream.testimony.samples[1] == "npm warn old lockfile\r"


@each_kind
def test_hazard_02_noise_alone_never_becomes_a_result(kind):
    assert seen(kind, b"\n".join(NOISE)) == ["missing_session", "missing_terminal"]


def test_hazard_02_a_second_byte_order_mark_and_another_encoding_are_noise():
    marked = b"\xef\xbb\xbf\xef\xbb\xbf" + good("claude")
    assert heard("claude", marked).testimony.noise == 1
    assert seen("claude", good("claude").decode().encode("utf-16")) == ["missing_session", "missing_terminal"]


def test_hazard_02_what_is_kept_of_noise_is_bounded():
    stream = heard("claude", b"x" * 200_000 + b"\n" + b"noise\n" * 100_000)
    assert stream.testimony.noise == 100_001
    assert len(stream.testimony.samples) == KEPT
    assert len(json.dumps(stream.testimony.detail())) < 10_000


@each_kind
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 70_000, 2**20])
def test_hazard_03_a_line_longer_than_a_pipe_is_one_event(kind, size):
    first, *rest = GOOD[kind]
    stream = heard(kind, lines(first) + padded(kind, size) + lines(*rest))
    assert (stream.seen(), stream.testimony.events) == ({}, len(rest) + 2)


@each_kind
@pytest.mark.parametrize(("size", "state"), [(LINE_LIMIT_BYTES, "finished"), (LINE_LIMIT_BYTES + 1, "line_too_long")])
@pytest.mark.parametrize("chunk", [65_536, 2**30])
def test_hazard_03_a_line_has_a_limit(kind, size, state, chunk):
    stream = heard(kind, padded(kind, size) + good(kind), chunk=chunk)
    assert stream.state == state
    assert ("line_too_long" in stream.seen()) == (state == "line_too_long")


def _an_endless_line(_: int) -> int:
    stream = Stream(DIALECTS["claude"].read, Leash())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _number in range(20_000):
        stream.take(b'{"type":"x' * 6_000)
    stream.close()
    assert stream.state == "line_too_long"
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (
        1024 if sys.platform != "darwin" else 2**20
    )


def test_hazard_03_an_endless_line_costs_little_more_than_its_limit():
    (grown_megabytes,) = at_one_barrier(1, _an_endless_line)
    assert grown_megabytes < 64


def test_hazard_03_a_line_that_comes_byte_by_byte_costs_no_more():
    stream = Stream(DIALECTS["claude"].read, Leash())
    started = time.monotonic()
    for _ in range(300_000):
        stream.take(b"x")
    assert sys.getsizeof(stream._pending) < 2 * 300_000
    assert time.monotonic() - started < 10


@each_kind
def test_hazard_04_a_line_break_of_unicode_cuts_nothing(kind):
    text = "a\u2028b\x85c\fd\u2029e\x1cf\vg"
    event = lines(GOOD[kind][1] | {"text": text})
    assert "\u2028".encode() in event
    stream = heard(kind, lines(GOOD[kind][0]) + event + lines(*GOOD[kind][2:]))
    assert (stream.seen(), stream.testimony.events, stream.testimony.noise) == ({}, len(GOOD[kind]), 0)


@each_kind
@pytest.mark.parametrize(
    "value",
    [b"NaN", b"-Infinity", b"9" * 5000, b"[" * 100_000, b'"\xff"', b'"\xed\xa0\x80"', b'"a\0b"', b"{,}"],
    ids=range(8),
)
def test_hazard_36_an_event_that_is_no_json_breaks_the_stream_and_raises_nothing(kind, value):
    broken = b'{"type":"assistant","x":' + value + b"}\n"
    assert seen(kind, lines(GOOD[kind][0]) + broken + lines(*GOOD[kind][1:])) == ["malformed_stream"]


@each_kind
@pytest.mark.parametrize("value", [b'"\\ud800"', b'"a\\u0000b"', b"1e999", b"[" * 500 + b"]" * 500], ids=range(4))
def test_hazard_36_odd_json_is_json(kind, value):
    odd = b'{"type":"' + GOOD[kind][1]["type"].encode() + b'","x":' + value + b"}\n"
    assert seen(kind, lines(GOOD[kind][0]) + odd + lines(*GOOD[kind][1:])) == []


def test_hazard_35_a_figure_that_is_no_finite_number_is_left_out():
    result = GOOD["claude"][-1]
    for odd in ("1e999", '"7"', "true", "null", "[1]", "9" * 400):
        closing = lines(result).replace(b"0.01", odd.encode())
        stream = heard("claude", lines(GOOD["claude"][0]) + closing)
        assert stream.seen() == {}
        assert "total_cost_usd" not in stream.testimony.figures
    refused = lines(GOOD["claude"][0], result | {"total_cost_usd": float("nan")})
    assert seen("claude", refused) == ["malformed_stream", "missing_terminal"]


# verdicts


@pytest.mark.parametrize("kind", ["claude", "cursor"])
@pytest.mark.parametrize("subtype", ["success", "error_max_turns"])
@pytest.mark.parametrize("is_error", [False, True])
def test_hazard_07_any_bad_sign_of_a_result_wins(kind, subtype, is_error):
    closing = GOOD[kind][-1] | {"subtype": subtype, "is_error": is_error}
    stream = heard(kind, lines(*GOOD[kind][:-1], closing))
    assert list(stream.seen()) == ([] if subtype == "success" and not is_error else ["provider_error"])


@pytest.mark.parametrize("kind", ["claude", "cursor"])
@pytest.mark.parametrize("subtype", ["error_max_turns", "error_during_execution", "error_max_budget_usd"])
def test_hazard_07_a_failed_result_needs_no_text(kind, subtype):
    closing = {"type": "result", "subtype": subtype, "is_error": False, "num_turns": 3, "session_id": "s-1"}
    stream = heard(kind, lines(*GOOD[kind][:-1], closing))
    assert list(stream.seen()) == ["provider_error"]
    assert subtype in stream.testimony.words()


@pytest.mark.parametrize("kind", ["claude", "cursor"])
@pytest.mark.parametrize("error", [{"error": "boom"}, {"errors": ["boom"]}], ids=["one", "some"])
def test_hazard_07_a_success_with_an_error_beside_it_is_a_failure(kind, error):
    told = heard(kind, lines(*GOOD[kind][:-1], GOOD[kind][-1] | error))
    assert list(told.seen()) == ["provider_error"]
    assert "boom" in told.testimony.words()
    assert seen(kind, lines(*GOOD[kind][:-1], GOOD[kind][-1] | {"error": None, "errors": []})) == []


def test_hazard_08_tools_that_were_denied_are_noted():
    denied = {"permission_denials": [{"tool_name": "Write"}]}
    told = heard("claude", lines(*GOOD["claude"][:-1], GOOD["claude"][-1] | denied))
    assert told.seen() == {}
    assert "Write" in told.testimony.warnings[0]


@each_kind
@pytest.mark.parametrize("order", [1, -1])
def test_hazard_07_a_failure_before_or_after_a_success_is_a_failure(kind, order):
    closings = [failed(kind), GOOD[kind][-1]][::order]
    stream = heard(kind, lines(*GOOD[kind][:-1], *closings))
    assert list(stream.seen()) == ["provider_error"]
    assert stream.testimony.words() == "usage limit reached"


@each_kind
def test_hazard_07_a_closing_event_that_says_a_thing_twice_is_malformed(kind):
    closing = lines(GOOD[kind][-1]).replace(b'{"type"', b'{"is_error": true, "usage": 1, "is_error": false, "type"')
    assert seen(kind, lines(*GOOD[kind][:-1]) + closing) == ["malformed_stream"]


def test_hazard_07_an_error_of_the_stream_is_a_failure_and_an_error_of_an_item_is_none():
    item = {"type": "item.completed", "item": {"id": "item_9", "type": "error", "message": "a tool is missing"}}
    stream = heard("codex", lines(*GOOD["codex"][:-1], item, GOOD["codex"][-1]))
    assert (stream.seen(), stream.testimony.warnings) == ({}, ["a tool is missing"])
    error = {"type": "error", "message": "stream disconnected"}
    stream = heard("codex", lines(*GOOD["codex"][:-1], error, GOOD["codex"][-1]))
    assert list(stream.seen()) == ["provider_error"]
    assert stream.testimony.words() == "stream disconnected"


@pytest.mark.parametrize(
    "event",
    [
        {"type": "turn.failed"},
        {"type": "turn.failed", "error": None},
        {"type": "turn.failed", "error": "text"},
        {"type": "turn.failed", "error": {"message": ["list"]}},
        {"type": "turn.failed", "error": {"message": ""}},
    ],
    ids=range(5),
)
def test_hazard_07_a_turn_that_failed_failed_whatever_it_lacks(event):
    assert seen("codex", lines(*GOOD["codex"][:-1], event)) == ["provider_error"]


@pytest.mark.parametrize("kind", ["claude", "cursor"])
@pytest.mark.parametrize("key", ["subtype", "is_error", "result"])
@pytest.mark.parametrize("value", [None, 7, ["success"]])
def test_hazard_18_a_result_without_its_fields_is_malformed_or_failed(kind, key, value):
    closing = GOOD[kind][-1] | {key: value}
    found = seen(kind, lines(*GOOD[kind][:-1], closing))
    assert found == (["provider_error"] if key == "is_error" and value is not None else ["malformed_stream"])
    del closing[key]
    assert seen(kind, lines(*GOOD[kind][:-1], closing)) == ["malformed_stream"]


@pytest.mark.parametrize("event", [{"type": "turn.completed"}, {"type": "turn.completed", "usage": 7}], ids=range(2))
def test_hazard_18_a_turn_without_its_usage_is_malformed(event):
    assert seen("codex", lines(*GOOD["codex"][:-1], event)) == ["malformed_stream"]


@each_kind
def test_hazard_18_unknown_events_are_passed_over_and_counted(kind):
    new: Event = {"type": "brand_new", "x": 1}
    known = GOOD[kind][1] | {"message": 7, "renamed": []}
    stream = heard(kind, lines(GOOD[kind][0], new, RATE_LIMIT, known, new, *GOOD[kind][1:]))
    assert stream.seen() == {}
    assert stream.testimony.detail()["unknown_events"] == {"brand_new": 2, "rate_limit_event": 1}


@each_kind
@pytest.mark.parametrize("kind_of_event", ["results", "Result", "run.completed", "turn.finished", "completed", "done"])
def test_hazard_18_an_unknown_event_that_looks_like_an_end_ends_nothing(kind, kind_of_event):
    stream = heard(kind, lines(*GOOD[kind][:-1], GOOD[kind][-1] | {"type": kind_of_event}))
    assert (list(stream.seen()), stream.state) == (["missing_terminal"], "reading")


def test_hazard_18_what_is_kept_of_unknown_events_is_bounded():
    stream = heard("claude", lines(*({"type": f"{n}" + "x" * 1000} for n in range(5000))))
    assert len(json.dumps(stream.testimony.detail())) < 10_000
    assert sum(stream.testimony.unknown.values()) == 5000


@pytest.mark.parametrize("kind", ["claude", "cursor", "codex"])
def test_a_stream_without_a_session_lacks_it(kind):
    nameless = [{k: v for k, v in e.items() if k not in ("session_id", "thread_id")} for e in GOOD[kind]]
    assert seen(kind, lines(*nameless)) == ["missing_session"]


@each_kind
def test_hazard_06_an_empty_stream_and_a_beginning_have_no_end(kind):
    assert seen(kind, b"") == ["missing_session", "missing_terminal"]
    assert seen(kind, lines(GOOD[kind][0])) == ["missing_terminal"]


@each_kind
def test_what_is_kept_of_what_it_said_can_be_kept_by_any_ledger(kind):
    stream = heard(kind, lines(GOOD[kind][0]) + b'{"type":"x\\u0000\\ud800"}\n' + lines(failed(kind, "x" * 10_000)))
    detail = json.dumps(stream.testimony.detail(), ensure_ascii=False)
    assert "\\u0000" not in detail
    assert detail.encode()
    assert len(stream.testimony.words()) <= WORDS_LIMIT


# while a tool runs


@pytest.mark.parametrize(
    ("kind", "until", "step"),
    [("claude", 3, "tool: Bash"), ("codex", 3, "tool: command_execution"), ("cursor", 4, "tool: shell")],
)
def test_while_a_tool_runs_the_leash_says_so(kind, until, step):
    leash = Leash()
    stream = Stream(DIALECTS[kind].read, leash)
    stream.take(lines(*GOOD[kind][:until]))
    assert leash.step == step
    stream.take(lines(*GOOD[kind][until:]))
    assert leash.step == ""


@pytest.mark.parametrize("asks", ["request_user_input", "exec_approval_request"])
def test_while_it_waits_for_an_approval_the_leash_says_so(asks):
    leash = Leash()
    stream = Stream(DIALECTS["codex"].read, leash)
    stream.take(lines(*GOOD["codex"][:2], {"type": asks}))
    assert leash.step == "waiting for approval"
    stream.take(lines(*GOOD["codex"][2:]))
    assert leash.step == ""


# whatever comes


KEYS = sorted({key for events in GOOD.values() for event in events for key in event} - {"type"})
TYPES = sorted({event["type"] for events in GOOD.values() for event in events} | {"error", "turn.failed"})
REAL = [event[key] for events in GOOD.values() for event in events for key in KEYS if key in event]
ODD = [
    None,
    True,
    False,
    0,
    1,
    -1.5,
    "",
    "x",
    "\ud800",
    "\0",
    [],
    [[]],
    [7, {}],
    {},
    {"": {}},
    {"content": 7},
    {"id": []},
]
values = st.sampled_from([*REAL, *ODD])
odd_events = st.builds(
    lambda kind, fields: {"type": kind} | fields,
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=6),
)


@given(
    kind=st.sampled_from(KINDS),
    events=st.lists(odd_events, max_size=5),
    tail=st.binary(max_size=40),
    cuts=st.integers(1, 50),
)
def test_whatever_comes_nothing_is_raised_and_the_cutting_changes_nothing(
    kind: str, events: list[Event], tail: bytes, cuts: int
) -> None:
    content = b"".join(json.dumps(event).encode() + b"\n" for event in events) + tail
    testimony = heard(kind, content).testimony
    assert testimony == heard(kind, content, chunk=cuts).testimony
    json.dumps(testimony.detail(), allow_nan=False)


@given(kind=st.sampled_from(KINDS), mend=st.dictionaries(st.sampled_from(KEYS), values, max_size=2))
def test_a_run_succeeds_only_by_a_closing_event_with_all_of_its_good_signs(kind: str, mend: dict[str, Any]) -> None:
    closing = GOOD[kind][-1] | mend
    good_signs = (
        isinstance(closing.get("usage"), dict)
        if kind == "codex"
        else (closing["subtype"], closing["is_error"]) == ("success", False)
        and not closing.get("error")
        and type(closing["is_error"]) is bool
        and isinstance(closing["result"], str)
    )
    assert (seen(kind, lines(*GOOD[kind][:-1]) + json.dumps(closing).encode()) == []) == good_signs
