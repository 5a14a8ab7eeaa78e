# A publisher that waits while its queue is full (docs/cookbook.md, At most N waiting).
import time

import mqks

with mqks.blocking.connect() as client:
    for number in range(150):
        while True:
            try:
                client.publish("upload.new", str(number), confirm=True)
                break
            except mqks.RequestFailed as error:
                print(f"{number}: {error.reason}", flush=True)
                time.sleep(0.1)
