"""The models: one that plays recorded turns, and one that asks an OpenAI-compatible endpoint.

Which of the two answered stands in its ``source``, and neither ever steps in for the other: a missing key is a
normal condition and gives the recorded transcript, which says so; an endpoint that fails is a failure with a
name. No key and no header reaches a record, and no redirect is followed, which would take the key elsewhere. Whatever
an endpoint sends is hostile until it has been read: its size, its waiting times and its shape are bounded here, and its
meaning is the agent loop's to judge.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from threading import Thread
from typing import Any, ClassVar

from sovereign_agent.agent_loop import LoopResult, Message, Turn, Usage
from sovereign_agent.clock import SystemClock, monotonic
from sovereign_agent.errors import ConfigurationFault, ProviderFault
from sovereign_agent.tool_dispatch import ToolCall

DEFAULT_MODEL = "gpt-5.1"
KEY_NAME = "OPENAI_API_KEY"
URL_NAME = "OPENAI_BASE_URL"
MODEL_NAME = "OPENAI_MODEL"
MOST_BODY_BYTES = 2**22
MOST_REFUSAL_BYTES = 2**16
MOST_WAIT_SECONDS = 60.0
FIRST_WAIT_SECONDS = 0.5
ATTEMPTS = 4
"""Requests for one reply, the first one included."""

PASSING: dict[int, str] = {HTTPStatus.REQUEST_TIMEOUT: "timeout", HTTPStatus.TOO_MANY_REQUESTS: "rate_limited"}
REFUSING = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


class ScriptedModel:
    """Plays recorded turns, the same way each time.

    It has no memory of its own: the turn that it plays is the number of replies since the last user message, so a
    worker that takes a conversation over goes on where the one before it stopped. A call that was recorded
    without an id gets one from its place in the conversation.
    """

    source = "scripted"

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._turns = tuple(turns)

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Message], *, output_tokens: int, deadline: float
    ) -> Turn:
        """Play the next turn. Raises ProviderFault (``script_ended``) when there is none."""
        del tools, output_tokens, deadline
        roles = [message["role"] for message in messages]
        place = roles[::-1].index("user") if "user" in roles else len(roles)
        place = roles[len(roles) - place :].count("assistant")
        if place >= len(self._turns):
            raise ProviderFault(f"The script has no more turns than {len(self._turns)}.", category="script_ended")
        turn = self._turns[place]
        reply = f"call_{roles.count('assistant') + 1}"
        calls = (replace(call, id=call.id or f"{reply}_{number}") for number, call in enumerate(turn.calls, 1))
        return replace(turn, calls=tuple(calls))


def scripted_turn(text: str = "", calls: Iterable[Mapping[str, Any]] = ()) -> Turn:
    """A turn to be played: text, and calls as ``{"name": ..., "arguments": {...}}``, each with an "id" or without."""
    return Turn(text, tuple(ToolCall(call.get("id", ""), call["name"], call.get("arguments")) for call in calls))


@dataclass
class LiveModel:
    """A model behind an OpenAI-compatible endpoint.

    Attributes:
        model: its name there.
        api_key: is sent to the endpoint and put nowhere else.
        base_url: the endpoint; None for OpenAI's own.
        prices: currency units per million tokens, of input and of output. Without them no cost is told.
        sleep: waits between two requests; what it returns, if it is true, says that there shall be no other one. It may
            raise AuthorityLost, and should, when it finds the claim gone.

    Raises ConfigurationFault: ``openai_missing`` when the `openai` package is not installed, ``invalid_key`` for a key
    that no header can hold.
    """

    model: str
    api_key: str = field(repr=False)
    base_url: str | None = None
    prices: tuple[float, float] | None = None
    sleep: Callable[[float], object] = time.sleep
    source: ClassVar = "live"

    def __post_init__(self) -> None:
        try:
            self._openai: Any = importlib.import_module("openai")
        except ImportError:
            sentence = "There is a key for a live model, and no openai package to ask it with."
            install = "pip install 'sovereign-agent[live]'"
            raise ConfigurationFault(sentence, category="openai_missing", next_command=install) from None
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigurationFault(
                "The key of the live model is none that a header can hold.", category="invalid_key"
            )
        self._client = self._openai.OpenAI(
            api_key=self.api_key,
            base_url=self.base_url,
            max_retries=0,
            default_headers={"Accept-Encoding": "identity"},  # and what is packed all the same is not unpacked
            http_client=self._openai.DefaultHttpxClient(event_hooks={"response": [self._refuse]}),
        )

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Message], *, output_tokens: int, deadline: float
    ) -> Turn:
        """Ask, and ask again after what may pass: a busy or broken server, a lost connection, a reply cut short.

        Raises ProviderFault (``rate_limited``, ``server_error``, ``timeout``, ``connection_failed``, ``cut_stream``,
        ``unauthorized``, ``request_refused``, ``reply_too_large``, and what `read_reply` raises).
        """
        bound = "max_tokens" if self.base_url else "max_completion_tokens"  # the older word is the common one
        request = {"model": self.model, "messages": messages, bound: output_tokens} | (
            {"tools": tools} if tools else {}
        )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return read_reply(self._post_by(deadline, request), self.prices)
            except _MayPass as fault:
                wait = min(max(FIRST_WAIT_SECONDS * 2**attempt, fault.asked_seconds), MOST_WAIT_SECONDS)
                if attempt == ATTEMPTS or monotonic() + wait >= deadline or self.sleep(wait):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _post_by(self, deadline: float, request: dict[str, Any]) -> bytes:
        """`_post`, and nobody waits beyond the deadline: not for a name server, nor for headers that come in drops."""
        reply: Future[bytes] = Future()

        def post() -> None:
            try:
                reply.set_result(self._post(request, deadline))
            except BaseException as error:  # noqa: BLE001 - it is raised where the reply is waited for
                reply.set_exception(error)

        Thread(target=post, daemon=True).start()
        try:
            return reply.result(max(deadline - monotonic(), 0))
        except TimeoutError:
            raise _too_late() from None

    def _post(self, request: dict[str, Any], deadline: float) -> bytes:
        patience = min(max(deadline - monotonic(), 0.001), 3600)
        try:
            asked = self._client.chat.completions.with_streaming_response.create(**request, timeout=patience)
            with asked as response:
                body = _read(response.http_response, MOST_BODY_BYTES, deadline)
        except Exception as error:  # noqa: BLE001 - whatever the package and the transport below it raise
            raise self._named(error) from None
        if len(body) > MOST_BODY_BYTES:
            raise ProviderFault("The reply did not end.", category="reply_too_large")
        return body.replace(self.api_key.encode(), b"[key]")

    def _named(self, error: Exception) -> ProviderFault:
        for each in (error, error.__cause__):  # what `_refuse` raised: some versions of the package wrap it
            if isinstance(each, ProviderFault):
                return each
        if isinstance(error, self._openai.APITimeoutError):
            return _MayPass("The endpoint did not answer in time.", category="timeout")
        if isinstance(error, self._openai.APIConnectionError):
            return _MayPass("The endpoint could not be reached.", category="connection_failed")
        return _MayPass(f"The reply was cut short ({type(error).__name__}).", category="cut_stream")

    def _refuse(self, response: Any) -> None:
        """Raise for any status but a good one, before the client reads all that comes with it, or follows it."""
        if response.is_success:
            return
        status, happened = response.status_code, f"The endpoint answered {response.status_code}."
        said = _read(response, MOST_REFUSAL_BYTES).decode("utf-8", "replace").replace(self.api_key, "[key]")[:500]
        if status not in PASSING and status < HTTPStatus.INTERNAL_SERVER_ERROR:
            category = "unauthorized" if status in REFUSING else "request_refused"
            raise ProviderFault(happened, category=category, why=said)
        fault = _MayPass(happened, category=PASSING.get(status, "server_error"), why=said)
        fault.asked_seconds = asked_seconds(response.headers.get("retry-after", ""))
        raise fault


def build_model(
    turns: Iterable[Turn], model: str | None = None, *, base_url: str | None = None
) -> LiveModel | ScriptedModel:
    """The live model when a key is found, else the recorded transcript; ``source`` says which.

    What is not given is looked for where the key is: ``OPENAI_MODEL``, else `DEFAULT_MODEL`, and ``OPENAI_BASE_URL``.
    """
    key = resolve_api_key()
    if key is None:
        return ScriptedModel(turns)
    return LiveModel(model or _found(MODEL_NAME) or DEFAULT_MODEL, key, base_url or _found(URL_NAME))


def resolve_api_key() -> str | None:
    """The key from Colab's secrets, else from the environment; None when neither has one."""
    return _found(KEY_NAME)


def _found(name: str) -> str | None:
    try:
        secret = importlib.import_module("google.colab.userdata").get(name)
    except Exception:  # noqa: BLE001 - not in Colab, no such secret, or no access to it
        secret = None
    return (secret or os.environ.get(name, "")).strip() or None


def tool_trace(result: LoopResult) -> list[dict[str, Any]]:
    """What was called, in order: ``tool``, ``arguments``, ``ok``, and the ``result`` or the code of the refusal."""
    told = {m["tool_call_id"]: json.loads(m["content"]) for m in result.messages if m["role"] == "tool"}
    trace: list[dict[str, Any]] = []
    for call in (call for message in result.messages for call in message.get("tool_calls", ())):
        answer, asked = told[call["id"]], call["function"]
        came = answer["result" if answer["ok"] else "error"]
        trace.append(
            {"tool": asked["name"], "arguments": json.loads(asked["arguments"]), "ok": answer["ok"], "result": came}
        )
    return trace


def describe(result: LoopResult, label: str) -> str:
    """A run in a few lines, to be read by a person."""
    head = f"[{label}] {result.status}: {result.model_calls} model calls, {result.tool_calls} tool calls"
    steps = [
        f"  {'ok' if step['ok'] else 'refused':<7} {step['tool']} {json.dumps(step['arguments'])} -> {step['result']}"
        for step in tool_trace(result)
    ]
    return "\n".join([head, *steps, f"  answer  {result.answer or result.failure or '(none)'}"])


class _MayPass(ProviderFault):
    """A fault that may pass by itself; `asked_seconds` is what the server asks to wait."""

    asked_seconds = 0.0


def read_reply(body: bytes, prices: tuple[float, float] | None = None) -> Turn:
    """The turn that an endpoint's answer holds.

    Raises ProviderFault (``empty_body``, ``not_json``, ``malformed_reply``, ``error_reply``, ``no_choices``,
    ``no_message``) for an answer that is none, although its status was 200.
    """
    if not body.strip():
        raise _no_reply("empty_body")
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        raise _no_reply("not_json") from None
    try:
        choices = reply.get("choices")
        said = choices[0]["message"] if choices else None
        if not said:
            raise _no_reply("error_reply" if reply.get("error") else "no_message" if choices else "no_choices")
        content = said.get("content") or said.get("refusal") or ""
        text = content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)
        calls = [_call(asked) for asked in said.get("tool_calls") or ()]
        reason = choices[0].get("finish_reason") or ""
    except (AttributeError, KeyError, TypeError):
        raise _no_reply("malformed_reply") from None
    return Turn(text, tuple(calls), str(reason), _usage(reply.get("usage"), prices))


def _call(asked: Any) -> ToolCall:
    function = asked["function"]
    return ToolCall(str(asked.get("id") or ""), str(function.get("name") or ""), function.get("arguments"))


def asked_seconds(header: str) -> float:
    """How long a ``Retry-After`` asks to wait; 0 for what cannot be meant."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - SystemClock()()).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


def _usage(books: Any, prices: tuple[float, float] | None) -> Usage | None:
    try:
        used = [int(books["prompt_tokens"]), int(books["completion_tokens"])]
        cost = math.ceil(used[0] * prices[0] + used[1] * prices[1]) if prices else None
        return Usage(used[0], used[1], cost)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # then the loop charges the most that it can have been


def _no_reply(category: str) -> ProviderFault:
    return ProviderFault("The endpoint said 200, and what it sent is no reply.", category=category)


def _read(response: Any, most_bytes: int, deadline: float = math.inf) -> bytes:
    """A body as it came, and no more of it than the piece in which it became too long."""
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if monotonic() >= deadline:
            raise _too_late()
        if len(body) > most_bytes:
            break
    return bytes(body)


def _too_late() -> ProviderFault:
    return ProviderFault("The reply did not come in time.", category="timeout")
