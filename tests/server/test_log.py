"""Log lines."""

import json
import subprocess
import sys

CODE = """
import logging
from mqks import log
log.configure("json", "info")
log.warning("queue_full", queue="orders", ready=3)
logging.getLogger("mqks.client").warning("request %s failed, error %s", "r1", "e1")
"""


def test_a_record_of_the_client_library_is_a_message() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    own, other = map(json.loads, done.stderr.splitlines())
    assert (own["event"], own["queue"], own["ready"]) == ("queue_full", "orders", 3)
    assert other["event"] == "log"
    assert other["logger"] == "mqks.client"
    assert other["message"] == "request r1 failed, error e1"
