"""Dramatiq on MQKS: `dramatiq.set_broker(MqksBroker("mqks://localhost"))`."""

from mqks.dramatiq.broker import MqksBroker

__all__ = ["MqksBroker"]
