"""A copy that follows a journal on an object store, also while the store is away."""

from pathlib import Path

import pytest

from mqks.commands import main
from mqks.errors import JournalDamaged
from mqks.follow.copies import Copy
from mqks.pipeline.errors import StoreAway
from tests.journal.test_follow import LARGE, follower, publish, restored_at, served
from tests.pipeline.test_pipeline_store import Between, between

__all__ = ["between"]


@pytest.mark.lakes
def test_a_store_is_followed(between: Between, tmp_path: Path) -> None:
    db, copy = tmp_path / "mqks.db", Copy("s3://bucket/some/prefix")
    with served(db) as client:
        following = follower(db, copy)
        publish(client, 1, 30, LARGE)
        first_us = following.look()
        publish(client, 31, 1)
        between.fault = "down"
        with pytest.raises(StoreAway):
            following.look()
        publish(client, 32, 1)
        between.fault = ""
        following.look()
        publish(client, 33, 1)
        following.look()
    assert len(copy.generations()) == 2
    assert len(restored_at(copy, tmp_path / "a.db", first_us)) == 30
    assert len(restored_at(copy, tmp_path / "b.db")) == 33
    assert main(["verify", copy.name]) == 0
    copy.delete(next(iter(copy.state().segments.values())).file)
    with pytest.raises(JournalDamaged, match="is missing"):
        restored_at(copy, tmp_path / "c.db")
    assert main(["verify", copy.name]) == 65
