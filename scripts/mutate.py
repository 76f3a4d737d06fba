"""Show that each decisive line is guarded: revert it in a copy of the tree, and the test that names it must go red.

scripts/mutations.toml names the lines. For each of them, in a copy of its own: the line is replaced, the mutant
compiles, the test under ``kills`` fails by assertion (a crash would prove only that something broke), and its
positive ``twin`` still passes (a mutant that refuses everything proves nothing). A name without a parameter id
stands for all its cases: one case must fail, every twin must pass. The cases on SQLite are tried first, because they
need no server; where these do not settle it, all cases are. The working tree is never touched.

pytest loads this file as a plugin in each copy, to learn which exception a test failed with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

MUTATIONS = Path("scripts/mutations.toml")
RUN_LIMIT_SECONDS = 600
REPORT = "MUTATE_REPORT"  # the environment variable that tells the plugin where to write
WITHOUT_SERVER = ("-k", "not postgresql")
PASSED, SKIPPED, ASSERTION = "passed", "skipped", "failed by assertion"


@dataclass(frozen=True)
class Mutation:
    """One decisive line, what it becomes, the test that must notice, and the one that must not."""

    file: str
    line: str
    becomes: str
    kills: str
    twin: str
    why: str = ""

    def mentions(self, text: str) -> bool:
        """Whether ``--only TEXT`` means this one."""
        return any(text in field for field in (self.file, self.line, self.kills, self.twin))

    def applied_to(self, tree: Path) -> str:
        """The text of the mutant."""
        return (tree / self.file).read_text(encoding="utf-8").replace(self.line, self.becomes)


def main() -> int:
    """Run, or with ``--check`` only look. 0 when nothing survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many copies run at once")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="the entries whose file, line or tests hold it")
    parser.add_argument("--check", action="store_true", help="run nothing: see that each line and each test exists")
    arguments = parser.parse_args()
    mutations = [entry for entry in load(arguments.root / MUTATIONS) if entry.mentions(arguments.only)]
    if not mutations:
        print(f"mutations: none {f'mentions {arguments.only!r}' if arguments.only else 'is named yet'}")
        return int(bool(arguments.only))
    problems = [*misplaced(arguments.root, mutations), *uncollected(arguments.root, tests_of(mutations))]
    if not problems and not arguments.check:
        problems = baseline(arguments.root, tests_of(mutations), arguments.jobs)
    for problem in problems:
        print(problem)
    if problems or arguments.check:
        print(f"mutations: {len(mutations)} named, {len(problems)} problems")
        return int(bool(problems))
    return run_all(arguments.root, mutations, arguments.jobs)


def load(path: Path) -> list[Mutation]:
    """Read the entries; an unknown or missing key ends the run."""
    try:
        return [Mutation(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", [])]
    except TypeError as error:
        sys.exit(f"{path}: {error}")


def tests_of(mutations: Iterable[Mutation]) -> list[str]:
    """Every test that an entry names, once."""
    return sorted({test for entry in mutations for test in (entry.kills, entry.twin)})


def misplaced(root: Path, mutations: Iterable[Mutation]) -> Iterator[str]:
    """Entries whose line is not in its file exactly once, or whose mutant would not compile."""
    for entry in mutations:
        path = root / entry.file
        times = path.read_text(encoding="utf-8").count(entry.line) if path.is_file() else 0
        if times != 1:
            yield f"{entry.file}: {times} times instead of once: {entry.line!r}"
        elif path.suffix == ".py":
            try:
                compile(entry.applied_to(root), entry.file, "exec")
            except SyntaxError as error:
                yield f"{entry.file}: the mutant does not compile ({error}): {entry.becomes!r}"


def uncollected(root: Path, tests: list[str]) -> list[str]:
    """What pytest says about names that it cannot find."""
    found = run_pytest(root, ["--collect-only", "--quiet", *tests])
    return [] if found.returncode == 0 else [found.stdout + found.stderr]


def baseline(root: Path, tests: list[str], jobs: int) -> list[str]:
    """Tests that do not even pass without a mutation; each file of them in a copy of its own."""

    def run_file(named: list[str]) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as box:
            return judged(copied(root, Path(box) / "tree"), named)

    files = [list(named) for _, named in groupby(tests, key=lambda test: test.partition("::")[0])]
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = dict(ChainMap(*pool.map(run_file, files)))
    return [f"{test}: without any mutation it {fault}" for test in tests if (fault := unpassed(test, verdicts))]


def run_all(root: Path, mutations: list[Mutation], jobs: int) -> int:
    """Run each mutation in a copy of its own and print a line as each one ends."""
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        for entry, (fault, seconds) in zip(mutations, pool.map(lambda entry: run(root, entry), mutations), strict=True):
            number = (root / entry.file).read_text(encoding="utf-8").partition(entry.line)[0].count("\n") + 1
            print(f"{'SURVIVED' if fault else 'killed':<9} {seconds:5.1f} s  {entry.file}:{number}  {entry.kills}")
            if fault:
                survivors += 1
                print(f"  line     {entry.line.strip()}\n  becomes  {entry.becomes.strip()}\n  but      {fault}")
    print(f"mutations: {len(mutations) - survivors} killed, {survivors} survived")
    return int(bool(survivors))


def run(root: Path, entry: Mutation) -> tuple[str, float]:
    """Try one mutant. Answers what went wrong, empty when it was killed as it should be, and how long it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as box:
        tree = copied(root, Path(box) / "tree")
        (tree / entry.file).write_text(entry.applied_to(root), encoding="utf-8")
        fault = tried(tree, entry, *WITHOUT_SERVER) and tried(tree, entry)
    return fault, time.monotonic() - start


def tried(tree: Path, entry: Mutation, *options: str) -> str:
    """What went wrong with a mutant, empty when its test failed by assertion and its twin passed."""
    verdicts = judged(tree, [*options, entry.kills, entry.twin])
    killed = cases_of(entry.kills, verdicts)
    if ASSERTION not in killed:
        return f"{entry.kills} {describe(killed)}"
    fault = unpassed(entry.twin, verdicts)
    return f"its twin {entry.twin} {fault}" if fault else ""


def unpassed(test: str, verdicts: dict[str, str]) -> str:
    """How a test ended, if not every case of it passed or was skipped, and at least one passed."""
    cases = cases_of(test, verdicts)
    return "" if PASSED in cases and cases <= {PASSED, SKIPPED} else describe(cases)


def copied(root: Path, tree: Path) -> Path:
    """Copy what git tracks, or would track, to a new folder."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)
    return tree


def judged(tree: Path, arguments: list[str]) -> dict[str, str]:
    """Run tests in a copy. Node id -> verdict; empty when pytest did not come that far."""
    report = tree.parent / "report.json"
    report.unlink(missing_ok=True)
    try:
        run_pytest(tree, ["--quiet", "-p", "mutate", *arguments], report)
    except subprocess.TimeoutExpired:
        return {}
    return json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}


def run_pytest(tree: Path, arguments: list[str], report: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest on a tree, with that tree's own packages before whatever is installed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(tree / "src"), str(Path(__file__).resolve().parent)])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--basetemp={tree.parent / 'basetemp'}",
            *arguments,
        ],
        cwd=tree,
        env=inherited | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", REPORT: str(report or "")},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_SECONDS,
        check=False,
    )


def cases_of(test: str, verdicts: dict[str, str]) -> set[str]:
    """The verdicts of a test: its own, or those of all its parametrised cases."""
    return {verdict for case, verdict in verdicts.items() if case == test or case.startswith(f"{test}[")}


def describe(cases: set[str]) -> str:
    """Verdicts as the end of a sentence."""
    return " and ".join(sorted(cases)) or "did not run"


class Verdicts:
    """The plugin's memory of one pytest run."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self.of: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Remember how a test ended; whatever goes wrong outside its own body is no assertion of it."""
        report = yield
        if report.skipped:
            self.of[item.nodeid] = SKIPPED
        elif report.passed:
            self.of.setdefault(item.nodeid, PASSED)
        elif report.when == "call" and call.excinfo and asserted(call.excinfo.value):
            self.of[item.nodeid] = ASSERTION
        elif self.of.get(item.nodeid) != ASSERTION:  # a fixture may well break down after a test that failed
            cause = call.excinfo.typename if call.excinfo else "no exception"
            self.of[item.nodeid] = f"failed with {cause} in {report.when}"
        return report

    def pytest_sessionfinish(self) -> None:
        """Hand the verdicts over."""
        self.report.write_text(json.dumps(self.of), encoding="utf-8")


def asserted(error: BaseException) -> bool:
    """Whether a test failed because what it claims did not hold, and not because something else broke."""
    if isinstance(error, BaseExceptionGroup):
        return all(asserted(inner) for inner in error.exceptions)
    expected_a_refusal = isinstance(error, pytest.fail.Exception) and str(error).startswith("DID NOT RAISE")
    return isinstance(error, AssertionError) or expected_a_refusal


def pytest_configure(config: pytest.Config) -> None:
    """Start remembering, after making sure that the tests will meet this copy and not what is installed."""
    for package in (config.rootpath / "src").iterdir():
        found = importlib.util.find_spec(package.name)
        places = list(found.submodule_search_locations or ()) if found else []
        if not places or not Path(places[0]).samefile(package):
            pytest.exit(f"{package.name} would come from {places}, not from this copy", returncode=4)
    config.pluginmanager.register(Verdicts(Path(os.environ[REPORT])))


if __name__ == "__main__":
    sys.exit(main())
