"""What others put in the way of SQS clients: odd messages, names and requests."""

import base64
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from select import select
from socket import SO_RCVBUF, SOL_SOCKET, create_connection, socket
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.limits import API_BODIES_BYTES_MAX, SQS_REQUEST_BYTES_MAX
from mqks.sqs import wire
from tests.doors.test_sqs import answer_of, asked, base_of
from tests.doors.test_sqs import server as one_server
from tests.kit.line_client import LineClient
from tests.kit.memory import allocated
from tests.kit.one_broker import cleared
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until
from tests.server.test_gateway import gateways

__all__ = ["one_server"]
MIB = 1024 * 1024
HALF_A_PAIR = b'{"QueueUrl": "http://h/0/q\\ud800", "MessageBody": "x"}'


@pytest.fixture
def server(one_server: ServerProcess) -> ServerProcess:
    """With the queue `q`, and no other one."""
    cleared(one_server.url)
    ask(one_server, "CreateQueue", {"QueueName": "q", "Attributes": {"DelaySeconds": "0"}})
    return one_server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[LineClient]:
    with LineClient(server.address) as client:
        yield client


def ask(server: ServerProcess, action: str, given: bytes | dict[str, Any]) -> tuple[int, Any]:
    """The status and the answer of a request that is not signed."""
    body = given if isinstance(given, bytes) else json.dumps(given).encode()
    headers = {"X-Amz-Target": f"AmazonSQS.{action}"}
    status, text = answer_of(urllib.request.Request(base_of(server), body, headers))
    told = json.loads(text)
    return status, told if status == 200 else told["__type"].rpartition("#")[2]


@pytest.mark.parametrize(
    ("meta", "name", "shown"),
    [
        ("sqs.type.a=Binary&a=abc", "a", {"DataType": "Binary", "BinaryValue": "YWJj"}),
        ("sqs.type.a=Binary&a=YWJj", "a", {"DataType": "Binary", "BinaryValue": "YWJj"}),
        ("%ff=1", "\ufffd", {"DataType": "String", "StringValue": "1"}),
        ("a%00=1", "a\ufffd", {"DataType": "String", "StringValue": "1"}),
        ("a=%ff", "a", {"DataType": "Binary", "BinaryValue": "/w=="}),
        ("a=%01", "a", {"DataType": "Binary", "BinaryValue": "AQ=="}),
        ("sqs.type.a=%ff&a=1", "a", {"DataType": "\ufffd", "StringValue": "1"}),
    ],
)
def test_odd_attributes_are_shown(
    server: ServerProcess, client: LineClient, meta: str, name: str, shown: dict[str, str]
) -> None:
    """And what is received with them is not leased in vain."""
    ask(server, "SendMessage", {"QueueUrl": "q", "MessageBody": "good"})
    assert client.ask(f"p publish --confirm --meta={meta} --to=q e odd".encode()) == b"p ok "
    wanted = {"QueueUrl": "q", "MaxNumberOfMessages": 10, "MessageAttributeNames": ["All"]}
    status, told = ask(server, "ReceiveMessage", wanted | {"VisibilityTimeout": 0})
    assert (status, [each["Body"] for each in told["Messages"]]) == (200, ["good", "odd"])
    assert told["Messages"][1]["MessageAttributes"] == {name: shown}
    terms = {"MaxNumberOfMessages": "10", "MessageAttributeName.1": "All", "VisibilityTimeout": "0"}

    def received() -> int:
        found = asked(server, "/000000000000/q", Action="ReceiveMessage", **terms)[1]
        return len([*found.iter("Message")])

    until(lambda: received() == 2)


@pytest.mark.parametrize(
    ("action", "given"),
    [
        ("ReceiveMessage", b'"MessageAttributeNames":[%b]' % b",".join([b'"b.*"'] * 101)),
        ("ReceiveMessage", b'"MessageAttributeNames":[%b]' % b",".join([b'"b.*"'] * 600_000)),
        ("TagQueue", b'"Tags":{%b}' % b",".join(b'"%x":1' % n for n in range(300_000))),
        ("SendMessageBatch", b'"Entries":[%b]' % b",".join([b"{}"] * 1_300_000)),
        ("SendMessageBatch", b'"Entries":[{"x":%b]' % b",".join([b'"\\\\"'] * 500_000)),
        ("SendMessage", b'"MessageBody":%b' % (b"[" * 4_000_000)),
    ],
)
def test_requests_of_many_values_are_refused(
    server: ServerProcess, action: str, given: bytes
) -> None:
    """Before they are read, which would hold up all others."""
    told = ask(server, action, b'{"QueueUrl":"q",%b}' % given)
    assert told == (400, "SerializationException")


def test_a_text_may_look_like_many_values(server: ServerProcess) -> None:
    body = json.dumps([{"a": '"\\'}, "\\"] * 20_000)
    given = {"QueueUrl": "q", "MessageBody": body}
    assert ask(server, "SendMessage", given)[0] == 200
    [message] = ask(server, "ReceiveMessage", {"QueueUrl": "q"})[1]["Messages"]
    assert message["Body"] == body


def test_bodies_are_counted_as_they_come(server: ServerProcess) -> None:
    """Not as they are announced: a length says nothing, least of all beside an encoding."""
    place = urlsplit(base_of(server))
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.SendMessage\r\n"
    with ExitStack() as stack:

        def begun(more: bytes) -> socket:
            peer = stack.enter_context(create_connection((place.hostname, place.port)))
            with suppress(ConnectionError):  # It may be refused before all is sent.
                peer.sendall(head + more)
            return peer

        for _ in range(40):
            begun(b"Content-Length: %d\r\n\r\n" % SQS_REQUEST_BYTES_MAX)
        given = {"QueueUrl": "q", "MessageBody": "x"}
        assert ask(server, "SendMessage", given)[0] == 200
        size = SQS_REQUEST_BYTES_MAX - 1
        chunked = b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (size + 1)
        peers = [
            begun(chunked + b"x" * size)
            for _ in range(API_BODIES_BYTES_MAX // SQS_REQUEST_BYTES_MAX + 2)
        ]
        until(lambda: select(peers, [], [], 0)[0])
        refused = select(peers, [], [], 0)[0][0]
        answer = HTTPResponse(refused)
        answer.begin()
        assert answer.status == 503


def test_names_of_others_hide_no_queue(server: ServerProcess, client: LineClient) -> None:
    """One that sorts between a prefix and what was thought to come last before it."""
    assert client.ask(b"s subscribe --confirm p\xff\xff e") == b"s ok "
    found = ask(server, "ListQueues", {"QueueNamePrefix": "q"})[1]["QueueUrls"]
    assert [url.rpartition("/")[2] for url in found] == ["q"]
    other = {"QueueName": "q", "Attributes": {"DelaySeconds": "5"}}
    assert ask(server, "CreateQueue", other) == (400, "QueueNameExists")
    assert ask(server, "ListQueues", {"QueueNamePrefix": "\ue000"}) == (200, {})


@pytest.mark.parametrize(
    ("action", "given", "told"),
    [
        (
            "SendMessage",
            {
                "MessageBody": "x",
                "MessageSystemAttributes": {
                    "AWSTraceHeader": {"DataType": "Binary", "BinaryValue": "//8="}
                },
            },
            (400, "InvalidParameterValueException"),
        ),
        (
            "CancelMessageMoveTask",
            {"TaskHandle": base64.b64encode(b"[" * 100_000).decode()},
            (400, "InvalidParameterValueException"),
        ),
        (
            "DeleteMessage",
            {"ReceiptHandle": base64.urlsafe_b64encode(b"q a\nb").decode()},
            (404, "ReceiptHandleIsInvalid"),
        ),
        (
            "SetQueueAttributes",
            {"Attributes": {"KmsMasterKeyId": "x" * 40_000}},
            (400, "InvalidParameterValueException"),
        ),
        ("SendMessage", HALF_A_PAIR, (400, "InvalidParameterValueException")),
        (
            "SendMessage",
            {"QueueUrl": "/0/" + "%41" * 1_000_000, "MessageBody": "x"},
            (400, "QueueDoesNotExist"),
        ),
        (
            "ListQueues",
            {"NextToken": base64.b64encode(b"\xff b " * 600_000).decode()},
            (200, {}),
        ),
        ("SendMessage", {"MessageBody": "x" * 30_000_000}, (413, "RequestEntityTooLarge")),
    ],
)
def test_odd_requests_are_the_senders_fault(
    server: ServerProcess, action: str, given: Any, told: tuple[int, str]
) -> None:
    if isinstance(given, dict):
        given = {"QueueUrl": "q", **given}
    assert ask(server, action, given) == told


@pytest.mark.slow
def test_who_does_not_read_is_closed(server: ServerProcess) -> None:
    """After 5 to 10 seconds without any progress, or at once for more than all may have."""
    body = "x" * 1024 * 1024
    ask(server, "SendMessage", {"QueueUrl": "q", "MessageBody": body})
    given = b'{"QueueUrl": "q", "VisibilityTimeout": 0}'
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(given)
    place, [gateway] = urlsplit(base_of(server)), gateways(server)
    files = Path(f"/proc/{gateway}/fd")
    before = len([*files.iterdir()])
    with ExitStack() as stack:
        peers = [stack.enter_context(socket()) for _ in range(100)]
        for peer in peers:
            peer.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
            peer.connect((place.hostname, place.port))
            peer.sendall(head + given)
        until(lambda: len([*files.iterdir()]) > before + len(peers) / 2)
        until(lambda: len([*files.iterdir()]) < before + 10)
    [message] = ask(server, "ReceiveMessage", {"QueueUrl": "q"})[1]["Messages"]
    assert message["Body"] == body


def test_who_goes_while_waiting_uses_up_no_delivery(server: ServerProcess) -> None:
    """With one delivery allowed, what came next would be dead, and nobody would have seen it."""
    policy = json.dumps({"deadLetterTargetArn": "arn:aws:sqs:r:0:dead", "maxReceiveCount": 1})
    ask(server, "CreateQueue", {"QueueName": "dead"})
    redrive = {"QueueUrl": "q", "Attributes": {"RedrivePolicy": policy}}
    assert ask(server, "SetQueueAttributes", redrive)[0] == 200
    given = b'{"QueueUrl": "q", "WaitTimeSeconds": 20}'
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(given)
    for port, request in (
        ("sqs", head + given),
        ("api", b"POST /queues/q/receive?wait=20 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ):
        pattern = re.compile(rf"address={port}:(http://\S+)")
        found = until(partial(pattern.search, server.log))
        place = urlsplit(found[1])
        with create_connection((place.hostname, place.port)) as worker:
            worker.sendall(request)
            time.sleep(0.5)  # Nothing shows that it waits.
    assert ask(server, "SendMessage", {"QueueUrl": "q", "MessageBody": "x"})[0] == 200
    receive = {"QueueUrl": "q", "WaitTimeSeconds": 20}
    [message] = ask(server, "ReceiveMessage", receive)[1]["Messages"]
    assert message["Body"] == "x"


def test_a_move_task_ends(server: ServerProcess, client: LineClient) -> None:
    """Though its letters come back."""
    flags = b"--messages-max=1 --overflow=drop --dead-letters=dead"
    assert client.ask(b"x set_queue --confirm dead") == b"x ok "
    assert client.ask(b"x set_queue --confirm work " + flags) == b"x ok "
    client.send(b"".join(b"m%d publish --to=work e x\n" % number for number in range(50)))
    assert client.ask(b"m publish --confirm --to=work e x") == b"m ok "
    source = {"SourceArn": "arn:aws:sqs:r:0:dead"}
    until(lambda: ask(server, "StartMessageMoveTask", source)[0] == 200)

    def last() -> Any:
        return ask(server, "ListMessageMoveTasks", source)[1]["Results"][0]

    until(lambda: last()["Status"] == "COMPLETED")
    assert last()["ApproximateNumberOfMessagesMoved"] <= 50


def test_many_look_at_once(server: ServerProcess) -> None:
    with ThreadPoolExecutor(60) as pool:
        looks = pool.map(lambda _: ask(server, "GetQueueUrl", {"QueueName": "q"}), range(240))
        assert {status for status, _ in looks} == {200}


@given(st.lists(st.sampled_from([b"%41", b"%c3%B8", b"%", b"%zz", b"x", b"%4"])))
def test_a_form_is_unquoted_in_pieces(texts: list[bytes]) -> None:
    text = b"".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_PIECE_BYTES", 4)
        assert wire._unquoted(text) == unquote_to_bytes(text)


def test_a_form_of_escapes_takes_little_more_memory_than_it_has() -> None:
    form = b"Action=SendMessage&MessageBody=" + b"%41" * (MIB // 3)
    with allocated() as memory:
        call = wire.SqsCall.of("", "", form, "/q")
    assert call.given["MessageBody"] == "A" * (MIB // 3)
    assert memory.peak_bytes < 8 * MIB


@pytest.mark.slow
def test_forms_at_once_have_a_limit_of_memory(tmp_path: Path) -> None:
    form = b"Action=SendMessage&QueueUrl=http://localhost/0/none&MessageBody="
    form += b"%41" * ((SQS_REQUEST_BYTES_MAX - len(form)) // 3)

    with ServerProcess(tmp_path / "mqks.db", "--sqs-port", "0") as server:
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(answer_of, [urllib.request.Request(base_of(server), form)] * 16)
            assert {status for status, _ in answers} <= {400, 503}
        [gateway] = gateways(server)
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{gateway}/status").read_text())
    assert peak is not None
    assert int(peak[1]) * 1024 < 40 * MIB + 2 * API_BODIES_BYTES_MAX + 30 * MIB  # As documented.
