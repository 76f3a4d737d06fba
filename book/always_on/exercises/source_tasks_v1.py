"""The exercises of the course: a private copy of the runtime in which one function is the learner's.

    with SourceTask(ROOT, 10) as task:
        task.install(source)                  replaces the declared function, and nothing else
        result = task.visible("FIRST TRY")    runs the chapter's probe: {"status": "PASS" | "NEEDS_WORK", ...}
        task.save(path, result)               keeps what passed

It is not a sandbox of the operating system. What it guards against is mistakes, and a PASS that nobody earned: the
learner's code runs in a process of its own, under limits of time, memory and output; its printed text and its
inherited descriptors reach no report; what counts are the durable rows, which another process counts with the original
code, and whose report comes over a private pipe under a nonce that the learner's process is never given.

What it cannot hold: a program of the same user that attacks that other process, or the files of the course while it
runs, can lie. A function that was written to recognize the cases of a probe passes that probe; a probe that its author
has not seen tells. A handoff's hashes are no signature: whoever recomputes them has made a handoff, and so `load` is no
PASS, and `visible` is run again. Starting processes is refused in Python, and by the kernel, but not to root: there, a
function that calls around Python can leave a process behind. The disk is bounded for each file, not as a whole.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import io
import json
import os
import secrets
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self

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
HANDOFF_KEYS = {"schema", "chapter", "runtime_sha256", "implementation_sha256", "source", "observation"}
SECONDS = 10
MAX_SOURCE_CHARACTERS = 100_000
MAX_HANDOFF_BYTES = 1_000_000
MAX_OUTPUT_BYTES = 65_536
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_PARSING = threading.Lock()

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
            "changed_subject": _seen(SUPERSEDED, 2),
            "changed_work": _seen(SUPERSEDED, 2),
            "changed_owner": _seen(SUPERSEDED, 2),
            "superseded_generation": _seen(SUPERSEDED, 2),
            "missing_marker": _seen(UNAVAILABLE, 2),
            "foreign_marker": _seen(REPLACED, 2),
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
        declared = deepcopy(LESSONS[chapter])
        self._root = Path(root).resolve()
        self._names = runtime_files(self._root)
        self._files = self._read_originals()
        probes = {name: self._files[declared[name]].decode() for name in ("probe", "transfer_probe")}
        self.spec: Mapping[str, Any] = MappingProxyType(declared | probes)
        text = self._files[self.spec["file"]].decode()
        self._before, self.fragment, self._after = _split(text, self.spec["function"])
        others = self._files | {self.spec["file"]: (self._before + self._after).encode()}
        self.runtime_sha256 = _sha256(_text({name: _sha256(others[name]) for name in self._names}).encode())
        self.source = self.fragment
        self._unsound = ""
        self._broken: tuple[str, str] | None = None
        self._closed = False

    def __enter__(self) -> Self:
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

        Raises TaskRefused unless the boundary is there exactly once; how it is laid out, and quoted, does not matter.
        """
        self._require_open()
        if self._unsound or self._broken:
            raise TaskRefused(self._unsound or "The failure is injected already. Repair it, or make a new task.")
        boundary = self.spec["boundary"]
        found = _around(self.source, boundary)
        if len(found) != 1:
            raise TaskRefused(
                f"No failure was injected: {self.spec['function']} has the boundary `{boundary}` {len(found)} times, "
                "and needs it exactly once. Write this one check as a clause of a longer condition, in these "
                "words, and install it again; or look with the instructor at how to break your version."
            )
        self._broken = found[0]
        self.source = self.spec["injected"].join(self._broken)

    def repair(self, fragment: str) -> None:
        """Put `fragment` where the failure was injected. Whether it is any good is for the next run to say.

        Raises TaskRefused when no failure is injected.
        """
        self._require_open()
        if self._broken is None:
            raise TaskRefused("There is nothing to repair. Call inject_failure() first.")
        self._replace(fragment.join(self._broken) if isinstance(fragment, str) else fragment)

    def close(self) -> None:
        """Let the task not be used any more. Each run has removed its own scratch copy already."""
        self._closed = True

    # --- the copy -----------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise TaskRefused("This task is closed. Make a new one.")

    def _read_originals(self) -> dict[str, bytes]:
        try:
            return {name: (self._root / name).read_bytes() for name in self._names}
        except OSError as error:
            raise TaskRefused(
                f"{error.filename} cannot be read: {error.strerror}. Run the set-up cell again."
            ) from error

    def _changed(self) -> str:
        """Whether the originals are still what was copied: a sentence if not, else empty."""
        with suppress(TaskRefused):
            if self._read_originals() == self._files:
                return ""
        return f"The original files in {self._root} have changed. Run the set-up cell again."

    def _replace(self, source: object) -> None:
        """Take a source for the function. One that is none is no error here: each run then says what is wrong."""
        self._broken = None
        self._unsound = _unsound(source, self.spec["function"])
        self.source = "" if self._unsound else _plain(str(source))

    def _compare(self, label: str, probe: str, expected: Mapping[str, Any]) -> dict[str, Any]:
        self._require_open()
        told = {"observation": None, "trouble": self._unsound, "exit_status": None, "stdout": "", "stderr": ""}
        if not self._unsound:
            try:
                with _box() as box:
                    self._fill(box, probe)
                    told = _drive(self.spec["function"], box)
            except OSError as error:
                raise TaskRefused(
                    f"Nothing was run: {error}. It needs a folder for temporary files with some room (TMPDIR says "
                    "where), and two processes. See to that, and run it again."
                ) from error
            told["trouble"] = self._changed() or told["trouble"]
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

    def _fill(self, box: Path, probe: str) -> None:
        """Write what one run needs: both sides of the runtime, the runner, the probe, and a folder for the ledger."""
        replaced = (self._before + self.source + self._after).encode()
        for side, files in (("original", self._files), ("learner", self._files | {self.spec["file"]: replaced})):
            for name in (name for name in self._names if name.startswith("src/")):
                path = box / side / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files[name])
        (box / "runner.py").write_bytes(self._files[RUNNER])
        (box / "probe.py").write_text(probe, encoding="utf-8")
        (box / "shop").mkdir()


class SourceTask(RuntimeLab):
    """A `RuntimeLab` whose declared function is the learner's own: nothing runs before one is installed or loaded."""

    def __init__(self, root: Path | str, chapter: int) -> None:
        super().__init__(root, chapter)
        self.source, self._unsound = "", "No function is installed yet. Call install(source) or load(path) first."
        self._passed: list[dict[str, Any]] = []

    def install(self, source: str) -> None:
        """Replace the declared function in the copy by `source`, which defines it and nothing else.

        A source that does not is no error here: each run then says NEEDS_WORK and why.
        """
        self._require_open()
        self._replace(source)

    def visible(self, label: str) -> dict[str, Any]:
        """Run the chapter's probe against its own expectation: `run` without a choice. What passes can be saved."""
        result = self.run(label)
        if result["status"] == "PASS":
            self._passed.append(deepcopy(result))
        return result

    def transfer(
        self, label: str, probe_source: str | None = None, expected: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run a changed probe on the copy: by default the spec's `transfer_probe`, against `transfer_expected`.

        `probe_source` defines ``probe(lab)``, which returns the observation: a dictionary that JSON can hold. What it
        needs of the package it imports at its top: later there is nothing to import any more. It has
        ``lab.database``, ``lab.folder``, ``lab.observe(claim, text, now=None)`` (the installed function is asked, and
        the rows are counted: ``{"answer": ..., "rows": ...}``), ``lab.rows()``, ``lab.lines(work_id)`` and
        ``lab.replace_epoch()``.
        """
        probe = self.spec["transfer_probe"] if probe_source is None else probe_source
        if not isinstance(probe, str):
            raise TaskRefused(f"A probe is given as the text of its source, and this is {type(probe).__name__}.")
        return self._compare(label, probe, self.spec["transfer_expected"] if expected is None else expected)

    def save(self, path: Path | str, result: Mapping[str, Any]) -> None:
        """Write the handoff of what passed, whole or not at all.

        Raises TaskRefused for a result that is no PASS of `visible` for what is installed now, and for a path that
        cannot be written, or where something else than a file is.
        """
        if result not in self._passed or result["implementation_sha256"] != self.implementation_sha256:
            raise TaskRefused(
                "Nothing was saved: only what passed visible() of this task, and is installed still, can be. Install "
                "the function, run visible(), and save its result when that says PASS."
            )
        handoff = {
            "schema": SCHEMA,
            "chapter": self.spec["chapter"],
            "runtime_sha256": self.runtime_sha256,
            "implementation_sha256": self.implementation_sha256,
            "source": self.source,
            "observation": result["observation"],
        }
        _write_whole(Path(path), json.dumps(handoff, indent=2, sort_keys=True) + "\n")

    def load(self, path: Path | str) -> dict[str, Any]:
        """Read a handoff that `save` wrote, install its source, and return it.

        Raises TaskRefused when it is none, when it is of another edition of the runtime, or when it was altered. It
        runs nothing: that the function passes is for `visible` to say again.
        """
        self._require_open()
        handoff = _read_handoff(Path(path))
        edition = {"schema": SCHEMA, "chapter": self.spec["chapter"], "runtime_sha256": self.runtime_sha256}
        for key, value in edition.items():
            if handoff[key] != value:
                raise TaskRefused(
                    f"The handoff {path} is of another edition: its {key} is {_text(handoff[key]):.100}, "
                    f"and here it is {_text(value)}. Run visible() and save() with this edition."
                )
        source = handoff["source"]
        altered = _unsound(source, self.spec["function"])
        if altered or handoff["implementation_sha256"] != _sha256(_plain(source).encode()):
            raise TaskRefused(
                f"The handoff {path} was altered: {altered or 'its source is not the one it names the hash of.'} "
                "Save it again with save()."
            )
        if why := _difference(handoff["observation"], self.spec["expected"]):
            raise TaskRefused(f"The handoff {path} is of no PASS. {why} Save it again with save().")
        self._replace(source)
        return handoff


# --- the source -------------------------------------------------------------------------------------------


def _parsed(text: str) -> ast.Module:
    with _PARSING:  # early releases of Python 3.11 count how deep all threads are as one
        return ast.parse(text)


def _split(text: str, function: str) -> tuple[str, str, str]:
    """The file before the function, the function, and the file behind it."""
    (node,) = (node for node in _parsed(text).body if isinstance(node, ast.FunctionDef) and node.name == function)
    lines = text.splitlines(keepends=True)
    return (
        "".join(lines[: node.lineno - 1]),
        "".join(lines[node.lineno - 1 : node.end_lineno]),
        "".join(lines[node.end_lineno :]),
    )


def _unsound(source: object, function: str) -> str:
    """Why this is not the source of that function alone; empty when it is."""
    if not isinstance(source, str):
        return f"The source must be text, and is {type(source).__name__}. Is it between quotes, and returned?"
    if len(source) > MAX_SOURCE_CHARACTERS:
        return f"The source is longer than {MAX_SOURCE_CHARACTERS} characters."
    try:
        body = _parsed(_plain(source)).body
    except SyntaxError as error:
        return f"The source is not Python: {error.msg} (line {error.lineno or 'unknown'})."
    except (ValueError, RecursionError, MemoryError) as error:
        return f"The source is not Python that can be read: {type(error).__name__}: {error}."
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].name != function:
        return f"The source must define the function {function}, and nothing else at its top level."
    return ""


def _plain(source: str) -> str:
    """The source as it goes into its file, whatever editor wrote it."""
    return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").strip("\n") + "\n"


def _around(source: str, boundary: str) -> list[tuple[str, str]]:
    """What stands before and behind the boundary, for each place where the source has it, however it is laid out."""
    words, wanted = _words(source), [word for word, _, _ in _words(boundary)]
    stretches = [words[at : at + len(wanted)] for at in range(len(words))]
    return [
        (source[: stretch[0][1]], source[stretch[-1][2] :])
        for stretch in stretches
        if [word for word, _, _ in stretch] == wanted
    ]


def _words(source: str) -> list[tuple[str, int, int]]:
    """The tokens of a source without comments and layout, with their begin and end; either quotes are the same."""
    starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
    return [
        (token.string.replace("'", '"'), *(starts[line - 1] + column for line, column in (token.start, token.end)))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
    ]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- the observation --------------------------------------------------------------------------------------


def _difference(observation: object, expected: object) -> str:
    """The first thing that is not as expected, in a sentence; empty when there is none."""
    if _text(observation) == _text(expected):
        return ""
    if isinstance(observation, dict) and isinstance(expected, dict):
        for key in [*expected, *observation]:
            seen, wanted = (_text(side[key]) if key in side else "nothing" for side in (observation, expected))
            if seen != wanted:
                return f"{key}: {seen:.200} was observed, and {wanted:.200} is expected."
    return f"{_text(observation):.200} was observed, and {_text(expected):.200} is expected."


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# --- the handoff ------------------------------------------------------------------------------------------


def _write_whole(path: Path, text: str) -> None:
    """Put a file there with this text, or leave what was there."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise TaskRefused(f"The handoff {path} was not written: no regular file is there. Choose another place.")
        with tempfile.TemporaryDirectory(prefix=".handoff-", dir=path.parent, ignore_cleanup_errors=True) as folder:
            beside = Path(folder, "handoff")
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
    except OSError as error:
        raise TaskRefused(f"The handoff {path} was not written: {error.strerror}. Choose another place.") from error


def _read_handoff(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file of bounded size. Raises TaskRefused."""
    again = "Save it again with save()."
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TaskRefused(f"The handoff {path} is not a regular file. {again}")
            content = file.read(MAX_HANDOFF_BYTES + 1)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise TaskRefused(f"The handoff {path} cannot be read: {why}. {again}") from error
    if len(content) > MAX_HANDOFF_BYTES:
        raise TaskRefused(f"The handoff {path} is larger than {MAX_HANDOFF_BYTES} bytes, so it is none. {again}")
    try:
        handoff = json.loads(content, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise TaskRefused(f"The handoff {path} is not whole, or not JSON: {error}. {again}") from error
    if not isinstance(handoff, dict) or handoff.keys() != HANDOFF_KEYS:
        raise TaskRefused(f"The handoff {path} must be an object with {', '.join(sorted(HANDOFF_KEYS))}. {again}")
    return handoff


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name is there twice")
    return found


# --- the run ----------------------------------------------------------------------------------------------


@contextmanager
def _box() -> Iterator[Path]:
    """A folder for one run, in a scratch folder that is gone afterwards, whatever was made of either."""
    folder = tempfile.TemporaryDirectory(prefix="course-task-", ignore_cleanup_errors=True)
    try:
        (box := Path(folder.name, "box")).mkdir()
        yield box
    finally:
        with suppress(RecursionError):
            folder.cleanup()
        if os.path.lexists(folder.name):  # a link by now, or folders in folders, deeper than Python removes
            subprocess.run(["rm", "-rf", folder.name], stderr=subprocess.DEVNULL, check=False)  # noqa: S603, S607


def _drive(function: str, box: Path) -> dict[str, Any]:
    """Run the driver in a box and return what it reported. When this returns, its process group has ended.

    The worker is in that group, unless it left it: then it leads one of its own, which has the worker's number.
    """
    nonce = secrets.token_hex(16)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as reports:
        try:
            driver = subprocess.Popen(  # noqa: S603 - the copied runner
                [sys.executable, "-B", "-P", str(box / "runner.py"), "drive", function, str(box), str(writing)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(box),
                cwd=box,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        groups = [driver.pid]
        with driver:
            try:
                with suppress(OSError):  # it may have ended already
                    driver.stdin.write(nonce.encode())
                    driver.stdin.close()
                if (first := reports.readline()).strip().isdigit():
                    groups.append(int(first))  # the worker's; a driver that could start none has reported already
                (told, out, err), trouble = _read([reports, driver.stdout, driver.stderr])
            finally:
                for group in groups:
                    with suppress(OSError):
                        os.killpg(group, signal.SIGKILL)
    printed = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
    return _report(told or first, nonce, trouble) | printed


def _environment(box: Path) -> dict[str, str]:
    """What the driver sees of the environment: where programs and packages are, no keys, and no other runtime."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    named = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    packages = os.pathsep.join(str(folder) for folder in named if not (folder / "sovereign_agent").exists())
    return kept | {"PYTHONPATH": str(box / "original/src"), "COURSE_PACKAGES": packages, "TMPDIR": str(box)}


def _read(files: list[IO[bytes]]) -> tuple[list[bytes], str]:
    """Read some pipes to their ends, to the deadline or to the bound; say which of them it was, if not the ends."""
    read = {file.fileno(): bytearray() for file in files}
    end, trouble = time.monotonic() + SECONDS, ""
    with selectors.DefaultSelector() as selector:
        for descriptor in read:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not trouble:
            ready = selector.select(end - time.monotonic()) if time.monotonic() < end else []
            if not ready:
                trouble = f"It did not end within {SECONDS} seconds."
            for key, _ in ready:
                chunk = os.read(key.fd, MAX_OUTPUT_BYTES)
                read[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                elif len(read[key.fd]) > MAX_OUTPUT_BYTES:
                    trouble = f"It printed or reported more than {MAX_OUTPUT_BYTES} bytes."
    return [bytes(content[:MAX_OUTPUT_BYTES]) for content in read.values()], trouble


def _report(told: bytes, nonce: str, trouble: str) -> dict[str, Any]:
    """The driver's report; what is none, or does not have the nonce, is trouble."""
    try:
        report = json.loads(told)
        if report.pop("nonce") != nonce:
            raise ValueError  # noqa: TRY301
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return {"observation": None, "trouble": trouble or "It ended without a report.", "exit_status": None}
    return report | {"trouble": trouble or report["trouble"]}
