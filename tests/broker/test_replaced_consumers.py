"""A consumer whose id another connection takes, while the confirms of both wait for a commit."""

import pytest

from tests.kit.lab import Lab


@pytest.mark.parametrize("stays", [True, False])
def test_only_a_connection_that_is_there_is_told(stays: bool) -> None:
    lab = Lab()
    lab.send("a", b"c consume --confirm q e")
    lab.send("b", b"c consume --confirm q e")
    if not stays:
        lab.end("a")
    lab.commit()
    told = [record.connection for record in lab.broker.last_errors]
    assert told == (["a"] if stays else [])
    assert len(lab.replies) == 1 + 2 * stays
    assert lab.replies.count(b"c ok ") == 1 + stays
