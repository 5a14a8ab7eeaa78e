"""`mqks user`: what it writes, what it prints, and what it never shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mqks import users_file
from mqks.users import User, Users
from tests.commands.console import MQKS, Console, Here, Terminal
from tests.kit.fixtures import served
from tests.kit.waiting import WAIT_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mqks.users"


@pytest.fixture
def user(tmp_path: Path, path: Path) -> Console:
    """A console in which the file is set."""
    return Here(tmp_path, MQKS_USERS=str(path))


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


@pytest.mark.parametrize("password", ["", "two words", "--flag", "tab\there"])
def test_a_password_that_no_client_could_send(user: Console, password: str) -> None:
    words = ["user", "add", "alice", "--password-file", "-"]
    code, _, err = user(*words, stdin=password.encode() + b"\n")
    assert (code, b"password" in err) == (64, True)
    assert not password or password not in err.decode()


def test_a_mask_that_is_too_long_is_not_granted(user: Console, path: Path) -> None:
    user.out("user", "add", "alice", "--token")
    before = path.read_text()
    assert user("user", "grant", "alice", "--publish", "x" * 5000)[0] == 64
    assert path.read_text() == before


def test_a_new_token(user: Console, path: Path) -> None:
    first = user.out("user", "add", "alice", "--token", "--publish", "x").strip()
    second = user.out("user", "token", "alice").strip()
    users = Users([only(path)], b"k")
    assert only(path).publish == ["x"]
    assert users.by_token(first.encode()) is None
    assert users.by_token(second.encode()) is users.get("alice")


@pytest.mark.slow
def test_many_at_once_lose_nobody(path: Path) -> None:
    command = [*MQKS, "user", "add", "--token", "--users", str(path)]
    running = [
        subprocess.Popen([*command, f"u{number}"], stdout=subprocess.DEVNULL) for number in range(4)
    ]
    assert [process.wait(WAIT_S) for process in running] == [0] * 4
    assert {user.name for user in users_file.read(path)} == {"u0", "u1", "u2", "u3"}
