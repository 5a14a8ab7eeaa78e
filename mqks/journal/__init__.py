"""What must last: segments of messages, and the stores that keep them."""
