"""A commit whose reply is lost: it is looked up by its key, and neither done again nor taken for undone.

A proxy stands between a worker and its server. Each act meets two losses: the reply to its COMMIT, and, as the twin,
the connection before the COMMIT was sent. What the ledger holds then differs, and so must the answers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from conftest import Location, starting_again
from support import answer, governed_work, ledger_facts, new_assignment, works

from sovereign_agent import assistant_service, fencing, organization, relay, supervisor
from sovereign_agent import assistant_work as work
from sovereign_agent.database import Database
from sovereign_agent.errors import LedgerUnavailable
from sovereign_agent.llm_lab import ScriptedModel, scripted_turn
from sovereign_agent.organization import Organization
from sovereign_agent.records import MessageState, ReceiptStatus
from sovereign_agent.testing.proxy import Loss, Proxy
from sovereign_agent.testing.workload import GivenOrganization

ACTOR = "operator-course"
FINISHED = {"assignment": "COMPLETED", "attempts": ["DONE"], "receipts": [("completed", "")]}


@pytest.fixture
def engine() -> str:
    return "postgresql"


@pytest.fixture(params=Loss)
def loss(request: pytest.FixtureRequest) -> Loss:
    return Loss(request.param)


@pytest.fixture
def proxy(location: Location) -> Iterator[Proxy]:
    with proxied(location) as proxy:
        yield proxy


@contextmanager
def proxied(location: Location) -> Iterator[Proxy]:
    info = psycopg.conninfo.conninfo_to_dict(location.ledger)
    host, port = str(info.get("host", "localhost")), int(info.get("port", 5432))
    with closing(Proxy(f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port))) as proxy:
        yield proxy


def through(proxy: Proxy, location: Location) -> str:
    """The URL of the ledger, by way of the proxy."""
    info = psycopg.conninfo.conninfo_to_dict(location.ledger)
    return f"postgresql://{info['user']}@/{info['dbname']}?host=127.0.0.1&port={proxy.port}"


@pytest.fixture
def far(location: Location, proxy: Proxy) -> Iterator[Database]:
    """The ledger by way of the proxy."""
    location.open().close()
    with closing(Database(through(proxy, location), root=location.root, create=False)) as db:
        yield db


@pytest.fixture
def worker(org: Organization, proxy: Proxy, location: Location) -> Iterator[Organization]:
    """A worker of the organization, by way of the proxy. Its program works at once, in this process."""
    db = Database(through(proxy, location), root=location.root, create=False)
    with closing(GivenOrganization(org.root, db)) as worker:
        yield worker


@pytest.fixture
def assignment(org: Organization, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(organization, "invoke_actor", works)
    return governed_work(org)[2].id


def requires(sprung: threading.Event) -> None:
    assert sprung.wait(10), "nothing was lost"


def facts(db: Database, assignment_id: str, *names: str) -> dict[str, Any]:
    found = ledger_facts(db, assignment_id)
    return {name: found[name] for name in names or FINISHED}


def events(db: Database, kind: str) -> int:
    return int(db.connection.execute("SELECT count(*) FROM events WHERE kind = ?", (kind,)).rows[0][0])


# --- runs -------------------------------------------------------------------------------------------------


def test_a_terminal_write_whose_commit_is_not_known_about_is_written_once(
    worker: Organization, proxy: Proxy, assignment: str, loss: Loss, db: Database
) -> None:
    sprung = proxy.lose(loss, "INSERT INTO receipts")
    receipt = worker.run_assignment(assignment)
    requires(sprung)
    assert receipt.status is ReceiptStatus.COMPLETED
    assert facts(db, assignment) == FINISHED
    assert db.connection.execute("SELECT id FROM receipts").rows[0]["id"] == receipt.id
    assert events(db, "assignment.finished") == 1


def test_a_run_whose_attempt_was_taken_though_the_reply_was_lost_goes_on_under_it(
    worker: Organization, proxy: Proxy, assignment: str, db: Database
) -> None:
    sprung = proxy.lose(Loss.REPLY, "INSERT INTO execution_attempts")
    assert answer(worker.run_assignment, assignment) == "done"
    requires(sprung)
    assert facts(db, assignment) == FINISHED
    assert events(db, "assignment.running") == 1


def test_a_run_whose_attempt_was_not_taken_is_not_begun_and_can_be_repeated_at_once(
    worker: Organization, proxy: Proxy, assignment: str, db: Database
) -> None:
    sprung = proxy.lose(Loss.CONNECTION, "INSERT INTO execution_attempts")
    with pytest.raises(LedgerUnavailable):
        worker.run_assignment(assignment)
    requires(sprung)
    assert facts(db, assignment) == {"assignment": "CREATED", "attempts": [], "receipts": []}
    assert worker.run_assignment(assignment).status is ReceiptStatus.COMPLETED


def test_a_run_that_has_begun_waits_for_a_ledger_that_cannot_tell_it_what_to_do(
    worker: Organization, proxy: Proxy, assignment: str, db: Database
) -> None:
    sprung = proxy.lose(Loss.CONNECTION, "FROM rulings")
    receipt = worker.run_assignment(assignment)
    requires(sprung)
    assert receipt.failure_category == ""
    assert facts(db, assignment) == FINISHED


def test_an_attempt_of_another_call_of_the_same_process_is_not_taken_for_ones_own(
    worker: Organization, org: Organization, proxy: Proxy, assignment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    def waits(*given: Any) -> Any:
        begun.set()
        assert over.wait(30)
        return works(*given)

    monkeypatch.setattr(organization, "invoke_actor", waits)
    first = threading.Thread(target=worker.run_assignment, args=(assignment,))
    first.start()
    try:
        assert begun.wait(10)
        sprung = proxy.lose(Loss.CONNECTION, "held.id AS held")  # the question that an acquisition begins with
        with pytest.raises(LedgerUnavailable):
            worker.run_assignment(assignment)
        requires(sprung)
    finally:
        over.set()
        first.join()
    assert facts(org.db, assignment) == FINISHED


def test_a_lease_whose_reply_was_lost_is_found_again_by_its_process(
    worker: Organization, proxy: Proxy, assignment: str, loss: Loss, db: Database
) -> None:
    sprung = proxy.lose(loss, "INSERT INTO actor_leases")
    with pytest.raises(LedgerUnavailable):
        worker.run_assignment(assignment)
    requires(sprung)
    taken = fencing.current_actor_lease(db, ACTOR)
    assert (taken is not None) is (loss is Loss.REPLY)
    assert worker.run_assignment(assignment).status is ReceiptStatus.COMPLETED


def test_a_recovery_whose_commit_is_not_known_about_happens_once(
    worker: Organization, proxy: Proxy, loss: Loss, db: Database
) -> None:
    assignment = new_assignment(db, ACTOR)
    lease = fencing.acquire_actor_lease(db, ACTOR, "proc_dead")
    fencing.acquire_execution_attempt(db, assignment.id, ACTOR, "proc_dead", lease.fencing_token)
    db.connection.execute("UPDATE execution_attempts SET expires_at = 1")
    sprung = proxy.lose(loss, "INSERT INTO receipts")
    with pytest.raises(LedgerUnavailable):
        supervisor.tick(worker)
    requires(sprung)
    recovered = supervisor.tick(worker).recovered_assignments
    assert recovered == (() if loss is Loss.REPLY else (assignment.id,))
    assert facts(db, assignment.id, "receipts") == {"receipts": [("failed", "worker_lost")]}


# --- mail and turns ---------------------------------------------------------------------------------------


def test_a_message_whose_claim_is_not_known_about_is_claimed_once(
    far: Database, proxy: Proxy, loss: Loss, db: Database
) -> None:
    message = relay.send(db, "master", "operator", "s", "b")
    sprung = proxy.lose(loss, "SET state = 'CLAIMED'")
    with pytest.raises(LedgerUnavailable):
        relay.claim(far, message.id, "operator")
    requires(sprung)
    assert relay.get_message(db, message.id).deliveries == (1 if loss is Loss.REPLY else 0)
    claimed = relay.claim(far, message.id, "operator")
    assert (claimed.deliveries, events(db, "message.claimed")) == (1, 1)


def test_a_message_whose_settling_is_not_known_about_shows_it_under_its_token(
    far: Database, proxy: Proxy, loss: Loss, db: Database
) -> None:
    message = relay.send(db, "master", "operator", "s", "b")
    token = relay.claim(far, message.id, "operator").fencing_token or 0
    sprung = proxy.lose(loss, "UPDATE messages SET state = ")
    with pytest.raises(LedgerUnavailable):
        relay.complete(far, message.id, "operator", fencing_token=token)
    requires(sprung)
    seen = relay.get_message(far, message.id)
    assert (seen.state, seen.fencing_token) == (
        MessageState.DONE if loss is Loss.REPLY else MessageState.CLAIMED,
        token,
    )
    if loss is Loss.CONNECTION:
        assert relay.complete(far, message.id, "operator", fencing_token=token).state is MessageState.DONE
    assert events(db, "message.done") == 1


def test_a_turn_whose_queueing_is_not_known_about_is_queued_once_under_its_origin(
    far: Database, proxy: Proxy, loss: Loss, db: Database
) -> None:
    sprung = proxy.lose(loss, "INSERT INTO assistant_work")
    with pytest.raises(LedgerUnavailable):
        work.enqueue(far, "mail:1", "lucy", "Sell it.")
    requires(sprung)
    there = [row["id"] for row in db.connection.execute("SELECT id FROM assistant_work")]
    assert len(there) == (1 if loss is Loss.REPLY else 0)
    again = work.enqueue(far, "mail:1", "lucy", "Sell it.")
    assert [again] == (there or [again])
    assert len(db.connection.execute("SELECT id FROM assistant_work").rows) == 1


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("SET status = 'RUNNING', generation", id="claim"),
        pytest.param("INSERT INTO assistant_transcript", id="observe"),
        pytest.param("finished_at = ", id="finish"),
    ],
)
def test_a_turn_is_served_once_whichever_of_its_commits_is_not_known_about(
    far: Database, proxy: Proxy, loss: Loss, statement: str, db: Database
) -> None:
    item = work.enqueue(db, "mail:1", "lucy", "Sell it.")
    model = ScriptedModel([scripted_turn(calls=[{"name": "none", "arguments": {}}]), scripted_turn("Sold.")])
    sprung = proxy.lose(loss, statement)
    assistant_service.serve(
        far,
        model,
        lambda _: [],
        owner="clerk",
        ttl=1,
        until=lambda: work.get_work(db.connection, item)["status"] == "DONE",
    )
    requires(sprung)
    assert events(db, "work.done") == 1
    roles = [row["message"].partition('"role":"')[2].partition('"')[0] for row in work.transcript(db.connection, item)]
    assert roles == ["assistant", "tool", "assistant"]


# --- the server itself goes -------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", Loss)
def test_a_run_outlives_a_server_that_crashes_in_the_middle_of_its_last_commit(
    own_server: Any, tmp_path: Path, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", works)
    location = Location("postgresql", own_server.get_uri(), tmp_path)
    with closing(location.init()) as org:
        assignment = governed_work(org)[2].id

    restart = starting_again(own_server, after=1.0)

    def crash() -> None:
        postmaster = own_server.get_pid()
        os.kill(postmaster, signal.SIGQUIT)  # an immediate shutdown: nothing is finished, and recovery follows
        restart.start()

    with proxied(location) as proxy:
        db = Database(through(proxy, location), root=tmp_path, create=False)
        with closing(GivenOrganization(tmp_path, db)) as worker:
            sprung = proxy.lose(loss, "INSERT INTO receipts", crash)
            receipt = worker.run_assignment(assignment)
            requires(sprung)
            assert receipt.status is ReceiptStatus.COMPLETED
            restart.join()
            assert facts(worker.db, assignment) == FINISHED
