"""The expressions by which statistics are asked of a broker: verbatim, over a real connection."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bare import BareWorld
from tests.line_client import LineClient
from tests.server_process import ServerProcess

NUMBERS = {
    "request['client']": 2,
    "WORKERS": 1,
    "state.published": 6,
    "state.queued": 9,
    "state.consumed": 2,
    "len(state.queues)": 4,
    "len([u for u in state.queues_used.itervalues() if u.is_set()])": 2,
    "len(state.queues_to_delete_when_unused)": 1,
    "state.commands_put": 0,
    "state.commands_got": 0,
    "sum(c.qsize() for c in state.commands_to_workers.itervalues())": 0,
    "sum(q.qsize() for q in state.queues.itervalues())": 5,
    "sum(len(ms) for ms in state.messages_by_consumer_ids.itervalues())": 2,
    "sum(q.qsize() for q in state.responses_by_clients.itervalues())": 0,
    "len(state.queues_by_events)": 3,
    "len(state.events_by_queues)": 4,
    "len(state.queues_by_consumer_ids)": 2,
    "sum(len(cs) for cs in state.consumers_by_queues.itervalues())": 2,
    "len(state.consumer_ids_by_clients)": 2,
    "len(set(state.clients_by_consumer_ids.itervalues()))": 1,
    "len(state.socks_by_clients)": 2,
}
LARGEST = "sorted(((q.qsize(), n) for n, q in state.queues.iteritems()), key=lambda x: -x[0])[:10]"
HOSTILE = [
    "(lambda f: f(f))(lambda f: f(f))",
    "sorted([1], key=lambda f: f(f))",
    "sorted(range(10 ** 9), key=lambda x: -x)",
    "sorted(range(9999), key=lambda x: sorted(range(9999), key=lambda y: x * y))",
    "state.queues['q3'].__class__",
    "state.queues['q3'].qsize.__globals__",
    "[q.qsize for q in state.queues.itervalues()]",
    "sorted([state], key=lambda x: x._broker)",
    "state.queues.iterpop()",
    "state.__class__.itervalues()",
]


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineClient]:
    """A client beside another one, in a broker with queues, rules, consumers and unacked messages.

    Queue q1 has a consumer with three messages of one id, one of them acked; q2 a rule, and a
    consumer that took its message without ack; in q3 four messages wait, in q4 one.
    """
    db: Path = tmp_path_factory.mktemp("statistics") / "mqks.db"
    with (
        ServerProcess(db) as server,
        LineClient(server.address) as consumer,
        LineClient(server.address) as client,
    ):
        assert consumer.ask(b"c1 consume --confirm q1 e1 --manual-ack") == b"c1 ok "
        assert consumer.ask(b"c2 consume --confirm q2 e2 --delete-queue-when-unused=60") == (
            b"c2 ok "
        )
        assert client.ask(b"s subscribe --confirm q3 e1 e2") == b"s ok "
        assert client.ask(b"s subscribe --confirm q4 e3") == b"s ok "
        client.send(b"m1 publish e1 x\n" * 3 + b"m2 publish e2 x\nm3 publish nowhere x\n")
        assert client.ask(b"m4 publish --confirm e3 x") == b"m4 ok "
        for line in [b"c1 ok m1 event=e1 x"] * 3 + [b"c2 ok m2 event=e2 x"]:
            assert consumer.line() == line
        assert consumer.ask(b"a ack --confirm c1 m1") == b"a ok "
        yield client


def answer(client: LineClient, expression: str) -> str:
    reply = client.ask(b"ev _eval " + expression.encode())
    assert reply.startswith(b"ev ok "), reply
    return reply.decode().removeprefix("ev ok ")


@pytest.mark.parametrize(("expression", "value"), NUMBERS.items(), ids=list(NUMBERS))
def test_a_number(watcher: LineClient, expression: str, value: int) -> None:
    assert answer(watcher, expression) == str(value)


def test_several_at_once(watcher: LineClient) -> None:
    assert json.loads(answer(watcher, f"[{', '.join(NUMBERS)}]")) == [*NUMBERS.values()]


def test_the_largest_queues(watcher: LineClient) -> None:
    largest = [[4, "q3"], [1, "q4"], [0, "q1"], [0, "q2"]]
    assert json.loads(answer(watcher, LARGEST)) == largest
    assert json.loads(answer(watcher, f"[{LARGEST}, state.published]")) == [largest, 6]


def test_the_workers(watcher: LineClient) -> None:
    assert re.fullmatch(r"127\.0\.0\.1:\d+", answer(watcher, "' '.join(config['workers'])"))


def test_what_the_views_tell(watcher: LineClient) -> None:
    assert json.loads(answer(watcher, "state.queues")) == {"q1": 0, "q2": 0, "q3": 4, "q4": 1}
    assert json.loads(answer(watcher, "state.queues_used")) == {
        "q1": True,
        "q2": True,
        "q3": False,
        "q4": False,
    }
    assert answer(watcher, "state.queues['q3'].qsize()") == "4"
    assert json.loads(answer(watcher, "state.messages_by_consumer_ids")) == {"c1": ["m1", "m1"]}


@pytest.mark.parametrize("expression", HOSTILE)
def test_no_way_out(watcher: LineClient, expression: str) -> None:
    assert watcher.ask(b"ev _eval " + expression.encode()).startswith(b"ev error ")
    assert watcher.ask(b"p ping") == b"p ok "


def test_replies_that_wait() -> None:
    """Those of this turn, before they are sent."""
    world = BareWorld()
    world.connect("k")
    waiting = b"_eval sum(q.qsize() for q in state.responses_by_clients.itervalues())"
    world.send("k", b"p ping x\np ping y\nev %b\n" % waiting)
    assert world.received("k") == b"p ok x\np ok y\nev ok 2\n"
