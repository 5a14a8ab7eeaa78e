"""A copy of a journal that follows it, from which any of its moments can be restored."""
