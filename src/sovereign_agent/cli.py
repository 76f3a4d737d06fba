"""The command line: it finds the verb, and turns the verb's end into an exit code and words.

No rule of the house lives here or in commands/. Nothing heavy is imported before a verb asks for it: `--help`
must start at once, and a signal that meets the supervisor while it starts must find its handler in place.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import takewhile
from types import FrameType
from typing import TYPE_CHECKING, cast

from sovereign_agent.errors import ConfigurationFault, Contention, LedgerFault, ProviderFault, Refusal, SovereignError

if TYPE_CHECKING:
    import typer

PROGRAM = "sovereign-agent"
BUG = 70
CLOSED_PIPE = 141
"""What a shell answers for a program that SIGPIPE ended."""


class Misuse(SovereignError):
    """The command line cannot be understood."""


EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (Refusal, 1),  # it stands before OSError, because AuthorityLost is both
    (Misuse, 2),
    (ConfigurationFault, 2),
    (Contention, 3),
    (LedgerFault, 4),
    (OSError, 4),
    (ProviderFault, 5),
    (KeyboardInterrupt, 130),
    (BaseException, BUG),
)
"""The exit code of everything that can end a verb; the first match is the one. A verb that is done ends with 0."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Without `arguments`, the process's own."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is None and _verb(given) == "supervisor":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _end_at_once)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the locale cannot show is escaped
    try:
        code = _attempt(given)
    except (BrokenPipeError, SystemExit):  # the second is rich's answer to a closed pipe
        code = CLOSED_PIPE
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None, when it was closed before the start
        try:
            stream.flush()
        except OSError:  # what could not be written has been told; the interpreter would complain once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def application() -> typer.Typer:
    """Every verb, in the order in which work meets them."""
    import typer

    from sovereign_agent.commands import (
        actor,
        assistant,
        authority,
        demo,
        doctor,
        heartbeat,
        init,
        judging,
        looking,
        mail,
        options,
        outcome,
        simulate,
        supervisor,
        torture,
        work,
    )

    app = typer.Typer(
        help="Run AI-agent workers that may be killed at any instant, and keep a record that never lies about them.",
        epilog="An actor's id is a name, not a credential: whoever may run this program on this ledger may speak for"
        " every actor. Exit codes: 0 done, 1 refused, 2 usage or settings, 3 busy, 4 ledger, 5 provider.",
        add_completion=False,
        rich_markup_mode=None,  # help in colours would double the time that help takes
        pretty_exceptions_enable=False,
    )
    app.callback()(options.before_the_verb)
    for verb in (
        init.init,
        doctor.doctor,
        work.plan,
        work.assign,
        work.run,
        work.cancel,
        judging.verify,
        judging.review,
        judging.accept,
        mail.send,
        mail.inbox,
        looking.status,
        looking.inspect,
        supervisor.supervisor,
        heartbeat.heartbeat,
        authority.pause,
        authority.resume,
        authority.backup,
        authority.restore,
        simulate.simulate,
        torture.torture,
    ):
        app.command()(verb)
    for name, family in (
        ("outcome", outcome.app),
        ("actor", actor.app),
        ("ruling", judging.ruling),
        ("assistant", assistant.app),
        ("authority", authority.app),
        ("demo", demo.app),
    ):
        app.add_typer(family, name=name)
    return app


def _attempt(given: list[str]) -> int:
    try:
        return _invoke(given or ["--help"])
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it is, it gets a code and words
        code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
        _complain(_in_words(error), code, as_json="--json" in takewhile(lambda word: word != "--", given))
        if code == BUG and os.environ.get("SOVEREIGN_DEBUG") == "1":
            sys.excepthook(type(error), error, error.__traceback__)
        return code


def _invoke(given: list[str]) -> int:
    import typer.main

    from sovereign_agent.commands import printing

    printing.asked_root = ""
    usage_error = cast("type[typer.BadParameter]", typer.BadParameter.__base__)  # the name that Typer does not export
    command = typer.main.get_command(application())
    try:
        with command.make_context(PROGRAM, given) as context:
            return command.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code
    except usage_error as error:
        place = error.ctx.command_path if error.ctx else PROGRAM
        raise Misuse(error.format_message(), category="usage", next_command=f"{place} --help") from error


def _verb(given: list[str]) -> str:
    """The first word that is neither an option nor the value of one."""
    words = iter(given)
    for word in words:
        if word == "--root":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)  # a supervisor may die at any line, and an exception could get lost inside an import


def _in_words(error: BaseException) -> SovereignError:
    """Whatever ended a verb, in the form of the house."""
    match error:
        case SovereignError():
            return error
        case KeyboardInterrupt():
            return SovereignError(
                "Interrupted.",
                category="interrupted",
                why="What was committed stands, and nothing else.",
                inspect=f"{PROGRAM} status",
            )
        case OSError():
            return SovereignError(f"The operating system refused: {error}.", category="operating_system")
        case _:
            what = f"{type(error).__name__}: {error}"
            return SovereignError(
                f"This is a bug of {PROGRAM}, in {_place_of(error)}: {what} (SOVEREIGN_DEBUG=1 shows the traceback)",
                category="bug",
            )


def _place_of(error: BaseException) -> str:
    """The last line of this package that the error passed through."""
    place, trace = "an unknown place", error.__traceback__
    while trace:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("sovereign_agent"):
            place = f"{module}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _complain(error: SovereignError, code: int, *, as_json: bool) -> None:
    import typer

    from sovereign_agent.commands.printing import entry, to_json

    document = {"error": {**error.document(), "exit_code": code}}
    typer.echo(to_json(document) if as_json else entry(error.happened, error.answers()), err=True)
