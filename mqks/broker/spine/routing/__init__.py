"""From an event to queues."""
