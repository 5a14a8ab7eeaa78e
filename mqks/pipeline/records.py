"""Payloads of Avro and Protobuf as the column `data`, by a schema in a file.

With a schema registry a payload begins with a byte 0 and four bytes of the id of its writer's
schema; of Protobuf, the place of the message in its file follows
(https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop).

The one rule: a payload that is not read to its last byte gives no data, but a reason.
"""

import base64
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pyarrow as pa

from mqks.errors import reason
from mqks.pipeline.errors import BadOption, ExtraMissing, LakeUnfit, StoreAway
from mqks.pipeline.job import text
from mqks.pipeline.lake import names_of
from mqks.pipeline.payloads import BAD

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SCHEMAS_MAX, SCHEMA_BYTES_MAX, TIMEOUT_S = 1000, 4_194_304, 10.0
"""Of a registry: what a worker keeps, an answer, and a request."""
OTHER = "another type"

Convert = Callable[[Any], Any]
Kind = tuple[pa.DataType, Convert | None]
"""A type, and how Arrow is given a value of it, unless as the library does."""
_UTC = pa.timestamp("us", tz="UTC")


class Misfit(ValueError):
    """A payload that is a bad row; its text is the reason."""


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """A schema of Avro or Protobuf, as tasks need it; pickles."""

    source: bytes
    """JSON, or a FileDescriptorSet."""
    message: str
    """The full name of a message of Protobuf; empty for Avro."""
    registry: str | None = field(default=None, repr=False)
    """The URL of the registry that knows what payloads begin with, if they do."""

    @property
    def kind(self) -> pa.DataType:
        """The type of `data`. Raises BadOption for what no column can hold."""
        return self._opened()[0][0]

    def decoded(self, payloads: Any, kind: pa.DataType) -> tuple[Any, Any]:
        """Binary payloads as an array of this type, which is that of the schema or wider, and an
        array of `BAD` for those that do not fit. Raises StoreAway if the registry is away."""
        (_, convert), read = self._opened()
        rows: list[Any] = []
        why: list[Any] = []
        unknown: dict[bytes, str] = {}
        for payload in payloads.to_pylist():
            row = told = None
            try:
                if self.registry and payload[:5] in unknown:
                    raise Misfit(unknown[payload[:5]])
                row = read(payload, self.registry)
                row = convert(row) if convert else row
            except (StoreAway, LakeUnfit):
                raise
            except Misfit as error:
                row, told = None, {"reason": str(error)}
                if str(error) == "unknown schema id":
                    unknown[payload[:5]] = str(error)
            except Exception:  # Of bytes that are something else the libraries raise anything.
                row, told = None, {"reason": OTHER}
            rows.append(row)
            why.append(told)
        try:
            data = pa.array(rows, kind)
        except (ValueError, TypeError, ArithmeticError):
            for at, row in enumerate(rows):
                try:
                    pa.array([row], kind)
                except (ValueError, TypeError, ArithmeticError):
                    rows[at], why[at] = None, {"reason": OTHER}
            data = pa.array(rows, kind)
        return data, pa.array(why, BAD)

    def _opened(self) -> tuple[Kind, Callable[[bytes, str | None], Any]]:
        return _protobuf(self.source, self.message) if self.message else _avro(self.source)


def fields_of(schema: "StructType | RecordSchema") -> set[str]:
    """Of payloads, by dots, also of those in arrays."""
    from mqks.pipeline.older import to_arrow_type

    if isinstance(schema, RecordSchema):
        return {*names_of(schema.kind)}
    return {*names_of(to_arrow_type(schema))}


def records_of(told: str, registry: str | None = None) -> RecordSchema | None:
    """The schema that `orders.avsc` or `orders.desc:shop.Order` names; None for another text.

    Raises BadOption for a file that cannot be used, and ExtraMissing.
    """
    found = re.fullmatch(r"(.+\.(?:(avsc)|(proto)|desc|binpb|pb))(?::([\w.]+))?", told)
    if not found or re.search(r"[\s{]", told):
        return None
    name, is_avro, is_source, message = found.groups()
    if is_source:
        raise BadOption(
            f"{name} must be compiled: protoc --include_imports --descriptor_set_out=FILE.desc"
        )
    if is_avro and message:
        raise BadOption(f"{name} is a schema of Avro, which has no message {message}")
    if registry and not re.match(r"https?://[^/]", registry):
        raise BadOption("--registry is an URL such as http://registry:8081")
    try:
        source = Path(name).read_bytes()
    except OSError as error:
        raise BadOption(f"the schema cannot be read: {reason(error)}") from None
    schema = RecordSchema(source, "" if is_avro else message or "?", registry)
    try:
        _ = schema.kind  # Before Spark starts.
    except ImportError:
        extra = "avro" if is_avro else "protobuf"
        raise ExtraMissing(f"{name} needs another package: pip install 'mqks[{extra}]'") from None
    except BadOption as error:
        raise BadOption(f"{name}: {error}") from None
    return schema


# Avro


@lru_cache(maxsize=100)
def _avro(source: bytes) -> tuple[Kind, Callable[[bytes, str | None], Any]]:
    import fastavro

    try:
        told = json.loads(source)
        names: dict[str, Any] = {}
        parsed = fastavro.parse_schema(told, named_schemas=names)
        schema = fastavro.parse_schema(_bare(told))
    except Exception as error:  # Of its own, of JSON, and KeyError.
        raise BadOption(f"is no schema of Avro: {text(error)}") from None
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise BadOption("is not the schema of a record")

    def read(payload: bytes, registry: str | None) -> Any:
        file, writer = io.BytesIO(payload), schema
        if registry:
            number = _number(payload)
            file.seek(5)
            writer = _written_by(registry, number)
        try:
            row = fastavro.schemaless_reader(file, writer, schema)
        except fastavro.read.SchemaResolutionError:
            raise Misfit("another schema") from None
        if file.tell() != len(payload):
            raise Misfit(OTHER)
        return row

    return _avro_kind(parsed, names, ()), read


def _bare(schema: Any) -> Any:
    """Without logical types: values are made of what is written, also where the writer names it
    otherwise."""
    if isinstance(schema, dict):
        return {name: _bare(value) for name, value in schema.items() if name != "logicalType"}
    return [*map(_bare, schema)] if isinstance(schema, list) else schema


_PRIMITIVES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
}


def _avro_kind(schema: Any, names: dict[str, Any], within: tuple[str, ...]) -> Kind:
    if isinstance(schema, list):
        some = [each for each in schema if each != "null"]
        if len(some) != 1:
            raise BadOption("a union of several types has no column: only one, and null")
        return _avro_kind(some[0], names, within)
    if isinstance(schema, str):
        schema = names.get(schema, {"type": schema})
    match schema["type"], schema.get("logicalType"):
        case "record" | "error", _:
            within = _deeper(schema["name"], within)
            fields = [(f["name"], _avro_kind(f["type"], names, within)) for f in schema["fields"]]
            return _struct(fields, schema["name"])
        case "array", _:
            return _list(_avro_kind(schema["items"], names, within))
        case "map", _:
            return _map(pa.string(), _avro_kind(schema["values"], names, within))
        case "int", "date":
            return pa.date32(), None
        case "long", "timestamp-micros":
            return _UTC, None
        case "long", "timestamp-millis":
            return _UTC, lambda value: value * 1000
        case "bytes" | "fixed", "decimal":
            scale, digits = schema.get("scale", 0), schema["precision"]
            if not 0 <= scale <= digits <= 38:
                raise BadOption(f"a decimal of {digits} digits has no column: at most 38")
            return pa.decimal128(digits, scale), lambda value: _decimal(value, scale)
        case str() as plain, _ if plain in _PRIMITIVES:
            # fastavro leaves the default of a field as the text that JSON has for bytes.
            bytes_of = _bytes if plain in ("bytes", "fixed") else None
            return _PRIMITIVES[plain], bytes_of
        case (dict() | list()) as inner, _:
            return _avro_kind(inner, names, within)
    raise BadOption(f"the type {schema['type']} has no column")


def _bytes(value: Any) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else bytes(value)


_DIGITS = Context(prec=100)


def _decimal(value: Any, scale: int) -> Decimal:
    number = int.from_bytes(_bytes(value), "big", signed=True)
    return Decimal(number).scaleb(-scale, _DIGITS)


# Protobuf


@lru_cache(maxsize=100)
def _protobuf(source: bytes, name: str) -> tuple[Kind, Callable[[bytes, str | None], Any]]:
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    pool = descriptor_pool.DescriptorPool()
    try:
        files = FileDescriptorSet.FromString(source).file
        for file in files:
            pool.AddSerializedFile(file.SerializeToString())
    except Exception as error:  # DecodeError, TypeError: a file that it imports is not there.
        raise BadOption(
            f"is no descriptor set of protoc --include_imports: {text(error)}"
        ) from None
    try:
        descriptor = pool.FindMessageTypeByName(name)
    except KeyError:
        told = [f"{file.package}.{each.name}" for file in files for each in file.message_type]
        first = ", ".join(each.lstrip(".") for each in told[-5:])
        raise BadOption(f"name one of its messages, as in FILE:MESSAGE, such as {first}") from None
    made = message_factory.GetMessageClass(descriptor)

    def read(payload: bytes, registry: str | None) -> Any:
        at = 0
        if registry:
            number = _number(payload)
            path, at = _path(payload)
            if _message_at(registry, number, path) != name:
                raise Misfit("another message")
        return made.FromString(payload[at:])

    return _message_kind(descriptor, ()), read


def _message_kind(descriptor: Any, within: tuple[str, ...]) -> Kind:
    name = descriptor.full_name
    if name == "google.protobuf.Timestamp":
        return _UTC, lambda value: value.seconds * 1_000_000 + value.nanos // 1000
    within = _deeper(name, within)
    kinds = [(each, _field_kind(each, within)) for each in descriptor.fields]
    kind, _ = _struct([(each.name, found) for each, found in kinds], name)
    steps = [(each.name, each.has_presence, found[1]) for each, found in kinds]

    def row(message: Any) -> dict[str, Any]:
        return {
            name: None
            if has_presence and not message.HasField(name)
            else convert(getattr(message, name))
            if convert
            else getattr(message, name)
            for name, has_presence, convert in steps
        }

    return kind, row


def _field_kind(each: Any, within: tuple[str, ...]) -> Kind:
    if each.message_type and each.message_type.GetOptions().map_entry:
        key, value = each.message_type.fields
        return _map(_one_kind(key, within)[0], _one_kind(value, within))
    return _list(_one_kind(each, within)) if each.is_repeated else _one_kind(each, within)


def _one_kind(each: Any, within: tuple[str, ...]) -> Kind:
    if each.message_type:
        return _message_kind(each.message_type, within)
    if names := each.enum_type and each.enum_type.values_by_number:
        return pa.string(), lambda value: names[value].name if value in names else str(value)
    match each.cpp_type:
        case each.CPPTYPE_INT32:
            return pa.int32(), None
        case each.CPPTYPE_INT64 | each.CPPTYPE_UINT32:
            return pa.int64(), None
        case each.CPPTYPE_UINT64:
            return pa.decimal128(20, 0), Decimal
        case each.CPPTYPE_FLOAT:
            return pa.float32(), None
        case each.CPPTYPE_DOUBLE:
            return pa.float64(), None
        case each.CPPTYPE_BOOL:
            return pa.bool_(), None
    return (pa.binary() if each.type == each.TYPE_BYTES else pa.string()), None


# Both


def _deeper(name: str, within: tuple[str, ...]) -> tuple[str, ...]:
    if name in within:
        raise BadOption(f"{name} has itself within: no column can hold that")
    return *within, name


def _struct(fields: Sequence[tuple[str, Kind]], name: str) -> Kind:
    if not fields:
        raise BadOption(f"{name} has no fields: no column can hold that")
    steps = [(each, convert) for each, (_, convert) in fields if convert]

    def row(value: Any) -> Any:
        for each, convert in steps:
            if value[each] is not None:
                value[each] = convert(value[each])
        return value

    return pa.struct([(each, kind) for each, (kind, _) in fields]), row if steps else None


def _list(item: Kind) -> Kind:
    kind, convert = item

    def items(values: Any) -> list[Any]:
        return [convert(each) if convert and each is not None else each for each in values]

    return pa.list_(kind), items


def _map(key: pa.DataType, value: Kind) -> Kind:
    kind, convert = value

    def pairs(values: Any) -> list[tuple[Any, Any]]:
        return [
            (each, convert(values[each]) if convert and values[each] is not None else values[each])
            for each in values
        ]

    return pa.map_(key, kind), pairs


# The registry


def _number(payload: bytes) -> int:
    if len(payload) < 5 or payload[0]:
        raise Misfit("no schema id")
    return int.from_bytes(payload[1:5], "big")


def _path(payload: bytes) -> tuple[tuple[int, ...], int]:
    """Which message it is, within each that holds it, and where it begins: integers of Avro, of
    which the first is their number; 0 for the first message."""
    at = 5

    def integer() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte = payload[at]
            at, found, shift = at + 1, found | (byte & 127) << shift, shift + 7
            if byte < 128:
                return found >> 1 ^ -(found & 1)

    count = integer()
    if not 0 <= count <= 100:
        raise Misfit("another message")
    return tuple(integer() for _ in range(count)) or (0,), at


@lru_cache(maxsize=SCHEMAS_MAX)
def _written_by(registry: str, number: int) -> Any:
    import fastavro

    names: dict[str, Any] = {}
    return fastavro.parse_schema(_known(_schema(registry, number, "AVRO"), registry, names), names)


def _known(answer: dict[str, Any], registry: str, names: dict[str, Any]) -> Any:
    """A schema of Avro; those that it refers to are added to the names."""
    import fastavro

    for each in answer.get("references", ()):
        subject = quote(each["subject"], safe="")
        other = _fetched(registry, f"subjects/{subject}/versions/{each['version']}")
        schema = _known(other, registry, names)
        if each["name"] not in names:
            fastavro.parse_schema(schema, names)
    return _bare(json.loads(answer["schema"]))


@lru_cache(maxsize=SCHEMAS_MAX)
def _message_at(registry: str, number: int, path: tuple[int, ...]) -> str:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    answer = _schema(registry, number, "PROTOBUF", "?format=serialized")
    file = FileDescriptorProto.FromString(base64.b64decode(answer["schema"], validate=True))
    names, messages = [file.package] if file.package else [], file.message_type
    for at in path:
        names.append(messages[at].name)
        messages = messages[at].nested_type
    return ".".join(names)


def _schema(registry: str, number: int, kind: str, form: str = "") -> dict[str, Any]:
    answer = _fetched(registry, f"schemas/ids/{number}{form}")
    if answer.get("schemaType", "AVRO") != kind:
        raise Misfit("another schema")
    return answer


def _fetched(registry: str, path: str) -> dict[str, Any]:
    """Raises Misfit for what the registry does not know, LakeUnfit if it refuses, StoreAway."""
    scheme, _, rest = registry.rstrip("/").partition("://")
    login, _, host = rest.rpartition("@")
    request = urllib.request.Request(f"{scheme}://{host}/{path}")
    if login:
        secret = base64.b64encode(unquote(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            told = json.loads(answer.read(SCHEMA_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(1000)
        if error.code == 404 and b"40403" in body:  # The registry's own: no such schema.
            raise Misfit("unknown schema id") from None
        if error.code in (408, 429) or error.code >= 500:
            raise StoreAway(f"the registry {host} does not answer: {error}") from None
        raise LakeUnfit(f"the registry {host} refuses this: {error}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise StoreAway(f"the registry {host} does not answer: {text(error)}") from None
    if not isinstance(told, dict):
        raise StoreAway(f"the registry {host} does not answer as a registry")
    return told
