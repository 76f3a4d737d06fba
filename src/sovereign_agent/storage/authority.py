"""Authority: the epoch of a ledger, and the marker beside it. Home of assistant_control.

A minimal stand-in until the whole room lands.
"""

from __future__ import annotations

import os
from pathlib import Path

from sovereign_agent.errors import AuthorityLost, PolicyRefusal
from sovereign_agent.records import new_id
from sovereign_agent.storage.engine import Connection, Transaction


def new_epoch() -> str:
    """A fresh ``epoch_<32 hex>``."""
    return new_id("epoch")


def read_marker(path: Path) -> str:
    """The epoch that the marker names. Raises AuthorityLost (``marker_missing``, ``marker_empty``)."""
    try:
        file = os.open(path, os.O_RDONLY)
        epoch = os.read(file, 64).decode().strip()
        os.close(file)
    except OSError as error:
        raise AuthorityLost("authority marker is unavailable", category="marker_missing", why=str(error)) from None
    if not epoch:
        raise AuthorityLost("authority marker is unavailable", category="marker_empty")
    return epoch


def write_marker(path: Path, epoch: str) -> None:
    """Make the marker name `epoch`, durably."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{epoch}")
    temporary.write_text(f"{epoch}\n", "ascii")
    temporary.chmod(0o600)
    temporary.replace(path)


def establish(connection: Connection) -> None:
    """Begin the first epoch of a new ledger, marker first."""
    if connection.execute("SELECT 1 FROM assistant_control WHERE id = 1").fetchone():
        return
    with Transaction(connection, ledger_lock=True):
        if connection.execute("SELECT 1 FROM assistant_control WHERE id = 1").fetchone() is None:
            epoch = new_epoch()
            write_marker(connection.authority, epoch)
            connection.execute(
                "INSERT INTO assistant_control (id, ledger_id, epoch, paused) VALUES (1, ?, ?, 0)",
                (new_id("ledger"), epoch),
            )


def admit(connection: Connection) -> None:
    """Raise PolicyRefusal (``paused``) or AuthorityLost (``epoch_replaced``) unless new work may begin."""
    row = connection.execute("SELECT epoch, paused FROM assistant_control WHERE id = 1 <for share>").fetchone()
    if row is None:
        raise AuthorityLost("authority marker is unavailable", category="control_missing")
    if row["paused"]:
        raise PolicyRefusal("The runtime is paused.", category="paused")
    if row["epoch"] != read_marker(connection.authority):
        raise AuthorityLost("runtime paused or replaced by restore", category="epoch_replaced")
