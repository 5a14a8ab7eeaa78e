"""The page of a report without Spark: whatever clients have sent, it is text and nothing else."""

from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from mqks.pipeline.page import page
from mqks.pipeline.report import BadReason, Delay, Report, ReportedEvent, Window

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOSTILE = "</title></style></svg><script>alert(1)</script>\"'><img src=x> {{ 7 * 7 }} {% if"


class _Page(HTMLParser):
    """The tags of a page, their attributes, and the text between them; what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "rect", "line", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line") or self.open[-1] == tag:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def a_report(name: str, events: int = 9) -> Report:
    names = [name, *(f"e{number}" for number in range(1, events))][:events]
    return Report(
        title=name,
        start=NOON,
        end=NOON + timedelta(hours=1),
        window_s=600,
        delay_of=name,
        windows=[Window(NOON, name, each, 3, 30, 2) for each in names],
        events=[ReportedEvent(each, 3, 1_500, 2, NOON, NOON) for each in names],
        delays=[Delay(name, 3, 0.0, 0.5, 1.0, 100.0)] if events else [],
        reasons=[BadReason(name, name, 3)] if events else [],
    )


def test_what_clients_sent_is_text() -> None:
    usual, hostile = _Page(page(a_report("usual"))), _Page(page(a_report(HOSTILE)))
    assert (hostile.tags, hostile.attributes) == (usual.tags, usual.attributes)
    places = usual.texts.count("usual")
    assert places >= 7, "title, heading, legend, bars, and each table"
    assert hostile.texts.count(HOSTILE) >= places - 1, "a bar shortens its name, and has it whole"


def test_a_page_asks_for_nothing() -> None:
    found = _Page(page(a_report("usual")))
    assert not found.attributes & {"href", "src", "style"}
    assert not found.tags & {"script", "link", "iframe", "object"}
    assert "1.5 kB" in found.texts


@pytest.mark.parametrize("events", [0, 1, 7, 8, 30])
def test_any_number_of_events_makes_a_page(events: int) -> None:
    text = page(a_report("usual", events))
    found = _Page(text)
    assert {"svg", "table", "figure"} <= found.tags or not events
    assert "prefers-color-scheme: dark" in text
    assert ("<p>No messages.</p>" in text) == (not events)
    assert ("all others" in text) == (events > 7)
    assert ("and 10 more" in text) == (events == 30)
