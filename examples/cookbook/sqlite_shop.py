# An order and its message in one transaction of SQLite (docs/cookbook.md, Outbox in SQLite).
import json
import sqlite3
import sys

if len(sys.argv) != 2:
    sys.exit("usage: python sqlite_shop.py ITEM")
db = sqlite3.connect("shop.db")
db.executescript("""
    CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS outbox (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE DEFAULT (lower(hex(randomblob(16)))),
        event TEXT NOT NULL,
        data TEXT NOT NULL
    );
""")
with db:  # One transaction: the order and its message.
    order = db.execute("INSERT INTO orders (item) VALUES (?)", [sys.argv[1]]).lastrowid
    data = json.dumps({"order": order, "item": sys.argv[1]})
    db.execute("INSERT INTO outbox (event, data) VALUES ('order.placed', ?)", [data])
db.close()
