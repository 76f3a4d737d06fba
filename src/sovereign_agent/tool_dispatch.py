"""Tool dispatch: allow-list, schema, gate, handler, in that order, and nothing runs out of turn.

A model asks; it decides nothing. Each call is answered by one `Answer`, whatever its name and its arguments
hold: an unknown name, text that is no JSON, a gate that refuses and a handler that fails all become a code. The
model sees the code. The reason is kept apart, in `Answer.detail`, for the record.

This room holds no authority and knows no ledger. Who may write is asked of the gate that it was given, after
the arguments are known to be good and before the handler runs. It never guesses what a failed write did:
`Answer.effect` says none, done or unknown. Handlers run in the caller's thread, and no time limit here can
interrupt one: a handler that may wait is ``informed`` and keeps to its deadline itself.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from sovereign_agent.errors import SovereignError

MOST_ARGUMENT_BYTES = 2**18
MOST_RESULT_BYTES = 2**18
EXCERPT_BYTES = 2000
MOST_INTEGER = 2**63 - 1
"""The greatest number that a ledger takes, on either engine."""

BEGUN_BEFORE = "effect_repeated"
"""The category of a gate's refusal that says: this very operation was let out before. What it did is unknown here."""

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Effect(StrEnum):
    """What a call that did not go well has changed."""

    NONE = "none"
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model asks for. `arguments` stand as they came: text in most cases, and never to be trusted."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Occasion:
    """What an informed or fenced handler is told, beside its arguments.

    Attributes:
        operation_id: our own name for this one act, for use outside as an idempotency key.
        deadline: the moment, on `clock.monotonic`, at which nobody waits any longer; in seconds.
        connection: for a fenced handler, the connection of the transaction in which the check has just passed.
        token: what the fence's check answered: the token of the authority that it acts under.
    """

    operation_id: str = ""
    deadline: float = math.inf
    connection: Any = None
    token: Any = None


AT_LEISURE = Occasion()
"""No deadline, and no name: for calls that are made by hand."""


def nothing(*_: object) -> None:
    """What is called where nobody wants to be told."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The one door for what is written under an authority.

        fenced tool         | transaction: check, handler, record(its Answer) | commit
        other consequential | transaction: check, record(None)                | commit | handler

    So the write of a fenced tool and the record of its answer stand together or not at all, and whatever leaves the
    house through another tool is known before it leaves. A record that raises keeps the one from being committed
    and the other from running.

    Should the end of a fenced commit not be known, the answer that is returned is a ``tool_failed`` of unknown
    effect, although the recorded one may stand. Who keeps a transcript lets the first recorded answer of a call win,
    as `agent_loop.paired` does.

    Attributes:
        transaction: opens one; it commits at its end, and rolls back when it is left by an exception.
        check: refuses on its connection, or answers the token of the authority.
        record: is told the connection, the call, its `Occasion`, and its `Answer` or None.
    """

    transaction: Callable[[], AbstractContextManager[Any]]
    check: Callable[[Any, ToolCall], Any]
    record: Callable[[Any, ToolCall, Occasion, Answer | None], Any] = nothing


@dataclass(frozen=True, slots=True)
class ExecutableTool:
    """A tool that a model may ask for.

    Attributes:
        arguments: a Pydantic model that forbids extra fields; it is always applied strictly.
        handler: gets the arguments, and the `Occasion` as well when the tool is informed or fenced.
        consequential: it changes something, so every gate that there is is asked before each call.
        fenced: its handler writes in the very transaction in which the check has passed.
        informed: its handler wants to know its operation id and its deadline.
        polling: it is meant to be asked again and again with the same arguments.

    Raises ValueError for a model that lets extra fields pass, and for a fenced tool that is not consequential.
    """

    name: str
    description: str
    arguments: type[BaseModel]
    handler: Callable[..., Any]
    consequential: bool = False
    _: KW_ONLY
    fenced: bool = False
    informed: bool = False
    polling: bool = False

    def __post_init__(self) -> None:
        if self.arguments.model_config.get("extra") != "forbid":
            raise ValueError(f'the arguments of {self.name} take fields that nobody declared; set extra="forbid"')
        if self.fenced and not self.consequential:
            raise ValueError(f"{self.name} is fenced, so it writes, so it is consequential")

    def schema(self) -> dict[str, Any]:
        """What a model is told of the tool."""
        parameters = self.arguments.model_json_schema()
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call.

    Attributes:
        ok: the handler ran, and its result is `result`.
        code: empty when ok, else why not.
        content: what the model is told, as JSON text.
        effect: what a call that is not ok has changed.
        detail: the reason, or the whole of a result that is too large; for the record, never for the model.
        authority_lost: the gate or the handler said that the right to write is gone.
    """

    ok: bool
    code: str
    content: str
    result: Any = None
    effect: Effect = Effect.NONE
    detail: str = ""
    authority_lost: bool = False


def refused(code: str, detail: str = "", effect: Effect = Effect.NONE, *, lost: bool = False, **told: Any) -> Answer:
    """An answer that is not ok; `told` is what the model learns beside the code and the effect."""
    content = as_json({"ok": False, "error": code, "effect": effect, **told})
    return Answer(ok=False, code=code, content=content, effect=effect, detail=detail, authority_lost=lost)


class Dispatcher:
    """The tools that one worker may use, and the gate before those that write.

    Args:
        tools: each under a name of its own.
        allowed: the names that may be called; a tool that is not among them does not exist for the model.
        before_write: the gate of consequential tools that are not fenced. It returns, or it raises.
        fence: the gate of all consequential tools, and the only one of those that are fenced.

    Raises ValueError for two tools of one name.
    """

    def __init__(
        self,
        tools: Iterable[ExecutableTool],
        *,
        allowed: Iterable[str],
        before_write: Callable[[ToolCall], Any] | None = None,
        fence: Fence | None = None,
    ) -> None:
        given = list(tools)
        self.tools = {tool.name: tool for tool in given}
        if len(self.tools) != len(given):
            raise ValueError("two tools have one name, and which of them is meant nobody knows")
        self._allowed = frozenset(allowed)
        self._before_write = before_write
        self._fence = fence

    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the allowed tools, in the order in which they were given."""
        return [tool.schema() for tool in self.tools.values() if tool.name in self._allowed]

    def invoke(self, call: ToolCall, now: Occasion = AT_LEISURE, *, result_bytes: int = MOST_RESULT_BYTES) -> Answer:
        """Run one call, or say why not. Raises nothing but what interrupts the process; ``SystemExit`` is a failure.

        Args:
            call: what the model asks for.
            now: the operation id and the deadline that an informed handler is told.
            result_bytes: the most that the model is told; a larger result is cut, and said to be.
        """
        tool = self.tools.get(call.name) if call.name in self._allowed else None
        if tool is None:
            return refused("tool_not_allowed", f"{call.name[:200]!r}", allowed=sorted(self._allowed))
        try:
            arguments = tool.arguments.model_validate_json(argument_text(call.arguments), strict=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a validator is a user's code and may raise anything
            return refused("invalid_arguments", _told(error))
        if tool.consequential and not (self._fence or (self._before_write and not tool.fenced)):
            return refused("write_authority_required", "no gate was given to this dispatcher")
        return self._act(tool, call, arguments, now, result_bytes)

    def _act(self, tool: ExecutableTool, call: ToolCall, arguments: Any, now: Occasion, result_bytes: int) -> Answer:
        effect = Effect.NONE
        try:
            if tool.fenced and self._fence:
                with self._fence.transaction() as connection:
                    now = replace(now, connection=connection, token=self._fence.check(connection, call))
                    answer = _ran(tool, arguments, now, result_bytes)
                    self._fence.record(connection, call, now, answer)
                    effect = Effect.UNKNOWN  # who is cut off from the commit that lies ahead does not know its end
                return answer
            if tool.consequential:
                now = self._let_out(call, now)
                effect = Effect.UNKNOWN
            return _ran(tool, arguments, now, result_bytes)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a handler is a user's code and may raise anything
            if getattr(error, "category", "") == BEGUN_BEFORE:
                effect = Effect.UNKNOWN
            return refused("tool_failed", _told(error), effect, lost=refuses_authority(error))

    def _let_out(self, call: ToolCall, now: Occasion) -> Occasion:
        """Ask every gate whether this call may act outside a transaction, and have the intent recorded first."""
        if self._before_write:
            self._before_write(call)
        if self._fence:
            with self._fence.transaction() as connection:
                now = replace(now, token=self._fence.check(connection, call))
                self._fence.record(connection, call, now, None)
        return now


def _ran(tool: ExecutableTool, arguments: Any, now: Occasion, result_bytes: int) -> Answer:
    """The answer of a handler that came back; a result that is too large says that it has acted."""
    result = tool.handler(arguments, now) if tool.fenced or tool.informed else tool.handler(arguments)
    text = as_json(result)
    size = len(text.encode())
    if size <= result_bytes:
        return Answer(ok=True, code="", content=f'{{"ok": true, "result": {text}}}', result=result)
    notice = f"The result has {size} bytes, and {max(result_bytes, 0)} are left for it."
    start = excerpt(text, min(EXCERPT_BYTES, result_bytes))
    effect = Effect.DONE if tool.consequential else Effect.NONE
    return refused("result_too_large", text, effect, notice=notice, excerpt=start)


def argument_text(arguments: Any) -> str:
    """The arguments of a call as the text of one JSON object that says the same to every reader.

    Nothing, ``""`` and ``null`` are an object without fields. An object that was decoded already is taken; JSON
    inside a JSON string is not decoded a second time.

    Raises ValueError for text that is no JSON object, for a key that stands twice, for NaN, infinity and numbers
    beyond 64 bits, for NUL and half a character, and for what is too long or too deeply nested.
    """
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
        if len(text.encode()) > MOST_ARGUMENT_BYTES:
            raise ValueError(f"they are longer than {MOST_ARGUMENT_BYTES} bytes")
        value: object = {} if text.strip() in {"", "null"} else _DECODER.decode(text)
    except (RecursionError, TypeError) as error:
        raise ValueError(f"they cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("they are no JSON object")  # noqa: TRY004 - the value is bad; the caller's type is not
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half a character ends here, in a UnicodeEncodeError
        if _NUL.search(text):
            raise ValueError("a NUL character stands in them")
    return text if value else "{}"


def as_json(value: Any) -> str:
    """`value` as JSON that can be stored anywhere: half a character stands as its escape.

    Raises TypeError, ValueError or RecursionError for what is no JSON, NaN and infinity among it.
    """
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace").decode()


def storable(text: str) -> str:
    """A text as every engine takes it: NUL and half a character become a mark."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def excerpt(text: str, most_bytes: int) -> str:
    """The first `most_bytes` of a storable text, in UTF-8, without half a character at the end."""
    return storable(text).encode()[: max(most_bytes, 0)].decode(errors="ignore")


def refuses_authority(error: BaseException) -> bool:
    """Whether an error says that the right to act is gone: a PermissionError that is not the operating system's."""
    return isinstance(error, PermissionError) and error.errno is None


def _told(error: BaseException) -> str:
    """What went wrong; of a refusal its category and its reason, too."""
    kind, said = type(error).__name__, [str(error)]
    if isinstance(error, SovereignError):
        kind = f"{kind} {error.category}".strip()
        said += [error.why, error.inspect and f"See {error.inspect}."]
    return storable(f"{kind}: {' '.join(filter(None, said))}"[:2000])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in them twice, and which of the two is meant nobody knows")
    return found


def _number(text: str) -> float:
    whole = text.lstrip("-").isdigit()
    number = int(text) if whole else float(text)
    if not abs(number) <= (MOST_INTEGER if whole else sys.float_info.max):  # NaN is not below anything
        raise ValueError(f"{text[:40]} is no number that can be stored")
    return number


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates, parse_float=_number, parse_int=_number, parse_constant=_number
)
