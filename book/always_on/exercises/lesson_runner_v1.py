"""One run of a probe, in two processes: a driver with the original code, and a worker with the learner's.

The worker is what the chapter calls the old worker: it holds its `Database` open and lives on while the driver changes
the world around it. It is asked to write one line, and answers. What it answers is not believed alone: after each
attempt the driver counts the durable rows with the original code, in its own process.

    python lesson_runner_v1.py drive BOX DESCRIPTOR     the nonce comes first on standard input
    python lesson_runner_v1.py work BOX DESCRIPTOR      started by the driver
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

SECONDS = 10
MEMORY_BYTES = 2**29
FILE_BYTES = 2**26
OPEN_FILES = 64
MOST_CHARACTERS = 2**16


def main() -> int:
    """Be the driver or the worker."""
    role, box, descriptor = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    limit(resource.RLIMIT_CPU, SECONDS)
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_CORE, 0)
    return drive(box, descriptor) if role == "drive" else work(box, descriptor)


def limit(which: int, most: int) -> None:
    """Lower one limit for good. Where the system has no such limit, the time of the whole run is what is left."""
    with suppress(ValueError, OSError):
        resource.setrlimit(which, (most, most))


# --- the driver -------------------------------------------------------------------------------------------


class Lab:
    """What a probe works with. `database` is opened by the original code; `folder` may hold a backup, say."""

    def __init__(self, box: Path) -> None:
        from sovereign_agent import database  # noqa: PLC0415 - from the copy that this process was pointed at

        self.folder = box / "shop"
        self.database = database.Database(self.folder / "ledger.db")
        self.trouble = ""
        self._authority = database.authority
        ours, theirs = socket.socketpair()
        with theirs:
            self._worker = subprocess.Popen(  # noqa: S603 - this file itself
                [sys.executable, "-B", "-P", __file__, "work", str(box), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.environ["LEARNER_PATH"]},
                pass_fds=[theirs.fileno()],
            )
        self._line = ours.makefile("rw", encoding="utf-8")
        ours.close()

    def observe(self, claim: object, text: str, *, now: float | None = None) -> dict[str, object]:
        """Let the worker write one line under a claim: what it answered, and how many rows there are now.

        The answer is ``appended``, the sentence of a refusal, or whatever went wrong, by its name.
        """
        answer = self._ask({"claim": asdict(claim), "text": text, "now": now})
        return {"answer": answer, "rows": self.rows()}

    def rows(self) -> int:
        """How many lines all transcripts of the ledger have."""
        return int(self.database.connection.execute("SELECT count(*) FROM assistant_transcript").rows[0][0])

    def lines(self, work_id: str) -> list[str]:
        """What stands in the transcript of one item."""
        from sovereign_agent import assistant_work  # noqa: PLC0415

        found = assistant_work.transcript(self.database.connection, work_id)
        return [json.loads(row["message"])["content"] for row in found]

    def replace_epoch(self) -> None:
        """Begin another epoch, in the control row and in the marker, and change nothing else.

        A whole restore pauses the ledger and takes every claim away, too; then either would hide what is missing here.
        """
        epoch = self._authority.new_epoch()
        with self.database.immediate() as connection:
            self._authority.begin_epoch(connection, epoch, paused=False)
            self._authority.write_marker(self.database.authority, epoch)

    def finish(self) -> int:
        """Let the worker end, and return its exit status. A line that it wrote behind our back is trouble."""
        before = self.rows()
        self._line.close()
        status = self._worker.wait()
        if self.rows() != before:
            self.trouble = self.trouble or "The worker wrote to the transcript after its last answer."
        self.database.close()
        return status

    def _ask(self, request: dict[str, object]) -> str:
        before = self.rows()
        try:
            self._line.write(json.dumps(request) + "\n")
            self._line.flush()
            told = json.loads(self._line.readline(MOST_CHARACTERS))
            answer, wrong = str(told["answer"]), str(told["wrong"])
        except (OSError, ValueError, KeyError, TypeError):
            self._line.close()
            wrong = f"The worker's process ended before it answered, with exit status {self._worker.wait()}."
            raise WorkerGone(wrong) from None
        if wrong or (answer == "appended") != (self.rows() == before + 1):
            self.trouble = self.trouble or wrong or f"The worker answered {answer!r}, and the rows say otherwise."
        return answer


class WorkerGone(Exception):
    """The learner's process does not answer any more."""


def drive(box: Path, report: int) -> int:
    """Run box/probe.py, and write one line of JSON to the descriptor: the observation under the nonce."""
    nonce = sys.stdin.readline().strip()
    names: dict[str, object] = {"__name__": "probe", "__file__": str(box / "probe.py")}
    told: dict[str, object] = {"nonce": nonce, "observation": None, "trouble": "", "exit_status": 0}
    lab = Lab(box)
    try:
        exec(compile((box / "probe.py").read_text(encoding="utf-8"), "probe.py", "exec"), names)  # noqa: S102
        told["observation"] = names["probe"](lab)
        told["exit_status"] = lab.finish()
        told["trouble"] = lab.trouble
    except WorkerGone as gone:
        told["trouble"] = str(gone)
    except Exception as error:  # noqa: BLE001 - the probe may be a learner's own
        told["trouble"] = f"The probe itself failed: {type(error).__name__}: {error}"
    with os.fdopen(report, "w", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")
    return 0


# --- the worker -------------------------------------------------------------------------------------------


def work(box: Path, descriptor: int) -> int:
    """Open the ledger with the learner's code, and append what is asked for, until nobody asks any more."""
    limit(resource.RLIMIT_NPROC, 0)
    with socket.socket(fileno=descriptor) as ours, ours.makefile("rw", encoding="utf-8") as line:
        database = None
        for request in line:
            answer, wrong = "", ""
            try:
                from sovereign_agent import assistant_work, records  # noqa: PLC0415
                from sovereign_agent.database import Database  # noqa: PLC0415

                asked = json.loads(request)
                database = database or Database(box / "shop" / "ledger.db", create=False)
                message = {"role": "assistant", "content": asked["text"]}
                assistant_work.observe(database, records.Claim(**asked["claim"]), message, now=asked["now"])
                answer = "appended"
            except PermissionError as error:
                answer = str(error)
            except BaseException as error:  # noqa: BLE001 - whatever a learner's function raises is an observation
                answer = f"{type(error).__name__}: {error}"[:500]
                wrong = f"The function ended with {answer}"
            line.write(json.dumps({"answer": answer, "wrong": wrong}) + "\n")
            line.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
