"""What became of messages: steps that are noted for those that are traced."""
