"""The mind: what a turn of the loop, a call through the dispatcher and a fenced write cost beyond what they are for.

A turn is one reply with one call and its answer, over a model that answers at once. A fenced write is compared with
the same statements in a raw transaction: the claim's row and the marker are read, the shop's row and the transcript's
line are written.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import raw
from pydantic import BaseModel, ConfigDict
from turns import FAR_SECONDS, item, ratio

from sovereign_agent import assistant_work
from sovereign_agent.agent_loop import Limits, Turn, run_loop, tool_message
from sovereign_agent.assistant_work import Claim
from sovereign_agent.database import Database, Migration
from sovereign_agent.tool_dispatch import Answer, Dispatcher, ExecutableTool, Fence, Occasion, ToolCall

SHORT, LONG = 50, 200
"""Messages in the conversation at the beginning."""

TURNS = 20
CALLS = 2_000
WRITES = 50
MOST_TURNS = Limits(10**6, 10**6, 3_600, 1_000, context_bytes=2**30, repeats=10**9)
SALES = Migration(
    number=1,
    name="sales",
    min_writer=1,
    sql="-- home: mind\nCREATE TABLE sales (seq <identity>, sku TEXT NOT NULL, quantity <integer> NOT NULL) <strict>;",
)


class Sale(BaseModel):
    """Three fields, as a tool of a shop has them."""

    model_config = ConfigDict(extra="forbid")
    sku: str
    quantity: int
    gift: bool


ARGUMENTS = json.dumps({"sku": "SKU-TEA", "quantity": 2, "gift": False})


class Quick:
    """A model that calls one tool again and again, and then answers."""

    def __init__(self) -> None:
        self.left = TURNS

    def complete(self, *_: Any, **__: Any) -> Turn:
        """The next reply."""
        self.left -= 1
        calls = (ToolCall(f"call_{self.left}", "sell", ARGUMENTS),) if self.left else ()
        return Turn("" if calls else "Done.", calls, "tool_calls" if calls else "stop")


def microseconds(act: Callable[[], object], times: int, rounds: int) -> float:
    """What one call takes of this process's own time, the median of the rounds."""
    samples: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(times):
            act()
        samples.append((time.process_time() - start) / times * 1e6)
    return statistics.median(samples)


def loop(messages: int, rounds: int) -> float:
    """Microseconds of a turn in a conversation of so many messages, the dispatcher's call included."""
    tool = ExecutableTool("sell", "Sell.", Sale, lambda _: 1)
    said = [{"role": ("user", "assistant")[number % 2], "content": "x" * 200} for number in range(messages)]
    dispatcher = Dispatcher([tool], allowed=["sell"])
    return microseconds(lambda: run_loop(Quick(), dispatcher, said, limits=MOST_TURNS), 1, 4 * rounds) / TURNS


def call(rounds: int) -> float:
    """Microseconds of a call with three fields beyond calling its handler with what it gets."""
    tool = ExecutableTool("sell", "Sell.", Sale, lambda _: 1)
    dispatcher, asked, sale = (
        Dispatcher([tool], allowed=["sell"]),
        ToolCall("c", "sell", ARGUMENTS),
        Sale(sku="SKU-TEA", quantity=2, gift=False),
    )
    whole = microseconds(lambda: dispatcher.invoke(asked), CALLS, rounds)
    return whole - microseconds(lambda: tool.handler(sale), CALLS, rounds)


class RawSale(raw.Raw):
    """The same write by hand: who holds what, of which epoch; then the two rows."""

    def __init__(self, connection: Any, claim: Claim, marker: Path) -> None:
        super().__init__(connection, postgres=False)
        self._claim, self._marker = claim, marker

    def sell(self) -> None:
        """One transaction."""
        claim, now = self._claim, time.time_ns() // 1000
        self.execute(self._begin)
        control = self.execute("SELECT paused, epoch FROM assistant_control").fetchone()
        held = self.execute(
            "SELECT expires_at FROM assistant_work WHERE id = ? AND generation = ? AND owner = ? AND epoch = ?"
            " AND status = 'RUNNING'",
            (claim.id, claim.generation, claim.owner, claim.epoch),
        ).fetchone()
        assert tuple(control) == (0, self._marker.read_text().strip())
        assert held[0] > now
        sale = json.loads(ARGUMENTS)
        self.execute("INSERT INTO sales (sku, quantity) VALUES (?, ?)", (sale["sku"], sale["quantity"]))
        line = json.dumps({"role": "tool", "tool_call_id": "c", "content": json.dumps({"ok": True, "result": 1})})
        self.execute(
            "INSERT INTO assistant_transcript (work_id, generation, message, created_at) VALUES (?, ?, ?, ?)",
            (claim.id, claim.generation, line, now),
        )
        self.execute("COMMIT")


def fenced(path: Path, rounds: int) -> dict[str, float]:
    """A fenced tool's write, its answer recorded with it, against the same transaction by hand. SQLite, FULL."""
    with closing(Database(path)) as db:
        db.extend("mind", (SALES,))
        assistant_work.enqueue(db, *item())
        claim = assistant_work.claim(db, "w", ttl=FAR_SECONDS)
        assert claim

        judged_at: list[int] = []

        def check(connection: Any, _: ToolCall) -> int:
            judged_at[:] = [assistant_work.assert_current(connection, claim)]
            return claim.generation

        def record(connection: Any, asked: ToolCall, _: Occasion, answer: Answer | None) -> None:
            assert answer
            assistant_work.append_line(connection, claim, tool_message(asked.id, answer), at=judged_at[0])

        def sell(sale: Sale, now: Occasion) -> int:
            now.connection.execute("INSERT INTO sales (sku, quantity) VALUES (?, ?)", (sale.sku, sale.quantity))
            return 1

        tool = ExecutableTool("sell", "Sell.", Sale, sell, consequential=True, fenced=True)
        dispatcher = Dispatcher([tool], allowed=["sell"], fence=Fence(db.transaction, check, record))
        bare = RawSale(raw.sqlite_session(str(path)), claim, db.authority)
        asked = ToolCall("c", "sell", ARGUMENTS)
        assert dispatcher.invoke(asked).ok
        return ratio(lambda: dispatcher.invoke(asked), bare.sell, rounds, WRITES)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Every figure."""
    short, long = loop(SHORT, rounds), loop(LONG, rounds)
    return {
        "turn_microseconds": {SHORT: round(short), LONG: round(long)},
        "call_microseconds": round(call(rounds), 1),
        "fenced_write": fenced(folder / "mind.db", rounds),
    }
