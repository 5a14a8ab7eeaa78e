"""SQS by moto's own tests, unmodified, in its mode for servers elsewhere."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

SDISTS = Path(sys.prefix) / "sdists"
"""Where `make` puts the sources of moto, whose tests no wheel has."""
FILES = ("test_sqs", "test_sqs_message_attributes")
"""The others test moto itself, or how it works together with CloudFormation, Lambda or IAM."""
PORT = 5000
"""Moto's own, which a test expects."""
NOT_HERE = {
    "test_create_queues_in_multiple_region": "regions only name",
    "test_create_queue_with_different_attributes_fail": "FifoQueue is set to tru",
    "test_message_delay_is_more_than_15_minutes": (
        "it gives a standard queue deduplication ids, which AWS refuses"
    ),
}
PASSED_MIN = 147
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
    with socket.socket() as probe:
        is_free = probe.connect_ex(("127.0.0.1", PORT)) != 0
    not_here = {*NOT_HERE, *(() if is_free else ("test_get_queue_with_prefix",))}
    flags = "--sqs-port", str(PORT if is_free else 0)
    with ServerProcess(tmp_path / "mqks.db", *flags, module="tests.kit.sqs_of_moto") as server:
        port = until(lambda: re.search(r"address=sqs:http://\S+:(\d+)", server.log))[1]
        keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
        mode = {"TEST_SERVER_MODE": "true", "TEST_SERVER_MODE_ENDPOINT": f"http://localhost:{port}"}
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
    assert failed <= not_here, done.stdout[-20_000:]
    assert not_here <= failed, "they pass now"
    assert [*outcomes.values()].count("passed") >= PASSED_MIN - (not is_free)
