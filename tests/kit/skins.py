"""Both clients under one face, so that one contract can be asked of both.

The one rule: the async client passes as it is; each call of the blocking one runs in a thread.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any, Self

from anyio import to_thread

from mqks import BlockingConsumer, BlockingTail, Options, blocking, connect

_AT_ONCE = {"consume", "tail", "ack", "set_prefetch", "stop"}
"""What the async client does without an await."""


def in_thread(thing: Any) -> Any:
    kinds = BlockingConsumer, BlockingTail
    return BlockingSkin(thing) if isinstance(thing, kinds) else thing


class BlockingSkin:
    """A blocking client or consumer, to be used as if it were async."""

    def __init__(self, thing: Any) -> None:
        object.__setattr__(self, "thing", thing)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.thing, name)
        if not callable(value):
            return value
        if name in _AT_ONCE or (name == "pause" and isinstance(self.thing, BlockingConsumer)):
            return lambda *args, **options: in_thread(value(*args, **options))
        if name == "batches":
            return lambda *args: BlockingSkin(value(*args))

        async def call(*args: Any, **options: Any) -> Any:
            return await to_thread.run_sync(partial(value, *args, **options))

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.thing, name, value)

    async def __aenter__(self) -> Self:
        await to_thread.run_sync(self.thing.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await to_thread.run_sync(self.thing.__exit__, kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        end = object()
        item = await to_thread.run_sync(next, self.thing, end)
        if item is end:
            raise StopAsyncIteration
        return item


def connect_in_thread(url: str | None = None, options: Options | None = None) -> Any:
    return BlockingSkin(blocking.connect(url, options))


SKINS: dict[str, Any] = {"async": connect, "blocking": connect_in_thread}
