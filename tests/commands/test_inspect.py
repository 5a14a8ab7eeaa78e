"""`mqks inspect` from outside: a running server and its file tell the same, and looking leaves both
as they are."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sqlite3
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mqks.commands import main
from mqks.commands.inspect import app
from mqks.inspection.text import moment, time_text
from tests.commands.console import MQKS, Terminal
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

ODD = b"od\xffd"
"""A queue's name that is no UTF-8."""
COMMANDS = [
    *("queues", "bindings", "schedules", "batches", "results", "consumers", "connections"),
    *("unacked", "errors", "journal", "stats", "queue mail", "messages mail --data"),
    "error {error_id}",
]

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("LINES", "25")  # Without it COLUMNS does not count on such a terminal.


class World:
    """A server on ./mqks.db with something of everything in it, and its one client."""

    def __init__(self) -> None:
        self.db = Path("mqks.db").absolute()
        self.server = ServerProcess(self.db)
        self.client = client = LineClient(self.server.address)
        for request in (
            b"subscribe --confirm mail user.new user.gone",
            b"delete_queue --confirm mail --when-unused=600",
            b"subscribe --confirm %s a,seq=1" % ODD,
            b"rebind --confirm ghost user.new --add-mask user.*",
            b"schedule --confirm %s 0 3 * * * --tz=Europe/Berlin publish user.new \xff" % ODD,
            b"schedule --confirm beat --every=7200 --pause publish --ttl=5 user.new x",
        ):
            assert client.ask(b"s " + request) == b"s ok "
        for consumer, queue, event in ((b"w", b"held", b"user.new"), (b"r", b"back", b"again")):
            request = b"%s consume --confirm %s %s --manual-ack" % (consumer, queue, event)
            assert client.ask(request) == consumer + b" ok "
        # Rejected, given out once more and brought back: it waits with a retry.
        client.send(b"m0 publish again x\n")
        assert client.line() == b"r ok m0 event=again x"
        client.send(b"a reject r m0\n")
        assert client.line() == b"r ok m0 event=again,retry=1 x"
        assert client.ask(b"d delete_consumer --confirm r") == b"d ok "
        for number in range(1, 4):
            client.send(b"m%d publish user.new {}\n" % number)
            assert client.line() == b"w ok m%d event=user.new {}" % number
        for line in (b"user.gone \xff\x1b[2J " + b"=" * 100, b"a,seq=1 x", b"nowhere x"):
            assert client.ask(b"p publish --confirm " + line) == b"p ok "
        self.error_id = client.ask(b"e\xff\x1b[2J frob").split(b" error ")[1].decode()
        # Its commit holds all that came before.
        assert client.ask(b"p subscribe --confirm held user.new") == b"p ok "

    def close(self) -> None:
        self.client.close()
        self.server.kill()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["inspect", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Row]]:
    """The rows that a command tells."""

    def ask(*arguments: object) -> list[Row]:
        code, out, err = run(capsys, *arguments, "--json")
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return ask


Told = Callable[..., list[Row]]


# --------------------------------------------------------------------- the server and its file


def test_a_stopped_file_tells_what_the_server_told_of_results(
    server: ServerProcess, told: Told
) -> None:
    with LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm old job") == b"s ok "
        for name, keep_s in ((b"a\xff", b"900"), (b"b", b"900"), (b"c", b"900"), (b"d", b"0.001")):
            line = b"%b publish --confirm --keep-result=%b job x" % (name, keep_s)
            assert client.ask(line) == name + b" ok "
        client.send(b"h consume old --manual-ack --prefetch=1\n")
        assert client.line() == b"h ok a\xff event=job x"
        client.send(b"a ack h a\xff --result=yes\n")
        assert client.line() == b"h ok b event=job x"
        assert client.ask(b"x cancel_job --confirm --reason=late old c") == b"x ok cancelled"
        assert client.ask(b"x cancel_job --confirm old d") == b"x ok cancelled"
        client.send(b"n rename --confirm old new\n")
        assert sorted(client.line()[:4] for _ in range(2)) == [b"h ok", b"n ok"]
        rows = told("results", "--url", server.url)
        server.kill()
    assert told("results", "--db", "mqks.db") == rows
    states = [(row["id"], row["state"], row["queue"], row["data_bytes"]) for row in rows]
    assert states[0] == ("a\udcff", "done", "old", 3)
    assert states[1:] == [("b", "waiting", "new", None), ("c", "cancelled", "old", None)]
    assert [row["reason"] for row in rows] == [None, None, "late"]
    assert (rows[0]["keep_s"], rows[1]["until"]) == (900.0, None)


@pytest.mark.parametrize("crash", [True, False], ids=["killed", "stopped"])
def test_a_stopped_file_tells_what_the_server_told_of_batches(
    server: ServerProcess, told: Told, crash: bool
) -> None:
    with LineClient(server.address) as client:
        for line in (
            b"open_batch --confirm %s publish --ttl=5 user.new \xff" % ODD,
            b"open_batch --confirm %s --on-dead publish user.gone 1" % ODD,
            b"open_batch --confirm empty",
            b"subscribe --confirm row row.held row",
        ):
            assert client.ask(b"s " + line) == b"s ok "
        for number in range(6):
            line = b"b%d publish --confirm --batch=%s row x" % (number, ODD)
            assert client.ask(line) == b"b%d ok " % number
        # Of the six one is done, one dead, one waits for a time; a lease and two are running.
        assert client.ask(b"r receive row --lease=900")[:7] == b"r ok b0"
        assert client.line() == b"r ok --end"
        client.send(b"h consume row --manual-ack --prefetch=4\n")
        assert [client.line()[:7] for _ in range(4)] == [b"h ok b%d" % n for n in range(1, 5)]
        client.send(b"a ack h b1\nr reject --dead h b2\nr reject --confirm --delay=900 h b3\n")
        assert sorted(client.line()[:7] for _ in range(2)) == [b"h ok b5", b"r ok "]
        rows = told("batches", "--url", server.url)
        messages = told("messages", "row", "--url", server.url)
        server.kill() if crash else server.stop()
    assert told("batches", "--db", "mqks.db") == rows
    empty, odd = rows
    assert (empty["name"], odd["name"], empty["publish"]) == ("empty", "od\udcffd", None)
    counts = [odd[each] for each in ("total", "waiting", "running", "done", "dead")]
    assert counts == [6, 1, 3, 1, 1]
    assert (odd["publish"], odd["on_dead"]) == ("--ttl=5 user.new \udcff", "user.gone")
    here = told("messages", "row", "--db", "mqks.db")
    assert [row["id"] for row in here] == [row["id"] for row in messages]
    assert {row["batch"] for row in here} == {"od\udcffd"}


KNOWN_TO_BOTH = {
    "queues": ("name", "ready", "unacked", "bindings", "rule", "next_seq"),
    "queue mail": ("name", "ready", "unacked", "bindings", "rule", "next_seq", "events"),
    "queue held": ("name", "ready", "unacked", "bindings", "rule", "next_seq", "events"),
    "bindings": ("queue", "event", "mask", "exists"),
    "bindings user.new": ("queue", "event", "mask", "exists"),
    "messages mail --data": (
        *("seq", "time", "id", "event", "data_bytes"),
        *("retry", "data", "data_base64", "doubtful"),
    ),
    "messages back": ("seq", "time", "id", "event", "data_bytes", "retry"),
    "messages held": ("seq", "time", "id", "event", "data_bytes"),
    "messages od\udcffd": ("seq", "time", "id", "event", "data_bytes", "retry"),
    "unacked": ("queue", "id", "event", "seq", "data_bytes"),
    "unacked held": ("queue", "id", "event", "seq", "data_bytes"),
    "unacked mail": (),
    "journal": ("epoch", "messages"),
    "stats": ("epoch", "queues", "bindings", "messages_ready", "messages_unacked"),
    "errors": ("id", "time", "connection", "request_id", "action", "reason"),
    "schedules": (
        *("name", "cron", "every_s", "tz", "event", "publish", "missed", "jitter_s"),
        *("paused", "next", "next_us", "last", "last_us", "error"),
    ),
}


@pytest.mark.parametrize("crash", [True, False], ids=["killed", "stopped"])
def test_a_stopped_file_tells_what_the_server_told(world: World, told: Told, crash: bool) -> None:
    live = {command: told(*command.split()) for command in KNOWN_TO_BOTH}
    world.server.kill() if crash else world.server.stop()
    file = {command: told(*command.split()) for command in KNOWN_TO_BOTH}

    for command, columns in KNOWN_TO_BOTH.items():
        both = [
            [{key: row.get(key) for key in columns} for row in seen[command]]
            for seen in (live, file)
        ]
        assert both[0] == both[1], command
        for there, here in zip(live[command], file[command], strict=True):
            assert there.keys() <= here.keys()
    assert [row["name"] for row in live["queues"]] == ["back", "held", "mail", "od\udcffd"]
    assert [row["unacked"] for row in live["queues"]] == [0, 3, 0, 0]
    assert [row["name"] for row in live["schedules"]] == ["beat", "od\udcffd"]
    ghost: Row = {"queue": "ghost", "event": "user.new", "mask": None, "exists": False}
    by_mask = ghost | {"event": None, "mask": "user.*"}
    for command in ("bindings", "bindings user.new"):
        assert [ghost in live[command], by_mask in live[command]] == [True, True]
    assert [row["retry"] for row in live["messages back"]] == [2]
    assert [row["id"] for row in file["unacked"]] == ["m1", "m2", "m3"]
    assert [row["event"] for row in file["messages od\udcffd"]] == ["a,seq=1"]
    for queue, row in zip(live["queues"], file["queues"], strict=True):
        assert (
            (queue["oldest_age_s"] is None) == (row["oldest_age_s"] is None) == (not row["ready"])
        )


def test_consumers_and_connections_are_those_of_a_running_server(
    world: World, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    [consumer] = told("consumers")
    first, _itself = told("connections")
    assert (consumer["id"], consumer["queue"], consumer["unacked"]) == ("w", "held", 3)
    assert consumer["connection"] == first["id"]
    assert first["unacked"] == 3
    rows = told("unacked", "held")
    times_us = [row["delivered_us"] for row in rows]
    assert [row["delivered"] for row in rows] == [*map(time_text, times_us)]
    assert times_us == sorted(times_us)
    assert abs(time.time() - consumer["oldest_age_s"] - times_us[0] / 1e6) < WAIT_S
    _, out, _ = run(capsys, "unacked", "held")
    for time_us in times_us:
        assert moment(time_us) in out
    _, out, _ = run(capsys, "consumers")
    assert re.search(r"unacked_bytes +oldest +blocked", out)

    world.server.stop()
    for what in ("consumers", "connections"):
        code, out, err = run(capsys, what)
        assert (code, len(out.splitlines())) == (0, 1)
        assert err == (
            "mqks: mqks.db: no server uses it; these are the contents of the file\n"
            f"mqks: mqks.db: no server uses it, so there are no {what}\n"
        )
        _, _, err = run(capsys, what, "--db", "mqks.db")
        assert err == f"mqks: mqks.db: no server uses it, so there are no {what}\n"


def test_looking_changes_nothing_in_a_server(world: World, told: Told) -> None:
    def state() -> Row:
        [row] = told("stats")
        return row | {"uptime_s": 0, "unsent_bytes": 0}

    before, commits = state(), told("journal")[0]["commits"]
    for command in COMMANDS:
        told(*command.format(error_id=world.error_id).split())
    assert state() == before
    assert told("journal")[0]["commits"] == commits
    assert world.client.ask(b"p ping") == b"p ok "


@pytest.mark.parametrize("crash", [True, False], ids=["killed", "stopped"])
def test_looking_changes_no_file(world: World, told: Told, crash: bool) -> None:
    world.server.kill() if crash else world.server.stop()

    def files() -> dict[str, tuple[bytes, int]]:
        there = (path for path in world.db.parent.iterdir() if path.name.startswith("mqks.db"))
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns)
            for path in there
            if not path.name.endswith("-shm")
        }

    before = files()
    assert ("mqks.db-wal" in before) == crash
    for command in COMMANDS:
        told(*command.format(error_id=world.error_id).split())
    assert files() == before
    assert crash or not Path("mqks.db-shm").exists()


def test_a_damaged_file_is_told_as_far_as_it_goes(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    # The numbers of what is damaged are believed when a later segment has higher ones.
    assert world.client.ask(b"m4 publish --confirm user.gone x") == b"m4 ok "
    world.server.stop()
    with closing(sqlite3.connect(world.db)) as connection:
        [(segment, body)] = [
            row
            for row in connection.execute("select id, body from segment")
            if b"=" * 100 in row[1]
        ]
        with connection:
            connection.execute(
                "update segment set body = ? where id = ?",
                (body.replace(b"=" * 100, b"-" * 100), segment),
            )

    code, out, err = run(capsys, "messages", "mail", "--json")
    assert code == 65
    doubtful = {row["id"]: row["doubtful"] for row in map(json.loads, out.splitlines())}
    assert list(doubtful) == ["m1", "m2", "m3", "p", "m4"]
    assert [doubtful[name] for name in ("m1", "p", "m4")] == [False, True, False]
    assert f"mqks: segment {segment}: its checksum does not match" in err
    assert "of these messages are in damaged segments" in err

    code, out, err = run(capsys, "queues")
    assert code == 65
    assert len(out.splitlines()) == 5


# ------------------------------------------------------------------------------ what is shown


def test_messages_can_be_chosen_and_queues_sorted(world: World, told: Told) -> None:
    def ids(*flags: object) -> list[str]:
        return [row["id"] for row in told("messages", "mail", *flags)]

    for _ in range(2):
        for flags, wanted in {
            "": "m1 m2 m3 p",
            "--limit 2": "m1 m2",
            "--after 2": "m3 p",
            "--after 99": "",
            "--event *.gone": "p",
            "--event *": "",
            "--event **": "m1 m2 m3 p",
            "--event u** --limit 1 --after 1": "m2",
            "--event user?new": "",
            "--id m2": "m2",
            "--event u** --id m2 --older 0": "m2",
            "--id m2 --event *.gone": "",
            "--older 3600": "",
        }.items():
            assert ids(*flags.split()) == wanted.split(), flags
        [row] = told("messages", "mail", "--data", "--event", "user.gone")
        assert "data" not in row
        assert b64decode(row["data_base64"]) == b"\xff\x1b[2J " + b"=" * 100
        ready = [row["ready"] for row in told("queues", "--sort", "ready")]
        assert ready == sorted(ready, reverse=True)
        assert told("queues", "--sort", "unacked")[0]["name"] == "held"
        world.server.stop()


def test_what_a_client_sent_does_not_steer_the_terminal(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = bytes(range(128, 256)) + b"\x1b[31m"
    error_id = world.client.ask(sent + b" " + sent + b" x").split()[-1].decode()
    for command, shown in (
        ("messages mail --data", r"\xff\x1b[2J " + "=" * 100),
        (f"error {error_id}", r"\xfe\xff\x1b[31m"),
        ("errors", r"\x80\x81"),
        ("queues", r"od\xffd"),
    ):
        for where in ("", f" --url {world.server.url}"):
            _, out, _ = run(capsys, *f"{command}{where}".split())
            assert ("\x1b" in out, shown in out) == (False, True)
            assert command != "errors" or max(map(len, out.splitlines())) < 230


def test_errors_are_told_from_afar_too(
    world: World, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ("--url", world.server.url)
    later = world.client.ask(b"e frob").split(b" error ")[1].decode()
    assert world.client.ask(b"s subscribe --confirm q e") == b"s ok "
    for where in ((), url):
        assert [row["id"] for row in told("errors", *where)] == [later, world.error_id]
        assert [row["id"] for row in told("errors", *where, "--limit", 1)] == [later]
    [row], [same] = told("error", world.error_id), told("error", world.error_id, *url)
    assert same == row | {"user": None}
    assert (row["action"], row["request_id"]) == ("frob", "e\udcff\x1b[2J")
    code, _, err = run(capsys, "error", "nope", *url)
    assert (code, err.partition(";")[0]) == (65, f"mqks: {url[1][7:]}: no error nope")


def on_a_terminal(*arguments: str, columns: int = 80) -> str:
    with Terminal(*MQKS, "inspect", *arguments, columns=columns, TERM="dumb") as terminal:
        assert terminal.end() == 0
    return terminal.seen.decode().replace("\r", "")


def test_a_terminal_gets_ruled_tables_and_a_total(world: World) -> None:
    assert "4 queues, 5 ready, 3 unacked" not in on_a_terminal("queues", "--json")
    shown = on_a_terminal("queues")
    assert "4 queues, 6 ready, 3 unacked" in shown
    assert "┃ name" in shown
    world.server.stop()
    assert "4 queues, 6 ready, 3 unacked" in on_a_terminal("queues")


def test_a_narrow_terminal_gets_each_row_by_itself(world: World) -> None:
    shown = on_a_terminal("queues", columns=40)
    mail = next(block for block in shown.split("\n\n") if block.startswith("name       mail\n"))
    assert re.fullmatch(
        r"name       mail\nready      4\noldest     \S+s\nconsumers  0\n"
        r"unacked    0\nscheduled  0\nbindings   2\nrule       delete after 10m00s",
        mail,
    )
    message = ["messages", "mail", "--data", "--after", "3"]
    cut = on_a_terminal(*message, columns=40)
    assert max(map(len, cut.split("\n"))) == 40
    assert on_a_terminal(*message, "--full", columns=40).count("=") == 100
    # Wider ones get data as wide as they are, or in full.
    cut = on_a_terminal(*message, columns=120)
    assert ("…" in cut, cut.count("\n")) == (True, 5)
    full = on_a_terminal(*message, "--full", columns=120)
    assert ("…" in full, full.count("=")) == (False, 100)


@pytest.mark.slow
def test_a_pipe_gets_all_of_much(world: World, told: Told) -> None:
    names = [b"q%04d" % number for number in range(1100)]
    world.client.send(b"".join(b"s subscribe %s e\n" % name for name in names))
    world.client.send(b"c consume --confirm q0000 --manual-ack\n")
    world.client.send(b"".join(b"m%d publish e x\n" % number for number in range(1100)))
    assert world.client.line() == b"c ok "
    assert [world.client.line().split()[2] for _ in names] == [b"m%d" % n for n in range(1100)]
    assert world.client.ask(b"p subscribe --confirm held user.new") == b"p ok "

    for _ in range(2):
        seen = [row["name"] for row in told("queues")]
        assert seen == sorted(seen)
        assert set(seen) > {name.decode() for name in names}
        assert len(told("bindings", "e")) == 1100
        assert len(told("bindings")) == 1100 + 7
        assert [row["seq"] for row in told("unacked", "q0000")] == list(range(1, 1101))
        assert len(told("messages", "q0001", "--limit", 9999)) == 1100
        world.server.kill()


# ------------------------------------------------------------------------------ where to look


def test_a_url_means_more_than_a_file_and_a_flag_more_than_a_variable(
    world: World, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.db"
    with ServerProcess(other) as server:
        assert told("queues", "--url", server.url) == []
        assert told("queues", "--url", server.url, "--db", world.db) == []
        assert told("queues", "--db", other) == []
        assert len(told("queues")) == 4
        monkeypatch.setenv("MQKS_URL", server.url)
        assert told("queues") == []
        assert len(told("queues", "--db", world.db)) == 4
        monkeypatch.delenv("MQKS_URL")
        monkeypatch.setenv("MQKS_DB", str(other))
        assert told("queues") == []
        assert len(told("queues", "--url", world.server.url)) == 4


def test_without_a_file_the_usual_server_is_asked(
    world: World, told: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQKS_DB", "none.db")
    monkeypatch.setenv("MQKS_PORT", world.server.url.rpartition(":")[2])
    assert len(told("queues")) == 4
    assert told("errors") == told("errors", "--url", world.server.url) != []
    world.server.stop()
    for command in "queues", "errors":
        code, out, err = run(capsys, command)
        assert (code, out) == (69, "")
        assert err.startswith("mqks: there is no file none.db and no server at 127.0.0.1:")
        assert err.count("\n") == 1
    assert not Path("none.db").exists()


@pytest.mark.parametrize("words", ["inspect queues", "export", "import empty"])
def test_a_server_that_says_nothing_is_not_waited_for_long(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    Path("empty").write_text('{"kind": "mqks", "version": 1}\n')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mqks://127.0.0.1:{silent.getsockname()[1]}"
        code = main([*words.split(), "--url", url, "--timeout", "0.1"])
    assert code == 75
    assert "no answer in 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "stopped"])
def test_the_examples_of_the_help_run(
    world: World, capsys: pytest.CaptureFixture[str], is_live: bool
) -> None:
    if not is_live:
        world.server.stop()
    names = (each.callback.__name__ for each in app.registered_commands if each.callback)
    for words in ((), *((name,) for name in names)):
        code, out, _ = run(capsys, *words, "--help")
        assert code == 0
        [example] = re.findall(r"Example: (mqks inspect .*?)\s*$", out, re.M | re.S)
        example = example.replace("6741f3c2a90be4d5c8123456", world.error_id).replace(".dead", "")
        assert main(shlex.split(example)[1:]) == 0, example


def test_a_missing_queue_is_told_to_who_may_read_or_monitor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users, tokens = tmp_path / "users", {}
    for name, may in (("reader", "--read=**"), ("watcher", "--monitoring"), ("nobody", "--admin")):
        assert main(["user", "add", name, "--token", may, "--users", str(users)]) == 0
        tokens[name] = capsys.readouterr().out.strip()
    users.write_text(users.read_text().replace('"admin": true', '"admin": false'))
    with ServerProcess(tmp_path / "mqks.db", "--users", str(users)) as server:
        for name, *command in (
            ("reader", "peek", "mial"),
            ("reader", "inspect", "messages", "mial"),
            ("watcher", "inspect", "queue", "mial"),
            ("watcher", "inspect", "unacked", "mial"),
        ):
            url = server.url.replace("://", f"://{tokens[name]}@")
            assert main([*command, "--url", url]) == 65
            assert capsys.readouterr().err.endswith(": there is no queue mial\n")
        url = server.url.replace("://", f"://{tokens['nobody']}@")
        for command in (["peek", "mial"], ["inspect", "queue", "mial"]):
            assert main([*command, "--url", url]) == 65
            assert "there is no queue" not in capsys.readouterr().err
