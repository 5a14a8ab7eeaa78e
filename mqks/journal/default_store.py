"""The store that a server uses by default."""

from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.store import OpenStore

open_store: OpenStore = SqliteStore.open
