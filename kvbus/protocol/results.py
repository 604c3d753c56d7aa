"""What workers answer: one entry holds one worker's results for one batch of commands."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from kvbus.protocol.hashes import ChunkHashes, to_hashes
from kvbus.protocol.limits import MAX_HASHES, MAX_RESULTS_PER_ENTRY, Count, Millis, Name, Rank, Text


class Outcome(StrEnum):
    """What became of one chunk."""

    LOADED = "loaded"
    """Read from a slower tier into DDR."""
    RESIDENT = "resident"
    """Was in DDR already."""
    EVICTED = "evicted"
    """Removed from at least one tier."""
    MISSING = "missing"
    """In none of the tiers that were asked about, or its data was gone or damaged."""
    IN_USE = "in_use"
    """Held by a running request (pinned)."""
    BUSY = "busy"
    """Being written by the engine at this moment."""
    NO_SPACE = "no_space"
    """DDR has no room that may be taken."""
    UNSUPPORTED = "unsupported"
    """This tier, or this setting of the engine, cannot do it."""
    TIER_STUCK = "tier_stuck"
    """The engine holds the tier's lock and does not give it back."""
    FAILED = "failed"
    """Anything else; the error says what."""

    __hash__ = str.__hash__
    """As all its equals have; and Enum's own is Python, called for every chunk that is counted."""


class Status(StrEnum):
    """What became of one command in one worker."""

    DONE = "done"
    PARTIAL = "partial"
    """Carried out, but at least one chunk ended as in_use, busy, no_space, unsupported, tier_stuck or failed."""
    EXPIRED = "expired"
    """Its time to live was over before it could be carried out."""
    REJECTED = "rejected"
    """Could not be taken; it stands in the dead letters."""
    NOT_APPLICABLE = "not_applicable"
    """Not for this worker: another target, or a rank that stores nothing."""
    FAILED = "failed"
    DEFERRED = "deferred"
    """Interim: a chunk is in use and will be tried again; a final result follows."""

    __hash__ = str.__hash__

    @property
    def final(self) -> bool:
        return self is not Status.DEFERRED


class Counts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How many chunks ended how. They add up to `requested` where a prefetch, evict or lookup was carried out to its
    end (done, partial); in any other result those that are missing from the sum were not come to.

    evicted_pairs: (chunk, tier) pairs removed, as LMCache's own batched_remove counts them. bytes: KV bytes moved.
    """

    requested: Count = 0
    loaded: Count = 0
    resident: Count = 0
    evicted: Count = 0
    missing: Count = 0
    in_use: Count = 0
    busy: Count = 0
    no_space: Count = 0
    unsupported: Count = 0
    tier_stuck: Count = 0
    failed: Count = 0
    evicted_pairs: Count = 0
    bytes: Count = 0


class ChunkLists(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The hashes behind the outcomes that need a look, at most MAX_RESULT_HASHES each."""

    missing: ChunkHashes = ()
    in_use: ChunkHashes = ()
    busy: ChunkHashes = ()
    no_space: ChunkHashes = ()
    unsupported: ChunkHashes = ()
    tier_stuck: ChunkHashes = ()
    failed: ChunkHashes = ()

    def __post_init__(self) -> None:
        lists = self.missing or self.in_use or self.busy or self.no_space or self.unsupported or self.tier_stuck
        if not (lists or self.failed):
            return  # as nearly always
        for name in self.__struct_fields__:
            given = getattr(self, name)
            if given:
                msgspec.structs.force_setattr(self, name, to_hashes(given, field=name))


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a command, or part of it, was not carried out. `code` is one of the stable codes of kvbus.errors."""

    code: Name
    message: Text


class Held(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a lookup found its chunks.

    tiers: the engine's own names of its tiers, at most 8. masks: one byte a requested chunk, in the command's
    order; bit i is set when tiers[i] holds the chunk.
    """

    tiers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=8)] = ()
    masks: Annotated[bytes, msgspec.Meta(max_length=MAX_HASHES)] = b""

    def tiers_of(self, place: int) -> tuple[str, ...]:
        """The tiers that hold the command's chunk number `place`."""
        mask = self.masks[place] if place < len(self.masks) else 0
        return tuple(tier for bit, tier in enumerate(self.tiers) if mask >> bit & 1)


class CommandResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One worker's answer to one command."""

    command_id: Text
    type: Name
    status: Status
    lookup_id: Text | None = None
    counts: Counts = Counts()
    chunks: ChunkLists = ChunkLists()
    held: Held | None = None
    error: ErrorInfo | None = None
    attempt: Count = 1
    started_at_ms: Millis = 0
    duration_us: Count = 0


class Results(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An entry of the results stream: who answers, then the answers."""

    TYPE: ClassVar[str] = "results"

    worker: Name
    instance: Name
    rank: Rank
    epoch: Count
    results: Annotated[tuple[CommandResult, ...], msgspec.Meta(max_length=MAX_RESULTS_PER_ENTRY)] = ()
