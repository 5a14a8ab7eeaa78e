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
    stream,
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
    )
}
