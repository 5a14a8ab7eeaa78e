"""Payloads that do not fit the schema go into a lake of their own, and come back from there.

The one rule: each message is in exactly one of the two lakes.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mqks.commands import main
from mqks.pipeline import job
from mqks.pipeline.errors import PipelineError
from mqks.pipeline.lake import Lake
from mqks.pipeline.page import page
from mqks.pipeline.places import existing, lake_at
from mqks.pipeline.report import BadReason, report
from mqks.pipeline.sums import batches_of
from mqks.pipeline.verify import Verification
from tests.pipeline.conftest import Clicks, place_of

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


pytestmark = pytest.mark.usefixtures("catalog")


def places(tmp_path: Path, kind: str) -> tuple[Any, Any, Any]:
    lake, format = place_of(tmp_path, kind)
    return lake, f"{lake}_bad" if isinstance(lake, str) else lake.with_name("bad"), format


def archive(clicks: Clicks, lake: Lake, bad: Lake, ddl: str, batch: int = 1000) -> list[int]:
    """Gives the number of bad rows of each batch."""
    told = clicks.archive_into(lake, bad, schema=job.schema_of(ddl), batch_messages=batch)
    return [each.unparsed for each in told]


def rows(place: Any, format: str | None) -> list[dict[str, Any]]:
    """Payload and `data` of all rows, as numbered; after a check of the sums."""
    with existing(place) as opened:
        assert not Verification(opened).run().differences
        files = [batches_of(file, ["offset", "value", "data"]) for file in opened.contents()]
        whole = pa.concat_tables(pa.Table.from_batches(file) for file in files)
    found: list[dict[str, Any]] = whole.sort_by("offset").to_pylist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_have_a_place(clicks: Clicks, tmp_path: Path, kind: str) -> None:
    lake, other, format = places(tmp_path, kind)
    with clicks.client() as client:
        for payload in BAD:
            client.publish("rare", payload, meta={"trace": "a&b"})
    clicks.publish([(f"m{n}", "rare", text) for n, text in enumerate(GOOD)])

    with lake_at(lake, format) as opened, lake_at(other, format) as bad:
        assert archive(clicks, opened, bad, SCHEMA) == [3]
    good = rows(lake, format)
    assert [row["value"].decode() for row in good] == GOOD
    assert [row["data"] for row in good] == [
        {"n": n, "user": {"id": n, "name": None}} for n in range(600)
    ]
    assert {row["value"].decode(): row["data"] for row in rows(other, format)} == BAD

    told = report(clicks.messages(other, bad=True), title="bad")
    reasons = [
        BadReason("another type", "n", 1),
        BadReason("another type", "user", 1),
        BadReason("not one JSON object", None, 1),
    ]
    assert told.reasons == reasons
    assert "not one JSON object" in page(told)

    # After the schema was mended they are sent again; what is bad still is bad again.
    assert clicks.replay(lake=other, bad=True)[-1].messages == 3
    wider = f"{lake}2" if kind == "iceberg" else tmp_path / "wider"
    with lake_at(wider, format) as opened, lake_at(other, format) as bad:
        assert archive(clicks, opened, bad, "n string, user string") == [1]
    found = rows(wider, format)
    assert [row["value"].decode() for row in found] == [*BAD][:2]
    frame = clicks.messages(wider, properties=True)
    assert [(row.topic, row.headers) for row in frame.collect()] == [("rare", {"trace": "a&b"})] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [pytest.param(3, marks=pytest.mark.slow), 1000])
def test_an_end_between_the_two_commits(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batch: int
) -> None:
    lake, other, format = places(tmp_path, kind)
    payloads = [text for n, bad in enumerate(BAD) for text in (GOOD[2 * n], bad, GOOD[2 * n + 1])]
    clicks.publish([(f"m{n}", "rare", text) for n, text in enumerate(payloads)])

    def end(*_: object) -> None:
        raise PipelineError("ended here")

    with lake_at(lake, format) as opened, lake_at(other, format) as bad:
        monkeypatch.setattr(opened, "commit", end)
        with pytest.raises(PipelineError, match="ended here"):
            archive(clicks, opened, bad, SCHEMA, 5)
    clicks.publish([("m9", "rare", "late")])
    with lake_at(lake, format) as opened, lake_at(other, format) as bad:
        assert sum(archive(clicks, opened, bad, SCHEMA, batch)) == 2
    assert [row["value"].decode() for row in rows(lake, format)] == GOOD[:6]
    assert [row["value"].decode() for row in rows(other, format)] == [*BAD, "late"]


def test_without_a_schema_no_row_is_bad(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    assert main(["pipeline", "archive", "clicks", lake, "--bad-rows", f"{lake}-bad"]) == 78
    assert "--bad-rows needs --schema" in capsys.readouterr().err
