"""What one commit says: gathered for the journal, and who waits for it."""
