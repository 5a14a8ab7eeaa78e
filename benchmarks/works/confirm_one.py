"""One publisher with one message in flight: the time from each publish to its confirm."""

from benchmarks.load import Gate, Report, clock, clocked, consume, part, percentiles_us, together
from benchmarks.messages import Messages
from benchmarks.process import Running
from benchmarks.servers.base import Server
from benchmarks.work import Figures, Size, Work


def ask_each(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Publishes one by one, each after the confirm of the one before."""
    flow = server.publisher(server.connect(port), messages, window=1)
    times = []
    gate()
    with clocked() as report:
        for n in range(messages.count):
            began = clock()
            flow.push()
            while flow.replies <= n:
                flow.pull()
            times.append(clock() - began)
    report.times = times
    server.check_confirms(bytes(flow.room[: flow.filled]), messages, 1)
    return report


def run(running: Running, size: Size) -> Figures:
    running.declare()
    [report] = together(running, part(ask_each, size.messages))
    together(running, part(consume, size.messages))
    return percentiles_us(report.times)


WORK = Work("confirms, one in flight", run, Size(5_000), Size(50))
