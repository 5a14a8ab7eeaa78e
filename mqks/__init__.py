"""MQKS, Message Queue Kept Simple."""

__version__ = "0.1.0"
