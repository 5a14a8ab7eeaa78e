"""`mqks user`: users and their permissions.

The one rule: a password is never an argument, where others of the machine could see it; a token and
a secret are shown once.
"""

import base64
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, cast

import typer

from mqks import users_file
from mqks.commands import complete
from mqks.commands.declare import Run, declare
from mqks.commands.inspect import listed
from mqks.commands.options import AsJson, Names, Told
from mqks.errors import BadRequest, ConfigurationError
from mqks.files import exists
from mqks.settings import load
from mqks.users import (
    LIMITS,
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
    *("name", "password", "token", "sqs", "publish", "consume", "read", "bind"),
    *("monitoring", "admin", "eval", *LIMITS),
]

UsersFile = Annotated[
    Path | None,
    typer.Option(
        "--users",
        metavar="PATH",
        help=r"The file of users. \[default: as for serve]",
        readable=False,
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete.users)]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="File with the password in its first line; - is stdin.", readable=False
    ),
]


class PermissionOptions(TypedDict):
    publish: Annotated[Names, "MASK", "Events it may publish. Repeatable."]
    consume: Annotated[Names, "MASK", "Queues it may consume."]
    read: Annotated[Names, "MASK", "Queues it may read without consuming them."]
    bind: Annotated[Names, "MASK", "Events it may bind to its queues."]
    monitoring: Annotated[bool, "It may inspect everything except messages."]
    admin: Annotated[bool, "It may delete and purge queues, and what --monitoring allows."]
    eval: Annotated[bool, "It may send _eval."]


MASKS = ("publish", "consume", "read", "bind")


def add(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    users: UsersFile = None,
    password: Annotated[bool, "Ask for a password."] = False,
    password_file: PasswordFile = None,
    token: Annotated[bool, "Create a token, and print it."] = False,
    sqs: Annotated[bool, "Create an access key and a secret for SQS, and print them."] = False,
    **permissions: Unpack[PermissionOptions],
) -> Told:
    """Add a user with a password, a token, an access key of SQS, or several of them.

    In masks * stands for any run without a dot, ** for any run at all. Without --bind it may bind
    all events.
    """
    if not (password or password_file or token or sqs):
        raise typer.BadParameter("give --password, --password-file, --token or --sqs")
    if password and password_file:
        raise typer.BadParameter("--password and --password-file cannot be used together")
    path = _path(users)
    _check("name", name)
    name_bytes_max = load({"users": users}, os.environ).name_bytes_max
    if len(name.encode()) > name_bytes_max:
        raise typer.BadParameter(f"the name is longer than {name_bytes_max} bytes")
    _check_masks(permissions)
    secret = _password(password_file) if password or password_file else ""
    new = secrets.token_hex(TOKEN_BYTES) if token else ""
    keys = _new_keys() if sqs else {}
    given: Any = {what: value for what, value in permissions.items() if value}
    if keys:
        given["sqs"] = ":".join(keys.values())
    user = User(name, secret and _hash(secret), new and hash_token(new), **given)
    with users_file.locked(path):
        entries = users_file.read(path) if exists(path) else []
        if any(entry.name == name for entry in entries):
            raise ConfigurationError(f"{path}: the user {name} exists already")
        users_file.write(path, [*entries, user])
    told = [new] if new else []
    return {"name": name, "token": new or None, **keys}, "\n".join([*told, *keys.values()])


def list_(users: UsersFile = None, as_json: AsJson = False) -> None:
    """List users and their permissions, without passwords, tokens and their hashes."""
    listed(map(_row, users_file.read(_path(users))), COLUMNS, as_json)


def _row(entry: User) -> dict[str, Any]:
    row = {name: getattr(entry, name) for name in COLUMNS}
    row |= {name: row[name] or None for name in LIMITS}
    return row | {name: row[name] != "" for name in ("password", "token", "sqs")}


def grant(name: Name, users: UsersFile = None, **permissions: Unpack[PermissionOptions]) -> Told:
    """Add permissions to a user; the password and token do not change."""
    _check_masks(permissions)
    with _changed(users, name) as (user, _):
        for _what, kept, masks in _masks(user, permissions):
            kept += [mask for mask in masks if mask not in kept]
        user.monitoring |= permissions["monitoring"]
        user.admin |= permissions["admin"]
        user.eval |= permissions["eval"]
    return _row(user), ""


def revoke(name: Name, users: UsersFile = None, **permissions: Unpack[PermissionOptions]) -> Told:
    """Remove permissions from a user, mask by mask as `list` shows them."""
    with _changed(users, name) as (user, _):
        for what, kept, masks in _masks(user, permissions):
            for mask in masks:
                if mask not in kept:
                    raise ConfigurationError(f"user {name} has no mask {mask} for --{what}")
                kept.remove(mask)
        user.monitoring &= not permissions["monitoring"]
        user.admin &= not permissions["admin"]
        user.eval &= not permissions["eval"]
    return _row(user), ""


def _masks(user: User, given: PermissionOptions) -> Iterator[tuple[str, list[str], list[str]]]:
    """What may be done to what masks name: the masks of a user, and those that are given."""
    for what in MASKS:
        yield what, getattr(user, what), cast(Names, given.get(what)) or []


def limit(
    name: Name,
    users: UsersFile = None,
    publishes_per_s: Annotated[
        int | None, "N", r"Publishes per second; 0: no limit. \[default: as it is]"
    ] = None,
    bytes_per_s: Annotated[
        int | None, "N", r"Bytes of requests per second; 0: none. \[default: as it is]"
    ] = None,
    connections: Annotated[
        int | None, "N", r"Connections at a time; 0: no limit. \[default: as it is]"
    ] = None,
    queues: Annotated[
        int | None, "N", r"Queues that it has made; 0: no limit. \[default: as it is]"
    ] = None,
    queue_bytes: Annotated[
        int | None, "N", r"Bytes that wait in all of them; 0: no limit. \[default: as it is]"
    ] = None,
) -> Told:
    """Set limits of a user; what is not given stays.

    Rates and connections are of all its connections together: above a rate they are read more
    slowly, and nothing is refused. Above the others what is new is refused.
    """
    values = publishes_per_s, bytes_per_s, connections, queues, queue_bytes
    given = dict(zip(LIMITS, values, strict=True))
    if all(value is None for value in values):
        flags = "--publishes-per-s, --bytes-per-s, --connections, --queues or --queue-bytes"
        raise typer.BadParameter(f"give {flags}")
    for key, value in given.items():
        if value is not None and not 0 <= value <= LIMITS[key]:
            raise typer.BadParameter(f"a limit must be from 0 to {LIMITS[key]}")
    with _changed(users, name) as (user, _):
        for key, value in given.items():
            if value is not None:
                setattr(user, key, value)
    return _row(user), ""


def remove(name: Name, users: UsersFile = None) -> Told:
    """Remove a user; on SIGHUP the server closes its connections."""
    with _changed(users, name) as (user, entries):
        entries.remove(user)
    return {"name": name}, ""


def token(name: Name, users: UsersFile = None) -> Told:
    """Create a new token for a user, and print it; the old one becomes invalid."""
    new = secrets.token_hex(TOKEN_BYTES)
    with _changed(users, name) as (user, _):
        user.token = hash_token(new)
    return {"name": name, "token": new}, new


def sqs(name: Name, users: UsersFile = None) -> Told:
    """Create a new access key and secret of SQS for a user; the old ones become invalid."""
    keys = _new_keys()
    with _changed(users, name) as (user, _):
        user.sqs = ":".join(keys.values())
    return {"name": name, **keys}, "\n".join(keys.values())


def _new_keys() -> dict[str, str]:
    access_key = "MQKS" + base64.b32encode(secrets.token_bytes(10)).decode()
    return {"access_key": access_key, "secret": secrets.token_urlsafe(TOKEN_BYTES)}


def password(name: Name, users: UsersFile = None, password_file: PasswordFile = None) -> Told:
    """Ask for a new password of a user; the old one becomes invalid."""
    path = _path(users)
    _find(path, users_file.read(path), name)  # Before somebody thinks of a password in vain.
    new = _hash(_password(password_file))
    with _changed(users, name) as (user, _):
        user.password = new
    return {"name": name}, ""


COMMANDS: dict[Run, str] = {
    add: "mqks user add alice --token --publish 'orders.**' --users mqks.users",
    list_: "mqks user list --json --users mqks.users",
    grant: "mqks user grant alice --publish 'orders.**' --admin --users mqks.users",
    revoke: "mqks user revoke alice --bind '**' --eval --users mqks.users",
    limit: "mqks user limit alice --publishes-per-s 500 --connections 8 --users mqks.users",
    remove: "mqks user remove alice --users mqks.users",
    token: "mqks user token alice --users mqks.users",
    sqs: "mqks user sqs alice --users mqks.users",
    password: "mqks user password alice --users mqks.users",
}
for run, example in COMMANDS.items():
    declare(app, run, example)


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


def _check_masks(given: PermissionOptions) -> None:
    masks = [mask for what in MASKS for mask in cast(Names, given.get(what)) or []]
    for mask in masks:
        _check("mask", mask)
    try:
        allows(masks)
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
