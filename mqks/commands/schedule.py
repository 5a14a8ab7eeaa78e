"""`mqks schedule`: messages that are published again and again.

The one rule: a schedule is a request of the protocol; nothing of it is kept here.
"""

from contextlib import suppress
from typing import Annotated, Any, Literal, TypedDict, Unpack

import typer

from mqks.commands.connection import ServerOptions
from mqks.commands.declare import Run, declare
from mqks.commands.existing import check
from mqks.commands.inspect import show_schedules
from mqks.commands.messages import pairs
from mqks.commands.options import AsJson, Names, Told, Yes, confirm, note
from mqks.inspection.text import printable

app = typer.Typer(
    help="Publish messages again and again, at times of a cron expression or every so often.",
    epilog="Example: mqks schedule add beat alive now --every 30s",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.")]


class ScheduleOptions(TypedDict):
    """By the names of the client, but `meta`, which is text."""

    every_s: Annotated[
        float | None, "--every", "SECONDS", "Instead of CRON: publish this often: 30s, 5m, 12h, 1d."
    ]
    tz: Annotated[str | None, "ZONE", r"Time zone of CRON, as Europe/Berlin. \[default: UTC]"]
    missed: Annotated[
        Literal["skip", "one"] | None,
        typer.Option(help=r"What to publish for missed ticks. \[default: skip]"),
    ]
    jitter_s: Annotated[
        float | None, "--jitter", "SECONDS", "Each tick is late by up to this time."
    ]
    pause: Annotated[bool, "Add it paused."]
    mandatory: Annotated[bool, "Try a tick again until a queue is bound to the event."]
    delay_s: Annotated[float | None, "--delay", "SECONDS", "Deliver each message after this time."]
    ttl_s: Annotated[float | None, "--ttl", "SECONDS", "Time to live of a message in a queue."]
    meta: Annotated[Names, "KEY=VALUE", "An attribute of the messages. Repeatable."]
    to: Annotated[str | None, "QUEUE", "Only this queue gets the messages."]
    priority: Annotated[int | None, "N", "Their priority, from -128 to 127."]
    key: Annotated[str | None, "KEY", "Their key."]
    unique: Annotated[
        str | None,
        "KEY[,until=acked][,for=SECONDS][,on=replace]",
        "Drop a message while the one before waits in the queue, or replace that.",
    ]


def add(
    server: ServerOptions,
    name: Name,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[CRON] EVENT DATA", help='The times, as in "0 3 * * *", the event, the data.'
        ),
    ],
    **options: Unpack[ScheduleOptions],
) -> Told:
    """Add a schedule, or change the one of this name.

    CRON has minute, hour, day, month and weekday. The same schedule again changes nothing.
    """
    given: Any = {**options}
    has_cron = given["every_s"] is None
    if len(words) != (3 if has_cron else 2):
        raise typer.BadParameter('give "CRON" EVENT DATA, or EVENT DATA with --every')
    given["meta"] = pairs(given["meta"] or ())
    from mqks.client.errors import RequestFailed  # here, so that --help need not load it
    from mqks.client.requests import Unique  # here, as above

    if given["unique"] is not None:
        given["unique"] = Unique.parse(given["unique"])
    cron = words[0] if has_cron else None
    with server.connected() as client:
        client.schedule(name, cron, *words[-2:], **given)
        event = words[-2]
        with suppress(RequestFailed):  # Not everybody may know.
            if given["to"] is None and not client.stats("bindings", event, "--limit=1"):
                note(f"no queue is bound to {printable(event)} yet")
    return {"name": name}, ""


def list_(server: ServerOptions, as_json: AsJson = False) -> None:
    """List the schedules."""
    with server.connected() as client:
        rows = client.schedules()
    show_schedules(rows, as_json)


def pause(server: ServerOptions, name: Name) -> Told:
    """Publish nothing until it is resumed."""
    with server.connected() as client:
        client.pause_schedule(name)
    return {"name": name, "paused": True}, ""


def resume(server: ServerOptions, name: Name) -> Told:
    """Publish again from now on. Nothing was missed."""
    with server.connected() as client:
        client.resume_schedule(name)
    return {"name": name, "paused": False}, ""


def run(server: ServerOptions, name: Name) -> Told:
    """Publish one message now, besides the ticks."""
    from mqks.client.errors import RequestFailed  # here, as above

    with server.connected() as client:
        client.run_schedule(name)
        with suppress(RequestFailed):
            (row,) = (each for each in client.schedules() if each["name"] == name)
            if not row["last_queues"]:
                note(f"no queue has got the message of {printable(row['event'])}")
    return {"name": name}, ""


def remove(server: ServerOptions, name: Name, yes: Yes = False) -> Told:
    """Remove a schedule. Messages that it has published stay."""
    with server.connected() as client:
        check(client, "schedule", "name", name)
        confirm(f"Remove the schedule {printable(name)}?", yes)
        client.unschedule(name)
    return {"name": name}, ""


COMMANDS: dict[Run, str] = {
    add: "mqks schedule add report '0 3 * * *' report.make now --tz Europe/Berlin --unique report",
    list_: "mqks schedule list --json",
    pause: "mqks schedule pause report",
    resume: "mqks schedule resume report",
    run: "mqks schedule run report",
    remove: "mqks schedule remove report --yes",
}
for each, example in COMMANDS.items():
    declare(app, each, example)
