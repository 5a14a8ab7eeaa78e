"""Every setting, once: its default, its bounds and one line about it.

The one rule: a setting is one field of `Settings`. Flags, variables, the keys of mqks.toml and
their checks are derived from that field; tests compare mqks.toml.example and docs/settings.md
with it.
"""

# ruff: noqa: RUF009  A default that is a call to one of a group makes a field.

import ipaddress
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

from mqks.errors import BadRequest, ConfigurationError, did_you_mean
from mqks.limits import (
    HTTP_UNREAD_BYTES_MAX,
    HTTP_WAITING_BYTES_MAX,
    QUEUE_TABLES_MAX,
    SCHEDULE_BYTES_MAX,
    SCHEDULES_MAX,
)
from mqks.protocol.durations import in_seconds
from mqks.protocol.masks import name_masks
from mqks.protocol.requests import POLICY_FIELDS, policy_value

MIB, GIB, TIB = 1024**2, 1024**3, 1024**4
SHARE_BYTES_MIN = 64 * MIB
"""Minimum of a limit that shrinks with `memory_bytes`."""
PROCESS_BYTES, READ_BYTES, GATEWAY_BYTES = 45 * MIB, 100 * MIB, 196 * MIB
"""Memory of an empty server, of one read of the journal, and of a gateway with its streams."""
ONCE_ID_BYTES = 90 + 128
"""Of the longest id of `--once`."""
_SIZES = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": 1024}
_EXAMPLES = {
    "bytes": " or a size such as 512MiB (KiB, MiB, GiB, TiB)",
    "seconds": " or a duration such as 1h30m (ms, s, m, h, d)",
}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
# Not settings: the path of mqks.toml, and the URL that clients use.
_OTHER_VARIABLES = ("MQKS_CONFIG", "MQKS_URL")

RENAMED = {
    "consumer_unacked_max": "prefetch_max",
    "outbox_high_water_bytes": "delivery_pause_bytes",
    "outbox_bytes_max": "output_buffer_bytes_max",
    "outboxes_bytes_max": "unsent_bytes_max",
}
"""Old names of settings and what they are called now. The old ones are refused."""
ADVANCED = "Advanced"
"""The group of settings that few operators need."""

T = TypeVar("T")


class QueueTable(NamedTuple):
    """One `[[queue]]` table of mqks.toml: policy fields for queues that the mask `name` matches."""

    name: str
    fields: dict[str, Any]


class Overridden(NamedTuple):
    """A setting with two different values, of which the weaker place has no effect."""

    setting: str
    used: str
    ignored: str


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """The URL of a database server, as it was given. As a string it has no password."""

    text: str

    def __str__(self) -> str:
        return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}***", self.text)


_PASSWORD = re.compile(r"(:/+[^:@/]*:)[^/]*(?=@)|([?&](?:ssl)?password=)[^&]*")


@dataclass(frozen=True, slots=True)
class About:
    """The description of a setting, beyond its type and default."""

    group: str
    why: str
    unit: str
    bounds: tuple[float, float]  # of numbers, both included
    share: int
    """Unless it is set, it is at most this part of `memory_bytes`: 2 is a half, 0 none."""
    is_reread: bool
    """It is a file that a reload reads again. A new value of any setting needs a restart."""


def _setting(
    group: str,
    default: T,
    why: str,
    bounds: tuple[float, float, str] = (0, 0, ""),
    share: int = 0,
    *,
    is_reread: bool = False,
) -> T:
    """A field; `bounds` are the minimum, the maximum and the unit."""
    low, high, unit = bounds
    about = About(group, why, unit, (low, high), share, is_reread)
    return field(default=default, metadata={"about": about})


_storage, _listening = partial(_setting, "Storage"), partial(_setting, "Listening")
_security, _limits = partial(_setting, "Security"), partial(_setting, "Limits")
_memory, _monitoring = partial(_setting, "Memory"), partial(_setting, "Monitoring")
_process, _advanced = partial(_setting, "Process"), partial(_setting, ADVANCED)


PAGE_PORT: Final = 25080
"""Where the page is when nobody has asked for a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a server; made by `load`, which checks every value."""

    db: Path | DatabaseUrl = _storage(
        Path("mqks.db"), "Path of the database file, or the URL of a PostgreSQL database."
    )
    db_must_exist: bool = _storage(
        False,
        "Refuse to start without a database, instead of creating one: its volume is not mounted.",
    )
    db_replication: Literal["standbys", "provider", "none"] = _storage(
        "standbys",
        "What replicates PostgreSQL's commits: synchronous standbys, the provider, or nothing.",
    )
    standby: bool = _storage(
        True, "With PostgreSQL: wait while another broker owns the journal, instead of exiting."
    )
    synchronous: Literal["full", "normal", "off"] = _storage(
        "full", "When commits are synced to the disk; only full survives a power cut."
    )
    db_bytes_max: int = _storage(
        0,
        "Maximum size of the database; above it publishes are refused. 0 means no limit.",
        (0, 128 * TIB, "bytes"),
    )
    disk_free_bytes_min: int = _storage(
        50 * MIB,
        "Refuse publishes when the file system has less free space than this.",
        (0, 128 * TIB, "bytes"),
    )
    once_ids_max: int = _storage(
        1_000_000,
        "Number of remembered ids of publish --once; older ids are no longer deduplicated.",
        (0, 100_000_000, "ids"),
    )

    host: str = _listening("127.0.0.1", "Address to listen on.")
    port: int = _listening(25000, "TCP port; 0 selects a free port and logs it.", (0, 65535, ""))
    unix: Path | None = _listening(None, "Path of a Unix socket to listen on as well.")
    api_host: str = _listening("127.0.0.1", "Address of the HTTP API.")
    api_port: int | None = _listening(
        None,
        "Port of the HTTP API; 0 selects a free port and logs it. Without a number there is none.",
        (0, 65535, ""),
    )
    sqs_host: str = _listening("127.0.0.1", "Address of the SQS API.")
    sqs_port: int | None = _listening(
        None,
        "Port of the SQS API, usually 9324; 0 selects a free port and logs it. Without a number "
        "there is none.",
        (0, 65535, ""),
    )
    insecure: bool = _listening(
        False, "Listen beyond loopback without users: anyone who can connect may do everything."
    )

    users: Path | None = _security(None, "Users file, written by mqks user.", is_reread=True)
    auth: Literal["remote", "always"] = _security(
        "remote", "Who must authenticate: clients on other machines, or all clients."
    )
    tls_host: str = _security("0.0.0.0", "Address to listen on with TLS.")
    tls_port: int = _security(0, "TCP port for TLS, usually 25001; 0 disables TLS.", (0, 65535, ""))
    tls_cert: Path | None = _security(
        None,
        "PEM file with the server certificate and the intermediate certificates.",
        is_reread=True,
    )
    tls_key: Path | None = _security(
        None, "PEM file with the private key of the certificate.", is_reread=True
    )
    tls_client_ca: Path | None = _security(
        None,
        "PEM file with authorities; TLS clients must present a certificate of one of them.",
        is_reread=True,
    )
    eval: Literal["off", "loopback", "on"] = _security(
        "loopback", "Who may use _eval, which can read the whole state of the server."
    )
    auth_timeout_s: float = _security(
        10.0,
        "Close a connection that has not authenticated within this time.",
        (0.1, 3600, "seconds"),
    )
    unauthenticated_max: int = _security(
        1000,
        "Maximum number of unauthenticated connections; above it the oldest is closed.",
        (1, 1_000_000, "connections"),
    )

    connections_max: int = _limits(
        20_000,
        "Maximum number of connections; each uses a file descriptor.",
        (1, 1_000_000, "connections"),
    )
    connections_per_address_max: int = _limits(
        5000,
        "Maximum number of connections from one IPv4 address or one IPv6 /64 network.",
        (1, 1_000_000, "connections"),
    )
    line_bytes_max: int = _limits(
        MIB,
        "Maximum length of a request; a longer one closes the connection.",
        (64, GIB, "bytes"),
    )
    name_bytes_max: int = _limits(
        255,
        "Maximum length of the name of a new queue or event, and of a request id.",
        (64, 64 * 1024, "bytes"),
    )
    queues_max: int = _limits(100_000, "Maximum number of queues.", (1, 100_000_000, "queues"))
    queue_messages_max: int = _limits(
        100_000_000,
        "Refuse publishes to a queue with this many waiting messages, if its policy sets no "
        "`messages_max`; 0 means no limit.",
        (0, 10**15, "messages"),
    )
    prefetch_max: int = _limits(
        100_000,
        "Maximum number of unacked messages of one consumer; delivery to it pauses there.",
        (1, 100_000_000, "messages"),
    )

    memory_bytes: int = _memory(
        512 * MIB,
        "Memory for waiting messages; above it they are only on disk.",
        (0, 128 * TIB, "bytes"),
    )
    metadata_bytes_max: int = _memory(
        512 * MIB,
        "Memory for queues, bindings and consumers; above it new ones are refused.",
        (MIB, 128 * TIB, "bytes"),
        share=1,
    )
    unacked_bytes_max: int = _memory(
        256 * MIB,
        "Memory for unacked messages; above it each consumer gets one message at a time.",
        (MIB, 128 * TIB, "bytes"),
        share=2,
    )
    unhandled_bytes_max: int = _memory(
        256 * MIB,
        "Memory for requests that wait for their turn, and incomplete ones; near it they are read "
        "in small pieces, and long ones one after the other.",
        (MIB, 128 * TIB, "bytes"),
        share=2,
    )
    unsent_bytes_max: int = _memory(
        256 * MIB,
        "Memory for unsent replies of all clients; above it delivery pauses, and clients that do "
        "not read are disconnected.",
        (MIB, 128 * TIB, "bytes"),
        share=2,
    )

    broker_name: str | None = _monitoring(
        None,
        "Name of the broker on the page, in metrics, stats, ping and each log line. Without one it "
        "is the host's name, which log lines leave out.",
    )
    http_host: str = _monitoring("127.0.0.1", "Address of the web page, metrics and health.")
    http_port: int | None = _monitoring(
        None,
        "Port of the web page, metrics and health; 0 selects a free port and logs it. Without a "
        "number it is 25080, if page is not off and the port is free.",
        (0, 65535, ""),
    )
    page: Literal["off", "read", "full"] = _monitoring(
        "read",
        "Web page: none, one that only shows, or one where users may also act.",
    )
    queue_age_warning_s: float = _monitoring(
        0.0,
        "Log a warning when a message has waited this long; 0 disables it.",
        (0, 1e9, "seconds"),
    )
    log_level: Literal["debug", "info", "warning", "error"] = _monitoring(
        "info", "Minimum log level."
    )
    log_format: Literal["text", "json"] = _monitoring(
        "text", "Format of log lines: key=value text, or JSON."
    )

    audit: str = _monitoring(
        "log",
        "Where logins, and requests that change what exists or remove messages, are logged: log, "
        "syslog, a file, or off, which records none.",
    )

    salvage: bool = _process(False, "Start with a damaged journal, using what is readable.")
    read_only: bool = _process(
        False, "Start read-only: refuse publishes, and what else adds something."
    )
    drain_timeout_s: float = _process(
        10.0,
        "How long a stopping server waits until clients have read their replies.",
        (0, 3600, "seconds"),
    )
    uvloop: bool = _process(True, "Use uvloop if it is installed; it is faster than asyncio.")

    ballast_bytes: int = _advanced(
        16 * MIB,
        "Size of a file that is released when the disk is full, to make space for acks. Less than "
        "batch_bytes_max and the WAL (wal_checkpoint_pages) together may not suffice.",
        (0, 16 * GIB, "bytes"),
    )
    wal_checkpoint_pages: int = _advanced(
        250,
        "Checkpoint the WAL at this size; larger values make the slowest confirms slower.",
        (1, 1_000_000, "pages"),
    )
    text_file_bytes_min: int = _advanced(
        128 * 1024,
        "The text of a segment, all messages of a commit, is in a file of its own from this size "
        "on; 0 means never.",
        (0, GIB, "bytes"),
    )
    wal_bytes_max: int = _advanced(
        GIB,
        "Refuse publishes at this size of the WAL, or of deleted texts, which grow while another "
        "process reads the database.",
        (16 * MIB, 128 * TIB, "bytes"),
    )
    errors_kept_max: int = _advanced(
        1000,
        "Number of error replies stored for mqks inspect errors.",
        (0, 10_000_000, "errors"),
    )
    audit_kept_max: int = _advanced(
        10_000,
        "Number of logins and requests stored for mqks inspect audit.",
        (0, 10_000_000, "records"),
    )
    trace_bytes_max: int = _advanced(
        16 * MIB,
        "Memory of what mqks trace has noted; what is beyond it pushes out the oldest.",
        (64 * 1024, GIB, "bytes"),
    )
    results_max: int = _advanced(
        100_000,
        "Number of messages and results of publish --keep-result; more are refused.",
        (0, 10_000_000, "results"),
    )
    results_bytes_max: int = _advanced(
        32 * MIB,
        "Memory of messages and results of publish --keep-result; more are refused.",
        (0, 64 * GIB, "bytes"),
    )
    result_bytes_max: int = _advanced(
        64 * 1024, "Maximum length of the data of one result.", (0, MIB, "bytes")
    )
    results_keep_s_max: float = _advanced(
        604_800.0, "Longest time of publish --keep-result.", (0, 31_536_000, "seconds")
    )
    batches_max: int = _advanced(
        10_000, "Maximum number of batches that have not ended.", (0, 1_000_000, "batches")
    )
    batches_bytes_max: int = _advanced(
        16 * MIB,
        "Memory of batches: their names, and what is published when they end.",
        (64 * 1024, GIB, "bytes"),
    )
    batch_expiry_s: float = _advanced(
        7 * 86_400.0,
        "A batch that has not ended after so long is forgotten, unless it was opened with --for.",
        (1, 1_000_000_000, "seconds"),
    )
    bindings_per_queue_max: int = _advanced(
        100_000, "Maximum number of bindings of one queue.", (1, 100_000_000, "bindings")
    )
    consumers_per_connection_max: int = _advanced(
        10_000, "Maximum number of consumers on one connection.", (1, 10_000_000, "consumers")
    )
    tails_max: int = _advanced(100, "Maximum number of tails.", (0, 10_000, "tails"))
    tails_per_connection_max: int = _advanced(
        10, "Maximum number of tails on one connection.", (1, 10_000, "tails")
    )
    tail_buffer_bytes_max: int = _advanced(
        256 * 1024,
        "Drop messages of the tails of a connection with more unsent replies than this.",
        (1, 16 * GIB, "bytes"),
    )
    delivery_pause_bytes: int = _advanced(
        MIB,
        "Pause deliveries on a connection with more unsent replies than this.",
        (1, 16 * GIB, "bytes"),
    )
    output_buffer_bytes_max: int = _advanced(
        16 * MIB,
        "Stop reading requests from a connection with more unsent replies than this.",
        (1, 16 * GIB, "bytes"),
    )
    batch_records_max: int = _advanced(
        16_384,
        "Pause publishers while this many records wait for the next commit.",
        (1, 10_000_000, "records"),
    )
    batch_bytes_max: int = _advanced(
        4 * MIB,
        "Pause publishers while this many bytes wait for the next commit.",
        (1, GIB, "bytes"),
    )
    loop_held_s: float = _advanced(
        0.1,
        "Log a warning when something blocks the event loop this long; 0 disables it.",
        (0, 60, "seconds"),
    )

    config: Path | None = field(default=None, compare=False)
    """The settings file that was read."""
    queue_tables: tuple[QueueTable, ...] = ()
    """Defaults for policies of queues; the first table that matches applies."""
    overridden: tuple[Overridden, ...] = field(default=(), compare=False)
    """Those that stand in several places, with different values."""
    changed: Callable[[], list[str]] | None = field(default=None, compare=False, repr=False)
    """Names of those that `load` would read otherwise now. Raises ConfigurationError."""

    @property
    def db_file(self) -> Path:
        """The database file. Raises ConfigurationError if there is none."""
        if isinstance(self.db, DatabaseUrl):
            raise ConfigurationError(
                f"db: {self.db} is a PostgreSQL database, and this command is for database files: "
                "use PostgreSQL's own tools, such as pg_basebackup and vacuum, or name a file "
                "with --db"
            )
        return self.db

    @property
    def has_http(self) -> bool:
        return self.http_port is not None or self.page != "off"

    @property
    def memory_bytes_sum(self) -> int:
        """What a server with these settings takes at most, but for what each connection takes: the
        sum of "Memory use" in docs/settings.md."""
        limits = (
            *(self.memory_bytes, self.metadata_bytes_max, self.unacked_bytes_max),
            *(self.unhandled_bytes_max, self.unsent_bytes_max, 2 * self.batch_bytes_max),
            *(self.trace_bytes_max, self.results_bytes_max, self.batches_bytes_max),
        )
        schedules, once = SCHEDULES_MAX * SCHEDULE_BYTES_MAX, self.once_ids_max * ONCE_ID_BYTES
        gateways = (self.api_port is not None) + (self.sqs_port is not None)
        ports = (self.has_http + gateways) * (HTTP_WAITING_BYTES_MAX + HTTP_UNREAD_BYTES_MAX)
        others = PROCESS_BYTES + READ_BYTES + gateways * GATEWAY_BYTES
        return sum(limits) + schedules + once + ports + others

    def needs_auth(self, *, local: bool) -> bool:
        """Whether a client must authenticate before anything else."""
        return self.auth == "always" or not (local or self.users is None)

    def public(self) -> dict[str, object]:
        """All settings as plain values."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {
            name: str(value) if isinstance(value, Path | DatabaseUrl) else value
            for name, value in values.items()
        }


def flag_of(name: str) -> str:
    """The flag of the setting with this name."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of the setting with this name."""
    return "MQKS_" + name.upper()


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `Settings`, for the command line, the variables and the documents."""

    name: str
    type: Any  # bool, int, float, str, Path, a Literal of words; int or Path | None
    default: Any
    about: About

    @property
    def kind(self) -> Any:
        """The type of a value that is not None; of a path or URL, the path."""
        return get_args(self.type)[0] if isinstance(self.type, UnionType) else self.type

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words; empty if the type alone decides."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def default_text(self) -> str:
        """The default as text."""
        return self.text_of(self.default)

    def text_of(self, value: Any) -> str:
        """A value as text: sizes in their largest unit, None as an empty string."""
        if self.about.unit == "bytes":
            for name, size in _SIZES.items():
                if value and value % size == 0:
                    return f"{value // size}{name}"
        if self.type is bool:
            return str(value).lower()
        return "" if value is None else str(value)

    def parse(self, value: object) -> object:
        """Convert text, or a TOML value, to the type of this setting.

        Raises ValueError with the reason; the caller adds the place.
        """
        if value == "" and self.default is None:
            return None
        if self.choices:
            return self._parse_choice(value)
        if self.kind is bool:
            return self._parse_bool(value)
        if self.kind in (int, float):
            return self._parse_number(value)
        return self._parse_text(value)

    def _parse_choice(self, value: object) -> object:
        if value not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}, not {value!r}")
        return value

    def _parse_bool(self, value: object) -> bool:
        word = str(value).lower() if isinstance(value, bool | str) else ""
        if word not in _TRUE + _FALSE:
            raise ValueError(f"must be true or false, not {value!r}")
        return word in _TRUE

    def _parse_number(self, value: Any) -> Any:
        number = self._read_number(value) if isinstance(value, str) else value
        # bool is an int in Python; a float is never truncated to an int.
        if type(number) not in (int, self.kind):
            kind = "a whole number" if self.kind is int else "a number"
            of_unit = f" of {self.about.unit}" if self.about.unit else ""
            example = _EXAMPLES.get(self.about.unit, "")
            raise ValueError(f"must be {kind}{of_unit}{example}, not {value!r}")
        low, high = self.about.bounds
        if not low <= number <= high:
            raise ValueError(f"must be from {low} to {high}, not {value!r}")
        return self.kind(number)

    def _read_number(self, text: str) -> Any:
        if self.about.unit == "seconds":
            text = in_seconds(text)
        suffix = next((name for name in _SIZES if text.endswith(name)), "")
        if suffix and self.about.unit != "bytes":
            return None
        try:
            return self.kind(text.removesuffix(suffix)) * _SIZES.get(suffix, 1)
        except ValueError:
            return None

    def _parse_text(self, value: object) -> str | Path | DatabaseUrl:
        text = str(value) if isinstance(value, str | Path) else "\0"
        if "\0" in text:
            raise ValueError(f"must be text, not {value!r}")
        if not text:
            raise ValueError("must not be empty")
        # As a path, a URL has one slash less.
        if self.name == "db" and text.startswith(("postgresql:/", "postgres:/")):
            return DatabaseUrl(text)
        return text if self.kind is str else Path(text)


SETTINGS = {
    each.name: Setting(each.name, each.type, each.default, each.metadata["about"])
    for each in fields(Settings)
    if "about" in each.metadata
}


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config: Path | None = None,
) -> Settings:
    """Return the settings. A flag takes precedence over a variable, a variable over mqks.toml.

    `flags` maps names of settings to values, None for a flag not given. `config` is the file;
    without it the variable MQKS_CONFIG names it, or ./mqks.toml is read if it exists.

    Raises ConfigurationError, with the place and the reason, also for a bad value that a
    stronger place would have hidden. It has all mistakes.
    """
    settings, _, mistakes = collect(flags, environ, config)
    if mistakes:
        raise ConfigurationError(*mistakes)
    return replace(settings, changed=partial(_changed, settings, flags, {**environ}, config))


def _changed(settings: Settings, *places: Any) -> list[str]:
    new = load(*places)
    return [name for name in SETTINGS if getattr(new, name) != getattr(settings, name)]


def collect(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config: Path | None = None,
) -> tuple[Settings, dict[str, str], list[str]]:
    """Load all settings, with the places of those that are not defaults, and with all mistakes:
    an invalid setting has its default."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    mistakes: list[str] = []
    overridden: list[Overridden] = []
    file, table = _config_file(environ, config), {}
    if file is not None:
        try:
            table = _read(file)
        except ConfigurationError as error:
            mistakes.append(str(error))
    tables, of_tables = _queue_tables(file, table.pop("queue", []))
    for place, setting, value in _given(file, table, environ, flags):
        if isinstance(setting, str):
            mistakes.append(f"{place}: {setting}")
            continue
        try:
            parsed = setting.parse(value)
        except ValueError as error:
            mistakes.append(f"{place}: {error}")
            continue
        if parsed != values.get(setting.name, parsed):
            overridden.append(Overridden(setting.name, place, places[setting.name]))
        values[setting.name], places[setting.name] = parsed, place
    _share_memory(values, places)
    settings = Settings(**values, config=file, queue_tables=tables, overridden=tuple(overridden))
    mistakes += [*of_tables, *_mistakes_together(settings, places)]
    return settings, places, [*_with_lines(file, mistakes)]


def _with_lines(path: Path | None, mistakes: Iterable[str]) -> Iterator[str]:
    """Add the line numbers to mistakes in the file."""
    for mistake in mistakes:
        file, _, told = mistake.partition(": ")
        if path is not None and file == str(path):
            lines = _lines(path)
            known = [place for place in lines if told.startswith(f"{place}: ")]
            if known:
                yield f"{path}:{lines[max(known, key=len)]}: {told}"
                continue
        yield mistake


def _lines(path: Path) -> dict[str, int]:
    """The line numbers of keys and tables of a file, by their place in an error."""
    lines: dict[str, int] = {}
    table, tables = "", 0
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return lines
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, _ = line.partition("=")
        if line.lstrip().startswith("["):
            table = line.partition("#")[0].strip(" \t[]")
            if table == "queue":
                tables += 1
                table = f"queue {tables}"
            lines.setdefault(table, number)
        elif equals:
            key = key.strip(" \t\"'")
            lines.setdefault(f"{table}: {key}" if table else key, number)
    return lines


def _config_file(environ: Mapping[str, str], config: Path | None) -> Path | None:
    if config is not None:
        return config
    if named := environ.get("MQKS_CONFIG"):
        return Path(named)
    usual = Path("mqks.toml")
    try:
        usual.stat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # Reading it says why.
    return usual


def _share_memory(values: dict[str, Any], places: dict[str, str]) -> None:
    """With a smaller `memory_bytes` the other memory limits shrink too, unless they are set. With a
    larger one they do not grow: a commit limits the unacked bytes, and the others do not depend on
    the messages."""
    for name, setting in SETTINGS.items() if "memory_bytes" in values else ():
        if setting.about.share and name not in values:
            part = max(SHARE_BYTES_MIN, values["memory_bytes"] // setting.about.share)
            if part < setting.default:
                values[name], places[name] = part, "memory_bytes"


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def read_queue_tables(settings: Settings) -> tuple[QueueTable, ...]:
    """Read the tables of the same mqks.toml again. Raises ConfigurationError."""
    path = settings.config
    if path is None:
        return settings.queue_tables
    tables, mistakes = _queue_tables(path, _read(path).get("queue", []))
    mistakes += _bad_queue_names(settings, tables)
    if mistakes:
        raise ConfigurationError(*_with_lines(path, mistakes))
    return tables


def _queue_tables(path: Path | None, tables: object) -> tuple[tuple[QueueTable, ...], list[str]]:
    """The tables, and the mistakes in them."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        return (), [f"{path}: queue: write queue defaults as tables, [[queue]]"]
    if len(tables) > QUEUE_TABLES_MAX:
        return (), [f"{path}: queue: more than {QUEUE_TABLES_MAX} tables"]
    mistakes: list[str] = []
    read = [
        _queue_table(f"{path}: queue {number}", table, mistakes)
        for number, table in enumerate(tables, 1)
    ]
    return tuple(read), mistakes


def _queue_table(place: str, table: Mapping[str, Any], mistakes: list[str]) -> QueueTable:
    name = table.get("name", "")
    if not isinstance(name, str) or not name:
        mistakes.append(f"{place}: name: must be a mask of queues, not {name!r}")
        name = ""
    policy: dict[str, Any] = {}
    try:
        name_masks([name.encode()])
    except BadRequest as error:
        mistakes.append(f"{place}: name: {error}")
    for key, value in table.items():
        if key == "name":
            continue
        flag = _known(_POLICY_KEYS, key)
        if flag not in POLICY_FIELDS:
            mistakes.append(f"{place}: {key}: {flag!s}")
            continue
        try:
            policy[POLICY_FIELDS[flag]] = policy_value(flag, _in_bytes(key, value))
        except (BadRequest, ValueError) as error:
            mistakes.append(f"{place}: {key}: {error}")
    return QueueTable(name, policy)


_POLICY_KEYS = {flag[2:].decode().replace("-", "_"): flag for flag in POLICY_FIELDS}


def _in_bytes(key: str, value: Any) -> Any:
    """Convert a size like 64MiB to a number; return other values unchanged."""
    if key == "bytes_max" and isinstance(value, str):
        for suffix, size in _SIZES.items():
            number = value.removesuffix(suffix)
            if number != value and number.isdecimal():
                return int(number) * size
        if not value.isdecimal():
            raise ValueError(f"must be a whole number of bytes{_EXAMPLES['bytes']}, not {value!r}")
    return value


def _bad_queue_names(settings: Settings, tables: Iterable[QueueTable]) -> Iterator[str]:
    """Names that would be refused in `set_queue`."""
    for number, table in enumerate(tables, 1):
        name = table.fields.get("dead_letters", b"")
        if len(name) > settings.name_bytes_max:
            yield (
                f"{settings.config}: queue {number}: dead_letters: the name has {len(name)} "
                f"bytes; name_bytes_max is {settings.name_bytes_max}"
            )


def _given(
    path: Path | None,
    table: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
) -> Iterator[tuple[str, Setting | str, object]]:
    """The place, the setting or what is wrong with its name, the value; the strongest last."""
    for key, value in table.items():
        yield f"{path}: {key}", _known(SETTINGS, key), value
    known = {variable_of(name): setting for name, setting in SETTINGS.items()}
    for variable, text in environ.items():
        if variable.startswith("MQKS_") and variable not in _OTHER_VARIABLES:
            yield variable, _known(known, variable), text
    known = {flag_of(name): setting for name, setting in SETTINGS.items()}
    for name, value in flags.items():
        if value is not None:
            yield flag_of(name), _known(known, flag_of(name)), value


def _known(settings: Mapping[str, T], key: str) -> T | str:
    """The setting with this name, or what is wrong with the name."""
    if key in settings:
        return settings[key]
    for form in (str, variable_of, flag_of):
        if new := {form(old): form(new) for old, new in RENAMED.items()}.get(key):
            return f"this setting was renamed. Write {new}"
    return "unknown setting" + did_you_mean(key, settings)


def _mistakes_together(settings: Settings, places: Mapping[str, str]) -> Iterator[str]:
    """Values that are valid alone but not together."""
    yield from _bad_queue_names(settings, settings.queue_tables)
    checks = [partial(check_reach, settings, settings.host, places.get("host", "host"))]
    for name in ("api", "sqs"):
        if getattr(settings, f"{name}_port") is not None:
            place = places.get(f"{name}_host", f"{name}_host")
            host = getattr(settings, f"{name}_host")
            checks.append(partial(check_reach, settings, host, place))
    if settings.tls_port:
        place = places.get("tls_host", "tls_host")
        checks.append(partial(check_reach, settings, settings.tls_host, place))
        checks.append(partial(check_certificate, settings, places["tls_port"]))
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            yield str(error)
    if settings.auth == "always" and settings.users is None:
        yield f"{places['auth']}: nobody can authenticate. Set users to a users file, too"
    if settings.has_http and not settings.insecure and not is_loopback(settings.http_host):
        yield (
            f"{places['http_host']}: {settings.http_host!r} is not loopback, and HTTP has no "
            "authentication. Set insecure to let everyone who can connect read the metrics"
        )
    if settings.delivery_pause_bytes > settings.output_buffer_bytes_max:
        place = places.get("delivery_pause_bytes") or places["output_buffer_bytes_max"]
        yield f"{place}: delivery_pause_bytes must not be above output_buffer_bytes_max"


def check_reach(settings: Settings, host: str, place: str) -> None:
    """Raises ConfigurationError if listening on `host` would allow everything to other machines."""
    if settings.users is None and not settings.insecure and not is_loopback(host):
        raise ConfigurationError(
            f"{place}: {host!r} is not loopback. Set users, so that clients must authenticate, "
            "or insecure, so that everyone who can connect may do everything"
        )


def check_certificate(settings: Settings, place: str) -> None:
    """Raises ConfigurationError if TLS has no certificate."""
    if not (settings.tls_cert and settings.tls_key):
        raise ConfigurationError(f"{place}: TLS needs the settings tls_cert and tls_key")


def shown(host: str, port: int) -> str:
    """An address as in URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
