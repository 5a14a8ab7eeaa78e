"""The command line.

The one rule: a command parses, calls one function and prints; what goes wrong is raised as an
`MqksError`, or by the system as an `OSError`, and becomes one line on stderr and an exit code here,
and nowhere else.
"""

import os
import sys
from functools import cache
from typing import Annotated, Any

import typer

from mqks import __version__
from mqks.commands import (
    ask,
    batch,
    detach,
    inspect,
    jobs,
    messages,
    operate,
    pauses,
    pipeline,
    queues,
    schedule,
    user,
)
from mqks.commands.backup import backup, compact, verify
from mqks.commands.bench import bench
from mqks.commands.check_config import check_config
from mqks.commands.copy import copy, new_epoch
from mqks.commands.declare import Run, declare
from mqks.commands.diagnose import diagnose
from mqks.commands.follow import follow, restore
from mqks.commands.guesses import Commands
from mqks.commands.options import Told, note
from mqks.commands.push import push
from mqks.commands.serve import Serve, serve
from mqks.commands.size import size
from mqks.commands.top import top
from mqks.commands.trace import trace
from mqks.commands.transfer import export, import_
from mqks.compiled import is_compiled
from mqks.errors import MqksError, reason

RUN, MESSAGES, QUEUES, CLIENTS, LOOK = "Run", "Messages", "Queues", "Clients", "Inspect"
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


def version() -> Told:
    """Print the version, and whether its modules are compiled."""
    compiled = is_compiled()
    shown = f"mqks {__version__}{' (compiled)' if compiled else ''}"
    return {"version": __version__, "compiled": compiled}, shown


COMMANDS: dict[str, dict[Run, str]] = {
    RUN: {
        bench: "mqks bench stream confirm --json",
        size: "mqks size --publishes 5000 --bytes 300 --consumers 20 --backlog 1000000",
        version: "mqks version",
        operate.drain: "mqks drain --timeout 60",
        operate.read_only: "mqks read-only on",
        operate.reload: "mqks reload",
    },
    KEEP: {
        backup: "mqks backup /backup/mqks.db --db mqks.db",
        follow: "mqks follow s3://bucket/mqks --db mqks.db --keep 14d",
        restore: "mqks restore s3://bucket/mqks new.db --at 2026-11-20T12:00:30",
        verify: "mqks verify /backup/mqks.db --json",
        compact: "mqks compact --db mqks.db",
        copy: "mqks copy mqks.db postgresql://mqks@db1,db2/mqks",
        new_epoch: "mqks new-epoch --db postgresql://mqks@db1,db2/mqks",
        check_config: "mqks check-config --config /etc/mqks.toml",
        export: "mqks export --messages --queue mail > mail.jsonl",
        import_: "mqks import mail.jsonl --url mqks://127.0.0.1:25000",
    },
    MESSAGES: {
        messages.publish: "mqks publish user.new - --once --id-prefix a < a.txt",
        messages.consume: "mqks consume mailer user.new --count 10 --json",
        push: "mqks push hooks https://example.org/hook --secret-file mqks.secret",
        messages.tail: "mqks tail 'order.*' --json",
        messages.peek: "mqks peek mailer --limit 5 --event 'user.*'",
        detach.requeue: "mqks requeue worker-1 --all",
        queues.cancel: "mqks cancel jobs reminder-17 --yes",
        jobs.cancel_job: "mqks cancel-job pages page-7 --reason 'not needed'",
        jobs.result: "mqks result page-7 --wait 20",
        queues.promote: "mqks promote jobs --all",
        queues.move: "mqks move jobs jobs.slow --event 'video.*' --limit 100",
        queues.redrive: "mqks redrive jobs.dead --event 'mail.*'",
    },
    QUEUES: {
        queues.subscribe: "mqks subscribe mailer user.new --add-mask 'order.**'",
        queues.rebind: "mqks rebind mailer --remove-mask 'user.*' --add user.gone",
        queues.set_queue: "mqks set-queue mailer --retries 5 --ttl 3600",
        pauses.pause: "mqks pause mailer --for 30m --deliveries",
        pauses.resume: "mqks resume mailer",
        queues.rename: "mqks rename orders orders.old",
        queues.purge: "mqks purge mailer --yes",
        queues.trim: "mqks trim mailer 4711 --yes",
        queues.delete_queue: "mqks delete-queue mailer --when-unused 60",
    },
    CLIENTS: {
        detach.close: "mqks close --queue mailer",
        detach.delete_consumer: "mqks delete-consumer worker-1",
    },
    LOOK: {
        ask.ping: "mqks ping --url mqks://127.0.0.1:25000",
        diagnose: "mqks diagnose report.json --db /var/lib/mqks/mqks.db",
        ask.eval_: "mqks eval 'len(state.queues)'",
        trace: "mqks trace 'order.*' --for 10m",
        top: "mqks top --sort rate --interval 5",
    },
}
"""By the panel of the help: the commands, each with an example."""
declare(app, serve, "mqks serve --db mqks.db --port 25000 --log-level debug", panel=RUN, cls=Serve)
for panel, commands in COMMANDS.items():
    for run, example in commands.items():
        declare(app, run, example, panel=panel)
app.add_typer(inspect.app, name="inspect", rich_help_panel=LOOK)
app.add_typer(batch.app, name="batch", rich_help_panel=MESSAGES)
app.add_typer(schedule.app, name="schedule", rich_help_panel=MESSAGES)
app.add_typer(user.app, name="user", rich_help_panel=RUN)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=PIPELINE)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version()[1])
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


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
