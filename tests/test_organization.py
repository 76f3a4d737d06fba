"""The organization: who may do what, in which order, and what becomes of a run however it ends."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import Location
from support import (
    answer,
    at_one_barrier,
    child,
    configure,
    governed_work,
    heard,
    holding,
    judge_and_accept,
    ledger_facts,
    rows,
    until_blocked,
    works,
)

from sovereign_agent import fencing, journal, organization, outcomes, runs, verdicts, workspace
from sovereign_agent.clock import ManualClock
from sovereign_agent.configuration import load
from sovereign_agent.database import LEDGER_NAME, Connection, Database, Migration
from sovereign_agent.errors import (
    AuthorityLost,
    ConfigurationFault,
    Contention,
    IllegalMove,
    LedgerUnavailable,
    PolicyRefusal,
)
from sovereign_agent.organization import Organization
from sovereign_agent.providers.base import Envelope, Proposal, Report
from sovereign_agent.records import Assignment, Outcome, ReceiptStatus, Sow, Verdict
from sovereign_agent.supervisor import tick
from sovereign_agent.workspace import Workspace

PRINCIPAL, MASTER, OPERATOR = "principal-human", "master-course", "operator-course"
SPARRING, VERIFIER, JACK = "sparring-course", "verifier-course", "jack-of-all-trades"
ALL_ACTS = ["create_outcome", "activate", "plan", "assign", "cancel", "execute", "verify", "review", "accept"]
TABLES = (
    "events",
    "outcomes",
    "sows",
    "assignments",
    "receipts",
    "evidence",
    "verifications",
    "reviews",
    "acceptances",
)


def hire_jack(org: Organization) -> None:
    """An operator who may do everything, so that nothing but the ledger can say what he may not."""
    jack = {"role": "operator", "provider": "scripted", "authority": [*ALL_ACTS, "rule", "rebind"]}
    configure(org, lambda document: document["actors"].update({JACK: jack}))


def run_through(org: Organization, **options: Any) -> tuple[Outcome, Sow, Assignment]:
    """Governed work that has been run to its completed receipt."""
    outcome, sow, assignment = governed_work(org, **options)
    assert org.run_assignment(assignment.id).status == "completed"
    return outcome, sow, assignment


def everything(org: Organization) -> dict[str, Any]:
    return {table: rows(org.db, table) for table in TABLES}


@pytest.fixture
def at_work(org: Organization, monkeypatch: pytest.MonkeyPatch) -> Organization:
    """An organization whose programs do their work at once, in this process, with Jack among its actors."""
    monkeypatch.setattr(organization, "invoke_actor", works)
    hire_jack(org)
    return org


# --- the whole way ----------------------------------------------------------------------------------------


def test_work_goes_from_an_outcome_to_its_acceptance_through_the_real_scripted_program(org: Organization) -> None:
    steps = [
        {"write": "till.txt", "text": "412.50"},
        {"report": {"status": "completed", "summary": "counted", "deliverables": ["till.txt"]}},
    ]
    configure(org, lambda document: document["providers"]["scripted"].update(steps=steps))
    outcome, sow, _ = run_through(org)
    assert judge_and_accept(org, outcome.id, sow.id) == "ACCEPTED"
    assert [event.kind for event in journal.events_of(org.db.connection, sow.id)] == [
        "sow.created",
        "sow.ready",
        "sow.assigned",
        "sow.running",
        "sow.completed",
        "sow.verified",
        "verification.passed",
        "sow.approved",
    ]
    assert [event.kind for event in journal.events_of(org.db.connection, outcome.id)] == [
        "outcome.created",
        "outcome.activated",
        "outcome.reprojected",
        "outcome.accepted",
    ]
    assert org.status_text() == "No open outcome."


def test_status_text_shows_every_open_outcome_its_work_and_who_tried(at_work: Organization) -> None:
    outcome, sow, assignment = run_through(at_work)
    lines = [line.split() for line in at_work.status_text().splitlines()]
    assert [line[:2] for line in lines] == [
        ["ACTIVE", outcome.id],
        ["COMPLETED", sow.id],
        ["COMPLETED", assignment.id],
    ]


def test_what_is_open_decides_what_an_outcome_is(at_work: Organization) -> None:
    org = at_work
    outcome, sow, _ = run_through(org)
    assert answer(org.accept, outcome.id, PRINCIPAL) == "illegal_move"
    org.verify_sow(sow.id, VERIFIER)
    org.review(sow.id, SPARRING)
    assert outcomes.get_outcome(org.db.connection, outcome.id).state == "READY"
    more = org.create_sow(outcome.id, "Lock the freezer", "operator", MASTER)
    assert outcomes.get_outcome(org.db.connection, outcome.id).state == "ACTIVE"
    assert answer(org.accept, outcome.id, PRINCIPAL) == "illegal_move"
    org.ready_sow(more.id)
    org.run_assignment(org.assign(more.id, OPERATOR, MASTER).id)
    assert judge_and_accept(org, outcome.id, more.id) == "ACCEPTED"
    assert answer(org.create_sow, outcome.id, "too late", "operator", MASTER) == "illegal_move"
    assert answer(org.accept, outcome.id, PRINCIPAL) == "illegal_move"


def test_nothing_is_done_towards_an_outcome_that_nobody_has_activated(org: Organization) -> None:
    outcome = org.create_outcome("Close the shop", "The till is counted.", [], PRINCIPAL)
    sow = org.create_sow(outcome.id, "Count the till", "operator", MASTER)
    assert answer(org.ready_sow, sow.id) == "illegal_move"
    assert answer(org.assign, sow.id, OPERATOR, MASTER) == "illegal_move"
    org.activate(outcome.id, PRINCIPAL)
    assert answer(org.assign, sow.id, OPERATOR, MASTER) == "illegal_move"
    org.ready_sow(sow.id)
    assert answer(org.assign, sow.id, OPERATOR, MASTER) == "done"


@pytest.mark.parametrize("text", ["", "   ", "x" * 4001, "a\0b", "half \ud83d a character"])
def test_what_cannot_be_recorded_is_refused_and_nothing_is_begun(org: Organization, text: str) -> None:
    assert answer(org.create_outcome, text, "The till is counted.", [], PRINCIPAL) == "invalid_text"
    assert answer(org.create_outcome, "Close the shop", text, [], PRINCIPAL) == "invalid_text"
    outcome = org.create_outcome("Close the shop", "The till is counted.", [], PRINCIPAL)
    assert answer(org.create_sow, outcome.id, text, "operator", MASTER) == "invalid_text"
    assert answer(org.create_sow, outcome.id, "Count the till", "janitor", MASTER) == "unknown_role"
    assert (len(rows(org.db, "outcomes")), rows(org.db, "sows")) == (1, [])


# --- authority --------------------------------------------------------------------------------------------


def acts(org: Organization) -> dict[str, Callable[[str], Any]]:
    """Every act that asks for an authority, ready to be done by whoever is named."""
    fresh = org.create_outcome("Another", "It is done.", [], PRINCIPAL)
    _, ready, waiting = governed_work(org)
    org.cancel(waiting.id, MASTER)
    _, _, created = governed_work(org)
    _, completed, _ = run_through(org)
    _, verified, _ = run_through(org)
    org.verify_sow(verified.id, VERIFIER)
    approved, last, _ = run_through(org)
    org.verify_sow(last.id, VERIFIER)
    org.review(last.id, SPARRING)
    _, rejected, _ = run_through(org)
    org.verify_sow(rejected.id, VERIFIER)
    org.review(rejected.id, SPARRING, approve=False)
    return {
        "create_outcome": lambda who: org.create_outcome("Mine", "It is mine.", [], who),
        "activate": lambda who: org.activate(fresh.id, who),
        "plan": lambda who: org.create_sow(fresh.id, "s", "operator", who),
        "assign": lambda who: org.assign(ready.id, OPERATOR, who),
        "cancel": lambda who: org.cancel(created.id, who),
        "verify": lambda who: org.verify_sow(completed.id, who),
        "verify the outcome": lambda who: org.verify_outcome(approved.id, who),
        "review": lambda who: org.review(verified.id, who),
        "accept": lambda who: org.accept(approved.id, who),
        "rule": lambda who: org.rule(rejected.id, "Count again.", who),
        "rebind": lambda who: org.rebind_actor(OPERATOR, "scripted", who),
    }


def test_every_act_needs_its_authority_and_needs_no_other(at_work: Organization) -> None:
    org = at_work
    for act, done_by in acts(org).items():
        authority = act.split()[0]
        without = [each for each in (*ALL_ACTS, "rule", "rebind") if each != authority]
        for allowed, said in ((without, "authority_refusal"), ([authority], "done")):
            actor = {"role": "operator", "provider": "scripted", "authority": allowed}
            configure(org, lambda document, actor=actor: document["actors"].update({"somebody": actor}))
            before = everything(org)
            assert answer(done_by, "somebody") == said, act
            assert (everything(org) == before) == (said != "done"), act


def test_work_goes_only_to_an_actor_who_may_execute_and_has_the_role(at_work: Organization) -> None:
    _, sow, assignment = governed_work(at_work)
    at_work.cancel(assignment.id, MASTER)
    before = everything(at_work)
    assert answer(at_work.assign, sow.id, SPARRING, MASTER) == "authority_refusal"
    configure(at_work, lambda document: document["actors"][JACK].update(role="verifier"))
    assert answer(at_work.assign, sow.id, JACK, MASTER) == "authority_refusal"
    assert answer(at_work.assign, sow.id, "nobody-at-all", MASTER) == "unknown_actor"
    assert answer(at_work.assign, sow.id, OPERATOR, MASTER, workspace_policy="burn") == "unknown_workspace_policy"
    assert everything(at_work) == before
    configure(at_work, lambda document: document["actors"][JACK].update(role="operator"))
    assert at_work.assign(sow.id, JACK, MASTER).actor_id == JACK


def test_mail_goes_only_between_actors_that_are_declared(org: Organization) -> None:
    for sender, recipient in (("ghost", OPERATOR), (MASTER, "ghost")):
        assert answer(org.send, sender, recipient, "s", "b") == "unknown_actor"
    assert answer(org.inbox, "ghost") == "unknown_actor"
    sent = org.send(MASTER, OPERATOR, "s", "b")
    assert org.inbox(OPERATOR) == [sent]
    assert org.inbox(MASTER) == []


# --- separation of duties, as the ledger shows it ---------------------------------------------------------


def jack_works(org: Organization) -> tuple[Outcome, Sow]:
    outcome, sow, _ = run_through(org, worker=JACK)
    return outcome, sow


def jack_worked_before(org: Organization) -> tuple[Outcome, Sow]:
    """Jack's try was rejected, and somebody else did the work again."""
    outcome, sow = jack_works(org)
    org.verify_sow(sow.id, VERIFIER)
    org.review(sow.id, SPARRING, approve=False)
    org.run_assignment(org.assign(sow.id, OPERATOR, MASTER).id)
    return outcome, sow


def jack_plans(org: Organization) -> tuple[Outcome, Sow]:
    outcome = org.create_outcome("Close the shop", "The till is counted.", [], PRINCIPAL)
    org.activate(outcome.id, PRINCIPAL)
    sow = org.create_sow(outcome.id, "Count the till", "operator", JACK)
    org.ready_sow(sow.id)
    org.run_assignment(org.assign(sow.id, OPERATOR, MASTER).id)
    return outcome, sow


def jack_assigns(org: Organization) -> tuple[Outcome, Sow]:
    outcome, sow, assignment = governed_work(org)
    org.cancel(assignment.id, MASTER)
    org.run_assignment(org.assign(sow.id, OPERATOR, JACK).id)
    return outcome, sow


def jack_only_watches(org: Organization) -> tuple[Outcome, Sow]:
    outcome, sow, _ = run_through(org)
    return outcome, sow


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (jack_works, "self_approval"),
        (jack_worked_before, "self_approval"),
        (jack_plans, "done"),
        (jack_only_watches, "done"),
    ],
)
def test_who_did_the_work_may_not_verify_it(
    at_work: Organization, history: Callable[[Organization], tuple[Outcome, Sow]], said: str
) -> None:
    outcome, sow = history(at_work)
    before = everything(at_work)
    assert answer(at_work.verify_sow, sow.id, JACK) == said
    assert (everything(at_work) == before) == (said != "done")
    assert answer(at_work.verify_outcome, outcome.id, JACK) == said


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (jack_works, "self_approval"),
        (jack_worked_before, "self_approval"),
        (jack_plans, "self_approval"),
        (jack_assigns, "self_approval"),
        (jack_only_watches, "done"),
    ],
)
def test_who_planned_assigned_or_did_the_work_may_not_review_it(
    at_work: Organization, history: Callable[[Organization], tuple[Outcome, Sow]], said: str
) -> None:
    _, sow = history(at_work)
    at_work.verify_sow(sow.id, VERIFIER)
    before = everything(at_work)
    assert answer(at_work.review, sow.id, JACK) == said
    assert answer(at_work.review, sow.id, JACK, approve=False) == ("illegal_move" if said == "done" else said)
    assert (everything(at_work) == before) == (said != "done")


@pytest.mark.parametrize(
    ("history", "reviewer", "said"),
    [
        (jack_works, SPARRING, "self_approval"),
        (jack_worked_before, SPARRING, "self_approval"),
        (jack_only_watches, JACK, "self_approval"),
        (jack_plans, SPARRING, "done"),
        (jack_only_watches, SPARRING, "done"),
    ],
)
def test_who_did_or_reviewed_the_work_may_not_accept_its_outcome(
    at_work: Organization, history: Callable[[Organization], tuple[Outcome, Sow]], reviewer: str, said: str
) -> None:
    outcome, sow = history(at_work)
    at_work.verify_sow(sow.id, VERIFIER)
    at_work.review(sow.id, reviewer)
    before = everything(at_work)
    assert answer(at_work.accept, outcome.id, JACK) == said
    assert (everything(at_work) == before) == (said != "done")
    if said != "done":
        assert at_work.accept(outcome.id, PRINCIPAL).state == "ACCEPTED"


# --- what is verified -------------------------------------------------------------------------------------


def out_file(org: Organization, assignment: Assignment) -> Path:
    (receipt,) = journal.receipts_of(org.db.connection, assignment.id)
    return workspace.locate(org.root, receipt.attempt_id).out / "till.txt"


def changed(path: Path) -> None:
    path.write_text("counted: 9999.99\n")


def emptied(path: Path) -> None:
    path.write_text("")


def replaced_by_a_link(path: Path) -> None:
    twin = path.with_name("twin.txt")
    path.rename(twin)
    path.symlink_to(twin)


@pytest.mark.parametrize("spoil", [changed, emptied, Path.unlink, replaced_by_a_link])
def test_a_deliverable_that_is_not_what_the_receipt_says_is_rejected_and_can_be_done_again(
    at_work: Organization, spoil: Callable[[Path], Any]
) -> None:
    outcome, sow, assignment = run_through(at_work)
    spoil(out_file(at_work, assignment))
    verdict = at_work.verify_sow(sow.id, VERIFIER)
    assert not verdict.passed
    assert outcomes.get_sow(at_work.db.connection, sow.id).state == "REJECTED"
    assert journal.events_of(at_work.db.connection, sow.id)[-1].kind == "verification.failed"
    at_work.run_assignment(at_work.assign(sow.id, OPERATOR, MASTER).id)
    assert judge_and_accept(at_work, outcome.id, sow.id) == "ACCEPTED"


def test_a_required_effect_must_be_there(at_work: Organization) -> None:
    org = at_work
    _, without, _ = run_through(org, effect="order.sent")
    verdict = org.verify_sow(without.id, VERIFIER)
    assert (verdict.passed, "order.sent" in verdict.reason) == (False, True)
    _, wrong, done = run_through(org, effect="order.sent")
    with org.db.transaction() as connection:
        org.record_effect(connection, done.id, "order.drafted", {}, OPERATOR)
    assert not org.verify_sow(wrong.id, VERIFIER).passed
    _, sow, done = run_through(org, effect="order.sent")
    with org.db.transaction() as connection:
        org.record_effect(connection, done.id, "order.sent", {"tea": 6}, OPERATOR)
    assert org.verify_sow(sow.id, VERIFIER).passed


def test_only_completed_work_has_effects(at_work: Organization) -> None:
    _, _, assignment = governed_work(at_work)
    with pytest.raises(IllegalMove), at_work.db.transaction() as connection:
        at_work.record_effect(connection, assignment.id, "order.sent", {}, OPERATOR)
    assert rows(at_work.db, "evidence") == []


def test_only_completed_work_can_be_verified_and_only_verified_work_reviewed(at_work: Organization) -> None:
    _, sow, assignment = governed_work(at_work)
    assert answer(at_work.verify_sow, sow.id, VERIFIER) == "illegal_move"
    assert answer(at_work.review, sow.id, SPARRING) == "illegal_move"
    at_work.run_assignment(assignment.id)
    assert answer(at_work.review, sow.id, SPARRING) == "illegal_move"
    assert answer(at_work.verify_sow, sow.id, VERIFIER) == "done"
    assert answer(at_work.verify_sow, sow.id, VERIFIER) == "illegal_move"
    assert answer(at_work.review, sow.id, SPARRING) == "done"
    assert answer(at_work.review, sow.id, SPARRING) == "illegal_move"
    assert answer(at_work.verify_sow, "sow_none", VERIFIER) == "sow_missing"


def test_work_that_was_done_again_while_a_verifier_looked_is_not_verified_by_what_it_saw(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    org = at_work
    _, sow, _ = run_through(org)
    look = workspace.collect_deliverables

    def look_slowly(*args: Any) -> Any:
        monkeypatch.setattr(workspace, "collect_deliverables", look)
        seen = look(*args)
        org.verify_sow(sow.id, VERIFIER)
        org.review(sow.id, SPARRING, approve=False)
        again = org.assign(sow.id, OPERATOR, MASTER)
        org.run_assignment(again.id)
        changed(out_file(org, again))
        return seen

    monkeypatch.setattr(workspace, "collect_deliverables", look_slowly)
    assert answer(org.verify_sow, sow.id, VERIFIER) == "illegal_move"
    assert outcomes.get_sow(org.db.connection, sow.id).state == "COMPLETED"
    assert not org.verify_sow(sow.id, VERIFIER).passed


# --- checks, and acceptance -------------------------------------------------------------------------------

TILL = [
    Migration(
        1,
        "till",
        "CREATE TABLE till (\n    id <integer> PRIMARY KEY NOT NULL,\n    counted <integer> NOT NULL\n) <strict>;\n"
        "INSERT INTO till (id, counted) VALUES (1, 0);\n",
        1,
    )
]
COUNT = "UPDATE till SET counted = ? WHERE id = 1"
in_the_check: list[Callable[[Connection], Any]] = []


def till_is_counted(connection: Connection, _outcome: Outcome) -> Verdict:
    row = connection.execute("SELECT counted FROM till WHERE id = 1 <for share>").fetchone()
    for act in in_the_check:
        act(connection)
    counted = int(row[0]) if row else 0
    return Verdict(counted == 1, f"counted is {counted}", {"counted": counted})


@pytest.fixture
def shop(org: Organization, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An organization with a table and a check of its own."""

    def add(document: Any) -> None:
        document["checks"].update(till_is_counted="test_organization:till_is_counted")
        document["extensions"].update(till="test_organization:TILL")

    configure(org, add)
    monkeypatch.setattr(organization, "invoke_actor", works)
    in_the_check.clear()
    with closing(Organization(org.root)) as reopened:
        yield reopened
    in_the_check.clear()


def approved(shop: Organization) -> Outcome:
    outcome, sow, _ = run_through(shop, checks=["till_is_counted"])
    shop.verify_sow(sow.id, VERIFIER)
    shop.review(sow.id, SPARRING)
    return outcome


def test_acceptance_looks_again_at_what_was_true_at_the_review(shop: Organization) -> None:
    shop.db.connection.execute(COUNT, (1,))
    outcome = approved(shop)
    assert [verdict.passed for _, verdict in shop.verify_outcome(outcome.id, VERIFIER)] == [True]
    shop.db.connection.execute(COUNT, (0,))
    before = everything(shop)
    with pytest.raises(PolicyRefusal) as refused:
        shop.accept(outcome.id, PRINCIPAL)
    assert (refused.value.category, refused.value.why) == ("condition_not_met", "till_is_counted: counted is 0")
    assert everything(shop) == before
    shop.db.connection.execute(COUNT, (1,))
    assert shop.accept(outcome.id, PRINCIPAL).state == "ACCEPTED"
    assert [row["detail"] for row in rows(shop.db, "acceptances")] == ['{"till_is_counted":{"counted":1}}']


@pytest.mark.parametrize("kind", ["immediate", "transaction"])
def test_nobody_can_write_between_the_check_and_the_acceptance(shop: Organization, kind: str) -> None:
    shop.db.connection.execute(COUNT, (1,))
    outcome = approved(shop)
    seen: list[str] = []

    def spoil() -> str:
        with getattr(shop.db, kind)() as connection:
            connection.execute(COUNT, (0,))
            return outcomes.get_outcome(connection, outcome.id).state

    with ThreadPoolExecutor(1) as pool:

        def try_to_slip_in(_: Connection) -> None:
            spoiler.append(pool.submit(spoil))
            try:
                until_blocked(shop.db, spoiler[0])
                seen.append("blocked")
            except AssertionError:
                seen.append("slipped in")

        spoiler: list[Any] = []
        in_the_check.append(try_to_slip_in)
        assert shop.accept(outcome.id, PRINCIPAL).state == "ACCEPTED"
        assert seen == ["blocked"]
        assert spoiler[0].result(30) == "ACCEPTED"


def breaks_the_transaction(connection: Connection) -> None:
    connection.execute("SELECT nothing FROM nowhere")


def divides_by_zero(_: Connection) -> None:
    raise ZeroDivisionError("a till with no drawer")


@pytest.mark.parametrize("fault", [breaks_the_transaction, divides_by_zero])
def test_a_check_that_breaks_does_not_hold_and_says_so(shop: Organization, fault: Callable[[Connection], None]) -> None:
    shop.db.connection.execute(COUNT, (1,))
    outcome = approved(shop)
    in_the_check.append(fault)
    ((name, verdict),) = shop.verify_outcome(outcome.id, VERIFIER)
    assert (name, verdict.passed) == ("till_is_counted", False)
    assert "the check itself failed" in verdict.reason
    assert journal.events_of(shop.db.connection, outcome.id)[-1].kind == "verification.failed"
    before = everything(shop)
    assert answer(shop.accept, outcome.id, PRINCIPAL) == "condition_not_met"
    assert everything(shop) == before
    in_the_check.clear()
    assert shop.accept(outcome.id, PRINCIPAL).state == "ACCEPTED"


def test_a_check_that_writes_changes_nothing_by_being_looked_at(shop: Organization) -> None:
    outcome = approved(shop)
    in_the_check.append(lambda connection: connection.execute(COUNT, (7,)))
    shop.verify_outcome(outcome.id, VERIFIER)
    answer(shop.accept, outcome.id, PRINCIPAL)
    assert shop.db.connection.execute("SELECT counted FROM till").rows[0][0] == 0


@pytest.mark.parametrize("said", [True, None, "yes", 1])
def test_a_check_that_answers_with_no_verdict_does_not_hold(
    shop: Organization, monkeypatch: pytest.MonkeyPatch, said: object
) -> None:
    outcome = approved(shop)
    monkeypatch.setitem(globals(), "till_is_counted", lambda *_: said)
    assert answer(shop.accept, outcome.id, PRINCIPAL) == "condition_not_met"
    assert [verdict.passed for _, verdict in shop.verify_outcome(outcome.id, VERIFIER)] == [False]


def test_a_check_that_nobody_declared_is_refused_at_once_and_one_that_was_removed_at_the_acceptance(
    shop: Organization,
) -> None:
    assert answer(shop.create_outcome, "t", "d", ["shelves_are_full"], PRINCIPAL) == "unknown_check"
    shop.db.connection.execute(COUNT, (1,))
    outcome = approved(shop)
    configure(shop, lambda document: document["checks"].pop("till_is_counted"))
    assert answer(shop.accept, outcome.id, PRINCIPAL) == "unknown_check"
    configure(shop, lambda document: document["checks"].update(till_is_counted="test_organization:no_such_thing"))
    assert answer(shop.accept, outcome.id, PRINCIPAL) == "unresolved_reference"
    assert outcomes.get_outcome(shop.db.connection, outcome.id).state == "READY"


# --- going on after a no ----------------------------------------------------------------------------------


def test_blocked_work_waits_for_a_ruling_which_then_stands_in_the_envelope(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    org, told = at_work, list[tuple[str, ...]]()

    def asks_until_it_is_told(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        told.append(envelope.rulings)
        if envelope.rulings:
            return works(settings, envelope, folder)
        report = Report(status="blocked", summary="stuck", question="Which till?")
        return Proposal(ReceiptStatus.BLOCKED, "", "I do not know which till.", report)

    monkeypatch.setattr(organization, "invoke_actor", asks_until_it_is_told)
    outcome, sow, assignment = governed_work(org)
    receipt = org.run_assignment(assignment.id)
    assert (receipt.status, receipt.detail["question"]) == ("blocked", "Which till?")
    facts = ledger_facts(org.db, assignment.id)
    assert (facts["assignment"], facts["sow"], facts["pointer"]) == ("BLOCKED", "BLOCKED", None)
    assert outcomes.get_outcome(org.db.connection, outcome.id).state == "AT_RISK"
    assert answer(org.rule, sow.id, " ", PRINCIPAL) == "invalid_text"
    assert org.rule(sow.id, "The left one.", PRINCIPAL).decision == "The left one."
    assert outcomes.get_sow(org.db.connection, sow.id).state == "READY"
    assert outcomes.get_outcome(org.db.connection, outcome.id).state == "ACTIVE"
    assert answer(org.rule, sow.id, "The right one.", PRINCIPAL) == "illegal_move"
    org.run_assignment(org.assign(sow.id, OPERATOR, MASTER).id)
    assert told == [(), ("The left one.",)]
    assert judge_and_accept(org, outcome.id, sow.id) == "ACCEPTED"


def test_rejected_work_is_given_out_again_and_accepted(at_work: Organization) -> None:
    outcome, sow, first = run_through(at_work)
    at_work.verify_sow(sow.id, VERIFIER)
    assert at_work.review(sow.id, SPARRING, approve=False, note="Count the coins too.").state == "REJECTED"
    assert answer(at_work.accept, outcome.id, PRINCIPAL) == "illegal_move"
    again = at_work.assign(sow.id, OPERATOR, MASTER)
    assert again.id != first.id
    assert at_work.run_assignment(again.id).status == "completed"
    assert judge_and_accept(at_work, outcome.id, sow.id) == "ACCEPTED"
    assert [row["approved"] for row in rows(at_work.db, "reviews")].count(0) == 1


def test_recovered_work_is_retried_by_an_explicit_assign_and_run_and_accepted(
    at_work: Organization, clock: ManualClock
) -> None:
    with closing(Organization(at_work.root, clock=clock)) as org:
        outcome, sow, assignment = governed_work(org)
        lease = fencing.acquire_actor_lease(org.db, OPERATOR, "proc_gone")
        fencing.acquire_execution_attempt(org.db, assignment.id, OPERATOR, "proc_gone", lease.fencing_token)
        clock.advance(fencing.EXECUTION_ATTEMPT_TTL)
        tick(org)
        assert answer(org.run_assignment, assignment.id) == "illegal_move"
        again = org.assign(sow.id, OPERATOR, MASTER)
        assert org.run_assignment(again.id).status == "completed"
        assert judge_and_accept(org, outcome.id, sow.id) == "ACCEPTED"


def test_a_run_takes_over_an_attempt_that_has_run_out_and_its_work_is_judged_by_its_own_receipt(
    at_work: Organization, clock: ManualClock
) -> None:
    with closing(Organization(at_work.root, clock=clock)) as org:
        outcome, sow, assignment = governed_work(org)
        lease = fencing.acquire_actor_lease(org.db, OPERATOR, "proc_gone", clock=clock)
        fencing.acquire_execution_attempt(
            org.db, assignment.id, OPERATOR, "proc_gone", lease.fencing_token, clock=clock
        )
        assert answer(org.run_assignment, assignment.id) == "actor_lease_held"
        clock.advance(fencing.EXECUTION_ATTEMPT_TTL)
        receipt = org.run_assignment(assignment.id)
        facts = ledger_facts(org.db, assignment.id)
        assert (facts["attempts"], facts["pointer"]) == (["RECOVERED", "DONE"], None)
        assert facts["receipts"] == [("failed", "worker_lost"), ("completed", "")]
        assert verdicts.completing_receipt(org.db.connection, sow.id) == receipt
        assert tick(org).problems == ()
        for each in journal.receipts_of(org.db.connection, assignment.id):
            on_disk = workspace.locate(org.root, each.attempt_id).path / "receipt.json"
            assert on_disk.read_text() == journal.receipt_json(each)
        assert judge_and_accept(org, outcome.id, sow.id) == "ACCEPTED"


def test_an_assignment_that_waits_can_be_called_off_and_given_out_anew(at_work: Organization) -> None:
    outcome, sow, assignment = governed_work(at_work)
    assert at_work.cancel(assignment.id, PRINCIPAL).state == "CANCELED"
    assert outcomes.get_sow(at_work.db.connection, sow.id).state == "READY"
    assert answer(at_work.run_assignment, assignment.id) == "illegal_move"
    assert answer(at_work.cancel, assignment.id, PRINCIPAL) == "illegal_move"
    assert answer(at_work.cancel, "asg_none", PRINCIPAL) == "assignment_missing"
    assert rows(at_work.db, "receipts") == []
    done = at_work.assign(sow.id, OPERATOR, MASTER)
    at_work.run_assignment(done.id)
    assert answer(at_work.cancel, done.id, PRINCIPAL) == "illegal_move"
    assert judge_and_accept(at_work, outcome.id, sow.id) == "ACCEPTED"


def test_a_run_that_is_called_off_in_the_middle_leaves_one_receipt_and_no_result(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, sow, assignment = governed_work(at_work)

    def is_called_off_meanwhile(*args: Any) -> Proposal:
        at_work.cancel(assignment.id, PRINCIPAL)
        return works(*args)

    monkeypatch.setattr(organization, "invoke_actor", is_called_off_meanwhile)
    assert answer(at_work.run_assignment, assignment.id) == "execution_attempt_lost"
    facts = ledger_facts(at_work.db, assignment.id)
    assert (facts["assignment"], facts["sow"], facts["pointer"]) == ("CANCELED", "FAILED", None)
    assert facts["receipts"] == [("failed", "interrupted")]
    assert rows(at_work.db, "actor_leases") == []
    monkeypatch.setattr(organization, "invoke_actor", works)
    at_work.run_assignment(at_work.assign(sow.id, OPERATOR, MASTER).id)
    assert judge_and_accept(at_work, outcome.id, sow.id) == "ACCEPTED"


# --- how a run ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupted_run_is_recorded_and_then_the_interruption_goes_on(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def is_interrupted(*args: Any) -> Proposal:
        works(*args)
        raise interruption

    monkeypatch.setattr(organization, "invoke_actor", is_interrupted)
    _, _, assignment = governed_work(at_work)
    with pytest.raises(interruption):
        at_work.run_assignment(assignment.id)
    facts = ledger_facts(at_work.db, assignment.id)
    assert (facts["assignment"], facts["receipts"]) == ("FAILED", [("failed", "interrupted")])
    assert facts["attempts"] == ["DONE"]
    assert rows(at_work.db, "actor_leases") == []


def test_a_run_that_is_interrupted_after_it_was_called_off_writes_nothing_and_is_interrupted_all_the_same(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, assignment = governed_work(at_work)
    before: list[Any] = []

    def is_called_off_and_interrupted(*_: Any) -> Proposal:
        at_work.cancel(assignment.id, PRINCIPAL)
        before.append(everything(at_work))
        raise KeyboardInterrupt

    monkeypatch.setattr(organization, "invoke_actor", is_called_off_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        at_work.run_assignment(assignment.id)
    assert [everything(at_work)] == before


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a plain one"),
        OSError(28, "No space left on device", "name-\udcff"),
        LookupError("a NUL \0 and half \ud83d a character"),
        RuntimeError("x" * 1_000_000),
        AuthorityLost("a lost claim of its own", category="claim_lost"),
        RecursionError("too deep"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_inside_our_own_program_becomes_an_internal_error_receipt(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    caplog.set_level(logging.CRITICAL, "sovereign_agent")  # half a character in a log is more than xdist can carry

    def fails(*_: Any) -> Proposal:
        raise error

    monkeypatch.setattr(organization, "invoke_actor", fails)
    _, _, assignment = governed_work(at_work)
    receipt = at_work.run_assignment(assignment.id)
    assert (receipt.status, receipt.failure_category) == ("failed", "internal_error")
    assert receipt.summary.startswith(type(error).__name__)
    assert journal.receipts_of(at_work.db.connection, assignment.id) == [receipt]
    assert rows(at_work.db, "actor_leases") == []


@pytest.mark.parametrize("detail", [{"cost": math.nan}, {"what": object()}, {"set": {1, 2}}])
def test_a_proposal_that_no_ledger_can_hold_becomes_an_internal_error_receipt(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch, detail: dict[str, Any]
) -> None:
    monkeypatch.setattr(organization, "invoke_actor", lambda *args: replace(works(*args), detail=detail))
    _, _, assignment = governed_work(at_work)
    assert at_work.run_assignment(assignment.id).failure_category == "internal_error"
    assert ledger_facts(at_work.db, assignment.id)["receipts"] == [("failed", "internal_error")]


def test_the_receipt_that_a_run_returns_is_the_one_in_the_ledger_and_on_disk(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    detail = {"tuple": (1, 2), "nested": {"b": 1.5, "a": "ä"}}
    monkeypatch.setattr(organization, "invoke_actor", lambda *args: replace(works(*args), detail=detail))
    _, _, assignment = governed_work(at_work)
    receipt = at_work.run_assignment(assignment.id)
    assert journal.receipts_of(at_work.db.connection, assignment.id) == [receipt]
    on_disk = workspace.locate(at_work.root, receipt.attempt_id).path / "receipt.json"
    assert on_disk.read_text() == journal.receipt_json(receipt)


def test_what_cannot_be_run_is_refused_before_anything_is_touched(at_work: Organization) -> None:
    assert answer(at_work.run_assignment, "asg_none") == "assignment_missing"
    _, _, assignment = run_through(at_work)
    before = everything(at_work), rows(at_work.db, "execution_attempts")
    assert answer(at_work.run_assignment, assignment.id) == "illegal_move"
    assert (everything(at_work), rows(at_work.db, "execution_attempts")) == before
    _, _, orphaned = governed_work(at_work, worker=JACK)
    configure(at_work, lambda document: document["actors"].pop(JACK))
    assert answer(at_work.run_assignment, orphaned.id) == "unknown_actor"
    assert ledger_facts(at_work.db, orphaned.id)["assignment"] == "CREATED"
    assert rows(at_work.db, "actor_leases") == []


def test_a_ledger_that_is_busy_for_seven_seconds_at_the_end_of_a_run_does_not_lose_its_result(
    at_work: Organization, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, assignment = governed_work(at_work)
    session = type(at_work.db.connection)
    begin, busy = session.begin, list[str]()

    def noting(*args: Any, **options: Any) -> None:
        try:
            begin(*args, **options)
        except Contention:
            busy.append("busy")
            raise

    with ExitStack() as stack:

        def ends_while_the_ledger_is_busy(*args: Any) -> Proposal:
            proposal = works(*args)
            _, pipe = stack.enter_context(child(holding, location))
            assert heard(pipe) == "holding"
            timer = threading.Timer(7, pipe.send, ["go on"])
            stack.callback(timer.cancel)
            timer.start()
            return proposal

        monkeypatch.setattr(session, "begin", noting)
        monkeypatch.setattr(organization, "invoke_actor", ends_while_the_ledger_is_busy)
        assert answer(at_work.run_assignment, assignment.id) == "done"
    assert busy == ["busy"]
    assert ledger_facts(at_work.db, assignment.id)["receipts"] == [("completed", "")]


def test_a_ledger_that_stays_busy_leaves_the_end_to_a_supervisor(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_busy(*_: Any, **__: Any) -> None:
        raise Contention("The ledger is busy.")

    monkeypatch.setitem(runs.finish.__kwdefaults__, "patience_seconds", 0.2)
    monkeypatch.setattr(fencing, "finish_own_attempt", is_busy)
    _, _, assignment = governed_work(at_work)
    with pytest.raises(Contention):
        at_work.run_assignment(assignment.id)
    assert ledger_facts(at_work.db, assignment.id)["pointer"] == "ACTIVE"
    assert len(rows(at_work.db, "actor_leases")) == 1, "a lease goes back only when no attempt stands on it"
    assert tick(at_work, lambda: at_work.db.now() + timedelta(hours=1)).recovered_assignments == (assignment.id,)


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_server_that_cut_the_session_during_a_run_does_not_lose_its_result(
    at_work: Organization, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_cut_off(*args: Any) -> Proposal:
        with closing(location.open()) as other:
            other.connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        return works(*args)

    monkeypatch.setattr(organization, "invoke_actor", is_cut_off)
    _, _, assignment = governed_work(at_work)
    assert at_work.run_assignment(assignment.id).status == "completed"
    assert ledger_facts(at_work.db, assignment.id)["receipts"] == [("completed", "")]


def test_a_terminal_commit_whose_answer_was_lost_is_found_and_not_written_twice(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = type(at_work.db.connection)
    commit = session._commit
    finish = fencing.finish_own_attempt

    def finish_and_lose_the_answer(*args: Any, **options: Any) -> None:
        finish(*args, **options)
        monkeypatch.setattr(fencing, "finish_own_attempt", finish)
        monkeypatch.setattr(session, "_commit", commit_and_say_nothing)

    def commit_and_say_nothing(connection: Connection) -> None:
        monkeypatch.setattr(session, "_commit", commit)
        commit(connection)
        raise LedgerUnavailable("The connection was cut.")

    monkeypatch.setattr(fencing, "finish_own_attempt", finish_and_lose_the_answer)
    _, _, assignment = governed_work(at_work)
    assert answer(at_work.run_assignment, assignment.id) == "done"
    facts = ledger_facts(at_work.db, assignment.id)
    assert (facts["attempts"], facts["receipts"]) == (["DONE"], [("completed", "")])
    assert facts["events"].count("assignment.finished") == 1


def link_away(root: Path) -> None:
    runs_folder = root / ".sovereign" / "runs"
    runs_folder.rename(root / "moved")
    runs_folder.symlink_to(root / "moved")


def put_back(root: Path) -> None:
    (root / ".sovereign" / "runs").unlink()
    (root / "moved").rename(root / ".sovereign" / "runs")


def test_trouble_with_the_folder_after_the_end_is_no_trouble_with_the_result(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moves_its_house(*args: Any) -> Proposal:
        proposal = works(*args)
        link_away(at_work.root)
        return proposal

    monkeypatch.setattr(organization, "invoke_actor", moves_its_house)
    _, _, assignment = governed_work(at_work)
    assert answer(at_work.run_assignment, assignment.id) == "done"
    (receipt,) = journal.receipts_of(at_work.db.connection, assignment.id)
    assert receipt.status == "completed"
    assert not list((at_work.root / "moved").rglob("receipt.json"))
    assert [receipt.attempt_id in problem for problem in tick(at_work).problems] == [True]
    put_back(at_work.root)
    assert tick(at_work).problems == ()
    assert (workspace.locate(at_work.root, receipt.attempt_id).path / "receipt.json").exists()
    assert rows(at_work.db, "actor_leases") == []


def test_a_ledger_that_is_busy_after_the_end_leaves_the_folder_to_a_supervisor(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = fencing.close_workspace

    def is_busy(*_: Any) -> None:
        raise Contention("The ledger is busy.")

    monkeypatch.setattr(fencing, "close_workspace", is_busy)
    _, _, assignment = governed_work(at_work)
    assert at_work.run_assignment(assignment.id).status == "completed"
    monkeypatch.setattr(fencing, "close_workspace", close)
    assert len(fencing.attempts_to_reclaim(at_work.db.connection, after="", limit=10)) == 1
    assert tick(at_work).problems == ()
    assert fencing.attempts_to_reclaim(at_work.db.connection, after="", limit=10) == []


def test_a_persistent_workspace_is_kept_whole_with_its_receipt(at_work: Organization) -> None:
    _, _, assignment = governed_work(at_work, policy="persistent")
    receipt = at_work.run_assignment(assignment.id)
    folder = workspace.locate(at_work.root, receipt.attempt_id)
    assert (folder.raw / "stream.log").exists()
    assert (folder.path / "receipt.json").read_text() == journal.receipt_json(receipt)


# --- many hands at once -----------------------------------------------------------------------------------


def in_an_organization(_: int, root: Path, act: str, *args: Any) -> str:
    organization.invoke_actor = works
    with closing(Organization(root)) as org:
        getattr(org, act)(*args)
    return "done"


def test_of_two_acceptors_one_accepts(at_work: Organization) -> None:
    outcome, sow, _ = run_through(at_work)
    at_work.verify_sow(sow.id, VERIFIER)
    at_work.review(sow.id, SPARRING)
    said = at_one_barrier(2, in_an_organization, at_work.root, "accept", outcome.id, PRINCIPAL)
    assert sorted(said) == ["done", "illegal_move"]
    assert len(rows(at_work.db, "acceptances")) == 1
    assert [event.kind for event in journal.events_of(at_work.db.connection, outcome.id)].count("outcome.accepted") == 1


def test_of_two_planners_one_assigns(at_work: Organization) -> None:
    _, sow, assignment = governed_work(at_work)
    at_work.cancel(assignment.id, MASTER)
    said = at_one_barrier(2, in_an_organization, at_work.root, "assign", sow.id, OPERATOR, MASTER)
    assert sorted(said) == ["done", "illegal_move"]
    assert [row["state"] for row in rows(at_work.db, "assignments")].count("CREATED") == 1


def test_of_four_processes_one_runs_an_assignment(at_work: Organization) -> None:
    _, _, assignment = governed_work(at_work)
    said = at_one_barrier(4, in_an_organization, at_work.root, "run_assignment", assignment.id)
    assert said.count("done") == 1
    assert set(said) <= {"done", "actor_lease_held", "illegal_move"}
    assert ledger_facts(at_work.db, assignment.id)["receipts"] == [("completed", "")]
    assert rows(at_work.db, "actor_leases") == []


def test_eight_runs_of_one_actor_in_eight_threads_share_its_lease(at_work: Organization) -> None:
    work = [governed_work(at_work)[2].id for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert [receipt.status for receipt in pool.map(at_work.run_assignment, work)] == ["completed"] * 8
    assert rows(at_work.db, "actor_leases") == []


def test_a_revoked_run_that_hangs_on_does_not_keep_its_own_process_from_the_actor(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, sow, assignment = governed_work(at_work)
    hanging, go_on = threading.Event(), threading.Event()

    def hangs_once(settings: Any, envelope: Envelope, folder: Workspace, *_: Any) -> Proposal:
        if envelope.assignment_id == assignment.id:
            hanging.set()
            assert go_on.wait(60)
        return works(settings, envelope, folder)

    monkeypatch.setattr(organization, "invoke_actor", hangs_once)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(answer, at_work.run_assignment, assignment.id)
        assert hanging.wait(30)
        at_work.cancel(assignment.id, PRINCIPAL)
        again = at_work.assign(sow.id, OPERATOR, MASTER)
        assert at_work.run_assignment(again.id).status == "completed"
        assert rows(at_work.db, "actor_leases") == []
        go_on.set()
        assert run.result(30) == "execution_attempt_lost"
    assert judge_and_accept(at_work, outcome.id, sow.id) == "ACCEPTED"


def reviewing(number: int, root: Path, sow_id: str) -> str:
    with closing(Organization(root)) as org:
        org.review(sow_id, SPARRING, approve=number == 0)
    return "done"


def test_of_two_opposite_reviews_one_counts(at_work: Organization) -> None:
    _, sow, _ = run_through(at_work)
    at_work.verify_sow(sow.id, VERIFIER)
    said = at_one_barrier(2, reviewing, at_work.root, sow.id)
    assert sorted(said) == ["done", "illegal_move"]
    (review,) = rows(at_work.db, "reviews")
    decided = "APPROVED" if review["approved"] else "REJECTED"
    assert outcomes.get_sow(at_work.db.connection, sow.id).state == decided


# --- making and opening one -------------------------------------------------------------------------------


def initialize(_: int, location: Location) -> str:
    location.init().close()
    return "done"


def test_of_eight_that_make_the_same_organization_all_find_it_made(
    make_location: Callable[..., Location],
) -> None:
    location = make_location("busy", migrated=False)
    assert at_one_barrier(8, initialize, location) == ["done"] * 8
    with closing(Organization(location.root)) as org:
        assert judge_through(org) == "ACCEPTED"


def judge_through(org: Organization) -> str:
    outcome, sow, _ = run_through(org)
    return judge_and_accept(org, outcome.id, sow.id)


def test_making_an_organization_again_changes_nothing_that_is_there(org: Organization, location: Location) -> None:
    configure(org, lambda document: document["organization"].update(name="Lucy's shop"))
    governed_work(org)
    before, text = everything(org), (org.root / "sovereign.toml").read_text()
    with closing(location.init()) as again:
        assert everything(again) == before
        assert again.process_identity != org.process_identity
    assert (org.root / "sovereign.toml").read_text() == text


def test_nothing_is_made_by_opening_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault):
        Organization(tmp_path)
    assert list(tmp_path.iterdir()) == []
    Organization.init(tmp_path).close()
    ledger = tmp_path / LEDGER_NAME
    for path in ledger.parent.iterdir():
        path.unlink()
    with pytest.raises(LedgerUnavailable):
        Organization(tmp_path)
    assert not ledger.exists()


def test_an_extension_that_leads_nowhere_closes_what_was_opened(
    org: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Database] = []

    def opening(*args: Any, **options: Any) -> Database:
        opened.append(Database(*args, **options))
        return opened[0]

    monkeypatch.setattr(organization, "Database", opening)
    configure(org, lambda document: document["extensions"].update(shop="no_such_module:TABLES"))
    assert answer(Organization, org.root) == "unresolved_reference"
    with pytest.raises(LedgerUnavailable):
        opened[0].connection.execute("SELECT 1")


def test_an_actor_is_rebound_in_the_file_with_its_comments_and_in_the_ledger(org: Organization) -> None:
    path = org.root / "sovereign.toml"
    path.write_text(
        path.read_text().replace("[actors.operator-course]", "# our best hand\n[actors.operator-course]")
        + '\n[providers.other]\nkind = "command"\nargv = ["true"]\n'
    )
    with closing(Organization(org.root)) as again:
        assert answer(again.rebind_actor, OPERATOR, "no-such-provider", PRINCIPAL) == "configuration"
        assert answer(again.rebind_actor, OPERATOR, "other", MASTER) == "authority_refusal"
        assert rows(org.db, "events") == []
        again.rebind_actor(OPERATOR, "other", PRINCIPAL)
        assert again.settings.actor(OPERATOR).provider == "other"
    assert load(org.root).actor(OPERATOR).provider == "other"
    assert "# our best hand\n[actors.operator-course]" in path.read_text()
    (event,) = journal.events_of(org.db.connection, OPERATOR)
    assert (event.kind, event.actor, event.detail) == ("actor.rebound", PRINCIPAL, {"provider": "other"})


def test_work_that_is_called_off_is_no_longer_waited_for(at_work: Organization) -> None:
    outcome, sow, assignment = governed_work(at_work)
    unwanted = at_work.create_sow(outcome.id, "Count it again", "operator", MASTER)
    assert answer(at_work.cancel_sow, sow.id, MASTER) == "illegal_move"  # it is assigned
    assert answer(at_work.cancel_sow, unwanted.id, OPERATOR) == "authority_refusal"
    assert at_work.cancel_sow(unwanted.id, MASTER).state == "CANCELED"
    at_work.run_assignment(assignment.id)
    assert judge_and_accept(at_work, outcome.id, sow.id) == "ACCEPTED"
    assert answer(at_work.cancel_sow, sow.id, MASTER) == "illegal_move"  # it is approved


def test_an_outcome_is_given_up_only_when_none_of_its_work_is_assigned(org: Organization) -> None:
    outcome, sow, assignment = governed_work(org)
    assert answer(org.cancel_outcome, outcome.id, PRINCIPAL) == "illegal_move"
    org.cancel(assignment.id, MASTER)
    assert org.cancel_outcome(outcome.id, PRINCIPAL).state == "CANCELED"
    assert answer(org.assign, sow.id, OPERATOR, MASTER) == "illegal_move"
    assert answer(org.cancel_outcome, outcome.id, PRINCIPAL) == "illegal_move"


def test_an_actor_is_freed_from_a_lost_process_but_not_from_a_run(org: Organization) -> None:
    _, _, assignment = governed_work(org)
    lease = fencing.acquire_actor_lease(org.db, OPERATOR, "proc_lost")
    attempt = fencing.acquire_execution_attempt(org.db, assignment.id, OPERATOR, "proc_lost", lease.fencing_token)
    assert answer(org.free_actor, OPERATOR, MASTER) == "actor_not_freed"
    assert fencing.verify_execution_attempt(org.db, assignment.id, attempt.id)
    org.cancel(assignment.id, MASTER)
    fencing.acquire_actor_lease(org.db, OPERATOR, "proc_lost_too")
    assert org.free_actor(OPERATOR, MASTER)
    assert not org.free_actor(OPERATOR, MASTER)
    assert [event.kind for event in journal.events_of(org.db.connection, OPERATOR)] == ["actor.freed"]


def test_a_run_holds_the_lease_for_as_long_as_its_settings_say(
    at_work: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []

    def looks(*arguments: Any) -> Proposal:
        held.append(fencing.current_actor_lease(at_work.db, OPERATOR))
        return works(*arguments)

    configure(at_work, lambda document: document["authority"].update(actor_lease_seconds=45))
    monkeypatch.setattr(organization, "invoke_actor", looks)
    at_work.run_assignment(governed_work(at_work)[2].id)
    assert (held[0].expires_at - held[0].acquired_at).total_seconds() == 45


def test_planned_work_is_ready_or_was_never_written(org: Organization) -> None:
    outcome = org.create_outcome("Close the shop", "The till is counted.", [], PRINCIPAL)
    assert answer(lambda: org.create_sow(outcome.id, "Count", "operator", MASTER, ready=True)) == "illegal_move"
    assert rows(org.db, "sows") == []
    org.activate(outcome.id, PRINCIPAL)
    assert org.create_sow(outcome.id, "Count", "operator", MASTER, ready=True).state == "READY"
