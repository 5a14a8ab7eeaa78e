"""Queues bound to masks: who gets what, exactly once, whatever is bound, unbound, made and deleted
meanwhile, however many masks there are, and in bounded memory."""

import json
import re
import tracemalloc
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mqks.broker.spine.routing import masks as masks_module
from mqks.broker.spine.routing import routes as routes_module
from mqks.limits import MASK_BYTES_MAX, ROUTES_BYTES_MAX
from mqks.users import Permissions
from tests.fuzz.invariants import check
from tests.kit.bare import BareWorld, ask, bare
from tests.kit.compiled import patches_modules
from tests.kit.memory import allocated

PARTS = ["a", "b", "ab", ""]
EVENTS = [*PARTS[:3], *(f"{x}.{y}" for x in PARTS for y in PARTS), "a.b.a", "a..b", "b.ab.a.b"]
BOUND_PARTS = [*PARTS, "*", "a*", "*b", "*a*"]
MASKS = ["**"] + [
    ".".join(parts)
    for parts in (
        *((x, y) for x in BOUND_PARTS for y in [*BOUND_PARTS, "**"]),
        *((x, "*", y) for x in BOUND_PARTS for y in ("a", "*", "**")),
        ("b", "*", "*", "b"),
    )
]
QUEUES = ["q1", "q2", "q3"]


def matches(mask: str, event: str) -> bool:
    """By a regular expression."""
    if mask == "**":
        return True
    rest = mask.endswith(".**")
    pattern = "[^.]*".join(map(re.escape, mask.removesuffix(".**").split("*")))
    return re.fullmatch(pattern + (r"\..*" if rest else ""), event) is not None


def some(of: list[str], least: int = 0) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(of), min_size=least, max_size=3)


class Patched:
    """Steps and memory of another size, so that their ends are met."""

    def __init__(self, step_masks: int, routes_bytes_max: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(masks_module, "STEP_MASKS", step_masks)
        self.patch.setattr(routes_module, "ROUTES_BYTES_MAX", routes_bytes_max)


class Subscriptions(RuleBasedStateMachine):
    """One client after the other, against sets of names."""

    sizes: ClassVar[list[tuple[int, int]]] = [(1024, 1024 * 1024), (1, 1024 * 1024), (2, 600)]

    @initialize(sizes=st.sampled_from(sizes), chunk_s=st.sampled_from([1.0, -1.0]))
    def start(self, sizes: tuple[int, int], chunk_s: float) -> None:
        self.patched = Patched(*sizes)
        self.world = BareWorld()
        self.world.broker.turns.chunk_s = chunk_s
        self.bound: dict[str, set[tuple[str, str]]] = {name: set() for name in QUEUES}
        self.there: set[str] = set()
        self.published = 0

    def teardown(self) -> None:
        self.patched.patch.undo()

    def ask(self, *words: str) -> str:
        action, *rest = words
        self.world.send("k", " ".join(["r", action, "--confirm", *rest]).encode() + b"\n")
        return self.world.received("k").decode()

    @rule(name=st.sampled_from(QUEUES), events=some(EVENTS), masks=some(MASKS))
    def subscribe(self, name: str, events: list[str], masks: list[str]) -> None:
        if not events and not masks:
            return
        assert self.ask("subscribe", name, *events, *_flag("--add-mask", masks)) == "r ok \n"
        self.there.add(name)
        if events:
            self.bound[name].clear()
        self.bound[name] |= {("event", each) for each in events}
        self.bound[name] |= {("mask", each) for each in masks}

    @rule(
        name=st.sampled_from(QUEUES),
        events=some(EVENTS),
        remove=some(EVENTS),
        remove_masks=some(MASKS),
        add=some(EVENTS),
        add_masks=some(MASKS),
    )
    def rebind(
        self,
        name: str,
        events: list[str],
        remove: list[str],
        remove_masks: list[str],
        add: list[str],
        add_masks: list[str],
    ) -> None:
        flags = [
            *_flag("--remove", remove),
            *_flag("--remove-mask", remove_masks),
            *_flag("--add-mask", add_masks),
            *_flag("--add", add),
        ]
        assert self.ask("rebind", name, *events, *flags) == "r ok \n"
        bound = self.bound[name]
        if events or not flags:
            bound.clear()
            bound |= {("event", each) for each in events}
        bound -= {("event", each) for each in remove}
        for mask in remove_masks:
            bound.discard(("mask", mask))
            bound -= {
                (kind, each)
                for kind, each in bound
                if kind == "event" and "." in each and matches(mask, each)
            }
        bound |= {("event", each) for each in add} | {("mask", each) for each in add_masks}

    @rule(name=st.sampled_from(QUEUES))
    def delete_queue(self, name: str) -> None:
        assert self.ask("delete_queue", name) == "r ok \n"
        self.there.discard(name)
        self.bound[name].clear()

    @rule(events=some(EVENTS, 1), once=st.booleans(), mandatory=st.booleans())
    def publish(self, events: list[str], once: bool, mandatory: bool) -> None:
        wanted = dict.fromkeys(self.there, 0)
        lines = []
        for event in events:
            if not event:
                continue
            self.published += 1
            flags = "--once " * once + "--mandatory " * mandatory
            lines.append(f"m{self.published} publish {flags}{event} x\n")
            for name in self.there:
                wanted[name] += any(
                    each == event if kind == "event" else matches(each, event)
                    for kind, each in self.bound[name]
                )
        self.world.send("k", "".join(lines).encode())
        self.world.received("k")  # Errors of --mandatory.
        assert {name: self.ask("purge", name) for name in self.there} == {
            name: f"r ok {count}\n" for name, count in wanted.items()
        }

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            check(self.world.broker)


TestSubscriptions = Subscriptions.TestCase


def _flag(flag: str, names: list[str]) -> list[str]:
    return [flag, *names] if names else []


# ----------------------------------------------------------------------------------- permissions

USER_MASKS = st.lists(st.text("ab.**", min_size=1, max_size=8), max_size=3)


@given(USER_MASKS, st.sampled_from(MASKS))
def test_who_binds_a_mask_may_bind_all_that_it_matches(given: list[str], mask: str) -> None:
    user = Permissions(bind=given)
    if user.may_bind_mask(mask.encode()):
        matched = [event for event in [*EVENTS, "c", "c.c", "c.c.c.c"] if matches(mask, event)]
        assert all(user.may_bind(event.encode()) for event in matched)


@pytest.mark.parametrize(
    ("given", "covered", "others"),
    [
        (["**"], ["**", "a.*", "a.**", "x" * 300 + ".*"], []),
        (["a.**"], ["a.*", "a.**", "a.b*.c", "a.*.**"], ["**", "*.b", "ab.*", "a*.b"]),
        (["a.*"], ["a.*", "a.b*", "a.b"], ["a.**", "a.*.c", "*.*"]),
        (["*.*"], ["a.b", "a*.*", "*.*"], ["*.**", "*.*.*"]),
        (["a.**.*"], ["a.*.*", "a.b.c"], ["a.**", "a.*"]),
        (["a.*.**"], ["a.b.**", "a.*.*"], ["a.**", "a.*"]),
        (["**.x"], ["*.x", "a.b.x"], ["*.*", "a.**"]),
        (["*"], [], ["**", "*.a"]),
        (["a.x", "a.y"], ["a.x"], ["a.*"]),
        (["a.x*", "a.*"], ["a.*"], []),
        (["a.*"], [], ["a." + "b" * 255]),
        ([], [], ["**", "a.b"]),
    ],
)
def test_masks_that_users_may_bind(given: list[str], covered: list[str], others: list[str]) -> None:
    may = Permissions(bind=given).may_bind_mask

    assert [mask for mask in covered + others if may(mask.encode())] == covered


# ---------------------------------------------------------------------------------------- limits


def test_the_length_of_a_mask() -> None:
    world = bare(name_bytes_max=2000)
    longest = b"a." + b"*" + b"b" * (MASK_BYTES_MAX - 3)

    assert ask(world, b"s subscribe --confirm q --add-mask " + longest) == b"s ok \n"
    assert b" error " in ask(world, b"s subscribe --confirm q --add-mask b" + longest)
    world = bare(name_bytes_max=64)
    assert ask(world, b"s subscribe --confirm q --add-mask a.%b" % (b"b" * 62)) == b"s ok \n"
    assert b" error " in ask(world, b"s subscribe --confirm q --add-mask a.%b" % (b"b" * 63))
    assert world.broker.long_names() == 0


def test_masks_take_room_as_long_as_they_are_bound() -> None:
    world = bare()
    before = world.broker.metadata.bytes
    ask(world, b"s rebind q --add-mask %b" % b" ".join(b"a.%d.*.**" % n for n in range(5000)))
    assert world.broker.metadata.bytes > before + 5000 * 1000
    ask(world, b"r rebind q")
    assert world.broker.metadata.bytes == before
    check(world.broker)


def test_masks_take_no_more_memory_than_is_counted() -> None:
    """Also those that are nothing but parts."""
    world = bare(metadata_bytes_max=1 << 30)
    rng = Random(5)
    masks = [b".".join(rng.choice([b"*", b"a", b"a*"]) for _ in range(60)) for _ in range(250)]
    lines = b"".join(b"r rebind q --add-mask %b\n" % mask for mask in masks)
    ask(world, b"s subscribe q e")
    ask(world, b"m publish a x")  # What is made once.
    counted = world.broker.metadata.bytes
    with allocated() as memory:
        world.send("k", lines)
    assert world.broker.metadata.bytes - counted > memory.bytes


@patches_modules
def test_events_that_are_made_up_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes are remembered up to a bound, whether they lead to many queues or to none."""
    monkeypatch.setattr(routes_module, "ROUTES_BYTES_MAX", 256 * 1024)
    world = bare()
    for number in range(50):
        ask(world, b"c%d consume --confirm q%d --add-mask a.** a.*" % (number, number))
    numbers = iter(range(10**9))

    def publish(count: int) -> int:
        some = [next(numbers) for _ in range(count)]
        events = [b"%b.%d.%d" % (b"ab"[number % 2 :][:1], number, number) for number in some]
        world.send("k", b"".join(b"m publish %b x\n" % event for event in events))
        world.received("k")
        return tracemalloc.get_traced_memory()[0]

    with allocated():
        first = max(publish(500) for _ in range(4))
        later = max(publish(500) for _ in range(8))
    assert later < first + 128 * 1024
    assert later < 4 * 1024 * 1024
    assert ROUTES_BYTES_MAX <= 16 * 1024 * 1024


# ----------------------------------------------------------------------------------------- turns


def test_an_event_that_many_masks_are_tried_on_holds_nobody_up() -> None:
    """It is published in turns, in the order of its connection, and once."""
    world = bare()
    masks = [b"*a*%d-zz*.x" % number for number in range(20_000)]
    for start in range(0, len(masks), 1000):
        ask(world, b"r rebind w --add-mask " + b" ".join(masks[start : start + 1000]))
    ask(world, b"s subscribe w --add-mask b.*")
    ask(world, b"c consume --confirm q --add-mask *.*")
    world.broker.turns.chunk_s = -1.0  # A turn is one step.

    lines = (
        b"m1 publish a7-zz.y 1\nm2 publish --confirm --once a8-zz.y 2\nm3 publish e 3\np ping x\n"
    )
    world.intake.receive(world.connection("k"), lines)
    assert world.broker.has_work
    assert b"p ok x\n" not in b"".join(world.connection("k").outbox)
    world.intake.receive(world.connection("other"), b"p ping y\n")
    assert b"".join(world.connection("other").outbox) == b"p ok y\n"

    world.send("k", b"")
    assert world.received("k") == (
        b"c ok m1 event=a7-zz.y 1\nc ok m2 event=a8-zz.y 2\nm2 ok \np ok x\n"
    )
    # Now they are known: no turn is needed.
    world.intake.receive(world.connection("k"), b"m4 publish a7-zz.y 4\n")
    assert not world.broker.turns
    world.send("k", b"")
    assert world.received("k") == b"c ok m4 event=a7-zz.y 4\n"


@given(st.randoms(use_true_random=False), st.booleans())
def test_a_queue_that_is_bound_otherwise_meanwhile_misses_nothing(rng: Random, once: bool) -> None:
    """Walks and rebinds in turns: one of its masks matches all the time."""
    patched = Patched(1, 600)
    try:
        world = bare()
        ask(world, b"s subscribe --confirm q --add-mask a.*")
        ask(world, b"s subscribe --confirm other --add-mask *b.* *a*.*a")
        world.broker.turns.chunk_s = -1.0
        swaps = [
            b"q --remove-mask a.* --add-mask *.*",
            b"q --remove-mask *.* --add-mask a*.*",
            b"q --remove-mask a*.* --add-mask **",
            b"q --remove-mask ** --add-mask a.*",
        ]
        published = 0
        for number in range(12):
            swap = swaps[number % 4]
            world.intake.receive(world.connection("a"), b"r rebind %b\n" % swap)
            if rng.random() < 0.3:
                line = rng.choice([b"delete_queue other", b"subscribe other --add-mask *b.* c.**"])
                world.intake.receive(world.connection("b"), b"d %b\n" % line)
            for name in ("p1", "p2"):
                published += 1
                flag = b"--once " if once else b""
                line = b"m%d publish %ba.%d x\n" % (published, flag, rng.randrange(20))
                world.intake.receive(world.connection(name), line)
            for _ in range(rng.randrange(6)):
                world.broker.go_on()
        world.broker.turns.chunk_s = 1.0
        for name in ("a", "b", "p1", "p2"):
            world.send(name, b"")
            assert world.received(name) == b""
        assert ask(world, b"t purge --confirm q") == b"t ok %d\n" % published
        check(world.broker)
    finally:
        patched.patch.undo()


@pytest.mark.parametrize("has_masks", [False, True])
def test_a_queue_deleted_between_two_rebinds(has_masks: bool) -> None:
    """What came first is done first, masks and all."""
    world = bare()
    ask(world, b"s subscribe q a --add-mask a.*")
    world.broker.turns.chunk_s = -1.0
    names = b" ".join(b"e%d" % number for number in range(9000))
    masks = b" ".join(b"e.%d.*" % number for number in range(9000))
    names += b" --add-mask " + masks if has_masks else b""
    first, second = world.connection("k"), world.connection("other")

    world.intake.receive(first, b"r1 rebind --confirm q %b\n" % names)
    while not world.broker.bindings.busy:
        world.broker.go_on()  # It is parsed in turns, too.
    world.intake.receive(second, b"d delete_queue --confirm q\n")
    world.intake.receive(first, b"r2 rebind --confirm q --add-mask x.*\n")
    world.send("k", b"")
    world.send("other", b"")

    assert world.broker.bindings.by_name == {}
    assert world.broker.bindings.masks_by_name == {b"q": {b"\tx.*": None}}
    assert world.broker.bindings.routes.masks.count == 0
    check(world.broker)


def test_stats_tell_parts_of_what_a_queue_and_a_connection_have() -> None:
    world = bare()
    ask(world, b"s subscribe q a b c --add-mask a.* b.*")
    for consumer_id in (b"k2", b"k1", b"k3"):
        ask(world, b"%b consume q --keep" % consumer_id)

    def stats(words: bytes = b"") -> Any:
        return json.loads(ask(world, b"x stats" + words).removeprefix(b"x ok "))

    def lists(flags: bytes) -> list[list[str]]:
        told = stats(b" queue q" + flags)
        return [told[key] for key in ("events", "masks", "consumer_ids")]

    assert lists(b"") == [["a", "b", "c"], ["a.*", "b.*"], ["k2", "k1", "k3"]]
    assert lists(b" --limit=2") == [["a", "b"], ["a.*", "b.*"], ["k1", "k2"]]
    assert lists(b" --limit=2 --after=b") == [["c"], ["b.*"], ["k1", "k2"]]
    assert lists(b" --after=k1") == [[], [], ["k2", "k3"]]

    def ids(words: bytes) -> list[str]:
        return [each["id"] for each in stats(b" consumers" + words)]

    assert stats()["bindings"] == 5
    number = stats(b" connections")[0]["id"]
    assert ids(b" %d" % number) == ids(b"") == ["k1", "k2", "k3"]
    assert ids(b" %d --after=k1 --limit=1" % number) == ["k2"]
    assert ids(b" %d" % (number + 1)) == []
    assert ask(world, b"x stats consumers k1").startswith(b"x error ")
