"""`mqks user`: what it writes, what it prints, and what it never shows."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mqks import users_file
from mqks.commands import main
from mqks.users import User, Users
from tests.kit.fixtures import served
from tests.kit.waiting import WAIT_S, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mqks.users"


Run = tuple[int, str, str]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Run:
    """Exit code, stdout and stderr of one command."""
    code = main(["user", *map(str, arguments)])
    return code, *capsys.readouterr()


def only(path: Path) -> User:
    [user] = users_file.read(path)
    return user


def test_a_token_is_shown_once_and_works(
    capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path
) -> None:
    masks = ("--publish", "a.*", "--publish", "b", "--consume", "q-*", "--bind", "a.**")
    code, token, err = run(capsys, "add", "alice", "--token", *masks, "--users", path)

    assert (code, err) == (0, "")
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


def test_a_password_from_a_file(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    secret = path.with_name("secret")
    secret.write_text("päss\nnot this\n")
    flags = ("--admin", "--eval", "--users", path)

    assert run(capsys, "add", "alice", "--password-file", secret, *flags) == (0, "", "")

    user = only(path)
    assert (user.bind, user.admin, user.eval) == (["**"], True, True)
    assert Users([user], b"k").verify(b"alice", "päss".encode()) is not None
    assert "päss" not in path.read_text()


def test_a_password_from_stdin(
    capsys: pytest.CaptureFixture[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\r\n".replace(" ", "-")))

    assert run(capsys, "add", "alice", "--password-file", "-", "--users", path) == (0, "", "")
    assert Users([only(path)], b"k").verify(b"alice", b"from-stdin") is not None


def test_a_password_that_is_asked_for(path: Path) -> None:
    """Twice, on a terminal, which does not show it."""
    command = [
        sys.executable,
        "-m",
        "mqks",
        "user",
        "add",
        "alice",
        "--password",
        "--users",
        str(path),
    ]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        shown = b""
        for _ in range(2):
            while not shown.endswith(b": "):
                shown += os.read(ours, 1000)
            os.write(ours, b"hidden\n")
            shown += os.read(ours, 1)
        assert process.wait(WAIT_S) == 0
    os.close(ours)
    assert b"hidden" not in shown
    assert Users([only(path)], b"k").verify(b"alice", b"hidden") is not None


@pytest.mark.parametrize(
    "arguments",
    [
        ["alice"],
        ["a b", "--token"],
        ["--", "--alice", "--token"],
        ["alice", "--token", "--publish", "a b"],
        ["alice", "--password", "--password-file", "-"],
        ["alice", "--password", "secret"],
    ],
)
def test_a_command_line_that_makes_no_user(
    capsys: pytest.CaptureFixture[str], path: Path, arguments: list[str]
) -> None:
    assert run(capsys, "add", "--users", path, *arguments)[0] == 64
    assert not path.exists()


@pytest.mark.parametrize("password", ["", "two words", "--flag", "tab\there"])
def test_a_password_that_no_client_could_send(
    capsys: pytest.CaptureFixture[str],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    password: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(password + "\n"))

    code, _, err = run(capsys, "add", "alice", "--password-file", "-", "--users", path)

    assert code == 64
    assert "password" in err
    assert not password or password not in err


def test_a_name_that_is_taken(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    assert run(capsys, "add", "alice", "--token", "--users", path)[0] == 0
    before = path.read_text()

    code, out, err = run(capsys, "add", "alice", "--token", "--users", path)

    assert (code, out, err) == (78, "", f"mqks: {path}: the user alice exists already\n")
    assert path.read_text() == before


def test_a_list(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    for name in ("bob", "alice"):
        run(capsys, "add", name, "--token", "--publish", "x", "--publish", "y", "--users", path)

    code, out, _ = run(capsys, "list", "--users", path, "--json")
    rows = [json.loads(line) for line in out.splitlines()]

    assert code == 0
    assert [row["name"] for row in rows] == ["bob", "alice"]
    assert rows[0] == {
        "name": "bob",
        "password": False,
        "token": True,
        "sqs": False,
        "publish": ["x", "y"],
        "consume": [],
        "read": [],
        "bind": ["**"],
        "monitoring": False,
        "admin": False,
        "eval": False,
    }
    header, *lines = run(capsys, "list", "--users", path)[1].splitlines()
    assert header.split() == list(rows[0])
    assert lines[0].split() == ["bob", "no", "yes", "no", "x", "y", *"--", "**", "no", "no", "no"]


def test_a_user_that_goes(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    for name in ("alice", "bob"):
        run(capsys, "add", name, "--token", "--users", path)

    assert run(capsys, "remove", "alice", "--users", path) == (0, "", "")
    assert only(path).name == "bob"
    assert run(capsys, "remove", "alice", "--users", path)[0] == 78


def test_a_new_token(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    first = run(capsys, "add", "alice", "--token", "--publish", "x", "--users", path)[1].strip()

    second = run(capsys, "token", "alice", "--users", path)[1].strip()

    user = only(path)
    users = Users([user], b"k")
    assert user.publish == ["x"]
    assert users.by_token(first.encode()) is None
    assert users.by_token(second.encode()) is users.get("alice")
    assert run(capsys, "token", "bob", "--users", path)[0] == 78


def test_what_a_user_may_do_grows_and_shrinks(
    capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    run(capsys, "add", "alice", "--token", "--publish", "x", "--users", path)
    before = only(path)

    more = "--publish x --publish y --consume q --read r --read s --bind z --monitoring --admin"
    assert run(capsys, "grant", "alice", *more.split(), "--users", path) == (0, "", "")

    user = only(path)
    assert (user.publish, user.consume, user.bind) == (["x", "y"], ["q"], ["**", "z"])
    assert (user.token, user.admin, user.eval) == (before.token, True, False)
    assert (user.read, user.monitoring) == (["r", "s"], True)

    less = "--publish x --consume q --read r --bind ** --monitoring --admin --eval"
    assert run(capsys, "revoke", "alice", *less.split(), "--users", path) == (0, "", "")

    user = only(path)
    assert (user.publish, user.consume, user.bind) == (["y"], [], ["z"])
    assert (user.token, user.admin, user.eval) == (before.token, False, False)
    assert (user.read, user.monitoring) == (["s"], False)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["grant", "bob", "--admin"], 78),
        (["revoke", "bob", "--admin"], 78),
        (["password", "bob", "--password-file", "-"], 78),
        (["grant", "alice", "--publish", "a b"], 64),
        (["grant", "alice", "--publish", "x" * 5000], 64),
        (["revoke", "alice", "--publish", "x", "--publish", "x.*"], 78),
        (["revoke", "alice", "--bind", "x"], 78),
    ],
)
def test_what_cannot_be_changed_changes_nothing(
    capsys: pytest.CaptureFixture[str], path: Path, arguments: list[str], code: int
) -> None:
    run(capsys, "add", "alice", "--token", "--publish", "x", "--users", path)
    before = path.read_text()

    ended, out, err = run(capsys, *arguments, "--users", path)

    assert (ended, out) == (code, "")
    assert err
    assert path.read_text() == before


def test_a_new_password(
    capsys: pytest.CaptureFixture[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "add", "alice", "--token", "--publish", "x", "--users", path)
    before = only(path)
    for word in ("first", "second"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{word}\n"))
        assert run(capsys, "password", "alice", "--password-file", "-", "--users", path)[0] == 0

    user = only(path)
    users = Users([user], b"k")
    assert (user.token, user.publish) == (before.token, before.publish)
    assert users.verify(b"alice", b"first") is None
    assert users.verify(b"alice", b"second") is not None


def test_a_running_server_learns_what_was_granted_by_a_hang_up(
    capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path
) -> None:
    token = run(capsys, "add", "alice", "--token", "--users", path)[1].strip()
    flags = ("--users", str(path), "--auth", "always")
    with served(tmp_path / "mqks.db", *flags) as (server, client):
        assert client.ask(b"a auth --confirm " + token.encode()) == b"a ok "
        assert client.ask(b"m publish --confirm e x").startswith(b"m error ")

        run(capsys, "grant", "alice", "--publish", "e", "--users", path)
        server.hang_up()

        until(lambda: "event=reloaded" in server.log)
        assert client.ask(b"m publish --confirm e x") == b"m ok "


def test_the_setting_names_the_file(
    capsys: pytest.CaptureFixture[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "list")[0] == 78
    monkeypatch.setenv("MQKS_USERS", str(path))
    assert run(capsys, "add", "alice", "--token")[0] == 0
    assert only(path).name == "alice"


@pytest.mark.parametrize("arguments", [["add", "bob", "--password"], ["password", "alice"]])
def test_a_password_is_not_asked_for_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    arguments: list[str],
) -> None:
    run(capsys, "add", "alice", "--token", "--users", path)
    before = path.read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO("secret\nsecret\n"))

    code, out, err = run(capsys, *arguments, "--users", path)

    assert (code, out) == (78, "")
    assert "no terminal" in err
    assert "--password-file" in err
    assert path.read_text() == before


def test_no_directory_and_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (["add", "alice", "--token"], ["list"], ["remove", "x"]):
        code, _, err = run(capsys, *arguments, "--users", tmp_path / "none" / "users")
        assert code == 78
        assert " does not exist" in err


@pytest.mark.slow
def test_many_at_once_lose_nobody(path: Path) -> None:
    command = [sys.executable, "-m", "mqks", "user", "add", "--token", "--users", str(path)]
    running = [
        subprocess.Popen([*command, f"u{number}"], stdout=subprocess.DEVNULL) for number in range(4)
    ]
    assert [process.wait(WAIT_S) for process in running] == [0] * 4
    assert {user.name for user in users_file.read(path)} == {"u0", "u1", "u2", "u3"}
