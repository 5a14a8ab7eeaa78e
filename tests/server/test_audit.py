"""Who did what: what has a record, and where: in the log, a file, syslog, the database."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mqks import users_file
from mqks.commands import main
from mqks.limits import (
    AUDIT_BEYOND_MAX,
    AUDIT_PARTY_FAILED_LOGINS_PER_SECOND_MAX,
    AUDIT_PARTY_PER_SECOND_MAX,
    AUDIT_TEXT_BYTES_MAX,
)
from mqks.protocol.requests import ACTIONS
from tests.kit.bare import BareWorld
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import until
from tests.server.test_security import ROOT, WORKER, login, user

SYSLOG = Path("/dev/log")
Row = dict[str, Any]


@pytest.fixture
def users(tmp_path: Path) -> str:
    users_file.write(tmp_path / "users", [ROOT, WORKER])
    return str(tmp_path / "users")


def told(client: LineClient, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in keys) for row in client.stats("audit")]


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> list[Row]:
    capsys.readouterr()
    assert main(["inspect", "audit", "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def lines(text: str, event: str) -> list[dict[str, str]]:
    """The fields of these lines, which have no spaces in them."""
    return [
        dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        for line in text.splitlines()
        if f"event={event} " in line
    ]


# -------------------------------------------------------------------------------- what is recorded

DOES: dict[str, list[tuple[bytes, int | None]]] = {
    "subscribe": [(b"new e1 e2 --add-mask x.*", 3)],
    "consume": [(b"q --add other", 1)],
    "rebind": [(b"q --remove e", 1)],
    "cancel": [(b"q --all", 1)],
    "promote": [(b"q later", 1)],
    "move": [(b"q r --limit=2", 2)],
    "redrive": [(b"dead", 1)],
    "cancel_job": [(b"q later", None)],
    "delete_consumer": [(b"other queue=r", None)],
    "delete_queue": [(b"q", 4), (b"r --when-unused=9", None)],
    "set_queue": [(b"q --retries=3", None)],
    "pause": [(b"q --for=9", None)],
    "resume": [(b"r", None)],
    "trace": [(b"a.*", None)],
    "rename": [(b"r r2", None)],
    "purge": [(b"q --id=m1", 1), (b"q", 2)],
    "trim": [(b"q 3", 2)],
    "schedule": [(b"beat --every=9 publish beat", None), (b"beat --pause", None)],
    "unschedule": [(b"beat", None)],
    "open_batch": [(b"c publish e", None), (b"b", None)],
    "close_batch": [(b"b", 1)],
    "close_connection": [(b"2", 1)],
    "drain": [(b"--timeout=0", None), (b"--off", None)],
    "read_only": [(b"on", None), (b"off", None)],
    "reload": [(b"", None)],
}
"""Arguments of each action that has records, and how many messages, bindings or connections it
is."""
BEFORE = b"""s subscribe q e
t subscribe r f
m1 publish e 1
m2 publish e 2
m3 publish e 3
later publish --delay=999 e x
d set_queue r --retries=0 --dead-letters=dead
c consume r --manual-ack
mr publish f y
x reject --confirm c mr
p pause r --deliveries
y delete_consumer c
o open_batch b
"""


@pytest.mark.parametrize("action", [each.name for each in ACTIONS.values() if each.is_audited])
def test_each_action_that_changes_something_has_a_record(action: str) -> None:
    world = BareWorld()
    world.send("k", BEFORE)
    world.send("other", b"other consume r\n")
    for what, count in DOES[action]:
        data = b" the-data" if b"publish" in what else b""
        words = what.replace(b" queue=r", b"") + data
        world.send("k", b"a %b --confirm %b\n" % (action.encode(), words))
        record = world.broker.audit.last[-1]
        assert (record.action, record.what.encode(), record.count) == (action, what, count)


def test_what_changes_nothing_has_no_record() -> None:
    world = BareWorld()
    world.send("k", BEFORE)
    world.send("k", b"c consume q\nn delete_queue q --when-unused\nt set_queue t --retries=1\n")
    world.send("k", b"i pause t\nj resume t\n")
    records = len(world.broker.audit.last)
    world.send(
        "k",
        b"j resume t\ns subscribe q e\nt set_queue t --retries=1\nd consume q --manual-ack --keep\n"
        b"e delete_consumer d\np purge none\np purge t\nu rebind q --remove gone\n"
        b"v delete_queue none\nw delete_queue q --when-unused\nx close_connection 99\n"
        b"1 drain --off\n2 read_only off\n"
        b"y move t q\nz delete_consumer nobody\npub publish e x\na ack --all c\n"
        b"r subscribe\nk set_name me\nh help\nst stats\n",
    )
    assert len(world.broker.audit.last) == records


def test_moves_of_a_transaction_have_records() -> None:
    world = BareWorld()
    world.send("k", BEFORE)
    world.send("k", b"b begin\nv move q r --limit=1\nw trim q 9\nx publish e z\nc commit\n")
    [moved, trimmed] = [*world.broker.audit.last][-2:]
    assert (moved.action, moved.what, moved.count) == ("move", "q r --limit=1", 1)
    assert (trimmed.action, trimmed.what, trimmed.count) == ("trim", "q 9", 2)


def test_who_gives_back_what_others_hold_has_a_record() -> None:
    world = BareWorld()
    world.send("k", BEFORE)
    world.send("k", b"s subscribe held e\nc1 consume held --manual-ack\nm publish e x\n")
    records = len(world.broker.audit.last)
    world.send("k", b"r reject c1 m\ng reject c1 --all\n")
    assert len(world.broker.audit.last) == records, "its own"
    world.send("o", b"r reject --confirm c1 --pause=10 --all\na ack c1 --all\n")
    told = [(each.action, each.what) for each in world.broker.audit.last][records:]
    assert told == [("reject", "c1 --pause=10 --all"), ("ack", "c1 --all")]


def test_whose_consumer_was_ended_is_told() -> None:
    world = BareWorld()
    world.connection("o").user = "alice"
    world.send("o", b"c1 consume jobs\n")
    world.send("k", b"d delete_consumer --confirm c1 --tell\n")
    assert world.broker.audit.last[-1].what == "c1 --tell queue=jobs user=alice"


def test_who_has_read_a_queue_trims_it_without_a_record() -> None:
    world = BareWorld()
    world.send("k", BEFORE)
    records = len(world.broker.audit.last)
    epoch = world.broker.shared.facts.epoch_of(world.broker.queues[b"q"].id)
    world.send("k", b"t trim --confirm q 3 --epoch=%b\n" % epoch.encode())
    assert world.received("k").endswith(b"t ok 2\n")
    assert len(world.broker.audit.last) == records


def test_long_arguments_are_cut() -> None:
    world = BareWorld()
    world.send("k", b"s subscribe q " + b" ".join(b"event-%d" % n for n in range(5000)) + b"\n")
    [record] = world.broker.audit.last
    assert (record.count, len(record.what)) == (5000, AUDIT_TEXT_BYTES_MAX)


# --------------------------------------------------------------------------------------- who it was


def test_logins_failed_logins_and_whose_a_line_is(db: Path, users: str) -> None:
    with ServerProcess(db, "--users", users, "--auth", "always") as server:
        with LineClient(server.address) as client:
            assert b" error " in client.ask(b"a auth mallory guess-1")
            assert b" error " in client.ask(b"b auth guess-2")
            client.send(b"n set_name web-1\n")
            assert client.ask(b"c auth --confirm worker worker") == b"c ok "
            assert client.ask(b"s subscribe --confirm work-1 job.1") == b"s ok "
            assert b" error " in client.ask(b"p purge --confirm work-1")
            login(client, "root")
            assert client.ask(b"m publish --confirm job.1 payload") == b"m ok "
            assert client.ask(b"p purge --confirm work-1") == b"p ok 1"
            assert client.stats()["failed_logins"] == 2
            assert told(client, "user", "action", "what", "count") == [
                (None, "failed_login", "mallory", None),
                (None, "failed_login", "", None),
                ("worker", "login", "", None),
                ("worker", "subscribe", "work-1 job.1", 1),
                ("root", "login", "", None),
                ("root", "purge", "work-1", 1),
            ]
        until(lambda: "action=purge" in server.log)
        log = server.log
    assert [row["tried"] for row in lines(log, "login_failed")] == ["mallory", '""']
    assert [(row["user"], row["client"]) for row in lines(log, "login")] == [
        ("worker", "web-1"),
        ("root", "web-1"),
    ]
    [purged] = [row for row in lines(log, "changed") if row["action"] == "purge"]
    assert (purged["user"], purged["client"], purged["count"]) == ("root", "web-1", "1")
    assert lines(log, "request_failed")[-1]["user"] == "worker"
    for secret in ("guess", "rootT", "workerT", "payload"):
        assert secret not in log


def test_a_reload_tells_which_users_are_others(db: Path, users: str) -> None:
    with served(db, "--users", users, "--auth", "always") as (server, client):
        login(client, "root")
        users_file.write(Path(users), [ROOT, user("worker", admin=True), user("new")])
        server.hang_up()
        until(lambda: "event=reloaded" in server.log)
        assert told(client, "user", "action", "what")[-1] == (None, "reload_users", "new worker")
        server.hang_up()
        until(lambda: server.log.count("event=reloaded") == 2)
        assert len(told(client, "id")) == 2


# -------------------------------------------------------------------------------- where records are


@pytest.mark.parametrize("store", ["db", "journal_url"])
def test_records_are_durable_and_the_oldest_are_deleted(
    store: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    place = request.getfixturevalue(store)
    where = str(getattr(place, "text", place))
    flags = ("--db-replication", "none")
    with served(where, *flags, "--audit-kept-max", "3") as (server, k):
        for n in range(5):
            assert k.ask(b"s subscribe --confirm q%d e" % n) == b"s ok "
        server.kill()
    rows = inspected(capsys, "--db", where)
    assert [(row["id"], row["what"]) for row in rows] == [(5, "q4 e"), (4, "q3 e"), (3, "q2 e")]
    with ServerProcess(where, *flags) as server, LineClient(server.address) as client:
        assert told(client, "what") == [("q2 e",), ("q3 e",), ("q4 e",)]
        assert client.ask(b"d delete_queue --confirm q0") == b"d ok "
        [newest, *_] = inspected(capsys, "--url", server.url, "--limit", "2")
        assert (newest["id"], newest["action"], newest["what"]) == (6, "delete_queue", "q0")


def test_a_file_that_is_renamed_is_opened_again(db: Path, tmp_path: Path) -> None:
    file, old = tmp_path / "audit.log", tmp_path / "audit.log.1"
    with ServerProcess(db, "--audit", str(file)) as server:
        with LineClient(server.address) as client:
            client.ask(b"s subscribe --confirm q1 e")
            until(lambda: 'what="q1 e"' in file.read_text())
            file.rename(old)
            client.ask(b"s subscribe --confirm q2 e")
            until(lambda: file.exists() and 'what="q2 e"' in file.read_text())
            file.unlink()
            file.mkdir()
            client.ask(b"s subscribe --confirm q3 e")
            until(lambda: "event=audit_failed" in server.log)
        assert "event=changed" not in server.log
    code, log = refusal(db, "--audit", str(tmp_path / "none" / "audit.log"))
    assert (code, "audit: " in log) == (78, True)


@pytest.fixture
def syslog() -> Iterator[socket.socket]:
    if os.path.lexists(SYSLOG):
        pytest.skip("there is a syslog, or was one")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listening:
        try:
            listening.bind(str(SYSLOG))
        except PermissionError:
            pytest.skip("only root may make /dev/log")
        listening.settimeout(30)
        try:
            yield listening
        finally:
            SYSLOG.unlink()


def test_syslog_gets_them(db: Path, syslog: socket.socket) -> None:
    with ServerProcess(db, "--audit", "syslog") as server, LineClient(server.address) as client:
        client.ask(b"s subscribe --confirm q1 e")
        # Facility auth, severity info.
        line = syslog.recv(10_000)
        assert line.startswith(b"<38>mqks: time=")
        assert b" event=changed " in line
        assert b' what="q1 e"' in line


def test_off_records_nothing(db: Path) -> None:
    with ServerProcess(db, "--audit", "off") as server, LineClient(server.address) as client:
        client.ask(b"s subscribe --confirm q1 e")
        assert client.stats("audit") == []
        assert "event=changed" not in server.log


# ------------------------------------------------------------------------------------------- floods


def test_what_is_beyond_the_limit_is_counted(db: Path) -> None:
    binds = 5_000
    with ServerProcess(db) as server, LineClient(server.address) as client:
        client.send(b"".join(b"r rebind q --add e%d\n" % n for n in range(binds)))
        assert client.ask(b"p ping") == b"p ok "
        until(lambda: sum(count or 0 for (count,) in told(client, "count")) == binds)
        records = told(client, "action", "requests", "count")
        seconds = [each for each in records if each[1] > 1]
        assert seconds
        assert all(each[:1] == ("rebind",) for each in seconds)
        assert len(records) <= (AUDIT_PARTY_PER_SECOND_MAX + 2) * (len(seconds) + 1)
        until(lambda: len(lines(server.log, "changed")) == len(records))


def test_who_guesses_fills_nothing_and_hides_nobody() -> None:
    world = BareWorld(auth="always")
    audit, broker = world.broker.audit, world.broker
    for n in range(50):
        connection = broker.connect(f"10.0.0.1:{n}", local=False, source=b"10.0.0.1")
        audit.failed_login(connection, b"root")
    for n in range(3 * AUDIT_BEYOND_MAX):
        source = b"10.1.%d.%d" % divmod(n, 256)
        audit.failed_login(broker.connect(source.decode(), local=False, source=source), b"root")
    audit.note(broker.connect("10.2.0.1", local=False, source=b"10.2.0.1"), "purge", b"q", 1)
    assert audit.last[-1].action == "purge"
    world.advance(1.0)  # Then ends the second that is counted.
    records = audit.last
    assert len(records) <= 20 + 1 + AUDIT_BEYOND_MAX + 1
    assert sum(each.requests for each in records) == 50 + 3 * AUDIT_BEYOND_MAX + 1
    one = [each for each in records if each.connection.startswith("10.0.0.1:")]
    assert [each.requests for each in one] == [
        *[1] * AUDIT_PARTY_FAILED_LOGINS_PER_SECOND_MAX,
        50 - AUDIT_PARTY_FAILED_LOGINS_PER_SECOND_MAX,
    ]
