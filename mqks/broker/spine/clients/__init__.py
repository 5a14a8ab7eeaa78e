"""Connections, their consumers and what they may do."""
