"""What is told over HTTP: metrics after known traffic, and health, of a real server.

The one rule: values are read as Prometheus reads them, from a scrape.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import get_args

import pytest
from cryptography.x509 import load_pem_x509_certificate
from prometheus_client.parser import text_string_to_metric_families

from mqks import blocking
from mqks.client.errors import ProtocolViolation
from mqks.commands import main
from mqks.commands.follow import UNTIL
from mqks.errors import Limit
from mqks.limits import HTTP_CONNECTIONS_MAX
from mqks.server import metrics
from mqks.web.connection import REQUEST_S
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import WAIT_S, until
from tests.server.test_tls import with_tls
from tools import dashboard

ROOT = Path(__file__).parents[2]
TEXT = "text/plain; version=0.0.4; charset=utf-8"
PROCESS = re.compile(r"(process|python)_\w+")

Values = dict[tuple[str, str], float]
"""Name of a sample and the value of its only label, empty without one → value."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


class Web:
    """The HTTP side of a server."""

    def __init__(self, server: ServerProcess) -> None:
        _ = server.address
        found = until(lambda: re.search(r"address=http://([\d.]+):(\d+)", server.log))
        self.address = found[1], int(found[2])

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = HTTPConnection(*self.address, timeout=WAIT_S)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read().decode())
        finally:
            connection.close()

    def scrape(self, path: str = "/metrics") -> Values:
        answer = self.ask(path)
        assert (answer.status, answer.headers["content-type"]) == (200, TEXT)
        values: Values = {}
        for family in text_string_to_metric_families(answer.text):
            assert family.documentation
            assert family.type in ("counter", "gauge", "histogram")
            for sample in family.samples:
                key = sample.name, next(iter(sample.labels.values()), "")
                assert key not in values or len(sample.labels) > 1, f"{key} is there twice"
                values[key] = sample.value
        return values


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "mqks.db", "--http-port", "0") as running:
        yield running


@pytest.fixture
def web(server: ServerProcess) -> Web:
    return Web(server)


@pytest.mark.slow
def test_a_request_that_came_while_the_server_stood_still_is_answered(
    server: ServerProcess, web: Web
) -> None:
    with socket.create_connection(web.address, timeout=WAIT_S) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert web.ask("/healthz").status == 200
        with server.paused():
            sock.sendall(b"Host: localhost\r\n\r\n")
            time.sleep(REQUEST_S + 2)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


# -------------------------------------------------------------------------------------- metrics


def test_what_died_and_what_is_scheduled(server: ServerProcess, web: Web) -> None:
    with LineClient(server.address) as client:
        for flags in (
            b"jobs --retries=1 --dead-letters=dead --messages-max=8",
            b"loose --retries=1",
        ):
            assert client.ask(b"s set_queue --confirm " + flags) == b"s ok "
            assert client.ask(b"b rebind --confirm %s e" % flags.split()[0]) == b"b ok "
        for queue in (b"jobs", b"loose"):
            client.send(b"%s consume %s --manual-ack --prefetch=5 --meta\n" % (queue, queue))
        assert client.ask(b"m0 publish --confirm --delay=600 e text") == b"m0 ok "
        client.send(b"m1 publish e text\nm2 publish e text\n")
        for _ in range(4):
            client.line()
        client.send(b"r reject jobs --all\nr reject loose m1\n")
        assert client.ask(b"x reject --confirm --dead loose m2") == b"x ok "
        values, queues = web.scrape(), web.scrape("/metrics/queues")
        totals, rows = client.stats(), client.stats("queues")
        consumers = client.stats("consumers")

    dead = {"rejects": 3, "losses": 0, "deliveries": 0, "ttl": 0, "overflow": 0, "dead": 1}
    assert {reason: values["mqks_messages_dead_total", reason] for reason in dead} == dead
    assert values["mqks_messages_dropped_total", ""] == totals["dropped"] == 2
    assert values["mqks_messages_scheduled", ""] == totals["messages_scheduled"] == 2
    assert totals["dead"] == dead
    assert [queues["mqks_queue_messages_scheduled", row["name"]] for row in rows] == [0, 1, 1]
    assert [row["scheduled"] for row in rows] == [0, 1, 1]
    assert queues["mqks_queue_fullness", "jobs"] == 1 / 8
    assert ("mqks_queue_fullness", "loose") not in queues
    assert {(row["prefetch"], row["meta"]) for row in consumers} == {(5, True)}


def test_values_after_known_traffic(server: ServerProcess, web: Web) -> None:
    with LineClient(server.address) as client, LineClient(server.address) as other:
        for queue in (b"mails", b"audit", b"idle"):
            assert client.ask(b"s subscribe --confirm %s e" % queue) == b"s ok "
        client.send(b"".join(b"m%d publish e text\n" % number for number in range(9)))
        assert client.ask(b"m9 publish --confirm e text") == b"m9 ok "
        assert client.ask(b"u publish --confirm nobody text") == b"u ok "
        assert b" error " in client.ask(b"x frobnicate")
        other.send(b"auto consume mails\n")
        assert [other.line()[:8] for _ in range(10)] == [b"auto ok "] * 10
        other.send(b"hand consume audit --manual-ack\n")
        assert [other.line()[:8] for _ in range(10)] == [b"hand ok "] * 10
        assert other.ask(b"a ack --confirm hand m0") == b"a ok "
        other.send(b"r reject hand m1\n")
        assert b"retry=1" in other.line()
        # Its confirm comes when nothing is left to be written.
        assert other.ask(b"a ack --confirm hand m0") == b"a ok "
        values = web.scrape()
        queues = web.scrape("/metrics/queues")

        told = {
            name.removeprefix("mqks_messages_").removesuffix("_total"): value
            for (name, _), value in values.items()
            if name.startswith("mqks_messages_")
        }
        assert told == {
            "received": 11,
            "routed": 30,
            "unroutable": 1,
            "confirmed": 2,
            "delivered": 21,
            "redelivered": 1,
            "acknowledged": 11,
            "rejected": 1,
            "purged": 0,
            "dead": 0,
            "dropped": 0,
            "duplicates": 0,
            "replaced": 0,
            "ready": 10,
            "unacked": 9,
            "scheduled": 0,
        }
        for name, value in {
            "connections": 2,
            "consumers": 2,
            "queues": 3,
            "bindings": 3,
            "errors_total": 1,
            "disk_full": 0,
            "ready": 1,
            "journal_messages": 19,
        }.items():
            assert values[f"mqks_{name}", ""] == value, name
        assert {
            name: [queues.get((name, queue)) for queue in ("mails", "audit", "idle")]
            for name in ("messages_ready", "messages_unacked", "consumers")
            for name in [f"mqks_queue_{name}"]
        } == {
            "mqks_queue_messages_ready": [0, 0, 10],
            "mqks_queue_messages_unacked": [0, 9, 0],
            "mqks_queue_consumers": [1, 1, 0],
        }
        ages = {queue for name, queue in queues if name.endswith("_age_seconds")}
        assert ages == {"idle", "audit"}, "only what waits or is held has an age"
        assert ("mqks_queue_oldest_unacked_age_seconds", "idle") not in queues
        assert 0 <= queues["mqks_queue_oldest_unacked_age_seconds", "audit"] < 600

        journal = client.stats("journal")
        assert values["mqks_journal_commit_seconds_count", ""] == journal["commits"] > 0
        assert values["mqks_journal_batch_records_sum", ""] == journal["commit_records"] > 0
        assert values["mqks_journal_batch_records_bucket", "+Inf"] == journal["commits"]
        assert values["mqks_disk_free_bytes", ""] > 0
        assert values["mqks_limit", "queues_max"] == 100_000
        assert values["process_resident_memory_bytes", ""] > 1e6


def test_what_is_declared_is_what_is_told(web: Web) -> None:
    text = web.ask("/metrics").text + web.ask("/metrics/queues").text
    told = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M)
    without_tls = {*metrics.NAMES} - {"mqks_certificate_expiry_timestamp_seconds"}
    assert sorted(name for name, _ in told if not PROCESS.match(name)) == sorted(without_tls)
    for name, kind in told:
        assert (kind == "counter") == name.endswith("_total"), name


def test_a_limit_that_refuses_is_counted(tmp_path: Path, tls_port: int) -> None:
    """Over TLS nobody is told why, but the operator is."""
    flags = "--http-port 0 --queues-max 1 --line-bytes-max 64 --connections-max 2"
    flags += f" --connections-per-address-max 1 --unix {tmp_path}/unix"
    _, tls = with_tls(tmp_path, tls_port)
    with served(tmp_path / "mqks.db", *flags.split(), *tls) as (server, one):
        web = Web(server)
        assert one.ask(b"s subscribe --confirm q e") == b"s ok "
        assert b" error " in one.ask(b"s subscribe --confirm other e")
        with LineClient(server.address) as two:
            assert two.line().startswith(b"- error ")
        with socket.create_connection(("127.0.0.1", tls_port), WAIT_S) as three:
            assert three.recv(1) == b""
        with socket.socket(socket.AF_UNIX) as four, socket.socket(socket.AF_UNIX) as five:
            four.connect(f"{tmp_path}/unix")
            five.connect(f"{tmp_path}/unix")
            assert five.recv(8) == b"- error "
        assert b" error " in one.ask(b"x publish e " + b"." * 64)
        values = web.scrape()
    limits = {limit: values["mqks_limit_reached_total", limit] for limit in get_args(Limit)}
    assert {limit: count for limit, count in limits.items() if count} == {
        "queues_max": 1,
        "connections_max": 1,
        "connections_per_address_max": 2,
        "line_bytes_max": 1,
    }
    assert values["mqks_limit", "queues_max"] == 1


def test_queues_of_any_name_are_told(server: ServerProcess, web: Web) -> None:
    names = [b'quo"te', b"back\\slash", "grün".encode(), b"raw\xff", b"{x}"]
    with LineClient(server.address) as client:
        for name in names:
            assert client.ask(b"s subscribe --confirm %s e" % name) == b"s ok "
        told = [queue for name, queue in web.scrape("/metrics/queues") if name.endswith("_ready")]
    assert told == ['quo"te', "back\\slash", "grün", "raw\\xff", "{x}"]


def test_how_far_an_archive_is(server: ServerProcess, web: Web) -> None:
    with LineClient(server.address) as client:
        for name in (b"a", b"b"):
            assert client.ask(b"s subscribe --confirm %b e" % name) == b"s ok "
        assert client.ask(b"m publish --confirm e x") == b"m ok "
        assert client.ask(b"r range --archived=1 a").startswith(b"r ok ")
        told = web.scrape("/metrics/queues")
        assert client.ask(b"r range --archived=99 a").startswith(b"r ok ")
        later = web.scrape("/metrics/queues")
    archive = {key: value for key, value in told.items() if "archive" in key[0]}
    assert archive == {("mqks_queue_archive_lag", "a"): 1, ("mqks_queue_archived_seq", "a"): 1}
    assert later["mqks_queue_archive_lag", "a"] == 0, "no further than its end"


def test_a_label_says_which_queues_wait_for_no_consumer(server: ServerProcess, web: Web) -> None:
    with LineClient(server.address) as client:
        for name in (b"jobs", b"jobs.dead", b"events"):
            assert client.ask(b"s subscribe --confirm %b e" % name) == b"s ok "
        assert client.ask(b"s set_queue --confirm --dead-letters=jobs.dead jobs") == b"s ok "
        assert client.ask(b"r range --archived=1 events").startswith(b"r ok ")
        text = web.ask("/metrics/queues").text
    metric = "mqks_queue_messages_ready"
    assert [line for line in text.splitlines() if line.startswith(metric)] == [
        f'{metric}{{queue="jobs"}} 0',
        f'{metric}{{queue="jobs.dead",role="dead_letters"}} 0',
        f'{metric}{{queue="events",role="archive"}} 0',
    ]


def test_a_schedule_that_fails_is_counted(server: ServerProcess, web: Web) -> None:
    with LineClient(server.address) as client:
        assert web.scrape()["mqks_schedules_failing", ""] == 0
        line = b"s schedule --confirm each --every=1 publish --mandatory none x"
        assert client.ask(line) == b"s ok "
    assert until(lambda: web.scrape()["mqks_schedules_failing", ""] == 1)


def test_the_broker_has_a_name_wherever_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--http-port", "0", "--page", "read", "--broker-name", "prod 1")
    with ServerProcess(tmp_path / "mqks.db", *flags) as server:
        web = Web(server)
        assert 'mqks_build_info{name="prod 1",' in web.ask("/metrics").text
        page = web.ask("/").text
        assert "<title>prod 1 · Overview · MQKS</title>" in page
        assert "<strong>prod 1</strong>" in page
        with LineClient(server.address) as client:
            assert client.stats()["name"] == "prod 1"
        assert main(["ping", "--url", server.url]) == 0
        assert capsys.readouterr().out.endswith(" ms (prod 1)\n")
        lines = server.log.splitlines()
        assert all(' broker="prod 1" event=' in line for line in lines[1:])
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        assert client.stats()["name"] == socket.gethostname()
        assert f" broker={socket.gethostname()}" in server.log.splitlines()[0]
        assert "broker=" not in server.log.splitlines()[1]


def test_when_the_certificate_expires(tmp_path: Path, tls_port: int) -> None:
    _, flags = with_tls(tmp_path, tls_port)
    with ServerProcess(tmp_path / "mqks.db", "--http-port", "0", *flags) as server:
        told = Web(server).scrape()["mqks_certificate_expiry_timestamp_seconds", ""]
    served = load_pem_x509_certificate((tmp_path / "cert.pem").read_bytes())
    assert told == served.not_valid_after_utc.timestamp()


def test_many_queues_are_told_once_each(server: ServerProcess, web: Web) -> None:
    count = 4 * metrics.SLICE_QUEUES + 1
    with LineClient(server.address) as client:
        client.send(b"".join(b"s subscribe q%d e\n" % number for number in range(count)))
        assert client.ask(b"m publish --confirm e x") == b"m ok "

        told = web.scrape("/metrics/queues")

    assert told == {
        (name, f"q{number}"): told[name, f"q{number}"]
        for name in metrics.QUEUES
        if not any(word in name for word in ("fullness", "archive", "oldest_unacked"))
        for number in range(count)
    }
    assert {value for (name, _), value in told.items() if name.endswith("_ready")} == {1}


# ------------------------------------------------------------------------------------------ HTTP


def test_health_and_what_is_not_there(server: ServerProcess, web: Web) -> None:
    plain = "text/plain; charset=utf-8"
    for path in ("/healthz", "/readyz"):
        answer = web.ask(path)
        assert (answer.status, answer.headers["content-type"], answer.text) == (200, plain, "ok\n")
    for path in ("/metrics", "/metrics/queues", "/healthz", "/readyz"):
        head = web.ask(path, "HEAD")
        assert (head.status, head.text) == (200, "")
        assert head.headers["content-type"] == web.ask(path).headers["content-type"]
        assert web.ask(path, "POST").status == 405
        assert web.ask(path, Host="evil.example").status == 421
    assert web.ask("/").status == web.ask("/metrics/nope").status == 404
    assert "http_failed" not in server.log


def test_without_a_port_there_is_no_http(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "mqks.db") as server:
        assert server.terminate() == 0
        assert "http" not in server.log


def test_one_connection_too_many_makes_the_oldest_go(web: Web) -> None:
    with ExitStack() as standing:
        peers = [
            standing.enter_context(socket.create_connection(web.address, WAIT_S))
            for _ in range(HTTP_CONNECTIONS_MAX)
        ]
        assert web.ask("/healthz").status == 200
        assert peers[0].recv(1) == b""


def test_who_names_no_host_is_no_browser(web: Web) -> None:
    with socket.create_connection(web.address, WAIT_S) as peer, peer.makefile("rb") as replies:
        peer.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert replies.readline() == b"HTTP/1.1 200 OK\r\n"


def test_beyond_loopback_every_name_may_be_its_own(tmp_path: Path) -> None:
    flags = ("--http-port", "0", "--http-host", "0.0.0.0", "--insecure")
    with ServerProcess(tmp_path / "mqks.db", *flags) as server:
        assert Web(server).ask("/metrics", Host="broker.example").status == 200


@pytest.mark.parametrize("kind", ["ours", "another"])
def test_a_client_of_the_broker_is_told_at_once(
    web: Web, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """It has not waited until a silent connection is closed: then it would say something else."""
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as another:
        Thread(target=another.serve_forever, daemon=True).start()
        host, port = web.address if kind == "ours" else another.server_address[:2]
        for words in (["ping"], ["inspect", "queues"], ["publish", "e", "x"]):
            for credentials in ("", "t0ken@"):
                code = main([*words, "--url", f"mqks://{credentials}{host!s}:{port}"])
                assert code == 69
                assert "the port speaks HTTP" in capsys.readouterr().err
        with pytest.raises(ProtocolViolation, match="the port speaks HTTP"):
            blocking.connect(f"mqks://{host!s}:{port}").__enter__()
        another.shutdown()


def test_it_is_not_ready_while_the_disk_is_full(tmp_path: Path) -> None:
    flags = ("--http-port", "0", "--db-bytes-max", "2MiB", "--ballast-bytes", "0")
    with served(tmp_path / "mqks.db", *flags) as (server, client):
        web = Web(server)
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for number in range(5_000):
            if b" error " in client.ask(b"m%d publish --confirm e %s" % (number, b"x" * 3_000)):
                break
        assert (web.ask("/readyz").status, web.ask("/readyz").text) == (503, "disk full\n")
        assert web.ask("/healthz").status == 200
        values = web.scrape()
        assert (values["mqks_disk_full", ""], values["mqks_ready", ""]) == (1, 0)

        # With the one that found the disk full: it waits to be written.
        assert client.ask(b"p purge --confirm q") == b"p ok %d" % (number + 1)
        until(lambda: web.ask("/readyz").status == 200)
        values = web.scrape()
        assert (values["mqks_disk_full", ""], values["mqks_ready", ""]) == (0, 1)


class _Impatient(ServerProcess):
    """To this one the journal stalls sooner."""

    def _spawn(self, command: list[str]) -> subprocess.Popen[str]:
        code = """if True:
            import sys
            from mqks.commands import main
            from mqks.server import writer
            writer.STALL_S = 0.2
            sys.exit(main(sys.argv[1:]))
        """
        return super()._spawn([command[0], "-c", code, *command[command.index("serve") :]])


def test_it_is_not_ready_while_the_journal_stalls(tmp_path: Path, sync_library: Path) -> None:
    trigger = tmp_path / "sync-hangs"
    environment = {"LD_PRELOAD": str(sync_library), "SYNC_HANGS_WHILE_EXISTS": str(trigger)}
    db = tmp_path / "mqks.db"
    with (
        _Impatient(db, "--http-port", "0", environment=environment) as server,
        LineClient(server.address) as client,
    ):
        web = Web(server)
        trigger.touch()
        # Metadata are committed beside the event loop.
        client.send(b"s subscribe --confirm q e\n")
        until(lambda: web.ask("/readyz").status == 503)
        assert web.ask("/readyz").text == "journal stalls\n"
        assert web.ask("/healthz").status == 200
        trigger.unlink()
        assert client.line() == b"s ok "
        until(lambda: web.ask("/readyz").status == 200)


def test_it_is_not_ready_while_it_stops(tmp_path: Path) -> None:
    flags = ("--http-port", "0", "--drain-timeout-s", "3600")
    with served(tmp_path / "mqks.db", *flags) as (server, client):
        web = Web(server)
        client.send(b"c consume q e\n")
        # More than sockets hold, to a client that reads nothing: the server waits for it.
        client.send(b"".join(b"m publish e %s\n" % (b"x" * 500_000) for _ in range(40)))
        until(lambda: web.scrape()["mqks_messages_ready", ""] > 0)
        codes: list[int] = []
        stopping = Thread(target=lambda: codes.append(server.terminate()))
        stopping.start()

        until(lambda: web.ask("/readyz").status == 503)
        assert web.ask("/readyz").text == "stopping\n"
        assert web.ask("/healthz").status == 200
        with suppress(EOFError):
            while True:
                client.lines()
        stopping.join(WAIT_S)
        assert codes == [0]


def test_a_port_in_use_is_refused(web: Web, tmp_path: Path) -> None:
    code, log = refusal(tmp_path / "other.db", "--http-port", str(web.address[1]))
    assert code == 69
    assert f"can't listen on 127.0.0.1:{web.address[1]}" in log


# -------------------------------------------------------------------- what is written elsewhere


MONITORING = (ROOT / "docs/monitoring.md").read_text()


def test_the_monitoring_page_has_every_metric() -> None:
    rows = re.findall(r"^\| (`mqks_[^|]*) \| (\w+) \|", MONITORING, re.M)
    told = [(name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(name for name, _ in told) == sorted(metrics.NAMES)
    for name, kind in told:
        plain = "counter" if name.endswith("_total") else "gauge"
        assert kind == ("histogram" if name in metrics.HISTOGRAMS else plain), name


def used_names(expression: str) -> set[str]:
    """Metrics an expression asks for, those of histograms without what is added to their name."""
    names = re.findall(r"\b(?:mqks|process|python)_\w+", expression)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def test_the_dashboard_is_made_from_the_metrics() -> None:
    assert dashboard.TARGET.read_text() == dashboard.dashboard(), "run: python -m tools.dashboard"


def test_the_dashboard_can_be_imported_and_asks_for_what_there_is(web: Web) -> None:
    board = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    there = {*metrics.NAMES, *(name for name, _ in web.scrape() if PROCESS.match(name))}
    panels = board["panels"]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}

    assert board["id"] is None, "Grafana gives the id"
    assert isinstance(board["schemaVersion"], int)
    assert (board["title"], board["uid"]) == ("MQKS", "mqks")
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    used: set[str] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert cells, panel["title"]
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24, "Grafana's grid has 24 columns"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        assert panel["description"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert used_names(target["expr"]), target["expr"]
            assert used_names(target["expr"]) <= there, target["expr"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}
            used |= used_names(target["expr"])
    assert used_names(variables["instance"]["definition"]) <= there
    assert set(metrics.NAMES) - used <= {"mqks_build_info", "mqks_queue_consumers"}


def test_the_alerts_ask_for_what_there_is_and_each_tells_what_to_do() -> None:
    alerts = (ROOT / "deploy/prometheus-alerts.yml").read_text().split("- alert: ")[1:]
    assert len(alerts) > 5
    for alert in alerts:
        name, _, rest = alert.partition("\n")
        expression = rest.partition("expr:")[2].partition("labels:")[0]
        assert used_names(expression), name
        assert used_names(expression) <= {*metrics.NAMES, UNTIL}, name
        row = rf"^\| (?:`\w+`, )*`{name}`(?:, `\w+`)* \| \w"
        assert re.search(row, MONITORING, re.M), f"{name} is told nowhere"
