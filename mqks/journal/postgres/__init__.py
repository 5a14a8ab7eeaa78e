"""The journal in a PostgreSQL database: needs the extra `mqks[postgres]`.

The one rule: who owns the journal is decided by the database, in each commit, never by a clock.
"""
