"""The commands for queues, their bindings and their messages: subscribe, rebind, purge, move, …

The one rule: a command that deletes messages or bindings asks first if stdin is a terminal.
"""

from typing import TYPE_CHECKING, Annotated, cast

import typer

from mqks.commands import complete
from mqks.commands.connection import Timeout, connected
from mqks.commands.existing import check_queue
from mqks.commands.options import (
    AddMask,
    AsJson,
    EventMask,
    MessageId,
    Older,
    Replace,
    Url,
    Yes,
    confirm,
    counted,
    note_stars,
    printable,
    tell,
)

if TYPE_CHECKING:
    from mqks.client.requests import Choice, Policy

Queue = Annotated[str, typer.Argument(metavar="QUEUE", autocompletion=complete.queues)]
Messages = Annotated[
    list[str] | None, typer.Argument(metavar="MESSAGE_ID", help="Ids of scheduled messages.")
]
All = Annotated[bool, typer.Option("--all", help="All scheduled messages.")]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="At most this number of messages.")
]


def subscribe(
    queue: Queue,
    events: Annotated[list[str] | None, typer.Argument(metavar="EVENT")] = None,
    add_mask: AddMask = None,
    replace: Replace = False,
    url: Url = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Create a queue if it does not exist, and add events and masks to its bindings."""
    if not (events or add_mask):
        raise typer.BadParameter("name an event, or a mask with --add-mask")
    with connected(url, timeout) as client:
        client.subscribe(queue, events or (), add_mask=add_mask or (), replace=replace)
    note_stars(events)
    tell({"queue": queue, "events": events or [], "masks": add_mask or []}, as_json)


def rebind(
    queue: Queue,
    events: Annotated[
        list[str] | None,
        typer.Argument(metavar="EVENT", help="Add these events."),
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="EVENT", help="Remove this event. Repeatable.")
    ] = None,
    remove_mask: Annotated[
        list[str] | None,
        typer.Option(metavar="MASK", help="Remove bindings that match this mask. Repeatable."),
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option(metavar="EVENT", help="Add this event. Repeatable.")
    ] = None,
    add_mask: AddMask = None,
    replace: Replace = False,
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Change the bindings of a queue.

    --replace without events removes all bindings.
    """
    if replace and not (events or add or add_mask):
        confirm(f"Remove all bindings of {printable(queue)}?", yes)
    elif not (events or remove or remove_mask or add or add_mask):
        raise typer.BadParameter("name an event or a mask; --replace alone removes all bindings")
    with connected(url, timeout) as client:
        check_queue(client, queue, f"; mqks subscribe {queue} EVENT creates it")
        if not (events or remove or remove_mask or add or add_mask):
            confirm(f"Remove all bindings of {printable(queue)}?", yes)
            events = []
        client.rebind(
            queue,
            replace=events or [] if replace else None,
            remove=remove or (),
            remove_mask=remove_mask or (),
            add=[*(add or ()), *(() if replace else events or ())],
            add_mask=add_mask or (),
        )
    note_stars(events, add)
    tell({"queue": queue}, as_json)


def purge(
    queue: Queue,
    scheduled: Annotated[
        bool, typer.Option("--scheduled", help="Also drop scheduled messages.")
    ] = False,
    event: EventMask = None,
    id: MessageId = None,
    older: Older = None,
    limit: Limit = None,
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Drop the ready messages of a queue. Unacked messages are not affected."""
    choice: Choice = {"event": event, "id": id, "older_s": older, "limit": limit}
    are_some = any(value is not None for value in choice.values())
    if scheduled and are_some:
        raise typer.BadParameter(
            "--scheduled cannot be combined with a selection; mqks cancel drops some by id"
        )
    which = "ready and scheduled" if scheduled else "ready"
    some = "the selected" if are_some else "all"
    with connected(url, timeout) as client:
        check_queue(client, queue)
        confirm(f"Drop {some} {which} messages of {printable(queue)}?", yes)
        count = client.purge(queue, scheduled=scheduled, **choice)
    tell({"queue": queue, "purged": count}, as_json, counted(count, "purged"))


def cancel(
    queue: Queue,
    messages: Messages = None,
    all_messages: All = False,
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Drop scheduled messages."""
    ids = _ids(messages, all_messages)
    which = f"{len(messages)} scheduled" if messages else "all scheduled"
    with connected(url, timeout) as client:
        check_queue(client, queue)
        confirm(f"Drop {which} messages of {printable(queue)}?", yes)
        count = sum(client.cancel(queue, each) for each in ids)
    tell({"queue": queue, "cancelled": count}, as_json, counted(count, "cancelled"))


def promote(
    queue: Queue,
    messages: Messages = None,
    all_messages: All = False,
    url: Url = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Make scheduled messages ready now."""
    ids = _ids(messages, all_messages)
    with connected(url, timeout) as client:
        count = sum(client.promote(queue, each) for each in ids)
    tell({"queue": queue, "promoted": count}, as_json, counted(count, "promoted"))


def _ids(messages: list[str] | None, all_messages: bool) -> list[str | None]:
    if all_messages == bool(messages):
        raise typer.BadParameter("give message ids, or --all")
    return [*messages] if messages else [None]


def move(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM", help="The queue to move from.", autocompletion=complete.queues
        ),
    ],
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help="The queue to move to. It is created if it does not exist.",
            autocompletion=complete.queues,
        ),
    ],
    event: EventMask = None,
    id: MessageId = None,
    older: Older = None,
    limit: Limit = None,
    url: Url = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Move the ready messages of a queue to the end of another one."""
    with connected(url, timeout) as client:
        count = client.move(source, to, event=event, id=id, older_s=older, limit=limit)
    tell({"from": source, "to": to, "moved": count}, as_json, counted(count, "moved"))


def redrive(
    queue: Annotated[
        str,
        typer.Argument(
            metavar="QUEUE", help="The dead-letter queue.", autocompletion=complete.queues
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="Move all of them to this queue.", autocompletion=complete.queues
        ),
    ] = None,
    event: EventMask = None,
    id: MessageId = None,
    older: Older = None,
    limit: Limit = None,
    url: Url = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Move dead letters back to the queues where they died, and reset their retries."""
    with connected(url, timeout) as client:
        count = client.redrive(queue, to=to, event=event, id=id, older_s=older, limit=limit)
    tell({"queue": queue, "to": to, "redriven": count}, as_json, counted(count, "redriven"))


def trim(
    queue: Queue,
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=0, help="The first number to retain.")],
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Drop the ready messages of a queue with numbers below SEQ."""
    with connected(url, timeout) as client:
        check_queue(client, queue)
        confirm(f"Drop all ready messages of {printable(queue)} below {seq}?", yes)
        count = client.trim(queue, seq)
    tell({"queue": queue, "seq": seq, "trimmed": count}, as_json, counted(count, "trimmed"))


def set_queue(
    queue: Queue,
    retries: Annotated[
        str | None, typer.Option(metavar="N", help="Rejects after which a message is dead.")
    ] = None,
    losses: Annotated[
        str | None,
        typer.Option(metavar="N", help="Lost consumers after which a message is dead."),
    ] = None,
    backoff: Annotated[
        str | None,
        typer.Option(metavar="FIRST[,MAX]", help="Pause before a redelivery; doubles up to MAX."),
    ] = None,
    dead_letters: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="The queue for dead messages.", autocompletion=complete.queues
        ),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Time to live of a message.")
    ] = None,
    messages_max: Annotated[
        str | None, typer.Option(metavar="N", help="The most messages in the queue.")
    ] = None,
    bytes_max: Annotated[
        str | None, typer.Option(metavar="N", help="The most bytes in the queue.")
    ] = None,
    overflow: Annotated[
        str | None,
        typer.Option(
            metavar="reject|drop", help="At a limit: reject publishes, or drop the oldest."
        ),
    ] = None,
    single_consumer: Annotated[
        str | None, typer.Option(metavar="yes|no", help="Deliver to one consumer at a time.")
    ] = None,
    ack_timeout: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="Ack timeout, after which a message is redelivered."),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Clear fields that are not given.")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Create the queue if it does not exist.")
    ] = False,
    url: Url = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Change the policy of a queue: its limits, retries and dead letters.

    An empty value clears: then the default of the server's mqks.toml holds, if there is one.
    """
    given = {
        "retries": retries,
        "losses": losses,
        "backoff": backoff,
        "dead_letters": dead_letters,
        "ttl_s": ttl,
        "messages_max": messages_max,
        "bytes_max": bytes_max,
        "overflow": overflow,
        "single_consumer": single_consumer,
        "ack_timeout_s": ack_timeout,
    }
    changes = {field: value or None for field, value in given.items() if value is not None}
    with connected(url, timeout) as client:
        if not create:
            check_queue(client, queue, "; --create creates it")
        client.set_queue(queue, reset=reset, **cast("Policy", changes))
    tell({"queue": queue, "reset": reset, "changes": changes}, as_json)


def delete_queue(
    queue: Queue,
    when_unused: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Delete it after this time without a consumer."
        ),
    ] = None,
    url: Url = None,
    yes: Yes = False,
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="No error if the queue does not exist.")
    ] = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete a queue with its messages and bindings."""
    rule = False if when_unused is None else when_unused
    with connected(url, timeout) as client:
        if not if_exists:
            check_queue(client, queue)
        confirm(f"Delete {printable(queue)} with all its messages?", yes)
        client.delete_queue(queue, when_unused=rule, if_exists=True)
    tell({"queue": queue, "when_unused_s": when_unused}, as_json)
