"""Queues, consumers and schedules that a command names must exist.

The one rule: a name that does not exist is an error before anything is asked or done. The server
itself does nothing at an action on such a queue, and confirms that.
"""

from itertools import islice
from typing import TYPE_CHECKING

from mqks.errors import InspectionFailed, did_you_mean

if TYPE_CHECKING:
    from mqks.client.blocking import BlockingClient

NAMES_COMPARED_MAX = 10_000


def check_queue(client: "BlockingClient", name: str, otherwise: str = "") -> None:
    """Raise QueueMissing unless the server has this queue; the error ends with the nearest name, or
    with `otherwise` if no name is near."""
    from mqks.client.errors import QueueMissing  # here, so that --help need not load it

    try:
        client.check_queue(name)
    except QueueMissing as missing:
        if not missing.is_near:
            missing.reason = f"{missing.reason}{otherwise}"
        raise


def check_consumer(client: "BlockingClient", consumer_id: str) -> None:
    """The same for the id of a consumer."""
    _check(client, "consumer", "id", consumer_id)


def check_schedule(client: "BlockingClient", name: str) -> None:
    """The same for a schedule."""
    _check(client, "schedule", "name", name)


def _check(client: "BlockingClient", what: str, key: str, wanted: str) -> None:
    found = _names(client, f"{what}s", key)
    if found is not None and len(found) < NAMES_COMPARED_MAX and wanted not in found:
        raise InspectionFailed(f"there is no {what} {wanted}{did_you_mean(wanted, found)}")


def _names(client: "BlockingClient", what: str, key: str) -> list[str] | None:
    """Of the first ones; None for a user who may not inspect."""
    from mqks.client.errors import RequestFailed  # here, as above
    from mqks.client.wire import rows

    try:
        return [row[key] for row in islice(rows(client.stats, what, key), NAMES_COMPARED_MAX)]
    except RequestFailed:
        return None
