"""The arrows between the rooms, read from the imports, names, and the documents that keep step."""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mqks
from mqks.protocol.requests import POLICY_FIELDS
from mqks.settings import SETTINGS, Settings, load

ROOT = Path(__file__).parents[2]
PACKAGE = Path(mqks.__file__).parent
"""Not of the checkout where an installed one is tested."""
MODULES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of the others; itself always. `*` is everything.
LEAVES = "compiled", "errors", "durable", "files", "log", "clock", "version", "rates"
ARROWS = {
    **{leaf: set[str]() for leaf in LEAVES},
    "__init__": {"blocking", "errors", "client", "version"},
    "__main__": {"commands"},
    "blocking": {"client"},
    "limits": {"errors"},
    "audit": {"limits"},
    "audit_log": {"audit", "log", "errors", "limits"},
    "loops": {"settings"},
    "settings": {"protocol", "errors", "limits"},
    "protocol": {"errors", "limits"},
    "users": {"rates", "protocol", "errors", "limits"},
    "users_file": {"users", "durable", "errors", "limits"},
    "broker": {"audit", "rates", "users", "protocol", "compiled", "errors", "limits", "settings"},
    "journal": {"audit", "broker", "protocol", "durable", "files", "errors", "limits", "settings"},
    "server": {
        *("journal", "broker", "users_file", "users", "rates", "protocol", "files", "page"),
        *("audit", "audit_log"),
        *("web", "log", "clock", "loops", "errors", "limits", "settings"),
    },
    # Neither broker nor journal: the process of a gateway loads none of them.
    "web": {
        *("api", "sqs", "page", "users", "log", "clock", "loops"),
        *("errors", "limits", "settings"),
    },
    "client": {"protocol", "errors", "limits", "version"},
    "pipeline": {"client", "protocol", "durable", "errors", "limits"},
    "follow": {"journal", "pipeline", "files", "errors"},
    "django": {"client", "errors"},
    "celery": {"client", "protocol", "errors", "version"},
    "taskiq": {"client", "protocol"},
    "dramatiq": {"client"},
    "faststream": {"client", "protocol", "errors", "limits"},
    "huey": {"client", "limits"},
    "inspection": {"client", "journal", "protocol", "errors", "settings"},
    "page": {"inspection", "client", "protocol", "errors"},
    "api": {"inspection", "client", "protocol", "limits"},
    "sqs": {"api", "client", "protocol", "users", "limits"},
    "transfer": {"inspection", "client", "protocol", "errors"},
    "bench": {"client", "protocol", "errors"},
    "testing": {"server", "journal", "settings"},
    "commands": {"*"},
}
SQLITE = "mqks.journal.sqlite"
"""The only place that knows SQLite. Others see a store; commands that look at a file may ask
it, and the copy that follows one is of its rows."""
POSTGRES = "mqks.journal.postgres"
"""The same for PostgreSQL. Nobody else names it, but for the one who chooses the store."""
BROKER = "mqks.broker"
FLOORS = (
    *("spine.base", "spine.message", "spine.log", "spine.queue", "spine.clients"),
    *("spine.routing", "features", "policies", "broker", "requests"),
)
"""The rooms of the broker, from below: each may import itself and those before it."""
PURE_ROOMS = {"protocol", "broker"}
# The pure rooms use the standard library alone, and of it nothing that reaches outside.
IO_CLOCK_AND_CHANCE = {
    *("asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib"),
    *("queue", "random", "secrets", "select", "selectors", "shutil", "signal", "socket"),
    *("socketserver", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "uuid"),
}


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def room(module: str) -> str:
    """The room of a module's dotted name: its part below mqks."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(module: str, source: str, *, package: bool = False) -> Iterator[tuple[str, str]]:
    """The dotted names a module imports, relative ones resolved, wherever in it they stand; each
    with what is imported of it, if that is named."""
    around = module if package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = around.split(".")[: 1 - node.level or None] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            yield from ((origin, alias.name) for alias in node.names)


def arrows_of_files(package: str, sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each file those of its package that it imports, for types too; without its prefix."""
    prefix = f"{package}."
    arrows: dict[str, set[str]] = {module.removeprefix(prefix): set() for module in sources}
    for module, source in sources.items():
        for origin, name in imported(module, source):
            for file in {origin, f"{origin}.{name}"} & sources.keys():
                arrows[module.removeprefix(prefix)].add(file.removeprefix(prefix))
    return arrows


def upward(arrows: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """The arrows that point to a higher floor of the broker."""

    def floor(name: str) -> int:
        return next(n for n, it in enumerate(FLOORS) if f"{name}.".startswith(f"{it}."))

    return {(a, b) for a, others in arrows.items() for b in others if floor(b) > floor(a)}


def is_allowed(module: str, name: str) -> bool:
    """Whether the house lets this module import this name."""
    mine, top = room(module), name.split(".")[0]
    if top in ("sqlite3", "aiosqlite") or f"{name}.".startswith(f"{SQLITE}."):
        knows_files = (
            mine in ("commands", "inspection", "follow") or module == "mqks.journal.default_store"
        )
        is_allowed_sqlite = top == "mqks" or mine == "follow"
        return module.startswith(f"{SQLITE}.") or (is_allowed_sqlite and knows_files)
    if top == "psycopg" or f"{name}.".startswith(f"{POSTGRES}."):
        chooses = module == "mqks.journal.default_store" and top == "mqks"
        return module.startswith(f"{POSTGRES}.") or chooses
    if top == "mqks":
        other = room(name)  # not a room: a name that mqks itself holds
        return other == mine or other not in ARROWS or bool(ARROWS[mine] & {other, "*"})
    if mine in PURE_ROOMS:
        return top in sys.stdlib_module_names and top not in IO_CLOCK_AND_CHANCE
    return True


def faults(module: str, source: str, *, package: bool = False) -> list[str]:
    names = (
        f"mqks.{name}" if origin == "mqks" and name else origin
        for origin, name in imported(module, source, package=package)
    )
    return [name for name in dict.fromkeys(names) if not is_allowed(module, name)]


def test_no_room_hides_a_module_of_the_standard_library() -> None:
    # `spark-submit …/mqks/__main__.py` makes imports look in the package's directory first.
    assert {room(dotted(path)) for path in MODULES} & sys.stdlib_module_names == set()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_arrows_point_down(path: Path) -> None:
    module = dotted(path)
    assert room(module) in ARROWS, "a new room needs its row in ARROWS"

    assert faults(module, path.read_text(), package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mqks.broker.queue", "from mqks.journal import Journal"),
        ("mqks.broker.queue", "from mqks import commands"),
        ("mqks.broker.queue", "from ..journal import Journal"),
        ("mqks.broker.queue", "def f():\n    from mqks.server import run"),
        ("mqks.broker.queue", "import time"),
        ("mqks.broker.queue", "import os.path"),
        ("mqks.protocol.lines", "import anyio"),
        ("mqks.server.listener", "import sqlite3"),
        ("mqks.journal.journal", "import sqlite3"),
        ("mqks.journal.recovery", "from mqks.journal.sqlite import store"),
        ("mqks.server.writer", "import psycopg"),
        ("mqks.journal.default_store", "import psycopg"),
        ("mqks.commands.inspect", "from mqks.journal.postgres.store import PostgresStore"),
        ("mqks.journal.postgres.store", "from mqks.journal.sqlite.rows import Tally"),
        ("mqks.errors", "from mqks.limits import LINE_BYTES_MAX"),
    ],
)
def test_an_arrow_that_turns_is_noticed(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mqks.broker.queue", "from mqks.protocol import lines"),
        ("mqks.broker.queue", "from .binding import Binding"),
        ("mqks.broker.queue", "from collections import deque"),
        ("mqks.journal.recovery", "from mqks.broker import Broker"),
        ("mqks.journal.sqlite.store", "import aiosqlite"),
        ("mqks.commands.inspect", "from mqks.journal.sqlite.database_file import DatabaseFile"),
        ("mqks.journal.postgres.claim", "import psycopg"),
        ("mqks.journal.default_store", "from mqks.journal.postgres.store import PostgresStore"),
        ("mqks.server.listener", "from mqks import __version__"),
        ("mqks.commands.serve", "from mqks.server import run"),
    ],
)
def test_an_arrow_that_points_down_is_let_through(module: str, source: str) -> None:
    assert faults(module, source) == []


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """All files, but for those that only say what is in a package."""
    return {dotted(path): path.read_text() for path in MODULES if path.name != "__init__.py"}


def test_the_spine_imports_no_feature(sources: dict[str, str]) -> None:
    broker = {name: text for name, text in sources.items() if name.startswith(f"{BROKER}.")}
    assert upward(arrows_of_files(BROKER, broker)) == set()


def test_files_form_no_circles(sources: dict[str, str]) -> None:
    TopologicalSorter(arrows_of_files("mqks", sources)).prepare()


def test_an_arrow_that_turns_inside_the_broker_is_noticed() -> None:
    log, lane = "mqks.broker.spine.log.pending", "mqks.broker.spine.queue.lane"
    keys = "mqks.broker.features.order.keyed"
    sources = {
        log: f"if TYPE_CHECKING:\n    from {lane} import Lane",
        lane: "from mqks.broker.spine.log import pending",
        keys: f"import {lane}",
        "mqks.broker.spine.queue.queue": f"from {keys} import Keyed",
        "mqks.broker.requests.stats": "from mqks.broker.spine.queue.queue import Queue",
    }
    arrows = arrows_of_files(BROKER, sources)

    assert upward(arrows) == {
        ("spine.log.pending", "spine.queue.lane"),
        ("spine.queue.queue", "features.order.keyed"),
    }
    with pytest.raises(CycleError, match=r"spine\.log\.pending.*spine\.queue\.lane"):
        TopologicalSorter(arrows).prepare()


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    text = "from .queue import Queue\nfrom ..server import run"
    told = [("mqks.broker.queue", "Queue"), ("mqks.server", "run")]
    assert list(imported("mqks.broker", text, package=True)) == told


def example_lines() -> list[str]:
    """mqks.toml.example with its settings uncommented."""
    lines = (ROOT / "mqks.toml.example").read_text().splitlines()
    keys = tuple(f"# {name} = " for name in SETTINGS)
    return [line[2:] if line.startswith(keys) else line for line in lines]


def test_the_example_is_all_comments_and_changes_nothing() -> None:
    assert tomllib.loads((ROOT / "mqks.toml.example").read_text()) == {}


def test_the_example_holds_every_setting_once_at_its_default(tmp_path: Path) -> None:
    uncommented = tmp_path / "mqks.toml"
    uncommented.write_text("\n".join(example_lines()))

    assert list(tomllib.loads(uncommented.read_text())) == list(SETTINGS)
    assert load({}, {}, uncommented) == Settings()
    tables = [line[4:] for line in example_lines() if line.startswith("#   ")]
    uncommented.write_text("\n".join(tables))
    [table] = load({}, {}, uncommented).queue_tables
    assert list(table.fields) == list(POLICY_FIELDS.values())
    assert all(line.startswith("#") for line in example_lines() if line and " = " not in line)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_example_tells_why(name: str) -> None:
    lines = example_lines()
    at = next(index for index, line in enumerate(lines) if line.startswith(f"{name} = "))

    start = max(index for index in range(at) if not lines[index])
    comment = " ".join(line.removeprefix("# ") for line in lines[start + 1 : at])
    assert comment.startswith(SETTINGS[name].about.why)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_page_has_every_setting_in_its_group(name: str) -> None:
    default, about = SETTINGS[name].default_text, SETTINGS[name].about
    row = f"| `{name}` | " + (f"`{default}` | " if default else "none | ") + about.why
    heading = f"\n| **{about.group}** |"
    _, found, rest = (ROOT / "docs/settings.md").read_text().partition(heading)

    assert found
    group = re.split(r"\n(?:\| \*\*|## )", rest)[0]
    [told] = [line for line in group.splitlines() if line.startswith(row)]
    assert told.endswith(" **[r]** |") == about.is_reread, "what a reload reads again is marked"


# ------------------------------------------------------------------- one name for one thing

OFTEN = {
    "Broker": 2,  # That of `mqks.testing`, which users import, is called so there.
    "MqksBroker": 3,  # Users of dramatiq, FastStream and taskiq import it, each their own.
    "MqksMessage": 2,  # So with this one, of dramatiq and FastStream.
    "Migration": 2,  # Django wants it so, in each file.
    # Of the asyncio and blocking clients.
    **dict.fromkeys(("Connections", "OneTimeEvent", "SessionConnection"), 2),
}


def test_each_class_name_stands_once() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in names.items() if count > 1} == OFTEN


def test_no_docstring_needs_the_one_before_it() -> None:
    """It says by itself what is meant."""
    wrong = [str(path) for path in MODULES if '"""The same' in path.read_text()]
    assert wrong == []


# ------------------------------------------- the way of a publish, as the documentation quotes it

LINES_MAX = 60
TEXT = (ROOT / "docs/architecture.md").read_text().partition("## A publish in 60 lines")[2]
BLOCKS = re.findall(r"```py\n(.*?)```", TEXT.partition("\n## ")[0], re.S)
STATIONS = re.findall(r"# (\S+\.py): (\S+)\n((?:(?!# \S+\.py: ).*\n)+)", "".join(BLOCKS))


def test_the_way_of_a_publish_is_short() -> None:
    quoted = [line for *_, code in STATIONS for line in code.splitlines() if line.strip() != "…"]
    assert 40 < len(quoted) <= LINES_MAX


@pytest.mark.parametrize(("file", "name", "code"), STATIONS, ids=[name for _, name, _ in STATIONS])
def test_the_way_of_a_publish_is_quoted(file: str, name: str, code: str) -> None:
    source = (PACKAGE / file).read_text()
    method = name.rpartition(".")[2]
    found = re.search(
        rf"^( *)(?:async )?def {method}\(.*?(?=^\1(?:async )?def |^\1@|\Z)", source, re.M | re.S
    )
    assert found is not None, f"{file} has no {name}"
    lines = iter([line.strip() for line in found[0].splitlines()])
    for line in code.splitlines():
        if line.strip() != "…":
            assert line.strip() in lines, f"{name} has no such line, or in another order: {line}"
