"""The power goes at every point of a story, and nothing that was answered for is lost; and the trial of it can fail.

The long form, each cut of each story, is `python -m sovereign_agent.testing.power_loss`, or ``-m torture`` here.
"""

from __future__ import annotations

import itertools
import os
import pty
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import shown_on

from sovereign_agent import assistant_service
from sovereign_agent.database import LEDGER_NAME, Database
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.storage import authority, sqlite, sqlite_backup
from sovereign_agent.testing import power_loss
from sovereign_agent.testing.power_loss import (
    EVERYWHERE,
    NEW_EPOCH,
    OPEN,
    ROOT,
    STORIES,
    Judge,
    cuts,
    record_of,
    try_story,
)
from sovereign_agent.testing.recorder import Disk, Mark, Name, Recorder, Sync, SyncFolder, Write

MARKER = f"{ROOT}/{LEDGER_NAME.with_suffix('.authority')}"
JOURNAL = range(17)
"""The cuts of a first start before there is a log: SQLite still undoes what it writes by a journal."""

LOG_BEGUN = range(1, 8)
"""The cuts around the header of a log."""

MENDED = {"restore": "refused (restore_unfinished)", "epoch": "refused (epoch_replaced)"}


def test_a_run_cut_at_every_point_is_wholly_what_a_commit_left() -> None:
    report = try_story("run", reorderings=0)
    assert (report.findings, set(report.endings)) == ([], {"opened"})
    assert report.cuts > 100
    assert report.endings.total() > 2 * report.cuts


@pytest.mark.parametrize(
    ("story", "every"),
    [("first_start", 24), ("mail", 5), ("assistant", 5), ("backup", 16), ("restore", 71), ("epoch", 6)],
)
def test_a_story_cut_here_and_there_is_wholly_what_a_commit_left(story: str, every: int) -> None:
    report = try_story(story, reorderings=1, at=EVERYWHERE[::every])
    assert report.findings == []
    assert report.endings["opened"]
    assert report.endings["at a loss"] == 0
    assert any(ending.startswith(MENDED.get(story, "opened")) for ending in report.endings)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("story", STORIES)
def test_a_story_cut_at_every_point_is_wholly_what_a_commit_left(story: str) -> None:
    assert try_story(story, reorderings=10).findings == []


def test_hazard_71_a_first_start_cut_before_there_is_a_log_is_made_anew() -> None:
    report = try_story("first_start", reorderings=2, at=JOURNAL)
    assert (report.findings, set(report.endings)) == ([], {"opened"})


def test_a_reader_of_a_first_start_that_was_cut_is_told_what_finishes_it(tmp_path: Path) -> None:
    (tmp_path / "told").mkdir()
    heard = set[str]()
    for cut in itertools.islice(cuts(record_of("first_start", tmp_path / "told")), len(JOURNAL)):
        disk = cut.durable.after(cut.pending).files()
        Judge(tmp_path / "left", cut, disk, b"").lay()
        try:
            Database(tmp_path / "left" / ROOT / LEDGER_NAME, read_only=True).close()
        except SovereignError as refused:
            heard.add(refused.why)
    assert "its first start was interrupted, and `sovereign-agent init` finishes it" in heard


def test_a_log_cut_off_after_its_header_locks_nobody_out() -> None:
    report = try_story("assistant", reorderings=0, at=LOG_BEGUN)
    assert (report.findings, set(report.endings)) == ([], {"opened"})


def test_hazard_76_the_marker_is_durable_before_the_ledger_commits_to_its_epoch(tmp_path: Path) -> None:
    operations = record_of("epoch", tmp_path).operations
    begun = next(n for n, each in enumerate(operations) if isinstance(each, Mark) and each.act == NEW_EPOCH)
    renamed = next(n for n, each in enumerate(operations) if isinstance(each, Name) and each.path == MARKER)
    marker = operations[renamed].file
    steps = [
        next(n for n, each in enumerate(operations) if isinstance(each, Write) and each.file == marker),
        next(n for n, each in enumerate(operations) if each == Sync(marker)),
        renamed,
        next(n for n, each in enumerate(operations) if n > renamed and each == SyncFolder(str(Path(MARKER).parent))),
        next(n for n, each in enumerate(operations) if n > renamed and isinstance(each, Write)),  # to the log
    ]
    assert begun < steps[0]
    assert steps == sorted(steps)
    logged = operations[steps[-1]].file
    assert all(getattr(each, "file", None) != logged for each in operations[begun : steps[-1]])


# --- what a person sees of it -------------------------------------------------------------------------------


def look(root: Path) -> Iterator[str]:
    """A story of a few writes."""
    yield OPEN
    Organization(root).close()


def tried(monkeypatch: pytest.MonkeyPatch, *stories: str) -> int:
    monkeypatch.setattr(sys, "argv", ["power_loss", "--reorderings", "0", *stories])
    monkeypatch.setitem(STORIES, "look", look)
    return power_loss.main()


def test_on_a_terminal_it_shows_which_story_it_is_at_and_how_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert tried(monkeypatch, "look") == 0
    shown = shown_on(ours).decode()
    last = int(shown.rpartition(" of ")[2].split("\r")[0])
    assert shown == "".join(f"\r\x1b[Klook: cut {cut} of {last}" for cut in range(1, last + 1)) + "\r\x1b[K"
    assert capsys.readouterr().out.startswith(f"look         {last} cuts, ")


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_finds_no_folder_of_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(root: Path) -> Iterator[str]:
        yield from look(root)
        assert [*tmp_path.iterdir()]
        signal.raise_signal(number)

    monkeypatch.setattr(power_loss, "_quick", lambda: str(tmp_path))
    monkeypatch.setitem(STORIES, "ended", ended)
    assert tried(monkeypatch, "ended") == 130
    assert [*tmp_path.iterdir()] == []


def test_elsewhere_it_is_quiet_and_a_story_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(monkeypatch, "look") == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit, match="2"):
        tried(monkeypatch, "asistant")
    assert "there is no story 'asistant'; there are first_start, run" in capsys.readouterr().err


# --- what the trial finds when it has to --------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", ["NORMAL", "OFF"])
def test_with_a_session_that_does_not_sync_a_cut_loses_what_was_confirmed(
    synchronous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless = [f"synchronous = {synchronous}" if "synchronous" in each else each for each in sqlite._SESSION]
    monkeypatch.setattr(sqlite, "_SESSION", careless)
    findings = try_story("assistant", reorderings=0, at=EVERYWHERE[::5]).findings
    assert any("that were confirmed are gone" in finding for finding in findings)


def _without_a_sync(folder: int, name: str, content: bytes, *, owner: object) -> None:
    del owner
    temporary = f".{name}.{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT, dir_fd=folder)
    os.write(file, content)
    os.close(file)
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def test_hazard_76_with_a_marker_that_is_not_synced_a_cut_leaves_none_or_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(authority, "replace_file", _without_a_sync)
    findings = try_story("epoch", reorderings=0, at=EVERYWHERE[::5]).findings
    assert {category for finding in findings for category in ("epoch_replaced", "marker_empty") if category in finding}


def test_with_a_backup_that_is_not_synced_a_cut_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_backup, "sync", lambda _: None)
    findings = try_story("backup", reorderings=0, at=EVERYWHERE[::12]).findings
    assert any("The backup that was answered for is not there" in finding for finding in findings)


def test_a_rollback_that_passes_for_the_end_of_a_restore_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    record = power_loss.record_of

    def recorded(story: str, box: Path) -> Recorder:
        recorder = record(story, box)
        monkeypatch.setattr(assistant_service, "finish_restore", assistant_service.roll_back_restore)
        return recorder

    monkeypatch.setattr(power_loss, "record_of", recorded)
    findings = try_story("restore", reorderings=0, at=EVERYWHERE[::97]).findings
    assert any("The rows are those of no commit" in finding for finding in findings)


def test_a_write_that_escapes_the_record_is_noticed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with recorder.watching():
        (tmp_path / "escaped").write_text("nobody saw it")
    assert recorder.applied.files() != Disk.of(tmp_path).files()
