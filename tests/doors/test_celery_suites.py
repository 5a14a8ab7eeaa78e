"""Celery's own tests where our commands of workers are, and of its part for Django. Their files run
unmodified."""

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.sdists import DIRECTORY

pytest.importorskip("celery")
pytest.importorskip("django")

FILES = "fixups", "worker/test_control.py", "app/test_control.py", "tasks/test_tasks.py"
OTHER_BROKER = """
from celery import Celery
from celery.contrib.testing.worker import start_worker
import mqks.celery.control

app = Celery("other", broker="memory://", backend="cache+memory://")
with start_worker(app, perform_ping_check=False):
    inspect = app.control.inspect(timeout=10, limit=1)
    assert [*inspect.scheduled().values()] == [[]]
    app.control.revoke("a", reply=True, limit=1, timeout=10)
    assert [*inspect.revoked().values()] == [["a"]]
"""


@pytest.mark.slow
def test_celery(tmp_path: Path) -> None:
    name = f"celery-{version('celery')}"
    if not (DIRECTORY / f"{name}.tar.gz").exists():
        pytest.skip("the sources of this version are not here: python -m tools.sdists gets them")
    with tarfile.open(DIRECTORY / f"{name}.tar.gz") as sources:
        sources.extractall(tmp_path, filter="data")
    flags = "-q", "-p", "mqks.celery.control", "-p", "no:cacheprovider", "--timeout=200"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *(f"t/unit/{each}" for each in FILES)],
        cwd=tmp_path / name,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


def test_a_worker_of_another_broker_does_what_it_did() -> None:
    subprocess.run([sys.executable, "-c", OTHER_BROKER], check=True, timeout=100)
