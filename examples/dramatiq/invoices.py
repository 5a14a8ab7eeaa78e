"""Tasks of dramatiq: one that is tried again, one that runs later, and one whose letters are dead.

Start a broker first (`mqks serve`), then in this directory a worker (`dramatiq invoices`), and in
another terminal `python invoices.py`. It needs `pip install '.[dramatiq]'` in a checkout. At the
end `mqks redrive dramatiq.invoices.XQ` runs again what has failed for good.
"""

import random

import dramatiq

from mqks.dramatiq import MqksBroker

dramatiq.set_broker(MqksBroker())  # Its URL is in MQKS_URL, or it is on this machine.


@dramatiq.actor(queue_name="invoices", max_retries=10, min_backoff=50, max_backoff=500)
def send_invoice(number: int) -> None:
    if random.random() < 0.5:
        raise ConnectionError("the mail server is busy")
    print(f"invoice {number} is sent", flush=True)
    remind.send_with_options(args=(number,), delay=1000)


@dramatiq.actor(queue_name="invoices")
def remind(number: int) -> None:
    print(f"invoice {number} is due", flush=True)


@dramatiq.actor(queue_name="invoices", max_retries=0)
def charge(customer: str) -> None:
    raise ValueError(f"there is no customer {customer}")


if __name__ == "__main__":
    for number in range(3):
        send_invoice.send(number)
    charge.send("Ann")
    print("enqueued")
