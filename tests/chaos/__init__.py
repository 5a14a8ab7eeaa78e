"""Everything the protocol has, by many clients at once, on servers that are killed again and again.

`python -m tests.chaos 1000` plays a thousand lives of servers on one database. The one rule: what
decides is `checker.py`, which knows only what was sent and what was received.
"""
