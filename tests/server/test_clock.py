"""The wall clock is set by a year, forwards and back, under a running server and between two; and
the server stands still for a while."""

import json
import threading
import time
from pathlib import Path

import pytest

from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.preloaded import Clock
from tests.kit.waiting import until

YEAR_S = 365 * 86400


def publish(client: LineClient, *ids: bytes) -> None:
    for each in ids:
        assert client.ask(each + b" publish --confirm --once e x") == each + b" ok "


def peeked(client: LineClient) -> dict[str, int]:
    """Ids of the messages of q, in their order, and how many years from now they came."""
    client.send(b"p peek q --limit=100\n")
    came = {}
    while (line := client.line()) != b"p ok --end":
        words = line.decode().split(" ")
        came[words[2]] = round((int(words[3].rpartition("=")[2]) / 1e6 - time.time()) / YEAR_S)
    return came


def first_at(client: LineClient, years: float) -> int:
    at_us = int((time.time() + years * YEAR_S) * 1e6)
    return int(client.ask(b"r range q --at=%d" % at_us).rpartition(b"=")[2])


@pytest.mark.slow
def test_messages_keep_their_order_and_are_found_by_time(clock: Clock, db: Path) -> None:
    came = {"m1": 0, "m2": 1, "m3": -1, "m4": -1, "m5": -1, "m6": 0}
    with served(db, environment=clock.environment) as (server, client):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        publish(client, b"m1")
        clock.ahead(YEAR_S)
        publish(client, b"m2")
        clock.ahead(-YEAR_S)
        publish(client, b"m3", b"m4", b"m5", b"m2")
        clock.ahead(0)
        publish(client, b"m6")
        assert peeked(client) == came
        server.kill()
    clock.ahead(-YEAR_S)
    with served(db, environment=clock.environment) as (server, client):
        assert peeked(client) == came
        # Whoever starts at a time misses nothing that came later, by the clock of then.
        assert [first_at(client, years) for years in (-2, -0.5, 0.5, 2)] == [1, 1, 2, 7]
        publish(client, b"m1", b"m7")
        client.send(b"c consume q\n")
        assert [client.line().split()[2] for _ in range(7)] == [b"m%d" % n for n in range(1, 8)]
        assert server.terminate() == 0, server.log


def test_timers_take_no_notice(clock: Clock, db: Path) -> None:
    with served(db, environment=clock.environment) as (server, client):
        for name in (b"soon", b"late"):
            assert client.ask(b"s subscribe --confirm %b e" % name) == b"s ok "
        assert client.ask(b"d delete_queue --confirm late --when-unused=86400") == b"d ok "
        clock.ahead(YEAR_S)
        assert client.ask(b"d delete_queue --confirm soon --when-unused=0.1") == b"d ok "
        clock.ahead(-YEAR_S)
        names = b"e _eval set(state.queues)"
        until(lambda: client.ask(names) == b'e ok ["late"]', "soon stays, or late has gone")
        uptime_s = client.stats()["uptime_s"]
        assert 0 < uptime_s < YEAR_S / 2
        assert server.terminate() == 0, server.log


@pytest.mark.slow
def test_later_errors_have_greater_ids_and_are_kept(clock: Clock, db: Path) -> None:
    def fail(*ahead_s: int) -> None:
        flags = "--errors-kept-max", "3"
        with served(db, *flags, environment=clock.environment) as (server, client):
            for each in ahead_s:
                clock.ahead(each)
                failed.append(client.ask(b"x fail").split()[2].decode())
            told = client.stats("errors")
            assert [row["id"] for row in told] == failed[-3:]
            years = [round((row["time_us"] / 1e6 - time.time()) / YEAR_S) for row in told]
            assert years[-len(ahead_s) :] == [each / YEAR_S for each in ahead_s]
            assert server.terminate() == 0, server.log

    failed: list[str] = []
    fail(0, YEAR_S)
    fail(-YEAR_S, 0)
    assert failed == sorted(failed)


def test_what_waits_is_as_old_as_the_clock_says(clock: Clock, db: Path) -> None:
    """Set forwards it is older, set back it is new; a warning of it may come, and no more."""
    flags = "--queue-age-warning-s", "0.2"
    with served(db, *flags, environment=clock.environment) as (server, client):
        clock.ahead(-YEAR_S)
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        publish(client, b"m1")
        clock.ahead(-2 * YEAR_S)
        assert client.stats("queue q")["oldest_age_s"] == 0
        clock.ahead(0)
        until(lambda: "event=queue_waits" in server.log, "nobody is warned")
        assert client.stats("queue q")["oldest_age_s"] > YEAR_S - 60
        assert server.terminate() == 0, server.log


@pytest.mark.slow
def test_schedules_do_not_wait_for_a_clock_that_was_set_back(clock: Clock, db: Path) -> None:
    def next_s(client: LineClient, name: str) -> float:
        rows = json.loads(client.ask(b"s schedules").removeprefix(b"s ok "))
        [next_us] = [row["next_us"] for row in rows if row["name"] == name]
        return float(next_us / 1e6 - time.time())

    def has_ticked(client: LineClient) -> bool:
        client.send(b"p peek q --limit=100\n")
        ids = []
        while (line := client.line()) != b"p ok --end":
            ids.append(line.split(b" ")[2])
        return any(abs(int(each.rpartition(b":")[2]) - time.time()) < 3600 for each in ids)

    clock.ahead(2 * YEAR_S)
    with served(db, environment=clock.environment) as (server, client):
        for request in (
            b"subscribe --confirm q e",
            b"schedule --confirm often --every=1 --missed=one publish e x",
            b"schedule --confirm daily 0 3 * * * publish e2 x",
        ):
            assert client.ask(b"s " + request) == b"s ok "
        assert next_s(client, "daily") > YEAR_S
        clock.ahead(YEAR_S)
        until(lambda: next_s(client, "daily") < YEAR_S + 90_000, "it waits for another year")
        server.kill()
    clock.ahead(0)
    with served(db, environment=clock.environment) as (server, client):
        until(lambda: has_ticked(client), "it waits for another year")
        assert next_s(client, "daily") < 90_000
        assert server.terminate() == 0, server.log


def test_times_and_delays_join_in_one_order_and_only_times_follow_the_clock(
    clock: Clock, db: Path
) -> None:
    with served(db, environment=clock.environment) as (server, client):
        assert client.ask(b"c consume --confirm q e") == b"c ok "
        now_s = time.time()
        for number, wait_s in enumerate([0.9, 0.5, 0.7, 0.3, 0.6, 0.4]):
            when = b"delay=%.1f" % wait_s if number % 2 else b"at=%.1f" % (now_s + wait_s)
            client.send(b"m%d publish --%b e x\n" % (number, when))
        order = [b"m3", b"m5", b"m1", b"m4", b"m2", b"m0"]
        assert [client.line().split()[2] for _ in order] == order
        client.send(b"n1 publish --at=%.1f e x\n" % (now_s + YEAR_S - 10))
        assert client.ask(b"n2 publish --confirm --delay=%d e x" % YEAR_S) == b"n2 ok "
        clock.ahead(YEAR_S)
        assert client.line().split()[2] == b"n1"
        assert client.stats("queue q")["scheduled"] == 1
        assert server.terminate() == 0, server.log


def test_an_ack_that_came_while_the_server_stood_still_was_in_time(db: Path) -> None:
    with served(db) as (server, client):
        client.send(b"c consume --confirm q e --manual-ack --ack-timeout=2 --prefetch=2\n")
        assert client.line() == b"c ok "
        client.send(b"m publish e x\nn publish e x\n")
        assert [client.line().split()[2] for _ in range(2)] == [b"m", b"n"]
        with server.paused():
            client.send(b"x publish f %b\n" % (b"x" * 1000) * 1000 + b"a ack c m\n")
            time.sleep(2.5)
        # The other one has not been acked in time.
        assert client.line() == b"c ok n event=e,retry=1 x"
        assert client.ask(b"a ack --confirm c n") == b"a ok "
        assert client.stats()["redelivered"] == 1
        assert server.terminate() == 0, server.log


def test_a_late_timer_does_not_wait_for_those_who_never_stop(db: Path) -> None:
    with served(db) as (server, client), LineClient(server.address) as other:
        assert client.ask(b"c consume --confirm q e") == b"c ok "
        has_come = threading.Event()

        def talk() -> None:
            while not has_come.is_set():
                other.send(b"x publish f y\n" * 100)
                time.sleep(0.0001)

        client.ask(b"m publish --confirm --delay=0.5 e x")
        talker = threading.Thread(target=talk)
        with server.paused():
            talker.start()
            time.sleep(1)
        try:
            assert client.line().split()[2] == b"m"
        finally:
            has_come.set()
            talker.join()
        assert server.terminate() == 0, server.log
