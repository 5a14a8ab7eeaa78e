"""`python -m benchmarks.tasks`: each library on the servers that are here, few tasks."""

import importlib.util
import subprocess
import sys

import pytest

LIBRARIES = "celery", "dramatiq", "huey", "taskiq"


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_round(library: str) -> None:
    pytest.importorskip(library)
    words = library, "--count", "20", "--rounds", "1", "--server", "mqks"
    command = [sys.executable, "-m", "benchmarks.tasks", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = done.stdout.splitlines()[-1]
    assert row.startswith(f"| {library} | MQKS | ")
    assert "not within" not in row


def test_what_is_not_here_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("huey") is None:
        pytest.skip("the extra huey is not installed")
    words = "huey", "--rounds", "0", "--server", "rabbitmq"
    subprocess.run([sys.executable, "-m", "benchmarks.tasks", *words], check=True)
    assert "without huey on RabbitMQ: huey has no storage" in capfd.readouterr().out
    wrong = subprocess.run([sys.executable, "-m", "benchmarks.tasks", "rq"], check=False)
    assert wrong.returncode == 2
