"""pause, resume, backup, restore, authority: the operator's acts on a whole ledger."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sovereign_agent.commands.options import HERE, By, Json, Root
from sovereign_agent.commands.printing import answer, entry, tally
from sovereign_agent.errors import Refusal

if TYPE_CHECKING:
    from sovereign_agent.database import Connection, Database
    from sovereign_agent.records import Event

app = typer.Typer(help="See whose era of authority a ledger is in, and begin another.")

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for those who come after.")]
EFFECTS = ("look", "sovereign-agent assistant effects")
RESUME = ("next", "sovereign-agent resume --by ACTOR --reason TEXT")


def paused_by(connection: Connection) -> Event | None:
    """The act that paused a ledger, if it is paused: a pause, a restore, a rollback or a new epoch."""
    from sovereign_agent import journal
    from sovereign_agent.database import authority

    control = authority.find_control(connection)
    newest = journal.events_of(connection, control.ledger_id, limit=1) if control else []
    return next((event for event in newest if event.kind != "authority.resumed"), None)


def pause_facts(event: Event | None) -> list[tuple[str, object]]:
    """Who paused it, since when and why."""
    if event is None:
        return []
    act = event.kind.removeprefix("authority.").replace("_", " ")
    return [
        ("by", event.actor),
        ("since", event.at),
        ("why", ": ".join(filter(None, [act, event.detail.get("reason")]))),
    ]


def pause(*, by: By, reason: Reason, root: Root = HERE, json: Json = False) -> None:
    """Let nothing new begin: no run and no claim. What runs may end, and the supervisor recovers."""
    from sovereign_agent import assistant_service

    with _ledger(root, by) as db:
        assistant_service.pause(db, by, reason)
    answer({"paused": True}, entry("The ledger is paused.", [RESUME]), as_json=json)


def resume(*, by: By, reason: Reason, root: Root = HERE, json: Json = False) -> None:
    """Let work begin again, after a pause, a restore or a new epoch. Nothing else does."""
    from sovereign_agent import assistant_service

    with _ledger(root, by) as db:
        assistant_service.resume(db, by, reason)
    answer({"paused": False}, entry("The ledger is no longer paused."), as_json=json)


def backup(
    destination: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; none is ever overwritten.")],
    *,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Copy the ledger to a file, while work goes on. The copy is verified before it gets its name."""
    from sovereign_agent import assistant_service

    with _ledger(root, authority_required=False) as db:
        image = assistant_service.backup(db, destination)
    facts = [
        ("bytes", image.size_bytes),
        ("rows", sum(image.rows.values())),
        ("content", f"sha256 {image.digest}"),
        ("next", f"sovereign-agent restore {image.path} --by ACTOR --reason TEXT"),
    ]
    answer(image, entry(f"The ledger is backed up to {image.path}.", facts), as_json=json)


def restore(
    source: Annotated[Path | None, typer.Argument(metavar="FILE", help="What `backup` made.")] = None,
    *,
    by: By,
    reason: Reason = "",
    go_on: Annotated[bool, typer.Option("--resume", help="Finish a restore that was ended half-way.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Undo a restore that was ended half-way.")] = False,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Bring the ledger back to a backup. All authority is revoked, a new epoch begins, and the ledger is paused."""
    from sovereign_agent import assistant_service

    if [source is not None, go_on, rollback].count(True) != 1:
        raise typer.BadParameter("Nothing was restored. It takes one of: a FILE, --resume, --rollback.")
    with _ledger(root, by, authority_required=False) as db:
        if source:
            done = assistant_service.restore(db, source, actor=by, reason=reason)
        elif go_on:
            done = assistant_service.finish_restore(db)
        else:
            done = assistant_service.roll_back_restore(db, actor=by)
    what = "was rolled back" if rollback else "is restored"
    facts = [("epoch", done.epoch), ("before", done.safety_copy), EFFECTS, RESUME]
    answer(done, entry(f"The ledger {what}, and is paused.", facts), as_json=json)


@app.command()
def show(*, root: Root = HERE, json: Json = False) -> None:
    """Show the epoch on both sides, whether the ledger is paused, what is held, and what assistant work is open."""
    from sovereign_agent import assistant_service
    from sovereign_agent.assistant_work import MAX_COUNTED

    with _ledger(root, read_only=True) as db:
        health = assistant_service.health(db)
        ledger, marker, event = db.location, db.authority, paused_by(db.connection)
    facts = [
        *pause_facts(event),
        ("ledger", health.epoch),
        ("marker", health.marker),
        ("restoring", health.restoring),
        ("held", tally(health.held, assistant_service.MAX_HELD)),
        ("work", tally(health.work, MAX_COUNTED)),
        ("running", ", ".join(f"{one.kind} ({one.verdict})" for one in health.services)),
        ("look", f"{marker}"),
    ]
    state = ("paused" if health.paused else "running") if health.agrees else "closed: ledger and marker do not agree"
    document = {"ledger": ledger, "marker_path": marker, "agrees": health.agrees, "health": health, "paused_by": event}
    answer(document, entry(f"The ledger is {state}.", facts), as_json=json)


@app.command("new-epoch")
def new_epoch(*, by: By, reason: Reason, root: Root = HERE, json: Json = False) -> None:
    """Revoke all authority and begin a new epoch, after the ledger came back by other means than `restore`."""
    from sovereign_agent import assistant_service

    with _ledger(root, by, authority_required=False) as db:
        epoch = assistant_service.new_epoch(db, by, reason)
        others = "each other host: sovereign-agent authority adopt --yes" if db.engine == "postgresql" else ""
    facts = [("epoch", epoch), ("hosts", others), EFFECTS, RESUME]
    answer(
        {"epoch": epoch, "paused": True}, entry("A new epoch has begun, and the ledger is paused.", facts), as_json=json
    )


@app.command()
def adopt(
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, both epochs are only shown.")] = False,
    root: Root = HERE,
    json: Json = False,
) -> None:
    """Take the ledger's epoch into this host's marker, after another host has begun it. PostgreSQL only."""
    from sovereign_agent import assistant_service

    with _ledger(root, authority_required=False) as db:
        health = assistant_service.health(db)
        if not yes:
            raise Refusal(
                "The ledger's epoch was not adopted.",
                category="not_confirmed",
                why=f"The ledger is in {health.epoch}, and this host's marker: {health.marker}. If another host began"
                " that epoch, adopt it; if the ledger itself came back from somewhere, begin a new one.",
                inspect="sovereign-agent authority show",
                next_command="sovereign-agent authority adopt --yes",
            )
        before, epoch = assistant_service.adopt(db)
    answer({"before": before, "epoch": epoch}, entry(f"This host is in {epoch}.", [("before", before)]), as_json=json)


@contextmanager
def _ledger(
    root: Path, by: str = "", *, read_only: bool = False, authority_required: bool = True
) -> Generator[Database]:
    """The ledger alone, also where an organization would not open; `by` must be an actor of it."""
    from sovereign_agent import configuration
    from sovereign_agent.database import LEDGER_NAME, Database

    settings = configuration.load(root)
    if by:
        settings.actor(by)
    database = Database(
        settings.ledger.url or root.resolve() / LEDGER_NAME,
        root=root.resolve(),
        create=False,
        read_only=read_only,
        authority_required=authority_required,
        marker=settings.authority.marker_path,
    )
    with closing(database):
        yield database
