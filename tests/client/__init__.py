"""The two Python clients, and services."""
