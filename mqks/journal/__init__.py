"""The only room that knows SQLite: segments, the one writer, recovery, migrations."""
