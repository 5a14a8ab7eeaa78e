"""A broker driven as the server drives it: turns, commits, slow clients, pages, logins, restarts.

`run` takes one step. The server's part is played in memory and on the spot: what `mqks.server` does
with `overrun`, `expelled`, `touched`, `wanted`, `logins` and batches is done here in
its order. The one rule: whatever can differ between two runs is a step or a setting.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import thread_time
from typing import Any, Final, Self

from mqks.broker.requests import intake as intake_module
from mqks.broker.spine.clients.outbox import Outbox, Slow
from mqks.broker.spine.log.pending import ErrorRecord
from mqks.broker.spine.queue import blocks as blocks_module
from mqks.broker.spine.queue import lane as lane_module
from mqks.broker.spine.queue.blocks import BLOCK, SHORT
from mqks.limits import CHUNK_S, DELIVERY_BYTES, LINES_MAX, SCARCE_BYTES
from mqks.settings import Settings
from mqks.users import User, Users, hash_token
from tests.fuzz import Finding
from tests.fuzz.invariants import States, check, check_disk, digest, require
from tests.fuzz.peer import Peer
from tests.fuzz.steps import Step, Steps
from tests.kit.played import ALL, Played

QUEUES_MAX: Final = 300
"""What is sent to thousands of queues takes longer than a chunk may."""
CALL_S_MAX: Final = 0.1
"""CPU time of one call of the broker; a chunk shall take `limits.CHUNK_S`, a fifth of that."""
EVAL_S_MAX: Final = 0.5
"""The same of one that evaluates: a whole budget of steps takes up to 0.3 s on a busy machine."""
TOKEN: Final = "token-of-u"
USERS_FILE: Final = Path("users.jsonl")
"""It is never read: that there is one makes strangers of those from other machines."""
ENDED: Final = "consumes under this id now", "has ended it (delete_consumer)"
"""How the reasons of errors end that are told to a connection because of another one."""
OUTBOX_BYTES_MAX: Final = 64 * 1024 * 1024
"""For one connection in one turn: `output_buffer_bytes_max`, and what one more request brings."""
_MORE_THAN_ENDLESS: Final = 30_000

LIMITS: Final[dict[str, Any]] = {"bind": ["e*", "*.b"], "queues_max": 3, "queue_bytes_max": 1000}
USERS: Final = [
    User("u", token=hash_token(TOKEN), publish=["e*", "a.**"], consume=["q*"], **LIMITS),
    User("admin", token=hash_token("token-of-admin"), publish=["**"], consume=["**"], admin=True),
    User("looker", token=hash_token("token-of-looker"), eval=True),
]


class World(Played):
    """`checked_every`: after how many steps the invariants are looked at; 0 for never. A
    `stopwatch` of the wall is quicker; what takes long by it is measured by CPU time as well.
    `settings` may have three that are none: `calls_a_turn`, how often the stopwatch may be asked
    before a turn is over, `small_steps` for deliveries one by one and blocks of few lines, `books`
    for peers that count."""

    def __init__(
        self, checked_every: int = 1, stopwatch: Callable[[], float] = thread_time, **settings: Any
    ) -> None:
        self.checked_every = checked_every
        self.digested_every = 1 if checked_every == 1 else 20
        self.lines = 0
        self.slowest_s = 0.0
        self._steps = self._alone = 0
        self._looked_cpu_s = thread_time()
        self._stopwatch = stopwatch
        calls_a_turn = settings.pop("calls_a_turn", 0)
        self._small_steps = settings.pop("small_steps", 0)
        self._books = bool(settings.pop("books", 0))
        self._addresses = count(1)
        settings.setdefault("queues_max", QUEUES_MAX)
        self._tune()
        told = Settings(auth="remote", users=USERS_FILE, **settings)
        super().__init__(told, calls_a_turn=calls_a_turn)

    def _tune(self) -> None:
        small = self._small_steps
        setattr(blocks_module, "DELIVERY_BYTES", 1 if small else DELIVERY_BYTES)  # noqa: B010
        setattr(blocks_module, "BLOCK", 6 if small else BLOCK)  # noqa: B010
        setattr(blocks_module, "SHORT", 2 if small else SHORT)  # noqa: B010
        setattr(lane_module, "SCARCE_BYTES", 100 if small else SCARCE_BYTES)  # noqa: B010
        setattr(intake_module, "LINES_MAX", 4 if small else LINES_MAX)  # noqa: B010

    def __exit__(self, *_: object) -> None:
        self._small_steps = 0
        self._tune()

    def __enter__(self) -> Self:
        return self

    def crash(self) -> None:
        self.peers: dict[str, Peer] = {}
        self._slow = False
        self._going: list[Peer] = []
        self._states = States()
        super().crash()
        self.broker.set_users(Users(USERS, b"key"))
        if not self.calls_a_turn:
            self.broker.turns.clock, self.broker.turns.chunk_s = self._stopwatch, CHUNK_S

    # -- steps

    def run(self, step: Step) -> None:
        """Take one step, in a turn of its own."""
        verb, who, data = step
        getattr(self, f"_on_{verb}")(*((who,) if who != "*" else ()), *((data,) if data else ()))
        self._flush()
        self._steps += 1
        is_due = self.checked_every and self._steps % self.checked_every == 0
        # What works that wait for readers have half done is not looked at.
        if is_due and not (self.broker.has_work and self.broker.shared.outboxes.room <= 0):
            self.look()

    def look(self) -> None:
        """Raise Finding if an invariant does not hold."""
        self._looked_cpu_s = thread_time()
        check(self.broker)
        fetches = [fetch for fetch, _ in self.fetched]
        self._states.look(self.broker, [*self.broker.shared.wanted.fetches, *fetches])
        if not self.broker.pending and not self.in_flight:
            check_disk(self.broker, self.disk, fetches)

    def settle(self) -> None:
        """Do all that is due, and look at the whole."""
        self._on_room()
        self._on_quick()
        for who in self.peers:
            self._on_resume(who)
        for _ in range(_MORE_THAN_ENDLESS):
            self._flush()
            if not (self._has_work() or self.broker.pending):
                break
            self._on_work()
        else:
            raise Finding("it never comes to rest")
        self.look()
        require(not self.broker.pending, "pending, and nothing to wait for")
        for peer in self.peers.values():
            owed = self.broker.drain._owed[peer.connection]  # Until consumers hold nothing.
            require(peer.connection.unconfirmed == owed, "a confirm that never comes")
            peer.settle()

    def _peer(self, who: str) -> Peer:
        """Whoever can still send, connected now if need be."""
        peer = self.peers.get(who)
        if peer is None:
            # One that has left may still be told something, and is not this one.
            address = f"test:{who}{next(self._addresses)}"
            connection = self.broker.connect(address, local=who in "abc")
            peer = self.peers[who] = Peer(connection, keeps_books=self._books)
            if who == "u":
                self.broker.access.authenticate(connection, self.broker.access.users.get("u"))
        return peer

    def _on_send(self, who: str, data: bytes = b"") -> None:
        peer = self._peer(who)
        if peer.paused and peer.unsent_bytes > self.settings.output_buffer_bytes_max:
            return  # The server would not read from it now.
        self._make_ready(peer)
        if peer.ended or self._is_busy(peer):
            return
        peer.sent(data)
        self.lines += data.count(b"\n")
        self._receive(peer, data)

    def _make_ready(self, peer: Peer) -> None:
        """Let the server do what it does before it reads more of this connection."""
        connection = peer.connection
        while not peer.ended and self._is_busy(peer):
            if connection.works:
                if self.broker.shared.outboxes.room <= 0:
                    break  # They may wait for readers.
                self.timed(self.broker.go_on)
                self._page()
            elif connection.overrun:
                self._receive(peer, b"")
            else:
                self._login()
            self._flush()

    @staticmethod
    def _is_busy(peer: Peer) -> bool:
        return peer.connection.overrun or peer.connection.awaits_login

    def _receive(self, peer: Peer, data: bytes) -> None:
        connection, broker = peer.connection, self.broker
        self._alone += self._is_alone(peer, data)
        alone = self._alone >= self.digested_every
        if alone:
            self._alone = 0
        before, errors = digest(broker) if alone else None, broker.shared.counters.errors
        self.timed(self.intake.receive, connection, data)
        # That another connection has taken an id is told to a connection that asked for nothing.
        if alone and broker.shared.counters.errors > errors:
            last = broker.last_errors
            has_replaced = not last or last[-1].reason.endswith(ENDED)
            is_same = has_replaced or digest(broker) == before
            require(is_same, f"an error has changed something: {data[:200]!r}")
        self._look_at(peer)

    def refused(self, record: ErrorRecord) -> bool:
        if record.reason.endswith(ENDED):
            for peer in self.peers.values():
                if peer.connection.address == record.connection:
                    peer.replaced(record.request_id)
        return True

    @staticmethod
    def _is_alone(peer: Peer, data: bytes) -> bool:
        """Whether this is one whole line and no more."""
        connection = peer.connection
        return (
            data.find(b"\n") == len(data) - 1
            and not connection.splitter.tail_bytes
            and not connection.waits
            and connection.splitter.too_long is None
        )

    def _look_at(self, peer: Peer) -> None:
        if peer.connection.expelled and not peer.ended:
            peer.expelled = True
            self._end(peer)

    def timed(self, call: Callable[..., object], *args: Any) -> None:
        start_s = self._stopwatch()
        call(*args)
        took_s = self._stopwatch() - start_s
        if took_s > CALL_S_MAX:
            # What others have taken of this core does not count.
            took_s = min(took_s, thread_time() - self._looked_cpu_s)
            evaluates = any(getattr(each, "eval_steps", None) is not None for each in args)
            if took_s > (EVAL_S_MAX if evaluates else CALL_S_MAX):
                raise TooSlow(f"{call.__name__} took {took_s * 1000:.0f} ms")
        self.slowest_s = max(self.slowest_s, took_s)

    def _end(self, peer: Peer) -> None:
        peer.ended = True
        self.timed(self.broker.end, peer.connection)

    def _on_end(self, who: str) -> None:
        peer = self.peers.get(who)
        if peer is not None:
            # The server does not see the end before it reads again.
            self._make_ready(peer)
            if not (peer.ended or self._is_busy(peer)):
                self._end(peer)

    def _on_leave(self, who: str) -> None:
        peer = self.peers.pop(who, None)
        if peer is not None:
            self._going.append(peer)
            self._finish(peer)

    def _finish(self, peer: Peer) -> None:
        connection = peer.connection
        connection.closed = True
        connection.rest(Slow.END)
        if connection.works:
            self.timed(self.broker.go_on)
        elif connection.overrun:
            self.timed(self.intake.receive, connection, b"")
        else:
            self._going.remove(peer)
            self.timed(self.broker.disconnect, connection)

    def _on_pause(self, who: str) -> None:
        peer = self._peer(who)
        peer.paused = True
        peer.connection.rest(Slow.PEER)

    def _on_resume(self, who: str) -> None:
        peer = self.peers.get(who)
        if peer is not None and peer.paused:
            peer.paused, peer.unsent_bytes = False, 0
            peer.connection.outbox_bytes = 0
            self.timed(peer.connection.resume, Slow.OUTBOX | Slow.PEER)

    def _on_tick(self, seconds: bytes) -> None:
        self.now_us += round(float(seconds) * 1e6)
        self.timed(self.broker.schedule.run_due, self.broker.turns)

    def _on_slow(self) -> None:
        """Commits take until `commit` from now on."""
        self._slow = True

    def _on_quick(self) -> None:
        self._slow = False
        self._on_commit()

    _on_commit = Played.land
    _on_fail = Played.fail
    _on_full = Played.fill
    _on_room = Played.make_room

    def _on_restart(self) -> None:
        """A crash: what was not written is gone, and so are the clients."""
        self.crash()
        self.look()

    def _on_work(self) -> None:
        """What the server's tasks do in the next turn."""
        broker = self.broker
        self._find_out_unsent()
        self.timed(broker.go_on)
        for peer in [*self.peers.values()]:
            if peer.connection.overrun and not peer.ended:
                self._receive(peer, b"")
        for peer in [*self._going]:
            self._finish(peer)
        self._page()
        if broker.access.logins:
            self._login()
        self._read()

    def _has_work(self) -> bool:
        broker, wanted = self.broker, self.broker.shared.wanted
        reads = wanted.pages or wanted.fetches or self.pages or self.fetched
        waits = broker.access.logins or broker.reads_waiting or self._going
        overruns = any(each.connection.overrun and not each.ended for each in self.peers.values())
        return bool(broker.has_work or reads or waits or overruns)

    def _page(self) -> None:
        """What was read in the turn before has come; other reads begin."""
        self.answer(ALL)
        self.read()

    def _login(self) -> None:
        login = self.broker.access.logins.popleft()
        peer = self._of(login.connection)
        if peer is None or peer.ended:
            return
        # No password is right: verifying one takes 30 ms, and is another thread's.
        self.broker.access.verified(login, None)
        if login.connection.expelled:
            self._look_at(peer)
        else:
            self._receive(peer, b"")

    def _read(self) -> None:
        """Every answer is that there is nothing."""
        broker = self.broker
        if broker.shared.outboxes.room <= 0:
            return
        readers, broker.reads_waiting = broker.reads_waiting, []
        for connection in readers:
            gone = connection.closed or connection.expelled
            if gone or connection.rests or not connection.reads:
                continue
            read = connection.reads.popleft()
            broker.answer(connection, read, read.request_id + b" ok --end\n")
            if connection.reads and not connection.rests:
                broker.reads_waiting.append(connection)

    # -- the end of a turn

    def _flush(self) -> None:
        broker = self.broker
        expelled, broker.expelled = broker.expelled, []
        for peer in self.peers.values():
            if peer.connection in expelled:
                self._look_at(peer)
        for _ in range(_MORE_THAN_ENDLESS):
            if self._slow and not self.broker.unwritable:
                self.take()
            else:
                self.commit()
            if not (broker.flow.touched or broker.has_work):
                break
            self.timed(broker.go_on)
            self._hand_over()
            if broker.shared.wanted.fetches or self.fetched or broker.shared.outboxes.room <= 0:
                break  # What waits for them, or for readers, goes on in a later turn.
        else:
            raise Finding("a turn that never ends")
        for who, peer in [*self.peers.items()]:
            if peer.ended:
                self._close_if_done(who, peer)

    def _close_if_done(self, who: str, peer: Peer) -> None:
        connection = peer.connection
        if connection.unconfirmed or (connection.reads and not peer.expelled):
            return
        peer.settle()
        del self.peers[who]
        self.timed(self.broker.disconnect, connection)

    def _of(self, connection: Outbox) -> Peer | None:
        return next((p for p in self.peers.values() if p.connection is connection), None)

    def got(self, connection: Outbox, data: bytes) -> None:
        require(len(data) < OUTBOX_BYTES_MAX, f"{len(data)} bytes for one connection at once")
        if (peer := self._of(connection)) is not None:
            peer.received(data)
            peer.unsent_bytes += len(data) if peer.paused else 0
            connection.outbox_bytes = peer.unsent_bytes

    def _hand_over(self) -> None:
        slow = [each for each in self.hear() if each.rests == Slow.OUTBOX]
        self._find_out_unsent()
        for connection in slow:
            connection.outbox_bytes = 0
            self.timed(connection.resume, Slow.OUTBOX)

    def _find_out_unsent(self) -> None:
        """What has not been taken, what this turn has written included."""
        broker = self.broker
        unsent_bytes = sum(peer.unsent_bytes for peer in self.peers.values())
        unsent_bytes += sum(len(data) for each in broker.flow.touched for data in each.outbox)
        self.timed(broker.shared.outboxes.set, unsent_bytes)


class TooSlow(Finding):
    """It took too long; on a machine that was busy it may take less the next time."""


def split_settings(steps: Steps) -> tuple[dict[str, Any], Steps]:
    """`*settings name=value ...` may be the first of them."""
    if not steps or steps[0].verb != "settings":
        return {}, steps
    pairs = (each.split("=") for each in steps[0].data.decode().split())
    return {name: int(text) if text.isdecimal() else text for name, text in pairs}, steps[1:]


def play(steps: Steps, checked_every: int = 1) -> World:
    """Run these steps and settle. Raise what is found."""
    settings, steps = split_settings(steps)
    with World(checked_every, **settings) as world:
        for step in steps:
            world.run(step)
        world.settle()
    return world
