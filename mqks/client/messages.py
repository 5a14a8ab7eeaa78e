"""The messages of consumers and of `peek`, and updates of bindings.

The one rule: nothing is decoded before it is used.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Unpack
from urllib.parse import unquote, unquote_to_bytes

from mqks.client.errors import InvalidRequest
from mqks.client.keywords import renamed, strict
from mqks.client.requests import (
    Backoff,
    Data,
    Sent,
    ack,
    decoded,
    flags,
    is_number,
    progress,
    reject,
    unexpected,
)
from mqks.protocol.escapes import unescape
from mqks.protocol.meta import split_dead_letter
from mqks.protocol.replies import ESCAPED, read_traits

Settle = Callable[["Message", bytes], None]

_TRAITS = rb"((?:,escaped=1)?(?:,priority=-?\d{1,3})?(?:,result=1)?"
_TRAITS += rb"(?:,unique=[^ ,]+(?:,until=acked)?(?:,for=[\d.]+)?)?(?:,key=[^ ,]+)?)"
_PEEKED = re.compile(
    rb"event=(.*?)(?:,retry=(\d+))?" + _TRAITS + rb"(?:,meta=([^ ,]+))?"
    rb",seq=(\d+),time=(\d+)(?:,due=(\d+\.\d{3}))?(?:,lease=([^ ,]+))?"
    rb"(?:,batch=([^ ,]+))?"
)
_TOLD_ALL = re.compile(rb"event=(.*),retry=(\d+)" + _TRAITS + rb",meta=[^ ,]*")


class DeadLetter(NamedTuple):
    """Why a message is in a dead-letter queue."""

    reason: str
    """rejects, losses, deliveries, ttl, overflow or dead."""
    queue: str
    """Where it died."""
    tries: int
    """The number of deliveries there."""
    published: float
    """Seconds since 1970, like `died`."""
    died: float
    why: str | None = None
    """The reason that its consumer gave with the reject by which it died, as in
    `ValueError: no such customer`."""


@strict()
class Message:
    """One delivery to a consumer."""

    __slots__ = ("_cancel", "_event", "_id", "_settle", "_step", "consumer_id", "data")

    _loads: ClassVar[Any] = staticmethod(json.loads)

    def __init__(
        self,
        consumer_id: bytes,
        message_id: bytes,
        event: bytes,
        data: bytes,
        settle: Settle | None,
    ) -> None:
        self.consumer_id = consumer_id
        """The id of the consumer that got it; each reconnect has a new one."""
        self.data = data
        """The bytes as they were published, whether or not they went escaped."""
        self._id = message_id
        self._event = event  # as on the wire: event=NAME[,retry=N][,escaped=1]
        self._settle = settle
        self._step: Any
        self._cancel: str

    @property
    def id(self) -> str:
        return decoded(self._id)

    @property
    def event(self) -> str:
        return decoded(self._split_event()[0])

    @property
    def retry(self) -> int:
        """How often it was redelivered."""
        return self._split_event()[1]

    @classmethod
    def unescaped(cls, event: bytes, data: bytes) -> bytes:
        """The original data of a delivery with this event on the wire."""
        return unescape(data) if event.endswith(ESCAPED) else data

    def _split_event(self) -> tuple[bytes, int]:
        told = self._event[len(b"event=") :].removesuffix(ESCAPED)
        name, comma, retry = told.rpartition(b",retry=")
        return (name, int(retry)) if comma and is_number(retry) else (told, 0)

    @property
    def priority(self) -> int:
        """The priority it was published with; 0 if the consumer has no `meta`."""
        return read_traits(self._traits()).priority

    @property
    def key(self) -> str | None:
        """The key it was published with; None without one, or if the consumer has no `meta`."""
        return key_of(self._traits())

    @property
    def unique(self) -> str | None:
        """The key that it may hold (`publish(unique=…)`); None without one, or if the consumer has
        no `meta`."""
        return unique_of(self._traits())

    @property
    def meta(self) -> dict[str, str]:
        """The attributes it was published with; empty if the consumer has no `meta`."""
        return attributes(self._raw_meta())[0]

    @property
    def dead_letter(self) -> DeadLetter | None:
        """Why a dead letter died; else None, also without `meta`."""
        return attributes(self._raw_meta())[1]

    @property
    def letter(self) -> DeadLetter | None:
        """Deprecated: `dead_letter`."""
        renamed("letter", "dead_letter", 3)
        return self.dead_letter

    @property
    def reply_to(self) -> str | None:
        """The event for a reply."""
        return self.meta.get("reply-to")

    @property
    def correlation_id(self) -> str | None:
        """The id that a reply repeats."""
        return self.meta.get("correlation-id")

    @property
    def traceparent(self) -> str | None:
        """Its trace (W3C Trace Context)."""
        return self.meta.get("traceparent")

    @property
    def wants_result(self) -> bool:
        """Whether somebody keeps the result of its ack; False if the consumer has no `meta`."""
        return b",result=1" in self._traits()

    @property
    def cancelled(self) -> bool:
        """Whether somebody has asked to cancel it since it was delivered to this consumer, which
        was started with `cancellable`. Any thread may look."""
        return self.cancel_reason is not None

    @property
    def cancel_reason(self) -> str | None:
        """The reason that was given, which may be empty; None if it is not to be cancelled."""
        return getattr(self, "_cancel", None)

    def _traits(self) -> bytes:
        return b""

    def _raw_meta(self) -> bytes:
        return b""

    @property
    def text(self) -> str:
        """The data as UTF-8; raises UnicodeDecodeError."""
        return self.data.decode()

    def json(self) -> Any:
        """The data as JSON; raises ValueError, mostly a json.JSONDecodeError."""
        try:
            return self._loads(self.data)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None

    def ack(self, *, result: Data = None) -> None:
        """The message is done. Sent together with other acks, a moment later. A `result` is sent
        as JSON, and kept if the message was published with `keep_result_s`.

        Only the first ack, reject or release counts. After a reconnect it has no effect, since the
        message has returned to its queue. Raises InvalidRequest with `auto_ack`.
        """
        self._settle_once(ack(result))

    def progress(self, percent: int, text: str = "") -> None:
        """Tell how far the work on it is, from 0 to 100, with a text of at most 200 bytes, and
        start its ack timeout again. Raises InvalidRequest with `auto_ack`."""
        self._tell(progress(percent, text))

    def reject(
        self,
        *,
        delay_s: float | None = None,
        dead: bool = False,
        retries: int | None = None,
        backoff: Backoff | None = None,
        reason: str | BaseException | None = None,
    ) -> None:
        """Return it to the end of its queue, after `delay_s` if given; `dead` makes it dead. It is
        redelivered with `retry` increased by one. Otherwise as `ack`.

        `retries` and `backoff` are as in `set_queue`, and apply if the queue's policy does not set
        them. If it is dead by this, its dead letter has the `reason`: at most 512 bytes of UTF-8,
        or an exception, of which what fits is kept.
        """
        self._settle_once(reject(delay_s, dead, retries, backoff, reason))

    def release(self, *, delay_s: float | None = None) -> None:
        """Return it to its old place, as if it had not been delivered, after `delay_s` if given.
        Otherwise as `ack`."""
        self._settle_once(b" ".join([b"release", *flags("release", {"delay_s": delay_s})]))

    def publish(self, event: str, data: Data, **options: Unpack[Sent]) -> str:
        """In a service with `atomic=True`: publish a message together with the ack of this one, and
        return its id. The options are those of `client.publish`. Raises InvalidRequest elsewhere.
        """
        step = getattr(self, "_step", None)
        if step is None:
            raise InvalidRequest("message.publish is for a service with atomic=True")
        return str(step.publish(event, data, **options))

    def touch(self, *, for_s: float | None = None) -> None:
        """Start its ack timeout again, or set it to `for_s` seconds from now, also where there is
        none. It stays unacked; but with 0 it returns to its old place at once, which counts as a
        try, not as a loss."""
        action = b" ".join([b"touch", *flags("touch", {"for_s": for_s})])
        if for_s == 0:
            self._settle_once(action)
        else:
            self._tell(action)

    def _tell(self, action: bytes) -> None:
        if self._settle is None:
            raise InvalidRequest("this consumer was started with auto_ack")
        self._settle(self, action)

    def _settle_once(self, action: bytes) -> None:
        settle, self._settle = self._settle, settled
        if settle is None:
            self._settle = None
            raise InvalidRequest("this consumer was started with auto_ack")
        settle(self, action)

    def process(self) -> "Processing":
        """For `async with` or `with`: acks at the end, rejects on an exception and raises it.
        Releases if the block is cancelled or interrupted (KeyboardInterrupt, SystemExit)."""
        if self._settle is None:
            raise InvalidRequest("this consumer was started with auto_ack")
        return Processing(self)

    def __repr__(self) -> str:
        return f"<Message {self.id} event={self.event} retry={self.retry} {self.data[:40]!r}>"


class MetaMessage(Message):
    """A delivery to a consumer with `meta`."""

    __slots__ = ()

    @classmethod
    def unescaped(cls, event: bytes, data: bytes) -> bytes:
        return original(_told_all(event)[2], data)

    def _split_event(self) -> tuple[bytes, int]:
        name, retry, _ = _told_all(self._event)
        return name, int(retry)

    def _traits(self) -> bytes:
        return _told_all(self._event)[2]

    def _raw_meta(self) -> bytes:
        return self._event.rpartition(b",meta=")[2]


def _told_all(event: bytes) -> tuple[bytes, bytes, bytes]:
    """Event, retry and traits of a delivery with `meta`. Raises ProtocolViolation."""
    found = _TOLD_ALL.fullmatch(event)
    if found is None:
        raise unexpected(event, "an event")
    return found[1], found[2], found[3]


def original(traits: bytes, data: bytes) -> bytes:
    """The bytes of a message with these traits whose data are these on the wire."""
    return unescape(data) if traits.startswith(ESCAPED) else data


def unique_of(traits: bytes) -> str | None:
    key = read_traits(traits).unique.partition(b",")[0]
    return unquote(decoded(key), errors="surrogateescape") if key else None


def key_of(traits: bytes) -> str | None:
    raw = read_traits(traits).key
    return unquote(decoded(raw), errors="surrogateescape") if raw else None


def reading(kind: type[Message], loads: Callable[[bytes], Any] | None) -> type[Message]:
    """Messages of this kind which read JSON with this function; None: with `json.loads`."""
    if loads is None:
        return kind
    return type(kind.__name__, (kind,), {"__slots__": (), "_loads": staticmethod(loads)})


class PeekedMessage(NamedTuple):
    """A message in a queue: ready, scheduled or unacked; or one that was received."""

    seq: int
    """Its sequence number."""
    time: float
    """When it was added to the queue, in seconds since 1970, like `due`."""
    id: str
    event: str
    data: bytes
    retry: int
    meta: dict[str, str]
    dead_letter: DeadLetter | None
    due: float | None
    """When a scheduled message is added to the queue."""
    priority: int = 0
    key: str | None = None
    lease: str | None = None
    """Of a message that was received: what it is acked by."""
    unique: str | None = None
    """The key that it may hold, see `publish`."""

    @property
    def letter(self) -> DeadLetter | None:
        """Deprecated: `dead_letter`."""
        renamed("letter", "dead_letter", 3)
        return self.dead_letter

    @property
    def text(self) -> str:
        """The data as UTF-8; raises UnicodeDecodeError."""
        return self.data.decode()

    @classmethod
    def parse(cls, line: bytes) -> "PeekedMessage":
        """From a line of the reply to `peek`. Raises ProtocolViolation."""
        told = peeked(line)
        meta, dead_letter = attributes(told.meta)
        due_s = told.due_us / 1e6 if told.due_us else None
        names = decoded(told.id), decoded(told.event)
        data = original(told.traits, told.data)
        what = *names, data, told.retry, meta, dead_letter, due_s
        traits = read_traits(told.traits).priority, key_of(told.traits)
        lease = decoded(told.lease) or None
        return cls(told.seq, told.time_us / 1e6, *what, *traits, lease, unique_of(told.traits))


class JobState(NamedTuple):
    """What has become of a message that was published with `keep_result_s`."""

    state: str
    """waiting, running, done, dead, cancelled, gone (how it ended is unknown), or none: it is not
    known, or no more."""
    queue: str | None = None
    """Where it is, or has ended."""
    progress: int | None = None
    """In percent, as its consumer has told it last."""
    text: str = ""
    """What was told with the progress."""
    reason: str = ""
    """Why it is dead or cancelled."""
    data: bytes | None = None
    """The result of its ack as it was sent."""

    @property
    def has_ended(self) -> bool:
        return self.state not in ("waiting", "running")

    @classmethod
    def parse(cls, answer: bytes) -> "JobState":
        """From the reply to `result`. Raises ProtocolViolation."""
        state, _, rest = answer.partition(b" ")
        queue, has_more, more = rest.partition(b" ")
        told = decoded(state), decoded(queue) or None
        if state == b"done":
            return cls(*told, data=more if has_more else None)
        if state == b"running":
            percent, _, text = more.partition(b" ")
            if percent and not is_number(percent):
                raise unexpected(answer, "a progress")
            return cls(*told, progress=int(percent) if percent else None, text=decoded(text))
        return cls(*told, reason=unquote(decoded(more), errors="surrogateescape"))


class _Peek(NamedTuple):
    """A line of `peek` or `receive`."""

    id: bytes
    event: bytes
    data: bytes
    retry: int
    traits: bytes
    """As in `replies.Parts`."""
    meta: bytes
    seq: int
    time_us: int
    due_us: int
    lease: bytes
    batch: bytes
    """Told only by a `peek` that asks for it."""


def peeked(line: bytes) -> _Peek:
    """Raises ProtocolViolation."""
    message_id, _, rest = line.partition(b" ")
    attributes, _, data = rest.partition(b" ")
    found = _PEEKED.fullmatch(attributes)
    if found is None:
        raise unexpected(line, "a message")
    event, retry, traits, meta, seq, time_us, due_s, lease, batch = found.groups()
    numbers = int(seq), int(time_us), round(float(due_s or 0) * 1e6)
    told = data, int(retry or 0), traits, meta or b""
    batch = unquote_to_bytes(batch or b"")
    return _Peek(message_id, event, *told, *numbers, lease or b"", batch)


def attributes(meta: bytes) -> tuple[dict[str, str], DeadLetter | None]:
    """The attributes of a message, and what the broker added to a dead letter. Raises
    ProtocolViolation."""
    own, values = split_dead_letter(meta)
    pairs = {
        unquote(key, errors="surrogateescape"): unquote(value, errors="surrogateescape")
        for key, _, value in (pair.partition("=") for pair in decoded(own).split("&") if pair)
    }
    if values is None:
        return pairs, None
    reason, queue, tries, published, died, why = values
    where, told = (unquote(decoded(each), errors="surrogateescape") for each in (queue, why))
    try:
        times = float(published), float(died)
        return pairs, DeadLetter(decoded(reason), where, int(tries), *times, told or None)
    except ValueError:
        raise unexpected(meta, "a dead letter") from None


def settled(message: Message, action: bytes) -> None:
    """Replaces the function of a message after its first ack, reject or release: does nothing."""


class Processing:
    """A message while it is processed; a context manager of both kinds."""

    __slots__ = ("_message",)

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> Message:
        return self._message

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._message.ack()
        elif isinstance(error, Exception):
            self._message.reject(reason=error)
        else:  # Its task was cancelled, or its process is to end: the message has not failed.
            self._message.release()

    async def __aenter__(self) -> Message:
        return self._message

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.__exit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class QueueUpdate:
    """The current bindings of a queue, and its delete rule."""

    queue: str
    events: list[str]
    delete_when_unused: float | bool
    """Seconds; True: at once; False: no rule."""
    masks: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, text: bytes) -> "QueueUpdate":
        """From what follows `--update` on the wire. Raises ProtocolViolation."""
        queue, *words = decoded(text).split(" ")
        rule: float | bool = False
        events, masks = list[str](), list[str]()
        names = events
        for word in words:
            if word == "--add-mask":
                names = masks
            elif not word.startswith("--"):
                names.append(word)
            flag, equals, seconds = word.partition("=")
            if flag == "--delete-queue-when-unused":
                try:
                    rule = float(seconds) if equals else True
                except ValueError:
                    raise unexpected(word, "a delete rule") from None
        return cls(queue, events, rule, masks)
