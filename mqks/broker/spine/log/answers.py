"""What happens after a commit: confirms, and what else has waited for it.

The one rule: only `committed` writes a confirm, commit by commit: what a client has asked for is
confirmed in its order.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.places import Rounds
from mqks.broker.spine.base.turns import GOES_ON, Turns, Work, slices
from mqks.broker.spine.log.pending import Batch, Waiters
from mqks.errors import BadRequest
from mqks.limits import STEP_ERRORS, STEP_MESSAGES
from mqks.protocol import replies


class Answers:
    """`memory` counts ready messages in memory; `results` does what follows when results are
    written."""

    def __init__(
        self, turns: Turns, memory: Budget, results: Callable[[dict[bytes, Any]], Work[None]]
    ) -> None:
        self.confirmed = 0
        """Messages, since the start."""
        self._turns = turns
        self._memory = memory
        self._results = results
        self._works: deque[Work[None]] = deque()
        """Of the last commits, in their order."""
        self._held = Rounds[Callable[[], None]]()
        """Those that may take long, and come after confirms."""

    @property
    def are_due(self) -> bool:
        """Whether somebody waits for the answer to what is committed."""
        return bool(self._works or self._held)

    def committed(self, batch: Batch) -> None:
        """This batch is on disk: write its confirms, and what else follows, in turns."""
        self._turns.begin()
        self.confirmed += batch.waiters.confirmed
        self._answer(self._written(batch))

    def failed(self, batch: Batch, failure: BadRequest, *, for_room: bool) -> None:
        """This batch could not be written. Those who wait for it get errors, and consumers that
        waited for their confirm end; `for_room`: only those who need room. The others wait on, as
        acks, queues and bindings are written without."""
        self._turns.begin()
        waiters, batch.waiters = batch.waiters, Waiters()
        if for_room:
            waiters, batch.waiters = waiters.parted()
        self._answer(self._refused(waiters, failure))

    def _answer(self, work: Work[None]) -> None:
        if self._works or not self._turns.run(work):
            self._works.append(work)
            if len(self._works) == 1:
                self._turns.later(self._answer_all())

    def _answer_all(self) -> Work[None]:
        while self._works:
            yield from self._works[0]
            self._works.popleft()

    def _written(self, batch: Batch) -> Work[None]:
        # One write for all confirms of a chunk, whatever their number.
        waiters, weight = batch.waiters, 0
        for connection, placing, others in waiters.confirms:
            ids = placing + others
            connection.unconfirmed -= len(ids)
            if not connection.closed:
                connection.write(replies.confirms(ids))
            weight += len(ids)
            if weight >= STEP_MESSAGES:
                weight = 0
                yield GOES_ON
        for some in slices(waiters.counts, STEP_MESSAGES) if waiters.counts else ():
            for connection, request_id, result in some:
                connection.unconfirmed -= 1
                if not connection.closed:
                    connection.write(replies.ok(request_id, result))
            yield GOES_ON
        if waiters.held:
            self._let_go(waiters, is_written=True)
        if batch.entry.results:
            yield from self._results(batch.entry.results)
        for change, (lane, _) in zip(batch.entry.changes, batch.taken, strict=True):
            if lane.on_written is not None:
                lane.on_written(change.next_seq)
            weight += 1
            if weight >= STEP_MESSAGES:
                weight = 0
                yield GOES_ON
        if self._memory.is_short and batch.taken:
            self._turns.add(self._spill(batch))

    def _refused(self, waiters: Waiters, failure: BadRequest) -> Work[None]:
        waiting = [(connection, [request_id]) for connection, request_id, _ in waiters.counts]
        waiting[:0] = [(replier, placing + ids) for replier, placing, ids in waiters.confirms]
        for connection, ids in waiting:
            for some in slices(ids, STEP_ERRORS):
                connection.unconfirmed -= len(some)
                for request_id in some:
                    connection.fail(request_id, b"", failure)
                yield GOES_ON
        self._let_go(waiters, is_written=False)

    def _let_go(self, waiters: Waiters, *, is_written: bool) -> None:
        """What was held back until a commit."""
        is_telling = bool(self._held)
        for connection, then, _ in waiters.held:
            self._held.add(partial(then, is_written), connection.party)
        if self._held and not is_telling:
            self._turns.add(self._tell_held())

    def _tell_held(self) -> Work[None]:
        while self._held:
            self._held.next()()
            yield GOES_ON

    def _spill(self, batch: Batch) -> Work[None]:
        for change, (lane, _) in zip(batch.entry.changes, batch.taken, strict=True):
            if not lane.deleted:
                yield from lane.spill(change.next_seq)
                yield GOES_ON
