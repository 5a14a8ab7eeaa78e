"""Answers HTTP. See docs/architecture.md."""
