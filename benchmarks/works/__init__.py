"""The works: one module each, which opens with what it measures and ends with its `WORK`."""

from benchmarks.work import Work
from benchmarks.works import (
    acked,
    backlog,
    confirm,
    confirm_one,
    fairness,
    fan_in,
    fanout,
    latency,
    paging,
    scale_bindings,
    scale_connections,
    scale_consumers,
    scale_copies,
    scale_queues,
    scale_waiting,
    stream,
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
        scale_connections,
        scale_queues,
        scale_bindings,
        scale_copies,
        scale_waiting,
        scale_consumers,
    )
}
