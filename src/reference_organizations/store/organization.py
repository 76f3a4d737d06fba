"""The shop as an organization: its `sovereign.toml`, its ledger and its first stock, in a folder.

A folder that belongs to somebody else is left alone: settings that people have written are never replaced.
Making a shop is safe to repeat, also after a process died in the middle of it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from reference_organizations.store import stock
from sovereign_agent import configuration
from sovereign_agent.clock import Clock
from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.errors import ConfigurationFault
from sovereign_agent.organization import Organization

PRINCIPAL = "principal-human"
PLANNER = "master-course"
OPERATOR = "operator-course"
REVIEWER = "sparring-course"
VERIFIER = "verifier-course"
CHECKS = ("inventory_at_or_above_reorder_point", "cash_reconciles", "replenishment_event_exists")


def make_store(root: Path | str, *, ledger_url: str = "", clock: Clock | None = None) -> Organization:
    """Open Lucy's shop in `root`, and make whatever of it is not there yet.

    Raises ConfigurationFault (``not_a_store``) when another organization lives there, or for a root that is no
    folder; else as `Organization`.
    """
    folder = Path(root).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationFault(
            f"{folder} cannot hold a shop.",
            category="configuration",
            why=f"A folder is needed there, and none could be made ({error.strerror}).",
            next_command="choose another --root",
        ) from None
    _write_settings(folder, ledger_url)
    organization = Organization.init(folder, clock=clock)
    try:
        stock.seed(organization.db)
    except BaseException:
        organization.close()
        raise
    return organization


def _write_settings(folder: Path, ledger_url: str) -> None:
    """Write the shop's settings where there are none, or only those that `init` left and nobody has touched."""
    with suppress(FileNotFoundError):
        if (folder / FILE_NAME).read_bytes() != configuration.default_text().encode():
            _require_store(folder)
            return
    text = Path(__file__).with_name("store.toml").read_text(encoding="utf-8")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        settings = text.replace('url = ""', f"url = {json.dumps(ledger_url)}", 1)
        configuration.replace_file(descriptor, FILE_NAME, settings.encode(), mode=0o644)
    finally:
        os.close(descriptor)


def _require_store(folder: Path) -> None:
    settings = configuration.load(folder)
    if "store" not in settings.extensions or not settings.checks.keys() >= set(CHECKS):
        raise ConfigurationFault(
            f"{folder} holds another organization.",
            category="not_a_store",
            why=f"Its {FILE_NAME} names neither the shop's tables nor its checks, and it is not overwritten.",
            inspect=str(folder / FILE_NAME),
            next_command="choose another --root",
        )
