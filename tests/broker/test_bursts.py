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
from tests.kit.marks import slow

MIB = 1024 * 1024
HELD = 16
"""Messages that the consumer `c` holds, and that wait in `q` and in `dead`."""
SELECTION = "--event=e --id=h7 --older=0 --where=k=v&why="
SOME = SELECTION + " --limit=3"
ADDS = "--add_f%d --add-mask_*.f%d"
FORMS = {
    "publish": (
        "",
        "--once --mandatory --delay=5 --at=1005 --ttl=60 --meta=a=b --to=q --escaped --priority=5 "
        "--key=k --keep-result=9 --batch=open --unique=k%d,on=replace "
        "--dead-letter=reason=ttl&queue=q&tries=1&published=1.000&died=2.000",
        "e x",
    ),
    "subscribe": ("s%d e", ADDS, ""),
    "consume": (
        "s%d e",
        f"{ADDS} --delete-queue-when-unused --manual-ack --prefetch=3 --meta --existing --keep "
        "--backoff=1 --ack-timeout=9 --cancellable",
        "",
    ),
    "rebind": ("s%d", f"{ADDS} --remove_f%d --remove-mask_*.f%d", ""),
    "ack": ("c h%d", "--all --result=x", ""),
    "reject": (
        "c h%d",
        f"{SELECTION} --dead --retries=2 --delay=5 --backoff=1,2 --reason=gone --all --fate "
        "--pause=9",
        "",
    ),
    "release": ("c h%d", "--delay=5 --all", ""),
    "touch": ("c h%d", "--all --for=9", ""),
    "set_prefetch": ("c %d", "", ""),
    "progress": ("c h%d %d x", "", ""),
    "cancel_job": ("q h%d", "--reason=gone", ""),
    "result": ("h%d", "--wait=9", ""),
    **dict.fromkeys(("begin", "commit", "rollback", "reload"), ("", "", "")),
    "receive": ("q", "--limit=9 --lease=9 --wait=9", ""),
    "lease": (
        "q -1.%d.1",
        "--ack --reject --for=9 --undelivered --held --delay=5 --dead --reason=gone",
        "",
    ),
    "cancel": ("q", "--all", "h%d"),
    "promote": ("q", "--all", "h%d"),
    "move": ("q other", SOME, ""),
    "redrive": ("dead", f"{SOME} --to=other", ""),
    "delete_consumer": ("c", "--tell", ""),
    "delete_queue": ("s%d", "--when-unused", ""),
    "set_queue": (
        "s%d",
        "--retries=3 --losses=3 --deliveries=3 --backoff=1 --dead-letters=dead --ttl=9 "
        "--messages-max=9 --bytes-max=99 --overflow=drop --reset --single-consumer=yes "
        "--ack-timeout=9 --ordered=key --fair=key --paused=no --publishes-paused=no "
        "--paused-until=1 --concurrency=9 --rate=9/s --concurrency-per-key=2 --rate-per-key=9/s "
        "--breaker=9,9 --limit=l,concurrency=9,rate=9/s --readers=a,b --labels=a=b",
        "",
    ),
    "pause": ("q", "--for=9 --deliveries --publishes --publishes=wait", ""),
    "resume": ("q", "", ""),
    "purge": ("q", f"{SOME} --scheduled", ""),
    "peek": ("q", f"{SOME} --scheduled --soonest --after=1 --batches", ""),
    "tail": ("", "--queue=q", "e"),
    "range": ("q", "--at=1 --archived=1", ""),
    "read": ("q", "--from=1 --to=9 --limit=3 --epoch=1 --meta", ""),
    "trim": ("q %d", "--epoch=1 --reader=a", ""),
    "stats": ("bindings", "--after=q --mask=s* --then=e --limit=3", ""),
    "schedule": (
        "n%d",
        "--every=9 --tz=UTC --missed=one --jitter=1 --pause --resume --run",
        "publish e x",
    ),
    "schedules": ("", "--after=n --limit=3", ""),
    "unschedule": ("n%d", "", ""),
    "open_batch": ("n%d", "--for=9 --on-dead --restored=1,1", "publish e x"),
    "close_batch": ("n%d", "--discard", ""),
    "batch": ("n%d", "", ""),
    "batches": ("", "--after=n --limit=3", ""),
    "rename": ("s%d t%d", "", ""),
    "trace": ("t%d", "--for=9 --off", ""),
    "help": ("publish", "", ""),
    "auth": ("wrong", "", ""),
    "set_name": ("n%d", "", ""),
    "close_connection": ("999%d", "", ""),
    "read_only": ("on", "", ""),
    "drain": ("", "--timeout=0 --off", ""),
    "ping": ("x", "", ""),
    "_eval": ("", "--worker=0", "%d"),
}
"""For each action what stands before its flags, the flags with their values (`_` is a space), and
what stands behind them; %d is a number."""
REQUESTS = {
    action.encode(): (
        before.encode(),
        tuple(flag.replace("_", " ").encode() for flag in flags.split()),
        behind.encode(),
    )
    for action, (before, flags, behind) in FORMS.items()
}


def test_every_action_and_flag_is_here() -> None:
    assert REQUESTS.keys() == ACTIONS.keys()
    for action, (_, flags, _) in REQUESTS.items():
        known = {*re.findall(r"--[a-z-]+", ACTIONS[action].usage)}
        told = {re.match(r"--[a-z-]+", flag.decode())[0] for flag in flags}  # type: ignore[index]
        assert told == known, action


def forms(action: bytes, pairs: bool) -> list[bytes]:
    """A request with none and each of its flags, or each pair of them, valid or not."""
    before, flags, behind = REQUESTS[action]
    chosen = combinations(flags, 2) if pairs else [(), (), *((flag,) for flag in flags)]
    words = [b" ".join(filter(None, (before, *some, behind))) for some in chosen]
    # Every second one is confirmed.
    return [b"%b %b%b" % (action, FIRST[n % 2], each) for n, each in enumerate(words)]


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
        *slow(*((action, True) for action, (_, flags, _) in REQUESTS.items() if len(flags) > 1)),
    ],
)
def test_turns_that_end_in_a_burst(
    action: bytes, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "LINES_MAX", LINES_MAX)
    for form in forms(action, pairs):
        one_by_one, at_once = World(), World()
        at_once.tick((0, 1, 1, 2, 1, 3), 7)
        lines = burst(form, 24)
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
    *(b"r%d publish --to=q e x", b"r%d publish --confirm --to=missing e x"),
    *(b"r%d publish --to=d --priority=2 e x", b"r%d publish --mandatory --to=q nowhere x"),
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


FLAGGED = [(b"publish --confirm %b e x" % each, 5_000) for each in REQUESTS[b"publish"][1]]
QUICK = b"publish --confirm --once --ttl=60 --meta=a=b e x"


@pytest.mark.parametrize(("form", "size"), [(QUICK, 20_000), *slow(*FLAGGED)])
def test_a_burst_is_published_and_confirmed_once(form: bytes, size: int, tmp_path: Path) -> None:
    """Its client closes its sending side behind it, as netcat does, and gets all confirms."""
    with served(tmp_path / "mqks.db") as (server, client), LineClient(server.address) as other:
        assert other.ask(b"s subscribe --confirm q e") == b"s ok "
        assert other.ask(b"o open_batch --confirm open") == b"o ok "
        client.send(b"".join(b"m%d %b\n" % (n, filled(form, n)) for n in range(size)))
        client.close_sending_side()
        told = Counter(client.rest())
        queue = other.stats("queue q")
        memory_bytes = server.resident_bytes
    assert told == Counter(b"m%d ok " % number for number in range(size))
    assert queue["ready"] + queue["scheduled"] == size
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
