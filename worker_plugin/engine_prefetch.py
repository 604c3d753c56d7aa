"""Prefetch: one command's chunks from SSD files into DDR, by a load path of our own.

LMCache's own prefetch leaks a reference for every chunk, can deadlock the SSD tier, stops at the first gap and
registers short files as KV (0.4.3 and 0.4.4). Here every byte is counted, no allocation is waited for, and whatever a
load takes it gives back.

A load is begun (`_begin`: pins, memory), its files are read, and it is completed (`_complete`: into DDR's index).
Chunks that are read ahead are begun early and read by other threads, and completed in their turn, like any other.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Self

from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.results import Outcome
from worker_plugin.engine_files import Changed, Damaged, Readers, read_exactly
from worker_plugin.engine_ledger import Ledger, Load
from worker_plugin.engine_tiers import (
    Keys,
    TierLocks,
    Tiers,
    TierStuck,
    any_written,
    forget,
    remove_from_cpu,
    remove_from_disk,
    touch,
)
from worker_plugin.engine_types import ChunkOutcome, Tags
from worker_plugin.lmcache_access import (
    CPU_TIER,
    DISK_TIER,
    CacheEngine,
    CpuBackend,
    DiskBackend,
    DiskEntry,
    Key,
    MemoryObject,
    pool_of,
)

log = logging.getLogger(__name__)


class Ended(NamedTuple):
    """How one load ended, before the chunk's hash is put to it."""

    outcome: Outcome
    size: int = 0
    detail: str = ""


class _Reading:
    """A load that has begun: what it has pinned and allocated until it ends. need: bytes a part.

    ahead: None where the session reads for itself.
    """

    __slots__ = ("ahead", "cpu", "disk", "entries", "ident", "load", "need", "objects", "parts")

    def __init__(
        self, cpu: CpuBackend, disk: DiskBackend | None, ident: Hashable, parts: Sequence[Key], load: Load
    ) -> None:
        self.cpu, self.disk, self.ident, self.parts, self.load = cpu, disk, ident, parts, load
        self.entries: Sequence[DiskEntry] = ()
        self.objects: list[MemoryObject] = []
        self.need = 0
        self.ahead: Future[None] | None = None

    def read(self) -> None:
        """All parts' files into their memory. Raises what read_exactly raises."""
        assert self.disk is not None
        for entry, memory in zip(self.entries, self.objects, strict=True):
            direct = self.disk.use_odirect and self.need % self.disk.os_disk_bs == 0
            buffer = memory.byte_array[: self.need]
            try:
                read_exactly(entry.path, buffer, entry.size, direct=direct)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                read_exactly(entry.path, buffer, entry.size)  # no O_DIRECT here, or the pool is not aligned to it
            memory.meta.cached_positions = entry.cached_positions


class Session:
    """See engine_types.PrefetchSession. At its end everything is where it was, but for the chunks now in DDR."""

    def __init__(
        self,
        engine: CacheEngine,
        ledger: Ledger,
        locks: TierLocks,
        *,
        tags: Tags,
        sources: tuple[str, ...] | None,
        max_share: float,
    ) -> None:
        self._engine, self._ledger, self._locks = engine, ledger, locks
        self._keys = Keys(engine, tags)
        self._sources = sources
        self._max_share = max_share
        self._order: dict[Hashable, Sequence[Key]] = {}
        self._readers = Readers()
        self._ahead: dict[Hashable, _Reading] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give all held references back, and leave the first chunks as the last ones that LRU would push out."""
        while self._ahead:
            self._abandon(self._ahead.popitem()[1])
        self._readers.close()
        with self._ledger.guard:
            order, self._order = self._order, {}
            objects = self._ledger.release(self, list(order))
            cpu = Tiers(self._engine).cpu
            try:
                if cpu is None:
                    return
                # Under cpu_lock: LMCache's layerwise victim search believes that a chunk's layers are free together.
                with self._locks.hold(CPU_TIER, cpu.cpu_lock):
                    for parts in reversed(order.values()):
                        for part in reversed(parts):
                            touch(cpu.cache_policy, part, cpu.hot_cache)
                    while objects:
                        objects.pop().ref_count_down()
            except TierStuck:
                log.warning("a prefetch ended while DDR's lock was stuck")
            finally:
                while objects:
                    objects.pop().ref_count_down()

    def ahead(self, chunk: ChunkHash) -> None:
        """See engine_types.PrefetchSession.ahead. Raises nothing: `load` will meet it again, and tell."""
        try:
            ident = self._keys.ident(chunk)
            tiers = Tiers(self._engine)
            parts = self._parts(chunk)
            if ident in self._ahead or not _may_read(tiers, parts):
                return
            begun = self._begin(tiers, ident, parts)
            if isinstance(begun, _Reading):
                self._ahead[ident] = begun
                begun.ahead = self._readers.submit(begun.read)
        except Exception:
            log.debug("no reading ahead for chunk %s", chunk, exc_info=True)

    def leave(self, chunk: ChunkHash) -> None:
        """See engine_types.PrefetchSession.leave."""
        begun = self._ahead.pop(self._keys.ident(chunk), None)
        if begun is not None:
            self._abandon(begun)

    def load(self, chunk: ChunkHash) -> ChunkOutcome:
        """Bring one chunk into DDR; see engine_types.PrefetchSession.load. Raises nothing."""
        try:
            ident = self._keys.ident(chunk)
            begun = self._ahead.pop(ident, None) or self._begin(Tiers(self._engine), ident, self._parts(chunk))
            ended = self._complete(begun) if isinstance(begun, _Reading) else begun
        except TierStuck as stuck:
            ended = Ended(Outcome.TIER_STUCK, detail=str(stuck))
        except Exception as error:
            log.exception("prefetch of chunk %s failed", chunk)
            ended = Ended(Outcome.FAILED, detail=f"{type(error).__name__}: {error}")
        return ChunkOutcome(ended.outcome, bytes=ended.size, detail=ended.detail)

    def _parts(self, chunk: ChunkHash) -> Sequence[Key]:
        return self._keys.parts(self._keys.of([chunk])[0])

    def _begin(self, tiers: Tiers, ident: Hashable, parts: Sequence[Key]) -> _Reading | Ended:
        """A load whose files are to be read, or how it ends without."""
        cpu = tiers.cpu
        if tiers.refusal or cpu is None:
            return Ended(Outcome.UNSUPPORTED, detail=tiers.refusal or "there is no DDR tier")
        if not cpu.use_hot:
            return Ended(Outcome.UNSUPPORTED, detail="DDR is off as a tier (local_cpu, or set_hot_cache)")
        limit = int(pool_of(cpu).address_manager.get_heap_size() * self._max_share)
        with self._ledger.guard:
            if self._take_resident(cpu, ident, parts, limit):
                return Ended(Outcome.RESIDENT)
            reading = _Reading(cpu, tiers.disk, ident, parts, self._ledger.begin(ident))
        refusal: Ended | None = Ended(Outcome.FAILED, detail="the load was broken off")
        try:
            refusal = self._prepare(tiers, reading, limit)
        finally:
            if refusal is not None:
                self._end(reading, refusal)
        return reading if refusal is None else refusal

    def _take_resident(self, cpu: CpuBackend, ident: Hashable, parts: Sequence[Key], limit: int) -> bool:
        """Under the guard: where DDR has the chunk, hold it for the session. Beyond the share it is left unheld."""
        with self._locks.hold(CPU_TIER, cpu.cpu_lock):
            objects = [memory for part in parts if (memory := cpu.hot_cache.get(part)) is not None]
            if len(objects) < len(parts):
                return False
            size = sum(memory.get_physical_size() for memory in objects)
            if not self._ledger.holds(ident, self) and self._ledger.held_bytes + size <= limit:
                for memory in objects:
                    memory.ref_count_up()
                self._ledger.hold(ident, self, objects, size)
            self._order.setdefault(ident, parts)
            return True

    def _elsewhere(self, tiers: Tiers) -> Ended:
        """Not in the local tiers: is there another that may have it?"""
        others = [name for name in tiers.others if self._sources is None or name in self._sources]
        if others:  # loading from there would wait for memory on LMCache's own event loop, perhaps for ever
            return Ended(Outcome.UNSUPPORTED, detail=f"may be in {', '.join(others)}, from which kvbus does not load")
        return Ended(Outcome.MISSING)

    def _prepare(self, tiers: Tiers, reading: _Reading, limit: int) -> Ended | None:
        """Pins on the files and memory for what is in them; or why there is nothing to be read."""
        disk, parts = tiers.disk, reading.parts
        if disk is None or (self._sources is not None and DISK_TIER not in self._sources):
            return self._elsewhere(tiers)
        if tiers.disk_bypassed:
            return Ended(Outcome.UNSUPPORTED, detail=f"{DISK_TIER} is bypassed: its health check failed")
        with self._locks.hold(DISK_TIER, disk.disk_lock):
            if any_written(disk, parts):
                return Ended(Outcome.BUSY, detail="its file is being written")
            entries = [entry for part in parts if (entry := disk.dict.get(part)) is not None]
            if len(entries) == len(parts):
                for entry in entries:
                    self._ledger.pin(entry)
                reading.entries = entries
        if not entries:
            return self._elsewhere(tiers)
        if len(entries) < len(parts):
            return Ended(Outcome.MISSING, detail=f"only {len(entries)} of its {len(parts)} layers are there")
        first = entries[0]
        if self._engine.metadata.get_num_groups() > 1:
            # LocalDiskBackend remembers the shape of the first group only (0.4.3, 0.4.4).
            return Ended(Outcome.UNSUPPORTED, detail="the model has several groups of KV layers")
        if any(entry.shape != first.shape or entry.dtype != first.dtype for entry in entries[1:]):
            return Ended(Outcome.UNSUPPORTED, detail="its layers differ in shape")
        with self._ledger.guard:
            if not self._ledger.reserve(reading.load, sum(entry.size for entry in entries), limit):
                return Ended(Outcome.NO_SPACE, detail=f"prefetches may hold {limit:,} bytes of DDR at once")
        reading.objects = self._allocate(reading.cpu, first, parts)
        if not reading.objects:
            return Ended(Outcome.NO_SPACE, detail="DDR is full of chunks that are in use")
        reading.need = first.shape.numel() * first.dtype.itemsize
        return None

    def _complete(self, reading: _Reading) -> Ended:
        """Wait for the files, or read them; then into DDR with them."""
        ended = Ended(Outcome.FAILED, detail="the load was broken off")
        damage = ""
        try:
            if reading.ahead is None or reading.ahead.cancel():  # no reader has begun: no use in waiting for one
                reading.read()
            else:
                reading.ahead.result()
            ended = self._take_in(reading)
        except FileNotFoundError:
            damage = "its file was gone"
        except Damaged as error:
            damage = str(error)
        except Changed:
            ended = Ended(Outcome.BUSY, detail="its file was written to while it was read")
        except OSError as error:
            ended = Ended(Outcome.FAILED, detail=f"its file could not be read: {error}")
        finally:
            ended = self._end(reading, ended, damage)
        return ended

    def _take_in(self, reading: _Reading) -> Ended:
        """What was read, into DDR's index, unless an evict came meanwhile."""
        with self._ledger.guard:
            if reading.load.cancelled:
                return Ended(Outcome.EVICTED, detail="an evict came while it was read")
            objects = reading.objects
            if not self._put(reading.cpu, reading.parts, objects):
                return Ended(Outcome.FAILED, detail="DDR did not take it")
            size = sum(memory.get_physical_size() for memory in objects)
            self._ledger.hold(reading.ident, self, objects, size)
            self._order.setdefault(reading.ident, reading.parts)
            reading.objects = []
        return Ended(Outcome.LOADED, size=reading.need * len(reading.parts))

    def _abandon(self, reading: _Reading) -> None:
        """End a load that nobody wants any more. Waits for its reader, which writes into its memory."""
        if reading.ahead is not None and not reading.ahead.cancel():
            reading.ahead.exception()
        self._end(reading, Ended(Outcome.EVICTED))

    def _end(self, reading: _Reading, ended: Ended, damage: str = "") -> Ended:
        """Give back what the load has taken, and is not DDR's now."""
        try:
            for memory in reading.objects:
                memory.ref_count_down()
            if reading.disk is not None and reading.entries:
                return self._finish(reading.disk, reading.parts, reading.entries, ended, damage)
            return ended
        finally:
            with self._ledger.guard:
                self._ledger.end(reading.ident, reading.load)

    def _finish(
        self, disk: DiskBackend, parts: Sequence[Key], entries: Sequence[DiskEntry], ended: Ended, damage: str
    ) -> Ended:
        """Unpin; count the hit, or take a damaged chunk out of the tier's index."""
        try:
            with self._locks.hold(DISK_TIER, disk.disk_lock):
                for entry in entries:
                    self._ledger.unpin(entry)
                if damage:
                    return self._mend(disk, parts, entries, damage)
                if ended.outcome is Outcome.LOADED:
                    for part in reversed(parts):
                        touch(disk.cache_policy, part, disk.dict)
        except TierStuck:
            # The tier is lost until the engine starts again; a pin left behind would outlive even that repair.
            for entry in entries:
                self._ledger.unpin(entry)
            if damage:
                return Ended(Outcome.MISSING, detail=f"{damage}; {DISK_TIER} is stuck and keeps its entry")
        return ended

    def _mend(self, disk: DiskBackend, parts: Sequence[Key], entries: Sequence[DiskEntry], damage: str) -> Ended:
        """Under disk_lock: forget a chunk whose data is gone or damaged, all layers of it."""
        if any_written(disk, parts):
            return Ended(Outcome.BUSY, detail=f"{damage}; it is being written anew")
        current = [(part, entry) for part in parts if (entry := disk.dict.get(part)) is not None]
        if not current:
            return Ended(Outcome.EVICTED, detail="an evict came while it was read")
        if any(entry is not seen for (_, entry), seen in zip(current, entries, strict=False)):
            return Ended(Outcome.BUSY, detail=f"{damage}; it has been written anew")
        if any(self._ledger.foreign_pins(entry) > 0 for _, entry in current):
            # An asynchronous lookup asserts that what it pinned is there, holding disk_lock: never remove under it.
            return Ended(Outcome.MISSING, detail=f"{damage}; a request has it pinned, so its entry stays for now")
        for part, entry in current:
            remove_from_disk(disk, part, entry)
        log.warning("%s: chunk %s: %s; taken out of the index", DISK_TIER, parts[0], damage)
        return Ended(Outcome.MISSING, detail=f"{damage}; taken out of the tier's index")

    def _put(self, cpu: CpuBackend, parts: Sequence[Key], objects: list[MemoryObject]) -> bool:
        """Under the guard: into DDR's index. The allocation's own reference becomes the session's hold.

        Where the engine has put the same chunk there meanwhile, `objects` holds the engine's object afterwards.
        """
        cpu.batched_submit_put_task(parts, objects)
        if all(cpu.hot_cache.get(part) is memory for part, memory in zip(parts, objects, strict=True)):
            return True
        with self._locks.hold(CPU_TIER, cpu.cpu_lock):
            for place, part in enumerate(parts):
                cached = cpu.hot_cache.get(part)
                if cached is None:
                    return False
                if cached is not objects[place]:
                    cached.ref_count_up()
                    objects[place].ref_count_down()
                    objects[place] = cached
        return True

    def _allocate(self, cpu: CpuBackend, entry: DiskEntry, parts: Sequence[Key]) -> list[MemoryObject]:
        """Memory for every part, or nothing. Chunks that nobody uses are pushed out for it; nothing is waited for."""
        if not self._engine.use_layerwise:
            memory = cpu.allocate(entry.shape, entry.dtype, entry.fmt, busy_loop=False)
            return [] if memory is None else [memory]
        # Not LMCache's own eviction here: for one layer it frees all, referenced or not, and fails if one is missing.
        while True:
            found = cpu.batched_allocate(
                entry.shape, entry.dtype, len(parts), entry.fmt, eviction=False, busy_loop=False
            )
            if found is not None:
                return found
            with self._locks.hold(CPU_TIER, cpu.cpu_lock):
                if not _push_out_one_chunk(cpu, len(parts)):
                    return []


def _may_read(tiers: Tiers, parts: Sequence[Key]) -> bool:
    """Whether it looks as if there were a file to read, without locks: `_begin` looks again."""
    cpu, disk = tiers.cpu, tiers.disk
    return cpu is not None and disk is not None and parts[0] in disk.dict and parts[0] not in cpu.hot_cache


def _push_out_one_chunk(cpu: CpuBackend, layers: int) -> bool:
    """Under cpu_lock: all layers of the policy's next victim, unless one of them is in use."""
    victims = cpu.cache_policy.get_evict_candidates(cpu.hot_cache, num_candidates=1)
    if not victims:
        return False
    parts = [part for part in victims[0].split_layers(layers) if part in cpu.hot_cache]
    metas = [cpu.hot_cache[part].meta for part in parts]
    if any(meta.pin_count > 0 or meta.ref_count > 1 for meta in metas):
        forget(cpu.cache_policy, victims[0])
        cpu.cache_policy.update_on_put(victims[0])  # LFU has taken it out of its books already
        return False
    remove_from_cpu(cpu, parts)
    return True
