# Splits, encodes and joins films (docs/cookbook.md, A pipeline of three steps).
import mqks

app = mqks.App()


@app.consumer("films", concurrency=5)
async def step(message: mqks.Message) -> None:
    film = message.text
    if message.event == "film.join":
        await app.client.publish("film.ready", film, id=film, once=True, confirm=True)
        return
    async with app.client.batch(f"{film}.parts", then=("film.join", film)) as parts:
        for part in range(8):
            name = f"{film}/{part}"
            await parts.publish("part.encode", name, id=name, once=True)


@app.consumer("parts", concurrency=10)
async def encode(message: mqks.Message) -> None:
    print(f"encoded {message.text}", flush=True)


app.run()
