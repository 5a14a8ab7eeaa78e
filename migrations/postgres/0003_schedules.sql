-- Schedules: one row each, as JSON without the fields that have their defaults.
create table schedule (
    name bytea not null,
    row text not null
);
create unique index on schedule (sha256(name));
