"""The client for Node.js: its own tests and its package; what it does while its server is stopped,
killed and started again, and while it stands still itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme

from mqks import ConnectionLost, Options, ReplyTimeout, __version__, users_file
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.client.conftest import QUICK
from tests.kit.node_skin import Driver, NodeClient
from tests.kit.proxy import Peer
from tests.kit.server_process import ServerProcess
from tests.kit.typist import Typist
from tests.kit.waiting import WAIT_S

NODE = shutil.which("node")
NPM = shutil.which("npm")
HERE = Path(__file__).parents[2] / "clients" / "node"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(NODE is None, reason="there is no node on this machine"),
]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_it_keeps_what_it_promises(mqks_broker: Broker, tmp_path: Path, tls_port: int) -> None:
    authority = trustme.CA()
    ca, cert, key = (tmp_path / f"{each}.pem" for each in ("ca", "cert", "key"))
    authority.cert_pem.write_to_path(str(ca))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    users = tmp_path / "users"
    alice = User("alice", token=hash_token("secret"), publish=["mine"])
    users_file.write(users, [alice])
    with ServerProcess(
        tmp_path / "tls.db",
        *("--tls-port", str(tls_port), "--tls-host", "127.0.0.1"),
        *("--tls-cert", str(cert), "--tls-key", str(key)),
        *("--users", str(users), "--auth", "always"),
    ) as server:
        host, port = server.address
        told = run(
            str(NODE),
            "--test",
            MQKS_URL=mqks_broker.url,
            MQKS_USER_URL=f"mqks://secret@{host}:{port}",
            MQKS_TLS_URL=f"mqkss://secret@127.0.0.1:{tls_port}",
            MQKS_CA=str(ca),
        )
    assert re.search(r"^# fail 0$", told, re.M), told


@pytest.mark.slow
def test_its_page_can_be_typed(server: ServerProcess, tmp_path: Path) -> None:
    if NPM is None:
        pytest.skip("there is no npm on this machine")
    (tmp_path / "clients").symlink_to(HERE.parent)
    with Typist(tmp_path, server.url, with_spark=False) as typist:
        typist.environment["npm_config_offline"] = "true"
        typist.type((HERE / "README.md").read_text())
    assert typist.typed == 3


def test_every_option_is_told_to_typescript() -> None:
    options = set(
        re.findall(r"^  (\w+): ", _between((HERE / "mqks.js").read_text(), "DEFAULTS"), re.M)
    )
    typed = re.findall(r"^  (\w+)\?: ", _between((HERE / "mqks.d.ts").read_text(), "Options"), re.M)
    assert options == set(typed)
    assert options


def _between(text: str, name: str) -> str:
    """What the braces behind a name have in them."""
    return re.split(rf"\b{name}(?: =)? {{\n", text)[1].partition("\n}")[0]


def test_the_package_has_the_client_and_nothing_else() -> None:
    if NPM is None:
        pytest.skip("there is no npm on this machine")
    told = json.loads(run(NPM, "pack", "--dry-run", "--json", "--offline"))
    names = sorted(each["path"] for each in told[0]["files"])
    assert names == ["README.md", "mqks.d.ts", "mqks.js", "package.json"]
    package = json.loads((HERE / "package.json").read_text())
    assert "dependencies" not in package
    assert package["version"] == __version__.replace(".dev", "-dev")


@pytest.fixture
async def driver() -> AsyncIterator[Driver]:
    driver = Driver()
    yield driver
    await driver.stop()


async def settled(asked: list[asyncio.Future[Any]]) -> list[Any]:
    """What each promise has become: a value, or the error."""
    with anyio.fail_after(WAIT_S):
        return await asyncio.gather(*asked, return_exceptions=True)


def quick(**options: Any) -> Options:
    return Options(
        **{"keep_alive_s": WAIT_S, "reconnect_min_s": 0.01, "reconnect_max_s": 0.05} | options
    )


@pytest.mark.parametrize(
    "verb",
    [
        "ack",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("reject", "release", "touch")),
    ],
)
async def test_a_delivery_of_a_lost_connection_is_never_settled(
    driver: Driver, server: ServerProcess, verb: str
) -> None:
    async with (
        NodeClient(driver, server.url, quick(in_flight_max=2)) as client,
        client.consume("q", ["e"]) as consumer,
    ):
        await client.publish_many([("e", n) for n in range(5)])
        messages = [await consumer.receive(WAIT_S) for _ in range(5)]
        server.suspend()
        asked = [message.ask(verb, confirm=True) for message in messages]
        await driver.heard()
        server.kill()
        server.start()
        assert await settled(asked) == [False] * 5
        again = [await consumer.receive(WAIT_S) for _ in range(5)]
        assert sorted(message.json() for message in again) == [*range(5)]
        assert await settled([message.ask(verb, confirm=True) for message in again]) == [True] * 5


@pytest.mark.parametrize("comes_back", [True, False])
async def test_what_waits_for_room_is_settled(
    driver: Driver, server: ServerProcess, comes_back: bool
) -> None:
    timeout_s = WAIT_S if comes_back else 0.5
    async with NodeClient(driver, server.url, quick(timeout_s=timeout_s)) as client:
        await client.subscribe("q", ["e"])
        server.suspend()
        asked = [client.publishing("e", "x" * 500_000, confirm=False) for _ in range(40)]
        # The first ones fill the buffers, the others wait for room.
        await asked[0]
        assert not asked[-1].done()
        server.kill()
        if comes_back:
            server.start()
        told = await settled(asked)
        refused = [each for each in told if isinstance(each, Exception)]
        assert all(isinstance(each, ReplyTimeout) for each in refused)
        assert bool(refused) is not comes_back
        if comes_back:
            assert await client.publish("e", "last", confirm=True, id="last") == "last"


async def test_consume_and_get_have_a_time_limit_while_the_server_is_away(
    driver: Driver, server: ServerProcess
) -> None:
    async with NodeClient(driver, server.url, quick()) as client:
        await client.subscribe("q", ["e"])
        for is_there in (True, False):
            if is_there:
                server.suspend()
            else:
                server.kill()
            limits = {"timeoutMs": 50}
            asked = [client.ask(call, "q", limits) for call in ("consume", "get")]
            for told in await settled(asked):
                assert isinstance(told, ReplyTimeout)
                assert "the consumer has not started in time" in str(told)
                assert ("ECONNREFUSED" in str(told)) is not is_there
            os.kill(server.pid, signal.SIGCONT) if is_there else server.start()
        await client.publish("e", "x", confirm=True)
        assert (await client.ask("get", "q", {"timeoutMs": WAIT_S * 1000}))["event"] == "e"


async def test_an_answer_that_came_while_it_stood_still_is_heard(driver: Driver) -> None:
    pinged, resumed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if b" ping alive" in line:
                loop.call_soon_threadsafe(pinged.set)
                while not resumed.is_set():
                    await asyncio.sleep(0.001)
            writer.write(line.split()[0] + b" ok \n")

    with Peer(serve) as peer:
        async with NodeClient(driver, peer.url, QUICK) as client:
            await pinged.wait()
            with driver.lock:
                resumed.set()
                # Both limits are over when it goes on, and the answer is there.
                await anyio.sleep(5 * QUICK.keep_alive_s)
            assert await client.ping("x") == ""
            assert peer.accepted == 1


async def test_a_dead_port_is_an_error_with_its_reason(driver: Driver, tmp_path: Path) -> None:
    for url, reason in (
        ("mqks://127.0.0.1:1", "ECONNREFUSED"),
        (f"mqks+unix://{tmp_path}/none", "ENOENT"),
    ):
        with pytest.raises(ConnectionLost, match=rf"^not connected within 0\.2 s: .*{reason}"):
            await NodeClient(driver, url, quick(connect_timeout_s=0.2)).__aenter__()
