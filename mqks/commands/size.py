"""`mqks size`: what a broker takes for given rates, sizes and numbers.

The one rule: every figure comes from one table of constants, which docs/sizing.md explains and a
test compares with a real server.
"""

from typing import Annotated, Final, NamedTuple

import typer

from mqks.commands.options import Told
from mqks.settings import MIB, Settings


class Constants(NamedTuple):
    """Bytes, unless the name says otherwise."""

    process: int = 47 * MIB
    """A broker without messages."""
    names: int = 27
    """The id that a client makes, and a short event, in the line of a message."""
    message_memory: int = 68
    """Of a waiting message in memory, besides its line."""
    counted_memory: int = 64
    """What the broker counts of these for `memory_bytes`."""
    message_disk: float = 3.0
    """Of a message on disk, besides its line."""
    queue: int = 2700
    binding: int = 320
    consumer: int = 560
    """With its names so short, and one event bound to each queue."""
    connection: int = 4096
    unacked: int = 288
    """Of an unacked message, besides its line."""
    files: int = 128
    """Descriptors besides those of connections."""
    stream_us: float = 3.0
    """Processor time of a message that is published with a confirm, delivered and acked, where each
    connection has hundreds under way."""
    single_us: float = 45.0
    """That of one where each of many connections waits for every answer."""
    alone_us: float = 440.0
    """That of one where a single connection does so: then no two requests share a commit."""
    shared_cores: float = 0.9
    """From here on they do."""


CONSTANTS: Final = Constants()


class Size(NamedTuple):
    memory_bytes: int
    disk_bytes: int
    written_bytes_s: int
    descriptors: int
    cores_min: float
    cores_max: float


def size_of(
    settings: Settings,
    *,
    publishes: float = 0.0,
    data_bytes: int = 100,
    queues: int = 1,
    consumers: int = 0,
    backlog: int = 0,
    prefetch: int = 0,
) -> Size:
    """What a broker with these settings takes for `publishes` messages a second with `data_bytes`
    each, of which each is for one queue, for `backlog` messages that wait, and for consumers with a
    connection each and up to `prefetch` unacked messages."""
    each = CONSTANTS
    line = data_bytes + each.names
    in_memory = min(backlog, settings.memory_bytes // 2 // (line + each.counted_memory))
    unacked = min(consumers * prefetch * (line + each.unacked), settings.unacked_bytes_max)
    memory = (
        each.process
        + in_memory * (line + each.message_memory)
        + unacked
        + queues * (each.queue + each.binding)
        + consumers * (each.consumer + each.connection)
    )
    kept = backlog + consumers * prefetch
    disk = settings.ballast_bytes + kept * (line + each.message_disk)
    alone, single = publishes * each.alone_us / 1e6, publishes * each.single_us / 1e6
    # Once into the WAL, once into the database.
    written = 2 * publishes * (line + each.message_disk)
    return Size(
        round(memory),
        round(disk),
        round(written),
        each.files + consumers,
        publishes * each.stream_us / 1e6,
        min(alone, max(single, each.shared_cores)),
    )


def size(
    publishes: Annotated[
        float, typer.Option(min=0, metavar="N", help="Messages published in a second.")
    ] = 0.0,
    data_bytes: Annotated[
        int, typer.Option("--bytes", min=0, metavar="N", help="Of the data of each.")
    ] = 100,
    queues: Annotated[int, typer.Option(min=0, metavar="N", help="Queues.")] = 1,
    consumers: Annotated[
        int, typer.Option(min=0, metavar="N", help="Consumers, each with a connection.")
    ] = 0,
    backlog: Annotated[
        int, typer.Option(min=0, metavar="N", help="Messages that wait at most.")
    ] = 0,
    prefetch: Annotated[
        int, typer.Option(min=0, metavar="N", help="Unacked messages of each consumer.")
    ] = 100,
) -> Told:
    """Tell the memory, disk, descriptors and processor time that a broker takes for given rates.

    With the default settings. A message is for one queue: for n queues, give n times the rate.
    """
    told = size_of(
        Settings(),
        publishes=publishes,
        data_bytes=data_bytes,
        queues=queues,
        consumers=consumers,
        backlog=backlog,
        prefetch=prefetch,
    )
    lines = (
        f"memory       {told.memory_bytes / MIB:,.0f} MiB",
        f"disk         {told.disk_bytes / MIB:,.0f} MiB; twice that if they are rarely empty",
        f"writes       {told.written_bytes_s / MIB:,.1f} MiB a second",
        f"descriptors  {told.descriptors:,}",
        f"processor    {told.cores_min:.2f} to {told.cores_max:.2f} cores; a broker uses one",
    )
    return told._asdict(), "\n".join(lines)
