"""OpenStack Swift with its S3 API, as processes on one directory: an object store that was not made
for tests. `pip install swift` in an environment whose `bin` is on PATH brings it.
"""

import shutil
import socket
import subprocess
from pathlib import Path

from tests.kit.ports import accepts
from tests.kit.waiting import until

USER = "lake:writer"
PARTS = "account", "container", "object", "proxy"
COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {directory}
devices = {directory}
user = root
workers = 0
mount_check = false
disable_fallocate = true
"""
PART = """
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""
PROXY = """
[pipeline:main]
pipeline = catch_errors cache s3api tempauth copy slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_{user} = {secret} .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
"""


def is_there() -> bool:
    return shutil.which("swift-proxy-server") is not None


class Swift:
    """`port` is that of the S3 API. Its one user is `USER`."""

    def __init__(self, directory: Path, secret: str) -> None:
        (directory / "disk").mkdir()
        hashes = "[swift-hash]\nswift_hash_path_suffix = x\n"
        policy = "[storage-policy:0]\nname = zero\ndefault = yes\n"
        (directory / "swift.conf").write_text(hashes + policy)
        with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in PARTS]
        ports = dict(zip(PARTS, (each.getsockname()[1] for each in with_ports), strict=True))
        for each in with_ports:
            each.close()
        for part, port in ports.items():
            text = COMMON.format(port=port, directory=directory)
            text += PROXY.format(user=USER.replace(":", "_"), secret=secret)
            if part != "proxy":
                text = COMMON.format(port=port, directory=directory) + PART.format(part=part)
                builder = ["swift-ring-builder", str(directory / f"{part}.builder")]
                device = f"r1z1-127.0.0.1:{port}/disk"
                for words in (["create", "4", "1", "1"], ["add", device, "1"], ["rebalance"]):
                    subprocess.run([*builder, *words], check=True, stdout=subprocess.DEVNULL)
            (directory / f"{part}.conf").write_text(text)
        self.port = ports["proxy"]
        self._processes = [
            subprocess.Popen(
                [f"swift-{part}-server", directory / f"{part}.conf"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for part in PARTS
        ]
        until(lambda: all(map(accepts, ports.values())))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
