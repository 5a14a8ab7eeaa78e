"""A service: functions for the messages of queues, until SIGTERM.

A message that fails repeatedly moves to a dead-letter queue, where it can be inspected. So does a
message that kills the process, without the other messages of the process.

Start a broker first (`mqks serve`), then `python examples/service.py`.
"""

import logging

import anyio

import mqks

app = mqks.App()


# One message at a time, so that the process holds no other one when it dies: all that it holds then
# counts as lost. Start the program several times to work on several messages at once.
@app.consumer("mailer", events=["user.created", "user.invited"], concurrency=1, prefetch=1)
async def send_mail(message: mqks.Message) -> None:
    user = message.json()
    if "@" not in user["mail"]:
        raise ValueError(f"{user['mail']} is no address")
    print(f"mail to {user['mail']}", flush=True)
    await app.client.publish("mail.sent", user)


@app.consumer("counter", events=["mail.sent"])
async def count(message: mqks.Message) -> None:
    print(f"sent: {message.text}", flush=True)


@app.consumer("mailer.dead")
async def tell(message: mqks.Message) -> None:
    letter = message.dead_letter
    if letter is not None:
        print(f"gave up after {letter.tries} tries ({letter.reason}): {message.text}", flush=True)


async def set_up() -> None:
    """A message is dead when its function has raised three times, with a pause between; or when
    the process has died three times while it worked on it, which no function can notice. A stop by
    SIGTERM and a restart of the broker do not count."""
    async with mqks.connect() as client:
        await client.set_queue(
            "mailer", retries=3, losses=3, backoff=(0.05, 60), dead_letter_queue="mailer.dead"
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    anyio.run(set_up)
    app.run()
