"""The unit under a real systemd: settings, files that only root may read, and their renewal."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
import trustme

from tests.kit.ports import free_port
from tests.kit.systemd import Systemd, SystemdMissing
from tests.kit.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systemd]:
    try:
        with Systemd(tmp_path_factory.mktemp("systemd")) as running:
            yield running
    except SystemdMissing as error:
        pytest.skip(str(error))


def log_of(systemd: Systemd, command: str, last: str = "event=listening") -> str:
    """What the unit logs from this command on, and the command prints: until it has the last line
    to look for, as the journal gets it a moment later."""
    read = "journalctl", "--unit=mqks", "--output=cat"
    before = systemd.run(*read)
    told = systemd.run("sh", "-c", command)

    def log() -> str:
        return told + systemd.run(*read).removeprefix(before)

    until(lambda: last in log(), log)
    return log()


def write_certificate(systemd: Systemd, authority: trustme.CA) -> None:
    """Files that only root may read."""
    issued = authority.issue_cert("127.0.0.1")
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    systemd.write("/etc/ssl/mqks/fullchain.pem", chain.decode(), mode="600")
    systemd.write("/etc/ssl/mqks/privkey.pem", issued.private_key_pem.bytes().decode(), mode="600")


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port))


def test_the_variables_of_the_unit_are_used(systemd: Systemd) -> None:
    port = free_port()
    systemd.write("/etc/default/mqks", f"MQKS_PORT={port}\nMQKS_PAGE=off\nMQKS_DB=other.db\n")
    log = log_of(systemd, "systemctl restart mqks")
    assert "event=created db=other.db" in log
    assert f"address=127.0.0.1:{port}" in log
    # Of two places with different values, the one without effect is told.
    systemd.write("/etc/default/mqks", f"MQKS_PORT={port}\nMQKS_PAGE=off\n")
    systemd.run("sh", "-c", "echo 'port = 1' > /var/lib/mqks/mqks.toml")
    log = log_of(systemd, "chmod 644 /var/lib/mqks/mqks.toml; systemctl restart mqks")
    assert "event=overridden setting=port used=MQKS_PORT ignored=" in log
    assert "event=created db=mqks.db" in log
    systemd.run("rm", "/var/lib/mqks/mqks.toml")


def test_users_and_a_key_that_only_root_may_read(systemd: Systemd) -> None:
    port, tls_port = free_port(), free_port()
    authority = trustme.CA()
    write_certificate(systemd, authority)
    # As docs/install.md says.
    systemd.write(
        "/etc/systemd/system/mqks.service.d/override.conf",
        "[Service]\n"
        "LoadCredential=tls_cert:/etc/ssl/mqks/fullchain.pem\n"
        "LoadCredential=tls_key:/etc/ssl/mqks/privkey.pem\n"
        f"Environment=MQKS_TLS_PORT={tls_port} MQKS_TLS_CERT=%d/tls_cert MQKS_TLS_KEY=%d/tls_key\n"
        "Environment=MQKS_USERS=/var/lib/mqks/users MQKS_AUTH=always\n",
    )
    systemd.write("/etc/default/mqks", f"MQKS_PORT={port}\nMQKS_PAGE=off\n")
    systemd.run("mkdir", "--parents", "/var/lib/mqks")
    add = "mqks user add shop --token --publish 'orders.**' --users /var/lib/mqks/users"
    token = systemd.run("sh", "-c", add).split()[-1]
    log = log_of(systemd, "systemctl daemon-reload; systemctl restart mqks")
    assert f"address=127.0.0.1:{port}" in log
    first = served_certificate(tls_port)
    publish = f"mqks publish --no-mandatory orders.new hello --url mqks://{token}@127.0.0.1:{port}"
    assert "error" not in systemd.run("sh", "-c", publish)

    # A new user is let in after a reload, and a new certificate is used after a restart.
    added = systemd.run("sh", "-c", add.replace("shop", "bill")).split()[-1]
    systemd.run("systemctl", "reload", "mqks")
    bill = publish.replace(token, added)
    assert until(lambda: "error" not in systemd.run("sh", "-c", bill))
    write_certificate(systemd, authority)
    log_of(systemd, "systemctl restart mqks")
    assert served_certificate(tls_port) != first
    assert "error" not in systemd.run("sh", "-c", bill)
