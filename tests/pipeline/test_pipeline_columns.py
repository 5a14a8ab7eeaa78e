"""The columns of a lake: attributes, priority and ordering key, from the broker and back to it, and
what of payloads becomes the column `data`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from mqks.client.blocking import connect
from mqks.pipeline import job
from mqks.pipeline.columns import PROPERTIES, record_batch
from mqks.pipeline.errors import BadOption, LakeUnfit
from mqks.pipeline.iceberg import files as files_of
from mqks.pipeline.iceberg import found
from mqks.pipeline.lake import WRITTEN
from mqks.pipeline.older import to_arrow_type
from mqks.pipeline.payloads import parsed
from mqks.pipeline.places import lake_at
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.table import delta
from mqks.testing import Broker
from tests.pipeline.conftest import Clicks, Served, place_of
from tests.pipeline.test_pipeline_lake import batch, payloads, put

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Told = tuple[str, str, dict[str, str] | None, int | None, str | None]
"""Event, data, attributes, priority and ordering key."""
OLD: list[Told] = [("e1", "{}", None, None, None)] * 4
NEW: list[Told] = [
    ("e1", "plain", None, 0, None),
    ("a,priority=3", "1", {"tenant": "a b", "empty": "", "=&": "ü,%"}, 0, None),
    ("a,escaped=1", "t\tn\n", {"n": "1"}, -128, "k 1"),
    ("b,key=x", "t\\n", None, 0, "ü,"),
    ("b,key=x", "long", {"long": "x" * 4080}, 127, None),
]
EVENTS = ["e1", "a,priority=3", "a,escaped=1", "b,key=x"]


def publish(broker: Served) -> None:
    with connect(broker.url) as client:
        client.subscribe("clicks", EVENTS)
        for event, data, headers, priority, key in NEW:
            client.publish(event, data, meta=headers, priority=priority or 0, key=key, confirm=True)


def told(rows: list[dict[str, Any]]) -> list[Told]:
    names = "topic", "value", *PROPERTIES.names
    rows = [{name: row.get(name) for name in names} for row in rows]
    for row in rows:
        row["value"] = bytes(row["value"]).decode()
        row["headers"] = None if row["headers"] is None else dict(row["headers"])
    return sorted((tuple(row.values()) for row in rows), key=str)


def waiting(broker: Served, queue: str) -> list[dict[str, Any]]:
    """What is in a queue, with the attributes as a map."""
    with QueueReader(broker.url, queue, meta=True) as reader:
        log = reader.range()
        rows = [row for some in reader.read(log.first, log.next) for row in some.to_pylist()]
    for row in rows:
        pairs = ((pair["key"], pair["value"].decode()) for pair in row["headers"] or ())
        row["headers"] = dict(pairs) or None
    return rows


def test_they_are_told_apart_from_names(mqks_broker: Broker) -> None:
    publish(mqks_broker)
    assert told(waiting(mqks_broker, "clicks")) == sorted(NEW, key=str)
    with QueueReader(mqks_broker.url, "clicks") as reader:
        [rows] = reader.read(1, 6)
    assert rows["headers"].null_count == 5
    assert rows["priority"].to_pylist() == [0, 0, -128, 0, 127]


def test_attributes_of_any_bytes() -> None:
    schema = pa.schema([*PROPERTIES])
    tails = [b"", b"\ta=%FF&%C3%BC==", b"\tb=\\xff,key=%FE", b"", b"\tc="]
    text = b"".join(b"m event=e x%b\n" % tail for tail in tails)
    runs = np.array([[1, len(tails), 0, len(text)]], "<i8")
    rows = record_batch(memoryview(text), runs, schema, has_meta=True)
    rows.validate(full=True)
    maps = [None, [("a", "\\xff"), ("ü", "=")], [("b", "\\xff")], None, [("c", "")]]
    assert rows["headers"].to_pylist() == maps
    assert rows["ordering_key"].to_pylist() == [None, None, "\\xfe", None, None]
    damaged = text.replace(b"c=", b"cc")
    with pytest.raises(ValueError, match="reshape"):
        record_batch(memoryview(damaged), runs, schema, has_meta=True)


@pytest.mark.slow
@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("kind", ["files", "delta", "iceberg"])
def test_from_the_broker_into_an_older_lake_and_back(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lake, format = place_of(tmp_path, kind)
    clicks.lake, broker = lake, clicks.broker
    with monkeypatch.context() as older:
        before = pa.schema([*WRITTEN][: -len(PROPERTIES)])
        for module in ("iceberg", "table"):
            older.setattr(f"mqks.pipeline.{module}.WRITTEN", before)
        with lake_at(lake, format) as opened:
            put(opened, batch(range(4)))
            opened.roll(0)
    there = {*delta(lake).file_uris()} if kind == "delta" else set()
    publish(broker)
    assert sum(each.messages for each in clicks.archive(format)) == 5
    if kind == "delta":  # For new columns no file is written again.
        assert there < {*delta(lake).file_uris()}
    for module in ("iceberg", "table"):
        monkeypatch.setattr(f"mqks.pipeline.{module}.COMPACTION", 1)
    publish(broker)  # By Java, too; and all files are merged.
    [progress] = clicks.archive(format, schema=job.schema_of("n int"))
    assert (progress.messages, progress.unparsed) == (5, 5)

    if kind != "files":  # One of each day.
        assert len(delta(lake).file_uris() if kind == "delta" else files_of(lake)) == 2
    wanted = sorted(OLD + NEW + NEW, key=str)
    frame = clicks.messages(properties=True)
    assert told([row.asDict() for row in frame.collect()]) == wanted
    if kind == "files":
        files = f"read_parquet('{lake}/**/*.parquet', union_by_name = true)"
        by_spark = clicks.spark.read.option("mergeSchema", "true").parquet(str(lake))
        assert told([row.asDict() for row in by_spark.collect()]) == wanted
    else:
        table = found(lake).scan() if kind == "iceberg" else delta(lake)
        rows = table.to_arrow() if kind == "iceberg" else table.to_pyarrow_table()
        assert told(rows.to_pylist()) == wanted
        files = "rows"
    by_duckdb = duckdb.sql(f"select * from {files}").to_arrow_table()
    assert told(by_duckdb.to_pylist()) == wanted

    with clicks.client() as client:
        client.subscribe("copy", EVENTS)
    clicks.replay()
    copied = waiting(broker, "copy")
    for row in copied:
        origins = [row["headers"].pop(f"origin_{word}") for word in ("queue", "epoch", "offset")]
        assert origins[0] in ("q", "clicks")
        row["headers"] = row["headers"] or None
    # There is no room for those beside the origin.
    fit = [(*row[:2], None, *row[3:]) if row[1] == "long" else row for row in NEW]
    old = [(*row[:3], 0, None) for row in OLD]
    assert told(copied) == sorted(old + fit + fit, key=str)

    # What was replayed has its origin in columns of its own; it is replayed again.
    [again] = clicks.archive(format, include_replays=True)
    assert again.messages == 14
    with clicks.client() as client:
        client.subscribe("third", EVENTS)
    rows = clicks.messages(properties=True).where("queue = 'clicks'").collect()
    assert not any(name.startswith("origin") for row in rows for name in row.headers or ())
    clicks.replay(name="again")
    assert len(waiting(broker, "third")) == 28


# ----------------------------------------------------------------------------- payloads


@pytest.mark.slow
def test_what_is_json(spark: "SparkSession") -> None:
    """With the schema, what fits it, and what does not."""
    cases: list[tuple[str, list[str], list[str | bytes]]] = [
        (
            "id int, x double, s string",
            ["{}", ' {"id":1}\n ', '{"x":1e3,"s":"}{"}', '{"s":"NaN"}', '{"s":{"a":[1]}}'],
            [
                *('{"id":1}{"id":2}', '{"id":1} x', '{"id":1},', '{"id":1},{"id":2}', '{"id":1}]'),
                *('{"id":1}]}', "{'id':1}", '{"x":NaN}', '{"x":-Infinity}', '{"id":"a"}', ""),
                *("null", "[]", '[{"id":1}]', "3", '{"id":01}', '{"id":1', b'{"s":"\xff"}'),
            ],
        ),
        (
            "m map<string,int>, a array<map<string,int>>, n map<string,struct<m:map<string,int>>>",
            ['{"m":{"a":1,"b":1}}', '{"a":[null,{"a":1},{"a":1}]}', '{"n":{"a":null}}', '{"n":{}}'],
            [
                *('{"m":{"a":1,"a":1}}', '{"a":[{"a":1,"b":2,"a":3}]}', '{"n":{"a":{},"a":{}}}'),
                '{"n":{"x":{"m":{"a":1,"a":2}}}}',
            ],
        ),
        ("l array<struct<id:int>>", ['{"l":[{"id":1},null]}'], ['{"l":[{"id":1},{"id":"a"}]}']),
    ]
    for ddl, good, bad in cases:
        texts = [text.encode() if isinstance(text, str) else text for text in (*good, *bad)]
        schema = job.schema_of(ddl)
        assert schema is not None
        rows = parsed(spark.createDataFrame([(text,) for text in texts], "value binary"), schema)
        fits = [bytes(row.value) for row in rows.where("data is not null").collect()]
        assert fits == texts[: len(good)]
        assert rows.schema["data"].dataType == schema


@pytest.mark.usefixtures("spark", "catalog")
@pytest.mark.parametrize("kind", ["files", "delta", "iceberg"])
def test_names_that_differ_by_case(tmp_path: Path, kind: str) -> None:
    lake, format = place_of(tmp_path, kind)

    def kept(ddl: str) -> pa.DataType:
        return to_arrow_type(StructType.fromDDL(ddl))

    def archive(ddl: str, offset: int) -> None:
        with lake_at(lake, format) as opened:
            opened.next("q", "x-1")
            put(opened, payloads(range(offset, offset + 1), pa.array([{"id": 1}], kept(ddl))))

    deep = "struct<x: int, X: int>"
    for ddl in ("id int, ID int", f"a {deep}", f"l array<map<string, {deep}>>"):
        with pytest.raises(LakeUnfit, match="differ only by case"):
            archive(ddl, 0)
    archive("id int, deep struct<n: int>", 0)
    for ddl in ("ID int", "Id int, new int", "deep struct<N: int>"):
        with pytest.raises(LakeUnfit, match=r"data\.\S+ and data\.\S+ differ only by case"):
            archive(ddl, 1)
    archive("id int, new int", 1)
    if kind == "files":  # One that an older version has left.
        state = tmp_path / "lake" / "_mqks" / "state.json"
        told = json.loads(state.read_text())
        assert "data.new" in told.pop("fields")
        state.write_text(json.dumps(told))
    with pytest.raises(LakeUnfit, match=r"data\.NEW and data\.new differ"):
        archive("NEW int", 2)


def test_schemas_that_cannot_be(spark: "SparkSession") -> None:
    for text, reason in {
        "int": "schema",
        '{"type": "nothing"}': "schema",
        "no schema at all": "schema",
        "id integr": r'Unsupported data type "INTEGR".* \(line 1, pos 3\)',
        "id int, , x int": r"Syntax error at or near ','.* \(line 1, pos 8\)",
    }.items():
        with pytest.raises(BadOption, match=reason):
            job.schema_of(text)
    for ddl, kind in {
        "n void": "void",
        "a array<void>": "void",
        "m map<string, struct<x: void>>": "void",
        "i interval day to second": "interval day to second",
        "c char(3)": r"char\(3\)",
    }.items():
        with pytest.raises(LakeUnfit, match=f"no lake can hold the type {kind}: "):
            job.schema_of(ddl)
    assert job.schema_of("void int, interval int") is not None
    assert LakeUnfit("").exit_code == 65
