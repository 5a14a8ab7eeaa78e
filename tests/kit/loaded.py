"""What the process has loaded from which `tests.kit.forks` forks: all that a start of `mqks` loads.

The one rule: whatever is done here is done by no process that is forked.
"""

import encodings.idna
import gc

import anyio._backends._asyncio
import typer._adapters
import uvloop

import benchmarks.servers
import mqks.broker.requests.actions
import mqks.client.blocking
import mqks.server.running
from mqks.commands import command

__all__ = ["anyio", "benchmarks", "encodings", "mqks", "typer", "uvloop"]

# A command's options are made ready when they are parsed for the first time.
command().make_context("mqks", ["serve", "--db", "x"])
# A server collects garbage once it has started, and would copy all of this to look at it.
gc.collect()
gc.freeze()
