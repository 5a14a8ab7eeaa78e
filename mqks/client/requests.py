"""Encode requests as bytes, without their ids: check names and data, and order the arguments.

The one rule: names and data that the protocol cannot carry unchanged raise `InvalidRequest` here.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from itertools import compress, product
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast
from urllib.parse import quote, urlencode
from uuid import UUID

from mqks.client.errors import InvalidRequest, ProtocolViolation
from mqks.errors import BadRequest
from mqks.limits import (
    DELETE_DELAY_S_MAX,
    DURATION_S_MAX,
    PEEK_ROWS_MAX,
    PREFETCH,
    PROGRESS_BYTES_MAX,
    REASON_BYTES_MAX,
    SEQ_MAX,
    STATS_ROWS_DEFAULT,
)
from mqks.protocol.durations import in_seconds
from mqks.protocol.escapes import escape
from mqks.protocol.meta import check_meta
from mqks.protocol.requests import (
    ACTIONS,
    ALL,
    EXISTING,
    KEEP,
    POLICY_FIELDS,
    DeleteRule,
    Reader,
    policy_text,
    policy_value,
)

Data = object
"""Text and bytes are sent unchanged, all other values as JSON, see `encoder`."""
Backoff = float | tuple[float, float]
"""Seconds before the first redelivery, and the maximum."""

PUBLISH = {
    chosen: b"".join([b" publish", *compress([b" --confirm", b" --once", b" --mandatory"], chosen)])
    for chosen in product((False, True), repeat=3)
}
"""A publish up to its event, by the flags confirm, once and mandatory."""

HTTP = (
    "the port speaks HTTP, not the protocol of MQKS: use the broker's `port` (25000 by default), "
    "not its `http_port`"
)
HTTP_FIRST = b"HTTP/", b"<"
"""The first bytes of HTTP answers; the older ones have no headers."""


class Unique(NamedTuple):
    """Of a message: while one of this key waits in a queue, another one is dropped. `until`
    `acked`: also while a consumer has it, or it will be retried. `for_s`: so many seconds at the
    most. `on`: what to do with an earlier message of this key: `drop` this one, or `replace` that
    one."""

    key: str
    until: Literal["delivered", "acked"] = "delivered"
    for_s: float | None = None
    on: Literal["drop", "replace"] = "drop"

    @classmethod
    def parse(cls, text: str) -> "Unique":
        """From `KEY[,until=acked][,for=60s][,on=replace]`. Raises InvalidRequest."""
        key, *options = text.split(",")
        given = dict(option.partition("=")[::2] for option in options)
        if len(given) < len(options) or given.keys() - {"until", "for", "on"}:
            raise InvalidRequest(f"unique: {text[:80]!r} is not KEY[,until=…][,for=…][,on=…]")
        values: dict[str, Any] = {word: given[word] for word in given.keys() - {"for"}}
        try:
            for_s = float(in_seconds(given["for"])) if "for" in given else None
        except ValueError:
            raise InvalidRequest(f"unique: for={given['for']!r} is not a time") from None
        return cls(key, for_s=for_s, **values)

    @property
    def text(self) -> bytes:
        """As after `--unique=`."""
        until = b",until=" + encoded(self.until) if self.until != "delivered" else b""
        for_s = b"" if self.for_s is None else b",for=" + _seconds("for_s", self.for_s)
        on = b",on=" + encoded(self.on) if self.on != "drop" else b""
        return quote(encoded(self.key), safe="").encode() + until + for_s + on


class PublishedId(str):
    """The id of a message that was published with a confirm."""

    __slots__ = ("duplicate_of", "replaced")

    duplicate_of: str | None
    """The message that holds its key in a queue: no queue has got this one."""
    replaced: str | None
    """The message whose place it has."""

    @classmethod
    def of(cls, message_id: bytes, answer: bytes) -> "PublishedId":
        """What the confirm tells. One of the same id is the message itself, which was sent again
        since its confirm was lost."""
        own = cls(decoded(message_id))
        what, _, other = decoded(answer).partition(" ")
        other = "" if other == own else other
        own.duplicate_of = other or None if what == "duplicate" else None
        own.replaced = other or None if what == "replaced" else None
        return own


class Count(int):
    """A number of messages."""

    duplicates = 0
    """So many more stay where they were, since others hold their keys there."""


class Repeatable(TypedDict, total=False):
    """Options of `publish` that many messages can have."""

    delay_s: float | None
    ttl_s: float | None
    meta: Mapping[str, str] | None
    to: str | None
    priority: int | None
    key: str | None
    unique: str | Unique | None
    once_s: float | None
    """The server drops it if it had one with this id less than so many seconds ago."""


class Terms(Repeatable, total=False):
    at: datetime | float | None
    keep_result_s: float | None
    """How long the server keeps what becomes of it, after its end."""
    batch: str | None
    """The batch that it joins."""


class Many(Terms, total=False):
    id_prefix: str | None
    once: bool
    mandatory: bool
    timeout_s: float | None


class Sent(Terms, total=False):
    """Options of a message that is sent with others."""

    id: str | None
    once: bool
    mandatory: bool


PIECE_MESSAGES, PIECE_BYTES = 500, 64 * 1024
"""The size of the pieces in which `publish_many` passes its messages on."""

PAGE_ROWS = STATS_ROWS_DEFAULT
BEHIND = "--after", "--then", "--mask"
"""The flags of `stats` that name a row."""

_FORBIDDEN_IN_NAME = re.compile(rb"[ \t\n]")


def encoder(default: Callable[[Any], Any] | None = None) -> Callable[[object], str]:
    """Encodes as JSON, also date, time, datetime (ISO 8601), UUID, Decimal (text), Enum (its value)
    and dataclasses (objects). For other values, `default` returns what is encoded instead, or
    raises TypeError."""

    def plain(value: Any) -> Any:
        if isinstance(value, date | time):
            return value.isoformat()
        if isinstance(value, UUID | Decimal):
            return str(value)
        if isinstance(value, Enum):
            return value.value
        if is_dataclass(value) and not isinstance(value, type):
            return {each.name: getattr(value, each.name) for each in fields(value)}
        if default is not None:
            return default(value)
        raise TypeError(f"{shortly(value)} has no form in JSON; json_default= can give it one")

    kind = json.JSONEncoder
    return kind(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain).encode


_json = encoder()


def name(text: str | bytes) -> bytes:
    """The bytes of an id, event, queue or mask. Raises TypeError."""
    if not isinstance(text, str | bytes):
        raise TypeError(f"a name (of an event, a queue, an id …) must be text, not {shortly(text)}")
    return _name(text)


def shortly(value: object) -> str:
    """A wrong argument, for an error text."""
    told = repr(value)
    return told if len(told) <= 80 else f"{told[:80]}…"


@lru_cache(maxsize=4096)
def _name(text: str | bytes) -> bytes:
    raw = encoded(text) if isinstance(text, str) else text
    if not raw or raw.startswith(b"--") or _FORBIDDEN_IN_NAME.search(raw):
        raise InvalidRequest(
            f"{text[:80]!r} is not a valid name: it must not be empty, start with two dashes, "
            "or contain a space, a tab or a newline"
        )
    return raw


SUFFIX = b" \0"
"""In an action that settles a message: what follows stands behind the id."""


def settling(
    request_id: bytes, action: bytes, consumer_id: bytes, message_id: bytes, told: bytes = b""
) -> bytes:
    """A line that acks, returns, touches … a message; `told` are flags before all others."""
    action, is_more, behind = action.partition(SUFFIX)
    verb, _, flags = action.partition(b" ")
    before = filter(None, (verb, told, flags))
    return line(request_id, *before, consumer_id, message_id, *([behind] if is_more else []))


def ack(result: Data, to_json: Callable[[object], str] = _json) -> bytes:
    """An ack with a result, which is sent as JSON. Raises InvalidRequest."""
    if result is None:
        return b"ack"
    try:
        return b"ack%b--result=%b" % (SUFFIX, encoded(to_json(result)))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the result cannot be written as JSON: {error}") from None


def progress(percent: int, text: str) -> bytes:
    """Raises TypeError, InvalidRequest."""
    told = payload(" ".join(text.split()))
    if len(told) > PROGRESS_BYTES_MAX:
        raise InvalidRequest(f"the text of a progress has at most {PROGRESS_BYTES_MAX} bytes")
    words = b"%d" % count("percent", percent, 100, 0), *([told] if told else [])
    return b"progress%b%b" % (SUFFIX, b" ".join(words))


def line(*words: bytes) -> bytes:
    """A request of these words. If it ends with two carriage returns, the first is data."""
    last = words[-1]
    return b" ".join(words) + (b"\r\n" if last.endswith(b"\r") else b"\n")


def published(data: Data, to_json: Callable[[object], str] = _json) -> tuple[bytes, bytes]:
    """The flag of these data, after a space, and the data on the wire: escaped where they do not
    fit into a line as they are."""
    if isinstance(data, bytes):
        raw = data
    elif isinstance(data, str):
        raw = encoded(data)
    else:
        try:
            return b"", encoded(to_json(data))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the data cannot be written as JSON: {error}") from None
    if b"\n" in raw or b"\t" in raw or raw.endswith(b"\r"):
        return b" --escaped", escape(raw)
    return b"", raw


def payload(data: Data) -> bytes:
    """The bytes of data that cannot be escaped. Raises InvalidRequest."""
    flag, raw = published(data)
    if flag:
        raise InvalidRequest(
            "this text must not contain a tab or a newline, or end with a carriage return"
        )
    return raw


def publish_flags(terms: Terms) -> bytes:
    """The flags for these terms, each after a space."""
    if terms.get("delay_s") is not None and terms.get("at") is not None:
        raise InvalidRequest("delay_s and at exclude each other")
    return b"".join(b" " + flag for flag in flags("publish", terms))


def flags(action: str, values: Mapping[str, Any]) -> list[bytes]:
    """A flag for each value but None and False; `ttl_s` is the value of `--ttl`. What is allowed is
    in the table of actions. Raises TypeError, InvalidRequest."""
    found = []
    for what, value in values.items():
        word = b"--" + what.removesuffix("_s").replace("_", "-").encode()
        if value is None or value is False or (what in ("meta", "where") and not value):
            continue
        flag = ACTIONS[action.encode()].flags[word]
        if flag.read is not None and not (value is True and flag.bare is not None):
            word = b"%b=%b" % (word, _checked(what, value, flag.read))
        found.append(word)
    return found


def told_reason(reason: str | BaseException) -> str:
    """The reason of a reject as text. An exception is its kind and its text in one line, cut to
    what fits. Raises TypeError."""
    # Not `isinstance`, which asks an exception itself, too, and some raise then.
    if issubclass(type(reason), str):
        return str(reason)
    if not issubclass(type(reason), BaseException):
        raise TypeError(f"reason must be text or an exception, not {shortly(reason)}")
    try:
        text = f"{type(reason).__name__}: {str(reason)[:REASON_BYTES_MAX]}"
    except Exception:
        text = type(reason).__name__
    told = " ".join(text.split()).removesuffix(":").encode("utf-8", "replace")
    return told[:REASON_BYTES_MAX].decode("utf-8", "ignore")


def _checked(what: str, value: Any, read: Reader) -> bytes:
    """The text of a value."""
    if what in ("meta", "where") and not isinstance(value, bytes):
        text = _meta(value, reserved=what == "where")
    elif what == "at" or what.endswith("_s"):
        text = _seconds(what, _since_1970_s(value) if what == "at" else value)
    elif what in ("retries", "backoff"):
        text = _policy_text(f"--{what}".encode(), value)
    elif what == "reason":
        text = quote(told_reason(value), errors="surrogateescape").encode()
    elif what in ("after", "limit", "prefetch", "priority"):
        text = b"%d" % _whole(what, value)
    elif what == "unique" and isinstance(value, str | Unique):
        text = (value if isinstance(value, Unique) else Unique(value)).text
    elif what == "key" and isinstance(value, str):
        text = quote(encoded(value), safe="").encode()
    else:
        text = name(value)
    try:
        read(text)
    except BadRequest as error:
        raise InvalidRequest(f"{what}: {error}") from None
    return text


def _seconds(what: str, value: float) -> bytes:
    if not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number of seconds, not {shortly(value)}")
    return b"%.6f" % value if value % 1 else b"%d" % value


def _since_1970_s(at: datetime | float) -> float:
    if not isinstance(at, datetime):
        return at
    if at.tzinfo is None:
        raise InvalidRequest(f"at: {at} has no time zone")
    return max(0.0, at.timestamp())


def _meta(meta: Mapping[str, str], *, reserved: bool = False) -> bytes:
    if not isinstance(meta, Mapping):
        raise TypeError(f"meta must be a dict of texts, not {shortly(meta)}")
    if not all(isinstance(text, str) for pair in meta.items() for text in pair):
        raise InvalidRequest("meta: keys and values must be text")
    try:
        text = urlencode(meta, quote_via=quote, errors="surrogateescape").encode()
        return check_meta(text, reserved=reserved)
    except (BadRequest, UnicodeEncodeError) as error:
        raise InvalidRequest(f"meta: {error}") from None


def request_ttl_s(left_s: float) -> float | None:
    """The time to live of a request whose caller waits this long."""
    return max(left_s, 0.001) if left_s <= DURATION_S_MAX else None


def reply(meta: Mapping[str, str], error: str | None) -> tuple[str, dict[str, str]]:
    """The event and the attributes of the reply to a message with these attributes."""
    event, correlation_id = meta.get("reply-to"), meta.get("correlation-id")
    if event is None:
        raise InvalidRequest("the message does not ask for a reply: its meta has no reply-to")
    told = {"correlation-id": correlation_id, "error": error}
    return event, {key: value for key, value in told.items() if value is not None}


def bodies(
    messages: Iterable[tuple[str, Data]],
    once: bool = False,
    mandatory: bool = False,
    flags: bytes = b"",
    to_json: Callable[[object], str] = _json,
) -> Iterator[list[bytes]]:
    """The part after the id of confirmed publishes, in pieces."""
    some: list[bytes] = []
    some_bytes = 0
    form = PUBLISH[True, once, mandatory] + flags.replace(b"%", b"%%") + b"%b %b %b\n"
    if isinstance(messages, str | bytes | Mapping):
        raise TypeError(f"messages must be pairs of event and data, not {shortly(messages)}")
    for message in messages:
        try:
            event, data = message
            flag, raw = published(data, to_json)
            body = form % (flag, _name(event), raw)
        except (TypeError, ValueError, AttributeError):
            _check_pair(message)
            raise
        some.append(body)
        some_bytes += len(body)
        if len(some) == PIECE_MESSAGES or some_bytes >= PIECE_BYTES:
            yield some
            some, some_bytes = [], 0
    if some:
        yield some


def _check_pair(message: object) -> None:
    """Raises TypeError unless this is a pair of event and data."""
    if not isinstance(message, tuple | list) or len(message) != 2:
        raise TypeError(f"a message must be a pair of event and data, not {shortly(message)}")
    name(message[0])


def encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the text contains half a surrogate pair, which is not a character"
        ) from None


def decoded(raw: bytes) -> str:
    """A name as text; bytes that are not UTF-8 become surrogates, which `encoded` restores."""
    return raw.decode("utf-8", "surrogateescape")


def request(action: str, arguments: Iterable[str]) -> bytes:
    """Any action with its arguments and flags, in this order. Raises InvalidRequest."""
    words = [name(action), *map(encoded, arguments)]
    if any(b"\n" in word or b"\t" in word for word in words):
        raise InvalidRequest("an argument must not contain a tab or a newline")
    return b" ".join(words)


def confirmed(action: str, *words: str | bytes, **values: Any) -> bytes:
    """An action that asks for a confirm: names or `ALL`, and `values` as in `flags`. Raises
    InvalidRequest."""
    names = (word if word == ALL else name(word) for word in words)
    return b" ".join([action.encode(), b"--confirm", *names, *flags(action, values)])


def set_name(client_name: str) -> bytes:
    """Raises InvalidRequest."""
    return b"set_name " + name(client_name)


def auth(credentials: Iterable[str]) -> bytes:
    try:
        return b" ".join([b"auth --confirm", *map(name, credentials)])
    except InvalidRequest:
        raise InvalidRequest(
            "credentials must not contain a space, a tab or a newline, or start with two dashes"
        ) from None


def subscribe(
    queue: str, events: Iterable[str], masks: Iterable[str] = (), replace: bool = False
) -> bytes:
    bindings = _bindings("subscribe", events, masks, replace)
    if not bindings:
        raise InvalidRequest("subscribe needs at least one event or mask")
    return b" ".join([b"subscribe --confirm", name(queue), *bindings])


def _bindings(
    action: str, events: Iterable[str], masks: Iterable[str], replace: bool
) -> list[bytes]:
    """The bindings to add or, with `replace`, the new bindings."""
    named = _names(events)
    if replace and not named:
        raise InvalidRequest(f"{action}: replace needs at least one event")
    added = [] if replace or not named else [b"--add"]
    return [*added, *named, *_flag(b"--add-mask", masks)]


class Consuming(TypedDict, total=False):
    auto_ack: bool
    delete_when_unused: float | bool
    prefetch: int | None
    backoff: Backoff | None
    ack_timeout_s: float | None
    meta: bool
    cancellable: bool
    masks: Iterable[str]
    replace: bool
    """Whether `events` and `masks` replace all bindings of the queue, for every consumer."""
    create: bool | None
    """Whether to create a queue that does not exist; None: if events or masks are given."""
    manual_ack: bool | None
    """Deprecated: the contrary of `auto_ack`."""


def consume(queue: str, events: Iterable[str] = (), **options: Unpack[Consuming]) -> bytes:
    auto_ack, manual_ack = options.get("auto_ack", False), options.get("manual_ack")
    if manual_ack is not None:
        told = "manual_ack is the default; write auto_ack=True for the other"
        warnings.warn(told, DeprecationWarning, stacklevel=4)
        auto_ack = not manual_ack
    bindings = _bindings("consume", events, options.get("masks", ()), options.get("replace", False))
    words = [name(queue), *bindings]
    if not (bool(bindings) if (create := options.get("create")) is None else create):
        words.append(EXISTING)
    if (rule := options.get("delete_when_unused", False)) is not False:
        words.append(DeleteRule(_delay_s(rule)).flag())
    held = {key: options.get(key) for key in ("prefetch", "backoff", "ack_timeout_s")}
    if not auto_ack:
        words.append(b"--manual-ack")
        if held["prefetch"] is None:
            held["prefetch"] = PREFETCH
    elif any(held.values()):
        raise InvalidRequest(
            "prefetch, backoff and ack_timeout_s are for unacked messages, and auto_ack leaves none"
        )
    held["prefetch"] = held["prefetch"] or None
    more = {each: options.get(each) for each in ("meta", "cancellable")}
    return b" ".join([*words, *flags("consume", {**held, **more})])


def with_prefetch(arguments: bytes, prefetch: int) -> bytes:
    """A consume with another prefetch."""
    words = [word for word in arguments.split(b" ") if not word.startswith(b"--prefetch=")]
    return b" ".join([*words, *flags("consume", {"prefetch": prefetch or None})])


def consume_again(arguments: bytes, told: bytes | None) -> bytes:
    """The arguments of the same consume after a reconnect. They do not change a queue that exists;
    a missing queue is created with the bindings of the last update, `told`."""
    queue, *rest = (told or arguments).split(b" ")
    if rest and rest[0][:2] != b"--":
        rest = [b"--add", *rest]
    if told and EXISTING in arguments.split(b" "):
        rest.append(EXISTING)
    return b" ".join([queue, *rest, KEEP])


class Changes(TypedDict, total=False):
    """The changes of a rebind, in the order in which they are made."""

    replace: Iterable[str] | None
    remove: Iterable[str]
    remove_mask: Iterable[str]
    add: Iterable[str]
    add_mask: Iterable[str]


def rebind(queue: str, changes: Changes) -> bytes:
    words = [b"rebind --confirm", name(queue)]
    replace = changes.get("replace")
    plain = None if replace is None else _names(replace)
    added = _names(changes.get("add", ()))
    masks = _flag(b"--add-mask", changes.get("add_mask", ()))
    if plain == []:
        # An empty replacement cannot be combined with flags; only the added events remain.
        if masks and not added:
            raise InvalidRequest("rebind cannot replace all events by masks alone")
        return b" ".join(words + added + masks)
    flags = [
        *_flag(b"--remove", changes.get("remove", ())),
        *_flag(b"--remove-mask", changes.get("remove_mask", ())),
        *([b"--add", *added] if added else []),
        *masks,
    ]
    if plain is None and not flags:
        raise InvalidRequest("rebind has nothing to change; replace=[] unbinds all events")
    return b" ".join(words + (plain or []) + flags)


class PolicyKeywords(TypedDict, total=False):
    """The policy of a queue. None: the default of the server."""

    retries: int | None
    losses: int | None
    deliveries: int | None
    backoff: Backoff | None
    dead_letter_queue: str | None
    ttl_s: float | None
    messages_max: int | None
    bytes_max: int | None
    overflow: Literal["reject", "drop"] | None
    single_consumer: bool | None
    ack_timeout_s: float | None
    ordered: Literal["key"] | None
    fair: Literal["key"] | None
    paused: bool | None
    publishes_paused: bool | Literal["wait"] | None
    paused_until_s: float | None
    concurrency: int | None
    rate: str | None
    """As `100/s`, `100/m` or `100/h`, and with a burst, as `100/s,20`."""
    concurrency_per_key: int | None
    rate_per_key: str | None
    limit: str | None
    """As `api,concurrency=5,rate=100/s,20`."""
    breaker: str | None
    """As `5,30`: rejects, and seconds."""
    readers: str | None
    """Names with commas."""
    labels: str | None
    """Percent-encoded, as the query of a URL."""


_POLICY_WORDS = {"dead_letters": "dead_letter_queue"}


def policy(fields: Mapping[str, Any]) -> PolicyKeywords:
    """The keywords of `set_queue` for fields of a policy, as `stats` names them."""
    return cast(
        PolicyKeywords, {_POLICY_WORDS.get(each, each): value for each, value in fields.items()}
    )


def set_queue(queue: str, policy: PolicyKeywords, reset: bool = False) -> bytes:
    words = [b"set_queue --confirm", name(queue), *([b"--reset"] if reset else [])]
    known = {_POLICY_WORDS.get(field, field): flag for flag, field in POLICY_FIELDS.items()}
    for field, value in policy.items():
        if field not in known:
            raise InvalidRequest(f"set_queue: a policy has no field {field}")
        words.append(b"%b=%b" % (known[field], _policy_text(known[field], value)))
    return b" ".join(words)


def reject(
    delay_s: float | None,
    dead: bool,
    retries: int | None,
    backoff: Backoff | None,
    reason: str | BaseException | None = None,
) -> bytes:
    """A reject without its consumer and messages."""
    if dead and (delay_s, retries, backoff) != (None, None, None):
        raise InvalidRequest("dead excludes delay_s, retries and backoff")
    if delay_s is not None and backoff is not None:
        raise InvalidRequest("delay_s and backoff exclude each other")
    told = None if reason is None else told_reason(reason)
    values = {"dead": dead, "delay_s": delay_s, "retries": retries, "backoff": backoff}
    return b" ".join([b"reject", *flags("reject", {**values, "reason": told or None})])


def _policy_text(flag: bytes, value: object) -> bytes:
    if value is None:
        return b""
    try:
        policy_value(flag, value)
        return policy_text(flag, value)
    except (BadRequest, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{flag[2:].decode()}: {error}") from None


def delete_queue(queue: str, when_unused: float | bool = False) -> bytes:
    words = [b"delete_queue --confirm", name(queue)]
    if when_unused is not False:
        words.append(DeleteRule(_delay_s(when_unused)).flag(b"--when-unused"))
    return b" ".join(words)


class Timing(TypedDict, total=False):
    """When the ticks of a schedule are."""

    every_s: float | None
    """So many seconds apart, at least one."""
    tz: str | None
    """The time zone of a cron expression; UTC by default."""
    missed: Literal["skip", "one"] | None
    """What to publish for missed ticks: nothing, by default, or one message."""
    jitter_s: float | None
    """Each tick is late by up to so many seconds."""
    pause: bool
    """Whether it is added paused."""


class ScheduleKeywords(Timing, Repeatable, total=False):
    mandatory: bool
    """Whether a tick is tried again until a queue is bound to the event."""


def timed(of: str, cron: str | None, timing: Mapping[str, Any]) -> bytes:
    """A schedule up to what it publishes. Raises InvalidRequest."""
    words = [*map(name, [of, *(cron or "").split()])]
    if b"publish" in words:
        raise InvalidRequest("publish is neither a name of a schedule nor in a cron expression")
    return b" ".join([b"schedule --confirm", *words, *flags("schedule", timing), b"publish"])


def schedule(of: str, cron: str | None, event: str, data: Data, options: ScheduleKeywords) -> bytes:
    """Raises InvalidRequest."""
    if (cron is None) == (options.get("every_s") is None):
        raise InvalidRequest("a schedule needs either cron or every_s")
    given: dict[str, Any] = {**options}
    timing = {each: given.pop(each) for each in Timing.__annotations__ if each in given}
    flag, raw = published(data)
    words = [timed(of, cron, timing), *flags("publish", given), *flag.split(), name(event), raw]
    return b" ".join(words)


Follows = tuple[str, Data] | tuple[str, Data, Mapping[str, Any]]
"""What is published when a batch ends: event, data, and options of `publish`."""


def batch(of: str) -> bytes:
    """Raises InvalidRequest."""
    return b"batch " + name(of)


def open_batch(
    of: str, then: Follows | None, on_dead: Follows | None, for_s: float | None
) -> Iterator[bytes]:
    """One after the other. Raises InvalidRequest."""
    yield _followed(confirmed("open_batch", of, for_s=for_s), then)
    if on_dead is not None:
        yield _followed(confirmed("open_batch", of, on_dead=True), on_dead)


def _followed(body: bytes, follows: Follows | None) -> bytes:
    if follows is None:
        return body
    event, data, *options = follows
    flag, raw = published(data)
    words = [*flags("publish", options[0] if options else {}), *flag.split(), name(event), raw]
    return b" ".join([body, b"publish", *words])


class SelectionKeywords(TypedDict, total=False):
    """Selects the messages that meet all given conditions, see `move`."""

    event: str | None
    id: str | None
    older_s: float | None
    where: Mapping[str, str] | None
    """Attributes that they have, also those of a dead letter; an empty value is that of one that is
    missing. In `why`, a `#` may stand for each number."""


class Choice(SelectionKeywords, total=False):
    limit: int | None
    """At most this number, the first ones."""


class Selecting(SelectionKeywords, total=False):
    timeout_s: float | None


class Choosing(Choice, Selecting, total=False):
    """A selection with a limit, and how long to wait for what is done with it."""


def exists(queue: str) -> tuple[bytes, bytes]:
    """Two requests, each of which is refused if the queue does not exist. The first needs the
    permission to consume it, the second the one to inspect all."""
    return b"range " + name(queue), b"stats queue " + name(queue)


def tells_missing(reason: str | None) -> bool:
    """Whether that is why a request of `exists` was refused."""
    return "there is no queue" in (reason or "")


def page(what: str, behind: Mapping[str, Any] | None, *keys: str) -> list[str]:
    """The words after `stats` for a page of a list that is sorted by `keys`, up to three: the first
    rows, or those behind this one, in the keys that are not None there."""
    told = ((flag, behind[key]) for flag, key in zip(BEHIND, keys, strict=False) if behind)
    flags = (f"{flag}={value}" for flag, value in told if value is not None)
    return [what, f"--limit={PAGE_ROWS}", *flags]


def stats_told(answer: bytes) -> Any:
    """What `stats` replies. Raises ProtocolViolation."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise unexpected(answer, "JSON") from None


def tail(events: Iterable[str], queue: str | None) -> bytes:
    words = [*flags("tail", {"queue": queue}), *_names(events)]
    if not words:
        raise InvalidRequest("tail needs an event, a mask or a queue")
    return b" ".join(words)


def peek(
    queue: str,
    after: int,
    limit: int,
    scheduled: bool,
    selection: SelectionKeywords,
    *,
    soonest: bool = False,
    batches: bool = False,
) -> bytes:
    rows = min(count("limit", limit, SEQ_MAX), PEEK_ROWS_MAX)
    form = {"scheduled": scheduled, "soonest": soonest, "batches": batches}
    values: dict[str, object] = {"limit": rows, **form, **selection}
    if after:
        values["after"] = after
    return b" ".join([b"peek", name(queue), *flags("peek", values)])


def receive(queue: str, limit: int, lease_s: float | None, wait_s: float) -> bytes:
    values = {"limit": limit, "lease_s": lease_s, "wait_s": wait_s}
    return b" ".join([b"receive", name(queue), *flags("receive", values)])


def peek_goes_on(answer: bytes, numbers: Sequence[int]) -> int | None:
    """From the end of a reply to `peek`, which has the messages with these numbers: the number
    after which there may be more. Any reply may end early, and one without messages is the end,
    unless it tells that number."""
    number = answer.removeprefix(PEEK_GOES_ON)
    if number != answer and is_number(number):
        return int(number)
    return numbers[-1] if numbers else None


def fields_told(answer: str) -> dict[str, str]:
    """The `name=value` words of a reply, as of one to `range`."""
    pairs = (word.partition("=") for word in answer.split(" "))
    return {name: value for name, _, value in pairs}


def is_peek_end(text: bytes) -> bool:
    """Whether this is the last line of a reply of several lines."""
    return text == b"--end" or text.startswith(PEEK_GOES_ON)


PEEK_GOES_ON = b"--end after="


def sequence_number(seq: int) -> bytes:
    """Raises TypeError, InvalidRequest."""
    return b"%d" % count("seq", seq, SEQ_MAX, 0)


def reason(error_id: str) -> bytes:
    return b"stats errors " + name(error_id)


def is_number(text: bytes) -> bool:
    """Whether these are digits that fit into 64 bits."""
    return text.isdigit() and len(text) <= 19


class Reply(NamedTuple):
    """One line from the server."""

    request_id: bytes
    is_error: bool
    text: bytes
    """The text after `ok`, or the id of the error."""

    @classmethod
    def parse(cls, line: bytes) -> "Reply":
        """Raises ProtocolViolation."""
        request_id, _, rest = line.partition(b" ")
        status, _, text = rest.partition(b" ")
        if not request_id or status not in (b"ok", b"error"):
            if line.startswith(HTTP_FIRST):
                raise ProtocolViolation(HTTP)
            raise ProtocolViolation(f"the peer sent {line[:80]!r}, which is not a reply")
        return cls(request_id, status == b"error", text)


def unexpected(sent: bytes | str, expected: str) -> ProtocolViolation:
    return ProtocolViolation(f"the peer sent {sent[:80]!r} instead of {expected}")


def refusal(text: bytes) -> str:
    """What the error reply says that concerns a connection: an error id, and perhaps a reason."""
    error_id, _, reason = decoded(text).partition(" ")
    told = f": {reason} (error {error_id})" if reason else f", error {error_id}"
    return f"refused by the server{told}"


def number_told(answer: bytes) -> int:
    """Raises ProtocolViolation."""
    number, is_more, stay = answer.partition(b" duplicate ")
    if not is_number(number) or (is_more and not is_number(stay)):
        raise unexpected(answer, "a number")
    count = Count(number)
    if is_more:
        count.duplicates = int(stay)
    return count


def reason_told(answer: bytes) -> str | None:
    """The reason in the reply to `reason`. Raises ProtocolViolation."""
    rows = stats_told(answer)
    try:
        return str(rows[0]["reason"]) if rows else None
    except (LookupError, TypeError):
        raise unexpected(answer, "the reason of an error") from None


def count(what: str, value: int, most: int, least: int = 1) -> int:
    if not least <= _whole(what, value) <= most:
        raise InvalidRequest(f"{what}: {value!r} is not a number from {least} to {most}")
    return value


def _whole(what: str, value: int) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, not {shortly(value)}")
    return value


def _delay_s(rule: float | bool) -> float | None:
    """The seconds of a delete rule; None for True, a rule without a delay."""
    if rule is True:
        return None
    if not isinstance(rule, int | float):
        raise TypeError(f"a number of seconds, True or False is needed, not {shortly(rule)}")
    if not (math.isfinite(rule) and 0 <= rule <= DELETE_DELAY_S_MAX):
        raise InvalidRequest(
            f"{rule!r} is not a number of seconds from 0 to {DELETE_DELAY_S_MAX:g}"
        )
    return float(rule)


def _names(texts: Iterable[str]) -> list[bytes]:
    if isinstance(texts, str | bytes):
        raise InvalidRequest(
            f"a list of names is needed, not a single name: write [{texts[:80]!r}]"
        )
    if not isinstance(texts, Iterable):
        raise TypeError(f"a list of names is needed, not {shortly(texts)}")
    return [name(text) for text in texts]


def _flag(flag: bytes, texts: Iterable[str]) -> list[bytes]:
    names = _names(texts)
    return [flag, *names] if names else []
