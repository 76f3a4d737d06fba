"""One run of a probe, in two processes: a driver with the original code, and a worker with the learner's.

The worker is what the chapter calls the old worker: it keeps its `Database` open and lives on while the driver changes
the world around it. It is asked to write one line, and answers. What it answers is not believed alone: after each
attempt the driver looks for the row with the original code, in its own process.

    python runner.py drive FUNCTION BOX DESCRIPTOR    the nonce of the report comes on standard input
    python runner.py work FUNCTION BOX DESCRIPTOR     started by the driver

A box holds `original/src` and `learner/src`, two copies of the runtime, and `probe.py`; the ledger is made in `shop`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

SECONDS = 10
MEMORY_BYTES = 2**29
FILE_BYTES = 2**26
OPEN_FILES = 64
MOST_SAID = 700
MOST_CHARACTERS = 20_000
"""Of a line between the two: JSON needs up to twelve for one."""

CLOCKS_APART_MICROS = 60_000_000

STARTING = ("os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.", "ctypes.dlopen")
"""How the names begin of the audit events of whatever starts a process, ends another one, or calls around Python."""


def main() -> int:
    """Be the driver or the worker."""
    role, function, box, descriptor = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    sys.path.extend(filter(None, os.environ["COURSE_PACKAGES"].split(os.pathsep)))  # behind the interpreter's own
    limit(resource.RLIMIT_CPU, SECONDS)
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_CORE, 0)
    signal.alarm(2 * SECONDS)  # should whoever started the run be gone
    return drive(function, box, descriptor) if role == "drive" else work(function, box, descriptor)


def limit(which: int, most: int) -> None:
    """Lower one limit for good. Where the system refuses, the time of the whole run is the limit that is left."""
    with suppress(ValueError, OSError):
        resource.setrlimit(which, (most, most))


# --- the driver -------------------------------------------------------------------------------------------


class WorkerGone(Exception):
    """The learner's process does not answer any more."""


class Lab:
    """What a probe works with.

    Attributes:
        database: the ledger, opened by the original code.
        folder: where the ledger lies, with room for a backup.
        trouble: the first thing that must not happen, whatever the probe makes of it; empty when nothing did.
        worker: the process of the learner's code.
        exit_status: the worker's, once it has ended.
    """

    def __init__(self, function: str, box: Path) -> None:
        from sovereign_agent import assistant_work, database  # noqa: PLC0415 - from the copy that PYTHONPATH names

        self.folder = box / "shop"
        self.database = database.Database(self.folder / "ledger.db")
        self.trouble = ""
        self.exit_status: int | None = None
        self._authority, self._transcript = database.authority, assistant_work.transcript
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.worker = subprocess.Popen(  # noqa: S603 - this file itself
                [sys.executable, "-B", "-P", __file__, "work", function, str(box), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": str(box / "learner/src")},
                pass_fds=[theirs.fileno()],
            )
            self._line = ours.makefile("rw", encoding="utf-8")

    def observe(self, claim: Any, text: str, *, now: float | None = None) -> dict[str, object]:
        """Let the worker write one line under a claim: what it answered, and how many rows there are now.

        The answer is ``appended``, the sentence of a refusal, or what went wrong, by its name.
        """
        before = self.rows()
        answer = self._ask({"claim": asdict(claim), "text": text, "now": now})
        after = self.rows()
        if (after - before) != (answer == "appended"):
            self._note(f"The worker answered {answer!r}, and the transcript grew by {after - before}.")
        elif after > before:
            self._require_date(now)
        return {"answer": answer, "rows": after}

    def rows(self) -> int:
        """How many lines all transcripts of the ledger have."""
        return int(self.database.connection.execute("SELECT count(*) FROM assistant_transcript").rows[0][0])

    def lines(self, work_id: str) -> list[str]:
        """What stands in the transcript of one item."""
        found = self._transcript(self.database.connection, work_id)
        return [json.loads(line["message"])["content"] for line in found]

    def replace_epoch(self) -> None:
        """Begin another epoch, in the control row and in the marker, and change nothing else.

        A whole restore pauses the ledger and takes every claim away, too; then either would hide what is missing here.
        """
        epoch = self._authority.new_epoch()
        with self.database.immediate() as connection:
            self._authority.begin_epoch(connection, epoch, paused=False)
            self._authority.write_marker(self.database.authority, epoch)

    def finish(self) -> None:
        """Let the worker end. A line that it writes behind its last answer is trouble."""
        before = self.rows()
        self._end()
        if self.rows() != before:
            self._note("The worker wrote to the transcript after its last answer.")
        if self.exit_status:
            self._note(f"The worker's process {ending(self.exit_status)} after its last answer.")
        self.database.close()

    def _ask(self, request: dict[str, object]) -> str:
        try:
            self._line.write(json.dumps(request) + "\n")
            self._line.flush()
            told = json.loads(self._line.readline(MOST_CHARACTERS))
            answer, wrong = str(told["answer"]), str(told["wrong"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self._end()
            raise WorkerGone(f"The worker's process {ending(self.exit_status)} before it answered.") from None
        self._note(wrong)
        return answer

    def _require_date(self, now: float | None) -> None:
        row = self.database.connection.execute("SELECT created_at FROM assistant_transcript ORDER BY seq DESC LIMIT 1")
        dated = row.rows[0]["created_at"]
        apart = CLOCKS_APART_MICROS if now is None else 0
        at = round((self.database.now().timestamp() if now is None else now) * 1_000_000)
        if abs(dated - at) > apart:
            self._note(f"The line is dated {dated}: the function must return the time it judged by, in microseconds.")

    def _note(self, trouble: str) -> None:
        self.trouble = self.trouble or trouble

    def _end(self) -> None:
        with suppress(OSError):
            self._line.close()
        self.exit_status = self.worker.wait()


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended by itself, with exit status {status},"


def drive(function: str, box: Path, descriptor: int) -> int:
    """Run box/probe.py, and report what it observed in one line of JSON, under the nonce, behind the worker's pid."""
    nonce = sys.stdin.readline().strip()
    lab, observation, trouble = None, None, ""
    names: dict[str, Any] = {"__name__": "probe"}
    try:
        lab = Lab(function, box)
        os.write(descriptor, b"%d\n" % lab.worker.pid)
        exec(compile((box / "probe.py").read_text(encoding="utf-8"), "probe.py", "exec"), names)  # noqa: S102
        import_no_more(box)
        observation = json.loads(json.dumps(names["probe"](lab)))
        lab.finish()
    except WorkerGone as gone:
        trouble = str(gone)
    except BaseException as error:  # noqa: BLE001 - a probe may be a learner's own
        trouble = f"The probe itself failed: {named(error, 'probe')}."
    report = {
        "nonce": nonce,
        "observation": observation,
        "trouble": (lab and lab.trouble) or trouble,
        "exit_status": lab and lab.exit_status,
    }
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")
    return 0


def import_no_more(box: Path) -> None:
    """Import nothing from the box from here on: a learner's function can write there, and must not become the driver's.

    So a probe imports from the package at its top level.
    """
    sys.path = [entry for entry in sys.path if not Path(entry).is_relative_to(box)]
    for module in list(sys.modules.values()):
        if any(Path(folder).is_relative_to(box) for folder in getattr(module, "__path__", [])):
            module.__path__ = []


def named(error: BaseException, function: str) -> str:
    """An exception in one line: its name, what it says, and the last line of the function that it came through."""
    walked = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [line - code.co_firstlineno + 1 for code, line in walked if code.co_name == function]
    words = f"{type(error).__name__}: {error} {getattr(error, 'why', '')}".split()
    said = " ".join(words)[:500].rstrip(":.")
    return f"{said} (line {lines[-1]} of {function})" if lines else said


# --- the worker -------------------------------------------------------------------------------------------


def work(function: str, box: Path, descriptor: int) -> int:
    """Open the ledger with the learner's code, and append what is asked for, until nobody asks any more."""
    limit(resource.RLIMIT_NPROC, 0)
    started = refuse_processes()
    append = None
    with socket.socket(fileno=descriptor) as ours, ours.makefile("rw", encoding="utf-8") as line:
        for request in line:
            answer, wrong = "appended", ""
            try:
                append = append or appending(box)
                append(**json.loads(request))
            except PermissionError as refusal:
                answer = str(refusal)
            except NotImplementedError as error:
                answer = named(error, function)
                wrong = f"The function {function} is not finished: {answer}."
            except BaseException as error:  # noqa: BLE001 - whatever a learner's function raises is an observation
                answer = named(error, function)
                wrong = f"The function {function} did not do its work: {answer}."
            wrong = started[0] if started else wrong
            line.write(json.dumps({"answer": answer[:MOST_SAID], "wrong": wrong[:MOST_SAID]}) + "\n")
            line.flush()
    return 0


def appending(box: Path) -> Callable[..., int]:
    """Import the learner's copy, open the ledger with it, and return what appends one line under a claim."""
    from sovereign_agent import assistant_work, database, records  # noqa: PLC0415 - the learner's copy

    ledger = database.Database(box / "shop" / "ledger.db", create=False)

    def append(claim: dict[str, Any], text: str, now: float | None) -> int:
        message = {"role": "assistant", "content": text}
        return assistant_work.observe(ledger, records.Claim(**claim), message, now=now)

    return append


def refuse_processes() -> list[str]:
    """Let no process be started from here on, and return a list that will name what tried to."""
    tried: list[str] = []

    def refuse(event: str, _arguments: tuple[Any, ...], starting: tuple[str, ...] = STARTING) -> None:
        if event.startswith(starting):
            tried.append(f"The function may not start or end processes, and it tried {event}.")
            raise RuntimeError(tried[-1])

    sys.addaudithook(refuse)
    return tried


if __name__ == "__main__":
    sys.exit(main())
