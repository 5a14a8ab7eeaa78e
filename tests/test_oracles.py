"""The same stories told to MQKS, RabbitMQ and beanstalkd: what they have in common, and what MQKS
does otherwise on purpose. The table in `docs/coming-from.md` says why.

The one rule: a server answers, or time has passed by its own clock; nothing here measures it.
"""

import re
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.flow import ask, connect
from benchmarks.process import Running
from benchmarks.servers import SERVERS
from benchmarks.servers.rabbitmq import (
    BASIC_ACK,
    BODY,
    CONFIRM_SELECT,
    END,
    EXCHANGE_DECLARE,
    HEAD,
    HEADER,
    METHOD,
    NO_TABLE,
    PUBLISH,
    QUEUE_BIND,
    QUEUE_DECLARE,
    call,
    frame,
    receive,
    word,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("beanstalkd") and Path(SERVERS["rabbitmq"].program).exists()),
        reason="RabbitMQ and beanstalkd are not installed",
    ),
]
PATIENCE_S = 20.0
PERSISTENT, EXPIRING = b"\x10\0\2", b"\x11\0\2"
opened: list[socket.socket] = []
GET, GET_OK, GET_EMPTY = b"\0\x3c\0\x46", b"\0\x3c\0\x47", b"\0\x3c\0\x48"
QUORUM = {"queue_type": b"quorum"}
BASIC_REJECT = b"\0\x3c\0\x5a"


def table(**values: bytes | int) -> bytes:
    """A field table; underscores in a name stand for hyphens."""
    fields = b"".join(
        word(b"x-" + name.replace("_", "-").encode())
        + (
            struct.pack(">ci", b"I", value)
            if isinstance(value, int)
            else struct.pack(">cI", b"S", len(value)) + value
        )
        for name, value in values.items()
    )
    return struct.pack(">I", len(fields)) + fields


def until(there: Callable[[], Any]) -> Any:
    """What it returns when that is true at last."""
    over = time.monotonic() + PATIENCE_S
    while not (found := there()):
        assert time.monotonic() < over, "it does not come"
        time.sleep(0.02)
    return found


def opening(sock: socket.socket) -> socket.socket:
    """A connection that is closed when the test ends."""
    opened.append(sock)
    return sock


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


class Taken(NamedTuple):
    """A message that was got from RabbitMQ. `deaths` are those of x-death, the last one first."""

    tag: int
    redelivered: bool
    body: bytes
    deaths: list[dict[str, Any]]


class Amqp:
    """One channel that confirms what is published."""

    def __init__(self, running: Running) -> None:
        self.sock = opening(running.server.connect(running.port))
        call(self.sock, CONFIRM_SELECT + b"\0")

    def queue(self, name: bytes, **about: bytes | int) -> None:
        called = QUEUE_DECLARE + b"\0\0" + word(name) + b"\2"
        call(self.sock, called + (table(**about) if about else NO_TABLE))

    def fanout(self, name: bytes, *queues: bytes) -> None:
        exchange = b"\0\0" + word(name) + word(b"fanout") + b"\2" + NO_TABLE
        call(self.sock, EXCHANGE_DECLARE + exchange)
        for queue in queues:
            bound = b"\0\0" + word(queue) + word(name) + b"\0\0" + NO_TABLE
            call(self.sock, QUEUE_BIND + bound)

    def publish(self, key: bytes, body: bytes, ttl_ms: int = 0, exchange: bytes = b"") -> bool:
        """Whether it was acked, not nacked."""
        properties = EXPIRING + word(b"%d" % ttl_ms) if ttl_ms else PERSISTENT
        head = struct.pack(">HHQ", 60, 0, len(body)) + properties
        publish = frame(METHOD, PUBLISH + b"\0\0" + word(exchange) + word(key) + b"\0")
        self.sock.sendall(publish + frame(HEADER, head) + frame(BODY, body))
        return self._frame()[1][:4] == BASIC_ACK

    def get(self, queue: bytes) -> Taken | None:
        got = call(self.sock, GET + b"\0\0" + word(queue) + b"\0")
        if got[:4] == GET_EMPTY:
            return None
        assert got[:4] == GET_OK
        tag, redelivered = struct.unpack_from(">Q?", got, 4)
        _, header = self._frame()
        _, body = self._frame()
        flags, deaths = struct.unpack_from(">H", header, 12)[0], []
        if flags & 0x2000:
            deaths = fields(header[14:]).get("x-death", [])
        return Taken(tag, redelivered, body, deaths)

    def taken(self, queue: bytes) -> Taken:
        """The next message, when there is one."""
        got: Taken = until(lambda: self.get(queue))
        return got

    def reject(self, tag: int, *, back: bool) -> None:
        self.sock.sendall(frame(METHOD, BASIC_REJECT + struct.pack(">Q?", tag, back)))

    def _frame(self) -> tuple[int, bytes]:
        kind, _, size = HEAD.unpack(receive(self.sock, HEAD.size))
        return kind, receive(self.sock, size + len(END))[:-1]


def fields(raw: bytes) -> dict[str, Any]:
    """A field table of AMQP."""
    (size,) = struct.unpack_from(">I", raw)
    found, at = {}, 4
    while at < size + 4:
        name = raw[at + 1 : at + 1 + raw[at]].decode()
        at += 1 + raw[at]
        found[name], at = _field(raw, at)
    return found


def _field(raw: bytes, at: int) -> tuple[Any, int]:
    kind, at = raw[at : at + 1], at + 1
    for kinds, form in ((b"l", ">q"), (b"T", ">Q"), (b"I", ">i"), (b"t", ">?"), (b"s", ">h")):
        if kind == kinds:
            return struct.unpack_from(form, raw, at)[0], at + struct.calcsize(form)
    (size,) = struct.unpack_from(">I", raw, at)
    inside, end = raw[at + 4 : at + 4 + size], at + 4 + size
    if kind == b"F":
        return fields(raw[at:end]), end
    if kind == b"A":
        values, place = [], 0
        while place < size:
            value, place = _field(inside, place)
            values.append(value)
        return values, end
    assert kind == b"S", kind
    return inside, end


class Lines:
    """A connection to MQKS. Whoever consumes here holds one message at a time."""

    def __init__(self, running: Running) -> None:
        self.port = running.port
        self.sock = opening(connect(running.port))

    def ask(self, request: bytes) -> bytes:
        return ask(self.sock, request + b"\n")[:-1]

    def do(self, request: bytes) -> None:
        action, _, rest = request.partition(b" ")
        assert self.ask(b"r %b --confirm %b" % (action, rest)).startswith(b"r ok")

    def publish(self, event: bytes, body: bytes, *flags: bytes) -> bool:
        request = b" ".join([b"publish --confirm", *flags, event, body])
        return self.ask(body + b" " + request) == body + b" ok "

    def ready(self, queue: bytes) -> int:
        found = re.search(rb'"ready": (\d+)', self.ask(b"s stats queue " + queue))
        assert found
        return int(found[1])

    def reads(self, queue: bytes) -> "Reader":
        return Reader(self.port, queue)


class Reader:
    """A consumer of MQKS on a connection of its own, which is told attributes."""

    def __init__(self, port: int, queue: bytes) -> None:
        self.sock = opening(connect(port))
        flags = b" --manual-ack --prefetch=1 --meta\n"
        assert ask(self.sock, b"c consume --confirm " + queue + flags) == b"c ok \n"

    def next(self) -> "Told":
        line = ask(self.sock, b"")
        found = re.fullmatch(rb"c ok (\S+) event=\S+,retry=(\d+),meta=(\S*) (.*)\n", line)
        assert found, line
        pairs = dict(pair.split(b"=") for pair in found[3].split(b"&") if pair)
        return Told(found[1], int(found[2]), pairs, found[4])

    def end(self, how: bytes, told: "Told") -> None:
        action, *flags = how.split()
        request = b" ".join([b"r", action, b"c", told.id, *flags])
        self.sock.sendall(request + b"\n")

    def leave(self) -> None:
        """As a process that is killed does."""
        self.sock.close()


class Told(NamedTuple):
    id: bytes
    retry: int
    meta: dict[bytes, bytes]
    body: bytes


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(SERVERS["mqks"], tmp_path_factory.mktemp("mqks")) as running:
        yield running


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(SERVERS["rabbitmq"], tmp_path_factory.mktemp("rabbitmq")) as running:
        yield running


@pytest.fixture(scope="module")
def beans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(SERVERS["beanstalkd"], tmp_path_factory.mktemp("beanstalkd")) as running:
        yield running


def bean(sock: socket.socket, request: bytes, lines: int = 1) -> bytes:
    answer = ask(sock, request + b"\r\n")
    return answer + b"".join(ask(sock, b"") for _ in range(lines - 1))


# -- expiry


def test_expiry(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe x.q x.e")
    lines.do(b"set_queue x.q --dead-letters=x.dead")
    assert lines.publish(b"x.e", b"m1", b"--ttl=0.1")
    letter = lines.reads(b"x.dead").next()
    assert (letter.body, letter.meta[b"reason"], letter.meta[b"queue"]) == (b"m1", b"ttl", b"x.q")
    assert letter.meta[b"tries"] == b"0"

    amqp.queue(b"x.dead")
    amqp.queue(b"x.q", dead_letter_exchange=b"", dead_letter_routing_key=b"x.dead")
    assert amqp.publish(b"x.q", b"m1", ttl_ms=100)
    got = amqp.taken(b"x.dead")
    assert (got.body, got.deaths[0]["reason"], got.deaths[0]["queue"]) == (
        b"m1",
        b"expired",
        b"x.q",
    )
    assert got.deaths[0]["count"] == 1


def test_expiry_behind_living_ones(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe y.q y.e")
    lines.do(b"set_queue y.q --dead-letters=y.dead")
    assert lines.publish(b"y.e", b"living")
    assert lines.publish(b"y.e", b"brief", b"--ttl=0.1")
    assert lines.reads(b"y.dead").next().body == b"brief"
    assert lines.ready(b"y.q") == 1

    # RabbitMQ: only at the head of the queue. A queue with a ttl shows that time has passed.
    amqp.queue(b"y.dead")
    amqp.queue(b"y.clock", dead_letter_exchange=b"", dead_letter_routing_key=b"y.dead")
    amqp.queue(b"y.q", dead_letter_exchange=b"", dead_letter_routing_key=b"y.dead")
    assert amqp.publish(b"y.q", b"living")
    assert amqp.publish(b"y.q", b"brief", ttl_ms=100)
    assert amqp.publish(b"y.clock", b"later", ttl_ms=300)
    assert amqp.taken(b"y.dead").body == b"later"
    assert amqp.get(b"y.dead") is None
    assert amqp.taken(b"y.q").body == b"living"
    assert amqp.taken(b"y.dead").body == b"brief"


# -- dead letters


def test_a_message_rejected_as_dead(ours: Running, rabbit: Running, beans: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe d.q d.e")
    lines.do(b"set_queue d.q --dead-letters=d.dead")
    assert lines.publish(b"d.e", b"m1")
    reader = lines.reads(b"d.q")
    reader.end(b"reject --dead", reader.next())
    letter = lines.reads(b"d.dead").next()
    assert (letter.meta[b"reason"], letter.meta[b"queue"], letter.meta[b"tries"]) == (
        b"dead",
        b"d.q",
        b"1",
    )
    assert letter.retry == 0

    amqp.queue(b"d.dead")
    amqp.queue(b"d.q", dead_letter_exchange=b"", dead_letter_routing_key=b"d.dead")
    assert amqp.publish(b"d.q", b"m1")
    amqp.reject(amqp.taken(b"d.q").tag, back=False)
    [death] = amqp.taken(b"d.dead").deaths
    assert (death["reason"], death["queue"], death["count"]) == (b"rejected", b"d.q", 1)

    # beanstalkd: a buried job stays in its tube, without a reason; a kick puts it back.
    sock = opening(beans.server.connect(beans.port))
    job = bean(sock, b"put 1 0 60 2\r\nm1").split()[1]
    assert bean(sock, b"reserve", lines=2) == b"RESERVED %b 2\r\nm1\r\n" % job
    assert bean(sock, b"bury %b 1" % job) == b"BURIED\r\n"
    assert bean(sock, b"reserve-with-timeout 0") == b"TIMED_OUT\r\n"
    assert bean(sock, b"kick 10") == b"KICKED 1\r\n"
    assert bean(sock, b"reserve", lines=2) == b"RESERVED %b 2\r\nm1\r\n" % job
    assert bean(sock, b"delete " + job) == b"DELETED\r\n"


def test_redriven_messages_begin_anew(ours: Running) -> None:
    """As a kick of beanstalkd; RabbitMQ leaves that to a program that publishes them again."""
    lines = Lines(ours)
    lines.do(b"subscribe k.q k.e")
    lines.do(b"set_queue k.q --retries=1 --dead-letters=k.dead")
    assert lines.publish(b"k.e", b"m1")
    reader = lines.reads(b"k.q")
    reader.end(b"reject", reader.next())
    until(lambda: lines.ready(b"k.dead"))
    assert lines.ask(b"r redrive --confirm k.dead") == b"r ok 1"
    again = reader.next()
    assert (again.body, again.retry, again.meta) == (b"m1", 0, {})


def test_a_chain_of_three(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe t.1 t.e")
    lines.do(b"set_queue t.1 --ttl=0.05 --dead-letters=t.2")
    lines.do(b"set_queue t.2 --ttl=0.05 --dead-letters=t.3")
    assert lines.publish(b"t.e", b"m1")
    # Where it died last: that is where `redrive` puts it.
    assert lines.reads(b"t.3").next().meta[b"queue"] == b"t.2"

    amqp.queue(b"t.3")
    amqp.queue(b"t.2", message_ttl=50, dead_letter_exchange=b"", dead_letter_routing_key=b"t.3")
    amqp.queue(b"t.1", message_ttl=50, dead_letter_exchange=b"", dead_letter_routing_key=b"t.2")
    assert amqp.publish(b"t.1", b"m1")
    assert [death["queue"] for death in amqp.taken(b"t.3").deaths] == [b"t.2", b"t.1"]


def test_a_consumer_crash_loop(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe l.q l.e")
    lines.do(b"set_queue l.q --losses=2 --dead-letters=l.dead")
    assert lines.publish(b"l.e", b"m1")
    for _ in range(2):
        reader = lines.reads(b"l.q")
        assert reader.next().body == b"m1"
        reader.leave()
    letter = lines.reads(b"l.dead").next()
    assert (letter.meta[b"reason"], letter.meta[b"tries"]) == (b"losses", b"2")

    # RabbitMQ: in quorum queues only, which count losses and rejects together.
    amqp.queue(b"l.dead")
    dead = {"dead_letter_exchange": b"", "dead_letter_routing_key": b"l.dead"}
    amqp.queue(b"l.q", delivery_limit=1, **QUORUM, **dead)
    assert amqp.publish(b"l.q", b"m1")
    for _ in range(2):
        victim = Amqp(rabbit)
        assert victim.taken(b"l.q").body == b"m1"
        victim.sock.close()
    [death] = amqp.taken(b"l.dead").deaths
    assert (death["reason"], death["count"]) == (b"delivery_limit", 1)


def test_a_poison_message_behind_good_ones(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe p.q p.e")
    lines.do(b"set_queue p.q --retries=1 --dead-letters=p.dead")
    amqp.queue(b"p.dead")
    amqp.queue(b"p.q", dead_letter_exchange=b"", dead_letter_routing_key=b"p.dead")
    reader = lines.reads(b"p.q")
    for body in (b"good1", b"poison", b"good2"):
        assert lines.publish(b"p.e", body)
        assert amqp.publish(b"p.q", body)
    found: list[list[bytes]] = [[], []]
    while len(found[0]) < 3:
        told = reader.next()
        found[0].append(told.body)
        reader.end(b"reject" if told.body == b"poison" else b"ack", told)
        got = amqp.taken(b"p.q")
        found[1].append(got.body)
        if got.body == b"poison":
            amqp.reject(got.tag, back=False)
    assert found == [[b"good1", b"poison", b"good2"]] * 2
    assert lines.reads(b"p.dead").next().body == b"poison"
    assert amqp.taken(b"p.dead").body == b"poison"


# -- lengths


def test_a_full_queue_refuses(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe f.q f.e")
    lines.do(b"set_queue f.q --messages-max=2")
    amqp.queue(b"f.q", max_length=2, overflow=b"reject-publish")
    bodies = (b"m1", b"m2", b"m3")
    assert [lines.publish(b"f.e", body) for body in bodies] == [True, True, False]
    assert [amqp.publish(b"f.q", body) for body in bodies] == [True, True, False]


def test_a_full_queue_drops_the_oldest(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe o.q o.e")
    lines.do(b"set_queue o.q --messages-max=2 --overflow=drop --dead-letters=o.dead")
    amqp.queue(b"o.dead")
    dead = {"dead_letter_exchange": b"", "dead_letter_routing_key": b"o.dead"}
    amqp.queue(b"o.q", max_length=2, overflow=b"drop-head", **dead)
    for body in (b"m1", b"m2", b"m3"):
        assert lines.publish(b"o.e", body)
        assert amqp.publish(b"o.q", body)
    letter, got = lines.reads(b"o.dead").next(), amqp.taken(b"o.dead")
    assert (letter.body, letter.meta[b"reason"]) == (b"m1", b"overflow")
    assert (got.body, got.deaths[0]["reason"]) == (b"m1", b"maxlen")


def test_one_of_two_queues_is_full(ours: Running, rabbit: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    lines.do(b"subscribe b.small b.e")
    lines.do(b"subscribe b.large b.e")
    lines.do(b"set_queue b.small --messages-max=1")
    assert [lines.publish(b"b.e", body) for body in (b"m1", b"m2")] == [True, False]
    assert lines.ready(b"b.large") == 1

    # RabbitMQ: refused, and yet in the other one.
    amqp.queue(b"b.small", max_length=1, overflow=b"reject-publish")
    amqp.queue(b"b.large")
    amqp.fanout(b"b.e", b"b.small", b"b.large")
    published = [amqp.publish(b"", body, exchange=b"b.e") for body in (b"m1", b"m2")]
    assert published == [True, False]
    assert [amqp.taken(b"b.large").body for _ in range(2)] == [b"m1", b"m2"]


# -- delays, and what comes back


def test_a_delay_over_a_restart(tmp_path: Path) -> None:
    bodies: dict[str, bytes] = {}
    for name in ("mqks", "rabbitmq", "beanstalkd"):
        directory = tmp_path / name
        directory.mkdir()
        with Running(SERVERS[name], directory) as running:
            bodies[name] = _delayed_over_restart(name, running)
    assert set(bodies.values()) == {b"m1"}, bodies


def _delayed_over_restart(name: str, running: Running) -> bytes:
    if name == "mqks":
        lines = Lines(running)
        lines.do(b"subscribe q e")
        assert lines.publish(b"e", b"m1", b"--delay=1")
        assert lines.ready(b"q") == 0
        _again(running)
        return Lines(running).reads(b"q").next().body
    if name == "rabbitmq":
        amqp = Amqp(running)
        amqp.queue(b"q")
        waits = {"dead_letter_exchange": b"", "dead_letter_routing_key": b"q"}
        amqp.queue(b"wait", message_ttl=1000, **waits)
        assert amqp.publish(b"wait", b"m1")
        assert amqp.get(b"q") is None
        _again(running)
        return Amqp(running).taken(b"q").body
    sock = opening(running.server.connect(running.port))
    assert bean(sock, b"put 1 1 60 2\r\nm1").startswith(b"INSERTED")
    assert bean(sock, b"reserve-with-timeout 0") == b"TIMED_OUT\r\n"
    _again(running)
    sock = opening(running.server.connect(running.port))
    return bean(sock, b"reserve", lines=2).split()[-1]


def _again(running: Running) -> None:
    running.end(signal.SIGTERM)
    running.start()


def test_released_to_the_old_place(ours: Running, rabbit: Running, beans: Running) -> None:
    lines, amqp = Lines(ours), Amqp(rabbit)
    sock = opening(beans.server.connect(beans.port))
    lines.do(b"subscribe r.q r.e")
    amqp.queue(b"r.q")
    jobs = []
    for body in (b"m1", b"m2"):
        assert lines.publish(b"r.e", body)
        assert amqp.publish(b"r.q", body)
        jobs.append(bean(sock, b"put 1 0 60 2\r\n" + body).split()[1])
    reader = lines.reads(b"r.q")
    reader.end(b"release", reader.next())
    # It counts for nothing; RabbitMQ tells that it was delivered before.
    assert reader.next() == Told(b"m1", 0, {}, b"m1")
    amqp.reject(amqp.taken(b"r.q").tag, back=True)
    again = amqp.taken(b"r.q")
    assert (again.body, again.redelivered) == (b"m1", True)
    assert bean(sock, b"reserve", lines=2).endswith(b"m1\r\n")
    assert bean(sock, b"release %b 1 0" % jobs[0]) == b"RELEASED\r\n"
    assert bean(sock, b"reserve", lines=2).endswith(b"m1\r\n")
    # beanstalkd counts releases.
    assert b"releases: 1" in _stats(sock, jobs[0])
    for job in jobs:
        assert bean(sock, b"delete " + job) == b"DELETED\r\n"


def _stats(sock: socket.socket, job: bytes) -> bytes:
    size = int(bean(sock, b"stats-job " + job).split()[1])
    return receive(sock, size + 2)
