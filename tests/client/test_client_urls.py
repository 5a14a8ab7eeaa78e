"""URLs of clients."""

import pytest

from mqks import ConfigurationError
from mqks.client.urls import Address, parse


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mqks://host", Address("host", 25000)),
        ("mqks://host:1/", Address("host", 1)),
        ("mqks://[::1]:7", Address("::1", 7)),
        ("mqkss://host", Address("host", 25000, tls=True)),
        ("mqks://token@host", Address("host", 25000, credentials=("token",))),
        ("mqks://us%40er:p%3Aw@host", Address("host", 25000, credentials=("us@er", "p:w"))),
        ("mqks+unix:///run/m%20q.sock", Address("", 0, "/run/m q.sock")),
        ("mqks+unix://token@/run/x", Address("", 0, "/run/x", credentials=("token",))),
        ("mqks://host?name=web-1", Address("host", 25000, client_name="web-1")),
        ("mqkss://t@host/?name=a%26b", Address("host", 25000, "", True, ("t",), "a&b")),
        ("mqks+unix:///x?name=web", Address("", 0, "/x", client_name="web")),
        (None, Address("127.0.0.1", 25000)),
    ],
)
def test_urls(url: str | None, address: Address) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "host:25000",
        "http://host",
        "mqks://",
        "mqks://:25000",
        "mqks://host:port",
        "mqks://host:70000",
        "mqks://[::1",
        "mqks://a..b",
        "mqks://" + "a" * 64,
        "mqks://host/queue",
        "mqks://host?tls=1",
        "mqks://host?name=",
        "mqks://host?name=a&name=b",
        "mqks://host#name",
        "mqks://:secret@host",
        "mqks+unix://run/x",
        "mqks+unix:///",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        parse(url)
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    "urls",
    [
        "mqks://t@a,mqkss://t@b:1,mqks+unix://t@/run/m,q.sock",
        "mqks://t@a, mqkss://t@b:1, mqks+unix://t@/run/m,q.sock",
        ["mqks://t@a", "mqkss://t@b:1", "mqks+unix://t@/run/m,q.sock"],
        ("mqks://t@a,mqkss://t@b:1", "mqks+unix://t@/run/m,q.sock"),
    ],
)
def test_several_servers(urls: str | list[str]) -> None:
    address = parse(urls)
    assert address.each == (
        Address("a", 25000, credentials=("t",)),
        Address("b", 1, tls=True, credentials=("t",)),
        Address("", 0, "/run/m,q.sock", credentials=("t",)),
    )
    assert str(address) == "a:25000, b:1, unix:/run/m,q.sock"


@pytest.mark.parametrize(
    ("urls", "told"),
    [
        ([], "the list of URLs is empty"),
        ("mqks://a,b:25000", "as in mqks://host1:25000,mqks://host2:25000"),
        ("mqks://t@a,mqks://b", "the same credentials and name"),
        ("mqks://a?name=x,mqks://b?name=y", "the same credentials and name"),
    ],
)
def test_bad_lists(urls: str | list[str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse(urls)


def test_credentials_do_not_show() -> None:
    address = parse("mqks://user:secret@host")
    assert "secret" not in repr(address)
    assert str(address) == "host:25000"


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQKS_URL", "mqks://elsewhere:1")
    assert parse() == Address("elsewhere", 1)
    assert parse("mqks://here:2") == Address("here", 2)
