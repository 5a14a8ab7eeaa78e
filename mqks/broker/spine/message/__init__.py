"""A message by itself: where its text is, its death, its end, the rules for it."""
