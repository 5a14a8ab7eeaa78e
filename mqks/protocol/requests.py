"""The table of all actions, and lines to requests: the syntax is checked, not the meaning.

The one rule: a line that does not match its entry in `ACTIONS` raises `BadRequest`. The usage of an
action is its grammar: what it says is what is parsed. From the table come also the replies of
`help`, the permissions that a request needs, what clients check before they send, and the usages in
`docs/protocol.md` (`python -m tools.actions`).
"""

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mqks.errors import BadRequest, LimitExceeded
from mqks.limits import (
    COUNT_MAX,
    CREDENTIALS_BYTES_MAX,
    CRON_BYTES_MAX,
    DELETE_DELAY_S_MAX,
    DRAIN_S,
    DRAIN_S_MAX,
    DURATION_S_MAX,
    ESCAPED_STEP_BYTES,
    LABELS_BYTES_MAX,
    MASK_BYTES_MAX,
    MASKS_MAX,
    PEEK_ROWS_DEFAULT,
    PEEK_ROWS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    PROGRESS_BYTES_MAX,
    READ_ROWS_DEFAULT,
    READ_ROWS_MAX,
    READERS_MAX,
    RECEIVE_MAX,
    RECEIVE_WAIT_S_MAX,
    REJECT_PAUSE_S_MAX,
    SCHEDULE_BYTES_MAX,
    SEQ_MAX,
    STATS_ROWS_MAX,
    STEP_LINE_BYTES,
    TAIL_NAMES_MAX,
    TIME_S_MAX,
    TRACE_S,
    TRACE_S_MAX,
    WORDS_MAX,
)
from mqks.protocol.durations import in_seconds
from mqks.protocol.escapes import is_escaped
from mqks.protocol.masks import check_bound
from mqks.protocol.meta import check_key, check_letter, check_meta, check_reason

T = TypeVar("T")
Parsing = Generator[bool, None, T]
"""Parses in steps of about a millisecond, and yields False between them: a line may have 500,000
names."""

ALL = b"--all"
ONCE = b"--once"
CONFIRM = b"--confirm"
EXISTING, KEEP = b"--existing", b"--keep"


class Request(NamedTuple):
    """One line: its id, its action, whether a confirm is requested, and the rest, unparsed."""

    id: bytes
    action: bytes
    confirm: bool
    rest: bytes


class UniqueTerms(NamedTuple):
    """While a message of this key waits in a queue, another one is dropped, or takes its place."""

    key: bytes
    """Percent-encoded."""
    until_acked: bool = False
    """The key is held until the message is acked or dead, not only until it is delivered."""
    for_us: int = 0
    """It is held for this time at the most; 0: there is no such limit."""
    replaces: bool = False
    """Take the place of the message that holds the key."""

    @property
    def trait(self) -> bytes:
        """As in `replies.Parts`; what it does to an earlier message is over."""
        until = b",until=acked" if self.until_acked else b""
        for_s = b",for=%b" % (b"%.6f" % (self.for_us / 1e6)).rstrip(b"0").rstrip(b".")
        return b",unique=%b%b%b" % (self.key, until, for_s if self.for_us else b"")


class Publish(NamedTuple):
    event: bytes
    data: bytes
    once_s: float = 0.0
    """How long its id is remembered; 0: it is not."""
    mandatory: bool = False
    delay_us: int = 0
    at_us: int = 0
    """When it is due, in microseconds since 1970. 0: no `--at`, or due at once."""
    ttl_us: int = 0
    """0: the message has no TTL."""
    meta: bytes = b""
    to: bytes | None = None
    """The queue that gets it; None: those that are bound to the event."""
    escaped: bool = False
    priority: int = 0
    key: bytes = b""
    letter: bytes | None = None
    """The attributes of the dead letter that it becomes again; None: it becomes none."""
    keep_us: int = 0
    """How long its result is kept after its end; 0: it is not."""
    batch: bytes | None = None
    """The batch that it joins."""
    unique: UniqueTerms | None = None

    @property
    def traits(self) -> bytes:
        """See `replies.Parts`."""
        if not (self.escaped or self.priority or self.key or self.keep_us or self.unique):
            return b""
        return b"%b%b%b%b%b" % (
            b",escaped=1" if self.escaped else b"",
            b",priority=%d" % self.priority if self.priority else b"",
            b",result=1" if self.keep_us else b"",
            self.unique.trait if self.unique else b"",
            b",key=" + self.key if self.key else b"",
        )


class Backoff(NamedTuple):
    """The delay after the n-th reject is `first_s` times 2 to the n - 1, at most `max_s`."""

    first_s: float
    max_s: float | None = None


class Selection(NamedTuple):
    """Some messages of a queue: those of which all this is true."""

    event_mask: bytes | None = None
    message_id: bytes | None = None
    older_us: int | None = None
    """They came so long ago."""
    where: bytes | None = None
    """They have these attributes, percent-encoded."""


class Settle(NamedTuple):
    """An ack, reject, release or touch of one unacked message of a consumer, or of all (`ALL`)."""

    consumer: bytes
    message: bytes = ALL
    delay_us: int = 0
    dead: bool = False
    retries: int | None = None
    backoff: Backoff | None = None
    """Both apply where the policy of the queue has no value."""
    selection: Selection | None = None
    fate: bool = False
    """The confirm tells what became of the message."""
    why: bytes = b""
    """Percent-encoded; kept with the dead letter if the message dies by this."""
    pause_us: int = 0
    """A reject: its consumer gets nothing for this time."""
    for_us: int | None = None
    """A touch: the lease ends after this time; None: after the ack timeout."""
    tell: bool = False
    """An end of the consumer is told to its connection, if that is another one."""
    result: bytes | None = None
    """What the work on the message has given, told with an ack."""


class SetPrefetch(NamedTuple):
    consumer: bytes
    prefetch: int
    """0: as many as the server allows."""


class Scheduled(NamedTuple):
    """One scheduled message of a queue, or all (`ALL`)."""

    queue: bytes
    message: bytes


class CancelJob(NamedTuple):
    queue: bytes
    message: bytes
    why: bytes = b""
    """Percent-encoded."""


class WantedProgress(NamedTuple):
    consumer: bytes
    message: bytes
    percent: int
    text: bytes = b""


class WantedResult(NamedTuple):
    message: bytes
    wait_us: int = 0


class Receive(NamedTuple):
    """Some ready messages of a queue, for a lease."""

    queue: bytes
    limit: int = 1
    lease_us: int | None = None
    """None: the ack timeout of the queue, or `LEASE_S`."""
    wait_us: int = 0


class Lease(NamedTuple):
    """What is done with one message that was received: an ack, a reject, or a longer or shorter
    lease, which ends after `for_us`."""

    queue: bytes
    lease: bytes
    ack: bool = False
    reject: bool = False
    for_us: int | None = None
    undelivered: bool = False
    held: bool = False
    delay_us: int = 0
    dead: bool = False
    why: bytes = b""


class Move(NamedTuple):
    """Messages move from `source` to `to`; None: each to the queue where it died."""

    source: bytes
    to: bytes | None = None
    selection: Selection | None = None
    limit: int | None = None


class WantedTail(NamedTuple):
    queue: bytes | None
    events: list[bytes]
    masks: list[bytes]


class Purge(NamedTuple):
    queue: bytes
    selection: Selection | None = None
    limit: int | None = None
    scheduled: bool = False


class Peek(NamedTuple):
    queue: bytes
    scheduled: bool = False
    after: int = 0
    limit: int = PEEK_ROWS_DEFAULT
    selection: Selection | None = None
    soonest: bool = False
    batches: bool = False
    """The batch of each is told."""


class Range(NamedTuple):
    queue: bytes
    at_us: int | None = None
    archived: int | None = None


class Log(NamedTuple):
    """A read of a queue as a log."""

    queue: bytes
    first: int
    end: int | None = None
    limit: int = READ_ROWS_DEFAULT
    epoch: bytes | None = None
    meta: bool = False


class Trim(NamedTuple):
    queue: bytes
    seq: int
    epoch: bytes | None = None
    reader: bytes | None = None


class Stats(NamedTuple):
    words: tuple[bytes, ...]
    after: bytes = b""
    then: bytes = b""
    mask: bytes | None = None
    """The second part of the key is this mask."""
    limit: int | None = None


class SetQueue(NamedTuple):
    """`changes`: new values by policy field; None clears a field."""

    queue: bytes
    changes: dict[str, Any]
    reset: bool = False

    @property
    def dead_letters(self) -> bytes | None:
        """The queue that gets them from now on."""
        return self.changes.get("dead_letters")


@dataclass(frozen=True, slots=True)
class DeleteRule:
    """A queue is deleted when it has had no consumer for `delay_s` seconds; None: at once."""

    delay_s: float | None

    def flag(self, word: bytes = b"--delete-queue-when-unused") -> bytes:
        """As in an update."""
        return word if self.delay_s is None else b"%b=%b" % (word, str(self.delay_s).encode())


class Scheduling(NamedTuple):
    """A schedule that is added or changed, or, without `publish`, paused, resumed or run."""

    name: bytes
    cron: str = ""
    publish: Publish | None = None
    line: bytes = b""
    """That publish as it came: flags, event and data."""
    zone: str = "UTC"
    every_us: int = 0
    missed: str = "skip"
    jitter_us: int = 0
    pause: bool = False
    resume: bool = False
    run: bool = False

    @property
    def event(self) -> bytes | None:
        return None if self.publish is None else self.publish.event

    @property
    def to(self) -> bytes | None:
        return None if self.publish is None else self.publish.to


class Batching(NamedTuple):
    """A batch that is opened, or of which it is set what follows it; looked at; or closed."""

    name: bytes
    publish: Publish | None = None
    line: bytes = b""
    """That publish as it came: flags, event and data."""
    on_dead: bool = False
    """It is published instead if a message of the batch has died."""
    for_us: int = 0
    """It expires after this time; 0: as the server's settings say."""
    discard: bool = False
    restored: tuple[int, int] | None = None
    """A new one counts so many messages that are done, and dead, from the beginning."""

    @property
    def event(self) -> bytes | None:
        return None if self.publish is None else self.publish.event

    @property
    def to(self) -> bytes | None:
        return None if self.publish is None else self.publish.to


class Pausing(NamedTuple):
    """A pause of a queue, in place of an earlier one, or its end. Neither flag is both."""

    queue: bytes
    for_us: int = 0
    """It ends after this time; 0: when it is resumed."""
    deliveries: bool = False
    publishes: bool | str = False
    """`wait`: they wait, and are not refused."""


class DrainFor(NamedTuple):
    """Drain the server, and wait for so long; or deliver again."""

    timeout_s: float = DRAIN_S
    off: bool = False


class Renaming(NamedTuple):
    queue: bytes
    new: bytes


class WantedTrace(NamedTuple):
    """A trace of a queue, an event or mask, or a message id, or its end."""

    name: bytes | None = None
    """None: all of them end."""
    for_us: int = round(TRACE_S * 1e6)
    off: bool = False


class DeleteQueue(NamedTuple):
    queue: bytes
    rule: DeleteRule | None = None


@dataclass(slots=True)
class Rebind:
    queue: bytes
    replace: list[bytes] | None = None
    add: list[bytes] = field(default_factory=list)
    add_masks: list[bytes] = field(default_factory=list)
    remove: list[bytes] = field(default_factory=list)
    remove_masks: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Consume(Rebind):
    rule: DeleteRule | None = None
    manual_ack: bool = False
    prefetch: int = 0
    """The maximum of unacked messages; 0: as many as the server allows."""
    backoff: Backoff | None = None
    """For losses, where its queue has none."""
    ack_timeout_s: float | None = None
    """None: that of its queue."""
    meta: bool = False
    cancellable: bool = False
    """It is told which of its messages are to be cancelled."""
    existing: bool = False
    """The queue must exist already."""
    keep: bool = False
    """A queue that exists keeps its bindings and its rule."""


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
        # Each flag may be given once, so more of them are refused when they are parsed.
        words = rest.split(b" ", len(ACTIONS[action].flags) + 1)
        count = next((at for at, word in enumerate(words) if word[:2] != b"--"), len(words))
        flags = [word for word in words[:count] if word != CONFIRM]
        confirm = len(flags) < count
        rest = b" ".join([*flags, *words[count:]])
    return Request(request_id, action, confirm, rest)


Reader = Callable[[bytes], Any]
"""Parses a word or the value of a flag. Raises BadRequest."""
Parser = Callable[["Action", bytes, int], Any]
"""Takes the arguments of an action, and the maximum of each kind of names."""


class Flag(NamedTuple):
    field: str
    """Of the request."""
    read: Reader | None = None
    """None: it has no value."""
    bare: Any = None
    """What it means without a value; None: it needs one."""
    has_names: bool = False
    """Names follow it."""


class Action:
    """One entry of the table. In `usage`, a flag without brackets is needed, flags with a bar
    between them exclude each other, and so does the first flag of each tuple of `apart` the others
    in it."""

    def __init__(
        self,
        name: str,
        usage: str,
        result: Callable[..., Any],
        needs: Mapping[str, str] | None = None,
        *,
        apart: tuple[tuple[bytes, ...], ...] = (),
        parser: Parser | None = None,
        confirm_anywhere: bool = False,
        is_kept: bool = False,
        is_audited: bool = False,
    ) -> None:
        self.name = name
        self.usage = usage
        self.result = result
        """Takes the words, and the values of the flags by their fields."""
        self.needs = needs or {}
        """The permission for each field of the request (`id`: its id; none: for the action)."""
        self.confirm_anywhere = confirm_anywhere
        """Whether `--confirm` may stand behind other arguments."""
        self.is_kept = is_kept
        """Whether it may stand between `begin` and `commit`."""
        self.is_audited = is_audited
        """Whether there is a record of it: it changes what exists, or removes messages."""
        self.flags: dict[bytes, Flag] = {}
        self._parse = parser or _plain
        self._apart = apart
        self.words: list[str] = []
        self._needed: list[bytes] = []
        self._least = self._most = 0
        for token in _TOKEN.findall(usage):
            words = [self._add_flag(*found) for found in _FLAG.findall(token)]
            if token[:1] == "{":
                self._least += 1
            elif token[:2] == "--":
                self._needed += words
            self._apart += (tuple(words),) if len(words) > 1 else ()
            if not words:
                self.words += re.findall(r"{(\w+)}", token)
                self._most = WORDS_MAX if "..." in token else len(self.words)
        self._readers = {at: WORDS[word] for at, word in enumerate(self.words) if word in WORDS}

    def _add_flag(self, word: str, equals: str, names: str) -> bytes:
        field, read = word[2:].replace("-", "_"), None
        if equals or names:
            field, read = VALUES.get(f"{self.name} {word}") or VALUES[word]
        bare = None if equals == "=" else BARE.get(field, True)
        self.flags[word.encode()] = Flag(field, read, bare, bool(names))
        return word.encode()

    @property
    def help(self) -> str:
        return f"{self.name} [--confirm] {self.usage}".rstrip()

    def parse(self, rest: bytes, names_max: int) -> Any:
        """The request of these arguments, or Parsing of it. `names_max` is the maximum of each kind
        of names. Raises BadRequest."""
        if not (rest or self._most):
            return self.result()
        return self._parse(self, rest, names_max)

    def take(self, argument: bytes, found: dict[str, Any]) -> None:
        """Add the value of this flag, which may be given once."""
        word, equals, value = argument.partition(b"=")
        flag = self.flags.get(word)
        if flag is None or flag.has_names:
            raise self.error(f"unknown flag {shown(argument)}; 'help {self.name}' shows all")
        if flag.field in found:
            raise self.error(f"{word.decode()} is given twice")
        if equals and flag.read is None:
            raise self.error(f"{word.decode()} takes no value")
        if not equals and flag.bare is None:
            raise self.error(f"{word.decode()} needs a value, as in {word.decode()}=VALUE")
        try:
            found[flag.field] = flag.read(value) if equals and flag.read else flag.bare
        except BadRequest as error:
            raise self.error(f"{word.decode()}: {error}") from None

    def made(self, words: list[bytes], found: dict[str, Any]) -> Any:
        """The request of these words and values of flags."""
        if len(words) < self._least:
            raise self.error(f"the {self.words[len(words)]} is missing")
        if len(words) > self._most:
            raise self.error(f"unexpected argument {shown(words[self._most])}")
        for word in self._needed:
            if self.flags[word].field not in found:
                raise self.error(f"{word.decode()} is missing")
        for one, *others in self._apart:
            for other in others if self.flags[one].field in found else ():
                if self.flags[other].field in found:
                    raise self.error(f"{one.decode()} excludes {other.decode()}")
        if some := {name: found.pop(name) for name in Selection._fields if name in found}:
            found["selection"] = Selection(**some)
        try:
            values = [self._readers.get(at, bytes)(word) for at, word in enumerate(words)]
            return self.result(*values, **found)
        except BadRequest as error:
            raise self.error(error) from None

    def error(self, reason: object) -> BadRequest:
        return BadRequest(f"{self.name}: {reason}")


_TOKEN = re.compile(r"(?:\[(?:[^][]|\[[^]]*\])*\]|[^][ ])+")
"""A word or a flag with its brackets."""
_FLAG = re.compile(r"(?<!{msg_id}\|)(--[a-z-]+)(\[?=)?( {)?")


def _plain(action: Action, rest: bytes, names_max: int) -> Any:
    """Words, and flags anywhere."""
    words: list[bytes] = []
    found: dict[str, Any] = {}
    for argument in _arguments(action.name, rest):
        is_word = argument[:2] != b"--" or (len(words) == 1 and argument == ALL)
        if is_word and (argument != ALL or "--all" in action.usage):
            words.append(argument)
        else:
            action.take(argument, found)
    return action.made(words, found)


def _with_result(action: Action, rest: bytes, names_max: int) -> Any:
    """Words, then, behind the flag, data."""
    rest, has_result, data = rest.partition(b" --result=")
    wanted = _plain(action, rest, names_max)
    if has_result and wanted.message == ALL:
        raise action.error("--result is only possible with one message, not with --all")
    return wanted._replace(result=data) if has_result else wanted


def _with_text(action: Action, rest: bytes, names_max: int) -> Any:
    """Words, each ended by one space, then text."""
    return action.made([*filter(None, rest.split(b" ", len(action.words) - 1))], {})


def _with_data(action: Action, rest: bytes, names_max: int) -> Any:
    """Flags in any order, then words, each ended by one space, then data."""
    found: dict[str, Any] = {}
    head, _, data = rest.partition(b" ")
    while head[:2] == b"--" and head.partition(b"=")[0] in action.flags:
        action.take(head, found)
        rest = data
        head, _, data = rest.partition(b" ")
    if action.name != "publish":
        return action.made([rest], found)
    if head[:2] == b"--":
        action.take(head, found)
    if "escaped" in found and len(data) > ESCAPED_STEP_BYTES:
        return _long_escaped(action, head, data, found)
    return _publish(action, head, data, found, "escaped" not in found or is_escaped(data))


def _publish(
    action: Action, head: bytes, data: bytes, found: dict[str, Any], is_valid: bool
) -> Any:
    if not is_valid:
        raise action.error(r"the data have a backslash that is not one of \\, \n, \r and \t")
    return action.made([head, data] if head else [], found)


def _long_escaped(action: Action, head: bytes, data: bytes, found: dict[str, Any]) -> Parsing[Any]:
    start, is_valid = 0, True
    while start < len(data) and is_valid:
        piece = data[start : start + ESCAPED_STEP_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece += data[start + len(piece) : start + len(piece) + 1]
        is_valid = is_escaped(piece)
        start += len(piece)
        yield False
    return _publish(action, head, data, found, is_valid)


def _with_publish(action: Action, rest: bytes, names_max: int) -> Any:
    """Words and flags, then, behind the word publish, its arguments."""
    rest, is_one, line = rest.partition(b" publish ")
    if is_one and len(line) > SCHEDULE_BYTES_MAX:
        raise action.error(f"publish has {len(line)} bytes, the limit is {SCHEDULE_BYTES_MAX}")
    words: list[bytes] = []
    found: dict[str, Any] = {}
    for argument in _arguments(action.name, rest):
        if argument[:2] == b"--":
            action.take(argument, found)
        else:
            words.append(argument)
    if is_one:
        found |= {"publish": ACTIONS[b"publish"].parse(line, names_max), "line": line}
    return action.made(words, found)


def _with_names(action: Action, rest: bytes, names_max: int) -> Parsing[Any]:
    """A queue, and names behind it and behind some flags; other flags anywhere."""
    queue: bytes | None = None
    lists = {word: list[bytes]() for word, flag in action.flags.items() if flag.has_names}
    plain = list[bytes]()
    names: list[bytes] | None = plain
    found: dict[str, Any] = {}
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
                if queue is not None and word in lists:
                    names, given[word] = lists[word], None
                    continue
                action.take(word, found)
                if word.partition(b"=")[0] in CLOSING:
                    if queue is None:
                        raise action.error(f"the queue precedes {shown(word)}")
                    names = None
            elif queue is None:
                queue = word
            elif names is None:
                raise action.error(f"unexpected argument {shown(word)}; events precede the flags")
            else:
                names.append(word)
        if names and len(names) > names_max:
            raise LimitExceeded(
                "bindings_per_queue_max",
                f"{action.name}: more than {names_max} names (bindings_per_queue_max)",
            )
    for word in given:
        if not lists[word]:
            raise action.error(f"{word.decode()} needs at least one value")
    found |= {action.flags[word].field: lists[word] for word in given}
    return action.made([] if queue is None else [queue], {"replace": plain or None, **found})


def _pieces(rest: bytes) -> Iterator[bytes]:
    """Whole words, so many that splitting them takes a millisecond."""
    start = 0
    while start < len(rest):
        end = rest.find(b" ", start + STEP_LINE_BYTES)
        if end < 0:
            end = len(rest)
        yield rest[start:end]
        start = end + 1


def _credentials(action: Action, rest: bytes, names_max: int) -> Any:
    """Errors contain none of them."""
    if len(rest) > CREDENTIALS_BYTES_MAX:
        raise BadRequest(
            f"auth: the arguments have {len(rest)} bytes, the limit is {CREDENTIALS_BYTES_MAX}"
        )
    words = _arguments("auth", rest)
    if not 1 <= len(words) <= 2 or words[0].startswith(b"--"):
        raise BadRequest("auth: the arguments are not a token, or a user and a password")
    return action.result(*words)


def _arguments(action: str, rest: bytes) -> list[bytes]:
    words = rest.split(b" ", WORDS_MAX)
    if len(words) > WORDS_MAX:
        raise BadRequest(f"{action}: more than {WORDS_MAX} spaces")
    return list(filter(None, words))


def shown(argument: bytes) -> str:
    """Quoted, as in the reason of an error."""
    return repr(argument[:80])[1:]


def _number(least: int, most: int) -> Reader:
    return partial(_whole_number, least=least, most=most)


def _whole_number(value: bytes, least: int, most: int) -> int:
    if not value.isdigit() or len(value) > 19 or not least <= int(value) <= most:
        raise BadRequest(f"{shown(value)} is not a whole number from {least} to {most}")
    return int(value)


def sequence_number(value: bytes) -> int:
    """Raises BadRequest."""
    return _whole_number(value, 0, SEQ_MAX)


def _restored(value: bytes) -> tuple[int, int]:
    done, _, dead = value.partition(b",")
    return _whole_number(done, 0, COUNT_MAX), _whole_number(dead, 0, COUNT_MAX)


def _seconds(value: bytes, most: float) -> float:
    try:
        seconds = float(value) if len(value) <= 40 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= most or b"_" in value or value.strip() != value:
        raise BadRequest(f"{shown(value)} is not a number of seconds from 0 to {most:g}")
    return seconds


def _delay_us(value: bytes, most: float = DURATION_S_MAX) -> int:
    return round(_seconds(value, most) * 1e6)


def _duration_s(value: bytes, most: float = DURATION_S_MAX) -> float:
    """At least one microsecond."""
    seconds = _seconds(value, most)
    if not seconds:
        raise BadRequest(f"{shown(value)} is not a number of seconds greater than 0")
    return max(seconds, 1e-6)


def _priority(value: bytes) -> int:
    digits = value.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 3 or not PRIORITY_MIN <= int(value) <= PRIORITY_MAX:
        raise BadRequest(
            f"{shown(value)} is not a whole number from {PRIORITY_MIN} to {PRIORITY_MAX}"
        )
    return int(value)


def _name(value: bytes) -> bytes:
    if any(byte in value for byte in b" \t\r\n"):
        raise BadRequest(f"{shown(value)} is not a name: it contains white space")
    return _any_name(value)


def _any_name(value: bytes) -> bytes:
    """Of what exists: what stands in a line is a name, whatever it holds."""
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


def read_unique(value: bytes) -> UniqueTerms:
    """From the value of `--unique`, or what `Traits.unique` has of it. Raises BadRequest."""
    key, *options = value.split(b",")
    found: dict[str, Any] = {}
    for option in options:
        word, _, told = option.partition(b"=")
        if word not in _UNIQUE:
            raise BadRequest(f"{shown(option)} is not until=, for= or on=")
        name, read = _UNIQUE[word]
        if name in found:
            raise BadRequest(f"{word.decode()}= is given twice")
        found[name] = read(told)
    return UniqueTerms(check_key(key), **found)


def _or_none(reader: Reader, value: bytes) -> Any:
    return reader(value) if value else None


_UNIQUE: dict[bytes, tuple[str, Reader]] = {
    b"until": ("until_acked", partial(_one_of, {b"delivered": False, b"acked": True})),
    b"for": ("for_us", lambda value: round(_duration_s(value) * 1e6)),
    b"on": ("replaces", partial(_one_of, {b"drop": False, b"replace": True})),
}


def _rule(value: bytes) -> DeleteRule:
    return DeleteRule(_seconds(value, DELETE_DELAY_S_MAX))


def _source(value: bytes) -> str:
    source = value.decode("utf-8", "surrogateescape").strip()
    if not source:
        raise BadRequest("the expression is missing, as in: _eval len(state.queues)")
    return source


def _subscribe(queue: bytes, **bindings: Any) -> Rebind:
    """Plain events replace, the others are added."""
    if not any(bindings.values()):
        raise BadRequest("an event or a mask is missing, as in: subscribe orders order.new")
    return Rebind(queue, **bindings)


def _consume(queue: bytes, **values: Any) -> Consume:
    request = Consume(queue, **values)
    wants_acks = request.prefetch or request.backoff or request.ack_timeout_s
    if (wants_acks or request.cancellable) and not request.manual_ack:
        raise BadRequest("--prefetch, --backoff, --ack-timeout and --cancellable need --manual-ack")
    return request


def _rebind(queue: bytes, **changes: Any) -> Rebind:
    if (count := len(changes.get("remove_masks", ()))) > MASKS_MAX:
        raise BadRequest(f"--remove-mask has {count} masks, the limit is {MASKS_MAX}")
    return Rebind(queue, **changes) if any(changes.values()) else Rebind(queue, replace=[])


def _reject(consumer: bytes, message: bytes, **values: Any) -> Settle:
    if "selection" in values and message != ALL:
        raise BadRequest("--event, --id, --older and --where are only possible with --all")
    if "fate" in values and message == ALL:
        raise BadRequest("--fate is only possible with one message, not with --all")
    return Settle(consumer, message, **values)


def _progress(consumer: bytes, message: bytes, percent: int, text: bytes = b"") -> WantedProgress:
    if len(text) > PROGRESS_BYTES_MAX:
        raise BadRequest(f"the text has {len(text)} bytes, the limit is {PROGRESS_BYTES_MAX}")
    return WantedProgress(consumer, message, percent, text)


def _move(source: bytes, to: bytes | None = None, **values: Any) -> Move:
    if source == to:
        raise BadRequest(f"source and target are both {shown(source)}")
    return Move(source, to, **values)


def _lease(queue: bytes, lease: bytes, **values: Any) -> Lease:
    if not values.keys() & {"ack", "reject", "for_us", "undelivered"}:
        raise BadRequest("--ack, --reject, --for or --undelivered is missing")
    if "reject" not in values and values.keys() & {"delay_us", "dead", "why"}:
        raise BadRequest("--delay, --dead and --reason are only possible with --reject")
    if "held" in values and "ack" not in values:
        raise BadRequest("--held is only possible with --ack")
    return Lease(queue, lease, **values)


def _short_text(value: bytes) -> str:
    if len(value) > CRON_BYTES_MAX:
        raise BadRequest(f"{shown(value)} has {len(value)} bytes, the limit is {CRON_BYTES_MAX}")
    return value.decode("utf-8", "replace")


def _is_watched(publish: Publish) -> bool:
    """Whether its end matters to somebody: what is published again and again has none."""
    return bool(publish.keep_us or publish.batch)


def _schedule(name: bytes, *cron: bytes, **values: Any) -> Scheduling:
    request = Scheduling(_name(name), _short_text(b" ".join(cron)), **values)
    if request.publish is None:
        if cron or values.keys() - {"pause", "resume", "run"}:
            raise BadRequest("publish is missing, as in: schedule beat --every=10 publish beat now")
        if not values:
            raise BadRequest("publish, --pause, --resume or --run is missing")
    elif bool(cron) == bool(request.every_us):
        raise BadRequest("one of a cron expression and --every is needed")
    elif request.publish.once_s or request.publish.at_us or _is_watched(request.publish):
        raise BadRequest("--once, --at, --keep-result and --batch have no meaning in a schedule")
    return request


def _open_batch(name: bytes, *words: bytes, **values: Any) -> Batching:
    request = Batching(_name(name), **values)
    if words:
        raise BadRequest(f"unexpected argument {shown(words[0])}; publish precedes the event")
    if request.publish is None:
        if request.on_dead:
            raise BadRequest("publish is missing, as in: open_batch b --on-dead publish failed b")
    elif request.publish.once_s or request.publish.unique or _is_watched(request.publish):
        told = "--once, --unique, --keep-result and --batch"
        raise BadRequest(f"{told} have no meaning in what follows a batch")
    return request


def _tail(*words: bytes, queue: bytes | None = None) -> WantedTail:
    """A word with a star is a mask."""
    if queue is None and not words:
        raise BadRequest("an event, a mask or --queue is missing, as in: tail order.*")
    if len(words) > TAIL_NAMES_MAX:
        raise BadRequest(f"{len(words)} events and masks are given, the limit is {TAIL_NAMES_MAX}")
    masks = [word for word in words if b"*" in word]
    for mask in masks:
        check_bound(mask)
    return WantedTail(queue, [word for word in words if b"*" not in word], masks)


def _rename(queue: bytes, new: bytes) -> Renaming:
    if queue == new:
        raise BadRequest(f"{shown(new)} is its name already")
    return Renaming(queue, _name(new))


def _trace(name: bytes | None = None, **values: Any) -> WantedTrace:
    if name is None and "off" not in values:
        raise BadRequest("a queue, an event, a mask or a message id is missing")
    return WantedTrace(name, **values)


def _only(value: Any = None, worker: int = 0) -> Any:
    return value


def _readers(value: bytes) -> bytes:
    names = value.split(b",")
    if len(names) > READERS_MAX or len({*names}) < len(names):
        raise BadRequest(f"{shown(value)} are not different readers, {READERS_MAX} at most")
    for name in names:
        if not re.fullmatch(rb"[\w.-]{1,32}", name):
            raise BadRequest(f"{shown(name)} is not 1 to 32 letters, digits, dots, _ and -")
    return value


_RATE_TEXT = rb"[1-9]\d{0,8}/[smh](,[1-9]\d{0,8})?"
_LIMIT_TEXT = rb"[A-Za-z][\w.-]{0,63}(,concurrency=[1-9]\d{0,8})?(,rate=%b)?" % _RATE_TEXT


def _rate(value: bytes) -> str:
    if not re.fullmatch(_RATE_TEXT, value):
        raise BadRequest(f"{shown(value)} is not a rate, as 100/s, 100/m, 100/h or 100/s,20")
    return value.decode()


def _limit(value: bytes) -> str:
    if not re.fullmatch(_LIMIT_TEXT, value):
        raise BadRequest(f"{shown(value)} is not a limit, as api,concurrency=5,rate=100/s,20")
    return value.decode()


def _breaker(value: bytes) -> str:
    if not re.fullmatch(rb"[1-9]\d{0,8},.+", value):
        raise BadRequest(f"{shown(value)} is not a number of rejects and of seconds, as 5,30")
    _duration_s(value.partition(b",")[2])
    return value.decode()


BACKOFF = b"--backoff"
ACK_TIMEOUT = b"--ack-timeout"
CLOSING = frozenset({b"--manual-ack", b"--delete-queue-when-unused"})
"""Flags of consume that no names follow."""
WORDS: dict[str, Reader] = {
    "seq": sequence_number,
    "number": sequence_number,
    "n": _number(0, COUNT_MAX),
    "percent": _number(0, 100),
    "expression": _source,
    "switch": partial(_one_of, {b"on": True, b"off": False}),
}
"""How words are parsed that are not names."""


class PolicyField(NamedTuple):
    """A field of a policy: its name in JSON, its flag and its value after it. Requests, settings,
    journal, clients, `mqks set-queue` and the page all take it from here."""

    name: str
    read: Reader
    value: str
    """What to write, as in `N`, or all there is, as in `yes|no`."""
    help: str

    @property
    def flag(self) -> bytes:
        return b"--" + self.name.removesuffix("_s").replace("_", "-").encode()


_Kind = tuple[Reader, str]
_COUNT: _Kind = _number(0, COUNT_MAX), "N"
_MOST: _Kind = _number(1, SEQ_MAX), "N"
_SECONDS: _Kind = _duration_s, "SECONDS"
_BACKOFF: _Kind = _backoff, "FIRST[,MAX]"
_OVERFLOW: _Kind = partial(_one_of, {b"reject": "reject", b"drop": "drop"}), "reject|drop"
_TIME: _Kind = partial(_seconds, most=TIME_S_MAX), "TIME"
_YES_NO_WAIT: _Kind = (
    partial(_one_of, {b"yes": True, b"no": False, b"wait": "wait"}),
    "yes|no|wait",
)
_YES_NO: _Kind = partial(_one_of, {b"yes": True, b"no": False}), "yes|no"
_KEY: _Kind = partial(_one_of, {b"key": "key"}), "key"
_RATE: _Kind = _rate, "RATE"
_LIMIT: _Kind = _limit, "NAME[,concurrency=N][,rate=RATE]"
_BREAKER: _Kind = _breaker, "REJECTS,SECONDS"
_READERS: _Kind = _readers, "NAME[,NAME...]"
_LABELS: _Kind = (
    partial(check_meta, reserved=True, bytes_max=LABELS_BYTES_MAX),
    "KEY=VALUE[&...]",
)
_POLICY = {
    "retries": (_COUNT, "Rejects after which a message is dead."),
    "losses": (_COUNT, "Lost consumers after which a message is dead."),
    "deliveries": (_COUNT, "Deliveries after which a message is dead, however they end."),
    "backoff": (_BACKOFF, "Backoff: seconds before a redelivery; doubles up to MAX."),
    "dead_letters": ((_name, "QUEUE"), "The queue for dead messages."),
    "ttl_s": (_SECONDS, "Time to live of a message."),
    "messages_max": (_MOST, "The most messages in the queue."),
    "bytes_max": (_MOST, "The most bytes in the queue."),
    "overflow": (_OVERFLOW, "At a limit: reject publishes, or drop the oldest."),
    "single_consumer": (_YES_NO, "Deliver to one consumer at a time."),
    "ack_timeout_s": (_SECONDS, "Ack timeout, after which a message is redelivered."),
    "ordered": (_KEY, "Deliver the messages of a key in order."),
    "fair": (_KEY, "Let the keys of messages take turns."),
    "paused": (_YES_NO, "Deliver nothing; publishes go on."),
    "publishes_paused": (_YES_NO_WAIT, "Refuse publishes, or let them wait; deliveries go on."),
    "paused_until_s": (_TIME, "When both end, in seconds since 1970."),
    "concurrency": (_MOST, "The most unacked and leased messages, whoever holds them."),
    "rate": (_RATE, "The most deliveries, as 100/s, 100/m or 100/h; with a burst, 100/s,20."),
    "concurrency_per_key": (_MOST, "The most unacked and leased messages of each key."),
    "rate_per_key": (_RATE, "The most deliveries of each key, as for --rate."),
    "limit": (_LIMIT, "A limit for all queues that name it together."),
    "breaker": (
        _BREAKER,
        "After so many rejects in a row, a delivery every SECONDS until an ack.",
    ),
    "readers": (_READERS, "Trim the queue only up to where the slowest of these is."),
    "labels": (_LABELS, "Labels, for people and programs that manage queues."),
}
POLICY = [PolicyField(name, *kind, help) for name, (kind, help) in _POLICY.items()]
POLICY_FLAGS = {field.flag: field.read for field in POLICY}
DURATIONS = frozenset((BACKOFF, b"--ttl", b"--ack-timeout"))
POLICY_FIELDS = {field.flag: field.name for field in POLICY}
"""The name of the policy field, by flag."""
BARE = {"once_s": math.inf, "rule": DeleteRule(None)}
"""What flags mean without the value that they may have, by their field."""
VALUES: dict[str, tuple[str, Reader]] = {
    **{each.flag.decode(): (each.name, each.read) for each in POLICY},
    "--add": ("add", bytes),
    "--add-mask": ("add_masks", bytes),
    "--after": ("after", sequence_number),
    "--batch": ("batch", _any_name),
    "--at": ("at_us", partial(_delay_us, most=TIME_S_MAX)),
    "--delay": ("delay_us", _delay_us),
    "--delete-queue-when-unused": ("rule", _rule),
    "--epoch": ("epoch", bytes),
    "--event": ("event_mask", _mask),
    "--every": ("every_us", lambda value: max(1_000_000, round(_duration_s(value) * 1e6))),
    "--for": ("for_us", _delay_us),
    "--from": ("first", sequence_number),
    "--id": ("message_id", _message_id),
    "--jitter": ("jitter_us", _delay_us),
    "--keep-result": ("keep_us", lambda value: round(_duration_s(value) * 1e6)),
    "--key": ("key", check_key),
    "--lease": ("lease_us", _delay_us),
    "--limit": ("limit", _number(1, SEQ_MAX)),
    "--mask": ("mask", bytes),
    "--meta": ("meta", check_meta),
    "--missed": ("missed", partial(_one_of, {b"skip": "skip", b"one": "one"})),
    "--older": ("older_us", _delay_us),
    "--once": ("once_s", _duration_s),
    "--priority": ("priority", _priority),
    "--prefetch": ("prefetch", _number(1, COUNT_MAX)),
    "--queue": ("queue", _any_name),
    "--reader": ("reader", bytes),
    "--reason": ("why", check_reason),
    "--remove": ("remove", bytes),
    "--result": ("result", bytes),
    "--remove-mask": ("remove_masks", bytes),
    "--then": ("then", bytes),
    "--timeout": ("timeout_s", partial(_seconds, most=DRAIN_S_MAX)),
    "--to": ("to", _any_name),
    "--tz": ("zone", _short_text),
    "--unique": ("unique", read_unique),
    "--wait": ("wait_us", partial(_delay_us, most=RECEIVE_WAIT_S_MAX)),
    "--when-unused": ("rule", _rule),
    "--where": ("where", partial(check_meta, reserved=True)),
    "--worker": ("worker", partial(_one_of, {b"0": 0})),
    "open_batch --restored": ("restored", _restored),
    "open_batch --for": ("for_us", lambda value: round(_duration_s(value) * 1e6)),
    "pause --for": ("for_us", lambda value: round(_duration_s(value) * 1e6)),
    "pause --publishes": ("publishes", partial(_one_of, {b"wait": "wait"})),
    "peek --limit": ("limit", _number(1, PEEK_ROWS_MAX)),
    "publish --dead-letter": ("letter", check_letter),
    "publish --ttl": ("ttl_us", lambda value: round(_duration_s(value) * 1e6)),
    "range --at": ("at_us", sequence_number),
    "range --archived": ("archived", sequence_number),
    "read --limit": ("limit", _number(1, READ_ROWS_MAX)),
    "read --to": ("end", sequence_number),
    "reject --pause": ("pause_us", partial(_delay_us, most=REJECT_PAUSE_S_MAX)),
    "receive --limit": ("limit", _number(1, RECEIVE_MAX)),
    "trace --for": ("for_us", lambda value: round(_duration_s(value, TRACE_S_MAX) * 1e6)),
    "batches --after": ("after", bytes),
    "batches --limit": ("limit", _number(1, STATS_ROWS_MAX)),
    "schedules --after": ("after", bytes),
    "schedules --limit": ("limit", _number(1, STATS_ROWS_MAX)),
    "stats --after": ("after", bytes),
    "stats --limit": ("limit", _number(1, STATS_ROWS_MAX)),
    **{
        f"set_queue {each.flag.decode()}": (each.name, partial(_or_none, each.read))
        for each in POLICY
    },
}
"""The field and the parser of each flag with a value; of one action, where they differ."""

ONE_OR_ALL = "{consumer_id} {msg_id}|--all"
SCHEDULED_ONE = "{queue} {msg_id}|--all"
ADD = "[--add {event} ...] [--add-mask {mask} ...]"
SELECTION = "[--event={mask}] [--id={msg_id}] [--older={seconds}] [--where={meta}]"
CHOICE = f"{SELECTION} [--limit={{n}}]"
OF_QUEUE, OF_CONSUMER, READS = {"queue": "consume"}, {"consumer": "consumer"}, {"queue": "read"}
BINDS = {"queue": "consume", "replace": "bind", "add": "bind", "add_masks": "bind"}
MOVES = {"source": "consume", "to": "consume"}
ADMIN = {"": "admin"}

_TABLE = (
    Action(
        "publish",
        "[--once[={seconds}]] [--mandatory] [--delay={seconds}|--at={time}] [--ttl={seconds}] "
        "[--meta={key}={value}[&...]] [--to={queue}] [--escaped] [--priority={n}] [--key={key}] "
        "[--unique={key}[,until=delivered|acked][,for={seconds}][,on=drop|replace]] "
        "[--dead-letter={meta}] [--keep-result={seconds}] [--batch={name}] {event} {data}",
        Publish,
        {"event": "publish", "to": "consume", "letter": "admin", "batch": "batch"},
        parser=_with_data,
        # A duplicate has no end of its own.
        apart=((b"--unique", b"--keep-result", b"--batch"),),
        is_kept=True,
    ),
    Action(
        "subscribe",
        "{queue} [{event} ...] " + ADD,
        _subscribe,
        BINDS,
        parser=_with_names,
        is_audited=True,
    ),
    Action(
        "consume",
        f"{{queue}} [{{event}} ...] {ADD} "
        "[--delete-queue-when-unused[={seconds}]] [--manual-ack] [--prefetch={n}] "
        "[--backoff={first}[,{max}]] [--ack-timeout={seconds}] [--meta] [--cancellable] "
        "[--existing] [--keep]",
        _consume,
        {**BINDS, "id": "consumer"},
        parser=_with_names,
        is_audited=True,
    ),
    Action(
        "rebind",
        "{queue} [{event} ...] [--remove {event} ...] [--remove-mask {mask} ...] " + ADD,
        _rebind,
        BINDS,
        parser=_with_names,
        is_audited=True,
    ),
    Action(
        "ack",
        ONE_OR_ALL + " [--result={data}]",
        Settle,
        OF_CONSUMER,
        parser=_with_result,
        is_kept=True,
    ),
    Action(
        "reject",
        ONE_OR_ALL + " [--dead] [--retries={n}] [--delay={seconds}|--backoff={first}[,{max}]] "
        f"{SELECTION} [--reason={{text}}] [--fate] [--pause={{seconds}}]",
        _reject,
        OF_CONSUMER,
        apart=((b"--dead", b"--delay", b"--retries", BACKOFF),),
        is_kept=True,
    ),
    Action(
        "release",
        ONE_OR_ALL + " [--delay={seconds}]",
        Settle,
        OF_CONSUMER,
        confirm_anywhere=True,
        is_kept=True,
    ),
    Action("touch", ONE_OR_ALL + " [--for={seconds}]", Settle, OF_CONSUMER, confirm_anywhere=True),
    Action(
        "progress",
        "{consumer_id} {msg_id} {percent} [{text}]",
        _progress,
        OF_CONSUMER,
        parser=_with_text,
    ),
    Action(
        "cancel_job",
        "{queue} {msg_id} [--reason={text}]",
        CancelJob,
        OF_QUEUE,
        confirm_anywhere=True,
        is_audited=True,
    ),
    Action("result", "{msg_id} [--wait={seconds}]", WantedResult, {"message": "result"}),
    Action("set_prefetch", "{consumer_id} {n}", SetPrefetch, OF_CONSUMER, confirm_anywhere=True),
    Action("begin", "", _only),
    Action("commit", "", _only),
    Action("rollback", "", _only),
    Action(
        "receive", "{queue} [--limit={n}] [--lease={seconds}] [--wait={seconds}]", Receive, OF_QUEUE
    ),
    Action(
        "lease",
        "{queue} {lease} [--ack|--reject|--for={seconds}|--undelivered] [--held] "
        "[--delay={seconds}|--dead] [--reason={text}]",
        _lease,
        OF_QUEUE,
        confirm_anywhere=True,
    ),
    Action("cancel", SCHEDULED_ONE, Scheduled, OF_QUEUE, confirm_anywhere=True, is_audited=True),
    Action("promote", SCHEDULED_ONE, Scheduled, OF_QUEUE, confirm_anywhere=True, is_audited=True),
    Action(
        "move",
        "{queue} {queue} " + CHOICE,
        _move,
        MOVES,
        confirm_anywhere=True,
        is_kept=True,
        is_audited=True,
    ),
    Action(
        "redrive",
        "{queue} [--to={queue}] " + CHOICE,
        _move,
        MOVES,
        confirm_anywhere=True,
        is_kept=True,
        is_audited=True,
    ),
    Action("delete_consumer", "{consumer_id} [--tell]", Settle, OF_CONSUMER, is_audited=True),
    Action(
        "delete_queue", "{queue} [--when-unused[={seconds}]]", DeleteQueue, ADMIN, is_audited=True
    ),
    Action(
        "set_queue",
        "{queue} [--retries={n}] [--losses={n}] [--deliveries={n}] [--backoff={first}[,{max}]] "
        "[--dead-letters={queue}] [--ttl={seconds}] [--messages-max={n}] [--bytes-max={n}] "
        "[--overflow=reject|drop] [--single-consumer=yes|no] [--ack-timeout={seconds}] "
        "[--ordered=key] [--fair=key] [--paused=yes|no] [--publishes-paused=yes|no|wait] "
        "[--paused-until={time}] [--concurrency={n}] [--rate={rate}] "
        "[--concurrency-per-key={n}] [--rate-per-key={rate}] [--breaker={n},{seconds}] "
        "[--limit={name}[,concurrency={n}][,rate={rate}]] [--readers={name}[,...]] "
        "[--labels={key}={value}[&...]] [--reset]",
        lambda queue, reset=False, **changes: SetQueue(queue, changes, reset),
        {"queue": "consume", "dead_letters": "consume"},
        confirm_anywhere=True,
        is_audited=True,
    ),
    Action(
        "pause",
        "{queue} [--for={seconds}] [--deliveries|--publishes[=wait]]",
        Pausing,
        OF_QUEUE,
        confirm_anywhere=True,
        is_audited=True,
    ),
    Action("resume", "{queue}", Pausing, OF_QUEUE, confirm_anywhere=True, is_audited=True),
    Action("rename", "{queue} {queue}", _rename, ADMIN, confirm_anywhere=True, is_audited=True),
    Action(
        "purge",
        "{queue} [--scheduled] " + CHOICE,
        Purge,
        ADMIN,
        apart=((b"--scheduled", b"--event", b"--id", b"--older", b"--where", b"--limit"),),
        is_audited=True,
    ),
    Action(
        "peek",
        "{queue} [--scheduled|--soonest] [--after={seq}] [--batches] " + CHOICE,
        Peek,
        READS,
        apart=((b"--soonest", b"--after", b"--event", b"--id", b"--older", b"--where"),),
    ),
    Action(
        "tail",
        "[--queue={queue}] [{event}|{mask} ...]",
        _tail,
        {**READS, "events": "bind", "masks": "bind"},
    ),
    Action("range", "{queue} [--at={microseconds}] [--archived={seq}]", Range, READS),
    Action(
        "read",
        "{queue} --from={seq} [--to={seq}] [--limit={n}] [--epoch={epoch}] [--meta]",
        Log,
        READS,
    ),
    Action(
        "trim",
        "{queue} {seq} [--epoch={epoch}] [--reader={name}]",
        Trim,
        OF_QUEUE,
        is_kept=True,
        is_audited=True,
    ),
    Action(
        "stats",
        "[{what} [{name}]] [--after={key}] [--then={key}|--mask={mask}] [--limit={n}]",
        lambda *words, **values: Stats(words, **values),
        {"words": "monitoring"},
    ),
    Action(
        "schedule",
        "{name} [{cron} ...] [--every={seconds}] [--tz={zone}] [--missed=skip|one] "
        "[--jitter={seconds}] [--pause|--resume|--run] [publish [{flag} ...] {event} {data}]",
        _schedule,
        {"event": "publish", "to": "consume", "name": "schedule"},
        parser=_with_publish,
        is_audited=True,
    ),
    Action(
        "schedules",
        "[--after={name}] [--limit={n}]",
        partial(Stats, (b"schedules",)),
        {"": "monitoring"},
    ),
    Action("unschedule", "{name}", Scheduling, {"name": "schedule"}, is_audited=True),
    Action(
        "open_batch",
        "{name} [--for={seconds}] [--on-dead] [--restored={done},{dead}] "
        "[publish [{flag} ...] {event} {data}]",
        _open_batch,
        {"event": "publish", "to": "consume", "name": "batch", "restored": "admin"},
        parser=_with_publish,
        is_kept=True,
        is_audited=True,
    ),
    Action(
        "close_batch",
        "{name} [--discard]",
        Batching,
        {"name": "batch"},
        confirm_anywhere=True,
        is_kept=True,
        is_audited=True,
    ),
    Action("batch", "{name}", Batching, {"name": "batch"}),
    Action(
        "batches",
        "[--after={name}] [--limit={n}]",
        partial(Stats, (b"batches",)),
        {"": "monitoring"},
    ),
    Action(
        "trace",
        "[{name}] [--for={seconds}|--off]",
        _trace,
        ADMIN,
        confirm_anywhere=True,
        is_audited=True,
    ),
    Action("help", "[{action}]", _only),
    Action("auth", "{token} | {user} {password}", lambda *words: words, parser=_credentials),
    Action("set_name", "{name}", _only),
    Action("close_connection", "{number}", _only, ADMIN, confirm_anywhere=True, is_audited=True),
    Action("read_only", "{switch}", _only, ADMIN, confirm_anywhere=True, is_audited=True),
    Action("reload", "", _only, ADMIN, confirm_anywhere=True, is_audited=True),
    Action(
        "drain",
        "[--timeout={seconds}|--off]",
        DrainFor,
        ADMIN,
        confirm_anywhere=True,
        is_audited=True,
    ),
    Action("ping", "{data}", _only, parser=_with_data),
    Action("_eval", "[--worker=0] {expression}", _only, {"": "eval"}, parser=_with_data),
)
ACTIONS = {action.name.encode(): action for action in _TABLE}
CONFIRM_ANYWHERE = frozenset(name for name, action in ACTIONS.items() if action.confirm_anywhere)


def policy_value(word: bytes, value: object) -> Any:
    """The value of a policy field for a value as in `policy_text`. Raises BadRequest."""
    return POLICY_FLAGS[word](policy_text(word, value))


def policy_text(word: bytes, value: object) -> bytes:
    """The text after the flag for a value from JSON or TOML: a number, text (durations also with
    units), a list of numbers, true or false. Raises BadRequest."""
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, list | tuple) and word == BACKOFF:
        value = ",".join(map(str, value))
    if isinstance(value, str) and word in DURATIONS:
        value = ",".join(map(in_seconds, value.split(",")))
    is_name = word == b"--dead-letters"
    if not isinstance(value, str if is_name else str | int | float):
        raise BadRequest(f"{value!r:.80} is not {'text' if is_name else 'a number or text'}")
    return str(value).encode("utf-8", "surrogateescape")
