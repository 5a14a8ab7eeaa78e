"""The commands against clients that are stuck: close, delete-consumer, requeue.

The one rule: whoever loses a connection or a consumer by them is told, and by whom.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqks.commands import complete
from mqks.commands.connection import ServerOptions, checked, limited
from mqks.commands.existing import check, check_queue
from mqks.commands.options import EventMask, Older, Told, Yes, confirm, counted
from mqks.errors import InspectionFailed

if TYPE_CHECKING:
    from mqks.client.blocking import BlockingClient

ConsumerId = Annotated[
    str,
    typer.Argument(
        metavar="CONSUMER", help="The id of a consumer.", autocompletion=complete.consumers
    ),
]


def close(
    server: ServerOptions,
    numbers: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="CONNECTION", min=1, help="Numbers that mqks inspect connections shows."
        ),
    ] = None,
    user: Annotated[str | None, "NAME", "All connections of this user."] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE",
            help="All connections with a consumer of this queue.",
            autocompletion=complete.queues,
        ),
    ] = None,
    yes: Yes = False,
) -> Told:
    """Close connections. Their unacked messages return to their queues; clients connect again."""
    if bool(numbers) + (user is not None) + (queue is not None) != 1:
        raise typer.BadParameter("give numbers of connections, --user or --queue")
    wanted, mine = {*(numbers or ())}, limited().client_name
    with server.connected() as client:
        if queue is not None:
            check_queue(client, queue)
            rows = _rows(client, "consumers")
            found = {row["connection"] for row in rows if row["queue"] == queue}
        else:
            key, meant = ("id", wanted) if user is None else ("user", {user})
            rows = _rows(client, "connections")
            found = {row["id"] for row in rows if row[key] in meant and row["name"] != mine}
        if missing := sorted(wanted - found):
            raise InspectionFailed(f"there is no connection {missing[0]}")
        if found and not wanted:
            confirm(f"Close {len(found)} connections?", yes)
        closed = [
            number
            for number in sorted(found)
            if client.request("close_connection", "--confirm", str(number)) != "0"
        ]
    return {"closed": closed}, f"{len(closed)} connection{'s' * (len(closed) != 1)} closed"


def _rows(client: "BlockingClient", what: str) -> Iterator[dict[str, Any]]:
    from mqks.client.wire import rows  # here, so that --help need not load it

    return rows(client.stats, what, "id")


def delete_consumer(server: ServerOptions, consumer: ConsumerId) -> Told:
    """End a consumer. Its unacked messages return to their places in the queue.

    Its client is told, and its connection stays open.
    """
    with server.connected() as client:
        check(client, "consumer", "id", checked(consumer))
        client.request("delete_consumer", "--confirm", consumer, "--tell")
    return {"consumer": consumer}, ""


def requeue(
    server: ServerOptions,
    consumer: ConsumerId,
    messages: Annotated[
        list[str] | None,
        typer.Argument(metavar="MESSAGE_ID", help="Unacked messages of the consumer."),
    ] = None,
    all_messages: Annotated[bool, "--all", "All unacked messages of the consumer."] = False,
    event: EventMask = None,
    older_s: Older = None,
    pause: Annotated[
        float, "SECONDS", "The consumer gets no messages for this time, others do."
    ] = 10.0,
) -> Told:
    """Move unacked messages of a consumer to the end of their queue, for others."""
    from mqks.client import requests  # here, as above

    are_some = event is not None or older_s is not None
    if all_messages + bool(messages) + are_some != 1:
        raise typer.BadParameter("give message ids, --event or --older, or --all")
    with server.connected() as client:
        ids = [checked(each) for each in messages or ()] or ["--all"]
        check(client, "consumer", "id", checked(consumer))
        chosen = {"pause_s": pause or None, "event": event, "older_s": older_s}
        flags = map(requests.decoded, requests.flags("reject", chosen))
        words = "--confirm", consumer, *flags
        if are_some:
            count = int(client.request("reject", *words, "--all"))
            told = {"consumer": consumer, "event": event, "older_s": older_s, "requeued": count}
            return told, counted(count, "requeued")
        for each in ids:
            client.request("reject", *words, each)
    return {"consumer": consumer, "messages": messages}, ""
