"""Liveness: what can be said about a worker that is silent, and what nobody can say.

A long tool, a wait for a person and a dead worker are silent alike. So silence is weighed with the rest: how long
authority still lasts and when it was last renewed, the program's marks of progress and the tolerance that its step
declared, heartbeats, and what this host's kernel says about the process. The first row that fits decides:

    the attempt has run out, has ended, or is not the current one        lost
    the process is gone, or its host was restarted                       suspected_dead
    two renewals are missing, and nothing says that it lives             suspected_dead
    two renewals are missing, and the process is there, or has beaten    stalled
    the process is stopped                                               stalled
    its step waits for a person                                          waiting_for_approval
    the program was silent for longer than its step declared             stalled
    the program was silent for over a minute                             quiet_but_within_tolerance
    anything else                                                        working

It advises. It ends nothing, and nothing is recovered because of it: only an attempt that has run out authorizes that,
so a worker whose process is seen to be dead is still no more than suspected. A heartbeat can speak for a worker; that
there is none speaks against nobody. What is seen of a process is evidence, never authority.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import psutil

from sovereign_agent import fencing, heartbeat
from sovereign_agent.configuration import Settings
from sovereign_agent.heartbeat import HeartbeatStatus, Verdict
from sovereign_agent.records import AttemptStatus, ExecutionAttempt

APPROVAL_STEP = "waiting for approval"
"""How the step of a program begins that waits for a person."""

QUIET_AFTER_SECONDS = 60
FRESH_BEAT_SECONDS = 60
TOLERANCE_SECONDS = 300
"""For how long a program may be silent whose step declares nothing."""

SAME_START_SECONDS = 1.5
"""The kernel rounds the time of its boot to a second, so the start of one process is not always told alike."""

BOOT_ID = "/proc/sys/kernel/random/boot_id"
CGROUPS = "/sys/fs/cgroup"


class Decision(StrEnum):
    """The answer of `assess`, from the liveliest to the one that is over."""

    WORKING = "working"
    QUIET = "quiet_but_within_tolerance"
    WAITING = "waiting_for_approval"
    STALLED = "stalled"
    SUSPECTED_DEAD = "suspected_dead"
    LOST = "lost"


class Sight(StrEnum):
    """What is seen of a process from here. ELSEWHERE: on another host, or in another container of this one."""

    ALIVE = "alive"
    STOPPED = "stopped"
    UNKNOWN = "unknown"
    ELSEWHERE = "elsewhere"
    GONE = "gone"
    REBOOTED = "rebooted"


PROCESS = {
    Sight.ALIVE: "Its process is there.",
    Sight.STOPPED: "Its process is stopped (SIGSTOP, or a debugger).",
    Sight.UNKNOWN: "Nothing can be said about its process.",
    Sight.ELSEWHERE: "Its process is on another host, or in another container: it cannot be seen from here.",
    Sight.GONE: "Its process is gone.",
    Sight.REBOOTED: "Its host has been restarted since it began.",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """`oom_kills`: how many processes of its memory cgroup the kernel has killed since the record was made."""

    seen: Sight
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """All that `assess` judges by: `ttl` is how long a renewal holds, `beat` the ledger's newest, if the worker's."""

    attempt: ExecutionAttempt
    ttl: timedelta
    is_current: bool = True
    evidence: Evidence = Evidence(Sight.UNKNOWN)
    beat: HeartbeatStatus | None = None

    @property
    def tolerance_seconds(self) -> int:
        """For how long the program may be silent in its step."""
        return self.attempt.tolerance_seconds or TOLERANCE_SECONDS


@dataclass(frozen=True, slots=True)
class Assessment:
    """A decision and its grounds. `then` is what happens by itself, `next` what a person may type, or empty."""

    decision: Decision
    reasons: tuple[str, ...]
    owner: str
    until: datetime
    then: str
    next: str


class Organization(heartbeat.Organization, Protocol):
    """What an observation needs to know of an organization."""

    settings: Settings


# --- evidence ---------------------------------------------------------------------------------------------


def this_process() -> dict[str, Any]:
    """Where and what this process is, for `look` to compare with later. Times are epoch seconds.

    `oom_kills` counts in the memory cgroup of this process, and is None where no kernel tells.
    """
    me, counter = psutil.Process(), _oom_counter()
    return {
        "host": socket.gethostname(),
        "pid": me.pid,
        "started": me.create_time(),
        "booted": psutil.boot_time(),
        "boot_id": _read(BOOT_ID),
        "namespace": _namespace(),
        "oom_counter": counter,
        "oom_kills": _oom_kills(counter),
    }


def look(process: Mapping[str, Any]) -> Evidence:
    """What is seen now of a process that `this_process` described. Never raises: what cannot be read is UNKNOWN."""
    try:
        seen = _seen(process)
        kills = (_oom_kills(process.get("oom_counter", "")) or 0) - (process.get("oom_kills") or 0)
        return Evidence(seen, max(0, kills) if seen in (Sight.ALIVE, Sight.STOPPED, Sight.GONE) else 0)
    except (psutil.Error, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return Evidence(Sight.UNKNOWN)


def _seen(process: Mapping[str, Any]) -> Sight:
    if not process.get("pid"):
        return Sight.UNKNOWN
    if process["host"] != socket.gethostname():
        return Sight.ELSEWHERE
    if process["boot_id"] != _read(BOOT_ID):
        return Sight.REBOOTED
    if process.get("namespace", _namespace()) != _namespace():
        return Sight.ELSEWHERE
    return _seen_here(process)


def _seen_here(process: Mapping[str, Any]) -> Sight:
    try:
        there = psutil.Process(process["pid"])
        status = there.status()
    except psutil.NoSuchProcess:
        return Sight.GONE
    booted = psutil.boot_time()  # a clock that was set since has moved both times of a pair, not their difference
    apart = (there.create_time() - booted) - (process["started"] - process.get("booted", booted))
    if abs(apart) > SAME_START_SECONDS or status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return Sight.GONE
    return Sight.STOPPED if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else Sight.ALIVE


def _namespace() -> int:
    """The namespace in which this process's PID means something; 0 where there are none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _oom_counter() -> str:
    """The file in which the kernel counts for this process's memory cgroup, of version 2 or 1; empty without one."""
    groups = re.findall(r"^\d+:(memory|):/(.*)$", _read("/proc/self/cgroup"), re.MULTILINE)
    places = [place for kind, group in groups for place in (f"{kind}/{group}", kind)]  # a container sees its own on top
    files = [f"{CGROUPS}/{place}/{name}" for place in places for name in ("memory.events", "memory.oom_control")]
    return next((file for file in files if _oom_kills(file) is not None), "")


def _oom_kills(counter: str) -> int | None:
    allowed = counter.startswith(f"{CGROUPS}/") and ".." not in counter  # the ledger names no other file to be read
    told = re.search(r"^oom_kill (\d+)$", _read(counter) if allowed else "", re.MULTILINE)
    return int(told[1]) if told else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


# --- judgement --------------------------------------------------------------------------------------------


def observe(org: Organization, attempt: ExecutionAttempt) -> Observation:
    """Gather what can be known of an attempt from here and now. Reads only."""
    beat = heartbeat.heartbeat_status(org, FRESH_BEAT_SECONDS)
    return Observation(
        attempt,
        ttl=org.settings.authority.attempt_ttl,
        is_current=fencing.verify_execution_attempt(org.db, attempt.assignment_id, attempt.id),
        evidence=look(attempt.process),
        beat=beat if beat.process_identity == attempt.process_identity else None,
    )


def assess(observation: Observation, now: datetime) -> Assessment:
    """Judge an attempt by the table above. Pure: the same observation and time give the same answer."""
    attempt, ttl, beat = observation.attempt, observation.ttl, observation.beat
    # A renewal notes the progress until then; of what came after nothing is known, so silence is counted up to there.
    renewed_at = max(attempt.acquired_at, attempt.progress_at, min(now, attempt.expires_at - ttl))
    # The last renewal before the deadline gives less than a whole ttl, so there it cannot be told when it was.
    overdue = now - renewed_at >= ttl * 2 / 3 and attempt.expires_at < attempt.deadline
    silent_seconds = (renewed_at - attempt.progress_at).total_seconds()
    loss, kills = _loss(observation, now), observation.evidence.oom_kills
    decision = _decide(observation, lost=bool(loss), overdue=overdue, silent_seconds=silent_seconds)
    step = f"up to {observation.tolerance_seconds} s are tolerated in its step{attempt.step and f': {attempt.step}'}"
    grounds = (
        loss,
        PROCESS[observation.evidence.seen],
        f"It last renewed {_s(now - renewed_at)} ago; a renewal holds for {_s(ttl)}.",
        f"Its program had then been silent for {silent_seconds:.0f} s; {step}.",
        f"It last recorded a heartbeat {beat.age_seconds or 0:.0f} s ago." if beat else "",
        f"The kernel has since killed {kills} of its cgroup for want of memory." if kills else "",
    )
    reasons = tuple(sentence for sentence in grounds if sentence)
    owner = f"{attempt.process_identity}, pid {attempt.process.get('pid', '?')} on {attempt.host or 'an unknown host'}"
    return Assessment(decision, reasons, owner, attempt.expires_at, *_outlook(decision, observation))


def _loss(observation: Observation, now: datetime) -> str:
    """Why the attempt is no longer held, in a sentence; empty while it is."""
    attempt = observation.attempt
    if attempt.status is not AttemptStatus.ACTIVE:
        return f"Its attempt is {attempt.status}."
    if not observation.is_current:
        return "Its assignment points at another attempt, or at none."
    return f"Its attempt ran out {_s(now - attempt.expires_at)} ago." if attempt.expires_at <= now else ""


def _decide(observation: Observation, *, lost: bool, overdue: bool, silent_seconds: float) -> Decision:
    seen, beat = observation.evidence.seen, observation.beat
    lives = seen in (Sight.ALIVE, Sight.STOPPED) or (beat is not None and beat.verdict is Verdict.ALIVE)
    table = (
        (lost, Decision.LOST),
        (seen in (Sight.GONE, Sight.REBOOTED), Decision.SUSPECTED_DEAD),
        (overdue and not lives, Decision.SUSPECTED_DEAD),
        (overdue, Decision.STALLED),
        (seen is Sight.STOPPED, Decision.STALLED),
        (observation.attempt.step.startswith(APPROVAL_STEP), Decision.WAITING),
        (silent_seconds > observation.tolerance_seconds, Decision.STALLED),
        (silent_seconds > QUIET_AFTER_SECONDS, Decision.QUIET),
    )
    return next((decision for fits, decision in table if fits), Decision.WORKING)


def _outlook(decision: Decision, observation: Observation) -> tuple[str, str]:
    """What happens by itself, and what a person may type."""
    attempt = observation.attempt
    cancel = f"sovereign-agent cancel {attempt.assignment_id} --by ACTOR"
    if decision is Decision.LOST:
        return "Unless it has ended, a supervisor ends it: failed, worker_lost.", "sovereign-agent supervisor --once"
    end = "its attempt runs out, and a supervisor ends it: failed, worker_lost."
    if decision is Decision.SUSPECTED_DEAD:
        return f"Unless it renews, {end}", cancel
    if observation.evidence.seen is Sight.STOPPED:
        return f"Unless it is continued in time, its program is ended with its leash, {end}", cancel
    goes_on = f"While it renews it goes on, until {attempt.deadline:%F %T} UTC at the longest; else {end}"
    return goes_on, cancel if decision is Decision.STALLED else ""


def _s(time: timedelta) -> str:
    return f"{time.total_seconds():.0f} s"
