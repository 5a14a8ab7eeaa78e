# Tries a call again after a growing pause (docs/cookbook.md, Retry with backoff).
import urllib.error
import urllib.request

from anyio import to_thread

import mqks

app = mqks.App()


def post(url: str, body: str) -> None:
    urllib.request.urlopen(url, body.encode(), timeout=10).close()


@app.consumer("webhooks", concurrency=10)
async def deliver(message: mqks.Message) -> None:
    hook = message.json()
    try:
        await to_thread.run_sync(post, hook["url"], hook["body"])
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise  # Temporary: rejected, and tried again later.
        message.reject(dead=True)  # Permanent: to the dead-letter queue now.


app.run()
