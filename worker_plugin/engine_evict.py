"""Evict: chunks out of DDR and SSD, but for those in use.

A chunk that is pinned in one tier stays in both: a request that has it pinned on the SSD will read it from DDR if a
prefetch has put it there, and LMCache 0.4.3 does not survive its going away between looking and reading. A chunk whose
file is being written stays too: it would come back, and a request could read the half-written file in DDR's stead.

The SSD copy goes first and then, in one step under the ledger's guard, the DDR copy, the loads in progress and the
holds of running prefetches: a load that began before an evict can therefore not bring the chunk back behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout

from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.results import Outcome
from worker_plugin.engine_ledger import Ledger
from worker_plugin.engine_probe import any_in, codes_of
from worker_plugin.engine_tiers import (
    Keys,
    TierLocks,
    Tiers,
    TierStuck,
    being_written,
    remove_from_cpu,
    remove_from_disk,
    settle_requests,
)
from worker_plugin.engine_types import ChunkOutcome, Tags
from worker_plugin.lmcache_access import (
    CPU_TIER,
    DISK_TIER,
    CacheEngine,
    CpuBackend,
    DiskBackend,
    Key,
    MemoryObject,
)

log = logging.getLogger(__name__)

GROUP = 16
"""Chunks handled under one hold of a tier's lock: the engine's own calls must not wait for a whole command."""

_ENDED = (ChunkOutcome(Outcome.MISSING), ChunkOutcome(Outcome.EVICTED, 1), ChunkOutcome(Outcome.EVICTED, 2))
"""How most chunks end, by the number of tiers that they left."""
# What is reported where a chunk ends differently in its tiers: the first of these that happened.
_GRAVEST = (Outcome.TIER_STUCK, Outcome.FAILED, Outcome.IN_USE, Outcome.BUSY, Outcome.UNSUPPORTED)


class _Chunk:
    """One chunk's way through an evict. What few chunks need is made when it is needed: thousands come at a time."""

    __slots__ = ("details", "ident", "kept", "parts", "pinned_on_disk", "tiers")

    def __init__(self, ident: Hashable, parts: Sequence[Key]) -> None:
        self.ident = ident
        self.parts = parts
        self.tiers = 0
        self.kept: tuple[Outcome, ...] = ()
        self.details: tuple[str, ...] = ()
        self.pinned_on_disk = False

    def keep(self, outcome: Outcome, detail: str) -> None:
        self.kept += (outcome,)
        self.details += (detail,)

    @property
    def in_use(self) -> bool:
        """A request has it pinned, or it is being written: it stays in every tier."""
        if not self.kept:
            return self.pinned_on_disk
        return self.pinned_on_disk or Outcome.IN_USE in self.kept or Outcome.BUSY in self.kept

    def outcome(self) -> ChunkOutcome:
        if not self.kept and not self.details:
            return _ENDED[self.tiers]
        if self.kept:
            found = next(outcome for outcome in _GRAVEST if outcome in self.kept)
        else:
            found = Outcome.EVICTED if self.tiers else Outcome.MISSING
        return ChunkOutcome(found, self.tiers, detail="; ".join(self.details))


def _most_pins(cpu: CpuBackend, parts: Sequence[Key]) -> int | None:
    """The most pins on any of the chunk's parts in DDR, None if it has none there.

    Never below 0: LMCache's own count is -1 for a moment where a chunk is unpinned twice.
    """
    most = None
    for part in parts:
        memory = cpu.hot_cache.get(part)
        if memory is not None:
            most = max(most or 0, memory.meta.pin_count)
    return most


class Evictor:
    """One evict command. Raises nothing for a chunk's or a tier's sake."""

    def __init__(
        self, engine: CacheEngine, ledger: Ledger, locks: TierLocks, *, tags: Tags, locations: tuple[str, ...] | None
    ) -> None:
        self._engine, self._ledger, self._locks = engine, ledger, locks
        self._keys = Keys(engine, tags)
        self._locations = locations
        self._tiers = Tiers(engine)

    def run(self, chunks: Sequence[ChunkHash]) -> list[ChunkOutcome]:
        tiers, keys = self._tiers, self._keys
        if tiers.refusal:
            return [ChunkOutcome(Outcome.UNSUPPORTED, detail=tiers.refusal)] * len(chunks)
        others = [name for name in tiers.others if self._locations is not None and name in self._locations]
        if not others and self._nowhere(chunks):
            return [_ENDED[0]] * len(chunks)
        found = keys.of(chunks)
        work = [_Chunk(keys.ident(chunk), keys.parts(key)) for chunk, key in zip(chunks, found, strict=True)]
        for end in range(len(work), 0, -GROUP):
            group = work[max(0, end - GROUP) : end][::-1]
            if tiers.cpu is not None and self._wants(DISK_TIER):
                self._look_at_cpu(tiers.cpu, group)
            if tiers.disk is not None:
                self._from_disk(tiers.disk, group)
            if tiers.cpu is not None and self._wants(CPU_TIER):
                self._from_cpu(tiers.cpu, group)
        if others:
            for item in work:
                item.keep(Outcome.UNSUPPORTED, f"kvbus does not remove from {', '.join(others)}")
        return [item.outcome() for item in work]

    def _nowhere(self, chunks: Sequence[ChunkHash]) -> bool:
        """Whether none of the chunks is in a tier, on its way into one, or being read by a prefetch."""
        cpu, disk = self._tiers.cpu, self._tiers.disk
        if self._engine.use_layerwise or not chunks:
            return False
        [key] = self._keys.of(chunks[:1])
        codes = codes_of(key, chunks)
        if codes is None:
            return False
        with self._ledger.guard:
            if any(self._ledger.counts):
                return False
            try:
                if disk is not None:
                    with self._locks.hold(DISK_TIER, disk.disk_lock):
                        if disk.disk_worker.put_tasks or any_in(disk.dict, key, codes):
                            return False
                if cpu is not None:
                    with self._locks.hold(CPU_TIER, cpu.cpu_lock):
                        return not any_in(cpu.hot_cache, key, codes)
                return True
            except TierStuck:
                return False  # chunk by chunk, then, with all that there is to tell

    def _wants(self, tier: str) -> bool:
        return self._locations is None or tier in self._locations

    def _look_at_cpu(self, cpu: CpuBackend, group: Sequence[_Chunk]) -> None:
        """Without the lock: it only spares a chunk its SSD copy; its DDR copy is looked at again under the lock."""
        for item in group:
            if _most_pins(cpu, item.parts):
                item.keep(Outcome.IN_USE, f"pinned in {CPU_TIER}")

    def _from_cpu(self, cpu: CpuBackend, group: Sequence[_Chunk]) -> None:
        with self._ledger.guard:
            freed: list[MemoryObject] = []
            try:
                with self._locks.hold(CPU_TIER, cpu.cpu_lock):
                    settle_requests(cpu, cpu.hot_cache)
                    for item in group:
                        if item.in_use:
                            continue
                        pins = _most_pins(cpu, item.parts)
                        if pins:
                            item.keep(Outcome.IN_USE, f"pinned in {CPU_TIER}")
                            continue
                        freed += self._ledger.evict(item.ident)
                        if pins is not None:
                            remove_from_cpu(cpu, item.parts)
                            item.tiers += 1
            except TierStuck as stuck:
                for item in group:
                    item.keep(Outcome.TIER_STUCK, str(stuck))
            finally:
                for memory in freed:
                    memory.ref_count_down()

    def _from_disk(self, disk: DiskBackend, group: Sequence[_Chunk]) -> None:
        """Find out what is pinned on the SSD or being written; remove the rest where that is asked for."""
        try:
            self._remove_files(disk, group)
            pinned = [item for item in group if item.pinned_on_disk]
            if pinned and self._drop_stale_pins(disk, pinned):
                self._remove_files(disk, pinned)
        except TierStuck as stuck:
            if self._wants(DISK_TIER):
                for item in group:
                    item.keep(Outcome.TIER_STUCK, str(stuck))
        for item in group:
            if item.pinned_on_disk:
                item.keep(Outcome.IN_USE, f"pinned in {DISK_TIER}")

    def _remove_files(self, disk: DiskBackend, group: Sequence[_Chunk]) -> None:
        wanted, bypassed = self._wants(DISK_TIER), self._tiers.disk_bypassed
        with self._locks.hold(DISK_TIER, disk.disk_lock):
            settle_requests(disk, disk.dict)
            writing = being_written(disk)
            index = disk.dict
            for item in group:
                item.pinned_on_disk = False
                if writing and not writing.isdisjoint(item.parts):
                    item.keep(Outcome.BUSY, "its file is being written")
                found = [(part, entry) for part in item.parts if (entry := index.get(part)) is not None]
                for _, entry in found:
                    if entry.pin_count > 0 and self._ledger.foreign_pins(entry) > 0:
                        item.pinned_on_disk = True
                if wanted and found and not item.in_use:
                    if bypassed:
                        item.keep(Outcome.UNSUPPORTED, f"{DISK_TIER} is bypassed: its health check failed")
                        continue
                    for part, entry in found:
                        if detail := remove_from_disk(disk, part, entry):
                            item.details += (detail,)
                    item.tiers += 1

    def _drop_stale_pins(self, disk: DiskBackend, pinned: Sequence[_Chunk]) -> bool:
        """Asynchronous loading leaves one pin on the SSD entry for each hit, for ever (0.4.3, 0.4.4). Drop those.

        A pin is stale when no load is under way and no lookup lists it. That is judged on the storage manager's own
        loop, where asynchronous lookups pin and register their load in one go, and only with local tiers, since a
        remote tier would let them pause between the two.
        """
        manager = self._engine.storage_manager
        if not self._engine.async_loading or self._engine.use_layerwise or self._tiers.others or manager is None:
            return False

        async def drop() -> bool:
            from lmcache.v1.event_manager import EventStatus, EventType

            if self._engine.event_manager.get_events_count_by_status(EventType.LOADING, EventStatus.ONGOING):
                return False
            listed: Counter[Key] = Counter()
            for by_tier in list(self._engine.lookup_pins.values()):
                listed.update(by_tier.get(DISK_TIER, ()))
            with self._locks.hold(DISK_TIER, disk.disk_lock):
                for item in pinned:
                    for part in item.parts:
                        if (entry := disk.dict.get(part)) is not None:
                            entry.pin_count -= max(0, self._ledger.foreign_pins(entry) - listed[part])
            return True

        answer = asyncio.run_coroutine_threadsafe(drop(), manager.loop)
        try:
            return answer.result(timeout=5.0)
        except FutureTimeout:
            answer.cancel()
            log.warning("the storage manager's loop did not answer within 5 s; pinned chunks stay on the SSD")
            return False
