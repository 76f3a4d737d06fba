"""Torture: real processes, real signals, and afterwards every promise is asked for.

    python -m sovereign_agent.testing.torture --seconds 60 --workers 4 --supervisors 2

Workers and supervisors share one organization with leases of a second, and an auditor reads over their shoulders.
An executioner kills them all, stops them until they have lost everything, interrupts them, and starts others in
their place; some kill themselves right after a ledger statement. When the time is up:

    the ledger    keeps every promise of `invariants`
    the disk      has the ledger's own receipt beside each run
    the workers   were told nothing that the ledger does not know, under their own name
    the machine   has no process of ours left

The seed fixes what is done to whom; when it lands, the machine decides. This room mends nothing. It signals only
children of its own that it has not reaped, so a number is never another's.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import typer

from sovereign_agent.clock import monotonic
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.testing import aftermath, workload
from sovereign_agent.testing.workload import Life, Witness

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
STRIKES = {signal.SIGKILL: 2, signal.SIGSTOP: 1, signal.SIGTERM: 1}
"""What the executioner does, and how often."""

LONGEST_REST_SECONDS = 0.25
LONGEST_STOP_SECONDS = 2.5 * workload.EXECUTION_ATTEMPT_SECONDS
SELF_KILLERS = 0.3
"""How many of the living kill themselves."""

LATEST_STATEMENT = 150
"""The last ledger statement after which they do."""

PATIENCE_SECONDS = 15.0
"""How long the living get to end when the time is up."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    seconds: float
    workers: int
    supervisors: int
    ledger: str
    seed: int
    root: Path | None
    json: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Torture, and print what happened.

    0 when no promise was broken, 1 when one was, 2 when it could not begin, 130 when the judging was interrupted.
    """
    options = Options(**vars(_parser().parse_args(arguments)))
    root = options.root or Path(tempfile.mkdtemp(prefix="sovereign-torture-"))
    try:
        report = Torture(options, root.resolve()).play()
    except SovereignError as error:
        typer.echo("\n".join([str(error), *(f"  {label:<6} {text}" for label, text in error.answers())]), err=True)
        return 2
    except KeyboardInterrupt:
        typer.echo(f"Interrupted while it was judged; all is kept in {root}", err=True)
        return 130
    typer.echo(json.dumps(report, indent=2) if options.json else _story(report))
    if options.root is None and not report["violations"]:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if report["violations"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sovereign_agent.testing.torture")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the killing goes on (60)")
    parser.add_argument("--workers", type=int, default=4, help="how many workers there are at a time (4)")
    parser.add_argument("--supervisors", type=int, default=2, help="how many supervisors there are at a time (2)")
    parser.add_argument("--ledger", default="", metavar="URL", help="postgresql://... (a SQLite file below the root)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="what fixes the plan (random)")
    parser.add_argument(
        "--root", type=Path, help="where all is made and kept (a temporary folder, kept if it shows a lie)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


@dataclass(eq=False)
class Place:
    """One place in the cast: whoever dies in it is followed by another life."""

    name: str
    act: Callable[[Life], None]
    process: BaseProcess | None = None
    lives: int = 0
    killed: bool = False
    wakes_at: float = math.inf

    def start(self, life: Life) -> None:
        """Begin a life. Signals wait until the child can answer them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
        self.process = multiprocessing.get_context("fork").Process(target=_live, args=(self.act, life))
        self.lives, self.killed, self.wakes_at = self.lives + 1, False, math.inf
        self.process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)

    def lives_on(self) -> bool:
        """Whether somebody is alive here; a stopped process is."""
        return self.process is not None and self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Signal whoever is alive here."""
        if self.process and self.process.is_alive() and self.process.pid:
            self.killed |= number is signal.SIGKILL
            os.kill(self.process.pid, number)

    def bury(self, seconds: float | None = None) -> int | None:
        """Wait for the end of a life, and answer how it ended; None if there was none, or it has not ended."""
        if self.process is None:
            return None
        self.process.join(seconds)
        code = self.process.exitcode
        if code is not None:
            self.process.close()
            self.process = None
        return code


class Torture:
    """The executioner. It keeps no ledger open while children are made: what is open must not be forked."""

    def __init__(self, options: Options, root: Path) -> None:
        self.options = options
        self.root = root
        self.dice = random.Random(options.seed)  # noqa: S311 - nothing is kept secret here
        self.witness = Witness(root / "witness.jsonl")
        self.signals: Counter[str] = Counter()
        self.findings: list[str] = []
        self.cast = [
            *(Place(f"worker {number}", workload.work) for number in range(options.workers)),
            *(Place(f"supervisor {number}", workload.supervise) for number in range(options.supervisors)),
            Place("auditor", workload.audit),
        ]

    def play(self) -> dict[str, Any]:
        """Torture for the time that is given, or until ^C, and answer what was seen."""
        begun = monotonic()
        self.witness.path.unlink(missing_ok=True)
        handlers = {number: signal.signal(number, signal.default_int_handler) for number in INTERRUPTS}
        try:
            with suppress(KeyboardInterrupt):
                workload.prepare(self.root, self.options.ledger, self.dice)
                self._storm(begun + self.options.seconds)
            seconds = monotonic() - begun
        finally:
            for number in INTERRUPTS:
                signal.signal(number, signal.SIG_IGN)  # a second ^C must not leave anybody behind
            self._end_everybody()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        with closing(Organization(self.root)) as org:
            self.findings += aftermath.findings(org, self.witness)
            return self._report(org, seconds)

    def _storm(self, ends_at: float) -> None:
        while monotonic() < ends_at:
            for place in self.cast:
                if not place.lives_on():
                    self._bury(place)
                    place.start(self._life(place, ends_at + PATIENCE_SECONDS))
                elif place.wakes_at < monotonic():
                    place.wakes_at = math.inf
                    place.send(signal.SIGCONT)
            self._strike(self.dice.choice(self.cast))
            time.sleep(self.dice.uniform(0.0, LONGEST_REST_SECONDS))

    def _strike(self, place: Place) -> None:
        """Do something to whoever is there, unless it is stopped: it shall wake, and find out what it has lost."""
        if place.wakes_at < math.inf or not place.lives_on():
            return
        [number] = self.dice.choices([*STRIKES], weights=[*STRIKES.values()])
        self.signals[number.name] += 1
        place.send(number)
        if number is signal.SIGSTOP:
            place.wakes_at = monotonic() + self.dice.uniform(0.0, LONGEST_STOP_SECONDS)

    def _life(self, place: Place, ends_at: float) -> Life:
        return Life(
            root=self.root,
            witness=self.witness,
            parent=os.getpid(),
            ends_at=ends_at,
            seed=f"{self.options.seed} {place.name} {place.lives}",
            dies_after=self.dice.randint(1, LATEST_STATEMENT) * (self.dice.random() < SELF_KILLERS),
        )

    def _bury(self, place: Place, seconds: float | None = None) -> None:
        code = place.bury(seconds)
        if code == -signal.SIGKILL and not place.killed:
            self.signals["after a statement"] += 1
        elif code not in (None, 0, -signal.SIGKILL):
            self.findings.append(f"A {place.name} ended with {code}.")

    def _end_everybody(self) -> None:
        deadline = monotonic() + PATIENCE_SECONDS
        for place in self.cast:
            place.send(signal.SIGCONT)
            place.send(signal.SIGTERM)
        for place in self.cast:
            self._bury(place, max(0.0, deadline - monotonic()))
            if place.lives_on():
                self.findings.append(f"A {place.name} had not ended {PATIENCE_SECONDS:g} s after SIGTERM.")
                place.send(signal.SIGKILL)
                self._bury(place)

    def _report(self, org: Organization, seconds: float) -> dict[str, Any]:
        receipts = _counted(org, "SELECT trim(status || ' ' || failure_category), count(*) FROM receipts GROUP BY 1")
        faults = [f"Somebody met what may never be: {fault['text']}" for fault in self.witness.told("fault")]
        return {
            "ledger": org.db.engine,
            "root": str(self.root),
            "seed": self.options.seed,
            "seconds": round(seconds, 1),
            "lives": sum(place.lives for place in self.cast),
            "runs": sum(receipts.values()),
            "runs_per_second": round(sum(receipts.values()) / seconds, 1),
            "signals": dict(self.signals),
            "receipts": receipts,
            "attempts": _counted(org, "SELECT status, count(*) FROM execution_attempts GROUP BY 1"),
            "messages": _counted(org, "SELECT state, count(*) FROM messages GROUP BY 1"),
            "outcomes": _counted(org, "SELECT state, count(*) FROM outcomes GROUP BY 1"),
            "refusals": dict(Counter(str(fact["category"]) for fact in self.witness.told("refusal"))),
            "audits": len(self.witness.told("audit")),
            "problems": len(self.witness.told("problem")),
            "violations": [*dict.fromkeys([*faults, *self.findings])],
        }


def _live(act: Callable[[Life], None], life: Life) -> None:
    """One life. Whatever ends it, but a signal or the end of its time, is told as a fault."""
    try:
        logging.disable()  # zombies complain of what they have lost; what counts of it stands in the ledger
        for number in INTERRUPTS:
            signal.signal(number, life.interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
        if life.dies_after:
            workload.die_after_statement(life.dies_after)
        act(life)
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001 - the parent reports it
        life.witness.tell("fault", text=traceback.format_exc())
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)


def _counted(org: Organization, query: str) -> dict[str, int]:
    return {str(row[0]): int(row[1]) for row in org.db.connection.execute(query)}


def _story(report: dict[str, Any]) -> str:
    lines = [
        f"{report['seconds']} s on {report['ledger']} under seed {report['seed']}, {report['lives']} lives",
        f"  {'runs':<10} {report['runs']}, {report['runs_per_second']} a second, read {report['audits']} times",
    ]
    for name in ("signals", "receipts", "attempts", "messages", "outcomes", "refusals"):
        counts = ", ".join(f"{what} {count}" for what, count in sorted(report[name].items()))
        lines.append(f"  {name:<10} {counts}")
    if not report["violations"]:
        return "\n".join([*lines, "No promise was broken."])
    broken = [f"{len(report['violations'])} promises were broken; all is kept in {report['root']}"]
    return "\n".join([*lines, *broken, *(f"  {sentence}" for sentence in report["violations"])])


if __name__ == "__main__":
    sys.exit(main())
