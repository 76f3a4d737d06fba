"""A run's folder: made once, never followed out of, reclaimed by policy and honest about what would not go."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import at_one_barrier, eventually

from sovereign_agent import workspace as room
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
