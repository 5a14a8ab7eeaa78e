"""Lines to requests: the syntax is checked, not the meaning.

The one rule: a line that does not match the grammar of `docs/protocol.md` raises `BadRequest`.
"""

import math
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mqks.errors import BadRequest, LimitExceeded
from mqks.limits import (
    COUNT_MAX,
    CREDENTIALS_BYTES_MAX,
    DELETE_DELAY_S_MAX,
    DURATION_S_MAX,
    MASK_BYTES_MAX,
    MASKS_MAX,
    PEEK_ROWS_MAX,
    SEQ_MAX,
    STEP_LINE_BYTES,
    TAIL_NAMES_MAX,
    TIME_S_MAX,
    WORDS_MAX,
)
from mqks.protocol.masks import check_bound
from mqks.protocol.meta import check_meta

T = TypeVar("T")
Parsing = Generator[bool, None, T]
"""Parses in steps of about a millisecond, and yields False between them: a line may have 500,000
names. `names_max` is the maximum of each kind of them."""

ALL = b"--all"
ONCE = b"--once"
MANDATORY = b"--mandatory"
CONFIRM = b"--confirm"
CONFIRM_ANYWHERE = frozenset(
    {
        b"set_queue",
        b"release",
        b"touch",
        b"cancel",
        b"promote",
        b"move",
        b"redrive",
        b"close_connection",
    }
)
"""Actions that accept it anywhere; the others only as the first argument."""
META = b"--meta"
SCHEDULED = b"--scheduled"
EXISTING, KEEP = b"--existing", b"--keep"


class Request(NamedTuple):
    """One line: its id, its action, whether a confirm is requested, and the rest, unparsed."""

    id: bytes
    action: bytes
    confirm: bool
    rest: bytes


class Publish(NamedTuple):
    event: bytes
    data: bytes
    once: bool = False
    mandatory: bool = False
    delay_us: int = 0
    at_us: int = 0
    """When it is due, in microseconds since 1970. 0: no `--at`, or due at once."""
    ttl_us: int = 0
    """0: the message has no TTL."""
    meta: bytes = b""
    to: bytes | None = None
    """The queue that gets it; None: those that are bound to the event."""


class Settle(NamedTuple):
    """A reject or release of one unacked message of a consumer, or of all (`--all`)."""

    consumer: bytes
    message: bytes
    delay_us: int = 0
    dead: bool = False
    retries: int | None = None
    backoff: "Backoff | None" = None
    """Both apply where the policy of the queue has no value."""
    selection: "Selection | None" = None
    fate: bool = False
    """The confirm tells what became of the message."""


class Selection(NamedTuple):
    """Some messages of a queue: those of which all this is true."""

    event_mask: bytes | None = None
    message_id: bytes | None = None
    older_us: int | None = None
    """They came so long ago."""


class Move(NamedTuple):
    """Messages move from `source` to `to`; None: each to the queue where it died."""

    source: bytes
    to: bytes | None
    selection: Selection | None = None
    limit: int | None = None


class WantedTail(NamedTuple):
    queue: bytes | None
    events: list[bytes]
    masks: list[bytes]


class Purge(NamedTuple):
    queue: bytes
    selection: Selection | None
    limit: int | None
    scheduled: bool


class SetQueue(NamedTuple):
    """`changes`: new values by policy field; None clears a field."""

    queue: bytes
    changes: dict[str, Any]
    reset: bool


class Backoff(NamedTuple):
    """The delay after the n-th reject is `first_s` times 2 to the n - 1, at most `max_s`."""

    first_s: float
    max_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeleteRule:
    """A queue is deleted when it has had no consumer for `delay_s` seconds; None: at once."""

    delay_s: float | None

    def flag(self) -> bytes:
        """As in an update."""
        if self.delay_s is None:
            return b"--delete-queue-when-unused"
        return b"--delete-queue-when-unused=%s" % str(self.delay_s).encode()


@dataclass(slots=True)
class Consume:
    queue: bytes
    events: list[bytes] = field(default_factory=list)
    add: list[bytes] = field(default_factory=list)
    add_masks: list[bytes] = field(default_factory=list)
    rule: DeleteRule | None = None
    manual_ack: bool = False
    prefetch: int = 0
    """The maximum of unacked messages; 0: as many as the server allows."""
    backoff: "Backoff | None" = None
    """For losses, where its queue has none."""
    meta: bool = False
    existing: bool = False
    """The queue must exist already."""
    keep: bool = False
    """A queue that exists keeps its bindings and its rule."""


@dataclass(slots=True)
class Rebind:
    queue: bytes
    replace: list[bytes] | None = None
    remove: list[bytes] = field(default_factory=list)
    remove_masks: list[bytes] = field(default_factory=list)
    add: list[bytes] = field(default_factory=list)
    add_masks: list[bytes] = field(default_factory=list)


def request_id_of(line: bytes) -> bytes:
    """The id of the error reply to this line: its request id, or `-` if it has none."""
    request_id = line.split(b" ", 1)[0]
    return b"-" if not request_id or b"\t" in request_id else request_id


def parse_request(line: bytes) -> Request:
    """Split a line into id, action, `--confirm` and the rest."""
    if b"\t" in line:
        raise BadRequest("the request contains a tab; JSON writes it as \\t")
    request_id, _, rest = line.partition(b" ")
    if not request_id:
        raise BadRequest("the request id is missing: the line starts with a space")
    action, _, rest = rest.partition(b" ")
    if not action:
        raise BadRequest("the action is missing; a request is: ID ACTION ARGUMENTS")
    confirm = rest == CONFIRM or rest.startswith(b"--confirm ")
    if confirm:
        rest = rest[len(CONFIRM) + 1 :]
    elif CONFIRM in rest and action in CONFIRM_ANYWHERE:
        words = _arguments(action.decode(), rest)
        confirm = CONFIRM in words
        rest = b" ".join(word for word in words if word != CONFIRM)
    elif action == b"publish" and rest[:2] == b"--" and b" --confirm " in rest:
        # Each flag may be given once, so `parse_publish` refuses more of them.
        words = rest.split(b" ", len(PUBLISH_FLAGS) + 1)
        count = next((at for at, word in enumerate(words) if word[:2] != b"--"), len(words))
        flags = [word for word in words[:count] if word != CONFIRM]
        confirm = len(flags) < count
        rest = b" ".join([*flags, *words[count:]])
    return Request(request_id, action, confirm, rest)


def parse_publish(rest: bytes) -> Publish:
    """Flags in any order, each once, then the event; missing data are empty data."""
    event, _, data = rest.partition(b" ")
    found: dict[bytes, Any] = {}
    while event[:2] == b"--":
        _take_flag("publish", event, PUBLISH_FLAGS, found)
        event, _, data = data.partition(b" ")
    if not event:
        raise BadRequest("publish: the event is missing, as in: publish order.new DATA")
    if not found:
        return Publish(event, data)
    if DELAY in found and AT in found:
        raise BadRequest("publish: --delay and --at cannot be used together")
    return Publish(
        event,
        data,
        ONCE in found,
        MANDATORY in found,
        found.get(DELAY, 0),
        found.get(AT, 0),
        found.get(TTL, 0),
        found.get(META, b""),
        found.get(TO),
    )


def parse_subscribe(rest: bytes, names_max: int) -> Parsing[Rebind]:
    """What it changes: plain events replace, the others are added."""
    events: list[bytes] = []
    request = Rebind(b"")
    sections = {b"": events, b"--add": request.add, b"--add-mask": request.add_masks}
    request.queue = yield from _parse_names("subscribe", rest, names_max, sections)
    if not (events or request.add or request.add_masks):
        raise BadRequest(
            "subscribe: an event or a mask is missing, as in: subscribe orders order.new"
        )
    request.replace = events or None
    return request


def parse_consume(rest: bytes, names_max: int) -> Parsing[Consume]:
    request, found = Consume(b""), dict[bytes, Any]()

    def ends_events(argument: bytes) -> bool:
        flag, equals, value = argument.partition(b"=")
        if flag in CONSUME_FLAGS:
            _take_flag("consume", argument, CONSUME_FLAGS, found)
            return False
        if argument == b"--manual-ack":
            request.manual_ack = True
        elif flag == b"--delete-queue-when-unused":
            request.rule = DeleteRule(_delay_s(value) if equals else None)
        else:
            _refuse_flag("consume", argument)
        return True

    sections = {b"": request.events, b"--add": request.add, b"--add-mask": request.add_masks}
    request.queue = yield from _parse_names("consume", rest, names_max, sections, ends_events)
    request.prefetch, request.backoff = found.get(PREFETCH, 0), found.get(BACKOFF)
    request.meta = META in found
    request.existing, request.keep = EXISTING in found, KEEP in found
    if found.keys() & {PREFETCH, BACKOFF} and not request.manual_ack:
        raise BadRequest("consume: --prefetch and --backoff need --manual-ack")
    return request


def parse_rebind(rest: bytes, names_max: int) -> Parsing[Rebind]:
    request, replace = Rebind(b""), list[bytes]()
    sections = {
        b"": replace,
        b"--remove": request.remove,
        b"--remove-mask": request.remove_masks,
        b"--add": request.add,
        b"--add-mask": request.add_masks,
    }
    request.queue = yield from _parse_names("rebind", rest, names_max, sections)
    if len(request.remove_masks) > MASKS_MAX:
        raise BadRequest(
            f"rebind: --remove-mask has {len(request.remove_masks)} masks, the limit is {MASKS_MAX}"
        )
    if replace or not any(sections.values()):
        request.replace = replace
    return request


def _parse_names(
    action: str,
    rest: bytes,
    names_max: int,
    sections: Mapping[bytes, list[bytes]],
    ends_events: Callable[[bytes], bool] | None = None,
) -> Parsing[bytes]:
    """Return the queue, and add each name behind it to the section of the last flag, `b""` before
    the first. `ends_events` parses another flag, and says whether a name must not follow it."""
    queue: bytes | None = None
    names: list[bytes] | None = sections[b""]
    given: dict[bytes, None] = {}
    for number, piece in enumerate(_pieces(rest)):
        if number:
            yield False
        words = list(filter(None, piece.split(b" ")))
        if queue is not None and names is not None and b"--" not in piece:
            names += words
            words = []
        for word in words:
            if word[:2] == b"--":
                if queue is not None and word in sections:
                    names, given[word] = sections[word], None
                elif ends_events is None:
                    _refuse_flag(action, word)
                elif ends_events(word):
                    if queue is None:
                        _refuse_flag(action, word)
                    names = None
            elif queue is None:
                queue = word
            elif names is None:
                raise BadRequest(
                    f"{action}: unexpected argument {shown(word)}; events precede the flags"
                )
            else:
                names.append(word)
        if names and len(names) > names_max:
            raise LimitExceeded(
                "bindings_per_queue_max",
                f"{action}: more than {names_max} names (bindings_per_queue_max)",
            )
    if queue is None:
        raise BadRequest(f"{action}: the queue is missing")
    for flag in given:
        if not sections[flag]:
            raise BadRequest(f"{action}: {flag.decode()} needs at least one value")
    return queue


def _pieces(rest: bytes) -> Iterator[bytes]:
    """Whole words, so many that splitting them takes a millisecond."""
    start = 0
    while start < len(rest):
        end = rest.find(b" ", start + STEP_LINE_BYTES)
        if end < 0:
            end = len(rest)
        yield rest[start:end]
        start = end + 1


def parse_settle(action: str, rest: bytes) -> tuple[bytes, bytes]:
    """Arguments of ack and touch: consumer id, and message id or `--all`."""
    return _one_or_all(action, "consumer id", _arguments(action, rest))


def parse_touch(rest: bytes) -> tuple[bytes, bytes]:
    return parse_settle("touch", rest)


def parse_reject(rest: bytes) -> Settle:
    if b" --" not in rest and rest[:2] != b"--":
        return Settle(*parse_settle("reject", rest))
    words, found = _pull("reject", rest, REJECT_FLAGS)
    if DEAD in found and found.keys() & {DELAY, RETRIES, BACKOFF}:
        raise BadRequest(
            "reject: --dead cannot be used together with --delay, --retries, --backoff"
        )
    if DELAY in found and BACKOFF in found:
        raise BadRequest("reject: --delay and --backoff cannot be used together")
    selection = _selection(found)
    if selection and ALL not in words:
        raise BadRequest("reject: --event, --id and --older are only possible with --all")
    target = _one_or_all("reject", "consumer id", words)
    limits = found.get(RETRIES), found.get(BACKOFF)
    if FATE in found and ALL in words:
        raise BadRequest("reject: --fate is only possible with one message, not with --all")
    return Settle(
        *target, found.get(DELAY, 0), DEAD in found, *limits, selection, fate=FATE in found
    )


def parse_release(rest: bytes) -> Settle:
    words, found = _pull("release", rest, {DELAY: _delay_us})
    return Settle(*_one_or_all("release", "consumer id", words), found.get(DELAY, 0))


def parse_scheduled(action: str, rest: bytes) -> tuple[bytes, bytes]:
    """Arguments of cancel and promote: queue, and message id or `--all`."""
    return _one_or_all(action, "queue", _arguments(action, rest))


def _one_or_all(action: str, owner: str, words: list[bytes]) -> tuple[bytes, bytes]:
    if len(words) != 2:
        raise BadRequest(
            f"{action}: needs a {owner}, and a message id or --all; arguments found: {len(words)}"
        )
    name, message_id = words
    _refuse_flag(action, name)
    if message_id != ALL:
        _refuse_flag(action, message_id)
    return name, message_id


def parse_move(rest: bytes) -> Move:
    words, found = _pull("move", rest, MOVE_FLAGS)
    return _move("move", words, 2, found)


def parse_redrive(rest: bytes) -> Move:
    words, found = _pull("redrive", rest, {**MOVE_FLAGS, TO: _name})
    return _move("redrive", words, 1, found)


def _move(action: str, words: list[bytes], count: int, found: dict[bytes, Any]) -> Move:
    for word in words:
        _refuse_flag(action, word)
    if len(words) != count:
        raise BadRequest(f"{action}: number of queues needed: {count}, found: {len(words)}")
    source, to = words[0], found.get(TO) if count == 1 else words[1]
    if source == to:
        raise BadRequest(f"{action}: source and target are both {shown(source)}")
    return Move(source, to, _selection(found), found.get(LIMIT))


def parse_purge(rest: bytes) -> Purge:
    words, found = _pull("purge", rest, {**MOVE_FLAGS, SCHEDULED: None})
    name = _only_queue("purge", words)
    selection, scheduled = _selection(found), SCHEDULED in found
    if scheduled and (selection or LIMIT in found):
        raise BadRequest(
            "purge: --scheduled cannot be used together with other flags; cancel takes an id"
        )
    return Purge(name, selection, found.get(LIMIT), scheduled)


def parse_tail(rest: bytes) -> WantedTail:
    """A word with a star is a mask."""
    words, found = _pull("tail", rest, {QUEUE: _any_name})
    for word in words:
        _refuse_flag("tail", word)
    queue = found.get(QUEUE)
    if queue is None and not words:
        raise BadRequest("tail: an event, a mask or --queue is missing, as in: tail order.*")
    if len(words) > TAIL_NAMES_MAX:
        raise BadRequest(
            f"tail: {len(words)} events and masks are given, the limit is {TAIL_NAMES_MAX}"
        )
    masks = [word for word in words if b"*" in word]
    for mask in masks:
        check_bound(mask)
    return WantedTail(queue, [word for word in words if b"*" not in word], masks)


def parse_peek(rest: bytes) -> tuple[bytes, dict[bytes, int], Selection | None]:
    """The queue, the flags with numbers (`--scheduled` among them), and what is to be shown."""
    words, found = _pull("peek", rest, PEEK_FLAGS)
    return _only_queue("peek", words), found, _selection(found)


def _only_queue(action: str, words: list[bytes]) -> bytes:
    name = _queue(action, iter(words))
    for word in words[1:]:
        _refuse_flag(action, word)
        raise BadRequest(f"{action}: surplus argument {shown(word)}")
    return name


def _selection(found: Mapping[bytes, Any]) -> Selection | None:
    if not found.keys() & SELECTION_FLAGS.keys():
        return None
    return Selection(found.get(EVENT), found.get(ID), found.get(OLDER))


def parse_set_queue(rest: bytes) -> SetQueue:
    """A flag with an empty value changes its field to None."""
    words, found = _pull("set_queue", rest, SET_QUEUE_FLAGS)
    arguments = iter(words)
    queue = _queue("set_queue", arguments)
    for argument in arguments:
        _refuse_flag("set_queue", argument)
        raise BadRequest(f"set_queue: unexpected argument {shown(argument)}")
    reset = found.pop(RESET, False)
    return SetQueue(queue, {POLICY_FIELDS[flag]: value for flag, value in found.items()}, reset)


def policy_value(flag: bytes, value: object) -> Any:
    """The value of a policy field for a value as in `policy_text`. Raises BadRequest."""
    return POLICY_FLAGS[flag](policy_text(flag, value))


def policy_text(flag: bytes, value: object) -> bytes:
    """The text after the flag for a value from JSON or TOML: a number, text, a list of numbers,
    true or false. Raises BadRequest."""
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, list | tuple) and flag == BACKOFF:
        value = ",".join(map(str, value))
    if not isinstance(value, str if flag == DEAD_LETTERS else str | int | float):
        wanted = "text" if flag == DEAD_LETTERS else "a number or text"
        raise BadRequest(f"{value!r:.80} is not {wanted}")
    return str(value).encode("utf-8", "surrogateescape")


def parse_name(action: str, rest: bytes) -> bytes:
    """The one argument of delete_consumer."""
    names = _arguments(action, rest)
    if not names:
        raise BadRequest(f"{action}: the consumer id is missing")
    for name in names:
        _refuse_flag(action, name)
    if len(names) > 1:
        raise BadRequest(f"{action}: unexpected argument {shown(names[1])}")
    return names[0]


def parse_delete_queue(rest: bytes) -> tuple[bytes, DeleteRule | None]:
    arguments = iter(_arguments("delete_queue", rest))
    queue, rule = _queue("delete_queue", arguments), None
    for argument in arguments:
        flag, equals, value = argument.partition(b"=")
        if flag != b"--when-unused":
            _refuse_flag("delete_queue", argument)
            raise BadRequest(f"delete_queue: unexpected argument {shown(argument)}")
        rule = DeleteRule(_delay_s(value) if equals else None)
    return queue, rule


def parse_words(
    action: str,
    rest: bytes,
    words_max: int,
    numbers: Mapping[bytes, tuple[int, int]] | None = None,
    text: Container[bytes] = (),
    switches: Container[bytes] = (),
) -> tuple[list[bytes], dict[bytes, int], dict[bytes, bytes]]:
    """Words, and flags anywhere. `numbers`: flags with a number, and its range; `text`: flags with
    any value; `switches`: flags without a value, returned as the number 1."""
    words: list[bytes] = []
    found: dict[bytes, int] = {}
    texts: dict[bytes, bytes] = {}
    for argument in _arguments(action, rest):
        flag, equals, value = argument.partition(b"=")
        if equals and numbers and flag in numbers:
            found[flag] = parse_number(action, value, *numbers[flag])
        elif equals and flag in text:
            texts[flag] = value
        elif argument in switches:
            found[flag] = 1
        else:
            _refuse_flag(action, argument)
            words.append(argument)
    if len(words) > words_max:
        raise BadRequest(f"{action}: unexpected argument {shown(words[words_max])}")
    return words, found, texts


def parse_number(action: str, value: bytes, least: int, most: int) -> int:
    try:
        return _whole_number(value, least, most)
    except BadRequest as error:
        raise BadRequest(f"{action}: {error}") from None


def _whole_number(value: bytes, least: int, most: int) -> int:
    if not value.isdigit() or len(value) > 19 or not least <= int(value) <= most:
        raise BadRequest(f"{shown(value)} is not a whole number from {least} to {most}")
    return int(value)


def parse_auth(rest: bytes) -> tuple[bytes | None, bytes]:
    """Return user and password, or None and a token. Errors contain none of them."""
    if len(rest) > CREDENTIALS_BYTES_MAX:
        raise BadRequest(
            f"auth: the arguments have {len(rest)} bytes, the limit is {CREDENTIALS_BYTES_MAX}"
        )
    words = _arguments("auth", rest)
    if not 1 <= len(words) <= 2 or words[0].startswith(b"--"):
        raise BadRequest("auth: the arguments are not a token, or a user and a password")
    return (None if len(words) == 1 else words[0]), words[-1]


def parse_eval(rest: bytes) -> str:
    """The expression; `--worker=0` is this server, the only worker."""
    if rest.startswith(b"--worker"):
        flag, _, rest = rest.partition(b" ")
        if flag != b"--worker=0":
            raise BadRequest(f"_eval: unknown worker {shown(flag)}; there is only --worker=0")
    source = rest.decode("utf-8", "surrogateescape").strip()
    if not source:
        raise BadRequest("_eval: the expression is missing, as in: _eval len(state.queues)")
    return source


def _arguments(action: str, rest: bytes) -> list[bytes]:
    words = rest.split(b" ", WORDS_MAX)
    if len(words) > WORDS_MAX:
        raise BadRequest(f"{action}: more than {WORDS_MAX} spaces")
    return list(filter(None, words))


def _queue(action: str, arguments: Iterator[bytes]) -> bytes:
    queue = next(arguments, None)
    if queue is None:
        raise BadRequest(f"{action}: the queue is missing")
    _refuse_flag(action, queue)
    return queue


def _refuse_flag(action: str, argument: bytes) -> None:
    if argument.startswith(b"--"):
        raise BadRequest(f"{action}: unknown flag {shown(argument)}; 'help {action}' shows all")


Reader = Callable[[bytes], Any]
"""Parses the value of a flag. Raises BadRequest."""


def _take_flag(
    action: str, argument: bytes, flags: Mapping[bytes, Reader | None], found: dict[bytes, Any]
) -> None:
    """Parse one flag, which may be given once; a reader None is a flag without a value."""
    flag, equals, value = argument.partition(b"=")
    if flag not in flags:
        _refuse_flag(action, argument)
    if flag in found:
        raise BadRequest(f"{action}: {flag.decode()} is given twice")
    reader = flags[flag]
    if bool(equals) is (reader is None):
        needs = "takes no value" if equals else f"needs a value, as in {flag.decode()}=VALUE"
        raise BadRequest(f"{action}: {flag.decode()} {needs}")
    try:
        found[flag] = True if reader is None else reader(value)
    except BadRequest as error:
        raise BadRequest(f"{action}: {flag.decode()}: {error}") from None


def _pull(
    action: str, rest: bytes, flags: Mapping[bytes, Reader | None]
) -> tuple[list[bytes], dict[bytes, Any]]:
    """Remove these flags from the arguments, at any place; the others keep their order."""
    others, found = [], dict[bytes, Any]()
    for word in _arguments(action, rest):
        if word[:2] == b"--" and word.partition(b"=")[0] in flags:
            _take_flag(action, word, flags, found)
        else:
            others.append(word)
    return others, found


def _seconds(value: bytes, most: float) -> float:
    try:
        seconds = float(value) if len(value) <= 40 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= most or b"_" in value or value.strip() != value:
        raise BadRequest(f"{shown(value)} is not a number of seconds from 0 to {most:g}")
    return seconds


def _delay_s(value: bytes) -> float:
    return _seconds(value, DELETE_DELAY_S_MAX)


def _delay_us(value: bytes) -> int:
    return round(_seconds(value, DURATION_S_MAX) * 1e6)


def _time_us(value: bytes) -> int:
    return round(_seconds(value, TIME_S_MAX) * 1e6)


def _duration_s(value: bytes) -> float:
    """At least one microsecond."""
    seconds = _seconds(value, DURATION_S_MAX)
    if not seconds:
        raise BadRequest(f"{shown(value)} is not a number of seconds greater than 0")
    return max(seconds, 1e-6)


def _duration_us(value: bytes) -> int:
    return round(_duration_s(value) * 1e6)


def _name(value: bytes) -> bytes:
    if not value:
        raise BadRequest("the name is empty")
    if any(byte in value for byte in b" \t\r\n"):
        raise BadRequest(f"{shown(value)} is not a name: it contains white space")
    if value.startswith(b"--"):
        raise BadRequest(f"{shown(value)} is a flag, not a name")
    return value


def _any_name(value: bytes) -> bytes:
    """Of a queue that exists: what stands in a line is a name, whatever it holds."""
    if not value:
        raise BadRequest("a name is missing")
    if value.startswith(b"--"):
        raise BadRequest(f"{shown(value)} is a flag, not a name")
    return value


def _message_id(value: bytes) -> bytes:
    if not value:
        raise BadRequest("a message id is missing")
    return value


def _mask(value: bytes) -> bytes:
    if not 0 < len(value) <= MASK_BYTES_MAX:
        raise BadRequest(f"the mask has {len(value)} bytes; it must have 1 to {MASK_BYTES_MAX}")
    return value


def _backoff(value: bytes) -> Backoff:
    first, comma, most = value.partition(b",")
    backoff = Backoff(_duration_s(first), _duration_s(most) if comma else None)
    if backoff.max_s is not None and backoff.max_s < backoff.first_s:
        raise BadRequest(
            f"the maximum {backoff.max_s:g} is less than the first {backoff.first_s:g}"
        )
    return backoff


def _one_of(choices: Mapping[bytes, Any], value: bytes) -> Any:
    if value not in choices:
        names = " or ".join(name.decode() for name in choices)
        raise BadRequest(f"{shown(value)} is not {names}")
    return choices[value]


def _number(least: int, most: int) -> Reader:
    return partial(_whole_number, least=least, most=most)


DELAY, AT, TTL, DEAD, FATE = b"--delay", b"--at", b"--ttl", b"--dead", b"--fate"
TO, EVENT, LIMIT, RESET = b"--to", b"--event", b"--limit", b"--reset"
ID, OLDER, AFTER, QUEUE = b"--id", b"--older", b"--after", b"--queue"
PREFETCH, BACKOFF, DEAD_LETTERS = b"--prefetch", b"--backoff", b"--dead-letters"
RETRIES = b"--retries"

PUBLISH_FLAGS: dict[bytes, Reader | None] = {
    ONCE: None,
    MANDATORY: None,
    DELAY: _delay_us,
    AT: _time_us,
    TTL: _duration_us,
    META: check_meta,
    TO: _any_name,
}
CONSUME_FLAGS: dict[bytes, Reader | None] = {
    PREFETCH: _number(1, COUNT_MAX),
    BACKOFF: _backoff,
    META: None,
    EXISTING: None,
    KEEP: None,
}
SELECTION_FLAGS: dict[bytes, Reader | None] = {
    EVENT: _mask,
    ID: _message_id,
    OLDER: _delay_us,
}
REJECT_FLAGS: dict[bytes, Reader | None] = {
    **SELECTION_FLAGS,
    DELAY: _delay_us,
    DEAD: None,
    FATE: None,
    RETRIES: _number(0, COUNT_MAX),
    BACKOFF: _backoff,
}
MOVE_FLAGS: dict[bytes, Reader | None] = {**SELECTION_FLAGS, LIMIT: _number(1, SEQ_MAX)}
PEEK_FLAGS: dict[bytes, Reader | None] = {
    **SELECTION_FLAGS,
    SCHEDULED: None,
    AFTER: _number(0, SEQ_MAX),
    LIMIT: _number(1, PEEK_ROWS_MAX),
}


class PolicyField(NamedTuple):
    """A field of a policy: its name in JSON, its flag and its value after it. Requests, settings,
    journal, clients, `mqks set-queue` and the page all take it from here."""

    name: str
    flag: bytes
    read: Reader
    value: str
    """What to write, as in `N`, or all there is, as in `yes|no`."""
    help: str


_COUNT, _MOST = _number(0, COUNT_MAX), _number(1, SEQ_MAX)
_OVERFLOW = partial(_one_of, {b"reject": "reject", b"drop": "drop"})
_YES_NO = partial(_one_of, {b"yes": True, b"no": False})
POLICY = (
    PolicyField("retries", RETRIES, _COUNT, "N", "Rejects after which a message is dead."),
    PolicyField(
        "losses", b"--losses", _COUNT, "N", "Lost consumers after which a message is dead."
    ),
    PolicyField(
        "backoff",
        BACKOFF,
        _backoff,
        "FIRST[,MAX]",
        "Backoff: seconds before a redelivery; doubles up to MAX.",
    ),
    PolicyField("dead_letters", DEAD_LETTERS, _name, "QUEUE", "The queue for dead messages."),
    PolicyField("ttl_s", b"--ttl", _duration_s, "SECONDS", "Time to live of a message."),
    PolicyField("messages_max", b"--messages-max", _MOST, "N", "The most messages in the queue."),
    PolicyField("bytes_max", b"--bytes-max", _MOST, "N", "The most bytes in the queue."),
    PolicyField(
        "overflow",
        b"--overflow",
        _OVERFLOW,
        "reject|drop",
        "At a limit: reject publishes, or drop the oldest.",
    ),
    PolicyField(
        "single_consumer",
        b"--single-consumer",
        _YES_NO,
        "yes|no",
        "Deliver to one consumer at a time.",
    ),
    PolicyField(
        "ack_timeout_s",
        b"--ack-timeout",
        _duration_s,
        "SECONDS",
        "Ack timeout, after which a message is redelivered.",
    ),
)
POLICY_FLAGS = {field.flag: field.read for field in POLICY}
POLICY_FIELDS = {field.flag: field.name for field in POLICY}
"""The name of the policy field, by flag."""


def _or_none(reader: Reader, value: bytes) -> Any:
    return reader(value) if value else None


SET_QUEUE_FLAGS: dict[bytes, Reader | None] = {
    RESET: None,
    **{flag: partial(_or_none, reader) for flag, reader in POLICY_FLAGS.items()},
}


def shown(argument: bytes) -> str:
    """Quoted, as in the reason of an error."""
    return repr(argument[:80])[1:]
