# A job that publishes its next run before its work (docs/cookbook.md, Delayed and scheduled jobs).
import sys
import time

import mqks

PERIOD_S = float(sys.argv[1])


def schedule(client: mqks.BlockingClient, run: int) -> None:
    client.publish(
        "report.due", str(run), id=f"report-{run}", once=True, at=run * PERIOD_S, confirm=True
    )


with mqks.blocking.connect() as client:
    client.subscribe("reports", ["report.due"])
    schedule(client, int(time.time() / PERIOD_S) + 1)
    with client.consume("reports", prefetch=1) as due:
        for message in due:
            with message.process():
                run = int(message.text)
                schedule(client, max(run, int(time.time() / PERIOD_S)) + 1)
                print(f"report {run}", flush=True)  # The work.
