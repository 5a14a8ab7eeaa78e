"""Both protocols of SQS: JSON, and the older Query with forms and XML.

The one rule: an action gets and gives what the JSON protocol has; Query is translated.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from mqks.sqs.errors import SqsError

JSON: Final = "application/x-amz-json-1.0"
_TARGET: Final = "AmazonSQS."
_XMLNS: Final = "http://queue.amazonaws.com/doc/2012-11-05/"
_FIELDS_MAX: Final = 1000
_DEPTH_MAX: Final = 8
_PLURAL: Final = {
    **{name: f"{name}s" for name in ("Attribute", "MessageAttribute", "MessageSystemAttribute")},
    **{name: f"{name}s" for name in ("Tag", "TagKey", "AttributeName", "MessageAttributeName")},
    "MessageSystemAttributeName": "MessageSystemAttributeNames",
    "SendMessageBatchRequestEntry": "Entries",
    "DeleteMessageBatchRequestEntry": "Entries",
    "ChangeMessageVisibilityBatchRequestEntry": "Entries",
}
"""Lists of a form, and what they are in JSON."""
_LISTS: Final = {
    "QueueUrls": "QueueUrl",
    "queueUrls": "QueueUrl",
    "Messages": "Message",
    "Failed": "BatchResultErrorEntry",
    "Results": "ListMessageMoveTasksResultEntry",
}
"""Lists of an answer, and the elements that they are in XML."""
_MAPS: Final = {
    "Attributes": ("Attribute", "Name"),
    "MessageAttributes": ("MessageAttribute", "Name"),
    "Tags": ("Tag", "Key"),
}


class Call(NamedTuple):
    """A request, without who sent it."""

    action: str
    given: dict[str, Any]
    is_json: bool


def parse(target: str, query: str, body: bytes, path: str) -> Call:
    """The call of a request with this header `X-Amz-Target`. Raises SqsError."""
    if target:
        try:
            given = json.loads(body or b"{}")
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise SqsError("SerializationException", "The body is not an object of JSON.")
        return Call(target.removeprefix(_TARGET), given, True)
    try:
        text = body.decode()
        form = dict(parse_qsl(query, True, max_num_fields=_FIELDS_MAX))
        form |= parse_qsl(text, True, max_num_fields=_FIELDS_MAX, errors="strict")
    except ValueError:
        raise SqsError("MalformedQueryString", "The body is not a form.") from None
    given = _nested(form)
    if path.strip("/"):
        given.setdefault("QueueUrl", path)
    return Call(form.get("Action", ""), given, False)


def _nested(form: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in form.items():
        *parts, last = name.split(".", _DEPTH_MAX)
        node: Any = tree
        for part in parts:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = value
    return {_PLURAL.get(name, name): _listed(name, value) for name, value in tree.items()}


def _listed(name: str, value: Any) -> Any:
    """Numbered members as a list, or as an object where they have a name or key each."""
    if name not in _PLURAL or not isinstance(value, dict):
        return value
    if "Name" in value or "Key" in value:  # One, without its number.
        value = {"1": value}
    numbers = sorted((each for each in value if each.isdigit()), key=int)
    items: list[Any] = [value[number] for number in numbers]
    if not all(isinstance(each, dict) for each in items):
        return items
    if _PLURAL[name] == "Entries":
        return [{_PLURAL.get(k, k): _listed(k, v) for k, v in each.items()} for each in items]
    return {str(each.get("Name", each.get("Key"))): each.get("Value", "") for each in items}


def answered(call: Call, told: dict[str, Any], request_id: str) -> tuple[bytes, str]:
    """The body of an answer, and its type."""
    if call.is_json:
        return json.dumps(told, separators=(",", ":")).encode() if told else b"{}", JSON
    name = call.action
    result = "".join(_xml(key, value, name) for key, value in told.items())
    return _document(
        f"{name}Response",
        (f"<{name}Result>{result}</{name}Result>" if told else "")
        + f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata>",
    )


def failed(failure: SqsError, is_json: bool, request_id: str) -> tuple[bytes, str]:
    """The same for an error."""
    if is_json:
        told = {"__type": f"com.amazonaws.sqs#{failure.code}", "message": failure.message}
        return json.dumps(told).encode(), JSON
    kind = "Sender" if failure.is_senders else "Receiver"
    return _document(
        "ErrorResponse",
        f"<Error><Type>{kind}</Type><Code>{failure.query_code}</Code>"
        f"<Message>{_escaped(failure.message)}</Message><Detail/></Error>"
        f"<RequestId>{request_id}</RequestId>",
    )


def _document(name: str, inner: str) -> tuple[bytes, str]:
    text = f'<?xml version="1.0"?><{name} xmlns="{_XMLNS}">{inner}</{name}>'
    return text.encode("utf-8", "replace"), "text/xml"


def _xml(name: str, value: Any, action: str) -> str:
    if isinstance(value, list):
        tag = _LISTS.get(name, f"{action}ResultEntry")
        return "".join(_xml(tag, each, action) for each in value)
    if isinstance(value, dict) and name in _MAPS:
        tag, key = _MAPS[name]
        pairs = ({key: each, "Value": told} for each, told in value.items())
        return "".join(_xml(tag, pair, action) for pair in pairs)
    if isinstance(value, dict):
        value = "".join(_xml(key, each, action) for key, each in value.items())
        return f"<{name}>{value}</{name}>"
    told = ("true" if value else "false") if isinstance(value, bool) else str(value)
    return f"<{name}>{_escaped(told)}</{name}>"


def _escaped(text: str) -> str:
    return escape(text, {"\r": "&#xD;"})
