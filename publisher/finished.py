"""What a publisher takes: one finished request, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbus.protocol.hashes import ChunkHash


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request, as the engine knows it. Building one checks nothing: that is left to the drain thread.

    chunk_hashes: in the text's order, each covering everything before it; None when they are not known yet.
    hashes_later: gives them then; called once, in the drain thread, so it must hold whatever it needs.
    chunk_size and *_tokens: in tokens. tags: ordered (name, value) pairs. context: the caller's own small map; the
    publisher keeps a reference, so it must not be changed afterwards.
    """

    request_id: str
    external_id: str | None = None
    instance: str
    model: str = ""
    reason: str
    chunk_hashes: tuple[ChunkHash, ...] | None = ()
    hashes_later: Callable[[], Sequence[ChunkHash]] | None = None
    chunk_size: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    hash_fingerprint: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    context: Mapping[str, Any] = {}
