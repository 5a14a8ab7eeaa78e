"""Queues, consumers and schedules that a command names must exist.

The one rule: a name that does not exist is an error before anything is asked or done. The server
itself does nothing at an action on such a queue, and confirms that.
"""

from contextlib import suppress
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


def queues_of(client: "BlockingClient", name: str) -> list[str]:
    """The queue of this name, or those that it matches as a mask. Raises QueueMissing,
    InspectionFailed if the mask matches none, RequestFailed if the user may not see the queues."""
    if "*" not in name:
        check_queue(client, name)
        return [name]
    from mqks.client.requests import encoded  # here, as above
    from mqks.client.wire import rows
    from mqks.protocol.masks import name_masks

    matches = name_masks([encoded(name)])
    names = (row["name"] for row in rows(client.stats, "queues", "name"))
    if not (found := [each for each in names if matches(encoded(each))]):
        raise InspectionFailed(f"no queue matches {name}")
    return found


def check(client: "BlockingClient", what: str, key: str, wanted: str) -> None:
    """Check that there is a consumer, or what else has a list in `stats`, and this `key` there."""
    found = listed(client, what, key)
    if found is not None and wanted not in found:
        raise InspectionFailed(f"there is no {what} {wanted}{did_you_mean(wanted, found)}")


def listed(client: "BlockingClient", what: str, key: str) -> list[str] | None:
    """All of a list in `stats`; None where they are too many, or the user may not see them."""
    from mqks.client.errors import RequestFailed  # here, as above
    from mqks.client.wire import rows

    with suppress(RequestFailed):
        pages = rows(client.stats, f"{what}s", key)
        found = [row[key] for row in islice(pages, NAMES_COMPARED_MAX)]
        return found if len(found) < NAMES_COMPARED_MAX else None
    return None
