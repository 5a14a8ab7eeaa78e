"""SQS on real servers, by boto3: what it answers is durable, and the broker's."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest

boto3 = pytest.importorskip("boto3")
from botocore.config import Config  # noqa: E402
from botocore.exceptions import BotoCoreError, ClientError  # noqa: E402

from mqks import BlockingClient, blocking, users_file  # noqa: E402
from mqks.users import User  # noqa: E402
from tests.kit.fixtures import served_to  # noqa: E402
from tests.kit.one_broker import cleared  # noqa: E402
from tests.kit.preloaded import Clock  # noqa: E402
from tests.kit.server_process import ServerProcess  # noqa: E402
from tests.kit.waiting import WAIT_S, until  # noqa: E402

# What botocore leaves open of a request that was refused before it had been sent.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MIB = 1024 * 1024
LOST = BotoCoreError, ClientError, KeyError
"""The server was killed, or its answer ends early, which botocore takes for an empty one."""
Sqs = Any


def base_of(server: ServerProcess) -> str:
    _ = server.address
    return until(lambda: re.search(r"address=sqs:(http://\S+)", server.log))[1]


def connected(server: ServerProcess, key: str = "any", secret: str = "any", **more: Any) -> Sqs:
    more = {"retries": {"max_attempts": 0}, "max_pool_connections": 50, **more}
    return boto3.client(
        "sqs",
        endpoint_url=base_of(server),
        region_name="eu-north-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(**more),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    db = tmp_path_factory.mktemp("sqs") / "mqks.db"
    with ServerProcess(db, "--sqs-port", "0", "--api-port", "0") as running:
        yield running


@pytest.fixture(autouse=True)
def _begins_without_queues(server: ServerProcess) -> None:
    cleared(server.url)


@pytest.fixture
def sqs(server: ServerProcess) -> Sqs:
    return connected(server)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BlockingClient]:
    with blocking.connect(server.url) as client:
        yield client


def new(sqs: Sqs, name: str = "q", **attributes: str) -> str:
    if name.endswith(".fifo"):
        attributes = {"FifoQueue": "True", **attributes}  # As AWS takes it.
    return str(sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])


def received(sqs: Sqs, url: str, **more: Any) -> list[Any]:
    names = {"MessageSystemAttributeNames": ["All"], "MessageAttributeNames": ["All"]}
    told = sqs.receive_message(QueueUrl=url, **{"MaxNumberOfMessages": 10, **names, **more})
    return list(told.get("Messages", []))


def refusal(do: Callable[[], object]) -> tuple[str, int]:
    with pytest.raises(ClientError) as failure:
        do()
    told = failure.value.response
    return told["Error"]["Code"], told["ResponseMetadata"]["HTTPStatusCode"]


def counts(sqs: Sqs, url: str) -> list[int]:
    """Ready, delayed and leased."""
    told = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return [
        int(told[f"ApproximateNumberOfMessages{which}"]) for which in ("", "Delayed", "NotVisible")
    ]


# ---------------------------------------------------------------------------------------- two doors


def test_what_is_sent_by_one_door_is_received_by_the_other(
    sqs: Sqs, client: BlockingClient
) -> None:
    url = new(sqs)
    attributes = {
        "tenant": {"DataType": "String", "StringValue": "a b"},
        "reason": {"DataType": "String", "StringValue": "a name that dead letters have"},
        "price": {"DataType": "Number.eur", "StringValue": "1.5"},
        "raw": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
    }
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1"}}
    body = "ä\r\n\t\\n \U0001f600\r"
    sent = sqs.send_message(
        QueueUrl=url,
        MessageBody=body,
        MessageAttributes=attributes,
        MessageSystemAttributes=trace,
    )
    assert sent["MD5OfMessageBody"] == hashlib.md5(body.encode()).hexdigest()
    [plain] = client.peek("q")
    assert (plain.id, plain.event, plain.data) == (sent["MessageId"], "q", body.encode())
    assert plain.meta["tenant"] == "a b"
    client.publish("any", b"from \xff", to="q", meta={"traceparent": "00"}, confirm=True)
    client.publish("any", "text", to="q", id="m 2".replace(" ", "-"), key="k", confirm=True)
    first, second, third = received(sqs, url)
    assert (first["Body"], first["MessageAttributes"]) == (body, attributes)
    assert first["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert first["Attributes"]["AWSTraceHeader"] == "Root=1"
    assert second["Body"] == "ZnJvbSD/"
    told = {name: each["StringValue"] for name, each in second["MessageAttributes"].items()}
    assert told == {"traceparent": "00", "mqks.encoding": "base64"}
    assert (third["MessageId"], third["Body"]) == ("m-2", "text")
    assert third["Attributes"]["MessageGroupId"] == "k"


def test_attributes_are_the_policy_and_labels(sqs: Sqs, client: BlockingClient) -> None:
    dead = new(sqs, "dead")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    redrive = json.dumps({"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": 3})
    wanted = {
        "VisibilityTimeout": "7",
        "MessageRetentionPeriod": "60",
        "DelaySeconds": "1",
        "RedrivePolicy": redrive,
    }
    url = sqs.create_queue(QueueName="q", Attributes=wanted, tags={"team": "a=b&c"})["QueueUrl"]
    policy = client.stats("queue", "q")["policy"]
    fields = ("ack_timeout_s", "ttl_s", "dead_letters", "deliveries")
    assert [policy[name]["value"] for name in fields] == [7, 60, "dead", 3]
    assert "team=a%3Db%26c" in policy["labels"]["value"]
    told = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert {name: told[name] for name in wanted} == wanted
    assert sqs.create_queue(QueueName="q", Attributes=wanted)["QueueUrl"] == url
    assert refusal(lambda: new(sqs, DelaySeconds="2"))[0] == "QueueAlreadyExists"
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [url]
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": "", "DelaySeconds": "0"})
    told = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert (told["DelaySeconds"], "RedrivePolicy" in told) == ("0", False)
    sqs.tag_queue(QueueUrl=url, Tags={"more": "1"})
    sqs.untag_queue(QueueUrl=url, TagKeys=["team", "sqs.created"])
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"more": "1"}
    client.set_queue("plain.queue", labels="a=1")
    plain = sqs.get_queue_url(QueueName="plain.queue")["QueueUrl"]
    assert sqs.list_queue_tags(QueueUrl=plain)["Tags"] == {"a": "1"}
    sqs.send_message(QueueUrl=plain, MessageBody="x")
    assert [each.text for each in client.peek("plain.queue")] == ["x"]


def test_lists_have_pages(sqs: Sqs, client: BlockingClient) -> None:
    names = ["a", "b", "b-", "b-1", "b-2", "b_", "bb", "c"]
    for name in names:
        client.set_queue(name)

    def listed(**how: Any) -> list[str]:
        pages = sqs.get_paginator("list_queues").paginate(**how)
        urls = [url for page in pages for url in page.get("QueueUrls", [])]
        return [url.rpartition("/")[2] for url in urls]

    assert listed() == listed(PaginationConfig={"PageSize": 3}) == names
    assert listed(QueueNamePrefix="b-") == ["b-", "b-1", "b-2"]
    assert listed(QueueNamePrefix="b", PaginationConfig={"PageSize": 2}) == names[1:-1]
    assert listed(QueueNamePrefix="d") == []


# ------------------------------------------------------------------------------------------ leases


def test_a_message_is_leased_until_it_is_deleted(sqs: Sqs) -> None:
    url = new(sqs)
    sqs.send_message(QueueUrl=url, MessageBody="x")
    sqs.send_message(QueueUrl=url, MessageBody="later", DelaySeconds=900)
    [first] = received(sqs, url)
    assert (received(sqs, url), counts(sqs, url)) == ([], [0, 1, 1])
    told = first["Attributes"]
    assert told["ApproximateReceiveCount"] == "1"
    handle = {"QueueUrl": url, "ReceiptHandle": first["ReceiptHandle"]}
    sqs.change_message_visibility(**handle, VisibilityTimeout=0)
    [again] = received(sqs, url)
    assert again["Attributes"]["ApproximateReceiveCount"] == "2"
    same = "ApproximateFirstReceiveTimestamp"
    assert again["Attributes"][same] == told[same]
    change = sqs.change_message_visibility
    change(**handle, VisibilityTimeout=0)  # An old handle, of the message all the same.
    assert received(sqs, url)[0]["Attributes"]["ApproximateReceiveCount"] == "3"
    sqs.delete_message(**handle)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=again["ReceiptHandle"])
    assert counts(sqs, url) == [0, 1, 0]
    assert refusal(lambda: change(**handle, VisibilityTimeout=9))[0] == "InvalidParameterValue"
    sqs.purge_queue(QueueUrl=url)
    assert counts(sqs, url) == [0, 0, 0]


def test_a_queue_without_a_visibility_timeout(sqs: Sqs) -> None:
    url = new(sqs, VisibilityTimeout="0")
    sqs.send_message(QueueUrl=url, MessageBody="x")
    for count in range(1, 20):
        [message] = until(lambda: received(sqs, url, MaxNumberOfMessages=1))
        assert message["Attributes"]["ApproximateReceiveCount"] == str(count)
    assert len(until(lambda: received(sqs, url))) == 1, "a receive has it once"


def test_a_long_poll_ends_with_the_first_message(sqs: Sqs) -> None:
    url = new(sqs, ReceiveMessageWaitTimeSeconds="20")
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(received, sqs, url) for _ in range(8)]
        for number in range(8):
            sqs.send_message(QueueUrl=url, MessageBody=str(number))
        bodies = [each["Body"] for future in waiting for each in future.result(WAIT_S)]
    assert sorted(bodies) == [*"01234567"]


def test_maximum_receives_and_a_move_task(server: ServerProcess, sqs: Sqs) -> None:
    dead = new(sqs, "dead")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    redrive = {"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": "2"}
    url = new(sqs, RedrivePolicy=json.dumps(redrive))
    ids = {sqs.send_message(QueueUrl=url, MessageBody=str(n))["MessageId"] for n in range(20)}
    for _ in range(2):
        until(lambda: len(received(sqs, url, VisibilityTimeout=0)) == 0)
    found = until(lambda: received(sqs, dead, VisibilityTimeout=0))
    assert {each["MessageId"] for each in found} <= ids
    source = found[0]["Attributes"]["DeadLetterQueueSourceArn"]
    assert source == "arn:aws:sqs:eu-north-1:000000000000:q"
    until(lambda: counts(sqs, dead)[0] == 20)
    start = sqs.start_message_move_task
    assert refusal(lambda: start(SourceArn=source))[0] == "InvalidParameterValue"
    slow = {"SourceArn": arn["QueueArn"], "MaxNumberOfMessagesPerSecond": 1}
    start(**slow)
    assert refusal(lambda: start(**slow))[0] == "InvalidParameterValue"
    server.kill()
    server.start()
    sqs = connected(server)
    start, tasks = sqs.start_message_move_task, sqs.list_message_move_tasks
    [task] = tasks(SourceArn=arn["QueueArn"])["Results"]
    assert (task["Status"], "TaskHandle" in task) == ("FAILED", False)
    sqs.cancel_message_move_task(TaskHandle=start(**slow)["TaskHandle"])
    status = "CANCELLED"
    until(lambda: tasks(SourceArn=arn["QueueArn"])["Results"][0]["Status"] == status)
    start(SourceArn=arn["QueueArn"])
    status = "COMPLETED"
    until(lambda: tasks(SourceArn=arn["QueueArn"])["Results"][0]["Status"] == status)
    assert (counts(sqs, url)[0], counts(sqs, dead)[0]) == (20, 0)
    assert len(tasks(SourceArn=arn["QueueArn"], MaxResults=10)["Results"]) == 2


def test_a_queue_is_purged_once_a_minute(sqs: Sqs, client: BlockingClient) -> None:
    url, other = new(sqs), new(sqs, "other")
    sqs.send_message(QueueUrl=url, MessageBody="x")
    sqs.purge_queue(QueueUrl=url)
    sqs.send_message(QueueUrl=url, MessageBody="y")
    again = partial(sqs.purge_queue, QueueUrl=url)
    assert refusal(again) == ("AWS.SimpleQueueService.PurgeQueueInProgress", 403)
    assert counts(sqs, url) == [1, 0, 0]
    sqs.purge_queue(QueueUrl=other)
    client.delete_queue("q")
    assert refusal(again)[0].endswith("NonExistentQueue")
    sqs.purge_queue(QueueUrl=new(sqs))


# -------------------------------------------------------------------------------------------- FIFO


def test_groups_are_in_order(sqs: Sqs) -> None:
    url = new(sqs, "q.fifo", ContentBasedDeduplication="True")
    entries = [
        {"Id": str(n), "MessageBody": str(n), "MessageGroupId": "ab"[n % 2]} for n in range(10)
    ]
    numbers = [
        each["SequenceNumber"]
        for each in sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]
    ]
    assert len({*numbers}) == 10
    first, second = (received(sqs, url, MaxNumberOfMessages=3) for _ in "ab")
    bodies = [[each["Body"] for each in some] for some in (first, second)]
    assert bodies == [[*"024"], [*"135"]], "as many of one group as it may"
    assert received(sqs, url) == [], "a group was received while it was leased"
    handles = [{"Id": e["Body"], "ReceiptHandle": e["ReceiptHandle"]} for e in first + second]
    assert "Failed" not in sqs.delete_message_batch(QueueUrl=url, Entries=handles)
    rest = received(sqs, url)
    assert [each["Body"] for each in rest] == [*"6879"]
    for each in first + second + rest:
        number, told = int(each["Body"]), each["Attributes"]
        assert told["MessageGroupId"] == "ab"[number % 2]
        assert told["SequenceNumber"] == numbers[number]


def test_duplicates_are_dropped_over_a_restart(server: ServerProcess, sqs: Sqs) -> None:
    url = new(sqs, "q.fifo")
    message = {"MessageGroupId": "g", "MessageDeduplicationId": "d"}
    with ThreadPoolExecutor(8) as pool:
        sent = [
            pool.submit(sqs.send_message, QueueUrl=url, MessageBody="x", **message)
            for _ in range(20)
        ]
        told = [each.result() for each in sent]
    assert len({(each["MessageId"], each["SequenceNumber"]) for each in told}) == 1
    server.kill()
    server.start()
    sqs = connected(server)
    url = sqs.get_queue_url(QueueName="q.fifo")["QueueUrl"]
    repeated = sqs.send_message(QueueUrl=url, MessageBody="y", **message)
    assert repeated["MessageId"] == told[0]["MessageId"]
    assert counts(sqs, url)[0] == 1
    message["MessageDeduplicationId"] = "other"
    sqs.send_message(QueueUrl=url, MessageBody="z", **message)
    assert [each["Body"] for each in received(sqs, url)] == ["x", "z"]


def test_groups_of_a_standard_queue_take_turns(sqs: Sqs) -> None:
    url = new(sqs)
    for group, count in (("loud", 9), ("quiet", 1)):
        for number in range(count):
            body = f"{group} {number}"
            sqs.send_message(QueueUrl=url, MessageBody=body, MessageGroupId=group)
    told = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=3)["Messages"]
    assert "quiet 0" in [each["Body"] for each in told]


# ---------------------------------------------------------------------------------- both protocols


def answer_of(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as failure:
        with failure:
            return failure.code, failure.read()


def xml(text: bytes) -> ElementTree.Element:
    return ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", text))


def asked(server: ServerProcess, path: str = "/", **form: str) -> tuple[int, ElementTree.Element]:
    request = urllib.request.Request(base_of(server) + path, urlencode(form).encode())
    status, text = answer_of(request)
    return status, xml(text)


def test_the_query_protocol(server: ServerProcess, sqs: Sqs, client: BlockingClient) -> None:
    form = {
        "Attribute.1.Name": "VisibilityTimeout",
        "Attribute.1.Value": "9",
        "Tag.1.Key": "a",
        "Tag.1.Value": "<&>",
    }
    status, made = asked(server, Action="CreateQueue", QueueName="q", **form)
    url = made.findtext("CreateQueueResult/QueueUrl") or ""
    assert (status, url) == (200, sqs.get_queue_url(QueueName="q")["QueueUrl"])
    path = "/" + url.split("/", 3)[3]
    _, tags = asked(server, path, Action="ListQueueTags")
    assert tags.findtext("ListQueueTagsResult/Tag/Value") == "<&>"
    value = {"Name": "n", "Value.DataType": "Number", "Value.StringValue": "7"}
    nested = {f"MessageAttribute.1.{key}": text for key, text in value.items()}
    _, sent = asked(server, path, Action="SendMessage", MessageBody="a<\r\n", **nested)
    batch = {
        "SendMessageBatchRequestEntry.1.Id": "x",
        "SendMessageBatchRequestEntry.1.MessageBody": "b",
        **{f"SendMessageBatchRequestEntry.1.{key}": text for key, text in nested.items()},
        "SendMessageBatchRequestEntry.2.Id": "y",
        "SendMessageBatchRequestEntry.2.MessageBody": "\0",
    }
    _, sent_batch = asked(server, Action="SendMessageBatch", QueueUrl=url, **batch)
    result = "SendMessageBatchResult"
    assert sent_batch.findtext(f"{result}/SendMessageBatchResultEntry/Id") == "x"
    code = sent_batch.findtext(f"{result}/BatchResultErrorEntry/Code")
    assert code == "InvalidMessageContents"
    names = {"MaxNumberOfMessages": "10", "AttributeName.1": "All", "MessageAttributeName.1": "n"}
    _, got = asked(server, path, Action="ReceiveMessage", **names)
    first, second = got.findall("ReceiveMessageResult/Message")
    assert first.findtext("MessageId") == sent.findtext("SendMessageResult/MessageId")
    assert (first.findtext("Body"), second.findtext("Body")) == ("a<\r\n", "b")
    assert first.findtext("MessageAttribute/Value/StringValue") == "7"
    assert first.find("Attribute/Name") is not None
    handle = first.findtext("ReceiptHandle") or ""
    assert asked(server, path, Action="DeleteMessage", ReceiptHandle=handle)[0] == 200
    client.publish("e", "x", to="q", id="not\x01xml", confirm=True)
    [odd] = asked(server, path, Action="ReceiveMessage")[1].iter("MessageId")
    assert odd.text == "not\ufffdxml"
    purged = asked(server, path, Action="PurgeQueue")[1]
    assert [each.tag for each in purged] == ["ResponseMetadata"]
    none = asked(server, path, Action="ReceiveMessage")[1].find("ReceiveMessageResult")
    assert none is not None, "SDKs ask for it"
    assert not [*none]
    status, failed = asked(server, "/", Action="GetQueueUrl", QueueName="none")
    assert (status, failed.findtext("Error/Code")) == (
        400,
        "AWS.SimpleQueueService.NonExistentQueue",
    )
    assert asked(server, Action="Dance")[1].findtext("Error/Code") == "InvalidAction"
    assert asked(server, **{"Action": "ListQueues", "A.1.1.1.1.1.1.1.1.1.1": "x"})[0] == 400


def test_errors_are_those_of_sqs(sqs: Sqs) -> None:
    url = new(sqs)
    send, create = sqs.send_message, sqs.create_queue
    cases: dict[str, Callable[[], object]] = {
        "AWS.SimpleQueueService.NonExistentQueue": lambda: send(QueueUrl=f"{url}x", MessageBody=""),
        "MissingParameter": lambda: send(QueueUrl=url, MessageBody=""),
        "InvalidMessageContents": lambda: send(QueueUrl=url, MessageBody="\0"),
        "InvalidAttributeValue": lambda: new(sqs, "r", DelaySeconds="901"),
        "InvalidParameterValue": lambda: create(QueueName="a b"),
    }
    for code, do in cases.items():
        assert refusal(do)[0] == code
    missing = "AWS.SimpleQueueService.NonExistentQueue"
    for name in ("a b", "--x", "a\nb", "é"):
        assert refusal(partial(sqs.get_queue_url, QueueName=name))[0] == missing
        assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix=name)
    for arn in ("x", "arn:aws:sqs:eu-north-1:000000000000:none"):
        told = refusal(partial(sqs.list_message_move_tasks, SourceArn=arn))
        assert told in (("InvalidParameterValue", 400), ("ResourceNotFoundException", 404))


def test_what_is_no_request_is_refused(server: ServerProcess) -> None:
    for body in (b"", b"[]", b"{", b'{"Entries": [1]}', b'{"QueueUrl": {}}', b"[" * 100_000):
        headers = {"X-Amz-Target": "AmazonSQS.SendMessageBatch"}
        request = urllib.request.Request(base_of(server), body, headers)
        with pytest.raises(urllib.error.HTTPError) as failure:
            urllib.request.urlopen(request, timeout=WAIT_S)
        assert failure.value.code == 400, body[:20]
        assert failure.value.headers["x-amzn-query-error"].endswith(";Sender")


# ------------------------------------------------------------------------------------------ limits


def test_a_body_has_a_mebibyte(sqs: Sqs, client: BlockingClient) -> None:
    url = new(sqs)
    for body in ("\n" * MIB, "é" * (MIB // 2), "a" * MIB):
        sqs.send_message(QueueUrl=url, MessageBody=body)
        [message] = received(sqs, url)
        assert message["Body"] == body
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    too_long = "a" * (MIB + 1)
    assert refusal(lambda: sqs.send_message(QueueUrl=url, MessageBody=too_long))[1] == 400
    longest = "a" * (5 * MIB)
    assert refusal(lambda: sqs.send_message(QueueUrl=url, MessageBody=longest))[1] == 413
    large: dict[str, Any] = {
        "text": {"DataType": "String", "StringValue": "\n" * (MIB // 2)},
        "raw": {"DataType": "Binary.x", "BinaryValue": bytes(MIB // 4)},
    }
    sent = sqs.send_message(QueueUrl=url, MessageBody="body", MessageAttributes=large)
    [plain] = client.peek("q")
    assert plain.data.startswith(b"body")
    assert len(plain.data) == 4 + int(plain.meta["sqs.attributes-bytes"])
    [message] = received(sqs, url)
    assert (message["Body"], message["MessageAttributes"]) == ("body", large)
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    large["raw"]["BinaryValue"] = bytes(MIB // 2)
    send = partial(sqs.send_message, QueueUrl=url, MessageBody="x", MessageAttributes=large)
    assert refusal(send) == ("InvalidParameterValue", 400)
    for size in ("2", "3", "4", "x"):  # Of another door.
        meta = {"sqs.attributes-bytes": size}
        client.publish("e", b"\0\0\0\xff", to="q", meta=meta, confirm=True)
    bodies = [each["Body"] for each in received(sqs, url)]
    assert bodies == ["AAA=", "AA==", "", "AAAA/w=="]
    sqs.purge_queue(QueueUrl=url)
    assert client.stats("queue", "q")["ready"] == 0


def test_a_full_queue_refuses(sqs: Sqs, client: BlockingClient) -> None:
    url = new(sqs)
    client.set_queue("q", messages_max=1)
    sqs.send_message(QueueUrl=url, MessageBody="1")
    assert refusal(lambda: sqs.send_message(QueueUrl=url, MessageBody="2"))[1] == 503


def test_labels_are_counted_and_limited(client: BlockingClient) -> None:
    before = client.stats()["metadata_bytes"]
    client.set_queue("q", labels="a=" + "x" * 30_000)
    assert client.stats()["metadata_bytes"] - before > 30_000
    with pytest.raises(Exception, match="the limit is 32768"):
        client.set_queue("q", labels="a=" + "x" * 40_000)
    client.delete_queue("q")
    assert client.stats()["metadata_bytes"] == before


# ------------------------------------------------------------------------------------------- users


def test_policies_are_kept_if_they_only_allow(server: ServerProcess, sqs: Sqs) -> None:
    path = "/" + new(sqs).split("/", 3)[3]
    more = {"AWSAccountId.1": "111111111111", "ActionName.1": "SendMessage"}
    assert asked(server, path, Action="AddPermission", Label="x", **more)[0] == 200
    url, names = sqs.get_queue_url(QueueName="q")["QueueUrl"], ["Policy"]
    get = partial(sqs.get_queue_attributes, QueueUrl=url, AttributeNames=names)
    [statement] = json.loads(get()["Attributes"]["Policy"])["Statement"]
    assert (statement["Sid"], statement["Effect"]) == ("x", "Allow")
    assert json.loads(get()["Attributes"]["Policy"])["Version"] == "2008-10-17"
    for policy, code in (
        ('{"Statement": {"Effect": "Deny"}}', "AWS.SimpleQueueService.UnsupportedOperation"),
        ('{"Statement": ["Allow"]}', "InvalidAttributeValue"),
        ("{}", "InvalidAttributeValue"),
    ):
        set_ = partial(sqs.set_queue_attributes, QueueUrl=url, Attributes={"Policy": policy})
        assert refusal(set_)[0] == code
    sqs.remove_permission(QueueUrl=url, Label="x")
    assert "Attributes" not in get()


def test_requests_are_signed(tmp_path: Path) -> None:
    path, everything = tmp_path / "users", ["**"]
    shop = User("shop", publish=["orders*"], consume=["orders*"], sqs="SHOP:secret", queues_max=1)
    boss = User("boss", publish=everything, consume=everything, admin=True, sqs="BOSS:hidden")
    flags = "--sqs-port", "0", "--log-level", "debug"
    with served_to(tmp_path, shop, boss, flags=flags) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        shopping, ruling = connected(server, "SHOP", "secret"), connected(server, "BOSS", "hidden")
        url, other = new(shopping, "orders"), new(ruling, "other")
        odd = "a=1&b c/ü~"
        shopping.tag_queue(QueueUrl=url, Tags={odd: odd})
        assert shopping.list_queue_tags(QueueUrl=url)["Tags"] == {odd: odd}
        shopping.send_message(QueueUrl=url, MessageBody="x")
        assert [each["Body"] for each in received(shopping, url)] == ["x"]
        assert shopping.list_queues()["QueueUrls"] == [url]
        assert len(ruling.list_queues()["QueueUrls"]) == 2
        denied = "AccessDenied", 403
        assert refusal(lambda: new(shopping, "mine")) == denied
        assert refusal(lambda: new(shopping, "orders-2")) == ("OverLimit", 403)
        assert refusal(lambda: received(shopping, other)) == denied
        assert refusal(lambda: shopping.get_queue_url(QueueName="other")) == denied
        assert refusal(lambda: shopping.send_message(QueueUrl=other, MessageBody="x")) == denied
        assert refusal(lambda: shopping.delete_queue(QueueUrl=url)) == denied
        for key, secret, code in (
            ("SHOP", "hidden", "SignatureDoesNotMatch"),
            ("NOBODY", "secret", "InvalidClientTokenId"),
        ):
            assert refusal(connected(server, key, secret).list_queues) == (code, 403)
        assert asked(server, Action="ListQueues")[0] == 403
        shop.sqs = "SHOP:new"
        users_file.write(path, [shop])
        server.hang_up()
        until(lambda: "event=reloaded" in server.log)
        assert refusal(shopping.list_queues)[0] == "SignatureDoesNotMatch"
        assert refusal(ruling.list_queues)[0] == "InvalidClientTokenId"
        assert connected(server, "SHOP", "new").list_queues()["QueueUrls"] == [url]
        assert "secret" not in server.log


# ------------------------------------------------------------------------------------------- kills


def test_handles_outlive_a_kill(server: ServerProcess, sqs: Sqs) -> None:
    url = new(sqs)
    for body in "ab":
        sqs.send_message(QueueUrl=url, MessageBody=body)
    leased = received(sqs, url, VisibilityTimeout=600)
    server.kill()
    server.start()
    sqs = connected(server)
    url = sqs.get_queue_url(QueueName="q")["QueueUrl"]
    assert (received(sqs, url), counts(sqs, url)) == ([], [0, 0, 2])
    sqs.delete_message(QueueUrl=url, ReceiptHandle=leased[0]["ReceiptHandle"])
    handle = leased[1]["ReceiptHandle"]
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=0)
    assert [each["Body"] for each in received(sqs, url)] == ["b"]


@pytest.mark.slow
def test_kills_lose_nothing_that_was_answered(tmp_path: Path) -> None:
    """Senders and receivers, and a server that is killed again and again. Leases are long, so a
    message that is received twice was leased to two at once."""
    answered, deleted, seen = set[str](), set[str](), list[str]()
    flags, ends, sqs_of = ("--sqs-port", "0"), threading.Event(), list[Sqs]()

    def send(worker: int) -> None:
        number = 0
        while not ends.is_set():
            number += 1
            body = f"{worker} {number}"
            more = {"MessageGroupId": str(worker), "MessageDeduplicationId": body.replace(" ", "-")}
            while not ends.is_set():  # Until it is answered: then the next one of the group.
                try:
                    url = sqs_of[-1].get_queue_url(QueueName="q.fifo")["QueueUrl"]
                    told = sqs_of[-1].send_message(QueueUrl=url, MessageBody=body, **more)
                    assert told["MessageId"]
                    answered.add(body)
                    break
                except LOST:
                    time.sleep(0.05)

    def receive() -> None:
        while not ends.is_set():
            try:
                sqs = sqs_of[-1]
                url = sqs.get_queue_url(QueueName="q.fifo")["QueueUrl"]
                for each in received(sqs, url, WaitTimeSeconds=1):
                    seen.append(each["Body"])
                    sqs.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
                    deleted.add(each["Body"])
            except LOST:
                time.sleep(0.05)

    db = tmp_path / "mqks.db"
    chance = random.Random(7)
    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    threads += [threading.Thread(target=receive) for _ in range(4)]
    with ServerProcess(db, *flags) as server:
        sqs_of.append(connected(server, read_timeout=5))
        new(sqs_of[-1], "q.fifo", VisibilityTimeout="43200")
        for thread in threads:
            thread.start()
    for _ in range(6):
        with ServerProcess(db, *flags) as server:
            sqs_of.append(connected(server, read_timeout=5))
            before = len(answered)
            until(lambda before=before: len(answered) > before + 50)  # type: ignore[misc]
            time.sleep(chance.random() / 5)
            server.kill()
    ends.set()
    with ServerProcess(db, *flags) as server:
        sqs_of.append(connected(server))
        for thread in threads:
            thread.join()
        with blocking.connect(server.url) as client:
            left = [client.peek("q.fifo", limit=10**6, scheduled=each) for each in (False, True)]
            waiting = {message.text for messages in left for message in messages}
    assert len(answered) > 300
    assert answered <= waiting | {*seen}, "a message that was answered is lost"
    assert not waiting & deleted, "a message that was deleted is back"
    assert len({*seen}) == len(seen), "a message was received twice"
    for worker in map(str, range(4)):
        numbers = [int(number) for each, number in map(str.split, seen) if each == worker]
        assert numbers == sorted(numbers), "a group is out of order"


def test_duplicates_are_known_whatever_the_clock_is_set_to(clock: Clock, tmp_path: Path) -> None:
    flags = "--sqs-port", "0"
    with ServerProcess(tmp_path / "mqks.db", *flags, environment=clock.environment) as server:
        sqs = connected(server)
        url = sqs.create_queue(QueueName="q.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
        message = {"MessageBody": "x", "MessageGroupId": "g", "MessageDeduplicationId": "d"}
        numbers = set[str]()
        for ahead_s in (0, 3600, -3600):
            clock.ahead(ahead_s)
            numbers.add(sqs.send_message(QueueUrl=url, **message)["SequenceNumber"])
        assert len(numbers) == 1
        names = ["ApproximateNumberOfMessages"]
        told = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        assert told == {names[0]: "1"}


GO = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
"""Debian's packages golang-go and golang-github-aws-aws-sdk-go-v2-dev."""


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("go") and Path(GO["GOPATH"], "src/github.com/aws/aws-sdk-go-v2").exists()),
    reason="there is no Go with the SDK of AWS",
)
def test_the_example_in_go(server: ServerProcess) -> None:
    """That in Python is typed behind its page."""
    command = "go", "run", str(Path(__file__).parents[2] / "examples/sqs/worker.go")
    environ = {**os.environ, "AWS_ENDPOINT_URL_SQS": base_of(server), **GO}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done: mow\ndone: rake\ndone: water\n"
