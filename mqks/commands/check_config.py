"""`mqks check-config`: would `mqks serve` with the same flags come up, and with which settings?

The one rule: nothing is made, opened or listened on.
"""

import os
import socket
from collections.abc import Iterator
from inspect import Signature
from pathlib import Path
from typing import Any

from mqks.commands.declare import AS_JSON
from mqks.commands.options import table
from mqks.commands.serve import FLAGS
from mqks.errors import ConfigurationError
from mqks.settings import MIB, SETTINGS, Settings, collect

MADE_BY_SERVER = ("db", "unix")
"""Files that need not be there; any other that a setting names does."""


def check_config(config: Path | None, as_json: bool, **flags: object) -> None:
    """Check the settings that serve would use, and print them with where each comes from.

    It takes the flags of serve, and ends with the memory that the server takes at most. It
    reports all mistakes, with exit code 78.
    """
    settings, places, mistakes = collect(flags, os.environ, config)
    if mistakes:
        raise ConfigurationError(*mistakes, *problems(settings))
    rows = (
        {
            "setting": name,
            "value": value if as_json or value is None else SETTINGS[name].text_of(value),
            "from": places.get(name, "default"),
        }
        for name, value in settings.public().items()
    )
    tables = (
        {"setting": f"queue {row.name}: {name}", "value": _plain(value, as_json), "from": place}
        for number, row in enumerate(settings.queue_tables, 1)
        for place in [f"{settings.config}: queue {number}"]
        for name, value in row.fields.items()
    )
    size = settings.memory_bytes_sum
    memory = {
        "setting": "(memory, at most)",
        "value": size if as_json else f"{size // MIB}MiB",
        "from": "limits",
    }
    table([*rows, *tables, memory], ["setting", "value", "from"], as_json=as_json)
    if found := list(problems(settings)):
        raise ConfigurationError(*found)


def _plain(value: Any, as_json: bool) -> object:
    """A field of a policy as check-config shows it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if as_json or not isinstance(value, tuple):
        return value
    return ", ".join(str(each) for each in value if each is not None)


check_config.__signature__ = Signature(  # type: ignore[attr-defined]
    [*FLAGS, AS_JSON], return_annotation=None
)


def problems(settings: Settings) -> Iterator[str]:
    """The problems that would prevent a start, as far as they show without a start."""
    for name in MADE_BY_SERVER:
        path = getattr(settings, name)
        if not isinstance(path, Path):
            continue
        directory = path.absolute().parent
        if not os.path.isdir(directory):
            yield f"{name}: the directory {directory} does not exist, or can't be reached"
        elif not os.access(directory, os.W_OK | os.X_OK):
            yield f"{name}: the directory {directory} can't be written by this user"
    db = settings.db
    if isinstance(db, Path) and os.path.exists(db):
        if not db.is_file():
            yield f"db: {db} is not a file"
        elif not os.access(db, os.R_OK | os.W_OK):
            yield f"db: {db} can't be written by this user"
    for name, setting in SETTINGS.items():
        path = getattr(settings, name)
        if name in MADE_BY_SERVER or setting.type not in (Path, Path | None) or path is None:
            continue
        if not os.path.isfile(path):
            yield f"{name}: the file {path} does not exist, or can't be reached"
        elif not os.access(path, os.R_OK):
            yield f"{name}: {path} can't be read by this user"
    try:
        socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield f"host: {settings.host}: {error.strerror}"
