"""The messages of a queue: where they are, when they move, how they end."""
