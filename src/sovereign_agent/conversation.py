"""Conversation: one claimed item, worked through with a model. Home of assistant_evidence.

What a model is asked with is read anew in each life of an item, from what nobody can change any more:

    what it is told first, and how many turns are left out
    of each earlier turn of the session the prompt and the answer      the newest, as many as fit
    this item's prompt, and its transcript                             whole

Nothing derived from that is stored, no summary and no compaction, so there is nothing that could be lost or disagree
with it. No call of an earlier turn is told: none can be parted from its answer, and a call's place in this item, after
which its operation is named, is the same in each life.

What is written is written under the claim. A reply stands before its calls run; a fenced tool's write and its answer
are one commit, and so are the last reply and the end of the item; what another tool does outside is known as an effect
before it is done. Whatever interrupts the work, a kill, a busy ledger or a commit whose end is not known, has one way
on: whoever claims the item next goes on from the transcript.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from sovereign_agent import assistant_work, effects, heartbeat, tool_dispatch
from sovereign_agent.agent_loop import Limits, LoopResult, LoopStatus, Message, Model, run_loop, tool_message
from sovereign_agent.assistant_work import Claim
from sovereign_agent.clock import monotonic
from sovereign_agent.database import Connection, Database, Row
from sovereign_agent.errors import Contention, IllegalMove, LedgerUnavailable, SovereignError
from sovereign_agent.tool_dispatch import Answer, Dispatcher, ExecutableTool, Fence, Occasion, ToolCall

LIMITS = Limits(model_calls=40, tool_calls=100, seconds=900, output_tokens=4_000, context_bytes=2**18)
"""The most that one life of an item may use, unless its service says otherwise."""

MOST_RESULT_BYTES = 40_000
"""Of the results of one reply's calls: twice as much, escaped, is still a message that the ledger takes."""

MOST_EVIDENCE_BYTES = 2**22
MOST_COUNTED = 10_000
TURNS_READ = 20
RENEWALS = 4
"""A claim is renewed so often in its time: three renewals may fail, and it is still held."""

SLICE_SECONDS = 0.1
RETRY_SECONDS = 5.0
MAY_PASS = frozenset({"rate_limited", "server_error", "timeout", "connection_failed", "cut_stream"})
"""The failures of a model for which an item with retries left is tried again."""


@dataclass
class Watch:
    """What whoever works or waits keeps an eye on: the wish that the service ends, and the loss of its claim."""

    stopping: bool = False
    lost: SovereignError | None = None

    def check(self) -> None:
        """Raise what the claim was lost by, if it is."""
        if self.lost:
            raise self.lost

    def sleep(self, seconds: float) -> bool:
        """Wait so long, or until the service is to end: whether it is. Raises AuthorityLost when the claim is lost."""
        until = monotonic() + seconds
        while not self.stopping and (left := until - monotonic()) > 0:
            self.check()
            time.sleep(min(left, SLICE_SECONDS))
        self.check()
        return self.stopping


@contextmanager
def kept(
    db: Database, claim: Claim, ttl: float, watch: Watch, *, beat: Callable[[], None], seconds: float
) -> Generator[None]:
    """Renew a claim meanwhile, from a thread and a session of its own; `watch` has its loss.

    For `seconds` at most: whoever hangs in a tool is alive, and its session must not wait for it for ever.

    A ledger that cannot be reached costs a renewal. Whoever misses them all is told at the next write: unlike a run,
    nothing outside this process lives by a claim, so there is no program to be stopped in time.
    """
    over, until = threading.Event(), monotonic() + seconds

    def keep() -> None:
        renew_at = monotonic() + ttl / RENEWALS
        try:
            while not over.wait(min(ttl / RENEWALS, heartbeat.BEAT_SECONDS)) and monotonic() < until:
                if monotonic() >= renew_at:
                    with suppress(Contention, LedgerUnavailable):
                        assistant_work.renew(db, claim, ttl)
                        renew_at = monotonic() + ttl / RENEWALS
                beat()
        except SovereignError as refusal:
            watch.lost = refusal
        finally:
            db.release()

    thread = threading.Thread(target=keep, name=f"keeper of {claim.id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        watch.lost = None


def converse(
    db: Database,
    claim: Claim,
    model: Model,
    tools: Iterable[ExecutableTool],
    *,
    limits: Limits = LIMITS,
    system: str = "",
    watch: Watch | None = None,
    stop: Callable[[], object] = bool,
) -> str:
    """Work an item through, and return what is to be seen of it then: DONE, BLOCKED, or READY when it was given back.

    A transcript that ends in an answer already is finished with it, and the model is not asked. A failure that may
    pass puts the item back while it has retries; any other one, and each limit, ends it as BLOCKED with its name.

    Raises AuthorityLost when the claim is gone: then nothing more was written. Raises Contention, LedgerFault: then
    the item is still claimed, and whoever claims it next goes on.
    """
    watch, record = watch or Watch(), _Record(db, claim)

    def check_current() -> None:
        watch.check()
        assistant_work.assert_current(db.connection, claim)

    try:
        told = context(db.connection, claim, system=system, most_bytes=limits.context_bytes // 2)
        if told[-1]["role"] == "assistant" and not told[-1].get("tool_calls"):
            record.finish("DONE", told[-1]["content"])
            return "DONE"
        result = run_loop(
            model,
            _dispatcher(tools, Fence(db.transaction, record.check, record.answered)),
            told,
            limits=replace(limits, result_bytes=min(limits.result_bytes, MOST_RESULT_BYTES)),
            observe=record.observe,
            evidence=record.explain,
            check_current=check_current,
            stop=lambda: watch.stopping or stop(),
            key=claim.id,
        )
        return _settled(record, result, stopping=watch.stopping)
    except IllegalMove as refusal:  # a message that the ledger does not take would not be taken the next time either
        record.last = None
        record.note("", refusal.category, refusal.why)
        record.finish("BLOCKED", refusal.category)
        return "BLOCKED"


def _dispatcher(tools: Iterable[ExecutableTool], fence: Fence) -> Dispatcher:
    """All these tools behind the fence. Raises IllegalMove (``tools_unusable``) for whatever their maker raises."""
    try:
        given = list(tools)
        return Dispatcher(given, allowed=[tool.name for tool in given], fence=fence)
    except SovereignError:
        raise
    except (Exception, SystemExit) as error:
        why = tool_dispatch.storable(f"{type(error).__name__}: {error}")
        raise IllegalMove("There are no tools to work with.", category="tools_unusable", why=why) from error


def _settled(record: _Record, result: LoopResult, *, stopping: bool) -> str:
    """End the item as its loop has ended."""
    failed = " ".join(filter(None, [f"{result.status}", result.failure]))
    may_pass = result.status is LoopStatus.MODEL_FAILED and result.failure in MAY_PASS
    if result.status is LoopStatus.AUTHORITY_LOST:
        record.check(record.db.connection)  # else it was a right of a tool's own, and the claim still stands
    if result.status is LoopStatus.STOP_REQUESTED or (may_pass and stopping):
        assistant_work.release(record.db, record.claim)
        return "READY"
    if result.status is LoopStatus.COMPLETED:
        record.finish("DONE", result.answer)
        return "DONE"
    record.note("", failed, result.detail)
    if may_pass:
        again = assistant_work.retry(record.db, record.claim, failed, available_after=RETRY_SECONDS)
        return "READY" if again else "BLOCKED"
    record.finish("BLOCKED", failed)
    return "BLOCKED"


class _Record:
    """What is written of an item under one claim."""

    def __init__(self, db: Database, claim: Claim) -> None:
        self.db = db
        self.claim = claim
        self.last: Message | None = None
        self._answered: dict[str, tuple[int, Message]] = {}  # by the ids of their calls: the line, and its number
        self._judged_at = 0
        self._acting: dict[str, str] = {}  # the operations that were let out, by the ids of their calls

    def check(self, connection: Connection, _call: ToolCall | None = None) -> int:
        """The fence of this claim; its token is the generation."""
        self._judged_at = assistant_work.assert_current(connection, self.claim)
        return self.claim.generation

    def _append(self, connection: Connection, message: Message) -> int:
        """Write a line in a transaction in which `check` has passed."""
        return assistant_work.append_line(connection, self.claim, message, at=self._judged_at)

    def answered(self, connection: Connection, call: ToolCall, now: Occasion, answer: Answer | None) -> None:
        """Write a fenced tool's answer, in the transaction of its write; of another one, that it is about to act."""
        if answer:
            message = tool_message(call.id, answer)
            self._answered[call.id] = self._append(connection, message), message
            return
        at, asked = self._judged_at, tool_dispatch.argument_text(call.arguments)
        effects.intend(connection, now.operation_id, self.claim, tool=call.name, arguments=asked, at=at)
        self._acting[call.id] = now.operation_id

    def observe(self, message: Message) -> None:
        """Write a message, unless it was written with its tool's write, or is the last, which the end is written with.

        Raises Contention (``commit_unknown``) when another answer stands there, because its commit only seemed to fail.
        """
        if message["role"] == "assistant" and not message.get("tool_calls"):
            self.last = message
            return
        call_id = message.get("tool_call_id", "")
        written = self._answered.pop(call_id, None)
        if call_id in self._acting:
            self._settle(self._acting.pop(call_id), message)
        elif written is None:
            assistant_work.observe(self.db, self.claim, message)
        elif written[1] != message:
            self._replace(*written, message)

    def _replace(self, seq: int, written: Message, message: Message) -> None:
        """Write another answer than the one whose commit failed, unless it did not: then whoever goes on reads it."""
        with self.db.transaction() as connection:
            self.check(connection)  # a commit that is still under way holds the item's row: this waits for its end
            rows = assistant_work.transcript(connection, self.claim.id, after=seq - 1, limit=1)
            if any(json.loads(line["message"]) == written for line in rows):
                raise Contention("A tool's write was committed, and its end not heard.", category="commit_unknown")
            self._append(connection, message)

    def _settle(self, operation_id: str, message: Message) -> None:
        """Write the answer of a call that was let out, and how it ended outside, together."""
        told = json.loads(message["content"])
        with self.db.transaction() as connection:
            self.check(connection)
            self._append(connection, message)
            with suppress(IllegalMove):  # nothing to settle: the commit of its intent failed, so it did not leave
                ended = "done" if told["ok"] else told["effect"]
                effects.settle(connection, operation_id, ended, at=self._judged_at)

    def explain(self, call: ToolCall, answer: Answer) -> None:
        """Keep what the model is not told."""
        self.note(call.id, answer.code, answer.detail)

    def note(self, call_id: str, code: str, detail: str) -> None:
        """Append private evidence, if there is any."""
        if not detail:
            return
        kept = tool_dispatch.excerpt(detail, MOST_EVIDENCE_BYTES)
        with self.db.transaction() as connection:
            at = assistant_work.assert_current(connection, self.claim)
            connection.execute(
                """
                INSERT INTO assistant_evidence (work_id, generation, call_id, code, detail, created_at)
                VALUES (?, ?, ?, ?, ?, ?)
                """,
                (self.claim.id, self.claim.generation, call_id, code, kept, at),
            )

    def finish(self, status: str, result: str) -> None:
        """Write the last reply and the end of the item, together."""
        with self.db.transaction() as connection:
            if self.last:
                assistant_work.observe_work(connection, self.claim, self.last)
            assistant_work.finish_work(connection, self.claim, status, result)


# --- what a model is asked with ---------------------------------------------------------------------------


def context(connection: Connection, claim: Claim, *, system: str = "", most_bytes: int) -> list[Message]:
    """The conversation that a claim stands in. All but the item's own transcript has at most `most_bytes`, as JSON."""
    asked: Message = {"role": "user", "content": claim.prompt}
    earlier, left_out = _earlier(connection, claim.session, most_bytes - _size(system) - _size(asked))
    more = " or more" * (left_out == MOST_COUNTED)
    notice = f"The oldest turns of this conversation are left out, {left_out}{more} of them." if left_out else ""
    first = "\n\n".join(filter(None, [system, notice]))
    whole: list[Message] = [{"role": "system", "content": first}] if first else []
    return [*whole, *earlier, asked, *_transcript(connection, claim.id)]


def _earlier(connection: Connection, session: str, room: int) -> tuple[list[Message], int]:
    """The newest turns of a session that fit into `room` bytes, the oldest of them first; how many do not."""
    said: list[Message] = []  # the newest first
    before = 2**63 - 1
    while rows := _answered_before(connection, session, before):
        for row in rows:
            answer = row["result"] if row["status"] == "DONE" else f"(No answer was given: {row['result']}.)"
            turn = [{"role": "assistant", "content": answer}, {"role": "user", "content": row["prompt"]}]
            room -= _size(turn)
            if room < 0:
                return said[::-1], _count_up_to(connection, session, row["seq"])
            said += turn
        before = rows[-1]["seq"]
    return said[::-1], 0


def _answered_before(connection: Connection, session: str, before: int) -> list[Row]:
    return connection.execute(
        """
        SELECT seq, prompt, status, result FROM assistant_work
         WHERE session = ? AND status IN ('DONE', 'BLOCKED') AND seq < ? ORDER BY seq DESC LIMIT ?
        """,
        (session, before, TURNS_READ),
    ).rows


def _count_up_to(connection: Connection, session: str, seq: int) -> int:
    counted = connection.execute(
        """
        SELECT count(*) FROM (SELECT seq FROM assistant_work WHERE session = ? AND status IN ('DONE', 'BLOCKED')
                                 AND seq <= ? LIMIT ?) AS left_out
        """,
        (session, seq, MOST_COUNTED),
    )
    return int(counted.rows[0][0])


def _transcript(connection: Connection, work_id: str) -> list[Message]:
    said: list[Message] = []
    after = 0
    while lines := assistant_work.transcript(connection, work_id, after=after):
        said += filter(_is_said, map(_read, lines))
        after = lines[-1]["seq"]
    return said


def _read(line: Row) -> Any:
    try:
        return json.loads(line["message"])
    except (ValueError, RecursionError) as error:
        why = f"Line {line['seq']} is no JSON."
        raise IllegalMove("The transcript is not whole.", category="transcript_unreadable", why=why) from error


def _is_said(line: Any) -> bool:
    """Whether a line is what an endpoint takes for a message. A transcript may hold other things, of other hands."""
    match line:
        case {"role": "tool", "content": str(), "tool_call_id": str()}:
            return True
        case {"role": "assistant", "content": str(), "tool_calls": [*calls]}:
            return all(map(_is_call, calls))
        case {"role": "system" | "user" | "assistant", "content": str()}:
            return "tool_calls" not in line
        case _:
            return False


def _is_call(call: Any) -> bool:
    match call:
        case {"id": str(), "function": {"name": str(), "arguments": str()}}:
            return True
        case _:
            return False


def unanswered(connection: Connection, *, limit: int = 10) -> list[Row]:
    """The newest items that ended BLOCKED: nobody works on them any more, and they have no answer."""
    sql = "SELECT * FROM assistant_work WHERE status = 'BLOCKED' ORDER BY seq DESC LIMIT ?"
    return connection.execute(sql, (limit,)).rows


def evidence(connection: Connection, work_id: str, *, after: int = 0, limit: int = 100) -> list[Row]:
    """Up to `limit` pieces of private evidence behind number `after`: what failed, in words that no model is told."""
    sql = "SELECT * FROM assistant_evidence WHERE work_id = ? AND seq > ? ORDER BY seq LIMIT ?"
    return connection.execute(sql, (work_id, after, limit)).rows


def _size(said: object) -> int:
    return len(tool_dispatch.as_json(said).encode())
