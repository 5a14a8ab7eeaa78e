"""`mqks user`: who may connect, and what they may do.

The one rule: a password is never an argument, where others of the machine could see it; a token is
shown once, and is nowhere after that.
"""

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mqks import users_file
from mqks.commands.options import AsJson, Row, table
from mqks.errors import ConfigurationError
from mqks.settings import load
from mqks.users import SALT_BYTES, TOKEN_BYTES, User, check_word, hash_password, hash_token

app = typer.Typer(
    help="Change the file of users. A running server reads it again on SIGHUP.",
    epilog="Example: mqks user add alice --token --publish 'orders.**'",
    no_args_is_help=True,
)

COLUMNS = ["name", "password", "token", "publish", "consume", "bind", "admin", "eval"]
SHOWN = {True: "yes", False: "no"}

UsersFile = Annotated[
    Path | None, typer.Option("--users", metavar="PATH", help="The file; as for serve.")
]
Name = Annotated[str, typer.Argument(metavar="NAME")]
Masks = list[str] | None


@app.command(epilog="Example: mqks user add alice --token --publish 'orders.**'")
def add(
    name: Name,
    users: UsersFile = None,
    password: Annotated[bool, typer.Option("--password", help="Ask for a password.")] = False,
    password_file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Take its first line as password; - is stdin."),
    ] = None,
    token: Annotated[bool, typer.Option("--token", help="Make a token, and print it.")] = False,
    publish: Annotated[
        Masks, typer.Option(metavar="MASK", help="Events it may publish; may be repeated.")
    ] = None,
    consume: Annotated[Masks, typer.Option(metavar="MASK", help="Queues it may consume.")] = None,
    bind: Annotated[
        Masks, typer.Option(metavar="MASK", help="Events it may bind to its queues. \\[all]")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Let it delete, purge, see all.")] = False,
    eval: Annotated[bool, typer.Option("--eval", help="Let it send _eval.")] = False,
) -> None:
    """Add a user with a password, a token or both.

    In masks * stands for any run without a dot, ** for any run at all.
    """
    if not (password or password_file or token):
        raise typer.BadParameter("one of --password, --password-file and --token is needed")
    if password and password_file:
        raise typer.BadParameter("--password and --password-file exclude each other")
    path = _path(users)
    _check("name", name)
    words = [
        ("publish", publish),
        ("consume", consume),
        ("bind", bind),
    ]
    for option, masks in words:
        for mask in masks or []:
            _check(f"mask for --{option}", mask)
    secret = _password(password_file) if password or password_file else ""
    new = secrets.token_hex(TOKEN_BYTES) if token else ""
    user = User(
        name,
        hash_password(secret, secrets.token_bytes(SALT_BYTES)) if secret else "",
        hash_token(new) if new else "",
        publish or [],
        consume or [],
        ["**"] if bind is None else bind,
        admin,
        eval,
    )
    user.permissions()
    with users_file.locked(path):
        entries = users_file.read(path) if path.exists() else []
        if any(entry.name == name for entry in entries):
            raise ConfigurationError(f"{path}: there is a user {name} already")
        users_file.write(path, [*entries, user])
    if new:
        typer.echo(new)


@app.command("list", epilog="Example: mqks user list --json")
def list_(
    users: UsersFile = None,
    as_json: AsJson = False,
) -> None:
    """List users and what they may do; no secrets, and no hashes of them."""
    entries = users_file.read(_path(users))
    rows = [_row(entry, as_lists=as_json) for entry in entries]
    table(rows, COLUMNS, as_json=as_json)


def _row(entry: User, *, as_lists: bool) -> Row:
    row: dict[str, Any] = {name: getattr(entry, name) for name in COLUMNS}
    for name, value in row.items():
        if name in ("password", "token"):
            row[name] = value != ""
        elif isinstance(value, list) and not as_lists:
            row[name] = " ".join(value)
    return row if as_lists else {name: SHOWN.get(value, value) for name, value in row.items()}


@app.command(epilog="Example: mqks user remove alice")
def remove(name: Name, users: UsersFile = None) -> None:
    """Remove a user; on SIGHUP the server closes its connections."""
    path = _path(users)
    with users_file.locked(path):
        entries = users_file.read(path)
        _find(path, entries, name)
        users_file.write(path, [entry for entry in entries if entry.name != name])


@app.command(epilog="Example: mqks user token alice")
def token(name: Name, users: UsersFile = None) -> None:
    """Give a user a new token, and print it; the old one is worth nothing."""
    path = _path(users)
    new = secrets.token_hex(TOKEN_BYTES)
    with users_file.locked(path):
        entries = users_file.read(path)
        _find(path, entries, name).token = hash_token(new)
        users_file.write(path, entries)
    typer.echo(new)


def _path(flag: Path | None) -> Path:
    path = load({"users": flag}, os.environ).users
    if path is None:
        raise ConfigurationError("no users file: name it with --users, or set users")
    return path


def _check(what: str, word: str) -> None:
    try:
        check_word(what, word)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _find(path: Path, entries: list[User], name: str) -> User:
    for entry in entries:
        if entry.name == name:
            return entry
    raise ConfigurationError(f"{path}: there is no user {name}")


def _password(file: Path | None) -> str:
    if file is None:
        word = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    elif str(file) == "-":
        word = sys.stdin.readline().rstrip("\r\n")
    else:
        try:
            word = file.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        except OSError as error:
            raise ConfigurationError(f"{file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"{file}: not UTF-8") from None
    _check("password", word)
    return str(word)
