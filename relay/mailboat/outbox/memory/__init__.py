"""An outbox in memory: the reference model for the Postgres store, and the store of simulations."""

from mailboat.outbox.memory.database import MemoryOutbox, Transaction
from mailboat.outbox.memory.store import MemoryStore

__all__ = ["MemoryOutbox", "MemoryStore", "Transaction"]
