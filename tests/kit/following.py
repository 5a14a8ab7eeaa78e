"""Transactions under way: each acks a message and publishes three that follow from it."""

import json

from tests.kit.line_client import LineClient

COUNT = 1000


def follow(address: tuple[str, int], confirms: int) -> None:
    """Ask for 1,000 of them at once, and return with so many confirms, while it goes on."""
    with LineClient(address) as client:
        client.send(b"s subscribe out e\nc consume --confirm in i --manual-ack\n")
        assert client.line() == b"c ok "
        client.send(b"".join(b"m%d publish i %d\n" % (n, n) for n in range(COUNT)))
        for _ in range(COUNT):
            client.line()
        client.send(
            b"".join(
                b"b begin\nx%d publish e 1\nx%d publish --ttl=99 e 2\na ack c m%d\n"
                b"x%d publish --once e 3\nt%d commit --confirm\n" % (n, n, n, n, n)
                for n in range(COUNT)
            )
        )
        for _ in range(confirms):
            client.line()


def check(address: tuple[str, int], confirms: int) -> None:
    """As many messages are gone as there are thrice in the other queue, and all that were
    confirmed."""
    with LineClient(address) as client:
        told = client.ask(b"e _eval [len(state.queues[q]) for q in ('in', 'out')]")
    left, done = json.loads(told.removeprefix(b"e ok "))
    assert done == 3 * (COUNT - left)
    assert COUNT - left >= confirms
