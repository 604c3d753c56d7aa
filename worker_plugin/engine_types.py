"""What the executor sees of an engine: frozen values and two Protocols. No LMCache in here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.results import Outcome

Tags = tuple[tuple[str, str], ...]
"""Ordered (name, value) pairs of a request's `lmcache.tag.<name>` configs. LMCache compares them as a tuple."""


class ChunkOutcome(msgspec.Struct, frozen=True, gc=False):
    """What a verb did with one chunk. A list of them stands in the order of the chunks that were asked about.

    Chunks that end alike may share one, so that a command of many chunks costs no object for each.
    tiers: how many tiers it was removed from (evict); can be 1 where the outcome is not `evicted`, as when one of two
    tiers is stuck. bytes: KV bytes read into DDR (prefetch). detail: for people.
    """

    outcome: Outcome
    tiers: int = 0
    bytes: int = 0
    detail: str = ""


class ChunkLocation(msgspec.Struct, frozen=True, gc=False):
    """tiers: LMCache's own backend names, fastest first: LocalCPUBackend, LocalDiskBackend."""

    chunk_hash: ChunkHash
    tiers: tuple[str, ...]


class EngineInfo(msgspec.Struct, frozen=True):
    """Which shard an engine holds, and by which settings it hashes.

    tiers: names of its storing backends, remote ones included. stores: False on a rank that leaves storing to the
    first. hash_fingerprint: see kvbus.protocol.hashes.hash_fingerprint.
    """

    model: str
    world_size: int
    rank: int
    chunk_size: int
    hash_algorithm: str
    hash_fingerprint: str
    tiers: tuple[str, ...]
    stores: bool
    layerwise: bool
    lmcache_version: str


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counters by which a leak would show. After all commands and requests have ended, `clean` is True.

    pool_*: LMCache's DDR pool. cached_*: what its DDR index names. extra_refs: references on cached objects beyond the
    index's own. disk_drift: bytes by which the SSD backend's own size differs from the sum of its files' sizes.
    session_*: what running prefetches hold, are reading, and have set aside.
    """

    pool_objects: int
    pool_bytes: int
    pool_size: int
    cached_objects: int
    cached_bytes: int
    extra_refs: int
    cpu_pins: int
    disk_objects: int
    disk_bytes: int
    disk_pins: int
    disk_drift: int
    put_tasks: int
    loading_events: int
    cpu_locked: bool
    disk_locked: bool
    session_holds: int
    session_loads: int
    session_bytes: int

    @property
    def clean(self) -> bool:
        """Nothing is held, pinned, locked, in flight or lost, and every allocation of the pool is in the index."""
        return self.pool_objects == self.cached_objects and not any(
            (
                self.extra_refs,
                self.cpu_pins,
                self.disk_pins,
                self.disk_drift,
                self.put_tasks,
                self.loading_events,
                self.cpu_locked,
                self.disk_locked,
                self.session_holds,
                self.session_loads,
                self.session_bytes,
            )
        )


AHEAD = 4
"""Chunks that are begun before it is their turn to be loaded, so that a disk does not rest between two of them."""


def to_begin(chunks: Sequence[ChunkHash], place: int) -> Sequence[ChunkHash]:
    """The chunks to begin with when it is the turn of chunk number `place`."""
    return chunks[1 : 1 + AHEAD] if place == 0 else chunks[place + AHEAD : place + AHEAD + 1]


class PrefetchSession(Protocol):
    """One command's prefetch. Used by one thread; evicts of the same chunks may come from any other."""

    def ahead(self, chunk: ChunkHash) -> None:
        """The chunk will be loaded soon: where its file has to be read, begin with it. Does not wait for a disk.

        At most AHEAD chunks at a time, each to be followed by its `load` or `leave`.
        """
        ...

    def leave(self, chunk: ChunkHash) -> None:
        """The chunk will not be loaded after all: what was begun ahead is given back."""
        ...

    def load(self, chunk: ChunkHash) -> ChunkOutcome:
        """Bring one chunk into DDR.

        `loaded` and `resident` chunks are kept there until the session ends. Others: `missing` (in no tier asked
        about; or its file was gone or damaged, and the tier's index has been mended), `busy` (its file is being
        written: try again), `no_space`, `unsupported`, `tier_stuck`, `failed`, and `evicted`: an evict of the chunk
        came while it was read, so it was not brought back.
        """
        ...


class Engine(Protocol):
    """The verbs. Safe to call from several threads; none raises for a single chunk's sake."""

    @property
    def info(self) -> EngineInfo: ...

    def prefetching(
        self, *, tags: Tags = (), sources: tuple[str, ...] | None = None
    ) -> AbstractContextManager[PrefetchSession]:
        """A session in which chunks are loaded one by one. sources: tiers to read from; None means all."""
        ...

    def evict(
        self, chunks: Sequence[ChunkHash], *, tags: Tags = (), locations: tuple[str, ...] | None = None
    ) -> list[ChunkOutcome]:
        """Remove chunks from the named tiers (None: DDR and SSD), the last of the list first; answers in list order.

        Outcomes: `evicted`, `missing`, and where a copy had to stay: `in_use` (pinned by a request) and `busy` (being
        written), both of which leave every copy where it is, `unsupported`, `tier_stuck`, `failed`.
        """
        ...

    def lookup(self, chunks: Sequence[ChunkHash], *, tags: Tags = ()) -> list[ChunkLocation]:
        """Which local tiers hold each chunk. Touches, pins and waits for nothing; remote tiers are not asked."""
        ...

    def usage(self) -> EngineUsage: ...
