"""The broker: queues, bindings, consumers and connections.

The one rule: a call here never waits, and leaves its replies in outboxes and its changes in the
pending batch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from math import inf
from typing import Any, TypeVar, get_args

from mqks.audit import Audit, AuditRecord
from mqks.broker.features.admission.draining import Drain
from mqks.broker.features.admission.made import MadeQueues, made_policy
from mqks.broker.features.admission.once import OnceWindow
from mqks.broker.features.batches.batches import Batches
from mqks.broker.features.jobs.progress import AllProgress
from mqks.broker.features.jobs.results import Results
from mqks.broker.features.table import FEATURES
from mqks.broker.features.tails.tails import MessageTail, Tails
from mqks.broker.features.time.ticks import NextTick, Schedules, no_cron
from mqks.broker.features.trace.traces import Traces
from mqks.broker.policies import Policies
from mqks.broker.spine.base.facts import Facts
from mqks.broker.spine.base.notices import Notices
from mqks.broker.spine.base.places import Places
from mqks.broker.spine.base.turns import GOES_ON, WAITS, Work, finish, slices
from mqks.broker.spine.clients.access import Access
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer, consumers_of
from mqks.broker.spine.clients.outbox import Flow
from mqks.broker.spine.clients.refusals import Refusals
from mqks.broker.spine.log.answers import Answers
from mqks.broker.spine.log.metadata import MetadataBudget, consumer_bytes, queue_bytes
from mqks.broker.spine.log.pending import ErrorRecord, QueueState
from mqks.broker.spine.message.policy import Policy
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.order import Rest
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.recovery import delete, start
from mqks.broker.spine.queue.rules import apply
from mqks.broker.spine.queue.selection import Read
from mqks.broker.spine.queue.shared import Place, Shared
from mqks.broker.spine.routing.bindings import Bindings
from mqks.broker.spine.routing.publishing import Publishing
from mqks.errors import BadRequest, Limit, LimitExceeded
from mqks.limits import (
    ERRORS_TOLD_MAX,
    EVALUATIONS_MAX,
    LISTS_MAX,
    READS_WAITING_MAX,
    STEP_MESSAGES,
)
from mqks.protocol import replies
from mqks.protocol.masks import MASK
from mqks.protocol.requests import ACK_TIMEOUT, BACKOFF, DeleteRule, SetQueue, policy_text, shown
from mqks.settings import Settings
from mqks.users import Permissions, Users

T = TypeVar("T")
CALM_S = 60.0
"""A repeated event is reported again only after it has not happened for this long."""


class Broker:
    """`clock` gives seconds that only grow, `now_us` microseconds since 1970; `new_error_id` and
    `on_error` are for `Refusals`; `facts` are those of the journal, if there is one; `notices` are
    reported to the server; `next_tick` reads the cron expressions of schedules."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float],
        now_us: Callable[[], int],
        new_error_id: Callable[[], tuple[str, int]],
        on_error: Callable[[ErrorRecord], bool],
        facts: Facts | None = None,
        notices: Notices | None = None,
        next_tick: NextTick = no_cron,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.connections: dict[int, Connection] = {}
        self.connection_count: Callable[[], int] = lambda: len(self.connections)
        """The server's count includes connections in a TLS handshake."""
        self.queues: dict[bytes, Queue] = {}
        self.metadata = MetadataBudget(settings)
        self.notices = notices or Notices()
        self.withholds = False
        self.shared = Shared(settings, self, FEATURES, facts or Facts(), clock=clock, now_us=now_us)
        self.turns, self.pending = self.shared.turns, self.shared.pending
        self.made = MadeQueues(self.queues, self.turns)
        self.flow = Flow(settings, self.turns, self.shared.outboxes, self._unacked_is_full)
        self.schedule = self.shared.schedule
        self.bindings = Bindings(
            settings.bindings_per_queue_max, self.metadata, self.queues, self.pending
        )
        self.consumers: dict[bytes, Consumer] = {}
        self.drain = Drain(self.shared, self.flow, self.queues, self.consumers, self.connections)
        self._replaced: dict[Consumer, BadRequest] = {}
        """Whom another connection has ended, and what is to be told of that after their confirm."""
        self.expelled: list[Connection] = []
        """Connections that others have expelled, which the server closes."""
        self.orphans: dict[bytes, Queue] = {}
        """Deleted queues that still have consumers, by name."""
        self.purged = 0
        self.loop_held = self.loop_late = 0
        """How often the server's event loop was blocked: see `server/held.py`."""
        self.reverts_seen = 0
        """Reads that prove that the database went back to an earlier state under its epoch."""
        self.limits_reached: dict[Limit, int] = dict.fromkeys(get_args(Limit), 0)
        """Counters since the start; `docs/protocol.md` describes them under stats."""
        self.last_errors: deque[ErrorRecord] = deque(
            maxlen=min(settings.errors_kept_max, ERRORS_TOLD_MAX)
        )
        """The source of `stats errors`, also before they are written."""
        self.audit = Audit(
            self._audited,
            self.schedule.after,
            now_us,
            kept_max=settings.audit_kept_max,
            is_on=settings.audit != "off",
        )
        self.once = OnceWindow(settings.once_ids_max, self.schedule.clock_us, self.schedule.wall_us)
        self._unacked_full_s = -inf
        self.started_s = clock()
        self.tails = Tails(settings, self.turns, self.schedule, self.shared.outboxes)
        self.work_places: dict[bytes, Places] = {}
        """Consumer id → for requests that choose from what it holds, each with a copy of that."""
        self.evaluations = Places(EVALUATIONS_MAX)
        """For expressions of `_eval`."""
        self.lists = Places(LISTS_MAX)
        """For lists of `stats`."""
        self._last_update: tuple[Queue, bytes] | None = None
        """The last queue whose consumers got an update, and its bindings."""
        self.want_reload: Callable[[Connection, bytes], None] = _read_nothing
        """Read files again, and tell the connection; set by the server."""
        self.reads_waiting: list[Connection] = []
        """Connections with read requests, which the server answers."""
        self.next_queue_id = 1
        self._connection_ids = count(1)
        self.refusals = Refusals(
            self.pending,
            self.shared.counters,
            self.limits_reached,
            self.last_errors,
            new_error_id,
            on_error,
        )
        self.access = Access(
            settings.line_bytes_max,
            self.refusals,
            self.end_consumers,
            self.end_tails,
            self.audit,
        )
        self.publishing = Publishing(settings, self.shared, self.bindings, self.tails, self.once)
        self.traces = Traces(
            settings.trace_bytes_max,
            self.shared,
            self.publishing,
            lambda: [*self.queues.values(), *self.orphans.values()],
        )
        self.progress = AllProgress()
        self.results = Results(settings, self.shared, self._progress_of)
        self.answers = Answers(self.turns, self.shared.memory, self.results.committed)
        self.schedules = Schedules(self.shared, self.bindings, self.publishing, next_tick)
        self.batches = Batches(settings, self.shared, self.bindings, self.publishing)
        self.policies = Policies(self.queues, self.turns, settings.queue_tables)

    @property
    def unwritable(self) -> str:
        """Why nothing can be written durably; publishes are refused while this is not empty."""
        return self.pending.unwritable

    @unwritable.setter
    def unwritable(self, why: str) -> None:
        self.pending.unwritable = why

    def _progress_of(self, consumer_id: bytes, message_id: bytes, number: int) -> bytes:
        found = self.progress.of(self.consumers.get(consumer_id), message_id, number)
        return b"" if found is None else found.told

    def set_read_only(self, read_only: bool) -> bool:
        """Add nothing by requests, or again; return whether that changed."""
        changed = self.shared.read_only != read_only
        self.shared.read_only = self.metadata.read_only = read_only
        return changed

    def long_names(self) -> int:
        """Number of queues, events and masks with names longer than the limit."""
        bindings = self.bindings
        names = {*self.queues, *bindings.by_name, *bindings.masks_by_name}
        events = chain.from_iterable(bindings.by_name.values())
        masks = chain.from_iterable(bindings.masks_by_name.values())
        plain = (mask.removeprefix(MASK) for mask in masks)
        return sum(map(self.metadata.is_long, chain(names, events, plain)))

    def set_users(self, users: Users) -> None:
        """These are the users from now on; what connections may do is changed by the server."""
        self.access.users = users
        self.made.use(users.given.values())

    def users_shown(self) -> list[dict[str, Any]]:
        """Their permissions and limits, and what they use of these, for people."""
        return [row | self.made.told(row["name"]) for row in self.access.users.shown]

    def _audited(self, record: AuditRecord) -> None:
        self.notices.audited(record)
        self.pending.add_audit(record)

    # -- connections

    def connect(
        self, address: str, *, local: bool, source: bytes = b"", guest: bool = False
    ) -> Connection:
        """Add a connection. The server's gate limits their number. `source` is what counts as one
        address. A `guest` may operate the server."""
        settings = self.settings
        connection = Connection(
            self.flow,
            self._unblocked,
            self.refusals.tell,
            next(self._connection_ids),
            address,
            local,
            settings.line_bytes_max,
            source=source,
            stranger=settings.needs_auth(local=local),
            guest=guest,
        )
        self.connections[connection.id] = connection
        return connection

    def end(self, connection: Connection) -> None:
        """A client sends no more: its consumers and tails end, and its messages are returned."""
        self.end_tails(connection)
        if connection.receivers:
            self.turns.later(_end_receivers(connection))
        self.end_consumers(list(connection.consumers.values()), lost=True)

    def disconnect(self, connection: Connection) -> None:
        """A client has disconnected, and its works are done."""
        connection.closed = True
        if connection.transaction is not None:
            connection.transaction.end()
        self.end(connection)
        if self.connections.pop(connection.id, None) is not None:
            self.access.left(connection)

    def _unblocked(self, connection: Connection) -> None:
        """A slow client has caught up: its consumers can get messages again."""
        if connection.reads:
            self.reads_waiting.append(connection)
        if connection.consumers or connection.receivers:
            self.turns.add(self._wake_all(connection))

    def _wake_all(self, connection: Connection) -> Work[None]:
        siblings = connection.consumers
        consumers = list(siblings.values())
        for consumer in consumers:
            if consumer.update_due and not (consumer.deleted or connection.rests):
                yield from self.tell(consumer.queue, [consumer])
        for consumer in consumers:
            if siblings.get(consumer.id) is not consumer:
                continue  # It has ended, or another consumer has its id.
            if consumer.rests & Rest.SLOW and not connection.rests:
                # It may fill the outbox again: the next time it comes after all others.
                siblings[consumer.id] = siblings.pop(consumer.id)
                consumer.resume(Rest.SLOW)
                yield GOES_ON
        for receiver in [*connection.receivers]:
            if receiver.rests & Rest.SLOW and not connection.rests:
                receiver.resume(Rest.SLOW)
                yield GOES_ON

    def _unacked_is_full(self) -> None:
        last_s, self._unacked_full_s = self._unacked_full_s, self.clock()
        if self._unacked_full_s > last_s + CALM_S:
            self.limits_reached["unacked_bytes_max"] += 1
            self.notices.unacked_full(self.flow.unacked.used)

    # -- work in later turns

    @property
    def has_work(self) -> bool:
        """Whether `go_on` has something to do."""
        return bool(self.turns.due or self.turns)

    def go_on(self) -> bool:
        """Do one turn of unfinished work; return whether all that is left waits for something, for
        example the journal."""
        self.turns.begin()
        return self.turns.go_on()

    def withhold(self, withholds: bool) -> None:
        """Deliver nothing that the journal holds, or deliver it again."""
        if self.withholds and not withholds:
            self.turns.due |= dict.fromkeys(queue for queue in self.queues.values() if queue.ring)
        self.withholds = withholds

    # -- reading

    def read(self, connection: Connection, read: Read) -> None:
        """Queue a read request, which the server answers."""
        if len(connection.reads) >= READS_WAITING_MAX:
            reason = f"the limit of {READS_WAITING_MAX} unanswered peek, range and read is reached"
            raise LimitExceeded("reads_waiting_max", reason)
        connection.reads.append(read)
        if len(connection.reads) == 1 and not connection.rests:
            self.reads_waiting.append(connection)

    def is_there(self, read: Read) -> bool:
        """Whether the queue to be read still exists."""
        queue = self.queues.get(read.queue)
        return queue is not None and queue.id == read.queue_id

    def answer(self, connection: Connection, read: Read, reply: bytes | None) -> None:
        """Reply to a read request; None when its queue was deleted before."""
        if reply is None:
            reason = f"{read.form}: queue {shown(read.queue)} was deleted before the answer"
            self.refusals.tell(connection, read.request_id, read.form.encode(), BadRequest(reason))
            return
        connection.write(reply)
        if read.confirm:
            connection.unconfirmed += 1
            self.pending.waiters.confirms.append((connection, [], [read.request_id]))

    def end_tails(self, connection: Connection, permissions: Permissions | None = None) -> None:
        """All that it has, or those that a user with these permissions may not have."""
        tails = self.tails.of(connection).values()
        self.end_these_tails(
            [tail for tail in tails if permissions is None or not tail.is_allowed(permissions)]
        )

    def end_these_tails(self, tails: Sequence[MessageTail]) -> None:
        """They are shown nothing any more."""
        names = {tail.queue for tail in tails if tail.queue is not None}
        self.tails.end(tails, *map(self.queues.get, names))

    # -- queues and consumers

    def make_queue(self, name: bytes, user: str | None = None) -> Work[Queue]:
        """Return the queue of this name; create it for a user if it does not exist.

        Consumers of an earlier queue of that name are served again.
        """
        queue = self.queues.get(name)
        if queue is not None:
            return queue
        queue = self.new_queue(name, user)
        yield from self.bindings.queue_made(queue)
        # That takes many turns if there are many bindings, and somebody may delete it meanwhile.
        return (yield from self.make_queue(name, user)) if queue.deleted else queue

    def new_queue(self, name: bytes, user: str | None) -> Queue:
        """Create a queue that does not exist; `Bindings.queue_made` does the rest."""
        queue = self._new_queue(self.next_queue_id, name)
        queue.policy = made_policy(user)
        self.made.added(queue)
        self._changed(queue)
        self.policies.apply(queue)
        self._serve_orphans(queue)
        return queue

    def _serve_orphans(self, queue: Queue) -> None:
        """Consumers of an earlier queue of its name are served again."""
        orphaned = self._adopt(queue.name)
        if orphaned is not None:
            for consumer in consumers_of(orphaned):
                consumer.queue = queue
                queue.attach(consumer)
                consumer.resume(Rest.NO_QUEUE)

    def rename_queue(self, queue: Queue, new: bytes) -> None:
        """Give a queue a name that no other has; `Bindings.renamed` does the rest."""
        self.metadata.bytes += queue_bytes(new) - queue_bytes(queue.name)
        del self.queues[queue.name]
        queue.name = new
        self.queues[new] = queue
        queue.show = self.tails.shower(new)
        self._changed(queue)
        self.policies.apply(queue)
        self._serve_orphans(queue)

    def dead_letter_queue(self, queue: Place, reason: str) -> Queue | None:
        name = queue.rules.dead_letters
        # Of a cycle, these would make a loop that nobody drives.
        if name is not None and reason in (Event.TTL, Event.OVERFLOW):
            name = None if self.policies.returns(queue.name, name) else name
        return None if name is None else self.queue_for(name, queue.policy.made_by)

    def queue_for(self, name: bytes, user: str | None) -> Queue:
        """The queue of this name for a moved message: created for a user even beyond the limits, so
        that the message is not lost."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.new_queue(name, user)
            self.turns.add(self.bindings.queue_made(queue))
        return queue

    def _adopt(self, name: bytes) -> Queue | None:
        """Take a deleted queue that still has consumers from `orphans`."""
        orphan = self.orphans.pop(name, None)
        if orphan is not None:
            self.metadata.bytes -= queue_bytes(name)
        return orphan

    def check_queue(self, user: str | None, *names: bytes, besides: int = 0) -> None:
        """Raise if one of these queues does not exist and must not be created for a user, when so
        many others are to be."""
        new = [name for name in names if name not in self.queues]
        if not new:
            return
        self.metadata.check_names("queue", new)
        self.made.check(user, new, besides)
        most = self.settings.queues_max
        if not self.made.has_room(new, most - besides):
            reason = f"the limit of {most} queues is reached (queues_max)"
            raise LimitExceeded("queues_max", reason)
        self.metadata.check_room(sum(map(queue_bytes, new)))

    def check_consumer(self, consumer_id: bytes) -> None:
        """Raise if a consumer is new and there is no memory for it."""
        if consumer_id not in self.consumers:
            self.metadata.check_room(consumer_bytes(consumer_id), for_consumer=True)

    def _new_queue(self, queue_id: int, name: bytes) -> Queue:
        self.next_queue_id = max(self.next_queue_id, queue_id + 1)
        queue = self.queues[name] = Queue(self.shared, queue_id, name)
        queue.show = self.tails.shower(name)
        self.metadata.bytes += queue_bytes(name)
        return queue

    def _changed(self, queue: Place) -> None:
        self.pending.entry.queues[queue.id] = QueueState(queue.name, queue.policy)

    def set_rule(self, queue: Queue, rule: DeleteRule | None) -> bool:
        """Return whether that changed the rule."""
        if queue.policy.delete_when_unused == rule:
            return False
        self.set_policy(queue, replace(queue.policy, delete_when_unused=rule))
        self._outdate(queue)
        return True

    def set_queue(self, wanted: SetQueue, user: str | None = None) -> Work[bool]:
        """Change the policy of a queue. The queue and its dead-letter queue are created for a user
        if needed. Return whether that changed anything."""
        name, target = wanted.queue, wanted.changes.get("dead_letters")
        if target is not None:
            self.policies.check(name, target)
        names = [name] if target is None else [name, target]
        self.check_queue(user, *names)
        if labels := wanted.changes.get("labels"):
            self.metadata.check_room(len(labels))
        made = [self.new_queue(new, user) for new in names if new not in self.queues]
        queue = self.queues[name]
        policy = queue.policy.changed(wanted.changes, reset=wanted.reset)
        changed = bool(made) or policy != queue.policy
        if policy != queue.policy:
            self.set_policy(queue, policy)
        for new_queue in made:
            yield from self.bindings.queue_made(new_queue)
        return changed

    def set_policy(self, queue: Place, policy: Policy) -> None:
        self.metadata.bytes += policy.size_bytes - queue.policy.size_bytes
        queue.policy = policy
        self._changed(queue)
        self.policies.apply(queue)

    def tell_update(self, name: bytes, but: Consumer | None = None) -> Work[None]:
        """Send the bindings of a queue to its consumers."""
        queue = self.queues.get(name) or self.orphans.get(name)
        if queue is None:
            return
        self._outdate(queue)
        others = [consumer for consumer in consumers_of(queue) if consumer is not but]
        yield from self.tell(queue, others)

    def _outdate(self, queue: Queue) -> None:
        """The bindings or rule that its consumers know have changed."""
        queue.updates += 1
        if self._last_update is not None and self._last_update[0] is queue:
            self._last_update = None

    def tell(self, queue: Queue, consumers: list[Consumer]) -> Work[None]:
        """Send its bindings to these consumers. A slow client gets only the newest state, when it
        has caught up. The list is made once: it may have 100,000 events, for 10,000 consumers."""
        for consumer in consumers:
            # Thousands of consumers may get megabytes each, and read nothing.
            while self.shared.outboxes.room <= 0 and not consumer.connection.rests:
                yield WAITS
            if consumer.deleted or consumer.queue is not queue:
                continue
            consumer.update_due = bool(consumer.connection.rests)
            if not consumer.update_due:
                while self._last_update is None or self._last_update[0] is not queue:
                    yield from self._list_events(queue)
                consumer.connection.write(_update(consumer, self._last_update[1]))
            yield GOES_ON

    def _list_events(self, queue: Queue) -> Work[None]:
        updates, rule = queue.updates, queue.policy.delete_when_unused
        events, masks = yield from self.bindings.events(queue.name)
        if queue.updates == updates:
            self._last_update = queue, replies.bound(queue.name, events, masks, rule)

    def add_consumer(self, consumer: Consumer) -> Work[None]:
        """Attach a consumer; an earlier one with its id ends, its messages are returned, and its
        connection is told if it is another one."""
        self.metadata.bytes += consumer_bytes(consumer.id)
        earlier = self.consumers.get(consumer.id)
        self.consumers[consumer.id] = consumer
        self._siblings(consumer)[consumer.id] = consumer
        consumer.queue.attach(consumer)
        self._stop_timer(consumer.queue)
        if earlier is not None:
            if not (earlier.deleted or earlier.connection is consumer.connection):
                self.tell_end(earlier, f"{consumer.connection.address} consumes under this id now")
            yield from self.delete_consumers([earlier])

    def tell_end(self, consumer: Consumer, why: str) -> None:
        """Tell a connection that another one has ended its consumer: not before the confirm."""
        reason = BadRequest(f"consume: {why}")
        if consumer.rests & Rest.CONFIRM:
            self._replaced[consumer] = reason
        else:
            consumer.connection.fail(consumer.id, b"consume", reason)

    def _siblings(self, consumer: Consumer) -> dict[bytes, Consumer]:
        """The consumers of its connection; none if that has gone."""
        connection = self.connections.get(consumer.connection.id)
        return {} if connection is None else connection.consumers

    def hold(self, consumer: Consumer) -> None:
        """Its own consume is not confirmed yet: it gets nothing before the next commit."""
        held = (consumer.connection, partial(self._held, consumer), False)
        self.pending.waiters.held.append(held)

    def _held(self, consumer: Consumer, is_written: bool) -> None:
        """It gets messages now, or ends if its consume could not be written."""
        reason = self._replaced.pop(consumer, None)
        if is_written:
            consumer.resume(Rest.CONFIRM)
            connection = consumer.connection
            if reason and not connection.closed and consumer.id not in self._siblings(consumer):
                # Otherwise it has its id back, and has asked for that.
                connection.fail(consumer.id, b"consume", reason)
        elif not consumer.deleted:
            self.end_consumers([consumer])

    def end_consumers(self, consumers: list[Consumer], *, lost: bool = False) -> None:
        """They get no more messages; those that they hold are returned in turns."""
        for consumer in consumers:
            consumer.rest(Rest.ENDED)
        if consumers:
            self.turns.add(self.delete_consumers(consumers, lost=lost))

    def delete_consumers(self, consumers: list[Consumer], *, lost: bool = False) -> Work[None]:
        """End consumers. All their messages return to their places before any of them is delivered
        to others. `lost`: the consumers did not end themselves."""
        # First all end, then all is returned, then the queues deliver: otherwise messages would go
        # to a consumer that is about to end, and be lost once more.
        event = Event.LOSS if lost else Event.END
        returned: list[tuple[Queue, Policy, Iterator[Delivery]]] = []
        for number, consumer in enumerate(consumers, 1):
            if number % STEP_MESSAGES == 0:
                yield GOES_ON
            if consumer not in consumer.queue.consumers:
                continue
            consumer.rest(Rest.ENDED)
            consumer.end_pause()
            self.metadata.bytes -= consumer_bytes(consumer.id)
            if self.consumers.get(consumer.id) is consumer:
                del self.consumers[consumer.id]
            siblings = self._siblings(consumer)
            if siblings.get(consumer.id) is consumer:
                del siblings[consumer.id]
            self.flow.unacked.leave(consumer)
            consumer.queue.detach(consumer)
            consumer.queue.returning += 1
            returned.append((consumer.queue, consumer.defaults, consumer.let_go()))
        yield GOES_ON
        for queue, defaults, deliveries in returned:
            while some := list(islice(deliveries, queue.returned_at_once)):
                queue.give_back(some, event, defaults=defaults)
                yield GOES_ON
            queue.returning -= 1
        for queue in dict.fromkeys(queue for queue, *_ in returned):
            # Also without consumers: returned messages may have expired, or exceed a limit.
            queue.deliver()
            if queue.consumers:
                pass
            elif self.orphans.get(queue.name) is queue:
                self._adopt(queue.name)
            elif not queue.deleted:
                yield from self.unused(queue)
            yield GOES_ON

    def unused(self, queue: Queue) -> Work[None]:
        """A queue has no consumers: its delete rule applies."""
        rule = queue.policy.delete_when_unused
        if rule is None:
            return
        if rule.delay_s is None:
            yield from self.delete_queue(queue.name)
            return
        self._stop_timer(queue)
        queue.timer = self.schedule.after(rule.delay_s, partial(self._delete_unused, queue))

    def _stop_timer(self, queue: Queue) -> None:
        if queue.timer is not None:
            self.schedule.cancel(queue.timer)
            queue.timer = None

    def _delete_unused(self, queue: Queue) -> None:
        queue.timer = None
        self.turns.add(self.delete_queue(queue.name))

    def delete_queue(self, name: bytes) -> Work[None]:
        """Delete messages, bindings and policy; consumers stay attached to the name, and get an
        update if there were bindings or a delete rule."""
        queue, ruled = self.queues.pop(name, None), False
        if queue is not None:
            ruled = queue.policy.delete_when_unused is not None
            self._stop_timer(queue)
            self.metadata.bytes -= queue.policy.size_bytes
            self.made.removed(queue)
            self.turns.add(delete(queue))
            self.pending.entry.queues[queue.id] = None
            # Consumers are of a name: they get the messages of the next queue that has it.
            if queue.consumers:
                self.orphans[name] = queue
            else:
                self.metadata.bytes -= queue_bytes(name)
        unbound = yield from self.bindings.remove_all(name, queue)
        if unbound or ruled:
            yield from self.tell_update(name)

    # -- recovery

    def restore_queue(self, queue_id: int, name: bytes, policy: Policy) -> Queue:
        """Add a queue from the journal; its bindings are restored before."""
        queue = self._new_queue(queue_id, name)
        finish(self.bindings.queue_made(queue))
        # Defaults are applied when all queues exist: what was set has priority.
        queue.policy = policy
        self.metadata.bytes += policy.size_bytes
        self.made.added(queue)
        apply(queue, policy)
        return queue

    def start_timers(self) -> None:
        """After recovery every delay starts again. A delete rule without a delay applies only after
        a consumer has attached and ended: a start deletes no queue whose consumers are late."""
        self.results.start(self.queues.values())
        for queue in list(self.queues.values()):
            start(queue)
            rule = queue.policy.delete_when_unused
            if rule is not None and rule.delay_s is not None:
                finish(self.unused(queue))
        self.schedules.start()
        self.batches.start()


def _read_nothing(connection: Connection, request_id: bytes) -> None:
    """A broker without a server has no files."""
    connection.write(replies.ok(request_id, b"{}"))


def _end_receivers(connection: Connection) -> Work[None]:
    for some in slices([*connection.receivers], STEP_MESSAGES):
        for receiver in some:
            receiver.leave()
        yield GOES_ON


def _update(consumer: Consumer, about: bytes) -> bytes:
    """The line about the queue's bindings, `replies.bound`."""
    flags = b" --manual-ack" if consumer.manual_ack else b""
    if consumer.prefetch:
        flags += b" --prefetch=%d" % consumer.prefetch
    if (backoff := consumer.defaults.told("backoff")) is not None:
        flags += b" --backoff=" + policy_text(BACKOFF, backoff)
    if (timeout_s := consumer.defaults.ack_timeout_s) is not None:
        flags += b" --ack-timeout=" + policy_text(ACK_TIMEOUT, timeout_s)
    if consumer.meta:
        flags += b" --meta"
    if consumer.cancellable:
        flags += b" --cancellable"
    return replies.update(consumer.id, about, flags)
