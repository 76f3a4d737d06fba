-- The governed life of work, and the three authorities over it: lease, attempt, mailbox claim.
-- All times are microseconds since 1970 in UTC. Engine words in angle brackets: storage/engine.py.

-- home: journal
CREATE TABLE events (
    seq <identity>,
    at <integer> NOT NULL,
    kind TEXT NOT NULL CHECK (kind <> ''),
    subject TEXT NOT NULL,
    actor TEXT NOT NULL,
    detail TEXT NOT NULL
) <strict>;
CREATE INDEX events_by_subject ON events (subject, seq);
<append only events: seq>

-- home: outcomes
CREATE TABLE outcomes (
    id TEXT PRIMARY KEY NOT NULL,
    title TEXT NOT NULL CHECK (title <> ''),
    desired_state TEXT NOT NULL,
    checks TEXT NOT NULL,
    owner TEXT NOT NULL CHECK (owner <> ''),
    subject TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('DRAFT', 'ACTIVE', 'AT_RISK', 'READY', 'ACCEPTED', 'CANCELED')),
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX outcomes_open ON outcomes (created_at, id) WHERE state NOT IN ('ACCEPTED', 'CANCELED');

-- home: outcomes
CREATE TABLE sows (
    id TEXT PRIMARY KEY NOT NULL,
    outcome_id TEXT NOT NULL REFERENCES outcomes (id),
    scope TEXT NOT NULL CHECK (scope <> ''),
    role TEXT NOT NULL CHECK (role IN ('principal', 'master', 'operator', 'sparring', 'verifier')),
    created_by TEXT NOT NULL CHECK (created_by <> ''),
    required_effect_kind TEXT,
    state TEXT NOT NULL CHECK (state IN ('DRAFT', 'READY', 'ASSIGNED', 'RUNNING', 'COMPLETED', 'VERIFIED',
                                         'APPROVED', 'REJECTED', 'BLOCKED', 'FAILED', 'CANCELED')),
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX sows_by_outcome ON sows (outcome_id, state);

-- home: outcomes
CREATE TABLE assignments (
    id TEXT PRIMARY KEY NOT NULL,
    sow_id TEXT NOT NULL REFERENCES sows (id),
    actor_id TEXT NOT NULL CHECK (actor_id <> ''),
    planner_id TEXT NOT NULL CHECK (planner_id <> ''),
    workspace_policy TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('CREATED', 'RUNNING', 'COMPLETED', 'BLOCKED', 'FAILED', 'CANCELED')),
    current_execution_attempt TEXT,
    created_at <integer> NOT NULL,
    finished_at <integer>,
    maximum_seconds <integer> NOT NULL DEFAULT 86400 CHECK (maximum_seconds > 0),
    CHECK ((state = 'RUNNING') = (current_execution_attempt IS NOT NULL))
) <strict>;
CREATE UNIQUE INDEX assignments_one_open_per_sow ON assignments (sow_id) WHERE state IN ('CREATED', 'RUNNING');
CREATE INDEX assignments_running ON assignments (id) WHERE state = 'RUNNING';
CREATE INDEX assignments_by_sow ON assignments (sow_id, created_at);

-- home: fencing
CREATE TABLE lease_tokens (
    id <integer> PRIMARY KEY NOT NULL CHECK (id = 1),
    value <integer> NOT NULL CHECK (value >= 0)
) <strict>;

-- home: fencing
CREATE TABLE actor_leases (
    actor_id TEXT PRIMARY KEY NOT NULL CHECK (actor_id <> ''),
    process_identity TEXT NOT NULL CHECK (process_identity <> ''),
    fencing_token <integer> NOT NULL UNIQUE,
    acquired_at <integer> NOT NULL,
    expires_at <integer> NOT NULL CHECK (expires_at BETWEEN 0 AND 253402300799999999)
) <strict>;
CREATE INDEX actor_leases_by_expiry ON actor_leases (expires_at);

-- home: fencing
CREATE TABLE execution_attempts (
    id TEXT PRIMARY KEY NOT NULL,
    assignment_id TEXT NOT NULL REFERENCES assignments (id),
    actor_id TEXT NOT NULL CHECK (actor_id <> ''),
    process_identity TEXT NOT NULL CHECK (process_identity <> ''),
    fencing_token <integer> NOT NULL UNIQUE,
    actor_lease_fencing_token <integer> NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('ACTIVE', 'DONE', 'RECOVERED')),
    acquired_at <integer> NOT NULL,
    expires_at <integer> NOT NULL CHECK (expires_at BETWEEN 0 AND 253402300799999999),
    deadline <integer> NOT NULL CHECK (deadline BETWEEN 0 AND 253402300799999999),
    workspace_open <integer> NOT NULL DEFAULT 1 CHECK (workspace_open IN (0, 1)),
    host TEXT NOT NULL DEFAULT '',
    process TEXT NOT NULL DEFAULT '{}',
    progress_at <integer> NOT NULL DEFAULT 0,
    step TEXT NOT NULL DEFAULT '',
    tolerance_seconds <integer> NOT NULL DEFAULT 0 CHECK (tolerance_seconds >= 0),
    CHECK (expires_at <= deadline)
) <strict>;
CREATE UNIQUE INDEX execution_attempts_one_active ON execution_attempts (assignment_id) WHERE status = 'ACTIVE';
CREATE INDEX execution_attempts_by_expiry ON execution_attempts (expires_at) WHERE status = 'ACTIVE';
CREATE INDEX execution_attempts_by_lease ON execution_attempts (actor_lease_fencing_token) WHERE status = 'ACTIVE';
CREATE INDEX execution_attempts_to_reclaim ON execution_attempts (id) WHERE workspace_open = 1 AND status <> 'ACTIVE';

-- home: journal
CREATE TABLE receipts (
    id TEXT PRIMARY KEY NOT NULL,
    assignment_id TEXT NOT NULL REFERENCES assignments (id),
    attempt_id TEXT NOT NULL UNIQUE REFERENCES execution_attempts (id),
    actor_id TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('completed', 'blocked', 'failed')),
    failure_category TEXT NOT NULL,
    summary TEXT NOT NULL,
    detail TEXT NOT NULL,
    created_at <integer> NOT NULL,
    CHECK ((status = 'failed') = (failure_category <> ''))
) <strict>;
CREATE INDEX receipts_by_assignment ON receipts (assignment_id, created_at);
<append only receipts: id, attempt_id>

-- home: outcomes
CREATE TABLE evidence (
    seq <identity>,
    sow_id TEXT NOT NULL REFERENCES sows (id),
    assignment_id TEXT NOT NULL REFERENCES assignments (id),
    kind TEXT NOT NULL CHECK (kind <> ''),
    detail TEXT NOT NULL,
    recorded_by TEXT NOT NULL,
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX evidence_by_assignment ON evidence (assignment_id, kind);
<append only evidence: seq>

-- home: outcomes
CREATE TABLE verifications (
    seq <identity>,
    subject TEXT NOT NULL,
    assignment_id TEXT NOT NULL,
    verifier_id TEXT NOT NULL CHECK (verifier_id <> ''),
    passed <integer> NOT NULL CHECK (passed IN (0, 1)),
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX verifications_by_subject ON verifications (subject, seq);
<append only verifications: seq>

-- home: outcomes
CREATE TABLE reviews (
    seq <identity>,
    sow_id TEXT NOT NULL REFERENCES sows (id),
    assignment_id TEXT NOT NULL REFERENCES assignments (id),
    reviewer_id TEXT NOT NULL CHECK (reviewer_id <> ''),
    approved <integer> NOT NULL CHECK (approved IN (0, 1)),
    note TEXT NOT NULL,
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX reviews_by_sow ON reviews (sow_id, seq);
<append only reviews: seq>

-- home: outcomes
CREATE TABLE acceptances (
    outcome_id TEXT PRIMARY KEY NOT NULL REFERENCES outcomes (id),
    accepter_id TEXT NOT NULL CHECK (accepter_id <> ''),
    detail TEXT NOT NULL,
    created_at <integer> NOT NULL
) <strict>;
<append only acceptances: outcome_id>

-- home: outcomes
CREATE TABLE rulings (
    id TEXT PRIMARY KEY NOT NULL,
    sow_id TEXT NOT NULL REFERENCES sows (id),
    decision TEXT NOT NULL CHECK (decision <> ''),
    principal_id TEXT NOT NULL CHECK (principal_id <> ''),
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX rulings_by_sow ON rulings (sow_id, created_at);
<append only rulings: id>

-- home: relay
CREATE TABLE messages (
    seq <identity>,
    id TEXT NOT NULL UNIQUE,
    sender TEXT NOT NULL CHECK (sender <> ''),
    recipient TEXT NOT NULL CHECK (recipient <> ''),
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('NEW', 'CLAIMED', 'DONE', 'DEAD')),
    claim_owner TEXT,
    fencing_token <integer> UNIQUE,
    claim_expires_at <integer> CHECK (claim_expires_at BETWEEN 0 AND 253402300799999999),
    deliveries <integer> NOT NULL DEFAULT 0,
    ready_at <integer> NOT NULL,
    created_at <integer> NOT NULL,
    CHECK ((state = 'NEW') = (claim_owner IS NULL)),
    CHECK ((state = 'NEW') = (fencing_token IS NULL)),
    CHECK ((state = 'NEW') = (claim_expires_at IS NULL))
) <strict>;
CREATE INDEX messages_new ON messages (recipient, ready_at, seq) WHERE state = 'NEW';
CREATE INDEX messages_dead ON messages (recipient, seq) WHERE state = 'DEAD';
CREATE INDEX messages_claimed ON messages (claim_expires_at) WHERE state = 'CLAIMED';
CREATE INDEX messages_claimed_by_recipient ON messages (recipient, claim_expires_at) WHERE state = 'CLAIMED';

-- home: heartbeat
CREATE TABLE heartbeats (
    seq <identity>,
    at <integer> NOT NULL,
    source TEXT NOT NULL CHECK (source <> ''),
    process_identity TEXT NOT NULL,
    host TEXT NOT NULL
) <strict>;
<append only heartbeats: seq>

-- home: fencing
INSERT INTO lease_tokens (id, value) VALUES (1, 0);
