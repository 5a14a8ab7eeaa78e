# Books each payment once (docs/cookbook.md, Exactly-once effects).
import sqlite3

import mqks

db = sqlite3.connect("ledger.db")
db.executescript("""
    CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, balance INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS processed (
        id TEXT PRIMARY KEY, at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
    );
""")
NEW = "INSERT INTO processed (id) VALUES (?) ON CONFLICT DO NOTHING"
BOOK = """
    INSERT INTO accounts VALUES (:to, :amount)
    ON CONFLICT (name) DO UPDATE SET balance = balance + excluded.balance
"""

with mqks.blocking.connect() as client, client.consume("payments") as payments:
    for payment in payments:
        with payment.process(), db:  # The ack is sent when the transaction has ended.
            if db.execute(NEW, [payment.id]).rowcount:
                db.execute(BOOK, payment.json())
                print(f"booked {payment.text}", flush=True)
