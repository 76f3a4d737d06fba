"""What only SQLite has: one file with companions, locks of the operating system, and disks that run full."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import Location
from support import (
    BUMP,
    answer,
    at_one_barrier,
    bump,
    bump_impatiently,
    child,
    counter,
    eventually,
    heard,
    holding,
    in_a_fresh_process,
    killed_in_a_process,
    run_of,
    traces,
)

from sovereign_agent import journal
from sovereign_agent.clock import ManualClock
from sovereign_agent.database import Database
from sovereign_agent.errors import ConstraintBroken, Contention, LedgerFault, LedgerUnavailable, SchemaMismatch
from sovereign_agent.storage import sqlite
from sovereign_agent.storage.migrate import CORE, STAMPS
from sovereign_agent.storage.sqlite import SQLiteConnection

IMPATIENT = timedelta(milliseconds=200)
EVENT = "INSERT INTO events (at, kind, subject, actor, detail) VALUES (1, 'k', 's', 'a', ?)"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture
def engine() -> str:
    return "sqlite"


@pytest.fixture
def path(location: Location) -> Path:
    """Where the ledger of this test lies."""
    return Path(location.ledger)


def raw_of(db: Database) -> sqlite3.Connection:
    return db.connection._raw  # type: ignore[attr-defined,no-any-return]


# --- writers ----------------------------------------------------------------------------------------------


def test_hazard_61_every_transaction_begins_as_a_writer(db: Database) -> None:
    statements: list[str] = []
    raw_of(db).set_trace_callback(statements.append)
    for kind in (db.immediate, db.transaction):
        with kind() as connection:
            connection.execute("SELECT 1")
    db.extend("none", [])
    assert [each for each in statements if each.startswith("BEGIN")] == ["BEGIN IMMEDIATE"] * 2


def reading_then_writing(pipe: Any, location: Location) -> None:
    db = location.open()
    with db.transaction() as connection:
        counter(db)
        pipe.send("read")
        pipe.recv()
        connection.execute(BUMP)
    pipe.send("written")
    pipe.recv()


def test_hazard_61_a_reader_that_goes_on_to_write_is_never_told_that_it_is_locked(
    db: Database, location: Location
) -> None:
    impatient = location.open(patience=IMPATIENT)
    with child(reading_then_writing, location) as (_, pipe):
        assert heard(pipe) == "read"
        with pytest.raises(Contention), impatient.transaction():
            raise AssertionError("a second writer got in between its read and its write")
        pipe.send("go on")
        assert heard(pipe) == "written"
        bump(impatient)
    assert counter(db) == 2
    impatient.close()


@on_linux
def test_a_waiter_is_told_which_process_holds_the_lock_and_that_it_is_stopped(db: Database, location: Location) -> None:
    waiter = location.open(patience=IMPATIENT)

    def contention() -> Contention:
        with pytest.raises(Contention) as busy, waiter.immediate():
            raise AssertionError("the write lock was given twice")
        return busy.value

    with child(holding, location) as (process, pipe):
        assert heard(pipe) == "holding"
        running = contention()
        assert (running.category, str(process.pid) in running.why, "stopped" in running.why) == (
            "ledger_busy",
            True,
            False,
        )
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        frozen = contention()
        assert re.search(rf"by process {process.pid} \(.*, stopped\)", frozen.why)
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go on")
        assert heard(pipe) == "committed"
        bump(waiter)
    assert counter(db) == 2
    waiter.close()


def test_a_killed_writer_gives_its_lock_back_at_once(db: Database, location: Location) -> None:
    waiter = location.open(patience=IMPATIENT)
    with child(holding, location) as (process, pipe):
        assert heard(pipe) == "holding"
        process.kill()
        process.join()
        bump(waiter)
    assert counter(db) == 1
    waiter.close()


# --- a disk that is full, a statement that is stopped -----------------------------------------------------


def test_hazard_62_after_a_full_disk_a_fresh_reader_finds_both_or_neither(db: Database, location: Location) -> None:
    pages = int(raw_of(db).execute("PRAGMA page_count").fetchone()[0])
    raw_of(db).execute(f"PRAGMA max_page_count = {pages + 20}")
    with pytest.raises(LedgerFault) as ended, db.immediate() as connection:
        connection.execute(EVENT, ("receipt",))
        with pytest.raises(LedgerUnavailable) as full:
            connection.execute(EVENT, ("x" * 900_000,))
        with pytest.raises(LedgerFault):
            connection.execute(BUMP)  # the terminal state, which would be durable alone
    assert "no space" in full.value.why
    assert ended.value.category == "transaction_ended"
    fresh = location.open(read_only=True)
    assert (journal.latest_events(fresh.connection), counter(fresh)) == ([], 0)
    fresh.close()
    with db.immediate() as connection:
        connection.execute(EVENT, ('"receipt"',))
        connection.execute(BUMP)
    assert (len(journal.latest_events(db.connection)), counter(db)) == (1, 1)


def test_hazard_62_a_write_that_the_disk_refuses_is_undone_whole(path: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from sovereign_agent.database import Database
from sovereign_agent.errors import LedgerFault
db = Database(Path({str(path)!r}))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
wal = Path({str(path)!r} + "-wal")
resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size + 100_000,) * 2)
try:
    with db.immediate() as connection:
        connection.execute({BUMP!r})
        connection.execute({EVENT!r}, ("x" * 900_000,))
except LedgerFault as error:
    print(type(error).__name__)
with db.immediate() as connection:
    connection.execute({EVENT!r}, ("fits",))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "LedgerUnavailable"), done.stderr
    db = Database(path)
    assert (counter(db), [row["detail"] for row in db.connection.execute("SELECT detail FROM events")]) == (0, ["fits"])
    db.close()


def test_hazard_62_a_statement_that_is_interrupted_ends_its_transaction(db: Database, location: Location) -> None:
    raw = raw_of(db)
    threading.Timer(0.3, raw.interrupt).start()
    endless = """
        INSERT INTO events (at, kind, subject, actor, detail)
        WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, 'k', 's', 'a', '{}' FROM n
    """
    with pytest.raises(LedgerFault) as ended, db.immediate() as connection:
        connection.execute(BUMP)
        with suppress(LedgerFault):
            connection.execute(endless)
        assert not connection.in_transaction
        connection.execute(BUMP)
    assert ended.value.category == "transaction_ended"
    fresh = location.open(read_only=True)
    assert (journal.latest_events(fresh.connection), counter(fresh)) == ([], 0)
    fresh.close()
    bump(db)
    assert counter(db) == 1


# --- locks and companions ---------------------------------------------------------------------------------


def test_hazard_68_another_database_on_the_same_file_does_not_drop_the_first_ones_locks(
    db: Database, location: Location
) -> None:
    with db.immediate() as connection:
        connection.execute(BUMP)
        for options in ({}, {"read_only": True}, {"create": False}):
            location.open(**options).close()
        assert at_one_barrier(1, bump_impatiently, location) == ["ledger_busy"]
    assert at_one_barrier(1, bump_impatiently, location) == ["done"]
    bump(db)
    assert in_a_fresh_process(counted_there, location) == 3


def counted_there(location: Location) -> int:
    with closing(location.open(read_only=True)) as db:
        return counter(db)


def test_hazard_68_a_thread_that_opens_a_ledger_while_another_makes_it_keeps_its_locks(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, may_write = threading.Event(), threading.Event()

    def second() -> None:
        db = location.open()
        opened.set()
        may_write.wait(20)
        bump(db)
        db.close()

    thread = threading.Thread(target=second)

    def slow_touch(path: Path, mode: int, *, exist_ok: bool) -> None:
        assert not exist_ok
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        thread.start()
        opened.wait(0.5)
        os.close(descriptor)  # drops the locks of a thread that has opened the file by now

    monkeypatch.setattr(Path, "touch", slow_touch)
    first = location.open()
    assert opened.wait(20)
    # A neighbour that does not see our locks takes the -wal away, and what is written into it is lost.
    assert at_one_barrier(1, bump_impatiently, location) == ["done"]
    may_write.set()
    thread.join(20)
    assert in_a_fresh_process(counted_there, location) == 2
    first.close()


def test_hazard_69_the_wal_is_bounded_again_once_a_slow_reader_is_gone(db: Database, path: Path) -> None:
    wal = Path(f"{path}-wal")
    slow = sqlite3.connect(path)
    bump(db)
    cursor = slow.execute("SELECT value FROM lease_tokens UNION ALL SELECT 1")
    cursor.fetchone()
    detail = '"' + "x" * 1_500 + '"'
    for _ in range(50):
        with db.immediate() as connection:
            for _ in range(1_000):
                connection.execute(EVENT, (detail,))
    assert wal.stat().st_size > sqlite.WAL_LIMIT_BYTES
    cursor.close()
    slow.close()
    for _ in range(3):
        bump(db)
    assert wal.stat().st_size <= sqlite.WAL_LIMIT_BYTES
    assert counter(db) == 4


def test_hazard_69_no_reader_of_ours_keeps_a_snapshot(db: Database, location: Location, path: Path) -> None:
    reader = location.open(read_only=True)
    bump(db)
    for result in (
        db.connection.execute("SELECT * FROM lease_tokens"),
        reader.connection.execute("SELECT 1 UNION SELECT 2"),
    ):
        result.fetchone()
    with closing(sqlite3.connect(path)) as raw:
        busy, in_wal, checkpointed = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert (busy, in_wal, checkpointed) == (0, 0, 0)
    reader.close()


# --- what must be durable, and where ----------------------------------------------------------------------


def test_every_session_has_the_promised_settings(db: Database) -> None:
    promised = {
        "foreign_keys": 1,
        "recursive_triggers": 1,
        "trusted_schema": 0,
        "synchronous": 2,
        "journal_mode": "wal",
    }
    found = {name: raw_of(db).execute(f"PRAGMA {name}").fetchone()[0] for name in promised}
    assert found == promised


def test_hazard_71_a_ledger_in_memory_is_refused() -> None:
    with pytest.raises(LedgerUnavailable) as refused:
        Database(":memory:")
    assert refused.value.category == "journal_mode"


def test_hazard_71_a_journal_mode_is_believed_only_as_it_is_answered() -> None:
    in_memory = SQLiteConnection(Path(":memory:"), patience=IMPATIENT)
    with pytest.raises(LedgerUnavailable) as refused:
        in_memory.make_durable()
    in_memory.close()
    assert refused.value.category == "journal_mode"
    assert "'memory'" in refused.value.why


def test_hazard_71_a_ledger_in_another_journal_mode_waits_for_its_reader_and_becomes_durable(
    db: Database, location: Location, path: Path
) -> None:
    db.close()
    raw = sqlite3.connect(path, isolation_level=None)
    assert raw.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    raw.execute("BEGIN")
    raw.execute("SELECT * FROM lease_tokens").fetchall()
    assert answer(location.open, patience=IMPATIENT) == "ledger_busy"
    raw.execute("COMMIT")
    raw.close()
    again = location.open()
    assert raw_of(again).execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    again.close()


def test_an_old_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 9))
    with pytest.raises(SchemaMismatch) as refused:
        Database(tmp_path / "a.db")
    assert refused.value.category == "engine_too_old"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 37, 0))
    Database(tmp_path / "a.db").close()


MOUNTS = """\
sysfs /sys sysfs rw 0 0
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/x /net nfs4 rw 0 0
server:/y /net/with\\040space\\134 nfs rw 0 0
//server/x /cifs cifs rw 0 0
//server/x /smb smb3 rw 0 0
C:\\134 /mnt/c 9p rw 0 0
me@there: /home/me/far fuse.sshfs rw 0 0
auto /auto autofs rw 0 0
server:/z /auto nfs rw 0 0
/dev/vdb /net/local xfs rw 0 0
server:/ü /netz/tür nfs rw 0 0
""".splitlines()


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/var/lib/a.db", "ext4"),
        ("/tmp/a.db", "tmpfs"),  # noqa: S108
        ("/network/a.db", "ext4"),
        ("/net/a.db", "nfs4"),
        ("/net/with space\\/deep/a.db", "nfs"),
        ("/net/local/a.db", "xfs"),
        ("/netz/tür/a.db", "nfs"),
        ("/cifs/a.db", "cifs"),
        ("/smb/a.db", "smb3"),
        ("/mnt/c/a.db", "9p"),
        ("/home/me/far/a.db", "fuse.sshfs"),
        ("/auto/a.db", "nfs"),
    ],
)
def test_hazard_72_a_network_file_system_is_known_by_its_mount_and_refused(place: str, kind: str) -> None:
    path = Path(place)
    assert sqlite.file_system_of(path, MOUNTS) == kind
    if kind in ("ext4", "tmpfs", "xfs"):
        assert sqlite.resolve(path, mounts=MOUNTS) == Path(os.path.realpath(path))
        return
    with pytest.raises(LedgerUnavailable) as refused:
        sqlite.resolve(path, mounts=MOUNTS)
    assert refused.value.category == "network_file_system"
    assert kind in refused.value.happened


def test_hazard_72_an_unknown_file_system_is_called_unknown(tmp_path: Path) -> None:
    for mounts in ([], ["", "garbage", "/dev/vdb /elsewhere xfs rw 0 0"]):
        assert sqlite.file_system_of(tmp_path, mounts) == "unknown"


# --- names ------------------------------------------------------------------------------------------------


def linked_file(path: Path) -> Path:
    alias = path.with_name("alias.db")
    alias.symlink_to(path)
    return alias


def linked_folder(path: Path) -> Path:
    (path.parent.parent / "folder").symlink_to(path.parent, target_is_directory=True)
    return path.parent.parent / "folder" / path.name


def roundabout(path: Path) -> Path:
    return path.parent / ".." / path.parent.name / "." / path.name


@pytest.mark.parametrize("alias", [linked_file, linked_folder, roundabout])
def test_hazard_73_two_names_of_one_ledger_exclude_each_other(
    db: Database, location: Location, path: Path, alias: Callable[[Path], Path]
) -> None:
    other = Location("sqlite", str(alias(path)), location.root)
    with child(holding, other) as (_, pipe):
        assert heard(pipe) == "holding"
        with pytest.raises(Contention), location.open(patience=IMPATIENT).immediate():
            raise AssertionError("the lock was not shared")
        pipe.send("go on")
        assert heard(pipe) == "committed"
    assert other.open().path == db.path
    assert counter(db) == 1
    assert {each.name for each in db.path.parent.iterdir()} <= {
        "organization.db",
        "organization.db-wal",
        "organization.db-shm",
        "organization.authority",
        "alias.db",
    }


def test_hazard_73_a_dangling_link_is_followed_to_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "alias.db").symlink_to(tmp_path / "real" / "ledger.db")
    db = Database(tmp_path / "alias.db")
    assert db.path == tmp_path.resolve() / "real" / "ledger.db"
    assert db.path.is_file()
    db.close()


def test_hazard_73_a_hard_linked_ledger_is_refused_until_it_has_one_name(db: Database, path: Path) -> None:
    db.close()
    second = path.with_name("second.db")
    second.hardlink_to(path)
    for name in (path, second):
        with pytest.raises(LedgerUnavailable) as refused:
            Database(name)
        assert refused.value.category == "ledger_hard_linked"
    second.unlink()
    Database(path).close()


def _swap(path: Path) -> None:
    """What a restore must not do: another file under the ledger's name."""
    path.with_name("swapped.db").touch()
    path.with_name("swapped.db").replace(path)


@pytest.mark.parametrize("change", [_swap, lambda path: path.rename(path.with_name("moved.db"))], ids=["swap", "move"])
def test_hazard_66_a_process_whose_ledger_file_was_replaced_under_it_is_told_that_nothing_was_committed(
    location: Location, path: Path, change: Callable[[Path], Any]
) -> None:
    with child(_bumping, location) as (_, pipe):
        assert heard(pipe) == "done"
        pipe.send("again")
        assert heard(pipe) == "done"
        change(path)
        for _ in range(2):
            pipe.send("again")
            assert heard(pipe) == "ledger_replaced"
        pipe.send("read")
        assert heard(pipe) == 2


def _bumping(pipe: Any, location: Location) -> None:
    db = location.open()
    asked = "bump"
    while asked:
        pipe.send(counter(db) if asked == "read" else answer(bump, db))
        asked = pipe.recv()


def test_hazard_66_in_rollback_mode_sqlites_own_refusal_is_translated(db: Database, path: Path) -> None:
    assert db.connection.execute("PRAGMA journal_mode = DELETE").rows[0][0] == "delete"
    bump(db)
    _swap(path)
    with pytest.raises(LedgerUnavailable, match="cannot be used") as refused:
        bump(db)
    assert refused.value.why == "the file was moved or replaced while it was open"


@pytest.mark.parametrize("name", ["a b?c#d%20&e=f.db", "ledger:memory:.db", os.fsdecode(b"caf\xe9.db")])
def test_a_file_name_is_a_file_name(tmp_path: Path, name: str) -> None:
    db = Database(tmp_path / name)
    bump(db)
    files = [name, f"{name}-shm", f"{name}-wal", db.authority.name]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(files)
    reader = Database(tmp_path / name, read_only=True)
    assert counter(reader) == 1
    reader.close()
    db.close()


# --- what is not a ledger ---------------------------------------------------------------------------------


def test_what_is_missing_is_not_made_by_looking(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.db"
    for options in ({"create": False}, {"read_only": True}, {"read_only": True, "create": True}):
        assert answer(Database, path, **options) == "ledger_missing"
    assert list(tmp_path.iterdir()) == []
    Database(path).close()
    assert path.is_file()


def test_a_directory_and_a_file_in_the_way_are_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable) as refused:
        Database(tmp_path)
    assert refused.value.category == "ledger_not_a_file"
    (tmp_path / "file").touch()
    for options in ({}, {"create": False}):
        with pytest.raises(LedgerUnavailable):
            Database(tmp_path / "file" / "a.db", **options)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused_untouched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(content)
    before = traces(tmp_path)
    for options in ({}, {"create": False}, {"read_only": True}):
        with pytest.raises(LedgerUnavailable) as refused:
            Database(path, **options)
        assert "no SQLite file" in refused.value.why
    assert traces(tmp_path) == before


def test_an_empty_file_is_an_interrupted_first_start(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.touch()
    before = traces(tmp_path)
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(SchemaMismatch) as refused:
            Database(path, **options)
        assert refused.value.category == "schema_older"
        assert "interrupted" in refused.value.why
    assert traces(tmp_path) == before
    Database(path).close()
    Database(path, create=False).close()


@pytest.mark.parametrize("crashed", [False, True])
def test_a_newer_ledger_is_refused_before_a_byte_or_its_journal_mode_changes(
    location: Location, path: Path, *, crashed: bool
) -> None:
    location.open().close()
    stamp = f"INSERT INTO {STAMPS} VALUES ('{CORE}', 999, 'later', 'x', 999, 1)"
    mode, end = ("WAL", "os.kill(os.getpid(), 9)") if crashed else ("DELETE", "")
    program = f"""
import os, sqlite3
raw = sqlite3.connect({str(path)!r}, isolation_level=None)
raw.execute("PRAGMA journal_mode = {mode}")
raw.execute({stamp!r})
{end}
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert Path(f"{path}-wal").exists() == crashed
    before = traces(location.root)
    for options in ({}, {"create": False}, {"read_only": True}):
        assert answer(location.open, **options) == "schema_newer"
    assert traces(location.root) == before


# --- what a raw connection cannot do ----------------------------------------------------------------------


def test_append_only_holds_on_a_plain_connection_without_recursive_triggers(
    db: Database, clock: ManualClock, path: Path
) -> None:
    run_of(db, clock)
    before = [tuple(row) for row in db.connection.execute("SELECT * FROM events")]
    assert before
    raw = sqlite3.connect(path, isolation_level=None)
    assert raw.execute("PRAGMA recursive_triggers").fetchone() == (0,)
    for attack in (
        "UPDATE events SET at = 2",
        "DELETE FROM events",
        "INSERT OR REPLACE INTO events SELECT * FROM events",
        "UPDATE OR REPLACE events SET seq = 1",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            raw.execute(attack)
    raw.execute(EVENT, ("{}",))
    assert [*raw.execute("SELECT * FROM events")][:-1] == before
    raw.close()


def test_append_only_guards_every_unique_key_of_its_tables(db: Database, clock: ManualClock) -> None:
    raw = raw_of(db)
    for (table,) in raw.execute("SELECT tbl_name FROM sqlite_master WHERE name LIKE '%_no_replace'").fetchall():
        sql = raw.execute("SELECT sql FROM sqlite_master WHERE name = ?", (f"{table}_no_replace",)).fetchone()[0]
        guarded = set(re.findall(r"(\w+) = NEW\.", sql))
        keys = {column[1] for column in raw.execute(f"PRAGMA table_info({table})") if column[5]}
        for index in raw.execute(f"PRAGMA index_list({table})").fetchall():
            if index[2]:
                keys |= {column[2] for column in raw.execute(f"PRAGMA index_info({index[1]})")}
        assert guarded == keys, table
    run_of(db, clock)
    receipt = """
        INSERT INTO receipts
        SELECT ?, assignment_id, id, actor_id, 'completed', '', 's', '{}', 1 FROM execution_attempts
    """
    db.connection.execute(receipt, ("first",))
    for other in ("first", "second"):
        with pytest.raises(ConstraintBroken, match="refused a row"):
            db.connection.execute(receipt.replace("INSERT", "INSERT OR REPLACE"), (other,))
    assert db.connection.execute("SELECT id FROM receipts").rows[0][0] == "first"


LONG = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 400000) SELECT max(i) FROM n"


def close_while_another_thread_reads(path: Path) -> None:
    """For a process of its own: what is wrong here ends the interpreter."""
    for _ in range(3):
        db, begun = Database(path), threading.Event()
        db.connection.execute("SELECT 1")

        def read(db: Database = db, begun: threading.Event = begun) -> None:
            db.connection.execute("SELECT 1")
            begun.set()
            with suppress(LedgerUnavailable):
                while True:
                    db.connection.execute(LONG)

        reader = threading.Thread(target=read)
        reader.start()
        begun.wait()
        threading.Event().wait(0.02)
        db.close()
        reader.join()


def test_a_ledger_that_is_closed_while_a_thread_is_in_a_statement_ends_after_it(tmp_path: Path) -> None:
    assert killed_in_a_process(close_while_another_thread_reads, tmp_path / "organization.db") is False
