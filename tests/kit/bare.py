"""The broker that a transcript is played against.

The one rule: every commit completes at once after each send.
"""

from typing import Any

from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Outbox, Slow
from mqks.settings import Settings
from tests.kit.played import ALL, Played


class BareWorld(Played):
    def __init__(self, **settings: Any) -> None:
        self._connections: dict[str, Connection] = {}
        self._received: dict[str, bytes] = {}
        self._closed: set[str] = set()
        super().__init__(Settings(**settings))

    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    def connect(self, name: str) -> None:
        self._connections[name] = self.broker.connect(f"test:{name}", local=True)
        self._received[name] = b""
        self._closed.discard(name)

    def connection(self, name: str) -> Connection:
        """Which is made when it is needed."""
        if name not in self._connections:
            self.connect(name)
        return self._connections[name]

    def send(self, name: str, data: bytes) -> None:
        connection = self.connection(name)
        if name in self._closed:
            return
        self.intake.receive(connection, data)
        self._settle()
        while connection.overrun:
            self.intake.receive(connection, b"")
            self._settle()
        if connection.expelled:
            self._end(name)
            self._settle()

    def send_together(self, chunks: list[tuple[str, bytes]]) -> None:
        """The chunks of one turn of the server."""
        self.broker.turns.begin()
        for name, data in chunks:
            self.intake.add(self.connection(name), data, waits=self.broker.turns.over)
        self.intake.finish()
        self._settle()
        for name in dict.fromkeys(name for name, _ in chunks):
            self.send(name, b"")

    def _settle(self) -> None:
        """Commit and flush until nothing is left to do."""
        broker = self.broker
        while self._has_work:
            broker.schedule.run_due(broker.turns)
            broker.go_on()
            for connection in self.hear():
                connection.resume(Slow.OUTBOX)
            for connection in broker.expelled:
                for name, known in self._connections.items():
                    if known is connection and name not in self._closed:
                        self._end(name)
            broker.expelled = []
            if broker.pending:
                self.write(broker.pending.take())
            self.fetch()
            self.answer(ALL)

    def got(self, connection: Outbox, data: bytes) -> None:
        for name, known in self._connections.items():
            if known is connection:
                self._received[name] += data

    @property
    def _has_work(self) -> bool:
        shared, due_s = self.broker.shared, self.broker.schedule.next_s()
        is_due = due_s is not None and due_s <= self.now_s
        left = self.broker.pending or self.broker.flow.touched or self.broker.expelled
        return is_due or self.broker.has_work or bool(left or shared.wanted.fetches)

    def received(self, name: str) -> bytes:
        """Drain what has been sent to it so far."""
        data, self._received[name] = self._received.get(name, b""), b""
        return data

    def disconnect(self, name: str) -> None:
        connection = self._connections.pop(name)
        self.broker.disconnect(connection)
        self._closed.add(name)
        self._settle()

    def end_of_stream(self, name: str) -> None:
        self._end(name)
        self._settle()

    def _end(self, name: str) -> None:
        self.broker.end(self._connections[name])
        self._closed.add(name)

    def is_closed(self, name: str) -> bool:
        return name in self._closed

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)
        self._settle()


def bare(**settings: Any) -> BareWorld:
    return BareWorld(**settings)


def ask(world: BareWorld, line: bytes, name: str = "k") -> bytes:
    """What a connection is told for a line."""
    world.send(name, line + b"\n")
    return world.received(name)
