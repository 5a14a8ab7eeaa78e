"""Tables with the last value of each key, against a dictionary as the model.

The one rule: a table is read by programs of others, and its sums are those of its rows.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import date
from functools import partial, partialmethod
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable as Delta
from pyiceberg.catalog import load_catalog

from mqks.commands import main
from mqks.pipeline.errors import LakeInUse, LakeUnfit, StoreAway
from mqks.pipeline.job import schema_of
from mqks.pipeline.lake import WRITTEN, File, FileLake, Lake, fitted, stage, table_at
from mqks.pipeline.layout import Layout, partitions
from mqks.pipeline.objects import ICEBERG, Place
from mqks.pipeline.places import existing, lake_at
from mqks.pipeline.sink import Publisher
from mqks.pipeline.sums import batches_of
from mqks.pipeline.table import COMPACTION
from mqks.pipeline.tables import EventTables
from mqks.pipeline.upsert import Upsert
from mqks.pipeline.verify import Verification
from mqks.pipeline.wire import ServerAddress
from mqks.testing import Broker
from tests import pipeline_kills as kills
from tests.kit.seeds import printed_seed
from tests.pipeline.conftest import Clicks, Served, subscribe
from tests.pipeline.test_pipeline_lake import DAY_US, NOON_US, batch
from tests.pipeline.test_pipeline_layout import archive, lake_of, table_of, verified
from tests.pipeline.test_pipeline_store import local_store
from tests.pipeline.test_pipeline_tables import DiesError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS = ["delta", "iceberg"]
BY_KEY = Upsert("q", "ordering_key")


class Sent(NamedTuple):
    key: str | None
    value: bytes
    day: int = 0
    data: dict[str, Any] | None = None


Opened = Callable[..., Lake]
pytestmark = pytest.mark.usefixtures("catalog")


@pytest.fixture(params=FORMATS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    place = "iceberg://lake/db.events" if request.param == "iceberg" else tmp_path / "lake"
    return partial(lake_at, place, request.param)


def rows(first: int, sent: Sequence[Sent], kind: pa.DataType | None) -> Iterator[pa.RecordBatch]:
    for number, each in enumerate(sent, first):
        one = batch(range(number, number + 1), "e1", day_us(each.day))
        one = one.set_column(1, "value", pa.array([each.value]))
        one = fitted(one, WRITTEN).set_column(
            WRITTEN.get_field_index("ordering_key"), "ordering_key", pa.array([each.key])
        )
        yield one if kind is None else one.append_column("data", pa.array([each.data], kind))


def day_us(day: int) -> int:
    return NOON_US + day * DAY_US


def put(
    lake: Lake,
    sent: Sequence[Sent],
    most: int = 1000,
    *,
    epoch: str = "x-1",
    kind: pa.DataType | None = None,
) -> None:
    """What an archive does until all of a queue's messages are archived."""
    while (start := lake.next("q", epoch) or 0) < len(sent):
        lake.prepared(kind)
        until = min(len(sent), start + most)
        made = (
            one.set_column(6, "epoch", pa.array([epoch]))
            for one in rows(start, sent[start:until], kind)
        )
        lake.commit("q", epoch, until, [*stage(lake.staging, made)])
        lake.roll(1)


def found(place: Place, key: str = "ordering_key") -> dict[Any, bytes]:
    """The last value of each key, of a table whose rows are as the sums say."""
    if str(place).startswith(ICEBERG):
        with closing(load_catalog("lake")) as catalog:
            name = str(place).removeprefix("iceberg://lake/")
            table = catalog.load_table(name).scan().to_arrow()
    else:
        table = Delta(place).to_pyarrow_table()
    with existing(place) as lake:
        told = Verification(lake).run()
    assert (told.differences, told.messages) == ([], len(table))
    column, *path = key.split(".")
    pairs = []
    for row in table.to_pylist():
        name = row[column]
        for each in path:
            name = name[each]
        pairs.append((name, row["value"]))
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def model(sent: Sequence[Sent]) -> dict[Any, bytes]:
    last: dict[Any, bytes] = {}
    for each in sent:
        last[each.key] = each.value
    return {key: value for key, value in last.items() if value}


def history(count: int, keys: int, chance: random.Random) -> list[Sent]:
    """One in five deletes; days pass, and some come back."""
    return [
        Sent(
            f"k'{chance.randrange(keys)} ö",
            b"" if chance.random() < 0.2 else b"%d" % number,
            number * 3 // count + chance.randrange(2),
        )
        for number in range(count)
    ]


def dying(kind: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A kind of table dies before its commit of a number, or after the next one, both counted from
    when the number is given."""
    commits = number = 0

    def begin(at: int) -> None:
        nonlocal commits, number
        commits, number = 0, at

    def die(self: Any, *told: Any, kept: Any) -> None:
        nonlocal commits
        commits += 1
        if commits == number:
            raise DiesError
        kept(self, *told)
        if commits == number + 1:
            raise DiesError

    for name in ("_upsert", "_commit"):
        monkeypatch.setattr(kind, name, partialmethod(die, kept=getattr(kind, name)))
    return begin


@pytest.mark.parametrize("by", [None, "event,bucket(3,ordering_key)"])
def test_the_last_value_of_each_key_whatever_dies(
    opened: Opened, by: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after each commit in turn, and the next batch has another size."""
    chance = random.Random(printed_seed())
    sent = history(200, 30, chance)
    layout = Layout(partitions(by), upsert=BY_KEY)
    with opened(layout) as lake:
        die_at = dying(type(lake), monkeypatch)
    for deaths in range(40):
        die_at(1 + deaths % 3)
        with suppress(DiesError):
            with opened(Layout() if deaths % 2 else layout) as lake:
                put(lake, sent, chance.randrange(1, 40))
            break
    assert found(lake.place) == model(sent)


EVENTS = ["e1", "e.2", "e1", "e_3"]


def event(number: int) -> str:
    return "late" if number > 120 and number % 5 == 0 else EVENTS[number % 4]


def put_by_event(lake: Lake, sent: Sequence[Sent], most: int) -> None:
    def staged() -> list[File]:
        lake.prepared(None)
        made = rows(start, sent[start:until], None)
        named = enumerate(made, start)
        told = (one.set_column(2, "topic", pa.array([event(n)])) for n, one in named)
        return [*stage(lake.staging, told)]

    while (start := lake.next("q", "x-1") or 0) < len(sent):
        until = min(len(sent), start + most)
        files = staged()
        if lake.adopts("q", "x-1", start, files):
            files += staged()
        lake.commit("q", "x-1", until, files)
        lake.roll(1)


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_of_last_values_for_each_event_whatever_dies(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key is that of its event; archives that are not told of the keys keep them."""
    chance = random.Random(printed_seed())
    sent = history(200, 8, chance)
    place = "iceberg://lake/db.events" if format == "iceberg" else tmp_path / "lake"
    with EventTables(place, format, Layout(upsert=BY_KEY)) as lake:
        put_by_event(lake, sent[:4], 4)
    die_at = dying(type(lake_at(place, format)), monkeypatch)
    for deaths in range(40):
        die_at(1 + deaths % 7)
        with suppress(DiesError):
            with EventTables(place, format, Layout(upsert=BY_KEY if deaths % 2 else None)) as lake:
                put_by_event(lake, sent, chance.randrange(20, 60))
            break
    for one in {*EVENTS, "late"}:
        own = [each for number, each in enumerate(sent) if event(number) == one]
        assert found(table_at(place, one)) == model(own)


@pytest.mark.slow
def test_a_queue_becomes_a_table_for_each_event(clicks: Clicks, lake: Path) -> None:
    def put(layout: Layout, *messages: tuple[str, str, str]) -> int:
        with clicks.client() as client:
            for name, key, value in messages:
                client.publish(name, value, key=key, confirm=True)
        with EventTables(lake, "delta", layout) as tables:
            return archived(clicks, tables)

    one = [("page.view", "a", "1"), ("order.new", "a", "2"), ("page.view", "a", "3")]
    by_key = Layout(upsert=Upsert("clicks", "ordering_key"))
    assert put(by_key, *one, ("page.view", "b", "4")) == 4
    two = [("page.view", "a", ""), ("order.new", "b", "5"), ("rare", "a", "6")]
    assert put(Layout(), *two) == 3
    names = "page.view", "order.new", "rare"
    assert [found(lake / each) for each in names] == [
        {"b": b"4"},
        {"a": b"2", "b": b"5"},
        {"a": b"6"},
    ]
    assert main(["pipeline", "verify", str(lake)]) == 0
    assert main(["pipeline", "verify", str(lake), "--url", clicks.broker.url]) == 65


def test_what_is_merged_and_removed_by_day(opened: Opened) -> None:
    chance = random.Random(printed_seed())
    sent = [each._replace(day=number // 30) for number, each in enumerate(history(90, 40, chance))]
    with opened(Layout(upsert=BY_KEY)) as lake:
        put(lake, sent, most=90 // (COMPACTION + 2))
        assert found(lake.place) == model(sent)
        lake.expire(date(2026, 11, 22))
    last = {each.key: each for each in sent}
    kept = {key: each.value for key, each in last.items() if each.value and each.day == 2}
    assert found(lake.place) == kept


def test_a_queue_that_was_created_again_goes_on(opened: Opened) -> None:
    one = [Sent("a", b"1"), Sent("b", b"2"), Sent("c", b"3")]
    with opened(Layout(upsert=BY_KEY)) as lake:
        put(lake, one)
        put(lake, [Sent("b", b"4"), Sent("c", b"")], epoch="x-2")
    assert found(lake.place) == {"a": b"1", "b": b"4"}


def test_of_two_archives_one_ends(opened: Opened) -> None:
    sent = history(30, 5, random.Random(printed_seed()))
    with opened(Layout(upsert=BY_KEY)) as one, opened() as other:
        put(one, sent[:10])
        other.next("q", "x-1")
        one.next("q", "x-1")
        for lake in (one, other):
            lake.prepared(None)
        files = [*stage(other.staging, rows(10, sent[10:15], None))]
        put(one, sent[:20])
        with pytest.raises(LakeInUse):
            other.commit("q", "x-1", 15, files)
        put(other, sent)
    assert found(one.place) == model(sent)


@pytest.mark.lakes
def test_on_a_store_whose_answers_are_lost() -> None:
    sent = history(90, 30, random.Random(printed_seed()))
    with local_store() as between, lake_at("s3://bucket/last", None, Layout(upsert=BY_KEY)) as lake:
        for end, fault in ((30, ""), (60, "swallow"), (90, "done")):
            between.fault = fault
            while (lake.next("q", "x-1") or 0) < end:
                with suppress(StoreAway):
                    put(lake, sent[:end])
        between.fault = ""
        assert found(lake.place) == model(sent)
        assert not kills.names(lake.place)  # The files of the tasks are deleted.


def test_a_key_of_the_payload_that_becomes_wider_and_a_field_that_deletes(opened: Opened) -> None:
    upsert = Upsert("q", "data.at.id", "data.gone")

    def each(number: int, id: int, gone: bool | None = None) -> Sent:
        data = {"at": {"id": id}, "gone": gone, "text": f"ö{number}", "all": ["a", "b"]}
        return Sent(None, b"%d" % number, 0, data)

    sent = [each(0, 7), each(1, 8), each(2, 9), each(3, 8, gone=True), each(4, 7, gone=False)]
    sent += [each(5, 2**40), each(6, 9, gone=True)]
    for kind, part in ((pa.int32(), sent[:5]), (pa.int64(), sent)):
        data = pa.struct(
            [
                ("at", pa.struct([("id", kind)])),
                *(("gone", pa.bool_()), ("text", pa.string()), ("all", pa.list_(pa.string()))),
            ]
        )
        with opened(Layout(upsert=upsert)) as lake:
            put(lake, part, most=2, kind=data)
    assert found(lake.place, "data.at.id") == {7: b"4", 2**40: b"5"}


def test_what_a_table_of_last_values_refuses(opened: Opened, tmp_path: Path) -> None:
    with opened(Layout(upsert=BY_KEY)) as lake:
        put(lake, [Sent("a", b"1")])
        with pytest.raises(LakeUnfit, match="of the queue q: archive the queue other into"):
            lake.next("other", "x-1")
    for told in (("q", "key"), ("q", "ordering_key", "data.gone"), ("p", "ordering_key")):
        with pytest.raises(LakeUnfit, match="created --upsert ordering_key of the queue q"):
            opened(Layout(upsert=Upsert(*told))).__enter__()
    if isinstance(lake.place, Path):
        with opened(Layout(sort=("offset",))) as sorting, pytest.raises(LakeUnfit, match="--sort"):
            sorting.prepared(None)
        with lake_at(tmp_path / "plain", "delta") as plain:
            plain.prepared(None)
        with pytest.raises(LakeUnfit, match="created without --upsert"):
            lake_at(tmp_path / "plain", "delta", Layout(upsert=BY_KEY)).__enter__()
    with pytest.raises(LakeUnfit, match="partition by KEY"):
        FileLake(tmp_path / "files", Layout(upsert=BY_KEY))


def test_the_order_of_rows_in_iceberg(tmp_path: Path) -> None:
    with lake_at("iceberg://lake/db.events", None, Layout(sort=("value",), upsert=BY_KEY)) as lake:
        put(lake, [Sent(str(n), b"%d" % (9 - n)) for n in range(9)])
        put(lake, [*[Sent(str(n), b"%d" % (9 - n)) for n in range(9)], Sent("3", b"0")])
    with closing(load_catalog("lake")) as catalog:
        tables = [*catalog.load_table("db.events").scan().to_arrow_batch_reader()]
    values = [each["value"].to_pylist() for each in tables if len(each)]
    assert all(each == sorted(each) for each in values)
    assert sorted(chain(*values)) == [b"%d" % n for n in (0, 1, 2, 3, 4, 5, 7, 8, 9)]


def archived(clicks: Clicks, lake: Lake, bad: Lake | None = None, **options: Any) -> int:
    told = clicks.archive_into(lake, bad, batch_messages=20, **options)
    return sum(progress.messages for progress in told)


def publish(broker: Served, sent: Sequence[tuple[str | None, bytes]], first: int = 0) -> None:
    flags = [b" --key=" + key.encode() if key else b"" for key, _ in sent]
    columns = [b"m%d" % (first + at) for at in range(len(sent))], [b"page.view"] * len(sent)
    with Publisher(ServerAddress(url=broker.url)) as publisher:
        every = *columns, [value for _, value in sent], flags
        publisher.publish(*(pa.array(each, pa.binary()) for each in every))


@pytest.mark.slow
def test_a_queue_becomes_a_table(clicks: Clicks, opened: Opened) -> None:
    upsert = Upsert("clicks", "ordering_key", "data.gone")
    sent: list[tuple[str | None, bytes]] = [
        (f"k{n % 7}", b'{"n": %d, "gone": %s}' % (n, b"true" if n % 11 == 5 else b"false"))
        for n in range(60)
    ]
    sent += [("k1", b""), ("k2", b'{"n": "many"}'), (None, b'{"n": 1}'), ("k9", b"no JSON")]
    publish(clicks.broker, sent)
    schema = schema_of("n bigint, gone boolean")
    with opened(Layout(upsert=upsert)) as lake, pytest.raises(LakeUnfit, match="message 63 of"):
        archived(clicks, lake, schema=schema)
    place = lake.place
    bad = f"{place}_bad" if isinstance(place, str) else Path(f"{place}_bad")
    format = None if isinstance(place, str) else "delta"
    with opened() as lake, lake_at(bad, format) as others:
        # Of all messages 40 are there already: a batch is whole or not at all.
        assert archived(clicks, lake, others, schema=schema) == 4
    last = dict(sent[:60])
    del last["k1"]
    gone = {key for key, value in last.items() if b"true" in value}
    assert found(place) == {k: v for k, v in last.items() if k not in gone}
    reasons = rows_read(bad, ["ordering_key", "data"])
    assert [(each["data"]["reason"], each["data"]["field"]) for each in reasons] == [
        ("another type", "n"),
        ("no key", "ordering_key"),
        ("not one JSON object", None),
    ]
    publish(clicks.broker, [("k1", b'{"n": 70}')], first=len(sent))
    with opened() as lake, lake_at(bad, format) as others:
        assert archived(clicks, lake, others, schema=schema) == 1
    assert found(place)["k1"] == b'{"n": 70}'
    rows = Delta(place).to_pyarrow_dataset() if isinstance(place, Path) else None
    if rows is not None:
        assert duckdb.sql("select max(data.n) from rows").fetchone() == (70,)
        assert polars.read_delta(str(place))["data"].struct.field("n").max() == 70


def rows_read(place: Place, columns: list[str]) -> list[dict[str, Any]]:
    with existing(place) as lake:
        batches = [
            each for file in lake.contents() for each in batches_of(file, [*columns, "offset"])
        ]
    return sorted((row for each in batches for row in each.to_pylist()), key=itemgetter("offset"))


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
@pytest.mark.parametrize("format", FORMATS)
def test_the_command(mqks_broker: Broker, tmp_path: Path, format: str) -> None:
    subscribe(mqks_broker)
    publish(mqks_broker, [("a", b"1"), ("b", b"2"), ("a", b"3"), ("b", b"")])
    assert archive(mqks_broker, tmp_path, format, "--upsert", "ordering_key") == 0
    publish(mqks_broker, [("c", b"4"), (None, b"5")], first=4)
    assert archive(mqks_broker, tmp_path, format) == 65
    bad = "db.bad" if format == "iceberg" else str(tmp_path / "bad")
    told = ["--upsert", "ordering_key", "--bad-rows", bad]
    assert archive(mqks_broker, tmp_path, format, *told) == 0
    verified(tmp_path, format)
    table = table_of(tmp_path, format)
    assert dict(zip(*(table[n].to_pylist() for n in ("ordering_key", "value")), strict=True)) == {
        "a": b"3",
        "c": b"4",
    }
    place = lake_of(tmp_path, format)[: 3 if format == "iceberg" else 1]
    assert main(["pipeline", "verify", *place, "--url", mqks_broker.url]) == 65
    assert main(["pipeline", "vacuum", *place]) == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--upsert", "ordering_key"], 65),
        (["--format", "delta", "--upsert", "headers"], 78),
        (["--format", "delta", "--upsert", "data.id"], 78),
        (["--format", "delta", "--upsert", "key", "--delete-where", "priority"], 78),
        (["--upsert", "ordering_key", "--table-by", "event"], 65),
        (["--format", "delta", "--delete-where", "data.gone", "--schema", "gone boolean"], 78),
        (["--format", "delta", "--bad-rows", "bad"], 78),
    ],
)
def test_what_the_command_refuses(
    mqks_broker: Broker, tmp_path: Path, options: list[str], code: int
) -> None:
    subscribe(mqks_broker)
    told = [str(tmp_path / "lake"), "--url", mqks_broker.url, "--once"]
    assert main(["pipeline", "archive", "clicks", *told, *options]) == code
    mask = ["--format", "delta", "--upsert", "key"]
    assert main(["pipeline", "archive", "clicks.*", *told, *mask]) == 78
    assert not (tmp_path / "lake").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_is_killed_and_each_key_has_its_last_value(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """In Iceberg it dies at each commit, above; its kills are in test_pipeline_iceberg.py."""
    place = kills.archive(spark, tmp_path, 40_000, 1, "delta", 2, upsert=True)
    assert found(place) == kills.last_values(40_000)
