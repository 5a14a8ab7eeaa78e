"""Looking into a server, or into the file of one that does not run: the same rows of either.

The one rule: looking changes nothing, and nothing is held in memory that grows with the messages.
"""
