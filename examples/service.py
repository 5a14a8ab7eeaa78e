"""A service: functions for the messages of queues, until SIGTERM.

Start a broker first (`mqks serve`), then `python examples/service.py`.
"""

import logging

import mqks

RETRIES_MAX = 3

app = mqks.App()


@app.consumer("mailer", events=["user.created", "user.invited"], concurrency=10)
async def send_mail(message: mqks.Message) -> None:
    user = message.json()
    if "@" not in user["mail"]:
        if message.retry < RETRIES_MAX:
            raise ValueError(f"{user['mail']} is no address")
        print(f"gave up on {user['mail']}", flush=True)
        return
    print(f"mail to {user['mail']}", flush=True)
    await app.client.publish("mail.sent", user)


@app.consumer("counter", events=["mail.sent"])
async def count(message: mqks.Message) -> None:
    print(f"sent: {message.text}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    app.run()
