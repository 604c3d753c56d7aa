"""The two local tiers of a living engine, and the small steps on them that prefetch and evict share.

Locks are LMCache's own. They are taken with a timeout, because LMCache can hold disk_lock for ever (0.4.3 and 0.4.4:
LocalDiskBackend.batched_get_non_blocking after a failed allocation, LocalDiskBackend.remove after a missing file).
Order: the ledger's guard, then disk_lock or cpu_lock; disk_lock and cpu_lock are never held together.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from kvbus.protocol.hashes import ChunkHash
from worker_plugin.engine_types import Tags
from worker_plugin.lmcache_access import (
    CPU_TIER,
    DISK_TIER,
    CacheEngine,
    CachePolicy,
    CpuBackend,
    DiskBackend,
    DiskEntry,
    Key,
    Lock,
    stores_nothing,
)

log = logging.getLogger(__name__)

STUCK_TIMEOUT = 0.02
"""Seconds to wait for a lock that could not be had the last time: not every chunk shall cost the full wait."""

TOUCHED_AT_MOST = 4096


class TierStuck(Exception):
    """A tier's lock could not be had in time."""

    def __init__(self, tier: str, waited: float) -> None:
        super().__init__(f"the lock of {tier} is held by the engine and could not be had within {waited:g} s")


class TierLocks:
    """Takes the tiers' locks, never for ever."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._stuck: set[str] = set()

    def hold(self, tier: str, lock: Lock) -> _Held:
        """For `with`: takes the lock at once, gives it back at the end. Raises TierStuck."""
        timeout = STUCK_TIMEOUT if tier in self._stuck else self._timeout
        if not lock.acquire(timeout=timeout):
            if tier not in self._stuck:
                self._stuck.add(tier)
                log.error("%s is stuck: its lock could not be had within %g s", tier, timeout)
            raise TierStuck(tier, timeout)
        self._stuck.discard(tier)
        return _Held(lock)


class _Held:
    # A generator's contextmanager would cost more than all else that is done under most of these locks.
    __slots__ = ("_lock",)

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Tiers:
    """The engine's backends as they are now: LMCache can close and recreate them, so they are looked up each time.

    refusal: why nothing may be done at all, or "". others: backends that are neither DDR nor SSD.
    """

    __slots__ = ("cpu", "disk", "disk_bypassed", "others", "refusal")

    def __init__(self, engine: CacheEngine) -> None:
        self.cpu: CpuBackend | None = None
        self.disk: DiskBackend | None = None
        self.disk_bypassed = False
        self.others: tuple[str, ...] = ()
        self.refusal = ""
        manager = engine.storage_manager
        if stores_nothing(engine):
            self.refusal = "this rank leaves storing to the first rank (MLA)"
        elif manager is None:
            self.refusal = "the engine has no storage"
        elif manager.is_frozen():
            self.refusal = "the engine is frozen: its DDR must stay as it is"
        else:
            backends = manager.storage_backends
            self.cpu, self.disk = backends.get(CPU_TIER), backends.get(DISK_TIER)
            self.disk_bypassed = manager.is_backend_bypassed(DISK_TIER)
            if len(backends) > (self.cpu is not None) + (self.disk is not None):
                self.others = tuple(name for name in backends if name not in (CPU_TIER, DISK_TIER))


class Keys:
    """Builds LMCache's keys for the chunks of one command."""

    def __init__(self, engine: CacheEngine, tags: Tags) -> None:
        self._engine = engine
        self._tags = tags
        self._configs = request_configs(tags)
        self._layers = engine.num_layers if engine.use_layerwise else 0

    def of(self, chunks: Sequence[ChunkHash]) -> list[Key]:
        database = self._engine.token_database
        offsets = [self._engine.config.chunk_size] * len(chunks)
        found = database.process_tokens(hashes=list(chunks), offsets=offsets, request_configs=self._configs)
        return [key for _, _, key in found]

    def parts(self, key: Key) -> Sequence[Key]:
        """What the backends hold for the chunk: itself, or one key a layer."""
        return tuple(key.split_layers(self._layers)) if self._layers else (key,)

    def ident(self, chunk: ChunkHash) -> Hashable:
        """The ledger's name for the chunk: LMCache's keys take a microsecond to hash and one to compare."""
        return (chunk, self._tags) if self._tags else chunk


def request_configs(tags: Tags) -> dict[str, str] | None:
    """LMCache's request configs that make these tags."""
    return {f"lmcache.tag.{name.removeprefix('lmcache.tag.')}": value for name, value in tags} or None


def touch(policy: CachePolicy, key: Key, index: Any) -> None:
    """Count a hit, where the index still holds the key. Under the tier's lock."""
    if key in index:
        try:
            policy.update_on_hit(key, index)
        except KeyError:  # LFU loses count of a key that is stored again while it is pushed out (0.4.3, 0.4.4)
            policy.update_on_put(key)


def forget(policy: CachePolicy, key: Key) -> None:
    """Take a removed key out of the policy's own books. Under the tier's lock."""
    policy.update_on_force_evict(key)
    # LFU counts a key that is stored a second time from 1 again and keeps its old place too; left there, the next
    # search for a victim fails on it (cache_policy.lfu.LFUCachePolicy.update_on_put, 0.4.3 and 0.4.4).
    buckets = getattr(policy, "freq_to_keys", None)
    if buckets:
        for frequency in [frequency for frequency, keys in buckets.items() if key in keys]:
            del buckets[frequency][key]
            if not buckets[frequency]:
                del buckets[frequency]


def remove_from_cpu(cpu: CpuBackend, parts: Sequence[Key]) -> None:
    """Under cpu_lock. The memory is freed when the last reference goes."""
    for part in parts:
        if cpu.remove(part, force=False):
            forget(cpu.cache_policy, part)


def remove_from_disk(disk: DiskBackend, part: Key, entry: DiskEntry) -> str:
    """Under disk_lock: index entry, file and accounting. Returns what was not as it should be, or ""."""
    detail = ""
    try:
        disk.remove(part, force=False)
    except FileNotFoundError:
        detail = "its file was gone already"
    except OSError as error:
        detail = f"its file stays: {error}"
    # LocalDiskBackend.remove lowers `usage` only; without this the tier would count itself full of nothing.
    left = disk.current_cache_size - entry.size
    disk.current_cache_size = left if left > 0 else 0.0
    forget(disk.cache_policy, part)
    return detail


def being_written(disk: DiskBackend) -> set[Key]:
    """Keys whose file is being written. Under disk_lock no new write can begin behind this answer."""
    if not disk.disk_worker.put_tasks:
        return set()
    with disk.disk_worker.put_lock:
        return set(disk.disk_worker.put_tasks)


def any_written(disk: DiskBackend, parts: Sequence[Key]) -> bool:
    """Is one of the parts being written? Under disk_lock."""
    return bool(disk.disk_worker.put_tasks) and not being_written(disk).isdisjoint(parts)


def settle_requests(backend: CpuBackend | DiskBackend, index: Any) -> None:
    """Under the tier's lock, before a removal: do now the touching that pinned lookups have left to do.

    With async loading LMCache never does it; a key removed meanwhile would make its next pinned lookup raise KeyError.
    """
    waiting = backend.keys_in_request
    if waiting:
        for key in reversed(waiting[-TOUCHED_AT_MOST:]):
            touch(backend.cache_policy, key, index)
        backend.keys_in_request = []


def reconcile_disk(disk: DiskBackend, locks: TierLocks) -> bool:
    """Set the tier's size to the sum of its files' sizes; False while files are being written.

    LMCache adds a chunk's size again each time the chunk is stored again. Raises TierStuck.
    """
    with locks.hold(DISK_TIER, disk.disk_lock):
        if being_written(disk):
            return False
        disk.current_cache_size = float(sum(entry.size for entry in disk.dict.values()))
        return True
