"""`mqks batch`: a message that is published when all of some others are done.

The one rule: a batch is a request of the protocol; nothing of it is kept here.
"""

from typing import Annotated

import typer

from mqks.commands.connection import ServerOptions
from mqks.commands.declare import Run, declare
from mqks.commands.inspect import show_batches
from mqks.commands.options import AsJson, Told, Yes, confirm
from mqks.errors import InspectionFailed
from mqks.inspection.text import printable

app = typer.Typer(
    help="Publish a message when all messages of a batch are done.",
    epilog="Example: mqks batch open night --then report.make tonight",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The batch.")]


def open_(
    server: ServerOptions,
    name: Name,
    then: Annotated[
        tuple[str, str] | None, "EVENT DATA", "What is published when all are done."
    ] = None,
    on_dead: Annotated[
        tuple[str, str] | None, "EVENT DATA", "Published instead if a message has died."
    ] = None,
    for_s: Annotated[
        float | None, "--for", "SECONDS", "When the batch expires: 30m, 12h, 7d."
    ] = None,
) -> Told:
    """Open a batch, or set what follows one that is open. `mqks publish --batch` adds to it."""
    with server.connected() as client:
        client.open_batch(name, then=then, on_dead=on_dead, for_s=for_s)
    return {"name": name}, ""


def close(
    server: ServerOptions,
    name: Name,
    discard: Annotated[bool, "Forget the batch, and publish nothing."] = False,
    yes: Yes = False,
) -> Told:
    """Let a batch end when all of its messages are done."""
    with server.connected() as client:
        if discard:
            confirm(f"Forget the batch {printable(name)}? Its messages stay.", yes)
        if not client.close_batch(name, discard=discard):
            raise InspectionFailed(f"there is no batch {printable(name)}")
    return {"name": name, "discarded": discard}, ""


def show(server: ServerOptions, name: Name, as_json: AsJson = False) -> None:
    """Show how many messages of a batch wait, run, are done and are dead."""
    with server.connected() as client:
        found = client.batch_counts(name)
    if found is None:
        raise InspectionFailed(f"there is no batch {printable(name)}")
    show_batches([found], as_json)


def list_(server: ServerOptions, as_json: AsJson = False) -> None:
    """List the batches that have not ended."""
    with server.connected() as client:
        rows = client.batches()
    show_batches(rows, as_json)


COMMANDS: dict[Run, str] = {
    open_: "mqks batch open night --then report.make tonight --on-dead report.failed tonight",
    close: "mqks batch close night",
    show: "mqks batch show night",
    list_: "mqks batch list --json",
}
for each, example in COMMANDS.items():
    declare(app, each, example)
