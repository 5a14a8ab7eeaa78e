"""The options of `format("mqks")`: parsed and checked, with hints for typing errors.

The one rule: an option without effect is refused, and no error contains a credential.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from mqks.client import requests, urls
from mqks.client.errors import InvalidRequest
from mqks.errors import ConfigurationError
from mqks.limits import READ_ROWS_MAX
from mqks.pipeline.errors import BadOption
from mqks.pipeline.reader import FETCH_ROWS
from mqks.pipeline.wire import ServerAddress

OFFSETS_PER_TRIGGER = 200_000
TRIGGER_DELAY_S = 900.0
EARLIEST, LATEST = "earliest", "latest"

_SERVER = (
    *("url", "host", "port", "token", "user", "password", "tls", "ca"),
    *("connectTimeoutMs", "numRetries"),
)
READ_OPTIONS = (
    *_SERVER,
    *("queue", "startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp"),
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

    offset: Offset
    epoch: str = ""
    """The epoch of the number; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    server: ServerAddress = field(repr=False)
    queue: str
    start: ReadPlace | None = None
    """None: `earliest` for a batch, `latest` for a stream, as with Kafka."""
    end: ReadPlace | None = None
    start_time_us: int | None = None
    end_time_us: int | None = None
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
    queue = given.get("queue")
    if queue is None:
        raise BadOption('the option queue is missing: add .option("queue", NAME)')
    _name("queue", queue)
    start_ms, end_ms = (
        _number(given, f"{which}Timestamp", 0, 2**53) for which in ("starting", "ending")
    )
    most = _number(given, "maxOffsetsPerTrigger", 1, 2**53)
    least = _number(given, "minOffsetsPerTrigger", 1, most or OFFSETS_PER_TRIGGER)
    if least is None and "maxTriggerDelay" in given:
        raise BadOption("maxTriggerDelay needs minOffsetsPerTrigger")
    fetch_rows = _number(given, "fetchSize", 1, READ_ROWS_MAX)
    return ReadOptions(
        server=_server(given),
        queue=queue,
        start=_place(given, "startingOffsets", queue),
        end=_place(given, "endingOffsets", queue),
        start_time_us=None if start_ms is None else start_ms * 1000,
        end_time_us=None if end_ms is None else end_ms * 1000,
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


def _place(given: Mapping[str, str], name: str, queue: str) -> ReadPlace | None:
    """A place from `earliest`, `latest`, a number, Kafka's {"queue": {"0": number}} with -2 for
    earliest and -1 for latest, or an offset as in the progress of a query."""
    text = given.get(name)
    if text is None:
        return None
    if text.lower() in (EARLIEST, LATEST):
        return ReadPlace(text.lower())
    try:
        match json.loads(text):
            case bool():
                pass
            case int() as number if number >= 0:
                return ReadPlace(number)
            case {"epoch": str() as epoch, "offset": int() as number} if number >= 0:
                return ReadPlace(number, epoch)
            case dict() as queues if list(queues) == [queue] and list(queues[queue]) == ["0"]:
                number = queues[queue]["0"]
                if type(number) is int and number >= -2:
                    return ReadPlace({-2: EARLIEST, -1: LATEST}.get(number, number))
    except (ValueError, TypeError):
        pass
    raise BadOption(
        f"{name} is {text[:80]!r}, which is not earliest, latest, a number, "
        f'{{"{queue}": {{"0": number}}}} or {{"epoch": text, "offset": number}}'
    )


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
