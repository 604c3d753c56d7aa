"""kvbus: joins an agent's memory system and an inference engine's KV cache over Redis streams."""

__version__ = "0.1.0"
