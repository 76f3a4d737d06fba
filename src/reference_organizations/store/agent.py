"""What a model may do in Lucy's shop.

A tool here reads. Writing needs an authority, and only whoever holds one can say how it is asked: who serves the
shop adds the tools that write, with a gate of its own.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from reference_organizations.store import stock
from sovereign_agent.database import Database
from sovereign_agent.tool_dispatch import Dispatcher, ExecutableTool

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

    def list_stock(_: NoArguments) -> list[dict[str, Any]]:
        return [
            {"sku": each.sku, "name": each.name, "available": each.available, "needed": each.reorder_point}
            for each in stock.whole_stock(db.connection)
        ]

    about = "Read what the shop has of each product, and how much of it is needed."
    tool = ExecutableTool("list_stock", about, NoArguments, list_stock)
    return Dispatcher([tool], allowed={tool.name})
