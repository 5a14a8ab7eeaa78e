"""The blocking client with many threads, with a socket that takes no more, and with exceptions of
signal handlers.

The one rule: tests wait for what a peer has got or for what the connection shows, never for a
duration.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from mqks import BlockingClient, ConnectionLost, Options, ReplyTimeout, Stopped, blocking
from mqks.client.wire import Wire
from mqks.testing import Broker
from tests.kit.proxy import Peer, Proxy
from tests.kit.waiting import WAIT_S, until

QUICK = Options(timeout_s=WAIT_S, connect_timeout_s=WAIT_S, reconnect_min_s=0.01)


class Held:
    """A peer that holds its replies back until it is told which to send."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._loop, self._writer = asyncio.get_running_loop(), writer
        while line := await reader.readline():
            request_id, _, *rest = line.rstrip(b"\n").split(b" ", 2)
            if rest == [b"hello"]:
                writer.write(request_id + b" ok \n")
            elif rest == [b"closing"]:
                writer.write(request_id + b" ok closing\n")
            else:
                self.asked.append(request_id)

    def reply(self, *numbers: int) -> None:
        """Answer these requests, in one piece."""
        lines = [b"%b ok %d\n" % (self.asked[number], number) for number in numbers]
        assert self._loop is not None
        assert self._writer is not None
        self._loop.call_soon_threadsafe(self._writer.write, b"".join(lines))


@pytest.fixture
def held() -> Iterator[tuple[Held, BlockingClient]]:
    held = Held()
    with Peer(held.serve) as peer, blocking.connect(peer.url, QUICK) as client:
        yield held, client


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as threads:
        yield threads


def waits(thing: Any) -> Callable[[], bool]:
    """Whether a client waits for a reply, or a consumer for a message."""
    if isinstance(thing, BlockingClient):
        return lambda: bool(thing._session._in_flight)
    return lambda: bool(thing._connection._waiting)


def ask(threads: ThreadPoolExecutor, held: Held, client: BlockingClient) -> Future[str]:
    """A ping that has arrived and is not answered."""
    count = len(held.asked)
    answer = threads.submit(client.ping, "x")
    until(lambda: len(held.asked) > count)
    return answer


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("at_once", [True, False])
def test_two_calls_at_once(
    held: tuple[Held, BlockingClient],
    threads: ThreadPoolExecutor,
    order: tuple[int, int],
    at_once: bool,
) -> None:
    peer, client = held
    answers = ask(threads, peer, client), ask(threads, peer, client)
    if at_once:
        peer.reply(*order)
    else:
        for number in order:
            peer.reply(number)
            assert answers[number].result(WAIT_S) == str(number)
    assert [answer.result(WAIT_S) for answer in answers] == ["0", "1"]


def test_a_call_times_out_while_another_waits(
    held: tuple[Held, BlockingClient], threads: ThreadPoolExecutor
) -> None:
    peer, client = held
    with pytest.raises(ReplyTimeout):
        client.ping("x", timeout_s=0.05)
    until(lambda: len(peer.asked) == 1)
    second = ask(threads, peer, client)
    with pytest.raises(ReplyTimeout):
        client.ping("x", timeout_s=0.05)
    until(lambda: len(peer.asked) == 3)
    peer.reply(0, 2, 1)
    assert second.result(WAIT_S) == "1"


def test_a_call_fails_when_the_client_is_closed_meanwhile(
    held: tuple[Held, BlockingClient], threads: ThreadPoolExecutor
) -> None:
    peer, client = held
    answer = ask(threads, peer, client)
    client.close()
    with pytest.raises(ConnectionLost):
        answer.result(WAIT_S)


@contextmanager
def refusing() -> Iterator[tuple[str, Callable[[], None]]]:
    """A peer that answers one greeting; a call makes it send why it closes, and reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def serve() -> None:
            sock, _ = listener.accept()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.append(sock)
            with suppress(OSError):
                sock.send(sock.recv(4096).split(b" ")[0] + b" ok \n")

        def refuse() -> None:
            accepted[0].send(b"- error 00ff the journal is away\n")
            accepted[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"mqks://127.0.0.1:{listener.getsockname()[1]}", refuse
        thread.join()


def test_the_reason_is_read_when_a_write_fails() -> None:
    why = "refused by the server: the journal is away (error 00ff)"
    with refusing() as (url, refuse), blocking.connect(url, QUICK) as client:
        connection = client._connection
        with connection.lock:
            refuse()
            client._session._put(b"p ping x\n", is_prompt=True)
            assert connection._problem
        until(lambda: why in client._session.reason)
    with refusing() as (url, refuse), Wire(url, QUICK) as wire:
        assert wire.ask(b"ping x") == b""
        refuse()
        with pytest.raises(ConnectionLost, match=re.escape(why)):
            wire.ask(b"ping x")


def test_more_than_the_socket_takes(threads: ThreadPoolExecutor) -> None:
    may_read = threading.Event()
    got: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if b" publish " in line:
                got.append(len(line))
            elif line.endswith(b"hello\n"):
                writer.write(line.split(b" ")[0] + b" ok \n")
                await writer.drain()
                await asyncio.get_running_loop().run_in_executor(None, may_read.wait, WAIT_S)
                continue
            writer.write(line.split(b" ")[0] + b" ok \n")

    size = 32 * 1024 * 1024
    peer = Peer(serve)
    peer._listen = lambda: listen(peer)  # type: ignore[method-assign]

    async def listen(peer: Peer) -> None:
        peer._server = await asyncio.start_server(peer._accept, "127.0.0.1", 0, limit=2 * size)
        peer.port = peer._server.sockets[0].getsockname()[1]

    options = Options(timeout_s=WAIT_S, line_bytes_max=2 * size, in_flight_bytes_max=4 * size)
    with peer, blocking.connect(peer.url, options) as client:
        published = threads.submit(client.publish, "e", "x" * size, confirm=True, id="big")
        until(lambda: bool(client._connection._out))
        answers = [threads.submit(client.ping, str(n)) for n in range(5)]
        may_read.set()
        assert published.result(WAIT_S) == "big"
        assert [answer.result(WAIT_S) for answer in answers] == [""] * 5
    assert got == [size + len(b"big publish --confirm e \n")]


@contextmanager
def secured(broker: Broker) -> Iterator[tuple[str, Options]]:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with Proxy(broker.port, server) as proxy:
        yield f"mqkss://127.0.0.1:{proxy.port}", Options(ssl_context=trusting)


@contextmanager
def plain(broker: Broker) -> Iterator[tuple[str, Options]]:
    yield broker.url, Options()


@pytest.mark.parametrize("way", [plain, secured])
@pytest.mark.parametrize("count", [2, 16])
def test_many_threads_get_their_own_answers(
    mqks_broker: Broker, threads: ThreadPoolExecutor, way: Any, count: int
) -> None:
    each = 60

    with way(mqks_broker) as (url, options), blocking.connect(url, options) as client:
        client.subscribe("q", ["e"])

        def call(thread: int) -> None:
            chance = random.Random(thread)
            for n in range(each):
                text = f"{thread}.{n}"
                match chance.randrange(4):
                    case 0:
                        client.publish("e", text, confirm=True)
                    case 1:
                        client.publish("e", text)
                    case 2:
                        assert client.publish_many([("e", text)]) == 1
                    case _:
                        assert client.ping(text) == text
                        client.publish("e", text, confirm=True)

        for done in [threads.submit(call, thread) for thread in range(count)]:
            done.result(WAIT_S)
        client.ping()
        got: list[str] = []
        with client.consume("q") as consumer:
            while len(got) < count * each:
                message = consumer.receive(WAIT_S)
                got.append(message.text)
                message.ack()
        assert sorted(got) == sorted(f"{t}.{n}" for t in range(count) for n in range(each))
        assert client.purge("q") == 0


def test_stop_ends_all_receives(mqks_broker: Broker, threads: ThreadPoolExecutor) -> None:
    with (
        blocking.connect(mqks_broker.url) as client,
        client.consume("q", ["e"], auto_ack=True) as consumer,
    ):
        messages = [threads.submit(consumer.receive) for _ in range(4)]
        until(lambda: len(consumer._connection._waiting) == 4)
        consumer.stop()
        for message in messages:
            with pytest.raises(Stopped, match="stopped"):
                message.result(WAIT_S)


class Interrupted(Exception):
    pass


@contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    """SIGUSR1 calls it in the main thread."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    raise Interrupted


def is_free(client: BlockingClient) -> bool:
    """Whether no other thread holds the lock of the connection: a caller only waits."""
    lock = client._connection.lock
    if is_free := lock.acquire(blocking=False):
        lock.release()
    return is_free


def when(condition: Callable[[], bool]) -> threading.Thread:
    """Signal the main thread when it is so."""

    def signal_main() -> None:
        until(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=signal_main)
    thread.start()
    return thread


def test_an_interrupted_call_leaves_the_client_in_order(
    held: tuple[Held, BlockingClient], threads: ThreadPoolExecutor
) -> None:
    peer, client = held
    with handled(interrupt):
        thread = when(lambda: len(peer.asked) == 1 and is_free(client))
        with pytest.raises(Interrupted):
            client.ping("x")
        thread.join()
    second = ask(threads, peer, client)
    peer.reply(0, 1)
    assert second.result(WAIT_S) == "1"


def test_a_signal_handler_may_stop_a_consumer(mqks_broker: Broker) -> None:
    with (
        blocking.connect(mqks_broker.url) as client,
        client.consume("q", ["e"], auto_ack=True) as consumer,
        handled(consumer.stop),
    ):
        thread = when(waits(consumer))
        assert list(consumer) == []
        thread.join()


def test_a_signal_handler_may_call_the_client(held: tuple[Held, BlockingClient]) -> None:
    peer, client = held
    answers: list[str] = []

    def answer() -> None:
        until(lambda: len(peer.asked) == 2)
        peer.reply(1, 0)

    def handler() -> None:
        answering = threading.Thread(target=answer)
        answering.start()
        answers.append(client.ping("x"))
        answering.join()

    with handled(handler):
        thread = when(lambda: len(peer.asked) == 1 and is_free(client))
        assert client.ping("x") == "0"
        thread.join()
    assert answers == ["1"]


class Alarms:
    """Interrupt what is done again and again, at any step of it."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._is_armed = False
        self.count = 0

    def _interrupt(self) -> None:
        if self._is_armed:
            raise Interrupted

    def during(self, work: Callable[[], object]) -> None:
        with suppress(Interrupted):
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, 400e-6))
            while True:
                work()
        self._is_armed = False
        self.count += 1


@pytest.fixture
def alarms(request: pytest.FixtureRequest) -> Iterator[Alarms]:
    alarms = Alarms(getattr(request, "param", 1))
    before = signal.signal(signal.SIGALRM, lambda number, frame: alarms._interrupt())
    yield alarms
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("alarms", range(3), indirect=True)
def test_interrupts_at_any_step(mqks_broker: Broker, alarms: Alarms) -> None:
    confirmed: list[str] = []
    with blocking.connect(mqks_broker.url, QUICK) as client:
        client.subscribe("q", ["e"])

        def work() -> None:
            assert client.ping("x") == "x"
            confirmed.append(client.publish("e", "x", confirm=True))

        for n in range(400):
            alarms.during(work)
            assert client.ping(f"{n}", timeout_s=WAIT_S) == f"{n}"
        messages = client.peek("q", limit=100_000)
        assert set(confirmed) <= {message.id for message in messages}
    assert alarms.count == 400


@pytest.mark.slow
def test_interrupts_of_a_consumer_lose_nothing(mqks_broker: Broker, alarms: Alarms) -> None:
    count, got = 3_000, set[str]()
    with blocking.connect(mqks_broker.url, QUICK) as client:
        client.subscribe("q", ["e"])
        client.publish_many([("e", n) for n in range(count)])
        with client.consume("q", prefetch=0) as consumer:

            def take() -> None:
                message = consumer.receive(WAIT_S)
                got.add(message.text)
                message.ack()

            for _ in range(300):
                alarms.during(take)
                client.publish("e", "one more", confirm=True)
        # What an exception took away between the queue and the program was not acked.
        client.publish("e", "end", confirm=True)
        with client.consume("q") as consumer:
            for message in consumer:
                got.add(message.text)
                message.ack()
                if message.text == "end":
                    break
    assert got == {*map(str, range(count)), "one more", "end"}


def test_updates_do_not_lengthen_the_time_for_a_message(tmp_path: Path) -> None:
    updates, many = 0, 1000
    ended = threading.Event()
    with Broker(tmp_path / "q.db") as broker, blocking.connect(broker.url) as client:

        def rebind() -> None:
            nonlocal updates
            while updates < many and not ended.wait(0.02):
                client.rebind("q", add=[f"e{updates}"])
                updates += 1

        thread = threading.Thread(target=rebind)
        with client.consume("q", events=["e"], create=True) as consumer:
            thread.start()
            with pytest.raises(TimeoutError):
                consumer.receive(timeout_s=0.3)
            ended.set()
            thread.join()
    assert 0 < updates < many
