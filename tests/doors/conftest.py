"""What tests of doors get."""

from tests.kit.one_broker import mqks_broker, one_broker

__all__ = ["mqks_broker", "one_broker"]
