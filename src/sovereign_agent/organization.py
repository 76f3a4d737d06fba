"""Organization: who may do what, and the run of an assignment.

    outcome -> statement of work -> assignment -> run -> receipt -> verification -> review -> acceptance

Every act asks two questions before it moves anything: does `sovereign.toml` give this actor that authority,
and does the ledger forbid it by what the actor did before: nobody verifies what they did, reviews what they
planned, assigned or did, or accepts what they did or reviewed. Actor ids are names, not credentials: who may
speak for an actor is decided by who may run this program on this ledger.

`run_assignment` never believes what it remembers. Its first act is the actor's lease, its last the lease's
release; in between the terminal write is refused if the attempt is no longer the current one, and then
nothing of the run becomes canonical: no receipt, no event, no file on disk.

    lease (commit)  ->  attempt + RUNNING (commit)  ->  the program runs, no transaction open; a keeper renews both
        ->  terminal state + receipt + events (commit)  ->  receipt.json, workspace policy  ->  release (commit)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sovereign_agent import configuration, fencing, journal, outcomes, providers, relay, runs, verdicts, workspace
from sovereign_agent.clock import Clock, monotonic
from sovereign_agent.configuration import Act, ActorSettings, ProviderSettings, Settings, resolve_reference
from sovereign_agent.database import LEDGER_NAME, Connection, Database
from sovereign_agent.errors import ConfigurationFault, IllegalMove, PolicyRefusal, wrong_length, wrong_state
from sovereign_agent.liveness import this_process
from sovereign_agent.providers.base import Envelope, OutcomeBrief, Proposal, SowBrief
from sovereign_agent.providers.process import Leash
from sovereign_agent.records import (
    IDLE_SOW_STATES,
    STUCK_SOW_STATES,
    Assignment,
    ExecutionAttempt,
    Message,
    Outcome,
    OutcomeState,
    Receipt,
    Role,
    Ruling,
    Sow,
    SowState,
    Verdict,
)

OPEN_OUTCOME = (OutcomeState.ACTIVE, OutcomeState.AT_RISK, OutcomeState.READY)
TEXT_LIMIT_CHARACTERS = 4000
LONGEST_RUN_SECONDS = 31_536_000


class _LookedEnough(Exception):
    """Ends a transaction that was only there to look in."""


def invoke_actor(settings: ProviderSettings, envelope: Envelope, folder: workspace.Workspace, leash: Leash) -> Proposal:
    """Run an actor's program and return what it proposes. It decides nothing: see `Organization.run_assignment`."""
    return providers.build(settings).run(envelope, folder, leash)


class Organization:
    """One organization, opened by one process.

    Args:
        root: the folder with `sovereign.toml`. Nothing is created: see `init`.
        clock: a clock to judge by instead of the ledger's own; for tests.
        read_only: open the ledger for reading only.

    Raises ConfigurationFault, LedgerUnavailable, SchemaMismatch.
    """

    def __init__(self, root: Path | str, *, clock: Clock | None = None, read_only: bool = False) -> None:
        self.root = Path(root).resolve()
        self.settings: Settings = configuration.load(self.root)
        self.process_identity = fencing.new_process_identity()
        self.db = Database(
            self.settings.ledger.url or self.root / LEDGER_NAME,
            root=self.root,
            create=False,
            read_only=read_only,
            clock=clock,
            marker=self.settings.authority.marker_path,
        )
        self._host = runs.Host(self.db, self.process_identity)
        try:
            for component, reference in self.settings.extensions.items():
                self.db.extend(component, resolve_reference(reference, self.root))
        except BaseException:
            self.close()
            raise

    @classmethod
    def init(cls, root: Path | str, *, ledger_url: str = "", clock: Clock | None = None) -> Organization:
        """Make an organization's folder, settings and ledger; whatever is already there stays as it is."""
        folder = Path(root).resolve()
        try:
            configuration.make_folder(folder)
        except OSError as error:
            raise ConfigurationFault(
                f"{folder} cannot be an organization's folder.", category="configuration", why=str(error.strerror)
            ) from error
        known = configuration.load(folder) if (folder / configuration.FILE_NAME).exists() else None
        url, marker = (known.ledger.url, known.authority.marker_path) if known else (ledger_url, None)
        configuration.check_default(folder, url)
        Database(url or folder / LEDGER_NAME, root=folder, create=True, marker=marker).close()
        configuration.write_default(folder, url)  # last, so that a URL that leads nowhere leaves no settings behind
        return cls(folder, clock=clock)

    def close(self) -> None:
        """Close the ledger. Idempotent."""
        self.db.close()

    # --- wanting and planning -----------------------------------------------------------------------------

    def create_outcome(
        self, title: str, desired_state: str, checks: Sequence[str], owner: str, subject: str = ""
    ) -> Outcome:
        """Write down what is wanted, as a DRAFT. `checks` are names from ``[checks]`` in `sovereign.toml`.

        Raises PolicyRefusal (``authority_refusal``), IllegalMove (``unknown_check``, ``invalid_text``).
        """
        self._authorize(owner, "create_outcome")
        for name in checks:
            verdicts.require_check(self.settings.checks, name)
        with self.db.transaction() as connection:
            return outcomes.create_outcome(
                connection,
                title=_text(title, "title"),
                desired_state=_text(desired_state, "desired state"),
                checks=checks,
                owner=owner,
                subject=subject,
                now=self.db.now(),
            )

    def activate(self, outcome_id: str, actor_id: str) -> Outcome:
        """Let work towards an outcome begin: DRAFT -> ACTIVE."""
        self._authorize(actor_id, "activate")
        with self.db.immediate() as connection:
            outcomes.activate_outcome(connection, outcome_id, actor=actor_id, now=self.db.now())
            return outcomes.get_outcome(connection, outcome_id)

    def create_sow(
        self,
        outcome_id: str,
        scope: str,
        role: Role | str,
        actor_id: str,
        required_effect_kind: str | None = None,
        *,
        ready: bool = False,
    ) -> Sow:
        """Write a statement of work: a DRAFT, or with `ready` one that can be assigned at once.

        With `required_effect_kind`, evidence of that kind must exist before the work can be verified.
        """
        self._authorize(actor_id, "plan")
        with self.db.immediate() as connection:
            _require_open(outcomes.lock_outcome(connection, outcome_id), also=(OutcomeState.DRAFT,))
            now = self.db.now()
            sow = outcomes.create_sow(
                connection,
                outcome_id=outcome_id,
                scope=_text(scope, "scope"),
                role=_role(role),
                created_by=actor_id,
                required_effect_kind=required_effect_kind,
                now=now,
            )
            outcomes.reproject_outcome(connection, outcome_id, now=now)
            return self._ready(connection, sow) if ready else sow

    def ready_sow(self, sow_id: str) -> Sow:
        """Declare a statement of work fit to be assigned: DRAFT -> READY. Its outcome must be active."""
        with self.db.immediate() as connection:
            return self._ready(connection, outcomes.get_sow(connection, sow_id))

    def _ready(self, connection: Connection, sow: Sow) -> Sow:
        _require_open(outcomes.lock_outcome(connection, sow.outcome_id))
        drafts, now = (SowState.DRAFT,), self.db.now()
        outcomes.move_sow(connection, sow.id, drafts, SowState.READY, actor=sow.created_by, now=now)
        return outcomes.get_sow(connection, sow.id)

    def assign(
        self,
        sow_id: str,
        actor_id: str,
        planner_id: str,
        *,
        workspace_policy: str = workspace.POLICIES[0],
        maximum: timedelta | None = None,
    ) -> Assignment:
        """Give a statement of work to an actor; again, after it failed, blocked or was rejected.

        No run of it lasts longer than `maximum`, from a second to a year, by default ``authority.maximum_run_seconds``.

        Raises PolicyRefusal (``authority_refusal``, ``unknown_workspace_policy``, ``parked``), IllegalMove (also
        ``invalid_number``).
        """
        self._authorize(planner_id, "assign")
        actor = self._authorize(actor_id, "execute")
        workspace.check_policy(workspace_policy)
        seconds = int((self.settings.authority.maximum_run if maximum is None else maximum).total_seconds())
        if not 1 <= seconds <= LONGEST_RUN_SECONDS:
            why = f"A run may last from a second to {LONGEST_RUN_SECONDS} seconds."
            raise IllegalMove(f"{sow_id} was not assigned.", category="invalid_number", why=why)
        with self.db.immediate() as connection:
            sow = outcomes.get_sow(connection, sow_id)
            _require_open(outcomes.lock_outcome(connection, sow.outcome_id))
            runs.require_unparked(connection, sow_id, self.settings.authority)
            if actor.role != sow.role:
                raise _forbidden(
                    f"{sow_id} was not assigned to {actor_id}.", f"It needs a {sow.role}, and this is a {actor.role}."
                )
            return outcomes.create_assignment(
                connection,
                sow_id=sow_id,
                actor_id=actor_id,
                planner_id=planner_id,
                workspace_policy=workspace_policy,
                maximum_seconds=seconds,
                now=self.db.now(),
            )

    def cancel(self, assignment_id: str, actor_id: str) -> Assignment:
        """Call an assignment off.

        A RUNNING one loses its attempt: nothing its program does becomes canonical, it is stopped at its worker's next
        renewal, and its receipt says ``interrupted``.
        Raises PolicyRefusal, Refusal (``assignment_missing``), IllegalMove when it has already ended.
        """
        self._authorize(actor_id, "cancel")
        with self.db.immediate() as connection:
            now = self.db.now()
            if not outcomes.cancel_created_assignment(connection, assignment_id, actor=actor_id, now=now):
                runs.revoke(connection, outcomes.get_assignment(connection, assignment_id), actor_id, now=now)
            return outcomes.get_assignment(connection, assignment_id)

    def cancel_sow(self, sow_id: str, actor_id: str) -> Sow:
        """Call a statement of work off that nobody is at work on; its outcome no longer waits for it."""
        self._authorize(actor_id, "cancel")
        with self.db.immediate() as connection:
            to, now = SowState.CANCELED, self.db.now()
            outcomes.move_sow(connection, sow_id, IDLE_SOW_STATES, to, actor=actor_id, now=now)
            return outcomes.get_sow(connection, sow_id)

    def cancel_outcome(self, outcome_id: str, actor_id: str) -> Outcome:
        """Give an outcome up of whose work nothing is assigned."""
        self._authorize(actor_id, "cancel")
        with self.db.immediate() as connection:
            outcomes.cancel_outcome(connection, outcome_id, actor=actor_id, now=self.db.now())
            return outcomes.get_outcome(connection, outcome_id)

    def free_actor(self, actor_id: str, authority_id: str) -> bool:
        """Take an actor's lease from a process that is gone, without waiting for it to run out.

        False, and nothing changed, when nobody holds one. Raises AlreadyHeld (``actor_not_freed``) when it carries a
        run: `cancel` that first.
        """
        self._authorize(authority_id, "cancel")
        with self.db.immediate() as connection:
            return runs.free(connection, actor_id, authority_id, now=self.db.now())

    # --- running ------------------------------------------------------------------------------------------

    def run_assignment(self, assignment_id: str) -> Receipt:
        """Run an assignment's program and record how it ended.

        Raises AlreadyHeld (``actor_lease_held``, ``execution_attempt_held``) before anything is touched;
        AuthorityLost (``execution_attempt_lost``, ``actor_lease_lost``, ``lease_lost``) when its authority was lost,
        and then nothing of the run is recorded;
        PolicyRefusal (also ``parked``), IllegalMove, Refusal (``assignment_missing``). An interruption is recorded,
        then raised.
        """
        assignment = outcomes.get_assignment(self.db.connection, assignment_id)
        with self._host.hosting(assignment.actor_id, self.settings.authority.lease_ttl) as lease:
            settings = self._may_run(assignment)
            return self._host.run(
                self.root,
                assignment,
                lease,
                partial(self._propose, assignment, settings),
                authority=self.settings.authority,
                room=timedelta(seconds=getattr(settings, "grace_seconds", 0.0)),
                process=this_process(),
            )

    def _may_run(self, assignment: Assignment) -> ProviderSettings:
        """All that can be refused before anything is touched."""
        workspace.check_policy(assignment.workspace_policy)
        workspace.check_root(self.root)
        actor = self._authorize(assignment.actor_id, "execute")
        settings = self.settings.providers[actor.provider]
        runs.require_unparked_takeover(self.db.connection, assignment, self.settings.authority, now=self.db.now())
        return settings.model_copy(
            update={"timeout_seconds": min(settings.timeout_seconds, assignment.maximum_seconds)}
        )

    def _propose(
        self, assignment: Assignment, settings: ProviderSettings, attempt: ExecutionAttempt, leash: Leash
    ) -> Proposal:
        until = monotonic() + self.settings.authority.execution_attempt_seconds
        envelope = runs.patiently(partial(self._envelope, assignment, attempt), until)
        return invoke_actor(settings, envelope, workspace.allocate(self.root, attempt.id), leash)

    def _envelope(self, assignment: Assignment, attempt: ExecutionAttempt) -> Envelope:
        connection = self.db.connection
        sow = outcomes.get_sow(connection, assignment.sow_id)
        outcome = outcomes.get_outcome(connection, sow.outcome_id)
        return Envelope(
            assignment_id=assignment.id,
            attempt_id=attempt.id,
            actor_id=assignment.actor_id,
            outcome=OutcomeBrief(id=outcome.id, title=outcome.title, desired_state=outcome.desired_state),
            sow=SowBrief(id=sow.id, scope=sow.scope, required_effect_kind=sow.required_effect_kind),
            rulings=tuple(ruling.decision for ruling in outcomes.rulings_of(connection, sow.id)),
        )

    def record_effect(
        self, connection: Connection, assignment_id: str, kind: str, detail: dict[str, Any], recorded_by: str
    ) -> None:
        """Keep evidence of an effect, in the transaction that makes it. The assignment must be COMPLETED."""
        outcomes.record_evidence(connection, assignment_id, kind, detail, recorded_by, now=self.db.now())

    # --- judging ------------------------------------------------------------------------------------------

    def verify_sow(self, sow_id: str, verifier_id: str) -> Verdict:
        """Check completed work against its receipt: COMPLETED -> VERIFIED, or REJECTED.

        The deliverables must still be what the receipt says they were, and a required effect must be there.
        Raises PolicyRefusal (``authority_refusal``; ``self_approval`` for whoever did any of it), IllegalMove.
        """
        self._authorize(verifier_id, "verify")
        connection = self.db.connection
        receipt = verdicts.completing_receipt(connection, sow_id)
        workers = {assignment.actor_id for assignment in outcomes.assignments_of(connection, sow_id)}
        _keep_apart(verifier_id, "verify", sow_id, workers)
        verdict = verdicts.inspect_work(self.root, receipt)
        with self.db.immediate() as connection:
            now = self.db.now()
            sow = outcomes.get_sow(connection, sow_id)
            kinds = {str(item["kind"]) for item in outcomes.evidence_of(connection, receipt.assignment_id)}
            if verdict.passed and sow.required_effect_kind and sow.required_effect_kind not in kinds:
                verdict = verdicts.failed(f"No evidence of the required effect {sow.required_effect_kind!r}.")
            if verdicts.completing_receipt(connection, sow_id).id != receipt.id:
                raise wrong_state(f"{sow_id} was not judged.", "It was done again in the meantime.", sow_id)
            to = SowState.VERIFIED if verdict.passed else SowState.REJECTED
            outcomes.move_sow(connection, sow_id, (SowState.COMPLETED,), to, actor=verifier_id, now=now)
            outcomes.record_verification(
                connection,
                subject=sow_id,
                assignment_id=receipt.assignment_id,
                verifier=verifier_id,
                verdict=verdict,
                now=now,
            )
        return verdict

    def verify_outcome(self, outcome_id: str, verifier_id: str) -> list[tuple[str, Verdict]]:
        """Run an outcome's checks and record what they found. Moves nothing: `accept` runs them again.

        Raises PolicyRefusal (``authority_refusal``; ``self_approval`` for whoever did any of its work).
        """
        self._authorize(verifier_id, "verify")
        _keep_apart(verifier_id, "verify", outcome_id, outcomes.workers_on(self.db.connection, outcome_id))
        found: dict[str, Verdict] = {}
        with suppress(_LookedEnough), self.db.immediate() as connection:
            found = self._run_checks(connection, outcomes.get_outcome(connection, outcome_id))
            raise _LookedEnough  # no check may write, and one that broke may have taken the transaction with it
        with self.db.transaction() as connection:
            outcomes.record_verification(
                connection,
                subject=outcome_id,
                assignment_id="",
                verifier=verifier_id,
                verdict=verdicts.together(found),
                now=self.db.now(),
            )
        return list(found.items())

    def review(self, sow_id: str, reviewer_id: str, *, approve: bool = True, note: str = "") -> Sow:
        """Approve or reject verified work: VERIFIED -> APPROVED | REJECTED.

        Raises PolicyRefusal (``authority_refusal``; ``self_approval`` for whoever planned, assigned or did any of
        it), IllegalMove.
        """
        self._authorize(reviewer_id, "review")
        with self.db.immediate() as connection:
            sow = outcomes.get_sow(connection, sow_id)
            tries = outcomes.assignments_of(connection, sow_id)
            hands = {sow.created_by} | {a.actor_id for a in tries} | {a.planner_id for a in tries}
            _keep_apart(reviewer_id, "review", sow_id, hands)
            to = SowState.APPROVED if approve else SowState.REJECTED
            now = self.db.now()
            outcomes.move_sow(connection, sow_id, (SowState.VERIFIED,), to, actor=reviewer_id, now=now)
            outcomes.record_review(
                connection,
                sow_id=sow_id,
                assignment_id=verdicts.completing_receipt(connection, sow_id).assignment_id,
                reviewer=reviewer_id,
                approved=approve,
                note=note,
                now=now,
            )
            return outcomes.get_sow(connection, sow_id)

    def accept(self, outcome_id: str, accepter_id: str) -> Outcome:
        """Accept an outcome whose work is all approved: READY -> ACCEPTED.

        Its checks run again, inside the accepting transaction: what was true at the review may not be now.
        Raises PolicyRefusal (``authority_refusal``, ``self_approval``, ``condition_not_met``), IllegalMove.
        """
        self._authorize(accepter_id, "accept")
        with self.db.immediate() as connection:
            outcome = outcomes.lock_outcome(connection, outcome_id)
            hands = outcomes.workers_on(connection, outcome_id) | outcomes.reviewers_on(connection, outcome_id)
            _keep_apart(accepter_id, "accept", outcome_id, hands)
            verdict = verdicts.together(self._run_checks(connection, outcome))
            if not verdict.passed:
                raise PolicyRefusal(
                    f"Outcome {outcome_id} was not accepted.",
                    category="condition_not_met",
                    why=verdict.reason,
                    inspect=f"sovereign-agent inspect {outcome_id}",
                )
            now = self.db.now()
            outcomes.accept_outcome(connection, outcome_id, accepter=accepter_id, detail=verdict.detail, now=now)
            return outcomes.get_outcome(connection, outcome_id)

    def rule(self, sow_id: str, decision: str, principal_id: str) -> Ruling:
        """Decide what blocked, failed or rejected work could not.

        It becomes READY, and the decision goes into every later envelope.
        """
        self._authorize(principal_id, "rule")
        with self.db.immediate() as connection:
            now = self.db.now()
            outcomes.move_sow(connection, sow_id, STUCK_SOW_STATES, SowState.READY, actor=principal_id, now=now)
            return outcomes.record_ruling(
                connection, sow_id=sow_id, decision=_text(decision, "decision"), principal=principal_id, now=now
            )

    def rebind_actor(self, actor_id: str, provider: str, authority_id: str) -> None:
        """Let another provider work for an actor, in `sovereign.toml`, and note who decided so."""
        self._authorize(authority_id, "rebind")
        with self.db.immediate() as connection:  # which also keeps two edits of the one file apart
            detail, now = {"provider": provider}, self.db.now()
            journal.record(connection, "actor.rebound", actor_id, actor=authority_id, at=now, detail=detail)
            configuration.set_actor_provider(self.root, actor_id, provider)
        self.settings = configuration.load(self.root)

    # --- mail and looking ---------------------------------------------------------------------------------

    def send(self, sender: str, recipient: str, subject: str, body: str) -> Message:
        """Put a message into a declared actor's mailbox."""
        for actor_id in (sender, recipient):
            self.settings.actor(actor_id)
        return relay.send(self.db, sender, recipient, subject, body)

    def inbox(self, actor_id: str) -> list[Message]:
        """What an actor may claim now."""
        self.settings.actor(actor_id)
        return relay.inbox(self.db, actor_id)

    def status_text(self) -> str:
        """Every open outcome and its work, a line each."""
        lines: list[str] = []
        connection = self.db.connection
        for outcome in outcomes.open_outcomes(connection):
            lines.append(f"{outcome.state:<9} {outcome.id}  {outcome.title}")
            for sow in outcomes.sows_of(connection, outcome.id):
                lines.append(f"  {sow.state:<9} {sow.id}  {sow.scope}")
                tries = outcomes.assignments_of(connection, sow.id)
                lines += [f"    {each.state:<9} {each.id}  {each.actor_id}" for each in tries]
        return "\n".join(lines) or "No open outcome."

    # --- rules --------------------------------------------------------------------------------------------

    def _authorize(self, actor_id: str, act: Act) -> ActorSettings:
        actor = self.settings.actor(actor_id)
        if act not in actor.authority:
            raise _forbidden(
                f"{actor_id} may not {act.replace('_', ' ')}.",
                f"Its authority in sovereign.toml is {', '.join(actor.authority)}.",
            )
        return actor

    def _run_checks(self, connection: Connection, outcome: Outcome) -> dict[str, Verdict]:
        return verdicts.run_checks(connection, outcome, self.settings.checks, self.root)


def _keep_apart(actor_id: str, act: str, subject: str, hands: set[str]) -> None:
    if actor_id in hands:
        raise PolicyRefusal(
            f"{actor_id} may not {act} {subject}.",
            category="self_approval",
            why="The ledger shows that it has had a hand in this work, and nobody judges its own.",
            inspect=f"sovereign-agent inspect {subject}",
            next_command=f"let another actor {act} it",
        )


def _require_open(outcome: Outcome, *, also: tuple[OutcomeState, ...] = ()) -> None:
    if outcome.state not in OPEN_OUTCOME + also:
        raise IllegalMove(
            f"Outcome {outcome.id} takes no work now.",
            category="illegal_move",
            why=f"It is {outcome.state.value}.",
            inspect=f"sovereign-agent inspect {outcome.id}",
            next_command=f"sovereign-agent outcome activate {outcome.id} --by ACTOR"
            if outcome.state is OutcomeState.DRAFT
            else "",
        )


def _forbidden(happened: str, why: str) -> PolicyRefusal:
    return PolicyRefusal(happened, category="authority_refusal", why=why, inspect="sovereign-agent actor list")


def _role(role: Role | str) -> Role:
    if role in set(Role):
        return Role(role)
    raise IllegalMove(f"There is no role {role!r}.", category="unknown_role", why=f"Known: {', '.join(Role)}.")


def _text(value: str, what: str) -> str:
    if value.strip() and len(value) <= TEXT_LIMIT_CHARACTERS:
        return value
    raise wrong_length(f"The {what} cannot be recorded.", TEXT_LIMIT_CHARACTERS)
