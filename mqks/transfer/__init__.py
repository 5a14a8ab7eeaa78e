"""Exports a server or a database file as lines of JSON, and imports them into a server.

The one rule: memory use does not grow with the number of messages.
"""
