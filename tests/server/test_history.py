"""What the server keeps for charts: of the busiest queues, in bounded memory."""

import time

import pytest

from mqks.limits import HISTORY_QUEUES_MAX
from mqks.server import history as module
from mqks.server.history import BROKER, RECENT, WALK_QUEUES, History
from tests.kit.bare import BareWorld


def test_a_queue_that_becomes_busy_takes_the_place_of_one_that_is_not() -> None:
    world, count = BareWorld(), WALK_QUEUES + HISTORY_QUEUES_MAX
    world.send("k", b"".join(b"s subscribe q%d e%d\n" % (n, n) for n in range(count)))
    busy, history = b"q%d" % (count - 1), History(world.broker)

    def kept() -> int:
        names = (b"q%d" % n for n in range(count))
        return sum(history.points(name, day=False) is not None for name in names)

    for _ in range(4):  # Twice around.
        history.sample()
    assert kept() == HISTORY_QUEUES_MAX
    assert history.points(busy, day=False) is None
    for number in range(4):
        world.send("k", b"m%d publish e%d x\n" % (number, count - 1))
        history.sample()
    assert kept() == HISTORY_QUEUES_MAX
    before = history.growth(busy)
    world.send("k", b"last publish e%d x\n" % (count - 1))
    history.sample()
    assert history.growth(busy) == before + 1
    world.send("k", b"d delete_queue --confirm " + busy + b"\n")
    history.sample()
    assert history.points(busy, day=False) is None
    for _ in range(RECENT):
        history.sample()
    assert len(history.points(None, day=False) or ()) == RECENT
    assert len(history.points(None, day=True) or ()) >= RECENT // 30
    times = [point[0] for point in history.points(None, day=False) or ()]
    assert times == sorted(times)


def test_what_is_drawn_small_does_not_change_when_a_point_is_added() -> None:
    world = BareWorld()
    history = History(world.broker)
    world.send("k", b"s subscribe q e\n")
    for number in range(RECENT + 3):
        world.send("k", b"m%d publish e x\n" % number)
        history.sample()
    ready, published = BROKER.index("held") + 1, 0
    before = history.trend(None, ready)
    assert before[-1] == RECENT + 2, "the mean of three points, of which each has one more"
    assert before[-2] == RECENT - 2
    assert min(history.trend(None, published)) > 0
    assert history.trend(b"q", 2)[-1] > RECENT
    assert history.trend(b"none", 2) == []
    history.sample()
    assert history.trend(None, ready)[:-1] == before[:-1]


def test_points_are_in_order_whatever_the_clock_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(BareWorld().broker)
    for ahead_s in (0, -3600, 3600):
        monkeypatch.setattr(module, "time", lambda ahead_s=ahead_s: time.time() + ahead_s)
        history.sample()
        times = [point[0] for point in history.points(None, day=False) or ()]
        assert times == sorted(times)
        assert all(abs(each - time.time() - ahead_s) < 60 for each in times)
