"""Durable data: segments of messages, and the stores that contain them."""
