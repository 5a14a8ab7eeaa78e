"""All state and all rules: queues, bindings, consumers, deliveries, the table of actions.

Synchronous, no IO, no clock and no randomness of its own: those are passed in.
"""
