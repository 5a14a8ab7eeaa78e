"""The clicks of a made-up shop: the same ones for the same seed, on any machine.

Visitors come in sessions; each looks at pages, may search, fill a cart, and sometimes order.
"""

import random
from collections.abc import Iterator

# What a visitor does next, and how likely.
NEXT = {
    "page.view": (["page.view", "search", "cart.add", "session.end"], [55, 15, 12, 18]),
    "search": (["page.view", "search", "session.end"], [70, 20, 10]),
    "cart.add": (["page.view", "cart.add", "order.new", "cart.drop"], [50, 15, 25, 10]),
    "cart.drop": (["page.view", "session.end"], [60, 40]),
    "order.new": (["page.view", "session.end"], [30, 70]),
}
EVENTS = ["session.start", *NEXT, "session.end"]
VISITORS, PAGES, AT_ONCE = 50_000, 2_000, 500


def clicks(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """So many events with their payloads, JSON of about 100 bytes."""
    chance = random.Random(seed)
    # How popular pages are falls off as in real shops: few are seen often.
    popular = random.Random(seed).choices(
        range(PAGES), [1 / (rank + 1) for rank in range(PAGES)], k=100_000
    )
    sessions = [[0, 0, 0] for _ in range(AT_ONCE)]
    doing = ["session.end"] * AT_ONCE
    for number in range(count):
        at = int(chance.random() * AT_ONCE)
        session = sessions[at]
        if doing[at] == "session.end":
            session[:] = [int(chance.random() * VISITORS), number, 0]
            doing[at] = event = "session.start"
        else:
            choices, weights = NEXT.get(doing[at], (["page.view"], [1]))
            [event] = chance.choices(choices, weights)
            doing[at] = event
        session[2] += 1
        page = popular[int(chance.random() * len(popular))]
        yield (
            event,
            b'{"click":%d,"visitor":"v%05d","session":"s%08d","step":%d,"page":"/product/%d"}'
            % (number, *session, page),
        )
