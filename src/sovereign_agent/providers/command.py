"""The command provider: any program that reads an envelope and leaves a report.

Every provider that is a process goes through `CommandProvider.run`, so the rules of starting, ending and
judging one are the same for all. A program that cannot be started is a failed run with the cause in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import Signals

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
            )
        except ProviderFault as fault:
            return conclude(workspace, exit_code=None, seen={"provider_unavailable": str(fault)}, detail={})
        last_words = ending.stderr.last_words() or ending.stdout.last_words()
        return conclude(
            workspace, exit_code=ending.exit_code, seen=_seen(ending), said=last_words, detail=ending.detail()
        )


def _signal_name(number: int) -> str:
    return Signals(number).name if number in set(Signals) else f"signal {number}"


def _seen(ending: process.Ending) -> dict[str, str]:
    """The failure categories in how a program ended, each in a sentence."""
    if ending.ended_by == "timeout":
        return {"timeout": f"It was still running after {ending.duration_seconds:.1f} seconds and was ended."}
    if ending.signal is not None:
        return {"killed": f"It was ended from outside, by {_signal_name(ending.signal)}."}
    if ending.exit_code is None:
        return {"internal_error": "It ended, but how could not be learned: is SIGCHLD ignored in this process?"}
    return {"nonzero_exit": f"It ended with exit code {ending.exit_code}."} if ending.exit_code else {}
