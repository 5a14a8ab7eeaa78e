-- Logins, and requests that changed what exists or removed messages: one row each, as JSON without
-- the fields that have their defaults.
create table audit (
    id bigint primary key,
    row text not null
);
