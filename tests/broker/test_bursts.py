"""Thousands of lines that come at once come to the same as one by one: each is done once, wherever
turns and chunks end, and what that takes grows with their number alone."""

import re
import time
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, combinations, cycle, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.requests import intake
from mqks.protocol.requests import ACTIONS
from tests.fuzz.invariants import digest
from tests.kit.bare import BareWorld
from tests.kit.compiled import patches_modules
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient

MIB = 1024 * 1024
HELD = 64
"""Messages that the consumer `c` holds, and that wait in `q` and in `dead`."""
SELECTION = (b"--event=e", b"--id=h7", b"--older=0", b"--where=k=v&why=")
SOME = (*SELECTION, b"--limit=3")
ADDS = (b"--add f%d", b"--add-mask *.f%d")
REQUESTS: dict[bytes, tuple[bytes, tuple[bytes, ...], bytes]] = {
    b"publish": (
        b"",
        (
            *(b"--once", b"--mandatory", b"--delay=5", b"--at=1005", b"--ttl=60"),
            *(b"--meta=a=b", b"--to=q", b"--escaped", b"--priority=5", b"--key=k"),
            b"--keep-result=9",
            b"--batch=open",
            b"--unique=k%d,on=replace",
            b"--dead-letter=reason=ttl&queue=q&tries=1&published=1.000&died=2.000",
        ),
        b"e x",
    ),
    b"subscribe": (b"s%d e", ADDS, b""),
    b"consume": (
        b"s%d e",
        (
            *ADDS,
            *(b"--delete-queue-when-unused", b"--manual-ack", b"--prefetch=3", b"--meta"),
            *(b"--existing", b"--keep", b"--backoff=1", b"--ack-timeout=9", b"--cancellable"),
        ),
        b"",
    ),
    b"rebind": (b"s%d", (*ADDS, b"--remove f%d", b"--remove-mask *.f%d"), b""),
    b"ack": (b"c h%d", (b"--all", b"--result=x"), b""),
    b"reject": (
        b"c h%d",
        (
            *SELECTION,
            b"--dead",
            b"--retries=2",
            b"--delay=5",
            b"--backoff=1,2",
            b"--reason=gone",
            b"--all",
            b"--fate",
            b"--pause=9",
        ),
        b"",
    ),
    b"release": (b"c h%d", (b"--delay=5", b"--all"), b""),
    b"touch": (b"c h%d", (b"--all", b"--for=9"), b""),
    b"set_prefetch": (b"c %d", (), b""),
    b"progress": (b"c h%d %d x", (), b""),
    b"cancel_job": (b"q h%d", (b"--reason=gone",), b""),
    b"result": (b"h%d", (b"--wait=9",), b""),
    b"begin": (b"", (), b""),
    b"commit": (b"", (), b""),
    b"rollback": (b"", (), b""),
    b"receive": (b"q", (b"--limit=9", b"--lease=9", b"--wait=9"), b""),
    b"lease": (
        b"q -1.%d.1",
        (
            *(b"--ack", b"--reject", b"--for=9", b"--undelivered", b"--held"),
            *(b"--delay=5", b"--dead", b"--reason=gone"),
        ),
        b"",
    ),
    b"cancel": (b"q", (b"--all",), b"h%d"),
    b"promote": (b"q", (b"--all",), b"h%d"),
    b"move": (b"q other", SOME, b""),
    b"redrive": (b"dead", (*SOME, b"--to=other"), b""),
    b"delete_consumer": (b"c", (b"--tell",), b""),
    b"delete_queue": (b"s%d", (b"--when-unused",), b""),
    b"set_queue": (
        b"s%d",
        (
            *(
                b"--retries=3",
                b"--losses=3",
                b"--deliveries=3",
                b"--backoff=1",
                b"--dead-letters=dead",
                b"--ttl=9",
            ),
            *(b"--messages-max=9", b"--bytes-max=99", b"--overflow=drop", b"--reset"),
            *(
                b"--single-consumer=yes",
                b"--ack-timeout=9",
                b"--ordered=key",
                b"--fair=key",
                b"--paused=no",
                b"--publishes-paused=no",
                b"--paused-until=1",
                b"--concurrency=9",
                b"--rate=9/s",
                b"--concurrency-per-key=2",
                b"--rate-per-key=9/s",
                b"--breaker=9,9",
                b"--limit=l,concurrency=9,rate=9/s",
            ),
            b"--readers=a,b",
            b"--labels=a=b",
        ),
        b"",
    ),
    b"pause": (b"q", (b"--for=9", b"--deliveries", b"--publishes", b"--publishes=wait"), b""),
    b"resume": (b"q", (), b""),
    b"purge": (b"q", (*SOME, b"--scheduled"), b""),
    b"peek": (b"q", (*SOME, b"--scheduled", b"--soonest", b"--after=1", b"--batches"), b""),
    b"tail": (b"", (b"--queue=q",), b"e"),
    b"range": (b"q", (b"--at=1", b"--archived=1"), b""),
    b"read": (b"q", (b"--from=1", b"--to=9", b"--limit=3", b"--epoch=1", b"--meta"), b""),
    b"trim": (b"q %d", (b"--epoch=1", b"--reader=a"), b""),
    b"stats": (b"bindings", (b"--after=q", b"--mask=s*", b"--then=e", b"--limit=3"), b""),
    b"schedule": (
        b"n%d",
        (
            *(b"--every=9", b"--tz=UTC", b"--missed=one", b"--jitter=1"),
            *(b"--pause", b"--resume", b"--run"),
        ),
        b"publish e x",
    ),
    b"schedules": (b"", (b"--after=n", b"--limit=3"), b""),
    b"unschedule": (b"n%d", (), b""),
    b"open_batch": (b"n%d", (b"--for=9", b"--on-dead", b"--restored=1,1"), b"publish e x"),
    b"close_batch": (b"n%d", (b"--discard",), b""),
    b"batch": (b"n%d", (), b""),
    b"batches": (b"", (b"--after=n", b"--limit=3"), b""),
    b"rename": (b"s%d t%d", (), b""),
    b"trace": (b"t%d", (b"--for=9", b"--off"), b""),
    b"help": (b"publish", (), b""),
    b"auth": (b"wrong", (), b""),
    b"set_name": (b"n%d", (), b""),
    b"close_connection": (b"999%d", (), b""),
    b"reload": (b"", (), b""),
    b"read_only": (b"on", (), b""),
    b"drain": (b"", (b"--timeout=0", b"--off"), b""),
    b"ping": (b"x", (), b""),
    b"_eval": (b"", (b"--worker=0",), b"%d"),
}
"""For each action what stands before its flags, the flags with their values, and what stands behind
them; %d is a number."""


def test_every_action_and_flag_is_here() -> None:
    assert REQUESTS.keys() == ACTIONS.keys()
    for action, (_, flags, _) in REQUESTS.items():
        known = {*re.findall(r"--[a-z-]+", ACTIONS[action].usage)}
        told = {re.match(r"--[a-z-]+", flag.decode())[0] for flag in flags}  # type: ignore[index]
        assert told == known, action


def forms(action: bytes, pairs: bool) -> list[bytes]:
    """A request with none and each of its flags, or each pair of them, valid or not."""
    before, flags, behind = REQUESTS[action]
    chosen = combinations(flags, 2) if pairs else [(), *((flag,) for flag in flags)]
    words = [b" ".join(filter(None, (before, *some, behind))) for some in chosen]
    return [b"%b %b%b" % (action, confirm, each) for each in words for confirm in FIRST]


FIRST = b"", b"--confirm "
LINES_MAX = 4
"""Lines of a block, for these tests."""


def burst(form: bytes, size: int) -> list[bytes]:
    """So many lines of this form; each two have the same id."""
    return [b"r%d %b\n" % (n // 2, filled(form, n % HELD)) for n in range(size)]


def filled(form: bytes, number: int) -> bytes:
    return form % ((number,) * form.count(b"%d"))


class World(BareWorld):
    """A queue with messages that wait and are due later, a consumer that holds some, dead ones."""

    def __init__(self) -> None:
        super().__init__(line_bytes_max=200)
        held = b"".join(b"h%d publish e x\n" % number for number in range(HELD))
        self.send("k", b"s set_queue d --dead-letters=dead\nr rebind d e\n")
        self.send("c", b"c consume d --manual-ack\n")
        self.send("k", held + b"x reject c --all --dead\n")
        self.send("k", b"r rebind d\ns subscribe q e\no open_batch open\n")
        self.send("k", held + held.replace(b"publish", b"publish --delay=9"))
        self.received("k")
        self.received("c")

    def tick(self, ticks: Iterable[int], chunk_s: int) -> None:
        """Each look at the clock takes its time, so that turns end at any of them."""
        self.broker.turns.clock = accumulate(cycle((1, *ticks))).__next__
        self.broker.turns.chunk_s = chunk_s

    def outcome(self) -> tuple[Counter[bytes], Counter[bytes], object]:
        """Replies to `k`, what `c` got, and the state."""
        told = Counter(re.sub(rb" error \w+", b" error", self.received("k")).splitlines())
        return told, Counter(self.received("c").splitlines()), self._state()

    def _state(self) -> object:
        messages = {
            queue.name: (queue.policy, sorted(self.disk.queues[queue.id].lines.items()))
            for queue in self.broker.queues.values()
        }
        ready = [(queue.ready, dict(queue.lane.marks)) for queue in self.broker.queues.values()]
        return messages, ready, digest(self.broker)[1:]


@patches_modules
@pytest.mark.parametrize(
    ("action", "pairs"),
    [
        *((action, False) for action in REQUESTS),
        *(
            pytest.param(action, True, marks=pytest.mark.slow)
            for action, (_, flags, _) in REQUESTS.items()
            if len(flags) > 1
        ),
    ],
)
def test_turns_that_end_in_a_burst(
    action: bytes, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "LINES_MAX", LINES_MAX)
    for form in forms(action, pairs):
        one_by_one, at_once = World(), World()
        at_once.tick((0, 1, 1, 2, 1, 3), 7)
        lines = burst(form, 40)
        for line in lines:
            one_by_one.send("k", line)
        at_once.send("k", b"".join(lines))
        for mine, others in zip(at_once.outcome(), one_by_one.outcome(), strict=True):
            assert mine == others, form


LINES = [
    *(b"r%d publish e x", b"r%d publish --confirm f x", b"r%d publish --once e x"),
    *(b"r7 publish --confirm --once e x", b"r%d publish --confirm --meta=a=b e x"),
    *(b"r%d publish --ttl=60 --meta=a=b e x", b"r%d publish --ttl=60 f x"),
    *(b"r%d publish --mandatory nowhere x", b"r%d publish e a\tb", b" publish e %d", b"%d"),
    *(b"r%d ack --confirm c h%d", b"r%d ack c h%d", b"r%d reject --confirm --dead c h%d"),
    *(b"r%d release c h%d", b"r%d rebind --confirm q e f", b"r%d purge --confirm q", b"a\tb", b""),
    *(b"r%d ping x\r", b"r%d subscribe s%d e", b"r%d delete_queue --confirm s7"),
    b"r%d publish e " + b"x" * 120,
]
TOO_LONG = b"r%d publish --confirm e " + b"x" * 200


@patches_modules
@given(
    st.lists(st.sampled_from(LINES), max_size=5 * LINES_MAX),
    st.sampled_from([*LINES, TOO_LONG]),
    st.one_of(st.none(), st.lists(st.integers(0, 600), max_size=4)),
    st.lists(st.integers(0, 3), max_size=6),
    st.integers(-1, 9),
)
def test_chunks_and_turns_make_no_difference(
    templates: list[bytes], last: bytes, cuts: list[int] | None, ticks: list[int], chunk_s: int
) -> None:
    """The chunks are cut there, or everywhere."""
    lines = [
        filled(template, number) + b"\n"
        for number, template in enumerate([*templates, last, LINES[0]])
    ]
    stream = b"".join(lines)
    places = range(len(stream) + 1) if cuts is None else sorted({0, *cuts, len(stream)})
    one_by_one, at_once = World(), World()
    for line in lines:
        one_by_one.send("k", line)
    at_once.tick(ticks, chunk_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "LINES_MAX", LINES_MAX)
        for start, end in pairwise(places):
            at_once.send("k", stream[start:end])
    assert at_once.outcome() == one_by_one.outcome()
    assert at_once.is_closed("k") == one_by_one.is_closed("k") == (last is TOO_LONG)


SIZE = 20_000
FLAGGED = [b"publish --confirm %b e x" % each for each in REQUESTS[b"publish"][1]]
QUICK = b"publish --confirm --ttl=60 --meta=a=b e x", b"publish --confirm --once --meta=a=b e x"


@pytest.mark.parametrize(
    "form", [*QUICK, *(pytest.param(form, marks=pytest.mark.slow) for form in FLAGGED)]
)
def test_a_burst_is_published_and_confirmed_once(form: bytes, tmp_path: Path) -> None:
    """Its client closes its sending side behind it, as netcat does, and gets all confirms."""
    with (
        served(tmp_path / "mqks.db") as (server, client),
        LineClient(server.address) as other,
    ):
        assert other.ask(b"s subscribe --confirm q e") == b"s ok "
        assert other.ask(b"o open_batch --confirm open") == b"o ok "
        client.send(b"".join(b"m%d %b\n" % (n, filled(form, n)) for n in range(SIZE)))
        client.close_sending_side()
        told = Counter(client.rest())
        queue = other.stats("queue q")
        memory_bytes = server.resident_bytes
    assert told == Counter(b"m%d ok " % number for number in range(SIZE))
    assert queue["ready"] + queue["scheduled"] == SIZE
    assert memory_bytes < 256 * MIB


def cpu_s(size: int) -> float:
    """What a burst takes when each turn does one of its lines."""
    world, lines = World(), burst(b"publish --meta=a=b nowhere x", size)
    world.broker.turns.chunk_s = -1.0
    began_s = time.process_time()
    world.send("k", b"".join(lines))
    return time.process_time() - began_s


def test_a_line_costs_the_same_however_many_turns_its_chunk_takes() -> None:
    few, many = (min(cpu_s(size) for _ in range(5)) / size for size in (200, 2000))
    assert many < 4 * few
