"""What a memory system asks of every worker."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from kvbus.errors import InvalidMessage
from kvbus.protocol.hashes import ChunkHashes, to_hashes
from kvbus.protocol.limits import MAX_TAGS, Millis, Name, Rank, Text, Ttl

Tags = Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MAX_TAGS)]
"""Ordered (name, value) pairs. A chunk stored with tags is found only with the same tags in the same order."""
Tiers = Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=8)]
"""The engine's own names of its tiers, such as LocalCPUBackend (DDR) and LocalDiskBackend (SSD)."""

KNOWN_TIERS = ("LocalCPUBackend", "LocalDiskBackend", "PDBackend", "P2PBackend", "GdsBackend", "RemoteBackend")
DDR = "LocalCPUBackend"
SSD = "LocalDiskBackend"

PREFETCH_TTL_MS = 30_000
EVICT_TTL_MS = 300_000
LOOKUP_TTL_MS = 10_000


class Target(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Whom a command is for. An absent list means all."""

    models: tuple[Text, ...] | None = None
    instances: tuple[Name, ...] | None = None
    ranks: tuple[Rank, ...] | None = None

    def matches(self, *, model: str, instance: str, rank: int) -> bool:
        return (
            (self.models is None or model in self.models)
            and (self.instances is None or instance in self.instances)
            and (self.ranks is None or rank in self.ranks)
        )


class _Command(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    target: Target | None = None
    issued_at_ms: Millis | None = None
    """Server time. A hand-written command may leave it out: it then counts from when a worker first read it."""
    issuer: Text | None = None


class _ChunkCommand(_Command, frozen=True, omit_defaults=True, kw_only=True):
    chunk_hashes: ChunkHashes
    tags: Tags = ()

    def __post_init__(self) -> None:
        hashes = to_hashes(self.chunk_hashes)
        if not hashes:
            raise InvalidMessage("chunk_hashes is empty", hint="Name at least one chunk hash.")
        msgspec.structs.force_setattr(self, "chunk_hashes", hashes)


class Prefetch(_ChunkCommand, frozen=True, omit_defaults=True, kw_only=True):
    """Bring chunks from slower tiers into DDR; the first are the most important, in any order, gaps allowed.

    sources: the tiers to read from; absent means all that the worker can read.
    """

    TYPE: ClassVar[str] = "prefetch"
    lookup_id: Text | None = None
    sources: Tiers | None = None
    ttl_ms: Ttl = PREFETCH_TTL_MS


class Evict(_ChunkCommand, frozen=True, omit_defaults=True, kw_only=True):
    """Remove chunks from the named tiers, or from all. Chunks in use are removed once they are free, within ttl_ms."""

    TYPE: ClassVar[str] = "evict"
    lookup_id: Text | None = None
    locations: Tiers | None = None
    ttl_ms: Ttl = EVICT_TTL_MS


class Lookup(_ChunkCommand, frozen=True, omit_defaults=True, kw_only=True):
    """Tell which tiers hold each chunk. Changes nothing."""

    TYPE: ClassVar[str] = "lookup"
    lookup_id: Text | None = None
    ttl_ms: Ttl = LOOKUP_TTL_MS


class Ping(_Command, frozen=True, omit_defaults=True, kw_only=True):
    """Answer, after all that was asked before in this worker's short queue."""

    TYPE: ClassVar[str] = "ping"
    ttl_ms: Ttl = LOOKUP_TTL_MS


Command = Prefetch | Evict | Lookup | Ping
COMMANDS: tuple[type[Command], ...] = (Prefetch, Evict, Lookup, Ping)
