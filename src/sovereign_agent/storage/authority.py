"""The epoch: whose era of authority a ledger is in. Home of assistant_control and of the marker beside the ledger.

An epoch is a random name. The ledger has it in its one control row, and each host has it in a small file, the
marker, outside the ledger. A copy of the ledger that comes back brings the old epoch along, or a new one, but never
the marker's; so a comparison of the two shows what the ledger alone cannot know: that it is not the one it was.

Every grant of authority asks `admit` inside the transaction that grants it. The marker is written when a ledger is
made, by a restore, by `authority new-epoch` and by `authority adopt`, and by nothing else: whatever is wrong with it
closes the door, and nobody here mends it unasked.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from sovereign_agent.configuration import held_open, make_folder, replace_file
from sovereign_agent.errors import AuthorityLost, ConstraintBroken, LedgerUnavailable, PolicyRefusal
from sovereign_agent.records import new_id
from sovereign_agent.storage.engine import Connection, Row, Transaction

TABLE = "assistant_control"
SUFFIX = ".authority"
SEEN = ".seen"
"""How far the ledger had come when this host last looked: beside a marker that does not go back with the ledger."""

BEGINNING = ".beginning"
"""What a first start calls the marker until the ledger has its control row."""

NEW_EPOCH = "sovereign-agent authority new-epoch --by ACTOR --reason TEXT"
SHOW = "sovereign-agent authority show"
RESUME = "sovereign-agent resume --by ACTOR --reason TEXT"
UNFINISHED = "sovereign-agent restore --by ACTOR --resume, or --rollback"

_EPOCH = re.compile(rb"epoch_[0-9a-f]{32}\n")
_ANY = b"epoch_" + b"0" * 32 + b"\n"
_LONGEST_BYTES = 64
_OPENING = {
    errno.ENOENT: ("marker_missing", "there is no such file"),
    errno.ELOOP: ("marker_link", "it is a symbolic link"),
    errno.ENXIO: ("marker_not_a_file", "it is a socket"),
}


@dataclass(frozen=True, slots=True)
class Control:
    """The control row. `restoring` is the id of a restore that stands between its steps, else empty."""

    ledger_id: str
    epoch: str
    paused: bool
    restoring: str


def new_epoch() -> str:
    """A fresh ``epoch_<32 hex>``."""
    return new_id("epoch")


# --- the marker -------------------------------------------------------------------------------------------


def read_marker(path: Path) -> str:
    """The epoch that this host's marker names.

    Raises AuthorityLost, ``marker_missing``, ``_empty``, ``_torn``, ``_foreign``, ``_not_a_file``, ``_link`` or
    ``_unreadable``: nothing but a regular file of one whole epoch and a newline is a marker.
    """
    content = _content(path)
    if _EPOCH.fullmatch(content):
        return content[:-1].decode()
    if not content:
        raise _unavailable(path, "marker_empty", "it is empty")
    if _EPOCH.fullmatch(content + _ANY[len(content) :]):
        raise _unavailable(path, "marker_torn", "only the beginning of an epoch is left in it")
    raise _unavailable(path, "marker_foreign", "what is in it is no epoch")


def _content(path: Path) -> bytes:
    """The beginning of a regular file. Raises AuthorityLost for what is none: a pipe could say anything, or nothing."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            content = os.read(file, _LONGEST_BYTES) if regular else b""
        finally:
            os.close(file)
    except OSError as error:
        category, why = _OPENING.get(error.errno or 0, ("marker_unreadable", str(error.strerror)))
        raise _unavailable(path, category, why) from error
    if not regular:
        raise _unavailable(path, "marker_not_a_file", "it is a folder, a pipe or a device")
    return content


def write_marker(path: Path, epoch: str) -> None:
    """Put `epoch` into the marker, durably and whole; written by root, it belongs to whom its folder belongs to.

    Raises LedgerUnavailable (``marker_unwritten``); the old marker then still stands.
    """
    try:
        make_folder(path.parent, mode=0o700)
        with held_open(path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
            replace_file(folder, path.name, f"{epoch}\n".encode(), owner=os.fstat(folder))
    except OSError as error:
        mend = f"move {path} away" if error.errno == errno.EISDIR else "mend that"
        raise LedgerUnavailable(
            "The authority marker was not written.",
            category="marker_unwritten",
            why=f"{path}: {error.strerror}.",
            inspect=f"ls -ld {path} {path.parent}",
            next_command=f"{mend}, then repeat the command",
        ) from error


def _unavailable(path: Path, category: str, why: str) -> AuthorityLost:
    return AuthorityLost(
        "authority marker is unavailable",
        category=category,
        why=f"{path}: {why}.",
        inspect=SHOW,
        next_command="sovereign-agent doctor",
    )


# --- the control row --------------------------------------------------------------------------------------


def find_control(connection: Connection) -> Control | None:
    """The control row as it is now; None in a ledger that has no epoch yet."""
    row = connection.execute("SELECT * FROM assistant_control WHERE id = 1").fetchone()
    return Control(row["ledger_id"], row["epoch"], bool(row["paused"]), row["restoring"]) if row else None


def control(connection: Connection) -> Control:
    """The control row as it is now. Raises ConstraintBroken when it is gone."""
    found = find_control(connection)
    if found is None:
        raise ConstraintBroken(
            "The control row is gone.",
            category="control_missing",
            why="It named the ledger and its epoch, so nobody can say who holds what. Older backups will be another's.",
            inspect=f"table {TABLE}",
            next_command=NEW_EPOCH,
        )
    return found


def admit(connection: Connection) -> tuple[str, int | None]:
    """Return the epoch and the server's time, if it has one; or raise, if no new authority may be granted.

    The answer holds until the caller's transaction ends. Raises as `require_admission` does.
    """
    row = connection.execute(
        """
        SELECT control.epoch, control.paused, <now> AS now
          FROM (SELECT epoch, paused FROM assistant_control WHERE id = 1 <for share>) AS control
        """
    ).fetchone()
    return require_admission(connection, row), row["now"] if row else None


def require_admission(connection: Connection, row: Row | None) -> str:
    """Return the epoch, or raise: whether new authority may be granted under the `epoch` and `paused` of this row.

    Raises AuthorityLost (``epoch_replaced``, or the marker's own category) and PolicyRefusal (``paused``).
    """
    epoch = read_marker(connection.authority)
    if row is None or row["epoch"] != epoch:
        raise AuthorityLost(
            "runtime paused or replaced by restore",
            category="epoch_replaced",
            why="The ledger and this host's authority marker are not of one epoch.",
            inspect=SHOW,
            next_command="sovereign-agent doctor",
        )
    if row["paused"]:
        raise PolicyRefusal(
            "Nothing new is begun: this ledger is paused.",
            category="paused",
            why="Somebody paused it, or it was restored. It does not resume by itself.",
            inspect=SHOW,
            next_command=RESUME,
        )
    return epoch


def begin_epoch(connection: Connection, epoch: str, *, paused: bool, restoring: str = "", ledger_id: str = "") -> None:
    """Let the ledger be in `epoch`. One that has an id keeps it; one that has none gets `ledger_id`, or a new one."""
    connection.execute(
        """
        INSERT INTO assistant_control (id, ledger_id, epoch, paused, restoring) VALUES (1, ?, ?, ?, ?)
        ON CONFLICT (id) DO UPDATE
           SET epoch = excluded.epoch, paused = excluded.paused, restoring = excluded.restoring
        """,
        (ledger_id or new_id("ledger"), epoch, paused, restoring),
    )


def change_control(connection: Connection, seen: Control, *, paused: bool, restoring: str = "") -> bool:
    """Pause, resume, or open and close a restore. False, and nothing changed, unless the row is still as `seen`."""
    changed = connection.execute(
        """
        UPDATE assistant_control SET paused = ?, restoring = ?
         WHERE id = 1 AND epoch = ? AND paused = ? AND restoring = ?
        """,
        (paused, restoring, seen.epoch, seen.paused, seen.restoring),
    )
    return changed.rowcount == 1


# --- opening ----------------------------------------------------------------------------------------------


def establish(connection: Connection) -> None:
    """Give a new ledger its first epoch: beside the marker's place first, then the row, then the marker itself.

    A start that died between two of these is finished by the next. So a marker is never older than the row, and one
    that stands beside a ledger without it is refused: ConstraintBroken (``control_missing``).
    """
    beginning = connection.authority.with_suffix(BEGINNING)
    if find_control(connection) is None:
        with Transaction(connection, ledger_lock=True):
            if os.path.lexists(connection.authority):
                control(connection)
            elif find_control(connection) is None:
                epoch = new_epoch()
                write_marker(beginning, epoch)
                begin_epoch(connection, epoch, paused=False)
    if os.path.lexists(beginning):
        with Transaction(connection, ledger_lock=True):
            epoch = control(connection).epoch
            if (
                os.path.lexists(beginning)
                and not os.path.lexists(connection.authority)
                and read_marker(beginning) == epoch
            ):
                write_marker(connection.authority, epoch)
            beginning.unlink(missing_ok=True)


def require_agreement(connection: Connection, mend: str) -> None:
    """Raise LedgerUnavailable unless ledger and marker are of one epoch and no restore stands between its steps."""
    now = control(connection)
    require_finished(now)
    try:
        marked = read_marker(connection.authority)
    except AuthorityLost as error:
        raise LedgerUnavailable(
            str(error), category=error.category, why=error.why, inspect=SHOW, next_command=mend
        ) from error
    if marked != now.epoch:
        raise LedgerUnavailable(
            "The ledger and this host's authority marker are not of one epoch.",
            category="epoch_replaced",
            why=f"The ledger is in {now.epoch}, and {connection.authority} names {marked}.",
            inspect=SHOW,
            next_command=mend,
        )


def require_progress(connection: Connection) -> str:
    """Raise LedgerUnavailable (``ledger_rolled_back``) when the ledger was seen, in this epoch, with more events.

    Returns the epoch and how far the ledger has come, as `note_progress` writes it beside a marker that lies elsewhere.
    """
    place = connection.authority.with_suffix(SEEN)
    newest = connection.execute("SELECT COALESCE(max(seq), 0) FROM events").rows[0][0]
    epoch = control(connection).epoch
    try:
        seen_in, seen = _content(place).decode().split() if os.path.lexists(place) else ("", "0")
        gone = int(seen) - newest if seen_in == epoch else 0
    except ValueError as error:
        raise _unavailable(place, "marker_unreadable", str(error)) from error
    if gone > 0:
        raise LedgerUnavailable(
            "The ledger has gone back behind what this host has seen of it.",
            category="ledger_rolled_back",
            why=f"It ends with event {newest}, and {place} has seen event {seen}.",
            inspect=SHOW,
            next_command=NEW_EPOCH,
        )
    return f"{epoch} {newest}"


def note_progress(connection: Connection) -> None:
    """Write down beside the marker how far the ledger has come, unless `require_progress` raises."""
    with Transaction(connection, ledger_lock=True):
        write_marker(connection.authority.with_suffix(SEEN), require_progress(connection))


def require_finished(now: Control) -> None:
    """Raise LedgerUnavailable (``restore_unfinished``) while a restore stands between its steps."""
    if now.restoring:
        raise LedgerUnavailable(
            "A restore of this ledger was not finished.",
            category="restore_unfinished",
            why=f"{now.restoring} stands between two of its steps: it is still at work, or it was ended.",
            inspect=SHOW,
            next_command=UNFINISHED,
        )
