"""The commands that change what a running server does: `mqks drain`,
`mqks read-only`, `mqks reload`.

The one rule: a command sends one request, and its exit code tells what became of it.
"""

import json
from typing import Annotated, Literal

from mqks.commands.connection import ServerOptions, limited, url_or_usual
from mqks.commands.options import AsJson, Told, Url, counted, note, table, tell
from mqks.errors import TimedOut
from mqks.limits import DRAIN_S

ANSWER_S = 30.0
"""How long the server may take for an answer, besides the time that a drain waits."""
HOLDERS = ("connection", "user", "client", "consumer", "queue", "unacked")


def drain(
    url: Url = None,
    timeout: Annotated[float, "SECONDS", "How long to wait for what consumers hold."] = DRAIN_S,
    off: Annotated[bool, "Let clients in and deliver again."] = False,
    as_json: AsJson = False,
) -> None:
    """Deliver nothing more, let nobody in, and wait until consumers hold nothing, before a stop.

    Publishes of connected clients go on. Ends with 75 if something is still held, and lists it.
    """
    # Not a client, which pings first: a server that drains lets in who asks as an operator.
    from mqks.client.wire import Wire  # here, so that --help need not load it

    with Wire(url_or_usual(url), limited(timeout + ANSWER_S)) as wire:
        told = json.loads(wire.ask(b"drain --off" if off else b"drain --timeout=%g" % timeout))
    if as_json:
        tell(told, as_json)
    if not (held := told.get("unacked")):
        return
    if not as_json:
        table(told["holders"], HOLDERS)
        if (more := told["consumers"] - len(told["holders"])) > 0:
            note(f"and {more} consumers more")
    raise TimedOut(counted(held, f"still held after {timeout:g} s"))


def read_only(
    server: ServerOptions, switch: Annotated[Literal["on", "off"], "on|off", "Whether it is."]
) -> Told:
    """Refuse publishes and what else adds something, or accept them again.

    Deliveries, acks and reads go on. It ends with the server: see the setting read_only.
    """
    with server.connected() as client:
        client.request("read_only", "--confirm", switch)
    return {"read_only": switch == "on"}, ""


def reload(server: ServerOptions) -> Told:
    """Let a server read users, certificates and queue defaults again, as on SIGHUP.

    Shows what changed, and which changed settings need a restart. An invalid file changes nothing.
    """
    with server.connected() as client:
        told = json.loads(client.request("reload"))
    count = told["users_changed"]
    parts = (
        count and f"{count} user{'s' * (count != 1)} changed: {', '.join(told['users'])}",
        told["certificate"] and "the certificate changed",
        told["queue_defaults"] and "queue defaults changed",
        told["restart"] and f"needs a restart: {', '.join(told['restart'])}",
    )
    return told, "\n".join(filter(None, parts)) or "nothing changed"
