# Calls the service of prices.py (docs/cookbook.md, Request and reply).
import mqks

with mqks.blocking.connect() as client:
    for item in ("tea", "milk"):
        try:
            print(f"{item} costs {client.call('price.get', item, timeout_s=10).json()}")
        except mqks.CallFailed as error:
            print(f"{item}: {error.kind}")
        except mqks.ReplyTimeout:
            print(f"{item}: no reply")
