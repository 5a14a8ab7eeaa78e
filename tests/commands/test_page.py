"""The web page, in a real browser: every view and action, hostile names, many queues, a broker that
goes and comes back."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

import mqks
from mqks import BlockingClient
from mqks.client.blocking import connect
from mqks.inspection.text import moment
from mqks.page.app import TAILS_MAX
from mqks.page.live import WATCHERS_MAX
from mqks.page.sessions import SESSIONS_MAX
from mqks.pipeline.reader import QueueReader
from mqks.settings import PAGE_PORT, DatabaseUrl
from mqks.users import User, hash_password, hash_token
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
HOSTILE = "<b/onclick=alert(1)>q</b>&amp;'\"\x01é"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT_S * 1000)
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def server(db: Path) -> Iterator[ServerProcess]:
    with ServerProcess(db, "--http-port", "0", "--page", "full") as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    with opened(browser, server) as page:
        yield page


@contextmanager
def opened(browser: Browser, server: ServerProcess, **options: Any) -> Iterator[Page]:
    """A page that fails the test for anything that its scripts or its policy complain of."""
    context = browser.new_context(base_url=web_url(server), **options)
    context.set_default_timeout(WAIT_S * 1000)
    page, faults = context.new_page(), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda told: faults.append(told.text) if "Policy" in told.text else None)
    page.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))
    try:
        yield page
    except BaseException:
        print(server.log)
        raise
    context.close()
    assert faults == []


@contextmanager
def looked_at(
    browser: Browser, db: Path, *flags: str
) -> Iterator[tuple[ServerProcess, BlockingClient, Page]]:
    """A server whose page only shows, a client, and a page."""
    with (
        ServerProcess(db, "--http-port", "0", "--page", "read", *flags) as server,
        connect(server.url) as client,
        opened(browser, server) as page,
    ):
        yield server, client, page


def web_url(server: ServerProcess) -> str:
    until(lambda: "address=http://" in server.log)
    return str(re.findall(r"address=(http://\S+)", server.log)[0])


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BlockingClient]:
    """Where the queue orders is bound to order.new."""
    with connect(server.url) as client:
        client.subscribe("orders", ["order.new"])
        yield client


def asked(url: str, form: dict[str, Any] | None = None, **headers: str) -> tuple[int, str]:
    """With which status an HTTP request is answered, and which cookie is set."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    data = None if form is None else urlencode(form).encode()
    try:
        answer = urlopen(Request(url, data, named))
    except HTTPError as failure:
        answer = failure
    with answer:
        return answer.status, answer.headers["Set-Cookie"] or ""


def new_cookie(url: str, **headers: str) -> str:
    """Of a session, as it is sent back; empty when none is set."""
    return asked(url, None, **headers)[1].partition(";")[0]


def titled(page: Page, title: str) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text(title)


def sure(page: Page, button: str, notice: str) -> None:
    """Press a button, say yes, and see what was done."""
    page.get_by_role("button", name=button, exact=True).first.click()
    titled(page, page.locator("button.sure").text_content() or "?")
    if (typed := page.get_by_label("to confirm")).count():
        typed.fill(page.locator("label code").text_content() or "")
    page.locator("button.sure").click()
    expect(page.locator(".notice")).to_contain_text(notice)


def test_rates_move_while_the_page_is_open(page: Page, client: BlockingClient) -> None:
    page.goto("/")
    titled(page, "Overview")
    ready = page.locator("[data-number='totals.messages_ready']")
    expect(ready).to_have_text("0")
    client.publish("order.new", "x", confirm=True)
    expect(ready).to_have_text("1")
    published = page.locator("[data-number='rates_per_s.received']")
    expect(published).not_to_have_text("")
    expect(page.locator("#chart canvas")).to_be_visible()
    assert page.locator("#lost").is_hidden()


def test_history_is_kept_when_nobody_looks(page: Page, client: BlockingClient) -> None:
    def history(path: str) -> list[list[float]]:
        page.goto(path)
        charts = page.locator("#chart")
        return json.loads(charts.get_attribute("data-history") or "") if charts.count() else []

    until(lambda: bool(history("/queue?name=orders")))
    page.goto("about:blank")
    client.publish_many([("order.new", n) for n in range(70)])
    until(lambda: history("/queue?name=orders")[-1][3] == 70)
    assert sum(point[1] for point in history("/queue?name=orders")) > 0
    assert sum(point[1] for point in history("/")) > 0
    expect(page.get_by_text("it keeps nothing of before")).to_be_visible()
    legend = page.locator(".u-legend")
    expect(legend).to_contain_text(re.compile(r"UTC:?\s*\d\d:\d\d:\d\d"))
    expect(legend).to_contain_text(re.compile(r"Published:?\s*[\d.]+"))
    assert len(history("/?range=day")) <= client.stats()["uptime_s"] // 60
    page.goto("/queue?name=orders")
    expect(page.locator(".u-legend")).to_contain_text(re.compile(r"Messages:?\s*70"))
    # The figures of a queue move, too.
    ready = page.locator("[data-number='queue.ready']")
    expect(ready).to_have_text("70")
    client.purge("orders")
    expect(ready).to_have_text("0")
    expect(page.locator(".u-legend")).to_contain_text(re.compile(r"Messages:?\s*0"))


def test_queues_are_sorted_and_filtered(page: Page, client: BlockingClient) -> None:
    client.delete_queue("orders")
    for name, count in (("a", 1), ("b", 3), ("other", 2)):
        client.subscribe(name, [name])
        client.publish_many((name, n) for n in range(count))
    page.goto("/queues")
    names = page.locator("#rows td.queue")
    expect(names).to_have_text(["b", "other", "a"])
    page.get_by_role("link", name="Name").click()
    expect(names).to_have_text(["a", "b", "other"])
    page.get_by_label("Filter").fill("OTH")  # Is filtered while one types.
    expect(names).to_have_text(["other"])
    assert "filter=OTH" in page.url
    # The view stays as it is while it is renewed.
    client.publish("other", "x", confirm=True)
    expect(page.locator("#rows td.count").first).to_have_text("3")
    expect(names).to_have_text(["other"])
    page.get_by_label("Filter").fill("nothing")
    expect(page.get_by_text("Nothing matches nothing.")).to_be_visible()
    page.get_by_role("link", name="Show all").click()
    expect(names).to_have_count(3)


def test_without_scripts_everything_is_there(
    browser: Browser, client: BlockingClient, server: ServerProcess
) -> None:
    client.subscribe("$(reboot);", ["$(reboot);"])
    with opened(browser, server, java_script_enabled=False) as page:
        page.goto("/queues")
        page.get_by_label("Filter").fill("REB")
        page.get_by_role("button", name="Apply").click()
        page.locator("#rows td.queue").get_by_role("link").click()
        told = page.locator("pre")
        expect(told.first).to_have_text("mqks consume '$(reboot);'")
        expect(told.nth(1)).to_contain_text("mqks publish '$(reboot);' ")
        sure(page, "Delete queue", "Queue $(reboot); deleted.")


@pytest.mark.slow
def test_ten_thousand_queues(page: Page, client: BlockingClient) -> None:
    client.delete_queue("orders")
    for number in range(10_050):
        client.request("subscribe", "--confirm", f"q{number:05}", f"e{number}")
    client.publish("e4321", "x", confirm=True)
    page.goto("/queues")
    expect(page.locator("#count")).to_have_text("10,000 in all")
    names = page.locator("#rows td.queue")
    expect(names).to_have_count(100)
    expect(names.first).to_have_text("q04321")
    page.get_by_role("link", name="Next", exact=True).click()
    expect(page.locator(".pages span")).to_have_text("101 to 200")
    expect(page.get_by_text("10,000 of 10,050 queues shown")).to_be_visible()
    page.get_by_role("link", name="Next queues").click()
    expect(page.get_by_text("50 of 10,050 queues shown")).to_be_visible()
    expect(page.locator("#count")).to_have_text("50 in all")
    page.get_by_role("link", name="Name").click()
    expect(names.first).to_have_text("q10000")
    page.get_by_role("link", name="First queues").click()
    expect(page.locator("#count")).to_have_text("10,000 in all")
    page.goto("/queues?filter=q0999")
    expect(names).to_have_count(10)
    client.publish("e9999", "x", confirm=True)
    page.goto("/queues?filter=q09999")
    expect(page.locator("#rows td.count").first).to_have_text("1")


def test_parts_of_lists_say_so_and_where_the_rest_is(
    client: BlockingClient, page: Page, server: ServerProcess
) -> None:
    def items(place: str) -> list[str]:
        return page.locator(f"{place} code").all_text_contents()

    with ExitStack() as peers:
        peer = peers.enter_context(LineClient(server.address))
        events = [f"é{number:03}" for number in range(420)]
        client.request("subscribe", "--confirm", "q", *events, "--add-mask", "a.*", "b.*")
        for number in range(205):
            peer.send(b"c%03d consume q --keep --manual-ack --prefetch=1\n" % number)
        peer.ask(b"p ping")
        number = next(
            each["id"]
            for each in json.loads(client.request("stats", "connections"))
            if each["consumers"]
        )
        client.publish_many((events[0], n) for n in range(130))
        until(lambda: json.loads(client.request("stats", "queue", "q"))["unacked"] == 130)
        # Each consumer is told with what it holds, however many the server has.
        crowd = peers.enter_context(LineClient(server.address))
        for each in range(1100):
            crowd.send(b"a%04d consume other --keep\n" % each)
        crowd.ask(b"p ping")
        page.goto("/queue?name=q")
        expect(page.get_by_text("202 of 422 bindings shown")).to_be_visible()
        first = page.locator("section:has(> #consumers) tbody tr").first
        expect(first).to_contain_text("c000 127.0.0.1:")
        expect(first.locator("td.number").first).to_have_text("1")
        assert items("ul#events") == events[:200]
        page.get_by_role("link", name="Next events").click()
        until(lambda: items("ul#events") == events[200:400])
        page.get_by_role("link", name="Next events").click()
        until(lambda: items("ul#events") == events[400:])
        page.get_by_role("link", name="First events").click()
        until(lambda: items("ul#events") == events[:200])
        for place in ("/queue?name=q", f"/connection?number={number}"):
            page.goto(place)
            expect(page.get_by_text("200 of 205 consumers shown")).to_be_visible()
            page.get_by_role("link", name="Next consumers").click()
            expect(page.get_by_text("5 of 205 consumers shown")).to_be_visible()
            assert items("section:has(> #consumers)") == [
                f"c{number}" for number in range(200, 205)
            ]
        page.goto("/queue?name=q")
        expect(page.get_by_text("100 of 130 unacked messages shown")).to_be_visible()
        page.get_by_role("link", name="Next unacked").click()
        expect(page.get_by_text("30 of 130 unacked messages shown")).to_be_visible()
        page.get_by_role("link", name="Next messages").click()
        expect(page.locator("article")).to_have_count(20)
        expect(page.locator("article").first).to_contain_text("21 ·")
        page.get_by_role("link", name="First messages").click()
        expect(page.locator("article").first).to_contain_text("1 ·")


def test_a_page_is_not_much_larger_than_what_it_shows(page: Page, client: BlockingClient) -> None:
    """JSON that is nested deeply would grow with the square of its depth."""
    brackets = "[" * 900 + "0," * 1147 + "0" + "]" * 900
    client.subscribe("q", ["e"])
    client.publish("e", {"a": [1, {"b": None}]}, confirm=True)
    client.publish_many(("e", brackets) for _ in range(19))
    answer = page.goto("/queue?name=q")
    assert answer
    assert len(answer.body()) < 1_000_000
    shown = page.locator("article pre").all_text_contents()
    assert shown[0].split("\n")[1:4] == ['  "a": [', "    1,", "    {"]
    assert shown[1:] == [brackets] * 19


def test_hostile_names_and_payloads_stay_text(page: Page, client: BlockingClient) -> None:
    data = {"text": "</pre><script>alert(1)</script>", "list": [1, 2]}
    client.subscribe(HOSTILE, [HOSTILE])
    client.publish(HOSTILE, data, confirm=True, meta={"<i>": "<script>"})
    client.request("subscribe", "--confirm", "\udcff\udcfe", "bytes")
    client.publish("bytes", b"\xff\x00\xfe", confirm=True)
    page.goto("/queues")
    link = page.get_by_role("link", name="<b/onclick")
    expect(link).to_be_visible()
    link.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("<b/onclick=alert(1)>q</b>&amp;")
    expect(page.locator("article pre")).to_contain_text('"text": "</pre><script>alert(1)</script>"')
    expect(page.locator("main script, main b, main i")).to_have_count(0)
    page.goto("/queues")
    page.get_by_role("link", name=r"\xff\xfe").click()
    expect(page.locator("article pre")).to_have_text(repr(b"\xff\x00\xfe"))


def test_a_message_is_published_and_copied(page: Page, client: BlockingClient) -> None:
    page.goto("/publish")
    page.get_by_label("Event", exact=True).fill("order.new")
    page.get_by_label("Data").fill('\n{"no":\n17}')
    page.get_by_label("Attributes").fill("trace=7")
    page.get_by_label("Priority").fill("200")
    page.get_by_role("button", name="Publish", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("priority")
    page.get_by_label("Priority").fill("-7")
    page.get_by_label("Key", exact=True).fill("c, ü 17")
    sure(page, "Publish", "Published as ")
    page.goto("/queue?name=orders")
    expect(page.get_by_text("priority -7, key c, ü 17")).to_be_visible()
    page.get_by_role("link", name="Publish a copy").click()
    sure(page, "Publish", "Published as ")
    first, second = client.peek("orders")
    assert (
        (first.data, first.meta, first.priority, first.key)
        == (second.data, second.meta, second.priority, second.key)
        == (b'\n{"no":\n17}', {"trace": "7"}, -7, "c, ü 17")
    )
    assert first.id != second.id
    for typed, told in (
        ("user 17", "Published as "),
        ("user 17", "has its key"),
        ("user 17,on=replace", "in place of "),
    ):
        page.goto("/publish")
        page.get_by_label("Event", exact=True).fill("order.new")
        page.get_by_label("Unique key").fill(typed)
        sure(page, "Publish", told)
    page.goto("/queue?name=orders")
    expect(page.get_by_text("unique key user 17")).to_be_visible()


def test_a_form_gives_back_what_was_typed(page: Page, server: ServerProcess) -> None:
    page.goto("/publish")
    page.get_by_label("Event", exact=True).fill("nobody")
    page.get_by_label("Delay").fill("soon")
    page.get_by_role("button", name="Publish", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("delay_s: 'soon' is not a number")
    expect(page.get_by_label("Event", exact=True)).to_have_value("nobody")
    page.get_by_label("Delay").fill("")
    page.get_by_role("button", name="Publish", exact=True).click()
    page.get_by_role("link", name="Do nothing").click()
    expect(page.get_by_label("Event", exact=True)).to_have_value("nobody")
    page.get_by_role("button", name="Publish", exact=True).click()
    page.locator("button.sure").click()
    expect(page.get_by_role("alert")).to_contain_text("no queue")
    expect(page.get_by_label("Event", exact=True)).to_have_value("nobody")
    page.reload()
    page.get_by_label("Event", exact=True).fill("nobody")
    page.get_by_label("Refuse it").uncheck()
    page.get_by_role("button", name="Publish", exact=True).click()
    page.get_by_role("link", name="Do nothing").click()
    expect(page.get_by_label("Refuse it")).not_to_be_checked()
    sure(page, "Publish", "No queue is bound to the event")
    expect(page.get_by_label("Refuse it")).to_be_checked()
    for width in (1366, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("/publish")
        button = page.get_by_role("button", name="Publish", exact=True)
        expect(button).to_be_in_viewport(ratio=1)


def test_what_needs_a_person_is_first(page: Page, client: BlockingClient) -> None:
    page.goto("/")
    expect(page.locator("#well")).to_be_visible()
    until(lambda: page.goto("/queue?name=orders") and page.locator("#chart").count() == 1)
    page.goto("/")
    client.publish_many([("order.new", n) for n in range(7)])
    first = page.locator("#rows td.need").first
    expect(first).to_have_text("Grows without a consumer")
    expect(page.locator("#well")).to_be_hidden()
    page.locator("#rows").get_by_role("link", name="orders").click()
    titled(page, "orders")
    page.goto("/queues")
    expect(page.locator("#rows .badge")).to_have_text(["grows", "no consumer"])
    with client.consume("orders", prefetch=1):
        client.publish_many([("order.new", n) for n in range(1100)])
        page.goto("/")
        expect(first).to_have_text("Grows behind its consumers")
        client.pause("orders", deliveries=True)  # Another consumer would not help.
        expect(first).to_have_text("Grows while deliveries are paused")


def test_each_thing_that_needs_a_person_is_told(browser: Browser, db: Path) -> None:
    free = shutil.disk_usage(db.parent).free
    flags = "--queues-max 5 --once-ids-max 2 --queue-age-warning-s 0.1"
    flags += f" --disk-free-bytes-min {free * 2 // 3} --loop-held-s 0.005 --eval on"
    with looked_at(browser, db, *flags.split()) as (_, client, page):
        client.subscribe("orders", ["order.new"])
        client.set_queue("orders", dead_letter_queue="orders.dead")
        client.subscribe("orders.dead", ["none"])
        client.subscribe("waits", ["order.old"])
        client.subscribe("empty", ["none"])
        client.publish_many([("order.old", n) for n in range(3)])
        for each in ("a", "b"):
            client.publish("none", "x", id=each, once=True, confirm=True)
        client.purge("empty")
        client.purge("orders.dead")
        until(lambda: page.goto("/queue?name=orders.dead") and page.locator("#chart").count() == 1)
        until(lambda: "dead letters" in ((page.goto("/queues") and page.content()) or ""))
        client.publish_many([("order.new", n) for n in range(2)])
        with client.consume("orders") as consumer:
            for _ in range(2):
                consumer.receive(WAIT_S).reject(dead=True)
        with pytest.raises(mqks.RequestFailed):
            client.request("move", "--confirm", "nothing", "orders")
        client.schedule("beat", None, "order.new", "x", every_s=1, to="nothing")
        client.schedule("lost", None, "nobody", "x", every_s=1)

        def told() -> dict[str, str]:
            client.request("_eval", "sum(range(190000))")
            page.goto("/")
            rows = page.locator("#rows tr").all()
            cells = [each.locator("td").all_text_contents() for each in rows]
            return {first: " ".join(rest) for _, first, *rest in cells}

        wanted = {
            *("A limit is near", "The disk is nearly full", "Requests fail", "A schedule fails"),
            *("A schedule reaches no queue", "The event loop was held", "Dead letters grow"),
            "Messages wait for long",
        }
        until(lambda: told().keys() == wanted)
        found = told()
        assert found["A limit is near"].strip() == "queues_max: 4 of 5"
        assert found["Requests fail"].strip() == "1 in the last 10 minutes"
        assert found["A schedule reaches no queue"].strip() == "lost: no queue is bound to nobody"
        assert found["A schedule fails"].strip() == "beat: schedule: there is no queue 'nothing'"
        assert [*found][-3:] == ["Messages wait for long", "Dead letters grow", "Requests fail"]
        page.set_viewport_size({"width": 390, "height": 800})
        scrolls = "each => each.scrollHeight > each.clientHeight + 1"
        assert not page.locator(".alarming").evaluate(scrolls)
        page.set_viewport_size({"width": 1366, "height": 800})
        assert found["Dead letters grow"] == "orders.dead 2 ready, 2 more in it than 10 minutes ago"
        assert found["Messages wait for long"].startswith("waits the oldest of ")
        for what, title in (("A limit is near", "Limits"), ("A schedule fails", "Schedules")):
            page.locator("#rows").get_by_role("link", name=what).click()
            titled(page, title)
            page.goto("/")
        page.locator("#rows").get_by_role("link", name="orders.dead").click()
        titled(page, "orders.dead")
        page.goto("/queue?name=orders")
        page.get_by_role("link", name="orders.dead").click()
        titled(page, "orders.dead")
        with client.consume("waits", prefetch=1) as consumer:
            consumer.receive(WAIT_S)
            page.goto("/queue?name=waits")
            page.locator("section:has(> #consumers)").get_by_role("link").click()
            expect(page.locator("#rows")).to_contain_text("waits")


def test_a_queue_is_purged_moved_and_deleted(
    client: BlockingClient, page: Page, server: ServerProcess
) -> None:
    client.subscribe("others", ["other"])
    client.publish_many([("order.new", n) for n in range(3)])
    page.goto("/queue?name=orders")
    page.get_by_label("all ready messages to").fill("orders")
    page.get_by_role("button", name="Move", exact=True).click()
    page.locator("button.sure").click()
    expect(page.get_by_role("alert")).to_contain_text("the server refused the request")
    expect(page.get_by_label("all ready messages to")).to_have_value("orders")
    page.get_by_label("all ready messages to").fill("others")
    sure(page, "Move", "3 messages moved to others.")
    page.goto("/queue?name=others")
    sure(page, "Purge", "3 messages purged.")
    client.publish_many([("other", n) for n in range(3212)])
    client.publish("other", "x", delay_s=3600, confirm=True)
    with connect(server.url) as other, other.consume("others", prefetch=12) as consumer:
        consumer.receive(WAIT_S)
        until(lambda: client.stats("queue", "others")["unacked"] == 12)
        page.get_by_role("button", name="Delete queue").click()
        told = "It has 3,200 ready, 12 unacked and 1 scheduled messages, and 1 consumer."
        expect(page.get_by_text(told)).to_be_visible()
        page.get_by_role("link", name="Do nothing").click()
    page.goto("/queue?name=others")
    sure(page, "Delete queue", "Queue others deleted.")
    names = page.locator("#rows td.queue")
    expect(names).to_have_text(["orders"])
    assert client.peek("orders") == []


def test_scheduled_messages_are_promoted_and_cancelled(page: Page, client: BlockingClient) -> None:
    for name in ("one", "two", "three"):
        client.publish("order.new", name, id=name, confirm=True, delay_s=3600)
    page.goto("/queue?name=orders")
    page.get_by_role("link", name="Show scheduled messages").click()
    [first, *_] = client.peek("orders", scheduled=True)
    assert first.due is not None
    due = moment(int(first.due * 1e6))
    expect(page.locator("summary.line").first).to_contain_text(due)
    sure(page, "Deliver now", "1 message promoted.")
    assert [each.id for each in client.peek("orders")] == ["one"]
    page.get_by_role("link", name="Show scheduled messages").click()
    sure(page, "Cancel", "Message two is cancelled.")
    sure(page, "Cancel all scheduled", "1 message cancelled.")
    assert client.peek("orders", scheduled=True) == []


def test_a_message_is_cancelled_whatever_its_state(
    page: Page, client: BlockingClient, server: ServerProcess
) -> None:
    for name in ("held", "ready"):
        client.publish("order.new", name, id=name, confirm=True, keep_result_s=60)
    with LineClient(server.address) as worker:
        start = b"c consume --confirm orders --manual-ack --prefetch=1 --cancellable"
        assert worker.ask(start) == b"c ok "
        assert worker.line() == b"c ok held event=order.new held"
        assert worker.ask(b"p progress --confirm c held 40 colours") == b"p ok "
        page.goto("/queue?name=orders")
        ready = page.locator("article", has_text="id ready")
        ready.get_by_role("button", name="Cancel").click()
        page.get_by_role("link", name="Do nothing").click()
        assert client.job("ready").state().state == "waiting"
        ready.get_by_role("button", name="Cancel").click()
        page.get_by_label("Reason").fill("x" * 200)
        page.evaluate("document.querySelector('[name=reason]').value = 'é'.repeat(300)")
        page.locator("button.sure").click()
        expect(page.get_by_role("alert")).to_contain_text("reason")
        assert client.job("ready").state().state == "waiting"
        ready.get_by_role("button", name="Cancel").click()
        page.get_by_label("Reason").fill("too late, 100 %")
        page.locator("button.sure").click()
        expect(page.locator(".notice")).to_have_text("Message ready is cancelled.")
        assert client.job("ready").state().reason == "too late, 100 %"
        page.goto("/message?id=ready")
        now = page.get_by_role("region", name="Now")
        expect(now).to_contain_text("cancelled in orders: too late, 100 %")
        expect(now.get_by_role("button")).to_have_count(0)
        # The progress of the other one moves while the page is open.
        page.goto("/queue?name=orders")
        bar = page.get_by_role("region", name="Unacked messages").locator("td.progress")
        expect(bar).to_have_text("40 % colours")
        assert worker.ask(b"p progress --confirm c held 65 <b>shapes</b>") == b"p ok "
        expect(bar).to_have_text("65 % <b>shapes</b>")
        expect(bar.get_by_role("progressbar")).to_have_attribute("value", "65")
        page.get_by_role("region", name="Unacked messages").get_by_role("link").first.click()
        expect(now).to_contain_text("running in orders")
        expect(now).to_contain_text("65 % <b>shapes</b>")
        sure(page, "Cancel", "The consumer of message held was told")
        assert worker.line() == b"c ok --cancel held"
        assert worker.ask(b'a ack --confirm c held --result={"pages": [7]}') == b"a ok "
        page.goto("/message?id=held")
        expect(now.locator("pre")).to_contain_text('"pages": [')
        # One that is not there any more, and one that cannot be told.
        page.goto("/queue?name=orders")
        client.publish("order.new", "x", id="last", confirm=True)
        assert worker.line().startswith(b"c ok last ")
        assert worker.ask(b"d delete_consumer --confirm c") == b"d ok "
        start = b"e consume --confirm orders --manual-ack --prefetch=1"
        assert worker.ask(start) == b"e ok "
        assert worker.line().startswith(b"e ok last ")
        page.goto("/queue?name=orders")
        held = page.get_by_role("region", name="Unacked messages")
        sure(page, "Cancel", "A consumer holds message last and was not told")
        held.get_by_role("button", name="Cancel").click()
        assert worker.ask(b"b ack --confirm e last") == b"b ok "
        page.locator("button.sure").click()
        expect(page.locator(".notice")).to_have_text("Message last is not there any more.")


def test_a_batch_is_watched_and_closed(
    page: Page, client: BlockingClient, server: ServerProcess
) -> None:
    page.goto("/batches")
    expect(page.get_by_text("mqks batch open night")).to_be_visible()
    client.subscribe("reports", ["report.make"])
    client.set_queue("orders", retries=1)
    for name in (HOSTILE, "night"):
        client.open_batch(name, then=("report.make", "x"))
    page.reload()
    page.get_by_role("link", name="<b/onclick").click()
    shown = HOSTILE.replace("\x01", "\\x01")
    titled(page, shown)
    sure(page, "Forget", f"The batch {shown} is forgotten.")
    for n in range(4):
        client.publish("order.new", n, batch="night", confirm=True)
    page.locator("#rows").get_by_role("link", name="night").click()

    def counts() -> list[str]:
        return page.locator(".legend dd").all_text_contents()

    def bar() -> list[float]:
        values = "each => each.map(part => Number(part.getAttribute('width')))"
        return [*map(float, page.eval_on_selector_all("svg.bar rect", values))]

    expect(page.get_by_role("region", name="What follows")).to_contain_text("report.make")
    assert counts() == ["0", "0", "4", "0"]
    with client.consume("orders", prefetch=3) as consumer:
        consumer.receive(WAIT_S).ack()
        consumer.receive(WAIT_S).reject(dead=True)
        until(lambda: counts() == ["1", "2", "0", "1"])  # Without a reload.
        assert bar() == [25, 50, 0, 25]
        sure(page, "Close", "The batch night is closed.")
        expect(page.locator("#marks")).to_have_text("closed")
        expect(page.get_by_role("button", name="Close")).to_have_count(0)
        for _ in range(2):
            consumer.receive(WAIT_S).ack()
    expect(page.get_by_text("This batch has ended.")).to_be_visible()
    assert [each.id for each in client.peek("reports")] == ["night:end"]
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("There is no batch night.")
    # One that ends by being closed, and one that has ended before.
    for notice in ("is closed.", "any more."):
        client.open_batch("empty")
        page.goto("/batch?name=empty")
        if "any more" in notice:
            client.close_batch("empty")
        sure(page, "Close", notice)
        titled(page, "Batches")


def test_what_is_gone_is_not_asked_for_again(
    page: Page, client: BlockingClient, server: ServerProcess
) -> None:
    client.open_batch("night")
    page.goto("/batch?name=night")
    renewed = page.locator("#marks")
    expect(renewed).to_have_text("open")
    client.close_batch("night")
    expect(page.get_by_text("This batch has ended.")).to_be_visible()
    [told] = [each for each in client.stats("errors") if each["action"] == "stats"]
    # Another page is renewed at the same times.
    with opened(page.context.browser, server) as other:  # type: ignore[arg-type]
        other.goto("/")
        ready = other.locator("[data-number='totals.messages_ready']")
        for count in range(1, 4):
            client.publish("order.new", "x", confirm=True)
            expect(ready).to_have_text(str(count))
    assert [each for each in client.stats("errors") if each["action"] == "stats"] == [told]


def test_dead_letters_say_why_and_are_retried(page: Page, client: BlockingClient) -> None:
    client.set_queue("orders", retries=1, dead_letter_queue="orders.dead")
    client.publish_many([("order.new", n) for n in range(2)])
    with client.consume("orders") as consumer:
        for _ in range(2):
            consumer.receive().reject()
        until(lambda: len(client.peek("orders.dead")) == 2)
    page.goto("/queue?name=orders.dead")
    letter = client.peek("orders.dead")[0].dead_letter
    assert letter is not None
    died = moment(int(letter.died * 1e6))
    told = f"Died in orders at {died} UTC, reason rejects, deliveries 1"
    expect(page.get_by_text(told).first).to_be_visible()
    page.goto("/queues?sort=dead")
    first = page.locator("#rows tr").first
    expect(first.locator("td.queue")).to_have_text("orders")
    expect(first.locator("td.count").last).to_have_text("2")
    page.goto("/queue?name=orders.dead")
    sure(page, "Retry", "1 message returned.")
    sure(page, "Retry all dead letters", "1 message returned.")
    assert len(client.peek("orders")) == 2


def test_a_queue_of_dead_letters_is_marked_quietly_unless_it_grows(
    page: Page, client: BlockingClient
) -> None:
    def is_quiet() -> bool:
        page.goto("/queues?filter=dead")
        colour = "each => getComputedStyle(each).color"
        badge, count = page.locator(".badge.dead-letters"), page.locator("#count")
        return bool(badge.count()) and badge.evaluate(colour) == count.evaluate(colour)

    client.set_queue("orders", dead_letter_queue="orders.dead")
    client.subscribe("orders.dead", ["none"])
    until(lambda: page.goto("/queue?name=orders.dead") and page.locator("#chart").count() == 1)
    until(is_quiet)
    client.publish("none", "x", confirm=True)
    expect(page.locator("#rows td.marks")).to_have_text("growsdead letters")
    assert not is_quiet()


def test_dead_letters_of_one_cause_are_retried_or_dropped(
    page: Page, client: BlockingClient
) -> None:
    client.set_queue("orders", dead_letter_queue="orders.dead")
    client.publish_many([("order.new", n) for n in range(30)])
    with client.consume("orders") as consumer:
        for n in range(30):
            reason = None if n >= 28 else f"no <order> & {n}" if n % 4 else "time=out"
            consumer.receive().reject(dead=True, reason=reason)
        until(lambda: client.stats("queue", "orders.dead")["ready"] == 30)
    page.goto("/queue?name=orders.dead")
    causes = page.get_by_role("region", name="Dead letters by cause").locator("tbody tr")
    told = [each.locator("td").all_text_contents() for each in causes.all()]
    assert [cells[:4] for cells in told] == [
        ["no <order> & #", "orders", "dead", "21"],
        ["time=out", "orders", "dead", "7"],
        ["—", "orders", "dead", "2"],
    ]
    sure(page, "Retry these", "21 messages returned.")
    assert client.stats("queue", "orders")["ready"] == 21
    sure(page, "Drop these", "7 messages purged.")
    assert [each.text for each in client.peek("orders.dead")] == ["28", "29"]


def test_a_policy_is_changed(page: Page, client: BlockingClient) -> None:
    page.goto("/queue?name=orders")
    page.get_by_text("Change the policy").click()
    page.get_by_label("Rejects after").fill("5")
    page.get_by_label("Backoff").fill("1, 60")
    page.get_by_label("Time to live of a message").fill("1d")
    page.get_by_label("The queue for dead").fill("orders.dead")
    page.get_by_label("Deliveries after").fill("9")
    page.get_by_label("Deliver the messages of a key in order").select_option("key")
    page.get_by_label("Let the keys").select_option("key")
    sure(page, "Change policy", "Policy of orders changed.")
    expect(page.get_by_text("orders.dead from set_queue")).to_be_visible()
    policy = client.stats("queue", "orders")["policy"]
    told = [policy[key]["value"] for key in ("deliveries", "ordered", "fair")]
    assert told == [9, "key", "key"]
    page.get_by_text("Change the policy").click()
    expect(page.get_by_label("Rejects after")).to_have_value("5")
    expect(page.get_by_label("Backoff")).to_have_value("1, 60")
    expect(page.get_by_label("Time to live of a message")).to_have_value("86400")
    page.get_by_label("Rejects after").fill("many")
    page.get_by_role("button", name="Change policy").click()
    expect(page.get_by_role("alert")).to_contain_text("retries: 'many' is not a")
    expect(page.get_by_label("Rejects after")).to_have_value("many")


def test_one_active_consumer_at_a_time(page: Page, client: BlockingClient) -> None:
    def changed(choice: str, rejects: str) -> object:
        page.goto("/queue?name=orders")
        page.get_by_text("Change the policy").click()
        page.get_by_label("one consumer at a time").select_option(choice)
        page.get_by_label("Rejects after").fill(rejects)
        sure(page, "Change policy", "Policy of orders changed.")
        policy = client.stats("queue", "orders")["policy"]
        return {key: each["value"] for key, each in policy.items()}

    assert changed("yes", "") == {"single_consumer": True}
    assert changed("no", "") == {"single_consumer": False}
    assert changed("no", "5") == {"single_consumer": False, "retries": 5}
    expect(page.get_by_text("no from set_queue")).to_be_visible()
    assert changed("", "") == {}


def test_one_message_is_moved(page: Page, client: BlockingClient) -> None:
    client.subscribe("others", ["other"])
    for name in ("one", "two", "three"):
        client.publish("order.new", name, id=name, confirm=True)
    page.goto("/queue?name=orders")
    row = page.get_by_role("article").filter(has_text="id two")
    row.get_by_label("to queue").fill("others")
    row.get_by_role("button", name="Move message").click()
    expect(page.get_by_text("Move message two of orders to others?")).to_be_visible()
    assert client.peek("others") == []
    page.locator("button.sure").click()
    expect(page.locator(".notice")).to_have_text("1 message moved to others.")
    assert [each.id for each in client.peek("orders")] == ["one", "three"]
    assert [each.id for each in client.peek("others")] == ["two"]


def test_consumers_connections_and_errors(page: Page, client: BlockingClient) -> None:
    client.publish("order.new", "x", confirm=True)
    with client.consume("orders") as consumer:
        consumer.receive()
        page.goto("/consumers")
        expect(page.get_by_role("link", name="orders")).to_be_visible()
        page.get_by_label("Filter").fill("nothing")
        expect(page.locator("#rows tr")).to_have_count(0)
        page.get_by_label("Filter").fill("ORDERS")  # Its queue, and no part of its id.
        expect(page.locator("#rows td.count").first).to_have_text("1")
        since = page.locator("#rows td.age").first
        expect(since).to_have_text(re.compile(r"^\d+(\.\d)? (s|min)$"))
        # It grows while the message is held.
        expect(since).not_to_have_text(since.text_content() or "?")
        page.goto("/connections")
        expect(page.locator("#rows")).to_contain_text("127.0.0.1:")
        page.goto("/queue?name=orders")
        held = page.get_by_role("region", name="Unacked messages")
        expect(held).to_contain_text("order.new")
        [told] = json.loads(client.request("stats", "unacked", "orders"))
        delivered = moment(told["delivered_us"])
        expect(held.locator("td.time")).to_have_text(delivered)
        expect(held.locator("td.number").first).to_have_text(re.compile(r"^\d+(\.\d)? (s|min)$"))
        [row] = json.loads(client.request("stats", "consumers"))
        page.goto(f"/connection?number={row['connection']}")
        expect(page.get_by_role("main")).to_contain_text("1 unacked, the oldest for ")
    with pytest.raises(mqks.RequestFailed):
        client.request("dance")
    page.goto("/errors")
    expect(page.locator("#rows")).to_contain_text("dance")


def test_a_connection_is_closed(page: Page, server: ServerProcess) -> None:
    with connect(server.url) as client:
        client.subscribe("orders", ["order.new"])
    with LineClient(server.address) as other:
        assert other.ask(b"n set_name --confirm worker-7") == b"n ok "
        assert other.ask(b"c consume --confirm orders --manual-ack") == b"c ok "
        page.goto("/connections?filter=127.0.0.1")
        assert page.locator("#rows tr", has_text="worker-7").count()
        page.goto("/connections?filter=worker")
        expect(page.locator("#rows tr")).to_have_count(1)
        unconfirmed = page.get_by_role("columnheader", name="Unconfirmed")
        expect(unconfirmed).to_have_attribute("title", re.compile("^Requests whose reply"))
        row = page.locator("#rows tr", has_text="worker-7")
        row.get_by_role("link").click()
        expect(page.get_by_role("main")).to_contain_text("c of orders, 0 unacked")
        expect(page.get_by_role("main")).to_contain_text(re.compile(r"As of \(UTC\) \S+ \S+, when"))
        number = page.url.rpartition("=")[2]
        sure(page, "Close connection", f"Connection {number} closed.")
        assert other.line().startswith(b"- error ")
        with pytest.raises(EOFError):
            other.line()
    page.goto("/errors")
    expect(page.locator("#rows")).to_contain_text("(close_connection)")
    # The server waits for a moment whether it reads the error.
    until(lambda: getattr(page.goto(f"/connection?number={number}"), "status", 0) == 404)
    expect(page.get_by_role("alert")).to_have_text(f"There is no connection {number}.")


def test_archives(page: Page, client: BlockingClient, server: ServerProcess) -> None:
    page.goto("/archives")
    expect(page.locator("#rows tr")).to_have_count(0)
    with QueueReader(server.url, "orders") as reader:
        end = reader.range(archived=0).next
        expect(page.locator("#rows tr")).to_have_count(1)  # Without a reload.
        expect(page.locator("#rows tr")).to_contain_text(re.compile(rf"running\s*orders\s*{end}"))
        reader.range(archived=end)
    expect(page.locator("#rows tr")).to_contain_text(re.compile(r"running\s*orders\s*0"))
    page.reload()
    sure(page, "Pause", "orders is paused.")
    page.goto("/archives")
    expect(page.locator("#rows tr")).to_contain_text(re.compile(r"paused\s*orders\s*0"))
    sure(page, "Resume", "orders is resumed.")
    page.goto("/archives")
    expect(page.locator("#rows tr")).to_contain_text(re.compile(r"running\s*orders\s*0"))


def test_a_consumer_is_ended_and_its_messages_go_to_others(
    page: Page, client: BlockingClient, server: ServerProcess
) -> None:
    with LineClient(server.address) as stuck:
        assert stuck.ask(b"c consume --confirm orders --manual-ack") == b"c ok "
        client.publish("order.new", "x", confirm=True)
        assert stuck.line().startswith(b"c ok ")
        number = next(row["id"] for row in client.stats("connections") if row["consumers"])
        page.goto(f"/connection?number={number}")
        sure(page, "Give its messages to others", "The messages of c are in their queue.")
        assert client.stats("queue", "orders")["ready"] == 1
        page.goto(f"/connection?number={number}")
        sure(page, "End", "Consumer c ended.")
        assert stuck.line().startswith(b"c error ")
    page.goto("/audit")
    expect(page.locator("#rows")).to_contain_text("delete_consumer")
    expect(page.locator("#rows")).to_contain_text("order.new")


def test_schedules(page: Page, client: BlockingClient) -> None:
    client.subscribe("q", ["beat"])
    client.schedule(HOSTILE, "0 3 * * *", "beat", HOSTILE, tz="Europe/Berlin")
    client.schedule("every", None, "beat", "x", every_s=7200, pause=True)
    page.goto("/schedules")
    rows = page.locator("#rows tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text(re.compile(r"paused\s*every\s*beat\s*UTC\s*2 h\s*skip"))
    expect(rows.nth(0)).to_contain_text(
        re.compile(r"\S+ 0[12]:00:00\s*beat\s*0 3 \* \* \*\s*Europe/Berlin")
    )
    client.schedule("new", None, "beat", "x", every_s=9)
    expect(rows).to_have_count(3)  # Without a reload.
    client.unschedule("new")
    rows.nth(0).get_by_role("link").click()
    expect(page.locator("pre")).to_contain_text("<b/onclick=alert(1)>q</b>&amp;")
    shown = HOSTILE.replace("\x01", "\\x01")
    sure(page, "Run now", "Published.")
    assert [each.event for each in client.peek("q")] == ["beat"]
    sure(page, "Pause", "Paused.")
    assert client.schedules()[0]["paused"]
    sure(page, "Resume", "Resumed.")
    assert not client.schedules()[0]["paused"]
    sure(page, "Remove schedule", f"Removed the schedule {shown}.")
    expect(rows).to_have_count(1)
    assert [row["name"] for row in client.schedules()] == ["every"]
    page.goto("/schedule?name=nowhere")
    expect(page.get_by_text("There is no schedule nowhere.")).to_be_visible()


def test_limits_and_how_near_they_are(browser: Browser, db: Path) -> None:
    with looked_at(browser, db, "--queues-max", "4") as (_, client, page):
        client.subscribe("orders", ["order.new"])
        client.publish("order.new", "x", confirm=True)
        page.goto("/limits")
        first = page.locator("#rows tr").first
        expect(first).to_have_text(re.compile(r"queues_max\s*25\.0%\s*1\s*4"))
        messages = page.locator("#rows tr", has_text="queue_messages_max")
        expect(messages).to_contain_text("queue orders")
        client.subscribe("others", ["other.new"])
        expect(first).to_have_text(re.compile(r"queues_max\s*50\.0%\s*2\s*4"))
        assert page.get_by_role("link", name="Users").count() == 0


def test_limits_of_a_journal_in_postgresql(journal_url: DatabaseUrl) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    flags = ("--db-replication", "none", "--http-port", "0", "--page", "read")
    with (
        ServerProcess(journal_url.text, *flags, "--db-bytes-max", "1MiB") as server,
        connect(server.url) as client,
    ):
        client.subscribe("orders", ["order.new"])
        client.publish("order.new", "x" * 2**19, confirm=True)
        with urlopen(f"{web_url(server)}/limits") as answer:
            text = re.sub(r"<[^>]*>", " ", answer.read().decode())
        assert re.search(r"db_bytes_max\s+50\.\d%\s+512 KiB\s+1\.0 MiB", text), text


def test_a_broker_that_goes_and_comes_back(browser: Browser, db: Path) -> None:
    with looked_at(browser, db) as (server, _, page):
        port = web_url(server).rpartition(":")[2]
        page.goto("/")
        expect(page.locator("[data-number='totals.uptime_s']")).not_to_have_text("")
        page.set_viewport_size({"width": 390, "height": 400})
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        server.kill()
        expect(page.locator("#lost")).to_be_in_viewport(ratio=1)
        with ServerProcess(db, "--http-port", port, "--page", "read"):
            expect(page.locator("#lost")).to_be_hidden()


def test_looking_is_all_that_the_default_allows(browser: Browser, db: Path) -> None:
    with looked_at(browser, db) as (server, client, page):
        client.subscribe("orders", ["order.new"])
        client.open_batch("night")
        client.publish("order.new", "x", id="m", batch="night", keep_result_s=60, confirm=True)
        for path in ("/queue?name=orders", "/batch?name=night"):
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.get_by_role("main").get_by_role("button")).to_have_count(0)
        page.goto("/message?id=m")
        expect(page.get_by_role("region", name="Now")).to_contain_text("waiting in orders")
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        cookie = page.context.cookies()[0]
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        form = {"queue": "orders", "sure": "yes", "csrf": ""}
        own = f"{cookie['name']}={cookie['value']}"
        assert asked(f"{web_url(server)}/do/delete", form, Cookie=own)[0] == 403
        assert client.request("stats", "queue", "orders")


def test_forms_of_other_sites_are_refused(
    page: Page, client: BlockingClient, server: ServerProcess
) -> None:
    page.goto("/queue?name=orders")
    cookie = page.context.cookies()[0]
    csrf = page.locator("input[name=csrf]").first.get_attribute("value")
    own = f"{cookie['name']}={cookie['value']}"

    def code(form: dict[str, Any], **headers: str) -> int:
        return asked(f"{web_url(server)}/do/delete", form, Cookie=own, **headers)[0]

    wanted = {"queue": "orders", "sure": "yes", "csrf": csrf}
    assert code(wanted | {"csrf": "wrong"}) == 403
    assert code(wanted, Origin="http://evil.example") == 403
    assert code(wanted, Sec_Fetch_Site="cross-site") == 403
    assert code(wanted, Host="evil.example") == 421
    assert client.request("stats", "queue", "orders")
    behind_proxy = {"Origin": "https://broker.example", "Sec_Fetch_Site": "same-origin"}
    assert code(wanted | {"queue": "other", "typed": "other"}, **behind_proxy) == 200
    assert code(wanted | {"typed": "other"}) == 200
    assert client.request("stats", "queue", "orders"), "another name was typed"
    assert code(wanted | {"typed": "orders"}) == 200
    with pytest.raises(mqks.RequestFailed):
        client.request("stats", "queue", "orders")


def sessions(client: BlockingClient) -> int:
    """Each has a connection."""
    rows = json.loads(client.request("stats", "connections"))
    return sum(each["address"] == "page" for each in rows)


@contextmanager
def another_site(directory: Path, text: str) -> Iterator[int]:
    """The port of a web server whose page has this text."""
    (directory / "index.html").write_text(text)
    files = partial(SimpleHTTPRequestHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as other:
        Thread(target=other.serve_forever, args=(0.05,), daemon=True).start()
        yield other.server_address[1]
        other.shutdown()


def test_other_sites_show_nothing_of_it(
    browser: Browser, server: ServerProcess, tmp_path: Path
) -> None:
    """What they embed costs nothing, and a link leads on. Both hosts are another origin, and
    `localhost` is another site."""
    here = web_url(server)
    text = f"<img src='{here}/queue?name=orders'><iframe src='{here}/queues'></iframe>"
    text += f"<a href='{here}/queue?name=orders&amp;x=%22'>orders</a>"
    with connect(server.url) as client, another_site(tmp_path, text) as port:
        client.subscribe("orders", ["order.new"])
        for begun, host in enumerate(("127.0.0.1", "localhost")):
            context = browser.new_context()
            page = context.new_page()
            requested = list[str]()
            page.on("request", lambda request: requested.append(request.url))  # noqa: B023
            page.goto(f"http://{host}:{port}")
            assert {f"{here}/queue?name=orders", f"{here}/queues"} < {*requested}
            # The page opened before was renewed over a connection, which ends when it notices.
            until(lambda: sessions(client) == begun)  # noqa: B023
            page.get_by_role("link", name="orders").click()
            expect(page.get_by_text("came from another site")).to_be_visible()
            assert context.cookies() == []
            page.get_by_role("link", name="Open it here").click()
            titled(page, "orders")
            assert page.url == f"{here}/queue?name=orders&x=%22"
            context.close()
    for path in ("/metrics", "/healthz", "/queues"):
        assert asked(here + path)[0] == 200
        assert asked(here + path, Sec_Fetch_Site="cross-site")[0] == 403
    with socket.create_connection(("127.0.0.1", int(here.rpartition(":")[2])), WAIT_S) as peer:
        host = here.partition("://")[2]
        head = f"Host: {host}\r\nSec-Fetch-Site: cross-site\r\nConnection: close\r\n\r\n"
        peer.sendall(f"GET //evil.example/'\"><script> HTTP/1.1\r\n{head}".encode())
        told = peer.makefile("rb").read()
    assert b'href="/evil.example/&#x27;&quot;&gt;&lt;script&gt;"' in told


def test_nothing_is_renewed_for_those_who_have_left(
    client: BlockingClient, server: ServerProcess
) -> None:
    """Whenever they leave: most before the first event."""
    here = web_url(server)
    host = here.partition("://")[2]
    cookie = new_cookie(f"{here}/queues")
    for number in range(600):
        with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2]))) as peer:
            path = "/events?table=queues" + "&queue=orders" * (number % 2)
            head = f"Host: {host}\r\nCookie: {cookie}\r\nSec-Fetch-Site: same-origin\r\n"
            peer.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
            time.sleep(number % 6 / 4000)
    until(lambda: sessions(client) == 1)


def test_those_who_send_no_cookie_end_no_open_page(
    client: BlockingClient, server: ServerProcess
) -> None:
    here = web_url(server)
    new = partial(new_cookie, f"{here}/publish")

    def is_known(cookie: str) -> bool:
        """Asks for a part of a page, as browsers do; it is answered in any case."""
        assert asked(f"{here}/static/page.css", Cookie=cookie)[0] == 200
        return not new(Cookie=cookie)

    with ExitStack() as open_pages:
        read = new()
        assert is_known(read)
        others = [new() for _ in range(SESSIONS_MAX + 20)]
        assert is_known(read)
        assert is_known(others[-1])
        assert not is_known(others[0])
        until(lambda: sessions(client) <= SESSIONS_MAX)
        # Those who come back take the place of one that has not for longer.
        watching = list[str]()
        for _ in range(SESSIONS_MAX):
            watching.append(new())
            assert is_known(watching[-1])
        # None that watches makes room.
        for each in watching:
            events = urlopen(Request(f"{here}/events", headers={"Cookie": each}))
            assert open_pages.enter_context(events).readline() == b"retry: 2000\n"
        for late in (read, ""):
            assert asked(f"{here}/publish", Cookie=late)[0] == 503
        assert all(map(is_known, watching))


def test_behind_tls_the_cookie_is_for_tls_only(server: ServerProcess) -> None:
    assert "; Secure" not in asked(web_url(server))[1]
    assert "; Secure" in asked(web_url(server), X_Forwarded_Proto="https")[1]


def test_users_log_in_and_may_do_what_they_may(browser: Browser, db: Path, tmp_path: Path) -> None:
    users = tmp_path / "users"
    password = hash_password("open-sesame", b"salt" * 4)
    lines = [
        User("boss", password, admin=True, publish=["**"], consume=["**"], queues_max=7).line(),
        User("guest", password, consume=["orders"]).line(),
    ]
    users.write_text("".join(lines))
    flags = ("--http-port", "0", "--page", "full", "--users", str(users))
    with ServerProcess(db, *flags) as server, opened(browser, server) as page:

        def log_in(name: str, given: str) -> None:
            page.goto("/login")
            page.get_by_label("Name").fill(name)
            page.get_by_label("Password").fill(given)
            page.get_by_role("button", name="Log in").click()

        page.goto("/queues")
        titled(page, "Log in")
        log_in("boss", "wrong")
        expect(page.get_by_role("alert")).to_contain_text("does not accept")
        log_in("guest", "open-sesame")
        expect(page.get_by_role("alert")).to_contain_text("may not look")
        log_in("boss", "open-sesame")
        titled(page, "Overview")
        page.goto("/users")
        expect(page.locator("#rows tr")).to_have_count(2)
        expect(page.locator("#rows tr").first).to_have_text(re.compile(r"boss\s*\*\*"))
        assert password not in page.content()
        with LineClient(server.address) as client:
            assert client.ask(b"a auth --confirm boss open-sesame") == b"a ok "
            assert client.ask(b"s subscribe --confirm mine e") == b"s ok "
        page.goto("/queue?name=mine")
        expect(page.locator("dl.facts")).to_contain_text(re.compile(r"Made by\s*boss"))
        page.goto("/users")
        expect(page.locator("#rows tr").first).to_have_text(
            re.compile(r"boss.*(no limit\s*){3}1\s*7\s*no limit\s*$", re.S)
        )
        page.goto("/publish")
        page.get_by_label("Event", exact=True).fill("e")
        sure(page, "Publish", "Published as ")
        page.get_by_role("button", name="Log out boss").click()
        page.goto("/queues")
        titled(page, "Log in")
        # A user that is removed is out at once.
        log_in("boss", "open-sesame")
        titled(page, "Overview")
        users.write_text(lines[1])
        server.hang_up()
        until(lambda: "event=reloaded" in server.log)
        page.goto("/queues")
        titled(page, "Log in")


def test_those_who_may_look_cannot_act(browser: Browser, db: Path, tmp_path: Path) -> None:
    """A user who may look sees a batch and a message, and neither its result nor the end of it."""
    users = tmp_path / "users"
    boss = User("boss", token=hash_token("b"), admin=True, publish=["**"], consume=["**"])
    guest = User("guest", token=hash_token("g"), monitoring=True, consume=["other"])
    users.write_text(boss.line() + guest.line())
    flags = ("--http-port", "0", "--page", "full", "--users", str(users))
    with (
        ServerProcess(db, *flags) as server,
        opened(browser, server) as page,
        connect(server.url.replace("://", "://b@")) as client,
    ):
        client.subscribe("pages", ["render"])
        client.open_batch("night", then=("report.make", "x"))
        client.publish("render", "x", id="m1", batch="night", confirm=True)
        client.publish("render", "y", id="m2", keep_result_s=60, confirm=True)
        page.goto("/login")
        page.get_by_label("Token").fill("g")
        page.get_by_role("button", name="Log in").click()
        page.goto("/batch?name=night")
        expect(page.locator(".legend dd").nth(2)).to_have_text("1")
        for button in ("Close", "Forget"):
            page.goto("/batch?name=night")
            page.get_by_role("button", name=button).click()
            if (typed := page.get_by_label("to confirm")).count():
                typed.fill("night")
            page.locator("button.sure").click()
            refused = "no permission for the batch"
            expect(page.get_by_role("alert")).to_contain_text(refused)
        assert client.batch_counts("night")
        page.goto("/message?id=m2")
        expect(page.get_by_text("What is traced")).to_be_visible()
        expect(page.get_by_role("region", name="Now")).to_have_count(0)
        with client.consume("pages", prefetch=1) as consumer:
            consumer.receive(WAIT_S)
            page.goto("/queue?name=pages")
            page.get_by_role("button", name="Cancel").first.click()
            page.locator("button.sure").click()
            refused = "no permission to consume"
            expect(page.get_by_role("alert").first).to_contain_text(refused)
        until(lambda: client.stats("queue", "pages")["ready"] == 2)


def test_users_of_a_token_leave_or_are_removed(db: Path, tmp_path: Path) -> None:
    users, token = tmp_path / "users", "t0ken"
    users.write_text(User("boss", token=hash_token(token), monitoring=True).line())
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    with (
        ServerProcess(db, "--http-port", "0", "--page", "read", "--users", str(users)) as server,
        closing(HTTPConnection(web_url(server).removeprefix("http://"), timeout=WAIT_S)) as browser,
    ):

        def asked(method: str, path: str, **form: str) -> Any:
            browser.request(method, path, urlencode(form), headers)
            return browser.getresponse()

        def log_in() -> None:
            answer = asked("POST", "/login", token=token)
            answer.read()
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            headers["Cookie"] = answer.headers["Set-Cookie"].partition(";")[0]

        log_in()
        shown = asked("GET", "/").read().decode()
        assert "<button>Log out" in shown
        csrf = re.search(r'name="csrf" value="([^"]+)"', shown)
        assert csrf
        asked("POST", "/logout", csrf=csrf[1]).read()
        assert asked("GET", "/").headers["Location"] == "/login"
        browser.close()
        log_in()
        events = asked("GET", "/events")
        until(lambda: events.readline().startswith(b"data: "))
        users.write_text("")
        server.hang_up()
        until(lambda: events.readline() == b"", "the page goes on")
        events.close()
        browser.close()
        assert asked("GET", "/events").headers["Location"] == "/login"


OVERFLOWING = """() => {
  const found = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
  const things = "h1, h2, h3, p, a, dt, dd, dd > span, th, td, label, button, input, .badge";
  for (const each of document.querySelectorAll(things)) {
    const { left, right, width } = each.getBoundingClientRect();
    const frame = each.closest(".scrolled, .line, .card, pre") ?? document.documentElement;
    const isRead = each.matches(".card *, .marks .badge, .scrolled") || frame.localName === "html";
    const edge = Math.min(innerWidth, frame.getBoundingClientRect().right);
    if (width && !each.closest(".skip") && isRead && (left < -1 || right > edge + 1)) {
      found.push(each.outerHTML.slice(0, 100));
    }
  }
  return found;
}"""
"""Elements that are beyond the window or cut; but for those of tables, which can be scrolled."""
LONG = "customer.notifications.push.priority.eu-central-1"


@contextmanager
def busy(client: BlockingClient, server: ServerProcess) -> Iterator[list[str]]:
    """A broker that has something of everything, and the paths of all views of it."""
    client.subscribe(LONG, masks=["order.**"])
    client.subscribe("orders.dead", ["none"])
    client.set_queue("orders", dead_letter_queue="orders.dead", retries=5, ttl_s=86_400)
    client.pause(LONG, deliveries=True)
    client.subscribe("jobs", ["job.new"])
    client.trace("order.new")
    client.publish_many([("order.new", {"no": n, "text": "x" * 99}) for n in range(12_345)])
    client.publish("order.new", "later", id="later", confirm=True, delay_s=3600)
    client.schedule("nightly", "0 3 * * *", "report.due", tz="Europe/Berlin")
    client.schedule("lost", None, "order.new", "x", every_s=1, to="nothing")
    client.open_batch("night", then=("report.made", "x"), on_dead=("report.failed", "x"))
    client.publish("job", "x", to="jobs", id="job", keep_result_s=60, confirm=True)
    for number in range(9):
        client.publish("job", number, to="jobs", batch="night", id=f"job-{number}")
    with pytest.raises(mqks.RequestFailed):
        client.request("move", "--confirm", "nothing", "orders")
    with (
        client.consume("orders", prefetch=9) as consumer,
        client.consume("jobs", cancellable=True) as jobs,
        QueueReader(server.url, LONG) as reader,
    ):
        jobs.receive(WAIT_S).progress(40, "colours of a page with a long name and many pictures")
        reader.range(archived=0)
        for n in range(40):
            consumer.receive(WAIT_S).reject(dead=True, reason=f"LookupError: no customer {n}")
        until(lambda: client.stats("queue", "orders.dead")["ready"] == 40)
        until(lambda: any(each["unacked"] == 9 for each in client.stats("consumers")))
        number = next(each["id"] for each in client.stats("connections") if each["consumers"])
        named = (f"queue?name={name}" for name in ("orders", "orders.dead", LONG))
        plain = "queues consumers connections schedules archives errors audit limits publish tail"
        yield [
            *("/", *(f"/{each}" for each in plain.split()), *(f"/{each}" for each in named)),
            *(f"/connection?number={number}", "/schedule?name=nightly", "/message?id=later"),
            *("/batches", "/batch?name=night", "/message?id=job", "/queue?name=jobs"),
            *("/tail?events=**", "/queue?name=orders&scheduled=1", "/queues?filter=none"),
            "/queue?name=nowhere",
        ]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_views_in_six_forms(
    browser: Browser, client: BlockingClient, server: ServerProcess, scheme: Any, tmp_path: Path
) -> None:
    """In three widths, light and dark: nothing is wider than the window, nothing that is read is
    cut, a picture of all of it can be made, and screen readers find no fault."""
    with busy(client, server) as paths, ExitStack() as stack:
        page = stack.enter_context(
            opened(browser, server, color_scheme=scheme, timezone_id="Europe/Berlin")
        )
        for number, path in enumerate(paths):
            page.set_viewport_size({"width": 1366, "height": 800})
            page.goto(path)
            for width in (1366, 768, 390, 360):
                page.set_viewport_size({"width": width, "height": 800})
                # The chart follows the window.
                until(lambda: page.evaluate(OVERFLOWING) == [], f"{path} is too wide for {width}")
                picture = tmp_path / f"{number}-{width}.png"
                page.screenshot(path=picture, full_page=True)
                head = picture.read_bytes()[:24]
                assert head[:8] == b"\x89PNG\r\n\x1a\n"
                shown = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
                assert shown[0] == width, path
                assert 800 <= shown[1] < 20_000, (path, width)
                if width in (1366, 390):
                    found = Axe().run(page).response["violations"]
                    grave = [each for each in found if each["impact"] in ("serious", "critical")]
                    assert [each["id"] for each in grave] == [], (path, width, grave)


def test_what_destroys_is_confirmed_by_the_name(page: Page, client: BlockingClient) -> None:
    client.publish("order.new", "x", confirm=True)
    page.goto("/queue?name=orders")
    purge = page.get_by_role("region", name="Cannot be undone").get_by_role("button", name="Purge")
    purge.click()
    expect(page.get_by_text("Delete all ready messages of orders?")).to_be_visible()
    page.get_by_role("link", name="Do nothing").click()
    titled(page, "orders")
    purge.click()
    page.get_by_label("to confirm").fill("order")
    page.locator("button.sure").click()
    expect(page.get_by_role("alert")).to_have_text("That is not orders.")
    assert len(client.peek("orders")) == 1
    page.get_by_label("to confirm").fill("orders")
    page.locator("button.sure").click()
    expect(page.locator(".notice")).to_have_text("1 message purged.")
    # One that is gone meanwhile has nothing to tell.
    client.delete_queue("orders")
    page.get_by_role("button", name="Delete queue").click()
    titled(page, "Queues")
    expect(page.get_by_role("alert")).to_contain_text("there is no queue 'orders'")


def test_the_first_view_is_small_and_nothing_comes_from_elsewhere(
    page: Page, client: BlockingClient, server: ServerProcess
) -> None:
    for name in range(50):
        client.subscribe(f"queue-{name}", ["order.new"])
    client.publish_many([("order.new", n) for n in range(100)])
    sizes = dict[str, int]()
    page.on("response", lambda answer: sizes.update({answer.url: 0}))
    page.goto("/")
    expect(page.locator("#chart canvas")).to_be_visible()
    for url in sizes:
        assert url.startswith(web_url(server))
        if "/events" not in url:
            sizes[url] = len(page.request.get(url).body())
    assert len(sizes) == 6
    assert sum(sizes.values()) < 150_000, sizes
    # Of other views the browser has all but the page itself.
    sizes.clear()
    page.goto("/?range=day")
    expect(page.locator("#chart canvas")).to_be_visible()
    fetched = "performance.getEntriesByType('resource').filter(each => each.transferSize)"
    loaded = page.evaluate(f"{fetched}.map(each => each.name)")
    assert [url for url in loaded if "/static/" in url] == []
    [named] = [url for url in sizes if "/static/page.css?" in url]
    for url, kept in ((named, "immutable"), (named[:-1], "no-cache"), (named[:-13], "no-cache")):
        assert kept in page.request.get(url).headers["cache-control"]


def test_keys_open_views_and_find_the_filter(page: Page, client: BlockingClient) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#main"
    page.keyboard.press("g")
    page.keyboard.press("q")
    titled(page, "Queues")
    page.keyboard.press("/")
    page.keyboard.type("g q?/")
    expect(page.get_by_label("Filter")).to_have_value("g q?/")
    page.goto("/queues")
    page.keyboard.press("?")
    expect(page.get_by_text("this list")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_text("this list")).to_be_hidden()
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.get_by_role("link", name="Limits")).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("link", name="Limits").click()
    titled(page, "Limits")


def test_times_are_those_of_the_reader_too(
    browser: Browser, client: BlockingClient, server: ServerProcess
) -> None:
    for zone, hour, here in (
        ("Asia/Kolkata", 20, "02:00:00 +1 d"),
        ("America/Los_Angeles", 20, "12:30:00"),
        ("America/Los_Angeles", 3, "19:30:00 \N{MINUS SIGN}1 d"),
    ):
        client.schedule("nightly", f"30 {hour} 31 12 *", "report.due", missed="skip")
        with opened(browser, server, timezone_id=zone) as page:
            for path in ("/schedules", "/schedule?name=nightly"):
                page.goto(path)
                time = page.locator("time").first
                expect(time).to_have_text(re.compile(rf"^\d{{4}}-12-31 {hour:02}:30:00$"))
                expect(time).to_have_attribute("data-here", here)


def test_a_live_tail(page: Page, client: BlockingClient) -> None:
    page.goto("/tail")
    page.get_by_label("Events and masks").fill("order.* user.*")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#tail-told")).to_contain_text("Nothing was published yet")
    client.publish("other", "x", confirm=True)
    client.publish("order.new", {"text": HOSTILE}, id="one", confirm=True)
    rows = page.locator("#tail tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("<b/onclick=alert(1)>q</b>&amp;")
    assert len(client.peek("orders")) == 1, "nothing is consumed"
    page.get_by_role("button", name="Pause").click()
    client.publish_many([("order.new", n) for n in range(20_000)])
    expect(page.locator("#tail-told")).to_contain_text("came too fast to be shown")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Continue").click()
    client.publish("user.created", "x", confirm=True)
    expect(rows.first).to_contain_text("user.created")
    page.goto("/tail?queue=nowhere")
    expect(page.locator("#tail-told")).to_contain_text("nowhere")
    page.goto("/queue?name=orders")
    page.get_by_role("link", name="Live tail").first.click()
    titled(page, "Live tail")


def test_live_tails_are_few_and_end_with_their_page(
    client: BlockingClient, server: ServerProcess
) -> None:
    here = web_url(server)
    cookie = new_cookie(f"{here}/queues")

    def tail() -> Any:
        return urlopen(Request(f"{here}/tailed?events=**", headers={"Cookie": cookie}))

    with ExitStack() as tails:
        for _ in range(TAILS_MAX):
            assert tails.enter_context(tail()).readline() == b"retry: 2000\n"
        with pytest.raises(HTTPError, match="503") as refused:
            tail()
        refused.value.close()

    def is_let_in() -> bool:
        with suppress(HTTPError), tail() as told:
            return bool(told.readline())
        return False

    until(is_let_in)
    # One connection for the session, and none for those that have left.
    until(lambda: sessions(client) == 1)


@pytest.mark.slow
def test_a_hundred_open_pages_while_messages_run(server: ServerProcess) -> None:
    host, _, port = web_url(server).removeprefix("http://").partition(":")

    def watch(number: int) -> tuple[socket.socket, Any]:
        peer = socket.create_connection((host, int(port)), WAIT_S)
        path = f"/events?table=queues&sort=ready&filter={number % 10}&first={number}"
        peer.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{cookie}\r\n".encode())
        lines = peer.makefile("rb")
        return peer, lines

    cookie = f"Cookie: {new_cookie(web_url(server))}\r\n"
    with connect(server.url) as client:
        for number in range(20):
            client.subscribe(f"queue-{number}", ["order.new"])
        pages = [watch(number) for number in range(WATCHERS_MAX)]
        assert {lines.readline() for _, lines in pages} == {b"HTTP/1.1 200 OK\r\n"}
        more, lines = watch(0)
        with more, lines:
            assert lines.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        client.publish_many(("order.new", n) for n in range(2_000))
        for _, lines in pages[:100]:
            until(lambda lines=lines: b'"2,000"' in lines.readline())  # type: ignore[misc]
        # Those that are gone, also in the middle of an event, make room for others.
        for peer, lines in pages:
            lines.close()
            peer.close()

        def is_let_in() -> bool:
            peer, lines = watch(0)
            with peer, lines:
                return bool(lines.readline() == b"HTTP/1.1 200 OK\r\n")

        until(is_let_in)
        assert client.ping("x") == "x"
    assert "http_failed" not in server.log
    assert "page_failed" not in server.log


def test_every_answer_has_a_strict_policy(server: ServerProcess) -> None:
    for path in ("/", "/queues", "/queue?name=none", "/static/page.js", "/static/none", "/no"):
        try:
            answer = urlopen(web_url(server) + path)
        except HTTPError as failure:
            answer = failure
        with answer:
            policy, body = answer.headers["Content-Security-Policy"], answer.read().decode()
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script(?! src=)|\son\w+=|\sstyle=|javascript:", body), path


def test_a_taken_port_costs_a_line_only(db: Path, tmp_path: Path) -> None:
    """The port of those who have asked for none."""
    with socket.socket() as taken:
        with suppress(OSError):  # Somebody else may have it: then it is taken, too.
            taken.bind(("127.0.0.1", PAGE_PORT))
            taken.listen()
        with ServerProcess(db, "--page", "read") as server, connect(server.url) as client:
            until(lambda: "event=no_page" in server.log)
            assert f"127.0.0.1:{PAGE_PORT}" in server.log
            assert client.ping("x") == "x"


def test_without_a_page_nothing_of_it_is_loaded() -> None:
    code = "import sys, mqks.commands, mqks.server.running; print('starlette' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
