-- Messages of which the result is kept, by id: where each waits, or what became of it, as JSON
-- without the fields that have their defaults; and the data of the result.
create table result (
    name bytea not null,
    row text not null,
    data bytea not null
);
create unique index on result (sha256(name));
