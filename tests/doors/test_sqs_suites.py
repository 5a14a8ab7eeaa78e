"""SQS by tests of others, unmodified: moto's, in its mode for servers elsewhere, and kombu's.

The one rule: each test that does not pass is named here, with its reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.kit.ports import accepts
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until
from tools.sdists import DIRECTORY

pytestmark = pytest.mark.slow
PORT = 5000
"""Moto's own, which a test of it expects."""
OF_MOTO = {
    "test_create_queues_in_multiple_region": "regions only name",
    "test_create_queue_with_different_attributes_fail": "FifoQueue is set to tru",
    "test_message_delay_is_more_than_15_minutes": (
        "it gives a standard queue deduplication ids, which AWS refuses"
    ),
    "test_message_with_invalid_attributes": "AWS takes letters such as ø",
    "test_create_fifo_queue_with_dlq": "FifoQueue is set to false",
    "test_send_messages_to_fifo_without_message_group_id": "of a batch it is another error",
    "test_change_message_visibility_on_unknown_receipt_handle": "AWS names the handle",
    "test_delete_message_errors": "as the last one",
    "test_permissions": "AWS has another version of policies",
    "test_remove_permission_errors": "AWS has other words where there is no policy",
}
OF_KOMBU = {
    "test_fanout": "it needs SNS",
    "test_ack_invalid_receipt_with_backoff[InvalidParameterValue]": "as the next one",
    "test_ack_invalid_receipt_with_backoff[ReceiptHandleIsInvalid]": (
        "it expects that a message cannot be deleted twice, as in GoAws"
    ),
}
WITH_CURL = (
    "test_simple_buffer_publish_consume",
    "test_messages_received_after_cancel_are_released",
    "test_reconnected_consumer_receives_after_hub_reset",
    "test_hub_close_does_not_raise",
)
"""Tests of kombu's that need pycurl."""
# Each test begins without queues; the account is asked from a service that is not here.
MOTO_CONFTEST = """
import os
import boto3, moto.core, pytest
from moto.core.models import ServerModeMockAWS

moto.core.DEFAULT_ACCOUNT_ID = "000000000000"

def reset(self):
    sqs = boto3.client("sqs", "us-east-1", endpoint_url=os.environ["TEST_SERVER_MODE_ENDPOINT"])
    for url in sqs.list_queues().get("QueueUrls", []):
        sqs.delete_queue(QueueUrl=url)

ServerModeMockAWS.reset = reset

@pytest.fixture
def account_id():
    return "000000000000"
"""


@pytest.fixture
def is_free() -> bool:
    return not accepts(PORT)


@pytest.fixture
def port(tmp_path: Path, is_free: bool) -> Iterator[str]:
    flags = "--sqs-port", str(PORT if is_free else 0)
    with ServerProcess(tmp_path / "mqks.db", *flags) as server:
        yield until(lambda: re.search(r"address=sqs:http://\S+:(\d+)", server.log))[1]


def unpacked(package: str, files: str, target: Path) -> None:
    """Files of the sources of a package, whose tests no wheel has."""
    found = sorted(DIRECTORY.glob(f"{package}-*.tar.gz"))
    if not found:
        pytest.skip(f"the sources of {package} are not in {DIRECTORY}: `make` gets them")
    with tarfile.open(found[-1]) as sources:
        for member in sources:
            _, _, name = member.name.partition("/")
            if member.isfile() and re.fullmatch(files, name):
                file = sources.extractfile(member)
                assert file is not None
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(file.read())


def check(
    target: Path, files: list[str], environ: Mapping[str, str], not_here: set[str], passed_min: int
) -> None:
    """Run them: all pass but those that are not here."""
    settings = "[pytest]\npython_classes = Test* test_*\nmarkers =\n  env\n  flaky\n"
    (target / "pytest.ini").write_text(settings)
    results = target / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"--junit-xml={results}", *files],
        cwd=target,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", **environ},
        capture_output=True,
        text=True,
    )
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        outcomes[case.get("name", "")] = (kinds or ["passed"])[0]
    failed = {name for name, kind in outcomes.items() if kind in ("failure", "error")}
    assert failed <= not_here, done.stdout[-20_000:]
    assert not_here <= failed, "they pass now"
    assert [*outcomes.values()].count("passed") >= passed_min


def test_motos(tmp_path: Path, port: str, is_free: bool) -> None:
    """The files that are left out test moto itself, or how it works together with CloudFormation,
    Lambda or IAM."""
    pytest.importorskip("freezegun")
    unpacked("moto", r"tests/(__init__|markers|test_sqs/\w+)\.py", tmp_path)
    (tmp_path / "tests/conftest.py").write_text(MOTO_CONFTEST)
    files = [f"tests/test_sqs/{name}.py" for name in ("test_sqs", "test_sqs_message_attributes")]
    mode = {"TEST_SERVER_MODE": "true", "TEST_SERVER_MODE_ENDPOINT": f"http://localhost:{port}"}
    for file in tmp_path.rglob("*.py"):
        file.write_text(file.read_text().replace("123456789012", "000000000000"))  # The account.
    not_here = {*OF_MOTO, *(() if is_free else ("test_get_queue_with_prefix",))}
    check(tmp_path, files, mode, not_here, 140 - (not is_free))


def test_kombus(tmp_path: Path, port: str) -> None:
    pytest.importorskip("kombu")
    unpacked("kombu", r"t/(__init__|integration/(__init__|common|test_sqs))\.py", tmp_path)
    without = () if find_spec("pycurl") else WITH_CURL
    not_here = {*OF_KOMBU, *without}
    place = {"SQS_HOST": "localhost", "SQS_PORT": port}
    check(tmp_path, ["t/integration/test_sqs.py"], place, not_here, 39 - len(without))
