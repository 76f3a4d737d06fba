"""The assistant's queue against raw SQL: single commits, claim and finish, batches, and many workers on PostgreSQL.

The raw side writes the same rows into the same schema with the same durability: the item, and one event for a claim
and one for an end. What it leaves out is every check, every clock reading and every layer.
"""

from __future__ import annotations

import itertools
import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import raw

from sovereign_agent import assistant_work
from sovereign_agent.assistant_work import Claim
from sovereign_agent.database import Database

TURN = 50
BATCH = 100
WORKERS = 4
PROMPT = "Check the shop this morning, and say what is needed."
FAR_SECONDS = 3_600.0

_numbers = itertools.count()


def item() -> tuple[str, str, str]:
    """(origin, session, prompt) of an item that nobody has queued yet, in a session of its own."""
    number = next(_numbers)
    return f"mail:{number}:{uuid.uuid4().hex[:8]}", f"session {number}", PROMPT


class RawQueue(raw.Raw):
    """The same moves by hand."""

    INSERT = (
        "INSERT INTO assistant_work (id, origin, session, prompt, subject, role, control, created_at)"
        " VALUES (?, ?, ?, ?, '', 'shop', 0, 1)"
    )
    CLAIM = (
        "UPDATE assistant_work SET status = 'RUNNING', generation = generation + 1, owner = 'w', epoch = 'e',"
        " expires_at = 4000000000000000 WHERE seq = (SELECT seq FROM assistant_work WHERE role = 'shop'"
        " AND status = 'READY' AND available_at = 0 ORDER BY control DESC, seq LIMIT 1 {skip}) RETURNING id"
    )
    FINISH = (
        "UPDATE assistant_work SET status = 'DONE', owner = NULL, epoch = NULL, expires_at = NULL, finished_at = 2,"
        " result = 'done' WHERE id = ? AND generation = 1"
    )

    def __init__(self, connection: Any, *, postgres: bool) -> None:
        super().__init__(connection, postgres=postgres)
        self._claim = self.CLAIM.format(skip="FOR UPDATE SKIP LOCKED" if postgres else "")

    def enqueue(self) -> None:
        """One item, one commit."""
        self.execute(self._begin)
        self.execute(self.INSERT, (f"work_{uuid.uuid4().hex}", *item()))
        self.execute("COMMIT")

    def enqueue_batch(self) -> None:
        """A hundred items in one commit, by the driver's own executemany."""
        self.execute(self._begin)
        text = self.INSERT.replace("?", self._mark)
        cursor = self._connection.cursor()
        cursor.executemany(text, [(f"work_{uuid.uuid4().hex}", *item()) for _ in range(BATCH)])
        self.execute("COMMIT")

    def cycle(self) -> bool:
        """Claim and finish: two commits."""
        self.execute(self._begin)
        taken = self.execute(self._claim).fetchone()
        if taken:
            self.event("work.claimed", taken[0])
        self.execute("COMMIT")
        if taken is None:
            return False
        self.execute(self._begin)
        self.execute(self.FINISH, (taken[0],))
        self.event("work.done", taken[0])
        self.execute("COMMIT")
        return True


def seconds(act: Callable[[], object], times: int) -> float:
    """How long so many calls take, on the wall."""
    start = time.perf_counter()
    for _ in range(times):
        act()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], bare: Callable[[], object], rounds: int, times: int) -> dict[str, float]:
    """The product's rate over the raw one's, turn by turn."""
    seconds(ours, times), seconds(bare, times)
    pairs = [(seconds(bare, times), seconds(ours, times)) for _ in range(rounds)]
    return {
        "ratio": round(statistics.median(base / product for base, product in pairs), 3),
        "raw_per_second": round(times / statistics.median(base for base, _ in pairs)),
        "ours_per_second": round(times / statistics.median(product for _, product in pairs)),
    }


def embedded(path: Path, rounds: int) -> dict[str, Any]:
    """Every figure of one process on SQLite, synchronous=FULL."""
    with closing(Database(path)) as db:
        bare = RawQueue(raw.sqlite_session(str(path)), postgres=False)

        def cycle() -> None:
            claim = assistant_work.claim(db, "w", ttl=FAR_SECONDS)
            assert claim
            assistant_work.finish(db, claim, "DONE", "done")

        held: list[Claim] = []

        def following() -> None:
            held[:] = [claim for claim in [assistant_work.finish_and_claim(db, held[0], "DONE", "done")] if claim]

        figures = {
            "enqueue": ratio(lambda: assistant_work.enqueue(db, *item()), bare.enqueue, rounds, TURN),
            "enqueue_many": ratio(
                lambda: assistant_work.enqueue_many(db, [item() for _ in range(BATCH)]), bare.enqueue_batch, rounds, 5
            ),
            "claim_finish": ratio(cycle, bare.cycle, rounds, TURN),
        }
        held.append(assistant_work.claim(db, "w", ttl=FAR_SECONDS) or held[0])
        figures["finish_and_claim"] = ratio(following, bare.cycle, rounds, TURN)
        figures["assert_current_microseconds"] = fence(db, held[0], rounds)
        return figures


def fence(db: Database, claim: Claim, rounds: int) -> dict[str, float]:
    """What `assert_current` adds to a transaction, in microseconds of this process's own time."""
    samples: list[float] = []
    with db.transaction() as connection:
        for _ in range(rounds):
            start = time.process_time()
            for _ in range(200):
                assistant_work.assert_current(connection, claim)
            samples.append((time.process_time() - start) * 1_000_000 / 200)
    return {"median": round(statistics.median(samples), 1)}


def drain_ours(url: str, root: str) -> int:
    """One worker: claim, then finish and claim until nothing is left."""
    done = 0
    with closing(Database(url, root=Path(root))) as db:
        claim = assistant_work.claim(db, "w", ttl=FAR_SECONDS)
        while claim:
            claim = assistant_work.finish_and_claim(db, claim, "DONE", "done", ttl=FAR_SECONDS)
            done += 1
    return done


def drain_bare(url: str) -> int:
    """The same by hand, the claim and the end in a commit each."""
    with raw.postgres_session(url) as session:
        bare, done = RawQueue(session, postgres=True), 0
        while bare.cycle():
            done += 1
    return done


def many_workers(url: str, root: Path, rounds: int, count: int = 800) -> dict[str, float]:
    """Four processes on PostgreSQL drain as many items by hand and through the product, in turns."""
    pairs: list[tuple[float, float]] = []
    places_of_bare, places_of_ours = [[url] * WORKERS], [[url] * WORKERS, [str(root)] * WORKERS]
    with closing(Database(url, root=root)) as db, ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(drain_ours, *places_of_ours))
        for _ in range(rounds):
            times: list[float] = []
            for act, places in (
                (drain_bare, places_of_bare),
                (drain_ours, places_of_ours),
            ):
                assistant_work.enqueue_many(db, [item() for _ in range(count)])
                start = time.perf_counter()
                done = sum(pool.map(act, *places))
                times.append(time.perf_counter() - start)
                assert done == count
            pairs.append((times[0], times[1]))
    return {
        "ratio": round(statistics.median(base / ours for base, ours in pairs), 3),
        "raw_per_second": round(count / statistics.median(base for base, _ in pairs)),
        "ours_per_second": round(count / statistics.median(ours for _, ours in pairs)),
    }
