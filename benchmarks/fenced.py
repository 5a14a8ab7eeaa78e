"""`python -m benchmarks.fenced`: a confirm with PostgreSQL, against the commit that it waits for.

A broker and a bare program take turns at the same database, which has a synchronous standby:

- confirm: a program of bare sockets publishes with one confirm in flight
- commit: psycopg executes the broker's statement with a segment that the broker has written, and
  commits one after the other

A figure is the median over the rounds of the p50 (p99) of a round, in microseconds; `adds` is the
median of the differences to the p50 of the bare commit in the same round.

The one rule: every message and every row is counted when the clock has stopped.
"""

import argparse
import asyncio
import statistics
from contextlib import closing
from time import perf_counter
from typing import Any

import psycopg
from psycopg.types.numeric import Int8

from benchmarks.calls import Seconds, bare, empty, percentile
from benchmarks.client import payloads
from mqks import connect_blocking
from mqks.journal.postgres import migrations, statements
from mqks.journal.postgres.address import parse
from mqks.journal.postgres.claim import Owner
from mqks.journal.postgres.connection import Connection
from mqks.settings import DatabaseUrl
from mqks.testing import BrokerProcess
from tests.postgres import Postgres

WARM_UP = 50
"""The first calls of a round are not timed."""
SEGMENT = "select head_crc, text_crc, head, text from segment order by id desc limit 1"
WRITTEN = "select last, segments, beat, (select count(*) from segment) from owner"


def confirms(broker: BrokerProcess, count: int) -> Seconds:
    data = payloads(count + WARM_UP)
    seconds = bare("publish", broker.port, data)
    empty(broker.port, data)
    return seconds[WARM_UP:]


class Commits:
    """A journal that no broker serves. Its owner's row is as a claim leaves it."""

    def __init__(self, url: DatabaseUrl, segment: tuple[Any, ...]) -> None:
        address = parse(url)
        asyncio.run(self._create(url))
        self._connection = psycopg.connect(**address.parameters, autocommit=True)
        self.close = self._connection.close
        claimed = "update owner set epoch = 1, holder = 'bench' returning ctid::text"
        self._place: str = self._connection.execute(claimed).fetchall()[0][0]
        head_crc, text_crc, head, text = segment
        self._segment = {
            "head_crc": Int8(head_crc),
            "text_crc": Int8(text_crc),
            "head": head,
            "text": text,
        }
        self._done = 0

    @staticmethod
    async def _create(url: DatabaseUrl) -> None:
        async with await Connection.to(parse(url)) as connection:
            await migrations.create(connection, parse(url))

    def __call__(self, count: int) -> Seconds:
        seconds = Seconds()
        statement = statements.ADD.encode()
        with self._connection.cursor(binary=True) as cursor:
            for done in range(self._done, self._done + count + WARM_UP):
                owner = Owner(1, "bench", done, done).values(self._place)
                began = perf_counter()
                values = {
                    **self._segment,
                    **owner,
                    "durable": Int8(done),
                    "new_last": Int8(done + 1),
                }
                found = cursor.execute(statement, values, prepare=True).fetchall()
                seconds.append(perf_counter() - began)
                if len(found) != 1:
                    raise RuntimeError(f"commit {done + 1} found {found}")
                [(self._place,)] = found
        self._done += count + WARM_UP
        row = self._connection.execute(WRITTEN.encode()).fetchone()
        if row != (self._done,) * 4:
            raise RuntimeError(f"{row} is there after {self._done} commits")
        return seconds[WARM_UP:]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000, help="commits of a program in a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    seconds: dict[str, list[Seconds]] = {"commit": [], "confirm": []}
    with (
        Postgres(fsync="on", synchronous_standby_names="standby") as primary,
        Postgres(primary=primary, fsync="on"),
        BrokerProcess(primary.url()) as broker,
    ):
        with connect_blocking(broker.url) as client:
            client.subscribe("q0", ["e"])
            client.publish("e", payloads(1)[0], confirm=True)
            with psycopg.connect(**parse(DatabaseUrl(primary.url())).parameters) as reader:
                segment = reader.execute(SEGMENT.encode()).fetchone()
            assert segment
            client.purge("q0")
        with closing(Commits(DatabaseUrl(primary.url("bare")), segment)) as commits:
            for turn in range(options.rounds):
                for program in sorted(seconds, reverse=bool(turn % 2)):
                    seconds[program].append(
                        commits(options.count)
                        if program == "commit"
                        else confirms(broker, options.count)
                    )
    print(f"{'µs':8} {'p50':>8} {'p99':>8} {'adds':>8}")
    reference = [percentile(each, 0.5) for each in seconds["commit"]]
    for program, rounds in seconds.items():
        middles = [percentile(each, 0.5) for each in rounds]
        p99 = statistics.median(percentile(each, 0.99) for each in rounds)
        adds = statistics.median(a - b for a, b in zip(middles, reference, strict=True))
        print(f"{program:8} {statistics.median(middles):8.0f} {p99:8.0f} {adds:8.0f}")


if __name__ == "__main__":
    main()
