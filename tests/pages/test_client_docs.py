"""docs/client.md keeps step with what the clients have."""

from dataclasses import fields
from pathlib import Path

import pytest

import mqks

TEXT = (Path(__file__).parents[2] / "docs/client.md").read_text()


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("option", [field.name for field in fields(mqks.Options)])
def test_every_option_is_told(option: str) -> None:
    assert f"`{option}`" in section("Limits")


def test_other_names_cannot() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mqks.no_such_name


ERRORS = [
    name
    for name in mqks.__all__
    if isinstance(thing := getattr(mqks, name), type) and issubclass(thing, mqks.MqksError)
]


@pytest.mark.parametrize("error", [name for name in ERRORS if name != "ClientError"])
def test_every_error_is_told(error: str) -> None:
    assert f"`{error}`" in section("Errors")


@pytest.mark.parametrize("skin", [mqks.AsyncClient, mqks.BlockingClient])
def test_every_method_is_told(skin: type) -> None:
    for name in vars(skin):
        written = (
            f"`client.{name}`" if isinstance(vars(skin)[name], property) else f"client.{name}("
        )
        assert name.startswith("_") or written in TEXT, name


def test_both_clients_have_the_same_methods() -> None:
    pairs = (
        (mqks.AsyncClient, mqks.BlockingClient),
        (mqks.AsyncConsumer, mqks.BlockingConsumer),
    )
    for one, other in pairs:
        assert public(one) == public(other)


def public(skin: type) -> set[str]:
    return {name for name in vars(skin) if not name.startswith("_")}
