"""What is written of a batch for which there is no space.

The one rule: nothing that needs more space than it frees, and nothing without what belongs to it.
"""

from mqks.broker.spine.log.pending import Batch, Entry, LaneChange, Pending


def take_settled(pending: Pending) -> Batch:
    """Take what frees space on a full disk: acks of durable messages, queues, bindings, errors,
    and everybody who waits. Messages stay pending, and so do `--once` ids, schedules, results
    and batches: a durable id without its message would block the message permanently, and a
    tick, or what follows a batch, be lost."""
    batch = pending.take(whole=True)
    entry = batch.entry
    rest = Batch(
        Entry(
            once=entry.once,
            schedules=entry.schedules,
            results=entry.results,
            batches=entry.batches,
            records=len(entry.once) + len(entry.results),
        ),
        in_one_piece=batch.in_one_piece,
    )
    changes, entry.changes, entry.once = entry.changes, [], []
    entry.schedules, entry.results, entry.batches = {}, {}, {}
    for change, (lane, taken_end) in zip(changes, batch.taken, strict=True):
        # A mark may be of a transaction, whose messages stay pending.
        settled, later = _split(change, taken_end, 0 if batch.in_one_piece else taken_end)
        entry.changes.append(settled)
        if later is not None:
            rest.entry.changes.append(later)
            rest.entry.records += sum(len(run.lines) for run in later.runs) + len(later.marks)
            rest.taken.append((lane, taken_end))
    entry.records = max(0, entry.records - rest.entry.records)
    pending.put_back(rest)
    return batch


def _split(
    change: LaneChange, taken_end: int, marks_end: int
) -> tuple[LaneChange, LaneChange | None]:
    """The part of a change about numbers below `taken_end`, of marks below `marks_end`, and the
    rest, if any: new messages, their marks and acks, and what must be written together with
    them."""
    lane_id, next_seq, cursor, runs, acks, moved, marks = change
    settled = LaneChange(
        lane_id,
        taken_end,
        min(taken_end, cursor),
        [],
        acks,
        [],
        {number: mark for number, mark in marks.items() if number < marks_end},
    )
    later = {number: mark for number, mark in marks.items() if number >= marks_end}
    if not (runs or moved or later or next_seq > taken_end):
        return settled, None
    return settled, LaneChange(lane_id, next_seq, cursor, runs, [], moved, later)
