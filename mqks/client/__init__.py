"""Clients: one session without IO under two skins, async (anyio) and blocking (threads).

The one rule: what both skins do alike is decided in the session, once.
"""
