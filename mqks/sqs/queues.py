"""Queues as SQS sees them: attributes and tags, and where the broker has them.

The one rule: what the broker does for an attribute is in the policy of the queue; the rest are
labels, `sqs.` and the name of the attribute. Tags are the other labels.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from mqks.sqs.errors import SqsError, invalid, missing

ACCOUNT: Final = "000000000000"
FIFO: Final = ".fifo"
OWN: Final = "sqs."
"""Begins the labels of attributes."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,75}(?:\.fifo)?|[A-Za-z0-9_-]{76,80}")
_TAGS_MAX: Final = 50
RANGES: Final = {
    "DelaySeconds": (0, 900, 0),
    "KmsDataKeyReusePeriodSeconds": (60, 86_400, 300),
    "MaximumMessageSize": (1024, 1024 * 1024, 1024 * 1024),
    "MessageRetentionPeriod": (60, 1_209_600, 345_600),
    "ReceiveMessageWaitTimeSeconds": (0, 20, 0),
    "VisibilityTimeout": (0, 43_200, 30),
}
"""Attributes that are numbers: the least, the most and the default."""
WORDS: Final = {
    "ContentBasedDeduplication": ("true", "false"),
    "DeduplicationScope": ("queue", "messageGroup"),
    "FifoThroughputLimit": ("perQueue", "perMessageGroupId"),
    "SqsManagedSseEnabled": ("true", "false"),
}
_OF_FIFO: Final = ("ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit")
_SECONDS: Final = {"MessageRetentionPeriod": "ttl_s", "VisibilityTimeout": "ack_timeout_s"}
"""What is a time in the policy."""
_TEXTS: Final = ("KmsMasterKeyId", "RedriveAllowPolicy")
_COUNTS: Final = (
    *("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesDelayed"),
    "ApproximateNumberOfMessagesNotVisible",
)
KNOWN: Final = {
    *(*RANGES, *WORDS, *_TEXTS, *_COUNTS, "RedrivePolicy", "Policy", "FifoQueue", "QueueArn"),
    *("CreatedTimestamp", "LastModifiedTimestamp"),
}


class Queue(NamedTuple):
    name: str
    policy: Mapping[str, Any]
    labels: Mapping[str, str]
    row: Mapping[str, Any]
    """As `stats queue` tells it."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Queue":
        policy = {name: told["value"] for name, told in row["policy"].items()}
        pairs = parse_qsl(policy.pop("labels", ""), True, errors="surrogateescape")
        return cls(row["name"], policy, dict(pairs), row)

    @property
    def is_fifo(self) -> bool:
        return self.policy.get("ordered") == "key"

    @property
    def tags(self) -> dict[str, str]:
        return {key: value for key, value in self.labels.items() if not key.startswith(OWN)}

    def number(self, attribute: str) -> int:
        if (field := _SECONDS.get(attribute)) is None:
            return int(self.labels.get(OWN + attribute, RANGES[attribute][2]))
        seconds = self.policy.get(field)
        if seconds is None:  # Without a TTL, a message stays.
            return RANGES[attribute][1 if attribute == "MessageRetentionPeriod" else 2]
        return int(min(seconds, RANGES[attribute][1]))

    def says(self, attribute: str) -> str:
        return self.labels.get(OWN + attribute, WORDS[attribute][attribute != "DeduplicationScope"])

    def attributes(self, region: str) -> dict[str, str]:
        """All of them, as text."""
        row, labels = self.row, self.labels
        scheduled, leased = row["scheduled"], row["leased"]
        told = {name: str(self.number(name)) for name in RANGES}
        if "sqs.KmsMasterKeyId" not in labels:
            del told["KmsDataKeyReusePeriodSeconds"]
        told |= {
            "ApproximateNumberOfMessages": str(row["ready"]),
            "ApproximateNumberOfMessagesDelayed": str(scheduled - leased),
            "ApproximateNumberOfMessagesNotVisible": str(leased + row["unacked"]),
            "CreatedTimestamp": labels.get(f"{OWN}created", "0").partition(".")[0],
            "LastModifiedTimestamp": labels.get(f"{OWN}modified", "0").partition(".")[0],
            "QueueArn": arn(region, self.name),
            "SqsManagedSseEnabled": self.says("SqsManagedSseEnabled"),
        }
        told |= {name: labels[OWN + name] for name in _TEXTS if OWN + name in labels}
        if self.is_fifo:
            told["FifoQueue"] = "true"
            told["ContentBasedDeduplication"] = self.says("ContentBasedDeduplication")
            told["DeduplicationScope"] = self.says("DeduplicationScope")
            told["FifoThroughputLimit"] = labels.get(f"{OWN}FifoThroughputLimit", "perQueue")
        if (target := self.policy.get("dead_letters")) is not None:
            policy = {"deadLetterTargetArn": arn(region, target)}
            policy["maxReceiveCount"] = self.policy.get("deliveries", 0)
            told["RedrivePolicy"] = json.dumps(policy)
        return told


def arn(region: str, name: str) -> str:
    return f"arn:aws:sqs:{region}:{ACCOUNT}:{name}"


def of_arn(told: object, parameter: str) -> str:
    """The queue of an ARN. Raises SqsError."""
    parts = str(told).split(":", 5)
    if len(parts) != 6 or parts[:3] != ["arn", "aws", "sqs"] or not parts[5]:
        raise invalid(parameter, told, "Not an ARN of a queue.")
    return parts[5]


def url(base: str, name: str) -> str:
    return f"{base}/{ACCOUNT}/{quote(name, safe='', errors='surrogateescape')}"


def of_url(told: object) -> str:
    """The queue of a URL, or of its path, or a name. Raises SqsError."""
    if not isinstance(told, str) or not told:
        raise missing("QueueUrl")
    try:
        path = urlsplit(told).path
    except ValueError:
        path = ""
    return unquote(path.rstrip("/").rpartition("/")[2], errors="surrogateescape")


def check_name(name: object, attributes: Mapping[str, Any]) -> str:
    """The name of a new queue. Raises SqsError."""
    if not isinstance(name, str) or not name:
        raise missing("QueueName")
    wants_fifo = str(attributes.get("FifoQueue", "false")).lower() == "true"
    if not _NAME.fullmatch(name) or name.endswith(FIFO) != wants_fifo:
        ends = "end with .fifo suffix and " if wants_fifo else ""
        raise SqsError(
            "InvalidParameterValue",
            f"The name of a {'FIFO' if wants_fifo else 'standard'} queue must {ends}only include "
            "alphanumeric characters, hyphens, or underscores, and be 1 to 80 in length.",
        )
    return name


def check(attributes: Mapping[str, Any], *, is_fifo: bool) -> dict[str, str]:
    """Attributes that are set, as text. Raises SqsError."""
    if not isinstance(attributes, dict):
        raise SqsError("InvalidAttributeValue", "Attributes must be an object.")
    for name, value in attributes.items():
        text = str(value)
        if name not in KNOWN or name in _COUNTS or name == "QueueArn":
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {name!s:.100}.")
        if name in _OF_FIFO and not is_fifo:
            reason = f"You can specify the {name} only when FifoQueue is set to true."
            raise SqsError("InvalidAttributeName" if text else "InvalidAttributeValue", reason)
        wrong = False
        if name in RANGES and (text or name != "KmsDataKeyReusePeriodSeconds"):
            low, high, _ = RANGES[name]
            wrong = not text.isdecimal() or len(text) > 9 or not low <= int(text) <= high
        if name in WORDS:
            wrong = text not in WORDS[name]
        if name == "FifoQueue":
            wrong = text != ("true" if is_fifo else "false")
        if wrong:
            told = f"Invalid value for the parameter {name}."
            raise SqsError("InvalidAttributeValue", told)
        if name == "Policy" and text:
            raise SqsError("UnsupportedOperation", NO_POLICY)
        if name == "RedriveAllowPolicy" and text:
            _check_allow(text)
    return {name: str(value) for name, value in attributes.items()}


NO_POLICY: Final = "Permissions are those of users: mqks user grant, see docs/security.md."


def _check_allow(text: str) -> None:
    try:
        told = json.loads(text)
        kind, arns = told["redrivePermission"], told.get("sourceQueueArns")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise invalid("RedriveAllowPolicy", text, "Not a redrive allow policy.") from None
    if kind not in ("allowAll", "denyAll", "byQueue"):
        raise invalid("RedriveAllowPolicy", text, "redrivePermission is unknown.")
    if (kind == "byQueue") != bool(arns) or (arns and not 0 < len(arns) <= 10):
        raise invalid("RedriveAllowPolicy", text, "sourceQueueArns must be 1 to 10 with byQueue.")


def redrive(text: str) -> tuple[str, int]:
    """The dead-letter queue and the deliveries of a redrive policy. Raises SqsError."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise SqsError("InvalidAttributeValue", "Redrive policy is not a valid JSON map")
    for name in ("deadLetterTargetArn", "maxReceiveCount"):
        if name not in told:
            reason = f"Redrive policy does not contain mandatory attribute: {name}."
            raise invalid("RedrivePolicy", text, reason)
    count = str(told["maxReceiveCount"])
    if not count.isdecimal() or not 1 <= int(count[:9]) <= 1000:
        reason = "Invalid value for maxReceiveCount: must be 1 to 1000."
        raise invalid("RedrivePolicy", text, reason)
    return of_arn(told["deadLetterTargetArn"], "RedrivePolicy"), int(count)


def admits(target: Queue, source: str) -> bool:
    """Whether this dead-letter queue may be that of the source."""
    told = json.loads(target.labels.get(f"{OWN}RedriveAllowPolicy") or "{}")
    arns = map(str, told.get("sourceQueueArns", ()))
    kind = told.get("redrivePermission", "allowAll")
    return kind == "allowAll" or (kind == "byQueue" and source in (a.split(":")[-1] for a in arns))


def changed(attributes: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, Any]:
    """What to set in the policy of a queue for these attributes; `labels` are those it has."""
    policy: dict[str, Any] = {}
    own = {**labels, f"{OWN}modified": f"{time.time():.6f}"}
    own.setdefault(f"{OWN}created", own[f"{OWN}modified"])
    for name, text in attributes.items():
        if (field := _SECONDS.get(name)) is not None:
            policy[field] = int(text) or 1e-6
        elif name == "RedrivePolicy":
            target, count = redrive(text) if text else (None, None)
            policy |= {"dead_letter_queue": target, "deliveries": count}
        elif name == "FifoQueue":
            policy["ordered"] = "key" if text == "true" else None
        elif text:
            own[OWN + name] = text
        else:
            own.pop(OWN + name, None)
    return {**policy, "labels": encoded(own)}


def encoded(labels: Mapping[str, str]) -> str:
    try:
        return urlencode(labels, quote_via=quote, errors="surrogateescape")
    except UnicodeEncodeError:
        raise SqsError("InvalidParameterValue", "Half a surrogate pair is no character.") from None


def check_tags(tags: Any, present: int = 0) -> dict[str, str]:
    """Raises SqsError."""
    if not isinstance(tags, dict):
        raise missing("Tags")
    for key, value in tags.items():
        if key.startswith((OWN, "aws:")) or not 0 < len(key) <= 128 or len(str(value)) > 256:
            raise invalid("Tags", key, "Not a key, or a value, of a tag.")
    if len(tags) + present > _TAGS_MAX:
        raise SqsError("InvalidParameterValue", f"A queue has at most {_TAGS_MAX} tags.")
    return {key: str(value) for key, value in tags.items()}
