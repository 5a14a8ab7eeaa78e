"""`move` and `redrive`: move messages from one queue to another.

The one rule: the target queue is looked up for each message, so that a queue that is deleted
meanwhile gets none.
"""

from collections.abc import Callable

from mqks.broker.broker import Broker
from mqks.broker.features.admission import unique
from mqks.broker.features.death.dead_letters import revived
from mqks.broker.features.death.moves import move_ready
from mqks.broker.requests.checks import check_not_read_only, check_writable, existing
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import Move, Request
from mqks.users import Permissions

Aim = Callable[[bytes], tuple[bytes, bytes] | None]
"""Maps a message to the name of its new queue and its new form; None: it stays."""


def move(
    broker: Broker, connection: Connection, request: Request, wanted: Move
) -> Work[int | bytes]:
    """Of a `redrive`, too. Return what its confirm tells."""
    check_not_read_only(broker)
    check_writable(broker, request)
    source = existing(broker, request.action.decode(), wanted.source)
    aim = aim_of(request, wanted, connection.permissions)
    return _move(broker, source, wanted, aim, connection.user)


def told(moved: int, stay: int) -> int | bytes:
    """How many have moved, and, if any do, how many stay since others hold their keys."""
    return b"%d duplicate %d" % (moved, stay) if stay else moved


def _move(
    broker: Broker, source: Queue, wanted: Move, aim: Aim, user: str | None
) -> Work[int | bytes]:
    targets = [*broker.queues.values()]
    if wanted.to is not None:
        broker.check_queue(user, wanted.to)
        with broker.made.making(user, wanted.to):
            targets = [(yield from broker.make_queue(wanted.to, user))]
    yield from unique.read(targets)
    stay = 0

    def choose(message: bytes) -> tuple[Queue, bytes] | None:
        nonlocal stay
        aimed = aim(message)
        if aimed is None or not broker.made.allows(user, aimed[0]):
            return None
        target = broker.queue_for(aimed[0], user)
        if unique.may_join(target, aimed[1]):
            return target, aimed[1]
        stay += 1
        return None

    def is_stuck() -> bool:
        return bool(broker.unwritable)

    limit, chosen = wanted.limit or SEQ_MAX, chosen_by(broker, wanted)
    moved = yield from move_ready(source, choose, limit, is_stuck=is_stuck, chosen=chosen)
    return told(moved, stay)


def aim_of(request: Request, wanted: Move, permissions: Permissions | None) -> Aim:
    """A `move` leaves messages unchanged. A `redrive` moves dead letters back to the queues where
    they died, without the data of their death; others stay, and those that the user may not
    move."""
    if request.action == b"move":
        return lambda message: (wanted.to or wanted.source, message)

    def aim(message: bytes) -> tuple[bytes, bytes] | None:
        if (found := revived(message)) is None:
            return None
        died_in, original = found
        name = wanted.to or died_in
        may = name != wanted.source and (permissions is None or permissions.may_consume(name))
        return (name, original) if may else None

    return aim


def chosen_by(broker: Broker, wanted: Move) -> Chosen | None:
    return wanted.selection and Chosen(wanted.selection, broker.schedule.wall_us())
