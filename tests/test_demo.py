"""`sovereign-agent demo` crash, restore and assistant, run as a person runs them: real processes, signals, clocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from conftest import Location
from support import processes_of

from reference_organizations.store import morning
from sovereign_agent.commands import demo_restore
from sovereign_agent.llm_lab import KEY_NAME


def begun(which: str, location: Location, *arguments: str) -> subprocess.Popen[str]:
    ledger = ["--ledger", location.ledger] if location.engine == "postgresql" else []
    command = [sys.executable, "-m", "sovereign_agent", "demo", which, "--root", str(location.root / "demo")]
    without_key = {name: value for name, value in os.environ.items() if name != KEY_NAME}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *ledger, *arguments], stdout=pipe, stderr=pipe, text=True, env=without_key)


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    with process:
        stdout, stderr = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def demo(which: str, location: Location, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ended(begun(which, location, *arguments))


@pytest.mark.timeout(110)
def test_the_crash_demo_shows_what_it_promises_and_tells_its_story_on_each_engine(
    make_location: Callable[..., Location],
) -> None:
    location, another = make_location("one"), make_location("another")
    in_json, in_words = begun("crash", location, "--json"), begun("crash", another)  # together, for they mostly wait
    shown, told = ended(in_json), ended(in_words)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert report["ledger"] == location.engine
    assert report["worker_reached_running"] is True
    assert report["state_after_kill"] == "RUNNING"
    assert (report["killed"]["program_gone"], report["killed"]["grandchild_gone"]) == (True, True)
    assert report["killed"]["before_reclaim"] is True
    assert 0 < report["killed"]["seconds_until_gone"] < 20
    assert report["recovered"]["failure_category"] == "worker_lost"
    assert report["recovered"]["receipt_id"].startswith("rcp_")
    assert 0 < report["recovered"]["seconds_from_kill"] < 30
    assert report["planted_report_kept"] is True
    assert report["zombie"]["refusal"] == "execution_attempt_lost"
    assert report["zombie"]["rows_written"] == 0
    assert report["zombie"]["program_gone"] is True
    assert report["second_tick_recovered"] == 0
    healthy = report["healthy_long_run"]
    assert healthy["status"] == "completed"
    assert healthy["seconds"] >= 3 * healthy["attempt_ttl_seconds"] > 0
    assert report["retry"]["outcome_state"] == "ACCEPTED"
    assert processes_of(location.root.parent) == []
    assert told.returncode == 0, told.stdout + told.stderr
    for word in (
        "SIGKILL",
        "worker_lost",
        "not believed",
        "deaf to SIGTERM",
        "execution_attempt_lost",
        "renewed",
        "ACCEPTED",
    ):
        assert word in " ".join(told.stdout.split())


REFUSED = "runtime paused or replaced by restore"


@pytest.mark.timeout(110)
def test_hazard_91_the_restore_demo_shows_the_values_that_were_promised_on_each_engine(location: Location) -> None:
    shown = demo("restore", location, "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert report["ledger"] == location.engine
    epochs = report["epochs"]
    assert epochs["before"] != epochs["after"] == epochs["marker"]
    old = report["old_worker"]
    assert 3000 < old["seconds_left"] < 3600
    assert old["reads"] == {
        "rows_written": 2,
        "held_generation": 1,
        "work": {"status": "READY", "generation": 2, "owner": None},
        "epoch_is_current": False,
        "paused": True,
    }
    assert old["writes"] == [{"category": "paused", "sentence": REFUSED}] * 2
    assert old["writes_after_resume"] == [{"category": "epoch_replaced", "sentence": REFUSED}] * 2
    assert old["message"]["category"] == "fencing_token_stale"
    assert (report["old_run"]["refusal"], report["old_run"]["receipts"]) == ("actor_lease_lost", 0)
    assert report["while_paused"] == {"claim": "paused", "run": "FAILED", "failure_category": "worker_lost"}
    fresh = report["fresh"]
    assert (fresh["generation"], fresh["writes"]) == (3, [None, None])
    assert (fresh["work"], fresh["message"], fresh["run"]) == ("DONE", "DONE", "completed")
    assert report["rows_by_generation"] == [1, 1, 3, 3]
    assert processes_of(location.root) == []


@pytest.mark.timeout(110)
def test_the_restore_demo_tells_its_story_to_a_reader(tmp_path) -> None:
    shown = demo("restore", Location("sqlite", "", tmp_path))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    told = " ".join(shown.stdout.split())
    for words in (REFUSED, "fencing_token_stale", "actor_lease_lost", "worker_lost", "generation 3", "[1, 1, 3, 3]"):
        assert words in told


DIFFERENCES: dict[str, Any] = {
    "the same epoch": {"epochs": {"before": "a", "after": "a", "marker": "a"}},
    "another marker": {"epochs": {"before": "a", "after": "b", "marker": "a"}},
    "a write that went through": {"old_worker": {"writes": [None, None]}},
    "another sentence": {"old_worker": {"writes_after_resume": [{"category": "epoch_replaced", "sentence": "no"}] * 2}},
    "a message that was settled": {"old_worker": {"message": None}},
    "a run that was written down": {"old_run": {"receipts": 1}},
    "a claim while paused": {"while_paused": {"claim": ""}},
    "a refused fresh worker": {"fresh": {"writes": [None, {"category": "paused", "sentence": REFUSED}]}},
    "rows of another generation": {"rows_by_generation": [1, 1, 2, 2]},
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_restore_demo_ends_with_1_if_anything_differs(difference: str) -> None:
    refusal = {"category": "paused", "sentence": REFUSED}
    replaced = {"category": "epoch_replaced", "sentence": REFUSED}
    promised: dict[str, Any] = {
        "epochs": {"before": "a", "after": "b", "marker": "b"},
        "old_worker": {
            "seconds_left": 3590.0,
            "reads": {
                "rows_written": 2,
                "held_generation": 1,
                "work": {"status": "READY", "generation": 2, "owner": None},
                "epoch_is_current": False,
                "paused": True,
            },
            "writes": [refusal, refusal],
            "message": {"category": "fencing_token_stale", "sentence": "It was not settled."},
            "writes_after_resume": [replaced, replaced],
        },
        "old_run": {"exit_code": 1, "refusal": "actor_lease_lost", "state": "RUNNING", "receipts": 0},
        "while_paused": {"claim": "paused", "run": "FAILED", "failure_category": "worker_lost"},
        "fresh": {"generation": 3, "writes": [None, None], "work": "DONE", "message": "DONE", "run": "completed"},
        "rows_by_generation": [1, 1, 3, 3],
    }
    seen = deepcopy(promised)
    for part, values in DIFFERENCES[difference].items():
        seen[part] = seen[part] | values if isinstance(values, dict) else values
    assert demo_restore.as_promised(promised)
    assert not demo_restore.as_promised(seen)


@pytest.mark.timeout(110)
def test_the_assistant_demo_goes_on_after_the_kill_and_writes_each_line_once_on_each_engine(location: Location) -> None:
    shown = demo("assistant", location, "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert (report["ledger"], report["model"]) == (location.engine, "scripted")
    assert report["work"] == {"status": "DONE", "generation": 2}
    assert report["shopping_list"] == [
        {"sku": "SKU-VANILLA", "quantity": 4, "generation": 1},
        {"sku": "SKU-STRAWBERRY", "quantity": 3, "generation": 2},
    ]
    assert [row["generation"] for row in report["transcript"]] == [1, 1, 1, 1, 2, 2, 2]
    assert report["answer"].startswith("Vanilla (4 tubs) and strawberry (3 tubs)")
    assert processes_of(location.root) == []


def _row(generation: int, role: str, **rest: Any) -> dict[str, Any]:
    return {"generation": generation, "message": {"role": role, **rest}}


def _added(generation: int, call: str) -> list[dict[str, Any]]:
    told = '{"ok": true, "result": {"quantity": 4}}'
    asked = _row(generation, "assistant", tool_calls=[{"id": call}])
    return [asked, _row(generation, "tool", tool_call_id=call, content=told)]


LINES = [
    {"sku": "SKU-VANILLA", "quantity": 4, "generation": 1},
    {"sku": "SKU-STRAWBERRY", "quantity": 3, "generation": 2},
]
MORNING: dict[str, Any] = {
    "model": "scripted",
    "work": {"status": "DONE", "generation": 2},
    "transcript": [*_added(1, "a"), *_added(2, "b"), _row(2, "assistant")],
    "lines_admitted": 2,
    "shopping_list": LINES,
}
OTHER_MORNINGS: dict[str, Any] = {
    "nobody was killed": {"work": {"status": "DONE", "generation": 1}},
    "no end": {"work": {"status": "BLOCKED", "generation": 2}},
    "a dead generation wrote later": {"transcript": [*_added(2, "a"), *_added(1, "b")]},
    "a call without an answer": {"transcript": [*_added(1, "a"), _added(2, "b")[0]]},
    "a line written twice": {"shopping_list": [LINES[0], *LINES]},
    "a line without its answer": {"lines_admitted": 1},
    "other lines": {"shopping_list": LINES[::-1]},
}


@pytest.mark.parametrize("difference", OTHER_MORNINGS)
def test_the_assistant_demo_ends_with_1_if_anything_differs(difference: str) -> None:
    assert morning.as_promised(MORNING)
    assert not morning.as_promised(MORNING | OTHER_MORNINGS[difference])
