"""`python -m benchmarks.footprint`: installed size, memory, and memory per message and connection.

The installed size is that of the package and of everything it depends on, without extras. Memory is
the resident memory of a broker process: empty, with messages that wait in a queue, and with
connections that have had an answer of 20,000 bytes, and sent half of a line.

The one rule: nothing is estimated; each figure is read from the file system, /proc or the server.
"""

import argparse
import json
import re
import socket
import ssl
import tempfile
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import trustme

import mqks
from benchmarks.flow import free_port
from mqks.testing import BrokerProcess

AT_ONCE = 1_000_000
CONNECTIONS = 400
ANSWER = b"p ok " + b"x" * 20_000 + b"\n"
HOST = "127.0.0.1"


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


def measured(count: int, data_bytes: int) -> dict[str, float]:
    data = "x" * data_bytes
    sizes = {name: installed_bytes(name) for name in needed("mqks", set())}
    with tempfile.TemporaryDirectory() as directory:
        db = Path(directory, "mqks.db")
        with BrokerProcess(db) as broker, mqks.blocking.connect(broker.url) as client:
            client.subscribe("q", ["e"])
            empty = broker.resident_bytes
            for left in range(count, 0, -AT_ONCE):
                messages = (("e", data) for _ in range(min(left, AT_ONCE)))
                client.publish_many(messages, timeout_s=600)
            full = broker.resident_bytes
            stats = json.loads(client.request("stats"))
            assert stats["messages_ready"] == count
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        disk = sum(path.stat().st_size for path in files)
    return {
        "installed_bytes": sum(sizes.values()),
        "installed_without_dependencies_bytes": sizes["mqks"],
        "empty_broker_bytes": empty,
        "message_memory_bytes": (full - empty) / count,
        "message_counted_bytes": stats["memory_bytes"] / count,
        "full_broker_bytes": full,
        "disk_bytes": disk,
        "message_disk_bytes": disk / count,
    }


def connection_bytes(directory: Path, *, with_tls: bool) -> float:
    context, port, flags = ssl.create_default_context(), free_port(), ["--insecure"]
    if with_tls:
        authority = trustme.CA()
        authority.configure_trust(context)
        pem = directory / "cert.pem"
        authority.issue_cert(HOST).private_key_and_cert_chain_pem.write_to_path(pem)
        flags += ["--tls-host", HOST, "--tls-port", str(port), "--tls-cert", str(pem)]
        flags += ["--tls-key", str(pem)]
    with BrokerProcess(directory / "mqks.db", *flags) as broker, ExitStack() as connections:
        empty = broker.resident_bytes
        for _ in range(CONNECTIONS):
            plain = socket.create_connection((HOST, port if with_tls else broker.port))
            client = context.wrap_socket(plain, server_hostname=HOST) if with_tls else plain
            connections.enter_context(client)
            client.sendall(ANSWER.replace(b"ok", b"ping") + b"p ping")
            with client.makefile("rb") as lines:
                assert lines.readline() == ANSWER
        return (broker.resident_bytes - empty) / CONNECTIONS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="messages that wait")
    parser.add_argument("--bytes", type=int, default=100, help="of data of each")
    wanted = parser.parse_args(arguments)
    figures = measured(wanted.count, wanted.bytes)
    for name, with_tls in (("connection_bytes", False), ("tls_connection_bytes", True)):
        with tempfile.TemporaryDirectory() as directory:
            figures[name] = connection_bytes(Path(directory), with_tls=with_tls)
    for name, figure in figures.items():
        print(f"{name:38} {figure:14,.0f}")


if __name__ == "__main__":
    main()
