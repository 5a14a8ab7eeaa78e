"""Tests of others on the backend of Django Tasks: what Django asks of any, and django-tasks-db of
its worker and results. Their files run unmodified (`tests/kit/django_suites.py`)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.postgres import Postgres
from tests.kit.server_process import ServerProcess
from tools.sdists import DIRECTORY

django = pytest.importorskip("django", reason="the extra django is not installed")
SUITES = Path(__file__).parents[1] / "kit/django_suites.py"

# Tests that do not apply, and the classes of which none does.
DJANGO = {
    "test_refresh_result": "changes a result within the backend, which has it in memory",
    "test_refresh_result_async": "the same",
    "test_cannot_get_result": "of a backend that cannot; ours can",
    "test_cannot_refresh_result": "the same",
    "test_cannot_pass_run_after": "the same",
    "test_throws_keyboard_interrupt": "a worker has no caller; it is a failure of the task",
    "ImmediateBackendTransactionTestCase": "a worker does not see what is not committed",
}
OF_DJANGO_TASKS = {
    "test_pickle_task": "django-tasks cannot: only Django 6 can",
    "test_pickle_task_result": "the same",
    "test_unpickle_arbitrary_string": "the same",
    "test_unpickle_non_task_object": "the same",
    "test_run_after_in_decorator": "django-tasks has another text",
    "test_validate_disallowed_async_task": "the same",
}
DJANGO_TASKS_DB = {
    "DatabaseTaskResultTestCase": "locks of rows, which are its queue",
    "ConnectionExclusiveTranscationTestCase": "the same",
    "DBTaskResultOrderingTestCase": "the order of rows, which are its queue",
    "test_index_scan_for_ready": "the same",
    "test_run_after_priority": "the same",
    "test_worker_with_locked_rows": "the same",
    "DatabaseBackendPruneTaskResultsTestCase": "its command: here results expire by a setting",
    "DatabaseWorkerProcessTestCase": "needs settings that its sources have not: test_django.py",
    "CompatTestCase": "its own module",
    "AdminTestCase": "its own admin: test_django.py",
    "test_doesnt_wait_until_transaction_commit": "a task of its option of that name",
    "test_database_backend_app_missing": "the name of its app: test_django.py",
    "test_custom_id_function": "its option id_function",
    "test_unknown_id_function": "the same",
    "test_postgres_db_id_function": "the same",
    "test_postgres_id_function_expression": "the same",
    "test_priority_range_check": "a check of its table; ours is that of Django",
    "test_refresh_result": "its rows have no last_attempted_at",
    "test_refresh_result_async": "the same",
    "test_run_after_null_0016_migration": "a migration of its table",
    "test_task_name": "a property of its rows",
    "DatabaseBackendTestCase.test_invalid_task_path": "the error of its rows; the worker's runs",
    "test_run_after": "sets the time in the row, where its queue has it",
    "test_process_all_queues_excluding_one_queue": "--exclude-queues",
    "test_exclude_queues_requires_processing_all_queues": "--exclude-queues",
    "test_excluding_unknown_queue_processes_selected_queues": "--exclude-queues",
    "test_negative_interval": "--interval: here nothing is polled",
    "test_infinite_interval": "--interval",
    "test_fractional_interval": "--interval",
    "test_zero_interval": "--interval",
    "test_max_tasks": "--max-tasks",
    "test_negative_max_tasks": "--max-tasks",
    "test_zero_max_tasks": "--max-tasks",
    "test_too_long_worker_id": "--worker-id",
    "test_empty_worker_id": "--worker-id",
    "test_incorrect_backend": "the text of its error",
    "test_verbose_logging": "lines of its log",
    "test_complex_return_value": "the text of the error, which Django's tests want otherwise",
}


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that leads a project to its database."""
    if request.param == "SQLite":
        yield {"TEST_DB": str(tmp_path / "db.sqlite3")}
        return
    with Postgres() as server:
        yield server.environment | {"TEST_DB": "postgres"}


def told(
    name: str, path: Path, database: dict[str, str], without: dict[str, str]
) -> dict[str, str]:
    """What became of each test that applies."""
    if not any(DIRECTORY.glob(f"{name.replace('-', '[-_]')}-*")):
        pytest.skip(f"the sources of {name} are not here: python -m tools.sdists gets them")
    with ServerProcess(path / "mqks.db") as server:
        environment = database | {"MQKS_URL": server.url}
        done = subprocess.run(
            [sys.executable, str(SUITES), name, str(path / "suite"), *without],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=250,
            check=True,
        )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_django(tmp_path: Path, database: dict[str, str]) -> None:
    without = DJANGO if django.VERSION >= (6,) else DJANGO | OF_DJANGO_TASKS
    found = told("django", tmp_path, database, without)
    assert {each: how for each, how in found.items() if how != "passed"} == {}
    assert len(found) > 60


@pytest.mark.slow
def test_django_tasks_db(tmp_path: Path, database: dict[str, str]) -> None:
    found = told("django-tasks-db", tmp_path, database, DJANGO_TASKS_DB)
    assert {each: how for each, how in found.items() if how != "passed"} == {}
    assert len(found) >= 30
