"""`mqks export`: its options; `transfer.exporting` describes the lines."""

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from mqks.commands.options import Names, progress

if TYPE_CHECKING:
    from mqks.inspection.source import Source


def export(
    source: "Source",
    messages: Annotated[bool, "Also export messages."] = False,
    queue: Annotated[Names, "QUEUE", "Only this queue. Repeatable."] = None,
) -> None:
    """Write queues, bindings and optionally messages as JSON lines.

    Reads from a running server, or from the file of a stopped one.
    """
    from mqks.transfer.exporting import lines  # here, so that --help need not load them

    # On a terminal, the bar would be mixed with the lines.
    bar = nullcontext(lambda more: None) if sys.stdout.isatty() else progress("Exporting")
    with bar as advance:
        for row in lines(source, messages, queue or []):
            sys.stdout.write(json.dumps(row) + "\n")
            advance(1)
        sys.stdout.flush()
