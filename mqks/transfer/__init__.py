"""Exports: what a server or a file holds as lines of JSON, and such lines into a server.

The one rule: nothing is held in memory that grows with the messages.
"""
