"""`sovereign-agent demo assistant`: Lucy's morning, answered by a model whose process is killed in the middle of it.

Real processes of this program, one queue:

    1. Lucy asks. A clerk claims the turn, generation 1; its model reads the stock and puts a line on the list
    2. the clerk is killed with SIGKILL while its model thinks; its claim runs out
    3. another clerk claims the turn, generation 2, and goes on from the transcript: nothing is asked or written twice

The model is a recorded one, or a live one when a key is set; which of the two it was is part of what is shown. What
is printed was read from the ledger. This room decides nothing, and exits 1 if what it saw is not what it promises.
"""

from __future__ import annotations

import json as json_text
import subprocess
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reference_organizations.store import clerk, stock
from sovereign_agent import assistant_work
from sovereign_agent.commands.stage import Story, eventually, perform, start
from sovereign_agent.database import Database
from sovereign_agent.llm_lab import resolve_api_key
from sovereign_agent.organization import Organization


def main(*, json: bool, ledger: str, root: Path | None) -> int:
    """Play it, in `root` or a folder of its own, on PostgreSQL if `ledger` is a URL. Returns 0 or 1: see `perform`."""
    return perform(lambda folder, story: play(folder, ledger, story), as_promised, json=json, root=root)


def as_promised(seen: dict[str, Any]) -> bool:
    """Whether everything is as the demo is to show it. A live model's words and lines are its own judgment."""
    generations = [row["generation"] for row in seen["transcript"]]
    calls = [call["id"] for row in seen["transcript"] for call in row["message"].get("tool_calls", ())]
    answers = [row["message"]["tool_call_id"] for row in seen["transcript"] if row["message"]["role"] == "tool"]
    written = [(line["sku"], line["quantity"], line["generation"]) for line in seen["shopping_list"]]
    recorded = [("SKU-VANILLA", 4, 1), ("SKU-STRAWBERRY", 3, 2)]
    return (
        seen["work"] == {"status": "DONE", "generation": 2}
        and generations == sorted(generations)
        and set(generations) == {1, 2}
        and calls == answers
        and len(set(calls)) == len(calls)
        and seen["lines_admitted"] == len(written)
        and (seen["model"] == "live" or written == recorded)
    )


def play(folder: Path, ledger: str, story: Story) -> dict[str, Any]:
    """All scenes, in order; what was seen, as the JSON that `--json` prints."""
    Organization.init(folder, ledger_url=ledger).close()
    clerks: list[subprocess.Popen[str]] = []
    try:
        with closing(Organization(folder)) as org:
            return _play_on(org, folder, story, clerks)
    finally:
        for process in clerks:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _play_on(org: Organization, folder: Path, story: Story, clerks: list[subprocess.Popen[str]]) -> dict[str, Any]:
    db, source = org.db, "live" if resolve_api_key() else "scripted"
    work = assistant_work.enqueue(db, "demo:morning", "lucy", clerk.PROMPT)
    story.say(f"An organization on {db.engine}. The model is {source}.")
    story.say(f'Lucy asks: "{clerk.PROMPT}"')

    def begin(name: str) -> subprocess.Popen[str]:
        clerks.append(start(folder, name, module=clerk.__name__, stdout=subprocess.PIPE))
        return clerks[-1]

    first = begin(clerk.HESITANT)
    assert first.stdout
    eventually(first.stdout.readline, "the first clerk's model")
    story.scene("A clerk claims her turn, generation 1. Two replies have come, and its model is thinking.")
    _tell_transcript(story, db, work)
    first.kill()
    first.wait()
    story.scene("The clerk is killed. Its claim runs out, and another one goes on from the transcript.")
    told = len(assistant_work.transcript(db.connection, work))
    second = begin("steady")
    eventually(lambda: assistant_work.get_work(db.connection, work)["status"] == "DONE", "the second clerk")
    second.wait()
    _tell_transcript(story, db, work, after=told)
    return _seen(org, story, work, source)


def _tell_transcript(story: Story, db: Database, work: str, *, after: int = 0) -> None:
    for row in assistant_work.transcript(db.connection, work)[after:]:
        message = json_text.loads(row["message"])
        asked = [
            f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", ())
        ]
        said = " and ".join([*filter(None, [message["content"]]), *asked])
        story.say(f"  generation {row['generation']}  {message['role']:<9}  {said[:300]}")


def _seen(org: Organization, story: Story, work: str, source: str) -> dict[str, Any]:
    connection = org.db.connection
    item = assistant_work.get_work(connection, work)
    rows = [
        {"generation": row["generation"], "message": json_text.loads(row["message"])}
        for row in assistant_work.transcript(connection, work)
    ]
    lines = [asdict(line) for line in stock.shopping_list(connection)]
    admitted = [row for row in rows if row["message"]["role"] == "tool" and '"quantity"' in row["message"]["content"]]
    listed = ", ".join(f"{line['quantity']} x {line['sku']} (generation {line['generation']})" for line in lines)
    story.scene(f"The shopping list: {listed}.")
    story.say(f"Transcript rows by generation: {[row['generation'] for row in rows]}; the turn is {item['status']}.")
    return {
        "ledger": org.db.engine,
        "model": source,
        "work": {"status": item["status"], "generation": item["generation"]},
        "answer": item["result"],
        "transcript": rows,
        "lines_admitted": len(admitted),
        "shopping_list": lines,
    }
