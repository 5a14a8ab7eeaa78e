# Calls an API that limits its callers (docs/cookbook.md, A limited API).
import time

import anyio

import mqks

app = mqks.App()


@app.consumer("lookups", concurrency=10)
async def call(message: mqks.Message) -> None:
    print(f"{time.time():.3f} {message.text}", flush=True)
    await anyio.sleep(0.01)  # The call.


app.run()
