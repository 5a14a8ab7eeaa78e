"""`move` and `redrive`: move messages from one queue to another.

The one rule: the target queue is looked up for each message, so that a queue that is deleted
meanwhile gets none.
"""

from typing import TYPE_CHECKING

from mqks.broker.base.turns import Work
from mqks.broker.message.letters import letter_of
from mqks.broker.queue.moves import move_waiting
from mqks.broker.queue.queue import Queue
from mqks.broker.queue.selection import Chosen
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import Move
from mqks.users import Permissions

if TYPE_CHECKING:
    from mqks.broker.broker import Broker


def move(broker: "Broker", source: Queue, wanted: Move) -> Work[int | None]:
    """Move messages unchanged; return how many."""
    return _move(broker, source, wanted, None, is_redrive=False)


def redrive(
    broker: "Broker", source: Queue, wanted: Move, permissions: Permissions | None
) -> Work[int | None]:
    """Move dead letters back to the queues where they died, without the data of their death; return
    how many. Other messages stay, and so do those that the user may not move."""
    return _move(broker, source, wanted, permissions, is_redrive=True)


def _move(
    broker: "Broker",
    source: Queue,
    wanted: Move,
    permissions: Permissions | None,
    *,
    is_redrive: bool,
) -> Work[int | None]:
    if wanted.to is not None:
        broker.check_queue(wanted.to)
        yield from broker.make_queue(wanted.to)
    selection = wanted.selection
    chosen = None if selection is None else Chosen(selection, broker.schedule.wall_us())

    def choose(message: bytes) -> tuple[Queue, bytes] | None:
        name, line = wanted.to or source.name, message
        if is_redrive:
            letter = letter_of(message)
            if letter is None:
                return None
            name, line = wanted.to or letter.queue, letter.original
        if name == source.name or not (permissions is None or permissions.may_consume(name)):
            return None
        return broker.queue_for(name), line

    def is_stuck() -> bool:
        return bool(broker.unwritable)

    limit = wanted.limit or SEQ_MAX
    return (yield from move_waiting(source, choose, limit, is_stuck=is_stuck, chosen=chosen))
