"""A misspelled keyword is refused: by mypy, to which each `ignore` here must be of use, and at run
time, where the nearest keyword is named."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import mqks
from mqks import Options
from mqks.testing import Broker
from tests.kit.skins import SKINS


@pytest.mark.anyio
@pytest.mark.parametrize("tracing", [False, True])
@pytest.mark.parametrize("skin", SKINS)
async def test_clients_name_the_nearest(mqks_broker: Broker, skin: str, tracing: bool) -> None:
    async with SKINS[skin](mqks_broker.url, Options(tracing=tracing)) as client:
        await client.subscribe("q", ["e"])

        async def refused(method: str, *arguments: Any, **given: Any) -> None:
            (word,) = given
            with pytest.raises(TypeError) as raised:
                await getattr(client, method)(*arguments, **given)
            nearest = {"confrim": "confirm", "mandatry": "mandatory", "oncee": "once"}
            nearest |= {"delay": "delay_s", "ttl": "ttl_s", "prefix": "id_prefix"}
            nearest |= {"evnt": "event", "limt": "limit", "older": "older_s", "retrys": "retries"}
            nearest |= {
                "time_out_s": "timeout_s",
                "ad_mask": "add_mask",
                "mask": "masks",
                "prefech": "prefetch",
            }
            told = f"() got an unexpected keyword argument '{word}'"
            near = f"; did you mean {nearest[word]}?" if word in nearest else ""
            assert str(raised.value).endswith(f"{method}{told}{near}")

        for word in ("confrim", "mandatry", "oncee", "delay", "ttl", "time_out_s", "x"):
            await refused("publish", "e", "data", **{word: 5})
        for word in ("mandatry", "oncee", "delay", "ttl", "prefix", "time_out_s"):
            await refused("publish_many", [("e", "data")], **{word: 5})
            await refused("publish_batches", [], **{word: 5})
        for method in ("purge", "redrive"):
            for word in ("evnt", "limt", "older", "time_out_s"):
                await refused(method, "q", **{word: 5})
        await refused("move", "q", "r", limt=5)
        await refused("peek", "q", older=5)
        await refused("requeue", "c", evnt="e")
        await refused("subscribe", "q", ["e"], mask=["m.*"])
        await refused("rebind", "q", ad_mask=["m.*"])
        await refused("set_queue", "q", retrys=5)
        await refused("ping", "data", time_out_s=5)
        with pytest.raises(TypeError, match="did you mean prefetch"):
            client.consume("q", prefech=5)
        assert await client.peek("q") == []
        assert await client.publish("e", "data", confirm=True, delay_s=0, meta={"a": "b"})


def test_every_function_with_options_names_the_nearest() -> None:
    kinds = mqks.AsyncClient, mqks.BlockingClient, mqks.AsyncConsumer, mqks.BlockingConsumer
    for kind in kinds:
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            options = [
                each
                for each in inspect.signature(function).parameters.values()
                if each.default is not each.empty or each.kind is each.VAR_KEYWORD
            ]
            if options and name[0] != "_" and name not in ("publish", "receive"):
                assert hasattr(function, "__wrapped__"), name


def test_types_know_the_keywords_too() -> None:
    with pytest.raises(TypeError, match=r"Options.*'timeout'; did you mean timeout_s\?"):
        Options(timeout=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"connect.*did you mean client_name\?"):
        mqks.connect(client_nme="web-1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"connect.*did you mean client_name\?"):
        mqks.blocking.connect(client_nme="web-1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"App.*did you mean stop_timeout_s\?"):
        mqks.App(stop_timeout=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"consumer.*did you mean concurrency\?"):
        mqks.App().consumer("q", concurency=5)  # type: ignore[call-arg]


def blocking(client: mqks.BlockingClient, message: mqks.Message) -> None:
    """Only for mypy."""
    client.publish("e", "data", confrim=True)  # type: ignore[call-arg]
    client.publish("e", "data", delay=5)  # type: ignore[call-arg]
    client.publish_many([], mandatry=True)  # type: ignore[call-arg]
    client.publish_batches([], ttl=5)  # type: ignore[call-arg]
    client.consume("q", prefech=5)  # type: ignore[call-arg]
    client.purge("q", limt=5)  # type: ignore[call-arg]
    client.set_queue("q", retrys=5)  # type: ignore[call-arg]
    client.rebind("q", ad=["e"])  # type: ignore[call-arg]
    message.reject(delay=5)  # type: ignore[call-arg]


async def asynchronous(client: mqks.AsyncClient) -> None:
    """Only for mypy."""
    await client.publish("e", "data", confrim=True)  # type: ignore[call-arg]
    await client.publish_many([], mandatry=True)  # type: ignore[call-arg]
    await client.peek("q", older=5)  # type: ignore[call-arg]
