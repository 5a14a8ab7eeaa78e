-- Messages of which the result is kept, by id: where each waits, or what became of it, as JSON
-- without the fields that have their defaults; and the data of the result.
create table result (
    name blob primary key,
    row text not null,
    data blob not null,
    crc integer not null
);
insert into tally values ('result', 1, 0, 0, row_crc('tally', 'result', 1, 0, 0));
