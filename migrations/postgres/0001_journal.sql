-- The journal in PostgreSQL. It is executed with the journal's schema as `search_path`. Names are
-- bytes as they came over the wire, so they are bytea.

-- Who owns the journal, in one row. Each commit updates it, and is written only if it still says
-- what its broker believes. A low fillfactor leaves the page space for the next versions.
create table owner (
    one boolean primary key default true check (one),
    version integer not null,
    -- Different for each journal created; sequence numbers mean the same only within one.
    journal text not null,
    -- Grows with each claim.
    epoch bigint not null,
    -- The broker that has the claim; null when it was given up.
    holder text,
    -- Where its clients connect to, for people.
    url text,
    -- The id of the last segment, and the number of those that exist.
    last bigint not null,
    segments bigint not null,
    -- Grows by one with each commit.
    beat bigint not null,
    -- The beat that was known to be durable when this row was written. Standbys remember it.
    durable bigint not null,
    -- This queue id and all above were never used.
    next_queue_id bigint not null
) with (fillfactor = 10);

-- One row per group commit. Head and text are apart: a start reads only heads.
create table segment (
    id bigint primary key,
    head_crc bigint not null,
    text_crc bigint not null,
    head bytea not null,
    text bytea not null
);
-- Uncompressed: the size of a text is then known without reading it.
alter table segment alter head set storage external, alter text set storage external;

-- Damaged segments, set aside when a start was told to salvage.
create table damaged_segment (like segment);

-- next_seq and cursor are from segments that were dropped; a segment that exists knows better.
create table queue (
    id bigint primary key,
    name bytea not null,
    policy text not null,
    next_seq bigint not null,
    cursor bigint not null
);

-- Bindings belong to a name, whether its queue exists or not. An index entry of PostgreSQL is at
-- most 2,700 bytes, and names may be longer: so the key is a digest.
create table binding (
    queue bytea not null,
    event bytea not null
);
create unique index on binding (sha256(queue), sha256(event));

-- Ids of messages published with --once, newlines between them. One row per commit; the oldest rows
-- are deleted when all later ones have once_ids_max ids.
create table once (
    number bigint primary key,
    count bigint not null,
    ids bytea not null
);

-- Details of the last error replies.
create table error (
    id text primary key,
    time_us bigint not null,
    connection bytea not null,
    request_id bytea not null,
    action bytea not null,
    reason bytea not null
);
