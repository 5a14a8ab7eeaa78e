"""docs/django.md, typed; and examples/django: its two commands, as its docstring starts them, and
its page."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from mqks.testing import BrokerProcess
from tests.kit.server_process import ServerProcess
from tests.kit.typist import Typist
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("django", reason="the extra django is not installed")
DOCS = Path(__file__).parents[2] / "docs"
ROOT = Path(__file__).parents[2] / "examples/django"


@pytest.mark.slow
def test_the_documentation_can_be_typed(tmp_path: Path) -> None:
    text = (DOCS / "django.md").read_text()
    if find_spec("django.tasks") is None:  # Before Django 6, as the page says.
        text = text.replace("from django.tasks", "from django_tasks")
    with (
        ServerProcess(tmp_path / "mqks.db") as server,
        Typist(tmp_path, server.url, with_spark=False) as typist,
    ):
        typist.type(text)
    assert typist.typed == 6


@pytest.mark.slow
def test_the_page_shows_tasks_done(mqks_broker_process: BrokerProcess, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    environment = os.environ | {"MQKS_URL": mqks_broker_process.url, "DEPOT_DATA": str(tmp_path)}
    commands = [["work"], ["runserver", address, "--noreload"]]
    with (tmp_path / "log").open("wb") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "manage.py"), *command],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for command in commands
        ]

    def page(client: httpx.Client, url: str) -> str:
        with suppress(httpx.TransportError):
            return client.get(url).raise_for_status().text
        return ""

    try:
        with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
            url = f"http://{address}/"
            until(lambda: "Pack an order" in page(client, url))
            until(lambda: "runs tasks" in (tmp_path / "log").read_text())
            for by in ("celery", "tasks"):
                found = re.search(r'csrfmiddlewaretoken" value="(\w+)"', page(client, url))
                assert found is not None
                answer = client.post(url, data={"by": by, "csrfmiddlewaretoken": found[1]})
                url = str(answer.url.join(answer.headers["location"]))
            until(lambda: page(client, url).count("is packed") == 2)
            shown = page(client, url)
        assert "celery: SUCCESS order 1 is packed" in shown
        assert "tasks: SUCCESSFUL order 2 is packed" in shown
        assert "refresh" not in shown
        processes[0].send_signal(signal.SIGTERM)
        assert processes[0].wait(WAIT_S) == 0
    except BaseException as error:
        error.add_note((tmp_path / "log").read_text())
        raise
    finally:
        for each in processes:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
