-- Schedules: one row each, as JSON without the fields that have their defaults.
create table schedule (
    name blob primary key,
    row text not null,
    crc integer not null
) without rowid;
insert into tally values ('schedule', 1, 0, 0, row_crc('tally', 'schedule', 1, 0, 0));
