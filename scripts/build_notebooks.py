"""Build the course's notebooks from its chapters, or with ``--check`` compare them with what is committed.

A source is a Markdown file below book/ whose front matter says ``course:``. It is Jupytext's Markdown, so that each
fence in ``python`` is a code cell, with its tags on the fence's line; and four things more:

    <!-- include: FILE -->   stands for the text of that file, whose name is relative to this one
    <!-- setup -->           becomes the set-up cell: scripts/notebook_setup.py, with the teaching files in it
    ```text expected         right after a code cell: what it prints; ``...`` stands for anything
    ![words](figure.svg)     alone in its paragraph: becomes a cell that shows the figure

The front matter:

    course:
      work: ch13-b                     the folder of the learner's work
      editions: [student, instructor]  NAME.md becomes NAME_student.ipynb and NAME_instructor.ipynb; a cell that is
                                       tagged with an edition is in that one alone. Without: one notebook.ipynb
      minutes: 90
      files: [tests/fixtures/x.py]     teaching files beside book/always_on; patterns are allowed

Of src/ the set-up cell holds what the cells and the teaching files import, directly or not. A notebook is a function
of the tree: no outputs, no times, and names of cells that follow from their text.
"""

from __future__ import annotations

import argparse
import ast
import base64
import difflib
import hashlib
import json
import re
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from os.path import normpath
from pathlib import Path
from typing import Any

import grimp
import jupytext
import nbformat
import yaml

EDITIONS = ("student", "instructor")
PACKAGES = ("sovereign_agent", "reference_organizations")
KIT = "sovereign_agent.testing"  # large, and only the verbs that simulate and torture ask for it
HARNESS = "book/always_on/**/*.py"
SETUP = Path(__file__).with_name("notebook_setup.py")
PAYLOAD = re.compile(r'(?<=^PAYLOAD = """\n).*?(?=^""")', re.DOTALL | re.MULTILINE)
MAGIC = re.compile(r"^[%!].*", re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^<!-- (?:include: (?P<include>\S+)|(?P<setup>setup)) -->\n?", re.MULTILINE)
EXPECTED = re.compile(r"\A```text expected\n(.*?)^```\n*", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)\n?", re.MULTILINE)
LOCAL_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:)([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
SHOWN = "**What you should see**\n\n```text\n{}```"
COLLAPSED = {"cellView": "form", "jupyter": {"source_hidden": True}}


class BookError(Exception):
    """A source says something that no notebook can be built from: where, what, and what to write."""


@dataclass(frozen=True)
class Cell:
    """One cell, the place that it comes from, and what it must print (None: whatever it likes)."""

    kind: str
    source: str
    place: str
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    expected: str | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notebook:
    """One notebook as the sources give it."""

    path: Path
    source: Path
    edition: str
    cells: list[Cell]
    text: str


def main() -> int:
    """Write what is not up to date, or with ``--check`` print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--check", action="store_true", help="write nothing: say what differs from the sources")
    arguments = parser.parse_args()
    root: Path = arguments.root.resolve()
    try:
        notebooks = build(root)
    except BookError as error:
        print(error)
        return 1
    if arguments.check:
        problems = [*stale(root, notebooks)]
        print(*problems, sep="\n", end="\n" if problems else "")
        if not problems:
            print(f"notebooks: {len(notebooks)} are what their sources give")
        return int(bool(problems))
    for notebook in notebooks:
        if difference(notebook):
            notebook.path.write_text(notebook.text, encoding="utf-8", newline="\n")
        size = notebook.path.stat().st_size / 1024
        print(f"{notebook.path.relative_to(root).as_posix()}: {len(notebook.cells)} cells, {size:.0f} KiB")
    return 0


def build(root: Path) -> list[Notebook]:
    """Every notebook of the book."""
    sys.path.insert(0, str(root / "src"))  # where grimp looks
    try:
        return [notebook for path in sorted(root.glob("book/*/*.md")) for notebook in editions(root, path)]
    finally:
        sys.path.remove(str(root / "src"))


def editions(root: Path, path: Path) -> Iterator[Notebook]:
    """The notebooks of one file: none, if its front matter does not say ``course:``."""
    course = front_matter(root, path).get("course")
    if course is None:
        return
    cells = list(parts(root, path))
    for edition in course.get("editions", [""]):
        chosen = [cell for cell in cells if edition in (marks(cell) or {edition})]
        chosen = [setup(root, course, chosen) if "setup" in cell.tags else cell for cell in chosen]
        target = path.with_name(f"{path.stem}_{edition}.ipynb") if edition else path.with_name("notebook.ipynb")
        about = {"edition": edition, "minutes": course.get("minutes"), "source": path.name, "work": course["work"]}
        yield Notebook(target, path, edition, chosen, written(chosen, about))


def marks(cell: Cell) -> set[str]:
    """The editions that a cell is tagged with."""
    return {*cell.tags} & {*EDITIONS}


# -- from Markdown to cells


def front_matter(root: Path, path: Path) -> dict[str, Any]:
    """What stands between the two first lines of ``---``."""
    found = FRONT_MATTER.match(path.read_text(encoding="utf-8"))
    try:
        head = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError as error:
        raise BookError(f"{path.relative_to(root)}: the front matter is no YAML: {error}") from None
    if isinstance(head, dict) and "course" in head and "work" not in (head["course"] or {}):
        raise BookError(f"{path.relative_to(root)}: course: names no folder for the learner's work: write  work: NAME")
    return head if isinstance(head, dict) else {}


def parts(root: Path, path: Path) -> Iterator[Cell]:
    """The cells of one file and of those that it includes, in order."""
    name = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    head = FRONT_MATTER.match(text)
    begin = head.end() if head else 0
    for directive in [*DIRECTIVE.finditer(text, begin), None]:
        end = directive.start() if directive else len(text)
        yield from stretch(name, text, begin, end)
        if directive is None:
            return
        begin = directive.end()
        place = f"{name}:{line_of(text, directive.start())}"
        if directive["setup"]:
            yield Cell("code", "", place, ("setup",), COLLAPSED)
            continue
        included = (path.parent / directive["include"]).resolve()
        if not included.is_file() or not included.is_relative_to(root):
            raise BookError(f"{place}: includes {directive['include']}, which does not exist")
        yield from parts(root, included)


def line_of(text: str, position: int) -> int:
    """The number of the line that a position is on."""
    return text.count("\n", 0, position) + 1


def stretch(name: str, text: str, begin: int, end: int) -> Iterator[Cell]:
    """The cells of a stretch of text without directives."""
    code: Cell | None = None  # whose output an expectation would be about
    for node in jupytext.reads(text[begin:end], fmt="md").cells:
        if not node.source:
            continue
        at = text.find(node.source, begin, end)
        opening = text[:at].splitlines()[-1] if at > 0 else ""
        if at < 0 or (node.cell_type == "code" and not opening.startswith("```python")):
            raise BookError(
                f"{name}:{line_of(text, max(begin, at))}: Jupyter would run a fence below that is no Python: write"
                f" .noeval after its language, or take a language like text or console: {node.source.splitlines()[0]!r}"
            )
        begin = at + len(node.source)
        place = f"{name}:{line_of(text, at)}"
        tags = tuple(node.metadata.pop("tags", ()))
        if node.cell_type == "code":
            code = Cell("code", node.source, place, tags, dict(node.metadata))
            yield code
            continue
        if (expected := EXPECTED.match(node.source + "\n")) and code:
            yield Cell("markdown", SHOWN.format(expected[1]), place, (*code.tags, "expected"), expected=expected[1])
            node.source = node.source[expected.end() :]
            place = f"{name}:{line_of(text, at + expected.end())}"
        code = None
        if (stray := node.source.find("```text expected")) >= 0:
            place = f"{name}:{line_of(text, text.index(node.source, at) + stray)}"
            raise BookError(f"{place}: an expectation stands right after the code cell whose output it is")
        yield from prose(name, Cell("markdown", node.source, place, tags, dict(node.metadata)))


def prose(name: str, cell: Cell) -> Iterator[Cell]:
    """A Markdown cell for whoever has the notebook alone: figures become cells, links into the tree become names."""
    words, *figures = FIGURE.split(cell.source)
    yield from [replace(cell, source=unlinked(name, words.strip("\n")))] if words.strip() else []
    for title, link, after in zip(figures[::3], figures[1::3], figures[2::3], strict=True):
        figure = (Path(name).parent / link).as_posix()
        code = f"# @title Figure: {title}\nfrom IPython.display import SVG, display\n\n"
        code += f'display(SVG(filename=COURSE_ROOT / "{figure}"))'
        yield Cell("code", code, cell.place, (*cell.tags, "figure"), COLLAPSED, files=(figure,))
        yield from [replace(cell, source=unlinked(name, after.strip("\n")))] if after.strip() else []


def unlinked(name: str, words: str) -> str:
    """The same words, with the target's name in place of a link that only the repository could follow."""

    def named(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        return f"{link[1]} (`{normpath(Path(name).parent / target)}`)" if target else link[1]

    pieces = FENCE.split(words)
    pieces[::2] = [LOCAL_LINK.sub(named, piece) for piece in pieces[::2]]
    return "".join(pieces)


# -- the set-up cell


def setup(root: Path, course: dict[str, Any], cells: list[Cell]) -> Cell:
    """The set-up cell of a notebook with these cells, in the place of the one that is empty yet."""
    cell = next(cell for cell in cells if "setup" in cell.tags)
    paths = {root / name for cell in cells for name in cell.files} | {*root.glob(HARNESS)}
    for pattern in course.get("files", []):
        paths |= (found := {*root.glob(pattern)})
        if not found:
            raise BookError(f"{cell.place}: the front matter's files: name {pattern}, which does not exist")
    files, required = teaching_files(root, paths, cells)
    values = {
        "WORK": course["work"],
        "REQUIRED": required,
        "FILES": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()},
    }
    source = SETUP.read_text(encoding="utf-8").strip()
    for name, value in values.items():
        literal = f"{name} = {json.dumps(value, indent=4 if name == 'FILES' else None)}"
        source = re.sub(rf"^{name} = .*$", lambda _, literal=literal: literal, source, flags=re.MULTILINE)
    packed = base64.b85encode(zlib.compress(json.dumps(files, sort_keys=True).encode(), 9)).decode()
    lines = "".join(f"{packed[at : at + 116]}\n" for at in range(0, len(packed), 116))
    return replace(cell, source=PAYLOAD.sub(lambda _: lines, source))


def teaching_files(root: Path, paths: set[Path], cells: list[Cell]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """These files and what they and the cells need of src/, each with its text; and what must be installed for it."""
    programs = {path.as_posix(): path.read_text(encoding="utf-8") for path in paths if path.suffix == ".py"}
    programs |= {cell.place: MAGIC.sub("", cell.source) for cell in cells if cell.kind == "code"}
    names = {name for place, program in programs.items() for name in imported(place, program)}
    graph = grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    modules = closure(graph, names)
    for module in modules:
        stem = root / "src" / module.replace(".", "/")
        paths |= {path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()}
    paths |= {companion for path in paths if path.suffix == ".py" for companion in companions(path)}
    files = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
    return files, requirements(root, modules | names)


def imported(place: str, program: str) -> Iterator[str]:
    """Each name that a program imports, wherever in it."""
    try:
        tree = ast.parse(program)
    except SyntaxError as error:
        raise BookError(f"{place}: its line {error.lineno} is no Python: {error.msg}") from None
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (module, *(f"{module}.{alias.name}" for alias in names))
            case _:
                continue


def companions(path: Path) -> Iterator[Path]:
    """What a module names in quotes and has beside it: a file that it reads or runs, or a folder of them."""
    for name in re.findall(r'"(\w[\w.-]*)"', path.read_text(encoding="utf-8")):
        beside = path.parent / name
        if beside.is_file():
            yield beside
        elif beside.is_dir() and name != "__pycache__" and not (beside / "__init__.py").exists():
            yield from (file for file in beside.iterdir() if file.is_file())


def closure(graph: grimp.ImportGraph, names: set[str]) -> set[str]:
    """These modules, the packages that they are in, and whatever is imported on their way, but for the kit."""
    found: set[str] = set()
    pending = {name for name in names if name in graph.modules}
    while pending:
        module = pending.pop()
        found.add(module)
        imported_here = {*graph.find_modules_directly_imported_by(module), module.rpartition(".")[0]} - {""}
        pending |= {name for name in imported_here - found if not name.startswith(KIT)}
    return found


def requirements(root: Path, modules: set[str]) -> dict[str, list[str]]:
    """For each dependency of the core among the modules: the least release, and the one that the tests run with."""
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    pinned = dict(
        re.findall(r"^([\w.-]+)==([\w.]+)", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    least = dict(requirement.split(">=") for requirement in declared)
    return {name: [least[name], pinned[name]] for name in sorted(modules & least.keys())}


# -- from cells to a file


def written(cells: list[Cell], about: dict[str, Any]) -> str:
    """The notebook's text. A cell's id follows from its source, and from how often that occurred before."""
    seen: Counter[str] = Counter()
    nodes = []
    for cell in cells:
        digest = hashlib.sha256(f"{cell.kind}\n{PAYLOAD.sub('', cell.source)}".encode()).hexdigest()[:12]
        seen[digest] += 1
        make = nbformat.v4.new_code_cell if cell.kind == "code" else nbformat.v4.new_markdown_cell
        metadata = cell.metadata | ({"tags": [*cell.tags]} if cell.tags else {})
        nodes.append(make(cell.source, metadata=metadata, id=f"{digest}-{seen[digest]}"))
    metadata = {
        "colab": {"provenance": []},
        "course": about,
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook = nbformat.v4.new_notebook(cells=nodes, metadata=metadata)
    notebook.nbformat_minor = 5
    return f"{nbformat.writes(notebook).rstrip()}\n"


def stale(root: Path, notebooks: list[Notebook]) -> Iterator[str]:
    """What is committed and is not what the sources give."""
    for notebook in notebooks:
        if found := difference(notebook):
            yield f"{notebook.path.relative_to(root).as_posix()}: {found}\n  next   make book, and commit it"
    for path in sorted({*root.glob("book/**/*.ipynb")} - {notebook.path for notebook in notebooks}):
        yield f"{path.relative_to(root).as_posix()}: no chapter gives it\n  next   remove it"


def difference(notebook: Notebook) -> str:
    """How the file differs from the notebook; empty when it does not."""
    if not notebook.path.is_file():
        return "does not exist"
    try:
        have = opened(notebook.path.read_text(encoding="utf-8"))
    except (ValueError, AttributeError, nbformat.ValidationError):
        return "is no notebook"
    want = opened(notebook.text)
    if have == want:
        return ""
    pairs = enumerate(zip_longest([cell.source for cell in have.cells], [cell.source for cell in want.cells]))
    at, (old, new) = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (-1, ("", "")))
    if at < 0:
        return f"has outputs or metadata that {notebook.source.name} does not give"
    lines = difflib.unified_diff(
        (old or "").splitlines(), (new or "").splitlines(), "committed", "built", "", "", 0, ""
    )
    place = notebook.cells[at].place if new is not None else f"{notebook.source.name}, which has no such cell,"
    return "\n    ".join([f"cell {at + 1} is not what {place} gives", *(line[:110] for line in islice(lines, 12))])


def opened(text: str) -> nbformat.NotebookNode:
    """A notebook with its payload unpacked: two releases of zlib may pack the same files differently."""
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        cell.source = PAYLOAD.sub(lambda packed: unpacked(packed[0]), cell.source)
    return notebook


def unpacked(packed: str) -> str:
    """The teaching files' text, or the same when it is not packed as we pack it."""
    try:
        return zlib.decompress(base64.b85decode("".join(packed.split()))).decode()
    except (ValueError, zlib.error):
        return packed


if __name__ == "__main__":
    sys.exit(main())
