"""Hold the core to five dependencies, and the code to what the core installs.

Two questions: are the dependencies that pyproject.toml declares exactly the list below, and does each import in
src/ resolve to the standard library, to this project or to one of them? Only the places below may import more.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each is imported under the name it is installed by.
CORE = {"psutil", "pydantic", "rich", "tomlkit", "typer"}
OURS = {"reference_organizations", "sovereign_agent"}
POSTGRES = "src/sovereign_agent/storage/postgres.py"  # opened only when a ledger's URL asks for it
KIT = "src/sovereign_agent/testing/"  # whoever runs the kit has installed test tools


def main() -> int:
    """Print what is wrong, or one line when nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    problems = [*undeclared(root / "pyproject.toml"), *unresolved(root)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"runtime dependencies: exactly {', '.join(sorted(CORE))}")
    return int(bool(problems))


def undeclared(pyproject: Path) -> Iterator[str]:
    """Differences between the declared dependencies and the list above."""
    requirements = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    declared = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    yield from (f"pyproject.toml: {name} is no core dependency" for name in sorted(declared - CORE))
    yield from (f"pyproject.toml: {name} is not declared" for name in sorted(CORE - declared))


def unresolved(root: Path) -> Iterator[str]:
    """Imports that an installation of the core alone could not satisfy."""
    known = CORE | OURS | sys.stdlib_module_names
    for path in sorted((root / "src").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        if where.startswith(KIT):
            continue
        allowed = known | {"psycopg"} if where == POSTGRES else known
        for line, name in imports(path):
            if name not in allowed:
                yield f"{where}:{line}: {name} is neither standard library nor a core dependency"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the top-level name of each absolute import, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.split(".")[0]) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.split(".")[0]
            case _:
                continue


if __name__ == "__main__":
    sys.exit(main())
