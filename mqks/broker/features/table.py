"""The features that hang on the spine: it knows them by this table alone."""

from typing import Final

from mqks.broker.features.admission import unique
from mqks.broker.features.admission.pauses import PausableCapacity
from mqks.broker.features.death import deaths, fates
from mqks.broker.features.death.dead_letters import restored
from mqks.broker.features.order import orders
from mqks.broker.features.throttle import throttles
from mqks.broker.features.time.deadlines import Deadlines
from mqks.broker.features.time.times import Times
from mqks.broker.spine.queue.shared import Features

FEATURES: Final = Features(
    orders=orders,
    returns=fates,
    deaths=deaths,
    restored_letter=restored,
    capacity=PausableCapacity,
    throttle=throttles.by_rules,
    timers=Times,
    ack_timers=Deadlines,
    unique=unique,
)
