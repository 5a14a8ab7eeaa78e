"""The pages for operators are typed: every command on them parses, and what can run here is run.

The one rule: what is run is read from the page. Only paths, addresses and commands of
systemd are replaced.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqks import Options, blocking
from tests.commands.test_command_tree import parsed
from tests.kit.ports import free_port
from tests.kit.program import ROOT, Program
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

PAGES = ("install", "security", "monitoring", "backup", "settings", "troubleshooting", "postgresql")
ENDS = {"|", "&&", "&", ">", ">>", ";"}


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


def section(name: str, heading: str) -> str:
    return page(name).split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def lines(text: str) -> Iterator[str]:
    """The lines of indented blocks; a line that ends with a backslash goes on in the next one."""
    joined = text.replace("\\\n", " ")
    yield from (line.strip() for line in joined.splitlines() if line.startswith("    "))


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `mqks` command in the blocks of a page."""
    for line in lines(text):
        words: list[str] = []
        for word in [*shlex.split(re.sub(r"\$\(.*?\)", "X", line), comments=True), ";"]:
            if word not in ENDS:
                words.append(word)
                continue
            while words and re.match(r"[A-Z_]+=", words[0]) and "/" not in words[0]:
                words.pop(0)
            if words and re.search(r"(^[^=]*/|^)mqks$", words[0]):
                yield words[1:]
            words = []


COMMANDS = [(name, words) for name in PAGES for words in commands(page(name))]


def test_commands_are_found() -> None:
    text = "    a && B=c /bin/mqks top -x 'y z' \\\n        --q | jq  # mqks no\n"
    text += "mqks no\n    mqks w $(x y) &"
    assert list(commands(text)) == [["top", "-x", "y z", "--q"], ["w", "X"]]
    assert {name for name, _ in COMMANDS} == {*PAGES}


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[" ".join(each) for _, each in COMMANDS])
def test_every_command_of_the_pages_parses(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parsed("mqks", words)


class Shell:
    """Runs what a page says in `directory`, with `changes` made to it first."""

    def __init__(self, directory: Path, url: str, changes: Mapping[str, str]) -> None:
        self._directory = directory
        self._changes = changes
        self._url = url

    def run(self, line: str) -> str:
        for old, new in self._changes.items():
            line = line.replace(old, new)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with Program(["bash", "-c", line], self._url, self._directory, PATH=path) as done:
            assert done.end() == 0, f"{line}\n{done.told}"
        return "\n".join(done.lines)


@pytest.mark.slow
def test_a_deleted_database_is_rescued_while_a_service_reconnects(tmp_path: Path) -> None:
    db = tmp_path / "mqks.db"
    recipe = lines(section("troubleshooting", "Database deleted or moved"))
    with ServerProcess(db) as server, ExitStack() as ending:
        shell = Shell(tmp_path, server.url, {"mqks://127.0.0.1:25000": server.url})
        setup = (
            "subscribe jobs e",
            "set-queue jobs --retries 3 --dead-letters dead",
            "publish e dead",
        )
        for command in setup:
            shell.run(f"mqks {command}")
        with blocking.connect(server.url) as client:
            with client.consume("jobs") as consumer:
                consumer.receive(WAIT_S).reject(dead=True, reason="no such job")
            client.publish_many([("e", n) for n in range(50)])
        # A service that subscribes again as soon as it reaches a server, and acks nothing.
        service = ending.enter_context(blocking.connect(server.url, Options(timeout_s=WAIT_S)))
        consumer = ending.enter_context(service.consume("jobs", ["e"], create=True, prefetch=1))
        held = [consumer.receive(WAIT_S).data]
        first, *recipe_left = recipe
        shell.run(first.partition("#")[0].replace("mqks.db", str(db)))
        until(lambda: "event=database_gone" in server.log)
        for line in recipe_left:
            if "systemctl stop" in line:
                server.stop()
            elif "systemctl start" in line:
                server.start()
            else:
                shell.run(line.replace("/var/lib/mqks", str(tmp_path)))
        held.append(consumer.receive(WAIT_S).data)
        assert held == [b"0", b"0"]
        told = json.loads(shell.run("mqks inspect queue jobs --json"))
        assert (told["ready"], told["unacked"]) == (49, 1)
        assert told["policy"]["retries"] == {"value": 3, "from": "set_queue"}
        assert "1 message redriven" in shell.run("mqks redrive dead")


@pytest.mark.slow
def test_the_backup_page_can_be_typed(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    for directory in (data, other, tmp_path / "backup"):
        directory.mkdir()
    changes = {
        "ExecStart=/usr/local/bin/": "",
        "/var/lib/mqks": str(data),
        "/backup": str(tmp_path / "backup"),
        "systemctl stop mqks": ":",
        "systemctl start mqks": ":",
    }
    server = ServerProcess(data / "mqks.db")
    with server:
        shell = Shell(tmp_path, server.url, changes | {"--db mqks.db": f"--db {data}/mqks.db"})
        shell.run("mqks subscribe mail user.new && mqks publish user.new bob")
        [first] = lines(page("backup").split("\n## ", 1)[0])
        shell.run(first)
        _, nightly = lines(section("backup", "Make a backup"))
        assert "verified" in shell.run(nightly)
        [verify] = lines(section("backup", "Verify"))
        assert "is undamaged: 1 queues, 1 messages" in shell.run(verify)
        export, export_file, import_, import_into, *exported, import_one = lines(
            section("backup", "Export and import")
        )
        shell.run(export)
        kinds = [line.split('"')[3] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        assert kinds == ["mqks", "queue", "message", "binding", "end"]
        assert {line.split('"')[3] for line in exported} == {*kinds}
        shell.run(export_file)
        assert "1 messages" in shell.run(import_into)
        with ServerProcess(other / "mqks.db") as target:
            there = Shell(tmp_path, target.url, {"mqks://other:25000": target.url})
            there.run(import_)
            there.run("mqks delete-queue mail --yes")
            there.run(import_one)
            assert "restored" in there.run("mqks inspect messages mail --json")
    with ServerProcess(data / "mqks.db") as server:
        server.stop()
    for line in lines(section("backup", "Restore")):
        shell.run(line)
    [compact] = lines(section("backup", "Compact"))
    shell.run(compact)
    with ServerProcess(data / "mqks.db") as server:
        again = Shell(tmp_path, server.url, {})
        assert "bob" in again.run("mqks inspect messages mail --data --json")


@pytest.mark.slow
def test_the_security_page_can_be_typed(tmp_path: Path) -> None:
    port, tls_port = free_port(), free_port()
    token_user, password_user, serve = lines(page("security").split("\n## ", 1)[0])
    openssl, publish = lines(section("security", "TLS"))
    grant, revoke = lines(section("security", "Permissions"))
    (tmp_path / "password").write_text("secret\n")
    shell = Shell(tmp_path, "", {"--password ": "--password-file password "})

    token = shell.run(token_user).split()[-1]
    shell.run(password_user)
    shell.run(grant)
    shell.run(revoke)
    listed = shell.run("mqks user list --users mqks.users --json")
    assert "refunds.**" in listed
    assert listed.count("orders.**") == 1, "what was revoked is gone"
    shell.run(openssl)
    flags = serve.replace("25001", str(tls_port)).split()[2:]
    paths = {"mqks.users", "cert.pem", "key.pem"}
    flags = [str(tmp_path / each) if each in paths else each for each in flags]
    with ServerProcess(tmp_path / "mqks.db", *flags, "--port", str(port)):
        changed = {"TOKEN": token, "25001": str(tls_port)}
        assert Shell(tmp_path, "", changed).run(publish)


@pytest.mark.slow
def test_the_settings_page_can_be_typed(tmp_path: Path) -> None:
    _, variable, toml = lines(page("settings").split("\n## ", 1)[0])
    [check] = lines(section("settings", "Check the settings"))
    tables = "\n".join(lines(section("settings", "Queue defaults")))
    shell = Shell(tmp_path, "", {"/etc/mqks.toml": "mqks.toml", "serve": "check-config"})

    shell.run(toml)
    with (tmp_path / "mqks.toml").open("a") as file:
        file.write(tables)
    told = shell.run(check)
    assert re.search(r"queues_max +1000 +mqks\.toml", told)
    assert re.search(r"queue jobs\.\*: dead_letters +jobs\.dead ", told)
    assert re.search(r"queues_max +1000 +MQKS_QUEUES_MAX", shell.run(variable))
