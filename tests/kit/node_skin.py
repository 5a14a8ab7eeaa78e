"""The client for Node.js under the face of the async client, so that its contract can be asked.

The one rule: a call passes to the call of the same meaning; what Node's client has not is not here.
"""

from __future__ import annotations

import asyncio
import json
import signal
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any, Self

from mqks import (
    AuthenticationFailed,
    ConnectionLost,
    ConsumerReplaced,
    InvalidRequest,
    Options,
    ProtocolViolation,
    ReplyTimeout,
    RequestFailed,
)
from mqks.client.requests import decoded, encoded

DRIVER = Path(__file__).with_name("node_driver.js")
FAILURES = {
    "INVALID": InvalidRequest,
    "TIMEOUT": ReplyTimeout,
    "UNSENT": ReplyTimeout,
    "CONNECTION": ConnectionLost,
    "CLOSED": ConnectionLost,
    "PROTOCOL": ProtocolViolation,
}

REFUSALS = {"REFUSED": RequestFailed, "REPLACED": ConsumerReplaced}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.title, rest))


def _options(options: Options | None) -> dict[str, Any]:
    """Those that are not as by default."""
    given, default = options or Options(), Options()
    told = {each.name: getattr(given, each.name) for each in fields(Options)}
    return {
        _camel(f"{name[:-2]}_ms" if name.endswith("_s") else name): (
            value * 1000 if name.endswith("_s") else value
        )
        for name, value in told.items()
        if value != getattr(default, name)
    }


def _camels(words: dict[str, Any]) -> dict[str, Any]:
    return {_camel(name.removesuffix("_s")): value for name, value in words.items()}


def _words(**words: Any) -> dict[str, Any]:
    """Options of a call that are given."""
    if "timeout_s" in words:
        words["timeout_ms"] = words.pop("timeout_s") * 1000
    return {name: value for name, value in _camels(words).items() if value is not None}


def _lists(words: dict[str, Any]) -> dict[str, Any]:
    """Options that are lists of names."""
    return {name: _names(value) for name, value in _words(**words).items()}


def _raw(data: bytes) -> dict[str, str]:
    return {"$bytes": b64encode(data).decode()}


def _data(data: Any) -> Any:
    return _raw(data) if isinstance(data, bytes) else data


def _name(name: Any) -> Any:
    try:
        return name.encode().decode()
    except UnicodeEncodeError:
        return _raw(encoded(name))


def _names(names: Iterable[Any] | None) -> list[Any]:
    return [*map(_name, names or ())]


class Driver:
    """The process, and what is asked of it."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if self._process is not None:
            return
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            "node", str(DRIVER), stdin=pipe, stdout=pipe, limit=1 << 26
        )
        self._reading = asyncio.create_task(self._read())

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            await self._reading

    @property
    @contextmanager
    def lock(self) -> Iterator[None]:
        """The process stands still meanwhile, as a client for Python does whose lock is held."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    async def heard(self) -> None:
        """All that was asked so far has begun."""
        await self.ask(0, "heard")

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                if (asked := self._asked.pop(answer["n"])).cancelled():
                    continue
                if failed := answer.get("failed"):
                    asked.set_exception(_failure(**failed))
                else:
                    asked.set_result(answer.get("told"))
        finally:
            for asked in self._asked.values():
                asked.cancel("the driver has ended")

    def ask(self, on: int, call: str, *given: Any) -> asyncio.Future[Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        line = json.dumps({"n": number, "on": on, "call": call, "given": given}, allow_nan=False)
        self._process.stdin.write(line.encode() + b"\n")
        return asked


def _failure(
    message: str, code: str = "", errorId: str = "", reason: str | None = None
) -> Exception:
    if code == "AUTH":
        return AuthenticationFailed(errorId, given=reason is None)
    if code in REFUSALS:
        return REFUSALS[code](message.removesuffix(f": {reason}"), errorId, reason)
    return FAILURES.get(code, RuntimeError)(message)


class NodeMessage:
    def __init__(self, driver: Driver, told: dict[str, Any]) -> None:
        self._driver, self._thing = driver, told["thing"]
        self.id, self.data = decoded(b64decode(told["id"])), b64decode(told["data"])
        self.event, self.retry, self.meta = told["event"], told["retry"], told["meta"]
        self.priority, self.key = told["priority"], told.get("key")
        self.consumer_id = told.get("consumer", "").encode()
        self.text = self.data.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.data)

    def ask(self, verb: str, **words: Any) -> asyncio.Future[Any]:
        return self._driver.ask(self._thing, verb, _words(**words))

    def ack(self) -> None:
        self.ask("ack")

    def reject(self, **words: Any) -> None:
        self.ask("reject", **words)


class NodeConsumer:
    def __init__(self, driver: Driver, client: int, given: tuple[Any, ...]) -> None:
        self._driver, self._client, self._given = driver, client, given

    async def __aenter__(self) -> Self:
        told = await self._driver.ask(self._client, "consume", *self._given)
        self._thing = told["thing"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._driver.ask(self._thing, "close")

    async def receive(self, timeout_s: float | None = None) -> NodeMessage:
        words = {} if timeout_s is None else {"timeout_s": timeout_s}
        if (told := await self._driver.ask(self._thing, "receive", _words(**words))) is None:
            raise TimeoutError
        return NodeMessage(self._driver, told)

    def ack(self, messages: Iterable[NodeMessage]) -> None:
        for each in messages:
            each.ack()

    async def batches(self, most: int = 100) -> AsyncIterator[list[NodeMessage]]:
        while told := await self._driver.ask(self._thing, "batch", most):
            yield [NodeMessage(self._driver, each) for each in told]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NodeMessage:
        if (told := await self._driver.ask(self._thing, "next")) is None:
            raise StopAsyncIteration
        return NodeMessage(self._driver, told)


class NodeClient:
    def __init__(
        self, driver: Driver, url: str | list[str] | None = None, options: Options | None = None
    ) -> None:
        self._driver = self._connection = driver
        self._given = [url, _options(options)] if url else []

    async def __aenter__(self) -> Self:
        await self._driver.start()
        self._thing = (await self._driver.ask(0, "connect", *self._given))["thing"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ask("close")

    def ask(self, call: str, *given: Any) -> asyncio.Future[Any]:
        return self._driver.ask(self._thing, call, *given)

    def publishing(self, event: str, data: Any, **words: Any) -> asyncio.Future[Any]:
        options = {"confirm": False, **_words(**words)}
        if "id" in options:
            options["id"] = _name(options["id"])
        return self.ask("publish", _name(event), _data(data), options)

    async def publish(self, event: str, data: Any, **words: Any) -> str:
        return str(await self.publishing(event, data, **words))

    async def publish_many(self, messages: Iterable[Any], **words: Any) -> int:
        asked = []
        for event, data in messages:
            asked.append(self.publishing(event, data, **{"confirm": True, **words}))
            await asyncio.sleep(0)
        return len(await asyncio.gather(*asked))

    def consume(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        masks: Iterable[str] = (),
        replace: bool = False,
        create: bool | None = None,
        **words: Any,
    ) -> NodeConsumer:
        words.pop("meta", None)  # Always there.
        named, binds = _names(events), bool([*events, *masks])
        options = {"masks": _names(masks), "prefetch": 10, **_words(**words)}
        options["existing"] = not (binds if create is None else create)
        if not replace:
            options["add"], named = named, []
        return NodeConsumer(self._driver, self._thing, (_name(queue), named, options))

    async def subscribe(
        self, queue: str, events: Iterable[str] = (), *, replace: bool = False, **words: Any
    ) -> None:
        options, named = _lists(words), _names(events)
        if not replace:
            options["add"], named = named, []
        await self.ask("subscribe", _name(queue), named, options)

    async def rebind(self, queue: str, **words: Any) -> None:
        options = _lists(words)
        if "replace" in options:
            options["events"] = options.pop("replace")
        await self.ask("rebind", _name(queue), options)

    async def set_queue(self, queue: str, **policy: Any) -> None:
        if "dead_letter_queue" in policy:
            policy["dead_letters"] = policy.pop("dead_letter_queue")
        await self.ask("setQueue", _name(queue), _camels(policy))

    async def pause(self, queue: str, **how: Any) -> None:
        await self.ask("pauseQueue", _name(queue), _camels(how))

    async def resume(self, queue: str) -> None:
        await self.ask("resumeQueue", _name(queue))

    async def delete_queue(self, queue: str) -> None:
        await self.ask("deleteQueue", _name(queue))

    async def purge(self, queue: str) -> Any:
        return await self.ask("purge", _name(queue))

    async def peek(self, queue: str, **words: Any) -> list[NodeMessage]:
        told = await self.ask("peek", _name(queue), _words(**words))
        return [NodeMessage(self._driver, each) for each in told]

    async def stats(self, *words: str) -> Any:
        return await self.ask("stats", *words)

    async def reason(self, error_id: str) -> Any:
        return await self.ask("reason", error_id)

    async def request(self, *words: str, **options: Any) -> str:
        return str(await self.ask("request", *words, _words(**options)))

    async def evaluate(self, expression: str) -> str:
        return await self.request("_eval", expression)

    async def ping(self, text: str = "", **options: Any) -> str:
        return await self.request("ping", text, **options)
