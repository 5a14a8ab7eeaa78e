"""One connection of a client over all its lives: requests out, replies in, when to come back.

Bytes that came go into `receive`, bytes to send come out of `take`. Whoever owns the socket tells
`connected` and `lost`, which answers how long to wait before the next attempt, and calls `tick` at
the `deadline`. Each life begins with a greeting (`auth`, or a ping where there are no credentials);
nothing else is sent before it is answered. Then goes what has no answer yet, under its old ids.

The one rule: no sockets, no clock, no chance. Times are passed in, as are jitter and ids' prefix.
"""

import logging
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import accumulate, count, starmap
from math import inf
from typing import Any
from urllib.parse import unquote

from mqks.client import failures, requests
from mqks.client.errors import (
    AuthenticationFailed,
    CallFailed,
    ClientError,
    ConnectionLost,
    ConsumerReplaced,
    InvalidRequest,
    ProtocolViolation,
    PublishFailed,
    Refused,
    ReplyTimeout,
    RequestFailed,
)
from mqks.client.messages import Message, MetaMessage, QueueUpdate, Settle, reading, settled
from mqks.client.options import Options
from mqks.client.outages import Outages
from mqks.protocol.lines import LineSplitter
from mqks.protocol.replies import ESCAPED

_log = logging.getLogger("mqks.client")

REPLIES_KEPT_S = 60.0
"""So long the queue of a client's replies stays when the client is away."""
LEAVES_S = 60.0
"""For so long a consumer gets nothing that is about to end."""
RELEASED_MAX = 1000
"""More messages that wait return as from a lost connection: each release is a request."""
LATE_S = 0.05
"""A wait that ends so late was stopped with its process."""
CATCH_UP_S = 0.5
"""After that, answers that have come get so long to be read."""
ANSWER_STEPS = 10
"""Looks at the time while an answer is awaited. What has come is read between two of them."""


NOTES = frozenset((b"--update", b"--cancel"))
"""What a consumer is told besides its messages."""
KEEPING = b"touch", b"progress"
"""Actions after which a message is still held."""


class SessionState(Enum):
    DOWN = "down"
    GREETING = "greeting"
    UP = "up"
    CLOSED = "closed"


class Call:
    """What one caller waits for: one answer, or the confirms of many messages.

    `wake` is called once, when nothing `remaining` is open.
    """

    __slots__ = ("answer", "error", "failed", "ids", "lines", "remaining", "wake")

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.wake = wake
        self.remaining = 1
        self.answer = b""
        self.lines: list[bytes] | None = None
        """Of an answer of many lines, all but the last."""
        self.failed: list[tuple[bytes, str]] = []
        self.error: ClientError | None = None
        self.ids: list[range] = []
        """Numbers of the ids of a `publish_many`, in order."""

    def settle(self, count: int = 1) -> None:
        self.remaining -= count
        if not self.remaining:
            self.wake()

    def result(self) -> bytes:
        """The answer. Raises what ended the call otherwise."""
        if self.error is not None:
            # One error may end many calls: each tells its own way only.
            raise self.error.with_traceback(None)
        if self.remaining:
            raise ReplyTimeout(
                "no reply before the timeout; whether the request was executed is unknown"
            )
        if self.failed:
            error_id = self.failed[0][1]
            raise RequestFailed(f"the server refused the request, error {error_id}", error_id)
        return self.answer

    def confirmed(self) -> int:
        """How many messages of a `publish_many` are confirmed. Raises as `result`, and
        PublishFailed."""
        if self.failed and not self.remaining:
            starts = [numbers.start for numbers in self.ids]
            *places, count = accumulate(map(len, self.ids), initial=0)

            def failed(id_: bytes, error_id: str) -> Refused:
                number = int(id_.rpartition(b"-")[2])
                at = bisect(starts, number) - 1
                return Refused(places[at] + number - starts[at], requests.decoded(id_), error_id)

            raise PublishFailed(count - len(self.failed), sorted(starmap(failed, self.failed)))
        self.result()
        return sum(map(len, self.ids))


class Session:
    """A connection for requests.

    `prefix` begins every id and differs from that of every other session; `jitter` gives numbers
    from 0 to 1; `guard` makes of `settle` what a message's ack and reject call. `on_output` is
    called when there is something to take where nothing was, and with True for what is better sent
    at once than gathered for a moment.
    """

    def __init__(
        self,
        options: Options,
        credentials: Sequence[str],
        *,
        prefix: str,
        jitter: Callable[[], float],
        guard: Callable[[Settle], Settle] = lambda settle: settle,
    ) -> None:
        self.state = SessionState.DOWN
        self.failure: ClientError | None = None
        """What has ended it for good."""
        self.is_tls = False
        """Whether TLS is spoken below it."""
        self.server = ""
        """The one that it is connected to, or was last."""
        self.reason = "no answer yet"
        """Why it is down, or was when it was down last."""
        self.on_output: Callable[[bool], None] = lambda is_prompt: None
        self.has_unconfirmed = False
        """Whether something was published that nobody confirms."""
        self.outages = Outages(lambda: 0.0)
        """Of its client."""
        self.greeting_s = inf
        """Time for the first answer, where there are other servers to try."""
        self._options = options
        self.to_json = requests.encoder(options.json_default)
        self._prefix = prefix.encode()
        self._jitter = jitter
        self._guard = guard
        self._number = count(1)
        self._auth = requests.auth(credentials) if credentials else b"ping hello"
        self._name = requests.set_name(options.client_name) if options.client_name else b""
        self._splitter = LineSplitter(options.reply_bytes_max, is_server=True)
        self._greeting_id = self._greeting = b""
        self._refusal = ""
        self._is_silent = True
        """Nothing has come in this life."""
        self._attempts = 0
        self._was_up = False
        self._heard_s = self._stepped_s = 0.0
        self._steps = 0
        """Since something that has to be answered was sent: a ping, or the greeting."""
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._unsent: list[bytes] = []
        """Ids of requests in flight whose lines are still in the outbox."""
        self._in_flight: dict[bytes, tuple[bytes, Call]] = {}
        self._in_flight_bytes = 0

    def new_id(self) -> bytes:
        return b"%b-%d" % (self._prefix, next(self._number))

    # -- requests

    @property
    def has_room(self) -> bool:
        """Whether more may be published now; also true once waiting would be in vain."""
        return (
            self._outbox_bytes < self._options.outbox_bytes_max
            and len(self._in_flight) < self._options.in_flight_max
            and self._in_flight_bytes < self._options.in_flight_bytes_max
        ) or self.state is SessionState.CLOSED

    @property
    def is_up(self) -> bool:
        """Whether it has begun to do what it is for, in this life or an earlier one."""
        return self._was_up

    @property
    def is_full(self) -> bool:
        """Whether to read no more for now."""
        return False

    @property
    def is_idle(self) -> bool:
        return not self._outbox and not self._in_flight

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    @property
    def has_unpublished(self) -> bool:
        """Whether messages are among them."""
        return any(b" publish " in each for each in self._outbox)

    def send_rest(self, call: Call) -> None:
        """The call is answered when the server has read all that was published."""
        if self.failure is not None or (self.is_idle and self.state is not SessionState.UP):
            call.settle()
        else:
            self.request(b"ping closing", call)

    def request(self, body: bytes, call: Call) -> bytes:
        """Send a request that is answered once, and give its id: `call` gets the answer."""
        request_id = self.new_id()
        self._ask(request_id, requests.line(request_id, body), call)
        return request_id

    def transact(self, lines: Sequence[bytes], call: Call) -> bytes:
        """Send these lines as one transaction, and give the id of its commit. The call gets the
        answer to that."""
        for line in lines:
            self._check(line)
        request_id = self.new_id()
        ends = (
            requests.line(self.new_id(), b"begin"),
            requests.line(request_id, b"commit --confirm"),
        )
        self._ask(request_id, b"".join([ends[0], *lines, ends[1]]), call, is_checked=True)
        return request_id

    def publish(
        self,
        event: str,
        data: requests.Data,
        message_id: str | None,
        call: Call | None,
        once: bool = False,
        mandatory: bool = False,
        flags: bytes = b"",
    ) -> bytes:
        """Publish one message and give its id; with a `call`, ask for a confirm."""
        id_ = self.new_id() if message_id is None else requests.name(message_id)
        form = requests.PUBLISH[call is not None, once, mandatory]
        escaped, raw = requests.published(data, self.to_json)
        line = b"%b%b%b%b %b %b\n" % (id_, form, flags, escaped, requests.name(event), raw)
        if call is not None:
            self._ask(id_, line, call)
            return id_
        self._check(line)
        self.has_unconfirmed = True
        self._put(line)
        return id_

    def publish_many(
        self, bodies: Sequence[bytes], call: Call, id_prefix: bytes | None = None
    ) -> None:
        """Publish some of the messages that a call is for, as `requests.bodies` gives them.

        With an `id_prefix` their ids end in their place within the call, from 1.
        """
        prefix = id_prefix or self._prefix
        if id_prefix:
            first = call.ids[-1].stop if call.ids else 1
        else:
            first = next(self._number)
            self._number = count(first + len(bodies))
        numbers = range(first, first + len(bodies))
        ids = [b"%b-%d" % (prefix, number) for number in numbers]
        lines = [id_ + body for id_, body in zip(ids, bodies, strict=True)]
        self._check(max(lines, key=len))
        if id_prefix and not self._in_flight.keys().isdisjoint(ids):
            raise InvalidRequest(f"ids that start with {prefix[:80]!r} are already in flight")
        self.raise_if_closed()
        call.ids.append(numbers)
        call.remaining += len(ids)
        self._in_flight.update(zip(ids, [(line, call) for line in lines], strict=True))
        joined = b"".join(lines)
        self._in_flight_bytes += len(joined)
        self._unsent += ids
        self._put(joined)

    def abandon(self, call: Call, request_id: bytes | None = None) -> None:
        """Nobody waits for it any more: a late answer goes nowhere, nothing is sent again."""
        in_flight = self._in_flight
        ids = [request_id] if request_id else [i for i in in_flight if in_flight[i][1] is call]
        for id_ in ids:
            if id_ in in_flight and in_flight[id_][1] is call:
                self._in_flight_bytes -= len(in_flight.pop(id_)[0])

    def _ask(self, request_id: bytes, line: bytes, call: Call, *, is_checked: bool = False) -> None:
        if not is_checked and len(line) > self._options.line_bytes_max + 1:
            self._check(line)
        if self.failure is not None:
            self.raise_if_closed()
        if request_id in self._in_flight:
            raise InvalidRequest(f"a request with the id {request_id[:80]!r} is already in flight")
        self._in_flight[request_id] = (line, call)
        self._in_flight_bytes += len(line)
        self._unsent.append(request_id)
        self._put(line, is_prompt=len(self._in_flight) == 1)  # Others have more to come.

    def _check(self, line: bytes) -> None:
        if len(line) > self._options.line_bytes_max + 1:
            raise InvalidRequest(
                f"a request of {len(line) - 1} bytes is longer than line_bytes_max, "
                f"{self._options.line_bytes_max}"
            )

    def raise_if_closed(self) -> None:
        """Raises what has ended it."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def _put(self, line: bytes, is_prompt: bool = False) -> None:
        if self.failure is not None:
            self.raise_if_closed()
        outbox = self._outbox
        outbox.append(line)
        self._outbox_bytes += len(line)
        if is_prompt or len(outbox) == 1:
            self.on_output(is_prompt)

    # -- the socket's side

    def connected(self, now_s: float) -> None:
        self._splitter = LineSplitter(self._options.reply_bytes_max, is_server=True)
        self._heard_s = self._stepped_s = now_s
        self._steps, self._refusal = 1, ""
        self._is_silent = True
        self._greeting_id = self.new_id()
        self._greeting = requests.line(self._greeting_id, self._auth)
        if self._name:
            self._greeting += requests.line(self.new_id(), self._name)
        if self.state is not SessionState.CLOSED:
            self.state = SessionState.GREETING
            self.on_output(True)

    def take(self) -> bytes:
        """All that can be sent now, joined; empty when there is nothing."""
        if self.state is SessionState.GREETING:
            data, self._greeting = self._greeting, b""
            return data
        if self.state is not SessionState.UP or not self._outbox:
            return b""
        outbox, self._outbox = self._outbox, []
        self._outbox_bytes = 0
        self._unsent.clear()
        return outbox[0] if len(outbox) == 1 else b"".join(outbox)

    def receive(self, data: bytes, now_s: float) -> None:
        """Bytes have come. Raises ProtocolViolation, after which the connection is of no use."""
        if self.state is SessionState.GREETING and data.startswith(failures.TLS_FIRST):
            raise ProtocolViolation(f"the peer answers in TLS: {failures.TLS_HINT}")
        self._is_silent = False
        self._heard_s, self._steps = now_s, 0
        lines = self._splitter.feed(data)
        if self._splitter.too_long is not None:
            raise ProtocolViolation("the peer sent a line longer than reply_bytes_max")
        self._replies(lines)

    def lost(self, reason: str) -> float:
        """The connection has ended, or none came about; give the seconds until the next attempt."""
        options = self._options
        if self.state is not SessionState.CLOSED:
            if self.state is SessionState.GREETING and self._is_silent and not self.is_tls:
                reason = f"{reason}; {failures.TLS_HINT}"
            self.reason = self._refusal or reason
            if self.state is SessionState.UP:
                self.outages.lost(self, self.server, self.reason)
            self.state = SessionState.DOWN
            self._send_again()
        if not (self._was_up or options.connect_again):
            self.fail(ConnectionLost(self.reason))
        delay_s = min(options.reconnect_max_s, options.reconnect_min_s * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 32)
        return delay_s * (0.5 + 0.5 * self._jitter())

    def fail(self, failure: ClientError) -> None:
        """End it for good: every call, now and later, raises `failure`."""
        if self.failure is None:
            self.failure, self.state = failure, SessionState.CLOSED
            self.outages.back(self, "")
            calls = {id(call): call for _, call in self._in_flight.values()}
            self._in_flight.clear()
            self._outbox.clear()
            self._unsent.clear()
            for call in calls.values():
                call.error = failure
                call.settle(call.remaining)
            self.on_output(False)

    def disown(self, failure: ClientError) -> None:
        """End it in the child of a fork, where nobody waits for it."""
        self.failure, self.state = failure, SessionState.CLOSED

    @property
    def _answer_s(self) -> float:
        """How long an answer may take."""
        limit_s = self._options.keep_alive_s
        return min(2 * limit_s, self.greeting_s) if self.state is SessionState.GREETING else limit_s

    @property
    def deadline_s(self) -> float:
        """When `tick` is to be called."""
        if self._steps:
            return self._stepped_s + self._answer_s / ANSWER_STEPS
        return self._heard_s + self._options.keep_alive_s

    def tick(self, now_s: float) -> bool:
        """Look at the time; False when the connection has been silent for too long.

        Only the time in which the process ran counts. A pause is one step, however long it was;
        after one as long as an answer may take, another ping has its whole time."""
        late_s = now_s - self.deadline_s
        if late_s < 0:
            return True
        was_paused = late_s >= self._answer_s
        if self._steps > ANSWER_STEPS and not was_paused:
            return False
        self._stepped_s, self._steps = now_s, 1 if was_paused else self._steps + 1
        if self._steps == 1 and self.state is SessionState.UP:
            self._put(b"%b ping alive\n" % self.new_id())
        return True

    @property
    def silence(self) -> str:
        """What it means that `tick` returned False."""
        if self.state is SessionState.GREETING and self.greeting_s < inf:
            return f"no answer in {self.greeting_s:g} s"
        return f"no answer to a ping for {self._options.keep_alive_s} seconds"

    # -- replies

    def _replies(self, lines: list[bytes]) -> None:
        # One look-up per confirm; everything else is rare. `python -m benchmarks.client` measures.
        pop = self._in_flight.pop
        for line in lines:
            if line[-4:] == b" ok " and (flight := pop(line[:-4], None)) is not None:
                sent, call = flight
                self._in_flight_bytes -= len(sent)
                call.remaining -= 1
                if not call.remaining:
                    call.wake()
            else:
                self._reply(line)

    def _reply(self, line: bytes) -> None:
        request_id, is_error, text = requests.Reply.parse(line)
        if request_id == self._greeting_id:
            self._greeted(requests.decoded(text) if is_error else None)
        elif (flight := self._in_flight.pop(request_id, None)) is not None:
            sent, call = flight
            if call.lines is not None and not is_error and not requests.is_peek_end(text):
                self._in_flight[request_id] = flight
                call.lines.append(text)
                return
            self._in_flight_bytes -= len(sent)
            if is_error:
                call.failed.append((request_id, requests.decoded(text)))
            else:
                call.answer = text
            call.settle()
        elif is_error:
            # Nobody waits: a publish without confirm, an ack, or the connection itself.
            if request_id == b"-":
                self._refusal = requests.refusal(text)
            _log.warning("request %s failed, error %s", *map(requests.decoded, (request_id, text)))

    def _greeted(self, error_id: str | None) -> None:
        self._greeting_id = b""
        if error_id is not None:
            self.fail(AuthenticationFailed(error_id, given=self._auth.startswith(b"auth ")))
        elif self.state is SessionState.GREETING:
            self.state = SessionState.UP
            self._was_up = True
            self._attempts = 0
            self.outages.back(self, self.server)
            self._begin()
            if self._outbox:
                self.on_output(False)

    def _begin(self) -> None:
        """A new life: what goes before all that waits."""

    def _send_again(self) -> None:
        """Put what was sent and not answered before what is still unsent, in the old order."""
        unsent = set(self._unsent)
        again = [line for id_, (line, _) in self._in_flight.items() if id_ not in unsent]
        for _, call in self._in_flight.values():
            if call.lines:
                call.lines.clear()
        self._outbox[:0] = again
        self._outbox_bytes += sum(map(len, again))
        self._unsent[:0] = [id_ for id_ in self._in_flight if id_ not in unsent]


class ConsumerSession(Session):
    """A connection with one consumer and nothing else."""

    has_meta = False
    """Whether deliveries have attributes that nobody asked for."""

    def __init__(
        self, options: Options, credentials: Sequence[str], *, arguments: bytes, **more: Any
    ) -> None:
        super().__init__(options, credentials, **more)
        self.ready: deque[Message] = deque()
        """Messages that wait to be handled."""
        self.updates: deque[Any] = deque()
        """Each a QueueUpdate; of a tail, how many messages were dropped."""
        self.is_consuming = False
        """Whether the server has confirmed the consumer, in this life or an earlier one."""
        self._is_confirmed = False
        """Whether it has in this life."""
        self.consumer_id = b""
        self._earlier_id = b""
        self._buffered_bytes = 0
        self._is_single = False
        """Whether the last bytes brought at most one message."""
        self._queue = arguments.split(b" ")[0]
        self._arguments = arguments
        self._told: bytes | None = None
        """What the last update said of the queue."""
        self._check(b"consume --confirm " + arguments + b" " * 100)
        words = arguments.split(b" ")
        self._settle = self._guard(self.settle) if b"--manual-ack" in words else None
        limits = (word[11:] for word in words if word.startswith(b"--prefetch="))
        self._prefetch = int(next(limits, 0))
        self._delivered = 0
        self._is_settling = False
        """Whether a message was ever acked or returned."""
        self.is_awaited = False
        """Whether the program waits for a message."""
        self._held: dict[bytes, Message] | None = {} if b"--cancellable" in words else None
        """Messages that are not settled, by id, of a consumer that is told of cancels."""
        self.on_cancel: Callable[[Message], object] | None = None
        """Called with a message that is to be cancelled."""
        has_meta = self.has_meta or b"--meta" in words
        self.message_type: type[Message] = reading(
            MetaMessage if has_meta else Message, options.json_loads
        )
        """What deliveries become."""

    @property
    def is_up(self) -> bool:
        return self.is_consuming

    @property
    def is_full(self) -> bool:
        """Whether enough waits to be handled: read no more until it is handed out."""
        waits = self.ready or (self.updates and self.is_consuming)
        return self._buffered_bytes >= self._options.buffer_bytes_max and bool(waits)

    def tick(self, now_s: float) -> bool:
        if self.is_full:  # Nobody listens, so silence says nothing.
            self._heard_s, self._steps = now_s, 0
        elif self._is_starved:
            self._is_settling = True  # It is told once.
            queue = requests.decoded(self._queue)
            told = "%s: none of %d messages is acked, and the server sends no more (prefetch)"
            _log.warning(told, queue, self._delivered)
        return super().tick(now_s)

    @property
    def _is_starved(self) -> bool:
        """Whether the program waits for what does not come before it acks."""
        is_waiting = self.is_awaited and not self.ready
        return is_waiting and not self._is_settling and 0 < self._prefetch <= self._delivered

    def settle(self, message: Message, action: bytes) -> None:
        """Send an ack or reject, unless the server has taken the message back already; nothing for
        an action that something else sends."""
        self._is_settling = True
        if not action:
            return
        if self._held and not action.startswith(KEEPING):
            self._held.pop(message._id, None)
        if message.consumer_id is self.consumer_id and self.state is SessionState.UP:
            # Where messages arrive one by one, nothing follows the ack of the last one.
            is_prompt = self._is_single and not self.ready
            line = requests.settling(b"a", action, self.consumer_id, message._id)
            self._check(line)
            self._put(line, is_prompt)

    def settle_told(
        self, message: Message, action: bytes, call: Call, told: bytes = b"--confirm"
    ) -> None:
        """Settle a message; `call` gets what the server tells of it, or nothing."""
        self._is_settling = True
        if message.consumer_id is self.consumer_id and self.state is SessionState.UP:
            request_id, mine = self.new_id(), self.consumer_id
            line = requests.settling(request_id, action, mine, message._id, told)
            self._ask(request_id, line, call)
        else:
            call.settle()

    def _check_acks(self) -> None:
        if self._settle is None:
            raise InvalidRequest("this consumer was started with auto_ack")

    def set_prefetch(self, prefetch: int) -> None:
        """Change the prefetch, also for the lives that follow. 0: as many as the server allows."""
        self._check_acks()
        self._arguments = requests.with_prefetch(self._arguments, prefetch)
        self._prefetch = prefetch
        if self.state is SessionState.UP:
            self._put(b"a set_prefetch %b %d\n" % (self.consumer_id, prefetch))

    def pause(self, for_s: float) -> None:
        """Get no messages for this time."""
        self._check_acks()
        if self.state is SessionState.UP:
            # A reject of no message pauses, too.
            self._put(b"a reject %b - --pause=%.6f\n" % (self.consumer_id, for_s))

    def disown(self, failure: ClientError) -> None:
        super().disown(failure)
        self.ready.clear()
        self.updates.clear()

    def ack_all(self, messages: Iterable[Message]) -> None:
        if isinstance(messages, Message):
            raise TypeError("ack needs a list of messages; for one message, use message.ack()")
        self._check_acks()
        self._is_settling = True
        mine, ids = self.consumer_id, list[bytes]()
        for message in messages:
            if self._held:
                self._held.pop(message._id, None)
            if message.consumer_id is mine and message._settle is not settled:
                ids.append(message._id)
            message._settle = settled
        if ids and self.state is SessionState.UP:
            self._put_each(b"ack", ids)

    def _put_each(self, action: bytes, message_ids: Iterable[bytes]) -> None:
        """Send this for each message, by their ids."""
        form = b"a %b %b %%b\n" % (action, self.consumer_id.replace(b"%", b"%%"))
        lines = b"".join([form % each for each in message_ids])
        # As `requests.line` does: an id may end in a carriage return.
        self._put(lines.replace(b"\r\n", b"\r\r\n"))

    def take_ready(self, count_max: int | None) -> list[Message]:
        """Messages that wait, in their order: all, or `count_max`."""
        ready = self.ready
        if count_max is not None and count_max < len(ready):
            return [ready.popleft() for _ in range(count_max)]
        messages = list(ready)
        ready.clear()
        return messages

    def leave(self, call: Call) -> None:
        """End the consumer behind all acks; what waits unhandled goes back to the queue, as if it
        had not been delivered, unless it is much."""
        waiting = self.ready
        self.ready, self.updates = deque(maxlen=0), deque(maxlen=0)  # What still comes is dropped.
        if self.state is SessionState.UP and self.consumer_id:
            if 0 < len(waiting) <= RELEASED_MAX and self._settle is not None:
                self.pause(LEAVES_S)  # Or the next ones would come in their place.
                self._put_each(b"release", [message._id for message in waiting])
            self.request(b"delete_consumer --confirm " + self.consumer_id, call)
        else:
            call.settle()

    def _begin(self) -> None:
        self.consumer_id, self._is_confirmed = self.new_id(), False
        arguments = self._arguments
        if self.is_consuming:
            arguments = requests.consume_again(arguments, self._told)
            # A change may not have been told before the connection ended.
            arguments = requests.with_prefetch(arguments, self._prefetch)
        self._put(requests.line(self.consumer_id, b"consume --confirm", arguments))
        if self._earlier_id:
            # The server may not have noticed yet that the connection of the earlier one is dead.
            self._put(b"a delete_consumer %b\n" % self._earlier_id)

    def _send_again(self) -> None:
        """Nothing: what was delivered goes back by itself, and the consumer starts again."""
        if self._settle is not None:
            self.ready.clear()
        if self._held:
            self._held.clear()
        self._earlier_id, self.consumer_id = self.consumer_id or self._earlier_id, b""
        self._outbox.clear()
        self._outbox_bytes = 0
        for _, call in list(self._in_flight.values()):
            call.settle()
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._unsent.clear()

    def receive(self, data: bytes, now_s: float) -> None:
        if not self.ready and not self.updates:
            self._buffered_bytes = 0
        self._buffered_bytes += len(data)
        waiting = len(self.ready)
        super().receive(data, now_s)
        self._delivered += len(self.ready) - waiting
        self._is_single = len(self.ready) <= 1

    def _replies(self, lines: list[bytes]) -> None:
        # One split and one object per delivery. `python -m benchmarks.client` measures it.
        ready, mine, settle = self.ready.append, self.consumer_id, self._settle
        if self._held is not None:
            ready = self._hold
        message = self.message_type
        for line in lines:
            words = line.split(b" ", 4)
            if (
                len(words) == 5
                and words[3][:6] == b"event="
                and words[2] not in NOTES
                and words[0] == mine
            ):
                data = words[4]
                if ESCAPED in words[3]:
                    data = message.unescaped(words[3], data)
                ready(message(mine, words[2], words[3], data, settle))
            else:
                super()._replies([line])
                mine = self.consumer_id

    def _hold(self, message: Message) -> None:
        assert self._held is not None
        self.ready.append(message)
        self._held[message._id] = message

    def _cancel(self, told: bytes) -> None:
        message_id, _, reason = told.partition(b" ")
        if (message := (self._held or {}).get(message_id)) is not None:
            message._cancel = unquote(requests.decoded(reason), errors="surrogateescape")
            if self.on_cancel is not None:
                self.on_cancel(message)

    def _reply(self, line: bytes) -> None:
        if not self.consumer_id or not line.startswith(self.consumer_id + b" "):
            super()._reply(line)
            return
        _, is_error, text = requests.Reply.parse(line)
        if is_error:
            error_id = requests.decoded(text)
            if self._is_confirmed:
                what = (
                    f"another connection has ended this consumer, or consumes under its id "
                    f"{requests.decoded(self.consumer_id)}"
                )
                self.fail(ConsumerReplaced(f"{what}, error {error_id}", error_id))
                return
            self.fail(RequestFailed(f"the server refused the consumer, error {error_id}", error_id))
        elif not text:
            self.is_consuming = self._is_confirmed = True
        elif text.startswith(b"--cancel "):
            self._cancel(text.removeprefix(b"--cancel "))
        elif text.startswith(b"--update ") and text != b"--update ":
            self._update(text.removeprefix(b"--update "))
        else:
            raise ProtocolViolation(f"the peer sent {line[:80]!r} to a consumer")

    def _update(self, told: bytes) -> None:
        update = QueueUpdate.parse(told)
        self._queue = told.partition(b" ")[0]  # It may have been renamed.
        if self.is_consuming:  # Before, it says what this consume itself has bound.
            self.updates.append(update)
        # Events and masks may not fit a request; without any, the queue keeps those it has.
        if len(told) + 200 > self._options.line_bytes_max:
            flags = [
                word
                for word in told.split(b" ")
                if word.startswith(b"--") and word != b"--add-mask"
            ]
            told = b" ".join([self._queue, *flags])
        self._told = told


class TailSession(ConsumerSession):
    """A connection with one tail. Its `updates` say how many messages were dropped."""

    has_meta = True

    def _begin(self) -> None:
        self.consumer_id = self.new_id()
        self._put(requests.line(self.consumer_id, b"tail --confirm", self._arguments))

    def _reply(self, line: bytes) -> None:
        told = line.removeprefix(self.consumer_id + b" ok --dropped ") if self.consumer_id else line
        if told != line and requests.is_number(told):
            self.updates.append(int(told))
        else:
            super()._reply(line)

    def leave(self, call: Call) -> None:
        """It ends with its connection."""
        self.ready, self.updates = deque(maxlen=0), deque(maxlen=0)
        call.settle()


class Asked(Call):
    """What the caller of a service waits for."""

    __slots__ = ("reply",)

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.reply: Message | None = None

    def message(self) -> Message:
        """The reply. Raises as `result`, and CallFailed."""
        self.result()
        assert self.reply is not None
        if (kind := self.reply.meta.get("error")) is not None:
            raise CallFailed(kind, self.reply.data.decode("utf-8", "backslashreplace"))
        return self.reply


class ReplySession(ConsumerSession):
    """The consumer of a queue of its own, to which come the replies to what services are asked."""

    def __init__(
        self, options: Options, credentials: Sequence[str], *, queue: str, **more: Any
    ) -> None:
        rule = REPLIES_KEPT_S
        arguments = requests.consume(queue, [queue], delete_when_unused=rule, prefetch=0, meta=True)
        super().__init__(options, credentials, arguments=arguments, **more)
        self.queue = queue
        """Its name, which is also the event that it is bound to."""
        self._calls: dict[str, Asked] = {}

    def expect(self, call: Asked, correlation_id: str | None = None) -> str:
        """A reply to this call will come; give its correlation id. Raises InvalidRequest if another
        call waits for the one that is given."""
        self.raise_if_closed()
        if correlation_id is None:
            correlation_id = requests.decoded(self.new_id())
        elif correlation_id in self._calls:
            raise InvalidRequest(f"another call waits for the correlation id {correlation_id!r}")
        self._calls[correlation_id] = call
        return correlation_id

    def forget(self, correlation_id: str) -> None:
        """Nobody waits for it any more."""
        self._calls.pop(correlation_id, None)

    def receive(self, data: bytes, now_s: float) -> None:
        super().receive(data, now_s)
        self.updates.clear()
        replies = self.take_ready(None)
        self.ack_all(replies)
        for reply in replies:
            call = self._calls.pop(reply.correlation_id or "", None)
            if call is not None:
                call.reply = reply
                call.settle()

    def fail(self, failure: ClientError) -> None:
        super().fail(failure)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.error = failure
            call.settle()

    def leave(self, call: Call) -> None:
        """The queue goes with its consumer."""
        if self.state is SessionState.UP and self.consumer_id:
            at_once = requests.consume(self.queue, delete_when_unused=True, create=True)
            self._put(requests.line(self.consumer_id, b"consume", at_once))
        super().leave(call)
