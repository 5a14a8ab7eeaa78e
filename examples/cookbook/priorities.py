# A worker that asks its queues in order (docs/cookbook.md, Priorities by queues).
import time

import mqks


def next_job(urgent: mqks.BlockingConsumer, normal: mqks.BlockingConsumer) -> mqks.Message:
    while True:
        for consumer, timeout_s in ((urgent, 0), (normal, 0.05)):
            try:
                return consumer.receive(timeout_s)
            except TimeoutError:
                pass


with (
    mqks.blocking.connect() as client,
    client.consume("jobs.urgent", prefetch=2) as urgent,
    client.consume("jobs.normal", prefetch=1) as normal,
):
    while True:
        with next_job(urgent, normal).process() as job:
            time.sleep(0.02)  # The work.
            print(job.text, flush=True)
