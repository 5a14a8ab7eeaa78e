"""The session without sockets: by transcripts, and by chance.

The one rule: the server's side is written out; time is a number.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks import (
    ConnectionLost,
    InvalidRequest,
    Options,
    ProtocolViolation,
    PublishFailed,
    QueueUpdate,
    Refused,
    ReplyTimeout,
)
from mqks.client import requests
from mqks.client.session import Call, ConsumerSession, Session, SessionState

ERROR_ID = "65f0c0de65f0c0de65f0c0de"


def session(*credentials: str, **options: Any) -> Session:
    return Session(Options(**options), credentials, prefix="s", jitter=lambda: 1.0)


def consumer(arguments: bytes = b"q e --manual-ack", **options: Any) -> ConsumerSession:
    return ConsumerSession(
        Options(**options),
        (),
        prefix="c",
        jitter=lambda: 1.0,
        arguments=arguments,
        guard=lambda settle: settle,
    )


def up(subject: Session, now_s: float = 0.0) -> None:
    subject.connected(now_s)
    greeting = subject.take()
    subject.receive(greeting.split(b" ")[0] + b" ok hello\n", now_s)
    assert subject.state is SessionState.UP


def running(**options: Any) -> Session:
    subject = session(**options)
    up(subject)
    return subject


def consuming(arguments: bytes = b"q e --manual-ack", **options: Any) -> ConsumerSession:
    """Its request to consume is taken."""
    subject = consumer(arguments, **options)
    up(subject)
    subject.take()
    return subject


def test_transcript_of_a_life() -> None:
    subject = session("user", "pass")
    first, second = Call(), Call()
    subject.publish("e", "before", None, first)
    assert subject.take() == b""

    subject.connected(0.0)
    assert subject.take() == b"s-2 auth --confirm user pass\n"
    assert subject.take() == b""
    subject.receive(b"s-2 ok \n", 0.0)
    assert subject.take() == b"s-1 publish --confirm e before\n"

    subject.publish("e", {"a": "\t"}, "mine", None)
    subject.request(b"ping x", second)
    assert subject.take() == b'mine publish e {"a":"\\t"}\ns-3 ping x\n'
    subject.receive(b"s-3 ok x\ns-1 ok \n", 0.0)
    assert (second.result(), first.result()) == (b"x", b"")
    assert subject.is_idle


def test_what_has_no_answer_is_sent_again_in_order() -> None:
    subject, calls = running(), [Call() for _ in range(4)]
    for n in range(3):
        subject.publish("e", str(n), f"m{n}", calls[n])
    subject.take()
    subject.receive(b"m1 ok \nm0 o", 0.0)
    subject.publish("e", "unconfirmed", "u", None)
    subject.publish("e", "3", "m3", calls[3])
    assert subject.lost("cut") == pytest.approx(0.05)
    assert subject.take() == b""

    up(subject)
    assert [line.split(b" ")[0] for line in subject.take().splitlines()] == [
        b"m0",
        b"m2",
        b"u",
        b"m3",
    ]
    subject.receive(b"m3 ok \nm2 ok \nm0 ok \n", 0.0)
    assert [call.result() for call in calls] == [b""] * 4


def test_nothing_is_doubled_when_connections_fail_before_the_greeting() -> None:
    subject, call = running(), Call()
    subject.publish("e", "x", "m", call)
    subject.take()
    for _ in range(3):
        subject.lost("cut")
        subject.connected(0.0)
        subject.take()
    subject.lost("cut")
    up(subject)
    assert subject.take() == b"m publish --confirm e x\n"


def test_delays_grow_up_to_a_bound_and_start_anew() -> None:
    subject = session(reconnect_min_s=1.0, reconnect_max_s=5.0)
    assert [subject.lost("no") for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    for _ in range(10_000):
        assert subject.lost("no") == 5.0
    up(subject)
    assert subject.lost("cut") == 1.0


def test_delays_have_jitter() -> None:
    chance = random.Random(1)
    subject = Session(Options(reconnect_min_s=1.0), (), prefix="s", jitter=chance.random)
    delays = set()
    for _ in range(20):
        up(subject)
        delays.add(subject.lost("cut"))
    assert len(delays) == 20
    assert all(0.5 <= delay <= 1.0 for delay in delays)


def silent(subject: Session, looks: int | None = None) -> float:
    """Nothing comes any more, and the time is looked at when it should be: so often, or until the
    connection counts as lost. When that was."""
    now_s = -inf
    for _ in range(100 if looks is None else looks):
        now_s = subject.deadline_s
        if not subject.tick(now_s):
            return now_s
    assert looks is not None, "it never counts as lost"
    return now_s


def test_keep_alive() -> None:
    subject = session(keep_alive_s=10.0)
    up(subject, 100.0)
    assert subject.deadline_s == 110.0
    assert subject.tick(109.0)
    assert subject.take() == b""
    assert subject.tick(110.0)
    [ping] = subject.take().splitlines()
    assert ping.split(b" ", 1)[1] == b"ping alive"
    assert silent(subject, looks=9) == pytest.approx(119.0)
    subject.receive(ping.split(b" ")[0] + b" ok alive\n", 119.0)
    assert subject.take() == b""
    assert subject.deadline_s == 129.0
    assert silent(subject) == pytest.approx(129.0 + 10.0 * 1.1)
    assert subject.take().count(b"ping alive") == 1


def test_a_greeting_without_answer_is_noticed() -> None:
    subject = session(keep_alive_s=10.0)
    subject.connected(0.0)
    assert silent(subject) == pytest.approx(20.0 * 1.1)


@pytest.mark.parametrize("looks", range(12))
def test_after_a_pause_a_ping_has_its_whole_time(looks: int) -> None:
    subject = running(keep_alive_s=10.0)
    silent(subject, looks)
    subject.take()
    resumed_s = subject.deadline_s + 10.0
    assert subject.tick(resumed_s)
    assert subject.take().endswith(b" ping alive\n")
    assert silent(subject) == pytest.approx(resumed_s + 10.0 * 1.1)


@pytest.mark.parametrize("looks", range(1, 11))
def test_a_short_pause_takes_no_time_from_a_ping(looks: int) -> None:
    subject = running(keep_alive_s=10.0)
    pinged_s = silent(subject, 1)
    silent(subject, looks - 1)
    assert subject.tick(subject.deadline_s + 9.0)
    assert silent(subject) - 9.0 - pinged_s >= 10.0


@pytest.mark.parametrize(
    "garbage", [b"\n", b"x\n", b"x \n", b" ok x\n", b"x okay x\n", b"HTTP/1.1 400 Bad\n"]
)
def test_garbage(garbage: bytes) -> None:
    subject = running()
    with pytest.raises(ProtocolViolation):
        subject.receive(garbage, 0.0)


def test_an_endless_line() -> None:
    subject = running(reply_bytes_max=1000)
    subject.receive(b"x ok " + b"x" * 900, 0.0)
    with pytest.raises(ProtocolViolation, match="reply_bytes_max"):
        subject.receive(b"x" * 200, 0.0)


def test_ids_with_a_prefix_tell_the_place_and_are_not_mixed_up() -> None:
    subject, call, other = running(), Call(), Call()
    for some in (["a", "b"], ["c"]):
        for bodies in requests.bodies([("e", data) for data in some], once=True):
            subject.publish_many(bodies, call, b"file")
    assert subject.take() == (
        b"file-1 publish --confirm --once e a\n"
        b"file-2 publish --confirm --once e b\n"
        b"file-3 publish --confirm --once e c\n"
    )
    with pytest.raises(InvalidRequest, match="in flight"):
        subject.publish_many([b" publish --confirm e x\n"], other, b"file")
    call.settle()
    subject.receive(f"file-1 ok \nfile-3 error {ERROR_ID}\nfile-2 ok \n".encode(), 0.0)
    with pytest.raises(PublishFailed) as failure:
        call.confirmed()
    assert (failure.value.confirmed, failure.value.failed) == (2, [Refused(2, "file-3", ERROR_ID)])


def test_an_abandoned_call_gets_nothing_and_is_not_sent_again() -> None:
    subject, call = running(), Call()
    id_ = subject.publish("e", "x", None, call)
    subject.take()
    subject.abandon(call, id_)
    subject.receive(id_ + b" ok \n", 0.0)
    with pytest.raises(ReplyTimeout):
        call.result()
    subject.lost("cut")
    up(subject)
    assert subject.take() == b""


def test_an_answer_of_many_lines_begins_anew_with_the_connection() -> None:
    subject, call = session(), Call()
    call.lines = []
    up(subject)
    request_id = subject.request(b"peek q", call)
    subject.take()
    subject.receive(b"%b ok one\n%b ok two ok \n" % (request_id, request_id), 0.0)
    assert call.lines == [b"one", b"two ok "]
    subject.lost("cut")
    up(subject)
    assert subject.take() == b"%b peek q\n" % request_id
    subject.receive(b"%b ok one\n%b ok --end\n" % (request_id, request_id), 0.0)
    assert (call.remaining, call.lines) == (0, [b"one"])


def test_an_id_in_flight_is_not_used_twice() -> None:
    subject, call = session(), Call()
    subject.publish("e", "x", "m", call)
    with pytest.raises(InvalidRequest, match="in flight"):
        subject.publish("e", "y", "m", Call())


@pytest.mark.parametrize(
    ("options", "count"),
    [({"in_flight_max": 5}, 5), ({"in_flight_bytes_max": 100}, 4), ({"outbox_bytes_max": 60}, 3)],
)
def test_room(options: dict[str, int], count: int) -> None:
    subject, calls = running(**options), [Call() for _ in range(count)]
    for number, call in enumerate(calls):
        assert subject.has_room
        subject.publish("e", "x", f"m{number}", call)
    assert not subject.has_room
    subject.take()
    subject.receive(b"".join(b"m%d ok \n" % n for n in range(count)), 0.0)
    assert subject.has_room


def test_the_end_reaches_every_call() -> None:
    subject = session()
    woken: list[int] = []
    calls = [Call(partial(woken.append, n)) for n in range(3)]
    for call in calls:
        subject.request(b"ping x", call)
    subject.fail(ConnectionLost("closed"))
    assert woken == [0, 1, 2]
    for call in calls:
        with pytest.raises(ConnectionLost):
            call.result()
    assert subject.has_room


def test_an_update_with_another_name_is_of_a_queue_that_was_renamed() -> None:
    subject = consumer(b"q e")
    up(subject)
    subject.receive(b"c-2 ok \nc-2 ok --update q\nc-2 ok --update q2 e\n", 0.0)
    assert list(subject.updates) == [
        QueueUpdate("q", [], False),
        QueueUpdate("q2", ["e"], False),
    ]
    with pytest.raises(ProtocolViolation):
        subject.receive(b"c-2 ok --update \n", 0.0)


def test_acks_are_gathered() -> None:
    subject = consuming()
    subject.receive(b"".join(b"c-2 ok m%d event=e x\n" % n for n in range(3)), 0.0)
    woken: list[int] = []
    subject.on_output = lambda is_prompt: woken.append(1)
    first, second, third = subject.take_ready(None)
    first.ack()
    second.reject()
    third.ack()
    assert woken == [1]
    assert subject.take() == b"a ack c-2 m0\na reject c-2 m1\na ack c-2 m2\n"


def test_a_consumer_starts_again_as_last_told() -> None:
    subject = consuming(b"q --add e --manual-ack")
    told = b"q a b --delete-queue-when-unused --manual-ack"
    subject.receive(b"c-2 ok --update q a e --manual-ack\nc-2 ok \n", 0.0)
    assert not subject.updates
    subject.receive(b"c-2 ok --update " + told + b"\nc-2 ok m event=e x\n", 0.0)
    assert list(subject.updates) == [QueueUpdate("q", ["a", "b"], True)]
    message = subject.ready[0]
    subject.lost("cut")
    assert not subject.ready
    up(subject)
    assert subject.take() == (
        b"c-4 consume --confirm q --add a b --delete-queue-when-unused --manual-ack --keep\n"
        b"a delete_consumer c-2\n"
    )
    message.ack()
    subject.ack_all([message])
    assert subject.take() == b""


def test_a_consumer_that_was_not_confirmed_starts_again_as_it_was() -> None:
    subject = consumer(b"q e --add f --existing --manual-ack")
    up(subject)
    assert subject.take() == b"c-2 consume --confirm q e --add f --existing --manual-ack\n"
    subject.receive(b"c-2 ok --update q e f --manual-ack\n", 0.0)
    subject.lost("cut")
    up(subject)
    assert subject.take().startswith(b"c-4 consume --confirm q e --add f --existing --manual-ack\n")
    subject.receive(b"c-4 ok \n", 0.0)
    subject.lost("cut")
    up(subject)
    assert subject.take().startswith(
        b"c-6 consume --confirm q --add e f --manual-ack --existing --keep\n"
    )


def test_a_program_that_acks_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def messages_of_two(
        *, is_acking: bool | bytes, is_waiting: bool = True, is_taking: bool = True
    ) -> list[str]:
        caplog.clear()
        subject = consumer(b"q --manual-ack --prefetch=2", keep_alive_s=10)
        up(subject)
        subject.take()
        subject.receive(b"c-2 ok \nc-2 ok m event=e x\nc-2 ok n event=e x\n", 0.0)
        for message in subject.take_ready(None if is_taking else 0):
            if isinstance(is_acking, bytes):
                assert message._settle is not None
                message._settle(message, is_acking)
            elif is_acking:
                message.ack()
        subject.is_awaited = is_waiting
        for now_s in (1.0, 11.0, 12.0):
            assert subject.tick(now_s)
        return caplog.messages

    assert messages_of_two(is_acking=True) == []
    assert messages_of_two(is_acking=b"") == []  # A transaction does.
    assert messages_of_two(is_acking=False, is_waiting=False) == []
    assert messages_of_two(is_acking=False, is_taking=False) == []
    assert messages_of_two(is_acking=False) == [
        "q: none of 2 messages is acked, and the server sends no more (prefetch)"
    ]


def test_messages_with_auto_ack_outlive_the_connection() -> None:
    subject = consuming(b"q e")
    subject.receive(b"c-2 ok \nc-2 ok m event=e x\n", 0.0)
    subject.lost("cut")
    assert [message.id for message in subject.ready] == ["m"]


def test_more_events_than_a_request_holds_are_left_as_they_are() -> None:
    subject = consuming(b"q e --manual-ack", line_bytes_max=1000)
    events = b" ".join(b"event%d" % n for n in range(200)) + b" --add-mask a.* b.**"
    subject.receive(b"c-2 ok \n", 0.0)
    subject.receive(b"c-2 ok --update q %b --delete-queue-when-unused=5.0\n" % events, 0.0)
    subject.lost("cut")
    up(subject)
    assert subject.take().startswith(
        b"c-4 consume --confirm q --delete-queue-when-unused=5.0 --keep\n"
    )


def test_a_full_buffer_is_no_silence() -> None:
    subject = consuming(buffer_bytes_max=10, keep_alive_s=10.0)
    subject.receive(b"c-2 ok \nc-2 ok m1 event=e x\n", 0.0)
    was_full = subject.is_full
    assert subject.tick(1000.0)
    assert subject.take() == b""
    subject.ready.clear()
    assert (was_full, subject.is_full) == (True, False)
    assert subject.tick(1010.0)
    assert subject.take().endswith(b" ping alive\n")
    assert silent(subject) == pytest.approx(1021.0)


@pytest.mark.parametrize("event", ["e,retry=x", "a,retry=1,b", "retry=2"])
def test_an_event_may_look_like_a_retry(event: str) -> None:
    subject = consuming()
    subject.receive(b"c-2 ok m event=%b x\n" % event.encode(), 0.0)
    assert (subject.ready[0].event, subject.ready[0].retry) == (event, 0)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=" "), min_size=1)
DATA = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


@given(
    st.lists(st.tuples(NAMES.filter(lambda n: not n.startswith("--")), DATA), max_size=20),
    st.lists(st.integers(0, 10_000), max_size=20),
    st.booleans(),
)
def test_any_split_of_the_stream(
    messages: list[tuple[str, str]], cuts: list[int], manual_ack: bool
) -> None:
    subject = consuming(b"q e --manual-ack" if manual_ack else b"q e")
    lines = [b"c-2 ok ", b"c-2 ok --update q e f"]
    lines += [
        b"c-2 ok m%d event=%b,retry=%d %b" % (n, event.encode(), n, data.encode())
        for n, (event, data) in enumerate(messages)
    ]
    for piece in split(b"\n".join(lines) + b"\n", cuts):
        subject.receive(piece, 0.0)
    assert subject.is_consuming
    assert list(subject.updates) == [QueueUpdate("q", ["e", "f"], False)]
    got = [(m.id, m.event, m.retry, m.text) for m in subject.ready]
    assert got == [(f"m{n}", event, n, data) for n, (event, data) in enumerate(messages)]


def test_requests_are_written_as_the_protocol_says() -> None:
    rebind = requests.rebind
    every: requests.Changes = {"replace": ["a"], "add": ["b"], "remove": ["c"]}
    assert rebind("q", {**every, "remove_mask": ["*.d"]}) == (
        b"rebind --confirm q a --remove c --remove-mask *.d --add b"
    )
    assert rebind("q", {**every, "add_mask": ["a.**"]}).endswith(b" --add b --add-mask a.**")
    assert rebind("q", {"add_mask": ["a.*"]}) == b"rebind --confirm q --add-mask a.*"
    with pytest.raises(InvalidRequest):
        rebind("q", {"replace": [], "add_mask": ["a.*"]})
    subscribe, consume = requests.subscribe, requests.consume
    assert subscribe("q", ["e"], ["a.*"]) == b"subscribe --confirm q --add e --add-mask a.*"
    assert subscribe("q", ["e"], replace=True) == b"subscribe --confirm q e"
    assert consume("q", masks=["a.*", "**"], prefetch=0) == b"q --add-mask a.* ** --manual-ack"
    assert consume("q", ["e", "f"], create=False) == (
        b"q --add e f --existing --manual-ack --prefetch=10"
    )
    assert consume("q", ["e", "f"], replace=True, auto_ack=True) == b"q e f"
    assert consume("q", auto_ack=True) == b"q --existing"
    assert consume("q", create=True, auto_ack=True) == b"q"
    for replaced in (subscribe, consume):
        with pytest.raises(InvalidRequest, match="at least one event"):
            replaced("q", [], masks=["a.*"], replace=True)
    assert rebind("q", {"replace": []}) == b"rebind --confirm q"
    assert rebind("q", {"replace": [], "add": ["a"], "remove": ["b"]}) == b"rebind --confirm q a"
    assert requests.delete_queue("q", when_unused=0.5) == (
        b"delete_queue --confirm q --when-unused=0.5"
    )
    assert requests.delete_queue("q", when_unused=True) == b"delete_queue --confirm q --when-unused"
    everything: requests.PolicyKeywords = {
        "retries": 0,
        "losses": 2,
        "backoff": (0.5, 60),
        "dead_letter_queue": "d",
        "ttl_s": 1.5,
        "messages_max": None,
        "bytes_max": 9,
        "overflow": "drop",
        "single_consumer": False,
        "ack_timeout_s": 30,
        "ordered": "key",
        "fair": None,
        "concurrency": 7,
        "rate": "9/s,3",
        "concurrency_per_key": 2,
        "rate_per_key": None,
        "limit": "api,rate=9/s",
        "breaker": "5,30",
        "readers": "lake,warehouse",
        "labels": "team=ops",
    }
    assert requests.set_queue("q", everything, reset=True) == (
        b"set_queue --confirm q --reset --retries=0 --losses=2 --backoff=0.5,60 --dead-letters=d "
        b"--ttl=1.5 --messages-max= --bytes-max=9 --overflow=drop --single-consumer=no "
        b"--ack-timeout=30 --ordered=key --fair= --concurrency=7 --rate=9/s,3 "
        b"--concurrency-per-key=2 --rate-per-key= --limit=api,rate=9/s --breaker=5,30 "
        b"--readers=lake,warehouse --labels=team=ops"
    )
    assert requests.set_queue("q", {}) == b"set_queue --confirm q"
    assert consume("q", ["e"], delete_when_unused=0, auto_ack=True) == (
        b"q --add e --delete-queue-when-unused=0.0"
    )


@pytest.mark.parametrize("rule", [-1, float("nan"), float("inf"), 1e10])
def test_bad_seconds_are_refused(rule: float) -> None:
    with pytest.raises(InvalidRequest, match="seconds"):
        requests.consume("q", delete_when_unused=rule)


def test_one_name_is_no_list_of_names() -> None:
    with pytest.raises(InvalidRequest, match="list"):
        requests.consume("q", "event")


def test_importing_mqks_loads_neither_client_nor_server() -> None:
    code = "import json, sys, mqks; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    loaded = [name for name in json.loads(done.stdout) if name.split(".")[0] in ("mqks", "anyio")]
    assert set(loaded) == {"mqks", "mqks.version"}
