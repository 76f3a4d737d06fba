"""What several test files need: real processes at one barrier or killed at a statement, waiting with a deadline."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import tomlkit

from sovereign_agent import configuration, fencing, journal, outcomes
from sovereign_agent.clock import Clock, ManualClock
from sovereign_agent.database import Connection, Database, Value
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Proposal
from sovereign_agent.records import (
    ActorLease,
    Assignment,
    AttemptStatus,
    ExecutionAttempt,
    Outcome,
    OutcomeState,
    Receipt,
    ReceiptStatus,
    Role,
    Sow,
    SowState,
    new_id,
)
from sovereign_agent.workspace import Workspace, collect_deliverables

ACTOR = "operator"

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["psycopg", "pytest", "sovereign_agent.assistant_service", "sovereign_agent.supervisor"]
)


def eventually(condition: Callable[[], Any], *, within: float = 20.0, every: float = 0.01) -> Any:
    """Poll until `condition` is true and return what it answered; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} was still {answer!r} after {within} s")
        time.sleep(every)


def at_one_barrier(count: int, act: Callable[..., Any], *args: Any, within: float = 60.0) -> list[Any]:
    """Run ``act(n, *args)`` in `count` real processes that start together; return what each one answered, by n.

    A refusal answers with its category. Anything else that is raised fails the test.
    """
    barrier = _processes.Barrier(count)
    answers = _processes.Queue()
    children = [
        _processes.Process(target=_behind_the_barrier, args=(barrier, answers, act, number, args))
        for number in range(count)
    ]
    for child in children:
        child.start()
    try:
        results = sorted((answers.get(timeout=within) for _ in children), key=lambda result: result[0])
    finally:
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()
                child.join()
    broken = [text for _, kind, text in results if kind == "broken"]
    assert not broken, "\n".join(broken)
    return [answer for _, _, answer in results]


@contextmanager
def child(act: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Any]]:
    """Run ``act(pipe, *args)`` in a real process; give its handle and our end of the pipe. It is killed at the end."""
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=act, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def heard(pipe: Any, *, within: float = 30.0) -> Any:
    """The next thing that a child says; fail when it says nothing within `within` seconds."""
    assert pipe.poll(within), f"the child said nothing for {within} s"
    return pipe.recv()


def _behind_the_barrier(
    barrier: Any, answers: Any, act: Callable[..., Any], number: int, args: tuple[Any, ...]
) -> None:
    try:
        barrier.wait(60)
        answers.put((number, "done", act(number, *args)))
    except SovereignError as error:
        answers.put((number, "done", error.category or type(error).__name__))
    except BaseException:  # noqa: BLE001 - whatever it was, the test must hear of it
        answers.put((number, "broken", traceback.format_exc()))


def answer(act: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What an act says: ``done``, or the category of its refusal."""
    try:
        act(*args, **options)
    except SovereignError as error:
        return error.category or type(error).__name__
    return "done"


def killed_in_a_process(act: Callable[..., Any], *args: Any, within: float = 60.0) -> bool:
    """Run ``act(*args)`` in a real process; True when a SIGKILL ended it, False when it came to its end."""
    process = _processes.Process(target=act, args=args)
    process.start()
    process.join(within)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{act} had not ended after {within} s")
    assert process.exitcode in (0, -signal.SIGKILL), f"{act} ended with {process.exitcode}; see its traceback on stderr"
    return process.exitcode != 0


def killed_after_statement(number: int, act: Callable[..., Any], *args: Any) -> bool:
    """Run ``act(*args)`` in a real process that SIGKILLs itself right after its `number`-th ledger statement.

    Counted from the first statement that opens a transaction; opening and committing count as well. False when it had
    ended before that: let `number` rise until then, and every place to die has been tried.
    """
    return killed_in_a_process(_dying, number, act, args)


def _dying(number: int, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    begin = Connection.begin
    seen: list[Callable[..., Any]] = []

    def counted(statement: Callable[..., Any]) -> Callable[..., Any]:
        def run(connection: Connection, *arguments: Any, **options: Any) -> Any:
            result = statement(connection, *arguments, **options)
            if seen or statement is begin:
                seen.append(statement)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in ("begin", "execute", "commit"):
        setattr(Connection, name, counted(getattr(Connection, name)))
    act(*args)


@contextmanager
def hook_after(connection: Connection, fragment: str, action: Callable[[], Any]) -> Iterator[None]:
    """Call `action` once, right after this connection's first statement, or lock, whose SQL contains `fragment`."""
    waiting = [action]

    def hooked(statement: Callable[..., Any]) -> Callable[..., Any]:
        def run(sql: str, params: Sequence[Value] = ()) -> Any:
            result = statement(sql, params)
            if fragment in sql and waiting:
                waiting.pop()()
            return result

        return run

    connection.execute, connection.lock = hooked(connection.execute), hooked(connection.lock)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connection.execute, connection.lock
    assert not waiting, f"no statement contained {fragment!r}"


def new_assignment(db: Database, actor_id: str = ACTOR, *, clock: Clock | None = None) -> Assignment:
    """A CREATED assignment with all that it stands on, made at ledger level."""
    with db.immediate() as connection:
        now = db.now(clock)
        outcome = outcomes.create_outcome(
            connection, title="t", desired_state="d", checks=[], owner="owner", subject="", now=now
        )
        outcomes.activate_outcome(connection, outcome.id, actor="owner", now=now)
        sow = outcomes.create_sow(
            connection,
            outcome_id=outcome.id,
            scope="s",
            role=Role.OPERATOR,
            created_by="master",
            required_effect_kind=None,
            now=now,
        )
        outcomes.move_sow(connection, sow.id, (SowState.DRAFT,), SowState.READY, actor="master", now=now)
        return outcomes.create_assignment(
            connection,
            sow_id=sow.id,
            actor_id=actor_id,
            planner_id="master",
            workspace_policy="temporary_directory",
            maximum_seconds=86_400,
            now=now,
        )


def ledger_facts(db: Database, assignment_id: str) -> dict[str, Any]:
    """What the ledger says about one run, without ids, so that two runs can be compared.

    ``pointer`` is the status of the attempt that the assignment points at, None without one, "missing" where the id
    names no attempt. Attempts and their receipts stand in the order of their tokens.
    """
    connection = db.connection
    assignment = outcomes.get_assignment(connection, assignment_id)
    attempts = connection.execute(
        """
        SELECT e.id, e.status, r.status, r.failure_category
          FROM execution_attempts e LEFT JOIN receipts r ON r.attempt_id = e.id
         WHERE e.assignment_id = ? ORDER BY e.fencing_token
        """,
        (assignment_id,),
    ).fetchall()
    statuses = {row[0]: row[1] for row in attempts}
    pointer = assignment.current_execution_attempt
    return {
        "assignment": assignment.state.value,
        "sow": outcomes.get_sow(connection, assignment.sow_id).state.value,
        "pointer": statuses.get(pointer, "missing") if pointer else None,
        "attempts": [row[1] for row in attempts],
        "receipts": [(row[2], row[3]) if row[2] else None for row in attempts],
        "events": [event.kind for event in journal.events_of(connection, assignment_id)],
        "sow_events": [event.kind for event in journal.events_of(connection, assignment.sow_id)],
    }


def rows(db: Database, table: str) -> list[dict[str, Any]]:
    """Everything in a table, to show that nothing of it changed."""
    return sorted((dict(row) for row in db.connection.execute(f"SELECT * FROM {table}")), key=str)


def without_checks(db: Database, table: str) -> None:
    """Take the constraints away that keep impossible numbers out of a table."""
    if db.engine == "sqlite":
        db.connection.execute("PRAGMA ignore_check_constraints = ON")
        return
    checks = db.connection.execute(
        "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(?) AND contype = 'c'", (table,)
    )
    for check in checks:
        db.connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT {check[0]}")


def run_of(
    db: Database,
    clock: ManualClock,
    process: str = "proc_red",
    *,
    lease_ttl: timedelta = fencing.ACTOR_LEASE_TTL,
    **options: Any,
) -> ExecutionAttempt:
    """A running attempt on a new assignment, under a lease that `process` takes or holds."""
    assignment = new_assignment(db, ACTOR, clock=clock)
    lease = fencing.acquire_or_renew_actor_lease(db, ACTOR, process, ttl=lease_ttl, clock=clock)
    return attempt_on(db, assignment.id, lease, clock, **options)


def attempt_on(
    db: Database, assignment_id: str, lease: ActorLease, clock: Clock | None, **options: Any
) -> ExecutionAttempt:
    return fencing.acquire_execution_attempt(
        db, assignment_id, lease.actor_id, lease.process_identity, lease.fencing_token, clock=clock, **options
    )


def renew_attempt(db: Database, attempt: ExecutionAttempt, clock: Clock, **options: Any) -> ExecutionAttempt:
    return fencing.renew_execution_attempt(
        db,
        attempt.assignment_id,
        attempt.id,
        attempt.process_identity,
        attempt.fencing_token,
        clock=clock,
        **options,
    )


def receipt_for(attempt: ExecutionAttempt) -> Receipt:
    return Receipt(
        id=new_id("rcp"),
        assignment_id=attempt.assignment_id,
        attempt_id=attempt.id,
        actor_id=attempt.actor_id,
        status=ReceiptStatus.COMPLETED,
        failure_category="",
        summary="done",
    )


def finish(db: Database, attempt: ExecutionAttempt, clock: ManualClock) -> None:
    with db.transaction() as connection:
        fencing.finish_own_attempt(connection, attempt, receipt_for(attempt), now=clock())


def recover(db: Database, attempt: ExecutionAttempt, clock: ManualClock) -> bool:
    """What a supervisor does with an attempt that has run out."""
    with db.transaction() as connection:
        now = fencing.lock_expired_attempt(connection, attempt.id, clock)
        receipt = journal.lost_receipt(attempt)
        return now is not None and fencing.end_attempt(connection, attempt, AttemptStatus.RECOVERED, receipt, now=now)


def in_a_session(location: Any, act: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run ``act(db, *args)`` on a Database of its own: for a thread, which must not share its neighbour's."""
    db = location.open()
    try:
        return act(db, *args, **options)
    finally:
        db.close()


def until_blocked(db: Database, *waiters: Future[Any]) -> None:
    """Wait until so many sessions wait for a lock as there are `waiters`.

    PostgreSQL tells. SQLite has nothing to ask, but there a writer cannot get in while another transaction is open.
    """
    if db.engine == "postgresql":
        eventually(lambda: _blocked_sessions(db) == len(waiters) or any(waiter.done() for waiter in waiters))
    assert not any(waiter.done() for waiter in waiters)


def _blocked_sessions(db: Database) -> int:
    db.connection.execute("SELECT pg_stat_clear_snapshot()")  # else a transaction sees the sessions as they once were
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return int(db.connection.execute(count).rows[0][0])


# --- governed work: a level above ---------------------------------------------------------------------------


def governed_work(
    org: Organization,
    *,
    checks: Sequence[str] = (),
    worker: str = "operator-course",
    policy: str = "temporary_directory",
    effect: str | None = None,
) -> tuple[Outcome, Sow, Assignment]:
    """An outcome, its one statement of work and a CREATED assignment, made the way people make them."""
    outcome = org.create_outcome("Close the shop", "The till is counted.", checks, "principal-human")
    org.activate(outcome.id, "principal-human")
    sow = org.create_sow(outcome.id, "Count the till", "operator", "master-course", effect)
    org.ready_sow(sow.id)
    return outcome, sow, org.assign(sow.id, worker, "master-course", workspace_policy=policy)


def works(_settings: Any, _envelope: Any, folder: Workspace, *_: Any) -> Proposal:
    """A program that does its work at once, in this process; it stands in for `organization.invoke_actor`."""
    (folder.raw / "stream.log").write_text("...half a stream...")
    (folder.out / "till.txt").write_text("counted: 412.50\n")
    (folder.out / "report.json").write_text('{"status": "completed", "summary": "counted"}')
    deliverables = collect_deliverables(folder, ["till.txt"])
    return Proposal(ReceiptStatus.COMPLETED, "", "counted", None, deliverables)


def lock_is_free(run: Workspace) -> bool:
    """Whether no guardian is at work in a run's folder."""
    with run.lock.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def judge_and_accept(org: Organization, outcome_id: str, sow_id: str) -> OutcomeState:
    """The rest of the governed life, by actors that had no hand in the work."""
    assert org.verify_sow(sow_id, "verifier-course").passed
    org.review(sow_id, "sparring-course")
    return org.accept(outcome_id, "principal-human").state


def configure(org: Organization, change: Callable[[Any], None]) -> None:
    """Change `sovereign.toml` as its people would, and let this process see it."""
    path = org.root / "sovereign.toml"
    document = tomlkit.parse(path.read_text())
    change(document)
    path.write_text(tomlkit.dumps(document))
    org.settings = configuration.load(org.root)


def in_a_fresh_process(act: Callable[..., Any], *args: Any) -> Any:
    """``act(*args)`` in a process that has nothing in its memory but what it reads now."""
    return at_one_barrier(1, _without_number, act, args)[0]


def _without_number(_: int, act: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return act(*args)


BUMP = "UPDATE lease_tokens SET value = value + 1"


def bump(db: Database) -> None:
    """Write something, in a transaction with the ledger lock."""
    with db.immediate() as connection:
        connection.execute(BUMP)


def counter(db: Database) -> int:
    """Where `bump` has brought it."""
    return int(db.connection.execute("SELECT value FROM lease_tokens").rows[0][0])


def holding(pipe: Any, location: Any) -> None:
    """For `child`: bump in a transaction that stays open until we are told to go on; then stay alive."""
    db = location.open()
    with db.immediate() as connection:
        connection.execute(BUMP)
        pipe.send("holding")
        pipe.recv()
    pipe.send("committed")
    pipe.recv()


def bump_impatiently(_: int, location: Any) -> str:
    """For `at_one_barrier`: what a neighbour hears that does not wait."""
    db = location.open(patience=timedelta(milliseconds=200))
    try:
        return answer(bump, db)
    finally:
        db.close()


def traces(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every name below a folder, itself included, with all that ``find -newer`` and a checksum would tell.

    Looked at in another process: to close a ledger file that this one has open would drop its locks.
    """
    return in_a_fresh_process(_traces, folder)


def _traces(folder: Path) -> dict[str, tuple[object, ...]]:
    return {
        str(each): (each.stat().st_mtime_ns, each.stat().st_size, each.is_file() and each.read_bytes())
        for each in [folder, *folder.rglob("*")]
    }


def shown_on(terminal: int) -> bytes:
    """Everything that was written to a terminal, given our end of it, when the other is closed; closes ours."""
    shown = b""
    with os.fdopen(terminal, "rb", 0) as file, suppress(OSError):  # how Linux says that the other end is closed
        while chunk := file.read(2**16):
            shown += chunk
    return shown


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes other than this one that were started for a folder, wherever they hang in the tree by now."""
    found = list[psutil.Process]()
    for process in psutil.process_iter(["status"]):
        started_for_it = any(str(folder) in place for place in _places(process))
        if started_for_it and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process)
    return found


def _places(process: psutil.Process) -> Iterator[str]:
    for asked in (lambda: [process.cwd()], process.cmdline, lambda: process.environ().values()):
        with suppress(psutil.Error, OSError):  # the second: a process may stand deeper than a path is long
            yield from asked()
