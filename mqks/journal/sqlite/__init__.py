"""The default store: one SQLite database, for one server on one machine."""
