"""The wall clock is set by a year, forwards and back, under a running server and between two."""

import json
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
