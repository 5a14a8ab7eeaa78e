# Several processes of it share the jobs of a queue (docs/cookbook.md, Worker pool).
import os

import anyio

import mqks

app = mqks.App()


@app.consumer("thumbnails", concurrency=2)
async def make_thumbnail(message: mqks.Message) -> None:
    await anyio.sleep(0.05)  # The work.
    print(f"{os.getpid()} {message.text}", flush=True)


app.run()
