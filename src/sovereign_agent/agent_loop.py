"""The agent loop: a model asks, a dispatcher answers, until one of twelve endings.

The loop decides nothing about the world and holds no authority. It is bounded in every direction by `Limits`,
which do not trust the model: not its manners, not its arithmetic, not its word that it has finished. Each call
that it takes up is answered exactly once; what was cut off by the token limit is never run, even where it can be
read; and a call whose answer was lost in a crash is answered ``outcome_unknown``, because nobody knows.

Who loses authority stops. A refusal met outside a tool, in `check_current`, in `observe` or in the model's own
waiting, always ends the loop as AUTHORITY_LOST. One that the gate or a handler meets inside a tool is a
``tool_failed`` to the model, and ends the loop as well when the loop was given an authority of its own to lose:
a `check_current` or an `observe`. A loop that was given neither is nobody's worker; it goes on, and only its
writes are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from sovereign_agent import clock, tool_dispatch
from sovereign_agent.errors import ConfigurationFault, Contention, LedgerFault, ProviderFault
from sovereign_agent.records import new_id
from sovereign_agent.tool_dispatch import (
    Answer,
    Dispatcher,
    Occasion,
    ToolCall,
    argument_text,
    as_json,
    nothing,
    refused,
)

Message = dict[str, Any]
"""One message of a conversation, in the shape that OpenAI-compatible endpoints speak."""

MOST_TEXT_BYTES = 2**18
MOST_ID_BYTES = 128
MOST_NAME = 64
MOST_UNREADABLE_BYTES = 500

NOT_RUN = refused("not_run", "the loop ended before this call's turn")
OUTCOME_UNKNOWN = refused("outcome_unknown", "the worker that ran this call is gone", tool_dispatch.Effect.UNKNOWN)
TRUNCATED = refused("truncated", "the reply was cut by its token limit, so its calls are not what was meant")


class LoopStatus(StrEnum):
    """How a loop ended."""

    COMPLETED = "COMPLETED"
    MODEL_CALL_LIMIT = "MODEL_CALL_LIMIT"
    TOOL_LIMIT = "TOOL_LIMIT"
    TIME_LIMIT = "TIME_LIMIT"
    TOKEN_LIMIT = "TOKEN_LIMIT"  # noqa: S105 - no password; money ends here too, for tokens are what it buys
    CONTEXT_LIMIT = "CONTEXT_LIMIT"
    MODEL_FAILED = "MODEL_FAILED"
    EMPTY_REPLY = "EMPTY_REPLY"
    REPEATED_CALL_ID = "REPEATED_CALL_ID"
    LOOP_DETECTED = "LOOP_DETECTED"
    AUTHORITY_LOST = "AUTHORITY_LOST"
    STOP_REQUESTED = "STOP_REQUESTED"


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one run of the loop may use. Each is asked before what it limits, never after.

    Attributes:
        model_calls: requests to the model.
        tool_calls: calls answered, refused ones too.
        seconds: from the start; asked before each model call and each tool call.
        output_tokens: of one reply; the model is told.
        total_tokens: of all requests and replies. A model that does not count is charged the most it can have used.
        cost_micros: millionths of a currency unit. A model that does not tell its price ends the run.
        context_bytes: of the conversation, as JSON.
        result_bytes: of all tool results of one turn.
        repeats: so often one call may get one answer, unless its tool is there for polling.

    Raises ValueError for a limit that is negative, infinite or NaN: it would limit nothing.
    """

    model_calls: int
    tool_calls: int
    seconds: float
    output_tokens: int
    total_tokens: int | None = None
    cost_micros: int | None = None
    context_bytes: int = 2**20
    result_bytes: int = 2**18
    repeats: int = 3

    def __post_init__(self) -> None:
        if not all(0 <= limit < math.inf for limit in astuple(self) if limit is not None):
            raise ValueError(f"a limit is a finite number that is not negative: {self}")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one reply used, as the model's own books have it. Raises ValueError for a figure that counts nothing."""

    input_tokens: int
    output_tokens: int
    cost_micros: int | None = None

    def __post_init__(self) -> None:
        if not all(0 <= used < math.inf for used in (self.input_tokens, self.output_tokens, self.cost_micros or 0)):
            raise ValueError(f"nothing is used less than not at all: {self}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of a model: text, calls, or both; and why it stopped there."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: Usage | None = None


def is_turn(said: Any) -> bool:
    """Whether this is a `Turn` in all its parts: a model is somebody else's code, and its types are its word."""
    match said:
        case Turn(text=str(), calls=tuple(), finish_reason=str(), usage=None | Usage()):
            calls: Any = said.calls
            return all(type(call) is ToolCall and type(call.id) is type(call.name) is str for call in calls)
        case _:
            return False


class Model(Protocol):
    """Whatever can answer a conversation."""

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Message], *, output_tokens: int, deadline: float
    ) -> Turn:
        """Answer `messages`, which are the caller's and stay as they are.

        Args:
            messages: the conversation; every call in it has its answer.
            tools: the schemas of what may be called.
            output_tokens: the most that the reply may have.
            deadline: the moment at which nobody waits any longer; seconds on `clock.monotonic`.

        Raises ProviderFault, its category a name for what went wrong; and AuthorityLost when it found, while it
        waited, that its caller's right is gone.
        """
        ...


@dataclass(slots=True)
class LoopResult:
    """The account of a run, kept while it goes on.

    Attributes:
        status: how it ended.
        answer: the model's last text, when the run completed or its last text was cut.
        messages: the conversation, what it began with included. Every call has its answer.
        model_calls: requests made, failed ones too.
        tool_calls: calls answered, refused ones too; but not those whose turn never came.
        cost_micros: None when the model did not tell the price of every reply.
        failure: a name for what stopped it, where the status does not say it all.
        detail: more of that, for the record and not for a model.
    """

    status: LoopStatus = LoopStatus.COMPLETED
    answer: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    model_calls: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_micros: int | None = 0
    failure: str = ""
    detail: str = ""


def run_loop(
    model: Model,
    dispatcher: Dispatcher,
    messages: Iterable[Message],
    *,
    limits: Limits,
    observe: Callable[[Message], Any] | None = None,
    evidence: Callable[[ToolCall, Answer], Any] | None = None,
    check_current: Callable[[], Any] | None = None,
    stop: Callable[[], Any] | None = None,
    key: str = "",
    monotonic: Callable[[], float] = clock.monotonic,
) -> LoopResult:
    """Let a model work until it answers without a call, or until something ends it.

    Args:
        model: asked with the whole conversation each time.
        dispatcher: answers its calls.
        messages: the conversation so far; not changed. Calls in it without an answer are answered first.
        limits: the most that this run may use.
        observe: is handed each new message as it comes: a reply before its calls run, an answer right after.
        evidence: is handed each call with its whole answer, the private detail included.
        check_current: raises PermissionError when the authority is gone. Asked before each model call, after each
            reply and before each tool call.
        stop: whether somebody wishes the run to end; asked where `check_current` is.
        key: our name for this work, the same in each of its lives: with a call's place in the conversation it makes
            the operation id of the call. Without one, each run is a work of its own.
        monotonic: the clock of `Limits.seconds`.

    Raises what `observe`, `evidence`, `check_current` and `stop` raise, and what the house says through the model
    (Contention, LedgerFault), but for a loss of authority, which is a status.
    """
    hooks = (observe or nothing, evidence or nothing, check_current or nothing, stop or nothing)
    authority = bool(check_current or observe)
    run = _Run(model, dispatcher, limits, *hooks, authority, key or new_id("run"), monotonic)
    try:
        run.begin(messages)
        end = run.work()
        run.close()
    except PermissionError as error:
        if not tool_dispatch.refuses_authority(error):
            raise
        end = _End(LoopStatus.AUTHORITY_LOST, detail=str(error))
        run.observe = run.evidence = nothing  # the record is another's now
        run.close()
    run.account.status, run.account.failure, run.account.detail, run.account.answer = end
    return run.account


def paired(messages: Iterable[Message]) -> tuple[list[Message], list[Message]]:
    """The conversation with each call answered exactly once, in its order; and the answers that had to be added.

    An answer to no call is left out, and so is the second answer to one.
    """
    given = list(messages)
    answers: dict[Any, Message] = {}
    for message in given:
        if message.get("role") == "tool":
            answers.setdefault(message.get("tool_call_id"), message)
    whole: list[Message] = []
    added: list[Message] = []
    for message in given:
        if message.get("role") == "tool":
            continue
        whole.append(message)
        for call in message.get("tool_calls") or ():
            if (answer := answers.pop(call["id"], None)) is None:
                answer = tool_message(call["id"], OUTCOME_UNKNOWN)
                added.append(answer)
            whole.append(answer)
    return whole, added


class _End(NamedTuple):
    status: LoopStatus
    failure: str = ""
    detail: str = ""
    answer: str = ""


@dataclass(slots=True)
class _Run:
    """One run of the loop: what it was given, and what it has used so far."""

    model: Model
    dispatcher: Dispatcher
    limits: Limits
    observe: Callable[[Message], Any]
    evidence: Callable[[ToolCall, Answer], Any]
    check_current: Callable[[], Any]
    stop: Callable[[], Any]
    has_authority: bool
    key: str
    monotonic: Callable[[], float]
    account: LoopResult = field(default_factory=LoopResult)
    pending: deque[ToolCall] = field(default_factory=deque[ToolCall])
    seen: set[str] = field(default_factory=set[str])
    repeats: Counter[bytes] = field(default_factory=Counter[bytes])
    deadline: float = 0.0
    context_bytes: int = 0

    def begin(self, messages: Iterable[Message]) -> None:
        """Take the conversation over from whoever had it before."""
        self.deadline = self.monotonic() + self.limits.seconds
        self.account.messages, added = paired(messages)
        self.seen.update(call["id"] for message in self.account.messages for call in message.get("tool_calls") or ())
        self.context_bytes = sum(_size(message) for message in self.account.messages)
        for message in added:
            self.observe(message)

    def work(self) -> _End:
        """Ask and answer until the end."""
        schemas = self.dispatcher.schemas()
        while True:
            if end := self._obstacle() or self._used_up():
                return end
            turn = self._ask(schemas)
            if end := turn if isinstance(turn, _End) else self._take(turn):
                return end

    def close(self) -> None:
        """Answer what was taken up and never run."""
        while self.pending:
            self._answer(self.pending.popleft(), NOT_RUN)

    def _obstacle(self) -> _End | None:
        self.check_current()
        if self.stop():
            return _End(LoopStatus.STOP_REQUESTED)
        return None if self.monotonic() < self.deadline else _End(LoopStatus.TIME_LIMIT)

    def _used_up(self) -> _End | None:
        used, limits = self.account, self.limits
        if used.model_calls >= limits.model_calls:
            return _End(LoopStatus.MODEL_CALL_LIMIT)
        if self.context_bytes > limits.context_bytes:
            return _End(LoopStatus.CONTEXT_LIMIT)
        if limits.cost_micros is not None and used.cost_micros is None:
            return _End(LoopStatus.MODEL_FAILED, "cost_unknown")
        if limits.cost_micros is not None and (used.cost_micros or 0) >= limits.cost_micros:
            return _End(LoopStatus.TOKEN_LIMIT, "cost_limit")
        return None if self._output_room() > 0 else _End(LoopStatus.TOKEN_LIMIT, "token_limit")

    def _output_room(self) -> int:
        total = self.limits.total_tokens
        left = math.inf if total is None else total - self.account.input_tokens - self.account.output_tokens
        return int(min(self.limits.output_tokens, left))

    def _ask(self, schemas: list[Message]) -> Turn | _End:
        used, room = self.account, self._output_room()
        used.model_calls += 1
        try:
            turn = self.model.complete(tuple(used.messages), schemas, output_tokens=room, deadline=self.deadline)
        except ProviderFault as fault:
            return _End(LoopStatus.MODEL_FAILED, fault.category, tool_dispatch.storable(f"{fault} {fault.why}".strip()))
        except (Contention, LedgerFault, ConfigurationFault):
            raise
        except Exception as error:
            if tool_dispatch.refuses_authority(error):
                raise
            return _End(LoopStatus.MODEL_FAILED, type(error).__name__)
        if not is_turn(turn):
            return _End(LoopStatus.MODEL_FAILED, "malformed_turn")
        usage = turn.usage or Usage(self.context_bytes, room)
        used.input_tokens += usage.input_tokens
        used.output_tokens += usage.output_tokens
        untold = used.cost_micros is None or usage.cost_micros is None
        used.cost_micros = None if untold else (used.cost_micros or 0) + (usage.cost_micros or 0)
        return turn

    def _take(self, turn: Turn) -> _End | None:
        """Take a reply up, or refuse all of it."""
        self.check_current()
        cut = turn.finish_reason == "length"
        text = tool_dispatch.storable(turn.text)
        if not cut and turn.finish_reason not in {"stop", "tool_calls"}:
            return _End(LoopStatus.MODEL_FAILED, tool_dispatch.excerpt(turn.finish_reason, 60) or "no_finish_reason")
        if len(text.encode()) > MOST_TEXT_BYTES:
            return _End(LoopStatus.MODEL_FAILED, "reply_too_large")
        if not turn.calls and not text.strip():
            return _End(
                LoopStatus.TOKEN_LIMIT if cut else LoopStatus.EMPTY_REPLY, detail=f"No call and no text: {turn}"
            )
        calls = [_named(call, len(self.seen) + place) for place, call in enumerate(turn.calls)]
        ids = {call.id for call in calls}
        if len(ids) < len(calls) or ids & self.seen:
            return _End(LoopStatus.REPEATED_CALL_ID)
        self.seen |= ids
        self.pending.extend(calls)
        self._add(_reply(text, calls))
        if calls:
            return self._run_calls(cut=cut)
        return _End(LoopStatus.TOKEN_LIMIT if cut else LoopStatus.COMPLETED, answer=text)

    def _run_calls(self, *, cut: bool) -> _End | None:
        room = self.limits.result_bytes
        while self.pending:
            if end := self._obstacle():
                return end
            if self.account.tool_calls >= self.limits.tool_calls:
                return _End(LoopStatus.TOOL_LIMIT)
            self.account.tool_calls += 1
            call = self.pending[0]
            now = Occasion(self._operation_id(), self.deadline)
            answer = TRUNCATED if cut else self.dispatcher.invoke(call, now, result_bytes=room)
            self.pending.popleft()
            room -= len(answer.content.encode())
            self._answer(call, answer)
            if answer.authority_lost and self.has_authority:
                return _End(LoopStatus.AUTHORITY_LOST, detail=answer.detail)
            if self._goes_round(call, answer):
                name = tool_dispatch.storable(call.name[:MOST_NAME])
                return _End(LoopStatus.LOOP_DETECTED, detail=f"{name}: {answer.code or 'ok'}")
        return None

    def _operation_id(self) -> str:
        place = len(self.seen) - len(self.pending)
        return f"op_{hashlib.sha256(f'{self.key}/{place}'.encode()).hexdigest()[:32]}"

    def _goes_round(self, call: ToolCall, answer: Answer) -> bool:
        tool = self.dispatcher.tools.get(call.name)
        if tool and tool.polling:
            return False
        said = json.dumps([call.name, json.loads(_replayable(call.arguments)), answer.content], sort_keys=True)
        fingerprint = hashlib.sha256(said.encode()).digest()
        self.repeats[fingerprint] += 1
        return self.repeats[fingerprint] >= self.limits.repeats

    def _answer(self, call: ToolCall, answer: Answer) -> None:
        self._add(tool_message(call.id, answer))
        self.evidence(call, answer)

    def _add(self, message: Message) -> None:
        self.account.messages.append(message)
        self.context_bytes += _size(message)
        self.observe(message)


def _reply(text: str, calls: Sequence[ToolCall]) -> Message:
    asked = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": _speakable(call.name), "arguments": _replayable(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": asked} if asked else {})


def _named(call: ToolCall, place: int) -> ToolCall:
    return replace(call, id=tool_dispatch.excerpt(call.id, MOST_ID_BYTES) or f"call_{place}")


def tool_message(call_id: str, answer: Answer) -> Message:
    """The message that answers a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": answer.content}


def _replayable(arguments: Any) -> str:
    """Arguments as an endpoint will take them back: what was no JSON object becomes one that says so."""
    try:
        return argument_text(arguments)
    except ValueError:
        text = arguments if isinstance(arguments, str) else type(arguments).__name__
        return as_json({"unreadable": tool_dispatch.excerpt(text, MOST_UNREADABLE_BYTES)})


def _speakable(name: str) -> str:
    """A tool's name as an endpoint will take it back: letters, digits, ``_`` and ``-``, 64 of them at most."""
    plain = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return name if plain and len(name) <= MOST_NAME else "invalid_name"


def _size(message: Message) -> int:
    return len(as_json(message).encode())
