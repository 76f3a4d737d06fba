"""Providers: outside programs that propose a report. They decide nothing, and know nothing of the ledger.

base       what goes in, what comes back, and the one table that judges it
process    the only room that starts a program
guardian   what stands between a worker and its program, so that none outlives its worker
account    as whom a program runs
stream     the testimony of a program about its run, event by event
agent      agent programs: asked what they can do, started, read; `claude`, `codex` and `cursor` say how
command    any program
scripted   fixed steps, in a real process
model      a model behind an endpoint; its loop runs in a process, too, which this package knows only by name
"""

from __future__ import annotations

from sovereign_agent.configuration import (
    AgentSettings,
    CommandSettings,
    ModelSettings,
    ProviderSettings,
    ScriptedSettings,
)
from sovereign_agent.providers.agent import AgentProvider
from sovereign_agent.providers.base import Provider
from sovereign_agent.providers.claude import CLAUDE
from sovereign_agent.providers.codex import CODEX
from sovereign_agent.providers.command import CommandProvider
from sovereign_agent.providers.cursor import CURSOR
from sovereign_agent.providers.model import ModelProvider
from sovereign_agent.providers.scripted import performer

DIALECTS = {"claude": CLAUDE, "codex": CODEX, "cursor": CURSOR}


def build(settings: ProviderSettings) -> Provider:
    """The provider that these settings describe. Nothing is started, and nothing is probed."""
    match settings:
        case CommandSettings():
            return CommandProvider(settings)
        case ScriptedSettings():
            return performer(settings)
        case AgentSettings():
            return AgentProvider(settings, DIALECTS[settings.kind])
        case ModelSettings():
            return ModelProvider(settings)
