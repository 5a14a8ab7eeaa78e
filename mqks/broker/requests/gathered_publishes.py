"""Takes runs of publishes from the lines of a chunk, and gathers their messages until they are
published in one step.

The one rule: a line that is rare or wrong is not taken; what is gathered is published before it.
"""

from collections.abc import Sequence
from operator import length_hint
from typing import Final

from mqks.broker.broker import Broker
from mqks.broker.requests import flagged
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.terms import NewMessages, PublishTerms
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.publishing import is_nowhere
from mqks.broker.spine.routing.singles import batch_of, terms_of
from mqks.limits import COPIES_MAX, GROUPS_COPIES_MAX, GROUPS_QUEUES, LINES_MAX
from mqks.protocol.requests import CONFIRM, ONCE, Publish

WIDE = GROUPS_COPIES_MAX // LINES_MAX
"""Lines for more queues are handled in smaller blocks."""
GATHERED_ON_MAX = 256
"""Lines that stay gathered for the next chunk; more are worth a step of their own."""
TRAITED: Final = PublishTerms()

Group = tuple[bytes | None, bytes, list[bytes], list[bytes]]
"""Its key, the bytes between id and data, ids and bodies."""
Gathered = tuple[Queues, list[bytes], list[bytes], Publish | None]
"""The queues, the ids and bodies of all events that go there, and the flags of these messages."""
NO_GROUP: Final[Group] = None, b"", [], []

# Most chunks publish a few events again and again. Then a line costs one look-up of its event, and
# the queues get lists. Messages for one queue must keep their order: so events with the same queues
# share one list, and one that shares only some of them, or has other flags, ends the gathering.


class GatheredPublishes:
    """Those of one turn, of any number of connections with the same permissions."""

    __slots__ = (
        *("_broker", "_by_queue", "_gathered", "_group", "_has_traits", "_lines", "_nowhere"),
        *("_publishing", "_width", "connection", "gathered", "groups"),
    )

    def __init__(self, broker: Broker) -> None:
        self._broker, self._publishing = broker, broker.publishing
        self.connection: Connection
        """That whose lines are handled now."""
        self._lines = 0
        """The maximum number of messages that can gather before the end of its lines."""
        self._gathered: list[Gathered] = []
        self.groups: dict[bytes, Group] = {}
        """By event, preceded by the flags of the publish, if any."""
        self._nowhere: set[bytes] = set()
        """Keys of groups whose messages no queue gets."""
        self._by_queue: dict[Queue, Gathered] = {}
        self._width = 1
        """One plus the number of queues of the groups."""
        self._has_traits = False
        """Whether some of the messages have traits."""
        self._group: Group = NO_GROUP
        """That of the last line, which the next one most often joins."""
        self.gathered = 0
        """Lines whose messages are gathered, and not published yet."""

    @property
    def _copies_max(self) -> int:
        """Maximum of gathered messages times queues."""
        return GROUPS_COPIES_MAX if self._width <= GROUPS_QUEUES else COPIES_MAX

    @property
    def room(self) -> int:
        """Maximum number of lines to take before `is_full` is asked again."""
        return max(1, self._copies_max // self._width - self.gathered)

    @property
    def is_full(self) -> bool:
        is_traced = self._publishing.tracer is not None  # Each message takes ten times as long.
        return is_traced or self.gathered * self._width >= self._copies_max

    @property
    def is_worth_a_step(self) -> bool:
        """Whether it is no use to wait for more messages of other connections. A queue that may
        become full is one reason: the next connection must know whether there is room."""
        if self.gathered > GATHERED_ON_MAX or self._width > WIDE:
            return True
        tight = self._broker.shared.capacities.tight
        return bool(tight) and not tight.keys().isdisjoint(self._by_queue.keys())

    def flush(self) -> None:
        """Publish what is gathered."""
        self.gathered, self._group = 0, NO_GROUP
        self._publish()

    def _publish(self) -> None:
        works, is_traited = self.connection.works, self._has_traits
        for queues, ids, bodies, flags in self._gathered:
            if not ids:
                continue
            terms = TRAITED if is_traited else None
            if flags is not None:
                terms, attributes = terms_of(self._publishing, flags)
                if attributes:
                    bodies = [body + attributes for body in bodies]
            self._publishing.put(queues, NewMessages(ids, bodies, terms), works)
        self._gathered.clear()
        self.groups.clear()
        self._nowhere.clear()
        self._by_queue.clear()
        self._width, self._has_traits = 1, False

    def take(self, lines: Sequence[bytes], start: int, end: int, confirms: list[bytes]) -> int:
        """Gather the publishes that these lines begin with; return the number of the line after
        them. The ids of those that are to be confirmed join `confirms`. It stops early after the
        first message for very many queues.

        A publish takes 260 ns here: `python -m benchmarks.budget`.
        """
        groups, name_bytes_max = self.groups, self._broker.metadata.name_bytes_max
        event, middle, ids, bodies = self._group
        self._lines = self.gathered + len(lines) - start
        block, is_last = iter(lines[start:end] if end - start < len(lines) else lines), False
        for line in block:
            try:
                request_id, action, argument, rest = line.split(b" ", 3)
            except ValueError:
                action = b""
            if action != b"publish":
                end -= 1
                break
            if argument == event and 0 < len(request_id) <= name_bytes_max:
                ids.append(request_id)
                bodies.append(request_id + middle + rest)
                continue
            once, confirm = False, argument == CONFIRM
            if confirm:
                argument, _, rest = rest.partition(b" ")
            if argument != event:
                once = argument == ONCE
                if once:
                    argument, _, rest = rest.partition(b" ")
                group = groups.get(argument)
                if group is None:
                    if argument[:2] == b"--":
                        group, rest = self._flagged(argument, rest)
                    else:
                        group = self._opened(argument)
                    is_last = (
                        self._width > WIDE or bool(self.connection.works) or self._broker.turns.over
                    )
                event, middle, ids, bodies = group
            if (
                event is None
                or not 0 < len(request_id) <= name_bytes_max
                or (once and self._publishing.once.unfinished)
            ):
                end -= 1
                break
            if confirm:
                confirms.append(request_id)
            if not once or self._is_new(request_id, event):
                ids.append(request_id)
                bodies.append(request_id + middle + rest)
            if is_last:
                break
        end -= length_hint(block)  # Lines that the loop has not reached.
        self._group = event, middle, ids, bodies
        self.gathered += end - start
        return end

    def _opened(self, event: bytes) -> Group:
        """The group of an event; none if each message must be checked singly."""
        queues = self._queues(event)
        return NO_GROUP if queues is None else self._open(event, queues)

    def _open(
        self, event: bytes, queues: Queues, key: bytes = b"", flags: Publish | None = None
    ) -> Group:
        """Open a group for an event with these queues. `key`: the event preceded by its flags, as
        they were written."""
        gathered = next(filter(None, map(self._by_queue.get, queues)), None)
        if gathered is None or gathered[0] != queues or flags != gathered[3]:
            is_wide = self._gathered and self._width + len(queues) > GROUPS_QUEUES
            if gathered is not None or is_wide:
                self._publish()
            gathered = queues, [], [], flags
            self._gathered.append(gathered)
            self._width += len(queues)
            self._by_queue.update(dict.fromkeys(queues, gathered))
        key = key or event
        if is_nowhere(queues):
            self._nowhere.add(key)
        group = self.groups[key] = key, b" event=%b " % event, gathered[1], gathered[2]
        return group

    def _queues(self, event: bytes, to: bytes | None = None) -> Queues | None:
        """The queues of an event, or that to which its messages go; None if each of them must be
        checked singly."""
        broker, may = self._broker, self.connection.permissions
        if (
            not 0 < len(event) <= broker.metadata.name_bytes_max
            or event[:2] == b"--"
            or broker.pending.unwritable
            or broker.shared.read_only
            or not (may is None or may.may_publish(event))
            or not (may is None or to is None or may.may_consume(to))
        ):
            return None
        if to is None:
            queues = broker.bindings.routes.route(event)
        else:
            queue = broker.queues.get(to)
            queues = None if queue is None else {queue: None}
        tight = self._publishing.tight(queues) if queues else None
        if tight and not all(queue.capacity.has_room(self._lines) for queue in tight):
            return None
        return queues

    def _flagged(self, flag: bytes, rest: bytes) -> tuple[Group, bytes]:
        """The group of a message with a flag; and the message's data."""
        if (traited := flagged.traited(flag, rest)) is not None:
            event, data = traited
            group = self.groups.get(event) or self._opened(event)
            self._has_traits = True
            return group, data
        event, _, data = rest.partition(b" ")
        key = flag + b" " + event
        return self.groups.get(key) or self._opened_flagged(key, event), data

    def _opened_flagged(self, key: bytes, event: bytes) -> Group:
        flags = flagged.shared(key)
        queues = None if flags is None else self._queues(event, flags.to)
        if flags is None or queues is None or (flags.mandatory and is_nowhere(queues)):
            return NO_GROUP
        is_free = self.connection.permissions is None
        if flags.batch and not (is_free and batch_of(self._publishing, flags)):
            return NO_GROUP
        return self._open(event, queues, key, flags)

    def _is_new(self, message_id: bytes, key: bytes) -> bool:
        """Take an id that may be published once, for the group with this key, unless no queue gets
        the message; return whether it was not known."""
        once = self._publishing.once
        if key in self._nowhere:
            return not once.knows(self.connection, message_id)
        new = once.take(self.connection, message_id)
        if new is not None:
            once.gather(new)
        return new is not None
