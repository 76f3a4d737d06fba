"""A worker of `sovereign-agent demo restore`, from outside and from inside: a process that does as it is told.

It takes a work item and a message, each for an hour, and keeps its session and its claims whatever becomes of the
ledger. A line on its stdin names an act, a line on its stdout is what came of it. It never claims again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sovereign_agent import assistant_service, assistant_work, relay
from sovereign_agent.assistant_work import Claim
from sovereign_agent.commands.printing import to_json
from sovereign_agent.database import Database
from sovereign_agent.errors import AuthorityLost, SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.records import Message

HOUR = timedelta(hours=1)
ACTOR = "operator-course"
FINDINGS = ("Vanilla is at 2 tubs; 6 needed.", "Strawberry is at 1 tub; 4 needed.")


@dataclass(frozen=True)
class Worker:
    """The process from outside."""

    process: subprocess.Popen[str]

    def tell(self, act: str) -> Any:
        """Let it ``look``, ``record`` its two findings, or ``settle`` message and item; return what came of it."""
        assert self.process.stdin
        self.process.stdin.write(f"{act}\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        """Its next answer. Raises SovereignError when it has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SovereignError("A worker of the demo ended too early.", category="demo_worker_gone")
        return json.loads(line)


def main(owner: str, folder: Path) -> None:
    """The process from inside."""
    with closing(Organization(folder)) as org:
        db = org.db
        claim = assistant_work.claim(db, owner, ttl=HOUR.total_seconds())
        message = relay.claim(db, relay.inbox(db, ACTOR)[0].id, ACTOR, ttl=HOUR)
        assert claim
        until = assistant_work.get_work(db.connection, claim.id)["expires_at"] / 1_000_000
        acts: dict[str, Callable[[], Any]] = {
            "look": lambda: _look(db, claim, until),
            "record": lambda: [
                _refusal(partial(assistant_work.observe, db, claim, {"text": each})) for each in FINDINGS
            ],
            "settle": lambda: _settle(db, claim, message),
        }
        _say("ready")
        for line in sys.stdin:
            _say(acts[line.strip()]())


def _look(db: Database, claim: Claim, until: float) -> dict[str, Any]:
    now, item = assistant_service.health(db), assistant_work.get_work(db.connection, claim.id)
    return {
        "paused": now.paused,
        "epoch_is_current": claim.epoch == now.epoch,
        "held_generation": claim.generation,
        "work": {name: item[name] for name in ("generation", "owner", "status")},
        "rows_written": len(assistant_work.transcript(db.connection, claim.id)),
        "seconds_left": until - db.now().timestamp(),
    }


def _settle(db: Database, claim: Claim, message: Message) -> dict[str, Any]:
    token = message.fencing_token or 0
    return {
        "message": _refusal(lambda: relay.complete(db, message.id, ACTOR, fencing_token=token)),
        "work": _refusal(lambda: assistant_work.finish(db, claim, "DONE", "The freezer is looked through.")),
    }


def _refusal(act: Callable[[], object]) -> dict[str, str] | None:
    """What the house says to an act; None when it is done."""
    try:
        act()
    except AuthorityLost as error:
        return {"category": error.category, "sentence": str(error)}
    return None


def _say(answer: Any) -> None:
    sys.stdout.write(to_json(answer, indent=None) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[3]))
