"""Backup and restore of a SQLite ledger: sealed, refused before harm, fenced, and finished after any death."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import (
    answer,
    at_one_barrier,
    child,
    finish,
    heard,
    holding,
    in_a_fresh_process,
    killed_in_a_process,
    renew_attempt,
    rows,
    run_of,
    traces,
)

from sovereign_agent import assistant_service, assistant_work, fencing, journal, relay, supervisor
from sovereign_agent.clock import ManualClock, micros
from sovereign_agent.database import LEDGER_NAME, Database, authority, read_marker, sqlite_backup
from sovereign_agent.errors import AuthorityLost, Contention, LedgerUnavailable, SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.storage import migrate
from sovereign_agent.storage.engine import Migration

SHELVES = Migration(1, "shelves", "CREATE TABLE shelves (name TEXT NOT NULL) <strict>;", 1)
LABELS = Migration(2, "labels", "CREATE TABLE labels (name TEXT NOT NULL) <strict>;", 2)


@pytest.fixture
def engine() -> str:
    return "sqlite"  # PostgreSQL's own tools back it up: see the last test here, and test_authority.py


@pytest.fixture
def db(location: Any, clock: ManualClock) -> Iterator[Database]:
    database = location.open(clock=clock)
    yield database
    database.close()


def subjects(db: Database) -> list[str]:
    return [message.subject for message in relay.inbox(db, "b")]


def kept_files(db: Database) -> dict[str, Any]:
    """The bytes of ledger, -wal and marker."""
    found = traces(db.path.parent)
    return {name: what[2] for name, what in found.items() if name.endswith((".db", "-wal", ".authority"))}


def backed_up(db: Database, tmp_path: Path) -> Path:
    """A backup that holds the message "kept"; since then "later" was sent."""
    relay.send(db, "a", "b", "kept", "")
    assistant_service.backup(db, tmp_path / "backup.db")
    relay.send(db, "a", "b", "later", "")
    return tmp_path / "backup.db"


# --- backup -----------------------------------------------------------------------------------------------


def _write_pairs(pipe: Any, location: Any) -> None:
    db, number = location.open(), 0
    while True:
        with db.immediate() as connection:
            number = fencing.admitted_token(connection)[0]
            journal.record(connection, "pair", str(number), actor="a", at=db.now(), detail={"text": "x" * 2000})
        if number == 20:
            pipe.send("writing")


def test_hazard_65_a_backup_under_writes_is_one_moment_and_says_what_it_holds(
    db: Database, location: Any, tmp_path: Path
) -> None:
    with child(_write_pairs, location) as (_, pipe):
        heard(pipe)
        images = [assistant_service.backup(db, tmp_path / f"{number}.db") for number in range(5)]
    for image in images:
        raw = sqlite3.connect(image.path)
        events, token = raw.execute("SELECT (SELECT count(*) FROM events), value FROM lease_tokens").fetchone()
        assert events == token == image.rows["events"] >= 20
        raw.close()
        assert image.path.stat().st_mode & 0o777 == 0o600
        assert image.size_bytes == image.path.stat().st_size
    assert len({image.digest for image in images}) > 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [f"{n}.db" for n in range(5)]


def test_hazard_98_a_backup_never_takes_a_name_that_is_taken(db: Database, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = kept_files(db)
    for name in (tmp_path / "taken", tmp_path / "link", db.path):
        assert answer(assistant_service.backup, db, name) == "backup_exists"
    assert answer(assistant_service.backup, db, tmp_path / "no" / "folder") == "backup_folder"
    assert kept_files(db) == before
    assert ((tmp_path / "taken").read_text(), (tmp_path / "nowhere").exists()) == ("mine", False)
    assert answer(assistant_service.backup, db, tmp_path / "free") == "done"


def _backup_on_a_full_disk(location: Any, destination: Path, limit: int) -> str:
    db = location.open()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return answer(assistant_service.backup, db, destination)


def test_hazard_98_a_full_disk_leaves_nothing_under_the_backups_name(
    db: Database, location: Any, tmp_path: Path
) -> None:
    size = assistant_service.backup(db, tmp_path / "measure").size_bytes
    folder = tmp_path / "backups"
    folder.mkdir()
    for limit in (0, 4096, size // 2, size - 1):
        assert in_a_fresh_process(_backup_on_a_full_disk, location, folder / "b", limit) == "ledger_unavailable"
        assert list(folder.iterdir()) == []
    assert in_a_fresh_process(_backup_on_a_full_disk, location, folder / "b", 2 * size) == "done"


def test_a_backup_whose_name_may_not_outlive_a_power_cut_has_no_name(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_backup, "sync", fail)
        with pytest.raises(LedgerUnavailable, match="was not written") as error:
            assistant_service.backup(db, tmp_path / "b")
    assert (error.value.category, "Input/output error" in error.value.why) == ("copy_unwritten", True)
    assert not list(tmp_path.glob("*b*"))
    assert answer(assistant_service.backup, db, tmp_path / "b") == "done"


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK], ids=["vfat", "fuse", "full"])
def stick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder on a disk without hard links."""

    def no_links(name: Path, target: Path) -> None:
        raise OSError(request.param, os.strerror(request.param), str(target), None, str(name))

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    (tmp_path / "stick").mkdir()
    return tmp_path / "stick"


def test_a_disk_without_hard_links_gets_a_backup_too(db: Database, stick: Path, tmp_path: Path) -> None:
    image = assistant_service.backup(db, stick / "b")
    assert [path.name for path in stick.iterdir()] == ["b"]
    assert stat.S_IMODE((stick / "b").stat().st_mode) == 0o600
    sqlite_backup.take_in(stick / "b", db.path, tmp_path / "taken")
    assert image.path == stick / "b"


def test_without_hard_links_a_name_that_was_taken_meanwhile_is_not_given_away(
    db: Database, stick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = sqlite_backup.sync

    def synced(path: Path) -> None:  # the last thing before the name is given
        (stick / "b").write_text("somebody else's")
        sync(path)

    monkeypatch.setattr(sqlite_backup, "sync", synced)
    assert answer(assistant_service.backup, db, stick / "b") == "backup_exists"
    assert {path.name: path.read_text() for path in stick.iterdir()} == {"b": "somebody else's"}


def test_without_hard_links_a_backup_that_cannot_get_its_name_leaves_nothing(
    db: Database, stick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "replace", fail)
    assert answer(assistant_service.backup, db, stick / "b") == "copy_unwritten"
    assert list(stick.iterdir()) == []


def test_a_backup_may_have_the_longest_name_that_a_disk_takes_and_no_longer(db: Database, tmp_path: Path) -> None:
    relay.send(db, "a", "b", "kept", "")
    folder = tmp_path / "backups"
    folder.mkdir()
    assert answer(assistant_service.backup, db, folder / ("x" * 256)) == "copy_unwritten"
    assert list(folder.iterdir()) == []
    assert answer(assistant_service.backup, db, folder / ("x" * 255)) == "done"
    assert answer(assistant_service.restore, db, folder / ("x" * 255)) == "done"
    assert subjects(db) == ["kept"]


@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_folder_that_takes_no_file_is_refused_by_name(db: Database, folder: str) -> None:
    assert answer(assistant_service.backup, db, Path(folder, "b")) == "copy_unwritten"


def test_a_restore_that_cannot_copy_its_source_aside_says_so_and_touches_nothing(tmp_path: Path) -> None:
    db = Database(tmp_path / "org" / f"{'x' * 225}.db")  # with the restore's id behind it, no disk takes that name
    source = backed_up(db, tmp_path)
    before = kept_files(db)
    with pytest.raises(LedgerUnavailable) as error:
        assistant_service.restore(db, source)
    assert (error.value.category, "too long" in error.value.why) == ("copy_unwritten", True)
    assert error.value.next_command
    assert kept_files(db) == before
    assert (subjects(db), authority.control(db.connection).restoring) == (["kept", "later"], "")
    db.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to restore somebody else's ledger")
def test_what_root_writes_for_a_restore_belongs_to_the_ledgers_owner_and_a_backup_to_root(
    location: Any, tmp_path: Path
) -> None:
    db = location.open()
    folder = db.path.parent
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65533)
    db.close()
    db = location.open()
    source = backed_up(db, tmp_path)
    assert (source.stat().st_uid, source.stat().st_mode & 0o777) == (0, 0o600)
    done = assistant_service.restore(db, source)
    assert done.safety_copy in folder.iterdir()
    assert {(path.stat().st_uid, path.stat().st_gid) for path in folder.iterdir()} == {(65534, 65533)}
    db.close()
    assert killed_in_a_process(_die_at, "the content", "before", "restore", location.root, source)
    assert {path.stat().st_uid for path in folder.iterdir()} == {65534}


# --- what is no backup ------------------------------------------------------------------------------------


def _link(source: Path, _db: Database) -> Path:
    source.with_name("link").symlink_to(source)
    return source.with_name("link")


def _truncated(source: Path, _db: Database) -> Path:
    os.truncate(source, source.stat().st_size // 2)
    return source


def _flipped(source: Path, _db: Database) -> Path:
    content = source.read_bytes()
    assert content.count(b"kept") == 1
    source.write_bytes(content.replace(b"kept", b"kepu"))
    return source


def _other_application(source: Path, _db: Database) -> Path:
    raw = sqlite3.connect(source.with_name("customers.db"))
    raw.execute("CREATE TABLE customers (name TEXT)")
    raw.close()
    return source.with_name("customers.db")


def _other_organization(source: Path, _db: Database) -> Path:
    other = Database(source.with_name("other.db"))
    assistant_service.backup(other, source.with_name("other backup"))
    other.close()
    return source.with_name("other backup")


def _plain_copy(source: Path, db: Database) -> Path:
    raw = sqlite3.connect(db.path)
    raw.execute("VACUUM INTO ?", (str(source.with_name("copy.db")),))
    raw.close()
    return source.with_name("copy.db")


def _newer(source: Path, _db: Database) -> Path:
    return _stamped(source, "sovereign_agent", 99)


def _newer_extension(source: Path, _db: Database) -> Path:
    return _stamped(source, "store", 2)


def _stamped(source: Path, component: str, number: int) -> Path:
    raw = sqlite3.connect(source, isolation_level=None)
    raw.execute("INSERT INTO sovereign_migrations VALUES (?, ?, 'later', 'x', ?, 0)", (component, number, number))
    raw.execute("UPDATE backup_seal SET digest = ?", (sqlite_backup.content_digest(raw),))
    raw.close()
    return source


def _written(content: bytes, source: Path, _db: Database) -> Path:
    source.write_bytes(content)
    return source


NO_BACKUPS: dict[str, tuple[str, Callable[[Path, Database], Path]]] = {
    "nothing": ("backup_missing", lambda source, _: source.with_name("nowhere")),
    "a folder": ("backup_not_a_file", lambda source, _: source.parent),
    "a link": ("backup_link", _link),
    "the live ledger": ("backup_is_live", lambda _, db: db.path),
    "an empty file": ("backup_empty", partial(_written, b"")),
    "text": ("backup_damaged", partial(_written, b"minutes of the meeting\n" * 400)),
    "half of it": ("backup_damaged", _truncated),
    "one letter changed": ("backup_damaged", _flipped),
    "another application's": ("backup_unsealed", _other_application),
    "a copy that nobody verified": ("backup_unsealed", _plain_copy),
    "another organization's": ("backup_foreign", _other_organization),
    "a newer schema": ("schema_newer", _newer),
    "a newer schema of an application": ("schema_newer", _newer_extension),
}


@pytest.mark.parametrize("case", NO_BACKUPS)
def test_hazard_97_98_what_is_no_backup_of_this_ledger_is_refused_and_nothing_is_touched(
    db: Database, tmp_path: Path, case: str
) -> None:
    category, make = NO_BACKUPS[case]
    db.extend("store", [SHELVES])
    source = backed_up(db, tmp_path)
    shutil.copy(source, tmp_path / "good")
    source = make(source, db)
    before = kept_files(db)
    assert answer(assistant_service.restore, db, source) == category
    assert kept_files(db) == before
    assert subjects(db) == ["kept", "later"]
    assert not [path for path in db.path.parent.iterdir() if "restore" in path.name]
    assert answer(assistant_service.restore, db, tmp_path / "good") == "done"
    assert subjects(db) == ["kept"]


def test_hazard_98_no_changed_byte_of_a_backup_changes_what_is_restored(db: Database, tmp_path: Path) -> None:
    source = backed_up(db, tmp_path)
    whole, told = source.read_bytes(), set[str]()
    for offset in range(7, len(whole), len(whole) // 60):
        source.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x55]) + whole[offset + 1 :])
        staging = tmp_path / f"staging-{offset}"
        told.add(answer(sqlite_backup.take_in, source, db.path, staging))
        if staging.exists():  # a byte that means nothing
            raw = sqlite3.connect(staging)
            assert raw.execute("SELECT subject FROM messages").fetchall() == [("kept",)]
            raw.close()
    assert "backup_damaged" in told


def test_hazard_97_a_backup_of_an_older_schema_is_migrated_before_it_is_put_back(
    location: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.core_migrations()
    monkeypatch.setattr(migrate, "core_migrations", lambda: known[:1])
    db = location.open(authority_required=False)
    source = backed_up(db, tmp_path)
    db.close()
    monkeypatch.undo()
    db = location.open()
    db.extend("store", [SHELVES, LABELS])
    assistant_service.restore(db, source)
    db.extend("store", [SHELVES, LABELS])
    assert (subjects(db), db.schema()) == (["kept"], {"sovereign_agent": known[-1].number, "store": 2})
    db.close()
    location.open().close()


# --- restore ----------------------------------------------------------------------------------------------


def _older_process(pipe: Any, location: Any, clock: ManualClock) -> None:
    """A process that holds one of each authority, with an hour to run, and tries them whenever it is asked to."""
    db, hour = location.open(clock=clock), timedelta(hours=1)
    attempt = run_of(db, clock, ttl=hour, lease_ttl=hour)
    lease = fencing.current_actor_lease(db, attempt.actor_id)
    claim = relay.claim(db, relay.send(db, "a", "b", "kept", "").id, "b", ttl=hour, clock=clock)
    assert lease
    acts: dict[str, Callable[[], Any]] = {
        "lease": lambda: fencing.renew_actor_lease(
            db, lease.actor_id, lease.process_identity, lease.fencing_token, clock=clock
        ),
        "renewal": lambda: renew_attempt(db, attempt, clock),
        "claim": lambda: relay.complete(db, claim.id, "b", fencing_token=claim.fencing_token or 0, clock=clock),
        "end": lambda: finish(db, attempt, clock),
    }
    pipe.send((attempt, claim))
    while pipe.recv() == "try":
        pipe.send({name: answer(act) for name, act in acts.items()} | {"reads": subjects(db)})


REFUSED = {
    "lease": "actor_lease_lost",
    "renewal": "execution_attempt_lost",
    "claim": "fencing_token_stale",
    "end": "actor_lease_lost",
    "reads": ["kept"],
}


def test_hazard_91_100_an_older_process_reads_on_after_a_restore_and_each_write_of_it_is_refused(
    db: Database, location: Any, clock: ManualClock, tmp_path: Path
) -> None:
    with child(_older_process, location, clock) as (_, pipe):
        attempt, claim = heard(pipe)
        assistant_service.backup(db, tmp_path / "b")
        before = epoch_of(db)
        done = assistant_service.restore(db, tmp_path / "b", actor="principal", reason="a bad day")
        assert (epoch_of(db), read_marker(db.authority), authority.control(db.connection).paused) == (
            done.epoch,
            done.epoch,
            True,
        )
        assert done.epoch != before
        pipe.send("try")
        assert heard(pipe) == REFUSED
        assert answer(fencing.acquire_actor_lease, db, "operator", "proc_new", clock=clock) == "paused"
        assistant_service.resume(db, "principal", "looked around")
        before_writes = {table: rows(db, table) for table in ("actor_leases", "execution_attempts", "messages")}
        pipe.send("try")
        assert heard(pipe) == REFUSED
        assert {table: rows(db, table) for table in before_writes} == before_writes
        fresh = fencing.acquire_actor_lease(db, attempt.actor_id, "proc_new", clock=clock)
        again = relay.claim(db, claim.id, "b", clock=clock)
        assert again.fencing_token
        assert again.fencing_token > fresh.fencing_token > micros(clock())
        pipe.send("try")
        assert heard(pipe)["end"] == "actor_lease_lost"
        assert answer(relay.complete, db, claim.id, "b", fencing_token=again.fencing_token, clock=clock) == "done"
    told = [event for event in journal.latest_events(db.connection) if event.kind == "authority.restored"]
    assert [(event.actor, event.detail["reason"]) for event in told] == [("principal", "a bad day")]


def test_the_same_authorities_work_where_nothing_was_restored(db: Database, location: Any, clock: ManualClock) -> None:
    with child(_older_process, location, clock) as (_, pipe):
        heard(pipe)
        pipe.send("try")
        assert heard(pipe) == dict.fromkeys(("lease", "renewal", "claim", "end"), "done") | {"reads": []}
    assert subjects(db) == []


def epoch_of(db: Database) -> str:
    return authority.control(db.connection).epoch


def test_the_first_tick_after_a_restore_writes_down_the_runs_that_it_cut_off(org: Organization, tmp_path: Path) -> None:
    lost = run_of(org.db, ManualClock(org.db.now()))
    assistant_service.backup(org.db, tmp_path / "b")
    assistant_service.restore(org.db, tmp_path / "b")
    assert supervisor.tick(org).recovered_assignments == (lost.assignment_id,)
    receipts = journal.receipts_of(org.db.connection, lost.assignment_id)
    assert [receipt.failure_category for receipt in receipts] == ["worker_lost"]


def test_hazard_91_a_work_claim_and_a_delegation_from_before_a_restore_write_nothing_and_fresh_ones_do(
    location: Any, tmp_path: Path
) -> None:
    db = location.open()
    assistant_work.enqueue(db, "origin", "lucy", "check the shop")
    older = assistant_work.claim(db, "worker", ttl=3600)
    assert older
    assistant_work.observe(db, older, {"text": "two tubs"})
    assistant_work.delegate(db, older, "look it up", deadline=time.time() + 3600, budget=1)
    child_claim = assistant_work.claim(db, "researcher", role="research", ttl=3600)
    assert child_claim
    assistant_service.backup(db, tmp_path / "b")
    assistant_service.restore(db, tmp_path / "b")
    for claim in (older, child_claim):
        with pytest.raises(AuthorityLost) as error:
            assistant_work.observe(db, claim, {"text": "late"})
        assert str(error.value) == "runtime paused or replaced by restore"
    found = {row["id"]: (row["status"], row["owner"], row["generation"]) for row in rows(db, "assistant_work")}
    assert found == {older.id: ("READY", None, 2), child_claim.id: ("READY", None, 2)}
    db.connection.execute("UPDATE assistant_control SET paused = 0 WHERE id = 1")
    for claim in (older, child_claim):
        with pytest.raises(AuthorityLost) as error:
            assistant_work.finish(db, claim, "DONE", "late")
        assert str(error.value) == "runtime paused or replaced by restore"
    fresh = assistant_work.claim(db, "replacement", ttl=3600)
    assert fresh
    assert (fresh.id, fresh.generation, fresh.epoch) == (older.id, 3, epoch_of(db))
    assistant_work.observe(db, fresh, {"text": "two tubs still"})
    assert [row["generation"] for row in rows(db, "assistant_transcript")] == [1, 3]
    db.close()


@pytest.mark.parametrize("ahead", ["live", "backup", "clock"])
def test_no_token_of_any_past_is_minted_again_after_a_restore(
    db: Database, clock: ManualClock, tmp_path: Path, ahead: str
) -> None:
    far = micros(clock()) * 2
    if ahead == "backup":
        db.connection.execute("UPDATE lease_tokens SET value = ?", (far,))
    source = backed_up(db, tmp_path)
    db.connection.execute("UPDATE lease_tokens SET value = ?", (far if ahead == "live" else 7,))
    assistant_service.restore(db, source)
    assistant_service.resume(db, "me", "why")
    token = fencing.acquire_actor_lease(db, "x", "proc_red", clock=clock).fencing_token
    assert token == (micros(clock()) if ahead == "clock" else far) + 2


def test_what_a_restore_replaced_can_be_restored_from_its_safety_copy(db: Database, tmp_path: Path) -> None:
    done = assistant_service.restore(db, backed_up(db, tmp_path))
    assert (subjects(db), done.safety_copy is not None) == (["kept"], True)
    assistant_service.restore(db, done.safety_copy or "")
    assert subjects(db) == ["kept", "later"]


def _restore(number: int, location: Any, source: Path) -> str:
    db = location.open()
    try:
        return answer(assistant_service.restore, db, source, actor=f"operator-{number}")
    finally:
        db.close()


def test_of_restores_at_one_barrier_each_that_is_not_refused_ends_whole(
    db: Database, location: Any, tmp_path: Path
) -> None:
    told = at_one_barrier(3, _restore, location, backed_up(db, tmp_path))
    assert told.count("done") == 1
    assert set(told) <= {"done", "control_overtaken", "restore_unfinished", "epoch_replaced"}
    assert (subjects(db), authority.control(db.connection).restoring) == (["kept"], "")
    restored = [event.kind for event in journal.latest_events(db.connection)].count("authority.restored")
    assert restored == 1
    location.open().close()


# --- a restore that meets somebody ------------------------------------------------------------------------


def test_hazard_100_a_stopped_process_with_an_open_write_ends_a_restore_in_time_and_untouched(
    db: Database, location: Any, tmp_path: Path
) -> None:
    source = backed_up(db, tmp_path)
    impatient = location.open(patience=timedelta(seconds=0.5))
    with child(holding, location) as (process, pipe):
        heard(pipe)
        os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(Contention) as error:
            assistant_service.restore(impatient, source)
        assert time.monotonic() - begun < 10
        assert str(process.pid) in error.value.why
        assert subjects(db) == ["kept", "later"]
        assert not [path for path in db.path.parent.iterdir() if "restore" in path.name]
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("commit")
        heard(pipe)
        assert answer(assistant_service.restore, impatient, source) == "done"
    assert subjects(db) == ["kept"]
    impatient.close()


def test_hazard_100_one_that_stops_just_before_the_copy_ends_it_in_time_and_it_can_be_finished(
    db: Database, location: Any, tmp_path: Path
) -> None:
    source = backed_up(db, tmp_path)
    impatient = location.open(patience=timedelta(seconds=0.5))
    with child(holding_when_told, location) as (process, pipe):
        heard(pipe)
        with pytest.MonkeyPatch.context() as patch:
            stop = _and_then(getattr(assistant_service, "_point_marker"), lambda: _hold(process, pipe))  # noqa: B009
            patch.setattr(assistant_service, "_point_marker", stop)
            begun = time.monotonic()
            with pytest.raises(Contention) as error:
                assistant_service.restore(impatient, source)
        assert time.monotonic() - begun < 15
        assert error.value.category == "restore_unfinished"
        assert "--resume" in error.value.next_command
    assert answer(location.open) == "restore_unfinished"
    assistant_service.finish_restore(impatient)
    assert subjects(impatient) == ["kept"]
    impatient.close()


def holding_when_told(pipe: Any, location: Any) -> None:
    db = location.open()
    pipe.send("open")
    pipe.recv()
    with db.immediate():
        pipe.send("holding")
        pipe.recv()


def _hold(process: Any, pipe: Any) -> None:
    pipe.send("hold")
    heard(pipe)
    os.kill(process.pid, signal.SIGSTOP)


def _and_then(act: Callable[..., Any], after: Callable[[], Any]) -> Callable[..., Any]:
    def both(*args: Any, **options: Any) -> Any:
        result = act(*args, **options)
        after()
        return result

    return both


def test_hazard_94_a_marker_that_cannot_be_written_closes_the_ledger_until_it_can(
    db: Database, location: Any, tmp_path: Path
) -> None:
    source = backed_up(db, tmp_path)
    db.authority.unlink()
    (db.authority / "in the way").mkdir(parents=True)
    assert answer(assistant_service.restore, db, source) == "restore_unfinished"
    assert answer(location.open) == "restore_unfinished"
    assert subjects(db) == ["kept", "later"]
    assert answer(assistant_service.resume, db, "me", "why") == "restore_unfinished"
    assert answer(assistant_service.restore, db, source) == "restore_unfinished"
    shutil.rmtree(db.authority)
    assistant_service.finish_restore(db)
    assert subjects(db) == ["kept"]
    location.open().close()


# --- a restore that dies ----------------------------------------------------------------------------------

STEPS = {
    "the copy of the backup": (sqlite_backup, "take_in"),
    "the revocations": (assistant_service, "_prepare"),
    "the pause": (assistant_service, "_mark"),
    "the marker": (authority, "write_marker"),
    "the safety copy": (sqlite_backup, "back_up"),
    "the safety copy's name": (sqlite_backup, "_give_name"),
    "the content": (sqlite_backup, "replace_content"),
    "the check": (sqlite_backup, "require_intact"),
    "the end": (assistant_service, "_close"),
}


def _die_at(step: str, when: str, act: str, root: Path, *args: Any) -> None:
    """For a process of its own: begin, finish or undo a restore, and be killed before or after a step of it."""
    module, name = STEPS[step]
    real = getattr(module, name)

    def dying(*arguments: Any, **options: Any) -> Any:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dying)
    db = Database(root / LEDGER_NAME, create=False, authority_required=False)
    answer(getattr(assistant_service, act), db, *args)


def _state(root: Path) -> tuple[str, str]:
    """How the next process finds the ledger: ``closed``, or whether it is paused; and its content."""
    db = Database(root / LEDGER_NAME, create=False, authority_required=False)
    try:
        paused = "paused" if authority.control(db.connection).paused else "running"
        told = answer(lambda: Database(root / LEDGER_NAME, create=False).close())
        assert told in ("done", "restore_unfinished")
        if told == "done":
            assert epoch_of(db) == read_marker(db.authority)
        return (paused if told == "done" else "closed"), "+".join(subjects(db))
    finally:
        db.close()


def _go_on(root: Path, act: str) -> str:
    db = Database(root / LEDGER_NAME, create=False, authority_required=False)
    try:
        return answer(getattr(assistant_service, act), db)
    finally:
        db.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_hazard_92_a_restore_killed_at_any_step_is_refused_at_open_and_converges_either_way(
    db: Database, location: Any, tmp_path: Path, step: str, when: str
) -> None:
    source = backed_up(db, tmp_path)
    before = epoch_of(db)
    db.close()
    assert killed_in_a_process(_die_at, step, when, "restore", location.root, source)
    begun = _state(location.root)
    reached, pause = list(STEPS).index(step), list(STEPS).index("the pause")
    marked = reached > pause or (step, when) == ("the pause", "after")
    finished = (step, when) == ("the end", "after")
    assert begun[0] == ("paused" if finished else "closed" if marked else "running")
    for act, content in (("finish_restore", "kept"), ("roll_back_restore", "kept+later")):
        root = tmp_path / act
        shutil.copytree(location.root, root)
        if begun[0] != "closed":
            assert _go_on(root, act) == "restore_none"
            assert _state(root) == begun
            continue
        for again in (("the marker", "before"), ("the content", "before"), ("the content", "after")):
            killed_in_a_process(_die_at, *again, act, root)
        assert _go_on(root, act) in ("done", "restore_none")
        assert _state(root) == ("paused", content)
        db = Database(root / LEDGER_NAME, create=False)
        assert (epoch_of(db) == before) == (act == "roll_back_restore")
        assert not [path.name for path in db.path.parent.iterdir() if path.name.endswith(("staging", "back"))]
        assert answer(assistant_service.resume, db, "me", "why") == "done"
        db.close()


def test_without_a_restore_between_its_steps_there_is_nothing_to_finish_or_undo(db: Database) -> None:
    assert answer(assistant_service.finish_restore, db) == "restore_none"
    assert answer(assistant_service.roll_back_restore, db) == "restore_none"


def test_a_rollback_that_lost_its_image_still_brings_back_what_was_there(
    db: Database, location: Any, tmp_path: Path
) -> None:
    source = backed_up(db, tmp_path)
    killed_in_a_process(_die_at, "the marker", "after", "restore", location.root, source)
    for path in db.path.parent.glob("*.staging"):
        path.unlink()
    assert answer(assistant_service.finish_restore, db) == "restore_unfinished"
    assistant_service.roll_back_restore(db, actor="principal")
    assert subjects(db) == ["kept", "later"]
    assert journal.latest_events(db.connection)[-1].kind == "authority.rolled_back"
    location.open().close()


# --- two who finish, or undo, at once ---------------------------------------------------------------------


def _unfinished(location: Any, tmp_path: Path, step: str, when: str = "after") -> Database:
    """A ledger whose restore died at that step, as the one who finishes or undoes it opens it."""
    db = location.open()
    source = backed_up(db, tmp_path)
    db.close()
    assert killed_in_a_process(_die_at, step, when, "restore", location.root, source)
    return Database(location.root / LEDGER_NAME, create=False, authority_required=False)


def _preceded(patch: pytest.MonkeyPatch, step: str, first: Callable[[], Any]) -> None:
    """Let somebody else act just before this step of a restore."""
    act = getattr(assistant_service, step)

    def both(*args: Any, **options: Any) -> Any:
        first()
        return act(*args, **options)

    patch.setattr(assistant_service, step, both)


def _roll_back_to_the_end(db: Database) -> None:
    assert answer(assistant_service.roll_back_restore, db) == "done"
    assert subjects(db) == ["kept", "later"]
    db.close()


def _die_with_an_empty_copy(root: Path) -> None:
    real = getattr(sqlite_backup, "_make_empty")  # noqa: B009
    setattr(sqlite_backup, "_make_empty", _and_then(real, lambda: os.kill(os.getpid(), signal.SIGKILL)))  # noqa: B010
    assistant_service.roll_back_restore(Database(root / LEDGER_NAME, create=False, authority_required=False))


def test_who_rolls_back_puts_his_own_copy_into_the_ledger_and_no_other(
    location: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = _unfinished(location, tmp_path, "the content")
    _preceded(monkeypatch, "_put", lambda: killed_in_a_process(_die_with_an_empty_copy, location.root))
    assert answer(assistant_service.roll_back_restore, db) == "done"
    assert subjects(db) == ["kept", "later"]
    assert not list(db.path.parent.glob("*.back"))
    db.close()
    location.open().close()


def test_a_rollback_that_a_finish_has_overtaken_does_not_say_that_it_was_one(
    location: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = _unfinished(location, tmp_path, "the marker")
    finish = partial(killed_in_a_process, _die_at, "the content", "after", "finish_restore", location.root)
    with monkeypatch.context() as patch:
        _preceded(patch, "_close", finish)
        assert answer(assistant_service.roll_back_restore, db) == "control_overtaken"
    assert (subjects(db), answer(location.open)) == (["kept"], "restore_unfinished")
    _roll_back_to_the_end(db)


def test_a_finish_that_a_rollback_has_overtaken_leaves_the_marker_alone(
    location: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = _unfinished(location, tmp_path, "the pause")
    _preceded(monkeypatch, "_point_marker", lambda: _go_on(location.root, "roll_back_restore"))
    assert answer(assistant_service.finish_restore, db) == "control_overtaken"
    assert subjects(db) == ["kept", "later"]
    db.close()
    location.open().close()


def test_a_rollback_without_its_safety_copy_is_refused_once_the_content_is_replaced(
    location: Any, tmp_path: Path
) -> None:
    db = _unfinished(location, tmp_path, "the content")
    (safety_copy,) = db.path.parent.glob("*.before")
    safety_copy.rename(tmp_path / "elsewhere")
    assert answer(assistant_service.roll_back_restore, db) == "safety_copy_missing"
    assert (subjects(db), answer(location.open)) == (["kept"], "restore_unfinished")
    (tmp_path / "elsewhere").rename(safety_copy)
    _roll_back_to_the_end(db)


def test_what_was_queued_on_top_of_a_restore_that_is_rolled_back_is_kept_in_a_copy(
    location: Any, tmp_path: Path
) -> None:
    db = _unfinished(location, tmp_path, "the content")
    relay.send(db, "a", "b", "on top", "")  # by a process that had the ledger open all the time
    assert subjects(db) == ["kept", "on top"]
    path = db.path
    _roll_back_to_the_end(db)
    undone = [*path.parent.glob("*.undone")]
    assert len(undone) == 1
    with closing(Database(undone[0], create=False, read_only=True)) as copy:
        assert subjects(copy) == ["kept", "on top"]


def test_a_restore_interrupted_just_after_it_has_begun_can_be_finished(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    source = backed_up(db, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(assistant_service, "_mark", _and_then(getattr(assistant_service, "_mark"), interrupt))  # noqa: B009
        with pytest.raises(KeyboardInterrupt):
            assistant_service.restore(db, source)
    assert answer(assistant_service.finish_restore, db) == "done"
    assert subjects(db) == ["kept"]


def test_a_restore_that_another_change_has_overtaken_changes_nothing(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = backed_up(db, tmp_path)
    with monkeypatch.context() as patch:
        _preceded(patch, "_mark", lambda: assistant_service.pause(db, "me", "why"))
        assert answer(assistant_service.restore, db, source) == "control_overtaken"
    assert (subjects(db), authority.control(db.connection).restoring) == (["kept", "later"], "")
    assert answer(assistant_service.restore, db, source) == "done"


def test_a_restore_that_tokens_have_overtaken_changes_nothing(
    location: Any, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's tokens were begun by a clock far ahead, so only the counter itself tells what has been minted."""
    with closing(location.open(clock=clock)) as db:
        clock.advance(timedelta(days=1))
        assistant_service.new_epoch(db, "me", "why")
        assistant_service.resume(db, "me", "why")
        clock.advance(timedelta(days=-1))
        source = backed_up(db, tmp_path)
        with monkeypatch.context() as patch:
            for each in ("one", "two"):
                _preceded(patch, "_mark", partial(fencing.acquire_actor_lease, db, each, "proc_red", clock=clock))
            assert answer(assistant_service.restore, db, source) == "control_overtaken"
        assert authority.control(db.connection).restoring == ""
        assert answer(assistant_service.restore, db, source) == "done"


def test_a_finish_that_another_has_overtaken_keeps_the_safety_copy_as_it_is(
    location: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = _unfinished(location, tmp_path, "the marker")
    other = partial(killed_in_a_process, _die_at, "the content", "after", "finish_restore", location.root)
    with monkeypatch.context() as patch:
        _preceded(patch, "_put", other)
        assert answer(assistant_service.finish_restore, db) == "control_overtaken"
    _roll_back_to_the_end(db)


def test_a_finish_that_finds_the_content_in_place_leaves_the_safety_copy_alone(location: Any, tmp_path: Path) -> None:
    db = _unfinished(location, tmp_path, "the content")
    copy = assistant_service.finish_restore(db).safety_copy
    db.close()
    assert copy
    with closing(Database(copy, create=False, authority_required=False)) as replaced:
        assert subjects(replaced) == ["kept", "later"]


def test_no_restore_begins_over_one_that_is_unfinished(location: Any, tmp_path: Path) -> None:
    db = _unfinished(location, tmp_path, "the pause")
    before = authority.control(db.connection)
    assert answer(assistant_service.restore, db, tmp_path / "backup.db") == "restore_unfinished"
    assert authority.control(db.connection) == before
    _roll_back_to_the_end(db)


def test_a_finish_that_another_has_overtaken_does_not_pause_what_was_resumed(
    location: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another() -> None:
        assert _go_on(location.root, "finish_restore") == "done"
        with closing(location.open()) as other:
            assistant_service.resume(other, "me", "why")

    db = _unfinished(location, tmp_path, "the content")
    with monkeypatch.context() as patch:
        close = getattr(assistant_service, "_close")  # noqa: B009

        def overtaken(*args: Any, **options: Any) -> Any:
            patch.setattr(assistant_service, "_close", close)
            another()
            return close(*args, **options)

        patch.setattr(assistant_service, "_close", overtaken)
        assert answer(assistant_service.finish_restore, db) == "control_overtaken"
    assert not authority.control(db.connection).paused
    db.close()


@pytest.mark.parametrize("engine", ["postgresql"])
def test_on_postgresql_backup_and_restore_name_its_own_tools(location: Any, tmp_path: Path, engine: str) -> None:
    db = location.open()
    for act, tool in ((assistant_service.backup, "pg_dump"), (assistant_service.restore, "pg_restore")):
        with pytest.raises(SovereignError) as error:
            act(db, tmp_path / "b")
        assert (error.value.category, tool in error.value.next_command) == ("postgresql_tools", True)
    db.close()
    assert engine == location.engine
