"""Promises: what a ledger must hold at every instant, each as one query for the rows that break it.

One statement is one snapshot, so a ledger that is being worked on can be asked as well as one at rest. Later and
earlier are judged by tokens and by the order of events, never by a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from sovereign_agent.database import Row


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise: each row that `broken` answers is a breach of it, which `sentence` tells."""

    name: str
    sentence: str
    broken: str


def told(promise: Promise, row: Row) -> str:
    """A breach in a sentence."""
    return promise.sentence.format(**{name: row[name] for name in row.keys()})  # noqa: SIM118 - a Row iterates values


PROMISES = (
    # --- attempts and their receipts
    Promise(
        "one receipt for each ended attempt",
        "Attempt {id} is {status} and has {receipts} receipts: an ended attempt has exactly one, an ACTIVE one none.",
        """
        SELECT e.id, e.status, count(r.id) AS receipts
          FROM execution_attempts e LEFT JOIN receipts r ON r.attempt_id = e.id
         GROUP BY e.id, e.status HAVING count(r.id) <> CASE e.status WHEN 'ACTIVE' THEN 0 ELSE 1 END
        """,
    ),
    Promise(
        "one attempt for each receipt",
        "Receipt {id} names attempt {attempt_id}, which is none of assignment {assignment_id} and actor {actor_id}.",
        """
        SELECT r.id, r.attempt_id, r.assignment_id, r.actor_id
          FROM receipts r LEFT JOIN execution_attempts e
            ON e.id = r.attempt_id AND e.assignment_id = r.assignment_id AND e.actor_id = r.actor_id
         WHERE e.id IS NULL
        """,
    ),
    Promise(
        "an active attempt is pointed at",
        "Attempt {id} is ACTIVE, but its assignment {assignment_id} is {state} and points at {pointer}.",
        """
        SELECT e.id, e.assignment_id, a.state, a.current_execution_attempt AS pointer
          FROM execution_attempts e LEFT JOIN assignments a ON a.id = e.assignment_id
         WHERE e.status = 'ACTIVE' AND coalesce(a.current_execution_attempt, '') <> e.id
        """,
    ),
    Promise(
        "a running assignment points at an active attempt",
        "Assignment {id} is RUNNING and points at {pointer}, which is no ACTIVE attempt of its own.",
        """
        SELECT a.id, a.current_execution_attempt AS pointer
          FROM assignments a LEFT JOIN execution_attempts e
            ON e.id = a.current_execution_attempt AND e.assignment_id = a.id AND e.actor_id = a.actor_id
         WHERE a.state = 'RUNNING' AND coalesce(e.status, '') <> 'ACTIVE'
        """,
    ),
    Promise(
        "an assignment is what its last receipt says",
        "Assignment {id} is {state}, but its last attempt is {status}, with the receipt: {receipt}.",
        """
        SELECT a.id, a.state, coalesce(l.status, 'none') AS status,
               coalesce(l.receipt || ' ' || l.failure_category, 'none') AS receipt
          FROM assignments a LEFT JOIN (
               SELECT e.assignment_id, e.status, r.status AS receipt, r.failure_category,
                      row_number() OVER (PARTITION BY e.assignment_id ORDER BY e.fencing_token DESC) AS place
                 FROM execution_attempts e LEFT JOIN receipts r ON r.attempt_id = e.id) l
            ON l.assignment_id = a.id AND l.place = 1
         WHERE CASE a.state WHEN 'CREATED' THEN l.status IS NOT NULL
                            WHEN 'RUNNING' THEN l.receipt IS NOT NULL
                            WHEN 'CANCELED' THEN coalesce(l.status, 'RECOVERED') <> 'RECOVERED'
                                              OR coalesce(l.failure_category, 'interrupted') <> 'interrupted'
                            ELSE coalesce(upper(l.receipt), '') <> a.state END
        """,
    ),
    Promise(
        "an assignment has an end exactly when it has ended",
        "Assignment {id} is {state}, and its end is {finished_at}.",
        """
        SELECT id, state, finished_at FROM assignments
         WHERE (state IN ('CREATED', 'RUNNING')) <> (finished_at IS NULL)
        """,
    ),
    Promise(
        "completed is said only by the process that ran a completed assignment",
        "Receipt {id} says completed, but its attempt is {status} and assignment {assignment_id} is {state}.",
        """
        SELECT r.id, r.assignment_id, e.status, a.state
          FROM receipts r JOIN execution_attempts e ON e.id = r.attempt_id JOIN assignments a ON a.id = r.assignment_id
         WHERE r.status = 'completed' AND (e.status <> 'DONE' OR a.state <> 'COMPLETED')
        """,
    ),
    Promise(
        "another process knows only that an attempt is lost",
        "Attempt {id} is {status}, with the receipt: {receipt}. Whoever wrote it could not know that.",
        """
        SELECT * FROM (
            SELECT e.id, e.status, a.state, r.status || ' ' || r.failure_category AS receipt,
                   row_number() OVER (PARTITION BY e.assignment_id ORDER BY e.fencing_token DESC) AS place
              FROM execution_attempts e JOIN receipts r ON r.attempt_id = e.id
                                        JOIN assignments a ON a.id = e.assignment_id) AS ended
         WHERE CASE WHEN status <> 'RECOVERED' THEN receipt = 'failed worker_lost'
                    WHEN place = 1 AND state = 'CANCELED' THEN receipt <> 'failed interrupted'
                    ELSE receipt <> 'failed worker_lost' END
        """,
    ),
    Promise(
        "no attempt is lost before it has run out",
        "Attempt {id} ran until {expires_at}, and its receipt worker_lost was written before, at {created_at}.",
        """
        SELECT e.id, e.expires_at, r.created_at FROM execution_attempts e JOIN receipts r ON r.attempt_id = e.id
         WHERE r.failure_category = 'worker_lost' AND r.created_at < e.expires_at
        """,
    ),
    # --- attempts and their events
    Promise(
        "one assignment.running for each attempt",
        "Attempt {id} has {events} events assignment.running: it has begun exactly once.",
        """
        SELECT e.id, count(v.seq) AS events
          FROM execution_attempts e LEFT JOIN events v ON v.subject = e.assignment_id AND v.kind = 'assignment.running'
           AND v.detail LIKE '%"attempt_id":"' || e.id || '"%'
         GROUP BY e.id HAVING count(v.seq) <> 1
        """,
    ),
    Promise(
        "one assignment.finished for each attempt that ended its assignment",
        "Attempt {id} is {status} and has {events} events assignment.finished that name its receipt.",
        """
        SELECT e.id, e.status, count(v.seq) AS events
          FROM (SELECT *, row_number() OVER (PARTITION BY assignment_id ORDER BY fencing_token DESC) AS place
                  FROM execution_attempts) e
          LEFT JOIN receipts r ON r.attempt_id = e.id
          LEFT JOIN events v ON v.subject = e.assignment_id AND v.kind = 'assignment.finished'
           AND v.detail LIKE '%"attempt_id":"' || e.id || '"%"receipt_id":"' || r.id || '"%'
         GROUP BY e.id, e.status, e.place
        HAVING count(v.seq) <> CASE WHEN e.status <> 'ACTIVE' AND e.place = 1 THEN 1 ELSE 0 END
        """,
    ),
    Promise(
        "one assignment.recovered for each recovered attempt",
        "Attempt {id} is {status} and has {events} events assignment.recovered that name its receipt.",
        """
        SELECT e.id, e.status, count(v.seq) AS events
          FROM execution_attempts e
          LEFT JOIN receipts r ON r.attempt_id = e.id
          LEFT JOIN events v ON v.subject = e.assignment_id AND v.kind = 'assignment.recovered'
           AND v.detail LIKE '%"attempt_id":"' || e.id || '"%"receipt_id":"' || r.id || '"%'
         GROUP BY e.id, e.status HAVING count(v.seq) <> CASE e.status WHEN 'RECOVERED' THEN 1 ELSE 0 END
        """,
    ),
    Promise(
        "an event of a run names its attempt",
        "Event {seq} says {kind} of {subject}, but names no attempt of it.",
        """
        SELECT v.seq, v.kind, v.subject
          FROM events v LEFT JOIN execution_attempts e
            ON e.assignment_id = v.subject AND v.detail LIKE '%"attempt_id":"' || e.id || '"%'
         WHERE v.kind IN ('assignment.running', 'assignment.finished', 'assignment.recovered') AND e.id IS NULL
        """,
    ),
    # --- tokens
    Promise(
        "a token is given once",
        "Token {token} was given {holders} times.",
        """
        SELECT token, count(*) AS holders FROM (
            SELECT fencing_token AS token, actor_id, process_identity FROM actor_leases
             UNION SELECT actor_lease_fencing_token, actor_id, process_identity FROM execution_attempts
             UNION ALL SELECT fencing_token, id, '' FROM execution_attempts
             UNION ALL SELECT fencing_token, id, '' FROM messages WHERE fencing_token IS NOT NULL) AS given
         GROUP BY token HAVING count(*) > 1
        """,
    ),
    Promise(
        "no token is above the counter",
        "Token {token} is above the counter, which stands at {counter}.",
        """
        SELECT token, counter FROM (
            SELECT fencing_token AS token FROM actor_leases
             UNION SELECT fencing_token FROM execution_attempts
             UNION SELECT actor_lease_fencing_token FROM execution_attempts
             UNION SELECT fencing_token FROM messages WHERE fencing_token IS NOT NULL) AS given
          CROSS JOIN (SELECT coalesce(max(value), 0) AS counter FROM lease_tokens) AS counters
         WHERE token > counter
        """,
    ),
    Promise(
        "an attempt's token is greater than its lease's",
        "Attempt {id} has token {token}, and stands on a lease with the token {lease}.",
        """
        SELECT id, fencing_token AS token, actor_lease_fencing_token AS lease FROM execution_attempts
         WHERE fencing_token <= actor_lease_fencing_token
        """,
    ),
    Promise(
        "nobody begins or finishes a run on a lease that has passed to another",
        "Attempt {id} of {actor_id} stands on lease token {lease}: {kind} happened to it when {greatest} was given.",
        """
        SELECT * FROM (
            SELECT e.id, e.actor_id, e.status, v.kind, e.actor_lease_fencing_token AS lease,
                   max(e.actor_lease_fencing_token) OVER (PARTITION BY e.actor_id ORDER BY v.seq) AS greatest
              FROM execution_attempts e JOIN events v ON v.subject = e.assignment_id
               AND v.kind IN ('assignment.running', 'assignment.finished')
               AND v.detail LIKE '%"attempt_id":"' || e.id || '"%') AS moments
         WHERE lease < greatest AND (kind = 'assignment.running' OR status = 'DONE')
        """,
    ),
    Promise(
        "a lease is no earlier than the attempts of its actor",
        "The lease on {actor_id} has token {fencing_token}, though attempt {id} stood on {lease}.",
        """
        SELECT l.actor_id, l.fencing_token, e.id, e.actor_lease_fencing_token AS lease
          FROM actor_leases l JOIN execution_attempts e ON e.actor_id = l.actor_id
         WHERE e.actor_lease_fencing_token > l.fencing_token
        """,
    ),
    # --- statements of work
    Promise(
        "a statement of work is what its last assignment makes it",
        "Statement of work {id} is {state}, but its last assignment is {last}.",
        """
        SELECT s.id, s.state, coalesce(l.state, 'none') AS last
          FROM sows s LEFT JOIN (
               SELECT a.sow_id, a.state, row_number() OVER (PARTITION BY a.sow_id ORDER BY v.seq DESC) AS place
                 FROM assignments a LEFT JOIN events v ON v.subject = a.id AND v.kind = 'assignment.created') l
            ON l.sow_id = s.id AND l.place = 1
         WHERE CASE coalesce(l.state, 'none')
               WHEN 'none' THEN s.state NOT IN ('DRAFT', 'READY', 'CANCELED')
               WHEN 'CREATED' THEN s.state <> 'ASSIGNED'
               WHEN 'RUNNING' THEN s.state <> 'RUNNING'
               WHEN 'COMPLETED' THEN s.state NOT IN ('COMPLETED', 'VERIFIED', 'APPROVED', 'REJECTED', 'READY',
                                                     'CANCELED')
               WHEN 'BLOCKED' THEN s.state NOT IN ('BLOCKED', 'READY', 'CANCELED')
               ELSE s.state NOT IN ('FAILED', 'READY', 'CANCELED') END
        """,
    ),
    Promise(
        "a statement of work is where its history left it",
        "Statement of work {id} is {state}, but the last thing that happened to it is {kind}.",
        """
        SELECT s.id, s.state, coalesce(l.kind, 'nothing') AS kind
          FROM sows s LEFT JOIN (
               SELECT subject, kind, row_number() OVER (PARTITION BY subject ORDER BY seq DESC) AS place
                 FROM events WHERE kind LIKE 'sow.%' AND kind <> 'sow.parked') l
            ON l.subject = s.id AND l.place = 1
         WHERE coalesce(l.kind, '') <> CASE s.state WHEN 'DRAFT' THEN 'sow.created' ELSE 'sow.' || lower(s.state) END
        """,
    ),
    Promise(
        "parked work is given out again only after a ruling",
        "Assignment {id} was created although statement of work {sow_id} was parked and nobody had decided.",
        """
        SELECT a.id, a.sow_id FROM assignments a JOIN events c ON c.subject = a.id AND c.kind = 'assignment.created'
          JOIN events p ON p.subject = a.sow_id AND p.kind = 'sow.parked' AND p.seq < c.seq
         WHERE NOT EXISTS (SELECT 1 FROM events r WHERE r.subject = a.sow_id AND r.kind = 'ruling.decided'
                              AND r.seq > p.seq AND r.seq < c.seq)
        """,
    ),
    Promise(
        "verified work was verified by somebody else",
        "Statement of work {id} is {state}, but nobody else has passed its last assignment {assignment}.",
        """
        SELECT s.id, s.state, l.id AS assignment
          FROM sows s JOIN (
               SELECT a.id, a.sow_id, a.actor_id,
                      row_number() OVER (PARTITION BY a.sow_id ORDER BY v.seq DESC) AS place
                 FROM assignments a LEFT JOIN events v ON v.subject = a.id AND v.kind = 'assignment.created') l
            ON l.sow_id = s.id AND l.place = 1
         WHERE s.state IN ('VERIFIED', 'APPROVED')
           AND NOT EXISTS (SELECT 1 FROM verifications v WHERE v.subject = s.id AND v.assignment_id = l.id
                              AND v.passed = 1 AND v.verifier_id <> l.actor_id)
        """,
    ),
    Promise(
        "approved work was approved by somebody who neither planned nor did it",
        "Statement of work {id} is APPROVED without an approval by somebody who neither planned nor did any of it.",
        """
        SELECT s.id FROM sows s
         WHERE s.state = 'APPROVED'
           AND NOT EXISTS (
               SELECT 1 FROM reviews r JOIN assignments a ON a.id = r.assignment_id
                WHERE r.sow_id = s.id AND a.sow_id = s.id AND a.state = 'COMPLETED'
                  AND r.approved = 1 AND r.reviewer_id <> s.created_by
                  AND NOT EXISTS (SELECT 1 FROM assignments o
                                   WHERE o.sow_id = s.id AND r.reviewer_id IN (o.actor_id, o.planner_id)))
        """,
    ),
    Promise(
        "evidence of an effect is of completed work",
        "Evidence {seq} ({kind}) is of assignment {assignment_id}, which is {state}.",
        """
        SELECT v.seq, v.kind, v.assignment_id, a.state FROM evidence v JOIN assignments a ON a.id = v.assignment_id
         WHERE a.state <> 'COMPLETED' OR a.sow_id <> v.sow_id
        """,
    ),
    # --- effects
    Promise(
        "an act whose end nobody knows waits for a person's word",
        "Act {operation_id} has no known end, and no person is asked for it.",
        """
        SELECT e.operation_id FROM effects e LEFT JOIN unsettled_effects u ON u.effect_seq = e.seq
         WHERE u.effect_seq IS NULL
           AND NOT EXISTS (SELECT 1 FROM effect_ends n
                            WHERE n.operation_id = e.operation_id AND (n.actor <> '' OR n.outcome <> 'unknown'))
        """,
    ),
    Promise(
        "what left in an older epoch waits for a person's word, too, and nothing else holds all others back",
        "Act {operation_id} left in {epoch}, the ledger is in {now}; it is listed as of an older epoch {older} times.",
        """
        SELECT * FROM (
            SELECT e.operation_id, e.epoch, c.epoch AS now, coalesce(u.of_older_epoch, 0) AS older,
                   CASE WHEN e.epoch = c.epoch THEN 0
                        WHEN EXISTS (SELECT 1 FROM effect_ends n WHERE n.operation_id = e.operation_id
                                        AND (n.actor <> '' OR n.outcome = 'none')) THEN 0 ELSE 1 END AS awaited
              FROM effects e CROSS JOIN assistant_control c
              LEFT JOIN unsettled_effects u ON u.effect_seq = e.seq) AS acts
         WHERE older <> awaited
        """,
    ),
    Promise(
        "nobody is asked for what is known",
        "Act {operation_id} ended {outcome}, and a person is still asked for it.",
        """
        SELECT e.operation_id, n.outcome
          FROM unsettled_effects u JOIN effects e ON e.seq = u.effect_seq
          JOIN effect_ends n ON n.operation_id = e.operation_id
         WHERE n.actor <> '' OR (n.outcome <> 'unknown' AND u.of_older_epoch = 0)
        """,
    ),
    Promise(
        "an act ends once for its worker",
        "Act {operation_id} was seen to end {ends} times.",
        """
        SELECT operation_id, count(*) AS ends FROM effect_ends WHERE actor = ''
         GROUP BY operation_id HAVING count(*) > 1
        """,
    ),
    # --- outcomes
    Promise(
        "an open outcome is what its work makes it",
        "Outcome {id} is {state}, but its work makes it {made}.",
        """
        SELECT id, state, made FROM (
            SELECT o.id, o.state,
                   CASE WHEN count(CASE WHEN s.state IN ('FAILED', 'BLOCKED', 'REJECTED') THEN 1 END) > 0 THEN 'AT_RISK'
                        WHEN count(CASE WHEN s.state = 'APPROVED' THEN 1 END) > 0
                         AND count(CASE WHEN s.state NOT IN ('APPROVED', 'CANCELED') THEN 1 END) = 0 THEN 'READY'
                        ELSE 'ACTIVE' END AS made
              FROM outcomes o LEFT JOIN sows s ON s.outcome_id = o.id
             WHERE o.state IN ('ACTIVE', 'AT_RISK', 'READY') GROUP BY o.id, o.state) AS projections
         WHERE state <> made
        """,
    ),
    Promise(
        "nobody works towards an outcome that is not open",
        "Outcome {outcome_id} is {towards}, and its statement of work {id} is {state}.",
        """
        SELECT s.outcome_id, o.state AS towards, s.id, s.state FROM sows s JOIN outcomes o ON o.id = s.outcome_id
         WHERE o.state IN ('DRAFT', 'CANCELED') AND s.state IN ('ASSIGNED', 'RUNNING')
        """,
    ),
    Promise(
        "accepted means that there is an acceptance",
        "Outcome {id} is {state} and has {acceptances} acceptances.",
        """
        SELECT o.id, o.state, count(a.outcome_id) AS acceptances
          FROM outcomes o LEFT JOIN acceptances a ON a.outcome_id = o.id
         GROUP BY o.id, o.state HAVING count(a.outcome_id) <> CASE o.state WHEN 'ACCEPTED' THEN 1 ELSE 0 END
        """,
    ),
    Promise(
        "accepted means that all of the work is approved",
        "Outcome {id} is ACCEPTED with {approved} of {all_work} statements of work approved.",
        """
        SELECT o.id, count(CASE WHEN s.state = 'APPROVED' THEN 1 END) AS approved, count(s.id) AS all_work
          FROM outcomes o LEFT JOIN sows s ON s.outcome_id = o.id AND s.state <> 'CANCELED'
         WHERE o.state = 'ACCEPTED' GROUP BY o.id
        HAVING count(s.id) = 0 OR count(CASE WHEN s.state = 'APPROVED' THEN 1 END) <> count(s.id)
        """,
    ),
    Promise(
        "accepted means that somebody accepted who neither did nor reviewed the work",
        "Outcome {outcome_id} was accepted by {accepter_id}, who did or reviewed some of {sow}.",
        """
        SELECT DISTINCT c.outcome_id, c.accepter_id, s.id AS sow
          FROM acceptances c JOIN sows s ON s.outcome_id = c.outcome_id
          LEFT JOIN assignments a ON a.sow_id = s.id LEFT JOIN reviews r ON r.sow_id = s.id
         WHERE c.accepter_id IN (a.actor_id, r.reviewer_id)
        """,
    ),
)
