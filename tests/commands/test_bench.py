"""`mqks bench` from outside: it measures, checks what comes, and leaves nothing behind.

The one rule: nothing here looks at how long something took.
"""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from mqks.bench import WORKS
from mqks.commands import main
from tests.commands.console import Console
from tests.kit.line_client import LineClient
from tests.kit.proxy import WrongServer
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["bench", *(str(argument) for argument in arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def queues(server: ServerProcess) -> list[str]:
    with LineClient(server.address) as client:
        names: list[str] = json.loads(client.ask(b"v _eval state.queues").removeprefix(b"v ok "))
        return list(names)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("payload_bytes", [0, 100])
def test_a_work_tells_its_figures(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], work: str, payload_bytes: int
) -> None:
    url = server.url

    code, out, err = run(
        capsys, work, "--url", url, "--count", 400, "--payload-bytes", payload_bytes, "--json"
    )

    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["count"], told["payload_bytes"]) == (400, payload_bytes)
    assert list(told["works"]) == [work]
    assert all(value > 0 for value in told["works"][work].values())
    assert queues(server) == []


def test_the_table_tells_all_works(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQKS_URL", server.url)
    code, out, _ = run(capsys, "--count", 40)
    assert code == 0
    assert list(dict.fromkeys(line.split()[0] for line in out.splitlines()[1:])) == list(WORKS)


def test_over_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mqks.sock"
    with ServerProcess(tmp_path / "mqks.db", "--unix", str(path)):
        code, _, err = run(capsys, "acked", "--url", f"mqks+unix://{path}", "--count", 40)
    assert (code, err) == (0, "")


def test_a_server_that_dies_is_told(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, ended = LineClient(server.address), threading.Event()
    assert watch.ask(b"w consume --confirm watch mqks") == b"w ok "

    def kill_once_busy() -> None:
        while not ended.is_set() and watch.ask(b"v _eval len(state.queues)") == b"v ok 1":
            pass
        server.kill()

    killer = threading.Thread(target=kill_once_busy)
    killer.start()
    code, out, err = run(capsys, "latency", "--url", server.url, "--count", 1_000_000)
    ended.set()
    killer.join(WAIT_S)
    watch.close()

    assert (code, out) == (os.EX_UNAVAILABLE, "")
    assert err.startswith("mqks: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("work", "right", "wrong"),
    [
        ("stream", b" event=", b" evemt="),
        ("acked", b"a ok ", b"a error 0"),
        ("confirm", b"000000007 ok ", b"000000006 ok "),
        ("confirm-one", b"000000001 ok ", b"000000001 error 0"),
        ("fanout", b"xx\n", b"xy\n"),
        ("latency", b"000000001 event", b"000000000 event"),
    ],
)
def test_a_wrong_answer_is_noticed(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], work: str, right: bytes, wrong: bytes
) -> None:
    with WrongServer(server.port, right, wrong) as between:
        code, out, err = run(capsys, work, "--url", between.url, "--count", 60)
    assert (code, out) == (os.EX_UNAVAILABLE, "")
    assert err.startswith("mqks: the server has sent a wrong reply")
    assert queues(server) == []


def test_an_interrupt_leaves_no_queue_behind(server: ServerProcess, tmp_path: Path) -> None:
    with (
        WrongServer(server.port, b"000000000 ok \n", b"") as between,  # A confirm never comes.
        LineClient(server.address) as client,
        Console(tmp_path, between.url).start("bench", "confirm-one", "--timeout", WAIT_S) as bench,
    ):
        while client.ask(b"v _eval state.published") == b"v ok 0":
            assert bench.poll() is None
        bench.send_signal(signal.SIGINT)
        _, err = bench.communicate()
    assert bench.returncode != 0
    assert b"Traceback" not in err
    assert queues(server) == []
