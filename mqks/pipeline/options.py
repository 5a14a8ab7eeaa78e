"""The options of `format("mqks")`: parsed and checked, with hints for typing errors.

The one rule: an option without effect is refused, and no error contains a credential.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from mqks.client import requests, urls
from mqks.client.errors import InvalidRequest
from mqks.errors import ConfigurationError
from mqks.limits import READ_ROWS_MAX
from mqks.pipeline.errors import BadOption
from mqks.pipeline.reader import FETCH_ROWS, is_mask, pattern
from mqks.pipeline.wire import ServerAddress

OFFSETS_PER_TRIGGER = 200_000
TRIGGER_DELAY_S = 900.0
EARLIEST, LATEST, ERROR = "earliest", "latest", "error"
_STRATEGY = "startingOffsetsByTimestampStrategy"
_MS_MAX = 2**53

_SERVER = (
    *("url", "host", "port", "token", "user", "password", "tls", "ca"),
    *("connectTimeoutMs", "numRetries"),
)
READ_OPTIONS = (
    *_SERVER,
    *("queue", "queues", "startingOffsets", "endingOffsets", "startingTimestamp"),
    *("endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp", _STRATEGY),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("minPartitions", "fetchSize", "failOnDataLoss", "includeHeaders"),
)
WRITE_OPTIONS = (*_SERVER, "topic")
_SPARKS_OWN = ("checkpointLocation", "queryName")
"""Options for Spark itself that Spark also passes to a sink."""

Offset = str | int
"""`earliest`, `latest` or a number."""


@dataclass(frozen=True, slots=True)
class ReadPlace:
    """A start or an end."""

    offset: Offset = EARLIEST
    epoch: str = ""
    """The epoch of the number; empty if unknown."""
    time_us: int | None = None
    """Instead: at the first message that arrived at this time or later."""


Places = ReadPlace | dict[str, ReadPlace]
"""Of all queues, or of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    server: ServerAddress = field(repr=False)
    queues: tuple[str, ...]
    """Names and masks."""
    has_many: bool = False
    """Whether rows name their queue."""
    start: Places | None = None
    """None: `earliest` for a batch, `latest` for a stream, as with Kafka."""
    end: Places | None = None
    strategy: str = ""
    """Where to start if nothing arrived since the time given: `error`, `latest`, or empty to wait
    for it."""
    offsets_per_trigger: int = OFFSETS_PER_TRIGGER
    offsets_per_trigger_min: int = 0
    trigger_delay_s: float = TRIGGER_DELAY_S
    """The longest wait for so many."""
    partitions_min: int | None = None
    fetch_rows: int = FETCH_ROWS
    fail_on_data_loss: bool = True
    include_headers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    server: ServerAddress = field(repr=False)
    topic: str | None = None


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises BadOption."""
    given = _given(options, READ_OPTIONS)
    if ("queue" in given) == ("queues" in given):
        raise BadOption('one of the options queue and queues is needed: add .option("queue", NAME)')
    queues = (given["queue"],) if "queue" in given else tuple(given["queues"].split(","))
    for queue in queues:
        _name("queue", queue)
    strategy = given.get(_STRATEGY, "").lower()
    if _STRATEGY in given and strategy not in (ERROR, LATEST):
        raise BadOption(f"{_STRATEGY} is {strategy[:80]!r}, which is neither error nor latest")
    if strategy and not {"startingTimestamp", "startingOffsetsByTimestamp"} & given.keys():
        raise BadOption(f"{_STRATEGY} needs startingTimestamp or startingOffsetsByTimestamp")
    most = _number(given, "maxOffsetsPerTrigger", 1, 2**53)
    least = _number(given, "minOffsetsPerTrigger", 1, most or OFFSETS_PER_TRIGGER)
    if least is None and "maxTriggerDelay" in given:
        raise BadOption("maxTriggerDelay needs minOffsetsPerTrigger")
    fetch_rows = _number(given, "fetchSize", 1, READ_ROWS_MAX)
    return ReadOptions(
        server=_server(given),
        queues=queues,
        has_many=has_many(given),
        start=_bound(given, "starting", queues),
        end=_bound(given, "ending", queues),
        strategy=strategy,
        offsets_per_trigger=most or OFFSETS_PER_TRIGGER,
        offsets_per_trigger_min=least or 0,
        trigger_delay_s=_seconds(given, "maxTriggerDelay", TRIGGER_DELAY_S),
        partitions_min=_number(given, "minPartitions", 1, 100_000),
        fetch_rows=fetch_rows or FETCH_ROWS,
        fail_on_data_loss=_flag(given, "failOnDataLoss", True),
        include_headers=_flag(given, "includeHeaders", False),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises BadOption."""
    given = _given(options, WRITE_OPTIONS, _SPARKS_OWN)
    topic = given.get("topic")
    if topic is not None:
        _name("topic", topic)
    return WriteOptions(server=_server(given), topic=topic)


def has_many(options: Mapping[str, str]) -> bool:
    """Whether these are options for several queues."""
    return "queues" in options or is_mask(options.get("queue", ""))


def unknown(what: str, name: str, known: Iterable[str]) -> BadOption:
    """The error for an unknown option or column, with a hint at the nearest known name."""
    by_key = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_key, 1)
    hint = f"; did you mean {by_key[found[0]]}?" if found else ""
    return BadOption(f"mqks has no {what} {name[:80]}{hint}")


def _given(
    options: Mapping[str, str], known: tuple[str, ...], passed_over: tuple[str, ...] = ()
) -> dict[str, str]:
    """The options by their exact names; Spark ignores their case."""
    right = {name.lower(): name for name in (*known, *passed_over)}
    given = {}
    for name, value in options.items():
        if name.lower() not in right:
            raise unknown("option", name, known)
        given[right[name.lower()]] = value
    return given


def _server(given: Mapping[str, str]) -> ServerAddress:
    timeout_ms = _number(given, "connectTimeoutMs", 1, 3_600_000)
    retries = _number(given, "numRetries", 0, 1_000_000)
    server = ServerAddress(url=_url(given), ca=given.get("ca"))
    if timeout_ms is not None:
        server = replace(server, connect_timeout_s=timeout_ms / 1000)
    return server if retries is None else replace(server, retries=retries)


def _url(given: Mapping[str, str]) -> str:
    """One URL from the single options, or the default without any."""
    apart = [name for name in ("host", "port", "token", "user", "password", "tls") if name in given]
    if "url" in given or not apart:
        if apart:
            raise BadOption(f"the options url and {apart[0]} cannot be used together")
        url = given.get("url") or urls.default()
    else:
        credentials = ""
        if "token" in given:
            if "user" in given or "password" in given:
                raise BadOption("the option token cannot be used with user and password")
            credentials = quote(given["token"], safe="") + "@"
        elif ("user" in given) != ("password" in given):
            raise BadOption("the options user and password must be used together")
        elif "user" in given:
            credentials = ":".join(quote(given[name], safe="") for name in ("user", "password"))
            credentials += "@"
        port = _number(given, "port", 1, 65535) or urls.PORT
        host = given.get("host", "127.0.0.1")
        scheme = "mqkss" if _flag(given, "tls", "ca" in given) else "mqks"
        url = f"{scheme}://{credentials}{f'[{host}]' if ':' in host else host}:{port}"
    try:
        urls.parse(url)
    except ConfigurationError as error:
        raise BadOption(str(error)) from None
    return url


def _bound(given: Mapping[str, str], which: str, queues: tuple[str, ...]) -> Places | None:
    """A start or an end, of the option that has precedence, as with Kafka."""
    offsets = _places(given, f"{which}Offsets", queues)
    timed = _places(given, f"{which}OffsetsByTimestamp", queues, is_timed=True)
    time_ms = _number(given, f"{which}Timestamp", 0, _MS_MAX)
    return timed or offsets if time_ms is None else ReadPlace(time_us=time_ms * 1000)


def _places(
    given: Mapping[str, str], name: str, queues: tuple[str, ...], *, is_timed: bool = False
) -> Places | None:
    """From `earliest`, `latest`, a number, an offset as in the progress of a query, or one for each
    queue: also Kafka's {"queue": {"0": number}}, with -2 for earliest and -1 for latest."""
    text = given.get(name)
    if text is None:
        return None
    if text.lower() in (EARLIEST, LATEST) and not is_timed:
        return ReadPlace(text.lower())
    with suppress(ValueError, RecursionError):
        told = json.loads(text)
        if not is_timed and (place := _place(told, 0, is_timed)):
            return place
        match told:
            case {"queues": {**each}} if all(isinstance(value, dict) for value in each.values()):
                told = each
        if isinstance(told, dict):
            places = {queue: _place(value, -2, is_timed) for queue, value in told.items()}
            found = {queue: place for queue, place in places.items() if place is not None}
            if found and len(found) == len(told) and all(_reads(queues, queue) for queue in found):
                return found
    forms = f'{{"{queues[0]}": milliseconds}}'
    if not is_timed:
        forms = f'earliest, latest, a number, {{"{queues[0]}": number}} or a progress'
    raise BadOption(f"{name} is {text[:80]!r}, which is not {forms}")


def _place(value: Any, least: int, is_timed: bool) -> ReadPlace | None:
    if isinstance(value, dict) and [*value] == ["0"]:  # Kafka's partition.
        value = value["0"]
    match value:
        case bool():
            pass
        case int() if is_timed and 0 <= value <= _MS_MAX:
            return ReadPlace(time_us=value * 1000)
        case int() if not is_timed and value >= least:
            return ReadPlace({-2: EARLIEST, -1: LATEST}.get(value, value))
        case {"epoch": str() as epoch, "offset": int() as number} if not is_timed and number >= 0:
            return ReadPlace(number, epoch)
    return None


def _reads(masks: tuple[str, ...], queue: str) -> bool:
    return any(re.search(pattern(mask), queue) for mask in masks)


def _number(given: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise BadOption(f"{name} is {text[:80]!r}, which is not a number from {least} to {most}")
    return int(text)


def _seconds(given: Mapping[str, str], name: str, otherwise: float) -> float:
    """Of a time as Spark writes it: 15m, 30s, 500ms; milliseconds without a unit."""
    text = given.get(name)
    if text is None:
        return otherwise
    if not (found := re.fullmatch(r"([0-9]{1,12})(ms|s|m|min|h|d|)", text)):
        raise BadOption(f"{name} is {text[:80]!r}, which is not a time such as 15m, 30s or 500ms")
    unit_s = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    return int(found[1]) * unit_s.get(found[2], 0.001)


def _flag(given: Mapping[str, str], name: str, otherwise: bool) -> bool:
    text = given.get(name, str(otherwise)).lower()
    if text not in ("true", "false"):
        raise BadOption(f"{name} is {text[:80]!r}, which is neither true nor false")
    return text == "true"


def _name(option: str, text: str) -> None:
    try:
        requests.name(text)
    except InvalidRequest as error:
        raise BadOption(f"{option}: {error}") from None
