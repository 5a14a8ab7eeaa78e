"""Metrics of Prometheus: `middlewares=[MqksPrometheusMiddleware(registry=registry)]`."""

from typing import Any

from faststream.message import StreamMessage
from faststream.prometheus import ConsumeAttrs, MetricsSettingsProvider
from faststream.prometheus.middleware import PrometheusMiddleware

from mqks.client.messages import Message
from mqks.faststream.messages import MqksPublishCommand


class MqksMetrics(MetricsSettingsProvider[Message, MqksPublishCommand]):
    messaging_system = "mqks"

    def get_consume_attrs_from_message(self, msg: StreamMessage[Message]) -> ConsumeAttrs:
        return {
            "message_size": len(msg.body),
            "destination_name": msg.raw_message.event,
            "messages_count": 1,
        }

    def get_publish_destination_name_from_cmd(self, cmd: MqksPublishCommand) -> str:
        return cmd.destination


class MqksPrometheusMiddleware(PrometheusMiddleware[Message, MqksPublishCommand]):
    """The options are those of FastStream's: `registry`, `app_name`, `metrics_prefix` …"""

    def __init__(self, **options: Any) -> None:
        super().__init__(settings_provider_factory=lambda _: MqksMetrics(), **options)
