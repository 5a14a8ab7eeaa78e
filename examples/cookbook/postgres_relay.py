# Publishes what is in the outbox (docs/cookbook.md, Outbox in PostgreSQL).
import time

import psycopg

import mqks

WAITING = """
    SELECT id::text, event, data FROM outbox ORDER BY number LIMIT 100 FOR UPDATE SKIP LOCKED
"""

with mqks.blocking.connect() as client, psycopg.connect(autocommit=True) as db:
    while True:
        with db.transaction():
            rows = db.execute(WAITING).fetchall()
            for id, event, data in rows:
                client.publish(event, data, id=id, once=True, mandatory=True, confirm=True)
            db.execute("DELETE FROM outbox WHERE id = ANY(%s::uuid[])", [[row[0] for row in rows]])
        if not rows:
            time.sleep(0.1)
