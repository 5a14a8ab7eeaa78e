"""Files of a lake, in a directory or on an object store: read and written whole, with time limits
and retries that end.

Credentials, region and endpoint come from the environment, as for the stores' own tools
(`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`), on the driver
and on each worker.

The one rule: a store that is away is told apart from one that refuses, and from all other errors.
"""

import io
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from mqks.durable import sync
from mqks.pipeline.errors import ExtraMissing, LakeUnfit, PipelineError, StoreAway

CONNECT_S, REQUEST_S, ATTEMPTS, RETRIES_S = 5, 60, 4, 20
"""Of each request; then the store counts as away."""
OPTIONS = {
    "timeout": f"{REQUEST_S}s",
    "connect_timeout": f"{CONNECT_S}s",
    "max_retries": str(ATTEMPTS),
    "retry_timeout": f"{RETRIES_S}s",
    "allow_http": "true",  # For an endpoint that is given as http://.
}
CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
}
_NO_CREDENTIALS = (
    "(?i)no credentials|credential provider was not enabled"
    "|/latest/(?:api/token|meta-data)|/computeMetadata/|/metadata/identity/"
)
"""The last are what machines of a cloud are told credentials by, when none are given."""
_STATUS = r"(?:HTTP status|status code)[ :]+"
_REFUSED = (
    rf"(?i){_STATUS}40[13]|access.?denied|forbidden|no.?such.?bucket|invalid.?access.?key"
    "|signature.?does.?not.?match|bucket.?not.?found|container.?not.?found"
    "|AuthenticationFailed|unauthenticated|unauthorized|permission.?denied"
)
_AWAY = (
    rf"(?i){_STATUS}(?:5\d\d|408|429)|network.?connection|ConnectionError|error sending request"
    "|connection (?:re(?:set|fused)|closed|aborted)|timed? ?out|dns error|broken pipe"
    "|could not (?:connect to|resolve host)|request.?timeout"
    "|service.?unavailable|ServerError|CommitStateUnknown|internal.?failure|slow.?down|throttling"
)
"""Of texts: the libraries have no types for these."""

Place = Path | str
"""A directory, or the URL of a table."""
ICEBERG = "iceberg://"
DELETED = "files have rows that were deleted since: rewrite them by the tool that deleted the rows"
Got = TypeVar("Got")
PAUSES_S, TELL_S = (0.5, 15.0), 60.0
"""The first and the longest pause before a store is asked again; it is told so often."""

_log = logging.getLogger("mqks.pipeline")


class Patience:
    """Of one who waits for a store that is away, until `stop` is set: pauses grow, and it warns
    once a minute."""

    def __init__(self, stop: Event) -> None:
        self._stop = stop
        self._pause_s, self._longest_s = PAUSES_S
        self._told_s = -math.inf

    def wait(self, error: StoreAway) -> None:
        if time.monotonic() - self._told_s >= TELL_S:
            _log.warning("%s; the queue waits", error)
            self._told_s = time.monotonic()
        self._stop.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_s)


def tried(work: Callable[[], object]) -> None:
    """Do what will be done again later if a store is away now."""
    try:
        work()
    except StoreAway as error:
        _log.warning("%s; it is asked again", error)


def asked(place: Place, work: Callable[[], Got]) -> Got:
    """What the store answers. Raises StoreAway if it does not, or with an error of its own,
    LakeUnfit if it refuses, and PipelineError for all else; OSError of a directory."""
    try:
        return work()
    except PipelineError:
        raise
    except Exception as error:  # Each library has its own, and deltalake's are plain ones.
        if isinstance(place, Path) and isinstance(error, OSError):
            raise
        whole = " ".join(re.sub(r"\x1b\[\d+m|↳", "", f"{type(error).__name__}: {error}").split())
        # Credentials may stand in a URL, before its host or in its query.
        told = re.sub(r"(?<=//)[^/\s]+@|(?<=[\w/])\?[\w%.~-]+=\S+", "", whole)
        told = told.partition("Debug source:")[0][:300]
        if re.search(_NO_CREDENTIALS, whole):
            names = " and ".join(CREDENTIALS.get(str(place).partition("://")[0], CREDENTIALS["s3"]))
            raise LakeUnfit(
                f"{place}: there are no credentials on the machine {socket.gethostname()}: set"
                f" {names} in the environment of the command, and for the workers of a cluster"
                f" with --conf spark.executorEnv.NAME=VALUE ({told})"
            ) from None
        if re.search(_REFUSED, whole):
            raise LakeUnfit(f"{place}: the store refuses this: {told}") from None
        if isinstance(error, (ConnectionError, TimeoutError)) or re.search(_AWAY, whole):
            raise StoreAway(f"{place}: the store does not answer as it should: {told}") from None
        raise PipelineError(f"{place}: {told}") from error


def store(url: str) -> Any:
    """Raises ExtraMissing, and whatever obstore does."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise ExtraMissing(
            "an object store needs another package: pip install 'mqks[delta]'"
        ) from None
    given: Any = {name: OPTIONS[name] for name in ("timeout", "connect_timeout")}
    retries, retry_s = int(OPTIONS["max_retries"]), timedelta(seconds=RETRIES_S)
    return from_url(
        url,
        client_options=given | {"allow_http": True},
        retry_config={"max_retries": retries, "retry_timeout": retry_s},
    )


def read(place: Place, name: str = "") -> memoryview:
    """Raises FileNotFoundError, and what `asked` does. Without a name, `place` is the file."""
    if isinstance(place, Path):
        return memoryview((place / name).read_bytes())
    if not name:
        place, name = re.match(r"(\w+://[^/]+)/(.*)", place, re.S).groups()  # type: ignore[union-attr]

    def get() -> memoryview | None:
        try:
            return memoryview(store(place).get(name).bytes())
        except FileNotFoundError as error:
            if re.search(_REFUSED, str(error)):
                raise
            return None

    content = asked(place, get)
    if content is None:
        raise FileNotFoundError(f"{place}/{name}")
    return content


def write(place: Place, name: str, content: Any) -> None:
    """One file, whole or not at all. Raises what `asked` does."""
    if isinstance(place, Path):
        make_directory((place / name).parent)
        write_atomically(place / name, content)
    else:
        asked(place, lambda: store(place).put(name, bytes(memoryview(content))))


def delete(place: Place, name: str) -> None:
    """A file that nobody needs. Raises what `asked` does."""
    if isinstance(place, Path):
        (place / name).unlink(missing_ok=True)
    else:
        asked(place, lambda: store(place).delete(name))


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and sync them: a file is lost with the name of its
    directory."""
    made = [path, *path.parents]
    made = made[: [each.exists() for each in made].index(True)]
    path.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)


def write_atomically(path: Path, content: Any) -> None:
    """Replace a file: after a crash it has the complete old or the complete new content."""
    new = path.with_name(f"{path.name}.new")
    with SyncedFile(new) as file:
        file.write(content)
    new.rename(path)
    sync(path.parent)


class SyncedFile(io.BufferedWriter):
    """A new file, whose content is on the disk when it is closed; its name may not be."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()
