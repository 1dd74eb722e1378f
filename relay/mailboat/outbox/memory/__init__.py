"""An outbox in memory: the model that the Postgres store is compared with, and what simulations run on."""

from mailboat.outbox.memory.database import MemoryOutbox, Transaction
from mailboat.outbox.memory.store import MemoryStore

__all__ = ["MemoryOutbox", "MemoryStore", "Transaction"]
