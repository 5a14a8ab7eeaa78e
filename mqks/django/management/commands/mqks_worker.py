"""`manage.py mqks_worker`."""

import os
import signal
import subprocess
import threading
import time
from argparse import ArgumentTypeError
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import autoreload

from mqks.django.backend import MqksBackend, brokers
from mqks.django.seam import task_backends
from mqks.django.worker import Worker, keep

RESTART_S = 0.5
RESTART_S_MAX = 30.0
"""The first and largest pause after a process is replaced; it doubles while they die soon."""


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ArgumentTypeError("must be at least 1")
    return count


class Command(BaseCommand):
    help = "Run the tasks of a backend of MQKS, until SIGTERM or SIGINT."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--backend", default="default", help="its name in TASKS")
        parser.add_argument("--queue", action="append", help="a queue; by default all of QUEUES")
        parser.add_argument("--processes", type=_count, default=1)
        parser.add_argument("--threads", type=_count, default=1, help="in each process")
        parser.add_argument("--reload", action="store_true", help="start again when code changes")
        parser.add_argument("--relay-only", action="store_true", help="only publish the outbox")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["reload"] and options["processes"] > 1:
            raise CommandError("--reload is for one process", returncode=2)
        if options["reload"]:
            autoreload.run_with_reloader(self._run, **options)
        else:
            self._run(**options)

    def _run(self, **options: Any) -> None:
        try:
            backend = task_backends[options["backend"]]
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=2) from None
        if not isinstance(backend, MqksBackend):
            text = f"the backend {options['backend']!r} is not MqksBackend"
            raise CommandError(text, returncode=2)
        stop = threading.Event()

        def signalled(*_: Any) -> None:
            if stop.is_set():  # A second one: tasks in progress return to their queues.
                os._exit(1)
            stop.set()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signalled)
        if options["processes"] > 1:
            self._supervise(options, stop)
            return
        if options["relay_only"]:
            keep(stop)
            _close()
            return
        names = options["queue"] or sorted(backend.queues)
        if not names:
            raise CommandError("QUEUES is empty: name queues by --queue", returncode=2)
        workers = [Worker(backend, name, options["threads"]) for name in names]

        def run(worker: Worker) -> None:
            try:
                worker.run(stop)
            finally:
                stop.set()  # One that cannot go on ends the process, with its traceback.

        work = [threading.Thread(target=run, args=(each,)) for each in workers]
        work.append(threading.Thread(target=keep, args=(stop,)))
        for thread in work:
            thread.start()
        self.stderr.write(f"runs tasks of {', '.join(names)}")
        for thread in work:
            thread.join()
        _close()

    def _supervise(self, options: dict[str, Any], stop: threading.Event) -> None:
        """Keep so many processes running."""
        command = [*autoreload.get_child_arguments(), "--processes=1"]
        children = list[subprocess.Popen[bytes]]()
        pause_s, started_s = RESTART_S, time.monotonic()
        while not stop.wait(RESTART_S if children else 0):
            children = [child for child in children if child.poll() is None]
            if len(children) == options["processes"]:
                continue
            if time.monotonic() - started_s > 2 * RESTART_S_MAX:
                pause_s = RESTART_S
            while len(children) < options["processes"]:
                children.append(subprocess.Popen(command))
            started_s = time.monotonic()
            stop.wait(pause_s)
            pause_s = min(pause_s * 2, RESTART_S_MAX)
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def _close() -> None:
    while brokers:
        brokers.popitem()[1][0].close()
