"""What the clients for Python promise, promised by the client for Node.js: the same tests. Its own
tests, in `mqks.test.js`, take less time: `make test` has those.
"""

import inspect
import shutil
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from tests.client import test_client_contract
from tests.client.conftest import client, consumer
from tests.client.test_client_contract import authority, refusing, tls_proxy
from tests.kit.node_skin import Driver, NodeClient

__all__ = ["authority", "client", "consumer", "refusing", "tls_proxy"]
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine"),
]
NOT_HERE = {
    "it has the reason from the server as it is, and compares no names": (
        "a_queue_that_is_missing_is_an_error",
        "the_nearest_queue_is_among_thousands",
    ),
    "without credentials, a server that does not even tell the reason wants some": (
        "a_server_that_never_tells_the_reason",
    ),
    "many are many publishes, each with its own error": (
        "a_mandatory_message_needs_a_queue",
        "a_refused_message_may_come_again",
        "a_bulk_publish_that_fails_names_its_first_cause",
        "a_server_that_knows_only_its_last_error",
        "batches_go_out_while_later_ones_are_still_to_come",
    ),
    "it has no such call": (
        "any_bytes_arrive_as_they_were",
        "no_ack_with_auto_ack",
        "process_acks_or_rejects",
        "what_is_interrupted_has_not_failed",
        "rebind_and_updates",
        "purge_and_trim_tell_how_many",
        "stop_ends_the_iteration",
        "a_consumer_pauses",
        "batches_end_when_nothing_comes",
        "of_several_servers_the_one_that_accepts_is_used",
        "schedules",
        "a_schedule_that_makes_no_sense",
    ),
    "its publishes without confirm wait for the connection, and none is left when it is closed": (
        "publishers_wait_while_the_server_is_away",
    ),
    "what it has not handed out when it is closed returns as from a lost connection": (
        "what_waits_when_a_consumer_ends_was_not_delivered",
    ),
    "its errors of arguments are those of JavaScript; mqks.test.js tests them": (
        "arguments_of_a_wrong_type",
        "consumers_with_arguments_of_a_wrong_type",
        "bad_names_are_refused",
        "bad_data_is_refused",
    ),
    "its peek is one request": ("more_is_peeked_than_one_answer_has",),
    "it has other names": (
        "priority_and_key_are_told_with_meta",
        "unique_messages_tell_what_became_of_them",
        "a_redrive_counts_those_whose_keys_are_held",
        "a_message_is_traced",
        "a_queue_is_renamed",
        "set_queue",
        "any_action_that_is_answered_with_one_line",
        "manual_ack_is_the_contrary_of_auto_ack",
        "old_keywords_mean_the_same",
    ),
    "it has no log": ("an_outage_is_logged_once",),
    "certificates are given otherwise; mqks.test.js tests TLS": ("tls",),
}
"""Tests of the contract, and why the client for Node.js does not take them."""
CONTRACT = {
    name: test
    for name, test in vars(test_client_contract).items()
    if name.startswith("test_") and {"client", "connect"} & {*inspect.signature(test).parameters}
}
_left = {f"test_{name}" for names in NOT_HERE.values() for name in names}
globals().update({name: test for name, test in CONTRACT.items() if name not in _left})


@pytest.fixture
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if "udcff" in request.node.name:
        pytest.skip("the event of a message is text")
    driver = Driver()
    yield partial(NodeClient, driver)
    await driver.stop()


def test_what_is_left_out_is_of_the_contract() -> None:
    assert _left <= {*CONTRACT}
