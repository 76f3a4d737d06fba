"""Providers: outside programs that propose a report. They decide nothing, and know nothing of the ledger.

    base       what goes in, what comes back, and the one table that judges it
    process    the only room that starts a program
    command    any program
    scripted   fixed steps, in a real process

A kind of provider is loaded when one is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sovereign_agent.configuration import CommandSettings, ProviderSettings

if TYPE_CHECKING:
    from sovereign_agent.providers.base import Provider


def build(settings: ProviderSettings) -> Provider:
    """The provider that these settings describe. Nothing is started, and nothing is probed."""
    if isinstance(settings, CommandSettings):
        from sovereign_agent.providers.command import CommandProvider  # noqa: PLC0415

        return CommandProvider(settings)
    from sovereign_agent.providers.scripted import ScriptedProvider  # noqa: PLC0415

    return ScriptedProvider(settings)
