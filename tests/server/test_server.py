"""The server around the broker: stops, pauses, slow and hostile peers."""

import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from mqks.testing import Broker
from tests.kit.bare import BareWorld
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until
from tests.server.test_descriptors import Limited


def waiting(client: LineClient) -> int:
    return int(client.ask(b"ev _eval len(state.queues['q'])").split()[-1])


def test_a_stop_journals_what_it_delivers(tmp_path: Path) -> None:
    """SIGTERM while a consumer drains: what it got does not come again, the rest is there."""
    db, count = tmp_path / "mqks.db", 100_000
    with ServerProcess(db) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for start in range(0, count, 10_000):
            numbers = range(start, start + 10_000)
            client.send(b"".join(b"m%d publish e x\n" % number for number in numbers))
        assert client.ask(b"p publish --confirm e x") == b"p ok "
        client.send(b"c consume q\n")
        got = len(client.lines())
        assert server.stop() == 0
        got += len(client.rest())
    with ServerProcess(db) as server, LineClient(server.address) as client:
        assert got + waiting(client) == count + 1


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_does_not_cut_a_stop_short(
    server: ServerProcess, client: LineClient, again: signal.Signals
) -> None:
    """A client that reads late gets what it was sent before."""
    count, data = 100, b"x" * 100_000
    client.send(b"".join(b"p%d ping %s\n" % (number, data) for number in range(count)))
    with LineClient(server.address) as other:
        while b'"blocked": true' not in other.ask(b"st stats connections"):
            pass
    os.kill(server.pid, signal.SIGTERM)
    until(lambda: "event=stopping" in server.log)
    os.kill(server.pid, again)
    got = client.rest()
    assert got == [b"p%d ok %s" % (number, data) for number in range(len(got))]
    assert server.wait() == 0
    assert "event=stopped" in server.log


@pytest.mark.parametrize(
    ("flags", "count"),
    [((), 0), (("--connections-max", "19900"), 1), (("--connections-max", "5000"), 0)],
)
def test_few_open_files_are_reported_where_they_matter(
    tmp_path: Path, flags: tuple[str, ...], count: int
) -> None:
    with Limited(20_000, tmp_path / "mqks.db", *flags) as server:
        assert server.log.count("event=few_open_files") == count


@pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])
def test_connections_stay_below_the_limit_of_open_files(tmp_path: Path, loop: str) -> None:
    with Limited(140, tmp_path / "mqks.db", loop) as server, ExitStack() as stack:
        clients = [stack.enter_context(LineClient(server.address)) for _ in range(90)]
        todo = 'todo="allow 20128 open files (ulimit -n, or LimitNOFILE= of systemd)"'
        told = f"level=warning event=few_open_files open_files=140 connections_max=70 {todo}"
        assert told in server.log
        assert [client.ask(b"p ping") for client in clients[:70]] == [b"p ok "] * 70
        assert all(client.line().startswith(b"- error ") for client in clients[70:])
        assert clients[0].ask(b"s subscribe --confirm q e") == b"s ok "


def test_the_system_looks_after_clients_that_have_vanished(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        assert client.ask(b"p ping") == b"p ok "
        ports = [f"{port:04X}" for port in (server.address[1], client.port)]

        def timer() -> str | None:
            rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            [found] = [row[5] for row in rows if [each[-4:] for each in row[1:3]] == ports]
            kind, _, ticks = found.partition(":")
            return ticks if kind == "02" else None

        # Until the reply is acknowledged there is another one.
        ticks = until(timer, "there is no timer of a keepalive")
    assert int(ticks, 16) <= 60 * 100


def test_replies_wait_for_no_acknowledgement_of_earlier_ones(mqks_broker: Broker) -> None:
    """The event loop of its thread is asyncio's, which does not see to that."""
    with LineClient(("127.0.0.1", mqks_broker.port)) as client:
        assert client.ask(b"p ping") == b"p ok "
        found = list[int]()
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError), socket.socket(fileno=os.dup(int(each.name))) as sock:
                if sock.family == socket.AF_INET and sock.getpeername()[1] == client.port:
                    found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    assert found == [1]


def test_expressions_of_one_chunk_share_their_steps() -> None:
    world = BareWorld()
    one = b"ev _eval sum([1 for i in range(30000)])\n"
    world.send("k", one)
    assert world.received("k") == b"ev ok 30000\n"
    world.send("k", one * 20)
    answers = world.received("k").splitlines()
    assert answers[0] == b"ev ok 30000"
    assert answers[-1].startswith(b"ev error ")
    world.send("k", one)
    assert world.received("k") == b"ev ok 30000\n"


def test_half_closed_connections_count_and_end(tmp_path: Path) -> None:
    flags = ("--connections-max", "3")
    with ServerProcess(tmp_path / "mqks.db", *flags) as server:
        clients = [LineClient(server.address) for _ in range(3)]
        for client in clients:
            client.send(b"c ping\n")
            client.close_sending_side()
            assert client.line() == b"c ok "
            with pytest.raises(EOFError):
                client.line()
            client.close()

        def is_let_in() -> bool:
            with LineClient(server.address) as client, suppress(EOFError, OSError):
                return client.ask(b"p ping") == b"p ok "
            return False

        until(is_let_in)


def test_receives_are_answered_before_a_half_closed_connection_ends(client: LineClient) -> None:
    client.ask(b"s1 subscribe --confirm q e")
    client.ask(b"s2 subscribe --confirm empty e2")
    # More than is committed on the event loop, in the turn in which the client's end is read.
    client.send(b"".join(b"m%d publish e x\n" % number for number in range(500)))
    client.send(b"".join(b"r%d receive q\n" % number for number in range(500)))
    client.send(b"w receive empty --wait=60\n")
    client.close_sending_side()
    ends = [line.split()[0] for line in client.rest() if line.endswith(b" ok --end")]
    assert {*ends} == {b"w", *(b"r%d" % number for number in range(500))}


def test_reads_are_answered_before_a_half_closed_connection_ends(client: LineClient) -> None:
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    client.send(b"".join(b"p%d peek q\n" % number for number in range(16)))
    client.close_sending_side()
    assert client.rest() == [b"p%d ok --end" % number for number in range(16)]


def test_a_slow_consumer_is_told_the_newest_update_only(tmp_path: Path) -> None:
    with (
        served(tmp_path / "mqks.db", "--delivery-pause-bytes", "64KiB") as (server, slow),
        LineClient(server.address) as other,
    ):
        assert slow.ask(b"c consume --confirm q e0") == b"c ok "
        names = b" ".join(b"event-%d" % number for number in range(5_000))
        for number in range(400):
            other.send(b"r rebind q last-%d %s\n" % (number, names))
        assert other.ask(b"p ping") == b"p ok "
        updates = 0
        while True:
            updates += 1
            if b" last-399" in slow.line():
                break
        assert updates < 399


def test_an_expression_sees_the_address_and_the_replies_of_its_turn(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        reply = client.ask(b"e _eval ' '.join(config['workers'])")
        assert reply == b"e ok 127.0.0.1:0", "as it is set"
    world = BareWorld()
    waiting = b"_eval sum(q.qsize() for q in state.responses_by_clients.itervalues())"
    world.send("k", b"p ping x\np ping y\nev %b\n" % waiting)
    assert world.received("k") == b"p ok x\np ok y\nev ok 2\n"
