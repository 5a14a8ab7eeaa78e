"""Queues as SQS sees them: attributes and tags, and where the broker has them.

The one rule: what the broker does for an attribute is in the policy of the queue; the rest are
labels, `sqs.` and the name of the attribute. Tags are the other labels.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from mqks.sqs import policies
from mqks.sqs.errors import SqsError, invalid, missing, no_queue, wrong

ACCOUNT: Final = "000000000000"
FIFO: Final = ".fifo"
OWN: Final = "sqs."
"""Begins the labels of attributes."""
PURGED: Final = f"{OWN}purged"
"""The label with the time of the last purge of a FIFO queue."""
TAGS_MAX: Final = 50
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.fifo)?")
RANGES: Final = {
    "DelaySeconds": (0, 900, 0),
    "KmsDataKeyReusePeriodSeconds": (60, 86_400, 300),
    "MaximumMessageSize": (1024, 1024 * 1024, 1024 * 1024),
    "MessageRetentionPeriod": (1, 1_209_600, 345_600),
    "ReceiveMessageWaitTimeSeconds": (0, 20, 0),
    "VisibilityTimeout": (0, 43_200, 30),
}
"""Attributes that are numbers: the least, the most and the default."""
_SECONDS: Final = {"MessageRetentionPeriod": "ttl_s", "VisibilityTimeout": "ack_timeout_s"}
"""What is a time in the policy."""
_OF_FIFO: Final = {
    "ContentBasedDeduplication": ("false", "true"),
    "DeduplicationScope": ("queue", "messageGroup"),
    "FifoThroughputLimit": ("perQueue", "perMessageGroupId"),
}
_HIDDEN: Final = ("FifoQueue", "ContentBasedDeduplication")
"""Attributes that a standard queue does not know."""
_KMS, _MANAGED = "KmsMasterKeyId", "SqsManagedSseEnabled"
"""Two kinds of encryption, of which a queue has one: here they are only told."""
_WORDS: Final = {**_OF_FIFO, _MANAGED: ("true", "false")}
"""Attributes that are words; the first is the default."""
_TEXTS: Final = (_KMS, "Policy", "RedriveAllowPolicy")
_SET: Final = {*RANGES, *_WORDS, *_TEXTS, "RedrivePolicy", "FifoQueue"}
KNOWN: Final = {
    *(*_SET, "All", "QueueArn", "CreatedTimestamp", "LastModifiedTimestamp"),
    *(f"ApproximateNumberOfMessages{which}" for which in ("", "Delayed", "NotVisible")),
}
ENCODED_MAX: Final = 64 * 1024
"""Longest name in a URL or token that is decoded; that takes 6 ms."""


class SqsQueue(NamedTuple):
    name: str
    policy: Mapping[str, Any]
    labels: Mapping[str, str]
    row: Mapping[str, Any]
    """As `stats queue` tells it."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "SqsQueue":
        policy = {name: told["value"] for name, told in row["policy"].items()}
        pairs = parse_qsl(policy.pop("labels", ""), True, errors="surrogateescape")
        return cls(row["name"], policy, dict(pairs), row)

    @property
    def is_fifo(self) -> bool:
        return "ordered" in self.policy

    @property
    def tags(self) -> dict[str, str]:
        return {key: value for key, value in self.labels.items() if not key.startswith(OWN)}

    @property
    def window(self) -> str:
        """When its deduplication window began: when it was purged last, or created."""
        return self.labels.get(PURGED) or self.created

    @property
    def created(self) -> str:
        """When SQS has created it, to the microsecond, if it has."""
        return self.labels.get(f"{OWN}created", "")

    def number(self, attribute: str) -> int:
        _, most, default = RANGES[attribute]
        if attribute not in _SECONDS:
            text = self.labels.get(OWN + attribute, "")
            return int(text) if text.isdecimal() else default
        # Without a TTL, a message stays: about the most.
        unset = most if attribute == "MessageRetentionPeriod" else default
        return int(min(self.policy.get(_SECONDS[attribute], unset), most))

    def word(self, attribute: str) -> str:
        is_other = attribute == _MANAGED and OWN + _KMS in self.labels
        return self.labels.get(OWN + attribute, _WORDS[attribute][is_other])

    def attributes(self, region: str) -> dict[str, str]:
        """All of them, as text."""
        row, labels = self.row, self.labels
        told = {
            **{name: self.number(name) for name in RANGES if not name.startswith("Kms")},
            **{name: labels[OWN + name] for name in _TEXTS if OWN + name in labels},
            "ApproximateNumberOfMessages": row["ready"],
            "ApproximateNumberOfMessagesDelayed": row["scheduled"] - row["leased"],
            "ApproximateNumberOfMessagesNotVisible": row["leased"] + row["unacked"],
            "CreatedTimestamp": (self.created or "0").partition(".")[0],
            "LastModifiedTimestamp": labels.get(f"{OWN}modified", "0").partition(".")[0],
            "QueueArn": arn(region, self.name),
            _MANAGED: self.word(_MANAGED),
        }
        if _KMS in told:
            told["KmsDataKeyReusePeriodSeconds"] = self.number("KmsDataKeyReusePeriodSeconds")
        if self.is_fifo:
            told |= {"FifoQueue": "true", **{name: self.word(name) for name in _OF_FIFO}}
        if (target := self.policy.get("dead_letters")) is not None:
            count = self.policy.get("deliveries", 0)
            policy = {"deadLetterTargetArn": arn(region, target), "maxReceiveCount": count}
            told["RedrivePolicy"] = json.dumps(policy)
        return {name: str(value) for name, value in told.items()}

    def admits(self, source: str) -> bool:
        """Whether it may be the dead-letter queue of the source."""
        name = "RedriveAllowPolicy"
        told = _json(name, self.labels.get(OWN + name, "{}"))
        allowed = [of_arn(each, name) for each in told.get("sourceQueueArns", ())]
        return told.get("redrivePermission", "allowAll") == "allowAll" or source in allowed


def arn(region: str, name: str) -> str:
    return f"arn:aws:sqs:{region}:{ACCOUNT}:{name}"


def of_arn(told: object, parameter: str) -> str:
    """The queue of an ARN. Raises SqsError."""
    parts = str(told).split(":", 5)
    if parts[0] != "arn" or not parts[5:]:
        raise invalid(parameter, told, "Not an ARN of a queue.")
    return parts[5]


def url(base: str, name: str) -> str:
    return f"{base}/{ACCOUNT}/{quote(name, safe='', errors='surrogateescape')}"


def of_url(told: object) -> str:
    """The queue of a URL, or of its path, or a name. Raises SqsError."""
    if not isinstance(told, str) or not told.strip("/"):
        raise missing("QueueUrl")
    _, is_url, path = told.rpartition("://")
    name = (path.partition("/")[2] if is_url else path).rpartition("/")[2]
    if not name or len(name) > ENCODED_MAX:
        raise no_queue()
    return unquote(name, errors="surrogateescape")


def check_name(name: object, *, is_fifo: bool) -> str:
    """The name of a new queue. Raises SqsError."""
    text = str(name or "")
    if not _NAME.fullmatch(text) or len(text) > 80 or text.endswith(FIFO) != is_fifo:
        only = "only include alphanumeric characters, hyphens, or underscores"
        if is_fifo:
            ends = "must end with .fifo suffix and be 1 to 80 in length."
            raise wrong(f"The name of a FIFO queue can {only}, {ends}")
        raise wrong(f"Can {only}. 1 to 80 in length")
    return text


def check(given: Any, *, is_fifo: bool) -> dict[str, str]:
    """Attributes that are set, as text, Python's for truth values, too. Raises SqsError."""
    found = {str(name).strip(): str(value) for name, value in (given or {}).items()}
    found |= {name: text.lower() for name, text in found.items() if text in ("True", "False")}
    if found.get(_KMS) and found.get(_MANAGED) == "true":
        reason = "You can use one type of server-side encryption (SSE) at one time."
        both = "You can either enable KMS SSE or SQS SSE."
        raise SqsError("InvalidAttributeName", f"{reason} {both}")
    for name, text in found.items():
        if name not in _SET or (name in _HIDDEN and not is_fifo):
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {name:.100}.")
        if name in _OF_FIFO and not is_fifo:
            reason = f"You can specify the {name} only when FifoQueue is set to true."
            raise SqsError("InvalidAttributeName", reason)
        low, high, _ = RANGES.get(name, (0, 0, 0))
        is_number = text.isdecimal() and len(text) < 10 and low <= int(text) <= high
        is_type = name == "FifoQueue"
        words = ("true",) if is_type else _WORDS.get(name, (text,))
        if text not in words or (name in RANGES and not is_number):
            why = " Reason: Modifying queue type is not supported." if is_type else ""
            raise SqsError("InvalidAttributeValue", f"Invalid value for the parameter {name}.{why}")
        if name == "Policy" and text:
            policies.checked(text)
        if name == "RedriveAllowPolicy" and text:
            told = _json(name, text, "redrivePermission")
            kind, arns = told["redrivePermission"], told.get("sourceQueueArns", [])
            most = {"allowAll": 0, "denyAll": 0, "byQueue": 10}.get(str(kind), -1)
            if not isinstance(arns, list) or not bool(most) <= len(arns) <= most:
                raise invalid(name, text, "Not a redrive allow policy.")
            for each in arns:
                of_arn(each, name)
    return found


def _json(attribute: str, text: str, *names: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise SqsError("InvalidAttributeValue", f"{attribute} is not a valid JSON map")
    for name in names:
        if name not in told:
            reason = f"Redrive policy does not contain mandatory attribute: {name}."
            raise invalid(attribute, text, reason)
    return told


def redrive(text: str) -> tuple[str, int]:
    """The dead-letter queue and the deliveries of a redrive policy. Raises SqsError."""
    told = _json("RedrivePolicy", text, "deadLetterTargetArn", "maxReceiveCount")
    count = str(told["maxReceiveCount"])
    if not count.isdecimal() or not 1 <= int(count[:9]) <= 1000:
        raise invalid("RedrivePolicy", text, "maxReceiveCount must be 1 to 1000.")
    return of_arn(told["deadLetterTargetArn"], "RedrivePolicy"), int(count)


def changed(attributes: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, Any]:
    """The policy of a queue with these attributes; `labels` are those it has."""
    policy: dict[str, Any] = {}
    now = f"{time.time():.6f}"
    own = {f"{OWN}created": now, **labels, f"{OWN}modified": now}
    if attributes.get(_KMS):
        own.pop(OWN + _MANAGED, None)
    for name, text in attributes.items():
        if name in _SECONDS:
            policy[_SECONDS[name]] = int(text) or 1e-6
        elif name == "RedrivePolicy":
            target, count = redrive(text) if text else (None, None)
            policy |= {"dead_letter_queue": target, "deliveries": count}
        elif name == "FifoQueue":
            policy["ordered"] = "key"
        elif text:
            own[OWN + name] = text
        else:
            own.pop(OWN + name, None)
    return {**policy, "labels": encoded(own)}


def encoded(labels: Mapping[str, str]) -> str:
    try:
        return urlencode(labels, quote_via=quote, errors="surrogateescape")
    except UnicodeEncodeError:
        raise wrong("Half a surrogate pair is no character.") from None


def check_tags(given: Any, queue: str, present: Mapping[str, str]) -> dict[str, str]:
    """All tags of a queue with these. Raises SqsError."""
    for key, value in given.items():
        if key.startswith((OWN, "aws:")) or not 0 < len(key) <= 128 or len(str(value)) > 256:
            raise invalid("Tags", key, "Not a key, or a value, of a tag.")
    tags = {**present, **{key: str(value) for key, value in given.items()}}
    if len(tags) > TAGS_MAX:
        raise wrong(f"Too many tags added for queue {queue}.")
    return tags
