"""Load for a running server: how fast it is, in a few seconds.

The one rule: nothing is done per message while the clock runs, all replies are checked after it has
stopped, and the benchmark's queues are always deleted.
"""

import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self

from mqks.client import requests
from mqks.client.blocking_connection import dialled
from mqks.client.options import Options
from mqks.client.urls import Address, Servers
from mqks.errors import BenchFailed, reason
from mqks.protocol import replies

CHUNK_BYTES = 1 << 18
IN_FLIGHT, FAN_OUT, PER_SECOND = 1_000, 10, 1_000
FEWER = 20  # Workloads that send one message at a time get this part of the count.
ABANDONED_S = 600  # After this the server deletes the queues, if the benchmark could not.

clock = time.perf_counter
Figures = dict[str, float]


class Bench:
    """One workload: its queues, messages and connections. Raises BenchFailed."""

    def __init__(self, address: Address, options: Options, count: int, payload_bytes: int) -> None:
        self.address = address
        self.options = options
        self.event = b"mqks-bench-%b" % secrets.token_hex(6).encode()
        self.queues: list[bytes] = []
        self.ids = [b"%09d" % number for number in range(count)]
        self.payload = b"x" * payload_bytes
        self.threads = ThreadPoolExecutor(FAN_OUT)
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Threads that wait for the server end when their sockets are closed.
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.threads.shutdown()
        try:
            if self.queues:
                sock = self.connect()
                for queue in self.queues:
                    ask(sock, b"d delete_queue --confirm " + queue, b"d ok ")
        finally:
            for sock in self._sockets:
                sock.close()

    def connect(self) -> socket.socket:
        """A connection that is closed at the end."""
        try:
            sock = dialled(Servers(self.address), self.options)[1]
        except OSError as error:
            raise BenchFailed(f"no server at {self.address}: {reason(error)}") from None
        sock.settimeout(self.options.timeout_s)
        self._sockets.append(sock)
        if self.address.credentials:
            ask(sock, b"a " + requests.auth(self.address.credentials), b"a ok ")
        return sock

    def queue(self) -> bytes:
        """A new queue that gets every message."""
        name = b"%b-%d" % (self.event, len(self.queues))
        self.queues.append(name)
        sock = self.connect()
        ask(sock, b"s subscribe --confirm %b %b" % (name, self.event), b"s ok ")
        ask(sock, b"w delete_queue --confirm %b --when-unused=%d" % (name, ABANDONED_S), b"w ok ")
        return name

    def consumer(self, *flags: bytes) -> tuple[bytes, socket.socket]:
        """A consumer with a new queue, both with the same name."""
        sock, name = self.connect(), self.queue()
        rule = b"--delete-queue-when-unused=%d" % ABANDONED_S
        ask(sock, b" ".join([name, b"consume --confirm", name, rule, *flags]), name + b" ok ")
        return name, sock

    def publishes(self, *, each: bool) -> list[bytes]:
        """Every message; with `each` all of them ask for a confirm, otherwise only the last one."""
        plain = b" publish %b %b\n" % (self.event, self.payload)
        confirmed = plain.replace(b"publish", b"publish --confirm", 1)
        *ids, last = self.ids
        return [*[number + (confirmed if each else plain) for number in ids], last + confirmed]

    def deliveries(self, consumer: bytes) -> bytes:
        """The bytes that a consumer must get."""
        bodies = (replies.body(number, self.event, self.payload) for number in self.ids)
        return b"".join([replies.ok(consumer, body) for body in bodies])


def ask(sock: socket.socket, line: bytes, answer: bytes) -> None:
    check(exchange(sock, line + b"\n", 1)[0], answer + b"\n")


def check(found: bytes, expected: bytes) -> None:
    if found != expected:
        pairs = zip(found.splitlines(), expected.splitlines(), strict=False)
        odd = next((line for line, right in pairs if line != right), found[-80:])
        raise BenchFailed(f"the server has sent a wrong reply: {odd[:80]!r}")


def exchange(
    sock: socket.socket, requests: bytes, lines: int, width: int = 0, ahead: int = 0
) -> tuple[bytes, list[float]]:
    """Send requests until `lines` lines have arrived; return them, and when each arrived.

    With a `width`, the bytes of a request, at most `ahead` requests more than lines are sent.
    """
    rest = memoryview(requests)
    chunks: list[bytes] = []
    times: list[float] = []
    sent = 0
    try:
        while sent < len(rest) or len(times) < lines:
            limit = (len(times) + ahead) * width
            if not width or limit + width > len(rest):
                limit = len(rest)
            sock.sendall(rest[sent:limit])
            sent = limit
            if len(times) < lines:
                chunk = sock.recv(CHUNK_BYTES)
                if not chunk:
                    raise ConnectionError(0, "the server has closed the connection")
                chunks.append(chunk)
                times += [clock()] * chunk.count(b"\n")
    except OSError as error:
        why = error.strerror or "the server does not answer"
        raise BenchFailed(f"{why}, after {len(times)} of {lines} lines") from None
    return b"".join(chunks), times


def _deliver(bench: Bench, consumers: int = 1, manual_ack: bool = False) -> Figures:
    flags = [b"--manual-ack"] if manual_ack else []
    given = [bench.consumer(*flags) for _ in range(consumers)]
    acks = taken = b""
    if manual_ack:
        name = given[0][0]
        *lines, last = [b"a ack %b %b\n" % (name, number) for number in bench.ids]
        acks = b"".join(lines) + last.replace(b"ack", b"ack --confirm", 1)
        taken = b"a ok \n"
    width, wanted = acks.find(b"\n") + 1, len(bench.ids) + taken.count(b"\n")
    requests, publisher = b"".join(bench.publishes(each=False)), bench.connect()
    began = clock()
    jobs = [bench.threads.submit(exchange, sock, acks, wanted, width) for _, sock in given]
    confirm, _ = exchange(publisher, requests, 1)
    came = [job.result() for job in jobs]
    check(confirm, replies.confirms(bench.ids[-1:]))
    for (name, _), (found, _) in zip(given, came, strict=True):
        check(found, bench.deliveries(name) + taken)
    ended = max(times[-1] for _, times in came)
    return {"messages_per_s": round(len(bench.ids) * consumers / (ended - began))}


def _confirm(bench: Bench) -> Figures:
    bench.queue()
    lines, sock = bench.publishes(each=True), bench.connect()
    requests = b"".join(lines)
    began = clock()
    came, times = exchange(sock, requests, len(lines), len(lines[0]), IN_FLIGHT)
    check(came, replies.confirms(bench.ids))
    return {"confirms_per_s": round(len(lines) / (times[-1] - began))}


def _confirm_one(bench: Bench) -> Figures:
    del bench.ids[len(bench.ids) // FEWER :]
    bench.queue()
    sock, times = bench.connect(), []
    for number, line in zip(bench.ids, bench.publishes(each=True), strict=True):
        began = clock()
        came, [ended] = exchange(sock, line, 1)
        times.append(ended - began)
        check(came, replies.confirms([number]))
    return _percentiles(times)


def _latency(bench: Bench) -> Figures:
    del bench.ids[len(bench.ids) // FEWER :]
    (name, sock), publisher = bench.consumer(), bench.connect()
    job = bench.threads.submit(exchange, sock, b"", len(bench.ids))
    sent = []
    began = clock()
    for number, line in enumerate(bench.publishes(each=False)):
        time.sleep(max(0.0, began + number / PER_SECOND - clock()))
        sent.append(clock())
        exchange(publisher, line, 0)
    came, arrived = job.result()
    check(came, bench.deliveries(name))
    return _percentiles([b - a for a, b in zip(sent, arrived, strict=True)])


def _percentiles(times: list[float]) -> Figures:
    ordered = sorted(times)
    return {f"p{n}_us": round(ordered[len(ordered) * n // 100] * 1e6) for n in (50, 99)}


WORKS: dict[str, Callable[[Bench], Figures]] = {
    "stream": _deliver,
    "acked": lambda bench: _deliver(bench, manual_ack=True),
    "confirm": _confirm,
    "confirm-one": _confirm_one,
    "fanout": lambda bench: _deliver(bench, consumers=FAN_OUT),
    "latency": _latency,
}
