"""What left the house stays known: through a crash, a new epoch, a restore, and beside a copy that goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from support import answer, at_one_barrier, killed_in_a_process, rows

from sovereign_agent import assistant_service, assistant_work, effects, journal
from sovereign_agent.agent_loop import Limits, LoopResult, Message, run_loop
from sovereign_agent.assistant_work import Claim
from sovereign_agent.clock import micros, moment
from sovereign_agent.database import LEDGER_NAME, Connection, Database, sqlite_backup
from sovereign_agent.errors import AuthorityLost, PolicyRefusal
from sovereign_agent.llm_lab import ScriptedModel, scripted_turn
from sovereign_agent.tool_dispatch import Dispatcher, ExecutableTool, Fence, Occasion, argument_text

EPOCH = "epoch_1"
SQLITE = pytest.mark.parametrize("engine", ["sqlite"])  # PostgreSQL's own tools back it up
ORDERING = ScriptedModel([scripted_turn(calls=[{"name": "order", "arguments": '{"sku": "TEA"}'}]), scripted_turn("ok")])


CLAIM = Claim("work_1", "session", "prompt", 1, "owner", EPOCH, "", "shop")


def intend(
    db: Database, operation_id: str, arguments: str = "{}", *, claim: Claim = CLAIM, tool: str = "order"
) -> None:
    with db.transaction() as connection:
        effects.intend(connection, operation_id, claim, tool=tool, arguments=arguments, at=7)


def settle(db: Database, operation_id: str, outcome: str) -> None:
    with db.transaction() as connection:
        effects.settle(connection, operation_id, outcome, at=8)


def reconcile(db: Database, operation_id: str, outcome: str = "done") -> None:
    effects.reconcile(db, operation_id, outcome, actor="principal", reason="asked the supplier")


def listed(db: Database) -> list[tuple[str, str, bool]]:
    return [(each.operation_id, each.outcome, each.of_older_epoch) for each in effects.unsettled(db.connection)]


# --- an act and its end -------------------------------------------------------------------------------------


def test_an_act_needs_a_persons_word_until_its_end_is_known(db: Database) -> None:
    for name in ("open", "done", "none", "unknown"):
        intend(db, name)
    for name in ("done", "none", "unknown"):
        settle(db, name, name)
    assert listed(db) == [("open", "", False), ("unknown", "unknown", False)]


@pytest.mark.parametrize(
    ("ended", "told"),
    [("", "unseen"), ("done", "done"), ("none", "none"), ("unknown", "unknown"), ("person", "done, says principal")],
)
def test_an_operation_is_let_out_once_however_it_ended(db: Database, ended: str, told: str) -> None:
    intend(db, "op_1")
    if ended == "person":
        reconcile(db, "op_1")
    elif ended:
        settle(db, "op_1", ended)
    with pytest.raises(PolicyRefusal) as refused:
        intend(db, "op_1", tool="another", claim=replace(CLAIM, id="work_2"))
    assert refused.value.category == "effect_repeated"
    assert f"It ended {told}" in refused.value.why
    assert [row["work_id"] for row in rows(db, "effects")] == ["work_1"]


def test_another_operation_is_let_out(db: Database) -> None:
    intend(db, "op_1")
    intend(db, "op_2")
    assert [each.operation_id for each in effects.unsettled(db.connection)] == ["op_1", "op_2"]
    assert [each.operation_id for each in effects.unsettled(db.connection, after=1, limit=5)] == ["op_2"]
    assert [each.operation_id for each in effects.unsettled(db.connection, limit=1)] == ["op_1"]


def test_one_act_ends_once_and_only_if_it_was_meant(db: Database) -> None:
    intend(db, "op_1")
    assert answer(settle, db, "op_1", "perhaps") == "effect_outcome"
    assert answer(settle, db, "op_2", "done") == "effect_missing"
    assert answer(settle, db, "op_1", "unknown") == "done"
    assert answer(settle, db, "op_1", "done") == "effect_settled"
    assert [row["outcome"] for row in rows(db, "effect_ends")] == ["unknown"]


def test_arguments_are_kept_as_a_digest_of_all_and_the_first_of_their_text(db: Database) -> None:
    text = json.dumps({"sku": "T" * 2000})
    intend(db, "op_1", text)
    (found,) = effects.unsettled(db.connection)
    assert found.arguments == text[: effects.ARGUMENT_CHARACTERS]
    assert found.arguments_sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert (found.tool, found.generation, found.epoch, micros(found.created_at)) == ("order", 1, EPOCH, 7)


# --- a person's word ----------------------------------------------------------------------------------------


def test_a_persons_word_is_final_and_an_event_tells_of_it(db: Database) -> None:
    intend(db, "op_1")
    reconcile(db, "op_1", "none")
    assert listed(db) == []
    for again in (partial(reconcile, db, "op_1", "done"), partial(settle, db, "op_1", "done")):
        assert answer(again) == "effect_settled"
    (told,) = journal.events_of(db.connection, "op_1")
    assert (told.kind, told.actor, told.detail["outcome"]) == ("effect.reconciled", "principal", "none")


def test_a_person_speaks_of_what_is_open_with_a_reason_and_without_a_guess(db: Database) -> None:
    intend(db, "op_1")
    intend(db, "op_2")
    settle(db, "op_2", "done")
    assert answer(reconcile, db, "op_2") == "effect_settled"
    assert answer(reconcile, db, "op_3") == "effect_missing"
    assert answer(reconcile, db, "op_1", "unknown") == "effect_outcome"
    assert answer(effects.reconcile, db, "op_1", "done", actor="me", reason=" ") == "reason_missing"
    assert listed(db) == [("op_1", "", False)]
    assert answer(reconcile, db, "op_1") == "done"


def test_a_person_waits_for_the_worker_that_may_still_see_the_end(db: Database) -> None:
    assistant_work.enqueue(db, "mail:1", "lucy", "Order tea")
    claim = assistant_work.claim(db, "worker")
    assert claim
    intend(db, "op_1", claim=claim)
    intend(db, "op_2", claim=claim)
    assert answer(reconcile, db, "op_1") == "effect_in_flight"
    settle(db, "op_2", "unknown")
    assert answer(reconcile, db, "op_2") == "done"  # its worker has seen all that it will see
    assistant_work.release(db, claim)
    assert answer(reconcile, db, "op_1") == "done"


def test_a_person_waits_for_a_worker_until_its_claim_runs_out_and_no_longer(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant_work.enqueue(db, "mail:1", "lucy", "Order tea")
    claim = assistant_work.claim(db, "worker")
    assert claim
    intend(db, "op_1", claim=claim)
    (until,) = (row["expires_at"] for row in rows(db, "assistant_work"))
    for at, said in ((until - 1, "effect_in_flight"), (until, "done")):
        monkeypatch.setattr(type(db.connection), "now", lambda _, at=at: moment(at))
        assert answer(reconcile, db, "op_1") == said


def test_a_claim_of_another_generation_or_epoch_does_not_see_the_end_of_an_act(db: Database) -> None:
    assistant_work.enqueue(db, "mail:1", "lucy", "Order tea")
    held = assistant_work.claim(db, "worker")
    assert held
    for name, claim in (
        ("op_held", held),
        ("op_generation", replace(held, generation=2)),
        ("op_epoch", replace(held, epoch=EPOCH)),
        ("op_item", CLAIM),
    ):
        intend(db, name, claim=claim)
    assert [each.operation_id for each in effects.unsettled(db.connection) if each.held_until] == ["op_held"]


def _speak(number: int, location: Any) -> str:
    with closing(location.open()) as db:
        return answer(effects.reconcile, db, "op_1", "done", actor=f"actor {number}", reason="r")


def test_of_eight_people_who_speak_at_once_one_has_spoken(db: Database, location: Any) -> None:
    intend(db, "op_1")
    assert sorted(at_one_barrier(8, _speak, location)) == ["done"] + ["effect_settled"] * 7
    assert len(rows(db, "effect_ends")) == 1


# --- a shop and its supplier --------------------------------------------------------------------------------


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sku: str


@dataclass
class Supplier:
    """The world outside: it knows each order that reached it, and nobody rolls it back."""

    book: Path

    def take(self, operation_id: str) -> None:
        with self.book.open("a") as book:
            book.write(f"{operation_id}\n")

    @property
    def orders(self) -> list[str]:
        return self.book.read_text().split() if self.book.exists() else []


@pytest.fixture
def supplier(tmp_path: Path) -> Supplier:
    return Supplier(tmp_path / "supplier")


class Worker:
    """One claim, its fence, and the loop over it; what it observes of an act is the act's end."""

    def __init__(self, db: Database, claim: Claim, deliver: Callable[[str], Any]) -> None:
        self.db, self.claim, self.deliver = db, claim, deliver
        self.acting: dict[str, str] = {}

    def check(self, connection: Connection, _: Any) -> int:
        assistant_work.assert_current(connection, self.claim)
        return self.claim.generation

    def record(self, connection: Connection, call: Any, now: Occasion, _: Any) -> None:
        at, arguments = micros(connection.now()), argument_text(call.arguments)
        effects.intend(connection, now.operation_id, self.claim, tool=call.name, arguments=arguments, at=at)
        self.acting[call.id] = now.operation_id

    def observe(self, message: Message) -> None:
        with self.db.transaction() as connection:
            at = assistant_work.observe_work(connection, self.claim, message)
            if operation_id := self.acting.pop(message.get("tool_call_id", ""), ""):
                told = json.loads(message["content"])
                at = micros(connection.now())
                effects.settle(connection, operation_id, "done" if told["ok"] else told["effect"], at=at)

    def order(self, arguments: Order, now: Occasion) -> str:
        self.deliver(now.operation_id)
        return f"{arguments.sku} is ordered"

    def run(self) -> LoopResult:
        tool = ExecutableTool("order", "Order goods.", Order, self.order, consequential=True, informed=True)
        fence = Fence(self.db.transaction, self.check, self.record)
        said = [json.loads(row["message"]) for row in assistant_work.transcript(self.db.connection, self.claim.id)]
        result = run_loop(
            ORDERING,
            Dispatcher([tool], allowed={"order"}, fence=fence),
            [{"role": "user", "content": self.claim.prompt}, *said],
            limits=Limits(5, 5, 30, 100),
            observe=self.observe,
            key=self.claim.id,
        )
        assistant_work.finish(self.db, self.claim, "DONE")
        return result


def queue(db: Database, *origins: str) -> None:
    for origin in origins:
        assistant_work.enqueue(db, origin, origin, "Order tea")


def work_off(db: Database, deliver: Callable[[str], Any]) -> list[str]:
    """Run all that is queued; what each act was answered with."""
    told: list[str] = []
    while claim := assistant_work.claim(db, "worker"):
        result = Worker(db, claim, deliver).run()
        told += [message["content"] for message in result.messages if message["role"] == "tool"]
    return told


def lose_the_answer(supplier: Supplier, operation_id: str) -> None:
    supplier.take(operation_id)
    raise ConnectionError("the order was sent, and the line went dead")


def die_after_sending(supplier: Supplier, operation_id: str) -> None:
    supplier.take(operation_id)
    os.kill(os.getpid(), signal.SIGKILL)


def _work_and_die(location: Any, supplier: Supplier) -> None:
    work_off(location.open(), partial(die_after_sending, supplier))


def _let_the_claim_run_out(db: Database) -> None:
    db.connection.execute("UPDATE assistant_work SET expires_at = 0 WHERE status = 'RUNNING'")


def test_what_a_worker_sees_is_done_and_needs_nobody(db: Database, supplier: Supplier) -> None:
    queue(db, "mail:1", "mail:2")
    assert [json.loads(told)["ok"] for told in work_off(db, supplier.take)] == [True, True]
    assert supplier.orders == [row["operation_id"] for row in rows(db, "effects")]
    assert listed(db) == []


def test_hazard_40_a_worker_killed_after_it_sent_is_not_followed_by_one_that_sends_again(
    db: Database, location: Any, supplier: Supplier
) -> None:
    queue(db, "mail:1")
    assert killed_in_a_process(_work_and_die, location, supplier)
    assert [outcome for _, outcome, _ in listed(db)] == [""]
    _let_the_claim_run_out(db)
    (told,) = work_off(db, supplier.take)
    assert (json.loads(told)["error"], json.loads(told)["effect"]) == ("outcome_unknown", "unknown")
    assert len(supplier.orders) == 1
    assert listed(db) == [(supplier.orders[0], "", False)]  # surfaced, until a person has looked
    reconcile(db, supplier.orders[0])
    assert listed(db) == []


def test_hazard_40_an_order_whose_answer_was_lost_is_unknown_and_not_sent_again(
    db: Database, supplier: Supplier
) -> None:
    queue(db, "mail:1")
    (told,) = work_off(db, partial(lose_the_answer, supplier))
    assert json.loads(told)["effect"] == "unknown"
    assert listed(db) == [(supplier.orders[0], "unknown", False)]
    assert len(supplier.orders) == 1


# --- a new epoch --------------------------------------------------------------------------------------------


def test_a_new_epoch_asks_a_person_about_every_act_of_the_one_before_and_lets_nothing_out_until_then(
    db: Database, supplier: Supplier
) -> None:
    queue(db, "mail:1")
    work_off(db, supplier.take)
    intend(db, "nothing came of it")
    settle(db, "nothing came of it", "none")
    intend(db, "spoken of")
    reconcile(db, "spoken of")
    intend(db, "open")
    assistant_service.new_epoch(db, "principal", "the disk was put back")
    assistant_service.resume(db, "principal", "looked around")
    assert listed(db) == [(supplier.orders[0], "done", True), ("open", "", True)]
    for name in (supplier.orders[0], "open"):
        assert answer(intend, db, "op_2") == "effects_unreconciled"
        reconcile(db, name)
    assert answer(intend, db, "op_2") == "done"


def test_a_worker_of_an_older_epoch_settles_nothing_that_a_person_must_speak_of(db: Database) -> None:
    intend(db, "op_1")
    assistant_service.new_epoch(db, "principal", "why")
    settle(db, "op_1", "done")
    assert listed(db) == [("op_1", "done", True)]


# --- a restore ----------------------------------------------------------------------------------------------


@SQLITE
def test_no_word_is_taken_that_an_unfinished_restore_would_lose(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intend(db, "op_1")
    assistant_service.backup(db, tmp_path / "backup")

    def stop(*_: object, **__: object) -> None:
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_backup, "replace_content", stop)
        assert answer(assistant_service.restore, db, tmp_path / "backup") == "restore_unfinished"
    assert answer(reconcile, db, "op_1") == "restore_unfinished"
    assistant_service.finish_restore(db)
    assert listed(db) == [("op_1", "", True)]
    assert answer(reconcile, db, "op_1") == "done"
    assert listed(db) == []


@SQLITE
def test_hazard_90_a_restored_ledger_sends_nothing_again_until_a_person_has_spoken(
    db: Database, location: Any, supplier: Supplier, tmp_path: Path
) -> None:
    queue(db, "unconfirmed")
    assert killed_in_a_process(_work_and_die, location, supplier)
    queue(db, "mail:1", "mail:2", "mail:3")
    assistant_service.backup(db, tmp_path / "backup.db")
    _let_the_claim_run_out(db)
    work_off(db, supplier.take)
    assert len(supplier.orders) == 4
    keys = {row["operation_id"] for row in rows(db, "effects")}

    assistant_service.restore(db, tmp_path / "backup.db")
    assert assistant_service.health(db).paused
    assert answer(assistant_work.claim, db, "worker") == "paused"
    assert {name for name, _, _ in listed(db)} == keys == set(supplier.orders)
    assert all(older for _, _, older in listed(db))

    assistant_service.resume(db, "principal", "looked around")
    queue(db, "fresh")
    told = work_off(db, supplier.take)
    assert len(supplier.orders) == 4
    effects_told = [json.loads(each)["effect"] for each in told]
    assert effects_told == ["unknown"] * 4 + ["none"]  # nobody is told that the four changed nothing
    assert [row["status"] for row in rows(db, "assistant_work")] == ["DONE"] * 5
    assert {row["operation_id"] for row in rows(db, "effects")} == keys

    for name in keys:
        reconcile(db, name)
    queue(db, "fresher")
    assert json.loads(work_off(db, supplier.take)[0])["ok"]
    assert len(supplier.orders) == len(set(supplier.orders)) == 5


@SQLITE
def test_hazard_90_a_persons_word_outlives_a_restore_to_before_it(db: Database, tmp_path: Path) -> None:
    intend(db, "op_1")
    intend(db, "op_2")
    assistant_service.backup(db, tmp_path / "b")
    reconcile(db, "op_1", "none")
    settle(db, "op_2", "unknown")
    assistant_service.restore(db, tmp_path / "b")
    assert listed(db) == [("op_2", "unknown", True)]
    assistant_service.restore(db, tmp_path / "b")  # nothing is carried twice
    assert listed(db) == [("op_2", "unknown", True)]
    assert [row["outcome"] for row in rows(db, "effect_ends")] == ["none", "unknown"]
    with pytest.raises(PolicyRefusal, match="left the house") as refused:
        intend(db, "op_1")
    assert "It ended none, says principal" in refused.value.why


@SQLITE
def test_hazard_90_an_act_of_the_last_moment_before_the_pause_is_carried_over(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant_service.backup(db, tmp_path / "b")
    mark = assistant_service._mark

    def late(*arguments: Any) -> None:
        intend(db, "op_late")
        mark(*arguments)

    monkeypatch.setattr(assistant_service, "_mark", late)
    assistant_service.restore(db, tmp_path / "b")
    assert listed(db) == [("op_late", "", True)]


def _die_after(name: str, location: Any, source: Path) -> None:
    module: Any = {"_mark": assistant_service, "carry_over": effects}[name]
    real = getattr(module, name)

    def dying(*arguments: Any) -> None:
        real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dying)
    assistant_service.restore(location.open(), source)


@SQLITE
@pytest.mark.parametrize("act", ["finish_restore", "roll_back_restore"])
def test_hazard_92_what_left_the_house_outlives_a_restore_that_was_killed(
    db: Database, location: Any, tmp_path: Path, act: str
) -> None:
    assistant_service.backup(db, tmp_path / "b")
    intend(db, "op_1")
    assert killed_in_a_process(_die_after, "_mark", location, tmp_path / "b")
    getattr(assistant_service, act)(db)
    assert listed(db) == [("op_1", "", act == "finish_restore")]


@SQLITE
def test_hazard_92_a_restore_killed_before_its_pause_has_changed_nothing(
    db: Database, location: Any, tmp_path: Path
) -> None:
    assistant_service.backup(db, tmp_path / "b")
    intend(db, "op_1")
    assert killed_in_a_process(_die_after, "carry_over", location, tmp_path / "b")
    assert (listed(db), assistant_service.health(db).paused) == ([("op_1", "", False)], False)
    assistant_service.restore(db, tmp_path / "b")
    assert listed(db) == [("op_1", "", True)]


# --- a copy that goes on beside it --------------------------------------------------------------------------


@contextmanager
def second_root(db: Database) -> Iterator[Database]:
    """A copy of the ledger and its marker in a root of its own, as a disk that was cloned."""
    root = db.path.parent.parent
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    with closing(Database(copy / LEDGER_NAME, create=False)) as opened:
        yield opened


@SQLITE
def test_hazard_102_a_restored_copy_sends_nothing_until_confirmed_and_the_original_goes_on(
    db: Database, supplier: Supplier, tmp_path: Path
) -> None:
    queue(db, "mail:1")
    work_off(db, supplier.take)
    queue(db, "mail:2")
    assistant_service.backup(db, tmp_path / "b")
    asked = Supplier(tmp_path / "asked by the copy")
    with second_root(db) as second:
        old = assistant_work.claim(second, "a worker of the disk that was copied")
        assert old
        assistant_service.restore(second, tmp_path / "b")
        with pytest.raises(AuthorityLost):
            Worker(second, old, asked.take).run()
        assert answer(assistant_work.claim, second, "worker") == "paused"
        assert [told["error"] for told in map(json.loads, _resumed(second, asked))] == ["tool_failed"]
        assert asked.orders == []
        work_off(db, supplier.take)
        assert len(supplier.orders) == 2
        for effect in effects.unsettled(second.connection):
            reconcile(second, effect.operation_id)
        queue(second, "mail:3")
        assert json.loads(work_off(second, asked.take)[0])["ok"]
    assert listed(db) == []


def _resumed(db: Database, supplier: Supplier) -> list[str]:
    assistant_service.resume(db, "principal", "looked around, but not at the orders")
    return work_off(db, supplier.take)


@SQLITE
def test_an_act_that_an_image_lacks_is_carried_over_to_it_and_one_that_it_has_is_not(
    db: Database, make_location: Any
) -> None:
    with closing(make_location("image").open()) as image:
        for ledger, operation_id in ((db, "op_1"), (image, "op_1"), (db, "op_2")):
            intend(ledger, operation_id)
        with image.transaction() as carried:
            effects.carry_over(db.connection, carried)
        assert sorted(row["operation_id"] for row in rows(image, "effects")) == ["op_1", "op_2"]


END = {"operation_id": "op_1", "outcome": "done", "actor": "me", "reason": "asked", "created_at": 7}


@SQLITE
@pytest.mark.parametrize(
    "other",
    [{}, {"operation_id": "op_2"}, {"outcome": "none"}, {"actor": "you"}, {"reason": "saw it"}, {"created_at": 8}],
    ids=str,
)
def test_an_end_that_an_image_lacks_is_carried_over_to_it_and_one_that_it_has_is_not(
    db: Database, make_location: Any, other: dict[str, Any]
) -> None:
    with closing(make_location("image").open()) as image:
        for ledger, end in ((db, END | other), (image, END)):
            intend(ledger, "op_1")
            intend(ledger, "op_2")
            ledger.connection.execute(
                "INSERT INTO effect_ends (operation_id, outcome, actor, reason, created_at) VALUES (?, ?, ?, ?, ?)",
                tuple(end.values()),
            )
        with image.transaction() as carried:
            effects.carry_over(db.connection, carried)
        assert len(rows(image, "effect_ends")) == (2 if other else 1)
        assert len(rows(image, "effects")) == 2


@SQLITE
def test_hazard_102_a_folder_keeps_the_backups_of_one_lineage(db: Database, tmp_path: Path, make_location: Any) -> None:
    folder, elsewhere = tmp_path / "backups", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "notes.txt").write_text("no backup")
    (folder / "empty").touch()
    (folder / "broken link").symlink_to(folder / "nowhere")
    assistant_service.backup(db, folder / "1.db")
    with second_root(db) as second:
        assert answer(assistant_service.backup, second, folder / "2.db") == "backup_lineage"
        assert not (folder / "2.db").exists()
        assert answer(assistant_service.backup, second, elsewhere / "2.db") == "done"
        assistant_service.restore(second, folder / "1.db")  # reading is no writing
        assert answer(assistant_service.backup, second, folder / "3.db") == "backup_lineage"
    assert answer(assistant_service.backup, db, elsewhere / "3.db") == "backup_lineage"
    assistant_service.restore(db, folder / "1.db")
    assert answer(assistant_service.backup, db, folder / "4.db") == "done"  # the same house, an epoch later
    with closing(make_location("another").open()) as other:
        assert answer(assistant_service.backup, other, folder / "other.db") == "done"  # no restore takes it for ours
