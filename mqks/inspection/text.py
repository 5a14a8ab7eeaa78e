"""What stands in text: times, data, what clients have sent. Imports no other module, so that any
may import it."""

from base64 import b64encode
from datetime import UTC, datetime, timedelta
from functools import lru_cache

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@lru_cache(maxsize=1)  # All messages of a commit have one.
def time_text(time_us: int) -> str:
    """Microseconds since 1970 for programs: ISO 8601, in UTC."""
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds")


def moment(time: int | str) -> str:
    """A time for people: to the second. Also takes what `time_text` returns."""
    return (time if isinstance(time, str) else time_text(time))[:19].replace("T", " ")


def data_as_text(data: bytes) -> dict[str, str]:
    """Data as JSON fields: bytes that are not UTF-8 are written as Base64."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": b64encode(data).decode()}


def printable(value: object) -> str:
    """Text for people: control characters and bytes that are not UTF-8 are escaped."""
    told = str(value).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if told.isprintable():
        return told
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in told)
