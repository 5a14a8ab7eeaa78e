"""Payloads that do not fit the schema go into a lake of their own, and come back from there.

The one rule: each message is in exactly one of the two lakes.
"""

import json
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from mqks.client.blocking import connect
from mqks.commands import main
from mqks.pipeline import job
from mqks.pipeline.archive import Archive
from mqks.pipeline.errors import PipelineError
from mqks.pipeline.lake import Lake
from mqks.pipeline.page import page
from mqks.pipeline.places import existing, lake_at, messages
from mqks.pipeline.replay import Replay
from mqks.pipeline.report import BadReason, report
from mqks.pipeline.sums import batches_of
from mqks.pipeline.verify import Verification
from mqks.pipeline.wire import ServerAddress
from mqks.testing import Broker
from tests.pipeline.test_pipeline_columns import place_of
from tests.pipeline.test_pipeline_jobs import publish, subscribe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KINDS = ["files", "delta", "iceberg"]
SCHEMA = "n bigint, user struct<id: int, name: string>"
GOOD = [json.dumps({"n": n, "user": {"id": n}}) for n in range(600)]
BAD: dict[str, dict[str, Any]] = {
    '{"n": "x", "user": {"id": 7}}': {
        "reason": "another type",
        "field": "n",
        "data": '{"user":{"id":7}}',
    },
    '{"n": 1, "user": {"id": "a", "name": "b"}}': {
        "reason": "another type",
        "field": "user",
        "data": '{"n":1,"user":{"name":"b"}}',
    },
    '{"n": 1}{"n": 2}': {"reason": "not one JSON object", "field": None, "data": None},
}


def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> tuple[Any, Any, Any]:
    lake, format = place_of(kind, tmp_path, monkeypatch)
    return lake, f"{lake}_bad" if isinstance(lake, str) else lake.with_name("bad"), format


def archive(
    spark: "SparkSession", broker: Broker, lake: Lake, bad: Lake, ddl: str, batch: int = 1000
) -> list[int]:
    """Gives the number of bad rows of each batch."""
    schema, address = job.schema_of(ddl), ServerAddress(url=broker.url)
    archive = Archive(
        queue="clicks", server=address, once=True, schema=schema, batch_messages=batch
    )
    return [each.unparsed for each in archive.run(spark.sparkContext, lake, Event(), bad)]


def rows(place: Any, format: str | None) -> list[dict[str, Any]]:
    """Payload and `data` of all rows, as numbered; after a check of the sums."""
    with existing(place) as opened:
        assert not Verification(opened).run().differences
        files = [batches_of(file, ["offset", "value", "data"]) for file in opened.contents()]
        whole = pa.concat_tables(pa.Table.from_batches(file) for file in files)
    found: list[dict[str, Any]] = whole.sort_by("offset").to_pylist()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_have_a_place(
    spark: "SparkSession",
    mqks_broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    lake, other, format = places(tmp_path, monkeypatch, kind)
    subscribe(mqks_broker)
    with connect(mqks_broker.url) as client:
        for payload in BAD:
            client.publish("rare", payload, meta={"trace": "a&b"})
    publish(mqks_broker, [(f"m{n}", "rare", text) for n, text in enumerate(GOOD)])

    with lake_at(lake, format) as opened, lake_at(other, format) as bad:
        assert archive(spark, mqks_broker, opened, bad, SCHEMA) == [3]
    good = rows(lake, format)
    assert [row["value"].decode() for row in good] == GOOD
    assert [row["data"] for row in good] == [
        {"n": n, "user": {"id": n, "name": None}} for n in range(600)
    ]
    assert {row["value"].decode(): row["data"] for row in rows(other, format)} == BAD

    told = report(messages(spark, other, bad=True), title="bad")
    reasons = [
        BadReason("another type", "n", 1),
        BadReason("another type", "user", 1),
        BadReason("not one JSON object", None, 1),
    ]
    assert told.reasons == reasons
    assert "not one JSON object" in page(told)

    # After the schema was mended they are sent again; what is bad still is bad again.
    again = Replay(lake=other, server=ServerAddress(url=mqks_broker.url), bad=True)
    assert [*again.run(spark, Event())][-1].messages == 3
    wider = tmp_path / "wider" if kind == "files" else f"{lake}2" if kind == "iceberg" else None
    with lake_at(wider or tmp_path / "wider", format) as opened, lake_at(other, format) as bad:
        assert archive(spark, mqks_broker, opened, bad, "n string, user string") == [1]
    found = rows(wider or tmp_path / "wider", format)
    assert [row["value"].decode() for row in found] == [*BAD][:2]
    frame = messages(spark, wider or tmp_path / "wider", properties=True)
    assert [(row.topic, row.headers) for row in frame.collect()] == [("rare", {"trace": "a&b"})] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [3, 1000])
def test_an_end_between_the_two_commits(
    spark: "SparkSession",
    mqks_broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    batch: int,
) -> None:
    lake, other, format = places(tmp_path, monkeypatch, kind)
    subscribe(mqks_broker)
    payloads = [text for n, bad in enumerate(BAD) for text in (GOOD[2 * n], bad, GOOD[2 * n + 1])]
    publish(mqks_broker, [(f"m{n}", "rare", text) for n, text in enumerate(payloads)])

    def end(*_: object) -> None:
        raise PipelineError("ended here")

    with lake_at(lake, format) as opened, lake_at(other, format) as bad:
        monkeypatch.setattr(opened, "commit", end)
        with pytest.raises(PipelineError, match="ended here"):
            archive(spark, mqks_broker, opened, bad, SCHEMA, 5)
    publish(mqks_broker, [("m9", "rare", "late")])
    with lake_at(lake, format) as opened, lake_at(other, format) as bad:
        assert sum(archive(spark, mqks_broker, opened, bad, SCHEMA, batch)) == 2
    assert [row["value"].decode() for row in rows(lake, format)] == GOOD[:6]
    assert [row["value"].decode() for row in rows(other, format)] == [*BAD, "late"]


def test_without_a_schema_no_row_is_bad(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    assert main(["pipeline", "archive", "clicks", lake, "--bad-rows", f"{lake}-bad"]) == 78
    assert "--bad-rows needs --schema" in capsys.readouterr().err
