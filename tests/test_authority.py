"""The epoch: ledger and marker agree or nothing opens; what is paused or replaced grants nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import (
    answer,
    at_one_barrier,
    attempt_on,
    finish,
    hook_after,
    in_a_fresh_process,
    killed_after_statement,
    new_assignment,
    renew_attempt,
    rows,
    run_of,
)

from sovereign_agent import assistant_service, fencing, journal, relay, supervisor
from sovereign_agent.clock import ManualClock, micros
from sovereign_agent.database import Database, authority, read_marker
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


def _forget_the_epoch(location: Any) -> Path:
    """A migrated ledger as it is before its first epoch."""
    db = location.open()
    db.connection.execute("DELETE FROM assistant_control")
    db.authority.unlink()
    db.close()
    return Path(db.authority)


def test_hazard_76_a_first_start_killed_at_any_statement_is_finished_by_the_next(location: Any) -> None:
    marker, left, number = _forget_the_epoch(location), set[bool](), 1
    while killed_after_statement(number, _first_start, 0, location):
        left.add(marker.exists())
        before = marker.read_text() if marker.exists() else ""
        assert answer(_first_start, 0, location) == "done"
        assert marker.read_text().startswith(before)
        _forget_the_epoch(location)
        number += 1
    assert left == {False, True}, "no kill fell between the marker and the row"


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


TROUBLES: dict[str, Callable[[Path], Any]] = {
    "marker_missing": lambda marker: marker.unlink(),
    "marker_empty": lambda marker: marker.write_text(""),
    "marker_torn": lambda marker: marker.write_text(marker.read_text()[:20]),
    "marker_foreign": lambda marker: marker.write_text("something else\n"),
    "marker_not_a_file": _folder,
    "marker_link": _link,
    "epoch_replaced": lambda marker: marker.write_text(f"{EPOCH}\n"),
}


@pytest.mark.parametrize("category", TROUBLES)
def test_hazard_94_whatever_is_wrong_with_the_marker_closes_the_ledger_to_all_but_readers(
    db: Database, location: Any, category: str
) -> None:
    message = relay.send(db, "a", "b", "s", "")
    TROUBLES[category](db.authority)
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


@pytest.mark.parametrize("category", TROUBLES)
def test_nothing_resumes_while_ledger_and_marker_do_not_agree(db: Database, category: str) -> None:
    assistant_service.pause(db, "me", "why")
    TROUBLES[category](db.authority)
    assert answer(assistant_service.resume, db, "me", "why") == category
    assert authority.control(db.connection).paused


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
