"""Dead letters: a message that fails too often is moved to another queue, and back after a fix.

Start a broker first (`mqks serve`), then `python examples/dead_letters.py`.
"""

import mqks

prices = {"tea": 3}

with mqks.blocking.connect() as client:
    client.set_queue("shop", retries=2, dead_letter_queue="shop.dead")
    with client.consume("shop", events=["shop.order"]) as consumer:
        client.publish("shop.order", "coffee")
        client.publish("shop.order", "tea", confirm=True)

        def sell(count: int) -> None:
            for _ in range(count):
                message = consumer.receive(timeout_s=10)
                try:
                    with message.process():
                        print(f"{message.text}: {prices[message.text]}")
                except KeyError:
                    print(f"{message.text}: no price, try {message.retry + 1}")

        sell(3)
        with client.consume("shop.dead", meta=True) as dead_letters:
            dead = dead_letters.receive(timeout_s=10)
            if dead.dead_letter is not None:
                print(f"dead: {dead.text}, {dead.dead_letter.reason} in {dead.dead_letter.queue}")
        # It was not acked, so it is still there.

        prices["coffee"] = 4
        print(f"{client.redrive('shop.dead')} redriven")
        sell(1)
    for queue in ("shop", "shop.dead"):
        client.delete_queue(queue)
