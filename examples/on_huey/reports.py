"""Reports on huey: a task that is tried again, one that runs later, a lock, and a periodic task.

Start a broker first (`mqks serve`), then in this directory a consumer (`huey_consumer
reports.huey -w 4`), and in another terminal `python monthly.py`. It needs `pip install
'.[huey]'` in a checkout.
"""

from typing import Any

from huey import crontab

from mqks.huey import MqksHuey

huey: Any = MqksHuey(
    "reports",  # The URL is in MQKS_URL, or the broker is on this machine.
    # A report that kills its worker is tried three times, and then kept for people to look at.
    policy={"losses": 3, "dead_letter_queue": "reports.dead"},
    store_intermediate_errors=False,  # What is tried again is no result.
)
tries = set[int]()


@huey.task(retries=5, retry_delay=1)
def render(month: int) -> str:
    if month not in tries:
        tries.add(month)
        raise ConnectionError("the database is busy")
    with huey.lock_task(f"month-{month}", ttl=600):  # Also of consumers on other machines.
        return f"report of month {month}"


@huey.task()
def remind(month: int) -> str:
    return f"month {month} ends"


@huey.periodic_task(crontab(minute="0", hour="3"))
def sweep() -> None:  # Once, however many consumers there are.
    print("old reports are gone", flush=True)
