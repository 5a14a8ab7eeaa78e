"""`mqks user`: users and their permissions.

The one rule: a password is never an argument, where others of the machine could see it; a token is
shown once, and is nowhere after that.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from mqks import users_file
from mqks.commands import complete
from mqks.commands.options import AsJson, Row, table, tell
from mqks.errors import BadRequest, ConfigurationError
from mqks.files import exists
from mqks.settings import load
from mqks.users import (
    SALT_BYTES,
    TOKEN_BYTES,
    User,
    allows,
    check_word,
    hash_password,
    hash_token,
)

app = typer.Typer(
    help="Change the file of users. A running server reloads it on SIGHUP.",
    epilog="Example: mqks user add alice --token --publish 'orders.**' --users mqks.users",
    no_args_is_help=True,
)

COLUMNS = [
    *("name", "password", "token", "publish", "consume", "read", "bind"),
    *("monitoring", "admin", "eval"),
]
SHOWN = {True: "yes", False: "no"}

UsersFile = Annotated[
    Path | None,
    typer.Option(
        "--users", metavar="PATH", help="The file of users, as for serve.", readable=False
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete.users)]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="File with the password in its first line; - is stdin.", readable=False
    ),
]
Masks = list[str] | None
Publish = Annotated[Masks, typer.Option(metavar="MASK", help="Events it may publish. Repeatable.")]
Consume = Annotated[Masks, typer.Option(metavar="MASK", help="Queues it may consume.")]
Read = Annotated[
    Masks, typer.Option(metavar="MASK", help="Queues it may read without consuming them.")
]
Bind = Annotated[Masks, typer.Option(metavar="MASK", help="Events it may bind to its queues.")]
Monitoring = Annotated[
    bool, typer.Option("--monitoring", help="It may inspect everything except messages.")
]
Admin = Annotated[
    bool,
    typer.Option("--admin", help="It may delete and purge queues, and what --monitoring allows."),
]
Eval = Annotated[bool, typer.Option("--eval", help="It may send _eval.")]


@app.command(epilog="Example: mqks user add alice --token --publish 'orders.**' --users mqks.users")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    users: UsersFile = None,
    password: Annotated[bool, typer.Option("--password", help="Ask for a password.")] = False,
    password_file: PasswordFile = None,
    token: Annotated[bool, typer.Option("--token", help="Create a token, and print it.")] = False,
    publish: Publish = None,
    consume: Consume = None,
    read: Read = None,
    bind: Bind = None,
    monitoring: Monitoring = False,
    admin: Admin = False,
    eval: Eval = False,
    as_json: AsJson = False,
) -> None:
    """Add a user with a password, a token or both.

    In masks * stands for any run without a dot, ** for any run at all. Without --bind it may bind
    all events.
    """
    if not (password or password_file or token):
        raise typer.BadParameter("give --password, --password-file or --token")
    if password and password_file:
        raise typer.BadParameter("--password and --password-file cannot be used together")
    path = _path(users)
    _check("name", name)
    name_bytes_max = load({"users": users}, os.environ).name_bytes_max
    if len(name.encode()) > name_bytes_max:
        raise typer.BadParameter(f"the name is longer than {name_bytes_max} bytes")
    _check_masks(publish, consume, read, bind)
    secret = _password(password_file) if password or password_file else ""
    new = secrets.token_hex(TOKEN_BYTES) if token else ""
    user = User(
        name,
        _hash(secret) if secret else "",
        hash_token(new) if new else "",
        publish or [],
        consume or [],
        read or [],
        ["**"] if bind is None else bind,
        monitoring,
        admin,
        eval,
    )
    with users_file.locked(path):
        entries = users_file.read(path) if exists(path) else []
        if any(entry.name == name for entry in entries):
            raise ConfigurationError(f"{path}: the user {name} exists already")
        users_file.write(path, [*entries, user])
    tell({"name": name, "token": new or None}, as_json, new)


@app.command("list", epilog="Example: mqks user list --json --users mqks.users")
def list_(
    users: UsersFile = None,
    as_json: AsJson = False,
) -> None:
    """List users and their permissions, without passwords, tokens and their hashes."""
    entries = users_file.read(_path(users))
    rows = [_row(entry, as_lists=as_json) for entry in entries]
    table(rows, COLUMNS, as_json=as_json)


def _row(entry: User, *, as_lists: bool) -> Row:
    row: dict[str, Any] = {name: getattr(entry, name) for name in COLUMNS}
    for name, value in row.items():
        if name in ("password", "token"):
            row[name] = value != ""
        elif isinstance(value, list) and not as_lists:
            row[name] = " ".join(value) or "-"
    return row if as_lists else {name: SHOWN.get(value, value) for name, value in row.items()}


@app.command(
    epilog="Example: mqks user grant alice --publish 'orders.**' --admin --users mqks.users"
)
def grant(
    name: Name,
    users: UsersFile = None,
    publish: Publish = None,
    consume: Consume = None,
    read: Read = None,
    bind: Bind = None,
    monitoring: Monitoring = False,
    admin: Admin = False,
    eval: Eval = False,
    as_json: AsJson = False,
) -> None:
    """Add permissions to a user; the password and token do not change."""
    given = {"publish": publish, "consume": consume, "read": read, "bind": bind}
    _check_masks(*given.values())
    with _changed(users, name) as (user, _):
        for what, masks in given.items():
            kept: list[str] = getattr(user, what)
            kept += [mask for mask in masks or [] if mask not in kept]
        user.monitoring |= monitoring
        user.admin |= admin
        user.eval |= eval
    tell(_row(user, as_lists=True), as_json)


@app.command(epilog="Example: mqks user revoke alice --bind '**' --eval --users mqks.users")
def revoke(
    name: Name,
    users: UsersFile = None,
    publish: Publish = None,
    consume: Consume = None,
    read: Read = None,
    bind: Bind = None,
    monitoring: Monitoring = False,
    admin: Admin = False,
    eval: Eval = False,
    as_json: AsJson = False,
) -> None:
    """Remove permissions from a user, mask by mask as `list` shows them."""
    given = {"publish": publish, "consume": consume, "read": read, "bind": bind}
    with _changed(users, name) as (user, _):
        for what, masks in given.items():
            kept: list[str] = getattr(user, what)
            for mask in masks or []:
                if mask not in kept:
                    raise ConfigurationError(f"user {name} has no mask {mask} for --{what}")
                kept.remove(mask)
        user.monitoring &= not monitoring
        user.admin &= not admin
        user.eval &= not eval
    tell(_row(user, as_lists=True), as_json)


@app.command(epilog="Example: mqks user remove alice --users mqks.users")
def remove(name: Name, users: UsersFile = None, as_json: AsJson = False) -> None:
    """Remove a user; on SIGHUP the server closes its connections."""
    with _changed(users, name) as (user, entries):
        entries.remove(user)
    tell({"name": name}, as_json)


@app.command(epilog="Example: mqks user token alice --users mqks.users")
def token(name: Name, users: UsersFile = None, as_json: AsJson = False) -> None:
    """Create a new token for a user, and print it; the old one becomes invalid."""
    new = secrets.token_hex(TOKEN_BYTES)
    with _changed(users, name) as (user, _):
        user.token = hash_token(new)
    tell({"name": name, "token": new}, as_json, new)


@app.command(epilog="Example: mqks user password alice --users mqks.users")
def password(
    name: Name,
    users: UsersFile = None,
    password_file: PasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask for a new password of a user; the old one becomes invalid."""
    path = _path(users)
    _find(path, users_file.read(path), name)  # Before somebody thinks of a password in vain.
    new = _hash(_password(password_file))
    with _changed(users, name) as (user, _):
        user.password = new
    tell({"name": name}, as_json)


@contextmanager
def _changed(users: Path | None, name: str) -> Iterator[tuple[User, list[User]]]:
    """A user, and all users; changes are written at the end."""
    path = _path(users)
    with users_file.locked(path):
        entries = users_file.read(path)
        yield _find(path, entries, name), entries
        users_file.write(path, entries)


def _path(flag: Path | None) -> Path:
    path = load({"users": flag}, os.environ).users
    if path is None:
        raise ConfigurationError(
            "no users file: name it with --users PATH, or by the setting users (MQKS_USERS)"
        )
    return path


def _check(what: str, word: str) -> None:
    try:
        check_word(what, word)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _check_masks(*given: Masks) -> None:
    for mask in chain.from_iterable(masks or [] for masks in given):
        _check("mask", mask)
    try:
        allows(chain.from_iterable(masks or [] for masks in given))
    except BadRequest as error:
        raise typer.BadParameter(str(error)) from None


def _hash(password: str) -> str:
    return hash_password(password, secrets.token_bytes(SALT_BYTES))


def _find(path: Path, entries: list[User], name: str) -> User:
    for entry in entries:
        if entry.name == name:
            return entry
    raise ConfigurationError(f"{path}: there is no user {name}")


def _password(file: Path | None) -> str:
    if file is None:
        if not sys.stdin.isatty():  # Else it would be asked for with warnings, and be seen.
            raise ConfigurationError(
                "there is no terminal to ask for the password on:"
                " give --password-file PATH, or - for stdin"
            )
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
