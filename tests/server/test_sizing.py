"""The formulas of `mqks size` and docs/sizing.md tell what a real server takes."""

import json
from pathlib import Path

import pytest

import mqks
from mqks.broker.spine.clients.consumer import UNACKED_OVERHEAD_BYTES
from mqks.broker.spine.log.metadata import BINDING_BYTES, CONSUMER_BYTES, QUEUE_BYTES
from mqks.broker.spine.queue.blocks import MESSAGE_OVERHEAD_BYTES
from mqks.commands import main
from mqks.commands.size import CONSTANTS, size_of
from mqks.settings import Settings
from mqks.testing import BrokerProcess

COUNT = 200_000
MEMORY_TOLERANCE, DISK_TOLERANCE = 0.2, 0.1


@pytest.mark.slow
@pytest.mark.parametrize("data_bytes", [20, 300])
def test_memory_and_disk_of_a_backlog(data_bytes: int, db: Path) -> None:
    with BrokerProcess(db) as broker, mqks.blocking.connect(broker.url) as client:
        client.subscribe("q", ["e"])
        client.publish_many(("e", "x" * data_bytes) for _ in range(COUNT))
        assert client.stats()["messages_ready"] == COUNT
        memory = broker.resident_bytes
    disk = sum(path.stat().st_size for path in db.parent.rglob("*") if path.is_file())
    told = size_of(Settings(), data_bytes=data_bytes, backlog=COUNT)
    assert memory == pytest.approx(told.memory_bytes, rel=MEMORY_TOLERANCE)
    assert disk == pytest.approx(told.disk_bytes, rel=DISK_TOLERANCE)


def test_constants_are_those_that_the_broker_counts_with() -> None:
    told = CONSTANTS.counted_memory, CONSTANTS.queue, CONSTANTS.binding, CONSTANTS.consumer
    assert told == (MESSAGE_OVERHEAD_BYTES, QUEUE_BYTES, BINDING_BYTES, CONSUMER_BYTES)
    assert CONSTANTS.unacked == UNACKED_OVERHEAD_BYTES


def test_what_the_command_tells(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--publishes", "1000", "--bytes", "77", "--queues", "10", "--consumers", "20")
    assert main(["size", *words, "--backlog", "100000000", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["descriptors"] == 148
    assert told["disk_bytes"] == 16 * 1024**2 + (100_000_000 + 2000) * 107
    assert told["memory_bytes"] < 512 * 1024**2
    assert (told["cores_min"], told["cores_max"]) == (0.003, 0.44)
    assert main(["size"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "memory       47 MiB"
