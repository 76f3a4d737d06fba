"""init: an organization's folder, settings and ledger."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sovereign_agent.commands.options import HERE, Json, Root
from sovereign_agent.commands.printing import answer, entry
from sovereign_agent.errors import Refusal, SovereignError

if TYPE_CHECKING:
    from sovereign_agent.organization import Organization

Ledger = Annotated[
    str, typer.Option("--ledger", metavar="URL", help="postgresql://user@host/database instead of a SQLite file.")
]


def init(*, ledger: Ledger = "", root: Root = HERE, json: Json = False) -> None:
    """Make an organization: its folder, sovereign.toml and ledger. What is already there stays as it is."""
    from sovereign_agent.organization import Organization

    if ledger:
        _refuse_another_ledger(root, ledger)
    existing = _existing(root)
    with closing(existing or Organization.init(root, ledger_url=ledger)) as org:
        org.db.require_authority()
        place, engine, ledger = str(org.root), org.db.engine, org.settings.ledger.url or str(org.db.path)
    sentence = "Nothing was changed: there is an organization at" if existing else "An organization is ready at"
    elsewhere = "" if Path.cwd() == Path(place) else f" --root {shlex.quote(place)}"
    following = f"sovereign-agent outcome new TITLE --desired TEXT --owner principal-human{elsewhere}"
    facts = [("ledger", ledger), ("look", f"{place}/sovereign.toml"), ("next", "" if existing else following)]
    document = {"root": place, "changed": not existing, "engine": engine, "ledger": ledger}
    answer(document, entry(f"{sentence} {place}.", facts), as_json=json)


def _existing(root: Path) -> Organization | None:
    from sovereign_agent.organization import Organization

    try:
        return Organization(root, read_only=True)
    except SovereignError:
        return None  # what is wrong or missing there, making it will tell


def _refuse_another_ledger(root: Path, ledger: str) -> None:
    from sovereign_agent import configuration

    path = root / configuration.FILE_NAME
    if path.exists() and (url := configuration.load(root).ledger.url) != ledger:
        raise Refusal(
            f"The organization at {root.resolve()} was not given that ledger.",
            category="ledger_differs",
            why=f"It has {url or 'a SQLite file'} already, and init changes no settings.",
            inspect=str(path),
            next_command="choose another --root for that ledger",
        )
