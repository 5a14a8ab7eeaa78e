"""The version of MQKS. The one rule: it imports nothing, so that everything may import it."""

__version__ = "0.2.0"
