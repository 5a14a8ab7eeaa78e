-- The number of the file that has the text of a segment, since files are written again with other
-- texts: null if it is the segment's id.
alter table segment add column text_file integer;
alter table damaged_segment add column text_file;
