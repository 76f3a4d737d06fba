"""Reading a SQLite ledger leaves no trace and sees no half; its files belong to their owner."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import Location
from support import BUMP, answer, at_one_barrier, bump, bump_impatiently, child, counter, heard, holding, traces

from sovereign_agent.database import Database
from sovereign_agent.errors import LedgerFault

IMPATIENT = timedelta(milliseconds=200)
EVENT = "INSERT INTO events (at, kind, subject, actor, detail) VALUES (1, 'k', 's', 'a', ?)"
NOBODY = 65534
DEAD_MAN_SWITCH_BYTE = 128
"""Of the -shm: whoever has the ledger open holds a lock on it (SQLite's os_unix.c)."""


@pytest.fixture
def engine() -> str:
    return "sqlite"


# --- reading without a trace ------------------------------------------------------------------------------


def test_hazard_75_reading_a_quiet_ledger_leaves_no_trace(db: Database, location: Location) -> None:
    bump(db)
    db.close()
    before = traces(location.root)
    reader = location.open(read_only=True)
    assert counter(reader) == 1
    assert traces(location.root) == before
    reader.close()
    assert traces(location.root) == before


def test_hazard_75_reading_a_ledger_in_use_leaves_no_trace(location: Location) -> None:
    with child(holding, location) as (_, pipe):
        assert heard(pipe) == "holding"
        before = traces(location.root)
        reader = location.open(read_only=True)
        assert counter(reader) == 0
        assert traces(location.root) == before
        pipe.send("go on")
        assert heard(pipe) == "committed"
        before = traces(location.root)
        assert counter(reader) == 1
        reader.close()
        assert traces(location.root) == before


def test_hazard_75_reading_what_a_killed_writer_left_leaves_no_trace_and_misses_nothing(location: Location) -> None:
    with child(holding, location) as (process, pipe):
        assert heard(pipe) == "holding"
        pipe.send("go on")
        assert heard(pipe) == "committed"
        process.kill()
        process.join()
    assert Path(f"{location.ledger}-wal").stat().st_size > 0
    before = traces(location.root)
    reader = location.open(read_only=True)
    assert counter(reader) == 1
    reader.close()
    assert traces(location.root) == before


def test_hazard_75_a_wal_that_lost_its_companion_is_read_too(location: Location, tmp_path: Path) -> None:
    db = location.open()
    bump(db)
    copy = tmp_path / "copy"
    copy.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{location.ledger}{suffix}", copy / f"a.db{suffix}")
    db.close()
    assert read_there(copy / "a.db") == "found 1"


def test_hazard_75_a_reader_of_a_quiet_ledger_sees_what_is_written_later(db: Database, location: Location) -> None:
    db.close()
    reader = location.open(read_only=True)
    for expected in range(4):
        assert counter(reader) == expected
        writer = location.open()
        bump(writer)
        if expected % 2:
            assert counter(reader) == expected + 1
        writer.close()
    assert counter(reader) == 4
    reader.close()


def test_hazard_75_a_read_transaction_that_a_writer_overtakes_says_so(db: Database, location: Location) -> None:
    db.close()
    reader = location.open(read_only=True)

    def read_twice(between: Callable[[], object]) -> None:
        with reader.transaction():
            first = counter(reader)
            between()
            assert counter(reader) == first

    assert answer(read_twice, lambda: at_one_barrier(1, bump_impatiently, location)) == "ledger_busy"
    for _ in range(2):
        assert answer(read_twice, lambda: None) == "done"
    assert counter(reader) == 1
    reader.close()


def half_made(pipe: Any, location: Location) -> None:
    """Stop where a writer stands between making the -shm and filling it; go on when told to."""
    shm = os.open(f"{location.ledger}-shm", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(shm, 32_768)
    fcntl.lockf(shm, fcntl.LOCK_SH, 1, DEAD_MAN_SWITCH_BYTE)
    pipe.send("half made")
    pipe.recv()
    os.close(shm)
    db = location.open()
    bump(db)
    pipe.send("made")
    pipe.recv()


def test_hazard_75_a_reader_waits_for_a_writer_that_is_just_setting_up(db: Database, location: Location) -> None:
    db.close()
    found: list[str] = []
    with child(half_made, location) as (_, pipe):
        assert heard(pipe) == "half made"
        assert answer(location.open, read_only=True, patience=IMPATIENT) == "ledger_unavailable"
        waiting = threading.Thread(target=lambda: found.append(read_there(db.path)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        pipe.send("go on")
        assert heard(pipe) == "made"
        waiting.join(20)
    assert found in (["found 0"], ["found 1"])


def coming_and_going(pipe: Any, location: Location) -> None:
    until = time.monotonic() + 2
    while time.monotonic() < until:
        db = location.open()
        for _ in range(2):
            with db.immediate() as connection:
                connection.execute(BUMP)
                connection.execute(EVENT, ("{}",))
        db.close()
        time.sleep(0.005)
    pipe.send("done")
    pipe.recv()


def test_hazard_75_a_reader_among_writers_that_come_and_go_is_never_told_half(location: Location) -> None:
    location.open().close()
    with child(coming_and_going, location) as (process, pipe):
        seen = []
        while not pipe.poll() and process.is_alive():
            reader = location.open(read_only=True)
            for _ in range(3):
                row = reader.connection.execute(
                    "SELECT (SELECT value FROM lease_tokens), (SELECT count(*) FROM events)"
                ).rows[0]
                assert row[0] == row[1]
                seen.append(row[0])
            reader.close()
        assert heard(pipe) == "done"
    assert seen == sorted(seen)
    assert len(set(seen)) > 5


# --- whose files ------------------------------------------------------------------------------------------


def test_the_folder_and_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        db = Database(tmp_path / "org" / "a.db")
        bump(db)
        modes = {each.name: oct(each.stat().st_mode & 0o777) for each in (tmp_path / "org").iterdir()}
        db.close()
    finally:
        os.umask(before)
    assert oct((tmp_path / "org").stat().st_mode & 0o777) == "0o700"
    assert modes == dict.fromkeys(("a.db", "a.db-wal", "a.db-shm", "a.authority"), "0o600")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that any user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for each in [folder, *folder.rglob("*")]:
        each.chmod(0o700)
    shutil.rmtree(folder)


def as_nobody(pipe: Any, act: Callable[[Path], str], path: Path) -> None:
    """Run an act as another user where we are root, and as ourselves elsewhere."""
    with tempfile.TemporaryDirectory() as warm:  # import what the other user may not read
        write_there(Path(warm) / "a.db")
        read_there(Path(warm) / "a.db")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    pipe.send((os.geteuid(), act(path)))
    pipe.recv()


def told(act: Callable[[Path], str], path: Path) -> tuple[int, str]:
    with child(as_nobody, act, path) as (_, pipe):
        uid, text = heard(pipe)
        return uid, text


def write_there(path: Path) -> str:
    try:
        db = Database(path)
        bump(db)
        db.close()
    except LedgerFault as error:
        return f"{type(error).__name__} {error} {error.why}"
    return "written"


def read_there(path: Path) -> str:
    try:
        db = Database(path, read_only=True)
        found = counter(db)
        db.close()
    except LedgerFault as error:
        return f"{type(error).__name__} {error} {error.why}"
    return f"found {found}"


def test_hazard_75_a_folder_that_may_not_be_written_is_named_with_the_user(public: Path) -> None:
    public.chmod(0o555)
    path = public / "a.db"
    uid, text = told(write_there, path)
    assert text.startswith("LedgerUnavailable")
    assert str(path) in text
    assert f"uid {uid}" in text
    assert list(public.iterdir()) == []
    public.chmod(0o777)
    assert told(write_there, path)[1] == "written"


def test_hazard_75_a_ledger_that_may_only_be_read_is_read_and_nothing_is_left_beside_it(public: Path) -> None:
    path = public / "a.db"
    db = Database(path)
    bump(db)
    db.close()
    path.chmod(0o444)
    public.chmod(0o777)
    before = traces(public)
    uid, text = told(write_there, path)
    assert text.startswith("LedgerUnavailable")
    assert str(path) in text
    assert f"uid {uid}" in text
    assert told(read_there, path)[1] == "found 1"
    public.chmod(0o555)
    assert told(read_there, path)[1] == "found 1"
    public.chmod(0o777)
    assert traces(public) == before


def test_hazard_75_a_second_user_reads_a_ledger_in_use_without_a_trace(public: Path) -> None:
    path = public / "a.db"
    db = Database(path)
    bump(db)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").chmod(0o644)
    before = traces(public)
    assert told(read_there, path)[1] == "found 1"
    assert traces(public) == before
    bump(db)
    assert told(read_there, path)[1] == "found 2"
    db.close()


def test_hazard_75_a_companion_that_is_another_users_is_named(public: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = public / "a.db"
    db = Database(path)
    bump(db)
    public.chmod(0o777)
    path.chmod(0o666)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").chmod(0o644)
    uid, text = told(write_there, path)
    assert text.startswith("LedgerUnavailable")
    assert "-shm" in text
    assert f"uid {uid}" in text
    db.close()
    path.chmod(0o666)
    assert told(write_there, path)[1] == "written"


def test_hazard_75_a_folder_that_may_not_be_entered_is_named_and_not_called_empty(public: Path) -> None:
    inside = public / "closed"
    inside.mkdir(mode=0o700)
    Database(inside / "a.db").close()
    inside.chmod(0o000)
    for act in (write_there, read_there):
        uid, text = told(act, inside / "a.db")
        assert text.startswith("LedgerUnavailable")
        assert f"uid {uid}" in text
        assert "There is no ledger" not in text
    inside.chmod(0o700)
    assert read_there(inside / "a.db") == "found 0"
