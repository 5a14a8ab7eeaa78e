"""Celery and kombu on a real server: kombu's own tests of a transport, unmodified."""

import json
import socket
import tarfile
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest

import mqks.celery
from mqks import blocking
from mqks.celery import names
from mqks.testing import Broker
from tests.kit.waiting import WAIT_S
from tools.sdists import DIRECTORY

kombu = pytest.importorskip("kombu")
from kombu.exceptions import ChannelError  # noqa: E402

# What kombu's own tests leave open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def _mixins() -> Any:
    """Read anew by each process that runs tests: a file of it would be read while it is written."""
    found = DIRECTORY / f"kombu-{version('kombu')}.tar.gz"
    if not found.exists():
        return None
    with tarfile.open(found) as sources:
        (member,) = (each for each in sources if each.name.endswith("t/integration/common.py"))
        file = sources.extractfile(member)
        assert file is not None
        text = file.read()
    module = ModuleType("kombu_common")
    exec(compile(text, member.name, "exec"), vars(module))
    return module


MIXINS = _mixins()


@pytest.fixture
def connection(mqks_broker: Broker) -> Any:
    return kombu.Connection(mqks_broker.url)


@pytest.fixture
def invalid_connection() -> Any:
    return kombu.Connection("mqks://127.0.0.1:1")


@pytest.fixture
def failover_connection(mqks_broker: Broker) -> Any:
    return kombu.Connection(f"mqks://127.0.0.1:1;{mqks_broker.url}", connect_timeout=10)


if MIXINS is None:

    def test_mixins() -> None:
        pytest.skip("the sources of this version are not here: python -m tools.sdists gets them")

else:
    # All of them: none is left out.
    class TestBasic(MIXINS.BasicFunctionality):  # type: ignore[name-defined,misc]
        pass

    class TestExchanges(MIXINS.BaseExchangeTypes):  # type: ignore[name-defined,misc]
        pass

    class TestMessages(MIXINS.BaseMessage):  # type: ignore[name-defined,misc]
        pass

    class TestPriority(MIXINS.BasePriority):  # type: ignore[name-defined,misc]
        pass

    # Kombu has these from 5.6 on.
    class TestEventLoop(getattr(MIXINS, "BaseEventLoop", object)):  # type: ignore[misc]
        pass

    class TestFailover(MIXINS.BaseFailover):  # type: ignore[name-defined,misc]
        pass

    @pytest.mark.slow
    class TestTimeToLive(MIXINS.BaseTimeToLive):  # type: ignore[name-defined,misc]
        pass


@pytest.mark.parametrize(
    ("kind", "key", "events", "masks"),
    [
        ("direct", "a.*", ["x%2Ey.a.%2A"], []),
        ("fanout", "any", [], ["x%2Ey.**"]),
        ("topic", "a.b", ["x%2Ey.a.b"], []),
        ("topic", "a.*", [], ["x%2Ey.a.*"]),
        ("topic", "a.#", ["x%2Ey.a"], ["x%2Ey.a.**"]),
        ("topic", "*.#", [], ["x%2Ey.*", "x%2Ey.*.**"]),
        ("topic", "#", [], ["x%2Ey.**"]),
    ],
)
def test_bindings(kind: str, key: str, events: list[str], masks: list[str]) -> None:
    assert names.bound(kind, "x.y", key) == (events, masks)


def test_events_tell_what_they_were_published_to() -> None:
    for exchange, key in [("", "q"), ("a.b", "c.d"), ("a", "b.c.d"), ("--x y", "*,é"), ("%", "")]:
        assert names.published(names.event(exchange, key)) == (exchange, key)


def test_what_cannot_be_said_is_refused(connection: Any) -> None:
    with connection as conn, conn.channel() as channel:
        with pytest.raises(ChannelError, match="headers"):
            channel.exchange_declare("h", "headers")
        channel.exchange_declare("t", "topic")
        channel.queue_declare("q")
        with pytest.raises(ChannelError, match="last word"):
            channel.queue_bind("q", "t", "#.x")
        with pytest.raises(ChannelError, match="x-queue-type"):
            channel.queue_declare("q", arguments={"x-queue-type": "quorum"})
        with pytest.raises(mqks.RequestFailed, match="there is no queue"):
            channel.queue_declare("missing", passive=True)
    with pytest.raises(mqks.ConfigurationError, match="virtual hosts"):
        kombu.Connection(f"{connection.as_uri().rstrip('/')}/staging").connect()


def test_a_message_tells_its_priority(connection: Any) -> None:
    with connection as conn, conn.channel() as channel:
        channel.queue_declare("q")
        for priority in (None, 3):
            channel.basic_publish(channel.prepare_message("x", priority), "", "q")
        got = [channel.basic_get("q", no_ack=True) for _ in range(2)]
        assert [each.delivery_info["priority"] for each in got] == [3, 0]
        assert [each.properties["priority"] for each in got] == [3, 0]


def test_zero_words_match_a_hash(connection: Any) -> None:
    with connection as conn, conn.channel() as channel:
        channel.exchange_declare("t", "topic")
        channel.queue_declare("q")
        channel.queue_bind("q", "t", "a.#")
        for key in ("a", "a.b", "a.b.c", "b"):
            channel.basic_publish(channel.prepare_message("x"), "t", key)
        assert channel.queue_declare("q", passive=True).message_count == 3
        keys = [channel.basic_get("q", no_ack=True).delivery_info["routing_key"] for _ in range(3)]
        assert keys == ["a", "a.b", "a.b.c"]
        channel.queue_unbind("q", "t", "a.#")
        channel.basic_publish(channel.prepare_message("x"), "t", "a")
        assert channel.basic_get("q") is None


def test_bytes_arrive_as_they_are(connection: Any) -> None:
    body = bytes(range(256)) * 3
    with connection as conn, conn.channel() as channel:
        channel.queue_declare("q")
        message = channel.prepare_message(
            body, content_type="application/data", content_encoding="binary", headers={"k": "a\nb"}
        )
        channel.basic_publish(message, "", "q")
        got = channel.basic_get("q")
        assert (got.body, got.headers, got.content_encoding) == (body, {"k": "a\nb"}, "binary")
        got.ack()


@pytest.mark.parametrize("data", [{"n": 1}, [{"n": 1}], 5, "a"])
def test_json_of_another_program_is_a_message(mqks_broker: Broker, data: Any) -> None:
    with kombu.Connection(mqks_broker.url) as conn, blocking.connect(mqks_broker.url) as client:
        queue = kombu.Queue("q")(conn.channel())
        queue.declare()
        client.publish(".q", json.dumps(data), confirm=True)
        assert queue.get(no_ack=True).payload == data


@pytest.mark.parametrize(
    "first",
    [
        b'{"content-type":"","content-encoding":"","headers":5,"properties":{}}',
        b'{"content-type":"","content-encoding":"","headers":{},"properties":[1]}',
        b'{"__type__":"bytes","__value__":5}',
        b'{"__type__":"decimal","__value__":"q"}',
        b"[" * 100_000,
    ],
)
def test_what_others_publish_ends_no_consumer(
    connection: Any, mqks_broker: Broker, first: bytes
) -> None:
    got = list[Any]()
    queue = kombu.Queue("q", kombu.Exchange("x"), routing_key="k")
    with connection, connection.Consumer([queue], on_message=got.append):
        with blocking.connect(mqks_broker.url) as client:
            client.publish("x.k", first + b"\nbody", confirm=True)
        connection.drain_events(timeout=WAIT_S)
    assert got[0].body == first + b"\nbody"


def test_a_cancelled_consumer_holds_what_it_has(connection: Any) -> None:
    """And gets no more: a worker that shuts down finishes what it has begun, once."""
    got: list[Any] = []
    with connection as conn, conn.channel() as channel:
        channel.queue_declare("q")
        channel.basic_qos(prefetch_count=2)
        channel.basic_consume("q", False, "t", got.append)
        for number in range(4):
            channel.basic_publish(channel.prepare_message(str(number)), "", "q")
        while len(got) < 2:
            conn.drain_events(timeout=WAIT_S)
        channel.basic_cancel("t")
        other = channel.basic_get("q", no_ack=True)
        assert other.body == b"2"
        for message in got:
            message.ack()
        last = channel.basic_get("q", no_ack=True)
        assert (len(got), last.body) == (2, b"3")
        assert channel.basic_get("q") is None


def test_publishes_in_a_pipeline_are_confirmed_together(mqks_broker: Broker) -> None:
    from mqks.celery.link import PIPELINED_MAX
    from mqks.celery.transport import pipelined

    count = PIPELINED_MAX + 10
    with kombu.Connection(mqks_broker.url) as conn, blocking.connect(mqks_broker.url) as client:
        producer = conn.Producer()
        producer.channel.queue_declare("q")
        with pipelined(producer):
            for number in range(count):
                producer.publish({"n": number}, routing_key="q")
        assert client.stats("queue", "q")["ready"] == count
        client.set_queue("q", messages_max=count)

        def publish_three(*, shut: bool = False) -> None:
            with pipelined(producer):
                for number in range(3):
                    producer.publish({"n": number}, routing_key="q")
                if shut:
                    producer.channel._link._socket.shutdown(socket.SHUT_RDWR)

        with pytest.raises(mqks.RequestFailed, match="messages_max"):
            publish_three()
        client.purge("q")
        publish_three()
        assert client.stats("queue", "q")["ready"] == 3
        with pytest.raises(mqks.ConnectionLost):
            publish_three(shut=True)


def test_a_unique_message_by_a_header(connection: Any) -> None:
    with connection as conn, conn.channel() as channel:
        channel.queue_declare("q")
        producer = conn.Producer(channel=channel)
        for number, header in enumerate(["k", "k", "k,on=replace,for=60", "other"]):
            producer.publish({"n": number}, routing_key="q", headers={"unique": header})
        found = [channel.basic_get("q", no_ack=True) for _ in range(3)]
        assert [each and json.loads(each.body)["n"] for each in found] == [2, 3, None]
        for wrong in ("k,until=acked", "k,for=ever", "k,never"):
            with pytest.raises(mqks.InvalidRequest):
                producer.publish({}, routing_key="q", headers={"unique": wrong})


def test_events_are_not_waited_for(connection: Any) -> None:
    with connection as conn, conn.channel() as channel:
        exchange = kombu.Exchange("ev", "topic", delivery_mode=1)
        queue = kombu.Queue("q", exchange, "#")(channel)
        queue.declare()
        answers = channel._link._in_flight
        producer = conn.Producer(channel=channel, exchange=exchange)
        producer.publish({"n": 1}, routing_key="a")
        assert not answers
        assert queue.get(no_ack=True).payload == {"n": 1}
