"""The simulation: its histories hold every promise, replay from their seeds, and would show a clause that is gone."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import ACTOR, attempt_on, eventually, renew_attempt, run_of

from sovereign_agent import assistant_service, cli, fencing, relay
from sovereign_agent.clock import ManualClock
from sovereign_agent.commands import simulate as simulate_verb
from sovereign_agent.database import LEDGER_NAME, Connection, Database, Transaction
from sovereign_agent.errors import Contention, LedgerUnavailable
from sovereign_agent.storage import sqlite
from sovereign_agent.testing import checker, simulation
from sovereign_agent.testing.checker import breaches
from sovereign_agent.testing.faults import Fault, FaultyDatabase, Killed
from sovereign_agent.testing.invariants import violations
from sovereign_agent.testing.simulation import World, play, replay_line, shrunk

SEEDS = 50
STORY_SEED, STORY_STEPS = 22, 500
STEPS = range(simulation.STEPS)
MANY = 200
"""So many seeds may pass before a clause that is gone is noticed."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulation.make_template(tmp_path_factory.mktemp("simulation"))


def test_every_seed_keeps_every_promise_and_everything_that_can_happen_has_happened() -> None:
    report = simulation.run(range(SEEDS), processes=2)
    assert report.failures == {}
    assert report.never() == []
    assert (report.seeds, report.steps) == (SEEDS, SEEDS * simulation.STEPS)


@pytest.mark.parametrize(("whole", "code", "verdict"), [(1, 1, "It does not hold."), (2, 0, "No promise was broken.")])
def test_a_fault_that_never_struck_and_an_act_that_never_succeeded_are_named_and_fail_a_run_of_all_histories(
    whole: int, code: int, verdict: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_verb, "SEEDS", whole)
    assert cli.main(["simulate", "--scenario", "last delivery", "--faults", "0", "--seeds", "1"]) == code
    told = capsys.readouterr().out
    assert f"NEVER HAPPENED: {Fault.STOPPED}" in told
    assert "NEVER HAPPENED: mend" in told
    assert told.endswith(f" schedules and 1 history. {verdict}\n")


def test_who_asks_for_histories_gets_no_orders_and_a_lie_in_one_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_few_orders = simulate_verb._chosen(["last delivery"])
    monkeypatch.setattr(simulate_verb, "_chosen", lambda _: a_few_orders)
    assert cli.main(["simulate", "--seeds", "2", "--faults", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["interleavings"], told["histories"]["seeds"], told["good"]) == ([], 2, True)
    monkeypatch.setattr(simulation, "run", lambda *_, **__: simulation.Report(seeds=2, failures={0: ["a lie"]}))
    monkeypatch.setattr(simulation, "shortest_replay", lambda *_, **__: "")
    assert cli.main(["simulate", "--seeds", "2"]) == 1
    assert capsys.readouterr().out.endswith("\n2 histories. It does not hold.\n")


def test_the_same_seed_is_the_same_history_in_another_process_too(template: Path) -> None:
    ended = subprocess.run(simulate("--seed", "3", "--json"), capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(ended.stdout)
    assert told["trace"] == play(template, 3, STEPS)[1]
    assert len(told["trace"]) > len(STEPS) / 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("playing", "begun"),
    [
        ("--seeds 0", "*/sovereign-simulate-*"),
        ("--scenario restore", "*/sovereign-simulate-*"),
        ("--scenario lease --faults 0 --seeds 900", "*/*/seed-*"),
    ],
)
def test_a_simulation_that_is_ended_leaves_neither_a_folder_nor_a_process(
    playing: str, begun: str, number: signal.Signals, tmp_path: Path
) -> None:
    argv = simulate("--root", str(tmp_path), *playing.split())
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    crew = list[psutil.Process]()
    try:
        eventually(lambda: list(tmp_path.glob(begun)), within=60)
        crew += psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        eventually(lambda: process.poll() is not None)
        # Asked before its last words are read: if the signal ended it, its crew still holds the pipe.
        assert process.returncode == 130
        assert process.communicate()[1].splitlines()[0] == "Interrupted."
        assert list(tmp_path.iterdir()) == []
        assert psutil.wait_procs(crew, timeout=20)[1] == []
    finally:
        for each in (process, *crew):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()  # left open, they would fail the next test in the place of this one


def simulate(*options: str) -> list[str]:
    return [sys.executable, "-m", "sovereign_agent", "simulate", *options]


@pytest.fixture
def faulty(template: Path, tmp_path: Path) -> Iterator[FaultyDatabase]:
    shutil.copytree(template, tmp_path / "root")
    db = FaultyDatabase(tmp_path / "root" / LEDGER_NAME, ManualClock(), Counter())
    yield db
    db.close()


@pytest.mark.parametrize(
    ("fault", "raised", "written"),
    [
        (Fault.KILLED_BEFORE, Killed, 0),
        (Fault.KILLED_INSIDE, Killed, 0),
        (Fault.KILLED_AFTER, Killed, 1),
        (Fault.BUSY, Contention, 0),
        (Fault.CONNECTION_LOST, LedgerUnavailable, 0),
        (Fault.REPLY_LOST, LedgerUnavailable, 1),
    ],
)
def test_a_fault_strikes_the_transaction_it_was_planned_for_once(
    fault: Fault, raised: type[BaseException], written: int, faulty: FaultyDatabase
) -> None:
    faulty.plan(fault, 1)
    relay.send(faulty, "master", "operator", "before", "")
    with pytest.raises(raised):
        relay.send(faulty, "master", "operator", "struck", "")
    faulty.begin_life()
    relay.send(faulty, "master", "operator", "after", "")
    sent = faulty.connection.execute("SELECT subject FROM messages ORDER BY seq").rows
    assert [subject for (subject,) in sent] == ["before", *["struck"] * written, "after"]
    assert faulty.struck == {fault: 1}


def test_a_killed_process_writes_nothing_until_another_takes_its_place(faulty: FaultyDatabase) -> None:
    faulty.plan(Fault.KILLED_INSIDE)
    for _ in range(2):
        with pytest.raises(Killed):
            relay.send(faulty, "master", "operator", "from the dead", "")
    faulty.begin_life()
    assert relay.inbox(faulty, "operator") == []
    relay.send(faulty, "master", "operator", "from the living", "")
    assert len(relay.inbox(faulty, "operator")) == 1


# --- it bites ---------------------------------------------------------------------------------------------


REVERTED = [
    ("WHERE actor_leases.expires_at <= ? AND", "WHERE (actor_leases.expires_at <= ? OR 1 = 1) AND"),
    ("fencing_token = ? AND expires_at > ?\n", "fencing_token = ? AND ? IS NOT NULL\n"),
    ("DELETE FROM actor_leases", "DELETE FROM actor_leases WHERE 1 = 0 AND 1 = 1"),
    ("WHERE id = ? AND state = 'RUNNING' AND current_execution_attempt = ?", "WHERE id = ? AND ? IS NOT NULL"),
    ("AND state = 'CLAIMED' AND claim_owner = ? AND fencing_token = ?", "AND claim_owner = ? AND ? IS NOT NULL"),
    ("WHERE id = ? AND generation = ? AND owner = ? AND", "WHERE id = ? AND ? IS NOT NULL AND ? IS NOT NULL AND"),
    ("FROM assistant_work WHERE status = 'RUNNING' AND expires_at <= ?\n", "FROM assistant_work WHERE ? IS NOT NULL\n"),
    ("SELECT epoch, paused FROM assistant_control", "SELECT epoch, 0 AS paused FROM assistant_control"),
    ("FROM unsettled_effects WHERE of_older_epoch = 1", "FROM unsettled_effects WHERE of_older_epoch = 2"),
    ("SELECT * FROM effects ORDER BY seq", "SELECT * FROM effects WHERE 1 = 0 ORDER BY seq"),
    ("DELETE FROM unsettled_effects WHERE effect_seq = ?", "DELETE FROM unsettled_effects WHERE effect_seq < ?"),
    (
        "INSERT INTO unsettled_effects (effect_seq, of_older_epoch) VALUES (?, 0)",
        "UPDATE messages SET seq = ? WHERE 1 = 0",
    ),
]
"""Clauses of the fence, each with what is left when it is gone."""


def revert(clause: str, becomes: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let the ledger hear `becomes` where `clause` is said. The answer holds the clause once it was."""
    render, said = sqlite.render, set[str]()

    def reverted(sql: str) -> str:
        said.update([clause] * (clause in sql))
        return render(sql.replace(clause, becomes))

    monkeypatch.setattr(sqlite, "render", reverted)
    return said


def first_failing(template: Path) -> int:
    return next((seed for seed in range(MANY) if play(template, seed, STEPS)[0].failures), MANY)


@pytest.mark.parametrize(("clause", "becomes"), REVERTED)
def test_without_a_clause_of_the_fence_some_seed_fails(
    clause: str, becomes: str, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = revert(clause, becomes, monkeypatch)
    assert first_failing(template) < MANY
    assert said == {clause}


def test_a_failing_history_is_made_shorter_fails_again_and_holds_once_the_clause_is_back(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        revert(*REVERTED[0], without)
        seed = first_failing(template)
        without.setattr(simulation, "SHRINKINGS", 40)
        steps = shrunk(template, seed, STEPS)
        assert len(steps) < len(STEPS) / 4
        assert play(template, seed, steps)[0].failures
    assert not play(template, seed, steps)[0].failures
    line = replay_line(seed, steps)
    assert cli.main(line.split()[1:]) == 0


def test_what_fails_without_any_step_is_shortened_to_one_because_a_replay_names_at_least_one(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "breaches", lambda *_, **__: ["a lie"])
    assert len(shrunk(template, 0, range(3))) == 1


@pytest.mark.parametrize(
    "also",
    [["--replay", "-"], ["--scenario", "attempt"], ["--seeds", "3"], ["--seeds", "0"], ["--faults", "0"]],
    ids=" ".join,
)
def test_one_history_and_something_else_are_refused(also: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--seed", "1", *also]) == 2
    assert "--replay and --seed play one thing alone" in " ".join(capsys.readouterr().err.split())


WITHIN_600_KB = """
import resource, sys
from sovereign_agent import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_disk_that_is_full_is_no_broken_promise(tmp_path: Path) -> None:
    script = tmp_path / "within.py"
    script.write_text(WITHIN_600_KB)
    command = [sys.executable, str(script), "simulate", "--seeds", "20", "--root", str(tmp_path), "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (4, "")
    error = json.loads(told.stderr)["error"]
    assert error["category"] == "ledger_unavailable"
    assert "/seed-" in error["happened"]
    assert [each.name for each in tmp_path.iterdir()] == ["within.py"]


def test_a_ledger_that_is_damaged_at_the_end_is_a_failure_of_its_history(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: World) -> None:
        raise LedgerUnavailable("It is damaged.", category="ledger_unavailable")

    monkeypatch.setattr(World, "end", damaged)
    report, _ = play(template, 0, range(3))
    assert report.failures == {0: ["It ended in LedgerUnavailable: It is damaged."]}


def test_steps_without_the_history_they_are_of_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--only", "3"]) == 2
    assert "--seed" in capsys.readouterr().err


# --- the checker is checked -------------------------------------------------------------------------------


class UndoError(Exception):
    """Ends a transaction in which something was only tried."""


@pytest.fixture(scope="module")
def story(template: Path) -> Iterator[Connection]:
    """The ledger of a long history in which all has happened, at rest."""
    root = shutil.copytree(template, template.with_name("story"))
    world = World(root, STORY_SEED)
    for number in range(STORY_STEPS):
        world.step(number)
    world.end()
    assert world.report.failures == {}
    yield world.players[0].db.connection
    world.close()


def found_after(connection: Connection, *statements: str, outside: dict[str, int] | None = None) -> list[str]:
    """What the checker says of a ledger into which `statements` have put a lie; it is taken out again."""
    seen = [""]
    connection.execute("PRAGMA foreign_keys = OFF")
    with suppress(UndoError), Transaction(connection, ledger_lock=True):
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").rows:
            connection.execute(f'DROP TRIGGER "{trigger}"')
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, f"nothing was planted by {statement}"
        seen = breaches(connection, at_rest=True, outside=outside)
        raise UndoError
    return seen


EVENT_AGAIN = (
    "INSERT INTO events (at, kind, subject, actor, detail) SELECT at, kind, subject, actor, detail FROM events"
)
CHILD_WITH_LINES = "child_id IN (SELECT work_id FROM assistant_transcript)"
RENEWALS = """
    SELECT seq FROM (SELECT seq, token, lag(token) OVER (PARTITION BY key ORDER BY seq) AS before
                       FROM authority_diary WHERE kind = 'lease') WHERE token = before"""
PLANTS = {
    "was created by 0 named actors": [
        "UPDATE events SET actor = '' WHERE kind = 'message.sent'",
        "DELETE FROM events WHERE kind = 'sow.created'",
    ],
    "was created by 2 named actors": [
        f"{EVENT_AGAIN} WHERE kind = 'assignment.created' LIMIT 1",
    ],
    "assignment.running of .+, by nobody": [
        "UPDATE events SET actor = '' WHERE kind = 'assignment.running'",
    ],
    "which is addressed to": [
        "UPDATE messages SET recipient = 'somebody' WHERE deliveries > 0",
    ],
    "after one of generation": [
        (
            "INSERT INTO assistant_transcript (work_id, generation, message, created_at)"
            " SELECT work_id, 1, message, created_at FROM assistant_transcript WHERE generation > 1 LIMIT 1"
        ),
    ],
    "which nobody has claimed": [
        "UPDATE assistant_transcript SET generation = generation + 100",
    ],
    "and its delegation ended at": [
        f"UPDATE assistant_delegations SET deadline = 1 WHERE {CHILD_WITH_LINES}",
    ],
    "is still held": [
        "UPDATE messages SET state = 'CLAIMED' WHERE state = 'DONE'",
        "UPDATE execution_attempts SET status = 'ACTIVE'",
    ],
    "message.claimed of .+ under a pause": [
        "UPDATE events SET kind = 'authority.paused' WHERE kind LIKE '%.resumed'",
    ],
    "an epoch that is not the ledger's": [
        "UPDATE events SET detail = replace(detail, 'epoch_', 'epoch_x') WHERE kind = 'work.claimed'",
    ],
    "was DONE when work.done": [
        f"{EVENT_AGAIN} WHERE kind = 'work.done' LIMIT 1",
    ],
    "was DONE when work.claimed": [
        (
            f"{EVENT_AGAIN} WHERE kind = 'work.claimed' AND subject IN (SELECT id FROM assistant_work"
            " WHERE status = 'DONE')"
        ),
    ],
    "was claimed in generation 0 after": [
        "UPDATE events SET detail = json_set(detail, '$.generation', 0) WHERE kind = 'work.claimed'",
    ],
    "ran in its session": [
        "UPDATE events SET detail = json_set(detail, '$.session', 'one') WHERE kind LIKE 'work.%'",
    ],
    "is DONE in generation": [
        "UPDATE assistant_work SET status = 'DONE' WHERE status = 'CANCELED'",
    ],
    "is DONE in generation 0": [
        "UPDATE assistant_work SET generation = 0 WHERE status = 'DONE'",
    ],
    "lease .+ went to .+ while it was": [
        "UPDATE authority_diary SET at = 0 WHERE kind = 'lease'",
    ],
    "message .+ went to .+ while it was": [
        "UPDATE events SET at = 0 WHERE kind = 'message.claimed'",
    ],
    "lease .+ was renewed by": [
        f"UPDATE authority_diary SET until = until * 2 WHERE seq IN ({RENEWALS})",
    ],
    "attempt .+ went to .+ while it was": [
        "UPDATE authority_diary SET holder = 'proc_x', at = 0 WHERE kind = 'attempt' AND holder IS NULL",
    ],
    "item .+ went to .+ while it was": [
        "DELETE FROM authority_diary WHERE kind = 'item' AND holder IS NULL",
    ],
    "lease .+ under token 1, after": [
        "UPDATE authority_diary SET token = 1 WHERE kind = 'lease' AND token > 1",
    ],
    "item .+ under token 1, after": [
        "UPDATE authority_diary SET token = 1 WHERE kind = 'item' AND token > 1",
    ],
    "lease .+ was given to .+ under a pause": [
        "UPDATE events SET kind = 'authority.paused' WHERE kind LIKE '%.resumed'",
    ],
    "lease .+ began another epoch": [
        "DELETE FROM authority_diary WHERE kind = 'lease' AND holder IS NULL",
    ],
    "message .+ began another epoch": [
        "DELETE FROM authority_diary WHERE kind = 'message' AND holder IS NULL",
    ],
    "item .+ when proc_x settled it": [
        "UPDATE events SET actor = 'proc_x' WHERE kind = 'work.done'",
    ],
    "message .+ when proc_x settled it": [
        "UPDATE events SET actor = 'proc_x' WHERE kind = 'message.done'",
    ],
    "item .+ was put back at 0, while": [
        "UPDATE events SET at = 0 WHERE kind = 'work.lost'",
    ],
    "message .+ was put back at 0, while": [
        "UPDATE events SET at = 0 WHERE kind = 'message.swept'",
    ],
    "A line .+, when its holder was": [
        "UPDATE authority_diary SET token = token + 1 WHERE kind = 'line'",
    ],
    "A line .+, and its claim lasted until": [
        "UPDATE authority_diary SET at = at * 2 WHERE kind = 'line'",
    ],
    "A line .+, after its parent": [
        (
            f"UPDATE events SET kind = 'work.{end}', detail = '{{\"session\":\"\"}}', subject ="
            f" (SELECT parent_id FROM assistant_delegations WHERE {CHILD_WITH_LINES}) WHERE seq = 1"
        )
        for end in ("canceled", "done", "blocked")
    ],
    "Act .+, when its holder was": [
        "UPDATE authority_diary SET token = token + 1 WHERE kind = 'act'",
    ],
    "Act .+, and its claim lasted until": [
        "UPDATE authority_diary SET at = at * 2 WHERE kind = 'act'",
    ],
    "Act .+, under a pause": [
        "UPDATE events SET kind = 'authority.paused' WHERE kind LIKE '%.resumed'",
    ],
    "Act .+, in an epoch that was over": [
        "UPDATE authority_diary SET kind = 'carried' WHERE kind = 'act'",
    ],
    "Act .+, when nobody had spoken of .+, of an older epoch": [
        "DELETE FROM authority_diary WHERE kind = 'word'",
    ],
    "was begun on lease token .+ when its actor was": [
        "UPDATE authority_diary SET holder = 'proc_x' WHERE kind = 'lease' AND holder IS NOT NULL",
        "UPDATE authority_diary SET until = at WHERE kind = 'lease' AND holder IS NOT NULL",
    ],
    "was ended by its process": [
        "UPDATE authority_diary SET token = token + 1 WHERE kind = 'receipt'",
    ],
    "was ended by its process .+ nobody's": [
        "UPDATE authority_diary SET holder = NULL WHERE kind = 'receipt'",
    ],
}
"""What the checker says, and the lie that makes it say so."""


def test_a_history_without_a_lie_is_not_blamed(story: Connection) -> None:
    assert breaches(story, at_rest=True) == []


@pytest.mark.parametrize("sentence", PLANTS)
def test_a_planted_lie_is_named(sentence: str, story: Connection) -> None:
    for statement in PLANTS[sentence]:
        assert [each for each in found_after(story, statement) if re.search(sentence, each)], statement


DONE = "operation_id IN (SELECT operation_id FROM effect_ends WHERE outcome = 'done')"


@pytest.mark.parametrize(
    ("sentence", "times", "statements"),
    [
        ("was done 2 times", 2, []),
        ("was done, and the ledger does not know of it", 1, ["DELETE FROM effects"]),
        ("ended done, says the ledger, and outside it did not", 0, []),
        ("ended none, says the ledger, and outside it did not", 1, ["UPDATE effect_ends SET outcome = 'none'"]),
    ],
)
def test_a_ledger_that_does_not_agree_with_the_world_outside_is_named(
    sentence: str, times: int, statements: list[str], story: Connection
) -> None:
    (done,) = story.execute(f"SELECT min(operation_id) FROM effects WHERE {DONE}").rows[0]
    assert f"Act {done} {sentence}." in found_after(story, *statements, outside={done: times})
    assert not [each for each in found_after(story, outside={done: 1}) if done in each]


def test_no_promise_of_the_checker_is_without_a_plant(story: Connection) -> None:
    named = [each for planted in PLANTS.values() for each in found_after(story, *planted)]
    for promise in (*checker.PROMISES, *checker.AT_REST):
        sentence = re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(promise.sentence)))
        assert any(sentence.fullmatch(each) for each in named), promise.name


def test_claims_that_another_epoch_has_taken_back_are_no_breach(db: Database) -> None:
    for subject in ("claimed again", "claimed"):
        relay.send(db, "master", "operator", subject, "")
    first, second = relay.inbox(db, "operator")
    relay.claim(db, first.id, "operator")
    relay.claim(db, second.id, "operator")
    assistant_service.new_epoch(db, "principal", "a test")
    assistant_service.resume(db, "principal", "a test")
    relay.claim(db, first.id, "operator")
    assert not [each for each in breaches(db.connection) if "by nobody" in each]
    assert violations(db.connection) == []
    db.connection.execute(
        """
        UPDATE messages SET state = 'NEW', claim_owner = NULL, fencing_token = NULL, claim_expires_at = NULL
         WHERE id = ?
        """,
        (first.id,),
    )
    assert len(violations(db.connection)) == 1


def test_a_folder_that_is_dealt_with_late_does_not_end_the_attempt_after_it(template: Path) -> None:
    root, clock = shutil.copytree(template, template.with_name("late")), ManualClock()
    with closing(Database(root / LEDGER_NAME, create=False, clock=clock)) as db:
        first = run_of(db, clock)
        clock.advance(fencing.EXECUTION_ATTEMPT_TTL)
        lease = fencing.acquire_actor_lease(db, ACTOR, "proc_blue", clock=clock)
        attempt_on(db, first.assignment_id, lease, clock)
        relay.claim(db, relay.send(db, "a", "b", "a later token", "").id, "b")
        with db.transaction() as connection:
            fencing.close_workspace(connection, first.id)
        renewed = fencing.active_attempt(db.connection, first.assignment_id)
        assert renewed
        renew_attempt(db, renewed, clock)
        assert not [each for each in breaches(db.connection) if each.startswith("The attempt ")]
