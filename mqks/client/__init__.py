"""The clients: one session without IO, an async client (anyio) and a blocking one (threads).

The one rule: the session decides everything that the two clients have in common.
"""
