"""One line per event to standard error, as key=value or JSON.

The one rule: a line says what happened and to whom, and never contains message data.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

_log: Final = logging.getLogger("mqks")
AUDIT: Final = logging.getLogger("mqks.audit")
"""Part of the log, unless it has an output of its own."""
_PLAIN: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;_-+/@#%*()[]{}<>"
)


class _Format(logging.Formatter):
    def __init__(self, as_json: bool, broker: str | None) -> None:
        super().__init__()
        self._as_json = as_json
        self._always = {} if broker is None else {"broker": broker}

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._always,
            **_said(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if self._as_json:
            return json.dumps(fields, ensure_ascii=True)
        return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _said(record: logging.LogRecord) -> dict[str, Any]:
    """Event and fields; a record of another package, such as the client, is a message instead."""
    fields = getattr(record, "fields", None)
    if fields is None:
        return {"event": "log", "logger": record.name, "message": record.getMessage()}
    return {"event": record.msg, **fields}


def _value(value: object) -> str:
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text)


def name(raw: bytes) -> str:
    """The name of a queue or a client as it is told in a line."""
    return raw.decode("utf-8", "backslashreplace")


def who(connection: str | None, user: str | None, client: str | None) -> dict[str, Any]:
    """The fields that say whose a connection is: address, user, and the client's own name."""
    return {"connection": connection, "user": user, "client": client and text(client)}


def text(surrogates: str) -> str:
    """Text with surrogate escapes, as it is told in a line."""
    return name(surrogates.encode("utf-8", "surrogateescape"))


def formatter(log_format: str, broker: str | None = None) -> logging.Formatter:
    """`broker` is told in each line."""
    return _Format(log_format == "json", broker)


def configure(log_format: str, log_level: str, broker: str | None = None) -> None:
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(formatter(log_format, broker))
    _log.handlers[:] = [output]
    _log.propagate = False
    _log.setLevel(log_level.upper())


def event(name: str, level: int = logging.INFO, **fields: object) -> None:
    """Log that something happened. A field that is None is left out."""
    _put(_log, name, level, fields)


def audit(name: str, level: int = logging.INFO, **fields: object) -> None:
    """As `event`, where the audit is logged."""
    _put(AUDIT, name, level, fields)


def _put(logger: logging.Logger, name: str, level: int, fields: Mapping[str, object]) -> None:
    if logger.isEnabledFor(level):
        fields = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, name, extra={"fields": fields})


def warning(name: str, **fields: object) -> None:
    event(name, logging.WARNING, **fields)


def error(name: str, *, exception: BaseException | None = None, **fields: object) -> None:
    """`exception` is logged with its traceback."""
    _log.error(name, exc_info=exception, extra={"fields": fields})
