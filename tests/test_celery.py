"""Celery and kombu on a real server: kombu's own tests of a transport, unmodified, and workers."""

import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqks.celery
from mqks.celery import names
from mqks.testing import Broker
from tests.server_process import ServerProcess
from tests.waiting import WAIT_S, until

kombu = pytest.importorskip("kombu")
from kombu.exceptions import ChannelError  # noqa: E402

# What kombu's own tests leave open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SDISTS = Path(sys.prefix) / "sdists"
"""Where `make` puts the sources of kombu, whose tests no wheel has."""


def _mixins() -> Any:
    found = sorted(SDISTS.glob("kombu-*.tar.gz"))
    if not found:
        return None
    target = SDISTS / "common.py"
    with tarfile.open(found[-1]) as sources:
        (member,) = (each for each in sources if each.name.endswith("t/integration/common.py"))
        file = sources.extractfile(member)
        assert file is not None
        target.write_bytes(file.read())
    spec = importlib.util.spec_from_file_location("kombu_common", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
        pytest.skip(f"the sources of kombu are not in {SDISTS}: `make` gets them")

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

    class TestEventLoop(MIXINS.BaseEventLoop):  # type: ignore[name-defined,misc]
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


class Workers:
    """Starts workers, and kills those that still run at the end."""

    def __init__(self, url: str, tmp_path: Path) -> None:
        self.environment = os.environ | {"BROKER": url, "RESULTS": f"file://{tmp_path}/results"}
        (tmp_path / "results").mkdir()
        self.log = tmp_path / "worker.log"
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "celery", "-A", "tests.celery_tasks", "worker"]
        command += ["-l", "INFO", *(flags or ("-c", "2"))]
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.all.append(worker)
        return worker

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """And its children: they are of its own group."""
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    @property
    def is_ready(self) -> bool:
        return b" ready." in self.log.read_bytes()


@pytest.fixture
def workers(mqks_broker: Broker, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(mqks_broker.url, tmp_path)
    yield started
    for worker in started.all:
        if worker.poll() is None:
            started.kill(worker)


@pytest.fixture
def tasks(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("BROKER", "RESULTS"):
        monkeypatch.setenv(name, workers.environment[name])
    monkeypatch.delitem(sys.modules, "tests.celery_tasks", raising=False)
    return importlib.import_module("tests.celery_tasks")


@pytest.mark.slow
def test_a_worker(workers: Workers, tasks: Any, tmp_path: Path) -> None:
    from celery import chord

    worker = workers.start()
    until(lambda: workers.is_ready)
    assert tasks.add.delay(1, 2).get(timeout=WAIT_S) == 3
    assert tasks.add.apply_async((3, 4), countdown=1).get(timeout=WAIT_S) == 7
    assert chord([tasks.add.s(i, i) for i in range(5)])(tasks.total.s()).get(timeout=WAIT_S) == 20
    (answer,) = tasks.app.control.ping(timeout=10, limit=1)
    assert [*answer.values()] == [{"ok": "pong"}]
    assert tasks.app.control.inspect(timeout=10, limit=1).active_queues()
    for _ in range(20):  # The replies of all have one queue.
        assert tasks.app.control.inspect(timeout=10, limit=1).stats()
    events: list[str] = []

    def seen_event(event: dict[str, Any]) -> None:
        events.append(event["type"])
        if event["type"] == "task-succeeded":
            receiver.should_stop = True

    with tasks.app.connection() as connection:
        receiver = tasks.app.events.Receiver(connection, handlers={"*": seen_event})
        tasks.app.control.enable_events()
        tasks.add.apply_async((1, 1), countdown=2)
        receiver.capture(limit=None, timeout=WAIT_S, wakeup=False)
    assert "task-succeeded" in events

    # Warm shutdown: what runs ends, what waits stays.
    path = str(tmp_path / "slept")
    tasks.sleep.delay(2, path)
    until(lambda: Path(path).exists())
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(WAIT_S) == 0
    assert Path(path).read_text() == "begun\ndone\n"
    assert tasks.app.control.purge() == 0


def test_threads(workers: Workers, tasks: Any, tmp_path: Path) -> None:
    workers.start("-P", "threads", "-c", "4", "--without-mingle", "--without-gossip")
    path = tmp_path / "effects"
    for number in range(50):
        tasks.note.delay(str(path), str(number))
    until(lambda: path.exists() and len(path.read_text().split()) == 50)


def _effects(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


@pytest.mark.slow
@pytest.mark.parametrize("count", [10_000])
def test_no_task_is_lost(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While workers and the server are killed."""
    path = tmp_path / "effects"
    with ServerProcess(tmp_path / "db") as server:
        workers = Workers(server.url, tmp_path)
        monkeypatch.setenv("BROKER", server.url)
        monkeypatch.delitem(sys.modules, "tests.celery_tasks", raising=False)
        tasks = importlib.import_module("tests.celery_tasks")
        worker = workers.start()
        try:

            def seen(number: int) -> Callable[[], bool]:
                return lambda: len(_effects(path)) >= number

            policy = {"max_retries": 100, "interval_start": 0.1, "interval_max": 1}
            for number in range(count):
                tasks.note.apply_async((str(path), str(number)), retry_policy=policy)
                if number in (count // 4, count // 2):
                    until(seen(number // 4))
                    workers.kill(worker)
                    worker = workers.start()
                if number in (count // 3, count * 2 // 3):
                    server.kill()
                    server.start()
            workers.kill(worker)
            workers.start()
            until(seen(count))
        finally:
            for each in workers.all:
                if each.poll() is None:
                    workers.kill(each)
    effects = _effects(path)
    assert {*effects} == {*map(str, range(count))}
    with capsys.disabled():
        print(f"\n{count} tasks, {sum(effects.values()) - count} ran again")
