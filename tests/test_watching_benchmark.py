"""The program that measures what being watched costs gives all its figures.

The one rule: nothing here looks at how long something took.
"""

import re

import pytest

from benchmarks import watching


@pytest.mark.slow
def test_all_figures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    watching.main(["--count", "1000", "--runs", "1", "--queues", "50"])
    told = re.sub(r"[\d.,]*\d", "N", capsys.readouterr().out).splitlines()

    for what in ("messages/s", "ns of CPU a message"):
        for way in (re.sub(r"\d+", "N", each) for each in watching.WAYS):
            assert f"stream, {way}: N {what}, ratio N (N to N)" in told
    for path in watching.PATHS:
        times = "N ms, N of CPU, N MB, longest wait of a ping N ms"
        assert f"{path} with N queues: {times}" in told
