"""send, inbox: the actors' mailbox."""

from __future__ import annotations

from typing import Annotated

import typer

from sovereign_agent.commands.options import HERE, ActorId, Json, Root, opened
from sovereign_agent.commands.printing import answer, entry


def send(
    sender: Annotated[str, typer.Argument(metavar="FROM", help="The actor who writes.")],
    recipient: Annotated[str, typer.Argument(metavar="TO", help="The actor who is written to.")],
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="1 to 500 characters.")],
    body: Annotated[str, typer.Argument(metavar="BODY", help="At most 100,000 characters.")],
    *,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Put a message into an actor's mailbox."""
    with opened(root) as org:
        message = org.send(sender, recipient, subject, body)
    facts = [("look", f"sovereign-agent inbox {recipient}")]
    answer(message, entry(f"Message {message.id} is in the mailbox of {recipient}.", facts), as_json=json)


def inbox(
    actor: ActorId,
    *,
    dead: Annotated[
        bool, typer.Option("--dead", help="What was delivered too often instead, the newest first.")
    ] = False,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Show what an actor may claim now, the longest ready first."""
    from sovereign_agent import relay

    with opened(root, read_only=True) as org:
        org.settings.actor(actor)
        messages = relay.dead_letters(org.db.connection, actor) if dead else org.inbox(actor)
    text = "\n".join(
        entry(f"{m.id}  {m.subject}", [("from", m.sender), ("sent", m.created_at), ("body", m.body)]) for m in messages
    )
    answer(
        {"messages": messages},
        text or f"{actor} has no {'dead message' if dead else 'message to claim'}.",
        as_json=json,
    )
