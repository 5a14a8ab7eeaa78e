"""Messages that wait are taken and rejected, one by one, as dead, until the last reject is taken;
then all dead letters are put back into the queue, where a consumer finds and checks them."""

from benchmarks.flow import run as send
from benchmarks.load import Gate, Report, busiest, clocked, consume, part, publish, rate, together
from benchmarks.messages import Messages
from benchmarks.process import Running
from benchmarks.servers.base import Server, Wish
from benchmarks.work import Figures, Size, Work


def redrive(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Puts all dead letters back into their queue."""
    flow = server.redriver(server.connect(port), messages)
    gate()
    with clocked() as report:
        flow.open()
        send(flow)
    return report


def run(running: Running, size: Size) -> Figures:
    plain = running.server
    running.server = plain.wished(Wish(kills=True))
    running.declare(manual_ack=True)
    together(running, part(publish, size.messages))
    killed = together(running, part(consume, size.messages, manual_ack=True, waiting=True))
    redriven = together(running, part(redrive, size.messages))
    running.server = plain
    together(running, part(consume, size.messages, manual_ack=True, waiting=True))
    return {
        "dead_per_s": rate(size.count, killed),
        "redriven_per_s": rate(size.count, redriven),
        "load_cores": busiest(killed + redriven),
    }


WORK = Work("rejected as dead, and redriven", run, Size(1_000_000), Size(500))
