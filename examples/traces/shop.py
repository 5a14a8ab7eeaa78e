"""A service with traces: it takes orders and asks for mails.

Start a broker (`mqks serve`), this program, `python examples/traces/mailer.py`, and then
`mqks publish order.new '{"no": 17}'`. The spans of both programs have the same trace.
"""

from console import export

import mqks

app = mqks.App(options=mqks.Options(tracing=True))


@app.consumer("orders", events=["order.new"])
async def order(message: mqks.Message) -> None:
    await app.client.publish("mail.due", {"order": message.json()["no"]}, confirm=True)


if __name__ == "__main__":
    export("shop")
    app.run()
