"""A network in namespaces of Linux, of which cables can be cut. What was sent before, and is sent
again by TCP, arrives when the cable is whole again.

    near ───────── far          clients
     │              │
    broker0     broker1
     └──── data ────┘           databases

The one rule: no address is outside of these namespaces, whose names have the pid of the run.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from tests.takeover.checker import Drained, Event
from tests.takeover.clients import Consumer, Place, Publisher, set_up
from tests.takeover.cluster import LIMIT_S, Brokers, Databases, Life
from tests.takeover.play import drain

P = ParamSpec("P")
T = TypeVar("T")
PLACES = Path("/run/netns")
HUBS = {"near": ["10.2.0.1"], "far": ["10.2.0.2"], "data": ["10.1.0.1", "10.1.0.2"]}
"""What is in one of them is at these addresses."""
DATABASES = HUBS["data"]
BROKERS = ["10.2.0.10", "10.2.0.11"]
CABLES = {
    ("broker0", "near"): BROKERS[0],
    ("broker1", "far"): BROKERS[1],
    ("broker0", "data"): "10.1.0.10",
    ("broker1", "data"): "10.1.0.11",
    ("near", "far"): "",
}
"""The address of the first end; none if that is a hub, too."""
HBA = "local all all trust\nlocal replication all trust\nhost all all 10.1.0.0/24 trust\n"


class NamespacesMissing(Exception):
    """None can be made here."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def named(name: str) -> str:
    return f"mqks-{os.getpid()}-{name}"


def inside(name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in a thread that has entered the namespace. Sockets and processes that it makes are
    in it."""

    def enter() -> T:
        with open(PLACES / named(name)) as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"can't enter {place.name}")
        return call(*args, **kwargs)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


class Namespaces:
    """They exist from entry to exit. Those of runs that were killed are removed first, with what
    still runs there."""

    def __enter__(self) -> Namespaces:
        if os.geteuid() or not shutil.which("ip"):
            raise NamespacesMissing("only root can make network namespaces, with ip (iproute2)")
        _remove(lambda pid: pid == os.getpid() or not Path(f"/proc/{pid}").exists())
        try:
            for name in (*HUBS, "broker0", "broker1"):
                _ip("netns", "add", named(name))
            for name, addresses in HUBS.items():
                _ip("-n", named(name), "link", "add", "hub", "type", "bridge")
                self._set_up(name, "hub", *addresses)
            for (one, other), address in CABLES.items():
                far = ["peer", "name", one, "netns", named(other)]
                _ip("-n", named(one), "link", "add", other, "type", "veth", *far)
                self._set_up(one, other, *([address] if address else []))
                self._set_up(other, one)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NamespacesMissing(f"no network namespace can be made: {error.stderr}") from None
        return self

    def __exit__(self, *_: object) -> None:
        _remove(lambda pid: pid == os.getpid())

    def _set_up(self, name: str, device: str, *addresses: str) -> None:
        if not addresses:
            _ip("-n", named(name), "link", "set", device, "master", "hub")
        for address in addresses:
            _ip("-n", named(name), "address", "add", f"{address}/24", "dev", device)
        _ip("-n", named(name), "link", "set", device, "up")

    def cut(self, one: str, other: str) -> None:
        _ip("-n", named(other), "link", "set", one, "down")

    def heal(self) -> None:
        for one, other in CABLES:
            _ip("-n", named(other), "link", "set", one, "up")


def _remove(is_meant: Callable[[int], bool]) -> None:
    for place in PLACES.glob("mqks-*-*"):
        _, pid, _ = place.name.split("-")
        if is_meant(int(pid)):
            pids = subprocess.run(["ip", "netns", "pids", place.name], capture_output=True).stdout
            for each in pids.split():
                with suppress(ProcessLookupError):
                    os.kill(int(each), signal.SIGKILL)
            # Another run may do the same.
            subprocess.run(["ip", "netns", "delete", place.name], capture_output=True)


class FarDatabases(Databases):
    """Those of `data`; the standby streams without the network."""

    def __init__(self, place: Place, hba: Path) -> None:
        super().__init__(place, count=len(DATABASES))
        self._hba = hba

    def settings(self, number: int) -> dict[str, str]:
        listens = {"listen_addresses": DATABASES[number], "hba_file": str(self._hba)}
        return {**super().settings(number), **listens}


class FarBrokers(Brokers):
    """Each in its namespace."""

    def __init__(self, place: Place, databases: Databases) -> None:
        # With LD_PRELOAD they are no forks of a process elsewhere.
        here = {"MQKS_INSECURE": "true", "LD_PRELOAD": ""}
        environments = {i: {"MQKS_HOST": host, **here} for i, host in enumerate(BROKERS)}
        super().__init__(place, databases, [], environments=environments)

    def _url(self, index: int) -> str:
        return f"postgresql://{','.join(DATABASES)}/postgres?user=postgres&connect_timeout=2"

    def start(self, index: int) -> Life:
        return inside(f"broker{index}", super().start, index)


def play(*, splits: bool) -> list[Event]:
    """The active broker is cut from the databases until another one has taken over, and with
    `splits` also its clients from that one. Clients of both sides go on."""
    place = Place()
    with ExitStack() as stack:
        network = stack.enter_context(Namespaces())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mqks-hba-")))
        directory.chmod(0o755)
        hba = directory / "hba"
        hba.write_text(HBA)
        databases = FarDatabases(place, hba)
        inside("data", stack.enter_context, databases)
        asyncio.run(_play(place, network, databases, splits))
    return place.history


async def _play(place: Place, network: Namespaces, databases: Databases, splits: bool) -> None:
    near, far = (
        replace(place, new_socket=partial(inside, name, socket.socket)) for name in ("near", "far")
    )
    brokers, ends = FarBrokers(place, databases), False
    clients = [
        *(Publisher(near, random.Random(n), lambda: ends, n, once=n > "a") for n in ("a0", "b0")),
        *(Publisher(far, random.Random(n), lambda: ends, n, once=n > "a") for n in ("a1", "b1")),
        *(Consumer(each, random.Random(2), lambda: ends) for each in (near, far)),
    ]
    try:
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(brokers.watch())]
            background.append(group.create_task(brokers.keep(0)))
            old = await brokers.until_served()
            background.append(group.create_task(brokers.keep(1)))
            await set_up(near, old.number)
            running = [group.create_task(client.run()) for client in clients]
            await _progress(brokers, near, far)
            network.cut("broker0", "data")
            if splits:
                network.cut("near", "far")
            await brokers.until_served(above=brokers.epochs[old.number])
            await _progress(brokers, far, *([] if splits else [near]))
            network.heal()
            await _progress(brokers, near, far)
            await brokers.until_lost(old)
            ends = True
            await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)
            await drain(far, brokers, 1)
            place.history.append(Drained())
            for task in background:
                task.cancel()
    finally:
        brokers.end()


async def _progress(brokers: Brokers, *places: Place) -> None:
    for place in places:
        await brokers.until_confirmed(place)
