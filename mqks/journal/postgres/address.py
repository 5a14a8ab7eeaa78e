"""What a URL of `--db` means: how to connect, and which schema has the journal.

The one rule: options that the commits rely on are set here, and overwrite those of the URL.
"""

import re
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict

from mqks.errors import ConfigurationError
from mqks.settings import DatabaseUrl

SCHEMA: Final = "mqks"
_DEFAULTS: Final = {
    "application_name": "mqks",
    "connect_timeout": "5",
    # A peer that vanished is noticed after about 11 s.
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
_OPTIONS: Final = (
    # A commit whose wait for the standby was cancelled answers with a warning: it must arrive.
    "client_min_messages=notice",
    # An update that waited for another one must find out that its condition does not hold any more.
    "default_transaction_isolation=read\\ committed",
    "idle_session_timeout=0",
    # A backend that waits for a lock notices that its client has disconnected.
    "client_connection_check_interval=2s",
    # Rows are found by their place or key, also in a table of one page: plans are kept while it
    # grows.
    "random_page_cost=0.5",
)


class PostgresAddress(NamedTuple):
    """`parameters` are those of `psycopg.connect`; `shown` has no password."""

    parameters: dict[str, Any]
    schema: str
    shown: str


def parse(url: DatabaseUrl) -> PostgresAddress:
    """Raises ConfigurationError."""
    base, _, query = url.text.partition("?")
    fields = query.split("&") if query else []
    ours = [field.removeprefix("schema=") for field in fields if field.startswith("schema=")]
    schema = ours[-1] if ours else SCHEMA
    if not re.fullmatch("[a-z_][a-z0-9_]{0,62}", schema):
        raise ConfigurationError(
            f"db: {schema!r} is not a schema name for a journal. Write lower-case letters, digits "
            "and _, such as ?schema=orders"
        )
    query = "&".join(field for field in fields if not field.startswith("schema="))
    try:
        parameters = conninfo_to_dict(f"{base}?{query}")
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(f"db: {url} can't be used: {line_of(error)}") from None
    forced = [*_OPTIONS, f"search_path={schema}"]
    options = [str(parameters.get("options", "")), *(f"-c {option}" for option in forced)]
    defaults = dict(_DEFAULTS)
    if "," in str(parameters.get("host", "")):
        defaults["target_session_attrs"] = "read-write"  # Finds the primary among them.
    parameters = {**defaults, **parameters, "options": " ".join(options).strip()}
    return PostgresAddress(parameters, schema, str(url))


def line_of(error: Exception) -> str:
    """The text of an error, which has several lines, in one."""
    return " ".join(str(error).split())
