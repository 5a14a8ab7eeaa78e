# Fetches pages, and goes on when all of a site are there (docs/cookbook.md, Fan-out and fan-in).
import mqks

app = mqks.App()


@app.consumer("pages", concurrency=10)
async def fetch(message: mqks.Message) -> None:
    if message.text == "13":
        raise ValueError("there is no page 13")
    print(f"fetched {message.text}", flush=True)


@app.consumer("sites")
async def go_on(message: mqks.Message) -> None:
    print(f"{message.event} {message.text}", flush=True)


app.run()
