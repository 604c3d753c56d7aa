"""What publishers and workers announce."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from kvbus.errors import InvalidMessage, OverLimit
from kvbus.protocol.commands import Tags
from kvbus.protocol.hashes import ChunkHashes, to_hashes
from kvbus.protocol.limits import MAX_CONTEXT_BYTES, MAX_NESTING, Count, Millis, Name, Rank, Text


class FinishReason(StrEnum):
    """Why a request ended, in vLLM's own words. vLLM's scheduler reports a stop string as abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class RequestFinished(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One finished request and the chunks that hold its KV.

    request_id: vLLM's internal id; external_id: the same as the client knows it. chunk_hashes: in the text's
    order, each covering everything before it. context: the `kvbus` map of the request's kv_transfer_params, as
    it came. publisher, epoch, seq: count without holes within one epoch, so that readers see what is missing.
    """

    TYPE: ClassVar[str] = "request.finished"

    request_id: Text
    external_id: Text | None = None
    instance: Name
    model: Text = ""
    reason: FinishReason
    chunk_hashes: ChunkHashes = ()
    chunk_size: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    hash_fingerprint: Text = ""
    tags: Tags = ()
    context: dict[str, Any] = {}
    publisher: Name
    epoch: Count
    seq: Count
    finished_at_ms: Millis

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "chunk_hashes", to_hashes(self.chunk_hashes))
        if self.context:
            check_context(self.context)


class _WorkerEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    worker: Name
    instance: Name
    rank: Rank
    epoch: Count
    at_ms: Millis = 0


class WorkerStarted(_WorkerEvent, frozen=True, omit_defaults=True, kw_only=True):
    """A worker begins. Its DDR and SSD are empty: LMCache's index of the disk does not outlive the process."""

    TYPE: ClassVar[str] = "worker.started"
    model: Text = ""
    world_size: Count = 1
    chunk_size: Count = 0
    hash_fingerprint: Text = ""
    tiers: tuple[Name, ...] = ()


class WorkerStopped(_WorkerEvent, frozen=True, omit_defaults=True, kw_only=True):
    """A worker ended in good order. After a crash there is none: its heartbeat lapses."""

    TYPE: ClassVar[str] = "worker.stopped"
    reason: Text = ""


class WorkerGap(_WorkerEvent, frozen=True, omit_defaults=True, kw_only=True):
    """A worker missed commands: they were trimmed away, or the server lost them.

    missed: how many at the least is known; None: unknown. after, before: entry ids around the hole, both excluded.
    """

    TYPE: ClassVar[str] = "worker.gap"
    reason: Text
    missed: Count | None = None
    after: Text = ""
    before: Text = ""


Event = RequestFinished | WorkerStarted | WorkerStopped | WorkerGap
EVENTS: tuple[type[Event], ...] = (RequestFinished, WorkerStarted, WorkerStopped, WorkerGap)


def check_context(context: dict[str, Any]) -> None:
    """Raise InvalidMessage or OverLimit unless the map is plain JSON-like data within the limits."""
    _check_plain(context, "context", 1)
    try:
        size = len(msgspec.msgpack.encode(context))
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"context cannot be encoded: {error}") from None
    if size > MAX_CONTEXT_BYTES:
        raise OverLimit(f"context has {size:,} bytes; the limit is {MAX_CONTEXT_BYTES:,}")


def _check_plain(value: Any, where: str, depth: int) -> None:
    if depth > MAX_NESTING - 1:  # the body that holds the context is one level
        raise OverLimit(f"{where[:80]} is nested more than {MAX_NESTING - 1} levels deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidMessage(f"{where[:80]} has a key that is not text: {key!r:.40}")
            _check_plain(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _check_plain(item, f"{where}[{place}]", depth + 1)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise InvalidMessage(f"{where[:80]} is {value}, which JSON cannot carry")
    elif value is not None and not isinstance(value, str | int | bool):
        raise InvalidMessage(f"{where[:80]} is a {type(value).__name__}; only JSON types are allowed")
