"""What a model may do in Lucy's shop.

Reading needs no authority. The one tool that writes is fenced: it writes in the transaction in which the authority
of whoever serves the shop has just been checked, and without such a fence the dispatcher refuses it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from reference_organizations.store import stock
from sovereign_agent.database import Database
from sovereign_agent.tool_dispatch import Dispatcher, ExecutableTool, Occasion

TUBS = (
    # SKU, name, on hand, needed
    ("SKU-CHOCOLATE", "Chocolate ice cream, tub", 8, 4),
    ("SKU-STRAWBERRY", "Strawberry ice cream, tub", 1, 4),
    ("SKU-VANILLA", "Vanilla ice cream, tub", 2, 6),
)
PRICE_CENTS = 1800
COST_CENTS = 900


class NoArguments(BaseModel):
    """The arguments of a tool that takes none; those of another begin here, so that they forbid what is extra."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ShoppingArguments(NoArguments):
    """What is to be bought, and how much of it."""

    sku: Annotated[str, StringConstraints(pattern=stock.SKU_PATTERN)]
    quantity: Annotated[int, Field(ge=1, le=stock.MOST_UNITS)]


def seed_lucy(db: Database) -> None:
    """Bring the shop's tables into a ledger and put Lucy's ice cream on its shelf. What is there stays as it is."""
    db.extend("store", stock.MIGRATIONS)
    with db.transaction() as connection:
        for sku, name, on_hand, needed in TUBS:
            stock.add_product(
                connection,
                sku,
                name,
                price_cents=PRICE_CENTS,
                cost_cents=COST_CENTS,
                on_hand=on_hand,
                reorder_point=needed,
            )


def shop_dispatcher(db: Database) -> Dispatcher:
    """The tools that read the shop; today `list_stock`."""
    tool = _list_stock(db)
    return Dispatcher([tool], allowed={tool.name})


def shop_tools(db: Database) -> list[ExecutableTool]:
    """All that Lucy's assistant may do: read the stock, and put on the shopping list what is needed.

    It seeds the shop where there is none, so that ``tools`` of ``[assistant]`` in sovereign.toml can name it.
    """
    seed_lucy(db)

    def put_on_shopping_list(wanted: ShoppingArguments, now: Occasion) -> dict[str, Any]:
        line = stock.put_on_list(now.connection, now.operation_id, wanted.sku, wanted.quantity, generation=now.token)
        return asdict(line)

    about = "Put a product on the shopping list: its SKU, and how many are to be bought. Each call adds one line."
    shopping = ExecutableTool(
        "put_on_shopping_list", about, ShoppingArguments, put_on_shopping_list, consequential=True, fenced=True
    )
    return [_list_stock(db), shopping]


def _list_stock(db: Database) -> ExecutableTool:
    def list_stock(_: NoArguments) -> list[dict[str, Any]]:
        return [
            {"sku": each.sku, "name": each.name, "available": each.available, "needed": each.reorder_point}
            for each in stock.whole_stock(db.connection)
        ]

    about = "Read what the shop has of each product, and how much of it is needed."
    return ExecutableTool("list_stock", about, NoArguments, list_stock)
