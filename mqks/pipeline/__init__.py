"""Spark: a source and sink `format("mqks")`, the session they run in, and jobs upon them.

The one rule: what a task has read or written can be read or written again, and nothing is doubled.
"""
