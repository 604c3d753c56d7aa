"""kvbus: joins an agent's memory system and an inference engine's KV cache over Redis streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbus.client import CommandHandle, KVBus
    from kvbus.errors import KVBusError
    from kvbus.settings import Settings, load_settings

__version__ = "0.1.0"
__all__ = ["CommandHandle", "KVBus", "KVBusError", "Settings", "__version__", "load_settings"]

_HOME = {
    "CommandHandle": "kvbus.client",
    "KVBus": "kvbus.client",
    "KVBusError": "kvbus.errors",
    "Settings": "kvbus.settings",
    "load_settings": "kvbus.settings",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: the publisher's and the workers' processes need no client.
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvbus' has no attribute {name!r}")
