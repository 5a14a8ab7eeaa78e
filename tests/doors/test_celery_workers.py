"""Workers of Celery on a real server: what they do when things end, fail and come back."""

import json
import os
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqks import blocking, users_file
from mqks.testing import Broker
from mqks.users import User, hash_password, hash_token
from tests.kit.ports import free_port
from tests.kit.proxy import Proxy
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until
from tests.kit.workers import CeleryWorkers as Workers
from tests.server.test_tls import with_tls

pytest.importorskip("celery")

from mqks.celery.control import ASKED_MAX, SCHEDULED_MAX
from mqks.celery.transport import pipelined

# What Celery leaves open.
pytestmark = [
    pytest.mark.usefixtures("collected"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TOKEN = "0123456789abcdef"
QUIET = "--without-mingle", "--without-gossip"


@pytest.fixture
def workers(
    mqks_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workers]:
    with Workers(tmp_path, BROKER=mqks_broker.url).running(monkeypatch) as running:
        yield running


def unacked(url: str, queue: str = "celery") -> int:
    with blocking.connect(url) as client:
        return int(client.stats("queue", queue)["unacked"])


@pytest.mark.slow
def test_a_worker(workers: Workers) -> None:
    from celery import chord

    tasks = workers.tasks
    workers.start()
    assert tasks.add.delay(1, 2).get(timeout=WAIT_S) == 3
    assert tasks.add.apply_async((3, 4), countdown=1).get(timeout=WAIT_S) == 7
    assert chord([tasks.add.s(i, i) for i in range(5)])(tasks.total.s()).get(timeout=WAIT_S) == 20
    (answer,) = tasks.app.control.ping(timeout=10, limit=1)
    assert [*answer.values()] == [{"ok": "pong"}]
    assert tasks.app.control.inspect(timeout=10, limit=1).active_queues()
    for _ in range(20):  # The replies of all have one queue.
        assert tasks.app.control.inspect(timeout=10, limit=1).stats()
    events: list[str] = []

    def seen_event(event: dict[str, Any]) -> None:
        events.append(event["type"])
        if event["type"] == "task-succeeded":
            receiver.should_stop = True

    with tasks.app.connection() as connection:
        receiver = tasks.app.events.Receiver(connection, handlers={"*": seen_event})
        tasks.add.apply_async((1, 1), countdown=2)
        receiver.capture(limit=None, timeout=WAIT_S, wakeup=False)
    assert {"task-received", "task-started", "task-succeeded"} <= {*events}


@pytest.mark.parametrize("pool", ["threads", pytest.param("gevent", marks=pytest.mark.slow)])
def test_many_at_once(workers: Workers, pool: str) -> None:
    worker = workers.start("-P", pool, "-c", "4", *QUIET)
    names = [*map(str, range(50))]
    for name in names:
        workers.tasks.note.delay(str(workers.path / "notes"), name)
    workers.noted(*names)
    workers.stop(worker)
    assert {*workers.notes().values()} == {1}


@pytest.mark.slow
def test_results_by_rpc(
    mqks_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery import group

    with Workers(tmp_path, BROKER=mqks_broker.url, RESULTS="rpc://").running(
        monkeypatch
    ) as workers:
        workers.start("-c", "2", *QUIET)
        add = workers.tasks.add
        assert add.delay(1, 2).get(timeout=WAIT_S) == 3
        sums = group(add.s(i, i) for i in range(20))().get(timeout=WAIT_S)
        assert sums == [2 * i for i in range(20)]
        with pytest.raises(TypeError):
            add.delay(1, "a").get(timeout=WAIT_S)


@pytest.mark.slow
def test_revoked_tasks_do_not_run(workers: Workers) -> None:
    """Neither one that waits, also for its ETA, nor, with `terminate`, one that runs."""
    tasks, notes = workers.tasks, str(workers.path / "notes")
    workers.start("-c", "1", *QUIET)
    running = tasks.hold.delay(notes, "never")
    workers.noted("begun")
    waiting = tasks.note.delay(notes, "waited")
    later = tasks.note.apply_async((notes, "later"), countdown=2)
    tasks.app.control.revoke([waiting.id, later.id])
    tasks.app.control.revoke(running.id, terminate=True, signal="SIGKILL")
    tasks.note.apply_async((notes, "last"), countdown=3)
    workers.noted("last")
    assert workers.notes() == {"begun": 1, "last": 1}
    assert (waiting.state, later.state, running.state) == ("REVOKED",) * 3


@pytest.mark.slow
def test_what_waits_in_the_server_is_inspected(workers: Workers, mqks_broker: Broker) -> None:
    """A bounded number of tasks, soonest first, of the queues of the worker."""
    tasks, path = workers.tasks, str(workers.path / "notes")
    workers.start("-P", "threads", "-c", "1", "-Q", "celery,second", *QUIET)
    ids = dict[int, str]()
    for hours in (3, 1, 2, 4):
        queue = "second" if hours == 1 else "celery"
        how = {"countdown": hours * 3600, "queue": queue, "priority": hours}
        ids[hours] = tasks.note.apply_async((path, f"{hours}"), **how).id
    with blocking.connect(mqks_broker.url) as client:
        client.publish(".celery", "no task", delay_s=60, confirm=True)
        inspect = tasks.app.control.inspect(timeout=10, limit=1)
        for told in (inspect.scheduled, lambda: inspect._request("dump_schedule")):
            ((_, found),) = told().items()
            assert [each["request"]["id"] for each in found] == [ids[each] for each in (1, 2, 3, 4)]
            assert [each["priority"] for each in found] == [1, 2, 3, 4]
            assert found == sorted(found, key=lambda each: str(each["eta"]))
        assert found[0]["request"]["name"] == tasks.note.name
        assert found[0]["request"]["args"] == repr((path, "1"))
        assert found[0]["request"]["delivery_info"]["routing_key"] == "second"
        with (
            tasks.app.producer_pool.acquire(block=True) as producer,
            pipelined(producer),
        ):
            for minutes in range(150, 0, -1):
                tasks.note.apply_async((path, "x"), countdown=60 * minutes, producer=producer)
        ((_, found),) = inspect.scheduled().items()
        assert len(found) == SCHEDULED_MAX
        assert found == sorted(found, key=lambda each: str(each["eta"]))
        assert client.stats("queue", "celery")["scheduled"] == 154


@pytest.mark.slow
def test_what_is_revoked_leaves_the_server(workers: Workers, mqks_broker: Broker) -> None:
    """Of several workers each tries; also a task of several calls, and many at once."""
    tasks, path = workers.tasks, str(workers.path / "notes")
    for number in range(2):
        workers.start("-P", "threads", "-c", "1", "-n", f"w{number}", *QUIET)
    with blocking.connect(mqks_broker.url) as client:

        def scheduled() -> int:
            return int(client.stats("queue", "celery")["scheduled"])

        for id_ in ("one", "two words #*", "two", "x" * 210):
            for _ in range(2):
                tasks.note.apply_async((path, id_), countdown=3600, task_id=id_)
        events = list[dict[str, Any]]()

        def seen_event(event: dict[str, Any]) -> None:
            events.append(event)
            receiver.should_stop = True

        with tasks.app.connection() as connection:
            receiver = tasks.app.events.Receiver(connection, handlers={"task-revoked": seen_event})
            revoke = partial(tasks.app.control.revoke, "two words #*")
            receiver.on_consume_ready = lambda *_, **__: revoke()
            receiver.capture(limit=None, timeout=WAIT_S, wakeup=False)
        assert [each["uuid"] for each in events] == ["two words #*"]
        until(lambda: scheduled() == 6)
        assert tasks.app.AsyncResult("two words #*").state == "REVOKED"
        # What has a long id stays; a worker that gets it does not run it.
        tasks.app.control.revoke(["one", "unknown", "x" * 210])
        until(lambda: scheduled() == 4)
        left = [each.id.partition("#")[0] for each in client.peek("celery", scheduled=True)]
        assert left[:2] == ["two"] * 2
        client.purge("celery", scheduled=True)
        many = [str(number) for number in range(ASKED_MAX + 50)]
        with tasks.app.producer_pool.acquire(block=True) as producer, pipelined(producer):
            for id_ in many:
                tasks.note.apply_async((path, id_), countdown=3600, task_id=id_, producer=producer)
        tasks.app.control.revoke(many)
        until(lambda: scheduled() == 0)


@pytest.mark.slow
def test_a_cold_shutdown_returns_what_runs(workers: Workers) -> None:
    tasks, gate = workers.tasks, workers.path / "gate"
    worker = workers.start("-c", "1", *QUIET)
    tasks.hold.delay(str(workers.path / "notes"), str(gate))
    workers.noted("begun")
    workers.stop(worker, signal.SIGQUIT)
    assert "done" not in workers.notes()
    gate.touch()
    workers.start("-c", "1", *QUIET)
    workers.noted("done")
    assert workers.notes() == {"begun": 2, "done": 1}


@pytest.mark.slow
def test_a_task_whose_process_died_runs_again(workers: Workers) -> None:
    path = workers.path / "notes"
    workers.start("-c", "1", *QUIET)
    workers.tasks.die_once.delay(str(path))
    workers.noted("done")
    assert workers.notes() == {"begun": 2, "done": 1}


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["solo", "prefork", "threads"])
def test_a_task_may_be_longer_than_heartbeats(
    mqks_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    """The connection is that of the start, also when a warm shutdown waits for the last task."""
    environment = {"BROKER": mqks_broker.url, "HEARTBEAT": "1"}
    with Workers(tmp_path, **environment).running(monkeypatch) as workers:
        worker = workers.start("-P", pool, "-c", "1", *QUIET)
        for _ in range(3):
            workers.tasks.sleep.delay(4, str(workers.path / "notes"))
        until(lambda: workers.notes()["begun"] == 3)
        workers.stop(worker)
        assert workers.notes() == {"begun": 3, "done": 3}
        with blocking.connect(mqks_broker.url) as client:
            stats = client.stats("queue", "celery")
        assert (stats["ready"], stats["unacked"]) == (0, 0)
        assert "nothing was received" not in workers.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["gevent", "solo", "threads", "prefork"])
def test_a_worker_consumes_again_after_a_loss(
    mqks_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    """Whoever notices it first: here the ack of a task."""
    with (
        Proxy(mqks_broker.port) as proxy,
        Workers(tmp_path, BROKER=proxy.url).running(monkeypatch) as workers,
    ):
        worker = workers.start("-P", pool, "-c", "1", *QUIET)
        path, gate = str(tmp_path / "notes"), tmp_path / "gate"
        for number in range(3):
            workers.tasks.hold.delay(path, str(gate))
            until(lambda: workers.notes()["begun"] > workers.notes()["done"])
            os.kill(worker.pid, signal.SIGSTOP)
            proxy.cut()
            gate.touch()
            os.kill(worker.pid, signal.SIGCONT)
            workers.tasks.note.apply_async((path, f"{number}"), retry_policy={"max_retries": 9})
            workers.noted(f"{number}", "done")
            until(lambda: unacked(mqks_broker.url) == 0)
            gate.unlink()


@pytest.mark.slow
def test_an_eta_needs_no_worker(workers: Workers, mqks_broker: Broker) -> None:
    """Tasks of next week take no prefetch, and those that are due while no worker runs wait."""
    tasks, path = workers.tasks, str(workers.path / "notes")
    worker = workers.start("-c", "1", *QUIET)
    for number in range(20):
        tasks.note.apply_async((path, f"week-{number}"), countdown=7 * 86400)
    soon = [f"soon-{number}" for number in range(5)]
    for name in soon:
        tasks.note.apply_async((path, name), countdown=4)
    tasks.note.delay(path, "now")
    workers.noted("now")
    until(lambda: unacked(mqks_broker.url) == 0)
    workers.kill(worker)
    worker = workers.start("-c", "1", *QUIET)
    workers.stop(worker)
    with blocking.connect(mqks_broker.url) as client:
        until(lambda: client.stats("queue", "celery")["scheduled"] == 20)
    workers.start("-c", "1", *QUIET)
    workers.noted(*soon)
    assert workers.notes() == dict.fromkeys(["now", *soon], 1)


@pytest.mark.slow
def test_prefetch_changes_while_a_worker_runs(workers: Workers, mqks_broker: Broker) -> None:
    tasks, gate, path = workers.tasks, workers.path / "gate", workers.path / "notes"
    worker = workers.start("-c", "1", *QUIET)
    for _ in range(9):
        tasks.hold.delay(str(path), str(gate))
    until(lambda: workers.notes()["begun"] == 1)
    until(lambda: unacked(mqks_broker.url) == 1)
    assert tasks.app.control.pool_grow(3, reply=True, limit=1)
    until(lambda: unacked(mqks_broker.url) == 4)
    until(lambda: workers.notes()["begun"] == 4)
    assert tasks.app.control.pool_shrink(2, reply=True, limit=1)
    gate.touch()
    until(lambda: workers.notes()["done"] == 9)
    workers.stop(worker)
    assert workers.notes() == {"begun": 9, "done": 9}


@pytest.mark.slow
def test_queues_come_and_go_while_a_worker_runs(workers: Workers) -> None:
    tasks, path = workers.tasks, str(workers.path / "notes")
    workers.start("-c", "1", "-Q", "celery,second", *QUIET)
    tasks.note.apply_async((path, "a"), queue="second")
    workers.noted("a")
    assert tasks.app.control.add_consumer("third", reply=True, limit=1)
    tasks.note.apply_async((path, "b"), queue="third")
    workers.noted("b")
    assert tasks.app.control.cancel_consumer("third", reply=True, limit=1)
    tasks.note.apply_async((path, "c"), queue="third")
    tasks.note.apply_async((path, "d"), queue="second")
    workers.noted("d")
    assert "c" not in workers.notes()
    with tasks.app.connection() as connection:
        declared = connection.default_channel.queue_declare("third", passive=True)
        assert (declared.message_count, declared.consumer_count) == (1, 0)
        assert connection.default_channel.queue_purge("third") == 1


@pytest.mark.slow
@pytest.mark.parametrize("who", [TOKEN, "ann:p%40ss"])
def test_users_over_tls(
    who: str, tls_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: dict[str, Any] = {key: ["**"] for key in ("publish", "consume", "bind")}
    password = hash_password("p@ss", bytes(16))
    ann = User("ann", password, token=hash_token(TOKEN), **masks)
    users_file.write(tmp_path / "users", [ann])
    context, flags = with_tls(tmp_path, tls_port)
    authority = tmp_path / "authority.pem"
    authority.write_bytes(
        "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True))).encode()
    )
    flags = tuple(flag for flag in flags if flag != "--insecure")
    flags += ("--users", str(tmp_path / "users"), "--auth", "always")
    with ServerProcess(tmp_path / "db", *flags):
        url = f"mqkss://{who}@127.0.0.1:{tls_port}"
        environment = {"BROKER": url, "BROKER_CA": str(authority)}
        with Workers(tmp_path, **environment).running(monkeypatch) as workers:
            workers.start("-c", "1")
            assert workers.tasks.add.delay(1, 2).get(timeout=WAIT_S) == 3
            assert workers.tasks.app.control.ping(timeout=10, limit=1)
            later = workers.tasks.add.apply_async((1, 2), countdown=3600)
            ((_, (told,)),) = workers.tasks.app.control.inspect(timeout=10).scheduled().items()
            assert told["request"]["id"] == later.id
        environment["BROKER"] = f"mqkss://wrong@127.0.0.1:{tls_port}"
        (tmp_path / "wrong").mkdir()
        with Workers(tmp_path / "wrong", **environment).running(monkeypatch) as workers:
            worker = workers.celery("worker", "-c", "1")
            assert worker.wait(WAIT_S) != 0
            assert "the server refused the credentials" in workers.log.read_text()


@pytest.mark.slow
def test_fail_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of two servers runs has the workers."""
    with ServerProcess(tmp_path / "a") as first, ServerProcess(tmp_path / "b") as second:
        second.kill()
        url = f"{first.url};{second.url}"
        with Workers(tmp_path, BROKER=url).running(monkeypatch) as workers:
            workers.start("-c", "1", *QUIET)
            note, path = workers.tasks.note, str(tmp_path / "notes")
            policy = {"max_retries": 100, "interval_start": 0.1, "interval_max": 1}
            for number, (old, new) in enumerate([(first, second), (second, first)]):
                note.apply_async((path, f"a{number}"), retry_policy=policy)
                workers.noted(f"a{number}")
                old.kill()
                new.start()
                note.apply_async((path, f"b{number}"), retry_policy=policy)
                workers.noted(f"b{number}")
                assert workers.tasks.app.control.ping(timeout=10, limit=1)


@pytest.mark.slow
def test_flower(workers: Workers) -> None:
    pytest.importorskip("flower")
    workers.environment["FLOWER_UNAUTHENTICATED_API"] = "true"
    worker = workers.start("-c", "1")
    port = free_port()
    workers.celery("flower", f"--port={port}", "--address=127.0.0.1")

    def asked(path: str, data: bytes | None = None) -> Any:
        with suppress(urllib.error.URLError, ConnectionError):
            url = f"http://127.0.0.1:{port}/api/{path}"
            with urllib.request.urlopen(url, data, timeout=WAIT_S) as answer:
                return json.load(answer)

    name = next(iter(until(lambda: asked("workers?refresh=1"))))
    later = workers.tasks.add.apply_async((1, 2), countdown=3600)
    told = until(lambda: asked(f"workers?refresh=1&workername={name}")[name].get("scheduled"))
    assert [each["request"]["id"] for each in told] == [later.id]
    task = workers.tasks.add.delay(1, 2)
    until(lambda: (asked("tasks") or {}).get(task.id, {}).get("state") == "SUCCESS")
    assert asked(f"task/info/{task.id}")["result"] == "3"
    assert "Growing" in asked(f"worker/pool/grow/{name}?n=1", b"")["message"]
    asked(f"worker/shutdown/{name}", b"")
    assert worker.wait(WAIT_S) == 0


@pytest.mark.slow
def test_time_limits(workers: Workers) -> None:
    tasks = workers.tasks
    workers.start("-c", "1", *QUIET)
    assert tasks.softly.delay(str(workers.path / "notes")).get(timeout=WAIT_S) == "in time"
    with pytest.raises(Exception, match="TimeLimitExceeded"):
        tasks.hardly.delay().get(timeout=WAIT_S)
    assert tasks.add.delay(1, 2).get(timeout=WAIT_S) == 3
    assert workers.notes() == {"soft": 1}


@pytest.mark.slow
def test_rate_limits(workers: Workers, mqks_broker: Broker) -> None:
    tasks, path = workers.tasks, str(workers.path / "notes")
    workers.start("-c", "2", *QUIET)
    for _ in range(3):
        tasks.rated.delay(path)
    until(lambda: len(workers.notes()) == 1)
    until(lambda: unacked(mqks_broker.url) == 2)  # The worker has them, and does not run them.
    assert len(workers.notes()) == 1
    (answer,) = tasks.app.control.rate_limit(tasks.rated.name, "1000/s", reply=True, limit=1)
    assert [*answer.values()] == [{"ok": "new rate limit set successfully"}]
    until(lambda: len(workers.notes()) == 3)
