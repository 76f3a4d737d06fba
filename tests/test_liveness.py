"""Liveness: every row of the table, and what no combination of evidence may ever come to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support import eventually, finish, run_of

from sovereign_agent import liveness
from sovereign_agent.heartbeat import HeartbeatStatus, Verdict, record_heartbeat
from sovereign_agent.liveness import Decision, Evidence, Observation, Sight, assess, look, observe, this_process
from sovereign_agent.records import AttemptStatus, ExecutionAttempt

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TTL = timedelta(seconds=60)
RANK = list(Decision)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def attempt(*, renewed: float = 10, silent: float = 0, **changes: Any) -> ExecutionAttempt:
    """A current attempt that was renewed so many seconds ago, when its program had been silent for so many."""
    renewed_at = NOW - seconds(renewed)
    usual = ExecutionAttempt(
        id="att_1",
        assignment_id="asg_1",
        actor_id="operator-course",
        process_identity="proc_red",
        fencing_token=7,
        actor_lease_fencing_token=6,
        status=AttemptStatus.ACTIVE,
        acquired_at=NOW - timedelta(hours=2),
        expires_at=renewed_at + TTL,
        deadline=NOW + timedelta(hours=2),
        host="anywhere",
        process={"pid": 42},
        progress_at=renewed_at - seconds(silent),
        tolerance_seconds=120,
    )
    return replace(usual, **changes)


def beat(age: float = 5) -> HeartbeatStatus:
    verdict = Verdict.ALIVE if age < liveness.FRESH_BEAT_SECONDS else Verdict.STALE
    return HeartbeatStatus(verdict, NOW - seconds(age), age, "cli", "proc_red")


def seen(sight: Sight, one: ExecutionAttempt | None = None, **more: Any) -> Observation:
    return Observation(one or attempt(), TTL, evidence=Evidence(sight), **more)


ROWS = {
    "ran out now": (seen(Sight.ALIVE, attempt(expires_at=NOW)), Decision.LOST),
    "ended by itself": (seen(Sight.ALIVE, attempt(status=AttemptStatus.DONE)), Decision.LOST),
    "ended by another": (seen(Sight.ALIVE, attempt(status=AttemptStatus.RECOVERED)), Decision.LOST),
    "not the current one": (seen(Sight.ALIVE, is_current=False), Decision.LOST),
    "one moment before it runs out": (seen(Sight.ALIVE, attempt(renewed=59.999)), Decision.STALLED),
    "gone": (seen(Sight.GONE), Decision.SUSPECTED_DEAD),
    "gone while it waited": (seen(Sight.GONE, attempt(step="waiting for approval")), Decision.SUSPECTED_DEAD),
    "host restarted": (seen(Sight.REBOOTED), Decision.SUSPECTED_DEAD),
    "elsewhere, two renewals missing": (seen(Sight.ELSEWHERE, attempt(renewed=40)), Decision.SUSPECTED_DEAD),
    "unknown, two renewals missing": (seen(Sight.UNKNOWN, attempt(renewed=40)), Decision.SUSPECTED_DEAD),
    "elsewhere, one renewal missing": (seen(Sight.ELSEWHERE, attempt(renewed=39)), Decision.WORKING),
    "elsewhere, two missing, but it beats": (
        seen(Sight.ELSEWHERE, attempt(renewed=40), beat=beat()),
        Decision.STALLED,
    ),
    "elsewhere, two missing, its beat is stale": (
        seen(Sight.ELSEWHERE, attempt(renewed=40), beat=beat(60)),
        Decision.SUSPECTED_DEAD,
    ),
    "there, two renewals missing": (seen(Sight.ALIVE, attempt(renewed=40)), Decision.STALLED),
    "elsewhere, no renewal reaches beyond its deadline": (
        seen(Sight.ELSEWHERE, attempt(renewed=40, deadline=NOW + seconds(20))),
        Decision.WORKING,
    ),
    "stopped": (seen(Sight.STOPPED), Decision.STALLED),
    "stopped while it waited": (seen(Sight.STOPPED, attempt(step="waiting for approval")), Decision.STALLED),
    "waits for a person": (seen(Sight.ALIVE, attempt(step="waiting for approval")), Decision.WAITING),
    "has waited for hours": (seen(Sight.ALIVE, attempt(silent=7000, step="waiting for approval")), Decision.WAITING),
    "longer than declared": (seen(Sight.ALIVE, attempt(silent=120.5)), Decision.STALLED),
    "as long as declared": (seen(Sight.ALIVE, attempt(silent=120)), Decision.QUIET),
    "longer than the usual": (seen(Sight.ALIVE, attempt(silent=301, tolerance_seconds=0)), Decision.STALLED),
    "as long as the usual": (seen(Sight.ALIVE, attempt(silent=300, tolerance_seconds=0)), Decision.QUIET),
    "a long tool": (seen(Sight.ALIVE, attempt(silent=3000, step="tool: Bash", tolerance_seconds=3600)), Decision.QUIET),
    "just quiet": (seen(Sight.ELSEWHERE, attempt(silent=61)), Decision.QUIET),
    "not yet quiet": (seen(Sight.ELSEWHERE, attempt(silent=60)), Decision.WORKING),
    "without any beat": (seen(Sight.ALIVE, beat=None), Decision.WORKING),
    "without any beat elsewhere": (seen(Sight.ELSEWHERE, beat=None), Decision.WORKING),
    "with a stale beat": (seen(Sight.ALIVE, beat=beat(5000)), Decision.WORKING),
}


@pytest.mark.parametrize(("observation", "decision"), ROWS.values(), ids=ROWS)
def test_each_row_of_the_table_decides_as_it_says(observation: Observation, decision: Decision) -> None:
    told = assess(observation, NOW)
    assert told.decision is decision, told.reasons


def test_three_silences_of_the_same_length_are_told_apart() -> None:
    """Hazard of the trade: a long tool, a wait for a person and a dead worker are silent alike."""
    silence = {"silent": 900.0, "tolerance_seconds": 1800}
    assert assess(seen(Sight.ALIVE, attempt(**silence)), NOW).decision is Decision.QUIET
    waits = attempt(**silence, step="waiting for approval: rm -r build")
    assert assess(seen(Sight.ALIVE, waits), NOW).decision is Decision.WAITING
    assert assess(seen(Sight.GONE, attempt(**silence)), NOW).decision is Decision.SUSPECTED_DEAD


def test_a_decision_tells_its_grounds_with_figures_the_owner_until_when_and_what_to_do() -> None:
    one = attempt(renewed=45, silent=30, step="tool: Bash")
    told = assess(Observation(one, TTL, evidence=Evidence(Sight.GONE, 2), beat=beat(300)), NOW)
    assert told.reasons == (
        "Its process is gone.",
        "It last renewed 45 s ago; a renewal holds for 60 s.",
        "Its program had then been silent for 30 s; up to 120 s are tolerated in its step: tool: Bash.",
        "It last recorded a heartbeat 300 s ago.",
        "The kernel has since killed 2 of its cgroup for want of memory.",
    )
    assert (told.owner, told.until) == ("proc_red, pid 42 on anywhere", one.expires_at)
    assert "worker_lost" in told.then
    assert told.next == "sovereign-agent cancel asg_1 --by ACTOR"


def test_only_what_has_run_out_is_left_to_the_supervisor() -> None:
    told = assess(seen(Sight.ALIVE, attempt(expires_at=NOW - seconds(12))), NOW)
    assert told.reasons[0] == "Its attempt ran out 12 s ago."
    assert told.next == "sovereign-agent supervisor --once"
    for observation, decision in ROWS.values():
        if decision is not Decision.LOST:
            assert "supervisor" not in assess(observation, NOW).next


def test_of_a_stopped_worker_it_is_not_said_that_it_renews() -> None:
    stopped, silent = seen(Sight.STOPPED), seen(Sight.ALIVE, attempt(silent=301))
    assert {assess(each, NOW).decision for each in (stopped, silent)} == {Decision.STALLED}
    assert "its program is ended with its leash, its attempt runs out" in assess(stopped, NOW).then
    assert assess(silent, NOW).then.startswith("While it renews it goes on")


# --- for any combination ----------------------------------------------------------------------------------

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
moments = st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001 - the bounds
near = st.floats(-4000, 4000).map(lambda number: NOW + seconds(number))
beats = st.none() | st.builds(
    HeartbeatStatus,
    st.sampled_from(Verdict),
    st.none() | near,
    st.none() | st.floats(-1e9, 1e9),
    st.text(),
    st.just("proc_red"),
)
evidence = st.builds(Evidence, st.sampled_from(Sight), st.integers(0, 5))
attempts = st.builds(
    attempt,
    status=st.sampled_from(AttemptStatus) | st.just(AttemptStatus.ACTIVE),
    acquired_at=near | moments,
    expires_at=near | moments,
    deadline=near | moments,
    progress_at=near | moments | st.just(datetime(1970, 1, 1, tzinfo=UTC)),
    step=st.sampled_from(["", "tool: Bash", "waiting for approval"]) | st.text(),
    tolerance_seconds=st.sampled_from([0, 1, 60, 120]) | st.integers(0, 2**62),
    host=st.text(),
    process=st.dictionaries(st.text(), st.integers()) | st.just({"pid": 42}),
)
observations = st.builds(
    Observation,
    attempts,
    st.floats(0.001, 86400).map(seconds) | st.just(TTL),
    is_current=st.sampled_from([True, True, False]),
    evidence=evidence,
    beat=beats,
)
nows = near | moments


@unhurried
@given(observations, nows)
def test_there_is_always_one_decision_with_reasons(observation: Observation, now: datetime) -> None:
    told = assess(observation, now)
    assert told.decision in RANK
    assert all(told.reasons)
    assert told.then
    assert told == assess(observation, now)


@unhurried
@given(observations, nows)
def test_lost_is_exactly_what_has_run_out_or_ended_or_is_not_current(observation: Observation, now: datetime) -> None:
    one = observation.attempt
    holds = one.status is AttemptStatus.ACTIVE and observation.is_current and one.expires_at > now
    assert (assess(observation, now).decision is Decision.LOST) is not holds


@unhurried
@given(observations, nows)
def test_a_silent_heartbeat_says_no_more_than_none(observation: Observation, now: datetime) -> None:
    stale = HeartbeatStatus(Verdict.STALE, NOW, 1e6, "cli", observation.attempt.process_identity)
    without = assess(replace(observation, beat=None), now)
    assert assess(replace(observation, beat=stale), now).decision is without.decision
    if observation.evidence.seen is Sight.ALIVE and without.decision is not Decision.LOST:
        assert assess(observation, now).decision is not Decision.SUSPECTED_DEAD


LESS_LIFE = [
    (Sight.ALIVE, Sight.STOPPED),
    (Sight.ALIVE, Sight.UNKNOWN),
    (Sight.ALIVE, Sight.ELSEWHERE),
    (Sight.STOPPED, Sight.GONE),
    (Sight.UNKNOWN, Sight.GONE),
    (Sight.ELSEWHERE, Sight.REBOOTED),
]


@unhurried
@given(observations, nows, st.floats(0, 4000).map(seconds), st.sampled_from(LESS_LIFE), st.data())
def test_with_less_evidence_of_life_it_never_looks_more_alive(
    observation: Observation, now: datetime, less: timedelta, sights: tuple[Sight, Sight], data: st.DataObject
) -> None:
    before = replace(observation, evidence=Evidence(sights[0]))
    one, later = before.attempt, now
    after = before
    match data.draw(st.sampled_from(["the process", "progress", "authority", "heartbeat", "time"])):
        case "the process":
            after = replace(before, evidence=Evidence(sights[1]))
        case "progress":
            after = replace(before, attempt=replace(one, progress_at=one.progress_at - less))
        case "authority":
            assume(one.expires_at < one.deadline)
            after = replace(before, attempt=replace(one, expires_at=one.expires_at - less))
        case "heartbeat":
            after = replace(before, beat=None)
        case _:
            later = now + less
    assert RANK.index(assess(after, later).decision) >= RANK.index(assess(before, now).decision)


# --- what is seen of a process ----------------------------------------------------------------------------

DESCRIBE = "import json, sovereign_agent.liveness as l; print(json.dumps(l.this_process()), flush=True); input()"


@pytest.fixture
def worker() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A real process, and what it says of itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", DESCRIBE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_process_is_seen_alive_stopped_continued_and_gone_also_before_anybody_reaped_it(worker) -> None:
    process, described = worker
    assert look(described).seen is Sight.ALIVE
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: look(described).seen is Sight.STOPPED)
    process.send_signal(signal.SIGCONT)
    eventually(lambda: look(described).seen is Sight.ALIVE)
    process.kill()
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert look(described).seen is Sight.GONE
    process.wait()
    assert look(described).seen is Sight.GONE


def test_hazard_55_another_process_under_the_same_pid_is_not_taken_for_it(worker) -> None:
    _, described = worker
    assert look({**described, "started": described["started"] - 60}).seen is Sight.GONE


def test_a_clock_that_was_set_since_does_not_make_a_process_look_gone(worker) -> None:
    _, described = worker
    before = {**described, "started": described["started"] - 3600, "booted": described["booted"] - 3600}
    assert look(before).seen is Sight.ALIVE


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, Sight.ALIVE),
        ({"host": "another"}, Sight.ELSEWHERE),
        ({"host": "another", "boot_id": "another"}, Sight.ELSEWHERE),
        ({"namespace": 1}, Sight.ELSEWHERE),
        ({"boot_id": "another"}, Sight.REBOOTED),
        ({"boot_id": "another", "namespace": 1}, Sight.REBOOTED),
        ({"pid": None}, Sight.UNKNOWN),
        ({"pid": "one"}, Sight.UNKNOWN),
        ({"pid": -5}, Sight.UNKNOWN),
        ({"pid": 2**70}, Sight.GONE),
        ({"started": "yesterday"}, Sight.UNKNOWN),
    ],
    ids=str,
)
def test_what_is_seen_rests_on_host_boot_and_namespace_before_the_pid(change: dict[str, Any], seen: Sight) -> None:
    assert look({**this_process(), **change}).seen is seen


@unhurried
@given(st.dictionaries(st.sampled_from(list(this_process())), st.none() | st.integers() | st.floats() | st.text()))
def test_a_look_never_raises_whatever_stands_in_the_row(described: dict[str, Any]) -> None:
    assert look(described).seen in Sight
    assert look({**this_process(), **described}).seen in Sight


def test_kills_for_want_of_memory_are_counted_from_where_they_stood_in_the_same_cgroup(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(liveness, "CGROUPS", str(tmp_path))
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n")
    described = {**this_process(), "oom_counter": str(counter), "oom_kills": 3}
    assert look(described) == Evidence(Sight.ALIVE, 0)
    counter.write_text("oom 6\noom_kill 5\n")
    assert look(described) == Evidence(Sight.ALIVE, 2)
    assert look({**described, "boot_id": "another"}) == Evidence(Sight.REBOOTED, 0)
    elsewhere = tmp_path.parent / "any.txt"
    elsewhere.write_text("oom_kill 9\n")
    for named in (elsewhere, f"{tmp_path}/../any.txt", tmp_path / "gone"):
        assert look({**described, "oom_counter": str(named)}).oom_kills == 0


def test_this_process_names_its_counter_wherever_the_kernel_has_one() -> None:
    told = this_process()
    assert (told["host"], told["pid"]) == (socket.gethostname(), os.getpid())
    assert (told["oom_kills"] is None) is (told["oom_counter"] == "")
    assert json.loads(json.dumps(told)) == told


# --- what is gathered -------------------------------------------------------------------------------------


def test_an_observation_joins_the_ledger_its_beats_and_the_kernel(org) -> None:
    one = replace(run_of(org.db, org.db.clock, org.process_identity), process=this_process())
    gathered = observe(org, one)
    assert (gathered.is_current, gathered.evidence.seen, gathered.beat) == (True, Sight.ALIVE, None)
    record_heartbeat(org)
    assert observe(org, one).beat
    org.process_identity = "proc_blue"
    record_heartbeat(org)
    assert observe(org, one).beat is None  # that another process beats says nothing about this one
    finish(org.db, one, org.db.clock)
    assert not observe(org, one).is_current


def test_the_page_for_people_has_each_decision_in_the_order_in_which_they_are_tried() -> None:
    page = Path(__file__).parent.parent.joinpath("docs", "how-to", "when-a-worker-dies.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|", page, re.MULTILINE)
    of_code = re.findall(r"^ {4}\S.* {2,}(\w+)$", liveness.__doc__ or "", re.MULTILINE)
    order = ["lost", "suspected_dead", "suspected_dead", "stalled", "stalled", "waiting_for_approval", "stalled"]
    assert of_code == [*order, "quiet_but_within_tolerance", "working"]
    assert rows == of_code
