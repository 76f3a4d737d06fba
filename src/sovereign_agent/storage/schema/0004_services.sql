-- min_writer: 2
-- Services: who runs now, for people to see; what a model's tools said in private; and the turns of one session.

-- home: heartbeat
CREATE TABLE services (
    process_identity TEXT PRIMARY KEY NOT NULL,
    kind TEXT NOT NULL CHECK (kind <> ''),
    host TEXT NOT NULL,
    pid <integer> NOT NULL,
    work_id TEXT NOT NULL,
    started_at <integer> NOT NULL,
    last_poll <integer> NOT NULL,
    last_claim <integer>
) <strict>;

-- home: conversation
CREATE TABLE assistant_evidence (
    seq <identity>,
    work_id TEXT NOT NULL REFERENCES assistant_work (id),
    generation <integer> NOT NULL CHECK (generation > 0),
    call_id TEXT NOT NULL,
    code TEXT NOT NULL,
    detail TEXT NOT NULL,
    created_at <integer> NOT NULL
) <strict>;
CREATE INDEX assistant_evidence_by_work ON assistant_evidence (work_id, seq);
<append only assistant_evidence: seq>

CREATE INDEX assistant_work_answered ON assistant_work (session, seq) WHERE status IN ('DONE', 'BLOCKED');
