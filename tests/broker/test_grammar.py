"""The grammar of flags: what requests mean, and what is refused."""

from contextlib import suppress
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.spine.base.turns import finish
from mqks.errors import BadRequest
from mqks.limits import COUNT_MAX, META_BYTES_MAX
from mqks.protocol.requests import (
    ACTIONS,
    ALL,
    Backoff,
    Consume,
    DeleteQueue,
    DeleteRule,
    Log,
    Move,
    Pausing,
    Peek,
    Publish,
    Purge,
    Range,
    Rebind,
    Renaming,
    Scheduled,
    Selection,
    SetQueue,
    Settle,
    Stats,
    Trim,
    WantedTail,
    WantedTrace,
)

NAMES_MAX = 3
YEAR_S = 365.25 * 24 * 3600
NAMED = {b"subscribe", b"consume", b"rebind"}


def parse(line: bytes) -> Any:
    action, _, rest = line.partition(b" ")
    parsed = ACTIONS[action].parse(rest, NAMES_MAX)
    return finish(parsed) if action in NAMED else parsed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"publish e", Publish(b"e", b"")),
        (b"publish e --ttl=1 x", Publish(b"e", b"--ttl=1 x")),
        (b"publish --delay=1.5 e x", Publish(b"e", b"x", delay_us=1_500_000)),
        (b"publish --delay=0 e x", Publish(b"e", b"x")),
        (b"publish --delay=1e-7 e x", Publish(b"e", b"x")),
        (b"publish --at=1700000000.25 e", Publish(b"e", b"", at_us=1_700_000_000_250_000)),
        (b"publish --at=0 e x", Publish(b"e", b"x")),
        (b"publish --ttl=.5 e x", Publish(b"e", b"x", ttl_us=500_000)),
        (b"publish --ttl=1e-9 e x", Publish(b"e", b"x", ttl_us=1)),
        (b"publish --meta=a=1&b= e x", Publish(b"e", b"x", meta=b"a=1&b=")),
        (
            b"publish --meta=k=%2c%0A --once --ttl=2 --mandatory --delay=3 e  x ",
            Publish(b"e", b" x ", inf, True, 3_000_000, 0, 2_000_000, b"k=%2c%0A"),
        ),
        (
            b"rebind q a b c --add d --add-mask m.* --add d e",
            Rebind(b"q", [b"a", b"b", b"c"], add=[b"d", b"d", b"e"], add_masks=[b"m.*"]),
        ),
        (b"rebind q --remove a", Rebind(b"q", None, remove=[b"a"])),
        (b"rebind q", Rebind(b"q", [])),
        (b"subscribe q  a --add-mask b.* ", Rebind(b"q", [b"a"], add_masks=[b"b.*"])),
        (
            b"consume q a --add b --manual-ack --prefetch=2 --add c --delete-queue-when-unused=1",
            Consume(b"q", [b"a"], [b"b", b"c"], rule=DeleteRule(1.0), manual_ack=True, prefetch=2),
        ),
        (b"reject c m", Settle(b"c", b"m")),
        (b"reject --delay=2 c m", Settle(b"c", b"m", 2_000_000)),
        (b"reject c --dead --all", Settle(b"c", ALL, 0, True)),
        (b"reject c m --delay=0", Settle(b"c", b"m")),
        (
            b"reject --retries=3 c m --backoff=1,60",
            Settle(b"c", b"m", retries=3, backoff=Backoff(1, 60)),
        ),
        (b"reject c m --retries=0 --delay=1", Settle(b"c", b"m", 1_000_000, retries=0)),
        (b"release c --all --delay=0.5", Settle(b"c", ALL, 500_000)),
        (b"release  c  m ", Settle(b"c", b"m")),
        (b"touch c --all", Settle(b"c", ALL)),
        (b"cancel q m", Scheduled(b"q", b"m")),
        (b"promote q --all", Scheduled(b"q", ALL)),
        (b"move a b", Move(b"a", b"b")),
        (b"move --limit=3 a --event=x.* b", Move(b"a", b"b", Selection(b"x.*"), 3)),
        (b"redrive d", Move(b"d", None)),
        (b"redrive --to=q d --limit=1", Move(b"d", b"q", None, 1)),
        (b"redrive --id=m=1 d --older=0.5", Move(b"d", None, Selection(None, b"m=1", 500_000))),
        (b"purge q", Purge(b"q", None, None, False)),
        (b"purge --limit=2 q --event=a.*", Purge(b"q", Selection(b"a.*"), 2, False)),
        (b"purge q --scheduled", Purge(b"q", None, None, True)),
        (b"peek --scheduled q --limit=2", Peek(b"q", True, limit=2)),
        (b"peek q --id=m", Peek(b"q", selection=Selection(None, b"m"))),
        (b"redrive d --where=queue=q", Move(b"d", None, Selection(where=b"queue=q"))),
        (b"reject c --all --older=1", Settle(b"c", ALL, selection=Selection(None, None, 10**6))),
        (b"read --limit=2 q --from=1 --meta", Log(b"q", 1, limit=2, meta=True)),
        (b"trim q 5 --epoch=e", Trim(b"q", 5, b"e")),
        (b"range q --at=7", Range(b"q", 7)),
        (b"stats bindings e --after=q --mask=a*", Stats((b"bindings", b"e"), b"q", mask=b"a*")),
        (b"tail --queue=q e a.*", WantedTail(b"q", [b"e"], [b"a.*"])),
        (b"delete_queue q --when-unused", DeleteQueue(b"q", DeleteRule(None))),
        (b"_eval --worker=0  1 + 1 ", "1 + 1"),
        (b"_eval --1", "--1"),
        (b"ping --confirm  x ", b"--confirm  x "),
        (b"pause q --for=1.5 --deliveries", Pausing(b"q", 1_500_000, deliveries=True)),
        (b"pause q --publishes", Pausing(b"q", publishes=True)),
        (b"pause q --publishes=wait", Pausing(b"q", publishes="wait")),
        (b"trace a.* --for=1.5", WantedTrace(b"a.*", 1_500_000)),
        (b"rename q r", Renaming(b"q", b"r")),
        (b"trace --off", WantedTrace(off=True)),
        (b"resume q", Pausing(b"q")),
        (b"set_queue q", SetQueue(b"q", {}, False)),
        (b"set_queue --reset q --ttl=", SetQueue(b"q", {"ttl_s": None}, True)),
        (
            b"set_queue q --retries=0 --losses=3 --backoff=1,60 --dead-letters=dead --ttl=0.5 "
            b"--messages-max=10 --bytes-max=1000 --overflow=drop --single-consumer=yes "
            b"--ack-timeout=30 --ordered=key --fair=key --concurrency=9 --rate=5/h --readers=a,b-2 "
            b"--concurrency-per-key=1 --rate-per-key=7/s,7 --limit=api "
            b"--breaker=5,0.5 --labels=team=ops&a%20b=",
            SetQueue(
                b"q",
                {"retries": 0, "losses": 3, "backoff": Backoff(1.0, 60.0), "dead_letters": b"dead"}
                | {"ttl_s": 0.5, "messages_max": 10, "bytes_max": 1000, "overflow": "drop"}
                | {"single_consumer": True, "ack_timeout_s": 30.0, "ordered": "key", "fair": "key"}
                | {"concurrency": 9, "rate": "5/h", "concurrency_per_key": 1, "limit": "api"}
                | {"rate_per_key": "7/s,7", "breaker": "5,0.5", "readers": b"a,b-2"}
                | {"labels": b"team=ops&a%20b="},
                False,
            ),
        ),
        (b"set_queue q --backoff=.5", SetQueue(b"q", {"backoff": Backoff(0.5)}, False)),
        (
            b"set_queue q --single-consumer=no --overflow=reject",
            SetQueue(b"q", {"single_consumer": False, "overflow": "reject"}, False),
        ),
    ],
)
def test_what_a_request_means(line: bytes, expected: Any) -> None:
    assert parse(line) == expected


@pytest.mark.parametrize(
    ("rest", "prefetch", "meta"),
    [
        (b"q e1 e2 --manual-ack", 0, False),
        (b"q e1 e2 --manual-ack --prefetch=7", 7, False),
        (b"--meta q --prefetch=1 e1 e2 --manual-ack", 1, True),
        (b"q e1 --meta e2", 0, True),
    ],
)
def test_new_flags_of_consume_stand_anywhere(rest: bytes, prefetch: int, meta: bool) -> None:
    consume = parse(b"consume " + rest)
    assert (consume.queue, consume.replace) == (b"q", [b"e1", b"e2"])
    assert (consume.prefetch, consume.meta) == (prefetch, meta)


NO_SECONDS = [b"", b"-1", b"nan", b"inf", b"1_0", b"soon", b"1,5", b"1e300", b"\x0c1", b"1" * 50]
SECONDS = [
    *(b"publish --delay=%b e x", b"publish --at=%b e x", b"publish --ttl=%b e x"),
    *(b"reject c m --delay=%b", b"release c m --delay=%b"),
]
POLICY_SECONDS = [b"--ttl", b"--ack-timeout", b"--backoff"]


@pytest.mark.parametrize("line", SECONDS)
@pytest.mark.parametrize("value", NO_SECONDS)
def test_what_is_no_number_of_seconds_is_refused(line: bytes, value: bytes) -> None:
    with pytest.raises(BadRequest, match="seconds"):
        parse(line % value)


@pytest.mark.parametrize("flag", POLICY_SECONDS)
@pytest.mark.parametrize("value", [*NO_SECONDS[1:6], b"0", b"1e10"])
def test_a_policy_needs_seconds(flag: bytes, value: bytes) -> None:
    with pytest.raises(BadRequest, match="seconds"):
        parse(b"set_queue q %b=%b" % (flag, value))


@pytest.mark.parametrize("line", [b"publish --delay=%d e", b"publish --ttl=%d e"])
def test_ten_years_are_a_delay(line: bytes) -> None:
    assert parse(line % (10 * YEAR_S))
    assert parse(b"publish --at=%d e" % (100 * YEAR_S))


@pytest.mark.parametrize(
    "line",
    [
        *(b"publish", b"publish --once", b"publish --ttl=0 e", b"publish --ttl e"),
        *(b"publish --x e", b"publish --once --once e", b"publish --once=0 e"),
        *(b"publish --delay=1 --at=2 e", b"publish --delay=1 --delay=1 e", b"publish --delay=1"),
        *(b"publish --meta e x", b"rebind", b"rebind q a b c d", b"rebind q --add a b c d"),
        b"rebind --add q",
        *(b"rebind q --add", b"rebind q --later a", b"subscribe q", b"subscribe q --remove a"),
        *(b"subscribe --x q a", b"subscribe q a --add-mask", b"consume q --manual-ack e"),
        *(b"consume --manual-ack q", b"consume q --add --manual-ack", b"consume q --add-mask"),
        *(b"consume", b"consume --meta", b"consume q --meta=1", b"consume q --prefetch=1"),
        *(b"consume q --manual-ack --prefetch=0", b"consume q --manual-ack --prefetch"),
        *(b"consume q --manual-ack --prefetch=", b"consume q --prefetch=x --manual-ack"),
        b"consume q --manual-ack --prefetch=%d" % (COUNT_MAX + 1),
        *(b"consume q --backoff=1", b"consume q --manual-ack --backoff=2,1"),
        *(b"consume q --meta --meta", b"consume q --add --meta"),
        *(b"reject c", b"reject --all m", b"reject c m m", b"reject c m --dead=yes"),
        *(b"reject c --all --fate", b"reject c m --fate=1"),
        *(b"reject c m --delay=1 --dead", b"reject c m --later", b"reject c m --dead --dead"),
        *(b"reject c m --retries", b"reject c m --retries=", b"reject c m --retries=-1"),
        *(b"reject c m --dead --retries=1", b"reject c m --delay=1 --backoff=1"),
        *(b"reject c m --backoff=", b"reject c m --backoff=0", b"reject c m --backoff=2,1"),
        *(b"release c", b"release c m --dead", b"release c --all m", b"release --delay=1 c"),
        *(b"touch c", b"touch c m --delay=1", b"touch --all c"),
        *(b"cancel q", b"cancel --all", b"promote q m m", b"cancel q --scheduled"),
        *(b"move a", b"move a b c", b"move a a", b"move a --all", b"move a b --to=c"),
        *(b"move a b --limit=0", b"move a b --limit=-1", b"move a b --event=", b"move a b --limit"),
        *(b"redrive", b"redrive d e", b"redrive d --to=", b"redrive d --to=d", b"redrive d --to"),
        *(b"redrive d --to=--all", b"move a b --event=%b" % (b"e" * 2000)),
        *(b"peek q --scheduled=1", b"peek q --scheduled q2", b"peek q --later"),
        *(b"purge q --scheduled --id=m", b"purge q --limit=0", b"purge q q2", b"purge --older=1"),
        *(b"purge q --older=-1", b"purge q --event=", b"move a b --id=", b"reject c m --older=1"),
        *(b"reject c --event=a --id=m", b"peek q --limit=1001", b"peek q --older=x"),
        *(b"read q --from=1 --from=2", b"read q", b"read --from=1", b"read q r --from=1"),
        *(b"trim q 1 --epoch=a --epoch=a", b"trim q", b"trim q x", b"trim q 1 2", b"range q --at"),
        *(b"delete_queue q --when-unused --when-unused=1", b"consume q --manual-ack --manual-ack"),
        *(b"trim q %b" % (b"9" * 19), b"peek q --limit=%b" % (b"9" * 5000), b"peek q --after=x"),
        *(b"stats bindings --then=a --mask=b*", b"stats a b c", b"stats --limit=0", b"help a b"),
        *(b"close_connection", b"close_connection x", b"set_name", b"_eval --worker=1 2", b"_eval"),
        *(b"pause", b"pause q r", b"pause q --for=0", b"pause q --deliveries --publishes"),
        *(b"pause q --publishes=", b"pause q --publishes=no"),
        *(b"resume", b"resume q r", b"resume q --for=1"),
        *(b"set_queue", b"set_queue --reset", b"set_queue q q2", b"set_queue q --reset=1"),
        *(b"set_queue q --retries", b"set_queue q --retries=-1", b"set_queue q --retries=1.5"),
        *(b"set_queue q --retries=1_0", b"set_queue q --retries=1 --retries=2"),
        *(b"set_queue q --losses=many", b"set_queue q --messages-max=0", b"set_queue q --ttl"),
        *(b"set_queue q --bytes-max=1e6", b"set_queue q --overflow=keep", b"set_queue q --all"),
        *(b"set_queue q --rate=%b" % each for each in (b"1", b"0/s", b"1/d", b"1/s,0", b"1/s,")),
        *(b"set_queue q --limit=%b" % each for each in (b"5", b"a,b", b"a,rate=1", 65 * b"a")),
        *(b"set_queue q --limit=a,concurrency=0", b"set_queue q --limit=a,rate=1/s,concurrency=1"),
        *(b"set_queue q --single-consumer=1", b"set_queue q --single-consumer"),
        *(b"set_queue q --backoff=5,1", b"set_queue q --backoff=1,", b"set_queue q --backoff=,1"),
        *(b"set_queue q --backoff=1,2,3", b"set_queue q --dead-letters=--reset"),
        *(b"set_queue q --delete-when-unused=1", b"set_queue q --is-sparse=yes"),
        *(b"consume q --add", b"rebind q e --remove-mask --add e", b"reject", b"ack", b"ack c"),
        *(b"ack c --any", b"ack c m m", b"delete_consumer", b"delete_consumer --all"),
        *(b"delete_queue", b"delete_queue q --now", b"delete_queue --when-unused", b"subscribe"),
        *(b"consume q --manual-ack=1", b"publish --confirmed e", b"redrive d --limit=nan"),
        *(b"consume q --delete-queue-when-unused=nan", b"delete_queue q --when-unused=1e10"),
        *(b"consume q --delete-queue-when-unused=", b"delete_queue q --when-unused=-0.5"),
    ],
)
def test_what_is_not_in_the_grammar_is_refused(line: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(line)


@pytest.mark.parametrize(
    "meta",
    [
        *(b"a", b"=1", b"&a=1", b"a=1&", b"a=1&&b=2", b"a=1&a=2", b"a=1&%61=2", b"a=1,b=2"),
        *(b"a=%", b"a=%2", b"a=%gg", b"a=\xc3\xa4", b"a=\x7f", b"a=\x01", b"a=1\n"),
        *(b"reason=x", b"queue=x", b"tries=x", b"published=x", b"died=x", b"why=x", b"qu%65ue=x"),
        b"a=%b" % (b"x" * (META_BYTES_MAX - 1)),
    ],
)
def test_bad_attributes_are_refused(meta: bytes) -> None:
    with pytest.raises(BadRequest, match="attribute"):
        parse(b"publish --meta=%b e x" % meta)


@pytest.mark.parametrize(
    "meta",
    [
        *(b"a=", b"a=b=c", b"traceparent=00-ab-cd-01&reply-to=r.1", b"a={|}~%FF", b"%00=1"),
        *(b"a=!\"#$'()*+-./:;<>?@[\\]^_`", b"a=%26%3d", b"a=%b" % (b"x" * (META_BYTES_MAX - 2))),
    ],
)
def test_attributes_are_kept_as_they_are(meta: bytes) -> None:
    assert parse(b"publish --meta=%b e x" % meta).meta == meta


FLAGS = [*{flag: None for action in ACTIONS.values() for flag in action.flags}, b"--all"]
VALUES = [b"", b"=", b"=1", b"=-1", b"=nan", b"=1,2", b"=a=1", b"=%", b"=1e999", b"=" + b"9" * 20]
WORDS = st.one_of(
    st.binary(max_size=8).map(lambda word: word.replace(b"\t", b"")),
    st.builds(bytes.__add__, st.sampled_from(FLAGS), st.sampled_from(VALUES)),
)


@given(st.sampled_from(sorted(ACTIONS)), st.lists(WORDS, max_size=6))
def test_a_request_is_parsed_or_refused(action: bytes, words: list[bytes]) -> None:
    with suppress(BadRequest):
        parse(b" ".join([action, *words]))
