"""The policy of each queue: `set_queue` has priority over the defaults of the settings.

The one rule: only `set_queue` closes a cycle of dead-letter queues; a default is ignored instead.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mqks.broker.spine.base.turns import GOES_ON, Turns, Work, slices
from mqks.broker.spine.message.policy import DEFAULT, FLAGS, Policy
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.rules import apply
from mqks.broker.spine.queue.shared import Place
from mqks.errors import BadRequest
from mqks.limits import DEAD_LETTERS_MAX, STEP_MESSAGES
from mqks.protocol.requests import shown
from mqks.settings import QueueTable
from mqks.users import allows


class Policies:
    """`tables` are the defaults: the first one with a matching mask applies. `queues` are the
    existing queues by name."""

    __slots__ = ("_queues", "_tables", "_turns")

    def __init__(
        self, queues: Mapping[bytes, Queue], turns: Turns, tables: Iterable[QueueTable]
    ) -> None:
        self._queues = queues
        self._turns = turns
        self.set_defaults(tables)

    def set_defaults(self, tables: Iterable[QueueTable]) -> None:
        """Set the defaults of new queues."""
        self._tables = [
            (
                table.name.partition("*")[0].encode(),
                allows([table.name]),
                table.name,
                Policy(**table.fields),
            )
            for table in tables
        ]

    def reload(self, tables: Iterable[QueueTable]) -> None:
        """Set the defaults of all queues, in turns."""
        self.set_defaults(tables)
        self._turns.add(self.apply_all())

    def apply_all(self) -> Work[None]:
        step = max(1, STEP_MESSAGES // (4 + len(self._tables)))
        # The second round may apply what the first one ignored because of an earlier default.
        for _ in range(2):
            for some in slices([*self._queues.values()], step):
                for queue in some:
                    self.apply(queue)
                yield GOES_ON

    def apply(self, queue: Place) -> None:
        """Apply the policy of this queue and the defaults."""
        if queue.deleted:
            return
        rules, own = queue.policy.over(self._default(queue.name)[1]), queue.policy
        target = rules.dead_letters
        if target is not None and own.dead_letters is None:
            chain = self._chain(queue.name, target)
            if chain[-1] == queue.name or len(chain) > DEAD_LETTERS_MAX:
                rules = rules.changed({"dead_letters": None}, reset=False)
        apply(queue, rules)

    def check(self, name: bytes, target: bytes, action: str = "set_queue") -> None:
        """Raise if dead letters of the queue `name` must not go to `target`."""
        *chain, last = self._chain(name, target)
        queues = [self._queues.get(each) for each in chain]
        by_default = any(queue is None or queue.policy.dead_letters is None for queue in queues)
        if len(chain) >= DEAD_LETTERS_MAX or (last == name and by_default):
            raise BadRequest(
                f"{action}: --dead-letters of {shown(name)} would form a cycle with a default, or "
                f"a chain of more than {DEAD_LETTERS_MAX} queues"
            )

    def told(self, queue: Queue) -> dict[str, Any]:
        """The rules of a queue, with the origin of each value."""
        mask = self._default(queue.name)[0]
        settings = {"from": "settings", "name": mask}
        return {
            name: {
                "value": queue.rules.told(name),
                **(settings if getattr(queue.policy, name) is None else {"from": "set_queue"}),
            }
            for name in FLAGS
            if getattr(queue.rules, name) is not None
        }

    def _default(self, name: bytes) -> tuple[str, Policy]:
        for start, matches, mask, policy in self._tables:
            if name.startswith(start) and matches(name):  # Most tables fail at the first test.
                return mask, policy
        return "", DEFAULT

    def returns(self, name: bytes, target: bytes) -> bool:
        """Whether dead letters of this queue return to it when they go to `target` first."""
        return self._chain(name, target)[-1] == name

    def _chain(self, name: bytes, target: bytes) -> list[bytes]:
        """Where dead letters of this queue go in turn, from `target` on: until they are there for
        the second time, return, or have passed too many queues."""
        chain: list[bytes] = []
        following: bytes | None = target
        while following is not None and following not in chain and len(chain) <= DEAD_LETTERS_MAX:
            chain.append(following)
            queue = self._queues.get(following)
            rules = self._default(following)[1] if queue is None else queue.rules
            is_last = following in (name, rules.dead_letters)
            following = None if is_last else rules.dead_letters
        return chain
