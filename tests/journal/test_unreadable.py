"""Rows that are there and not found, and a file that SQLite can't read: a server that runs into
either ends with an error, and never looks for them again and again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mqks.errors import JournalFailed
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

PAGE_BYTES = 4096
LOOKS = [b"c consume q --manual-ack", b"p peek q --limit=1000", b"r read q --from=1"]


@pytest.fixture
def stopped(db: Path) -> Path:
    """A queue with 40 segments of odd numbers, each with a message that is larger than a page."""
    with ServerProcess(db) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"s subscribe --confirm between f") == b"s ok "
        for _ in range(40):
            for event in (b"e", b"f"):
                reply = client.ask(b"m publish --confirm %b %b" % (event, b"x" * 2 * PAGE_BYTES))
                assert reply == b"m ok "
        assert server.terminate() == 0
    return db


def segments_root(db: Path) -> int:
    """Where the root page of the table lies in the file; it has others below it."""
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as file:
        [(page,)] = file.execute("select rootpage from sqlite_schema where name = 'segment'")
    offset: int = (page - 1) * PAGE_BYTES
    assert db.read_bytes()[offset] == 5, "an interior page of a table"
    return offset


def write(db: Path, offset: int, data: bytes) -> None:
    with db.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def ended(server: ServerProcess, request: bytes) -> str:
    """What a server tells that ends because of it."""
    with LineClient(server.address) as client:
        # Behind a commit no connection trusts the pages that it has read before.
        assert client.ask(b"s subscribe --confirm other f") == b"s ok "
        client.send(request + b"\n")
        client.rest()
    assert server.wait() == JournalFailed.exit_code, server.log
    assert "Traceback" not in server.log
    return server.log.splitlines()[-1]


@pytest.mark.parametrize("request_", LOOKS)
def test_a_row_that_is_not_found_ends_the_server(stopped: Path, request_: bytes) -> None:
    """One bit of an interior page has flipped: SQLite looks for some rows in the wrong leaf."""
    root = segments_root(stopped)
    page = stopped.read_bytes()[root : root + PAGE_BYTES]
    cell = int.from_bytes(page[12:14], "big")
    with ServerProcess(stopped) as server:
        assert server.address
        # Behind the number of the child page stands the greatest id in it; an odd one is lost.
        write(stopped, root + cell + 4, bytes([page[cell + 4] ^ 1]))
        told = ended(server, request_)
    assert " is missing: the file is damaged" in told
    assert told.startswith("mqks: segment ")


@pytest.mark.parametrize("request_", LOOKS)
def test_a_page_that_cannot_be_read_ends_the_server(stopped: Path, request_: bytes) -> None:
    root = segments_root(stopped)
    with ServerProcess(stopped) as server:
        assert server.address
        write(stopped, root, b"\xff" * PAGE_BYTES)
        told = ended(server, request_)
    assert told.startswith(f"mqks: {stopped} can't be read: ")


@pytest.mark.slow
def test_a_row_that_is_not_found_by_its_time_ends_the_server(db: Path) -> None:
    """It holds messages of different times, so that it must be read to find one of them."""
    with ServerProcess(db) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for _ in range(600):  # Small segments are merged when 512 have gathered.
            assert client.ask(b"m publish --confirm e x") == b"m ok "
        client.send(b"p peek q --limit=1000\n")
        times = [int(client.line().rpartition(b"time=")[2].split(b" ")[0]) for _ in range(600)]
        assert client.line() == b"p ok --end"
        until(lambda: client.stats("journal")["segments"] < 100)
        with closing(sqlite3.connect(db, isolation_level=None)) as file:
            file.execute("delete from segment")
        told = ended(server, b"r range q --at=%d" % times[300])
    assert " is missing: the file is damaged" in told
