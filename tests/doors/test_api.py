"""The HTTP API of real servers: each answer is the protocol's, and nothing grows without limit."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from mqks import BlockingClient, ConnectionLost, blocking, users_file
from mqks.api import app
from mqks.api.app import LEASE
from mqks.errors import ConfigurationError
from mqks.limits import (
    API_BODIES_BYTES_MAX,
    API_STREAMS_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    REASON_BYTES_MAX,
)
from mqks.settings import load
from mqks.users import User, hash_password, hash_token
from tests.kit.fixtures import served_to
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.typist import Typist
from tests.kit.waiting import WAIT_S, until

MIB = 1024 * 1024
ANY_BYTES = bytes(range(256)) * 2 + b"\r\n\\n\r"


class Answer(NamedTuple):
    status: int
    told: Any
    headers: dict[str, str]


class Api:
    def __init__(self, server: ServerProcess) -> None:
        _ = server.address
        found = until(lambda: re.search(r"address=api:http://([\d.]+):(\d+)", server.log))
        self.address = found[1], int(found[2])

    def ask(
        self, path: str, body: Any = b"", method: str = "POST", **headers: str | bytes
    ) -> Answer:
        connection = HTTPConnection(*self.address, timeout=WAIT_S)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, named)
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, json.loads(response.read()), told)
        finally:
            connection.close()

    def look(self, mask: str, stack: ExitStack) -> HTTPResponse:
        connection = HTTPConnection(*self.address, timeout=WAIT_S)
        stack.callback(connection.close)
        connection.request("GET", f"/events/{mask}")
        response = connection.getresponse()
        stack.callback(response.close)
        return response


def shown(stream: HTTPResponse) -> Any:
    """The data of the next message of a stream."""
    while not (line := stream.readline()).startswith(b"data: "):
        assert line
    return json.loads(line.removeprefix(b"data: "))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of all tests: each begins without queues."""
    db = tmp_path_factory.mktemp("api") / "mqks.db"
    with ServerProcess(db, "--api-port", "0") as running:
        yield running


@pytest.fixture
def api(server: ServerProcess) -> Api:
    with blocking.connect(server.url) as client:
        for row in client.stats("queues"):
            client.delete_queue(row["name"])
    return Api(server)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BlockingClient]:
    with blocking.connect(server.url) as client:
        yield client


def test_any_bytes_are_stored_before_the_answer(
    server: ServerProcess, api: Api, client: BlockingClient
) -> None:
    client.subscribe("q", ["e", "a/b_ä"])
    first = api.ask("/publish/e", ANY_BYTES)
    second = api.ask(f"/publish/{quote('a/b_ä', safe='')}")
    assert (first.status, second.status) == (200, 200)
    server.kill()
    server.start()
    found = client.peek("q")
    assert [(each.id, each.event, each.data) for each in found] == [
        (first.told["id"], "e", ANY_BYTES),
        (second.told["id"], "a/b_ä", b""),
    ]


def test_a_key_is_the_id_of_once(api: Api, client: BlockingClient) -> None:
    client.subscribe("q", ["e"])
    answers = [api.ask("/publish/e", b"x", Idempotency_Key=key) for key in ("k", "k", '"k"')]
    assert [(each.status, each.told) for each in answers] == [(200, {"id": "k"})] * 3
    with ThreadPoolExecutor(8) as pool:
        racing = pool.map(lambda _: api.ask("/publish/e", b"x", Idempotency_Key="k2"), [0] * 40)
        assert {200} <= {each.status for each in racing} <= {200, 409}
    assert [each.id for each in client.peek("q")] == ["k", "k2"]


def test_headers_are_the_options_of_publish(api: Api, client: BlockingClient) -> None:
    client.subscribe("q", ["e"])
    client.subscribe("other", ["e"])
    answer = api.ask(
        "/publish/e",
        b"x",
        Mqks_Priority="7",
        Mqks_Key="a%20b",
        Mqks_Meta="a=1&b=%C3%A4",
        Mqks_To="q",
        Mqks_Ttl="1h",
    )
    assert answer.status == 200
    with client.consume("q", meta=True) as consumer:
        message = consumer.receive(WAIT_S)
    assert (message.priority, message.key, message.meta) == (7, "a b", {"a": "1", "b": "ä"})
    assert client.stats("queue", "other")["ready"] == 0
    assert api.ask("/publish/e", b"x", Mqks_Delay="1h").status == 200
    assert [client.stats("queue", name)["scheduled"] for name in ("q", "other")] == [1, 1]
    assert api.ask("/publish/e", b"x", Mqks_To="nowhere").status == 404


SAME = {
    "Mqks-Meta": (b"a=1+2&b=%c3%B8&%41=/~%2C", b"\xc3\xb8=1", b"a=1,2", b"a=%zz", b"a", b"=", b""),
    "Mqks-Key": (b"a+b%20c%c3%B8/d", b"%FF", b"\xc3\xb8", b"a,b", b"a%", b""),
    "Mqks-Unique": (b"a+b,on=replace", b"a,until=acked,for=9", b"a,b", b"a,on=", b"", b"\xc3\xb8"),
    "Mqks-Priority": (b"-7", b"007", b"+7", b"1_0", b"\xb2", b"128", b""),
    "Mqks-Delay": (b"0", b"0.000", b"0e5", b"1_0", b"nan", b"-1", b"\xd9\xa1", b""),
    "Mqks-Ttl": (b"1e3", b"+5", b"0", b"inf", b"1_0", b""),
}
"""Values of flags of the protocol, right and wrong ones."""


@pytest.mark.parametrize("header", SAME)
def test_the_bytes_of_a_header_are_those_of_the_flag(
    server: ServerProcess, api: Api, header: str
) -> None:
    flag = header.replace("Mqks-", "--").lower().encode()
    with LineClient(server.address) as line, LineClient(server.address) as seen:
        assert line.ask(b"s subscribe --confirm q e") == b"s ok "
        assert seen.ask(b"c consume --confirm q --meta") == b"c ok "
        for number, value in enumerate(SAME[header]):
            name = f"{header}-{number}"
            headers: dict[str, Any] = {"Idempotency-Key": name, header: value}
            status = api.ask("/publish/e", b"x", **headers).status
            told = line.ask(b"%b publish --confirm %b=%b e x" % (name.encode(), flag, value))
            assert (status == 200) == told.endswith(b" ok "), (value, status, told)
            if status == 200:
                assert seen.line() == seen.line(), value


@pytest.mark.parametrize("key", [b"\xc3\xb8", b"\xff", b"a,b=c%20+", b'"', b'a"b', b"\xc2\x85x"])
def test_an_idempotency_key_is_an_id_of_any_bytes(
    server: ServerProcess, api: Api, key: bytes
) -> None:
    with LineClient(server.address) as line:
        assert line.ask(b"s subscribe --confirm q e") == b"s ok "
        assert api.ask("/publish/e", b"x", Idempotency_Key=key).status == 200
        assert api.ask("/publish/e", b"x", Idempotency_Key=b'"%b"' % key).status == 200
        assert line.ask(key + b" publish --confirm --once e x") == key + b" ok "
        assert line.ask(b"c consume --confirm q") == b"c ok "
        assert line.line() == b"c ok %b event=e x" % key
        assert line.ask(b"p ping") == b"p ok "


def test_a_key_counts_from_the_first_queue_on(api: Api, client: BlockingClient) -> None:
    assert api.ask("/publish/e", b"x", Idempotency_Key="early").status == 200
    client.subscribe("q", ["e"])
    for data in (b"1", b"2"):
        assert api.ask("/publish/e", data, Idempotency_Key="early").status == 200
    assert [each.data for each in client.peek("q")] == [b"1"]


def test_mandatory(api: Api, client: BlockingClient) -> None:
    assert api.ask("/publish/e", b"x").status == 200
    missing = api.ask("/publish/e?mandatory", b"x")
    assert missing.status == 404
    assert missing.told["error"] == "publish: no queue is bound to 'e'"
    assert client.reason(missing.told["error_id"]) == missing.told["error"]
    assert api.ask("/publish/e?mandatory=false", b"x").status == 200


def test_other_paths_and_methods(api: Api) -> None:
    assert api.ask("/nope").status == 404
    assert api.ask("/publish/e", method="GET").status == 405
    connection = HTTPConnection(*api.address, timeout=WAIT_S)
    connection.request("HEAD", "/events/e")
    assert connection.getresponse().status == 405
    connection.close()


def test_a_job_is_watched_and_cancelled(api: Api, client: BlockingClient) -> None:
    client.subscribe("a/b", ["e"])
    kept = {"Mqks_Keep_Result": "1m", "Idempotency_Key": "j/1"}
    assert api.ask("/publish/e", b"x", **kept).told == {"id": "j/1"}
    path = "/results/j%2F1"
    waits = {"id": "j/1", "state": "waiting", "queue": "a/b"}
    assert api.ask(path + "?wait=0.1", method="GET").told == waits
    with client.consume("a/b", meta=True) as consumer:
        message = consumer.receive(WAIT_S)
        message.progress(40, "half")
        until(lambda: "progress" in api.ask(path, method="GET").told)
        told = api.ask(path, method="GET").told
        assert told == waits | {"state": "running", "progress": 40, "text": "half"}
        assert api.ask("/queues/a%2Fb/cancel/j%2F1").told == {"answer": "held"}
        message.ack(result={"a": 1})
        done = waits | {"state": "done", "data": '{"a":1}'}
        assert api.ask(path + "?wait=20", method="GET").told == done
    assert api.ask("/publish/e", b"x", Idempotency_Key="j2", Mqks_Keep_Result="1m").status == 200
    assert api.ask("/queues/a%2Fb/cancel/j2?reason=no%20use").told == {"answer": "cancelled"}
    cancelled = {"id": "j2", "state": "cancelled", "queue": "a/b", "reason": "no use"}
    assert api.ask("/results/j2", method="GET").told == cancelled
    assert api.ask("/results/other", method="GET").told == {"id": "other", "state": "none"}
    assert api.ask("/publish/nobody", b"x", Mqks_Keep_Result="1m").status == 400
    assert api.ask("/results/j2?wait=61", method="GET").status == 400


def test_the_description_is_valid(api: Api) -> None:
    from openapi_spec_validator import validate  # here, since it takes long to load

    told = api.ask("/openapi.json", method="GET").told
    validate(told)
    leases = {f"/leases/{{lease}}/{what}" for what in LEASE}
    queues = {f"/queues/{{queue}}/{what}" for what in ("receive", "pause", "resume", "cancel/{id}")}
    paths = {"/publish/{event}", "/events/{mask}", *queues, *leases}
    paths |= {"/batches/{batch}", "/batches/{batch}/close", "/results/{id}"}
    assert paths == set(told["paths"])


def test_batches(api: Api, client: BlockingClient) -> None:
    client.subscribe("rows", ["row"])
    client.subscribe("reports", ["made", "failed"])
    follows = {
        "then": {"event": "made", "data": {"no": 1}},
        "on_dead": {"event": "failed", "data": "x"},
    }
    for wrong in (b"[]", b"{", b'{"then": 1}', b'{"then": {"event": "e"}}', b'{"other": {}}'):
        assert api.ask("/batches/a/b", wrong, method="PUT").status == 400
    assert api.ask("/batches/a/b", method="GET").status == 404
    body = json.dumps(follows).encode()
    assert api.ask("/batches/a/b?for=1h", body, method="PUT")[:2] == (200, {"name": "a/b"})
    assert api.ask("/publish/row", b"1", **{"Mqks-Batch": "a%2Fb"}).status == 200
    assert api.ask("/publish/row", b"1", **{"Mqks-Batch": "other"}).status == 404
    counts = api.ask("/batches/a/b", method="GET").told
    assert (counts["waiting"], counts["then"], counts["on_dead"]) == (1, "made", "failed")
    assert api.ask("/batches/a/b/close").status == 200
    [message] = api.ask("/queues/rows/receive").told["messages"]
    assert api.ask(f"/leases/{message['lease']}/ack").status == 200
    [message] = api.ask("/queues/reports/receive").told["messages"]
    assert (message["event"], message["data"]) == ("made", '{"no":1}')
    assert api.ask("/batches/a/b/close?discard").status == 404


def test_the_bounds_of_the_description_are_those_of_the_server(
    api: Api, client: BlockingClient
) -> None:
    client.subscribe("q", ["e"])
    told, tried = api.ask("/openapi.json", method="GET").told, set()
    for path, operations in told["paths"].items():
        place = path.format(event="e", queue="q", mask="e", lease="cSBlLjEuMQ", batch="b", id="m")

        def is_refused(name: str, where: str, value: str, place: str = place) -> bool:
            headers: dict[str, Any] = {name: value} if where == "header" else {}
            query = f"?{name}={value}" if where == "query" else ""
            return api.ask(place + query, b"x", **headers).status == 400

        for each in operations.get("post", {}).get("parameters", ()):
            name, where, schema = each.get("name"), each.get("in"), each.get("schema", {})
            for bound, step in (("minimum", -1), ("maximum", 1)):
                if bound in schema:
                    tried.add((name, bound))
                    assert not is_refused(name, where, str(schema[bound]))
                    assert is_refused(name, where, str(schema[bound] + step))
            if "maxLength" in schema:
                tried.add((name, schema["maxLength"]))
                value = ("m=" if name == "Mqks-Meta" else "") + "x" * schema["maxLength"]
                assert is_refused(name, where, value + "x")
                assert not is_refused(name, where, value[: schema["maxLength"]])
    assert tried == {
        *(("Mqks-Priority", each) for each in ("minimum", "maximum")),
        *(("max", each) for each in ("minimum", "maximum")),
        *(("Mqks-Key", KEY_BYTES_MAX), ("Mqks-Meta", META_BYTES_MAX)),
        ("reason", REASON_BYTES_MAX),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "unchecked"),
    [
        ("fuzzing", "positive_data_acceptance"),
        ("coverage", "positive_data_acceptance,negative_data_rejection"),
    ],
)
def test_what_the_description_says_is_what_is_answered(
    api: Api, client: BlockingClient, tmp_path: Path, phase: str, unchecked: str
) -> None:
    """No answer is a 5xx or has another form, and what is wrong is refused. Without the stream,
    which does not end. A schema cannot say all that is wrong with a duration; and a header that
    nobody knows, which the second phase adds, is not wrong."""
    client.subscribe("q", masks=["**"])
    url = f"http://{api.address[0]}:{api.address[1]}/openapi.json"
    flags = "--seed=1", "--max-examples=20", "--exclude-operation-id=events", "--no-color"
    words = ["-m", "schemathesis.cli", "run", url, *flags]
    words += f"--phases={phase}", f"--exclude-checks={unchecked}"
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert b"12 selected / 13 total" in done.stdout


def test_other_sites_are_refused(api: Api) -> None:
    connection = HTTPConnection(*api.address, timeout=WAIT_S)
    for headers, status in (
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 421),
    ):
        connection.request("POST", "/publish/e", b"x", headers)
        response = connection.getresponse()
        response.read()
        assert response.status == status
    connection.close()


def test_a_lease_outlives_its_connection_and_a_kill(
    server: ServerProcess, api: Api, client: BlockingClient
) -> None:
    client.subscribe("a/b", ["e"])
    client.publish("e", ANY_BYTES, id="m1", priority=3, key="k", meta={"from": "shop"})
    client.publish("e", "second", id="m2", confirm=True)
    path = f"/queues/{quote('a/b', safe='')}/receive?lease=1h&max=10"
    (first, second) = api.ask(path).told["messages"]
    assert base64.b64decode(first.pop("data_base64")) == ANY_BYTES
    lease = first.pop("lease")
    traits = {"retry": 0, "priority": 3, "key": "k", "meta": {"from": "shop"}}
    assert first == {"id": "m1", "event": "e", **traits}
    assert api.ask(path).told == {"messages": []}
    server.kill()
    server.start()
    api = Api(server)
    assert api.ask(path).told == {"messages": []}
    assert api.ask(f"/leases/{lease}/ack").told == {"done": "ack"}
    assert api.ask(f"/leases/{lease}/ack").status == 410
    lease = second["lease"]
    assert api.ask(f"/leases/{lease}/extend?lease=1m").status == 200
    assert api.ask(f"/leases/{lease}/extend?lease=0").status == 200
    (second,) = api.ask(f"{path}&wait=30").told["messages"]
    assert (second["id"], second["data"], second["retry"]) == ("m2", "second", 1)
    assert api.ask(f"/leases/{lease}/ack").status == 410
    dead = f"/leases/{second['lease']}/reject?dead&reason=no%20such%20customer"
    assert api.ask(dead).status == 200
    assert client.stats("queue", "a/b")["ready"] == 0


def test_a_receive_waits_for_a_message(api: Api, client: BlockingClient) -> None:
    client.subscribe("q", ["e"])
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(api.ask, "/queues/q/receive?wait=60") for _ in range(20)]
        client.publish_many([("e", str(n)) for n in range(20)])
        found = [each.result().told["messages"] for each in waiting]
    assert sorted(int(each["data"]) for (each,) in found) == [*range(20)]
    assert api.ask("/queues/q/receive?wait=0.01").told == {"messages": []}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/publish/a%20b", {}, 400),
        ("/publish/", {}, 400),
        ("/publish/e?mandatry", {}, 400),
        ("/publish/e", {"Mqks_Delay": "soon"}, 400),
        ("/publish/e", {"Mqks_Priority": "1" * 5000}, 400),
        ("/publish/e", {"Mqks_Meta": "a=1&a=2"}, 400),
        ("/publish/e", {"Mqks_Dealy": "1"}, 400),
        ("/publish/e", {"Idempotency_Key": "a b"}, 400),
        ("/publish/e", {"Idempotency_Key": ""}, 400),
        ("/publish/e", {"Idempotency_Key": '""'}, 400),
        ("/publish/" + "e" * 300, {}, 400),
        ("/queues/nowhere/receive", {}, 404),
        ("/queues/a%20b/receive", {}, 400),
        ("/queues/q/receive?max=1_0", {}, 400),
        ("/queues/q/receive?max=1&max=2", {}, 400),
        ("/queues/q/receive?max=ten", {}, 400),
        ("/queues/q/receive?wait=61", {}, 400),
        ("/queues/q/receive?lease=soon", {}, 400),
        ("/queues/q/receive?limit=1", {}, 400),
        ("/queues/none/pause", {}, 404),
        ("/queues/none/resume", {}, 404),
        ("/queues/q/pause?deliveries&publishes", {}, 400),
        ("/queues/q/pause?publishes=never", {}, 400),
        ("/queues/q/pause?for=0", {}, 400),
        ("/queues/q/resume?for=1", {}, 400),
        ("/leases/x/ack", {}, 400),
        ("/leases/cSB4/ack", {}, 400),
        ("/leases/cSBlLjEuMQ/ack", {}, 410),
        ("/leases/cSBlLjEuMQ/ack?delay=1", {}, 400),
        ("/leases/cSBlLjEuMQ/extend", {}, 400),
        ("/leases/cSBlLjEuMQ/reject?dead&delay=1", {}, 400),
        ("/leases/cSBlLjEuMQ/drop", {}, 404),
    ],
)
def test_what_is_wrong_is_told(
    api: Api, client: BlockingClient, path: str, headers: dict[str, str], status: int
) -> None:
    client.subscribe("q", ["e"])
    answer = api.ask(path, b"x", **headers)
    assert (answer.status, bool(answer.told["error"])) == (status, True)


@pytest.fixture
def with_users(tmp_path: Path) -> Iterator[ServerProcess]:
    writer = User("writer", token=hash_token("T" * 32), publish=["orders.**"])
    password = hash_password("secret", salt=b"0" * 16)
    every: dict[str, Any] = {key: ["**"] for key in ("publish", "consume", "bind")}
    reader = User("reader", password=password, **every)
    with served_to(tmp_path, writer, reader, flags=("--api-port", "0")) as server:
        yield server


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_users_have_their_permissions(tmp_path: Path, with_users: ServerProcess) -> None:
    api, token = Api(with_users), "Bearer " + "T" * 32
    assert api.ask("/publish/orders.new", b"x", Authorization=token).status == 200
    assert api.ask("/publish/x", Authorization=basic("reader", "secret")).status == 200
    refused = api.ask("/publish/users.new", b"x", Authorization=token)
    assert refused.status == 403
    assert refused.told["error"] == "no permission to publish 'users.new'"
    assert api.ask("/events/**", method="GET", Authorization=token).status == 403
    for wrong in ("Bearer " + "U" * 32, basic("reader", "no"), "Basic !", "Digest x", "Bearer"):
        answer = api.ask("/publish/orders.new", b"x", Authorization=wrong)
        assert answer.status == 401, wrong
        assert "Bearer" in answer.headers["www-authenticate"]
    assert api.ask("/publish/orders.new", b"x").status == 401
    users_file.write(tmp_path / "users", [])
    with_users.hang_up()
    until(lambda: "event=reloaded" in with_users.log)
    assert api.ask("/publish/orders.new", b"x", Authorization=token).status == 401


def test_users_share_one_connection_each(with_users: ServerProcess) -> None:
    api = Api(with_users)

    def ask(_: int) -> int:
        return api.ask("/publish/orders.new", b"x", Authorization="Bearer " + "T" * 32).status

    with LineClient(with_users.address) as line:
        with ThreadPoolExecutor(20) as pool:
            assert set(pool.map(ask, range(200))) == {200}
        told = line.stats("connections")
    assert [row["user"] for row in told].count("writer") == 1


def inside(client: BlockingClient) -> int:
    """Connections from inside: one of the user, and one of each stream."""
    return [row["address"] for row in client.stats("connections")].count("api")


def test_a_stream_shows_what_is_published(api: Api, client: BlockingClient) -> None:
    with ExitStack() as stack:
        stream = api.look("orders.*", stack)
        assert stream.getheader("content-type", "").startswith("text/event-stream")
        assert stream.readline() == b":\n"
        told = api.ask("/publish/orders.1", b"a\nb").told
        assert shown(stream) == {**told, "event": "orders.1", "data": "a\nb"}
        client.publish("users.1", "not matched")
        client.publish("orders.2", b"\xff", id="m2")
        assert shown(stream) == {"id": "m2", "event": "orders.2", "data_base64": "/w=="}
        assert inside(client) == 2
    until(lambda: inside(client) == 1)


def test_a_stream_that_nobody_reads_drops(api: Api, client: BlockingClient) -> None:
    with ExitStack() as stack:
        stream = api.look("e", stack)
        data = "x" * 1000
        for _ in range(40):
            client.publish_many([("e", data)] * 1000)
        client.publish("e", "last", confirm=True)
        dropped = 0
        seen = 0
        while not dropped:
            line = stream.readline()
            seen += line.startswith(b"data: {")
            if line == b"event: dropped\n":
                dropped = int(stream.readline().removeprefix(b"data: "))
        assert seen + dropped <= 40_001


def test_streams_have_a_limit(api: Api, client: BlockingClient) -> None:
    with ExitStack() as stack:
        for _ in range(API_STREAMS_MAX):
            assert api.look("e", stack).status == 200
        assert api.look("e", stack).status == 503
        assert api.ask("/publish/e", b"x").status == 200
    until(lambda: inside(client) == 1)
    with ExitStack() as stack:
        assert api.look("e", stack).status == 200


def test_streams_show_one_piece_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many of them, far behind, do not make other clients of the API wait."""
    turn, pieces, streams = 0, 30, 16
    shown_in: Counter[int] = Counter()

    class Behind:
        """A tail that has all its messages at once."""

        dropped = 0

        async def batches(self, most: int, _: float) -> AsyncIterator[range]:
            for _piece in range(pieces):
                yield range(most)
            raise ConnectionLost("it has ended")

    def counted(message: object) -> bytes:
        shown_in[turn] += 1
        return b""

    async def read(api: Any) -> None:
        assert [each async for each in api._shown(Behind())][-1].startswith(b"event: error")

    async def run() -> None:
        ticks: asyncio.Handle

        def tick() -> None:
            nonlocal turn, ticks
            turn += 1
            ticks = loop.call_soon(tick)

        loop = asyncio.get_running_loop()
        ticks = loop.call_soon(tick)
        api: Any = app.Api(None, with_users=False, line_bytes_max=MIB)  # type: ignore[arg-type]
        await asyncio.gather(*(read(api) for _ in range(streams)))
        ticks.cancel()

    monkeypatch.setattr(app, "_event", counted)
    asyncio.run(run())
    assert shown_in.total() == streams * pieces * app.BATCH
    assert max(shown_in.values()) == app.BATCH


def test_a_body_has_a_limit(api: Api, client: BlockingClient) -> None:
    client.subscribe("q", ["e"])
    long = api.ask("/publish/e", b"x" * (MIB + 1))
    assert long.status == 413
    assert "line_bytes_max" in long.told["error"]
    chunks = (b"x" * MIB for _ in range(2))
    assert api.ask("/publish/e", chunks).status == 413
    assert api.ask("/publish/e", b"x" * MIB).status == 400  # The line has more than the body.
    assert api.ask("/publish/e", b"x" * (MIB - 200)).status == 200
    assert api.ask("/publish/e", b"\n" * (MIB // 2 - 200)).status == 200
    assert client.stats("queue", "q")["ready"] == 2


def test_bodies_that_do_not_come_have_a_limit(api: Api) -> None:
    head = b"POST /publish/e HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % MIB
    together = API_BODIES_BYTES_MAX // MIB
    body = b"x" * (together + 1)  # More than they leave of the limit.
    with ExitStack() as stack:
        for _ in range(together):
            peer = stack.enter_context(socket.create_connection(api.address, WAIT_S))
            peer.sendall(head + b"x" * (MIB - 1))
        until(lambda: api.ask("/publish/e", body).status == 503)
        assert api.ask("/publish/e", body).headers["retry-after"] == "1"
    until(lambda: api.ask("/publish/e", body).status == 200)


def test_a_full_queue_is_told(api: Api, client: BlockingClient) -> None:
    client.subscribe("q", ["e"])
    client.set_queue("q", messages_max=1)
    assert api.ask("/publish/e", b"x").status == 200
    full = api.ask("/publish/e", b"x")
    assert full.status == 503
    assert "messages_max is 1" in full.told["error"]


def test_a_queue_is_paused_and_resumed(api: Api, client: BlockingClient) -> None:
    client.subscribe("a/b", ["e"])
    for query, paused in (
        ("", "all"),
        ("?deliveries", "deliveries"),
        ("?deliveries=false&publishes=true", "publishes"),
        ("?publishes=wait&for=1h", "publishes wait"),
    ):
        assert api.ask(f"/queues/a/b/pause{query}").told == {"done": "pause"}
        assert client.stats("queue", "a/b")["paused"] == paused
    refused = api.ask("/publish/e", b"x")  # It does not wait.
    assert (refused.status, "publishes are paused" in refused.told["error"]) == (503, True)
    assert api.ask("/queues/a/b/resume").told == {"done": "resume"}
    assert client.stats("queue", "a/b")["paused"] is None
    assert api.ask("/publish/e", b"x").status == 200


def test_one_connection_too_many_makes_the_oldest_go(api: Api) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(api.address, WAIT_S))
        assert api.ask("/publish/e", b"x").status == 200


@pytest.mark.parametrize("door", ["api", "sqs"])
def test_without_users_only_this_machine_is_served(door: str) -> None:
    everywhere = {f"{door}_host": "0.0.0.0"}
    with pytest.raises(ConfigurationError, match=rf"{door}-host: '0\.0\.0\.0' is not loopback"):
        load({**everywhere, f"{door}_port": "0"}, {})
    assert getattr(load(everywhere, {}), f"{door}_port") is None


@pytest.mark.slow
def test_what_the_page_says_can_be_typed(server: ServerProcess, api: Api, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/http.md").read_text().partition("## Push")[0]
    with Typist(tmp_path, server.url, with_spark=False) as typist:
        typist.type(page.replace("localhost:25090", f"127.0.0.1:{api.address[1]}"))
    assert typist.typed >= 7


def test_publishing_survives_a_stop(
    server: ServerProcess, api: Api, client: BlockingClient
) -> None:
    """Whatever was answered 200 is there afterwards, and nobody waits forever."""
    client.subscribe("q", ["e"])

    def publish(until_it_fails: Callable[[], Answer]) -> list[str]:
        stored = []
        try:
            while (answer := until_it_fails()).status == 200:
                stored.append(answer.told["id"])
        except OSError:
            pass
        return stored

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(publish, lambda: api.ask("/publish/e", b"x")) for _ in range(4)]
        until(lambda: client.stats("queue", "q")["ready"] > 100)
        server.terminate()
        assert server.wait() == 0
        stored = [each for future in running for each in future.result()]
    server.start()
    assert set(stored) <= {each.id for each in client.peek("q", limit=1000)}
