"""The session ledger: who needs which chunk, and what follows from it."""

from kvbus.memory.config import MemoryConfig, load_config
from kvbus.memory.ledger import Closed, Ledger, Switched, Totals, Turn, TurnStatus

__all__ = ["Closed", "Ledger", "MemoryConfig", "Switched", "Totals", "Turn", "TurnStatus", "load_config"]
