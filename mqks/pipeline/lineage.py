"""Lineage: what an archive reads and writes, as events of OpenLineage (https://openlineage.io).

A run is one archive: it starts, tells each batch while it is running, and is complete or fails.

The one rule: an archive goes on as before, whatever becomes of its events.
"""

import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from mqks.client import urls
from mqks.pipeline.errors import ExtraMissing
from mqks.pipeline.objects import Place

try:
    from openlineage.client import OpenLineageClient
    from openlineage.client import event_v2 as events
    from openlineage.client.facet_v2 import (
        error_message_run,
        input_statistics_input_dataset,
        output_statistics_output_dataset,
    )
except ImportError:
    raise ExtraMissing("lineage needs another package: pip install 'mqks[lineage]'") from None

if TYPE_CHECKING:
    from mqks.pipeline.archive import Progress

PRODUCER = "https://pypi.org/project/mqks"
TIMEOUT_S, PAUSE_S = 2.0, 60.0
"""Of a request, and after one that failed: batches do not wait for a service that is away."""

_log = logging.getLogger("mqks.pipeline")


class Lineage:
    """Events of one archive, to the URL of a service, or appended to a file; a context manager.

    `OPENLINEAGE_API_KEY` is the service's key, and `OPENLINEAGE_NAMESPACE` that of the job, `mqks`
    by default.
    """

    def __init__(self, to: str, server: str | None, queue: str, lake: Place) -> None:
        """`queue` may be a mask; `server` is an URL as in `mqks.client.urls`."""
        told: dict[str, Any] = {"type": "file", "log_file_path": to, "append": True}
        if to.startswith(("http://", "https://")):
            told = {"type": "http", "url": to, "timeout": TIMEOUT_S, "retry": {"total": 0}}
            if key := os.environ.get("OPENLINEAGE_API_KEY"):
                told["auth"] = {"type": "api_key", "apiKey": key}
        self._client = OpenLineageClient(config={"transport": told})
        self._to = to
        self._run_id = str(uuid4())
        namespace = os.environ.get("OPENLINEAGE_NAMESPACE", "mqks")
        self._job = events.Job(namespace=namespace, name=f"archive.{queue}.{_name(lake)[1]}")
        self._source = f"mqks://{urls.parse(server)}"
        self._lake = lake
        self._silent_until_s = 0.0

    def __enter__(self) -> Self:
        self._emit(events.RunState.START)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._emit(events.RunState.COMPLETE)
        else:
            facet = error_message_run.ErrorMessageRunFacet(str(error), "python", producer=PRODUCER)
            self._emit(events.RunState.FAIL, run={"errorMessage": facet})
        self._client.close(TIMEOUT_S)

    def batch(self, progress: "Progress") -> None:
        """Tell a batch that is in the lake."""
        read = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
            rowCount=progress.messages + progress.left_out, producer=PRODUCER
        )
        written = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            progress.messages, progress.bytes, progress.files, producer=PRODUCER
        )
        namespace, name = _name(self._lake)
        facets: dict[str, Any] = {"inputStatistics": read}
        queue = events.InputDataset(self._source, progress.queue, inputFacets=facets)
        lake = events.OutputDataset(namespace, name, outputFacets={"outputStatistics": written})
        self._emit(events.RunState.RUNNING, inputs=[queue], outputs=[lake])

    def _emit(self, state: events.RunState, run: dict[str, Any] | None = None, **told: Any) -> None:
        if time.monotonic() < self._silent_until_s:
            return
        event = events.RunEvent(
            eventType=state,
            eventTime=datetime.now(UTC).isoformat(),
            run=events.Run(self._run_id, run or {}),
            job=self._job,
            producer=PRODUCER,
            **told,
        )
        try:
            self._client.emit(event)
        except Exception as error:  # Each transport has its own.
            _log.warning("%s takes no events of lineage: %s", self._to, error)
            self._silent_until_s = time.monotonic() + PAUSE_S


def _name(lake: Place) -> tuple[str, str]:
    """Namespace and name of a data set, as OpenLineage has them for stores and directories."""
    if isinstance(lake, Path):
        return "file", str(lake.absolute())
    scheme, _, rest = lake.partition("://")
    host, _, name = rest.partition("/")
    return f"{scheme}://{host}", name
