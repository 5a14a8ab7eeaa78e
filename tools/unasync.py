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
DOCSTRING = '''"""The blocking client, on threads. Any thread may call.

Generated from `async_client.py` by `python -m tools.unasync`: edit that file.

The one rule: a session is touched with its lock held.
"""
'''
SOURCE, TARGET = CLIENT / "async_client.py", CLIENT / "blocking.py"
WORDS = {
    "async_client": "blocking",
    "async_connection": "blocking_connection",
    "AsyncClient": "BlockingClient",
    "AsyncBatch": "BlockingBatch",
    "AsyncConsumer": "BlockingConsumer",
    "AsyncJob": "BlockingJob",
    "AsyncMessages": "BlockingMessages",
    "AsyncTail": "BlockingTail",
    "AsyncTransaction": "BlockingTransaction",
    "AsyncIterable": "Iterable",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "tasks": "threads",
}
WORD = re.compile(rf"\b(?:(?:async|await) |({'|'.join(WORDS)})\b)")


def blocking() -> str:
    """The text of the blocking module."""
    _, _, code = SOURCE.read_text().partition('"""\n\n')
    code = WORD.sub(lambda found: WORDS.get(found[0], ""), code)
    # Imports of two names have become one.
    code = code.replace(
        "Iterable, Iterator, Callable, Iterable", "Callable, Iterable, Iterator"
    ).replace("import Iterable, Iterator, Iterable\n", "import Iterable, Iterator\n")
    return subprocess.run(
        [*RUFF, "format", "--config", STYLE, "--stdin-filename", TARGET, "-"],
        input=f"{DOCSTRING}\n{code}",
        text=True,
        capture_output=True,
        check=True,
    ).stdout


if __name__ == "__main__":
    TARGET.write_text(blocking())
