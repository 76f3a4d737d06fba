"""The command provider: any program that reads an envelope and leaves a report.

Every provider that is a process goes through `CommandProvider.run`, so the rules of starting, ending and
judging one are the same for all. A program that cannot be started is a failed run with the cause in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from sovereign_agent.configuration import CommandSettings
from sovereign_agent.errors import ProviderFault
from sovereign_agent.providers import process
from sovereign_agent.providers.base import Envelope, Proposal, conclude, told
from sovereign_agent.providers.process import Leash
from sovereign_agent.workspace import Workspace


@dataclass(frozen=True, slots=True)
class CommandProvider:
    """Runs the argv of its settings, with the envelope on its stdin unless something else is given."""

    settings: CommandSettings
    stdin: bytes | None = None

    def run(self, envelope: Envelope, workspace: Workspace, leash: Leash) -> Proposal:
        """Run to the end and propose; see `Provider.run`."""
        leash.tolerance_seconds = self.settings.quiet_seconds
        try:
            ending = process.run(
                self.settings.argv,
                workspace,
                stdin=envelope.as_json() if self.stdin is None else self.stdin,
                variables=process.variables(self.settings.environment) | told(envelope, workspace),
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
