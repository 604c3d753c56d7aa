"""What running prefetches hold: references, loads in progress, pins of their own. Evicts look here first."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

from worker_plugin.lmcache_access import DiskEntry, MemoryObject


class Load:
    """A chunk being read. An evict of the chunk cancels it, and then it is not brought back."""

    __slots__ = ("cancelled", "reserved")

    def __init__(self) -> None:
        self.cancelled = False
        self.reserved = 0


class Hold:
    """References that keep a chunk in DDR while the session that loaded it runs."""

    __slots__ = ("objects", "owner", "size")

    def __init__(self, owner: object, objects: Sequence[MemoryObject], size: int) -> None:
        self.owner = owner
        self.objects = objects
        self.size = size


class Ledger:
    """Shared by all sessions and evicts of one engine.

    guard: must be held for every method except those on pins, and is taken before any lock of LMCache's; putting a
    chunk into DDR and removing it both happen under it, so that neither can slip between the other's steps.
    """

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self._loads: dict[Hashable, list[Load]] = {}
        self._holds: dict[Hashable, list[Hold]] = {}
        self._pins: dict[int, int] = {}
        self.held_bytes = 0

    def begin(self, ident: Hashable) -> Load:
        load = Load()
        self._loads.setdefault(ident, []).append(load)
        return load

    def reserve(self, load: Load, size: int, limit: int) -> bool:
        """Set `size` bytes of DDR aside for a load; False where all sessions together would hold more than `limit`."""
        if self.held_bytes + size > limit:
            return False
        self.held_bytes += size
        load.reserved += size
        return True

    def end(self, ident: Hashable, load: Load) -> None:
        loads = self._loads[ident]
        loads.remove(load)
        if not loads:
            del self._loads[ident]
        self.held_bytes -= load.reserved
        load.reserved = 0

    def hold(self, ident: Hashable, owner: object, objects: Sequence[MemoryObject], size: int) -> None:
        """Keep references that the caller has taken already."""
        self._holds.setdefault(ident, []).append(Hold(owner, objects, size))
        self.held_bytes += size

    def holds(self, ident: Hashable, owner: object) -> bool:
        return any(hold.owner is owner for hold in self._holds.get(ident, ()))

    def release(self, owner: object, idents: Sequence[Hashable]) -> list[MemoryObject]:
        """End an owner's holds; the caller gives the returned references back."""
        objects: list[MemoryObject] = []
        for ident in idents:
            holds = self._holds.get(ident, [])
            objects += self._drop([hold for hold in holds if hold.owner is owner])
            left = [hold for hold in holds if hold.owner is not owner]
            if left:
                self._holds[ident] = left
            else:
                self._holds.pop(ident, None)
        return objects

    def evict(self, ident: Hashable) -> Sequence[MemoryObject]:
        """The chunk leaves DDR: cancel its loads, end its holds; the caller gives the returned references back."""
        for load in self._loads.get(ident, ()):
            load.cancelled = True
        holds = self._holds.pop(ident, None)
        return self._drop(holds) if holds else ()

    def _drop(self, holds: Sequence[Hold]) -> list[MemoryObject]:
        self.held_bytes -= sum(hold.size for hold in holds)
        return [memory for hold in holds for memory in hold.objects]

    def pin(self, entry: DiskEntry) -> None:
        """Pin a file's entry for reading. Under disk_lock; the caller keeps the entry until unpin."""
        entry.pin()
        self._pins[id(entry)] = self._pins.get(id(entry), 0) + 1

    def unpin(self, entry: DiskEntry) -> None:
        """Under disk_lock."""
        entry.unpin()
        left = self._pins.pop(id(entry)) - 1
        if left:
            self._pins[id(entry)] = left

    def foreign_pins(self, entry: DiskEntry) -> int:
        """How many pins on the entry are not ours. Under disk_lock."""
        return entry.pin_count - self._pins.get(id(entry), 0)

    @property
    def counts(self) -> tuple[int, int]:
        """Holds and loads now."""
        return sum(map(len, self._holds.values())), sum(map(len, self._loads.values()))
