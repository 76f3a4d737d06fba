"""sovereign.toml: what can be meant is loaded, and what cannot is refused with its key, line, reason and mend."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from support import at_one_barrier, eventually

from sovereign_agent.configuration import FILE_NAME, Settings, default_text, load, set_actor_provider
from sovereign_agent.errors import ConfigurationFault
from sovereign_agent.records import Role

pytestmark = pytest.mark.timeout(60)

GOOD = """\
[organization]
name = "Lucy's shop"

[ledger]
url = ""

[actors.operator-course]   # the hands
role = "operator"
provider = "mine"          # keep me
authority = ["execute"]

[actors.principal-human]
role = "principal"
provider = "none"
authority = ["accept", "rule"]

[providers.mine]
kind = "command"
argv = ["python3", "worker.py"]
environment = ["MY_KEY"]
timeout_seconds = 1.5

[providers.other]
kind = "scripted"
steps = [{ sleep = 0.1 }, { exit = 3 }]

[checks]
full = "shop.checks:full"

[extensions]
store = "shop.tables:MIGRATIONS"
"""


def write(root: Path, text: str) -> Path:
    path = root / FILE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def refusal(root: Path) -> ConfigurationFault:
    with pytest.raises(ConfigurationFault) as refused:
        load(root)
    assert FILE_NAME in str(refused.value)
    assert str(root / FILE_NAME) in refused.value.inspect
    assert refused.value.next_command
    return refused.value


def test_a_whole_file_becomes_typed_settings(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    settings = load(tmp_path)
    assert settings.actor("operator-course").role is Role.OPERATOR
    assert settings.actor("operator-course").authority == ("execute",)
    mine, other = settings.providers["mine"], settings.providers["other"]
    assert mine.kind == "command"
    assert (mine.argv, mine.environment, mine.timeout_seconds) == (("python3", "worker.py"), ("MY_KEY",), 1.5)
    assert other.kind == "scripted"
    assert [step.model_dump(exclude_none=True) for step in other.steps] == [{"sleep": 0.1}, {"exit": 3}]
    assert settings.checks == {"full": "shop.checks:full"}
    assert settings.extensions == {"store": "shop.tables:MIGRATIONS"}
    assert (settings.authority.actor_lease_seconds, settings.authority.execution_attempt_seconds) == (60, 60)


def test_settings_are_frozen(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).organization.name = "another"  # type: ignore[misc]


def test_the_default_file_loads_and_declares_the_roster_of_the_course() -> None:
    settings = Settings.model_validate(tomllib.loads(default_text()))
    roster = {name: actor.role.value for name, actor in settings.actors.items()}
    assert roster == {
        "principal-human": "principal",
        "master-course": "master",
        "operator-course": "operator",
        "sparring-course": "sparring",
        "verifier-course": "verifier",
    }


@pytest.mark.parametrize(
    "table", ["[providers.claude]", "[providers.thinker]", "[providers.mine]", "[checks]", "[extensions]"]
)
def test_what_the_default_file_shows_in_comments_loads_too(tmp_path: Path, table: str) -> None:
    lines = default_text().split("\n")
    start = next(n for n, line in enumerate(lines) if line.removeprefix("# ").startswith(table))
    for number in range(start, len(lines)):
        bare = lines[number].removeprefix("# ")
        if not lines[number]:
            break
        if "=" in bare.split("#")[0] or bare.startswith("["):
            lines[number] = bare
    write(tmp_path, "\n".join(lines))
    name = table.strip("[]").split(".")[0]
    assert len(getattr(load(tmp_path), name)) == (2 if name == "providers" else 1)


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        ('provider = "mine"', 'provider = "mien"', "actors.operator-course.provider", "no provider has that name"),
        ("timeout_seconds = 1.5", "timeout_seconds = -1", "providers.mine.timeout_seconds", "must be greater than 0"),
        ("timeout_seconds = 1.5", "timeout_seconds = nan", "providers.mine.timeout_seconds", "finite"),
        ("timeout_seconds = 1.5", "timeout_seconds = inf", "providers.mine.timeout_seconds", "finite"),
        ("timeout_seconds = 1.5", "timeout_seconds = true", "providers.mine.timeout_seconds", "must be a valid number"),
        ("timeout_seconds = 1.5", 'timeout_seconds = "1"', "providers.mine.timeout_seconds", "number"),
        ("timeout_seconds = 1.5", "timeuot_seconds = 1.5", "providers.mine.timeuot_seconds", "no such key"),
        ('argv = ["python3", "worker.py"]', "argv = []", "providers.mine.argv", "at least 1"),
        ('argv = ["python3", "worker.py"]', 'argv = "python3"', "providers.mine.argv", "not a list"),
        ('"worker.py"]', '"a\\u0000b"]', "providers.mine.argv.1", "NUL"),
        ('environment = ["MY_KEY"]', 'environment = ["A=B"]', "providers.mine.environment.0", "form"),
        ('kind = "command"', 'kind = "magic"', "providers.mine", "kind"),
        ('kind = "command"', 'kind = "model"', "providers.mine.model", "required"),
        ('kind = "command"\n', "", "providers.mine", "kind"),
        ('authority = ["execute"]', "authority = []", "actors.operator-course.authority", "without authority"),
        ('authority = ["execute"]', 'authority = ["fly"]', "actors.operator-course.authority.0", "'execute'"),
        ('authority = ["execute"]\n', "", "actors.operator-course.authority", "required"),
        ('provider = "mine"', 'provider = "none"', "actors.operator-course.provider", "runs nothing"),
        ('role = "operator"', 'role = "chief"', "actors.operator-course.role", "operator"),
        ("[actors.operator-course]", "[actors.Operator]", "actors.Operator", "form"),
        ("[actors.operator-course]", '[actors."../../x"]', "actors.../../x", "form"),
        ("[actors.operator-course]", f"[actors.{'a' * 65}]", f"actors.{'a' * 65}", "form"),
        ("[providers.other]", "[providers.none]", "providers.none", "none"),
        (
            "steps = [{ sleep = 0.1 }, ",
            "steps = [{ sleep = 0.1, exit = 1 }, ",
            "providers.other.steps.0",
            "exactly one",
        ),
        ("steps = [{ sleep = 0.1 }, ", 'steps = [{ wait_for = "x" }, ', "providers.other.steps.0", "needs the other"),
        ("{ exit = 3 }", "{ exit = 256 }", "providers.other.steps.1.exit", "must be less than or equal to 255"),
        ('full = "shop.checks:full"', 'full = "shop.checks"', "checks.full", "form"),
        ('full = "shop.checks:full"', 'full = "os:system(1)"', "checks.full", "form"),
        ('name = "Lucy\'s shop"', 'name = ""', "organization.name", "must have at least 1 character"),
        ('url = ""', 'url = "mysql://host/db"', "ledger.url", "postgresql://"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_key_and_line(
    tmp_path: Path, old: str, new: str, key: str, words: str
) -> None:
    assert old in GOOD
    write(tmp_path, GOOD.replace(old, new))
    error = refusal(tmp_path)
    assert f": {key}: " in str(error)
    assert words in str(error)
    assert ", line " in error.inspect


def test_the_line_is_the_one_where_the_key_stands(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("timeout_seconds = 1.5", "timeout_seconds = 0"))
    line = GOOD.split("\n").index("timeout_seconds = 1.5") + 1
    assert refusal(tmp_path).inspect.endswith(f", line {line}")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@host/db",
        "postgres://host/db?password=hunter2",
        "postgres://h/db?sslpassword=hunter2",
        "host=h password=hunter2",
    ],
)
def test_a_password_in_the_url_is_refused_and_never_repeated(tmp_path: Path, url: str) -> None:
    write(tmp_path, GOOD.replace('url = ""', f'url = "{url}"'))
    error = refusal(tmp_path)
    assert "ledger.url" in str(error)
    assert error.__cause__ is None
    assert "hunter2" not in f"{error} {error.__notes__} {error.__context__}"


@pytest.mark.parametrize(
    "url", ["postgresql://u@host/db", "postgres://host:5433/db?sslmode=require", "postgresql:///db"]
)
def test_a_url_without_a_password_is_taken(tmp_path: Path, url: str) -> None:
    write(tmp_path, GOOD.replace('url = ""', f'url = "{url}"'))
    assert load(tmp_path).ledger.url == url


def test_short_leases_are_allowed_for_demonstrations(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "\n[authority]\nactor_lease_seconds = 0.5\nexecution_attempt_seconds = 1\n")
    authority = load(tmp_path).authority
    assert (authority.actor_lease_seconds, authority.execution_attempt_seconds) == (0.5, 1)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    error = refusal(tmp_path)
    assert "no such file" in str(error)
    assert "sovereign-agent init" in error.next_command


def test_a_folder_in_its_place_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert "cannot be read" in str(refusal(tmp_path))


def test_bytes_that_are_not_utf_8_are_refused_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(GOOD.encode() + b"# caf\xe9\n")
    assert "UTF-8" in str(refusal(tmp_path))
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(tmp_path).organization.name == "Lucy's shop"


@pytest.mark.parametrize("text", ["[organization\nname = 1", "a = " + "[" * 10_000, "a = 1\na = 2\n"])
def test_what_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert "not TOML" in str(refusal(tmp_path))


def test_an_unknown_actor_is_named_together_with_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(ConfigurationFault) as refused:
        load(tmp_path).actor("nobody")
    assert "nobody" in str(refused.value)
    assert "operator-course, principal-human" in refused.value.why


def test_binding_an_actor_changes_one_value_and_keeps_every_comment(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    path.chmod(0o640)
    set_actor_provider(tmp_path, "operator-course", "other")
    assert path.read_text() == GOOD.replace('provider = "mine"          #', 'provider = "other"          #')
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    ("actor", "provider"), [("nobody", "other"), ("operator-course", "nothing"), ("operator-course", "a\0")]
)
def test_binding_to_what_is_not_there_writes_nothing(tmp_path: Path, actor: str, provider: str) -> None:
    path = write(tmp_path, GOOD)
    before = path.stat()
    with pytest.raises(ConfigurationFault):
        set_actor_provider(tmp_path, actor, provider)
    assert path.read_text() == GOOD
    assert path.stat().st_ino == before.st_ino


def test_binding_follows_a_link_to_the_file_and_leaves_the_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    path = write(tmp_path / "kept", GOOD)
    (tmp_path / FILE_NAME).symlink_to(path)
    set_actor_provider(tmp_path, "operator-course", "other")
    assert (tmp_path / FILE_NAME).is_symlink()
    assert 'provider = "other"' in path.read_text()


EDITOR = """
import sys
from sovereign_agent.configuration import set_actor_provider
while True:
    for provider in ("other", "mine"):
        set_actor_provider(sys.argv[1], "operator-course", provider)
"""


def test_a_killed_edit_leaves_a_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    whole = {GOOD, GOOD.replace('provider = "mine"  ', 'provider = "other"  ')}
    for _ in range(5):
        started = path.stat().st_ino
        editor = subprocess.Popen([sys.executable, "-c", EDITOR, str(tmp_path)])
        try:
            eventually(lambda started=started: path.stat().st_ino != started)
            for _ in range(50):
                assert path.read_text() in whole
        finally:
            editor.send_signal(signal.SIGKILL)
            editor.wait(10)
        assert path.read_text() in whole


def _fill_the_disk(_: int, root: str) -> tuple[str, list[str]]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    try:
        set_actor_provider(root, "operator-course", "other")
    except OSError as error:
        return type(error).__name__, sorted(path.name for path in Path(root).iterdir())
    return "no error", []


def test_a_full_disk_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert at_one_barrier(1, _fill_the_disk, str(tmp_path)) == [("OSError", [FILE_NAME])]
    assert path.read_text() == GOOD


def _read_as_nobody(_: int, root: str) -> str:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        return load(root).organization.name
    except ConfigurationFault as error:
        return str(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become somebody else")
def test_a_file_of_somebody_else_is_unreadable_and_says_so() -> None:
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        path = write(root, GOOD)
        path.chmod(0o600)
        assert "cannot be read (Permission denied)" in at_one_barrier(1, _read_as_nobody, str(root))[0]
        path.chmod(0o644)
        assert at_one_barrier(1, _read_as_nobody, str(root)) == ["Lucy's shop"]
    finally:
        shutil.rmtree(root)
