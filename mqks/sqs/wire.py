"""Both protocols of SQS: JSON, and the older Query with forms and XML.

The one rule: an action gets and gives what the JSON protocol has; Query is translated.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes
from xml.sax.saxutils import escape

from mqks.sqs.errors import SqsError

_XMLNS: Final = "http://queue.amazonaws.com/doc/2012-11-05/"
NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FIELDS_MAX, _DEPTH_MAX = 2000, 8
_PIECE_BYTES: Final = 64 * 1024
_NAMES_MAX: Final = 100
"""Names of attributes in a list."""
_SINGULAR: Final = frozenset(
    (
        *("Attribute", "MessageAttribute", "MessageSystemAttribute", "Tag", "TagKey"),
        *("AttributeName", "MessageAttributeName", "MessageSystemAttributeName"),
        *("AWSAccountId", "ActionName"),
    )
)
"""Lists of a form; in JSON their names have an s."""
_ENTRY: Final = "BatchRequestEntry"
"""Ends the names of others, which are `Entries` in JSON."""
_PLAIN_LISTS: Final = ("Entries", "TagKeys", "Actions", "AWSAccountIds")
_PLAIN: Final = (str, int, float)
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


UNKNOWN: Final = "UnknownOperationException"


class SqsCall(NamedTuple):
    action: str
    given: dict[str, Any]
    is_json: bool

    @classmethod
    def of(cls, target: str, query: str, body: bytes, path: str) -> "SqsCall":
        """The call of a request with this header `X-Amz-Target`. Raises SqsError."""
        try:
            if target:
                _check_fields(body)
                given = json.loads(body or b"{}")
                return cls(target.rpartition(".")[2], _shaped(given), True)
            # What is empty is as what is missing: SDKs send a list without members as empty text.
            form = dict(parse_qsl(query, max_num_fields=_FIELDS_MAX))
            form |= _fields(body)
            given = {"QueueUrl": path, **_shaped(_nested(form))}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise SqsError("SerializationException", "The body cannot be read.") from None
        return cls(form.get("Action", ""), given, False)

    def unknown(self) -> SqsError:
        """The error of an action that is not there."""
        reason = f"The action {self.action:.100} is not valid for this endpoint."
        if self.is_json:
            return SqsError(UNKNOWN, reason)
        return SqsError("InvalidAction", reason) if self.action else SqsError(UNKNOWN, reason, 404)


def _fields(form: bytes) -> Iterator[tuple[str, str]]:
    """What `parse_qsl` gives, without empty values. Raises ValueError."""
    if form.count(b"&") >= _FIELDS_MAX:
        raise ValueError("too many fields")
    for field in filter(None, form.split(b"&")):
        name, _, value = field.replace(b"+", b" ").partition(b"=")
        if value:
            yield _unquoted(name).decode(), _unquoted(value).decode()


def _unquoted(text: bytes) -> bytes:
    """In pieces: `unquote_to_bytes` takes 80 times the memory of what is all escapes."""
    plain, start = bytearray(), 0
    while some := text[start : start + _PIECE_BYTES]:
        if len(some) == _PIECE_BYTES and b"%" in some[-2:]:
            some = some[: some.rindex(b"%")]
        plain += unquote_to_bytes(some)
        start += len(some)
    return bytes(plain)


def _check_fields(body: bytes) -> None:
    """JSON of many small values takes longer to read than others can wait. Raises ValueError."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(plain.split(b'"', 4 * _FIELDS_MAX)[::2])
    if sum(map(outside.count, b",[{")) > _FIELDS_MAX:
        raise ValueError("too many values")


def _shaped(given: Any) -> dict[str, Any]:
    """Members that are not null, if lists and objects are only where they belong. Raises
    TypeError."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        is_list = name.endswith("Names") or name in _PLAIN_LISTS
        kind: Any = list if is_list else dict if name.endswith(("Attributes", "ags")) else _PLAIN
        if value is not None and not isinstance(value, kind):
            raise TypeError(name)
        if name == "Entries":
            value = [*map(_shaped, value or ())]
        elif is_list and not all(isinstance(each, str) for each in value or ()):
            raise TypeError(name)
        if name.endswith("Names") and len(value or ()) > _NAMES_MAX:
            raise ValueError(f"more than {_NAMES_MAX} {name}")
        if value is not None:
            found[name] = value
    return found


def _nested(form: Mapping[str, str]) -> dict[str, Any]:
    """`A.1.B` as the B of the first A."""
    tree: dict[str, Any] = {}
    for name, value in form.items():
        *parts, last = name.split(".", _DEPTH_MAX)
        node: Any = tree
        for part in parts:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = value
    return dict(_listed(*pair) for pair in tree.items())


def _listed(name: str, value: Any) -> tuple[str, Any]:
    """Numbered members as a list, or as an object where they have a name or key each."""
    is_entry = name.endswith(_ENTRY)
    if not (is_entry or name in _SINGULAR) or not isinstance(value, dict):
        return name, value
    if "Name" in value or "Key" in value:  # One, without its number.
        value = {"1": value}
    items: list[Any] = [value[at] for at in sorted(filter(str.isdecimal, value), key=int)]
    if not all(isinstance(each, dict) for each in items):
        return f"{name}s", items
    if is_entry:
        return "Entries", [dict(_listed(*pair) for pair in each.items()) for each in items]
    pairs = {str(each.get("Name", each.get("Key", ""))): each.get("Value", "") for each in items}
    return f"{name}s", pairs


def answered(call: SqsCall, told: Mapping[str, Any] | None, request_id: str) -> tuple[bytes, str]:
    """The body of an answer, and its type; `told` is None if the action has no result."""
    if call.is_json:
        return _json(told or {})
    name = call.action
    result = "" if told is None else _xml(f"{name}Result", told, name)
    metadata = _xml("ResponseMetadata", {"RequestId": request_id}, name)
    return _document(f"{name}Response", result + metadata)


def failed(failure: SqsError, is_json: bool, request_id: str) -> tuple[bytes, str]:
    """Body and content type of an error."""
    if is_json:
        return _json(
            {"__type": f"com.amazonaws.sqs#{failure.json_type}", "message": failure.message}
        )
    if failure.code == UNKNOWN:
        return _document(UNKNOWN, "")
    message = failure.message
    if failure.code == "QueueDoesNotExist":
        message = f"{message.removesuffix('.')} for this wsdl version."
    told = {"Type": failure.fault, "Code": failure.query_code, "Message": message}
    inner = _xml("Error", told, "") + _xml("RequestId", request_id, "")
    return _document("ErrorResponse", inner)


def _json(told: Mapping[str, Any]) -> tuple[bytes, str]:
    return json.dumps(told, separators=(",", ":")).encode(), "application/x-amz-json-1.0"


def _document(name: str, inner: str) -> tuple[bytes, str]:
    text = f'<?xml version="1.0"?><{name} xmlns="{_XMLNS}">{inner}</{name}>'
    return text.encode("utf-8", "replace"), "text/xml"


def _xml(name: str, value: Any, action: str) -> str:
    if isinstance(value, list):
        tag = _LISTS.get(name, f"{action}ResultEntry")
        return "".join(_xml(tag, each, action) for each in value)
    if isinstance(value, dict) and name in _MAPS:
        tag, key = _MAPS[name]
        return "".join(_xml(tag, {key: k, "Value": v}, action) for k, v in value.items())
    if isinstance(value, dict):
        inner = "".join(_xml(key, each, action) for key, each in value.items())
    else:
        text = str(value).lower() if isinstance(value, bool) else NO_XML.sub("\ufffd", str(value))
        inner = escape(text, {"\r": "&#xD;"})
    return f"<{name}>{inner}</{name}>" if inner else f"<{name}/>"
