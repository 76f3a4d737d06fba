"""Stock: what the shop has on its shelves and in its till.

Home of products, inventory, till, cash_entries, replenishment_events and shopping_list.

Goods and money move in one transaction or not at all. A restock takes no figure from its caller: what to buy
stands in the receipt of the completed work, what it costs in the shop's own list, and that it happened stands
beside the evidence of it, once for each assignment. Money is whole cents. The till's row is the shop's one lock:
whoever changes goods or money, or must know that nobody does, takes it first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sovereign_agent import journal, outcomes
from sovereign_agent.clock import Clock, micros
from sovereign_agent.database import Connection, Database, Migration, Row
from sovereign_agent.errors import IllegalMove, PolicyRefusal, Refusal
from sovereign_agent.organization import Organization
from sovereign_agent.records import Assignment, Outcome, ReceiptStatus, Sow, SowState, Verdict

SKU_TEA = "SKU-TEA"
RESTOCKED = "inventory.restocked"
"""The effect that a statement of work must ask for before anything is bought."""

SKU_PATTERN = r"\A[A-Z0-9][A-Z0-9-]{0,31}\z"
MOST_UNITS = 500
"""The most that one sale or one restock may move."""

OPENING_CENTS = 50_000
"""What Lucy put into the till before the first sale."""

MIGRATIONS = (
    Migration(
        number=1,
        name="stock_and_cash",
        min_writer=1,
        sql="""
-- home: stock
CREATE TABLE products (
    sku TEXT PRIMARY KEY NOT NULL CHECK (sku <> ''),
    name TEXT NOT NULL CHECK (name <> ''),
    price_cents <integer> NOT NULL CHECK (price_cents > 0),
    cost_cents <integer> NOT NULL CHECK (cost_cents > 0)
) <strict>;

-- home: stock
CREATE TABLE inventory (
    sku TEXT PRIMARY KEY NOT NULL REFERENCES products (sku),
    on_hand <integer> NOT NULL CHECK (on_hand >= 0),
    reserved <integer> NOT NULL CHECK (reserved BETWEEN 0 AND on_hand),
    reorder_point <integer> NOT NULL CHECK (reorder_point >= 0)
) <strict>;

-- home: stock
CREATE TABLE till (
    id <integer> PRIMARY KEY NOT NULL CHECK (id = 1),
    balance_cents <integer> NOT NULL CHECK (balance_cents >= 0)
) <strict>;
INSERT INTO till (id, balance_cents) VALUES (1, 0);

-- home: stock
CREATE TABLE replenishment_events (
    assignment_id TEXT PRIMARY KEY NOT NULL REFERENCES assignments (id),
    outcome_id TEXT NOT NULL REFERENCES outcomes (id),
    sku TEXT NOT NULL REFERENCES products (sku),
    quantity <integer> NOT NULL CHECK (quantity > 0),
    cost_cents <integer> NOT NULL CHECK (cost_cents > 0),
    at <integer> NOT NULL
) <strict>;
CREATE INDEX replenishment_events_by_outcome ON replenishment_events (outcome_id, sku);
<append only replenishment_events: assignment_id>

-- home: stock
CREATE TABLE cash_entries (
    seq <identity>,
    kind TEXT NOT NULL CHECK (kind IN ('opening', 'sale', 'replenishment')),
    sku TEXT REFERENCES products (sku),
    assignment_id TEXT UNIQUE REFERENCES replenishment_events (assignment_id),
    amount_cents <integer> NOT NULL,
    at <integer> NOT NULL,
    CHECK ((kind = 'opening') = (sku IS NULL)),
    CHECK ((kind = 'replenishment') = (assignment_id IS NOT NULL)),
    CHECK ((kind = 'replenishment') = (amount_cents < 0))
) <strict>;
<append only cash_entries: seq, assignment_id>
""",
    ),
    Migration(
        number=2,
        name="shopping_list",
        min_writer=1,
        sql="""
-- home: stock
CREATE TABLE shopping_list (
    seq <identity>,
    operation_id TEXT NOT NULL UNIQUE CHECK (operation_id <> ''),
    sku TEXT NOT NULL REFERENCES products (sku),
    quantity <integer> NOT NULL CHECK (quantity > 0),
    generation <integer> NOT NULL CHECK (generation > 0),
    at <integer> NOT NULL
) <strict>;
<append only shopping_list: seq, operation_id>
""",
    ),
)


class RestockProposal(BaseModel):
    """What an actor may propose to buy. It names no price: that is the shop's to know."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sku: Annotated[str, StringConstraints(pattern=SKU_PATTERN)]
    quantity: Annotated[int, Field(ge=1, le=MOST_UNITS)]
    reason: Annotated[str, Field(min_length=1, max_length=400)]


@dataclass(frozen=True, slots=True)
class Stock:
    """One product's row of the shop, and its till, as they were at one moment."""

    sku: str
    name: str
    price_cents: int
    cost_cents: int
    on_hand: int
    reserved: int
    reorder_point: int
    till_cents: int

    @property
    def available(self) -> int:
        """What may be sold: on hand and promised to nobody."""
        return self.on_hand - self.reserved


@dataclass(frozen=True, slots=True)
class Sale:
    """What was sold, and for how much."""

    sku: str
    quantity: int
    amount_cents: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A line of the shopping list, and the generation of the claim under which it was written."""

    sku: str
    quantity: int
    generation: int


@dataclass(frozen=True, slots=True)
class Replenishment:
    """Goods that came in and were paid for, on the strength of one assignment."""

    assignment_id: str
    outcome_id: str
    sku: str
    quantity: int
    cost_cents: int


def seed(db: Database) -> None:
    """Bring the shop's tables into a ledger and put tea on its shelf. What is already there stays as it is."""
    db.extend("store", MIGRATIONS)
    with db.transaction() as connection:
        _hold(connection, SKU_TEA)
        add_product(connection, SKU_TEA, "Tea, 250 g", price_cents=450, cost_cents=180, on_hand=18, reorder_point=10)
        if connection.execute("SELECT 1 FROM cash_entries WHERE kind = 'opening'").fetchone() is None:
            _take_in(connection, "opening", None, OPENING_CENTS, at=micros(db.now()))


def add_product(
    connection: Connection,
    sku: str,
    name: str,
    *,
    price_cents: int,
    cost_cents: int,
    on_hand: int,
    reorder_point: int,
) -> None:
    """Put a product into the list and on the shelf, unless it is there already."""
    connection.execute(
        "INSERT INTO products (sku, name, price_cents, cost_cents) VALUES (?, ?, ?, ?) ON CONFLICT (sku) DO NOTHING",
        (sku, name, price_cents, cost_cents),
    )
    connection.execute(
        "INSERT INTO inventory (sku, on_hand, reserved, reorder_point) VALUES (?, ?, 0, ?)"
        " ON CONFLICT (sku) DO NOTHING",
        (sku, on_hand, reorder_point),
    )


def stock_of(connection: Connection, sku: str) -> Stock | None:
    """A product's stock and the till, to look at; None when the shop does not know the product."""
    row = connection.execute(
        """
        SELECT p.sku, p.name, p.price_cents, p.cost_cents, i.on_hand, i.reserved, i.reorder_point, t.balance_cents
          FROM products p JOIN inventory i ON i.sku = p.sku JOIN till t ON t.id = 1 WHERE p.sku = ?
        """,
        (sku,),
    ).fetchone()
    return Stock(*row) if row else None


def whole_stock(connection: Connection) -> list[Stock]:
    """Every product's stock, to look at, in the order of the SKUs."""
    rows = connection.execute(
        """
        SELECT p.sku, p.name, p.price_cents, p.cost_cents, i.on_hand, i.reserved, i.reorder_point, t.balance_cents
          FROM products p JOIN inventory i ON i.sku = p.sku JOIN till t ON t.id = 1 ORDER BY p.sku
        """
    )
    return [Stock(*row) for row in rows]


def record_sale(db: Database, sku: str, quantity: int, *, clock: Clock | None = None) -> Sale:
    """Sell `quantity` units over the counter: goods out and money in, together.

    Raises Refusal (``out_of_stock``, ``product_missing``), IllegalMove (``invalid_quantity``).
    """
    if not 1 <= quantity <= MOST_UNITS:
        raise IllegalMove(
            f"A sale of {quantity} was not recorded.",
            category="invalid_quantity",
            why=f"One sale moves 1 to {MOST_UNITS} units.",
        )
    with db.transaction() as connection:
        product = _held_product(connection, sku)
        sold = connection.execute(
            "UPDATE inventory SET on_hand = on_hand - ? WHERE sku = ? AND on_hand - reserved >= ?",
            (quantity, sku, quantity),
        )
        if sold.rowcount != 1:
            raise Refusal(
                f"{quantity} of {sku} were not sold.",
                category="out_of_stock",
                why="There are not that many on the shelf that are promised to nobody.",
                next_command="sell fewer, or restock",
            )
        amount = quantity * int(product["price_cents"])
        _take_in(connection, "sale", sku, amount, at=micros(db.now(clock)))
    return Sale(sku, quantity, amount)


def put_on_list(connection: Connection, operation_id: str, sku: str, quantity: int, *, generation: int) -> Wanted:
    """Write down what is to be bought, in the caller's transaction; one operation writes one line.

    Raises Refusal (``product_missing``).
    """
    _held_product(connection, sku)
    connection.execute(
        "INSERT INTO shopping_list (operation_id, sku, quantity, generation, at) VALUES (?, ?, ?, ?, ?)",
        (operation_id, sku, quantity, generation, micros(connection.now())),
    )
    return Wanted(sku, quantity, generation)


def shopping_list(connection: Connection) -> list[Wanted]:
    """What is to be bought, in the order in which it was written down."""
    rows = connection.execute("SELECT sku, quantity, generation FROM shopping_list ORDER BY seq")
    return [Wanted(*row) for row in rows]


def apply_restock(connection: Connection, organization: Organization, assignment_id: str) -> Replenishment:
    """Buy what a completed assignment proposes: goods, money, event and evidence in the caller's transaction.

    Everything that can be refused is refused before the first write, so a caller that goes on after a refusal
    commits no half of it.

    Raises IllegalMove (``restock_already_applied``, ``illegal_move``, ``invalid_proposal``), PolicyRefusal
    (``restock_not_ordered``), Refusal (``not_enough_cash``, ``product_missing``, ``assignment_missing``).
    """
    assignment, order, outcome = _held_order(connection, assignment_id)
    if replenishment_of(connection, assignment_id):
        raise _already_applied(assignment_id)
    _require_completed(connection, order, assignment)
    proposal = proposal_of(connection, assignment_id)
    _require_ordered(order, outcome, proposal)
    product = _held_product(connection, proposal.sku)
    bought = Replenishment(
        assignment_id, outcome.id, proposal.sku, proposal.quantity, proposal.quantity * int(product["cost_cents"])
    )
    _pay(connection, bought.cost_cents)
    connection.execute("UPDATE inventory SET on_hand = on_hand + ? WHERE sku = ?", (bought.quantity, bought.sku))
    now = micros(organization.db.now())
    connection.execute(
        "INSERT INTO replenishment_events (assignment_id, outcome_id, sku, quantity, cost_cents, at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (assignment_id, bought.outcome_id, bought.sku, bought.quantity, bought.cost_cents, now),
    )
    connection.execute(
        "INSERT INTO cash_entries (kind, sku, assignment_id, amount_cents, at) VALUES ('replenishment', ?, ?, ?, ?)",
        (bought.sku, assignment_id, -bought.cost_cents, now),
    )
    organization.record_effect(connection, assignment_id, RESTOCKED, asdict(bought), assignment.actor_id)
    return bought


def proposal_of(connection: Connection, assignment_id: str) -> RestockProposal:
    """The restock that an assignment's completed receipt proposes. Raises IllegalMove (``invalid_proposal``)."""
    receipts = journal.receipts_of(connection, assignment_id)
    proposed = [receipt.detail.get("proposal") for receipt in receipts if receipt.status is ReceiptStatus.COMPLETED]
    try:
        return RestockProposal.model_validate(proposed[-1] if proposed else None)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the proposal"
        raise IllegalMove(
            f"The receipt of {assignment_id} proposes no restock.",
            category="invalid_proposal",
            why=f"{place}: {first['msg']}.",
            inspect=f"sovereign-agent inspect {assignment_id}",
            next_command="reject the work and assign it again",
        ) from None


def replenishment_of(connection: Connection, assignment_id: str) -> Replenishment | None:
    """What was bought on the strength of an assignment, or None."""
    row = connection.execute(
        "SELECT assignment_id, outcome_id, sku, quantity, cost_cents FROM replenishment_events WHERE assignment_id = ?",
        (assignment_id,),
    ).fetchone()
    return Replenishment(*row) if row else None


# --- checks -----------------------------------------------------------------------------------------------


def inventory_at_or_above_reorder_point(connection: Connection, outcome: Outcome) -> Verdict:
    """Whether the shelf holds what it should, and goes on to until the caller's transaction ends."""
    product = _hold(connection, outcome.subject)
    if product is None:
        return _unknown(outcome)
    available = int(product["on_hand"]) - int(product["reserved"])
    detail = {"available": available, "reorder_point": int(product["reorder_point"])}
    enough = available >= detail["reorder_point"]
    compared = "at or above" if enough else "below"
    reason = f"{available} of {outcome.subject}, {compared} the reorder point of {detail['reorder_point']}."
    return Verdict(enough, reason, detail)


def cash_reconciles(connection: Connection, outcome: Outcome) -> Verdict:
    """Whether the till holds what its entries add up to, and the product's restocks were paid for, once each."""
    if _hold(connection, outcome.subject) is None:
        return _unknown(outcome)
    row = connection.execute(
        """
        SELECT (SELECT balance_cents FROM till WHERE id = 1),
               (SELECT COALESCE(SUM(amount_cents), 0) FROM cash_entries),
               (SELECT COALESCE(SUM(cost_cents), 0) FROM replenishment_events WHERE sku = ?),
               (SELECT COALESCE(-SUM(amount_cents), 0) FROM cash_entries WHERE sku = ? AND kind = 'replenishment')
        """,
        (outcome.subject, outcome.subject),
    ).rows[0]
    till, booked, due, paid = (int(figure) for figure in row)
    detail = {"till_cents": till, "booked_cents": booked, "due_cents": due, "paid_cents": paid}
    reason = f"{till} cents in the till, {booked} booked; {due} due for restocks of {outcome.subject}, {paid} paid."
    return Verdict((till, due) == (booked, paid), reason, detail)


def replenishment_event_exists(connection: Connection, outcome: Outcome) -> Verdict:
    """Whether the product was restocked for this very outcome."""
    rows = connection.execute(
        "SELECT assignment_id FROM replenishment_events WHERE outcome_id = ? AND sku = ? ORDER BY assignment_id",
        (outcome.id, outcome.subject),
    )
    found = [str(row[0]) for row in rows]
    reason = f"{len(found)} restock(s) of {outcome.subject} for this outcome."
    return Verdict(bool(found), reason, {"assignments": found})


def _unknown(outcome: Outcome) -> Verdict:
    return Verdict(passed=False, reason=f"The shop has no product {outcome.subject!r}.")


# --- rows held, and refusals ------------------------------------------------------------------------------


def _hold(connection: Connection, sku: str) -> Row | None:
    """Lock the shop until the caller's transaction ends, and read a product with its stock."""
    connection.execute("SELECT 1 FROM till WHERE id = 1 <for update>")
    return connection.execute(
        """
        SELECT p.price_cents, p.cost_cents, i.on_hand, i.reserved, i.reorder_point
          FROM products p JOIN inventory i ON i.sku = p.sku WHERE p.sku = ?
        """,
        (sku,),
    ).fetchone()


def _held_product(connection: Connection, sku: str) -> Row:
    row = _hold(connection, sku)
    if row is None:
        raise Refusal(
            f"The shop has no product {sku}.", category="product_missing", why="No row of its list has that SKU."
        )
    return row


def _held_order(connection: Connection, assignment_id: str) -> tuple[Assignment, Sow, Outcome]:
    """An assignment with its statement of work and its outcome, which then stay as they are.

    The outcome's lock covers all three: no statement of work moves without taking it.
    """
    assignment = outcomes.get_assignment(connection, assignment_id)
    outcome_id = outcomes.get_sow(connection, assignment.sow_id).outcome_id
    outcome = outcomes.lock_outcome(connection, outcome_id)
    return assignment, outcomes.get_sow(connection, assignment.sow_id), outcome


def _require_completed(connection: Connection, order: Sow, assignment: Assignment) -> None:
    newest = outcomes.assignments_of(connection, order.id)[-1]
    if order.state is not SowState.COMPLETED or newest.id != assignment.id:
        raise IllegalMove(
            f"The restock of {assignment.id} was not applied.",
            category="illegal_move",
            why=f"The work is {order.state}, and its newest assignment is {newest.id}. Goods are bought on the"
            " strength of that one, when it is COMPLETED and not yet judged.",
            inspect=f"sovereign-agent inspect {order.id}",
        )


def _require_ordered(order: Sow, outcome: Outcome, proposal: RestockProposal) -> None:
    if order.required_effect_kind != RESTOCKED or proposal.sku != outcome.subject:
        raise PolicyRefusal(
            f"{proposal.quantity} of {proposal.sku} were not bought.",
            category="restock_not_ordered",
            why=f"The work is about {outcome.subject or 'no product'} and asks for"
            f" {order.required_effect_kind or 'no effect'}.",
            inspect=f"sovereign-agent inspect {order.id}",
        )


def _already_applied(assignment_id: str) -> IllegalMove:
    return IllegalMove(
        f"The restock of {assignment_id} was not applied again.",
        category="restock_already_applied",
        why="Its goods are on the shelf and paid for.",
        inspect=f"sovereign-agent inspect {assignment_id}",
    )


def _take_in(connection: Connection, kind: str, sku: str | None, amount_cents: int, *, at: int) -> None:
    connection.execute("UPDATE till SET balance_cents = balance_cents + ? WHERE id = 1", (amount_cents,))
    connection.execute(
        "INSERT INTO cash_entries (kind, sku, amount_cents, at) VALUES (?, ?, ?, ?)", (kind, sku, amount_cents, at)
    )


def _pay(connection: Connection, cost_cents: int) -> None:
    paid = connection.execute(
        "UPDATE till SET balance_cents = balance_cents - ? WHERE id = 1 AND balance_cents >= ?",
        (cost_cents, cost_cents),
    )
    if paid.rowcount != 1:
        raise Refusal(
            f"{cost_cents} cents were not paid.",
            category="not_enough_cash",
            why="The till holds less.",
            next_command="buy fewer, or sell first",
        )
