"""The command line.

The one rule: a command parses, calls one function and prints; what goes wrong is raised as an
`MqksError`, or by the system as an `OSError`, and becomes one line on stderr and an exit code here,
and nowhere else.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mqks import __version__
from mqks.commands import ask, inspect, messages, pipeline, queues, user
from mqks.commands.backup import backup, compact, verify
from mqks.commands.bench import bench
from mqks.commands.check_config import check_config
from mqks.commands.copy import copy, new_epoch
from mqks.commands.export import export
from mqks.commands.guesses import Commands
from mqks.commands.import_ import import_
from mqks.commands.options import AsJson, note, tell
from mqks.commands.serve import Serve, serve
from mqks.commands.top import top
from mqks.compiled import is_compiled
from mqks.errors import MqksError, reason

RUN, MESSAGES, QUEUES, LOOK = "Run", "Messages", "Queues", "Inspect"
KEEP, PIPELINE = "Maintenance", "Pipeline"

CONTEXT: Any = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=Commands,
    help="Message Queue Kept Simple: a message broker with a line protocol, journaled to SQLite.",
    epilog="Start here: mqks serve --db mqks.db",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def _add(
    panel: str,
    name: str,
    run: Callable[..., None],
    example: str,
    cls: type[TyperCommand] | None = None,
) -> None:
    app.command(name, cls=cls, rich_help_panel=panel, epilog=f"Example: {example}")(run)


_add(RUN, "serve", serve, "mqks serve --db mqks.db --port 25000 --log-level debug", Serve)
_add(RUN, "bench", bench, "mqks bench stream confirm --json")
_add(KEEP, "backup", backup, "mqks backup /backup/mqks.db --db mqks.db")
_add(KEEP, "verify", verify, "mqks verify /backup/mqks.db --json")
_add(KEEP, "compact", compact, "mqks compact --db mqks.db")
_add(KEEP, "copy", copy, "mqks copy mqks.db postgresql://mqks@db1,db2/mqks")
_add(KEEP, "new-epoch", new_epoch, "mqks new-epoch --db postgresql://mqks@db1,db2/mqks")
_add(KEEP, "check-config", check_config, "mqks check-config --config /etc/mqks.toml")
_add(KEEP, "export", export, "mqks export --messages --queue mail > mail.jsonl")
_add(KEEP, "import", import_, "mqks import mail.jsonl --url mqks://127.0.0.1:25000")
_add(
    MESSAGES,
    "publish",
    messages.publish,
    "mqks publish user.new - --once --id-prefix a < a.txt",
)
_add(MESSAGES, "consume", messages.consume, "mqks consume mailer user.new --count 10 --json")
_add(MESSAGES, "tail", messages.tail, "mqks tail 'order.*' --json")
_add(MESSAGES, "peek", messages.peek, "mqks peek mailer --limit 5 --event 'user.*'")
_add(MESSAGES, "requeue", messages.requeue, "mqks requeue worker-1 --all")
_add(MESSAGES, "cancel", queues.cancel, "mqks cancel jobs reminder-17 --yes")
_add(MESSAGES, "promote", queues.promote, "mqks promote jobs --all")
_add(MESSAGES, "move", queues.move, "mqks move jobs jobs.slow --event 'video.*' --limit 100")
_add(MESSAGES, "redrive", queues.redrive, "mqks redrive jobs.dead --event 'mail.*'")
_add(QUEUES, "subscribe", queues.subscribe, "mqks subscribe mailer user.new --add-mask 'order.**'")
_add(QUEUES, "rebind", queues.rebind, "mqks rebind mailer --remove-mask 'user.*' --add user.gone")
_add(QUEUES, "set-queue", queues.set_queue, "mqks set-queue mailer --retries 5 --ttl 3600")
_add(QUEUES, "purge", queues.purge, "mqks purge mailer --yes")
_add(QUEUES, "trim", queues.trim, "mqks trim mailer 4711 --yes")
_add(QUEUES, "delete-queue", queues.delete_queue, "mqks delete-queue mailer --when-unused 60")
_add(LOOK, "ping", ask.ping, "mqks ping --url mqks://127.0.0.1:25000")
_add(LOOK, "eval", ask.evaluate, "mqks eval 'len(state.queues)'")
_add(LOOK, "top", top, "mqks top --sort rate --interval 5")
app.add_typer(inspect.app, name="inspect", rich_help_panel=LOOK)
app.add_typer(user.app, name="user", rich_help_panel=RUN)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=PIPELINE)


def version(as_json: AsJson = False) -> None:
    """Print the version, and whether its modules are compiled."""
    compiled = is_compiled()
    shown = f"mqks {__version__}{' (compiled)' if compiled else ''}"
    tell({"version": __version__, "compiled": compiled}, as_json, shown)


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


_add(RUN, "version", version, "mqks version")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return its exit code."""
    _open_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_output()
        return 1
    except MqksError as error:
        note(_told(error))
        for other in getattr(error, "others", ()):
            note(other)
        return error.exit_code
    except OSError as error:
        told = reason(error)
        if error.filename is None:  # No file of its own, so it is the output: a full disk, say.
            _give_up_output()
            told = f"can't read or write: {told}"
        note(told)
        return os.EX_IOERR
    return code


@cache
def command() -> Any:
    """All of the above, as Click has it; built once, which takes longer than most commands."""
    return typer.main.get_command(app)


def _run(arguments: list[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["serve"]:  # Not by way of the group: Typer would load Pydantic for it.
            command().commands["serve"](words[1:], prog_name="mqks serve", **CONTEXT)
        command()(words, prog_name="mqks")
    except SystemExit as stop:
        # Typer always leaves this way, with 2 for a command line it does not understand. Of
        # what a reader has no more use for (EPIPE) it makes a quiet 1.
        code = stop.code if isinstance(stop.code, int) else 0
        return os.EX_USAGE if code == 2 else code
    return 0


def _open_streams() -> None:
    """A stream that was closed before the start (`>&-`) is taken up, or a database would get its
    number. To read or write there is an error, as for any program; messages may go nowhere."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_WRONLY)
            setattr(sys, name, os.fdopen(number, mode))


def _give_up_output() -> None:
    """What could not be written would be tried, and complained about, once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: MqksError) -> str:
    """Of a server's refusal the reason, too, if it has told it or its database can be read here."""
    error_id = getattr(error, "error_id", None)
    if error_id is None:
        return str(error)
    if getattr(error, "reason", None):
        return str(error)
    if reason := inspect.reason_of(error_id):
        return f"{error}: {reason}"
    return f"{error}; see on the server's machine: mqks inspect error {error_id} --db FILE"
