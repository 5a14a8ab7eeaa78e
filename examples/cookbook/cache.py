# Each process has a queue of its own (docs/cookbook.md, Fan-out by masks).
import secrets

import mqks

with mqks.blocking.connect() as client:
    queue = f"cache.{secrets.token_hex(8)}"
    with client.consume(queue, masks=["user.**"], delete_when_unused=60) as changes:
        print(f"listening on {queue}", flush=True)
        for change in changes:
            print(f"{change.event} {change.text}", flush=True)
            change.ack()
