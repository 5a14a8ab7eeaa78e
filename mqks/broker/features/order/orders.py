"""Which order a queue has: by key or fair to keys, if its rules say so; by priority, while a
message may have one; otherwise first in, first out. The spine knows this file by
`shared.features.orders`.

The one rule: an order that still suits stays, with what it knows.
"""

from collections.abc import Iterable
from dataclasses import replace

from mqks.broker.features.order.keyed import Keyed
from mqks.broker.features.order.limited import LimitedKeys
from mqks.broker.features.order.ranked import Ranked
from mqks.broker.features.throttle.rate import Rate
from mqks.broker.spine.queue.order import Fifo, Order
from mqks.broker.spine.queue.shared import Place
from mqks.protocol.replies import PRIORITY, priority_of


def by_rules(queue: Place, old: Order) -> Order:
    """The rules of a queue have changed. Messages that are ready when keys do not count any more
    have priority 0 until a restart."""
    rules = queue.rules
    is_ordered, rate = rules.ordered is not None, rules.rate_per_key
    if rules.concurrency_per_key is not None or rate is not None:
        order = old if isinstance(old, LimitedKeys) and old.is_ordered == is_ordered else None
        order = order or LimitedKeys(queue, is_ordered=is_ordered)
        order.set_limits(rules.concurrency_per_key, None if rate is None else Rate.of(rate))
        return order
    if is_ordered or rules.fair is not None:
        suits = type(old) is Keyed and old.is_ordered == is_ordered
        return old if suits else Keyed(queue, is_ordered=is_ordered)
    if not isinstance(old, Keyed):
        return old
    return Ranked(queue) if queue.policy.has_priorities else Fifo(queue.lane)


def by_messages(queue: Place, old: Order, lines: Iterable[bytes]) -> Order:
    if not any(PRIORITY in line and priority_of(line) for line in lines):
        return old
    if not queue.policy.has_priorities:
        queue.keep(replace(queue.policy, has_priorities=True))
    if isinstance(old, Ranked):
        old.seen()
        return old
    return old if isinstance(old, Keyed) else Ranked(queue)


def restored(queue: Place, old: Order) -> Order:
    """The messages of a queue are known to the journal alone: so are their priorities."""
    is_unknown = queue.policy.has_priorities and queue.ready > 0
    if is_unknown and not isinstance(old, Keyed):
        return Ranked(queue, unknown_end=queue.lane.next_seq)
    return old
