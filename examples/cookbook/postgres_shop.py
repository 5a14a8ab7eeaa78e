# An order and its message in one transaction (docs/cookbook.md, Outbox in PostgreSQL).
import json
import sys

import psycopg

if len(sys.argv) != 2:
    sys.exit("usage: python postgres_shop.py ITEM")

with psycopg.connect() as db:  # PGHOST, PGUSER, … ; one transaction, committed at the end.
    db.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text NOT NULL)")
    db.execute("""
        CREATE TABLE IF NOT EXISTS outbox (
            number bigserial PRIMARY KEY,
            id uuid NOT NULL UNIQUE DEFAULT gen_random_uuid(),
            event text NOT NULL,
            data text NOT NULL
        )
    """)
    item = sys.argv[1]
    row = db.execute("INSERT INTO orders (item) VALUES (%s) RETURNING id", [item]).fetchone()
    data = json.dumps({"order": row and row[0], "item": item})
    db.execute("INSERT INTO outbox (event, data) VALUES ('order.placed', %s)", [data])
