"""Servers that are killed, databases that are damaged, lines that are mutated."""
