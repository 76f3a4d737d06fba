"""The torture kit: its checker names each broken promise, and a short torture on each engine breaks none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINES, Location, Server
from support import answer, child, eventually, heard, new_assignment, receipt_for, traces

from sovereign_agent import assistant_work, cli, effects, fencing, organization, relay, supervisor
from sovereign_agent.clock import ManualClock, moment
from sovereign_agent.database import Connection, Database
from sovereign_agent.errors import AuthorityLost
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Envelope, Proposal
from sovereign_agent.records import AttemptStatus, Claim, ReceiptStatus, Role
from sovereign_agent.testing.crash_points import Doom, DoomedDatabase, Hardship, hardships, points
from sovereign_agent.testing.figures import Lifetime, measured
from sovereign_agent.testing.invariants import violations
from sovereign_agent.testing.promises import PROMISES
from sovereign_agent.testing.torture import Options, Place, Torture
from sovereign_agent.testing.workload import Witness

OPERATOR, MASTER, PRINCIPAL = "operator-course", "master-course", "principal-human"
FAR = timedelta(hours=1)
COMPLETED = Proposal(ReceiptStatus.COMPLETED, "", "done", None)
BLOCKED = Proposal(ReceiptStatus.BLOCKED, "", "a question", None)
FAILED = Proposal(ReceiptStatus.FAILED, "missing_report", "nothing", None)

Program = Proposal | Callable[[str], object]


class Story:
    """An organization in which everything that can happen has happened, told on a clock that stands still."""

    def __init__(self, root: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.root = root
        self.org = Organization.init(root, ledger_url=ledger_url, clock=self.clock)
        self.programs: list[Program] = []
        monkeypatch.setattr(organization, "invoke_actor", self._invoke)

    def _invoke(self, _settings: object, envelope: Envelope, *_: object) -> Proposal:
        program = self.programs.pop(0)
        if isinstance(program, Proposal):
            return program
        program(envelope.assignment_id)
        return COMPLETED

    def outcome(self) -> str:
        wanted = self.org.create_outcome("wanted", "so", [], PRINCIPAL)
        self.org.activate(wanted.id, PRINCIPAL)
        return wanted.id

    def sow(self, outcome_id: str, *programs: Program) -> str:
        sow = self.org.create_sow(outcome_id, "scope", Role.OPERATOR, MASTER)
        self.org.ready_sow(sow.id)
        if programs:
            self.run(sow.id, *programs)
        return sow.id

    def run(self, sow_id: str, *programs: Program) -> str:
        self.programs += programs
        assignment = self.org.assign(sow_id, OPERATOR, MASTER)
        with suppress(AuthorityLost):
            self.org.run_assignment(assignment.id)
        return assignment.id

    def accepted(self) -> None:
        outcome_id = self.outcome()
        sow_id = self.sow(outcome_id, COMPLETED)
        self.org.verify_sow(sow_id, "verifier-course")
        self.org.review(sow_id, "sparring-course", approve=False)
        assignment_id = self.run(sow_id, COMPLETED)
        with self.org.db.immediate() as connection:
            self.org.record_effect(connection, assignment_id, "sale", {}, OPERATOR)
        self.org.verify_sow(sow_id, "verifier-course")
        self.org.review(sow_id, "sparring-course")
        self.org.accept(outcome_id, PRINCIPAL)

    def every_way_to_end(self) -> None:
        outcome_id = self.outcome()
        self.org.create_sow(outcome_id, "a draft", Role.OPERATOR, MASTER)
        self.sow(outcome_id, BLOCKED)
        self.sow(outcome_id, FAILED)
        self.org.verify_sow(self.sow(outcome_id, COMPLETED), "verifier-course")
        self.org.rule(self.sow(outcome_id, BLOCKED), "go on", PRINCIPAL)
        self.org.cancel(self.org.assign(self.sow(outcome_id), OPERATOR, MASTER).id, PRINCIPAL)
        self.sow(outcome_id, lambda assignment_id: self.org.cancel(assignment_id, PRINCIPAL))
        self.sow(outcome_id, lambda _: self.recovered())
        self.sow(outcome_id, self.taken_over, COMPLETED)
        self.parked(self.sow(outcome_id))
        self.org.assign(self.sow(outcome_id), OPERATOR, MASTER)

    def recovered(self) -> None:
        self.clock.advance(FAR)
        assert len(supervisor.tick(self.org).recovered_assignments) == 1

    def parked(self, sow_id: str) -> None:
        for _ in range(self.org.settings.authority.losses_before_parking):
            self.run(sow_id, lambda _: self.recovered())
        self.org.rule(sow_id, "once more", PRINCIPAL)
        self.run(sow_id, COMPLETED)

    def taken_over(self, assignment_id: str) -> None:
        self.clock.advance(FAR)
        with closing(Organization(self.root, clock=self.clock)) as another:
            assert another.run_assignment(assignment_id).status is ReceiptStatus.COMPLETED

    def every_message(self) -> None:
        db, clock = self.org.db, self.clock
        new, claimed, done, dead, swept, spent = [self.org.send(MASTER, OPERATOR, "subject", "") for _ in range(6)]
        for _ in range(relay.MAX_DELIVERIES):
            relay.claim(db, spent.id, OPERATOR)
            clock.advance(FAR)
            relay.sweep_expired_claims(db)
        relay.claim(db, swept.id, OPERATOR)
        clock.advance(FAR)
        relay.claim(db, swept.id, OPERATOR)
        clock.advance(FAR)
        relay.sweep_expired_claims(db)
        relay.dead_letter(db, relay.claim(db, dead.id, OPERATOR))
        relay.complete(db, done.id, OPERATOR, fencing_token=relay.claim(db, done.id, OPERATOR).fencing_token or 0)
        relay.claim(db, claimed.id, OPERATOR)
        assert relay.get_message(db, new.id).deliveries == 0

    def every_act(self) -> None:
        claim = Claim("work_1", "session", "Order tea.", 1, "worker", "epoch_over", "", "shop")
        for act, seen in {"unseen": "", "seen": "done", "in vain": "none", "spoken of": "unknown"}.items():
            with self.org.db.immediate() as connection:
                effects.intend(connection, act, claim, tool="order", arguments="{}", at=1)
                if seen:
                    effects.settle(connection, act, seen, at=2)
        effects.reconcile(self.org.db, "spoken of", "done", actor=PRINCIPAL, reason="asked")
        with self.org.db.immediate() as connection:
            effects.doubt_all(connection)

    def still_running(self) -> None:
        assignment = self.org.assign(self.sow(self.outcome()), OPERATOR, MASTER)
        lease = fencing.acquire_actor_lease(self.org.db, OPERATOR, "proc_busy")
        fencing.acquire_execution_attempt(self.org.db, assignment.id, OPERATOR, "proc_busy", lease.fencing_token)


@pytest.fixture(scope="module", params=ENGINES)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    server: Server | None = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    url = server.fresh_url() if server else ""
    with pytest.MonkeyPatch.context() as monkeypatch:
        told = Story(tmp_path_factory.mktemp("story"), url, monkeypatch)
        told.every_act()
        told.accepted()
        told.every_way_to_end()
        told.every_message()
        told.still_running()
        yield told
        told.org.close()
    if server:
        server.drop(url)


class UndoError(Exception):
    """Ends a transaction in which something was only tried."""


def broken(story: Story, *statements: str) -> list[str]:
    """What the checker says of the story's ledger once `statements` have broken it; they are undone again."""
    connection, seen = story.org.db.connection, [""]
    if story.org.db.engine == "sqlite":
        connection.execute("PRAGMA foreign_keys = OFF")
    with suppress(UndoError), story.org.db.immediate():
        _without_triggers(connection, story.org.db.engine)
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, f"nothing was broken by {statement}"
        seen = violations(connection)
        raise UndoError
    return seen


def _without_triggers(connection: Connection, engine: str) -> None:
    if engine == "postgresql":
        connection.execute("SET LOCAL session_replication_role = replica")
        return
    for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
        connection.execute(f"DROP TRIGGER {row[0]}")


AGAIN = "INSERT INTO events (at, kind, subject, actor, detail) SELECT at, kind, subject, actor, detail FROM events"

BREACHES: dict[str, list[str]] = {
    "one receipt for each ended attempt": [
        "DELETE FROM receipts WHERE status = 'blocked'",
        "UPDATE execution_attempts SET status = 'DONE' WHERE status = 'ACTIVE'",
        "UPDATE execution_attempts SET status = 'ACTIVE' WHERE status = 'RECOVERED'",
    ],
    "one attempt for each receipt": [
        "UPDATE receipts SET actor_id = 'somebody' WHERE status = 'blocked'",
        "UPDATE receipts SET assignment_id = (SELECT id FROM assignments WHERE state = 'RUNNING')",
        "UPDATE receipts SET attempt_id = 'att_none' WHERE failure_category = 'missing_report'",
    ],
    "an active attempt is pointed at": [
        "UPDATE assignments SET state = 'FAILED', current_execution_attempt = NULL WHERE state = 'RUNNING'",
        "UPDATE assignments SET current_execution_attempt = 'att_none' WHERE state = 'RUNNING'",
    ],
    "a running assignment points at an active attempt": [
        "UPDATE assignments SET current_execution_attempt = 'att_none' WHERE state = 'RUNNING'",
        "UPDATE execution_attempts SET status = 'RECOVERED' WHERE status = 'ACTIVE'",
        "UPDATE execution_attempts SET actor_id = 'somebody' WHERE status = 'ACTIVE'",
        "UPDATE assignments SET state = 'RUNNING', current_execution_attempt = 'att_none' WHERE state = 'CREATED'",
    ],
    "an assignment is what its last receipt says": [
        "UPDATE assignments SET state = 'COMPLETED' WHERE state = 'FAILED'",
        "UPDATE assignments SET state = 'FAILED' WHERE state = 'BLOCKED'",
        "UPDATE assignments SET state = 'BLOCKED' WHERE state = 'COMPLETED'",
        "UPDATE assignments SET state = 'CANCELED' WHERE state = 'BLOCKED'",
        "UPDATE assignments SET state = 'CREATED' WHERE state = 'BLOCKED'",
        "UPDATE assignments SET state = 'COMPLETED' WHERE state = 'CREATED'",
        "UPDATE receipts SET failure_category = 'worker_lost' WHERE failure_category = 'interrupted'",
    ],
    "an assignment has an end exactly when it has ended": [
        "UPDATE assignments SET finished_at = NULL WHERE state = 'COMPLETED'",
        "UPDATE assignments SET finished_at = 1 WHERE state = 'RUNNING'",
    ],
    "completed is said only by the process that ran a completed assignment": [
        "UPDATE receipts SET status = 'completed', failure_category = '' WHERE failure_category = 'worker_lost'",
        "UPDATE receipts SET status = 'completed', failure_category = '' WHERE failure_category = 'missing_report'",
    ],
    "another process knows only that an attempt is lost": [
        "UPDATE receipts SET status = 'completed', failure_category = '' WHERE failure_category = 'worker_lost'",
        "UPDATE receipts SET failure_category = 'timeout' WHERE failure_category = 'worker_lost'",
        "UPDATE receipts SET failure_category = 'interrupted' WHERE failure_category = 'worker_lost'",
        "UPDATE receipts SET failure_category = 'worker_lost' WHERE failure_category = 'interrupted'",
        "UPDATE receipts SET failure_category = 'worker_lost' WHERE failure_category = 'missing_report'",
    ],
    "no attempt is lost before it has run out": [
        "UPDATE execution_attempts SET expires_at = deadline WHERE status = 'RECOVERED'",
    ],
    "one assignment.running for each attempt": [
        "DELETE FROM events WHERE kind = 'assignment.running'",
        f"{AGAIN} WHERE kind = 'assignment.running'",
    ],
    "one assignment.finished for each attempt that ended its assignment": [
        "DELETE FROM events WHERE kind = 'assignment.finished' AND detail LIKE '%completed%'",
        f"{AGAIN} WHERE kind = 'assignment.finished' AND detail LIKE '%blocked%'",
        "UPDATE events SET kind = 'assignment.finished' WHERE kind = 'assignment.recovered'",
        "UPDATE receipts SET id = 'rcp_other' WHERE failure_category = 'missing_report'",
    ],
    "one assignment.recovered for each recovered attempt": [
        "DELETE FROM events WHERE kind = 'assignment.recovered'",
        f"{AGAIN} WHERE kind = 'assignment.recovered'",
        "UPDATE events SET kind = 'assignment.recovered' WHERE kind = 'assignment.finished'",
        "UPDATE receipts SET id = 'rcp_other' WHERE failure_category = 'interrupted'",
    ],
    "an event of a run names its attempt": [
        "UPDATE events SET detail = '{}' WHERE kind = 'assignment.recovered'",
        "UPDATE events SET subject = 'asg_none' WHERE kind = 'assignment.finished'",
    ],
    "a token is given once": [
        "UPDATE messages SET fencing_token = (SELECT min(fencing_token) FROM execution_attempts) WHERE state = 'DONE'",
        "UPDATE actor_leases SET fencing_token = (SELECT min(fencing_token) FROM execution_attempts)",
        "UPDATE execution_attempts SET actor_lease_fencing_token = fencing_token WHERE status = 'ACTIVE'",
        "UPDATE execution_attempts SET process_identity = 'proc_other' WHERE status = 'ACTIVE'",
    ],
    "no token is above the counter": [
        "UPDATE lease_tokens SET value = value - 1",
        "DELETE FROM lease_tokens",
        "UPDATE messages SET fencing_token = 1000000 WHERE state = 'DONE'",
    ],
    "an attempt's token is greater than its lease's": [
        "UPDATE execution_attempts SET actor_lease_fencing_token = fencing_token + 1 WHERE status = 'ACTIVE'",
    ],
    "nobody begins or finishes a run on a lease that has passed to another": [
        "UPDATE execution_attempts SET actor_lease_fencing_token = 0 WHERE status = 'ACTIVE'",
        f"{AGAIN} WHERE kind = 'assignment.finished' AND detail LIKE '%blocked%'",
    ],
    "a lease is no earlier than the attempts of its actor": ["UPDATE actor_leases SET fencing_token = 0"],
    "a statement of work is what its last assignment makes it": [
        "UPDATE sows SET state = 'READY' WHERE state = 'ASSIGNED'",
        "UPDATE sows SET state = 'COMPLETED' WHERE state = 'FAILED'",
        "UPDATE sows SET state = 'FAILED' WHERE state = 'APPROVED'",
        "UPDATE sows SET state = 'FAILED' WHERE state = 'BLOCKED'",
        "UPDATE sows SET state = 'ASSIGNED' WHERE state = 'RUNNING'",
        "UPDATE sows SET state = 'VERIFIED' WHERE state = 'DRAFT'",
    ],
    "a statement of work is where its history left it": [
        "UPDATE sows SET state = 'COMPLETED' WHERE state = 'VERIFIED'",
        "DELETE FROM events WHERE kind LIKE 'sow.%'",
    ],
    "parked work is given out again only after a ruling": ["DELETE FROM events WHERE kind = 'ruling.decided'"],
    "verified work was verified by somebody else": [
        "DELETE FROM verifications",
        "UPDATE verifications SET passed = 0",
        "UPDATE verifications SET verifier_id = 'operator-course'",
        "UPDATE verifications SET assignment_id = (SELECT min(assignment_id) FROM verifications)",
    ],
    "approved work was approved by somebody who neither planned nor did it": [
        "DELETE FROM reviews",
        "UPDATE reviews SET approved = 0 WHERE approved = 1",
        "UPDATE reviews SET reviewer_id = 'operator-course' WHERE approved = 1",
        "UPDATE reviews SET reviewer_id = 'master-course' WHERE approved = 1",
        "UPDATE assignments SET planner_id = 'sparring-course'",
        "UPDATE sows SET created_by = 'sparring-course'",
    ],
    "evidence of an effect is of completed work": [
        "UPDATE evidence SET assignment_id = (SELECT id FROM assignments WHERE state = 'RUNNING')",
        "UPDATE evidence SET sow_id = (SELECT id FROM sows WHERE state = 'RUNNING')",
    ],
    "an act whose end nobody knows waits for a person's word": [
        "DELETE FROM unsettled_effects",
    ],
    "what left in an older epoch waits for a person's word, too, and nothing else holds all others back": [
        "DELETE FROM unsettled_effects",
        "UPDATE unsettled_effects SET of_older_epoch = 0",
        "UPDATE assistant_control SET epoch = (SELECT min(epoch) FROM effects)",
    ],
    "nobody is asked for what is known": [
        "INSERT INTO unsettled_effects SELECT seq, 0 FROM effects WHERE operation_id = 'in vain'",
        "INSERT INTO unsettled_effects SELECT seq, 1 FROM effects WHERE operation_id = 'spoken of'",
        "UPDATE unsettled_effects SET of_older_epoch = 0",
    ],
    "an act ends once for its worker": [
        (
            "INSERT INTO effect_ends (operation_id, outcome, actor, reason, created_at)"
            " SELECT operation_id, outcome, actor, reason, created_at FROM effect_ends"
        ),
    ],
    "an open outcome is what its work makes it": [
        "UPDATE outcomes SET state = 'READY' WHERE state = 'AT_RISK'",
        "UPDATE outcomes SET state = 'AT_RISK' WHERE state = 'ACTIVE'",
        "UPDATE outcomes SET state = 'ACTIVE' WHERE state = 'ACCEPTED'",
    ],
    "nobody works towards an outcome that is not open": [
        "UPDATE outcomes SET state = 'CANCELED' WHERE state = 'ACTIVE'",
        "UPDATE outcomes SET state = 'DRAFT' WHERE state = 'AT_RISK'",
    ],
    "accepted means that there is an acceptance": [
        "DELETE FROM acceptances",
        "UPDATE outcomes SET state = 'READY' WHERE state = 'ACCEPTED'",
    ],
    "accepted means that all of the work is approved": [
        "UPDATE sows SET state = 'VERIFIED' WHERE state = 'APPROVED'",
        "UPDATE sows SET state = 'CANCELED' WHERE state = 'APPROVED'",
        "UPDATE outcomes SET state = 'ACCEPTED' WHERE state = 'AT_RISK'",
    ],
    "accepted means that somebody accepted who neither did nor reviewed the work": [
        "UPDATE acceptances SET accepter_id = 'operator-course'",
        "UPDATE acceptances SET accepter_id = 'sparring-course'",
    ],
}


def test_a_ledger_in_which_everything_has_happened_keeps_every_promise(story: Story) -> None:
    assert violations(story.org.db.connection) == []
    with closing(Organization(story.root, read_only=True)) as reader:
        assert violations(reader.db.connection) == []


def test_no_promise_is_without_a_breach() -> None:
    assert list(BREACHES) == [promise.name for promise in PROMISES]


@pytest.mark.parametrize("name", BREACHES)
def test_a_broken_promise_is_named(name: str, story: Story) -> None:
    [sentence] = [promise.sentence for promise in PROMISES if promise.name == name]
    named = re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(sentence)))
    for statement in BREACHES[name]:
        assert [each for each in broken(story, statement) if named.fullmatch(each)], statement


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE execution_attempts SET fencing_token = 1000000 WHERE fencing_token = 2",
        "UPDATE execution_attempts SET fencing_token = 1 WHERE status = 'ACTIVE'",
        "UPDATE events SET detail = '{\"token\":1}' WHERE kind = 'message.claimed'",
    ],
)
def test_a_later_authority_under_a_smaller_token_is_named(statement: str, story: Story) -> None:
    assert any(re.fullmatch(r"Event .+, has token \d+ after \d+\.", each) for each in broken(story, statement))


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE messages SET state = 'DONE' WHERE state = 'DEAD'", "but its history makes it"),
        (
            "UPDATE messages SET fencing_token = fencing_token + 1000 WHERE state = 'CLAIMED'",
            "but its history makes it",
        ),
        ("UPDATE messages SET deliveries = deliveries + 1", "but its history makes it"),
        (f"{AGAIN} WHERE kind = 'message.done'", "was DONE when message.done happened to it."),
        (f"{AGAIN} WHERE kind = 'message.dead'", "was DEAD when message.dead happened to it."),
        ("UPDATE events SET kind = 'message.done' WHERE kind = 'message.dead'", "but its history makes it"),
        ("DELETE FROM events WHERE kind = 'message.sent'", "was unsent when message.claimed happened to it."),
        ("UPDATE events SET kind = 'message.swept' WHERE kind = 'message.claimed'", "was NEW when message.swept"),
        ("UPDATE events SET detail = '{\"token\":7}' WHERE kind = 'message.claimed'", "which do not only grow."),
    ],
)
def test_a_message_that_is_not_what_its_history_makes_it_is_named(statement: str, named: str, story: Story) -> None:
    assert any(each.startswith("Message ") and named in each for each in broken(story, statement))


def torture(root: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "sovereign_agent", "torture", "--json", "--root", str(root), *options]


def test_whoever_is_killed_wherever_no_promise_is_broken(make_location: Callable[..., Location]) -> None:
    location = make_location(migrated=False)
    ledger = ["--ledger", location.ledger] if location.engine == "postgresql" else []
    ended = subprocess.run(
        torture(location.root, "--seconds", "6", *ledger), capture_output=True, text=True, check=False
    )
    report: dict[str, Any] = json.loads(ended.stdout)
    assert (ended.returncode, report["violations"], report["never_met"]) == (0, [], []), ended.stderr
    assert report["ledger"] == location.engine
    assert {"SIGKILL", "SIGSTOP", "SIGTERM"} <= {*report["signals"]}
    assert {*report["killed"]} >= {"worker", "supervisor", "assistant", "operator"}
    assert {*report["crash_points"]} == {str(point) for point in points(location.engine)}
    assert {"completed", "failed worker_lost"} <= {*report["receipts"]}
    assert report["audits"] > 0


def test_an_interrupt_ends_the_torture_with_its_report_which_says_what_was_left_out(tmp_path: Path) -> None:
    command = torture(tmp_path, "--seconds", "60")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: Witness(tmp_path / "witness.jsonl").told("asked"))
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    report = json.loads(stdout)
    assert (process.returncode, report["violations"]) == (1, []), stdout + stderr
    assert report["never_met"]
    assert report["seconds"] < 60


def stand_deeper_than_a_path_is_long(pipe: Any, folder: Path) -> None:
    os.chdir(folder)
    for name in ["d" * 250] * 20:
        Path(name).mkdir()
        os.chdir(name)
    pipe.send("standing")
    pipe.recv()


def test_what_the_torture_finds_is_named_and_is_its_exit_code(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        child(stand_deeper_than_a_path_is_long, tmp_path_factory.mktemp("elsewhere")) as (_, somebody),
        subprocess.Popen(torture(tmp_path, "--seconds", "60"), stdout=subprocess.PIPE, text=True) as process,
    ):
        eventually(lambda: Witness(tmp_path / "witness.jsonl").told("asked"))
        (tmp_path / ".sovereign" / "runs" / "att_stranger").mkdir(parents=True)
        assert heard(somebody) == "standing"
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert [each.rpartition("/")[2] for each in json.loads(stdout)["violations"]] == [
        "att_stranger belongs to no attempt."
    ]


def test_a_ledger_that_cannot_be_reached_is_no_torture(tmp_path: Path) -> None:
    unreachable = f"postgresql://nobody@/nothing?host={tmp_path}"
    ended = subprocess.run(torture(tmp_path, "--ledger", unreachable), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (4, "")
    assert "cannot be used" in ended.stderr


def test_a_torture_that_does_not_begin_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cli.main(["torture", "--ledger", f"postgresql://nobody@/nothing?host={tmp_path}"]) == 4
    assert list(tmp_path.iterdir()) == []


def test_nobody_s_ledger_is_tortured(location: Location) -> None:
    org = location.init()
    org.close()
    before = traces(location.root)
    elsewhere = location.root.with_name("elsewhere")
    given = [str(elsewhere), "--ledger", location.ledger] if location.engine == "postgresql" else [str(location.root)]
    ended = subprocess.run(torture(Path(given[0]), *given[1:]), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ledger_not_empty" in ended.stderr
    assert (traces(location.root), elsewhere.exists()) == (before, False)


# --- its parts --------------------------------------------------------------------------------------------


def doomed(pipe: Any, name: str, location: Location) -> None:
    """For `child`: queue two turns, and die over the second."""
    [point] = [point for point in points(location.engine) if str(point) == name]
    doom = Doom(point, times=2)
    db = DoomedDatabase(location.ledger, location.root, doom, lambda _, **__: None, patience=timedelta(seconds=5))
    for number in (1, 2):
        assistant_work.enqueue(db, f"mail:{number}", "lucy", "Sell it.")
    pipe.send("alive")


@pytest.mark.parametrize("engine", ENGINES)
def test_in_overtime_those_make_room_whose_next_life_can_meet_what_nobody_has_met(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_room = list[str]()
    monkeypatch.setattr(Place, "send", lambda place, _number: made_room.append(place.role))
    executioner = Torture(Options(tmp_path, 0, 1, 0, ledger="postgresql://somewhere" * (engine == "postgresql")))
    for point in executioner.reached:
        executioner.reached[point] = 1
    for never in hardships(engine):
        executioner.witness.path.unlink(missing_ok=True)
        for one in hardships(engine):
            if one is not never:
                executioner.witness.tell("hardship", name=one)
        made_room.clear()
        executioner._make_room()
        assert made_room == ([] if never is Hardship.LOCKED else ["worker"])  # the living wait for a lock
    for point in executioner.reached:
        executioner.reached[point] = 0
        made_room.clear()
        executioner._make_room()
        assert {*made_room} == {point.step.who}
        executioner.reached[point] = 1


@pytest.mark.parametrize(("moment", "there"), [("before_commit", 1), ("after_commit", 2)])
def test_a_process_dies_at_the_point_it_is_doomed_to_and_at_no_other(
    db: Database, location: Location, moment: str, there: int
) -> None:
    with child(doomed, f"work.enqueue.{moment}", location) as (process, _):
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
    assert len(db.connection.execute("SELECT 1 FROM assistant_work").rows) == there


def test_a_full_or_read_only_ledger_takes_nothing_and_then_everything(db: Database, location: Location) -> None:
    for hardship in [one for one in hardships(location.engine) if one is not Hardship.LOCKED]:
        told: list[Any] = []
        doom = Doom(hardship=hardship, times=1, lasts=100)
        hard = DoomedDatabase(
            location.ledger,
            location.root,
            doom,
            lambda kind, told=told, **facts: told.append((kind, facts)),
            patience=timedelta(seconds=5),
        )
        with closing(hard):
            answers = [
                answer(assistant_work.enqueue, hard, f"{hardship} {number}", "lucy", "x" * 5_000)
                for number in range(101)
            ]
        queued = [row["origin"] for row in db.connection.execute("SELECT origin FROM assistant_work ORDER BY seq")]
        assert {*answers} == {"done", "ledger_unavailable"}
        assert answers[-1] == "done"
        assert [origin for origin in queued if origin.startswith(hardship)] == [
            f"{hardship} {number}" for number, said in enumerate(answers) if said == "done"
        ]
        assert told == [("hardship", {"name": hardship})] * answers.count("ledger_unavailable")


def test_a_death_is_timed_from_the_kill_and_a_loss_is_false_only_if_nobody_touched_its_worker(
    org: Organization,
) -> None:
    second = 1_000_000
    for number, (pid, category) in enumerate(
        [(1, "worker_lost"), (2, "worker_lost"), (3, "worker_lost"), (4, "worker_lost"), (5, "nonzero_exit")]
    ):
        assignment = new_assignment(org.db, OPERATOR)
        lease = fencing.acquire_or_renew_actor_lease(org.db, OPERATOR, "proc_red")
        attempt = fencing.acquire_execution_attempt(
            org.db, assignment.id, OPERATOR, "proc_red", lease.fencing_token, process={"pid": pid}
        )
        receipt = replace(receipt_for(attempt), failure_category=category, status=ReceiptStatus.FAILED)
        with org.db.transaction() as connection:
            now = moment((100 + number) * second)
            fencing.end_attempt(connection, attempt, AttemptStatus.RECOVERED, receipt, now=now)
        org.db.connection.execute(
            "UPDATE execution_attempts SET acquired_at = ? WHERE id = ?", (90 * second, attempt.id)
        )
    lives = [
        Lifetime(1, 1, killed_at=98 * second, touched_at=98 * second),
        Lifetime(2, 1),
        Lifetime(3, 1, touched_at=95 * second),
        Lifetime(4, 1),
        Lifetime(5, 1),
    ]
    seen = measured(org.db.connection, lives, [(102.5 * second, 104 * second)])
    assert seen["kill_to_failed"] == {"count": 1, "p50": 2.0, "p99": 2.0}
    assert (seen["false_losses"]["count"], seen["false_losses"]["attempts"]) == (1, 5)
