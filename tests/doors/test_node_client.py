"""The client for Node.js, played against real brokers by the test runner of Node.js.

Its package has what it says, and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import trustme

from mqks import __version__, users_file
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.kit.server_process import ServerProcess
from tests.kit.typist import Typist
from tests.kit.waiting import WAIT_S

NODE = shutil.which("node")
NPM = shutil.which("npm")
HERE = Path(__file__).parents[2] / "clients" / "node"

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")


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
