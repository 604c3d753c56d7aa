"""The session ledger: who needs which chunk, and what follows from it."""

from kvbus.memory.config import MemoryConfig, load_config
from kvbus.memory.ledger import Begun, Closed, Ledger, Switched, Totals, Turn, TurnStatus
from kvbus.memory.service import MemoryService

__all__ = [
    "Begun",
    "Closed",
    "Ledger",
    "MemoryConfig",
    "MemoryService",
    "Switched",
    "Totals",
    "Turn",
    "TurnStatus",
    "load_config",
]
