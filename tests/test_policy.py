"""A policy as it is stored."""

from pathlib import Path

import pytest

from mqks.broker.policy import Policy
from mqks.errors import SchemaTooNew
from mqks.protocol.requests import DeleteRule
from mqks.testing import Broker
from tests.line_client import LineClient

POLICIES = [Policy(), Policy(DeleteRule(None)), Policy(DeleteRule(0.5))]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_what_it_was(policy: Policy) -> None:
    assert Policy.decode(policy.encode()) == policy


def test_what_is_not_set_is_not_stored() -> None:
    assert Policy().encode() == "{}"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "1", '{"delete_when_unused": 1}', '{"delete_when_unused": {"x": 1}}', '{"x": 1}'],
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Policy.decode(text)


def test_a_policy_of_a_newer_version_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "mqks.db"
    with monkeypatch.context() as newer:
        newer.setattr(Policy, "encode", lambda policy: '{"later": 1}')
        with Broker(db) as broker, LineClient(("127.0.0.1", broker.port)) as client:
            assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    with pytest.raises(SchemaTooNew, match=r"queue q has a policy .* \(later\)"), Broker(db):
        pass
