"""The model provider: an agent loop over a model behind an endpoint, in a process of its own.

The program is this package's, and yet it is started, guarded, ended and judged like any other: it proposes. This room
knows it by its name alone, because a provider knows neither the mind that thinks there nor the ledger that is asked
before each of its consequential tools. The model's key is one variable of that process, and is put nowhere else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from sovereign_agent.configuration import EndpointSettings, ModelSettings
from sovereign_agent.errors import ProviderFault
from sovereign_agent.providers import process
from sovereign_agent.providers.base import PRECEDENCE, Envelope, Proposal, told
from sovereign_agent.providers.command import not_started, propose
from sovereign_agent.providers.process import Leash
from sovereign_agent.providers.stream import Event, Stream, Testimony, storable
from sovereign_agent.workspace import Workspace

PACKAGES = str(Path(__file__).parents[2])
PROGRAM = """\
import sys
sys.argv[1] in sys.path or sys.path.insert(0, sys.argv[1])
from sovereign_agent.model_program import main
main()
"""
"""It is the same package's as its worker, wherever that was found, and nothing in the run's folder takes its place."""


@dataclass(frozen=True, slots=True)
class ModelProvider:
    """Runs the model of its settings."""

    settings: ModelSettings

    def run(self, envelope: Envelope, workspace: Workspace, leash: Leash) -> Proposal:
        """Run to the end and propose; see `Provider.run`."""
        settings = self.settings
        if lacking := obstacle(settings):
            sentence = f"Its program was not started: {lacking}."
            return not_started(workspace, ProviderFault(sentence, category="provider_unavailable"))
        task = {"settings": settings.model_dump(), "envelope": envelope.model_dump()}
        for_the_ledger = [name for name in os.environ if name.startswith("PG")]
        passed = process.variables([*settings.environment, settings.key_env, *for_the_ledger])
        return propose(
            settings,
            (sys.executable, "-P", "-c", PROGRAM, PACKAGES),
            workspace,
            leash,
            stdin=json.dumps(task).encode("ascii"),
            variables=passed | told(envelope, workspace),
            stream=Stream(read_event, leash),
            model=settings.model,
        )


def is_installed() -> bool:
    """Whether there is a package to ask a model with."""
    return importlib.util.find_spec("openai") is not None


def has_key(settings: EndpointSettings) -> bool:
    """Whether the variable that holds a model's key is set here."""
    return bool(os.environ.get(settings.key_env, "").strip())


def obstacle(settings: EndpointSettings) -> str:
    """Why a model cannot be asked from here; empty when nothing is known to be in the way."""
    if not is_installed():
        return "the openai package is not installed (pip install 'sovereign-agent[live]')"
    return "" if has_key(settings) else f"the variable {settings.key_env}, which holds its key, is not set"


def read_event(event: Event, testimony: Testimony) -> bool:
    """Enter one event of the program."""
    match event:
        case {"type": "begun", "session": str(session)}:
            testimony.session = session
        case {"type": "call", "id": str(call), "tool": str(tool)}:
            testimony.start(call, tool)
        case {"type": "answer", "id": str(call)}:
            testimony.running.pop(call, None)
        case {"type": "end", "category": str(category), "text": str(text), "figures": figures}:
            testimony.terminal, testimony.text = True, "" if category else text
            testimony.measure(figures)
            if category in PRECEDENCE:
                testimony.ended[category] = storable(text)
        case _:
            return False
    return True
