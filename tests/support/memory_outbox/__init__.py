"""An outbox in memory: the reference model for the Postgres store, and the store of simulations."""

from support.memory_outbox.database import MemoryOutbox, Transaction
from support.memory_outbox.store import MemoryStore

__all__ = ["MemoryOutbox", "MemoryStore", "Transaction"]
