"""Queues with policies under any order of steps, crashes and full disks among them."""

from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from mqks.broker.features.admission import unique
from mqks.broker.features.death import deaths, moves
from mqks.broker.features.order import keyed, placed, ranked
from mqks.broker.features.time import delays, expiry
from mqks.broker.requests import scheduled
from mqks.broker.spine.base import turns
from mqks.broker.spine.log import pending as pending_module
from mqks.broker.spine.message.mark import NO_MARK
from mqks.broker.spine.queue import blocks, lane, order, queue
from mqks.broker.spine.queue.order import Rest
from tests.fuzz.invariants import require, waiting
from tests.kit.lab import Lab
from tests.kit.small_steps import SmallSteps, as_test

QUEUES = [b"q", b"r", b"d"]
POLICIES = [
    *("--retries=2", "--losses=2", "--backoff=1,4", "--dead-letters=d", "--ttl=3", "--reset"),
    *("--messages-max=4 --overflow=drop", "--messages-max=4 --overflow=reject", "--bytes-max=60"),
    *("--single-consumer=yes", "--ack-timeout=2", "--dead-letters=", "--ttl=", "--messages-max="),
    *("--ordered=key", "--ordered=", "--fair=key", "--fair=", "--paused=yes", "--paused="),
]
KEEPING = [each for each in POLICIES if "dead" not in each and "reset" not in each]
MESSAGE_FLAGS = [
    *("", "--delay=2", "--ttl=1", "--delay=1 --ttl=2", "--meta=a=1", "--at=1790001002"),
    *("--key=a", "--key=b", "--key=a --delay=1", "--key=c --ttl=1", "--unique=a"),
    *("--unique=a,on=replace", "--unique=a,on=replace --delay=1", "--unique=b,on=replace --once"),
    *("--unique=b,until=acked,on=replace", "--unique=b,until=acked,for=2"),
]
SETTLES = [
    *("ack", "ack", "reject", "reject", "release", "touch"),
    *("reject --delay=1", "reject --dead", "release --delay=1"),
]
PRIORITIES = ["", "", " --priority=5", " --priority=-3"]
REDRIVES = [
    *(b"redrive d", b"redrive d --limit=2", b"redrive d --to=r", b"redrive d --event=e"),
    *(b"move q r", b"move r q --limit=2", b"move q d", b"move d r"),
    *(b"promote q --all", b"promote d --all"),
]
SMALL_STEPS = {
    blocks: {"BLOCK": 6, "SHORT": 2, "DELIVERY_BYTES": 40},
    keyed: {"STEP_MESSAGES": 2, "FREE_ENOUGH": 2, "FETCHED_MAX": 2, "STALE_MAX": 2},
    lane: {"STEP_BODIES": 3, "SCARCE_BYTES": 100},
    turns: {"STEP_BODIES": 3},
    order: {"SCARCE_BYTES": 100},
    ranked: {"BLOCK": 3, "STEP_MESSAGES": 2, "SCARCE_BYTES": 100, "AHEAD": 2, "BACKLOG": 3},
    moves: {"STEP_MESSAGES": 2},
    delays: {"STEP_MESSAGES": 2, "STEP_BODIES": 2, "NEAR_MAX": 3, "GONE_MIN": 1},
    expiry: {"STEP_MESSAGES": 2, "STALE_MIN": 1},
    scheduled: {"STEP_BODIES": 2},
    queue: {"STEP_MESSAGES": 2},
    deaths: {"STEP_MESSAGES": 2},
    unique: {"STEP_MESSAGES": 2},
    placed: {"STEP_MESSAGES": 2, "PLACED_MAX": 3, "STALE_PLACES": 1},
    pending_module: {"BATCH_QUEUES_MAX": 1},
}


class Kills(SmallSteps):
    small = SMALL_STEPS
    drops = True
    """Dead messages may have been dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = count()
        self.published: set[bytes] = set()
        self.confirmed: set[bytes] = set()
        self.may_be_gone: set[bytes] = set()
        self.is_gone: set[bytes] = set()
        self.due_us: dict[bytes, int] = {}
        self.dies_us: dict[bytes, int] = {}
        self.lives_us: dict[bytes, int] = {}
        """The TTL of what has a delay: it starts when `promote` makes that due, however late."""
        self.acks: dict[bytes, bytes] = {}
        self.unconfirmed_delays: dict[bytes, bytes] = {}
        self.returned: set[bytes] = set()
        self.heard = 0

    def end(self) -> None:
        lab = self.lab
        lab.make_room()
        lab.rest()
        self.look()
        lab.check()
        self.nothing_lost()
        for name in [*lab.broker.queues]:
            lab.do("last", b"x purge --scheduled %b" % name)
        for who in [*lab.connections]:
            lab.end(who)
        lab.rest()
        for name in [*lab.broker.queues]:
            lab.do("last", b"x purge %b --scheduled" % name)
        lab.rest()
        lab.check()
        for each in lab.broker.queues.values():
            require(each.ready == 0 and each.scheduled == 0, f"{each.name!r}: not empty")
        require(lab.broker.shared.memory.used == 0, "memory of nothing")
        require(not +lab.messages(), "messages of nothing")

    @initialize(memory=st.sampled_from([0, 0, 400, 1 << 20]), calls=st.sampled_from([0, 1, 3, 10]))
    def start(self, memory: int, calls: int) -> None:
        self.lab = Lab(memory, calls)
        self.lab.send("a", b"s subscribe q e", b"s subscribe r e2", b"s subscribe d nothing")
        self.lab.rest()

    # -- steps of the server

    @rule(
        what=st.sampled_from(["work", "work", "read", "answer", "commit", "take", "land", "fail"])
    )
    def step(self, what: str) -> None:
        getattr(self.lab, what)()

    @rule()
    def rest(self) -> None:
        lab = self.lab
        lab.rest()
        if not lab.broker.unwritable:
            for each in lab.broker.queues.values():
                check_rest(lab, each)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.5, 5.0]))
    def tick(self, seconds: float) -> None:
        self.lab.tick(seconds)

    @rule()
    def crash(self) -> None:
        self.look()
        self.lab.crash()
        self.heard = 0
        self.acks.clear()
        for message in self.unconfirmed_delays.values():
            self.due_us.pop(message, None)
        self.unconfirmed_delays.clear()
        self.nothing_lost()

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        (self.lab.fill if full else self.lab.make_room)()

    # -- clients

    @rule(
        event=st.sampled_from([b"e", b"e", b"e2"]),
        flags=st.sampled_from(MESSAGE_FLAGS),
        many=st.integers(1, 4),
        size=st.sampled_from([0, 1, 30]),
        priority=st.sampled_from(PRIORITIES),
    )
    def publish(self, event: bytes, flags: str, many: int, size: int, priority: str) -> None:
        lab = self.lab
        for _ in range(many):
            message = b"m%d" % next(self.ids)
            self.published.add(message)
            if "--unique" in flags:  # Another one may keep it out, or take its place.
                self.may_be_gone.add(message)
            delay_us = {"--delay=2": 2_000_000, "--delay=1 --ttl=2": 1_000_000}.get(flags, 0)
            self.due_us[message] = lab.now_us + delay_us if delay_us else 0
            if life_us := {"--ttl=1": 1_000_000, "--delay=1 --ttl=2": 3_000_000}.get(flags):
                self.dies_us[message] = lab.now_us + life_us + 50_000
                if delay_us:
                    self.lives_us[message] = life_us - delay_us + 50_000
            told = (flags + priority).strip().encode()
            words = [message, b"publish --confirm", told, event, b"x" * size]
            lab.send("a", b" ".join(word for word in words if word != b""))
        self.look()

    @rule(
        who=st.sampled_from("bc"),
        name=st.sampled_from(QUEUES),
        flags=st.sampled_from(["--prefetch=1", "--prefetch=2 --meta", ""]),
    )
    def consume(self, who: str, name: bytes, flags: str) -> None:
        words = b"%b-%b consume" % (who.encode(), name), name, b"--manual-ack", flags.encode()
        self.lab.send(who, b" ".join(words).strip())
        self.look()

    def consumers(self) -> list[Any]:
        return [each for each in self.lab.broker.consumers.values() if not each.deleted]

    @rule(place=st.integers(0, 5), which=st.integers(0, 5), what=st.sampled_from(SETTLES))
    def settle(self, place: int, which: int, what: str) -> None:
        consumers = self.consumers()
        if not consumers:
            return
        consumer = consumers[place % len(consumers)]
        held = [*consumer.unacked, b"--all"]
        message = held[which % len(held)]
        ids = [*consumer.unacked] if message == b"--all" else [message]
        self._settle(consumer, message, what, ids)

    def _settle(self, consumer: Any, message: bytes, what: str, ids: list[bytes]) -> None:
        lab = self.lab
        action, _, flag = what.partition(" ")
        request = b"k%d" % next(self.ids)
        if "a" in lab.connections and lab.connections["a"].overrun:
            return
        self.may_be_gone.update(ids)
        # What has moved on a full disk is where it was before, for the disk.
        if action == "ack" and not lab.broker.unwritable:
            self.acks[request] = b" ".join(ids)
        if flag.startswith("--delay"):
            for each in ids:
                if message != b"--all":
                    self.due_us[each] = lab.now_us + 1_000_000
                    self.unconfirmed_delays[request] = each
                    self.returned.add(each)
        words = [request, action.encode(), b"--confirm", consumer.id, message, flag.encode()]
        lab.send("a", b" ".join(words).strip())
        self.look()

    @rule(place=st.integers(0, 5))
    def leave(self, place: int) -> None:
        if consumers := self.consumers():
            self.lab.send("a", b"x delete_consumer " + consumers[place % len(consumers)].id)

    @rule(who=st.sampled_from("bc"))
    def disconnect(self, who: str) -> None:
        self.lab.end(who)

    @rule(
        name=st.sampled_from(QUEUES),
        flags=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=4),
    )
    def set_queue(self, name: bytes, flags: list[str]) -> None:
        if name == b"d":
            flags = [each for each in flags if "dead" not in each]
        self._set(name, flags)

    def _set(self, name: bytes, flags: list[str]) -> None:
        words = [word for flag in flags for word in flag.split()]
        given = {word.partition("=")[0]: word for word in words}
        # The ttl of what is on its way to the disk counts from now.
        self.lab.commit()
        text = " ".join(given.values()).encode()
        self.lab.send("a", b"x set_queue --confirm %b %b" % (name, text))

    @rule(who=st.sampled_from("abc"), line=st.sampled_from(REDRIVES))
    def redrive(self, who: str, line: bytes) -> None:
        if b"promote" in line:
            self.due_us.clear()
            for each in self.lives_us.keys() & self.dies_us.keys():
                self.dies_us[each] = max(self.dies_us[each], self.lab.now_us + self.lives_us[each])
        else:
            self.dies_us.clear()
            for message in self.returned:
                self.due_us.pop(message, None)
        self.lab.send(who, b"x " + line.replace(b" ", b" --confirm ", 1))

    @rule(
        who=st.sampled_from("abc"),
        name=st.sampled_from(QUEUES),
        line=st.sampled_from(
            [b"purge", b"purge --scheduled", b"cancel --all", b"delete_queue", b"trim"]
        ),
    )
    def drop(self, who: str, name: bytes, line: bytes) -> None:
        lab = self.lab
        connection = lab.connections.get(who)
        if connection is not None and connection.overrun:
            return
        # Works of others may bring more, and this one may take its time.
        self.may_be_gone |= self.published
        action, _, flag = line.partition(b" ")
        words = [b"x", action, b"--confirm", name, flag]
        if action == b"trim":
            queue = lab.broker.queues.get(name)
            words[-1] = b"%d" % (queue.lane.cursor + 2 if queue is not None else 3)
        lab.send(who, b" ".join(filter(None, words)))
        if action == b"delete_queue":
            event = {b"q": b"e", b"r": b"e2", b"d": b"nothing"}[name]
            lab.send(who, b"x subscribe %b %b" % (name, event))

    @rule(
        name=st.sampled_from(QUEUES),
        which=st.integers(0, 30),
        what=st.sampled_from([b"cancel", b"promote"]),
    )
    def scheduled_one(self, name: bytes, which: int, what: bytes) -> None:
        ids = [b"m%d" % which, *sorted(set(self.due_us) & self.published)[-3:]]
        message = ids[which % len(ids)]
        if what == b"cancel":
            self.may_be_gone.add(message)
        else:
            self.due_us.pop(message, None)
        self.lab.send("c", b"x %b --confirm %b %b" % (what, name, message))

    # -- what must hold

    def look(self) -> None:
        """At what clients were told."""
        lab = self.lab
        for line in lab.replies[self.heard :]:
            words = line.split(b" ")
            if words[1] != b"ok" or words[0] in (b"x", b"s"):
                require(b"internal" not in line, line)
                # Refused, as the disk is full.
                self.due_us.pop(self.unconfirmed_delays.pop(words[0], b""), None)
                self.acks.pop(words[0], None)
            elif words[0] in self.published:
                self.confirmed.add(words[0])
            elif words[0] in self.unconfirmed_delays:
                del self.unconfirmed_delays[words[0]]
            elif words[0] in self.acks:
                self.is_gone.update(self.acks.pop(words[0]).split())
            elif len(words) > 3 and words[3].startswith(b"event="):
                self.delivered(words[2], is_letter=words[0].endswith(b"-d"))
        self.heard = len(lab.replies)

    def delivered(self, message: bytes, *, is_letter: bool) -> None:
        now_us = self.lab.now_us
        if is_letter:
            return
        require(now_us <= self.dies_us.get(message, now_us), f"{message!r} is too old")
        require(self.due_us.get(message, 0) <= now_us, f"{message!r} is early")
        require(message not in self.is_gone, f"{message!r} was acked before")

    def nothing_lost(self) -> None:
        """Of what is on disk."""
        lab = self.lab
        there = lab.messages()
        twice = [each for each, times_there in there.items() if times_there > 1]
        require(not twice, f"twice: {twice}")
        back = self.is_gone & there.keys()
        require(not back, f"settled, and there: {back}")
        lost = self.confirmed - there.keys() - self.may_be_gone
        require(self.drops or not lost, f"lost: {lost}")

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "lab"):
            self.lab.hear()
            self.look()
            self.lab.check()


def check_rest(lab: Lab, queue: Any) -> None:
    """There is nothing to do here now."""
    rules, name = queue.rules, queue.name
    takes = [each for each in queue.ring if each.room() > 0]
    if not (rules.paused or isinstance(queue.order, keyed.Keyed)):
        require(not (queue.ready and takes), f"{name!r}: messages wait for a consumer with room")
    if rules.ttl_s is not None:
        known = lab.disk.queues[queue.id]
        for number in waiting(queue):
            mark = queue.lane.marks.get(number, NO_MARK)
            joined_us = mark.joined_us or known.times_us[number]
            age_us = lab.wall_us - joined_us
            require(age_us <= rules.ttl_s * 1e6 + 50_000, f"{name!r}: {number} waits for {age_us}")
    if rules.overflow == "drop" and rules.messages_max and queue.ready:
        total = queue.ready + queue.scheduled
        require(total <= rules.messages_max, f"{name!r}: {total} messages")
    if rules.single_consumer:
        served = [each for each in queue.consumers if not each.rests & Rest.STANDBY]
        require(len(served) == min(1, len(queue.consumers)), f"{name!r}: {len(served)} are served")


class Kept(Kills):
    """All dead letters are kept: nothing may be lost."""

    drops = False

    @initialize(memory=st.sampled_from([0, 0, 400, 1 << 20]), calls=st.sampled_from([0, 1, 3, 10]))
    def start(self, memory: int, calls: int) -> None:
        super().start(memory, calls)
        self.lab.send("a", b"s set_queue q --dead-letters=d", b"s set_queue r --dead-letters=d")
        self.lab.rest()

    @rule(who=st.sampled_from("abc"), line=st.sampled_from(REDRIVES))
    def redrive(self, who: str, line: bytes) -> None:
        if line != b"move q d":
            Kills.redrive(self, who, line)

    def drop(self) -> None: ...

    def scheduled_one(self) -> None: ...

    @rule(
        name=st.sampled_from([b"q", b"r"]),
        flags=st.lists(st.sampled_from(KEEPING), min_size=1, max_size=4),
    )
    def set_queue(self, name: bytes, flags: list[str]) -> None:
        self._set(name, flags)

    def _settle(self, consumer: Any, message: bytes, what: str, ids: list[bytes]) -> None:
        if consumer.id.endswith(b"-d") and not what.startswith("ack"):
            return  # Dead there is dropped.
        before = set(self.may_be_gone)
        super()._settle(consumer, message, what, ids)
        if not what.startswith("ack"):
            self.may_be_gone = before


# Most rules are the same, and where nothing may be lost, more is seen.
MANY = settings().max_examples > 100
TestKills = as_test(Kills, 2 if MANY else 1, steps=60)
TestKept = as_test(Kept, 5 if MANY else 2, steps=60)


def test_a_delivery_that_goes_on_delivers_nothing_expired() -> None:
    """Of what expired in one turn, some is left when the next delivery goes on."""
    state = Kept()
    delayed, e = "--delay=1 --ttl=2", b"e"
    state.start(memory=0, calls=3)
    state.consume(flags="", name=b"r", who="b")
    state.publish(event=e, flags=delayed, many=4, priority=" --priority=5", size=0)
    state.publish(event=b"e2", flags="--delay=2", many=4, priority="", size=0)
    state.consume(flags="", name=b"q", who="b")
    state.redrive(line=b"promote q --all", who="c")
    state.publish(event=e, flags=delayed, many=2, priority=" --priority=-3", size=1)
    state.publish(event=e, flags="--key=a --delay=1", many=4, priority=" --priority=-3", size=0)
    state.publish(event=e, flags="--key=c --ttl=1", many=3, priority="", size=1)
    state.tick(seconds=5.0)
    state.teardown()
