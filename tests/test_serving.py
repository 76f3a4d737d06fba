"""The assistant's service: killed at each turn, stopped, superseded, cut off; and what it tells a model.

The service is a real process, or a thread with sessions of its own. Its model sells ten pieces, one a turn, and asks
again for whatever it was not told to be sold: so a write that the transcript does not know would be repeated.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import Location, starting_again
from pydantic import BaseModel, ConfigDict
from support import (
    at_one_barrier,
    child,
    eventually,
    heard,
    in_a_session,
    killed_after_statement,
    killed_in_a_process,
)

from sovereign_agent import agent_loop, assistant_service, conversation, effects, heartbeat, journal, supervisor
from sovereign_agent import assistant_work as work
from sovereign_agent.agent_loop import Limits, Message, Turn
from sovereign_agent.assistant_work import Claim
from sovereign_agent.clock import monotonic
from sovereign_agent.conversation import Watch
from sovereign_agent.database import Connection, Database, Migration
from sovereign_agent.errors import AuthorityLost, LedgerUnavailable, ProviderFault, SovereignError
from sovereign_agent.llm_lab import ScriptedModel, scripted_turn
from sovereign_agent.organization import Organization
from sovereign_agent.tool_dispatch import Dispatcher, ExecutableTool, Occasion, ToolCall

TURNS = 10
TABLE = "CREATE TABLE sold (item TEXT NOT NULL, piece <integer> NOT NULL, token <integer> NOT NULL) <strict>;"
SOLD = Migration(1, "sold", TABLE, 1)
LIMITS = Limits(model_calls=50, tool_calls=50, seconds=60, output_tokens=100)


class Piece(BaseModel):
    model_config = ConfigDict(extra="forbid")
    piece: int


class Seller:
    """Sells each piece that it was not yet told to be sold, one a turn, and then says how many."""

    def __init__(self, pieces: int = TURNS) -> None:
        self.pieces = pieces
        self.asked = 0

    def complete(self, messages: Sequence[Message], tools: Sequence[Message], **_: Any) -> Turn:
        del tools
        self.asked += 1
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        told = answers(messages[last:])
        sold = {piece for piece, said in told if said["ok"]}
        left = [piece for piece in range(1, self.pieces + 1) if piece not in sold]
        replies = sum(message["role"] == "assistant" for message in messages)
        if not left:
            return Turn(f"{len(sold)} sold.")
        return Turn("", (ToolCall(f"call_{replies + 1}", "sell", {"piece": left[0]}),), "tool_calls")


def answers(messages: Sequence[Message]) -> list[tuple[int, dict[str, Any]]]:
    """The piece of each call, and what its call was answered."""
    told = {
        message["tool_call_id"]: json.loads(message["content"]) for message in messages if message["role"] == "tool"
    }
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return [(json.loads(call["function"]["arguments"])["piece"], told[call["id"]]) for call in calls]


def selling(claim: Claim, then: Callable[[int], object] = bool) -> list[ExecutableTool]:
    """The tool that sells, in the transaction of the fence; `then` is what happens before that is committed."""

    def sell(arguments: Piece, now: Occasion) -> int:
        now.connection.execute(
            "INSERT INTO sold (item, piece, token) VALUES (?, ?, ?)", (claim.id, arguments.piece, now.token)
        )
        then(arguments.piece)
        return arguments.piece

    return [ExecutableTool("sell", "Sell one piece.", Piece, sell, consequential=True, fenced=True)]


@pytest.fixture
def shop(db: Database) -> Database:
    db.extend("sold", [SOLD])
    return db


def sold(db: Database, item: str) -> list[int]:
    rows = db.connection.execute("SELECT piece FROM sold WHERE item = ? ORDER BY piece", (item,))
    return [row["piece"] for row in rows]


def said(db: Database, item: str) -> list[Message]:
    return [json.loads(row["message"]) for row in work.transcript(db.connection, item)]


def status(db: Database, item: str) -> str:
    return str(work.get_work(db.connection, item)["status"])


def is_final(db: Database, item: str) -> bool:
    return status(db, item) in work.FINAL


def events(db: Database, item: str) -> Counter[str]:
    return Counter(event.kind for event in journal.events_of(db.connection, item))


def let_it_run_out(db: Database, item: str) -> None:
    """The time of a dead worker's claim, without waiting for it."""
    db.connection.execute("UPDATE assistant_work SET expires_at = 1 WHERE id = ? AND status = 'RUNNING'", (item,))


def require_whole(db: Database, item: str, pieces: int = TURNS) -> None:
    """Each write at most once, and exactly those that the transcript knows; each call answered once; one end."""
    messages = said(db, item)
    asked = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert len(set(asked)) == len(asked)
    assert sorted(answered) == sorted(asked)
    assert sold(db, item) == sorted(piece for piece, told in answers(messages) if told["ok"])
    assert sold(db, item) == list(range(1, pieces + 1))
    assert (status(db, item), events(db, item)["work.done"]) == ("DONE", 1)
    assert messages[-1:] == [{"role": "assistant", "content": f"{pieces} sold."}]
    assert work.get_work(db.connection, item)["result"] == f"{pieces} sold."


def serve(db: Database, item: str, model: Any = None, tools: Any = selling, **options: Any) -> list[str]:
    """Serve until one item is final; return what was told."""
    lines: list[str] = []
    given = {"owner": "clerk", "limits": LIMITS, "until": lambda: is_final(db, item), "tell": lines.append}
    assistant_service.serve(db, model or Seller(), tools, **(given | options))
    return lines


# --- killed -----------------------------------------------------------------------------------------------


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


BEFORE_THE_REPLY, AFTER_THE_REPLY, BEFORE_THE_COMMIT, AFTER_THE_COMMIT, AFTER_THE_ANSWER = PLACES = (
    "before the reply is recorded",
    "after it is recorded",
    "in the transaction, before its commit",
    "after its commit",
    "after the answer",
)


def dying_service(location: Location, item: str, place: str = "", piece: int = 0) -> None:
    """A service that kills itself at a place of the turn that sells a piece."""
    work.CRASH_LIMIT = 10**6  # an executioner is no poison
    model, at = Seller(), lambda here, now: die() if (here, now) == (place, piece) else None
    complete, observe, invoke, explain = model.complete, work.observe, Dispatcher.invoke, conversation._Record.explain

    def piece_of(call: ToolCall) -> int:
        return int(json.loads(call.arguments)["piece"]) if isinstance(call.arguments, str) else call.arguments["piece"]

    def completed(messages: Any, tools: Any, **options: Any) -> Turn:
        turn = complete(messages, tools, **options)
        at(BEFORE_THE_REPLY, piece_of(turn.calls[0]) if turn.calls else 0)
        return turn

    def observed(db: Database, claim: Claim, message: Message) -> int:
        seq = observe(db, claim, message)
        for call in message.get("tool_calls", ()):
            at(AFTER_THE_REPLY, json.loads(call["function"]["arguments"])["piece"])
        return seq

    def invoked(dispatcher: Dispatcher, call: ToolCall, *arguments: Any, **options: Any) -> Any:
        told = invoke(dispatcher, call, *arguments, **options)
        at(AFTER_THE_COMMIT, piece_of(call))
        return told

    def explained(record: Any, call: ToolCall, told: Any) -> None:
        explain(record, call, told)
        at(AFTER_THE_ANSWER, piece_of(call))

    model.complete = completed  # type: ignore[method-assign]
    work.observe = observed  # type: ignore[assignment]
    Dispatcher.invoke = invoked  # type: ignore[method-assign]
    conversation._Record.explain = explained  # type: ignore[method-assign]

    def tools(claim: Claim) -> list[ExecutableTool]:
        return selling(claim, lambda now: at(BEFORE_THE_COMMIT, now))

    in_a_session(location, serve, item, model, tools)


@pytest.mark.parametrize("place", PLACES)
def test_a_service_killed_at_each_of_ten_turns_repeats_no_write_and_leaves_no_call_unanswered(
    shop: Database, location: Location, place: str
) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.")
    for piece in range(1, TURNS + 1):
        assert killed_in_a_process(dying_service, location, item, place, piece), (place, piece)
        let_it_run_out(shop, item)
    assert not killed_in_a_process(dying_service, location, item)
    require_whole(shop, item)
    assert events(shop, item)["work.claimed"] == TURNS + 1


def test_a_service_killed_at_any_statement_repeats_no_write_and_leaves_no_call_unanswered(
    shop: Database, location: Location
) -> None:
    for number in range(1, 500):
        item = work.enqueue(shop, f"mail:{number}", f"session {number}", "Sell one.")
        killed = killed_after_statement(number, service_of_one, location, item)
        let_it_run_out(shop, item)
        serve(shop, item, Seller(1))
        require_whole(shop, item, pieces=1)
        if not killed:
            break
    assert number > 20
    assert not killed


def service_of_one(location: Location, item: str) -> None:
    """A service that writes nothing but work: its own row is for people to see."""
    heartbeat.Presence.beat = heartbeat.Presence.leave = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    in_a_session(location, serve, item, Seller(1))


# --- running beside the test ------------------------------------------------------------------------------


@dataclass
class Running:
    """A service in a thread of this process, with sessions of its own."""

    watch: Watch
    told: list[str] = field(default_factory=list)


@contextmanager
def running(
    location: Location, model: Any = None, tools: Any = selling, *, patience: float = 0.2, **options: Any
) -> Iterator[Running]:
    """Serve meanwhile, and stop at the end; whatever ended the service before fails the test."""
    service, ended = Running(Watch()), list[BaseException]()

    def run() -> None:
        given = {"owner": "clerk", "limits": LIMITS, "watch": service.watch, "tell": service.told.append} | options
        try:
            with closing(location.open(patience=timedelta(seconds=patience))) as db:
                assistant_service.serve(db, model or Seller(), tools, **given)
        except BaseException as error:  # noqa: BLE001 - the test's own thread has to hear of it
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield service
    finally:
        service.watch.stopping = True
        thread.join(30)
    assert not thread.is_alive()
    assert not ended, ended


class Held:
    """A seller that thinks until it is let go on; `thinks` says that it has begun."""

    def __init__(self, pieces: int = TURNS) -> None:
        self.thinks, self.goes_on, self.seller = threading.Event(), threading.Event(), Seller(pieces)

    def complete(self, messages: Sequence[Message], tools: Sequence[Message], **options: Any) -> Turn:
        self.thinks.set()
        assert self.goes_on.wait(30)
        return self.seller.complete(messages, tools, **options)


def test_what_is_queued_while_a_service_idles_is_answered_without_a_delay_that_one_would_notice(
    shop: Database, location: Location
) -> None:
    waits: list[float] = []
    with running(location, Seller(1)):
        for number in range(5):
            eventually(lambda: heartbeat.services(shop.connection))
            began = time.monotonic()
            item = work.enqueue(shop, f"mail:{number}", "lucy", "Sell one.")
            eventually(lambda item=item: is_final(shop, item))
            waits.append(time.monotonic() - began)
    assert min(waits) < 1.0


def test_two_services_on_one_queue_share_its_items_and_answer_each_once(shop: Database, location: Location) -> None:
    items = [work.enqueue(shop, f"mail:{n}", f"session {n % 4}", "Sell two.") for n in range(12)]
    at_one_barrier(2, serve_all, location, items)
    for item in items:
        require_whole(shop, item, pieces=2)
        assert events(shop, item)["work.claimed"] == 1


def serve_all(_: int, location: Location, items: list[str]) -> None:
    def act(db: Database) -> None:
        serve(db, "", Seller(2), until=lambda: all(is_final(db, item) for item in items))

    in_a_session(location, act)


def test_a_claim_is_renewed_while_the_model_thinks(shop: Database, location: Location) -> None:
    item, model = work.enqueue(shop, "mail:1", "lucy", "Sell the lot."), Held()
    with running(location, model, ttl=1.0):
        assert model.thinks.wait(30)
        first = work.get_work(shop.connection, item)["expires_at"]
        eventually(lambda: work.get_work(shop.connection, item)["expires_at"] > first + 2_000_000)
        assert work.claim(shop, "another") is None
        model.goes_on.set()
        eventually(lambda: is_final(shop, item))
    require_whole(shop, item)


# --- what leaves the house --------------------------------------------------------------------------------


def mailing(_: Claim, then: Callable[[], object] = bool) -> list[ExecutableTool]:
    """A tool that acts outside of the ledger."""

    def mail(arguments: Piece) -> int:
        then()
        if arguments.piece == 2:
            raise ConnectionError("nobody knows whether it arrived")
        return arguments.piece

    return [ExecutableTool("sell", "Sell one piece by mail.", Piece, mail, consequential=True)]


def ends(db: Database, item: str) -> list[tuple[str, str]]:
    found = db.connection.execute(
        """
        SELECT e.tool, n.outcome FROM effects e LEFT JOIN effect_ends n ON n.operation_id = e.operation_id
         WHERE e.work_id = ? ORDER BY e.seq
        """,
        (item,),
    )
    return [tuple(row) for row in found]


def test_what_leaves_the_house_is_known_before_it_leaves_and_settled_with_its_answer(shop: Database) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell two by mail.")
    seen = list[Any]()
    script = scripted(asks(1), asks(2), "I tried both.")
    serve(shop, item, script, lambda claim: mailing(claim, lambda: seen.append(ends(shop, item))))
    assert seen == [[("sell", None)], [("sell", "done"), ("sell", None)]]
    assert ends(shop, item) == [("sell", "done"), ("sell", "unknown")]
    (left,) = effects.unsettled(shop.connection)
    assert (left.work_id, left.generation, left.outcome) == (item, 1, "unknown")
    assert status(shop, item) == "DONE"


def test_what_a_killed_service_let_out_is_unknown_to_the_model_and_waits_for_a_person(
    shop: Database, location: Location
) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell one by mail.")
    assert killed_in_a_process(mail_and_die, location, item)
    let_it_run_out(shop, item)
    serve(shop, item, scripted(asks(1), "I do not know."), mailing)
    assert [told["error"] for _, told in answers(said(shop, item))] == ["outcome_unknown"]
    assert [(left.work_id, left.outcome) for left in effects.unsettled(shop.connection)] == [(item, "")]
    assert status(shop, item) == "DONE"


def mail_and_die(location: Location, item: str) -> None:
    in_a_session(location, serve, item, scripted(asks(1), "Sold."), lambda claim: mailing(claim, die))


# --- stopped ----------------------------------------------------------------------------------------------


def held_service(pipe: Any, location: Location, item: str, pieces: int, ttl: float) -> None:
    """A service whose model, and whose tool, say that they are at work, and wait to be told to go on."""

    class Held(Seller):
        def complete(self, messages: Sequence[Message], tools: Sequence[Message], **options: Any) -> Turn:
            pipe.send("thinks")
            pipe.recv()
            return super().complete(messages, tools, **options)

    in_a_session(location, serve, item, Held(pieces), ttl=ttl)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_reply_come_and_hands_the_item_back(
    shop: Database, location: Location, number: signal.Signals
) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.")
    with child(held_service, location, item, TURNS, 60.0) as (process, pipe):
        assert heard(pipe) == "thinks"
        os.kill(process.pid, number)
        pipe.send("go on")
        process.join(30)
        assert process.exitcode == 0
    assert (status(shop, item), sold(shop, item)) == ("READY", [])
    assert [told["error"] for _, told in answers(said(shop, item))] == ["not_run"]
    assert events(shop, item)["work.released"] == 1
    assert heartbeat.services(shop.connection) == []
    serve(shop, item)
    require_whole(shop, item)


def test_a_signal_during_the_last_reply_lets_the_item_be_finished(shop: Database, location: Location) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell nothing.")
    with child(held_service, location, item, 0, 60.0) as (process, pipe):
        assert heard(pipe) == "thinks"
        os.kill(process.pid, signal.SIGTERM)
        pipe.send("go on")
        process.join(30)
        assert process.exitcode == 0
    require_whole(shop, item, pieces=0)


def signaled(process: Any, number: signal.Signals) -> bool:
    """Send one more signal; whether that was the end of it."""
    os.kill(process.pid, number)
    process.join(0.1)
    return process.exitcode is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_a_service_at_once(shop: Database, location: Location, number: signal.Signals) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.")
    with child(held_service, location, item, TURNS, 60.0) as (process, pipe):
        assert heard(pipe) == "thinks"
        os.kill(process.pid, number)
        eventually(lambda: signaled(process, number))
        assert process.exitcode == -number
    assert status(shop, item) == "RUNNING"
    let_it_run_out(shop, item)
    serve(shop, item)
    require_whole(shop, item)


def test_a_worker_that_wakes_up_after_its_claim_was_taken_over_writes_nothing_more(
    shop: Database, location: Location
) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.")
    with child(held_service, location, item, TURNS, 1.0) as (process, pipe):
        for _ in range(3):
            assert heard(pipe) == "thinks"
            pipe.send("go on")
        assert heard(pipe) == "thinks"
        os.kill(process.pid, signal.SIGSTOP)
        successor = eventually(lambda: work.claim(shop, "successor"))
        assert (successor.id, successor.generation) == (item, 2)
        before = said(shop, item)
        assert len(before) == 6
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go on")
        work.release(shop, successor)
        for _ in range(TURNS - 2):  # it goes on polling, and claims the item as anybody else would
            assert heard(pipe) == "thinks"
            pipe.send("go on")
        eventually(lambda: is_final(shop, item))
        process.join(30)
        assert process.exitcode == 0
    generations = [row["generation"] for row in work.transcript(shop.connection, item)]
    assert generations == [1] * 6 + [3] * (len(generations) - 6)
    require_whole(shop, item)


# --- a ledger in trouble ----------------------------------------------------------------------------------


def test_a_locked_ledger_is_told_once_and_waited_for(shop: Database, location: Location) -> None:
    item, model = work.enqueue(shop, "mail:1", "lucy", "Sell the lot."), Held()
    with running(location, model) as service:
        assert model.thinks.wait(30)
        with shop.immediate() as connection:
            connection.execute("SELECT * FROM assistant_work <for update>")
            connection.execute("UPDATE lease_tokens SET value = value")
            model.goes_on.set()
            eventually(lambda: service.told)
            time.sleep(1)  # long enough for it to try again, and to say nothing of it
            assert len(service.told) == 1
        eventually(lambda: is_final(shop, item), within=30)
    assert service.told[0].startswith("waiting: ")
    require_whole(shop, item)


def test_a_service_outlives_a_restart_of_postgresql_in_the_middle_of_its_work(own_server: Any, tmp_path: Path) -> None:
    location = Location("postgresql", own_server.get_uri(), tmp_path)
    with closing(location.open()) as db:
        db.extend("sold", [SOLD])
        item = work.enqueue(db, "mail:1", "lucy", "Sell the lot.")

    restarted, starter = list[int](), starting_again(own_server, after=0.5)

    def restart(piece: int) -> None:
        if piece == 3 and not restarted:
            restarted.append(piece)
            own_server.stop()
            starter.start()

    def is_done(db: Database) -> bool:
        try:
            return is_final(db, item)
        except LedgerUnavailable:
            return False

    with running(location, tools=lambda claim: selling(claim, restart)) as service, closing(location.open()) as db:
        eventually(lambda: is_done(db), within=60)
        require_whole(db, item)
    assert restarted == [3]
    starter.join()
    assert [line for line in service.told if line.startswith("waiting: ")]


@pytest.mark.parametrize("committed", [True, False])
def test_a_write_whose_commit_is_not_known_to_have_happened_is_not_repeated_if_it_did(
    shop: Database,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,  # noqa: FBT001
) -> None:
    item, cut = work.enqueue(shop, "mail:1", "lucy", "Sell the lot."), list[int]()
    commit = Connection.commit

    def interrupted(*of: Any) -> None:
        if cut != [4]:
            commit(*of)
            return
        cut.append(0)
        if committed:
            commit(*of)
        raise LedgerUnavailable("The session was cut.", category="ledger_unavailable")

    monkeypatch.setattr(Connection, "commit", interrupted)
    told = serve(
        shop, item, tools=lambda claim: selling(claim, lambda piece: cut.append(4) if piece == 4 and not cut else None)
    )
    assert cut == [4, 0]
    heard = [line.startswith("waiting: A tool's write was committed, and its end not heard") for line in told]
    assert heard == ([True, False] if committed else [False])
    require_whole(shop, item)
    unsold = [piece for piece, told in answers(said(shop, item)) if not told["ok"]]
    assert unsold == ([] if committed else [4])


def replaced(db: Database, location: Location) -> None:
    """Another era of authority begins, as after a restore."""
    if db.engine == "postgresql":
        assistant_service.new_epoch(db, "principal-human", "restored by its own tools")
    else:
        assistant_service.restore(db, location.root / "backup.db", actor="principal-human", reason="a drill")


def test_a_restore_in_the_middle_takes_the_item_from_a_service_which_writes_nothing_and_polls_on(
    shop: Database, location: Location
) -> None:
    item, model = work.enqueue(shop, "mail:1", "lucy", "Sell the lot."), Held()
    if shop.engine == "sqlite":
        assistant_service.backup(shop, location.root / "backup.db")
    with running(location, model) as service:
        assert model.thinks.wait(30)
        replaced(shop, location)
        model.goes_on.set()
        eventually(lambda: [line for line in service.told if "paused" in line])
        assert (status(shop, item), said(shop, item), sold(shop, item)) == ("READY", [], [])
        assistant_service.resume(shop, "principal-human", "looked at")
        eventually(lambda: is_final(shop, item))
    require_whole(shop, item)
    assert {row["generation"] for row in work.transcript(shop.connection, item)} == {
        3 if shop.engine != "sqlite" else 2
    }


def test_a_paused_ledger_is_told_once_and_waited_for(shop: Database, location: Location) -> None:
    assistant_service.pause(shop, "principal-human", "lunch")
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.")
    with running(location) as service:
        eventually(lambda: service.told)
        time.sleep(0.5)
        assert len(service.told) == 1
        assert status(shop, item) == "READY"
        assistant_service.resume(shop, "principal-human", "lunch is over")
        eventually(lambda: is_final(shop, item))
    require_whole(shop, item)


# --- how an item ends -------------------------------------------------------------------------------------


def claimed(db: Database, **extras: Any) -> Claim:
    work.enqueue(db, "mail:1", "lucy", "Sell the lot.", **extras)
    claim = work.claim(db, "clerk")
    assert claim
    return claim


def scripted(*turns: Any) -> ScriptedModel:
    return ScriptedModel(
        [scripted_turn(turn) if isinstance(turn, str) else scripted_turn(calls=turn) for turn in turns]
    )


def asks(piece: Any) -> list[dict[str, Any]]:
    return [{"name": "sell", "arguments": {"piece": piece}}]


ENDS = {
    "an answer": (scripted("Good morning."), LIMITS, "DONE", "Good morning."),
    "a limit": (Seller(), Limits(2, 50, 60, 100), "BLOCKED", "MODEL_CALL_LIMIT"),
    "a tool limit": (Seller(), Limits(50, 2, 60, 100), "BLOCKED", "TOOL_LIMIT"),
    "a reply that says nothing": (scripted(""), LIMITS, "BLOCKED", "EMPTY_REPLY"),
    "a reply that was cut": (ScriptedModel([Turn("Good mor", (), "length")]), LIMITS, "BLOCKED", "TOKEN_LIMIT"),
    "a script that ended": (scripted(asks(1)), LIMITS, "BLOCKED", "MODEL_FAILED script_ended"),
    "a reply too long to be kept": (scripted("x" * 100_000), LIMITS, "BLOCKED", "out_of_bounds"),
}


@pytest.mark.parametrize("ending", ENDS)
def test_an_item_ends_with_its_answer_or_with_the_name_of_what_ended_it(shop: Database, ending: str) -> None:
    model, limits, final, result = ENDS[ending]
    claim = claimed(shop)
    assert conversation.converse(shop, claim, model, selling(claim), limits=limits) == final
    item = work.get_work(shop.connection, claim.id)
    assert (item["status"], item["result"]) == (final, result)


@pytest.mark.parametrize(("turn", "code"), [("", "EMPTY_REPLY"), (Turn(" ", (), "length"), "TOKEN_LIMIT")])
def test_a_reply_that_says_nothing_is_kept_as_evidence(shop: Database, turn: Any, code: str) -> None:
    claim = claimed(shop)
    model = ScriptedModel([scripted_turn(turn) if turn == "" else turn])
    conversation.converse(shop, claim, model, selling(claim))
    kept = [(why["code"], why["detail"]) for why in conversation.evidence(shop.connection, claim.id)]
    assert [each for each, _ in kept] == [code]
    assert "No call and no text: Turn(" in kept[0][1]
    assert "finish_reason=" in kept[0][1]


class Failing:
    """A model that fails so often, and then answers."""

    def __init__(self, times: int, category: str, then: Callable[[], object] = bool) -> None:
        self.left, self.category, self.then = times, category, then

    def complete(self, *_: object, **__: object) -> Turn:
        self.then()
        if not self.left:
            return Turn("Good morning.")
        self.left -= 1
        raise ProviderFault("The endpoint answered 503.", category=self.category, why="upstream is on fire")


def test_a_failure_that_may_pass_puts_an_item_back_while_it_has_retries(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "RETRY_SECONDS", 0.01)
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.", retries=2)
    told = serve(shop, item, Failing(2, "server_error"))
    assert [line.rpartition(": ")[2] for line in told] == ["READY", "READY", "DONE"]
    assert events(shop, item)["work.retried"] == 2


@pytest.mark.parametrize(("category", "retries"), [("server_error", 0), ("unauthorized", 2)])
def test_a_failure_that_will_not_pass_and_one_too_many_end_an_item(shop: Database, category: str, retries: int) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.", retries=retries)
    serve(shop, item, Failing(1, category))
    assert work.get_work(shop.connection, item)["result"] == f"MODEL_FAILED {category}"
    (piece,) = conversation.evidence(shop.connection, item)
    assert (piece["call_id"], piece["code"]) == ("", f"MODEL_FAILED {category}")
    assert "upstream is on fire" in piece["detail"]


def test_a_failure_that_may_pass_hands_the_item_back_when_the_service_is_to_stop(shop: Database) -> None:
    claim, watch = claimed(shop), Watch()
    model = Failing(1, "timeout", lambda: setattr(watch, "stopping", True))
    assert conversation.converse(shop, claim, model, [], watch=watch) == "READY"
    assert events(shop, claim.id)["work.released"] == 1


def test_a_transcript_that_ends_in_an_answer_is_finished_without_asking_again(shop: Database) -> None:
    claim, model = claimed(shop), Seller()
    work.observe(shop, claim, {"role": "assistant", "content": "Ten sold."})
    assert conversation.converse(shop, claim, model, selling(claim)) == "DONE"
    assert (work.get_work(shop.connection, claim.id)["result"], model.asked) == ("Ten sold.", 0)


def test_a_model_is_not_asked_under_a_claim_that_is_gone(shop: Database) -> None:
    claim, model = claimed(shop), Seller()
    work.release(shop, claim)
    with pytest.raises(AuthorityLost):
        conversation.converse(shop, claim, model, selling(claim))
    assert (model.asked, said(shop, claim.id), status(shop, claim.id)) == (0, [], "READY")


def test_a_tools_own_refusal_of_authority_ends_the_item_and_not_the_service(shop: Database) -> None:
    def forbidden(_: Piece) -> None:
        raise PermissionError("not for clerks")

    item = work.enqueue(shop, "mail:1", "lucy", "Sell one.")
    serve(shop, item, Seller(1), lambda _: [ExecutableTool("sell", "Sell one piece.", Piece, forbidden)])
    assert work.get_work(shop.connection, item)["result"] == "AUTHORITY_LOST"
    assert [told["error"] for _, told in answers(said(shop, item))] == ["tool_failed"]


def test_what_failed_is_kept_in_private_and_the_model_gets_a_code(shop: Database) -> None:
    def broken(_: Piece) -> None:
        raise ValueError("the drawer holds 17 keys")

    def long(_: Piece) -> str:
        return "secret " * 10_000

    for handler, code, part in ((broken, "tool_failed", "17 keys"), (long, "result_too_large", "secret " * 10_000)):
        item = work.enqueue(shop, f"mail:{code}", code, "Look.")
        tools = [ExecutableTool("sell", "Look.", Piece, handler)]
        serve(shop, item, scripted(asks(1), "I looked."), lambda _, tools=tools: tools)
        (piece,) = conversation.evidence(shop.connection, item)
        assert (piece["code"], piece["generation"]) == (code, 1)
        assert part in piece["detail"]
        assert part not in json.dumps(said(shop, item))
        with pytest.raises(SovereignError):
            shop.connection.execute("UPDATE assistant_evidence SET detail = ''")
    assert status(shop, item) == "DONE"


def test_a_refusal_is_kept_with_its_category_its_reason_and_where_to_look(shop: Database) -> None:
    def act(_: Piece) -> None:
        raise AssertionError("nothing may leave")

    lost = claimed(shop)
    with shop.transaction() as connection:
        effects.intend(connection, "op_1", lost, tool="sell", arguments="{}", at=7)
    assistant_service.new_epoch(shop, "operator", "a bad disk")
    assistant_service.resume(shop, "operator", "go on")
    item = work.enqueue(shop, "mail:2", "max", "Sell one.")
    work.cancel(shop, lost.id)
    serve(shop, item, scripted(asks(1), "I could not."), lambda _: only(act))
    ((_, told),) = answers(said(shop, item))
    (kept,) = conversation.evidence(shop.connection, item)
    assert kept["detail"] == (
        "PolicyRefusal effects_unreconciled: Nothing left the house. Acts of an older epoch may stand outside;"
        " no person has said which. See sovereign-agent assistant effects."
    )
    assert (told["error"], "epoch" in json.dumps(told)) == ("tool_failed", False)


@pytest.mark.parametrize(("quotes", "told"), [(19_990, True), (30_000, False)])
def test_a_result_is_bounded_so_that_the_ledger_takes_it_escaped_twice(
    shop: Database, quotes: int, *, told: bool
) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Look.")
    tools = [ExecutableTool("sell", "Look.", Piece, lambda _: '"' * quotes)]
    serve(shop, item, scripted(asks(1), "I looked."), lambda _: tools)
    assert status(shop, item) == "DONE"
    assert [answer["ok"] for _, answer in answers(said(shop, item))] == [told]


def only(handler: Callable[..., Any], **kind: Any) -> list[ExecutableTool]:
    return [ExecutableTool("sell", "Sell one piece.", Piece, handler, consequential=True, **kind)]


@pytest.mark.parametrize(
    "commit",
    [lambda connection: connection.execute("COMMIT"), lambda connection: connection.commit()],
    ids=["in words", "by its method"],
)
def test_hazard_63_a_tool_that_commits_by_itself_has_written_nothing_and_is_told_so(
    shop: Database, commit: Any
) -> None:
    def sell(arguments: Piece, now: Occasion) -> float:
        now.connection.execute("INSERT INTO sold (item, piece, token) VALUES ('x', ?, 1)", (arguments.piece,))
        commit(now.connection)
        return float("nan")  # so that its answer is none in any case

    item = work.enqueue(shop, "mail:1", "lucy", "Sell one.")
    serve(shop, item, scripted(asks(1), "I tried."), lambda _: only(sell, fenced=True))
    ((_, told),) = answers(said(shop, item))
    assert (status(shop, item), told["error"], told["effect"], sold(shop, "x")) == ("DONE", "tool_failed", "none", [])


LATER = """
CREATE TABLE shelves (id <integer> PRIMARY KEY) <strict>;
CREATE TABLE boxes (shelf <integer> NOT NULL REFERENCES shelves (id) DEFERRABLE INITIALLY DEFERRED) <strict>;
"""


def test_a_write_that_no_commit_takes_is_answered_within_the_limits_of_one_life(shop: Database) -> None:
    shop.extend("boxes", [Migration(1, "boxes", LATER, 1)])

    def put(arguments: Piece, now: Occasion) -> None:
        now.connection.execute("INSERT INTO boxes (shelf) VALUES (?)", (arguments.piece,))

    item = work.enqueue(shop, "mail:1", "lucy", "Sell one.")
    serve(shop, item, scripted(asks(1), asks(2), "I tried."), lambda _: only(put, fenced=True))
    assert [told["error"] for _, told in answers(said(shop, item))] == ["tool_failed"] * 2
    assert (status(shop, item), work.get_work(shop.connection, item)["generation"]) == ("DONE", 1)


def tools_that_fail(_: Claim) -> list[ExecutableTool]:
    raise ValueError("no such shop")


def test_an_item_whose_tools_cannot_be_made_ends_and_the_service_goes_on(shop: Database) -> None:
    items = [work.enqueue(shop, f"mail:{number}", f"session {number}", "Sell one.") for number in range(3)]
    given = dict(zip(items, (tools_that_fail, lambda claim: selling(claim) * 2, selling), strict=True))
    serve(shop, items[2], Seller(1), lambda claim: given[claim.id](claim))
    assert [status(shop, item) for item in items] == ["BLOCKED", "BLOCKED", "DONE"]
    assert work.get_work(shop.connection, items[0])["result"] == "tools_unusable"
    (why,) = conversation.evidence(shop.connection, items[0])
    assert "no such shop" in why["detail"]


LINES = [
    {"note": "she called"},
    {"role": "finding", "content": "Vanilla is low."},
    {"role": 7, "content": "x"},
    {"role": "assistant"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": ["Ten sold."]},
    {"role": "assistant", "content": "", "tool_calls": 5},
    {"role": "assistant", "content": "", "tool_calls": [{}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": ["c"], "function": {"name": "a", "arguments": "{}"}}]},
    {"role": "tool", "content": "x", "tool_call_id": ["c"]},
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_of_a_transcript_that_is_no_message_is_kept_and_not_told_to_the_model(
    shop: Database, line: dict[str, Any]
) -> None:
    claim, heard = claimed(shop), list[Sequence[Message]]()
    work.observe(shop, claim, line)
    work.observe(shop, claim, {"role": "user", "content": "Be quick."})
    work.release(shop, claim)

    class Listening(Seller):
        def complete(self, messages: Sequence[Message], *_: Any, **__: Any) -> Turn:
            heard.append(messages)
            return Turn("Ten sold.")

    serve(shop, claim.id, Listening())
    assert [message["content"] for message in heard[0]] == ["Sell the lot.", "Be quick."]
    assert (said(shop, claim.id)[0], status(shop, claim.id)) == (line, "DONE")


def test_a_transcript_that_cannot_be_read_ends_its_item_and_not_the_service(shop: Database) -> None:
    broken, sound = (work.enqueue(shop, f"mail:{number}", f"session {number}", "Sell one.") for number in range(2))
    shop.connection.execute(
        "INSERT INTO assistant_transcript (work_id, generation, message, created_at) VALUES (?, 1, '{\"role', 1)",
        (broken,),
    )
    serve(shop, sound, Seller(1))
    assert work.get_work(shop.connection, broken)["result"] == "transcript_unreadable"
    assert (status(shop, broken), status(shop, sound)) == ("BLOCKED", "DONE")


def interrupts(*_: object) -> None:
    raise KeyboardInterrupt


def exits(*_: object) -> None:
    raise SystemExit(3)


def test_hazard_50_an_item_that_ends_each_service_is_parked_and_the_next_one_is_answered(shop: Database) -> None:
    poison = work.enqueue(shop, "mail:1", "lucy", "Sell one.")
    for _ in range(work.CRASH_LIMIT):
        with pytest.raises(KeyboardInterrupt):
            serve(shop, poison, Seller(1), lambda _: only(interrupts))
        let_it_run_out(shop, poison)
    sound = work.enqueue(shop, "mail:2", "max", "Sell one.")
    serve(shop, sound, Seller(1))
    assert (status(shop, poison), status(shop, sound)) == ("PARKED", "DONE")


def test_a_tool_that_exits_has_failed_and_its_service_goes_on(shop: Database) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell one.")
    serve(shop, item, scripted(asks(1), "None was left."), lambda _: only(exits))
    assert json.loads(said(shop, item)[1]["content"]) == {"ok": False, "error": "tool_failed", "effect": "unknown"}
    (why,) = conversation.evidence(shop.connection, item)
    assert (status(shop, item), why["code"], why["detail"]) == ("DONE", "tool_failed", "SystemExit: 3")


def test_tools_whose_maker_exits_end_their_item_and_not_the_service(shop: Database) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell one.")

    def tools(_: Claim) -> Iterator[ExecutableTool]:
        exits()
        yield from ()

    serve(shop, item, Seller(1), tools)
    assert (status(shop, item), work.get_work(shop.connection, item)["result"]) == ("BLOCKED", "tools_unusable")


def test_hazard_49_a_service_that_hangs_in_a_tool_loses_its_claim_although_it_is_alive(
    shop: Database, location: Location
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(arguments: Piece) -> int:
        hangs.set()
        assert goes_on.wait(60)
        return arguments.piece

    item = work.enqueue(shop, "mail:1", "lucy", "Sell one.")
    with running(
        location, Seller(1), lambda _: only(hang), ttl=0.4, limits=Limits(50, 50, seconds=0.5, output_tokens=100)
    ) as service:
        assert hangs.wait(30)
        # Longer than one life may take, and the ledger shows what became of its claim.
        eventually(lambda: work.claim(shop, "another clerk"))
        assert status(shop, item) == "RUNNING"
        goes_on.set()
        eventually(lambda: [line for line in service.told if "superseded" in line])
    assert [row["generation"] for row in work.transcript(shop.connection, item)] == [1]


def test_hazard_50_an_item_that_was_interrupted_by_pauses_is_given_back_and_not_lost(
    shop: Database, location: Location
) -> None:
    item, model, looks = work.enqueue(shop, "mail:1", "lucy", "Sell one."), Held(1), list[int]()
    with running(location, model, until=lambda: looks.append(1)):
        for _ in range(work.CRASH_LIMIT):
            assert model.thinks.wait(30)
            model.thinks.clear()
            assistant_service.pause(shop, "principal-human", "lunch")
            looks.clear()
            model.goes_on.set()
            eventually(lambda: len(looks) > 1)
            model.goes_on.clear()
            assistant_service.resume(shop, "principal-human", "lunch is over")
        assert model.thinks.wait(30)
        model.goes_on.set()
        eventually(lambda: is_final(shop, item))
    require_whole(shop, item, pieces=1)
    assert events(shop, item)["work.released"] == work.CRASH_LIMIT


# --- what a model is asked with ---------------------------------------------------------------------------


def heard_by(db: Database, *, most_bytes: int = 2**17, system: str = "", session: str = "lucy") -> list[Message]:
    """What the model of the next item of a session is asked with."""
    work.enqueue(db, f"mail:{monotonic()}", session, "And now?")
    claim = work.claim(db, "clerk")
    assert claim
    told = conversation.context(db.connection, claim, system=system, most_bytes=most_bytes)
    work.cancel(db, claim.id)
    return told


def had(db: Database, prompt: str, answer: str, status: str = "DONE", session: str = "lucy") -> None:
    work.enqueue(db, f"had:{monotonic()}", session, prompt)
    claim = work.claim(db, "clerk")
    assert claim
    work.observe(db, claim, {"role": "assistant", "content": "", "tool_calls": [{"id": "private"}]})
    work.finish(db, claim, status, answer)


def test_a_model_is_told_the_earlier_turns_of_its_session_and_of_no_other(db: Database) -> None:
    had(db, "How many?", "Two.")
    had(db, "Somebody else's", "secret", session="another")
    had(db, "Order some.", "TIME_LIMIT", "BLOCKED")
    had(db, "Never mind.", "", "CANCELED")
    assert heard_by(db, system="You keep a shop.") == [
        {"role": "system", "content": "You keep a shop."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Order some."},
        {"role": "assistant", "content": "(No answer was given: TIME_LIMIT.)"},
        {"role": "user", "content": "And now?"},
    ]


def test_the_oldest_turns_are_left_out_and_the_model_is_told_how_many(db: Database) -> None:
    for number in range(45):
        had(db, f"question {number}", "x" * 1_000)
    everything = heard_by(db)
    assert len(everything) == 91
    told = heard_by(db, most_bytes=30_000)
    assert len(json.dumps(told)) <= 30_200
    kept = len(told) // 2 - 1
    assert told[0]["content"] == f"The oldest turns of this conversation are left out, {45 - kept} of them."
    assert told[1:] == everything[-2 * kept - 1 :]
    assert heard_by(db, most_bytes=30_000) == told
    assert [message["role"] for message in heard_by(db, most_bytes=0)] == ["system", "user"]


def test_what_is_left_out_is_counted_up_to_a_bound(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MOST_COUNTED", 3)
    for number in range(4):
        had(db, f"question {number}", "x" * 1_000)
    assert heard_by(db, most_bytes=2_500)[0]["content"].endswith(" 2 of them.")
    assert heard_by(db, most_bytes=0)[0]["content"].endswith(" 3 or more of them.")


def test_an_item_that_was_interrupted_is_told_whole_with_each_call_beside_its_answer(shop: Database) -> None:
    had(shop, "How many?", "Two.")
    claim = claimed(shop)
    stop = iter([False] * 8 + [True] * 100)
    assert conversation.converse(shop, claim, Seller(), selling(claim), stop=lambda: next(stop)) == "READY"
    told = conversation.context(shop.connection, claim, most_bytes=0)
    assert told[1:] == [{"role": "user", "content": "Sell the lot."}, *said(shop, claim.id)]
    assert agent_loop.paired(told) == (told, [])


def test_the_turns_of_a_session_are_found_by_their_index(db: Database, engine: str) -> None:
    if engine == "postgresql":
        db.connection.execute("SET enable_seqscan = off")
    plan = "EXPLAIN QUERY PLAN" if engine == "sqlite" else "EXPLAIN"
    reads = list[str]()

    class Listening:
        def execute(self, sql: str, params: Any = ()) -> Any:
            reads.append("\n".join(map(str, map(tuple, db.connection.execute(f"{plan} {sql}", params)))))
            return db.connection.execute(sql, params)

    conversation._answered_before(Listening(), "lucy", 10)  # type: ignore[arg-type]
    conversation._count_up_to(Listening(), "lucy", 10)  # type: ignore[arg-type]
    assert len(reads) == 2
    assert all("assistant_work_answered" in read for read in reads), reads


# --- to be seen -------------------------------------------------------------------------------------------


def test_a_service_is_seen_while_it_runs_and_not_any_more(shop: Database, location: Location) -> None:
    item, model = work.enqueue(shop, "mail:1", "lucy", "Sell the lot."), Held()
    with running(location, model):
        assert model.thinks.wait(30)
        (seen,) = heartbeat.services(shop.connection)
        assert (seen.kind, seen.verdict, seen.work_id, seen.pid) == ("assistant", "ALIVE", item, os.getpid())
        assert seen.last_claim
        model.goes_on.set()
        eventually(lambda: heartbeat.services(shop.connection)[0].work_id == "")
        assert assistant_service.health(shop).services[0].last_claim == seen.last_claim
    assert heartbeat.services(shop.connection) == []


def test_a_killed_service_is_seen_as_stale_and_forgotten_after_a_day(db: Database) -> None:
    killed = heartbeat.Presence(db, "assistant", "proc_killed")
    killed.beat()
    (seen,) = heartbeat.services(db.connection)
    assert seen.verdict == "ALIVE"
    db.connection.execute("UPDATE services SET last_poll = last_poll - ?", (21 * 1_000_000,))
    heartbeat.Presence(db, "supervisor", "proc_new").beat()
    assert [(one.kind, one.verdict) for one in heartbeat.services(db.connection)] == [
        ("supervisor", "ALIVE"),
        ("assistant", "STALE"),
    ]
    db.connection.execute("UPDATE services SET last_poll = last_poll - ?", (24 * 3_600 * 1_000_000,))
    heartbeat.Presence(db, "supervisor", "proc_newest").beat()
    assert [one.process_identity for one in heartbeat.services(db.connection)] == ["proc_newest"]


def test_an_idle_service_writes_its_row_every_few_seconds_and_no_more_often(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now[0])
    presence = heartbeat.Presence(db, "assistant", "proc_idle")
    polls = []
    for now[0] in (100.0, 101.0, 104.9, 105.0):
        presence.beat()
        polls.append(heartbeat.services(db.connection)[0].last_poll)
    assert polls[0] == polls[1] == polls[2] < polls[3]


def test_a_service_that_cannot_show_itself_works_all_the_same(shop: Database) -> None:
    item = work.enqueue(shop, "mail:1", "lucy", "Sell the lot.")
    shop.connection.execute("DROP TABLE services")
    serve(shop, item)
    require_whole(shop, item)


def test_a_supervisor_is_seen_while_it_runs(org: Organization) -> None:
    seen: list[str] = []

    def look(_: object) -> None:
        seen.extend(one.kind for one in heartbeat.services(org.db.connection))
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        assert supervisor.run(org, on_tick=look) == 0
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert seen == ["supervisor"]
    assert heartbeat.services(org.db.connection) == []


# --- waiting ----------------------------------------------------------------------------------------------


def test_a_waiting_model_notices_that_its_service_is_to_stop_and_that_its_claim_is_gone() -> None:
    watch, began = Watch(), time.monotonic()
    threading.Timer(0.2, lambda: setattr(watch, "stopping", True)).start()
    assert watch.sleep(30) is True
    assert time.monotonic() - began < 15
    watch = Watch(lost=AuthorityLost(work.SUPERSEDED, category="claim_lost"))
    with pytest.raises(AuthorityLost):
        watch.sleep(0)
    assert Watch().sleep(0.01) is False
