"""`python -m benchmarks.takeovers`: how long nothing is confirmed when a server ends.

A client that knows all servers publishes with one confirm in flight. Then one thing happens:

- kill: SIGKILL of the active broker, or of the node that leads the quorum queue
- stop: SIGTERM of the same
- switch: the primary database is stopped, its standby promoted, and the old primary follows it

`silent_s` is the longest time between two confirms. `loaded_s` is the time from the claim of the
journal until the next broker listens, and `peak_mb` the most memory that it has used. With
`--waiting`, so many other messages wait in a queue meanwhile. `mqks` has one broker and a file:
it is started again by the program that has ended it.

The one rule: what was confirmed is there at the end, and so is every waiting message.
"""

import argparse
import json
import re
import signal
import socket
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import ClassVar, Self

import mqks
from benchmarks import flow
from benchmarks.clusters import RabbitmqNodes
from benchmarks.load import clock
from benchmarks.messages import Messages
from benchmarks.servers import SERVERS
from benchmarks.servers.rabbitmq import (
    BASIC_ACK,
    BODY,
    CONFIRM_SELECT,
    CONSUME,
    END,
    HEAD,
    NO_ACK,
    NO_TABLE,
    RabbitmqCluster,
    call,
    receive,
    word,
)
from benchmarks.works.paging import drain_blocks, publish_blocks
from mqks.testing import BrokerProcess
from tests.postgres import Postgres
from tests.waiting import WAIT_S, until

Publish = Callable[[bytes], object]
"""Returns when the message is confirmed, however often it must be sent."""
PROBE = "q1"
LAST = b"the last one"
BEFORE, AFTER = 300, 100
"""Confirms before something happens, and from then on."""
AGAIN_S = 0.05
"""Pause of a client that no server accepts."""
PATIENT = mqks.Options(timeout_s=WAIT_S)


class Place(ABC):
    """Servers that are one to their clients; a context in which they run."""

    faults: ClassVar[tuple[str, ...]] = "kill", "stop"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            self.start(starting)
            self._running = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    @abstractmethod
    def start(self, running: ExitStack) -> None: ...

    @abstractmethod
    @contextmanager
    def client(self) -> Iterator[Publish]: ...

    @abstractmethod
    def happen(self, fault: str) -> None:
        """Returns when nothing more is to be done but by the servers themselves."""

    def figures(self) -> dict[str, float]:
        """Of a server that has taken over."""
        return {}

    @abstractmethod
    def heal(self) -> None:
        """All servers run again."""

    @abstractmethod
    def left(self) -> set[bytes]:
        """All messages but the waiting ones, up to the last one."""


class OneBroker(Place):
    """With a file."""

    active: BrokerProcess

    def start(self, running: ExitStack) -> None:
        self.active = running.enter_context(BrokerProcess(self._directory / "mqks.db"))
        self._urls = [self.active.url]
        self._subscribe()

    def _subscribe(self) -> None:
        with self._connected() as client:
            client.subscribe("q0", ["e"])
            client.subscribe(PROBE, [PROBE])

    def _connected(self) -> mqks.BlockingClient:
        return mqks.connect_blocking(self._urls, PATIENT)

    @contextmanager
    def client(self) -> Iterator[Publish]:
        with self._connected() as client:
            yield lambda payload: client.publish(PROBE, payload, confirm=True)

    def happen(self, fault: str) -> None:
        self._end(fault)
        self.active.start()

    def _end(self, fault: str) -> None:
        if fault == "kill":
            self.active.kill()
        else:
            self.active.stop()

    def heal(self) -> None:
        """It has been started again."""

    def figures(self) -> dict[str, float]:
        status = Path(f"/proc/{self.active.pid}/status").read_text()
        most = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert most
        return {"peak_mb": int(most[1]) / 1024}

    def left(self) -> set[bytes]:
        found = set()
        with self._connected() as client, client.consume(PROBE, auto_ack=True) as consumer:
            client.publish(PROBE, LAST)
            while (message := consumer.receive(WAIT_S)).data != LAST:
                found.add(message.data)
        return found


class TwoBrokers(OneBroker):
    """On one journal, in a database with one synchronous standby."""

    faults = "kill", "stop", "switch"

    def start(self, running: ExitStack) -> None:
        server = partial(Postgres, fsync="on", synchronous_standby_names="standby")
        self._primary = running.enter_context(server())
        self._secondary = running.enter_context(server(primary=self._primary))
        hosts = ",".join(str(Path(each.socket).parent) for each in (self._primary, self._secondary))
        url = self._primary.url(host=hosts)
        ports = [flow.free_port(), flow.free_port()]
        self._urls = [f"mqks://127.0.0.1:{port}" for port in ports]
        self.active, self._standby = (BrokerProcess(url, "--port", str(port)) for port in ports)
        running.enter_context(self.active)
        running.callback(self._end_standby)
        self._subscribe()
        self.heal()

    def _end_standby(self) -> None:
        if self._standby.is_running:
            self._standby.stop()

    def happen(self, fault: str) -> None:
        if fault == "switch":
            self._primary.stop()
            self._secondary.promote()
            self._primary.follow(self._secondary)
            self._primary, self._secondary = self._secondary, self._primary
        else:
            self._end(fault)
            self.active, self._standby = self._standby, self.active

    def figures(self) -> dict[str, float]:
        with flow.connect(self.active.port) as sock:
            row = json.loads(flow.ask(sock, b"s stats journal\n").partition(b" ok ")[2])
        claimed_s = time.time() - row["active_s"]
        [told] = re.findall(r"^time=(\S+) .*event=listening", self.active.log, re.MULTILINE)
        listens_s = datetime.fromisoformat(told).timestamp()
        return {"loaded_s": listens_s - claimed_s, **super().figures()}

    def heal(self) -> None:
        if not self._standby.is_running:
            self._standby.launch()
            until(lambda: "event=standby" in self._standby.log, self._standby.log)


class Rabbitmq(Place):
    """A cluster with a quorum queue."""

    def start(self, running: ExitStack) -> None:
        self._server = RabbitmqCluster()
        self._nodes = running.enter_context(RabbitmqNodes(self._directory))
        with self._server.connect(self._nodes.ports[0]) as sock:
            self._server.declare(sock, 1, manual_ack=False)
        self._down: int | None = None

    @contextmanager
    def client(self) -> Iterator[Publish]:
        """Connected to the leader's node."""
        self._leader = self._nodes.leader("q0", asked=0)
        ports = self._nodes.ports
        client = AmqpClient(self._server, ports[self._leader :] + ports[: self._leader])
        yield client.publish
        client.close()

    def happen(self, fault: str) -> None:
        self._nodes.end(self._leader, signal.SIGKILL if fault == "kill" else signal.SIGTERM)
        self._down = self._leader

    def heal(self) -> None:
        if self._down is not None:
            self._nodes.start(self._down)
            self._nodes.wait()
            self._down = None

    def left(self) -> set[bytes]:
        found = set()
        client = AmqpClient(self._server, self._nodes.ports)
        client.publish(LAST)
        client.close()
        with self._server.connect(self._nodes.ports[0]) as sock:
            call(sock, CONSUME + b"\0\0" + word(b"q0") + word(b"c") + NO_ACK + NO_TABLE)
            while (payload := body(sock)) != LAST:
                found.add(payload)
        return found


def body(sock: socket.socket) -> bytes:
    """The payload of the next delivery."""
    while True:
        kind, _, size = HEAD.unpack(receive(sock, HEAD.size))
        payload = receive(sock, size + len(END))[:-1]
        if kind == BODY:
            return payload


class AmqpClient:
    """Publishes one message at a time, on one node after the other if need be."""

    def __init__(self, server: RabbitmqCluster, ports: list[int]) -> None:
        self._server = server
        self._ports = cycle(ports)
        self._sock: socket.socket | None = None

    def publish(self, payload: bytes) -> None:
        while True:
            try:
                self._sock = self._sock or self._connected()
                head = self._server._publish_head(len(payload), b"e")
                self._sock.sendall(head + payload + END)
                _, _, size = HEAD.unpack(receive(self._sock, HEAD.size))
                if receive(self._sock, size + len(END))[:4] == BASIC_ACK:
                    return
            except OSError:
                pass
            self.close()

    def _connected(self) -> socket.socket:
        try:
            sock = self._server.connect(next(self._ports))
        except OSError:
            time.sleep(AGAIN_S)
            raise
        call(sock, CONFIRM_SELECT + b"\0")
        return sock

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


PLACES: dict[str, type[Place]] = {
    "mqks-postgres": TwoBrokers,
    "rabbitmq-cluster": Rabbitmq,
    "mqks": OneBroker,
}


class Publishing:
    """A thread that publishes; a context in which it runs. `confirmed` outlives it."""

    def __init__(self, publish: Publish, confirmed: list[bytes]) -> None:
        self._publish = publish
        self._confirmed = confirmed
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.times: list[float] = []

    def _run(self) -> None:
        while not self._is_over.is_set():
            payload = b"%d" % len(self._confirmed)
            self._publish(payload)
            self.times.append(clock())
            self._confirmed.append(payload)

    def wait(self, count: int) -> None:
        """Until there are so many more confirms."""
        end = len(self.times) + count
        until(lambda: len(self.times) >= end or self._future.done(), "nothing is confirmed")

    def __enter__(self) -> Self:
        self._future = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._future.result(WAIT_S)
        self._pool.shutdown()


def measured(place: Place, fault: str, confirmed: list[bytes]) -> dict[str, float]:
    with place.client() as publish, Publishing(publish, confirmed) as publishing:
        publishing.wait(BEFORE)
        began_s = clock()
        place.happen(fault)
        publishing.wait(AFTER)
    times = publishing.times
    pairs = [(a, b) for a, b in pairwise(times) if b > began_s]
    last_s, next_s = max(pairs, key=lambda pair: pair[1] - pair[0])
    figures = {} if fault == "switch" else place.figures()
    return {"silent_s": next_s - last_s, **figures}


def go() -> None:
    """The gate of a load program that is alone."""


def run(name: str, faults: list[str], waiting: int) -> dict[str, dict[str, float]]:
    """The figures of each fault, on fresh servers."""
    figures = {}
    confirmed: list[bytes] = []
    messages = Messages(waiting)
    with (
        tempfile.TemporaryDirectory(prefix="mqks-bench-") as directory,
        PLACES[name](Path(directory)) as place,
    ):
        if waiting:
            assert isinstance(place, OneBroker)
            publish_blocks(SERVERS["mqks"], place.active.port, go, messages)
        for fault in faults:
            if fault in place.faults:
                figures[fault] = measured(place, fault, confirmed)
                place.heal()
        if lost := set(confirmed) - place.left():
            raise RuntimeError(f"{name} has lost {len(lost)} confirmed messages")
        if waiting:
            assert isinstance(place, OneBroker)
            drain_blocks(SERVERS["mqks"], place.active.port, go, messages)
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", default="mqks-postgres,rabbitmq-cluster")
    parser.add_argument("--faults", default="kill,stop,switch")
    parser.add_argument("--waiting", type=int, default=0, help="messages; not with RabbitMQ")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    told: dict[tuple[str, str, str], list[float]] = {}
    for turn in range(options.rounds):
        for name in options.servers.split(","):
            for fault, figures in run(name, options.faults.split(","), options.waiting).items():
                print(f"  {name} {fault} {turn + 1}/{options.rounds}: {figures}", flush=True)
                for figure, value in figures.items():
                    told.setdefault((name, fault, figure), []).append(value)
    print(f"{'':42} {'median':>8} {'min':>8} {'max':>8}")
    for key, values in told.items():
        row = statistics.median(values), min(values), max(values)
        print(f"{' '.join(key):42}" + "".join(f" {value:8.2f}" for value in row))


if __name__ == "__main__":
    main()
