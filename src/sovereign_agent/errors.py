"""Every exception of this package, and what each one asks of you.

    SovereignError
    ├── Refusal             the house said no, and nothing changed: give up, or do what it says
    │   ├── AuthorityLost   you held the right once and no longer do (also a PermissionError)
    │   ├── AlreadyHeld     somebody else holds it now
    │   ├── IllegalMove     this state does not allow that move, or this value is not one (also a ValueError)
    │   └── PolicyRefusal   the rules of the organization forbid it
    ├── Contention          the ledger is busy: the same call may be repeated
    ├── LedgerFault         call a human
    │   ├── LedgerUnavailable   it cannot be reached, opened or written
    │   ├── SchemaMismatch      it was made by another version, or tampered with
    │   └── ConstraintBroken    a row was offered that the ledger will never take
    ├── ProviderFault       an outside program could not be started or understood
    └── ConfigurationFault  sovereign.toml says something that cannot be meant (also a ValueError)

`AuthorityLost` is an OSError by inheritance. Where files are handled, ``except AuthorityLost: raise``
stands before ``except OSError``.
"""

from __future__ import annotations

from collections.abc import Callable


class SovereignError(Exception):
    """The root of the tree: catch it to catch everything this package raises on purpose.

    Args:
        happened: what happened, one sentence. It is ``str(error)``.
        category: a stable machine-readable word.
        why: the reason.
        inspect: the command, or the place, that shows more.
        next_command: what to type next.
    """

    def __init__(
        self, happened: str, *, category: str = "", why: str = "", inspect: str = "", next_command: str = ""
    ) -> None:
        super().__init__(happened)
        self.happened = happened
        self.category = category
        self.why = why
        self.inspect = inspect
        self.next_command = next_command
        for label, text in self.answers():
            self.add_note(f"  {label:<6} {text}")

    def answers(self) -> list[tuple[str, str]]:
        """The (label, text) lines that stand below `happened`, without the empty ones."""
        lines = [("why", self.why), ("look", self.inspect), ("next", self.next_command)]
        return [(label, text) for label, text in lines if text]

    def document(self) -> dict[str, str]:
        """All that it says, by name, the empty ones too."""
        return {name: getattr(self, name) for name in ("category", "happened", "why", "inspect", "next_command")}

    def __str__(self) -> str:
        return self.happened

    def __reduce__(self) -> tuple[Callable[..., SovereignError], tuple[type[SovereignError], dict[str, str]]]:
        return _rebuild, (type(self), self.document())


def _rebuild(kind: type[SovereignError], answers: dict[str, str]) -> SovereignError:
    return kind(**answers)


class Refusal(SovereignError):
    """The house said no. Nothing changed, and the same call will be refused again."""


class AuthorityLost(Refusal, PermissionError):
    """The lease, attempt or claim that this call presented is no longer the current one."""


class AlreadyHeld(Refusal):
    """Another process holds it, and its time is not over."""


class IllegalMove(Refusal, ValueError):
    """The record's state does not allow this move, or a value is outside what the ledger takes."""


class PolicyRefusal(Refusal):
    """The organization's own rules forbid it: role, separation of duties, workspace policy."""


class Contention(SovereignError):
    """The ledger was busy for longer than this call may wait. Nothing changed; the same call may be repeated."""


class LedgerFault(SovereignError):
    """Something is wrong with the ledger itself. Do not retry in a loop: call a human."""


class LedgerUnavailable(LedgerFault):
    """The ledger cannot be reached, opened, read or written."""


class SchemaMismatch(LedgerFault):
    """The ledger's schema is newer than this program, or is not what its own migrations left."""


class ConstraintBroken(LedgerFault):
    """The ledger refused a row by its own constraints."""


class ProviderFault(SovereignError):
    """An outside program could not be started, spoken to or understood."""


class ConfigurationFault(SovereignError, ValueError):
    """`sovereign.toml` is missing, unreadable or says what cannot be meant."""


def wrong_state(happened: str, why: str, record_id: str, next_command: str = "") -> IllegalMove:
    """The refusal for an act that a record's state does not allow."""
    inspect = f"sovereign-agent inspect {record_id}"
    return IllegalMove(happened, category="illegal_move", why=why, inspect=inspect, next_command=next_command)


def wrong_length(happened: str, limit: int) -> IllegalMove:
    """The refusal for a text that is empty or too long; `limit` is in characters."""
    return IllegalMove(happened, category="invalid_text", why=f"It must have 1 to {limit} characters.")


def actor_lease_lost(actor_id: str, fencing_token: int) -> AuthorityLost:
    """The refusal for an act under a lease that is not the current one."""
    return AuthorityLost(
        f"The lease on actor {actor_id} under token {fencing_token} is no longer current.",
        category="actor_lease_lost",
        why="It ran out, was released, or another process has taken the actor over.",
        inspect="sovereign-agent actor list",
        next_command="repeat the command: it takes a new lease",
    )


def execution_attempt_lost(assignment_id: str, attempt_id: str) -> AuthorityLost:
    """The refusal for an act under an attempt that is not the current one."""
    return AuthorityLost(
        f"Attempt {attempt_id} is no longer the current one of assignment {assignment_id}.",
        category="execution_attempt_lost",
        why="It was recovered, canceled or taken over while its process ran on. Nothing it did was recorded.",
        inspect=f"sovereign-agent inspect {assignment_id}",
        next_command="sovereign-agent assign SOW ACTOR --by ACTOR",
    )


def lease_unconfirmed(assignment_id: str, why: str) -> AuthorityLost:
    """The refusal for a run whose authority could not be confirmed before it might have run out."""
    return AuthorityLost(
        f"The authority to run assignment {assignment_id} could not be confirmed in time.",
        category="lease_lost",
        why=f"{why} Its program was stopped, and nothing that it did was recorded.",
        inspect=f"sovereign-agent inspect {assignment_id}",
        next_command="wait for a supervisor to record the loss, then: sovereign-agent assign",
    )
