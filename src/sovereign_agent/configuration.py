"""Configuration: `sovereign.toml` becomes checked, frozen settings.

The file belongs to its organization's people: it is read whole, judged whole, and edited only through
`set_actor_provider`, which keeps their comments. What cannot be meant is refused before anything runs, with
the key, its line, the reason and the mend. No secret belongs in it, so a URL with a password is refused, and
no refusal repeats a value it found.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

import tomlkit
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)
from tomlkit.exceptions import TOMLKitError

from sovereign_agent.errors import ConfigurationFault
from sovereign_agent.records import Role

FILE_NAME = "sovereign.toml"
LONGEST_BYTES = 2**20
NO_PROVIDER = "none"
"""The provider of an actor that runs nothing: a person, or a program that only reads the ledger."""

STEP_VERBS = ("sleep", "write", "report", "stdout", "stderr", "exit", "ignore_term", "touch", "wait_for")

Act = Literal[
    "create_outcome", "activate", "plan", "assign", "cancel", "execute", "verify", "review", "accept", "rule", "rebind"
]
"""What an actor may be allowed to do."""


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL character stands in it")
    return text


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if url and parts.scheme not in ("postgresql", "postgres"):
        raise ValueError("a ledger URL begins with postgresql://")
    if parts.password or any(key in ("password", "sslpassword") for key, _ in parse_qsl(parts.query)):
        raise ValueError("a password stands in the URL: put it in ~/.pgpass or in PGPASSWORD")
    return url


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the URL of an endpoint begins with https:// or http://")
    if parts.username or parts.password or parts.query:
        raise ValueError("a key may stand in the URL: it belongs in the variable that key_env names")
    return url


def _as_its_worker(user: str) -> str:
    if user:
        raise ValueError("a model runs as its worker: as somebody else its program could not open the ledger")
    return user


def _only_real_providers(name: str) -> str:
    if name == NO_PROVIDER:
        raise ValueError('"none" means that nothing is run, so no provider can have that name')
    return name


Text = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_without_nul)]
Identifier = Annotated[str, StringConstraints(pattern=r"\A[a-z0-9][a-z0-9_-]{0,63}\z")]
Reference = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\z")]
VariableName = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\z")]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class OrganizationSettings(_Table):
    """What the organization calls itself."""

    name: Text


class LedgerSettings(_Table):
    """Where the ledger lies: an empty `url` is the SQLite file below `.sovereign`."""

    url: Annotated[str, AfterValidator(_without_nul), AfterValidator(_without_password)] = ""


class AuthoritySettings(_Table):
    """How long authority lasts without renewal, how often it is renewed, and where it ends for good.

    `marker` is where this host's authority marker lies, if not beside the ledger.
    """

    actor_lease_seconds: Seconds = 60.0
    execution_attempt_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 60.0
    marker: Annotated[str, StringConstraints(pattern=r"\A(/[^\x00]+)?\z")] = ""
    renew_seconds: Seconds | None = None
    maximum_run_seconds: Annotated[float, Field(ge=1, le=31_536_000, allow_inf_nan=False)] = 86_400.0
    losses_before_parking: Annotated[int, Field(ge=1, le=1000)] = 3

    @property
    def marker_path(self) -> Path | None:
        """The marker's place; None for the usual one."""
        return Path(self.marker) if self.marker else None

    @property
    def lease_ttl(self) -> timedelta:
        """How long an actor's lease lasts without renewal."""
        return timedelta(seconds=self.actor_lease_seconds)

    @property
    def attempt_ttl(self) -> timedelta:
        """How long an execution attempt lasts without renewal."""
        return timedelta(seconds=self.execution_attempt_seconds)

    @property
    def longest_renewal_seconds(self) -> float:
        """A third of the shorter of the two: one renewal may fail, and there is still time for another."""
        return min(self.actor_lease_seconds, self.execution_attempt_seconds) / 3

    @property
    def renewal_seconds(self) -> float:
        """How often a run renews its authority."""
        return self.renew_seconds or self.longest_renewal_seconds

    @property
    def maximum_run(self) -> timedelta:
        """How long a run may last in all, unless its assignment says otherwise."""
        return timedelta(seconds=self.maximum_run_seconds)


class ActorSettings(_Table):
    """One durable identity: its role, the provider that works for it, and what it may do."""

    role: Annotated[Role, Field(strict=False)]  # not strict: TOML has a string here, and arrays for tuples
    provider: Identifier
    authority: Annotated[tuple[Act, ...], Field(strict=False)]


class Step(_Table):
    """One step of a scripted provider: exactly one verb. `text` goes with `write`, `seconds` with `wait_for`."""

    sleep: Seconds | None = None
    write: Text | None = None
    text: str | None = None
    report: dict[str, JsonValue] | None = None
    stdout: str | None = None
    stderr: str | None = None
    exit: Annotated[int, Field(ge=0, le=255)] | None = None
    ignore_term: Literal[True] | None = None
    touch: Text | None = None
    wait_for: Text | None = None
    seconds: Seconds | None = None

    @model_validator(mode="after")
    def _one_verb(self) -> Step:
        verbs = [verb for verb in STEP_VERBS if getattr(self, verb) is not None]
        if len(verbs) != 1:
            raise ValueError(f"a step has exactly one of {', '.join(STEP_VERBS)}")
        if (self.text is not None, self.seconds is not None) != (verbs == ["write"], verbs == ["wait_for"]):
            raise ValueError("`text` belongs to `write`, `seconds` to `wait_for`, and each needs the other")
        return self


class ScriptedSettings(_Table):
    """A provider that performs fixed steps in a real process: for trying things out, and for tests."""

    kind: Literal["scripted"]
    steps: Annotated[tuple[Step, ...], Field(strict=False)]
    timeout_seconds: Seconds = 600.0


class _ProgramSettings(_Table):
    """What every outside program has. `environment` names variables passed on besides the fixed few.

    `run_as` is the user (``name`` or ``name:group``) that it runs as, where the worker may change that. It may be
    silent for `quiet_seconds` before anybody wonders.
    """

    environment: Annotated[tuple[VariableName, ...], Field(strict=False)] = ()
    timeout_seconds: Seconds = 600.0
    grace_seconds: Seconds = 5.0
    quiet_seconds: Annotated[float, Field(ge=1, le=31_536_000, allow_inf_nan=False)] = 300.0
    run_as: Annotated[str, StringConstraints(pattern=r"\A([a-z_][a-z0-9_.-]*(:[a-z_][a-z0-9_.-]*)?)?\z")] = ""


class CommandSettings(_ProgramSettings):
    """A provider that is any program."""

    kind: Literal["command"]
    argv: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]


class AgentSettings(_ProgramSettings):
    """A provider that is an agent program with a stream of events: Claude Code, Codex or Cursor.

    `program` is its name or path, by default the usual one. `model` is passed on as it is, and so are `arguments`,
    among which an option takes the place of the same one of ours. After `idle_seconds` without output it is ended.
    """

    kind: Literal["claude", "codex", "cursor"]
    program: Text | None = None
    model: Text | None = None
    arguments: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    timeout_seconds: Seconds = 3600.0
    idle_seconds: Seconds = 900.0

    @property
    def executable(self) -> str:
        """The name or path of the program."""
        return self.program or ("cursor-agent" if self.kind == "cursor" else self.kind)


class LimitSettings(_Table):
    """The most that one run of a model may use. `money` is in the currency of its prices."""

    model_calls: Annotated[int, Field(ge=1)] = 50
    tool_calls: Annotated[int, Field(ge=0)] = 200
    seconds: Seconds = 1800.0
    output_tokens: Annotated[int, Field(ge=1)] = 8192
    total_tokens: Annotated[int, Field(ge=1)] = 1_000_000
    money: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class EndpointSettings(_Table):
    """How an OpenAI-compatible endpoint, by default OpenAI's own, is asked, and what its model may use.

    `key_env` names the variable that holds its key; the key itself stands in no file. `prices` are those of a million
    tokens, of input and of output. `tools` names a function that is given the open ledger and returns tools.
    """

    base_url: Annotated[str, AfterValidator(_endpoint)] | None = None
    key_env: VariableName = "OPENAI_API_KEY"
    prices: Annotated[tuple[Price, Price], Field(strict=False)] | None = None
    limits: LimitSettings = LimitSettings()
    tools: Reference | None = None

    @model_validator(mode="after")
    def _money_has_prices(self) -> EndpointSettings:
        if self.limits.money is not None and self.prices is None:
            raise ValueError("limits.money cannot be kept without prices")
        return self


class ModelSettings(_ProgramSettings, EndpointSettings):
    """A provider that is a model behind an endpoint."""

    kind: Literal["model"]
    model: Text
    timeout_seconds: Seconds = 3600.0
    run_as: Annotated[str, AfterValidator(_as_its_worker)] = ""


KINDS = "claude, codex, cursor, command, scripted, model"
ProviderSettings = ScriptedSettings | CommandSettings | AgentSettings | ModelSettings
ProviderName = Annotated[Identifier, AfterValidator(_only_real_providers)]


class AssistantSettings(EndpointSettings):
    """Who answers the assistant's queue: a model behind an endpoint, and its tools.

    `system` is what the model is told first. A killed service's item waits `claim_seconds`. The limits are for one
    life of an item.
    """

    model: Text | None = None
    system: Annotated[str, Field(max_length=100_000), AfterValidator(_without_nul)] = ""
    claim_seconds: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] = 60.0
    context_bytes: Annotated[int, Field(ge=1)] = 2**18


class Settings(_Table):
    """A whole `sovereign.toml`, checked, to be read only; `load` reads it anew."""

    organization: OrganizationSettings
    ledger: LedgerSettings = LedgerSettings()
    authority: AuthoritySettings = AuthoritySettings()
    assistant: AssistantSettings = AssistantSettings()
    actors: Annotated[Mapping[Identifier, ActorSettings], Field(min_length=1)]
    providers: Mapping[ProviderName, Annotated[ProviderSettings, Field(discriminator="kind")]] = {}
    checks: Mapping[Identifier, Reference] = {}
    extensions: Mapping[Identifier, Reference] = {}

    def actor(self, actor_id: str) -> ActorSettings:
        """The actor of that id. Raises ConfigurationFault when the file declares none."""
        try:
            return self.actors[actor_id]
        except KeyError:
            raise ConfigurationFault(
                f"No actor {actor_id!r} is declared.",
                category="unknown_actor",
                why=f"{FILE_NAME} declares {', '.join(sorted(self.actors))}.",
                inspect=FILE_NAME,
                next_command=f"add [actors.<id>] to {FILE_NAME}, or correct the id",
            ) from None


def load(root: Path | str) -> Settings:
    """Read and judge `<root>/sovereign.toml`.

    Raises ConfigurationFault when it is missing, unreadable, not UTF-8, not TOML, or says what cannot be meant.
    """
    path = Path(root) / FILE_NAME
    return _judged(path, _read(path))


def set_actor_provider(root: Path | str, actor_id: str, provider: str) -> None:
    """Bind an actor to another provider, in the file, with every comment kept.

    The new text is judged before it is written, and it replaces the old one whole: a crash leaves one or the
    other. Raises ConfigurationFault (nothing is written) for an unknown actor or provider.
    """
    path = (Path(root) / FILE_NAME).resolve()
    text = _read(path)
    _judged(path, text).actor(actor_id)
    try:
        document: Any = tomlkit.parse(text)
        document["actors"][actor_id]["provider"] = provider
        edited: str = tomlkit.dumps(document)
    except (TOMLKitError, ValueError) as error:
        raise _fault(path, text, ("actors", actor_id, "provider"), str(error), "edit the file by hand") from error
    _judged(path, edited)
    with held_open(path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
        replace_file(folder, path.name, edited.encode(), mode=path.stat().st_mode & 0o777)


def check_default(root: Path, ledger_url: str) -> str:
    """The default file's text with this ledger. Raises ConfigurationFault when the URL cannot be used."""
    text = default_text().replace('url = ""', f"url = {json.dumps(ledger_url)}", 1)
    _judged(root / FILE_NAME, text)
    return text


def write_default(root: Path, ledger_url: str = "") -> None:
    """Write the commented default file into `root`, unless a `sovereign.toml` stands there already.

    Raises ConfigurationFault, and writes nothing, when `ledger_url` cannot be used.
    """
    text = check_default(root, ledger_url)
    temporary = root / f".{FILE_NAME}.{secrets.token_hex(8)}"
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        with suppress(FileExistsError):
            os.link(temporary, root / FILE_NAME)  # whole or not at all, and never over another's
    finally:
        temporary.unlink(missing_ok=True)
    sync(root)


def resolve_reference(reference: str, root: Path) -> Any:
    """Import what ``package.module:attribute`` names, as installed or from the organization's root.

    Raises ConfigurationFault when it leads nowhere.
    """
    module, _, attribute = reference.partition(":")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigurationFault(
            f"{reference} in {FILE_NAME} leads nowhere.",
            category="unresolved_reference",
            why=f"{type(error).__name__}: {error}",
            inspect=FILE_NAME,
            next_command="install the package, or correct the name (package.module:attribute)",
        ) from error


@contextmanager
def held_open(path: Path | str, flags: int, inside: int | None = None) -> Generator[int]:
    """A descriptor of a file or a folder, `path` seen from the folder `inside`, for as long as it is needed."""
    descriptor = os.open(path, flags, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless they are there; each that is made survives a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    with held_open(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def replace_file(
    folder: int, name: str, content: bytes, *, mode: int = 0o600, owner: os.stat_result | None = None
) -> None:
    """Put `content` under `name` in an open folder, durably, so that a crash leaves the old file or the new one.

    A link that stands under `name` is replaced, not followed. Written by root, it belongs to whom `owner` belongs to.
    Raises OSError; the old file then still stands, unless it was only the last sync that failed.
    """
    temporary = f".{name}.{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
    try:
        with open(file, "wb") as stream:
            os.fchmod(file, mode)
            if owner and os.geteuid() == 0:
                os.fchown(file, owner.st_uid, owner.st_gid)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def _read(path: Path) -> str:
    if path.is_fifo():  # to open it would be to wait for whoever writes to it
        raise _fault(path, "", (), "it is a pipe", "put the file in its place, or correct --root")
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_BYTES + 1)
        if len(content) > LONGEST_BYTES:
            raise _fault(path, "", (), f"it is longer than {LONGEST_BYTES} bytes", "keep in it what belongs in it")
        return content.decode().removeprefix("\ufeff")
    except FileNotFoundError:
        mend = "sovereign-agent init --root FOLDER, or correct --root"
        raise _fault(path, "", (), "there is no such file", mend) from None
    except OSError as error:
        raise _fault(
            path, "", (), f"it cannot be read ({error.strerror})", "correct --root, or mend its owner or its mode"
        ) from error
    except UnicodeDecodeError as error:
        raise _fault(path, "", (), f"byte {error.start} is not UTF-8", "save the file as UTF-8") from None


def _judged(path: Path, text: str) -> Settings:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of a number with 5,000 digits it says no more than ValueError
        raise _fault(path, "", (), f"it is not TOML: {error}", "correct that line") from None
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _fault(path, text, _key_path(first["loc"]), *_in_words(first["type"], first["msg"])) from None
    longest = settings.authority.longest_renewal_seconds
    if settings.authority.renewal_seconds > longest:
        reason = "authority must be renewed three times before it runs out"
        mend = f"at most {longest:g}, a third of the shorter of actor_lease_seconds and execution_attempt_seconds"
        raise _fault(path, text, ("authority", "renew_seconds"), reason, mend)
    for actor_id, actor in settings.actors.items():
        if complaint := _complaint(actor, settings):
            key, reason, mend = complaint
            raise _fault(path, text, ("actors", actor_id, key), reason, mend)
    return settings


def _complaint(actor: ActorSettings, settings: Settings) -> tuple[str, str, str] | None:
    """What cannot be meant about an actor, given all else: the key, the reason, the mend."""
    if not actor.authority:
        return "authority", "an actor without authority can do nothing", f"list what this {actor.role} may do"
    if actor.provider == NO_PROVIDER:
        executes = "execute" in actor.authority
        return ("provider", 'it may execute, but "none" runs nothing', "name a provider") if executes else None
    if actor.provider not in settings.providers:
        known = ", ".join([NO_PROVIDER, *sorted(settings.providers)])
        return "provider", "no provider has that name", f"use one of: {known}"
    return None


def _in_words(kind: str, message: str) -> tuple[str, str]:
    """The reason and the mend, for a person who has not read pydantic's manual."""
    words = {
        "extra_forbidden": ("no such key is known here", "remove it, or correct its spelling"),
        "missing": ("it is required, and absent", "add it"),
        "tuple_type": ("it is not a list", 'write one: ["first", "second"]'),
        "too_short": ("it needs at least 1 entry", "add one"),
        "string_pattern_mismatch": ("it has not the form of such a name", "see the default file for its form"),
        "union_tag_invalid": ("no such kind of provider is known", f"use one of: {KINDS}"),
        "union_tag_not_found": ("it has no kind", f"add kind = ..., one of: {KINDS}"),
    }
    said = re.sub(r"^\w+ should ", "it must ", message.removeprefix("Value error, "))
    return words.get(kind, (said, "correct the value"))


def _key_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The keys as the file has them: pydantic adds the kind of a provider, and a mark for a bad key."""
    kept = location[:2] + location[3:] if location[:1] == ("providers",) else location
    return tuple(part for part in kept if part != "[key]")


def _line_of(text: str, path: tuple[int | str, ...]) -> int | None:
    """The line, from 1, of the deepest part of `path` that has one of its own."""
    table: list[str] = []
    deepest, line = 0, None
    for number, written in enumerate(map(str.lstrip, text.split("\n")), start=1):
        if header := re.match(r"\[+([^\[\]]+)\]", written):
            here = table = _dotted(header[1])
        elif key := re.match(r"([^=#\[\]]+)=", written):
            here = table + _dotted(key[1])
        else:
            continue
        if len(here) > deepest and tuple(here) == path[: len(here)]:
            deepest, line = len(here), number
    return line


def _dotted(key: str) -> list[str]:
    return [double or single or bare for double, single, bare in re.findall(r"\"([^\"]*)\"|'([^']*)'|([\w-]+)", key)]


def _fault(path: Path, text: str, key: tuple[int | str, ...], reason: str, mend: str) -> ConfigurationFault:
    line = _line_of(text, key)
    name = ".".join(str(part) for part in key)
    return ConfigurationFault(
        f"{path.name} cannot be used: {name + ': ' if name else ''}{reason}.",
        category="configuration",
        why="Nothing runs on settings that cannot be meant.",
        inspect=f"{path}, line {line}" if line else str(path),
        next_command=mend,
    )


def default_text() -> str:
    """The commented `sovereign.toml` that `init` writes: `default.toml`, beside this module."""
    return Path(__file__).with_name("default.toml").read_text(encoding="utf-8")
