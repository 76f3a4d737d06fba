"""What `assistant serve` and `assistant ask` need: the model and the tools that sovereign.toml or a script names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from sovereign_agent import assistant_service
from sovereign_agent.agent_loop import Model, Turn, is_turn
from sovereign_agent.assistant_work import Claim
from sovereign_agent.commands.printing import plain
from sovereign_agent.configuration import FILE_NAME, AssistantSettings, resolve_reference
from sovereign_agent.conversation import Watch
from sovereign_agent.errors import ConfigurationFault, SovereignError
from sovereign_agent.llm_lab import LiveModel, ScriptedModel, scripted_turn
from sovereign_agent.model_program import limits_of
from sovereign_agent.organization import Organization
from sovereign_agent.tool_dispatch import ExecutableTool


def answering(
    org: Organization, script: Path | None, *, owner: str, role: str, until: Callable[[], object] = bool
) -> Callable[[], None]:
    """A service of this organization, ready to run.

    Raises ConfigurationFault (``model_missing``, ``key_missing``, ``script_unreadable``, ``tools_unusable``) before
    anything is queued or claimed.
    """
    settings, watch = org.settings.assistant, Watch()
    model = _scripted(script) if script else _live(settings, watch)
    tools = _tools(org, settings)
    limits = replace(limits_of(settings.limits), context_bytes=settings.context_bytes)

    def run() -> None:
        with _answers_apart():
            assistant_service.serve(
                org.db,
                model,
                tools,
                owner=owner or org.process_identity,
                role=role,
                limits=limits,
                ttl=settings.claim_seconds,
                system=settings.system,
                watch=watch,
                until=until,
                tell=_tell,
            )

    return run


def _tell(line: str) -> None:
    """Say it on stderr, if that can still be written: what was done is in the ledger, and the service goes on."""
    with suppress(OSError, ValueError):
        typer.echo(plain(line), err=True)


@contextmanager
def _answers_apart() -> Generator[None]:
    """Let what a tool prints, or a program that it starts, go to stderr: stdout is for the answer."""
    if not (sys.__stdout__ and sys.__stderr__):  # it was closed, and its number may be another file's by now
        yield
        return
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)


def _scripted(path: Path) -> Model:
    try:
        said: Any = json.loads(path.read_text("utf-8"))
        return ScriptedModel([_turn(**turn) for turn in said])
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationFault(
            f"{path} is no script.",
            category="script_unreadable",
            why=f"{type(error).__name__}: {error}",
            next_command='a script is [{"calls": [{"name": "TOOL", "arguments": {}}]}, {"text": "Done."}]',
        ) from error


def _turn(text: Any = "", calls: Any = ()) -> Turn:
    turn = scripted_turn(text, calls)
    if not is_turn(turn):
        raise TypeError(f"a text, a name or an id is none in {turn!r}"[:200])
    return turn


def _live(settings: AssistantSettings, watch: Watch) -> Model:
    if settings.model is None:
        raise ConfigurationFault(
            "There is no model to answer with.",
            category="model_missing",
            why=f"{FILE_NAME} has no [assistant] with a model, and no --script was given.",
            inspect=FILE_NAME,
            next_command=f'add [assistant] with model = "NAME" to {FILE_NAME}, or try it with --script FILE',
        )
    key = os.environ.pop(settings.key_env, "").strip()  # no tool, and no program that one starts, inherits it
    if not key:
        raise ConfigurationFault(
            "There is no key to ask the model with.",
            category="key_missing",
            why=f"The variable {settings.key_env} is not set.",
            inspect=FILE_NAME,
            next_command=f"export {settings.key_env}=..., whatever it is for an endpoint without keys",
        )
    return LiveModel(settings.model, key, settings.base_url, settings.prices, watch.sleep)


def _tools(org: Organization, settings: AssistantSettings) -> Callable[[Claim], Iterable[ExecutableTool]]:
    if settings.tools is None:
        return lambda _: ()
    why = "What it returned is no list of ExecutableTool."
    try:
        built: list[Any] = resolve_reference(settings.tools, org.root)(org.db)
        if type(built) is list and all(isinstance(each, ExecutableTool) for each in built):
            return lambda _: built
    except SovereignError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is a user's code and may raise anything
        why = f"{type(error).__name__}: {error}"
    raise ConfigurationFault(
        f"{settings.tools} in {FILE_NAME} gave no tools.",
        category="tools_unusable",
        why=why,
        inspect=FILE_NAME,
        next_command="correct the function: it is given the ledger and returns a list of ExecutableTool",
    )
