"""The chains that this process saw last: of the next one only what is new has to be sent.

An event names all chunks of its session; the server has to see only those behind the part that it knows already. It
compares tokens: should the session's chain be of another event than the one remembered here, the whole is sent.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from kvbus.protocol.commands import Tags
from kvbus.protocol.events import RequestFinished
from kvbus.protocol.hashes import ChunkHash
from kvbus.streams.connection import Argument
from kvbus.streams.ledger_store import encode_tags, pack, space_of

KEEP_HASHES = 1_000_000
"""Some 40 MB."""
SHORT = 64
"""Chunks: a chain up to this length is not worth remembering."""


class Chain(msgspec.Struct, frozen=True):
    """A session's chunks as an event told them. token: names the event."""

    hashes: tuple[ChunkHash, ...]
    tags: Tags
    token: str

    @classmethod
    def of(cls, event: RequestFinished) -> Chain:
        return cls(event.chunk_hashes, event.tags, f"{event.epoch}:{event.seq}:{event.publisher}")

    def arguments(self, *, after: Chain | None = None) -> dict[str, Argument]:
        """What a turn sends. after: the chain that the session is thought to have."""
        common = _common(after.hashes, self.hashes) if after is not None and after.tags == self.tags else 0
        rest = chain_arguments(self.hashes[common:], self.tags)
        if common and rest["width"] != 8:
            common, rest = 0, chain_arguments(self.hashes, self.tags)
        return {**rest, "from": common, "base": after.token if after is not None else "", "mark": self.token}


def chain_arguments(hashes: tuple[ChunkHash, ...], tags: Tags) -> dict[str, Argument]:
    packed = pack(hashes)
    return {"packed": packed.data, "width": packed.width, "space": space_of(tags), "tags": encode_tags(tags)}


class KnownChains:
    """Session to the chain that its last event brought, the newest KEEP_HASHES of them. Safe for threads."""

    def __init__(self, *, keep_hashes: int = KEEP_HASHES, short: int = SHORT) -> None:
        self._keep, self._short = keep_hashes, short
        self._lock = threading.Lock()
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self._hashes = 0

    def get(self, session: str) -> Chain | None:
        with self._lock:
            return self._chains.get(session)

    def keep(self, session: str, chain: Chain) -> None:
        """This is the session's chain now."""
        with self._lock:
            before = self._chains.pop(session, None)
            self._hashes -= len(before.hashes) if before is not None else 0
            if session and len(chain.hashes) > self._short and isinstance(chain.hashes[0], int):
                self._chains[session] = chain
                self._hashes += len(chain.hashes)
            while self._hashes > self._keep:
                self._hashes -= len(self._chains.popitem(last=False)[1].hashes)


def _common(one: tuple[ChunkHash, ...], other: tuple[ChunkHash, ...]) -> int:
    """Leading items that both have, found by comparing slices: that is done in C."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
