"""Operations: the assistant that serves in a torture, and the operator under whom everybody works.

The assistant is `assistant_service.serve` with a model whose every call writes a deed in the transaction
of its fence. The operator pauses and resumes, begins new epochs, restores backups, and now and then
sits on the ledger for longer than anybody waits. It may be killed at any of that; whoever is the operator next mends
first what the one before has left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sovereign_agent import assistant_service
from sovereign_agent.agent_loop import Message, Turn
from sovereign_agent.assistant_work import Claim
from sovereign_agent.database import Database, Migration, authority
from sovereign_agent.errors import Contention, LedgerUnavailable, Refusal
from sovereign_agent.llm_lab import scripted_turn
from sovereign_agent.testing.crash_points import Point
from sovereign_agent.testing.workload import PATIENCE, Life, Witness, opened
from sovereign_agent.tool_dispatch import ExecutableTool, Occasion

CLAIM_SECONDS = 0.7
STEPS = 3
"""The deeds that an item takes."""

WITHHELD_SECONDS = 1.5 * PATIENCE.total_seconds()
LONGEST_REST_SECONDS = 3.0
ROLLED_BACK = 0.3
"""How often a restore that was cut short is undone, and not finished."""

OPERATOR = "principal-human"

DEEDS = (
    Migration(
        1,
        "deeds",
        """
-- home: testing.operations
CREATE TABLE torture_deeds (seq <identity>, work_id TEXT NOT NULL, step <integer> NOT NULL) <strict>;
""",
        1,
    ),
)


class Step(BaseModel):
    """The arguments of the assistant's tool."""

    model_config = ConfigDict(extra="forbid")
    step: int


class Dogged:
    """A model that asks for each step until it is told that it was taken, one a turn, and then says that it is done."""

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Message], *, output_tokens: int, deadline: float
    ) -> Turn:
        """Ask for the first step that no answer in the transcript tells of."""
        del tools, output_tokens, deadline
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        answers = [json.loads(message["content"]) for message in messages[last:] if message["role"] == "tool"]
        taken = {answer["result"] for answer in answers if answer["ok"]}
        left = [step for step in range(STEPS) if step not in taken]
        replies = sum(message["role"] == "assistant" for message in messages)
        calls = [{"id": f"call_{replies + 1}", "name": "act", "arguments": {"step": step}} for step in left[:1]]
        return scripted_turn("" if calls else "It is done.", calls)


def assist(life: Life) -> None:
    """Serve what was asked for until the life is over."""
    dice = life.dice()

    def tools(claim: Claim) -> list[ExecutableTool]:
        def act(arguments: Step, now: Occasion) -> int:
            assert now.connection
            now.connection.execute(
                "INSERT INTO torture_deeds (work_id, step) VALUES (?, ?)", (claim.id, arguments.step)
            )
            time.sleep(dice.uniform(0, CLAIM_SECONDS / STEPS / 4))
            return arguments.step

        return [ExecutableTool("act", "Take one step.", Step, act, consequential=True, fenced=True)]

    with opened(life) as org:
        assistant_service.serve(
            org.db,
            Dogged(),
            tools,
            owner=f"assistant {os.getpid()}",
            ttl=CLAIM_SECONDS,
            until=lambda: not life.goes_on(),
            tell=lambda line: life.witness.tell("served", text=line),
        )


def operate(life: Life) -> None:
    """Do an operator's work until the life is over."""
    dice = life.dice()
    with opened(life, authority_required=False) as org:
        acts = [pause, pause, begin_epoch, withhold, *[restore] * (org.db.engine == "sqlite")]
        act = _first_act(life.doom.point)
        while life.goes_on():
            try:
                bring_to_order(org.db, rolling_back=dice.random() < ROLLED_BACK)
                if life.doom.point is None:
                    time.sleep(dice.uniform(0, LONGEST_REST_SECONDS))
                act(org.db, life.witness, dice)
                bring_to_order(org.db)
                act = dice.choice(acts)
            except (Refusal, Contention, LedgerUnavailable) as trouble:
                life.witness.tell("refusal", category=trouble.category)


def _first_act(point: Point | None) -> Callable[[Database, Witness, random.Random], None]:
    """What brings an operator to the point that it is to die at."""
    name = point.step.name if point else ""
    if name.startswith("restore."):
        return restore
    if name == "authority.new_epoch":
        return begin_epoch
    return pause if name else withhold


def bring_to_order(db: Database, *, rolling_back: bool = False) -> None:
    """End what an operator before us has left half-way, and let work go on."""
    if authority.control(db.connection).restoring:
        if rolling_back:
            assistant_service.roll_back_restore(db)
        else:
            assistant_service.finish_restore(db)
    if assistant_service.marker_state(db) != authority.control(db.connection).epoch:
        assistant_service.new_epoch(db, OPERATOR, "Ledger and marker are not of one epoch.")
    if authority.control(db.connection).paused:
        assistant_service.resume(db, OPERATOR, "Go on.")


def pause(db: Database, _witness: Witness, dice: random.Random) -> None:
    """Let nothing new begin for a moment."""
    assistant_service.pause(db, OPERATOR, "A moment, please.")
    time.sleep(dice.uniform(0, 0.2))


def begin_epoch(db: Database, witness: Witness, _dice: random.Random) -> None:
    """Take all authority from everybody."""
    witness.tell("withheld", seconds=0)
    assistant_service.new_epoch(db, OPERATOR, "A drill.")


def restore(db: Database, witness: Witness, dice: random.Random) -> None:
    """Bring the ledger back to where it was a moment ago."""
    folder = Path(tempfile.mkdtemp(prefix="backup-", dir=witness.path.parent))
    assistant_service.backup(db, folder / "ledger.db")
    time.sleep(dice.uniform(0, 0.2))
    witness.tell("withheld", seconds=1)
    assistant_service.restore(db, folder / "ledger.db", actor=OPERATOR, reason="A drill.")
    shutil.rmtree(folder)


def withhold(db: Database, witness: Witness, _dice: random.Random) -> None:
    """Hold the ledger's lock for longer than anybody waits for it."""
    with db.immediate():
        witness.tell("withheld", seconds=WITHHELD_SECONDS)
        time.sleep(WITHHELD_SECONDS)
