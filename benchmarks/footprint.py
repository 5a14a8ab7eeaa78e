"""`python -m benchmarks.footprint`: installed size, memory, and memory per message.

The installed size is that of the package and of everything it depends on, without extras. Memory is
the resident memory of a broker process: empty, and with messages of 100 bytes that wait in a queue.

The one rule: nothing is estimated; each figure is read from the file system, /proc or the server.
"""

import argparse
import json
import re
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import mqks
from mqks.testing import BrokerProcess

PAYLOAD = "x" * 100


def needed(name: str, found: set[str]) -> set[str]:
    """The distributions that one needs without its extras, itself included."""
    if name not in found:
        found.add(name)
        for requirement in distribution(name).requires or []:
            word, _, marker = requirement.partition(";")
            if "extra" not in marker and (match := re.match(r"[\w.-]+", word)):
                try:
                    needed(match[0], found)
                except PackageNotFoundError:
                    found.discard(match[0])  # Not for this system or Python.
    return found


def installed_bytes(name: str) -> int:
    if name == "mqks":  # From a checkout its files are not listed.
        package = Path(mqks.__file__).parent
        return sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
    files = (Path(str(file.locate())) for file in distribution(name).files or [])
    return sum(file.stat().st_size for file in files if file.is_file())


def measured(count: int) -> dict[str, float]:
    sizes = {name: installed_bytes(name) for name in needed("mqks", set())}
    with tempfile.TemporaryDirectory() as directory:
        db = Path(directory, "mqks.db")
        with BrokerProcess(db) as broker, mqks.blocking.connect(broker.url) as client:
            client.subscribe("q", ["e"])
            empty = broker.resident_bytes
            client.publish_many(("e", PAYLOAD) for _ in range(count))
            full = broker.resident_bytes
            stats = json.loads(client.request("stats"))
            assert stats["messages_ready"] == count
    return {
        "installed_bytes": sum(sizes.values()),
        "installed_without_dependencies_bytes": sizes["mqks"],
        "empty_broker_bytes": empty,
        "message_memory_bytes": (full - empty) / count,
        "message_counted_bytes": stats["memory_bytes"] / count,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="messages that wait")
    count = parser.parse_args(arguments).count
    for name, figure in measured(count).items():
        print(f"{name:38} {figure:14,.0f}")


if __name__ == "__main__":
    main()
