"""Messages as SQS sees them, and as the broker has them.

The one rule: the data of a message are its body, and its attributes are its message attributes, in
both directions. What else SQS needs is in attributes that begin with `sqs.`.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from contextlib import suppress
from hashlib import md5, sha256
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode
from uuid import UUID, uuid4

from mqks.client.messages import PeekedMessage
from mqks.protocol.meta import LETTER
from mqks.sqs.errors import SqsError, invalid, missing, wrong
from mqks.sqs.queues import ACCOUNT, OWN, SqsQueue, arn
from mqks.sqs.wire import NO_XML

ATTRIBUTES_MAX: Final = 10
PLAIN_BYTES_MAX: Final = 3072
"""Longer ones, percent-encoded, are behind the body: the broker has 4096 for all attributes."""
SEQUENCE: Final = f"{OWN}sequence"
_PACKED: Final = f"{OWN}attributes-bytes"
_DEDUPLICATION: Final = f"{OWN}deduplication-id"
_NAMED, _TYPE = f"{OWN}attribute.", f"{OWN}type."
"""Begin attributes whose names the broker has a use for, and types other than `String`."""
_TRACE: Final = "AWSTraceHeader"
_NAME: Final = re.compile(r"(?!(?i:aws|amazon)\.)(?!\.)(?!.*(?:\.\.|\.$))[\w.-]{1,256}")
_KIND: Final = re.compile(r"(String|Number|Binary)(?:\.[A-Za-z0-9_.-]*)?")
_ID: Final = re.compile(r"[!-~]{1,128}")
Attributes = dict[str, tuple[str, bytes]]
"""Type and value of each."""


class Outgoing(NamedTuple):
    """A message that is sent: what `publish` needs, and the answer."""

    id: str
    body: bytes
    meta: dict[str, str]
    group: str | None
    delay_s: int | None
    told: dict[str, Any]


def check_fifo(queue: SqsQueue, given: Mapping[str, Any]) -> None:
    """Check what a FIFO queue needs. Raises SqsError."""
    if not given.get("MessageGroupId"):
        raise missing("MessageGroupId")
    by_content = queue.word("ContentBasedDeduplication") == "true"
    if not by_content and not given.get("MessageDeduplicationId"):
        raise wrong(
            "The queue should either have ContentBasedDeduplication enabled or "
            "MessageDeduplicationId provided explicitly"
        )


def size_of(given: Mapping[str, Any]) -> int:
    """Bytes of a message as they count for the limits, whatever it is."""
    texts, size = [str(given.get("MessageBody", ""))], 0
    for name, value in (given.get("MessageAttributes") or {}).items():
        told = value if isinstance(value, dict) else {}
        texts += name, *(str(told.get(key) or "") for key in ("DataType", "StringValue"))
        size += len(str(told.get("BinaryValue") or "").rstrip("=")) * 3 // 4
    return size + sum(len(text.encode("utf-8", "replace")) for text in texts)


def outgoing(queue: SqsQueue, given: Mapping[str, Any], delay_s: int | None) -> Outgoing:
    """Check a message. Raises SqsError."""
    body = given.get("MessageBody")
    if not isinstance(body, str) or not body:
        raise missing("MessageBody")
    if NO_XML.search(body):
        raise SqsError("InvalidMessageContents", "The body has characters that XML cannot have.")
    data = body.encode()
    attributes = _checked(given.get("MessageAttributes"))
    system = _checked(given.get("MessageSystemAttributes"))
    if [*system] not in ([], [_TRACE]) or any(kind != "String" for kind, _ in system.values()):
        reason = f"Only {_TRACE} is possible, as a String."
        raise invalid("MessageSystemAttributes", min(system), reason)
    size = size_of(given)
    if size > (most := queue.number("MaximumMessageSize")):
        are_wrong = "cannot be validated" if "Id" in given else "are invalid"
        reason = f"Message must be shorter than {most} bytes."
        raise wrong(f"One or more parameters {are_wrong}. Reason: {reason}")
    group, dedup = (_id(given, name) for name in ("MessageGroupId", "MessageDeduplicationId"))
    meta, message_id = _as_meta(attributes), str(uuid4())
    stored = data
    is_long = size - len(data) > PLAIN_BYTES_MAX
    if is_long or len(urlencode(meta, quote_via=quote)) > PLAIN_BYTES_MAX:
        stored += packed(attributes)
        meta = {_PACKED: str(len(stored) - len(data))}
    if _TRACE in system:
        meta[OWN + _TRACE] = system[_TRACE][1].decode()
    not_valid = "The request include parameter that is not valid for this queue type."
    if queue.is_fifo:
        check_fifo(queue, given)
        if delay_s:
            raise invalid("DelaySeconds", delay_s, not_valid)
        dedup = dedup or sha256(data).hexdigest()
        scope = group if queue.word("DeduplicationScope") == "messageGroup" else None
        seed = repr((queue.name, queue.window, scope, dedup))
        message_id = str(UUID(bytes=sha256(seed.encode()).digest()[:16], version=5))
        meta[_DEDUPLICATION] = dedup
    elif dedup is not None:
        raise invalid("MessageDeduplicationId", dedup, not_valid)
    told = {"MessageId": message_id, "MD5OfMessageBody": _md5(data)}
    if attributes:
        told["MD5OfMessageAttributes"] = _md5(packed(attributes))
    if system:
        told["MD5OfMessageSystemAttributes"] = _md5(packed(system))
    delay_s = queue.number("DelaySeconds") if delay_s is None else delay_s
    return Outgoing(message_id, stored, meta, group, delay_s or None, told)


def _id(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not _ID.fullmatch(str(value)):
        reason = (
            f"{name} can only include alphanumeric and punctuation characters. 1 to 128 in length."
        )
        raise invalid(name, value, reason)
    return None if value is None else str(value)


def _checked(given: Any) -> Attributes:
    """Message attributes of a request. Raises SqsError."""
    found: Attributes = {}
    if given and (not isinstance(given, dict) or len(given) > ATTRIBUTES_MAX):
        raise wrong(f"At most {ATTRIBUTES_MAX} attributes are allowed.")
    for name, value in (given or {}).items():
        told = value if isinstance(value, dict) else {}
        kind, which = str(told.get("DataType") or ""), f"The message attribute '{name}'"
        if not _NAME.fullmatch(name):
            allowed = "A-Z, a-z, 0-9, underscore (_), hyphen (-), and period (.) characters."
            which = f"The message attribute name '{name}' is invalid."
            raise wrong(f"{which} Attribute name can contain {allowed}")
        if not kind:
            raise wrong(f"{which} must contain non-empty message attribute type.")
        if (base := _KIND.fullmatch(kind)) is None or len(kind) > 256:
            supported = "the set of supported type prefixes is Binary, Number, and String."
            raise wrong(f"{which} has an invalid message attribute type, {supported}")
        text = str(told.get("BinaryValue" if base[1] == "Binary" else "StringValue") or "")
        try:
            raw = b64decode(text, validate=True) if base[1] == "Binary" else text.encode()
            if base[1] == "Number" and raw:
                float(text)
        except ValueError:
            raise wrong(f"Can't cast the value of {which[4:]} to a {base[1].lower()}.") from None
        if not raw or NO_XML.search(text):
            which = f"Message (user) attribute '{name}'"
            raise wrong(f"{which} must contain a non-empty value of type '{base[1]}'.")
        found[name] = kind, raw
    return found


def _as_meta(attributes: Attributes) -> dict[str, str]:
    meta = {}
    for name, (kind, raw) in attributes.items():
        is_used = name in LETTER or name.startswith(OWN)
        is_binary = kind.startswith("Binary")
        text = b64encode(raw).decode() if is_binary else raw.decode()
        meta[_NAMED + name if is_used else name] = text
        if kind != "String":
            meta[_TYPE + name] = kind
    return meta


def _of_meta(meta: Mapping[str, str]) -> Attributes:
    found: Attributes = {}
    for key, value in meta.items():
        if value and (key.startswith(_NAMED) or not key.startswith(OWN)):
            name, raw = key.removeprefix(_NAMED), value.encode("utf-8", "surrogateescape")
            kind = meta.get(_TYPE + name, "String")
            if kind.startswith("Binary"):
                with suppress(ValueError):  # Those of others are any text.
                    raw = b64decode(raw, validate=True)
            elif NO_XML.search(value):
                kind = "Binary"
            found[NO_XML.sub("\ufffd", name)] = NO_XML.sub("\ufffd", kind), raw
    return found


def packed(attributes: Attributes) -> bytes:
    """Attributes as AWS documents it for their MD5."""
    told = b""
    for name, (kind, raw) in sorted(attributes.items()):
        mark = b"\2" if kind.startswith("Binary") else b"\1"
        for before, piece in ((b"", name.encode()), (b"", kind.encode()), (mark, raw)):
            told += before + len(piece).to_bytes(4, "big") + piece
    return told


def _unpacked(told: bytes) -> Attributes:
    """Packed attributes; what others have written there may be none."""
    found, at = Attributes(), 0

    def piece() -> bytes:
        nonlocal at
        at += 4 + (size := int.from_bytes(told[at : at + 4], "big"))
        return told[at - size : at]

    for _ in range(ATTRIBUTES_MAX):
        name, kind = piece().decode("utf-8", "replace"), piece().decode("utf-8", "replace")
        at += 1
        raw = piece()
        is_text = not NO_XML.search(raw.decode("utf-8", "replace"))
        base = _KIND.fullmatch(kind) if _NAME.fullmatch(name) else None
        if base and (is_text or base[1] == "Binary"):
            found[name] = kind, raw
    return found


def _md5(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()


def incoming(
    message: PeekedMessage,
    handle: str,
    first_s: float,
    region: str,
    wanted: Collection[str],
    masks: Collection[str],
) -> dict[str, Any]:
    """A received message with the `wanted` attributes, and message attributes that match `masks`;
    `first_s` is when it was received first."""
    meta, letter = message.meta, message.dead_letter
    attributes, data = _of_meta(meta), message.data
    size = int(text) if (text := meta.get(_PACKED, "")).isdecimal() and len(text) < 8 else 0
    if 0 < size <= len(data):
        attributes |= _unpacked(data[-size:])
        data = data[:-size]
    try:
        body = data.decode()
    except UnicodeDecodeError:
        body = "\0"
    if is_encoded := NO_XML.search(body) is not None:
        body = b64encode(data).decode()
    system = {
        "ApproximateFirstReceiveTimestamp": str(round(first_s * 1000)),
        "ApproximateReceiveCount": str(message.retry + 1 + (letter.tries if letter else 0)),
        "SenderId": ACCOUNT,
        "SentTimestamp": str(round(message.time * 1000)),
        "MessageGroupId": message.key,
        "MessageDeduplicationId": meta.get(_DEDUPLICATION),
        "SequenceNumber": meta.get(SEQUENCE),
        _TRACE: meta.get(OWN + _TRACE),
        "DeadLetterQueueSourceArn": arn(region, letter.queue) if letter else None,
    }
    shown = {k: v for k, v in system.items() if v and (k in wanted or "All" in wanted)}
    starts = tuple(mask[:-2] for mask in masks if mask.endswith(".*"))
    every = "All" in masks or "*" in masks
    some = {k: v for k, v in attributes.items() if every or k in masks or k.startswith(starts)}
    if is_encoded:
        some["mqks.encoding"] = "String", b"base64"
    told = {
        "MessageId": message.id.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        "ReceiptHandle": handle,
        "MD5OfBody": _md5(body.encode()),
        "Body": body,
        "Attributes": shown,
        "MD5OfMessageAttributes": _md5(packed(some)) if some else None,
        "MessageAttributes": {name: _shown(*value) for name, value in some.items()},
    }
    return {key: value for key, value in told.items() if value or key == "Body"}


def _shown(kind: str, raw: bytes) -> dict[str, str]:
    if kind.startswith("Binary"):
        return {"BinaryValue": b64encode(raw).decode(), "DataType": kind}
    return {"StringValue": raw.decode("utf-8", "replace"), "DataType": kind}
