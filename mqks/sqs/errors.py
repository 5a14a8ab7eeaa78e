"""What SQS calls its errors.

The one rule: an error has the code that its SDKs know, in both protocols.
"""

from typing import Final

_PREFIX: Final = "AWS.SimpleQueueService."
_PREFIXED: Final = {
    *("BatchEntryIdsNotDistinct", "BatchRequestTooLong", "EmptyBatchRequest"),
    *("InvalidBatchEntryId", "MessageNotInflight", "TooManyEntriesInBatchRequest"),
    "UnsupportedOperation",
}
_OLD: Final = {
    "QueueDoesNotExist": f"{_PREFIX}NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
}
WORDS: Final = (
    ("no permission", "AccessDenied", 403),
    ("may not", "AccessDenied", 403),
    ("there is no queue", "QueueDoesNotExist", 400),
    ("name_bytes_max", "InvalidParameterValue", 400),
    ("set_queue: ", "InvalidParameterValue", 400),
    ("meta: ", "InvalidParameterValue", 400),
    ("key: ", "InvalidParameterValue", 400),
    ("lease: ", "ReceiptHandleIsInvalid", 400),
    ("is longer than line_bytes_max", "InvalidParameterValue", 400),
    ("_max)", "OverLimit", 403),
)
"""What is in the reason of a request that the broker refused; others concern its state."""


class SqsError(Exception):
    """`code` is that of the JSON protocol."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status

    @property
    def query_code(self) -> str:
        return _PREFIX + self.code if self.code in _PREFIXED else _OLD.get(self.code, self.code)

    @property
    def is_senders(self) -> bool:
        return self.status < 500


def invalid(name: str, value: object, reason: str) -> SqsError:
    """The value of a parameter is wrong."""
    told = f"Value {value!s:.500} for parameter {name} is invalid. Reason: {reason}"
    return SqsError("InvalidParameterValue", told)


def missing(name: str) -> SqsError:
    return SqsError("MissingParameter", f"The request must contain the parameter {name}.")


def no_queue() -> SqsError:
    return SqsError("QueueDoesNotExist", "The specified queue does not exist.")


def refused(reason: str) -> SqsError:
    """The broker has refused a request for this reason."""
    for word, code, status in WORDS:
        if word in reason:
            return no_queue() if code == "QueueDoesNotExist" else SqsError(code, reason, status)
    return SqsError("ServiceUnavailable", reason, 503)
