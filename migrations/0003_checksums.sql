-- A checksum on every row that a start believes, and a tally of the rows of each table: a row that
-- was changed, that vanished or that is there twice is noticed. What is in the database now is
-- taken for right. `row_crc` is a function of the program, docs/storage.md tells what it computes.

-- Names of queues are unique because the server makes no two of a name: an index of them would be
-- one more thing to be damaged. The next id stands in `tally`, so nothing is left to autoincrement.
alter table queue rename to old_queue;
create table queue (
    id integer primary key,
    name blob not null,
    delete_when_unused integer not null,
    delete_delay_s real,
    next_seq integer not null,
    cursor integer not null,
    crc integer not null
);
insert into queue
select id, name, delete_when_unused, delete_delay_s, next_seq, cursor,
    row_crc('queue', id, name, delete_when_unused, delete_delay_s, next_seq, cursor)
from old_queue;

alter table binding rename to old_binding;
create table binding (
    queue blob not null,
    event blob not null,
    crc integer not null,
    primary key (queue, event)
) without rowid;
insert into binding select queue, event, row_crc('binding', queue, event) from old_binding;
drop table old_binding;

alter table meta rename to old_meta;
create table meta (
    key text primary key,
    value text not null,
    crc integer not null
) without rowid;
insert into meta select key, value, row_crc('meta', key, value) from old_meta;
drop table old_meta;

alter table once rename to old_once;
create table once (
    number integer primary key,
    count integer not null,
    ids blob not null,
    crc integer not null
);
insert into once select number, count, ids, row_crc('once', number, count, ids) from old_once;
drop table old_once;

alter table error rename to old_error;
create table error (
    id text primary key,
    time_us integer not null,
    connection text not null,
    request_id blob not null,
    action blob not null,
    reason text not null,
    crc integer not null
) without rowid;
insert into error
select id, time_us, connection, request_id, action, reason,
    row_crc('error', id, time_us, connection, request_id, action, reason)
from old_error;
drop table old_error;

-- Of each table how many rows there are, the sum of their checksums, and the next id. Segments from
-- `next` on are not counted: they are there without a gap.
create table tally (
    name text primary key,
    next integer not null,
    count integer not null,
    sum integer not null,
    crc integer not null
) without rowid;
insert into tally
select name, next, count, sum, row_crc('tally', name, next, count, sum) from (
    select 'queue' as name,
        max(ifnull(max(id), 0), ifnull((select seq from sqlite_sequence where name = 'old_queue'), 0)) + 1
            as next,
        count(*) as count, ifnull(sum(crc), 0) as sum
    from queue
    union all
    select 'binding', 1, count(*), ifnull(sum(crc), 0) from binding
    union all
    select 'once', ifnull(max(number), 0) + 1, count(*), ifnull(sum(crc), 0) from once
    union all
    select 'segment', ifnull(max(id), 0) + 1, count(*), ifnull(sum(row_crc('segment', id)), 0)
    from segment
);
drop table old_queue;

-- Rows of small tables, set aside when a start was told to salvage.
create table damaged_row (
    name text not null,
    content text not null
);
