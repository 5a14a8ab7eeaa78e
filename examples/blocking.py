"""The same without async: a consumer in the main thread, a publisher in another.

Start a broker first (`mqks serve`), then `python examples/blocking.py`.
"""

import threading

import mqks

with mqks.blocking.connect() as client:
    with client.consume("numbers", events=["number"]) as consumer:

        def publish() -> None:
            for number in range(10):
                client.publish("number", number)

        publisher = threading.Thread(target=publish)
        publisher.start()
        total = 0
        for message in consumer:
            with message.process():
                total += message.json()
                if message.json() == 9:
                    consumer.stop()
        publisher.join()
        print(f"the sum is {total}")
    client.delete_queue("numbers")
