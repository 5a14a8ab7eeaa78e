"""The way of a message: publish, routes, queue, order, consumer, outbox, commit.

The one rule: it imports no feature.
"""
