"""What SQS calls its errors.

The one rule: an error has the code that its SDKs know, in both protocols.
"""

from typing import Final

from starlette.exceptions import HTTPException

from mqks.client.errors import InvalidRequest, RequestFailed

_PREFIX: Final = "AWS.SimpleQueueService."
_OLD: Final = {
    "QueueDoesNotExist": f"{_PREFIX}NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    **{
        name: _PREFIX + name
        for name in (
            *("BatchEntryIdsNotDistinct", "BatchRequestTooLong", "EmptyBatchRequest"),
            *("InvalidBatchEntryId", "PurgeQueueInProgress", "TooManyEntriesInBatchRequest"),
            "UnsupportedOperation",
        )
    },
}
"""Codes of the Query protocol where they differ; SDKs have them for JSON, too."""
_OF_JSON: Final = {
    "InvalidParameterValue": "InvalidParameterValueException",
    "MissingParameter": "MissingRequiredParameterException",
}
"""Names of the JSON protocol where `code` is the older one."""
_REASONS: Final = (
    ("no permission", "AccessDenied", 403),
    ("needs the permission", "AccessDenied", 403),
    ("there is no queue", "QueueDoesNotExist", 400),
    ("lease: ", "ReceiptHandleIsInvalid", 404),
    *((word, "OverLimit", 403) for word in ("queues_max", "metadata_bytes_max")),
    *(
        (word, "InvalidParameterValue", 400)
        for word in (
            "set_queue: ",
            "labels: ",
            "meta: ",
            "key: ",
            "name_bytes_max",
            "line_bytes_max",
        )
    ),
)
"""What is in the reason of a refused request; others are of the state of the broker."""


class SqsError(Exception):
    """`code` is that of the JSON protocol, `json_type` what it is called there."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status
        self.query_code = _OLD.get(code, code)
        self.json_type = _OF_JSON.get(code, code)
        self.fault = "Sender" if status < 500 else "Receiver"

    @classmethod
    def of(cls, failure: Exception) -> "SqsError":
        """An error of a client of the broker, or of HTTP."""
        if isinstance(failure, cls):
            return failure
        if isinstance(failure, HTTPException):
            code = "RequestEntityTooLarge" if failure.status_code == 413 else "ServiceUnavailable"
            return cls(code, failure.detail, failure.status_code)
        reason = (isinstance(failure, RequestFailed) and failure.reason) or str(failure)
        if isinstance(failure, InvalidRequest):
            return wrong(reason)
        for word, code, status in _REASONS:
            if word in reason:
                return no_queue() if code == "QueueDoesNotExist" else cls(code, reason, status)
        return cls("ServiceUnavailable", reason, 503)


def wrong(message: str) -> SqsError:
    return SqsError("InvalidParameterValue", message)


def invalid(name: str, value: object, reason: str) -> SqsError:
    return wrong(f"Value {value!s:.500} for parameter {name} is invalid. Reason: {reason}")


def missing(name: str) -> SqsError:
    return SqsError("MissingParameter", f"The request must contain the parameter {name}.")


def no_queue() -> SqsError:
    return SqsError("QueueDoesNotExist", "The specified queue does not exist.")
