-- The second authority: the epoch that every claim on assistant work is bound to.

-- home: storage.authority
CREATE TABLE assistant_control (
    id <integer> PRIMARY KEY NOT NULL CHECK (id = 1),
    ledger_id TEXT NOT NULL CHECK (ledger_id <> ''),
    epoch TEXT NOT NULL CHECK (epoch <> ''),
    paused <integer> NOT NULL CHECK (paused IN (0, 1)),
    restoring TEXT NOT NULL DEFAULT ''
) <strict>;
