"""A clerk of `sovereign-agent demo assistant`: a process that serves the queue, as `assistant serve` does.

Its model is the demo's: the recorded one, or a live one when a key is set. Told to hesitate, it says so on stdout
before its third request and then thinks for ever: it is meant to be killed there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from reference_organizations.store.agent import shop_tools
from sovereign_agent import assistant_service, assistant_work
from sovereign_agent.agent_loop import Message, Model, Turn
from sovereign_agent.llm_lab import DEFAULT_MODEL, build_model, scripted_turn
from sovereign_agent.organization import Organization

HESITANT = "hesitant"
"""The name of the clerk that is meant to be killed."""

TTL_SECONDS = 2.0
SYSTEM = (
    "You are the assistant of Lucy, who sells ice cream. Look at the stock. Wherever there is less than needed, put the"
    " difference on the shopping list, one call for each product. If you do not know whether a line was written, do not"
    " write it a second time. Then tell Lucy in two sentences what you did."
)
PROMPT = "Good morning! Look what is low, and put it on the shopping list."
TURNS = [
    scripted_turn(calls=[{"name": "list_stock", "arguments": {}}]),
    scripted_turn(calls=[{"name": "put_on_shopping_list", "arguments": {"sku": "SKU-VANILLA", "quantity": 4}}]),
    scripted_turn(calls=[{"name": "put_on_shopping_list", "arguments": {"sku": "SKU-STRAWBERRY", "quantity": 3}}]),
    scripted_turn("Vanilla (4 tubs) and strawberry (3 tubs) are on the list. There is enough chocolate."),
]
HESITATES_AFTER = 2
"""So many replies come; the request for the next one is never answered."""


@dataclass
class Hesitant:
    """A model that stops to think, once."""

    model: Model
    replies: int = 0

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Message], *, output_tokens: int, deadline: float
    ) -> Turn:
        """Answer as the model does, and from the third time on not at all."""
        if self.replies == HESITATES_AFTER:
            sys.stdout.write("thinking\n")
            sys.stdout.flush()
            threading.Event().wait()
        self.replies += 1
        return self.model.complete(messages, tools, output_tokens=output_tokens, deadline=deadline)


def main(owner: str, folder: Path) -> None:
    """Serve until nothing is open; hesitate when that is what this clerk is called."""
    with closing(Organization(folder)) as org:
        model: Model = build_model(TURNS, DEFAULT_MODEL)
        tools = shop_tools(org.db)
        assistant_service.serve(
            org.db,
            Hesitant(model) if owner == HESITANT else model,
            lambda _: tools,
            owner=owner,
            ttl=TTL_SECONDS,
            system=SYSTEM,
            until=lambda: not assistant_work.open_work(org.db.connection, limit=1),
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[3]))
