"""The tracer of walks finds what it is meant to find, and nothing else."""

from mqks.broker.spine.log.answers import Answers
from mqks.broker.spine.queue.queue import Queue
from mqks.journal.sqlite.store import SqliteStore
from tests.kit.compiled import patches_modules
from tools import walk


@patches_modules
def test_walks_are_traced() -> None:
    walks = walk.measure(warm=1, walks=1)

    assert [*walks] == [*walk.NAMES]
    for name, each in walks.items():
        assert each.calls[0].co_qualname == (
            walk.TIMER if name in (walk.DUE, walk.EXPIRE) else walk.READ
        )
        assert each.calls[-1].co_qualname == walk.WRITTEN
        assert all(name.startswith(walk.ROOT) for name in each.files)
        assert len(each.files) - 1 <= each.changes < len(each.calls)
        assert len(each.functions) < each.lines_run < each.lines
    publish, ack = walks[walk.PUBLISH], walks[walk.ACK]
    assert publish.functions >= {
        Queue._dispatch.__code__,
        Answers.committed.__code__,
        SqliteStore._committed.__code__,
    }
    assert Queue._dispatch.__code__ not in ack.functions
    assert [row.count("|") for row in walk.table(walks).splitlines()] == [5] * 7
