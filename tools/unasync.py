"""The blocking client, written from the async one: `python -m tools.unasync`.

The one rule: words are replaced, nothing else; what differs otherwise stands in the two
`*_connection.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

import mqks

CLIENT = Path(mqks.__file__).parent / "client"
RUFF = sys.executable, "-m", "ruff"
STYLE = Path(__file__).parents[1] / "pyproject.toml"
DOCSTRINGS = {
    "async_client": '''"""The blocking client, on threads. Any thread may call.

Generated from `async_client.py` by `python -m tools.unasync`: edit that file.

The one rule: a session is touched with its lock held.
"""
''',
    "async_traced": '''"""The blocking client with spans.

Generated from `async_traced.py` by `python -m tools.unasync`: edit that file.

The one rule: what a span says is decided in `tracing.py`.
"""
''',
}
"""Of the blocking modules, by the async ones that they are written from."""
TARGETS = {"async_client": "blocking", "async_traced": "blocking_traced"}
WORDS = {
    "async_client": "blocking",
    "async_connection": "blocking_connection",
    "async_traced": "blocking_traced",
    "connect": "connect_blocking",
    "AsyncClient": "BlockingClient",
    "AsyncConsumer": "BlockingConsumer",
    "AsyncMessages": "BlockingMessages",
    "AsyncTail": "BlockingTail",
    "AsyncIterable": "Iterable",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
WORD = re.compile(rf"\b(?:(?:async|await) |({'|'.join(WORDS)})\b)")


def source(name: str) -> Path:
    return CLIENT / f"{name}.py"


def target(name: str) -> Path:
    return CLIENT / f"{TARGETS[name]}.py"


def blocking(name: str) -> str:
    """The text of the blocking module that is written from this async one."""
    _, _, code = source(name).read_text().partition('"""\n\n')
    code = WORD.sub(lambda found: WORDS.get(found[0], ""), code)
    # Imports of two names have become one.
    code = code.replace(
        "Iterable, Iterator, Callable, Iterable\n", "Callable, Iterable, Iterator\n"
    ).replace("import Iterable, Iterator, Iterable\n", "import Iterable, Iterator\n")
    return subprocess.run(
        [*RUFF, "format", "--config", STYLE, "--stdin-filename", target(name), "-"],
        input=f"{DOCSTRINGS[name]}\n{code}",
        text=True,
        capture_output=True,
        check=True,
    ).stdout


if __name__ == "__main__":
    for name in TARGETS:
        target(name).write_text(blocking(name))
