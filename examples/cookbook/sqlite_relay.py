# Publishes what is in the outbox (docs/cookbook.md, Outbox in SQLite).
import sqlite3
import time

import mqks

WAITING = "SELECT id, event, data FROM outbox ORDER BY number LIMIT 100"

db = sqlite3.connect("shop.db")
with mqks.blocking.connect() as client:
    while True:
        rows = db.execute(WAITING).fetchall()
        for id, event, data in rows:
            client.publish(event, data, id=id, once=True, mandatory=True, confirm=True)
        with db:
            db.executemany("DELETE FROM outbox WHERE id = ?", [row[:1] for row in rows])
        if not rows:
            time.sleep(0.1)
