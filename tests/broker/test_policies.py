"""What holds for a queue: what set_queue said, over the defaults in mqks.toml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqks.broker.spine.base.turns import finish
from mqks.commands import main
from mqks.errors import ConfigurationError
from mqks.limits import QUEUE_TABLES_MAX
from mqks.protocol.requests import Backoff
from mqks.settings import QueueTable, load
from tests.kit.bare import BareWorld
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

TABLES = """
[[queue]]
name = "jobs.*"
ttl = 60
retries = 3
backoff = [0.5, 30]
dead_letters = "jobs.dead"
single_consumer = true

[[queue]]
name = "**"
losses = 5
bytes_max = "64MiB"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mqks.toml"
    path.write_text(TABLES)
    return path


@pytest.fixture
def server(tmp_path: Path, config: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "mqks.db", "--config", str(config)) as server:
        yield server


def said(value: Any) -> dict[str, Any]:
    return {"value": value, "from": "set_queue"}


def default(value: Any, name: str = "jobs.*") -> dict[str, Any]:
    return {"value": value, "from": "settings", "name": name}


def policy(client: LineClient, queue: bytes) -> dict[str, Any]:
    answer = client.ask(b"s stats queue " + queue)
    told: dict[str, Any] = json.loads(answer.removeprefix(b"s ok "))["policy"]
    return told


def ok(client: LineClient, request: bytes) -> None:
    action, _, rest = request.partition(b" ")
    assert client.ask(b"r %b --confirm %b" % (action, rest)) == b"r ok "


def refused(client: LineClient, request: bytes) -> str:
    error = client.ask(b"r " + request).removeprefix(b"r error ")
    rows = json.loads(client.ask(b"e stats errors " + error).removeprefix(b"e ok "))
    return str(rows[0]["reason"])


JOBS = {
    "retries": default(3),
    "backoff": default([0.5, 30.0]),
    "dead_letters": default("jobs.dead"),
    "ttl_s": default(60.0),
    "single_consumer": default(True),
}


def test_what_was_set_goes_before_the_first_default_that_matches(client: LineClient) -> None:
    ok(client, b"subscribe jobs.mail e")
    ok(client, b"set_queue other")
    assert policy(client, b"jobs.mail") == JOBS
    assert policy(client, b"other") == {
        "losses": default(5, "**"),
        "bytes_max": default(64 * 1024**2, "**"),
    }

    ok(client, b"set_queue jobs.mail --ttl=0.5 --single-consumer=no --losses=2")
    changed = {"ttl_s": said(0.5), "single_consumer": said(False), "losses": said(2)}
    assert policy(client, b"jobs.mail") == JOBS | changed

    ok(client, b"set_queue jobs.mail --losses= --retries=0")
    changed = {"ttl_s": said(0.5), "single_consumer": said(False), "retries": said(0)}
    assert policy(client, b"jobs.mail") == JOBS | changed

    ok(client, b"set_queue jobs.mail")
    assert policy(client, b"jobs.mail") == JOBS | changed

    ok(client, b"set_queue jobs.mail --reset --dead-letters=dead")
    assert policy(client, b"jobs.mail") == JOBS | {"dead_letters": said("dead")}


def test_a_default_that_would_close_a_chain_is_left_out(client: LineClient) -> None:
    ok(client, b"set_queue jobs.dead")
    assert policy(client, b"jobs.dead").keys() == JOBS.keys() - {"dead_letters"}
    ok(client, b"set_queue jobs.mail")

    # Through a default, also of a queue that is not there yet.
    assert "a cycle" in refused(client, b"set_queue jobs.dead --dead-letters=jobs.mail")
    assert "a cycle" in refused(client, b"set_queue jobs.dead --dead-letters=jobs.new")

    ok(client, b"set_queue jobs.dead --dead-letters=graves")
    ok(client, b"set_queue jobs.mail --dead-letters=graves")
    ok(client, b"set_queue graves.old --dead-letters=graves")


def test_defaults_are_reloaded(server: ServerProcess, client: LineClient, config: Path) -> None:
    ok(client, b"set_queue jobs.mail --retries=7")
    config.write_text('[[queue]]\nname = "jobs.m*"\nttl = 5\nretries = 1\n')
    server.hang_up()
    changed = {"ttl_s": default(5.0, "jobs.m*"), "retries": said(7)}
    until(lambda: policy(client, b"jobs.mail") == changed)
    ok(client, b"set_queue jobs.more")
    assert policy(client, b"jobs.more") == {
        "ttl_s": default(5.0, "jobs.m*"),
        "retries": default(1, "jobs.m*"),
    }

    config.write_text('[[queue]]\nname = "jobs.*"\nttl = 0\n')
    server.hang_up()
    until(lambda: "event=reload_failed" in server.log)
    assert "queue 1: ttl" in server.log
    assert policy(client, b"jobs.mail") == changed

    config.write_text("")
    server.hang_up()
    until(lambda: policy(client, b"jobs.mail") == {"retries": said(7)})


def test_what_was_set_wins_over_a_default_of_another_queue_after_a_start(
    server: ServerProcess, client: LineClient, config: Path
) -> None:
    """The default comes first in the order of queues, and yields all the same."""
    ok(client, b"set_queue jobs.dead --dead-letters=graves")
    ok(client, b"set_queue graves --dead-letters=x")
    config.write_text('[[queue]]\nname = "x"\ndead_letters = "jobs.dead"\n')
    server.kill()
    server.start()
    with LineClient(server.address) as client:
        assert policy(client, b"x") == {}
        assert policy(client, b"graves") == {"dead_letters": said("x")}


def test_tables_are_read(config: Path) -> None:
    first, second = load({}, {}, config).queue_tables
    assert first.name == "jobs.*"
    assert first.fields["backoff"] == Backoff(0.5, 30.0)
    assert second == QueueTable("**", {"losses": 5, "bytes_max": 64 * 1024**2})


TABLE = "[[queue]]\nname = 'x'\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("queue = 1", "queue: write queue defaults as tables, [[queue]]"),
        ("[queue]\nname = 'x'", "queue: write queue defaults as tables, [[queue]]"),
        ("[[queue]]", "queue 1: name: must be a mask"),
        ("[[queue]]\nname = 5", "queue 1: name: must be a mask"),
        (f"{TABLE[:-3]}{'x' * 2000}'", "queue 1: name: the mask has 2000 bytes, the limit is 1024"),
        (f"{TABLE}ttls = 1", "queue 1: ttls: unknown setting; did you mean ttl?"),
        (f"{TABLE}ttl_s = 1", "queue 1: ttl_s: unknown setting"),
        (f"{TABLE}dead_letters = '{'x' * 300}'", "queue 1: dead_letters: the name has 300"),
        (f"{TABLE}[[queue]]\nname = ''", "queue 2: name: "),
        (TABLE * (QUEUE_TABLES_MAX + 1), "queue: more than 256 tables"),
        *(
            (TABLE + each, f"queue 1: {each.partition(' ')[0]}: ")
            for each in (
                *("ttl = 0", "ttl = nan", "ttl = true", "ttl = ''", "retries = 1.5"),
                *("retries = [1]", "backoff = [5, 1]", "backoff = [1, 2, 3]", "dead_letters = 5"),
                *("dead_letters = ''", "dead_letters = 'a b'", "bytes_max = '1XiB'"),
                *("single_consumer = 1", "overflow = 'block'"),
            )
        ),
    ],
)
def test_a_bad_table_is_refused_with_place_and_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "mqks.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refusal:
        load({}, {}, path)
    place, told = str(refusal.value).split(": ", 1)
    assert re.fullmatch(rf"{re.escape(str(path))}(:\d+)?", place)
    assert told.startswith(reason)


def test_check_config_tells_the_tables(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check-config", "--config", str(config)]
    assert main([*command, "--json"]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()  # The last one is about memory.
    rows = [row for row in map(json.loads, lines) if " " in row["setting"]]
    assert [(row["setting"], row["value"]) for row in rows] == [
        ("queue jobs.*: ttl_s", 60.0),
        ("queue jobs.*: retries", 3),
        ("queue jobs.*: backoff", [0.5, 30.0]),
        ("queue jobs.*: dead_letters", "jobs.dead"),
        ("queue jobs.*: single_consumer", True),
        ("queue **: losses", 5),
        ("queue **: bytes_max", 64 * 1024**2),
    ]
    assert [row["from"] for row in rows] == [f"{config}: queue 1"] * 5 + [f"{config}: queue 2"] * 2

    config.write_text('[[queue]]\nname = "x"\nttl = -1\n')
    assert main(command) == 78
    assert "queue 1: ttl: " in capsys.readouterr().err


def test_inspect_tells_what_holds(
    server: ServerProcess, client: LineClient, capsys: pytest.CaptureFixture[str]
) -> None:
    ok(client, b"set_queue other --ttl=0.5 --single-consumer=yes")
    assert main(["inspect", "queue", "other", "--url", server.url]) == 0
    [line] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("policy")]
    assert line.split(maxsplit=1)[1] == (
        "losses=5 (as **) ttl_s=0.5 bytes_max=67108864 (as **) single_consumer=yes"
    )


def test_a_reload_of_many_queues_is_done_in_steps() -> None:
    """Others have their turn meanwhile."""
    broker = BareWorld().broker
    for number in range(5000):
        finish(broker.make_queue(b"q%d" % number))
    tables = [QueueTable("q*", {"ttl_s": 5.0})]
    broker.policies.set_defaults(tables)
    steps = list(broker.policies.apply_all())
    assert len(steps) > 5
    assert {queue.rules.ttl_s for queue in broker.queues.values()} == {5.0}


@pytest.mark.parametrize("names", [(b"a", b"b"), (b"b", b"a")])
def test_an_earlier_default_closes_no_chain(names: tuple[bytes, bytes]) -> None:
    broker = BareWorld().broker
    broker.policies.set_defaults([QueueTable("a", {"dead_letters": b"b"})])
    for name in names:
        finish(broker.make_queue(name))
    broker.policies.set_defaults([QueueTable("b", {"dead_letters": b"a"})])
    finish(broker.policies.apply_all())
    assert broker.queues[b"a"].rules.dead_letters is None
    assert broker.queues[b"b"].rules.dead_letters == b"a"
