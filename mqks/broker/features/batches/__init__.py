"""Batches: a message is published when all of some others are done."""
