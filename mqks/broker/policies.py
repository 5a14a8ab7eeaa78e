"""The policy of each queue: `set_queue` has priority over the defaults of the settings.

The one rule: no chain of dead-letter queues leads back to its start. A `set_queue` that would close
a circle is refused; a default that would is ignored.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mqks.broker.base.turns import GOES_ON, Work, slices
from mqks.broker.message.policy import DEFAULT, FLAGS, Policy
from mqks.broker.queue.queue import Queue
from mqks.errors import BadRequest
from mqks.limits import DEAD_LETTERS_MAX, STEP_MESSAGES
from mqks.protocol.requests import SetQueue, shown
from mqks.settings import QueueTable
from mqks.users import allows

if TYPE_CHECKING:
    from mqks.broker.broker import Broker


class Policies:
    """`tables` are the defaults: the first one with a matching mask applies."""

    __slots__ = ("_broker", "_tables")

    def __init__(self, broker: "Broker", tables: Iterable[QueueTable]) -> None:
        self._broker = broker
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
        self._broker.turns.add(self.apply_all())

    def apply_all(self) -> Work[None]:
        step = max(1, STEP_MESSAGES // (4 + len(self._tables)))
        # The second round may apply what the first one ignored because of an earlier default.
        for _ in range(2):
            for some in slices([*self._broker.queues.values()], step):
                for queue in some:
                    self.apply(queue)
                yield GOES_ON

    def apply(self, queue: Queue) -> None:
        """Apply the policy of this queue and the defaults."""
        if queue.deleted:
            return
        rules, own = queue.policy.over(self._default(queue.name)[1]), queue.policy
        target = rules.dead_letters
        if target is not None and own.dead_letters is None and self._returns(queue.name, target):
            rules = rules.changed({"dead_letters": None}, reset=False)
        queue.apply(rules)

    def set(self, wanted: SetQueue) -> Work[None]:
        """Change the policy of a queue. The queue and its dead-letter queue are created if
        needed."""
        broker, name = self._broker, wanted.queue
        target = wanted.changes.get("dead_letters")
        if target is not None and self._returns(name, target):
            raise BadRequest(
                f"set_queue: --dead-letters of {shown(name)} would form a cycle, or a chain of "
                f"more than {DEAD_LETTERS_MAX} queues"
            )
        names = [name] if target is None else [name, target]
        broker.check_queue(*names)
        made = [broker.new_queue(each) for each in names if each not in broker.queues]
        queue = broker.queues[name]
        policy = queue.policy.changed(wanted.changes, reset=wanted.reset)
        if policy != queue.policy:
            broker.set_policy(queue, policy)
        for each in made:
            yield from broker.bindings.queue_made(each)

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

    def _returns(self, name: bytes, target: bytes | None) -> bool:
        """Whether dead letters of this queue return to it when they go to `target` first, or pass
        too many queues."""
        queues = self._broker.queues
        for _ in range(DEAD_LETTERS_MAX):
            if target is None:
                return False
            if target == name:
                return True
            queue = queues.get(target)
            rules = self._default(target)[1] if queue is None else queue.rules
            target = None if rules.dead_letters == target else rules.dead_letters
        return target is not None
