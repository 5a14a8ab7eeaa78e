"""SQS by moto's own tests, unmodified, in its mode for servers elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.server_process import ServerProcess
from tests.waiting import until

SDISTS = Path(sys.prefix) / "sdists"
"""Where `make` puts the sources of moto, whose tests no wheel has."""
FILES = ("test_sqs", "test_sqs_message_attributes")
"""The others test moto itself, or how it works together with CloudFormation, Lambda or IAM."""
POLICY = "access policies are refused: permissions are those of users"
OLD = "a receipt handle counts until its message is received again"
PORT = "it expects moto's own port"
NOT_HERE = {
    "test_create_queue_with_policy": POLICY,
    "test_set_queue_attribute_empty_policy_removes_attr": POLICY,
    "test_permissions": POLICY,
    "test_get_queue_attributes_template_response_validation": POLICY,
    "test_add_permission_errors": POLICY,
    "test_remove_permission_errors": POLICY,
    "test_change_message_visibility_on_old_message": OLD,
    "test_batch_change_message_visibility_on_old_message": OLD,
    "test_delete_message_using_old_receipt_handle": OLD,
    "test_create_queues_in_multiple_region": PORT,
    "test_get_queue_with_prefix": PORT,
    "test_create_queue_with_different_attributes_fail": "FifoQueue is set to tru",
    "test_message_retention_period": "it sets a retention of one second, AWS allows sixty",
    "test_purge_queue_twice_raises_purge_in_progress": "a queue may be purged again at once",
    "test_delete_message_batch_with_invalid_receipt_id": "other words in a batch",
    "test_receive_messages_with_message_group_id": "message groups take turns",
    "test_message_delay_is_more_than_15_minutes": (
        "it gives a standard queue deduplication ids, which AWS refuses"
    ),
}
PASSED_MIN = 133
# Each test begins without queues; the account is asked from a service that is not here.
CONFTEST = """
import os
import boto3, pytest
from moto.core.models import ServerModeMockAWS

def reset(self):
    sqs = boto3.client("sqs", "us-east-1", endpoint_url=os.environ["TEST_SERVER_MODE_ENDPOINT"])
    for url in sqs.list_queues().get("QueueUrls", []):
        sqs.delete_queue(QueueUrl=url)

ServerModeMockAWS.reset = reset

@pytest.fixture
def account_id():
    return "123456789012"
"""


@pytest.mark.slow
def test_motos_tests(tmp_path: Path) -> None:
    pytest.importorskip("freezegun")
    found = sorted(SDISTS.glob("moto-*.tar.gz"))
    if not found:
        pytest.skip(f"the sources of moto are not in {SDISTS}: `make` gets them")
    with tarfile.open(found[-1]) as sources:
        for member in sources:
            _, _, name = member.name.partition("/")
            if re.fullmatch(r"tests/(__init__|markers|test_sqs/\w+)\.py", name):
                file = sources.extractfile(member)
                assert file is not None
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_bytes(file.read())
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    results = tmp_path / "results.xml"
    flags = "--sqs-port", "0"
    with ServerProcess(tmp_path / "mqks.db", *flags, module="tests.sqs_of_moto") as server:
        base = until(lambda: re.search(r"address=sqs:(http://\S+)", server.log))[1]
        keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
        mode = {"TEST_SERVER_MODE": "true", "TEST_SERVER_MODE_ENDPOINT": base}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [f"--junit-xml={results}", *(f"tests/test_sqs/{name}.py" for name in FILES)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **keys, **mode},
            capture_output=True,
            text=True,
        )
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        outcomes[case.get("name", "")] = (kinds or ["passed"])[0]
    failed = {name for name, kind in outcomes.items() if kind in ("failure", "error")}
    assert failed <= NOT_HERE.keys(), done.stdout[-20_000:]
    assert NOT_HERE.keys() <= failed, "they pass now"
    assert [*outcomes.values()].count("passed") >= PASSED_MIN
