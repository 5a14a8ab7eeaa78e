"""Brokers that wait for a journal in PostgreSQL, and take it over. Real servers and processes."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from mqks.commands import main
from mqks.errors import ConfigurationError
from mqks.server import silence
from mqks.settings import DatabaseUrl
from mqks.testing import Broker
from tests.commands.console import Console
from tests.kit import following
from tests.kit.line_client import LineClient
from tests.kit.ports import free_port
from tests.kit.postgres import Postgres
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import until

pytest.importorskip("psycopg", reason="psycopg is not installed")

HTTP = re.compile(r"event=listening address=http://(\S+)")


class Member(ServerProcess):
    """A broker on a journal, which may have to wait for it."""

    def __init__(self, url: DatabaseUrl, *flags: str) -> None:
        super().__init__(url.text, "--db-replication", "none", "--http-port", "0", *flags)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text, of the HTTP port that it has now."""
        where = until(lambda: HTTP.findall(self.log))[-1]
        try:
            with urlopen(f"http://{where}{path}") as reply:
                return reply.status, reply.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    @property
    def waits(self) -> bool:
        """Whether it says so."""
        return "event=standby" in self.log

    @property
    def serves(self) -> bool:
        return self._listens


@contextmanager
def standby(url: DatabaseUrl, *flags: str) -> Iterator[Member]:
    """A broker that waits."""
    member = Member(url, *flags)
    try:
        until(lambda: member.waits or not member.is_running)
        assert member.waits, member.log
        yield member
    finally:
        member.kill()


def told_by(server: ServerProcess) -> str:
    return f"standby: {os.uname().nodename} pid {server.pid}"


# ------------------------------------------------------------------------------- waiting


def test_a_standby_says_that_it_waits_and_for_whom(
    journal_url: DatabaseUrl, tmp_path: Path
) -> None:
    with Member(journal_url) as active, standby(journal_url) as waiting:
        assert active.get("/readyz") == (200, "ok\n")
        url = f"mqks://127.0.0.1:{active.port}"
        why = f"{told_by(active)} ({url}) owns the journal\n"
        assert until(lambda: "(" in waiting.get("/readyz")[1])
        assert waiting.get("/readyz") == (503, why)
        assert waiting.get("/") == (503, why)
        assert waiting.get("/healthz") == (200, "ok\n")
        assert "\nmqks_active 0.0\n" in waiting.get("/metrics")[1]
        assert "\nmqks_active 1.0\n" in active.get("/metrics")[1]
        assert until(lambda: f"{url}) owns the journal" in waiting.log)
        assert not waiting.serves
        # With the settings of the standby, which has no port for clients.
        port = until(lambda: HTTP.findall(waiting.log))[-1].rpartition(":")[2]
        settings = {"MQKS_DB": journal_url.text, "MQKS_HTTP_PORT": port}
        console = Console(tmp_path, MQKS_PORT=str(free_port()), **settings)
        assert console.out("ping") == f"standby: {why.removeprefix('standby: ')}"
        assert waiting.stop() == 0


def test_a_standby_opens_no_socket_for_clients(journal_url: DatabaseUrl, tmp_path: Path) -> None:
    path = tmp_path / "mqks.sock"
    port = free_port()
    flags = "--port", str(port), "--unix", str(path)
    with Member(journal_url) as active, standby(journal_url, *flags) as waiting:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert not path.exists()
        assert active.stop() == 0
        assert waiting.address[1] == port
        assert path.exists()
        assert waiting.stop() == 0


def test_a_service_manager_sees_a_standby_as_started(
    journal_url: DatabaseUrl, tmp_path: Path
) -> None:
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, Member(journal_url) as active:
        manager.bind(name)
        manager.settimeout(60)
        told: list[str] = []

        def hears(text: str) -> None:
            while not any(text in each for each in told):
                told.append(manager.recv(4096).decode())

        waiting = Member(journal_url)
        waiting.kill()
        waiting._environment |= {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000"}
        waiting.launch()
        try:
            hears("READY=1")
            hears(f"STATUS={told_by(active)}")
            told.clear()
            hears("WATCHDOG=1")
            assert active.stop() == 0
            hears("STATUS=listening on")
            told.clear()
            hears("WATCHDOG=1")
        finally:
            waiting.kill()


def test_a_standby_with_settings_that_endanger_confirms_is_refused(
    journal_url: DatabaseUrl,
) -> None:
    with Member(journal_url):
        code, log = refusal(journal_url.text)
        assert (code, "db_replication" in log) == (ConfigurationError.exit_code, True)


@pytest.mark.slow
def test_a_standby_goes_on_waiting_while_the_database_is_away() -> None:
    with Postgres(fsync="on") as server:
        url = DatabaseUrl(server.url())
        with Member(url) as active, standby(url) as waiting:
            server.kill()
            until(lambda: "owns the journal" not in waiting.get("/readyz")[1])
            code, why = waiting.get("/readyz")
            assert (code, why.startswith("standby: ")) == (503, True)
            assert not waiting.serves
            server.start()
            until(lambda: f"{told_by(active)} " in waiting.get("/readyz")[1])
            assert active.get("/readyz")[0] == 200 or until(lambda: active.get("/readyz")[0] == 200)
            assert waiting.stop() == 0


# ------------------------------------------------------------------------------- taking over


def test_the_url_of_an_owner_is_one_for_other_machines(journal_url: DatabaseUrl) -> None:
    with Member(journal_url, "--host", "0.0.0.0", "--insecure") as active:
        with LineClient(("127.0.0.1", active.port)) as client:
            row = client.stats("journal")
        assert row["owner_url"] == f"mqks://{os.uname().nodename}:{active.port}"
        assert active.stop() == 0


def test_sigterm_hands_the_journal_over(journal_url: DatabaseUrl) -> None:
    with Member(journal_url) as active, standby(journal_url) as waiting:
        with LineClient(active.address) as client:
            assert client.ask(b"s subscribe --confirm q e") == b"s ok "
            assert client.ask(b"m publish --confirm e x") == b"m ok "
        assert active.stop() == 0
        with LineClient(waiting.address) as client:
            assert client.ask(b"n publish --confirm e y") == b"n ok "
            assert [client.ask(b"c consume q"), client.line()] == [
                b"c ok m event=e x",
                b"c ok n event=e y",
            ]
        assert waiting.get("/readyz") == (200, "ok\n")
        until(lambda: "event=claimed" in waiting.log)
        # A broker that has stopped waits in its turn.
        with standby(journal_url) as next_one:
            assert waiting.stop() == 0
            assert next_one.address


def test_transactions_are_whole_after_a_take_over(journal_url: DatabaseUrl) -> None:
    with Member(journal_url) as active, standby(journal_url, "--eval", "on") as waiting:
        following.follow(active.address, 300)
        active.kill()
        following.check(waiting.address, 300)


def test_commands_tell_who_is_active(
    journal_url: DatabaseUrl, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    flags = "--port", str(port), "--http-port", str(free_port())
    with Member(journal_url) as active, standby(journal_url, *flags) as waiting:
        there = f"mqks://127.0.0.1:{port}"
        urls = f"{there},mqks://127.0.0.1:{active.port}"

        def asked(*command: str) -> str:
            assert main([*command, "--url", urls]) == 0
            return capsys.readouterr().out

        row = json.loads(asked("inspect", "journal", "--json"))
        assert (row["owner"], row["claim"]) == (f"{os.uname().nodename} pid {active.pid}", 1)
        assert row["owner_url"] == f"mqks://127.0.0.1:{active.port}"
        assert row["active_s"] > 0
        assert f"active: {row['owner']}" in asked("top", "--count", "1")
        assert main(["inspect", "journal", "--url", there]) == 69
        assert f"no server at 127.0.0.1:{port}" in capsys.readouterr().err
        active.stop()
        assert waiting.address
        row = json.loads(asked("inspect", "journal", "--json"))
        assert (row["owner"], row["claim"]) == (f"{os.uname().nodename} pid {waiting.pid}", 2)
        until(lambda: waiting.get("/healthz")[0] == 200 and waiting.get("/readyz")[0] == 200)
        assert len(HTTP.findall(waiting.log)) == 1


def test_a_reload_of_a_standby_is_done_when_it_takes_over(
    journal_url: DatabaseUrl, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    users.write_text("")
    with Member(journal_url) as active, standby(journal_url, "--users", str(users)) as waiting:
        waiting.hang_up()
        assert active.stop() == 0
        assert waiting.address
        until(lambda: "event=reloaded" in waiting.log)
        assert waiting.stop() == 0


@pytest.mark.slow
def test_of_two_standbys_one_takes_over_and_the_other_waits_for_it(
    journal_url: DatabaseUrl,
) -> None:
    with Member(journal_url) as active, ExitStack() as members:
        waiting = [members.enter_context(standby(journal_url)) for _ in range(2)]
        active.stop()
        [winner] = until(lambda: [each for each in waiting if each.serves])
        [loser] = [each for each in waiting if each is not winner]
        until(lambda: told_by(winner) in loser.get("/readyz")[1])
        assert not loser.serves


# ------------------------------------------------------------------------------- without commits


WAITING = "select 1 from pg_stat_activity where wait_event = 'SyncRep' and query like '%probe%'"


@contextmanager
def uncommitted(server: Postgres) -> Iterator[None]:
    """Commits wait meanwhile, as for a standby that is gone; the database can be read."""
    server.change(synchronous_standby_names="nobody")
    with server.connection() as probe, server.connection() as look:
        # Sessions learn of it a moment later: from when on a commit waits.
        create = Thread(target=probe.execute, args=(b"create table if not exists probe ()",))
        create.start()
        until(lambda: look.execute(WAITING).fetchone() is not None)
        try:
            yield
        finally:
            server.change(synchronous_standby_names="")
            create.join()


def line_of(client: LineClient) -> bytes | None:
    with suppress(TimeoutError):
        return client.line()
    return None


@pytest.mark.slow
def test_what_the_journal_holds_is_not_delivered_while_it_does_not_commit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(silence, "SILENT_S", 1.5)
    with (
        Postgres(fsync="on") as server,
        Broker(DatabaseUrl(server.url()), db_replication="none") as broker,
        LineClient(("127.0.0.1", broker.port)) as publisher,
        LineClient(("127.0.0.1", broker.port)) as client,
        LineClient(("127.0.0.1", broker.port), 1.0) as straight,
    ):
        assert publisher.ask(b"s subscribe --confirm q e") == b"s ok "
        assert publisher.ask(b"t subscribe --confirm d f") == b"t ok "
        for number in b"123":
            assert publisher.ask(b"m%c publish --confirm e x" % number).endswith(b" ok ")
        assert client.ask(b"c consume --confirm q --manual-ack --prefetch=1") == b"c ok "
        assert client.line() == b"c ok m1 event=e x"
        assert straight.ask(b"k consume --confirm d") == b"k ok "
        assert publisher.ask(b"l publish --confirm --delay=4 f later") == b"l ok "
        with uncommitted(server):
            until(lambda: "deliveries_paused" in caplog.messages)
            client.send(b"a ack c m1\n")
            publisher.send(b"n publish f now\n")
            assert straight.line() == b"k ok n event=f now"
            for _ in range(5):
                assert line_of(straight) is None
            with LineClient(("127.0.0.1", broker.port)) as other:
                assert b" ok " in other.ask(b"p ping x")
            client._socket.settimeout(0.5)
            assert line_of(client) is None
        until(lambda: "deliveries_go_on" in caplog.messages)
        assert until(lambda: line_of(client)) == b"c ok m2 event=e x"
        assert until(lambda: line_of(straight)) == b"k ok l event=f later"


@pytest.mark.slow
def test_clients_of_a_broker_that_can_commit_no_more_are_closed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(silence, "FORSAKEN_S", 3.0)
    with (
        Postgres(fsync="on") as server,
        Broker(DatabaseUrl(server.url()), db_replication="none") as broker,
    ):
        address = "127.0.0.1", broker.port
        with LineClient(address) as client:
            assert client.ask(b"s subscribe --confirm q e") == b"s ok "
            with uncommitted(server):
                client.send(b"m publish --confirm e x\n")
                why = silence.WHY.encode()
                assert re.fullmatch(rb"- error [0-9a-f]{24} " + why, client.line())
                with pytest.raises(EOFError):
                    client.line()
                assert "clients_closed" in caplog.messages
                with LineClient(address) as refused:
                    assert refused.line().endswith(why)
                    with pytest.raises(EOFError):
                        refused.line()
                for command in (["ping"], ["peek", "q"]):
                    url = f"mqks://127.0.0.1:{broker.port}"
                    assert main([*command, "--url", url, "--timeout", "60"]) != 0
                    assert f"refused by the server: {silence.WHY}" in capsys.readouterr().err
        until(lambda: "clients_accepted" in caplog.messages)
        with LineClient(address) as client:
            assert client.ask(b"n publish --confirm --mandatory e x") == b"n ok "
