"""`move` and `redrive`: move messages from one queue to another.

The one rule: the target queue is looked up for each message, so that a queue that is deleted
meanwhile gets none.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mqks.broker.features.death.dead_letters import dead_letter_of
from mqks.broker.features.death.moves import Choose, move_ready
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import Move
from mqks.users import Permissions

if TYPE_CHECKING:
    from mqks.broker.broker import Broker

Aim = Callable[[bytes], tuple[bytes, bytes] | None]
"""Maps a message to the name of its new queue and its new form; None: it stays."""


def move(broker: "Broker", source: Queue, wanted: Move) -> Work[int | None]:
    """Move messages unchanged; return how many."""
    return _move(broker, source, wanted, aim_of(wanted, None, is_redrive=False))


def redrive(
    broker: "Broker", source: Queue, wanted: Move, permissions: Permissions | None
) -> Work[int | None]:
    """Move dead letters back to the queues where they died, without the data of their death; return
    how many. Other messages stay, and so do those that the user may not move."""
    return _move(broker, source, wanted, aim_of(wanted, permissions, is_redrive=True))


def _move(broker: "Broker", source: Queue, wanted: Move, aim: Aim) -> Work[int | None]:
    if wanted.to is not None:
        broker.check_queue(wanted.to)
        yield from broker.make_queue(wanted.to)

    def is_stuck() -> bool:
        return bool(broker.unwritable)

    choose, limit = _choice(broker, aim), wanted.limit or SEQ_MAX
    chosen = chosen_by(broker, wanted)
    return (yield from move_ready(source, choose, limit, is_stuck=is_stuck, chosen=chosen))


def aim_of(wanted: Move, permissions: Permissions | None, *, is_redrive: bool) -> Aim:
    def aim(message: bytes) -> tuple[bytes, bytes] | None:
        if not is_redrive:
            return wanted.to or wanted.source, message
        dead_letter = dead_letter_of(message)
        if dead_letter is None:
            return None
        name = wanted.to or dead_letter.queue
        may = name != wanted.source and (permissions is None or permissions.may_consume(name))
        return (name, dead_letter.original) if may else None

    return aim


def _choice(broker: "Broker", aim: Aim) -> Choose:
    def choose(message: bytes) -> tuple[Queue, bytes] | None:
        aimed = aim(message)
        return None if aimed is None else (broker.queue_for(aimed[0]), aimed[1])

    return choose


def chosen_by(broker: "Broker", wanted: Move) -> Chosen | None:
    return wanted.selection and Chosen(wanted.selection, broker.schedule.wall_us())
