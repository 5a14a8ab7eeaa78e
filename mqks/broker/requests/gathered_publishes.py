"""Takes runs of publishes from the lines of a chunk, and gathers their messages.

The one rule: a line that is rare or wrong is not taken; what is gathered is published before it.
"""

from collections.abc import Sequence
from operator import length_hint

from mqks.broker.broker import Broker
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.routing.publishing import NO_GROUP, Group
from mqks.limits import GROUPS_COPIES_MAX, LINES_MAX
from mqks.protocol.requests import CONFIRM, ONCE

WIDE = GROUPS_COPIES_MAX // LINES_MAX
"""Lines for more queues are handled in smaller blocks."""
GATHERED_ON_MAX = 256
"""Lines that stay gathered for the next chunk; more are worth a step of their own."""


class GatheredPublishes:
    """Those of one turn, of any number of connections with the same permissions."""

    __slots__ = ("_broker", "_connection", "_group", "_publishing", "confirms", "gathered", "seen")

    def __init__(self, broker: Broker) -> None:
        self._broker, self._publishing = broker, broker.publishing
        self._connection: Connection
        self._group: Group = NO_GROUP
        """That of the last line, which the next one most often joins."""
        self.gathered = 0
        """Lines whose messages are gathered, and not published yet."""
        self.confirms: list[bytes] = []
        """Ids of the chunk's messages that are to be confirmed."""
        self.seen = False
        """Whether there were any in the chunk."""

    def begin(self, connection: Connection, lines: int) -> None:
        """Those of a chunk of this connection, with so many lines, follow."""
        self._connection, self._group = connection, NO_GROUP
        self.confirms, self.seen = [], False
        publishing = self._publishing
        publishing.works, publishing.lines = connection.works, lines
        publishing.publisher = connection

    @property
    def room(self) -> int:
        """Maximum number of lines to take before `is_full` is asked again."""
        gathering = self._publishing.gathering
        return max(1, gathering.copies_max // gathering.width - self.gathered)

    @property
    def is_full(self) -> bool:
        gathering = self._publishing.gathering
        is_traced = self._publishing.tracer is not None  # Each message takes ten times as long.
        return is_traced or self.gathered * gathering.width >= gathering.copies_max

    @property
    def is_worth_a_step(self) -> bool:
        """Whether it is no use to wait for more messages of other connections. A queue that may
        become full is one reason: the next connection must know whether there is room."""
        gathering = self._publishing.gathering
        return (
            self.gathered > GATHERED_ON_MAX
            or gathering.width > WIDE
            or gathering.leads_to(self._broker.shared.capacities.tight)
        )

    def flush(self) -> None:
        """Publish what is gathered."""
        self.gathered, self._group = 0, NO_GROUP
        self._publishing.gathering.flush()

    def take(self, lines: Sequence[bytes], start: int, end: int) -> int:
        """Gather the publishes that these lines begin with; return the number of the line after
        them. It stops early after the first message for very many queues.

        A publish takes 260 ns here: `python -m benchmarks.budget`.
        """
        publishing, works = self._publishing, self._publishing.works
        gathering, turns = publishing.gathering, self._broker.turns
        groups, name_bytes_max = gathering.groups, self._broker.metadata.name_bytes_max
        permissions = self._connection.permissions
        event, middle, ids, bodies = self._group
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
            self.seen, once = True, False
            confirm = argument == CONFIRM
            if confirm:
                argument, _, rest = rest.partition(b" ")
            if argument != event:
                once = argument == ONCE
                if once:
                    argument, _, rest = rest.partition(b" ")
                group = groups.get(argument)
                if group is None:
                    if argument[:2] == b"--":
                        group, rest = publishing.flagged_group(permissions, argument, rest)
                    else:
                        group = publishing.group(permissions, argument)
                    is_last = gathering.width > WIDE or bool(works) or turns.over
                event, middle, ids, bodies = group
            if (
                event is None
                or not 0 < len(request_id) <= name_bytes_max
                or (once and publishing.once.unfinished)
            ):
                end -= 1
                break
            if confirm:
                self.confirms.append(request_id)
            if not once or publishing.is_new(self._connection, request_id, event):
                ids.append(request_id)
                bodies.append(request_id + middle + rest)
            if is_last:
                break
        end -= length_hint(block)  # Lines that the loop has not reached.
        self._group = event, middle, ids, bodies
        self.gathered += end - start
        return end
