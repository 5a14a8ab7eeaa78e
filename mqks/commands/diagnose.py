"""`mqks diagnose`: what somebody needs who is to find a fault from afar, in one file.

The one rule: no message and no secret is in it; names of queues, events, users and addresses are.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqks import __version__
from mqks.commands.options import Told
from mqks.compiled import is_compiled
from mqks.errors import CannotWrite, MqksError
from mqks.inspection.text import time_text
from mqks.settings import collect

if TYPE_CHECKING:
    from mqks.inspection.stopped import Source

ROWS_MAX = 1000
"""Of each table."""
LOG_LINES = 500
LOG_S = 10


def diagnose(
    source: "Source",
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to create, as JSON.")],
    unit: Annotated[str, "UNIT", "The service whose last log lines are added."] = "mqks",
) -> Told:
    """Collect for a report of a fault what can be shown: versions, settings, state, errors, log.

    It has no messages and no passwords, but names of queues, events, users and addresses.
    """
    settings, places, mistakes = collect({}, os.environ, None)
    state = {
        "totals": source.totals,
        "journal": source.journal,
        "queues": lambda: [*islice(source.queues(), ROWS_MAX)],
        "connections": lambda: [*islice(source.connections(), ROWS_MAX)],
        "consumers": lambda: [*islice(source.consumers(), ROWS_MAX)],
        "schedules": lambda: [*islice(source.schedules(), ROWS_MAX)],
        "errors": lambda: source.errors(ROWS_MAX),
    }
    told = {
        "time": time_text(time.time_ns() // 1000),
        "mqks": {"version": __version__, "compiled": is_compiled()},
        "system": {
            "platform": platform.platform(),
            "python": sys.version,
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "packages": dict(_packages()),
        },
        "settings": {
            name: {"value": value, "from": places.get(name, "default")}
            for name, value in settings.public().items()
        },
        "mistakes": mistakes,
        **{name: _asked(what) for name, what in state.items()},
        "log": _log(unit),
    }
    try:
        with file.open("x", encoding="utf-8") as report:
            json.dump(told, report, indent=1, default=str)
    except OSError as error:
        other = "; name another file" if isinstance(error, FileExistsError) else ""
        raise CannotWrite(f"{file}: {error.strerror}{other}") from None
    size = file.stat().st_size
    return {"file": str(file), "bytes": size}, f"{file}: read it before you send it"


def _asked(what: Any) -> object:
    """A part that the server refuses, or does not have, must not keep the others back."""
    try:
        return what()
    except MqksError as error:
        return {"failed": str(error)}


def _packages() -> Iterator[tuple[str, str]]:
    for name in sorted(
        {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requires("mqks") or ()}
    ):
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _log(unit: str) -> list[str]:
    """The last lines in systemd's journal; none where there is no such service."""
    command = ["journalctl", "--unit", unit, "--lines", str(LOG_LINES), "--output", "cat"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LOG_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.decode("utf-8", "replace").splitlines()
