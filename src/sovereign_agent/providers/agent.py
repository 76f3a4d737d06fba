"""Agent programs: a stream of events from a program that was asked first what it can do.

A `Dialect` says how one product is started and read; everything else is the same for all of them. No option is
passed on that the program's own help does not prove, and without a required one nothing is started. The task never
stands in the arguments. What the program says completes nothing by itself: see `base.judge`.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from sovereign_agent.configuration import AgentSettings, replace_file
from sovereign_agent.errors import ProviderFault
from sovereign_agent.providers import account, process
from sovereign_agent.providers.base import Envelope, Proposal, prompt, told
from sovereign_agent.providers.command import not_started, propose
from sovereign_agent.providers.process import Leash
from sovereign_agent.providers.stream import Read, Stream
from sovereign_agent.workspace import Workspace

PROBE_SECONDS = 5.0
PROBE_GRACE_SECONDS = 0.5
HELP_LIMIT_BYTES = 2**18
CACHE_NAME = "probes.json"
CACHE_LIMIT = 50
CACHE_LIMIT_BYTES = 2**25
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one product is started, and how its events are read.

    `version` finds the version in what ``--version`` prints. `required` and `wished` are options, with their value
    where they have one; `proofs` is what else the help has to show. `last` ends the arguments. The task goes in by
    stdin, or by the file `task_name`.
    """

    version: str
    read: Read
    required: tuple[str, ...]
    wished: tuple[str, ...]
    verb: tuple[str, ...] = ()
    proofs: tuple[str, ...] = ()
    task_name: str = ""
    last: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a program said of itself. An unknown `version` is empty. `flags` has the words of each option's help."""

    version: str
    flags: tuple[frozenset[str], ...]

    def prove(self, option: str) -> bool:
        """Whether all words of an option, and of its value, stand together in the help."""
        return any({*option.split()} <= words for words in self.flags)


_CACHE = TypeAdapter(dict[str, Capabilities])


@dataclass(frozen=True, slots=True)
class AgentProvider:
    """Runs the program of its settings, as its dialect has it."""

    settings: AgentSettings
    dialect: Dialect

    def run(self, envelope: Envelope, workspace: Workspace, leash: Leash) -> Proposal:
        """Run to the end and propose; see `Provider.run`."""
        variables = process.variables(self.settings.environment) | told(envelope, workspace)
        try:
            stdin = self._hand_over(prompt(envelope), workspace)
            capabilities = probe(self.dialect, self.settings, workspace, variables)
            argv = arguments(self.dialect, self.settings, capabilities)
        except ProviderFault as fault:
            return not_started(workspace, fault)
        stream, version = Stream(self.dialect.read, leash), capabilities.version
        return propose(
            self.settings, argv, workspace, leash, stdin=stdin, variables=variables, stream=stream, version=version
        )

    def _hand_over(self, task: bytes, workspace: Workspace) -> bytes:
        """Put the task where the program reads it, and return its stdin."""
        if not self.dialect.task_name:
            return task
        path = workspace.path / self.dialect.task_name
        path.touch(0o600, exist_ok=False)
        path.write_bytes(task)
        if self.settings.run_as:
            user = account.find(self.settings.run_as)
            os.chown(path, user.user, user.group, follow_symlinks=False)
        return b""


def arguments(dialect: Dialect, settings: AgentSettings, capabilities: Capabilities) -> list[str]:
    """The argv of a run: each option of ours proved by the help, and those of the settings as they are.

    Raises ProviderFault (``capability_refusal``) when the help does not prove a required option.
    """
    model = ["--model", settings.model] if settings.model else []
    if unproved := [o for o in (*dialect.required, *dialect.proofs, *model[:1]) if not capabilities.prove(o)]:
        raise _refusal(settings, dialect, f"its help does not show {', '.join(unproved)}.")
    given = {argument.partition("=")[0] for argument in settings.arguments}
    wished = [option for option in dialect.wished if capabilities.prove(option) and option.split()[0] not in given]
    ours = [word for option in (*dialect.required, *wished) for word in option.split()]
    return [settings.executable, *dialect.verb, *ours, *model, *settings.arguments, *dialect.last]


def probe(dialect: Dialect, settings: AgentSettings, workspace: Workspace, variables: dict[str, str]) -> Capabilities:
    """What the program says of itself, asked once for each build of it and kept in ``probes.json``.

    It is asked in the folder of the run that is to follow. No version, or none that can be read, is no fault. Raises
    ProviderFault: ``capability_refusal`` when no help comes, and as `process.run` does.
    """
    program, folder = settings.executable, workspace.path.parents[1]
    key = _build(program, workspace.path, variables["PATH"])
    cache = _cached(folder / CACHE_NAME)
    if key in cache:
        return cache[key]
    helped, shown = _ask([program, *dialect.verb, "--help"], "help", settings, workspace, variables)
    if wrong := process.seen(helped, limit=f"{PROBE_SECONDS:g} seconds"):
        reasons = ["it did not show its help.", *wrong.values(), shown.strip()[-500:]]
        raise _refusal(settings, dialect, " ".join(reasons).strip())
    asked, banner = _ask([program, "--version"], "version", settings, workspace, variables)
    version = re.search(dialect.version, banner, re.MULTILINE)
    entries = re.split(r"\n(?=[^\S\n]*--?\w)", shown)
    flags = tuple(frozenset(re.findall(r"[\w-]+", entry)) for entry in entries)
    capabilities = Capabilities(version[1][:100] if version else "", flags)
    if asked.ended_by == "itself" and key:
        _keep(folder, {**dict(list(cache.items())[1 - CACHE_LIMIT :]), key: capabilities})
    return capabilities


def _refusal(settings: AgentSettings, dialect: Dialect, reason: str) -> ProviderFault:
    return ProviderFault(
        f"The program {settings.executable!r} was not started: {reason}",
        category="capability_refusal",
        why="No option is passed on that the program does not say it has.",
        inspect=" ".join([settings.executable, *dialect.verb, "--help"]),
        next_command="install a version that has it, or correct [providers] in sovereign.toml",
    )


class _Answer:
    """A `Reader` that keeps the beginning of what it is given."""

    state: Literal["reading"] = "reading"

    def __init__(self) -> None:
        self.content = bytearray()

    def take(self, chunk: bytes) -> None:
        self.content += chunk[: HELP_LIMIT_BYTES - len(self.content)]


def _ask(
    argv: list[str], name: str, settings: AgentSettings, workspace: Workspace, variables: dict[str, str]
) -> tuple[process.Ending, str]:
    """Run the program for what it prints, on either output, without colours. It has `PROBE_SECONDS`."""
    answer = _Answer()
    ending = process.run(
        argv,
        workspace,
        name=f"{name}-",
        stdin=b"",
        variables=variables,
        timeout_seconds=PROBE_SECONDS,
        grace_seconds=PROBE_GRACE_SECONDS,
        leash=Leash(),
        reader=answer,
        run_as=settings.run_as,
    )
    text = answer.content.decode("utf-8", "replace") + "\n" + ending.stderr.last_words()
    return ending, _CONTROL.sub("", text)


def _build(program: str, folder: Path, search: str) -> str:
    """What tells one build of a program from the next; empty when it is not found, as `process.run` will explain."""
    places = os.pathsep.join(str(folder / place) for place in search.split(os.pathsep))  # it is started from there
    found = shutil.which(folder / program if "/" in program else program, path=places)
    if not found:
        return ""
    real = Path(found).resolve()
    state = real.stat()
    return f"{real}:{state.st_size}:{state.st_mtime_ns}"


def _cached(path: Path) -> dict[str, Capabilities]:
    """What was kept; nothing when it is absent, or not as we left it, whatever lies there: then it is made again."""
    with suppress(OSError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return _CACHE.validate_json(os.read(file, CACHE_LIMIT_BYTES))
        finally:
            os.close(file)
    return {}


def _keep(folder: Path, cache: dict[str, Capabilities]) -> None:
    """Put the cache in its place. A disk that refuses costs no more than asking again."""
    with suppress(OSError):
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            replace_file(place, CACHE_NAME, _CACHE.dump_json(cache))
        finally:
            os.close(place)
