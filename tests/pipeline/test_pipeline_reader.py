"""Reading a queue as a log: what comes as columns, what is missed, what breaks in between."""

import pickle
import socket
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

import mqks
from mqks.client.errors import ConnectionLost, ProtocolViolation, RequestFailed
from mqks.pipeline import wire
from mqks.pipeline.columns import FIELDS, SCHEMA, record_batch, subset
from mqks.pipeline.errors import DataLost
from mqks.pipeline.reader import LogRange, QueueReader
from mqks.pipeline.wire import ServerAddress
from mqks.testing import Broker
from tests.kit.log_peer import LogPeer
from tests.kit.proxy import Proxy

TIME_US = 1_700_000_000_000_000


def messages(numbers: Iterable[int]) -> list[tuple[int, int, bytes]]:
    return [(n, TIME_US + n, b"m%d event=e.%d some data %d" % (n, n % 2, n)) for n in numbers]


def offsets(batches: Iterable[pa.RecordBatch]) -> list[int]:
    return [number for batch in batches for number in batch.column("offset").to_pylist()]


def reader(peer: LogPeer, *, retries: int = 3) -> QueueReader:
    return QueueReader(None, "q", server=ServerAddress(url=peer.url, retries=retries))


# ----------------------------------------------------------------------------------- columns

TEXT = st.binary().map(lambda raw: raw.replace(b"\n", b"."))
NAME = st.binary(min_size=1).map(lambda raw: raw.replace(b"\n", b".").replace(b" ", b"_"))
NAME = NAME.filter(lambda name: not name.endswith(b",escaped=1"))
RUN = st.tuples(
    st.integers(1, 2**40), st.integers(0, 2**50), st.lists(st.tuples(NAME, NAME, TEXT), min_size=1)
)


@given(st.lists(RUN))
def test_every_byte_of_a_message_arrives(
    runs: list[tuple[int, int, list[tuple[bytes, bytes, bytes]]]],
) -> None:
    rows = [(first + at, time, *row) for first, time, some in runs for at, row in enumerate(some)]
    text = b"".join(b"%b event=%b %b\n" % row[2:] for row in rows)
    table = np.array([(first, len(some), time, 0) for first, time, some in runs], "<i8")
    batch = record_batch(memoryview(text), table.reshape(-1, 4))
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    made = zip(
        batch["offset"].to_pylist(),
        batch["timestamp"].cast(pa.int64()).to_pylist(),
        batch["key"].to_pylist(),
        batch["topic"].to_pylist(),
        batch["value"].to_pylist(),
        strict=True,
    )
    assert list(made) == [
        (number, time, key, event.decode("utf-8", "backslashreplace"), data)
        for number, time, key, event, data in rows
    ]
    assert set(batch["partition"].to_pylist()) <= {0}
    assert batch["headers"].null_count == len(rows)


@pytest.mark.parametrize(
    "text", [b"a event=b c", b"a event=b c\nd", b"a event=b\n", b"\n", b"", b"a b c\nd e f\n"]
)
def test_a_damaged_text_is_noticed(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"a message was received|messages were received"):
        record_batch(memoryview(text), np.array([[1, 1, 0, len(text)]], "<i8"))


def test_some_columns_in_any_order() -> None:
    with LogPeer(messages([7])) as peer:
        some = QueueReader(peer.url, "q", schema=subset(["timestamp", "value"]))
        with some:
            [batch] = some.read(7, 8)
    assert batch.to_pylist() == [
        {
            "timestamp": datetime.fromtimestamp(TIME_US / 1e6, UTC).replace(microsecond=7),
            "value": b"some data 7",
        }
    ]
    kafkas = {"key", "value", "topic", "partition", "offset", "timestamp", "headers"}
    assert {*FIELDS} == kafkas | {"priority", "ordering_key"}


# ----------------------------------------------------------------------------------- reading


def test_a_range_and_its_time() -> None:
    with LogPeer(messages([3, 4, 9])) as peer, reader(peer) as log:
        assert log.range() == LogRange("one", 3, 10)
        assert log.range(TIME_US + 5) == LogRange("one", 3, 10, 9)
        assert log.range(TIME_US + 50) == LogRange("one", 3, 10, 10)


def test_a_log_is_read_in_pages() -> None:
    with LogPeer(messages(range(1, 12))) as peer, reader(peer) as log:
        batches = list(log.read(2, 11))
    assert [batch.num_rows for batch in batches] == [4, 4, 1]
    assert offsets(batches) == list(range(2, 11))
    assert peer.connections == 1


def test_the_next_page_is_asked_for_before_this_one_is_split() -> None:
    with LogPeer(messages(range(1, 12))) as peer, reader(peer) as log:
        pages = log.read(1, 12)
        next(pages)
        # The second reply was on its way when the first came out.
        assert log._connection.ahead == (5, 12)
        assert offsets(pages) == list(range(5, 12))


def test_a_reading_given_up_leaves_the_reader_of_use() -> None:
    with LogPeer(messages(range(1, 12))) as peer, reader(peer) as log:
        pages = log.read(1, 12)
        next(pages)
        assert log.range().next == 12
        assert offsets(pages) == list(range(5, 12))
        abandoned = log.read(1, 12)
        next(abandoned)
        del abandoned
        assert offsets(log.read(10, 12)) == [10, 11]


def test_the_end_of_the_log_ends_the_reading() -> None:
    with LogPeer(messages([1, 2])) as peer, reader(peer) as log:
        assert offsets(log.read(1, 100)) == [1, 2]
        assert offsets(log.read(50, 100)) == []
        assert offsets(log.read(2, 2)) == []


def test_a_reader_pickles_without_its_connection() -> None:
    with LogPeer(messages([1, 2])) as peer, reader(peer) as log:
        assert offsets(log.read(1, 3)) == [1, 2]
        with pickle.loads(pickle.dumps(log)) as other:
            assert offsets(other.read(1, 3)) == [1, 2]
    assert peer.connections == 2


def test_credentials_are_told_first() -> None:
    with LogPeer([]) as peer:
        url = peer.url.replace("//", "//ann:se%20cret@")
        with pytest.raises(ValueError, match="credentials") as told, QueueReader(url, "q") as log:
            log.range()
        with QueueReader(url.replace("%20", "-"), "q") as log:
            log.range()
    assert "cret" not in str(told.value)
    assert peer.requests[0] == b"hello auth --confirm ann se-cret"


# ---------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("kept", [0, 5, 70, 150, 200])
def test_a_connection_lost_within_a_page_repeats_nothing(kept: int) -> None:
    with LogPeer(messages(range(1, 20))) as peer, reader(peer) as log:
        peer.cut = lambda reply: kept if reply in (2, 4) else None
        assert offsets(log.read(1, 20)) == list(range(1, 20))
    assert peer.connections == 3


def test_a_server_that_stays_away_is_an_error() -> None:
    with LogPeer(messages([1])) as peer, reader(peer, retries=2) as log:
        peer.cut = lambda reply: 10
        with pytest.raises(OSError, match="closed the connection"):
            list(log.read(1, 2))
    assert peer.connections == 3


def test_a_queue_that_is_not_there() -> None:
    with LogPeer([]) as peer, QueueReader(peer.url, "other") as log:
        with pytest.raises(RequestFailed, match=r"range of the queue other .*error E1"):
            log.range()
        with pytest.raises(RequestFailed, match="read the queue other"):
            list(log.read(1, 2))


def test_a_damaged_reply_is_told() -> None:
    with LogPeer(messages([1, 2])) as peer, reader(peer) as log:
        peer.damage = lambda text: text[:-1] + b"."
        with pytest.raises(ProtocolViolation, match="damaged"):
            list(log.read(1, 3))


# ----------------------------------------------------------------------------- what is missing


def test_what_was_trimmed_before_it_was_read_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    with LogPeer(messages(range(1, 12))) as peer, reader(peer) as log:
        log.trim(6)
        with pytest.raises(DataLost, match="messages 1 to 5 of the queue q are gone"):
            list(log.read(1, 12, epoch="one"))
        assert offsets(log.read(1, 12, epoch="one", fail_on_data_loss=False)) == list(range(6, 12))
        log.trim(12)  # To its end.
        with pytest.raises(DataLost, match="messages 1 to 11 "):
            list(log.read(1, 12, epoch="one"))
    assert "messages 1 to 5 of the queue q are gone; continuing" in caplog.text


def test_what_others_consumed_in_the_middle_is_none() -> None:
    with LogPeer(messages([1, 2, 5, 6, 7, 8, 11])) as peer, reader(peer) as log:
        assert offsets(log.read(1, 12, epoch="one")) == [1, 2, 5, 6, 7, 8, 11]


def test_a_queue_made_anew_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    with LogPeer(messages([1, 2]), epoch="two") as peer, reader(peer) as log:
        with pytest.raises(DataLost, match="created again"):
            list(log.read(1, 3, epoch="one"))
        assert offsets(log.read(1, 3, epoch="one", fail_on_data_loss=False)) == []
    assert "created again; continuing" in caplog.text


# --------------------------------------------------------------------------- the real server


def test_behind_tls(mqks_broker: Broker, tmp_path: Path) -> None:
    with mqks.blocking.connect(mqks_broker.url) as client:
        client.subscribe("q", ["e"])
        client.publish_many([("e", "x" * 1000)] * 500)
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with Proxy(mqks_broker.port, tls=context) as proxy:
        url = f"mqkss://localhost:{proxy.port}"
        with QueueReader(
            None, "q", server=ServerAddress(url=url, ca=str(tmp_path / "ca.pem"))
        ) as log:
            assert offsets(log.read(1, 501)) == list(range(1, 501))
        with (
            QueueReader(None, "q", server=ServerAddress(url=url, retries=0)) as log,
            pytest.raises(ConnectionLost, match="is not trusted"),
        ):
            log.range()


def test_any_number_of_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "RETRY_MAX_S", 0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # And does not listen.
        server = ServerAddress(url=f"mqks://127.0.0.1:{nobody.getsockname()[1]}", retries=1100)
        with QueueReader(None, "q", server=server) as log, pytest.raises(ConnectionLost):
            log.range()
