"""The commands for queues, their bindings and their messages: subscribe, rebind, purge, move, …

The one rule: a command that deletes messages or bindings asks first if stdin is a terminal.
"""

from typing import Annotated, Any, Unpack

import typer

from mqks.commands import complete
from mqks.commands.complete import Queue, queue_argument
from mqks.commands.connection import ServerOptions
from mqks.commands.declare import option
from mqks.commands.existing import check_queue, listed
from mqks.commands.options import (
    AddMask,
    Create,
    Events,
    Names,
    OptionChoice,
    Replace,
    Told,
    Yes,
    confirm,
    counted,
    note_stars,
)
from mqks.inspection.text import printable
from mqks.protocol.requests import POLICY, PolicyField

Messages = Annotated[
    list[str] | None, typer.Argument(metavar="MESSAGE_ID", help="Ids of scheduled messages.")
]
All = Annotated[bool, "--all", "All scheduled messages."]


def subscribe(
    server: ServerOptions,
    queue: Queue,
    events: Annotated[list[str] | None, typer.Argument(metavar="EVENT")] = None,
    add_mask: AddMask = None,
    replace: Replace = False,
) -> Told:
    """Create a queue if it does not exist, and add events and masks to its bindings."""
    if not (events or add_mask):
        raise typer.BadParameter("name an event, or a mask with --add-mask")
    with server.connected() as client:
        client.subscribe(queue, events or (), masks=add_mask or (), replace=replace)
    note_stars(events)
    return {"queue": queue, "events": events or [], "masks": add_mask or []}, ""


def rebind(
    server: ServerOptions,
    queue: Queue,
    events: Events = None,
    remove: Annotated[Names, "EVENT", "Remove this event. Repeatable."] = None,
    remove_mask: Annotated[
        Names, "MASK", "Remove bindings that match this mask. Repeatable."
    ] = None,
    add: Annotated[Names, "EVENT", "Add this event. Repeatable."] = None,
    add_mask: AddMask = None,
    replace: Replace = False,
    yes: Yes = False,
) -> Told:
    """Change the bindings of a queue.

    --replace without events removes all bindings.
    """
    if replace and not (events or add or add_mask):
        confirm(f"Remove all bindings of {printable(queue)}?", yes)
    elif not (events or remove or remove_mask or add or add_mask):
        raise typer.BadParameter("name an event or a mask; --replace alone removes all bindings")
    with server.connected() as client:
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
    return {"queue": queue}, ""


def purge(
    server: ServerOptions,
    queue: Queue,
    scheduled: Annotated[bool, "Also drop scheduled messages."] = False,
    yes: Yes = False,
    **choice: Unpack[OptionChoice],
) -> Told:
    """Drop the ready messages of a queue. Unacked messages are not affected."""
    are_some = any(value is not None for value in choice.values())
    if scheduled and are_some:
        raise typer.BadParameter(
            "--scheduled cannot be combined with a selection; mqks cancel drops some by id"
        )
    which = "ready and scheduled" if scheduled else "ready"
    some = "the selected" if are_some else "all"
    with server.connected() as client:
        check_queue(client, queue)
        confirm(f"Drop {some} {which} messages of {printable(queue)}?", yes)
        count = client.purge(queue, scheduled=scheduled, **choice)
    return {"queue": queue, "purged": count}, counted(count, "purged")


def cancel(
    server: ServerOptions,
    queue: Queue,
    messages: Messages = None,
    all_messages: All = False,
    yes: Yes = False,
) -> Told:
    """Drop scheduled messages."""
    ids = _ids(messages, all_messages)
    which = f"{len(messages)} scheduled" if messages else "all scheduled"
    with server.connected() as client:
        check_queue(client, queue)
        confirm(f"Drop {which} messages of {printable(queue)}?", yes)
        count = sum(client.cancel(queue, each) for each in ids)
    return {"queue": queue, "cancelled": count}, counted(count, "cancelled")


def promote(
    server: ServerOptions,
    queue: Queue,
    messages: Messages = None,
    all_messages: All = False,
) -> Told:
    """Make scheduled messages ready now."""
    ids = _ids(messages, all_messages)
    with server.connected() as client:
        count = sum(client.promote(queue, each) for each in ids)
    return {"queue": queue, "promoted": count}, counted(count, "promoted")


def _ids(messages: list[str] | None, all_messages: bool) -> list[str | None]:
    if all_messages == bool(messages):
        raise typer.BadParameter("give message ids, or --all")
    return [*messages] if messages else [None]


def move(
    server: ServerOptions,
    queue: Annotated[str, queue_argument("The queue to move from.", "FROM")],
    to: Annotated[
        str, queue_argument("The queue to move to. It is created if it does not exist.", "TO")
    ],
    **choice: Unpack[OptionChoice],
) -> Told:
    """Move the ready messages of a queue to the end of another one."""
    with server.connected() as client:
        count = client.move(queue, to, **choice)
    return {"from": queue, "to": to, "moved": count}, counted(count, "moved")


def redrive(
    server: ServerOptions,
    queue: Annotated[str, queue_argument("The dead-letter queue.")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="Move all of them to this queue.", autocompletion=complete.queues
        ),
    ] = None,
    **choice: Unpack[OptionChoice],
) -> Told:
    """Move dead letters back to the queues where they died, and reset their retries."""
    with server.connected() as client:
        count = client.redrive(queue, to=to, **choice)
    return {"queue": queue, "to": to, "redriven": count}, counted(count, "redriven")


def rename(
    server: ServerOptions,
    queue: Queue,
    new: Annotated[str, "NEW", "The new name, which no queue has."],
    yes: Yes = False,
) -> Told:
    """Give a queue another name. Messages, bindings, policy and consumers stay.

    Schedules that publish to it, and queues whose dead letters go there, name it anew.
    """
    with server.connected() as client:
        check_queue(client, queue)
        confirm(f"Rename {printable(queue)} to {printable(new)}?", yes)
        client.rename_queue(queue, new)
    return {"queue": queue, "new": new}, ""


def trim(
    server: ServerOptions,
    queue: Queue,
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=0, help="The first number to retain.")],
    yes: Yes = False,
) -> Told:
    """Drop the ready messages of a queue with numbers below SEQ."""
    with server.connected() as client:
        check_queue(client, queue)
        confirm(f"Drop all ready messages of {printable(queue)} below {seq}?", yes)
        count = client.trim(queue, seq)
    return {"queue": queue, "seq": seq, "trimmed": count}, counted(count, "trimmed")


def _field(field: PolicyField) -> Any:
    told = typer.Option(
        field.flag.decode(),
        metavar=field.value,
        help=field.help,
        autocompletion=complete.queues if field.value == "QUEUE" else None,
    )
    return option(field.name, Annotated[str | None, told])


POLICY_OPTIONS = list(map(_field, POLICY))


def set_queue(
    server: ServerOptions,
    queue: Queue,
    reset: Annotated[bool, "Clear fields that are not given."] = False,
    create: Create = False,
    **policy: Annotated[Any, POLICY_OPTIONS],
) -> Told:
    """Change the policy of a queue: its limits, retries and dead letters.

    An empty value clears: then the default of the server's mqks.toml holds, if there is one.
    """
    changes = {field: value or None for field, value in policy.items() if value is not None}
    from mqks.client import requests  # here, so that --help does not load it

    with server.connected() as client:
        if not create:
            check_queue(client, queue, "; --create creates it")
        target = changes.get("dead_letters")
        known = listed(client, "queue", "name") if target else None
        client.set_queue(queue, reset=reset, **requests.policy(changes))
    is_new = known is not None and target not in known
    told = f"the queue {printable(target)} did not exist: it was created" if is_new else ""
    return {"queue": queue, "reset": reset, "changes": changes}, told


def delete_queue(
    server: ServerOptions,
    queue: Queue,
    when_unused: Annotated[
        float | None, "SECONDS", "Delete it after this time without a consumer."
    ] = None,
    yes: Yes = False,
    if_exists: Annotated[bool, "No error if the queue does not exist."] = False,
) -> Told:
    """Delete a queue with its messages and bindings."""
    rule = False if when_unused is None else when_unused
    with server.connected() as client:
        if not if_exists:
            check_queue(client, queue)
        confirm(f"Delete {printable(queue)} with all its messages?", yes)
        client.delete_queue(queue, when_unused=rule, if_exists=True)
    return {"queue": queue, "when_unused_s": when_unused}, ""
