"""Which throttle a queue has, by its rules. The spine knows this file as `Features.throttle`.

The one rule: a part that still suits stays, with what it knows.
"""

from mqks.broker.features.admission.pauses import Paused
from mqks.broker.spine.queue.seams import Throttle
from mqks.broker.spine.queue.shared import Place


def by_rules(queue: Place, old: Throttle | None) -> Throttle | None:
    """The rules of a queue have changed."""
    if not queue.rules.paused:
        return None
    return old or Paused(queue)
