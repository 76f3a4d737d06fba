"""Hold each clause of each compare-and-set to a mutation: a clause that no mutation takes away is there on trust.

A write of the fence is as good as its WHERE: each condition in it was put there against some loss of authority. So for
each condition of each UPDATE, DELETE and upsert of the files below, and of the reads that decide, scripts/mutations.toml
must have an entry that changes this condition and no other. A condition that no test could miss stands in EQUIVALENT,
with the reason.

This runs nothing: scripts/mutate.py shows that the entries are killed. Conditions are told apart by their function, how
deep they stand in brackets, and their text; one that holds a query of its own is judged by the conditions of that query.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGE = Path("src/sovereign_agent")
READS = {
    "fencing.py": {"acquire_execution_attempt", "active_attempt", "finish_own_attempt", "lock_expired_attempt"},
    "relay.py": set[str](),
    "outcomes.py": set[str](),
    "assistant_work.py": {"assert_current", "_delegation", "_give_back", "_heads"},
    "effects.py": {"intend", "_find"},
    "supervisor.py": set[str](),
    "storage/authority.py": {"admit"},
}
"""The files of the fence, and the functions in each whose SELECT decides over authority."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""(file, function, condition) -> why the ledger behaves alike without it."""

WRITE = re.compile(r"\s*(?:UPDATE|DELETE|INSERT)\b")
READ = re.compile(r"\s*SELECT\b")
WHERE = re.compile(r"\bWHERE\b")
WORD = re.compile(r"[()]|\bBETWEEN\b|\bAND\b|\bOR\b|\b(?:RETURNING|ORDER BY|LIMIT|GROUP BY|UNION)\b|<[a-z ]+>")


@dataclass(frozen=True, slots=True)
class Clause:
    """One condition. Two of the same function, depth and text are the same to a reader, and told apart by their order."""

    function: str
    depth: int
    text: str


def main() -> int:
    """Print each condition that no mutation takes away, and each exception that is none; or one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    entries = tomllib.loads((root / "scripts/mutations.toml").read_text("utf-8")).get("mutation", [])
    total, problems, unused = 0, list[str](), set(EQUIVALENT)
    for name, reads in READS.items():
        path = PACKAGE / name
        if not (root / path).is_file():
            continue
        text = (root / path).read_text("utf-8")
        mutants = [text.replace(e["line"], e["becomes"]) for e in entries if e["file"] == path.as_posix()]
        before = list(clauses(text, reads))
        guarded = set().union(*(alone(before, list(clauses(mutant, reads))) for mutant in mutants))
        total += len(before)
        for place, (line, clause) in enumerate(before):
            excuse = (name, clause.function, clause.text)
            if place not in guarded and excuse not in EQUIVALENT:
                problems.append(f"{path.as_posix()}:{line}: no mutation takes {clause.text!r} from {clause.function}")
            elif place not in guarded:
                unused.discard(excuse)
    problems += [f"EQUIVALENT: {' '.join(excuse)!r} is no condition without a mutation" for excuse in sorted(unused)]
    for problem in problems:
        print(problem)
    print(f"clauses: {total} in the compare-and-sets of the fence, {len(problems)} problems")
    return int(bool(problems))


def alone(before: list[tuple[int, Clause]], after: list[tuple[int, Clause]]) -> set[int]:
    """The place of the one condition that a mutant changes; nothing where it changes none, or several at once."""
    matcher = SequenceMatcher(None, [c for _, c in before], [c for _, c in after], autojunk=False)
    kept = {place for a, _, size in matcher.get_matching_blocks() for place in range(a, a + size)}
    changed = set(range(len(before))) - kept
    return changed if len(changed) == 1 else set()


def clauses(text: str, reads: Iterable[str]) -> Iterator[tuple[int, Clause]]:
    """Line and condition, for each in a WHERE of a write, and of a read in one of the functions `reads`."""
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        found = [node for node in ast.walk(function) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
            sql = str(node.value)
            if WRITE.match(sql) or (READ.match(sql) and function.name in reads):
                for where in WHERE.finditer(sql):
                    for depth, condition in conditions(sql, where.end()):
                        yield node.lineno, Clause(function.name, depth, condition)


def conditions(sql: str, start: int) -> Iterator[tuple[int, str]]:
    """Depth and text of what AND and OR join from `start` to where the query ends, inside brackets as well."""
    depth, opened, between = 0, list[int](), False
    part = start
    for word in WORD.finditer(sql, start):
        inside = len(opened)
        if word[0] == "(":
            # A bracket that begins a condition holds conditions; any other one belongs to the condition it stands in.
            opens = not sql[part : word.start()].strip() and not inside
            if opens:
                depth, part = depth + 1, word.end()
            else:
                opened.append(word.start())
        elif word[0] == ")" and inside:
            opened.pop()
        elif inside:
            continue
        elif word[0] == "BETWEEN":
            between = True
        elif word[0] == "AND" and between:
            between = False
        else:
            yield from complete(depth, sql[part : word.start()])
            part = word.end()
            if word[0] == ")":
                depth -= 1
            if depth < 0 or word[0] not in {")", "AND", "OR"}:
                return
    yield from complete(depth, sql[part:])


def complete(depth: int, text: str) -> Iterator[tuple[int, str]]:
    """A condition on one line, unless there is none, or it is a query whose own conditions are looked at."""
    if text.strip() and not WHERE.search(text):
        yield depth, " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
