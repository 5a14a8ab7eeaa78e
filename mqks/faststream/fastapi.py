"""A router for FastAPI: `FastAPI().include_router(MqksStreamRouter("mqks://localhost"))`."""

from collections.abc import Iterable
from typing import Any

from faststream._internal.fastapi.router import StreamRouter

from mqks.client.messages import Message
from mqks.client.urls import Urls
from mqks.faststream.broker import MqksBroker
from mqks.faststream.publishing import MqksPublisher

RESPONSE = {
    **dict.fromkeys(("response_model", "response_model_include", "response_model_exclude")),
    "response_model_by_alias": True,
    **dict.fromkeys(
        [f"response_model_exclude_{of}" for of in ("unset", "defaults", "none")], False
    ),
}


class MqksStreamRouter(StreamRouter[Message]):
    """The options are those of `MqksBroker` and of FastAPI's `APIRouter`. Handlers have FastAPI's
    dependencies; the broker starts and stops with the application."""

    broker_class = MqksBroker
    broker: MqksBroker

    def __init__(self, url: Urls | None = None, *, context: Any = None, **options: Any) -> None:
        super().__init__(url, context=context, **options)

    def subscriber(  # type: ignore[override]
        self, queue: str, events: Iterable[str] | None = None, **options: Any
    ) -> Any:
        """As `MqksBroker.subscriber`, and with FastAPI's `response_model` and its like."""
        told: dict[str, Any] = {"events": events, "dependencies": (), **RESPONSE, **options}
        return super().subscriber(queue, **told)

    def publisher(self, event: str, **options: Any) -> MqksPublisher:  # type: ignore[override]
        """As `MqksBroker.publisher`."""
        return self.broker.publisher(event, **options)
