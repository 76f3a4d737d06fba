"""Migrations: forward only, numbered, checksummed, each in one transaction with its stamp.

Any number of processes may start at once: the stamps are read again under the ledger lock, and whoever comes
second finds the work done. A ledger that is newer than this program, was altered, or belongs to another
application is refused before anything is written. Nothing here ever goes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sovereign_agent.clock import micros
from sovereign_agent.errors import SchemaMismatch
from sovereign_agent.storage.engine import Connection, Migration, Row, Transaction

CORE = "sovereign_agent"
STAMPS = "sovereign_migrations"

# home: storage.migrate
_CREATE_STAMPS = """
CREATE TABLE IF NOT EXISTS sovereign_migrations (
    component TEXT NOT NULL,
    number <integer> NOT NULL,
    name TEXT NOT NULL,
    checksum TEXT NOT NULL,
    min_writer <integer> NOT NULL,
    applied_at <integer> NOT NULL,
    PRIMARY KEY (component, number)
) <strict>;
"""


@cache
def core_migrations() -> tuple[Migration, ...]:
    """The package's own migrations, in order: ``schema/NNNN_name.sql``.

    A first line ``-- min_writer: N`` says that programs which know the schema up to N may go on writing.
    """
    files = sorted((Path(__file__).parent / "schema").glob("*.sql"))
    return tuple([_read(file.name, file.read_text("utf-8")) for file in files])


def _read(file_name: str, text: str) -> Migration:
    number, _, name = file_name.removesuffix(".sql").partition("_")
    first = text.partition("\n")[0]
    declared = first.removeprefix("-- min_writer:")
    return Migration(int(number), name, text, int(declared) if declared != first else int(number))


def checksum(migration: Migration) -> str:
    """The SHA-256 of a migration's text."""
    return hashlib.sha256(migration.sql.encode()).hexdigest()


def migrate(connection: Connection, component: str, migrations: Sequence[Migration]) -> None:
    """Bring one component's tables up to date, or raise SchemaMismatch and write nothing."""
    for migration in missing(connection, component, migrations):
        with Transaction(connection, ledger_lock=True):
            for statement in connection.schema_statements(_CREATE_STAMPS):
                connection.execute(statement)
            if migration in missing(connection, component, migrations):
                _apply(connection, component, migration)


def check(connection: Connection, component: str, migrations: Sequence[Migration]) -> None:
    """Raise SchemaMismatch unless the component's tables are exactly up to date. Writes nothing."""
    lacking = missing(connection, component, migrations)
    if lacking:
        raise SchemaMismatch(
            f"The ledger lacks {len(lacking)} migration(s), the first being {lacking[0].number:04d}_{lacking[0].name}.",
            category="schema_older",
            why="It was made by an older version, or its creation was interrupted, and this command may not write.",
            next_command="sovereign-agent init",
        )


def _apply(connection: Connection, component: str, migration: Migration) -> None:
    for statement in connection.schema_statements(migration.sql):
        connection.execute(statement)
    stamp = (component, migration.number, migration.name, checksum(migration))
    connection.execute(
        "INSERT INTO sovereign_migrations (component, number, name, checksum, min_writer, applied_at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (*stamp, migration.min_writer, micros(connection.now())),
    )


def missing(connection: Connection, component: str, migrations: Sequence[Migration]) -> list[Migration]:
    """What this program knows and the ledger has not, after refusing what it cannot work with. Writes nothing."""
    tables = connection.tables()
    if tables and STAMPS not in tables:
        raise SchemaMismatch(
            "This database belongs to another application.",
            category="schema_foreign",
            why="It has tables of its own and no stamp of this program.",
            next_command="choose another --root, or another database",
        )
    applied = _stamps(connection, component) if tables else []
    known = sorted(migrations, key=lambda migration: migration.number)
    for row, expected in zip(applied, known, strict=False):
        if (row["number"], row["checksum"]) != (expected.number, checksum(expected)):
            raise SchemaMismatch(
                f"Migration {row['number']:04d} of {component} is not the one this ledger was made with.",
                category="schema_altered",
                why="Its text or its stamp was changed after it had been applied.",
                next_command="use the version that made this ledger",
            )
    newest = known[-1].number if known else 0
    for row in applied[len(known) :]:
        if row["min_writer"] > newest:
            raise _newer(component, row["number"], newest)
    return known[len(applied) :]


def newest(connection: Connection) -> dict[str, int]:
    """The number of the newest migration that the ledger has, by component."""
    rows = connection.execute("SELECT component, max(number) FROM sovereign_migrations GROUP BY component")
    return {str(row[0]): int(row[1]) for row in rows}


def _stamps(connection: Connection, component: str) -> list[Row]:
    return connection.execute(
        "SELECT number, checksum, min_writer FROM sovereign_migrations WHERE component = ? ORDER BY number",
        (component,),
    ).fetchall()


def _newer(component: str, number: int, newest: int) -> SchemaMismatch:
    return SchemaMismatch(
        f"The ledger's schema of {component} is {number}, and this program knows up to {newest}.",
        category="schema_newer",
        why="A newer version has migrated it and does not allow this one to write.",
        next_command="upgrade this installation of sovereign-agent",
    )
