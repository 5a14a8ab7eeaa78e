"""PySpark 4.0 to 4.3 by the names of the newest: what an older one lacks is made up for here.

The one rule: nothing else asks which PySpark it is.
"""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from pyspark.sql.datasource import DataSourceStreamWriter
from pyspark.sql.pandas import types

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # Before 4.1 the sink of a stream gets rows.
    DataSourceStreamArrowWriter = DataSourceStreamWriter  # type: ignore[misc,assignment]

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Before 4.2 a batch of a stream has all that is new.
    ReadAllAvailable = ReadLimit = SupportsTriggerAvailableNow = object  # type: ignore[misc,assignment]
    ReadMaxRows = namedtuple("ReadMaxRows", "max_rows")  # type: ignore[no-redef]

TAKES_ARROW = DataSourceStreamArrowWriter is not DataSourceStreamWriter
HAS_LIMITS = ReadLimit is not object
# Before 4.2 timestamps are in UTC, and of one without a zone came one with it.
_UTC: Any = {"timezone": "UTC"} if "timezone" in signature(types.to_arrow_type).parameters else {}
to_arrow_type: Callable[..., Any] = partial(types.to_arrow_type, **_UTC)
to_arrow_schema: Callable[..., Any] = partial(types.to_arrow_schema, **_UTC)
from_arrow_type: Callable[..., Any] = partial(types.from_arrow_type, prefer_timestamp_ntz=True)
