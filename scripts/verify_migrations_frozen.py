"""Hold released migrations still: a ledger that ran one must find the same one for ever.

scripts/migrations.sha256 has one line for each released file of the schema. A recorded file that changed or went
away fails. A file that is not recorded yet may still change; ``--record`` records it, at its release and not before.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

SCHEMA = Path("src/sovereign_agent/storage/schema")
RECORD = Path("scripts/migrations.sha256")


def main() -> int:
    """Compare the schema with the record; with ``--record``, write down what is new first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--record", action="store_true", help="record the files that are not recorded yet")
    arguments = parser.parse_args()
    record = arguments.root / RECORD
    found = {path.name: digest(path) for path in sorted((arguments.root / SCHEMA).glob("*.sql"))}
    recorded = read(record)
    new = {name: found[name] for name in found if name not in recorded}
    if arguments.record:
        with record.open("a", encoding="utf-8") as lines:
            lines.writelines(f"{value}  {name}\n" for name, value in new.items())
    for name in new:
        state = "recorded now" if arguments.record else "not released yet; at its release run this with --record"
        print(f"{name}: {state}")
    broken = [name for name, value in recorded.items() if found.get(name) != value]
    for name in broken:
        print(f"{name}: was released and is frozen, but it {'changed' if name in found else 'is gone'}.")
        print("  next   put it back, and say what you need in a new migration with the next number")
    if not broken:
        print(f"migrations: {len(recorded)} released, all unchanged")
    return int(bool(broken))


def read(record: Path) -> dict[str, str]:
    """File name -> digest, of every line that is not a comment."""
    lines = record.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#"))
    return {name: value for value, name in pairs}


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
