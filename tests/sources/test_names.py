"""One name for one thing, and one text: a docstring says by itself what is meant."""

import ast
from collections import Counter

from tests.sources.test_architecture import MODULES

TWICE = {
    "Broker",  # That of `mqks.testing`, which users import, is called so there.
    "MqksBroker",  # Users of dramatiq and of taskiq import it, each their own.
    *("Connections", "OneTimeEvent", "SessionConnection"),  # Of the asyncio and blocking clients.
}


def test_each_class_name_stands_once() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in names.items() if count > 1} == dict.fromkeys(TWICE, 2)


def test_no_docstring_needs_the_one_before_it() -> None:
    wrong = [str(path) for path in MODULES if '"""The same' in path.read_text()]
    assert wrong == []
