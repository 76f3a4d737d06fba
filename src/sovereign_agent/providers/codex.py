"""Codex, as ``codex exec --json -`` speaks. Its streams have neither a cost nor a closing result: turns end."""

from __future__ import annotations

from sovereign_agent.providers.agent import Dialect
from sovereign_agent.providers.stream import Account, Event

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


def read(event: Event, account: Account) -> bool:
    """Enter one event into the account."""
    kind: str = event["type"]
    account.waiting = kind == "request_user_input" or "approval_request" in kind
    match event:
        case {"type": "thread.started", "thread_id": str(thread)}:
            account.session = thread
        case {"type": "item.started", "item": {"id": str(call), "type": str(tool)}} if tool in TOOLS:
            account.start(call, tool)
        case {"type": "item.completed", "item": {"type": str(tool)} as item}:
            _read_item(tool, item, account)
        case {"type": "turn.completed" | "turn.failed"}:
            account.terminal = True
            _read_turn(event, account)
        case {"type": "error"}:  # of the stream itself: unlike an item's, it is never got over
            account.fail(event.get("message"))
        case _:
            pass
    return kind in KNOWN


def _read_item(kind: str, item: Event, account: Account) -> None:
    account.running.pop(str(item.get("id")), None)
    if kind == "agent_message":
        account.text = str(item.get("text"))
    elif kind == "error":
        account.warn(item.get("message"))


def _read_turn(event: Event, account: Account) -> None:
    match event:
        case {"type": "turn.completed", "usage": {} as usage}:
            account.measure(usage)
        case {"type": "turn.failed", "error": {"message": str(message)}}:
            account.fail(message)
        case {"type": "turn.failed"}:
            account.fail(event.get("error"))
        case _:
            account.broken = "Its turn ended without a count of what it used."


CODEX = Dialect(
    version=r"codex-cli (\S+)",
    verb=("exec",),
    required=("--json",),
    wished=("--skip-git-repo-check", "--sandbox workspace-write"),
    proofs=("- stdin",),
    last=("-",),
    read=read,
)
