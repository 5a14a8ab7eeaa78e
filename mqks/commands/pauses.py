"""The commands that pause a queue and resume it.

The one rule: a pause is a request of the protocol; nothing of it is kept here.
"""

from typing import Annotated, Literal

import typer

from mqks.commands.complete import Queue
from mqks.commands.connection import ServerOptions
from mqks.commands.existing import queues_of
from mqks.commands.options import Told


def pause(
    server: ServerOptions,
    queue: Queue,
    for_s: Annotated[
        float | None, "--for", "SECONDS", "It ends after this time; otherwise by mqks resume."
    ] = None,
    deliveries: Annotated[bool, "Pause only deliveries."] = False,
    publishes: Annotated[
        bool, "Pause only publishes: they are refused, or, with --publishes wait, wait."
    ] = False,
    how: Annotated[
        Literal["wait"] | None,
        typer.Argument(metavar="[wait]", help="With --publishes: they wait.", show_choices=False),
    ] = None,
) -> Told:
    """Pause the deliveries and publishes of a queue, or of those that match a mask.

    Consumers stay attached, and archives of the queue wait with the deliveries. Publishers wait
    with all that their connections send after it, as long as they have the patience. It replaces
    an earlier pause, and outlives a restart. A mask means the queues that exist now.
    """
    if how and not publishes:
        raise typer.BadParameter("it belongs to --publishes", param_hint="wait")
    with server.connected() as client:
        names = queues_of(client, queue)
        for name in names:
            client.pause(name, for_s=for_s, deliveries=deliveries, publishes=how or publishes)
    what = "deliveries" if deliveries else "publishes" if publishes else "all"
    what += f" {how}" if how else ""
    return _told(queue, names, paused=what, for_s=for_s)


def resume(server: ServerOptions, queue: Queue) -> Told:
    """End any pause of a queue, or of those that match a mask."""
    with server.connected() as client:
        names = queues_of(client, queue)
        for name in names:
            client.resume(name)
    return _told(queue, names, paused=None)


def _told(queue: str, names: list[str], **what: object) -> Told:
    is_mask = names != [queue]
    return {"queue": queue, "queues": names, **what}, "\n".join(names) if is_mask else ""
