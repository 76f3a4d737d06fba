"""What a person sees while a run goes on: the time that has passed, and the attempt that holds the assignment."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from sovereign_agent import outcomes
from sovereign_agent.clock import monotonic
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization

LOOKS_PER_SECOND = 8


@contextmanager
def waiting(org: Organization, assignment_id: str) -> Generator[None]:
    """Show on stderr that an assignment runs, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    spinner = Spinner("dots", text=_Elapsed(org, assignment_id))
    with Live(spinner, console=console, transient=True, refresh_per_second=LOOKS_PER_SECOND):
        yield


@dataclass
class _Elapsed:
    """Asked for its text whenever it is shown, by a thread that has a session of the ledger of its own."""

    org: Organization
    assignment_id: str
    attempt: str | None = None
    started: float = field(default_factory=monotonic)

    def __rich__(self) -> Text:
        elapsed = timedelta(seconds=int(monotonic() - self.started))
        return Text(f"{elapsed}  {self._known_attempt() or 'starting'}")

    def _known_attempt(self) -> str | None:
        if not self.attempt:
            try:
                assignment = outcomes.get_assignment(self.org.db.connection, self.assignment_id)
                self.attempt = assignment.current_execution_attempt
            except SovereignError:
                return None  # the run itself will say what is wrong
        return self.attempt
