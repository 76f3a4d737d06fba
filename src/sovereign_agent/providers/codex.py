"""Codex, as ``codex exec --json -`` speaks. Its streams have neither a cost nor a closing result: turns end."""

from __future__ import annotations

from sovereign_agent.providers.agent import Dialect
from sovereign_agent.providers.stream import Event, Testimony

KNOWN = {
    "thread.started",
    "turn.started",
    "turn.completed",
    "turn.failed",
    "item.started",
    "item.updated",
    "item.completed",
    "item.plan.delta",
    "request_user_input",
    "error",
}
TOOLS = {"command_execution", "file_change", "mcp_tool_call", "collab_tool_call", "web_search"}


def read(event: Event, testimony: Testimony) -> bool:
    """Enter one event into the testimony."""
    kind: str = event["type"]
    testimony.waiting = kind == "request_user_input" or "approval_request" in kind
    match event:
        case {"type": "thread.started", "thread_id": str(thread)}:
            testimony.session = thread
        case {"type": "turn.started"}:
            testimony.terminal = False
        case {"type": "item.started", "item": {"id": str(call), "type": str(tool)}} if tool in TOOLS:
            testimony.start(call, tool)
        case {"type": "item.completed", "item": {"type": str(tool)} as item}:
            _read_item(tool, item, testimony)
        case {"type": "turn.completed" | "turn.failed"}:
            testimony.terminal = True
            _read_turn(event, testimony)
        case {"type": "error"}:  # of the stream itself: unlike an item's, it is never got over
            testimony.fail(event.get("message"))
        case _:
            pass
    return kind in KNOWN


def _read_item(kind: str, item: Event, testimony: Testimony) -> None:
    testimony.running.pop(str(item.get("id")), None)
    if kind == "agent_message":
        testimony.text = str(item.get("text"))
    elif kind == "error":
        testimony.warn(item.get("message"))


def _read_turn(event: Event, testimony: Testimony) -> None:
    match event:
        case {"type": "turn.completed", "usage": {} as usage}:
            testimony.measure(usage)
        case {"type": "turn.failed", "error": {"message": str(message)}}:
            testimony.fail(message)
        case {"type": "turn.failed"}:
            testimony.fail(event.get("error"))
        case _:
            testimony.broken = "Its turn ended without a count of what it used."


CODEX = Dialect(
    version=r"codex-cli (\S+)",
    verb=("exec",),
    required=("--json",),
    wished=("--skip-git-repo-check", "--sandbox workspace-write"),
    proofs=("- stdin",),
    last=("-",),
    read=read,
)
