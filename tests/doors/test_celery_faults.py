"""What becomes of Celery's messages when connections are lost, answers are late, processes fork and
signals interrupt: each message is stored once, or its publisher gets an exception."""

import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mqks.celery
from mqks import blocking
from mqks.testing import Broker
from tests.client.programs import ended
from tests.kit.proxy import Proxy
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

kombu = pytest.importorskip("kombu")
celery = pytest.importorskip("celery")
from mqks.celery.link import PIPELINED_MAX  # noqa: E402
from mqks.celery.transport import pipelined  # noqa: E402

# What Celery and kombu leave open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def proxy(mqks_broker: Broker) -> Iterator[Proxy]:
    with Proxy(mqks_broker.port) as proxy:
        yield proxy


@pytest.fixture
def connection(mqks_broker: Broker) -> Iterator[Any]:
    with kombu.Connection(mqks_broker.url) as connection:
        yield connection


def declared(connection: Any) -> Any:
    """A producer of it, whose messages go to the queue `q`."""
    producer = connection.Producer(routing_key="q")
    producer.channel.queue_declare("q")
    return producer


def bodies(url: str) -> list[str]:
    """Of what is stored, in its order. No two have one id."""
    found = list[mqks.PeekedMessage]()
    with blocking.connect(url) as client:
        while page := client.peek("q", after=found[-1].seq if found else 0, limit=1000):
            found += page
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


# -- confirms that are lost


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


# -- many at once


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


def test_a_pipeline_over_a_kill(tmp_path: Path) -> None:
    """Tasks, with the defaults of Celery."""
    count = PIPELINED_MAX + 10
    with ServerProcess(tmp_path / "db") as server:
        app = celery.Celery(broker=server.url)

        @app.task  # type: ignore[untyped-decorator]
        def task(number: int) -> None:
            pass

        def restart(*_: Any) -> None:
            server.kill()
            server.start()

        policy = {"errback": restart, "max_retries": 3}
        with app.producer_pool.acquire(block=True) as producer, pipelined(producer):
            for number in range(count):
                task.apply_async((number,), producer=producer, retry_policy=policy)
                if number == 0:  # That has declared the queue.
                    noticed(producer)
                    server.suspend()
        app.close()
        with blocking.connect(server.url) as client:
            assert client.stats("queue", "celery")["ready"] == count


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


# -- interrupts


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


# -- silence


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


# -- forks

BEGIN = """
import multiprocessing, os, sys
import celery, kombu, mqks, mqks.celery
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
TASKS = """
app = celery.Celery(broker=url, set_as_current=False)

@app.task(name="t")
def task(text):
    pass

def work(who):
    for n in range(20):
        task.apply_async((f"{who} {n}",), queue="q")

task.apply_async(("first",), queue="q")
"""
BY_FORK = """
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
BY_MULTIPROCESSING = """
fork = multiprocessing.get_context("fork")
children = [fork.Process(target=work, args=(who,)) for who in range(4)]
for child in children:
    child.start()
work("parent")
for child in children:
    child.join()
    assert child.exitcode == 0
work("later")
"""
PRODUCER = """
connection = kombu.Connection(url)
producer = declared(connection)

def work(who):
    for n in range(20):
        producer.publish(f"{who} {n}")

producer.publish("first")
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


def run(program: str, path: Path, url: str) -> str:
    done = ended(path, url, BEGIN + program, "-W", "ignore")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def texts(url: str) -> Counter[str]:
    """The one text in each."""
    return Counter(re.findall(r"[a-z0-9 ]+", each)[0] for each in bodies(url))


@pytest.mark.parametrize("begin", [TASKS, PRODUCER])
@pytest.mark.parametrize("fork", [BY_FORK, BY_MULTIPROCESSING])
def test_each_process_has_its_own_connection(
    tmp_path: Path, mqks_broker: Broker, begin: str, fork: str
) -> None:
    run(begin + fork, tmp_path, mqks_broker.url)
    expected = {f"{who} {n}" for who in (*range(4), "parent", "later") for n in range(20)}
    assert texts(mqks_broker.url) == dict.fromkeys(expected | {"first"}, 1)


def test_a_fork_within_a_pipeline(tmp_path: Path, mqks_broker: Broker) -> None:
    run(IN_A_PIPELINE, tmp_path, mqks_broker.url)
    expected = {"first", "second", *(f"child {n}" for n in range(20))}
    assert texts(mqks_broker.url) == dict.fromkeys(expected, 1)


def test_consumers_are_those_of_the_parent(tmp_path: Path, mqks_broker: Broker) -> None:
    assert run(CONSUMER, tmp_path, mqks_broker.url) == "lost\nlost\n"
    with blocking.connect(mqks_broker.url) as client:
        stats = client.stats("queue", "q")
    # What the child acked was not its own.
    assert (stats["ready"], stats["unacked"]) == (1, 0)
