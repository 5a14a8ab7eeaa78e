"""How far the archive of a queue, and its readers, have come.

The one rule: what they tell is kept until the server stops, and they tell it again.
"""

from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.shared import ToldByArchive
from mqks.errors import BadRequest
from mqks.protocol.requests import shown


def archived(queue: Queue, seq: int, now_s: float) -> None:
    """Its archive tells that it has everything below this number."""
    seq, before = min(seq, queue.lane.next_seq), queue.archive
    is_commit = before is not None and seq > before.seq
    committed_s = now_s if is_commit else before and before.committed_s
    queue.archive = ToldByArchive(seq, now_s, committed_s)


def archived_seq(queue: Queue) -> int | None:
    return None if queue.archive is None else queue.archive.seq


def archive_lag(queue: Queue) -> int | None:
    """How many numbers its archive is behind its end; None if none has told."""
    return None if queue.archive is None else queue.lane.next_seq - queue.archive.seq


def readers_of(queue: Queue) -> dict[bytes, int | None]:
    """The mark of each of its readers; None if it has told none since the server's start."""
    names = queue.rules.readers
    return {name: queue.marks.get(name) for name in names.split(b",")} if names else {}


def passed(queue: Queue, reader: bytes | None, seq: int, now_s: float) -> int:
    """The number up to which the queue may be trimmed when this reader has read up to `seq`.
    Raises BadRequest."""
    readers = readers_of(queue)
    if reader not in (readers or (None,)):
        named = "--reader is missing" if reader is None else f"not {shown(reader)}"
        told = shown(queue.rules.readers or b"nobody")
        raise BadRequest(f"trim: the readers of the queue are {told}: {named}")
    if reader is None:
        return seq
    readers[reader] = min(seq, queue.lane.next_seq)
    queue.marks = {name: mark for name, mark in readers.items() if mark is not None}
    slowest = min(queue.marks.values()) if len(queue.marks) == len(readers) else 0
    if slowest:
        archived(queue, slowest, now_s)
    return slowest
