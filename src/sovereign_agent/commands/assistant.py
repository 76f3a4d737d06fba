"""assistant: the queue of turns, by hand. What a claim allows is decided by the ledger, not here."""

from __future__ import annotations

import json as codec
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sovereign_agent.commands import effects
from sovereign_agent.commands.options import HERE, By, Json, Root, opened
from sovereign_agent.commands.printing import answer, entry, plain
from sovereign_agent.errors import IllegalMove

if TYPE_CHECKING:
    from sovereign_agent.assistant_work import Claim
    from sovereign_agent.database import Row

app = typer.Typer(help="The assistant's queue of turns.")

WorkId = Annotated[str, typer.Argument(metavar="ITEM", help="A work_ id.")]
Role = Annotated[str, typer.Option("--role", metavar="ROLE", help="Who works on it: shop, research, or your own.")]
Session = Annotated[str, typer.Argument(metavar="SESSION", help="The conversation; one turn of it runs at a time.")]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What is asked: 1 to 100,000 characters.")]
Origin = Annotated[
    str, typer.Option("--origin", metavar="NAME", help="What caused it. The same origin is the same item.")
]
ENDED = ("DONE", "BLOCKED", "CANCELED", "PARKED")
TIMES = ("expires_at", "available_at", "created_at", "finished_at")


@app.command()
def enqueue(
    session: Session,
    prompt: Prompt,
    *,
    origin: Origin = "",
    role: Role = "shop",
    subject: Annotated[str, typer.Option("--subject", metavar="TEXT", help="What it is about.")] = "",
    control: Annotated[bool, typer.Option("--control", help="Let it go before everything that is not.")] = False,
    after: Annotated[float, typer.Option("--after", metavar="SECONDS", help="Nobody gets it before.")] = 0,
    retries: Annotated[int, typer.Option("--retries", metavar="N", help="How often it may fail and come back.")] = 0,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Put one turn of a conversation into the queue."""
    from sovereign_agent import assistant_work
    from sovereign_agent.records import new_id

    with opened(root) as org:
        item = assistant_work.enqueue(
            org.db,
            origin or new_id("cli"),
            session,
            prompt,
            role=role,
            subject=subject,
            control=control,
            available_after=after,
            retries=retries,
        )
        found = _shown(assistant_work.get_work(org.db.connection, item))
    taker = "" if role == "shop" else f" --role {shlex.quote(role)}"
    facts = [("look", f"sovereign-agent assistant status {item}"), ("next", f"sovereign-agent assistant serve{taker}")]
    answer(found, entry(f"Item {item} is {found['status']}.", facts), as_json=json)


@app.command()
def claim(
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="The name that the claim is made under.")],
    *,
    ttl: Annotated[float, typer.Option("--ttl", metavar="SECONDS", help="How long it holds.")] = 90,
    role: Role = "shop",
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Take the right to work on the next item. With --json: the claim, as delegate takes it, or null."""
    from sovereign_agent import assistant_work

    with opened(root) as org:
        taken = assistant_work.claim(org.db, owner, ttl=ttl, role=role)
    if taken is None:
        answer(None, "There is nothing to claim.", as_json=json)
        return
    facts = [("prompt", taken.prompt), ("session", taken.session), ("about", taken.subject), ("epoch", taken.epoch)]
    answer(taken, entry(f"{owner} has item {taken.id}, generation {taken.generation}.", facts), as_json=json)


@app.command()
def status(
    item: Annotated[str, typer.Argument(metavar="[ITEM]", help="A work_ id; without one, all that is open.")] = "",
    *,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Show one item, or up to 100 of each kind that are not finished, and the 10 newest that ended BLOCKED."""
    from sovereign_agent import assistant_work, conversation

    with opened(root, read_only=True) as org:
        connection = org.db.connection
        rows = [assistant_work.get_work(connection, item)] if item else assistant_work.open_work(connection)
        found = [_shown(row) for row in rows]
        blocked = [] if item else [_shown(row) for row in conversation.unanswered(connection)]
    lines = [] if found else ["Nothing is open."]
    lines += [entry(f"{each['status']} {each['id']}", _facts(each)) for each in (*found, *blocked)]
    answer(found[0] if item else {"open": found, "blocked": blocked}, "\n".join(lines), as_json=json)


@app.command()
def cancel(item: WorkId, *, by: By, root: Root = HERE, json: Json = False) -> None:
    """Call an item off, a running one too: its worker may go on, and nothing that it does is recorded any more."""
    from sovereign_agent import assistant_work

    with opened(root) as org:
        org.settings.actor(by)
        assistant_work.cancel(org.db, item, actor=by)
        found = _shown(assistant_work.get_work(org.db.connection, item))
    answer(found, entry(f"Item {item} is {found['status']}."), as_json=json)


@app.command()
def delegate(
    prompt: Prompt,
    *,
    claim: Annotated[
        Path, typer.Option("--claim", metavar="FILE", allow_dash=True, help="What claim --json printed; - for stdin.")
    ],
    seconds: Annotated[float, typer.Option("--for", metavar="SECONDS", help="From now on; then it is over.")],
    budget: Annotated[int, typer.Option("--budget", metavar="N", help="What it may spend, in its worker's units.")],
    origin: Origin = "",
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Queue an item of role research below a claim of yours; it ends with its time, or when yours is canceled."""
    from sovereign_agent import assistant_work
    from sovereign_agent.clock import micros

    with opened(root) as org:
        parent = _presented(claim)
        deadline = micros(org.db.connection.now()) / 1_000_000 + seconds
        child = assistant_work.delegate(org.db, parent, prompt, deadline=deadline, budget=budget, origin=origin)
        found = _shown(assistant_work.get_work(org.db.connection, child))
    facts = [("next", "sovereign-agent assistant claim OWNER --role research")]
    answer(found, entry(f"Item {child} is {found['status']}.", facts), as_json=json)


@app.command()
def transcript(
    item: WorkId,
    *,
    after: Annotated[int, typer.Option("--after", metavar="N", help="Only what stands behind line N.")] = 0,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Show what was said over an item, 1,000 lines at most, each with the generation that wrote it."""
    from sovereign_agent import assistant_work
    from sovereign_agent.clock import moment

    with opened(root, read_only=True) as org:
        assistant_work.get_work(org.db.connection, item)
        lines = [
            dict(row) | {"message": codec.loads(row["message"]), "created_at": moment(row["created_at"])}
            for row in assistant_work.transcript(org.db.connection, item, after=after)
        ]
    text = "\n".join(
        entry(f"{line['seq']}  generation {line['generation']}", [("said", codec.dumps(line["message"]))])
        for line in lines
    )
    answer({"lines": lines}, text or "Nothing was said yet.", as_json=json)


@app.command()
def evidence(
    item: WorkId,
    *,
    after: Annotated[int, typer.Option("--after", metavar="N", help="Only what stands behind number N.")] = 0,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Show why tools and models failed over an item, up to 100 pieces: what no model is told."""
    from sovereign_agent import assistant_work, conversation
    from sovereign_agent.clock import moment

    with opened(root, read_only=True) as org:
        assistant_work.get_work(org.db.connection, item)
        pieces = [
            dict(row) | {"created_at": moment(row["created_at"])}
            for row in conversation.evidence(org.db.connection, item, after=after)
        ]
    text = "\n".join(
        entry(f"{one['seq']}  {one['code']}", [("call", one["call_id"]), ("why", one["detail"])]) for one in pieces
    )
    answer({"evidence": pieces}, text or "No evidence was kept.", as_json=json)


Script = Annotated[
    Path | None,
    typer.Option("--script", metavar="FILE", help="Play a recorded JSON transcript: to try it without a model."),
]
Owner = Annotated[str, typer.Option("--owner", metavar="NAME", help="The name that claims are made under.")]


@app.command()
def serve(
    *, role: Role = "shop", owner: Owner = "", script: Script = None, root: Root = HERE, json: Json = False
) -> None:
    """Work on what is queued, with the model and the tools of [assistant] in sovereign.toml, until interrupted.

    It runs in the foreground. The first Ctrl-C or SIGTERM lets the reply come that is being waited for, and hands the
    item back, or finishes it if that was the last reply; the second one ends it at once. It may be killed at any
    line: whoever claims the item next goes on from its transcript.
    """
    from sovereign_agent.commands.answering import answering

    with opened(root) as org:
        answering(org, script, owner=owner, role=role)()
    answer({"stopped": True}, "Stopped.", as_json=json)


@app.command()
def ask(
    session: Session,
    prompt: Prompt,
    *,
    origin: Origin = "",
    role: Role = "shop",
    owner: Owner = "",
    script: Script = None,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Queue one turn of a conversation, serve until it is answered, and print the answer.

    Another service may be the one that answers it. Ends with 1 when no answer came of it.
    """
    from sovereign_agent import assistant_work
    from sovereign_agent.commands.answering import answering
    from sovereign_agent.records import new_id

    with opened(root) as org:
        item = ""

        def found() -> Row:
            return assistant_work.get_work(org.db.connection, item)

        run = answering(org, script, owner=owner, role=role, until=lambda: found()["status"] in ENDED)
        item = assistant_work.enqueue(org.db, origin or new_id("ask"), session, prompt, role=role)
        run()
        ended = _shown(found())
    if ended["status"] == "DONE":
        answer(ended, "\n".join(map(plain, ended["result"].splitlines())), as_json=json)
        return
    facts = [
        ("why", ended["result"]),
        ("look", f"sovereign-agent assistant evidence {item}"),
        ("look", f"sovereign-agent assistant transcript {item}"),
        *_anew(ended),
    ]
    answer(ended, entry(f"Item {item} is {ended['status']}.", facts), as_json=json)
    raise typer.Exit(1)


app.command()(effects.effects)
app.command()(effects.reconcile)


def _shown(row: Row) -> dict[str, Any]:
    """An item as it is shown: times as moments."""
    from sovereign_agent.clock import moment

    item = dict(zip(row.keys(), row, strict=True))
    return item | {name: moment(item[name]) for name in TIMES if item[name]}


def _facts(item: dict[str, Any]) -> list[tuple[str, object]]:
    shown = ("session", "role", "subject", "generation", "owner", "expires_at", "losses", "result", "prompt")
    why = [("look", f"sovereign-agent assistant evidence {item['id']}")] if item["status"] == "BLOCKED" else []
    return [*((name, item[name]) for name in shown if item[name]), *why, *_anew(item)]


def _anew(item: dict[str, Any]) -> list[tuple[str, object]]:
    """What to type instead for an item that nobody gets any more, because too many workers were lost over it."""
    if item["status"] != "PARKED":
        return []
    role = "" if item["role"] == "shop" else f" --role {shlex.quote(item['role'])}"
    return [
        ("next", f"sovereign-agent assistant cancel {item['id']} --by ACTOR"),
        ("anew", f"sovereign-agent assistant enqueue {shlex.quote(item['session'])} PROMPT{role}"),
    ]


def _presented(path: Path) -> Claim:
    """The claim that a file holds. Raises IllegalMove (``claim_unreadable``)."""
    from sovereign_agent.assistant_work import Claim

    try:
        text = typer.get_text_stream("stdin").read() if str(path) == "-" else path.read_text("utf-8")
        return Claim(**codec.loads(text))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise IllegalMove(
            f"{path} holds no claim.",
            category="claim_unreadable",
            why=str(error),
            next_command="sovereign-agent assistant claim OWNER --json > FILE",
        ) from error
