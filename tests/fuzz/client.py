r"""A client's session, told mutated bytes by a server, and driven as its owner drives it.

Its steps are `*receive bytes`, in which `{i}` stands for an id in flight, `{c}` for the consumer's
and `{g}` for the greeting's, and what the owner does: `*publish`, `*request`, `*take`, `*lost` and
so on. The one rule: nothing but a ClientError comes out, whatever the server says.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, Final

from mqks.client import requests
from mqks.client.errors import ClientError, ProtocolViolation
from mqks.client.options import Options
from mqks.client.session import Call, ConsumerSession, Session, SessionState
from tests.fuzz.invariants import require
from tests.fuzz.mutations import Mutator
from tests.fuzz.steps import Step, Steps

REPLY_BYTES_MAX: Final = 8000
BUFFER_BYTES_MAX: Final = 3000
CHUNK_BYTES_MAX: Final = 20_000
OPTIONS: Final = Options(
    reply_bytes_max=REPLY_BYTES_MAX,
    buffer_bytes_max=BUFFER_BYTES_MAX,
    in_flight_max=20,
    line_bytes_max=1000,
)
OWNERS: Final = [
    *("publish", "many", "request", "take", "take", "take", "lost", "tick", "handle", "handle"),
    *("leave", "abandon", "ack_all"),
]
HELLO: Final = Step("receive", "*", b"{g} ok hello\n")
_ERROR = b"error 65f0c0de65f0c0de65f0c0de"
_UPDATE = b"{c} ok --update q e1 e2 --delete-queue-when-unused=5.0 --manual-ack"
SEEDS: Final = [
    *(b"{i} ok ", b"{i} ok 17", b"{i} " + _ERROR, b"{g} ok hello", b"{g} ok ", b"{g} " + _ERROR),
    *(b"{c} ok ", b"{c} ok m1 event=e x", b"{c} ok m1 event=e,retry=3  two  spaces ", _UPDATE),
    *(b"{c} ok --update q", b"{c} ok --update q --delete-queue-when-unused", b"- " + _ERROR),
    *(b"{c} " + _ERROR, b'{i} ok [{"id": "65f0c0de", "reason": "there is no action"}]', b"x ok y"),
    *(
        b"{i} ok " + b"9" * 5000,
        b"{i} ok " + b"[" * 5000,
        b"{c} ok m event=e,retry=" + b"9" * 5000 + b" x",
    ),
    *(b"{c} ok --update q --delete-queue-when-unused=soon", b"{c} ok --update q2 e"),
]


class ClientWorld:
    """A session and its owner, who reads no more while the session is full."""

    def __init__(self, *, consumes: bool) -> None:
        self.lines = 0
        self._now_s = 0.0
        self._number = count(1)
        self._calls: list[Call] = []
        how: dict[str, Any] = {"jitter": lambda: 1.0}
        if consumes:
            arguments = b"q e1 --delete-queue-when-unused=5.0 --manual-ack"
            how |= {"arguments": arguments, "guard": lambda settle: settle}
            self.session: Session = ConsumerSession(OPTIONS, (), prefix="c", **how)
        else:
            self.session = Session(OPTIONS, (), prefix="s", **how)
        self._connect()

    def _connect(self) -> None:
        self.session.connected(self._now_s)
        self.greeting_id = self.session._greeting_id

    def run(self, step: Step) -> None:
        try:
            getattr(self, f"_on_{step.verb}")(*((step.data,) if step.data else ()))
        except ProtocolViolation:
            self._on_lost()
        except ClientError:
            pass
        self.look()

    def look(self) -> None:
        """Raise Finding for what is counted wrongly, or has no bound."""
        session = self.session
        if session.state is not SessionState.CLOSED:
            flights = sum(len(line) for line, _ in session._in_flight.values())
            require(session._in_flight_bytes == flights, "in_flight_bytes")
            require(session._outbox_bytes == sum(map(len, session._outbox)), "outbox_bytes")
        require(session._splitter.tail_bytes <= REPLY_BYTES_MAX + 1, "an endless line is kept")
        if isinstance(session, ConsumerSession):
            held = sum(len(message.data) for message in session.ready)
            told = sum(len(event) for update in session.updates for event in update.events)
            bound = BUFFER_BYTES_MAX + CHUNK_BYTES_MAX + REPLY_BYTES_MAX
            require(held + told <= bound, f"{held + told} bytes are kept for the owner")
            require(len(session.updates) + len(session.ready) <= bound // 8, "too many are kept")

    def _on_receive(self, data: bytes = b"") -> None:
        session = self.session
        if session.is_full or session.state in (SessionState.DOWN, SessionState.CLOSED):
            return
        flight = next(iter(session._in_flight), b"none")
        data = data.replace(b"{i}", flight).replace(b"{g}", self.greeting_id)
        data = data.replace(b"{c}", getattr(session, "consumer_id", b"none"))
        self.lines += data.count(b"\n")
        session.receive(data[:CHUNK_BYTES_MAX], self._now_s)

    def _on_lost(self) -> None:
        self.session.lost("cut")
        self._connect()

    def _on_take(self) -> None:
        self.session.take()

    def _on_tick(self) -> None:
        self._now_s = max(self._now_s, self.session.deadline_s)
        if not self.session.tick(self._now_s):
            self._on_lost()

    def _on_publish(self) -> None:
        if self.session.has_room:
            self.session.publish("e", "x", f"m{next(self._number)}", self._call())

    def _on_many(self) -> None:
        if self.session.has_room:
            call = self._call()
            self.session.publish_many([b" publish --confirm e x\n"] * 3, call)
            call.settle()

    def _on_request(self) -> None:
        if self.session.has_room:
            self.session.request(b"purge --confirm q", self._call())

    def _call(self) -> Call:
        call = Call()
        self._calls = [*self._calls[-20:], call]
        return call

    def _on_handle(self) -> None:
        """Whatever an owner may look at."""
        session = self.session
        if isinstance(session, ConsumerSession):
            session.updates.clear()
            for message in session.take_ready(3):
                _ = message.id, message.event, message.retry, repr(message)
                try:
                    message.json()
                    _ = message.text
                except ValueError:
                    pass
                (message.ack if len(message.data) % 2 else message.reject)()
        for call in self._calls:
            for look in (Call.confirmed,) if call.ids else (_number, _reason):
                with suppress(ClientError):
                    look(call)

    def _on_ack_all(self) -> None:
        if isinstance(self.session, ConsumerSession):
            self.session.ack_all(self.session.take_ready(None))

    def _on_leave(self) -> None:
        if isinstance(self.session, ConsumerSession):
            self.session.leave(self._call())

    def _on_abandon(self) -> None:
        if self._calls:
            self.session.abandon(self._calls.pop())


def _number(call: Call) -> int:
    return requests.number_told(call.result())


def _reason(call: Call) -> str | None:
    return requests.reason_told(call.result())


def play(steps: Steps) -> ClientWorld:
    """`*consumer` or `*requests` first; raise what is found."""
    world = ClientWorld(consumes=steps[0].verb == "consumer")
    for step in steps[1:]:
        world.run(step)
    return world


def seeds() -> list[Steps]:
    """A life of each kind of session, with every reply that it may get."""
    opened = [HELLO, Step("take"), Step("publish"), Step("take")]
    replies = [Step("receive", "*", seed + b"\n") for seed in SEEDS]
    return [
        (Step(kind), *opened, reply, Step("handle"), Step("request"), reply, Step("handle"))
        for kind in ("consumer", "requests")
        for reply in replies
    ]


class ClientMass:
    """Sessions, one after the other, that are told mutated lines."""

    def __init__(self, corpus: Sequence[Steps], seed: int) -> None:
        self._seed = seed
        sent = (step.data for each in corpus for step in each if step.data)
        self._lines = [data.removesuffix(b"\n") for data in sent]
        self.lines = 0
        self.found: list[tuple[Steps, Exception]] = []

    def steps(self, number: int, lines: int = 300) -> Steps:
        chance = Random(f"{self._seed}:client:{number}")
        mutator = Mutator.of_lines(self._lines, chance)
        steps = [Step(chance.choice(["consumer", "requests"])), HELLO]
        sent = 0
        while sent < lines:
            if chance.random() < 0.4:
                steps.append(Step(chance.choice(OWNERS)))
                continue
            some = [
                mutator.line() if chance.random() < 0.3 else chance.choice(self._lines)
                for _ in range(1 << chance.randrange(5))
            ]
            chunk = b"\n".join(some) + b"\n"
            cut = chance.randrange(4 * len(chunk))
            pieces = [piece for piece in (chunk[:cut], chunk[cut:]) if piece]
            steps += [Step("receive", "*", piece) for piece in pieces]
            sent += len(some)
        return tuple(steps)

    def episode(self, number: int) -> None:
        steps = self.steps(number)
        try:
            self.lines += play(steps).lines
        except Exception as failure:
            self.found.append((steps, failure))
