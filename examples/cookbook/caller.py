# Takes a permit for each call (docs/cookbook.md, Rate limit over all workers).
import time

import mqks


def take_permit(client: mqks.BlockingClient) -> str:
    with client.consume("permits", prefetch=1) as permits:
        permit = permits.receive()
        taken = time.time()
        permit.release(delay_s=1)
    return f"{permit.id} {taken:.6f}"


with (
    mqks.blocking.connect() as client,
    client.consume("calls", prefetch=1) as calls,
):
    for call in calls:
        with call.process():
            permit = take_permit(client)
            print(f"{permit} {call.text}", flush=True)  # The call.
