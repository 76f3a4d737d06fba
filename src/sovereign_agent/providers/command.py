"""The command provider: any program that reads an envelope and leaves a report.

Every provider that is a process goes through `CommandProvider.run`, so the rules of starting, ending and
judging one are the same for all. A program that cannot be started is a failed run with the cause in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from sovereign_agent.configuration import CommandSettings
from sovereign_agent.errors import ProviderFault
from sovereign_agent.providers import process
from sovereign_agent.providers.base import Envelope, Proposal, conclude
from sovereign_agent.providers.process import Leash
from sovereign_agent.workspace import Workspace


@dataclass(frozen=True, slots=True)
class CommandProvider:
    """Runs the argv of its settings."""

    settings: CommandSettings

    def run(self, envelope: Envelope, workspace: Workspace, leash: Leash, *, stdin: bytes | None = None) -> Proposal:
        """Run to the end and propose; see `Provider.run`. `stdin` is the envelope unless it is given."""
        told = {
            "SOVEREIGN_ASSIGNMENT": envelope.assignment_id,
            "SOVEREIGN_ATTEMPT": envelope.attempt_id,
            "SOVEREIGN_OUT": str(workspace.out),
        }
        try:
            ending = process.run(
                self.settings.argv,
                workspace,
                stdin=envelope.as_json() if stdin is None else stdin,
                variables=process.variables(self.settings.environment) | told,
                timeout_seconds=self.settings.timeout_seconds,
                grace_seconds=self.settings.grace_seconds,
                leash=leash,
                run_as=self.settings.run_as,
            )
        except ProviderFault as fault:
            return conclude(workspace, exit_code=None, seen={fault.category: str(fault)}, detail={})
        return conclude(
            workspace,
            exit_code=ending.verdict_code,
            seen=process.seen(ending),
            said=ending.stderr.last_words() or ending.stdout.last_words(),
            detail=ending.detail(),
        )
