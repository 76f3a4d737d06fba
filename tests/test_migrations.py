"""What the schema promises: made once, whole or not at all, never by a program that does not know it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest
from conftest import Location
from support import answer, at_one_barrier, killed_after_statement, rows

from sovereign_agent.clock import EPOCH
from sovereign_agent.database import Database, Migration
from sovereign_agent.errors import ConstraintBroken, LedgerFault, SovereignError
from sovereign_agent.storage import migrate
from sovereign_agent.storage.migrate import CORE, STAMPS, checksum, core_migrations

SHELVES = Migration(
    1,
    "shelves",
    """
-- home: store
CREATE TABLE shelves (
    name TEXT PRIMARY KEY NOT NULL,
    size <integer> NOT NULL
) <strict>;

INSERT INTO shelves (name, size) VALUES ('top; or so', 3);
CREATE TABLE sales (seq <identity>, shelf TEXT NOT NULL REFERENCES shelves (name)) <strict>;
<append only sales: seq>
""",
    min_writer=1,
)
LABELS = Migration(2, "labels", "CREATE TABLE labels (shelf TEXT NOT NULL REFERENCES shelves (name)) <strict>;", 1)
BROKEN = Migration(
    2, "labels", "CREATE TABLE labels (shelf TEXT NOT NULL) <strict>;\nINSERT INTO labels VALUES (NULL);", 1
)
NEWEST = core_migrations()[-1].number


@pytest.fixture
def empty(make_location: Callable[..., Location]) -> Location:
    """A place where there is no ledger yet."""
    return make_location(migrated=False)


def contents(location: Location) -> object:
    """All that there is, byte for byte or row for row."""
    if location.engine == "sqlite":
        folder = Path(location.ledger).parent
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    with psycopg.connect(location.ledger) as connection:
        tables = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' ORDER BY 1"
        ).fetchall()
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in tables}  # type: ignore[arg-type]


def run_by_hand(location: Location, *statements: str) -> None:
    """What another program does to the database."""
    connection: Any
    if location.engine == "sqlite":
        Path(location.ledger).parent.mkdir(exist_ok=True)
        connection = sqlite3.connect(location.ledger, isolation_level=None)
    else:
        connection = psycopg.connect(location.ledger, autocommit=True)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def stamp(location: Location, component: str, number: int, min_writer: int) -> None:
    """What a newer version of this program leaves."""
    run_by_hand(
        location,
        f"INSERT INTO {STAMPS} VALUES ('{component}', {number}, 'later', 'sum', {min_writer}, 1)",
    )


def stamps(db: Database) -> list[tuple[Any, ...]]:
    found = rows(db, STAMPS)
    return sorted((row["component"], row["number"], row["name"], row["checksum"], row["min_writer"]) for row in found)


def expected_stamps(component: str, *migrations: Migration) -> list[tuple[Any, ...]]:
    return [(component, each.number, each.name, checksum(each), each.min_writer) for each in migrations]


def refused(location: Location, **options: Any) -> SovereignError:
    """The refusal to open it, after seeing that opening has changed nothing."""
    before = contents(location)
    with pytest.raises(SovereignError) as caught:
        location.open(**options)
    assert contents(location) == before
    return caught.value


# --- first start ------------------------------------------------------------------------------------------


def test_a_first_start_makes_the_tables_and_their_stamps_and_a_second_one_nothing(empty: Location) -> None:
    db = empty.open()
    assert stamps(db) == expected_stamps(CORE, *core_migrations())
    assert rows(db, STAMPS)[0]["applied_at"] == pytest.approx((db.now() - EPOCH).total_seconds() * 1e6, abs=60e6)
    assert rows(db, "lease_tokens") == [{"id": 1, "value": 0}]
    made = rows(db, STAMPS), db.connection.tables()
    db.close()
    db = empty.open(create=False)
    assert (rows(db, STAMPS), db.connection.tables()) == made
    db.close()


def first_start(_: int, location: Location) -> list[str]:
    db = location.open()
    db.extend("store", [SHELVES])
    tables = sorted(db.connection.tables())
    db.close()
    return tables


def test_hazard_71_eight_first_starts_at_one_barrier_make_one_ledger(make_location: Callable[..., Location]) -> None:
    for turn in range(4):
        location = make_location(f"turn{turn}", migrated=False)
        made = at_one_barrier(8, first_start, location)
        assert made == [made[0]] * 8
        db = location.open(create=False)
        assert stamps(db) == expected_stamps(CORE, *core_migrations()) + expected_stamps("store", SHELVES)
        assert sorted(db.connection.tables()) == made[0]
        assert len(rows(db, "shelves")) == len(rows(db, "lease_tokens")) == 1
        db.close()


def opened(location: Location) -> None:
    location.open().close()


def test_hazard_71_a_first_start_killed_half_way_is_named_as_such_and_finished_by_the_next(
    make_location: Callable[..., Location],
) -> None:
    outcomes = []
    for number in (1, 2, 3, 20, 45, 500):
        location = make_location(f"killed{number}", migrated=False)
        killed = killed_after_statement(number, opened, location)
        outcomes.append((killed, answer(location.open, create=False)))
        db = location.open()
        assert stamps(db) == expected_stamps(CORE, *core_migrations())
        assert rows(db, "lease_tokens") == [{"id": 1, "value": 0}]
        db.close()
    assert outcomes == [(True, "schema_older")] * 5 + [(False, "done")]


# --- whole or not at all ----------------------------------------------------------------------------------


def test_hazard_63_a_migration_that_fails_leaves_nothing_and_its_correction_completes(db: Database) -> None:
    db.extend("store", [SHELVES])
    with pytest.raises(ConstraintBroken):
        db.extend("store", [SHELVES, BROKEN])
    assert "labels" not in db.connection.tables()
    assert stamps(db)[-1:] == expected_stamps("store", SHELVES)
    db.extend("store", [SHELVES, LABELS])
    assert "labels" in db.connection.tables()
    assert stamps(db)[-2:] == expected_stamps("store", SHELVES, LABELS)


def extended(location: Location) -> None:
    db = location.open()
    db.extend("store", [SHELVES, LABELS])
    db.close()


def test_hazard_63_a_kill_after_any_statement_of_a_migration_leaves_whole_migrations(
    make_location: Callable[..., Location],
) -> None:
    location = make_location()
    location.open().close()
    done = set()
    for number in range(1, 100):
        killed = killed_after_statement(number, extended, location)
        db = location.open()
        tables = db.connection.tables() & {"shelves", "sales", "labels"}
        known = stamps(db)[len(core_migrations()) :]
        assert (tables, known) in (
            (set(), []),
            ({"shelves", "sales"}, expected_stamps("store", SHELVES)),
            ({"shelves", "sales", "labels"}, expected_stamps("store", SHELVES, LABELS)),
        )
        done.add(len(known))
        if not killed:
            break
        if known:  # start over, so that every statement of every migration is met
            for table in ("labels", "sales", "shelves"):
                db.connection.execute(f"DROP TABLE IF EXISTS {table}")
            db.connection.execute(f"DELETE FROM {STAMPS} WHERE component = 'store'")
        db.close()
    assert not killed
    assert done == {0, 1, 2}
    extended(location)
    db.close()


# --- refusals before a byte is written --------------------------------------------------------------------


def test_a_newer_schema_is_refused_untouched_unless_it_lets_this_program_write(location: Location) -> None:
    location.open().close()
    stamp(location, CORE, NEWEST + 1, min_writer=NEWEST)
    db = location.open(create=False)
    assert db.connection.execute("UPDATE lease_tokens SET value = value + 1").rowcount == 1
    db.close()
    stamp(location, CORE, NEWEST + 2, min_writer=NEWEST + 1)
    for options in ({}, {"create": False}, {"read_only": True}):
        error = refused(location, **options)
        assert error.category == "schema_newer"
        assert str(NEWEST + 2) in error.happened


def test_a_newer_extension_is_refused_untouched_unless_it_lets_this_program_write(location: Location) -> None:
    db = location.open()
    db.extend("store", [SHELVES])
    stamp(location, "store", 2, min_writer=1)
    db.extend("store", [SHELVES])
    stamp(location, "store", 3, min_writer=2)
    db.close()
    db = location.open()
    assert answer(db.extend, "store", [SHELVES]) == "schema_newer"
    assert answer(db.extend, "other", [LABELS]) == "done"
    db.close()


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE {STAMPS} SET checksum = 'x' WHERE component = '{CORE}'",
        f"UPDATE {STAMPS} SET number = number + 1 WHERE component = '{CORE}' AND number = {NEWEST}",
    ],
)
def test_an_altered_stamp_is_refused_untouched(location: Location, change: str) -> None:
    location.open().close()
    run_by_hand(location, change)
    for options in ({}, {"create": False}, {"read_only": True}):
        assert refused(location, **options).category == "schema_altered"


def test_an_altered_or_removed_migration_is_refused_and_the_same_text_is_not(db: Database) -> None:
    db.extend("store", [SHELVES, LABELS])
    altered = Migration(1, "shelves", SHELVES.sql.replace("3", "4"), 1)
    assert answer(db.extend, "store", [altered, LABELS]) == "schema_altered"
    assert answer(db.extend, "store", [LABELS]) == "schema_altered"
    assert answer(db.extend, "store", [LABELS, SHELVES]) == "done"
    db.connection.execute(f"DELETE FROM {STAMPS} WHERE component = 'store' AND number = 1")
    assert answer(db.extend, "store", [SHELVES, LABELS]) == "schema_altered"
    assert rows(db, "shelves") == [{"name": "top; or so", "size": 3}]


@pytest.mark.parametrize("table", ["customers (name TEXT)", "schema_migrations (version TEXT)"])
def test_the_database_of_another_application_is_refused_untouched(empty: Location, table: str) -> None:
    run_by_hand(empty, f"CREATE TABLE {table}")
    for options in ({}, {"create": False}, {"read_only": True}):
        assert refused(empty, **options).category == "schema_foreign"


# --- extensions -------------------------------------------------------------------------------------------


def test_an_extension_shares_the_ledgers_transactions_and_its_rules(db: Database) -> None:
    for _ in range(2):
        db.extend("store", [SHELVES])
    with pytest.raises(ZeroDivisionError), db.immediate() as connection:
        connection.execute("INSERT INTO sales (shelf) VALUES ('top; or so')")
        connection.execute("UPDATE lease_tokens SET value = 7")
        raise ZeroDivisionError
    assert (rows(db, "sales"), rows(db, "lease_tokens")) == ([], [{"id": 1, "value": 0}])
    with db.immediate() as connection:
        connection.execute("INSERT INTO sales (shelf) VALUES ('top; or so')")
        connection.execute("UPDATE lease_tokens SET value = 7")
    assert (rows(db, "sales"), rows(db, "lease_tokens")) == (
        [{"seq": ANY, "shelf": "top; or so"}],
        [{"id": 1, "value": 7}],
    )
    with pytest.raises(ConstraintBroken):
        db.connection.execute("DELETE FROM sales")


@pytest.mark.parametrize(
    ("sql", "category"),
    [
        ("CREATE TABLE labels (id <integer> PRIMARY KEY)", "migration_unended"),
        ("CREATE TABLE labels (id <integer> PRIMARY KEY);\nCREATE TABEL shelves (id <integer>);", "ledger_fault"),
    ],
)
def test_an_extension_that_is_no_sql_is_refused_with_a_name_and_leaves_nothing(
    sql: str, category: str, db: Database
) -> None:
    before = db.connection.tables()
    assert answer(db.extend, "labels", [Migration(1, "labels", sql, min_writer=1)]) == category
    assert db.connection.tables() == before
    db.extend("labels", [Migration(1, "labels", f"{sql.partition(chr(59))[0]};", min_writer=1)])


def extend_at_once(_: int, location: Location) -> str:
    db = location.open()
    db.extend("store", [SHELVES, LABELS])
    db.close()
    return "done"


def test_four_processes_that_extend_at_once_make_the_tables_once(location: Location) -> None:
    location.open().close()
    assert at_one_barrier(4, extend_at_once, location) == ["done"] * 4
    db = location.open()
    assert stamps(db)[len(core_migrations()) :] == expected_stamps("store", SHELVES, LABELS)
    assert len(rows(db, "shelves")) == 1
    db.close()


def test_a_host_goes_on_reading_and_writing_while_another_adds_a_column(db: Database, location: Location) -> None:
    db.extend("store", [SHELVES])
    upgraded = location.open()
    answers = []
    for number in range(20):
        insert = "INSERT INTO shelves (name, size) VALUES (?, 1)"
        answers.append(answer(db.connection.execute, insert, (str(number),)))
        answers.append(answer(db.connection.execute, "SELECT * FROM shelves WHERE name = ?", (str(number),)))
        if number == 10:
            wider = Migration(2, "wider", "ALTER TABLE shelves ADD COLUMN width <integer>;", min_writer=1)
            upgraded.extend("store", [SHELVES, wider])
    assert answers.count("ledger_busy") <= 1  # at most one call has to be repeated
    assert set(answers) - {"ledger_busy"} == {"done"}
    db.extend("store", [SHELVES])
    upgraded.close()


def test_a_read_only_ledger_wants_its_extensions_ready_made(db: Database, location: Location) -> None:
    reader = location.open(read_only=True)
    assert answer(reader.extend, "store", [SHELVES]) == "schema_older"
    assert "shelves" not in db.connection.tables()
    db.extend("store", [SHELVES])
    assert answer(reader.extend, "store", [SHELVES]) == "done"
    reader.close()


def test_a_failing_schema_statement_is_a_ledger_fault(db: Database) -> None:
    with pytest.raises(LedgerFault):
        db.extend("store", [Migration(1, "x", "CREATE TABEL a (b TEXT);", 1)])
    assert db.connection.in_transaction is False


def test_a_migration_file_says_who_may_go_on_writing() -> None:
    assert migrate._read("0007_more.sql", "CREATE TABLE a (b TEXT);") == Migration(
        7, "more", "CREATE TABLE a (b TEXT);", 7
    )
    additive = "-- min_writer: 5\nCREATE TABLE a (b TEXT);"
    assert migrate._read("0007_more.sql", additive) == Migration(7, "more", additive, 5)
