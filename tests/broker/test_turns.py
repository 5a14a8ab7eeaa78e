"""A chunk that takes its time is handled in turns, and comes to the same."""

import json
import re
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.features.time.times import timed
from mqks.broker.spine.base.turns import finish
from mqks.broker.spine.clients.outbox import Outbox
from mqks.broker.spine.log.full_disk import take_settled
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.queue import blocks as blocks_module
from mqks.broker.spine.queue import lane as lane_module
from mqks.broker.spine.queue.paging import page_in
from mqks.errors import BadRequest
from mqks.limits import EVALUATIONS_MAX, STEP_MESSAGES
from mqks.users import Permissions
from tests.broker.test_bursts import LINES, World, filled
from tests.kit.bare import BareWorld
from tests.kit.compiled import patches_modules
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.marks import slow
from tests.kit.server_process import ServerProcess

MIB = 1024 * 1024


def together_or_not(
    chunks: list[tuple[str, bytes]], *, together: bool
) -> tuple[list[list[bytes]], tuple[Counter[bytes], Counter[bytes], object]]:
    """Replies to two connections, one of which may publish only `f`, and the outcome for others."""
    world = World()
    world.connection("limited").permissions = Permissions(publish=["f"])
    world.send("c", b"d consume r e f --manual-ack\n")
    if together:
        world.send_together(chunks)
    else:
        for name, chunk in chunks:
            world.send(name, chunk)
    replies = [sorted(world.received(name).splitlines()) for name in ("l", "limited")]
    return replies, world.outcome()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["k", "l", "limited"]), st.lists(st.sampled_from(LINES), max_size=4)
        ),
        max_size=12,
    )
)
def test_chunks_of_one_turn_come_to_the_same_as_one_by_one(
    turn: list[tuple[str, list[bytes]]],
) -> None:
    number = count()
    chunks = [
        (name, b"".join(filled(template, next(number)) + b"\n" for template in templates))
        for name, templates in turn
    ]
    alone = together_or_not(chunks, together=False)
    assert together_or_not(chunks, together=True) == alone


def test_what_many_connections_publish_is_published_in_one_step() -> None:
    world = BareWorld()
    world.send("k", b"s subscribe q e\n")
    broker, intake, queued = world.broker, world.intake, list[int]()

    intake.add(world.connection("k"), b"m1 publish --confirm e a\n")
    intake.add(world.connection("l"), b"m2 publish --confirm e b\nm3 publish e c\n")
    queued.append(broker.shared.counters.queued)
    intake.add(world.connection("m"), b"p purge --confirm q\nm4 publish --confirm e d\n")
    queued.append(broker.shared.counters.queued)
    intake.finish()
    queued.append(broker.shared.counters.queued)
    assert queued == [0, 3, 4], "other requests see what was published before them"

    for name, expected in (("k", b"m1 ok"), ("l", b"m2 ok"), ("m", b"m4 ok\np ok 3")):
        world.send(name, b"")
        assert sorted(map(bytes.strip, world.received(name).splitlines())) == expected.split(b"\n")


def test_many_connections_share_one_turn() -> None:
    """What comes after it is over waits for the next one, and none is left out for long."""
    world = BareWorld()
    ticks = count()
    world.broker.turns.clock, world.broker.turns.chunk_s = lambda: float(next(ticks)), 20.0
    names = [f"k{number}" for number in range(50)]
    world.send("k0", b"s subscribe q e\n")
    world.broker.turns.begin()
    for name in names:
        world.intake.add(
            world.connection(name),
            b"p ping\nm publish --confirm e a\n",
            waits=world.broker.turns.over,
        )
    world.intake.finish()
    left = [name for name in names if world.connection(name).overrun]
    assert 0 < len(left) < 50
    assert left == names[-len(left) :]
    for name in names:
        world.send(name, b"")
        assert sorted(world.received(name).splitlines())[-2:] == [b"m ok ", b"p ok "]


def test_who_publishes_is_known_of_each_chunk() -> None:
    """Acks and requests that follow another connection's messages have them published, but do not
    wait for the journal as publishers."""
    world = BareWorld()
    world.send("k", b"s subscribe q e\n")
    world.send("l", b"c consume q e --manual-ack\nm0 publish e a\n")
    publish = b"m1 publish e a\n"
    for chunk, publishes in (
        (b"a ack c m0\n", False),
        (b"r reject c m0\n", False),
        (b"p ping\n", False),
        (b"u unbind q f\n", False),
        (publish, True),
        (b"a ack c m0\n" + publish, True),
        (publish + b"a ack c m0\n", True),
        (b"m2 publish --once e a\n", True),
        (b"m3 publish --mandatory e a\n", True),
    ):
        world.intake.add(world.connection("k"), b"g publish e a\n")
        world.intake.add(world.connection("l"), chunk)
        assert world.intake.publishes == publishes, chunk
        world.intake.finish()


def test_what_gathers_is_only_what_its_user_may_publish() -> None:
    for names in (("k", "limited"), ("limited", "k")):
        chunks = [
            (name, b"m publish --confirm %b a\n" % event)
            for event in (b"e", b"f")
            for name in names
        ]
        (of_l, limited), (of_k, *_) = together_or_not(chunks, together=True)
        assert of_k == {b"m ok ": 2}
        assert not of_l
        assert [line.split()[1] for line in limited] == [b"error", b"ok"]


def test_many_connections_do_not_exceed_the_limit_of_a_queue() -> None:
    world = BareWorld(queue_messages_max=3)
    names = [f"k{number}" for number in range(5)]
    world.send("k0", b"s subscribe q e\n")

    world.send_together([(name, b"m publish --confirm e a\n") for name in names])

    replies = [world.received(name).split()[1] for name in names]
    assert replies == [b"ok"] * 3 + [b"error"] * 2


def test_others_have_their_turn_between_costly_lines(server: ServerProcess) -> None:
    """Each of them takes milliseconds, all of them many turns; they come in one chunk."""
    events, count = 20_000, 60
    with LineClient(server.address) as busy, LineClient(server.address) as other:
        names = b" ".join(b"e%d" % number for number in range(events))
        assert busy.ask(b"s subscribe --confirm q " + names) == b"s ok "
        with server.paused():
            busy.send(b"r rebind q --remove-mask *nothing*\n" * count + b"end help nothing\n")
            other.send(b"s stats\n")
        assert b'"errors": 0' in other.line(), "it came when all was done"
        assert busy.line().startswith(b"end error ")


@pytest.mark.parametrize("line", [b"a", b"a\tb", b"r rebind q a", b"a\tb\nr rebind q a"])
def test_any_line_may_be_the_last_of_a_turn(line: bytes) -> None:
    world = BareWorld()
    world.broker.turns.chunk_s = -1.0
    connection = world.connection("k")
    world.intake.receive(connection, (line + b"\n") * 3)
    assert connection.overrun
    assert world.broker.shared.counters.errors <= 1


def test_lines_without_replies_need_no_room_for_them() -> None:
    world = BareWorld()
    connection = world.connection("k")
    world.broker.shared.outboxes.used = 2 * world.broker.settings.unsent_bytes_max
    world.intake.receive(connection, b"r rebind q a\n" * 3)
    assert not connection.overrun
    world.intake.receive(connection, b"h help\n" * 3)
    assert connection.overrun


@pytest.mark.slow
def test_a_chunk_has_no_more_replies_waiting_than_it_may(server: ServerProcess) -> None:
    """A few bytes ask for megabytes; who does not take them gets them later."""
    queues, count = 5000, 120
    with LineClient(server.address) as asking, LineClient(server.address) as other:
        asking.send(b"".join(b"s subscribe q%d e\n" % number for number in range(queues)))
        assert asking.ask(b"s subscribe --confirm q e") == b"s ok "
        before = server.resident_bytes
        asking.send(b"s stats queues --limit=10000\n" * count)
        for _ in range(20):
            assert other.ask(b"p ping") == b"p ok "
        assert server.resident_bytes - before < 48 * MIB
        replies = [len(asking.line()) for _ in range(count)]
        assert min(replies) > 500_000
        assert server.resident_bytes - before < 48 * MIB


QUEUES = 2100
"""More than one commit takes, and more than one step."""


def many_queues(world: BareWorld, count: int = QUEUES) -> None:
    world.send("k", b"".join(b"s subscribe q%d e\n" % number for number in range(count)))


def test_a_message_for_very_many_queues_goes_out_in_turns_and_is_confirmed_after_all() -> None:
    world = BareWorld()
    many_queues(world)
    world.broker.turns.chunk_s = -1.0
    connection = world.connection("k")

    world.intake.receive(connection, b"m1 publish --confirm e a\nm2 publish e b\n")

    assert connection.works, "it is not done in one turn"
    assert not world.broker.pending.waiters.confirms
    world.send("k", b"p ping\n")
    assert sorted(world.received("k").splitlines()) == [b"m1 ok ", b"p ok "]
    assert {queue.lane.blocks.count for queue in world.broker.queues.values()} == {2}
    assert {queue.lane.body(1) for queue in world.broker.queues.values()} == {b"m1 event=e a"}


@pytest.mark.parametrize("looks", range(8))
def test_what_is_kept_when_a_turn_ends_twice_over_is_not_lost(looks: int) -> None:
    """The second line may end the turn when its event is new, and again because it is an error."""
    world = BareWorld(name_bytes_max=20)
    many_queues(world, 300)
    world.broker.turns.clock, world.broker.turns.chunk_s = count().__next__, looks

    world.send("k", b"m1 publish e a\n" + b"m" * 21 + b" publish f b\np ping x\n")

    assert re.fullmatch(rb"m{21} error \w{24}\np ok x\n", world.received("k"))


def test_a_publisher_that_goes_leaves_no_message_half_routed(server: ServerProcess) -> None:
    with LineClient(server.address) as client:
        for number in range(QUEUES):
            client.send(b"s subscribe q%d e\n" % number)
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        client.send(b"m1 publish e a\n" * 20)
    with LineClient(server.address) as other:
        ready = b"0"
        while ready != b"%d" % (20 * (QUEUES + 1)):
            ready = other.ask(b"s stats").partition(b'"messages_ready": ')[2].split(b",")[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_of_very_many_queues_is_written_in_pieces_and_confirmed_with_the_last(
    fails: bool,
) -> None:
    """Also when a piece is tried again."""
    world = BareWorld()
    many_queues(world)
    broker = world.broker
    world.intake.receive(world.connection("k"), b"m1 publish --confirm --once e a\n")
    if fails:
        broker.pending.put_back(broker.pending.take())

    batches = []
    while broker.pending:
        batches.append(broker.pending.take())

    assert [len(batch.entry.changes) for batch in batches] == [1024, 1024, QUEUES - 2048]
    assert [bool(batch.waiters.confirms) for batch in batches] == [False, False, True]
    assert [batch.entry.once for batch in batches] == [[], [], [b"m1"]]


def test_a_piece_that_cannot_be_written_takes_the_rest_of_its_batch_along() -> None:
    """On a full disk: who waits for the last piece must not be confirmed with what is settled."""
    world = BareWorld()
    many_queues(world)
    broker = world.broker
    world.intake.receive(world.connection("k"), b"m1 publish --confirm e a\n")
    piece = broker.pending.take()

    rest = broker.pending.take(whole=True)
    assert len(rest.waiters.confirms) == 1
    for batch in (rest, piece):
        broker.pending.put_back(batch)

    assert len(broker.pending.take(whole=True).entry.changes) == QUEUES


def test_what_many_consumers_held_is_back_before_any_of_it_is_given_to_others() -> None:
    world = BareWorld()
    world.send("gone", b"c1 consume q e --manual-ack\n")
    world.send("k", b"".join(b"m%d publish e x\n" % number for number in range(5000)))
    world.send("stays", b"c2 consume q\n")
    world.broker.turns.chunk_s = -1.0
    world.disconnect("gone")

    ids = [line.split(b" ")[2] for line in world.received("stays").splitlines()]
    assert ids == [b"m%d" % number for number in range(5000)]


@pytest.mark.slow
def test_an_expression_pays_for_what_it_looks_at() -> None:
    world = BareWorld()
    names = b" ".join(b"e%d" % number for number in range(100))
    world.send("k", b"".join(b"s subscribe q%d %b\n" % (n, names) for n in range(5000)))

    world.send("k", b"a _eval 1+1\nb _eval len(state.queues)\n")
    assert world.received("k") == b"a ok 2\nb ok 5000\n"
    world.send("k", b"c _eval state.events_by_queues['q7'][:2]\n")
    assert world.received("k") == b'c ok ["e0", "e1"]\n'
    world.send(
        "k", b"d _eval sorted([(len(m), q) for q, m in state.queues.items()], reverse=True)[:1]\n"
    )
    assert world.received("k") == b'd ok [[0, "q999"]]\n'
    world.send("k", b"f _eval len(state.queues_by_events)\n")
    assert world.received("k").startswith(b"f error ")


@pytest.mark.parametrize("looks", [*range(0, 300, 15), *slow(*range(3, 300, 6))])
def test_nobody_sees_a_message_without_the_earlier_ones_of_its_connection(looks: int) -> None:
    """They are in other queues: what a connection publishes is routed in its order, also where a
    turn ends after so many looks at the clock."""
    world = BareWorld()
    world.send("k", b"s subscribe log every l\n")
    world.send("watcher", b"c consume mix every m\n")
    world.broker.turns.clock, world.broker.turns.chunk_s = count().__next__, looks
    connection, watcher = world.connection("k"), world.connection("watcher")
    events = [*("every", "m") * 90, *("m", "l") * 30, "every", *("m", "l") * 30]
    chunk = "".join(f"{n} publish {event} x\n" for n, event in enumerate(events)).encode()

    while chunk or connection.overrun:
        world.intake.receive(connection, chunk)
        chunk = b""
        delivered = b"".join(watcher.outbox).splitlines()
        last = int(delivered[-1].split(b" ")[2]) if delivered else -1
        earlier = sum(event != "m" for event in events[: last + 1])
        assert world.broker.queues[b"log"].ready >= earlier
    assert world.broker.queues[b"log"].ready == len(events) - events.count("m")


@pytest.mark.parametrize("calls", range(16))
def test_a_publish_once_that_is_routed_in_several_turns_does_not_wait_for_its_own_chunk(
    calls: int,
) -> None:
    """`calls`: so many looks at the clock come before the end of the turn."""
    world = BareWorld(name_bytes_max=65536)
    world.send("k", b"s subscribe q e --add-mask *zz*.x\n")
    broker, connection = world.broker, world.connection("k")
    looks = count()
    broker.turns.clock = lambda: float(max(0, next(looks) - calls))
    broker.turns.chunk_s = 0.5
    long_event = b"abczz" * 6000 + b".x"
    chunk = b"m1 publish --confirm --once e a\n"
    chunk += b"m2 publish --confirm --once %s b\nm1 publish --confirm --once e a\n" % long_event
    for _ in range(50):
        broker.turns.begin()
        broker.go_on()
        world.intake.receive(connection, chunk)
        chunk = b""

    assert (len(broker.turns), broker.publishing.once.unfinished) == (0, 0)
    batch = broker.pending.take()
    assert batch.entry.once == [b"m1", b"m2"]
    assert broker.queues[b"q"].ready == 2
    confirmed = [each for _, ids, _ in batch.waiters.confirms for each in ids]
    assert sorted(confirmed) == [b"m1", b"m1", b"m2"]


def test_on_a_full_disk_messages_stay_pending_and_are_counted() -> None:
    world = BareWorld()
    world.send("k", b"s subscribe q e\nm1 publish e a\nc consume q --manual-ack\n")
    broker, connection = world.broker, world.connection("k")
    world.intake.receive(connection, b"m2 publish --once e b\na ack c m1\n")

    settled = take_settled(broker.pending)

    [change] = settled.entry.changes
    assert (change.runs, change.acks, settled.entry.once) == ([], [(1, 1)], [])
    # The message and its id; the ack is written.
    assert broker.pending.records == 2
    rest = broker.pending.take()
    assert [run.lines for run in rest.entry.changes[0].runs] == [[b"m2 event=e b"]]
    assert rest.entry.once == [b"m2"]


@pytest.mark.parametrize(
    "expression",
    [
        b"len([q for q in state.queues for i in range(2) if len(state.queues[q]) == 0])",
        b"len(sorted(range(9000), key=lambda x: [-x]))",
        b"sum(max(range(3000), key=abs) - 2999 + len(range(1)) for i in range(3))",
    ],
)
def test_an_expression_goes_on_in_later_turns(expression: bytes) -> None:
    """Others change meanwhile what it looks at, and get their answers."""
    world = BareWorld()
    many_queues(world)
    world.broker.turns.chunk_s = -1.0

    world.intake.receive(world.connection("k"), b"ev _eval --confirm %b\np ping\n" % expression)

    assert world.connection("k").works, "it is not done in one turn"
    world.intake.receive(world.connection("other"), b"p ping x\n")
    assert world.connection("other").outbox == [b"p ok x\n"]
    world.send("other", b"d delete_queue q0\n")
    world.send("k", b"")
    answer, *replies = world.received("k").splitlines()
    assert re.fullmatch(rb"ev ok \d+", answer)
    assert sorted(replies) == [b"ev ok ", b"p ok "]


@pytest.mark.parametrize("what", [b"", b"queue big --limit=9000"])
def test_stats_of_very_much_are_told_in_turns(what: bytes) -> None:
    world = BareWorld()
    many_queues(world)
    events = sorted(b"e%d" % number for number in range(9000))
    world.send("k", b"s subscribe big " + b" ".join(reversed(events)) + b"\n")
    world.broker.turns.chunk_s = -1.0

    world.intake.receive(world.connection("k"), b"st stats %b\n" % what)

    assert world.connection("k").works, "it is not done in one turn"
    world.send("k", b"")
    told = json.loads(world.received("k").removeprefix(b"st ok "))
    assert told["bindings"] == (len(events) if what else QUEUES + len(events))
    assert told.get("events") in (None, [event.decode() for event in events])


@patches_modules
def test_deliveries_that_use_up_each_turn_starve_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of other work is done in each turn, however much is due to consumers."""
    monkeypatch.setattr(blocks_module, "DELIVERY_BYTES", 1)
    monkeypatch.setattr(lane_module, "STEP_BODIES", 100)
    world = BareWorld()
    world.send("k", b"s subscribe a a\ns subscribe b b\n")
    world.send("k", b"m publish a x\nm publish b x\n" * 1000)
    world.broker.turns.chunk_s = -1.0
    world.intake.receive(world.connection("c"), b"c consume a\n")
    world.intake.receive(world.connection("k"), b"p purge b\n")
    for _ in range(100):
        world.broker.go_on()
    assert world.broker.queues[b"a"].ready > 800
    assert not world.broker.queues[b"b"].ready


def test_who_changes_bindings_first_is_done_first() -> None:
    """A queue is deleted while its bindings are being changed; who comes then makes it anew, and
    keeps its bindings, also when it comes in the moment in which the first one is done."""
    world = BareWorld()
    world.send("k", b"s subscribe q a\n")
    world.broker.turns.chunk_s = -1.0
    connections = [world.connection(name) for name in ("k", "other", "late")]
    events = b" ".join(b"e%d" % number for number in range(9000))

    world.intake.receive(connections[0], b"r1 rebind --confirm q %b\n" % events)
    world.intake.receive(connections[1], b"d1 delete_queue --confirm q\n")
    while len(connections[0].works) > 1:  # Its bindings are changed then, but it is not confirmed.
        world.broker.go_on()
    world.intake.receive(connections[2], b"s1 subscribe --confirm q a\n")
    world.send("late", b"")

    assert world.received("late") == b"s1 ok \n"
    assert [*world.broker.bindings.by_name[b"q"]] == [b"a"]


@pytest.mark.parametrize("times", [1, 2])
def test_no_event_leads_to_a_queue_that_was_deleted_while_its_bindings_changed(times: int) -> None:
    """Made anew at once, in another way than by bindings, it does not hide those before it."""
    world = BareWorld()
    events = b" ".join(b"e%d" % number for number in range(9000))
    world.send("k", b"s subscribe q %b\n" % events)
    world.broker.turns.chunk_s = -1.0

    world.intake.receive(world.connection("k"), b"r rebind q a\n")
    for number in range(times):
        for what in (b"delete_queue q", b"set_queue q --retries=5"):
            name = f"{what!r} {number}"
            world.connect(name)
            world.intake.receive(world.connection(name), b"c %b\n" % what)
            assert (b"q" in world.broker.queues) == what.startswith(b"set")
    assert world.connection("k").works
    world.send("k", b"p publish a x\np publish e1 x\np publish e8999 x\nt stats\n")

    told = json.loads(world.received("k").removeprefix(b"t ok "))
    assert (told["routed"], told["unroutable"]) == (0, 3)


def test_few_expressions_are_under_way_at_once() -> None:
    """What they have made takes memory, so others wait for their turn, however short they are."""
    world = BareWorld()
    names = [str(number) for number in range(EVALUATIONS_MAX + 1)]
    world.broker.turns.chunk_s = -1.0
    costly = b"e _eval len([i for i in range(9000)])\n"
    for name in names[1:]:
        world.intake.receive(world.connection(name), costly)
    world.intake.receive(world.connection(names[0]), b"e _eval 1\n")

    answered: list[Outbox] = []
    while not answered:
        world.broker.go_on()
        answered += world.broker.flow.touched
    assert world.connection(names[0]) not in answered
    world.send(names[0], b"")
    assert [world.received(name) for name in names] == [
        b"e ok 1\n",
        *[b"e ok 9000\n"] * EVALUATIONS_MAX,
    ]


def test_what_nobody_waits_for_any_more_is_not_evaluated() -> None:
    world = BareWorld()
    world.broker.turns.chunk_s = -1.0
    connection = world.connection("k")
    world.intake.receive(connection, b"e _eval len([i for i in range(30000)])\nm publish e x\n")
    connection.closed = True

    for _ in range(5):
        world.broker.go_on()
    assert not connection.works
    world.intake.receive(connection, b"")
    assert world.broker.shared.counters.published == 1, "what it has sent is done all the same"
    assert not connection.outbox


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (b"len(state.queues_by_events)", b"3000"),
        (b"state.queues_by_events['e7']", b'["a", "b"]'),
        (b"len(state.messages_by_consumer_ids['c1'])", b"5000"),
        (b"sorted(state.messages_by_consumer_ids)", b'["c1", "c2"]'),
    ],
)
def test_what_an_expression_looks_at_is_told_in_turns(expression: bytes, answer: bytes) -> None:
    world = BareWorld()
    events = b" ".join(b"e%d" % number for number in range(3000))
    world.send("k", b"s subscribe b %b\ns subscribe a %b\n" % (events, events))
    world.send("c", b"c1 consume a --manual-ack\nc2 consume b --manual-ack\n")
    world.send("k", b"m publish e7 x\n" * 5000)
    world.broker.turns.chunk_s = -1.0

    world.intake.receive(world.connection("k"), b"e _eval %b\n" % expression)
    assert world.connection("k").works, "it is not done in one turn"
    world.send("k", b"")
    assert world.received("k") == b"e ok %b\n" % answer


def test_expressions_keep_no_server_from_stopping(tmp_path: Path) -> None:
    """What stands behind them is done all the same."""
    costly = b"e _eval len([i for i in range(30000)])\n"
    db = tmp_path / "mqks.db"
    with served(db, "--drain-timeout-s=1") as (server, client):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        client.send(costly * 40 + b"m publish --confirm e x\n")
        assert client.line() == b"e ok 30000"
        assert server.terminate() == 0
        replies = []
        with suppress(EOFError):
            while True:
                replies.append(client.line())
    assert replies[-1] == b"m ok "
    assert len(replies) == 40


@patches_modules
def test_a_spill_that_goes_on_later_lets_go_only_of_what_is_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page may have come meanwhile, and a later commit spilled that."""
    monkeypatch.setattr(blocks_module, "BLOCK", 1)
    world = BareWorld()
    world.send("k", b"s subscribe q e\nm1 publish e x\nm2 publish e x\n")
    queue = world.broker.queues[b"q"]
    lane = queue.lane
    finish(lane.spill(lane.next_seq))
    world.send("k", b"m3 publish e x\nm4 publish e x\n")
    begun = lane.spill(lane.next_seq)
    next(begun)
    assert [line is None for _, line in lane.blocks] == [True, True, False, True]

    page_in(queue, 1, [Run(1, [b"m%d event=e x" % number for number in (1, 2, 3)])])
    finish(lane.spill(lane.next_seq))
    world.intake.receive(world.connection("k"), b"m5 publish e x\n")
    finish(begun)
    assert [line for _, line in lane.blocks] == [None] * 4 + [b"m5 event=e x"]


def test_who_waits_for_pieces_that_are_written_is_known_when_the_rest_is_put_back() -> None:
    world = BareWorld()
    many_queues(world)
    broker = world.broker
    world.intake.receive(world.connection("k"), b"m1 publish --confirm e a\n")
    broker.pending.take()
    for name in list(broker.queues):
        world.intake.receive(world.connection("k"), b"d delete_queue " + name + b"\n")

    rest = broker.pending.take(whole=True)
    broker.pending.put_back(rest)

    assert broker.pending.take(whole=True).must_last
    assert rest.must_last


@pytest.mark.parametrize("is_written", [True, False])
def test_what_waits_for_one_commit_is_answered_in_turns_and_parties_take_turns(
    is_written: bool,
) -> None:
    """A user of one connection does not wait for all of another who has very many."""
    world = BareWorld()
    world.send("k", b"s subscribe q e\n" + b"m publish e x\n" * 2000)
    crowd = [world.connection(f"crowd{number}") for number in range(100)]
    last = world.connection("last")
    for connection in crowd:
        connection.source = b"crowd"
    for connection in (*crowd, last):
        world.intake.receive(connection, b"r receive q --limit=5\n" * 2)
    broker = world.broker
    broker.turns.chunk_s = -1.0

    def answered() -> int:
        return sum(len(each.outbox) > 0 for each in crowd)

    batch = broker.pending.take(whole=True)
    assert not broker.pending
    if is_written:
        broker.answers.committed(batch)
    else:
        broker.answers.failed(batch, BadRequest("the disk is full"), for_room=True)
    turns = 0
    while not last.outbox:
        assert broker.answers.are_due
        broker.go_on()
        turns += 1
    assert answered() < 5
    while broker.answers.are_due:
        broker.go_on()
        turns += 1
    assert answered() == len(crowd)
    assert turns > len(crowd)
    ending = rb"(r ok m [^\n]+ x\n){5}r ok --end\n" if is_written else rb"r error \w{24}\n"
    for each in (*crowd, last):
        assert re.fullmatch(ending * 2, b"".join(each.outbox))


def test_confirms_of_one_commit_are_written_in_turns() -> None:
    world = BareWorld()
    world.send("k", b"s subscribe q e\n")
    connections = [world.connection(f"k{number}") for number in range(20)]
    for connection in connections:
        lines = b"m publish --confirm e x\n" * STEP_MESSAGES + b"p purge --confirm none\n"
        world.intake.receive(connection, lines)
    broker = world.broker
    broker.turns.chunk_s = -1.0
    broker.answers.committed(broker.pending.take())
    assert [bool(each.outbox) for each in connections] == [True] + [False] * 19
    for each in connections:
        world.send("k", b"")
        assert not each.unconfirmed
    for number in range(20):
        assert world.received(f"k{number}").count(b"\n") == STEP_MESSAGES + 1


def test_a_commit_of_very_many_queues_with_delays_lets_go_of_their_bodies_in_turns() -> None:
    world = BareWorld()
    many_queues(world)
    world.intake.receive(world.connection("k"), b"m publish --delay=60 e x\n")
    broker = world.broker
    batch = broker.pending.take(whole=True)
    broker.turns.chunk_s = -1.0
    broker.answers.committed(batch)

    def held() -> int:
        return sum(len(timed(each).delays.bodies) for each in broker.queues.values())

    assert held() == QUEUES
    world.send("k", b"p ping\n")
    assert held() == 0


def test_what_many_receives_take_is_leased_in_turns() -> None:
    """A turn is over as soon as something is leased."""
    world = BareWorld()
    count = 8 * STEP_MESSAGES
    world.send("k", b"s subscribe q e\n" + b"r receive q --limit=100 --wait=60\n" * 90)
    queue, turns, connection = world.broker.queues[b"q"], world.broker.turns, world.connection("l")
    turns.clock, turns.chunk_s = lambda: float(queue.leased), 0.5

    world.intake.receive(connection, b"m publish e x\n" * count)
    leased = [queue.leased]
    while sum(leased) < count:
        world.intake.receive(connection, b"")
        world.broker.go_on()
        leased.append(queue.leased - sum(leased))
    assert max(leased) <= 2 * STEP_MESSAGES
