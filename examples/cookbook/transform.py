# Makes two jobs of each order (docs/cookbook.md, Consume and produce).
import mqks

app = mqks.App()


@app.consumer("orders", atomic=True, concurrency=10)
async def transform(message: mqks.Message) -> None:
    order = message.json()
    message.publish("job.pack", {"order": order["id"], "items": order["items"]})
    message.publish("job.mail", {"order": order["id"], "to": order["mail"]})


app.run()
