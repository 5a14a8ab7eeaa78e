"""What the broker does with requests, messages and queues."""
