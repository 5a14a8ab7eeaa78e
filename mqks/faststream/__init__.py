"""FastStream on MQKS: `app = FastStream(MqksBroker("mqks://localhost"))`."""

from mqks.faststream.broker import (
    MqksBroker,
    MqksMessageContext,
    MqksRoute,
    MqksRoutePublisher,
    MqksRouter,
)
from mqks.faststream.messages import MqksMessage, MqksResponse
from mqks.faststream.testing import TestMqksBroker

__all__ = [
    "MqksBroker",
    "MqksMessage",
    "MqksMessageContext",
    "MqksResponse",
    "MqksRoute",
    "MqksRoutePublisher",
    "MqksRouter",
    "TestMqksBroker",
]
