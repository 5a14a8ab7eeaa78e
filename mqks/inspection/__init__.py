"""Reads the state of a server, or of a database file without one, as the same rows.

The one rule: nothing is changed, and memory use does not grow with the number of messages.
"""
