"""Applies the rules of a queue: its policy over the defaults.

The one rule: what a queue asks for each batch is set here, once.
"""

from mqks.broker.spine.message.policy import Policy
from mqks.broker.spine.queue.order import Rest
from mqks.broker.spine.queue.shared import Place


def apply(queue: Place, rules: Policy) -> None:
    """Apply these rules from now on."""
    before = queue.rules
    if rules is before or rules == before:
        return
    queue.rules, shared = rules, queue.shared
    if rules.single_consumer != before.single_consumer:
        _serve_single(queue)
    queue.is_ruled = rules.count_returns or queue.times is not None
    queue.update_throttle()
    timeout_s = rules.ack_timeout_s
    queue.ack_timeout_us = None if timeout_s is None else round(timeout_s * 1e6)
    queue.capacity.apply(rules)
    queue.update_capacity()
    if rules.ttl_s is not None or queue.times is not None:
        set_ttl(queue, None if rules.ttl_s is None else round(rules.ttl_s * 1e6))
    queue.set_order(shared.features.orders.by_rules(queue, queue.order))
    queue.deliver()


def set_ttl(queue: Place, ttl_us: int | None) -> None:
    expiry, lane = queue.timed().expiry, queue.lane
    if expiry.set_ttl(ttl_us):
        # It counts from when a message arrived, which of old ones only the journal knows.
        for first, joined_us in queue.shared.facts.arrivals(queue.id):
            expiry.joined_at(first, joined_us)
        expiry.joined(lane.taken_end)
    for number, mark in lane.marks.items():
        if mark.joined_us:
            expiry.add(number, mark.expires_us, mark.joined_us)


def _serve_single(queue: Place) -> None:
    """`single_consumer` has changed: only the first attached consumer is active, the others are
    on standby."""
    single = queue.rules.single_consumer
    for place, consumer in enumerate([*queue.consumers]):
        if single and place:
            consumer.rest(Rest.STANDBY)
        else:
            consumer.resume(Rest.STANDBY)
