# A worker that some messages kill (docs/cookbook.md, Poison messages).
import os

import mqks

app = mqks.App()


@app.consumer("documents", concurrency=1)
async def parse(message: mqks.Message) -> None:
    if message.text == "poison":
        os.abort()  # Stands for a crash.
    print(f"parsed {message.text}", flush=True)


app.run()
