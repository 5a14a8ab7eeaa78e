"""Messages as SQS sees them, and as the broker has them.

The one rule: the data of a message are its body, and its attributes are its message attributes, in
both directions. What else SQS needs is in attributes that begin with `sqs.`.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from hashlib import md5, sha256
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid4

from mqks.client.messages import PeekedMessage
from mqks.protocol.meta import LETTER
from mqks.sqs.errors import SqsError, invalid, missing
from mqks.sqs.queues import Queue

ATTRIBUTES_MAX: Final = 10
_OWN: Final = "sqs."
_NAMED, _TYPE = f"{_OWN}attribute.", f"{_OWN}type."
"""Begin attributes whose names the broker has a use for, and types other than `String`."""
_DEDUPLICATION, _SEQUENCE = f"{_OWN}deduplication-id", f"{_OWN}sequence"
_TRACE: Final = "AWSTraceHeader"
_NAME: Final = re.compile(r"(?!(?i:aws|amazon)\.)(?!\.)(?!.*(?:\.\.|\.$))[A-Za-z0-9_.-]{1,256}")
_TYPES: Final = re.compile(r"(String|Number|Binary)(?:\..*)?")
_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ID: Final = re.compile(r"[!-~]{1,128}")
_BASE64: Final = "mqks.encoding"
"""An attribute of bodies that are not text."""


class Outgoing(NamedTuple):
    """A message that is sent: the arguments of `publish`, and the answer."""

    message_id: str
    body: str
    meta: dict[str, str]
    group: str | None
    deduplicates: bool
    delay_s: int | None
    told: dict[str, Any]


def outgoing(queue: Queue, given: Mapping[str, Any], delay_s: int | None) -> Outgoing:
    """Check a message. Raises SqsError."""
    body = given.get("MessageBody")
    if not isinstance(body, str) or not body:
        raise missing("MessageBody")
    if _NO_XML.search(body):
        raise SqsError(
            "InvalidMessageContents",
            "Invalid characters found. Valid unicode characters are "
            "#x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to #xFFFD | #x10000 to #x10FFFF",
        )
    attributes = _checked(given.get("MessageAttributes") or {})
    system = _checked(given.get("MessageSystemAttributes") or {})
    if system.keys() - {_TRACE}:
        raise invalid("MessageSystemAttributes", min(system), "Only AWSTraceHeader is known.")
    size = len(body.encode()) + sum(len(k) + len(t) + len(v) for k, (t, v) in attributes.items())
    if size > (most := queue.number("MaximumMessageSize")):
        reason = f"Message must be shorter than {most} bytes."
        told = f"One or more parameters are invalid. Reason: {reason}"
        raise SqsError("InvalidParameterValue", told)
    group, dedup = (_id(given, name) for name in ("MessageGroupId", "MessageDeduplicationId"))
    meta = _as_meta(attributes)
    if _TRACE in system:
        meta[_OWN + _TRACE] = system[_TRACE][1].decode()
    if queue.is_fifo:
        if group is None:
            raise missing("MessageGroupId")
        if dedup is None and queue.says("ContentBasedDeduplication") != "true":
            raise SqsError(
                "InvalidParameterValue",
                "The queue should either have ContentBasedDeduplication "
                "enabled or MessageDeduplicationId provided explicitly",
            )
        if delay_s:
            reason = "The request include parameter that is not valid for this queue type."
            raise invalid("DelaySeconds", delay_s, reason)
        dedup = dedup or sha256(body.encode()).hexdigest()
        scope = group if queue.says("DeduplicationScope") == "messageGroup" else ""
        created = queue.labels.get(f"{_OWN}created", "")
        seed = "\0".join((queue.name, created, scope, dedup)).encode("utf-8", "surrogateescape")
        message_id = str(UUID(bytes=sha256(seed).digest()[:16], version=5))
        meta[_DEDUPLICATION] = dedup
    else:
        if dedup is not None:
            reason = "The request includes a parameter that is not valid for this queue type."
            raise invalid("MessageDeduplicationId", dedup, reason)
        message_id = str(uuid4())
    told = {"MessageId": message_id, "MD5OfMessageBody": _md5(body.encode())}
    if attributes:
        told["MD5OfMessageAttributes"] = digest(attributes)
    if system:
        told["MD5OfMessageSystemAttributes"] = digest(system)
    if delay_s is None:
        delay_s = queue.number("DelaySeconds")
    return Outgoing(message_id, body, meta, group, queue.is_fifo, delay_s or None, told)


def sequenced(message: Outgoing, number: str) -> Outgoing:
    """The message with a sequence number."""
    meta = {**message.meta, _SEQUENCE: number}
    return message._replace(meta=meta, told={**message.told, "SequenceNumber": number})


def _id(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not _ID.fullmatch(str(value)):
        reason = (
            f"{name} can only include alphanumeric and punctuation characters. 1 to 128 in length."
        )
        raise invalid(name, value, reason)
    return None if value is None else str(value)


Attributes = dict[str, tuple[str, bytes]]
"""Type and value of each."""


def _checked(given: Any) -> Attributes:
    """Message attributes of a request. Raises SqsError."""
    if not isinstance(given, dict) or len(given) > ATTRIBUTES_MAX:
        raise SqsError("InvalidParameterValue", f"At most {ATTRIBUTES_MAX} attributes are allowed.")
    found: Attributes = {}
    for name, value in given.items():
        told = value if isinstance(value, dict) else {}
        kind = str(told.get("DataType") or "")
        if not _NAME.fullmatch(name):
            raise invalid(
                "MessageAttributeName",
                name,
                "Can only include alphanumeric characters, hyphens, underscores, or dots.",
            )
        if not kind:
            reason = (
                f"The message attribute '{name}' must contain non-empty message attribute type."
            )
            raise SqsError("InvalidParameterValue", reason)
        matched = _TYPES.fullmatch(kind)
        if matched is None or len(kind) > 256 or _NO_XML.search(kind):
            reason = (
                f"The message attribute '{name}' has an invalid message attribute type, the set of "
                "supported type prefixes is Binary, Number, and String."
            )
            raise SqsError("InvalidParameterValue", reason)
        if matched[1] == "Binary":
            try:
                raw = base64.b64decode(told.get("BinaryValue") or "", validate=True)
            except (ValueError, TypeError, binascii.Error):
                raise invalid("BinaryValue", name, "Not Base64.") from None
        else:
            text = told.get("StringValue")
            if not isinstance(text, str) or _NO_XML.search(text):
                text = ""
            raw = text.encode()
            if raw and matched[1] == "Number" and not _is_number(text):
                reason = f"Can't cast the value of message (user) attribute '{name}' to a number."
                raise SqsError("InvalidParameterValue", reason)
        if not raw:
            reason = f"The message attribute '{name}' must contain a non-empty value of its type."
            raise SqsError("InvalidParameterValue", reason)
        found[name] = kind, raw
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _as_meta(attributes: Attributes) -> dict[str, str]:
    meta = {}
    for name, (kind, raw) in attributes.items():
        is_used = name in LETTER or name.startswith(_OWN)
        meta[_NAMED + name if is_used else name] = (
            base64.b64encode(raw).decode() if kind.startswith("Binary") else raw.decode()
        )
        if kind != "String":
            meta[_TYPE + name] = kind
    return meta


def _of_meta(meta: Mapping[str, str]) -> Attributes:
    found: Attributes = {}
    for key, value in meta.items():
        if key.startswith(_OWN) and not key.startswith(_NAMED):
            continue
        name = key.removeprefix(_NAMED)
        kind = meta.get(_TYPE + name, "String")
        raw = value.encode("utf-8", "replace")
        if kind.startswith("Binary"):
            raw = base64.b64decode(raw)
        if raw:
            found[name] = kind, raw
    return found


def digest(attributes: Attributes) -> str:
    """The MD5 of attributes, as AWS documents it."""
    told = bytearray()
    for name in sorted(attributes):
        kind, raw = attributes[name]
        mark = b"\2" if kind.startswith("Binary") else b"\1"
        for piece, before in ((name.encode(), b""), (kind.encode(), b""), (raw, mark)):
            told += before + len(piece).to_bytes(4, "big") + piece
    return _md5(bytes(told))


def _md5(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()


def incoming(
    message: PeekedMessage,
    handle: str,
    first_s: float,
    wanted: Iterable[str],
    wanted_attributes: Iterable[str],
    source_arn: str | None,
    account: str,
) -> dict[str, Any]:
    """A received message; `wanted` are the names of its attributes of both kinds; `first_s` is when
    it was received first."""
    attributes = _of_meta(message.meta)
    try:
        body = message.data.decode()
    except UnicodeDecodeError:
        body = "\0"
    if _NO_XML.search(body):
        body = base64.b64encode(message.data).decode()
        attributes[_BASE64] = "String", b"base64"
    told: dict[str, Any] = {
        "MessageId": message.id.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        "ReceiptHandle": handle,
        "MD5OfBody": _md5(body.encode()),
        "Body": body,
    }
    meta = message.meta
    system = {
        "ApproximateFirstReceiveTimestamp": str(round(first_s * 1000)),
        "ApproximateReceiveCount": str(message.retry + 1),
        "SenderId": account,
        "SentTimestamp": str(round(message.time * 1000)),
        "MessageGroupId": message.key,
        "MessageDeduplicationId": meta.get(_DEDUPLICATION),
        "SequenceNumber": meta.get(_SEQUENCE),
        "AWSTraceHeader": meta.get(_OWN + _TRACE),
        "DeadLetterQueueSourceArn": source_arn,
    }
    names = {*wanted}
    if shown := {
        name: value
        for name, value in system.items()
        if value is not None and (name in names or "All" in names)
    }:
        told["Attributes"] = shown
    masks = {*wanted_attributes}
    starts = tuple(mask[:-2] for mask in masks if mask.endswith(".*"))
    every = bool(masks & {"All", ".*"})
    if some := {
        name: value
        for name, value in attributes.items()
        if every or name in masks or name == _BASE64 or (starts and name.startswith(starts))
    }:
        told["MessageAttributes"] = {name: _shown(*value) for name, value in some.items()}
        told["MD5OfMessageAttributes"] = digest(some)
    return told


def _shown(kind: str, raw: bytes) -> dict[str, str]:
    if kind.startswith("Binary"):
        return {"BinaryValue": base64.b64encode(raw).decode(), "DataType": kind}
    return {"StringValue": raw.decode("utf-8", "replace"), "DataType": kind}
