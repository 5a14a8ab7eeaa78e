"""One name for one thing, and one text: a docstring says by itself what is meant."""

import ast
from collections import Counter

from tests.sources.test_architecture import MODULES

PUBLIC = {"Broker", "Client", "Connection", "Consumer", "Event", "Policy", "Selection", "Scheduled"}
"""What users of the clients and of the fixtures import keeps the name that the broker has."""
PAIRS = {"Connections"}
"""The asyncio and the blocking client have the same parts."""


def test_each_class_name_stands_once() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == PUBLIC | PAIRS


def test_no_docstring_needs_the_one_before_it() -> None:
    wrong = [str(path) for path in MODULES if '"""The same' in path.read_text()]
    assert wrong == []
