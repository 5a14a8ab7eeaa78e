"""Get the sources of packages whose own tests run here: no wheel has them.

    python -m tools.sdists

The one rule: a package that is installed is got in the version that is installed.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DIRECTORY = Path(sys.prefix) / "sdists"
OTHERWISE = {
    "kombu": "5.7.0",
    "celery": "5.7.0",
    "dramatiq": "2.2.1",
    "django": "6.1.3",
    "django-tasks-db": "0.13.0",
    "moto": "5.2.5",
    "taskiq": "0.13.0",
    "huey": "3.5.4",
}
"""The versions of those that are not installed. Django has tasks from 6.0."""


def wanted(name: str) -> str:
    try:
        found = version(name)
    except PackageNotFoundError:
        return OTHERWISE[name]
    return OTHERWISE[name] if name == "django" and int(found.partition(".")[0]) < 6 else found


def main() -> None:
    # Django's newest needs a newer Python than some of those that its tests run on here.
    which = ["--python-version", "3.14", "--no-binary", ",".join(OTHERWISE)]
    names = [f"{name}=={wanted(name)}" for name in OTHERWISE]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *which, *names]
    subprocess.run([*command, "--dest", DIRECTORY], check=True)


if __name__ == "__main__":
    main()
