-- What left the house through tools that no rollback reaches, and what became of it.
-- A program that knows only 0002 would restore a ledger and forget it, so it may not go on writing.

-- The work item is no reference: a restore brings back a ledger from before it, and what left the house stays known.
-- home: effects
CREATE TABLE effects (
    seq <identity>,
    operation_id TEXT NOT NULL UNIQUE CHECK (operation_id <> ''),
    work_id TEXT NOT NULL CHECK (work_id <> ''),
    generation <integer> NOT NULL CHECK (generation > 0),
    epoch TEXT NOT NULL CHECK (epoch <> ''),
    tool TEXT NOT NULL CHECK (tool <> ''),
    arguments TEXT NOT NULL,
    arguments_sha256 TEXT NOT NULL,
    created_at <integer> NOT NULL
) <strict>;
<append only effects: seq, operation_id>

-- The end that its worker saw has no actor; a person's word has one.
-- home: effects
CREATE TABLE effect_ends (
    seq <identity>,
    operation_id TEXT NOT NULL REFERENCES effects (operation_id),
    outcome TEXT NOT NULL CHECK (outcome IN ('done', 'none', 'unknown')),
    actor TEXT NOT NULL,
    reason TEXT NOT NULL,
    created_at <integer> NOT NULL,
    CHECK (actor = '' OR (outcome <> 'unknown' AND reason <> ''))
) <strict>;
CREATE INDEX effect_ends_by_operation ON effect_ends (operation_id, seq);
<append only effect_ends: seq>

-- The worklist: what has no known end, and all of an older epoch that no person has spoken of.
-- home: effects
CREATE TABLE unsettled_effects (
    effect_seq <integer> PRIMARY KEY NOT NULL REFERENCES effects (seq),
    of_older_epoch <integer> NOT NULL CHECK (of_older_epoch IN (0, 1))
) <strict>;
CREATE INDEX effects_of_older_epochs ON unsettled_effects (effect_seq) WHERE of_older_epoch = 1;
