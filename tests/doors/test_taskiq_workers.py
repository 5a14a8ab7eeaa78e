"""Workers of taskiq on a real server: what they do when things end, fail and come back."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqks import blocking
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until
from tests.kit.workers import WorkerGroup

pytest.importorskip("taskiq", reason="the extra taskiq is not installed")

MODULE = "tests.kit.taskiq_tasks"


class TaskiqWorkers(WorkerGroup):
    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """A worker that listens."""
        words = "taskiq", "worker", f"{MODULE}:broker", "--workers", "1", "--shutdown-timeout", "60"
        return self.ready(b"Listening started.", sys.executable, "-m", *words, *flags)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "db") as server:
        monkeypatch.setenv("MQKS_URL", server.url)
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        yield server


@pytest.fixture
def workers(server: ServerProcess, tmp_path: Path) -> Iterator[TaskiqWorkers]:
    with TaskiqWorkers(tmp_path, MQKS_URL=server.url) as running:
        yield running


@pytest.mark.slow
def test_no_task_is_lost(
    server: ServerProcess,
    workers: TaskiqWorkers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While workers and the server are killed."""
    from tests.kit import taskiq_tasks as tasks

    count, path = 2000, tmp_path / "notes"
    worker = workers.start()

    async def kick() -> None:
        nonlocal worker
        await tasks.broker.startup()
        for number in range(0, count, 10):
            numbers = range(number, number + 10)
            await asyncio.gather(*(tasks.note.kiq(str(path), str(each)) for each in numbers))
            if number in (count // 4, count // 2):
                await asyncio.to_thread(until, lambda: len(workers.notes()) >= number // 4)  # noqa: B023
                workers.kill(worker)
                worker = await asyncio.to_thread(workers.start)
            if number in (count // 5, count * 2 // 5, count * 4 // 5):
                server.kill()
                await asyncio.to_thread(server.start)
        await tasks.broker.shutdown()

    asyncio.run(kick())
    workers.kill(worker)
    workers.start()
    workers.noted(*map(str, range(count)))
    with capsys.disabled():
        print(f"\n{count} tasks, {sum(workers.notes().values()) - count} ran again")


@pytest.mark.slow
def test_a_task_that_kills_its_workers_is_a_dead_letter(
    server: ServerProcess, workers: TaskiqWorkers
) -> None:
    from tests.kit import taskiq_tasks as tasks

    async def kick() -> str:
        async with tasks.broker:
            return (await tasks.die.kiq()).task_id

    task_id = asyncio.run(kick())
    workers.start()  # Taskiq starts another one for each that has died.
    with blocking.connect(server.url) as client:
        client.subscribe("taskiq.dead", ["taskiq.dead"])
        (dead,) = until(lambda: client.peek("taskiq.dead"))
        assert dead.id.startswith(task_id)
        assert dead.dead_letter is not None
        assert (dead.dead_letter.reason, dead.dead_letter.tries) == ("losses", 4)


@pytest.mark.slow
def test_sigterm(server: ServerProcess, workers: TaskiqWorkers, tmp_path: Path) -> None:
    """What runs ends first, and is acked; the rest is done by another worker meanwhile."""
    from tests.kit import taskiq_tasks as tasks

    held, path, gate = tmp_path / "held", tmp_path / "notes", tmp_path / "gate"
    first = workers.start("--max-async-tasks", "1")

    async def kick() -> None:
        async with tasks.broker:
            await tasks.hold.kiq(str(held), str(gate))
            await asyncio.to_thread(until, lambda: workers.notes("held")["begun"])
            await asyncio.gather(*(tasks.note.kiq(str(path), f"{each}") for each in range(50)))

    asyncio.run(kick())
    first.send_signal(signal.SIGTERM)
    workers.start()
    until(lambda: len(workers.notes()) == 50)
    gate.touch()
    assert first.wait(WAIT_S) == 0
    assert workers.notes("held") == {"begun": 1, "done": 1}
    assert set(workers.notes().values()) == {1}
    with blocking.connect(server.url) as client:
        until(lambda: client.stats("queue", "taskiq")["unacked"] == 0)


@pytest.mark.slow
def test_schedules_and_results_outlive_a_kill(
    server: ServerProcess, workers: TaskiqWorkers, tmp_path: Path
) -> None:
    from tests.kit import taskiq_tasks as tasks

    path = tmp_path / "notes"

    async def begin() -> str:
        async with tasks.broker:
            await tasks.source.startup()
            note = tasks.note.kicker().with_schedule_id("beat")
            await note.schedule_by_interval(tasks.source, 1, str(path), "beat")
            task = await tasks.add.kiq(1, 2)
            await task.wait_result(timeout=WAIT_S)
            return task.task_id

    async def found(task_id: str) -> object:
        async with tasks.broker:
            return (await tasks.results.get_result(task_id)).return_value

    worker = workers.start()
    task_id = asyncio.run(begin())
    until(lambda: workers.notes()["beat"] >= 1)
    workers.kill(worker)
    server.kill()
    server.start()
    before = workers.notes()["beat"]
    workers.start()
    until(lambda: workers.notes()["beat"] >= before + 2)
    assert asyncio.run(found(task_id)) == 3
