"""The command line.

The one rule: a command parses, calls one function and prints; what goes wrong is raised as an
`MqksError` and becomes one line on stderr and an exit code here, and nowhere else.
"""

import os

import typer

from mqks import __version__
from mqks.commands import inspect, user
from mqks.commands.bench import bench
from mqks.commands.serve import serve
from mqks.errors import MqksError

app = typer.Typer(
    help="Message Queue Kept Simple: a message broker with a line protocol, journaled to SQLite.",
    epilog="Start here: mqks serve --db mqks.db",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog="Example: mqks serve --db mqks.db --port 25000 --log-level debug")(serve)
app.command(epilog="Example: mqks bench stream confirm --port 25000 --json")(bench)
app.add_typer(inspect.app, name="inspect")
app.add_typer(user.app, name="user")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"mqks {__version__}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return its exit code."""
    try:
        app(arguments, prog_name="mqks")
    except MqksError as error:
        typer.echo(f"mqks: {error}", err=True)
        return error.exit_code
    except SystemExit as stop:
        # Typer always leaves this way, with 2 for a command line it does not understand. Of
        # what a reader has no more use for (EPIPE) it makes a quiet 1.
        code = stop.code if isinstance(stop.code, int) else 0
        return os.EX_USAGE if code == 2 else code
    return 0
