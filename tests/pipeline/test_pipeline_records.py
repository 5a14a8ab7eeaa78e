"""Payloads of Avro and Protobuf, with and without a schema registry, in each kind of lake.

The one rule: bytes are made by the libraries of the two, and the registry answers over HTTP.
"""

import base64
import io
import json
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from mqks.client.blocking import connect
from mqks.commands import main
from mqks.pipeline import records
from mqks.pipeline.errors import BadOption, LakeUnfit, StoreAway
from mqks.pipeline.places import lake_at
from mqks.pipeline.records import RecordSchema, records_of
from mqks.testing import Broker
from tests.pipeline.conftest import Clicks, Quiet, answering, subscribe
from tests.pipeline.test_pipeline_bad_rows import KINDS, places, rows

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
STATE = {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}
OLD: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "state", "type": STATE},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
LINE = {
    "type": "record",
    "name": "Line",
    "fields": [
        {"name": "when", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        {"name": "state", "type": "State"},
    ],
}
ORDER: dict[str, Any] = OLD | {
    "fields": [
        {"name": "id", "type": "long"},
        *OLD["fields"][1:],
        {"name": "note", "type": ["null", "string"], "default": None},
        {
            "name": "total",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
            "default": "\u00ff",
        },
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None},
        {"name": "counts", "type": {"type": "map", "values": "int"}, "default": {}},
        {"name": "lines", "type": {"type": "array", "items": LINE}, "default": []},
        {"name": "code", "type": {"type": "fixed", "name": "Code", "size": 2}, "default": "ab"},
        {"name": "trace", "type": {"type": "string", "logicalType": "uuid"}, "default": ""},
    ]
}
TRACE = "70ebddd1-bdd3-41bd-acfb-991c0a858d00"
NEW_ROW = {
    "id": 2**40,
    "state": "PAID",
    "at": NOON,
    "note": "ü",
    "total": Decimal("-12.50"),
    "day": date(2026, 11, 20),
    "counts": {"x": 1},
    "lines": [{"when": None, "state": "NEW"}, {"when": NOON, "state": "PAID"}],
    "code": b"\x00\xff",
    "trace": TRACE,
}
OLD_ROW = {"id": 7, "state": "NEW", "at": NOON}
DEFAULTS: dict[str, Any] = {
    "note": None,
    "total": Decimal("-0.01"),
    "day": None,
    "counts": [],
    "lines": [],
}
AVRO = [NEW_ROW | {"counts": [("x", 1)]}, OLD_ROW | DEFAULTS | {"code": b"ab", "trace": ""}]


def avro(schema: dict[str, Any], row: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema), row)
    return file.getvalue()


def shop() -> descriptor_pb2.FileDescriptorSet:
    """As `protoc --include_imports` makes it of shop.proto."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    state = file.enum_type.add(name="State")
    for number, name in enumerate(["NEW", "PAID"]):
        state.value.add(name=name, number=number)
    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    file.message_type.add(name="Refund").field.add(name="id", number=1, type=3, label=one)
    order = file.message_type.add(name="Order")
    line = order.nested_type.add(name="Line")
    line.field.add(name="n", number=1, type=field.TYPE_UINT64, label=one)
    entry = order.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=field.TYPE_UINT32, label=one)
    fields: list[tuple[str, Any, Any, str]] = [
        ("id", field.TYPE_INT64, one, ""),
        ("state", field.TYPE_ENUM, one, ".shop.State"),
        ("at", field.TYPE_MESSAGE, one, ".google.protobuf.Timestamp"),
        ("lines", field.TYPE_MESSAGE, many, ".shop.Order.Line"),
        ("counts", field.TYPE_MESSAGE, many, ".shop.Order.CountsEntry"),
        ("raw", field.TYPE_BYTES, one, ""),
        ("rate", field.TYPE_DOUBLE, one, ""),
    ]
    for number, (name, kind, label, type_name) in enumerate(fields, 1):
        order.field.add(
            name=name, number=number, type=kind, label=label, type_name=type_name or None
        )
    node = file.message_type.add(name="Node")
    node.field.add(name="next", number=1, type=11, label=one, type_name=".shop.Node")
    timestamp = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(timestamp)
    return descriptor_pb2.FileDescriptorSet(file=[timestamp, file])


def order(**told: Any) -> bytes:
    pool = descriptor_pool.DescriptorPool()
    for file in shop().file:
        pool.AddSerializedFile(file.SerializeToString())
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    content: bytes = made(**told).SerializeToString()
    return content


FULL = {"id": 5, "state": 1, "lines": [{"n": 2**64 - 1}], "counts": {"x": 2**32 - 1}, "rate": 0.5}
PROTOBUF = [
    {
        "id": 5,
        "state": "PAID",
        "at": NOON,
        "lines": [{"n": Decimal(2**64 - 1)}],
        "counts": [("x", 2**32 - 1)],
        "raw": b"\xff",
        "rate": 0.5,
    },
    {"id": 0, "state": "9", "at": None, "lines": [], "counts": [], "raw": b"", "rate": 0.0},
]
ORDERS = [order(at=NOON, raw=b"\xff", **FULL), order(state=9)]


class Registry(ThreadingHTTPServer):
    """The routes of a schema registry for readers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RegistryAnswer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.failures = 0
        self.login: str | None = None


class RegistryAnswer(Quiet):
    server: Registry

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        status, answer = 200, self.server.answers.get(self.path)
        if self.server.login != self.headers["Authorization"]:
            status, answer = 401, {"error_code": 40101}
        elif self.server.failures:
            self.server.failures -= 1
            status, answer = 503, {"error_code": 50301}
        elif answer is None:
            status, answer = 404, {"error_code": 40403, "message": "Schema not found"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as made, answering(made):
        made.answers["/schemas/ids/1"] = {"schema": json.dumps(OLD)}
        made.answers["/schemas/ids/2"] = {"schema": json.dumps(ORDER)}
        serialized = base64.b64encode(shop().file[1].SerializeToString()).decode()
        made.answers["/schemas/ids/3?format=serialized"] = {
            "schema": serialized,
            "schemaType": "PROTOBUF",
        }
        yield made


def framed(number: int, payload: bytes, path: bytes = b"") -> bytes:
    return struct.pack(">bI", 0, number) + path + payload


def avro_file(tmp_path: Path, schema: object = ORDER) -> str:
    path = tmp_path / "orders.avsc"
    path.write_text(json.dumps(schema))
    return str(path)


def descriptors(tmp_path: Path, message: str = "shop.Order") -> str:
    path = tmp_path / "shop.desc"
    path.write_bytes(shop().SerializeToString())
    return f"{path}:{message}"


def decoded(schema: RecordSchema, payloads: list[bytes]) -> list[Any]:
    """The rows, or the reasons."""
    data, why = schema.decoded(pa.array(payloads, pa.binary()), schema.kind)
    pairs = zip(data.to_pylist(), why.to_pylist(), strict=True)
    return [each["reason"] if each else row for row, each in pairs]


def opened(told: str, registry: str | None = None) -> RecordSchema:
    schema = records_of(told, registry)
    assert schema is not None
    return schema


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["avro", "protobuf"])
def test_into_a_lake(
    clicks: Clicks, registry: Registry, tmp_path: Path, kind: str, of: str
) -> None:
    lake, other, format = places(tmp_path, kind)
    if of == "avro":
        schema, expected = opened(avro_file(tmp_path), registry.url), AVRO
        good = [framed(2, avro(ORDER, NEW_ROW)), framed(1, avro(OLD, OLD_ROW))]
        bad = {good[0] + b"x": "another type", framed(3, b""): "unknown schema id"}
    else:
        schema, expected = opened(descriptors(tmp_path), registry.url), PROTOBUF
        good = [framed(3, each, b"\x02\x02") for each in ORDERS]
        bad = {framed(3, ORDERS[0], b"\x00"): "another message", b"\x00": "no schema id"}
    with clicks.client() as client:
        for payload in [good[0], *bad, good[1]]:
            client.publish("rare", payload)
    registry.failures = 2  # The archive waits until it is back.
    with lake_at(lake, format) as made, lake_at(other, format) as apart:
        progress = clicks.archive_into(made, apart, schema=schema)
    assert [(each.messages, each.unparsed) for each in progress] == [(4, 2)]
    found = rows(lake, format)
    assert [row["value"] for row in found] == good
    assert [row["data"] for row in found] == expected
    told = {row["value"]: row["data"] for row in rows(other, format)}
    assert told == {
        payload: {"reason": why, "field": None, "data": None} for payload, why in bad.items()
    }


@pytest.mark.usefixtures("jobs_here")
def test_without_a_place_bad_rows_have_no_data(
    mqks_broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subscribe(mqks_broker)
    payloads = [avro(ORDER, NEW_ROW), b"text", b""]
    with connect(mqks_broker.url) as client:
        for payload in payloads:
            client.publish("rare", payload)
    lake = tmp_path / "lake"
    told = ["pipeline", "archive", "clicks", str(lake), "--once", "--url", mqks_broker.url]
    assert main([*told, "--schema", avro_file(tmp_path)]) == 0
    assert "2 unparsed" in capsys.readouterr().err
    found = rows(lake, None)
    assert [row["value"] for row in found] == payloads
    assert [row["data"] for row in found] == [AVRO[0], None, None]


def test_what_is_not_wholly_read_is_bad(tmp_path: Path) -> None:
    schema, whole = opened(avro_file(tmp_path)), avro(ORDER, NEW_ROW)
    pieces = [whole[:at] for at in range(len(whole))]
    assert decoded(schema, [*pieces, whole, whole + b"\0"]) == [
        *["another type"] * len(pieces),
        AVRO[0],
        "another type",
    ]
    # An int that has more bits, a time beyond all years, digits beyond those of the decimal.
    small = avro(OLD, OLD_ROW)
    wide = avro(OLD | {"fields": [{"name": "id", "type": "long"}, *OLD["fields"][1:]]}, NEW_ROW)
    assert decoded(opened(avro_file(tmp_path, OLD)), [wide, small]) == ["another type", OLD_ROW]
    big = avro(ORDER, NEW_ROW).replace(b"\x04\xfb\x1e", b"\x10" + b"\x7f" * 8)
    assert decoded(schema, [big, whole]) == ["another type", AVRO[0]]
    of_protobuf = opened(descriptors(tmp_path))
    assert decoded(of_protobuf, [*ORDERS, b"\xff", ORDERS[0][:-1]]) == [
        *PROTOBUF,
        "another type",
        "another type",
    ]


def test_the_registry_is_asked_once(registry: Registry, tmp_path: Path) -> None:
    money = {"type": "record", "name": "shop.Money", "fields": [{"name": "n", "type": "int"}]}
    price = {"name": "price", "type": "shop.Money"}
    registry.answers["/subjects/a%2Fb/versions/4"] = {"schema": json.dumps(money)}
    registry.answers["/schemas/ids/8"] = {
        "schema": json.dumps(OLD | {"fields": [price, *OLD["fields"]]}),
        "references": [{"name": "shop.Money", "subject": "a/b", "version": 4}],
    }
    registry.answers["/schemas/ids/9"] = {"schema": json.dumps(money)}
    schema = opened(avro_file(tmp_path), registry.url)
    small = avro(OLD, OLD_ROW)
    payloads = [framed(8, b"\x06" + small), framed(1, small), framed(9, b"\x06"), framed(5, b"")]
    expected = [AVRO[1], AVRO[1], "another schema", "unknown schema id"]
    assert decoded(schema, payloads * 50) == expected * 50
    assert sorted(registry.asked) == [
        *(f"/schemas/ids/{number}" for number in (1, 5, 8, 9)),
        "/subjects/a%2Fb/versions/4",
    ]
    assert records._written_by.cache_info().maxsize == records.SCHEMAS_MAX


def test_a_registry_that_refuses_or_is_away(registry: Registry, tmp_path: Path) -> None:
    file, payload = avro_file(tmp_path), framed(1, avro(OLD, OLD_ROW))
    registry.login = "Basic " + base64.b64encode(b"ann:a@b").decode()
    with pytest.raises(
        LakeUnfit, match=r"the registry 127\.0\.0\.1:\d+ refuses this: HTTP Error 401"
    ):
        decoded(opened(file, registry.url), [payload])
    login = registry.url.replace("//", "//ann:a%40b@")
    assert decoded(opened(file, login), [payload]) == [AVRO[1]]
    assert "a%40b" not in repr(opened(file, login))
    registry.failures = 1
    with pytest.raises(StoreAway, match="does not answer: HTTP Error 503"):
        decoded(opened(file, login), [framed(2, b"")])
    with pytest.raises(StoreAway, match="Connection refused"):
        decoded(opened(file, "http://127.0.0.1:1"), [payload])


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"name": "next", "type": ["null", "shop.Order"]}, "shop.Order has itself within"),
        ({"name": "a", "type": ["int", "string"]}, "a union of several types has no column"),
        ({"name": "a", "type": "null"}, "the type null has no column"),
        ({"name": "a", "type": "shop.None"}, "is no schema of Avro: "),
        ({"name": "a", "type": {"type": "record", "name": "E", "fields": []}}, "has no fields"),
    ],
)
def test_what_no_column_can_hold(tmp_path: Path, schema: dict[str, Any], told: str) -> None:
    with pytest.raises(BadOption, match=told):
        records_of(avro_file(tmp_path, OLD | {"fields": [schema]}))


def test_what_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for schema, told in {
        descriptors(tmp_path, "shop.Node"): "shop.Node has itself within",
        descriptors(tmp_path, "shop.Nothing"): "such as google.protobuf.Timestamp, shop.Refund",
        descriptors(tmp_path)[: -len(":shop.Order")]: "name one of its messages",
        "shop.proto": "must be compiled: protoc --include_imports",
        str(tmp_path / "none.avsc"): "cannot be read: ",
        f"{avro_file(tmp_path)}:shop.Order": "has no message",
    }.items():
        with pytest.raises(BadOption, match=told):
            records_of(schema)
    alone = descriptor_pb2.FileDescriptorSet(file=shop().file[1:])
    (tmp_path / "alone.pb").write_bytes(alone.SerializeToString())
    with pytest.raises(BadOption, match="is no descriptor set of protoc --include_imports"):
        records_of(f"{tmp_path}/alone.pb:shop.Order")
    with pytest.raises(BadOption, match="--registry is an URL"):
        records_of(avro_file(tmp_path), "file:///etc")
    command = ["pipeline", "archive", "clicks", str(tmp_path / "lake"), "--schema", "n int"]
    assert main([*command, "--registry", "http://127.0.0.1:1"]) == 78
    assert "--registry needs --schema FILE.avsc" in capsys.readouterr().err
