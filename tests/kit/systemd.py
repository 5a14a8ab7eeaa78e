"""A real systemd for units, in namespaces of its own: what it changes is gone with it.

The one rule: of this machine it sees the files, and writes none of them: the root is an overlay.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tests.kit.waiting import until

PROGRAM: Final = Path("/lib/systemd/systemd")
# What would change the kernel, which is not in a namespace.
MASKED: Final = (
    *("systemd-sysctl", "systemd-modules-load", "systemd-binfmt", "systemd-remount-fs"),
    *("systemd-udevd", "systemd-udev-trigger", "systemd-tmpfiles-setup-dev"),
)
BOOT: Final = Path(__file__).with_suffix(".sh")


class SystemdMissing(Exception):
    """This machine, or its user, can't run one."""


class Systemd:
    """Runs from entry to exit. It has the units of this checkout, and `mqks` on its PATH."""

    def __init__(self, directory: Path) -> None:
        self._place = directory
        self._root = directory / "root"

    def __enter__(self) -> Self:
        if os.geteuid() or not PROGRAM.exists() or not shutil.which("nsenter"):
            raise SystemdMissing("only root can run a systemd in namespaces")
        checkout = Path(__file__).parents[2]
        packages = next(each for each in sys.path if each.endswith("site-packages"))
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        places = map(str, (self._place, sys.base_prefix, packages, checkout))
        spaces = ["--mount", "--pid", "--fork", "--uts", "--ipc", "--cgroup", "--kill-child"]
        self._process = subprocess.Popen(
            ["unshare", *spaces, "sh", str(BOOT), *places, python, " ".join(MASKED)],
            env={"container": "unshare", "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            until(self._is_up)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _is_up(self) -> bool:
        if self._process.poll() is not None:
            assert self._process.stdout
            raise SystemdMissing(self._process.stdout.read().decode())
        return bool(self._init) and self.run("systemctl", "is-active", "still.target") == "active"

    @property
    def _init(self) -> str:
        """The id of its first process, here."""
        pid = self._process.pid
        with suppress(OSError):
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
        return ""

    def run(self, *command: str, given: str | None = None) -> str:
        """What a command of root's in there prints."""
        entered = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--uts", "--ipc"]
        # In the directory of this process nothing would be found there.
        entered += ["--cgroup", f"--root=/proc/{self._init}/root", "env", "--chdir=/"]
        done = subprocess.run(
            [*entered, *command], input=given, capture_output=True, text=True, check=False
        )
        return (done.stdout + done.stderr).strip()

    def write(self, path: str, text: str, mode: str = "644") -> None:
        self.run("install", "-D", f"--mode={mode}", "/dev/stdin", path, given=text)

    def __exit__(self, *_: object) -> None:
        if self._init:
            os.kill(int(self._init), signal.SIGKILL)
        self._process.kill()
        self._process.communicate()
