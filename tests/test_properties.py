"""Two readers of outside bytes against small models of what they should make of them.

The models are slow and plain on purpose: a stream is all of its bytes, split at newlines; arguments are a tree of
pairs in which nothing may stand that two readers could understand in two ways.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sovereign_agent.providers import stream as room
from sovereign_agent.providers.process import Leash
from sovereign_agent.providers.stream import KEPT, Stream
from sovereign_agent.tool_dispatch import MOST_INTEGER, argument_text

LINE_LIMIT_BYTES = 48
EVENT = b'{"type": "step"}'
PIECES = st.sampled_from([EVENT, b"\n", b"\r\n", b"noise", b'{"type": 1}', b"[]", b"\xff", b" " * LINE_LIMIT_BYTES])


def _read(event: dict[str, Any], testimony: room.Testimony) -> bool:
    testimony.warn(event["type"])
    return False


class AnyStream(RuleBasedStateMachine):
    """A stream that comes in any pieces is what its bytes are, and never keeps more than a line."""

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(room, "LINE_LIMIT_BYTES", LINE_LIMIT_BYTES)
        self.stream, self.bytes = Stream(_read, Leash()), b""

    @rule(pieces=st.lists(PIECES | st.binary(max_size=8), max_size=6))
    def take(self, pieces: list[bytes]) -> None:
        self.bytes += b"".join(pieces)
        self.stream.take(b"".join(pieces))

    @rule()
    def take_a_whole_event(self) -> None:
        self.take([EVENT, b"\n"])

    @invariant()
    def it_is_what_its_bytes_are(self) -> None:
        *lines, rest = self.bytes.split(b"\n")
        long = next((n for n, line in enumerate([*lines, rest]) if len(line) > LINE_LIMIT_BYTES), None)
        assert (self.stream.state == "line_too_long") == (long is not None)
        events = [
            _is_event(line.removeprefix(b"\xef\xbb\xbf") if not n else line) for n, line in enumerate(lines[:long])
        ]
        testimony = self.stream.testimony
        assert (testimony.events, testimony.noise) == (sum(events), len(events) - sum(events))

    @invariant()
    def it_keeps_no_more_than_it_may(self) -> None:
        testimony = self.stream.testimony
        assert len(self.stream._pending) <= LINE_LIMIT_BYTES
        assert max(len(testimony.warnings), len(testimony.samples), len(testimony.unknown) - 1) <= KEPT

    def teardown(self) -> None:
        self.stream.close()
        self.patch.undo()


def _is_event(line: bytes) -> bool:
    try:
        value = json.loads(line.decode(), parse_constant=int)
    except ValueError:
        return False
    return isinstance(value, dict) and isinstance(value.get("type"), str)


AnyStream.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
TestAnyStream = AnyStream.TestCase


unhurried = settings(max_examples=40, deadline=None)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
LEAVES = st.none() | st.booleans() | st.integers(-MOST_INTEGER, MOST_INTEGER) | TEXTS
LEAVES |= st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
BAD = st.sampled_from(
    [
        '{"twice": 1, "twice": 1}',
        "NaN",
        "-Infinity",
        "1e999",
        str(MOST_INTEGER + 1),
        str(-MOST_INTEGER - 1),
        r'"\u0000"',
        r'"\ud800"',
        r'{"\u0000": 1}',
        "'single'",
        "[1,]",
        "[" * 20_000 + "]" * 20_000,
    ]
)


@unhurried
@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 2}]))
def test_arguments_that_mean_one_thing_are_taken_and_mean_it(value: dict[str, Any], form: dict[str, Any]) -> None:
    text = json.dumps(value, **form)
    assert json.loads(argument_text(text)) == json.loads(argument_text(value)) == value


@unhurried
@given(st.dictionaries(TEXTS.filter(bool), VALUES, max_size=3), BAD, st.integers(0, 3))
def test_one_thing_that_two_readers_take_for_two_spoils_the_arguments(
    value: dict[str, Any], bad: str, depth: int
) -> None:
    spoilt = '{"inner": ' * depth + bad + "}" * depth
    text = json.dumps(value)[:-1] + (", " if value else "") + f'"": {spoilt}}}'
    with pytest.raises(ValueError, match=r"\w"):
        argument_text(text)


@unhurried
@given(VALUES.filter(lambda value: not isinstance(value, dict) and value is not None))
def test_what_is_no_object_is_no_arguments(value: Any) -> None:
    assert not isinstance(value, float) or math.isfinite(value)
    with pytest.raises(ValueError, match="no JSON object"):
        argument_text(json.dumps(value))
