"""Hello world and the web page of the installed `mqks`, from its first log line to its exit code.

    python .ci/smoke.py PATH_OF_MQKS DIRECTORY

The one rule: everything that could wait for ever ends after `TIMEOUT_S` seconds.
"""

import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

TIMEOUT_S = 30
REQUESTS = b"""\
Alice consume --confirm greetings hi hello
Bob consume --confirm greetings hi hello
Charlie consume --confirm greetings-and-byes hi hello bye good-bye
Dave publish hello world
"""
DELIVERY = b" ok Dave event=hello world"


def listening(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The address from the line that says the server is up."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {line}", end="")
        found = re.search(rf"\baddress={pattern}", line)
        if found and "event=listening" in line:
            return found
    sys.exit("the server ended, or was ended, before it listened")


def hello_world(address: tuple[str, int]) -> None:
    """One of Alice and Bob, and Charlie besides, get what Dave publishes."""
    with socket.create_connection(address, TIMEOUT_S) as connection:
        connection.sendall(REQUESTS)
        with connection.makefile("rb") as replies:
            received: set[bytes] = set()
            while len(received) < 5 and (line := replies.readline()):
                received.add(line.rstrip(b"\n"))
    print(f"  {received}")
    confirms = {b"Alice ok ", b"Bob ok ", b"Charlie ok "}
    delivered = {line.removesuffix(DELIVERY) for line in received - confirms}
    if not received >= confirms or delivered not in ({b"Alice", b"Charlie"}, {b"Bob", b"Charlie"}):
        sys.exit("these are not the replies of a hello world")


def page(url: str) -> None:
    """Fetch the web page, and the files that it is made of."""
    with urlopen(url, timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    files = re.findall(r'"(/static/[^"]+)"', text)
    if "<h1>Overview</h1>" not in text or not files:
        sys.exit("this is not the web page")
    for file in files:
        urlopen(url.rstrip("/") + file, timeout=TIMEOUT_S).close()
    print(f"  the web page: {len(text)} characters, {len(files)} files")


def main(mqks: str, directory: str) -> None:
    database = Path(directory, "smoke.db")
    command = [mqks, "serve", "--port", "0", "--http-port", "0", "--db", str(database)]
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            address = listening(process, r"([\d.]+):(\d+)")
            web = listening(process, r"(http://\S+)")
            hello_world((address[1], int(address[2])))
            page(web[1])
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate()
        finally:
            watchdog.cancel()
            process.kill()
    print("".join(f"  {line}\n" for line in rest.splitlines()), end="")
    if process.returncode != 0:
        sys.exit(f"SIGTERM ended the server with {process.returncode}, not 0")


if __name__ == "__main__":
    main(*sys.argv[1:])
