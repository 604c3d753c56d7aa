"""What to publish of a finished vLLM request. Plain values in; nothing of vLLM is imported here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbus.protocol.events import FinishReason
from kvbus.protocol.hashes import ChunkHash
from publisher.finished import FinishedRequest

CONTEXT_KEY = "kvbus"
"""The key of kv_transfer_params whose map travels with the event as it is."""
TAG_PREFIX = "lmcache.tag."
"""LMCache's own name for tags among a request's configs (CacheEngineKey, 0.4.3)."""

# RequestStatus of vLLM 0.18; it reports an ignored request (prompt too long) to its client as `length`, too.
_REASONS = {
    "FINISHED_STOPPED": FinishReason.STOP,
    "FINISHED_LENGTH_CAPPED": FinishReason.LENGTH,
    "FINISHED_IGNORED": FinishReason.LENGTH,
    "FINISHED_ABORTED": FinishReason.ABORT,
    "FINISHED_ERROR": FinishReason.ERROR,
    "FINISHED_REPETITION": FinishReason.REPETITION,
}
_INTERNAL_ID = re.compile(r"(?:\d+_(?=chatcmpl-|cmpl-))?(.+)-[0-9a-f]{8}", re.ASCII | re.DOTALL)


def finish_reason(status: str) -> str:
    """The event's reason for a status's name, such as FINISHED_STOPPED; `error` for one not known."""
    return _REASONS.get(status.rpartition(".")[2], FinishReason.ERROR)


def external_id(request_id: str) -> str | None:
    """The id as the client knows it; None when the internal one does not have vLLM 0.18's form.

    vLLM appends `-` and 8 hex digits, and for n > 1 puts `<index>_` in front.
    """
    found = _INTERNAL_ID.fullmatch(request_id)
    return found[1] if found else None


def tags_of(request_configs: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    """LMCache's tags among a request's configs, in their order: (name without prefix, value as text)."""
    if not request_configs:
        return ()
    return tuple(
        (key.removeprefix(TAG_PREFIX), str(value))
        for key, value in request_configs.items()
        if isinstance(key, str) and key.startswith(TAG_PREFIX)
    )


def finished_request(
    *,
    request_id: str,
    instance: str,
    model: str,
    status: str,
    chunk_hashes: Sequence[ChunkHash] | None,
    chunk_size: int,
    prompt_tokens: int,
    output_tokens: int,
    cached_tokens: int,
    hash_fingerprint: str,
    hashes_later: Callable[[], Sequence[ChunkHash]] | None = None,
    request_configs: Mapping[str, Any] | None = None,
    kv_transfer_params: Mapping[str, Any] | None = None,
) -> FinishedRequest:
    """The event of a request that vLLM has finished. Cheap: it runs on the scheduler's thread.

    status: the name of its RequestStatus. cached_tokens: num_cached_tokens, -1 if it was never scheduled.
    """
    context = kv_transfer_params.get(CONTEXT_KEY) if kv_transfer_params else None
    return FinishedRequest(
        request_id=request_id,
        external_id=external_id(request_id),
        instance=instance,
        model=model,
        reason=finish_reason(status),
        chunk_hashes=None if chunk_hashes is None else tuple(chunk_hashes),
        hashes_later=hashes_later,
        chunk_size=chunk_size,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=max(0, cached_tokens),
        hash_fingerprint=hash_fingerprint,
        tags=tags_of(request_configs),
        context=context if isinstance(context, Mapping) else {},
    )
