"""Claude Code, as ``claude -p --output-format stream-json --verbose`` speaks."""

from __future__ import annotations

from sovereign_agent.providers.agent import Dialect
from sovereign_agent.providers.stream import Event, Testimony, read_result

KNOWN = {"system", "assistant", "user", "result"}


def read(event: Event, testimony: Testimony) -> bool:
    """Enter one event into the testimony."""
    match event:
        case {"type": "system", "subtype": "init", "session_id": str(session)}:
            testimony.session = session
        case {"type": "assistant" | "user", "message": {"content": [*parts]}}:
            for part in parts:
                _read_part(part, testimony)
        case {"type": "result"}:
            read_result(event, testimony)
            testimony.measure({name: event.get(name) for name in ("num_turns", "total_cost_usd", "duration_ms")})
            testimony.measure(event.get("usage"))
            if denied := event.get("permission_denials"):
                testimony.warn(f"tools were denied: {denied}")
        case _:
            pass
    return event["type"] in KNOWN


def _read_part(part: object, testimony: Testimony) -> None:
    match part:
        case {"type": "tool_use", "id": str(call), "name": str(tool)}:
            testimony.start(call, tool)
        case {"type": "tool_result", "tool_use_id": str(call)}:
            testimony.running.pop(call, None)
        case _:
            pass


CLAUDE = Dialect(
    version=r"(?<!\S)(\S+) \(Claude Code\)",
    required=("-p", "--output-format stream-json", "--verbose"),
    wished=("--permission-mode acceptEdits",),
    read=read,
)
