-- Each text is written once and deleted soon. Autovacuum's default delay lets it free some 10 MB of
-- them a second, and the table grows where more are written.
alter table segment set (
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_cost_delay = 0
);
