"""The commands that cancel a job, and tell what has become of one.

The one rule: a job is the message with an id; what is known of it is what the server tells.
"""

from typing import Annotated

from mqks.commands.complete import Queue
from mqks.commands.connection import ServerOptions
from mqks.commands.existing import check_queue
from mqks.commands.options import Told
from mqks.inspection.text import data_as_text, printable

Id = Annotated[str, "ID", "The message id."]


def cancel_job(
    server: ServerOptions,
    queue: Queue,
    id: Id,
    reason: Annotated[str | None, "TEXT", "The reason, for its consumer and its result."] = None,
) -> Told:
    """Remove a message that waits, or tell the consumer that holds it.

    Prints `cancelled`, `told`, `held` (its consumer does not want to be told) or `none`.
    """
    with server.connected() as client:
        answer = client.cancel_job(queue, id, reason=reason)
        if answer == "none":
            check_queue(client, queue)
    return {"queue": queue, "id": id, "answer": answer}, answer


def result(
    server: ServerOptions,
    id: Id,
    wait: Annotated[float, "SECONDS", "Wait for its end, at most so long."] = 0.0,
) -> Told:
    """Print what has become of a message published with --keep-result, and its result."""
    with server.connected() as client:
        told = client.job(id).state(wait)
    percent = "" if told.progress is None else f"{told.progress}%"
    words = told.state, told.queue, percent, told.text or told.reason
    line = printable(" ".join(filter(None, words)))
    if told.state == "none":
        line += ": no message of this id is known, or its result was not kept"
    row = {**told._asdict(), "id": id}
    if told.data is not None:
        row |= data_as_text(told.data)
        line = f"{line}\n{printable(told.data.decode('utf-8', 'surrogateescape'))}"
    return row, line
