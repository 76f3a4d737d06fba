"""Cursor, as ``cursor-agent -p --output-format stream-json`` speaks. It gets its task by a file in its folder."""

from __future__ import annotations

from sovereign_agent.providers.agent import Dialect
from sovereign_agent.providers.stream import Event, Testimony, read_result

KNOWN = {"system", "user", "assistant", "thinking", "tool_call", "result"}


def read(event: Event, testimony: Testimony) -> bool:
    """Enter one event into the testimony."""
    match event:
        case {"type": "system", "subtype": "init", "session_id": str(session)}:
            testimony.session = session
        case {"type": "tool_call", "subtype": "started", "call_id": str(call), "tool_call": {} as tool}:
            testimony.start(call, next((name.removesuffix("ToolCall") for name in tool), ""))
        case {"type": "tool_call", "subtype": "completed", "call_id": str(call)}:
            testimony.running.pop(call, None)
        case {"type": "result"}:
            read_result(event, testimony)
            testimony.measure({"duration_ms": event.get("duration_ms")})
        case _:
            pass
    return event["type"] in KNOWN


CURSOR = Dialect(
    version=r"^(\d[\w.+-]*)",
    required=("-p", "--output-format stream-json"),
    wished=("--force",),
    task_name=".sovereign-task.md",
    last=("Read the file .sovereign-task.md in this folder and do what it says.",),
    read=read,
)
