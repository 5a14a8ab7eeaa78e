"""A running server at a moment, with rates since an earlier moment."""

from itertools import islice

from mqks.client.blocking import BlockingClient
from mqks.client.errors import ReplyTimeout
from mqks.client.wire import rows
from mqks.inspection.source import Row

COUNTERS = (
    *("received", "routed", "unroutable", "confirmed", "delivered"),
    *("redelivered", "acknowledged", "rejected", "dead", "errors"),
)


def sample(client: BlockingClient, earlier: Row | None, rows_max: int) -> Row:
    """The state of the server, with rates since an earlier sample. When the server does not answer,
    `connected` is False and nothing else is present. Long lists have only their first rows."""

    def first(what: str, key: str) -> list[Row]:
        return [*islice(rows(client.stats, what, key), rows_max)]

    try:
        totals, journal = client.stats(), client.stats("journal")
        queues, consumers = first("queues", "name"), first("consumers", "id")
    except ReplyTimeout:
        return {"connected": False}
    now = {
        "connected": True,
        "totals": totals,
        "journal": journal,
        "queues": queues,
        "consumers": consumers,
    }
    add_rates(now, earlier)
    return now


def add_rates(now: Row, earlier: Row | None) -> None:
    """Give a sample `rates_per_s`, and its queues their own, since an earlier sample. None stands
    for a rate that is not known."""
    before: Row = {"connected": False} if earlier is None else earlier
    totals, queues = now["totals"], now["queues"]
    passed_s = totals["uptime_s"] - before["totals"]["uptime_s"] if before["connected"] else 0.0
    known = {queue["name"]: queue for queue in before["queues"]} if passed_s > 0 else {}
    for queue in queues:
        queue |= _queue_rates(queue, known.get(queue["name"]), passed_s)
    rates: Row = dict.fromkeys(COUNTERS)
    if passed_s > 0:
        rates = {
            key: (_count(totals[key]) - _count(before["totals"][key])) / passed_s
            for key in COUNTERS
        }
    now["rates_per_s"] = rates


def _count(counter: int | dict[str, int]) -> int:
    """The value of a counter; the sum if it is counted by reason."""
    return sum(counter.values()) if isinstance(counter, dict) else counter


def _queue_rates(queue: Row, earlier: Row | None, passed_s: float) -> Row:
    """Incoming messages are counted by their numbers; outgoing ones are those that came in and no
    longer exist."""
    if earlier is None or queue["next_seq"] < earlier["next_seq"]:
        return {"in_per_s": None, "out_per_s": None, "archived_per_s": None}
    came = queue["next_seq"] - earlier["next_seq"]
    held = ("ready", "unacked", "scheduled")
    more = sum(queue[key] - earlier[key] for key in held)
    archived = [row["archived_seq"] for row in (earlier, queue)]
    return {
        "in_per_s": came / passed_s,
        "out_per_s": max(0, came - more) / passed_s,
        "archived_per_s": None if None in archived else (archived[1] - archived[0]) / passed_s,
    }
