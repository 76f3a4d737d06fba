"""Liveness: what can be seen of a worker's process from here. Evidence, never authority."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CGROUP = Path("/proc/self/cgroup")


class Sight(StrEnum):
    """What is seen of a process from here."""

    ALIVE = "alive"
    STOPPED = "stopped"
    UNKNOWN = "unknown"
    ELSEWHERE = "elsewhere"
    GONE = "gone"
    REBOOTED = "rebooted"


@dataclass(frozen=True, slots=True)
class Evidence:
    """`oom_kills`: how many processes of its memory cgroup the kernel has killed since the record was made."""

    seen: Sight
    oom_kills: int = 0


def this_process() -> dict[str, Any]:
    """Where and what this process is, for `look` to compare with later. Times are epoch seconds."""
    me = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": me.pid,
        "started": me.create_time(),
        "boot_id": BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
        "oom_kills": _oom_kills(),
    }


def look(process: Mapping[str, Any]) -> Evidence:
    """What can be said from here about the process that a record names."""
    here = this_process()
    if process.get("host") != here["host"]:
        return Evidence(Sight.ELSEWHERE)
    if process.get("boot_id") != here["boot_id"]:
        return Evidence(Sight.REBOOTED)
    kills = (here["oom_kills"] or 0) - (process.get("oom_kills") or 0)
    try:
        there = psutil.Process(process["pid"])
        if abs(there.create_time() - process["started"]) < 1 and there.status() != psutil.STATUS_ZOMBIE:
            return Evidence(Sight.STOPPED if there.status() == psutil.STATUS_STOPPED else Sight.ALIVE, kills)
    except psutil.NoSuchProcess:
        pass
    return Evidence(Sight.GONE, kills)


def _oom_kills() -> int | None:
    try:
        group = CGROUP.read_text().strip().rpartition(":")[2].lstrip("/")
        events = (Path("/sys/fs/cgroup") / group / "memory.events").read_text()
    except OSError:
        return None
    return int(dict(line.split() for line in events.splitlines()).get("oom_kill", "0"))
