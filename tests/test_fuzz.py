"""Bytes from outside against every reader of them: each is taken, or refused in the house's own words.

A reader never ends the process with anything else, never hangs and never keeps more than its bound. What is thrown at
it are bytes without a meaning, the words of its own language in a senseless order, and good text with a few bytes
changed. The short form runs with every suite, the same examples each time; the long one is marked ``torture``. What
they have found stands here as examples of its own.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_streams import GOOD, lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sovereign_agent import cli, configuration, llm_lab, tool_dispatch
from sovereign_agent.commands import answering
from sovereign_agent.configuration import AgentSettings, default_text
from sovereign_agent.database import LEDGER_NAME
from sovereign_agent.errors import SovereignError
from sovereign_agent.organization import Organization
from sovereign_agent.providers import DIALECTS, agent, base, stream
from sovereign_agent.providers.model import read_event
from sovereign_agent.providers.process import Leash
from sovereign_agent.providers.stream import KEPT, Event, Stream
from sovereign_agent.storage import authority, sqlite_backup
from sovereign_agent.testing.schedules import from_script
from sovereign_agent.workspace import allocate

Act = Callable[[bytes], object]
EPOCH = b"epoch_0123456789abcdef0123456789abcdef\n"
REPORT = b'{"status": "completed", "summary": "s", "deliverables": ["a"], "proposal": {"k": [1, 2.5, null]}}'
REPLY = (
    b'{"choices": [{"message": {"content": "hi", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments":'
    b' "{}"}}]}, "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}'
)
SCRIPT = b'[{"calls": [{"name": "sell", "arguments": {"piece": 1}}]}, {"text": "Done."}]'
MODEL = lines(
    {"type": "begun", "session": "s"},
    {"type": "call", "id": "c", "tool": "t"},
    {"type": "answer", "id": "c"},
    {"type": "end", "category": "", "text": "done", "figures": {"n": 1}},
)
HOSTILE = [
    b"[" * 5_000,
    b'{"a":' * 5_000,
    b"9" * 5_000,
    b"1e999",
    b"NaN",
    b"-Infinity",
    b'"\\ud800"',
    b'"\\u0000"',
    b"\xff",
    b"\0",
    b"\xef\xbb\xbf",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"-1",
    b"\n",
]
WORDS = st.sampled_from(HOSTILE)


@st.composite
def altered(draw: st.DrawFn, good: bytes) -> bytes:
    """Good text with up to three places changed, cut or doubled."""
    text = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 24)))
        text[start:end] = draw(WORDS | st.binary(max_size=6) | st.just(bytes(text[start:end]) * 2))
    return bytes(text)


@st.composite
def reworded(draw: st.DrawFn, good: Any) -> bytes:
    """The JSON of a good value with some of its parts replaced by values of other kinds."""
    other = st.sampled_from([None, True, -1, 2.5, 10**30, "", "x" * 300, [], {}, [[]], {"a": {}}, ["s", None], {"": 0}])

    def changed(value: Any) -> Any:
        if draw(st.integers(0, 5)) == 0:
            return draw(other)
        if isinstance(value, dict):
            return {key: changed(inner) for key, inner in value.items() if draw(st.integers(0, 9))}
        return [changed(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(changed(good)).encode()


def hostile(good: bytes) -> st.SearchStrategy[bytes]:
    return altered(good) | st.lists(WORDS | st.binary(max_size=8), max_size=6).map(b"".join)


def fuzz(strategy: st.SearchStrategy[Any], act: Callable[[Any], object], examples: int) -> None:
    """Try so many values; whatever `act` raises is the finding, with the least value that shows it."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def tried(value: Any) -> None:
        act(value)

    tried()


# --- the readers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """One reader: what it is thrown, and an act that raises for anything but an answer or the house's own refusal."""

    thrown: st.SearchStrategy[Any]
    reads: Callable[[Path, Any], object]


def takes_or_refuses(read: Callable[[Any], object], *refusals: type[Exception]) -> Callable[[Path, Any], object]:
    def act(_folder: Path, content: Any) -> None:
        with suppress(SovereignError, *refusals):
            read(content)

    return act


def in_a_file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def act(folder: Path, content: bytes) -> None:
        file = folder / name
        file.write_bytes(content)
        takes_or_refuses(read)(folder, file)

    return act


def heard(read: stream.Read) -> Callable[[Path, bytes], object]:
    """A whole stream, in pieces of an odd size; its testimony can be kept by every ledger."""

    def act(_folder: Path, content: bytes) -> None:
        told = Stream(read, Leash())
        for start in range(0, len(content), 97):
            told.take(content[start : start + 97])
        told.close()
        told.seen()
        text = json.dumps(told.testimony.detail(), allow_nan=False, ensure_ascii=False) + told.testimony.words()
        assert "\0" not in text
        text.encode()

    return act


def a_stream(good: list[Event]) -> st.SearchStrategy[bytes]:
    return hostile(lines(*good)) | st.lists(st.sampled_from(good).flatmap(reworded), max_size=8).map(b"\n".join)


def rebound(folder: Path) -> None:
    """What can be loaded can be edited: the actor then has that provider, and nothing else has changed."""
    before = configuration.load(folder)
    actor = next(iter(before.actors))
    name = next(iter(before.providers), configuration.NO_PROVIDER)
    configuration.set_actor_provider(folder, actor, name)
    after = configuration.load(folder)
    assert after.actors[actor].provider == name
    assert after.model_copy(update={"actors": before.actors}) == before


TOML_WORDS = [
    *['a = 1\n["b"]\n', "[actors.x]\n", "[[actors]]\n", '"""', "'''", "= ", "{ a = 1 }", "[providers.p]\n", "\\u0000"],
    *["kind = 'command'\nargv = ['x']\n", "a.b.c = 1\n", "1979-05-27T07:32:00Z", "0x", "inf", "authority = []\n", "\r"],
]
TOML = altered(default_text().encode()) | st.lists(
    st.sampled_from([word.encode() for word in TOML_WORDS]) | WORDS, max_size=8
).map(lambda words: default_text().encode() + b"\n" + b"".join(words))

READERS = {
    **{kind: Reader(a_stream(GOOD[kind]), heard(DIALECTS[kind].read)) for kind in DIALECTS},
    "model": Reader(hostile(MODEL), heard(read_event)),
    "report": Reader(hostile(REPORT) | reworded(json.loads(REPORT)), takes_or_refuses(base.parse_report, ValueError)),
    "reply": Reader(
        hostile(REPLY) | reworded(json.loads(REPLY)),
        takes_or_refuses(lambda body: llm_lab.read_reply(body, (1.0, 2.0))),
    ),
    "retry-after": Reader(
        st.text(st.characters(max_codepoint=127), max_size=40)
        | st.sampled_from(["Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 99 Oct 99999 99:99:99 -9999"]),
        takes_or_refuses(llm_lab.asked_seconds),
    ),
    "arguments": Reader(
        hostile(b'{"piece": 1, "names": ["a", {"b": null}]}').map(lambda raw: raw.decode("utf-8", "surrogateescape")),
        takes_or_refuses(tool_dispatch.argument_text, ValueError),
    ),
    "settings": Reader(TOML, in_a_file("sovereign.toml", lambda file: rebound(file.parent))),
    "marker": Reader(hostile(EPOCH), in_a_file("marker", authority.read_marker)),
    "script": Reader(hostile(SCRIPT) | reworded(json.loads(SCRIPT)), in_a_file("s.json", answering._scripted)),
    "schedule": Reader(
        hostile(b"# sovereign-agent schedule\nscenario lease\nworker\nworker dies before its step\n").map(
            lambda raw: raw.decode("utf-8", "replace")
        ),
        takes_or_refuses(from_script),
    ),
    "probes": Reader(hostile(b'{"k": {"version": "1", "flags": [["p", "json"]]}}'), in_a_file("p.json", agent._cached)),
}
each_reader = pytest.mark.parametrize("reader", READERS)


@each_reader
def test_whatever_a_reader_is_given_it_takes_or_refuses_in_its_own_words(reader: str, tmp_path: Path) -> None:
    chosen = READERS[reader]
    fuzz(chosen.thrown, lambda content: chosen.reads(tmp_path, content), 60)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@each_reader
def test_whatever_a_reader_is_given_at_length(reader: str, tmp_path: Path) -> None:
    chosen = READERS[reader]
    fuzz(chosen.thrown, lambda content: chosen.reads(tmp_path, content), 3_000)


@pytest.mark.parametrize("reader", [name for name in READERS if name not in ("settings", "retry-after")])
def test_the_good_text_that_the_fuzzing_starts_from_is_taken(reader: str, tmp_path: Path) -> None:
    """Else it would only ever reach the first line of a reader."""
    good: dict[str, tuple[Act, bytes]] = {
        **{kind: (lambda raw, kind=kind: _finished(kind, raw), lines(*GOOD[kind])) for kind in DIALECTS},
        "model": (lambda raw: _finished("", raw), MODEL),
        "report": (base.parse_report, REPORT),
        "reply": (llm_lab.read_reply, REPLY),
        "arguments": (lambda raw: tool_dispatch.argument_text(raw.decode()), b'{"piece": 1}'),
        "marker": (lambda raw: authority.read_marker(_written(tmp_path, raw)), EPOCH),
        "script": (lambda raw: answering._scripted(_written(tmp_path, raw)), SCRIPT),
        "schedule": (
            lambda raw: from_script(raw.decode()),
            b"# a comment\nscenario lease\nworker\nworker dies before its step\n",
        ),
        "probes": (
            lambda raw: agent._cached(_written(tmp_path, raw))["k"],
            b'{"k": {"version": "1", "flags": [["p", "json"]]}}',
        ),
    }
    act, content = good[reader]
    act(content)


def _finished(kind: str, content: bytes) -> None:
    told = Stream(DIALECTS[kind].read if kind else read_event, Leash())
    told.take(content)
    assert not told.seen()


def _written(folder: Path, content: bytes) -> Path:
    file = folder / "good"
    file.write_bytes(content)
    return file


# --- a backup ---------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[tuple[Path, bytes, list[str]]]:
    """A ledger, the bytes of a backup of it, and what is in it."""
    org = Organization.init(tmp_path / "org")
    org.create_outcome("The shop is closed.", "The till is counted.", [], "principal-human")
    image = tmp_path / "sealed.db"
    sqlite_backup.back_up(org.db.path, image)
    yield org.db.path, image.read_bytes(), sqlite_backup.content(org.db.path)
    org.close()


@st.composite
def damaged(draw: st.DrawFn, size: int) -> tuple[list[tuple[int, int]], int]:
    """Some bits to flip, more often at the front, where the schema is; and where to cut."""
    place = st.integers(0, 199) | st.integers(0, 16_383) | st.integers(0, size - 1)
    flips = draw(st.lists(st.tuples(place, st.sampled_from([128, 64, 32, 16, 8, 4, 2, 1])), min_size=1, max_size=8))
    return flips, draw(st.just(size) | st.just(size) | st.integers(0, size))


def _take_in(ledger: Path, folder: Path, content: bytes, whole: list[str]) -> None:
    """It is refused, or what was sealed came in and nothing else."""
    image, staging = folder / "damaged.db", folder / "staging.db"
    image.write_bytes(content)
    with suppress(SovereignError):
        sqlite_backup.take_in(image, ledger, staging)
    if staging.exists():
        assert sqlite_backup.content(staging) == whole
        sqlite_backup.remove(staging)


def _damage(content: bytes, how: tuple[list[tuple[int, int]], int]) -> bytes:
    flips, end = how
    raw = bytearray(content)
    for place, bit in flips:
        raw[place] ^= bit
    return bytes(raw[:end])


def _fuzz_backup(sealed: tuple[Path, bytes, list[str]], folder: Path, examples: int) -> None:
    ledger, content, whole = sealed
    fuzz(damaged(len(content)), lambda how: _take_in(ledger, folder, _damage(content, how), whole), examples)
    fuzz(hostile(content[:100]), lambda raw: _take_in(ledger, folder, raw, whole), examples // 4)


def test_a_damaged_backup_is_refused_or_holds_what_was_sealed(
    sealed: tuple[Path, bytes, list[str]], tmp_path: Path
) -> None:
    _fuzz_backup(sealed, tmp_path, 80)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_damaged_backup_at_length(sealed: tuple[Path, bytes, list[str]], tmp_path: Path) -> None:
    _fuzz_backup(sealed, tmp_path, 5_000)


def test_a_backup_with_half_a_letter_in_its_schema_is_refused_as_damaged(
    sealed: tuple[Path, bytes, list[str]], tmp_path: Path
) -> None:
    ledger, content, _ = sealed
    image = tmp_path / "damaged.db"
    for word in (b"CREATE TABLE messages", b"recipient", b"desired_state TEXT NOT NULL"):
        at = content.index(word) + len(word) - 1
        image.write_bytes(content[:at] + bytes([content[at] ^ 128]) + content[at + 1 :])
        with pytest.raises((SovereignError, UnicodeError)) as refused:
            sqlite_backup.take_in(image, ledger, tmp_path / "staging.db")
        assert getattr(refused.value, "category", "") == "backup_damaged"


# --- bounds -----------------------------------------------------------------------------------------------


def within(seconds: float, act: Callable[[], object]) -> None:
    """Seconds of this process's own work: a busy machine does not count."""
    begun = time.process_time()
    with suppress(SovereignError):
        act()
    assert time.process_time() - begun < seconds


@pytest.mark.parametrize("kind", ["claude", "codex", "cursor"])
def test_a_program_whose_help_and_version_never_come_to_a_point_is_read_in_no_time(kind: str, tmp_path: Path) -> None:
    """Both answers are what a careless pattern walks through again from each of its characters; 256 KiB are read."""
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\nfill() { head -c 40000 /dev/zero | tr '\\0' \"$1\"; }\n"
        'case "$*" in *--help*) fill "\\n" ;; *) fill x ;; esac\n'
    )
    program.chmod(0o755)
    folder = allocate(tmp_path, "run-1")
    asked = AgentSettings(kind=kind, program=str(program))  # type: ignore[arg-type]
    within(1, lambda: agent.probe(DIALECTS[kind], asked, folder, {"PATH": os.environ["PATH"]}))


@pytest.mark.parametrize("line", [b" " * 15_000, b"\t[" * 20_000, b"'" * 50_000, b"x" * 50_000])
def test_a_settings_file_with_an_endless_line_is_refused_in_no_time(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "sovereign.toml").write_bytes(b"unknown = 1\n#" + line + b"\n" + (line if line.isspace() else b""))
    within(1, lambda: configuration.load(tmp_path))


def test_a_settings_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "sovereign.toml").symlink_to("/dev/zero")
    with pytest.raises(SovereignError, match="longer than"):
        configuration.load(tmp_path)


def test_a_number_without_end_in_a_settings_file_is_refused_like_any_bad_line(tmp_path: Path) -> None:
    (tmp_path / "sovereign.toml").write_text("port = " + "9" * 5_000)
    with pytest.raises(ValueError, match="digits") as refused:
        configuration.load(tmp_path)
    assert isinstance(refused.value, SovereignError)


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_stream_of_endless_names_keeps_no_more_than_a_few_lines_of_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name in each event is as long as a line may be, and no two events are the same."""
    limit = 2**16
    monkeypatch.setattr(stream, "LINE_LIMIT_BYTES", limit)
    told = Stream(DIALECTS[kind].read, Leash())
    events = [_stretched(event, "x" * (limit // 8), number) for number, event in enumerate(GOOD[kind][:-1] * KEPT * 2)]
    tracemalloc.start()
    try:
        for event in events:
            told.take(event)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told.testimony.events == len(events)
    assert kept < 2 * limit


def _stretched(event: Event, filling: str, number: int) -> bytes:
    def longer(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: longer(key, inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [longer(name, inner) for inner in value]
        named = isinstance(value, str) and name not in ("type", "subtype")
        return f"{value}{number}{filling}" if named else value

    return json.dumps(longer("", event)).encode() + b"\n"


# --- the command line -------------------------------------------------------------------------------------

IDS = [
    "",
    "-",
    "\0",
    "a\0b",
    "\ud800",
    "\udcff",
    "a" * 150_000,
    "%s",
    "'; --",
    "../../etc",
    "msg_",
    "\n",
    "💥",
    "asg_0",
]
NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "1e308",
    str(10**30),
    "9" * 5_000,
    "0x10",
    "\uff11\uff12",
    "1_0",
    "-0.0",
    "",
    str(2**63),
]
VERBS = [
    *[
        "inspect ID",
        "inbox ID",
        "run ID",
        "cancel ID --by ID",
        "verify ID --by ID",
        "accept ID --by ID",
        "actor show ID",
    ],
    *["assistant status ID", "assistant cancel ID --by operator-course", "assistant transcript ID --after NUMBER"],
    *["assistant enqueue ID ID --origin ID --role ID --subject ID", "assistant enqueue s p --after NUMBER"],
    *["assistant enqueue s p --retries NUMBER", "assistant claim ID --role ID", "assistant claim o --ttl NUMBER"],
    *["assistant evidence ID --after NUMBER", "assistant effects --after NUMBER", "heartbeat --source ID"],
    *["assistant delegate p --claim ID --for NUMBER --budget NUMBER", "heartbeat --status --stale-after NUMBER"],
    *["send ID ID ID ID", "plan ID --scope ID --by ID --role ID", "assign ID ID --by ID --maximum NUMBER", "ID ID"],
    *["outcome create ID --desired ID --owner ID --check ID", "ruling ID --decision ID --by ID", "backup /proc/ID"],
    *["restore ID --by principal-human --reason ID", "simulate --replay /proc/ID", "simulate --scenario ID"],
]


LEDGER_FAULT = 4


@st.composite
def command(draw: st.DrawFn) -> list[str]:
    pools = {"ID": IDS, "NUMBER": NUMBERS}
    words = draw(st.sampled_from(VERBS)).split()
    return [draw(st.sampled_from(pools[word])) if word in pools else word.replace("ID", "\0x") for word in words]


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """Run a command line on an organization; it ends with a code of the house, which is not that of a bug."""
    Organization.init(tmp_path / "org").close()
    monkeypatch.setenv("SOVEREIGN_ROOT", str(tmp_path / "org"))

    def run(words: list[str]) -> int:
        with monkeypatch.context() as quiet:
            said = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
            quiet.setattr(sys, "stdout", said)
            quiet.setattr(sys, "stderr", said)
            code = cli.main(words)
            said.flush()
        assert code in (0, 1, 2, 3, 4, 5), said.buffer.getvalue()
        return code

    return run


def test_words_that_mean_nothing_are_no_bug_of_the_command_line(line: Callable[[list[str]], int]) -> None:
    fuzz(command(), line, 25)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_words_that_mean_nothing_at_length(line: Callable[[list[str]], int]) -> None:
    fuzz(command(), line, 1_000)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[" * 50_000, b'{"id": 1e999}', b"[1]", b'[{"text": 5}]'], ids=range(5)
)
@pytest.mark.parametrize(
    "words",
    [
        "simulate --replay FILE",
        "assistant delegate p --claim FILE --for 1 --budget 1",
        "assistant ask s p --script FILE",
        "restore FILE --by principal-human --reason r",
    ],
    ids=["schedule", "claim", "script", "backup"],
)
def test_a_file_that_is_not_what_a_verb_wants_is_no_bug(
    line: Callable[[list[str]], int], words: str, content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    line([str(file) if word == "FILE" else word for word in words.split()])


@pytest.mark.parametrize("seconds", ["9223372036854775807", str(10**30)])
def test_a_run_longer_than_time_itself_is_refused_and_no_bug(line: Callable[[list[str]], int], seconds: str) -> None:
    line(["assign", "sow_1", "operator-course", "--by", "master-course", "--maximum", seconds])


@pytest.mark.parametrize("words", ["status", "doctor", "pause --by principal-human --reason r"])
@pytest.mark.parametrize("word", [b"CREATE TABLE messages", b"recipient", b"desired_state TEXT NOT NULL"], ids=range(3))
def test_a_ledger_with_half_a_letter_in_its_schema_is_called_damaged_and_no_bug(
    line: Callable[[list[str]], int], words: str, word: bytes, tmp_path: Path
) -> None:
    ledger = tmp_path / "org" / LEDGER_NAME
    content = ledger.read_bytes()
    at = content.index(word) + len(word) - 1
    ledger.write_bytes(content[:at] + bytes([content[at] ^ 128]) + content[at + 1 :])
    assert line(words.split()) == LEDGER_FAULT
