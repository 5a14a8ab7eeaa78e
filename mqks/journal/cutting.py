"""Cuts what is too large for one segment.

The one rule: a part is too large only if a single message is.
"""

from collections.abc import Iterator, Sequence

from mqks.journal.segment import MEMBER_MARK, RANGE_BYTES, RUN, SECTION, ArrivedRun, Section


def cut(sections: Sequence[Section], size_max: int) -> Iterator[list[Section]]:
    """Split sections into parts of about `size_max` bytes, or of a single larger message."""
    part: dict[int, Section] = {}
    room = size_max
    for size, piece in _pieces(sections, size_max):
        if part and size > room:
            yield list(part.values())
            part, room = {}, size_max
        room -= size
        for section in piece:
            known = part.setdefault(section.queue_id, section._replace(runs=[], acks=[], marks=[]))
            known.runs.extend(section.runs)
            known.acks.extend(section.acks)
            known.marks.extend(section.marks)
    yield list(part.values())


def _pieces(sections: Sequence[Section], size_max: int) -> Iterator[tuple[int, list[Section]]]:
    """The smallest parts and their sizes. Queues that share a text still share it."""
    texts: dict[tuple[int, int, int], list[tuple[Section, ArrivedRun]]] = {}
    count = max(1, size_max // MEMBER_MARK.size)
    for section in sections:
        bare = section._replace(runs=[], acks=[], marks=[])
        yield SECTION.size, [bare]
        for start in range(0, len(section.acks), count):
            acks = section.acks[start : start + count]
            yield RANGE_BYTES * len(acks), [bare._replace(acks=acks)]
        for start in range(0, len(section.marks), count):
            marks = section.marks[start : start + count]
            yield MEMBER_MARK.size * len(marks), [bare._replace(marks=marks)]
        for run in section.runs:
            key = (id(run.lines[0]), id(run.lines[-1]), len(run.lines))
            twins = texts.setdefault(key, [])
            if twins and twins[0][1].lines != run.lines:
                twins = texts[(len(texts), 0, 0)] = []
            twins.append((bare, run))
    for twins in texts.values():
        for start, lines, size in _stretches(twins[0][1].lines, size_max):
            yield (
                size + len(twins) * (SECTION.size + RUN.size),
                [
                    bare._replace(runs=[ArrivedRun(run.first + start, run.time_us, lines)])
                    for bare, run in twins
                ],
            )


def _stretches(lines: list[bytes], size_max: int) -> Iterator[tuple[int, list[bytes], int]]:
    """For each stretch the index of its first line, its lines, and its size."""
    start = size = 0
    for position, line in enumerate(lines):
        if size + len(line) >= size_max and position > start:
            yield start, lines[start:position], size
            start, size = position, 0
        size += len(line) + 1
    yield start, lines[start:], size
