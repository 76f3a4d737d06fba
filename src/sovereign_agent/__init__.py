"""Runs AI-agent workers that may be killed at any instant, and keeps a record that never lies about them.

    from sovereign_agent import Organization

    org = Organization("my-organization")        # made by `sovereign-agent init`
    receipt = org.run_assignment("asg_...")

The map of the house; whatever stands lower never imports what stands higher:

    faces        cli, commands/   the command line; no rule lives there
    reconciler   supervisor       ends what a dead worker left behind, and never guesses
    service      organization     who may do what, and the run of an assignment
                 liveness         what can be said about a worker that is silent
                 runs             what a process holds while it runs one, and how a run ends
                 verdicts         what is found when the house looks for itself
    homes        effects          what left the house, and what nobody may send again
                 assistant_work   the assistant's queue: claims under an epoch, and their transcript
                 relay            the actors' mailbox
                 fencing          actor leases and execution attempts: who may act right now
                 outcomes         outcomes, statements of work, assignments, and what is said about them
                 journal          events and receipts, which only grow
                 heartbeat        that a process reached the ledger, and when
    hands        providers/       outside programs: they propose, and decide nothing
                 workspace        the folder of one run
                 boundary         what its program must leave as it is
    mind         llm_lab          the models: recorded turns, or a live endpoint
                 agent_loop       lets a model work, bounded in every direction
                 tool_dispatch    allow-list, schema, gate and handler, in that order
    ledger       database         the one door to SQLite and PostgreSQL; storage/ speaks to the drivers
    words        configuration    sovereign.toml, checked
                 records          frozen records, their states, the moves each state allows
                 errors           every exception, and what each one asks of you
                 clock            the only reader of time

Start reading with `errors` and `records`, then `fencing`: the rest follows from them. The names below are
found at their first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sovereign_agent.clock import Clock, ManualClock
    from sovereign_agent.database import Connection, Database, Migration
    from sovereign_agent.errors import (
        AlreadyHeld,
        AuthorityLost,
        ConfigurationFault,
        Contention,
        IllegalMove,
        LedgerFault,
        PolicyRefusal,
        ProviderFault,
        Refusal,
        SovereignError,
    )
    from sovereign_agent.organization import Organization
    from sovereign_agent.records import Assignment, Event, Message, Outcome, Receipt, Role, Sow, Verdict
    from sovereign_agent.supervisor import SupervisorReport, tick

__all__ = [
    "AlreadyHeld",
    "Assignment",
    "AuthorityLost",
    "Clock",
    "ConfigurationFault",
    "Connection",
    "Contention",
    "Database",
    "Event",
    "IllegalMove",
    "LedgerFault",
    "ManualClock",
    "Message",
    "Migration",
    "Organization",
    "Outcome",
    "PolicyRefusal",
    "ProviderFault",
    "Receipt",
    "Refusal",
    "Role",
    "SovereignError",
    "Sow",
    "SupervisorReport",
    "Verdict",
    "__version__",
    "tick",
]

__version__ = "0.1.0"

_ROOMS = ("errors", "clock", "records", "database", "organization", "supervisor")


def __getattr__(name: str) -> Any:
    from importlib import import_module  # noqa: PLC0415 - only whoever asks for a name pays for it

    for room in _ROOMS if name in __all__ else ():
        module = import_module(f"{__name__}.{room}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
