"""docs/cookbook.md: each recipe runs as it is written there, and does what the page says of it.

The one rule: what runs is taken from the page, or from what it links to. Programs are processes,
and so is the broker; both are killed where the page says that this does no harm.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import itemgetter
from pathlib import Path
from time import time

import pytest

from mqks import BlockingClient
from tests.kit.kitchen import RECIPES, Kitchen
from tests.kit.postgres import Postgres
from tests.kit.program import Program
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until


def waiting(client: BlockingClient, queue: str) -> int:
    return int(client.evaluate(f"len(state.queues[{queue!r}])"))


def peeked(client: BlockingClient, queue: str) -> list[str]:
    return [message.text for message in client.peek(queue, limit=1000)]


def everything(programs: list[Program]) -> list[str]:
    return [line for program in programs for line in program.lines]


def reaches(fragments: list[str], lines: set[str]) -> None:
    """Each of these beginnings of lines is among the lines."""
    for fragment in fragments:
        assert any(line.startswith(fragment) for line in lines), f"never killed before {fragment}"


@pytest.fixture
def kitchen(db: Path, tmp_path: Path) -> Iterator[Kitchen]:
    with ServerProcess(db) as broker:
        yield Kitchen(broker, tmp_path / "kitchen")


def test_every_recipe_is_tested_and_says_what_holds() -> None:
    tests = {name for name, _ in inspect.getmembers(sys.modules[__name__], inspect.isfunction)}
    assert len(RECIPES) > 10
    for title, text in RECIPES.items():
        assert "test_" + re.sub(r"\W", "_", title.lower()) in tests
        assert "\n- Holds: " in text
        assert "\n- Does not hold: " in text


def test_worker_pool(kitchen: Kitchen) -> None:
    kitchen.begin("Worker pool")
    with (
        kitchen.start("pool.py") as one,
        kitchen.start("pool.py") as other,
        kitchen.start("pool.py") as third,
    ):
        workers = [one, other, third]
        kitchen.sh()
        # All have some; then one is killed in the middle.
        until(lambda: all(worker.lines for worker in workers))
        one.end(signal.SIGKILL)
        jobs = set(map(str, range(1, 61)))
        until(lambda: {line.split()[1] for line in everything(workers)} == jobs)
        assert other.end(signal.SIGTERM) == third.end(signal.SIGTERM) == 0
    done = Counter(line.split()[1] for line in everything(workers))
    twice = {job for job, times in done.items() if times > 1}
    # No more than it held may have been done and not acked.
    assert max(done.values()) <= 2
    assert len(twice) <= 2
    assert twice <= {line.split()[1] for line in one.lines}
    with kitchen.client() as client:
        assert waiting(client, "thumbnails") == 0


class Shop(ThreadingHTTPServer):
    """What webhooks are posted to; it fails as its paths say, and remembers when."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hook)
        self.posts: list[tuple[str, float]] = []

    def times(self, path: str) -> list[float]:
        return [when for each, when in self.posts if each == path]


class Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Shop)
        self.server.posts.append((self.path, time()))
        tries = len(self.server.times(self.path))
        code = {"/ok": 200, "/gone": 404, "/down": 503}.get(self.path, 503 if tries < 3 else 200)
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.mark.slow
def test_retry_with_backoff(kitchen: Kitchen) -> None:
    kitchen.begin("Retry with backoff")
    with Shop() as shop, kitchen.start("webhooks.py"), kitchen.client() as client:
        threading.Thread(target=shop.serve_forever, daemon=True).start()
        for path in ("/flaky", "/down", "/gone", "/ok"):
            hook = {"url": f"http://127.0.0.1:{shop.server_port}{path}", "body": "hello"}
            client.publish("webhook.due", hook, id=path, confirm=True)
        # Both that failed pause, also over a crash of the broker; the others are done by then.
        until(lambda: len(client.peek("webhooks", scheduled=True)) == 2)
        until(lambda: shop.times("/ok") and shop.times("/gone"))
        until(lambda: unacked(client, "webhooks") == waiting(client, "webhooks") == 0)
        client.publish("nobody", "", confirm=True)  # Behind the acks.
        kitchen.bounce()
        until(lambda: len(shop.times("/flaky")) == 3)
        until(lambda: len(client.peek("webhooks.dead")) == 2)
        until(lambda: waiting(client, "webhooks") == 0)
        assert not client.peek("webhooks", scheduled=True)
        for path in ("/flaky", "/down"):
            first, second, third = shop.times(path)
            assert second - first >= 0.45
            assert third - second >= 0.9
        assert len(shop.times("/gone")) == len(shop.times("/ok")) == 1
        assert {
            (letter.id, letter.dead_letter and letter.dead_letter.reason)
            for letter in client.peek("webhooks.dead")
        } == {("/gone", "dead"), ("/down", "rejects")}
        assert client.redrive("webhooks.dead", limit=1) == 1
        until(lambda: len(shop.times("/gone")) == 2)
        shop.shutdown()


@pytest.mark.slow
def test_poison_messages(kitchen: Kitchen) -> None:
    kitchen.begin("Poison messages")
    texts = [*map(str, range(5)), "poison", *map(str, range(5, 10))]
    with kitchen.client() as client:
        client.publish_many(("document.new", text) for text in texts)
        parsed: list[str] = []
        for died in range(3):
            with kitchen.start("parser.py") as parser:
                assert parser.end() == -signal.SIGABRT
            parsed += parser.lines
            until(lambda: unacked(client, "documents") == 0)  # The broker has seen the death,
            client.subscribe("later", [f"later.{died}"])  # and it is on disk.
            assert len(client.peek("documents.dead")) == (died == 2)
            if died == 1:
                kitchen.bounce()  # Counts for nothing, and loses no count.
        with kitchen.start("parser.py") as parser:
            until(lambda: len(parsed) + len(parser.lines) == 10)
            until(lambda: len(client.evaluate("state.consumers_by_queues['documents']")) > 2)
            assert parser.end(signal.SIGTERM) == 0
        parsed += parser.lines
        assert sorted(parsed) == [f"parsed {number}" for number in range(10)]
        (letter,) = client.peek("documents.dead")
        assert letter.text == "poison"
        assert letter.dead_letter
        assert letter.dead_letter.reason == "losses"
        *_, redriven = out = kitchen.sh()
        assert any("poison" in line and "losses" in line for line in out), out
        assert "1" in redriven
        assert peeked(client, "documents") == ["poison"]


@pytest.mark.slow
def test_delayed_and_scheduled_jobs(kitchen: Kitchen) -> None:
    out = "\n".join(kitchen.begin("Delayed and scheduled jobs"))
    assert "call Ann" in out or "call-ann" in out
    with kitchen.client() as client:
        assert peeked(client, "reminders") == ["call Ann"]
        assert client.peek("reminders", scheduled=True) == []

        kitchen.sh()
        assert {row["name"] for row in client.schedules()} == {"nightly", "pulse"}
        # Runs go on over kills of the broker, and each is there once.
        for _ in range(3):
            there = waiting(client, "reports")
            until(lambda: waiting(client, "reports") > there + 1)  # noqa: B023
            kitchen.bounce()
        ids = [message.id for message in client.peek("reports")]
        assert len(ids) == len(set(ids))
        seconds = sorted(int(id.removeprefix("pulse:")) for id in ids)
        assert seconds == [*range(seconds[0], seconds[0] + len(seconds))]


@pytest.mark.slow
def test_request_and_reply(kitchen: Kitchen) -> None:
    kitchen.begin("Request and reply")
    with kitchen.start("prices.py") as service, kitchen.client() as client:
        assert kitchen.run("ask.py") == ["tea costs 3", "milk: KeyError"]
        # An instance dies with the request in hand.
        until(lambda: client.evaluate("len(state.queues_by_consumer_ids)") == "1")
        service.process.send_signal(signal.SIGSTOP)
        with kitchen.start("ask.py") as asking:
            until(lambda: waiting(client, "prices") == 0 and unacked(client, "prices") == 1)
            service.process.kill()
            with kitchen.start("prices.py"):
                assert asking.end() == 0
            assert asking.lines == ["tea costs 3", "milk: KeyError"]
        until(lambda: client.evaluate("len(state.queues_by_consumer_ids)") == "0")
        # Nobody serves, and nothing is left of the request.
        with pytest.raises(TimeoutError):
            client.call("price.get", "tea", timeout_s=0.2)
        until(lambda: waiting(client, "prices") == 0)


def unacked(client: BlockingClient, queue: str) -> int:
    return int(client.stats("queue", queue)["unacked"])


@pytest.mark.slow
def test_at_most_n_waiting(kitchen: Kitchen) -> None:
    kitchen.begin("At most N waiting")
    with kitchen.client() as client:
        until(lambda: peeked(client, "readings") == ["8", "9", "10"])
        with kitchen.start("uploader.py") as uploader:
            until(lambda: len(uploader.lines) > 3)
            assert peeked(client, "uploads") == [*map(str, range(100))]
            assert all(line.startswith("100: ") for line in uploader.lines)
            assert "None" not in uploader.lines[0]
            with client.consume("uploads") as uploads:
                for number in range(150):
                    with uploads.receive(WAIT_S).process() as message:
                        assert message.text == str(number)
            assert uploader.end() == 0
        assert waiting(client, "uploads") == 0


@pytest.mark.slow
def test_fan_out_by_masks(kitchen: Kitchen) -> None:
    out = "\n".join(kitchen.begin("Fan-out by masks"))
    assert "billing" in out
    assert "audit" in out
    assert "alerts" not in out
    with kitchen.client() as client:
        assert peeked(client, "billing") == ["17"]
        assert peeked(client, "audit") == ["17", "17"]
        assert peeked(client, "alerts") == ["18"]
        with kitchen.start("cache.py") as one, kitchen.start("cache.py") as other:
            until(lambda: one.lines and other.lines)
            client.publish("user.7.renamed", "Ann", confirm=True)
            client.publish("order.paid", "19", confirm=True)
            client.publish("user.8", "Bob", confirm=True)
            for cache in (one, other):
                until(lambda cache=cache: len(cache.lines) == 3)  # type: ignore[misc]
                assert cache.lines[1:] == ["user.7.renamed Ann", "user.8 Bob"]
                queue = cache.lines[0].split()[-1]
                about = json.loads(client.request("stats", "queue", queue))
                assert {"delay_s": 60} in about.values()


def orders(client: BlockingClient) -> list[int]:
    return [json.loads(text)["order"] for text in peeked(client, "shipping")]


NEVER = 1_000_000
"""The line before which a program is killed that ends by itself."""
OUTBOX_LINES = range(6, 24)
"""Before which a relay is killed: they are more than the loop has with two rows in the outbox."""


class Outbox:
    """Of a shop, with its relay: what both recipes of an outbox promise."""

    def __init__(self, kitchen: Kitchen, name: str, select: Callable[[str], list[int]]) -> None:
        self._kitchen, self._select = kitchen, select
        self._shop, self._relay = f"{name}_shop.py", f"{name}_relay.py"

    def committed(self) -> list[int]:
        return self._select("SELECT id FROM orders ORDER BY id")

    def waiting(self) -> int:
        return self._select("SELECT count(*) FROM outbox")[0]

    def order(self, *items: str) -> None:
        for item in items:
            self._kitchen.killed(NEVER, self._shop, item)

    def check_shop(self, lines: int, points: list[str]) -> None:
        """Killed before each line, it has an order and its message, or neither."""
        self._kitchen.run(self._shop, "tea")
        killed_before = set[str]()
        for line in range(1, lines):
            killed_before.add(self._kitchen.killed(line, self._shop, "tea")[0])
            assert self.waiting() == len(self.committed())
        reaches(points, killed_before)
        assert "" in killed_before, "not every line was reached"
        with self._kitchen.start(self._relay):
            until(lambda: not self.waiting())

    def check_relay(self, client: BlockingClient, points: list[str]) -> None:
        """Killed before each line, as is the broker at times, it keeps the order of orders."""
        killed_before = set[str]()
        for line in OUTBOX_LINES:
            if self.waiting() < 2:
                self.order("coffee")
            killed_before.add(self._kitchen.killed(line, self._relay)[0])
            if line % 8 == 0:
                self._kitchen.bounce()
            found = orders(client)
            assert found == self.committed()[: len(found)]
        reaches(points, killed_before)


@pytest.mark.slow
def test_outbox_in_sqlite(kitchen: Kitchen) -> None:
    kitchen.begin("Outbox in SQLite")

    def select(query: str) -> list[int]:
        path = kitchen.programs["sqlite_shop.py"].with_name("shop.db")
        with closing(sqlite3.connect(path)) as shop:
            return [number for (number,) in shop.execute(query)]

    outbox = Outbox(kitchen, "sqlite", select)
    outbox.check_shop(14, ["order =", "data =", 'db.execute("INSERT INTO outbox', "with db:"])
    with kitchen.client() as client:
        points = ["rows =", "for id,", "client.publish", "with db:", "db.executemany", "if not"]
        outbox.check_relay(client, points)
        # The broker is killed while two relays work.
        with kitchen.start("sqlite_relay.py"), kitchen.start("sqlite_relay.py"):
            for _ in range(3):
                outbox.order("milk", "sugar")
                kitchen.bounce()
            until(lambda: not outbox.waiting())
        assert sorted(orders(client)) == outbox.committed()


@pytest.mark.slow
def test_outbox_in_postgresql(kitchen: Kitchen, postgres: Postgres) -> None:
    kitchen.begin("Outbox in SQLite")
    kitchen.take("Outbox in PostgreSQL")
    kitchen.environment |= postgres.environment

    def select(query: str) -> list[int]:
        with postgres.connection() as db:
            return [number for (number,) in db.execute(query.encode())]

    outbox = Outbox(kitchen, "postgres", select)
    outbox.check_shop(17, ["row =", "data =", 'db.execute("INSERT INTO outbox', "with psy"])
    with kitchen.client() as client:
        points = ["with db.tr", "rows =", "for id,", "client.publish", "db.execute(", "if not"]
        outbox.check_relay(client, points)
        # The broker is killed while two relays work; then PostgreSQL, which ends the relays.
        with kitchen.start("postgres_relay.py") as one, kitchen.start("postgres_relay.py") as other:
            for _ in range(2):
                outbox.order("milk", "sugar")
                kitchen.bounce()
            until(lambda: not outbox.waiting())
            postgres.kill()
            assert one.end() == other.end() == 1
        postgres.start()
        # A row that another relay has locked is left to that one, and the others go on.
        outbox.order("pepper")
        with postgres.connection() as other_relay, other_relay.transaction():
            other_relay.execute("SELECT FROM outbox FOR UPDATE")
            outbox.order("salt")
            with kitchen.start("postgres_relay.py"):
                until(lambda: orders(client)[-1] == outbox.committed()[-1])
                assert outbox.committed()[-2] not in orders(client)
        with kitchen.start("postgres_relay.py"):
            until(lambda: not outbox.waiting())
        assert sorted(orders(client)) == outbox.committed()


@pytest.mark.slow
def test_consume_and_produce(kitchen: Kitchen) -> None:
    kitchen.begin("Consume and produce")
    orders = [{"id": n, "items": n % 7, "mail": f"{n}@example.org"} for n in range(1000)]
    with kitchen.client() as client:
        client.publish_many(("order.paid", order) for order in orders)
        for ends_the_broker in (False, True, False):
            before = waiting(client, "mails")
            with kitchen.start("transform.py"):
                until(lambda: waiting(client, "mails") > before + 50)  # noqa: B023
            if ends_the_broker:
                kitchen.bounce()
            assert waiting(client, "mails") < 1000
        with kitchen.start("transform.py"), kitchen.start("transform.py"):
            until(lambda: waiting(client, "orders") + unacked(client, "orders") == 0)
        mails = [json.loads(message.text) for message in client.peek("mails", limit=2000)]
        packing = [json.loads(message.text) for message in client.peek("packing", limit=2000)]
    key = itemgetter("order")
    assert sorted(mails, key=key) == [{"order": o["id"], "to": o["mail"]} for o in orders]
    assert sorted(packing, key=key) == [{"order": o["id"], "items": o["items"]} for o in orders]


@pytest.mark.slow
def test_fan_out_and_fan_in(kitchen: Kitchen) -> None:
    kitchen.begin("Fan-out and fan-in")
    kitchen.sh()  # Before there is any worker.
    with kitchen.start("crawl.py") as one, kitchen.start("crawl.py") as other:
        both = [one, other]
        until(lambda: "site.done small" in everything(both))
        with kitchen.start("pages.py", "large", "200") as site:
            assert site.end() == 0
        until(lambda: len(everything(both)) > 20)
        one.end(signal.SIGKILL)
        kitchen.bounce()
        until(lambda: "site.failed large" in everything(both))
    told = Counter(line for line in everything(both) if line.startswith("site."))
    assert told == {"site.done small": 1, "site.failed large": 1}
    fetched = {line for line in everything(both) if line.startswith("fetched")}
    assert fetched == {f"fetched {page}" for page in range(200) if page != 13}


@pytest.mark.slow
def test_a_pipeline_of_three_steps(kitchen: Kitchen) -> None:
    kitchen.begin("A pipeline of three steps")
    workers = list[Program]()
    with kitchen.client() as client:
        with kitchen.start("films.py") as worker:
            workers.append(worker)
            kitchen.sh()
            until(lambda: len(workers[0].lines) > 20)
        kitchen.bounce()
        with kitchen.start("films.py") as worker:
            workers.append(worker)
            until(lambda: waiting(client, "cinema") == 20)
            until(lambda: waiting(client, "films") + unacked(client, "films") == 0)
        assert sorted(peeked(client, "cinema"), key=int) == [str(film) for film in range(1, 21)]
    encoded = {line.removeprefix("encoded ") for line in everything(workers)}
    assert encoded == {f"{film}/{part}" for film in range(1, 21) for part in range(8)}


@pytest.mark.slow
def test_a_nightly_import(kitchen: Kitchen) -> None:
    kitchen.begin("A nightly import")
    with kitchen.client() as client:
        kitchen.sh()
        with kitchen.start("nightly.py", "100000"):
            until(lambda: waiting(client, "rows.dead") > 2)
        kitchen.bounce()
        with kitchen.start("nightly.py", "100000") as worker:
            until(lambda: worker.lines)
        assert worker.lines == ["100000 rows, 10 failed"]
        assert waiting(client, "rows.dead") == 10


@pytest.mark.slow
def test_a_limited_api(kitchen: Kitchen) -> None:
    kitchen.begin("A limited API")
    with kitchen.start("lookups.py") as one, kitchen.start("lookups.py") as other:
        kitchen.sh()
        with kitchen.client() as client:
            until(lambda: waiting(client, "answers") == 1)
        until(lambda: len(everything([one, other])) == 100)
        times = sorted(float(line.split()[0]) for line in everything([one, other]))
    # 50 at once, and the others at the rate: what is printed may be late, but not early.
    assert times[-1] - times[0] > 0.9


@pytest.mark.slow
def test_exactly_once_effects(kitchen: Kitchen) -> None:
    kitchen.begin("Exactly-once effects")
    killed_before, paid = set[str](), 0
    with kitchen.client() as client:
        for line in range(8, 31):
            for number in range(5):
                amount = line * 100 + number
                # Some are published twice, as by a publisher that has got no confirm.
                for _ in range(1 + number % 2):
                    payment = {"to": "Ann", "amount": amount}
                    client.publish("payment.received", payment, id=f"p{amount}", confirm=True)
                paid += amount
            killed_before.add(kitchen.killed(line, "ledger.py")[0])
            if line % 8 == 0:
                kitchen.bounce()
        points = ["for payment", "with payment", "if db.execute", "db.execute(BOOK", "print("]
        reaches(points, killed_before)
        with kitchen.start("ledger.py"):
            kitchen.bounce()
            until(lambda: waiting(client, "payments") + unacked(client, "payments") == 0)
    file = kitchen.programs["ledger.py"].with_name("ledger.db")
    with closing(sqlite3.connect(file)) as ledger:
        assert ledger.execute("SELECT name, balance FROM accounts").fetchall() == [("Ann", paid)]
        assert ledger.execute("SELECT count(*) FROM processed").fetchone() == (5 * 23,)
