"""Commands of workers that know what waits in the server: `inspect scheduled`, and `revoke`.

The one rule: Celery does what it does without this, and this adds what Celery cannot see.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import wraps
from heapq import merge
from itertools import islice, product
from logging import getLogger
from operator import itemgetter
from typing import Any

from celery.worker.control import Panel

from mqks.celery import names
from mqks.celery.link import Link
from mqks.celery.transport import Channel, arguments
from mqks.client import requests
from mqks.client.messages import PeekedMessage

SCHEDULED_MAX = 100
"""Tasks of the server in one answer: with long arguments they take 250 KB."""
ASKED_MAX = 100
"""Tasks that are revoked in one exchange: each takes some milliseconds."""
REPR_MAX = 1024
"""Characters of arguments, which is what Celery has by itself."""
_log = getLogger(__name__)
_scheduled, _revoke = (Panel.data[name] for name in ("scheduled", "revoke"))


def _place(state: Any) -> tuple[Link, list[str]] | None:
    """The connection of a worker to MQKS, and its queues."""
    connection = getattr(state.consumer, "connection", None)
    channel = connection and connection.default_channel
    if not isinstance(channel, Channel) or state.consumer.task_consumer is None:
        return None
    return channel._link, [each.name for each in state.consumer.task_consumer.queues]


@wraps(_scheduled)
def scheduled(state: Any, **how: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _scheduled(state, **how)
    if place := _place(state):
        link, queues = place
        waiting = merge(*(_waiting(link, each) for each in queues), key=itemgetter(0))
        found += (_told(state, *each) for each in islice(waiting, SCHEDULED_MAX))
    return found


def _waiting(link: Link, queue: str) -> Iterable[tuple[float, PeekedMessage, dict[str, Any]]]:
    """Tasks that wait in this queue, with the times when they are due, soonest first."""
    body = requests.peek(names.key(queue), 0, SCHEDULED_MAX, False, {}, soonest=True)
    for message in map(PeekedMessage.parse, link.ask_lines(body)):
        args = arguments(message.data)
        if "task" in args.get("headers", ()):  # Other programs may use the queue, too.
            yield message.due or 0.0, message, args


def _told(state: Any, due_s: float, message: PeekedMessage, args: dict[str, Any]) -> dict[str, Any]:
    """In the form of Celery. Arguments are those of the headers, since to decode the others may
    take what the worker does not accept."""
    headers = args["headers"]
    exchange, routing_key = names.published(message.event)
    return {
        "eta": datetime.fromtimestamp(due_s, UTC).isoformat(),
        "priority": message.priority,
        "request": {
            "id": headers.get("id"),
            "name": headers.get("shadow") or headers["task"],
            "args": str(headers.get("argsrepr", ""))[:REPR_MAX],
            "kwargs": str(headers.get("kwargsrepr", ""))[:REPR_MAX],
            "type": headers["task"],
            "hostname": state.hostname,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {
                "exchange": exchange,
                "routing_key": routing_key,
                "priority": message.priority,
                "redelivered": message.retry > 0,
            },
            "worker_pid": None,
        },
    }


@wraps(_revoke)
def revoke(state: Any, task_id: Any, *args: Any, **how: Any) -> Any:
    told = _revoke(state, task_id, *args, **how)
    task_ids = [task_id] if isinstance(task_id, str) else [*(task_id or ())]
    if place := _place(state):
        for each in {*_cancelled(*place, task_ids)}:
            _tell(state, each)
    return told


def _cancelled(link: Link, queues: list[str], task_ids: list[str]) -> Iterator[str]:
    """Remove these tasks from the server, if they wait there; yield those that did."""
    known = [(each, group) for each in task_ids if (group := names.group(each))]
    pairs = product(queues, known)
    while some := [*islice(pairs, ASKED_MAX)]:
        bodies = (f"cancel --confirm {names.key(queue)} {group}*" for queue, (_, group) in some)
        counts = link.wait([link.start(body.encode()) for body in bodies])
        for (_, (each, _)), count in zip(some, counts, strict=True):
            if requests.number_told(count):
                yield each


def _tell(state: Any, task_id: str) -> None:
    """What a worker does that gets a revoked task. No worker gets this one."""
    try:
        state.app.backend.mark_as_revoked(task_id, "revoked")
    except Exception as error:  # That of `rpc://` needs the task.
        _log.warning("task %s has no result that says revoked: %s", task_id, error)
    events = state.consumer.event_dispatcher
    if events is not None and events.enabled:
        events.send("task-revoked", uuid=task_id, terminated=False, signum=None, expired=False)


Panel.data.update(scheduled=scheduled, dump_schedule=scheduled, revoke=revoke)
