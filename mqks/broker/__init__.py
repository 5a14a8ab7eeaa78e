"""All state and all rules: queues, bindings, consumers, deliveries, the table of actions.

Synchronous and without IO. Clock and random ids are passed in.
"""
