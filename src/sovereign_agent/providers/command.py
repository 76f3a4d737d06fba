"""The command provider: any program that reads an envelope and leaves a report.

Every provider's program goes through `propose`, so the rules of starting, ending and judging one are the same for
all. A program that cannot be started is a failed run with the cause in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sovereign_agent.configuration import AgentSettings, CommandSettings, ModelSettings
from sovereign_agent.errors import ProviderFault
from sovereign_agent.providers import process
from sovereign_agent.providers.base import Envelope, Proposal, conclude, told
from sovereign_agent.providers.process import Leash
from sovereign_agent.providers.stream import Stream
from sovereign_agent.workspace import Workspace


@dataclass(frozen=True, slots=True)
class CommandProvider:
    """Runs the argv of its settings, with the envelope on its stdin unless something else is given."""

    settings: CommandSettings
    stdin: bytes | None = None

    def run(self, envelope: Envelope, workspace: Workspace, leash: Leash) -> Proposal:
        """Run to the end and propose; see `Provider.run`."""
        stdin = envelope.as_json() if self.stdin is None else self.stdin
        variables = process.variables(self.settings.environment) | told(envelope, workspace)
        return propose(self.settings, self.settings.argv, workspace, leash, stdin=stdin, variables=variables)


def propose(
    settings: CommandSettings | AgentSettings | ModelSettings,
    argv: Sequence[str],
    workspace: Workspace,
    leash: Leash,
    *,
    stdin: bytes,
    variables: Mapping[str, str],
    stream: Stream | None = None,
    **detail: Any,
) -> Proposal:
    """Run a provider's program until it ends, or has to, and judge how it ended.

    Its stdout is read as a `stream` where one is given. `detail` goes with the figures of the run.
    """
    leash.tolerance_seconds = settings.quiet_seconds
    try:
        ending = process.run(
            argv,
            workspace,
            stdin=stdin,
            variables=variables,
            timeout_seconds=settings.timeout_seconds,
            grace_seconds=settings.grace_seconds,
            leash=leash,
            reader=stream,
            idle_seconds=settings.idle_seconds if isinstance(settings, AgentSettings) else process.NEVER,
            run_as=settings.run_as,
        )
    except ProviderFault as fault:
        return not_started(workspace, fault)
    seen, said, figures = process.seen(ending), ending.stderr.last_words(), ending.detail()
    if stream:
        if ending.ended_by != "after_result":  # else it was our hand that cut its last line
            stream.close()
        seen, said = stream.seen() | seen, stream.testimony.words() or said
        figures |= stream.testimony.detail()
    else:
        said = said or ending.stdout.last_words()
    return conclude(workspace, exit_code=ending.verdict_code, seen=seen, said=said, detail=figures | detail)


def not_started(workspace: Workspace, fault: ProviderFault) -> Proposal:
    """The failed run of a program that was not started."""
    return conclude(workspace, exit_code=None, seen={fault.category: str(fault)}, detail={})
