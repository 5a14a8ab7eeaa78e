"""Asks for the reports of `reports.py`, and waits for them."""

from reports import remind, render

if __name__ == "__main__":
    reports = render.map(range(1, 4))
    reminder = remind.schedule((3,), delay=2)
    for report in [*reports, reminder]:
        print(report.get(blocking=True, timeout=60))
