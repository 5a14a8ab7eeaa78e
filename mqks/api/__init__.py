"""The HTTP API: publishing and looking for whoever has no client.

The one rule: it is a client like any other. What is allowed, and why something is refused, is said
by the broker.
"""
