"""Where settings come from, which place wins, and what is refused with which words."""

from pathlib import Path

import pytest

from mqks.errors import ConfigurationError
from mqks.settings import RENAMED, SETTINGS, Settings, collect, load

DURATIONS = " or a duration such as 1h30m (ms, s, m, h, d)"
SIZES = " or a size such as 512MiB (KiB, MiB, GiB, TiB)"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, so that no mqks.toml is found by accident."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(
    flags: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    config: Path | None = None,
) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(flags or {}, environ or {}, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_gives_the_defaults() -> None:
    assert load({}, {}) == Settings()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_default_passes_its_own_check(setting: object) -> None:
    assert isinstance(setting, type(SETTINGS["db"]))
    assert setting.parse(setting.default_text) == setting.default


def test_a_flag_beats_a_variable_that_beats_the_file(directory: Path) -> None:
    config = directory / "mqks.toml"
    config.write_text("port = 1\nqueues_max = 1\nconnections_max = 1\n")
    environ = {"MQKS_PORT": "2", "MQKS_QUEUES_MAX": "2"}
    settings = load({"port": "3", "queues_max": None}, environ, config)
    assert (settings.port, settings.queues_max, settings.connections_max) == (3, 2, 1)


def test_of_several_places_those_without_effect_are_told(directory: Path) -> None:
    config = directory / "mqks.toml"
    config.write_text("port = 1\nhost = '127.0.0.2'\n")
    settings = load({"port": "3"}, {"MQKS_PORT": "2", "MQKS_HOST": "127.0.0.2"}, config)
    assert [tuple(each) for each in settings.overridden] == [
        ("port", "MQKS_PORT", f"{config}: port"),
        ("port", "--port", "MQKS_PORT"),
    ]


def test_the_file_is_the_named_one_or_the_variables_or_the_one_here(directory: Path) -> None:
    for port, name in enumerate(("mqks.toml", "variable.toml", "flag.toml"), start=1):
        (directory / name).write_text(f"port = {port}\n")
    environ = {"MQKS_CONFIG": "variable.toml"}
    assert load({}, {}).port == 1
    assert load({}, environ).port == 2
    assert load({}, environ, Path("flag.toml")).port == 3


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("port", "0", 0), ("port", "65535", 65535)),
        *(("memory_bytes", "1000", 1000), ("memory_bytes", "3KiB", 3 * 1024)),
        *(("memory_bytes", "512MiB", 512 * 1024**2), ("memory_bytes", "2 GiB", 2 * 1024**3)),
        ("db_bytes_max", "1TiB", 1024**4),
        *(("drain_timeout_s", "2", 2.0), ("drain_timeout_s", "0.25", 0.25)),
        *(("drain_timeout_s", "1m30s", 90.0), ("drain_timeout_s", "250ms", 0.25)),
        *(("insecure", "true", True), ("insecure", "Yes", True)),
        *(("uvloop", "off", False), ("uvloop", "0", False)),
        ("synchronous", "normal", "normal"),
        *(("unix", "run/mqks.sock", Path("run/mqks.sock")), ("unix", "", None)),
        ("db", "/var/lib/mqks.db", Path("/var/lib/mqks.db")),
    ],
)
def test_text_becomes_a_value(name: str, text: str, value: object) -> None:
    found = getattr(load({}, {f"MQKS_{name.upper()}": text}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("memory", "metadata", "unacked", "outboxes"),
    [
        ("512MiB", 512, 256, 256),
        ("8GiB", 512, 256, 256),
        ("300MiB", 300, 150, 150),
        ("100MiB", 100, 64, 64),
        ("0", 64, 64, 64),
    ],
)
def test_less_memory_means_less_of_what_stands_beside_it(
    memory: str, metadata: int, unacked: int, outboxes: int
) -> None:
    given = {"memory_bytes": memory}
    names = ("metadata_bytes_max", "unacked_bytes_max", "unsent_bytes_max", "unhandled_bytes_max")
    settings, places, _ = collect(given, {})
    sizes = [getattr(settings, name) // 1024**2 for name in names]
    assert sizes == [metadata, unacked, outboxes, outboxes]
    shrunk = {name for name in names if getattr(settings, name) != SETTINGS[name].default}
    assert {name for name, place in places.items() if place == "memory_bytes"} == shrunk
    told = load(given, {"MQKS_UNACKED_BYTES_MAX": "200MiB"})
    assert told.unacked_bytes_max == 200 * 1024**2, "what is set itself stays"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_refused_with_the_new_one(old: str, new: str, directory: Path) -> None:
    config = directory / "old.toml"
    config.write_text(f"{old} = 1\n")
    flag, new_flag = "--" + old.replace("_", "-"), "--" + new.replace("_", "-")
    variable, new_variable = f"MQKS_{old.upper()}", f"MQKS_{new.upper()}"
    assert new in SETTINGS
    assert refusal(config=config) == f"{config}:1: {old}: this setting was renamed. Write {new}"
    assert refusal(environ={variable: "1"}) == (
        f"{variable}: this setting was renamed. Write {new_variable}"
    )
    assert refusal({old: "1"}) == f"{flag}: this setting was renamed. Write {new_flag}"


def test_toml_values_keep_their_types(directory: Path) -> None:
    config = directory / "mqks.toml"
    config.write_text(
        'memory_bytes = "1MiB"\nbatch_bytes_max = 4096\ndrain_timeout_s = 3\nuvloop = false\n'
    )
    settings = load({}, {}, config)
    assert (settings.memory_bytes, settings.batch_bytes_max) == (1024**2, 4096)
    assert type(settings.drain_timeout_s) is float
    assert settings.uvloop is False


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("port", "-1", "must be from 0 to 65535, not '-1'"),
        ("port", "65536", "must be from 0 to 65535, not '65536'"),
        ("port", "", "must be a whole number, not ''"),
        ("port", "1.5", "must be a whole number, not '1.5'"),
        ("port", "1KiB", "must be a whole number, not '1KiB'"),
        ("memory_bytes", "1MB", f"must be a whole number of bytes{SIZES}, not '1MB'"),
        ("memory_bytes", "MiB", f"must be a whole number of bytes{SIZES}, not 'MiB'"),
        ("queues_max", "0", "must be from 1 to 100000000, not '0'"),
        ("drain_timeout_s", "soon", f"must be a number of seconds{DURATIONS}, not 'soon'"),
        ("drain_timeout_s", "nan", "must be from 0 to 3600, not 'nan'"),
        ("drain_timeout_s", "inf", "must be from 0 to 3600, not 'inf'"),
        ("insecure", "maybe", "must be true or false, not 'maybe'"),
        ("synchronous", "FULL", "must be one of full, normal, off, not 'FULL'"),
        ("db", "", "must not be empty"),
        ("host", "", "must not be empty"),
    ],
)
def test_bad_text_is_refused_with_place_and_reason(name: str, text: str, reason: str) -> None:
    variable, flag = f"MQKS_{name.upper()}", "--" + name.replace("_", "-")
    assert refusal(environ={variable: text}) == f"{variable}: {reason}"
    assert refusal(flags={name: text}) == f"{flag}: {reason}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("port = true", "port: must be a whole number, not True"),
        ("port = 1.0", "port: must be a whole number, not 1.0"),
        ("port = [1]", "port: must be a whole number, not [1]"),
        ("insecure = 1", "insecure: must be true or false, not 1"),
        ("host = 127", "host: must be text, not 127"),
        ('db = "a\\u0000b"', "db: must be text, not 'a\\x00b'"),
        ("synchronous = {}", "synchronous: must be one of full, normal, off, not {}"),
        ("prot = 1", "prot: unknown setting; did you mean port?"),
        ("[server]\nport = 1", "server: unknown setting"),
        ("port = \n", "Invalid value (at line 1, column 8)"),
    ],
)
def test_a_bad_file_is_refused_with_place_and_reason(
    directory: Path, line: str, reason: str
) -> None:
    config = directory / "mqks.toml"
    config.write_text(line)
    place = f"{config}: " if "at line" in reason else f"{config}:1: "
    assert refusal(config=config).startswith(place + reason)


def test_all_mistakes_are_reported_at_once(directory: Path) -> None:
    config = directory / "mqks.toml"
    config.write_text(
        """# a comment
port = "many"

"prot" = 1
tls_port = 25001
tls_host = "::1"
memory_bytes = "512 megabytes" # of memory
[[queue]]
name = "orders"
retries = "many"
[[queue]]  # of all
bytes_max = "1 GB"
[other]
port = 1
"""
    )
    with pytest.raises(ConfigurationError) as caught:
        load({"batch_bytes_max": "x"}, {"MQKS_QUEUES_MAX": "0", "MQKS_HOST": "0.0.0.0"}, config)
    found = [str(caught.value), *caught.value.others]
    assert [each.partition(": ")[0] for each in found] == [
        f"{config}:2",
        f"{config}:4",
        f"{config}:7",
        f"{config}:13",
        "MQKS_QUEUES_MAX",
        "--batch-bytes-max",
        f"{config}:10",
        f"{config}:11",
        f"{config}:12",
        "MQKS_HOST",
        f"{config}:5",
    ]
    size = f"must be a whole number of bytes{SIZES}"
    assert found[2] == f"{config}:7: memory_bytes: {size}, not '512 megabytes'"
    assert found[8] == f"{config}:12: queue 2: bytes_max: {size}, not '1 GB'"
    assert found[9].startswith("MQKS_HOST: '0.0.0.0' is not loopback")
    assert found[10] == f"{config}:5: tls_port: TLS needs the settings tls_cert and tls_key"


def test_a_file_that_cannot_be_read_is_refused(directory: Path) -> None:
    (directory / "latin1.toml").write_bytes(b'host = "\xe9"\n')
    assert refusal(config=Path("nowhere.toml")) == "nowhere.toml: No such file or directory"
    assert refusal(environ={"MQKS_CONFIG": "gone.toml"}).startswith("gone.toml: ")
    assert refusal(config=directory).startswith(f"{directory}: ")
    assert refusal(config=Path("latin1.toml")).startswith("latin1.toml: ")


def test_a_bad_value_is_refused_even_where_a_flag_would_hide_it() -> None:
    assert refusal({"port": "1"}, {"MQKS_PORT": "x"}).startswith("MQKS_PORT: ")


def test_unknown_names_are_refused_except_what_clients_read() -> None:
    assert refusal(environ={"MQKS_PROT": "1"}) == (
        "MQKS_PROT: unknown setting; did you mean MQKS_PORT?"
    )
    assert refusal(environ={"MQKS_port": "1"}).startswith("MQKS_port: unknown setting")
    assert refusal(flags={"prot": "1"}) == "--prot: unknown setting; did you mean --port?"
    assert load({}, {"MQKS_URL": "mqks://localhost", "PORT": "x"}) == Settings()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_may_be_listened_on(host: str) -> None:
    assert load({"host": host}, {}).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "example.org"])
def test_anything_else_needs_insecure(host: str) -> None:
    assert refusal(environ={"MQKS_HOST": host}).startswith(f"MQKS_HOST: '{host}' is not loopback")
    assert load({"host": host, "insecure": True}, {}).host == host


def test_the_high_water_mark_is_not_above_the_limit() -> None:
    assert refusal({"output_buffer_bytes_max": "1KiB"}) == (
        "--output-buffer-bytes-max: delivery_pause_bytes must not be above output_buffer_bytes_max"
    )
    both = {"output_buffer_bytes_max": "1KiB", "delivery_pause_bytes": "1KiB"}
    assert load(both, {}).delivery_pause_bytes == 1024
