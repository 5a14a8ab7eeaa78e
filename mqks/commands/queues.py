"""Queues and what they are bound to: subscribe, rebind, purge, trim, delete-queue.

The one rule: what destroys messages or bindings asks first where somebody can answer.
"""

from typing import Annotated

import typer

from mqks.commands.connection import Timeout, connected
from mqks.commands.options import AsJson, Url, Yes, confirm, counted, printable, tell

Queue = Annotated[str, typer.Argument(metavar="QUEUE")]


def subscribe(
    queue: Queue,
    events: Annotated[list[str], typer.Argument(metavar="EVENT...")],
    url: Url = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Make a queue if it is missing, and bind it to these events alone."""
    with connected(url, timeout) as client:
        client.subscribe(queue, events)
    tell({"queue": queue, "events": events}, as_json)


def rebind(
    queue: Queue,
    events: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EVENT]...", help="Bind it to these alone."),
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="EVENT", help="Unbind this. Repeatable.")
    ] = None,
    remove_mask: Annotated[
        list[str] | None,
        typer.Option(metavar="MASK", help="Unbind what matches, as user.*.gone. Repeatable."),
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option(metavar="EVENT", help="Bind it to this, too. Repeatable.")
    ] = None,
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Change the events a queue is bound to; with none named, unbind all of them."""
    if not (events or remove or remove_mask or add):
        confirm(f"Unbind {printable(queue)} from all its events?", yes)
        events = []
    with connected(url, timeout) as client:
        client.rebind(
            queue,
            replace=events,
            remove=remove or (),
            remove_mask=remove_mask or (),
            add=add or (),
        )
    tell({"queue": queue}, as_json)


def purge(
    queue: Queue,
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Drop all messages that wait in a queue; unacked ones stay with their consumers."""
    confirm(f"Drop all messages that wait in {printable(queue)}?", yes)
    with connected(url, timeout) as client:
        count = client.purge(queue)
    tell({"queue": queue, "purged": count}, as_json, counted(count, "purged"))


def trim(
    queue: Queue,
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=0, help="The first number to stay.")],
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Drop the messages that wait in a queue below a number."""
    confirm(f"Drop all messages below {seq} that wait in {printable(queue)}?", yes)
    with connected(url, timeout) as client:
        count = client.trim(queue, seq)
    tell({"queue": queue, "seq": seq, "trimmed": count}, as_json, counted(count, "trimmed"))


def delete_queue(
    queue: Queue,
    when_unused: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Only when it has had no consumer for so long."
        ),
    ] = None,
    url: Url = None,
    yes: Yes = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete a queue with its messages and bindings."""
    confirm(f"Delete {printable(queue)} with all its messages?", yes)
    with connected(url, timeout) as client:
        client.delete_queue(queue, when_unused=False if when_unused is None else when_unused)
    tell({"queue": queue, "when_unused_s": when_unused}, as_json)
