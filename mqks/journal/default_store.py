"""The store that a server has unless it is given another."""

from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.store import OpenStore

open_store: OpenStore = SqliteStore.open
