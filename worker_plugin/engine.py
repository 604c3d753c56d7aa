"""kvbus's verbs on a real LMCacheEngine: prefetch, evict, lookup, chunk by chunk.

engine_types.py: what callers see. engine_prefetch.py, engine_evict.py: the verbs. engine_tiers.py: steps on LMCache's
tiers. engine_files.py: reading files. engine_probe.py: which chunks are nowhere. engine_ledger.py: what running
prefetches hold. lmcache_access.py: all that is touched of LMCache, and its check.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvbus.protocol.hashes import ChunkHash, fingerprint_tokens, hash_fingerprint
from worker_plugin.engine_evict import Evictor
from worker_plugin.engine_ledger import Ledger
from worker_plugin.engine_prefetch import Session
from worker_plugin.engine_tiers import Keys, TierLocks, Tiers, TierStuck, reconcile_disk
from worker_plugin.engine_types import (
    ChunkLocation,
    ChunkOutcome,
    Engine,
    EngineInfo,
    EngineUsage,
    PrefetchSession,
    Tags,
)
from worker_plugin.lmcache_access import (
    CPU_TIER,
    DISK_TIER,
    CacheEngine,
    DiskBackend,
    lmcache_version,
    pool_of,
    stores_nothing,
    verify,
)

__all__ = [
    "ChunkLocation",
    "ChunkOutcome",
    "Engine",
    "EngineInfo",
    "EngineUsage",
    "LMCacheEngineAdapter",
    "PrefetchSession",
    "Tags",
]

RECONCILE_SECONDS = 1.0


class LMCacheEngineAdapter:
    """An Engine on a living LMCacheEngine, after its post_init(). Starts no thread; nothing to close.

    max_share: part of the DDR pool that running prefetches may hold at once, 0 to 1. lock_timeout: seconds to wait for
    one of LMCache's locks before a chunk is answered with `tier_stuck`.
    Raises EngineIncompatible where the engine is not one that kvbus knows.
    """

    def __init__(self, engine: Any, *, max_share: float = 0.8, lock_timeout: float = 2.0) -> None:
        verify(engine)
        self._engine: CacheEngine = engine
        self._max_share = max_share
        self._ledger = Ledger()
        self._locks = TierLocks(lock_timeout)
        self._reconciled_at = 0.0
        self._info = _info(engine)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def prefetching(
        self, *, tags: Tags = (), sources: tuple[str, ...] | None = None
    ) -> AbstractContextManager[PrefetchSession]:
        return Session(self._engine, self._ledger, self._locks, tags=tags, sources=sources, max_share=self._max_share)

    def evict(
        self, chunks: Sequence[ChunkHash], *, tags: Tags = (), locations: tuple[str, ...] | None = None
    ) -> list[ChunkOutcome]:
        outcomes = Evictor(self._engine, self._ledger, self._locks, tags=tags, locations=locations).run(chunks)
        now = time.monotonic()
        if now - self._reconciled_at > RECONCILE_SECONDS:
            self._reconciled_at = now
            self.reconcile()
        return outcomes

    def lookup(self, chunks: Sequence[ChunkHash], *, tags: Tags = ()) -> list[ChunkLocation]:
        tiers = Tiers(self._engine)
        keys = Keys(self._engine, tags)
        indexes: list[tuple[str, Any]] = []
        if tiers.cpu is not None:
            indexes.append((CPU_TIER, tiers.cpu.hot_cache))
        if tiers.disk is not None:
            indexes.append((DISK_TIER, tiers.disk.dict))
        found = []
        for chunk, key in zip(chunks, keys.of(chunks), strict=True):
            parts = keys.parts(key)
            held = tuple(name for name, index in indexes if all(part in index for part in parts))
            found.append(ChunkLocation(chunk, held))
        return found

    def reconcile(self) -> bool:
        """Mend the SSD tier's size where storing chunks again has raised it; False while files are being written."""
        disk = Tiers(self._engine).disk
        try:
            return disk is None or reconcile_disk(disk, self._locks)
        except TierStuck:
            return False

    def usage(self) -> EngineUsage:
        tiers = Tiers(self._engine)
        cpu, disk = tiers.cpu, tiers.disk
        cached = list(cpu.hot_cache.values()) if cpu is not None else []
        entries = list(disk.dict.values()) if disk is not None else []
        pool = pool_of(cpu) if cpu is not None else None
        size = pool.address_manager.get_heap_size() if pool is not None else 0
        disk_bytes = sum(entry.size for entry in entries)
        with self._ledger.guard:
            holds, loads = self._ledger.counts
            held_bytes = self._ledger.held_bytes
        return EngineUsage(
            pool_objects=pool.num_active_allocations if pool is not None else 0,
            pool_bytes=size - pool.address_manager.get_free_size() if pool is not None else 0,
            pool_size=size,
            cached_objects=len(cached),
            cached_bytes=sum(memory.get_physical_size() for memory in cached),
            extra_refs=sum(memory.meta.ref_count - 1 for memory in cached),
            cpu_pins=sum(memory.meta.pin_count for memory in cached),
            disk_objects=len(entries),
            disk_bytes=disk_bytes,
            disk_pins=sum(entry.pin_count for entry in entries),
            disk_drift=_drift(disk, disk_bytes),
            put_tasks=len(disk.disk_worker.put_tasks) if disk is not None else 0,
            loading_events=_loading_events(self._engine),
            cpu_locked=cpu is not None and cpu.cpu_lock.locked(),
            disk_locked=disk is not None and disk.disk_lock.locked(),
            session_holds=holds,
            session_loads=loads,
            session_bytes=held_bytes,
        )


def _drift(disk: DiskBackend | None, disk_bytes: int) -> int:
    return 0 if disk is None else int(disk.current_cache_size) - disk_bytes


def _loading_events(engine: CacheEngine) -> int:
    from lmcache.v1.event_manager import EventStatus, EventType

    counted = (EventStatus.ONGOING, EventStatus.DONE)
    return sum(engine.event_manager.get_events_count_by_status(EventType.LOADING, status) for status in counted)


def _info(engine: CacheEngine) -> EngineInfo:
    chunk_size = engine.config.chunk_size
    found = engine.token_database.process_tokens(fingerprint_tokens(chunk_size), make_key=False)
    first_hash: ChunkHash = next(iter(found))[2]
    # LMCache falls back to Python's hash() where vLLM's functions cannot be had, whatever is configured.
    name = getattr(engine.token_database.hash_func, "kvbus_algorithm", None)
    algorithm = name or (
        "builtin" if engine.token_database.hash_func is hash else engine.config.pre_caching_hash_algorithm
    )
    manager = engine.storage_manager
    return EngineInfo(
        model=engine.metadata.model_name,
        world_size=engine.metadata.world_size,
        rank=engine.metadata.worker_id,
        chunk_size=chunk_size,
        hash_algorithm=algorithm,
        hash_fingerprint=hash_fingerprint(algorithm, chunk_size, first_hash),
        tiers=() if manager is None else tuple(manager.get_non_allocator_backends()),
        stores=not stores_nothing(engine),
        layerwise=engine.use_layerwise,
        lmcache_version=lmcache_version(),
    )
