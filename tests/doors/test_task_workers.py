"""Workers of libraries of tasks on a real server: what becomes of their tasks when workers and
server are killed, told to end, and die of a task."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from mqks import blocking
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until
from tests.kit.workers import WorkerGroup

# What Celery leaves open.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
COUNT = 1000


class Crew(WorkerGroup):
    """Workers of a library. Its tasks are `note`, `hold` and `die` of the module `tasks`."""

    queue: str
    word: bytes
    """In the log of a worker that listens."""
    one: tuple[str, ...] = ()
    """Flags of a worker that runs one task at a time."""
    ends_by = signal.SIGTERM
    holds_all = False
    """A worker that ends gives back what waits in it only when what runs has ended."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path, MQKS_URL=url)
        self.library = type(self).__name__.lower()
        pytest.importorskip(self.library, reason=f"the extra {self.library} is not installed")

    def running(self, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Self]:
        return self.seen(monkeypatch, f"tests.kit.{self.library}_tasks")

    def command(self, *flags: str) -> list[str]:
        raise NotImplementedError

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        return self.ready(self.word, *self.command(*flags))

    def send(self, task: str, *words: str) -> None:
        raise NotImplementedError

    def note(self, what: str) -> None:
        self.send("note", str(self.path / "notes"), what)


class Celery(Crew):
    queue, word, one = "celery", b" ready.", ("-c", "1")

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path, url)
        self.environment |= {"BROKER": url, "RESULTS": "cache+memory://"}

    def command(self, *flags: str) -> list[str]:
        words = "celery", "-A", self.tasks.__name__, "worker", "-l", "INFO"
        return [sys.executable, "-m", *words, *(flags or ("-c", "2"))]

    def send(self, task: str, *words: str) -> None:
        policy = {"max_retries": 100, "interval_start": 0.1, "interval_max": 1}
        getattr(self.tasks, task).apply_async(words, retry_policy=policy)

    def close(self) -> None:
        self.tasks.app.close()


class Dramatiq(Crew):
    queue, word, one = "dramatiq.default", b"ready for action", ("-p", "1", "-t", "1")
    holds_all = True

    def command(self, *flags: str) -> list[str]:
        program = Path(sys.executable).with_name("dramatiq")
        return [str(program), self.tasks.__name__, *(flags or ("-p", "2", "-t", "4"))]

    def send(self, task: str, *words: str) -> None:
        getattr(self.tasks, task).send(*words)

    def close(self) -> None:
        self.tasks.broker.close()


class Huey(Crew):
    queue, word, one = "shop", b"consumer started", ("-w", "1")
    ends_by = signal.SIGINT

    def command(self, *flags: str) -> list[str]:
        program = Path(sys.executable).with_name("huey_consumer")
        return [str(program), f"{self.tasks.__name__}.huey", *(flags or ("-w", "4"))]

    def send(self, task: str, *words: str) -> None:
        getattr(self.tasks, task)(*words)

    def close(self) -> None:
        self.tasks.huey.storage.close()


class AsyncCrew(Crew):
    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Self]:
        with asyncio.Runner() as runner, super().running(monkeypatch) as running:
            self.runner = runner
            yield running

    def sent(self, task: str, *words: str) -> Awaitable[object]:
        raise NotImplementedError

    def send(self, task: str, *words: str) -> None:
        self.together((task, *words))

    def together(self, *tasks: tuple[str, ...]) -> None:
        async def send() -> None:
            await asyncio.gather(*(self.sent(*each) for each in tasks))

        self.runner.run(send())

    def note(self, what: str) -> None:
        """Together with the others of its ten, at the last of them."""
        if what.endswith("9"):
            path = str(self.path / "notes")
            self.together(*(("note", path, f"{what[:-1]}{digit}") for digit in range(10)))


class Taskiq(AsyncCrew):
    queue, word, one = "taskiq", b"Listening started.", ("--max-async-tasks", "1")

    def command(self, *flags: str) -> list[str]:
        words = "taskiq", "worker", f"{self.tasks.__name__}:broker", "--workers", "1"
        return [sys.executable, "-m", *words, "--shutdown-timeout", "60", *flags]

    def sent(self, task: str, *words: str) -> Awaitable[object]:
        found: Awaitable[object] = getattr(self.tasks, task).kiq(*words)
        return found

    def close(self) -> None:
        self.runner.run(self.tasks.broker.shutdown())


class FastStream(AsyncCrew):
    queue, word = "hold", b"listening"

    def command(self, *flags: str) -> list[str]:
        return [sys.executable, "-m", self.tasks.__name__]

    async def sent(self, task: str, *words: str) -> None:
        await self.tasks.broker.connect()
        names = {"note": ("path", "what"), "hold": ("path", "gate"), "die": ()}[task]
        await self.tasks.broker.publish(dict(zip(names, words, strict=True)), task)

    def close(self) -> None:
        self.runner.run(self.tasks.broker.stop())


@pytest.fixture
def crew(
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Crew]:
    with request.param(tmp_path, server.url).running(monkeypatch) as running:
        yield running


def of(*crews: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("crew", crews, indirect=True)


def rests(server: ServerProcess, queue: str) -> None:
    """Wait until nothing is left of the queue."""
    with blocking.connect(server.url) as client:
        keys = "ready", "unacked", "scheduled"
        until(lambda: not any(client.stats("queue", queue)[key] for key in keys))


@of(Celery, Dramatiq, Huey, Taskiq, FastStream)
def test_no_task_is_lost(
    server: ServerProcess, crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    """While workers and the server are killed."""
    crew.work_on(server, COUNT, crew.note)
    rests(server, "note" if isinstance(crew, FastStream) else crew.queue)
    notes = crew.notes()
    assert len(notes) == COUNT
    with capsys.disabled():
        print(f"\n{COUNT} tasks of {crew.library}, {sum(notes.values()) - COUNT} ran again")


ENDS = [
    *(pytest.param(each, (), id=each.__name__) for each in (Celery, Dramatiq, Taskiq, FastStream)),
    *(pytest.param(Huey, ("-k", kind), id=kind) for kind in ("thread", "process", "greenlet")),
]


@pytest.mark.parametrize(("crew", "kind"), ENDS, indirect=["crew"])
def test_a_worker_that_is_told_to_end(
    server: ServerProcess, crew: Crew, kind: tuple[str, ...]
) -> None:
    """What runs ends first, and is acked; the rest is done by another worker meanwhile."""
    if "greenlet" in kind:
        pytest.importorskip("gevent")
        crew.environment["GREENLETS"] = "yes"
    held, gate = crew.path / "held", crew.path / "gate"
    first = crew.start(*crew.one, *kind)
    crew.send("hold", str(held), str(gate))
    until(lambda: crew.notes("held")["begun"])
    for number in range(4):
        crew.send("hold", str(crew.path / f"held{number}"), str(held))  # Its gate is there.
    first.send_signal(crew.ends_by)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(1)
    if crew.holds_all:
        gate.touch()
        assert first.wait(WAIT_S) == 0
    crew.start(*crew.one, *kind)
    for number in range(4):
        crew.noted("done", name=f"held{number}")
        assert crew.notes(f"held{number}") == {"begun": 1, "done": 1}
    gate.touch()
    assert first.wait(WAIT_S) == 0
    assert crew.notes("held") == {"begun": 1, "done": 1}
    rests(server, crew.queue)


@of(Huey, Taskiq, FastStream)
def test_a_task_that_kills_its_workers_is_a_dead_letter(server: ServerProcess, crew: Crew) -> None:
    with blocking.connect(server.url) as client:
        for queue in ("dead", "die"):  # Of FastStream, each handler has a queue.
            client.subscribe(queue, [queue])
        crew.send("die")
        workers = [crew.run(*crew.command())]

        def died() -> Any:
            if workers[-1].poll() is not None:  # Taskiq starts another process by itself.
                workers.append(crew.run(*crew.command()))
            return client.peek("dead")

        (letter,) = until(died)
        assert letter.dead_letter is not None
        assert (letter.dead_letter.reason, letter.dead_letter.tries) == ("losses", 4)


@of(Dramatiq)
def test_workers_on_gevent(crew: Crew) -> None:
    pytest.importorskip("gevent")
    names = [*map(str, range(50))]
    _, *words = crew.command("-p", "1", "-t", "20")
    crew.run(str(Path(sys.executable).with_name("dramatiq-gevent")), *words)
    for name in names:
        crew.note(name)
    crew.noted(*names)


@of(Huey)
def test_what_was_interrupted_runs_again(crew: Crew) -> None:
    gate = crew.path / "gate"
    first = crew.start("-w", "1", "-k", "process")
    crew.send("hold", str(crew.path / "held"), str(gate))
    until(lambda: crew.notes("held")["begun"])
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 0
    gate.touch()
    assert crew.notes("held") == {"begun": 1}
    crew.start()
    crew.noted("done", name="held")


@of(Huey)
def test_the_death_of_a_process_is_one_loss(crew: Crew) -> None:
    """Also if the server sees one of its connections end after the other."""
    gate, client = crew.path / "gate", crew.tasks.huey.storage.client
    worker = crew.start("-w", "8")
    crew.send("hold", str(crew.path / "held"), str(gate))
    until(lambda: crew.notes("held")["begun"])
    until(lambda: sum(each["prefetch"] for each in client.stats("consumers")) == 8)
    worker.send_signal(signal.SIGSTOP)
    while rows := [each for each in client.stats("consumers") if each["unacked"]]:
        client.request("close_connection", "--confirm", str(rows[0]["connection"]))
    crew.kill(worker)
    gate.touch()
    crew.start()
    crew.noted("done", name="held")


@of(Taskiq)
def test_schedules_and_results_outlive_a_kill(server: ServerProcess, crew: AsyncCrew) -> None:
    tasks, path = crew.tasks, str(crew.path / "notes")

    async def begin() -> str:
        await tasks.source.startup()
        note = tasks.note.kicker().with_schedule_id("beat")
        await note.schedule_by_interval(tasks.source, 1, path, "beat")
        task = await tasks.add.kiq(1, 2)
        await task.wait_result(timeout=WAIT_S)
        return str(task.task_id)

    worker = crew.start()
    task_id = crew.runner.run(begin())
    until(lambda: crew.notes()["beat"] >= 1)
    crew.kill(worker)
    server.kill()
    server.start()
    before = crew.notes()["beat"]
    crew.start()
    until(lambda: crew.notes()["beat"] >= before + 2)
    assert crew.runner.run(tasks.results.get_result(task_id)).return_value == 3
