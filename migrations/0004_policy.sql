-- What a queue does is one text, its policy as JSON without the fields that have their defaults: a
-- new field needs no migration.

-- A row or a tally that was damaged stays so: what was wrong with a checksum is wrong with the new
-- one. A row that makes no sense at all is left out, and missed by its tally.
alter table queue rename to old_queue;
create table queue (
    id integer primary key,
    name blob not null,
    policy text not null,
    next_seq integer not null,
    cursor integer not null,
    crc integer not null
);
insert or ignore into queue
select id, name, policy, next_seq, cursor,
    row_crc('queue', id, name, policy, next_seq, cursor) + crc
    - row_crc('queue', id, name, delete_when_unused, delete_delay_s, next_seq, cursor)
from (
    select *, case delete_when_unused
        when 0 then '{}'
        else '{"delete_when_unused": {"delay_s": ' || case
            when delete_delay_s is null then 'null' else printf('%!.17g', delete_delay_s)
        end || '}}'
    end as policy
    from old_queue
);

insert or replace into tally
select name, next, count, sum,
    row_crc('tally', name, next, count, sum) + crc
    - row_crc('tally', name, next, count, old_sum)
from (
    select name, next, count, crc, sum as old_sum,
        sum + (select ifnull(sum(crc), 0) from queue) - (select ifnull(sum(crc), 0) from old_queue)
            as sum
    from tally where name = 'queue'
);
drop table old_queue;
