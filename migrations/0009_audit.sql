-- Logins, and requests that changed what exists or removed messages: one row each, as JSON without
-- the fields that have their defaults. The oldest are deleted; no tally, as nothing depends on them.
create table audit (
    id integer primary key,
    row text not null,
    crc integer not null
);
