"""Lucy's shop: goods and money move together, once, and only on the strength of work that was ordered and done."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from unittest import mock

import pytest
from pydantic import ValidationError
from support import answer, at_one_barrier, eventually, killed_after_statement, rows

from reference_organizations.store import demo, stock
from reference_organizations.store.agent import shop_tools
from reference_organizations.store.organization import (
    CHECKS,
    OPERATOR,
    PLANNER,
    PRINCIPAL,
    REVIEWER,
    VERIFIER,
    make_store,
)
from reference_organizations.store.stock import RESTOCKED, SKU_TEA, RestockProposal
from sovereign_agent import organization, outcomes
from sovereign_agent.assistant_work import assert_current, claim, enqueue
from sovereign_agent.configuration import FILE_NAME
from sovereign_agent.errors import ConfigurationFault, ConstraintBroken, Contention, PolicyRefusal, Refusal
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Proposal, Report
from sovereign_agent.records import OutcomeState, ReceiptStatus, SowState
from sovereign_agent.tool_dispatch import Dispatcher, Fence, Occasion, ToolCall

PROPOSAL = {"sku": SKU_TEA, "quantity": 24, "reason": "It sells."}
SHOP_TABLES = ("inventory", "till", "cash_entries", "replenishment_events", "evidence")


@pytest.fixture
def shop(location):
    shop = make_store(location.root, ledger_url=location.ledger if location.engine == "postgresql" else "")
    yield shop
    shop.close()


def ordered(shop, *, subject=SKU_TEA, effect=RESTOCKED):
    """A statement of work that is given out but not done: its assignment."""
    outcome = shop.create_outcome("Tea", "There is tea.", CHECKS, PRINCIPAL, subject)
    shop.activate(outcome.id, PRINCIPAL)
    sow = shop.create_sow(outcome.id, "Buy tea", "operator", PLANNER, effect)
    shop.ready_sow(sow.id)
    return shop.assign(sow.id, OPERATOR, PLANNER)


def done(shop, assignment, proposal=PROPOSAL):
    """Let an assignment's program end with this proposal."""
    report = Report(status="completed", summary="Bought, I propose.", proposal=proposal)
    proposed = Proposal(ReceiptStatus.COMPLETED, "", report.summary, report)
    with mock.patch.object(organization, "invoke_actor", return_value=proposed):
        shop.run_assignment(assignment.id)
    return assignment


def apply(shop, assignment):
    with shop.db.immediate() as connection:
        return stock.apply_restock(connection, shop, assignment.id)


def tea(shop):
    found = stock.stock_of(shop.db.connection, SKU_TEA)
    assert found
    return found


def everything(shop):
    return {table: rows(shop.db, table) for table in SHOP_TABLES}


def outcome_of(shop, assignment):
    sow = outcomes.get_sow(shop.db.connection, assignment.sow_id)
    return outcomes.get_outcome(shop.db.connection, sow.outcome_id)


def check(shop, name, assignment, **changed):
    """What one check says about an assignment's outcome."""
    with shop.db.immediate() as connection:
        return getattr(stock, name)(connection, replace(outcome_of(shop, assignment), **changed))


def change(shop, sql, *params):
    with shop.db.transaction() as connection:
        connection.execute(sql, params)


# --- seeding ----------------------------------------------------------------------------------------------


def test_a_plain_ledger_becomes_a_shop(db):
    stock.seed(db)
    found = stock.stock_of(db.connection, SKU_TEA)
    assert found
    assert (found.on_hand, found.reserved, found.reorder_point, found.till_cents) == (18, 0, 10, 50_000)
    assert [entry["amount_cents"] for entry in rows(db, "cash_entries")] == [50_000]


def test_seeding_again_leaves_the_shop_as_it_is(shop):
    stock.record_sale(shop.db, SKU_TEA, 5)
    before = everything(shop)
    stock.seed(shop.db)
    assert everything(shop) == before


def test_of_four_that_seed_at_once_each_finds_one_shop(location):
    location.open().close()
    assert at_one_barrier(4, seed_in_a_process, location) == ["seeded"] * 4
    db = location.open()
    assert (len(rows(db, "products")), len(rows(db, "till")), len(rows(db, "cash_entries"))) == (1, 1, 1)
    db.close()


def seed_in_a_process(_number, location):
    db = location.open()
    stock.seed(db)
    db.close()
    return "seeded"


# --- sales ------------------------------------------------------------------------------------------------


def test_a_sale_moves_goods_and_money_together(shop):
    sale = stock.record_sale(shop.db, SKU_TEA, 4)
    assert sale.amount_cents == 4 * 450
    assert (tea(shop).on_hand, tea(shop).till_cents) == (14, 50_000 + 4 * 450)
    assert rows(shop.db, "cash_entries")[-1]["amount_cents"] == 4 * 450


def test_what_cannot_be_sold_changes_nothing(shop):
    change(shop, "UPDATE inventory SET reserved = 2 WHERE sku = ?", SKU_TEA)
    before = everything(shop)
    assert answer(stock.record_sale, shop.db, SKU_TEA, 17) == "out_of_stock"
    assert answer(stock.record_sale, shop.db, "SKU-TEE", 16) == "product_missing"
    for quantity in (0, -1, stock.MOST_UNITS + 1):
        assert answer(stock.record_sale, shop.db, SKU_TEA, quantity) == "invalid_quantity"
    assert everything(shop) == before
    assert answer(stock.record_sale, shop.db, SKU_TEA, 16) == "done"


def test_eight_sales_at_once_never_sell_more_than_there_is(shop):
    answers = at_one_barrier(8, sell_in_a_process, shop.root)
    assert sorted(answers) == ["out_of_stock"] * 2 + ["sold"] * 6
    assert (tea(shop).on_hand, tea(shop).till_cents) == (0, 50_000 + 18 * 450)
    assert check(shop, "cash_reconciles", ordered(shop)).passed


def sell_in_a_process(_number, root):
    shop = Organization(root)
    try:
        stock.record_sale(shop.db, SKU_TEA, 3)
    finally:
        shop.close()
    return "sold"


def test_the_ledger_itself_refuses_impossible_goods_and_money(shop):
    apply(shop, done(shop, ordered(shop)))
    before = everything(shop)
    for impossible in (
        "UPDATE inventory SET on_hand = -1",
        "UPDATE inventory SET reserved = on_hand + 1",
        "UPDATE inventory SET reserved = -1",
        "UPDATE till SET balance_cents = -1",
        "UPDATE products SET price_cents = 0",
        "UPDATE cash_entries SET amount_cents = 1",
        "DELETE FROM cash_entries",
        "DELETE FROM replenishment_events",
        "INSERT INTO cash_entries (kind, sku, amount_cents, at) VALUES ('sale', 'SKU-TEA', -1, 0)",
        "INSERT INTO cash_entries (kind, amount_cents, at) VALUES ('sale', 1, 0)",
        "INSERT INTO cash_entries (kind, sku, amount_cents, at) VALUES ('replenishment', 'SKU-TEA', -1, 0)",
        """
        INSERT INTO cash_entries (kind, sku, assignment_id, amount_cents, at)
        SELECT kind, sku, assignment_id, amount_cents, at FROM cash_entries WHERE kind = 'replenishment'
        """,
        """
        INSERT INTO replenishment_events (assignment_id, outcome_id, sku, quantity, cost_cents, at)
        SELECT assignment_id, outcome_id, sku, quantity, cost_cents, at FROM replenishment_events
        """,
    ):
        with pytest.raises(ConstraintBroken):
            change(shop, impossible)
    assert everything(shop) == before
    for possible in (
        "UPDATE inventory SET on_hand = 0",
        "UPDATE inventory SET on_hand = 1, reserved = 1",
        "UPDATE till SET balance_cents = 0",
        "UPDATE products SET price_cents = 1",
        "INSERT INTO cash_entries (kind, sku, amount_cents, at) VALUES ('sale', 'SKU-TEA', 1, 0)",
    ):
        change(shop, possible)


# --- proposals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", [1, stock.MOST_UNITS])
def test_a_proposal_within_its_bounds_is_one(quantity):
    assert RestockProposal.model_validate(PROPOSAL | {"quantity": quantity}).quantity == quantity


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantity": 0},
        {"quantity": -24},
        {"quantity": stock.MOST_UNITS + 1},
        {"quantity": "24"},
        {"quantity": 24.0},
        {"quantity": True},
        {"sku": "sku-tea"},
        {"sku": "SKU-TEA\n"},
        {"sku": ""},
        {"reason": ""},
        {"reason": "x" * 401},
        {"cost_cents": 1},  # a price is nobody's to propose
    ],
)
def test_a_proposal_that_is_none_is_refused(wrong):
    with pytest.raises(ValidationError):
        RestockProposal.model_validate(PROPOSAL | wrong)


def test_a_receipt_without_a_valid_proposal_buys_nothing(shop):
    before = everything(shop)
    for proposal in (None, {}, PROPOSAL | {"quantity": "24"}):
        assert answer(apply, shop, done(shop, ordered(shop), proposal)) == "invalid_proposal"
    assert everything(shop) == before
    assert answer(apply, shop, done(shop, ordered(shop), PROPOSAL)) == "done"


# --- restocks ---------------------------------------------------------------------------------------------


def test_a_restock_is_goods_money_event_and_evidence(shop):
    assignment = done(shop, ordered(shop))
    bought = apply(shop, assignment)
    assert (bought.quantity, bought.cost_cents) == (24, 24 * 180)
    assert (tea(shop).on_hand, tea(shop).till_cents) == (18 + 24, 50_000 - 24 * 180)
    assert stock.replenishment_of(shop.db.connection, assignment.id) == bought
    paid = [entry for entry in rows(shop.db, "cash_entries") if entry["kind"] == "replenishment"]
    assert [(entry["assignment_id"], entry["amount_cents"]) for entry in paid] == [(assignment.id, -24 * 180)]
    evidence = outcomes.evidence_of(shop.db.connection, assignment.id)
    assert [(piece["kind"], piece["recorded_by"]) for piece in evidence] == [(RESTOCKED, OPERATOR)]
    assert evidence[0]["detail"] == asdict(bought)
    assert shop.verify_sow(assignment.sow_id, VERIFIER).passed


def test_a_restock_is_applied_once(shop):
    assignment = done(shop, ordered(shop))
    apply(shop, assignment)
    before = everything(shop)
    assert answer(apply, shop, assignment) == "restock_already_applied"
    assert everything(shop) == before


def test_another_assignment_is_another_restock(shop):
    for _ in range(2):
        apply(shop, done(shop, ordered(shop)))
    assert (tea(shop).on_hand, tea(shop).till_cents) == (18 + 48, 50_000 - 48 * 180)


def test_only_what_was_ordered_is_bought(shop):
    before = everything(shop)
    for subject, effect in (("SKU-COFFEE", RESTOCKED), ("", RESTOCKED), (SKU_TEA, "shelf.dusted"), (SKU_TEA, None)):
        assignment = done(shop, ordered(shop, subject=subject, effect=effect))
        assert answer(apply, shop, assignment) == "restock_not_ordered"
    assert everything(shop) == before
    assert answer(apply, shop, done(shop, ordered(shop, subject=SKU_TEA, effect=RESTOCKED))) == "done"


def test_a_product_that_the_shop_has_not_is_not_bought(shop):
    assignment = done(shop, ordered(shop, subject="SKU-COFFEE"), PROPOSAL | {"sku": "SKU-COFFEE"})
    assert answer(apply, shop, assignment) == "product_missing"


def test_an_assignment_that_is_not_there_or_not_done_buys_nothing(shop):
    assignment = ordered(shop)
    assert answer(apply, shop, assignment) == "illegal_move"
    assert answer(apply, shop, mock.Mock(id="asg_none")) == "assignment_missing"
    done(shop, assignment)
    assert answer(apply, shop, assignment) == "done"


def test_judged_work_buys_nothing_and_neither_does_the_try_before_the_last(shop):
    first = done(shop, ordered(shop))
    assert not shop.verify_sow(first.sow_id, VERIFIER).passed  # without its effect
    assert outcomes.get_sow(shop.db.connection, first.sow_id).state is SowState.REJECTED
    before = everything(shop)
    assert answer(apply, shop, first) == "illegal_move"
    second = done(shop, shop.assign(first.sow_id, OPERATOR, PLANNER))
    assert answer(apply, shop, first) == "illegal_move"
    assert everything(shop) == before
    assert answer(apply, shop, second) == "done"


def test_no_more_is_spent_than_the_till_holds(shop):
    assignment = done(shop, ordered(shop))
    change(shop, "UPDATE till SET balance_cents = ?", 24 * 180 - 1)
    before = everything(shop)
    assert answer(apply, shop, assignment) == "not_enough_cash"
    assert everything(shop) == before
    change(shop, "UPDATE till SET balance_cents = ?", 24 * 180)
    assert answer(apply, shop, assignment) == "done"
    assert tea(shop).till_cents == 0


def test_a_caller_that_goes_on_after_a_refusal_commits_no_half_of_a_restock(shop):
    assignment = done(shop, ordered(shop))
    change(shop, "UPDATE till SET balance_cents = 1")
    before = everything(shop)
    with shop.db.immediate() as connection, suppress(Refusal):
        stock.apply_restock(connection, shop, assignment.id)
    assert everything(shop) == before


def test_of_four_processes_that_apply_one_restock_one_does(shop):
    assignment = done(shop, ordered(shop))
    answers = at_one_barrier(4, apply_in_a_process, shop.root, assignment.id)
    assert sorted(answers) == ["applied"] + ["restock_already_applied"] * 3
    assert (tea(shop).on_hand, tea(shop).till_cents) == (18 + 24, 50_000 - 24 * 180)
    assert [len(rows(shop.db, table)) for table in ("replenishment_events", "evidence")] == [1, 1]


def apply_in_a_process(_number, root, assignment_id):
    shop = Organization(root)
    try:
        with shop.db.transaction() as connection:  # the one that does not keep others out
            stock.apply_restock(connection, shop, assignment_id)
    finally:
        shop.close()
    return "applied"


def test_sales_and_restocks_at_once_do_not_wait_for_each_other_in_a_circle(shop):
    assignments = [done(shop, ordered(shop)).id for _ in range(2)]
    answers = at_one_barrier(6, trade_in_a_process, shop.root, assignments)
    assert answers == ["traded"] * 6
    assert tea(shop).on_hand == 18 + 2 * 24 - 4 * 4
    assert tea(shop).till_cents == 50_000 - 2 * 24 * 180 + 4 * 4 * 450


def trade_in_a_process(number, root, assignments):
    if number < len(assignments):
        apply_in_a_process(number, root, assignments[number])
        return "traded"
    shop = Organization(root)
    for _ in range(4):
        stock.record_sale(shop.db, SKU_TEA, 1)
    shop.close()
    return "traded"


def test_a_process_killed_on_any_statement_of_a_restock_leaves_all_of_it_or_nothing(shop):
    assignment = done(shop, ordered(shop))
    before = everything(shop)
    number = first = 9  # up to here it only reads
    while killed_after_statement(number, apply_in_a_process, 0, shop.root, assignment.id):
        if everything(shop) != before:
            break
        number += 1
    assert number - first > 6, "it was killed after each write, and last after the commit"
    assert (tea(shop).on_hand, tea(shop).till_cents) == (18 + 24, 50_000 - 24 * 180)
    assert [len(rows(shop.db, table)) for table in ("replenishment_events", "evidence")] == [1, 1]
    assert answer(apply, shop, assignment) == "restock_already_applied"


# --- checks -----------------------------------------------------------------------------------------------


def test_the_shelf_is_full_enough_at_its_reorder_point(shop):
    assignment = ordered(shop)
    for on_hand, reserved, holds in ((10, 0, True), (9, 0, False), (12, 2, True), (12, 3, False), (0, 0, False)):
        change(shop, "UPDATE inventory SET on_hand = ?, reserved = ?", on_hand, reserved)
        verdict = check(shop, "inventory_at_or_above_reorder_point", assignment)
        assert verdict.passed is holds
        assert verdict.detail == {"available": on_hand - reserved, "reorder_point": 10}


def test_cash_reconciles_until_somebody_tampers_with_it(shop):
    apply(shop, done(shop, ordered(shop)))
    stock.record_sale(shop.db, SKU_TEA, 3)
    outcome = outcome_of(shop, ordered(shop))
    for tampering in (
        "UPDATE till SET balance_cents = balance_cents + 1",
        "INSERT INTO cash_entries (kind, sku, amount_cents, at) VALUES ('sale', 'SKU-TEA', 1, 0)",
        """
        INSERT INTO replenishment_events (assignment_id, outcome_id, sku, quantity, cost_cents, at)
        SELECT a.id, s.outcome_id, 'SKU-TEA', 1, 1, 0 FROM assignments a JOIN sows s ON s.id = a.sow_id
         WHERE a.state = 'CREATED'
        """,
    ):
        with suppress(Undo), shop.db.immediate() as connection:
            assert stock.cash_reconciles(connection, outcome).passed
            assert connection.execute(tampering).rowcount == 1
            assert not stock.cash_reconciles(connection, outcome).passed
            raise Undo


class Undo(Exception):
    """Ends a transaction that was only there to try something."""


def test_the_restock_that_exists_is_the_one_for_this_outcome(shop):
    mine, other = ordered(shop), ordered(shop)
    shop.cancel(other.id, PLANNER)
    assert not check(shop, "replenishment_event_exists", mine).passed
    apply(shop, done(shop, mine))
    assert check(shop, "replenishment_event_exists", mine).passed
    assert not check(shop, "replenishment_event_exists", other).passed
    assert not check(shop, "replenishment_event_exists", mine, subject="SKU-COFFEE").passed


def test_no_check_holds_for_a_product_that_the_shop_has_not(shop):
    assignment = done(shop, ordered(shop))
    apply(shop, assignment)
    for name in CHECKS:
        assert check(shop, name, assignment).passed
        assert not check(shop, name, assignment, subject="SKU-COFFEE").passed


def test_an_outcome_is_accepted_only_while_its_checks_hold(shop):
    assignment = done(shop, ordered(shop))
    apply(shop, assignment)
    shop.verify_sow(assignment.sow_id, VERIFIER)
    shop.review(assignment.sow_id, REVIEWER)
    outcome = outcome_of(shop, assignment)
    stock.record_sale(shop.db, SKU_TEA, 33)
    with pytest.raises(PolicyRefusal) as refused:
        shop.accept(outcome.id, PRINCIPAL)
    assert refused.value.category == "condition_not_met"
    change(shop, "UPDATE inventory SET on_hand = 10")
    assert shop.accept(outcome.id, PRINCIPAL).state is OutcomeState.ACCEPTED


def test_what_a_check_has_seen_stays_so_until_its_transaction_ends(shop, location):
    outcome = outcome_of(shop, ordered(shop))
    other = location.open(patience=timedelta(seconds=0.2))
    for look in (stock.inventory_at_or_above_reorder_point, stock.cash_reconciles):
        with shop.db.immediate() as connection:
            assert look(connection, outcome).passed
            with pytest.raises(Contention):
                stock.record_sale(other, SKU_TEA, 4)
        assert stock.record_sale(other, SKU_TEA, 4).quantity == 4
    other.close()


# --- the demo ---------------------------------------------------------------------------------------------


def play(root, capsys, *, json_wanted=True):
    capsys.readouterr()
    codes = []
    assert answer(lambda: codes.append(demo.main(root, "simulated", json_wanted))) == "done"
    assert codes == [0]
    printed = capsys.readouterr().out
    return json.loads(printed) if json_wanted else printed


def steps(document):
    return [line["step"] for line in document["story"]]


def test_the_demo_goes_from_a_sale_to_an_acceptance(shop, capsys):
    document = play(shop.root, capsys)
    assert document["outcome"]["state"] == "ACCEPTED"
    assert (document["restock"]["quantity"], document["restock"]["cost_cents"]) == (24, 24 * 180)
    assert (document["before"]["on_hand"], document["after"]["on_hand"]) == (18, 9 + 24)
    assert document["after"]["till_cents"] == 50_000 + 9 * 450 - 24 * 180
    whole = "sale stock outcome active work ready assign run restock verify review check check check accept end"
    assert steps(document) == whole.split()


def test_the_demo_runs_again_in_the_same_folder_without_waiting(tmp_path, capsys):
    first, second = (play(tmp_path / "new" / "folder", capsys) for _ in range(2))
    assert first["outcome"]["id"] != second["outcome"]["id"]
    assert second["before"] == first["after"]
    assert second["after"]["on_hand"] == 33
    assert "wait" not in steps(second) + steps(first)


def test_the_demo_tells_its_story_to_people(tmp_path, capsys):
    printed = play(tmp_path, capsys, json_wanted=False)
    assert printed.startswith("sale     9 x Tea, 250 g are sold for 40.50.\n")
    assert "restock  24 x SKU-TEA come in for 43.20.\n" in printed
    assert printed.endswith("end      33 of SKU-TEA on the shelf, 497.30 in the till.\n")


def test_any_other_mode_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(Refusal) as refused:
        demo.main(tmp_path / "shop", "live", json=False)
    assert refused.value.category == "unknown_mode"
    assert "simulated" in refused.value.why
    assert not (tmp_path / "shop").exists()


def test_a_folder_that_init_made_becomes_a_shop(tmp_path, capsys):
    Organization.init(tmp_path).close()
    assert play(tmp_path, capsys)["outcome"]["state"] == "ACCEPTED"


def test_settings_that_people_wrote_are_not_replaced(tmp_path, capsys):
    Organization.init(tmp_path).close()
    settings = tmp_path / FILE_NAME
    theirs = settings.read_text().replace("My organization", "Ours")
    settings.write_text(theirs)
    with pytest.raises(ConfigurationFault) as refused:
        demo.main(tmp_path, "simulated", json=True)
    assert refused.value.category == "not_a_store"
    assert settings.read_text() == theirs
    shop = tmp_path / "shop"
    play(shop, capsys)
    ours = (shop / FILE_NAME).read_text().replace("Lucy's shop", "Ours")
    (shop / FILE_NAME).write_text(ours)
    play(shop, capsys)
    assert (shop / FILE_NAME).read_text() == ours


def test_a_root_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationFault, match="cannot hold a shop"):
        make_store(tmp_path / "file")


def test_a_proposal_that_cannot_be_bought_is_rejected_and_a_mended_one_goes_on(tmp_path, capsys):
    make_store(tmp_path).close()
    settings = tmp_path / FILE_NAME
    good = settings.read_text()
    settings.write_text(good.replace("quantity = 24", "quantity = 0"))
    with pytest.raises(Refusal) as refused:
        demo.main(tmp_path, "simulated", json=True)
    assert refused.value.category == "not_verified"
    assert RESTOCKED in refused.value.why
    settings.write_text(good)
    document = play(tmp_path, capsys)
    assert steps(document)[:3] == ["resume", "assign", "run"]
    assert document["after"]["till_cents"] == 50_000 + (9 + 24) * 450 - 2 * 24 * 180


def test_an_outcome_that_was_emptied_before_its_acceptance_gets_more_work(tmp_path, capsys):
    shop = make_store(tmp_path)
    assignment = done(shop, ordered(shop))
    change(shop, "UPDATE outcomes SET title = ?", demo.TITLE)
    apply(shop, assignment)
    shop.verify_sow(assignment.sow_id, VERIFIER)
    shop.review(assignment.sow_id, REVIEWER)
    stock.record_sale(shop.db, SKU_TEA, 40)
    assert play(tmp_path, capsys)["outcome"]["state"] == "ACCEPTED"
    assert outcome_of(shop, assignment).state is OutcomeState.ACCEPTED
    assert len(outcomes.sows_of(shop.db.connection, outcome_of(shop, assignment).id)) == 2
    shop.close()


def test_runs_killed_anywhere_are_finished_by_the_next(tmp_path, capsys):
    root = tmp_path / "shop"
    number, killed = 1, 0
    while killed_after_statement(number, play_in_a_process, root):
        hurry(root)
        number, killed = number + 31, killed + 1
    assert killed > 5, "a run of the demo was killed in many places"
    document = play(root, capsys)
    assert document["outcome"]["state"] == "ACCEPTED"
    shop = make_store(root)
    restocks = rows(shop.db, "replenishment_events")
    assert outcomes.open_outcomes(shop.db.connection) == []
    assert len({restock["outcome_id"] for restock in restocks}) == len(rows(shop.db, "outcomes")) == len(restocks)
    assert len(rows(shop.db, "evidence")) == len(restocks)
    shop.close()


def hurry(root):
    """Shorten the leases, so that whoever comes after a killed run waits less."""
    settings = root / FILE_NAME
    if settings.exists():
        settings.write_text(settings.read_text().replace("_seconds = 5\n", "_seconds = 1\n"))


def play_in_a_process(root):
    demo.main(root, "simulated", json=True)


def test_a_run_whose_program_is_at_work_when_it_is_killed_is_recovered(tmp_path, capsys):
    make_store(tmp_path).close()
    hurry(tmp_path)
    settings = tmp_path / FILE_NAME
    quick = settings.read_text()
    settings.write_text(quick.replace('{ stdout = "Reading the shelf.\\n" }', "{ sleep = 60 }"))
    call = "import sys; from pathlib import Path; from reference_organizations.store.demo import main;"
    call += "main(Path(sys.argv[1]), 'simulated', json=False)"
    with subprocess.Popen([sys.executable, "-uc", call, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        for line in run.stdout:
            if line.startswith("assign"):
                break
        await_running(tmp_path)
        run.send_signal(signal.SIGKILL)
    settings.write_text(quick)
    document = play(tmp_path, capsys)
    assert steps(document)[:5] == ["resume", "wait", "recover", "assign", "run"]
    assert document["outcome"]["state"] == "ACCEPTED"


def await_running(root):
    shop = Organization(root)
    running = "SELECT count(*) FROM assignments WHERE state = 'RUNNING'"
    eventually(lambda: shop.db.connection.execute(running).rows[0][0])
    shop.close()


# --- what a model may do in the shop --------------------------------------------------------------------------


def called(db, claim, name, arguments):
    """One call of Lucy's assistant, under a claim."""
    tools = shop_tools(db)
    fence = Fence(db.transaction, lambda connection, _: (assert_current(connection, claim), claim.generation)[1])
    dispatcher = Dispatcher(tools, allowed=[tool.name for tool in tools], fence=fence)
    return dispatcher.invoke(ToolCall("c1", name, arguments), Occasion("op_1"))


def test_a_line_of_the_shopping_list_is_written_under_a_claim_once_and_under_a_lost_one_never(db):
    tools = shop_tools(db)
    enqueue(db, "morning", "lucy", "Good morning!")
    held = claim(db, "clerk")
    wanted = {"sku": "SKU-VANILLA", "quantity": 4}
    unfenced = Dispatcher(tools, allowed=[tool.name for tool in tools])
    assert unfenced.invoke(ToolCall("c0", "put_on_shopping_list", wanted)).code == "write_authority_required"
    assert called(db, replace(held, generation=2), "put_on_shopping_list", wanted).authority_lost
    assert called(db, held, "put_on_shopping_list", wanted | {"quantity": 0}).code == "invalid_arguments"
    assert called(db, held, "put_on_shopping_list", wanted | {"sku": "SKU-GOLD"}).code == "tool_failed"
    assert stock.shopping_list(db.connection) == []
    assert called(db, held, "put_on_shopping_list", wanted).ok
    assert called(db, held, "put_on_shopping_list", wanted).code == "tool_failed"
    assert stock.shopping_list(db.connection) == [stock.Wanted("SKU-VANILLA", 4, 1)]
