"""What the journal keeps, on SQLite, in memory and on PostgreSQL."""
