"""The scripted provider: fixed steps, performed in a real process.

It stands in for an agent program where none is wanted: in a first run, in the course, in tests. What it does
is real all the same: a process, files, signals, exit codes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from sovereign_agent.configuration import CommandSettings, ScriptedSettings
from sovereign_agent.providers.base import Envelope, Proposal
from sovereign_agent.providers.command import CommandProvider
from sovereign_agent.providers.process import Leash
from sovereign_agent.workspace import Workspace

PROGRAM = Path(__file__).with_name("scripted_program.py")
GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ScriptedProvider:
    """Performs the steps of its settings, in order."""

    settings: ScriptedSettings

    def run(self, envelope: Envelope, workspace: Workspace, leash: Leash) -> Proposal:
        """Run to the end and propose; see `Provider.run`."""
        steps = [step.model_dump(exclude_none=True) for step in self.settings.steps]
        program = CommandSettings(
            kind="command",
            argv=(sys.executable, "-I", "-S", str(PROGRAM)),
            timeout_seconds=self.settings.timeout_seconds,
            grace_seconds=GRACE_SECONDS,
        )
        stdin = json.dumps({"envelope": envelope.model_dump(), "steps": steps}).encode("ascii")
        return CommandProvider(program).run(envelope, workspace, leash, stdin=stdin)
