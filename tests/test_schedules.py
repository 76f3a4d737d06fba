"""The scheduler: it plays every order and every fault, notices what is planted, and each failure plays again."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from support import answer

from sovereign_agent import assistant_work, cli, fencing, relay
from sovereign_agent.clock import ManualClock
from sovereign_agent.commands import simulate
from sovereign_agent.errors import ConfigurationFault, LedgerUnavailable
from sovereign_agent.storage import sqlite
from sovereign_agent.testing import schedules
from sovereign_agent.testing.answers import Fact, contradictions
from sovereign_agent.testing.exploration import explore
from sovereign_agent.testing.scenarios import SCENARIOS
from sovereign_agent.testing.schedules import FAULTS, Choice, Effect, How, Player, Run, Scenario, Stage

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
SHORT = {"recovery": 1}
TTL = timedelta(minutes=5)
MASTER, OPERATOR = "master-course", "operator-course"


def played(scenario: Scenario, *lines: str) -> Run:
    _, choices = schedules.from_script("\n".join([f"scenario {scenario.name}", *lines]))
    with closing(Stage(scenario)) as stage:
        return stage.replay(choices)


def anonymous(sentences: list[str]) -> list[str]:
    return [re.sub(r"[0-9a-f]{32}|line \d+", "*", sentence) for sentence in sentences]


# --- the protocols ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "restore"])
def test_no_order_of_the_protocols_transactions_breaks_a_promise(name):
    found = explore(BY_NAME[name], faults=SHORT.get(name, 0))
    assert found.failure is None, schedules.script(name, found.failure)
    assert found.schedules > 1
    assert found.never_fired == []


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", BY_NAME)
def test_no_order_with_faults_breaks_a_promise(name):
    found = explore(BY_NAME[name])
    assert found.failure is None, schedules.script(name, found.failure)
    assert found.never_fired == []


def test_a_restore_that_dies_at_any_of_its_steps_is_finished_and_loses_nothing_unseen():
    with closing(Stage(BY_NAME["restore"])) as stage:
        for steps in range(9):
            choices = [Choice("observer"), *[Choice("restorer")] * steps, Choice("restorer", How.DIES)]
            assert stage.replay([*choices, Choice("observer")]).findings == []
            assert [fact.what for fact in stage.facts if fact.actor == "observer"][:2] == ["granted", "wrote"]


# --- what is planted is found -----------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def sql(clause: str, becomes: str) -> Plant:
    """Change a clause of every statement on its way to the engine."""
    render = sqlite.render

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite, "render", lambda text: render(text).replace(clause, becomes))

    return plant


def does(module: Any, name: str, act: Callable[..., Any]) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(module, name, act)


STOPS = "WHERE id = ? AND state = 'RUNNING' AND current_execution_attempt = ?"
LEASE = "actor_id = ? AND process_identity = ? AND fencing_token = ?"
RESTORE = ", ".join(["restorer"] * 9)

PLANTED: dict[str, tuple[str, Plant, int, str]] = {
    "a lease that holds is taken": (
        "lease",
        sql("leases.expires_at <= ? AND", "leases.expires_at <= ? OR 1 = 1 OR"),
        0,
        "rival, third",
    ),
    "a lease that has run out is renewed": (
        "lease",
        sql("fencing_token = ? AND expires_at > ?", "fencing_token = ? AND (expires_at > ? OR 1 = 1)"),
        1,
        "rival, clock jumps forward, rival",
    ),
    "another's lease is released": (
        "lease",
        sql(f"WHERE {LEASE}\n           AND NOT", f"WHERE ({LEASE} OR 1 = 1)\n           AND NOT"),
        1,
        "host, host, rival, clock jumps forward, third, host",
    ),
    "a run begins on a lease that is over": (
        "start",
        does(fencing, "_is_current", lambda *_: True),
        1,
        "worker, clock jumps forward, worker",
    ),
    "the living are recovered": (
        "recovery",
        sql("SELECT expires_at FROM execution_attempts", "SELECT 0 FROM execution_attempts"),
        2,
        "supervisor, clock jumps forward, second, clock jumps back, second",
    ),
    "a second end counts, too": (
        "recovery",
        sql(STOPS, "WHERE id = ? AND ? <> ''"),
        1,
        "worker, supervisor, clock jumps forward, second, second, worker",
    ),
    "a late worker ends its successor's run": (
        "takeover",
        sql(STOPS, "WHERE id = ? AND state = 'RUNNING' AND ? <> ''"),
        1,
        "worker, clock jumps forward, successor, successor, worker",
    ),
    "a worker ends what a tick has ended": (
        "tick",
        sql(STOPS, "WHERE id = ? AND ? <> ''"),
        0,
        "supervisor, supervisor, supervisor, supervisor, supervisor, worker",
    ),
    "a token that is over settles a message": (
        "mailbox",
        sql("claim_owner = ? AND fencing_token = ?", "claim_owner = ? AND (fencing_token = ? OR 1 = 1)"),
        1,
        "reader, clock jumps forward, dropper, reader",
    ),
    "a claim that holds is swept": (
        "mailbox",
        sql("claim_expires_at <= ?", "(claim_expires_at <= ? OR 1 = 1)"),
        0,
        "dropper, sweeper",
    ),
    "a message is delivered without end": (
        "last delivery",
        sql("deliveries < ?", "(deliveries < ? OR 1 = 1)"),
        1,
        "reader, clock jumps forward, dropper",
    ),
    "a former generation writes": (
        "assistant",
        sql("AND generation = ? AND owner", "AND (generation = ? OR 1 = 1) AND owner"),
        1,
        "worker, clock jumps forward, rival, worker",
    ),
    "a claim that has run out writes": (
        "assistant",
        sql("SELECT expires_at FROM assistant_work", "SELECT 9000000000000000 AS expires_at FROM assistant_work"),
        1,
        "worker, clock jumps forward, worker",
    ),
    "a message outlives its epoch": (
        "epoch over runs",
        does(relay, "revoke_all", lambda *_: None),
        0,
        "operator, worker",
    ),
    "a run outlives its epoch": (
        "epoch over runs",
        does(fencing, "revoke_all", lambda *_: None),
        0,
        "operator, worker, worker",
    ),
    "an item outlives its epoch": (
        "epoch over work",
        does(assistant_work, "revoke_all", lambda *_: None),
        0,
        "operator",
    ),
    "a restore gives a generation again": (
        "restore",
        does(assistant_work, "revoke_all", lambda *_: None),
        0,
        f"{RESTORE}, observer, observer",
    ),
}
"""What is planted: the scenario that notices, how, with so many faults, and in which order."""


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_breaks_an_order_that_is_sound_without_it(what, monkeypatch):
    name, plant, _, trail = PLANTED[what]
    _, choices = schedules.from_script("\n".join([f"scenario {name}", *trail.split(", ")]))
    with closing(Stage(BY_NAME[name])) as stage:
        assert stage.replay(choices).findings == []
        plant(monkeypatch)
        assert stage.replay(choices).findings != []


@pytest.mark.parametrize(
    "what",
    [
        what if not faults else pytest.param(what, marks=pytest.mark.torture)
        for what, (*_, faults, _) in PLANTED.items()
    ],
)
def test_what_is_planted_is_found_and_its_script_plays_it_again(what, monkeypatch):
    name, plant, faults, _ = PLANTED[what]
    plant(monkeypatch)
    found = explore(BY_NAME[name], faults=faults)
    assert found.failure, f"{found.schedules} schedules, and none showed that {what}"
    again = played(BY_NAME[name], *schedules.script(name, found.failure).splitlines()[1:])
    assert anonymous(again.findings) == anonymous(found.failure.findings) != []


def test_something_is_planted_for_every_scenario():
    assert {name for name, *_ in PLANTED.values()} == set(BY_NAME)


# --- what is explored -------------------------------------------------------------------------------------


def send(me: Player) -> None:
    """One step."""
    if message := me.ask(relay.send, me.db, MASTER, OPERATOR, me.name, ""):
        me.tell("sent", message.subject)


def look_and_send(me: Player) -> None:
    """Two steps."""
    me.tell("saw", detail=str(len(relay.inbox(me.db, OPERATOR))))
    send(me)


def send_twice(me: Player) -> None:
    send(me)
    send(me)


def another(act: Callable[[Player], None]) -> Callable[[Player], None]:
    return functools.partial(act)


def toy(**actors: Callable[[Player], None]) -> tuple[Scenario, set[tuple[str, ...]]]:
    """A scenario of no protocol, and the set of what came of its runs: all that was told, and the mail in its order."""
    ends: set[tuple[str, ...]] = set()

    def judge(db: Any, facts: Sequence[Fact]) -> list[str]:
        told = [f"{fact.actor} {fact.what} {fact.detail} at {fact.at:%T}" for fact in facts]
        mail = [message.subject for message in relay.inbox(db, OPERATOR, clock=lambda: ManualClock()() + 9 * TTL)]
        ends.add((*sorted(told), *mail))
        return []

    return Scenario("toy", "no protocol", TTL, lambda *_: None, actors, judge), ends  # type: ignore[arg-type]


def test_every_order_of_two_times_two_transactions_is_played_once():
    scenario, ends = toy(a=send_twice, b=another(send_twice))
    found = explore(scenario, faults=0)
    mail = {end[-4:] for end in ends}
    assert mail == set(itertools.permutations("aabb"))
    assert (found.schedules, found.equal) == (6, 0)


def test_of_two_who_do_the_same_one_begins():
    scenario, ends = toy(a=send_twice, b=send_twice)
    assert explore(scenario, faults=0).schedules == 3
    assert {end[-4:] for end in ends} == {order for order in itertools.permutations("aabb") if order[0] == "a"}


def test_two_looks_are_played_in_one_order_and_nothing_is_lost_by_it(monkeypatch):
    scenario, ends = toy(a=look_and_send, b=another(look_and_send))
    found = explore(scenario, faults=1)
    reached = set(ends)
    monkeypatch.setattr(Choice, "commutes", lambda *_: False)
    ends.clear()
    everything = explore(scenario, faults=1)
    assert ends == reached
    assert everything.equal == 0
    assert everything.schedules > found.schedules + found.equal


def test_each_fault_happens_at_each_point_of_a_run():
    scenario, _ = toy(a=send)
    found = explore(scenario, faults=1)
    expected = [How.DIES, How.UNDONE, How.UNHEARD, How.FORWARD, How.BACK]
    assert {kind: found.fired[kind] for kind in FAULTS if found.fired[kind]} == dict.fromkeys(expected, 1)
    assert (found.schedules, found.longest) == (6, 2)
    assert found.never_fired == [schedules.PAUSE]  # nobody is there to be waited for


def test_whoever_stands_still_until_all_others_have_ended_was_paused():
    a, b = Choice("a"), Choice("b")
    for trail, paused in (([a, b, a], 1), ([a, b, b, a, a], 1), ([a, a, b], 0), ([b, a, a], 0), ([], 0)):
        assert Run(trail, []).fired[schedules.PAUSE] == paused


# --- how a run goes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "mail", "told"),
    [("", ["a"], ["sent"]), (How.DIES, [], ["died"]), (How.UNDONE, [], ["died"]), (How.UNHEARD, ["a"], ["died"])],
)
def test_a_death_leaves_what_was_committed_and_nothing_else_and_is_told_nothing(how, mail, told):
    def clings(me: Player) -> None:
        try:
            send(me)
        finally:
            if how:
                relay.send(me.db, MASTER, OPERATOR, "from the grave", "")

    scenario, _ = toy(a=clings)
    with closing(Stage(scenario)) as stage:
        assert stage.replay([Choice("a", How(how))]).findings == []
        assert [message.subject for message in relay.inbox(stage.judge, OPERATOR)] == mail
        assert [fact.what for fact in stage.facts] == told
        stage.judge.release()
        with pytest.raises(ConfigurationFault, match="cannot happen"):
            stage.replay([Choice("a", How(how)), Choice("a")])


def test_a_jump_moves_the_clock_of_the_ledger_by_the_time_to_live():
    scenario, _ = toy(a=send, b=another(send), c=another(send))
    with closing(Stage(scenario)) as stage:
        forward, back = Choice("clock", How.FORWARD), Choice("clock", How.BACK)
        stage.replay([Choice("a"), forward, Choice("b"), back, Choice("c")])
        a, b, c = [fact.at for fact in stage.facts]
    assert (b - a, c - a) == (TTL, timedelta())


def test_every_run_begins_with_the_ledger_as_it_was_prepared():
    scenario, _ = toy(a=send)
    with closing(Stage(scenario)) as stage:
        for _ in range(2):
            stage.replay([Choice("clock", How.FORWARD), Choice("a")])
            assert len(relay.inbox(stage.judge, OPERATOR)) == len(stage.facts) == 1
            stage.judge.release()


def test_what_an_actor_could_not_foresee_is_a_finding_and_a_refusal_is_none():
    def breaks(me: Player) -> None:
        send(me)
        raise ZeroDivisionError

    scenario, _ = toy(a=breaks)
    assert "a ended in" in played(scenario, "a").findings[0]
    refused, _ = toy(a=lambda me: me.ask(relay.get_message, me.db, "msg_none"))  # type: ignore[arg-type, return-value]
    assert played(refused, "a").findings == []


def test_the_failing_run_is_told_without_what_it_does_not_need():
    def judge(_db: Any, facts: Sequence[Fact]) -> list[str]:
        return ["b"] if any(fact.actor == "b" for fact in facts) else []

    acts = {"a": send_twice, "b": another(send_twice), "c": another(send)}
    scenario = Scenario("toy", "no protocol", TTL, lambda *_: None, acts, judge)  # type: ignore[arg-type]
    found = explore(scenario, faults=0)
    assert found.failure
    assert schedules.script("toy", found.failure) == "scenario toy\nb\n# b\n"


def test_a_disk_that_is_full_ends_the_search_and_is_no_finding(monkeypatch: pytest.MonkeyPatch):
    def full(self: Any, *, read_only: bool) -> Any:
        connection = opened(self, read_only=read_only)
        connection.execute("PRAGMA max_page_count = 1")  # which means as many as there are
        return connection

    def send_much(player: Player) -> None:
        relay.send(player.db, MASTER, OPERATOR, "much", "x" * 50_000)

    opened = schedules.SteppedDatabase._open
    monkeypatch.setattr(schedules.SteppedDatabase, "_open", full)
    with pytest.raises(LedgerUnavailable, match="full"):
        explore(toy(a=send_much)[0], faults=0)


def test_a_ledger_that_cannot_be_used_for_another_reason_is_a_finding():
    def find_it_damaged(_: Player) -> None:
        raise LedgerUnavailable("It is damaged.", category="ledger_unavailable")

    scenario, _ = toy(a=find_it_damaged)
    assert answer(explore, scenario, faults=0) == "done"
    found = explore(scenario, faults=0)
    assert found.failure
    assert "It is damaged." in found.failure.findings[0]


# --- scripts and the verb ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("host", "no script"),
        ("", "no script"),
        ("scenario lease\nhost flies", "no choice"),
        ("scenario lease\nnobody", "cannot happen"),
        ("scenario lease\nclock", "cannot happen"),
        ("scenario recovery\nsecond", "cannot happen"),
        ("scenario lease\n" + "host\n" * 9, "cannot happen"),
    ],
)
def test_a_script_that_does_not_fit_is_refused_with_what_could_happen(text, why):
    with pytest.raises(ConfigurationFault, match=why) as refused:
        name, choices = schedules.from_script(text)
        played(BY_NAME[name], *map(str, choices))
    assert refused.value.category == "script"


def test_an_effect_need_not_be_written_down():
    assert Choice("a", effect=Effect.READS) == Choice("a")


def verb(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["simulate", *arguments])
    return code, *capsys.readouterr()


def test_the_verb_tells_what_was_played_and_leaves_nothing_behind(capsys, tmp_path):
    code, out, err = verb(capsys, "--scenario", "epoch over work", "--faults", "1", "--json", "--root", str(tmp_path))
    assert (code, err) == (0, "")
    document = json.loads(out)
    (found,) = document["interleavings"]
    assert document["good"] is True
    assert found["schedules"] == document["schedules"] > 50
    assert set(found["fired"]) == set(FAULTS)
    assert [*tmp_path.iterdir()] == []
    code, out, _ = verb(capsys, "--scenario", "last delivery", "--faults", "0")
    assert code == 0
    assert re.match(r"last delivery: \d+ schedules, ", out)
    assert out.endswith("schedules. No promise was broken.\n")


def test_a_failure_is_printed_as_a_script_that_the_verb_plays_again(capsys, monkeypatch, tmp_path):
    name, plant, faults, trail = PLANTED["a lease that holds is taken"]
    with monkeypatch.context() as planted:
        plant(planted)
        code, out, _ = verb(capsys, "--scenario", name, "--faults", str(faults))
        script = out[out.index("scenario lease") :].rpartition("\n\n")[0]
        assert (code, trail.split(", ")) == (1, script.splitlines()[1:3])
        file = tmp_path / "script"
        file.write_text(script)
        code, out, _ = verb(capsys, "--replay", str(file), "--json")
        assert (code, len(json.loads(out)["findings"])) == (1, 1)
        planted.setattr("sys.stdin", io.StringIO(script))
        assert verb(capsys, "--replay", "-")[0] == 1
    assert verb(capsys, "--replay", str(file))[:2] == (0, "No promise was broken.\n")


def test_a_kind_of_fault_that_never_fired_fails_the_run(capsys, monkeypatch):
    scenario, _ = toy(a=send)
    monkeypatch.setattr(simulate, "_chosen", lambda _: [scenario])
    code, out, _ = verb(capsys, "--seeds", "0")
    assert (code, "NEVER  is paused\n" in out) == (1, True)
    assert out.endswith(" schedules. It does not hold.\n")


def test_a_scenario_that_is_not_there_is_a_usage_error_that_names_those_that_are(capsys):
    code, _, err = verb(capsys, "--scenario", "leese")
    assert (code, "last delivery" in err) == (2, True)
    assert verb(capsys, "--replay", "/nowhere")[0] == 4
    assert verb(capsys, "--root", "/nowhere")[0] == 2


# --- what the answers say of one another ------------------------------------------------------------------

NOON = ManualClock()()


def told(line: str) -> Fact:
    """``who what token minute [until minute]``, of one key."""
    who, what, *numbers = line.split()
    token, at, *until = [int(number) for number in numbers]
    minutes = [NOON + timedelta(minutes=minute) for minute in (at, *until)]
    return Fact(who, what, "key", token, minutes[0], minutes[1] if until else None)


@pytest.mark.parametrize(
    ("before", "sound", "lie"),
    [
        (["a granted 1 0 5"], "b granted 2 5 10", "b granted 2 4 9"),
        (["a granted 2 0 5"], "b granted 3 5 10", "b granted 2 5 10"),
        (["a granted 1 0 5"], "a kept 1 4 9", "a kept 1 5 10"),
        (["a granted 1 0 5"], "a wrote 1 4", "a wrote 1 5"),
        (["a granted 1 0 5"], "a settled 1 9", "a settled 2 9"),
        (["a granted 1 0 5", "b granted 2 5 10"], "b settled 2 6", "a settled 1 6"),
        (["a granted 1 0 5", "b ended 1 5"], "c granted 2 5 10", "a settled 1 6"),
        (["a granted 1 0 5"], "b ended 1 5", "b ended 1 4"),
        (["a granted 1 0 5", "a settled 1 1"], "a refused 0 2", "b reported 1 6"),
        (["a granted 1 0 5", "a settled 1 1"], "a refused 0 2", "b granted 2 6 11"),
        (["a granted 1 0 5", "a released 1 1"], "b granted 2 2 7", "a released 1 2"),
        (["a granted 1 0 5", "b revoked 0 1"], "b granted 2 1 6", "a kept 1 2 7"),
        (["a granted 1 0 5", "b asked 0 1", "b died 0 1"], "c granted 2 1 6", "c granted 1 1 6"),
        (["a granted 1 0 5", "a died 0 1"], "c granted 2 1 6", "c granted 1 1 6"),
        (["a granted 1 0 5", "a settled 1 1", "r restored 0 2"], "a granted 2 2 7", "a settled 1 2"),
    ],
)
def test_an_answer_that_cannot_be_true_beside_the_others_is_a_lie(before, sound, lie):
    facts = [told(line) for line in before]
    assert contradictions([*facts, told(sound)]) == []
    assert len(contradictions([*facts, told(lie)])) == 1
