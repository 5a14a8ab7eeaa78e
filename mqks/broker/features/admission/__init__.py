"""What may join a queue."""
