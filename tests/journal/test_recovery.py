"""What a restart must bring back that is easily forgotten, and what it must refuse."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal

EXIT_DAMAGED = 65


def damage(db: Path, sql: str) -> None:
    with closing(sqlite3.connect(db)) as connection:
        connection.execute(sql)
        connection.commit()


def three_messages_in_three_segments(db: Path) -> None:
    with ServerProcess(db) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for number in range(3):
            message = b"m%d" % number
            assert client.ask(message + b" publish --confirm e x") == message + b" ok "


def test_a_missing_segment_is_noticed_and_salvaged_once(tmp_path: Path) -> None:
    db = tmp_path / "mqks.db"
    three_messages_in_three_segments(db)
    damage(db, "delete from segment where id = 2")
    code, log = refusal(db)
    assert code == EXIT_DAMAGED
    assert "queue q: 1 ready messages are missing" in log
    with ServerProcess(db, "--salvage") as server, LineClient(server.address) as client:
        assert client.ask(b"p publish --confirm e late") == b"p ok "
    # Told once, it is settled.
    with ServerProcess(db) as server, LineClient(server.address) as client:
        client.send(b"c consume q\n")
        told = [client.line().split(b" ")[2] for _ in range(3)]
        assert told == [b"m0", b"m2", b"p"]


def test_a_foreign_lock_is_waited_out(tmp_path: Path) -> None:
    """Another process that writes, against all advice, delays confirms and loses nothing."""
    db = tmp_path / "mqks.db"
    with (
        served(db) as (server, client),
        LineClient(server.address) as other,
    ):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        foreign = sqlite3.connect(db, isolation_level=None)
        foreign.execute("begin immediate")
        client.send(b"m1 publish --confirm e x\n")
        assert other.ask(b"p ping") == b"p ok "
        answer = client.line()
        foreign.execute("rollback")
        foreign.close()
        assert answer.startswith(b"m1 error ")
        while (answer := client.ask(b"m2 publish --confirm e x")) != b"m2 ok ":
            assert answer.startswith(b"m2 error ")
