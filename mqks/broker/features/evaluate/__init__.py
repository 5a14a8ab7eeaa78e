"""`_eval`: the language of its expressions, and the state that they can read."""
