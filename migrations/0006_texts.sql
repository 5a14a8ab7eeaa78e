-- The text of a large segment is in a file of its own: then `body` is only the head, and `text_bytes`
-- says how long the text is. `crc` is that of id, head and text, wherever the text is.
alter table segment add column text_bytes integer;
alter table damaged_segment add column text_bytes;
