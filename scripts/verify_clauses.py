"""Hold each clause of each compare-and-set to a mutation: a clause that no mutation takes away is there on trust.

A write of the fence is as good as its WHERE: each condition in it was put there against some loss of authority. So each
condition of each UPDATE, DELETE and upsert of the files below, and of the reads that decide, needs an entry of
scripts/mutations.toml that changes it and no other. One that no test could miss stands in EQUIVALENT, with the reason.

This runs nothing: scripts/mutate.py shows that the entries are killed. Conditions are told apart by their function, by
how deep they stand in brackets, and by their text; one that holds a query of its own is judged by that query's.
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

ONE_ROW = "the table has one row, which its schema holds"
SAID_BY_CLAIM = "a token is in one row only, and its expiry is never changed under it"
POINTER_SAYS = "the schema holds that a pointer stands in a RUNNING assignment and in no other"
NAMED_BY_SEQ = (
    "w.seq names only such rows; PostgreSQL asks it again of a row that changed just then, which no test times"
)
EQUIVALENT = {
    ("fencing.py", "admitted_token", "id = 1"): ONE_ROW,
    ("fencing.py", "advance_tokens", "id = 1"): ONE_ROW,
    ("assistant_work.py", "assert_current", "id = 1"): ONE_ROW,
    ("storage/authority.py", "admit", "id = 1"): ONE_ROW,
    ("storage/authority.py", "change_control", "id = 1"): ONE_ROW,
    ("fencing.py", "acquire_execution_attempt", "assignment_id = ?"): "it makes active_attempt look, which decides",
    ("fencing.py", "acquire_execution_attempt", "status = 'ACTIVE'"): "it makes active_attempt look, which decides",
    ("relay.py", "claim", "recipient = ?"): "a recipient is never changed, and _addressed has compared it",
    ("relay.py", "_sweep", "id = ?"): SAID_BY_CLAIM,
    ("outcomes.py", "reproject_outcome", "state = ?"): "the row has been locked since it was read",
    ("outcomes.py", "start_assignment", "current_execution_attempt IS NULL"): POINTER_SAYS,
    ("outcomes.py", "hand_over_assignment", "state = 'RUNNING'"): POINTER_SAYS,
    ("outcomes.py", "stop_assignment", "state = 'RUNNING'"): POINTER_SAYS,
    ("assistant_work.py", "assert_current", "status = 'RUNNING'"): "the schema gives an owner to no other status",
    ("assistant_work.py", "_give_back", "status = 'RUNNING'"): "the schema gives a time to no other status",
    ("assistant_work.py", "_heads", "status = 'RUNNING'"): "the schema gives a time to no other status",
    ("assistant_work.py", "_heads", "w.status = 'READY'"): NAMED_BY_SEQ,
    ("assistant_work.py", "_heads", "w.available_at = 0"): NAMED_BY_SEQ,
    ("assistant_work.py", "_heads", "status = 'READY'"): "it makes _give_back look, which decides",
    ("assistant_work.py", "_heads", "available_at > 0"): "it makes _give_back look, which decides",
    ("assistant_work.py", "_take", "status = 'READY'"): "the row has been locked since it was read",
    (
        "assistant_work.py",
        "_settle",
        "d.parent_id = assistant_work.id",
    ): "it makes _settle look for children, by parent",
}
"""(file, function, condition) -> why nothing would go otherwise without it."""

WRITE = re.compile(r"\s*(?:UPDATE|DELETE|INSERT)\b")
READ = re.compile(r"\s*SELECT\b")
WHERE = re.compile(r"\bWHERE\b")
WORD = re.compile(r"[()]|\bBETWEEN\b|\bAND\b|\bOR\b|\b(?:RETURNING|ORDER BY|LIMIT|GROUP BY|UNION)\b|<[a-z ]+>")


@dataclass(frozen=True, slots=True)
class Clause:
    """One condition. Two that are alike in all of this are told apart by their order."""

    function: str
    depth: int
    text: str


Located = tuple[int, Clause]  # the line that its statement begins on


def main() -> int:
    """Print what is wrong, or one line when nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    entries = tomllib.loads((root / "scripts/mutations.toml").read_text("utf-8")).get("mutation", [])
    total, problems = 0, list[str]()
    for name, reads in READS.items():
        if (root / PACKAGE / name).is_file():
            text = (root / PACKAGE / name).read_text("utf-8")
            found = list(clauses(text, reads))
            total += len(found)
            mutants = (text.replace(e["line"], e["becomes"]) for e in entries if e["file"] == f"{PACKAGE}/{name}")
            problems += judge(name, found, [list(clauses(mutant, reads)) for mutant in mutants])
    for problem in problems:
        print(problem)
    print(f"clauses: {total} in the compare-and-sets of the fence, {len(problems)} problems")
    return int(bool(problems))


def judge(name: str, found: list[Located], mutants: list[list[Located]]) -> Iterator[str]:
    """What is wrong with a file: a condition without mutation or reason, and a reason without such a condition."""
    guarded = set[int]().union(*(changed_alone(found, mutant) for mutant in mutants))
    bare = [(line, clause) for place, (line, clause) in enumerate(found) if place not in guarded]
    for line, clause in bare:
        if (name, clause.function, clause.text) not in EQUIVALENT:
            yield f"{PACKAGE}/{name}:{line}: no mutation takes {clause.text!r} from {clause.function}"
    excused = {(name, clause.function, clause.text) for _, clause in bare}
    for excuse in EQUIVALENT.keys() - excused:
        if excuse[0] == name:
            yield f"EQUIVALENT: {' '.join(excuse)!r} is no condition without a mutation"


def changed_alone(before: list[Located], after: list[Located]) -> set[int]:
    """The place of the one condition that a mutant changes; nothing where it changes none, or several at once."""
    matcher = SequenceMatcher(None, [c for _, c in before], [c for _, c in after], autojunk=False)
    kept = {place for a, _, size in matcher.get_matching_blocks() for place in range(a, a + size)}
    changed = set(range(len(before))) - kept
    return changed if len(changed) == 1 else set()


def clauses(text: str, reads: Iterable[str]) -> Iterator[Located]:
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
