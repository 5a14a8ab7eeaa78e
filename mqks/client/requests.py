"""Requests to bytes, without their ids: names and data checked, arguments put in order.

The one rule: what the wire cannot carry unchanged raises `InvalidRequest` here.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import compress, product
from typing import Any, NamedTuple, TypedDict

from mqks.client.errors import InvalidRequest, ProtocolViolation
from mqks.limits import DELETE_DELAY_S_MAX
from mqks.protocol.requests import DeleteRule

Data = str | bytes | dict[str, Any] | list[Any] | tuple[Any, ...] | float | None
"""Text and bytes go as they are; anything else goes as JSON."""

PUBLISH = {
    chosen: b"".join([b" publish", *compress([b" --confirm", b" --once", b" --mandatory"], chosen)])
    for chosen in product((False, True), repeat=3)
}
"""A publish up to its event, by whether it asks for a confirm, whether its id counts once and
whether it must reach a queue."""


class Many(TypedDict, total=False):
    """How many messages are published."""

    id_prefix: str | None
    once: bool
    mandatory: bool
    timeout_s: float | None


PIECE_MESSAGES, PIECE_BYTES = 500, 64 * 1024
"""Messages of a `publish_many` handed over at a time."""

_FORBIDDEN_IN_NAME = re.compile(rb"[ \t\n]")
_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@lru_cache(maxsize=4096)
def name(text: str | bytes) -> bytes:
    """The bytes of an id, event, queue or mask."""
    raw = encoded(text) if isinstance(text, str) else text
    if not raw or raw.startswith(b"--") or _FORBIDDEN_IN_NAME.search(raw):
        raise InvalidRequest(
            f"{text[:80]!r} is no name: it must not be empty, start with two dashes, "
            "or have a space, a tab or a newline"
        )
    return raw


def line(*words: bytes) -> bytes:
    """A request, its words as they are. Of two carriage returns at its end one is data."""
    last = words[-1]
    return b" ".join(words) + (b"\r\n" if last.endswith(b"\r") else b"\n")


def payload(data: Data) -> bytes:
    """The bytes of data. Text and bytes must not have a tab, a newline or a last carriage return;
    in JSON values these are escaped."""
    if isinstance(data, bytes):
        raw = data
    elif isinstance(data, str):
        raw = encoded(data)
    else:
        try:
            return encoded(_json(data))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the data cannot be written as JSON: {error}") from None
    if b"\n" in raw or b"\t" in raw or raw.endswith(b"\r"):
        raise InvalidRequest("data must not have a tab or newline, nor end with a carriage return")
    return raw


def bodies(
    messages: Iterable[tuple[str, Data]], once: bool = False, mandatory: bool = False
) -> Iterator[list[bytes]]:
    """What follows the ids of confirmed publishes, some at a time."""
    some: list[bytes] = []
    some_bytes = 0
    form = PUBLISH[True, once, mandatory] + b" %b %b\n"
    for event, data in messages:
        body = form % (name(event), payload(data))
        some.append(body)
        some_bytes += len(body)
        if len(some) == PIECE_MESSAGES or some_bytes >= PIECE_BYTES:
            yield some
            some, some_bytes = [], 0
    if some:
        yield some


def encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest("the text has half a surrogate pair, which is no character") from None


def decoded(raw: bytes) -> str:
    """A name as text; bytes that are no UTF-8 survive the way there and back."""
    return raw.decode("utf-8", "surrogateescape")


def request(action: str, arguments: Iterable[str]) -> bytes:
    """Any action with its arguments and flags, in their order."""
    return b" ".join([name(action), *map(payload, arguments)])


def auth(credentials: Iterable[str]) -> bytes:
    try:
        return b" ".join([b"auth --confirm", *map(name, credentials)])
    except InvalidRequest:
        raise InvalidRequest(
            "credentials must not have a space, a tab or a newline, or start with two dashes"
        ) from None


def subscribe(queue: str, events: Iterable[str]) -> bytes:
    words = [b"subscribe --confirm", name(queue), *_names(events)]
    if len(words) == 2:
        raise InvalidRequest("subscribe needs at least one event")
    return b" ".join(words)


def consume(
    queue: str,
    events: Iterable[str] = (),
    add: Iterable[str] = (),
    manual_ack: bool = False,
    delete_when_unused: float | bool = False,
) -> bytes:
    """The arguments of a consume, which are also what an update tells."""
    words = [name(queue), *_names(events), *_flag(b"--add", add)]
    if delete_when_unused is not False:
        words.append(DeleteRule(_delay_s(delete_when_unused)).flag())
    if manual_ack:
        words.append(b"--manual-ack")
    return b" ".join(words)


class Changes(TypedDict, total=False):
    """What a rebind does, in this order."""

    replace: Iterable[str] | None
    remove: Iterable[str]
    remove_mask: Iterable[str]
    add: Iterable[str]


def rebind(queue: str, changes: Changes) -> bytes:
    words = [b"rebind --confirm", name(queue)]
    replace = changes.get("replace")
    plain = None if replace is None else _names(replace)
    added = _names(changes.get("add", ()))
    if plain == []:
        # An empty replacement cannot be written next to flags, but leaves just what is added.
        return b" ".join(words + added)
    flags = [
        *_flag(b"--remove", changes.get("remove", ())),
        *_flag(b"--remove-mask", changes.get("remove_mask", ())),
        *([b"--add", *added] if added else []),
    ]
    if plain is None and not flags:
        raise InvalidRequest("rebind has nothing to change; replace=[] unbinds all events")
    return b" ".join(words + (plain or []) + flags)


def delete_queue(queue: str, when_unused: float | bool = False) -> bytes:
    words = [b"delete_queue --confirm", name(queue)]
    if when_unused is not False:
        flag = DeleteRule(_delay_s(when_unused)).flag()
        words.append(flag.replace(b"--delete-queue-when-unused", b"--when-unused"))
    return b" ".join(words)


def purge(queue: str) -> bytes:
    return b"purge --confirm " + name(queue)


def trim(queue: str, seq: int, epoch: str | None = None) -> bytes:
    guard = b"" if epoch is None else b" --epoch=" + name(epoch)
    return b"trim --confirm %b %d%b" % (name(queue), seq, guard)


def reason(error_id: str) -> bytes:
    return b"stats errors " + name(error_id)


def is_number(text: bytes) -> bool:
    """Whether these are digits, and so few that Python reads them."""
    return text.isdigit() and len(text) <= 19


class Reply(NamedTuple):
    """One line from the server."""

    request_id: bytes
    is_error: bool
    text: bytes
    """What follows `ok`; of an error its id."""

    @classmethod
    def parse(cls, line: bytes) -> "Reply":
        """Raises ProtocolViolation."""
        request_id, _, rest = line.partition(b" ")
        status, _, text = rest.partition(b" ")
        if not request_id or status not in (b"ok", b"error"):
            raise ProtocolViolation(f"the peer sent {line[:80]!r}, which is no reply")
        return cls(request_id, status == b"error", text)


def number_told(answer: bytes) -> int:
    """Raises ProtocolViolation."""
    if not is_number(answer):
        raise ProtocolViolation(f"the peer sent {answer[:80]!r} for a number")
    return int(answer)


def reason_told(answer: bytes) -> str | None:
    """What the answer to `reason` tells. Raises ProtocolViolation."""
    try:
        rows = json.loads(answer)
        return str(rows[0]["reason"]) if rows else None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ProtocolViolation(f"the peer sent {answer[:80]!r} for an error") from None


def _delay_s(rule: float | bool) -> float | None:
    """Seconds of a rule; True is a rule without any."""
    if rule is True:
        return None
    if not (math.isfinite(rule) and 0 <= rule <= DELETE_DELAY_S_MAX):
        raise InvalidRequest(f"{rule!r} is no number of seconds from 0 to {DELETE_DELAY_S_MAX:g}")
    return float(rule)


def _names(texts: Iterable[str]) -> list[bytes]:
    if isinstance(texts, str):
        raise InvalidRequest(f"a list of names is needed, not the one name {texts[:80]!r}")
    return [name(text) for text in texts]


def _flag(flag: bytes, texts: Iterable[str]) -> list[bytes]:
    names = _names(texts)
    return [flag, *names] if names else []
