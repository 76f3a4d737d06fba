-- Assistant work: a durable queue of turns, the transcript of each, what was delegated, and the epoch over it all.
-- A program that knows only 0001 would neither pause nor notice a restore, so it may not go on writing.

-- home: storage.authority
CREATE TABLE assistant_control (
    id <integer> PRIMARY KEY NOT NULL CHECK (id = 1),
    ledger_id TEXT NOT NULL CHECK (ledger_id <> ''),
    epoch TEXT NOT NULL CHECK (epoch <> ''),
    paused <integer> NOT NULL CHECK (paused IN (0, 1)),
    restoring TEXT NOT NULL DEFAULT ''
) <strict>;

-- home: assistant_work
CREATE TABLE assistant_work (
    seq <identity>,
    id TEXT NOT NULL UNIQUE,
    origin TEXT NOT NULL UNIQUE CHECK (origin <> ''),
    session TEXT NOT NULL CHECK (session <> ''),
    prompt TEXT NOT NULL CHECK (prompt <> ''),
    subject TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role <> ''),
    control <integer> NOT NULL CHECK (control IN (0, 1)),
    status TEXT NOT NULL DEFAULT 'READY'
        CHECK (status IN ('READY', 'RUNNING', 'DONE', 'BLOCKED', 'CANCELED', 'PARKED')),
    generation <integer> NOT NULL DEFAULT 0 CHECK (generation >= 0),
    owner TEXT CHECK (owner <> ''),
    epoch TEXT CHECK (epoch <> ''),
    expires_at <integer> CHECK (expires_at BETWEEN 0 AND 253402300799999999),
    available_at <integer> NOT NULL DEFAULT 0 CHECK (available_at BETWEEN 0 AND 253402300799999999),
    losses <integer> NOT NULL DEFAULT 0 CHECK (losses >= 0),
    retries_left <integer> NOT NULL DEFAULT 0 CHECK (retries_left >= 0),
    result TEXT NOT NULL DEFAULT '',
    created_at <integer> NOT NULL,
    finished_at <integer>,
    CHECK ((status = 'RUNNING') = (owner IS NOT NULL)),
    CHECK ((status = 'RUNNING') = (epoch IS NOT NULL)),
    CHECK ((status = 'RUNNING') = (expires_at IS NOT NULL)),
    CHECK ((status IN ('DONE', 'BLOCKED', 'CANCELED')) = (finished_at IS NOT NULL))
) <strict>;
CREATE UNIQUE INDEX assistant_work_one_running_per_session ON assistant_work (session) WHERE status = 'RUNNING';
CREATE INDEX assistant_work_by_expiry ON assistant_work (expires_at) WHERE status = 'RUNNING';
CREATE INDEX assistant_work_delayed ON assistant_work (available_at) WHERE status = 'READY' AND available_at > 0;
CREATE INDEX assistant_work_queue ON assistant_work (role, control DESC, seq)
    WHERE status = 'READY' AND available_at = 0;
CREATE INDEX assistant_work_session_queue ON assistant_work (session, role, control DESC, seq)
    WHERE status = 'READY' AND available_at = 0;
CREATE INDEX assistant_work_parked ON assistant_work (seq) WHERE status = 'PARKED';
CREATE INDEX assistant_work_blocked ON assistant_work (seq) WHERE status = 'BLOCKED';

-- home: assistant_work
CREATE TABLE assistant_transcript (
    seq <identity>,
    work_id TEXT NOT NULL REFERENCES assistant_work (id),
    generation <integer> NOT NULL CHECK (generation > 0),
    message TEXT NOT NULL,
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX assistant_transcript_by_work ON assistant_transcript (work_id, seq);
<append only assistant_transcript: seq>

-- home: assistant_work
CREATE TABLE assistant_delegations (
    child_id TEXT PRIMARY KEY NOT NULL REFERENCES assistant_work (id),
    parent_id TEXT NOT NULL REFERENCES assistant_work (id),
    deadline <integer> NOT NULL CHECK (deadline BETWEEN 0 AND 253402300799999999),
    budget <integer> NOT NULL CHECK (budget > 0),
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX assistant_delegations_by_parent ON assistant_delegations (parent_id);
<append only assistant_delegations: child_id>
