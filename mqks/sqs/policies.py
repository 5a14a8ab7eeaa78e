"""Access policies of queues, which are kept and shown.

The one rule: nothing here decides about access, permissions are those of users. So a policy may
only allow: what it promises to others they do not get, but one that denies would seem to protect.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from mqks.sqs.errors import SqsError, invalid, missing

POLICY: Final = "sqs.Policy"
"""The label."""
ACTIONS_MAX: Final = 7
_SHARED: Final = (
    *("*", "ChangeMessageVisibility", "DeleteMessage", "GetQueueAttributes", "GetQueueUrl"),
    *("ListDeadLetterSourceQueues", "PurgeQueue", "ReceiveMessage", "SendMessage"),
)
"""What may be allowed to others."""


def checked(text: str) -> dict[str, Any]:
    """A policy, its statements as a list. Raises SqsError."""
    try:
        policy = json.loads(text)
        found = policy["Statement"]
        policy["Statement"] = found if isinstance(found, list) else [found]
        effects = {each["Effect"] for each in policy["Statement"]}
    except (ValueError, LookupError, TypeError, RecursionError):
        effects = set()
    if not effects:
        raise SqsError("InvalidAttributeValue", "Invalid value for the parameter Policy.")
    if effects != {"Allow"}:
        reason = "A policy that denies has no effect here: permissions are those of users."
        raise SqsError("UnsupportedOperation", reason)
    return dict(policy)


def allowed(
    labels: Mapping[str, str], arn: str, label: str, accounts: list[str], actions: list[str]
) -> dict[str, str]:
    """The labels of a queue with one more statement in its policy. Raises SqsError."""
    empty: dict[str, Any] = {"Version": "2008-10-17", "Id": f"{arn}/SQSDefaultPolicy"}
    policy = checked(labels[POLICY]) if POLICY in labels else {**empty, "Statement": []}
    if any(each.get("Sid") == label for each in policy["Statement"]):
        raise invalid("Label", label, "Already exists.")
    if not actions:
        raise missing("Actions")
    for action in actions:
        if action not in _SHARED:
            reason = "Only the queue owner is allowed to invoke this action."
            raise invalid("ActionName", f"SQS:{action}", reason)
    if not accounts:
        raise invalid("PrincipalId", accounts, "Unable to verify.")
    if len(actions) > ACTIONS_MAX:
        reason = f"{len(actions)} Actions were found, maximum allowed is {ACTIONS_MAX}."
        raise SqsError("OverLimit", reason, 403)
    principals = [f"arn:aws:iam::{account}:root" for account in accounts]
    names = [f"SQS:{action}" for action in actions]
    more = {
        "Sid": label,
        "Effect": "Allow",
        "Principal": {"AWS": principals if len(principals) > 1 else principals[0]},
        "Action": names if len(names) > 1 else names[0],
        "Resource": arn,
    }
    policy["Statement"].append(more)
    return {**labels, POLICY: json.dumps(policy)}


def without(labels: Mapping[str, str], label: str) -> dict[str, str]:
    """The labels without a statement; without a policy if nothing is left. Raises SqsError."""
    policy = checked(labels[POLICY]) if POLICY in labels else {"Statement": []}
    left = [each for each in policy["Statement"] if each.get("Sid") != label]
    if len(left) == len(policy["Statement"]):
        where = " on existing policy" if POLICY in labels else ""
        raise invalid("Label", label, f"can't find label{where}.")
    text = json.dumps({**policy, "Statement": left})
    return {k: text if k == POLICY else v for k, v in labels.items() if left or k != POLICY}
