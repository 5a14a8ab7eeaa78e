"""The works: one module each, which opens with what it measures and ends with its `WORK`, or with
several that differ in their sizes."""

from benchmarks.work import Work
from benchmarks.works import (
    acked,
    backlog,
    confirm,
    confirm_one,
    dead_letters,
    delayed,
    fairness,
    fan_in,
    fanout,
    latency,
    paging,
    prefetch,
    scale_bindings,
    scale_connections,
    scale_consumers,
    scale_copies,
    scale_masks,
    scale_queues,
    scale_waiting,
    stream,
    stream_ttl,
    talkers,
    wal_reader,
)

WORKS: dict[str, Work] = {
    module.__name__.rpartition(".")[2]: module.WORK
    for module in (
        stream,
        acked,
        confirm,
        confirm_one,
        backlog,
        fanout,
        latency,
        fan_in,
        fairness,
        paging,
        wal_reader,
        stream_ttl,
        prefetch,
        delayed,
        dead_letters,
        scale_connections,
        scale_queues,
        scale_bindings,
        scale_masks,
        scale_copies,
        scale_waiting,
        scale_consumers,
    )
}
for several in (confirm, fanout, latency, talkers):
    WORKS |= several.WORKS
