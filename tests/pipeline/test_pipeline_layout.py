"""Partitions by event time and field, the order of rows, names of fields: in each format.

The one rule: what is written is read by programs of others, and verified by the sums.
"""

import json
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable as Delta
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import BinaryType, DateType, LongType, StringType, TimestamptzType

from mqks.commands import main
from mqks.pipeline.errors import BadOption, LakeUnfit
from mqks.pipeline.lake import FileLake, stage
from mqks.pipeline.layout import Layout, bucket, named, partitions, renamed, renames
from mqks.testing import Broker
from tests.pipeline.conftest import publish, subscribe
from tests.pipeline.test_pipeline_lake import batch

SCHEMA = "user string, at timestamp, n bigint"
BY = "day(data.at),bucket(4,key),data.user"
BODIES: list[dict[str, Any]] = [
    {"user": "bob", "at": "2026-11-20T23:59:59Z", "n": 1},
    {"user": "ann", "at": "2026-11-21T00:00:00Z", "n": 2},
    {"user": "ann", "at": "2019-02-03T04:05:06Z", "n": 3},
    {"user": "", "at": "1969-12-31T23:00:00Z", "n": 4},
    {"n": 5},
    {"n": "no number"},
]


pytestmark = pytest.mark.usefixtures("catalog")


def lake_of(path: Path, format: str) -> list[str]:
    if format == "iceberg":
        return ["db.events", "--catalog", "lake"]
    return [str(path / "lake"), *(["--format", "delta"] if format == "delta" else [])]


def archive(broker: Broker, path: Path, format: str, *options: str) -> int:
    place = lake_of(path, format)
    return main(["pipeline", "archive", "clicks", *place, "--once", "--url", broker.url, *options])


def table_of(path: Path, format: str) -> Any:
    if format == "iceberg":
        with closing(load_catalog("lake")) as catalog:
            return catalog.load_table("db.events").scan().to_arrow()
    if format == "delta":
        return Delta(path / "lake").to_pyarrow_table()
    return ds.dataset(path / "lake", partitioning="hive").to_table()


def verified(path: Path, format: str) -> None:
    assert (
        main(["pipeline", "verify", *lake_of(path, format)[: 3 if format == "iceberg" else 1]]) == 0
    )


def send(broker: Broker, *bodies: dict[str, Any]) -> None:
    ids = (f"{uuid.uuid4().hex}" for _ in bodies)
    told = map(json.dumps, bodies)
    publish(broker, [(each, "page.view", text) for each, text in zip(ids, told, strict=True)])


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_rows_are_in_the_partition_of_their_fields(
    mqks_broker: Broker, tmp_path: Path, format: str
) -> None:
    subscribe(mqks_broker)
    parts: tuple[list[dict[str, Any]], ...] = BODIES[:4], BODIES[4:], BODIES[:2]
    for some in parts:  # The last ones are late.
        send(mqks_broker, *some)
        options = ["--schema", SCHEMA, "--sort", "data.n"]
        if some is not parts[1]:
            options += ["--partition", BY]
        assert archive(mqks_broker, tmp_path, format, *options) == 0
    rows = table_of(tmp_path, format)
    assert rows.num_rows == len(BODIES) + 2
    verified(tmp_path, format)
    for row in rows.to_pylist():
        data = row["data"] or {}
        day = data.get("at") and data["at"].date()
        number = BucketTransform(4).transform(BinaryType())(row["key"])
        if format != "iceberg":
            assert row["data_at_day"] in (day, day and day.isoformat())
            assert row["key_bucket"] == number
            assert row["data_user"] == (data.get("user") or None)
    if format == "iceberg":
        with closing(load_catalog("lake")) as catalog:
            table = catalog.load_table("db.events")
        told = [(field.name, str(field.transform)) for field in table.spec().fields]
        assert told == [
            ("date", "day"),
            ("key_bucket", "bucket[4]"),
            ("data_at_day", "day"),  # The fields came later.
            ("data_user", "identity"),
        ]
        assert [str(field.transform) for field in table.sort_order().fields] == ["identity"]
        for where, count in (
            ("data.user = 'ann'", 3),
            ("data.user = ''", 1),
            ("data.user is null", 2),
            ("data.at < '2019-12-01T00:00:00+00:00'", 2),
        ):
            assert table.scan(where).to_arrow().num_rows == count, where
        few = [*table.scan("data.user = ''").plan_files()]
        assert len(few) == 1  # Others are not opened.
    assert archive(mqks_broker, tmp_path, format, "--schema", SCHEMA, "--by", "hour(data.at)") == 65


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_renamed_fields_of_both_parsers(mqks_broker: Broker, tmp_path: Path, format: str) -> None:
    subscribe(mqks_broker)
    send(mqks_broker, {"who": {"user-id": "ann"}, "n": 1}, {"who": {"user-id": "bob"}, "n": "no"})
    file = tmp_path / "names.json"
    file.write_text('{"who.user-id": "id", "who": "user"}')
    told = ["--schema", "who struct<`user-id`: string>, n bigint", "--rename", str(file)]
    assert archive(mqks_broker, tmp_path, format, *told, "--by", "data.user.id") == 0
    send(mqks_broker, {"who": {"user-id": "eve"}, "m": 1.5, "n": 3})
    told[1] = "who struct<`user-id`: string>, n bigint, m double"
    assert archive(mqks_broker, tmp_path, format, *told) == 0
    verified(tmp_path, format)
    if format == "parquet":
        files = [*(tmp_path / "lake").glob("date=*/**/*.parquet")]
        found = [row["data"] for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    else:
        found = table_of(tmp_path, format)["data"].to_pylist()
    assert sorted(each["user"]["id"] for each in found if each) == ["ann", "eve"]
    assert found.count(None) == 1


def test_a_hash_is_that_of_iceberg() -> None:
    texts = ["", "a", "ab", "abc", "abcd", "h\u00e9llo", None, "x" * 1001]
    numbers = [0, -5, None, 2**40, 7]
    for values, kind, like in (
        (pa.array(texts), StringType(), texts),
        (pa.array(texts)[3:], StringType(), texts[3:]),
        (pa.array([text and text.encode() for text in texts]), BinaryType(), None),
        (pa.array(numbers), LongType(), numbers),
        (pa.array([0, None, -1, 20_000], pa.date32()), DateType(), [0, None, -1, 20_000]),
        (pa.array(numbers, pa.timestamp("us", tz="UTC")), TimestamptzType(), numbers),
    ):
        hashed = BucketTransform(97).transform(kind)
        expected = [hashed(value) for value in (values.to_pylist() if like is None else like)]
        assert bucket(values, 97).to_pylist() == expected


def test_more_partitions_than_the_limit_are_an_error_before_any_file(tmp_path: Path) -> None:
    with FileLake(tmp_path, layout=Layout(partitions("offset"), partitions_max=10)) as lake:
        assert len([*stage(lake.staging, [batch(range(10))])]) == 10
        before = {*(tmp_path / "_mqks" / "staging").iterdir()}
        with pytest.raises(LakeUnfit, match="11 partitions of 11 messages"):
            [*stage(lake.staging, [batch(range(11))])]
        assert {*(tmp_path / "_mqks" / "staging").iterdir()} == before


def test_the_order_of_a_file_also_when_it_is_merged(tmp_path: Path) -> None:
    with FileLake(tmp_path, Layout(sort=("topic", "offset"))) as lake:
        for first in (0, 10):
            rows = [batch(range(first, first + 5), "b"), batch(range(first + 5, first + 10), "a")]
            lake.commit("q", "x-1", first + 10, [*stage(lake.staging, rows)])
        lake.roll(0)
    [file] = tmp_path.glob("date=*/*.parquet")
    assert file.name.startswith("000000000000-000000000019-")
    assert pq.read_table(file, partitioning=None)["offset"].to_pylist() == [
        *range(5, 10),
        *range(15, 20),
        *range(5),
        *range(10, 15),
    ]


@pytest.mark.parametrize(
    ("by", "why"),
    [
        ("bucket(0,key)", "buckets"),
        ("bucket(key)", "none of"),
        ("day(data.at", "none of"),
        ("year(data.at)", "none of"),
        ("day(key)", "cannot be of the type binary"),
        ("day(timestamp)", "arrival"),
        ("headers", "cannot be of the type map"),
        ("data.a_b,data.a.b", "same name"),
    ],
)
def test_partitions_that_are_none(by: str, why: str) -> None:
    with pytest.raises(BadOption, match=why):
        partitions(by)


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', '{"a": "b.c"}', "{"])
def test_names_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(BadOption, match="--rename"):
        renames(tmp_path / "names.json")


def test_names_within_arrays_and_twice(tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text('"a.b" = "c"')
    kind = pa.struct([("a", pa.list_(pa.struct([("b", pa.int64()), ("d", pa.string())])))])
    new = renamed(kind, renames(tmp_path / "names.toml"))
    assert new.field("a").type.value_type.names == ["c", "d"]
    assert named(new, kind) == kind
    with pytest.raises(BadOption, match=r"two fields a\.d"):
        renamed(kind, {"a.b": "d"})


@pytest.mark.usefixtures("jobs_here")
def test_unknown_names_are_told(mqks_broker: Broker, tmp_path: Path) -> None:
    subscribe(mqks_broker)
    (tmp_path / "names.json").write_text('{"usr": "u"}')
    told = ["--schema", "n bigint", "--rename", str(tmp_path / "names.json")]
    assert archive(mqks_broker, tmp_path, "parquet", *told) == 78
