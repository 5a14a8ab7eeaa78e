"""Spans and metrics of OpenTelemetry: `MqksBroker(middlewares=[MqksTelemetryMiddleware()])`.

The trace is the attribute `traceparent` of a message, as with every client.
"""

from typing import Any

from faststream.message import StreamMessage
from faststream.opentelemetry import TelemetrySettingsProvider
from faststream.opentelemetry.consts import MESSAGING_DESTINATION_PUBLISH_NAME
from faststream.opentelemetry.middleware import TelemetryMiddleware

from mqks.client.messages import Message
from mqks.faststream.messages import MqksPublishCommand


class MqksTelemetry(TelemetrySettingsProvider[Message, MqksPublishCommand]):
    messaging_system = "mqks"

    def get_consume_attrs_from_message(self, msg: StreamMessage[Message]) -> dict[str, Any]:
        return {
            "messaging.system": self.messaging_system,
            "messaging.message.id": msg.message_id,
            "messaging.message.conversation_id": msg.correlation_id,
            "messaging.message.payload_size_bytes": len(msg.body),
            MESSAGING_DESTINATION_PUBLISH_NAME: msg.raw_message.event,
        }

    def get_consume_destination_name(self, msg: StreamMessage[Message]) -> str:
        return msg.raw_message.event

    def get_publish_attrs_from_cmd(self, cmd: MqksPublishCommand) -> dict[str, Any]:
        return {
            "messaging.system": self.messaging_system,
            "messaging.destination.name": cmd.destination,
            "messaging.message.conversation_id": cmd.correlation_id,
        }

    def get_publish_destination_name(self, cmd: MqksPublishCommand) -> str:
        return cmd.destination


class MqksTelemetryMiddleware(TelemetryMiddleware[MqksPublishCommand]):
    """The options are those of FastStream's: `tracer_provider`, `meter_provider` …"""

    def __init__(self, **options: Any) -> None:
        super().__init__(settings_provider_factory=lambda _: MqksTelemetry(), **options)
