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
BOOT: Final = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --rbind /dev dev
for each in run tmp; do mount -t tmpfs tmpfs "$each"; done
mkdir opt/python opt/packages opt/mqks
mount --rbind "$2" opt/python
mount --rbind "$3" opt/packages
mount --rbind "$4" opt/mqks
rm -rf etc/systemd/system/*.wants etc/systemd/system/mqks*
for each in $6; do ln -sf /dev/null "etc/systemd/system/$each.service"; done
printf '[Unit]\\nDefaultDependencies=no\\n' > etc/systemd/system/still.target
cp opt/mqks/deploy/mqks.s* etc/systemd/system/
cat > usr/local/bin/mqks <<END
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/mqks:/opt/packages
exec /opt/python/bin/$5 /opt/mqks/cli.py "\\$@"
END
chmod 755 usr/local/bin/mqks
# Not by chroot, in which nobody may make user namespaces.
mkdir old
pivot_root . old
umount -l old
rmdir old
# Credentials are mounted by a child, and are seen by way of that.
mount --make-rshared /
exec /lib/systemd/systemd --system --unit=still.target --show-status=no
"""


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
            ["unshare", *spaces, "sh", "-c", BOOT, "boot", *places, python, " ".join(MASKED)],
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
