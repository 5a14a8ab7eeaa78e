"""`python -m benchmarks.page`: how long the first view of the web page takes in a real browser.

For 10, 100 and 1,000 queues: a new broker and, each time, a browser without a cache, which opens
the overview. Told are the first view of a new server and the median of the others, in milliseconds
of navigation timing: the first byte of the answer, DOMContentLoaded, load; and the bytes of all
that was loaded.

The one rule: the figures are the browser's own.
"""

import argparse
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import mqks
from mqks.testing import BrokerProcess

TIMES = "responseStart", "domContentLoadedEventEnd", "loadEventEnd"
TIMING = """() => {
  const [page] = performance.getEntriesByType("navigation");
  const all = [page, ...performance.getEntriesByType("resource")];
  return {...page.toJSON(), bytes: all.reduce((sum, each) => sum + each.encodedBodySize, 0)};
}"""


def measured(browser: Browser, path: str, queues: int, rounds: int) -> list[list[float]]:
    """Of each view its times and its bytes."""
    with tempfile.TemporaryDirectory() as directory:
        flags = "--http-port", "0", "--page", "read"
        with BrokerProcess(Path(directory) / "mqks.db", *flags) as broker:
            while not (found := re.search(r"address=(http://\S+)", broker.log)):
                time.sleep(0.01)
            with mqks.blocking.connect(broker.url) as client:
                for number in range(queues):
                    client.subscribe(f"queue-{number}", [f"event.{number % 100}"])
                client.publish_many((f"event.{number % 100}", number) for number in range(1000))
            views = list[list[float]]()
            for _ in range(rounds + 1):
                context = browser.new_context(base_url=found[1])
                page = context.new_page()
                answer = page.goto(path, wait_until="load")
                assert answer is not None
                assert answer.ok
                page.wait_for_function(
                    "performance.getEntriesByType('navigation')[0].loadEventEnd > 0"
                )
                told = page.evaluate(TIMING)
                views.append([told[each] for each in (*TIMES, "bytes")])
                context.close()
            return views


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--path", default="/", help="the view")
    parser.add_argument("--queues", type=int, nargs="*", default=[10, 100, 1000])
    wanted = parser.parse_args(arguments)
    print(f"{'queues':>6} {'':12} {'first byte':>12} {'DOMContent':>12} {'load':>12} {'bytes':>9}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for queues in wanted.queues:
            first, *others = measured(browser, wanted.path, queues, wanted.rounds)
            for name, views in (("first", [first]), ("median", others)):
                *times, size = map(statistics.median, zip(*views, strict=True))
                cells = " ".join(f"{each:9.0f} ms" for each in times)
                print(f"{queues:6} {name:12} {cells} {size:9,.0f}")
        browser.close()


if __name__ == "__main__":
    main()
