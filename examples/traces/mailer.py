"""A service with traces: it sends the mails that `shop.py` asks for."""

from console import export
from opentelemetry import trace

import mqks

app = mqks.App(options=mqks.Options(tracing=True))
tracer = trace.get_tracer("mailer")


@app.consumer("mailer", events=["mail.due"])
async def mail(message: mqks.Message) -> None:
    with tracer.start_as_current_span("write the mail"):
        text = f"Your order {message.json()['order']} has arrived."
    print(text, flush=True)


if __name__ == "__main__":
    export("mailer")
    app.run()
