"""`mqks bench`: measures a running server in a few seconds."""

from typing import Annotated

import typer

from mqks.commands.connection import ServerOptions, limited, url_or_usual
from mqks.commands.options import AsJson, Names, table, tell


def bench(
    server: ServerOptions,
    works: Annotated[
        Names, typer.Argument(metavar="WORK", help="The measurements. \\[default: all]")
    ] = None,
    count: Annotated[
        int, typer.Option(min=20, max=10_000_000, help="Number of messages.")
    ] = 100_000,
    payload_bytes: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Bytes of each message.")
    ] = 100,
    as_json: AsJson = False,
) -> None:
    """Measure a running server: stream, acked, confirm, confirm-one, fanout, latency.

    It creates its own queues, and deletes them at the end.
    """
    from mqks.bench import WORKS, Bench  # here, so that --help need not load them
    from mqks.client import urls

    options = limited(server.timeout_s)
    if unknown := set(works or []) - WORKS.keys():
        raise typer.BadParameter(f"unknown measurement {min(unknown)}; use {', '.join(WORKS)}")
    address = urls.parse(url_or_usual(server.url))
    told = {}
    for work in works or WORKS:
        with Bench(address, options, count, payload_bytes) as running:
            told[work] = WORKS[work](running)
    if as_json:
        tell({"count": count, "payload_bytes": payload_bytes, "works": told}, as_json)
    else:
        rows = (
            {"work": work, "figure": figure, "value": value}
            for work, figures in told.items()
            for figure, value in figures.items()
        )
        table(rows, ["work", "figure", "value"])
