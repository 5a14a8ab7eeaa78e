"""The broker without sockets, files or clock: what a transcript is played against.

The one rule: every commit completes at once after each send.
"""

from itertools import count
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.clients.connection import Connection, Slow
from mqks.broker.requests.intake import Intake
from mqks.settings import Settings
from tests.fuzz.disk import Disk


class BareWorld:
    def __init__(self, **settings: Any) -> None:
        self.now_s = 1000.0
        numbers = count(1)
        self.broker = Broker(
            Settings(**settings),
            clock=lambda: self.now_s,
            now_us=lambda: int(self.now_s * 1e6),
            new_error_id=lambda: (f"{next(numbers):024x}", 0),
            on_error=lambda record: True,
        )
        self.intake = Intake(self.broker)
        self.disk = Disk()
        self._connections: dict[str, Connection] = {}
        self._received: dict[str, bytes] = {}
        self._closed: set[str] = set()

    def connect(self, name: str) -> None:
        self._connections[name] = self.broker.connect(f"test:{name}", local=True)
        self._received[name] = b""
        self._closed.discard(name)

    def connection(self, name: str) -> Connection:
        return self._connections[name]

    def send(self, name: str, data: bytes) -> None:
        connection = self._connections[name]
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
        for name, data in chunks:
            self.intake.add(self._connections[name], data)
        self.intake.finish()
        self._settle()
        for name in dict.fromkeys(name for name, _ in chunks):
            self.send(name, b"")

    def _settle(self) -> None:
        """Commit and flush until nothing is left to do."""
        broker = self.broker
        while self._has_work:
            broker.expire()
            broker.go_on()
            for connection in broker.shared.touched:
                for name, known in self._connections.items():
                    if known is connection:
                        self._received[name] += b"".join(connection.outbox)
                connection.touched = False
                connection.outbox.clear()
                connection.outbox_bytes = 0
            touched = broker.shared.touched
            broker.shared.touched = []
            for connection in touched:
                connection.resume(Slow.OUTBOX)
            for connection in broker.shared.expelled:
                for name, known in self._connections.items():
                    if known is connection and name not in self._closed:
                        self._end(name)
            broker.shared.expelled = []
            if broker.pending:
                batch = broker.pending.take()
                self.disk.write(batch.entry)
                broker.committed(batch)
            fetches, broker.shared.fetches = broker.shared.fetches, []
            for queue, numbers, then in fetches:
                if not queue.deleted:
                    then(self.disk.fetch(queue.id, numbers))

    @property
    def _has_work(self) -> bool:
        shared, due_s = self.broker.shared, self.broker.schedule.next_s()
        is_due = due_s is not None and due_s <= self.now_s
        left = self.broker.pending or shared.touched or shared.fetches or shared.expelled
        return is_due or self.broker.has_work or bool(left)

    def received(self, name: str) -> bytes:
        """Drain what has been sent to it so far."""
        data, self._received[name] = self._received[name], b""
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
        self.now_s += seconds
        self._settle()
