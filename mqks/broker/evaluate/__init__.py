"""`_eval`: the language of its expressions, and what they can see."""
