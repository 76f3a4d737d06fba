"""What the three agent programs print, as their own documents and sources show it; the values are ours.

Claude Code   anthropics/claude-code docs (headless mode, stream-json output); anthropics/claude-agent-sdk-python#599
              for rate_limit_event; anthropics/claude-code#79500 for a result that contradicts itself
Codex         openai/codex codex-rs/exec/src/exec_events.rs
Cursor        Cursor's CLI documentation (output format), as quoted in manaflow-ai/manaflow PR#152
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]

CLAUDE: list[Event] = [
    {"type": "system", "subtype": "init", "session_id": "s-1", "cwd": "/w", "model": "m", "tools": ["Read"]},
    {
        "type": "assistant",
        "message": {"id": "msg_1", "role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        "session_id": "s-1",
    },
    {
        "type": "assistant",
        "message": {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}],
        },
        "session_id": "s-1",
    },
    {
        "type": "user",
        "message": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "..."}]},
        "session_id": "s-1",
    },
    {
        "type": "result",
        "subtype": "success",
        "is_error": False,
        "duration_ms": 10,
        "num_turns": 1,
        "result": "all done",
        "session_id": "s-1",
        "total_cost_usd": 0.01,
        "usage": {"input_tokens": 3, "output_tokens": 4},
    },
]

CODEX: list[Event] = [
    {"type": "thread.started", "thread_id": "t-1"},
    {"type": "turn.started"},
    {
        "type": "item.started",
        "item": {"id": "item_0", "type": "command_execution", "command": "ls", "status": "in_progress"},
    },
    {
        "type": "item.completed",
        "item": {"id": "item_0", "type": "command_execution", "command": "ls", "exit_code": 0, "status": "completed"},
    },
    {"type": "item.completed", "item": {"id": "item_1", "type": "agent_message", "text": "all done"}},
    {"type": "turn.completed", "usage": {"input_tokens": 3, "cached_input_tokens": 0, "output_tokens": 4}},
]

CURSOR: list[Event] = [
    {"type": "system", "subtype": "init", "apiKeySource": "env", "cwd": "/w", "session_id": "c-1", "model": "Auto"},
    {"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": "go"}]}, "session_id": "c-1"},
    {"type": "thinking", "subtype": "delta", "text": "..", "session_id": "c-1", "timestamp_ms": 1},
    {
        "type": "tool_call",
        "subtype": "started",
        "call_id": "k1",
        "tool_call": {"shellToolCall": {"args": {"command": "ls"}}},
        "session_id": "c-1",
    },
    {
        "type": "tool_call",
        "subtype": "completed",
        "call_id": "k1",
        "tool_call": {"shellToolCall": {"args": {"command": "ls"}, "result": {"success": {"exitCode": 0}}}},
        "session_id": "c-1",
    },
    {"type": "assistant", "message": {"role": "assistant", "content": [{"type": "text", "text": "all done"}]}},
    {
        "type": "result",
        "subtype": "success",
        "is_error": False,
        "duration_ms": 9,
        "result": "all done",
        "session_id": "c-1",
        "request_id": "r",
    },
]

GOOD = {"claude": CLAUDE, "codex": CODEX, "cursor": CURSOR}
KINDS = tuple(GOOD)
RATE_LIMIT: Event = {
    "type": "rate_limit_event",
    "rate_limit_info": {"status": "allowed", "rateLimitType": "five_hour", "resetsAt": 1900000000},
    "session_id": "s-1",
}


def failed(kind: str, text: str = "usage limit reached") -> Event:
    """A closing event that tells of a failure."""
    if kind == "codex":
        return {"type": "turn.failed", "error": {"message": text}}
    return GOOD[kind][-1] | {"is_error": True, "result": text}


def lines(*events: Event) -> bytes:
    """Events as a program prints them."""
    return b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)


def good(kind: str) -> bytes:
    """The whole stream of a run that went well."""
    return lines(*GOOD[kind])
