"""Messages that a consumer returns: they go to their old place, to the tail, into the schedule, or
die.

The one rule: only this module changes the counts of a message (retry, rejects, losses).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from mqks.broker.log.pending import Mark
from mqks.broker.message.letters import with_published
from mqks.broker.message.policy import DEFAULT, Policy
from mqks.broker.queue.deaths import Dead, kill
from mqks.broker.queue.lane import Delivery, Lane
from mqks.broker.queue.moves import move
from mqks.limits import DURATION_S_MAX
from mqks.protocol import replies
from mqks.protocol.requests import Backoff

if TYPE_CHECKING:
    from mqks.broker.queue.queue import Queue

JITTER: float = 0.1
"""A backoff is longer or shorter by up to this part of it, so that messages that failed together
are not redelivered together."""


def give_back(
    queue: "Queue", deliveries: Iterable[Delivery], *, lost: bool, defaults: Policy = DEFAULT
) -> None:
    """Their consumer is gone: return them to their old place. `lost`: it did not end itself; then
    the backoff applies from the second loss on, or that of `defaults`."""
    lane, rules = queue.lane, queue.rules.over(defaults) if lost else DEFAULT
    losses_max, backoff = rules.losses, rules.backoff
    dead: list[Dead] = []
    expired: list[Dead] = []
    for number, line in deliveries:
        mark = lane.mark_of(number)
        mark = mark.lost() if lost else mark.returned()
        if losses_max is not None and mark.losses >= max(1, losses_max):
            dead.append(Dead(number, line, mark.retry))
        elif is_overdue(lane, number):
            expired.append(Dead(number, line, mark.retry))
        elif wait_us := _backoff_us(backoff, mark.losses - 1, line):
            schedule(queue, number, line, mark._replace(keeps_place=True), wait_us)
        else:
            lane.give_back(number, line, mark)
    kill(queue, dead, "losses")
    kill(queue, expired, "ttl")


def reject(
    queue: "Queue",
    deliveries: Sequence[Delivery],
    delay_us: int = 0,
    *,
    dead: bool = False,
    defaults: Policy = DEFAULT,
) -> str | None:
    """Move them to the tail, under new numbers, after a delay if there is one; or kill them, if
    they were rejected too often. `defaults` apply where the queue has no rule. Return the reason if
    any of them died."""
    rules, lane = queue.rules.over(defaults), queue.lane
    queue.shared.counters.rejected += len(deliveries)
    if not (dead or delay_us or queue.is_ruled or defaults is not DEFAULT):
        move(lane, deliveries, lane, Mark.rejected)
        queue.deliver()
        return None
    killed: dict[str, list[Dead]] = {"dead": [], "rejects": [], "ttl": []}
    for number, line in deliveries:
        mark = lane.mark_of(number).rejected()
        gone = Dead(number, line, mark.retry)
        if dead:
            killed["dead"].append(gone)
        elif rules.retries is not None and mark.rejects >= max(1, rules.retries):
            killed["rejects"].append(gone)
        elif is_overdue(lane, number):
            killed["ttl"].append(gone)
        elif wait_us := delay_us or _backoff_us(rules.backoff, mark.rejects, line):
            schedule(queue, number, line, mark, wait_us)
        else:
            to_tail(queue, number, line, Mark.rejected)
    for reason, some in killed.items():
        kill(queue, some, reason)
    queue.deliver()
    return next((reason for reason, some in killed.items() if some), None)


def release(queue: "Queue", deliveries: Sequence[Delivery], delay_us: int = 0) -> None:
    """Return them to their old place, after a delay if there is one, without counting."""
    lane, expired = queue.lane, list[Dead]()
    for number, line in deliveries:
        mark = lane.mark_of(number).changed(redelivered=False)
        if is_overdue(lane, number):
            expired.append(Dead(number, line, mark.retry + 1))
        elif delay_us:
            schedule(queue, number, line, mark._replace(keeps_place=True), delay_us)
        else:
            lane.give_back(number, line, mark)
    kill(queue, expired, "ttl")
    queue.deliver()


def schedule(queue: "Queue", number: int, line: bytes, mark: Mark, delay_us: int) -> None:
    """Schedule a message that a consumer held."""
    clocks = queue.shared.schedule
    due_us = clocks.wall_us() + delay_us
    mark = mark._replace(due_us=due_us, id_crc=crc32(replies.message_id(line)))
    queue.lane.mark(number, mark)
    queue.timed().add(number, [line], [mark], clocks.clock_us() + delay_us)


def to_tail(
    queue: "Queue",
    number: int,
    line: bytes,
    remark: Callable[[Mark], Mark],
    *,
    is_new: bool = False,
) -> None:
    """Append a message under a new number. It keeps the start of its TTL, unless it `is_new` to the
    queue, and, if the queue has dead letters, the time when it was published."""
    lane, rules = queue.lane, queue.rules
    if rules.dead_letters is not None:
        line = with_published(line, queue.arrived_us(number))
    joined_us = 0 if is_new or lane.expiry is None else lane.expiry.joined_us(number)

    def marked(mark: Mark) -> Mark:
        mark = remark(mark)
        return mark._replace(joined_us=mark.joined_us or joined_us) if joined_us else mark

    move(lane, [(number, line)], lane, marked)


def is_overdue(lane: Lane, number: int) -> bool:
    return lane.expiry is not None and lane.expiry.is_overdue(number, lane.next_seq)


def _backoff_us(backoff: Backoff | None, failures: int, line: bytes) -> int:
    if backoff is None or failures <= 0:
        return 0
    most_s = DURATION_S_MAX if backoff.max_s is None else backoff.max_s
    wait_s = min(backoff.first_s * 2.0 ** min(failures - 1, 64), most_s)
    # No clock and no randomness: a replay gives the same time.
    spread = crc32(b"%d %b" % (failures, replies.message_id(line))) / (1 << 31) - 1
    return round(wait_s * (1 + JITTER * spread) * 1e6)
