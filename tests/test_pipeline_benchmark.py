"""The program that measures what publishing pays for an archive beside it.

The one rule: nothing here looks at how long something took.
"""

import math
import re

import pytest

from benchmarks import beside
from benchmarks import pipeline as benchmark
from mqks.client.blocking import connect_blocking
from mqks.pipeline.reader import QueueReader
from mqks.testing import Broker


@pytest.mark.parametrize("rate", [math.inf, 100_000.0])
def test_what_is_published_is_there_and_confirmed(mqks_broker: Broker, rate: float) -> None:
    with connect_blocking(mqks_broker.url) as client:
        client.subscribe("bench", ["bench"])
    for first in (0, 20_000):
        assert beside.publish(mqks_broker.port, first, 20_000, rate)["messages/s"] > 0
    with QueueReader(mqks_broker.url, "bench") as reader:
        keys = [key for page in reader.read(1, 40_001) for key in page["key"].to_pylist()]

    assert keys == [b"0000%08d" % number for number in range(40_000)]


def test_a_refusal_is_noticed(mqks_broker: Broker) -> None:
    mqks_broker.stop()
    with Broker(mqks_broker.settings.db_file, queue_messages_max=100) as full:
        with connect_blocking(full.url) as client:
            client.subscribe("bench", ["bench"])
        with pytest.raises(AssertionError, match="error"):
            beside.publish(full.port, 0, 20_000, math.inf)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_figures_are_told(
    spark: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine nothing may be left over for a long time.
    monkeypatch.setattr(beside, "LEFT_OVERS", [])
    benchmark.main(["publishing", "--seconds", "0.5", "--rounds", "2"])
    told = re.sub(r"[\d.,]*\d", "N", capsys.readouterr().out)

    assert "N messages published, and each is in the lake once" in told
    for what in ("messages/s", "CPU s of the broker a million"):
        ratio = f"N {beside.ALONE}, N {beside.BESIDE}, ratio N (N to N)"
        assert f"flat out, {what}: {ratio}" in told
