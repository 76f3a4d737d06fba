"""What a transaction, a statement, a row and a clock promise: the same on both engines."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from conftest import Location
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import answer, at_one_barrier, bump, child, counter, eventually, heard, rows, run_of

from sovereign_agent import assistant_work, journal
from sovereign_agent.clock import FIRST_MICROS, LAST_MICROS, ManualClock, SystemClock, micros, moment
from sovereign_agent.database import Connection, Database, Migration
from sovereign_agent.errors import ConstraintBroken, IllegalMove, LedgerFault, LedgerUnavailable
from sovereign_agent.storage.migrate import core_migrations

PAIRS = [
    Migration(
        1,
        "pairs",
        "CREATE TABLE pairs (n <integer> NOT NULL, half TEXT NOT NULL, PRIMARY KEY (n, half)) <strict>;",
        min_writer=1,
    )
]
IMPATIENT = timedelta(milliseconds=300)
KINDS = ("immediate", "transaction")


@pytest.fixture
def pairs(db: Database) -> Database:
    """A ledger with a table whose rows belong together in twos."""
    db.extend("pairs", PAIRS)
    return db


def add(connection: Any, n: int, half: str) -> None:
    connection.execute("INSERT INTO pairs (n, half) VALUES (?, ?)", (n, half))


def kept(location: Location) -> list[tuple[int, str]]:
    """What a fresh reader finds."""
    with_fresh_eyes = location.open(read_only=True)
    try:
        return [tuple(row) for row in with_fresh_eyes.connection.execute("SELECT n, half FROM pairs ORDER BY n, half")]
    finally:
        with_fresh_eyes.close()


# --- transactions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_end_keeps_all_of_it(pairs: Database, location: Location, kind: str) -> None:
    with getattr(pairs, kind)() as connection:
        add(connection, 1, "left")
        assert kept(location) == []
        add(connection, 1, "right")
    assert kept(location) == [(1, "left"), (1, "right")]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_raised_undoes_all_of_it(pairs: Database, location: Location, kind: str) -> None:
    for raised in (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(raised), getattr(pairs, kind)() as connection:
            add(connection, 1, "left")
            raise raised
        assert kept(location) == []
    with pairs.immediate() as connection:
        add(connection, 2, "left")
    assert kept(location) == [(2, "left")]


def test_an_abandoned_generator_undoes_its_transaction(pairs: Database, location: Location) -> None:
    def half_way() -> Iterator[None]:
        with pairs.immediate() as connection:
            add(connection, 1, "left")
            yield
            add(connection, 1, "right")

    abandoned, finished = half_way(), half_way()
    next(abandoned)
    abandoned.close()
    assert kept(location) == []
    assert len(list(finished)) == 1
    assert kept(location) == [(1, "left"), (1, "right")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_transaction_inside_another_is_refused_and_the_outer_one_goes_on(
    pairs: Database, location: Location, kind: str
) -> None:
    with pairs.immediate() as connection:
        add(connection, 1, "left")
        with pytest.raises(IllegalMove) as refused, getattr(pairs, kind)():
            raise AssertionError("a transaction was opened inside another one")
        add(connection, 1, "right")
    assert refused.value.category == "transaction_nested"
    assert kept(location) == [(1, "left"), (1, "right")]


def test_the_same_transaction_is_not_entered_twice_at_once(pairs: Database, location: Location) -> None:
    transaction = pairs.immediate()
    with transaction as connection:
        add(connection, 1, "left")
        with pytest.raises(IllegalMove), transaction:
            raise AssertionError("it was entered twice")
        add(connection, 1, "right")
    assert kept(location) == [(1, "left"), (1, "right")]


def test_hazard_77_the_pending_work_of_others_is_never_committed(pairs: Database, location: Location) -> None:
    connection = pairs.connection
    connection._run("BEGIN", ())
    add(connection, 1, "left")
    with pytest.raises(IllegalMove) as refused, pairs.immediate():
        raise AssertionError("a transaction was opened on top of somebody's pending work")
    assert refused.value.category == "transaction_nested"
    assert kept(location) == []
    connection._run("ROLLBACK", ())
    with pairs.immediate() as connection:
        add(connection, 2, "left")
    assert kept(location) == [(2, "left")]


BOUNDS = ["COMMIT", " end;", "ROLLBACK", "BEGIN", "SAVEPOINT a", "-- so\ncommit", "/* so */ Commit", "SELECT 1; COMMIT"]


@pytest.mark.parametrize("words", BOUNDS)
def test_hazard_63_no_statement_ends_the_transaction_that_it_stands_in(
    pairs: Database, location: Location, words: str
) -> None:
    with pytest.raises(IllegalMove) as refused, pairs.transaction() as connection:
        add(connection, 1, "left")
        connection.execute(words)
    assert refused.value.category == "transaction_nested"
    assert kept(location) == []


@pytest.mark.parametrize("words", BOUNDS)
def test_hazard_77_no_statement_opens_a_transaction_that_nobody_ends(pairs: Database, words: str) -> None:
    with pytest.raises(IllegalMove):
        pairs.connection.execute(words)
    with pairs.transaction() as connection:
        add(connection, 1, "left")


TRIGGERS = {
    "sqlite": "-- counts\nCREATE TRIGGER counts AFTER INSERT ON pairs BEGIN DELETE FROM pairs WHERE n = 0; END",
    "postgresql": "-- counts\nDO $$ BEGIN PERFORM 1; BEGIN PERFORM 2; END; END $$",
}


def test_a_body_of_statements_is_no_transaction(pairs: Database, engine: str) -> None:
    assert answer(pairs.connection.execute, TRIGGERS[engine]) == "done"


def test_nobody_commits_a_transaction_of_somebody_else(pairs: Database, location: Location) -> None:
    with pairs.transaction() as connection:
        add(connection, 1, "left")
        with pytest.raises(IllegalMove):
            connection.commit(pairs.transaction())
        assert kept(location) == []
    assert kept(location) == [(1, "left")]


def test_words_of_a_transaction_in_a_text_or_a_comment_are_words(pairs: Database, location: Location) -> None:
    insert = "INSERT INTO pairs (n, half) VALUES (1, '; COMMIT; it''s begin')  -- ; rollback"
    assert answer(pairs.connection.execute, insert) == "done"
    assert kept(location) == [(1, "; COMMIT; it's begin")]


def test_hazard_77_a_statement_outside_a_transaction_is_durable_at_once(pairs: Database, location: Location) -> None:
    add(pairs.connection, 1, "left")
    assert kept(location) == [(1, "left")]
    pairs.close()
    assert kept(location) == [(1, "left")]


def test_hazard_77_closing_inside_a_transaction_keeps_nothing_and_says_so(pairs: Database, location: Location) -> None:
    with pytest.raises(LedgerUnavailable) as refused, pairs.immediate() as connection:
        add(connection, 1, "left")
        pairs.close()
    assert refused.value.category == "ledger_closed"
    assert kept(location) == []


def test_hazard_54_after_a_caught_error_no_statement_runs_and_nothing_is_committed(
    pairs: Database, location: Location
) -> None:
    add(pairs.connection, 7, "left")
    with pytest.raises(LedgerFault) as refused, pairs.immediate() as connection:
        add(connection, 1, "receipt")
        with suppress(ConstraintBroken):
            add(connection, 7, "left")
        with pytest.raises(LedgerFault) as also_refused:
            add(connection, 1, "state")
    for error in (refused.value, also_refused.value):
        assert error.category == "transaction_ended"
        assert isinstance(error.__cause__, ConstraintBroken)
    assert kept(location) == [(7, "left")]
    with pairs.immediate() as connection:
        add(connection, 1, "receipt")
    assert kept(location) == [(1, "receipt"), (7, "left")]


def test_a_refused_parameter_is_a_first_error_too(pairs: Database, location: Location) -> None:
    with pytest.raises(LedgerFault) as refused, pairs.immediate() as connection:
        add(connection, 1, "receipt")
        with suppress(IllegalMove):
            add(connection, 1, "an event with \0 in it")
    assert refused.value.category == "transaction_ended"
    assert kept(location) == []


@pytest.mark.parametrize("word", ["COMMIT", "ROLLBACK"])
def test_hazard_77_ending_a_transaction_by_hand_is_noticed_at_the_next_statement(
    pairs: Database, location: Location, word: str
) -> None:
    with pytest.raises(LedgerFault) as refused, pairs.immediate() as connection:
        connection._run(word, ())
        add(connection, 1, "left")
    assert refused.value.category == "transaction_ended"
    assert kept(location) == []


def test_the_first_error_is_the_one_to_see_although_the_rollback_fails_too(pairs: Database, location: Location) -> None:
    with pytest.raises(ValueError, match="the first"), pairs.immediate() as connection:
        add(connection, 1, "left")
        connection._raw.close()  # type: ignore[attr-defined]  # the rollback has nothing left to speak to
        raise ValueError("the first")
    assert answer(bump, pairs) == "done"
    assert kept(location) == []


def left_in_a_transaction(db: Database) -> None:
    """What an interrupt between ``__enter__`` and the body does: nobody calls ``__exit__``."""
    transaction = db.immediate()
    add(transaction.__enter__(), 1, "left")


def test_an_interrupt_before_the_body_gives_the_lock_back_by_itself(pairs: Database, location: Location) -> None:
    left_in_a_transaction(pairs)
    neighbour = location.open(patience=IMPATIENT)
    assert answer(bump, neighbour) == "done"
    neighbour.close()
    assert answer(bump, pairs) == "done"
    assert (kept(location), counter(pairs)) == ([], 2)


def test_a_second_interrupt_on_the_way_out_is_made_up_for_by_the_next_use(
    pairs: Database, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "_vanished", lambda *_: None)
    left_in_a_transaction(pairs)
    assert pairs.connection.in_transaction
    pairs.connection.execute("SELECT 1")
    assert not pairs.connection.in_transaction
    left_in_a_transaction(pairs)
    assert answer(bump, pairs) == "done"
    assert (kept(location), counter(pairs)) == ([], 1)


def hammered(pipe: Any, location: Location) -> None:
    """Insert pairs while SIGINT rains; tell which were acknowledged, then stay alive with the session open."""
    left = fired = 0

    def on_sigint(*_: object) -> None:
        nonlocal left, fired
        if left:
            left, fired = left - 1, fired + 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_sigint)
    db = location.open()
    add(db.connection, -1, "warm")
    pipe.send("ready")
    acknowledged, interrupted, swallowed, left_open = [], 0, 0, 0
    for n in range(100_000):
        if pipe.poll():
            break
        fired, caught = 0, False
        try:
            try:
                left = random.choice((1, 1, 2))  # noqa: S311
                with db.immediate() as connection:
                    add(connection, n, "left")
                    add(connection, n, "right")
                acknowledged.append(n)
            finally:
                left = 0
        except KeyboardInterrupt:
            caught = True
        interrupted += caught
        swallowed += fired > 0 and not caught
        left_open += db.connection.in_transaction
    pipe.send((acknowledged, interrupted, swallowed, left_open))
    pipe.recv()


@pytest.mark.usefixtures("pairs")
def test_no_interrupt_leaves_a_lock_or_half_a_transaction(location: Location) -> None:
    with child(hammered, location) as (process, pipe):
        assert heard(pipe) == "ready"
        until = time.monotonic() + 3
        while time.monotonic() < until:
            os.kill(process.pid, signal.SIGINT)
            time.sleep(random.uniform(0, 0.003))  # noqa: S311
        pipe.send("enough")
        acknowledged, interrupted, swallowed, left_open = heard(pipe)
        assert left_open == 0
        assert swallowed == 0 or location.engine == "postgresql"  # where the driver's own __del__ can swallow one
        assert interrupted > 50
        with location.open(patience=IMPATIENT).immediate() as connection:  # at once, while the child lives
            add(connection, -2, "other")
    found: dict[int, set[str]] = {}
    for n, half in kept(location):
        found.setdefault(n, set()).add(half)
    assert {n for n, halves in found.items() if n >= 0 and halves != {"left", "right"}} == set()
    assert set(acknowledged) <= set(found)
    assert acknowledged


def increment(_: int, location: Location, times: int) -> None:
    db = location.open(patience=timedelta(seconds=30))
    for _ in range(times):
        with db.immediate() as connection:
            row = connection.execute("SELECT value FROM lease_tokens").fetchone()
            assert row
            connection.execute("UPDATE lease_tokens SET value = ?", (row["value"] + 1,))
    db.close()


def test_read_then_write_loses_no_increment_of_eight_processes(db: Database, location: Location) -> None:
    at_one_barrier(8, increment, location, 15)
    assert db.connection.execute("SELECT value FROM lease_tokens").rows[0][0] == 8 * 15


# --- processes and threads --------------------------------------------------------------------------------


def forked(pipe: Any, location: Location) -> None:
    try:
        parent_and_child(pipe, location.open())
        pipe.send("the parent is well")
    except LedgerFault as error:
        pipe.send(repr(error))
    pipe.recv()


def parent_and_child(pipe: Any, db: Database) -> None:
    connection, transaction = db.connection, db.immediate()
    with transaction:
        add(connection, 1, "left")
        pid = os.fork()
        if pid == 0:
            answers = []
            for act in (
                lambda: db.connection,
                db.immediate,
                lambda: connection.execute("SELECT 1"),
                lambda: connection.commit(transaction),
            ):
                try:
                    act()
                    answers.append("no refusal")
                except LedgerFault as error:
                    answers.append(error.category)
            db.close()
            connection.close()
            pipe.send(answers)
            with suppress(LedgerFault):
                db.immediate().__enter__()
            raise SystemExit  # through the parent's `with`, as a careless child would leave
        os.waitpid(pid, 0)
        add(connection, 1, "right")
    add(db.connection, 2, "left")


@pytest.mark.usefixtures("pairs")
def test_a_forked_child_is_refused_and_its_parent_does_not_notice(location: Location) -> None:
    with child(forked, location) as (_, pipe):
        assert heard(pipe) == ["forked"] * 4
        assert heard(pipe) == "the parent is well"
    assert kept(location) == [(1, "left"), (1, "right"), (2, "left")]


def in_a_thread(act: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(act()))
    thread.start()
    thread.join(20)
    assert answers, "the thread did not end well"
    return answers[0]


def test_each_thread_has_a_connection_of_its_own(pairs: Database, location: Location) -> None:
    with pairs.transaction() as connection:
        add(connection, 1, "left")
        assert in_a_thread(lambda: pairs.connection.execute("SELECT * FROM pairs").fetchall()) == []
        assert in_a_thread(lambda: pairs.connection is not connection)
        assert pairs.connection is connection
    assert kept(location) == [(1, "left")]


def test_a_thread_that_ends_gives_its_session_back(pairs: Database) -> None:
    raw = in_a_thread(lambda: pairs.connection._raw)  # type: ignore[attr-defined]
    gc.collect()
    with pytest.raises(Exception, match="closed"):
        raw.execute("SELECT 1")
    pairs.connection.execute("SELECT 1")


def test_close_closes_the_connections_of_all_threads(pairs: Database, location: Location) -> None:
    open_now, may_end = threading.Event(), threading.Event()
    connections = [pairs.connection]

    def hold() -> None:
        connections.append(pairs.connection)
        open_now.set()
        may_end.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert open_now.wait(20)
    pairs.close()
    pairs.close()
    for connection in connections:
        with pytest.raises(LedgerUnavailable) as refused:
            connection.execute("SELECT 1")
        assert refused.value.category == "ledger_closed"
    with pytest.raises(LedgerUnavailable):
        _ = pairs.connection
    may_end.set()
    thread.join(20)
    assert kept(location) == []


# --- values, statements, rows -----------------------------------------------------------------------------


class Colour(StrEnum):
    RED = "red"


REFUSED = {
    "NUL": ("a\0b", "invalid_text"),
    "lone surrogate": ("a\ud83db", "invalid_text"),
    "NaN": (float("nan"), "invalid_number"),
    "infinity": (float("inf"), "invalid_number"),
    "minus infinity": (float("-inf"), "invalid_number"),
    "a fraction": (1.5, "invalid_number"),
    "2**63": (2**63, "invalid_number"),
    "-2**63 - 1": (-(2**63) - 1, "invalid_number"),
    "5000 digits": (10**5000, "invalid_number"),
    "1e30": (1e30, "invalid_number"),
    "Decimal": (Decimal(1), "invalid_value"),
    "datetime": (datetime(2026, 1, 1, tzinfo=UTC), "invalid_value"),
    "list": ([1], "invalid_value"),
}
TAKEN = [
    ("", ""),
    ("ü€😀\n\t'\"\\", "ü€😀\n\t'\"\\"),
    (2**63 - 1, 2**63 - 1),
    (-(2**63), -(2**63)),
    (0, 0),
    (4.0, 4),
    (True, 1),
    (False, 0),
    (None, None),
    (Colour.RED, "red"),
    (b"\x00\xff", b"\x00\xff"),
]


def test_hazard_34_35_36_what_one_engine_could_not_hold_is_refused_on_both(db: Database) -> None:
    def category(value: Any) -> str:
        with pytest.raises(IllegalMove) as refused:
            db.connection.execute("SELECT ? AS x", (value,))
        return refused.value.category

    assert {name: category(value) for name, (value, _) in REFUSED.items()} == {
        name: expected for name, (_, expected) in REFUSED.items()
    }


def test_what_both_engines_can_hold_comes_back_as_it_was(db: Database) -> None:
    found = [db.connection.execute("SELECT ? AS x", (given,)).rows[0]["x"] for given, _ in TAKEN]
    assert found == [expected for _, expected in TAKEN]
    assert [type(value) for value in found] == [type(expected) for _, expected in TAKEN]


def test_a_row_answers_by_index_by_name_as_a_tuple_and_as_a_dict(db: Database) -> None:
    row = db.connection.execute("SELECT 1 AS one, 'zwei' AS two, 3 AS three").fetchone()
    assert row
    assert (row[0], row["two"], row[-1], len(row)) == (1, "zwei", 3, 3)
    assert row.keys() == ["one", "two", "three"]
    assert tuple(row) == (1, "zwei", 3)
    assert dict(row) == {"one": 1, "two": "zwei", "three": 3}
    with pytest.raises(LookupError):
        row["four"]


def test_of_two_columns_with_one_name_the_first_answers(db: Database) -> None:
    row = db.connection.execute("SELECT 1 AS x, 2 AS x").rows[0]
    assert (row["x"], row.keys(), tuple(row)) == (1, ["x", "x"], (1, 2))


def test_sums_and_averages_are_the_same_kinds_of_number(pairs: Database) -> None:
    for n in (1, 2, 2**40):
        add(pairs.connection, n, "left")
    total, mean = pairs.connection.execute("SELECT sum(n), avg(n) FROM pairs WHERE n < 3").rows[0]
    assert (total, type(total), mean, type(mean)) == (3, int, 1.5, float)
    assert tuple(pairs.connection.execute("SELECT sum(n), sum(n) FROM pairs WHERE n > 3").rows[0]) == (2**40, 2**40)


def test_question_marks_and_percent_signs_in_quotes_and_comments_are_text(db: Database) -> None:
    sql = """
        SELECT 'a?b' AS a, '100% of %s, %(x)s' AS b, 'it''s ?' AS c, ? AS "d?", -- isn't this one, too?
               'x' LIKE '%x%' AS e -- 50%
    """
    row = db.connection.execute(sql, ("here",)).rows[0]
    assert tuple(row) == ("a?b", "100% of %s, %(x)s", "it's ?", "here", 1)
    assert row["d?"] == "here"
    assert db.connection.execute("SELECT 7 % 4").rows[0][0] == 3


def test_the_engine_words_are_understood_by_both(db: Database) -> None:
    for words in ("<for update>", "<for share>", "<for update> <skip locked>"):
        with db.transaction() as connection:
            assert connection.execute(f"SELECT value FROM lease_tokens WHERE id = ? {words}", (1,)).rowcount == 1


def test_a_result_is_read_once_from_front_to_back(pairs: Database) -> None:
    for n in (1, 2, 3):
        add(pairs.connection, n, "left")
    result = pairs.connection.execute("SELECT n FROM pairs ORDER BY n")
    first = result.fetchone()
    assert first
    assert first["n"] == 1
    assert [row["n"] for row in result] == [2, 3]
    assert (result.fetchone(), result.fetchall(), result.rowcount) == (None, [], 3)


ROWCOUNTS = [
    ("INSERT INTO pairs VALUES (1, 'a'), (2, 'b'), (3, 'b')", 3),
    ("INSERT INTO pairs VALUES (1, 'a') ON CONFLICT DO NOTHING", 0),
    ("INSERT INTO pairs VALUES (1, 'a') ON CONFLICT (n, half) DO UPDATE SET n = 1 WHERE pairs.n > 5", 0),
    ("INSERT INTO pairs VALUES (1, 'a') ON CONFLICT (n, half) DO UPDATE SET n = 1 WHERE pairs.n < 5", 1),
    ("UPDATE pairs SET half = 'b' WHERE n = 1", 1),
    ("UPDATE pairs SET half = half", 3),
    ("UPDATE pairs SET half = 'x' WHERE n = 99", 0),
    ("UPDATE pairs SET half = half WHERE n < 3 RETURNING n", 2),
    ("UPDATE pairs SET half = half WHERE n > 98 RETURNING n", 0),
    (
        "-- why\nWITH few AS (SELECT 1 AS n UNION SELECT 2) UPDATE pairs SET half = 'c' WHERE n IN (SELECT n FROM few)",
        2,
    ),
    ("WITH few AS (SELECT n FROM pairs WHERE n > 98) DELETE FROM pairs WHERE n IN (SELECT n FROM few)", 0),
    ("WITH many AS (SELECT n + 10 AS n FROM pairs) INSERT INTO pairs SELECT n, 'd' FROM many", 3),
    ("SELECT * FROM pairs WHERE n > 2", 4),
    ("SELECT * FROM pairs WHERE n > 98", 0),
    ("DELETE FROM pairs WHERE n > 2", 4),
    ("CREATE TABLE made (n INTEGER)", -1),
]


def test_a_rowcount_means_the_same_on_both_engines(pairs: Database) -> None:
    assert [(sql, pairs.connection.execute(sql).rowcount) for sql, _ in ROWCOUNTS] == ROWCOUNTS


ADD = "INSERT INTO pairs (n, half) VALUES (?, ?) ON CONFLICT DO NOTHING"


def test_one_statement_for_many_rows_changes_all_of_them_and_counts_them(pairs: Database, location: Location) -> None:
    with pairs.transaction() as connection:
        assert connection.executemany(ADD, [(n, "left") for n in range(3)]) == 3
        assert connection.executemany(ADD, [(n, "left") for n in range(5)]) == 2
    assert kept(location) == [(n, "left") for n in range(5)]


def test_one_statement_for_many_rows_needs_a_transaction(pairs: Database, location: Location) -> None:
    with pytest.raises(LedgerFault):
        pairs.connection.executemany(ADD, [(1, "left")])
    assert kept(location) == []


@pytest.mark.parametrize("last", [(None, "left"), (2, "a\0b")], ids=["constraint", "value"])
def test_a_failed_statement_of_many_is_the_last_one_of_its_transaction(
    pairs: Database, location: Location, last: tuple[Any, str]
) -> None:
    with pytest.raises(LedgerFault), pairs.transaction() as connection:
        with suppress(ConstraintBroken, IllegalMove):
            connection.executemany(ADD, [(1, "left"), last])
        add(connection, 3, "left")
    assert kept(location) == []


def test_a_row_that_breaks_a_constraint_is_refused_with_one_error(pairs: Database) -> None:
    for sql in (
        "INSERT INTO pairs (n, half) VALUES (NULL, 'a')",
        "INSERT INTO pairs (n, half) VALUES ('eleven', 'a')",
        "INSERT INTO pairs (n, half) VALUES (1, 'a'), (1, 'a')",
        "INSERT INTO sows SELECT 's', 'no such outcome', 's', 'operator', 'm', NULL, 'DRAFT', 1",
        "INSERT INTO lease_tokens (id, value) VALUES (2, 0)",
    ):
        with pytest.raises(ConstraintBroken) as refused:
            pairs.connection.execute(sql)
        assert refused.value.category == "constraint_broken"
        assert refused.value.why
    assert pairs.connection.execute("INSERT INTO pairs (n, half) VALUES (1, 'a')").rowcount == 1


def test_a_statement_the_engine_does_not_understand_is_a_ledger_fault(db: Database) -> None:
    for sql in ("SELEKT 1", "SELECT * FROM nothing", "SELECT ?"):
        with pytest.raises(LedgerFault) as refused:
            db.connection.execute(sql)
        assert refused.value.category == "ledger_fault"


def test_a_read_only_ledger_reads_and_refuses_to_write(pairs: Database, location: Location) -> None:
    add(pairs.connection, 1, "left")
    reader = location.open(read_only=True)
    with pytest.raises(LedgerUnavailable):
        add(reader.connection, 2, "left")
    with pytest.raises(LedgerUnavailable), reader.transaction() as connection:
        add(connection, 2, "left")
    assert [tuple(row) for row in reader.connection.execute("SELECT * FROM pairs")] == [(1, "left")]
    reader.close()


def test_a_read_only_transaction_sees_one_state(pairs: Database, location: Location) -> None:
    count = "SELECT count(*) FROM pairs"
    reader = location.open(read_only=True)
    with reader.transaction() as connection:
        assert connection.execute(count).rows[0][0] == 0
        add(pairs.connection, 1, "left")
        assert connection.execute(count).rows[0][0] == 0
    assert reader.connection.execute(count).rows[0][0] == 1
    reader.close()


# --- time -------------------------------------------------------------------------------------------------

MOMENTS = st.datetimes(
    datetime(1, 1, 2),  # noqa: DTZ001 - the zones follow
    datetime(9999, 12, 30),  # noqa: DTZ001 - the zones follow
    timezones=st.sampled_from([UTC, ZoneInfo("America/New_York"), ZoneInfo("Asia/Kathmandu")]),
)  # a day from the ends of the calendar, beyond which UTC has no name for a moment


@given(MOMENTS, MOMENTS)
def test_hazard_47_stored_time_keeps_order_and_comes_back(one: datetime, other: datetime) -> None:
    assert (micros(one) < micros(other)) == (one.astimezone(UTC) < other.astimezone(UTC))
    assert moment(micros(one)) == one.astimezone(UTC)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)), max_size=8))  # noqa: DTZ001
def test_hazard_47_the_order_of_the_database_is_the_order_of_time(pairs: Database, moments: list[datetime]) -> None:
    with suppress(ZeroDivisionError), pairs.transaction() as connection:
        for position, each in enumerate(moments):
            connection.execute("INSERT INTO pairs (n, half) VALUES (?, ?)", (micros(each), str(position)))
        found = connection.execute("SELECT n FROM pairs ORDER BY n").fetchall()
        assert [moment(row["n"]) for row in found] == sorted(moments)
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("when", "stored"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), -1),
        (datetime(2106, 2, 7, 6, 28, 16, tzinfo=UTC), 2**32 * 1_000_000),
        (datetime(1, 1, 1, tzinfo=UTC), FIRST_MICROS),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), LAST_MICROS),
    ],
)
def test_hazard_46_the_years_where_others_break(when: datetime, stored: int) -> None:
    assert micros(when) == stored
    assert moment(stored) == when


def test_hazard_47_a_time_without_a_zone_names_no_moment() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        micros(datetime(2026, 1, 1))  # noqa: DTZ001
    assert micros(datetime(2026, 1, 1, tzinfo=UTC)) == 1_767_225_600_000_000


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_new_york")
def test_hazard_46_the_hour_that_comes_twice_is_two_hours(db: Database) -> None:
    wall = datetime(2026, 11, 1, 1, 30, tzinfo=ZoneInfo("America/New_York"))
    first, second = micros(wall.replace(fold=0)), micros(wall.replace(fold=1))
    assert second - first == timedelta(hours=1) / timedelta(microseconds=1)
    assert moment(second).tzinfo is UTC
    assert abs(SystemClock()().timestamp() - time.time()) < 5
    assert abs(db.now().timestamp() - time.time()) < 60


def test_hazard_46_time_goes_on_inside_a_transaction(db: Database) -> None:
    with db.immediate():
        begun = db.now()
        assert begun.tzinfo is UTC
        eventually(lambda: db.now() > begun)


def test_an_injected_clock_is_the_ledgers_and_a_given_one_goes_before_it(
    location: Location, clock: ManualClock
) -> None:
    db = location.open(clock=clock)
    assert db.now() == db.clock() == clock()
    clock.advance(timedelta(hours=-1))
    assert db.now() == clock()
    other = ManualClock(datetime(2106, 2, 8, tzinfo=UTC))
    assert db.now(other) == other()
    db.close()


def test_hazard_46_events_are_ordered_by_sequence_when_the_clock_jumps_back(db: Database, clock: ManualClock) -> None:
    for kind in ("first", "second", "third"):
        journal.record(db.connection, kind, "subject", actor="actor", at=clock())
        clock.advance(timedelta(hours=-1))
    assert [event.kind for event in journal.events_of(db.connection, "subject")] == ["first", "second", "third"]


# --- tables that only grow --------------------------------------------------------------------------------

SCHEMA = "".join(migration.sql for migration in core_migrations())
APPEND_ONLY = re.findall(r"^<append only (\w+):", SCHEMA, re.MULTILINE)
KEYS = {
    "receipts": ["id", "attempt_id"],
    "acceptances": ["outcome_id"],
    "rulings": ["id"],
    "assistant_delegations": ["child_id"],
    "effects": ["seq", "operation_id"],
}
LINES = {
    "events": "INSERT INTO events (at, kind, subject, actor, detail) VALUES (1, 'k', 's', 'a', '{}')",
    "receipts": """
        INSERT INTO receipts (id, assignment_id, attempt_id, actor_id, status, failure_category, summary, detail,
                              created_at)
        SELECT 'r', assignment_id, id, actor_id, 'completed', '', 's', '{}', 1 FROM execution_attempts
    """,
    "evidence": """
        INSERT INTO evidence (sow_id, assignment_id, kind, detail, recorded_by, created_at)
        SELECT sow_id, id, 'k', '{}', 'a', 1 FROM assignments
    """,
    "verifications": """
        INSERT INTO verifications (subject, assignment_id, verifier_id, passed, reason, detail, created_at)
        SELECT sow_id, id, 'v', 1, 'r', '{}', 1 FROM assignments
    """,
    "reviews": """
        INSERT INTO reviews (sow_id, assignment_id, reviewer_id, approved, note, created_at)
        SELECT sow_id, id, 'r', 1, 'n', 1 FROM assignments
    """,
    "acceptances": "INSERT INTO acceptances SELECT id, 'a', '{}', 1 FROM outcomes",
    "rulings": "INSERT INTO rulings SELECT 'r', id, 'd', 'p', 1 FROM sows",
    "heartbeats": "INSERT INTO heartbeats (at, source, process_identity, host) VALUES (1, 's', 'p', 'h')",
    "assistant_transcript": """
        INSERT INTO assistant_transcript (work_id, generation, message, created_at)
        SELECT id, 1, '{}', 1 FROM assistant_work
    """,
    "assistant_delegations": "INSERT INTO assistant_delegations SELECT id, id, 1, 1, 1 FROM assistant_work",
    "effects": """
        INSERT INTO effects (operation_id, work_id, generation, epoch, tool, arguments, arguments_sha256, created_at)
        SELECT 'op', id, 1, 'e', 't', '{}', '', 1 FROM assistant_work
    """,
    "effect_ends": """
        INSERT INTO effect_ends (operation_id, outcome, actor, reason, created_at)
        SELECT operation_id, 'done', '', '', 1 FROM effects
    """,
    "assistant_evidence": """
        INSERT INTO assistant_evidence (work_id, generation, call_id, code, detail, created_at)
        SELECT id, 1, 'c', 'code', 'detail', 1 FROM assistant_work
    """,
}
"""One plain insert for each table that only grows."""


def test_the_tables_that_must_only_grow_are_the_ones_that_do() -> None:
    promised = {"events", "receipts", "evidence", "verifications", "reviews", "acceptances", "rulings", "heartbeats"}
    promised |= {"assistant_transcript", "assistant_delegations", "assistant_evidence", "effects", "effect_ends"}
    assert set(APPEND_ONLY) == promised == set(LINES)


@pytest.fixture
def history(db: Database, clock: ManualClock) -> Database:
    """A ledger with a line in each table that only grows."""
    run_of(db, clock)
    assistant_work.enqueue(db, "origin", "session", "prompt")
    for table in APPEND_ONLY:
        assert db.connection.execute(LINES[table]).rowcount == 1
    return db


def attacks(table: str, engine: str) -> list[str]:
    key = KEYS.get(table, ["seq"])
    copy = f"SELECT * FROM {table} LIMIT 1"
    when = "at" if "(at," in LINES[table] else "created_at"
    upserts = [f"ON CONFLICT ({each}) DO UPDATE SET {when} = 2" for each in key]
    both = [f"UPDATE {table} SET {when} = 2", f"DELETE FROM {table}", f"DELETE FROM {table} WHERE {when} = 1"]
    if engine == "sqlite":
        return [*both, f"INSERT OR REPLACE INTO {table} {copy}", f"REPLACE INTO {table} {copy}"] + [
            f"INSERT INTO {table} SELECT * FROM ({copy}) WHERE TRUE {upsert}" for upsert in upserts
        ]
    return [*both, f"TRUNCATE {table} CASCADE"] + [
        f"INSERT INTO {table} OVERRIDING SYSTEM VALUE SELECT * FROM ({copy}) x WHERE TRUE {upsert}"
        for upsert in upserts
    ]


def test_what_is_written_in_them_cannot_be_changed_removed_or_replaced(history: Database) -> None:
    for table in APPEND_ONLY:
        before = rows(history, table)
        assert before
        for attack in attacks(table, history.engine):
            with pytest.raises(ConstraintBroken) as refused:
                history.connection.execute(attack)
            assert "append-only" in refused.value.why, attack
        assert rows(history, table) == before
    assert history.connection.execute(LINES["events"]).rowcount == 1


def test_a_refused_change_takes_its_whole_transaction_with_it(history: Database) -> None:
    before = rows(history, "events")
    with pytest.raises(ConstraintBroken), history.immediate() as connection:
        connection.execute(LINES["events"])
        connection.execute("DELETE FROM events")
    assert rows(history, "events") == before
