"""Connections that see messages without taking them."""
