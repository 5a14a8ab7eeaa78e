"""What archives tell a broker of themselves, with `range --archived`, and when."""

from typing import Any

from tests.kit.lab import Lab


def told(lab: Lab) -> list[Any]:
    """Of the archive of q: state, number, lag, and the seconds since it told and since a commit."""
    row = lab.stats("queue q")
    names = ("state", "lag", "told_age_s", "commit_age_s")
    state, *others = (row[f"archive_{name}"] for name in names)
    return [state, row["archived_seq"], *others]


def test_an_archive_that_tells_nothing_is_silent() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", *[b"m%d publish e x" % number for number in range(5)])
    assert told(lab) == [None] * 5
    lab.do("a", b"r range q --archived=1")
    assert told(lab) == ["running", 1, 5, 0, None]
    lab.wait(10)
    lab.do("a", b"r range q --archived=4")
    lab.wait(20)
    assert told(lab) == ["running", 4, 2, 20, 20]
    lab.do("a", b"r range q --archived=4")
    lab.wait(60)
    assert told(lab) == ["running", 4, 2, 60, 80]
    lab.wait(1)
    assert told(lab) == ["silent", 4, 2, 61, 81]
    lab.do("a", b"r range q --archived=99")
    assert told(lab) == ["running", 6, 0, 0, 0]


def test_an_archive_is_paused_with_the_deliveries_of_its_queue() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"r range q --archived=1", b"p pause q --publishes")
    assert told(lab)[0] == "running"
    lab.do("a", b"p pause q --deliveries --for=90")
    assert told(lab)[0] == "paused"
    lab.wait(61)
    assert told(lab)[0] == "silent"
    lab.do("a", b"r range q --archived=1")
    assert told(lab)[0] == "paused"
    lab.wait(30)
    assert told(lab)[0] == "running"


def test_of_several_readers_the_slowest_counts() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", *[b"m%d publish e x" % number for number in range(5)])
    lab.do("a", b"p set_queue q --readers=lake,other", b"r range q --archived=4")
    assert told(lab) == [None] * 5
    lab.do("a", b"t trim q 4 --reader=lake", b"t trim q 2 --reader=other")
    assert told(lab) == ["running", 2, 4, 0, None]
    lab.wait(10)
    lab.do("a", b"r range q --archived=4")
    assert told(lab) == ["running", 2, 4, 0, None]
    lab.do("a", b"t trim q 3 --reader=other")
    lab.wait(10)
    assert told(lab) == ["running", 3, 3, 10, 10]
