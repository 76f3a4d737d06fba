"""A learner's machine: an environment without this repository, an empty folder, and a fresh kernel for one notebook.

Nothing of the tree can be imported there, so what runs is what the notebook brings with it. No key and no setting of
ours is in its environment, and its kernel speaks over a socket file in its own folder. Whatever still runs when the
kernel has ended is ended, and told.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import psutil
from expectation import matches
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from build_notebooks import Notebook

INSTALL_SECONDS = 300
MINORS = range(11, 15)  # of Python 3: what pyproject.toml declares
MAKE_VENV = Path(__file__).with_name("make_venv")
MANAGED = (".pyenv/versions/*/bin", ".local/share/uv/python/*/bin")  # where version managers keep interpreters
PIN = re.compile(r"^[\w.-]+==[^\\\n]+", re.MULTILINE)
REQUIRED = re.compile(r"^REQUIRED = (.*)$", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ENDS_IN = {"student": "NEEDS_WORK", "instructor": "PASS"}


@dataclass(frozen=True)
class Environment:
    """An interpreter with what a learner has installed."""

    python: Path
    release: str


# -- environments


def environment_here(folder: Path) -> Environment:
    """This interpreter and the packages that it has, but not what an editable install adds to them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=INSTALL_SECONDS)
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages = sysconfig.get_path("purelib")  # taken as a plain folder, in which no .pth file counts
    (site / "packages.pth").write_text(f"{packages}\n", encoding="utf-8")
    return without_repository(folder / "bin" / "python")


def environments(folder: Path, root: Path, notebooks: list[Notebook]) -> Iterator[Environment]:
    """One for each release of Python that is found, with Jupyter's kernel and what the set-up cells ask for."""
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(PIN.findall((root / "constraints.txt").read_text(encoding="utf-8"))))
    packages = sorted({package for notebook in notebooks for package in asked_for(notebook)})
    for minor in MINORS:
        place = folder / f"python3.{minor}"
        if any(succeeds(MAKE_VENV, place, python) for python in interpreters(minor)):
            python = place / "bin" / "python"
            install = ["-m", "pip", "install", "--quiet", "--constraint", constraints, "ipykernel", *packages]
            done = subprocess.run(
                [python, *install], capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
            )
            if done.returncode != 0:
                sys.exit(f"{done.stderr}Nothing ran: pip could not install {', '.join(packages)} for Python 3.{minor}.")
            yield without_repository(python)


def interpreters(minor: int) -> Iterator[str]:
    """This one, and whatever is called python3.minor on PATH or where version managers keep it: not each will run."""
    if minor == sys.version_info.minor:
        yield sys.executable
    managed = [str(place) for pattern in MANAGED for place in sorted(Path.home().glob(pattern))]
    for place in [*os.environ.get("PATH", "").split(os.pathsep), *managed]:
        if found := shutil.which(f"python3.{minor}", path=place):
            yield found


def succeeds(*command: str | Path) -> bool:
    """Whether a command ends with 0."""
    return subprocess.run(command, capture_output=True, check=False, timeout=INSTALL_SECONDS).returncode == 0


def asked_for(notebook: Notebook) -> list[str]:
    """What the notebook's set-up cell tells its reader to install."""
    found = REQUIRED.search(next((cell.source for cell in notebook.cells if "setup" in cell.tags), ""))
    return [f"{name}=={tested}" for name, (_, tested) in json.loads(found[1]).items()] if found else []


def without_repository(python: Path) -> Environment:
    """The environment, if really nothing of ours can be imported in it."""
    look = "import platform; from importlib.util import find_spec; print(find_spec('sovereign_agent') is None)"
    absent, release = subprocess.check_output(
        [python, "-I", "-c", f"{look}; print(platform.python_version())"], text=True, cwd="/"
    ).split()
    if absent != "True":
        raise RuntimeError(f"{python} finds sovereign_agent: a notebook there would not run what it brings with it")
    return Environment(python, release)


# -- one notebook


def attend(notebook: Notebook, environment: Environment, root: Path, cell_seconds: int) -> list[str]:
    """Run a notebook from top to bottom, as on a learner's first day: what is not as its chapter says."""
    name = f"{notebook.path.relative_to(root).as_posix()} on Python {environment.release}"
    with tempfile.TemporaryDirectory(prefix="learner-") as box:
        nodes = nbformat.reads(notebook.text, as_version=4)
        problems = run(notebook, nodes, environment, Path(box), cell_seconds)
        problems += [f"left running: {command}" for command in end_all(box)]
    printed = [
        "".join(output.text for output in node.get("outputs", ()) if output.get("name") == "stdout")
        for node in nodes.cells
    ]
    if not problems:
        problems = [*unexpected(notebook, printed), *misjudged(notebook, "".join(printed))]
    return [f"{name}: {problem}" for problem in problems]


def run(
    notebook: Notebook, nodes: nbformat.NotebookNode, environment: Environment, box: Path, cell_seconds: int
) -> list[str]:
    """Execute the cells in a kernel of their own; what stopped it."""
    for folder in ("home", "tmp", "work", "kernels/python3"):
        (box / folder).mkdir(parents=True)
    launch = [str(environment.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    specification = {"argv": launch, "display_name": "Python 3", "language": "python"}
    (box / "kernels/python3/kernel.json").write_text(json.dumps(specification), encoding="utf-8")
    at = 0

    def enter(cell_index: int, **_: nbformat.NotebookNode) -> None:
        nonlocal at
        at = cell_index

    client = NotebookClient(
        nodes,
        config=Config(
            KernelManager={"transport": "ipc", "connection_file": str(box / "kernel.json")},
            KernelSpecManager={"kernel_dirs": [str(box / "kernels")], "ensure_native_kernel": False},
        ),
        timeout=cell_seconds,
        on_cell_start=enter,
        resources={"metadata": {"path": str(box / "work")}},
    )
    path = os.pathsep.join([str(environment.python.parent), os.environ.get("PATH", os.defpath)])
    settings = {"HOME": str(box / "home"), "TMPDIR": str(box / "tmp"), "PATH": path, "LANG": "C.UTF-8"}
    with (box / "kernel.log").open("w+", encoding="utf-8") as log:
        try:
            client.execute(env=settings, stdout=subprocess.DEVNULL, stderr=log)
        except CellTimeoutError:
            return [f"{where(notebook, at)} did not end within {cell_seconds} seconds"]
        except CellExecutionError as error:
            trace = COLOUR.sub("", error.traceback).splitlines()
            return [indented(f"{where(notebook, at)} raised {error.ename}: {error.evalue}", trace[-15:])]
        except DeadKernelError:
            log.seek(0)
            return [indented(f"the kernel died in {where(notebook, at)}", log.read().splitlines()[-15:])]
    return []


def end_all(box: str) -> list[str]:
    """End every process that knows this folder, and name it."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(box in trace for trace in traces(process)):
                left.append(" ".join(process.cmdline()))
                process.kill()
    return left


def traces(process: psutil.Process) -> Iterator[str]:
    """Where a process stands, its words, its environment: as far as it shows them."""
    for asked in (lambda: [process.cwd()], process.cmdline, lambda: process.environ().values()):
        with suppress(psutil.Error, OSError):  # the second: a process may stand deeper than a path is long
            yield from asked()


# -- what was printed


def unexpected(notebook: Notebook, printed: list[str]) -> Iterator[str]:
    """Each cell that did not print what stands under it."""
    for at, cell in enumerate(notebook.cells[1:]):
        if cell.expected is not None and not matches(cell.expected, printed[at]):
            shown = ["expected", *indents(cell.expected), "printed", *indents(printed[at])]
            yield indented(f"{where(notebook, at)} printed something else", shown)


def misjudged(notebook: Notebook, printed: str) -> Iterator[str]:
    """A student's edition that does not end as unfinished, or an instructor's that does not pass."""
    if (status := ENDS_IN.get(notebook.edition)) is None:
        return
    reports = re.findall(r"^COURSE_REPORT=(.*)$", printed, re.MULTILINE)
    if not re.search(r"^EXERCISE_REPORT=", printed, re.MULTILINE) or not reports:
        yield "prints no EXERCISE_REPORT= or no COURSE_REPORT="
    elif json.loads(reports[-1]).get("status") != status:
        yield f"ends in {reports[-1]} and not in the status {status}"


def where(notebook: Notebook, at: int) -> str:
    """A cell, by its number and its line in the source."""
    return f"cell {at + 1} ({notebook.cells[at].place})"


def indents(text: str) -> list[str]:
    """The lines of a text, further in."""
    return [f"  {line}" for line in text.rstrip().splitlines()]


def indented(head: str, lines: list[str]) -> str:
    """A problem, and what shows it below."""
    return "\n    ".join([head, *lines])
