"""Commands as other programs name them, and what they are called here.

The one rule: a guess runs nothing. It is an error that shows the whole command to type.
"""

from typing import Any, Final

from typer.core import TyperGroup

GUESSES: Final = {
    **dict.fromkeys(("list", "ls", "queues", "list-queues"), "inspect queues"),
    **dict.fromkeys(("queue", "show", "describe"), "inspect queue QUEUE"),
    **dict.fromkeys(("stats", "status", "info"), "inspect stats"),
    **dict.fromkeys(("messages", "browse"), "inspect messages QUEUE"),
    "bindings": "inspect bindings",
    "consumers": "inspect consumers",
    **dict.fromkeys(("connections", "clients"), "inspect connections"),
    "unacked": "inspect unacked",
    "journal": "inspect journal",
    **dict.fromkeys(("errors", "log", "logs"), "inspect errors"),
    **dict.fromkeys(("monitor", "watch", "live"), "top"),
    **dict.fromkeys(("send", "put", "pub", "emit", "enqueue"), "publish EVENT DATA"),
    **dict.fromkeys(("get", "receive", "pop", "pull", "take"), "consume QUEUE --count 1"),
    **dict.fromkeys(("read", "listen", "worker"), "consume QUEUE"),
    **dict.fromkeys(("create", "declare", "add", "new", "sub"), "subscribe QUEUE EVENT"),
    "bind": "rebind QUEUE --add EVENT",
    "unbind": "rebind QUEUE --remove EVENT",
    **dict.fromkeys(("delete", "remove", "rm", "drop"), "delete-queue QUEUE"),
    **dict.fromkeys(("clear", "empty", "flush"), "purge QUEUE"),
    **dict.fromkeys(("retry", "replay", "kick"), "redrive QUEUE"),
    **dict.fromkeys(("reject", "nack", "release"), "requeue CONSUMER --all"),
    **dict.fromkeys(("mv", "shovel"), "move FROM TO"),
    **dict.fromkeys(("policy", "set", "set-policy", "configure"), "set-queue QUEUE"),
    **dict.fromkeys(("start", "server", "run", "broker"), "serve"),
    **dict.fromkeys(("config", "check"), "check-config"),
    "users": "user list",
    **dict.fromkeys(("disconnect", "close-connection", "kill"), "close --user NAME"),
    **dict.fromkeys(("detach", "cancel-consumer", "remove-consumer"), "delete-consumer CONSUMER"),
    **dict.fromkeys(("audit", "who"), "inspect audit"),
    "dump": "export",
    "load": "import FILE",
}
"""By the word that was typed: the command and its arguments."""


class Commands(TyperGroup):
    """The commands at the top. A word that other programs use for one of them names that one; any
    other word gets the nearest ones, as in all groups."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (meant := GUESSES.get(args[0])):
            ctx.fail(f"There is no command '{args[0]}'. Use: {ctx.info_name} {meant}")
        return super().resolve_command(ctx, args)
