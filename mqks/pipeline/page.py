"""A report as one HTML page that opens without a network: its charts are SVG drawn here.

The one rule: everything a chart shows stands in a table of the page, too, for those who do not see
it; what clients sent is escaped, and the page may run no script and fetch nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from html import escape

from mqks.pipeline.report import Report

SERIES_MAX = 7
"""Events with a colour of their own; the others share one."""
TOP = 20
WIDTH, HEIGHT = 960, 300
LEFT, BOTTOM, TOP_MARGIN, LABEL_WIDTH = 70, 28, 10, 130
_OTHERS = "all others"

_STYLE = """
:root { color-scheme: light dark;
  --back: #ffffff; --text: #1c1f23; --soft: #5b636d; --line: #d5d9de; --panel: #f6f7f9;
  --s0: #0063b2; --s1: #c65a00; --s2: #1a7f4b; --s3: #b3261e; --s4: #6a4fb3; --s5: #00797c;
  --s6: #a1478a; --s7: #767d86; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171a; --text: #e7eaed; --soft: #a3abb4; --line: #353b42; --panel: #1d2125;
  --s0: #5aa9f0; --s1: #f0995a; --s2: #5fc48e; --s3: #f28b82; --s4: #b49df2; --s5: #4fc3c7;
  --s6: #e39bd0; --s7: #99a1aa; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p.time, figcaption, summary, .soft { color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; }
dl div { background: var(--panel); border-radius: .5rem; padding: .6rem .9rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.35rem; }
figure { margin: 0 0 .5rem; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg text.name { fill: var(--text); } svg line { stroke: var(--line); }
ul.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0;
  margin: .5rem 0; font-size: .9rem; } ul.legend i { display: inline-block; width: .8rem;
  height: .8rem; border-radius: .15rem; margin-right: .4rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; white-space: nowrap; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.text, th.text { text-align: left; white-space: normal;
  overflow-wrap: anywhere; }
summary { cursor: pointer; margin: .5rem 0; }
""" + "".join(f".s{n} {{ fill: var(--s{n}); background: var(--s{n}); }}\n" for n in range(8))

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The page, in UTF-8."""
    facts = {
        "Messages": f"{report.messages:,}",
        "Data": _bytes(report.bytes),
        "Events": f"{len(report.events):,}",
        "Published again": f"{sum(event.retries for event in report.events):,}",
        "Silent events": f"{len(report.silent):,}",
    }
    tiles = "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts.items())
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="time">{_instant(report.start)} to {_instant(report.end)} UTC, '
        f"windows of {_duration(report.window_s)}</p>",
        f"<dl>{tiles}</dl>",
        *_over_time(report),
        *_top(report),
        *_delays(report),
        *_silent(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(body)}\n</main>\n</body>\n</html>\n"
    )


def _over_time(report: Report) -> list[str]:
    names = [event.event for event in report.events[:SERIES_MAX]]
    if len(report.events) > SERIES_MAX:
        names.append(_OTHERS)
    counts: defaultdict[datetime, list[int]] = defaultdict(lambda: [0] * len(names))
    index = {name: number for number, name in enumerate(names[:SERIES_MAX])}
    for window in report.windows:
        counts[window.start][index.get(window.event, len(names) - 1)] += window.messages
    if not counts:
        return ["<h2>Messages over time</h2>", "<p>There are none.</p>"]
    step = timedelta(seconds=report.window_s)
    first = min(counts)
    places = round((max(counts) - first) / step) + 1
    most = _round_up(max(map(sum, counts.values())))
    wide = (WIDTH - LEFT) / places
    high = HEIGHT - BOTTOM - TOP_MARGIN
    shapes = []
    for part in range(5):
        y = HEIGHT - BOTTOM - high * part / 4
        shapes.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = _short(most * part / 4)
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for start, row in counts.items():
        x, y = LEFT + wide * round((start - first) / step), float(HEIGHT - BOTTOM)
        for number, count in enumerate(row):
            if not count:
                continue
            tall = high * count / most
            y -= tall
            shapes.append(
                f'<rect class="s{_colour(names, number)}" x="{x:.2f}" y="{y:.2f}" '
                f'width="{max(wide * 0.9, 0.5):.2f}" height="{tall:.2f}"><title>'
                f"{_instant(start)} {escape(names[number])}: {count:,}</title></rect>"
            )
    for place in sorted({0, places // 3, 2 * places // 3, places - 1}):
        x = LEFT + wide * (place + 0.45)
        near_edge = min(x - LEFT, WIDTH - x) < LABEL_WIDTH / 2
        anchor = "middle" if not near_edge else "start" if place == 0 else "end"
        shapes.append(
            f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
            f"{_instant(first + place * step)}</text>"
        )
    legend = "".join(
        f'<li><i class="s{_colour(names, number)}"></i>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    rows = [
        (_instant(start), f"{sum(row):,}", *(f"{count:,}" for count in row))
        for start, row in sorted(counts.items())
    ]
    table = _table(("from (UTC)", "messages", *names), rows, text=1)
    return [
        "<h2>Messages over time</h2>",
        _figure(shapes, HEIGHT, "Messages in each window, stacked by event; the table has them"),
        f'<ul class="legend" aria-hidden="true">{legend}</ul>',
        f"<details><summary>As a table</summary>{table}</details>",
    ]


def _top(report: Report) -> list[str]:
    top = report.events[:TOP]
    bars = [(event.event, event.messages, f"{event.messages:,}") for event in top]
    rows = [
        (
            event.event,
            f"{event.messages:,}",
            _bytes(event.bytes),
            f"{event.ids:,}",
            f"{event.retries:,}",
            _instant(event.last),
        )
        for event in top
    ]
    names = ("event", "messages", "data", "distinct ids", "published again", "last (UTC)")
    rest = len(report.events) - len(top)
    return [
        "<h2>Top events</h2>",
        _bars(bars, "Messages of the events that have most; the table has them"),
        _table(names, rows, text=1),
        f'<p class="soft">and {rest:,} more</p>' if rest else "",
    ]


def _delays(report: Report) -> list[str]:
    heading = f"<h2>Delay, {escape(report.delay_of)}</h2>"
    if not report.delays:
        return [heading, "<p>No message tells both times.</p>"]
    bars, rows = [], []
    for delay in report.delays:
        told = {"p50": delay.p50, "p90": delay.p90, "p99": delay.p99, "most": delay.most}
        bars += [(f"{delay.queue} {name}", max(s, 0.0), _seconds(s)) for name, s in told.items()]
        rows.append((delay.queue, f"{delay.messages:,}", *map(_seconds, told.values())))
    names = ("queue", "messages", "median", "90 %", "99 %", "most")
    return [heading, _bars(bars, "Delays of each queue; the table has them"), _table(names, rows)]


def _silent(report: Report) -> list[str]:
    heading = f"<h2>Silent since {_instant(report.last_window)} UTC</h2>"
    if not report.silent:
        return [heading, "<p>Every event was there in the last window.</p>"]
    rows = [(e.event, _instant(e.last), f"{e.messages:,}") for e in report.silent]
    return [heading, _table(("event", "last (UTC)", "messages before"), rows)]


def _bars(bars: Sequence[tuple[str, float, str]], title: str) -> str:
    """Lying bars: a name, a length and what stands at its end."""
    most = max((value for _, value, _ in bars), default=0) or 1
    begin, high = 260, 24
    shapes = []
    for number, (name, value, told) in enumerate(bars):
        y = number * high
        wide = max((WIDTH - begin - 110) * value / most, 1)
        shown = name if len(name) <= 36 else f"{name[:35]}…"
        shapes.append(
            f'<text class="name" x="{begin - 8}" y="{y + 17}" text-anchor="end">{escape(shown)}'
            f'<title>{escape(name)}</title></text><rect class="s0" x="{begin}" y="{y + 4}" '
            f'width="{wide:.2f}" height="{high - 7}" rx="2"/>'
            f'<text x="{begin + wide + 6:.2f}" y="{y + 17}">{told}</text>'
        )
    return _figure(shapes, high * len(bars) or 1, title)


def _figure(shapes: Iterable[str], height: int, title: str) -> str:
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes)}</svg></figure>"
    )


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """The first columns, `text` of them, are words; the others are numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [f'{tag} class="text"'] * text + [tag] * (len(row) - text)
        pairs = zip(kinds, row, strict=True)
        return "".join(f"<{kind}>{escape(cell)}</{tag[:2]}>" for kind, cell in pairs)

    head = cells('th scope="col"', names)
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _colour(names: Sequence[str], number: int) -> int:
    return SERIES_MAX if names[number] == _OTHERS and number == SERIES_MAX else number


def _round_up(number: int) -> int:
    """The next of 1, 2, 4, 5, 8, 10, 20, …: quarters of it are round, too."""
    power = int(10 ** math.floor(math.log10(max(number, 1))))
    return min(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= number)


def _short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:g} {unit}"
    return f"{number:g}"


def _bytes(size: int) -> str:
    number, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"


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
