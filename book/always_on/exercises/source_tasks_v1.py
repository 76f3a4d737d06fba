"""The exercises of the course: a private copy of the runtime in which one function is the learner's.

    with SourceTask(ROOT, 10) as task:
        task.install(source)                  replaces the declared function, and nothing else
        result = task.visible("FIRST TRY")    runs the chapter's probe: {"status": "PASS" | "NEEDS_WORK", ...}
        task.save(path, result)               keeps what passed

It is not a sandbox of the operating system. What it guards against is mistakes, and a PASS that nobody earned: the
learner's code runs in a process of its own, under limits of time, memory and output; its printed text and its
inherited descriptors reach no report; what counts are the durable rows, which another process counts with the original
code, and whose report comes over a private pipe under a nonce that the learner's process is never given. A program of
the same user that attacks that other process can still lie.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

EXERCISES = "book/always_on/exercises"
PACKAGE = "src/sovereign_agent"
RUNNER = f"{EXERCISES}/lesson_runner_v1.py"
MODULES = (
    *("__init__", "agent_loop", "assistant_service", "assistant_work", "clock", "configuration", "conversation"),
    *("database", "effects", "errors", "fencing", "heartbeat", "journal", "outcomes", "records", "relay"),
    *("storage/__init__", "storage/authority", "storage/engine", "storage/migrate", "storage/sqlite"),
    *("storage/sqlite_backup", "storage/sqlite_reader", "tool_dispatch"),
)
"""What of the package the probes import."""

SCHEMA = "sovereign-agent/handoff/v1"
SECONDS = 10
MAX_SOURCE_CHARACTERS = 100_000
MAX_HANDOFF_BYTES = 1_000_000
MAX_OUTPUT_BYTES = 65_536

REPLACED = "runtime paused or replaced by restore"
SUPERSEDED = "worker claim expired or superseded"
UNAVAILABLE = "authority marker is unavailable"


def _seen(answer: str, rows: int) -> dict[str, Any]:
    return {"answer": answer, "rows": rows}


LESSONS: dict[int, dict[str, Any]] = {
    10: {
        "chapter": 10,
        "function": "assert_current",
        "file": f"{PACKAGE}/assistant_work.py",
        "boundary": 'or claim.epoch != control["epoch"]',
        "injected": "or False",
        "probe": f"{EXERCISES}/lesson_10_visible.py",
        "expected": {
            "before": _seen("appended", 1),
            "after": _seen(REPLACED, 1),
            "lines": ["Vanilla: 2 tubs."],
        },
        "expected_broken": {
            "before": _seen("appended", 1),
            "after": _seen("appended", 2),
            "lines": ["Vanilla: 2 tubs.", "Strawberry: 1 tub."],
        },
        "transfer_probe": f"{EXERCISES}/lesson_10_transfer.py",
        "transfer_expected": {
            "first_claimant": _seen("appended", 1),
            "restored_and_paused": _seen(REPLACED, 1),
            "stale_epoch": _seen(REPLACED, 1),
            "fresh_claimant": _seen("appended", 2),
            "expired_lease": _seen(SUPERSEDED, 2),
            "changed_role": _seen(SUPERSEDED, 2),
            "changed_session": _seen(SUPERSEDED, 2),
            "changed_owner": _seen(SUPERSEDED, 2),
            "superseded_generation": _seen(SUPERSEDED, 2),
            "missing_marker": _seen(UNAVAILABLE, 2),
            "paused": _seen(REPLACED, 2),
            "delegated_child": _seen("appended", 3),
            "ended_delegation": _seen(SUPERSEDED, 3),
            "canceled_parent": _seen(SUPERSEDED, 3),
            "another_fresh_claimant": _seen("appended", 4),
        },
    }
}
"""The declared exercises, by the number of the reference lesson. In `spec`, the probes are their source text."""


class TaskRefused(ValueError):
    """The exercise did not do what it was asked to. The sentence says why, and what to do."""


def runtime_files(root: Path) -> list[str]:
    """What a scratch copy of the repository must hold for these exercises: paths below `root`, in order."""
    lessons = [lesson[probe] for lesson in LESSONS.values() for probe in ("probe", "transfer_probe")]
    schema = [f"{PACKAGE}/storage/schema/{file.name}" for file in (root / PACKAGE / "storage/schema").glob("*.sql")]
    modules = [f"{PACKAGE}/{module}.py" for module in MODULES]
    return sorted([f"{EXERCISES}/source_tasks_v1.py", RUNNER, *lessons, *schema, *modules])


class RuntimeLab:
    """A private copy of the runtime, and the declared function's failure, injected and repaired.

    Attributes:
        spec: what is declared of this exercise: `chapter`, `function`, `file`, `boundary`, `injected`, `probe`,
            `expected`, `expected_broken`, `transfer_probe`, `transfer_expected`.
        fragment: the reference source of the declared function, as it stands in its file.
        source: the function's source as it is in the copy now.
        runtime_sha256: the hash of all copied files except for the function's own lines.

    Raises TaskRefused for a chapter that declares no exercise, and for files that are not there.
    """

    def __init__(self, root: Path | str, chapter: int) -> None:
        if chapter not in LESSONS:
            raise TaskRefused(f"There is no exercise {chapter}; there is {', '.join(map(str, LESSONS))}.")
        self._root = Path(root).resolve()
        self._names = runtime_files(self._root)
        self._files = self._read_originals()
        declared = LESSONS[chapter]
        probes = {name: self._files[declared[name]].decode() for name in ("probe", "transfer_probe")}
        self.spec: Mapping[str, Any] = MappingProxyType(declared | probes)
        text = self._files[self.spec["file"]].decode()
        self._before, self.fragment, self._after = _split(text, self.spec["function"])
        self.runtime_sha256 = self._hash_runtime()
        self.source = self.fragment
        self._unsound = ""
        self._around: tuple[str, str] | None = None
        self._scratch: Path | None = Path(tempfile.mkdtemp(prefix="course-task-"))

    def __enter__(self):  # noqa: ANN204 - typing.Self is what the subclass would want, and 3.11 has it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def implementation_sha256(self) -> str:
        """The hash of the function's source as it is in the copy now."""
        return _sha256(self.source.encode())

    def run(self, label: str, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run the chapter's probe on the copy and compare what it observed with `expected`, by default the spec's.

        The result has `label`, `status` (PASS when it is as expected, else NEEDS_WORK), `reason` (a sentence, empty
        for a PASS), `observation`, `expected`, `exit_status`, `stdout`, `stderr`, and both hashes.
        """
        return self._compare(label, self.spec["probe"], self.spec["expected"] if expected is None else expected)

    def inject_failure(self) -> None:
        """Replace the declared boundary in the function by the declared failure.

        Raises TaskRefused unless the boundary is there exactly once.
        """
        self._require_open()
        boundary, found = self.spec["boundary"], self.source.count(self.spec["boundary"])
        if self._around is not None:
            raise TaskRefused("The failure is injected already. Repair it, or begin with a fresh task.")
        if found != 1:
            raise TaskRefused(
                f"{self.spec['function']} has the boundary {boundary!r} {found} times, and the experiment needs it "
                f"exactly once. Write that one comparison in these words, with the epoch's check as one of several "
                "joined by `or`, or look at your version together with the instructor."
            )
        before, _, after = self.source.partition(boundary)
        self._around = before, after
        self.source = before + self.spec["injected"] + after

    def repair(self, fragment: str) -> None:
        """Put `fragment` where the failure was injected. Whether it is any good is for the next run to say.

        Raises TaskRefused when no failure is injected.
        """
        self._require_open()
        if self._around is None:
            raise TaskRefused("There is nothing to repair: call inject_failure() first.")
        self._replace(fragment.join(self._around) if isinstance(fragment, str) else fragment)
        self._around = None

    def close(self) -> None:
        """Remove the scratch copy. The task cannot run any more."""
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch = None

    # --- the copy -----------------------------------------------------------------------------------------

    def _require_open(self) -> Path:
        if self._scratch is None:
            raise TaskRefused("This task is closed. Make a new one.")
        return self._scratch

    def _read_originals(self) -> dict[str, bytes]:
        try:
            return {name: (self._root / name).read_bytes() for name in self._names}
        except OSError as error:
            raise TaskRefused(
                f"{self._root} is no copy of the course: {error.filename}: {error.strerror}. Run the set-up cell again."
            ) from error

    def _hash_runtime(self) -> str:
        held_open = self._files | {self.spec["file"]: (self._before + self._after).encode()}
        return _sha256(json.dumps({name: _sha256(held_open[name]) for name in self._names}).encode())

    def _replace(self, source: object) -> None:
        """Take a source for the function; one that is none is kept back, and each run says why."""
        self._unsound = _unsound(source, self.spec["function"])
        self.source = source.strip("\n") + "\n" if isinstance(source, str) else ""

    def _compare(self, label: str, probe: str, expected: Mapping[str, Any]) -> dict[str, Any]:
        self._require_open()
        told = {"observation": None, "trouble": self._unsound, "exit_status": None, "stdout": "", "stderr": ""}
        if not self._unsound:
            told = self._run(probe)
            if self._read_originals() != self._files:
                raise TaskRefused("The original files have changed during this run. Run the set-up cell again.")
        reason = told.pop("trouble") or _difference(told["observation"], dict(expected))
        return {
            "label": label,
            "status": "NEEDS_WORK" if reason else "PASS",
            "reason": reason,
            "expected": dict(expected),
            **told,
            "runtime_sha256": self.runtime_sha256,
            "implementation_sha256": self.implementation_sha256,
        }

    def _run(self, probe: str) -> dict[str, Any]:
        """Run a probe in a box of its own, which is gone afterwards."""
        box = Path(tempfile.mkdtemp(prefix="run-", dir=self._require_open()))
        try:
            learner = self._files | {self.spec["file"]: (self._before + self.source + self._after).encode()}
            for side, files in (("original", self._files), ("learner", learner)):
                for name, content in files.items():
                    path = box / side / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
            (box / "probe.py").write_text(probe, encoding="utf-8")
            (box / "shop").mkdir()
            return _drive(box)
        finally:
            shutil.rmtree(box, ignore_errors=True)


class SourceTask(RuntimeLab):
    """A `RuntimeLab` whose declared function is the learner's own: nothing runs before one is installed or loaded."""

    def __init__(self, root: Path | str, chapter: int) -> None:
        super().__init__(root, chapter)
        self._unsound = "No function is installed yet: call install(source) or load(path) first."
        self._passed: list[dict[str, Any]] = []

    def install(self, source: str) -> None:
        """Replace the declared function in the copy by `source`, which defines it and nothing else.

        A source that does not is no error here: each run then says NEEDS_WORK and why.
        """
        self._require_open()
        self._around = None
        self._replace(source)

    def visible(self, label: str) -> dict[str, Any]:
        """Run the chapter's probe against its own expectation: `run` without a choice. What passes can be saved."""
        result = self.run(label)
        if result["status"] == "PASS":
            self._passed.append(result)
        return result

    def transfer(
        self, label: str, probe_source: str | None = None, expected: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run a changed probe on the copy: by default the spec's `transfer_probe`, against `transfer_expected`.

        `probe_source` defines ``probe(lab)``, which returns the observation: a dictionary that JSON can hold.
        """
        probe = self.spec["transfer_probe"] if probe_source is None else probe_source
        return self._compare(label, probe, self.spec["transfer_expected"] if expected is None else expected)

    def save(self, path: Path | str, result: Mapping[str, Any]) -> None:
        """Write the handoff of what passed, whole or not at all.

        Raises TaskRefused for a result that is no PASS of `visible` for what is installed now.
        """
        current = result in self._passed and result["implementation_sha256"] == self.implementation_sha256
        if not current:
            raise TaskRefused(
                "Only what passed visible() of this task, and was not changed since, is saved. Install the "
                "function, run visible(), and save the result that says PASS."
            )
        handoff = {
            "schema": SCHEMA,
            "chapter": self.spec["chapter"],
            "runtime_sha256": self.runtime_sha256,
            "implementation_sha256": self.implementation_sha256,
            "source": self.source,
            "label": result["label"],
            "observation": result["observation"],
        }
        _write_whole(Path(path), json.dumps(handoff, indent=2, sort_keys=True) + "\n")

    def load(self, path: Path | str) -> dict[str, Any]:
        """Read a handoff that `save` wrote, install its source, and return it.

        Raises TaskRefused when it is none, when it is of another edition of the runtime, or when it was altered.
        """
        self._require_open()
        handoff = _read_handoff(Path(path))
        wanted = {"schema": SCHEMA, "chapter": self.spec["chapter"], "runtime_sha256": self.runtime_sha256}
        for key, value in wanted.items():
            if handoff.get(key) != value:
                raise TaskRefused(f"The handoff {path} is of another edition: its {key} is not {value}.")
        source = handoff.get("source")
        if not isinstance(source, str) or handoff.get("implementation_sha256") != _sha256(source.encode()):
            raise TaskRefused(f"The handoff {path} was altered: its source is not what was saved. Save it again.")
        self.install(source)
        return handoff


# --- the source -------------------------------------------------------------------------------------------


def _split(text: str, function: str) -> tuple[str, str, str]:
    """The file before the function, the function, and the file behind it."""
    (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == function)
    lines = text.splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno
    return "".join(lines[:first]), "".join(lines[first:last]), "".join(lines[last:])


def _unsound(source: object, function: str) -> str:
    """Why this is not the source of the function alone; empty when it is."""
    if not isinstance(source, str):
        return f"The source is not text but {type(source).__name__}."
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        return f"The source is not Python: {error.msg} (line {error.lineno})."
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].name != function:
        return f"The source must define the function {function}, and nothing else at its top level."
    return ""


def _difference(observation: object, expected: dict[str, Any]) -> str:
    return "" if observation == expected else "What was observed is not what is expected."


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- the handoff ------------------------------------------------------------------------------------------


def _write_whole(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    Path(f.name).replace(path)


def _read_handoff(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskRefused(f"The handoff {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TaskRefused(f"The handoff {path} is not one JSON object.")
    return found


# --- the run ----------------------------------------------------------------------------------------------


def _drive(box: Path) -> dict[str, Any]:
    """Run the driver in a box, and return what it reported."""
    nonce = secrets.token_hex(16)
    reading, writing = os.pipe()
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    extra = os.environ.get("PYTHONPATH", "")
    paths = {side: os.pathsep.join(filter(None, [str(box / side / "src"), extra])) for side in ("original", "learner")}
    command = [sys.executable, "-B", "-P", str(box / "original" / RUNNER), "drive", str(box), str(writing)]
    driver = subprocess.Popen(  # noqa: S603 - the copied runner
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=kept | {"PYTHONPATH": paths["original"], "LEARNER_PATH": paths["learner"], "TMPDIR": str(box)},
        pass_fds=[writing],
        start_new_session=True,
        text=True,
    )
    os.close(writing)
    try:
        out, err = driver.communicate(nonce + "\n", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(driver.pid, signal.SIGKILL)
        out, err = driver.communicate()
    with os.fdopen(reading) as file:
        line = file.readline()
    told = json.loads(line) if line else {}
    if told.pop("nonce", None) != nonce:
        told = {"observation": None, "trouble": f"It did not end within {SECONDS} seconds.", "exit_status": -9}
    return told | {"stdout": out, "stderr": err}
