"""Streams: what an agent program says of its own run, one JSON object a line.

Lines come from bytes and end at a newline byte alone, so no character inside a text can cut one. What is no event is
noise: it is counted, and nothing follows from it. An event that is cut short or contradicts itself breaks the
stream; it is never repaired. This room believes no success: it keeps a testimony, in which one bad
sign outweighs all good ones, and `base.judge` decides.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from sovereign_agent.providers.base import without_duplicates
from sovereign_agent.providers.process import Leash

LINE_LIMIT_BYTES = 16 * 2**20
WORDS_LIMIT = 2000
"""How many characters are kept of a text that the program said."""
KEPT = 20
"""How many errors, samples of noise, unknown types and running tools are kept, each."""
NAME_LIMIT = 100
FIGURE_LIMIT = 1e15
_EVENT_BEGUN = re.compile(rb'\s*\{\s*"type"')

Event = dict[str, Any]


def storable(value: object) -> str:
    """A value as text that any ledger can keep: whole characters, no NUL, not without end."""
    return str(value)[:WORDS_LIMIT].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


@dataclass(slots=True)
class Testimony:
    """All that one stream said of its run.

    `text` is the program's closing words, `errors` is every failure that it told of, `warnings` what it got over.
    `broken` says what no whole stream contains. `running` holds the names of the tools at work, by their call's id.
    `ended` holds the failure that the program named as its end, a sentence under its category.
    """

    session: str = ""
    terminal: bool = False
    text: str = ""
    errors: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    broken: str = ""
    ended: dict[str, str] = field(default_factory=dict[str, str])
    waiting: bool = False
    running: dict[str, str] = field(default_factory=dict[str, str])
    figures: dict[str, float] = field(default_factory=dict[str, float])
    events: int = 0
    unknown: Counter[str] = field(default_factory=Counter[str])
    noise: int = 0
    samples: list[str] = field(default_factory=list[str])

    def fail(self, text: object) -> None:
        """The program told of a failure."""
        self.errors += [storable(text or "no reason given")][: KEPT - len(self.errors)]

    def warn(self, text: object) -> None:
        """The program told of a trouble that did not end its run."""
        self.warnings += [storable(text)][: KEPT - len(self.warnings)]

    def start(self, call: str, tool: str) -> None:
        """A tool is at work. One whose call has an endless id could not be told from the next, and is not kept."""
        if len(self.running) < KEPT and len(call) <= NAME_LIMIT:
            self.running[call] = tool[:NAME_LIMIT]

    def measure(self, numbers: object) -> None:
        """Keep the figures of an object that are finite numbers of a size that can be meant."""
        for name, value in _object(numbers).items():
            if type(value) in (int, float) and abs(value) < FIGURE_LIMIT and len(self.figures) < KEPT:
                self.figures[storable(name)[:NAME_LIMIT]] = value

    def step(self) -> str:
        """What it does that may take long; empty while it thinks."""
        if self.waiting:
            return "waiting for approval"
        return storable(f"tool: {next(reversed(self.running.values()))}")[:NAME_LIMIT] if self.running else ""

    def seen(self) -> dict[str, str]:
        """The failure categories in what was said, each in a sentence."""
        told = {
            "malformed_stream": self.broken,
            "missing_terminal": "" if self.terminal else "Its stream ended without a result.",
            "provider_error": "It told of a failure." if self.errors else "",
            "missing_session": "" if self.session else "Its stream named no session.",
        }
        return {category: sentence for category, sentence in told.items() if sentence} | self.ended

    def words(self) -> str:
        """What it said of the failure, or else at the end."""
        return " ".join(self.errors) or storable(self.text)

    def detail(self) -> dict[str, Any]:
        """The figures, as JSON."""
        return {
            "session": storable(self.session),
            "figures": self.figures,
            "events": self.events,
            "unknown_events": dict(self.unknown),
            "warnings": self.warnings,
            "noise": self.noise,
            "noise_sample": self.samples,
        }

    def count(self, kind: str) -> None:
        """An event of a type that is not known was passed over."""
        name = storable(kind)[:NAME_LIMIT]
        self.unknown[name if name in self.unknown or len(self.unknown) < KEPT else "others"] += 1

    def hear_noise(self, line: bytes) -> None:
        """A line that is no event was passed over."""
        self.noise += 1
        if len(self.samples) < KEPT:
            self.samples.append(storable(line[:100].decode("utf-8", "replace")))


Read = Callable[[Event, Testimony], bool]
"""Enters one event into the testimony; False for a type that it does not know."""


def read_result(event: Event, testimony: Testimony) -> None:
    """The closing event as Claude Code and Cursor have it. Any bad sign in it is a failure, whatever else it says."""
    subtype, is_error, text = event.get("subtype"), event.get("is_error"), event.get("result")
    testimony.terminal = True
    testimony.text = text if isinstance(text, str) else ""
    testimony.session = testimony.session or storable(event.get("session_id") or "")
    error = event.get("error") or event.get("errors")
    if error or is_error not in (None, False) or (isinstance(subtype, str) and subtype != "success"):
        said = error or testimony.text or "no reason given"
        testimony.fail(said if subtype == "success" else f"{subtype}: {said}")
    elif subtype != "success" or is_error is not False or not isinstance(text, str):
        testimony.broken = "Its result event lacks a subtype, is_error or result."


class Stream:
    """Keeps the testimony of one run from the chunks of its stdout: the `Reader` that `process.run` feeds.

    What the program is about is noted on `leash`.
    """

    def __init__(self, read: Read, leash: Leash) -> None:
        self.testimony = Testimony()
        self.state: Literal["reading", "finished", "line_too_long"] = "reading"
        self._read = read
        self._leash = leash
        self._pending = bytearray()
        self._mark = b"\xef\xbb\xbf"  # a byte order mark is taken off the first line, and off no other

    def take(self, chunk: bytes) -> None:
        """Read on. Raises nothing, whatever it is given."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            self._pending += lines[0]
            lines[0] = bytes(self._pending)
            self._pending.clear()
        for line in lines:
            self._take_line(line)
        self._pending += rest
        if len(self._pending) > LINE_LIMIT_BYTES:
            self.state = "line_too_long"
        if self.state == "line_too_long":
            self._pending.clear()
        self._leash.step = self.testimony.step()

    def close(self) -> None:
        """The stream ended by itself. Its last line needs no newline, but it has to be whole."""
        if self._pending:
            self._take_line(bytes(self._pending), begun=re.compile(rb"\s*\{"))
            self._pending.clear()

    def seen(self) -> dict[str, str]:
        """The failure categories in the stream, each in a sentence."""
        too_long = {"line_too_long": f"A line of its stream was longer than {LINE_LIMIT_BYTES} bytes."}
        return self.testimony.seen() | (too_long if self.state == "line_too_long" else {})

    def _take_line(self, line: bytes, *, begun: re.Pattern[bytes] = _EVENT_BEGUN) -> None:
        if self.state == "line_too_long" or len(line) > LINE_LIMIT_BYTES:
            self.state = "line_too_long"
            return
        if self._mark:
            line, self._mark = line.removeprefix(self._mark), b""
        event: Event = {}
        try:
            event = _object(_decode(line.decode()))
        except (ValueError, RecursionError):
            if begun.match(line):
                self.testimony.broken = self.testimony.broken or "An event of its stream is not whole, or is not JSON."
        if isinstance(event.get("type"), str):
            self._take_event(event, line)
        else:
            self.testimony.hear_noise(line)

    def _take_event(self, event: Event, line: bytes) -> None:
        testimony = self.testimony
        testimony.events += 1
        try:
            if not self._read(event, testimony):
                testimony.count(event["type"])
            if testimony.terminal:
                self.state = "finished"
                json.loads(line, object_pairs_hook=without_duplicates)
        except (ValueError, RecursionError):
            testimony.broken = "An event of its stream contradicts itself, or is nested without end."


def _object(value: Any) -> Event:
    return cast("Event", value) if isinstance(value, dict) else {}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse).decode
