"""Hold each statement to its home: SQL is a plain literal, in the module that owns the table.

The schema names a home over each table (``-- home: module``). In src/sovereign_agent only that module may change
the table's rows, and only a home may read any. Everywhere in src, text that is put together at run time is no SQL,
a driver is imported and a transaction is opened or ended only where the ledger lives, and a script of statements is
never run, because it commits behind the caller's back. storage/ alone may put schema statements together: it turns
the one text into each engine's own. testing/ and the crash demo may read anything, because a witness must not ask
the accused.

It reads literals, so SQL that reaches ``execute`` as a parameter is judged where its text stands.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path("src/sovereign_agent")
DRIVERS = {"psycopg", "sqlite3"}
READERS = {"commands.crash", "console.queries"}
NAME = r"""(?:\w+\.)?["`]?(\w+)["`]?"""
CREATES = re.compile(rf"\bCREATE\s+TABLE\s+(?:IF\s+NOT\s+EXISTS\s+)?{NAME}", re.IGNORECASE)
HOME = re.compile(r"^--\s*home:\s*([\w.]+)\s*$")
CHANGES = re.compile(
    rf"""\b(?:INSERT\s+(?:OR\s+\w+\s+)?INTO|REPLACE\s+INTO|MERGE\s+INTO|DELETE\s+FROM(?:\s+ONLY)?)\s+{NAME}
       | \bUPDATE\s+(?:OR\s+\w+\s+)?(?:ONLY\s+)?{NAME}(?:\s+AS)?(?:\s+\w+)?\s+SET\b
       | \b(?-i:TRUNCATE)\s+(?:TABLE\s+)?(?!ON\b){NAME}""",
    re.IGNORECASE | re.VERBOSE,
)
READS = re.compile(r"\bSELECT\b.*\bFROM\b", re.DOTALL)
CLAUSE = re.compile(
    r"\b(SELECT|INSERT\s+INTO|REPLACE\s+INTO|DELETE\s+FROM|UPDATE\s+\S+\s+SET|WHERE|ORDER\s+BY|RETURNING|ON\s+CONFLICT)\b"
)
TRANSACTION = re.compile(r"(?:^|;)\s*(?:BEGIN|COMMIT|ROLLBACK|SAVEPOINT)\b")


@dataclass(frozen=True)
class Source:
    """One file of src. ``module`` is its dotted name inside the package; empty for a file outside of it."""

    where: str
    module: str
    tree: ast.Module

    @property
    def in_storage(self) -> bool:
        """Whether it belongs to the room that speaks to drivers."""
        return self.module.split(".")[0] == "storage"


def main() -> int:
    """Print what is wrong, or one line when nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    sources = [read(root, path) for path in sorted((root / "src").rglob("*.py"))]
    homes, problems = schema_homes(root)
    homes |= {table: source.module for source in sources if source.in_storage for table in created(source)}
    for source in sources:
        problems += judge(source, homes)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"sql homes: {len(homes)} tables in {len(set(homes.values()))} homes")
    return int(bool(problems))


def read(root: Path, path: Path) -> Source:
    """Parse one file."""
    module = ""
    if path.is_relative_to(root / PACKAGE):
        inside = path.relative_to(root / PACKAGE).with_suffix("")
        module = ".".join(inside.parts).removesuffix(".__init__")
    return Source(path.relative_to(root).as_posix(), module, ast.parse(path.read_bytes()))


def schema_homes(root: Path) -> tuple[dict[str, str], list[str]]:
    """Table -> home as the schema files say it, and what they fail to say."""
    homes: dict[str, str] = {}
    problems: list[str] = []
    for path in sorted((root / PACKAGE / "storage" / "schema").glob("*.sql")):
        above = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for table in CREATES.findall(line.partition("--")[0]):
                said = HOME.match(above)
                home = said[1] if said else ""
                if not (root / PACKAGE / f"{home.replace('.', '/')}.py").is_file():
                    where = f"{path.relative_to(root).as_posix()}:{number}"
                    problems.append(
                        f"{where}: {table} needs the line '-- home: MODULE' over it, of a module that exists"
                    )
                homes[table] = home
            above = line
    return homes, problems


def created(source: Source) -> Iterator[str]:
    """Tables that a file creates by itself."""
    for _, text in literals(source.tree):
        yield from CREATES.findall(text)


def judge(source: Source, homes: dict[str, str]) -> Iterator[str]:
    """Every sentence that this file breaks a rule with."""
    findings = {*drivers(source), *transactions(source), *scripts(source), *changes(source, homes)}
    if not source.in_storage:
        findings.update(dynamic(source))
    if source.module and not source.in_storage and source.module.split(".")[0] != "testing":
        findings.update(reads(source, set(homes.values()) | READERS))
    yield from (f"{source.where}:{line}: {finding}" for line, finding in sorted(findings))


def drivers(source: Source) -> Iterator[tuple[int, str]]:
    """Imports of a database driver outside storage/."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=aliases):
                names = {alias.name.split(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(module), level=0):
                names = {module.split(".")[0]}
            case _:
                continue
        if not source.in_storage:
            yield from ((node.lineno, f"{name} is imported outside storage/") for name in sorted(names & DRIVERS))


def transactions(source: Source) -> Iterator[tuple[int, str]]:
    """Transaction words outside storage/ and database.py."""
    if source.in_storage or source.module == "database":
        return
    for line, text in literals(source.tree):
        if TRANSACTION.search(text):
            yield line, "a transaction is opened or ended outside storage/ and database.py"
    for call in executions(source.tree):
        match call.args:
            case [ast.Constant(value=str(text)), *_] if TRANSACTION.search(text.upper()):
                yield call.lineno, "a transaction is opened or ended outside storage/ and database.py"
            case _:
                continue


def scripts(source: Source) -> Iterator[tuple[int, str]]:
    """Any mention of ``executescript``."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(attr="executescript") | ast.Constant(value="executescript"):
                yield node.lineno, "executescript commits whatever transaction is open"
            case _:
                continue


def changes(source: Source, homes: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Statements that change a table away from its home.

    Tables of an application outside the package are its own, and so are those that a file of testing/ creates.
    """
    own = {*created(source)} if source.module.startswith("testing.") else set()
    for line, text in literals(source.tree):
        for table in (next(filter(None, groups)) for groups in CHANGES.findall(text)):
            home = homes.get(table)
            if home is None and source.module and table not in own:
                yield line, f"{table} is changed, but the schema has no such table"
            elif home is not None and home != source.module:
                yield line, f"{table} is changed away from its home, {home}"


def reads(source: Source, readers: set[str]) -> Iterator[tuple[int, str]]:
    """Queries in a module that is no home."""
    if source.module not in readers:
        yield from ((line, "a query stands in no home") for line, text in literals(source.tree) if READS.search(text))


def dynamic(source: Source) -> Iterator[tuple[int, str]]:
    """SQL that is put together at run time, and anything but a name or a literal handed to ``execute``."""
    for node in ast.walk(source.tree):
        match node:
            case ast.JoinedStr() | ast.BinOp(op=ast.Add() | ast.Mod()):
                parts = [node]
            case ast.Call(func=ast.Attribute(value=ast.Constant() as text, attr="format" | "join" | "replace")):
                parts = [text, *node.args]
            case _:
                continue
        if CLAUSE.search(" x ".join(text for part in parts for _, text in literals(part))):
            yield node.lineno, "SQL is put together at run time; write it as one literal with ? for its values"
    for call in executions(source.tree):
        if call.args and not isinstance(call.args[0], ast.Constant | ast.Name | ast.Attribute):
            yield call.lineno, "execute takes one literal with ? for its values"


def executions(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of a method named ``execute`` or ``executemany``."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="execute" | "executemany")):
                yield node
            case _:
                continue


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of each string literal that is not a docstring, in the order of the source."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        yield node.lineno, str(node.value)


if __name__ == "__main__":
    sys.exit(main())
