"""What becomes of messages that are given back, die, or move to another queue."""
