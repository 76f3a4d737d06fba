"""The pages hold what they say: each block of code on each page is run, or parsed by what would read it.

A page is one story. Its blocks are taken from top to bottom, in one shell, in an empty folder with a fresh HOME.

``console``  Each line after ``$ `` is typed, with the lines after ``> `` that go on with it; what stands below is what
             is then seen, stdout and stderr alike, with ``...`` for anything: inside a line, or for lines. Where
             nothing stands below, only the end is looked at. A command ends with 0, or with N where ``# exit N``
             stands behind it. A page that names ``$LEDGER`` finds the URL of an empty PostgreSQL database there.
``python``   is run by the shell's Python. ``json`` is parsed. ``sql`` is a statement of src/. ``text`` is a drawing.
``toml``     goes into the ``sovereign.toml`` of the folder that the shell is in, key by key, as its reader would do it;
             where there is none, into the one that `init` writes. The product judges the result.
``ini``, ``xml``  are systemd units and launchd agents: parsed, and what they start is a command that exists.

A path behind the language says that the block is the whole of that file. ``not-run: why`` keeps a block from being run:
its commands are held to the verbs and options that there are, and `NOT_RUN` lists it. What a page takes for granted, an
organization say, is made by a comment ``<!-- invisible-code-block: LANGUAGE``, which is run like the rest.

OUTCOME, SOW and the other words of `WORDS` stand for the newest id of their kind: of those that the commands of this
page have printed, the one that came up last for the first time.
"""

from __future__ import annotations

import configparser
import json
import os
import plistlib
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from expectation import matches
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from sovereign_agent import cli, configuration

REPOSITORY = Path(__file__).parents[1]
FRONT = (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "book" / "README.md")
PAGES = sorted([*FRONT, *REPOSITORY.glob("docs/**/*.md")])
WORDS = {
    "out": "OUTCOME",
    "sow": "SOW",
    "asg": "ASSIGNMENT",
    "att": "ATTEMPT",
    "rcp": "RECEIPT",
    "msg": "MESSAGE",
    "work": "ITEM",
    "op": "OPERATION",
}
IDS = re.compile(rf"\b({'|'.join(WORDS)})_[0-9a-f]{{32}}\b")
COMMAND = re.compile(r"^\$ (.*(?:\n> .*)*)\n?((?:(?!\$ ).*\n?)*)", re.MULTILINE)
COMMAND_IN_A_SENTENCE = re.compile(r"`(sovereign-agent [a-z][^`]*)`")
SHELLS_OWN = re.compile(r"^bash: line \d+: +\d+ (?:Killed|Terminated) .*\n", re.MULTILINE)
"""That a job was killed, which each shell says in its own way and when it likes."""

NOT_RUN = Counter(
    {
        ("CONTRIBUTING.md", "console", "of the checkout, minutes"): 1,
        ("README.md", "console", "of the checkout, minutes"): 1,
        ("README.md", "console", "of the checkout"): 1,
        ("book/README.md", "console", "of the checkout, minutes"): 1,
        ("docs/how-to/move-to-postgresql.md", "console", "needs a server of yours"): 1,
        ("docs/how-to/put-a-model-behind-a-claim.md", "console", "needs a key"): 1,
        ("docs/how-to/run-a-fleet.md", "console", "needs systemd"): 1,
        ("docs/how-to/serve-an-assistant.md", "console", "needs a key, and stays"): 1,
    }
)
"""Every block that is not run: its page, its language, and why."""


class Shell:
    """One bash, to which a page's commands are typed."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._end = secrets.token_hex(8)
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._known: dict[str, str] = {}

    def type(self, command: str) -> tuple[str, int]:
        """What is seen, and what the command ended with."""
        assert self._bash.stdin
        assert self._bash.stdout
        self._bash.stdin.write(f"eval {shlex.quote(command)} 2>&1 </dev/null\nprintf '%s %s\\n' {self._end} $?\n")
        self._bash.stdin.flush()
        seen = ""
        for line in self._bash.stdout:
            seen += line
            if self._end in line:
                break
        seen, _, code = seen.partition(self._end)
        for found in IDS.finditer(seen):
            if found[0] not in self._known:
                self._known |= {found[0]: "", WORDS[found[1]]: found[0]}
        return SHELLS_OWN.sub("", seen), int(code)

    def filled_in(self, text: str) -> str:
        """The text with the newest id in the place of each word that stands for one."""
        return re.sub("|".join(rf"\b{word}\b" for word in WORDS.values()), lambda m: self._known.get(m[0], m[0]), text)

    @property
    def folder(self) -> Path:
        return Path(self.type("pwd")[0].strip())

    def close(self) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)  # what a page left in the background, too
        self._bash.wait()
        for pipe in (self._bash.stdin, self._bash.stdout):
            if pipe:
                pipe.close()


def commands(source: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, with what is to be seen then."""
    assert source.startswith("$ "), "a console block begins with a command"
    for typed, expected in COMMAND.findall(source):
        yield typed.replace("\n> ", "\n"), expected


def console(example: Example, shell: Shell) -> None:
    for command, expected in commands(example.parsed):
        typed = shell.filled_in(command)
        seen, code = shell.type(typed)
        promised = re.search(r"# exit (\d+)", command)
        assert code == int(promised[1] if promised else 0), f"$ {typed}\nended with {code}:\n{seen}"
        if expected.strip():
            shown = shell.filled_in(expected)
            assert matches(shown, seen), f"$ {typed}\n--- is to show\n{shown}--- shows\n{seen}"


def python(example: Example, shell: Shell) -> None:
    seen, code = shell.type(f"python - <<'END_OF_BLOCK'\n{example.parsed}\nEND_OF_BLOCK")
    assert code == 0, seen


def toml(example: Example, shell: Shell) -> None:
    settings = shell.folder / configuration.FILE_NAME
    own = settings.exists()
    document: Any = tomlkit.parse(settings.read_text() if own else configuration.default_text())
    merge(document, tomlkit.parse(example.parsed))
    settings.write_text(tomlkit.dumps(document))
    configuration.load(settings.parent)
    if not own:
        settings.unlink()


def merge(into: Any, more: Any) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def sql(example: Example, _: Shell) -> None:
    source = "".join(path.read_text() for path in REPOSITORY.glob("src/**/*.py"))
    assert " ".join(example.parsed.split()) in " ".join(source.split())


def ini(example: Example, _: Shell) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(example.parsed)
    exists(unit["Service"]["ExecStart"])


def xml(example: Example, _: Shell) -> None:
    exists(shlex.join(plistlib.loads(example.parsed.encode())["ProgramArguments"]))


def text(example: Example, _: Shell) -> None:
    assert not re.search(r"^\$ |^sovereign-agent ", example.parsed, re.MULTILINE), "a drawing hides a command"


def exists(command: str) -> None:
    """Whether the shell, and what the command calls, would understand it."""
    subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    parts = shlex.shlex(command, posix=True, punctuation_chars="|;&<>")
    parts.whitespace_split = True
    words = [*takewhile(lambda word: word[0] not in "|;&<>", parts)]
    if Path(words[0]).name == "sovereign-agent":
        assert cli.main([*words[1:], "--help"]) == 0, command
    elif words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)


READERS = {
    "console": console,
    "python": python,
    "toml": toml,
    "json": lambda example, _: json.loads(example.parsed),
    "sql": sql,
    "ini": ini,
    "xml": xml,
    "text": text,
}
FENCE = RawFencedCodeBlockLexer(re.compile(r"(?P<language>\w*) ?(?P<note>.*)$\n", re.MULTILINE))
UNSEEN = DirectiveInHTMLCommentLexer("invisible-code-block", mapping={"arguments": "language", "source": "source"})


def blocks(document: Document) -> Iterator[Region]:
    """Every fence of a page, whatever its language: one that nobody reads fails."""
    for region in chain(FENCE(document), UNSEEN(document)):
        region.parsed, region.evaluator = str(region.lexemes["source"]), read
        yield region


def read(example: Example) -> None:
    language, note = (example.region.lexemes.get(name, "") for name in ("language", "note"))
    shell: Shell = example.namespace["shell"]
    if note.startswith("not-run: "):
        for command, _ in commands(example.parsed):
            exists(command)
        return
    if note:
        path = shell.folder / note
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example.parsed)
        path.chmod(0o755)
        if language == "python":
            compile(example.parsed, note, "exec")
            return
    READERS[language](example, shell)


def named(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def parsed(page: Path) -> Document:
    return Sybil(parsers=[blocks]).parse(page)


@contextmanager
def shell_in(folder: Path, **more: str) -> Iterator[Shell]:
    """A shell in an empty folder, with the environment of somebody who has just installed the product."""
    for name in ("home", "work"):
        (folder / name).mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
    environment = {"HOME": str(folder / "home"), "PATH": path, "LANG": "C.UTF-8", "TMPDIR": str(folder)} | more
    shell = Shell(folder / "work", environment)
    try:
        yield shell
    finally:
        shell.close()


@pytest.mark.timeout(300)  # dozens of processes, on a machine that may have others
@pytest.mark.parametrize("page", [page for page in PAGES if "```" in page.read_text()], ids=named)
def test_a_page_holds_what_it_says(page, tmp_path, fresh_url):
    document = parsed(page)
    more = {"LEDGER": fresh_url(migrated=False)} if "$LEDGER" in document.text else {}
    with shell_in(tmp_path, **more) as shell:
        document.namespace["shell"] = shell
        for example in document:
            example.evaluate()


@pytest.mark.parametrize("page", [page for page in PAGES if COMMAND_IN_A_SENTENCE.search(page.read_text())], ids=named)
def test_a_command_in_a_sentence_exists(page):
    for command in COMMAND_IN_A_SENTENCE.findall(page.read_text()):
        exists(command)


def test_every_block_that_is_not_run_is_known():
    notes = Counter(
        (named(page), lexemes["language"], lexemes["note"].removeprefix("not-run: "))
        for page in PAGES
        for lexemes in (example.region.lexemes for example in parsed(page))
        if lexemes.get("note", "").startswith("not-run: ")
    )
    assert notes == NOT_RUN


def test_the_index_has_every_page_on_one_line():
    index = REPOSITORY / "docs" / "README.md"
    listed = Counter(re.findall(r"^- \[[^]]+\]\(([^)]+\.md)\): ", index.read_text(), re.MULTILINE))
    pages = [page for page in index.parent.glob("*/*.md") if page.parent.name != "decisions"]
    names = [page.relative_to(index.parent).as_posix() for page in pages]
    assert listed == Counter([*names, "roadmap.md", "../book/README.md"])


GOOD = """
```console
$ sovereign-agent init --root shop > /dev/null; cd shop
$ sovereign-agent outcome new Close --desired Closed --owner principal-human
Outcome OUTCOME is DRAFT.
  next   sovereign-agent ... OUTCOME --by principal-human
$ sovereign-agent plan OUTCOME --scope Count --by master-course   # exit 1
...
  why    It is DRAFT.
...
```
```python shop.py
def lines(): return ["tea"]
```
```python
import shop; assert shop.lines() == ["tea"]
```
```toml
[organization]
name = "Lucy's"
```
"""
LIES = {
    "an-output": ("OUTCOME is DRAFT", "OUTCOME is ACTIVE"),
    "an-id": ("plan OUTCOME", "plan SOW"),
    "an-end": ("  # exit 1", ""),
    "a-line-too-many": ("is DRAFT.\n  next", "is DRAFT.\n  why    So.\n  next"),
    "an-option": ("--scope", "--scop"),
    "a-program": ('== ["tea"]', '== ["tee"]'),
    "a-key": ('name = "', 'nam = "'),
    "a-language": ("```python\n", "```\n"),
    "a-command-that-is-not-there": (
        "```python\n",
        "```console not-run: a reason\n$ sovereign-agent statu\n```\n```text\n",
    ),
}


@pytest.mark.parametrize("lie", ["none", *LIES])
def test_a_page_that_lies_is_found(lie, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(GOOD.replace(*LIES.get(lie, ("", ""))))
    document = parsed(page)
    with shell_in(tmp_path) as shell:
        document.namespace["shell"] = shell
        found = None
        try:
            for example in document:
                example.evaluate()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            found = error
    assert (found is None) == (lie == "none"), found
