"""The epoch: ledger and marker agree or nothing opens; what is paused or replaced grants nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import (
    answer,
    at_one_barrier,
    attempt_on,
    child,
    finish,
    heard,
    hook_after,
    in_a_fresh_process,
    killed_after_statement,
    killed_in_a_process,
    new_assignment,
    renew_attempt,
    rows,
    run_of,
)

from sovereign_agent import assistant_service, configuration, fencing, journal, relay, supervisor
from sovereign_agent.clock import ManualClock, micros
from sovereign_agent.database import LEDGER_NAME, Database, authority, read_marker
from sovereign_agent.errors import AuthorityLost, LedgerUnavailable, SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.storage import migrate

EPOCH = "epoch_0123456789abcdef0123456789abcdef"


@pytest.fixture
def db(location: Any, clock: ManualClock) -> Iterator[Database]:
    database = location.open(clock=clock)
    yield database
    database.close()


def refused(location: Any, **options: Any) -> SovereignError:
    with pytest.raises(LedgerUnavailable) as error:
        location.open(**options).close()
    return error.value


def epoch_of(db: Database) -> str:
    return authority.control(db.connection).epoch


# --- the first epoch --------------------------------------------------------------------------------------


def test_a_new_ledger_and_its_marker_are_of_one_epoch_and_stay_so(location: Any) -> None:
    db = location.open()
    now, marker = authority.control(db.connection), db.path.with_suffix(".authority")
    assert (now.paused, now.restoring) == (False, "")
    assert marker.read_text() == f"{now.epoch}\n"
    assert marker.stat().st_mode & 0o777 == 0o600
    assert db.connection.authority == marker
    db.close()
    marker.write_text(marker.read_text())
    db = location.open(create=False)
    assert (authority.control(db.connection), read_marker(marker)) == (now, now.epoch)
    db.close()


def _first_start(_: int, location: Any) -> str:
    db = location.open()
    try:
        assert read_marker(db.authority) == epoch_of(db)
        return epoch_of(db)
    finally:
        db.close()


def test_hazard_71_of_eight_first_starts_at_one_barrier_all_get_the_same_epoch(make_location: Any) -> None:
    location = make_location(migrated=False)
    assert len(set(at_one_barrier(8, _first_start, location))) == 1
    db = location.open()
    assert len(rows(db, "assistant_control")) == 1
    db.close()


def _forget_the_epoch(location: Any) -> Database:
    """A migrated ledger as it is before its first epoch."""
    db = location.open()
    db.connection.execute("DELETE FROM assistant_control")
    db.authority.unlink()
    db.close()
    return location.open(authority_required=False)


def test_hazard_76_a_first_start_killed_at_any_statement_is_finished_by_the_next(location: Any) -> None:
    left, number, db = set[tuple[bool, bool, bool]](), 1, _forget_the_epoch(location)
    beginning = db.authority.with_suffix(authority.BEGINNING)
    while killed_after_statement(number, _first_start, 0, location):
        begun = authority.find_control(db.connection)
        left.add((beginning.exists(), begun is not None, db.authority.exists()))
        assert answer(_first_start, 0, location) == "done"
        assert begun in (None, authority.control(db.connection))
        assert (read_marker(db.authority), beginning.exists()) == (epoch_of(db), False)
        db.close()
        db = _forget_the_epoch(location)
        number += 1
    db.close()
    assert left == {(False, False, False), (True, False, False), (True, True, False), (False, True, True)}


def _met_at_the_marker(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[str]:
    """What `act` is told each time that somebody is about to write the marker."""
    told, write = list[str](), authority.write_marker

    def meet(path: Path, text: str) -> None:
        with monkeypatch.context() as alone:
            alone.setattr(authority, "write_marker", write)
            told.append(answer(act))
        write(path, text)

    monkeypatch.setattr(authority, "write_marker", meet)
    return told


def test_nobody_comes_between_the_steps_of_a_first_start(location: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    db = _forget_the_epoch(location)
    another = location.open(patience=timedelta(seconds=0.2), authority_required=False)
    told = _met_at_the_marker(monkeypatch, lambda: authority.establish(another.connection))
    authority.establish(db.connection)
    assert told == ["ledger_busy"] * 2
    assert answer(authority.establish, another.connection) == "done"
    assert read_marker(db.authority) == epoch_of(db)
    another.close()
    db.close()


@pytest.mark.parametrize("step", [1, 2])
def test_a_first_start_that_another_one_has_overtaken_finds_all_done(
    location: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    db, steps, begin = _forget_the_epoch(location), list[int](), authority.Transaction
    another, told = location.open(authority_required=False), list[str]()

    def overtaken(connection: Any, *, ledger_lock: bool) -> Any:
        steps.append(len(steps) + 1)
        if steps == [*range(1, step + 1)]:
            with monkeypatch.context() as alone:
                alone.setattr(authority, "Transaction", begin)
                authority.establish(another.connection)
                told.append(epoch_of(another))
        return begin(connection, ledger_lock=ledger_lock)

    monkeypatch.setattr(authority, "Transaction", overtaken)
    with suppress(FileNotFoundError):
        authority.establish(db.connection)
        told.append(epoch_of(db))
    assert told == [read_marker(db.authority)] * 2
    assert not db.authority.with_suffix(authority.BEGINNING).exists()
    another.close()
    db.close()


@pytest.mark.parametrize("age", ["new", "used"])
def test_hazard_94_a_ledger_whose_control_row_is_gone_begins_no_epoch_unasked(
    db: Database, location: Any, clock: ManualClock, age: str
) -> None:
    lost = run_of(db, clock) if age == "used" else None
    before, marker = epoch_of(db), db.authority.read_text()
    db.connection.execute("DELETE FROM assistant_control")
    for _ in range(2):
        with pytest.raises(SovereignError) as error:
            location.open()
        assert (error.value.category, error.value.next_command) == ("control_missing", authority.NEW_EPOCH)
        assert (rows(db, "assistant_control"), db.authority.read_text()) == ([], marker)
    assert assistant_service.new_epoch(db, "principal", "the row was deleted") != before
    location.open().close()
    assert lost is None or answer(finish, db, lost, clock) == "actor_lease_lost"


def test_a_beginning_that_another_epoch_has_overtaken_is_forgotten_and_never_becomes_the_marker(
    db: Database, location: Any
) -> None:
    beginning = db.authority.with_suffix(authority.BEGINNING)
    beginning.write_text(f"{EPOCH}\n")
    db.authority.unlink()
    assert refused(location).category == "marker_missing"
    assert (beginning.exists(), db.authority.exists()) == (False, False)


def test_a_ledger_from_before_the_epoch_gets_one_when_it_is_migrated(
    make_location: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, known = make_location(migrated=False), migrate.core_migrations()
    monkeypatch.setattr(migrate, "core_migrations", lambda: known[:1])
    location.open(authority_required=False).close()
    monkeypatch.undo()
    assert _first_start(0, location) == _first_start(0, location)


def test_a_marker_without_its_ledger_opens_and_creates_nothing(make_location: Any, location: Any) -> None:
    other = make_location("other", migrated=False)
    location.open().close()
    folder = other.root / ".sovereign"
    folder.mkdir(exist_ok=True)
    shutil.copy(location.root / ".sovereign" / "organization.authority", folder)
    before = sorted(folder.iterdir())
    assert refused(other).category == "marker_without_ledger"
    assert sorted(folder.iterdir()) == before
    (folder / "organization.authority").unlink()
    other.open().close()


# --- the marker -------------------------------------------------------------------------------------------


def _folder(marker: Path) -> None:
    marker.unlink()
    marker.mkdir()


def _link(marker: Path) -> None:
    marker.rename(marker.with_suffix(".elsewhere"))
    marker.symlink_to(marker.with_suffix(".elsewhere"))


def _pipe(marker: Path) -> None:
    """A pipe that has a whole epoch to say, the right one."""
    epoch = marker.read_bytes()
    marker.unlink()
    os.mkfifo(marker, 0o600)
    said = os.open(marker, os.O_RDWR | os.O_NONBLOCK)  # stays open, so that it can be heard
    os.write(said, epoch)


def _socket(marker: Path) -> None:
    marker.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        place = marker.with_name("s")  # its whole name may not be long
        with chdir(marker.parent):
            listening.bind(place.name)
        place.rename(marker)


TROUBLES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "missing": ("marker_missing", lambda marker: marker.unlink()),
    "empty": ("marker_empty", lambda marker: marker.write_text("")),
    "torn": ("marker_torn", lambda marker: marker.write_text(marker.read_text()[:20])),
    "foreign": ("marker_foreign", lambda marker: marker.write_text("something else\n")),
    "a folder": ("marker_not_a_file", _folder),
    "a pipe": ("marker_not_a_file", _pipe),
    "a socket": ("marker_not_a_file", _socket),
    "a link": ("marker_link", _link),
    "of another epoch": ("epoch_replaced", lambda marker: marker.write_text(f"{EPOCH}\n")),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_hazard_94_whatever_is_wrong_with_the_marker_closes_the_ledger_to_all_but_readers(
    db: Database, location: Any, trouble: str
) -> None:
    category, make = TROUBLES[trouble]
    message = relay.send(db, "a", "b", "s", "")
    make(db.authority)
    error = refused(location)
    assert error.category == category
    assert "authority new-epoch" in error.next_command
    assert answer(relay.claim, db, message.id, "b") == category
    assert relay.inbox(db, "b") == [message]
    for options in ({"read_only": True}, {"authority_required": False}):
        looking = location.open(**options)
        assert not assistant_service.health(looking).agrees
        looking.close()
    if db.authority.is_dir():
        db.authority.rmdir()
    db.authority.unlink(missing_ok=True)
    db.authority.write_text(f"{epoch_of(db)}\n")
    location.open().close()
    assert answer(relay.claim, db, message.id, "b") == "done"


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_new_epoch_takes_the_place_of_whatever_is_there_and_of_a_folder_only_when_it_is_moved_away(
    db: Database, location: Any, trouble: str
) -> None:
    TROUBLES[trouble][1](db.authority)
    if db.authority.is_dir():
        before = [epoch_of(db), *journal.latest_events(db.connection)]
        with pytest.raises(LedgerUnavailable) as error:
            assistant_service.new_epoch(db, "me", "why")
        assert error.value.category == "marker_unwritten"
        assert f"move {db.authority} away" in error.value.next_command
        assert [epoch_of(db), *journal.latest_events(db.connection)] == before
        db.authority.rmdir()
    epoch = assistant_service.new_epoch(db, "me", "why")
    assert epoch == epoch_of(db) == read_marker(db.authority)
    assert db.authority.is_file()
    assert not db.authority.is_symlink()
    location.open().close()


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_marker_that_is_a_device_is_none(tmp_path: Path) -> None:
    os.mknod(tmp_path / "x.authority", stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    assert answer(read_marker, tmp_path / "x.authority") == "marker_not_a_file"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to write over somebody else's ledger")
def test_a_marker_that_root_writes_belongs_to_whom_its_folder_belongs_to(db: Database) -> None:
    os.chown(db.authority.parent, 65534, 65533)
    assistant_service.new_epoch(db, "me", "why")
    status = db.authority.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (65534, 65533, 0o600)


@pytest.mark.parametrize("where", ["/proc", "/sys"])
def test_a_marker_that_cannot_be_written_is_refused_with_the_systems_own_word(where: str) -> None:
    with pytest.raises(LedgerUnavailable) as error:
        authority.write_marker(Path(where, "x.authority"), EPOCH)
    assert error.value.category == "marker_unwritten"
    assert error.value.next_command == "mend that, then repeat the command"


def test_a_marker_that_cannot_be_read_is_refused_with_the_systems_own_word(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AuthorityLost) as error:
        read_marker(tmp_path / "file" / "x.authority")
    assert (error.value.category, str(error.value)) == ("marker_unreadable", "authority marker is unavailable")


def test_no_beginning_of_a_marker_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    marker = tmp_path / "x.authority"
    authority.write_marker(marker, EPOCH)
    whole = marker.read_bytes()
    for length in range(1, len(whole)):
        marker.write_bytes(whole[:length])
        assert answer(read_marker, marker) == "marker_torn"
    for longer in (whole + b"x", whole * 2, whole.upper()):
        marker.write_bytes(longer)
        assert answer(read_marker, marker) == "marker_foreign"
    marker.write_bytes(whole)
    assert read_marker(marker) == EPOCH


# --- pause ------------------------------------------------------------------------------------------------


def test_a_paused_ledger_grants_nothing_new_and_lets_what_runs_end(db: Database, clock: ManualClock) -> None:
    running, waiting = run_of(db, clock), new_assignment(db, clock=clock)
    lease = fencing.current_actor_lease(db, running.actor_id)
    message = relay.send(db, "a", "b", "s", "")
    assert lease
    grants = {
        "lease": lambda: fencing.acquire_actor_lease(db, "another", "proc_blue", clock=clock),
        "attempt": lambda: attempt_on(db, waiting.id, lease, clock),
        "claim": lambda: relay.claim(db, message.id, "b", clock=clock),
    }
    assistant_service.pause(db, "principal", "the till is counted")
    before = {table: rows(db, table) for table in ("actor_leases", "execution_attempts", "messages", "lease_tokens")}
    assert {name: answer(grant) for name, grant in grants.items()} == dict.fromkeys(grants, "paused")
    assert {table: rows(db, table) for table in before} == before
    assert answer(renew_attempt, db, running, clock) == "done"
    assert answer(finish, db, running, clock) == "done"
    assistant_service.resume(db, "principal", "counted")
    assert {name: answer(grant) for name, grant in grants.items()} == dict.fromkeys(grants, "done")
    told = [(event.kind, event.actor, event.detail.get("reason")) for event in journal.latest_events(db.connection)]
    assert ("authority.paused", "principal", "the till is counted") in told
    assert ("authority.resumed", "principal", "counted") in told


def test_a_tick_recovers_while_the_ledger_is_paused(org: Organization, clock: ManualClock) -> None:
    lost = run_of(org.db, clock)
    assistant_service.pause(org.db, "principal", "quiet")
    clock.advance(fencing.EXECUTION_ATTEMPT_TTL)
    assert supervisor.tick(org, clock).recovered_assignments == (lost.assignment_id,)


@pytest.mark.parametrize(("actor", "reason"), [("", "why"), ("me", " ")])
def test_pause_and_resume_and_a_new_epoch_need_an_actor_and_a_reason(db: Database, actor: str, reason: str) -> None:
    for act in (assistant_service.pause, assistant_service.resume, assistant_service.new_epoch):
        assert answer(act, db, actor, reason) == "reason_missing"
    assert answer(assistant_service.pause, db, "me", "why") == "done"


@pytest.mark.parametrize("trouble", TROUBLES)
def test_nothing_resumes_while_ledger_and_marker_do_not_agree(db: Database, trouble: str) -> None:
    category, make = TROUBLES[trouble]
    assistant_service.pause(db, "me", "why")
    make(db.authority)
    assert answer(assistant_service.resume, db, "me", "why") == category
    assert authority.control(db.connection).paused


@pytest.mark.parametrize("digit", ["0", "f"])
def test_a_marker_of_any_other_epoch_closes_the_door(
    db: Database, location: Any, clock: ManualClock, digit: str
) -> None:
    db.authority.write_text(f"epoch_{digit * 32}\n")
    assert answer(fencing.acquire_actor_lease, db, "actor", "proc_red", clock=clock) == "epoch_replaced"
    assert rows(db, "actor_leases") == []
    assert refused(location).category == "epoch_replaced"


@pytest.mark.parametrize("other", [{"epoch": EPOCH}, {"paused": True}, {"restoring": "restore_1"}], ids=str)
def test_a_change_to_the_control_row_needs_the_row_that_was_seen(db: Database, other: dict[str, Any]) -> None:
    seen = authority.control(db.connection)
    with db.transaction() as connection:
        assert not authority.change_control(connection, replace(seen, **other), paused=True, restoring="restore_2")
        assert authority.control(connection) == seen
        assert authority.change_control(connection, seen, paused=True)


def _pause_impatiently(location: Any) -> str:
    db = location.open(patience=timedelta(milliseconds=200))
    try:
        return answer(assistant_service.pause, db, "me", "why")
    finally:
        db.close()


def test_a_pause_waits_for_a_grant_that_has_been_admitted(db: Database, location: Any, clock: ManualClock) -> None:
    heard: list[str] = []
    with hook_after(
        db.connection, "FROM assistant_control", lambda: heard.append(in_a_fresh_process(_pause_impatiently, location))
    ):
        fencing.acquire_actor_lease(db, "actor", "proc_red", clock=clock)
    assert heard == ["ledger_busy"]
    assert in_a_fresh_process(_pause_impatiently, location) == "done"


# --- a new epoch ------------------------------------------------------------------------------------------


def test_hazard_91_after_a_new_epoch_each_older_authority_is_refused_and_a_fresh_one_works(
    db: Database, location: Any, clock: ManualClock
) -> None:
    attempt, waiting = run_of(db, clock), new_assignment(db, clock=clock)
    lease = fencing.current_actor_lease(db, attempt.actor_id)
    assert lease
    message = relay.send(db, "a", "b", "s", "")
    claim = relay.claim(db, message.id, "b", clock=clock)
    assert claim.fencing_token
    older = {
        "lease": lambda: fencing.renew_actor_lease(
            db, lease.actor_id, lease.process_identity, lease.fencing_token, clock=clock
        ),
        "attempt": lambda: attempt_on(db, waiting.id, lease, clock),
        "renewal": lambda: renew_attempt(db, attempt, clock),
        "end": lambda: finish(db, attempt, clock),
        "claim": lambda: relay.complete(db, message.id, "b", fencing_token=claim.fencing_token or 0, clock=clock),
    }
    before, other = epoch_of(db), location.open(clock=clock)
    epoch = assistant_service.new_epoch(other, "principal", "restored by its own tools")
    other.close()
    assert (epoch_of(db), read_marker(db.authority)) == (epoch, epoch) != (before, before)
    told = {"lease": "actor_lease_lost", "attempt": "paused", "claim": "fencing_token_stale"}
    told |= {"renewal": "execution_attempt_lost", "end": "actor_lease_lost"}
    assert {name: answer(act) for name, act in older.items()} == told
    assistant_service.resume(db, "principal", "looked around")
    told["attempt"] = "actor_lease_lost"
    assert {name: answer(act) for name, act in older.items()} == told
    fresh = fencing.acquire_actor_lease(db, lease.actor_id, "proc_blue", clock=clock)
    assert fresh.fencing_token > max(micros(clock()), claim.fencing_token, attempt.fencing_token)
    assert {name: answer(act) for name, act in older.items()} == told
    assert answer(attempt_on, db, waiting.id, fresh, clock) == "done"
    again = relay.claim(db, message.id, "b", clock=clock)
    assert answer(relay.complete, db, message.id, "b", fencing_token=again.fencing_token, clock=clock) == "done"


def test_the_first_tick_of_a_new_epoch_writes_down_what_became_of_the_runs(org: Organization) -> None:
    lost = run_of(org.db, ManualClock(org.db.now()))
    before = fencing.last_token(org.db.connection)
    assistant_service.new_epoch(org.db, "principal", "why")
    assert fencing.last_token(org.db.connection) > before
    assert supervisor.tick(org).recovered_assignments == (lost.assignment_id,)
    receipts = journal.receipts_of(org.db.connection, lost.assignment_id)
    assert [receipt.failure_category for receipt in receipts] == ["worker_lost"]


def _organization_with_its_marker_outside(location: Any, outside: Path) -> Organization:
    """One whose settings stood there before it was made; `outside` is on the disk that does not go back."""
    configuration.write_default(location.root, location.ledger if location.engine == "postgresql" else "")
    settings = location.root / configuration.FILE_NAME
    settings.write_text(settings.read_text().replace("[authority]\n", f'[authority]\nmarker = "{outside}"\n'))
    return Organization.init(location.root)


def test_the_marker_lies_where_the_settings_say_and_nowhere_else(location: Any, tmp_path: Path) -> None:
    org = _organization_with_its_marker_outside(location, tmp_path / "outside" / "shop.authority")
    assert read_marker(tmp_path / "outside" / "shop.authority") == epoch_of(org.db)
    assert not (location.root / LEDGER_NAME).with_suffix(".authority").exists()
    epoch = assistant_service.new_epoch(org.db, "principal", "why")
    assert read_marker(tmp_path / "outside" / "shop.authority") == epoch
    org.close()
    Organization(location.root).close()
    (tmp_path / "outside" / "shop.authority").unlink()
    assert answer(Organization, location.root) == "marker_missing"


@pytest.mark.parametrize("engine", ["sqlite"])  # a server's disk is copied by its own tools
@pytest.mark.parametrize("seen_at", ["close", "tick", "next start"])
def test_hazard_96_with_its_marker_on_another_disk_a_ledger_that_went_back_is_refused(
    location: Any, tmp_path: Path, seen_at: str
) -> None:
    outside, copy = tmp_path / "outside" / "shop.authority", tmp_path / "copy"
    org = _organization_with_its_marker_outside(location, outside)
    lost = run_of(org.db, ManualClock(org.db.now()))
    org.close()
    shutil.copytree(location.root, copy)
    assert killed_in_a_process(_run_on, location.root, seen_at) == (seen_at != "close")
    if seen_at == "next start":
        assert killed_in_a_process(_start_and_die, location.root)
    shutil.rmtree(location.root)
    shutil.copytree(copy, location.root)
    for _ in range(2):
        with pytest.raises(LedgerUnavailable) as error:
            Organization(location.root)
        assert (error.value.category, error.value.next_command) == ("ledger_rolled_back", authority.NEW_EPOCH)
    looking = Database(location.ledger, marker=outside, authority_required=False)
    assert assistant_service.health(looking).marker == "ledger_rolled_back"
    assert answer(assistant_service.resume, looking, "me", "why") == "ledger_rolled_back"
    assistant_service.new_epoch(looking, "principal", "the disk was put back")
    looking.close()
    org = Organization(location.root)
    assert answer(finish, org.db, lost, ManualClock(org.db.now())) == "actor_lease_lost"
    org.close()
    Organization(location.root).close()


def _start_and_die(root: Path) -> None:
    _org = Organization(root)
    os.kill(os.getpid(), signal.SIGKILL)


def _run_on(root: Path, seen_at: str) -> None:
    """For a process of its own: something happens, and the process ends well, or is killed."""
    org = Organization(root)
    org.create_outcome("More tea", "There is tea.", [], "principal-human")
    if seen_at == "close":
        org.close()
        return
    if seen_at == "tick":
        supervisor.tick(org)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_ledger_that_only_went_on_or_was_restored_opens_with_its_marker_on_another_disk(
    location: Any, tmp_path: Path
) -> None:
    org = _organization_with_its_marker_outside(location, tmp_path / "outside" / "shop.authority")
    if location.engine == "sqlite":
        assistant_service.backup(org.db, tmp_path / "b")
    for title in ("More tea", "More rum", "More sugar"):  # more events than the restore and its own will have
        org.create_outcome(title, "It is there.", [], "principal-human")
    org.close()
    org = Organization(location.root)
    if location.engine == "sqlite":
        assistant_service.restore(org.db, tmp_path / "b")
        assert org.status_text() == "No open outcome."
    with suppress(LedgerUnavailable), org.db.immediate() as connection:
        journal.record(connection, "k", "s", actor="a", at=org.db.now(), detail={})
        org.close()  # what is not committed was not seen
    assert answer(Organization, location.root) == "done"


def test_of_two_that_write_down_how_far_the_ledger_has_come_the_second_waits(
    db: Database, location: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = location.open(patience=timedelta(seconds=0.2))
    told = _met_at_the_marker(monkeypatch, lambda: authority.note_progress(another.connection))
    authority.note_progress(db.connection)
    assert told == ["ledger_busy"]
    assert answer(authority.note_progress, another.connection) == "done"
    another.close()


@pytest.mark.parametrize("content", ["x", "epoch_x many", "a b c"])
def test_what_was_seen_and_cannot_be_read_closes_the_ledger(location: Any, tmp_path: Path, content: str) -> None:
    _organization_with_its_marker_outside(location, tmp_path / "shop.authority").close()
    seen = tmp_path / "shop.seen"
    good = seen.read_text()
    seen.write_text(content if content != "epoch_x many" else good.split()[0] + " many")
    assert answer(Organization, location.root) == "marker_unreadable"
    seen.write_text(good)
    Organization(location.root).close()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_hazard_83_what_was_seen_is_read_from_a_file_and_from_nothing_else(
    location: Any, tmp_path: Path, kind: str
) -> None:
    _organization_with_its_marker_outside(location, tmp_path / "shop.authority").close()
    seen = tmp_path / "shop.seen"
    seen.rename(tmp_path / "good")
    make = {
        "pipe": lambda: os.mkfifo(seen),
        "device": lambda: seen.symlink_to("/dev/null"),
        "folder": seen.mkdir,
        "link": lambda: seen.symlink_to(tmp_path / "nowhere"),
    }
    make[kind]()
    with child(_opens, location.root) as (_, pipe):  # it may hang
        assert heard(pipe, within=20) == ("marker_not_a_file" if kind in {"pipe", "folder"} else "marker_link")
    seen.rmdir() if kind == "folder" else seen.unlink()
    (tmp_path / "good").rename(seen)
    assert answer(Organization, location.root) == "done"


def _opens(pipe: Any, root: Path) -> None:
    pipe.send(answer(Organization, root))


@pytest.mark.parametrize("engine", ["sqlite"])  # a server's disk is copied by its own tools
def test_hazard_96_a_whole_disk_that_came_back_opens_unnoticed_and_a_new_epoch_revokes_it(
    location: Any, clock: ManualClock
) -> None:
    db = location.open(clock=clock)
    attempt = run_of(db, clock)
    db.close()
    shutil.copytree(location.root, location.root.with_name("copy"))
    db = location.open(clock=clock)
    finish(db, attempt, clock)
    db.close()
    shutil.rmtree(location.root)
    shutil.copytree(location.root.with_name("copy"), location.root)
    db = location.open(clock=clock)  # ledger and marker agree: the disk alone cannot know
    assistant_service.new_epoch(db, "principal", "the disk was put back")
    assert answer(finish, db, attempt, clock) == "actor_lease_lost"
    db.close()


def test_hazard_91_no_clock_that_is_set_back_renews_an_attempt_beyond_its_revocation(
    db: Database, clock: ManualClock
) -> None:
    attempt, revoked_at = run_of(db, clock), clock()
    assert renew_attempt(db, attempt, clock).expires_at > revoked_at
    assistant_service.new_epoch(db, "me", "why")
    clock.set(revoked_at - timedelta(seconds=5))
    with suppress(AuthorityLost):
        renew_attempt(db, attempt, clock)
    clock.set(revoked_at)
    assert [one.id for one in fencing.expired_execution_attempts(db, clock)] == [attempt.id]


def test_a_new_epoch_says_nothing_new_of_when_an_attempt_ran_out_that_had(db: Database, clock: ManualClock) -> None:
    attempt = run_of(db, clock, ttl=timedelta(minutes=1))
    clock.advance(timedelta(hours=1))
    assistant_service.new_epoch(db, "me", "why")
    assert [row["expires_at"] for row in rows(db, "execution_attempts")] == [micros(attempt.expires_at)]


@pytest.mark.parametrize("engine", ["postgresql"])
def test_an_adoption_that_meets_a_new_epoch_leaves_ledger_and_marker_of_one_epoch(db: Database, location: Any) -> None:
    told: list[str] = []
    write = authority.write_marker
    another = location.open(patience=timedelta(seconds=0.2), authority_required=False)
    with pytest.MonkeyPatch.context() as patch:

        def meet(path: Path, epoch: str) -> None:
            patch.setattr(authority, "write_marker", write)
            told.extend(
                [answer(assistant_service.new_epoch, another, "me", "why"), answer(assistant_service.adopt, another)]
            )
            write(path, epoch)

        patch.setattr(authority, "write_marker", meet)
        db.authority.unlink()
        assert assistant_service.adopt(db) == ("marker_missing", epoch_of(db))
    assert told == ["ledger_busy", "ledger_busy"]
    assert answer(assistant_service.new_epoch, another, "me", "after it") == "done"
    assert answer(assistant_service.adopt, db) == "done"
    assert epoch_of(another) == read_marker(db.authority)
    another.close()


def _adopt_or_begin(number: int, location: Any) -> str:
    db = location.open(authority_required=False, patience=timedelta(seconds=30))
    try:
        if number % 2 and db.engine == "postgresql":
            return assistant_service.adopt(db)[1]
        return assistant_service.new_epoch(db, f"operator-{number}", "at the same time")
    finally:
        db.close()


def test_of_new_epochs_and_adoptions_at_one_barrier_ledger_and_marker_have_the_same(
    db: Database, location: Any
) -> None:
    first = epoch_of(db)
    told = at_one_barrier(6, _adopt_or_begin, location)
    assert epoch_of(db) == read_marker(db.authority)
    begun = [event.detail["epoch"] for event in journal.latest_events(db.connection)]
    assert begun[-1] == epoch_of(db)
    assert set(told) <= {first, *begun}


def test_of_new_epochs_at_one_barrier_the_last_has_ledger_and_marker(db: Database, location: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        another = location.open(patience=timedelta(seconds=0.2), authority_required=False)
        told: list[str] = []
        write = authority.write_marker

        def meet(path: Path, epoch: str) -> None:
            patch.setattr(authority, "write_marker", write)
            told.append(answer(assistant_service.new_epoch, another, "me", "at the same time"))
            write(path, epoch)

        patch.setattr(authority, "write_marker", meet)
        epoch = assistant_service.new_epoch(db, "me", "why")
        assert told == ["ledger_busy"]
        assert epoch_of(another) == read_marker(db.authority) == epoch
        assert answer(assistant_service.new_epoch, another, "me", "after it") == "done"
        assert epoch_of(db) == read_marker(db.authority) != epoch
        another.close()


def test_another_host_must_adopt_a_new_epoch_and_one_without_another_host_cannot(
    db: Database, location: Any, engine: str, tmp_path: Path
) -> None:
    message = relay.send(db, "a", "b", "s", "")
    if engine == "sqlite":
        assert answer(assistant_service.adopt, db) == "adopt_needs_hosts"
        return
    there = type(location)(engine, location.ledger, tmp_path / "another host")
    there.root.mkdir()
    error = refused(there)
    assert (error.category, "adopt" in error.next_command) == ("marker_missing", True)
    host = there.open(authority_required=False)
    assert assistant_service.adopt(host) == ("marker_missing", epoch_of(db))
    there.open().close()
    epoch = assistant_service.new_epoch(db, "principal", "why")
    assistant_service.resume(db, "principal", "why")
    assert answer(relay.claim, host, message.id, "b") == "epoch_replaced"
    assert refused(there).category == "epoch_replaced"
    assert assistant_service.adopt(host)[1] == epoch
    assert answer(relay.claim, host, message.id, "b") == "done"
    host.close()
