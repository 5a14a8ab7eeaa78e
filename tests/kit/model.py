"""A broker so plain that it can be seen to be right: lists, one message at a time, no journal.

The one rule: it says exactly which lines each consumer and each request gets, in their order.
"""

import re
from collections.abc import Container, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from mqks.broker.spine.clients.consumer import UNACKED_OVERHEAD_BYTES
from mqks.broker.spine.message.states import AFTER, APPENDS, Event, State

MASK = "\t"
"""Before a mask among the events that a name is bound to."""
ASIDE = 1 << 52
"""Places of what is published with a delay, until it joins."""


@dataclass(eq=False)
class Message:
    place: int
    id: str
    event: str
    data: str
    retry: int = 0
    keeps_place: bool = False
    """When it is due."""
    died_in: str = ""
    """For a dead letter: the queue."""
    is_away: bool = False
    """It is only on disk, and the disk is slow."""
    priority: int = 0
    batch: int = 0
    """The generation of the batch that it is a member of."""
    has_died: bool = False
    number: int = 0
    """Its place, unless it has that of a message that it has replaced."""
    unique: str = ""
    until_acked: bool = False
    was_tried: bool = False
    """It has been delivered."""

    def rank(self) -> tuple[int, int]:
        return -self.priority, self.place

    @property
    def unacked_bytes(self) -> int:
        return len(f"{self.id} event={self.event} {self.data}") + UNACKED_OVERHEAD_BYTES

    def told_to(self, consumer_id: str) -> str:
        retry = f",retry={self.retry}" if self.retry else ""
        return f"{consumer_id} ok {self.id} event={self.event}{retry} {self.data}"


@dataclass(eq=False)
class ModelConsumer:
    id: str
    connection: str
    queue: str
    manual_ack: bool
    unacked: list[Message] = field(default_factory=list)


@dataclass
class ModelBatch:
    generation: int
    then: str
    """The data of what follows, whose event is e1."""
    total: int = 0
    closed: bool = False


@dataclass
class ModelQueue:
    rule: str | None = None
    deadline: float | None = None
    ready: list[Message] = field(default_factory=list)
    scheduled: list[tuple[float, Message]] = field(default_factory=list)
    """Each with the time when it is due."""
    dead_letters: str | None = None
    paused: bool = False
    """Nothing is delivered."""

    def remove(self, gone: Sequence[Message]) -> None:
        self.ready = [each for each in self.ready if each not in gone]
        self.scheduled = [each for each in self.scheduled if each[1] not in gone]


class Model:
    def __init__(self) -> None:
        self.now = 0.0
        self.unacked_bytes_max = 1 << 62
        self.places = 0
        self.bindings: dict[str, set[str]] = {}
        self.queues: dict[str, ModelQueue] = {}
        self.consumers: dict[str, ModelConsumer] = {}
        self.rings: dict[str, list[ModelConsumer]] = {}
        """By queue name, also while there is no such queue."""
        self.held_back: list[ModelConsumer] = []
        """Those that left their ring, or did not get back into it, because too much is unacked."""
        self.returning: set[str] = set()
        """Queues to which messages of consumers that ended come back just now."""
        self.held: list[ModelConsumer] = []
        self.attached: list[ModelConsumer] = []
        """All consumers in the order they came."""
        self.told: dict[str, list[str]] = {}
        self.confirms: list[tuple[str, str]] = []
        """Connection and line."""
        self.replaced: list[tuple[str, str]] = []
        """Connections whose consumer id another one uses, which they are told after its confirm."""
        self.once: set[str] = set()
        self.batch: ModelBatch | None = None
        self.jobs: dict[str, Message] = {}
        """By id, those whose result is kept."""

    # -- what a client asks for

    def publish(
        self,
        message_id: str,
        event: str,
        data: str,
        queues: list[str],
        priority: int = 0,
        batch: int = 0,
    ) -> None:
        """`queues` are those bound to the event, in whatever order they are served."""
        assert sorted(queues) == sorted(name for name in self.queues if self.leads(event, name))
        for name in queues:
            message = Message(0, message_id, event, data, priority=priority, batch=batch)
            self._append(name, message)
            self.deliver(name)

    def publish_with(
        self,
        connection: str,
        message_id: str,
        event: str,
        data: str,
        flags: set[str],
        queues: list[str],
    ) -> None:
        """A publish with flags."""
        known = "--once" in flags and message_id in self.once
        if "--mandatory" in flags and not queues and not known:
            self._tell(connection, f"{message_id} error")
            return
        if "--once" in flags and queues:
            self.once.add(message_id)
        if not known:
            self.publish(message_id, event, data, queues)
        if "--confirm" in flags:
            self.confirm(connection, message_id)

    def publish_in_batch(self, message_id: str, data: str, queues: list[str]) -> None:
        assert self.batch is not None
        self.batch.total += len(queues)
        self.publish(message_id, "e1", data, queues, batch=self.batch.generation)

    def living(self, batch: ModelBatch) -> int:
        """How many of its messages are neither acked nor dead."""
        messages = [message for name in self.queues for message in self._waiting(name)]
        messages += [message for consumer in self.attached for message in consumer.unacked]
        return sum(message.batch == batch.generation for message in messages)

    def end_batch(self, queues: list[str]) -> None:
        """A commit takes what is pending: what follows the batch is in it, if all is done."""
        batch = self.batch
        if batch is not None and batch.closed and not self.living(batch):
            self.batch = None
            self.publish("b1:end", "e1", batch.then, queues)

    def confirm(self, connection: str, request_id: str, count: int | str = "") -> None:
        self.confirms.append((connection, f"{request_id} ok {count}"))

    def trim(self, name: str, count: int) -> int:
        """Drop the first waiting messages; return how many there were."""
        if name not in self.queues:
            return 0
        ready = self.queues[name].ready
        oldest = sorted(ready, key=lambda message: message.number)[:count]
        ready[:] = [message for message in ready if message not in oldest]
        self.deliver(name)
        return len(oldest)

    def messages(self, name: str) -> list[Message]:
        """The log: everything that is not settled, in order, but what a delay keeps out of it."""
        there = [*self._waiting(name), *self._held(name)]
        messages = [message for message in there if message.number < ASIDE]
        return sorted(messages, key=lambda message: message.number)

    def consume(
        self,
        connection: str,
        consumer_id: str,
        name: str,
        events: list[str],
        add: list[str],
        rule: str | None,
        manual_ack: bool,
        confirm: bool,
    ) -> None:
        before = set(self.bindings.get(name, ()))
        bound = (set(events) if events else before) | set(add)
        self._bind(name, bound)
        queue = self._make(name)
        changed = bound != before or queue.rule != rule
        queue.rule, queue.deadline = rule, None
        consumer = ModelConsumer(consumer_id, connection, name, manual_ack)
        earlier = self.consumers.get(consumer_id)
        self.consumers[consumer_id] = consumer
        self.attached.append(consumer)
        if confirm:
            self.held.append(consumer)
            self.confirm(connection, consumer_id)
        else:
            self.rings.setdefault(name, []).append(consumer)
        if earlier:
            self._tell_end(earlier, connection)
            self._end([earlier])
        if changed:
            self._update(name, None if add else consumer)
        self.deliver(name)

    def leads(self, event: str, name: str) -> bool:
        """Whether an event goes to a queue of this name."""
        return any(_leads(each, event) for each in self.bindings.get(name, ()))

    def rebind(
        self,
        name: str,
        events: list[str],
        remove: list[str],
        masks: list[str],
        add: list[str],
        add_masks: Sequence[str] = (),
    ) -> None:
        before = set(self.bindings.get(name, ()))
        flags = remove or masks or add or add_masks
        bound = set(events) if events or not flags else before.copy()
        bound -= {*remove, *(MASK + mask for mask in masks)}
        for mask in masks:
            plain = {event for event in bound if event[0] != MASK and "." in event}
            bound -= {event for event in plain if _leads(MASK + mask, event)}
        bound |= {*add, *(MASK + mask for mask in add_masks)}
        self._bind(name, bound)
        if bound != before:
            self._update(name, None)

    def ack(self, consumer_id: str, message_id: str) -> None:
        if self._settle(consumer_id, message_id):
            self._go_on(self.consumers[consumer_id])

    def reject(self, consumer_id: str, message_id: str) -> None:
        settled = self._settle(consumer_id, message_id)
        if not settled:
            return
        name = self.consumers[consumer_id].queue
        # Until they are back nothing is delivered.
        self.returning.add(name)
        self._go_on(self.consumers[consumer_id])
        self.returning.discard(name)
        for message in settled:
            message.retry += 1
            self._append(name, message)
        self.deliver(name)

    def publish_later(
        self, message_id: str, event: str, data: str, queues: list[str], delay: float
    ) -> None:
        for name in queues:
            self._put_aside(name, Message(0, message_id, event, data), delay)

    def _put_aside(self, name: str, message: Message, delay: float) -> None:
        self.places += 1
        message.place = message.number = ASIDE + self.places
        self.queues[name].scheduled.append((self.now + delay, message))

    def publish_unique(
        self, connection: str, wanted: Message, queues: list[str], replaces: bool, delay: float
    ) -> None:
        placed, duplicate, replaced = False, "", ""
        for name in queues:
            queue, message, place = self.queues[name], replace(wanted), 0
            if (holder := self._holder(name, wanted.unique)) is not None:
                if not replaces or holder not in self._waiting(name):
                    duplicate = duplicate or holder.id
                    continue
                place = holder.place if holder in queue.ready else 0
                queue.remove([holder])
                replaced = replaced or holder.id
            placed = True
            if delay:
                self._put_aside(name, message, delay)
                continue
            self._append(name, message)
            message.place = place or message.place
            queue.ready.sort(key=Message.rank)
            self.deliver(name)
        told = f"replaced {replaced}" if replaced else ""
        self.confirm(
            connection, wanted.id, told if placed or not queues else f"duplicate {duplicate}"
        )

    def _holder(self, name: str, key: str) -> Message | None:
        there = [*self._waiting(name), *self._held(name)]
        living = [each for each in there if each.unique == key and not each.died_in]
        return next((each for each in living if each.until_acked or not each.was_tried), None)

    def give_up(self, consumer_id: str, message_id: str, how: str, delay: float) -> None:
        """`how` is reject, reject --dead, release or touch --for=0."""
        settled = self._settle(consumer_id, message_id)
        if not settled:
            return
        name = self.consumers[consumer_id].queue
        queue = self.queues[name]
        self._go_on(self.consumers[consumer_id])
        named = {"reject --dead": Event.KILL, "touch --for=0": Event.END}
        event = named.get(how) or Event(how)
        if delay and event is not Event.KILL:
            event = Event.DELAY
        after = AFTER[State.UNACKED, event]
        for message in settled:
            if after is State.DEAD:
                self._kill(name, message)
                continue
            message.retry += how != "release"
            if after is State.SCHEDULED:
                message.keeps_place = how == "release"
                queue.scheduled.append((self.now + delay, message))
            elif event not in APPENDS:
                queue.ready.append(message)
                queue.ready.sort(key=Message.rank)
            else:
                self._append(name, message)
        self.deliver(name)

    def submit(self, job: str, name: str, data: str, delay: float) -> None:
        message = self.jobs[job] = Message(0, job, "e1", data)
        if delay:
            self._put_aside(name, message, delay)
        else:
            self._append(name, message)
            self.deliver(name)

    def job_states(self, job: str) -> set[str]:
        """Those that a job may have: the model does not know how it has left."""
        message = self.jobs[job]
        if message.has_died:
            return {"dead"}
        if any(message in self._waiting(name) for name in self.queues):
            return {"waiting"}
        is_held = any(message in holder.unacked for holder in self.attached)
        return {"running"} if is_held else {"done", "cancelled"}

    def cancel_job(self, name: str, job: str) -> str:
        queue, message = self.queues.get(name), self.jobs.get(job)
        if queue is None:
            return "none"
        waiting, held = self._waiting(name), self._held(name)
        is_here = message in (*waiting, *held)
        if any(message is each if is_here else each.id == job for each in held):
            return "held"
        gone = [each for each in waiting if (message is each if is_here else each.id == job)]
        queue.remove(gone)
        self.deliver(name)
        return "cancelled" if gone else "none"

    def _kill(self, name: str, message: Message) -> None:
        message.has_died = True
        target = self.queues[name].dead_letters
        if target is not None:
            message.retry, message.died_in, message.batch = 0, name, 0
            self._make(target)
            self._append(target, message)

    def set_dead_letters(self, name: str, target: str) -> None:
        self._make(target)
        self._make(name).dead_letters = target

    def redrive(self, name: str) -> str:
        letters = self.queues[name].ready if name in self.queues else []
        dead = sorted((m for m in letters if m.died_in), key=lambda message: message.place)
        stay, targets = 0, set[str]()
        for message in dead:
            target = message.died_in
            if message.unique and self._holder(target, message.unique):
                stay += 1
                continue
            letters.remove(message)
            self._make(target)
            message.died_in, message.was_tried = "", False
            self._append(target, message)
            targets.add(target)
        for target in targets:
            self.deliver(target)
        return f"{len(dead) - stay} duplicate {stay}" if stay else f"{len(dead)}"

    def cancel(self, name: str, message_id: str) -> int:
        queue = self.queues.get(name) or ModelQueue()
        group = message_id.removesuffix("*") if message_id.endswith("#*") else ""
        found = [
            each
            for _, each in queue.scheduled
            if message_id in ("--all", each.id) or (group and each.id.startswith(group))
        ]
        queue.remove(found)
        return len(found)

    def delete_consumer(self, connection: str, consumer_id: str, *, tell: bool = False) -> None:
        if consumer_id in self.consumers:
            if tell:
                self._tell_end(self.consumers[consumer_id], connection)
            self._end([self.consumers[consumer_id]])

    def _tell_end(self, consumer: ModelConsumer, connection: str) -> None:
        """Another connection has ended it, or taken its id: after its confirm."""
        if consumer.connection != connection:
            if consumer in self.held:
                self.replaced.append((consumer.connection, consumer.id))
            else:
                self._tell(consumer.connection, f"{consumer.id} error")

    def disconnect(self, connection: str, consumer_ids: list[str]) -> None:
        """`consumer_ids` are those of its consumers, in whatever order they end."""
        ended = [self.consumers[consumer_id] for consumer_id in consumer_ids]
        assert len(ended) == sum(each.connection == connection for each in self.attached)
        assert all(each.connection == connection for each in ended)
        self.confirms = [each for each in self.confirms if each[0] != connection]
        self.replaced = [each for each in self.replaced if each[0] != connection]
        self._end(ended)

    def delete_queue(self, name: str) -> None:
        unbound, queue = self.bindings.pop(name, None), self.queues.pop(name, None)
        if queue:
            for consumer in self.attached:
                if consumer.queue == name and consumer.unacked:
                    consumer.unacked.clear()
                    self._forget_held_back(consumer)
                    self._deliver_held_back()
        if unbound or (queue and queue.rule is not None):
            self._update(name, None)

    def delete_when_unused(self, name: str, rule: str) -> None:
        queue = self.queues.get(name)
        if queue is None:
            return
        queue.rule = rule
        if not self._consumers(name):
            self._unused(name)

    # -- what happens

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for name, queue in self.queues.items():
            due = [each for each in queue.scheduled if each[0] <= self.now]
            queue.scheduled = [each for each in queue.scheduled if each[0] > self.now]
            for _, message in sorted(due, key=lambda each: (each[0], each[1].place)):
                if message.keeps_place:
                    message.keeps_place = False
                    queue.ready.append(message)
                    queue.ready.sort(key=Message.rank)
                else:
                    self._append(name, message)
            self.deliver(name)
        for name, queue in list(self.queues.items()):
            if queue.deadline is not None and queue.deadline <= self.now:
                self.delete_queue(name)

    def commit(self, away: Container[str] = ()) -> "Model":
        """Confirms go out; return what a crash from here on comes back to. The messages of the
        queues that are `away` come from disk when all consumers are there."""
        for connection, line in self.confirms:
            self._tell(connection, line)
        self.confirms.clear()
        for connection, consumer_id in self.replaced:
            now = self.consumers.get(consumer_id)
            if now is None or now.connection != connection:
                self._tell(connection, f"{consumer_id} error")
        self.replaced.clear()
        held, self.held = self.held, []
        for consumer in held:
            if consumer in self.attached:
                self.rings.setdefault(consumer.queue, []).append(consumer)
                if consumer.queue in self.queues and consumer.queue not in away:
                    self.deliver(consumer.queue)
        for name in dict.fromkeys(each.queue for each in held if each.queue in away):
            if name in self.queues:
                self.deliver(name)
        return deepcopy(self)

    def recover(self, now: float) -> None:
        """Every connection is gone; what consumers held counts as rejected."""
        self.now = now
        self.told.clear()
        self.confirms.clear()
        self.replaced.clear()
        self.held.clear()
        for consumer in self.attached:
            self._give_back(consumer)
        self.consumers.clear()
        self.attached.clear()
        self.rings.clear()
        self.held_back.clear()
        for queue in self.queues.values():
            queue.deadline = now + float(queue.rule) if queue.rule else None
            for message in queue.ready:
                message.place = message.number
            queue.ready.sort(key=Message.rank)

    # -- within

    def deliver(self, name: str) -> None:
        queue, ring = self.queues[name], self.rings.get(name, [])
        if name in self.returning or queue.paused:
            return
        while queue.ready and ring and not queue.ready[0].is_away:
            consumer = ring.pop(0)
            if not self._may_take(consumer):
                self._hold_back(consumer)
                continue
            message = queue.ready.pop(0)
            message.place, message.was_tried = message.number, True
            ring.append(consumer)
            self._tell(consumer.connection, message.told_to(consumer.id))
            if consumer.manual_ack:
                consumer.unacked.append(message)

    @property
    def _unacked_is_full(self) -> bool:
        held = sum(message.unacked_bytes for each in self.attached for message in each.unacked)
        return held >= self.unacked_bytes_max

    def _may_take(self, consumer: ModelConsumer) -> bool:
        """One message it may always hold."""
        return not consumer.manual_ack or not consumer.unacked or not self._unacked_is_full

    def _hold_back(self, consumer: ModelConsumer) -> None:
        if consumer not in self.held_back:
            self.held_back.append(consumer)

    def _forget_held_back(self, consumer: ModelConsumer) -> None:
        self.held_back = [each for each in self.held_back if each is not consumer]

    def _deliver_held_back(self) -> None:
        while self.held_back and not self._unacked_is_full:
            self._wake(self.held_back.pop(0))

    def _wake(self, consumer: ModelConsumer) -> None:
        if consumer.queue not in self.queues:
            return
        if not self._may_take(consumer):
            self._hold_back(consumer)
            return
        ring = self.rings[consumer.queue]
        if consumer not in ring:
            ring.append(consumer)
        self.deliver(consumer.queue)

    def _go_on(self, consumer: ModelConsumer) -> None:
        """It has settled something: those who were held back come first."""
        self._deliver_held_back()
        if not consumer.unacked:
            self._forget_held_back(consumer)
        if consumer not in (*self.rings[consumer.queue], *self.held_back):
            self._wake(consumer)

    def _tell(self, connection: str, line: str) -> None:
        self.told.setdefault(connection, []).append(line)

    def _append(self, name: str, message: Message) -> None:
        self.places += 1
        message.place = message.number = self.places
        self.queues[name].ready.append(message)
        self.queues[name].ready.sort(key=Message.rank)

    def _make(self, name: str) -> ModelQueue:
        if name not in self.queues:
            self.queues[name] = ModelQueue()
            self.rings[name] = [
                consumer
                for consumer in self.attached
                if consumer.queue == name and consumer not in self.held
            ]
        return self.queues[name]

    def _bind(self, name: str, bound: set[str]) -> None:
        if bound:
            self.bindings[name] = bound
        else:
            self.bindings.pop(name, None)

    def _waiting(self, name: str) -> list[Message]:
        queue = self.queues.get(name) or ModelQueue()
        return [*queue.ready, *(message for _, message in queue.scheduled)]

    def _held(self, name: str) -> list[Message]:
        return [message for each in self._consumers(name) for message in each.unacked]

    def _consumers(self, name: str) -> list[ModelConsumer]:
        return [consumer for consumer in self.attached if consumer.queue == name]

    def _update(self, name: str, but: ModelConsumer | None) -> None:
        queue = self.queues.get(name)
        rule = queue.rule if queue else None
        for consumer in self._consumers(name):
            if consumer is but:
                continue
            bound = sorted(self.bindings.get(name, ()))
            words = [consumer.id, "ok --update", name, *(e for e in bound if e[0] != MASK)]
            masks = [event[1:] for event in bound if event[0] == MASK]
            words += ["--add-mask", *masks] if masks else []
            if rule is not None:
                flag = "--delete-queue-when-unused"
                words.append(f"{flag}={float(rule)}" if rule else flag)
            if consumer.manual_ack:
                words.append("--manual-ack")
            self._tell(consumer.connection, " ".join(words))

    def _settle(self, consumer_id: str, message_id: str) -> list[Message]:
        consumer = self.consumers.get(consumer_id)
        if consumer is None:
            return []
        settled = [message for message in consumer.unacked if message_id in ("--all", message.id)]
        if message_id == "--all":
            settled.sort(key=lambda message: message.place)
        else:
            settled = settled[:1]
        for message in settled:
            consumer.unacked.remove(message)
        return settled

    def _end(self, consumers: list[ModelConsumer]) -> None:
        names: dict[str, None] = {}
        for consumer in consumers:
            self.attached = [each for each in self.attached if each is not consumer]
            self.held = [each for each in self.held if each is not consumer]
            if self.consumers.get(consumer.id) is consumer:
                del self.consumers[consumer.id]
            ring = self.rings.get(consumer.queue, [])
            ring[:] = [each for each in ring if each is not consumer]
            self._forget_held_back(consumer)
            names[consumer.queue] = None
            # Who waits for what it held goes first, but in its own queue waits for the messages.
            self.returning.add(consumer.queue)
            self._deliver_held_back()
        for consumer in consumers:
            self._give_back(consumer)
        self.returning.clear()
        for name in names:
            if name not in self.queues:
                continue
            if self._consumers(name):
                self.deliver(name)
            else:
                self._unused(name)

    def _give_back(self, consumer: ModelConsumer) -> None:
        queue = self.queues.get(consumer.queue)
        for message in consumer.unacked:
            message.retry += 1
            if queue:
                queue.ready.append(message)
        consumer.unacked.clear()
        if queue:
            queue.ready.sort(key=Message.rank)

    def _unused(self, name: str) -> None:
        rule = self.queues[name].rule
        if rule == "":
            self.delete_queue(name)
        elif rule is not None:
            self.queues[name].deadline = self.now + float(rule)


def _leads(bound: str, event: str) -> bool:
    """Whether an event goes to whoever is bound to this."""
    if bound[0] != MASK:
        return bound == event
    parts, mask = event.split("."), bound[1:].split(".")
    if mask[-1] == "**":
        mask, parts = mask[:-1], parts[: len(mask) - 1] if len(parts) >= len(mask) else []
        if len(parts) != len(mask):
            return False
    return len(mask) == len(parts) and all(
        re.fullmatch(".*".join(map(re.escape, each.split("*"))), part)
        for each, part in zip(mask, parts, strict=True)
    )
