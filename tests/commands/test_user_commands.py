"""`mqks user`: what it writes, what it prints, and what it never shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mqks import users_file
from mqks.users import LIMITS, User, Users
from tests.commands.console import MQKS, Console, Terminal
from tests.kit.fixtures import served
from tests.kit.waiting import WAIT_S, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mqks.users"


@pytest.fixture
def user(tmp_path: Path, path: Path) -> Console:
    """A console in which the file is set."""
    return Console(tmp_path, MQKS_USERS=str(path))


def only(path: Path) -> User:
    [user] = users_file.read(path)
    return user


def is_password(path: Path, password: bytes) -> bool:
    return Users([only(path)], b"k").verify(b"alice", password) is not None


def test_a_token_is_shown_once_and_works(alone: Console, path: Path, tmp_path: Path) -> None:
    masks = "--publish a.* --publish b --consume q-* --bind a.**"
    token = alone.out(*f"user add alice --token {masks} --users {path}".split())

    assert re.fullmatch(r"[0-9a-f]{64}\n", token)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token.strip() not in path.read_text()
    user = only(path)
    assert (user.publish, user.consume, user.bind) == (["a.*", "b"], ["q-*"], ["a.**"])
    assert (user.password, user.admin, user.eval) == ("", False, False)
    flags = ("--users", str(path), "--auth", "always")
    with served(tmp_path / "mqks.db", *flags) as (_, client):
        assert client.ask(b"a auth --confirm " + token.strip().encode()) == b"a ok "
        assert client.ask(b"m publish --confirm a.b x") == b"m ok "


def test_a_password_from_a_file_or_stdin(user: Console, path: Path) -> None:
    path.with_name("secret").write_text("päss\nnot this\n")
    user.play(r"""
        $ mqks user add alice --password-file secret --admin --eval --publish x
        """)
    first = only(path)
    assert (first.bind, first.admin, first.eval) == (["**"], True, True)
    assert is_password(path, "päss".encode())
    assert "päss" not in path.read_text()

    user.play(r"""
        $ printf 'from-stdin\r\n' | mqks user password alice --password-file -
        """)
    assert is_password(path, b"from-stdin")
    assert not is_password(path, "päss".encode())
    assert (only(path).publish, only(path).admin) == (["x"], True)

    user.play(r"""
        $ mqks user remove alice
        $ printf 'from-stdin\r\n' | mqks user add alice --password-file -
        """)
    assert is_password(path, b"from-stdin")


def test_a_password_that_is_asked_for(path: Path) -> None:
    """Twice, on a terminal, which does not show it."""
    command = [*MQKS, "user", "add", "alice", "--password", "--users", str(path)]
    with Terminal(*command) as terminal:
        for _ in range(2):
            terminal.until(b": $")
            terminal.press(b"hidden\n")
        assert terminal.end() == 0
    assert b"hidden" not in terminal.seen
    assert is_password(path, b"hidden")


@pytest.mark.parametrize(
    "words",
    [
        "alice",
        "'a b' --token",
        "-- --alice --token",
        "alice --token --publish 'a b'",
        "alice --password --password-file -",
        "alice --password secret",
    ],
)
def test_a_command_line_that_makes_no_user(user: Console, path: Path, words: str) -> None:
    user.play(f"""
        $ mqks user add {words}
        [64]
        """)
    assert not path.exists()


@pytest.mark.parametrize("password", ["", "two words", "--flag", "tab\there"])
def test_a_password_that_no_client_could_send(user: Console, password: str) -> None:
    words = ["user", "add", "alice", "--password-file", "-"]
    code, _, err = user(*words, stdin=password.encode() + b"\n")

    assert (code, b"password" in err) == (64, True)
    assert not password or password not in err.decode()


def test_a_list(user: Console) -> None:
    for name in ("bob", "alice"):
        user.out("user", "add", name, "--token", "--publish", "x", "--publish", "y")
    user.play("""
        $ mqks user list
        name password token sqs publish consume read bind monitoring admin eval …queue_bytes_max
        bob no yes no x y - - ** no no no - - - - -
        alice no yes no x y - - ** no no no - - - - -
        """)
    bob, alice = user.rows("user", "list")
    nothing = dict.fromkeys(["password", "sqs", "monitoring", "admin", "eval"], False)
    lists = {"publish": ["x", "y"], "consume": [], "read": [], "bind": ["**"]}
    limits = dict.fromkeys(LIMITS)
    assert bob == nothing | lists | limits | {"name": "bob", "token": True}
    assert alice["name"] == "alice"


def test_limits_are_set_one_by_one_and_lifted(user: Console, path: Path) -> None:
    user.play("""
        $ mqks user add alice --token
        …
        """)
    assert "connections_max" not in path.read_text()
    user.play("""
        $ mqks user limit alice --publishes-per-s 500 --connections 8
        $ mqks user limit alice --bytes-per-s 1000000 --connections 0
        $ mqks user limit alice
        give --publishes-per-s
        [64]
        $ mqks user limit alice --connections -1
        a limit must be from 0
        [64]
        $ mqks user limit alice --queues 10 --queue-bytes 5000000000
        $ mqks user limit alice --queues 5000000000
        a limit must be from 0 to 1000000000
        [64]
        $ mqks user limit bob --connections 1
        mqks: …there is no user bob
        [78]
        """)
    [alice] = user.rows("user", "list")
    assert (alice["publishes_per_s"], alice["bytes_per_s"]) == (500, 1_000_000)
    assert alice["connections_max"] is None
    assert (alice["queues_max"], alice["queue_bytes_max"]) == (10, 5_000_000_000)


def test_users_that_are_taken_or_go(user: Console, path: Path) -> None:
    user.play("""
        $ mqks user add alice --token
        …
        """)
    before = path.read_text()
    user.play(
        """
        $ mqks user add alice --token
        mqks: PATH: the user alice exists already
        [78]
        """,
        PATH=path,
    )
    assert path.read_text() == before
    user.play("""
        $ mqks user add bob --token
        …
        $ mqks user remove alice
        $ mqks user remove alice
        mqks: …
        [78]
        $ mqks user token alice
        mqks: …
        [78]
        """)
    assert only(path).name == "bob"


def test_a_new_token(user: Console, path: Path) -> None:
    first = user.out("user", "add", "alice", "--token", "--publish", "x").strip()
    second = user.out("user", "token", "alice").strip()

    users = Users([only(path)], b"k")
    assert only(path).publish == ["x"]
    assert users.by_token(first.encode()) is None
    assert users.by_token(second.encode()) is users.get("alice")


def test_what_a_user_may_do_grows_and_shrinks(user: Console, path: Path) -> None:
    user.out("user", "add", "alice", "--token", "--publish", "x")
    token = only(path).token

    more = "--publish x --publish y --consume q --read r --read s --bind z --monitoring --admin"
    assert user.out("user", "grant", "alice", *more.split()) == ""

    found = only(path)
    assert (found.publish, found.consume, found.bind) == (["x", "y"], ["q"], ["**", "z"])
    assert (found.token, found.admin, found.eval) == (token, True, False)
    assert (found.read, found.monitoring) == (["r", "s"], True)

    less = "--publish x --consume q --read r --bind ** --monitoring --admin --eval"
    assert user.out("user", "revoke", "alice", *less.split()) == ""

    found = only(path)
    assert (found.publish, found.consume, found.bind) == (["y"], [], ["z"])
    assert (found.token, found.admin, found.eval) == (token, False, False)
    assert (found.read, found.monitoring) == (["s"], False)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("grant bob --admin", 78),
        ("revoke bob --admin", 78),
        ("password bob --password-file -", 78),
        ("grant alice --publish a\tb", 64),
        ("grant alice --publish " + "x" * 5000, 64),
        ("revoke alice --publish x --publish x.*", 78),
        ("revoke alice --bind x", 78),
        # Nobody is asked without a terminal.
        ("add bob --password", 78),
        ("password alice", 78),
    ],
)
def test_what_cannot_be_changed_changes_nothing(
    user: Console, path: Path, words: str, code: int
) -> None:
    user.out("user", "add", "alice", "--token", "--publish", "x")
    before = path.read_text()

    ended, out, err = user("user", *words.split(" "), stdin=b"secret\nsecret\n")

    assert (ended, out, bool(err)) == (code, b"", True)
    if words in ("add bob --password", "password alice"):
        assert b"no terminal" in err
        assert b"--password-file" in err
    assert path.read_text() == before


def test_a_running_server_learns_what_was_granted_by_a_hang_up(
    user: Console, path: Path, tmp_path: Path
) -> None:
    token = user.out("user", "add", "alice", "--token").strip()
    flags = ("--users", str(path), "--auth", "always")
    with served(tmp_path / "mqks.db", *flags) as (server, client):
        assert client.ask(b"a auth --confirm " + token.encode()) == b"a ok "
        assert client.ask(b"m publish --confirm e x").startswith(b"m error ")

        user.out("user", "grant", "alice", "--publish", "e")
        server.hang_up()

        until(lambda: "event=reloaded" in server.log)
        assert client.ask(b"m publish --confirm e x") == b"m ok "


def test_no_directory_and_no_file(alone: Console) -> None:
    alone.play("""
        $ mqks user list
        mqks: …
        [78]
        $ mqks user add alice --token --users none/users
        mqks: … does not exist…
        [78]
        $ mqks user list --users none/users
        mqks: … does not exist…
        [78]
        $ mqks user remove x --users none/users
        mqks: … does not exist…
        [78]
        """)


@pytest.mark.slow
def test_many_at_once_lose_nobody(path: Path) -> None:
    command = [*MQKS, "user", "add", "--token", "--users", str(path)]
    running = [
        subprocess.Popen([*command, f"u{number}"], stdout=subprocess.DEVNULL) for number in range(4)
    ]
    assert [process.wait(WAIT_S) for process in running] == [0] * 4
    assert {user.name for user in users_file.read(path)} == {"u0", "u1", "u2", "u3"}
