"""Power loss: a ledger's disk is cut off at every point of a story, and what is left is opened by the product.

    python -m sovereign_agent.testing.power_loss --reorderings 20

A story is told on a real ledger while `recorder` writes down each write, sync and change of a name. Then, for each
point of that record, disks are made as the cut may have left them. What was synced is on all of them. Of what was
not, one has nothing and one everything; others have it without its beginning, with a torn last write, for all files
but one or for only one, the names without the contents or the contents without the names, and `reorderings` random
choices, sector by sector. Each different disk is opened, and must either open or refuse in the house's words with a
next command, which is then obeyed. Of what has opened it is asked:

    the commit      the rows are those after the last commit that had returned, or those after the one under way
    the authority   ledger and marker are of one epoch, and it opens without refusal unless an act on the marker was
                    under way; a restore that was cut is finished and, on another copy, rolled back
    the files       `sovereign.toml` and a backup are whole, and there if they were answered for
    the promises    `invariants.violations` is empty, SQLite finds nothing wrong, and the next write succeeds

Assumed of the disk: a sync that has returned was carried out; a sector of 512 bytes is written whole or not at all,
and what was not written keeps its bytes; a rename happens whole or not at all. Not assumed: any order of what was
not synced, and that a file's sync brings its name along. Not shown: a disk that lies about syncs, decay, several
writers at a time, and the engines of other builds: it is the SQLite of this Python that is watched. What a process
that is killed leaves behind is the disk that has everything.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sovereign_agent import assistant_service, assistant_work, configuration, effects, fencing, relay
from sovereign_agent.database import LEDGER_NAME, Connection, Database, Transaction, sqlite_backup
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.records import Receipt, ReceiptStatus, new_id
from sovereign_agent.supervisor import first_signal_interrupts
from sovereign_agent.testing.invariants import violations
from sovereign_agent.testing.recorder import (
    Change,
    Disk,
    Mark,
    Name,
    Recorder,
    Rows,
    Sync,
    SyncFolder,
    Unname,
    Write,
)

SECTOR_BYTES = 512
STALE_SHARED_MEMORY = b"\xa5" * 32768
"""What may lie under the name of the ``-shm``: it is never synced."""

ROOT = "organization"
OPERATOR, MASTER, PRINCIPAL = "operator-course", "master-course", "principal-human"
BACKUP = "backup.db"
FIRST_START, OPEN, RESTORE, NEW_EPOCH, BACK_UP = "first start", "open", "restore", "new epoch", "back up"
REFUSALS = {RESTORE: "restore_unfinished", NEW_EPOCH: "epoch_replaced"}
"""What may be refused after a cut in the middle of an act; after any other, nothing."""

THE_END = "the end"
EVERYWHERE = range(sys.maxsize)


# --- stories: what is being done when the power goes --------------------------------------------------------


def first_start(root: Path) -> Iterator[str]:
    """Make an organization where there is none."""
    yield FIRST_START
    Organization.init(root).close()


def run(root: Path) -> Iterator[str]:
    """Lease, attempt, terminal receipt."""
    yield OPEN
    with closing(Organization(root)) as org:
        db, process = org.db, org.process_identity
        assignment = db.connection.execute("SELECT id FROM assignments").rows[0][0]
        yield "take the lease"
        lease = fencing.acquire_actor_lease(db, OPERATOR, process)
        yield "begin the attempt"
        attempt = fencing.acquire_execution_attempt(db, assignment, OPERATOR, process, lease.fencing_token)
        yield "end the attempt"
        with db.transaction() as connection:
            receipt = Receipt(new_id("rcp"), assignment, attempt.id, OPERATOR, ReceiptStatus.COMPLETED, "", "done")
            fencing.finish_own_attempt(connection, attempt, receipt, now=db.now())


def mail(root: Path) -> Iterator[str]:
    """A message from its sending to its end, with a checkpoint before the last write: the log begins anew."""
    yield OPEN
    with closing(Organization(root)) as org:
        yield "send"
        sent = org.send(MASTER, OPERATOR, "subject", "body " * 500)
        yield "claim"
        claimed = relay.claim(org.db, sent.id, OPERATOR)
        yield "checkpoint"
        org.db.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        yield "complete"
        relay.complete(org.db, sent.id, OPERATOR, fencing_token=claimed.fencing_token or 0)


def assistant(root: Path) -> Iterator[str]:
    """A turn of a conversation, from the queue to its answer."""
    yield OPEN
    with closing(Organization(root)) as org:
        yield "enqueue"
        assistant_work.enqueue(org.db, "origin", "session", "What is left?")
        yield "claim"
        claim = assistant_work.claim(org.db, "worker")
        assert claim
        yield "observe"
        assistant_work.observe(org.db, claim, {"role": "assistant", "content": "Vanilla."})
        yield "finish"
        assistant_work.finish(org.db, claim, "DONE", "Vanilla.")


def backup(root: Path) -> Iterator[str]:
    """A sealed copy, and a write after it."""
    yield OPEN
    with closing(Organization(root)) as org:
        yield BACK_UP
        assistant_service.backup(org.db, root / BACKUP)
        yield "send"
        org.send(MASTER, OPERATOR, "subject", "after the backup")


def restore(root: Path) -> Iterator[str]:
    """Back to a backup, with each of its steps."""
    yield OPEN
    with closing(Organization(root)) as org:
        yield RESTORE
        assistant_service.restore(org.db, root / BACKUP, actor=PRINCIPAL, reason="a power cut is tried")
        yield "resume"
        assistant_service.resume(org.db, PRINCIPAL, "it is back")


def epoch(root: Path) -> Iterator[str]:
    """Pause, and take all authority from everybody."""
    yield OPEN
    with closing(Organization(root)) as org:
        yield "pause"
        assistant_service.pause(org.db, PRINCIPAL, "a power cut is tried")
        yield NEW_EPOCH
        assistant_service.new_epoch(org.db, PRINCIPAL, "a power cut is tried")


STORIES: dict[str, Callable[[Path], Iterator[str]]] = {
    story.__name__: story for story in (first_start, run, mail, assistant, backup, restore, epoch)
}


def prepare(root: Path, story: str) -> None:
    """All that is durable before a story begins."""
    if story == first_start.__name__:
        return
    with closing(Organization.init(root)) as org:
        outcome = org.create_outcome("wanted", "so", [], PRINCIPAL)
        org.activate(outcome.id, PRINCIPAL)
        sow = org.create_sow(outcome.id, "scope", "operator", MASTER)
        org.ready_sow(sow.id)
        org.assign(sow.id, OPERATOR, MASTER)
        if story == restore.__name__:
            assistant_service.backup(org.db, root / BACKUP)
            fencing.acquire_actor_lease(org.db, OPERATOR, "proc_before")
            org.send(MASTER, OPERATOR, "subject", "after the backup")
        if story in {restore.__name__, epoch.__name__}:
            _let_out(org.db)


def _let_out(db: Database) -> None:
    """An act that leaves the house after the backup, and whose end nobody has seen."""
    assistant_work.enqueue(db, "origin", "session", "Order tea.")
    claim = assistant_work.claim(db, "worker")
    assert claim
    with db.transaction() as connection:
        at = assistant_work.assert_current(connection, claim)
        effects.intend(connection, "op_before", claim, tool="order", arguments="{}", at=at)


def record_of(story: str, box: Path) -> Recorder:
    """Tell a story in `box`, and write down what happens to the disk; what each commit left is marked in it."""
    prepare(box / ROOT, story)
    recorder, rows = Recorder(box), Rows()
    ledger = recorder.root / ROOT / LEDGER_NAME
    if ledger.exists():
        rows = rows_of(ledger)

    def commits() -> Generator[None, Rows]:
        nonlocal rows
        while True:
            rows = yield
            recorder.note(Mark(rows))

    with recorder.watching(), _commits_told(ledger, commits()):
        for act in STORIES[story](recorder.root / ROOT):
            recorder.note(Mark(rows, act))
        recorder.note(Mark(rows, THE_END))
    return recorder


@contextmanager
def _commits_told(ledger: Path, listener: Generator[None, Rows]) -> Generator[None]:
    """Send the ledger's rows to `listener` whenever a commit to it has returned."""
    commit, replace_content = Connection.commit, sqlite_backup.replace_content

    def committed(self: Connection, owner: Transaction) -> None:
        commit(self, owner)
        if self.authority == ledger.with_suffix(".authority"):
            listener.send(rows_of(ledger))

    def replaced(target: Path, image: Path, **options: Any) -> None:
        replace_content(target, image, **options)
        listener.send(rows_of(ledger))

    next(listener)
    Connection.commit, sqlite_backup.replace_content = committed, replaced
    try:
        yield
    finally:
        Connection.commit, sqlite_backup.replace_content = commit, replace_content


def rows_of(ledger: Path) -> Rows:
    """Everything in a ledger, as statements; the counters of SQLite's own aside."""
    return frozenset(row for row in sqlite_backup.content(ledger) if "sqlite_sequence" not in row)


def _events(rows: Rows) -> int:
    return sum('INTO "events" VALUES' in row for row in rows)


# --- cuts: what a disk may be when the power has gone -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a story is: the act that is under way, those that are done, and the ledger's rows.

    They are `confirmed` by the last commit that has returned; `coming` with the next; the act has them from `before`
    to `after`.
    """

    act: str
    done: frozenset[str]
    confirmed: Rows
    coming: Rows
    before: Rows
    after: Rows


@dataclass(frozen=True, slots=True)
class Cut:
    """The power goes after so many operations: what is `durable` by then, and which changes are not."""

    number: int
    moment: Moment
    durable: Disk
    pending: tuple[Change, ...]


def cuts(recorder: Recorder) -> Iterator[Cut]:
    """The story cut after each of its operations."""
    marks = [operation for operation in recorder.operations if isinstance(operation, Mark)]
    durable, pending, passed = recorder.start.copy(), list[Change](), 0
    for number, operation in enumerate(recorder.operations, 1):
        if isinstance(operation, Mark):
            passed += 1
        elif isinstance(operation, Change):
            pending.append(operation)
        else:
            synced = [change for change in pending if _brings(operation, change)]
            pending = [change for change in pending if not _brings(operation, change)]
            for change in synced:
                durable.apply(change)
        yield Cut(number, _moment(marks, passed), durable.copy(), tuple(pending))


def _moment(marks: list[Mark], passed: int) -> Moment:
    acts = [number for number, mark in enumerate(marks) if mark.act]
    begun = max(number for number in acts if number < passed)
    ended = min((number for number in acts if number >= passed), default=passed - 1)
    return Moment(
        act=marks[begun].act,
        done=frozenset(marks[number].act for number in acts if number < begun),
        confirmed=marks[passed - 1].rows,
        coming=marks[min(passed, len(marks) - 1)].rows,
        before=marks[begun].rows,
        after=marks[ended].rows,
    )


def _brings(sync: Sync | SyncFolder, change: Change) -> bool:
    """Whether a sync makes a change durable."""
    if isinstance(change, Name | Unname):
        return isinstance(sync, SyncFolder) and str(Path(change.path).parent) == sync.path
    return isinstance(sync, Sync) and change.file == sync.file


def fates(pending: tuple[Change, ...], chance: random.Random, reorderings: int) -> Iterator[list[Change]]:
    """What may be left of the changes that were not synced."""
    yield []
    if not pending:
        return
    yield list(pending)
    yield list(pending[1:])
    *earlier, last = pending
    if isinstance(last, Write):
        sectors = list(_sectors(last))
        yield [*earlier, *sectors[: len(sectors) // 2]]
        yield [*earlier, *sectors[len(sectors) // 2 :]]
    names: list[Change] = [change for change in pending if isinstance(change, Name | Unname)]
    yield names
    yield [change for change in pending if change not in names]
    for file in {change.file for change in pending if isinstance(change, Write)}:
        yield [change for change in pending if getattr(change, "file", None) == file]
        yield [change for change in pending if getattr(change, "file", None) != file]
    for _ in range(reorderings):
        share = chance.choice((0.1, 0.5, 0.9))
        yield [part for change in pending for part in _sectors(change) if chance.random() < share]


def _sectors(change: Change) -> Iterator[Change]:
    if not isinstance(change, Write):
        yield change
        return
    at, end = change.offset, change.offset + len(change.data)
    while at < end:
        upto = min(end, at - at % SECTOR_BYTES + SECTOR_BYTES)
        yield Write(change.file, at, change.data[at - change.offset : upto - change.offset])
        at = upto


# --- judging: what the product makes of it ------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """What was tried, how it ended, and every lie that was found, a sentence each."""

    cuts: int = 0
    endings: Counter[str] = field(default_factory=Counter[str])
    findings: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {ending}" for ending, count in sorted(self.endings.items()))
        disks = self.endings.total()
        return f"{self.cuts} cuts, {disks} different disks: {ended}; findings: {len(self.findings)}"


def try_story(
    story: str,
    *,
    reorderings: int,
    seed: int = 0,
    at: Container[int] = EVERYWHERE,
    tell: Callable[[str], object] = bool,
) -> Report:
    """Tell a story, cut it after each operation whose number is in `at` and after the last; judge what may be left.

    `tell` hears before each cut how far that is.
    """
    report, chance, seen = Report(), random.Random(f"{seed} {story}"), set[int]()  # noqa: S311 - to be repeated
    with tempfile.TemporaryDirectory(prefix="power-loss-", dir=_quick()) as box:
        Path(box, "told").mkdir()
        recorder = record_of(story, Path(box, "told"))
        written = recorder.applied.files()
        if written != Disk.of(recorder.root).files():
            report.findings.append(f"{story}: what was written down is not what lies on the disk.")
        settings = written.get(f"{ROOT}/{configuration.FILE_NAME}", b"")
        for cut in cuts(recorder):
            if cut.number not in at and cut.number != len(recorder.operations):
                continue
            report.cuts += 1
            tell(f"{story}: cut {cut.number} of {len(recorder.operations)}")
            for fate in fates(cut.pending, chance, reorderings):
                files = cut.durable.after(fate).files()
                known = hash((cut.moment, tuple(sorted(files.items()))))
                if known in seen:
                    continue
                seen.add(known)
                judge = Judge(Path(box, "left"), cut, files, settings)
                report.endings[judge.ending()] += 1
                where = (
                    f"{story}, cut {cut.number} in {cut.moment.act!r}, {len(fate)} of {len(cut.pending)} changes left"
                )
                report.findings += [f"{where}: {finding}" for finding in judge.findings]
    return report


def _quick() -> str | None:
    """Memory is enough: the power goes in the record, not in the machine."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - below it, in a folder of our own


class Judge:
    """One disk, opened by the product in `box`, and what it found there."""

    def __init__(self, box: Path, cut: Cut, files: dict[str, bytes], settings: bytes) -> None:
        self.box, self.cut, self.now, self.files, self.settings = box, cut, cut.moment, files, settings
        self.root, self.ledger = box / ROOT, box / ROOT / LEDGER_NAME
        self.findings: list[str] = []

    def ending(self) -> str:
        """Open the disk, ask what is asked, and say in a word how it ended."""
        self.lay()
        try:
            return self._begun_again() if self.now.act == FIRST_START else self._opened()
        except SovereignError as error:
            self.findings.append(f"{error} [{error.category}] {error.why}")
            return "at a loss"

    def _begun_again(self) -> str:
        with closing(Organization.init(self.root)) as org:
            self._ask(org.db)
        return "opened"

    def _opened(self) -> str:
        expected = {self.now.confirmed, self.now.coming}
        with closing(Organization(self.root, read_only=True)) as org:  # first: it is neither lied to nor in the way
            if org.db.connection.execute("SELECT count(*) FROM events").rows[0][0] not in map(_events, expected):
                self.findings.append("A reader sees the events of no commit that may be.")
        try:
            with closing(Organization(self.root)) as org:
                self._ask(org.db, expected)
        except SovereignError as error:
            if error.category != REFUSALS.get(self.now.act) or not error.next_command:
                raise
            self._go_on()
            return f"refused ({error.category}) and mended as told"
        return "opened"

    def _go_on(self) -> None:
        if self.now.act == NEW_EPOCH:
            self._mend(lambda db: assistant_service.new_epoch(db, PRINCIPAL, "the power went"))
            return
        self._mend(assistant_service.finish_restore, {self.now.after})
        self.lay()
        self._mend(lambda db: assistant_service.roll_back_restore(db, actor=PRINCIPAL))
        lost = self.now.before - rows_of(self.ledger)
        self.findings += [f"The rollback lost {row}" for row in lost if "assistant_control" not in row]

    def _mend(self, command: Callable[[Database], object], expected: set[Rows] | None = None) -> None:
        with closing(Database(self.ledger, create=False, authority_required=False)) as db:
            command(db)
        with closing(Organization(self.root)) as org:
            self._ask(org.db, expected)

    def _ask(self, db: Database, expected: set[Rows] | None = None) -> None:
        rows = rows_of(self.ledger)
        if expected is not None and rows not in expected:
            gone = len(self.now.confirmed - rows)
            self.findings.append(f"The rows are those of no commit that may be: {gone} that were confirmed are gone.")
        self.findings += violations(db.connection)
        sqlite_backup.require_intact(db.path)
        if (self.root / configuration.FILE_NAME).read_bytes() != self.settings:
            self.findings.append(f"{configuration.FILE_NAME} is not what was written.")
        kept = self.root / BACKUP
        if kept.exists():
            sqlite_backup.take_in(kept, db.path, self.box / "taken")
        elif BACK_UP in self.now.done:
            self.findings.append("The backup that was answered for is not there.")
        relay.send(db, MASTER, OPERATOR, "after", "the power came back")

    def lay(self) -> None:
        """Lay the disk out anew. The shared memory is never synced: nothing is left of it, or noughts, or anything."""
        shutil.rmtree(self.box, ignore_errors=True)
        self.box.mkdir()
        for path, content in self.files.items():
            (self.box / path).parent.mkdir(parents=True, exist_ok=True)
            (self.box / path).write_bytes(content)
        stale = (b"", bytes(len(STALE_SHARED_MEMORY)), STALE_SHARED_MEMORY)[self.cut.number % 3]
        if stale and self.ledger.exists():
            Path(f"{self.ledger}-shm").write_bytes(stale)
        for laid in self.box.rglob("*"):
            os.utime(laid, (0, 0))  # long ago: a reader waits until what was just written can be told from what will be


def main() -> int:
    """Try each story, or those named; print the figures. 0 when nothing was found, 130 when it was ended."""
    parser = argparse.ArgumentParser(description="Cut the power at every point of a story, and open what is left.")
    parser.add_argument("stories", nargs="*", metavar="STORY", help=f"of {', '.join(STORIES)}; by default all")
    parser.add_argument("--reorderings", type=int, default=20, help="random choices at each cut")
    parser.add_argument("--seed", type=int, default=0, help="of those choices")
    options = parser.parse_args()
    if unknown := set(options.stories) - STORIES.keys():
        parser.error(f"there is no story {min(unknown)!r}; there are {', '.join(STORIES)}")
    try:
        with first_signal_interrupts():
            return _tried(options)
    except KeyboardInterrupt:
        return 130


def _tried(options: argparse.Namespace) -> int:
    found, tell = 0, _on_one_line if sys.stderr.isatty() else bool
    for story in options.stories or STORIES:
        report = try_story(story, reorderings=options.reorderings, seed=options.seed, tell=tell)
        tell("")
        print(f"{story:12} {report}", flush=True)  # noqa: T201 - printing is how it answers
        for finding in report.findings:
            print(f"  {finding}")  # noqa: T201
        found += len(report.findings)
    return 1 if found else 0


def _on_one_line(told: str) -> None:
    """Show how far it is, in place of what stood there."""
    print(f"\r\x1b[K{told}", end="", file=sys.stderr, flush=True)  # noqa: T201 - as in `main`


if __name__ == "__main__":
    sys.exit(main())
