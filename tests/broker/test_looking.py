"""What those see who look at messages with attributes, scheduled ones, and ones that came back.

The one rule: the database is written by the journal, as a server would have left it.
"""

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import anyio
import pytest

from mqks import InvalidRequest, blocking
from mqks.broker.spine.log.pending import Entry, LaneChange, QueueState, Run
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.policy import Policy
from mqks.commands import main
from mqks.journal.journal import Journal
from mqks.journal.sqlite.store import SqliteStore
from mqks.settings import Settings
from mqks.testing import Broker
from mqks.transfer.importing import Line
from tests.broker.test_reading import Reader

LETTER = b"reason=rejects&queue=jobs%20x&tries=3&published=1700000000.500&died=1700000060.250"
LINES = [
    b"a event=e plain",
    b"b event=e with two\tk=v&l=%20",
    b"c event=e later",
    b"d event=e later still\tk=v",
    b"f event=e ",
    b"g event=e died\tk=v&" + LETTER,
]
HOUR_US = 3600 * 10**6
DUE_US = 4 * 10**15
MARKS = {
    3: Mark(1, due_us=DUE_US + 2_500_000),
    4: Mark(4, retry=2, rejects=1, losses=1, due_us=DUE_US, expires_us=DUE_US + HOUR_US),
    5: Mark(2, retry=1, rejects=1),
}


def left(db: Path, changes: Iterable[LaneChange], time_us: int = 10**15) -> None:
    """A queue q, with these messages."""

    async def write() -> None:
        store = await SqliteStore.open(Settings(db=db), print)
        journal = Journal(store)
        await store.load()
        metadata = await store.load()
        async for _ in store.segments(metadata):
            pass
        await store.begin()
        journal.next_segment = metadata.next_segment
        made = {1: QueueState(b"q", Policy(is_sparse=True))}
        await journal.write(Entry(queues={**made}))
        await journal.write(Entry(time_us, [*changes]))
        await journal.store.close()

    anyio.run(write)


@pytest.fixture
def database(db: Path) -> Path:
    left(db, [LaneChange(1, 7, 1, [Run(1, LINES)], [], [], MARKS)])
    return db


def test_read_tells_attributes_to_those_who_ask(database: Path) -> None:
    with Broker(database) as broker, Reader(("127.0.0.1", broker.port)) as reader:
        whole = [line.decode() for line in LINES]
        told = [line for _, _, line in reader.read("q", 1)]
        assert told == [line.partition("\t")[0] for line in whole]
        assert [line for _, _, line in reader.read("q", 1, "--meta")] == whole


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main([*words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


OWN = {"seq", "time", "id", "event", "retry"}
DUE = {3: "2096-10-02T07:06:42.500000+00:00", 4: "2096-10-02T07:06:40.000000+00:00"}
DIED = {
    "reason": "rejects",
    "queue": "jobs x",
    "tries": 3,
    "published": "2023-11-14T22:13:20.500000+00:00",
    "died": "2023-11-14T22:14:20.250000+00:00",
    "why": None,
}


@pytest.mark.parametrize("is_served", [False, True])
def test_inspect_tells_all_that_is_known_of_a_message(
    database: Path, capsys: pytest.CaptureFixture[str], is_served: bool
) -> None:
    with Broker(database) if is_served else nullcontext():
        found = shown(capsys, "inspect", "messages", "q", "--data", "--json", "--db", str(database))
    assert [row["seq"] for row in found] == [1, 2, 3, 4, 5, 6]
    data = ["plain", "with two", "later", "later still", "", "died"]
    assert [row["data"] for row in found] == data
    assert [row["meta"] for row in found] == ["", "k=v&l=%20", "", "k=v", "", "k=v"]
    assert [row["retry"] for row in found] == [0, 0, 0, 2, 1, 0]
    assert [row["due"] for row in found] == [DUE.get(number) for number in range(1, 7)]
    for name in ("dead_letter", "letter"):
        assert [row[name] for row in found] == [None] * 5 + [DIED]
    counts = [(row["rejects"], row["losses"], row["expires"]) for row in found]
    if is_served:
        assert counts == [(None, None, None)] * 6
    else:
        expires = "2096-10-02T08:06:40.000000+00:00"
        assert counts == [(0, 0, None)] * 3 + [(1, 1, expires), (1, 0, None), (0, 0, None)]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_letters_are_counted_by_what_their_consumers_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons: list[str | BaseException | None] = [
        LookupError("no 17\n of 9"),
        LookupError("no 4 of 12"),
        None,
        OSError(),
        Unprintable(),
    ]
    with Broker(tmp_path / "mqks.db") as broker, blocking.connect(broker.url) as client:
        client.set_queue("q", dead_letter_queue="dead")
        client.set_queue("other", dead_letter_queue="dead")
        others: list[str | BaseException | None] = [ValueError("ü" * 9999), "said"]
        for queue, some in {"q": reasons, "other": others}.items():
            for _ in some:
                client.publish(queue, "x", to=queue)
            with client.consume(queue, create=True) as consumer:
                for reason in some:
                    consumer.receive(30).reject(dead=True, reason=reason)
                client.publish(queue, "x", to=queue)
                message = consumer.receive(30)
                with pytest.raises(InvalidRequest, match="more than 512 bytes"):
                    message.reject(reason="x" * 513)
        assert len(client.peek("dead")) == 7
        found = shown(capsys, "inspect", "letters", "dead", "--url", broker.url, "--json")
    died = [(row["letters"], row["queue"], row["reason"], row["why"]) for row in found]
    assert died == [
        (2, "q", "dead", "LookupError: no # of #"),
        (1, "q", "dead", ""),
        (1, "q", "dead", "OSError"),
        (1, "q", "dead", "Unprintable"),
        (1, "other", "dead", "ValueError: " + "ü" * 250),
        (1, "other", "dead", "said"),
    ]
    assert all(str(row["first"]) <= str(row["last"]) and row["id"] for row in found)
    cause = "--where", "why=LookupError: no # of #&queue=%71"
    listed = "inspect", "messages", "dead", *cause, "--json", "--db", str(tmp_path / "mqks.db")
    assert len(shown(capsys, *listed)) == 2
    first = "inspect", "letters", "dead", "--json", "--limit", "1"
    assert shown(capsys, *first, "--db", str(tmp_path / "mqks.db")) == found[:1]


def test_scheduled_messages_of_a_file_are_not_ready(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [queue] = shown(capsys, "inspect", "queues", "--json", "--db", str(database))
    assert (queue["ready"], queue["unacked"]) == (4, 0)


def test_an_export_loses_neither_attributes_nor_schedule(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = shown(capsys, "export", "--messages", "--db", str(database))
    rows = [row for row in exported if row["kind"] == "message"]
    assert "\\t" not in json.dumps(rows)
    base = {"kind", "queue", "data", *OWN}
    assert [row.keys() - base for row in rows] == [
        set(),
        {"meta"},
        {"due"},
        {"meta", "due", "expires", "rejects", "losses"},
        {"rejects"},
        {"meta", "dead_letter", "letter"},
    ]
    due_s, hour_s = DUE_US / 1e6, HOUR_US / 1e6
    assert [Line(1, row).flags(now_s) for now_s, row in zip([due_s] * 6, rows, strict=True)] == [
        b"",
        b"--meta=k=v&l=%20 ",
        b"--at=4000000002.500000 ",
        b"--meta=k=v --at=4000000000.000000 --ttl=3600.000000 ",
        b"",
        b"--meta=k=v --dead-letter=reason=rejects&queue=jobs%20x&tries=3&published=1700000000.500"
        b"&died=1700000060.250 ",
    ]
    assert Line(1, rows[3]).flags(due_s + 2 * hour_s).endswith(b" --ttl=0.001000 ")
