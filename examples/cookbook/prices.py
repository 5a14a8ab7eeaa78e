# A service that answers calls (docs/cookbook.md, Request and reply).
import mqks

PRICES = {"tea": 3, "coffee": 4}

app = mqks.App()


@app.consumer("prices", concurrency=10)
async def price(message: mqks.Message) -> int:
    return PRICES[message.text]


app.run()
