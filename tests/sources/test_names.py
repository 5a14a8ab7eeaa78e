"""One name for one thing, and one text: a docstring says by itself what is meant."""

import ast
from collections import Counter

from tests.sources.test_architecture import MODULES

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
    wrong = [str(path) for path in MODULES if '"""The same' in path.read_text()]
    assert wrong == []
