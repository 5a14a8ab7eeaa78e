"""What is exported from one server is imported into another, and nothing is half imported."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mqks.client.blocking import connect
from mqks.commands import main
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

BAD_INPUT, NOT_THERE = 65, 65
HEADER = {"kind": "mqks", "version": 1, "messages": True}
Row = dict[str, Any]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "other.db") as server:
        yield server


class Tool:
    """The command line, with what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
        self._capsys = capsys
        self._file = directory / "export.jsonl"
        self.err = ""

    def exported(self, *arguments: object) -> list[Row]:
        assert main(["export", *map(str, arguments)]) == 0
        return [json.loads(line) for line in self._capsys.readouterr().out.splitlines()]

    def imported(self, rows: list[Row] | str, server: ServerProcess, *flags: str) -> int:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        self._file.write_text(text)
        code = main(["import", str(self._file), "--url", server.url, *flags])
        self.err = self._capsys.readouterr().err
        return code

    def all_of(self, server: ServerProcess | Path) -> list[Row]:
        where = ("--db", server) if isinstance(server, Path) else ("--url", server.url)
        return self.exported(*where, "--messages")

    def moved(self, server: ServerProcess, other: ServerProcess, *flags: str) -> list[Row]:
        """All of a server is all of another one, once it is imported there."""
        rows = self.all_of(server)
        assert self.imported(rows, other, *flags) == 0, self.err
        assert without(self.all_of(other), "time", "seq") == without(rows, "time", "seq")
        return rows


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Tool:
    return Tool(capsys, tmp_path)


def without(rows: list[Row], *fields: str) -> list[Row]:
    return [{name: row[name] for name in row if name not in fields} for row in rows]


def message(queue: str, id_: str, event: str = "e", data: str = "x") -> Row:
    return {"kind": "message", "queue": queue, "id": id_, "event": event, "data": data}


def queue(name: str, rule: object = None) -> Row:
    return {"kind": "queue", "name": name, "rule": rule}


def schedule(name: str) -> Row:
    return {"kind": "schedule", "name": name, "every_s": 60.0, "publish": "e x"}


def end(queues: int = 0, messages: int = 0, bindings: int = 0) -> Row:
    return {"kind": "end", "queues": queues, "messages": messages, "bindings": bindings}


def ask(server: ServerProcess, *requests: bytes) -> None:
    with LineClient(server.address) as client:
        for request in requests:
            reply = client.ask(request)
            assert reply == request.split(b" ")[0] + b" ok ", reply


def filled(server: ServerProcess) -> None:
    ask(
        server,
        b"s subscribe --confirm q e1 e2",
        b"s subscribe --confirm twin e1",
        b"s subscribe --confirm q\xff e\xff",
        b"d delete_queue --confirm twin --when-unused=60",
        b"p set_queue --confirm q\xff --retries=3 --backoff=0.5,60 --dead-letters=twin --ttl=3600",
        b"r rebind --confirm nobody e1 e3",
        *(b"m%d publish --confirm e%d text %d" % (n, 1 + n % 2, n) for n in range(20)),
        b"m0 publish --confirm e2 the same id",
        b"\xff publish --confirm e\xff \x00\xff\r\r",
        b"empty publish --confirm e2 ",
    )


def test_a_server_is_moved_to_another_one(
    server: ServerProcess, other: ServerProcess, tool: Tool, db: Path
) -> None:
    filled(server)
    kinds = [row["kind"] for row in tool.moved(server, other)]
    assert kinds == ["mqks", *["queue"] * 3, *["message"] * 33, *["binding"] * 6, "end"]
    # The bytes that no text can hold have come through, too.
    with (
        connect(other.url) as client,
        client.consume("q\udcff", delete_when_unused=False, auto_ack=True) as consumer,
    ):
        assert consumer.receive(WAIT_S).data == b"\x00\xff\r"
    # The file tells the same, and retries and losses, of which a server tells none.
    with LineClient(server.address) as lost:
        lost.send(b"c consume twin --manual-ack --delete-queue-when-unused=60\n")
        assert [lost.line() for _ in range(10)][-1].split(b" ")[2] == b"m18"
        assert lost.ask(b"n publish --confirm nobody x") == b"n ok "  # So is all before it.
    live = tool.all_of(server)
    server.kill()
    rows = tool.all_of(db)
    assert without(rows, "retry", "losses") == without(live, "retry")
    assert {row["retry"] for row in rows if row.get("queue") == "twin" and "id" in row} == {1}


def test_dead_letters_are_moved_as_such(
    server: ServerProcess, other: ServerProcess, tool: Tool
) -> None:
    ask(
        server,
        b"s subscribe --confirm jobs e",
        b"p set_queue --confirm jobs --dead-letters=dead",
        b"m publish --confirm --meta=a=1%26 --priority=3 e x",
    )
    with LineClient(server.address) as client:
        assert client.ask(b"c consume jobs --manual-ack") == b"c ok m event=e x"
        line = b"r reject --confirm --dead --reason=no%20such%20customer%2017 c m"
        assert client.ask(line) == b"r ok "
    rows = tool.moved(server, other)
    [letter] = [row["dead_letter"] for row in rows if "dead_letter" in row]
    assert (letter["reason"], letter["queue"], letter["tries"]) == ("dead", "jobs", 1)
    assert letter["why"] == "no such customer 17"
    # The server knows whence it came.
    with LineClient(other.address) as client:
        assert client.ask(b"r redrive --confirm dead") == b"r ok 1"
        assert client.ask(b"p peek jobs").startswith(b"p ok m ")


def test_an_import_into_a_database_that_no_server_uses(
    server: ServerProcess, db: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(server)
    rows = tool.all_of(server)
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = tmp_path / "into.db"
    assert main(["import", str(tmp_path / "all.jsonl"), "--into", str(new)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 queues, 33 messages, 6 bindings imported")
    assert err == ""
    assert without(tool.all_of(new), "time", "seq") == without(rows, "time", "seq")
    # One that a server uses is refused.
    assert main(["import", str(tmp_path / "all.jsonl"), "--into", str(db)]) == 69
    assert "is in use by another server" in capsys.readouterr().err


def test_masks_are_moved_too(server: ServerProcess, other: ServerProcess, tool: Tool) -> None:
    ask(server, b"s subscribe --confirm q e --add-mask e.* **", b"m publish --confirm e.x d")
    ask(server, b"r rebind --confirm unborn --add-mask a.*")
    ask(other, b"r rebind --confirm q --add-mask old.* older.*")
    rows = tool.all_of(server)
    assert {row["mask"] for row in rows if "mask" in row} == {"e.*", "**", "a.*"}

    assert tool.imported(rows, other, "--merge") == 0

    with LineClient(other.address) as client:
        masks = b'"masks": ["**", "e.*", "old.*", "older.*"]'
        assert b'"events": ["e"], ' + masks in client.ask(b"x stats queue q")
        assert b'"mask": "a.*", "exists": false' in client.ask(b"x stats bindings a.b")


def test_schedules_are_moved_too(server: ServerProcess, other: ServerProcess, tool: Tool) -> None:
    ask(
        server,
        b"s subscribe --confirm q e",
        b"b schedule --confirm s\xff 0 3 * * mon --tz=Europe/Berlin --missed=one "
        b"publish --ttl=9 e \xff",
        b"c schedule --confirm beat --every=1.5 --jitter=2 --pause publish e a publish b",
    )
    rows = tool.exported("--url", server.url)
    assert [row["kind"] for row in rows[-3:]] == ["schedule", "schedule", "end"]
    assert rows[-1]["schedules"] == 2
    assert not [r for r in tool.exported("--url", server.url, "--queue", "q") if "publish" in r]

    assert tool.imported(rows, other, "--queue", "q") == 0
    assert tool.exported("--url", other.url)[-1] == end(1, 0, 1)
    assert tool.imported(rows, other, "--merge") == 0
    assert tool.exported("--url", other.url) == rows
    server.stop()
    assert tool.exported("--db", "mqks.db") == rows
    # One that is there is changed only on demand.
    rows = [HEADER, rows[-3] | {"every_s": 60.0}, end() | {"schedules": 1}]
    assert tool.imported(rows, other) == BAD_INPUT
    assert "line 2: the schedule exists; --merge changes it" in tool.err
    assert tool.imported(rows, other, "--merge") == 0
    assert tool.exported("--url", other.url)[-3] == rows[1]


def batched(server: ServerProcess) -> None:
    ask(
        server,
        b"s subscribe --confirm rows row",
        b"t subscribe --confirm more row late",
        b"d subscribe --confirm out done failed",
        b"o open_batch --confirm n\xff --for=9000 publish --ttl=9 done \xff publish x",
        b"f open_batch --confirm n\xff --on-dead publish failed y",
        b"p open_batch --confirm open",
        b"e open_batch --confirm short --for=0.001 publish done never",
        b"m0 publish --confirm --batch=n\xff row 0",
        b"m1 publish --confirm --batch=n\xff --delay=9000 late 1",
        b"m2 publish --confirm --batch=open row 2",
        b"m3 publish --confirm row 3",
    )
    with LineClient(server.address) as client:
        assert client.ask(b"x close_batch --confirm n\xff") == b"x ok 1"
        client.send(b"c consume rows --manual-ack\n")
        assert [client.line()[:7] for _ in range(3)] == [b"c ok m0", b"c ok m2", b"c ok m3"]
        assert client.ask(b"r reject --confirm --dead c m2") == b"r ok "
        assert client.ask(b"a ack --confirm c m0") == b"a ok "


def test_batches_are_moved_too(server: ServerProcess, other: ServerProcess, tool: Tool) -> None:
    """With what was done and dead before, and each message in its own."""
    batched(server)
    rows = tool.all_of(server)
    found = [row for row in rows if row["kind"] == "batch"]
    told = [[row[each] for each in ("name", "done", "dead", "closed")] for row in found]
    assert told == [["n\udcff", 1, 0, True], ["open", 0, 1, False]]
    assert (found[0]["publish"], found[1]["publish"]) == ("--ttl=9 done \udcff publish x", None)
    members = {row["id"]: row.get("batch") for row in rows if row["kind"] == "message"}
    assert members == {"m0": "n\udcff", "m1": "n\udcff", "m2": "open", "m3": None}
    assert rows[-1]["batches"] == 2

    assert tool.imported(rows, other) == 0, tool.err
    gone = "time", "seq", "expires", "due", "retry"
    assert without(tool.all_of(other), *gone) == without(rows, *gone)
    expires = [row["expires"] for row in tool.all_of(other) if row["kind"] == "batch"]
    late_s = [datetime.fromisoformat(each).timestamp() for each in expires]
    was_s = [datetime.fromisoformat(row["expires"]).timestamp() for row in found]
    assert all(abs(now - was) < 60 for now, was in zip(late_s, was_s, strict=True))
    server.kill()
    file = without(tool.all_of(Path("mqks.db")), *gone, "losses", "rejects")
    assert file == without(rows, *gone)
    # It goes on there.
    with LineClient(other.address) as client:
        assert client.ask(b"p purge --confirm rows") == b"p ok 1"
        assert client.ask(b"p purge --confirm more") == b"p ok 3"
        assert client.ask(b"p promote --confirm more m1") == b"p ok 1"
        assert client.ask(b"p purge --confirm more") == b"p ok 1"
        client.send(b"c consume out --meta\n")
        line = client.line().partition(b"meta=")[2]
        assert line == b"batch=n%FF&batch-total=3&batch-dead=2 y"


def test_batches_that_are_there(server: ServerProcess, other: ServerProcess, tool: Tool) -> None:
    """Those of the same name go on as they are; messages join them if that is wanted."""
    batched(server)
    rows = tool.all_of(server)
    ask(other, b"o open_batch --confirm open publish done mine")
    number = next(n for n, row in enumerate(rows, 1) if row.get("name") == "open")
    assert tool.imported(rows, other) == BAD_INPUT
    assert f"line {number}: the batch exists; with --merge, messages join it" in tool.err
    with LineClient(other.address) as client:
        assert client.ask(b"x close_batch --confirm n\xff --discard") == b"x ok 1"
    assert tool.imported(rows, other, "--merge") == 0, tool.err
    found = {row["name"]: row for row in tool.all_of(other) if row["kind"] == "batch"}
    assert (found["open"]["dead"], found["open"]["publish"]) == (0, "done mine")
    assert (found["n\udcff"]["done"], found["n\udcff"]["closed"]) == (1, True)
    # Of some queues there are none, and their messages are in none.
    assert all(row["kind"] != "batch" for row in tool.exported("--url", other.url))
    for row in rows:
        row |= {"name": "rows2"} if row.get("name") == "rows" else {}
        row |= {"queue": "rows2"} if row.get("queue") == "rows" else {}
    assert tool.imported(rows, other, "--queue", "rows2") == 0, tool.err
    assert all("batch" not in row for row in tool.all_of(other) if row.get("queue") == "rows2")


def test_batches_that_are_wrong_or_over(server: ServerProcess, tool: Tool) -> None:
    later = "2999-01-01T00:00:00+00:00"
    row = {"kind": "batch", "name": "b", "done": 0, "dead": 0, "closed": True, "expires": later}
    for wrong, reason in (
        ({"done": -1}, "done must be a number"),
        ({"dead": None}, "dead must be a number"),
        ({"publish": 1}, "publish must be text"),
        ({"publish": "e\tx"}, "publish must not hold a newline or a tab"),
        ({"name": "b c"}, "name is not a valid name"),
        ({"expires": "soon"}, "expires is not a time"),
    ):
        assert tool.imported([HEADER, row | wrong, end()], server) == BAD_INPUT
        assert f"line 2: {reason}" in tool.err
    over = row | {"expires": "2020-01-01T00:00:00+00:00"}
    rows = [HEADER, queue("q"), over, message("q", "m") | {"batch": "b"}]
    assert tool.imported([*rows, end(1, 1) | {"batches": 1}], server) == 0, tool.err
    assert "batch b: it has expired, and was not imported" in tool.err
    assert [row["kind"] for row in tool.all_of(server)] == ["mqks", "queue", "message", "end"]


def test_names_of_any_bytes_round_trip(
    server: ServerProcess,
    other: ServerProcess,
    tool: Tool,
    db: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A name may have every byte but a space, a tab and a newline."""
    odd = bytes(byte for byte in range(256) if byte not in b" \t\n")
    with LineClient(server.address) as client:
        for name in (b"a\x1bb", b"end\r", odd):
            # Of two carriage returns the server takes one for a part of the line's end.
            assert client.ask(b"s subscribe --confirm %b %b\r" % (name, name)) == b"s ok "
            publish = b"%b publish --confirm %b %b\r" % (name, name, name)
            assert client.ask(publish) == name + b" ok "
    rows = tool.moved(server, other)
    assert rows[-1] == end(3, 3, 3)
    names = [row["name"] for row in rows if row["kind"] == "queue"]
    for name in names:
        for command in ("queue", "messages", "bindings", "unacked"):
            assert main(["inspect", command, name, "--url", other.url, "--json"]) == 0, command
    capsys.readouterr()
    some = tool.exported("--url", other.url, *(f"--queue={name}" for name in names))
    assert [row["name"] for row in some if row["kind"] == "queue"] == names
    server.kill()
    assert tool.all_of(db) == rows


def test_traits_and_any_bytes_are_imported(
    server: ServerProcess, other: ServerProcess, tool: Tool, db: Path
) -> None:
    """Also of messages with ids that requests of the import may have."""
    publish = b" publish --confirm "
    ask(
        server,
        b"s subscribe --confirm q e",
        b"hello" + publish + b"--escaped e a\\nb",
        b"name" + publish + b"--escaped --key=%20k e x",
        *(each + publish + b"--priority=-5 e \\x" for each in (b"q", b"-")),
    )
    rows = tool.moved(server, other)
    names = ("id", "data", "escaped", "key", "priority")
    assert [[row.get(name) for name in names] for row in rows if row["kind"] == "message"] == [
        ["hello", "a\nb", True, None, None],
        ["name", "x", True, " k", None],
        ["q", "\\x", None, None, -5],
        ["-", "\\x", None, None, -5],
    ]
    server.kill()
    assert tool.all_of(db) == rows


def test_what_is_damaged_is_exported_as_far_as_it_goes(
    server: ServerProcess,
    other: ServerProcess,
    tool: Tool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled(server)
    server.terminate()
    db = tmp_path / "mqks.db"
    db.write_bytes(db.read_bytes().replace(b"text 7", b"test 7"))
    assert main(["export", "--db", str(db), "--messages", "--queue", "q"]) == BAD_INPUT
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len([row for row in rows if row["kind"] == "message"]) == 22
    assert [row["data"] for row in rows if "doubtful" in row] == ["test 7"]
    assert tool.imported(rows, other) == 0
    assert len(tool.all_of(other)) == len(rows)


def test_one_queue_of_many_is_imported(
    server: ServerProcess, other: ServerProcess, tool: Tool
) -> None:
    filled(server)
    rows = tool.all_of(server)
    assert tool.imported(rows, other, "--queue", "twin") == 0
    again = tool.all_of(other)
    mine = [row for row in rows if row.get("queue", row.get("name")) == "twin"]
    assert without(again[1:-1], "time", "seq") == without(mine, "time", "seq")
    assert tool.imported(rows, other, "--queue", "q", "--queue", "none") == BAD_INPUT
    assert "there is no queue none in this export" in tool.err
    assert tool.imported([HEADER, end()], other, "--queue", "none") == BAD_INPUT
    assert len(tool.exported("--url", other.url)) == 4, "the header, twin, its binding, the end"


def test_events_stay_whatever_other_queues_are_bound_to(
    server: ServerProcess, other: ServerProcess, tool: Tool
) -> None:
    """Into a server that is in use, and back into the one that the export is of."""
    ask(server, b"s subscribe --confirm mine e f --add-mask g.*")
    ask(
        server,
        b"m1 publish --confirm e 1",
        b"m2 publish --confirm --meta=k=v&l=%20 f 2",
        b"m3 publish --confirm --ttl=1000000 g.h 3",
        b"m4 publish --confirm --delay=1000000 --meta=a=b e 4",
    )
    rows = tool.all_of(server)
    ask(other, b"s subscribe --confirm others e f --add-mask **")
    for target in (other, server):
        assert tool.imported(rows, target, "--merge") == 0, tool.err
        again = tool.all_of(target)
        mine = [row for row in again if row["kind"] == "message"]
        assert {row["queue"] for row in mine} == {"mine"}
        fields = ("id", "event", "data", "meta", "expires", "due")
        found = sorted([row.get(field, "") for field in fields] for row in mine)
        wanted = [[row.get(field, "") for field in fields] for row in rows if "data" in row]
        if target is server:
            wanted *= 2
        assert [each[:4] for each in found] == [each[:4] for each in sorted(wanted)]
        assert [bool(each[4]) for each in found] == [bool(each[4]) for each in sorted(wanted)]
        assert [bool(each[5]) for each in found] == [bool(each[5]) for each in sorted(wanted)]


def test_messages_of_many_events_bind_nothing(other: ServerProcess, tool: Tool) -> None:
    messages = [message("q", f"m{number}", f"e{number}") for number in range(2500)]
    assert tool.imported([HEADER, queue("q"), *messages, end(1, 2500)], other) == 0
    again = tool.all_of(other)
    assert [row.get("event") for row in again[2:-1]] == [row["event"] for row in messages]
    assert again[-1] == end(1, 2500, 0)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([], 0),
        ([queue("q")], 1),
        ([HEADER | {"version": 2}], 1),
        ([HEADER, HEADER], 2),
        ([HEADER], 1),
        ([HEADER, {"kind": "song"}], 2),
        ([HEADER, queue("a b")], 2),
        ([HEADER, queue("--a")], 2),
        ([HEADER, queue("a\n")], 2),
        ([HEADER, queue("\ud800")], 2),
        ([HEADER, queue("q", "soon")], 2),
        ([HEADER, queue("q", {"delay_s": -1})], 2),
        ([HEADER, queue("q") | {"policy": []}], 2),
        ([HEADER, queue("q") | {"policy": {"ttl_s": 0}}], 2),
        ([HEADER, queue("q") | {"policy": {"ttl": 1}}], 2),
        ([HEADER, queue("q") | {"policy": {"dead_letters": "a b"}}], 2),
        ([HEADER, queue("q"), queue("q")], 3),
        ([HEADER, queue("q"), message("other", "m")], 3),
        ([HEADER, queue("q"), message("q", "m") | {"priority": 128}], 3),
        ([HEADER, queue("q"), message("q", "m") | {"key": 7}], 3),
        ([HEADER, queue("q"), {"kind": "message", "queue": "q", "id": "m", "event": "e"}], 3),
        ([HEADER, queue("q"), message("q", "m") | {"data_base64": "?"}], 3),
        ([HEADER, queue("q"), message("q", "m"), queue("late")], 4),
        ([HEADER, queue("q"), end(1), end(1)], 4),
        ([HEADER, schedule("s"), queue("q")], 3),
        ([HEADER, schedule("s") | {"publish": "e\n"}], 2),
        ([HEADER, schedule("s") | {"every_s": "x"}], 2),
        ([HEADER, schedule("s") | {"cron": "0 publish * * *"}], 2),
        ([HEADER, schedule("s t")], 2),
        ([HEADER, schedule("s"), end()], 3),
        ([HEADER, end() | {"schedules": 1}], 2),
        ([HEADER, queue("q"), message("q", "m"), end(1, 2)], 4),
        ("[]\n", 1),
        ("no json\n", 1),
        ("[" * 100_000, 1),
    ],
)
def test_a_wrong_line_is_told_by_its_number(
    rows: list[Row] | str, line: int, other: ServerProcess, tool: Tool
) -> None:
    assert tool.imported(rows, other) == BAD_INPUT
    assert tool.err.startswith(f"mqks: line {line}: ")
