# Imports rows, and reports when all are done (docs/cookbook.md, A nightly import).
import sys

import mqks

app = mqks.App()
rows = int(sys.argv[1])


@app.consumer("nights")
async def begin(message: mqks.Message) -> None:
    night = message.id  # Of the tick: the same when it is delivered again.
    found = (("row.import", row) for row in range(rows))
    async with app.client.batch(night, then=("import.done", night), for_s=86_400) as batch:
        await batch.publish_many(found, id_prefix=night, once=True)


@app.consumer("rows", concurrency=100)
async def load(message: mqks.Message) -> None:
    if message.json() % 10_000 == 9_999:
        raise ValueError("a bad row")


@app.consumer("reports")
async def report(message: mqks.Message) -> None:
    told = message.meta
    print(f"{told['batch-total']} rows, {told['batch-dead']} failed", flush=True)


app.run()
