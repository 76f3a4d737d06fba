"""Hold the documents to the tree, and the course's notebooks to what their chapters say.

    verify_curriculum.py             both
    verify_curriculum.py documents   README.md, CONTRIBUTING.md, docs/ and book/: each path in backticks that begins
                                     with a folder of this project exists, each relative link leads to a file and to
                                     a heading in it, and the tests named as ``tests/file.py::name`` are there
    verify_curriculum.py notebooks   each notebook runs from top to bottom in a fresh kernel, on every Python from
                                     3.11 that is found, where only its own set-up cell can bring our code; each cell
                                     prints what its chapter shows; a student's edition ends in NEEDS_WORK, an
                                     instructor's in PASS. Under CI=true a Python from 3.12 on must be found

Whether a sentence is true is for its reader and for the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "book/**/*.md")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"`((?:src|tests|scripts|docs|book|benchmarks|\.ci)/[^`\s]*)`")
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?[^)]*\)")
HEADING = re.compile(r"^#{1,6} +(.*?)[ #]*$", re.MULTILINE)
ANCHOR = re.compile(r'<a (?:id|name)="([^"]+)"')


def main() -> int:
    """Print what is wrong, or a line for each part when nothing is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["documents", "notebooks"])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--here", action="store_true", help="install nothing: this Python alone, with what it has")
    parser.add_argument("--only", default="", metavar="TEXT", help="the notebooks whose path holds it")
    parser.add_argument("--cell-seconds", type=int, default=120, metavar="N", help="how long a cell may take")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    problems: list[str] = []
    if arguments.part != "notebooks":
        problems += verify_documents(root)
    if arguments.part != "documents":
        problems += verify_notebooks(root, arguments.only, arguments.cell_seconds, here=arguments.here)
    for problem in problems:
        print(problem)
    return int(bool(problems))


# -- documents


def verify_documents(root: Path) -> list[str]:
    """What the documents name and the tree does not have."""
    documents = [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]
    problems = [problem for document in documents for problem in missing(root, document)]
    if not problems:
        print(f"documents: {len(documents)} point at what exists")
    return problems


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
    for link, anchor in LINK.findall(text):
        target = document.parent / link if link else document
        if not target.exists():
            yield f"{where}: the link {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor[1:] not in anchors(target):
            yield f"{where}: the link {link}{anchor} leads to no heading"


def anchors(document: Path) -> set[str]:
    """The names under which a document's places can be linked to, as the usual viewers make them of its headings."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    names: Counter[str] = Counter()
    found = {*ANCHOR.findall(text)}
    for heading in HEADING.findall(text):
        name = re.sub(r"[^\w\- ]", "", LINK.sub("]", heading).lower()).replace(" ", "-")
        found.add(f"{name}-{names[name]}" if names[name] else name)
        names[name] += 1
    return found


# -- notebooks


def verify_notebooks(root: Path, only: str, cell_seconds: int, *, here: bool) -> list[str]:
    """Run each notebook that the chapters give, on each Python."""
    import build_notebooks  # noqa: PLC0415 - the documents can be held to the tree without Jupyter
    import learner  # noqa: PLC0415

    try:
        built = build_notebooks.build(root)
    except build_notebooks.BookError as error:
        return [str(error)]
    notebooks = [notebook for notebook in built if only in notebook.path.relative_to(root).as_posix()]
    if not notebooks:
        return [f"no notebook's path holds {only!r}"] if only else []
    with tempfile.TemporaryDirectory(prefix="learners-") as box, ThreadPoolExecutor(os.cpu_count()) as pool:
        place = Path(box)
        found = [learner.environment_here(place)] if here else [*learner.environments(place, root, notebooks)]
        visits = [(notebook, environment) for environment in found for notebook in notebooks]
        problems = [*pool.map(lambda visit: learner.attend(*visit, root, cell_seconds), visits)]
    releases = [environment.release for environment in found]
    print(f"notebooks: {len(notebooks)} ran on Python {', '.join(releases)}")
    if not here and all(release.startswith("3.11.") for release in releases):
        absent = "notebooks: no Python from 3.12 on was found: on it nothing ran"
        if os.environ.get("CI") == "true":
            return [absent, *chain.from_iterable(problems)]
        print(absent)
    return [*chain.from_iterable(problems)]


if __name__ == "__main__":
    sys.exit(main())
