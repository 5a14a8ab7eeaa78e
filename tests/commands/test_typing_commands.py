"""Commands as people guess them, names with typing errors, and what TAB completes.

The one rule: each is typed as a person or a shell would, against a real server.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mqks import blocking, users_file
from mqks.commands import app, complete
from mqks.commands.guesses import GUESSES
from mqks.users import User, hash_token
from tests.commands.console import MQKS, Console
from tests.kit import forks
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

TREE: Any = typer.main.get_command(app)
ENVIRONMENT = {key: value for key, value in os.environ.items() if key[:5] != "MQKS_"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("typing")
    may_trim = User("trimmer", "", hash_token("trim"), consume=["or*"])
    users_file.write(directory / "users", [may_trim])
    with ServerProcess(directory / "mqks.db", "--users", str(directory / "users")) as running:
        with blocking.connect(running.url) as client:
            for queue in ("orders", "orders.dead", "mail.eu", "mail:us", "$(reboot)", "x;reboot"):
                client.subscribe(queue, ["order.new"] if queue == "orders" else [f"of-{queue}"])
            client.publish("order.new", "one", id="m1", confirm=True)
            client.publish("order.new", "two", id="m2", confirm=True)
            client.subscribe("orders", ["order.new", "order.old"])
            client.publish("order.old", b"\xff", id="m3", confirm=True)
        yield running


@pytest.fixture
def held(server: ServerProcess) -> Iterator[str]:
    """The id of a consumer."""
    with blocking.connect(server.url) as client:
        client.request("consume", "--confirm", "mail.eu", "--manual-ack")
        [consumer] = json.loads(client.request("stats", "consumers"))
        yield consumer["id"]


# ------------------------------------------------------------------------------------ guesses


@pytest.mark.parametrize("guess", GUESSES)
def test_what_a_guess_leads_to_exists(guess: str) -> None:
    command = TREE
    for word in GUESSES[guess].split():
        if hasattr(command, "commands"):
            command = command.commands[word]
    assert not hasattr(command, "commands")
    words = [word for word in GUESSES[guess].split() if word.islower() is False or word[0] == "-"]
    command.make_context(guess, words, resilient_parsing=False).close()


def test_no_guess_hides_a_command() -> None:
    assert not GUESSES.keys() & TREE.commands.keys()


# ------------------------------------------------------------------------- queues that don't exist


def test_a_user_who_may_not_inspect(shell: Console) -> None:
    shell.environ["MQKS_URL"] = shell.url.replace("mqks://", "mqks://trim@")
    shell.play("""
        $ mqks trim ordrs 1
        mqks: there is no queue ordrs
        [65]
        $ mqks trim orders 1
        0 messages trimmed
        # The server refuses it, as before: whether the queue exists is not told.
        $ mqks trim mail.eu 1
        mqks: …no permission to consume 'mail.eu'…
        [65]
        """)


# --------------------------------------------------------------------------------------- peek


def test_peek_goes_from_page_to_page(shell: Console) -> None:
    with blocking.connect(shell.url) as client:
        client.subscribe("many", ["n"])
        client.publish_many(("n", str(n)) for n in range(250))
        try:
            assert shell.out("peek", "many", "-n", 1000).split() == [*map(str, range(250))]
            assert len(shell.out("peek", "many", "-n", 201).split()) == 201
            assert len(shell.out("peek", "many", "--event", "*", "-n", 101).split()) == 101
        finally:
            client.delete_queue("many")


# -------------------------------------------------------------------------- masks bound as events


def literal_masks(server: ServerProcess, queue: str) -> list[str]:
    """The events in the server's warnings about a queue."""
    lines = [line for line in server.log.splitlines() if f" queue={queue} " in line]
    assert all("level=warning event=literal_mask connection=127.0.0.1:" in line for line in lines)
    return [line.partition(" bound_event=")[2] for line in lines]


def test_a_mask_in_the_place_of_an_event_warns(shell: Console, server: ServerProcess) -> None:
    shell.play("""
        $ mqks subscribe stars a 'order.*'
        mqks: warning: order.* is bound as an event, not as a mask; for a mask, … 'order.*'
        $ mqks rebind stars --add '*'
        mqks: warning: * is bound …
        $ mqks rebind stars 'x.*' 'y.**' z
        mqks: warning: x.* is bound …
        mqks: warning: y.** is bound …
        $ mqks consume stars --add 'c.*' --timeout 0.1
        mqks: warning: c.* is bound …
        $ mqks rebind stars --add-mask 'm.*' --remove 'c.*'
        $ mqks subscribe stars a
        """)
    until(lambda: literal_masks(server, "stars") == ["order.*", "*", "x.*", "c.*"])
    assert shell.out("delete-queue", "stars") == ""


def test_a_request_that_fails_warns_of_nothing(shell: Console, server: ServerProcess) -> None:
    assert shell("subscribe", "failing", "order.*", "--add-mask", "no-dot*")[0] == os.EX_DATAERR
    assert literal_masks(server, "failing") == []


def test_many_masks_as_events_fill_no_log(server: ServerProcess) -> None:
    before = server.log.count("\n")
    with socket.create_connection(server.address) as client, client.makefile("rb") as replies:
        client.sendall(b"s subscribe flood *\n" * 5000)
        client.sendall(b"d delete_queue flood\np ping x\n")
        assert replies.readline() == b"p ok x\n"
    until(lambda: "event=errors_suppressed" in server.log)
    assert 0 < len(literal_masks(server, "flood")) < 1000
    assert server.log.count("\n") - before < 1500


# ---------------------------------------------------------------------------------- completion


def completed(words: str, url: str, **environment: str) -> list[str]:
    """What bash is given for the last word, which may be empty. Nothing goes to stderr."""
    asked = {
        **ENVIRONMENT,
        "MQKS_URL": url,
        "_MQKS_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        **environment,
    }
    code, out, err = forks.run(MQKS, environment=asked)
    assert (code, err) == (0, b"")
    return out.decode().split("\n")[:-1] if out.strip() else []


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("mqks purge ", ["mail.eu", "orders", "orders.dead"]),
        ("mqks purge or", ["orders", "orders.dead"]),
        ("mqks purge orders", ["orders", "orders.dead"]),
        ("mqks purge orders.", ["orders.dead"]),
        ("mqks purge zz", []),
        ("mqks purge mail:", []),
        ("mqks consume m", ["mail.eu"]),
        ("mqks move orders m", ["mail.eu"]),
        ("mqks move --limit 5 o", ["orders", "orders.dead"]),
        ("mqks set-queue mail.eu --dead-letters or", ["orders", "orders.dead"]),
        ("mqks inspect messages o", ["orders", "orders.dead"]),
        ("mqks inspect unacked ma", ["mail.eu"]),
    ],
)
def test_queues_complete(server: ServerProcess, words: str, names: list[str]) -> None:
    assert completed(words, server.url) == names


def test_commands_complete() -> None:
    assert completed("mqks pu", "") == ["publish", "push", "purge"]


def test_a_url_on_the_line_is_asked(server: ServerProcess) -> None:
    words = f"mqks peek --url {server.url} mai"
    assert completed(words, "mqks://127.0.0.1:1") == ["mail.eu"]


def test_consumers_complete(server: ServerProcess, held: str) -> None:
    assert completed("mqks requeue ", server.url) == [held]


def test_users_complete(server: ServerProcess, tmp_path: Path) -> None:
    users_file.write(tmp_path / "users", [User("alice"), User("albert"), User("bob")])
    found = completed("mqks user grant al", "", MQKS_USERS=str(tmp_path / "users"))
    assert found == ["alice", "albert"]
    words = f"mqks user revoke --users {tmp_path / 'users'} b"
    assert completed(words, "") == ["bob"]
    assert completed(words, "", MQKS_USERS="/nowhere") == ["bob"]
    assert completed("mqks user remove ", "", MQKS_USERS="/nowhere") == []


@pytest.mark.parametrize(
    "url", ["mqks://127.0.0.1:1", "mqks://wrong@{address}", "no url", "mqks+unix:///nowhere"]
)
def test_no_answer_completes_nothing(server: ServerProcess, url: str) -> None:
    url = url.format(address="{}:{}".format(*server.address))
    assert completed("mqks purge ", url) == []


def test_a_server_that_is_silent_does_not_hold_the_shell() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        host, port = silent.getsockname()
        assert completed("mqks purge ", f"mqks://{host}:{port}") == []
        assert time.monotonic() - began_s < WAIT_S / 2


def test_names_are_given_to_a_shell_only_if_they_mean_nothing_to_it() -> None:
    for name in ["orders", "a.b-c_d", "50%", "müll", "a@b", "a=b", "a,b", "a+b", "a/b"]:
        assert complete.SAFE.fullmatch(name)
    special = ["a b", "a\n", "$(x)", "`x`", "a;b", "a'b", 'a"b', "a|b", "a&b", "-rf", "~x", "a:b"]
    for name in special:
        assert not complete.SAFE.fullmatch(name)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_itself_completes(server: ServerProcess, tmp_path: Path) -> None:
    program = tmp_path / "mqks"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(MQKS)} "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(_MQKS_COMPLETE=source_bash mqks)"
        COMP_WORDS=(mqks purge or) COMP_CWORD=2
        function=$(complete -p mqks | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function mqks or purge
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**ENVIRONMENT, "MQKS_URL": server.url, "PATH": path},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )

    assert (done.stdout.split(), done.stderr) == (["orders", "orders.dead"], "")
