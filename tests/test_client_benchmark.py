"""The clients' load program: it gives all its figures, and notices what is wrong.

The one rule: nothing here looks at how long something took.
"""

import pytest

from benchmarks import calls, client
from benchmarks.messages import Wrong


@pytest.mark.slow
def test_all_figures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    client.main(["--count", "300", "--runs", "1"])
    lines = capsys.readouterr().out.splitlines()[1:]
    told = {" ".join(word for word in line.split() if not word[0].isdigit()) for line in lines}
    works = ("publish", "consume", "publish_many", "batches", "end to end", "prefetch")
    skins = {f"{skin} {work}" for skin in ("async", "blocking") for work in works}
    assert told == {"bare ping", "bare publish", "bare consume"} | skins


@pytest.mark.parametrize("fault", ["lost", "doubled", "swapped", "damaged"])
def test_a_wrong_delivery_is_noticed(fault: str) -> None:
    got = client.payloads(10)
    if fault == "lost":
        got.pop()
    elif fault == "doubled":
        got[1] = got[0]
    elif fault == "swapped":
        got[0], got[1] = got[1], got[0]
    else:
        got[5] = got[5].replace(b"x", b"y", 1)
    with pytest.raises(Wrong):
        client.check(10, got)


@pytest.mark.slow
def test_all_calls_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    calls.main(["--count", "20", "--rounds", "2"])
    _, *lines = capsys.readouterr().out.splitlines()
    told = [line[:24].strip() for line in lines]
    assert told == [f"{work}, {program}" for work in calls.WORKS for program in calls.PROGRAMS]
    assert all(float(word) for line in lines for word in line[24:].split()[:2])
