"""JSON payloads as the column `data`.

What fits in the usual form is parsed by Arrow where it is read. The rest is parsed by Spark's
expressions, which know every type and form, for ten times the cost.

The one rule: what Arrow gives is what Spark would give; if that is not sure, it gives nothing.
"""

import secrets
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

_UNPARSED, _MARK = "_mqks_unparsed", f"_{secrets.token_hex(5)}"
# What is behind a value would pass unseen. So each payload is the first of two values in an array,
# and the second one, whose name no payload can know, shows that it was one.
_HEAD, _TAIL = f'{{"{_MARK}":[', f',{{"{_MARK}":true}}]}}'
_PLAIN = {pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float64(), pa.string()}
"""Spark and Arrow read these from the same tokens."""
_DATE = r"[12]\d{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
_TIME = r"T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:0\d|1[0-7]):[0-5]\d)"
_FORMS = {pa.date32(): f"^{_DATE}$", pa.timestamp("us", tz="UTC"): f"^{_DATE}{_TIME}$"}
"""Of the texts of such types that both read as the same."""

BAD = pa.struct([("reason", pa.string()), ("field", pa.string()), ("data", pa.string())])
"""Why a payload does not fit, the first field of the schema that it is, if it is one, and the
others as JSON, which later schemas cannot contradict."""


def read_as(kind: pa.DataType) -> pa.DataType | None:
    """The type as which Arrow reads JSON of a type; None if it cannot."""
    if kind in _PLAIN:
        return kind
    if kind in _FORMS:
        return pa.string()
    if pa.types.is_list(kind):
        item = read_as(kind.value_type)
        return None if item is None else pa.list_(kind.value_field.with_type(item))
    if pa.types.is_struct(kind) and kind.num_fields:
        types = [read_as(field.type) for field in kind]
        if None not in types:
            return pa.struct(
                [field.with_type(each) for field, each in zip(kind, types, strict=True)]
            )
    return None


def parsed_here(payloads: Any, kind: pa.DataType) -> Any:
    """Binary payloads as an array of this type; None if not all of them are sure to fit.

    1 us for a payload of 100 bytes.
    """
    fields = read_as(kind)
    if fields is None:
        return None
    try:
        text = payloads.cast(pa.string())  # It must be UTF-8.
        lines = pc.binary_join_element_wise(_HEAD, text, _TAIL, "\n", "")
        _, edges, content = lines.buffers()
        told = memoryview(content)[: np.frombuffer(edges, np.int32)[len(lines)]].tobytes()
        # Only Arrow takes these for numbers. To look for words took a sixth of the time; most
        # payloads lack already the letters, which are found at once.
        if (b"N" in told and b"NaN" in told) or (b"I" in told and b"Inf" in told):
            return None
        both = pa.list_(pa.struct([*fields, pa.field(_MARK, pa.bool_())]))
        rows = pj.read_json(
            pa.BufferReader(told),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(told)),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(_MARK, both)]), newlines_in_values=True
            ),
        )
        pairs = rows[_MARK].combine_chunks()
        if len(pairs) == len(payloads) and (np.diff(pairs.offsets) == 2).all():
            values, every = pairs.values, np.arange(0, 2 * len(pairs), 2)
            if not values.field(_MARK).take(every + 1).null_count:
                return _made(values.take(every), kind)
        return None
    except pa.ArrowInvalid:
        return None


def _made(column: Any, kind: pa.DataType) -> Any:
    """What Arrow has parsed, as its own type. Raises ArrowInvalid."""
    mask = column.is_null()
    if pa.types.is_struct(kind):
        fields = [_made(column.field(field.name), field.type) for field in kind]
        return pa.StructArray.from_arrays(fields, fields=[*kind], mask=mask)
    if pa.types.is_list(kind):
        items = _made(column.values, kind.value_type)
        return pa.ListArray.from_arrays(column.offsets, items, kind, mask=mask)
    if kind in _FORMS and pc.any(pc.invert(pc.match_substring_regex(column, _FORMS[kind]))).as_py():
        raise pa.ArrowInvalid("another form")
    return column.cast(kind)


def parsed(messages: "DataFrame", schema: "StructType") -> "DataFrame":
    """Add `data`, the payload parsed by this schema, or null if it is no JSON or does not fit; and
    `bad`, for these alone, as `BAD`."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, BooleanType, StringType, StructType

    value = StructType([*schema.fields]).add(_MARK, BooleanType())
    told = StructType().add(_MARK, ArrayType(value)).add(_UNPARSED, StringType())
    text = F.col("value").cast("string")
    both = F.concat(F.lit(_HEAD), text, F.lit(_TAIL))
    options = {
        "columnNameOfCorruptRecord": _UNPARSED,
        "allowSingleQuotes": "false",
        "allowNonNumericNumbers": "false",
    }
    whole = messages.withColumn("data", F.from_json(both, told, options))
    found = F.col("data")[_MARK]
    data = F.get(found, F.lit(0))
    payload = data.dropFields(_MARK)
    is_text = F.is_valid_utf8(text)
    is_one = F.get(found, F.lit(1))[_MARK] & (F.size(found) == 2) & data.isNotNull() & is_text
    has_types, is_unique = F.col("data")[_UNPARSED].isNull(), _is_unique(schema, data)
    fits = F.coalesce(is_one & has_types & is_unique, F.lit(False))
    fields = (F.when(_is_bad(text, field, options), F.lit(field.name)) for field in schema)
    reason = (
        F.when(~is_text, "not UTF-8")
        .when(F.coalesce(~is_one, F.lit(True)), "not one JSON object")
        .when(~has_types, "another type")
        .otherwise("a key twice")
    )
    field = F.when(is_one, F.coalesce(*fields))
    bad = F.struct(
        reason.alias("reason"),
        field.alias("field"),
        F.when(is_one, F.to_json(payload)).alias("data"),
    )
    return whole.withColumns({"data": F.when(fits, payload), "bad": F.when(~fits, bad)})


def proposed(spark: "SparkSession", payloads: list[bytes]) -> tuple["StructType", int]:
    """A schema for these payloads, and how many of them fit it. Times with a zone are timestamps;
    a field with several types is a string."""
    rows = spark.createDataFrame([(payload,) for payload in payloads], "value binary")
    texts = rows.selectExpr("cast(value as string)").where("is_valid_utf8(value)")
    options = {
        "mode": "DROPMALFORMED",
        "inferTimestamp": "true",
        "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]XXX",
    }
    schema = spark.read.options(**options).json(texts.rdd.map(itemgetter(0))).schema
    fits = parsed(rows, schema).where("data is not null").count() if schema.fields else 0
    return schema, fits


def _is_bad(text: "Column", field: "StructField", options: dict[str, str]) -> "Column":
    """Whether this field alone makes a payload one that does not fit."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructType

    alone = F.from_json(text, StructType([field]).add(_UNPARSED, StringType()), options)
    return alone[_UNPARSED].isNotNull() | ~_is_unique(field.dataType, alone[field.name])


def _is_unique(kind: "DataType", value: "Column") -> "Column":
    """Whether no map in a value of this type has a key twice."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    is_unique = F.lit(True)
    if isinstance(kind, StructType):
        for field in kind:
            if "map<" in field.dataType.simpleString():
                is_unique &= _is_unique(field.dataType, value[field.name])
    elif isinstance(kind, ArrayType):
        is_unique = F.forall(value, partial(_is_unique, kind.elementType))
    elif isinstance(kind, MapType):
        is_unique = F.size(F.array_distinct(F.map_keys(value))) == F.size(value)
        if "map<" in kind.valueType.simpleString():
            is_unique &= F.forall(F.map_values(value), partial(_is_unique, kind.valueType))
    return F.coalesce(is_unique, F.lit(True))
