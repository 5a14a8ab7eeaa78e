-- Batches that have not ended: one row each, as JSON without the fields that have their defaults.
create table batch (
    name bytea not null,
    row text not null
);
create unique index on batch (sha256(name));
