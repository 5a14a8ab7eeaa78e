"""A policy as it is stored."""

from pathlib import Path

import pytest

from mqks.broker.spine.message.policy import Policy
from mqks.errors import SchemaTooNew
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import Backoff, DeleteRule
from mqks.testing import Broker
from tests.kit.line_client import LineClient

POLICIES = [
    Policy(),
    Policy(DeleteRule(None)),
    Policy(DeleteRule(0.5)),
    Policy(is_sparse=True),
    Policy(has_priorities=True, made_by="älice"),
    Policy(retries=0, backoff=Backoff(0.1), single_consumer=False),
    Policy(
        DeleteRule(None),
        *(1, 2, 3, Backoff(1e-6, 1 / 3), b"dead\xff,=%", 1e9, SEQ_MAX, 1, "drop", True, 0.1),
        ordered="key",
        fair="key",
        concurrency=1,
        rate="5/m,2",
        concurrency_per_key=3,
        rate_per_key="1/h",
        limit="a.b_c-1,concurrency=5,rate=100/m,7",
        breaker="5,30",
        readers=b"lake,warehouse",
        labels=b"team=ops&a%20b=",
        is_sparse=True,
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_what_it_was(policy: Policy) -> None:
    assert Policy.decode(policy.encode()) == policy


def test_what_is_not_set_is_not_stored() -> None:
    assert Policy().encode() == "{}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "1", '{"delete_when_unused": 1}', '{"delete_when_unused": {"x": 1}}'),
        *('{"x": 1}', '{"retries": -1}', '{"retries": null}', '{"ttl_s": [1]}', '{"ttl_s": NaN}'),
        *('{"backoff": {}}', '{"backoff": [1, null]}', '{"dead_letters": 5}', '{"is_sparse": 1}'),
        *('{"made_by": true}', '{"made_by": null}', '{"made_by": ["alice"]}'),
        *('{"overflow": "keep"}', '{"single_consumer": 1}', '{"dead_letters": "\\ud800"}'),
        *('{"readers": ["a"]}', '{"rate": 5}', '{"limit": 5}'),
    ],
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
