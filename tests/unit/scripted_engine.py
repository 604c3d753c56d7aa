"""An engine whose tiers are two sets, for tests of what stands above: its steps can be held up or made to fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvbus.protocol.commands import DDR, SSD
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.results import Outcome
from worker_plugin.engine_types import ChunkLocation, ChunkOutcome, EngineInfo, EngineUsage, PrefetchSession, Tags


class ScriptedEngine:
    """Chunks in `ddr` and `ssd`; `pinned` ones stay. gate: loads wait for it. calls: what was asked, in order.

    held: verbs on these chunks wait for the chunk's own event.
    """

    def __init__(self, *, ssd: Sequence[ChunkHash] = (), ddr: Sequence[ChunkHash] = (), stores: bool = True) -> None:
        self.ssd, self.ddr = set(ssd), set(ddr)
        self.pinned: set[ChunkHash] = set()
        self.busy: set[ChunkHash] = set()
        self.held: dict[ChunkHash, threading.Event] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.loading = threading.Event()
        self.raises: Exception | None = None
        self.calls: list[tuple[str, tuple[ChunkHash, ...]]] = []
        self._info = EngineInfo(
            model="m",
            world_size=1,
            rank=0,
            chunk_size=64,
            hash_algorithm="builtin",
            hash_fingerprint="builtin/64/1",
            tiers=(DDR, SSD),
            stores=stores,
            layerwise=False,
            lmcache_version="0.4.3",
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @contextmanager
    def prefetching(self, *, tags: Tags = (), sources: tuple[str, ...] | None = None) -> Iterator[PrefetchSession]:
        yield self  # type: ignore[misc]

    def ahead(self, chunk: ChunkHash) -> None:
        self.calls.append(("ahead", (chunk,)))

    def leave(self, chunk: ChunkHash) -> None:
        self.calls.append(("leave", (chunk,)))

    def load(self, chunk: ChunkHash) -> ChunkOutcome:
        self.calls.append(("load", (chunk,)))
        if self.raises is not None:
            raise self.raises
        self.loading.set()
        assert self.gate.wait(20), "nobody opened the gate"
        self._wait_for(chunk)
        if chunk in self.busy:
            return ChunkOutcome(Outcome.BUSY)
        if chunk in self.ddr:
            return ChunkOutcome(Outcome.RESIDENT)
        if chunk not in self.ssd:
            return ChunkOutcome(Outcome.MISSING)
        self.ddr.add(chunk)
        return ChunkOutcome(Outcome.LOADED, bytes=100)

    def evict(
        self, chunks: Sequence[ChunkHash], *, tags: Tags = (), locations: tuple[str, ...] | None = None
    ) -> list[ChunkOutcome]:
        self.calls.append(("evict", tuple(chunks)))
        if self.raises is not None:
            raise self.raises
        return [self._evict(chunk, locations or (DDR, SSD)) for chunk in chunks]

    def _wait_for(self, chunk: ChunkHash) -> None:
        if chunk in self.held:
            assert self.held[chunk].wait(20), f"nobody let go of {chunk!r}"

    def _evict(self, chunk: ChunkHash, locations: tuple[str, ...]) -> ChunkOutcome:
        self._wait_for(chunk)
        if chunk in self.pinned:
            return ChunkOutcome(Outcome.IN_USE, detail="pinned")
        removed = 0
        for name, tier in ((DDR, self.ddr), (SSD, self.ssd)):
            if name in locations and chunk in tier:
                tier.discard(chunk)
                removed += 1
        return ChunkOutcome(Outcome.EVICTED if removed else Outcome.MISSING, tiers=removed)

    def lookup(self, chunks: Sequence[ChunkHash], *, tags: Tags = ()) -> list[ChunkLocation]:
        tiers = ((DDR, self.ddr), (SSD, self.ssd))
        return [ChunkLocation(chunk, tuple(name for name, tier in tiers if chunk in tier)) for chunk in chunks]

    def usage(self) -> EngineUsage:
        raise NotImplementedError
