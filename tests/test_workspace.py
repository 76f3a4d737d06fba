"""A run's folder: made once, never followed out of, reclaimed by policy and honest about what would not go."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import at_one_barrier, child, eventually, heard

from sovereign_agent import workspace as room
from sovereign_agent.boundary import Boundary
from sovereign_agent.errors import PolicyRefusal
from sovereign_agent.workspace import (
    POLICIES,
    Deliverable,
    Reclaim,
    Workspace,
    allocate,
    check_output,
    check_policy,
    check_root,
    collect_deliverables,
    read_bounded,
    reclaim_workspace,
    safe_join,
    write_receipt,
)

pytestmark = pytest.mark.timeout(30)

NOBODY = 65534
OUTWARD = [
    "../ws-evil/x",
    "/etc/hostname",
    "a/../../b",
    "~/.ssh/x",
    "",
    ".",
    "a\0b",
    "x" * 5000,
    "x" * 256,
    "a//b",
    "\ud800",
]
INWARD = ["report.md", "a/b.txt", "a..b", "-rf", "caf\u00e9", "trailing ", "CON", "x" * 255]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An organization's root, beside a tree that nobody may touch."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "ws-evil").mkdir()
    (tmp_path / "ws-evil" / "x").write_text("x")
    (tmp_path / "ws").mkdir()
    return tmp_path / "ws"


@pytest.fixture
def outside(root: Path) -> Iterator[Path]:
    """The tree outside; its names, bytes, modes and times must be the same after the test."""
    before = photograph(root.parent, root)
    yield root.parent / "outside"
    assert photograph(root.parent, root) == before


@pytest.fixture
def run(root: Path) -> Workspace:
    return allocate(root, "run-1")


def photograph(tree: Path, without: Path) -> list[tuple[str, int, int, int, bytes]]:
    seen: list[tuple[str, int, int, int, bytes]] = []
    for path in sorted(tree.rglob("*")):
        if path.is_relative_to(without):
            continue
        info = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        seen.append((str(path), info.st_mode, info.st_mtime_ns if content else 0, info.st_nlink, content))
    return seen


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def category(act: object, *args: object) -> str:
    with pytest.raises(PolicyRefusal) as refused:
        act(*args)  # type: ignore[operator]
    return refused.value.category


# policies, roots, names


def test_only_the_two_policies_are_known() -> None:
    assert category(check_policy, "keep-it-somehow") == "unknown_workspace_policy"
    for policy in POLICIES:
        check_policy(policy)


@pytest.mark.parametrize("part", [".sovereign", ".sovereign/runs"])
def test_a_root_whose_inner_folder_is_a_link_is_refused_before_anything_is_touched(
    root: Path, outside: Path, part: str
) -> None:
    (root / part).parent.mkdir(exist_ok=True)
    (root / part).symlink_to(outside, target_is_directory=True)
    before, beyond = photograph(root, root / "none"), photograph(outside, outside / "none")
    assert category(check_root, root) == "symlinked_workspace_root"
    assert category(allocate, root, "run-1") == "symlinked_workspace_root"
    assert category(write_receipt, root, "run-1", "{}") == "symlinked_workspace_root"
    assert reclaim_workspace(root, "run-1", "temporary_directory").status == "partial"
    assert photograph(root, root / "none") == before
    assert photograph(outside, outside / "none") == beyond


def test_a_file_in_the_place_of_the_inner_folder_is_refused(root: Path) -> None:
    (root / ".sovereign").write_text("")
    assert category(check_root, root) == "symlinked_workspace_root"
    assert category(allocate, root, "run-1") == "symlinked_workspace_root"


def test_a_root_may_itself_be_reached_through_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root, target_is_directory=True)
    check_root(link)
    run = allocate(link, "run-1")
    check_root(link)
    assert run.path == root.resolve() / ".sovereign" / "runs" / "run-1"


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", OUTWARD, ids=range(len(OUTWARD)))
def test_hazard_78_a_name_that_leads_out_is_refused(run: Workspace, name: str) -> None:
    assert category(safe_join, run.out, name) == "path_traversal"
    assert category(read_bounded, run, name, 10) == "path_traversal"
    assert category(collect_deliverables, run, [name]) == "path_traversal"


@pytest.mark.parametrize("name", INWARD, ids=range(len(INWARD)))
def test_hazard_78_a_name_that_leads_in_is_taken(run: Workspace, name: str) -> None:
    path = safe_join(run.out, name)
    assert path.is_relative_to(run.out)
    path.parent.mkdir(exist_ok=True)
    path.write_text("content")
    assert collect_deliverables(run, [name])[0].size == 7


def test_hazard_78_a_join_does_not_pass_through_a_link(run: Workspace, outside: Path) -> None:
    (run.out / "inner").symlink_to(outside, target_is_directory=True)
    (run.out / "real").mkdir()
    assert category(safe_join, run.out, "inner/secret") == "path_traversal"
    assert safe_join(run.out, "real/secret") == run.out / "real" / "secret"


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("bad", ["../../x", "..", ".hidden", "", "a/b", "a\0", "a" * 129, "a\n"], ids=range(8))
def test_hazard_78_the_id_of_a_run_is_a_plain_name(root: Path, bad: str) -> None:
    assert category(allocate, root, bad) == "path_traversal"
    assert category(write_receipt, root, bad, "{}") == "path_traversal"
    assert category(reclaim_workspace, root, bad, "persistent") == "path_traversal"
    assert names(root) == []


# allocating


def test_a_new_run_has_two_inner_folders_for_this_user_only(root: Path) -> None:
    run = allocate(root, "run-1")
    assert names(run.path) == [".sovereign-out", "provider-raw"]
    for folder in (root / ".sovereign", run.path.parent, run.path, run.raw, run.out):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert (run.id, run.raw.name, run.out.name) == ("run-1", "provider-raw", ".sovereign-out")


@pytest.mark.parametrize("kind", ["folder", "file", "link to nothing", "link to a folder"])
def test_hazard_89_a_path_that_is_taken_is_never_used_again(root: Path, outside: Path, kind: str) -> None:
    path = allocate(root, "run-1").path.with_name("run-2")
    match kind:
        case "folder":
            path.mkdir()
        case "file":
            path.write_text("")
        case "link to nothing":
            path.symlink_to(outside / "nothing")
        case _:
            path.symlink_to(outside, target_is_directory=True)
    assert category(allocate, root, "run-2") == "workspace_exists"
    assert allocate(root, "run-3").path.is_dir()


def test_a_lock_beside_the_folder_records_which_folder_was_made(run: Workspace) -> None:
    info = run.path.stat()
    assert run.lock == run.path.with_name("run-1.lock")
    assert run.lock.read_text() == f"{info.st_dev} {info.st_ino}\n"
    assert run.lock.stat().st_mode & 0o777 == 0o600


def test_hazard_89_a_lock_that_is_there_already_is_never_taken_over(root: Path, run: Workspace) -> None:
    shutil.rmtree(run.path)
    before = run.lock.read_text()
    assert category(allocate, root, "run-1") == "workspace_exists"
    assert run.lock.read_text() == before


def _dies_at(pipe: Any, name: str, root: str) -> None:
    """For `child`: allocate a run and die by SIGKILL where the named call of the operating system would come."""
    call = getattr(os, name)

    def dies(first: Any, *args: Any, **options: Any) -> Any:
        if first in ("run-1.lock", room.RAW_NAME) or name == "fsync":
            os.kill(os.getpid(), signal.SIGKILL)
        return call(first, *args, **options)

    setattr(os, name, dies)
    allocate(root, "run-1")
    pipe.send("survived")


@pytest.mark.parametrize("call", ["open", "fsync", "mkdir"])
def test_a_worker_killed_while_it_makes_a_folder_leaves_nothing_that_cannot_be_reclaimed(root: Path, call: str) -> None:
    with child(_dies_at, call, str(root)) as (worker, _):
        worker.join(20)
        assert worker.exitcode == -signal.SIGKILL
    write_receipt(root, "run-1", "{}")
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(root / ".sovereign" / "runs") == ["run-1"]
    assert category(allocate, root, "run-1") == "workspace_exists"


# reading what a program left


@pytest.mark.parametrize("which", ["path", "raw", "out"])
def test_an_output_folder_that_became_a_link_is_refused(run: Workspace, outside: Path, which: str) -> None:
    check_output(run)
    folder: Path = getattr(run, which)
    shutil.move(folder, run.path.with_name("elsewhere"))
    check_output(run)  # gone is no crossing
    folder.symlink_to(outside, target_is_directory=True)
    assert category(check_output, run) == "symlinked_output_directory"


def test_a_file_in_the_place_of_an_output_folder_is_refused(run: Workspace) -> None:
    run.out.rmdir()
    run.out.write_text("")
    assert category(check_output, run) == "symlinked_output_directory"


def test_a_plain_file_is_read_up_to_its_limit_and_a_missing_one_is_none(run: Workspace) -> None:
    (run.out / "report.json").write_bytes(b"0123456789")
    assert read_bounded(run, ".sovereign-out/report.json", 10) == b"0123456789"
    assert category(read_bounded, run, ".sovereign-out/report.json", 9) == "file_too_large"
    assert read_bounded(run, ".sovereign-out/other.json", 10) is None
    assert read_bounded(run, "no/such/folder", 10) is None


def test_a_file_that_grows_while_it_is_read_stops_at_the_limit(run: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CHUNK_BYTES", 4)
    path = run.out / "growing"
    path.write_bytes(b"0123")
    taken: list[bytes] = []

    def grow(chunk: bytes) -> None:
        taken.append(chunk)
        with path.open("ab") as file:
            file.write(b"4567")

    assert category(room._pour, run, ".sovereign-out/growing", 100, grow) == "file_too_large"
    assert len(b"".join(taken)) <= 100


LINKS = ["to a file outside", "to a file inside", "to nothing", "loop", "/dev/zero", "folder outside", "folder inside"]


@pytest.mark.parametrize("kind", LINKS)
def test_hazard_79_no_link_is_followed_for_evidence(run: Workspace, outside: Path, kind: str) -> None:
    (run.path / "inside").mkdir()
    (run.path / "inside" / "secret").write_text("secret")
    targets = {
        "to a file outside": outside / "secret",
        "to a file inside": run.path / "inside" / "secret",
        "to nothing": outside / "nothing",
        "loop": run.out / "report.md",
        "/dev/zero": Path("/dev/zero"),
        "folder outside": outside,
        "folder inside": run.path / "inside",
    }
    name = "report.md"
    if kind.startswith("folder"):
        (run.out / "folder").symlink_to(targets[kind], target_is_directory=True)
        name = "folder/secret"
    else:
        (run.out / name).symlink_to(targets[kind])
    assert category(read_bounded, run, f".sovereign-out/{name}", 100) == "boundary_violated"
    assert category(collect_deliverables, run, [name]) == "boundary_violated"


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "sparse terabyte"])
def test_hazard_83_a_special_file_is_refused_at_once(
    run: Workspace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.out / "report.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            monkeypatch.chdir(run.out)  # a socket's path must be short
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        case "folder":
            path.mkdir()
        case _:
            path.touch()
            os.truncate(path, 2**40)
    expected = "file_too_large" if kind == "sparse terabyte" else "boundary_violated"
    assert category(read_bounded, run, ".sovereign-out/report.json", 2**20) == expected
    assert category(collect_deliverables, run, ["report.json"]) == expected


def test_hazard_87_a_hard_link_is_refused_and_its_other_end_untouched(run: Workspace, outside: Path) -> None:
    os.link(outside / "secret", run.out / "report.md")
    try:
        assert category(read_bounded, run, ".sovereign-out/report.md", 100) == "boundary_violated"
        assert category(collect_deliverables, run, ["report.md"]) == "boundary_violated"
    finally:
        (run.out / "report.md").unlink()
    (run.out / "report.md").write_bytes((outside / "secret").read_bytes())
    assert collect_deliverables(run, ["report.md"])[0].size == 6


def test_hazard_87_another_run_s_deliverable_is_not_handed_over_again(root: Path, run: Workspace) -> None:
    other = allocate(root, "run-2")
    (other.out / "till.txt").write_text("counted")
    os.link(other.out / "till.txt", run.out / "till.txt")
    before = (other.out / "till.txt").stat()
    assert category(collect_deliverables, run, ["till.txt"]) == "boundary_violated"
    assert (other.out / "till.txt").stat() == before


def overwrite(path: Path) -> None:
    """Write the same bytes, and set the time back; what that changes is the time of the change."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def link(path: Path) -> None:
    os.link(path, path.with_name("elsewhere"))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"!")


@pytest.mark.parametrize("change", [overwrite, link, grow])
def test_a_file_that_is_changed_while_it_is_read_is_refused(run: Workspace, change: Callable[[Path], None]) -> None:
    path = run.out / "report.md"
    path.write_bytes(b"finished")
    done: list[bytes] = []

    def meddle(chunk: bytes) -> None:
        done or change(path)
        done.append(chunk)

    assert category(room._pour, run, ".sovereign-out/report.md", 100, meddle) == "boundary_violated"
    path.with_name("elsewhere").unlink(missing_ok=True)
    assert room._pour(run, ".sovereign-out/report.md", 100, done.append) == len(path.read_bytes())


def watched(run: Workspace) -> Workspace:
    """The run as a provider would see it if its program started now."""
    return replace(run, boundary=Boundary(run.path.parents[2], run.path))


def refusal(act: Callable[..., object], *args: object) -> PolicyRefusal:
    with pytest.raises(PolicyRefusal) as refused:
        act(*args)
    return refused.value


@pytest.mark.parametrize("name", ["report.md", "sub/report.md"])
def test_what_stood_there_before_the_program_started_is_stale(run: Workspace, name: str) -> None:
    (run.out / "sub").mkdir()
    path = run.out / name
    path.write_text("yesterday's")
    before = watched(run)
    stale = refusal(collect_deliverables, before, [name])
    assert stale.category == "deliverable_missing"
    assert "stale" in stale.why
    assert category(read_bounded, before, f".sovereign-out/{name}", 100) == "deliverable_missing"
    overwrite(path)  # which is work of this run, if it comes to the same
    assert collect_deliverables(before, [name])[0].size == 11


def test_a_file_that_was_put_in_the_place_of_a_stale_one_is_fresh(run: Workspace) -> None:
    (run.out / "report.md").write_text("the same")
    before = watched(run)
    (run.out / "new").write_text("the same")
    (run.out / "new").rename(run.out / "report.md")
    assert collect_deliverables(before, ["report.md"])[0].size == 8


ALIKE = [("README", "readme"), ("caf\u00e9", "cafe\u0301"), ("stra\u00dfe", "STRASSE"), ("sub/A", "sub/a")]


@pytest.mark.parametrize("pair", ALIKE)
def test_hazard_84_names_that_are_one_on_another_disk_are_refused(run: Workspace, pair: tuple[str, str]) -> None:
    (run.out / "sub").mkdir()
    for name in pair:
        (run.out / name).write_text("content")
    assert category(collect_deliverables, run, pair) == "ambiguous_name"
    for name in pair:
        assert collect_deliverables(run, [name])[0].name == name
    other = "sub/" + unicodedata.normalize("NFC", pair[1])
    (run.out / other).parent.mkdir(exist_ok=True, parents=True)
    (run.out / other).write_text("content")
    assert len(collect_deliverables(run, [pair[0], other])) == 2 or other in pair


def poisoned_archive(outside: Path) -> bytes:
    """A tar with a link out of its folder and a file that an extractor would write through it."""
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode="w") as archive:
        way_out = tarfile.TarInfo("way-out")
        way_out.type, way_out.linkname = tarfile.SYMTYPE, str(outside)
        archive.addfile(way_out)
        for name in ("way-out/secret", "../../../../outside/secret", "/tmp/absolute"):  # noqa: S108 - it is never written
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
    return kept.getvalue()


def test_hazard_86_an_archive_is_a_file_like_any_other_and_nothing_is_unpacked(
    root: Path, run: Workspace, outside: Path
) -> None:
    content = poisoned_archive(outside)
    (run.out / "work.tar").write_bytes(content)
    expected = Deliverable("work.tar", len(content), hashlib.sha256(content).hexdigest())
    assert collect_deliverables(run, ["work.tar"]) == (expected,)
    write_receipt(root, "run-1", "{}")
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.out) == ["work.tar"]


def test_deliverables_are_named_measured_and_summed(run: Workspace) -> None:
    (run.out / "sub").mkdir()
    (run.out / "sub" / "b.txt").write_bytes(b"bb")
    (run.out / "a.txt").write_bytes(b"a")
    assert collect_deliverables(run, ["sub/b.txt", "a.txt"]) == (
        Deliverable("sub/b.txt", 2, hashlib.sha256(b"bb").hexdigest()),
        Deliverable("a.txt", 1, hashlib.sha256(b"a").hexdigest()),
    )
    assert collect_deliverables(run, []) == ()


def test_hazard_08_an_absent_or_empty_deliverable_is_missing(run: Workspace) -> None:
    (run.out / "empty").touch()
    (run.path / "beside").write_text("not in the output")
    for name in ("absent", "empty", "beside"):
        assert category(collect_deliverables, run, [name]) == "deliverable_missing"


# receipts


def test_a_receipt_lies_beside_a_sum_that_sha256sum_reads(root: Path) -> None:
    run = allocate(root, "run-1")
    write_receipt(root, "run-1", '{"status": "failed"}\n')
    assert (run.path / "receipt.json").read_text() == '{"status": "failed"}\n'
    digest, name = (run.path / "receipt.json.sha256").read_text().split()
    assert (digest, name) == (hashlib.sha256(b'{"status": "failed"}\n').hexdigest(), "receipt.json")
    assert {entry.stat().st_mode & 0o777 for entry in run.path.glob("receipt*")} == {0o600}
    assert names(run.path) == [".sovereign-out", "provider-raw", "receipt.json", "receipt.json.sha256"]


def test_a_receipt_makes_the_folder_that_is_gone(root: Path) -> None:
    write_receipt(root, "run-1", "{}")
    assert names(root / ".sovereign" / "runs" / "run-1") == ["receipt.json", "receipt.json.sha256"]


def test_a_receipt_replaces_a_planted_link_and_does_not_write_through_it(root: Path, outside: Path) -> None:
    run = allocate(root, "run-1")
    (run.path / "receipt.json").symlink_to(outside / "secret")
    write_receipt(root, "run-1", "{}")
    assert not (run.path / "receipt.json").is_symlink()
    assert (run.path / "receipt.json").read_text() == "{}"


def test_a_receipt_is_not_laid_behind_a_planted_folder_link(root: Path, outside: Path) -> None:
    run = allocate(root, "run-1")
    shutil.rmtree(run.path)
    run.path.symlink_to(outside, target_is_directory=True)
    with pytest.raises(OSError, match="run-1"):
        write_receipt(root, "run-1", "{}")


WRITER = """
import sys
from sovereign_agent.workspace import write_receipt
while True:
    for letter in "ab":
        write_receipt(sys.argv[1], "run-1", letter * 100_000)
"""


def test_a_killed_writer_leaves_a_whole_receipt(root: Path) -> None:
    receipt = root / ".sovereign" / "runs" / "run-1" / "receipt.json"
    whole = {"a" * 100_000, "b" * 100_000}
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(root)])
        try:
            eventually(receipt.exists)
            for _ in range(50):
                assert receipt.read_text() in whole
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait(10)
        assert receipt.read_text() in whole


# reclaiming


def fill(run: Workspace) -> None:
    (run.raw / "stdout.log").write_text("half a stream")
    (run.path / "scratch" / "deep").mkdir(parents=True)
    (run.path / "scratch" / "deep" / "file").write_text("")
    (run.path / "report.json").write_text('{"status": "completed"}')
    (run.out / "report.json").write_text("{}")
    (run.out / "keep").mkdir()
    (run.out / "keep" / "deliverable").write_text("")
    write_receipt(run.path.parents[2], run.id, "{}")


KEPT = [".sovereign-out", "receipt.json", "receipt.json.sha256", "report.json"]


def test_a_temporary_folder_keeps_its_evidence_and_nothing_else(root: Path, run: Workspace) -> None:
    fill(run)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == KEPT
    assert (run.out / "keep" / "deliverable").exists()
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")  # again: nothing more
    assert names(run.path) == KEPT


def test_a_persistent_folder_keeps_everything(root: Path, run: Workspace) -> None:
    fill(run)
    before = photograph(run.path, root.parent / "none")
    assert reclaim_workspace(root, "run-1", "persistent") == Reclaim("kept")
    assert photograph(run.path, root.parent / "none") == before


@pytest.mark.parametrize("policy", POLICIES)
def test_a_folder_that_is_not_there_is_absent(root: Path, policy: str) -> None:
    assert reclaim_workspace(root, "run-9", policy) == Reclaim("absent")
    assert names(root) == []
    assert reclaim_workspace(root / "no-such-root", "run-9", policy) == Reclaim("absent")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lock_goes_with_the_last_act_of_reclaiming_and_a_second_call_changes_nothing(
    root: Path, run: Workspace, policy: str
) -> None:
    fill(run)
    first = reclaim_workspace(root, "run-1", policy)
    assert not run.lock.exists()
    assert reclaim_workspace(root, "run-1", policy) == first
    write_receipt(root, "run-1", "{}")  # as a tick does that did not see the first call's end
    assert reclaim_workspace(root, "run-1", policy) == first


def test_the_lock_of_a_folder_that_is_gone_goes_too(root: Path, run: Workspace) -> None:
    shutil.rmtree(run.path)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("absent")
    assert not run.lock.exists()


def _guards(pipe: Any, lock: str) -> None:
    """For `child`: hold a run's lock alone, as a guardian does, until it is told to end or is killed."""
    with Path(lock).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pipe.send("guarding")
        pipe.recv()


@pytest.mark.parametrize("end", ["ends", "is killed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_hazard_89_nothing_is_touched_while_the_program_is_still_being_ended(
    root: Path, run: Workspace, policy: str, end: str
) -> None:
    fill(run)
    before = photograph(root, root / "none")
    with child(_guards, str(run.lock)) as (guardian, pipe):
        assert heard(pipe) == "guarding"
        reclaim = reclaim_workspace(root, "run-1", policy)
        assert (reclaim.status, reclaim.is_done) == ("busy", False)
        assert "still being ended" in reclaim.leftovers[0]
        assert photograph(root, root / "none") == before
        guardian.kill() if end == "is killed" else pipe.send("end")
        guardian.join(20)
        assert reclaim_workspace(root, "run-1", policy).status in ("reclaimed", "kept")


def _reclaim_once(_: int, root: str) -> str:
    return reclaim_workspace(root, "run-1", "temporary_directory").status


def test_of_many_who_tidy_up_at_once_none_calls_it_done_before_it_is(root: Path, run: Workspace) -> None:
    fill(run)
    for number in range(300):
        (run.path / f"folder-{number}").mkdir()
        (run.path / f"folder-{number}" / "file").touch()
    statuses = set(at_one_barrier(4, _reclaim_once, str(root)))
    assert "reclaimed" in statuses <= {"reclaimed", "busy"}
    assert names(run.path) == KEPT
    assert names(run.path.parent) == ["run-1"]


@pytest.mark.parametrize("content", ["precious", "receipt.json"])
def test_another_folder_in_the_place_of_a_run_s_is_not_touched(root: Path, run: Workspace, content: str) -> None:
    fill(run)
    own = run.path.rename(root / "own")
    run.path.mkdir()
    (run.path / content).mkdir()
    (run.path / content / "file").write_text("precious")
    run.path.chmod(0o500)
    before = photograph(root, root / "none")
    reclaim = reclaim_workspace(root, "run-1", "temporary_directory")
    assert reclaim.status == "partial"
    assert "not the folder that was made for this run" in reclaim.leftovers[0]
    assert category(write_receipt, root, "run-1", "{}") == "workspace_replaced"
    assert photograph(root, root / "none") == before
    shutil.rmtree(run.path)
    own.rename(run.path)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == KEPT


def test_a_folder_made_anew_for_the_receipt_alone_is_as_good(root: Path, run: Workspace) -> None:
    own = run.path.rename(root / "own")
    write_receipt(root, "run-1", "{}")
    assert run.path.stat().st_ino != own.stat().st_ino
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == ["receipt.json", "receipt.json.sha256"]
    assert not run.lock.exists()


def test_a_folder_whose_lock_is_gone_is_not_touched(root: Path, run: Workspace) -> None:
    fill(run)
    run.lock.unlink()
    before = photograph(root, root / "none")
    reclaim = reclaim_workspace(root, "run-1", "temporary_directory")
    assert reclaim.status == "partial"
    assert "Its lock is gone" in reclaim.leftovers[0]
    assert "remove it by hand" in reclaim.leftovers[0]
    assert photograph(root, root / "none") == before


def test_hazard_89_what_an_orphan_leaves_after_all_was_tidied_is_reported_and_never_touched(
    root: Path, run: Workspace
) -> None:
    fill(run)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    run.raw.mkdir()
    (run.raw / "late").write_text("an orphan's")
    assert reclaim_workspace(root, "run-1", "temporary_directory").status == "partial"
    assert (run.raw / "late").exists()
    assert category(allocate, root, "run-1") == "workspace_exists"


def test_a_folder_is_known_again_after_the_host_has_numbered_its_disks_anew(root: Path, run: Workspace) -> None:
    fill(run)
    run.lock.write_text(f"1 {run.path.stat().st_ino}\n")
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == KEPT


def test_an_unknown_policy_reclaims_nothing(root: Path, run: Workspace) -> None:
    fill(run)
    assert category(reclaim_workspace, root, "run-1", "shred") == "unknown_workspace_policy"
    assert (run.raw / "stdout.log").exists()


def test_hazard_81_links_are_removed_and_their_targets_stay(root: Path, run: Workspace, outside: Path) -> None:
    (run.path / "to-folder").symlink_to(outside, target_is_directory=True)
    (run.path / "to-link").symlink_to(run.path / "to-folder")
    (run.path / "report.json").symlink_to(outside / "secret")  # a kept name protects no link
    (run.path / "sub").mkdir()
    (run.path / "sub" / "to-file").symlink_to(outside / "secret")
    (run.path / "loop").symlink_to(run.path / "loop")
    os.mkfifo(run.path / "pipe")
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == [".sovereign-out"]


def test_hazard_81_a_hard_link_goes_and_its_other_end_stays(root: Path, run: Workspace) -> None:
    secret = root.parent / "outside" / "secret"
    os.link(secret, run.path / "hard")
    secret.chmod(0o444)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert (secret.read_text(), secret.stat().st_mode & 0o777, secret.stat().st_nlink) == ("secret", 0o444, 1)


@pytest.mark.parametrize("kind", ["out folder", "run folder"])
def test_hazard_81_a_link_in_the_place_of_a_folder_goes_alone(
    root: Path, run: Workspace, outside: Path, kind: str
) -> None:
    path = run.out if kind == "out folder" else run.path
    shutil.rmtree(path)
    path.symlink_to(outside, target_is_directory=True)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert not path.is_symlink()


def test_hazard_81_a_mount_point_is_not_entered(root: Path, run: Workspace, outside: Path) -> None:
    mounted = run.path / "sub" / "mounted"
    mounted.mkdir(parents=True)
    bound = subprocess.run(["mount", "--bind", outside, mounted], capture_output=True, check=False)
    if bound.returncode:
        pytest.skip(f"no bind mount here: {bound.stderr!r}")
    moved: list[Path] = []
    before = outside.stat().st_mode
    try:
        reclaim = reclaim_workspace(root, "run-1", "temporary_directory")
        moved = [path / "mounted" for path in run.path.glob("reclaiming-*")]
    finally:
        subprocess.run(["umount", *(moved or [mounted])], check=True)
    assert outside.stat().st_mode == before
    assert reclaim.status == "partial"
    assert any("sub/mounted" in line and "busy" in line for line in reclaim.leftovers)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")


def test_hazard_84_any_name_goes(root: Path, run: Workspace) -> None:
    for name in [b"\xff", b"new\nline", b"-rf", b"trailing ", b"caf\xc3\xa9", b"cafe\xcc\x81", b"x" * 255, b"*"]:
        folder = run.path / os.fsdecode(name)
        folder.mkdir()
        (folder / os.fsdecode(name)).touch()
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == [".sovereign-out"]


def test_any_depth_goes(root: Path, run: Workspace) -> None:
    here = os.open(run.path, os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("deeper", dir_fd=here)
        below = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == [".sovereign-out"]


def test_any_width_goes(root: Path, run: Workspace) -> None:
    wide = run.path / "wide"
    wide.mkdir()
    for number in range(50_000):
        os.close(os.open(wide / f"file-{number}", os.O_WRONLY | os.O_CREAT))
    assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == [".sovereign-out"]


def test_hazard_83_special_files_go_and_none_is_opened(
    root: Path, run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(run.path / "pipe")
    os.mkfifo(run.path / "receipt.json")  # a kept name protects no pipe
    (run.path / "sparse").touch()
    os.truncate(run.path / "sparse", 2**40)
    monkeypatch.chdir(run.raw)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        if os.geteuid() == 0:
            os.mknod(run.path / "device", 0o600 | 0o020000, os.makedev(1, 5))
        assert reclaim_workspace(root, "run-1", "temporary_directory") == Reclaim("reclaimed")
    assert names(run.path) == [".sovereign-out"]


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A root that belongs to nobody, where modes mean something."""
    root = Path(tempfile.mkdtemp())
    if os.geteuid() == 0:
        os.chown(root, NOBODY, NOBODY)
    yield root
    shutil.rmtree(root)


def _reclaim_locked(_: int, root: str) -> tuple[str, tuple[str, ...], list[str], str]:
    become_nobody()
    run = allocate(root, "run-1")
    for mode in (0o555, 0o000):
        folder = run.path / f"locked-{mode:o}" / "inner"
        folder.mkdir(parents=True)
        (folder / "file").write_text("")
        folder.chmod(mode)
        folder.parent.chmod(mode)
    run.raw.chmod(0)
    run.path.chmod(0)
    reclaim = reclaim_workspace(root, "run-1", "temporary_directory")
    left = names(run.path)
    run.path.chmod(0o555)
    write_receipt(root, "run-1", "{}")
    return reclaim.status, reclaim.leftovers, left, (run.path / "receipt.json").read_text()


def test_hazard_82_a_tree_that_its_owner_locked_goes_all_the_same(open_root: Path) -> None:
    assert at_one_barrier(1, _reclaim_locked, str(open_root)) == [("reclaimed", (), [".sovereign-out"], "{}")]


def _reclaim(_: int, root: str) -> list[tuple[str, tuple[str, ...]]]:
    become_nobody()
    tries = [reclaim_workspace(root, "run-1", "temporary_directory") for _ in range(2)]
    return [(reclaim.status, reclaim.leftovers) for reclaim in tries]


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to leave a file of somebody else")
def test_hazard_82_what_belongs_to_somebody_else_is_reported_and_never_called_reclaimed(open_root: Path) -> None:
    run = allocate(open_root, "run-1")
    shared = run.path / "shared"
    shared.mkdir()
    for number in range(30):
        (shared / f"file-{number}").touch()
    shared.chmod(0o1777)
    (run.path / "mine").touch()
    for path in [open_root / ".sovereign", run.path.parent, run.lock, run.path, run.raw, run.out, run.path / "mine"]:
        os.chown(path, NOBODY, NOBODY)
    ((first, second),) = at_one_barrier(1, _reclaim, str(open_root))
    assert first[0] == second[0] == "partial"
    assert all(line.startswith("shared/file-") for line in first[1][:-1])
    assert not (run.path / "mine").exists()
    assert len(list(run.path.rglob("file-*"))) == 30
    assert reclaim_workspace(open_root, "run-1", "temporary_directory") == Reclaim("reclaimed")  # root may


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to leave files of somebody else")
def test_hazard_82_the_list_of_leftovers_is_bounded_and_printable(open_root: Path) -> None:
    run = allocate(open_root, "run-1")
    run.path.chmod(0o1777)
    for number in range(30):
        (run.path / os.fsdecode(b"\xff%d" % number)).touch()
    for path in [open_root / ".sovereign", run.path.parent, run.lock]:
        os.chown(path, NOBODY, NOBODY)
    (((status, leftovers), _),) = at_one_barrier(1, _reclaim, str(open_root))
    assert (status, len(leftovers), leftovers[-1]) == ("partial", room.LEFTOVERS_SHOWN + 1, "and more")
    assert "\\xff" in "".join(leftovers)
    "".join(leftovers).encode()
