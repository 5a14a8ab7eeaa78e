-- Batches that have not ended: one row each, as JSON without the fields that have their defaults.
create table batch (
    name blob primary key,
    row text not null,
    crc integer not null
) without rowid;
insert into tally values ('batch', 1, 0, 0, row_crc('tally', 'batch', 1, 0, 0));
