"""Chapter 6's graded exercise: what `close_overdue` must do, asked of whatever function is handed in.

    grade(close_overdue)    prints a line for each check, a hint for the first that needs work, and a report

Every check gets a ledger of its own, so that no check can spoil the next. It never stops at the first mistake. A
function that believes the note fails, one that closes whatever it is shown fails too, and so does one that is right
only while nobody else is about.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXERCISE = "ch06-close-overdue"
TRIP, TICKET, BACK_BY, NOW = "trip-3", 71, 540, 560
BUSY_SECONDS = 3.0
HESITATION_SECONDS = 0.2

CloseOverdue = Callable[[sqlite3.Connection, str, int, Path, int], bool]

TABLES = """
    CREATE TABLE trips (
        trip    TEXT PRIMARY KEY,
        state   TEXT NOT NULL,
        ticket  INTEGER,
        back_by INTEGER
    );
    CREATE TABLE slips (
        number  INTEGER PRIMARY KEY,
        trip    TEXT NOT NULL,
        ticket  INTEGER NOT NULL,
        verdict TEXT NOT NULL,
        reason  TEXT NOT NULL
    );
"""
NO_PAPER = "CREATE TRIGGER no_paper BEFORE INSERT ON slips BEGIN SELECT RAISE(ABORT, 'out of paper'); END"

OUT = ("OUT", TICKET, BACK_BY)
CLOSED = ("FAILED", None, None)
LOST = [(TRIP, TICKET, "failed", "worker_lost")]


class OpenTransaction(Exception):
    """The function came back between BEGIN and COMMIT."""


@dataclass
class Office:
    """One ledger with one trip in it, and the folder that the driver left."""

    path: Path
    folder: Path

    def open(self, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
        """A connection of its own, on which BEGIN and COMMIT are said by hand."""
        return sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_SECONDS, factory=kind)

    def ask(
        self, close_overdue: CloseOverdue, *, now: int = NOW, kind: type[sqlite3.Connection] = sqlite3.Connection
    ) -> bool:
        """Call the function as a supervisor would, on a connection that is gone afterwards, as after a crash."""
        with closing(self.open(kind)) as db:
            answer = close_overdue(db, TRIP, TICKET, self.folder, now)
            if db.in_transaction:
                raise OpenTransaction("it came back, and its transaction was still open")
            return answer

    def trip(self) -> tuple[Any, ...]:
        """State, ticket and time as the ledger has them."""
        with closing(self.open()) as db:
            return tuple(db.execute("SELECT state, ticket, back_by FROM trips").fetchone())

    def slips(self) -> list[tuple[Any, ...]]:
        """Every slip, oldest first."""
        with closing(self.open()) as db:
            return db.execute("SELECT trip, ticket, verdict, reason FROM slips ORDER BY number").fetchall()


@contextmanager
def office(state: str = "OUT", ticket: int | None = TICKET, back_by: int | None = BACK_BY) -> Iterator[Office]:
    """An office for one check. The driver's folder holds half a route, and a note that says the round is done."""
    with tempfile.TemporaryDirectory(prefix="lucy-van-") as folder:
        here = Office(Path(folder) / "ledger.db", Path(folder) / "van")
        here.folder.mkdir()
        (here.folder / "route.txt").write_text("Mill Lane, Harbour Str", encoding="utf-8")
        (here.folder / "note.json").write_text(json.dumps({"status": "completed"}), encoding="utf-8")
        with closing(here.open()) as db:
            db.executescript(TABLES)
            db.execute("INSERT INTO trips VALUES (?, ?, ?, ?)", (TRIP, state, ticket, back_by))
        yield here


def come_home(db: sqlite3.Connection, trip: str, ticket: int) -> bool:
    """What a driver's own process does at the end of a round: finish it, if the ticket is still the current one."""
    finished = db.execute(
        """
        UPDATE trips SET state = 'DONE', ticket = NULL, back_by = NULL
         WHERE trip = ? AND state = 'OUT' AND ticket = ?
        """,
        (trip, ticket),
    )
    return finished.rowcount == 1


# --- the checks: each returns what is wrong, or nothing ---------------------------------------------------


def a_lost_trip_is_failed(close_overdue: CloseOverdue) -> str:
    """Hint: state FAILED, ticket and back_by NULL, one slip with the lost ticket, COMMIT, and the answer True."""
    with office() as here:
        (here.folder / "note.json").unlink()  # this one is about the ledger alone
        answer = here.ask(close_overdue)
        return wrong(here, CLOSED, LOST, said=answer, right=True)


def the_note_is_kept_and_not_believed(close_overdue: CloseOverdue) -> str:
    """Hint: `folder` is there to tempt you. Nothing in it is a reason to write anything."""
    with office() as here:
        answer = here.ask(close_overdue)
        if not (here.folder / "note.json").exists():
            return "the note is gone: it was evidence"
        return wrong(here, CLOSED, LOST, said=answer, right=True)


def a_trip_with_time_left_is_left_alone(close_overdue: CloseOverdue) -> str:
    """Hint: which part of the WHERE clause looks at the clock?"""
    with office() as here:
        answer = here.ask(close_overdue, now=BACK_BY - 1)
        return wrong(here, OUT, [], said=answer, right=False)


def the_last_minute_is_over_when_it_comes(close_overdue: CloseOverdue) -> str:
    """Hint: at exactly back_by the driver may no longer go on, so the trip can be closed: <= and not <."""
    with office() as here:
        answer = here.ask(close_overdue, now=BACK_BY)
        return wrong(here, CLOSED, LOST, said=answer, right=True)


def a_finished_trip_is_left_alone(close_overdue: CloseOverdue) -> str:
    """Hint: somebody finished it between your look and your write. Only a trip that is OUT can be lost."""
    with office("DONE", TICKET, BACK_BY) as here:
        answer = here.ask(close_overdue)
        return wrong(here, ("DONE", TICKET, BACK_BY), [], said=answer, right=False)


def a_newer_ticket_is_left_alone(close_overdue: CloseOverdue) -> str:
    """Hint: you were asked about ticket 71. The trip went out again under 72, and that one is not yours to close."""
    with office("OUT", TICKET + 1, BACK_BY) as here:
        answer = here.ask(close_overdue)
        return wrong(here, ("OUT", TICKET + 1, BACK_BY), [], said=answer, right=False)


def a_second_call_writes_nothing(close_overdue: CloseOverdue) -> str:
    """Hint: let rowcount decide whether the slip is written, and return False when it is not 1."""
    with office() as here:
        here.ask(close_overdue)
        answer = here.ask(close_overdue, now=NOW + 1)
        return wrong(here, CLOSED, LOST, said=answer, right=False)


def state_and_slip_come_together_or_not_at_all(close_overdue: CloseOverdue) -> str:
    """Hint: BEGIN IMMEDIATE before the first write, COMMIT after the last one, ROLLBACK if anything was raised."""
    with office() as here:
        with closing(here.open()) as db:
            db.execute(NO_PAPER)
        with closing(here.open()) as db:
            try:
                close_overdue(db, TRIP, TICKET, here.folder, NOW)
            except sqlite3.Error:
                if db.in_transaction:
                    return "the slip could not be written, and the transaction was left open: no other can begin"
            else:
                return "the slip could not be written, and the caller was not told"
        return wrong(here, OUT, [])


def of_two_at_once_one_closes_it(close_overdue: CloseOverdue) -> str:
    """Hint: the decision has to be made by the statement that writes, not by a SELECT before the transaction."""
    with office() as here:
        answers: list[Any] = []
        meet = threading.Barrier(2)

        class Hesitating(sqlite3.Connection):
            """Whoever looks before it writes is made to wait until the other one has looked, too."""

            def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
                cursor = super().execute(sql, *values)
                if sql.lstrip().upper().startswith("SELECT"):
                    with suppress(threading.BrokenBarrierError):
                        meet.wait(HESITATION_SECONDS)
                return cursor

        def supervise() -> None:
            try:
                answers.append(here.ask(close_overdue, kind=Hesitating))
            except Exception as error:  # noqa: BLE001 - whatever it raised is what the learner needs to read
                answers.append(repr(error))

        both = [threading.Thread(target=supervise) for _ in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join()
        return wrong(here, CLOSED, LOST, said=sorted(answers, key=str), right=[False, True])


def a_late_driver_changes_nothing(close_overdue: CloseOverdue) -> str:
    """Hint: the driver comes back after all, with ticket 71. Is it still anywhere in the row?"""
    with office() as here:
        here.ask(close_overdue)
        with closing(here.open()) as db:
            answer = come_home(db, TRIP, TICKET)
        return wrong(here, CLOSED, LOST, said=answer, right=False)


CHECKS = (
    a_lost_trip_is_failed,
    the_note_is_kept_and_not_believed,
    a_trip_with_time_left_is_left_alone,
    the_last_minute_is_over_when_it_comes,
    a_finished_trip_is_left_alone,
    a_newer_ticket_is_left_alone,
    a_second_call_writes_nothing,
    state_and_slip_come_together_or_not_at_all,
    of_two_at_once_one_closes_it,
    a_late_driver_changes_nothing,
)


# --- the report -------------------------------------------------------------------------------------------


def grade(close_overdue: CloseOverdue) -> dict[str, Any]:
    """Ask a function every check, print what was found, and return the report: PASS only if nothing is wrong."""
    needs_work: dict[str, str] = {}
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            found = check(close_overdue)
        except NotImplementedError:
            print("not written yet: the checks wait for your function")
            return report({each.__name__.replace("_", " "): "not written" for each in CHECKS})
        except Exception as error:  # noqa: BLE001 - a mistake of the learner's, of any kind, is told and graded
            found = str(error) if isinstance(error, OpenTransaction) else raised(error)
        print("PASS      " if not found else "NEEDS_WORK", name)
        if found and not needs_work:  # one thing at a time
            print("           seen:", found)
            print("           hint:", hint(found) or (check.__doc__ or "").removeprefix("Hint: "))
        if found:
            needs_work[name] = found
    return report(needs_work)


def raised(error: Exception) -> str:
    """What a function raised, and the line of its cell in which it did."""
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename != __file__]
    where = f" (line {lines[0]} of your cell)" if lines else ""
    return f"it raised {type(error).__name__}: {error}{where}"


def hint(found: str) -> str:
    """What to do about a mistake that has nothing to do with what was checked; empty for all others."""
    if "no such table" in found:
        return "the tables trips and slips are in `db`, the connection that your function is given."
    if "it raised" in found:
        return "this is Python's own complaint. Look at that line for the name or the value in it, and mend that first."
    if "answer: None instead of" in found:
        return "a function that comes to its end without `return` answers None."
    return ""


def report(needs_work: dict[str, str]) -> dict[str, Any]:
    """Print and return what a teacher, or a script, reads."""
    result = {
        "exercise": EXERCISE,
        "status": "NEEDS_WORK" if needs_work else "PASS",
        "passed": len(CHECKS) - len(needs_work),
        "of": len(CHECKS),
    }
    print("EXERCISE_REPORT=" + json.dumps(result))
    return {**result, "needs_work": needs_work}


def wrong(
    here: Office, trip: tuple[Any, ...], slips: list[tuple[Any, ...]], *, said: Any = None, right: Any = None
) -> str:
    """What differs from what should be, in words; empty if nothing does."""
    pairs = (("answer", said, right), ("trip", here.trip(), trip), ("slips", here.slips(), slips))
    return "; ".join(f"{what}: {found!r} instead of {due!r}" for what, found, due in pairs if found != due)
