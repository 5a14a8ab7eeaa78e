"""As `stream`, but every message is acked alone, measured until the last ack is taken."""

from functools import partial

from benchmarks.work import Size, Work
from benchmarks.works import stream

WORK = Work(
    "1 publisher, 1 queue, 1 consumer, manual ack",
    partial(stream.run, manual_ack=True),
    Size(300_000),
    Size(500),
)
