"""A policy as it is stored."""

import pytest

from mqks.broker.policy import Policy
from mqks.protocol.requests import DeleteRule

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
