"""Payloads that Arrow parses, against what Spark makes of them: the same, or nothing."""

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from mqks.client.blocking import connect
from mqks.commands import main
from mqks.pipeline.older import from_arrow_type, to_arrow_type
from mqks.pipeline.payloads import parsed, parsed_here, proposed
from mqks.testing import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUMBERS = "0 -0 7 -128 128 40000 2147483648 9223372036854775807 9223372036854775808 1.0 1e3 1E-7"
NUMBERS += " 0.1 1e400 -1e400 5e-324 1.7976931348623157e308 123456789012345678901234567890 01 .5 1."
NUMBERS += " +1 1e NaN -NaN Infinity -Infinity Inf inf true false null {} [] [1] 0x10"
TEXTS = [
    *("", "a", "é", "\\u00e9", "\\u0000", "\\ud83d\\ude00", "\\ud83d", "\\n", "\\x", "\\/", "a\tb"),
    *("NaN", "Infinity", "1", "true", "2026-11-20", "2026-02-29", "2024-02-29", "1500-02-29"),
    *("2026-11-20T10:00:00Z", "2026-11-20T10:00:00.5+01:00", "2026-11-20T10:00:00.123456-11:30"),
    *("2026-11-20T10:00:00.1234567Z", "2026-11-20T24:00:00Z", "2026-11-20T10:00:60Z"),
    *("2026-11-20T10:00:00", "2026-11-20 10:00:00Z", "2026-11-20T10:00Z"),
    *("2026-11-20T10:00:00+18:30", "2026-11-20T10:00:00+0100", "2026-13-01T00:00:00Z"),
    *("1583-01-01T00:00:00Z", "0001-01-01T00:00:00Z"),
    *("1900-01-01T00:00:00.000001Z", "2999-12-31T23:59:59.999999+17:59", " 2026-11-20T10:00:00Z"),
]
OTHERS = "string", "boolean", "tinyint", "smallint", "int", "double", "timestamp", "date"
WHOLE = [
    *("", "{}", "null", "[]", "3", '"a"', "[{}]", ' {"v":1} ', '\n{"v":\n1}\n', '{"v":1}{"v":2}'),
    *('{"v":1},{"v":2}', '{"v":1}]}', '{"v":1}],"w":[1', '{"v":1,}', '{"v":1 2}', '{"v":1'),
    "{'v':1}",
    *('{"v":1,"v":2}', '{"V":1}', '{"w":{"v":[1,{"a":null}]},"v":1}', '{"w":NaN}', '{"w":01}'),
    *('{"w":"\\ud83d"}', '{"v":1}/**/', '{"v":1}#', '﻿{"v":1}', '{"v":1}\0', '{"w":1,"w":"a"}'),
    '{"w":' + "[" * 900 + "]" * 900 + "}",
]


def outcomes(spark: "SparkSession", ddl: str, texts: list[bytes]) -> list[tuple[Any, Any]]:
    """What Arrow and Spark make of each."""
    schema = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)
    kind = to_arrow_type(schema)
    rows = spark.createDataFrame([(text,) for text in texts], "value binary")
    theirs = parsed(rows, schema).select("data").toArrow()["data"].combine_chunks()
    assert theirs.type == kind
    ours = [parsed_here(pa.array([text], pa.binary()), kind) for text in texts]
    assert {each.type for each in ours if each is not None} <= {kind}
    return [*zip(ours, ([each] for each in theirs.to_pylist()), strict=True)]


def equal(ours: object, theirs: object) -> bool:
    """With `NaN`, and with types: 1 is not True; Arrow reads `-0` as -0.0."""
    return repr(ours).replace("-0.0,", "0.0,").replace("-0.0}", "0.0}") == repr(theirs)


FORMS = {
    "struct<l: array<struct<x: {}>>>": '{"l": [{"x": %s}, {}, null]}',
    "{}": "%s",
    "array<{}>": "[%s, null]",
    "struct<x: {}>": '{"x": %s}',
}


KINDS = [(kind, ddl) for ddl in FORMS for kind in ("bigint", *OTHERS)]


@pytest.mark.parametrize(
    ("kind", "ddl"),
    [KINDS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in KINDS[1:])],
)
def test_arrow_gives_what_spark_gives(spark: "SparkSession", kind: str, ddl: str) -> None:
    values = [*NUMBERS.split(), *(f'"{text}"' for text in TEXTS)]
    texts = [('{"v":%s}' % (FORMS[ddl] % value)).encode() for value in values]
    texts += [whole.encode() for whole in WHOLE] + [b'{"v":"\xff"}', b'{"w":"\xc3"}']
    found = outcomes(spark, f"v {ddl.format(kind)}", texts)
    held = [(text, *each) for text, each in zip(texts, found, strict=True) if each[0] is not None]
    assert len(held) > 5
    for text, ours, theirs in held:
        assert equal(ours.to_pylist(), theirs), text


def test_types_of_spark_are_the_same_after_arrow(spark: "SparkSession") -> None:
    ddl = "a timestamp, b timestamp_ntz, c array<struct<x: timestamp_ntz, y: timestamp>>"
    schema = StructType.fromDDL(f"{ddl}, d map<string, date>, e decimal(5, 2), f binary")
    assert from_arrow_type(to_arrow_type(schema)) == schema


@pytest.mark.slow
def test_a_schema_is_proposed(spark: "SparkSession") -> None:
    payloads = [
        b'{"n": 1, "at": "2026-11-20T10:00:00Z", "a b": [{"x": 1.5}], "day": "2026-11-20"}',
        b'{"n": "x", "at": "2026-11-20T10:00:00.123+01:00", "none": null}',
        *(b"text", b"[1]", b'{"\xff": 1}', b'{"n": 1'),
    ]
    ddl = "`a b` ARRAY<STRUCT<x: DOUBLE>>,at TIMESTAMP,day STRING,n STRING,none STRING"
    assert proposed(spark, payloads) == (StructType.fromDDL(ddl), 2)
    assert proposed(spark, [b"text"]) == (StructType(), 0)


def test_no_schema_without_messages(
    mqks_broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect(mqks_broker.url) as client:
        client.subscribe("visits", ["visit"])
    assert main(["pipeline", "schema", "visits", "--url", mqks_broker.url]) == 78
    assert "visits has no JSON objects to tell a schema from" in capsys.readouterr().err
    assert main(["pipeline", "schema", "other", "--url", mqks_broker.url]) == 65
