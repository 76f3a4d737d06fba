"""What `doctor` looks at. It reports and mends nothing, and a ledger that is missing or broken is a finding, too."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

import psutil

from sovereign_agent import assistant_service, configuration, fencing, heartbeat, liveness, outcomes, relay, runs
from sovereign_agent.assistant_service import end_of_time
from sovereign_agent.commands import effects
from sovereign_agent.commands.authority import pause_facts, paused_by
from sovereign_agent.commands.printing import plain
from sovereign_agent.configuration import (
    AgentSettings,
    CommandSettings,
    EndpointSettings,
    ModelSettings,
    ProviderSettings,
    ScriptedSettings,
    Settings,
)
from sovereign_agent.database import authority, driver_versions
from sovereign_agent.effects import LIST
from sovereign_agent.errors import ConfigurationFault, ProviderFault, SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.providers import account, model
from sovereign_agent.records import STUCK_SOW_STATES, SowState

WAL_WARNING_BYTES = 64 * 2**20
LOOKED_AT = 10_000
"""How many leases, attempts, claims and folders are looked at, each."""
WORKERS_JUDGED = 200
"""How many running attempts are judged, those that run out first."""
OUTCOMES_LOOKED_AT = 100
"""How many open outcomes are searched for parked work, the oldest."""
HEALTHY = (liveness.Decision.WORKING, liveness.Decision.QUIET)
RECONCILE = "sovereign-agent supervisor --once"
RUN_FOLDER = Path(".sovereign", "runs", "any")
BLIND = "a rollback of the whole disk cannot be seen while the marker is on it ([authority] marker moves it)"
UNUSABLE = {"settings": 2, "ledger": 4, "authority": 4}
"""The exit code of a failed finding; no other ends in one."""


class Verdict(StrEnum):
    """How a finding looks to its reader."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `mend` says what to do about it, unless it is ok."""

    subject: str
    verdict: Verdict
    found: str
    mend: str = ""


def check_up(root: Path) -> list[Finding]:
    """Look at everything that can be looked at, in the order in which one thing rests on another."""
    findings = [Finding(name, Verdict.OK, version) for name, version in _versions()]
    try:
        settings = configuration.load(root)
        findings.append(Finding("settings", Verdict.OK, str(root.resolve() / configuration.FILE_NAME)))
        findings += _providers(root, settings)
        if settings.assistant.model:
            findings.append(_model("assistant", "", settings.assistant))
        with closing(Organization(root, read_only=True)) as org:
            findings += _ledger(org)
    except SovereignError as error:
        subject = "settings" if isinstance(error, ConfigurationFault) else "ledger"
        told = " ".join([error.happened, error.why, f"See {error.inspect}." if error.inspect else ""]).strip()
        findings.append(Finding(subject, Verdict.FAIL, told, error.next_command))
    return findings


def exit_code(findings: list[Finding]) -> int:
    """0 unless the settings or the ledger cannot be used."""
    failed = [UNUSABLE[finding.subject] for finding in findings if finding.verdict is Verdict.FAIL]
    return min(failed, default=0)


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield from driver_versions().items()


def _providers(root: Path, settings: Settings) -> Iterator[Finding]:
    """Whether the program of each provider is there, as a run would look for it, and so is the user it runs as."""
    for name, provider in settings.providers.items():
        if isinstance(provider, ModelSettings):
            yield _model("provider", f"{name}: ", provider)
            continue
        program = _program(provider)
        place = os.path.normpath(root.resolve() / RUN_FOLDER / program) if "/" in program else program
        found = shutil.which(place)
        if not found:
            mend = f"install it, or correct [providers.{name}] in sovereign.toml"
            yield Finding("provider", Verdict.WARN, f"{name}: no program {program} can be run", mend)
        elif fault := _no_account(provider):
            yield Finding("provider", Verdict.WARN, f"{name}: {fault}", fault.next_command)
        else:
            yield Finding("provider", Verdict.OK, f"{name}: {found}")


def _model(subject: str, whose: str, endpoint: EndpointSettings) -> Finding:
    """Whether a model could be asked. The endpoint is not, and the key is not shown."""
    said = {True: "yes", False: "no"}
    installed, is_set = model.is_installed(), model.has_key(endpoint)
    told = f"{whose}openai package installed: {said[installed]}, {endpoint.key_env} set: {said[is_set]}"
    if lacking := model.obstacle(endpoint):
        return Finding(subject, Verdict.WARN, told, f"before a run: {lacking}")
    return Finding(subject, Verdict.OK, told)


def _no_account(provider: ProviderSettings) -> ProviderFault | None:
    """Why this process could not run a provider's program as the user that it asks for."""
    if isinstance(provider, ScriptedSettings) or not provider.run_as:
        return None
    try:
        account.find(provider.run_as)
    except ProviderFault as fault:
        return fault
    return None


def _program(provider: ProviderSettings) -> str:
    match provider:
        case CommandSettings():
            return provider.argv[0]
        case AgentSettings():
            return provider.executable
        case ScriptedSettings() | ModelSettings():
            return sys.executable


@dataclass(frozen=True, slots=True)
class _Held:
    """Authority that somebody holds, or held until it ran out; `ttl` is how long it usually lasts."""

    name: str
    expires_at: datetime
    ttl: timedelta


def _ledger(org: Organization) -> Iterator[Finding]:
    place = org.settings.ledger.url or str(org.db.path)
    yield Finding("ledger", Verdict.OK, f"{org.db.engine}, {place}: reachable, schema up to date")
    if org.db.engine == "sqlite":
        yield _file_system(org.db.path)
        yield _wal(org.db.path)
    yield _authority(org)
    yield from _services(org)
    now = org.db.now()
    held = {"leases": _leases(org), "attempts": _attempts(org), "claims": _claims(org)}
    for kind, those in held.items():
        run_out = [one.name for one in those if one.expires_at <= now]
        told = f"{len(those)}, {len(run_out)} of them run out"
        harmless = kind == "leases" or not run_out  # a lease that has run out is free to take, and nothing waits for it
        yield Finding(kind, Verdict.OK, told) if harmless else Finding(kind, Verdict.WARN, told, RECONCILE)
    yield from _workers(org, now)
    yield from _parked(org)
    yield from _effects(org)
    yield _clock([one for those in held.values() for one in those if one.expires_at > now + 2 * one.ttl])
    yield from _workspaces(org)


def _workers(org: Organization, now: datetime) -> Iterator[Finding]:
    """Every worker about which something is odd."""
    for attempt in fencing.expired_execution_attempts(org.db, end_of_time, limit=WORKERS_JUDGED):
        told = liveness.assess(liveness.observe(org, attempt), now)
        if told.decision not in HEALTHY:
            found = f"{attempt.assignment_id} is {told.decision}: {' '.join(told.reasons)}"
            yield Finding(
                "worker", Verdict.WARN, found, told.next or f"sovereign-agent inspect {attempt.assignment_id}"
            )


def _parked(org: Organization) -> Iterator[Finding]:
    """The work that nobody may be given before somebody has ruled on it, if there is any."""
    connection = org.db.connection
    parked = [
        sow.id
        for outcome in outcomes.open_outcomes(connection, limit=OUTCOMES_LOOKED_AT)
        for sow in outcomes.sows_of(connection, outcome.id)
        if sow.state in STUCK_SOW_STATES and runs.losses_that_park(connection, sow.id, org.settings.authority)
    ]
    if parked:
        found = f"{len(parked)} waiting for a ruling, after the loss of too many workers: {', '.join(parked[:5])}"
        yield Finding("parked", Verdict.WARN, found, outcomes.next_command(parked[0], SowState.BLOCKED))


def _effects(org: Organization) -> Iterator[Finding]:
    """The acts that left the house and wait for a person's word, if there are any."""
    if found := effects.waiting_text(effects.waiting(org.db.connection)):
        yield Finding("effects", Verdict.WARN, found, LIST)


def _workspaces(org: Organization) -> Iterator[Finding]:
    """The folders of ended runs. Those on another host are a fact here, and work for a supervisor there."""
    here = socket.gethostname()
    left = Counter(
        host or here for *_, host in fencing.attempts_to_reclaim(org.db.connection, after="", limit=LOOKED_AT)
    )
    told = f"{left[here]} still to be dealt with"
    yield (
        Finding("workspaces", Verdict.WARN, told, RECONCILE) if left[here] else Finding("workspaces", Verdict.OK, told)
    )
    for host, number in sorted(left.items()):
        if host != here:
            yield Finding("workspaces", Verdict.OK, f"{number} left to a supervisor on {host}")


def _authority(org: Organization) -> Finding:
    health = assistant_service.health(org.db)
    if health.restoring:
        return Finding("authority", Verdict.FAIL, f"{health.restoring} was not finished", authority.UNFINISHED)
    if not health.agrees:
        told = f"the ledger is in {health.epoch}; the marker {org.db.authority}: {health.marker}"
        return Finding("authority", Verdict.FAIL, told, org.db.authority_mend)
    if health.paused:
        since = "".join(f"; {label} {plain(fact)}" for label, fact in pause_facts(paused_by(org.db.connection)))
        return Finding("authority", Verdict.WARN, f"{health.epoch}, paused{since}", authority.RESUME)
    beside = org.db.engine == "sqlite" and org.db.authority.is_relative_to(org.root)
    return Finding("authority", Verdict.OK, f"{health.epoch}{'; ' + BLIND if beside else ''}")


def _services(org: Organization) -> Iterator[Finding]:
    """What runs beside the ledger, and what was killed and has not been started again."""
    running = heartbeat.services(org.db.connection)
    if not running:
        yield Finding("services", Verdict.OK, "no supervisor and no assistant says that it runs")
    for one in running:
        told = f"{one.kind}, process {one.pid} on {one.host}, last heard of at {plain(one.last_poll)}"
        if one.verdict is heartbeat.Verdict.ALIVE:
            yield Finding("services", Verdict.OK, told)
        else:
            mend = "start it again, if it is wanted; what a killed one has left goes by itself, after a day"
            yield Finding("services", Verdict.WARN, told, mend)


def _file_system(path: Path) -> Finding:
    """By the longest mount point above the ledger. Where SQLite cannot work, the ledger refused to open already."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
    if kind:
        return Finding("file system", Verdict.OK, kind)
    return Finding("file system", Verdict.WARN, "of an unknown type", "make sure that it is a local disk")


def _wal(path: Path) -> Finding:
    try:
        size = path.with_name(path.name + "-wal").stat().st_size
    except FileNotFoundError:
        size = 0
    told = f"{size / 2**20:.1f} MiB"
    if size <= WAL_WARNING_BYTES:
        return Finding("wal", Verdict.OK, told)
    return Finding("wal", Verdict.WARN, told, "end the process that has kept a read open; the next writes shorten it")


def _clock(far_ahead: list[_Held]) -> Finding:
    if not far_ahead:
        return Finding("clock", Verdict.OK, "nothing is held for longer than can be meant")
    told = ", ".join(f"{one.name} until {plain(one.expires_at)}" for one in far_ahead[:5])
    mend = "if the clock was set back, set it right, or revoke: sovereign-agent cancel ASSIGNMENT, or actor free ACTOR"
    return Finding("clock", Verdict.WARN, f"{len(far_ahead)} held implausibly far ahead: {told}", mend)


def _leases(org: Organization) -> list[_Held]:
    ttl = max(org.settings.authority.lease_ttl, fencing.ACTOR_LEASE_TTL)  # who uses the library may take the latter
    leases = fencing.expired_actor_leases(org.db, end_of_time, limit=LOOKED_AT)  # by then every one has run out
    return [_Held(lease.actor_id, lease.expires_at, ttl) for lease in leases]


def _attempts(org: Organization) -> list[_Held]:
    ttl = max(org.settings.authority.attempt_ttl, fencing.EXECUTION_ATTEMPT_TTL)
    attempts = fencing.expired_execution_attempts(org.db, end_of_time, limit=LOOKED_AT)
    return [_Held(attempt.assignment_id, attempt.expires_at, ttl) for attempt in attempts]


def _claims(org: Organization) -> list[_Held]:
    claims = relay.current_claims(org.db.connection, limit=LOOKED_AT)
    return [_Held(claim.id, claim.claim_expires_at, relay.CLAIM_TTL) for claim in claims if claim.claim_expires_at]
