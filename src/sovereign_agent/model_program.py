"""The program behind the model provider: the agent loop at work on one assignment, in a process of its own.

    stdin    {"settings": {...}, "envelope": {...}}, in the run's folder
    stdout   a JSON object a line: ``begun``; ``call`` and ``answer`` of each tool; ``end``

It joins the mind with the ledger, as only a service does, and stands below its worker all the same: what it hands in is
a report, which the worker's terminal write makes canonical or does not. It writes nothing into the ledger. The
organization's own tools may, behind the fence: each consequential tool is refused unless the attempt is still the
current one, its lease not run out or passed on, and nothing paused. No signal is handled: whoever ends it, ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict

from sovereign_agent import configuration, runs
from sovereign_agent.agent_loop import Limits, LoopResult, LoopStatus, Message, run_loop
from sovereign_agent.configuration import LimitSettings, ModelSettings
from sovereign_agent.database import LEDGER_NAME, Connection, Database
from sovereign_agent.errors import Contention, LedgerUnavailable, PolicyRefusal, SovereignError
from sovereign_agent.llm_lab import LiveModel
from sovereign_agent.providers.base import REPORT_NAME, SUMMARY_LIMIT, Envelope, Report
from sovereign_agent.tool_dispatch import Answer, Dispatcher, ExecutableTool, Fence, ToolCall
from sovereign_agent.workspace import RAW_NAME, Workspace, locate, read_bounded, safe_join

READ_LIMIT_BYTES = 2**18
NAMES_LISTED = 1000
DETAIL_LIMIT = 500
FIGURES = ("model_calls", "tool_calls", "input_tokens", "output_tokens", "cost_micros")

INSTRUCTIONS = f"""\
You work for an organization. The JSON object that follows is your task: `sow.scope` is what has to be done now,
`outcome` is what it is for, and `rulings` are decisions that bind you, the oldest first. Nobody answers you.

Your tools are all that you can act with. Hand files over with `write_deliverable`. When the work is done, or cannot be
done, call `report` once: `status` is "completed", "blocked" or "failed"; `summary` says what you did, in 1 to
{SUMMARY_LIMIT} characters; `deliverables` are the names of the files that you handed over; `question` says what has to
be decided, only when you are blocked, and then always; `proposal` is an object that proposes the effect that
`sow.required_effect_kind` names, where it names one. Then end with a short answer. Without a report nothing counts.
"""

ENDINGS = {
    LoopStatus.COMPLETED: ("", ""),
    LoopStatus.MODEL_CALL_LIMIT: ("actor_reported_failure", "It had used all of its model calls."),
    LoopStatus.TOOL_LIMIT: ("actor_reported_failure", "It had used all of its tool calls."),
    LoopStatus.TIME_LIMIT: ("timeout", "It had used all of its seconds."),
    LoopStatus.TOKEN_LIMIT: ("actor_reported_failure", "It had used all of its tokens, or its money."),
    LoopStatus.CONTEXT_LIMIT: ("actor_reported_failure", "Its conversation had become too long."),
    LoopStatus.MODEL_FAILED: ("provider_error", "Its model failed."),
    LoopStatus.EMPTY_REPLY: ("provider_error", "Its model answered nothing."),
    LoopStatus.REPEATED_CALL_ID: ("provider_error", "Its model gave two calls one id."),
    LoopStatus.LOOP_DETECTED: ("actor_reported_failure", "It made one call again and again."),
    LoopStatus.AUTHORITY_LOST: ("lease_lost", "Its authority was gone."),
    LoopStatus.STOP_REQUESTED: ("interrupted", "Everything was paused."),
}
"""The failure category of each ending, and a sentence for it."""


class Nothing(BaseModel):
    """The arguments of a tool that takes none; those of the others begin here."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Name(Nothing):
    """A file, by its name relative to the run's folder, or to the folder of what is handed over."""

    name: str


class File(Name):
    """A file to hand over."""

    text: str


@dataclass(frozen=True, slots=True)
class Authority:
    """The attempt that the program works under, as the ledger knows it."""

    db: Database
    envelope: Envelope

    def check(self, connection: Connection, _: ToolCall | None = None) -> int:
        """The attempt's token, for as long as the caller's transaction lasts. Raises as `runs.require_current`."""
        told = self.envelope
        return runs.require_current(connection, told.assignment_id, told.attempt_id, told.actor_id)

    def stop(self) -> bool:
        """Whether everything is paused. Raises AuthorityLost.

        A ledger that is busy or out of reach is asked again: the leash ends what lasts too long.
        """
        while True:
            try:
                self.check(self.db.connection)
            except PolicyRefusal:
                return True
            except (Contention, LedgerUnavailable):
                time.sleep(runs.PAUSE_SECONDS)
            else:
                return False


def own_tools(folder: Workspace) -> list[ExecutableTool]:
    """What every model may do: read what is in the run's folder, hand files over, and report."""

    def list_files(_: Nothing) -> list[str]:
        names = (each.relative_to(folder.path) for each in folder.path.rglob("*") if each.is_file())
        return sorted(str(name) for name in names if name.parts[0] != RAW_NAME)[:NAMES_LISTED]

    def read_file(asked: Name) -> str | None:
        content = read_bounded(folder, asked.name, READ_LIMIT_BYTES)
        return None if content is None else content.decode("utf-8", "replace")

    def write_deliverable(asked: File) -> str:
        path = safe_join(folder.out, asked.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(asked.text, encoding="utf-8")
        return asked.name

    def report(asked: Report) -> str:
        (folder.path / REPORT_NAME).write_text(asked.model_dump_json(), encoding="utf-8")
        return asked.status

    return [
        ExecutableTool("list_files", "The names of all files of this run.", Nothing, list_files),
        ExecutableTool("read_file", "The text of a file of this run, null if there is none.", Name, read_file),
        ExecutableTool("write_deliverable", "Write a file to hand over.", File, write_deliverable, consequential=True),
        ExecutableTool("report", "Report how the work ended.", Report, report, consequential=True),
    ]


def dispatcher_for(authority: Authority, tools: Sequence[ExecutableTool]) -> Dispatcher:
    """All these tools, the consequential ones behind the attempt. Raises ValueError for two of one name."""
    fence = Fence(authority.db.transaction, authority.check)
    return Dispatcher(tools, allowed=[tool.name for tool in tools], fence=fence)


def limits_of(settings: LimitSettings) -> Limits:
    """The loop's limits, with money in millionths."""
    money = None if settings.money is None else round(settings.money * 1e6)
    return Limits(**settings.model_dump(exclude={"money"}), cost_micros=money)


@dataclass(frozen=True, slots=True)
class Program:
    """One run: its task, the model's key, and where its events go."""

    settings: ModelSettings
    envelope: Envelope
    key: str
    events: TextIO

    def run(self) -> None:
        """Work, and say how it ended."""
        self.say(type="begun", session=self.envelope.attempt_id)
        folder, figures = locate(Path.cwd().parents[2], self.envelope.attempt_id), dict[str, Any]()
        try:
            result = self.work(folder)
            figures = {name: getattr(result, name) for name in FIGURES}
            category, sentence = ENDINGS[result.status]
            text = " ".join(filter(None, [sentence, result.failure, result.detail, result.answer]))
        except SovereignError as error:
            category, text = "provider_unavailable", f"{error} {error.why}"
        if category not in ("", runs.LEASE_LOST):
            failed = Report(status="failed", summary=text[:SUMMARY_LIMIT])
            (folder.path / REPORT_NAME).write_text(failed.model_dump_json(), encoding="utf-8")
        self.say(type="end", category=category, text=text, figures=figures)

    def work(self, folder: Workspace) -> LoopResult:
        """Let the model work until the loop ends. Raises what the ledger and the tools' reference raise."""
        settings, root = self.settings, folder.path.parents[2]
        db = Database(configuration.load(root).ledger.url or root / LEDGER_NAME, root=root, create=False)
        theirs = configuration.resolve_reference(settings.tools, root)(db) if settings.tools else ()
        authority = Authority(db, self.envelope)

        def wait(seconds: float) -> None:
            time.sleep(seconds)
            authority.stop()

        return run_loop(
            LiveModel(settings.model, self.key, settings.base_url, settings.prices, wait),
            dispatcher_for(authority, [*own_tools(folder), *theirs]),
            [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": self.envelope.model_dump_json()}],
            limits=limits_of(settings.limits),
            observe=self.observe,
            evidence=self.note,
            stop=authority.stop,
            key=self.envelope.attempt_id,
        )

    def observe(self, message: Message) -> None:
        """Tell of the calls of a reply, the last one first: the one told last is the first at work."""
        for call in reversed(message.get("tool_calls", ())):
            self.say(type="call", id=call["id"], tool=call["function"]["name"])

    def note(self, call: ToolCall, answer: Answer) -> None:
        """Tell how a call ended, and why, which the model is not told."""
        told = {"ok": answer.ok, "code": answer.code, "effect": answer.effect, "detail": answer.detail[:DETAIL_LIMIT]}
        self.say(type="answer", id=call.id, **told)

    def say(self, **event: Any) -> None:
        """Write one event."""
        print(json.dumps(event), file=self.events, flush=True)


def main() -> None:
    """Run the task on stdin. What a tool prints goes to stderr, and no tool finds the key in its environment."""
    events = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    task = json.load(sys.stdin)
    settings = ModelSettings.model_validate(task["settings"])
    key = os.environ.pop(settings.key_env).strip()
    Program(settings, Envelope.model_validate(task["envelope"]), key, events).run()
