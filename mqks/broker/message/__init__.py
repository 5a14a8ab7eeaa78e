"""A message by itself: where its text is, its letters, its end, the rules for it."""
