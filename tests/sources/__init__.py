"""The sources: their arrows, what is made of them, and what runs their tests."""
