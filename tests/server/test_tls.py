"""TLS from end to end: our client, our server, certificates of an authority made for the test."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtensionOID

from mqks import AuthenticationFailed, ConnectionLost, Options, users_file
from mqks.commands import main
from mqks.limits import STRANGER_LINE_BYTES_MAX
from mqks.users import User, hash_token
from tests.kit.line_client import LineClient
from tests.kit.ports import free_port
from tests.kit.proxy import Peer
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

TOKEN = "0123456789abcdef"
ALICE = User("alice", token=hash_token(TOKEN), publish=["**"], consume=["**"])


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def write_certificate(authority: trustme.CA, cert: Path, key: Path) -> None:
    issued = authority.issue_cert("127.0.0.1")
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())


def with_tls(
    directory: Path, port: int, authority: trustme.CA | None = None
) -> tuple[ssl.SSLContext, tuple[str, ...]]:
    """What trusts a server, and the flags to start it; its files are `cert.pem` and `key.pem`."""
    authority = authority or trustme.CA()
    cert, key = directory / "cert.pem", directory / "key.pem"
    write_certificate(authority, cert, key)
    listen = ("--tls-host", "127.0.0.1", "--tls-port", str(port), "--insecure")
    return trusting(authority), (*listen, "--tls-cert", str(cert), "--tls-key", str(key))


class TlsServer:
    """A server process with TLS on a port of its own, and alice as its user."""

    def __init__(self, directory: Path, authority: trustme.CA, port: int, *flags: str) -> None:
        self.port, self.users = port, directory / "users"
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        _, tls = with_tls(directory, port, authority)
        users_file.write(self.users, [ALICE])
        users = ("--users", str(self.users), "--auth", "always")
        self.process = ServerProcess(directory / "mqks.db", *tls, *users, *flags)

    def write_certificate(self, authority: trustme.CA) -> None:
        write_certificate(authority, self.cert, self.key)

    @property
    def url(self) -> str:
        return f"mqkss://{TOKEN}@127.0.0.1:{self.port}"

    def reload(self, event: str) -> None:
        """SIGHUP, and wait for what the log says of it."""
        before = self.process.log.count(f"event={event}")
        self.process.hang_up()
        until(lambda: self.process.log.count(f"event={event}") > before)

    def connect(self, context: ssl.SSLContext) -> TlsClient:
        return TlsClient(("127.0.0.1", self.port), context)

    def known(self, context: ssl.SSLContext) -> TlsClient:
        """As alice."""
        client = self.connect(context)
        assert client.ask(b"a auth --confirm " + TOKEN.encode()) == b"a ok "
        return client

    def records(self, context: ssl.SSLContext) -> Records:
        return Records(("127.0.0.1", self.port), context)

    def serial(self, context: ssl.SSLContext) -> object:
        """Which certificate a new connection is shown."""
        with self.connect(context) as client:
            return client.certificate["serialNumber"]


class TlsClient(LineClient):
    def __init__(self, address: tuple[str, int], context: ssl.SSLContext) -> None:
        super().__init__(address)
        self._socket = context.wrap_socket(self._socket, server_hostname=address[0])

    @property
    def certificate(self) -> dict[str, Any]:
        assert isinstance(self._socket, ssl.SSLSocket)
        return self._socket.getpeercert() or {}

    def close_tls(self) -> None:
        """Say goodbye, and hear it."""
        assert isinstance(self._socket, ssl.SSLSocket)
        self._socket = self._socket.unwrap()

    def say_goodbye(self) -> None:
        """And wait for nothing."""
        self._socket.settimeout(0)
        with suppress(ssl.SSLWantReadError):
            self.close_tls()


class Records(LineClient):
    """A client that makes its records before it sends them."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext) -> None:
        super().__init__(address)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=address[0])
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self.hello = self._outgoing.read()

    def shake_hands(self) -> None:
        self.send(self.hello)
        while self._tls.version() is None:
            self._incoming.write(self._socket.recv(65536))
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
        self.send(self._outgoing.read())

    def of(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()


@pytest.fixture(params=["--uvloop", "--no-uvloop"])
def server(
    tmp_path: Path, authority: trustme.CA, tls_port: int, request: pytest.FixtureRequest
) -> Iterator[TlsServer]:
    """Each event loop has a TLS of its own."""
    server = TlsServer(tmp_path, authority, tls_port, request.param, "--drain-timeout-s", "3600")
    with server.process:
        yield server


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[TlsServer]:
    """One for all who are not let in."""
    server = TlsServer(tmp_path_factory.mktemp("tls"), authority, free_port())
    with server.process:
        yield server


@pytest.mark.anyio
async def test_messages_over_tls(server: TlsServer, authority: trustme.CA, connect: Any) -> None:
    """Large ones too, and many."""
    options = Options(ssl_context=trusting(authority))
    data = "x" * 500_000
    async with connect(server.url, options) as client, client.consume("q", ["e"]) as consumer:
        await client.publish_many([("e", data)] * 20)
        for _ in range(20):
            message = await consumer.receive(timeout_s=WAIT_S)
            assert message.text == data
            message.ack()


NOT_TRUSTED = (
    r"certificate .* is not trusted: .*SSL_CERT_FILE=ca\.pem.*"
    r"Options\(ssl_context=ssl\.create_default_context\(cafile='ca\.pem'\)\)"
)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("right", "wrong", "trusts", "told"),
    [
        pytest.param(TOKEN, "wrong", True, "AuthenticationFailed", id="token"),
        pytest.param("", "", False, NOT_TRUSTED, id="authority"),
        pytest.param(
            "127.0.0.1", "localhost", True, r"localhost:\d+ is for another name", id="name"
        ),
        pytest.param(
            "mqkss", "mqks", True, "if the port speaks TLS, write mqkss:// in", id="plain"
        ),
    ],
)
async def test_a_connection_that_fails_says_why(
    lasting: TlsServer,
    authority: trustme.CA,
    connect: Any,
    right: str,
    wrong: str,
    trusts: bool,
    told: str,
) -> None:
    context = trusting(authority) if trusts else None
    options = Options(ssl_context=context, connect_again=False, connect_timeout_s=WAIT_S)
    with pytest.raises((AuthenticationFailed, ConnectionLost)) as failure:
        async with connect(lasting.url.replace(right, wrong), options):
            pass
    assert re.search(told, repr(failure.value), re.S)


@pytest.mark.anyio
async def test_tls_with_a_port_that_does_not_speak_it(server: TlsServer, connect: Any) -> None:
    """At once: without an answer the client would wait for its handshake."""
    options = Options(connect_again=False, connect_timeout_s=WAIT_S)
    with pytest.raises(ConnectionLost, match=r"the port does not speak TLS: write mqks://"):
        async with connect(f"mqkss://127.0.0.1:{server.process.port}", options):
            pass
    until(
        lambda: 'reason="this port does not speak TLS: connect with mqks://' in server.process.log
    )
    assert server.process.log.count("event=request_failed") == 1


@pytest.mark.anyio
async def test_tls_with_a_port_that_never_answers(connect: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    options = Options(connect_timeout_s=0.3)
    told = "no answer to the TLS handshake; perhaps the port does not speak TLS"
    with Peer(serve) as peer, pytest.raises(ConnectionLost, match=told):
        async with connect(f"mqkss://127.0.0.1:{peer.port}", options):
            pass


def test_commands_at_the_wrong_port(lasting: TlsServer, capsys: pytest.CaptureFixture[str]) -> None:
    plain = f"127.0.0.1:{lasting.process.port}"
    assert main(["inspect", "queues", "--url", f"mqkss://{plain}"]) == 69
    told = f"mqks: no server at {plain}: the port does not speak TLS: write mqks://"
    assert capsys.readouterr().err.startswith(told)
    for words in (["ping"], ["inspect", "queues"]):
        assert main([*words, "--url", lasting.url.replace("mqkss", "mqks")]) == 69
        assert "if the port speaks TLS, write mqkss:// in the URL" in capsys.readouterr().err


def test_a_client_must_show_its_certificate_where_asked(
    tmp_path: Path, authority: trustme.CA, tls_port: int
) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    with_certificate, with_anothers = trusting(authority), trusting(authority)
    authority.issue_cert("client@example.org").configure_cert(with_certificate)
    trustme.CA().issue_cert("client@example.org").configure_cert(with_anothers)
    server = TlsServer(tmp_path, authority, tls_port, "--tls-client-ca", str(ca))
    with server.process:
        server.known(with_certificate).close()
        for context in (trusting(authority), with_anothers):
            # In TLS 1.3 the client learns of it only when it reads.
            with pytest.raises((EOFError, OSError)), server.connect(context) as client:
                client.ask(b"p ping x")
        until(lambda: server.process.log.count("event=tls_failed") == 2)


@pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])
def test_a_certificate_with_a_name_that_is_no_text(
    tmp_path: Path, authority: trustme.CA, tls_port: int, loop: str
) -> None:
    """The authority has signed it; the server does not use its names."""
    ca, mine = tmp_path / "ca.pem", tmp_path / "mine.pem"
    authority.cert_pem.write_to_path(ca)
    mine.write_bytes(without_text(authority))
    server = TlsServer(tmp_path, authority, tls_port, "--tls-client-ca", str(ca), loop)
    with server.process:
        context = trusting(authority)
        context.load_cert_chain(mine)
        with server.connect(context) as client:
            assert client.ask(b"p ping x") == b"p ok x"


def without_text(authority: trustme.CA) -> bytes:
    """Certificate and key, with a DNS name of two bytes that are not UTF-8."""
    signer = load_pem_private_key(authority.private_key_pem.bytes(), None)
    assert isinstance(signer, EllipticCurvePrivateKey)
    key = generate_private_key(SECP256R1())
    names = x509.UnrecognizedExtension(
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x04\x82\x02\xff\xfe"
    )
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.load_pem_x509_certificate(authority.cert_pem.bytes()).subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(signer, SHA256())
    )
    return cert.public_bytes(Encoding.PEM) + key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


def test_a_socket_that_is_handed_over(tmp_path: Path, authority: trustme.CA) -> None:
    """One named `tls` speaks it, and the others do not."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_certificate(authority, cert, key)
    files = ("--tls-cert", str(cert), "--tls-key", str(key))
    with (
        socket.create_server(("127.0.0.1", 0)) as plain,
        socket.create_server(("127.0.0.1", 0)) as tls,
    ):
        sockets = {"plain": plain, "tls": tls}
        with (
            ServerProcess(tmp_path / "mqks.db", *files, sockets=sockets),
            LineClient(plain.getsockname()) as one,
            TlsClient(tls.getsockname(), trusting(authority)) as two,
        ):
            assert one.ask(b"p ping x") == two.ask(b"p ping x") == b"p ok x"


def test_old_versions_of_tls_are_refused(server: TlsServer, authority: trustme.CA) -> None:
    context = trusting(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with server.connect(context) as client:
        assert client.ask(b"p ping x") == b"p ok x"
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.connect(context)


def test_the_end_of_a_connection_that_broke_the_rules(
    server: TlsServer, authority: trustme.CA
) -> None:
    """It gets its error, and an end."""
    with server.connect(trusting(authority)) as client:
        client.send(b"p ping " + b"x" * 2 * STRANGER_LINE_BYTES_MAX)
        assert client.line().startswith(b"p error ")
        with pytest.raises(EOFError):
            client.line()


def test_a_client_that_says_goodbye(server: TlsServer, authority: trustme.CA) -> None:
    """Its consumers go, as the server closes its side too."""
    context = trusting(authority)
    with server.known(context) as client, server.known(context) as other:
        assert client.ask(b"c consume --confirm q e --manual-ack") == b"c ok "
        assert other.ask(b"m publish --confirm e x") == b"m ok "
        assert client.line() == b"c ok m event=e x"
        client.close_tls()
        assert other.ask(b"d consume q") == b"d ok m event=e,retry=1 x"


def test_what_came_before_a_goodbye_is_done(server: TlsServer, authority: trustme.CA) -> None:
    """However long it takes: the goodbye comes with it, while others have their turns."""
    events, count = 20_000, 100
    context = trusting(authority)
    with server.known(context) as client, server.known(context) as other:
        names = b" ".join(b"f%d" % number for number in range(events))
        assert client.ask(b"s subscribe --confirm r " + names) == b"s ok "
        assert client.ask(b"c consume --confirm q e --manual-ack") == b"c ok "
        assert client.ask(b"m publish e x") == b"c ok m event=e x"
        costly = b"r rebind r --remove-mask *nothing*\n"
        lines = [costly + b"m%d publish e x\n" % number for number in range(count)]
        with server.process.paused():
            client.send(b"".join(lines) + b"k ack c m\n")
            client.say_goodbye()
        assert other.ask(b"d consume --confirm q") == b"d ok "
        # What the client had been given and not acked comes again.
        got = {other.line().split(b" ")[2] for _ in range(count)}
        assert got == {b"m%d" % number for number in range(count)}


def test_a_broken_record(server: TlsServer, authority: trustme.CA) -> None:
    """What came before it is done, also where its replies cannot be sent any more, and others do
    not notice."""
    context, count = trusting(authority), 40
    with server.known(context) as other, server.records(context) as records:
        assert other.ask(b"c consume --confirm q e") == b"c ok "
        lines = [b"a auth " + TOKEN.encode()]
        for number in range(count):
            lines += [b"p ping " + b"x" * 1000, b"m%d publish e x" % number]
        records.shake_hands()
        good = b"".join(records.of(line + b"\n") for line in lines)
        with server.process.paused():
            records.send(good + b"no record")
        for number in range(count):
            assert other.line() == b"c ok m%d event=e x" % number
        assert other.ask(b"p ping y") == b"p ok y"
        until(lambda: "event=tls_failed" in server.process.log)


def test_a_handshake_in_very_many_records(server: TlsServer, authority: trustme.CA) -> None:
    """Each takes some time."""
    with server.records(trusting(authority)) as records:
        header, body = records.hello[:3], records.hello[5:]
        pieces = [header + b"\0\1" + body[each : each + 1] for each in range(len(body))]
        with suppress(ConnectionError):
            records.send(b"".join(pieces))
        until(lambda: 'reason="more than 64 TLS records without data' in server.process.log)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_client_that_does_nothing_but_change_its_keys(server: TlsServer) -> None:
    """Each change takes some time: a client has a few in a minute."""
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{server.port}"]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=nothing, stderr=nothing, bufsize=0) as peer:

        def change_keys() -> bool:
            assert peer.stdin is not None
            with suppress(BrokenPipeError):
                peer.stdin.write(b"K\n")
            return 'reason="more than 16 TLS records without data' in server.process.log

        until(change_keys)
        peer.kill()


def test_a_stop_with_clients(server: TlsServer, authority: trustme.CA) -> None:
    """One idle, one in the middle of its handshake: both learn of it, and neither delays it."""
    with (
        server.connect(trusting(authority)) as idle,
        closing(socket.create_connection(("127.0.0.1", server.port))),
    ):
        assert idle.ask(b"p ping x") == b"p ok x"
        assert server.process.terminate() == 0
        idle.rest()
    assert "level=error" not in server.process.log


def test_silent_handshakes_make_room(tmp_path: Path, authority: trustme.CA, tls_port: int) -> None:
    """They count before they have begun, and the oldest goes."""
    server = TlsServer(tmp_path, authority, tls_port, "--unauthenticated-max", "3")
    with server.process:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        with server.connect(trusting(authority)) as client:
            assert client.ask(b"p ping x") == b"p ok x"
        silent[0].settimeout(WAIT_S)
        with suppress(ConnectionError):
            assert silent[0].recv(1) == b""
        for each in silent:
            each.close()


def test_a_handshake_has_its_time(tmp_path: Path, authority: trustme.CA, tls_port: int) -> None:
    server = TlsServer(tmp_path, authority, tls_port, "--auth-timeout-s", "0.3")
    with server.process, closing(socket.create_connection(("127.0.0.1", server.port))) as silent:
        silent.settimeout(WAIT_S)
        with suppress(ConnectionError):
            assert silent.recv(1) == b""


# -------------------------------------------------------------------------------------- reload


def test_a_new_certificate_without_a_new_connection(
    server: TlsServer, authority: trustme.CA
) -> None:
    context = trusting(authority)
    before = server.serial(context)
    with server.known(context) as old:
        assert old.ask(b"c consume --confirm q e") == b"c ok "
        server.write_certificate(authority)
        assert server.serial(context) == before
        server.reload("reloaded")
        after = server.serial(context)
        assert after != before
        assert old.certificate["serialNumber"] == before
        old.send(b"m publish e x\n")
        assert old.line() == b"c ok m event=e x"


@pytest.mark.parametrize("bad", ["cert", "key", "users"])
def test_a_bad_file_changes_nothing(server: TlsServer, authority: trustme.CA, bad: str) -> None:
    """Neither what is bad nor what is good beside it."""
    context = trusting(authority)
    before = server.serial(context)
    server.write_certificate(authority)
    users_file.write(server.users, [])
    path: Path = getattr(server, bad)
    path.write_text("nonsense")
    server.reload("reload_failed")
    assert re.search(rf"level=error event=reload_failed .*{path.name}", server.process.log)
    assert server.serial(context) == before
    server.known(context).close()


def test_users_that_changed(server: TlsServer, authority: trustme.CA) -> None:
    """Who is gone is thrown out; who may do less keeps the connection, not the consumer."""
    bob = User("bob", token=hash_token("bob"), publish=["**"], consume=["**"])
    users_file.write(server.users, [ALICE, bob])
    server.reload("reloaded")
    context = trusting(authority)
    with server.known(context) as alice, server.connect(context) as other:
        assert other.ask(b"a auth --confirm bob") == b"a ok "
        assert other.ask(b"b consume --confirm mail e") == b"b ok "
        bob.consume = ["news"]
        users_file.write(server.users, [bob])
        server.reload("reloaded")
        assert alice.line().startswith(b"- error ")
        with pytest.raises(EOFError):
            alice.line()
        assert other.ask(b"m publish --confirm e x") == b"m ok "
        assert other.ask(b"c consume --confirm news e") == b"c ok "
        assert other.ask(b"d consume --confirm mail")[:8] == b"d error "


@pytest.mark.parametrize("bad", ["cert", "key", "client_ca"])
def test_a_server_without_its_certificate_does_not_start(
    tmp_path: Path, authority: trustme.CA, tls_port: int, bad: str
) -> None:
    server = TlsServer(
        tmp_path, authority, tls_port, f"--tls-{bad.replace('_', '-')}", "missing.pem"
    )
    assert server.process.wait() == 78
    assert "missing.pem" in server.process.log
