-- What readers of a queue hold on to: which database this is, and what was published once.

-- Another one for each database made: sequence numbers mean the same only within one.
insert into meta (key, value) values ('epoch', lower(hex(randomblob(8))));

-- Ids of messages published with --once, newlines between them. One row a commit; the oldest rows
-- go when all later ones hold once_ids_max ids.
create table once (
    number integer primary key,
    count integer not null,
    ids blob not null
);
