"""Brokers on one journal in PostgreSQL, whose machines, databases and networks fail, under load.

`python -m tests.takeover 60` runs three brokers, a primary with two synchronous standbys, and
clients. The one rule: what decides is `checker.py`, which knows only the history.
"""
