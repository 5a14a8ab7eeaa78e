"""Lines to requests: what a client asked for, checked for form but not for meaning.

The one rule: whatever is not exactly in the grammar of `docs/protocol.md` raises `BadRequest`.
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mqks.errors import BadRequest
from mqks.limits import CREDENTIALS_BYTES_MAX, DELETE_DELAY_S_MAX, MASKS_MAX

ALL = b"--all"
ONCE = b"--once"
MANDATORY = b"--mandatory"
CONFIRM = b"--confirm"


class Request(NamedTuple):
    """One line: its id, its action, whether a confirm was asked for, and the rest as it came."""

    id: bytes
    action: bytes
    confirm: bool
    rest: bytes


class Publish(NamedTuple):
    event: bytes
    data: bytes
    once: bool
    mandatory: bool


@dataclass(frozen=True, slots=True)
class DeleteRule:
    """A queue goes when it has had no consumer for `delay_s` seconds; None: at once."""

    delay_s: float | None

    def flag(self) -> bytes:
        """As `--update` tells it."""
        if self.delay_s is None:
            return b"--delete-queue-when-unused"
        return b"--delete-queue-when-unused=%s" % str(self.delay_s).encode()


@dataclass(slots=True)
class Consume:
    queue: bytes
    events: list[bytes] = field(default_factory=list)
    add: list[bytes] = field(default_factory=list)
    rule: DeleteRule | None = None
    manual_ack: bool = False


@dataclass(slots=True)
class Rebind:
    queue: bytes
    replace: list[bytes] | None = None
    remove: list[bytes] = field(default_factory=list)
    remove_masks: list[bytes] = field(default_factory=list)
    add: list[bytes] = field(default_factory=list)


def request_id_of(line: bytes) -> bytes:
    """What an error reply to this line is addressed to: its id, or `-` where it has none."""
    request_id = line.split(b" ", 1)[0]
    return b"-" if not request_id or b"\t" in request_id else request_id


def parse_request(line: bytes) -> Request:
    """Split a line into id, action, `--confirm` and the rest."""
    if b"\t" in line:
        raise BadRequest("a tab is not allowed in a request")
    request_id, _, rest = line.partition(b" ")
    if not request_id:
        raise BadRequest("the request id is missing")
    action, _, rest = rest.partition(b" ")
    if not action:
        raise BadRequest("the action is missing")
    confirm = rest == CONFIRM or rest.startswith(b"--confirm ")
    if confirm:
        rest = rest[len(CONFIRM) + 1 :]
    return Request(request_id, action, confirm, rest)


def parse_publish(rest: bytes) -> Publish:
    """Flags in any order, each once, then the event; no data at all is empty data."""
    flags = {ONCE: False, MANDATORY: False}
    event, _, data = rest.partition(b" ")
    while flags.get(event) is False:
        flags[event] = True
        event, _, data = data.partition(b" ")
    if not event:
        raise BadRequest("publish: the event is missing")
    _refuse_flag("publish", event)
    return Publish(event, data, flags[ONCE], flags[MANDATORY])


def parse_subscribe(rest: bytes) -> tuple[bytes, list[bytes]]:
    queue, *events = _names("subscribe", rest)
    if not events:
        raise BadRequest("subscribe: at least one event is needed")
    return queue, events


def parse_consume(rest: bytes) -> Consume:
    arguments = iter(_arguments(rest))
    request = Consume(_queue("consume", arguments))
    events: list[bytes] | None = request.events
    adds = False
    for argument in arguments:
        flag, equals, value = argument.partition(b"=")
        if argument == b"--add":
            events, adds = request.add, True
        elif argument == b"--manual-ack":
            request.manual_ack, events = True, None
        elif flag == b"--delete-queue-when-unused":
            request.rule, events = DeleteRule(_delay_s(value) if equals else None), None
        else:
            _refuse_flag("consume", argument)
            if events is None:
                raise BadRequest(f"consume: surplus argument {shown(argument)}")
            events.append(argument)
    if adds and not request.add:
        raise BadRequest("consume: --add needs at least one event")
    return request


def parse_rebind(rest: bytes) -> Rebind:
    arguments = iter(_arguments(rest))
    request = Rebind(_queue("rebind", arguments))
    lists = {
        b"--remove": request.remove,
        b"--remove-mask": request.remove_masks,
        b"--add": request.add,
    }
    replace: list[bytes] = []
    names, flag, flags_seen = replace, b"", False
    for argument in arguments:
        if argument in lists:
            if flag and not names:
                break
            names, flag, flags_seen = lists[argument], argument, True
        else:
            if argument[:2] == b"--":
                _refuse_flag("rebind", argument)
            names.append(argument)
    if flag and not names:
        raise BadRequest(f"rebind: {shown(flag)} needs at least one argument")
    if len(request.remove_masks) > MASKS_MAX:
        raise BadRequest(f"rebind: a request may have {MASKS_MAX} masks at most")
    if replace or not flags_seen:
        request.replace = replace
    return request


def parse_settle(action: str, rest: bytes) -> tuple[bytes, bytes]:
    """Arguments of ack and reject: consumer id, and message id or `--all`."""
    arguments = _arguments(rest)
    if len(arguments) != 2:
        raise BadRequest(f"{action}: a consumer id and a message id or --all are needed")
    consumer_id, message_id = arguments
    _refuse_flag(action, consumer_id)
    if message_id != ALL:
        _refuse_flag(action, message_id)
    return consumer_id, message_id


def parse_name(action: str, rest: bytes) -> bytes:
    """The one argument of delete_consumer."""
    name, *surplus = _names(action, rest)
    if surplus:
        raise BadRequest(f"{action}: surplus argument {shown(surplus[0])}")
    return name


def parse_delete_queue(rest: bytes) -> tuple[bytes, DeleteRule | None]:
    arguments = iter(_arguments(rest))
    queue, rule = _queue("delete_queue", arguments), None
    for argument in arguments:
        flag, equals, value = argument.partition(b"=")
        if flag != b"--when-unused":
            _refuse_flag("delete_queue", argument)
            raise BadRequest(f"delete_queue: surplus argument {shown(argument)}")
        rule = DeleteRule(_delay_s(value) if equals else None)
    return queue, rule


def parse_words(
    action: str,
    rest: bytes,
    words_max: int,
    numbers: Mapping[bytes, tuple[int, int]] | None = None,
    text: Container[bytes] = (),
) -> tuple[list[bytes], dict[bytes, int], dict[bytes, bytes]]:
    """Words, then flags with a value: `numbers` tells the flags that take one, with its bounds,
    `text` those that take any."""
    words: list[bytes] = []
    found: dict[bytes, int] = {}
    texts: dict[bytes, bytes] = {}
    for argument in _arguments(rest):
        flag, equals, value = argument.partition(b"=")
        if equals and numbers and flag in numbers:
            found[flag] = parse_number(action, value, *numbers[flag])
        elif equals and flag in text:
            texts[flag] = value
        else:
            _refuse_flag(action, argument)
            words.append(argument)
    if len(words) > words_max:
        raise BadRequest(f"{action}: surplus argument {shown(words[words_max])}")
    return words, found, texts


def parse_number(action: str, value: bytes, least: int, most: int) -> int:
    if not value.isdigit() or len(value) > 19 or not least <= int(value) <= most:
        raise BadRequest(f"{action}: {shown(value)} is not a number from {least} to {most}")
    return int(value)


def parse_auth(rest: bytes) -> tuple[bytes | None, bytes]:
    """Return user and password, or None and a token. No error shows any of them."""
    if len(rest) > CREDENTIALS_BYTES_MAX:
        raise BadRequest(f"auth: the arguments may have {CREDENTIALS_BYTES_MAX} bytes at most")
    words = _arguments(rest)
    if not 1 <= len(words) <= 2 or words[0].startswith(b"--"):
        raise BadRequest("auth: a token, or a user and a password, are needed")
    return (None if len(words) == 1 else words[0]), words[-1]


def parse_eval(rest: bytes) -> str:
    """The expression; `--worker=0` is this server, the only one there is."""
    if rest.startswith(b"--worker"):
        flag, _, rest = rest.partition(b" ")
        if flag != b"--worker=0":
            raise BadRequest(f"_eval: there is no {shown(flag)}, only --worker=0")
    source = rest.decode("utf-8", "surrogateescape").strip()
    if not source:
        raise BadRequest("_eval: the expression is missing")
    return source


def _arguments(rest: bytes) -> list[bytes]:
    return list(filter(None, rest.split(b" ")))


def _names(action: str, rest: bytes) -> list[bytes]:
    names = _arguments(rest)
    if not names:
        raise BadRequest(f"{action}: an argument is missing")
    if b"--" in rest:  # There may be 500,000 names.
        for name in names:
            _refuse_flag(action, name)
    return names


def _queue(action: str, arguments: Iterator[bytes]) -> bytes:
    queue = next(arguments, None)
    if queue is None:
        raise BadRequest(f"{action}: the queue is missing")
    _refuse_flag(action, queue)
    return queue


def _refuse_flag(action: str, argument: bytes) -> None:
    if argument.startswith(b"--"):
        raise BadRequest(f"{action}: unknown flag {shown(argument)}")


def _delay_s(value: bytes) -> float:
    try:
        delay_s = float(value)
    except ValueError:
        delay_s = math.nan
    if not 0 <= delay_s <= DELETE_DELAY_S_MAX or b"_" in value:
        raise BadRequest(f"{shown(value)} is not a number of seconds")
    return delay_s


def shown(argument: bytes) -> str:
    """As it stands in the reason of an error."""
    return repr(argument[:80])[1:]
