"""Hold the package to its budget: 50 modules, 8,650 code lines and 30 root exports, and no file over 400 code lines.

A code line carries at least one token that is neither a comment nor part of a docstring, and is not blank, so
explaining more never costs budget. A file without such a line is no module: there is nothing in it to understand. The
first three limits leave out the wings, which a reader may skip; the limit for one file does not.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

MAX_MODULES = 50
MAX_CODE_LINES = 8_650
MAX_ROOT_EXPORTS = 30
MAX_FILE_CODE_LINES = 400
WINGS = ("commands", "console", "testing")
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Line:
    """One line of the table: what was counted, and how much of it there may be."""

    what: str
    count: int
    limit: int


def main() -> int:
    """Print the table. 0 when everything fits, 1 when something does not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    package = parser.parse_args().root / "src" / "sovereign_agent"
    table = measure(package)
    for line in table:
        verdict = "" if line.count <= line.limit else "  OVER"
        print(f"{line.what:<52} {line.count:>6,} / {line.limit:>5,}{verdict}")
    return int(any(line.count > line.limit for line in table))


def measure(package: Path) -> list[Line]:
    """The three totals without the wings, the largest file of all, and each further file that is too large."""
    sizes = {path.relative_to(package): code_lines(path) for path in sorted(package.rglob("*.py"))}
    counted = [size for path, size in sizes.items() if size and path.parts[0] not in WINGS]
    largest = max(sizes, key=lambda path: sizes[path])
    shown = {largest} | {path for path, size in sizes.items() if size > MAX_FILE_CODE_LINES}
    return [
        Line("modules", len(counted), MAX_MODULES),
        Line("code lines", sum(counted), MAX_CODE_LINES),
        Line("root exports", root_exports(package / "__init__.py"), MAX_ROOT_EXPORTS),
        *(Line(f"code lines of {path.as_posix()}", sizes[path], MAX_FILE_CODE_LINES) for path in sorted(shown)),
    ]


def code_lines(path: Path) -> int:
    """The number of lines of one file that carry code."""
    docstrings = [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    carrying: set[int] = set()
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type in SILENT or any(start <= token.start and token.end <= end for start, end in docstrings):
                continue
            lines = token.string.splitlines() or [token.line]
            carrying.update(token.start[0] + offset for offset, text in enumerate(lines) if text.strip())
    return len(carrying)


def root_exports(init: Path) -> int:
    """The length of the front door's literal ``__all__``. Anything else could not be counted without running it."""
    for node in ast.parse(init.read_bytes()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names) | ast.Tuple(elts=names)):
                return len(names)
            case _:
                continue
    sys.exit(f"{init}: needs a literal __all__, so that its exports can be counted")


if __name__ == "__main__":
    sys.exit(main())
