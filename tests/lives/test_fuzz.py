"""The kept corpus, and some mutations of it, find nothing; and the fuzzer finds what is there."""

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest

from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.queue.lane import Lane
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.routing.bindings import Bindings
from mqks.client.messages import Message
from mqks.client.session import ConsumerSession
from mqks.errors import BadRequest
from mqks.protocol import replies
from tests.fuzz import Finding, client, steps
from tests.fuzz.expressions import Expressions
from tests.fuzz.mass import Mass
from tests.fuzz.peer import Peer
from tests.fuzz.reduce import failure_of, kind_of, reduced
from tests.fuzz.steps import CORPUS, Step, Steps, load, read, save, written
from tests.fuzz.world import play
from tests.kit.compiled import patches_modules
from tests.kit.marks import slow
from tests.kit.seeds import printed_seed

CORPUS_FILE = CORPUS / "broker.txt"
BROKER = load(CORPUS_FILE)
CORPUS_BYTES_MAX = 300_000


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session logs each error that nobody waits for."""
    monkeypatch.setattr(logging.getLogger("mqks.client"), "disabled", True)


@pytest.mark.parametrize("number", range(8))
def test_the_corpus(number: int) -> None:
    for entry in BROKER[number::8]:
        play(entry)


def test_the_corpus_is_as_it_is_written(tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    save(copy, BROKER)
    assert copy.read_bytes() == CORPUS_FILE.read_bytes()
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < CORPUS_BYTES_MAX


def told(found: Iterable[tuple[Steps, BaseException]]) -> None:
    """Raise the first finding, with what has led to it."""
    for entry, failure in found:
        failure.add_note(written(entry)[-2000:])
        raise failure


@pytest.mark.parametrize("lines", [20_000, *slow(200_000)])
def test_mutated_lines(lines: int) -> None:
    mass = Mass(BROKER, printed_seed())
    mass.run(lines)
    told(mass.found)


@pytest.mark.parametrize("count", [300, *slow(5000)])
def test_mutated_expressions(count: int) -> None:
    expressions = Expressions(printed_seed())
    for _ in range(count):
        expressions.one()
    assert expressions.found == []


@pytest.mark.parametrize("count", [100, *slow(5000)])
def test_mutated_replies(count: int) -> None:
    for entry in client.seeds():
        client.play(entry)
    mass = client.ClientMass(client.seeds(), printed_seed())
    for number in range(count):
        mass.episode(number)
    told(mass.found)


# -- what it would find


def broken_error(request_id: bytes, error_id: str) -> bytes:
    return b"somebody error " + error_id.encode() + b"\n"


def broken_rebind(bindings: Bindings, request: object) -> bool:
    """It binds a name, and then refuses."""
    bindings.restore(b"made", [b"e"])
    raise BadRequest("too late")


def crashing_trim(lane: Lane, end: int, *, dead: bool = False) -> int:
    raise KeyError(end)


@pytest.mark.parametrize(
    ("where", "name", "broken", "finding"),
    [
        # A return that loses messages; and who has acked is not served again.
        (Queue, "give_back", lambda *_, **__: None, "numbers on disk"),
        (Consumer, "_go_on", lambda _: None, "neither rests nor is in the ring"),
        (replies, "error", broken_error, "replies that answer nobody"),
        (Bindings, "rebind", broken_rebind, "an error has changed something"),
        (Lane, "trim_some", crashing_trim, "KeyError"),
    ],
)
@patches_modules
def test_what_is_broken_is_found(
    where: object, name: str, broken: object, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, broken)
    failures = [failure for entry in BROKER if (failure := failure_of(entry)) is not None]
    assert any(finding in repr(failure) for failure in failures)


@patches_modules
def test_a_finding_is_reduced_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "trim_some", crashing_trim)
    noise = b"s subscribe other e f\np ping x\nm publish e x\n"
    entry = (
        Step("send", "a", noise + b"s subscribe q e f g\n" + noise),
        Step("pause", "b"),
        Step("send", "b", noise + b"x purge --confirm q\n" + noise),
    )
    failure = failure_of(entry)
    assert failure is not None
    least = reduced(entry, kind_of(failure))
    assert sum(map(len, steps.lines_of(least))) <= len(b"s subscribe q e" + b"x purge q")


# -- what it has found


def test_the_oldest_message_is_paged_in_whatever_newer_ones_take() -> None:
    """The first of them is on disk when all come back, the others are not: those have to stay in
    memory, and take so much of it that there was no room for the first, which goes before them."""
    play(
        read(
            r"*settings memory_bytes=0 small_steps=1	a:s subscribe q e\n	*slow"
            r"	a:m1 publish --confirm e x\n	a:m2 publish e " + "y" * 100 + r"\n"
            r"	b:c1 consume q --manual-ack\n	b-	*commit	b:c1 consume q\n"
        )
    )


def test_more_digits_than_python_reads_are_no_number() -> None:
    digits = b"9" * 5000
    message = Message(b"c", b"m", b"event=e,retry=" + digits, b"", None)
    assert (message.event, message.retry) == ("e,retry=" + digits.decode(), 0)


def test_deep_json_is_refused_as_other_json_is() -> None:
    deep = b"[" * 100_000
    with pytest.raises(ValueError, match="deep"):
        Message(b"c", b"m", b"event=e", deep, None).json()


def test_a_consumer_that_is_lost_has_nothing_in_flight() -> None:
    client.play(read("*consumer\t*receive {g} ok hello\\n\t*request\t*take\t*lost"))


def test_updates_that_nobody_takes_are_not_read_without_end() -> None:
    world = client.ClientWorld(consumes=True)
    session = world.session
    assert isinstance(session, ConsumerSession)

    def is_full(updates: int) -> bool:
        """Once it is told so many."""
        for _ in range(updates):
            session.receive(b"%b ok --update q %b\n" % (session.consumer_id, b"e" * 500), 0.0)
        return session.is_full

    world.run(Step("receive", "*", b"{g} ok hello\n"))
    assert not is_full(10)
    assert not session.updates, "before it consumes they say what it has bound itself"
    world.run(Step("receive", "*", b"{c} ok \n"))
    assert is_full(10)
    session.updates.clear()
    assert not is_full(0)
    assert is_full(10)
    world.run(Step("leave"))
    assert not is_full(0), "the answer must be read"


@pytest.mark.parametrize(
    ("line", "reply", "is_due"),
    [
        (b"publish --confirm --unique=k e x", b"ok duplicate m1", True),
        (b"publish --confirm --unique=k e x", b"ok none", False),
        (b"publish --confirm e x", b"ok 1", False),
        (b"reject --confirm c m --fate", b"ok dead retries letters", True),
        (b"redrive --confirm q", b"ok 2 duplicate 1", True),
        (b"cancel_job --confirm q m", b"ok none", True),
        (b"cancel_job --confirm q m", b"ok ", False),
        (b"cancel_job q m", b"ok none", False),
        (b"result --confirm m", b"ok none", False),
        (b"purge --confirm q", b"ok 7", True),
    ],
)
def test_a_confirm_tells_what_its_action_does(line: bytes, reply: bytes, is_due: bool) -> None:
    peer = Peer(cast(Connection, None), keeps_books=True)
    peer.sent(b"x " + line + b"\n")
    peer.received(b"x " + reply + b"\n")
    with nullcontext() if is_due else pytest.raises(Finding, match="1 requests"):
        peer.settle()
