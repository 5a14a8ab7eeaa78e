"""Every setting, once: its default, its bounds and one line of why.

The one rule: a setting is one field of `Settings`. Flags, variables, the keys of mqks.toml and
their checks all follow from that field; a test holds mqks.toml.example and docs/operations.md
against it.
"""

# ruff: noqa: RUF009  A default that is a call to a `_Group` makes a field.

import ipaddress
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

from mqks.errors import BadRequest, ConfigurationError
from mqks.limits import QUEUE_TABLES_MAX
from mqks.protocol.masks import name_masks
from mqks.protocol.requests import POLICY_FIELDS, policy_value

MIB, GIB, TIB = 1024**2, 1024**3, 1024**4
SHARE_BYTES_MIN = 64 * MIB
"""The least that a budget shrinks to with `memory_bytes`."""
_SIZES = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": 1024}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
# These start like settings and are none: the place of mqks.toml, and what clients connect to.
_OTHER_VARIABLES = ("MQKS_CONFIG", "MQKS_URL")

T = TypeVar("T")


class QueueTable(NamedTuple):
    """One `[[queue]]` of mqks.toml: fields of the policies of the queues that `name` matches."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class About:
    """What a field of `Settings` says of itself beyond its type and default."""

    group: str
    why: str
    unit: str
    bounds: tuple[float, float]  # of numbers, both included
    share: int
    """What part of a smaller `memory_bytes` it is unless it is set: 2 for a half, 0 for none."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Settings that are shown together; calling it makes a field."""

    name: str

    def __call__(
        self,
        default: T,
        why: str,
        bounds: tuple[float, float, str] = (0, 0, ""),
        *,
        share: int = 0,
    ) -> T:
        """`bounds` are the least and the greatest number, and the unit."""
        low, high, unit = bounds
        about = About(self.name, why, unit, (low, high), share)
        return field(default=default, metadata={"about": about})


_storage, _listening, _security = _Group("Storage"), _Group("Listening"), _Group("Security")
_limits, _memory = _Group("Limits"), _Group("Memory and pace")
_watching, _running = _Group("Watching"), _Group("Running")


PAGE_PORT: Final = 25080
"""Where the page is when nobody has asked for a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server is told from outside; made by `load`, which checks every value."""

    db: Path = _storage(Path("mqks.db"), "The SQLite file that keeps everything that must last.")
    synchronous: Literal["full", "normal", "off"] = _storage(
        "full", "How far a commit waits for the disk; only full outlives a power cut."
    )
    db_bytes_max: int = _storage(
        0, "Where the database stops growing; 0 lets it fill the disk.", (0, 128 * TIB, "bytes")
    )
    disk_free_bytes_min: int = _storage(
        50 * MIB,
        "Free space on its disk below which publishes are refused, as on a full disk.",
        (0, 128 * TIB, "bytes"),
    )
    ballast_bytes: int = _storage(
        16 * MIB,
        "A file given back when the disk is full, so that acks can still be written.",
        (0, 16 * GIB, "bytes"),
    )
    wal_checkpoint_pages: int = _storage(
        250,
        "How far the WAL grows before it is folded back; more slows the slowest confirms.",
        (1, 1_000_000, "pages"),
    )
    wal_bytes_max: int = _storage(
        GIB,
        "How far the WAL may grow while another process reads; then publishes are refused.",
        (16 * MIB, 128 * TIB, "bytes"),
    )
    once_ids_max: int = _storage(
        1_000_000,
        "Ids of publish --once that are remembered; an older one may be published again.",
        (0, 100_000_000, "ids"),
    )
    errors_kept_max: int = _storage(
        1000,
        "Errors that mqks inspect can look up; older ones are forgotten.",
        (0, 10_000_000, "errors"),
    )

    host: str = _listening("127.0.0.1", "The address to listen on.")
    port: int = _listening(25000, "The TCP port; 0 takes any free one and logs it.", (0, 65535, ""))
    unix: Path | None = _listening(None, "A Unix socket to listen on as well.")
    insecure: bool = _listening(
        False, "Listen beyond loopback, where whoever can connect may do anything."
    )
    eval: Literal["off", "loopback", "on"] = _listening(
        "loopback", "Who may send _eval, which looks into the running server."
    )

    users: Path | None = _security(None, "The file of users that mqks user writes.")
    auth: Literal["remote", "always"] = _security(
        "remote", "Who must authenticate: peers beyond loopback, or everybody."
    )
    auth_timeout_s: float = _security(
        10.0, "How long a peer that must authenticate may take for it.", (0.1, 3600, "seconds")
    )
    unauthenticated_max: int = _security(
        1000,
        "Connections that have yet to authenticate; beyond it the oldest of them is closed.",
        (1, 1_000_000, "connections"),
    )
    tls_host: str = _security("0.0.0.0", "The address to listen on with TLS as well.")
    tls_port: int = _security(0, "The TCP port for TLS, mostly 25001; 0 for none.", (0, 65535, ""))
    tls_cert: Path | None = _security(None, "The server's certificate and those above it, as PEM.")
    tls_key: Path | None = _security(None, "The certificate's private key, as PEM.")
    tls_client_ca: Path | None = _security(
        None, "Whose certificates clients must show over TLS, as PEM; none for all."
    )

    connections_max: int = _limits(
        20_000, "Connections at once; each costs a file descriptor.", (1, 1_000_000, "connections")
    )
    connections_per_address_max: int = _limits(
        5000,
        "Connections at once from one IPv4 address, or from one IPv6 network of 64 bits.",
        (1, 1_000_000, "connections"),
    )
    line_bytes_max: int = _limits(
        MIB,
        "The longest request, without its line end; a longer one closes its connection.",
        (64, GIB, "bytes"),
    )
    name_bytes_max: int = _limits(
        255,
        "The longest new name: a queue, an event, or the id of a request.",
        (64, 64 * 1024, "bytes"),
    )
    queues_max: int = _limits(
        100_000,
        "Queues at once, so that a client inventing names is stopped.",
        (1, 100_000_000, "queues"),
    )
    queue_messages_max: int = _limits(
        100_000_000,
        "Waiting messages of one queue at which publishes to it are refused; 0 for no limit.",
        (0, 10**15, "messages"),
    )
    bindings_per_queue_max: int = _limits(
        100_000, "Events and masks bound to one queue.", (1, 100_000_000, "bindings")
    )
    consumers_per_connection_max: int = _limits(
        10_000, "Consumers on one connection.", (1, 10_000_000, "consumers")
    )
    consumer_unacked_max: int = _limits(
        100_000,
        "Deliveries one consumer may leave unacked before it gets no more.",
        (1, 100_000_000, "deliveries"),
    )

    memory_bytes: int = _memory(
        512 * MIB,
        "Bodies of waiting messages kept in memory; beyond it they live on disk only.",
        (0, 128 * TIB, "bytes"),
    )
    metadata_bytes_max: int = _memory(
        512 * MIB,
        "Queues, bindings and consumers, messages aside, above which new ones are refused.",
        (MIB, 128 * TIB, "bytes"),
        share=1,
    )
    unacked_bytes_max: int = _memory(
        256 * MIB,
        "Messages that consumers hold unacked, above which each gets one at a time.",
        (MIB, 128 * TIB, "bytes"),
        share=2,
    )
    outbox_high_water_bytes: int = _memory(
        MIB,
        "Unsent replies above which a connection's consumers get nothing more.",
        (1, 16 * GIB, "bytes"),
    )
    outbox_bytes_max: int = _memory(
        16 * MIB,
        "Unsent replies above which a slow connection is no longer read.",
        (1, 16 * GIB, "bytes"),
    )
    outboxes_bytes_max: int = _memory(
        256 * MIB,
        "Unsent replies of all connections, above which all wait and who takes none is closed.",
        (MIB, 128 * TIB, "bytes"),
        share=2,
    )
    batch_records_max: int = _memory(
        16_384,
        "Records waiting for the journal before publishers are paused.",
        (1, 10_000_000, "records"),
    )
    batch_bytes_max: int = _memory(
        4 * MIB, "Bytes waiting for the journal before publishers are paused.", (1, GIB, "bytes")
    )

    http_host: str = _watching(
        "127.0.0.1", "The address on which metrics and health are told over HTTP."
    )
    http_port: int | None = _watching(
        None,
        "Port of metrics, health and the page; 0 takes any free one and logs it. Without it, the "
        "page is on port 25080 if that is free.",
        (0, 65535, ""),
    )
    page: Literal["off", "read", "full"] = _watching(
        "read",
        "The web page on the port of metrics: off, read to look, or full to act, too, as far as "
        "the user may.",
    )
    queue_age_warning_s: float = _watching(
        0.0,
        "How long messages may wait in a queue before the log warns of it; 0 for ever.",
        (0, 1e9, "seconds"),
    )
    loop_held_s: float = _watching(
        0.1,
        "How long one thing may hold the event loop before it is counted and logged; 0: never.",
        (0, 60, "seconds"),
    )

    salvage: bool = _running(False, "Start on a damaged journal with what can still be read.")
    drain_timeout_s: float = _running(
        10.0, "How long a stopping server waits for its replies to be taken.", (0, 3600, "seconds")
    )
    uvloop: bool = _running(True, "Run on uvloop where it is installed, faster than plain asyncio.")
    log_level: Literal["debug", "info", "warning", "error"] = _running(
        "info", "The least grave lines that are still logged."
    )
    log_format: Literal["text", "json"] = _running(
        "text", "Log lines as key=value text for people, or as JSON for collectors."
    )

    config: Path | None = field(default=None, compare=False)
    """The mqks.toml that was read."""
    queue_tables: tuple[QueueTable, ...] = ()
    """What holds for queues unless `set_queue` says otherwise: the first that matches counts."""

    @property
    def has_http(self) -> bool:
        return self.http_port is not None or self.page != "off"

    def needs_auth(self, *, local: bool) -> bool:
        """Whether a peer must say who it is before anything else."""
        return self.auth == "always" or not (local or self.users is None)

    def public(self) -> dict[str, object]:
        """Every setting that a client may see, in plain values."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `Settings` as the command line, the variables and the documents see it."""

    name: str
    type: Any  # bool, int, float, str, Path, a Literal of words; int or Path | None
    default: Any
    about: About

    @property
    def kind(self) -> Any:
        """The type of a value that is not None."""
        return get_args(self.type)[0] if self.default is None else self.type

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MQKS_" + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words; empty where the type alone decides."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def default_text(self) -> str:
        """The default as one writes it."""
        return self.text_of(self.default)

    def text_of(self, value: Any) -> str:
        """A value as one writes it: sizes in their largest unit, nothing for none."""
        if self.about.unit == "bytes":
            for name, size in _SIZES.items():
                if value and value % size == 0:
                    return f"{value // size}{name}"
        if self.type is bool:
            return str(value).lower()
        return "" if value is None else str(value)

    def parse(self, value: object) -> object:
        """Turn text, or a native TOML value, into this setting's type.

        Raises ValueError with the reason alone; the caller knows the place.
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
        # bool is an int to Python; a float is never cut down to an int unasked.
        if type(number) not in (int, self.kind):
            kind = "a whole number" if self.kind is int else "a number"
            of_unit = f" of {self.about.unit}" if self.about.unit else ""
            raise ValueError(f"must be {kind}{of_unit}, not {value!r}")
        low, high = self.about.bounds
        if not low <= number <= high:
            raise ValueError(f"must be from {low} to {high}, not {value!r}")
        return self.kind(number)

    def _read_number(self, text: str) -> Any:
        suffix = next((name for name in _SIZES if text.endswith(name)), "")
        if suffix and self.about.unit != "bytes":
            return None
        try:
            return self.kind(text.removesuffix(suffix)) * _SIZES.get(suffix, 1)
        except ValueError:
            return None

    def _parse_text(self, value: object) -> str | Path:
        text = str(value) if isinstance(value, str | Path) else "\0"
        if "\0" in text:
            raise ValueError(f"must be text, not {value!r}")
        if not text:
            raise ValueError("must not be empty")
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
    """The settings alone; otherwise as `gather`."""
    return gather(flags, environ, config)[0]


def gather(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config: Path | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Gather the settings: a flag beats a variable, that beats mqks.toml, that the default. Tell
    the places, too, of those that are no defaults.

    `flags` maps names of settings to values, None for a flag not given. `config` is the file;
    without it the variable MQKS_CONFIG names it, or ./mqks.toml is read if it exists.

    Raises ConfigurationError, with the place and the reason, also for a bad value that a
    stronger place would have hidden.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    file = _config_file(environ, config)
    table = {} if file is None else _read(file)
    tables = _queue_tables(file, table.pop("queue", []))
    for place, setting, value in (
        *_from_file(file, table),
        *_from_environ(environ),
        *_from_flags(flags),
    ):
        try:
            values[setting.name] = setting.parse(value)
        except ValueError as error:
            raise ConfigurationError(f"{place}: {error}") from None
        places[setting.name] = place
    _share_memory(values, places)
    settings = Settings(**values, config=file, queue_tables=tables)
    _check_together(settings, places)
    return settings, places


def _config_file(environ: Mapping[str, str], config: Path | None) -> Path | None:
    if config is not None:
        return config
    if named := environ.get("MQKS_CONFIG"):
        return Path(named)
    usual = Path("mqks.toml")
    return usual if usual.exists() else None


def _share_memory(values: dict[str, Any], places: dict[str, str]) -> None:
    """With less `memory_bytes` than by default the budgets beside it shrink, too, unless they are
    set themselves. With more they stay: how much may be unacked is bounded by what a commit can
    hold, and the others do not grow with the messages."""
    for name, setting in SETTINGS.items() if "memory_bytes" in values else ():
        if setting.about.share and name not in values:
            part = max(SHARE_BYTES_MIN, values["memory_bytes"] // setting.about.share)
            if part < setting.default:
                values[name], places[name] = part, "memory_bytes"


_Given = tuple[str, Setting, object]  # the place, the setting, the value


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def read_queue_tables(settings: Settings) -> tuple[QueueTable, ...]:
    """Those of the same mqks.toml as it is now. Raises ConfigurationError."""
    path = settings.config
    if path is None:
        return settings.queue_tables
    tables = _queue_tables(path, _read(path).get("queue", []))
    _check_queue_names(settings, tables)
    return tables


def _queue_tables(path: Path | None, tables: object) -> tuple[QueueTable, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{path}: queue: write [[queue]] for a table")
    if len(tables) > QUEUE_TABLES_MAX:
        raise ConfigurationError(f"{path}: queue: there may be {QUEUE_TABLES_MAX} tables at most")
    return tuple(
        _queue_table(f"{path}: queue {number}", table) for number, table in enumerate(tables, 1)
    )


def _queue_table(place: str, table: Mapping[str, Any]) -> QueueTable:
    name = table.get("name", "")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{place}: name: must be a mask of queues, not {name!r}")
    policy: dict[str, Any] = {}
    try:
        name_masks([name.encode()])
    except BadRequest as error:
        raise ConfigurationError(f"{place}: name: {error}") from None
    for key, value in table.items():
        if key == "name":
            continue
        flag = _known(_POLICY_KEYS, key, f"{place}: {key}")
        try:
            policy[POLICY_FIELDS[flag]] = policy_value(flag, _in_bytes(key, value))
        except BadRequest as error:
            raise ConfigurationError(f"{place}: {key}: {error}") from None
    return QueueTable(name, policy)


_POLICY_KEYS = {flag[2:].decode().replace("-", "_"): flag for flag in POLICY_FIELDS}


def _in_bytes(key: str, value: Any) -> Any:
    """A size like 64MiB as a number; all else as it is."""
    if key == "bytes_max" and isinstance(value, str):
        for suffix, size in _SIZES.items():
            number = value.removesuffix(suffix)
            if number != value and number.isdecimal():
                return int(number) * size
    return value


def _check_queue_names(settings: Settings, tables: Iterable[QueueTable]) -> None:
    """Names that would be refused if a client had set them."""
    for number, table in enumerate(tables, 1):
        name = table.fields.get("dead_letters", b"")
        if len(name) > settings.name_bytes_max:
            raise ConfigurationError(
                f"{settings.config}: queue {number}: dead_letters: has {len(name)} bytes, a name "
                f"may have {settings.name_bytes_max} at most"
            )


def _from_file(path: Path | None, table: Mapping[str, Any]) -> Iterator[_Given]:
    for key, value in table.items():
        place = f"{path}: {key}"
        yield place, _known(SETTINGS, key, place), value


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Given]:
    known = {setting.variable: setting for setting in SETTINGS.values()}
    for variable, value in environ.items():
        if variable.startswith("MQKS_") and variable not in _OTHER_VARIABLES:
            yield variable, _known(known, variable, variable), value


def _from_flags(flags: Mapping[str, object]) -> Iterator[_Given]:
    for name, value in flags.items():
        if value is not None:
            setting = _known(SETTINGS, name, name)
            yield setting.flag, setting, value


def _known(settings: Mapping[str, T], key: str, place: str) -> T:
    if key in settings:
        return settings[key]
    near = get_close_matches(key, settings, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigurationError(f"{place}: unknown setting{hint}")


def _check_together(settings: Settings, places: Mapping[str, str]) -> None:
    _check_queue_names(settings, settings.queue_tables)
    check_reach(settings, settings.host, places.get("host", "host"))
    if settings.tls_port:
        check_reach(settings, settings.tls_host, places.get("tls_host", "tls_host"))
        check_certificate(settings, places["tls_port"])
    if settings.auth == "always" and settings.users is None:
        raise ConfigurationError(f"{places['auth']}: nobody can authenticate without users")
    if (
        settings.http_port is not None
        and not settings.insecure
        and not is_loopback(settings.http_host)
    ):
        raise ConfigurationError(
            f"{places['http_host']}: {settings.http_host!r} is not loopback, and HTTP asks nobody "
            "who they are: set insecure to let everyone who can connect see queues and numbers"
        )
    if settings.outbox_high_water_bytes > settings.outbox_bytes_max:
        place = places.get("outbox_high_water_bytes") or places["outbox_bytes_max"]
        raise ConfigurationError(f"{place}: outbox_high_water_bytes is above outbox_bytes_max")


def check_reach(settings: Settings, host: str, place: str) -> None:
    """Raises ConfigurationError when listening on `host` would let in whom it should not."""
    if settings.users is None and not settings.insecure and not is_loopback(host):
        raise ConfigurationError(
            f"{place}: {host!r} is not loopback: set users, so that clients must authenticate, or "
            "insecure to let everyone who can connect do anything"
        )


def check_certificate(settings: Settings, place: str) -> None:
    """Raises ConfigurationError when there is none for TLS."""
    if not (settings.tls_cert and settings.tls_key):
        raise ConfigurationError(f"{place}: tls_cert and tls_key are needed")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
