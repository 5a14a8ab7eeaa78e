"""Objects of a store: read and written whole, with time limits and retries that end.

Credentials, region and endpoint come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_REGION`,
`AWS_ENDPOINT_URL`), on the driver and on each worker.

The one rule: a store that is away is told apart from one that refuses, and from all other errors.
"""

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from mqks.pipeline.errors import LakeUnfit, PipelineError, StoreAway

REQUEST_S, ATTEMPTS, RETRIES_S = 60, 4, 20
"""Of each request; then the store counts as away."""
OPTIONS = {
    "timeout": f"{REQUEST_S}s",
    "connect_timeout": "5s",
    "max_retries": str(ATTEMPTS),
    "retry_timeout": f"{RETRIES_S}s",
}
_STATUS = r"(?:HTTP status|status code)[ :]+"
_REFUSED = (
    rf"(?i){_STATUS}403|access.?denied|forbidden|no.?such.?bucket|invalid.?access.?key"
    "|signature.?does.?not.?match"
)
_AWAY = (
    rf"(?i){_STATUS}(?:5\d\d|408|429)|network.?connection|error sending request"
    "|connection re(?:set|fused)|timed? ?out|request.?timeout"
    "|service.?unavailable|internal.?failure|slow.?down|throttling"
)
"""Of texts: the libraries raise OSError for everything."""

Got = TypeVar("Got")


def asked(url: str, work: Callable[[], Got]) -> Got:
    """What the store answers. Raises StoreAway if it does not, or with an error of its own,
    LakeUnfit if it refuses, and PipelineError for all else."""
    try:
        return work()
    except PipelineError:
        raise
    except Exception as error:  # Each library has its own, and deltalake's are plain ones.
        whole = " ".join(re.sub(r"\x1b\[\d+m|↳", "", str(error)).split())
        told = whole[:300]
        if re.search(_REFUSED, whole):
            raise LakeUnfit(f"{url}: the store refuses this: {told}") from None
        if isinstance(error, (ConnectionError, TimeoutError)) or re.search(_AWAY, whole):
            raise StoreAway(f"{url}: the store does not answer as it should: {told}") from None
        raise PipelineError(f"{url}: {type(error).__name__}: {told}") from error


def file_system() -> Any:
    """Raises whatever pyarrow does."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    return S3FileSystem(
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL"),
        connect_timeout=5,
        request_timeout=REQUEST_S,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # A small file is one put, not the three of a multipart upload.
    )


def key(url: str, name: str) -> str:
    """The name of an object for `file_system`."""
    return f"{url.partition('://')[2]}/{name}"


def read(url: str, name: str) -> bytes:
    """Raises FileNotFoundError, and what `asked` does."""

    def get() -> bytes | None:
        try:
            with file_system().open_input_stream(key(url, name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    content = asked(url, get)
    if content is None:
        raise FileNotFoundError(f"{url}/{name}")
    return content


def write(url: str, name: str, content: Any) -> None:
    """One object, whole or not at all. Raises what `asked` does."""

    def put() -> None:
        with file_system().open_output_stream(key(url, name)) as stream:
            stream.write(content)

    asked(url, put)
