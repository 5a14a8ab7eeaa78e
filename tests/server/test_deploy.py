"""The server under a service manager: notifications, sockets that are handed over, reloads; and
what deploy/ holds.

Real server processes; what a service manager does is done by a datagram socket and by descriptors.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from mqks import errors
from mqks.commands import main
from mqks.errors import ConfigurationError
from mqks.journal.sqlite.lock import server_of
from mqks.server.listeners import take_sockets
from mqks.server.notify import Notify
from mqks.settings import DatabaseUrl, Settings
from tests.kit.line_client import LineClient
from tests.kit.server_process import Inheritable, ServerProcess
from tests.kit.waiting import WAIT_S, until

ROOT = Path(__file__).parents[2]
EXIT_CONFIGURATION = 78


class ServiceManager:
    """The end of NOTIFY_SOCKET that reads; `name` is a path, or abstract with @ in front."""

    def __init__(self, name: str, watchdog_s: float = 0) -> None:
        self.environment = {"NOTIFY_SOCKET": name}
        if watchdog_s:
            self.environment["WATCHDOG_USEC"] = f"{watchdog_s * 1e6:.0f}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(name.replace("@", "\0"))

    def told(self, seconds: float = WAIT_S) -> dict[str, str]:
        """The next datagram; TimeoutError when none comes."""
        self._socket.settimeout(seconds)
        lines = self._socket.recv(4096).decode().split("\n")
        return {key: value for key, _, value in (line.partition("=") for line in lines)}

    def wait_for(self, variable: str) -> dict[str, str]:
        """The next datagram that assigns this; everything before it is dropped."""
        limit = time.monotonic() + WAIT_S
        while variable not in (told := self.told()):
            assert time.monotonic() < limit, f"{variable} is never told"
        return told

    def drop_all(self) -> None:
        """Everything that was told so far."""
        with suppress(BlockingIOError):
            while True:
                self.told(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@contextmanager
def managed(
    db: Path, *flags: str, watchdog_s: float = 0, **environment: str
) -> Iterator[tuple[ServiceManager, ServerProcess]]:
    with (
        ServiceManager(str(db.with_name("notify")), watchdog_s) as manager,
        ServerProcess(db, *flags, environment=manager.environment | environment) as server,
    ):
        yield manager, server


# ------------------------------------------------------------------------- what the manager is told


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_ready_means_that_clients_can_connect(db: Path, kind: str) -> None:
    name = str(db.with_name("notify")) if kind == "path" else f"@mqks-test-{os.getpid()}"
    with ServiceManager(name) as manager, ExitStack() as cleanup:
        server = ServerProcess(db, environment=manager.environment)
        cleanup.callback(server.kill)
        before = []
        while "READY" not in (told := manager.told()):
            before.append(told)
        found = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)", told["STATUS"])
        assert found
        with LineClient(("127.0.0.1", int(found[1]))) as client:
            assert client.ask(b"p ping") == b"p ok "
        # It asked for time while it read its journal.
        assert before == [{"STATUS": "reading the journal"}, {"EXTEND_TIMEOUT_USEC": "90000000"}]

        assert server.terminate() == 0
        assert manager.wait_for("STOPPING")["STOPPING"] == "1"


def hanging(db: Path, sync_library: Path) -> tuple[Path, dict[str, str]]:
    """While this file exists, syncs hang of what has this environment."""
    hangs = db.with_name("sync-hangs")
    return hangs, {"LD_PRELOAD": str(sync_library), "SYNC_HANGS_WHILE_EXISTS": str(hangs)}


def test_a_start_that_waits_for_the_disk_asks_for_time(db: Path, sync_library: Path) -> None:
    hangs, preload = hanging(db, sync_library)
    with ServerProcess(db) as server:
        server.kill()
    assert db.with_name("mqks.db-wal").stat().st_size, "there is nothing to be written again"
    hangs.touch()
    with ServiceManager(str(db.with_name("notify"))) as manager, ExitStack() as cleanup:
        server = ServerProcess(db, environment=manager.environment | preload)
        cleanup.callback(server.kill)
        manager.wait_for("EXTEND_TIMEOUT_USEC")
        hangs.unlink()
        manager.wait_for("READY")
        assert server.terminate() == 0


def test_a_reload_is_told_from_its_begin_to_its_end(db: Path) -> None:
    with managed(db) as (manager, server), LineClient(server.address) as client:
        manager.wait_for("READY")
        for _ in range(2):
            before = time.monotonic_ns() // 1000
            server.hang_up()
            told = manager.told()
            assert told["RELOADING"] == "1"
            assert before <= int(told["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
            assert manager.told() == {"READY": "1"}
        assert client.ask(b"p ping") == b"p ok "
        assert server.terminate() == 0
        assert server.log.count("event=reloaded") == 2


def test_a_hang_up_ends_no_server_that_starts_or_stops(db: Path, sync_library: Path) -> None:
    hangs, preload = hanging(db, sync_library)
    with ServiceManager(str(db.with_name("notify"))) as manager, ExitStack() as cleanup:
        hangs.touch()  # It does not come further than to the first sync of its journal.
        server = ServerProcess(db, environment=manager.environment | preload)
        cleanup.callback(server.kill)
        manager.wait_for("STATUS")
        server.hang_up()
        hangs.unlink()
        manager.wait_for("READY")
        with LineClient(server.address) as client, LineClient(server.address) as other:
            # A stopping server waits until its replies are taken.
            client.send(b"p ping %b\n" % (b"x" * 1_000_000) * 12)
            until(lambda: b'"blocked": true' in other.ask(b"s stats connections"))
            stopped: list[int] = []
            stopping = threading.Thread(target=lambda: stopped.append(server.terminate()))
            stopping.start()
            manager.wait_for("STOPPING")
            server.hang_up()
            client.rest()
        stopping.join(WAIT_S)
    assert stopped == [0]
    assert "event=stopped" in server.log


def test_a_manager_that_is_gone_keeps_nobody_from_working(db: Path) -> None:
    environment = {"NOTIFY_SOCKET": str(db.with_name("nobody"))}
    with ServerProcess(db, environment=environment) as server:
        with LineClient(server.address) as client:
            assert client.ask(b"p ping") == b"p ok "
        assert server.terminate() == 0
        assert re.search(r"event=not_notified .*READY=1", server.log)


# ----------------------------------------------------------------------------------- the watchdog


def fed(manager: ServiceManager, times: int) -> None:
    manager.drop_all()
    for _ in range(times):
        assert manager.told() == {"WATCHDOG": "1"}


def test_an_idle_server_feeds_its_watchdog(db: Path) -> None:
    start_s = time.monotonic()
    with managed(db, watchdog_s=1) as (manager, server):
        manager.wait_for("WATCHDOG")
        for _ in range(3):
            assert manager.told() == {"WATCHDOG": "1"}
        assert time.monotonic() - start_s > 3 * 0.5, "it is fed twice an interval, no more often"
        assert server.is_running


@pytest.mark.slow
def test_a_busy_server_feeds_its_watchdog(db: Path) -> None:
    with managed(db, watchdog_s=0.8) as (manager, server):
        stop = threading.Event()

        def publish() -> None:
            with LineClient(server.address) as client:
                while not stop.is_set():
                    lines = [b"m%d publish --confirm e data\n" % n for n in range(100)]
                    client.send(b"s subscribe q e\n" + b"".join(lines))
                    left = 100
                    while left:
                        left -= len(client.lines())

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            manager.wait_for("WATCHDOG")
            fed(manager, 4)
        finally:
            stop.set()
            publisher.join(WAIT_S)
        assert not publisher.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_line", [b"s subscribe --confirm q2 e", b"m publish --confirm e x"]
)
def test_a_commit_that_hangs_starves_the_watchdog(
    db: Path, sync_library: Path, request_line: bytes
) -> None:
    """The first is committed by the task, beside a loop that goes on; the second holds up all."""
    (trigger, environment), interval_s = hanging(db, sync_library), 0.6
    with (
        managed(db, watchdog_s=interval_s, **environment) as (manager, server),
        LineClient(server.address) as client,
    ):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        fed(manager, 2)
        trigger.touch()
        client.send(request_line + b"\n")
        # What feeds may still come in the interval in which it began; then none. Some more come
        # where the request takes its time to get there.
        limit = time.monotonic() + WAIT_S
        with suppress(TimeoutError):
            while manager.told(2 * interval_s):
                assert time.monotonic() < limit, "it is fed while nothing is committed"
        if b"subscribe" in request_line:
            with LineClient(server.address) as other:
                assert other.ask(b"p ping") == b"p ok ", "the loop goes on"
        trigger.unlink()
        assert client.line() == request_line.split()[0] + b" ok "
        fed(manager, 3)


def test_a_full_disk_is_no_reason_to_starve_the_watchdog(db: Path) -> None:
    flags = ("--db-bytes-max", "2MiB", "--ballast-bytes", "0")
    with (
        managed(db, *flags, watchdog_s=1.2) as (manager, server),
        LineClient(server.address) as client,
    ):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for _ in range(1000):
            reply = client.ask(b"m publish --confirm e " + b"x" * 10_000)
            if b" error " in reply:
                break
        else:
            pytest.fail("the disk was never full")
        fed(manager, 3)


def test_a_watchdog_of_another_process_is_not_fed() -> None:
    usual = {"WATCHDOG_USEC": "3000000"}
    assert Notify(usual).watchdog_s == 3
    assert Notify(usual | {"WATCHDOG_PID": str(os.getpid())}).watchdog_s == 3
    assert Notify(usual | {"WATCHDOG_PID": str(os.getppid())}).watchdog_s is None
    assert Notify({}).watchdog_s is None
    with pytest.raises(ConfigurationError, match="WATCHDOG_USEC"):
        Notify({"WATCHDOG_USEC": "often"})


# ---------------------------------------------------------------------- sockets that are inherited


def listening(address: str = "127.0.0.1") -> socket.socket:
    return socket.create_server((address, 0))


def listening_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])
def test_who_connects_before_the_start_is_answered_after_it(db: Path, loop: str) -> None:
    path = db.with_name("unix")
    # What the settings say is not even tried: their port is taken.
    with listening() as tcp, listening_unix(path) as unix, listening() as other:
        flags = ("--port", str(other.getsockname()[1]), "--unix", str(db.with_name("no")), loop)
        with (
            LineClient(tcp.getsockname()) as client,
            closing(socket.socket(socket.AF_UNIX)) as local,
        ):
            client.send(b"t ping x\n")
            local.settimeout(WAIT_S)
            local.connect(str(path))
            local.sendall(b"u ping x\n")
            with ServerProcess(db, *flags, sockets={"a": tcp, "b": unix}) as server:
                assert server.address == tcp.getsockname()
                assert client.line() == b"t ok x"
                assert local.recv(100) == b"u ok x\n"
                assert server.terminate() == 0, server.log
                assert f"address=unix:{path}" in server.log
        LineClient(tcp.getsockname()).close()  # Who comes now is not refused.
        assert path.is_socket(), "it belongs to whoever bound it"
        assert not db.with_name("no").exists()


WRONG: dict[str, Callable[[], Inheritable]] = {
    "file": lambda: Path(os.devnull).open("rb"),  # noqa: SIM115
    "not_listening": socket.socket,
    "datagrams": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "not_loopback": lambda: listening("0.0.0.0"),
    "tls": listening,  # Which is never served without a certificate.
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_socket_is_refused_by_name(db: Path, wrong: str) -> None:
    with listening() as good, WRONG[wrong]() as socket_or_file:
        server = ServerProcess(db, sockets={"good": good, wrong: socket_or_file})
        assert server.wait() == EXIT_CONFIGURATION
        assert re.search(rf"mqks: LISTEN_FDS: .*\b{wrong}\b", server.log)
        assert "event=listening" not in server.log


def test_beyond_loopback_takes_insecure(db: Path) -> None:
    with (
        listening("0.0.0.0") as inherited,
        ServerProcess(db, "--insecure", sockets={"open": inherited}) as server,
    ):
        port = inherited.getsockname()[1]
        assert server_of(db) == f"mqks://127.0.0.1:{port}"
        with LineClient(("127.0.0.1", port)) as client:
            assert client.ask(b"p ping") == b"p ok "
        assert server.terminate() == 0


def test_the_variables_are_taken_once_and_only_by_whom_they_are_meant_for() -> None:
    environ = {"LISTEN_PID": str(os.getppid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "A": "b"}
    assert take_sockets(environ) == []
    assert environ == {"A": "b"}
    with pytest.raises(ConfigurationError, match="LISTEN_FDS"):
        take_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"})


# ----------------------------------------------------------------------------------- systemd units


class Unit(configparser.RawConfigParser):
    """A unit file; of a key that stands several times the last value counts."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, interpolation=None)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string((ROOT / "deploy" / name).read_text())


@pytest.fixture
def systemd_analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    return program


def copied_units(directory: Path) -> list[str]:
    """The units with a program that is there: systemd wants to see it."""
    paths = []
    for name in ("mqks.service", "mqks.socket"):
        text = (ROOT / "deploy" / name).read_text()
        text = re.sub(r"(?m)^(ExecStart|ExecReload)=\S+", rf"\1={sys.executable}", text)
        (directory / name).write_text(text)
        paths.append(str(directory / name))
    return paths


def test_systemd_finds_no_fault_in_the_units(systemd_analyze: str, tmp_path: Path) -> None:
    command = [systemd_analyze, "verify", "--man=no", *copied_units(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_service_is_no_more_exposed_than_the_documents_say(
    systemd_analyze: str, tmp_path: Path
) -> None:
    told = re.search(r"exposure level (\d)\.(\d)", (ROOT / "docs/install.md").read_text())
    assert told
    service, _ = copied_units(tmp_path)
    # A newer systemd knows more to ask for.
    limit = int(told[1]) * 10 + int(told[2]) + 5
    command = [systemd_analyze, "security", "--offline=true", "--no-pager"]
    command += [f"--threshold={limit}", service]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unrecognized option" in checked.stderr:
        pytest.skip("this systemd-analyze is too old")
    assert checked.returncode == 0, checked.stdout


def test_the_service_fits_the_settings_and_the_exit_codes() -> None:
    unit = Unit("mqks.service")
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) > Settings().drain_timeout_s
    assert int(service["LimitNOFILE"]) > Settings().connections_max
    # What a person has to mend is not tried again.
    mended = (errors.ConfigurationError, errors.JournalDamaged, errors.SchemaTooNew)
    codes = {str(each.exit_code) for each in (*mended, errors.JournalReverted)}
    codes |= {str(os.EX_USAGE)}
    assert set(service["RestartPreventExitStatus"].split()) == codes
    stream = Unit("mqks.socket")["Socket"]["ListenStream"]
    assert stream == f"{Settings().host}:{Settings().port}"


# ---------------------------------------------------------------------------------------- the image


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile, continued lines joined: name and the rest."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text))
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line]


INSTRUCTIONS = instructions()
LAST = dict(INSTRUCTIONS)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_image_runs_a_python_that_is_supported() -> None:
    # The environment is copied from one stage to the next.
    [base] = {rest.split()[0] for name, rest in INSTRUCTIONS if name == "FROM"}
    version = re.fullmatch(r"python:(3\.\d+)-slim", base)
    assert version
    assert f"Programming Language :: Python :: {version[1]}" in PROJECT["project"]["classifiers"]


def test_the_image_is_built_from_all_that_the_wheel_needs() -> None:
    rests = [rest.split() for name, rest in INSTRUCTIONS if name == "COPY"]
    copied = {each for words in rests if "--from" not in words[0] for each in words[:-1]}
    wheel, project = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"], PROJECT["project"]
    needed = {"pyproject.toml", "hatch_build.py", project["readme"], *project["license-files"]}
    assert copied == needed | set(wheel["packages"]) | set(wheel["force-include"])
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_runs_the_server_alone_and_not_as_root(db: Path) -> None:
    user, group = LAST["USER"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert LAST["STOPSIGNAL"] == "SIGTERM"
    assert int(LAST["EXPOSE"]) == Settings().port
    health = re.fullmatch(r"(?:--\S+ )+CMD (\[.*\])", LAST["HEALTHCHECK"])
    assert health
    assert json.loads(health[1]) == ["mqks", "ping"]
    # In a form without a shell, which would keep SIGTERM from the server.
    [program, command] = json.loads(LAST["ENTRYPOINT"]) + json.loads(LAST["CMD"])
    assert program in PROJECT["project"]["scripts"]

    environment = dict(word.split("=", 1) for word in LAST["ENV"].split())
    assert Path(environment.pop("MQKS_DB")).is_relative_to(LAST["VOLUME"])
    environment.pop("PATH")
    assert command == "serve"
    server = ServerProcess(db, environment=environment)
    assert server.wait() == EXIT_CONFIGURATION, "it must be told whom to let in"
    open_to_all = environment | {"MQKS_INSECURE": "true"}
    with ServerProcess(db, environment=open_to_all) as server:
        assert server.terminate() == 0


# --------------------------------------------------------------------------------------- Kubernetes


class Manifest:
    """The objects of a file in deploy/, and its one container."""

    def __init__(self, name: str) -> None:
        yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
        self.text = (ROOT / "deploy" / name).read_text()
        objects = list(yaml.safe_load_all(self.text))
        self.workload = objects[0]
        self.others = {each["kind"]: each["spec"] for each in objects[1:]}
        self.template = self.workload["spec"]["template"]
        self.pod = self.template["spec"]
        [self.container] = self.pod["containers"]
        self.probes = [
            self.container[f"{each}Probe"] for each in ("startup", "readiness", "liveness")
        ]
        self.ports = {each["name"]: each["containerPort"] for each in self.container["ports"]}

    @property
    def environment(self) -> dict[str, str]:
        return {each["name"]: each.get("value", "") for each in self.container["env"]}

    @property
    def secret_keys(self) -> set[str]:
        """Those that it takes from the Secret."""
        sources = [each.get("valueFrom", {}).get("secretKeyRef") for each in self.container["env"]]
        sources += [item for each in self.pod["volumes"] for item in each["secret"]["items"]]
        return {source["key"] for source in sources if source}


@pytest.fixture(params=["kubernetes.yaml", "kubernetes-file.yaml"])
def manifest(request: pytest.FixtureRequest) -> Manifest:
    return Manifest(request.param)


class Pod(ServerProcess):
    """The container of a manifest, with places and ports of the test."""

    def __init__(self, manifest: Manifest, users: Path, db: Path | DatabaseUrl) -> None:
        self._arguments = [*json.loads(LAST["ENTRYPOINT"]), *manifest.container["args"]]
        here = {
            "MQKS_DB": db.text if isinstance(db, DatabaseUrl) else str(db),
            "MQKS_DB_REPLICATION": "none",
            "MQKS_USERS": str(users),
            "MQKS_HOST": "127.0.0.1",
            "MQKS_PORT": "0",
            "MQKS_HTTP_HOST": "127.0.0.1",
            "MQKS_HTTP_PORT": "0",
            "MQKS_AUTH": "always",  # the test is no other machine
        }
        super().__init__("", environment=manifest.environment | here)

    def _spawn(self, command: list[str]) -> subprocess.Popen[str]:
        return super()._spawn([sys.executable, "-m", *self._arguments])

    def probed(self, probe: dict[str, Any]) -> int:
        """The status that the kubelet gets; 0 if nobody listens."""
        found = re.findall(r"event=listening address=(http://\S+)", self.log)
        try:
            with urlopen(found[-1] + probe["httpGet"]["path"], timeout=WAIT_S) as reply:
                return int(reply.status)
        except HTTPError as error:
            with error:
                return error.code
        except (IndexError, OSError):
            return 0


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users"
    (tmp_path / "password").write_text("secret")
    words = ["user", "add", "shop", "--publish", "**", "--users", str(path)]
    assert main([*words, "--password-file", str(tmp_path / "password")]) == 0
    return path


def test_two_pods_are_live_and_ready_and_one_lets_clients_in(
    journal_url: DatabaseUrl, users: Path
) -> None:
    manifest = Manifest("kubernetes.yaml")
    with Pod(manifest, users, journal_url) as active, ExitStack() as cleanup:
        until(lambda: all(active.probed(each) == 200 for each in manifest.probes))
        standby = Pod(manifest, users, journal_url)
        cleanup.callback(standby.kill)
        until(lambda: all(standby.probed(each) == 200 for each in manifest.probes))
        until(lambda: "event=standby" in standby.log)
        assert "event=listening address=127" not in standby.log
        with LineClient(active.address) as client:
            assert client.ask(b"p publish --confirm e x").startswith(b"p error ")
        with LineClient(active.address) as client:
            assert client.ask(b"a auth --confirm shop secret") == b"a ok "
            assert client.ask(b"p publish --confirm e x") == b"p ok "
        assert active.terminate() == 0
        with LineClient(standby.address) as client:
            assert client.ask(b"a auth --confirm shop secret") == b"a ok "
        until(lambda: all(standby.probed(each) == 200 for each in manifest.probes))
        assert standby.terminate() == 0


def test_the_pod_with_a_file_is_live_and_ready(db: Path, users: Path) -> None:
    manifest = Manifest("kubernetes-file.yaml")
    with Pod(manifest, users, db) as pod:
        until(lambda: all(pod.probed(each) == 200 for each in manifest.probes))
        assert pod.terminate() == 0


def test_the_settings_of_a_pod_are_accepted_as_they_are(
    manifest: Manifest,
    users: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in manifest.environment.items():
        monkeypatch.setenv(name, value)
    mounted = {each["name"]: each["mountPath"] for each in manifest.container["volumeMounts"]}
    assert Path(manifest.environment["MQKS_USERS"]) == Path(mounted["users"]) / "users"
    monkeypatch.setenv("MQKS_USERS", str(users))
    if "journal" in mounted:
        assert Path(manifest.environment["MQKS_DB"]).parent == Path(mounted["journal"])
        monkeypatch.setenv("MQKS_DB", str(tmp_path / "mqks.db"))
    assert main(["check-config"]) == 0
    found = re.search(r"memory, at most\) +(\d+)MiB", capsys.readouterr().out)
    limit = re.fullmatch(r"(\d+)Gi", manifest.container["resources"]["limits"]["memory"])
    assert found
    assert limit
    # A quarter is left for connections.
    assert int(found[1]) <= 0.75 * 1024 * int(limit[1])
    # What Kubernetes would set for a Service named mqks with an address of its own.
    assert manifest.pod["enableServiceLinks"] is False
    monkeypatch.setenv("MQKS_PORT", "tcp://10.0.0.1:25000")
    assert main(["check-config"]) == EXIT_CONFIGURATION


def test_a_manifest_fits_the_image_and_the_settings(manifest: Manifest) -> None:
    environment, pod, container = manifest.environment, manifest.pod, manifest.container
    assert container["args"] == json.loads(LAST["CMD"])
    assert manifest.ports == {"mqks": Settings().port, "http": int(environment["MQKS_HTTP_PORT"])}
    assert {probe["httpGet"]["port"] for probe in manifest.probes} == {"http"}
    [service] = [manifest.others["Service"]]
    assert service["clusterIP"] == "None"
    assert {each["targetPort"]: each["port"] for each in service["ports"]} == manifest.ports
    who = pod["securityContext"]
    assert f"{who['runAsUser']}:{who['runAsGroup']}" == LAST["USER"]
    assert who["fsGroup"] == who["runAsGroup"]  # The users file is readable for it.
    assert pod["terminationGracePeriodSeconds"] > Settings().drain_timeout_s
    *_, liveness = manifest.probes
    watchdog_s = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert Unit("mqks.service")["Service"]["WatchdogSec"] == f"{watchdog_s // 60}min"
    # All of them are found by their label, and the command in the file creates the Secret.
    selectors = [manifest.workload["spec"]["selector"]["matchLabels"], service["selector"]]
    if budget := manifest.others.get("PodDisruptionBudget"):
        selectors.append(budget["selector"]["matchLabels"])
    assert all(each == manifest.template["metadata"]["labels"] for each in selectors)
    created = re.search(r"create secret generic (\S+) (.*)", manifest.text)
    assert created
    assert set(re.findall(r"--from-(?:file|literal)=(\w+)", created[2])) == manifest.secret_keys
    assert manifest.pod["volumes"][0]["secret"]["secretName"] == created[1]
