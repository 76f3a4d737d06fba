"""Accounts: as whom a program runs, if not as its worker, and what of a run's folder is handed over to it.

Only a privileged worker can give a program another user, and one that cannot refuses: to run it as oneself instead
would be what `run_as` is there to prevent. No link is followed on the way to the folder.
"""

from __future__ import annotations

import grp
import os
import pwd
from contextlib import ExitStack
from dataclasses import dataclass

from sovereign_agent.configuration import held_open
from sovereign_agent.errors import ProviderFault
from sovereign_agent.workspace import OUT_NAME, Workspace

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Account:
    """A user to run as: `group` is the first, `groups` are all of them."""

    name: str
    home: str
    user: int
    group: int
    groups: list[int]


def find(run_as: str) -> Account:
    """The account that ``user`` or ``user:group`` names.

    Raises ProviderFault (``capability_refusal``) when there is none, or this worker may not change its user.
    """
    name, _, group_name = run_as.partition(":")
    try:
        entry = pwd.getpwnam(name)
        group = grp.getgrnam(group_name).gr_gid if group_name else entry.pw_gid
    except KeyError as error:
        raise _fault(run_as, f"this host does not know it ({error.args[0]})") from None
    if os.geteuid() != 0:
        raise _fault(run_as, "only a worker that runs as root can start a program as somebody else")
    return Account(name, entry.pw_dir, entry.pw_uid, group, os.getgrouplist(name, group))


def hand_over(workspace: Workspace, account: Account) -> None:
    """Give a run's folder and its output to the account, and let it pass through the two folders above.

    Of those it learns no names, and what its program prints stays out of its reach. Raises OSError.
    """
    with ExitStack() as stack:
        sovereign = stack.enter_context(held_open(workspace.path.parents[1], _FOLDER))
        runs = stack.enter_context(held_open(workspace.path.parent.name, _FOLDER, sovereign))
        run = stack.enter_context(held_open(workspace.id, _FOLDER, runs))
        out = stack.enter_context(held_open(OUT_NAME, _FOLDER, run))
        for above in (sovereign, runs):
            os.fchmod(above, 0o711)
        for own in (run, out):
            os.fchown(own, account.user, account.group)


def _fault(run_as: str, why: str) -> ProviderFault:
    return ProviderFault(
        f"No program can be started as {run_as!r}: {why}.",
        category="capability_refusal",
        why="A program that should run as another user is not run as this one instead.",
        inspect="sovereign.toml, run_as in [providers]",
        next_command="correct run_as, or start the worker as root",
    )
