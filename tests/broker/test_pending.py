"""What the writer must do with what is pending."""

import pytest

from mqks.broker.spine.log.pending import SMALL_RECORDS_MAX, Need
from tests.kit.bare import BareWorld

MANY = b"".join(b"m%d publish e x\n" % number for number in range(SMALL_RECORDS_MAX + 1))


@pytest.mark.parametrize(
    ("requests", "need"),
    [
        (b"", Need.NOTHING),
        (b"m publish f x\n", Need.NOTHING),
        (b"m publish --confirm f x\n", Need.CONFIRM),
        (b"a ack c m\n", Need.WRITE_LATER),
        (b"a ack --confirm c m\n", Need.WRITE),
        (b"m publish e x\n", Need.WRITE),
        (MANY, Need.WRITE_MUCH),
        (b"s subscribe q g\n", Need.WRITE_MUCH),
    ],
)
def test_what_the_writer_must_do(requests: bytes, need: Need) -> None:
    world = BareWorld()
    client = world.connection("k")
    world.intake.receive(client, b"s subscribe q e\nc consume q --manual-ack\nm publish e x\n")
    pending = world.broker.pending
    world.broker.answers.committed(pending.take())
    assert not pending

    world.intake.receive(client, requests)

    assert pending.need is need
    assert bool(pending) is (need is not Need.NOTHING)
    if need is Need.WRITE_LATER:
        world.broker.pending.put_back(pending.take())
        assert pending.need is Need.WRITE
