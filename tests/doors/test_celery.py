"""Celery and kombu on a real server: kombu's own tests of a transport, unmodified; what they do not
ask; and what becomes of messages when connections are lost, answers are late, processes fork and
signals interrupt. Each message is stored once, or its publisher gets an exception."""

import json
import re
import signal
import socket
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mqks.celery
from mqks import blocking
from mqks.celery import names
from mqks.testing import Broker
from tests.client.programs import ended
from tests.kit.proxy import Proxy
from tests.kit.waiting import WAIT_S, until
from tools.sdists import DIRECTORY

kombu = pytest.importorskip("kombu")
celery = pytest.importorskip("celery")
from kombu.exceptions import ChannelError  # noqa: E402

from mqks.celery.link import PIPELINED_MAX  # noqa: E402
from mqks.celery.transport import pipelined  # noqa: E402

# What Celery and kombu's own tests leave open.
pytestmark = [
    pytest.mark.usefixtures("collected"),
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


@pytest.fixture(autouse=True)
def _tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after two seconds."""
    connects = kombu.Connection._ensure_connection
    defaults = tuple(0.01 if value == 2 else value for value in connects.__defaults__)
    monkeypatch.setattr(connects, "__defaults__", defaults)


@pytest.fixture
def connection(mqks_broker: Broker) -> Iterator[Any]:
    with kombu.Connection(mqks_broker.url) as connection:
        yield connection


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
    # All of them: none is left out. Kombu has those of event loops from 5.6 on.
    TestBasic = MIXINS.BasicFunctionality
    TestExchanges = MIXINS.BaseExchangeTypes
    TestMessages = MIXINS.BaseMessage
    TestPriority = MIXINS.BasePriority
    TestEventLoop = getattr(MIXINS, "BaseEventLoop", object)
    TestFailover = MIXINS.BaseFailover
    TestTimeToLive = pytest.mark.slow(MIXINS.BaseTimeToLive)


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


def declared(connection: Any) -> Any:
    """A producer of it, whose messages go to the queue `q`."""
    producer = connection.Producer(routing_key="q")
    producer.channel.queue_declare("q")
    return producer


def bodies(url: str) -> list[str]:
    """Of what is stored, in its order. No two have one id."""
    with blocking.connect(url) as client:
        found = client.peek("q", limit=10**6)
    assert len({each.id for each in found}) == len(found)
    return [each.data.partition(b"\n")[2].decode() for each in found]


def numbers(url: str) -> list[int]:
    return [*map(int, bodies(url))]


def noticed(producer: Any) -> None:
    """If its connection falls silent, that is noticed soon. The next one has time, so that only
    what is silent is lost, on however busy a machine."""
    link = producer.channel._link
    link._options = replace(link._options, timeout_s=0.5)


def again(back: Callable[[], object]) -> dict[str, Any]:
    """How a producer tries again: after the first loss all is well."""
    return {"retry": True, "retry_policy": {"errback": lambda *_: back(), "max_retries": 3}}


def test_what_is_published_again_is_stored_once(mqks_broker: Broker, proxy: Proxy) -> None:
    with kombu.Connection(proxy.url) as connection:
        producer = declared(connection)
        for number in range(3):
            noticed(producer)
            proxy.is_mute = True
            producer.publish(number, **again(lambda: setattr(proxy, "is_mute", False)))
        message = producer.channel.prepare_message("3", properties={"delivery_mode": 2})
        for _ in range(2):
            producer.channel.basic_publish(message, "", "q")
    assert proxy.accepted == 4
    assert numbers(mqks_broker.url) == [0, 1, 2, 3, 3]


def test_tasks_of_one_id_are_as_many_as_were_sent(mqks_broker: Broker, proxy: Proxy) -> None:
    """A task that retries keeps its id."""
    app = celery.Celery(broker=proxy.url)
    policy = {"errback": lambda *_: setattr(proxy, "is_mute", False), "max_retries": 3}
    with app.connection_for_write() as connection:
        declared(connection)
    with app.producer_or_acquire() as producer:
        for retries in range(3):
            noticed(producer)
            proxy.is_mute = True
            sent = {"queue": "q", "task_id": "same", "retry_policy": policy, "retries": retries}
            app.send_task("t", producer=producer, **sent)
    app.close()
    with blocking.connect(mqks_broker.url) as client:
        assert client.stats("queue", "q")["ready"] == 3


def test_a_callback_that_celery_publishes_again_is_one(mqks_broker: Broker, proxy: Proxy) -> None:
    """What a finished task publishes is retried by Celery, not by kombu."""
    app = celery.Celery(broker=proxy.url)
    if not hasattr(app.amqp, "_retry_publish"):
        pytest.skip("this version of Celery has none")
    with app.producer_or_acquire() as producer:
        app.send_task("t", producer=producer, queue="q")  # Which also declares the queue.
        link, revive = producer.channel._link, producer.revive
        noticed(producer)
        proxy.is_mute = True

        def revived(connection: Any) -> None:
            proxy.is_mute = False
            revive(connection)

        producer.revive = revived
        app.amqp._retry_publish(app.send_task, "t", producer=producer, queue="q")
        link.close()  # The log has the exception, and that has the connection.
    app.close()
    assert proxy.accepted == 2
    with blocking.connect(mqks_broker.url) as client:
        assert client.stats("queue", "q")["ready"] == 2


@pytest.mark.parametrize("what", ["is_frozen", "is_mute"])
def test_a_pipeline_outlives_its_connection(mqks_broker: Broker, proxy: Proxy, what: str) -> None:
    """Whether what it had sent was stored or not."""
    with kombu.Connection(proxy.url) as connection:
        producer = declared(connection)
        with pipelined(producer):
            for number in range(PIPELINED_MAX + 10):
                if number == 5:
                    noticed(producer)
                    setattr(proxy, what, True)
                producer.publish(number, **again(lambda: setattr(proxy, what, False)))
    assert proxy.accepted == 2
    assert numbers(mqks_broker.url) == [*range(PIPELINED_MAX + 10)]


def test_a_pipeline_whose_end_is_lost_raises(mqks_broker: Broker, proxy: Proxy) -> None:
    with kombu.Connection(proxy.url) as connection:
        producer = declared(connection)

        def publish() -> None:
            with pipelined(producer):
                noticed(producer)
                proxy.is_frozen = True
                producer.publish(1, retry=True)

        with pytest.raises(mqks.ReplyTimeout):
            publish()


def test_a_refusal_within_a_pipeline_is_not_retried_away(
    connection: Any, mqks_broker: Broker
) -> None:
    producer = declared(connection)
    with blocking.connect(mqks_broker.url) as client:
        client.set_queue("q", messages_max=3)
        policy = {"retry_errors": (mqks.RequestFailed,), "max_retries": 3}

        def publish() -> None:
            with pipelined(producer):
                for number in range(PIPELINED_MAX + 10):
                    if number == PIPELINED_MAX - 1:
                        client.set_queue("q", messages_max=10**6)
                    producer.publish(number, retry=True, retry_policy=policy)

        with pytest.raises(mqks.RequestFailed, match="messages_max"):
            publish()
    producer.publish(-1)
    assert numbers(mqks_broker.url)[-1] == -1


class Interrupted(Exception):
    """As SoftTimeLimitExceeded: it does not come from what it interrupts."""


class Halting:
    """A socket of which a signal interrupts the next call with this name, when half is done."""

    def __init__(self, inner: socket.socket, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _halt(self, name: str) -> None:
        if self._name == name:
            self._name = ""
            signal.raise_signal(signal.SIGUSR1)

    def send(self, data: memoryview) -> int:
        if self._name == "send":
            data = data[: len(data) // 2]
        sent = self._inner.send(data)
        self._halt("send")
        return sent

    def recv(self, count: int) -> bytes:
        data = self._inner.recv(10 if self._name == "recv" else count)
        self._halt("recv")
        return data


@pytest.fixture
def _interrupts() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_interrupts")
def test_a_write_that_is_broken_off_is_the_last(connection: Any, mqks_broker: Broker) -> None:
    """The half of a message that is on its way never becomes one."""
    producer = declared(connection)
    link = producer.channel._link
    link._socket = Halting(link._socket, "send")
    with pytest.raises(Interrupted):
        producer.publish("1" * 5000)
    assert not connection.connected
    with pytest.raises(mqks.ConnectionLost, match="interrupted"):
        producer.publish(1)
    with pytest.raises(mqks.ConnectionLost, match="interrupted"):
        link.beat(1)
    declared(connection).publish(2)
    assert numbers(mqks_broker.url) == [2]


@pytest.mark.usefixtures("_interrupts")
def test_a_read_that_is_broken_off_is_the_last(connection: Any, mqks_broker: Broker) -> None:
    """What was read is lost with it, so its message is delivered again."""
    producer = declared(connection)
    got = list[Any]()
    queue = kombu.Queue("q", no_declare=True)
    consumer = connection.Consumer([queue], on_message=got.append, auto_declare=False)
    consumer.consume()
    link = producer.channel._link
    link._socket = Halting(link._socket, "recv")
    with blocking.connect(mqks_broker.url) as client:
        client.publish(".q", "1", confirm=True)
    with pytest.raises(Interrupted):
        connection.drain_events(timeout=WAIT_S)
    with pytest.raises(mqks.ConnectionLost, match="interrupted"):
        link.drain_events()
    with connection.Consumer([queue], on_message=got.append, auto_declare=False):
        connection.drain_events(timeout=WAIT_S)
    assert [each.body for each in got] == [b"1"]


@pytest.mark.usefixtures("_interrupts")
def test_a_consume_that_is_interrupted_holds_nothing(mqks_broker: Broker, proxy: Proxy) -> None:
    """The connection is in order, and the server has the consumer."""
    with kombu.Connection(proxy.url) as connection:
        declared(connection).publish(1)
        queue = kombu.Queue("q", no_declare=True)
        consumer = connection.Consumer([queue], on_message=print, auto_declare=False)
        proxy.delay_s = 0.5
        before = signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGUSR1))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            consumer.consume()
        signal.signal(signal.SIGALRM, before)
        proxy.delay_s = 0
        with blocking.connect(mqks_broker.url) as client:
            until(lambda: client.stats("queue", "q")["consumers"] == 0)
            assert client.stats("queue", "q")["ready"] == 1
        assert connection.default_channel.queue_declare("q", passive=True).message_count == 1


def test_only_silence_ends_a_connection(proxy: Proxy) -> None:
    """Answers that nobody has read are none, nor is a pause of this process."""
    with kombu.Connection(proxy.url, heartbeat=0.1) as connection:
        connection.connect()
        for _ in range(6):
            connection.heartbeat_check()
            time.sleep(0.3)
        proxy.is_frozen = True

        def beats() -> bool:
            connection.heartbeat_check()
            return False

        with pytest.raises(mqks.ConnectionLost, match=r"nothing was received for 0\.2 s"):
            until(beats)


def test_whose_consumers_are_lost_is_told(connection: Any) -> None:
    """Although kombu has connected again meanwhile."""
    producer = declared(connection)
    queue = kombu.Queue("q", no_declare=True)
    got = list[Any]()
    connection.Consumer([queue], on_message=got.append, auto_declare=False).consume()
    producer.channel._link._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(mqks.ConnectionLost):
        producer.publish(1)
    for _ in range(2):
        with pytest.raises(mqks.ConnectionLost):
            connection.drain_events(timeout=WAIT_S)
    declared(connection).publish(2)
    with connection.Consumer([queue], on_message=got.append, auto_declare=False):
        connection.drain_events(timeout=WAIT_S)
    assert got[0].payload == 2


def test_what_an_earlier_connection_has_delivered_is_not_acked(
    connection: Any, mqks_broker: Broker
) -> None:
    """It has been delivered again, and is somebody else's."""
    producer = declared(connection)
    producer.publish(1)
    queue = kombu.Queue("q", no_declare=True)
    got = list[Any]()
    connection.Consumer([queue], on_message=got.append, auto_declare=False).consume()
    connection.drain_events(timeout=WAIT_S)
    producer.channel._link._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(mqks.ConnectionLost):
        connection.drain_events(timeout=WAIT_S)
    connection.Consumer([queue], on_message=got.append, auto_declare=False).consume()
    connection.drain_events(timeout=WAIT_S)
    assert [each.delivery_info["redelivered"] for each in got] == [False, True]
    with pytest.raises(mqks.ConnectionLost):
        got[0].ack()
    with blocking.connect(mqks_broker.url) as client:
        assert client.stats("queue", "q")["unacked"] == 1
        got[1].ack()
        until(lambda: client.stats("queue", "q")["unacked"] == 0)


BEGIN = """
import os, sys
import kombu, mqks, mqks.celery
from mqks.celery.transport import pipelined

url = os.environ["MQKS_URL"]

def wait_for(children):
    for child in children:
        assert os.waitpid(child, 0)[1] == 0

def declared(connection):
    producer = connection.Producer(routing_key="q")
    producer.channel.queue_declare("q")
    return producer
"""
PRODUCER = """
connection = kombu.Connection(url)
producer = declared(connection)

def work(who):
    for n in range(20):
        producer.publish(f"{who} {n}")

producer.publish("first")
children = []
for who in range(4):
    if (child := os.fork()) == 0:
        work(who)
        os._exit(0)
    children.append(child)
work("parent")
wait_for(children)
work("later")
"""
IN_A_PIPELINE = """
connection = kombu.Connection(url)
producer = declared(connection)
with pipelined(producer):
    producer.publish("first")
    if (child := os.fork()) == 0:
        for n in range(20):
            producer.publish(f"child {n}")
        sys.exit()  # Through the parent's block.
    producer.publish("second")
    wait_for([child])
"""
CONSUMER = """
connection = kombu.Connection(url)
producer = declared(connection)
got = []
queue = kombu.Queue("q", no_declare=True)
with connection.Consumer([queue], on_message=got.append, auto_declare=False):
    for n in range(3):
        producer.publish(n)
    while len(got) < 3:
        connection.drain_events(timeout=60)
    if (child := os.fork()) == 0:
        got[0].ack()
        producer.publish("of the child")
        for _ in range(2):
            try:
                connection.drain_events()
            except mqks.ConnectionLost as error:
                assert "start another one" in str(error), error
                print("lost", flush=True)
        os._exit(0)
    wait_for([child])
    while len(got) < 4:
        connection.drain_events(timeout=60)
    for message in got[1:]:
        message.ack()
"""


def printed(program: str, path: Path, url: str) -> str:
    done = ended(path, url, BEGIN + program, "-W", "ignore")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def texts(url: str) -> Counter[str]:
    """The one text in each."""
    return Counter(re.findall(r"[a-z0-9 ]+", each)[0] for each in bodies(url))


def test_each_process_has_its_own_connection(tmp_path: Path, mqks_broker: Broker) -> None:
    printed(PRODUCER, tmp_path, mqks_broker.url)
    expected = {f"{who} {n}" for who in (*range(4), "parent", "later") for n in range(20)}
    assert texts(mqks_broker.url) == dict.fromkeys(expected | {"first"}, 1)


def test_a_fork_within_a_pipeline(tmp_path: Path, mqks_broker: Broker) -> None:
    printed(IN_A_PIPELINE, tmp_path, mqks_broker.url)
    expected = {"first", "second", *(f"child {n}" for n in range(20))}
    assert texts(mqks_broker.url) == dict.fromkeys(expected, 1)


def test_consumers_are_those_of_the_parent(tmp_path: Path, mqks_broker: Broker) -> None:
    assert printed(CONSUMER, tmp_path, mqks_broker.url) == "lost\nlost\n"
    with blocking.connect(mqks_broker.url) as client:
        stats = client.stats("queue", "q")
    # What the child acked was not its own.
    assert (stats["ready"], stats["unacked"]) == (1, 0)
