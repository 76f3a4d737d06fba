"""`assistant serve`, `ask` and `evidence`: where the model and the tools come from, and what people see."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Location
from support import eventually, rows
from test_cli import Call, Ended, ended, spawned
from test_llm_lab import KEY, Endpoint, reply
from test_serving import SOLD, asks, is_final, sold

from sovereign_agent import assistant_work as work
from sovereign_agent import cli
from sovereign_agent.organization import Organization

TOOLS = """
from pydantic import BaseModel, ConfigDict
from sovereign_agent.tool_dispatch import ExecutableTool

class Piece(BaseModel):
    model_config = ConfigDict(extra="forbid")
    piece: int

def sell(arguments, now):
    now.connection.execute("INSERT INTO sold (item, piece, token) VALUES ('shop', ?, ?)", (arguments.piece, now.token))

def build(db):
    return [ExecutableTool("sell", "Sell one piece.", Piece, sell, consequential=True, fenced=True)]
"""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a verb in this process."""
    return lambda *words: Ended(cli.main([str(word) for word in words]), *capsys.readouterr())


@pytest.fixture
def answering(location: Location, org: Organization) -> Callable[..., None]:
    """Write [assistant] with tools into the organization's settings."""

    def write(**settings: Any) -> None:
        org.db.extend("sold", [SOLD])
        name = f"tools_{location.root.parent.name}"
        (location.root / f"{name}.py").write_text(TOOLS)
        path = location.root / "sovereign.toml"
        lines = [f"{key} = {json.dumps(value)}" for key, value in ({"tools": f"{name}:build"} | settings).items()]
        path.write_text("\n".join([path.read_text(), "[assistant]", *lines]))

    return write


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A recorded transcript that sells one piece."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps([{"calls": asks(1)}, {"text": "One sold.\nThat was all."}]))
    return path


def test_asking_queues_serves_and_prints_the_answer(
    location: Location, org: Organization, call: Call, answering: Callable[..., None], script: Path
) -> None:
    answering()
    place = ["--root", location.root, "--script", script]
    asked = call("assistant", "ask", "lucy", "Sell one.", *place)
    assert (asked.code, asked.out) == (0, "One sold.\nThat was all.\n")
    assert sold(org.db, "shop") == [1]
    again = call("assistant", "ask", "lucy", "Sell one.", "--json", *place)
    assert again.document["result"] == "One sold.\nThat was all."
    assert sold(org.db, "shop") == [1, 1]


def test_asking_ends_with_one_and_the_reason_when_no_answer_came_of_it(
    location: Location, org: Organization, call: Call, script: Path
) -> None:
    script.write_text('[{"calls": [{"name": "sell", "arguments": {"piece": 1}}]}]')
    asked = call("assistant", "ask", "lucy", "Sell one.", "--root", location.root, "--script", script)
    assert asked.code == 1
    assert "BLOCKED" in asked.out
    assert "MODEL_FAILED script_ended" in asked.out
    (item,) = org.db.connection.execute("SELECT id FROM assistant_work").rows[0]
    assert f"look   sovereign-agent assistant evidence {item}" in asked.out
    shown = call("assistant", "evidence", item, "--root", location.root)
    assert "tool_not_allowed" in shown.out
    assert "script_ended" in shown.out


@pytest.mark.usefixtures("org")
def test_what_ended_without_an_answer_is_shown_by_status_with_the_reason_and_where_to_look(
    location: Location, call: Call, script: Path
) -> None:
    place = ["--root", location.root]
    script.write_text('[{"text": ""}]')
    item = call("assistant", "ask", "lucy", "Sell one.", "--json", *place, "--script", script).document["id"]
    assert call("assistant", "status", *place, "--json").document["open"] == []
    blocked = call("assistant", "status", *place, "--json").document["blocked"]
    assert [(each["id"], each["status"], each["result"]) for each in blocked] == [(item, "BLOCKED", "EMPTY_REPLY")]
    shown = call("assistant", "status", *place).out
    assert shown.startswith(f"Nothing is open.\nBLOCKED {item}\n")
    assert re.search(rf"look +sovereign-agent assistant evidence {item} ", shown)
    assert "No call and no text" in call("assistant", "evidence", item, *place).out


@pytest.mark.usefixtures("org")
def test_an_item_that_nobody_gets_any_more_is_shown_with_what_to_type_instead_and_that_works(
    location: Location, org: Organization, call: Call
) -> None:
    place = ["--root", location.root]
    item = work.enqueue(org.db, "mail:1", "lucy's", "Sell one.", role="till")
    assert "anew" not in call("assistant", "status", *place).out
    for day in range(work.CRASH_LIMIT + 1):
        work.claim(org.db, "till-1", now=day * 86_400, role="till")
    shown = call("assistant", "status", item, *place).out
    instead = re.findall(r"(?:next|anew) +sovereign-agent (.*)", shown)
    for each in instead:
        typed = each.replace("ACTOR", "principal-human").replace("PROMPT", "'Sell one.'")
        assert call(*shlex.split(typed)).code == 0
    assert work.get_work(org.db.connection, item)["status"] == "CANCELED"
    again = work.claim(org.db, "till-1", role="till")
    assert again
    assert (again.session, again.prompt) == ("lucy's", "Sell one.")


@pytest.mark.parametrize("broken", ["a pipe that nobody reads", "a full disk"])
def test_a_service_whose_words_nobody_hears_goes_on(
    broken: str, location: Location, org: Organization, script: Path
) -> None:
    script.write_text('[{"text": "One."}, {"text": "Two."}]')
    if broken == "a full disk":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        ours, stderr = os.pipe()
        os.close(ours)
    process = spawned("assistant", "serve", "--root", location.root, "--script", script, stderr=stderr)
    os.close(stderr)
    try:
        for number in range(2):
            item = work.enqueue(org.db, f"mail:{number}", "lucy", "Sell one.")
            eventually(lambda item=item: work.get_work(org.db.connection, item)["status"] == "DONE")
        assert process.poll() is None
        process.terminate()
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "Stopped.\n")
    finally:
        process.kill()


@pytest.mark.parametrize("place", ["import", "build"])
def test_tools_that_exit_are_refused_before_anything_is_claimed(
    place: str, local: Path, call: Call, script: Path
) -> None:
    name = f"exits_{place}"
    leaves = {"import": "raise SystemExit(0)", "build": "def build(db):\n    raise SystemExit(0)"}
    (local / f"{name}.py").write_text(leaves[place])
    settings = local / "sovereign.toml"
    settings.write_text(f'{settings.read_text()}\n[assistant]\ntools = "{name}:build"')
    refused = call("assistant", "serve", "--json", "--root", local, "--script", script)
    expected = {"import": "unresolved_reference", "build": "tools_unusable"}
    assert (refused.code, refused.error["category"], refused.error["why"]) == (2, expected[place], "SystemExit: 0")


SCRIPTS = {"serve": '{"text": "no list"}', "ask": "[" * 100_000}
REFUSED = [
    ("model_missing", "", False),
    ("key_missing", 'model = "gpt-5.1"\nkey_env = "NO_SUCH_KEY"', False),
    ("tools_unusable", 'tools = "builtins:repr"', True),
    ("tools_unusable", 'tools = "sovereign_agent.clock:moment"', True),
    ("script_unreadable", "", True),
    ("script_unreadable", '[{"txt": "its key is mistyped"}]', True),
]


@pytest.mark.parametrize(("category", "settings", "played"), REFUSED)
@pytest.mark.parametrize("verb", [["serve"], ["ask", "lucy", "Sell one."]])
def test_a_service_without_what_it_needs_says_what_to_type_and_queues_nothing(
    local: Path, call: Call, script: Path, *, category: str, settings: str, verb: list[str], played: bool
) -> None:
    if category == "script_unreadable":
        script.write_text(settings or SCRIPTS[verb[0]])
    else:
        path = local / "sovereign.toml"
        path.write_text(f"{path.read_text()}\n[assistant]\n{settings}")
    refused = call("assistant", *verb, "--json", "--root", local, *(["--script", script] if played else []))
    assert (refused.code, refused.error["category"]) == (2, category)
    assert refused.error["next_command"]
    with closing(Organization(local)) as org:
        assert work.open_work(org.db.connection) == []


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b'[{"text": null}]',
        b'[{"text": 5}]',
        b'[{"calls": 5}]',
        b'[{"calls": [{}]}]',
        b'[{"calls": [{"name": 5}]}]',
    ],
)
def test_a_script_that_is_none_is_refused_before_anything_is_queued(
    local: Path, call: Call, script: Path, text: bytes
) -> None:
    script.write_bytes(text)
    refused = call("assistant", "ask", "lucy", "Hello?", "--json", "--root", local, "--script", script)
    assert (refused.code, refused.error["category"]) == (2, "script_unreadable")
    with closing(Organization(local)) as org:
        assert work.open_work(org.db.connection) == []


def test_what_a_tool_prints_does_not_stand_in_the_answer(
    location: Location, answering: Callable[..., None], script: Path
) -> None:
    answering()
    (tools,) = location.root.glob("tools_*.py")
    prints = "def sell(arguments, now):\n    import os; print('printed'); os.system('echo echoed')\n"
    tools.write_text(tools.read_text().replace("def sell(arguments, now):\n", prints))
    asked = ended(
        spawned("assistant", "ask", "lucy", "Sell one.", "--json", "--root", location.root, "--script", script)
    )
    assert (json.loads(asked.out)["status"], asked.code) == ("DONE", 0)
    assert "printed" in asked.err
    assert "echoed" in asked.err


@pytest.mark.parametrize("closed", ["1", "2", "12"])
def test_an_answer_is_given_although_nobody_can_read_it(local: Path, script: Path, closed: str) -> None:
    script.write_text('[{"text": "Good morning."}]')
    verb = [sys.executable, "-m", "sovereign_agent", "assistant", "ask", "lucy", "Hello?", "--root", local]
    words = " ".join(shlex.quote(str(word)) for word in [*verb, "--script", script])
    asked = subprocess.run(["sh", "-c", f"{words} {' '.join(f'{number}>&-' for number in closed)}"], check=False)
    assert asked.returncode == 0
    with closing(Organization(local)) as org:
        assert [row["result"] for row in rows(org.db, "assistant_work")] == ["Good morning."]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """An organization with a ledger in a file."""
    Organization.init(tmp_path / "org").close()
    return tmp_path / "org"


def test_a_service_on_the_command_line_answers_shows_itself_and_stops_with_zero(
    location: Location, org: Organization, call: Call, answering: Callable[..., None], script: Path
) -> None:
    answering()
    process = spawned("assistant", "serve", "--root", location.root, "--script", script)
    try:
        item = work.enqueue(org.db, "mail:1", "lucy", "Sell one.")
        eventually(lambda: is_final(org.db, item))
        assert "ALIVE assistant" in call("status", "--root", location.root).out
        assert "assistant, process" in call("doctor", "--root", location.root).out
        assert "assistant (ALIVE)" in call("authority", "show", "--root", location.root).out
    finally:
        process.terminate()
        stopped = ended(process)
    assert (stopped.code, stopped.out) == (0, "Stopped.\n")
    assert f"{item}, generation 1: DONE" in stopped.err
    assert sold(org.db, "shop") == [1]
    assert "no supervisor and no assistant" in call("doctor", "--root", location.root).out


def test_a_live_model_is_asked_with_the_key_that_no_record_holds(
    location: Location, org: Organization, call: Call, answering: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Endpoint()
    try:
        monkeypatch.setenv("SHOP_KEY", KEY)
        answering(model="local", base_url=endpoint.url, key_env="SHOP_KEY", system="You keep a shop.")
        endpoint.answers[:] = [(401, KEY.encode()), reply(content="Good morning.")]
        blocked = call("assistant", "ask", "lucy", "Good morning?", "--root", location.root)
        assert "SHOP_KEY" not in os.environ
        monkeypatch.setenv("SHOP_KEY", KEY)
        asked = call("assistant", "ask", "lucy", "Good morning?", "--root", location.root)
    finally:
        endpoint.close()
    assert (blocked.code, asked.code, asked.out) == (1, 0, "Good morning.\n")
    assert endpoint.keys == [f"Bearer {KEY}"] * 2
    assert endpoint.asked[1]["messages"] == [
        {"role": "system", "content": "You keep a shop."},
        {"role": "user", "content": "Good morning?"},
        {"role": "assistant", "content": "(No answer was given: MODEL_FAILED unauthorized.)"},
        {"role": "user", "content": "Good morning?"},
    ]
    assert [tool["function"]["name"] for tool in endpoint.asked[1]["tools"]] == ["sell"]
    kept = [rows(org.db, table) for table in ("assistant_work", "assistant_transcript", "assistant_evidence", "events")]
    assert KEY not in f"{kept}{blocked}{asked}"
