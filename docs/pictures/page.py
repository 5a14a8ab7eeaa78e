"""The pictures of `docs/page.md`: `python docs/pictures/page.py`.

The one rule: they show a real broker with real load, in the browser that the tests use.
"""

import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from playwright.sync_api import sync_playwright

import mqks
from mqks.testing import BrokerProcess
from mqks.users import User, hash_token

HERE = Path(__file__).parent
LOAD_S = 240.0
QUEUES = {
    "billing": ["order.paid", "refund.*"],
    "emails": ["order.**", "user.created"],
    "exports": ["report.due"],
    "fraud-check": ["order.new"],
    "invoices": ["order.paid"],
    "orders": ["order.new", "order.changed"],
    "search-index": ["product.**"],
    "thumbnails": ["image.uploaded"],
}
TOKEN = "example"
USERS = (
    User("shop", token=hash_token(TOKEN), admin=True, publish=["**"], consume=["**"], read=["**"]),
    User("grafana", token=hash_token("g"), monitoring=True),
    User("invoices", token=hash_token("i"), consume=["invoices"], publish=["invoice.*"]),
)
MISTAKES = (
    ["move", "order", "orders"],
    ["purge", "exports", "--limit=0"],
    ["stats", "queue", "mail"],
)
FORM = {"Event": "order.new", "Data": '{"number": 4711, "total": 49.9}', "Attributes": "trace=7"}
REASONS = (
    "LookupError: no such customer 4711",
    "TimeoutError: no answer in 5 s",
    "KeyError: 'total'",
)
VIEWS = {
    "overview": ("/", 850),
    "queues": ("/queues", 640),
    "queue": ("/queue?name=orders", 1200),
    "dead-letters": ("/queue?name=dead-letters", 1200),
    "delete": ("/queue?name=exports", 640),
    "tail": ("/tail?events=order.**", 640),
    "trace": ("/message?id=4711", 640),
    "batch": ("/batch?name=film-17", 640),
    "held": ("/queue?name=scenes#unacked", 640),
    "job": ("/message?id=scene-38", 640),
    "consumers": ("/consumers", 640),
    "connections": ("/connections", 640),
    "connection": ("/connections", 640),
    "schedules": ("/schedules", 640),
    "errors": ("/errors", 640),
    "limits": ("/limits", 700),
    "users": ("/users", 640),
    "publish": ("/publish", 760),
}
"""Path and height of each picture."""
WIDTH = 1366
EVENTS = ["order.new"] * 8 + ["order.paid"] * 5 + ["product.changed"] * 4 + ["image.uploaded"] * 2
EVENTS += ["order.changed", "user.created", "refund.new", "report.due"]


def load(url: str, is_over: threading.Event) -> None:
    """Publish, consume, ack and reject, faster and slower."""
    random = Random(7)
    with mqks.blocking.connect(url, client_name="shop-web") as client:
        number = 1000
        while not is_over.wait(0.1):
            number += 1
            wave = 40 + 30 * (int(time.monotonic() / 6) % 2)
            client.publish_many(
                (
                    random.choice(EVENTS),
                    {"number": number * 100 + each, "customer": "c-4711", "total": 49.9},
                )
                for each in range(random.randrange(wave // 2, wave))
            )
            if number % 50 == 0:
                client.publish("order.changed", {"number": number}, delay_s=3600)


def work(url: str, queue: str, is_over: threading.Event) -> None:
    random = Random(queue)
    with (
        mqks.blocking.connect(url, client_name=f"{queue}-1") as client,
        client.consume(queue, prefetch=20) as consumer,
    ):
        while not is_over.is_set():
            try:
                message = consumer.receive(timeout_s=1)
            except TimeoutError:
                continue
            if random.random() < 0.02:
                message.reject(dead=True, reason=random.choice(REASONS))
            else:
                time.sleep(0.002)
                message.ack()


@contextmanager
def film(url: str) -> Iterator[None]:
    """A batch of which some messages are done, some are dead and some are held."""
    with mqks.blocking.connect(url, client_name="encoder-1") as client:
        client.subscribe("scenes", ["scene.encode"])
        client.set_queue("scenes", retries=1)
        with client.batch("film-17", then=("film.join", 17), on_dead=("film.failed", 17)) as batch:
            for number in range(60):
                scene = f"scene-{number}"
                batch.publish("scene.encode", {"scene": number}, id=scene, keep_result_s=3600)
        with client.consume("scenes", prefetch=6, cancellable=True) as consumer:
            for number in range(38):
                message = consumer.receive()
                if number in (7, 21):
                    message.reject(dead=True)
                else:
                    message.ack(result={"seconds": 40})
            for number in range(6):
                message = consumer.receive()
                message.progress(15 * number + 10, "sound" if number % 2 else "pictures")
            yield


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        users = Path(directory) / "users"
        users.write_text("".join(each.line() for each in USERS))
        flags = "--http-port", "0", "--page", "full", "--users", str(users), "--broker-name", "shop"
        with BrokerProcess(Path(directory) / "mqks.db", *flags) as server:
            while not (found := re.search(r"address=(http://\S+)", server.log)):
                time.sleep(0.01)
            url = server.url.replace("://", f"://{TOKEN}@")
            with mqks.blocking.connect(url, client_name="deploy") as client:
                for queue, events in QUEUES.items():
                    plain = [each for each in events if "*" not in each]
                    masks = [each for each in events if "*" in each]
                    client.subscribe(queue, plain, masks=masks)
                    client.set_queue(queue, retries=5, dead_letter_queue="dead-letters")
                client.set_queue("orders", ack_timeout_s=60, ttl_s=86_400, single_consumer=True)
                client.schedule("nightly", "0 3 * * *", "report.due", tz="Europe/Berlin")
                client.schedule("heartbeat", None, "beat", "x", every_s=5)
                client.schedule("cleanup", None, "clean", every_s=5, to="cleaners")
                client.set_queue("thumbnails", rate="25/s")
                client.pause("exports", deliveries=True)
                client.trace("4711")
                for words in MISTAKES:
                    with suppress(mqks.RequestFailed):
                        client.request(*words)
            take(url, found[1])


def take(url: str, web: str) -> None:
    is_over = threading.Event()
    workers = [threading.Thread(target=load, args=(url, is_over))]
    for queue in ("billing", "emails", "fraud-check", "orders", "search-index", "thumbnails"):
        workers.append(threading.Thread(target=work, args=(url, queue, is_over)))
    for each in workers:
        each.start()
    try:
        with sync_playwright() as playwright, film(url):
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            context = browser.new_context(
                base_url=web, color_scheme="light", timezone_id="Europe/Berlin"
            )
            page = context.new_page()
            page.goto("/login")
            page.get_by_label("Token").fill(TOKEN)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_timeout(LOAD_S * 1000)
            with mqks.blocking.connect(url, client_name="shop-web") as client:
                client.publish("order.new", {"number": 4711, "total": 49.9}, id="4711")
            for name, (path, height) in VIEWS.items():
                page.set_viewport_size({"width": WIDTH, "height": height})
                page.goto(path)
                if name == "connection":
                    page.get_by_role("row").filter(has_text="search-index").get_by_role(
                        "link"
                    ).first.click()
                if name == "delete":
                    page.get_by_role("button", name="Delete queue").click()
                if name == "publish":
                    for label, text in FORM.items():
                        page.get_by_label(label, exact=label == "Event").fill(text)
                page.wait_for_timeout(5_000)
                page.screenshot(path=HERE / f"page-{name}.png")
            for name, width in (("dark", WIDTH), ("phone", 390)):
                page.goto("about:blank")  # A chart is drawn again for other colours.
                page.emulate_media(color_scheme="dark" if name == "dark" else "light")
                page.set_viewport_size({"width": width, "height": 850})
                page.goto("/")
                page.wait_for_timeout(5_000)
                page.screenshot(path=HERE / f"page-{name}.png")
            browser.close()
    finally:
        is_over.set()
        for each in workers:
            each.join()


if __name__ == "__main__":
    main()
