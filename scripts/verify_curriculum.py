"""Hold the documents to the tree: what they point at exists, and the course's program starts.

Checked in README.md, CONTRIBUTING.md, docs/ and book/: each path in backticks that begins with a folder of this
project, each relative link, and the tests named as ``tests/file.py::name``; and that Chapter 6's program prints its
help. Whether a sentence is true is for its reader and for the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAPTER = Path("book/ch06_the_organization_recovers/solution.py")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"`((?:src|tests|scripts|docs|book|benchmarks|\.ci)/[^`\s]*)`")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)[^)]*\)")


def main() -> int:
    """Print what is missing, or one line when nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    documents = [
        path
        for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "book/**/*.md")
        for path in sorted(root.glob(pattern))
    ]
    problems = [*(problem for document in documents for problem in missing(root, document)), *chapter(root)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"curriculum: {len(documents)} documents point at what exists, and {CHAPTER.as_posix()} starts")
    return int(bool(problems))


def missing(root: Path, document: Path) -> Iterator[str]:
    """What one document names and the tree does not have."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    where = document.relative_to(root).as_posix()
    for name in NAMED.findall(text):
        pattern, _, test = name.partition("::")
        found = sorted(root.glob(pattern.rstrip("/")))
        if not found:
            yield f"{where}: {name} does not exist"
        elif test and f"def {test.partition('[')[0]}(" not in found[0].read_text(encoding="utf-8"):
            yield f"{where}: {name} names a test that does not exist"
    for link in LINK.findall(text):
        if not (document.parent / link).exists():
            yield f"{where}: the link {link} leads nowhere"


def chapter(root: Path) -> Iterator[str]:
    """Whether Chapter 6's program is there and prints its help."""
    if not (root / CHAPTER).is_file():
        yield f"{CHAPTER.as_posix()} does not exist"
        return
    help_page = subprocess.run(
        [sys.executable, str(root / CHAPTER), "--help"],
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if help_page.returncode != 0 or "usage" not in help_page.stdout.lower():
        yield f"{CHAPTER.as_posix()} --help exits {help_page.returncode} and prints no usage"


if __name__ == "__main__":
    sys.exit(main())
