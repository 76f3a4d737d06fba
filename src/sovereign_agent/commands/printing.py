"""How an answer looks: one JSON document, or lines for a person.

A person's lines are a sentence, and below it a label and a text each: the form in which a refusal meets them too.
Every text from outside is escaped here, so that none can move the cursor, forge a line or colour itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

Facts = Iterable[tuple[str, object]]

COMMAND = "sovereign-agent "
asked_root = ""
"""The --root that was typed, if one was: whatever is to be typed next needs it too."""


def answer(document: Any, text: str, *, as_json: bool) -> None:
    """Print what a verb found out or did: `document` for programs, `text` for people."""
    typer.echo(to_json(document) if as_json else text)


def entry(sentence: str, facts: Facts = (), *, indent: int = 0) -> str:
    """A sentence, and below it each fact that is not empty, behind its label."""
    told = [(label, plain(_typeable(fact))) for label, fact in facts if fact not in (None, "", ())]
    width = max([6, *(len(label) for label, _ in told)])
    lines = [plain(sentence), *(f"  {label:<{width}} {fact}" for label, fact in told)]
    return "\n".join(" " * indent + line for line in lines)


def tally(counts: dict[str, int], most: int) -> str:
    """``2 running, 0 ready``; a number that was counted no further than `most` has a plus."""
    return ", ".join(f"{number}{'+' if number == most else ''} {kind}" for kind, number in counts.items())


def counted(number: int, one: str, several: str) -> str:
    """``1 promise``, ``2 promises``."""
    return f"{number} {one if number == 1 else several}"


def _typeable(fact: object) -> object:
    """A command of ours that was made for this --root, with it; anything else as it is."""
    if asked_root and isinstance(fact, str) and fact.startswith(COMMAND) and "--root" not in fact:
        return f"{fact} --root {shlex.quote(asked_root)}"
    return fact


def plain(value: object) -> str:
    """The text of a value, with each character that a terminal would obey, or not show, as its escape."""
    text = f"{value:%Y-%m-%d %H:%M:%S} UTC" if isinstance(value, datetime) else str(value)
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])


def to_json(document: Any, *, indent: int | None = 2) -> str:
    """JSON in ASCII, which every locale can carry. Records become objects, moments ISO 8601."""
    return json.dumps(document, indent=indent, default=_as_json)


def _as_json(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
