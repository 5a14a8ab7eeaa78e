"""The API of Amazon SQS: queues of the broker for whatever has a client of SQS.

The one rule: it is a client like any other. What is durable, what is allowed and when a message is
delivered again is decided by the broker.
"""
