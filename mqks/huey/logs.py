"""What huey keeps under keys: logs, which are queues without consumers.

Their messages say what was done to a key. Each process reads them onwards and does it, too, so the
order of the queue decides who was first: with a lock, a counter, or a result that two have popped.

The one rule: nothing is answered from what a process knows before it has asked for the rest.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from mqks.client import blocking, requests
from mqks.client.errors import ClientError, RequestFailed
from mqks.client.messages import PeekedMessage

ONCE_S = 1800.0
"""So long a publish whose confirm was lost may be sent again, and is dropped if it was stored."""
LISTED_MAX = 100_000
"""The most messages that are read at once."""
SUMMED_UP = 256
"""After this number of writes to a log of data, one has the sum of those before it."""
FORGOTTEN_S = 86_400.0
"""What has expired so long ago is in no sum, whatever the clocks of the processes say."""

T = TypeVar("T")


class KeyLog:
    """A queue of what was done to keys. Any thread may call."""

    def __init__(
        self, client: blocking.BlockingClient, queue: str, policy: requests.PolicyKeywords
    ) -> None:
        self.queue = queue
        self._client = client
        self._policy = policy
        self._lock = threading.Lock()
        self._kept: dict[str, Any] = {}
        """By key; of results, the sequence numbers of their messages."""
        self._counters: dict[str, int] = {}
        self._is_made = False
        self._epoch = ""
        self._next_seq = 1
        self._answers: dict[str, Any] = {}
        """Of what this process has asked, by the ids of the messages."""

    def entries(self) -> dict[str, Any]:
        """What the server has now, by key."""
        with self._lock:
            self._read_on()
            return {name: entry for name, entry in self._kept.items() if self._is_kept(entry)}

    def has(self, name: str) -> bool:
        return self._entry(name) is not None

    def get(self, name: str) -> bytes | None:
        return self._value(self._entry(name))

    def pop(self, name: str) -> bytes | None:
        return self._value(self.ask("pop", name)) if self.has(name) else None

    def put(self, name: str, value: bytes) -> None:
        self._write(secrets.token_hex(8), "put", name, value)

    def ask(self, action: str, name: str = "", data: bytes = b"", **meta: object) -> Any:
        """Write what is to be done to the key, and give what came of it. Raises RequestFailed."""
        id_ = secrets.token_hex(8)
        self._answers[id_] = None
        try:
            self._write(id_, action, name, data, **meta)
            with self._lock:
                self._read_on()
        finally:
            answer = self._answers.pop(id_)
        return answer

    def clear(self) -> None:
        if self.entries():
            self.ask("clear")

    def items(self) -> Iterator[tuple[str, bytes]]:
        raise NotImplementedError

    def _value(self, entry: Any) -> bytes | None:
        raise NotImplementedError

    def _entry(self, name: str) -> Any:
        with self._lock:
            self._read_on()
            entry = self._kept.get(name)
            return entry if entry is not None and self._is_kept(entry) else None

    def _is_kept(self, entry: Any) -> bool:
        return True

    def _write(self, id_: str, action: str, name: str, data: bytes, **meta: object) -> None:
        given = {"name": name, **meta}
        told = {what: str(value) for what, value in given.items() if value not in ("", None)}
        terms: requests.Sent = {"to": self.queue, "id": id_, "once_s": ONCE_S, "meta": told}
        event = f"{self.queue}.{action}"
        self._sure(lambda: self._client.publish(event, data, confirm=True, **terms))

    def _sure(self, ask: Callable[[], T]) -> T:
        """Ask, with the queue made and its policy set by this process; if that fails, mostly since
        somebody has deleted it, both again."""
        if self._is_made:
            try:
                return ask()
            except RequestFailed:
                pass
        self._client.set_queue(self.queue, **self._policy)
        self._is_made = True
        return ask()

    def _range(self) -> tuple[int, int]:
        """The first number and the next one. What was read of another queue is forgotten."""
        answer = self._sure(lambda: self._client.request("range", self.queue))
        told = requests.fields_told(answer)
        if told["epoch"] != self._epoch:
            self._epoch, self._next_seq = told["epoch"], 1
            self._kept.clear()
            self._counters.clear()
        return int(told["first"]), int(told["next"])

    def _read_on(self) -> None:
        raise NotImplementedError

    def _read(self, end_seq: int) -> list[PeekedMessage]:
        if self._next_seq >= end_seq:
            return []
        return self._client.peek(self.queue, after=self._next_seq - 1, limit=LISTED_MAX)

    def _take(self, messages: Iterable[PeekedMessage]) -> None:
        for message in messages:
            action = message.event.rpartition(".")[2]
            answer = self._do(action, message.meta.get("name", ""), message)
            self._next_seq = message.seq + 1
            if message.id in self._answers:
                self._answers[message.id] = answer

    def _do(self, action: str, name: str, message: PeekedMessage) -> Any:
        match action:
            case "put":
                self._kept.pop(name, None)  # The last one is at the end.
                self._kept[name] = self._made(message)
            case "pop":
                return self._kept.pop(name, None)
            case "clear":
                self._kept.clear()
        return None

    def _made(self, message: PeekedMessage) -> Any:
        raise NotImplementedError


class HueyResults(KeyLog):
    """Results. Messages leave it by their age and number alone, so that of a pop leaves it after
    the result."""

    def __init__(
        self,
        client: blocking.BlockingClient,
        name: str,
        number: int,
        policy: requests.PolicyKeywords,
    ) -> None:
        super().__init__(client, f"{name}.results.{number}", policy)

    def items(self) -> Iterator[tuple[str, bytes]]:
        names = {seq: name for name, seq in self.entries().items()}
        for message in self._client.peek(self.queue, limit=LISTED_MAX):
            if message.seq in names:
                yield names[message.seq], message.data

    def _value(self, entry: int | None) -> bytes | None:
        found = () if entry is None else self._client.peek(self.queue, after=entry - 1, limit=1)
        return next((message.data for message in found if message.seq == entry), None)

    def _made(self, message: PeekedMessage) -> int:
        return message.seq

    def _read_on(self) -> None:
        first, end = self._range()
        self._next_seq = max(self._next_seq, first)
        self._take(self._read(end))
        while self._kept and next(iter(self._kept.values())) < first:
            del self._kept[next(iter(self._kept))]


class HueyData(KeyLog):
    """Locks, revocations, counters: small, and kept until they are deleted.

    Now and then a message has the sum of all up to a number, `base`; then those are dropped. Who
    begins to read takes the last sum that ends before the first message, and does what follows it,
    also what was written while the sum was."""

    def __init__(
        self, client: blocking.BlockingClient, name: str, number: int, bytes_max: int
    ) -> None:
        super().__init__(client, f"{name}.data.{number}", {})
        self._bytes_max = bytes_max

    def items(self) -> Iterator[tuple[str, bytes]]:
        return ((name, value) for name, (value, _) in self.entries().items())

    def add(self, name: str, value: bytes, ttl: float | None) -> bool:
        """Whether it was added: there is no such key, or it has expired."""
        entry = self._entry(name)
        lasts = entry is not None and entry[1] is None
        return not lasts and self.ask("add", name, value, ttl=ttl) is True

    def clear_counters(self) -> None:
        self.entries()
        if self._counters:
            self.ask("reset_all")

    def _value(self, entry: tuple[bytes, float | None] | None) -> bytes | None:
        return None if entry is None else entry[0]

    def _is_kept(self, entry: tuple[bytes, float | None], now_s: float | None = None) -> bool:
        return entry[1] is None or entry[1] > (now_s or time.time())

    def _write(self, id_: str, action: str, name: str, data: bytes, **meta: object) -> None:
        if action in ("put", "add", "incr"):
            with self._lock:
                size = len(self._sum()) + len(json.dumps([name, data.decode("latin-1")]))
            if size > self._bytes_max:  # A sum has to fit into one message.
                raise ValueError(f"more than {self._bytes_max} bytes are kept: {self.queue}")
        super()._write(id_, action, name, data, **meta)

    def _do(self, action: str, name: str, message: PeekedMessage) -> Any:
        match action:
            case "add":
                kept = self._kept.get(name)
                if kept is not None and self._is_kept(kept, message.time):
                    return False
                self._kept[name] = self._made(message)
                return True
            case "incr":
                self._counters[name] = self._counters.get(name, 0) + int(message.data)
                return self._counters[name]
            case "reset":
                self._counters.pop(name, None)
            case "reset_all":
                self._counters.clear()
        return super()._do(action, name, message)

    def _made(self, message: PeekedMessage) -> tuple[bytes, float | None]:
        ttl = message.meta.get("ttl")
        return message.data, None if ttl is None else message.time + float(ttl)

    def _read_on(self) -> None:
        first, end = self._range()
        found = self._read(end)
        if self._next_seq < first or (found and found[0].seq > self._next_seq):
            found = self._begin()
        self._take(found)
        if end - first > SUMMED_UP and self._answers:
            with suppress(ClientError):  # Another one will; what was asked is done.
                self._sum_up()

    def _begin(self) -> list[PeekedMessage]:
        """Take the last sum, and give what is to be done then."""
        while True:
            first, _ = self._range()
            found = self._client.peek(self.queue, limit=LISTED_MAX)
            if self._range()[0] == first:
                break
        self._kept, self._counters, self._next_seq = {}, {}, first
        sums = {int(each.meta["base"]): each for each in found if each.event.endswith(".sum")}
        if bases := [base for base in sums if base < first]:
            kept, self._counters = json.loads(sums[max(bases)].data)
            self._kept = {name: (text.encode("latin-1"), s) for name, (text, s) in kept.items()}
        return found

    def _sum_up(self) -> None:
        base = self._next_seq - 1
        super()._write(secrets.token_hex(8), "sum", "", self._sum(), base=base)
        self._client.trim(self.queue, base + 1)

    def _sum(self) -> bytes:
        late_s = time.time() - FORGOTTEN_S
        kept = {
            name: (value.decode("latin-1"), ends_s)
            for name, (value, ends_s) in self._kept.items()
            if self._is_kept((value, ends_s), late_s)
        }
        return json.dumps([kept, self._counters]).encode()
