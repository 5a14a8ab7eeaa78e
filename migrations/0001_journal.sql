-- The journal: a log of segments, and the queues and bindings as they are now.
-- Names are bytes as they came over the wire, so they are blobs.

create table meta (
    key text primary key,
    value text not null
) without rowid;

-- A queue's id is never used again, so that what segments say of a deleted queue stays dead.
-- next_seq and cursor are what dropped segments knew; a segment that is still there knows better.
create table queue (
    id integer primary key autoincrement,
    name blob not null unique,
    delete_when_unused integer not null default 0,
    delete_delay_s real,
    next_seq integer not null default 1,
    cursor integer not null default 1
);

-- Bindings belong to a name, whether its queue exists or not.
create table binding (
    queue blob not null,
    event blob not null,
    primary key (queue, event)
) without rowid;

-- One row per group commit. The body's format is told in docs/storage.md.
create table segment (
    id integer primary key,
    crc integer not null,
    body blob not null
);

-- Damaged segments, set aside when a start was told to salvage.
create table damaged_segment (
    id integer not null,
    crc,
    body
);

-- Details of the last error replies.
create table error (
    id text primary key,
    time_us integer not null,
    connection text not null,
    request_id blob not null,
    action blob not null,
    reason text not null
) without rowid;
