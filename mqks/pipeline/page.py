"""A report as one HTML page that needs no network, with SVG charts.

The one rule: a table of the page has everything that a chart shows, for those who cannot see it.
Text from clients is escaped, and the page may not run scripts or load anything.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_filesizeformat

from mqks.pipeline.report import Report

SERIES_MAX = 7
"""Events with their own colour; the others share one."""
TOP = 20
WIDTH, HEIGHT = 960, 300
LEFT, BOTTOM, TOP_MARGIN, LABEL_WIDTH = 70, 28, 10, 130
BAR_WIDTH_MAX = WIDTH - 370
"""Of a horizontal bar, next to its name and its value."""


def page(report: Report) -> str:
    """The page, in UTF-8."""
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    jinja.filters |= {"instant": _instant, "duration": _duration}
    return jinja.get_template("page.html").render(
        report=report,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        tiles={
            "Messages": f"{report.messages:,}",
            "Data": do_filesizeformat(report.bytes),
            "Events": f"{len(report.events):,}",
            "Published again": f"{sum(event.retries for event in report.events):,}",
            "Silent events": f"{len(report.silent):,}",
        },
        chart=_over_time(report),
        **_top(report),
        **_delays(report),
        bad_rows=[(e.reason, e.field or "", f"{e.messages:,}") for e in report.reasons],
        silent_rows=[(e.event, _instant(e.last), f"{e.messages:,}") for e in report.silent],
    )


def _over_time(report: Report) -> dict[str, Any] | None:
    """Stacked vertical bars, one for each window; None without messages."""
    names = [event.event for event in report.events[:SERIES_MAX]]
    index = {name: number for number, name in enumerate(names)}
    if len(report.events) > SERIES_MAX:
        names.append("all others")
    counts: defaultdict[datetime, list[int]] = defaultdict(lambda: [0] * len(names))
    for window in report.windows:
        counts[window.start][index.get(window.event, SERIES_MAX)] += window.messages
    if not counts:
        return None
    step, first = timedelta(seconds=report.window_s), min(counts)
    places = round((max(counts) - first) / step) + 1
    most = _round_up(max(map(sum, counts.values())))
    wide, high, floor = (WIDTH - LEFT) / places, HEIGHT - BOTTOM - TOP_MARGIN, HEIGHT - BOTTOM
    bars = []
    for start, row in counts.items():
        y = float(floor)
        for series, count in enumerate(row):
            if count:
                tall = high * count / most
                y -= tall
                x = LEFT + wide * round((start - first) / step)
                title = f"{_instant(start)} {names[series]}: {count:,}"
                bars.append({"series": series, "x": x, "y": y, "tall": tall, "title": title})
    labels = []
    for place in sorted({0, places // 3, 2 * places // 3, places - 1}):
        x = LEFT + wide * (place + 0.45)
        near_edge = min(x - LEFT, WIDTH - x) < LABEL_WIDTH / 2
        anchor = "middle" if not near_edge else "start" if place == 0 else "end"
        labels.append((x, anchor, first + place * step))
    return {
        "names": names,
        "wide": max(wide * 0.9, 0.5),
        "grid": [(floor - high * part / 4, _short(most * part / 4)) for part in range(5)],
        "bars": bars,
        "labels": labels,
        "rows": [
            (_instant(start), f"{sum(row):,}", *(f"{count:,}" for count in row))
            for start, row in sorted(counts.items())
        ],
    }


def _top(report: Report) -> dict[str, Any]:
    top = report.events[:TOP]
    rows = [
        (
            event.event,
            f"{event.messages:,}",
            do_filesizeformat(event.bytes),
            f"{event.ids:,}",
            f"{event.retries:,}",
            _instant(event.last),
        )
        for event in top
    ]
    bars = [(event.event, event.messages, f"{event.messages:,}") for event in top]
    return {"top_bars": _bars(bars), "top_rows": rows}


def _delays(report: Report) -> dict[str, Any]:
    bars, rows = [], []
    for delay in report.delays:
        told = {"p50": delay.p50, "p90": delay.p90, "p99": delay.p99, "most": delay.most}
        bars += [(f"{delay.queue} {name}", max(s, 0.0), _seconds(s)) for name, s in told.items()]
        rows.append((delay.queue, f"{delay.messages:,}", *map(_seconds, told.values())))
    return {"delay_bars": _bars(bars), "delay_rows": rows}


def _bars(bars: Sequence[tuple[str, float, str]]) -> list[dict[str, Any]]:
    """Horizontal bars: a name, a length and the text at the end."""
    most = max((value for _, value, _ in bars), default=0) or 1
    return [
        {"name": name, "wide": max(BAR_WIDTH_MAX * value / most, 1), "told": told}
        for name, value, told in bars
    ]


def _round_up(number: int) -> int:
    """The next of 1, 2, 4, 5, 8, 10, 20, …, whose quarters are round, too."""
    power = int(10 ** math.floor(math.log10(max(number, 1))))
    return min(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= number)


def _short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:g} {unit}"
    return f"{number:g}"


def _seconds(seconds: float) -> str:
    size = abs(seconds)
    if size < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if size < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if size < 1000 else str(timedelta(seconds=round(seconds)))


def _duration(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds:,} s"


def _instant(instant: datetime) -> str:
    return f"{instant:%Y-%m-%d %H:%M:%S}"
