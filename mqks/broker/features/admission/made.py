"""Limits of the queues that a user has made: how many there are, and how much waits in all of them.

    mqks user limit alice --queues 10 --queue-bytes 100000000

The one rule: who made a queue is a field of its policy that is written with it and never changes. A
limit refuses what is new, and takes nothing away.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Final, TypeVar

from mqks.broker.features.admission.capacity import Capacity
from mqks.broker.features.admission.pauses import PausableCapacity
from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.turns import GOES_ON, Turns, Work, slices
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.seams import Update
from mqks.errors import LimitExceeded
from mqks.limits import STEP_RULED
from mqks.users import User

T = TypeVar("T", bound=PausableCapacity)
STATE: Final = (*Capacity.__slots__, *PausableCapacity.__slots__)
"""What a capacity knows, whichever of both kinds it is."""
NOTHING_KEPT: Final = nullcontext()
ALL: Final = ""
"""Has no user as its name."""


@lru_cache(maxsize=1024)
def made_policy(user: str | None) -> Policy:
    """The policy of a queue that this user has just made: one for all of them."""
    return Policy(made_by=user) if user else DEFAULT


class MadeCapacity(PausableCapacity):
    """The limits of a queue of which the user who made it has a limit of bytes. It counts what
    waits in `budget`, in place of another capacity."""

    __slots__ = ("_counted", "budget")

    def __init__(self, old: PausableCapacity, budget: Budget) -> None:
        _take_over(self, old)
        self.budget = budget
        self._counted = 0

    def _count(self) -> None:
        size = self.backlog[1]
        self.budget.take(size - self._counted)
        self._counted = size

    def plain(self) -> PausableCapacity:
        """What was there before; nothing of the queue counts any more."""
        self.budget.take(-self._counted)
        self._counted = 0
        return _take_over(PausableCapacity.__new__(PausableCapacity), self)

    def reserve(self, count: int, size: int) -> None:
        super().reserve(count, size)
        self._count()

    def has_room(self, count: int) -> bool:
        return False  # Each length counts.

    def check(self, size: int, where: str) -> None:
        super().check(size, where)
        self._count()
        budget = self.budget
        if budget.used + size > budget.limit:
            reason = f"queue_bytes_max is {budget.limit}, the message has {size}, and "
            reason += f"{budget.used} bytes wait {where} and the others of the user who made it"
            raise LimitExceeded("user_queue_bytes_max", reason)

    def update(self) -> Update:
        told = super().update()
        self.is_tight = self.is_watched = True
        self._count()
        return told


def _take_over(new: T, old: PausableCapacity) -> T:
    for name in STATE:
        setattr(new, name, getattr(old, name))
    return new


class MadeQueues:
    """`queues` are the existing queues by name. The limits are those of `use`."""

    def __init__(self, queues: Mapping[bytes, Queue], turns: Turns) -> None:
        self._queues = queues
        self._turns = turns
        self._counts = Counter[str]()
        """Queues that exist of each user."""
        self._queues_max: dict[str, int] = {}
        self._budgets: dict[str, Budget] = {}
        """What waits in the queues of each user who has a limit of that."""
        self._coming: dict[str, Counter[bytes]] = {}
        """Names of queues that unfinished requests are to make, of users with a limit; and of all
        together."""

    def use(self, users: Iterable[User]) -> None:
        """Apply the limits of these users. Those of bytes count all that waits when a work has
        found it."""
        before, self._budgets = self._budgets, {}
        self._queues_max = {}
        for user in users:
            if user.queues_max:
                self._queues_max[user.name] = user.queues_max
            if limit := user.queue_bytes_max:
                budget = before.get(user.name) or Budget(limit, self._turns)
                budget.limit = limit
                self._budgets[user.name] = budget
        if before.keys() != self._budgets.keys():
            self._turns.add(self._fit_all())

    def _fit_all(self) -> Work[None]:
        for some in slices([*self._queues.values()], STEP_RULED):
            for queue in some:
                self._fit(queue)
            yield GOES_ON

    def _fit(self, queue: Queue) -> None:
        """Let a queue count for its user, if that is to be limited."""
        capacity, budget = queue.capacity, self._budgets.get(queue.policy.made_by)
        assert isinstance(capacity, PausableCapacity)
        if getattr(capacity, "budget", None) is budget or queue.deleted:
            return
        if isinstance(capacity, MadeCapacity):
            capacity = capacity.plain()
        queue.capacity = capacity if budget is None else MadeCapacity(capacity, budget)
        queue.update_capacity()

    def added(self, queue: Queue) -> None:
        """A queue exists from now on."""
        if user := queue.policy.made_by:
            self._counts[user] += 1
            self._fit(queue)

    def removed(self, queue: Queue) -> None:
        """It is about to be deleted."""
        if user := queue.policy.made_by:
            self._counts[user] -= 1
            if not self._counts[user]:
                del self._counts[user]
            if isinstance(queue.capacity, MadeCapacity):
                queue.capacity = queue.capacity.plain()

    def check(self, user: str | None, new: Sequence[bytes], besides: int = 0) -> None:
        """Raise LimitExceeded if the user must not make these queues, and so many others."""
        if user is None or (limit := self._queues_max.get(user)) is None:
            return
        made, coming = self._counts[user], self._coming.get(user) or Counter()
        count = besides + sum(name not in coming for name in new)
        if made + len(coming) + count <= limit:
            return
        made += sum(name not in self._queues for name in coming)  # Others exist meanwhile.
        if made + count > limit:
            reason = f"queues_max of user {user} is {limit}, and {made} that it has made exist"
            raise LimitExceeded("user_queues_max", reason)

    def has_room(self, new: Sequence[bytes], most: int) -> bool:
        """Whether there are at most so many queues with these."""
        coming = self._coming.get(ALL) or Counter()
        if len(self._queues) + len(coming) + len(new) <= most:
            return True
        names = {*coming, *new}
        return len(self._queues) + sum(name not in self._queues for name in names) <= most

    def allows(self, user: str | None, name: bytes | None) -> bool:
        """Whether this queue exists, or the user may make it now; None is no queue."""
        if name is None or name in self._queues:
            return True
        try:
            self.check(user, [name])
        except LimitExceeded:
            return False
        return True

    def making(self, user: str | None, name: bytes) -> AbstractContextManager[None]:
        """Keep a place for a queue that was checked, and that may be made in a later turn."""
        if name in self._queues:
            return NOTHING_KEPT
        return self._kept([ALL, user] if user and user in self._queues_max else [ALL], name)

    @contextmanager
    def _kept(self, whose: Sequence[str], name: bytes) -> Iterator[None]:
        for each in whose:
            self._coming.setdefault(each, Counter())[name] += 1
        try:
            yield
        finally:
            for each in whose:
                coming = self._coming[each]
                coming[name] -= 1
                if not coming[name]:
                    del coming[name]
                if not coming:
                    del self._coming[each]

    def told(self, user: str) -> dict[str, Any]:
        """As `stats` tells it."""
        budget = self._budgets.get(user)
        return {
            "queues": self._counts[user],
            "queue_bytes": None if budget is None else budget.used,
        }
