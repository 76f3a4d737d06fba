"""The program behind the scripted provider. It performs the steps on its stdin, and imports nothing of ours.

    python -I -S scripted_program.py < {"steps": [...]}

Paths of barriers are relative to the run's folder; other files are written below SOVEREIGN_OUT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path(os.environ["SOVEREIGN_OUT"])
PAUSE_SECONDS = 0.02
WAITED_IN_VAIN = 4


def await_file(path: str, seconds: float) -> None:
    """Wait for a barrier's file, and end the program if it never comes."""
    end = time.monotonic() + seconds
    while not Path(path).exists():
        if time.monotonic() >= end:
            say(2, f"waited in vain for {path}\n")
            sys.exit(WAITED_IN_VAIN)
        time.sleep(PAUSE_SECONDS)


def say(descriptor: int, text: str) -> None:
    """Write all of `text`, however slowly it is read."""
    data = text.encode()
    while data:
        data = data[os.write(descriptor, data) :]


def write(name: str, text: str) -> None:
    """Write a file below SOVEREIGN_OUT."""
    path = OUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def perform(step: dict[str, Any]) -> None:
    """Do one step."""
    match step:
        case {"sleep": seconds}:
            time.sleep(seconds)
        case {"write": name, "text": text}:
            write(name, text)
        case {"report": report}:
            write("report.json", json.dumps(report))
        case {"stdout": text}:
            say(1, text)
        case {"stderr": text}:
            say(2, text)
        case {"exit": code}:
            sys.exit(code)
        case {"ignore_term": True}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case {"touch": path}:
            Path(path).write_text(str(os.getpid()))
        case {"wait_for": path, "seconds": seconds}:
            await_file(path, seconds)
        case _:
            raise ValueError(f"not a step: {sorted(step)}")


if __name__ == "__main__":
    for each in json.load(sys.stdin)["steps"]:
        perform(each)
