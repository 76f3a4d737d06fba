"""What the demos stand on: a folder, a story told with its seconds, real processes of this program, and patience."""

from __future__ import annotations

import json as json_text
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sovereign_agent.clock import monotonic
from sovereign_agent.errors import SovereignError

T = TypeVar("T")

DEADLINE_SECONDS = 60.0
"""No scene may take longer: a demo that hangs shows nothing."""


@dataclass
class Story:
    """What a reader sees: lines, each with the seconds since the beginning."""

    console: Console
    started: float = field(default_factory=monotonic)

    def scene(self, text: str) -> None:
        """Begin a scene."""
        self.console.print()
        self.say(text)

    def say(self, text: str) -> None:
        """One line more."""
        line = Table.grid(padding=(0, 2))
        line.add_row(f"[dim]{monotonic() - self.started:5.1f} s[/dim]", escape(text))
        self.console.print(line)


def perform(
    play: Callable[[Path, Story], dict[str, Any]],
    as_promised: Callable[[dict[str, Any]], bool],
    *,
    json: bool,
    root: Path | None,
) -> int:
    """Play a demo and print it. Returns 0 when everything promised was seen, else 1.

    Args:
        play: plays it in a folder, and returns what was seen.
        as_promised: whether that is what the demo is to show.
        json: print what was seen as one JSON document at the end, instead of the story.
        root: where the demo's organization is made, and kept; a temporary folder, removed, when None.
    """
    folder = root or Path(tempfile.mkdtemp(prefix="sovereign-demo-"))
    try:
        seen = play(folder, Story(Console(quiet=json, highlight=False)))
    finally:
        if root is None:
            shutil.rmtree(folder, ignore_errors=True)
    if json:
        sys.stdout.write(json_text.dumps(seen, indent=2) + "\n")
    return 0 if as_promised(seen) else 1


def start(
    folder: Path,
    *arguments: str,
    module: str = "sovereign_agent",
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int | TextIO = subprocess.DEVNULL,
) -> subprocess.Popen[str]:
    """Start this program as another process, the way a person would."""
    return subprocess.Popen(  # noqa: S603 - this interpreter, and arguments of our own
        [sys.executable, "-m", module, *arguments, "--root", str(folder)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env={**os.environ, "SOVEREIGN_ROOT": str(folder)},
    )


def eventually(condition: Callable[[], T], what: str) -> T:
    """Wait until `condition` holds, and return what it answered. Raises SovereignError (``demo_deadline``)."""
    deadline = monotonic() + DEADLINE_SECONDS
    while not (answer := condition()):
        if monotonic() > deadline:
            raise SovereignError(
                f"The demo waited {DEADLINE_SECONDS:g} s for {what}.",
                category="demo_deadline",
                why="Nothing of it takes so long, unless the machine is very busy.",
                next_command="play it again",
            )
        time.sleep(0.02)
    return answer
