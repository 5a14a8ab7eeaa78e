"""The version of MQKS. The one rule: it imports nothing, so that everything may import it."""

__version__ = "0.3.0.dev0"
