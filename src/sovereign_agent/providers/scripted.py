"""The scripted provider: fixed steps, performed in a real process.

It stands in for an agent program where none is wanted: in a first run, in the course, in tests. What it does
is real all the same: a process, files, signals, exit codes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sovereign_agent.configuration import CommandSettings, ScriptedSettings
from sovereign_agent.providers.command import CommandProvider

PROGRAM = Path(__file__).with_name("scripted_program.py")
GRACE_SECONDS = 1.0


def performer(settings: ScriptedSettings) -> CommandProvider:
    """The command that performs the steps of its settings, in order."""
    program = CommandSettings(
        kind="command",
        argv=(sys.executable, "-I", "-S", str(PROGRAM)),
        timeout_seconds=settings.timeout_seconds,
        grace_seconds=GRACE_SECONDS,
    )
    steps = [step.model_dump(exclude_none=True) for step in settings.steps]
    return CommandProvider(program, stdin=json.dumps({"steps": steps}).encode("ascii"))
