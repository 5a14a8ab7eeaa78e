"""SQS answers as AWS does, in both protocols: `ask` sends what boto3 would not, signed or not."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest

boto3 = pytest.importorskip("boto3")
from botocore.auth import SigV4Auth, SigV4QueryAuth  # noqa: E402
from botocore.awsrequest import AWSRequest  # noqa: E402
from botocore.credentials import Credentials  # noqa: E402

from mqks.users import User  # noqa: E402
from tests.doors.test_sqs import (  # noqa: E402
    answer_of,
    base_of,
    connected,
    counts,
    new,
    received,
    refusal,
    server,
    xml,
)
from tests.kit.fixtures import served_to  # noqa: E402
from tests.kit.server_process import ServerProcess  # noqa: E402
from tests.kit.waiting import until  # noqa: E402

__all__ = ["server"]
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
MIB = 1024 * 1024
Sqs = Any
Answer = tuple[str, str]
"""The code of an error, and its message."""
Ask = Callable[..., Answer]
TRACE = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd86;Sampled=1"}}
NUMBERS = count()


@pytest.fixture(scope="module")
def sqs(server: ServerProcess) -> Sqs:
    return connected(server)


@pytest.fixture
def name() -> str:
    return f"q{next(NUMBERS)}"


@pytest.fixture
def fifo(sqs: Sqs, name: str) -> str:
    return new(sqs, f"{name}.fifo", ContentBasedDeduplication="true")


def in_form(action: str, given: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """What the JSON protocol has, as a form."""
    form: dict[str, str] = {}
    for name, value in given.items():
        if value == []:
            form[prefix + name] = ""
        elif isinstance(value, list):
            for number, each in enumerate(value, 1):
                if isinstance(each, str):
                    form[f"{prefix}{name[:-1]}.{number}"] = each
                else:
                    form |= in_form(action, each, f"{action}RequestEntry.{number}.")
        elif isinstance(value, dict):
            for number, (key, each) in enumerate(value.items(), 1):
                place = f"{prefix}{name[:-1]}.{number}"
                form[f"{place}.Name"] = key
                parts = each if isinstance(each, dict) else {"": each}
                form |= {f"{place}.Value.{k}".rstrip("."): v for k, v in parts.items()}
        else:
            form[prefix + name] = str(value)
    return form


@pytest.fixture(params=["JSON", "Query"])
def ask(server: ServerProcess, request: pytest.FixtureRequest) -> Ask:
    """Sends a request; returns code and message of the error, or empty texts."""
    base = base_of(server)

    def as_json(action: str, **given: Any) -> Answer:
        headers = {"X-Amz-Target": f"AmazonSQS.{action}"}
        body = json.dumps(given).encode()
        status, text = answer_of(urllib.request.Request(base, body, headers))
        told = {} if status == 200 else json.loads(text)
        code = told.get("__type", "").rpartition("#")[2]
        return code.removesuffix("Exception"), told.get("message", "")

    def as_form(action: str, **given: Any) -> Answer:
        form = urlencode({"Action": action, **in_form(action, given)}).encode()
        _, text = answer_of(urllib.request.Request(base, form))
        told = xml(text)
        code = told.findtext("Error/Code", "").removeprefix("AWS.SimpleQueueService.")
        return code, told.findtext("Error/Message", "")

    return as_json if request.param == "JSON" else as_form


OK = "", ""


def send(ask: Ask, url: str, *bodies: str, group: str | None = None, **more: Any) -> None:
    """With the group that a body begins with, unless one is given."""
    for body in bodies:
        terms = {"MessageGroupId": group or body.partition("-")[0], **more}
        assert ask("SendMessage", QueueUrl=url, MessageBody=body, **terms) == OK


def bodies(messages: list[Any]) -> list[str]:
    return [each["Body"] for each in messages]


def test_a_receive_has_one_group_before_the_next(sqs: Sqs, fifo: str) -> None:
    sent = ["a-1", "b-1", "b-2", "c-1", "a-2"]
    for body in sent:
        sqs.send_message(QueueUrl=fifo, MessageBody=body, MessageGroupId=body[0])
    some = received(sqs, fifo, MaxNumberOfMessages=3, VisibilityTimeout=0)
    assert bodies(some) == ["a-1", "a-2", "b-1"]
    until(lambda: counts(sqs, fifo) == [5, 0, 0])
    rest = received(sqs, fifo)
    assert bodies(rest) == ["c-1", "a-1", "a-2", "b-1", "b-2"], "groups take turns"


def test_a_handle_of_a_group_ends_with_its_visibility(sqs: Sqs, fifo: str, ask: Ask) -> None:
    send(ask, fifo, "a-1", "b-1")
    [first] = received(sqs, fifo, MaxNumberOfMessages=1)
    old = {"QueueUrl": fifo, "ReceiptHandle": first["ReceiptHandle"]}
    assert ask("ChangeMessageVisibility", **old, VisibilityTimeout=0) == OK
    ended = f"Value {old['ReceiptHandle']} for parameter ReceiptHandle is invalid. Reason: "
    ended_at = ended + "The receipt handle has expired."
    assert ask("DeleteMessage", **old) == ("InvalidParameterValue", ended_at)
    code, why = ask("ChangeMessageVisibility", **old, VisibilityTimeout=9)
    assert (code, why[: len(ended)]) == ("InvalidParameterValue", ended)
    by_body = {each["Body"]: each["ReceiptHandle"] for each in received(sqs, fifo)}
    assert by_body.keys() == {"a-1", "b-1"}, "it was not deleted"
    assert ask("DeleteMessage", **old)[0] == "InvalidParameterValue", "another handle has it"
    entry = {"Id": "x", "ReceiptHandle": old["ReceiptHandle"]}
    told = sqs.delete_message_batch(QueueUrl=fifo, Entries=[entry])
    assert [each["Code"] for each in told["Failed"]] == ["InvalidParameterValue"]
    held = {"QueueUrl": fifo, "ReceiptHandle": by_body["a-1"]}
    assert ask("DeleteMessage", **held) == OK
    assert ask("DeleteMessage", **held) == OK, "it may be deleted twice"
    assert ask("DeleteMessage", **old) == OK, "there is nothing left to delete"


def test_the_visibility_of_what_is_visible_again_is_changed(sqs: Sqs, name: str, ask: Ask) -> None:
    """In a standard queue."""
    url = new(sqs, name)
    assert ask("SendMessage", QueueUrl=url, MessageBody="x") == OK
    [message] = received(sqs, url, VisibilityTimeout=0)
    until(lambda: counts(sqs, url) == [1, 0, 0])
    handle = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
    change = partial(ask, "ChangeMessageVisibility", **handle)
    assert change(VisibilityTimeout=600) == OK
    assert (received(sqs, url), counts(sqs, url)) == ([], [0, 0, 1])
    assert change(VisibilityTimeout=0) == OK
    [again] = until(lambda: received(sqs, url))
    assert again["Attributes"]["ApproximateReceiveCount"] == "2"
    assert ask("DeleteMessage", **handle) == OK
    assert change(VisibilityTimeout=9)[0] == "InvalidParameterValue"


def test_a_purge_forgets_deduplication_ids(sqs: Sqs, fifo: str, ask: Ask) -> None:
    send(ask, fifo, "a-1", "a-1")
    assert bodies(received(sqs, fifo, VisibilityTimeout=0)) == ["a-1"]
    modified = {"QueueUrl": fifo, "AttributeNames": ["LastModifiedTimestamp"]}
    before = sqs.get_queue_attributes(**modified)["Attributes"]
    assert ask("PurgeQueue", QueueUrl=fifo) == OK
    send(ask, fifo, "a-1", "a-1")
    assert bodies(received(sqs, fifo)) == ["a-1"]
    assert sqs.get_queue_attributes(**modified)["Attributes"] == before


def test_the_scope_of_deduplication_can_be_changed(sqs: Sqs, name: str, ask: Ask) -> None:
    url = new(sqs, f"{name}.fifo")
    same = {"MessageDeduplicationId": "same"}
    send(ask, url, "a-1", "b-1", **same)
    assert bodies(received(sqs, url)) == ["a-1"]
    each_group = {
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
    }
    assert ask("SetQueueAttributes", QueueUrl=url, Attributes=each_group) == OK
    told = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert {key: told[key] for key in each_group} == each_group
    send(ask, url, "c-1", "d-1", "d-2", **same)
    assert bodies(received(sqs, url)) == ["c-1", "d-1"]
    whole = {"DeduplicationScope": "queue", "FifoThroughputLimit": "perQueue"}
    assert ask("SetQueueAttributes", QueueUrl=url, Attributes=whole) == OK
    send(ask, url, "e-1", "f-1", MessageDeduplicationId="other")
    assert bodies(received(sqs, url)) == ["e-1"]


def test_the_trace_header_is_kept(sqs: Sqs, name: str, ask: Ask) -> None:
    """Beside attributes that are too long for the broker's own, and in a dead letter."""
    dead = new(sqs, f"{name}-dead")
    arn = f"arn:aws:sqs:eu-north-1:000000000000:{name}-dead"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
    url = new(sqs, name, RedrivePolicy=policy)
    long = {"long": {"DataType": "String", "StringValue": "x" * 5000}}
    more: dict[str, Any] = {"MessageSystemAttributes": TRACE, "MessageAttributes": long}
    assert ask("SendMessage", QueueUrl=url, MessageBody="1", **more) == OK
    entry = {"Id": "x", "MessageBody": "2", **more}
    assert ask("SendMessageBatch", QueueUrl=url, Entries=[entry]) == OK
    for place, times in (url, 1), (dead, 2):
        until(lambda at=place: counts(sqs, at) == [2, 0, 0])  # type: ignore[misc]
        found = received(sqs, place)
        for each in found:
            assert each["Attributes"]["AWSTraceHeader"] == TRACE["AWSTraceHeader"]["StringValue"]
            assert each["MessageAttributes"] == long
            assert each["Attributes"]["ApproximateReceiveCount"] == str(times)
            handle = {"QueueUrl": place, "ReceiptHandle": each["ReceiptHandle"]}
            if place == url:
                sqs.change_message_visibility(**handle, VisibilityTimeout=0)


def test_attributes_have_names_of_letters(sqs: Sqs, name: str, ask: Ask) -> None:
    url = new(sqs, name)
    value = {"DataType": "String", "StringValue": "1"}
    for text in ("attr.1øßä", "名前_1-2"):
        for size in (1, 4000):
            attributes = {text: {"DataType": "String", "StringValue": "é" * size}}
            message = {"QueueUrl": url, "MessageBody": "x", "MessageAttributes": attributes}
            assert ask("SendMessage", **message) == OK
            [told] = received(sqs, url)
            assert told["MessageAttributes"] == attributes
            sent = sqs.send_message(**message)
            assert told["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
            received(sqs, url)
    wrong_ones = "a§", "a!", 'a"', "a b", "a(", "aWs.a", "AMAZON.a", ".a", "a.", "a..b", "L" * 257
    for wrong in wrong_ones:
        attributes = {wrong: value}
        message = {"QueueUrl": url, "MessageBody": "x", "MessageAttributes": attributes}
        assert ask("SendMessage", **message)[0] == "InvalidParameterValue", wrong


def test_batches_have_a_mebibyte_with_their_attributes(sqs: Sqs, name: str, ask: Ask) -> None:
    url = new(sqs, name)
    attributes = {"k": {"DataType": "String", "StringValue": "x"}}
    size = MIB - len("kStringx")
    first = {"Id": "1", "MessageBody": "a" * size, "MessageAttributes": attributes}
    long = {"QueueUrl": url, "Entries": [first, {"Id": "2", "MessageBody": "a"}]}
    reason = f"Batch requests cannot be longer than {MIB} bytes. You have sent {MIB + 1} bytes."
    assert ask("SendMessageBatch", **long) == ("BatchRequestTooLong", reason)
    raw = {"k": {"DataType": "Binary", "BinaryValue": "AAAAAA=="}}  # Four bytes.
    first |= {"MessageBody": "a" * (size - 3), "MessageAttributes": raw}
    assert ask("SendMessageBatch", **long) == ("BatchRequestTooLong", reason)
    first |= {"MessageBody": "a" * (size - 4)}
    assert ask("SendMessageBatch", **long) == OK


def test_a_long_entry_fails_alone(sqs: Sqs, name: str) -> None:
    url = new(sqs, name, MaximumMessageSize="1024")
    entries = [{"Id": str(size), "MessageBody": "a" * size} for size in (1024, 1025)]
    told = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    reason = "One or more parameters cannot be validated. Reason: "
    [failed] = told["Failed"]
    assert failed == {
        "Id": "1025",
        "SenderFault": True,
        "Code": "InvalidParameterValue",
        "Message": f"{reason}Message must be shorter than 1024 bytes.",
    }


def test_what_is_missing(sqs: Sqs, name: str, fifo: str, ask: Ask) -> None:
    new(sqs, name)
    group = "The request must contain the parameter MessageGroupId."
    alone = ask("SendMessage", QueueUrl=fifo, MessageBody="x")
    assert (alone[0].replace("Required", ""), alone[1]) == ("MissingParameter", group)
    entries = [{"Id": "x", "MessageBody": "x"}]
    told = ask("SendMessageBatch", QueueUrl=fifo, Entries=entries)
    assert told == ("InvalidParameterValue", group)
    empty = {"SendMessageBatch", "DeleteMessageBatch", "ChangeMessageVisibilityBatch"}
    for action in empty:
        told = ask(action, QueueUrl=name, Entries=[])
        reason = f"There should be at least one {action}RequestEntry in the request."
        assert told == ("EmptyBatchRequest", reason)
    names: dict[str, Any] = {"MessageAttributeNames": [], "MessageSystemAttributeNames": []}
    assert ask("ReceiveMessage", QueueUrl=name, AttributeNames=[], **names) == OK


def test_a_handle_that_is_none_is_named(sqs: Sqs, name: str, ask: Ask) -> None:
    url = new(sqs, name)
    reason = 'The input receipt handle "garbage" is not a valid receipt handle.'
    handle = {"QueueUrl": url, "ReceiptHandle": "garbage"}
    for action, more in (
        ("DeleteMessage", {}),
        ("ChangeMessageVisibility", {"VisibilityTimeout": 1}),
    ):
        assert ask(action, **handle, **more) == ("ReceiptHandleIsInvalid", reason)


def test_all_attributes_have_a_star(sqs: Sqs, name: str) -> None:
    url = new(sqs, name)
    value = {"DataType": "String", "StringValue": "1"}
    sqs.send_message(QueueUrl=url, MessageBody="x", MessageAttributes={"a.b": value, "c": value})
    for masks in (["All"], ["*"], [".*"]):
        # It is visible again at once, but may be so a moment after the answer.
        again = {"VisibilityTimeout": 0, "WaitTimeSeconds": 10}
        [told] = received(sqs, url, MessageAttributeNames=masks, **again)
        assert told["MessageAttributes"].keys() == {"a.b", "c"}


def test_attributes_that_cannot_be_set(sqs: Sqs, name: str, fifo: str, ask: Ask) -> None:
    plain = new(sqs, name)
    unknown = "InvalidAttributeName", "Unknown Attribute {}."
    only = "InvalidAttributeName", "You can specify the {} only when FifoQueue is set to true."
    no_type = "Modifying queue type is not supported."
    type_ = "InvalidAttributeValue", f"Invalid value for the parameter {{}}. Reason: {no_type}"
    set_, create = "SetQueueAttributes", "CreateQueue"
    for action, url, attribute, value, (code, reason) in (
        (set_, plain, "Colour", "red", unknown),
        (set_, plain, "QueueArn", "x", unknown),
        (set_, plain, "FifoQueue", "true", unknown),
        (set_, plain, "FifoQueue", "false", unknown),
        (create, plain, "FifoQueue", "false", unknown),
        (create, plain, "ContentBasedDeduplication", "false", unknown),
        (create, plain, "DeduplicationScope", "queue", only),
        (create, plain, "FifoThroughputLimit", "perQueue", only),
        (set_, fifo, "FifoQueue", "false", type_),
        (set_, fifo, "Colour", "red", unknown),
    ):
        place = {"QueueName": f"{name}-new"} if action == create else {"QueueUrl": url}
        told = ask(action, **place, Attributes={attribute: value})
        assert told == (code, reason.format(attribute)), (action, attribute)
    assert ask(set_, QueueUrl=fifo, Attributes={"FifoQueue": "true"}) == OK


def test_one_kind_of_encryption_is_told(sqs: Sqs, name: str, ask: Ask) -> None:
    url = new(sqs, name)
    key, managed = "KmsMasterKeyId", "SqsManagedSseEnabled"

    def told() -> Any:
        names = ["KmsMasterKeyId", "SqsManagedSseEnabled"]
        return sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]

    assert told() == {managed: "true"}, "as AWS does it by default"
    for given, expected in (
        ({managed: "false"}, {managed: "false"}),
        ({managed: "true"}, {managed: "true"}),
        ({key: "k"}, {key: "k", managed: "false"}),
        ({key: ""}, {managed: "true"}),
    ):
        assert ask("SetQueueAttributes", QueueUrl=url, Attributes=given) == OK
        assert told() == expected
    both = ask("SetQueueAttributes", QueueUrl=url, Attributes={key: "k", managed: "true"})
    assert both[0] == "InvalidAttributeName"
    assert sqs.create_queue(QueueName=name, Attributes={managed: "true"})["QueueUrl"] == url


def test_queues_may_be_each_others_dead_letter_queues(sqs: Sqs, name: str, ask: Ask) -> None:
    names = f"{name}-a", f"{name}-b"
    one, other = (new(sqs, each) for each in names)
    for url, target in (one, names[1]), (other, names[0]):
        arn = f"arn:aws:sqs:eu-north-1:000000000000:{target}"
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
        assert ask("SetQueueAttributes", QueueUrl=url, Attributes={"RedrivePolicy": policy}) == OK
    assert ask("SendMessage", QueueUrl=one, MessageBody="x") == OK
    for place in (one, other, one, other):
        found = until(partial(received, sqs, place, VisibilityTimeout=0))
        assert bodies(found) == ["x"]
    arn = f"arn:aws:sqs:eu-north-1:000000000000:{names[0]}"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 42})
    itself = {"QueueUrl": one, "Attributes": {"RedrivePolicy": policy}}
    assert ask("SetQueueAttributes", **itself) == OK, "AWS takes that, too"
    assert sqs.list_dead_letter_source_queues(QueueUrl=one)["queueUrls"] == [one, other]


def test_a_move_task_makes_no_queue(sqs: Sqs, name: str) -> None:
    dead, other = f"{name}-dead", new(sqs, f"{name}-other")
    arn = "arn:aws:sqs:eu-north-1:000000000000:"
    policy = json.dumps({"deadLetterTargetArn": arn + dead, "maxReceiveCount": 1})
    place = new(sqs, dead)
    source = new(sqs, name, RedrivePolicy=policy)
    for body in "abc":
        sqs.send_message(QueueUrl=source, MessageBody=body)
    received(sqs, source, VisibilityTimeout=0)
    until(lambda: counts(sqs, place) == [3, 0, 0])
    to = {"SourceArn": arn + dead, "DestinationArn": f"{arn}{name}-other"}
    sqs.start_message_move_task(**to, MaxNumberOfMessagesPerSecond=1)
    sqs.delete_queue(QueueUrl=other)

    def task() -> Any:
        return sqs.list_message_move_tasks(SourceArn=arn + dead)["Results"][0]

    until(lambda: task()["Status"] != "RUNNING")
    assert task()["FailureReason"] == "AWS.SimpleQueueService.NonExistentQueue"
    assert refusal(lambda: sqs.get_queue_url(QueueName=f"{name}-other"))[1] == 400


def signed_link(url: str, **form: str) -> str:
    request = AWSRequest("GET", f"{url}?{urlencode(form)}", {})
    SigV4QueryAuth(Credentials("any", "any"), "sqs", "eu-north-1").add_auth(request)
    return str(request.url)


def test_links_do_nothing(server: ServerProcess, sqs: Sqs, name: str) -> None:
    url, base = new(sqs, name), base_of(server)

    def get(link: str) -> tuple[int, ElementTree.Element]:
        status, text = answer_of(urllib.request.Request(link))
        return status, xml(text)

    def refused(link: str, action: str) -> bool:
        status, told = get(link)
        reason = f"The action {action} is not valid for this endpoint."
        assert (status, told.findtext("Error/Code")) == (400, "InvalidAction")
        return told.findtext("Error/Message") == reason

    for place in (base, url):
        status, told = get(place)
        assert (status, told.tag) == (404, "UnknownOperationException")
    for action in ("ListQueues", "DeleteQueue", "PurgeQueue", "Dance"):
        assert refused(f"{url}?Action={action}", action)
        assert refused(f"{base}/?Action={action}&QueueUrl={url}", action)
    for action in ("CreateQueue", "ListQueues", "Dance"):
        assert refused(signed_link(url, Action=action, QueueName=f"{name}x"), action)
    wanted = {"Action": "GetQueueAttributes", "AttributeName.1": "QueueArn"}
    assert get(signed_link(url, **wanted))[0] == 200
    assert get(signed_link(base, Action="ListQueues"))[0] == 200
    empty = answer_of(urllib.request.Request(signed_link(url, Action="ReceiveMessage")))[1]
    assert b"<ReceiveMessageResult/>" in empty


@pytest.fixture
def with_users(tmp_path: Path) -> Iterator[ServerProcess]:
    shop = User("shop", consume=["shop*"], sqs="SHOP:secret")
    boss = User("boss", consume=["**"], sqs="BOSS:hidden")
    with served_to(tmp_path, shop, boss, flags=("--sqs-port", "0")) as server:
        yield server


def test_the_target_must_be_signed(with_users: ServerProcess) -> None:
    base, body = base_of(with_users), b"{}"
    target = {"X-Amz-Target": "AmazonSQS.ListQueues"}
    for signed, code in ((True, 200), (False, 403)):
        request = AWSRequest("POST", base, target if signed else {}, body)
        SigV4Auth(Credentials("SHOP", "secret"), "sqs", "eu-north-1").add_auth(request)
        sent = urllib.request.Request(base, body, {**request.headers, **target})
        status, text = answer_of(sent)
        assert status == code
        assert signed or json.loads(text)["__type"].endswith("#SignatureDoesNotMatch")


def test_nobody_tells_which_forbidden_queues_exist(with_users: ServerProcess) -> None:
    shop, boss = (connected(with_users, *each) for each in (("SHOP", "secret"), ("BOSS", "hidden")))
    there = new(boss, "there")
    for url in (there, there.replace("there", "nowhere")):
        where = url.rpartition("/")[2]
        actions: tuple[Callable[[], object], ...] = (
            partial(new, shop, where),
            partial(new, shop, where, DelaySeconds="7"),
            partial(shop.get_queue_url, QueueName=where),
            partial(shop.tag_queue, QueueUrl=url, Tags={"a": "b"}),
            partial(shop.remove_permission, QueueUrl=url, Label="x"),
            partial(shop.purge_queue, QueueUrl=url),
            partial(shop.set_queue_attributes, QueueUrl=url, Attributes={"DelaySeconds": "1"}),
        )
        for do in actions:
            assert refusal(do) == ("AccessDenied", 403), do
