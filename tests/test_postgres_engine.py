"""What only PostgreSQL has: a server that cuts off who is frozen, sessions with settings, schemas, passwords."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from conftest import Location
from support import BUMP, answer, bump, child, counter, eventually, heard

from sovereign_agent import relay
from sovereign_agent.database import Database
from sovereign_agent.errors import ConfigurationFault, Contention, LedgerFault, LedgerUnavailable, SovereignError
from sovereign_agent.storage.postgres import render

IMPATIENT = timedelta(milliseconds=300)


@pytest.fixture
def engine() -> str:
    return "postgresql"


def cut(db: Database, session: Database) -> None:
    """End a session from the server's side."""
    pid = session.connection.execute("SELECT pg_backend_pid()").rows[0][0]
    db.connection.execute("SELECT pg_terminate_backend(?)", (pid,))
    eventually(lambda: not db.connection.execute("SELECT 1 FROM pg_stat_activity WHERE pid = ?", (pid,)).rows)


# --- frozen, cut off, back again --------------------------------------------------------------------------


def freezing(pipe: Any, location: Location) -> None:
    db = location.open(patience=IMPATIENT)
    try:
        with db.immediate() as connection:
            connection.execute("UPDATE lease_tokens SET value = 1000")
            pipe.send("holding")
            pipe.recv()
            connection.execute(BUMP)
    except SovereignError as error:
        pipe.send(type(error).__name__)
    bump(db)
    pipe.send("went on")


def test_a_frozen_process_is_named_cut_off_by_the_server_and_finds_out(db: Database, location: Location) -> None:
    waiter = location.open(patience=IMPATIENT)
    with child(freezing, location) as (process, pipe):
        assert heard(pipe) == "holding"
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Contention) as busy, waiter.immediate():
            raise AssertionError("the ledger lock was given twice")
        assert f"{process.pid}@{socket.gethostname()}" in busy.value.why
        assert "idle in transaction" in busy.value.why
        eventually(lambda: answer(bump, waiter) == "done", within=10)
        assert counter(db) == 1
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go on")
        assert heard(pipe) == "LedgerUnavailable"
        assert heard(pipe) == "went on"
    assert counter(db) == 2
    waiter.close()


def test_a_row_that_another_transaction_holds_ends_in_contention_too(db: Database, location: Location) -> None:
    waiter = location.open(patience=IMPATIENT)
    with db.transaction() as connection:
        connection.execute(BUMP)
        with pytest.raises(Contention) as busy, waiter.transaction() as late:
            late.execute(BUMP)
        assert busy.value.category == "ledger_busy"
    with waiter.transaction() as late:
        assert late.execute(BUMP).rowcount == 1
    assert counter(db) == 2
    waiter.close()


def test_a_session_cut_inside_a_transaction_fails_it_and_the_next_one_works(db: Database, location: Location) -> None:
    session = location.open()
    with pytest.raises(LedgerUnavailable), session.immediate() as connection:
        connection.execute(BUMP)
        cut(db, session)
        connection.execute(BUMP)
    bump(session)
    assert counter(db) == 1
    session.close()


@pytest.mark.parametrize("kind", ["immediate", "transaction"])
def test_a_session_cut_before_its_commit_does_not_claim_to_have_committed(
    db: Database, location: Location, kind: str
) -> None:
    session = location.open()
    with pytest.raises(LedgerUnavailable), getattr(session, kind)() as connection:
        connection.execute(BUMP)
        cut(db, session)
    assert counter(db) == 0
    session.close()


@pytest.mark.parametrize("kind", ["immediate", "transaction"])
def test_a_session_cut_while_idle_is_not_noticed_by_the_next_transaction(
    db: Database, location: Location, kind: str
) -> None:
    session = location.open()
    cut(db, session)
    assert answer(getattr(session, kind)().__enter__) == "done"
    assert answer(bump, session) == "done"
    assert counter(db) == 1
    session.close()


def test_a_read_on_a_session_cut_while_idle_fails_once(db: Database, location: Location) -> None:
    session = location.open()
    cut(db, session)
    assert answer(counter, session) == "ledger_unavailable"
    assert counter(session) == 0
    session.close()


def test_a_closed_ledger_does_not_open_another_session(db: Database) -> None:
    connection: Any = db.connection
    db.close()
    acts = (lambda: connection.execute("SELECT 1"), connection.tables, connection.now)
    said = [answer(act) for act in acts]
    connection._raw.close()  # whatever it opened all the same
    assert said == ["ledger_closed"] * 3


def test_hazard_54_a_commit_that_the_server_answers_with_rollback_is_no_commit(db: Database) -> None:
    connection: Any = db.connection
    with pytest.raises(LedgerFault) as refused, db.immediate():
        connection.execute(BUMP)
        with pytest.raises(psycopg.Error):
            connection._raw.execute("SELECT 1/0")  # behind the counter: only the server knows
        assert not connection.in_transaction
    assert refused.value.category == "transaction_ended"
    assert counter(db) == 0
    connection._raw.execute("BEGIN")
    connection._raw.execute("UPDATE lease_tokens SET value = 9")
    with pytest.raises(psycopg.Error):
        connection._raw.execute("SELECT 1/0")
    with pytest.raises(LedgerFault, match="not committed"):
        connection._commit()
    assert counter(db) == 0


def test_a_locked_row_is_skipped_when_asked_to_and_waited_for_otherwise(db: Database, location: Location) -> None:
    waiter = location.open(patience=IMPATIENT)
    with db.transaction() as connection:
        connection.execute("SELECT * FROM lease_tokens <for share>")
        with waiter.transaction() as late:
            assert late.execute("SELECT * FROM lease_tokens <for share>").rowcount == 1
            assert late.execute("SELECT * FROM lease_tokens <for update> <skip locked>").rowcount == 0
        with pytest.raises(Contention), waiter.transaction() as late:
            late.execute("SELECT * FROM lease_tokens <for update>")
    waiter.close()


# --- sessions ---------------------------------------------------------------------------------------------

SETTINGS = {
    "synchronous_commit": "on",
    "lock_timeout": "300ms",
    "idle_in_transaction_session_timeout": "600ms",
    "statement_timeout": "3600ms",
    "transaction_isolation": "read committed",
    "transaction_read_only": "off",
    "application_name": f"sovereign-agent {os.getpid()}@{socket.gethostname()}",
}


def settings_of(db: Database, *names: str) -> dict[str, str]:
    return {name: db.connection.execute("SELECT current_setting(?)", (name,)).rows[0][0] for name in names}


def test_every_session_has_the_promised_settings(db: Database, location: Location) -> None:
    db.connection.execute("ALTER ROLE CURRENT_USER SET synchronous_commit = off")
    try:
        session = location.open(patience=IMPATIENT)
        assert settings_of(session, *SETTINGS) == SETTINGS
        keepalive = session.connection._raw.info.get_parameters()  # type: ignore[attr-defined]
        assert (keepalive["keepalives_idle"], keepalive["keepalives_count"]) == ("10", "3")
        session.close()
        reader = location.open(read_only=True)
        assert settings_of(reader, "transaction_read_only", "transaction_isolation") == {
            "transaction_read_only": "on",
            "transaction_isolation": "repeatable read",
        }
        reader.close()
    finally:
        db.connection.execute("ALTER ROLE CURRENT_USER RESET synchronous_commit")


def test_a_statement_that_runs_too_long_ends_in_contention(location: Location) -> None:
    db = location.open(patience=timedelta(milliseconds=20))
    started = time.monotonic()
    with pytest.raises(Contention) as slow, db.immediate() as connection:
        connection.execute(BUMP)
        connection.execute("SELECT pg_sleep(60)")
    assert time.monotonic() - started < 10
    assert "statement timeout" in slow.value.why
    assert "backend" not in slow.value.why  # nobody but itself held anything
    assert counter(db) == 0
    db.close()


def test_a_placeholder_is_a_question_mark_outside_quotes_and_comments() -> None:
    sql = """SELECT ?, 'it''s ?', "a?b" -- isn't ?
      , ? % 10"""
    assert (
        render(sql)
        == """SELECT %s, 'it''s ?', "a?b" -- isn't ?
      , %s %% 10"""
    )
    assert render("SELECT 1 <for update> <skip locked>") == "SELECT 1 FOR UPDATE SKIP LOCKED"


def test_many_transactions_in_one_session_stay_one_message_each(location: Location) -> None:
    db = location.open()
    for kind in (db.immediate, db.transaction):
        for _ in range(12):  # more than the driver's threshold for preparing a statement
            with kind() as connection:
                connection.execute(BUMP)
    assert counter(db) == 24
    db.close()


# --- two ledgers in one database --------------------------------------------------------------------------


@pytest.fixture
def neighbours(location: Location) -> Iterator[tuple[Database, Database]]:
    """Two ledgers in two schemas of one database, named by the URL's own options."""
    with psycopg.connect(location.ledger, autocommit=True) as admin:
        for schema in ("left_one", "right_one"):
            admin.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
    opened = [
        Database(
            f"{location.ledger}&options={quote(f'-c search_path={schema} -c work_mem=7MB -c synchronous_commit=off')}",
            root=location.root / schema,
            patience=IMPATIENT,
        )
        for schema in ("left_one", "right_one")
    ]
    yield opened[0], opened[1]
    for db in opened:
        db.close()


def test_two_ledgers_in_two_schemas_do_not_share_tables_or_the_ledger_lock(
    neighbours: tuple[Database, Database], location: Location
) -> None:
    left, right = neighbours
    assert settings_of(left, "search_path", "work_mem", "synchronous_commit") == {
        "search_path": "left_one",
        "work_mem": "7MB",
        "synchronous_commit": "on",  # what a commit means is not the URL's to say
    }
    with left.immediate() as in_left:
        in_left.execute(BUMP)
        assert [answer(bump, right), answer(bump, right)] == ["done", "done"]
    assert (counter(left), counter(right)) == (1, 2)
    same = Database(left.location, root=location.root / "left_one", patience=IMPATIENT)
    with left.immediate(), pytest.raises(Contention), same.immediate():
        raise AssertionError("two sessions of one ledger had its lock")
    same.close()


def test_a_transaction_does_not_wait_for_the_ledger_lock(db: Database, location: Location) -> None:
    neighbour = location.open(patience=IMPATIENT)
    with db.immediate(), neighbour.transaction() as connection:
        connection.execute(BUMP)
    assert counter(db) == 1
    neighbour.close()


# --- what is not there, or not ours -----------------------------------------------------------------------


def test_an_empty_database_stays_empty_without_create(make_location: Callable[..., Location]) -> None:
    location = make_location(migrated=False)
    for options in ({"create": False}, {"read_only": True}):
        assert answer(location.open, **options) == "schema_older"
    with psycopg.connect(location.ledger) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
    location.open().close()


def test_a_table_that_is_another_users_makes_the_database_foreign_too(make_location: Callable[..., Location]) -> None:
    location = make_location(migrated=False)
    with psycopg.connect(location.ledger, autocommit=True) as admin:
        admin.execute("CREATE TABLE customers (name TEXT)")
        admin.execute("CREATE ROLE sovereign_guest LOGIN")
        try:
            admin.execute("GRANT CREATE ON SCHEMA public TO sovereign_guest")
            url = location.ledger.replace(f"//{admin.info.user}@", "//sovereign_guest@")
            assert answer(Location("postgresql", url, location.root).open) == "schema_foreign"
        finally:
            admin.execute("DROP OWNED BY sovereign_guest")
            admin.execute("DROP ROLE sovereign_guest")


def test_a_postgresql_ledger_needs_a_root(location: Location) -> None:
    with pytest.raises(ConfigurationFault):
        Database(location.ledger)
    db = Database(location.ledger, root=location.root)
    assert db.path == location.root.resolve() / ".sovereign" / "organization.db"
    db.close()


SECRET = "hunter2"  # noqa: S105


@pytest.mark.parametrize(
    ("url", "category"),
    [
        (f"postgresql://u:{SECRET}@127.0.0.1:1/db", "ledger_unavailable"),
        (f"postgresql://u:{SECRET}@nowhere.invalid/db", "ledger_unavailable"),
        (f"postgresql://u:{SECRET}@127.0.0.1:99999/db", "ledger_unavailable"),
        (f"postgresql://u:{SECRET}%zz@127.0.0.1/db", "ledger_url"),
        (f"postgresql://u:a/{SECRET}@127.0.0.1/db", "ledger_url"),
        (f"postgresql://u:a@{SECRET}@127.0.0.1/db", "ledger_url"),
        (f"postgresql://u:p@127.0.0.1/db?password={SECRET}&nonsense=1", "ledger_url"),
        (f"postgres://u:p@127.0.0.1/db?{SECRET}", "ledger_url"),
    ],
)
def test_a_password_in_the_url_is_never_shown(url: str, category: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable) as refused:
        Database(url, root=tmp_path)
    assert refused.value.category == category
    assert SECRET not in everything_shown(refused.value)


def everything_shown(error: BaseException) -> str:
    answers = error.answers() if isinstance(error, SovereignError) else []
    return "\n".join([repr(error), repr(answers), *traceback.format_exception(error)])


def test_a_wrong_password_or_database_is_refused_without_showing_the_right_one(location: Location) -> None:
    with psycopg.connect(location.ledger, autocommit=True) as admin:
        hba = Path(str(admin.execute("SHOW hba_file").fetchone()[0]))  # type: ignore[index]
        if not os.access(hba, os.W_OK):
            pytest.skip("this server's pg_hba.conf is not ours to change")
        before = hba.read_text()
        admin.execute(f"CREATE ROLE sovereign_locked SUPERUSER LOGIN PASSWORD '{SECRET}'")  # type: ignore[arg-type]
        try:
            hba.write_text(f"local all sovereign_locked scram-sha-256\n{before}")
            admin.execute("SELECT pg_reload_conf()")
            right = location.ledger.replace(f"//{admin.info.user}@", f"//sovereign_locked:{SECRET}@")
            wrong = right.replace(SECRET, f"not-{SECRET}")
            elsewhere = right.replace(f"/{admin.info.dbname}?", "/no_such_database?")
            eventually(lambda: answer(Database, wrong, root=location.root) == "ledger_unavailable")
            for url in (wrong, elsewhere):
                with pytest.raises(LedgerUnavailable) as refused:
                    Database(url, root=location.root)
                assert SECRET not in everything_shown(refused.value)
            Database(right, root=location.root).close()
        finally:
            hba.write_text(before)
            admin.execute("SELECT pg_reload_conf()")
            admin.execute("DROP ROLE sovereign_locked")


def test_threads_do_not_wait_for_each_others_sessions(db: Database) -> None:
    seen: list[int] = []
    with db.transaction() as connection:
        connection.execute(BUMP)
        thread = threading.Thread(target=lambda: seen.append(counter(db)))
        thread.start()
        thread.join(10)
    assert seen == [0]
    assert counter(db) == 1


def test_a_plan_that_another_hosts_migration_made_old_costs_one_repeated_call(
    fresh_url: Callable[..., str], tmp_path: Path
) -> None:
    url = fresh_url()
    with closing(Database(url, root=tmp_path)) as db, closing(Database(url, root=tmp_path)) as other:
        message = relay.send(db, "master-course", "operator-course", "subject", "body")
        for _ in range(10):  # often enough for the session to keep the plan
            relay.get_message(db, message.id)
        other.connection.execute("ALTER TABLE messages ADD COLUMN added_later TEXT")
        with pytest.raises(SovereignError) as refused, db.transaction() as connection:
            connection.execute("SELECT * FROM messages WHERE id = ?", (message.id,))
        assert isinstance(refused.value, Contention)
        assert relay.get_message(db, message.id) == message
        assert relay.claim(db, message.id, "operator-course").state == "CLAIMED"


def test_what_the_server_does_not_support_is_no_contention(db: Database) -> None:
    assert answer(db.connection.execute, "SELECT count(*) FROM messages FOR UPDATE") == "ledger_fault"
    assert answer(db.connection.execute, "SELECT count(*) FROM messages") == "done"
